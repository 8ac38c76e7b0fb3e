"""Entry point of `rlk`: what its extra lacks is named before anything of it is imported."""

from __future__ import annotations

import importlib.util
import sys

EXIT_BAD_INPUT = 2  # Python's own status for a traceback, 1, means drift


def main() -> None:
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        print(f'error: {names} not installed; in a clone of the repository: pip install ".[compare]"', file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    from .cli import app

    app()
