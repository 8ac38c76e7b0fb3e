"""The array that a backward adds to shares no element with its inputs. An operand that overlaps main_grad is refused on
either side; an adjacent operand is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch")

SHAPES = {
    "linear_weight_grad": {"dy": (3, 8), "x": (3, 32), "main_grad": (8, 32)},
    "rms_norm_backward": {"dy": (3, 32), "h": (3, 32), "weight": (32,), "main_grad": (32,)},
    "embedding_backward": {"dy": (3, 32), "main_grad": (8, 32)},
    "linear": {"x": (3, 32), "weight": (8, 32), "main_grad": (8, 32)},
    "rms_norm": {"x": (3, 32), "weight": (32,), "main_grad": (32,)},
}
CALLS: dict[str, Callable[..., Any]] = {
    "linear_weight_grad": lambda dy, x, main_grad: rk.linear_weight_grad(dy, x, main_grad=main_grad),
    "rms_norm_backward": lambda dy, h, weight, main_grad: rk.rms_norm_backward(
        dy, h, weight, 1e-6, main_grad=main_grad
    ),
    "embedding_backward": lambda dy, main_grad: rk.embedding_backward(
        dy, torch.tensor([0, 3, 3]), 8, main_grad=main_grad
    ),
    "linear": lambda x, weight, main_grad: rk.linear(x, weight.requires_grad_(), main_grad=main_grad),
    "rms_norm": lambda x, weight, main_grad: rk.rms_norm(x, weight.requires_grad_(), 1e-6, main_grad=main_grad),
}
CASES = [(call, name) for call, shapes in SHAPES.items() for name in shapes if name != "main_grad"]


def placed(call: str, name: str, first: str, shared: int) -> dict[str, Any]:
    """The operands; ``name`` and main_grad lie in one memory and share ``shared`` elements."""
    operands = {n: torch.ones(shape) for n, shape in SHAPES[call].items() if n not in (name, "main_grad")}
    second = "main_grad" if first == name else name
    sizes = {n: torch.Size(SHAPES[call][n]).numel() for n in (first, second)}
    memory = torch.zeros(sum(sizes.values()) - shared)
    operands[first] = memory[: sizes[first]].view(SHAPES[call][first])
    operands[second] = memory[sizes[first] - shared :].view(SHAPES[call][second])
    return operands


@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize(("call", "name"), CASES)
def test_an_operand_that_overlaps_main_grad_is_refused(call: str, name: str, before: bool) -> None:
    first = name if before else "main_grad"
    with pytest.raises(ValueError, match=f"main_grad: may share memory with {name}: their addresses overlap"):
        CALLS[call](**placed(call, name, first, shared=1))
    CALLS[call](**placed(call, name, first, shared=0))
