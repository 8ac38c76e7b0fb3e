"""linear_logprob as a torch operator: what torch.compile, export, FakeTensor and torch.func see, with its derivative.

There is no second derivative and no tangent: asking for one is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _main_grad
from .._arithmetic import resolve_traced, resolve_traced_unit
from .._dispatch import count_write
from .._in_graph import apply, callable_in_graph
from .._native import module as _C
from .._torch import DTYPES, apply_function, device_type, implement, memory, prepare
from .._transforms import looped
from .linear_autograd import wanted
from .logprob_traced import _OPTIONS, _arguments, _dtype, _options

_library = torch.library.Library("rl_kernel_native", "FRAGMENT")
_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target"
_HOW = f"{_OPTIONS}, int logits_dtype, int workspace_bytes, int unit, int dh_segments"
# What is not there is an empty tensor.
_library.define(f"linear_logprob({_HEAD}, {_HOW}, int returns) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_GIVEN = f"{_HEAD}, Tensor lse, Tensor? entropy, Tensor? dlogprob, Tensor? dlse, Tensor? dentropy, {_HOW}, int needs"
_library.define(f"linear_logprob_backward({_GIVEN}) -> (Tensor, Tensor, Tensor)")
_library.define(f"linear_logprob_backward_(Tensor(a!) main_grad, {_GIVEN}) -> (Tensor, Tensor)")
_ops = torch.ops.rl_kernel_native
_LSE, _ENTROPY = 2, 4  # bits of `returns`


def _resolved(hidden: Tensor, how: tuple[Any, ...]) -> tuple[tuple[Any, ...], int, int, int, int, int]:
    """The extension's arguments, and mode, dtype of the logits, workspace, unit and dh_segments."""
    *options, logits, workspace_bytes, unit, dh_segments = how
    arguments, mode = _arguments(tuple(options))
    kind = device_type(hidden, "hidden")
    return arguments, resolve_traced(mode, kind), logits, workspace_bytes, resolve_traced_unit(unit, kind), dh_segments


def _forward(hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *how, returns = rest
    arguments, mode, logits, workspace_bytes, unit, _ = _resolved(hidden, tuple(how))
    prepare(hidden)
    plain = memory(hidden)
    outputs = _C.linear_logprob(
        plain, memory(weight), memory(bias), target, *arguments, mode, logits, returns | _LSE, workspace_bytes, unit,
        None, 0,
    )  # fmt: skip
    return tuple(plain.new_empty(0, dtype=_dtype(i)) if o is None else o for i, o in enumerate(outputs))


def _gradients(
    main_grad: Any, hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, lse: Tensor, entropy: Any, dlogprob: Any,
    dlse: Any, dentropy: Any, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *how, needs = rest
    arguments, mode, logits, workspace_bytes, unit, dh_segments = _resolved(hidden, tuple(how))
    prepare(hidden)
    rows = (memory(g) if g is None else memory(g).contiguous() for g in (dlogprob, dlse, dentropy))
    outputs = _C.linear_logprob_backward(
        memory(hidden), memory(weight), memory(bias), target, *arguments, mode, logits, lse, entropy, *rows,
        *_bools(needs),        main_grad, -1, None, None, dh_segments, False, workspace_bytes, unit, None, 0,
    )  # fmt: skip
    return tuple(hidden.new_empty(0) if o is None else o for o in outputs)


def _bools(needs: int) -> list[bool]:
    """Whether hidden, weight and bias are to get gradients. A number: vmap would look for batches in a list."""
    return [bool(needs >> i & 1) for i in range(3)]


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    return _gradients(None, *arguments)


def _backward_into(main_grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    dhidden, _, dbias = _gradients(main_grad.detach(), *arguments)
    count_write(main_grad)
    return dhidden, dbias


def _differentiable(*arguments: Any) -> tuple[Tensor, ...]:
    *outputs, status = apply("_TransformedLinearLogprob", *arguments, None)
    return *outputs, status.to(torch.int32)


implement(_library, "linear_logprob", _forward, _differentiable)
implement(_library, "linear_logprob_backward", _backward)
implement(_library, "linear_logprob_backward_", _backward_into)


@torch.library.register_fake("rl_kernel_native::linear_logprob", lib=_library)
def _forward_fake(hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *how, returns = rest
    _check_shapes(hidden, weight, bias, target)
    logits = how[-4]
    if logits >= 0 and DTYPES[logits] not in (torch.float32, hidden.dtype):
        raise TypeError(f"logits_dtype: expected float32 or {hidden.dtype} (that of hidden), got {DTYPES[logits]}")
    wanted = returns | _LSE
    return tuple(hidden.new_empty(hidden.shape[:-1] if wanted >> i & 1 else 0, dtype=_dtype(i)) for i in range(5))


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


@torch.library.register_fake("rl_kernel_native::linear_logprob_backward", lib=_library)
def _backward_fake(hidden: Tensor, weight: Tensor, bias: Any, *rest: Any) -> tuple[Tensor, ...]:
    needs = _bools(rest[-1])
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    dtypes = (hidden.dtype, hidden.dtype, hidden.dtype if bias is None else bias.dtype)
    return tuple(
        hidden.new_empty(shape if need else (0,), dtype=dtype if need else hidden.dtype)
        for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
    )


@torch.library.register_fake("rl_kernel_native::linear_logprob_backward_", lib=_library)
def _backward_into_fake(main_grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    dhidden, _, dbias = _backward_fake(*arguments)
    return dhidden, dbias


def linear_logprob(
    hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, arguments: tuple[Any, ...], mode: int, logits: int,
    workspace_bytes: int, unit: int, dh_segments: int, returns: int, main_grad: Any,
) -> Any:  # fmt: skip
    how = (*_options(arguments, mode), logits, workspace_bytes, unit, dh_segments)
    *outputs, status = apply_function(
        _TracedLinearLogprob, "_TransformedLinearLogprob", hidden, weight, bias, target, *how, returns, main_grad
    )
    return *outputs, status.to(torch.int32)


def backward(
    main_grad: Any, head: tuple[Any, ...], rows: tuple[Any, ...], arguments: tuple[Any, ...], how: tuple[int, ...],
    needs: list[bool],
) -> Any:  # fmt: skip
    """Of an eager forward, through the dispatcher. ``rows``: lse, entropy and the incoming gradients; ``how``: mode,
    dtype of the logits, workspace, unit and dh_segments."""
    return _apply_backward(main_grad, (*head, *rows, *_options(arguments, how[0]), *how[1:]), needs)


def _apply_backward(main_grad: Any, given: tuple[Any, ...], needs: list[bool]) -> tuple[Any, ...]:
    """Gradients of hidden, weight and bias, None where not asked for; that of weight goes to a main_grad."""
    bits = sum(need << i for i, need in enumerate(needs))
    if main_grad is not None and needs[1]:
        dhidden, dbias = _ops.linear_logprob_backward_(main_grad, *given, bits)
        found: Any = (dhidden, None, dbias)
    else:
        found = apply_function(_TracedLinearLogprobBackward, "_TransformedLinearLogprobBackward", *given, bits)
    return tuple(g if need else None for g, need in zip(found, needs, strict=True))


class _TracedLinearLogprob(torch.autograd.Function):
    """For torch.compile, which needs every parameter by name."""

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, temperature: Any, kept_ids: Any, kept_offsets: Any,
        value: float, scale: float, softcap: Any, ignore_index: int, valid_vocab: Any, canonical: Any, exp: int,
        logits: int, workspace_bytes: int, unit: int, dh_segments: int, returns: int,
        main_grad: Any,
    ) -> Any:  # fmt: skip
        return _ops.linear_logprob(
            hidden, weight, bias, target, temperature, kept_ids, kept_offsets, value, scale, softcap, ignore_index,
            valid_vocab, canonical, exp, logits, workspace_bytes, unit, dh_segments, returns,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        hidden, weight, bias, target, temperature, kept_ids, kept_offsets = inputs[:7]
        ctx.numbers = tuple(inputs[7:-2])
        ctx.returns, ctx.main_grad = inputs[-2:]
        ctx.has_bias = bias is not None
        ctx.save_for_backward(
            hidden, weight, bias, target, output[1], output[2], temperature, kept_ids, kept_offsets
        )  # fmt: skip
        ctx.mark_non_differentiable(output[3], output[4])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight, bias, target, lse, entropy, temperature, kept_ids, kept_offsets = ctx.saved_tensors
        of_entropy = bool(ctx.returns & _ENTROPY)
        rows = (*gradients[:2], gradients[2] if of_entropy else None)
        if all(g is None for g in rows):
            return (None,) * 20
        needs = [bool(n) for n in ctx.needs_input_grad[:3]]
        if ctx.main_grad is not None:
            needs = [bool(n) for n in wanted(ctx)]
            for g in rows:
                if g is not None and needs[1]:
                    _main_grad.require_addable(g)
        given = (
            hidden, weight, bias, target, lse, entropy if of_entropy else None, *rows, temperature, kept_ids,
            kept_offsets, *ctx.numbers,
        )  # fmt: skip
        return *_apply_backward(ctx.main_grad, given, needs), *(None,) * 17


@callable_in_graph
class _TransformedLinearLogprob(_TracedLinearLogprob):
    """For torch.func. Status travels as float32: an integer output cannot have a tangent."""

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, *rest: Any) -> Any:
        *outputs, status = _ops.linear_logprob(hidden, weight, *rest[:-1])  # without main_grad
        return *outputs, status.float()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return looped(_TransformedLinearLogprob.apply, info, in_dims, inputs), (0,) * 5


class _TracedLinearLogprobBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, lse: Tensor, entropy: Any, dlogprob: Any, dlse: Any,
        dentropy: Any, temperature: Any, kept_ids: Any, kept_offsets: Any, value: float, scale: float, softcap: Any,
        ignore_index: int, valid_vocab: Any, canonical: Any, exp: int, logits: int, workspace_bytes: int, unit: int,
        dh_segments: int, needs: int,
    ) -> Any:  # fmt: skip
        return _ops.linear_logprob_backward(
            hidden, weight, bias, target, lse, entropy, dlogprob, dlse, dentropy, temperature, kept_ids, kept_offsets,
            value, scale, softcap, ignore_index, valid_vocab, canonical, exp, logits, workspace_bytes, unit,
            dh_segments, needs,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("linear_logprob: its backward has no backward; call logprob of linear for create_graph")


@callable_in_graph
class _TransformedLinearLogprobBackward(_TracedLinearLogprobBackward):
    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return looped(_TransformedLinearLogprobBackward.apply, info, in_dims, inputs), (0,) * 3
