"""The programs of docs/pytorch.md run as they stand, each in a process of its own."""

import os
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.environ.get("FLASHCORE_DOCS", os.path.join(HERE, "..", "..", "docs"))
PAGE = os.path.join(FOLDER, "pytorch.md")


def programs():
    if not os.path.exists(PAGE):
        return []
    with open(PAGE, encoding="utf-8") as file:
        text = file.read()
    first = re.search(r'^python -c "(.*)"$', text, re.MULTILINE)
    assert first, "the page begins with a line that runs"
    return [first.group(1), *re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


@pytest.mark.skipif(not os.path.exists(PAGE), reason="docs are not here; FLASHCORE_DOCS names their folder")
@pytest.mark.parametrize("program", programs(), ids=lambda program: re.sub(r"\W+", " ", program)[:40].strip())
def test_program(program, tmp_path):
    if "transformers" in program:
        pytest.importorskip("transformers", reason="transformers is not installed")
    if "activate_flash_attention_impl" in program and not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        pytest.skip(f"torch {torch.__version__} has no activate_flash_attention_impl")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
