"""Shared by the tests of embedding: operands, the contract in NumPy, and error bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import rl_kernel_native as rk
from cases import beyond

DTYPES = ("float32", "bfloat16", "float16")
BLOCK, GROUP = 8192, 64


class Operands(NamedTuple):
    ids: Any  # [tokens...]
    weight: Any  # [rows, columns]
    dy: Any  # [tokens..., columns]


def zipf(rng: np.random.Generator, shape: tuple[int, ...], size: int) -> np.ndarray:
    """Ids in [0, size); the frequency of id i is about 1 / (i + 1)."""
    return np.minimum(size ** rng.random(shape), size).astype(np.int64) - 1 if size > 1 else np.zeros(shape, np.int64)


def operands(
    rng: np.random.Generator,
    tokens: tuple[int, ...],
    rows: int = 50,
    columns: int = 64,
    dtype: str = "bfloat16",
    device: str = "cpu",
    *,
    id_dtype: str = "int64",
    vocab: int | None = None,
) -> Operands:
    import torch

    def normal(*shape: int) -> Any:
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(getattr(torch, dtype)).to(device)

    ids = torch.from_numpy(zipf(rng, tokens, rows if vocab is None else vocab)).to(getattr(torch, id_dtype))
    return Operands(ids.to(device), normal(rows, columns), normal(*tokens, columns))


def results(o: Operands, **options: Any) -> tuple[Any, Any]:
    """y and dweight of one call each, the gradient in float32."""
    y = rk.embedding(o.ids, o.weight, **options)
    return y, rk.embedding_backward(o.dy, o.ids, len(o.weight), dweight_dtype="float32", **options)


def wide(array: Any) -> np.ndarray:
    """float32 values of a tensor."""
    return array.detach().float().cpu().numpy()


# ---- a second implementation of the contract -------------------------------------------------------------------------


def contract(
    o: Operands,
    main_grad: np.ndarray | None = None,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    padding_idx: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """y as float32 values, and dweight in float32. NaNs may have any bits."""
    ids, weight = o.ids.cpu().numpy().astype(np.int64).reshape(-1), wide(o.weight)
    dy = wide(o.dy).reshape(len(ids), weight.shape[1])
    size = vocab_start + len(weight) if vocab_size is None else vocab_size
    y = np.zeros(dy.shape, np.float32)
    dweight = np.zeros(weight.shape, np.float32) if main_grad is None else main_grad.copy()
    tokens_of: dict[int, list[int]] = {}
    for t, token in enumerate(ids):
        row = int(token) - vocab_start
        if not 0 <= token < size:
            y[t] = np.nan
        elif 0 <= row < len(weight):
            y[t] = weight[row]
            if token != padding_idx:
                tokens_of.setdefault(row, []).append(t)
    for row, tokens in tokens_of.items():
        for block in sorted({t // BLOCK for t in tokens}):
            groups = np.zeros((BLOCK // GROUP, weight.shape[1]), np.float32)
            for t in tokens:
                if t // BLOCK == block:
                    groups[t % BLOCK // GROUP] += dy[t]
            while len(groups) > 1:
                groups = groups[0::2] + groups[1::2]
            dweight[row] += groups[0]
    return y.reshape(*o.ids.shape, weight.shape[1]), dweight


def failures(o: Operands, got: tuple[Any, Any], **options: Any) -> str:
    """Says which result is further from float64 than the contract allows; empty if no result is."""
    want = rk.embedding_reference(o.ids.cpu().numpy(), wide(o.weight), dy=wide(o.dy), **options)
    y, dweight = (wide(g).astype(np.float64) for g in got)
    if not np.array_equal(y, want["y"], equal_nan=True):
        return "y"
    facts = {"rows": o.ids.numel(), "scale": want["dweight_scale"]}
    return beyond("embedding", "dweight", dweight, want["dweight"], **facts)


def contract_failures(rng: np.random.Generator) -> str:
    """What test_contract.py compares with the bounds of the table, one at a time."""
    o = operands(rng, (200,), 5, 9)
    y, dweight = results(o)
    return "; ".join((failures(o, (y, dweight)), beyond("embedding", "y", y, o.weight[o.ids])))
