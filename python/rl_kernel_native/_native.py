"""The extension module, or an ImportError that says what to do."""

from __future__ import annotations

import re
import zlib
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

INTERFACE = "de8f3cee"  # interface_of() the extension that these sources call


def interface_of(extension: Any) -> str:
    """A stamp of what an extension's functions are called and take."""
    functions = []
    for name, function in sorted(vars(extension).items()):
        if hasattr(function, "__nb_signature__"):
            kinds = re.findall(r"arg\d*: (?:(bool|float|int|str)\b)?", function.__nb_signature__[0][0])
            functions.append(f"{name}({','.join(kinds)})")
    return f"{zlib.crc32(' '.join(functions).encode()):08x}"


def require_interface(extension: Any) -> None:
    """Refuses an extension that was built from other sources: its functions take other arguments."""
    found = interface_of(extension)
    if found != INTERFACE:
        raise ImportError(
            f"rl_kernel_native: expected a compiled extension with interface {INTERFACE}, got {found} of "
            f"{extension.__file__}, which was built from other sources; rebuild it: `pip install .` in the source tree"
        )


require_interface(module)


def architectures(prefix: str = "") -> list[str]:
    """GPU architectures with machine code in this build, such as ``["sm_80", "sm_90a"]``, that begin with a prefix."""
    return [name for name in str(module.architectures).split() if name.startswith(prefix)]
