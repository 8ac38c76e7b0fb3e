"""torch.set_default_device and torch.set_default_dtype choose what a user's own constructors make. Every array that an
operator makes lies beside its operands and has the dtype of its contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import rl_kernel_native as rk  # noqa: E402
from call_arrays import mapped  # noqa: E402
from call_cases import CALLS, OPERATORS, Draw, Operand  # noqa: E402
from cases import differing  # noqa: E402
from engine_cases import CASES, Case  # noqa: E402
from fuzz_calls import _parts  # noqa: E402

DRAWS = 60  # enough for every branch of an operator's Python: policy_loss's mean by weights comes in 1 of 20 draws
WITHOUT_SECOND = ("linear_logprob", "preference_loss", "policy_loss", "value_loss", "kl")
WITHOUT_TANGENTS = ("linear_logprob", "preference_loss")


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")  # an array made there has no numbers, so any use of it shows
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS: dict[str, Callable[[], Any]] = {"device": default_device, "dtype": default_dtype}


def tensor(o: Operand) -> Any:
    return torch.from_numpy(np.ascontiguousarray(o.values)).to(getattr(torch, o.dtype))


def outcome(operator: str, drawn: dict[str, Any], gradients: bool) -> tuple[list[Any], str]:
    """Results and gradients, or the words of an error."""
    given = {k: mapped(v, tensor) for k, v in drawn.items()}
    leaves = [
        t.requires_grad_()
        for k, t in given.items()
        if gradients and isinstance(t, torch.Tensor) and t.is_floating_point() and not drawn[k].written
    ]  # fmt: skip
    try:
        parts = [p for p in _parts(getattr(rk, operator)(**given)) if isinstance(p, torch.Tensor)]
        if ends := [p for p in parts if p.requires_grad]:
            torch.autograd.backward([p.sum() for p in ends])
    except (TypeError, ValueError, RuntimeError) as error:
        return [], str(error)
    return [*parts, *(leaf.grad for leaf in leaves if leaf.grad is not None)], ""


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("operator", sorted(set(OPERATORS) & set(CALLS)))
def test_no_call_depends_on_a_default(operator: str, default: str) -> None:
    for seed in range(DRAWS):
        drawn = CALLS[operator](Draw(np.random.default_rng(seed)))
        for gradients in (False, True):
            want, refusal = outcome(operator, drawn, gradients)
            assert gradients or not refusal or "main_grad" in refusal, refusal
            with DEFAULTS[default]():
                got, words = outcome(operator, drawn, gradients)
            assert words == refusal, seed
            assert [(g.device, g.dtype) for g in got] == [(w.device, w.dtype) for w in want]
            assert not differing(tuple(got), tuple(want)), seed


def second(case: Case) -> tuple[Any, ...]:
    leaves = case.fresh()
    dys = [g.clone().requires_grad_() for g in case.gradients.values()]
    first = torch.autograd.grad(case.outputs(leaves), leaves, dys, create_graph=True)
    found = torch.autograd.grad([g.float().square().sum() for g in first], [*leaves, *dys], allow_unused=True)
    return (*first, *(g for g in found if g is not None))


def tangents(case: Case) -> tuple[Any, ...]:
    found = torch.func.jvp(lambda *leaves: case.outputs(leaves), case.leaves, tuple(x * 0.5 for x in case.leaves))
    return (*found[0], *found[1])


def batched(case: Case) -> tuple[Any, ...]:
    def gradients(*leaves: Any) -> tuple[Any, ...]:
        outputs, pull = torch.func.vjp(lambda *x: case.outputs(x), *leaves)
        return (*outputs, *pull(tuple(case.gradients.values())))

    return torch.func.vmap(gradients)(*(torch.stack((x, x * 2)) for x in case.leaves))


DERIVATIVES = {
    "second": (second, WITHOUT_SECOND), "tangents": (tangents, WITHOUT_TANGENTS), "batched": (batched, ())
}  # fmt: skip


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize(
    ("name", "way"), [(n, w) for n in CASES for w, (_, without) in DERIVATIVES.items() if n not in without]
)
def test_no_derivative_depends_on_a_default(name: str, way: str, default: str, rng: np.random.Generator) -> None:
    case = CASES[name](rng, "cpu", "float32")
    want = DERIVATIVES[way][0](case)
    with DEFAULTS[default]():
        got = DERIVATIVES[way][0](case)
    assert [(g.device, g.dtype) for g in got] == [(w.device, w.dtype) for w in want]
    assert not differing(got, want)
