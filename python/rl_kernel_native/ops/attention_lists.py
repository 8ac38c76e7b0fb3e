"""Names of the arrays that say which tokens an attention call reads, in the order in which Python, bindings and kernels
pass them."""

from __future__ import annotations

from typing import Any

PLACES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "parents")  # in every call
PAGES = ("block_table", "prefix_table", "prefix_lens", "group_offsets")  # in forward calls only
NO_PAGES = (None,) * len(PAGES)
BESIDE_TREE = (*PLACES[:5], "block_table", "shared_prefix")  # not allowed with a tree


def out_shape(q: Any, v: Any) -> tuple[Any, ...]:
    """Returns the shape of out: the shape of q with the last dimension of v."""
    return (*q.shape[:-1], v.shape[-1])


def lse_shape(q: Any) -> tuple[Any, ...]:
    """Returns the shape [..., heads, tokens] of lse for q [..., tokens, heads, head_dim]."""
    return (*q.shape[:-3], q.shape[-2], q.shape[-3])
