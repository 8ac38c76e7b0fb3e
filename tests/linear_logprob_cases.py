"""Shared by the tests of linear_logprob: a head, its float64 truth, and how far each output may be off."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import linear_cases
import rl_kernel_native as rk
from cases import ALL, Truth, beyond, float64, truth
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


def gradient_truth(
    h: Head, of: Truth, given: Any, unit: str = "ieee", off_dlse: Any = 0.0
) -> dict[str, tuple[np.ndarray, dict[str, Any]]]:
    """What gradients are in float64, and the facts of their bounds. ``given``: dlogprob, dlse, dentropy of rows;
    ``off_dlse``: what the second is off by itself."""
    dtype = str(h.hidden.dtype).removeprefix("torch.")
    x, w = (linear_cases.as_multiplied(t, unit) for t in h[:2])
    x[~of.counted] = 0.0
    g, facts = of.gradient(*given)
    off = row("linear_logprob", "dlogits of one row").allowed(dtype, expected=g, **facts)
    off += of.p * np.reshape(off_dlse, (-1, 1)) * of.slope
    off[~of.counted] = 0.0
    sums = {"rows": len(x), "scale": (abs(g) + off).sum(0), "carried": off.sum(0)}
    found = {"dlogits of one row": (g, facts), "dbias": (g.sum(0), sums)}
    off = off + np.where(abs(g) - off < linear_cases.flushed_below(h.hidden, unit), abs(g), 0.0)
    wide = abs(g) + off  # of the gradients that are multiplied
    return found | {
        "dhidden": (g @ w, {"terms": len(w), "scale": wide @ abs(w), "carried": off @ abs(w), "unit": unit}),
        "dweight": (g.T @ x, {"terms": len(x), "scale": wide.T @ abs(x), "carried": off.T @ abs(x), "unit": unit}),
    }


def head_truth(h: Head, unit: str = "ieee", **options: Any) -> Truth:
    x, w = (linear_cases.as_multiplied(t, unit) for t in h[:2])
    return truth(x @ w.T + float64(h.bias), h.target, **options)


def failures(h: Head, unit: str = "ieee", **options: Any) -> str:
    """What is further from float64 than contract.py allows; empty if nothing is."""
    dtype = str(h.hidden.dtype).removeprefix("torch.")
    found, *grads = gradients(h, **options)
    dlogits = np.stack([float64(gradients(Head(*(h[0][i:i + 1], h.weight, h.bias, h.target[i:i + 1])), **options)[3])
                        for i in range(len(h.target))])  # fmt: skip
    of = head_truth(h, unit, **options)
    wrong = []
    for name in ("logprob", "lse", "entropy", "sum_p_sq"):
        facts = {"sum_p_sq": of.sum_p_sq} if name == "sum_p_sq" else {}
        wrong.append(
            beyond("linear_logprob", name, getattr(found, name), getattr(of, name), max_abs_z=of.size, **facts)
        )
    want = gradient_truth(h, of, [of.counted * value for value in (DLOGPROB, DLSE, DENTROPY)], unit)
    for name, got in zip(("dlogits of one row", "dhidden", "dweight", "dbias"), (dlogits, *grads), strict=True):
        expected, facts = want[name]
        wrong.append(beyond("linear_logprob", name, got, expected, dtype, **facts))
    return "; ".join(filter(None, wrong))


def loss_failures(h: Head, loss: Any, **options: Any) -> str:
    """As :func:`failures`, of linear_cross_entropy."""
    arrays = [float64(t) for t in h[:3]]
    want = rk.linear_cross_entropy_reference(*arrays[:2], h.target.cpu().numpy(), bias=arrays[2], **options)
    z_loss = options.get("z_loss", 0.0)
    allowed = row("linear_logprob", "lse").allowed(max_abs_z=want["max_abs_z"])
    off = np.where(want["scored"], allowed + z_loss * allowed * (2 * abs(want["lse"]) + allowed), 0.0)
    if options.get("reduction") != "none":
        off = off.sum() / want["divisor"]
    return beyond(
        "linear_cross_entropy", "loss", loss, want["loss"], scale=want["scale"], carried=off, terms=len(h.target)
    )
