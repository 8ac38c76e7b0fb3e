"""The doctor's self-test of policy_loss, importance_weights and mismatch_metrics."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ._selftest import Check, _Arrays, _same_bytes, _timed, _worst
from .contract import row
from .ops import importance_weights as importance_op
from .ops import mismatch_metrics as mismatch_op
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


_WEIGHTS: tuple[dict[str, Any], ...] = (
    {"upper": 2.0},
    {"level": "sequence", "mode": "mask", "upper": 4.0, "rejection": {"token_k1": (0.5, 2.0), "seq_mean_k3": 0.021}},
    {"level": "geometric", "mode": "clip", "upper": 1.01, "veto": 0.55, "normalize": True},
)


def _rollouts(name: str, arrays: _Arrays) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(case, results, results of float64, facts of their bounds)."""
    random = np.random.default_rng(8)
    # One token; odd; several tiles of a sequence.
    for shape in ((1, 1), (5, 37), (3, 5000)):
        train = -np.abs(random.normal(0, 1, shape)).astype(np.float32)
        rollout = train + (random.normal(0, 0.2, shape) * (random.random(shape) < 0.9)).astype(np.float32)
        mask = random.random(shape) < 0.8
        operands = (train, rollout, mask)
        if name == "mismatch_metrics":
            vector = mismatch_op.mismatch_metrics(*map(arrays.put, operands)).vector
            expected = mismatch_op.mismatch_metrics_reference(*operands)
            yield f"{list(shape)}", {"metrics": arrays.get(vector)}, {"metrics": np.array(list(expected.values()))}, {}
            continue
        for options in _WEIGHTS:
            found = importance_op.importance_weights(*map(arrays.put, operands), **options)
            want = importance_op.importance_weights_reference(*operands, **options)
            case = f"{options.get('level', 'token')} {list(shape)}"
            got = {output: arrays.get(array) for output, array in found._asdict().items()}
            yield case, got, want, {"terms": shape[1]}


def rollout(name: str, torch: Any, device: str) -> Iterator[Check]:
    """Against float64, and on a GPU the bytes of the CPU."""
    arrays = _Arrays(torch, device)

    def float64() -> tuple[bool, str]:
        shares = []
        for case, found, want, facts in _rollouts(name, arrays):
            for output, values in found.items():
                more = facts if output == "weights" else {}
                allowed = row(name, output).allowed(expected=np.abs(want[output]), **more)
                if output == "mask":
                    shares.append((0.0 if (values == want[output]).all() else np.inf, f"mask, {case}"))
                else:
                    shares.append((_worst(values, want[output], allowed), case))
        share, case = max(shares)
        return share <= 1.0, f"worst error {share:.2f} of its bound, {case}"

    yield _timed("against float64", float64)
    if device == "cpu":
        return
    cpu = _Arrays(torch, "cpu")

    def bytes_of_cpu() -> tuple[bool, str]:
        differ = total = 0
        for (_, here, *_), (_, there, *_) in zip(_rollouts(name, arrays), _rollouts(name, cpu), strict=True):
            differ += sum(_same_bytes(here[output], there[output]) for output in here)
            total += sum(value.size for value in here.values())
        return differ == 0, f"{differ} of {total} values differ"

    yield _timed("same bytes as the CPU", bytes_of_cpu)
