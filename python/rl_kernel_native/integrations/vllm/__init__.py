"""Runs vLLM on this library's operators, so that a rollout's log-probabilities have the same bits as in a patched
trainer.

The entry point ``vllm.general_plugins`` calls :func:`plugin` in every process of vLLM. The plugin does nothing unless
``RLK_VLLM`` is ``1`` or ``check``, or :func:`enable` was called before the engine is created. ``check`` refuses to
start an engine if one of its modules cannot be replaced. docs/vllm.md says what is supported and what is refused.

No part of vLLM is imported before the plugin is enabled.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

from ... import _check

__all__ = ["enable", "enabled", "plugin", "sync_weights"]

VARIABLE = "RLK_VLLM"
MODES = ("1", "check")

_mode: str | None = None


def plugin() -> None:
    """The plugin's entry point, which vLLM calls in every process. Raises ValueError for an unknown value of
    ``RLK_VLLM``."""
    mode = os.environ.get(VARIABLE, "")
    if mode in ("", "0"):
        return
    if mode not in MODES:
        raise ValueError(f"{VARIABLE}: expected 0, 1 or check, got {mode!r}")
    _enable(mode)


def enable(*, check: bool = False) -> None:
    """Turns the plugin on for engines that this process creates after the call, and for engines of its child processes.

    Args:
        check: True: an engine starts only if every module of its model can be replaced. False: a warning names the
            modules that cannot be replaced.
    Raises:
        ImportError without vLLM; TypeError for a check that is no bool; RuntimeError for an unknown vLLM version or
        unknown hooks. The error names the version or the hooks.
    """
    mode = "check" if _check.flag("check", check) else "1"
    _enable(mode)
    os.environ[VARIABLE] = mode  # inherited by processes that vLLM starts


def enabled() -> str | None:
    """``"1"``, ``"check"``, or None if vLLM is unchanged."""
    return _mode


def sync_weights(llm: Any, weights: Iterable[tuple[str, Any]]) -> None:
    """Copies a trainer's weights into a running engine of this process, and resets its prefix cache.

    Args:
        llm: an ``LLM`` made with ``weight_transfer_config={"backend": "rl_kernel_native"}`` and without vLLM's
            multiprocessing (``VLLM_ENABLE_V1_MULTIPROCESSING=0``).
        weights: checkpoint names and tensors, such as ``model.named_parameters()``; FSDP2's shards are gathered.
    Raises:
        RuntimeError while requests run, if the prefix cache cannot be reset, or if the plugin is off.
    """
    if _mode is None:
        raise RuntimeError("sync_weights: expected the plugin to be on (RLK_VLLM or enable()), got it off")
    from .weights import sync

    sync(llm, weights)


def _enable(mode: str) -> None:
    global _mode
    if _mode is None:
        from . import hooks

        hooks.install(enabled)
        _warn_of_engines()
    _mode = mode


def _warn_of_engines() -> None:
    """Logs a warning if this process already has engines: they keep vLLM's own operators."""
    names = (("vllm.v1.engine.llm_engine", "LLMEngine"), ("vllm.v1.engine.async_llm", "AsyncLLM"))
    kinds = tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)
    found = sum(isinstance(x, kinds) for x in gc.get_objects()) if kinds else 0
    if found:
        logging.getLogger("rl_kernel_native").warning(
            "integrations.vllm: %s of this process stays vLLM's own, created before; call enable() before the engine "
            "is created",
            "1 engine" if found == 1 else f"each of {found} engines",
        )
