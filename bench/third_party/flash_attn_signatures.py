#!/usr/bin/env python3
"""Compares the signatures of flashcore.compat with those of FlashAttention's sources, which need not be importable.

    python bench/third_party/flash_attn_signatures.py CHECKOUT            # prints what differs
    python bench/third_party/flash_attn_signatures.py CHECKOUT --write    # and writes python/tests/flash_attn_signatures.txt

The file has one function a line, by names and defaults; python/tests/test_compat.py holds the modules to it.
"""

from __future__ import annotations

import ast
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DATA = os.path.join(ROOT, "python", "tests", "flash_attn_signatures.txt")
# Module of flashcore.compat, file of FlashAttention, functions beside the public ones.
FILES = [
    ("flash_attn", "flash_attn/flash_attn_interface.py", ["_flash_attn_forward", "_flash_attn_varlen_forward", "_get_block_size_n"]),
    ("flash_attn_interface", "hopper/flash_attn_interface.py", []),
    ("bert_padding", "flash_attn/bert_padding.py", []),
    ("rotary", "flash_attn/layers/rotary.py", []),
]
# Helpers of the sources that are no interface: they are not there.
HELPERS = {"maybe_contiguous", "round_multiple", "round_up_headdim", "setup_context", "rotate_half"}


def signatures(checkout):
    """Lines `module.function(a, b=None)`."""
    lines = []
    for module, path, private in FILES:
        with open(os.path.join(checkout, path)) as file:
            body = ast.parse(file.read()).body
        for node in body:
            if not isinstance(node, ast.FunctionDef) or node.name in HELPERS:
                continue
            if node.name.startswith("_") and node.name not in private:
                continue
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
            lines.append(f"{module}.{node.name}({ast.unparse(node.args)})")
    return sorted(set(lines))


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    found = signatures(sys.argv[1])
    sys.path[:0] = [os.path.join(ROOT, "python"), os.path.join(ROOT, "python", "tests")]
    import flashcore_signatures

    if "--write" in sys.argv:
        with open(DATA, "w") as file:
            file.write("\n".join(found) + "\n")
    differences = flashcore_signatures.differences(found)
    absent = [line for line in found if line.partition("(")[0] in flashcore_signatures.ABSENT]
    print("\n".join(differences) or f"{len(found) - len(absent)} signatures are the same; not there: {len(absent)}")
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
