"""value_loss: float64 and torch's own formula, its bits, torch's transformations, and rejected input."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from cases import beyond
from policy_loss_cases import TORCH, assert_packed_has_the_bits_of_padded, same, tensors

MEAN = {"aggregation": "seq-mean-token-mean"}
HOW: dict[str, dict[str, Any]] = {
    "no clip": {},
    "verl, OpenRLHF": {"clip": 0.5},
    "TRL": {"clip": 0.2},
    "slime": {"clip": 0.2, "scale": 2.0, **MEAN},
    "huber": {"loss_type": "huber", "huber_delta": 0.7},
    "huber, clip": {"loss_type": "huber", "clip": 0.3, "scale": 0.25, "dp_size": 4},
    "sum": {"clip": 0.5, "aggregation": "token-sum"},
    "all sequences count": {"clip": 0.5, "count_empty": True, **MEAN},
    "sums of sequences": {"clip": 0.5, "aggregation": "seq-mean-token-sum"},
    "horizon": {"clip": 0.5, "aggregation": "seq-mean-token-sum-norm", "horizon": 50.0},
}


def arrays(rows: int, columns: int, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 arrays of a batch; with three sequences, the second has no token that counts."""
    random = np.random.default_rng(seed)
    value, moved, error = (random.normal(0, 1, (rows, columns)).astype(np.float32) for _ in range(3))
    mask = random.random((rows, columns)) >= 0.3
    if rows > 2:
        mask[1] = False
    return {"value": value, "old_value": value + 0.5 * moved, "returns": value + error, "mask": mask}


def operands(a: dict[str, Any], how: dict[str, Any]) -> tuple[Any, ...]:
    return a["value"], a["old_value"] if "clip" in how else None, a["returns"], a["mask"]


def run(a: dict[str, Any], how: dict[str, Any], **more: Any) -> rk.ValueGradients:
    return rk.value_loss_and_grad(*operands(a, how), **how, **more)


def loss_of(x: torch.Tensor, a: dict[str, Any], how: dict[str, Any]) -> rk.ValueLoss:
    return rk.value_loss(*operands({**a, "value": x}, how), **how)


@pytest.mark.parametrize("name", HOW)
def test_loss_and_gradient_are_those_of_float64(name: str) -> None:
    how, a = HOW[name], tensors(arrays(6, 37))
    got = run(a, how)
    leaf = a["value"].double().requires_grad_()
    want = rk.value_loss_reference(*operands({**a, "value": leaf}, how), **how, xp=TORCH)
    (slope,) = torch.autograd.grad(want["loss"], leaf)
    want = {k: x.detach() if isinstance(x, torch.Tensor) else x for k, x in want.items()}
    scale = float(slope.abs().sum() + want["loss"])
    assert not beyond("value_loss", "loss", got.loss, float(want["loss"]), scale=scale)
    assert not beyond("value_loss", "d_value", got.d_value, slope, largest=float(slope.abs().max()))
    metrics = got.metrics.asdict()
    for key in ("num_tokens", "num_sequences", "denominator"):
        assert metrics[key] == want[key]
    for key in ("loss_sum", "value_sum", "return_sum", "error_sum", "error_squared_sum", "return_squared_sum",
                "explained_variance"):  # fmt: skip
        assert not beyond("value_loss", "metrics", metrics[key], float(want[key]))
    v, o, r = (a[k][a["mask"]].double() for k in ("value", "old_value", "returns"))
    assert not beyond("value_loss", "metrics", metrics["value_mean"], float(v.mean()))
    assert not beyond("value_loss", "metrics", metrics["return_mean"], float(r.mean()))
    clip = how.get("clip", math.inf)
    outside = (v - o).abs() > clip
    worse = outside & ((o + (v - o).clamp(-clip, clip) - r).abs() > (v - r).abs())
    assert metrics["outside_fraction"] == pytest.approx(float(outside.double().mean()))
    assert metrics["clip_fraction"] == pytest.approx(float(worse.double().mean()))


@pytest.mark.parametrize("clip", [0.25, 0.5])
def test_ties_and_bounds_are_torchs(clip: float) -> None:
    """Values in eighths are exact in float32 and meet all ties and bounds; the gradient of TRL's formula is equal bit
    for bit."""
    random = np.random.default_rng(0)
    v, o, r = (torch.from_numpy(random.integers(-12, 13, 4000).astype(np.float32) / 8) for _ in range(3))
    leaf = v.clone().requires_grad_()
    clipped = torch.clamp(leaf, o - clip, o + clip)
    plain, other = torch.square(leaf - r), torch.square(clipped - r)
    ties = ((plain == other) & (clipped != leaf)).sum()
    bounds = ((leaf == o - clip) | (leaf == o + clip)).sum()
    assert ties > 50
    assert bounds > 50
    (0.5 * torch.max(plain, other)).sum().backward()
    got = rk.value_loss_and_grad(v, o, r, clip=clip, aggregation="token-sum")
    assert torch.equal(got.d_value, leaf.grad)
    assert float(got.loss) == float((0.5 * torch.max(plain, other)).sum().detach())
    assert got.metrics.asdict()["clip_fraction"] == pytest.approx(float((other > plain).float().mean()))


def test_a_bound_of_verl_has_three_quarters_there_and_the_whole_here() -> None:
    """verl clips by torch.min and torch.max, which pass half of the gradient at the bound. Results differ only
    there."""
    v, o, r = torch.tensor([0.5]), torch.zeros(1), torch.tensor([2.0])
    leaf = v.clone().requires_grad_()
    clipped = torch.max(torch.min(leaf, o + 0.5), o - 0.5)
    (0.5 * torch.max((leaf - r) ** 2, (clipped - r) ** 2)).sum().backward()
    assert float(leaf.grad) == -1.5 * 0.75  # type: ignore[arg-type]
    assert float(rk.value_loss_and_grad(v, o, r, clip=0.5).d_value) == -1.5


def test_huber_is_torchs() -> None:
    random = np.random.default_rng(1)
    v, r = (torch.from_numpy(random.integers(-12, 13, 500).astype(np.float32) / 8) for _ in range(2))
    leaf = v.clone().requires_grad_()
    want = torch.nn.functional.huber_loss(leaf, r, reduction="sum", delta=0.5)
    want.backward()
    got = rk.value_loss_and_grad(v, None, r, loss_type="huber", huber_delta=0.5, aggregation="token-sum")
    assert float(got.loss) == float(want)
    assert torch.equal(got.d_value, leaf.grad)


@pytest.mark.parametrize("name", HOW)
def test_packed_has_the_bits_of_padded(name: str) -> None:
    def as_named(a: dict[str, np.ndarray], **more: Any) -> Any:
        return run(a, HOW[name], **more)

    assert_packed_has_the_bits_of_padded(as_named, arrays(5, 300, seed=1), "d_value")


@pytest.mark.parametrize("name", HOW)
def test_masked_slots_strides_and_alignment_change_no_bit(name: str) -> None:
    how, a = HOW[name], arrays(4, 93, seed=2)
    want = run(a, how)
    assert not np.asarray(want.d_value)[~a["mask"]].any()
    wild = np.random.default_rng(3).choice(np.array([np.nan, np.inf, -np.inf, 3e38], np.float32), a["mask"].shape)
    others = [{k: x if k == "mask" else np.where(a["mask"], x, wild) for k, x in a.items()}]
    for offset in (1, 2, 5):
        strided = {}
        for i, (k, x) in enumerate(a.items()):
            wide = np.zeros((4, 120), x.dtype)
            wide[:, offset + i : offset + i + 93] = x
            strided[k] = wide[:, offset + i : offset + i + 93]
        others.append(strided)
    for other in others:
        got = run(other, how)
        assert same(got.metrics.vector, want.metrics.vector)
        assert same(got.d_value, want.d_value)


@pytest.mark.parametrize("name", HOW)
def test_a_split_into_batches_changes_no_bit_of_the_gradient(name: str) -> None:
    """Splits five sequences into runs in every way, with a given denominator: gradients are equal, and losses to
    1e-6."""
    how, a = HOW[name], arrays(5, 40, seed=4)
    if how.get("aggregation") == "token-sum":
        pytest.skip("has no denominator to give")
    whole = run(a, how, denominator=171.0)
    for cuts in range(16):
        edges = [0, *(i + 1 for i in range(4) if cuts >> i & 1), 5]
        parts = [run({k: x[i:j] for k, x in a.items()}, how, denominator=171.0) for i, j in itertools.pairwise(edges)]
        assert same(np.concatenate([p.d_value for p in parts]), whole.d_value)
        total = sum(float(p.loss) for p in parts)
        assert abs(total - float(whole.loss)) <= 1e-6 * abs(float(whole.loss))
        tokens = sum(p.metrics.asdict()["num_tokens"] for p in parts)
        assert tokens == whole.metrics.asdict()["num_tokens"]


def test_no_mask_is_a_mask_of_ones_and_any_dtype_masks() -> None:
    a = tensors(arrays(4, 50, seed=6))
    how = HOW["TRL"]
    every = {**a, "mask": torch.ones_like(a["mask"])}
    assert same(run({**a, "mask": None}, how).metrics.vector, run(every, how).metrics.vector)
    want = run(a, how)
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32):
        assert same(run({**a, "mask": a["mask"].to(dtype)}, how).d_value, want.d_value)


def test_frameworks_get_the_same_bits_in_their_own_arrays() -> None:
    how, a = HOW["huber, clip"], arrays(3, 40, seed=8)
    want = run(a, how)
    assert isinstance(want.d_value, np.ndarray)
    of_torch = run(tensors(a), how)
    assert isinstance(of_torch.loss, torch.Tensor)
    assert same(of_torch.metrics.vector, want.metrics.vector)
    jax = pytest.importorskip("jax")
    of_jax = run({k: jax.numpy.asarray(x) for k, x in a.items()}, how)
    assert isinstance(of_jax.d_value, jax.Array)
    assert same(of_jax.d_value, want.d_value)


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (3, 7)])
@pytest.mark.parametrize("name", ["no clip", "slime", "all sequences count"])
def test_no_token_is_a_loss_of_zero(name: str, shape: tuple[int, int]) -> None:
    a = arrays(*shape)
    a["mask"][:] = False
    result = run({k: x if k == "mask" else x * np.float32(np.nan) for k, x in a.items()}, HOW[name])
    assert float(result.loss) == 0
    assert not np.asarray(result.d_value).any()
    assert np.isfinite(result.metrics.vector).all()


@pytest.mark.parametrize("wrong", ["value", "old_value", "returns"])
def test_a_nan_of_a_token_is_not_lost(wrong: str) -> None:
    a = arrays(1, 20)
    a["mask"][:] = True
    a[wrong][0, 7] = np.nan
    result = run(a, HOW["TRL"])
    assert math.isnan(float(result.loss))
    assert np.flatnonzero(np.isnan(result.d_value)).tolist() == [7]


def test_explained_variance_is_one_of_a_perfect_critic_and_zero_of_a_constant() -> None:
    a = arrays(4, 50)
    perfect = run({**a, "value": a["returns"]}, {}).metrics.asdict()
    assert perfect["explained_variance"] == 1.0
    flat = run({**a, "returns": np.ones_like(a["returns"])}, {}).metrics.asdict()
    assert flat["explained_variance"] == 0.0


def test_the_denominator_may_be_on_the_device() -> None:
    a = tensors(arrays(3, 40))
    want = run(a, HOW["TRL"], denominator=37)
    for given in (torch.tensor(37.0), torch.tensor([37]), torch.tensor(37, dtype=torch.float64)):
        assert same(run(a, HOW["TRL"], denominator=given).d_value, want.d_value)


def test_no_result_depends_on_the_number_of_threads() -> None:
    how, a = HOW["slime"], tensors(arrays(40, 3000, seed=10))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = run(a, how)
        torch.set_num_threads(3)
        got = run(a, how)
    finally:
        torch.set_num_threads(before)
    assert same(got.metrics.vector, want.metrics.vector)
    assert same(got.d_value, want.d_value)


def test_metrics_have_names() -> None:
    metrics = run(arrays(3, 40), HOW["TRL"]).metrics
    assert list(metrics.asdict()) == list(rk.ValueMetrics.names)
    assert float(metrics.clip_fraction) == metrics.asdict()["clip_fraction"]
    with pytest.raises(AttributeError, match="ValueMetrics has no 'nothing'"):
        _ = metrics.nothing


# ---- torch ----------------------------------------------------------------------------------------------------------

TRL = HOW["TRL"]


@pytest.mark.parametrize("factor", [1.0, -0.5])
def test_backward_multiplies_by_the_incoming_gradient(factor: float) -> None:
    a = tensors(arrays(4, 21))
    x = a["value"].clone().requires_grad_()
    loss = loss_of(x, a, TRL).loss * factor
    loss.backward(retain_graph=True)
    want = run(a, TRL).d_value * factor
    assert same(x.grad, want)
    x.grad.mul_(7)  # type: ignore[union-attr]  # the caller owns returned tensors
    x.grad = None
    loss.backward()
    assert same(x.grad, want)


def test_constants_that_want_a_gradient_are_refused() -> None:
    a = tensors(arrays(4, 21))
    for name in ("old_value", "returns"):
        with pytest.raises(ValueError, match=f"{name}: requires a gradient"):
            loss_of(a["value"], {**a, name: a[name].clone().requires_grad_()}, TRL)
    with pytest.raises(ValueError, match="value: requires a gradient"):
        run({**a, "value": a["value"].clone().requires_grad_()}, TRL)


@pytest.mark.parametrize("name", ["old_value", "returns"])
def test_constants_that_have_a_tangent_are_refused(name: str) -> None:
    a = tensors(arrays(4, 21))
    with pytest.raises(ValueError, match=f"^{name}: has a tangent, and value_loss has no derivative in it"):
        torch.func.jvp(lambda x: loss_of(a["value"], {**a, name: x}, TRL).loss, (a[name],), (torch.ones(4, 21),))


def test_compiled_whole_its_numbers_may_change() -> None:
    a = tensors(arrays(4, 21))

    def loss(number: float) -> torch.Tensor:
        how = {"clip": number, "scale": number, "denominator": number}
        return rk.value_loss(a["value"], a["old_value"], a["returns"], a["mask"], **how).loss

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    for number in (0.5, 1.5, 2.5, 3, 4, 5):
        assert same(compiled(number), loss(number))


def test_a_second_derivative_is_an_error() -> None:
    a = tensors(arrays(4, 21))
    x = a["value"].clone().requires_grad_()
    (first,) = torch.autograd.grad(loss_of(x, a, TRL).loss, x, create_graph=True)
    assert same(first.detach(), run(a, TRL).d_value)
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()


def test_an_operand_changed_in_place_is_refused() -> None:
    a = tensors(arrays(4, 21))
    x = a["value"].clone().requires_grad_()
    loss = loss_of(x, a, TRL).loss
    a["returns"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiled_whole_it_has_the_eager_bits() -> None:
    a = tensors(arrays(4, 21))
    x = a["value"].clone().requires_grad_()

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = loss_of(x * 1.0, a, TRL)
        return result.loss * 0.5, result.metrics.vector

    loss, vector = torch.compile(step, fullgraph=True)(x)
    loss.backward()
    want = run(a, TRL)
    assert same(vector, want.metrics.vector)
    assert same(x.grad, want.d_value * 0.5)


def test_the_operator_passes_torchs_own_check() -> None:
    a = tensors(arrays(4, 21))
    operands = (a["value"].requires_grad_(), a["old_value"], a["returns"], a["mask"], None, None, None)
    arguments = (*operands, 0.2, math.inf, 1, False, 0.0, 1.0, 0.0)
    torch.library.opcheck(
        torch.ops.rl_kernel_native.value_loss, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_functional_transformations_are_those_of_autograd() -> None:
    a = tensors(arrays(4, 21))
    want = run(a, TRL)
    assert same(torch.func.grad(lambda x: loss_of(x, a, TRL).loss)(a["value"]), want.d_value)
    tangent = torch.randn_like(a["value"])
    loss, along = torch.func.jvp(lambda x: loss_of(x, a, TRL).loss, (a["value"],), (tangent,))
    assert same(loss, want.loss)
    assert along.item() == pytest.approx((want.d_value * tangent).sum().item(), rel=1e-4)
    stacked = torch.stack([a["value"], 0.9 * a["value"]])
    each = torch.vmap(torch.func.grad(lambda x: loss_of(x, a, TRL).loss))(stacked)
    for got, x in zip(each, stacked, strict=True):
        assert same(got, run({**a, "value": x}, TRL).d_value)


def test_fake_tensors_say_shapes_and_errors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.zeros(3, 5)
        result = rk.value_loss(x, x, x, clip=0.5)
        assert result.loss.shape == ()
        assert result.metrics.vector.shape == (len(rk.ValueMetrics.names),)
        with pytest.raises(ValueError, match=r"returns: expected shape \[3, 5\]"):
            rk.value_loss(x, x, torch.zeros(3), clip=0.5)
        with pytest.raises(TypeError, match="old_value: expected dtype float32"):
            rk.value_loss(x, x.half(), x, clip=0.5)


# ---- rejected input
# ---------------------------------------------------------------------------------------------------

ROW = np.zeros((3, 8), np.float32)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"clip": 0.0}, ValueError, "clip: expected a finite number > 0 or None"),
        ({"clip": "0.2"}, TypeError, "clip: expected a number"),
        ({"clip": True}, TypeError, "clip: expected a number"),
        ({"clip": None}, ValueError, "old_value: expected None where clip is None"),
        ({"old_value": None}, ValueError, "old_value: expected an array, which clip needs"),
        ({"loss_type": "mae"}, ValueError, 'loss_type: expected "mse", "huber"'),
        ({"huber_delta": 2.0}, ValueError, 'huber_delta: expected 1 with loss_type="mse"'),
        ({"loss_type": "huber", "huber_delta": -1.0}, ValueError, "huber_delta: expected a finite number > 0"),
        ({"aggregation": "mean"}, ValueError, "aggregation: expected"),
        (
            {"aggregation": "constant"},
            ValueError,
            "denominator: expected a number or an array",
        ),
        ({"aggregation": "token-sum", "denominator": 3}, ValueError, "denominator: expected None"),
        ({"aggregation": "seq-mean-token-sum-norm"}, ValueError, "horizon: expected a number"),
        ({"count_empty": True}, ValueError, "it counts no sequences"),
        ({"scale": math.inf}, ValueError, "scale: expected a finite number"),
        ({"dp_size": 0}, ValueError, "dp_size: expected a positive integer"),
        ({"denominator": 0}, ValueError, "denominator: expected a finite number > 0"),
        ({"denominator": np.zeros(2, np.float32)}, ValueError, "denominator: expected one element"),
        ({"aggregation": ["token-mean"]}, ValueError, r"aggregation: expected .*, got \['token-mean'\]"),
        ({"count_empty": "False"}, TypeError, "count_empty: expected a bool, got str"),
        ({"denominator": 1e-46}, ValueError, "denominator: expected a finite number > 0, got 1e-46, which is below"),
        ({"scale": 1e39}, ValueError, r"scale: expected a finite number, got 1e\+39, which is inf in float32"),
        (
            {"aggregation": "seq-mean-token-sum-norm", "horizon": 1e-46},
            ValueError,
            "horizon: expected a finite number > 0 or None, got 1e-46, which is below the normal",
        ),
        ({"value": ROW.astype(np.float64)}, TypeError, "value: expected dtype float32, got float64"),
        ({"value": ROW.T}, ValueError, "value: expected a contiguous last dimension"),
        ({"old_value": ROW[:, :7]}, ValueError, r"old_value: expected shape \[3, 8\]"),
        ({"returns": ROW[0]}, ValueError, r"returns: expected shape \[3, 8\]"),
        ({"returns": None}, TypeError, "returns: expected an array"),
        ({"mask": ROW.astype(np.complex64)}, TypeError, "mask: expected dtype bool"),
        ({"mask": np.ones((3, 9), bool)}, ValueError, r"mask: expected shape \[3, 8\]"),
        ({"cu_seqlens": np.array([0, 24], np.int32)}, ValueError, r"value: expected shape \[num_tokens\]"),
    ],
)
def test_a_call_says_what_is_wrong(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"value": ROW, "old_value": ROW, "returns": ROW, "clip": 0.2} | changed
    for function in (rk.value_loss, rk.value_loss_and_grad):
        with pytest.raises(error, match=message):
            function(**arguments)


@pytest.mark.parametrize("cuts", [[1, 8, 24], [0, 9, 8, 24], [0, 8, 25], [0, -1, 24]])
def test_cuts_are_checked_on_the_cpu(cuts: list[int]) -> None:
    flat = ROW.reshape(-1)
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        rk.value_loss(flat, None, flat, cu_seqlens=np.array(cuts, np.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("name", HOW)
def test_a_gpu_has_the_bits_of_the_cpu(name: str) -> None:
    how = HOW[name]
    for rows, columns in ((1, 1), (5, 37), (300, 64), (33, 2048), (3, 20000)):
        a = tensors(arrays(rows, columns, seed=11))
        want, got = run(a, how), run({k: x.cuda() for k, x in a.items()}, how)
        assert same(got.metrics.vector.cpu(), want.metrics.vector)
        assert same(got.d_value.cpu(), want.d_value)
        flat = {k: x.reshape(-1).cuda() for k, x in a.items()}
        cuts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * columns
        assert same(run(flat, how, cu_seqlens=cuts).metrics.vector.cpu(), want.metrics.vector)


@pytest.mark.gpu
def test_cuts_that_do_not_ascend_make_the_loss_nan_on_a_gpu() -> None:
    flat = torch.zeros(200, device="cuda")
    for cuts in ([0, 60, 50, 200], [1, 60, 100, 200], [0, 60, 100, 300], [0, -5, 100, 200]):
        given = torch.tensor(cuts, dtype=torch.int32, device="cuda")
        assert torch.isnan(rk.value_loss(flat, None, flat, cu_seqlens=given).loss).item()
