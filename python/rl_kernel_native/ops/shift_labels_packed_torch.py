"""Labels and masks for torch tensors: an eager call goes straight to the extension; whatever traces goes through the
registered operators. Integers have no gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._native import module as _C
from .._register import define, fake, implement
from .._shapes import check_columns, check_first, check_mask, check_offsets, dtype_name, is_static
from .._torch import is_direct, memory, prepare, require_tensors

__all__ = ["loss_mask_from_spans", "require_tensors", "shift_labels_packed", "tool_mask"]

define(
    "shift_labels_packed(Tensor ids, Tensor cu_seqlens, Tensor? mask, SymInt cp_rank, SymInt cp_size, bool zigzag, "
    "SymInt ignore_index) -> Tensor"
)
define("loss_mask_from_spans(Tensor spans, Tensor span_offsets, Tensor? cu_seqlens, SymInt num_tokens) -> Tensor")
define("tool_mask(Tensor ids, int[] begin, int[] end, Tensor? cu_seqlens, bool include_end) -> Tensor")
_ops = torch.ops.rl_kernel_native


def shift_labels_packed(ids: Tensor, cu_seqlens: Any, mask: Any, *how: Any) -> Any:
    if is_direct(ids, cu_seqlens, mask):
        _torch.device_type(ids, "ids")
        prepare(ids)
        return _C.shift_labels_packed(ids, cu_seqlens, mask, *how, None, 0)
    require_tensors(ids=ids, cu_seqlens=cu_seqlens, optional={"mask": mask})
    return _ops.shift_labels_packed(ids, cu_seqlens, mask, *how)


def loss_mask_from_spans(spans: Tensor, span_offsets: Any, cu_seqlens: Any, num_tokens: int) -> Any:
    if is_direct(spans, span_offsets, cu_seqlens):
        _torch.device_type(spans, "spans")
        prepare(spans)
        return _C.loss_mask_from_spans(spans, span_offsets, cu_seqlens, num_tokens, None, 0)
    require_tensors(spans=spans, span_offsets=span_offsets, optional={"cu_seqlens": cu_seqlens})
    return _ops.loss_mask_from_spans(spans, span_offsets, cu_seqlens, num_tokens)


def tool_mask(ids: Tensor, begin: list[int], end: list[int], cu_seqlens: Any, include_end: bool) -> Any:
    if is_direct(ids, cu_seqlens):
        _torch.device_type(ids, "ids")
        prepare(ids)
        return _C.tool_mask(ids, begin, end, cu_seqlens, include_end, None, 0)
    require_tensors(ids=ids, optional={"cu_seqlens": cu_seqlens})
    return _ops.tool_mask(ids, begin, end, cu_seqlens, include_end)


def _labels_kernel(ids: Tensor, cu_seqlens: Tensor, mask: Any, *how: Any) -> Tensor:
    prepare(ids)
    return _C.shift_labels_packed(memory(ids), memory(cu_seqlens), memory(mask), *how, None, 0)


def _spans_kernel(spans: Tensor, span_offsets: Tensor, cu_seqlens: Any, num_tokens: int) -> Tensor:
    prepare(spans)
    return _C.loss_mask_from_spans(memory(spans), memory(span_offsets), memory(cu_seqlens), num_tokens, None, 0)


def _turns_kernel(ids: Tensor, begin: Any, end: Any, cu_seqlens: Any, include_end: bool) -> Tensor:
    prepare(ids)
    return _C.tool_mask(memory(ids), list(begin), list(end), memory(cu_seqlens), include_end, None, 0)


implement("shift_labels_packed", _labels_kernel)
implement("loss_mask_from_spans", _spans_kernel)
implement("tool_mask", _turns_kernel)


def _check_integers(tensor: Tensor, name: str) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected dtype int32 or int64, got {dtype_name(tensor.dtype)}")


@fake("shift_labels_packed")
def _labels_fake(
    ids: Tensor, cu_seqlens: Tensor, mask: Any, cp_rank: int, cp_size: int, _zigzag: bool, ignore_index: int
) -> Tensor:
    _check_integers(ids, "ids")
    if ids.dim() != 1:
        raise ValueError(f"ids: expected shape [num_tokens], got {list(ids.shape)}")
    check_columns(ids, "ids")
    check_offsets(cu_seqlens)
    check_mask(mask, ids.shape, "ids")
    if not 1 <= cp_size < 1 << 20:
        raise ValueError(f"cp_size: expected a number in [1, 2^20), got {cp_size}")
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank: expected a number in [0, {cp_size}), got {cp_rank}")
    if is_static(ids) and ids.shape[0] % cp_size:
        raise ValueError(
            f"ids: expected a number of tokens that is a multiple of {cp_size} (cp_size), got {ids.shape[0]}; pad them"
        )
    if ids.dtype == torch.int32 and not -(1 << 31) <= ignore_index < 1 << 31:
        raise ValueError(f"ignore_index: expected a number that int32 holds, got {ignore_index}")
    return ids.new_empty(ids.shape[0] // cp_size)


@fake("loss_mask_from_spans")
def _spans_fake(spans: Tensor, span_offsets: Tensor, cu_seqlens: Any, num_tokens: Any) -> Tensor:
    _check_integers(spans, "spans")
    if spans.dim() != 2 or (is_static(spans) and spans.shape[1] != 2):
        raise ValueError(f"spans: expected a contiguous array of shape [num_spans, 2], got {list(spans.shape)}")
    _check_integers(span_offsets, "span_offsets")
    check_offsets(cu_seqlens)
    known = cu_seqlens is not None and is_static(cu_seqlens) and is_static(span_offsets)
    if known and tuple(span_offsets.shape) != tuple(cu_seqlens.shape):
        wanted = list(cu_seqlens.shape)
        raise ValueError(f"span_offsets: expected a contiguous array of shape {wanted}, got {list(span_offsets.shape)}")
    shape = [num_tokens] if cu_seqlens is not None else [span_offsets.shape[0] - 1, num_tokens]
    return spans.new_empty(shape, dtype=torch.bool)


@fake("tool_mask")
def _turns_fake(ids: Tensor, begin: Any, end: Any, cu_seqlens: Any, include_end: bool) -> Tensor:
    check_first(ids, "ids", cu_seqlens, (torch.int32, torch.int64))
    return ids.new_empty(ids.shape, dtype=torch.bool)
