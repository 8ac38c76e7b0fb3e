"""Rule 10: a sum over tokens, sequences, members or pairs is one number. The sum does not depend on the operator, on
padding or packing, or on a merge of aligned parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing, tree_sum

torch = pytest.importorskip("torch")

# Lengths: one token; a row of lanes and one more; a power of two; several chunks of every kernel and a remainder.
LENGTHS = (1, 33, 4096, 5000, 70001)


def tokens(rng: np.random.Generator, length: int, device: str) -> tuple[Any, Any]:
    """Values of many magnitudes, and a mask. The number of tokens that count is a power of two, so sum / count is
    exact."""
    x = -rng.exponential(1.0, length) * 2.0 ** rng.integers(-12, 3, length)
    mask = np.zeros(length, bool)
    mask[rng.permutation(length)[: 1 << (length.bit_length() - 1)]] = True
    return torch.from_numpy(x.astype(np.float32)).to(device), torch.from_numpy(mask).to(device)


def of_policy_loss(x: Any, mask: Any) -> Any:
    spec = rk.PolicySpec(entropy_coef=0.5)
    zero = torch.zeros_like(x)
    return rk.policy_loss(zero, zero, zero, mask, spec=spec, entropy=x, denominator=1).metrics.entropy_sum


def of_preference_loss(x: Any, mask: Any) -> Any:
    return rk.preference_loss(x[mask], x[mask], kind="cpo", beta=1.0).metrics.chosen_reward * mask.sum()


def of_group_advantage(x: Any, mask: Any) -> Any:
    rewards = torch.where(mask, x, torch.nan)
    return rk.group_advantage(rewards, group_size=len(x), kind="grpo_trl", return_stats=True).mean[0] * mask.sum()


SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "sequence_logprob": lambda x, mask: rk.sequence_logprob(x[None], mask[None]).sum[0],
    "policy_loss": of_policy_loss,
    "value_loss": lambda x, mask: rk.value_loss(x[None], None, x[None], mask[None]).metrics.value_sum,
    "masked_whiten": lambda x, mask: rk.masked_whiten(x[None], mask[None], return_stats=True).mean * mask.sum(),
    "group_advantage": of_group_advantage,
}


@pytest.mark.parametrize("length", LENGTHS)
def test_every_operator_has_the_same_sum(length: int, device: str, rng: np.random.Generator) -> None:
    x, mask = tokens(rng, length, device)
    counted = torch.where(mask, x, 0).cpu().numpy()
    want = torch.tensor(tree_sum(counted), device=device)
    if length == LENGTHS[-1]:  # otherwise the test could not tell orders apart
        assert want.item() != np.cumsum(counted)[-1]
    for name, of in SUMS.items():
        assert not differing((of(x, mask),), (want,)), name
    pairs = torch.tensor(tree_sum(x[mask].cpu().numpy()), device=device)
    assert not differing((of_preference_loss(x, mask),), (pairs,))


# Sequences too long for one block; more sequences than a block adds at a time.
@pytest.mark.parametrize(("sequences", "length"), [(512, 300), (1 << 15, 4)])
def test_sums_of_sequences_add_up_by_their_index(
    sequences: int, length: int, device: str, rng: np.random.Generator
) -> None:
    x = torch.from_numpy(-rng.exponential(1.0, (sequences, length)).astype(np.float32)).to(device)
    counted = 1 << (length.bit_length() - 2)
    mask = torch.from_numpy(rng.permuted(np.arange(length) < counted + np.zeros((sequences, 1)), axis=1)).to(device)
    sums = rk.sequence_logprob(x, mask).sum
    want = torch.tensor(tree_sum(sums.cpu().numpy()), device=device)
    zero = torch.zeros_like(x)
    spec = rk.PolicySpec(entropy_coef=0.5)
    found = {
        "policy_loss": rk.policy_loss(zero, zero, zero, mask, spec=spec, entropy=x, denominator=1).metrics.entropy_sum,
        "value_loss": rk.value_loss(x, None, x, mask).metrics.value_sum,
        "masked_whiten": rk.masked_whiten(x, mask, return_stats=True).mean * mask.sum(),
        "sequence_logprob": rk.sequence_logprob(sums[None]).sum[0],
        "group_advantage": of_group_advantage(sums, torch.ones_like(sums, dtype=torch.bool)),
    }
    for name, of in found.items():
        assert not differing((of,), (want,)), name


@pytest.mark.parametrize("part", [1, 2, 128, 2048])
def test_aligned_parts_merge_to_the_bits_of_the_whole(part: int, device: str, rng: np.random.Generator) -> None:
    lengths = [0, 1, 3 * part - 1, 5 * part, 5000]
    columns = -(-max(lengths) // part) * part
    x = torch.from_numpy(-rng.exponential(1.0, (len(lengths), columns)).astype(np.float32)).to(device)
    mask = torch.from_numpy(rng.random(x.shape) < 0.7).to(device)
    mask &= torch.arange(columns, device=device) < torch.tensor(lengths, device=device)[:, None]
    whole = rk.sequence_logprob(x, mask)
    parts = rk.sequence_logprob(x.view(-1, part), mask.view(-1, part)).sum.view(len(lengths), -1)
    assert not differing((rk.sequence_logprob(parts).sum,), (whole.sum,))
    packed = rk.pack([x, mask], torch.tensor(lengths, device=device))
    of_packed = rk.sequence_logprob(packed.tensors[0], packed.tensors[1], packed.cu_seqlens)
    assert not differing(tuple(of_packed), tuple(whole))


def test_parts_of_another_alignment_are_no_nodes(device: str, rng: np.random.Generator) -> None:
    """The documentation does not promise this; it shows that the test above can fail."""
    x = torch.from_numpy(rng.normal(0.0, 1.0, (200, 96 * 50)).astype(np.float32)).to(device)
    parts = rk.sequence_logprob(x.view(-1, 96)).sum.view(200, -1)
    assert differing((rk.sequence_logprob(parts).sum,), (rk.sequence_logprob(x).sum,))
