"""Registered operators, as compiled graphs call them: plain tensors skip torch's dispatcher, and everything that the
dispatcher is for still reaches it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import rl_kernel_native as rk

rk.silu_mul(torch.zeros(2, 4))  # registers the operators
GATED = torch.ops.rl_kernel_native.gated_mul.default
LINEAR = torch.ops.rl_kernel_native.linear.default
NORM = torch.ops.rl_kernel_native.rms_norm.default


class Weight(torch.nn.Parameter):
    """As vLLM's parameters: the subclass overrides __torch_function__ and nothing below it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Seen(torch.nn.Parameter):
    """A parameter that must see the operators that it meets."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"saw {func}")


def gated(x: Tensor) -> Any:
    return GATED(x, None, 0, True)


def is_direct(call: Callable[[], Any]) -> bool:
    """Whether the kernel ran without the dispatcher, which calls the engine's `kernel`."""
    names: list[str] = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name))
    try:
        call()
    finally:
        sys.setprofile(None)
    assert "native" in names
    return "kernel" not in names and "derived" not in names


def test_a_call_with_plain_tensors_skips_the_dispatcher() -> None:
    x, weight = torch.randn(2, 4), torch.randn(4, 4)
    assert is_direct(lambda: gated(x))
    assert is_direct(lambda: LINEAR(x, weight, None, 1, torch.float32, True, -1))
    assert is_direct(lambda: LINEAR(x, Weight(weight, requires_grad=False), None, 1, None, True, -1))
    with torch.no_grad():
        assert is_direct(lambda: gated(x.requires_grad_()))
    with torch.inference_mode():
        assert is_direct(lambda: gated(torch.randn(2, 4)))


@pytest.mark.parametrize("residual", [None, torch.ones(2, 4)])
def test_both_ways_have_the_same_results(residual: Any) -> None:
    """An output that is not asked for is empty, as the schema has no None."""
    x, weight = torch.randn(2, 4), torch.randn(4)
    arguments = (x, weight, residual, 1e-6, 0.0, True)
    found = NORM(*arguments)
    with torch.profiler.profile():
        want = NORM(*arguments)
    assert [(o.shape, o.dtype) for o in found] == [(o.shape, o.dtype) for o in want]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_modes_and_the_profiler_see_the_operator() -> None:
    seen: list[str] = []

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"dispatch {func}")
            return func(*args, **(kwargs or {}))

    class Called(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"function {func}")
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, 4)
    with Dispatched():
        gated(x)
    with Called():
        gated(x)
    assert seen == ["dispatch rl_kernel_native.gated_mul.default", "function rl_kernel_native.gated_mul.default"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gated(x)
    assert "rl_kernel_native::gated_mul" in {event.key for event in profile.key_averages()}


def test_derivatives_and_transforms_reach_the_dispatcher() -> None:
    x = torch.randn(2, 4)
    leaf = x.clone().requires_grad_()
    gated(leaf).sum().backward()
    assert leaf.grad is not None
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(gated(forward_ad.make_dual(x, torch.ones_like(x)))).tangent is not None
    assert torch.equal(torch.vmap(rk.silu_mul)(x[None])[0], rk.silu_mul(x))


def test_tensors_without_their_numbers_in_memory_reach_the_dispatcher() -> None:
    x = torch.randn(2, 4)
    assert torch.equal(gated(torch._neg_view(-x)), gated(x))
    assert gated(torch.empty(2, 4, device="meta")).is_meta
    assert gated(torch.empty(0, 4)).shape == (0, 2)
    with pytest.raises(NotImplementedError, match=r"saw rl_kernel_native\.gated_mul\.default"):
        gated(Seen(x, requires_grad=False))
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode() as mode:
        assert type(gated(mode.from_tensor(x))) is FakeTensor
    assert type(gated(mode.from_tensor(x))) is FakeTensor


def test_errors_are_the_extensions() -> None:
    with pytest.raises(ValueError, match="gate_up: expected an even"):
        gated(torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="missing value for argument 'activation'"):
        GATED(torch.zeros(2, 4), None)


class Subclass(torch.Tensor):
    pass


OF_FRAMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear_logprob_partial": (("hidden", "weight_shard", "target"), {"vocab_start": 0, "vocab_size": 9}),
    "logprob_partial": (("logits",), {"vocab_start": 0, "vocab_size": 9}),
    "logprob_backward": (("logits",), {"dlogprob": torch.ones(4)}),
    "linear_weight_grad": (("dy", "x"), {"out": torch.zeros(9, 16)}),
}


@pytest.mark.parametrize("operator", OF_FRAMES)
def test_a_call_without_a_dispatcher_names_the_tensor_that_it_cannot_read(operator: str) -> None:
    """Earlier, the error named the first argument even if another argument was at fault."""
    logits, hidden, ids = torch.ones(4, 9), torch.ones(4, 16), torch.zeros(4, dtype=torch.int64)
    arrays = {
        "linear_logprob_partial": [hidden, torch.ones(9, 16), ids], "logprob_partial": [logits, ids],
        "logprob_backward": [logits, ids, torch.ones(4)], "linear_weight_grad": [logits, hidden],
    }[operator]  # fmt: skip
    names, how = OF_FRAMES[operator]
    for i, name in enumerate(names):
        given = list(arrays)
        given[i] = torch._neg_view(-given[i])
        with pytest.raises(ValueError, match=f"^{name}: has torch's negative bit; call .resolve_neg"):
            getattr(rk, operator)(*given, **how)
        given[i] = arrays[i].as_subclass(Subclass)
        words = (
            "out: cannot be given" if "out" in how else f"{name}: expected a plain torch.Tensor in eager mode, got S"
        )
        with pytest.raises((TypeError, ValueError), match=f"^{words}"):
            getattr(rk, operator)(*given, **how)


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("logprob_partial", "temperature"), ("linear_logprob_partial", "temperature"),
        ("linear_logprob_partial", "loss_mask"), ("linear_logprob", "loss_mask"), ("linear_logprob_pair", "loss_mask"),
        ("linear_cross_entropy", "loss_mask"),
    ],
)  # fmt: skip
def test_a_gradient_that_would_be_lost_is_refused(operator: str, name: str) -> None:
    """As logprob refuses one in its temperature, and sequence_logprob one in its mask."""
    hidden, weight, ids, shard = torch.ones(4, 16), torch.ones(9, 16), torch.zeros(4, dtype=torch.int64), {}
    if operator.endswith("_partial"):
        shard = {"vocab_start": 0, "vocab_size": 9}
    heads = {"logprob_partial": [torch.ones(4, 9)], "linear_logprob_pair": [hidden, weight] * 2}
    arrays = [*heads.get(operator, [hidden, weight]), ids]
    given = torch.ones(4)
    assert getattr(rk, operator)(*arrays, **shard, **{name: given}) is not None
    with pytest.raises(ValueError, match=rf"^{name}: requires a gradient, and .* none; pass {name}.detach\(\)"):
        getattr(rk, operator)(*arrays, **shard, **{name: given.clone().requires_grad_()})
    words = f"^{name}: has a tangent, and " if name == "loss_mask" else "expected a plain torch.Tensor in eager mode"
    with pytest.raises((TypeError, ValueError), match=words):
        torch.func.jvp(lambda x: getattr(rk, operator)(*arrays, **shard, **{name: x}), (given,), (given,))


LSE = torch.zeros(4)
OWN = {"logits": torch.ones(4, 9), "target": torch.zeros(4, dtype=torch.int64)}
# Operators without autograd, with the arguments of a call: each float array may require a gradient, which the call
# would drop without a word.
WITHOUT_AUTOGRAD: dict[str, dict[str, Any]] = {
    "logprob_backward": {
        **OWN, "lse": LSE, "entropy": LSE, "dlogprob": LSE, "dlse": LSE, "dentropy": LSE, "temperature": LSE + 1,
    },
    "logprob_merge": {"stats": torch.zeros(1, 4, 5), "temperature": LSE + 1},
    "logprob": {**OWN, "temperature": LSE + 1, "out": LSE.clone()},
}  # fmt: skip
LOST = [(op, name) for op, of in WITHOUT_AUTOGRAD.items() for name, x in of.items() if x.is_floating_point()]


@pytest.mark.parametrize(("operator", "name"), [case for case in LOST if case != ("logprob", "out")])
def test_every_argument_without_autograd_refuses_a_gradient(operator: str, name: str) -> None:
    given = WITHOUT_AUTOGRAD[operator]
    leaf = given[name].clone().requires_grad_()
    assert getattr(rk, operator)(**given) is not None
    with torch.no_grad():
        assert getattr(rk, operator)(**given | {name: leaf}) is not None
    words = f"{name}: requires a gradient, and {operator} gives none; .*detach"
    if (operator, name) == ("logprob", "logits"):
        words = "out: cannot be given where a gradient is wanted"
    with pytest.raises(ValueError, match=f"^{words}"):
        getattr(rk, operator)(**given | {name: leaf})
    words = r"expected a plain torch\.Tensor|out: cannot be given"
    with forward_ad.dual_level(), pytest.raises((TypeError, ValueError), match=words):
        getattr(rk, operator)(**given | {name: forward_ad.make_dual(given[name], torch.ones_like(given[name]))})
