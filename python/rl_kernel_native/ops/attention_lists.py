"""The lists of an attention call, in the order in which every layer passes them on."""

from __future__ import annotations

from typing import Any

PLACES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "parents")  # arguments of every call
PAGES = ("block_table", "prefix_table", "prefix_lens", "group_offsets")  # forward only
NO_PAGES = (None,) * len(PAGES)
BESIDE_TREE = (*PLACES[:5], "block_table", "shared_prefix")  # arguments that a tree excludes


def out_shape(q: Any, v: Any) -> tuple[Any, ...]:
    """The shape of out: the shape of q with the last dimension of v."""
    return (*q.shape[:-1], v.shape[-1])


def lse_shape(q: Any) -> tuple[Any, ...]:
    """The shape [..., heads, tokens] of lse for q [..., tokens, heads, head_dim]."""
    return (*q.shape[:-3], q.shape[-2], q.shape[-3])
