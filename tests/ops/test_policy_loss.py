"""policy_loss: against float64, and the bits that must not depend on layout, batch, masked slots or framework."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from cases import beyond
from policy_loss_cases import TORCH, arrays, assert_packed_has_the_bits_of_padded, keywords, same, specs, tensors
from torch_properties import no_synchronisation

SPECS = specs()


def run(a: dict[str, Any], spec: rk.PolicySpec, **more: Any) -> rk.PolicyGradients:
    return rk.policy_loss_and_grad(
        a["logprob"], a["old_logprob"], a["advantage"], a["mask"], spec=spec, **{**keywords(spec, a), **more}
    )


@pytest.mark.parametrize("name", SPECS)
def test_loss_and_gradients_are_those_of_float64(name: str) -> None:
    spec, a = SPECS[name], tensors(arrays(6, 37))
    more = keywords(spec, a)
    result = run(a, spec)
    logprob, entropy = a["logprob"].double().requires_grad_(), a["entropy"].double().requires_grad_()
    reference = rk.policy_loss_reference(
        logprob, a["old_logprob"], a["advantage"], a["mask"], spec=spec, xp=TORCH, **{**more, "entropy": entropy}
    )
    want = torch.autograd.grad(reference["loss"], (logprob, entropy), allow_unused=True)
    loss = float(reference["loss"])
    size = max(1e-3, float(want[0].abs().sum()), abs(loss))
    assert not beyond("policy_loss", "loss", result.loss, loss, scale=size)
    assert not beyond("policy_loss", "d_logprob", result.d_logprob, want[0], largest=float(want[0].abs().max()))
    of_entropy = torch.zeros_like(entropy) if want[1] is None else want[1]
    largest = max(float(of_entropy.abs().max()), 1e-30)
    assert not beyond("policy_loss", "d_entropy", result.d_entropy, of_entropy, largest=largest)
    metrics = result.metrics.asdict()
    for key in ("num_tokens", "num_sequences", "denominator"):
        assert metrics[key] == reference[key]
    for key in ("policy_sum", "kl_sum", "entropy_sum"):
        assert not beyond("policy_loss", "metrics", metrics[key], float(torch.as_tensor(reference[key]).detach()))


@pytest.mark.parametrize("name", SPECS)
def test_packed_has_the_bits_of_padded(name: str) -> None:
    def of_spec(a: dict[str, np.ndarray], **more: Any) -> Any:
        return run(a, SPECS[name], **more)

    assert_packed_has_the_bits_of_padded(of_spec, arrays(5, 300, seed=1), "d_logprob")


@pytest.mark.parametrize("name", SPECS)
def test_masked_slots_are_never_read(name: str) -> None:
    spec, a = SPECS[name], arrays(4, 65, seed=2)
    want = run(a, spec)
    wild = np.random.default_rng(3).choice(np.array([np.nan, np.inf, -np.inf, 3e38], np.float32), a["mask"].shape)
    got = run({k: x if k == "mask" else np.where(a["mask"], x, wild) for k, x in a.items()}, spec)
    assert same(got.loss, want.loss)
    assert same(got.metrics.vector, want.metrics.vector)
    assert same(got.d_logprob, want.d_logprob)
    assert not np.asarray(got.d_logprob)[~a["mask"]].any()


@pytest.mark.parametrize("name", SPECS)
def test_a_split_into_batches_changes_no_bit_of_a_gradient(name: str) -> None:
    """Splits five sequences into runs in every way, with a given denominator: gradients are equal, and losses to
    1e-6."""
    spec, a = SPECS[name], arrays(5, 40, seed=4)
    if spec.entropy_aggregation == "token-mean" or spec.aggregation == "token-sum":
        pytest.skip("has no denominator to give")
    whole = run(a, spec, denominator=171.0)
    for cuts in range(16):
        edges = [0, *(i + 1 for i in range(4) if cuts >> i & 1), 5]
        parts = [run({k: x[i:j] for k, x in a.items()}, spec, denominator=171.0) for i, j in itertools.pairwise(edges)]
        assert same(np.concatenate([p.d_logprob for p in parts]), whole.d_logprob)
        total, size = sum(float(p.loss) for p in parts), sum(abs(float(p.loss)) for p in parts)
        assert abs(total - float(whole.loss)) <= 1e-6 * max(size, abs(float(whole.loss)))


def test_strides_and_alignment_change_no_bit() -> None:
    spec = rk.PolicySpec(kl="k3", kl_coef=0.1, importance="token", entropy_coef=0.01, level="geometric")
    a = arrays(7, 93, seed=5)
    want = run(a, spec)
    for offset in (1, 2, 3, 5):
        strided = {}
        for i, (k, x) in enumerate(a.items()):
            wide = np.zeros((7, 120), x.dtype)
            wide[:, offset + i : offset + i + 93] = x
            strided[k] = wide[:, offset + i : offset + i + 93]
        got = run(strided, spec)
        assert same(got.metrics.vector, want.metrics.vector)
        assert same(got.d_logprob, want.d_logprob)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32])
def test_masks_of_every_dtype_say_the_same(dtype: torch.dtype) -> None:
    spec, a = rk.PolicySpec(), tensors(arrays(4, 50, seed=6))
    want = run(a, spec)
    got = run({**a, "mask": a["mask"].to(dtype)}, spec)
    assert same(got.d_logprob, want.d_logprob)
    assert same(got.loss, want.loss)


def test_an_advantage_of_a_sequence_is_that_of_its_tokens() -> None:
    spec, a = rk.PolicySpec(clip="gmpo", level="geometric", aggregation="seq-mean-token-mean"), arrays(4, 50, seed=7)
    one = a["advantage"][:, 0].copy()
    whole = run({**a, "advantage": np.repeat(one[:, None], 50, 1)}, spec)
    column = torch.from_numpy(one)[:, None]
    for short in (one, one[:, None].copy(), column.expand(4, 50)):
        b = {**a, "advantage": short}
        assert same(run(tensors(a) | {"advantage": short} if isinstance(short, torch.Tensor) else b, spec).d_logprob,
                    whole.d_logprob)  # fmt: skip


def test_of_as_many_tokens_as_sequences_a_column_is_of_sequences() -> None:
    """Lengths are 2, 0, 1. A shape [3] is ambiguous, and a GPU's cu_seqlens are not read."""
    spec, a = rk.PolicySpec(importance="given"), arrays(1, 3, seed=8, masked=0)
    flat = tensors({k: x[0] for k, x in a.items()})
    cuts = torch.tensor([0, 2, 2, 3])
    for name in ("advantage", "weight"):
        per_token = flat[name][torch.tensor([0, 0, 2])]  # the three sequences' values, per token
        want = run({**flat, name: per_token}, spec, cu_seqlens=cuts)
        got = run({**flat, name: flat[name][:, None]}, spec, cu_seqlens=cuts)
        assert same(got.d_logprob, want.d_logprob)
        assert same(got.metrics.vector, want.metrics.vector)
        assert not same(run(flat, spec, cu_seqlens=cuts).loss, want.loss)


def test_frameworks_get_the_same_bits_in_their_own_arrays() -> None:
    spec, a = rk.PolicySpec(kl="k3", kl_coef=0.1, entropy_coef=0.1), arrays(3, 40, seed=8)
    want = run(a, spec)
    assert isinstance(want.d_logprob, np.ndarray)
    of_torch = run(tensors(a), spec)
    assert isinstance(of_torch.loss, torch.Tensor)
    assert same(of_torch.metrics.vector, want.metrics.vector)
    jax = pytest.importorskip("jax")
    of_jax = run({k: jax.numpy.asarray(x) for k, x in a.items()}, spec)
    assert isinstance(of_jax.d_logprob, jax.Array)
    assert same(of_jax.d_logprob, want.d_logprob)


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (3, 7)])
@pytest.mark.parametrize("name", ["aggregation token-mean", "geometric ppo", "gmpo", "vespo", "all sequences count"])
def test_no_token_is_a_loss_of_zero(name: str, shape: tuple[int, int]) -> None:
    a = arrays(*shape)
    a["mask"][:] = False
    result = run({k: x if k == "mask" else x * np.float32(np.nan) for k, x in a.items()}, SPECS[name])
    assert float(result.loss) == 0
    assert not np.asarray(result.d_logprob).any()
    assert np.isfinite(result.metrics.vector).all()


def test_no_token_has_a_gradient_of_its_shape() -> None:
    none = np.zeros((4, 0), np.float32)
    spec = rk.PolicySpec(entropy_coef=0.1)
    found = rk.policy_loss_and_grad(none, none, np.zeros(4, np.float32), none > 0, spec=spec, entropy=none)
    assert found.d_logprob.shape == found.d_entropy.shape == (4, 0)


@pytest.mark.parametrize("cuts", [[0], [0, 0, 0]])
@pytest.mark.parametrize("name", SPECS)
def test_a_pack_without_tokens_is_a_loss_of_zero(name: str, cuts: list[int]) -> None:
    packed = {k: x.reshape(-1)[:0] for k, x in arrays(2, 3).items()}
    result = run(packed, SPECS[name], cu_seqlens=np.array(cuts, np.int32))
    assert float(result.loss) == 0
    assert np.asarray(result.d_logprob).shape == (0,)
    assert np.isfinite(result.metrics.vector).all()


@pytest.mark.parametrize("name", SPECS)
def test_advantages_of_zero_give_a_policy_term_of_zero(name: str) -> None:
    """Groups without variance and ratios that overflow give no NaN."""
    spec, a = SPECS[name], arrays(3, 20, seed=9)
    if spec.kl is not None or spec.entropy_coef != 0 or spec.clip in ("dro", "kl_cov"):
        pytest.skip("has other terms")
    a["advantage"][:] = 0
    a["old_logprob"][:, ::3] -= 200
    result = run(a, spec)
    assert float(result.loss) == 0
    assert not np.asarray(result.d_logprob).any()


def test_the_denominator_may_be_on_the_device() -> None:
    a = tensors(arrays(3, 40))
    want = run(a, rk.PolicySpec(), denominator=37)
    for given in (torch.tensor(37.0), torch.tensor([37]), torch.tensor(37, dtype=torch.float64)):
        assert same(run(a, rk.PolicySpec(), denominator=given).d_logprob, want.d_logprob)


def test_a_nan_selects_nothing() -> None:
    a = arrays(4, 20, seed=10)
    a["selected"][:, ::3] = 0
    want = run(a, rk.PolicySpec(drop_selected=True), selected=a["selected"])
    a["selected"][:, ::3] = np.nan
    got = run(a, rk.PolicySpec(drop_selected=True), selected=a["selected"])
    assert same(got.metrics.vector, want.metrics.vector)
    assert same(got.d_logprob, want.d_logprob)


def test_the_denominator_may_be_a_number_of_numpy() -> None:
    a, spec = arrays(4, 20, seed=9), rk.PolicySpec()
    want = run(a, spec, denominator=7.0)
    for of in (a, tensors(a)):
        for number in (7, np.float32(7), np.int64(7), np.float16(7)):
            got = run(of, spec, denominator=number)
            assert same(got.loss, want.loss)
            assert same(got.d_logprob, want.d_logprob)


def test_no_result_depends_on_the_number_of_threads() -> None:
    spec, a = rk.PolicySpec(level="geometric", kl="k3", kl_coef=0.1), tensors(arrays(40, 3000, seed=10))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = run(a, spec)
        torch.set_num_threads(3)
        got = run(a, spec)
    finally:
        torch.set_num_threads(before)
    assert same(got.metrics.vector, want.metrics.vector)
    assert same(got.d_logprob, want.d_logprob)


def test_metrics_have_names() -> None:
    a = arrays(3, 40)
    metrics = run(a, rk.PolicySpec(kl="k1")).metrics
    assert list(metrics.asdict()) == list(rk.PolicyMetrics.names)
    assert float(metrics.kl) == metrics.asdict()["kl"]
    with pytest.raises(AttributeError, match="no 'nothing'"):
        _ = metrics.nothing
    with pytest.raises(ValueError, match="ratio_metrics: expected True"):
        _ = metrics.ratio


@pytest.mark.parametrize("name", SPECS)
def test_metrics_of_the_ratio_are_those_of_mismatch(name: str) -> None:
    """The ratio's metrics follow the others and do not change them, for arrays of every framework, padded and
    packed."""
    spec, a = SPECS[name], arrays(5, 300, seed=13)
    alone, got = run(a, spec), run(a, spec, ratio_metrics=True)
    want = rk.mismatch_metrics(a["logprob"], a["old_logprob"], a["mask"])
    size = len(rk.PolicyMetrics.names)
    assert same(got.metrics.vector[:size], alone.metrics.vector)
    assert same(got.metrics.ratio.vector, want.vector)
    assert same(got.metrics.ratio.histogram, want.histogram)
    assert got.metrics.asdict()["ratio_histogram_4"] == float(want.histogram[4]) > 0
    assert same(got.d_logprob, alone.d_logprob)
    t = tensors({k: x.reshape(-1) for k, x in a.items()})
    t["logprob"].requires_grad_()
    packed = rk.policy_loss(
        t["logprob"], t["old_logprob"], t["advantage"], t["mask"], spec=spec, ratio_metrics=True,
        cu_seqlens=torch.arange(6) * 300, **keywords(spec, t),
    )  # fmt: skip
    assert same(packed.metrics.vector, got.metrics.vector)
    packed.loss.backward()
    assert same(t["logprob"].grad, got.d_logprob.reshape(-1))


def test_without_an_old_policy_every_ratio_is_one() -> None:
    a = arrays(3, 40, seed=14)
    metrics = rk.policy_loss(
        a["logprob"], None, a["advantage"], a["mask"], spec=rk.PolicySpec(), ratio_metrics=True
    ).metrics
    assert metrics.ratio.histogram[4] == metrics.ratio.ess == 1
    with pytest.raises(TypeError, match="ratio_metrics: expected a bool, got int"):
        run(a, rk.PolicySpec(), ratio_metrics=1)


@pytest.mark.parametrize("importance", [None, "token", "sequence", "given"])
def test_metrics_of_importance_weights(importance: str | None) -> None:
    a = arrays(6, 90, seed=15)
    spec = rk.PolicySpec(importance=importance, importance_high=None if importance in (None, "given") else 1.15)
    metrics, keep = run(a, spec).metrics, a["mask"]
    drift = np.where(keep, a["old_logprob"].astype(np.float64) - a["rollout_logprob"], 0)
    if importance == "sequence":
        drift = drift.sum(axis=1, keepdims=True) + 0 * drift
    w = np.minimum(np.exp(drift), 1.15)[keep]
    if importance == "given":
        w = a["weight"][keep].astype(np.float64)
    if importance is None:
        w = np.ones(keep.sum())
    assert float(metrics.importance_mean) == pytest.approx(w.mean(), rel=1e-6)
    assert float(metrics.importance_max) == pytest.approx(w.max(), rel=1e-6)
    assert float(metrics.importance_ess) == pytest.approx(w.sum() ** 2 / (w**2).sum() / w.size, rel=1e-6)


def test_the_largest_importance_weight_at_its_edges() -> None:
    a, spec = arrays(4, 50, seed=16), rk.PolicySpec(importance="given")
    for fill in (-1.0, -0.0, 0.0):
        assert same(run({**a, "weight": np.full_like(a["weight"], fill)}, spec).metrics.importance_max, np.float32(0))
    a["weight"][2, np.flatnonzero(a["mask"][2])[0]] = np.nan
    assert np.isnan(run(a, spec).metrics.importance_max)
    a["mask"][:] = False
    assert run(a, spec).metrics.importance_max == run(a, rk.PolicySpec()).metrics.importance_max == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_a_gpu_has_the_bits_of_the_cpu(name: str) -> None:
    spec = SPECS[name]
    for rows, columns in ((1, 1), (5, 37), (300, 64), (33, 2048), (3, 20000)):
        a = tensors(arrays(rows, columns, seed=11))
        want = run(a, spec, ratio_metrics=True)
        got = run({k: x.cuda() for k, x in a.items()}, spec, ratio_metrics=True)
        assert same(got.loss.cpu(), want.loss)
        assert same(got.metrics.vector.cpu(), want.metrics.vector)
        assert same(got.d_logprob.cpu(), want.d_logprob)
        assert same(got.d_entropy.cpu(), want.d_entropy)
        flat = {k: x.reshape(-1).cuda() for k, x in a.items()}
        cuts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * columns
        packed = run(flat, spec, cu_seqlens=cuts, ratio_metrics=True)
        assert same(packed.metrics.vector.cpu(), want.metrics.vector)
        assert same(packed.d_logprob.cpu(), want.d_logprob.reshape(-1))


@pytest.mark.gpu
def test_a_graph_of_calls_has_their_bits() -> None:
    spec = rk.PolicySpec(kl="k3", kl_coef=0.1, level="geometric")
    a = {k: x.cuda() for k, x in tensors(arrays(64, 512, seed=12)).items()}
    want = run(a, spec)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(a, spec)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = run(a, spec)
    for _ in range(3):
        captured.d_logprob.zero_()
        graph.replay()
    torch.cuda.synchronize()
    assert same(captured.d_logprob.cpu(), want.d_logprob.cpu())
    assert same(captured.metrics.vector.cpu(), want.metrics.vector.cpu())


@pytest.mark.gpu
def test_in_a_graph_a_call_may_follow_a_copy_and_another_stream() -> None:
    spec = rk.PolicySpec(kl="k3", kl_coef=0.1)
    a = {k: x.cuda() for k, x in tensors(arrays(64, 512, seed=13)).items()}
    want, given = run(a, spec), {k: a[k].clone() for k in ("logprob", "advantage")}
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        a["logprob"].copy_(given["logprob"])
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.add(given["advantage"], 0.0, out=a["advantage"])
        torch.cuda.current_stream().wait_stream(side)
        captured = run(a, spec)
    for _ in range(3):
        for k in given:
            a[k].fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    assert same(captured.d_logprob.cpu(), want.d_logprob.cpu())
    assert same(captured.metrics.vector.cpu(), want.metrics.vector.cpu())


@pytest.mark.gpu
def test_a_gpu_says_nan_of_bad_cuts() -> None:
    a = {k: x.reshape(-1).cuda() for k, x in tensors(arrays(4, 50)).items()}
    for cuts in ([0, 60, 50, 200], [1, 60, 100, 200], [0, 60, 100, 300], [0, -5, 100, 200]):
        result = run(a, rk.PolicySpec(), cu_seqlens=torch.tensor(cuts, dtype=torch.int32, device="cuda"))
        assert torch.isnan(result.loss).item()


@pytest.mark.gpu
def test_a_call_waits_for_nothing() -> None:
    a = {k: x.cuda() for k, x in tensors(arrays(8, 100)).items()}
    spec = rk.PolicySpec(kl="k3", kl_coef=0.1)
    run(a, spec)
    with no_synchronisation():
        x = a["logprob"].clone().requires_grad_()
        rk.policy_loss(
            x, a["old_logprob"], a["advantage"], a["mask"], spec=spec, ref_logprob=a["ref_logprob"]
        ).loss.backward()
