"""Lets runs of `rlk align` that share a GPU take turns. All runs start together. While one run measures, the others
wait; after all measurements, the runs continue together.

The environment variable RLK_ALIGN_LOCK names a file, FILE, that the processes of all these runs lock. Without this
variable, a process takes no turns. A process that computes holds a shared lock of FILE, and a process that measures
holds the exclusive lock. A process that has not measured yet also holds a shared lock of a second file, FILE.before.
When it first waits for its turn, it adds a byte to FILE.before. A script that holds a shared lock of FILE can therefore
wait until all runs are ready, and then release the lock.
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
PAUSE = 0.1  # seconds of pause after the lock is released; without it, the last holder would take the lock again

_file: Any = None
_before: Any = None
_waited = False


def beside_others(*, measures: bool) -> None:
    """Waits for a process that is measuring now. After this call, no other process measures while this process
    computes.

    Args:
        measures: whether this process will measure; it then calls :func:`measured` afterwards.
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
    """Waits until every process has measured, because the next work of this process would disturb their
    measurements."""
    if _before is not None:
        fcntl.flock(_file, fcntl.LOCK_UN)
        fcntl.flock(_before, fcntl.LOCK_EX)
        fcntl.flock(_before, fcntl.LOCK_UN)
        fcntl.flock(_file, fcntl.LOCK_SH)


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], *, measures: bool) -> None:
    """The main function of a process of `rlk align`: reads the request from the file that its command line names, and
    writes the answer to that file."""
    path = Path(sys.argv[1])
    request = json.loads(path.read_text())
    beside_others(measures=measures)
    path.write_text(json.dumps(request | answer(request)))
