"""The cases of a certificate: seeded operands, and calls on them. An operator's own cases are in its module of this
package.

Operands are exactly scaled integers from a hash of a counter, so they have the same bits on every machine and with
every version of NumPy and torch. This module imports torch only when a certificate is made.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .._arithmetic import arithmetic_of

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float32")
LAYOUTS = ("contiguous", "strided", "misaligned")
MOST_NEIGHBOURS = 129  # distinct rows around the certified row; larger batches repeat these rows
# Reasons why operators have no cases.
BY_SEQUENCE = "rows are sequences of any length: its own tests compare bytes padded, packed, alone and on every backend"
BY_BATCH = "reads the whole batch, so no row of it is fixed"
TEMPERATURE = 0.75
STATISTICS = ("logprob", "lse", "entropy", "sum_p_sq")
TOKENS = 8203  # more than one block of 8192 tokens (docs/numerics.md, rule 9)
BLOCK = 8192
CHUNKS = "chunks of 8192 through main_grad"


def noise(name: str, seed: int, shape: tuple[int, ...], deviation: float = 1.0) -> np.ndarray:
    """float32 values with a nearly normal distribution. A value is the sum of four 16-bit integers of a hashed counter
    (SplitMix64)."""
    key = int.from_bytes(hashlib.sha256(f"{name} {seed}".encode()).digest()[:8], "little")
    z = np.arange(int(np.prod(shape)), dtype=np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    total = z.view(np.uint16).reshape(-1, 4).sum(-1, dtype=np.int32) - 131_070
    return (total * (deviation / 37837.0)).astype(np.float32).reshape(shape)


def indices(name: str, seed: int, count: int, below: int) -> np.ndarray:
    """int64 ids in [0, below)."""
    return (noise(name, seed, (count,)).view(np.uint32) % np.uint32(below)).astype(np.int64)


def _tensor(values: np.ndarray, dtype: str) -> torch.Tensor:
    torch: Any = importlib.import_module("torch")
    found: torch.Tensor = torch.from_numpy(values).to(getattr(torch, dtype))
    return found


class Arrays:
    """Tensors of torch on a device. A subclass may define `wrap` and `unwrap` for arrays of other frameworks."""

    has_autograd = True  # False: gradients that need autograd are skipped

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.torch: Any = importlib.import_module("torch")
        self.device: torch.device = self.torch.device(device)

    def wrap(self, tensor: torch.Tensor) -> Any:
        """A tensor, with any strides, as an argument for the operators."""
        return tensor

    def unwrap(self, array: Any) -> torch.Tensor:
        """An operator's result as a tensor."""
        result: torch.Tensor = array
        return result

    @property
    def exponentials(self) -> tuple[str, ...]:
        """The exponentials of rule 3 (docs/numerics.md) that exist on the device."""
        return ("portable", "hardware") if self.arithmetic.startswith("sm_") and self._has_ex2 else ("portable",)

    @property
    def _has_ex2(self) -> bool:
        return self.device.type != "cpu" or self.arithmetic == "sm_90"  # the CPU models the exponential of sm_90

    @property
    def product_dtypes(self) -> tuple[str, ...]:
        """The dtypes of matrix products: only the CPU in ieee arithmetic multiplies float32."""
        return DTYPES if self.arithmetic == "ieee" else DTYPES[:2]

    @property
    def arithmetic(self) -> str:
        """The unit whose matrix products the device computes."""
        return arithmetic_of(self.device)

    def laid_out(self, values: torch.Tensor, layout: str) -> torch.Tensor:
        """`values` [rows, ...] on the device, as a view into memory that otherwise holds NaN (or -1)."""
        values = values.to(self.device)
        rows, row = (values.shape[0], values[0].numel()) if values.dim() > 1 else (1, values.numel())
        gap, offset = {"contiguous": (0, 0), "strided": (16, 32), "misaligned": (3, 1)}[layout]
        filler = float("nan") if values.is_floating_point() else -1
        memory = self.torch.full((offset + rows * (row + gap),), filler, dtype=values.dtype, device=self.device)
        inner = values[0].contiguous().stride() if values.dim() > 1 else ()
        strides = (row + gap, *inner) if values.dim() > 1 else (1,)
        view = memory.as_strided(values.shape, strides, offset)
        view.copy_(values)
        return view

    def bytes_of(self, array: Any, row: int | None = None) -> bytes:
        """The bytes of one row of a result, or of all rows."""
        tensor = self.unwrap(array)
        part = (tensor if row is None else tensor[row : row + 1]).detach().contiguous().cpu()
        data: bytes = part.view(self.torch.uint8).numpy().tobytes()
        return data


Call = Callable[[Arrays, Mapping[str, Any]], Mapping[str, Any]]
Rows = dict[str, tuple[tuple[int, ...] | None, float]]  # operands by row, see Case.rows


@dataclass(frozen=True)
class Case:
    """One pass of an operator, in one dtype, of one shape.

    Attributes:
        direction: "forward" or "backward".
        rows: operands of each row by name: (shape of a row, deviation), or (None, below) for ids in [0, below).
        fixed: operands that all rows share, by name: (shape, deviation, dtype).
        call: a function of the operands on the device that returns results with the rows as first dimension.
        token_sum: for a result that is summed over all rows (a token sum), the number of these rows; else None.
        ways: other calls that must give the same results, by description.
        exp: exponential of softmax statistics; "" for operators without an exponential.
        options: options of the call, in words.
    """

    operator: str
    direction: str
    dtype: str
    shape: tuple[int, ...]
    outputs: tuple[str, ...]
    rows: Mapping[str, tuple[tuple[int, ...] | None, float]]
    call: Call
    fixed: Mapping[str, tuple[tuple[int, ...], float, str]] = field(default_factory=dict)
    token_sum: int | None = None
    ways: Mapping[str, Call] = field(default_factory=dict)
    exp: str = ""
    options: str = ""

    @property
    def key(self) -> str:
        """The name of the case; digests from several machines are compared by this name."""
        words = (
            self.operator,
            "/".join(self.outputs),
            self.dtype,
            "x".join(map(str, self.shape)),
            self.exp,
            self.options,
        )
        return " ".join(word for word in words if word)

    def values(self, seed: int, count: int) -> dict[str, torch.Tensor]:
        """Operands of `count` rows, on the CPU."""
        return {name: self._tensor(name, seed, count, *of) for name, of in self.rows.items()}

    def shared(self) -> dict[str, torch.Tensor]:
        """The operands that rows share, on the CPU."""
        return {
            name: _tensor(noise(name, 0, shape, deviation), dtype)
            for name, (shape, deviation, dtype) in self.fixed.items()
        }

    def _tensor(
        self, name: str, seed: int, count: int, shape: tuple[int, ...] | None, parameter: float
    ) -> torch.Tensor:
        name = f"{self.operator} {name}"
        if shape is None:
            return _tensor(indices(name, seed, count, int(parameter)), "int64")
        dtype = "float32" if shape == () else self.dtype  # a row is one number
        return _tensor(noise(name, seed, (count, *shape), parameter), dtype)


def dtypes_of(quick: bool, large: bool) -> tuple[str, ...]:
    """The dtypes of a case. A quick certificate checks large shapes only in bfloat16."""
    return DTYPES[:1] if quick and large else DTYPES


def in_words(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


def chunks_of(arrays: Arrays, a: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the operands of a token sum, a result that is summed over all rows, in blocks of rows."""
    tensors = {name: arrays.unwrap(array) for name, array in a.items()}
    count = next(iter(tensors.values())).shape[0]
    for first in range(0, count, BLOCK):
        yield {name: arrays.wrap(t[first : first + BLOCK] if t.shape[0] == count else t) for name, t in tensors.items()}
