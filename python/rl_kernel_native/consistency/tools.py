"""The commands of `rlk` that work without the optional packages of the other commands: `--version`, `doctor` and
`bench`."""

from __future__ import annotations

from .. import __version__, variant


def version() -> str:
    """The line of `rlk --version`."""
    return f"rl_kernel_native {__version__} ({variant})"


def run_tool(name: str, arguments: list[str]) -> int:
    """Runs `rlk doctor` or `rlk bench`, which parse their own arguments, and returns the exit status."""
    if name == "doctor":
        from .. import doctor

        return doctor.main(arguments, "rlk doctor")
    from ..bench import __main__ as bench

    return bench.main(arguments, "rlk bench")
