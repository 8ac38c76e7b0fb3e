"""Progress bars on a terminal, silence in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


class Progress:
    """Opens one bar per task on stderr when stdout and stderr are both terminals; otherwise writes nothing."""

    def __init__(self, enabled: bool | None = None) -> None:
        # isatty rather than rich's own detection: FORCE_COLOR must not put control codes into a log file.
        self.enabled = (sys.stderr.isatty() and sys.stdout.isatty()) if enabled is None else enabled

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        """Yields advance(n), to be called as n of `total` units get done."""
        if not self.enabled:
            yield lambda n: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with RichProgress(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task(description, total=total)
            yield lambda n: bars.advance(task, n)
