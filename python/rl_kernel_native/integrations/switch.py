"""One switch for an engine's rollout and a trainer, so that a token has the same log-probability in both."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
from types import TracebackType
from typing import Any

import rl_kernel_native as rk

from . import vllm
from .vllm.config import NO_RESET

ROLLOUTS = ("vllm",)
TRAINERS = ("trl",)

_logger = logging.getLogger("rl_kernel_native")
_open: list[Enabled] = []  # a caller may drop the result of enable(), which must not turn it off


class Enabled:
    """The state of :func:`rl_kernel_native.enable`. :meth:`close`, or the end of its context, undoes TRL's part.

    The vLLM plugin stays on until the process ends, and patched models stay patched.
    """

    def __init__(self, rollout: str | None, trainer: str | None) -> None:
        self.rollout: str | None = rollout
        self.trainer: str | None = trainer
        self._stack: contextlib.ExitStack[bool | None] = contextlib.ExitStack()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Undoes TRL's part. A second call does nothing."""
        if self in _open:
            _open.remove(self)
        self._stack.close()

    def __repr__(self) -> str:
        return f"Enabled(rollout={self.rollout!r}, trainer={self.trainer!r})"


def enable(rollout: str | None, trainer: str | None) -> Enabled:
    for name, value, known in (("rollout", rollout, ROLLOUTS), ("trainer", trainer, TRAINERS)):
        if value is not None and value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)} or None, got {value!r}")
    if rollout is None and trainer is None:
        raise ValueError("enable: expected a rollout, a trainer or both, got neither")
    found = Enabled(rollout, trainer)
    with contextlib.ExitStack() as stack:
        if rollout == "vllm":
            vllm.enable(check=True)
        if trainer == "trl":
            stack.enter_context(rk.integrations.trl.enabled())
            stack.enter_context(_trainers_patched(with_vllm=rollout == "vllm"))
        found._stack = stack.pop_all()
    _open.append(found)
    return found


@atexit.register
def _close_all() -> None:
    """While the modules that contexts restore still exist."""
    for found in list(_open):
        found.close()


@contextlib.contextmanager
def _trainers_patched(with_vllm: bool) -> Any:
    """GRPOTrainers created inside the context get a patched model, and with vLLM a weight sync that may raise."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    made = GRPOTrainer.__init__

    @functools.wraps(made)
    def make(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        from . import patch

        if patch.chosen_ops(self.model) is None:
            served = rk.patch_model(self.model, strict=True)
            _logger.info("TRL's model is served: %s", dict(served))
        generation = getattr(self, "vllm_generation", None)
        if with_vllm and generation is not None and generation.mode == "colocate":
            generation.sync_weights = _synced(generation)

    trainer: Any = GRPOTrainer
    trainer.__init__ = make
    try:
        yield
    finally:
        if trainer.__init__ is make:
            trainer.__init__ = made


def _synced(generation: Any) -> Any:
    """TRL's own weight transfer does not check whether the prefix cache was reset; here a failure is an error."""
    own = generation.sync_weights

    def sync_weights() -> None:
        own()
        if not generation.llm.reset_prefix_cache():
            raise RuntimeError(NO_RESET)

    return sync_weights
