"""The extension module, or an ImportError that says what to do."""

from __future__ import annotations

from typing import Any

try:
    from . import _C as module  # type: ignore[attr-defined]
except ImportError as error:  # pragma: no cover - needs a broken installation
    raise ImportError(
        "rl_kernel_native was imported without its compiled extension. Install it with `pip install .` from the source "
        "tree, or run outside the source tree if a wheel is installed. "
        f"({error})"
    ) from error

module: Any  # type: ignore[no-redef]


def architectures(prefix: str = "") -> list[str]:
    """GPU architectures with machine code in this build, such as ``["sm_80", "sm_90a"]``, that begin with a prefix."""
    return [name for name in str(module.architectures).split() if name.startswith(prefix)]
