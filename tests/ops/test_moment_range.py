"""Means and variances are right for all finite values, even if sums and squares leave float32's range. One table covers
the operators that divide by a standard deviation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import tree_sum
from rl_kernel_native.contract import row

torch = pytest.importorskip("torch")

LARGEST = float(np.finfo(np.float32).max)
# Magnitudes: subnormal; with subnormal squares; ordinary; with squares, sums or differences out of range.
SIZES = (2.0**-140, 1e-38, 1e-30, 1e-20, 1.0, 1e18, 2e19, 1e30, 1e38, LARGEST)
# Values of a group: of both signs; close together; one far off.
PATTERNS = {
    "signs": [-1.0, -0.5, 0.25, 0.75, 1.0, 0.125, 1.0, -1.0],
    "close": [1.0 - 2.0**-10, 1.0, 1.0 - 2.0**-9, 1.0 - 2.0**-12],
    "outlier": [1.0, 0.0, 0.0, 2.0**-20],
    "opposite": [1.0, -1.0],
}


def group(x: np.ndarray, device: str, **options: Any) -> dict[str, tuple[Any, np.ndarray, Any]]:
    of: dict[str, Any] = {"group_size": len(x), "eps": 0.0} | options
    given = {k: torch.tensor(v, device=device) if isinstance(v, np.ndarray) else v for k, v in of.items()}
    got = rk.group_advantage(torch.from_numpy(x).to(device), return_stats=True, return_status=True, **given)
    want = rk.group_advantage_reference(x, **of)
    allowed = row("group_advantage", "advantage").allowed(expected=want["advantage"], scale=want["scale"])
    exact = x.astype(np.float64)
    std = np.full(len(x), exact.std(ddof=1))
    status = np.where(np.abs(want["advantage"]) > LARGEST, rk.GroupAdvantageStatus.NOT_FINITE, 0)
    found = {"std": (got.std, std, 1e-6 * std + 2e-7 * np.abs(exact).max() + 2.0**-149)}
    # Given baselines may differ in size from the rewards; and are divided by std as a float32.
    if "baseline" not in of or std[0] >= 2.0**-126:
        found |= {"advantage": (got.advantage, want["advantage"], allowed), "status": (got.status, status, 0)}
    return found


def whiten(x: np.ndarray, device: str, **options: Any) -> dict[str, tuple[Any, np.ndarray, Any]]:
    of: dict[str, Any] = {"eps": 2.0**-126} | options
    got = rk.masked_whiten(torch.from_numpy(x[None]).to(device), return_stats=True, **of)
    want = rk.masked_whiten_reference(x[None], **of)
    largest = np.abs(x.astype(np.float64)).max()
    of_mean = 2e-7 * largest + 2.0**-149
    of_y = row("masked_whiten", "y").allowed(expected=want["y"], largest=np.abs(want["y"]).max())
    return {
        "y": (got.y, want["y"], of_y + of_mean / np.sqrt(want["var"] + of["eps"])),
        "mean": (got.mean, want["mean"], of_mean),
        "var": (got.var, want["var"], 2e-6 * want["var"] + 2.0**-149),
    }


LENGTHS = np.array([3, 1, 7, 2, 5, 1, 1, 4], np.int64)
BASELINE = np.array([5.0, -3.0, 0.0, 1e-38, 2.5, 1.0, 7.0, -1.0], np.float32)  # sizes differ from the rewards' sizes
OPERATORS: dict[str, Callable[[np.ndarray, str], dict[str, tuple[Any, np.ndarray, Any]]]] = {
    "group_advantage": group,
    "group_advantage, batch": lambda x, d: group(x, d, scale="batch"),
    "group_advantage, batch, no baseline": lambda x, d: group(x, d, kind="reinforce_pp", scale="batch"),
    "group_advantage, remax": lambda x, d: group(x, d, kind="remax", scale="group", baseline=BASELINE[: len(x)]),
    "group_advantage, grpo_trl": lambda x, d: group(x, d, kind="grpo_trl"),
    "group_advantage, passk": lambda x, d: group(x, d, kind="passk"),
    "group_advantage, opo": lambda x, d: group(x, d, kind="opo", scale="group", lengths=LENGTHS[: len(x)]),
    "masked_whiten": whiten,
    "masked_whiten, default eps": lambda x, d: whiten(x, d, eps=1e-8),
    "masked_whiten, biased": lambda x, d: whiten(x, d, unbiased=False),
}


def as_float32(x: np.ndarray) -> np.ndarray:
    """A value beyond float32's range becomes infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_of_every_size(size: float, pattern: str, name: str, device: str) -> None:
    x = (np.array(PATTERNS[pattern]) * size).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        overflows = not np.isfinite(tree_sum(x))
    for output, (found, want, allowed) in OPERATORS[name](x, device).items():
        got = found.cpu().numpy().astype(np.float64)
        if name.startswith("masked_whiten") and overflows:  # documented: the sum itself is out of range
            assert np.isnan(got).all() if output == "y" else not np.isfinite(got), output
            continue
        over = np.isinf(as_float32(want))
        assert (np.isinf(got) == over).all(), (output, got, want)
        bound = np.broadcast_to(allowed, want.shape)
        assert (np.abs(got - want)[~over] <= bound[~over]).all(), (output, got, want)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equal_values_have_exactly_their_mean_and_no_deviation(size: float, device: str) -> None:
    x = torch.full((7,), size, dtype=torch.float32, device=device)
    for scale in ("group", "batch"):
        of = rk.group_advantage(x, group_size=7, scale=scale, return_stats=True)
        assert (of.mean == x).all()
        for zero in (of.std, of.advantage):
            assert zero.cpu().numpy().tobytes() == bytes(28), scale
    of = rk.masked_whiten(x[None], return_stats=True)
    assert of.mean == x[0]
    assert of.y.cpu().numpy().tobytes() + of.var.cpu().numpy().tobytes() == bytes(32)
