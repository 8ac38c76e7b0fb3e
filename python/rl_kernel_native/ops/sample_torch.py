"""Sampling for torch tensors: an eager call goes straight to the extension; whatever traces goes through the registered
operator. A draw has no gradient: logits are taken as detached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arithmetic import resolve_exp, resolve_traced, unresolved_exp
from .._native import module as _C
from .._register import define, fake, implement
from .._shapes import check_columns, check_row_integers, dtype_name, is_static
from .._torch import CODES, device_type, is_compiling, is_direct, memory, prepare, require_tensors

__all__ = ["sample"]

_INTEGERS = ("seed", "sample_id", "position", "top_k")
_FLOATS = ("temperature", "top_p", "min_p")
_ROWS = ("seed", "sample_id", "position", "temperature", "top_k", "top_p", "min_p")

define(
    "sample(Tensor logits, Tensor? seed, SymInt seed_value, Tensor? sample_id, SymInt sample_id_value, "
    "Tensor? position, SymInt position_value, Tensor? temperature, float temperature_value, Tensor? top_k, "
    "SymInt top_k_value, Tensor? top_p, float top_p_value, Tensor? min_p, float min_p_value, Tensor? greedy, "
    "bool greedy_value, Tensor? allowed, SymInt? valid_vocab, int exp, int order, SymInt kept_capacity, int wants) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_ops = torch.ops.rl_kernel_native


def sample(
    logits: Tensor, keys: tuple[Any, ...], numbers: tuple[Any, ...], greedy: Any, allowed: Any, valid_vocab: Any,
    exp: Any, options: tuple[Any, ...],
) -> tuple[Any, ...]:  # fmt: skip
    rows = (*keys, *numbers)
    if logits.requires_grad:
        logits = logits.detach()
    if is_direct(logits, *rows, greedy, allowed):
        mode = resolve_exp(exp, device_type(logits, "logits"))
        prepare(logits)
        return _C.sample(logits, *rows, greedy, allowed, valid_vocab, mode, *options, None, 0)
    mode = unresolved_exp(exp) if is_compiling() else resolve_exp(exp, device_type(logits, "logits"))
    given = dict(zip(_ROWS, rows, strict=True)) | {"greedy": greedy}
    arrays = {name: x if isinstance(x, Tensor) or not _is_number(x) else None for name, x in given.items()}
    require_tensors(logits=logits, optional=arrays | {"allowed": allowed})
    flat: list[Any] = []
    for name, x in given.items():
        otherwise: Any = False if name == "greedy" else 0.0 if name in _FLOATS else 0
        flat += [arrays[name], x if arrays[name] is None else otherwise]
    found = _ops.sample(logits, *flat, allowed, valid_vocab, mode, *options)
    _, capacity, wants = options
    asked = (True, bool(wants & 1), bool(wants & 2), capacity >= 0, capacity >= 0, True)
    return tuple(x if is_asked else None for x, is_asked in zip(found, asked, strict=True))


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, torch.SymInt, torch.SymFloat))


def _kernel(logits: Tensor, *given: Any) -> tuple[Tensor, ...]:
    *pairs, allowed, valid_vocab, mode, order, capacity, wants = given
    prepare(logits)
    chosen = [number if array is None else memory(array) for array, number in zip(pairs[::2], pairs[1::2], strict=True)]
    found = _C.sample(
        memory(logits), *chosen, memory(allowed), valid_vocab, resolve_traced(mode, device_type(logits, "logits")),
        order, capacity, wants, None, 0,
    )  # fmt: skip
    return tuple(logits.new_empty(0, dtype=dtype) if x is None else x for x, dtype in zip(found, _DTYPES, strict=True))


_DTYPES = (torch.int64, torch.float32, torch.float32, torch.int32, torch.int64, torch.int32)
implement("sample", _kernel)


@fake("sample")
def _fake(logits: Tensor, *given: Any) -> tuple[Tensor, ...]:
    *pairs, allowed, valid_vocab, _, _, capacity, wants = given
    if logits.dtype not in CODES:
        raise TypeError(f"logits: expected dtype float32, bfloat16 or float16, got {dtype_name(logits.dtype)}")
    if logits.dim() != 2:
        raise ValueError(f"logits: expected shape [num_rows, vocab_size], got {list(logits.shape)}")
    check_columns(logits, "logits")
    arrays = dict(zip((*_ROWS, "greedy"), pairs[::2], strict=True))
    for name in _INTEGERS:
        check_row_integers(arrays[name], name, logits)
    for name, dtype in (*((name, torch.float32) for name in _FLOATS), ("greedy", torch.bool)):
        _check_rows(arrays[name], name, dtype, logits)
    if is_static(logits):
        vocab = logits.shape[1]
        if not 1 <= vocab <= 1 << 19:
            raise ValueError(f"logits: expected 1 to {1 << 19} columns, got {vocab}")
        if type(valid_vocab) is int and not 1 <= valid_vocab <= vocab:
            raise ValueError(f"valid_vocab: expected an integer in [1, {vocab}], got {valid_vocab}")
        _check_allowed(allowed, logits.shape[0], vocab if valid_vocab is None else valid_vocab)
    rows = logits.shape[0]
    kept = (capacity, rows + 1) if capacity >= 0 else (0, 0)
    sizes = (rows, rows if wants & 1 else 0, rows if wants & 2 else 0, *kept, rows)
    return tuple(logits.new_empty(n, dtype=dtype) for n, dtype in zip(sizes, _DTYPES, strict=True))


def _check_rows(tensor: Any, name: str, dtype: torch.dtype, logits: Tensor) -> None:
    if tensor is None:
        return
    known = is_static(logits) and is_static(tensor)
    if tensor.dim() != 1 or (known and tensor.shape[0] != logits.shape[0]):
        raise ValueError(f"{name}: expected shape [{logits.shape[0]}], got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype_name(dtype)}, got {dtype_name(tensor.dtype)}")


def _check_allowed(allowed: Any, rows: int, valid: Any) -> None:
    if allowed is None or not is_static(allowed) or type(valid) is not int:
        return
    if allowed.dtype != torch.int32:
        raise TypeError(f"allowed: expected dtype int32, got {dtype_name(allowed.dtype)}")
    words = -(-valid // 32)
    if allowed.dim() != 2 or allowed.shape[0] != rows or allowed.shape[1] < words:
        raise ValueError(f"allowed: expected shape [{rows}, {words}] or wider, got {list(allowed.shape)}")
    check_columns(allowed, "allowed")
