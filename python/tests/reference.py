"""Attention in float64, one row at a time where lengths differ: slow, and easy to check by eye."""

import math

import numpy as np


def attend(q, k, v, *, scale=None, causal=False, window=(-1, -1), top_left=False, softcap=0.0, slopes=None, sinks=None, bias=None):
    """One sequence: q [sq, h, d], k [sk, hk, d], v [sk, hk, dv]; bias [h, sq, sk]. Returns out [sq, h, dv] and lse [h, sq]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    sq, heads, dim = q.shape
    sk = k.shape[0]
    group = heads // k.shape[1]
    scale = 1 / math.sqrt(dim) if scale is None else scale
    out = np.zeros((sq, heads, v.shape[2]))
    lse = np.full((heads, sq), -np.inf)
    rows = np.arange(sq)[:, None] + (0 if top_left else sk - sq)
    keys = np.arange(sk)[None, :]
    left, right = window
    if causal:
        right = 0
    is_seen = np.ones((sq, sk), bool)
    if left >= 0:
        is_seen &= keys >= rows - left
    if right >= 0:
        is_seen &= keys <= rows + right
    for head in range(heads):
        scores = scale * (q[:, head] @ k[:, head // group].T)
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        if slopes is not None:
            scores = scores - float(slopes[head]) * np.abs(rows - keys)
        if bias is not None:
            scores = scores + np.asarray(bias[head], np.float64)
        scores = np.where(is_seen, scores, -np.inf)
        if sinks is not None:
            scores = np.concatenate([scores, np.full((sq, 1), float(sinks[head]))], 1)
        if scores.shape[1] == 0:
            continue
        top = scores.max(1, keepdims=True)
        finite = np.where(np.isfinite(top), top, 0)
        weights = np.exp(scores - finite)
        total = weights.sum(1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse[head] = (finite + np.log(total))[:, 0]
        weights = weights[:, :sk] / np.where(total == 0, 1, total)
        out[:, head] = weights @ v[:, head // group]
    return out, lse


def attend_batch(q, k, v, **options):
    """[batch, row, head, column] of every tensor; bias [batch, head, row, key]."""
    bias = options.pop("bias", None)
    results = [
        attend(q[b], k[b], v[b], bias=None if bias is None else bias[b], **options) for b in range(q.shape[0])
    ]
    return np.stack([out for out, _ in results]), np.stack([lse for _, lse in results])


# Largest error of an output of random normal inputs, by element type.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def close(actual, expected, dtype, what="output"):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    assert not np.isnan(actual).any(), f"{what} has NaN"
    same = np.isinf(expected)
    assert (actual[same] == expected[same]).all(), f"{what}: infinities differ"
    error = np.abs(actual[~same] - expected[~same]).max(initial=0)
    assert error <= TOLERANCE[dtype], f"{what} differs by {error:.2e} (> {TOLERANCE[dtype]:.0e})"
