"""`flashcore.compat.install()` ahead of libraries that look for flash_attn, each in a process of its own."""

import importlib.util
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

BEFORE = """
import importlib.metadata as metadata, importlib.util, sys
import flashcore.compat
flashcore.compat.install()
"""
PROGRAMS = {
    "transformers": """
import torch, transformers
from transformers.utils import import_utils
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=99)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
assert torch.isfinite(model(torch.arange(9)[None]).logits).all()
assert import_utils._is_package_available("flash_attn", return_version=True) == (True, "2.8.4")
import_utils.is_flash_attn_2_available(), import_utils.is_flash_attn_3_available()
assert import_utils.is_flash_attn_greater_or_equal("2.8.0")
""",
    "diffusers": """
import torch, diffusers
from diffusers.models import attention_dispatch
from flashcore.compat import flash_attn, flash_attn_interface
assert attention_dispatch.flash_attn_func is flash_attn.flash_attn_func
assert attention_dispatch.flash_attn_3_func is flash_attn_interface.flash_attn_func
q = torch.randn(1, 40, 2, 64)
expected = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3).transpose(1, 2)
with torch.no_grad():
    found = attention_dispatch.dispatch_attention_fn(q, q, q, backend="flash")
assert torch.allclose(found, expected, atol=1e-5)
""",
    "accelerate": """
import torch, accelerate
model = accelerate.Accelerator(cpu=True).prepare(torch.nn.Linear(8, 8))
assert model(torch.ones(1, 8)).shape == (1, 8)
""",
    "peft": """
import torch, peft, transformers
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=99)
model = transformers.AutoModelForCausalLM.from_config(config)
model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
assert torch.isfinite(model(torch.arange(9)[None]).logits).all()
""",
    "torch": """
for name in ("flash_attn", "flash_attn_interface", "flash_attn.bert_padding", "flash_attn.layers.rotary"):
    spec = importlib.util.find_spec(name)
    assert spec.name == name and sys.modules[name].__spec__ is spec
assert importlib.util.find_spec("flash_attn.cute") is None
for name, version in (("flash_attn", "2.8.4"), ("flash-attn", "2.8.4"), ("Flash.Attn", "2.8.4"), ("flash_attn_3", "3.0.0")):
    assert metadata.version(name) == version
    assert metadata.distribution(name).metadata["Version"] == version
assert "flash_attn" in [found.metadata["Name"] for found in metadata.distributions()]
if hasattr(metadata, "packages_distributions"):
    assert "flash_attn" in metadata.packages_distributions()["flash_attn"]
    assert "flash_attn_3" in metadata.packages_distributions()["flash_attn_interface"]
assert metadata.version("torch")
flashcore.compat.install()
flashcore.compat.uninstall()
assert importlib.util.find_spec("flash_attn") is None and "flash_attn" not in sys.modules
try:
    metadata.version("flash_attn")
except metadata.PackageNotFoundError:
    pass
else:
    raise AssertionError("the version is still there")
""",
}


@pytest.mark.parametrize("library", list(PROGRAMS))
def test_a_library_that_is_imported_after(library, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    program = BEFORE + PROGRAMS[library]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
