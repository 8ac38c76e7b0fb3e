"""A CPU takes workspace from the caller's allocator for only two operators, and none for empty arrays."""

from __future__ import annotations

import numpy as np
import pytest

import rl_kernel_native as rk
from call_arrays import valid_calls
from call_cases import CALLS, OPERATORS

pytest.importorskip("torch")

# Operators whose CPU backend takes workspace, and the array that gives the number of rows. Other backends allocate by
# themselves.
TAKES = {"attention_backward": "q", "linear_sample": "hidden"}


@pytest.mark.parametrize("operator", sorted(set(OPERATORS) & set(CALLS)))
def test_a_cpu_takes_workspace_for_these_rows_alone(operator: str) -> None:
    calls = 0
    for _, arguments in valid_calls(operator, lambda o: np.ascontiguousarray(o.values).astype(o.dtype)):
        rk.workspace_stats(reset=True)
        getattr(rk, operator)(**arguments)
        taken = rk.workspace_stats(reset=True)
        takes = operator in TAKES and arguments[TAKES[operator]].size > 0
        assert list(taken) == ["cpu"] * takes, taken
        calls += 1
    assert calls
