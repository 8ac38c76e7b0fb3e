"""Operators, one module each; the public names are re-exported by :mod:`rl_kernel_native`."""

from __future__ import annotations

import importlib
import pkgutil

from .. import _call


def register_torch_operators() -> None:
    """Registers all operators with torch, including those that :mod:`_operator` does not describe."""
    _call.load()
    for module in pkgutil.iter_modules(__path__):
        if module.name.endswith("_torch"):
            importlib.import_module(f"{__name__}.{module.name}")
