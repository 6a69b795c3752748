"""scripts/build-wheel.sh on machines that lack something: it says so before anything is compiled, and installs what it can."""

import os
import shutil
import subprocess

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
DOCS = os.environ.get("FLASHCORE_DOCS", os.path.join(HERE, "..", "..", "docs"))
SCRIPT = os.path.join(DOCS, "..", "scripts", "build-wheel.sh")
SYSTEM = ("bash", "cat", "dirname", "mkdir", "uname")
# Every program writes down that it was called. A python3 makes a venv with a python that is one more of them.
LOGGED = 'echo "{name} $*" >> "{log}"\n'
PYTHON = """
case "$*" in
    *"ziglang version") exit 1 ;;
    "-m venv"*) mkdir -p "$4/bin"; cat "$0" > "$4/bin/python"; chmod +x "$4/bin/python" ;;
esac
"""

pytestmark = pytest.mark.skipif(not os.path.exists(SCRIPT), reason="the repository is not here; FLASHCORE_DOCS names its docs")


class Machine:
    """A folder with a copy of the script, and a PATH of programs that do nothing."""

    def __init__(self, folder):
        self.bin, self.log, self.target = folder / "bin", folder / "log", folder / "target"
        self.script = folder / "repository" / "scripts" / "build-wheel.sh"
        for path in (self.bin, self.script.parent):
            path.mkdir(parents=True)
        shutil.copyfile(SCRIPT, self.script)
        for name in (*SYSTEM, "chmod"):
            os.symlink(shutil.which(name), self.bin / name)
        for name in ("objdump", "strip", "cargo", "cc"):
            self.put(name)
        self.put("rustc", f'echo "{folder}"')
        self.put("python3", PYTHON)

    def put(self, name, body=""):
        """A program that writes down its call."""
        path = self.bin / name
        path.write_text("#!" + shutil.which("bash") + "\n" + LOGGED.format(name=name, log=self.log) + body)
        path.chmod(0o755)

    def run(self, **environment):
        """The status, the words, and the programs that were called with their first words."""
        self.log.write_text("")
        given = {"PATH": str(self.bin), "CARGO_TARGET_DIR": str(self.target), **environment}
        done = subprocess.run([shutil.which("bash"), str(self.script)], capture_output=True, text=True, env=given)
        return done.returncode, done.stderr, self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def compiled(calls):
    return [call for call in calls if call.startswith("cargo ")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("objdump", "objdump: install binutils"),
        ("strip", "strip: install binutils"),
        ("cargo", "cargo: install Rust, https://rustup.rs"),
        ("cc", "cc: install gcc or clang; build scripts of crates are compiled with it"),
        ("python3", "python3: install Python 3.9 or newer"),
    ],
)
def test_a_program_is_missing(machine, name, message):
    (machine.bin / name).unlink()
    status, words, calls = machine.run()
    assert status == 1 and words.startswith("build-wheel.sh: nothing was compiled, because this is missing:\n")
    assert f"  {message}\n" in words and not compiled(calls)


def test_everything_is_said_at_once(machine):
    machine.put("python3", PYTHON + 'case "$*" in *"import ensurepip"*) exit 1 ;; esac\n')
    machine.put("rustc", 'echo "/no such folder"')
    (machine.bin / "objdump").unlink()
    status, words, calls = machine.run()
    assert status == 1 and len(words.splitlines()) == 4 and not compiled(calls)
    assert "python3 -m venv: install python3-venv" in words and "rustup target add x86_64-unknown-linux-gnu" in words


def test_no_network(machine):
    machine.put("python3", PYTHON + 'case "$*" in *"pip install"*) exit 1 ;; esac\n')
    status, words, calls = machine.run()
    assert status == 1 and "nothing was compiled, because pip could not install cargo-zigbuild==" in words
    assert not compiled(calls)


def test_zigbuild_is_installed_once_and_before(machine):
    for is_first in (True, False):
        status, words, calls = machine.run()
        assert status == 0, words
        steps = [call for call in calls if "pip install" in call or call.startswith("cargo ") or "build_wheel.py" in call]
        wanted = ["pip install"] * is_first + ["cargo zigbuild", "build_wheel.py"]
        assert len(steps) == len(wanted) and all(part in step for part, step in zip(wanted, steps)), calls
        assert compiled(calls)[0].endswith("--target x86_64-unknown-linux-gnu.2.28")
        assert steps[-1].endswith("/build_wheel.py {0}/x86_64-unknown-linux-gnu/release/libflashcore.so {0}/wheels".format(machine.target))


def test_zigbuild_that_is_there_is_used(machine):
    machine.put("cargo-zigbuild")
    machine.put("zig")
    status, _, calls = machine.run()
    assert status == 0 and not [call for call in calls if "pip" in call or "venv" in call] and len(compiled(calls)) == 1


def test_what_was_built_before(machine, tmp_path):
    """Neither cargo nor a compiler; and by cargo alone, neither zig nor a network."""
    library = tmp_path / "libflashcore.so"
    status, words, calls = machine.run(FLASHCORE_LIBRARY_FILE=str(library))
    assert status == 1 and f"{library}: FLASHCORE_LIBRARY_FILE names a libflashcore.so" in words and not calls
    library.touch()
    for name in ("cargo", "cc"):
        (machine.bin / name).unlink()
    status, _, calls = machine.run(FLASHCORE_LIBRARY_FILE=str(library))
    assert status == 0 and len(calls) == 1 and f"build_wheel.py {library} " in calls[0]


def test_cargo_alone(machine):
    status, _, calls = machine.run(FLASHCORE_ALLOW_NEWER_GLIBC="1")
    assert status == 0 and compiled(calls)[0].startswith("cargo build --quiet --release") and "--target" not in compiled(calls)[0]
    assert calls[-1].endswith("--allow-newer-glibc") and not [call for call in calls if "pip" in call]
