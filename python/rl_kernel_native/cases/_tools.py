"""The shared parts of the case modules: how an operator's cases are described, arrays on a device, comparisons,
outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ._certificate import Arrays as CertificateArrays
from ._certificate import Case

IGNORED = -100


class Check(NamedTuple):
    check: str
    passed: bool | None
    detail: str
    seconds: float


class Pass(NamedTuple):
    """One pass of a bench.

    Attributes:
        name: the pass's name in the table.
        moved: bytes that a call must move.
        peers: calls on a buffer, by name, this library first.
        compiles: name of the peer that is also timed under torch.compile, or "".
    """

    name: str
    moved: float
    peers: Mapping[str, Callable[[Any], Any]]
    compiles: str = ""


class Buffers(NamedTuple):
    """The parameters of a bench: sizes, torch's dtype and device. If one buffer has ``bytes`` bytes, ``count(bytes)``
    buffers together exceed every cache."""

    torch: Any
    rows: int
    columns: int
    dtype: Any
    device: Any
    count: Callable[[int], int]


@dataclass(frozen=True)
class Bench:
    """A command of ``python -m rl_kernel_native.bench``.

    Attributes:
        about: the operator in one line.
        module: module of the bench; its ``measured`` times the operator against peers. "passes" means the passes given
            here.
        rows: default number of rows, on the CPU and on a GPU.
        rows_are: unit of a row in the command's help, or "".
        sizes: further options, by name: the default, and the help text or None.
        only_dtype: dtype of the operands, if --dtype is not an option.
        on_gpu: dtypes that a GPU serves.
        compiles: whether torch.compile is an optional peer.
        passes: returns buffers of [rows, columns], and the passes with each peer's call on a buffer.
    """

    about: str
    module: str = "passes"
    rows: tuple[int, int] = (64, 8192)
    rows_are: str = ""
    sizes: Mapping[str, tuple[int, str | None]] = field(default_factory=dict)
    only_dtype: str | None = None
    on_gpu: tuple[str, ...] = ("bfloat16", "float16", "float32")
    compiles: bool = True
    passes: Callable[[Buffers], tuple[list[Any], list[Pass]]] | None = None


@dataclass(frozen=True)
class Cases:
    """The uses of an operator's example inputs.

    Attributes:
        checks: the doctor's self-test, a function of torch, a device and its compute capability; None: another
            operator's self-test includes it.
        bench: the bench; None: another operator's bench includes it.
        certificate: a function that yields the cases on a device, all or only the quick cases; or the reason why there
            are no cases.
    """

    checks: Callable[[Any, str, tuple[int, int] | None], Iterator[Check]] | None
    bench: Bench | None
    certificate: Callable[[CertificateArrays, bool], Iterator[Case]] | str


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """``x`` rounded to ``dtype``, as float32."""
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":  # rounds to nearest even, by integer operations on the bits
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return x


class Arrays:
    """Turns a case's NumPy arrays into NumPy's or torch's arrays on a device, and results back into NumPy arrays."""

    def __init__(self, torch: Any, device: str) -> None:
        self.torch, self.device = torch, device
        self.dtypes = ("float32", "float16", "bfloat16") if torch is not None else ("float32", "float16")

    def put(self, array: np.ndarray, dtype: str | None = None) -> Any:
        if self.torch is None:
            return array if dtype is None else array.astype(dtype)
        tensor = self.torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        return tensor if dtype is None else tensor.to(getattr(self.torch, dtype))

    def get(self, array: Any) -> np.ndarray:
        if self.torch is None:
            return np.asarray(array).astype(np.float32)
        return np.asarray(array.float().cpu().numpy())


def worst_share(got: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> float:
    share = np.abs(got - expected) / allowed
    return float("inf") if np.isnan(share).any() else float(share.max())


def within_bound(share: float, case: str = "") -> tuple[bool, str]:
    """Outcome of a test. ``share`` is the largest error divided by its bound in contract.py; a failure names the
    case."""
    if share <= 1.0:
        return True, "every error is within its bound"
    return False, f"an error is {share:.2f} times its bound{f', in {case}' if case else ''}"


def same_bytes(a: np.ndarray, b: np.ndarray) -> int:
    """The number of elements whose bytes differ."""
    return int((a.view(np.uint32) != b.view(np.uint32)).sum())


def same_results(pairs: Iterable[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]) -> tuple[bool, str]:
    """Outcome of a test that compares two sets of results, by name and byte for byte, for each pair."""
    differ = total = 0
    for here, there in pairs:
        differ += sum(same_bytes(here[name], there[name]) for name in here)
        total += sum(value.size for value in here.values())
    return differ == 0, f"{differ} of {total} values differ"


def timed(check: str, run: Callable[[], tuple[bool, str]]) -> Check:
    start = time.perf_counter()
    passed, detail = run()
    return Check(check, passed, detail, round(time.perf_counter() - start, 3))
