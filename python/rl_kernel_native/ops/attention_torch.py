"""attention for torch tensors.

An eager call goes directly to the extension, or through one autograd.Function if a gradient is wanted. Whatever traces
or transforms (torch.compile, FakeTensor and other modes, torch.func, subclasses) goes through attention_traced.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arithmetic import AS_CALLED, IEEE, product_unit, resolve_exp, unresolved_exp
from .._main_grad import is_asked_for
from .._native import module as _C
from .._run import applied
from .._torch import (
    PLAIN,  # noqa: F401 - for attention's own short way
    Eager,
    autocast,
    device_type,
    gradient,
    is_autocasting,
    is_compiling,
    is_direct,
    is_direct_gradient,
    is_grad_enabled,
    is_read_by_dynamo,  # noqa: F401 - likewise
    prepare,
    require_tensors,
    wants_grad,
)
from . import attention_traced as traced
from .attention_lists import NO_PAGES, PAGES, PLACES, list_names


def _numbers(exp: str | None, q: Tensor, direct: bool) -> tuple[int, int]:
    """The numbers of exp and of the unit. float32 has ieee products in any unit."""
    if direct or not is_compiling():
        return resolve_exp(exp, device_type(q, "q")), product_unit()
    return unresolved_exp(exp), IEEE if q.dtype is torch.float32 else AS_CALLED


def attention(
    q: Tensor, k: Any, v: Any, sinks: Any, lists: tuple[Any, ...], options: tuple[Any, ...], exp: str | None,
    return_lse: bool,
) -> tuple[Any, Any]:  # fmt: skip
    if is_autocasting():
        q, k, v = autocast(q, k, v)
    direct = is_direct(q, k, v, sinks, *lists)
    mode, unit = _numbers(exp, q, direct)
    differentiable = wants_grad(q, k, v, sinks)
    traced.require_no_pages(lists[6], differentiable)
    if direct and not differentiable:
        prepare(q)
        arrays = (q, k, v, sinks, *lists)
        result: tuple[Any, Any] = _C.attention(arrays, options, mode, unit, return_lse, None, 0)
        return result
    if not direct:
        names = list_names(PLACES + PAGES, lists)
        require_tensors(q=q, k=k, v=v, optional={"sinks": sinks, **dict(zip(names, lists, strict=True))})
        out, lse = applied(traced.FORWARD, (q, k, v, sinks, *lists), (*options, mode, unit))
        return out, lse
    return _Attention.run(q, k, v, sinks, *lists[:6], *options, mode, unit)


class _Attention(Eager):
    """Eager autograd. A forward that takes ctx costs a third of the time of one with setup_context."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *rest: Any) -> Any:
        options, lists = (rest[6:10], *rest[10:]), rest[:6]
        prepare(q)
        out, lse = _C.attention((q, k, v, sinks, *lists, *NO_PAGES), *options, True, None, 0)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *lists)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        q, k, v, out, lse, *rest = ctx.saved_tensors  # sinks and lists
        needs = ctx.needs_input_grad[:4]
        if dout is None and dlse is None:
            return (None,) * 16
        edges = ctx.next_functions[: 4 if needs[3] else 3]  # tensors alone: None sinks have no edge
        asked = [n and is_asked_for(edge[0]) for n, edge in zip(needs, edges, strict=False)] + [False]
        wants = asked[0], asked[1] or asked[2], asked[3]
        given = {name: g for name, g in (("dout", dout), ("dlse", dlse)) if g is not None}
        # With create_graph, backward itself is differentiated, so the call also goes through the dispatcher.
        direct = not is_grad_enabled() and all(map(is_direct_gradient, given.values()))
        if not direct:
            require_tensors(**given)
        arrays = (q, k, v, *rest, *NO_PAGES)
        if direct:
            prepare(q)
            dout, dlse = traced.incoming(dout, dlse, out)
            found = _C.attention_backward(dout, dlse, out, lse, arrays, *ctx.options, *wants, None, 0)
        else:
            options, *how = ctx.options
            found = traced.gradients(applied, (dout, dlse), (out, lse, *arrays), (*options, *how), asked[:4])
        return *(g if n else None for g, n in zip(found, needs, strict=True)), *(None,) * 12


def backward(
    dout: Any, dlse: Any, q: Tensor, k: Any, v: Any, out: Any, lse: Any, sinks: Any, lists: tuple[Any, ...],
    options: tuple[Any, ...], exp: str | None,
) -> tuple[Any, ...]:  # fmt: skip
    inputs = (dout, dlse, q, k, v, out, lse, sinks, *lists)
    wants = (True, True, sinks is not None)
    direct = is_direct(*inputs)
    mode, unit = _numbers(exp, q, direct)
    if direct and not wants_grad(*inputs):
        prepare(q)
        arrays = (q, k, v, sinks, *lists, *NO_PAGES)
        how = (options, mode, unit)
        found: tuple[Any, ...] = _C.attention_backward(dout, dlse, out, lse, arrays, *how, *wants, None, 0)
        return found
    optional = {"dlse": dlse, "sinks": sinks, **dict(zip(list_names(PLACES, lists), lists, strict=True))}
    require_tensors(q=q, k=k, v=v, dout=dout, out=out, lse=lse, optional=optional)
    inputs = (gradient(dout, q.dtype, "dout", dims=4), *inputs[1:])
    return applied(traced.BACKWARD, inputs, (*options, mode, unit, *wants))
