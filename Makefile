# `make` lists the targets. CI runs `make test`, which is also what you run before a commit.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL: # the steps share cargo's lock and the terminal; each step is parallel by itself
MAKEFLAGS += --no-print-directory

# tools/environment.py makes both environments. Its opening lines say why there are two.
VENV := build/venv
PY := $(VENV)/bin/python
# Further arguments for a program that a target runs. DEMO_ARGS: examples/demo.py; with --hosts, examples/demo_hosts.py; with --hang,
# examples/demo_hang.py; with --preempt, examples/demo_preempt.py; with --node-0-dies, examples/demo_node_0.py.
# PYTEST_ARGS: pytest. UPSTREAM_ARGS: tests/upstream/run.py. BENCH_ARGS: benches/rendezvous.py. GPU_CHECK_ARGS: tools/gpu_check.py. The other benchmarks have STORE_BENCH_ARGS,
# PROCESS_BENCH_ARGS, AGENT_BENCH_ARGS, RUN_BENCH_ARGS, WARM_BENCH_ARGS, ETCD_BENCH_ARGS and IN_PLACE_BENCH_ARGS.
DEMO_ARGS ?=
PYTEST_ARGS ?=
UPSTREAM_ARGS ?=
BENCH_ARGS ?=
STORE_BENCH_ARGS ?=
AGENT_BENCH_ARGS ?=
RUN_BENCH_ARGS ?=
GPU_CHECK_ARGS ?=
# Flags for cargo. CI sets --locked, so that an outdated Cargo.lock is an error only there.
CARGO_FLAGS ?=
# Number of pytest's processes. Most tests wait, so it may be larger than the number of cores.
PYTEST_PROCESSES ?= 4
PYTEST = $(PY) -m pytest -n $(PYTEST_PROCESSES) --dist worksteal

# Tests and their wheel are built in one profile and with one set of features, so that cargo compiles each crate once. This is why
# the binding is named for tests of the core, and why this wheel has the feature `sim`.
TESTED := -p elastic_rs -p elastic_rs_sim -p elastic_rs_py --all-features
TESTED_WHEEL := --profile dev --features experimental-inspect,elastic_rs/sim

# The interpreter for pyo3's build. If it followed PATH, every change of PATH would rebuild pyo3.
export PYO3_PYTHON := $(CURDIR)/$(PY)

# These variables name the programs that tests start. If one is not set, tools/find_tool.py gets the program, or says why there is none,
# and tests that need it are skipped.
with = $(2)=$$($(PY) tools/find_tool.py $(1)) && export $(2) &&
with_etcd = $(call with,etcd,ETCD)
with_torch_tests = $(call with,torch-tests,TORCH_TESTS)
with_all_tools = $(with_etcd) $(call with,slurm,SLURM) $(call with,sshd,SSHD) $(call with,promtool,PROMTOOL) \
	$(call with,chromium,CHROMIUM) $(with_torch_tests)

# Sets `python` to the first Python >= 3.11, or ends with an error.
define choose_python
python=; for candidate in $${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo 'error: no Python >= 3.11 found (tried $$PYTHON, python3, python3.11 ... python3.14)' >&2; \
		echo "hint: make $(firstword $(MAKECMDGOALS)) PYTHON=/path/to/python" >&2; exit 1; \
	fi; \
	if [ -n "$${PYTHON:-}" ] && [ "$$python" != "$$PYTHON" ]; then \
		echo "warning: PYTHON=$$PYTHON is not a Python >= 3.11; using $$python" >&2; fi;
endef

say = @printf '\n==> %s\n'

.PHONY: help setup build demo test test-long fuzz lint fmt test-rust test-python test-compat test-upstream stubs check-stubs bench clean \
	gpu-check build-tested check-fmt check-clippy check-purity check-imports check-ruff check-api check-mypy require-cargo

help: ## list the targets
	@printf 'Targets:\n'
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r name text; do \
		printf '%-16s%s\n' "$$name" "$$text"; done
	@printf '\nNeeds Python >= 3.11 (PYTHON=… chooses one) and a Rust toolchain. Everything else is installed outside the tree.\n'

setup: ## install PyTorch and tools outside the tree, once; see tools/environment.py
	$(say) 'setup: Python environment'
	@$(choose_python) \
	"$$python" tools/environment.py
	@$(if $(filter setup,$(MAKECMDGOALS)),$(PY) tools/find_tool.py)

# build/release has what builds and checks wheels, and no PyTorch.
RELEASE_PY := build/release/bin/python
# --require makes a wheel that cannot be built an error.
WHEELS_ARGS ?=

.PHONY: wheel wheels wheel-again publish release-tools check-deny check-workflows

release-tools: require-cargo
	@$(choose_python) \
	"$$python" tools/environment.py --release

wheel: release-tools ## build this machine's wheel and the sdist into dist/ as for a release, and check them
	$(say) 'wheel: this machine and the sdist (tools/wheels.py)'
	@$(RELEASE_PY) tools/wheels.py native dist $(WHEELS_ARGS)

wheels: release-tools ## build and check all wheels of a release: both processors, glibc and musl, free-threaded
	$(say) 'wheels: all of them and the sdist (tools/wheels.py)'
	@$(RELEASE_PY) tools/wheels.py all dist $(WHEELS_ARGS)

wheel-again: release-tools ## build the wheel of `make wheel` in another folder, and compare the bytes
	$(say) 'wheel-again: the same bytes from another folder (tools/wheels.py)'
	@$(RELEASE_PY) tools/wheels.py again dist

# Only the release workflow calls it: the index trusts that workflow, and nobody holds a password.
publish: release-tools
	$(say) 'publish: upload dist/ (twine)'
	@cd dist && sha256sum --check --strict SHA256SUMS
	@$(dir $(RELEASE_PY))twine upload --non-interactive --disable-progress-bar dist/*.whl dist/*.tar.gz

# The pages need no compiler and no PyTorch: what is generated in them is committed.
.PHONY: docs reference

# Tags of git, the newest first: each gets a folder of build/site. Without: this tree.
DOCS_VERSIONS ?=

docs: ## build the site of all pages into build/site; open build/site/index.html
	$(say) 'docs: build/site (Sphinx)'
	@$(choose_python) \
	"$$python" tools/environment.py --docs
	@build/docs/bin/python tools/docs_site.py build/site $(DOCS_VERSIONS)
	@echo '    build/site/index.html'

reference: build-tested ## write docs/reference/ from the program: flags, keys, metrics, events, limits, messages
	$(say) 'reference: docs/reference (tools/reference.py)'
	@ELASTIC_RS_WRITE=1 cargo test --quiet $(CARGO_FLAGS) $(TESTED) -p elastic_rs --lib events::line::
	@$(PY) tools/reference.py

build: require-cargo setup ## build the wheel into dist/ and install it into build/venv
	$(say) 'build: wheel (maturin, release)'
	@rm -rf dist
	@$(VENV)/bin/maturin build --quiet --release $(CARGO_FLAGS) --interpreter $(PY) --out dist
	@$(PY) -m pip --disable-pip-version-check install --quiet --no-index --no-deps --force-reinstall dist/elastic_rs-*.whl
	@echo "    installed $$(basename dist/elastic_rs-*.whl)"

demo: build ## train on two nodes, add a third node, kill a worker, finish; about 90 s
	$(say) 'demo: examples/demo.py'
	@$(if $(findstring etcd,$(DEMO_ARGS)),$(with_etcd)) $(if $(findstring --hosts,$(DEMO_ARGS)),$(call with,sshd,SSHD)) $(PY) \
		examples/demo$(if $(findstring --hosts,$(DEMO_ARGS)),_hosts)$(if $(findstring --hang,$(DEMO_ARGS)),_hang)$(if $(findstring --preempt,$(DEMO_ARGS)),_preempt)$(if $(findstring --node-0-dies,$(DEMO_ARGS)),_node_0).py $(filter-out --hosts --hang --preempt --node-0-dies,$(DEMO_ARGS))

# mypy is one of the Python tests here, so that it runs beside tests that wait.
test: check-fmt check-clippy check-purity check-imports check-ruff check-api test-rust test-python ## run all checks of CI
	$(say) 'test: all passed'

# Numbers for the long run. A sequence of the differential test takes 0.05 s, a seed of the simulation 0.01 s. The random faults of an
# etcd cluster run beside other tests.
LONG_SEQUENCES ?= 10000
LONG_SEEDS ?= 10000
LONG_CASES ?= 100000
LONG_FAULT_SECONDS ?= 3600
# How often each kind of hang is tried. A try takes 15 s.
LONG_HANG_RUNS ?= 5

test-long: wheel setup ## run randomised tests with many more cases, and all tests on the release wheel; more than an hour
	@$(PY) -m pip --disable-pip-version-check install --quiet --no-index --no-deps --force-reinstall dist/elastic_rs-*.whl
	$(say) 'test-long: $(LONG_SEQUENCES) sequences of store operations, PyTorch and elastic_rs (pytest)'
	@ELASTIC_RS_DIFFERENTIAL=$(LONG_SEQUENCES) $(PY) -m pytest tests/python/store/test_differential.py $(PYTEST_ARGS)
	$(say) 'test-long: all Python tests on the release wheel, including long ones (pytest)'
	@$(PY) tools/environment.py --ray --frameworks
	@$(with_all_tools) ELASTIC_RS_FAULT_SECONDS=$(LONG_FAULT_SECONDS) ELASTIC_RS_HANG_RUNS=$(LONG_HANG_RUNS) $(PYTEST) tests/python -m 'long or not long' $(PYTEST_ARGS)
	$(say) 'test-long: codec and table, $(LONG_CASES) cases of each property (proptest)'
	@PROPTEST_CASES=$(LONG_CASES) cargo test --quiet --release $(CARGO_FLAGS) --all-features --test store properties::
	$(say) 'test-long: rendezvous, take-overs, agents, workers that survive, hosts, hangs: $(LONG_SEEDS) simulated jobs'
	@ELASTIC_RS_SIM_SEEDS=$(LONG_SEEDS) cargo test --quiet --release $(CARGO_FLAGS) -p elastic_rs_sim --test simulation -- --nocapture rendezvous:: cell:: etcd:: agent:: elastic:: discovery:: hosts:: hangs:: takeover::
	$(say) 'test-long: exhaustive exploration of small jobs, with more time and more faults'
	@ELASTIC_RS_EXPLORE_LONG=1 cargo test --quiet --release $(CARGO_FLAGS) -p elastic_rs_sim --test simulation -- --nocapture explore::

# libFuzzer needs code that counts its branches. These are the flags of cargo-fuzz, as far as stable rustc knows them. --target keeps
# them from build scripts.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= codec table session blob proof hello http view recorder frames
FUZZ_RUSTFLAGS := -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
	-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing
FUZZ_HOST = $(shell rustc -vV | sed -n 's/^host: //p')

fuzz: require-cargo ## fuzz each target for FUZZ_SECONDS (60), keep crashes in fuzz/artifacts/; needs a C++ compiler
	$(say) 'fuzz: building'
	@cd fuzz && RUSTFLAGS='$(FUZZ_RUSTFLAGS)' cargo build --quiet --release $(CARGO_FLAGS) --bins --target $(FUZZ_HOST)
	@failed=; for target in $(FUZZ_TARGETS); do \
		printf '\n==> fuzz: %s, %s s\n' "$$target" '$(FUZZ_SECONDS)'; \
		mkdir -p fuzz/corpus/$$target fuzz/artifacts/$$target; \
		fuzz/target/$(FUZZ_HOST)/release/$$target -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=1024 -timeout=10 -max_len=8192 \
			-print_final_stats=1 -verbosity=0 -artifact_prefix=fuzz/artifacts/$$target/ \
			fuzz/corpus/$$target fuzz/seeds/$$target 2>&1 | sed '/ Recommended dictionary/,/ End of recommended/d' || failed="$$failed $$target"; \
	done; \
	if [ -n "$$failed" ]; then \
		echo "error: crashed:$$failed; replay with fuzz/target/$(FUZZ_HOST)/release/TARGET fuzz/artifacts/TARGET/FILE" >&2; \
		exit 1; fi

lint: check-fmt check-clippy check-purity check-imports check-ruff check-api check-mypy check-deny check-workflows ## check formatting, clippy, purity and imports of the core, ruff, docs/api.txt, mypy, crates, workflows

check-fmt: require-cargo
	$(say) 'lint: cargo fmt'
	@cargo fmt --all --check
	@cd fuzz && cargo fmt --check

check-clippy: require-cargo setup
	$(say) 'lint: cargo clippy'
	@cargo clippy --quiet $(CARGO_FLAGS) --workspace --all-targets --all-features -- -D warnings

# The fuzz targets stand on the core without I/O. Clippy links nothing, so any file can stand for libFuzzer's library, which is then
# not compiled.
check-purity: require-cargo
	$(say) 'lint: fuzz targets, and purity of the core: it compiles without I/O (cargo clippy, no default features)'
	@cd fuzz && CUSTOM_LIBFUZZER_PATH=$(CURDIR)/fuzz/Cargo.toml cargo clippy --quiet $(CARGO_FLAGS) --all-targets -- -D warnings

check-imports: setup
	$(say) 'lint: which way the core imports'
	@$(PY) tools/check_imports.py

check-ruff: setup
	$(say) 'lint: ruff'
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check --diff .

check-api: setup
	$(say) 'lint: docs/api.txt'
	@$(PY) tools/api.py --check || [ $$? = 3 ]

check-mypy: setup
	$(say) 'lint: mypy --strict'
	@$(PY) -m mypy --strict python/elastic_rs
	@$(PY) -m mypy --config-file tests/mypy.ini

# Programs that tools/environment.py puts into build/checks. A line names each one that could not be installed. CI has them all.
check_program = if [ ! -x build/checks/bin/$(1) ]; then echo '    not checked: $(1) could not be installed (requirements/checks.txt)'; else
check-deny: require-cargo setup
	$(say) 'lint: licences, sources and duplicates of crates (cargo deny)'
	@$(call check_program,cargo-deny) PATH="$(CURDIR)/build/checks/bin:$$PATH" cargo deny --log-level=error --locked check licenses bans sources; fi

check-workflows: setup
	$(say) 'lint: workflows (zizmor)'
	@$(call check_program,zizmor) build/checks/bin/zizmor --offline --quiet --no-progress .github/workflows; fi

fmt: require-cargo setup ## format Rust and Python, and apply the safe fixes of ruff
	$(say) 'fmt: cargo fmt, ruff'
	@cargo fmt --all
	@cd fuzz && cargo fmt
	@$(VENV)/bin/ruff check --quiet --fix . || true
	@$(VENV)/bin/ruff format --quiet .

# Tests in modules named `for_root` become other users. Others than root leave them out, by name.
IS_ROOT := $(filter 0,$(shell id -u))

test-rust: require-cargo setup ## run Rust tests and doctests
	@$(with_etcd) if cargo nextest --version >/dev/null 2>&1; then \
		printf '\n==> %s\n' 'test: Rust (cargo nextest)'; \
		cargo nextest run $(CARGO_FLAGS) $(TESTED) --tests --no-fail-fast $(if $(IS_ROOT),,-E 'not test(/for_root::/)'); \
	else \
		printf '\n==> %s\n' 'test: Rust (cargo test, since cargo-nextest is not installed)'; \
		cargo test $(CARGO_FLAGS) $(TESTED) --tests --no-fail-fast $(if $(IS_ROOT),,-- --skip for_root::); \
	fi
	$(say) 'test: Rust documentation examples'
	@cargo test --quiet $(CARGO_FLAGS) $(TESTED) --doc

build-tested: require-cargo setup
	$(say) 'build: wheel for tests (maturin, development profile)'
	@rm -rf build/tested
	@$(VENV)/bin/maturin build --quiet $(CARGO_FLAGS) $(TESTED_WHEEL) --interpreter $(PY) --compression-method stored --out build/tested
	@$(PY) -m pip --disable-pip-version-check install --quiet --no-index --no-deps --force-reinstall build/tested/elastic_rs-*.whl
	@echo "    installed $$(basename build/tested/elastic_rs-*.whl)"

test-python: build-tested check-stubs ## build a wheel for tests, check the stub, run pytest with real torchrun processes
	$(say) 'test: Python (pytest)'
	@$(with_all_tools) $(PYTEST) tests/python $(PYTEST_ARGS)

# The oldest supported PyTorch, two in between, and the newest. The tests are those of what differs between them: the agent, the handler,
# process groups, private names, and torchrun with all of it. COMPAT_PYTHON runs them with other interpreters. What fails runs once
# more, alone, since four tests at a time may be too much for a small machine.
COMPAT_TORCH ?= 2.6.0 2.9.1 2.12.1 2.15.0
COMPAT_PYTHON ?= $(PY)
COMPAT_TESTS ?= tests/python/agent tests/python/elastic/test_groups.py tests/python/rendezvous/test_handler.py tests/python/integration/test_install.py \
	tests/python/run/test_launch_functions.py tests/python/test_torch_private.py \
	$(addprefix tests/python/torchrun/test_,elastic_run.py exit_codes.py in_place.py installed_ends.py rendezvous.py warm_run.py workers_end.py)

test-compat: build ## run the tests with torchrun on older PyTorch, record them in docs/install.md; downloads several GB per version, once
	@failed=; for interpreter in $(COMPAT_PYTHON); do for version in $(COMPAT_TORCH); do \
		printf '\n==> %s\n' "test-compat: PyTorch $$version, $$interpreter"; \
		"$$interpreter" tools/environment.py $$version; \
		python=build/venv-torch-$$version/bin/python; \
		$$python -m pip --disable-pip-version-check install --quiet --no-index --no-deps --force-reinstall dist/elastic_rs-*.whl; \
		rm -f build/compat.xml build/compat-again.xml; \
		$$python -m pytest -n $(PYTEST_PROCESSES) --dist worksteal --junitxml=build/compat.xml $(COMPAT_TESTS) $(PYTEST_ARGS) || \
			$$python -m pytest --last-failed --junitxml=build/compat-again.xml $(COMPAT_TESTS) $(PYTEST_ARGS) || failed=1; \
		$$python tools/support_matrix.py record build/compat.xml build/compat-again.xml; \
	done; done; test -z "$$failed"

# PyTorch's own tests, of the version of their files. TORCH_TESTS=/path/to/pytorch/test UPSTREAM_TORCH=VERSION runs others.
UPSTREAM_TORCH ?= 2.6.0

test-upstream: build ## run PyTorch's own tests on its classes and on ours; an hour, downloads several GB once
	$(say) "test-upstream: PyTorch's own tests on PyTorch $(UPSTREAM_TORCH) (tests/upstream/run.py)"
	@$(PY) tools/environment.py $(UPSTREAM_TORCH)
	@$(with_etcd) $(with_torch_tests) python=build/venv-torch-$(UPSTREAM_TORCH)/bin/python; \
		$$python -m pip --disable-pip-version-check install --quiet --no-index --no-deps --force-reinstall dist/elastic_rs-*.whl; \
		$$python tests/upstream/run.py $(UPSTREAM_ARGS)

STUB := elastic_rs/_elastic_rs.pyi
# The wheel for tests contains the data from which stubs are made. Release wheels do not.
generate_stubs = $(VENV)/bin/maturin generate-stubs --quiet $(CARGO_FLAGS) $(TESTED_WHEEL) --interpreter $(PY) --out

stubs: require-cargo setup ## generate python/elastic_rs/_elastic_rs.pyi from the Rust code
	$(say) 'stubs: python/$(STUB)'
	@rm -rf build/stubs && $(generate_stubs) build/stubs
	@cp build/stubs/$(STUB) python/$(STUB)

api: setup ## write docs/api.txt, the public names of the Python package; a change of it is a decision (docs/policy.md)
	$(say) 'api: docs/api.txt'
	@$(PY) tools/api.py

check-stubs: build-tested ## check that the committed stub agrees with the Rust code and the built module
	$(say) 'test: the stub is up to date (`make stubs` generates it)'
	@rm -rf build/stubs && $(generate_stubs) build/stubs
	@diff -u python/$(STUB) build/stubs/$(STUB)

bench: build ## run the benchmarks, write benches/results/ and plots in docs/; about three hours
	$(say) 'bench: codec, table, server, channel and frames alone (cargo bench)'
	@cargo bench --quiet $(CARGO_FLAGS) -p elastic_rs_benches
	$(say) 'bench: the store, PyTorch and elastic_rs (benches/store.py)'
	@$(PY) benches/store.py $(STORE_BENCH_ARGS)
	$(say) 'bench: the rendezvous, PyTorch and elastic_rs (benches/rendezvous.py)'
	@$(PY) benches/rendezvous.py $(BENCH_ARGS)
	$(say) 'bench: the rendezvous with up to 4,000 nodes (benches/rendezvous_scale.py)'
	@$(PY) benches/rendezvous_scale.py
	$(say) 'bench: worker processes, PyTorch and elastic_rs (benches/process.py)'
	@$(PY) benches/process.py $(PROCESS_BENCH_ARGS)
	$(say) 'bench: the agent, PyTorch and elastic_rs (benches/agent.py)'
	@$(PY) benches/agent.py $(AGENT_BENCH_ARGS)
	$(say) 'bench: the check that a worker makes in each step (benches/channel.py)'
	@$(PY) benches/channel.py
	$(say) 'bench: the call by which a worker tells a step (benches/step.py)'
	@$(PY) benches/step.py
	$(say) 'bench: the launcher, torchrun and elastic-run (benches/run.py)'
	@$(PY) benches/run.py $(RUN_BENCH_ARGS)
	$(say) 'bench: agents that a driver starts by ssh (benches/hosts.py)'
	@$(call with,sshd,SSHD) $(PY) benches/hosts.py
	$(say) 'bench: restarts, torchrun, cold and warm (benches/warm.py)'
	@$(PY) benches/warm.py $(WARM_BENCH_ARGS)
	$(say) 'bench: workers that survive, and goodput beside torchrun (benches/in_place.py, an hour)'
	@$(PY) benches/in_place.py $(IN_PLACE_BENCH_ARGS)
	$(say) 'bench: hangs: how soon they are named, dumps before 1,000 kills, and what looking costs (benches/hang_*.py, 50 minutes)'
	@$(PY) benches/hang_times.py
	@$(PY) benches/hang_dumps.py
	@$(PY) benches/hang_cost.py
	@$(PY) benches/hang_asleep.py
	$(say) 'bench: checkpoints that are saved after SIGTERM (benches/first_signal.py, 10 minutes)'
	@$(PY) benches/first_signal.py
	$(say) 'bench: commits of the state (benches/elastic_state.py)'
	@$(PY) benches/elastic_state.py
	$(say) 'bench: the rendezvous on an etcd cluster (benches/rust_etcd.py)'
	@$(with_etcd) $(PY) benches/rust_etcd.py $(ETCD_BENCH_ARGS)

# A Python with torch and elastic_rs. If it is set, it is used, and nothing is built.
GPU_PYTHON ?=

gpu-check: $(if $(GPU_PYTHON),,build) ## compare elastic_rs with torchrun on NVIDIA GPUs, and write docs/gpu.md
	$(say) 'gpu-check: tools/gpu_check.py'
	@$(or $(GPU_PYTHON),$(PY)) tools/gpu_check.py $(GPU_CHECK_ARGS)

clean: ## remove all build outputs in the tree; the cached environment stays
	$(say) 'clean'
	@rm -rf target fuzz/target dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

require-cargo:
	@command -v cargo >/dev/null || { \
		echo 'error: cargo not found: a Rust toolchain (1.88 or later) is needed' >&2; \
		echo 'hint: https://rustup.rs' >&2; exit 1; }
