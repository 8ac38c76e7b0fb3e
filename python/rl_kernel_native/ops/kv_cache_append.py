"""Writes keys and values of new tokens into a paged cache: arguments, dispatch. The contract is
cpp/include/rlk/ops/kv_cache_append.h."""

from __future__ import annotations

from collections.abc import Iterator

from .. import _call, _dispatch
from .._native import functions
from .._operator import Operator
from .._types import AnyArray, ArrayT
from ..contract import BITWISE, DTYPES, OF_TOKENS, Row, add_rows
from ..reference.kv_cache_append import kv_cache_append_reference

__all__ = ["kv_cache_append", "kv_cache_append_reference"]

_C = functions(kv_cache_append="object*6, int", kv_cache_append_eager="object*5")


_KV_CACHE_APPEND = Operator(
    "kv_cache_append",
    "k, v, k_cache!, v_cache!, slot_mapping",
    "",
    dtypes=(),
)


def kv_cache_append(k: ArrayT, v: AnyArray, k_cache: AnyArray, v_cache: AnyArray, slot_mapping: AnyArray) -> None:
    """Writes keys and values of new tokens into their slots of a paged cache, in place. :func:`attention` reads the
    cache.

    Every cache layout of vLLM has a view of the shape below. With ``[num_pages, 2, page_size, heads, columns]`` the
    views are ``cache[:, 0]`` and ``cache[:, 1]``; with ``[2, num_pages, ...]`` they are ``cache[0]`` and ``cache[1]``.
    If K and V are packed, they are ``cache[..., :columns]`` and ``cache[..., columns:]``. If heads come before slots
    (HND), ``cache.transpose(1, 2)`` is the view.

    Args:
        k: ``[num_tokens, num_heads, columns]``, float32, bfloat16 or float16; columns contiguous, other strides any.
        v: ``[num_tokens, num_heads, columns of v]``, of the dtype of ``k``.
        k_cache: ``[num_pages, page_size, num_heads, columns]``, or ``[num_slots, num_heads, columns]``; of the dtype of
            ``k``, columns contiguous, other strides any. Written in place.
        v_cache: as ``k_cache``, for ``v``; it has the same number of pages and slots.
        slot_mapping: ``[num_slots]``, int32 or int64, with at most ``num_tokens`` entries. Token ``t`` goes to slot
            ``slot_mapping[t]``, which is ``page * page_size + place in the page``. -1 skips the token, and tokens after
            the last entry are skipped. A slot out of range is a ValueError on the CPU, before anything is written; a
            GPU skips it. If several tokens have the same slot, the slot may get any of these tokens.
    Returns: None.
    Raises:
        TypeError for a wrong dtype; ValueError for a wrong shape, layout or device, for overlapping memory, or for a
        gradient that would be lost; BufferError for a read-only cache; RuntimeError if this build has no kernel for the
        device.
    Source: the contract; layouts: vLLM 0.26, ``vllm/v1/attention/backends``.
    Example:
        >>> k, v, cache = torch.ones(2, 1, 8), torch.ones(2, 1, 8), torch.zeros(2, 4, 16, 1, 8)
        >>> rk.kv_cache_append(k, v, cache[0], cache[1], torch.tensor([17, -1]))
        >>> cache[0].sum((2, 3)).nonzero()  # slot 17 is slot 1 of page 1
        tensor([[1, 1]])
    """
    if not _call.is_read_by_dynamo():
        found = _C.kv_cache_append_eager(k, v, k_cache, v_cache, slot_mapping)
        if found is not NotImplemented:
            _dispatch.count_write(k_cache)
            _dispatch.count_write(v_cache)
            return
    _call.call(_KV_CACHE_APPEND, (k, v, k_cache, v_cache, slot_mapping), ())


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _contract_rows() -> Iterator[Row]:
    moved = OF_TOKENS | {"kind": "copy", "bound": BITWISE, "stem": "kv_cache_append", "dtypes": DTYPES}
    for output in ("k_cache", "v_cache"):
        yield Row("kv_cache_append", output, "forward", **moved)


add_rows(_contract_rows())
