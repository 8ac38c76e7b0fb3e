"""float64 reference of rope in NumPy, written from the formulas alone."""

from __future__ import annotations

from typing import Any

import numpy as np


def rope_reference(
    q: Any,
    k: Any,
    cos: Any,
    sin: Any,
    *,
    position_ids: Any = None,
    interleaved: bool = False,
    partial_dim: int | None = None,
    mrope_sections: tuple[int, int, int] | None = None,
    head_axis: int = -2,
    transposed: bool = False,
) -> dict[str, np.ndarray]:
    """Maps pairs ``(a, b)`` of columns to ``(a cos - b sin, b cos + a sin)``, in float64. Nothing is rounded.

    Args: as :func:`rl_kernel_native.rope`, NumPy arrays (or what ``numpy.asarray`` takes) in any float dtype;
        ``transposed`` gives the map of :func:`rl_kernel_native.rope_backward`.
    Returns: ``q``, and ``k`` if given, float64; and ``q_scale`` and ``k_scale``, the results computed over absolute
        values. Error bounds grow with these scales.
    """
    c, s = (_angles(a, position_ids, mrope_sections, interleaved, q, partial_dim) for a in (cos, sin))
    out = {}
    for name, heads in (("q", q), ("k", k)):
        if heads is None:
            continue
        x = np.moveaxis(_wide(heads), head_axis, -2)
        rotary_dim = x.shape[-1] if partial_dim is None else partial_dim
        y, scale = x.copy(), np.abs(x)
        a, b = _columns(rotary_dim, interleaved)
        # Each token has one angle per column, the same for all heads.
        cos_a, cos_b, sin_a, sin_b = (v[..., None, columns] for v in (c, s) for columns in (a, b))
        if transposed:
            sin_a, sin_b = -sin_b, -sin_a
        y[..., a] = x[..., a] * cos_a - x[..., b] * sin_a
        y[..., b] = x[..., b] * cos_b + x[..., a] * sin_b
        scale[..., a] = np.abs(x[..., a] * cos_a) + np.abs(x[..., b] * sin_a)
        scale[..., b] = np.abs(x[..., b] * cos_b) + np.abs(x[..., a] * sin_b)
        out[name], out[f"{name}_scale"] = (np.moveaxis(v, -2, head_axis) for v in (y, scale))
    return out


def _columns(rotary_dim: int, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the columns that hold the first elements of pairs, and the columns of the second elements."""
    first = np.arange(0, rotary_dim, 2) if interleaved else np.arange(rotary_dim // 2)
    return first, first + (1 if interleaved else rotary_dim // 2)


def _angles(
    table: Any, position_ids: Any, sections: Any, interleaved: bool, q: Any, partial_dim: int | None
) -> np.ndarray:
    """Returns one value of the table for each token and each rotated column."""
    rotary_dim = np.asarray(q).shape[-1] if partial_dim is None else partial_dim
    values = _wide(table) if position_ids is None else _wide(table)[np.asarray(position_ids)]
    if values.shape[-1] != rotary_dim:  # the table has one column per pair
        values = np.repeat(values, 2, -1) if interleaved else np.concatenate((values, values), -1)
    if sections is None:
        return values
    of_pair = np.repeat(np.arange(3), sections)
    of_column = np.repeat(of_pair, 2) if interleaved else np.concatenate((of_pair, of_pair))
    found = np.empty(values.shape[1:])
    for section in range(3):
        found[..., of_column == section] = values[section][..., of_column == section]
    return found


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
