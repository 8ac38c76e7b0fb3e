"""Progress of long tasks: bars on a terminal; in a pipe or file, a line every 15 seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]
_SECONDS = 15.0


class Progress:
    """One bar per task on stderr when stdout and stderr are both terminals; otherwise a plain line every 15 seconds.

    Args:
        enabled: whether to draw bars; None: if both are terminals.
        silent: write nothing, for calls from Python.
    """

    def __init__(self, enabled: bool | None = None, silent: bool = False) -> None:
        self.silent = silent
        # isatty rather than rich's own detection: FORCE_COLOR must not put control codes into a log file.
        self.enabled = (sys.stderr.isatty() and sys.stdout.isatty()) if enabled is None else enabled

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        """Yields advance(n), to be called as n of `total` units get done."""
        if self.silent:
            yield lambda n: None
            return
        if not self.enabled:
            yield _Lines(description, total)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with RichProgress(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task(description, total=total)
            yield lambda n: bars.advance(task, n)


class _Lines:
    def __init__(self, description: str, total: int) -> None:
        self._description, self._total, self._done = description, total, 0
        self._next = time.monotonic() + _SECONDS

    def __call__(self, n: int) -> None:
        self._done += n
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SECONDS
            print(f"{self._description}: {self._done} of {self._total}", file=sys.stderr, flush=True)
