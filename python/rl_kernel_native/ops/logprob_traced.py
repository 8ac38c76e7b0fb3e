"""logprob as torch operators: what torch.compile, export, FakeTensor and torch.func see, with its derivatives.

The forward is native and so is the first derivative. Forward-mode and second derivatives are composed from torch's own
operators in float64: they exist to be right, and need memory for [rows, vocab_size].
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import _check
from .._arithmetic import AS_CALLED, PORTABLE, resolve_traced
from .._in_graph import apply, callable_in_graph
from .._native import module as _C
from .._register import define, fake, implement
from .._torch import apply_function, device_type, memory, prepare, require_tensors
from .._transforms import batched, pulled, pushed

_ops = torch.ops.rl_kernel_native
_OPTIONS = (
    "Tensor? temperature, Tensor? kept_ids, Tensor? kept_offsets, float temperature_value, float logit_scale, "
    "float? softcap, SymInt ignore_index, SymInt? valid_vocab, SymInt? canonical_vocab, int exp"
)
define(f"logprob(Tensor logits, Tensor target, {_OPTIONS}, int returns) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
define(
    "logprob_backward(Tensor logits, Tensor target, Tensor lse, Tensor? entropy, Tensor? dlogprob, Tensor? dlse, "
    f"Tensor? dentropy, {_OPTIONS}) -> Tensor"
)


def _options(arguments: tuple[Any, ...], mode: int) -> tuple[Any, ...]:
    """The Python op's arguments in the order of the operators' schema."""
    temperature, scale, softcap, ignore_index, valid_vocab, canonical_vocab, kept_ids, kept_offsets = arguments
    is_tensor = isinstance(temperature, Tensor)
    return (
        temperature if is_tensor else None,
        kept_ids,
        kept_offsets,
        1.0 if is_tensor else _check.number("temperature", temperature),
        _check.number("logit_scale", scale),
        None if softcap is None else _check.number("softcap", softcap),
        _check.integer("ignore_index", ignore_index),
        None if valid_vocab is None else _check.integer("valid_vocab", valid_vocab),
        None if canonical_vocab is None else _check.integer("canonical_vocab", canonical_vocab),
        mode,
    )


def _arguments(options: tuple[Any, ...]) -> tuple[tuple[Any, ...], int]:
    temperature, kept_ids, kept_offsets, value, *numbers, mode = options
    return (value if temperature is None else temperature, *numbers, kept_ids, kept_offsets), mode


def _forward_kernel(logits: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *options, returns = rest
    arguments, mode = _arguments(tuple(options))
    mode = resolve_traced(mode, device_type(logits, "logits"))
    prepare(logits)
    plain = memory(logits)
    outputs = _C.logprob(plain, target, *arguments, mode, returns | 2, None, None, 0)
    return tuple(plain.new_empty(0, dtype=_dtype(i)) if o is None else o for i, o in enumerate(outputs))


def _backward_kernel(
    logits: Tensor, target: Tensor, lse: Tensor, entropy: Any, dlogprob: Any, dlse: Any, dentropy: Any, *options: Any
) -> Tensor:
    arguments, mode = _arguments(options)
    if mode == AS_CALLED:
        mode = resolve_traced(mode, device_type(logits, "logits")) if logits.is_cuda else PORTABLE
    prepare(logits)
    rows = (lse, entropy, memory(dlogprob), memory(dlse), memory(dentropy))
    return _C.logprob_backward(memory(logits), target, *arguments, mode, 0, None, *rows, None, None, 0)


def _dtype(output: int) -> torch.dtype:
    return torch.int32 if output == 4 else torch.float32


def _differentiable_forward(*arguments: Any) -> tuple[Tensor, ...]:
    *outputs, status = apply("Logprob", *arguments)
    return *outputs, status.to(torch.int32)


implement("logprob", _forward_kernel, _differentiable_forward)
implement("logprob_backward", _backward_kernel, functools.partial(apply, "LogprobBackward"))


@fake("logprob")
def _forward_fake(logits: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    returns = rest[-1] | 2
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"logits: expected dtype float32, bfloat16 or float16, got {logits.dtype}")
    if target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target: expected dtype int32 or int64, got {target.dtype}")
    if tuple(target.shape) != tuple(logits.shape[:-1]):
        raise ValueError(f"target: expected shape {list(logits.shape[:-1])}, got {list(target.shape)}")
    return tuple(logits.new_empty(logits.shape[:-1] if returns >> i & 1 else 0, dtype=_dtype(i)) for i in range(5))


@fake("logprob_backward")
def _backward_fake(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def traced_logprob(logits: Tensor, target: Tensor, arguments: tuple[Any, ...], mode: int, returns: int) -> Any:
    require_tensors(logits=logits, sharded=", or for a sharded vocabulary logprob_partial and logprob_merge")
    if not isinstance(target, Tensor):
        raise TypeError(f"target: expected a torch.Tensor, got {type(target).__name__}; for one row, torch.tensor(3)")
    temperature, *_, kept_ids, kept_offsets = arguments
    given = {"target": target, "temperature": temperature if isinstance(temperature, Tensor) else None}
    require_tensors(logits=logits, optional=given | {"kept ids": kept_ids, "kept offsets": kept_offsets})
    options = _options(arguments, mode)
    *outputs, status = apply_function(_ops.logprob, "Logprob", logits, target, *options, returns)
    return (*outputs, status.to(torch.int32))


def traced_backward(
    logits: Tensor, target: Tensor, arguments: tuple[Any, ...], mode: int, lse: Any, entropy: Any, *gradients: Any
) -> Tensor:
    return LogprobBackward.apply(logits, target, lse, entropy, *gradients, *_options(arguments, mode))


@callable_in_graph
class Logprob(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, target, temperature, kept_ids, kept_offsets = inputs[:5]
        ctx.numbers = tuple(inputs[5:-1])
        ctx.returns = inputs[-1]
        ctx.save_for_backward(logits, target, output[1], output[2], temperature, kept_ids, kept_offsets)
        ctx.save_for_forward(logits, target, output[1], output[2], temperature, kept_ids, kept_offsets)
        ctx.mark_non_differentiable(output[3], output[4])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, target, lse, entropy, temperature, kept_ids, kept_offsets = ctx.saved_tensors
        entropy_or_none = entropy if ctx.returns & 4 else None
        dlogprob, dlse, dentropy = gradients[:3]
        rows = (dlogprob, dlse, dentropy if ctx.returns & 4 else None)
        if all(g is None for g in rows):
            return (None,) * 13
        options = (temperature, kept_ids, kept_offsets, *ctx.numbers)
        dlogits = apply_function(
            _ops.logprob_backward, "LogprobBackward", logits, target, lse, entropy_or_none, *rows, *options
        )
        return dlogits, *(None,) * 12

    @staticmethod
    def forward(logits: Tensor, target: Tensor, *rest: Any) -> Any:
        *outputs, status = _ops.logprob(logits, target, *rest)
        return *outputs, status.float()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        outputs = Logprob.apply(*_batched(info, in_dims, inputs, tensors=3))
        return outputs, tuple(0 if o.dim() and o.shape[0] == info.batch_size else None for o in outputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        logits, target, lse, entropy, temperature, kept_ids, _kept_offsets = ctx.saved_tensors
        if tangent is None:
            return torch.zeros_like(lse), torch.zeros_like(lse), torch.zeros_like(entropy), None, None
        if kept_ids is not None:
            raise NotImplementedError("logprob: forward-mode differentiation with kept sets")
        arguments, _mode = _arguments((temperature, None, None, *ctx.numbers))
        z, slope, p, counts = _composed(logits.double(), target, arguments)
        onehot, is_id = _at_target(z, target, arguments[4])
        tangent_z = torch.where(p > 0, tangent.double() * slope, torch.zeros_like(z))
        mean = (p * tangent_z).sum(-1)
        at_target = torch.where(onehot, tangent.double() * slope, torch.zeros_like(z)).sum(-1)
        zero = mean.new_zeros(())
        d_entropy = torch.zeros_like(entropy)
        if ctx.returns & 4:
            log_p = torch.log(torch.where(p > 0, p, torch.ones_like(p)))
            d_entropy = -(p * (log_p + entropy.double().unsqueeze(-1)) * tangent_z).sum(-1)
            d_entropy = torch.where(counts, d_entropy, zero).float()
        d_logprob = torch.where(counts, torch.where(is_id, at_target - mean, float("nan")), zero).float()
        return d_logprob, torch.where(counts, mean, zero).float(), d_entropy, None, None


def _composed(logits: Tensor, target: Tensor, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z / T, d(z / T) / d logits, probabilities and the rows that count, from torch's own operators."""
    temperature, scale, softcap, ignore_index, valid_vocab, _canonical, _ids, _offsets = arguments
    counts = target != ignore_index
    logits = torch.where(counts.unsqueeze(-1), logits, torch.zeros_like(logits))  # ignored rows may hold anything
    z = logits * scale
    slope = torch.full_like(z, scale)
    if softcap is not None:
        capped = torch.isfinite(z)  # an infinity marks a column, it is not a value
        h = torch.tanh(torch.where(capped, z, torch.zeros_like(z)) / softcap)
        z, slope = torch.where(capped, softcap * h, z), torch.where(capped, slope * (1 - h * h), torch.zeros_like(z))
    t = temperature.to(z.dtype).unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    z, slope = z / t, slope / t
    if valid_vocab is not None:
        z = z.masked_fill(torch.arange(z.shape[-1], device=z.device) >= valid_vocab, float("-inf"))
    return z, slope, torch.softmax(z, -1), counts


def _at_target(z: Tensor, target: Tensor, valid_vocab: int | None) -> tuple[Tensor, Tensor]:
    """Where each row's target column is, and whether the target is an id at all: no gather, so no bad address."""
    width = z.shape[-1] if valid_vocab is None else valid_vocab
    columns = torch.arange(z.shape[-1], device=z.device)
    return columns == target.unsqueeze(-1), (target >= 0) & (target < width)


def _composed_backward(logits: Tensor, target: Tensor, rows: tuple[Any, ...], arguments: tuple[Any, ...]) -> Tensor:
    """dlogits as a differentiable function of the logits and of rows (dlogprob, dlse, dentropy)."""
    dlogprob, dlse, dentropy = rows
    z, slope, p, counts = _composed(logits.double(), target, arguments)
    present = p > 0
    total = torch.zeros_like(z)
    if dlogprob is not None:
        onehot, is_id = _at_target(z, target, arguments[4])
        g = torch.where(is_id | (dlogprob == 0), dlogprob.double(), float("nan"))
        total = total + g.unsqueeze(-1) * (onehot.to(z.dtype) - p)
    if dlse is not None:
        total = total + dlse.double().unsqueeze(-1) * p
    if dentropy is not None:
        finite = torch.where(present, z, torch.zeros_like(z))
        log_p = torch.where(present, finite - torch.logsumexp(z, -1, keepdim=True), torch.zeros_like(z))
        entropy = -(p * log_p).sum(-1, keepdim=True)
        total = total - dentropy.double().unsqueeze(-1) * p * (log_p + entropy)
    return torch.where(counts.unsqueeze(-1), total * slope, torch.zeros_like(total)).to(logits.dtype)


@callable_in_graph
class LogprobBackward(torch.autograd.Function):
    """The native backward, itself differentiable through a composition of torch's operators (create_graph)."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.rl_kernel_native.logprob_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits, target, _lse, _entropy, dlogprob, dlse, dentropy, temperature, kept_ids = inputs[:9]
        ctx.numbers = tuple(inputs[10:])
        ctx.has_kept = kept_ids is not None
        ctx.save_for_backward(logits, target, dlogprob, dlse, dentropy, temperature)
        ctx.save_for_forward(logits, target, dlogprob, dlse, dentropy, temperature)

    @staticmethod
    def backward(ctx: Any, ddlogits: Tensor) -> Any:
        composed, tensors = _composed_call(ctx)
        dx, *drows = pulled(composed, tensors, (ddlogits,))
        return dx, None, None, None, *drows, *(None,) * 10

    @staticmethod
    def jvp(ctx: Any, logits_t: Any, _target: Any, _lse: Any, _entropy: Any, *tangents: Any) -> Any:
        return pushed(*_composed_call(ctx), (logits_t, *tangents[:3]))[0]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return LogprobBackward.apply(*_batched(info, in_dims, inputs, tensors=8)), 0


def _composed_call(ctx: Any) -> tuple[Any, tuple[Any, ...]]:
    """The composed backward as a function of the logits and of (dlogprob, dlse, dentropy), and where it was called."""
    if ctx.has_kept:
        raise NotImplementedError("logprob: second derivatives with kept sets")
    logits, target, dlogprob, dlse, dentropy, temperature = ctx.saved_tensors
    arguments, _mode = _arguments((temperature, None, None, *ctx.numbers))

    def composed(x: Tensor, *rows: Any) -> tuple[Tensor]:
        return (_composed_backward(x, target, rows, arguments),)

    return composed, (logits, dlogprob, dlse, dentropy)


def _batched(info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...], tensors: int) -> list[Any]:
    """Inputs, the first of which are tensors, with the batch dimension first everywhere."""
    if isinstance(inputs[tensors], Tensor):
        raise NotImplementedError("logprob: vmap with kept sets")
    return [*batched(info, in_dims[:tensors], inputs[:tensors]), *inputs[tensors:]]
