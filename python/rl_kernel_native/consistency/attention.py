"""The attention entry of the stock models under test: torch's own attention, with a place to look at its operands.

transformers looks attention up by name, so a probe needs no change to the model code.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..integrations.decoder import OBSERVER_ATTRIBUTE

# No mask function is registered under this name: the masks of both sides are built here, never guessed from shapes.
ATTENTION_NAME = "rlk_stock_sdpa"


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
    output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    observer = getattr(module, OBSERVER_ATTRIBUTE, None)
    if observer is not None:
        observer(module, query, key, output)
    return output, weights


AttentionInterface.register(ATTENTION_NAME, stock_attention)
