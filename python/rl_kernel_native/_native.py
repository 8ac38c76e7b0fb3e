"""The extension module, or an ImportError that says what to do."""

from __future__ import annotations

import re
from itertools import groupby
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

_KINDS = re.compile(r"arg\d*: (?:(bool|float|int|str)\b)?")  # nanobind's names of object types differ between versions
_declared: dict[str, str] = {}


def _takes(function: Any) -> str:
    """The kinds of a function's arguments, in order, such as "object*2, int"."""
    kinds = [kind or "object" for kind in _KINDS.findall(function.__nb_signature__[0][0])]
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    return ", ".join(kind if count == 1 else f"{kind}*{count}" for kind, count in runs)


def _refuse(wanted: str, found: str) -> None:
    raise ImportError(
        f"rl_kernel_native: expected a compiled extension with {wanted}, got {found} of {module.__file__}, which was "
        "built from other sources; rebuild it: `pip install .` in the source tree"
    )


def functions(**takes: str) -> Any:
    """Returns the extension after a check that each named function takes the arguments in its text. Each module
    declares the functions that it calls.

    Raises: ImportError for an extension that was built from other sources.
    """
    for name, wanted in takes.items():
        found = _takes(getattr(module, name)) if hasattr(module, name) else None
        if found != wanted:
            _refuse(f"{name}({wanted})", "none" if found is None else f"{name}({found})")
    _declared.update(takes)
    return module


def require_no_others() -> None:
    """Refuses an extension with a function that no module has declared. Raises: ImportError."""
    others = [name for name, f in vars(module).items() if hasattr(f, "__nb_signature__") and name not in _declared]
    if others:
        _refuse("declared functions alone", ", ".join(f"{name}({_takes(getattr(module, name))})" for name in others))


functions(  # functions that belong to no operator
    described_api="",
    bfloat16_capsule="object",
    bool_capsule="object",
    check_main_grad="object*2",
    cpu_isa="",
    has_exchange_api="object",
    is_direct_gradient="object",
    may_skip_dispatcher="object",
    num_threads="",
    scale_gradients="object*3, int",
    set_cpu_isa="str",
    set_python="object*3",
    set_num_threads="int",
    set_torch="object*2",
    shape_and_dtype="object, str",
    wanted_gradients="object",
    workspace_stats="bool",
)


def architectures(prefix: str = "") -> list[str]:
    """GPU architectures for which this build has machine code and whose names begin with ``prefix``, such as
    ``["sm_80", "sm_90a"]``."""
    return [name for name in str(module.architectures).split() if name.startswith(prefix)]
