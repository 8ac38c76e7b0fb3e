"""Forks of tools/mutate.py that judge faults at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


def in_parallel(works: Iterable[Callable[[int], None]], workers: int) -> None:
    """Runs each job in a fork of this process, at most `workers` at once. Each job gets its worker's number, which no
    other running job has. Jobs are taken when a worker is free, so the iterable may prepare later jobs."""
    free, running = list(range(workers)), dict[int, int]()

    def end_one() -> None:
        child, _ = os.wait()
        free.append(running.pop(child))

    try:
        for work in works:
            while not free:
                end_one()
            worker = free.pop(0)
            sys.stdout.flush()
            child = os.fork()
            if not child:
                status = 1
                try:
                    work(worker)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            running[child] = worker
    finally:
        while running:
            end_one()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Admits one process at a time; the path names the lock."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
