"""logprob for torch tensors.

An eager call goes directly to the extension, or through one autograd.Function if a gradient is wanted. A call under a
trace or a transform (torch.compile, FakeTensor and other modes, torch.func, subclasses) goes through logprob_traced.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._arithmetic import resolve_exp, unresolved_exp
from .._dispatch import count_write
from .._native import module as _C
from .._run import applied, traced
from .._torch import (
    Eager,
    device_type,
    is_compiling,
    is_direct,
    is_direct_gradient,
    is_grad_enabled,
    prepare,
    require_tensors,
)
from .logprob_traced import BACKWARD, FORWARD, split


def logprob(logits: Tensor, target: Tensor, arguments: tuple[Any, ...], exp: str | None, returns: int, out: Any) -> Any:
    direct = is_direct(logits)
    mode = resolve_exp(exp, device_type(logits, "logits")) if direct or not is_compiling() else unresolved_exp(exp)
    wants_grad = logits.requires_grad and is_grad_enabled()
    if type(arguments[0]) is not float:
        check_temperature(arguments[0])
    if out is not None:
        _check_out(out, direct, wants_grad)
    if not direct:
        if not isinstance(target, Tensor):
            raise TypeError(
                f"target: expected a torch.Tensor, got {type(target).__name__}; for one row, torch.tensor(3)"
            )
        rows, how = split(arguments, mode, returns)
        return _selected(traced(FORWARD, (logits, target, *rows), how), returns)
    if wants_grad:
        return _selected(_Logprob.run(logits, target, arguments, mode, returns), returns)
    prepare(logits)
    result = _C.logprob(logits, target, arguments, mode, returns, out, None, 0)
    if out is not None:
        for array in out:
            count_write(array)
    return result


def check_temperature(temperature: Any) -> None:
    if isinstance(temperature, Tensor) and temperature.requires_grad and is_grad_enabled():
        raise ValueError("temperature: has no gradient here; pass temperature.detach()")


def _check_out(out: tuple[Any, ...], direct: bool, wants_grad: bool) -> None:
    if wants_grad or any(isinstance(o, Tensor) and o.requires_grad for o in out):
        raise ValueError("out: cannot be given where a gradient is wanted; call under torch.no_grad()")
    if not direct:
        raise ValueError("out: cannot be given under torch.compile, torch.func or a dispatch mode")


def _selected(outputs: tuple[Any, ...], returns: int) -> Any:
    return outputs[0] if returns == 1 else tuple(o if returns >> i & 1 else None for i, o in enumerate(outputs))


class _Logprob(Eager):
    """Eager autograd. A forward that takes ctx takes a third of the time of a forward with setup_context."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, arguments: tuple[Any, ...], mode: int, returns: int) -> Any:
        prepare(logits)
        outputs = _C.logprob(logits, target, arguments, mode, returns | 2, None, None, 0)
        temperature, *numbers, kept_ids, kept_offsets = arguments
        is_tensor = isinstance(temperature, Tensor)
        given = temperature if is_tensor else None
        ctx.save_for_backward(logits, target, outputs[1], outputs[2], given, kept_ids, kept_offsets)
        ctx.numbers = (None if is_tensor else temperature, *numbers)
        ctx.mode = mode
        ctx.mark_non_differentiable(*(o for o in outputs[3:] if o is not None))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, target, lse, entropy, temperature, kept_ids, kept_offsets = ctx.saved_tensors
        value, *numbers = ctx.numbers
        arguments = (value if temperature is None else temperature, *numbers, kept_ids, kept_offsets)
        dlogprob, dlse, dentropy = gradients[:3]
        if dlogprob is None and dlse is None and dentropy is None:
            return (None,) * 5
        dlogprob, dlse, dentropy = (g if g is None else g.resolve_neg() for g in (dlogprob, dlse, dentropy))
        rows = (lse, entropy, dlogprob, dlse, dentropy)
        # The dispatcher serves create_graph, a backward with its own backward, and gradients that only the dispatcher
        # understands.
        if is_grad_enabled() or not all(g is None or is_direct_gradient(g) for g in rows[2:]):
            of_logits, numbers = split(arguments, ctx.mode)
            found = applied(BACKWARD, (logits, target, *rows, *of_logits), numbers)
            return found[0], None, None, None, None
        prepare(logits)
        dlogits = _C.logprob_backward(logits, target, arguments, ctx.mode, 0, None, rows, None, None, 0)
        return dlogits, None, None, None, None


def partial(
    logits: Tensor, target: Tensor, arguments: tuple[Any, ...], exp: str | None, vocab_start: int, vocab_size: int
) -> Tensor:
    if logits.requires_grad and is_grad_enabled():
        raise ValueError(
            "logits: logprob_partial has no autograd, its ranks exchange statistics in between; detach the shard and "
            "call logprob_backward with the merged lse"
        )
    _prepare_direct(logits, "logits")
    mode = resolve_exp(exp, device_type(logits, "logits"))
    return _C.logprob_partial(logits.detach(), target, arguments, mode, vocab_start, vocab_size, None, 0)


def merge(stats: Tensor, temperature: Any, returns: int) -> Any:
    _prepare_direct(stats, "stats")
    return _C.logprob_merge(stats.detach(), temperature, returns, 0.0, 0, None, 0)


def backward(
    logits: Tensor, target: Tensor, arguments: tuple[Any, ...], exp: str | None, shard: tuple[int, int | None],
    rows: tuple[Any, ...], out: Tensor | None,
) -> Tensor:  # fmt: skip
    _prepare_direct(logits, "logits")
    mode = resolve_exp(exp, device_type(logits, "logits"))
    rows = tuple(r.detach() if isinstance(r, Tensor) else r for r in rows)
    if out is not None and not isinstance(out, Tensor):
        raise TypeError(f"out: expected a torch.Tensor, got {type(out).__name__}")
    given = None if out is None else out.detach()
    result = _C.logprob_backward(logits.detach(), target, arguments, mode, *shard, rows, given, None, 0)
    if out is None:
        return result
    count_write(out)
    return out


def _prepare_direct(tensor: Tensor, name: str) -> None:
    named: Any = {name: tensor}
    require_tensors(**named)
    if not is_direct(tensor):
        raise TypeError(f"{name}: expected a plain torch.Tensor in eager mode, got {type(tensor).__name__} or a trace")
    prepare(tensor)
