"""importance_weights: float64, the formulas of verl and slime, the bits of policy_loss, the same bits for every layout
of sequences, bad input, and calls through torch. test_importance_weights.cpp compares the contract's bytes."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from cases import beyond
from policy_loss_cases import same, tensors
from rollout_cases import LENGTHS, ragged, rollouts, wild
from torch_properties import captured

# Every level, mode and criterion, with thresholds that some sequences of these batches meet and others miss.
OPTIONS: dict[str, dict[str, Any]] = {
    "TIS": {"upper": 1.2},
    "no bound": {"upper": math.inf, "log_ratio_clamp": None},
    "IcePop": {"mode": "mask", "upper": 1.25, "lower": 0.8},
    "clip": {"mode": "clip", "upper": 1.3},
    "sequence": {"level": "sequence", "upper": 2.0, "log_ratio_clamp": 1.5},
    "geometric MIS": {"level": "geometric", "mode": "mask", "upper": 1.01},
    "normalized tokens": {"upper": 1.2, "normalize": True},
    "normalized sequences": {"level": "sequence", "mode": "clip", "upper": 3.0, "normalize": True},
    "normalized means": {"level": "geometric", "upper": 1.5, "normalize": True, "veto": 0.61},
    "veto": {"upper": 2.0, "veto": 0.6},
    "token_k1": {"upper": 2.0, "rejection": {"token_k1": (0.7, 1.1)}},
    "token_k2 and k3": {"upper": 2.0, "rejection": {"token_k2": 0.05, "token_k3": 0.04}},
    "seq_sum_k1": {"upper": 2.0, "rejection": {"seq_sum_k1": 4.0}},
    "seq_sum_k2": {"upper": 2.0, "rejection": {"seq_sum_k2": 2.0}},
    "seq_sum_k3": {"upper": 2.0, "rejection": {"seq_sum_k3": 2.0}},
    "token_ratio": {"upper": 2.0, "rejection": {"token_ratio": (0.9, 1.3)}},
    "seq_sum_ratio": {"upper": 2.0, "rejection": {"seq_sum_ratio": (0.5, 1.4)}},
    "seq_mean_ratio": {"upper": 2.0, "rejection": {"seq_mean_ratio": (0.97, 1.01), "token_k1": 1.5}},
    "seq_mean_k1": {"upper": 2.0, "rejection": {"seq_mean_k1": (0.99, 1.02)}},
    "seq_mean_k2": {"upper": 2.0, "rejection": {"seq_mean_k2": 0.018}},
    "seq_mean_k3": {"upper": 2.0, "rejection": {"seq_mean_k3": 0.018}},
    "seq_max_k2": {"upper": 2.0, "rejection": {"seq_max_k2": 0.15}},
    "seq_max_k3": {"upper": 2.0, "rejection": {"seq_max_k3": 0.15}},
    "many": {
        "level": "sequence", "upper": 5.0, "veto": 0.5,
        "rejection": {"token_k3": 0.1, "seq_mean_k1": 1.05, "seq_sum_k3": 4.0},
    },
}  # fmt: skip


def run(a: dict[str, Any], name: str, **more: Any) -> rk.ImportanceWeights:
    return rk.importance_weights(a["train"], a["rollout"], a["mask"], **OPTIONS[name], **more)


def everything(a: dict[str, Any], name: str, **more: Any) -> list[Any]:
    """Weights, mask and metrics."""
    found: Any = run(a, name, return_metrics=True, **more)
    return [found.weights, found.mask, found.metrics.vector]


def off(got: Any, want: dict[str, float], terms: int) -> str:
    """Metrics that are further from float64 than the contract allows."""
    assert list(got.names) == list(want)
    spread = {"weight_std": (want["weight_mean"], "weight_std"), "seq_std": (want["seq_mean"], "seq_std")}
    rms = [min(np.hypot(spread[n][0] - x, want[spread[n][1]]) for x in (0, 1)) if n in spread else 0.0 for n in want]
    values = np.array(list(want.values()))
    return beyond("importance_weights", "metrics", got.vector, values, terms=terms, spread=np.array(rms))


def assert_same(got: Any, want: Any) -> None:
    assert all(same(g.cpu(), w.cpu()) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_values_lie_near_float64(name: str, device: str) -> None:
    kept = tokens = 0
    for shape in ((1, 1), (12, 97), (3, 1300)):
        a = rollouts(*shape, seed=len(name))
        got: Any = run(tensors(a, device), name, return_metrics=True)
        want = rk.importance_weights_reference(a["train"], a["rollout"], a["mask"], **OPTIONS[name])
        assert not off(got.metrics, want["metrics"], shape[1])
        assert not beyond("importance_weights", "weights", got.weights, want["weights"], terms=shape[1])
        assert not beyond("importance_weights", "mask", got.mask, want["mask"])
        kept, tokens = kept + int(want["mask"].sum()), tokens + int(a["mask"].sum())
    refuses = "rejection" in OPTIONS[name] or "veto" in OPTIONS[name]
    assert (0 < kept < tokens) if refuses else kept == tokens, "thresholds that say nothing test nothing"


def test_fuzzed_options_lie_near_float64() -> None:
    random = np.random.default_rng(0)
    criteria = [o["rejection"] for o in OPTIONS.values() if "rejection" in o]
    for _ in range(150):
        shape = (int(random.integers(1, 9)), int(random.integers(1, 200)))
        a = rollouts(*shape, seed=int(random.integers(1 << 30)))
        mode = ("truncate", "clip", "mask")[random.integers(3)]
        options: dict[str, Any] = {
            "level": ("token", "sequence", "geometric")[random.integers(3)],
            "mode": mode,
            "upper": float(random.uniform(1, 3)),
            "lower": None if mode == "truncate" else float(random.uniform(0, 1)),
            "rejection": {k: v for i in random.integers(0, len(criteria), 2) for k, v in criteria[i].items()},
            "normalize": bool(random.integers(2)),
        }
        got: Any = rk.importance_weights(a["train"], a["rollout"], a["mask"], return_metrics=True, **options)
        want = rk.importance_weights_reference(a["train"], a["rollout"], a["mask"], **options)
        assert not off(got.metrics, want["metrics"], shape[1]), options
        assert not beyond("importance_weights", "weights", got.weights, want["weights"], terms=shape[1]), options
        assert not beyond("importance_weights", "mask", got.mask, want["mask"]), options


def verl(a: dict[str, torch.Tensor], level: str, upper: float, normalize: bool) -> torch.Tensor:
    """compute_rollout_correction_weights of verl's rollout_corr_helper in float64."""
    d, mask = a["train"].double() - a["rollout"].double(), a["mask"].double()
    if level == "sequence":
        d = (d * mask).sum(-1, keepdim=True).expand_as(d)
    w = (d.clamp(-20, 20).exp() * mask).clamp(max=upper)
    if not normalize:
        return w
    if level == "token":
        return w / ((w * mask).sum() / mask.sum())
    of_sequence = (w * mask).sum(-1) / mask.sum(-1).clamp(min=1e-8)
    return w / (of_sequence.sum() / (mask.sum(-1) > 0).sum())


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_verls(level: str, normalize: bool) -> None:
    a = tensors(rollouts(5, 60, seed=5))
    got = rk.importance_weights(a["train"], a["rollout"], a["mask"], level=level, upper=2.0, normalize=normalize)
    want = verl(a, level, 2.0, normalize)
    assert not beyond("importance_weights", "weights", got.weights, want, terms=60)


# Some tokens, products and means lie within these bounds, others do not.
BOUNDS = {"token": (0.8, 1.2), "sequence": (0.3, 3.0), "geometric": (0.985, 1.01)}


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("level", BOUNDS)
def test_weights_and_what_is_kept_are_those_of_slimes_mis(level: str, mode: str) -> None:
    """slime's mode "mask" leaves weights unchanged and removes tokens. The veto looks at tokens at every level."""
    a, (low, high), veto = tensors(rollouts(9, 60, seed=5)), BOUNDS[level], 0.61
    mask = a["mask"]
    d = (a["train"].double() - a["rollout"].double()).masked_fill(~mask, 0.0)
    total, count = d.sum(1, keepdim=True), mask.sum(1, keepdim=True).clamp(min=1)
    w = {"token": d, "sequence": total, "geometric": total / count}[level].clamp(-20, 20).exp().expand_as(d)
    weights = w if mode == "mask" else w.clamp(low if mode == "clip" else 0.0, high)
    refused = (d.exp() < veto).any(1, keepdim=True)
    kept = mask & ~refused & ((mode != "mask") | ((w >= low) & (w <= high)))
    assert all(0 < int(x.sum()) < int(mask.sum()) for x in (kept, (w > high) & mask, (w < low) & mask))

    by = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}[level]
    how: dict[str, Any] = {
        "truncate": {"upper": high},
        "clip": {"mode": "clip", "lower": low, "upper": high},
        "mask": {"upper": math.inf, "rejection": {by: (1 / high, 1 / low)}},
    }[mode]
    preset = rk.presets.slime_mis(
        mis_level=level, mis_mode=mode, mis_upper_bound=high, mis_lower_bound=low, mis_veto_threshold=veto
    )
    got = rk.importance_weights(a["train"], a["rollout"], mask, **preset)
    assert_same(got, rk.importance_weights(a["train"], a["rollout"], mask, level=level, veto=veto, **how))
    assert not beyond("importance_weights", "weights", got.weights, weights * mask, terms=60)
    assert torch.equal(got.mask > 0, kept)


def test_slimes_lower_bound_is_one_over_the_upper() -> None:
    assert rk.presets.slime_mis(mis_mode="clip", mis_upper_bound=4.0)["lower"] == 0.25
    assert rk.presets.slime_mis(mis_mode="mask", mis_upper_bound=4.0)["rejection"] == {"token_k1": (0.25, 4.0)}
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"mis_level": "batch"}, ValueError, "mis_level: expected 'token'"),
        ({"mis_mode": ""}, ValueError, "mis_mode: expected"),
        ({"mis_upper_bound": 0}, ValueError, "mis_upper_bound: expected a finite number > 0, got 0"),
        ({"mis_upper_bound": "2"}, TypeError, "mis_upper_bound: expected a number, got str"),
        ({"mis_lower_bound": 5.0, "mis_mode": "clip"}, ValueError, "mis_lower_bound: expected a number below"),
    ]
    for how, error, text in bad:
        with pytest.raises(error, match=f"^{text}"):
            rk.presets.slime_mis(**how)


def test_a_threshold_of_k1_is_on_the_inverse_ratio() -> None:
    """verl compares MINUS the log ratio with the logarithms of the bounds, so a ratio of 2 counts as 1/2."""
    train, rollout = np.log(np.array([[2.0, 1.0, 0.5]], np.float32)), np.zeros((1, 3), np.float32)
    kept = rk.importance_weights(train, rollout, upper=math.inf, rejection={"token_k1": (0.4, 1.5)}).mask
    assert kept.tolist() == [[1, 1, 0]]


@pytest.mark.parametrize("name", [n for n, o in OPTIONS.items() if not o.get("normalize")])
def test_weights_have_the_bits_of_the_policy_losss(name: str) -> None:
    a, options = rollouts(4, 70, seed=6), OPTIONS[name]
    lower = options.get("lower", 1.0 / options["upper"]) if options.get("mode", "truncate") != "truncate" else None
    spec = rk.PolicySpec(
        clip="none", importance=options.get("level", "token"), aggregation="token-sum",
        importance_mode="mask" if options.get("mode") == "mask" else "truncate", importance_low=lower,
        importance_high=None if options["upper"] == math.inf else options["upper"],
        importance_clamp=options.get("log_ratio_clamp", 20.0),
    )  # fmt: skip
    minus = np.full(a["train"].shape, -1.0, np.float32)
    found = rk.policy_loss_and_grad(minus, a["train"], minus, a["mask"], spec=spec, rollout_logprob=a["rollout"])
    assert same(run(a, name).weights, np.asarray(found.d_logprob) + np.float32(0))


@pytest.mark.parametrize("name", OPTIONS)
def test_packing_padding_and_strides_change_no_bit(name: str, device: str) -> None:
    padded, packed, cuts = ragged()
    *want, metrics = everything(tensors(padded, device), name)
    for dtype in (torch.int32, torch.int64):
        *got, found = everything(tensors(packed, device), name, cu_seqlens=torch.from_numpy(cuts).to(device, dtype))
        assert same(found.cpu(), metrics.cpu())
        for s, n in enumerate(LENGTHS):
            assert_same([x[cuts[s] : cuts[s + 1]] for x in got], [x[s, :n] for x in want])
    strided = {}
    for i, (k, x) in enumerate(tensors(padded, device).items()):
        wide = torch.zeros((5, 400), dtype=x.dtype, device=device)
        wide[:, 3 + i : 303 + i] = x
        strided[k] = wide[:, 3 + i : 303 + i]
    assert_same(run(strided, name), want)


@pytest.mark.parametrize("name", [n for n, o in OPTIONS.items() if not o.get("normalize")])
def test_a_sequence_has_its_bits_in_any_batch(name: str) -> None:
    a = rollouts(5, 90, seed=7)
    want = run(a, name)
    for order in ([4, 2, 0, 1, 3], [3], [2, 2]):
        got = run({k: x[order] for k, x in a.items()}, name)
        assert same(got.weights, want.weights[order])
        assert same(got.mask, want.mask[order])


@pytest.mark.parametrize("name", OPTIONS)
def test_masked_slots_are_never_read(name: str) -> None:
    a = rollouts(4, 65, seed=2)
    want, got = everything(a, name), everything(wild(a), name)
    assert all(same(g, w) for g, w in zip(got, want, strict=True))
    for x in got[:2]:
        assert not x[~a["mask"]].view(np.int32).any(), "+0"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32])
def test_masks_of_every_dtype_say_the_same(dtype: torch.dtype) -> None:
    a = tensors(rollouts(4, 50, seed=6))
    assert_same(run({**a, "mask": a["mask"].to(dtype)}, "many"), run(a, "many"))


def test_no_mask_counts_every_token() -> None:
    a = tensors(rollouts(4, 50, seed=6))
    want = run({**a, "mask": torch.ones_like(a["mask"])}, "many")
    assert_same(run({**a, "mask": None}, "many"), want)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (3, 7)])
def test_without_a_token_all_are_zero(shape: tuple[int, int], name: str) -> None:
    x = torch.full(shape, float("nan"))
    *arrays, metrics = everything({"train": x, "rollout": x, "mask": torch.zeros(shape, dtype=torch.bool)}, name)
    for found in arrays:
        assert same(found, np.zeros(shape, np.float32))
    # the last metric is the divisor
    assert same(metrics, np.array([*([0.0] * (len(rk.ImportanceMetrics.names) - 1)), 1.0], np.float32))


def test_metrics_of_weights_that_are_all_alike() -> None:
    """The deviation of equal weights is 0, even if their sums are rounded."""
    rollout = np.zeros((7, 1001), np.float32)
    for options in ({}, {"level": "sequence"}, {"mode": "mask"}):
        for d in (0.3, 1.0, -0.7):
            how: dict[str, Any] = {"upper": 2.0, "log_ratio_clamp": None, **options}
            found: Any = rk.importance_weights(rollout + np.float32(d) / 77, rollout, return_metrics=True, **how)
            metrics = found.metrics.asdict()
            assert metrics["weight_std"] == metrics["seq_std"] == 0, (options, d)
            assert metrics["weight_min"] == metrics["weight_max"] == float(found.weights[0, 0])
            assert metrics["ess"] == float((found.weights != 0).any())


@pytest.mark.parametrize("mean", [-17.0, -9.0, -4.0, 0.0])
def test_metrics_of_weights_far_from_one(mean: float) -> None:
    """Weights are products of ratios over long sequences, and most of these products are small. Deviations are as exact
    as deviations of weights near 1."""
    z = mean + np.random.default_rng(2).normal(0, 0.3, (64, 1))
    train = np.repeat((z / 512).astype(np.float32), 512, axis=1)
    how: dict[str, Any] = {"level": "sequence", "upper": 2.0}
    found: Any = rk.importance_weights(train, np.zeros_like(train), return_metrics=True, **how)
    want = rk.importance_weights_reference(train, np.zeros_like(train), **how)["metrics"]
    metrics = found.metrics.asdict()
    for name in ("weight_mean", "weight_std", "ess", "seq_mean", "seq_std", "seq_min", "seq_max"):
        assert metrics[name] == pytest.approx(want[name], rel=1e-3), name
    assert metrics["weight_min"] <= metrics["weight_mean"] <= metrics["weight_max"]


def test_metrics_whose_squares_float32_cannot_hold() -> None:
    for d in ([45.0, 1.0], [-70.0, -71.0]):
        train = np.array([d], np.float32)
        found: Any = rk.importance_weights(train, 0 * train, upper=math.inf, log_ratio_clamp=None, return_metrics=True)
        w = found.weights.astype(np.float64)
        assert found.metrics.weight_std == pytest.approx(w.std(), rel=1e-6)
        assert found.metrics.ess == pytest.approx(w.mean() ** 2 / (w * w).mean(), rel=1e-6)
        assert found.metrics.weight_max == found.weights.max()


def test_metrics_say_nan_where_a_weight_is() -> None:
    a = rollouts(3, 20, seed=9, masked=0.0)
    a["mask"][:] = True
    a["train"][0, 3] = np.nan
    metrics = rk.importance_weights(a["train"], a["rollout"], a["mask"], upper=2.0, return_metrics=True).metrics
    named = metrics.asdict()
    for name in ("weight_mean", "weight_std", "weight_min", "weight_max", "ratio_max", "ess", "seq_mean", "seq_max"):
        assert math.isnan(named[name]), name
    assert named["num_tokens"] == 60
    with pytest.raises(AttributeError, match="no 'nothing'"):
        _ = metrics.nothing


@pytest.mark.parametrize("name", OPTIONS)
def test_a_nan_is_refused_where_something_may_be(name: str) -> None:
    a = rollouts(1, 20, seed=9, masked=0.0)
    a["train"][0, 3] = np.nan
    got = run(a, name)
    refuses = "rejection" in OPTIONS[name] or "veto" in OPTIONS[name]
    assert got.mask[0, 3] == (0.0 if refuses else 1.0)
    assert np.isnan(got.weights[0, 3])


def test_small_means_are_not_divided_by() -> None:
    train, rollout = np.full((1, 3), -30.0, np.float32), np.zeros((1, 3), np.float32)
    options: dict[str, Any] = {"upper": 2.0, "log_ratio_clamp": None}
    want = rk.importance_weights(train, rollout, **options)
    assert 0 < float(want.weights[0, 0]) * 1e8 < 1
    assert same(rk.importance_weights(train, rollout, normalize=True, **options).weights, want.weights)


def test_numpy_and_jax_get_torchs_bytes() -> None:
    a = rollouts(3, 40, seed=8)
    want = run(tensors(a), "many")
    assert isinstance(run(a, "many").weights, np.ndarray)
    assert all(same(g, w) for g, w in zip(run(a, "many"), want, strict=True))
    jax = pytest.importorskip("jax")
    got = run({k: jax.numpy.asarray(x) for k, x in a.items()}, "many")
    assert isinstance(got.mask, jax.Array)
    assert all(same(g, w) for g, w in zip(got, want, strict=True))


def test_no_bit_depends_on_the_number_of_threads() -> None:
    a = tensors(rollouts(40, 3000, seed=10))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = run(a, "normalized sequences")
        torch.set_num_threads(3)
        assert_same(run(a, "normalized sequences"), want)
    finally:
        torch.set_num_threads(before)


def test_what_is_kept_is_a_mask_of_the_policy_loss() -> None:
    a = tensors(rollouts(4, 50, seed=3))
    found = run(a, "token_k1")
    loss = rk.policy_loss(a["train"], None, a["rollout"], found.mask, spec=rk.PolicySpec())
    assert float(loss.metrics.num_tokens) == float(found.mask.sum())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_calls_give_the_same_bytes(backend: str, device: str) -> None:
    a = tensors(rollouts(4, 65), device)
    compiled: Any = torch.compile(lambda a: run(a, "many"), fullgraph=True, backend=backend)
    assert_same(compiled(a), run(a, "many"))
    assert_same(
        torch.compile(lambda a: everything(a, "many"), fullgraph=True, backend=backend)(a), everything(a, "many")
    )
    learned = {**a, "train": a["train"].clone().requires_grad_()}
    assert_same(compiled(learned), run(a, "many"))
    assert not run(learned, "many").weights.requires_grad
    spec = [1.0, 0.0, 1.0, -math.inf, 2.0, 20.0, *([-math.inf, math.inf, math.inf, math.inf] * 4), -math.inf, 0.0]
    for metrics in (False, True):
        torch.library.opcheck(
            torch.ops.rl_kernel_native.importance_weights, (a["train"], a["rollout"], a["mask"], None, spec, metrics),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


X = torch.zeros(2, 8)


def call(**changed: Any) -> Any:
    arguments: dict[str, Any] = {"logprob": X, "rollout_logprob": X, "upper": 2.0} | changed
    return rk.importance_weights(**arguments)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({"logprob": X.double()}, TypeError, "logprob: expected dtype float32, got float64"),
    "shape": ({"rollout_logprob": X[0]}, ValueError, "rollout_logprob: expected shape [2, 8] (that of logprob), got"),
    "no rollout": ({"rollout_logprob": None}, TypeError, "rollout_logprob: expected"),
    "strided": ({"logprob": X.T}, ValueError, "logprob: expected a contiguous last dimension (stride 1)"),
    "mask": ({"mask": X[:1]}, ValueError, "mask: expected shape [2, 8] (that of logprob), got [1, 8]"),
    "level": ({"level": "batch"}, ValueError, 'level: expected "token", "sequence", "geometric", got'),
    "mode": ({"mode": "drop"}, ValueError, 'mode: expected "truncate", "clip", "mask", got'),
    "upper": ({"upper": 0.0}, ValueError, "upper: expected a number > 0 in float32, got 0.0"),
    "upper of no float32": ({"upper": 1e-46}, ValueError, "upper: expected a number > 0 in float32, got 1e-46"),
    "lower below": ({"mode": "clip", "lower": -1e-50}, ValueError, "lower: expected a number in [0, upper = 2], got -"),
    "no clamp": ({"log_ratio_clamp": 1e-46}, ValueError, "log_ratio_clamp: expected a finite number > 0 or None"),
    "no k2": ({"rejection": {"token_k2": 1e-46}}, ValueError, 'rejection["token_k2"]: expected a finite number > 0 in'),
    "upper of float64": ({"upper": 1e39}, ValueError, "upper: expected a number > 0 in float32, got 1e+39"),
    "upper NaN": ({"upper": math.nan}, ValueError, "upper: expected a number > 0"),
    "upper type": ({"upper": "2"}, TypeError, "upper: expected a number, got str"),
    "lower of truncate": ({"lower": 0.5}, ValueError, 'lower: expected None with mode="truncate"'),
    "lower": ({"mode": "clip", "lower": 3.0}, ValueError, "lower: expected a number in [0, upper = 2], got 3.0"),
    "no range": ({"mode": "clip", "upper": 0.5}, ValueError, "lower: expected a number in [0, upper = 0.5], got 2.0"),
    "clamp": ({"log_ratio_clamp": -1.0}, ValueError, "log_ratio_clamp: expected a finite number > 0 or None"),
    "veto": ({"veto": 0.0}, ValueError, "veto: expected a finite number > 0 in float32, got 0.0"),
    "normalize": ({"normalize": 1}, TypeError, "normalize: expected a bool, got int"),
    "metrics": ({"return_metrics": None}, TypeError, "return_metrics: expected a bool, got NoneType"),
    "rejection": ({"rejection": "token_k1"}, TypeError, "rejection: expected a dict of thresholds or None, got str"),
    "criterion": ({"rejection": {"seq_max_k1": 1.0}}, ValueError, "rejection: expected of token_k1, token_k2,"),
    "range of k2": ({"rejection": {"token_k2": (0, 1)}}, TypeError, 'rejection["token_k2"]: expected a number, got'),
    "range of k1": ({"rejection": {"token_k1": (2, 1)}}, ValueError, 'rejection["token_k1"]: expected lower <= upper'),
    "bounds of k1": ({"rejection": {"token_k1": (1,)}}, ValueError, 'rejection["token_k1"]: expected a number or'),
    "negative": ({"rejection": {"seq_sum_k3": -1.0}}, ValueError, 'rejection["seq_sum_k3"]: expected a finite number'),
    "cuts": (
        {"logprob": X[0], "rollout_logprob": X[0], "cu_seqlens": torch.tensor([0, 9, 8])}, ValueError,
        "cu_seqlens: expected at most 8 (the number of tokens), got 9 at index 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_names_the_argument(case: str) -> None:
    changed, error, text = BAD[case]
    with pytest.raises(error, match="^" + re.escape(text)):
        call(**changed)


@pytest.mark.parametrize("criterion", ["token_ratio", "seq_sum_ratio", "seq_mean_ratio"])
def test_bounds_of_a_ratio_are_the_ratios_own(criterion: str) -> None:
    """Bounds of (0.6, 1.4) keep the ratio 0.65 and drop 1.5. For k1 the bounds apply to the inverse ratio, as in verl,
    so ratio 1.5 stays and 0.65 is dropped."""
    rollout = np.full((5, 1), -3, np.float32)
    logprob = rollout + np.log(np.array([[1.5], [0.65], [1.0], [0.55], [1.7]], np.float32))
    bounds = (0.6, 1.4)
    kept = rk.importance_weights(logprob, rollout, upper=math.inf, rejection={criterion: bounds}).mask
    assert kept[:, 0].tolist() == [0, 1, 1, 0, 0]
    inverse = criterion.replace("ratio", "k1")
    kept = rk.importance_weights(logprob, rollout, upper=math.inf, rejection={inverse: bounds}).mask
    assert kept[:, 0].tolist() == [1, 0, 1, 0, 0]
    both = {criterion: bounds, inverse: bounds}
    kept = rk.importance_weights(logprob, rollout, upper=math.inf, rejection=both).mask
    assert kept[:, 0].tolist() == [0, 0, 1, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_cpu_and_cuda_have_the_same_bytes(name: str) -> None:
    for rows, columns in ((1, 1), (5, 37), (300, 64), (33, 2048), (3, 20000), (5000, 7)):
        a = rollouts(rows, columns, seed=11)
        want = everything(tensors(a), name)
        there = tensors(a, "cuda")
        assert_same(everything(there, name), want)
        assert_same(run(there, name), want[:2])
        cuts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * columns
        flat = {k: x.reshape(-1) for k, x in there.items()}
        assert_same(everything(flat, name, cu_seqlens=cuts), [x.reshape(-1) for x in want])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["TIS", "many", "normalized tokens"])
def test_a_gpu_says_nan_beside_bad_cuts(name: str) -> None:
    a = {k: x.reshape(-1) for k, x in tensors(rollouts(4, 50, masked=0.0), "cuda").items()}
    a["mask"][:] = True
    cuts = torch.tensor([0, 40, 100, 90, 160, 200], dtype=torch.int32, device="cuda")
    found: Any = run(a, name, cu_seqlens=cuts, return_metrics=True)
    assert bool(found.metrics.vector.isnan().all())
    in_doubt = torch.zeros(200, dtype=torch.bool, device="cuda")
    in_doubt[40:160] = True  # every sequence that begins or ends at 100 or 90
    assert bool(found.weights[in_doubt].isnan().all())
    assert not bool(found.mask[in_doubt].any())
    assert bool(found.weights[~in_doubt].isnan().all()) == ("normalized" in name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["TIS", "normalized sequences"])
def test_a_cuda_graph_replays_without_a_synchronisation(name: str) -> None:
    a = tensors(rollouts(64, 512, seed=12), "cuda")
    graph, got = captured(lambda: everything(a, name))
    a["train"].mul_(1.1)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(got, everything(a, name))
