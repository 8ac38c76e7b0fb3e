"""A batch of tokens, and the comparison of an objective with a framework's own loss on it."""

from __future__ import annotations

from typing import Any

import torch

import rl_kernel_native as rk
from policy_loss_cases import arrays

B, T = 6, 33


def batch(seed: int = 0, advantage_per_sequence: bool = False) -> dict[str, Any]:
    a: dict[str, Any] = {k: torch.from_numpy(x) for k, x in arrays(B, T, seed).items()}
    a["mask"][1] = True  # frameworks divide by the tokens of every sequence
    a["advantage"][2, :] = 0.7
    if advantage_per_sequence:
        a["advantage"] = a["advantage"][:, 0].contiguous()
    return a


def compare(a: dict[str, Any], spec: rk.PolicySpec, theirs: Any, **more: Any) -> None:
    """Compares loss and gradients. The tolerance is the float32 rounding of the largest terms."""
    logprob, entropy = a["logprob"].clone().requires_grad_(), a["entropy"].clone().requires_grad_()
    ours = rk.policy_loss(
        logprob,
        more.pop("old_logprob", a["old_logprob"]),
        a["advantage"],
        a["mask"],
        spec=spec,
        entropy=entropy,
        **more,
    )
    ours.loss.backward()
    x, h = a["logprob"].clone().requires_grad_(), a["entropy"].clone().requires_grad_()
    loss = theirs(x, h)
    loss.backward()
    assert x.grad is not None
    assert logprob.grad is not None
    size = max(float(x.grad.abs().sum()), abs(loss.item()))
    # VESPO's weight is exp(k log w); for an exponent of about 50 an ulp is 4e-6.
    roundings = 10 if spec.clip == "vespo" else 1
    assert abs(ours.loss.item() - loss.item()) <= 2e-6 * roundings * size
    assert float((logprob.grad - x.grad).abs().max()) <= 3e-6 * roundings * float(x.grad.abs().max())
    of_entropy = torch.zeros_like(h) if h.grad is None else h.grad
    got = torch.zeros_like(h) if entropy.grad is None else entropy.grad
    assert float((got - of_entropy).abs().max()) <= 1e-6 * max(float(of_entropy.abs().max()), 1e-30)
