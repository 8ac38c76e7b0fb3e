"""Keys and values of new tokens into a paged cache: arguments, dispatch. The contract is
cpp/include/rlk/ops/kv_cache_append.h."""

from __future__ import annotations

from typing import Any

from .. import _check, _dispatch
from .._native import module as _C
from .._types import AnyArray, ArrayT
from ..reference.kv_cache_append import kv_cache_append_reference

__all__ = ["kv_cache_append", "kv_cache_append_reference"]

_torch_path: Any = None
_plain: tuple[Any, ...] = ()  # torch.Tensor and its Parameter, once a tensor was seen


def _torch() -> Any:
    """ops/kv_cache_append_torch.py, imported with the first torch tensor."""
    global _torch_path, _plain
    if _torch_path is None:
        _dispatch.require_torch()
        from . import kv_cache_append_torch

        _torch_path = kv_cache_append_torch
        _plain = kv_cache_append_torch.PLAIN
    return _torch_path


def kv_cache_append(k: ArrayT, v: AnyArray, k_cache: AnyArray, v_cache: AnyArray, slot_mapping: AnyArray) -> None:
    """Writes keys and values of new tokens into their slots of a paged cache, in place; :func:`attention` reads it.

    Every layout of vLLM is a view of the shape below: ``cache[:, 0]`` and ``cache[:, 1]`` of ``[num_pages, 2,
    page_size, heads, columns]``, ``cache[0]`` and ``cache[1]`` of ``[2, num_pages, ...]``, ``cache[..., :columns]``
    and ``cache[..., columns:]`` where K and V are packed, and ``cache.transpose(1, 2)`` where heads come before slots
    (HND).

    Args:
        k: ``[num_tokens, num_heads, columns]``, float32, bfloat16 or float16; columns contiguous, other strides any.
        v: ``[num_tokens, num_heads, columns of v]``, of the dtype of ``k``.
        k_cache: ``[num_pages, page_size, num_heads, columns]``, or ``[num_slots, num_heads, columns]``; of the dtype of
            ``k``, columns contiguous, other strides any. Written in place.
        v_cache: the same for ``v``, with as many slots in the same pages.
        slot_mapping: ``[num_slots]``, int32 or int64, of at most ``num_tokens``: token ``t`` goes to slot
            ``slot_mapping[t]``, which is ``page * page_size + place in the page``; -1 passes it over, and so do tokens
            behind the last slot. Another slot that is none is a ValueError on the CPU, before anything is written; a
            GPU passes it over. Where tokens share a slot, any of them may be there.
    Returns: None.
    Raises:
        TypeError for a dtype; ValueError for a shape, a layout, a device, memory that is shared or a gradient that
        would be lost; BufferError for a cache that is read-only; RuntimeError where no kernel of this build serves the
        device.
    Source: the contract; layouts: vLLM 0.26, ``vllm/v1/attention/backends``.
    Example:
        >>> k, v, cache = torch.ones(2, 1, 8), torch.ones(2, 1, 8), torch.zeros(2, 4, 16, 1, 8)
        >>> rk.kv_cache_append(k, v, cache[0], cache[1], torch.tensor([17, -1]))
        >>> cache[0].sum((2, 3)).nonzero()  # slot 17 is slot 1 of page 1
        tensor([[1, 1]])
    """
    if type(k) in _plain and not _torch_path.is_compiling():
        found = _C.kv_cache_append_eager(k, v, k_cache, v_cache, slot_mapping)
        if found is not NotImplemented:
            _dispatch.count_write(k_cache)
            _dispatch.count_write(v_cache)
            return
    if _dispatch.is_tensor(k):
        _torch().kv_cache_append(k, v, k_cache, v_cache, slot_mapping)
        return
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check.writable(name, cache)
    frame = _dispatch.Frame(k, "k")
    _dispatch.match_torch_threads()
    _C.kv_cache_append(
        frame.export(k, "k"),
        frame.export(v, "v"),
        frame.export_output(k_cache, "k_cache"),
        frame.export_output(v_cache, "v_cache"),
        frame.export(slot_mapping, "slot_mapping"),
        frame.stream,
    )
    for cache in (k_cache, v_cache):
        _dispatch.count_write(cache)
