"""Rotary position embedding: arguments, dispatch, results. The contract is cpp/include/rlk/ops/rope.h."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from .. import _call, _check
from .._native import functions
from .._operator import Array, Operator, linear
from .._transforms import batched
from .._types import AnyArray, ArrayT
from ..contract import COMPOSED, EVERY_BACKEND, NO_SHARDS, Bound, Row, U, add_rows, derivatives
from ..reference.rope import rope_reference

__all__ = ["rope", "rope_backward", "rope_reference"]

_C = functions(
    rope="object*5, bool, object, bool, object*2, bool, object, int",
    rope_eager="object*5, bool, object, bool, object*2, bool",
)


def _names(transposed: bool) -> tuple[str, str]:
    """Returns the names of the two arrays of a rotation, or those of its backward. An if expression selects them,
    because Dynamo of torch 2.11 cannot index a tuple by a bool."""
    return ("dq_out", "dk_out") if transposed else ("q", "k")


def _integers(how: tuple[Any, ...]) -> tuple[Any, ...]:
    """Checks the options, and returns them in the form of the schema."""
    interleaved, partial_dim, rounds, sections, head_axis, transposed = how
    if partial_dim is not None:
        partial_dim = _check.integer("partial_dim", partial_dim)
    if sections is not None:
        if not isinstance(sections, (tuple, list)):
            raise TypeError(f"mrope_sections: expected None or three sizes of sections, got {type(sections).__name__}")
        sections = [_check.integer("mrope_sections", s) for s in sections]
    return interleaved, partial_dim, rounds, sections, _check.integer("head_axis", head_axis), transposed


def _along(call: Any, given: Any, arrays: Any, how: Any, wanted: Any) -> Any:
    """The derivative rule: rotates tangents, and rotates gradients back. q and k are independent of each other, so an
    array without a tangent or gradient is left out."""
    q, k = given
    if wanted is not None:
        how = (*how[:-1], not how[-1])
        q, k = (x if w else None for x, w in zip(given, wanted, strict=True))
    if q is not None:
        found = call(_ROPE, (q, k, *arrays[2:]), how)
    else:
        found = (None, None if k is None else call(_ROPE, (k, None, *arrays[2:]), how)[0])
    if wanted is not None:
        return found
    zeros = arrays[2].new_zeros
    named = zip(found, arrays[:2], strict=True)
    return [zeros(of.shape, dtype=of.dtype) if x is None and of is not None else x for x, of in named]


def _batch(info: Any, dims: Any, inputs: Any, apply: Any) -> Any:
    """The vmap rule: vmap's dimension becomes one more dimension of tokens. If each element has its own table of
    angles, vmap calls the operator once per element."""
    q, k, cos, sin, position_ids, *options = inputs
    if position_ids is not None and tuple(dims[2:4]) != (None, None):
        return None
    q, k = batched(info, dims[:2], (q, k))
    angles = (cos, sin) if position_ids is None else (position_ids,)
    moved = batched(info, dims[2:4] if position_ids is None else dims[4:5], angles)
    if options[3] is not None:  # the dimension of the three sections stays first
        moved = [t.movedim(0, 1).contiguous() for t in moved]
    rest = (*moved, None) if position_ids is None else (cos, sin, *moved)
    return apply(q, k, *rest, *options), (0, None if k is None else 0)


# The transpose of a rotation is this operator with the option `transposed` inverted.
_ROPE = Operator(
    "rope",
    (
        Array("q", called=lambda how, _: _names(how[-1])[0]),
        Array("k", optional=True, called=lambda how, _: _names(how[-1])[1]),
        "cos, sin, position_ids?",
    ),
    "bool interleaved, int? partial_dim, bool round_products, int[]? mrope_sections, int head_axis, bool transposed",
    outputs=lambda arrays, how: (arrays[0].shape, None if arrays[1] is None else arrays[1].shape),
    dtypes=(None, None),
    schema_options=_integers,
    gradient=linear(
        of=(0, 1),
        reads=(2, 3, 4),
        incoming=("dq_out", "dk_out"),
        along=_along,
        constants="is a constant of the rotation and gets no gradient",
        dims=4,  # up to two token dimensions may have any strides
        batch=_batch,
    ),
)


def rope(
    q: ArrayT,
    k: ArrayT | None,
    cos: AnyArray,
    sin: AnyArray,
    *,
    position_ids: AnyArray | None = None,
    interleaved: bool = False,
    partial_dim: int | None = None,
    intermediate: Literal["float32", "input"] = "float32",
    mrope_sections: tuple[int, int, int] | None = None,
    head_axis: int = -2,
) -> tuple[ArrayT, ArrayT | Any]:
    """Rotates queries and keys by their positions' angles: pairs ``(a, b)`` to ``(a cos - b sin, b cos + a sin)``.

    One head of one token has the same bits for any number of tokens and heads, at any position and stride, and on every
    backend. Differentiable (torch) in ``q`` and ``k``, any number of times. ``cos`` and ``sin`` are constants without a
    gradient; it is an error if one of them requires a gradient.

    ``head_axis`` tells layouts apart. Strides are free except for the last dimension, so views work:

    - engines, FlashAttention: ``[tokens, heads, head_dim]`` or ``[batch, seq, heads, head_dim]``: -2, the default;
    - Hugging Face's ``apply_rotary_pos_emb``: ``[batch, heads, seq, head_dim]``: ``head_axis=1``;
    - vLLM's ``cos_sin_cache``: ``cos, sin = cache.chunk(2, -1)`` with ``position_ids=positions``;
    - Megatron: ``[seq, batch, heads, head_dim]`` with ``cos`` as ``[seq, 1, rotary_dim]``;
    - Qwen2-VL: ``[3, batch, seq, width]`` or tables and ``position_ids`` ``[3, batch, seq]``, with ``mrope_sections``.

    Args:
        q: ``[..., num_q_heads, head_dim]``, float32, bfloat16 or float16; last dimension contiguous. The other
            dimensions are tokens. In every array, token dimensions that are contiguous to each other count as one;
            at most two may then remain, with any strides.
        k: ``[..., num_kv_heads, head_dim]`` of the same dtype and tokens, or None.
        cos, sin: float32 or the dtype of ``q``, last dimension contiguous. ``rotary_dim`` means ``partial_dim``, or
            ``head_dim`` if that is None. The width is ``rotary_dim`` (one value per rotated column, in the order of
            columns) or half of it (one value per pair). With ``position_ids`` the arrays are tables ``[max_position,
            width]``. Otherwise they are ``[tokens..., width]``, and a token dimension of size 1 serves all tokens.
        position_ids: int32 or int64, the shape of the tokens (a dimension may be 1), in ``[0, max_position)``. An id
            out of range is a ValueError on the CPU. On a GPU, the columns that such an id would rotate are NaN, and no
            other token is affected.
        interleaved: pairs are columns ``(2i, 2i + 1)`` (GPT-J, GLM-4, Llama 4), not ``(i, i + rotary_dim / 2)``
            (GPT-NeoX, Llama, Qwen). DeepSeek's variant also moves the first elements of all pairs to the first half of
            the columns; this function gives the same values in another order.
        partial_dim: number of leading columns that are rotated, even; the other columns are copied bit for bit.
        intermediate: ``"float32"``: products and sums are float32, fused, and rounded once to the dtype of ``q``.
            ``"input"``: angles, each product and the sum are rounded to the dtype of ``q``, as in ``q * cos +
            rotate_half(q) * sin``: Hugging Face's bytes in bfloat16.
        mrope_sections: three sizes that sum to ``rotary_dim / 2``: the pairs of the three sections take their angles
            from temporal, height and width positions. ``position_ids``, or without them ``cos`` and ``sin``, then have
            a leading dimension of 3. (Qwen3-VL interleaves the sections; pass it cos and sin already merged.)
        head_axis: the axis of heads in ``q`` and ``k``.
    Returns:
        ``(q_out, k_out)``, contiguous, of the shapes and dtypes of ``q`` and ``k``; ``k_out`` is None if ``k`` is None.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value; RuntimeError if this
        build has no kernel for the device.
    Source:
        docs/numerics.md, rules 3 and 8; Su et al. 2021, arXiv:2104.09864; sections: arXiv:2409.12191.

    Example:
        >>> q, k = torch.ones(3, 1, 2), torch.ones(3, 1, 2)
        >>> angle = torch.arange(3.0)[:, None].expand(3, 2)
        >>> rk.rope(q, k, angle.cos(), angle.sin())[0].squeeze(1)
        tensor([[ 1.0000,  1.0000],
                [-0.3012,  1.3818],
                [-1.3254,  0.4932]])
    """
    return _rotate(
        q, k, cos, sin, position_ids, interleaved, partial_dim, intermediate, mrope_sections, head_axis, False
    )


def rope_backward(
    dq_out: ArrayT,
    dk_out: ArrayT | None,
    cos: AnyArray,
    sin: AnyArray,
    *,
    position_ids: AnyArray | None = None,
    interleaved: bool = False,
    partial_dim: int | None = None,
    intermediate: Literal["float32", "input"] = "float32",
    mrope_sections: tuple[int, int, int] | None = None,
    head_axis: int = -2,
) -> tuple[ArrayT, ArrayT | Any]:
    """Gradients of :func:`rope`, for callers that run backward themselves; torch's autograd also calls this function.

    Backward is the transposed rotation, with the same roundings. If both columns of a pair have equal angles, backward
    rotates by the negative angle: ``(a cos + b sin, b cos - a sin)``.

    Args: ``dq_out`` and ``dk_out`` have the shapes and dtypes of ``q`` and ``k``; ``dk_out`` may be None. The other
        arguments are as given to :func:`rope`.
    Returns: ``(dq, dk)``, contiguous; ``dk`` is None without ``dk_out``.
    Raises: as :func:`rope`.
    Source: docs/numerics.md, rules 3 and 8.
    Example:
        >>> q, angle = torch.randn(3, 2, 8), torch.randn(3, 4)
        >>> cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        >>> turned, _ = rk.rope(q, None, cos, sin)
        >>> torch.allclose(rk.rope_backward(turned, None, cos, sin)[0], q, atol=1e-6)  # turns it back
        True
    """
    return _rotate(
        dq_out, dk_out, cos, sin, position_ids, interleaved, partial_dim, intermediate, mrope_sections, head_axis, True
    )


def _rotate(
    q: Any, k: Any, cos: Any, sin: Any, position_ids: Any, interleaved: bool, partial_dim: Any, intermediate: str,
    mrope_sections: Any, head_axis: Any, transposed: bool,
) -> tuple[Any, Any]:  # fmt: skip
    if type(intermediate) is not str or intermediate != "float32":
        _check.one_of("intermediate", intermediate, ("float32", "input"))
    if type(interleaved) is not bool:
        interleaved = _check.flag("interleaved", interleaved)
    options: tuple[Any, ...] = (
        interleaved,
        partial_dim,
        intermediate == "input",
        mrope_sections,
        head_axis,
        transposed,
    )
    arrays = (q, k, cos, sin, position_ids)
    if not _call.is_read_by_dynamo():
        result = _C.rope_eager(*arrays, *options)
        if result is not NotImplemented:
            return result
    if type(head_axis) is int and 0 <= head_axis < getattr(q, "ndim", 0) - 1 and getattr(k, "ndim", q.ndim) == q.ndim:
        # The axis is counted from the end, so that it stays valid if a batch dimension is added in front.
        options = (*options[:-2], head_axis - q.ndim, transposed)
    return _call.call(_ROPE, arrays, options)


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_ROPE = Bound(
    lambda scale, inner=0.0, inner_least=0.0: (2 * U + 3 * inner * (1 + 3 * inner)) * scale + 3 * inner_least,
    "(2 * u + 3 * inner * (1 + 3 * inner)) * scale + 3 * inner_least",
    "a product and a sum; with intermediate=input angles, products and sum are rounded to the dtype",
)


def _contract_rows() -> Iterator[Row]:
    turned: dict[str, Any] = {"kind": "elementwise", "backends": EVERY_BACKEND, "stem": "rope", "keeps": NO_SHARDS}
    for output, direction in (("q", "forward"), ("k", "forward"), ("dq", "backward"), ("dk", "backward")):
        yield Row("rope", output, direction, bound=_OFF_ROPE, **turned)
    yield Row(
        "rope", "derivatives", "backward", stem="rope", bound=derivatives(1e-6), backends=EVERY_BACKEND, **COMPOSED
    )


add_rows(_contract_rows())
