"""Refuses derivatives that an operator would lose."""

from __future__ import annotations

from typing import Any

from . import _dispatch


def refuse_gradients(cure: str, **arrays: Any) -> None:
    """Raises an error for an array whose gradient would be lost. ``cure`` is the end of the error's text; ``{name}`` in
    it stands for the array's name."""
    tensors = {name: x for name, x in arrays.items() if _dispatch.is_tensor(x)}
    if not tensors:
        return
    from ._torch import lost_derivative

    for name, x in tensors.items():
        what = lost_derivative(x)
        if what is not None:
            raise ValueError(f"{name}: {what}, and {cure.format(name=name)}")
