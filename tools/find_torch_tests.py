"""Print the folder with PyTorch's own tests (``distributed/...``), and get it first if needed.

The first of these that has them:

1. the folder that ``TORCH_TESTS`` names: ``test`` of a checkout of PyTorch, of any version;
2. those of PyTorch 2.6.0, out of Debian's source package, in the cache of ``tools/environment.py``.

apt's own downloader gets the package from the mirror of this machine's Debian, or from deb.debian.org, and checks its
hash. Nothing is installed, and root is not needed. If there are none, stderr says why, nothing is printed, and the exit
code is 0. The exit code is 1 only if the folder that ``TORCH_TESTS`` names has no such tests.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tarfile
from pathlib import Path

import downloads
import environment

VERSION = "2.6.0"
SOURCE = f"pool/main/p/pytorch/pytorch_{VERSION}+dfsg.orig.tar.xz"
SHA256 = "099a9601bc40d67656e75735c44abedb0fbe92d08817852ab7472eebb7e6ddff"
SAID = f"the tests of PyTorch {VERSION} (27 MB)"
WANTED = ("elastic/", "launcher/", "bin/", "argparse_util_test.py", "test_")


def main() -> int:
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the path alone
        folder = find()
    if folder is not None:
        print(folder)
    return 0


def find() -> Path | None:
    if named := os.environ.get("TORCH_TESTS"):
        folder = Path(named).absolute()
        if not has_tests(folder):
            sys.exit(f"error: TORCH_TESTS is `{named}`, must be PyTorch's folder `test`; unset it to let make get one")
        return folder
    missing = "no tests of PyTorch: they are not run. TORCH_TESTS=/path/to/pytorch/test names them."
    return downloads.first_of((from_debian,), missing)


def has_tests(folder: Path) -> bool:
    return (folder / "distributed/elastic/rendezvous").is_dir() and (folder / "distributed/test_store.py").exists()


def from_debian() -> Path:
    folder = environment.cached("torch-tests", f"{SOURCE} {SHA256}")
    return downloads.kept(folder, SHA256, SAID, install, has_tests)


def install(folder: Path) -> None:
    source = downloads.debian_source(folder, SOURCE, SHA256)
    with tarfile.open(source) as tar:
        for member in tar:
            inside = member.name.partition("/test/distributed/")[2]
            if member.isfile() and inside.startswith(WANTED) and (content := tar.extractfile(member)) is not None:
                target = folder / "distributed" / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as out:
                    shutil.copyfileobj(content, out)
                target.chmod(0o755 if member.mode & 0o100 else 0o644)
    source.unlink()
    # What `pip install` of the handler in out_of_tree_test_package leaves beside it. A test imports it from there.
    info = folder / "distributed/elastic/rendezvous/out_of_tree_test_package/src/testbackend-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: testbackend\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\ntestbackend = testbackend:test_handler\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
