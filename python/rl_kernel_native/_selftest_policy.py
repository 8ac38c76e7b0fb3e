"""The doctor's self-test of policy_loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ._selftest import Check, _Arrays, _same_bytes, _timed, _worst
from .contract import row
from .ops import policy_loss as policy_loss_op

_POLICIES = {
    "ppo": policy_loss_op.PolicySpec(kl="k3", kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0),
    "gspo": policy_loss_op.PolicySpec(level="geometric", aggregation="seq-mean-token-mean", epsilon_low=0.01),
}


def _policies(arrays: _Arrays) -> Iterator[tuple[str, dict[str, np.ndarray], dict[str, float]]]:
    """(case, results, results of float64)."""
    random = np.random.default_rng(6)
    # One token; odd; several tiles of a sequence.
    for (name, spec), shape in itertools.product(_POLICIES.items(), ((1, 1), (5, 37), (3, 5000))):
        logprob = -np.abs(random.normal(0, 1, shape)).astype(np.float32)
        old, ref = (logprob + random.normal(0, 0.2, shape).astype(np.float32) for _ in range(2))
        advantage, mask = random.normal(0, 1, shape).astype(np.float32), random.random(shape) < 0.8
        entropy = np.abs(random.normal(0, 1, shape)).astype(np.float32)
        more = {"ref_logprob": ref} if spec.needs_ref else {}
        operands = (logprob, old, advantage, mask)
        result = policy_loss_op.policy_loss_and_grad(
            *map(arrays.put, operands),
            spec=spec,
            entropy=arrays.put(entropy),
            **{k: arrays.put(x) for k, x in more.items()},
        )
        found = {
            "loss": arrays.get(result.loss).reshape(1),
            "metrics": arrays.get(result.metrics.vector),
            "d_logprob": arrays.get(result.d_logprob),
        }
        expected = policy_loss_op.policy_loss_reference(*operands, spec=spec, entropy=entropy, **more)
        yield f"{name} {list(shape)}", found, expected


def policy_loss(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Losses and sums against float64, and on a GPU everything against the CPU."""
    arrays = _Arrays(torch, device)

    def float64() -> tuple[bool, str]:
        shares = []
        for case, found, expected in _policies(arrays):
            want = np.array([float(expected["loss"])])
            scale = np.abs(found["d_logprob"]).sum() + np.abs(want) + 1e-6  # a batch without tokens has no terms
            allowed = row("policy_loss", "loss").allowed(expected=want, scale=scale)
            shares.append((_worst(found["loss"], want, allowed), case))
        share, case = max(shares)
        return share <= 1.0, f"worst error {share:.2f} of its bound, {case}"

    yield _timed("against float64", float64)
    if device == "cpu":
        return
    cpu = _Arrays(torch, "cpu")

    def bytes_of_cpu() -> tuple[bool, str]:
        differ = total = 0
        for (_, here, _), (_, there, _) in zip(_policies(arrays), _policies(cpu), strict=True):
            differ += sum(_same_bytes(here[name], there[name]) for name in here)
            total += sum(value.size for value in here.values())
        return differ == 0, f"{differ} of {total} values differ"

    yield _timed("same bytes as the CPU", bytes_of_cpu)
