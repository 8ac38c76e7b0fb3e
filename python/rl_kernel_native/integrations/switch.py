"""One switch for a rollout engine and a trainer, so that both give a token the same log-probability."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import weakref
from types import TracebackType
from typing import Any

import rl_kernel_native as rk

from .. import _check
from . import vllm
from .vllm.config import NO_RESET

ROLLOUTS = ("vllm",)
TRAINERS = ("trl",)

_logger = logging.getLogger("rl_kernel_native")
_open: list[Enabled] = []  # keeps each state alive, even if the caller drops the result of enable()


class Enabled:
    """The state of :func:`rl_kernel_native.enable`. :meth:`close`, or the end of its context, undoes the changes to
    TRL.

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
        """Undoes the changes to TRL. A second call does nothing."""
        if self in _open:
            _open.remove(self)
        self._stack.close()

    def __repr__(self) -> str:
        return f"Enabled(rollout={self.rollout!r}, trainer={self.trainer!r})"


def enable(rollout: str | None, trainer: str | None) -> Enabled:
    for name, value, known in (("rollout", rollout, ROLLOUTS), ("trainer", trainer, TRAINERS)):
        if value is not None and value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)} or None, got {_check.shown(value)}")
    if rollout is None and trainer is None:
        raise ValueError("enable: expected a rollout, a trainer or both, got neither")
    found = Enabled(rollout, trainer)
    with contextlib.ExitStack() as stack:
        had_plugin = vllm.enabled() is not None
        if rollout == "vllm":
            vllm.enable(check=True)
        if trainer == "trl":
            stack.enter_context(rk.integrations.trl.enabled())
            stack.enter_context(_trainers_patched(rollout == "vllm", had_plugin))
        found._stack = stack.pop_all()
    _open.append(found)
    return found


@atexit.register
def _close_all() -> None:
    """Closes all contexts while the modules that they restore still exist."""
    for found in list(_open):
        found.close()


@contextlib.contextmanager
def _trainers_patched(with_vllm: bool, had_plugin: bool) -> Any:
    """Inside the context, a new GRPOTrainer gets a patched model. With vLLM, its weight sync raises an error if the
    prefix cache is not reset.

    A trainer that already existed logs a warning at its first loss, which names what it lacks.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    from . import patch
    from . import trl as losses

    made = GRPOTrainer.__init__
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(made)
    def make(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        if patch.chosen_ops(self.model) is None:
            served = rk.patch_model(self.model, strict=True)
            _logger.info("TRL's model is served: %s", dict(served))
        if with_vllm:
            _sync_checked(self)
        seen.add(self)

    def look(trainer: Any) -> None:
        if trainer in seen:
            return
        seen.add(trainer)
        if patch.chosen_ops(trainer.model) is None:
            _logger.warning(
                "rk.enable: this trainer was created before, and its model stays torch's: only the loss and the head's "
                "log-probabilities are served. Call rk.enable before the trainer is created, or "
                "rk.patch_model(trainer.model, strict=True)"
            )
        if with_vllm and _sync_checked(trainer) and not had_plugin:
            _logger.warning(
                "rk.enable: this trainer's vLLM engine was created before, and stays vLLM's own. Call rk.enable before "
                "the trainer is created"
            )

    trainer: Any = GRPOTrainer
    trainer.__init__ = make
    losses.before_loss.append(look)
    try:
        yield
    finally:
        losses.before_loss.remove(look)
        if trainer.__init__ is make:
            trainer.__init__ = made


def _sync_checked(trainer: Any) -> bool:
    """Makes the weight sync of a colocated engine raise an error if the prefix cache would survive it. Returns False if
    there is no such engine."""
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None or generation.mode != "colocate":
        return False
    generation.sync_weights = _synced(generation)
    return True


def _synced(generation: Any) -> Any:
    """TRL's weight sync, followed by a check. TRL does not check whether the prefix cache was reset; here a failure is
    an error."""
    own = generation.sync_weights

    def sync_weights() -> None:
        own()
        if not generation.llm.reset_prefix_cache():
            raise RuntimeError(NO_RESET)

    return sync_weights
