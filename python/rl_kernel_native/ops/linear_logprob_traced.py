"""linear_logprob as a torch operator: what torch.compile, export, FakeTensor and torch.func see, with its derivative.

There is no second derivative and no tangent: asking for one is an error.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _main_grad
from .._arithmetic import resolve_traced, resolve_traced_unit
from .._dispatch import count_write
from .._in_graph import apply, callable_in_graph
from .._main_grad import is_asked_for
from .._native import module as _C
from .._register import define, fake, implement
from .._torch import DTYPES, apply_function, device_type, memory, prepare
from .linear_torch import wanted
from .logprob_traced import _OPTIONS, _arguments, _dtype, _options

_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? lora_a, Tensor? lora_b, Tensor target"
_HOW = (
    f"{_OPTIONS}, int logits_dtype, int workspace_bytes, int unit, int dh_segments, float lora_scale, "
    "float label_smoothing"
)
# What is not there is an empty tensor.
define(f"linear_logprob({_HEAD}, {_HOW}, int returns) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
_GIVEN = f"{_HEAD}, Tensor lse, Tensor? entropy, Tensor? dlogprob, Tensor? dlse, Tensor? dentropy, {_HOW}, int needs"
define(f"linear_logprob_backward({_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
define(f"linear_logprob_backward_(Tensor(a!) main_grad, {_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor)")
_ops = torch.ops.rl_kernel_native
_LSE, _ENTROPY, _LARGEST = 2, 4, 32  # bits of `returns`
_OUTPUTS = 6  # those of logprob, and the largest logit's id
_OPERANDS = 5  # hidden, weight, bias, lora_a and lora_b, which have gradients
_NUMBERS = 6  # of `how`, after logprob's options


def _resolved(hidden: Tensor, how: tuple[Any, ...]) -> tuple[Any, ...]:
    """The extension's arguments, and mode, dtype of the logits, workspace, unit, dh_segments, lora_scale and
    label_smoothing."""
    options, (logits, workspace_bytes, unit, dh_segments, *of_rows) = how[:-_NUMBERS], how[-_NUMBERS:]
    arguments, mode = _arguments(tuple(options))
    kind = device_type(hidden, "hidden")
    unit = resolve_traced_unit(unit, kind)
    return arguments, resolve_traced(mode, kind), logits, workspace_bytes, unit, dh_segments, *of_rows


def _forward(
    hidden: Tensor, weight: Tensor, bias: Any, lora_a: Any, lora_b: Any, target: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *how, returns = rest
    arguments, mode, logits, workspace_bytes, unit, _, *of_rows = _resolved(hidden, tuple(how))
    prepare(hidden)
    plain = memory(hidden)
    outputs = _C.linear_logprob(
        plain, memory(weight), memory(bias), target, *arguments, mode, logits, returns | _LSE, workspace_bytes, unit,
        memory(lora_a), memory(lora_b), *of_rows, None, 0,
    )  # fmt: skip
    found = outputs if returns & _LARGEST else (*outputs, None)
    return tuple(plain.new_empty(0, dtype=_dtype_of(i)) if o is None else o for i, o in enumerate(found))


def _dtype_of(output: int) -> torch.dtype:
    return torch.int64 if output == _OUTPUTS - 1 else _dtype(output)


def _gradients(
    main_grad: Any, hidden: Tensor, weight: Tensor, bias: Any, lora_a: Any, lora_b: Any, target: Tensor, lse: Tensor,
    entropy: Any, dlogprob: Any, dlse: Any, dentropy: Any, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *how, bits = rest
    needs = _bools(bits)
    arguments, mode, logits, workspace_bytes, unit, dh_segments, *of_rows = _resolved(hidden, tuple(how))
    prepare(hidden)
    rows = (memory(g) if g is None else memory(g).contiguous() for g in (dlogprob, dlse, dentropy))
    outputs = _C.linear_logprob_backward(
        memory(hidden), memory(weight), memory(bias), target, *arguments, mode, logits, lse, entropy, *rows,
        *needs[:3], main_grad, -1, None, None, dh_segments, False, workspace_bytes, unit, memory(lora_a),
        memory(lora_b), *of_rows, *needs[3:], None, 0,
    )  # fmt: skip
    return tuple(hidden.new_empty(0) if o is None else o for o in outputs)


def _bools(needs: int) -> list[bool]:
    """Whether each operand is to get a gradient. A number: vmap would look for batches in a list."""
    return [bool(needs >> i & 1) for i in range(_OPERANDS)]


def needed(ctx: Any, has_bias: bool) -> list[bool]:
    """Whether the running backward asks for the gradient of each operand."""
    found, node = [bool(need) for need in wanted(ctx)], 2 + has_bias  # of lora_a: there is one for each tensor
    for i in (0, 1):
        found.append(ctx.needs_input_grad[3 + i] and is_asked_for(ctx.next_functions[node + i][0]))
    return found


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    return _gradients(None, *arguments)


def _backward_into(main_grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    dhidden, _, *others = _gradients(main_grad.detach(), *arguments)
    count_write(main_grad)
    return dhidden, *others


def _differentiable(*arguments: Any) -> tuple[Tensor, ...]:
    *outputs, status, largest = apply("LinearLogprob", *arguments, None)
    return *outputs, status.to(torch.int32), largest.to(torch.int64)


implement("linear_logprob", _forward, _differentiable)
implement("linear_logprob_backward", _backward)
implement("linear_logprob_backward_", _backward_into)


# For FlopCounterMode: two flops a product, those of logits that backward computes again among them.
def _products(hidden: Any, weight: Any, lora_a: Any, needs: list[bool]) -> int:
    """Products of the logits, and of the gradients that are wanted of hidden, weight, bias, lora_a and lora_b."""
    columns, features = weight
    rank = 0 if lora_a is None else lora_a[0]
    of_hidden, of_weight, _, of_a, of_b = needs
    head = columns * features * (1 + of_hidden + of_weight)
    factors = features * (1 + of_hidden + of_a) + columns * (1 + (of_hidden or of_a) + of_b)
    return math.prod(hidden[:-1]) * (head + rank * factors)


@register_flop_formula(_ops.linear_logprob)
def _flops(hidden: Any, weight: Any, bias: Any, lora_a: Any, *_: Any, **__: Any) -> int:
    return 2 * _products(hidden, weight, lora_a, [False] * _OPERANDS)


@register_flop_formula(_ops.linear_logprob_backward)
def _backward_flops(hidden: Any, weight: Any, bias: Any, lora_a: Any, *rest: Any, **_: Any) -> int:
    return 2 * _products(hidden, weight, lora_a, _bools(rest[-1]))


@register_flop_formula(_ops.linear_logprob_backward_)
def _backward_into_flops(main_grad: Any, *arguments: Any, **_: Any) -> int:
    return _backward_flops(*arguments)


@fake("linear_logprob")
def _forward_fake(
    hidden: Tensor, weight: Tensor, bias: Any, lora_a: Any, lora_b: Any, target: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *how, returns = rest
    _check_shapes(hidden, weight, bias, target)
    if lora_a is not None:
        _check_lora(hidden, weight, lora_a, lora_b)
    logits = how[-_NUMBERS]
    if logits >= 0 and DTYPES[logits] not in (torch.float32, hidden.dtype):
        raise TypeError(f"logits_dtype: expected float32 or {hidden.dtype} (that of hidden), got {DTYPES[logits]}")
    wanted = returns | _LSE
    return tuple(
        hidden.new_empty(hidden.shape[:-1] if wanted >> i & 1 else 0, dtype=_dtype_of(i)) for i in range(_OUTPUTS)
    )


def _check_shapes(hidden: Tensor, weight: Tensor, bias: Any, target: Tensor) -> None:
    if hidden.dtype not in DTYPES:
        raise TypeError(f"hidden: expected dtype float32, bfloat16 or float16, got {hidden.dtype}")
    if weight.dtype != hidden.dtype:
        raise TypeError(f"weight: expected dtype {hidden.dtype} (that of hidden), got {weight.dtype}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        wanted = f"[vocab_size, {hidden.shape[-1]}]"
        raise ValueError(f"weight: expected shape {wanted}, got {list(weight.shape)}")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(f"bias: expected shape [{weight.shape[0]}], got {list(bias.shape)}")
    if target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target: expected dtype int32 or int64, got {target.dtype}")
    if tuple(target.shape) != tuple(hidden.shape[:-1]):
        raise ValueError(f"target: expected shape {list(hidden.shape[:-1])}, got {list(target.shape)}")


def _check_lora(hidden: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> None:
    for name, tensor in (("lora_a", lora_a), ("lora_b", lora_b)):
        if tensor.dtype != hidden.dtype:
            raise TypeError(f"{name}: expected dtype {hidden.dtype} (that of hidden), got {tensor.dtype}")
    if lora_a.dim() != 2 or lora_a.shape[1] != hidden.shape[-1] or lora_a.shape[0] < 1:
        wanted = f"[rank, {hidden.shape[-1]}], at least one row of the last dimension of hidden"
        raise ValueError(f"lora_a: expected shape {wanted}, got {list(lora_a.shape)}")
    if lora_b.dim() != 2 or lora_b.shape[0] != weight.shape[0] or lora_b.shape[1] != lora_a.shape[0]:
        wanted = f"[{weight.shape[0]}, {lora_a.shape[0]}] (the rows of weight, those of lora_a)"
        raise ValueError(f"lora_b: expected shape {wanted}, got {list(lora_b.shape)}")


@fake("linear_logprob_backward")
def _backward_fake(
    hidden: Tensor, weight: Tensor, bias: Any, lora_a: Any, lora_b: Any, *rest: Any
) -> tuple[Tensor, ...]:
    operands = (hidden, weight, bias, lora_a, lora_b)
    return tuple(
        hidden.new_empty(operand.shape, dtype=operand.dtype) if need else hidden.new_empty(0)
        for operand, need in zip(operands, _bools(rest[-1]), strict=True)
    )


@fake("linear_logprob_backward_")
def _backward_into_fake(main_grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    dhidden, _, *others = _backward_fake(*arguments)
    return dhidden, *others


def linear_logprob(
    hidden: Tensor, weight: Tensor, bias: Any, lora_a: Any, lora_b: Any, target: Tensor, arguments: tuple[Any, ...],
    mode: int, logits: int, workspace_bytes: int, unit: int, dh_segments: int, lora_scale: float,
    label_smoothing: float, returns: int, main_grad: Any,
) -> Any:  # fmt: skip
    how = (*_options(arguments, mode), logits, workspace_bytes, unit, dh_segments, lora_scale, label_smoothing)
    *outputs, status, largest = apply_function(
        _ops.linear_logprob, "LinearLogprob", hidden, weight, bias, lora_a, lora_b, target, *how, returns,
        more=(main_grad,),
    )  # fmt: skip
    found = (*outputs, status.to(torch.int32))
    return (*found, largest.to(torch.int64)) if returns & _LARGEST else found


def backward(
    main_grad: Any, head: tuple[Any, ...], rows: tuple[Any, ...], arguments: tuple[Any, ...], how: tuple[Any, ...],
    needs: list[bool],
) -> Any:  # fmt: skip
    """The backward of an eager forward, through the dispatcher. ``rows``: lse, entropy and the incoming gradients;
    ``how``: mode, dtype of the logits, workspace, unit, dh_segments, lora_scale and
    label_smoothing."""
    return _apply_backward(main_grad, (*head, *rows, *_options(arguments, how[0]), *how[1:]), needs)


def _apply_backward(main_grad: Any, given: tuple[Any, ...], needs: list[bool]) -> tuple[Any, ...]:
    """Gradients of the operands, None where not asked for; that of weight goes to a main_grad."""
    bits = sum(need << i for i, need in enumerate(needs))
    if main_grad is not None and needs[1]:
        dhidden, *others = _ops.linear_logprob_backward_(main_grad, *given, bits)
        found: Any = (dhidden, None, *others)
    else:
        found = apply_function(_ops.linear_logprob_backward, "LinearLogprobBackward", *given, bits)
    return tuple(g if need else None for g, need in zip(found, needs, strict=True))


@callable_in_graph
class LinearLogprob(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        hidden, weight, bias, lora_a, lora_b, target, temperature, kept_ids, kept_offsets = inputs[:9]
        ctx.numbers = tuple(inputs[9:-2])
        ctx.returns, ctx.main_grad = inputs[-2:]
        ctx.save_for_backward(
            hidden, weight, bias, lora_a, lora_b, target, output[1], output[2], temperature, kept_ids, kept_offsets
        )  # fmt: skip
        ctx.mark_non_differentiable(*output[3:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        *head, lse, entropy, temperature, kept_ids, kept_offsets = ctx.saved_tensors
        of_entropy = bool(ctx.returns & _ENTROPY)
        rows = (*gradients[:2], gradients[2] if of_entropy else None)
        if all(g is None for g in rows):
            return (None,) * 24
        needs = [bool(n) for n in ctx.needs_input_grad[:_OPERANDS]]
        if ctx.main_grad is not None:
            needs = needed(ctx, head[2] is not None)
            for g in rows:
                if g is not None and needs[1]:
                    _main_grad.require_addable(g, ctx.main_grad)
        given = (
            *head, lse, entropy if of_entropy else None, *rows, temperature, kept_ids, kept_offsets, *ctx.numbers
        )  # fmt: skip
        return *_apply_backward(ctx.main_grad, given, needs), *(None,) * 19

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, *rest: Any) -> Any:
        *outputs, status, largest = _ops.linear_logprob(hidden, weight, *rest[:-1])  # without main_grad
        return *outputs, status.float(), largest.float()  # exact: ids are below 2^19

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("linear_logprob: it has no forward-mode derivative; call logprob of linear for that")


@callable_in_graph
class LinearLogprobBackward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.linear_logprob_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("linear_logprob: its backward has no backward; call logprob of linear for create_graph")
