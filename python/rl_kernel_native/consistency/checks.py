"""Checks that both sides received the same input. Every failed check names the first differing position.

Positions count from 0 at the first prompt token of a sequence. Where a message says "column", it means a column of a
padded batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .. import _check
from .errors import BadInput, InputMismatch

PaddingSide = Literal["none", "left", "right"]
_NO_PADS = "give the prompt's own tokens without padding"


@dataclass(frozen=True)
class SideInputs:
    """The input that one side actually passed to the model, read back from the tensors.

    Attributes:
        name: "rollout" or "training", for messages.
        ids: token ids of each sequence: prompt and response, without padding.
        positions: position ids, same shape as ids.
        special_ids: ids of bos, eos and pad that this side uses.
        padding_side: the padding side that this side declares.
        masks: for a padded side, each sequence's row of the attention mask, padding included.
    """

    name: str
    ids: Sequence[Sequence[int]]
    positions: Sequence[Sequence[int]]
    special_ids: Mapping[str, tuple[int, ...]]
    padding_side: PaddingSide = "none"
    masks: Sequence[Sequence[int]] | None = None


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """First index at which two sequences differ; the shorter length if one sequence is a prefix of the other."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def check_token_ids(ids: Sequence[int], vocab_size: int, *, where: str, prompt: int) -> None:
    """Raises InputMismatch if an id is outside [0, vocab_size)."""
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise InputMismatch(
                f"{where}: token id {_check.shown(token)} at position {position} is outside the vocabulary of "
                f"{vocab_size}; give ids of this model's tokenizer",
                prompt=prompt,
                position=position,
            )


def check_special_tokens(
    ids: Sequence[int], special_ids: Mapping[str, tuple[int, ...]], *, where: str, prompt: int
) -> None:
    """Raises InputMismatch for two bos tokens at the beginning, or for padding at an end of a prompt. A pad id that is
    also eos or bos counts as text."""
    bos, eos, pad = (special_ids.get(name, ()) for name in ("bos", "eos", "pad"))
    if len(ids) > 1 and ids[0] in bos and ids[1] == ids[0]:
        raise InputMismatch(
            f"{where}: bos token {ids[0]} twice, again at position 1; give one, as a tokenizer adds its own to a chat "
            "template's",
            prompt=prompt,
            position=1,
        )
    real_pad = set(pad) - set(eos) - set(bos)
    if ids and ids[0] in real_pad:
        raise InputMismatch(f"{where}: padded on the left: pad at position 0; {_NO_PADS}", prompt=prompt, position=0)
    if ids and ids[-1] in real_pad:
        position = len(ids)
        while position and ids[position - 1] in real_pad:
            position -= 1
        raise InputMismatch(
            f"{where}: padded on the right: pad from position {position}; {_NO_PADS}", prompt=prompt, position=position
        )


def check_positions(positions: Sequence[int], *, where: str, prompt: int) -> None:
    """Raises InputMismatch if positions are not 0, 1, 2, ..."""
    expected = range(len(positions))
    position = first_difference(positions, expected)
    if position < len(positions):
        raise InputMismatch(
            f"{where}: position id {_check.shown(positions[position])} at position {position}, want {position}",
            prompt=prompt,
            position=position,
        )


def check_padding(mask: Sequence[int], padding_side: PaddingSide, *, where: str, prompt: int) -> None:
    """Raises InputMismatch if a mask row has zeros anywhere except on `padding_side` ("none": no zeros)."""
    ones = sum(1 for value in mask if value)
    zeros = len(mask) - ones
    if padding_side == "left":
        expected = [0] * zeros + [1] * ones
    elif padding_side == "right":
        expected = [1] * ones + [0] * zeros
    else:
        expected = [1] * len(mask)
    column = first_difference([int(bool(value)) for value in mask], expected)
    if column < len(mask):
        raise InputMismatch(
            f"{where}: attention mask is {int(bool(mask[column]))} at column {column}, "
            f"want {expected[column]} (padding side: {padding_side})",
            prompt=prompt,
            position=column,
        )


def check_sides(rollout: SideInputs, training: SideInputs) -> None:
    """Compares the inputs of the two sides: special token ids, padding, ids, places of special tokens, positions.

    Raises:
        BadInput: the sides have different special ids, or different numbers of sequences.
        InputMismatch: any other difference; the error names the prompt and the first differing position.
    """
    for name in sorted(set(rollout.special_ids) | set(training.special_ids)):
        ours, theirs = rollout.special_ids.get(name, ()), training.special_ids.get(name, ())
        if ours != theirs:
            has, other_has = list(ours) or "none", list(theirs) or "none"
            raise BadInput(
                f"{name} token: {rollout.name} has {has}, {training.name} has {other_has}; "
                f"set {name}_token_id alike in both models' config.json and generation_config.json"
            )
    if len(rollout.ids) != len(training.ids):
        raise BadInput(f"{rollout.name} has {len(rollout.ids)} sequences, {training.name} has {len(training.ids)}")
    for side in (rollout, training):
        for prompt, mask in enumerate(side.masks or ()):
            check_padding(mask, side.padding_side, where=f"{side.name}, prompt {prompt}", prompt=prompt)
    special = {token: name for name, tokens in rollout.special_ids.items() for token in tokens}
    for prompt, (ours_ids, theirs_ids) in enumerate(zip(rollout.ids, training.ids, strict=True)):
        position = first_difference(ours_ids, theirs_ids)
        if position < max(len(ours_ids), len(theirs_ids)):
            raise _id_mismatch(rollout, training, special, prompt, position)
        ours_positions, theirs_positions = rollout.positions[prompt], training.positions[prompt]
        position = first_difference(ours_positions, theirs_positions)
        if position < max(len(ours_positions), len(theirs_positions)):
            raise InputMismatch(
                f"prompt {prompt}: position ids differ first at position {position}: "
                f"{rollout.name} {_at(ours_positions, position)}, {training.name} {_at(theirs_positions, position)}",
                prompt=prompt,
                position=position,
            )


def _at(values: Sequence[int], index: int) -> str:
    return _check.shown(values[index]) if index < len(values) else "nothing"


def _id_mismatch(
    rollout: SideInputs, training: SideInputs, special: Mapping[int, str], prompt: int, position: int
) -> InputMismatch:
    sides, found = [], []
    for side in (rollout, training):
        ids = side.ids[prompt]
        name = special.get(ids[position]) if position < len(ids) else None
        sides.append(f"{side.name} {_at(ids, position)}" + (f" ({name})" if name else ""))
        found.append(name)
    what = "special tokens" if any(found) else "ids"
    return InputMismatch(
        f"prompt {prompt}: {what} differ first at position {position}: {', '.join(sides)}",
        prompt=prompt,
        position=position,
    )
