"""policy_loss in torch: autograd, torch.compile, torch.func, FakeTensor, saved state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import rl_kernel_native as rk
from policy_loss_cases import arrays

SPEC = rk.PolicySpec(kl="k3", kl_coef=0.1, entropy_coef=0.02, importance="token")


def batch(rows: int = 4, columns: int = 21, seed: int = 0) -> dict[str, torch.Tensor]:
    return {k: torch.from_numpy(x) for k, x in arrays(rows, columns, seed).items()}


def loss_of(x: torch.Tensor, h: torch.Tensor, a: dict[str, torch.Tensor], spec: rk.PolicySpec = SPEC) -> Any:
    return rk.policy_loss(
        x, a["old_logprob"], a["advantage"], a["mask"], spec=spec, ref_logprob=a["ref_logprob"],
        rollout_logprob=a["rollout_logprob"], entropy=h,
    )  # fmt: skip


def gradients(a: dict[str, torch.Tensor], factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    result = rk.policy_loss_and_grad(
        a["logprob"], a["old_logprob"], a["advantage"], a["mask"], spec=SPEC, ref_logprob=a["ref_logprob"],
        rollout_logprob=a["rollout_logprob"], entropy=a["entropy"],
    )  # fmt: skip
    return result.d_logprob * factor, result.d_entropy * factor


def leaves(a: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return a["logprob"].clone().requires_grad_(), a["entropy"].clone().requires_grad_()


def equal(a: Any, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("factor", [1.0, -0.5])
def test_backward_multiplies_by_the_incoming_gradient(factor: float) -> None:
    a = batch()
    x, h = leaves(a)
    (loss_of(x, h, a).loss * factor).backward()
    want = gradients(a, factor)
    assert equal(x.grad, want[0])
    assert equal(h.grad, want[1])


def test_a_retained_graph_gives_the_gradients_again() -> None:
    a = batch()
    x, h = leaves(a)
    loss = loss_of(x, h, a).loss
    loss.backward(retain_graph=True)
    assert x.grad is not None
    x.grad.mul_(7)  # a caller may change a gradient that it received
    x.grad = None
    (2 * loss).backward()
    assert equal(x.grad, gradients(a, 2.0)[0])


def test_a_gradient_of_one_operand_alone() -> None:
    a = batch()
    x, h = leaves(a)
    loss_of(x, h.detach(), a).loss.backward()
    assert equal(x.grad, gradients(a)[0])
    loss_of(x.detach(), h, a).loss.backward()
    assert equal(h.grad, gradients(a)[1])


def test_through_a_model_the_chain_rule_holds() -> None:
    a = batch()
    w = torch.tensor(0.3, requires_grad=True)
    loss_of(a["logprob"] * w, a["entropy"], a).loss.backward()
    step = 1e-3
    with torch.no_grad():
        up = loss_of(a["logprob"] * (w + step), a["entropy"], a).loss.item()
        down = loss_of(a["logprob"] * (w - step), a["entropy"], a).loss.item()
    assert w.grad is not None
    assert w.grad.item() == pytest.approx((up - down) / (2 * step), rel=2e-2)


def test_without_gradients_nothing_is_kept() -> None:
    a = batch()
    with torch.no_grad():
        assert not loss_of(*leaves(a), a).loss.requires_grad
    assert not loss_of(a["logprob"], a["entropy"], a).metrics.vector.requires_grad


def test_constants_that_want_a_gradient_are_refused() -> None:
    a = batch()
    for name in ("old_logprob", "advantage", "ref_logprob", "rollout_logprob"):
        with pytest.raises(ValueError, match=f"{name}: requires a gradient"):
            loss_of(*leaves(a), {**a, name: a[name].clone().requires_grad_()})
    with pytest.raises(ValueError, match=r"^importance_weight: requires a gradient"):
        rk.policy_loss(
            a["logprob"], None, a["advantage"], a["mask"], spec=rk.PolicySpec(importance="given"),
            importance_weight=a["weight"].clone().requires_grad_(),
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"^entropy: requires a gradient"):
        rk.policy_loss_and_grad(
            a["logprob"], None, a["advantage"], a["mask"], spec=rk.PolicySpec(), entropy=leaves(a)[1]
        )
    with pytest.raises(ValueError, match="logprob: requires a gradient"):
        rk.policy_loss_and_grad(leaves(a)[0], None, a["advantage"], a["mask"], spec=rk.PolicySpec())


@pytest.mark.parametrize(
    "name",
    ["old_logprob", "advantage", "mask", "ref_logprob", "rollout_logprob", "importance_weight", "selected",
     "denominator"],
)  # fmt: skip
def test_constants_that_have_a_tangent_are_refused(name: str) -> None:
    """Without the refusal, their part of the derivative would silently be zero."""
    a = batch()
    importance = "given" if name == "importance_weight" else "token"
    spec = rk.PolicySpec(kl="k3", kl_coef=0.1, importance=importance, drop_selected=True)
    options = {
        "ref_logprob": a["ref_logprob"], "selected": a["selected"], "denominator": torch.tensor(7.0),
        "importance_weight" if importance == "given" else "rollout_logprob": a["rollout_logprob"],
    }  # fmt: skip
    operands = {k: a[k] for k in ("logprob", "old_logprob", "advantage", "mask")} | options
    operands["mask"] = operands["mask"].float()

    def loss(x: torch.Tensor, detached: bool = False) -> torch.Tensor:
        changed = {name: x.detach() if detached else x}
        return rk.policy_loss(**(operands | changed), spec=spec).loss

    x = operands[name]

    def along(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(loss, (x,), (torch.ones_like(x),))[1]

    with pytest.raises(ValueError, match=f"^{name}: has a tangent, and policy_loss has no derivative in it"):
        along(x)
    with pytest.raises(Exception, match=f"{name}: has a tangent"):  # Dynamo raises its own error in a traced call
        torch.compile(along, fullgraph=True, backend="eager")(x)
    with forward_ad.dual_level(), pytest.raises(ValueError, match=f"^{name}: has a tangent"):
        loss(forward_ad.make_dual(x, torch.ones_like(x)))
    assert torch.func.jvp(lambda x: loss(x, True), (x,), (torch.ones_like(x),))[1] == 0


def test_a_second_derivative_is_an_error() -> None:
    a = batch()
    x, h = leaves(a)
    (first,) = torch.autograd.grad(loss_of(x, h, a).loss, x, create_graph=True)
    assert equal(first.detach(), gradients(a)[0])
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()


def test_an_operand_changed_in_place_is_refused() -> None:
    a = batch()
    x, h = leaves(a)
    loss = loss_of(x, h, a).loss
    loss.backward(retain_graph=True)
    a["old_logprob"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiled_whole_it_has_the_eager_bits() -> None:
    a = batch()

    def step(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = loss_of(x * 1.0, h, a)
        return result.loss * 0.5, result.metrics.vector

    x, h = leaves(a)
    loss, vector = torch.compile(step, fullgraph=True)(x, h)
    loss.backward()
    eager = loss_of(a["logprob"], a["entropy"], a)
    assert equal(vector, eager.metrics.vector)
    want = gradients(a, 0.5)
    assert equal(x.grad, want[0])
    assert equal(h.grad, want[1])


@pytest.mark.parametrize("numbers", [(3, 4, 5, 7), (3.0, 4.5, 5.0), (3, 4.5)], ids=str)
def test_compiled_whole_a_denominator_may_change(numbers: tuple[float, ...]) -> None:
    a = batch()

    def loss(number: float) -> torch.Tensor:
        return rk.policy_loss(
            a["logprob"], a["old_logprob"], a["advantage"], a["mask"], spec=rk.PolicySpec(), denominator=number
        ).loss

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    for number in numbers:  # for Dynamo the second number is a symbol
        assert equal(compiled(number), loss(number))


def test_compiled_whole_a_tensor_may_be_two_operands() -> None:
    a = batch()
    spec = rk.PolicySpec(kl="k3", kl_coef=0.1, entropy_coef=0.02)

    def loss(x: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return rk.policy_loss(x, old, a["advantage"], a["mask"], spec=spec, ref_logprob=old, entropy=x).loss

    x, want = leaves(a)[0], leaves(a)[0]
    loss(want, a["old_logprob"]).backward()
    torch.compiler.reset()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(x, a["old_logprob"]).backward()
    assert equal(x.grad, want.grad)


def test_the_operator_passes_torchs_own_check() -> None:
    a = batch()
    x, h = leaves(a)
    arguments = (x, h, a["old_logprob"], a["advantage"], a["mask"], None, a["ref_logprob"], a["rollout_logprob"], None,
                 None, None, list(SPEC.numbers), 0.0)  # fmt: skip
    for ratio_metrics in (False, True):
        torch.library.opcheck(
            torch.ops.rl_kernel_native.policy_loss,
            (*arguments, ratio_metrics),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_functional_gradients_are_those_of_autograd() -> None:
    a = batch()
    want = gradients(a)
    got = torch.func.grad(lambda x: loss_of(x, a["entropy"], a).loss)(a["logprob"])
    assert equal(got, want[0])
    tangent = torch.randn_like(a["logprob"])
    loss, along = torch.func.jvp(lambda x: loss_of(x, a["entropy"], a).loss, (a["logprob"],), (tangent,))
    assert along.item() == pytest.approx((want[0] * tangent).sum().item(), rel=1e-4)
    assert equal(loss, loss_of(a["logprob"], a["entropy"], a).loss)


def test_a_batch_of_losses_by_vmap() -> None:
    a = batch()
    stacked = torch.stack([a["logprob"], a["logprob"] * 0.9])

    def one(x: torch.Tensor) -> torch.Tensor:
        return loss_of(x, a["entropy"], a).loss

    got, d = torch.vmap(one)(stacked), torch.vmap(torch.func.grad(one))(stacked)
    for i, x in enumerate(stacked):
        assert equal(got[i], one(x))
        assert equal(d[i], gradients({**a, "logprob": x})[0])


def test_fake_tensors_say_shapes_and_errors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, mask = torch.zeros(3, 5), torch.ones(3, 5, dtype=torch.bool)
        result = rk.policy_loss(x, x, torch.zeros(3), mask, spec=rk.PolicySpec())
        assert result.loss.shape == ()
        assert result.metrics.vector.shape == (len(rk.PolicyMetrics.names),)
        with pytest.raises(ValueError, match=r"advantage: expected shape \[3, 5\] or \[3\]"):
            rk.policy_loss(x, x, torch.zeros(4), mask, spec=rk.PolicySpec())
        cuts = torch.zeros(6, dtype=torch.int32)
        rk.policy_loss(x[0], None, x[0, :, None], mask[0], spec=rk.PolicySpec(), cu_seqlens=cuts)
        with pytest.raises(ValueError, match=r"advantage: expected shape \[5\] or \[5, 1\]"):
            rk.policy_loss(x[0], None, torch.zeros(4), mask[0], spec=rk.PolicySpec(), cu_seqlens=cuts)
        with pytest.raises(TypeError, match="old_logprob: expected dtype float32"):
            rk.policy_loss(x, x.half(), torch.zeros(3), mask, spec=rk.PolicySpec())


def test_gmpo_has_no_gradient_where_the_advantage_is_zero() -> None:
    """As in verl and TRL, the clip depends on the advantage's sign."""
    logprob = torch.full((1, 2), 0.1, requires_grad=True)
    spec = rk.PolicySpec(clip="gmpo", level="geometric", aggregation="seq-mean-token-mean")
    loss = rk.policy_loss(logprob, torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), torch.ones(1, 2), spec=spec).loss
    gradient = torch.autograd.grad(loss, logprob)[0]
    assert gradient[0, 0] == loss / 2
    assert gradient[0, 1] == 0
