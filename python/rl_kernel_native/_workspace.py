"""The memory that operators used in addition to their inputs and outputs."""

from __future__ import annotations

from typing import NamedTuple

from ._native import module as _C


class WorkspaceStats(NamedTuple):
    """Workspace use of one device since the start of the process or the last reset."""

    calls: int
    last_bytes: int
    most_bytes: int


def workspace_stats(*, reset: bool = False) -> dict[str, WorkspaceStats]:
    """The workspace that calls took from the caller's allocator.

    The workspace is the framework's own memory (torch's caching allocator, JAX's, CuPy's pool). The allocator keeps
    memory that a call has returned, and the next call of any operator may get this memory. A second call of the same
    size therefore allocates nothing, and between calls other code may use the memory.

    Args:
        reset: whether to reset the counts to 0 afterwards.
    Returns: ``{"cuda:0": WorkspaceStats(calls, last_bytes, most_bytes)}``, one entry for each device on which a call
        took workspace. Memory that the CPU backend itself allocates is not counted.
    Example:
        >>> _ = rk.workspace_stats(reset=True)
        >>> rk.workspace_stats()  # since then no call took any
        {}
    """
    return {device: WorkspaceStats(*numbers) for device, numbers in _C.workspace_stats(reset).items()}
