"""kv_cache_append for torch tensors: an eager call goes straight to the extension; whatever traces goes through the
registered operator, which says what it writes. A cache keeps no gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._dispatch import count_write
from .._native import module as _C
from .._register import define, fake, implement
from .._shapes import check_columns, dtype_name, is_static
from .._torch import (
    DTYPES,
    PLAIN,
    functorch_active,
    is_compiling,
    is_direct,
    memory,
    prepare,
    require_tensors,
    wants_grad,
)

__all__ = ["PLAIN", "is_compiling", "kv_cache_append"]

define("kv_cache_append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()")
_ops = torch.ops.rl_kernel_native


def kv_cache_append(k: Tensor, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
    for name, tensor in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        if wants_grad(tensor):
            raise ValueError(
                f"{name}: requires a gradient, which a cache does not keep; call under torch.no_grad() or pass "
                f"{name}.detach()"
            )
    if functorch_active() and not is_compiling():
        raise ValueError("k_cache: cannot be written under torch.func")
    if is_direct(k, v, k_cache, v_cache, slot_mapping):
        _torch.device_type(k, "k")
        _write(k, v, k_cache, v_cache, slot_mapping)
        return
    require_tensors(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    _ops.kv_cache_append(k, v, k_cache, v_cache, slot_mapping)


def _write(k: Tensor, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
    prepare(k)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if isinstance(cache, Tensor) and cache.is_neg():
            raise ValueError(f"{name}: has torch's negative bit; call .resolve_neg()")
    caches = [cache.detach() if isinstance(cache, Tensor) else cache for cache in (k_cache, v_cache)]
    _C.kv_cache_append(_numbers(k), _numbers(v), *caches, slot_mapping, 0)
    count_write(k_cache)
    count_write(v_cache)


def _numbers(tensor: Any) -> Any:
    return memory(tensor) if isinstance(tensor, Tensor) else tensor


implement("kv_cache_append", _write)


def _check_tokens(tensor: Tensor, name: str) -> None:
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name}: expected dtype float32, bfloat16 or float16, got {dtype_name(tensor.dtype)}")
    if tensor.dim() != 3:
        raise ValueError(f"{name}: expected shape [num_tokens, num_heads, columns], got {list(tensor.shape)}")
    check_columns(tensor, name)


def _check_dtype(tensor: Tensor, name: str, like: Tensor, of: str) -> None:
    if tensor.dtype != like.dtype:
        raise TypeError(
            f"{name}: expected dtype {dtype_name(like.dtype)} (that of {of}), got {dtype_name(tensor.dtype)}"
            f"{_torch.autocast_hint()}"
        )


def _check_cache(cache: Tensor, name: str, tokens: Tensor, of: str) -> None:
    _check_dtype(cache, name, tokens, of)
    if cache.dim() not in (3, 4) or (
        is_static(cache) and is_static(tokens) and tuple(cache.shape[-2:]) != tuple(tokens.shape[1:])
    ):
        each = f"{tokens.shape[1]}, {tokens.shape[2]}]"
        raise ValueError(
            f"{name}: expected shape [num_pages, page_size, {each} or [num_slots, {each} (heads and columns of {of}), "
            f"got {list(cache.shape)}"
        )
    check_columns(cache, name)


@fake("kv_cache_append")
def _fake(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    _check_tokens(k, "k")
    _check_tokens(v, "v")
    _check_dtype(v, "v", k, "k")
    if is_static(k) and is_static(v) and tuple(v.shape[:2]) != tuple(k.shape[:2]):
        raise ValueError(
            f"v: expected shape [{k.shape[0]}, {k.shape[1]}, columns] (tokens and heads of k), got {list(v.shape)}"
        )
    _check_cache(k_cache, "k_cache", k, "k")
    _check_cache(v_cache, "v_cache", v, "v")
    known = is_static(k_cache) and is_static(v_cache)
    if k_cache.dim() != v_cache.dim() or (known and tuple(k_cache.shape[:-2]) != tuple(v_cache.shape[:-2])):
        raise ValueError(
            f"v_cache: expected as many slots, in the same pages, as k_cache of shape {list(k_cache.shape)}, got "
            f"{list(v_cache.shape)}"
        )
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"slot_mapping: expected dtype int32 or int64, got {dtype_name(slot_mapping.dtype)}")
    if slot_mapping.dim() != 1 or (
        is_static(slot_mapping)
        and is_static(k)
        and (slot_mapping.shape[0] > k.shape[0] or not slot_mapping.is_contiguous())
    ):
        raise ValueError(
            f"slot_mapping: expected a contiguous array of at most {k.shape[0]} slots (the tokens of k), got shape "
            f"{list(slot_mapping.shape)}"
        )
