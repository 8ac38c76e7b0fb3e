"""kl: float64, its bits, torch's transformations, and rejected input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from cases import beyond
from policy_loss_cases import TORCH, arrays, same, tensors

ESTIMATORS = ("k1", "k2", "k3", "abs")
HOW: dict[str, dict[str, Any]] = {}
for _estimator in ESTIMATORS:
    HOW[_estimator] = {"estimator": _estimator}
    HOW[f"{_estimator} clamped"] = {"estimator": _estimator, "input_clamp": 0.2, "clamp": 0.03}
    HOW[f"{_estimator} straight through"] = {"estimator": _estimator, "straight_through": True}
    HOW[f"{_estimator} times ratio"] = {"estimator": _estimator, "old_logprob": "old_logprob"}
    HOW[f"{_estimator} weighted"] = {"estimator": _estimator, "importance_weight": "weight", "clamp": 0.5}


def with_arrays(how: dict[str, Any], a: dict[str, Any]) -> dict[str, Any]:
    return {k: a.get(v, v) if isinstance(v, str) else v for k, v in how.items()}


def run(a: dict[str, Any], how: dict[str, Any]) -> list[Any]:
    """The value and every gradient, with the advantages as the incoming gradient."""
    more = with_arrays(how, a)
    operands = (a["logprob"], a["ref_logprob"], a["mask"])
    found = rk.kl_backward(a["advantage"], *operands, **more)
    return [x for x in (rk.kl(*operands, **more), *found) if x is not None]


def all_same(got: list[Any], want: list[Any]) -> bool:
    return len(got) == len(want) and all(map(same, got, want))


@pytest.mark.parametrize("name", HOW)
def test_values_and_gradients_are_those_of_float64(name: str) -> None:
    how, a = HOW[name], tensors(arrays(6, 37))
    ell = a["logprob"].double().requires_grad_()
    weight = a["weight"].double().requires_grad_()
    more = with_arrays(how, a)
    if "importance_weight" in how:
        more["importance_weight"] = weight
    want = rk.kl_reference(ell, a["ref_logprob"], a["mask"], **more, xp=TORCH)
    slopes = torch.autograd.grad(want, (ell, weight), a["advantage"].double(), allow_unused=True)
    got = run(a, how)
    outputs = ("kl", "d_logprob", "d_importance_weight")
    for output, found, wanted in zip(outputs, got, (want, *slopes), strict=False):
        assert not beyond("kl", output, found, wanted.detach(), largest=float(wanted.detach().abs().max()))
    assert not got[0][~a["mask"]].any()


@pytest.mark.parametrize("name", HOW)
def test_it_is_the_kl_term_of_policy_loss(name: str) -> None:
    """Sequences have one token, so their sums are the token's own."""
    how, a = HOW[name], {k: x.reshape(-1, 1) for k, x in arrays(4, 30, masked=0.0).items()}
    if "importance_weight" in how:
        pytest.skip("PolicySpec has no constant weight of the KL term")
    fields = {f"kl_{k}": v for k, v in how.items() if k not in ("estimator", "old_logprob")}
    spec = rk.PolicySpec(
        kl=how["estimator"], kl_coef=1.0, kl_times_ratio="old_logprob" in how, aggregation="token-sum", **fields
    )
    want = rk.policy_loss_and_grad(
        a["logprob"], a["old_logprob"], np.zeros_like(a["advantage"]), a["mask"], spec=spec,
        ref_logprob=a["ref_logprob"],
    )  # fmt: skip
    more = with_arrays(how, a)
    got = rk.kl(a["logprob"], a["ref_logprob"], a["mask"], **more)
    one = np.ones_like(got)
    d_logprob = rk.kl_backward(one, a["logprob"], a["ref_logprob"], a["mask"], **more).d_logprob
    assert np.array_equal(d_logprob, want.d_logprob)  # policy_loss may give a zero with a sign
    each = [
        rk.policy_loss(
            *(a[k][i : i + 1] for k in ("logprob", "old_logprob")), np.zeros((1, 1), np.float32), a["mask"][i : i + 1],
            spec=spec, ref_logprob=a["ref_logprob"][i : i + 1],
        ).metrics.asdict()["kl_sum"]
        for i in range(0, 120, 7)
    ]  # fmt: skip
    assert same(got.reshape(-1)[::7], np.array(each, np.float32)[: len(got.reshape(-1)[::7])])


OF_SEQUENCES: dict[str, dict[str, Any]] = {
    "sequence": {"level": "sequence", "log_ratio_clamp": 0.01, "aggregation": "token-sum"},
    "geometric": {"level": "geometric", "straight_through": True, "aggregation": "token-sum"},
    "gmpo": {"level": "geometric", "clip": "gmpo", "aggregation": "seq-mean-token-mean"},
    "vespo": {"level": "sequence", "clip": "vespo", "aggregation": "token-sum"},
}


@pytest.mark.parametrize("of", OF_SEQUENCES)
@pytest.mark.parametrize("far", [1.0, 300.0], ids=["near", "far"])
@pytest.mark.parametrize("name", [n for n in HOW if "old_logprob" in HOW[n]])
def test_a_tokens_ratio_is_that_of_kl_whatever_the_level(name: str, far: float, of: str) -> None:
    """Values and slopes of the tokens equal the values and slopes of rk.kl with old_logprob, bit for bit."""
    how, a = HOW[name], arrays(1 if of == "gmpo" else 6, 37)
    a["ref_logprob"] = a["logprob"] + np.float32(far) * (a["ref_logprob"] - a["logprob"])
    spec = rk.PolicySpec(
        kl=how["estimator"], kl_coef=1.0, kl_times_ratio=True, kl_ratio_of_token=True, **OF_SEQUENCES[of]
    )
    want = rk.policy_loss_and_grad(
        a["logprob"], a["old_logprob"], np.zeros_like(a["advantage"]), a["mask"], spec=spec,
        ref_logprob=a["ref_logprob"],
    )  # fmt: skip
    weight = np.float32(1.0) / np.float32(a["mask"].sum()) if of == "gmpo" else np.float32(1.0)
    given = with_arrays(how, a)
    operands = (a["logprob"], a["ref_logprob"], a["mask"])
    d_logprob = rk.kl_backward(np.full_like(a["logprob"], weight), *operands, **given).d_logprob
    assert np.array_equal(d_logprob, want.d_logprob)
    sums = rk.sequence_logprob(rk.kl(*operands, **given), a["mask"]).sum
    assert want.metrics.asdict()["kl_sum"] == rk.sequence_logprob(sums[None]).sum[0]


def test_values_in_figures() -> None:
    """Values at e = ln 2 are computed by hand. The limits of verl's low_var_kl and of OpenRLHF hold at 10 and not
    below."""
    ell, f = np.zeros(1, np.float32), np.full(1, math.log(2), np.float32)
    e = math.log(2)
    for estimator, want in {"k1": -e, "k2": e**2 / 2, "k3": 1 - e, "abs": e}.items():
        assert not beyond("kl", "kl", rk.kl(ell, f, estimator=estimator), np.array([want]), largest=1.0)
    far = np.array([30.0, -30.0], np.float32)
    zero = np.zeros(2, np.float32)
    verl = rk.kl(zero, far, estimator="k3", input_clamp=20.0, clamp=10.0)
    assert verl.tolist() == [10.0, 10.0]
    assert not rk.kl_backward(np.ones(2, np.float32), zero, far, estimator="k3", input_clamp=20.0, clamp=10.0)[0].any()
    assert rk.kl(zero, far, estimator="k1", clamp=10.0).tolist() == [-10.0, 10.0]


def test_equal_policies_have_zeros_without_a_sign() -> None:
    x = arrays(3, 20)["logprob"]
    for how in ESTIMATORS:
        assert same(rk.kl(x, x, estimator=how), np.zeros_like(x))


@pytest.mark.parametrize("name", HOW)
def test_a_token_has_the_same_bits_anywhere(name: str) -> None:
    """Tokens are packed, alone, in other batches, after gaps and off alignment, with arbitrary values in masked
    slots."""
    how, a = HOW[name], arrays(5, 300, seed=1)
    want = run(a, how)
    flat = {k: x.reshape(-1) for k, x in a.items()}
    assert all_same([x.reshape(5, 300) for x in run(flat, how)], want)
    one = run({k: x[2, 17:18] for k, x in a.items()}, how)
    assert all_same(one, [x[2, 17:18] for x in want])
    assert all_same(run({k: x[3:, 11:] for k, x in a.items()}, how), [x[3:, 11:] for x in want])
    wide = {}
    for i, (k, x) in enumerate(a.items()):
        memory = np.zeros((5, 320), x.dtype)
        memory[:, i : i + 300] = x
        wide[k] = memory[:, i : i + 300]
    assert all_same(run(wide, how), want)
    wild = np.random.default_rng(3).choice(np.array([np.nan, np.inf, -np.inf, 3e38], np.float32), a["mask"].shape)
    assert all_same(run({k: x if k == "mask" else np.where(a["mask"], x, wild) for k, x in a.items()}, how), want)


def test_no_mask_is_a_mask_of_ones_and_any_dtype_masks() -> None:
    a = arrays(4, 50, masked=0.0)
    how = {"estimator": "k3"}
    a["mask"][:] = True
    assert same(rk.kl(a["logprob"], a["ref_logprob"], **how), run(a, how)[0])
    b = tensors(arrays(4, 50, seed=2))
    want = run(b, how)
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32):
        assert all_same(run({**b, "mask": b["mask"].to(dtype)}, how), want)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0), (1, 1)])
def test_nothing_is_nothing(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    assert rk.kl(x, x, estimator="k3").shape == shape
    assert rk.kl_backward(x, x, x, estimator="k3").d_logprob.shape == shape


def test_frameworks_get_the_same_bits_in_their_own_arrays() -> None:
    how, a = HOW["k3 weighted"], arrays(3, 40, seed=8)
    want = run(a, how)
    assert isinstance(want[0], np.ndarray)
    of_torch = run(tensors(a), how)
    assert isinstance(of_torch[0], torch.Tensor)
    assert all_same(of_torch, want)
    jax = pytest.importorskip("jax")
    of_jax = run({k: jax.numpy.asarray(x) for k, x in a.items()}, how)
    assert isinstance(of_jax[0], jax.Array)
    assert all_same(of_jax, want)


def test_no_result_depends_on_the_number_of_threads() -> None:
    how, a = HOW["k3 times ratio"], tensors(arrays(40, 3000, seed=10))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = run(a, how)
        torch.set_num_threads(3)
        assert all_same(run(a, how), want)
    finally:
        torch.set_num_threads(before)


# ---- torch ----------------------------------------------------------------------------------------------------------


def call(a: dict[str, Any], x: torch.Tensor, w: Any = None, **how: Any) -> torch.Tensor:
    found: torch.Tensor = rk.kl(x, a["ref_logprob"], a["mask"], **({"estimator": "k3"} | how), importance_weight=w)
    return found


def test_autograd_gives_the_gradients_of_kl_backward() -> None:
    a = tensors(arrays(4, 21))
    x, w = a["logprob"].clone().requires_grad_(), a["weight"].clone().requires_grad_()
    want = run(a, HOW["k3 weighted"])
    for graph in (False, True):
        result = call(a, x, w, clamp=0.5)
        got = torch.autograd.grad(result, (x, w), a["advantage"], create_graph=graph)
        assert all_same([t.detach() for t in (result, *got)], want)
    (alone,) = torch.autograd.grad(call(a, x.detach(), w, clamp=0.5), w, a["advantage"])
    assert same(alone, want[2])
    call(a, x).sum().backward()  # gives an expanded gradient
    ones = torch.ones_like(x)
    assert same(x.grad, rk.kl_backward(ones, a["logprob"], a["ref_logprob"], a["mask"], estimator="k3").d_logprob)


def test_the_ratio_as_a_weight_has_the_gradient_through_it() -> None:
    """The ratio exp(logprob - old_logprob) from torch's own graph, and old_logprob, give the same objective."""
    a = tensors(arrays(4, 21))
    x = a["logprob"].double().requires_grad_()
    want = rk.kl_reference(
        x, a["ref_logprob"], a["mask"], estimator="k3", xp=TORCH, importance_weight=(x - a["old_logprob"]).exp()
    )
    (slope,) = torch.autograd.grad(want.sum(), x)
    leaf = a["logprob"].clone().requires_grad_()
    largest = float(slope.abs().max())
    for result in (
        call(a, leaf, (leaf - a["old_logprob"]).exp()),
        rk.kl(leaf, a["ref_logprob"], a["mask"], estimator="k3", old_logprob=a["old_logprob"]),
    ):
        (got,) = torch.autograd.grad(result.sum(), leaf)
        assert not beyond("kl", "d_logprob", got, slope, largest=largest)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"estimator": "k1"}, "nothing"),
        ({"estimator": "k2"}, "reverse"),
        ({"estimator": "k3"}, "forward"),
        ({"estimator": "k1", "straight_through": True}, "reverse"),
        ({"estimator": "k3", "straight_through": True}, "reverse"),
        ({"estimator": "k1", "old_logprob": "old"}, "reverse"),
        ({"estimator": "k3", "old_logprob": "old"}, "reverse"),
    ],
)
def test_expected_gradients_are_those_of_the_docs(how: dict[str, Any], what: str) -> None:
    """Computes the exact expectation over a vocabulary under the sampling policy, which differs from the policy if
    there is a ratio. The gradient in the logits is the gradient of KL(policy, reference), of KL(reference, policy), or
    zero."""
    random = np.random.default_rng(3)
    logits, ref, old = (torch.from_numpy(random.normal(0, 1, 7)).log_softmax(-1) for _ in range(3))
    more = {k: old.float()[None] if v == "old" else v for k, v in how.items()}
    leaf = logits.clone().requires_grad_()
    found = rk.kl(leaf.log_softmax(-1).float()[None], ref.float()[None], **more)[0]
    (found * (old if "old_logprob" in how else logits).exp()).sum().backward()
    other = logits.clone().requires_grad_()
    p = other.log_softmax(-1)
    divergences = {"reverse": p.exp() * (p - ref), "forward": ref.exp() * (ref - p), "nothing": 0 * p}
    divergences[what].sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=0, atol=2e-7)  # a few roundings of terms below 1


def test_constants_that_want_a_gradient_are_refused() -> None:
    a = tensors(arrays(4, 21))
    x = a["logprob"]
    for name in ("ref_logprob", "old_logprob"):
        b = {**a, name: a[name].clone().requires_grad_()}
        with pytest.raises(ValueError, match=f"{name}: requires a gradient"):
            rk.kl(x, b["ref_logprob"], estimator="k1", old_logprob=b["old_logprob"])


@pytest.mark.parametrize("name", ["ref_logprob", "old_logprob"])
def test_constants_that_have_a_tangent_are_refused(name: str) -> None:
    a = tensors(arrays(4, 21))
    b = {k: a[k] for k in ("logprob", "ref_logprob", "old_logprob")}
    with pytest.raises(ValueError, match=f"^{name}: has a tangent, and kl has no derivative in it"):
        torch.func.jvp(lambda x: rk.kl(**(b | {name: x}), estimator="k1"), (b[name],), (torch.ones(4, 21),))


def test_the_backward_gives_no_derivative_in_a_mask() -> None:
    """A tangent of the mask alone was an AttributeError, and its gradient was lost."""
    a = tensors(arrays(4, 21))
    mask = torch.ones(4, 21)

    def back(given: Any) -> Any:
        return rk.kl_backward(mask, a["logprob"], a["ref_logprob"], given, estimator="k2").d_logprob

    with pytest.raises(ValueError, match=r"^mask: has a tangent, and kl_backward has no derivative in it"):
        torch.func.jvp(back, (mask,), (mask,))
    with pytest.raises(ValueError, match=r"^mask: requires a gradient, and kl_backward gives none"):
        back(mask.clone().requires_grad_())


def test_a_second_derivative_is_an_error() -> None:
    a = tensors(arrays(4, 21))
    x = a["logprob"].clone().requires_grad_()
    (first,) = torch.autograd.grad(call(a, x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()


def test_compiled_whole_it_has_the_eager_bits() -> None:
    a = tensors(arrays(4, 21))
    x = a["logprob"].clone().requires_grad_()
    got = torch.compile(lambda x: call(a, x * 1.0, a["weight"], clamp=0.5) * 1.0, fullgraph=True)(x)
    want = run(a, HOW["k3 weighted"])
    assert same(got.detach(), want[0])
    got.backward(a["advantage"])
    assert same(x.grad, want[1])


def test_the_operators_pass_torchs_own_check() -> None:
    a = tensors(arrays(4, 21))
    operands = (a["logprob"].requires_grad_(), a["ref_logprob"], a["weight"], a["mask"])
    how = (3, False, 2, math.inf, 0.5)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.rl_kernel_native.kl, (*operands, *how), test_utils=tests)
    arguments = (a["advantage"], *operands, *how, True, True)
    torch.library.opcheck(torch.ops.rl_kernel_native.kl_backward, arguments, test_utils=tests)


def test_functional_transformations_are_those_of_autograd() -> None:
    a = tensors(arrays(4, 21))
    want = run(a, HOW["k3 weighted"])
    x, w = a["logprob"], a["weight"]
    got = torch.func.grad(lambda x, w: (call(a, x, w, clamp=0.5) * a["advantage"]).sum(), (0, 1))(x, w)
    assert all_same(list(got), want[1:])
    value, along = torch.func.jvp(lambda x, w: call(a, x, w, clamp=0.5), (x, w), (a["advantage"], a["advantage"]))
    assert same(value, want[0])
    assert torch.equal(along, want[1] + want[2])
    stacked = torch.stack([x, 0.9 * x])
    for got_one, one in zip(torch.vmap(lambda x: call(a, x))(stacked), stacked, strict=True):
        assert same(got_one, call(a, one))


def test_fake_tensors_say_shapes_and_errors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.zeros(3, 5)
        assert rk.kl(x, x, estimator="k1").shape == (3, 5)
        with pytest.raises(ValueError, match=r"ref_logprob: expected shape \[3, 5\]"):
            rk.kl(x, torch.zeros(3, 4), estimator="k1")
        with pytest.raises(TypeError, match="old_logprob: expected dtype float32"):
            rk.kl(x, x, estimator="k1", old_logprob=x.half())


# ---- what is refused ------------------------------------------------------------------------------------------------

ROW = np.zeros((3, 8), np.float32)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"estimator": "k4"}, ValueError, 'estimator: expected "k1", "k2", "k3", "abs"'),
        ({"estimator": None}, ValueError, "estimator: expected"),
        ({"clamp": 0.0}, ValueError, "clamp: expected a finite number > 0 or None"),
        ({"clamp": "10"}, TypeError, "clamp: expected a number"),
        ({"input_clamp": math.nan}, ValueError, "input_clamp: expected a finite number > 0"),
        ({"straight_through": True, "old_logprob": ROW}, ValueError, "two different corrections"),
        (
            {"importance_weight": ROW, "old_logprob": ROW},
            ValueError,
            "importance_weight: expected None .*, got ndarray",
        ),
        ({"estimator": ["k1"]}, ValueError, r"estimator: expected .*, got \['k1'\]"),
        ({"straight_through": "False"}, TypeError, "straight_through: expected a bool, got str"),
        ({"logprob": ROW.astype(np.float64)}, TypeError, "logprob: expected dtype float32, got float64"),
        (
            {"logprob": ROW[None]},
            ValueError,
            r"logprob: expected shape \[num_sequences, num_tokens\] or",
        ),
        ({"logprob": ROW.T}, ValueError, "logprob: expected a contiguous last dimension"),
        ({"ref_logprob": ROW[:, :7]}, ValueError, r"ref_logprob: expected shape \[3, 8\]"),
        ({"ref_logprob": None}, TypeError, "ref_logprob: expected an array"),
        ({"old_logprob": ROW[0]}, ValueError, r"old_logprob: expected shape \[3, 8\]"),
        ({"importance_weight": ROW[:2]}, ValueError, r"importance_weight: expected shape \[3, 8\]"),
        ({"mask": ROW.astype(np.complex64)}, TypeError, "mask: expected dtype bool"),
        ({"mask": np.ones((3, 9), bool)}, ValueError, r"mask: expected shape \[3, 8\]"),
    ],
)
def test_a_call_says_what_is_wrong(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"logprob": ROW, "ref_logprob": ROW, "estimator": "k3"} | changed
    with pytest.raises(error, match=message):
        rk.kl(**arguments)
    with pytest.raises(error, match=message):
        rk.kl_backward(ROW, **arguments)


def test_a_gradient_is_like_the_result() -> None:
    with pytest.raises(ValueError, match=r"d_kl: expected shape \[3, 8\]"):
        rk.kl_backward(ROW[0], ROW, ROW, estimator="k1")
    with pytest.raises(TypeError, match="d_kl: expected an array, got NoneType"):
        rk.kl_backward(None, ROW, ROW, estimator="k1")


@pytest.mark.gpu
@pytest.mark.parametrize("name", HOW)
def test_a_gpu_has_the_bits_of_the_cpu(name: str) -> None:
    how = HOW[name]
    for rows, columns in ((1, 1), (5, 37), (300, 64), (33, 2048), (3, 20000)):
        a = tensors(arrays(rows, columns, seed=11))
        b = {k: x.cuda() for k, x in a.items()}
        want = run(a, how)
        assert all_same([x.cpu() for x in run(b, how)], want)
        strided = {k: torch.cat([x, x[:, :3]], 1)[:, :columns] for k, x in b.items()}
        assert all_same([x.cpu() for x in run(strided, how)], want)
