"""Entry point of `rlk`: what its extra lacks is named before anything of it is imported."""

from __future__ import annotations

import importlib.util
import sys

from .. import _variants

EXIT_BAD_INPUT = 2  # Python's own status for a traceback, 1, means drift


def main() -> None:
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        distribution = (_variants.installed() or ["rl-kernel-native"])[0].split()[0]
        print(
            f"error: {' and '.join(missing)} not installed; try: pip install '{distribution}[compare]'", file=sys.stderr
        )
        sys.exit(EXIT_BAD_INPUT)
    from .cli import app

    app()
