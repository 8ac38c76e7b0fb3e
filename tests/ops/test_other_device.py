"""Operands on different devices give an error that says so, for every array of every operator. No GPU is needed."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import dlpack
import rl_kernel_native as rk
from call_arrays import by_array
from call_cases import CALLS, OPERATORS, Operand

torch = pytest.importorskip("torch")

CUDA = 2  # DLPack's code for CUDA
# Arrays that NumPy's own operators read, next to others of the same framework.
OF_NUMPY = {
    ("tool_mask", "mask"), ("linear_cross_entropy", "token_weight"), ("linear_cross_entropy", "denominator")
}  # fmt: skip

# For operators where the first argument alone does not decide: the arrays whose device all other arrays must have.
DECIDE = {
    "attention_backward": {"q"}, "embedding": {"weight"}, "gelu_mul_backward": {"gate"}, "kl_backward": {"logprob"},
    "linear_cross_entropy": {"hidden", "target"}, "linear_logprob": {"hidden", "target"},
    "linear_logprob_pair": {"hidden", "ref_hidden", "target"}, "linear_logprob_partial": {"hidden", "target"},
    "optimal_token_baseline": {"logprob"}, "random_bits": {"sample_id"}, "scatter_rewards": {"mask"},
    "silu_mul_backward": {"gate"},
}  # fmt: skip


class There(dlpack.Exporter):
    """An array that claims to lie on a GPU."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array, device=CUDA)
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim


@pytest.mark.parametrize("operator", sorted(set(OPERATORS) & set(CALLS)))
def test_an_array_of_another_device_is_refused_by_the_extension(operator: str) -> None:
    for name, arguments in by_array(operator, lambda o: np.ascontiguousarray(o.values).astype(o.dtype)):
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

    for name, arguments in by_array(operator, tensor):
        tensors = [v for v in arguments.values() if isinstance(v, torch.Tensor)]
        if len(tensors) < 2:
            continue  # this is a call on that device
        with pytest.raises(
            (ValueError, TypeError), match=r"device|\bmeta\b|plain torch\.Tensor in eager mode"
        ) as refused:
            getattr(rk, operator)(**arguments | {name: arguments[name].to("meta")})
        words = str(refused.value)
        decides = name in DECIDE.get(operator, {next(iter(inspect.signature(getattr(rk, operator)).parameters))})
        if ": expected device " in words and operator != "pack":  # pack is two operators
            assert words.endswith("expected device meta, got cpu" if decides else "expected device cpu, got meta")
            assert words.startswith(f"{name}: ") != decides, words
