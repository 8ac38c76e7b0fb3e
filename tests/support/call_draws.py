"""Draws the numbers and arrays of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Operand(NamedTuple):
    """Describes an array that is not made yet.

    Attributes:
        written: the operator writes it (out=, main_grad, caches).
    """

    values: np.ndarray
    dtype: str
    written: bool = False


MASKS = ("bool", "uint8", "int32", "int64", "float32", "bfloat16", "float64")
FLOATS = ("float32", "bfloat16", "float16")


class Draw:
    """Draws numbers and arrays of one call."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.dtype = self.of(*FLOATS)  # dtype of operands for which any dtype is valid

    def of(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, share: float = 0.5) -> bool:
        return bool(self.rng.random() < share)

    def perhaps(self, value: Callable[[], Any], share: float = 0.5) -> Any:
        return value() if self.chance(share) else None

    def size(self, *choices: int) -> int:
        return int(self.of(*(choices or (1, 2, 3, 5, 8))))

    def tokens(self) -> tuple[int, ...]:
        """The shape of padded tokens, or of one sequence."""
        count = self.size(0, 1, 2, 3, 7, 17, 130)
        return (self.size(0, 1, 2, 3), count) if self.chance(0.7) else (count,)

    def normal(self, *shape: int, dtype: str = "float32") -> Operand:
        return Operand(self.rng.standard_normal(shape, np.float32), dtype)

    def matrix(self, *shape: int) -> Operand:
        return self.normal(*shape, dtype=self.dtype)

    def logprobs(self, shape: tuple[int, ...]) -> Operand:
        return Operand(-np.abs(self.rng.standard_normal(shape, np.float32)), "float32")

    def integers(self, low: int, high: int, *shape: int) -> Operand:
        return Operand(self.rng.integers(low, max(high, low + 1), shape), self.of("int32", "int64"))

    def mask(self, shape: tuple[int, ...]) -> Operand:
        return Operand((self.rng.random(shape) < 0.7).astype(np.int64), self.of(*MASKS))

    def ones(self, *shape: int) -> Operand:
        return Operand(np.abs(self.rng.standard_normal(shape, np.float32)) + np.float32(0.5), "float32")

    def zeros(self, *shape: int, dtype: str = "float32") -> Operand:
        return Operand(np.zeros(shape), dtype, written=True)

    def cuts(self, total: int, parts: int, dtype: str = "") -> Operand:
        inner = np.sort(self.rng.integers(0, total + 1, max(parts - 1, 0)))
        ends = np.concatenate(([0], inner, [total]))[: parts + 1]
        return Operand(ends, dtype or self.of("int32", "int64"))

    def sequences(self) -> tuple[tuple[int, ...], Operand | None, int]:
        """A shape of tokens, the offsets if they are packed, and the number of sequences."""
        shape = self.tokens()
        if len(shape) == 2:
            return shape, None, shape[0]
        parts = self.size(1, 2, 4)
        return (shape, self.cuts(shape[0], parts), parts) if self.chance() else (shape, None, 1)
