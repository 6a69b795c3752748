"""A sample of `random_cases.py`, which runs as many as it is told and with fresh seeds."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import random_cases  # noqa: E402


@pytest.mark.parametrize("seed", range(4))
def test_random_cases(seed):
    with torch.no_grad():
        found = [random_cases.run(seed, number) for number in range(60)]
    assert not [text for _, _, text in found if text]
    assert len({kind for kind, _, _ in found}) >= 5 and max(ratio for _, ratio, _ in found) > 0


def test_a_wrong_result_is_seen(monkeypatch):
    """A mask that is one key off, and an output of another call."""
    right = random_cases.attend
    monkeypatch.setattr(random_cases, "attend", lambda q, k, v, **options: right(q, k[:-1], v[:-1], **options))
    with torch.no_grad():
        found = [random_cases.run(1, number)[2] for number in range(20)]
    assert sum(text is not None and text.startswith("wrong: case") for text in found) > 8
