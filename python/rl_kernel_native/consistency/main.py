"""Entry point of `rlk`. If packages that a command needs are missing, an error names them before the command is
imported.

`doctor`, `bench` and `--version` need only NumPy, so they work without the optional packages of the other commands.
"""

from __future__ import annotations

import importlib.util
import sys

from .. import _variants
from .tools import run_tool, version

EXIT_BAD_INPUT = 2  # not 1: that is Python's status for a traceback, and here means drift


def main() -> None:
    """Runs the command of sys.argv and exits with its status."""
    given = sys.argv[1:]
    if given == ["--version"]:
        print(version())
        sys.exit(0)
    if given and given[0] in ("doctor", "bench"):
        sys.exit(run_tool(given[0], given[1:]))
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        cure = _variants.how_to_install("compare")
        print(f"error: {names} not installed; {cure}. doctor, bench and --version need neither", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    from .cli import app

    app()


if __name__ == "__main__":
    main()
