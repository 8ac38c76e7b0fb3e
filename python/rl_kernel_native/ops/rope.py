"""Rotary position embedding: arguments, dispatch, results. The contract is cpp/include/rlk/ops/rope.h."""

from __future__ import annotations

from typing import Any, Literal

from .. import _check, _dispatch
from .._native import module as _C
from .._types import AnyArray, ArrayT
from ..reference.rope import rope_reference

__all__ = ["rope", "rope_backward", "rope_reference"]

_torch_path: Any = None
_plain: tuple[Any, ...] = ()  # torch.Tensor and its Parameter, once a tensor was seen
_plain_or_none: tuple[Any, ...] = ()


def _torch() -> Any:
    """ops/rope_torch.py, imported with the first torch tensor."""
    global _torch_path, _plain, _plain_or_none
    if _torch_path is None:
        from . import rope_torch

        _torch_path = rope_torch
        _plain = rope_torch.PLAIN
        _plain_or_none = (*_plain, type(None))
    return _torch_path


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

    A head of a token has the same bits for any number of tokens and heads, position and stride, and on every backend.
    Differentiable (torch) in ``q`` and ``k``, any number of times. ``cos`` and ``sin`` are constants: they get no
    gradient, and it is an error where one is wanted of them.

    Layouts are told apart by ``head_axis``, and strides are free but for the last dimension, so views work:

    - engines, FlashAttention: ``[tokens, heads, head_dim]`` or ``[batch, seq, heads, head_dim]``: -2, the default;
    - Hugging Face's ``apply_rotary_pos_emb``: ``[batch, heads, seq, head_dim]``: ``head_axis=1``;
    - vLLM's ``cos_sin_cache``: ``cos, sin = cache.chunk(2, -1)`` with ``position_ids=positions``;
    - Megatron: ``[seq, batch, heads, head_dim]`` with ``cos`` as ``[seq, 1, rotary_dim]``;
    - Qwen2-VL: ``[3, batch, seq, width]`` or tables and ``position_ids`` ``[3, batch, seq]``, with ``mrope_sections``.

    Args:
        q: ``[..., num_q_heads, head_dim]``, float32, bfloat16 or float16; last dimension contiguous. The other
            dimensions are tokens, whose strides must merge to two in all arrays alike: that is none, one or two
            dimensions of any strides, or more that follow one another.
        k: ``[..., num_kv_heads, head_dim]`` of the same dtype and tokens, or None.
        cos, sin: float32 or the dtype of ``q``, last dimension contiguous and ``rotary_dim`` (``partial_dim``, else
            ``head_dim``) or half of that wide. One for each rotated column, in the order of columns; or one for each
            pair. Tables ``[max_position, width]`` beside ``position_ids``; else ``[tokens..., width]``, where a
            dimension may be 1 to serve all.
        position_ids: int32 or int64, the shape of the tokens (a dimension may be 1), in ``[0, max_position)``. An id
            out of range is a ValueError on the CPU; on a GPU the columns that it would rotate are NaN, and no other
            token is touched.
        interleaved: pairs are columns ``(2i, 2i + 1)`` (GPT-J, GLM-4, Llama 4), not ``(i, i + rotary_dim / 2)``
            (GPT-NeoX, Llama, Qwen). DeepSeek's variant, which also moves the pairs to halves, gives these values in
            another order.
        partial_dim: only the first so many columns are rotated, an even number; the others are copied bit for bit.
        intermediate: ``"float32"``: products and sums are float32, fused, and rounded once to the dtype of ``q``.
            ``"input"``: angles, each product and the sum are rounded to that dtype, which is what
            ``q * cos + rotate_half(q) * sin`` gives in it: Hugging Face's bytes in bfloat16.
        mrope_sections: three sizes that sum to ``rotary_dim / 2``: pairs take their angles from temporal, height or
            width positions, section by section. ``position_ids``, or without them ``cos`` and ``sin``, then have a
            leading dimension of 3. (Qwen3-VL deals pairs out in turn: give it cos and sin already merged.)
        head_axis: the axis of heads in ``q`` and ``k``.
    Returns:
        ``(q_out, k_out)``, contiguous, of the shapes and dtypes of ``q`` and ``k``; ``k_out`` is None where ``k`` is.
    Raises:
        TypeError for a dtype or a type; ValueError for a shape, a layout, a device or a value; RuntimeError where no
        kernel of this build serves the device.
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
    return _call(q, k, cos, sin, position_ids, interleaved, partial_dim, intermediate, mrope_sections, head_axis, False)


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
    """Gradients of :func:`rope`, for callers that run backward themselves; torch's autograd calls it.

    The transposed rotation, which for equal angles of a pair is that by the negative angle, with the same roundings:
    ``(a cos + b sin, b cos - a sin)``.

    Args: ``dq_out`` and ``dk_out`` have the shapes and dtypes of ``q`` and ``k``; ``dk_out`` may be None. The rest as
        given to :func:`rope`.
    Returns: ``(dq, dk)``, contiguous; None where there is no ``dk_out``.
    Raises: as :func:`rope`.
    Source: docs/numerics.md, rules 3 and 8.
    """
    return _call(
        dq_out, dk_out, cos, sin, position_ids, interleaved, partial_dim, intermediate, mrope_sections, head_axis, True
    )


def _call(
    q: Any, k: Any, cos: Any, sin: Any, position_ids: Any, interleaved: bool, partial_dim: Any, intermediate: str,
    mrope_sections: Any, head_axis: Any, transposed: bool,
) -> tuple[Any, Any]:  # fmt: skip
    _check.one_of("intermediate", intermediate, ("float32", "input"))
    options = (
        _check.flag("interleaved", interleaved),
        partial_dim,
        intermediate == "input",
        mrope_sections,
        head_axis,
        transposed,
    )
    if (
        type(q) in _plain
        and type(k) in _plain_or_none
        and type(cos) in _plain
        and type(sin) in _plain
        and type(position_ids) in _plain_or_none
        and not _torch_path.is_compiling()
    ):
        result = _C.rope_eager(q, k, cos, sin, position_ids, *options)
        if result is not NotImplemented:
            return result
    torch = _dispatch.torch_module()
    if torch is not None and isinstance(q, torch.Tensor):
        return _torch().rope(q, k, cos, sin, position_ids, *options)
    first = "dq_out" if transposed else "q"
    frame = _dispatch.Frame(q, first)
    _dispatch.match_torch_threads()
    q_out, k_out = _C.rope(
        frame.export(q, first),
        frame.export(k, "dk_out" if transposed else "k"),
        frame.export(cos, "cos"),
        frame.export(sin, "sin"),
        frame.export(position_ids, "position_ids"),
        *options,
        frame.allocate,
        frame.stream,
    )
    return frame.result(q_out), frame.result(k_out)
