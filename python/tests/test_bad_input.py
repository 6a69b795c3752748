"""Mistakes, by every function that takes torch tensors: an exception that names the argument and what to do."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import flashcore  # noqa: E402
import flashcore.torch as ft  # noqa: E402
from flashcore.compat import flash_attn as fa2  # noqa: E402
from flashcore.compat import flash_attn_interface as fa3  # noqa: E402

ops = torch.ops.flashcore
ROWS, KEYS, NEW = 70, 200, 3
ENDS_Q, ENDS_K = (torch.tensor([0, end], dtype=torch.int32) for end in (ROWS, KEYS))
USED, FILLED = (torch.tensor([used], dtype=torch.int32) for used in (KEYS, 20))
PACKED = (ENDS_Q, ENDS_K, ROWS, KEYS)


def first(x):
    """The rows of the only sequence; what is no tensor as it is."""
    return x[0] if isinstance(x, torch.Tensor) else x


def new(x):
    """Rows to append."""
    return x[:, :NEW].clone() if isinstance(x, torch.Tensor) else x


# Functions of q, k, v of [batch, row, head, column]; the names of k and v; whether a tensor that requires grad is refused at once.
FUNCTIONS = {
    "attention": (lambda q, k, v, **o: flashcore.attention(q, k, v, layout="bshd", **o), "kv", False),
    "forward": (ft.forward, "kv", False),
    "ops.forward": (ops.forward, "kv", False),
    "ops.forward_out": (lambda q, k, v, **o: ops.forward_out(q, k, v, out=torch.empty(1, ROWS, 4, 64).half(), **o), "kv", True),
    "varlen_forward": (lambda q, k, v, **o: ft.varlen_forward(first(q), first(k), first(v), *PACKED, **o), "kv", False),
    "ops.varlen_forward": (lambda q, k, v, **o: ops.varlen_forward(first(q), first(k), first(v), *PACKED, **o), "kv", False),
    "kvcache_forward": (lambda q, k, v, **o: ft.kvcache_forward(q, k, v, None, None, USED, **o), "cache", True),
    "ops.kvcache_forward": (lambda q, k, v, **o: ops.kvcache_forward(q, k, v, None, None, USED, **o), "cache", True),
    "append and attend": (lambda q, k, v, **o: ft.kvcache_forward(new(q), k, v, new(k), new(v), FILLED, **o), "cache", True),
    "continue_forward": (
        lambda q, k, v, **o: ft.continue_forward(q, k, v, torch.zeros(1, ROWS, 4, 64).half(), torch.zeros(1, 4, ROWS), **o), "kv", True,
    ),
    "float8_forward": (ops.float8_forward, "kv", True),
    "float8_kvcache_forward": (
        lambda q, k, v, **o: ops.float8_kvcache_forward(new(q), k, v, torch.zeros(1, NEW, 2, 64).half(), torch.zeros(1, NEW, 2, 64).half(), FILLED, **o),
        "cache", True,
    ),
    "fa2 func": (fa2.flash_attn_func, "kv", False),
    "fa2 varlen": (lambda q, k, v, **o: fa2.flash_attn_varlen_func(first(q), first(k), first(v), *PACKED, **o), "kv", False),
    "fa2 cache": (lambda q, k, v, **o: fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=USED, **o), "cache", True),
    "fa3 func": (fa3.flash_attn_func, "kv", False),
    "fa3 varlen": (lambda q, k, v, **o: fa3.flash_attn_varlen_func(first(q), first(k), first(v), *PACKED, **o), "kv", False),
    "fa3 cache": (lambda q, k, v, **o: fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=USED, **o), "cache", True),
    "fa3 FP8": (lambda q, k, v, **o: fa3.flash_attn_func(q, k, v, **o), "kv", True),
}  # fmt: skip


@pytest.fixture(params=list(FUNCTIONS))
def case(request):
    """A function, its tensors, and the names of k and v."""
    function, names, refuses_grad = FUNCTIONS[request.param]
    q, k, v = (torch.randn(1, rows, heads, 64).half() for rows, heads in ((ROWS, 4), (KEYS, 2), (KEYS, 2)))
    if "FP8" in request.param or "float8" in request.param:
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    function(q, k, v)
    return request.param, function, (q, k, v), ("k", "v") if names == "kv" else ("k_cache", "v_cache"), refuses_grad


def apart(x):
    """The same tensor with columns that are not adjacent."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def test_another_device(case):
    _, function, (q, k, v), (k_name, v_name), _ = case
    # The meta device stands for another one: torch has it everywhere.
    for tensors, message in (
        ((q, k.to("meta"), v), f"{k_name} is on meta and q on cpu; move them to one device"),
        ((q, k, v.to("meta")), f"{v_name} is on meta and q on cpu; move them to one device"),
        ((q.to("meta"), k, v), f"{k_name} is on cpu and q on meta; move them to one device"),
    ):
        for _ in range(2):
            with pytest.raises(flashcore.InvalidArgument, match=message):
                function(*tensors)


def test_operands_on_another_device():
    q = torch.randn(1, 8, 2, 64)
    for name, tensor in (("sinks", torch.zeros(2)), ("bias", torch.zeros(1, 2, 8, 8)), ("seqused_k", torch.ones(1, dtype=torch.int32))):
        with pytest.raises(flashcore.InvalidArgument, match=f"{name} is on meta and q on cpu; move them to one device"):
            ft.forward(q, q, q, **{name: tensor.to("meta")})
    rows, caches = torch.randn(4, 2, 64), [torch.zeros(4, 8, 2, 64) for _ in "kv"]
    with pytest.raises(flashcore.InvalidArgument, match="slot_mapping is on meta and k on cpu"):
        ft.append(rows, rows, *caches, torch.arange(4, device="meta"))
    with pytest.raises(flashcore.InvalidArgument, match="lses is on meta and parts on cpu"):
        ft.merge(torch.randn(2, 3, 2, 64), torch.randn(2, 3, 2, device="meta"))


def test_a_wrong_type(case):
    name, function, (q, k, v), _, _ = case
    other = "k is float8_e4m3fn" if k.dtype != q.dtype else "q is float16"
    with pytest.raises(flashcore.InvalidArgument, match=f"v is bfloat16 and {other}; convert one of them"):
        function(q, k, v.to(torch.bfloat16))
    if name not in ("ops.forward_out", "continue_forward"):  # there, the output is named
        with pytest.raises(flashcore.InvalidArgument, match="q is int32; it must be float16, bfloat16"):
            function(q.int(), k, v)


def test_columns_that_are_not_adjacent(case):
    name, function, (q, k, v), _, _ = case
    if name in ("attention", "fa2 func", "fa2 varlen", "fa3 func", "fa3 varlen"):
        # Copied, as in FlashAttention.
        expected = function(q, k, v)
        for tensors in ((q, apart(k), v), (apart(q), k, apart(v))):
            assert torch.equal(function(*tensors), expected)
        return
    with pytest.raises(flashcore.InvalidArgument, match="the columns of (k|k_cache) are 2 elements apart; they must be adjacent"):
        function(q, apart(k), v)


def test_columns_of_attention_are_copied_everywhere():
    """Codes, packed rows, pages and heads before rows, by `flashcore.attention`; an output must have them adjacent."""
    q, k, v = torch.randn(2, 5, 2, 64), torch.randn(2, 40, 2, 64), torch.randn(2, 40, 2, 64)
    ends, used, pages = torch.tensor([0, 5], dtype=torch.int32), torch.full((2,), 30, dtype=torch.int32), torch.tensor([[1], [0]], dtype=torch.int32)
    codes = [x.to(torch.float8_e4m3fn) for x in (k, v)]
    for tensors, options in (
        ((q, k, v), {"layout": "bhsd"}),
        ((q, *codes), {}),
        ((q[0], k[0], v[0]), {"cu_seqlens_q": ends, "cu_seqlens_k": ends}),
        ((q, k, v), {"page_table": pages, "seqused_k": used}),
    ):
        options = {"layout": "bshd", **options}
        if options["layout"] == "bhsd":
            tensors = [x.transpose(1, 2) for x in tensors]
        expected = flashcore.attention(*tensors, **options)
        for _ in range(2):
            assert torch.equal(flashcore.attention(*map(apart, tensors), **options), expected), options
    compiled = torch.compile(lambda q, k, v: flashcore.attention(q, k, v, layout="bshd"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, apart(k), v), flashcore.attention(q, k, v, layout="bshd"))
    with pytest.raises(flashcore.InvalidArgument, match="the columns of out are 5 elements apart; they must be adjacent"):
        flashcore.attention(q, k, v, layout="bshd", out=torch.empty(2, 2, 64, 5).permute(0, 3, 1, 2))


def test_head_dims(case):
    _, function, (q, k, v), _, _ = case
    with pytest.raises(flashcore.InvalidArgument, match="the head dim of k is 32 and that of q 64; they must be equal"):
        function(q, k[..., :32].contiguous(), v)
    with pytest.raises(flashcore.InvalidArgument, match=r"head_dim is 0; it must be at least 1|it must be \[1, rows, 2, 0\]"):
        function(q[..., :0].contiguous(), k[..., :0].contiguous(), v)


def test_keywords_that_are_not_there(case):
    name, function, tensors, _, _ = case
    for keyword in ("dropout_p", "colour"):
        if keyword == "dropout_p" and name in ("fa2 func", "fa2 varlen"):
            with pytest.raises(flashcore.Unsupported, match="dropout_p is 0.1; flashcore has no dropout: pass 0.0"):
                function(*tensors, dropout_p=0.1)
            continue
        # torch raises a RuntimeError for its operators.
        with pytest.raises((TypeError, RuntimeError), match=keyword) as caught:
            function(*tensors, **{keyword: 0.1})
        is_operator = name.startswith("ops.") or name in ("continue_forward", "float8_forward", "float8_kvcache_forward")
        assert caught.type is (RuntimeError if is_operator else TypeError)


def test_tensors_that_require_grad(case):
    _, function, (q, k, v), _, refuses_grad = case
    for _ in range(2):
        x = q.clone().requires_grad_()
        with torch.no_grad():
            function(x, k, v)
        with torch.inference_mode():
            function(x, k, v)
        if refuses_grad:
            with pytest.raises(flashcore.NoBackward, match="a tensor requires grad, and flashcore computes the forward pass only; call it under"):
                function(x, k, v)
            continue
        result = function(x, k, v)
        out = result[0] if isinstance(result, tuple) else result
        with pytest.raises(flashcore.NoBackward, match="flashcore computes the forward pass only, and a gradient was asked of it; call it under"):
            out.sum().backward()


def test_operands_that_require_grad():
    q, sinks = torch.randn(1, 3, 2, 64), torch.zeros(2, requires_grad=True)
    codes, scale = torch.randn(1, 40, 2, 64).to(torch.float8_e4m3fn), torch.ones(2, requires_grad=True)
    calls = (
        lambda: ops.kvcache_forward(q, q, q, None, None, torch.tensor([3], dtype=torch.int32), sinks=sinks),
        lambda: ops.float8_forward(q, codes, codes, None, scale, scale),
        lambda: ops.float8_forward(q, codes, codes, sinks=sinks),
    )
    for call in calls:
        for _ in range(2):
            with torch.no_grad():
                call()
            with pytest.raises(flashcore.NoBackward, match="a tensor requires grad"):
                call()


def test_what_is_no_tensor(case):
    _, function, (q, k, v), (k_name, _), _ = case
    with pytest.raises(flashcore.InvalidArgument, match=f"{k_name} is a NoneType"):
        function(q, None, v)
    with pytest.raises((flashcore.InvalidArgument, RuntimeError), match=f"{k_name} is a list|argument '{k_name}'"):
        function(q, [1.0], v)


NUMBERS = {
    "window_size": [5, "a", "ab", (1,), (1, 2, 3), (1.5, 0), None, ("1", 0)],
    "scale": ["x", (1,), [0.5]],
    "softcap": ["x", (1,), None],
}


def test_what_is_no_number(case):
    name, function, tensors, _, _ = case
    is_compat = name[:3] in ("fa2", "fa3")
    if not is_compat and name != "attention":
        # torch's own words for its operators.
        with pytest.raises(RuntimeError, match="scale"):
            function(*tensors, scale="x")
        return
    for argument, values in NUMBERS.items():
        argument = "softmax_scale" if is_compat and argument == "scale" else argument
        wanted = "(left, right), two integers, -1 for no limit" if argument == "window_size" else "a number"
        for value in values:
            with pytest.raises(flashcore.InvalidArgument) as caught:
                function(*tensors, **{argument: value})
            assert str(caught.value) == f"{argument} is {value!r}; it must be {wanted}"
    import numpy as np

    for window, scale in (((3, 0), 0.5), ([3, 0], 0.5), ((np.int64(3), torch.tensor(0)), np.float32(0.5)), ((3, 0), np.float64(0.5))):
        result = function(*tensors, window_size=window, **{"softmax_scale" if is_compat else "scale": scale})
        expected = function(*tensors, window_size=(3, 0), **{"softmax_scale" if is_compat else "scale": 0.5})
        assert torch.equal(*(x[0] if isinstance(x, tuple) else x for x in (result, expected)))


Q, KV = torch.randn(2, 8, 2, 64), [torch.randn(2, 16, 2, 64) for _ in "kv"]
FRESH, LENGTHS, SLOT = torch.randn(2, 1, 2, 64), torch.tensor([3, 5], dtype=torch.int32), torch.arange(2)
ENDS = torch.tensor([0, 3, 8], dtype=torch.int32)
ROW, ONE = torch.ones(3), torch.ones(())
PAGES, TABLE, FULL = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), torch.ones(5, 32), torch.full((2,), 16, dtype=torch.int32)
WRONG = [
    (lambda: ft.forward(ONE, *KV), r"q has shape \(\); it must have dimensions"),
    (lambda: fa2.flash_attn_func(Q, ONE, KV[1]), r"k has shape \(\); it must have dimensions"),
    (lambda: ft.varlen_forward(Q[0], KV[0][0], ONE, ENDS, ENDS, 8, 8), r"v has shape \(\); it must have dimensions"),
    (lambda: ft.forward(Q, *KV, window_left=2.5), r"window_size is \(2.5, -1\); it must be \(left, right\), two integers"),
    (lambda: ft.forward(Q, *KV, window_right=(1,)), r"window_size is \(-1, \(1,\)\); it must be"),
    (lambda: ft.forward(Q, *KV, scale=(1,)), r"scale is \(1,\); it must be a number"),
    (lambda: ft.forward(Q, *KV, softcap=(1,)), r"softcap is \(1,\); it must be a number"),
    (lambda: flashcore.attention(Q.numpy(), *(x.numpy() for x in KV), scale=ROW.numpy()), r"scale is array\(.*\); it must be a number"),
    (lambda: flashcore.attention(Q.numpy(), *(x.numpy() for x in KV), max_seqlen_q=[1]), r"max_seqlen_q is \[1\]; it must be an integer"),
    (lambda: flashcore.attention(Q[0], KV[0][0], KV[1][0], cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, k_scale=0.5), "k_scale is a float; it must be a torch tensor"),
    (lambda: flashcore.attention(Q[0], *KV, cu_seqlens_q=ENDS, page_table=[0]), "page_table is a list; it must be a torch tensor"),
    (lambda: flashcore.attention(Q[0], *KV, cu_seqlens_q=ENDS, page_table=SLOT), r"page_table has shape \(2,\); it must be \(batch, pages of"),
    (lambda: flashcore.attention(ROW, *KV, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS), r"q has shape \(3,\); it must be \[total_q"),
    (lambda: fa2.flash_attn_func(Q, *KV, alibi_slopes=[0.1, 0.2]), "alibi_slopes is a list; it must be a torch tensor"),
    (lambda: fa2.flash_attn_func(Q, *KV, alibi_slopes=torch.ones(3, 2)), r"alibi_slopes has shape \(3, 2\); it must be \(heads,\) or \(2, heads\)"),
    (lambda: fa2.flash_attn_varlen_func(Q[0], KV[0][0], KV[1][0], ENDS, ENDS, 8, 8, alibi_slopes=torch.ones(3, 2)), r"alibi_slopes has shape \(3, 2\)"),
    (lambda: fa2.flash_attn_with_kvcache(Q, *KV, cache_seqlens=LENGTHS, alibi_slopes=torch.ones(3, 2)), r"alibi_slopes has shape \(3, 2\)"),
    (lambda: fa2.flash_attn_varlen_func(Q[0], KV[0][0], KV[1][0], ENDS, ENDS, ROW, 8), r"max_seqlen_q has shape \(3,\); it must be one integer"),
    (lambda: fa2.flash_attn_with_kvcache(Q, *KV, 1, FRESH, cache_seqlens=LENGTHS), "k is a int; it must be a torch tensor"),
    (lambda: fa2.flash_attn_with_kvcache(Q, *KV, cache_seqlens=LENGTHS, block_table=[[0]]), "block_table is a list; it must be a torch tensor"),
    (lambda: fa3.flash_attn_with_kvcache(Q, *KV, cache_seqlens=LENGTHS, page_table=LENGTHS), r"page_table has shape \(2,\); it must be \(batch, pages"),
    (lambda: fa3.flash_attn_func(Q, *KV, attention_chunk=-3), "attention_chunk is -3; it must be an integer from 0 on"),
    (lambda: fa3.flash_attn_func(Q, *KV, attention_chunk="a"), "attention_chunk is 'a'; it must be an integer from 0 on"),
    (lambda: fa3.flash_attn_varlen_func(Q[0], KV[0][0], KV[1][0], ENDS, ENDS, 8, 8, attention_chunk=1.5), "attention_chunk is 1.5; it must be"),
    (lambda: fa2.flash_attn_qkvpacked_func(torch.randn(2, 8, 4, 2, 64)), r"qkv has shape \(2, 8, 4, 2, 64\); it must be \[batch, row, 3, head, column\]"),
    (lambda: fa2.flash_attn_qkvpacked_func([1]), "qkv is a list; it must be a torch tensor"),
    (lambda: fa2.flash_attn_kvpacked_func(Q, torch.randn(2, 8, 3, 2, 64)), r"kv has shape \(2, 8, 3, 2, 64\); it must be \[batch, row, 2, head, column\]"),
    (lambda: fa2.flash_attn_varlen_qkvpacked_func(torch.randn(8, 4, 2, 64), ENDS, 8), r"qkv has shape \(8, 4, 2, 64\); it must be \[row, 3, head, column\]"),
    (lambda: fa2.flash_attn_varlen_kvpacked_func(Q[0], torch.randn(8, 3, 2, 64), ENDS, ENDS, 8, 8), r"kv has shape \(8, 3, 2, 64\); it must be \[row, 2, head"),
    (lambda: fa3.flash_attn_qkvpacked_func(torch.randn(2, 8, 4, 2, 64)), r"qkv has shape \(2, 8, 4, 2, 64\); it must be \[batch, row, 3, head, column\]"),
    (lambda: fa3.flash_attn_qkvpacked_func(torch.randn(2, 8, 6, 64), num_heads_q=3), "num_heads_q is 3 of 6 heads of qkv; k and v have half of the others each"),
    (lambda: ft.append(None, FRESH[0], *KV, SLOT), "k is a NoneType; it must be a torch tensor"),
    (lambda: ft.append(FRESH[0], FRESH[0], KV[0], None, SLOT), "v_cache is a NoneType; it must be a torch tensor"),
    (lambda: ft.merge(None, ROW), "parts is a NoneType; it must be a torch tensor"),
    (lambda: flashcore.attention(Q[0], *KV, cu_seqlens_q=ENDS, page_table=PAGES, max_seqlen_k=33, layout="bshd"), "max_seqlen_k is 33, and page_table has pages for 32 keys"),
    (lambda: fa2.flash_attn_varlen_func(Q[0], *KV, ENDS, ENDS, 8, 10**5, block_table=PAGES), "max_seqlen_k is 100000, and page_table has pages for 32 keys"),
    (lambda: flashcore.attention(Q[0], *KV, cu_seqlens_q=ENDS, seqused_k=LENGTHS, max_seqlen_k=17, layout="bshd"), "max_seqlen_k is 17, and k has 16 keys"),
    (lambda: ft.append(FRESH[:, 0], FRESH[:, 0], *KV, torch.tensor([3, 32])), "the slot of token 1 is 32; the cache has 32 slots"),
    (lambda: ft.append(FRESH[:, 0], FRESH[:, 0], *KV, torch.tensor([3, -2])), "the slot of token 1 is -2; the cache has 32 slots"),
    (lambda: ft.append(FRESH[:, 0], FRESH[:, 0], *KV, SLOT, None, SLOT + 4, TABLE, TABLE), "token 1 is at position 5; cos and sin have 5 rows"),
    (lambda: fa2.flash_attn_with_kvcache(Q[:, :1], *KV, FRESH, FRESH, TABLE, TABLE, LENGTHS), "sequence 1 is at position 5; cos and sin have 5 rows"),
    (lambda: fa3.flash_attn_with_kvcache(Q[:, :1], *KV, FRESH, FRESH, cache_seqlens=FULL, attention_chunk=8), "a sequence has 17 keys with those that are appended, and the cache has 16 rows"),
    (lambda: flashcore.prepare(Q, 5), "k is 5; it must be a shape, such as"),
    (lambda: flashcore.prepare(Q, seqused_k=5), "seqused_k is 5; it must be a shape, such as"),
    (lambda: flashcore.prepare((1, 2, 8, 64), config=5), "config is 5; it must be the name of one"),
]


@pytest.mark.parametrize("index", range(len(WRONG)))
def test_no_error_is_one_of_python(index):
    call, message = WRONG[index]
    for _ in range(2):
        with pytest.raises(flashcore.InvalidArgument, match=message):
            call()


def test_numbers_of_arrays():
    q = torch.randn(1, 4, 8, 64).numpy()
    for argument, values in NUMBERS.items():
        for value in values:
            with pytest.raises(flashcore.InvalidArgument) as caught:
                flashcore.attention(q, q, q, **{argument: value})
            assert str(caught.value).startswith(f"{argument} is {value!r}; it must be ")
    ends = torch.tensor([0, 8], dtype=torch.int32).numpy()
    for value in ("a", -5, 2.5, 2**64):
        with pytest.raises(flashcore.InvalidArgument, match="max_seqlen_k is .*; it must be an integer from 0 on"):
            flashcore.attention(q[0, 0][:, None], q[0, 0][:, None], q[0, 0][:, None], cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_k=value)
    far = flashcore.attention(q, q, q, window_size=(2**70, 0))
    assert (far == flashcore.attention(q, q, q, causal=True)).all()


def test_negative_lengths_are_printed_as_such():
    q = torch.randn(8, 2, 64)
    for offsets, message in (([0, -5], "cu_seqlens_q falls from 0 to -5|cu_seqlens_q of sequence 0 is -5"), ([-5, 8], "cu_seqlens_q begins with -5 ")):
        ends = torch.tensor(offsets, dtype=torch.int32)
        for _ in range(2):
            with pytest.raises(flashcore.InvalidArgument, match=message):
                ft.varlen_forward(q, q, q, ends, ends, 8, 8)
    caches, rows = [torch.randn(1, 8, 2, 64) for _ in "kv"], torch.randn(1, 1, 2, 64)
    with pytest.raises(flashcore.InvalidArgument, match="sequence 0 uses -5 "):
        ft.kvcache_forward(rows, *caches, rows, rows, torch.tensor([-5], dtype=torch.int32))


def test_a_freed_tensor(case):
    """By the name that the caller knows, in the first call and in those of a kind that was seen."""
    name, function, (q, k, v), (k_name, _), _ = case
    if "varlen" in name or name in ("append and attend", "float8_kvcache_forward"):
        pytest.skip("rows are cut out of a tensor, which torch refuses for a freed one")
    for index, argument in ((0, "q"), (1, "k"), (2, "v")):
        tensors = [x.clone() for x in (q, k, v)]
        tensors[index].untyped_storage().resize_(0)
        for _ in range(2):
            with pytest.raises(flashcore.InvalidArgument, match=f"^{argument} is null and has [0-9]+ bytes; it must not be null"):
                function(*tensors)


def test_descales_of_other_types():
    q, scale = torch.randn(1, 8, 2, 64), torch.ones(1, 2)
    for descale in ("q_descale", "k_descale", "v_descale"):
        with pytest.raises(flashcore.Unsupported, match=f"{descale} is given and {descale[0]} is torch.float32; descales are for FP8 tensors: leave it out"):
            fa3.flash_attn_func(q, q, q, **{descale: scale})


def test_appends_of_float64():
    """The library's word goes: it appends them, or says itself that it does not."""
    q, new, used = torch.randn(1, 1, 2, 64).double(), torch.randn(1, 1, 2, 64).double(), torch.tensor([3], dtype=torch.int32)
    before = [torch.randn(1, 8, 2, 64).double() for _ in "kv"]
    after = [torch.cat([x[:, :3], new, x[:, 4:]], 1) for x in before]
    slot = torch.tensor([3])
    calls = {
        "operator": lambda k, v: ft.kvcache_forward(q, k, v, new, new, used)[0],
        "fa2": lambda k, v: fa2.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=3),
        "slots": lambda k, v: ft.append(new[0], new[0], k, v, slot),
    }
    for name, call in calls.items():
        caches = [x.clone() for x in before]
        try:
            out = call(*caches)
        except flashcore.FlashcoreError as error:
            assert "dtype is f64; it must be" in str(error), "refused by Python"
            continue
        assert all(torch.equal(x, y) for x, y in zip(caches, after)), name
        if name != "slots":
            assert torch.equal(out, ft.forward(q, *(x[:, :4] for x in after))[0]), name
    assert ft.kvcache_forward(q, *before, cache_seqlens=used)[0].dtype == torch.float64
    with pytest.raises(flashcore.InvalidArgument, match="k is int32; rows that are appended must be float16, bfloat16, float32 or, on the CPU, float64: convert it"):
        ft.append(new[0].int(), new[0].int(), *before, slot)


def test_rotary_tables():
    """float64 stays float64, and no position beyond the tables is taken for another."""
    from flashcore.compat.rotary import apply_rotary_emb

    x, angles = torch.randn(2, 5, 2, 64).double(), torch.rand(9, 32).double() * 6
    turned = apply_rotary_emb(x, angles.cos(), angles.sin(), seqlen_offsets=4)
    pair = torch.complex(x[..., :32], x[..., 32:]) * torch.polar(torch.ones(5, 1, 32).double(), angles[4:, None])
    assert (turned - torch.cat([pair.real, pair.imag], -1)).abs().max() < 1e-14
    for offsets in (5, torch.tensor([0, 5]), -1):
        with pytest.raises(flashcore.InvalidArgument, match=r"positions go from -?[0-9]+ to [0-9]+, and cos and sin have 9 rows: give longer tables"):
            apply_rotary_emb(x, angles.cos(), angles.sin(), seqlen_offsets=offsets)
    ends = torch.tensor([0, 10], dtype=torch.int32)
    with pytest.raises(flashcore.InvalidArgument, match="positions go from 0 to 9, and cos and sin have 9 rows"):
        apply_rotary_emb(x.flatten(0, 1), angles.cos(), angles.sin(), cu_seqlens=ends)
    compiled = torch.compile(lambda x: apply_rotary_emb(x, angles.cos(), angles.sin()), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), apply_rotary_emb(x, angles.cos(), angles.sin()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_bias_is_broadcast_and_converted(dtype):
    q, codes = torch.randn(2, 8, 2, 64), torch.randn(2, 8, 2, 64).to(torch.float8_e4m3fn)
    bias = torch.randn(2, 2, 8, 8).to(dtype)
    functions = {
        "forward": lambda bias: ft.forward(q, q, q, bias=bias)[0],
        "ops.forward": lambda bias: ops.forward(q, q, q, bias=bias)[0],
        "attention": lambda bias: flashcore.attention(q, q, q, layout="bshd", bias=bias),
        "attention, out": lambda bias: flashcore.attention(q, q, q, layout="bshd", bias=bias, out=torch.empty_like(q)),
        "float8": lambda bias: ops.float8_forward(q, codes, codes, bias=bias)[0],
    }
    for name, call in functions.items():
        for given in (bias, bias[:1], bias[0], bias[0, :1], bias[1, 1], bias[0, 0, 0], bias[..., :1], bias[:, :, :1], bias[0, 0, 0, 0]):
            whole = given.float().expand(2, 2, 8, 8).contiguous()
            expected = functions["float8" if name == "float8" else "forward"](whole)
            for _ in range(2):
                assert torch.equal(call(given), expected), (name, given.shape)
            # Other values under the same shape: a launch that is kept has no bias of an earlier call.
            assert torch.equal(call(given * 2), functions["float8" if name == "float8" else "forward"](whole * 2)), (name, given.shape)
    compiled = torch.compile(lambda bias: ft.forward(q, q, q, bias=bias)[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(bias[0]), functions["forward"](bias[0]))
    for name in ("forward", "attention", "float8"):
        with pytest.raises(flashcore.InvalidArgument, match="bias is bool, a mask; pass numbers that are added: 0 where"):
            functions[name](bias > 0)
        with pytest.raises(flashcore.InvalidArgument, match=r"bias has shape \(1, 2, 2, 8, 8\); it must be|bias has shape"):
            functions[name](bias[None])


def test_layouts_without_strides():
    q = torch.randn(1, 8, 2, 64)
    for function in (fa2.flash_attn_func, fa3.flash_attn_func):
        with pytest.raises(flashcore.InvalidArgument, match=r"k has layout torch.sparse_coo; it must be strided: call .to_dense\(\)"):
            function(q, q.to_sparse(), q)
    # torch's own words where the call goes through its dispatcher.
    with pytest.raises((flashcore.InvalidArgument, NotImplementedError), match="SparseCPU|k has layout torch.sparse_coo"):
        ft.forward(q, q.to_sparse(), q)


def test_graphs_are_refused_mixed_devices():
    q = torch.randn(1, 8, 2, 64)
    compiled = torch.compile(lambda q, k: ft.forward(q, k, k)[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, q), ft.forward(q, q, q)[0])
    with pytest.raises(Exception, match="move them to one device|not on the expected device|same device|meta"):
        compiled(q, q.to("meta"))
