"""The frameworks' own source, for tests against it; a test is skipped, with the reason, where one is not installed
(docs/objectives.md has the commands)."""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest


def imported(module: str, framework: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(module, reason=f"{framework} is not installed", exc_type=ImportError)


def verl(module: str = "verl.trainer.ppo.core_algos") -> Any:
    return imported(module, "verl")


def trl(module: str) -> Any:
    return imported(module, "TRL")


def openrlhf() -> Any:
    """openrlhf/models: loss.py and utils.py alone, since the package imports an engine and a trainer."""
    found = importlib.util.find_spec("openrlhf")
    if found is None or not found.submodule_search_locations:
        pytest.skip("OpenRLHF is not installed")
    package = types.ModuleType("openrlhf_models")
    package.__path__ = [str(Path(found.submodule_search_locations[0]) / "models")]
    sys.modules["openrlhf_models"] = package
    if importlib.util.find_spec("deepspeed") is None:
        sys.modules["deepspeed"] = types.ModuleType("deepspeed")  # which what is read here does not use
    try:
        loss, utils = (importlib.import_module(f"openrlhf_models.{name}") for name in ("loss", "utils"))
    finally:
        if not hasattr(sys.modules.get("deepspeed"), "__file__"):
            sys.modules.pop("deepspeed", None)
    return types.SimpleNamespace(**{**vars(utils), **vars(loss)})
