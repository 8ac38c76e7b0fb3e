"""Tokens from hidden states: arguments, dispatch, results. The contract is cpp/include/rlk/ops/linear_sample.h."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

from .. import _check
from .._call import call
from .._dispatch import code_or_same
from .._native import functions
from .._operator import Operator
from .._types import AnyArray, ArrayT, DType, Exp
from ..contract import BITWISE, NO_SHARDS, OFF_HEAD_LOGPROB, ONE_ARCHITECTURE, Row, add_rows
from ..reference.linear_sample import linear_sample_reference
from .random_bits import position_of, seed_of
from .sample import LOGPROB, LOGPROBS, RAW, SampleResult, draw_numbers, sample_id_of

__all__ = ["linear_sample", "linear_sample_reference"]

_C = functions(linear_sample="object*5, int*4, object*2, int")

MOST_TOP_K = 64


def _outputs(arrays: Any, how: tuple[Any, ...]) -> Any:
    rows, wants = (arrays[0].shape[0],), how[4]
    return rows, rows if wants & LOGPROB else None, rows if wants & RAW else None, rows


def _native(arrays: Any, how: tuple[Any, ...], *tail: Any) -> Any:
    rows = (*arrays[3:8], None, *arrays[8:], None)  # None for top_p and for allowed
    return _C.linear_sample(*arrays[:3], rows, *how, *tail)


_LINEAR_SAMPLE = Operator(
    "linear_sample",
    "hidden, weight, bias?, seed|SymInt, sample_id|SymInt, position|SymInt, temperature|float, top_k|SymInt, "
    "min_p|float, greedy|bool",
    "SymInt? valid_vocab, int exp, int unit, int logits_dtype, int wants, SymInt workspace_bytes",
    outputs=_outputs,
    dtypes=("int64", "float32", "float32", "int32"),
    native=_native,
    casts=(0, 1, 2),
    flops=lambda hidden, weight, *_: 2 * math.prod(hidden) * weight[0],
)


def linear_sample(
    hidden: ArrayT,
    weight: AnyArray,
    *,
    seed: int | AnyArray,
    sample_id: int | AnyArray,
    position: int | AnyArray,
    bias: AnyArray | None = None,
    temperature: float | AnyArray = 1.0,
    top_k: int | AnyArray = 0,
    min_p: float | AnyArray = 0.0,
    greedy: bool | AnyArray = False,
    valid_vocab: int | None = None,
    return_logprob: Literal["processed", "raw", "both", "none"] = "processed",
    logits_dtype: DType = None,
    exp: Exp = None,
    workspace_bytes: int = 512 << 20,
) -> SampleResult[ArrayT]:
    """:func:`sample` of an LM head's logits, with only some rows of the logits in memory at a time.

    Every result has the bytes of ``sample(linear(hidden, weight, bias, out_dtype=logits_dtype), ...)``, in any batch
    and any workspace. Without ``top_k`` and ``min_p``, the log-probability equals ``linear_logprob(hidden, weight, ids,
    bias=bias, temperature=temperature, logits_dtype=...)``. Pass the same ``logits_dtype``, because the defaults of the
    two functions differ. There is no derivative. Under ``torch.autocast`` operands are cast as for :func:`linear`.

    Args:
        hidden: ``[num_rows, in_features]``, bfloat16 or float16, on the CPU also float32; last dimension contiguous.
        weight: ``[vocab_size, in_features]``, of the dtype of ``hidden``; each row is contiguous, with any stride
            between rows; at most 2^19 rows.
        seed, sample_id, position: as for :func:`sample`; each is a number, or an array ``[num_rows]``.
        bias: ``[vocab_size]``, of the dtype of ``hidden`` or float32; contiguous.
        temperature, min_p, greedy, valid_vocab, return_logprob, exp: as for :func:`sample`.
        top_k: as for :func:`sample`, at most 64; a row that asks for more has ``SampleStatus.BAD_PARAMETER``.
        logits_dtype: dtype to which the logits are rounded: the dtype of ``hidden`` (default) or float32.
        workspace_bytes: limit of the workspace. A larger workspace holds more rows at a time and changes no bit of the
            results.
    Returns:
        :class:`SampleResult` with ids, log-probabilities and status; the most probable tokens and the kept sets are
        None.
    Raises:
        TypeError for a wrong dtype or type, or for an argument of :func:`sample` that is not supported; ValueError for
        a wrong shape, device or value; RuntimeError if this build has no kernel for the device. Bad entries of per-row
        arrays give their row a status instead.
    Source:
        the contract; docs/numerics.md, rules 1, 4 and 5.
    Example:
        >>> hidden, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0], [3.0, 0.0], [0.0, 2.0]])
        >>> rk.linear_sample(hidden, weight, seed=7, sample_id=0, position=0, greedy=True).ids
        tensor([2])
    """
    _check.one_of("return_logprob", return_logprob, tuple(LOGPROBS))
    keys: tuple[Any, ...] = (seed_of(seed), sample_id_of(sample_id), position_of(position))
    t, k, p, flags = draw_numbers(temperature, top_k, min_p, greedy)
    if _check.is_number(k) and k > MOST_TOP_K:
        raise ValueError(f"top_k: expected an integer in [0, {MOST_TOP_K}] (0 cuts nothing), got {k}")
    logits = code_or_same(logits_dtype, "logits_dtype")
    workspace_bytes = _check.integer64("workspace_bytes", workspace_bytes)
    how = (valid_vocab, exp, None, logits, LOGPROBS[return_logprob], workspace_bytes)
    ids, logprob, raw_logprob, status = call(_LINEAR_SAMPLE, (hidden, weight, bias, *keys, t, k, p, flags), how)
    return SampleResult(ids, logprob, raw_logprob, None, None, None, None, None, None, status)


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _contract_rows() -> Iterator[Row]:
    statistics: dict[str, Any] = {
        "stem": "linear_sample", "backends": ONE_ARCHITECTURE, "kind": "softmax statistics", "rounded": False,
        "keeps": NO_SHARDS,
    }  # fmt: skip
    for output, bound in (("ids", BITWISE), ("logprob", OFF_HEAD_LOGPROB), ("raw_logprob", OFF_HEAD_LOGPROB)):
        yield Row("linear_sample", output, "forward", bound=bound, **statistics)


add_rows(_contract_rows())
