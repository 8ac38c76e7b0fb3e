"""The rounding mode of the caller's thread changes no bit: numbers become float32 by rounding to nearest even."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from collections.abc import Callable
from typing import Any

import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch")

MODES = {"down": 0x400, "up": 0x800, "toward zero": 0xC00}  # x86's mode bits
Z = torch.linspace(-3.0, 3.0, 27).reshape(3, 9)
Y = torch.tensor([1, 0, 8])
P = -torch.linspace(0.1, 1.0, 6).reshape(2, 3)
ONE = torch.ones(2, 3)
OLD, REF, TENTHS = P * 1.7, P * 0.9, ONE[0, :2] * 0.1  # computed here, since torch rounds by the current mode
SPEC = rk.PolicySpec(epsilon_low=0.1, kl="k3", kl_coef=0.3)
CALLS: dict[str, Callable[[], Any]] = {
    "logprob": lambda: rk.logprob(Z, Y, temperature=0.7, logit_scale=0.3, softcap=1.1),
    "kl": lambda: rk.kl(P, OLD, estimator="k3", clamp=0.1),
    "value_loss": lambda: rk.value_loss(P, REF, ONE, clip=0.1, denominator=0.7).loss,
    "policy_loss": lambda: rk.policy_loss(
        P, OLD, ONE, ONE, spec=SPEC, ref_logprob=REF, denominator=0.7
    ).loss,
    "gae": lambda: rk.gae(P, REF, gamma=0.99, lam=0.95).advantages,
    "group_advantage": lambda: rk.group_advantage(P[0], group_size=3, eps=1e-4),
    "masked_whiten": lambda: rk.masked_whiten(P, eps=1e-3),
    "importance_weights": lambda: rk.importance_weights(P, OLD, upper=1.1).weights,
    "scatter_rewards": lambda: rk.scatter_rewards(ONE[0, :2], ONE, cost=TENTHS, lagrange=0.1).combined,
    "rms_norm": lambda: rk.rms_norm(Z, None, 1e-6),
}  # fmt: skip


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the modes are those of x86")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_the_callers_rounding_mode_changes_no_bit(name: str, mode: str) -> None:
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    want = CALLS[name]().clone()
    assert libm.fesetround(MODES[mode]) == 0
    try:
        got = CALLS[name]()
        kept = libm.fegetround()
    finally:
        libm.fesetround(0)
    assert kept == MODES[mode], "the caller's mode is the caller's"
    assert got.numpy().tobytes() == want.numpy().tobytes()
