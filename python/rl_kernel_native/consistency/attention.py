"""The attention functions of stock models: torch's and transformers' own functions, wrapped so that probes see their
operands.

transformers looks attention up by name, so a probe needs no change to the model code.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.utils import is_flash_attn_2_available

from ..integrations.decoder import OBSERVER_ATTRIBUTE
from .errors import spelled

# ATTENTION_NAME and EAGER_NAME have no mask function in transformers, because this package builds their masks itself.
# flash-attn takes a key mask or offsets instead. FLASH_NAME does not contain "flash": for a name with this text,
# transformers would download kernels.
ATTENTION_NAME, EAGER_NAME, FLASH_NAME = "rlk_stock_sdpa", "rlk_stock_eager", "rlk_stock_fa"


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
    """The eager attention of the module's own file in transformers: products, an additive mask, a softmax.

    Args and returns: the same as for stock_attention.
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


def flash_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The functions of the package flash-attn, as transformers calls them.

    Args:
        query, key, value: the same as for stock_attention.
        attention_mask: [B, L], 1 for a real key, or None.
        kwargs: for a packed row, they include cu_seq_lens_q and max_length_q.
    Returns: the same as stock_attention.
    """
    return _observed(_flash, module, query, key, value, attention_mask, kwargs)


def _flash(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    packed = {
        name: kwargs[name]
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        if kwargs.get(name) is not None
    }
    attend: Any = _flash_attention_forward
    output = attend(
        *(x.transpose(1, 2) for x in (query, key, value)), mask, query_length=query.shape[2], is_causal=True,
        softmax_scale=kwargs.get("scaling"), attn_implementation="flash_attention_2", **packed,
    )  # fmt: skip
    return output, None


def why_no_flash(model: Any) -> str | None:
    """The requirement of flash_attention that is missing: the package, a GPU or a dtype; None if it can run."""
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed here: pip install flash-attn, beside a CUDA build of torch"
    weight = model.lm_head.weight
    if weight.device.type != "cuda":
        return f"flash-attn runs on a GPU, and the model is on {weight.device}: give {spelled('device', 'cuda')}"
    if weight.dtype not in (torch.bfloat16, torch.float16):
        cure = spelled("dtype", "bfloat16")
        return f"flash-attn takes bfloat16 and float16, and the model has {weight.dtype}: give {cure}"
    if not is_flash_attn_2_available():
        return "transformers takes flash-attn 2.3.3 or later, and finds another: pip install --upgrade flash-attn"
    return None


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
    """Sets a model's attention implementation while the context is open."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


AttentionInterface.register(ATTENTION_NAME, stock_attention)
AttentionInterface.register(EAGER_NAME, eager_attention)
AttentionInterface.register(FLASH_NAME, flash_attention)
AttentionMaskInterface.register(FLASH_NAME, flash_attention_mask)
