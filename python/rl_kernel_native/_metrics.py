"""Scalars of one call in one vector on its device."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from . import _check


def is_divisor(x: Any) -> Any:
    """Whether the elements are above 0, finite and not subnormal: the inverse of a subnormal number may be infinite."""
    return (x >= _check.SMALLEST_NORMAL) & (x < float("inf"))


class DenominatorStatus(enum.IntFlag):
    """Status of a loss whose denominator is on the device. If no bit is set, the loss is valid."""

    ZERO = 1  # nothing to divide by: loss and gradients are 0
    NOT_A_DIVISOR = 2  # negative, subnormal, infinite or NaN: the loss is NaN

    @staticmethod
    def of(denominator: Any) -> Any:
        """The status bits of an array's elements, int32 on its device. Nothing waits for the device. The function works
        for every operator with a denominator.

        Example:
            >>> rk.DenominatorStatus.of(torch.tensor([7.0, 0.0, -3.0, torch.nan]))
            tensor([0, 1, 2, 2], dtype=torch.int32)
        """
        zero = denominator == 0
        bits = zero * 1 + ((zero | is_divisor(denominator)) == 0) * 2
        if hasattr(bits, "astype"):
            return bits.astype("int32")
        return bits.int() if hasattr(bits, "int") else np.int32(bits)


class MetricVector:
    """float32 ``vector`` whose elements have the ``names`` of the subclass: ``metrics.kl`` is one element on the
    device, which is not copied to the host; ``metrics.asdict()`` copies all elements once."""

    names: tuple[str, ...] = ()

    def __init__(self, vector: Any) -> None:
        self.vector = vector

    def __getattr__(self, name: str) -> Any:
        if name in self.names:
            return self.vector[self.names.index(name)]
        raise AttributeError(f"{type(self).__name__} has no {name!r}; it has {', '.join(self.names)}")

    @property
    def denominator_status(self) -> Any:
        """Bits of :class:`DenominatorStatus`, one int32 on the device. Only metrics with a denominator have this
        status."""
        return DenominatorStatus.of(self.denominator)

    def asdict(self) -> dict[str, float]:
        """All metrics as Python numbers. The call waits for the device."""
        return dict(zip(self.names, (float(x) for x in self.vector.tolist()), strict=True))

    def _shown(self) -> dict[str, str]:
        """The metrics as text for printing, by name."""
        return {name: f"{value:.6g}" for name, value in self.asdict().items()}

    def __repr__(self) -> str:
        try:
            shown = self._shown()
        except Exception:  # a fake or traced tensor has no values, but printing it must not fail
            return f"{type(self).__name__}({self.vector!r})"
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"
