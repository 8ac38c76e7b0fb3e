"""token_weight of policy_loss and value_loss: each token's terms are multiplied by its weight, and means are over the
weights. The mask decides which tokens count. test_linear_logprob_loss.py tests the token_weight of
linear_cross_entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dlpack
import rl_kernel_native as rk
from cases import beyond
from policy_loss_cases import TORCH, arrays, assert_packed_has_the_bits_of_padded, keywords, same, specs, tensors

SPECS = {
    name: spec
    for name, spec in specs().items()
    if spec.clip != "gmpo" and spec.entropy_aggregation == "loss"
}  # fmt: skip
VALUE: dict[str, dict[str, Any]] = {
    f"{clip} {loss_type} {aggregation}": {"clip": clip, "loss_type": loss_type, "aggregation": aggregation}
    for clip in (None, 0.2)
    for loss_type in ("mse", "huber")
    for aggregation in ("token-mean", "seq-mean-token-mean", "token-sum")
}
NAMES = [*SPECS, *VALUE]


def run(a: dict[str, Any], name: str, **more: Any) -> tuple[Any, Any, Any]:
    """Loss, metrics and gradient."""
    how = {"token_weight": a["weight"], **more}
    if name in SPECS:
        rest = {**keywords(SPECS[name], a), **how}
        rest["denominator"] = more.get("denominator", rest.get("denominator"))
        found: Any = rk.policy_loss_and_grad(
            a["logprob"], a["old_logprob"], a["advantage"], a["mask"], spec=SPECS[name], **rest
        )
        return found.loss, found.metrics, found.d_logprob
    old = None if VALUE[name]["clip"] is None else a["old_logprob"]
    of = rk.value_loss_and_grad(a["logprob"], old, a["advantage"], a["mask"], **VALUE[name], **how)
    return of.loss, of.metrics, of.d_value


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_float64(name: str) -> None:
    a = tensors(arrays(6, 37))
    loss, metrics, gradient = run(a, name)
    x = a["logprob"].double().requires_grad_()
    if name in SPECS:
        more = {**keywords(SPECS[name], a), "token_weight": a["weight"]}
        reference = rk.policy_loss_reference(
            x, a["old_logprob"], a["advantage"], a["mask"], spec=SPECS[name], xp=TORCH, **more
        )
    else:
        old = None if VALUE[name]["clip"] is None else a["old_logprob"]
        how = {**VALUE[name], "token_weight": a["weight"], "xp": TORCH}
        reference = rk.value_loss_reference(x, old, a["advantage"], a["mask"], **how)
    want = torch.autograd.grad(reference["loss"], x)[0]
    size = max(1e-3, float(want.abs().sum()), abs(float(reference["loss"])))
    operator, output = ("policy_loss", "d_logprob") if name in SPECS else ("value_loss", "d_value")
    assert not beyond(operator, "loss", loss, float(reference["loss"]), scale=size)
    assert not beyond(operator, output, gradient, want, largest=float(want.abs().max()))
    assert float(metrics.num_tokens) == reference["num_tokens"], "a weight is no count"
    assert float(metrics.denominator) == pytest.approx(reference["denominator"], rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_one_change_no_bit_of_a_gradient(name: str) -> None:
    a = arrays(5, 40, seed=3)
    one = run(a, name, token_weight=np.ones_like(a["weight"]))
    want = run(a, name, token_weight=None)
    assert np.array_equal(one[2], want[2])  # a zero of policy_loss may have a sign
    assert np.array_equal(one[0], want[0])
    assert np.array_equal(one[1].vector, want[1].vector)


@pytest.mark.parametrize("name", SPECS)
def test_packed_has_the_bits_of_padded(name: str) -> None:
    def of_spec(a: dict[str, np.ndarray], **more: Any) -> Any:
        return rk.policy_loss_and_grad(
            a["logprob"], a["old_logprob"], a["advantage"], a["mask"], spec=SPECS[name], token_weight=a["weight"],
            **{**keywords(SPECS[name], a), **more},
        )  # fmt: skip

    assert_packed_has_the_bits_of_padded(of_spec, arrays(5, 300, seed=1), "d_logprob")


@pytest.mark.parametrize("name", NAMES)
def test_layout_framework_and_masked_slots_decide_no_bit(name: str) -> None:
    a = arrays(4, 65, seed=2)
    want = run(a, name)
    wild = {**a, "weight": np.where(a["mask"], a["weight"], np.float32(np.nan))}
    wide = torch.full((4, 80), torch.nan)
    wide[:, :65] = torch.from_numpy(a["weight"])
    apart = {**tensors(a), "weight": wide[:, :65]}
    for got in (run(wild, name), run(tensors(a), name), run(apart, name)):
        assert same(np.asarray(got[0]), want[0])
        assert same(np.asarray(got[1].vector), want[1].vector)
        assert same(np.asarray(got[2]), want[2])


@pytest.mark.parametrize(
    "name", ["aggregation token-mean", "seq mean", "None mse token-mean", "0.2 mse seq-mean-token-mean"]
)
def test_sums_of_weights_that_are_no_divisor(name: str) -> None:
    """A sum of 0 gives 0; a negative, subnormal, infinite or NaN sum gives NaN, as a denominator on the device does."""
    spec = rk.PolicySpec(aggregation="seq-mean-token-mean" if name == "seq mean" else "token-mean")
    x = torch.tensor([[-1.0, -0.5]], requires_grad=True)

    def loss(weight: list[float]) -> Any:
        u = torch.tensor([weight])
        if name in VALUE:
            old = None if VALUE[name]["clip"] is None else x.detach()
            return rk.value_loss(x, old, torch.zeros_like(x), token_weight=u, **VALUE[name]).loss
        ones = torch.ones_like(x)
        return rk.policy_loss(x, None, ones[:, 0], ones, spec=spec, token_weight=u).loss

    nothing = loss([0.0, 0.0])
    nothing.backward()
    assert nothing.item() == 0
    assert not x.grad.any()
    for wrong in ([-1.0, 0.5], [1e-40, 0.0], [1e-45, 1e-45], [torch.inf, 1.0], [torch.nan, 1.0]):
        assert loss(wrong).isnan()
    assert loss([0.25, 0.75]).isfinite()


ROWS, COLUMNS, CHOSEN = torch.eye(3, 4), torch.arange(20.0).view(5, 4) / 9, torch.tensor([4, 1, 2])
FILTERED = torch.tensor([0.0, -torch.inf, 0.0, 0.0, 0.0])  # the target of the second row


def of_head(u: Any, x: Any, **how: Any) -> Any:
    found = rk.linear_cross_entropy(x, COLUMNS, CHOSEN, token_weight=u, **how)
    return (found[0] if isinstance(found, tuple) else found).sum()


def of_policy(u: Any, x: Any, **how: Any) -> Any:
    logprob = torch.log_softmax(x @ COLUMNS.T + FILTERED, -1).gather(1, CHOSEN[:, None]).T
    spec = rk.PolicySpec(clip="none", **how)
    return rk.policy_loss(logprob, None, torch.ones(1), torch.ones(1, 3), spec=spec, token_weight=u[None]).loss


def of_value(u: Any, x: Any, **how: Any) -> Any:
    value = x.sum(1)[None] + FILTERED[:3]
    return rk.value_loss(value, None, torch.zeros(1, 3), clip=None, token_weight=u[None], **how).loss


INFINITE: dict[str, Any] = {
    **{f"head, {r}": lambda u, x, r=r: of_head(u, x, bias=FILTERED, reduction=r) for r in ("mean", "sum", "none")},
    "head, given divisor": lambda u, x: of_head(u, x, bias=FILTERED, denominator=2.0),
    "head, z-loss": lambda u, x: of_head(u, x, bias=FILTERED, z_loss=0.1, return_z_loss=True),
    "head, accuracy": lambda u, x: of_head(u, x, bias=FILTERED, return_token_accuracy=True),
    "head, packed": lambda u, x: of_head(u, x, bias=FILTERED, cu_seqlens=torch.tensor([0, 1, 3])),
    **{
        f"policy_loss, {a}": lambda u, x, a=a: of_policy(u, x, aggregation=a)
        for a in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    },
    **{f"value_loss, {a}": lambda u, x, a=a: of_value(u, x, aggregation=a) for a in ("token-mean", "token-sum")},
}


@pytest.mark.parametrize("name", INFINITE)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_of_0_takes_an_infinite_term_out(name: str, compiled: bool) -> None:
    """Zero times infinity is 0, as for a filtered token that a fractional mask leaves out."""
    call = torch.compile(INFINITE[name], backend="aot_eager", fullgraph=True) if compiled else INFINITE[name]
    x = ROWS.clone().requires_grad_()
    assert not call(torch.ones(3), x).isfinite(), "the term is infinite"
    loss = call(torch.tensor([0.5, 0.0, 1.0]), x)
    gradient = torch.autograd.grad(loss, x)[0]
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[1].any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_weight_of_0_takes_an_infinite_row_out_of_numpys_and_the_reference(reduction: str) -> None:
    given = [x.numpy() for x in (ROWS, COLUMNS, CHOSEN)]
    how: dict[str, Any] = {"bias": FILTERED.numpy(), "reduction": reduction, "token_weight": np.float32([0.5, 0, 1])}
    want = rk.linear_cross_entropy_reference(*given, **how)["loss"]
    assert np.isfinite(want).all()
    np.testing.assert_allclose(rk.linear_cross_entropy(*given, **how), want, rtol=1e-5)
    bad = [given[0].copy(), *given[1:]]
    bad[0][1] = np.nan
    assert np.isnan(rk.linear_cross_entropy(*bad, **how)).any(), "a NaN stays"


def test_a_weight_is_what_a_fraction_of_a_mask_is_not() -> None:
    logprob, advantage = torch.tensor([[-1.0, -2.0]]), torch.tensor([1.0])
    fractions = torch.tensor([[1.0, 0.5]])
    spec = rk.PolicySpec(clip="none")
    by_mask = rk.policy_loss(logprob, None, advantage, fractions, spec=spec).loss
    assert by_mask == 1.5, "(1 + 2) / 2: a mask counts"
    by_weight = rk.policy_loss(logprob, None, advantage, torch.ones(1, 2), spec=spec, token_weight=fractions).loss
    assert by_weight == pytest.approx(4 / 3), "(1 + 0.5 * 2) / 1.5"


def test_packed_tokens_behind_the_last_sequence_have_no_weight() -> None:
    x, u = -torch.rand(9), torch.rand(9)
    cu = torch.tensor([0, 3, 3, 7])
    spec = rk.PolicySpec(aggregation="seq-mean-token-mean")
    a = torch.ones(9)
    want = rk.policy_loss(x[:7], None, a[:7], a[:7], cu_seqlens=cu, spec=spec, token_weight=u[:7])
    assert torch.equal(rk.policy_loss(x, None, a, a, cu_seqlens=cu, spec=spec, token_weight=u).loss, want.loss)
    none = rk.policy_loss(x[:0], None, a[:0], a[:0], cu_seqlens=cu[:1], spec=spec, token_weight=u[:0])
    assert none.loss == 0


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_compiled_calls_have_the_same_bits(aggregation: str) -> None:
    spec = rk.PolicySpec(aggregation=aggregation)
    a = tensors(arrays(4, 20))

    def loss(x: Any) -> Any:
        return rk.policy_loss(x, a["old_logprob"], a["advantage"], a["mask"], spec=spec, token_weight=a["weight"]).loss

    torch.compiler.reset()
    assert torch.equal(torch.compile(loss, backend="aot_eager", fullgraph=True)(a["logprob"]), loss(a["logprob"]))


@pytest.mark.parametrize("operator", ["policy_loss", "value_loss"])
def test_bad_weights_are_named(operator: str) -> None:
    x, m = torch.zeros(2, 3), torch.ones(2, 3)

    def call(w: Any, spec: rk.PolicySpec | None = None) -> Any:
        if operator == "value_loss":
            return rk.value_loss(x, None, x, m, token_weight=w)
        return rk.policy_loss(x, x, x, m, spec=spec or rk.PolicySpec(), token_weight=w)

    for w, error, text in (
        (torch.ones(2, 2), ValueError, r"^token_weight: expected shape \[2, 3\]"),
        (m.double(), TypeError, r"^token_weight: expected dtype float32, got float64; pass token_weight\.float\(\)$"),
        (m.numpy(), TypeError, "^token_weight: expected an array of the framework of"),
        (0.5, TypeError, "^token_weight: expected an array of the framework of"),
        (m.clone().requires_grad_(), ValueError, r"^token_weight: has no gradient here; pass token_weight\.detach"),
        (torch.ones(3, 2).T, ValueError, "^token_weight: "),
    ):
        with pytest.raises(error, match=text):
            call(w)
    if operator == "policy_loss":
        of_gmpo = rk.PolicySpec(clip="gmpo", level="geometric", aggregation="seq-mean-token-mean")
        for spec, text in (
            (of_gmpo, 'token_weight: expected None with clip="gmpo"'),
            (rk.PolicySpec(entropy_aggregation="token-mean"), "token_weight: expected None with entropy_aggregation"),
        ):
            with pytest.raises(ValueError, match=text):
                call(m, spec)


@pytest.mark.parametrize("xp", [torch.tensor, np.asarray])
@pytest.mark.parametrize("wrong", ["cu_seqlens", "mask"])
def test_a_bad_layout_is_named_as_without_weights(xp: Any, wrong: str) -> None:
    """The loss sums the weights by a separate operator, whose messages must not name that operator's arguments."""
    value = xp(np.zeros((2, 3), np.float32))
    mask = xp(np.ones((2, 4 if wrong == "mask" else 3), bool))
    offsets = xp(np.array([0, 3], np.int32)) if wrong == "cu_seqlens" else None
    words = []
    for weight in (None, value + 1):
        with pytest.raises(ValueError, match=f"^({wrong}|value): ") as error:
            rk.value_loss(value, None, value, mask, cu_seqlens=offsets, token_weight=weight)
        words.append(str(error.value))
    assert words[0] == words[1]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("xp", [np, torch])
def test_cuts_of_another_framework_are_named(xp: Any, aggregation: str) -> None:
    """The sequence of each token is computed in the framework of the weights."""
    other: Any = torch if xp is np else np
    x, cuts = xp.ones(6, dtype=xp.float32), other.asarray([0, 2, 6])
    if xp is np and aggregation == "token-mean":  # only the extension reads the offsets
        assert rk.value_loss(x, None, x, cu_seqlens=cuts, clip=None, token_weight=x, aggregation=aggregation)
        return
    with pytest.raises(TypeError, match=r"^cu_seqlens: expected an array"):
        rk.value_loss(x, None, x, cu_seqlens=cuts, clip=None, token_weight=x, aggregation=aggregation)


class Bare(dlpack.Exporter):
    """An array whose framework has no functions."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array)
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim


P = -np.linspace(0.1, 1.0, 6, dtype=np.float32).reshape(2, 3)
HEAD = np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(3, 8)
# A loss of its first operand and its weights, and the name of this operand.
OF_WEIGHTS: dict[str, tuple[Any, np.ndarray, str]] = {
    "policy_loss": (
        lambda x, w: rk.policy_loss(x, P, P, P != 0, spec=rk.PolicySpec(), token_weight=w), P, "logprob",
    ),
    "value_loss": (lambda x, w: rk.value_loss(x, None, P, clip=None, token_weight=w), P, "value"),
    "linear_cross_entropy": (
        lambda x, w: rk.linear_cross_entropy(HEAD, HEAD, x, token_weight=w), np.arange(3), "target",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_WEIGHTS)
@pytest.mark.parametrize("weighs", [False, True])
def test_arrays_without_functions_of_their_framework_are_named(name: str, weighs: bool) -> None:
    call, x, operand = OF_WEIGHTS[name]
    weight = np.ones(x.shape, np.float32)
    call(x, weight)
    words = "expected an array of a framework with __array_namespace__, .* got Bare$"
    with pytest.raises(TypeError, match=f"^{'token_weight' if weighs else operand}: {words}"):
        call(*((x, Bare(weight)) if weighs else (Bare(x), weight)))


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_weights_of_a_symbolic_trace_are_refused_by_their_name(name: str) -> None:
    call, x, _ = OF_WEIGHTS[name]
    with pytest.raises(TypeError, match=r"^token_weight: torch.fx.symbolic_trace is not supported"):
        torch.fx.symbolic_trace(lambda weight: call(x, weight))
