"""Errors that end a comparison with one clear message instead of a traceback."""

from __future__ import annotations


class BadInput(ValueError):
    """The model directory, prompt file or an option cannot be used. The command line turns it into exit status 2."""


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
