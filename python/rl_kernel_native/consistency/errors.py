"""Errors that end a comparison with one clear message instead of a traceback.

`rk.compare` and `rlk compare` share their checks. `spelled` writes an argument as a Python argument or as an option, as
the caller wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .._check import shown

_by_options: ContextVar[bool] = ContextVar("by_options", default=False)
# Options of `rlk compare` whose names differ from the names of rk.compare's arguments.
_OPTIONS = {"batch_sizes": "--batch", "model_a": "--model", "model_b": "--training-model"}


@contextmanager
def options_spelled() -> Iterator[None]:
    """A context in which errors name options of the command line instead of Python arguments."""
    token = _by_options.set(True)
    try:
        yield
    finally:
        _by_options.reset(token)


def spelled(name: str, *value: Any) -> str:
    """`max_new_tokens=0` in Python, `--max-new-tokens 0` on the command line; without a value, the name alone."""
    if not _by_options.get():
        return "=".join((name, *map(shown, value)))
    option = _OPTIONS.get(name, "--" + name.replace("_", "-"))
    return " ".join((option, *(",".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in value)))


class BadInput(ValueError):
    """The model directory, prompt file or an option cannot be used. The command line turns this error into exit status
    2."""


class InputMismatch(BadInput):
    """The two sides received different inputs, so comparing their log-probabilities would mean nothing.

    Attributes:
        prompt: index of the prompt, in file order.
        position: first differing position of its sequence (0 is the first prompt token).
    """

    def __init__(self, message: str, *, prompt: int, position: int) -> None:
        super().__init__(message)
        self.prompt = prompt
        self.position = position
