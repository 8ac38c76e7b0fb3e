"""Converts rewards from reward functions: floats of any width, integers, bools and lists are rounded once to
float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _dispatch

_NUMERIC = "fiub"  # kinds of NumPy's dtypes


def as_float32(array: Any, name: str, like: Any = None) -> Any:
    """`array` as float32 in the framework of `array`. A list becomes a NumPy array, or a tensor on the device of the
    tensor `like`."""
    if isinstance(array, (list, tuple)):
        return _beside(_from_list(array, name, float, np.float32), like)
    if _dispatch.is_tensor(array):
        return array if array.dtype.is_complex or array.is_quantized else array.float()
    dtype = getattr(array, "dtype", None)
    if dtype is None or isinstance(array, type) or not hasattr(array, "astype"):
        return array
    numeric = getattr(dtype, "kind", "") in _NUMERIC or str(dtype) == "bfloat16"
    return array.astype(np.float32) if numeric and str(dtype) != "float32" else array


def as_integers(array: Any, name: str, like: Any = None) -> Any:
    """A list of whole numbers as int64: a NumPy array, or a tensor on the device of `like`. Any other value is returned
    unchanged."""
    if not isinstance(array, (list, tuple)):
        return array
    return _beside(_from_list(array, name, _whole, np.int64), like)


def _whole(value: Any) -> int:
    if int(value) != value:
        raise TypeError(value)
    return int(value)


def _from_list(values: Any, name: str, convert: Any, dtype: Any) -> np.ndarray:
    try:
        return np.asarray([convert(value) for value in values], dtype)
    except (TypeError, ValueError, OverflowError):
        kinds = sorted({type(value).__name__ for value in values})
        wanted = "numbers" if dtype is np.float32 else "whole numbers"
        raise TypeError(f"{name}: expected an array or a list of {wanted}, got a list of {', '.join(kinds)}") from None


def _beside(array: np.ndarray, like: Any) -> Any:
    if not _dispatch.is_tensor(like):
        return array
    torch: Any = _dispatch.torch_module()
    return torch.from_numpy(array).to(like.device)
