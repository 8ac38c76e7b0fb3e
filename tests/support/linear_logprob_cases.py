"""Shared by the tests of linear_logprob: a head, its float64 truth, and the error bounds of each output."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import linear_cases
import rl_kernel_native as rk
from cases import ALL, Truth, beyond, float64, truth
from rl_kernel_native.contract import row

DLOGPROB, DLSE, DENTROPY = 1.0, 0.25, -0.5  # incoming gradients of every scored row


class Head(NamedTuple):
    hidden: Any  # [rows, in_features]
    weight: Any  # [vocab_size, in_features]
    bias: Any  # [vocab_size]
    target: Any  # [rows]; the second row is ignored


def head(
    rng: np.random.Generator, rows: int, ins: int, vocab: int, dtype: str = "bfloat16", device: str = "cpu"
) -> Head:
    """Logits with a standard deviation of 2: some tokens are confident."""
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
    """The float64 gradients, and the facts for their bounds. ``given``: dlogprob, dlse, dentropy of rows; ``off_dlse``:
    the error of dlse itself."""
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
    wide = abs(g) + off  # bound on the incoming factors
    return found | {
        "dhidden": (g @ w, {"terms": len(w), "scale": wide @ abs(w), "carried": off @ abs(w), "unit": unit}),
        "dweight": (g.T @ x, {"terms": len(x), "scale": wide.T @ abs(x), "carried": off.T @ abs(x), "unit": unit}),
    }


def head_truth(h: Head, unit: str = "ieee", **options: Any) -> Truth:
    x, w = (linear_cases.as_multiplied(t, unit) for t in h[:2])
    return truth(x @ w.T + float64(h.bias), h.target, **options)


def failures(h: Head, unit: str = "ieee", **options: Any) -> str:
    """Describes outputs that are further from float64 than contract.py allows; empty if none are."""
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


class Lora(NamedTuple):
    a: Any  # [rank, in_features]
    b: Any  # [vocab_size, rank]
    scale: float

    @property
    def options(self) -> dict[str, Any]:
        return {"lora_a": self.a, "lora_b": self.b, "lora_scale": self.scale}


def lora(rng: np.random.Generator, h: Head, rank: int, scale: float) -> Lora:
    """A LoRA whose part of the logits is as large as the head's."""
    import torch

    (vocab, ins), wide = h.weight.shape, (scale or 1.0) * rank**0.5
    arrays = rng.standard_normal((rank, ins)) / ins**0.5, rng.standard_normal((vocab, rank)) * 2 / wide
    return Lora(*(torch.from_numpy(x).to(h.weight) for x in arrays), scale)


class LoraTruth(NamedTuple):
    logprob: np.ndarray
    off: np.ndarray  # bound on the error of a log-probability
    gradients: dict[str, tuple[np.ndarray, dict[str, Any]]]  # gradients of sum(logprob), and the facts for their bounds


def lora_truth(h: Head, of_lora: Lora, unit: str = "ieee") -> LoraTruth:
    """Bounds against products with ``weight + scale * b @ a`` in float64. The bounds include the errors of u and v,
    while the products lack these roundings."""
    dtype, s = str(h.hidden.dtype).removeprefix("torch."), of_lora.scale
    x, w, a, b = (linear_cases.as_multiplied(t, unit) for t in (*h[:2], of_lora.a, of_lora.b))

    def flushed(value: np.ndarray, off: np.ndarray) -> np.ndarray:
        return off + np.where(abs(value) - off < linear_cases.flushed_below(h.hidden, unit), abs(value), 0.0)

    def of_factor(name: str, value: np.ndarray, off: Any, scale: np.ndarray, terms: int) -> np.ndarray:
        facts: dict[str, Any] = {"expected": value, "terms": terms, "scale": abs(s) * scale}
        return flushed(value, off + row("linear", name).allowed(dtype, unit=unit, **facts))

    x[h.target.cpu().numpy() == -100] = 0.0
    u = s * (x @ a.T)
    off_u = of_factor("y", u, 0.0, abs(x) @ abs(a).T, x.shape[1])
    of = truth(x @ w.T + u @ b.T + float64(h.bias), h.target)
    of_logits = (off_u @ abs(b).T).max(1)
    off = row("linear_logprob", "logprob").allowed(max_abs_z=of.size) + 2 * of_logits
    g, facts = of.gradient(of.counted * 1.0)
    off_g = row("linear_logprob", "dlogits of one row").allowed(dtype, expected=g, **facts)
    off_g = flushed(g, of.counted[:, None] * (off_g + of.p * np.expm1(2 * of_logits)[:, None]))
    wide_g = abs(g) + off_g
    v = s * (g @ b)
    off_v = of_factor("dx", v, abs(s) * (off_g @ abs(b)), wide_g @ abs(b), len(w))
    off_v[~of.counted] = 0.0
    wide_u, wide_v = abs(u) + off_u, abs(v) + off_v
    sums = {
        "dhidden": (g @ w + v @ a, wide_g @ abs(w) + wide_v @ abs(a), off_g @ abs(w) + off_v @ abs(a)),
        "dweight": (g.T @ x, wide_g.T @ abs(x), off_g.T @ abs(x)),
        "dlora_a": (v.T @ x, wide_v.T @ abs(x), off_v.T @ abs(x)),
        "dlora_b": (g.T @ u, wide_g.T @ wide_u, off_g.T @ abs(u) + wide_g.T @ off_u),
    }
    terms = dict.fromkeys(sums, len(x)) | {"dhidden": len(w) + len(a) + 32}  # LoRA's terms begin with a new step of 16
    gradients = {
        name: (want, {"terms": terms[name], "scale": scale, "carried": carried, "unit": unit})
        for name, (want, scale, carried) in sums.items()
    }
    return LoraTruth(np.where(of.counted, of.logprob, 0.0), np.where(of.counted, off, 0.0), gradients)


def lora_failures(h: Head, of_lora: Lora, unit: str = "ieee") -> str:
    """Like :func:`failures`, for log-probabilities with LoRA and the gradients of their sum."""
    dtype = str(h.hidden.dtype).removeprefix("torch.")
    leaves = [t.clone().requires_grad_() for t in (*h[:3], of_lora.a, of_lora.b)]
    options = {"lora_a": leaves[3], "lora_b": leaves[4], "lora_scale": of_lora.scale}
    found = rk.linear_logprob(*leaves[:2], h.target, bias=leaves[2], **options)
    found.sum().backward()
    of = lora_truth(h, of_lora, unit)
    off = abs(float64(found) - of.logprob)
    wrong = [] if (off <= of.off).all() else [f"logprob: off by {off.max():.3g}, allowed {of.off.max():.3g}"]
    for name, leaf in zip(("dhidden", "dweight", "dlora_a", "dlora_b"), leaves[:2] + leaves[3:], strict=True):
        want, facts = of.gradients[name]
        wrong.append(beyond("linear_logprob", name, leaf.grad, want, dtype, **facts))
    return "; ".join(filter(None, wrong))


def loss_failures(h: Head, loss: Any, z: Any = None, **options: Any) -> str:
    """Like :func:`failures`, for linear_cross_entropy and its z-loss."""
    arrays = [float64(t) for t in h[:3]]
    want = rk.linear_cross_entropy_reference(*arrays[:2], h.target.cpu().numpy(), bias=arrays[2], **options)
    z_loss = options.get("z_loss", 0.0)
    allowed = row("linear_logprob", "lse").allowed(max_abs_z=want["max_abs_z"])
    weight = np.where(want["scored"], options.get("token_weight", 1.0), 0.0)
    off = np.where(want["scored"], allowed + z_loss * allowed * (2 * abs(want["lse"]) + allowed), 0.0) * weight
    if options.get("reduction") != "none":
        off = off.sum() / want["divisor"]
    bounds = {"scale": want["scale"], "carried": off, "terms": len(h.target)}
    found = beyond("linear_cross_entropy", "loss", loss, want["loss"], **bounds)
    return found or ("" if z is None else beyond("linear_cross_entropy", "loss", z, want["z_loss"], **bounds))
