"""Training batches: sequences packed into one row, or one padded row per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .checks import PaddingSide, SideInputs
from .model import LoadedModel


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one training forward.

    Attributes:
        ids, positions: int64 [B, T].
        mask: bool [B, 1, T, T], or None for plain causal attention.
        key_mask: [B, T], 1 for a real token.
        cu_seqlens: int32 [number of sequences + 1], the offsets of the sequences in a packed row; None for padded rows.
        places: for each sequence of this batch (prompt, row, first column, length).
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None
    key_mask: torch.Tensor
    places: list[tuple[int, int, int, int]]
    cu_seqlens: torch.Tensor | None = None


def plan_batches(lengths: Sequence[int], packing: str, max_tokens: int) -> list[list[int]]:
    """The consecutive sequences of each forward: at most max_tokens tokens including padding, but at least one
    sequence."""
    groups: list[list[int]] = []
    used = 0
    for index, length in enumerate(lengths):
        longest = max((lengths[i] for i in groups[-1]), default=0) if groups else 0
        if packing == "packed":
            total = used + length
        else:
            total = max(longest, length) * (len(groups[-1]) + 1) if groups else length
        if not groups or total > max_tokens:
            groups.append([index])
            used = length
        else:
            groups[-1].append(index)
            used += length
    return groups


def packed_batch(group: Sequence[int], sequences: Sequence[Sequence[int]], device: torch.device) -> MicroBatch:
    """Sequences one after the other in one row. Positions restart at each sequence, and attention is causal within a
    sequence."""
    ids: list[int] = []
    positions: list[int] = []
    owner: list[int] = []
    places = []
    for index in group:
        length = len(sequences[index])
        places.append((index, 0, len(ids), length))
        ids += sequences[index]
        positions += range(length)
        owner += [index] * length
    mask = None
    if len(group) > 1:
        owners = torch.tensor(owner, device=device)
        total = len(ids)
        causal = torch.ones(total, total, dtype=torch.bool, device=device).tril()
        mask = (causal & (owners[:, None] == owners[None, :]))[None, None]
    row = torch.tensor([ids], dtype=torch.long, device=device)
    starts = torch.tensor([place[2] for place in places] + [len(ids)], dtype=torch.int32, device=device)
    return MicroBatch(row, torch.tensor([positions], device=device), mask, torch.ones_like(row), places, starts)


def padded_batch(
    group: Sequence[int], sequences: Sequence[Sequence[int]], pad_id: int, side: PaddingSide, device: torch.device
) -> MicroBatch:
    """One row per sequence, padded on `side` ("left" or "right") to the longest sequence. Positions count only real
    tokens."""
    width = max(len(sequences[index]) for index in group)
    ids = torch.full((len(group), width), pad_id, dtype=torch.long)
    positions = torch.zeros(len(group), width, dtype=torch.long)
    key_mask = torch.zeros(len(group), width, dtype=torch.long)
    places = []
    for row, index in enumerate(group):
        length = len(sequences[index])
        start = width - length if side == "left" else 0
        ids[row, start : start + length] = torch.tensor(sequences[index])
        positions[row, start : start + length] = torch.arange(length)
        key_mask[row, start : start + length] = 1
        places.append((index, row, start, length))
    mask = None
    if bool((key_mask == 0).any()):
        # A padding token attends to itself. Without any key its result would be NaN, and some kernels spread NaN to
        # other rows.
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        allowed = key_mask.bool()[:, None, :] | torch.eye(width, dtype=torch.bool)
        mask = (causal & allowed)[:, None].to(device)
    return MicroBatch(ids.to(device), positions.to(device), mask, key_mask.to(device), places)


def make_batches(
    sequences: Sequence[Sequence[int]],
    packing: str,
    max_tokens: int,
    pad_id: int,
    side: PaddingSide,
    device: torch.device,
) -> list[MicroBatch]:
    """All training forwards of the given sequences (prompt and response ids)."""
    groups = plan_batches([len(ids) for ids in sequences], packing, max_tokens)
    if packing == "packed":
        return [packed_batch(group, sequences, device) for group in groups]
    return [padded_batch(group, sequences, pad_id, side, device) for group in groups]


def batch_inputs(batches: Sequence[MicroBatch], packing: str, side: PaddingSide, loaded: LoadedModel) -> SideInputs:
    """The inputs of all batches, read back from the tensors, with sequences in prompt order."""
    ids: dict[int, list[int]] = {}
    positions: dict[int, list[int]] = {}
    masks: dict[int, list[int]] = {}
    for batch in batches:
        for prompt, row, start, length in batch.places:
            ids[prompt] = batch.ids[row, start : start + length].tolist()
            positions[prompt] = batch.positions[row, start : start + length].tolist()
            masks[prompt] = batch.key_mask[row].tolist()
    order = sorted(ids)
    padded = packing == "padded"
    return SideInputs(
        name="training",
        ids=[ids[prompt] for prompt in order],
        positions=[positions[prompt] for prompt in order],
        special_ids=loaded.special_ids,
        padding_side=side if padded else "none",
        masks=[masks[prompt] for prompt in order] if padded else None,
    )
