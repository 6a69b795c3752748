"""Builds the wheel from a libflashcore.so and the libflashcore_python.so beside it, with the standard library alone.

    python/build_wheel.py LIBRARY FOLDER [--allow-newer-glibc]

The tag says which glibc the library needs: manylinux_2_28 for everything up to 2.28. A library that needs a newer one is
refused, unless --allow-newer-glibc asks for a wheel with the newer tag.
"""

import argparse
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
OLDEST_GLIBC = (2, 28)
MOST_BYTES = 8_000_000
# A fixed time, so that the same files give the same wheel.
TIME = (2020, 1, 1, 0, 0, 0)

METADATA = """\
Metadata-Version: 2.1
Name: flashcore
Version: {version}
Summary: Fused attention (FlashAttention) on NVIDIA GPUs and on the CPU, with nothing to compile
License: MIT OR Apache-2.0
Requires-Python: >=3.9
Classifier: License :: OSI Approved :: MIT License
Classifier: License :: OSI Approved :: Apache Software License
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
Classifier: Topic :: Scientific/Engineering :: Artificial Intelligence
Provides-Extra: numpy
Requires-Dist: numpy; extra == "numpy"
Requires-Dist: ml_dtypes; extra == "numpy"
Provides-Extra: torch
Requires-Dist: torch>=2.7; extra == "torch"
Description-Content-Type: text/markdown

"""


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def newer_symbols(library):
    """Highest glibc version of the symbols that the library needs, and those symbols that are newer than OLDEST_GLIBC."""
    highest, newer = (0, 0), []
    for line in run("objdump", "-T", library).splitlines():
        match = re.search(r"\*UND\*.*\bGLIBC_(\d+)\.(\d+)(?:\.\d+)?\)?\s+(\S+)$", line)
        if match:
            version = (int(match[1]), int(match[2]))
            highest = max(highest, version)
            if version > OLDEST_GLIBC:
                newer.append(f"{match[3]} ({version[0]}.{version[1]})")
    return highest, sorted(newer)


def check_needed(library):
    """The library may need nothing that a plain system lacks."""
    allowed = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2"}
    needed = re.findall(r"NEEDED\s+(\S+)", run("objdump", "-p", library))
    others = sorted(set(needed) - allowed)
    if others:
        sys.exit(f"{library} needs {', '.join(others)}; a wheel may need {', '.join(sorted(allowed))}")


def version():
    header = os.path.join(ROOT, "crates", "flashcore-c", "include", "flashcore.h")
    with open(header, encoding="utf-8") as file:
        return re.search(r'^#define FLASHCORE_VERSION "(.*)"$', file.read(), re.MULTILINE)[1]


def package_files():
    package = os.path.join(HERE, "flashcore")
    for folder, folders, files in os.walk(package):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if name.endswith((".py", ".pyi", "py.typed")):
                path = os.path.join(folder, name)
                yield os.path.relpath(path, HERE), path


class Wheel:
    """A zip file that keeps the RECORD of what it has."""

    def __init__(self, path):
        self.zip = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9)
        self.record = []

    def add(self, name, content, is_program=False):
        info = zipfile.ZipInfo(name.replace(os.sep, "/"), TIME)
        info.compress_type = zipfile.ZIP_DEFLATED
        info.external_attr = (0o100755 if is_program else 0o100644) << 16
        self.zip.writestr(info, content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        self.record.append(f"{info.filename},sha256={digest},{len(content)}")

    def close(self, folder):
        record = f"{folder}/RECORD"
        lines = "\n".join([*self.record, f"{record},,", ""])
        self.add(record, lines.encode())
        self.zip.close()


def read(path):
    with open(path, "rb") as file:
        return file.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("folder")
    parser.add_argument("--allow-newer-glibc", action="store_true")
    options = parser.parse_args()
    helper = os.path.join(os.path.dirname(options.library), "libflashcore_python.so")
    if not os.path.exists(helper):
        sys.exit(f"{helper} is not there; build it with: cargo build --release -p flashcore-python")
    libraries = {"libflashcore.so": options.library, "libflashcore_python.so": helper}
    needs = []
    for library in libraries.values():
        check_needed(library)
        needs.append(newer_symbols(library))
    glibc, newer = max(highest for highest, _ in needs), sorted({name for _, names in needs for name in names})
    if newer and not options.allow_newer_glibc:
        sys.exit(
            f"{options.library} needs glibc {glibc[0]}.{glibc[1]} for {', '.join(newer)}; a manylinux_2_28 wheel may need "
            "2.28: build it with cargo zigbuild (scripts/build-wheel.sh does), or pass --allow-newer-glibc for a wheel "
            f"with the tag manylinux_{glibc[0]}_{glibc[1]}"
        )
    glibc = max(glibc, OLDEST_GLIBC)
    tag = f"py3-none-manylinux_{glibc[0]}_{glibc[1]}_x86_64"
    os.makedirs(options.folder, exist_ok=True)
    info = f"flashcore-{version()}.dist-info"
    path = os.path.join(options.folder, f"flashcore-{version()}-{tag}.whl")
    wheel = Wheel(path)
    for name, file in package_files():
        wheel.add(name, read(file))
    with tempfile.TemporaryDirectory() as folder:
        for name, library in libraries.items():
            stripped = os.path.join(folder, name)
            shutil.copyfile(library, stripped)
            run("strip", "--strip-unneeded", stripped)
            wheel.add(f"flashcore/{name}", read(stripped), is_program=True)
    page = os.path.join(ROOT, "docs", "pytorch.md")
    description = read(page).decode() if os.path.exists(page) else ""
    wheel.add(f"{info}/METADATA", (METADATA.format(version=version()) + description).encode())
    wheel.add(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: flashcore\nRoot-Is-Purelib: false\nTag: {tag}\n".encode())
    wheel.add(f"{info}/top_level.txt", b"flashcore\n")
    for name in ("LICENSE-APACHE", "LICENSE-MIT"):
        wheel.add(f"{info}/{name}", read(os.path.join(ROOT, name)))
    wheel.close(info)
    size = os.path.getsize(path)
    if size > MOST_BYTES:
        sys.exit(f"{path} has {size} bytes; it may have {MOST_BYTES}")
    print(f"{path}: {size / 1e6:.2f} MB, glibc {glibc[0]}.{glibc[1]}")


if __name__ == "__main__":
    main()
