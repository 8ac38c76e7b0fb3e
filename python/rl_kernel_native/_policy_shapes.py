"""What fake kernels ask of tokens of padded or packed sequences, in the words of the extension's TokenArguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._shapes import dtype_name, is_static


def check_first(tensor: Tensor, name: str, cu_seqlens: Any) -> int:
    """The argument that says what a batch is; the number of its sequences."""
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name}: expected dtype float32, got {dtype_name(tensor.dtype)}")
    packed = cu_seqlens is not None
    if tensor.dim() != 1 and (packed or tensor.dim() != 2):
        wanted = "[num_tokens] (with cu_seqlens)" if packed else "[num_sequences, num_tokens] or [num_tokens]"
        raise ValueError(f"{name}: expected shape {wanted}, got {list(tensor.shape)}")
    if packed and cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected dtype int32 or int64, got {dtype_name(cu_seqlens.dtype)}")
    return cu_seqlens.shape[0] - 1 if packed else tensor.shape[0] if tensor.dim() == 2 else 1


def check_mask(mask: Tensor, like: Tensor, like_name: str) -> None:
    if mask.dtype not in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32):
        raise TypeError(f"mask: expected dtype bool, uint8, int32, int64 or float32, got {dtype_name(mask.dtype)}")
    if tuple(mask.shape) != tuple(like.shape):
        raise ValueError(f"mask: expected shape {list(like.shape)} (that of {like_name}), got {list(mask.shape)}")


def check_tokens(tensor: Any, name: str, like: Tensor, like_name: str, sequences: Any = None) -> None:
    if tensor is None:
        return
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name}: expected dtype float32, got {dtype_name(tensor.dtype)}")
    shape = tuple(tensor.shape)
    if shape == tuple(like.shape):
        if is_static(tensor) and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) not in (0, 1):
            raise ValueError(f"{name}: expected contiguous tokens (stride 1), got stride {tensor.stride(-1)}")
        return
    if sequences is not None and shape[:1] == (sequences,) and (len(shape) == 1 or shape[1:] == (1,)):
        return
    more = "" if sequences is None else f" or [{sequences}]"
    also = "" if sequences is None else ", or one a sequence"
    raise ValueError(
        f"{name}: expected shape {list(like.shape)}{more} (that of {like_name}{also}), got {list(tensor.shape)}"
    )
