"""The frameworks' own source code, for tests that compare with this code. If a framework is not installed, its test is
skipped with the reason. Under RLK_REQUIRE_FRAMEWORKS, which scripts/test.sh sets, it fails instead. docs/objectives.md
has the commands."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any, NoReturn

import pytest


def absent(framework: str, error: ImportError | None = None) -> NoReturn:
    reason = f"{framework} is not installed" + (f": {error}" if error else "")
    if os.environ.get("RLK_REQUIRE_FRAMEWORKS"):
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)


def imported(module: str, framework: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(module)
        except ImportError as error:
            absent(framework, error)


def verl(module: str = "verl.trainer.ppo.core_algos") -> Any:
    return imported(module, "verl")


def trl(module: str) -> Any:
    return imported(module, "TRL")


def openrlhf() -> Any:
    """Loads loss.py and utils.py of openrlhf/models alone, since the package would import an engine and a trainer."""
    found = importlib.util.find_spec("openrlhf")
    if found is None or not found.submodule_search_locations:
        absent("OpenRLHF")
    package = types.ModuleType("openrlhf_models")
    package.__path__ = [str(Path(found.submodule_search_locations[0]) / "models")]
    sys.modules["openrlhf_models"] = package
    if importlib.util.find_spec("deepspeed") is None:
        sys.modules["deepspeed"] = types.ModuleType("deepspeed")  # the loaded modules import it and do not use it
    try:
        loss, utils = (importlib.import_module(f"openrlhf_models.{name}") for name in ("loss", "utils"))
    finally:
        if not hasattr(sys.modules.get("deepspeed"), "__file__"):
            sys.modules.pop("deepspeed", None)
    return types.SimpleNamespace(**{**vars(utils), **vars(loss)})
