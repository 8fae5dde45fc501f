# `make` lists the targets. CI runs `make test`, which is also what you run before a commit.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL: # the steps share cargo's lock and the terminal; each is parallel inside
MAKEFLAGS += --no-print-directory

# Both environments are made by tools/environment.py, whose opening lines say why there are two.
VENV := build/venv
PY := $(VENV)/bin/python
# What follows `make demo DEMO_ARGS=…`, `make test-python PYTEST_ARGS=…`, `make bench BENCH_ARGS=… STORE_BENCH_ARGS=…` is
# passed on, the last to benches/rendezvous.py and benches/store.py; AGENT_BENCH_ARGS=… to benches/agent.py and
# RUN_BENCH_ARGS=… to benches/run.py, GPU_CHECK_ARGS=… to tools/gpu_check.py.
DEMO_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
STORE_BENCH_ARGS ?=
AGENT_BENCH_ARGS ?=
RUN_BENCH_ARGS ?=
GPU_CHECK_ARGS ?=
# For cargo. CI sets --locked, so that a forgotten Cargo.lock is an error there and no nuisance while working.
CARGO_FLAGS ?=
# Processes that pytest runs tests in side by side. Most tests wait; the rest is what two cores have time for.
PYTEST_PROCESSES ?= 4
PYTEST = $(PY) -m pytest -n $(PYTEST_PROCESSES) --dist worksteal

# Tests and the wheel that they run with are built in one profile and with one set of features, so that cargo compiles every
# crate once for both: hence the binding's name where only the core is tested, and the simulator in the wheel.
TESTED := -p elastic_rs -p elastic_rs_py --all-features
TESTED_WHEEL := --profile dev --features experimental-inspect,elastic_rs/sim

# pyo3 looks for an interpreter when it is built: always the same one, or every change of PATH would rebuild it.
export PYO3_PYTHON := $(CURDIR)/$(PY)

say = @printf '\n==> %s\n'

.PHONY: help setup build demo test test-long fuzz lint fmt test-rust test-python test-compat stubs check-stubs bench clean \
	gpu-check build-tested check-fmt check-clippy check-purity check-ruff check-mypy require-cargo

help: ## list the targets
	@printf 'Targets:\n'
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r name text; do \
		printf '%-16s%s\n' "$$name" "$$text"; done
	@printf '\nNeeds Python >= 3.11 (PYTHON=… chooses one) and a Rust toolchain; the rest is installed outside the tree.\n'

setup: ## install PyTorch and the tools outside the tree, once; see tools/environment.py
	$(say) 'setup: Python environment'
	@python=; for candidate in $${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo 'error: no Python >= 3.11 found (tried $$PYTHON, python3, python3.11 ... python3.14)' >&2; \
		echo "hint: make $(firstword $(MAKECMDGOALS)) PYTHON=/path/to/python" >&2; exit 1; \
	fi; \
	if [ -n "$${PYTHON:-}" ] && [ "$$python" != "$$PYTHON" ]; then \
		echo "warning: PYTHON=$$PYTHON is not a Python >= 3.11; using $$python" >&2; fi; \
	"$$python" tools/environment.py

build: require-cargo setup ## build the wheel into dist/ and install it into build/venv
	$(say) 'build: wheel (maturin, release)'
	@rm -rf dist
	@$(VENV)/bin/maturin build --quiet --release $(CARGO_FLAGS) --interpreter $(PY) --out dist
	@$(PY) -m pip --disable-pip-version-check install --quiet --no-index --no-deps --force-reinstall dist/elastic_rs-*.whl
	@echo "    installed $$(basename dist/elastic_rs-*.whl)"

demo: build ## train digits on two nodes, add a third, kill a worker, finish: about 90 s
	$(say) 'demo: examples/demo.py'
	@$(PY) examples/demo.py $(DEMO_ARGS)

test: lint test-rust test-python ## everything that CI checks
	$(say) 'test: all passed'

# What the long run takes more of. A sequence of the differential test takes 0.05 s, a seed of the simulation 0.01 s.
LONG_SEQUENCES ?= 10000
LONG_SEEDS ?= 10000
LONG_CASES ?= 100000

test-long: build ## the tests that draw at random, with many more draws, and the released wheel: more than an hour
	$(say) 'test-long: $(LONG_SEQUENCES) sequences of store operations, PyTorch and ours (pytest)'
	@ELASTIC_RS_DIFFERENTIAL=$(LONG_SEQUENCES) $(PY) -m pytest tests/python/store/test_differential.py $(PYTEST_ARGS)
	$(say) 'test-long: all Python tests on the released wheel, and those marked long (pytest)'
	@$(PYTEST) tests/python -m 'long or not long' $(PYTEST_ARGS)
	$(say) 'test-long: codec and table, $(LONG_CASES) cases of each property (proptest)'
	@PROPTEST_CASES=$(LONG_CASES) cargo test --quiet --release $(CARGO_FLAGS) --all-features --test store properties::
	$(say) 'test-long: rendezvous and agents, $(LONG_SEEDS) simulated jobs'
	@ELASTIC_RS_SIM_SEEDS=$(LONG_SEEDS) cargo test --quiet --release $(CARGO_FLAGS) --all-features --test simulation -- --nocapture rendezvous:: cell:: agent::
	$(say) 'test-long: small jobs exhaustively, with more time and more faults'
	@ELASTIC_RS_EXPLORE_LONG=1 cargo test --quiet --release $(CARGO_FLAGS) --all-features --test simulation -- --nocapture explore::

# libFuzzer needs code that counts its branches; these flags are what cargo-fuzz sets, and rustc's stable release knows
# them. They are for the target alone (hence --target), not for build scripts.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= codec table session blob
FUZZ_RUSTFLAGS := -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
	-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing
FUZZ_HOST = $(shell rustc -vV | sed -n 's/^host: //p')

fuzz: require-cargo ## fuzz each target for FUZZ_SECONDS (60); crashes are kept in fuzz/artifacts/. Needs a C++ compiler
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

lint: check-fmt check-clippy check-purity check-ruff check-mypy ## formatting, clippy, purity of the core, ruff, mypy

check-fmt: require-cargo
	$(say) 'lint: cargo fmt'
	@cargo fmt --all --check
	@cd fuzz && cargo fmt --check

check-clippy: require-cargo setup
	$(say) 'lint: cargo clippy'
	@cargo clippy --quiet $(CARGO_FLAGS) --workspace --all-targets --all-features -- -D warnings
	@# Nothing is linked here, so libFuzzer need not be compiled: any file does for its library.
	@cd fuzz && CUSTOM_LIBFUZZER_PATH=$(CURDIR)/fuzz/Cargo.toml cargo clippy --quiet $(CARGO_FLAGS) --all-targets -- -D warnings

check-purity: require-cargo
	$(say) 'lint: the core compiles without I/O (cargo check --no-default-features)'
	@cargo check --quiet $(CARGO_FLAGS) --no-default-features --lib

check-ruff: setup
	$(say) 'lint: ruff'
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check --diff .

check-mypy: setup
	$(say) 'lint: mypy --strict'
	@$(PY) -m mypy --strict python/elastic_rs

fmt: require-cargo setup ## format Rust and Python, apply ruff's safe fixes
	$(say) 'fmt: cargo fmt, ruff'
	@cargo fmt --all
	@cd fuzz && cargo fmt
	@$(VENV)/bin/ruff check --quiet --fix . || true
	@$(VENV)/bin/ruff format --quiet .

test-rust: require-cargo ## Rust tests and doctests
	@if cargo nextest --version >/dev/null 2>&1; then \
		printf '\n==> %s\n' 'test: Rust (cargo nextest)'; \
		cargo nextest run $(CARGO_FLAGS) $(TESTED) --tests --no-fail-fast; \
	else \
		printf '\n==> %s\n' 'test: Rust (cargo test, since cargo-nextest is not installed)'; \
		cargo test $(CARGO_FLAGS) $(TESTED) --tests --no-fail-fast; \
	fi
	$(say) 'test: Rust documentation examples'
	@cargo test --quiet $(CARGO_FLAGS) $(TESTED) --doc

build-tested: require-cargo setup
	$(say) 'build: wheel for tests (maturin, development profile)'
	@rm -rf build/tested
	@$(VENV)/bin/maturin build --quiet $(CARGO_FLAGS) $(TESTED_WHEEL) --interpreter $(PY) --compression-method stored --out build/tested
	@$(PY) -m pip --disable-pip-version-check install --quiet --no-index --no-deps --force-reinstall build/tested/elastic_rs-*.whl
	@echo "    installed $$(basename build/tested/elastic_rs-*.whl)"

test-python: build-tested check-stubs ## build, stub check, pytest with real torchrun processes
	$(say) 'test: Python (pytest)'
	@$(PYTEST) tests/python $(PYTEST_ARGS)

# The oldest PyTorch that we work with, and one between. The tests of the agent, the handler and what torchrun does with them.
COMPAT_TORCH ?= 2.6.0 2.9.1
COMPAT_TESTS ?= tests/python/agent tests/python/test_handler.py tests/python/test_install.py tests/python/torchrun

test-compat: build ## the Python tests that meet PyTorch's launcher, with older versions of it: several GB for each, once
	@for version in $(COMPAT_TORCH); do \
		printf '\n==> %s\n' "test-compat: PyTorch $$version"; \
		$(PY) tools/environment.py $$version; \
		python=build/venv-torch-$$version/bin/python; \
		$$python -m pip --disable-pip-version-check install --quiet --no-index --no-deps --force-reinstall dist/elastic_rs-*.whl; \
		$$python -m pytest -n $(PYTEST_PROCESSES) --dist worksteal $(COMPAT_TESTS) $(PYTEST_ARGS); \
	done

STUB := elastic_rs/_elastic_rs.pyi
# What stubs are made of is in the wheel for tests; released wheels stay free of it.
generate_stubs = $(VENV)/bin/maturin generate-stubs --quiet $(CARGO_FLAGS) $(TESTED_WHEEL) --interpreter $(PY) --out

stubs: require-cargo setup ## regenerate python/elastic_rs/_elastic_rs.pyi from the Rust code
	$(say) 'stubs: python/$(STUB)'
	@rm -rf build/stubs && $(generate_stubs) build/stubs
	@cp build/stubs/$(STUB) python/$(STUB)

check-stubs: build-tested ## the committed stub is what the code says, and what the built module has
	$(say) 'test: the stub is up to date (`make stubs` renews it)'
	@rm -rf build/stubs && $(generate_stubs) build/stubs
	@diff -u python/$(STUB) build/stubs/$(STUB)
	$(say) 'test: the stub agrees with the built module (mypy.stubtest)'
	@$(PY) -m mypy.stubtest --allowlist tests/stubtest-allowlist.txt elastic_rs._elastic_rs

bench: build ## run the benchmarks, about half an hour; results go to benches/results/, a plot to docs/
	$(say) 'bench: codec, table and server alone (cargo bench)'
	@cargo bench --quiet $(CARGO_FLAGS) -p elastic_rs_benches
	$(say) 'bench: the store, PyTorch and ours (benches/store.py)'
	@$(PY) benches/store.py $(STORE_BENCH_ARGS)
	$(say) 'bench: the rendezvous, PyTorch and ours (benches/rendezvous.py)'
	@$(PY) benches/rendezvous.py $(BENCH_ARGS)
	$(say) 'bench: the rendezvous with up to 4,000 nodes (benches/rendezvous_scale.py)'
	@$(PY) benches/rendezvous_scale.py
	$(say) 'bench: worker processes, PyTorch and ours (benches/process.py)'
	@$(PY) benches/process.py $(PROCESS_BENCH_ARGS)
	$(say) 'bench: the agent, PyTorch and ours (benches/agent.py)'
	@$(PY) benches/agent.py $(AGENT_BENCH_ARGS)
	$(say) 'bench: the launcher, torchrun and elastic-run (benches/run.py)'
	@$(PY) benches/run.py $(RUN_BENCH_ARGS)
	$(say) 'bench: restarts, torchrun, cold and warm (benches/warm.py)'
	@$(PY) benches/warm.py $(WARM_BENCH_ARGS)

# For a machine where torch and elastic_rs are installed: this Python is taken, and nothing is built.
GPU_PYTHON ?=

gpu-check: $(if $(GPU_PYTHON),,build) ## on a machine with NVIDIA GPUs: elastic_rs beside torchrun; a table, and docs/gpu.md
	$(say) 'gpu-check: tools/gpu_check.py'
	@$(or $(GPU_PYTHON),$(PY)) tools/gpu_check.py $(GPU_CHECK_ARGS)

clean: ## remove what was built in the tree; the cached environment stays
	$(say) 'clean'
	@rm -rf target fuzz/target dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

require-cargo:
	@command -v cargo >/dev/null || { \
		echo 'error: cargo not found: a Rust toolchain (1.88 or later) is needed' >&2; \
		echo 'hint: https://rustup.rs' >&2; exit 1; }
