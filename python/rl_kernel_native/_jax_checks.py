"""Checks of the arguments of rk.jax while JAX traces a call, when shapes, dtypes and Python values are known.

Each check calls the operator itself on an array without rows, so the operator writes the error messages. Only the
number of rows is compared here. An error at run time would be an INTERNAL error of JAX, with the traceback of its
callback.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np

import rl_kernel_native as rk

from . import _check

# Shape and dtype of an array.
Kind = tuple[tuple[int, ...], Any]


def array(name: str, value: Any) -> Any:
    """The value as a JAX array, traced or not. A NumPy array is converted."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return jax.numpy.asarray(value)
    raise TypeError(
        f"{name}: expected a JAX or NumPy array, got {type(value).__name__}; convert it by jax.numpy.asarray, or call "
        "the function of rl_kernel_native itself for arrays of another framework"
    )


def kind(value: Any) -> Kind:
    return tuple(value.shape), value.dtype


def not_traced(name: str, value: Any, wanted: str) -> Any:
    """Refuses a traced value, which is known only when the compiled function runs."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name}: expected a Python {wanted}, which has no gradient, got a traced JAX value; close over it, or "
            "make it static: jax.jit(function, static_argnames=...)"
        )
    return value


def number(name: str, value: Any) -> float:
    """The value as a Python number. An untraced array of one element is converted."""
    value = not_traced(name, value, "number")
    if isinstance(value, jax.Array) and value.shape == ():
        value = value.item()
    return _check.number(name, value)


def flag(name: str, value: Any) -> bool:
    return _check.flag(name, not_traced(name, value, "bool"))


def _no_rows(of: Kind) -> np.ndarray:
    """An array of this kind, but without rows."""
    shape, dtype = of
    return np.empty((0, shape[-1]) if shape else (), dtype)


def _one_row(of: Kind) -> np.ndarray:
    """An array of this kind in which all rows have the same memory."""
    shape, dtype = of
    row = np.zeros(shape[-1:], dtype)
    return np.lib.stride_tricks.as_strided(row, shape, (*(0,) * (len(shape) - 1), *row.strides))


def _of_rows(name: str, of: Kind, rows: Kind, of_rows: str) -> np.ndarray:
    """The empty form of an array with one value per row. First the array's shape is compared with the shape of
    ``rows``."""
    if of[0] != rows[0][:-1]:
        wanted = f"{list(rows[0][:-1])} ({of_rows} without the last dimension)"
        raise ValueError(f"{name}: expected shape {wanted}, got {list(of[0])}")
    return np.zeros(0, of[1])


@_check.remembered
def linear(x: Kind, weight: Kind, bias: Kind | None) -> None:
    rk.linear(_no_rows(x), _one_row(weight), None if bias is None else _one_row(bias))


@_check.remembered
def logprob(logits: Kind, target: Kind, temperature: float) -> None:
    rows = _no_rows(logits)
    rk.logprob(rows, _of_rows("target", target, logits, "logits"), temperature=temperature)


@_check.remembered
def linear_logprob(hidden: Kind, weight: Kind, target: Kind, temperature: float, logits_dtype: str) -> None:
    ids = _of_rows("target", target, hidden, "hidden")
    rk.linear_logprob(_no_rows(hidden), _one_row(weight), ids, temperature=temperature, logits_dtype=logits_dtype)


@_check.remembered
def rms_norm(x: Kind, weight: Kind, eps: float, round_before_weight: bool) -> None:
    rk.rms_norm(_no_rows(x), _one_row(weight), eps, round_before_weight=round_before_weight)


_LACKED = ("ref_logprob", "entropy", "rollout_logprob", "importance_weight", "selected")


@_check.remembered
def policy_loss(
    logprob: Kind, old_logprob: Kind | None, advantage: Kind, mask: Kind, spec: Any, denominator: float | None
) -> None:
    shape = logprob[0]
    for name, of in (("old_logprob", old_logprob), ("mask", mask)):
        if of is not None and of[0] != shape:
            raise ValueError(f"{name}: expected shape {list(shape)} (that of logprob), got {list(of[0])}")
    sequences = shape[:1] if len(shape) == 2 else (1,)
    if advantage[0] not in (shape, sequences, (*sequences, 1)):
        raise ValueError(
            f"advantage: expected shape {list(shape)} or {list(sequences)} (that of logprob, or one a sequence), got "
            f"{list(advantage[0])}"
        )
    operands: Any = (
        None if of is None else np.zeros([1] * len(of[0]), of[1]) for of in (logprob, old_logprob, advantage, mask)
    )
    try:
        rk.policy_loss_and_grad(*operands, spec=spec, denominator=denominator)
    except ValueError as error:
        wanted = re.fullmatch(rf"({'|'.join(_LACKED)}): expected an array, which (.*) needs, got None", str(error))
        if wanted is None:
            raise
        raise ValueError(
            f"spec: rk.jax.policy_loss takes no {wanted[1]}, which {wanted[2]} needs; choose another spec, or call "
            "rk.policy_loss_and_grad outside of jit and grad, which takes all arrays and gives loss and gradients"
        ) from None
