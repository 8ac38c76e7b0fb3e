"""Turns of runs of `rlk align` that share a GPU: they start together, and one measures while the others wait.

The environment variable RLK_ALIGN_LOCK names a file, which the processes of all these runs lock. Without it, a process
is alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import Any

VARIABLE = "RLK_ALIGN_LOCK"

_file: Any = None


def beside_others() -> None:
    """From now on, no other process measures. Waits for one that does."""
    global _file
    if os.environ.get(VARIABLE):
        _file = open(os.environ[VARIABLE], "a")  # noqa: SIM115 (the end of the process closes it)
        fcntl.flock(_file, fcntl.LOCK_SH)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within it, every other process waits for its own turn."""
    if _file is not None:
        fcntl.flock(_file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if _file is not None:
            fcntl.flock(_file, fcntl.LOCK_SH)
