"""Shared by the tests of linear_logprob: a head, its float64 truth, and how far each output may be off."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import linear_cases
import rl_kernel_native as rk
from cases import ALL, beyond, float64, truth
from rl_kernel_native.contract import row

DLOGPROB, DLSE, DENTROPY = 1.0, 0.25, -0.5  # of every scored row


class Head(NamedTuple):
    hidden: Any  # [rows, in_features]
    weight: Any  # [vocab_size, in_features]
    bias: Any  # [vocab_size]
    target: Any  # [rows], of which the second is ignored


def head(
    rng: np.random.Generator, rows: int, ins: int, vocab: int, dtype: str = "bfloat16", device: str = "cpu"
) -> Head:
    """Logits of a standard deviation of 2: confident tokens and others."""
    import torch

    arrays = (rng.standard_normal((rows, ins)), rng.standard_normal((vocab, ins)) * 2 / ins**0.5)
    operands = (torch.from_numpy(a).to(device, getattr(torch, dtype)) for a in (*arrays, rng.standard_normal(vocab)))
    target = torch.from_numpy(rng.integers(0, vocab, rows))
    target[1:2] = -100
    return Head(*operands, target.to(device))


def gradients(h: Head, **options: Any) -> tuple[Any, Any, Any, Any]:
    """The outputs, and the gradients of hidden, weight and bias for DLOGPROB, DLSE, DENTROPY."""
    leaves = [t.clone().requires_grad_() for t in h[:3]]
    found = rk.linear_logprob(leaves[0], leaves[1], h.target, bias=leaves[2], **ALL, **options)
    (DLOGPROB * found.logprob + DLSE * found.lse + DENTROPY * found.entropy).sum().backward()
    return found, *(t.grad for t in leaves)


def failures(h: Head, unit: str = "ieee", **options: Any) -> str:
    """What is further from float64 than contract.py allows; empty if nothing is."""
    dtype = str(h.hidden.dtype).removeprefix("torch.")
    found, *grads = gradients(h, **options)
    dlogits = np.stack([float64(gradients(Head(*(h[0][i:i + 1], h.weight, h.bias, h.target[i:i + 1])), **options)[3])
                        for i in range(len(h.target))])  # fmt: skip
    x, w, b = *(linear_cases.as_multiplied(t, unit) for t in h[:2]), float64(h.bias)
    of = truth(x @ w.T + b, h.target, **options)
    x[~of.counted] = 0.0
    wrong = []
    for name in ("logprob", "lse", "entropy", "sum_p_sq"):
        facts = {"sum_p_sq": of.sum_p_sq} if name == "sum_p_sq" else {}
        wrong.append(
            beyond("linear_logprob", name, getattr(found, name), getattr(of, name), max_abs_z=of.size, **facts)
        )
    given = (of.counted * value for value in (DLOGPROB, DLSE, DENTROPY))
    g, facts = of.gradient(*given)
    wrong.append(beyond("linear_logprob", "dlogits", dlogits, g, dtype, **facts))
    off = row("linear_logprob", "dlogits").allowed(dtype, expected=g, **facts)
    off[~of.counted] = 0.0
    summed = {"dbias": (g.sum(0), {"rows": len(x), "scale": (abs(g) + off).sum(0), "carried": off.sum(0)})}
    off = off + np.where(abs(g) - off < linear_cases.flushed_below(h.hidden, unit), abs(g), 0.0)
    wide = abs(g) + off  # of the gradients that are multiplied
    products = {
        "dhidden": (g @ w, {"terms": len(w), "scale": wide @ abs(w), "carried": off @ abs(w)}),
        "dweight": (g.T @ x, {"terms": len(x), "scale": wide.T @ abs(x), "carried": off.T @ abs(x)}),
    } | summed
    for (name, (want, sums)), got in zip(products.items(), grads, strict=True):
        wrong.append(beyond("linear_logprob", name, got, want, dtype, unit=unit, **sums))
    return "; ".join(filter(None, wrong))
