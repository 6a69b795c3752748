"""Serving problems: their lengths, their tensors in every layout of a KV cache, and their attention in f32."""

import math
import random
from dataclasses import dataclass, field

import torch

# Bytes of K and V below which a second call finds them in the 50 MB of L2, and above which it does not.
HOT_BYTES, COLD_BYTES = 40e6, 200e6
MEMORY_RATE, PRODUCT_RATE = 4.6e12, 750e12
# Errors allowed to anyone: root mean square and largest element, over those of the expected output.
RMS_ERROR, LARGEST_ERROR = 0.006, 2.0**-6
# Sequences of a problem that are compared with the reference.
MOST_CHECKED = 256
# Scores that the reference holds at once.
MOST_SCORES = 2**29


@dataclass
class Case:
    """A batch of sequences; `kind` is the layout of K and V, `beside` further ones that flashcore is timed with."""

    suite: str
    name: str
    q_lens: list
    k_lens: list
    kind: str  # rect, padded (seqused_k), varlen (cu_seqlens), paged
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    causal: bool = False
    page: int | None = None
    beside: list = field(default_factory=list)

    @property
    def batch(self):
        return len(self.q_lens)

    @property
    def packed_q(self):
        """True if sequences differ in query rows, or K and V are packed: then Q is packed too."""
        return self.kind == "varlen" or len(set(self.q_lens)) > 1

    def attended(self):
        """Scores that rows attend, of one head."""
        total = 0
        for q, k in zip(self.q_lens, self.k_lens):
            rows = min(q, k)
            total += q * k if not self.causal else rows * (k - rows) + rows * (rows + 1) // 2
        return total

    def kv_bytes(self):
        return 2 * 2 * sum(self.k_lens) * self.kv_heads * self.dim

    def floor(self):
        """Microseconds of the bytes and of the FLOPs, whichever is more."""
        moved = self.kv_bytes() + 2 * 2 * sum(self.q_lens) * self.heads * self.dim
        return max(moved / MEMORY_RATE, 4 * self.heads * self.dim * self.attended() / PRODUCT_RATE) * 1e6


def lengths(count, low, high, seed):
    """Random lengths, the same in every run."""
    source = random.Random(seed)
    return [source.randint(low, high) for _ in range(count)]


def size(number):
    return f"{number // 1024}k" if number % 1024 == 0 else str(number)


def masks(quick=False):
    return (True,) if quick else (False, True)


def decode(quick):
    for batch in (1, 32) if quick else (1, 8, 32, 128):
        for keys in (1024, 8192) if quick else (1024, 8192, 32768):
            yield Case("decode", f"{batch} x {size(keys)}", [1] * batch, [keys] * batch, "rect")


def paged(quick):
    shapes = [(1, 1024), (1, 8192), (8, 8192), (32, 8192), (128, 2048), (32, 1000)]
    for page in (16,) if quick else (16, 64, 256):
        for batch, keys in shapes[::2] if quick else shapes:
            name = f"{batch} x {size(keys)}, pages of {page}"
            yield Case("paged", name, [1] * batch, [keys] * batch, "paged", page=page, beside=["rect"])


def mixed(quick):
    keys = [131072] + [4096] * 31
    for kind, page in (("paged", 16), ("padded", None)):
        name = f"1 x 128k + 31 x 4k, {'pages of 16' if page else 'seqused_k'}"
        yield Case("mixed", name, [1] * 32, keys, kind, page=page)


def rows(quick):
    shapes = [(count, keys) for count in (16, 64, 256) for keys in (8192, 32768, 131072)]
    for count, keys in shapes[1::3] if quick else shapes:
        for causal in masks(quick):
            for kind, page in (("rect", None), ("paged", 64)):
                name = f"{count} rows over {size(keys)}{', pages of 64' if page else ''}"
                yield Case("rows", name, [count], [keys], kind, causal=causal, page=page)


def chunks(quick):
    for count in (512,) if quick else (512, 2048):
        for kind, page in (("rect", None), ("paged", 64)):
            name = f"{count} rows over 16k{', pages of 64' if page else ''}"
            yield Case("chunks", name, [count], [16384], kind, causal=True, page=page)


def varlen(quick):
    batches = {
        "uniform 16 x 1k": [1024] * 16,
        "mixed 16 x 16..4096": lengths(16, 16, 4096, 1),
        "short 256 x 8..128": lengths(256, 8, 128, 2),
        "8192 + 63 x 64..128": [8192, *lengths(63, 64, 128, 3)],
        "8192 x 32": [32] * 8192,
    }
    for name, lens in batches.items():
        for causal in masks(quick):
            beside = ["rect"] if name.startswith("uniform") else []
            yield Case("varlen", name, lens, lens, "varlen", heads=16, kv_heads=16, causal=causal, beside=beside)


def prefill(quick):
    """Prefill over pages, beside the same rows and keys in one contiguous tensor."""
    for keys in (4096,) if quick else (4096, 8192, 16384):
        for page in (16, 256) if quick else (16, 64, 256):
            name = f"1 x {size(keys)}, pages of {page}"
            yield Case("prefill", name, [keys], [keys], "paged", causal=True, page=page, beside=["rect"])


TIMED = {
    "decode": decode,
    "paged": paged,
    "mixed": mixed,
    "rows": rows,
    "chunks": chunks,
    "varlen": varlen,
    "prefill": prefill,
}


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def offsets(lens, device):
    """cu_seqlens of lengths."""
    total = [0]
    for length in lens:
        total.append(total[-1] + length)
    return int32(total, device)


@dataclass
class Kv:
    """K and V in one layout, and the operands that describe it."""

    kind: str
    k: torch.Tensor
    v: torch.Tensor
    max_k: int
    operands: dict
    page: int | None = None

    def clone(self):
        return Kv(self.kind, self.k.clone(), self.v.clone(), self.max_k, self.operands, self.page)


def page_table(k_lens, page, device, seed=0, spare=8):
    """Shuffled page ids [sequences, width], and the number of pages; entries past a sequence's end are 0."""
    counts = [math.ceil(length / page) for length in k_lens]
    pages = sum(counts) + spare
    ids = torch.randperm(pages, generator=torch.Generator().manual_seed(seed), dtype=torch.int64)
    table, start = torch.zeros(len(k_lens), max(counts), dtype=torch.int32), 0
    for row, count in enumerate(counts):
        table[row, :count] = ids[start : start + count].int()
        start += count
    return table.to(device), pages


def arrange(kind, packed_k, packed_v, k_lens, page=None):
    """K and V [total, head, column] in another layout."""
    device, (_, kv_heads, dim) = packed_k.device, packed_k.shape
    batch, longest = len(k_lens), max(k_lens)
    seqused_k = int32(k_lens, device)
    if kind == "varlen":
        return Kv(kind, packed_k, packed_v, longest, {"cu_seqlens_k": offsets(k_lens, device)})
    if kind == "rect":
        shape = (batch, longest, kv_heads, dim)
        return Kv(kind, packed_k.view(shape), packed_v.view(shape), longest, {})
    if kind == "padded":
        filled, start = [packed_k.new_zeros(batch, longest, kv_heads, dim) for _ in range(2)], 0
        for row, length in enumerate(k_lens):
            for target, source in zip(filled, (packed_k, packed_v)):
                target[row, :length] = source[start : start + length]
            start += length
        return Kv(kind, *filled, longest, {"seqused_k": seqused_k})
    table, pages = page_table(k_lens, page, device)
    filled, start = [packed_k.new_zeros(pages, page, kv_heads, dim) for _ in range(2)], 0
    for row, length in enumerate(k_lens):
        count = math.ceil(length / page)
        for target, source in zip(filled, (packed_k, packed_v)):
            padded = source.new_zeros(count * page, kv_heads, dim)
            padded[:length] = source[start : start + length]
            target[table[row, :count].long()] = padded.view(count, page, kv_heads, dim)
        start += length
    operands = {"page_table": table, "seqused_k": seqused_k}
    return Kv("paged", *filled, table.shape[1] * page, operands, page)


def attention(q, k, v, causal):
    """Attention of one sequence in f32: q [rows, heads, column], k and v [keys, kv_heads, column], bottom-right causal."""
    (count, heads, dim), (keys, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads
    output = torch.zeros(count, heads, dim, dtype=torch.float32, device=q.device)
    if keys == 0:
        return output
    k, v = (tensor.float().transpose(0, 1) for tensor in (k, v))
    step = max(1, MOST_SCORES // (heads * keys))
    for first in range(0, count, step):
        part = q[first : first + step].float()
        taken = part.shape[0]
        part = part.view(taken, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * taken, dim)
        scores = (part @ k.transpose(1, 2)).view(kv_heads, group, taken, keys) / math.sqrt(dim)
        if causal:
            position = torch.arange(first, first + taken, device=q.device) + keys - count
            hidden = torch.arange(keys, device=q.device)[None, :] > position[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
        mixed_values = weights.view(kv_heads, group * taken, keys) @ v
        mixed_values = mixed_values.view(kv_heads, group, taken, dim).permute(2, 0, 1, 3)
        output[first : first + taken] = mixed_values.reshape(taken, heads, dim)
    return output


def relative_errors(pairs):
    """The largest error of (output, expected) pairs: root mean square and largest element, over those of `expected`."""
    found = []
    for output, expected in pairs:
        difference = output - expected
        sizes = expected.square().mean().sqrt(), expected.abs().max()
        # Nothing but zeros is expected of rows without keys.
        square, largest = (size_of.clamp(min=1e-30) for size_of in sizes)
        found.append(torch.stack([difference.square().mean().sqrt() / square, difference.abs().max() / largest]))
    return tuple(torch.stack(found).amax(0).tolist()) if found else (0.0, 0.0)


class Reference:
    """Attention in f32 of the sequences of a batch, or of a sample of a large one."""

    def __init__(self, case, q, k, v):
        starts_q, starts_k = [0], [0]
        for q_len, k_len in zip(case.q_lens, case.k_lens):
            starts_q.append(starts_q[-1] + q_len)
            starts_k.append(starts_k[-1] + k_len)
        chosen = range(case.batch)
        if case.batch > MOST_CHECKED:
            inner = random.Random(case.batch).sample(chosen, MOST_CHECKED - 2)
            chosen = sorted({0, case.batch - 1, *inner})
        self.expected = []
        for index in chosen:
            rows_of, keys_of = (slice(starts[index], starts[index + 1]) for starts in (starts_q, starts_k))
            self.expected.append((rows_of, attention(q[rows_of], k[keys_of], v[keys_of], case.causal)))

    def error(self, output):
        """The largest error of a sequence: root mean square, and largest element, over those of its expected output.

        Rounding to bf16 gives about 0.0025; one key too many of 8,192 gives 0.011, one wrong page more.
        """
        output = output.reshape(-1, *output.shape[-2:])
        if not output.isfinite().all():
            return math.inf, math.inf
        pairs = [(output[rows_of].float(), expected) for rows_of, expected in self.expected if expected.numel()]
        return relative_errors(pairs)
