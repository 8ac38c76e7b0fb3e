"""Compares attention and its gradients with float64, within the bounds of contract.py."""

from __future__ import annotations

import numpy as np
import pytest

import rl_kernel_native as rk
from attention_bounds import attention_failures
from cases import mode

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not hasattr(rk, "attention"), reason="this build has no attention")

# Each shape: tokens, query heads, key heads, head_dim, deviation of q and k, softcap. The cases have odd sizes, groups,
# blocks of 128 keys, several blocks, scores that give weight to one key or to all, and caps that bind. A cap of 2 is
# the least that the bounds cover.
SHAPES = [
    (37, 3, 1, 24, 1.0, None), (300, 4, 2, 64, 1.0, None), (300, 2, 2, 64, 4.0, None), (64, 2, 1, 128, 0.01, None),
    (700, 1, 1, 64, 2.0, None), (300, 2, 1, 64, 4.0, 2.0), (150, 2, 2, 256, 4.0, 50.0),
]  # fmt: skip
SINKS = [0.5, 7.0, -3.0, 20.0]  # sinks of the first heads, used for every other shape


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_lie_within_the_bounds_of_float64(
    shape: tuple[int, int, int, int, float, float | None], dtype: str, device: str, exp: str, rng: np.random.Generator
) -> None:
    tokens, heads, kv_heads, dim, deviation, softcap = shape
    q, k, v, dout = (
        torch.from_numpy(rng.standard_normal((tokens, n, dim)) * d).to(getattr(torch, dtype)).to(device)
        for n, d in ((heads, deviation), (kv_heads, deviation), (kv_heads, 1.0), (heads, 1.0))
    )
    sinks = torch.tensor(SINKS[:heads]).to(device) if SHAPES.index(shape) % 2 else None
    with mode(device, exp):
        found = attention_failures(q, k, v, dout, exp=exp, softcap=softcap, sinks=sinks)
    assert not found, found
