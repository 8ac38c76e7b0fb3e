"""Scalars of one call in one vector on its device."""

from __future__ import annotations

from typing import Any


class MetricVector:
    """float32 ``vector`` whose elements have the ``names`` of the subclass: ``metrics.kl`` is an element of it, without
    a copy to the host; ``metrics.asdict()`` makes one copy of all."""

    names: tuple[str, ...] = ()

    def __init__(self, vector: Any) -> None:
        self.vector = vector

    def __getattr__(self, name: str) -> Any:
        if name in self.names:
            return self.vector[self.names.index(name)]
        raise AttributeError(f"{type(self).__name__} has no {name!r}; it has {', '.join(self.names)}")

    def asdict(self) -> dict[str, float]:
        """All of them as Python numbers: waits for the device."""
        return dict(zip(self.names, (float(x) for x in self.vector.tolist()), strict=True))

    def _shown(self) -> dict[str, str]:
        """What printing shows, by name."""
        return {name: f"{value:.6g}" for name, value in self.asdict().items()}

    def __repr__(self) -> str:
        try:
            shown = self._shown()
        except Exception:  # a fake or a traced tensor has no values to show, and printing one is no error
            return f"{type(self).__name__}({self.vector!r})"
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"
