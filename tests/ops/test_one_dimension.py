"""An array with one value per row, sequence or pair has one dimension. Any other number of dimensions is an error of
every operator, which names the argument, the expected shape and what was given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch")

N = 4  # rows, sequences or pairs
X, TOKENS = torch.zeros(N, 8), torch.zeros(N, 5)
PAIRS = torch.zeros(N)
# Operator and argument -> the call, what the shape is said to be, and the array's dtype.
ARRAYS: dict[str, tuple[Callable[[Any], Any], str, Any]] = {
    "group_advantage rewards": (
        lambda a: rk.group_advantage(a, group_size=2),
        "rewards: expected shape [num_sequences]",
        torch.float32,
    ),
    "random_bits sample_id": (
        lambda a: rk.random_bits(1, a, 0, 2),
        "sample_id: expected shape [num_rows]",
        torch.int64,
    ),
    "preference_loss policy_chosen": (
        lambda a: rk.preference_loss(a, PAIRS, PAIRS, PAIRS, beta=0.1),
        "policy_chosen: expected shape [num_pairs]",
        torch.float32,
    ),
    "preference_loss policy_rejected": (
        lambda a: rk.preference_loss(PAIRS, a, PAIRS, PAIRS, beta=0.1),
        f"policy_rejected: expected shape [{N}] (that of policy_chosen)",
        torch.float32,
    ),
    "gae bootstrap": (
        lambda a: rk.gae(TOKENS, TOKENS, bootstrap=a),
        f"bootstrap: expected shape [{N}] (num_sequences)",
        torch.float32,
    ),
    "sample temperature": (
        lambda a: rk.sample(X, seed=1, sample_id=torch.arange(N), position=0, temperature=a),
        f"temperature: expected shape [{N}]",
        torch.float32,
    ),
    "sample sample_id": (
        lambda a: rk.sample(X, seed=1, sample_id=a, position=0),
        f"sample_id: expected shape [{N}]",
        torch.int64,
    ),
}


@pytest.mark.parametrize("shape", [(), (N, 1), (1, N), (N, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ARRAYS)
def test_another_number_of_dimensions_is_refused(name: str, shape: tuple[int, ...]) -> None:
    call, expected, dtype = ARRAYS[name]
    with pytest.raises(ValueError, match=f"^{re.escape(f'{expected}, got {list(shape)}')}"):
        call(torch.ones(shape, dtype=dtype))
    call(torch.ones(N, dtype=dtype))
