"""Build the wheels and the source distribution of a release into a folder, and check them.

    python tools/wheels.py native DIST     # this machine's abi3 wheel, and the sdist (`make wheel`)
    python tools/wheels.py all DIST        # every wheel of KINDS, and the sdist (`make wheels`)
    python tools/wheels.py again DIST      # the native wheel once more, elsewhere: the same bytes? (`make wheel-again`)

It runs with the environment that ``tools/environment.py --release`` makes. A wheel whose target or interpreter cannot
be had here is named with the reason, and left out; with ``--require`` that is an error, as in a release.

Two builds of one commit give the same bytes: times are the commit's, and no path of this machine is in the library. zig
links, so the machine's glibc does not matter.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import arm_python
import compiled_python
import licences
from downloads import NotHereError
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

ROOT = licences.ROOT
BIN = Path(sys.executable).parent
LICENCES = ROOT / "LICENSE-THIRD-PARTY"
LARGEST = 7_000_000
GLIBC = (2, 17)
"""The oldest glibc that Rust supports, and with it manylinux2014."""
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}


VENDORED = """\
# All crates are in `vendor`: nothing is downloaded.
[source.crates-io]
replace-with = "vendored-sources"

[source.vendored-sources]
directory = "vendor"
"""


class CannotError(Exception):
    """This wheel cannot be built here. The text says why."""


class BadWheelError(Exception):
    """A wheel or sdist is not what it must be."""


@dataclass(frozen=True)
class Kind:
    """A wheel.

    Attributes:
        target: Rust's name of the platform.
        compatibility: the platform tag that maturin is asked for.
        python: the ABI: ``abi3``, ``cp314t`` or ``abi3t``.
    """

    target: str
    compatibility: str
    python: str

    def __str__(self) -> str:
        return f"{self.python} for {self.target}"


PLATFORMS = [(target, "manylinux2014" if target.endswith("gnu") else "musllinux_1_2") for target in licences.TARGETS]
KINDS = [Kind(target, tag, python) for python in ("abi3", "cp314t", "abi3t") for target, tag in PLATFORMS]
TAGS = {"abi3": "cp311-abi3", "cp314t": "cp314-cp314t", "abi3t": "cp315-abi3.abi3t"}
INTERPRETERS = {"abi3": "3.11", "cp314t": "3.14t", "abi3t": "3.15t"}
NATIVE = next(kind for kind in KINDS if kind.target == f"{os.uname().machine}-unknown-linux-gnu")
ARM = next(kind for kind in KINDS if kind.target == "aarch64-unknown-linux-gnu")
MUSL = next(kind for kind in KINDS if kind.target == f"{os.uname().machine}-unknown-linux-musl")
USE = """
import platform
import elastic_rs
from elastic_rs import _elastic_rs
server = _elastic_rs.StoreServer.listen("127.0.0.1", 0)
client = _elastic_rs.StoreClient("127.0.0.1", server.port)
client.set("key", "value")
assert client.get("key") == b"value"
print(f"{elastic_rs.__version__} on {platform.machine()}: imported, and its store used")
"""
RUN = """
import sys
from elastic_rs import run
sys.exit(run.main(["--standalone", "--nproc-per-node=2", "--no-python", "true"]))
"""


def main(words: list[str]) -> int:
    require = "--require" in words
    what, folder = [word for word in words if word != "--require"]
    dist = Path(folder).resolve()
    if what == "again":
        return again(dist)
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    missing, not_run = [], []
    for kind in KINDS if what == "all" else [NATIVE]:
        began = time.monotonic()
        try:
            wheel = build(kind, dist, ROOT, ROOT / "target")
        except CannotError as error:
            missing.append(f"{kind}: {error}")
            print(f"    not built: {missing[-1]}", flush=True)
            continue
        check_wheel(kind, wheel)
        try:
            print(f"    {kind}: {try_wheel(kind, wheel)}", flush=True)
        except NotHereError as error:
            not_run.append(f"{kind}: {error}")
            print(f"    not run: {not_run[-1]}", flush=True)
        print(f"    {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {time.monotonic() - began:.0f} s", flush=True)
    sdist = make_sdist(dist)
    print(f"    {sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB", flush=True)
    run(BIN / "twine", "check", "--strict", *sorted(dist.iterdir()))
    (dist / "SHA256SUMS").write_text(
        "".join(f"{digest(path)}  {path.name}\n" for path in sorted(dist.glob("*elastic*")))
    )
    for what, texts in (("left out, and not checked here", missing), ("checked, and not run here", not_run)):
        if texts:
            print(f"    {what}:", *(f"      {text}" for text in texts), sep="\n")
    return 1 if missing and require else 0


# Building.


def build(kind: Kind, dist: Path, source: Path, target_folder: Path) -> Path:
    """Build a wheel into ``dist`` and return its path."""
    have_target(kind.target)
    licences.main(source / LICENCES.name)
    into = dist / "building"
    shutil.rmtree(into, ignore_errors=True)
    command = [
        *(BIN / "maturin", "build", "--quiet", "--release", "--locked", "--zig", "--target", kind.target),
        *("--compression-level", "9"),
        *("--compatibility", kind.compatibility, "--out", into, "--interpreter", asked_for(kind)),
    ]
    if kind.python == "abi3t":
        command += ["--features", "abi3t"]
    done = subprocess.run(
        list(map(str, command)), cwd=source, env=environment(source, target_folder), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        if "error[E" in done.stderr or "could not compile" in done.stderr or kind.python == "abi3":
            sys.exit(f"{done.stderr}error: {kind} does not compile")
        raise CannotError(last_error(done.stderr))
    (made,) = into.glob("*.whl")
    wheel = dist / made.name
    without_path(made, wheel, source)
    shutil.rmtree(into)
    return wheel


def asked_for(kind: Kind) -> str:
    """Return the interpreter that maturin is asked for: a name that it knows, or the path of one without a lock."""
    version = INTERPRETERS[kind.python]
    if kind.python == "abi3" or kind.target != NATIVE.target:
        return f"python{version}"
    try:
        return compiled_python.command(version)[0]
    except NotHereError as error:
        raise CannotError(str(error)) from None


def without_path(made: Path, wheel: Path, source: Path) -> None:
    """Copy a wheel, and name `/elastic_rs` in its SBOM, where maturin names this folder. RECORD has the new hash."""
    with zipfile.ZipFile(made) as files:
        contents = {info: files.read(info) for info in files.infolist()}
    changed = {}
    for info, content in contents.items():
        if info.filename.endswith(".cyclonedx.json"):
            contents[info] = content.replace(f"file://{source}".encode(), b"file:///elastic_rs")
            changed[info.filename] = contents[info]
    for info, content in contents.items():
        if info.filename.endswith(".dist-info/RECORD"):
            lines = [recorded(line, changed) for line in content.decode().splitlines()]
            contents[info] = "".join(f"{line}\n" for line in lines).encode()
    with zipfile.ZipFile(wheel, "w") as files:
        for info, content in contents.items():
            files.writestr(info, content, zipfile.ZIP_DEFLATED, 9)


def recorded(line: str, changed: dict[str, bytes]) -> str:
    """Return the line of RECORD, with the hash and the size of a changed file."""
    name = line.partition(",")[0]
    if name not in changed:
        return line
    hashed = base64.urlsafe_b64encode(hashlib.sha256(changed[name]).digest()).rstrip(b"=").decode()
    return f"{name},sha256={hashed},{len(changed[name])}"


def last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "💥" in line or "rror" in line), lines[-1] if lines else "maturin failed")


def have_target(target: str) -> None:
    """Have Rust's standard library for this target, or say why there is none."""
    folder = run("rustc", "--print", "target-libdir", "--target", target).strip()
    if Path(folder).is_dir():
        return
    if shutil.which("rustup") is None:
        raise CannotError(f"Rust's standard library for {target} is not installed, and there is no rustup to get it")
    print(f"    rustup: installing Rust's standard library for {target}", flush=True)
    done = subprocess.run(["rustup", "target", "add", target], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotError(f"`rustup target add {target}`: {last_error(done.stderr)}")


def environment(source: Path, target_folder: Path) -> dict[str, str]:
    """Return the variables of a build whose bytes depend on nothing but the source."""
    cargo_home = os.environ.get("CARGO_HOME") or str(Path.home() / ".cargo")
    sysroot = run("rustc", "--print", "sysroot").strip()
    # The last one that fits is taken.
    mapped = {
        str(Path.home()): "/home",
        sysroot: "/rust",
        cargo_home: "/cargo",
        str(source): "/elastic_rs",
        str(target_folder): "/target",
    }
    flags = [f"--remap-path-prefix={path}={short}" for path, short in mapped.items()]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CARGO_PROFILE_", "MATURIN_"))}
    return kept | {
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(flags),
        "CFLAGS": " ".join(f"-ffile-prefix-map={path}={short}" for path, short in mapped.items()),
        "CARGO_INCREMENTAL": "0",
        # A wheel is an eighth smaller by it, and takes three minutes longer.
        "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "1",
        "CARGO_TARGET_DIR": str(target_folder),
        "ELASTIC_RS_COMMIT": commit(),
        "SOURCE_DATE_EPOCH": str(epoch()),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYO3_PYTHON": sys.executable,
    }


def commit() -> str:
    """Return the commit's short name, or what the environment gives, or ``unknown``."""
    if given := os.environ.get("ELASTIC_RS_COMMIT"):
        return given
    try:
        name = run("git", "rev-parse", "--short=12", "HEAD").strip()
        changed = run("git", "status", "--porcelain", "--untracked-files=no").strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}-dirty" if changed else name


def epoch() -> int:
    """Return the commit's time, or what ``SOURCE_DATE_EPOCH`` gives, or the first of 2026."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    try:
        return int(run("git", "log", "-1", "--format=%ct"))
    except (OSError, subprocess.CalledProcessError):
        return 1_767_225_600


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    return subprocess.run(list(map(str, command)), cwd=cwd, env=env, check=True, capture_output=True, text=True).stdout


# Checking a wheel.


def check_wheel(kind: Kind, wheel: Path) -> None:
    """Check name, size, contents and library, with the tools that others use and by ourselves.

    Raises:
        BadWheelError: something is not as it must be.
    """
    must(TAGS[kind.python] in wheel.name, f"{wheel.name}: its tag is not {TAGS[kind.python]}")
    must(
        wheel.stat().st_size <= LARGEST, f"{wheel.name} has {wheel.stat().st_size} bytes, at most {LARGEST} are allowed"
    )
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        check_contents(kind, names, files)
        library = next(name for name in names if name.endswith(".so"))
        check_library(kind, files.read(library))
    run(BIN / "check-wheel-contents", wheel)
    if kind.target.endswith("gnu"):
        said = re.sub(r"\s+", " ", run(BIN / "auditwheel", "show", wheel))
        expected = f"manylinux_2_17_{kind.target.partition('-')[0]}"
        must(f'tag: "{expected}"' in said, f"{wheel.name}: auditwheel does not say {expected}: {said}")
    if kind.python == "abi3":
        run(BIN / "abi3audit", "--strict", wheel)


def check_contents(kind: Kind, names: list[str], files: zipfile.ZipFile) -> None:
    for wanted in (
        *("elastic_rs/py.typed", "elastic_rs/_elastic_rs.pyi", "entry_points.txt"),
        *("licenses/LICENSE", f"licenses/{LICENCES.name}", ".cyclonedx.json"),
    ):
        must(any(name.endswith(wanted) for name in names), f"the wheel has no {wanted}")
    for path in (str(ROOT), str(Path.home() / ".cargo"), str(Path.home() / ".rustup")):
        holding = [name for name in names if path.encode() in files.read(name)]
        must(not holding, f"{', '.join(holding)} name the path {path} of this machine")
    bom = json.loads(files.read(next(name for name in names if name.endswith(".cyclonedx.json"))))
    listed = {f"{one['name']} {one['version']}" for one in bom["components"]}
    linked = {f"{one['name']} {one['version']}" for one in licences.crates([kind.target])}
    must(bom["bomFormat"] == "CycloneDX", "the SBOM is not CycloneDX")
    must(linked <= listed, f"the SBOM does not list {', '.join(sorted(linked - listed))}")
    said = files.read(next(name for name in names if name.endswith(LICENCES.name))).decode()
    for crate in linked:
        must(f"- {crate} (" in said, f"the licences do not name {crate}")
    metadata = files.read(next(name for name in names if name.endswith("dist-info/METADATA"))).decode()
    must(not re.search(r"^Requires-Dist: (?!.*extra ==)", metadata, re.MULTILINE), "the wheel has a dependency")


def check_library(kind: Kind, content: bytes) -> None:
    """Check the machine, and which libraries and versions of symbols it needs."""
    elf = ELFFile(io.BytesIO(content))
    machine = kind.target.partition("-")[0]
    must(elf["e_machine"] == MACHINES[machine], f"the library is for {elf['e_machine']}, not for {machine}")
    dynamic = elf.get_section_by_name(".dynamic")
    needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    allowed = r"lib(c|m|dl|rt|pthread|gcc_s)\.so\.\d|ld-linux.*"
    if kind.target.endswith("musl"):
        allowed = r"libc\.so|libc\.musl.*"
    must(all(re.fullmatch(allowed, name) for name in needed), f"the library needs {', '.join(sorted(needed))}")
    newest = max(versions(elf), default=(0, 0))
    must(newest <= GLIBC, f"the library needs glibc {newest[0]}.{newest[1]}")


def versions(elf: ELFFile) -> Iterator[tuple[int, ...]]:
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, symbols in section.iter_versions():
                for symbol in symbols:
                    if found := re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", symbol.name):
                        yield tuple(map(int, found.groups()))


def must(condition: bool, text: str) -> None:
    if not condition:
        raise BadWheelError(text)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def interpreter(kind: Kind) -> list[str]:
    """Return the command of a Python that takes this wheel.

    Raises:
        NotHereError: there is none. The text says why.
    """
    if kind == NATIVE:
        return [sys.executable]
    if kind == ARM:
        return arm_python.command()
    if kind == MUSL:
        return compiled_python.command("musl")
    if kind.target != NATIVE.target:
        raise NotHereError(f"there is no Python {INTERPRETERS[kind.python]} for {kind.target}")
    return compiled_python.command(INTERPRETERS[kind.python])


def try_wheel(kind: Kind, wheel: Path) -> str:
    """Import the wheel, and use its store. Says what was done.

    On this processor a job of programs is run, too. The emulator lacks the system call that makes an agent the parent
    of orphans.

    Raises:
        NotHereError: no Python takes this wheel. The text says why.
    """
    python = interpreter(kind)
    emulated = kind != NATIVE and kind == ARM
    with tempfile.TemporaryDirectory(prefix="elastic_rs-") as folder:
        with zipfile.ZipFile(wheel) as files:
            files.extractall(folder)
        env = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        said = []
        for code in [USE] if emulated else [USE, RUN]:
            done = subprocess.run(
                [*python, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=300
            )
            must(done.returncode == 0, f"{wheel.name} does not work: {done.stderr}")
            said.append(done.stdout.strip())
    return said[0] if emulated else f"{said[0]}; elastic-run --no-python run"


# The same again.


def again(dist: Path) -> int:
    """Build the native wheel from another folder, and compare the bytes with the one in ``dist``."""
    (first,) = dist.glob(f"*{TAGS['abi3']}*manylinux*_{os.uname().machine}.whl")
    with tempfile.TemporaryDirectory(prefix="elastic_rs-") as folder:
        source = Path(folder) / "somewhere" / "else"
        copy(source)
        second = build(NATIVE, Path(folder), source, Path(folder) / "target")
        same = first.read_bytes() == second.read_bytes()
        print(f"    {digest(first)}  the first\n    {digest(second)}  the second")
        if not same:
            differ(first, second)
    return 0 if same else 1


def differ(first: Path, second: Path) -> None:
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
        print("    different:", *(name for name in one.namelist() if one.read(name) != other.read(name)))


def copy(folder: Path) -> None:
    """Copy what git tracks into a folder, as it is in the tree."""
    for name in run("git", "ls-files", "-z").split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


# The source distribution.


def make_sdist(dist: Path) -> Path:
    """Make the sdist, with all crates in it, so that it builds without a network."""
    licences.main(LICENCES)
    with tempfile.TemporaryDirectory(prefix="elastic_rs-") as name:
        folder = Path(name)
        run(BIN / "maturin", "sdist", "--out", folder)
        (made,) = folder.glob("*.tar.gz")
        with tarfile.open(made) as tar:
            tar.extractall(folder, filter="data")
        top = folder / made.name.removesuffix(".tar.gz")
        (top / "crates" / "py" / "commit").write_text(commit())
        run("cargo", "vendor", "--quiet", "--versioned-dirs", "vendor", cwd=top)
        (top / ".cargo").mkdir()
        (top / ".cargo" / "config.toml").write_text(VENDORED)
        leave_out_others(top)
        # Cargo finds each crate of the lock in the sdist, without a network and without its cache.
        offline = {**os.environ, "CARGO_HOME": str(folder / "empty")}
        run("cargo", "metadata", "--format-version=1", "--offline", "--locked", cwd=top, env=offline)
        packed = dist / made.name
        pack(top, packed)
    return packed


def leave_out_others(top: Path) -> None:
    """Empty the vendored crates that the library does not need, such as Windows' and those of tests.

    Cargo wants to see the manifests of all locked crates, and compiles none of these.
    """
    used = {Path(one["manifest_path"]).parent.name for one in licences.needed(top, {None, "build"})}
    for crate in (top / "vendor").iterdir():
        if crate.name in used:
            continue
        sums = json.loads((crate / ".cargo-checksum.json").read_text())
        manifest = crate / "Cargo.toml"
        text = re.sub(r"(?ms)^\[(\[(bin|test|bench|example)\]\]|lib\]).*?(?=^\[|\Z)", "", manifest.read_text())
        text = re.sub(r'(?m)^build = ".*"$', "build = false", text)
        shutil.rmtree(crate)
        (crate / "src").mkdir(parents=True)
        (crate / "src" / "lib.rs").write_text("")
        manifest.write_text(f'{text}\n[lib]\npath = "src/lib.rs"\n')
        (crate / ".cargo-checksum.json").write_text(json.dumps({"files": {}, "package": sums["package"]}))


def pack(top: Path, packed: Path) -> None:
    """Pack a folder so that the same files give the same bytes."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted_files(top):
            member = tar.gettarinfo(path, str(path.relative_to(top.parent)))
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = epoch()
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            with path.open("rb") as content:
                tar.addfile(member, content)
    packed.write_bytes(gzip.compress(raw.getvalue(), mtime=epoch()))


def sorted_files(top: Path) -> Iterable[Path]:
    return sorted(path for path in top.rglob("*") if path.is_file())


if __name__ == "__main__":
    if not sysconfig.get_platform().startswith("linux"):
        sys.exit("error: elastic_rs is for Linux")
    try:
        sys.exit(main(sys.argv[1:]))
    except BadWheelError as bad:
        sys.exit(f"error: {bad}")
    except subprocess.CalledProcessError as failure:
        sys.exit(
            f"{failure.stdout}{failure.stderr}error: `{' '.join(failure.cmd[:2])}` failed with {failure.returncode}"
        )
