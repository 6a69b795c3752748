"""The installed wheel: its RECORD is right, and everything typed is marked so."""

import base64
import csv
import hashlib
import os
from importlib import metadata

import pytest

import flashcore


def test_record():
    try:
        distribution = metadata.distribution("flashcore")
    except metadata.PackageNotFoundError:
        pytest.skip("flashcore is not installed from a wheel")
    rows = list(csv.reader(distribution.read_text("RECORD").splitlines()))
    names = [row[0] for row in rows]
    assert "flashcore/libflashcore.so" in names and "flashcore/libflashcore_python.so" in names
    assert "flashcore/py.typed" in names
    assert "flashcore/torch/__init__.py" in names
    for name, digest, size in rows:
        if not digest or name.endswith(".pyc"):
            continue
        with open(distribution.locate_file(name), "rb") as file:
            content = file.read()
        expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={expected}", len(content)), name
    tags = [line for line in distribution.read_text("WHEEL").splitlines() if line.startswith("Tag: ")]
    assert len(tags) == 1 and tags[0].startswith("Tag: py3-none-manylinux_2_")


def test_versions():
    assert flashcore.__version__ == flashcore.version()
    assert os.path.exists(os.path.join(os.path.dirname(flashcore.__file__), "py.typed"))
