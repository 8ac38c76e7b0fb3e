"""Rules for torch.func that operators share: rules for batches, and derivatives composed of torch's own operators.

Operator descriptions import this module without loading torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def batched(info: Any, in_dims: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Tensors with the batch dimension first, for operators that take any leading dimensions. None stays None."""
    moved: list[Any] = []
    for x, dim in zip(tensors, in_dims, strict=True):
        if x is None:
            moved.append(None)
        elif dim is None:
            moved.append(x.unsqueeze(0).expand(info.batch_size, *x.shape).contiguous())
        else:
            moved.append(x.movedim(dim, 0).contiguous())
    return moved


def rows(*places: int, alone: Callable[[Any], bool] = lambda inputs: False) -> Any:
    """A batch rule: in the arrays at ``places``, the batch becomes one more dimension of rows. If another input has a
    batch, or ``alone(inputs)`` is true, each element gets its own call."""

    def batch(info: Any, dims: Any, inputs: Any, apply: Any) -> Any:
        if alone(inputs) or any(type(d) is int and i not in places for i, d in enumerate(dims)):
            return None
        given = list(inputs)
        for i, x in zip(places, batched(info, [dims[i] for i in places], [inputs[i] for i in places]), strict=True):
            given[i] = x
        found = apply(*given)
        if not isinstance(found, tuple):
            return found, 0
        return found, tuple(0 if o.dim() and o.shape[0] == info.batch_size else None for o in found)

    return batch


def looped(apply: Callable[..., Any], info: Any, in_dims: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """Calls once for each element of the batch, and stacks the outputs, a tensor or a tuple of tensors."""
    import torch

    # For an argument that is a list of numbers, vmap gives a list of dimensions. Such an argument has no batch.
    in_dims = [d if type(d) is int else None for d in in_dims]

    def element(i: int) -> Any:
        return apply(*(x if d is None else x.select(d, i).contiguous() for x, d in zip(inputs, in_dims, strict=True)))

    if info.batch_size == 0:  # a call with zeros shows the shape of the result
        inputs = [
            x if d is None else x.new_zeros((*x.shape[:d], 1, *x.shape[d + 1 :]))
            for x, d in zip(inputs, in_dims, strict=True)
        ]
        one = element(0)
        return tuple(o[None][:0] for o in one) if isinstance(one, tuple) else one[None][:0]
    outputs = [element(i) for i in range(info.batch_size)]
    if isinstance(outputs[0], tuple):
        return tuple(torch.stack(o) for o in zip(*outputs, strict=True))
    return torch.stack(outputs)


def in_batches(apply: Callable[..., Any], batch: Any = None) -> Callable[..., Any]:
    """A Function's batch rule: the rule ``batch`` if the description has one, else one call per element."""

    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        found = None if batch is None else batch(info, in_dims, inputs, apply)
        if found is not None:
            return found
        outputs = looped(apply, info, in_dims, inputs)
        return outputs, (0,) * len(outputs) if isinstance(outputs, tuple) else 0

    return vmap


def refuse_tangents(operator: str, names: Sequence[str], tangents: Sequence[Any], words: str = "") -> None:
    """Refuses tangents of constants, because their part of the derivative would be lost."""
    words = words or f"has a tangent, and {operator} has no derivative in it"
    for name, tangent in zip(names, tangents, strict=True):
        if tangent is not None:
            raise ValueError(f"{name}: {words}; pass {name}.detach()")


def pulled(function: Callable[..., Any], tensors: Sequence[Any], cotangents: tuple[Tensor, ...]) -> list[Any]:
    """Gradients of a function that returns a tuple, one for each tensor; None for a tensor that is None."""
    import torch

    call, primals = _where_present(function, tensors)
    pullback: Any = torch.func.vjp(call, *primals)[1]
    found = iter(pullback(cotangents))
    return [None if t is None else next(found) for t in tensors]


def pushed(function: Callable[..., Any], tensors: Sequence[Any], tangents: Sequence[Any]) -> tuple[Tensor, ...]:
    """Tangents of a function that returns a tuple. A tangent of None means zeros.

    The derivative of the pullback in its cotangents is the pushforward. ``torch.func.jvp`` would nest forward mode in
    the caller's forward mode, which torch refuses inside a compiled function."""
    import torch

    call, primals = _where_present(function, tensors)
    filled = [torch.zeros_like(x) if t is None else t for x, t in zip(tensors, tangents, strict=True) if x is not None]
    pulled_back: Any = torch.func.vjp(call, *primals)
    zeros = tuple(torch.zeros_like(o) for o in pulled_back[0])
    pushed_forward: Any = torch.func.vjp(lambda *cotangents: pulled_back[1](cotangents), *zeros)
    found: tuple[Tensor, ...] = pushed_forward[1](tuple(filled))
    return found


def _where_present(function: Callable[..., Any], tensors: Sequence[Any]) -> tuple[Callable[..., Any], list[Tensor]]:
    """The function restricted to the tensors that are not None, and these tensors."""

    def call(*present: Tensor) -> Any:
        left = iter(present)
        return function(*(None if t is None else next(left) for t in tensors))

    return call, [t for t in tensors if t is not None]
