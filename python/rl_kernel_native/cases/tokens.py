"""Cases of the operators on tokens' log-probabilities and values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

import rl_kernel_native as rk

from ..contract import row, rows_of
from ..ops import covariance_mask as covariance_op
from ..ops import importance_weights as importance_op
from ..ops import kl as kl_op
from ..ops import mismatch_metrics as mismatch_op
from ..ops import policy_loss as policy_loss_op
from ..ops import scatter_rewards as scatter_op
from ..ops import value_loss as value_loss_op
from ._certificate import BY_BATCH, BY_SEQUENCE, Case, Rows, in_words
from ._certificate import Arrays as Device
from ._tools import Arrays, Bench, Cases, Check, same_results, timed, within_bound, worst_share

_POLICIES = {
    "ppo": policy_loss_op.PolicySpec(kl="k3", kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0),
    "gspo": policy_loss_op.PolicySpec(level="geometric", aggregation="seq-mean-token-mean", epsilon_low=0.01),
}
_VALUES: tuple[dict[str, Any], ...] = (
    {"clip": 0.5},
    {"loss_type": "huber", "huber_delta": 0.5, "aggregation": "seq-mean-token-mean"},
)


def _policies(arrays: Arrays) -> Iterator[tuple[str, dict[str, np.ndarray], dict[str, float]]]:
    """Yields (case, results, results in float64)."""
    random = np.random.default_rng(6)
    # One token; odd sizes; sequences of several tiles.
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


# Functions from a device's arrays to (case, results by name, float64 values and bounds by name).
_Found = Iterator[tuple[str, dict[str, np.ndarray], dict[str, tuple[np.ndarray, Any]]]]


def _of_policy_loss(arrays: Arrays) -> _Found:
    for case, found, expected in _policies(arrays):
        want = np.array([float(expected["loss"])])
        scale = np.abs(found["d_logprob"]).sum() + np.abs(want) + 1e-6  # a batch without tokens has no terms
        yield case, found, {"loss": (want, row("policy_loss", "loss").allowed(expected=want, scale=scale))}


def _of_value_loss(arrays: Arrays) -> _Found:
    random = np.random.default_rng(7)
    for how, shape in itertools.product(_VALUES, ((1, 1), (5, 37), (3, 5000))):
        value, old, returns = (random.normal(0, 1, shape).astype(np.float32) for _ in range(3))
        operands = (value, old if "clip" in how else None, returns, random.random(shape) < 0.8)
        given: list[Any] = [None if a is None else arrays.put(a) for a in operands]
        result = value_loss_op.value_loss_and_grad(*given, **how)
        found = {
            "loss": arrays.get(result.loss).reshape(1),
            "metrics": arrays.get(result.metrics.vector),
            "d_value": arrays.get(result.d_value),
        }
        want = np.array([float(value_loss_op.value_loss_reference(*operands, **how)["loss"])])
        scale = np.abs(found["d_value"]).sum() + np.abs(want) + 1e-6
        allowed = row("value_loss", "loss").allowed(expected=want, scale=scale)
        yield f"{how} {list(shape)}", found, {"loss": (want, allowed)}


def _of_kl(arrays: Arrays) -> _Found:
    random = np.random.default_rng(8)
    for estimator, shape in itertools.product(("k1", "k2", "k3", "abs"), ((1, 1), (5, 37), (3, 5000))):
        logprob = -np.abs(random.normal(0, 1, shape)).astype(np.float32)
        ref, old = (logprob + random.normal(0, 0.2, shape).astype(np.float32) for _ in range(2))
        mask = random.random(shape) < 0.8
        put = [arrays.put(a) for a in (logprob, ref, mask)]
        how: dict[str, Any] = {"estimator": estimator}
        value = kl_op.kl(*put, **how, old_logprob=arrays.put(old))
        d_logprob = kl_op.kl_backward(put[0], *put, **how, old_logprob=arrays.put(old)).d_logprob
        want = kl_op.kl_reference(logprob, ref, mask, **how, old_logprob=old)
        allowed = row("kl", "kl").allowed(expected=want, largest=np.abs(want).max() + 1e-6)
        found = {"kl": arrays.get(value), "d_logprob": arrays.get(d_logprob)}
        yield f"{estimator} {list(shape)}", found, {"kl": (want, allowed)}


_WEIGHTS: tuple[dict[str, Any], ...] = (
    {"upper": 2.0},
    {"level": "sequence", "mode": "mask", "upper": 4.0, "rejection": {"token_k1": (0.5, 2.0), "seq_mean_k3": 0.021}},
    {"level": "geometric", "mode": "clip", "upper": 1.01, "veto": 0.55, "normalize": True},
)
_EXACT = np.array(1e-30)


def _rollouts() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """logprob, rollout_logprob, mask."""
    random = np.random.default_rng(8)
    # One token; odd sizes; sequences of several tiles.
    for shape in ((1, 1), (5, 37), (3, 5000)):
        train = -np.abs(random.normal(0, 1, shape)).astype(np.float32)
        rollout = train + (random.normal(0, 0.2, shape) * (random.random(shape) < 0.9)).astype(np.float32)
        yield train, rollout, random.random(shape) < 0.8


def _of_importance_weights(arrays: Arrays) -> _Found:
    for operands, how in itertools.product(_rollouts(), _WEIGHTS):
        result = importance_op.importance_weights(*map(arrays.put, operands), **how)
        want = importance_op.importance_weights_reference(*operands, **how)
        tokens = operands[0].shape[1]
        allowed = row("importance_weights", "weights").allowed(expected=np.abs(want["weights"]), terms=tokens)
        found = {name: arrays.get(array) for name, array in result._asdict().items()}
        case = f"{how.get('level', 'token')} {list(operands[0].shape)}"
        yield case, found, {"weights": (want["weights"], allowed), "mask": (want["mask"], _EXACT)}


def _of_mismatch_metrics(arrays: Arrays) -> _Found:
    for operands in _rollouts():
        vector = mismatch_op.mismatch_metrics(*map(arrays.put, operands)).vector
        want = np.array(list(mismatch_op.mismatch_metrics_reference(*operands).values()))
        allowed = row("mismatch_metrics", "metrics").allowed(expected=np.abs(want))
        yield f"{list(operands[0].shape)}", {"metrics": arrays.get(vector)}, {"metrics": (want, allowed)}


def _of_scatter_rewards(arrays: Arrays) -> _Found:
    random = np.random.default_rng(9)
    for place, (logprob, ref, mask) in itertools.product(("last", "first", "spread"), _rollouts()):
        rows, columns = mask.shape
        rewards, cost, of_spans = (random.normal(0, 1, n).astype(np.float32) for n in (rows, rows, 2 * rows))
        operands = {
            "rewards": rewards, "mask": mask, "cost": cost, "logprob": logprob, "ref_logprob": ref,
            "spans": np.array([[0, columns], [columns // 3, columns // 2]] * rows, np.int64),
            "span_offsets": 2 * np.arange(rows + 1), "span_rewards": of_spans, "lagrange": np.array(0.3, np.float32),
        }  # fmt: skip
        how: dict[str, Any] = {
            "place": place,
            "kl_coef": 0.1,
            "kl_estimator": "k3",
            "overlong": (columns, columns, 1.0),
        }
        result = scatter_op.scatter_rewards(**{k: arrays.put(x) for k, x in operands.items()}, **how)
        want = scatter_op.scatter_rewards_reference(**operands, **how)
        found = {name: arrays.get(array) for name, array in result._asdict().items()}
        largest = {k: {"largest": np.abs(want[k]).max() + 8.0} for k in ("rewards", "combined")}
        yield (
            f"{place} {[rows, columns]}",
            found,
            {
                k: (x, np.maximum(row("scatter_rewards", k).allowed(expected=np.abs(x), **largest.get(k, {})), _EXACT))
                for k, x in want.items()
            },
        )


_DRAWS: tuple[dict[str, Any], ...] = (
    {"kind": "clip", "ratio": 0.05, "seed": 1 << 40, "lower": 0.2}, {"kind": "kl", "ratio": 0.1},
)  # fmt: skip


def _of_covariance_mask(arrays: Arrays) -> _Found:
    for (logprob, old, mask), how in itertools.product(_rollouts(), _DRAWS):
        advantage = np.random.default_rng(9).normal(0, 1, logprob.shape).astype(np.float32)
        operands = (logprob, old if how["kind"] == "clip" else None, advantage, mask)
        given: list[Any] = [None if a is None else arrays.put(a) for a in operands]
        selected = covariance_op.covariance_mask(*given, **how)
        want = covariance_op.covariance_mask_reference(*operands, **how)["selected"]
        yield f"{how['kind']} {list(mask.shape)}", {"selected": arrays.get(selected)}, {"selected": (want, _EXACT)}


_RESULTS = {
    "policy_loss": _of_policy_loss,
    "value_loss": _of_value_loss,
    "kl": _of_kl,
    "importance_weights": _of_importance_weights,
    "mismatch_metrics": _of_mismatch_metrics,
    "scatter_rewards": _of_scatter_rewards,
    "covariance_mask": _of_covariance_mask,
}


def checks(name: str, torch: Any, device: str, _: tuple[int, int] | None) -> Iterator[Check]:
    """Compares bounded results with float64, and on a GPU all results with the CPU."""
    results, arrays = _RESULTS[name], Arrays(torch, device)

    def float64() -> tuple[bool, str]:
        shares = [
            (worst_share(found[name], want, allowed), case)
            for case, found, expected in results(arrays)
            for name, (want, allowed) in expected.items()
        ]
        share, case = max(shares)
        return within_bound(share, case)

    exact = all(r.bound.text == "0" for r in rows_of(name))
    yield timed("against the definition" if exact else "against float64", float64)
    if device == "cpu":
        return
    cpu = Arrays(torch, "cpu")

    def bytes_of_cpu() -> tuple[bool, str]:
        both = zip(results(arrays), results(cpu), strict=True)
        return same_results((here, there) for (_, here, _), (_, there, _) in both)

    yield timed("same bytes as the CPU", bytes_of_cpu)


# ---- certificate ----------------------------------------------------------------------------------------------------


def certified_kl(arrays: Device, quick: bool) -> Iterator[Case]:
    for columns in (37, 2048):  # an odd width; a width of whole vectors
        row = ((columns,), 0.5)
        rows: Rows = {"logprob": row, "ref_logprob": row, "weight": row}
        for options in ({"estimator": "k3"}, {"estimator": "k2", "input_clamp": 0.5, "clamp": 0.1}):

            def forward(arrays: Device, a: Mapping[str, Any], options: Any = options) -> Mapping[str, Any]:
                return {"kl": rk.kl(a["logprob"], a["ref_logprob"], old_logprob=a["weight"], **options)}

            def backward(arrays: Device, a: Mapping[str, Any], options: Any = options) -> Mapping[str, Any]:
                operands = (a["dy"], a["logprob"], a["ref_logprob"])
                found = rk.kl_backward(*operands, importance_weight=a["weight"], **options)
                return found._asdict()

            words = in_words(options)
            yield Case("kl", "forward", "float32", (columns,), ("kl",), rows, forward, options=words)
            yield Case(
                "kl", "backward", "float32", (columns,), ("d_logprob", "d_importance_weight"), rows | {"dy": row},
                backward, options=words,
            )  # fmt: skip


def _bench(about: str, module: str) -> Bench:
    return Bench(about, module, (16, 256), "sequences", {"tokens": (2048, "of a sequence")}, only_dtype="float32")


_BENCHES = {
    "covariance_mask": _bench("the tokens that clip-cov singles out", "rollout"),
    "entropy_mask": _bench("the tokens of the highest entropy, by a quantile", "rollout"),
    "importance_weights": _bench("weights of a batch's tokens for the engine that sampled it", "rollout"),
    "kl": _bench("estimators of a KL divergence, a value a token", "token_terms"),
    "mismatch_metrics": _bench("how far a trainer and the engine that sampled are apart", "rollout"),
    "policy_loss": _bench("clipped policy objective with a KL term, and its gradient", "policy_loss"),
    "scatter_rewards": Bench(
        "rewards of sequences and a KL as rewards of tokens",
        "advantage",
        (64, 4096),
        "sequences",
        {"tokens": (8192, None)},
        only_dtype="float32",
    ),
    "value_loss": _bench("clipped value loss, and its gradient", "token_terms"),
}
_CERTIFICATES: dict[str, Any] = {
    "covariance_mask": BY_BATCH,
    "entropy_mask": BY_BATCH,
    "importance_weights": BY_SEQUENCE,
    "kl": certified_kl,
    "mismatch_metrics": BY_BATCH,
    "policy_loss": BY_BATCH + " but for gradients given a denominator, whose bytes its own tests compare",
    "scatter_rewards": BY_SEQUENCE,
    "value_loss": BY_BATCH + " but for gradients given a denominator, whose bytes its own tests compare",
}
CASES = {
    name: Cases(partial(checks, name) if name in _RESULTS else None, bench, _CERTIFICATES[name])
    for name, bench in _BENCHES.items()
}
