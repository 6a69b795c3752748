"""The C library of flashcore for serving: varlen, paged KV caches, lengths on the device, FP8, on PyTorch's CUDA tensors.

The structs are read from flashcore.h itself, so that a field or an operand that the header gains needs no change here: a
plan sets the fields by their names, and one that the header does not have is a refusal with the name in it.
"""

import ctypes
import math
import re
from ctypes import POINTER, byref, c_char_p, c_int32, c_uint64, c_void_p
from pathlib import Path

HEADER = Path(__file__).resolve().parents[2] / "crates/flashcore-c/include/flashcore.h"
SCALARS = {
    "uint64_t": ctypes.c_uint64,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
}
# Operands by their names; all of them 32-bit integers on the device.
OPERANDS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "page_table", "kv_batch_idx")
SCALES = ("q_scale", "k_scale", "v_scale")


class Refused(Exception):
    """A problem that flashcore does not take, with its reason."""


def parse_header(text):
    """The structs of a header as ctypes classes by name, and its integer constants by name."""
    constants = {name: int(value) for name, value in re.findall(r"^#define (\w+) (-?\d+)$", text, re.MULTILINE)}
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    structs = {}
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \w+;", text, re.DOTALL):
        fields = []
        for declaration in filter(None, (" ".join(line.split()) for line in body.split(";"))):
            match = re.fullmatch(r"(?:const )?(?:struct )?(\w+) (\**)(?:const )?(\w+)(?:\[(\d+)\])?", declaration)
            if not match:
                raise ValueError(f"flashcore.h: cannot read the field {declaration!r} of {name}")
            kind, pointer, field, count = match.groups()
            kind = c_void_p if pointer else SCALARS.get(kind) or structs[kind]
            fields.append((field, kind * int(count) if count else kind))
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs, constants


class Plan:
    """A planned problem, and the workspace of its launches: these must follow each other on one stream or graph."""

    def __init__(self, flashcore, handle, key):
        self.flashcore, self.handle, self.key = flashcore, handle, key
        self.workspace = None

    def describe(self):
        return self.flashcore.library.flashcore_plan_describe(self.handle).decode()

    def __del__(self):
        self.flashcore.library.flashcore_plan_destroy(self.handle)


class Flashcore:
    """The loaded library, on GPU 0, or on the CPU with tensors of the host."""

    def __init__(self, path, header=HEADER, device="cuda"):
        self.device = device
        self.structs, self.constants = parse_header(Path(header).read_text(encoding="utf-8"))
        self.problem, self.tensor = self.structs["flashcore_attention_problem_t"], self.structs["flashcore_tensor_t"]
        self.library = ctypes.CDLL(path) if path else None
        self.plans = {}
        for name, result, arguments in (
            ("version", c_char_p, []),
            ("last_error", c_char_p, []),
            ("attention_problem_init", c_int32, [POINTER(self.problem)] + [c_uint64] * 4 + [c_int32]),
            ("plan_create", c_int32, [c_void_p, c_int32, c_int32, c_char_p, POINTER(c_void_p)]),
            ("run", c_int32, [c_void_p, POINTER(self.tensor), c_uint64]),
            ("launch", c_int32, [c_void_p, c_void_p, POINTER(self.tensor), c_uint64]),
            ("plan_workspace_bytes", c_uint64, [c_void_p]),
            ("plan_describe", c_char_p, [c_void_p]),
            ("plan_destroy", c_int32, [c_void_p]),
        ):
            if self.library:
                function = getattr(self.library, f"flashcore_{name}")
                function.restype, function.argtypes = result, arguments

    def check(self, status):
        if status != self.constants["FLASHCORE_OK"]:
            message = self.library.flashcore_last_error().decode()
            refusals = [self.constants[f"FLASHCORE_{name}"] for name in ("INVALID_ARGUMENT", "UNSUPPORTED")]
            raise Refused(message) if status in refusals else RuntimeError(message)

    def version(self):
        return self.library.flashcore_version().decode()

    def fill(self, problem, fields):
        """Sets fields by name; those of an operand or a size that the header does not have are refused."""
        present = {name: kind for name, kind in self.problem._fields_}
        for name, value in fields.items():
            if name in present and value is not None:
                setattr(problem, name, value)
            elif value is not None and not (name in OPERANDS and f"FLASHCORE_{name.upper()}" in self.constants):
                raise Refused(f"flashcore.h of this build has no {name}")

    def plan(
        self,
        batch,
        heads,
        kv_heads,
        max_q,
        max_k,
        dim,
        causal=False,
        dtype="bf16",
        operands=(),
        total_q=None,
        total_k=None,
        page_size=None,
        num_pages=None,
        table_width=None,
        table_stride=None,
        lse=False,
        config=None,
        kv_dtype=None,
        out_dtype=None,
    ):
        """A plan for [batch, row, head, column] tensors, [total, head, column] ones, or pages, by upper bounds.

        `operands` names what a launch brings, out of `OPERANDS` and `SCALES`. Equal arguments give the same plan. Causal
        masks are bottom-right.
        """
        sizes = {
            "total_q": total_q,
            "total_k": total_k,
            "page_size": page_size,
            "num_pages": num_pages,
            "table_width": table_width,
            "table_stride": table_stride,
        }
        dtypes = dtype, kv_dtype, out_dtype
        key = (batch, heads, kv_heads, max_q, max_k, dim, causal, dtypes, tuple(operands), *sizes.values(), lse, config)
        if key in self.plans:
            return self.plans[key]
        constant, problem = self.constants, self.problem()
        for name, other in (("kv_dtype", kv_dtype), ("out_dtype", out_dtype)):
            if other:
                sizes[name] = constant[f"FLASHCORE_DTYPE_{other.upper()}"]
        number = constant[f"FLASHCORE_DTYPE_{dtype.upper()}"]
        self.check(self.library.flashcore_attention_problem_init(byref(problem), batch, heads, max_q, dim, number))
        problem.key_heads, problem.key_length, problem.lse = kv_heads, max_k, int(lse)
        problem.layout = constant["FLASHCORE_LAYOUT_BSHD"]
        problem.alignment = constant["FLASHCORE_ALIGNMENT_BOTTOM_RIGHT"]
        problem.mask = constant["FLASHCORE_MASK_CAUSAL" if causal else "FLASHCORE_MASK_NONE"]
        self.fill(problem, {**sizes, **{name: 1 for name in operands}})
        handle = c_void_p()
        name = config.encode() if config else None
        device = constant[f"FLASHCORE_DEVICE_{self.device.upper()}"]
        self.check(self.library.flashcore_plan_create(byref(problem), device, 0, name, byref(handle)))
        self.plans[key] = Plan(self, handle, key)
        return self.plans[key]

    def launch(self, plan, q, k, v, out, lse=None, stream=None, scales=None, **operands):
        """Puts the kernels on a stream, the current one by default. The tensors must outlive the launch or its graph.

        `scales` has a tensor of one float, or of [KV head] or [sequence, KV head], by the names of `SCALES`.
        """
        import torch

        given = {"query": q, "key": k, "value": v, "output": out, "lse": lse, **operands, **(scales or {})}
        entries = [self.entry(name, tensor) for name, tensor in given.items() if tensor is not None]
        for entry, scale in zip(entries[len(entries) - len(scales or {}) :], (scales or {}).values()):
            # strides[3] is from one KV head to the next, strides[0] from one sequence to the next.
            for stride, dimension in ((3, 1), (0, 2)):
                if scale.dim() >= dimension:
                    entry.strides[stride] = scale.stride(-dimension)
        if self.device == "cpu":
            return self.check(self.library.flashcore_run(plan.handle, self.list(entries), len(entries)))
        if plan.workspace is None:
            words = math.ceil(self.library.flashcore_plan_workspace_bytes(plan.handle) / 4)
            plan.workspace = torch.zeros(words, dtype=torch.int32, device="cuda")
        if plan.workspace.numel():
            entries.append(self.entry("workspace", plan.workspace))
        stream = torch.cuda.current_stream().cuda_stream if stream is None else stream
        self.check(self.library.flashcore_launch(plan.handle, stream, self.list(entries), len(entries)))

    def entry(self, name, tensor):
        """A tensor of a call."""
        number = self.constants.get(f"FLASHCORE_{name.upper()}")
        if number is None:
            raise Refused(f"flashcore.h of this build has no operand {name}")
        kinds = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2", "bfloat16": "BF16", "uint32": "I32"}
        kind = str(tensor.dtype).replace("torch.", "")
        dtype = self.constants["FLASHCORE_DTYPE_" + kinds.get(kind, kind.replace("float", "F").replace("int", "I"))]
        if tensor.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        else:
            extent = 0
        return self.tensor(number, dtype, tensor.data_ptr(), extent * tensor.element_size())

    def list(self, entries):
        """Tensors one after the other, as a call takes them."""
        return (self.tensor * len(entries))(*entries)
