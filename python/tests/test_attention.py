"""flashcore.attention on numpy arrays and DLPack, against float64."""

import multiprocessing
import os
import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest

import flashcore
from reference import attend, attend_batch, close

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes")
DTYPES = ["float64", "float32", "float16", "bfloat16"]


def numpy_dtype(name):
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def randn(random, *shape, dtype="float32"):
    return random.standard_normal(shape).astype(numpy_dtype(dtype))


@pytest.fixture
def random(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "alignment": "top_left"},
        {"window_size": (37, 5)},
        {"window_size": (100, -1), "causal": True},
        {"softcap": 5.0, "scale": 0.3},
    ],
    ids=str,
)
def test_layouts_and_masks(random, dtype, options):
    q, k, v = randn(random, 2, 6, 301, 64, dtype=dtype), *(randn(random, 2, 2, 437, d, dtype=dtype) for d in (64, 40))
    out, lse = flashcore.attention(q, k, v, return_lse=True, **options)
    reference = {"causal": options.get("causal", False), "window": options.get("window_size", (-1, -1))}
    reference.update({name: options[name] for name in ("softcap", "scale") if name in options})
    reference["top_left"] = options.get("alignment") == "top_left"
    bshd = [np.swapaxes(x, 1, 2) for x in (q, k, v)]
    expected, expected_lse = attend_batch(*bshd, **reference)
    assert out.dtype == q.dtype and out.shape == (2, 6, 301, 40) and lse.dtype == np.float32
    close(np.swapaxes(out, 1, 2), expected, dtype)
    close(lse, expected_lse, "float32" if dtype == "float64" else dtype, "lse")
    again = flashcore.attention(*bshd, layout="bshd", **options)
    close(again, expected, dtype)


def test_operands(random):
    q, k, v = (randn(random, 2, 4, 300, 32) for _ in range(3))
    slopes, sinks = randn(random, 4) ** 2, randn(random, 4)
    bias = randn(random, 1, 4, 300, 300)
    bias[..., 7] = -np.inf
    out, lse = flashcore.attention(q, k, v, alibi_slopes=slopes, sinks=sinks, bias=bias, causal=True, return_lse=True)
    expected, expected_lse = attend_batch(
        *(np.swapaxes(x, 1, 2) for x in (q, k, v)), slopes=slopes, sinks=sinks, causal=True, bias=np.repeat(bias, 2, 0)
    )
    close(np.swapaxes(out, 1, 2), expected, "float32")
    close(lse, expected_lse, "float32")


@pytest.mark.parametrize("rows", [(100, 300), (300, 100)], ids=str)
def test_alibi_has_the_alignment_without_a_mask(random, rows):
    """Distances are counted from row 0 at key 0 with top_left, a mask or not."""
    q, k, v = randn(random, 1, rows[0], 2, 32), randn(random, 1, rows[1], 2, 32), randn(random, 1, rows[1], 2, 32)
    slopes = random.random(2).astype(np.float32) / 8  # some rows are 200 from every key: scores round as their size does
    for alignment in ("top_left", "bottom_right"):
        out = flashcore.attention(q, k, v, layout="bshd", alibi_slopes=slopes, alignment=alignment)
        expected, _ = attend_batch(q, k, v, slopes=slopes, top_left=alignment == "top_left")
        close(out, expected, "float32")


def test_packed_sequences(random):
    lengths_q, lengths_k = [130, 0, 1, 77], [301, 5, 260, 77]
    cu_q, cu_k = (np.cumsum([0] + lengths).astype(np.int32) for lengths in (lengths_q, lengths_k))
    # Rows that no sequence has hold NaN.
    q, k, v = randn(random, cu_q[-1] + 3, 4, 64), randn(random, cu_k[-1] + 5, 2, 64), randn(random, cu_k[-1] + 5, 2, 64)
    q[cu_q[-1] :], k[cu_k[-1] :], v[cu_k[-1] :] = np.nan, np.nan, np.nan
    out, lse = flashcore.attention(
        q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=130, max_seqlen_k=301, return_lse=True
    )
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        expected, expected_lse = attend(q[rows], k[keys], v[keys], causal=True)
        close(out[rows], expected, "float32")
        close(lse[:, rows], expected_lse, "float32")
    assert (out[cu_q[-1] :] == 0).all() and (lse[:, cu_q[-1] :] == -np.inf).all()


def test_pages(random):
    page, pages, lengths = 16, 64, [301, 17, 255]
    q, k, v = randn(random, 3, 2, 4, 64), randn(random, pages, page, 2, 64), randn(random, pages, page, 2, 64)
    table = np.full((3, 20), 2**31 - 1, np.int32)
    order = random.permutation(pages)
    taken = 0
    is_used = np.zeros((pages, page), bool)
    for b, length in enumerate(lengths):
        count = -(-length // page)
        table[b, :count] = order[taken : taken + count]
        for row in range(length):
            is_used[table[b, row // page], row % page] = True
        taken += count
    k[~is_used], v[~is_used] = np.nan, np.nan
    out = flashcore.attention(
        q, k, v, layout="bshd", causal=True, seqused_k=np.array(lengths, np.int32), page_table=table
    )
    for b, length in enumerate(lengths):
        keys = [table[b, row // page] * page + row % page for row in range(length)]
        flat_k, flat_v = k.reshape(-1, 2, 64)[keys], v.reshape(-1, 2, 64)[keys]
        close(out[b], attend(q[b], flat_k, flat_v, causal=True)[0], "float32")


def test_padding_and_caches(random):
    q, k, v = randn(random, 2, 5, 4, 64), randn(random, 4, 300, 2, 64), randn(random, 4, 300, 2, 64)
    used, left, batch = (np.array(x, np.int32) for x in ([299, 150], [3, 0], [2, 0]))
    k[:, 299:], v[:, 299:] = np.nan, np.nan
    out = flashcore.attention(
        q, k, v, layout="bshd", causal=True, seqused_k=used, leftpad_k=left, kv_batch_idx=batch
    )
    for b in range(2):
        keys = slice(left[b], used[b])
        close(out[b], attend(q[b], k[batch[b], keys], v[batch[b], keys], causal=True)[0], "float32")


def test_out_is_written(random):
    q, k, v = (randn(random, 1, 2, 200, 64) for _ in range(3))
    whole = np.full((1, 2, 200, 128), 7, np.float32)
    out = flashcore.attention(q, k, v, out=whole[..., :64])
    assert out.base is whole and (whole[..., 64:] == 7).all()
    assert (out == flashcore.attention(q, k, v)).all()


class Dlpack:
    """An array that has nothing but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack(random):
    q, k, v = (randn(random, 1, 2, 200, 64) for _ in range(3))
    out = flashcore.attention(Dlpack(q), Dlpack(k[:, :, ::2]), Dlpack(v[:, :, ::2]))
    assert (out == flashcore.attention(q, k[:, :, ::2], v[:, :, ::2])).all()


def test_empty_tensors(random):
    q, k = randn(random, 2, 2, 3, 64), randn(random, 2, 2, 0, 64)
    out, lse = flashcore.attention(q, k, k, return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()
    assert flashcore.attention(q[:, :, :0], q, q).shape == (2, 2, 0, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((1, 2, 8, 64), np.int32)}, "q is int32; it must be float16, bfloat16, float32"),
        ({"k": np.zeros((1, 2, 8, 64), np.float16)}, "k is float16 and q is float32; convert one of them"),
        ({"k": np.zeros((1, 2, 8, 32), np.float32)}, "the head dim of k is 32 and that of q 64"),
        ({"out": np.zeros((1, 2, 64, 8), np.float32).swapaxes(2, 3)}, "the columns of out are 8 elements apart"),
        ({"k": np.zeros((1, 2, 8, 64), np.float32)[:, :, ::-1]}, "must not be negative"),
        ({"q": np.zeros((2, 8, 64), np.float32)}, r"q has shape \(2, 8, 64\); it must be \[batch"),
        ({"v": np.zeros((1, 2, 9, 64), np.float32)}, r"v has shape \(1, 9, 2, 64\)"),
        ({"q": np.zeros((1, 3, 8, 64), np.float32)}, "query_heads must be a multiple of key_heads"),
        ({"q": np.zeros((2, 2, 8, 64), np.float32)}, "k has 1 batches and q has 2"),
        ({"q": [1, 2]}, "q is a list; it must be a numpy array"),
        ({"softcap": -1.0}, "softcap is -1; it must be finite and above 0"),
        ({"scale": float("nan")}, "scale is NaN; it must be finite"),
        ({"layout": "sbhd"}, "layout is 'sbhd'; it must be 'bhsd' or 'bshd'"),
        ({"alignment": "left"}, "alignment is 'left'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"sinks": np.zeros(3, np.float32)}, r"sinks has shape \(3,\); it must be \(2,\)"),
        ({"seqused_k": np.zeros(1, np.int64)}, "seqused_k is int64; it must be int32"),
        ({"bias": np.zeros((1, 2, 8, 9), np.float32)}, r"bias has shape \(1, 2, 8, 9\)"),
        ({"seqused_k": np.full(1, 9, np.int32)}, "the key length of batch 0 is 9; it may be at most key_length, which is 8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(change, message):
    tensors = {name: np.zeros((1, 2, 8, 64), np.float32) for name in "qkv"}
    with pytest.raises(flashcore.InvalidArgument, match=message):
        flashcore.attention(**{**tensors, **change})


def test_unknown_keyword():
    q = np.zeros((1, 1, 8, 64), np.float32)
    with pytest.raises(TypeError, match="dropout"):
        flashcore.attention(q, q, q, dropout=0.1)
    with pytest.raises(TypeError, match="dropout"):
        flashcore.prepare(q.shape, dropout=0.1)


def test_cuda_says_why_not():
    q = np.zeros((1, 1, 8, 64), np.float16)
    try:
        out = flashcore.attention(q, q, q, device="cuda")
    except flashcore.NoDevice as error:
        assert "driver" in str(error) or "GPU" in str(error)
    else:
        assert (out == 0).all()


def test_doctor_and_prepare(capsys):
    found = flashcore.doctor()
    assert "cpu" in found["cpu"] and "flashcore" in capsys.readouterr().out
    assert "queries 300 keys 400" in flashcore.prepare((1, 8, 300, 64), (1, 2, 400, 64), dtype="bfloat16", causal=True)


def test_threads(random):
    cases = [[randn(random, 1, 4, length, 64) for _ in range(3)] for length in (130, 200, 257, 300)]
    expected = [flashcore.attention(*case, causal=True) for case in cases]
    wrong = []

    def work(offset):
        for turn in range(40):
            index = (offset + turn) % len(cases)
            if not (flashcore.attention(*cases[index], causal=True) == expected[index]).all():
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _child(q, expected, status):
    status.value = int((flashcore.attention(q, q, q) == expected).all())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_fork(random):
    q = randn(random, 1, 4, 300, 64)
    expected = flashcore.attention(q, q, q)
    context = multiprocessing.get_context("fork")
    status = context.Value("i", 0)
    child = context.Process(target=_child, args=(q, expected, status))
    child.start()
    child.join(60)
    assert status.value == 1


def test_eviction(random):
    from flashcore._plans import PlanCache
    from flashcore._resolve import Options, Tensor, attention_plan

    cache = PlanCache(capacity=8)

    def plan(rows):
        tensor = Tensor((1, rows, 1, 64), (64 * rows, 64, 64, 1), 2, (0, 0))
        return cache.add(rows, lambda: attention_plan(tensor, tensor, tensor, tensor, Options(), {}))

    first = plan(1)
    for rows in range(2, 40):
        plan(rows)
        first.is_used = True
        assert len(cache.plans) <= 8
    assert cache.find(1) is first, "a plan that calls use stays"


def test_two_libraries_beside_each_other(random, tmp_path, monkeypatch):
    """Another copy of the package and of its library, under another name, in one process."""
    import importlib
    import shutil

    from flashcore import _library

    copy = tmp_path / "flashcore_other"
    shutil.copytree(os.path.dirname(flashcore.__file__), copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copyfile(_library.path(), copy / "libflashcore.so")
    monkeypatch.setenv("FLASHCORE_LIBRARY", str(copy / "libflashcore.so"))
    monkeypatch.syspath_prepend(str(tmp_path))
    other = importlib.import_module("flashcore_other")
    assert importlib.import_module("flashcore_other._library").LIBRARY._handle != _library.LIBRARY._handle
    q, k, v = (random.standard_normal((1, 2, 200, 64)).astype("float32") for _ in "qkv")
    for _ in range(2):
        assert (other.attention(q, k, v, causal=True) == flashcore.attention(q, k, v, causal=True)).all()


THREADS = """
import os, sys
{first}
import numpy as np, flashcore
{then}
q = np.ones((1, 8, 600, 64), np.float32)
before = len(os.listdir("/proc/self/task"))
flashcore.attention(q, q, q)
os.environ["RAYON_NUM_THREADS"] = "5"
flashcore.attention(q, q, q)
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
@pytest.mark.parametrize(
    ("environment", "first", "then", "made"),
    [
        ({"RAYON_NUM_THREADS": "3"}, "", "", 3),
        ({"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}, "", "", None),
        ({}, "", 'os.environ["RAYON_NUM_THREADS"] = "3"', 3),
        ({"RAYON_NUM_THREADS": "3"}, "import torch", "torch.set_num_threads(1)", 3),
        ({}, "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])", "", 1),
    ],
)
def test_number_of_threads(environment, first, then, made):
    """What docs/pytorch.md says of RAYON_NUM_THREADS, and of what sets the threads of others."""
    if "torch" in first:
        pytest.importorskip("torch", reason="torch is not installed")
    environment = {**{name: value for name, value in os.environ.items() if name != "RAYON_NUM_THREADS"}, **environment}
    package = os.path.dirname(os.path.dirname(flashcore.__file__))
    environment["PYTHONPATH"] = os.pathsep.join([package, environment.get("PYTHONPATH", "")])
    program = THREADS.format(first=first, then=then)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == (len(os.sched_getaffinity(0)) if made is None else made)
