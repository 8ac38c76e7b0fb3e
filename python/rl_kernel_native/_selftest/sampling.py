"""Self-tests of what rollouts draw by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..ops import random_bits as random_bits_op
from .tools import Arrays, Check, timed


def random_bits(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Random words against the reference."""
    arrays = Arrays(torch, device)

    def reference() -> tuple[bool, str]:
        ids = np.arange(-40, 40) * 77_777_777_777
        words = random_bits_op.random_bits(-5, arrays.put(ids), 9, 7)
        want = random_bits_op.random_bits_reference(-5, ids, 9, 7)
        halves = ((words >> 16, want >> 16), (words & 0xFFFF, want & 0xFFFF))  # which float32 holds
        differ = sum(int((arrays.get(got) != half).sum()) for got, half in halves)
        return differ == 0, f"{differ} halves of words differ from the reference"

    yield timed("against the reference", reference)
