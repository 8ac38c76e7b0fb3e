"""The attentions of stock models under test: torch's and transformers' own, with a place to look at their operands.

transformers looks attention up by name, so a probe needs no change to the model code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..integrations.decoder import OBSERVER_ATTRIBUTE

# No mask function is registered under this name: the masks of both sides are built here, never guessed from shapes.
ATTENTION_NAME, EAGER_NAME = "rlk_stock_sdpa", "rlk_stock_eager"


def stock_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch scaled_dot_product_attention as transformers calls it.

    Args:
        query: [B, num_q_heads, T, head_dim]; key, value: [B, num_kv_heads, L, head_dim].
        attention_mask: bool [B or 1, 1, T, L], or None for causal (T > 1) or "all keys" (T = 1).

    Returns:
        ([B, T, num_q_heads, head_dim], None)
    """
    return _observed(sdpa_attention_forward, module, query, key, value, attention_mask, kwargs)


def eager_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The eager attention of the module's own file in transformers: products, a mask that is added, a softmax.

    Args and returns: as stock_attention.
    """
    attend = sys.modules[_class_of(module).__module__].eager_attention_forward
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None and queries > 1:
        ones = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
        attention_mask = ones.tril(keys - queries)[None, None]
    if attention_mask is not None:
        least = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, least)
    kwargs.setdefault("dropout", 0.0)
    return _observed(attend, module, query, key, value, attention_mask, kwargs)


def _class_of(module: torch.nn.Module) -> type:
    return next(kind for kind in type(module).__mro__ if kind.__module__.startswith("transformers.models."))


def _observed(
    attend: Any,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    observer = getattr(module, OBSERVER_ATTRIBUTE, None)
    if observer is not None:
        query, key = observer.operands(query, key)
    output, weights = attend(module, query, key, value, mask, **kwargs)
    return (output if observer is None else observer.output(output)), weights


@contextmanager
def attending_by(model: Any, name: str) -> Iterator[None]:
    """The attention implementation of a model for as long as the context is open."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


AttentionInterface.register(ATTENTION_NAME, stock_attention)
AttentionInterface.register(EAGER_NAME, eager_attention)
