"""Random words for torch tensors: an eager call goes straight to the extension; whatever traces goes through the
registered operator. Integers have no gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._native import module as _C
from .._register import define, fake, implement
from .._shapes import check_row_integers
from .._torch import is_direct, memory, prepare, require_tensors

__all__ = ["random_bits"]

define(
    "random_bits(Tensor sample_id, Tensor? seed, SymInt seed_value, Tensor? position, SymInt position_value, int n, "
    "int stream) -> Tensor"
)
_ops = torch.ops.rl_kernel_native


def array_and_number(given: Any) -> tuple[Any, Any]:
    """What a schema takes of an argument that is an array or a number."""
    return (given, 0) if isinstance(given, Tensor) or not isinstance(given, (int, torch.SymInt)) else (None, given)


def random_bits(sample_id: Tensor, seed: Any, position: Any, n: int, stream: int) -> Any:
    if is_direct(sample_id, seed, position):
        _torch.device_type(sample_id, "sample_id")
        prepare(sample_id)
        return _C.random_bits(sample_id, seed, position, n, stream, None, 0)
    seeds, positions = array_and_number(seed), array_and_number(position)
    require_tensors(sample_id=sample_id, optional={"seed": seeds[0], "position": positions[0]})
    return _ops.random_bits(sample_id, *seeds, *positions, n, stream)


def _kernel(
    sample_id: Tensor, seed: Any, seed_value: int, position: Any, position_value: int, n: int, stream: int
) -> Tensor:
    prepare(sample_id)
    seeds = seed_value if seed is None else memory(seed)
    positions = position_value if position is None else memory(position)
    return _C.random_bits(memory(sample_id), seeds, positions, n, stream, None, 0)


implement("random_bits", _kernel)


@fake("random_bits")
def _fake(
    sample_id: Tensor, seed: Any, seed_value: Any, position: Any, position_value: Any, n: int, stream: int
) -> Tensor:
    check_row_integers(sample_id, "sample_id", None)
    check_row_integers(seed, "seed", sample_id)
    check_row_integers(position, "position", sample_id)
    return sample_id.new_empty((sample_id.shape[0], n), dtype=torch.int64)
