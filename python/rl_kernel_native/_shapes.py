"""Checks of shapes and dtypes for fake kernels, with the extension's error messages.

Descriptions import it without loading torch: it recognises dtypes by their names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ._check import mask_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FLOAT32, INT32, INT64 = ("float32",), ("int32",), ("int64",)
INDICES = INT32 + INT64
FLOATS = ("float32", "bfloat16", "float16")
COPY = "; make it contiguous: np.ascontiguousarray, or .contiguous() for torch"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_error(tensor: Tensor, name: str, wanted: Any) -> ValueError:
    return ValueError(f"{name}: expected shape {wanted}, got {list(tensor.shape)}")


def is_static(tensor: Tensor) -> bool:
    """Whether all sizes and strides are plain ints. Comparing a symbolic size would add a guard to the trace."""
    return all(type(n) is int for n in (*tensor.shape, *tensor.stride()))


def check_columns(tensor: Tensor, name: str) -> None:
    if is_static(tensor) and tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel() > 0:
        expanded = " (one element, expanded)" if tensor.stride(-1) == 0 else ""
        raise ValueError(
            f"{name}: expected a contiguous last dimension (stride 1), got stride {tensor.stride(-1)}{expanded}{COPY}"
        )


def check_tail(tensor: Tensor, name: str, first: int) -> None:
    """Checks that the dimensions from ``first`` on, those after tokens, are contiguous."""
    if not is_static(tensor) or tensor.numel() == 0:
        return
    elements = 1
    for i in range(tensor.dim() - 1, first - 1, -1):
        if tensor.shape[i] > 1 and tensor.stride(i) != elements:
            raise ValueError(
                f"{name}: expected contiguous dimensions after those of tokens, got stride {tensor.stride(i)} of "
                f"dimension {i}{COPY}"
            )
        elements *= tensor.shape[i]


def check_columns_below(tensor: Tensor, name: str, bits: int) -> None:
    """Checks for fewer than ``2**bits`` columns."""
    if is_static(tensor) and tensor.shape[-1] >= 1 << bits:
        raise ValueError(f"{name}: expected fewer than 2^{bits} columns, got {tensor.shape[-1]}")


def check_end(offsets: Tensor, name: str, count: Any, of: str) -> None:
    """Refuses empty offsets [num + 1]: they must end with ``count``, which ``of`` names."""
    if type(count) is int and count > 0 and is_static(offsets) and offsets.shape[0] == 1:
        raise ValueError(f"{name}: expected {count} ({of}) last, got shape [1]")


def check_element(tensor: Any, name: str) -> None:
    """One number on the device; None passes."""
    if tensor is None:
        return
    check_dtype(tensor, name, FLOAT32)
    if is_static(tensor) and tensor.numel() != 1:
        raise ValueError(f"{name}: expected one element, got shape {list(tensor.shape)}")


def check_rows(tensor: Tensor, name: str) -> None:
    """[..., features], leading dimensions of at most two strides."""
    check_dtype(tensor, name, FLOATS)
    if tensor.dim() < 1:
        raise shape_error(tensor, name, "[..., features]")
    if tensor.dim() > 8:
        raise ValueError(f"{name}: expected at most 8 dimensions, got {tensor.dim()}")
    if not is_static(tensor):
        return
    rows = math.prod(tensor.shape[:-1])
    if rows >= 1 << 32:
        raise ValueError(f"{name}: expected fewer than 2^32 rows, got {rows}")
    check_columns(tensor, name)
    if not _collapses(tensor):
        raise ValueError(
            f"{name}: expected leading dimensions that collapse to at most two strides, got shape "
            f"{list(tensor.shape)}{COPY}"
        )


def _collapses(tensor: Tensor) -> bool:
    """Whether the leading dimensions span at most two strides: row_layout of cpp/ops/tensor_view.cpp."""
    outer: list[tuple[int, int]] = []  # (size, stride), outermost first
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size == 1:
            continue
        if outer and outer[-1][1] == size * stride:
            outer[-1] = (outer[-1][0] * size, stride)
        else:
            outer.append((size, stride))
    return len(outer) <= 2 or tensor.numel() == 0


def check_ids(ids: Tensor, name: str) -> None:
    """[...], dimensions of at most two strides."""
    check_dtype(ids, name, INDICES)
    if ids.dim() > 8:
        raise ValueError(f"{name}: expected at most 8 dimensions, got {ids.dim()}")
    if is_static(ids) and not _collapses(ids.unsqueeze(-1)):
        raise ValueError(
            f"{name}: expected dimensions that collapse to at most two strides, got shape {list(ids.shape)}{COPY}"
        )


def check_dtype_like(tensor: Tensor, name: str, like: Tensor, like_name: str) -> None:
    if tensor.dtype != like.dtype:
        from ._torch import autocast_hint

        raise TypeError(
            f"{name}: expected dtype {dtype_name(like.dtype)} (that of {like_name}), got {dtype_name(tensor.dtype)}"
            f"{autocast_hint()}"
        )


def check_like(tensor: Any, name: str, like: Tensor, like_name: str) -> None:
    """Rows with the dtype and shape of other rows; None passes."""
    if tensor is None:
        return
    check_rows(tensor, name)
    check_dtype_like(tensor, name, like, like_name)
    if tuple(tensor.shape) != tuple(like.shape):
        raise shape_error(tensor, name, f"{list(like.shape)} (that of {like_name})")


def check_float32_or(tensor: Tensor, name: str, dtype: torch.dtype, whose: str) -> None:
    """A vector together with operands of ``dtype``; ``whose`` names the owner of that dtype in the error."""
    if tensor.dtype != dtype and dtype_name(tensor.dtype) != "float32":
        wanted = "float32" if dtype_name(dtype) == "float32" else f"float32 or {dtype_name(dtype)}{whose}"
        raise TypeError(f"{name}: expected dtype {wanted}, got {dtype_name(tensor.dtype)}")


def check_narrowing(name: str, dtype: torch.dtype, like: torch.dtype) -> None:
    """The dtype of a sum over the rows of ``dy``; ``like`` is the dtype of ``dy``."""
    if dtype != like and dtype_name(dtype) != "float32":
        raise TypeError(f"{name}: expected float32 or {dtype_name(like)} (that of dy), got {dtype_name(dtype)}")


def check_vector(tensor: Tensor, name: str, dtypes: tuple[str, ...], count: Any, of: str) -> None:
    check_dtype(tensor, name, dtypes)
    if tensor.dim() != 1 or tensor.shape[0] != count:
        raise shape_error(tensor, name, f"[{count}] ({of})")


def check_contiguous(tensor: Tensor, name: str) -> None:
    if is_static(tensor) and tensor.shape[0] > 1 and tensor.stride(0) != 1:
        raise ValueError(f"{name}: expected contiguous elements (stride 1), got stride {tensor.stride(0)}{COPY}")


# ---- tokens of sequences (docs/tokens.md) ---------------------------------------------------------------------------


def check_first(tokens: Tensor, name: str, cu_seqlens: Any, dtypes: tuple[str, ...]) -> Any:
    """Checks the leading array, which the others must match; a mask has no ``dtypes``. Returns: the number of
    sequences."""
    if dtypes:
        check_dtype(tokens, name, dtypes)
    else:
        mask_dtype(name, dtype_name(tokens.dtype))
    packed = cu_seqlens is not None
    if tokens.dim() != 1 and (packed or tokens.dim() != 2):
        wanted = "[num_tokens] beside cu_seqlens" if packed else "[num_sequences, num_tokens] or [num_tokens]"
        raise shape_error(tokens, name, wanted)
    check_offsets(cu_seqlens)
    check_columns(tokens, name)
    return cu_seqlens.shape[0] - 1 if packed else tokens.shape[0] if tokens.dim() == 2 else 1


def check_dtype(tensor: Tensor, name: str, dtypes: tuple[str, ...]) -> None:
    if dtype_name(tensor.dtype) not in dtypes:
        expected = dtypes[0] if len(dtypes) == 1 else f"{', '.join(dtypes[:-1])} or {dtypes[-1]}"
        raise TypeError(f"{name}: expected dtype {expected}, got {dtype_name(tensor.dtype)}")


def check_offsets(offsets: Any, name: str = "cu_seqlens", count: str = "num_sequences") -> None:
    """None passes."""
    if offsets is None:
        return
    check_dtype(offsets, name, INDICES)
    if offsets.dim() != 1 or (is_static(offsets) and offsets.shape[0] < 1):
        raise shape_error(offsets, name, f"[{count} + 1]")
    check_columns(offsets, name)


def check_mask(mask: Any, shape: Any, whose: str) -> None:
    """A mask of the shape of ``whose``; None passes."""
    if mask is None:
        return
    mask_dtype("mask", dtype_name(mask.dtype))
    if mask.dim() != len(shape) or (is_static(mask) and tuple(mask.shape) != tuple(shape)):
        raise shape_error(mask, "mask", f"{list(shape)} (that of {whose})")
    if mask.dim():
        check_columns(mask, "mask")


def check_tokens(tensor: Any, name: str, like: Tensor, whose: str, sequences: Any = None) -> None:
    """``sequences`` is their number, if the array may have one value per sequence."""
    if tensor is None:
        return
    check_dtype(tensor, name, FLOAT32)
    shape = tuple(tensor.shape)
    if shape == tuple(like.shape):
        if sequences is None or tensor.dim() != 2 or tensor.stride(-1) != 0:
            check_columns(tensor, name)
        return
    if sequences is not None and shape[:1] == (sequences,) and (len(shape) == 1 or shape[1:] == (1,)):
        return
    tokens = tuple(like.shape)
    one = f"{sequences}, 1" if is_static(like) and tokens == (sequences,) else f"{sequences}"
    more = "" if sequences is None else f" or [{one}]"
    also = "" if sequences is None else ", or one a sequence"
    raise shape_error(tensor, name, f"{list(like.shape)}{more} (that of {whose}{also})")


def check_row_integers(tensor: Any, name: str, rows: Any) -> None:
    """[num_rows] with ``rows`` rows, or with any number if that is None; None passes."""
    if tensor is None:
        return
    check_dtype(tensor, name, INDICES)
    known = rows is not None and is_static(rows) and is_static(tensor)
    if tensor.dim() != 1 or (known and tensor.shape[0] != rows.shape[0]):
        raise shape_error(tensor, name, f"[{'num_rows' if rows is None else rows.shape[0]}]")


def check_row_vector(tensor: Tensor, name: str, dtype: str, rows: Tensor) -> None:
    """[num_rows] of ``rows``."""
    known = is_static(rows) and is_static(tensor)
    if tensor.dim() != 1 or (known and tensor.shape[0] != rows.shape[0]):
        raise shape_error(tensor, name, f"[{rows.shape[0]}]")
    check_dtype(tensor, name, (dtype,))


def check_logits(tensor: Tensor, name: str) -> None:
    """[num_rows, vocab_size]."""
    check_dtype(tensor, name, FLOATS)
    if tensor.dim() != 2:
        raise shape_error(tensor, name, "[num_rows, vocab_size]")
    check_columns(tensor, name)
