"""What serving promises beyond speed: one captured graph through many steps, lengths that arrive late, batch invariance."""

import math
import random

import torch
from serving_cases import LARGEST_ERROR, RMS_ERROR, arrange, attention, page_table, relative_errors

HEADS, KV_HEADS, DIM = 32, 8, 128
BATCH, MOST_KEYS, PAGE = 32, 4096, 16
# A page id in entries of the table that no length reaches, far outside the cache.
POISON = 2**30


def random_tensor(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def random_lengths(source, chunk):
    """Query rows and keys of a step, 0 of either among them; with chunks a few of many rows, as engines mix them."""
    q_lens, k_lens = [], []
    for _ in range(BATCH):
        rows = 1 if not chunk or source.random() < 0.75 else source.randint(0, chunk)
        keys = source.randint(1, MOST_KEYS) if source.random() < 0.9 else source.randint(0, 32)
        q_lens.append(rows)
        k_lens.append(keys)
    return q_lens, k_lens


class Step:
    """One plan and its tensors, whose lengths are changed in place between replays of one graph."""

    def __init__(self, flashcore, kind, chunk):
        self.kind, self.chunk = kind, chunk
        self.most_rows = BATCH * chunk if chunk else BATCH
        lens = [MOST_KEYS] * BATCH
        self.k, self.v = (random_tensor(BATCH * MOST_KEYS, KV_HEADS, DIM) for _ in range(2))
        self.kv = arrange(kind, self.k, self.v, lens, PAGE if kind == "paged" else None)
        self.q = random_tensor(self.most_rows, HEADS, DIM)
        self.out = torch.full_like(self.q, math.nan)
        self.operands = dict(self.kv.operands)
        bounds = {}
        if kind == "paged":
            self.table = self.operands["page_table"].clone()
            bounds = {"page_size": PAGE, "num_pages": self.kv.k.shape[0]}
            bounds |= {"table_width": self.table.shape[1], "table_stride": self.table.stride(0)}
        if chunk:
            self.operands["cu_seqlens_q"] = torch.zeros(BATCH + 1, dtype=torch.int32, device="cuda")
            bounds["total_q"] = self.most_rows
        sizes = BATCH, HEADS, KV_HEADS, chunk or 1, MOST_KEYS, DIM
        plan = flashcore.plan(*sizes, causal=bool(chunk), operands=tuple(self.operands), **bounds)
        self.launch = lambda: flashcore.launch(plan, self.q, self.kv.k, self.kv.v, self.out, **self.operands)

    def set_lengths(self, q_lens, k_lens):
        self.operands["seqused_k"].copy_(torch.tensor(k_lens, dtype=torch.int32))
        if self.chunk:
            self.operands["cu_seqlens_q"][1:].copy_(torch.tensor(q_lens, dtype=torch.int32).cumsum(0))
        if self.kind == "paged":
            pages = torch.tensor([math.ceil(keys / PAGE) for keys in k_lens], device="cuda")
            unused = torch.arange(self.table.shape[1], device="cuda")[None, :] >= pages[:, None]
            self.operands["page_table"].copy_(self.table.masked_fill(unused, POISON))

    def errors(self, q_lens, k_lens):
        """Errors of the step's rows, and True if the rows past them are untouched."""
        start, pairs = 0, []
        for index, (rows, keys) in enumerate(zip(q_lens, k_lens)):
            cache = slice(index * MOST_KEYS, index * MOST_KEYS + keys)
            expected = attention(self.q[start : start + rows], self.k[cache], self.v[cache], bool(self.chunk))
            if rows:
                pairs.append((self.out[start : start + rows].float(), expected))
            start += rows
        return relative_errors(pairs), bool(self.out[start:].isnan().all())


def steps(flashcore, quick):
    """Every step of one captured graph against the reference, with other lengths in the same tensors each time."""
    count = 40 if quick else 200
    for kind in ("padded", "paged"):
        for chunk in (0, 128):
            source, name = random.Random(5), f"{kind}, {'chunks and decode' if chunk else 'decode'}"
            step = Step(flashcore, kind, chunk)
            step.set_lengths(*random_lengths(source, chunk))
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step.launch()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    step.launch()
            torch.cuda.synchronize()
            wrong, worst, taken = [], 0.0, 0
            for index in range(count):
                lens = random_lengths(source, chunk)
                step.set_lengths(*lens)
                step.out.fill_(math.nan)
                before = torch.cuda.mem_get_info()[0]
                graph.replay()
                torch.cuda.synchronize()
                taken = max(taken, before - torch.cuda.mem_get_info()[0])
                (square, largest), untouched = step.errors(*lens)
                worst = max(worst, square)
                # A comparison with NaN is false, so NaN counts as wrong.
                if not (square <= RMS_ERROR and largest <= LARGEST_ERROR and untouched):
                    wrong.append((index, square, largest, untouched))
            passed = not wrong and taken == 0
            text = f"   steps {name}: {count - len(wrong)} of {count} right, worst error {worst:.4f} rms"
            text += f", {taken} bytes allocated"
            if wrong:
                text += "; first wrong: step %d, rms %.4f, largest %.4f, rows past the end untouched: %s" % wrong[0]
            yield {"check": "steps", "name": name, "passed": passed, "worst": worst, "wrong": wrong[:5], "text": text}


def fixed_batch(source, batch, keys, chunk):
    """Lengths of a random batch with the fixed sequence at a random position."""
    position = source.randrange(batch)
    q_lens = [chunk if chunk == 1 else source.randint(0, chunk) for _ in range(batch)]
    k_lens = [max(rows, source.randint(0, MOST_KEYS)) for rows in q_lens]
    q_lens[position], k_lens[position] = chunk, keys
    return position, q_lens, k_lens


def invariance(flashcore, quick):
    """The bits of one sequence in random batches, at random positions and in random pages."""
    count, width = 100 if quick else 1000, MOST_KEYS // PAGE
    for keys, chunk in ((3001, 1), (3001, 64)):
        first = {}
        pages = (BATCH + 4) * width
        k, v = (random_tensor(pages, PAGE, KV_HEADS, DIM) for _ in range(2))
        used = math.ceil(keys / PAGE)
        fixed_k, fixed_v = (random_tensor(used, PAGE, KV_HEADS, DIM) for _ in range(2))
        fixed_q = random_tensor(chunk, HEADS, DIM)
        for batch in (BATCH, 1, 7):
            trials = count if batch == BATCH else 20
            source, differ, worst = random.Random(batch), 0, (0.0, 0.0)
            q = random_tensor(batch * chunk, HEADS, DIM)
            out = torch.full_like(q, math.nan)
            operands = {
                "seqused_k": torch.zeros(batch, dtype=torch.int32, device="cuda"),
                "cu_seqlens_q": torch.zeros(batch + 1, dtype=torch.int32, device="cuda"),
                "page_table": page_table([MOST_KEYS] * batch, PAGE, "cuda")[0],
            }
            bounds = {"page_size": PAGE, "num_pages": pages, "table_width": width, "table_stride": width}
            sizes = batch, HEADS, KV_HEADS, chunk, MOST_KEYS, DIM
            names = tuple(operands)
            plan = flashcore.plan(*sizes, causal=True, operands=names, total_q=batch * chunk, **bounds)
            for _ in range(trials):
                position, q_lens, k_lens = fixed_batch(source, batch, keys, chunk)
                ids = torch.randperm(pages, device="cuda")
                k[ids[:used]], v[ids[:used]] = fixed_k, fixed_v
                others = ids[used:][torch.randint(pages - used, (batch, width), device="cuda")].int()
                others[position, :used], others[position, used:] = ids[:used].int(), POISON
                operands["page_table"].copy_(others)
                operands["seqused_k"].copy_(torch.tensor(k_lens, dtype=torch.int32))
                operands["cu_seqlens_q"][1:].copy_(torch.tensor(q_lens, dtype=torch.int32).cumsum(0))
                start = sum(q_lens[:position])
                q[start : start + chunk] = fixed_q
                out.fill_(math.nan)
                flashcore.launch(plan, q, k, v, out, **operands)
                found = out[start : start + chunk].clone()
                if batch not in first:
                    first[batch] = found
                    flat = [tensor.view(-1, KV_HEADS, DIM)[:keys] for tensor in (fixed_k, fixed_v)]
                    worst = relative_errors([(found.float(), attention(fixed_q, *flat, True))])
                differ += not torch.equal(found.view(torch.int16), first[batch].view(torch.int16))
            right = worst[0] <= RMS_ERROR and worst[1] <= LARGEST_ERROR
            same = torch.equal(first[batch].view(torch.int16), first[BATCH].view(torch.int16))
            name = f"{chunk} rows over {keys} keys in batches of {batch}"
            text = f"invariance {name}: {differ} of {trials} differ in bits, error {worst[0]:.4f} rms"
            text += "" if batch == BATCH else f"; {'same' if same else 'OTHER'} bits as in batches of {BATCH}"
            passed = right and not differ
            yield {"check": "invariance", "name": name, "passed": passed, "differ": differ, "across": same, "text": text}


def late_writer():
    """A Triton kernel that lets its dependents start, waits, and then copies lengths (PDL)."""
    import triton
    from triton import language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    @triton.jit
    def write_late(source, target, count, BLOCK: tl.constexpr):
        gdc_wait()
        gdc_launch_dependents()
        index = tl.arange(0, BLOCK)
        value = tl.load(source + index, index < count)
        asm: tl.constexpr = "nanosleep.u32 30000; mov.u32 $0, $1;"
        value = tl.inline_asm_elementwise(asm, "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)
        tl.store(target + index, value, index < count)

    def write(source, target):
        block = triton.next_power_of_2(target.numel())
        write_late[(1,)](source, target, target.numel(), BLOCK=block, launch_pdl=True)

    return write


def dependents(flashcore, quick):
    """Lengths written by a kernel that lets its dependents start before it writes, in one captured graph."""
    write, count = late_writer(), 40 if quick else 200
    for kind in ("padded", "paged"):
        for chunk in (0, 128):
            source, name = random.Random(7), f"{kind}, {'chunks and decode' if chunk else 'decode'}"
            step = Step(flashcore, kind, chunk)
            names = [name for name in ("seqused_k", "cu_seqlens_q") if name in step.operands]
            staged = {name: torch.zeros_like(step.operands[name]) for name in names}

            def launch():
                for name in names:
                    write(staged[name], step.operands[name])
                step.launch()

            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                launch()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    launch()
            torch.cuda.synchronize()
            wrong = 0
            for _ in range(count):
                lens = random_lengths(source, chunk)
                late = {name: step.operands[name].clone() for name in names}
                step.set_lengths(*lens)
                for name in names:
                    staged[name].copy_(step.operands[name])
                    step.operands[name].copy_(late[name])
                step.out.fill_(math.nan)
                torch.cuda.synchronize()
                graph.replay()
                torch.cuda.synchronize()
                (square, largest), untouched = step.errors(*lens)
                wrong += not (square <= RMS_ERROR and largest <= LARGEST_ERROR and untouched)
            text = f"dependents {name}: {count - wrong} of {count} right with lengths that are written late"
            yield {"check": "dependents", "name": name, "passed": not wrong, "wrong": wrong, "text": text}


CHECKS = {"steps": steps, "dependents": dependents, "invariance": invariance}
