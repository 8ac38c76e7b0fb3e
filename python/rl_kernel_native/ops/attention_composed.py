"""Attention by torch's own operators in float64, from which autograd derives forward-mode and second derivatives. This
code is built for correctness, not for speed, and needs memory for every pair of a query and a key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention_lists import lse_shape, out_shape


def _numbers(x: Tensor, cu: Any, used: Any, leftpad: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each token's sequence, each token's number in its sequence, and each sequence's count of tokens in use.

    A token that is not in use has a negative number, or a number that is at least the count. For padded tokens, the
    first two results are [batch, tokens]; for packed tokens, they are [1, tokens].
    """
    if cu is None:
        batch, length = x.shape[:2]
        sequence = torch.arange(batch, device=x.device)[:, None].expand(batch, length)
        number = torch.arange(length, device=x.device).expand(batch, length)
        count = torch.full((batch,), length, device=x.device)
    else:
        offsets, tokens = cu.long(), torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(offsets[1:].contiguous(), tokens, right=True)[None]
        number = tokens - offsets[sequence.clamp(max=max(len(offsets) - 2, 0))]
        count = offsets[1:] - offsets[:-1]
    if leftpad is not None:
        number, count = number - leftpad.long()[:, None], count - leftpad.long()
    if used is not None:
        count = used.long()
    return sequence, number, count


def _paths(parents: Tensor) -> Tensor:
    """Returns a matrix [segments, segments]: element [i, j] tells whether segment j lies on the path of segment i. A
    path is a segment with its ancestors."""
    segments = torch.arange(len(parents), device=parents.device)
    path = (segments == segments[:, None]) | (segments == parents[:, None])
    for _ in range(len(parents).bit_length()):  # each product doubles the length of paths
        path = (path.double() @ path.double()) > 0
    return path


def _paged(k: Tensor, table: Tensor, prefix_table: Any, prefix_lens: Any, group_offsets: Any) -> tuple[Tensor, Tensor]:
    """Returns, for each key of a sequence, its page and its place in the page."""
    size = k.shape[1]
    own = torch.arange(size * table.shape[1], device=k.device).expand(table.shape[0], -1)
    page = table.long().repeat_interleave(size, 1)
    place = own % size
    if prefix_table is not None and prefix_table.shape[0]:
        b, of = torch.arange(table.shape[0], device=k.device), group_offsets.long()
        group = torch.searchsorted(of[1:].contiguous(), b, right=True)
        lens = torch.where(group < len(prefix_lens), prefix_lens.long()[group.clamp(max=len(prefix_lens) - 1)], 0)
        j = torch.arange(size * (prefix_table.shape[1] + table.shape[1]), device=k.device)[None]
        shares, number = j < lens[:, None], j - lens[:, None]
        shared = prefix_table.long()[group.clamp(max=len(prefix_lens) - 1)].repeat_interleave(size, 1)
        shared, page = (torch.nn.functional.pad(t, (0, j.shape[1] - t.shape[1])) for t in (shared, page))
        own = number.clamp(0, max(own.shape[1] - 1, 0))
        page = torch.where(shares, shared, page.gather(1, own))
        place = torch.where(shares, j % size, own % size)
    return page.clamp(0, max(k.shape[0] - 1, 0)), place


def _scene(q: Tensor, k: Tensor, v: Tensor, lists: tuple[Any, ...], how: tuple[Any, ...]) -> Any:
    """Returns q [b, i, kv_heads, group, d], k and v [b, j, kv_heads, d] in float64, then flags and the scale. The flags
    [b, 1, 1, i, j] tell which query sees which key."""
    cu_q, cu_k, used_q, used_k, leftpad, parents, *pages = lists
    causal, window_size, softmax_scale = how[:3]
    if pages[0] is not None:
        page, place = _paged(k, *pages)
        k, v = (t[page, place] for t in (k, v))
    of_q, of_k = _numbers(q, cu_q, used_q, None), _numbers(k, cu_k, used_k, leftpad)
    if cu_q is not None or cu_k is not None:  # all tokens form one row of the batch
        of_q, of_k = ((s.reshape(1, -1), n.reshape(1, -1), c) for s, n, c in (of_q, of_k))
        q, k, v = (t.reshape(1, -1, *t.shape[-2:]) for t in (q, k, v))
    (seq_q, i, queries), (seq_k, j, keys) = of_q, of_k
    b, of = seq_q.clamp(max=max(len(queries) - 1, 0)), seq_k.clamp(max=max(len(keys) - 1, 0))
    alike = seq_q[:, :, None] == seq_k[:, None, :]
    first: Any = 0
    if parents is not None and len(queries):
        path = _paths(parents)
        alike = path[b[:, :, None], of[:, None, :]]
        first = ((path.double() @ queries.double()).long() - queries)[b]
    sees = alike & ((i >= 0) & (i < queries[b]))[:, :, None]
    sees = sees & ((j >= 0) & (j < keys[of]))[:, None, :]
    if causal:
        j = j + first  # a tree has the same segments for q and k
        behind = (keys[b] - queries[b] + i + first)[:, :, None] - j[:, None, :]
        sees = sees & (behind >= 0)
        sees = sees if window_size is None else sees & (behind < window_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    # Elements that attention does not read may hold any value, so they become 0.
    x = _where(sees.any(2), q.double()).unflatten(2, (k.shape[2], q.shape[2] // k.shape[2]))
    seen = sees.any(1)
    return x, _where(seen, k.double()), _where(seen, v.double()), sees[:, None, None], scale


def _where(used: Tensor, x: Tensor) -> Tensor:
    return torch.where(used[:, :, None, None], x, torch.zeros_like(x))


def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Any, lists: tuple[Any, ...], how: tuple[Any, ...]) -> Any:
    """Returns out and lse."""
    x, y, z, sees, scale = _scene(q, k, v, lists, how)
    s = torch.einsum("bihgd,bjhd->bhgij", x, y) * scale
    if how[3] is not None:
        s = how[3] * torch.tanh(s / how[3])
    any_key = sees.any(-1, keepdim=True)
    s = torch.where(sees, s, torch.where(any_key, float("-inf"), 0.0))
    lse = torch.logsumexp(s, -1, keepdim=True) if s.shape[-1] else s.sum(-1, keepdim=True)
    if sinks is not None:
        u = sinks.double().view(1, *x.shape[2:4], 1, 1)
        lse = torch.where(any_key, torch.logaddexp(lse, u), lse)
    p = torch.where(sees, torch.exp(s - lse), torch.zeros_like(s))
    out = torch.einsum("bhgij,bjhd->bihgd", p, z)
    out = torch.where(
        any_key[:, 0, 0, ..., None, None], out, torch.zeros_like(out)
    )  # dout of a query that sees no key may hold any value
    lse = torch.where(any_key, lse, float("-inf")).squeeze(-1).flatten(1, 2)
    if lists[0] is None and lists[1] is not None:  # lse is [1, heads, batch * tokens]
        lse = lse[0].unflatten(1, (q.shape[0], q.shape[1])).transpose(0, 1)
    return out.to(q.dtype).reshape(out_shape(q, v)), lse.reshape(lse_shape(q)).float()
