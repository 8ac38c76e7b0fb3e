"""main_grad: memory to which backward adds the gradient of a weight. This module decides which buffers are allowed, and
when backward writes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._native import module as _C
from ._torch import DTYPES, functorch_active, is_batched, is_compiling, is_grad_enabled, require_dense


def check(main_grad: Any, weight: Any, **operands: Any) -> None:
    """Refuses a main_grad that a forward cannot accept. ``operands`` are the forward's other arguments: their memory
    must not overlap main_grad, because backward may read them after it has written main_grad. A weight that is not a
    tensor passes, because the extension refuses it."""
    if not isinstance(main_grad, Tensor):
        raise TypeError(f"main_grad: expected a torch.Tensor, got {type(main_grad).__name__}")
    if is_compiling() or functorch_active():
        raise ValueError(
            "main_grad: cannot be given under torch.compile or torch.func, whose backward may write nothing"
        )
    if main_grad.requires_grad:
        raise ValueError("main_grad: is memory that backward adds to and has no gradient; pass main_grad.detach()")
    if not isinstance(weight, Tensor):
        return
    if is_grad_enabled() and not weight.requires_grad:
        raise ValueError("main_grad: weight requires no gradient, so nothing would be added")
    if type(main_grad).__name__ == "DTensor":
        raise TypeError("main_grad: expected a local tensor, got a DTensor; pass main_grad.to_local()")
    for name, tensor in (("main_grad", main_grad), ("weight", weight), *operands.items()):
        if isinstance(tensor, Tensor):
            require_dense(tensor, name)
    if main_grad.dtype != torch.float32:
        raise TypeError(f"main_grad: expected dtype float32, got {main_grad.dtype}")
    if main_grad.shape != weight.shape:
        raise ValueError(
            f"main_grad: expected shape {list(weight.shape)} (that of weight), got {list(main_grad.shape)}"
        )
    if main_grad.device != weight.device:
        raise ValueError(f"main_grad: expected device {weight.device} (that of weight), got {main_grad.device}")
    _C.check_main_grad(main_grad, {"weight": weight, **operands})


def check_weight_grad(weight: Any, code: int, main_grad: Any) -> Any:
    """The dtype in which backward returns the gradient of weight."""
    if code < 0 or not isinstance(weight, Tensor):
        return weight.dtype if isinstance(weight, Tensor) else None
    dtype = DTYPES[code]
    if main_grad is not None:
        raise ValueError("weight_grad_dtype: main_grad takes the gradient, in float32; give one of the two")
    if dtype == weight.dtype:
        return dtype
    if dtype != torch.float32:
        raise TypeError(f"weight_grad_dtype: expected float32 or {weight.dtype} (that of weight), got {dtype}")
    if is_compiling() or functorch_active():
        raise ValueError("weight_grad_dtype: cannot differ from weight's dtype under torch.compile or torch.func")
    if weight.requires_grad and not (weight.is_leaf and getattr(weight, "grad_dtype", weight.dtype) in (None, dtype)):
        how = (
            "set weight.grad_dtype = torch.float32 on the parameter first"
            if hasattr(Tensor, "grad_dtype")
            else f"torch {torch.__version__} has no Tensor.grad_dtype to change that"
        )
        raise ValueError(
            f"weight_grad_dtype: torch would round the gradient to {weight.dtype} again; {how}, or give main_grad"
        )
    return dtype


def is_asked_for(node: Any, main_grad: Any = None) -> bool:
    """Whether the running backward wants the gradient of a node of ``ctx.next_functions``, which has one node per input
    tensor. ``needs_input_grad`` says only what forward knew; backward(inputs=...) and torch.autograd.grad may ask for
    fewer gradients. For a leaf that torch.autograd.grad asks for, torch raises an exception instead of an answer."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # the node is a leaf whose gradient torch.autograd.grad returns
        if main_grad is not None:
            raise ValueError(
                "main_grad: takes the gradient of weight, so torch.autograd.grad cannot return it; call backward"
            ) from None
        return True


def are_all_asked_for(ctx: Any) -> bool:
    """Whether the running backward wants every gradient that an input needs, as ``backward()`` does."""
    try:
        for node, _ in ctx.next_functions:
            if node is not None and not torch._C._will_engine_execute_node(node):
                return False
    except RuntimeError:  # the node is such a leaf, as in is_asked_for()
        return False
    return True


def refuse_create_graph(main_grad: Tensor | None) -> None:
    """Refuses create_graph in a backward with a main_grad, because the second backward would add its part to
    ``weight.grad``."""
    if main_grad is not None and is_grad_enabled():
        raise ValueError("main_grad: a gradient that is added to it has no derivative; backward without create_graph")


def require_addable(dy: Tensor, main_grad: Tensor) -> None:
    """Checks main_grad before the dispatcher adds a gradient to it."""
    refuse_create_graph(main_grad)
    if is_batched(dy):
        raise ValueError("main_grad: a batch of gradients (vmap, is_grads_batched) cannot be added to it")
