"""Turns of runs of `rlk align` that share a GPU. The runs start together, measure in turns while the others wait, and
go on together.

The environment variable RLK_ALIGN_LOCK names a file, which the processes of all these runs lock. Without this variable,
a process takes no turns. A process that computes holds a shared lock of the file, and a process that measures holds the
exclusive lock. Whoever has yet to measure also holds a shared lock of a second file, FILE.before, and adds a byte to it
where it first waits for its turn: a script that holds a shared lock of FILE can wait for all runs, and then let them
begin.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VARIABLE = "RLK_ALIGN_LOCK"
PAUSE = 0.1  # seconds in which a waiting process takes the lock, which otherwise goes to its last holder again

_file: Any = None
_before: Any = None
_waited = False


def beside_others(*, measures: bool) -> None:
    """From now on no other process measures. Waits for a process that measures now.

    Args:
        measures: whether this process will measure, and then call :func:`measured`.
    """
    global _file, _before
    path = os.environ.get(VARIABLE)
    if not path:
        return
    if measures:
        _before = open(path + ".before", "a")  # noqa: SIM115 (the end of the process closes it)
        fcntl.flock(_before, fcntl.LOCK_SH)
    _file = open(path, "a")  # noqa: SIM115
    fcntl.flock(_file, fcntl.LOCK_SH)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside the context, every other process waits. Afterwards another process takes its turn."""
    global _waited
    if _file is None:
        yield
        return
    if not _waited and _before is not None:
        _before.write(".")
        _before.flush()
    _waited = True
    fcntl.flock(_file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(_file, fcntl.LOCK_UN)
        time.sleep(PAUSE)
        fcntl.flock(_file, fcntl.LOCK_SH)


def measured() -> None:
    """Waits until every process has measured: the next work of this process would delay the others."""
    if _before is not None:
        fcntl.flock(_file, fcntl.LOCK_UN)
        fcntl.flock(_before, fcntl.LOCK_EX)
        fcntl.flock(_before, fcntl.LOCK_UN)
        fcntl.flock(_file, fcntl.LOCK_SH)


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], *, measures: bool) -> None:
    """Runs a part's process: reads the request from the file that its command names, and writes the answer there."""
    path = Path(sys.argv[1])
    request = json.loads(path.read_text())
    beside_others(measures=measures)
    path.write_text(json.dumps(request | answer(request)))
