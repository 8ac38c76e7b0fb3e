"""Shapes and dtypes of arrays over tokens where no memory is at hand, in the words of the extension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._shapes import COPY, check_end, dtype_name, is_static

_MASKS = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32)


def check_first(tokens: Tensor, name: str, cu_seqlens: Any) -> Any:
    """The array that the others are like. Returns: the number of sequences."""
    if tokens.dtype != torch.float32:
        raise TypeError(f"{name}: expected dtype float32, got {dtype_name(tokens.dtype)}")
    sequences = _check_sequences(tokens, name, cu_seqlens)
    _check_stride(tokens, name)
    return sequences


def check_first_mask(mask: Tensor, cu_seqlens: Any) -> Any:
    """The same where it is the mask."""
    check_mask(mask, mask, "mask")
    return _check_sequences(mask, "mask", cu_seqlens)


def _check_sequences(tokens: Tensor, name: str, cu_seqlens: Any) -> Any:
    packed = cu_seqlens is not None
    if tokens.dim() != 1 and (packed or tokens.dim() != 2):
        wanted = "[num_tokens] (with cu_seqlens)" if packed else "[num_sequences, num_tokens] or [num_tokens]"
        raise ValueError(f"{name}: expected shape {wanted}, got {list(tokens.shape)}")
    if packed:
        _check_cuts(cu_seqlens, tokens.shape[0])
    return cu_seqlens.shape[0] - 1 if packed else tokens.shape[0] if tokens.dim() == 2 else 1


def _check_cuts(cu_seqlens: Tensor, num_tokens: Any) -> None:
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected dtype int32 or int64, got {dtype_name(cu_seqlens.dtype)}")
    is_vector = cu_seqlens.dim() == 1 and cu_seqlens.shape[0] >= 1
    if not is_vector or (is_static(cu_seqlens) and cu_seqlens.shape[0] > 1 and cu_seqlens.stride(0) != 1):
        shape = list(cu_seqlens.shape)
        raise ValueError(f"cu_seqlens: expected shape [num_sequences + 1], contiguous, got {shape}")
    check_end(cu_seqlens, "cu_seqlens", num_tokens, "the number of tokens")


def _check_stride(tensor: Tensor, name: str, expanded: bool = False) -> None:
    """``expanded``: whether a token's value may be its sequence's."""
    if not is_static(tensor) or tensor.shape[-1] <= 1 or tensor.numel() == 0:
        return
    stride = tensor.stride(-1)
    if stride != 1 and not (expanded and stride == 0):
        raise ValueError(f"{name}: expected contiguous tokens (stride 1), got stride {stride}{COPY}")


def check_mask(mask: Any, like: Tensor, whose: str) -> None:
    if mask is None:
        return
    if mask.dtype not in _MASKS:
        raise TypeError(f"mask: expected dtype bool, uint8, int32, int64 or float32, got {dtype_name(mask.dtype)}")
    if tuple(mask.shape) != tuple(like.shape):
        raise ValueError(f"mask: expected shape {list(like.shape)} (that of {whose}), got {list(mask.shape)}")
    if mask.dim():
        _check_stride(mask, "mask")


def check_tokens(tensor: Any, name: str, like: Tensor, whose: str, sequences: Any = None) -> None:
    """``sequences``: their number, where the array may have one value each."""
    if tensor is None:
        return
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name}: expected dtype float32, got {dtype_name(tensor.dtype)}")
    shape = tuple(tensor.shape)
    if shape == tuple(like.shape):
        _check_stride(tensor, name, expanded=sequences is not None and tensor.dim() == 2)
        return
    if sequences is not None and shape[:1] == (sequences,) and (len(shape) == 1 or shape[1:] == (1,)):
        return
    tokens = tuple(like.shape)
    one = f"{sequences}, 1" if is_static(like) and tokens == (sequences,) else f"{sequences}"
    more = "" if sequences is None else f" or [{one}]"
    also = "" if sequences is None else ", or one a sequence"
    raise ValueError(
        f"{name}: expected shape {list(like.shape)}{more} (that of {whose}{also}), got {list(tensor.shape)}"
    )
