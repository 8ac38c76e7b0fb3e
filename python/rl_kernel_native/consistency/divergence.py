"""Finds the first operator, in execution order, whose output differs between the two sides."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from .metrics import bytes_differ
from .probes import Trace, split_key

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class OperatorDrift:
    """The differences of one operator's output over the recorded tokens.

    Attributes:
        order: place in execution order.
        layer: decoder layer, None before and after the layers.
        tokens, differing_tokens: number of tokens recorded on both sides, and number of tokens with a differing byte.
        max_abs, mean_abs: maximum and mean of the elementwise differences.
        max_relative, mean_relative: maximum and mean over tokens of ||training - rollout|| / ||rollout||.
        first_prompt, first_position: first differing token; -1 when none differs.
        first_phase: "prefill" or "decode": how the rollout computed that token; "" when none differs.
        first_here: number of tokens whose first differing operator is this operator. For attention, the cause may still
            be an earlier token, because attention reads the keys and values of earlier tokens.
    """

    order: int
    name: str
    kind: str
    layer: int | None
    tokens: int
    differing_tokens: int
    max_abs: float
    mean_abs: float
    max_relative: float
    mean_relative: float
    first_prompt: int
    first_position: int
    first_phase: str
    first_here: int


def layer_of(name: str) -> int | None:
    """3 for "layers.3.mlp.up_proj", None for "norm"."""
    match = _LAYER.match(name)
    return int(match.group(1)) if match else None


def compare_traces(rollout: Trace, training: Trace, prompt_lengths: list[int]) -> list[OperatorDrift]:
    """Gives one OperatorDrift per operator that both sides recorded, in the rollout's execution order.

    Tokens that only one side recorded are left out, such as the last sampled token, which is never an input of the
    rollout.
    """
    drifts: list[OperatorDrift] = []
    diverged = torch.zeros(0, dtype=torch.long)
    for name, kind in rollout.kinds.items():
        if name not in training.kinds:
            continue
        keys, a, b = _aligned(rollout, training, name)
        if not len(keys):
            continue
        differs = bytes_differ(a, b).any(dim=1)
        delta = (b.double() - a.double()).abs()
        # A NaN counts as an infinite error. NaNs that have equal bytes on both sides count as no error.
        delta = torch.where(differs[:, None], delta.nan_to_num(nan=float("inf"), posinf=float("inf")), 0.0)
        norm = a.double().norm(dim=1)
        relative = torch.where(differs, delta.norm(dim=1) / norm.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
        changed = keys[differs]
        first = split_key(int(changed[0])) if len(changed) else (-1, -1)
        fresh = changed[~torch.isin(changed, diverged)]
        diverged = torch.cat([diverged, fresh])
        drifts.append(
            OperatorDrift(
                order=len(drifts),
                name=name,
                kind=kind,
                layer=layer_of(name),
                tokens=len(keys),
                differing_tokens=len(changed),
                max_abs=float(delta.max()),
                mean_abs=float(delta.mean()),
                max_relative=float(relative.max()),
                mean_relative=float(relative.mean()),
                first_prompt=first[0],
                first_position=first[1],
                first_phase=_phase(first, prompt_lengths),
                first_here=len(fresh),
            )
        )
    return drifts


def _aligned(rollout: Trace, training: Trace, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys_a, a = rollout.values(name)
    keys_b, b = training.values(name)
    in_b, in_a = torch.isin(keys_a, keys_b), torch.isin(keys_b, keys_a)
    return keys_a[in_b], a[in_b], b[in_a]


def _phase(token: tuple[int, int], prompt_lengths: list[int]) -> str:
    if token[0] < 0:
        return ""
    return "prefill" if token[1] < prompt_lengths[token[0]] else "decode"


def first_divergent(drifts: list[OperatorDrift]) -> OperatorDrift | None:
    """The first operator with a differing byte, or None.

    The recorded tokens of a sequence always begin at its first token. Therefore every input of this operator has equal
    bytes on both sides, including keys and values of earlier positions. The operator itself causes the difference.
    """
    return next((drift for drift in drifts if drift.differing_tokens), None)
