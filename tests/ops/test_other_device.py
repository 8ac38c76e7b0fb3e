"""Operands on different devices give an error that says so, for every array of every operator. No GPU is needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import dlpack
import rl_kernel_native as rk
from call_cases import CALLS, OPERATORS, Draw, Operand

torch = pytest.importorskip("torch")

CUDA = 2  # DLPack's code for CUDA
DRAWS = 24  # enough draws for every operator to use all of its arrays
# Arrays that NumPy's own operators read, next to others of the same framework.
OF_NUMPY = {
    ("tool_mask", "mask"), ("linear_cross_entropy", "token_weight"), ("linear_cross_entropy", "denominator")
}  # fmt: skip


class There(dlpack.Exporter):
    """An array that claims to lie on a GPU."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array, device=CUDA)
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim


def mapped(value: Any, make: Callable[[Operand], Any]) -> Any:
    if isinstance(value, Operand):
        return make(value)
    return type(value)(mapped(v, make) for v in value) if type(value) in (tuple, list) else value


def calls(operator: str, make: Callable[[Operand], Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each array argument of the operator once, with the arguments of a valid call that uses it."""
    seen: set[str] = set()
    for seed in range(DRAWS):
        d = Draw(np.random.default_rng(seed))
        d.dtype = "float32"
        drawn = CALLS[operator](d)
        names = {k for k, v in drawn.items() if isinstance(v, Operand) and not v.written and v.values.size} - seen
        if not names or any(isinstance(v, Operand) and v.dtype == "bfloat16" for v in drawn.values()):
            continue
        optional = {
            k for k, v in inspect.signature(getattr(rk, operator)).parameters.items() if v.default is not v.empty
        }
        written = {k for k, v in drawn.items() if isinstance(v, Operand) and v.written}
        arguments = {k: mapped(v, make) for k, v in drawn.items() if k not in written & optional}
        seen |= names
        for name in sorted(names):
            yield name, arguments


@pytest.mark.parametrize("operator", sorted(set(OPERATORS) & set(CALLS)))
def test_an_array_of_another_device_is_refused_by_the_extension(operator: str) -> None:
    for name, arguments in calls(operator, lambda o: np.ascontiguousarray(o.values).astype(o.dtype)):
        if (operator, name) in OF_NUMPY:
            continue
        with pytest.raises((ValueError, TypeError, RuntimeError)) as refused:
            getattr(rk, operator)(**arguments | {name: There(arguments[name])})
        words = str(refused.value)
        # The first array decides the device, and this build has no kernels for it.
        expected = {
            ValueError: "expected device", RuntimeError: "kernels|CuPy",
            TypeError: "of the framework of|of a framework with|NumPy array",
        }[refused.type]  # fmt: skip
        assert any(word in words for word in expected.split("|")), f"{name}: {words}"


@pytest.mark.parametrize("operator", sorted(set(OPERATORS) & set(CALLS)))
def test_a_tensor_of_another_device_is_refused(operator: str) -> None:
    def tensor(o: Operand) -> Any:
        return torch.from_numpy(np.ascontiguousarray(o.values)).to(getattr(torch, o.dtype))

    for name, arguments in calls(operator, tensor):
        tensors = [v for v in arguments.values() if isinstance(v, torch.Tensor)]
        if len(tensors) < 2:
            continue  # this is a call on that device
        with pytest.raises((ValueError, TypeError), match=r"device|\bmeta\b|plain torch\.Tensor in eager mode"):
            getattr(rk, operator)(**arguments | {name: arguments[name].to("meta")})
