"""Batches that are split over the ranks of a process group. Shares are gathered in rank order, so a statistic has the
same bits as on one rank with the whole batch. A rank's share may be empty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from . import _torch


def require_group(group: Any) -> None:
    kind: Any = getattr(distributed, "ProcessGroup", ())  # missing in a torch without distributed
    if not isinstance(group, kind):
        raise TypeError(f"process_group: expected a torch.distributed.ProcessGroup, got {type(group).__name__}")


def require_shares(group: Any, **arrays: Any) -> None:
    """Checks the group and this rank's arrays before a collective. If one rank raised an error later, the other ranks
    would wait forever."""
    require_group(group)
    if distributed.get_rank(group) < 0:
        raise ValueError("process_group: expected a group with this rank in it, got one without")
    given = {name: array for name, array in arrays.items() if array is not None}
    for name, array in given.items():
        if not isinstance(array, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor beside process_group, got {type(array).__name__}")
    if not _torch.is_direct(*given.values()):
        raise ValueError("process_group: not under torch.compile, torch.func or a dispatch mode")


def sizes(group: Any, *of_rank: Any, like: Tensor) -> list[list[int]]:
    """The numbers ``of_rank`` of every rank, one list per rank. The host waits for the device once."""
    own = torch.stack([torch.as_tensor(n, dtype=torch.int64, device=like.device) for n in of_rank])
    found = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(found, own, group=group)
    every: list[list[int]] = torch.stack(found).tolist()
    return every


def gathered(group: Any, share: Tensor, counts: list[int], width: int | None = None) -> Tensor:
    """The shares of all ranks, of which rank r has ``counts[r]`` rows. With ``width``, rows are padded with zeros to
    ``width`` columns."""
    shape = (max(counts), *share.shape[1:]) if width is None else (max(counts), width)
    own = share.new_zeros(shape)
    own[tuple(slice(n) for n in share.shape)] = share
    found = [torch.empty_like(own) for _ in counts]
    distributed.all_gather(found, own, group=group)
    return torch.cat([of_rank[:n] for of_rank, n in zip(found, counts, strict=True)])


def place(group: Any, counts: list[int]) -> slice:
    """The rows of this rank among all rows."""
    before = sum(counts[: distributed.get_rank(group)])
    return slice(before, before + counts[distributed.get_rank(group)])
