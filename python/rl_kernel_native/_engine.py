"""What torch needs of an operator that :mod:`_operator` describes: schema, kernel and fake kernel, the eager call, an
autograd Function for eager calls, and one with rules of torch.func for whatever traces or transforms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _in_graph, _torch
from ._operator import Diagonal, Operator
from ._register import define, fake, implement
from ._shapes import (
    FLOAT32,
    check_contiguous,
    check_element,
    check_first,
    check_first_mask,
    check_mask,
    check_tokens,
    check_vector,
)
from ._torch import (
    apply_function,
    gradient,
    is_direct,
    is_direct_gradient,
    is_grad_enabled,
    is_plain,
    is_untraced,
    memory,
    prepare,
    require_tensors,
    rows_of,
    wants_grad,
)
from ._transforms import looped, refuse_tangents

_ops = torch.ops.rl_kernel_native


class _Seen:
    """What fake kernels have learned of a call: its first array, under its name, and the number of sequences."""

    def __init__(self, op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> None:
        self.first, self.name, self.sequences = arrays[0], op.arrays[0].label(how), None
        self.offsets = next((x for a, x in zip(op.arrays, arrays, strict=True) if a.kind == "cu_seqlens"), None)


def _first(seen: _Seen, x: Any, name: str) -> None:
    seen.sequences = check_first(x, name, seen.offsets)


def _first_mask(seen: _Seen, x: Any, name: str) -> None:
    seen.sequences = check_first_mask(x, seen.offsets)


def _one_a_sequence(seen: _Seen, x: Any, name: str) -> None:
    check_vector(x, name, FLOAT32, seen.sequences, "num_sequences")
    check_contiguous(x, name)


# What a fake kernel asks of an array that is there.
KINDS: dict[str, Callable[[_Seen, Any, str], None]] = {
    "first tokens": _first,
    "first mask": _first_mask,
    "tokens": lambda seen, x, name: check_tokens(x, name, seen.first, seen.name),
    "tokens or sequences": lambda seen, x, name: check_tokens(x, name, seen.first, seen.name, seen.sequences),
    "mask": lambda seen, x, name: check_mask(x, seen.first.shape, seen.name),
    "cu_seqlens": lambda seen, x, name: None,  # the first array's check has looked at it
    "sequences": _one_a_sequence,
    "number": lambda seen, x, name: check_element(x, name),
    "by hand": lambda seen, x, name: None,
}


def register(operators: Iterable[Operator]) -> None:
    for op in operators:
        _register(op)
        if op.gradient is not None:
            _register_diagonal(op, op.gradient)


def _schema(op: Operator) -> str:
    return ", ".join([*(f"Tensor{'?' * a.optional} {a.name}" for a in op.arrays), op.options])


def _register(op: Operator) -> None:
    count, dtypes = len(op.arrays), [getattr(torch, name) for name in op.dtypes]
    results = "Tensor" if len(dtypes) == 1 else f"({', '.join(['Tensor'] * len(dtypes))})"
    define(f"{op.name}({_schema(op)}) -> {results}")

    def given(outputs: Any) -> Any:
        return outputs[0] if len(dtypes) == 1 else tuple(outputs)

    def kernel(*arguments: Any) -> Any:
        first = arguments[0]
        prepare(first)
        found = op.native(tuple(map(memory, arguments[:count])), arguments[count:], None, 0)
        return given([first.new_empty(0, dtype=d) if o is None else o for o, d in zip(found, dtypes, strict=True)])

    def shapes(*arguments: Any) -> Any:
        arrays, how = arguments[:count], arguments[count:]
        check_arrays(op, arrays, how)
        found = zip(op.outputs(arrays, how), dtypes, strict=True)
        return given([arrays[0].new_empty((0,) if s is None else s, dtype=d) for s, d in found])

    differentiable = None if op.gradient is None else functools.partial(_in_graph.apply, title(op))
    implement(op.name, kernel, differentiable)
    fake(op.name)(shapes)


def check_arrays(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> None:
    """The extension's questions about shapes and dtypes, in its words."""
    seen = _Seen(op, arrays, how)
    for a, x in zip(op.arrays, arrays, strict=True):
        if x is not None:
            KINDS[a.kind](seen, x, a.label(how))
        elif not a.optional:
            raise TypeError(f"{a.label(how)}: expected an array that speaks DLPack, got NoneType")
    if op.check is not None:
        op.check(arrays, how, seen.sequences)


def title(op: Operator) -> str:
    """The name of its Function."""
    return op.name.title().replace("_", "")


# ---- calls ----------------------------------------------------------------------------------------------------------


def call(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> tuple[Any, ...]:
    derivatives = op.gradient
    if derivatives is not None and is_grad_enabled():
        _refuse_constants(op, derivatives, arrays, how)
    if is_direct(*arrays):
        if derivatives is not None and wants_grad(*[arrays[i] for i in derivatives.of]):
            return (_Products.apply(op, arrays, how, *[arrays[i] for i in derivatives.of]),)
        return _direct(op, arrays, how)
    _require(op, arrays, how)
    if derivatives is None:
        if is_untraced() and not all(is_plain(x) for x in arrays if isinstance(x, Tensor)):
            _torch.device_type(arrays[0], op.first)
        found = getattr(_ops, op.name)(*(x.detach() if isinstance(x, Tensor) else x for x in arrays), *how)
    else:
        found = apply_function(getattr(_ops, op.name), title(op), *arrays, *how)
    outputs = (found,) if len(op.dtypes) == 1 else found
    asked = op.outputs(arrays, how)
    return tuple(None if shape is None else o for o, shape in zip(outputs, asked, strict=True))


def _direct(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> Any:
    first = arrays[0]
    _torch.device_type(first, op.first)
    prepare(first)
    return op.native(arrays, how, None, 0)


def _require(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...], **more: Any) -> None:
    named = {a.label(how): x for a, x in zip(op.arrays, arrays, strict=True)}
    required = {a.label(how) for a in op.arrays if not a.optional}
    require_tensors(
        **{name: x for name, x in named.items() if name in required},
        optional={name: x for name, x in named.items() if name not in required} | more,
    )


def _refuse_constants(op: Operator, of: Diagonal, arrays: Sequence[Any], how: tuple[Any, ...]) -> None:
    for i, x in enumerate(arrays):
        if isinstance(x, Tensor) and x.requires_grad and not (i in of.of and of.allows(i, how)):
            name = op.arrays[i].label(how)
            raise ValueError(f"{name}: requires a gradient, and {op.name} gives none; pass {name}.detach()")


# ---- a diagonal: products with the same slopes ----------------------------------------------------------------------


def backward(op: Operator, d: Any, arrays: Sequence[Any], how: tuple[Any, ...], wanted: tuple[bool, ...]) -> Any:
    """Gradients, None for what is not wanted."""
    assert op.gradient is not None
    if is_direct(d, *arrays) and not wants_grad(d, *arrays):
        prepare(arrays[0])
        return op.gradient.native(d, arrays, how, wanted, None, 0)
    _require(op, arrays, how, **{op.gradient.incoming: d})
    return _products(op, d, arrays, how, wanted)


class _Products(torch.autograd.Function):
    """Eager autograd. The backward computes the slopes again and saves only what it was given."""

    @staticmethod
    def forward(ctx: Any, op: Operator, arrays: Sequence[Any], how: tuple[Any, ...], *_: Any) -> Any:
        (result,) = _direct(op, arrays, how)
        ctx.save_for_backward(*arrays)
        ctx.op, ctx.how = op, how
        return result

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        op, arrays = ctx.op, ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        incoming = op.gradient.incoming
        if is_grad_enabled() or not is_direct_gradient(d):  # create_graph, which the traced Functions answer
            only: dict[str, Any] = {incoming: d}
            require_tensors(**only)
            found = _products(op, gradient(d, torch.float32, incoming), arrays, ctx.how, wanted)
        else:
            prepare(d)
            found = op.gradient.native(gradient(d, torch.float32, incoming), arrays, ctx.how, wanted, None, 0)
        return None, None, None, *found


def _products(op: Operator, d: Tensor, arrays: Sequence[Any], how: tuple[Any, ...], wanted: tuple[bool, ...]) -> Any:
    name = f"{op.name}_backward"
    found = apply_function(getattr(_ops, name), f"{title(op)}Backward", d, *arrays, *how, *wanted)
    return tuple(o if want else None for o, want in zip(found, wanted, strict=True))


def _register_diagonal(op: Operator, of: Diagonal) -> None:
    count, places = len(op.arrays), of.of
    name, incoming = f"{op.name}_backward", of.incoming
    flags = ", ".join(f"bool return_d_{op.arrays[i].name}" for i in places)
    define(f"{name}(Tensor {incoming}, {_schema(op)}, {flags}) -> ({', '.join(['Tensor'] * len(places))})")
    second = f"{op.name}: a second derivative is wanted, and there is none"

    def apart(arguments: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Arrays, options, what is wanted."""
        return arguments[:count], arguments[count : -len(places)], arguments[-len(places) :]

    def kernel(d: Tensor, *arguments: Any) -> Any:
        arrays, how, wanted = apart(arguments)
        prepare(arrays[0])
        found = of.native(memory(d), tuple(map(memory, arrays)), how, wanted, None, 0)
        return tuple(arrays[0].new_empty(0) if x is None else x for x in found)

    def shapes(d: Tensor, *arguments: Any) -> Any:
        arrays, how, wanted = apart(arguments)
        check_arrays(op, arrays, how)
        check_tokens(d, incoming, arrays[0], op.arrays[0].label(how))
        return tuple(arrays[0].new_empty(arrays[0].shape if want else 0) for want in wanted)

    def products(ctx: Any, d: Tensor, wanted: Sequence[bool]) -> Any:
        """Of saved arrays as kernels read them: batches of torch.func are slices of any stride."""
        arrays = tuple(None if x is None else rows_of(x) for x in ctx.saved_tensors)
        return _products(op, gradient(d, torch.float32, incoming), arrays, ctx.how, tuple(wanted))

    def total(ctx: Any, incoming: Iterable[Any]) -> Any:
        """The sum over operands of each one's incoming gradient or tangent times its slope."""
        found = None
        for i, x in enumerate(incoming):
            if x is not None:
                product = products(ctx, x, [j == i for j in range(len(places))])[i]
                found = product if found is None else found + product
        return found

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return getattr(_ops, op.name)(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.how, ctx.count = inputs[count:], len(inputs)
            ctx.save_for_backward(*inputs[:count])
            ctx.save_for_forward(*inputs[:count])
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, d: Any) -> Any:
            found: list[Any] = [None] * ctx.count
            if d is not None:
                given = products(ctx, d, [ctx.needs_input_grad[i] for i in places])
                for i, product in zip(places, given, strict=True):
                    found[i] = product
            return tuple(found)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
            return looped(Forward.apply, info, in_dims, inputs), 0

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            constants = [i for i in range(count) if not (i in places and of.allows(i, ctx.how))]
            names = [op.arrays[i].label(ctx.how) for i in constants]
            refuse_tangents(op.name, names, [tangents[i] for i in constants])
            return total(ctx, (None if tangents[i] is None else tangents[i].contiguous() for i in places))

    class Backward(torch.autograd.Function):
        """Linear in the incoming gradient, without a derivative in the operands."""

        @staticmethod
        def forward(*arguments: Any) -> Any:
            return getattr(_ops, name)(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            arrays, ctx.how, ctx.wanted = apart(inputs[1:])
            ctx.mark_non_differentiable(*(o for o, want in zip(output, ctx.wanted, strict=True) if not want))
            ctx.save_for_backward(*arrays)
            ctx.save_for_forward(*arrays)
            ctx.set_materialize_grads(False)
            ctx.count = len(inputs)

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            if any(ctx.needs_input_grad[1 : count + 1]):
                raise RuntimeError(second)
            asked = (c if want else None for c, want in zip(cotangents, ctx.wanted, strict=True))
            return total(ctx, asked), *(None,) * (ctx.count - 1)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
            return looped(Backward.apply, info, in_dims, inputs), (0,) * len(places)

        @staticmethod
        def jvp(ctx: Any, along: Any, *others: Any) -> Any:
            if any(t is not None for t in others):
                raise RuntimeError(second)
            return products(ctx, along.contiguous(), ctx.wanted)

    for function, suffix in ((Forward, ""), (Backward, "Backward")):
        function.__name__ = function.__qualname__ = title(op) + suffix
        _in_graph.callable_in_graph(function)
    implement(name, kernel, functools.partial(_in_graph.apply, f"{title(op)}Backward"))
    fake(name)(shapes)
