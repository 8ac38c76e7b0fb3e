"""rope for torch tensors.

An eager call goes straight to the extension; with a gradient wanted, through one autograd.Function. Whatever traces or
transforms (torch.compile, FakeTensor and other modes, torch.func, subclasses) goes through rope_traced.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import _torch
from .._main_grad import is_asked_for
from .._native import module as _C
from .._torch import (
    PLAIN,
    Eager,
    is_compiling,
    is_direct,
    is_direct_gradient,
    is_grad_enabled,
    prepare,
    require_tensors,
    wants_grad,
)
from . import rope_traced as traced

__all__ = ["PLAIN", "is_compiling", "rope"]


def rope(
    q: Tensor, k: Any, cos: Any, sin: Any, position_ids: Any, interleaved: bool, partial_dim: Any,
    round_products: bool, mrope_sections: Any, head_axis: Any, transposed: bool,
) -> tuple[Any, Any]:  # fmt: skip
    inputs = (q, k, cos, sin, position_ids)
    options = (interleaved, partial_dim, round_products, mrope_sections, head_axis, transposed)
    traced.require_constants(wants_grad(cos), wants_grad(sin))
    direct = is_direct(*inputs)
    if direct and not wants_grad(q, k):
        _torch.device_type(q, "dq_out" if transposed else "q")
        prepare(q)
        result: tuple[Any, Any] = _C.rope(*inputs, *options, None, 0)
        return result
    if not direct:
        q_name, k_name = traced.names(transposed)
        required: dict[str, Any] = {q_name: q, "cos": cos, "sin": sin}
        require_tensors(**required, optional={k_name: k, "position_ids": position_ids})
        return traced.rope(*inputs, *options)
    return _Rope.run(*inputs, *options)


class _Rope(Eager):
    """Eager autograd. The old form of forward costs a third of what setup_context does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Any, cos: Tensor, sin: Tensor, position_ids: Any, *options: Any) -> Any:
        prepare(q)
        outputs = _C.rope(q, k, cos, sin, position_ids, *options, None, 0)
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.options = options
        ctx.dtype = q.dtype
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, dq_out: Any, dk_out: Any) -> Any:
        *options, transposed = ctx.options
        arguments = (*ctx.saved_tensors, *options, not transposed)
        wants_q, wants_k = ctx.needs_input_grad[:2]
        if dq_out is not None and dk_out is not None and wants_q and wants_k:
            wants_q, wants_k = (is_asked_for(edge[0]) for edge in ctx.next_functions[:2])
        dq_out, dk_out = dq_out if wants_q else None, dk_out if wants_k else None
        given = {n: g for n, g in zip(traced.names(True), (dq_out, dk_out), strict=True) if g is not None}
        # create_graph, a backward that has a backward, goes through the dispatcher, too.
        direct = not is_grad_enabled() and all(map(is_direct_gradient, given.values()))
        if given and not direct:
            require_tensors(**given)

        def rotate(dq_out: Tensor, dk_out: Any) -> tuple[Any, Any]:
            if not direct:
                return traced.rope(dq_out, dk_out, *arguments)
            prepare(dq_out)
            result: tuple[Any, Any] = _C.rope(dq_out, dk_out, *arguments, None, 0)
            return result

        return *traced.each(rotate, dq_out, dk_out, ctx.dtype), *(None,) * 9
