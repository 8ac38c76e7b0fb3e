"""Shared by the tests of gae, group_advantage and masked_whiten: batches of sequences, the frameworks' own formulas in
float64, and the scan's contract in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cases import beyond

MASKS = ("bool", "int32", "int64", "float32", "uint8")
# Lengths: a token; a lane's tokens; around a chunk; several chunks; more than a block of 16 warps holds.
LENGTHS = (1, 3, 127, 128, 129, 700, 2200)


class Batch(NamedTuple):
    """Padded arrays; tokens that do not count hold NaN."""

    rewards: Any
    values: Any
    logprob: Any
    rollout_logprob: Any
    mask: Any
    lengths: np.ndarray

    def tokens(self) -> dict[str, Any]:
        return {"rewards": self.rewards, "values": self.values}

    def policies(self) -> dict[str, Any]:
        return {**self.tokens(), "logprob": self.logprob, "rollout_logprob": self.rollout_logprob}

    def packed(self) -> tuple[Batch, Any]:
        """The tokens of each row one after another, and cu_seqlens."""
        import torch

        parts = [torch.cat([a[i, :n] for i, n in enumerate(self.lengths)]) for a in self[:5]]
        cu = torch.from_numpy(np.concatenate(([0], np.cumsum(self.lengths)))).to(self.rewards.device)
        return Batch(*parts, self.lengths), cu

    def unpacked(self, packed: Any) -> list[Any]:
        """Splits a packed result into its rows."""
        return list(packed.split(self.lengths.tolist()))


def batch(
    rng: np.random.Generator, lengths: Any, device: str = "cpu", mask_dtype: str = "bool", share: float = 0.8
) -> Batch:
    """Rows of up to ``lengths`` tokens; a ``share`` of the tokens counts."""
    import torch

    lengths = np.asarray(lengths)
    shape = (len(lengths), int(lengths.max(initial=0)))
    mask = (rng.random(shape) < share) & (np.arange(shape[1]) < lengths[:, None])

    def normal(scale: float = 1.0) -> Any:
        values = np.where(mask, rng.standard_normal(shape) * scale, np.nan).astype(np.float32)
        return torch.from_numpy(values).to(device)

    of_mask = torch.from_numpy(mask).to(getattr(torch, mask_dtype)).to(device)
    return Batch(normal(), normal(), normal(0.2), normal(0.2), of_mask, lengths)


def scan_failures(operator: str, got: Any, want: dict[str, np.ndarray]) -> str:
    """Results of gae, discounted_returns or vtrace that are further from the reference than the contract allows."""
    names = ("advantages", "returns") if len(got) == 2 else ("returns",)
    scale = np.maximum.accumulate(want["scale"][:, ::-1], 1)[:, ::-1]  # the scale is carried on, too
    found = [beyond(operator, name, a, want[name], scale=scale) for name, a in zip(names, got, strict=True)]
    return "; ".join(filter(None, found))


def whiten_failures(got: Any, want: dict[str, np.ndarray]) -> str:
    """Outputs of masked_whiten that are further from the reference than the contract allows."""
    found = [
        beyond("masked_whiten", name, a, want[name], largest=np.abs(want[name]).max(initial=0))
        for name, a in zip(("y", "mean", "var"), got, strict=True)
    ]
    return "; ".join(filter(None, found))


# ---- verl, in float64 -----------------------------------------------------------------------------------------------


def verl_gae(rewards: Any, values: Any, mask: Any, gamma: float, lam: float) -> tuple[Any, Any]:
    """compute_gae_advantage_return of verl/trainer/ppo/core_algos.py, before it whitens; masked values are set to 0."""
    import torch

    m = (mask != 0).double().cpu()
    r, v = (torch.where(m != 0, a.double().cpu(), 0.0) for a in (rewards, values))
    following, last = torch.zeros(r.shape[0]).double(), torch.zeros(r.shape[0]).double()
    found = []
    for t in reversed(range(r.shape[1])):
        delta = r[:, t] + gamma * following - v[:, t]
        now = delta + gamma * lam * last
        following = v[:, t] * m[:, t] + (1 - m[:, t]) * following
        last = now * m[:, t] + (1 - m[:, t]) * last
        found.append(last)
    advantages = torch.stack(found[::-1], dim=1)
    return advantages, advantages + v


def verl_whiten(x: Any, mask: Any, shift_mean: bool = True) -> Any:
    """verl/utils/torch_functional.py, masked_whiten."""
    m = mask.double()
    mean = (x * m).sum() / (m.sum() + 1e-8)
    var = ((x - mean) ** 2 * m).sum() / (m.sum() + 1e-8) * m.sum() / (m.sum() - 1)
    y = (x - mean) * (var + 1e-8).rsqrt()
    return y if shift_mean else y + mean


def verl_group(kind: str, s: np.ndarray, index: np.ndarray, lengths: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """The outcome advantages of verl's core_algos.py for one score per sequence. The names of the kinds are this
    library's."""
    out = s.copy()
    by: dict[int, list[int]] = {}
    for i, g in enumerate(index):
        by.setdefault(int(g), []).append(i)
    for members in by.values():
        x, n = s[members], len(members)
        mean, std = (0.0, 1.0) if n == 1 else (x.mean(), x.std(ddof=1))
        if kind == "grpo":
            out[members] = (x - mean) / (std + 1e-6)
        elif kind in ("dr_grpo", "reinforce_pp_baseline"):
            out[members] = x - mean
        elif kind == "rloo":
            out[members] = x if n == 1 else x * n / (n - 1) - mean * n / (n - 1)
        elif kind == "remax":
            out[members] = x - baseline[members]
        elif kind == "opo":
            weight = lengths[members].astype(np.float64)
            out[members] = x - (0.0 if n == 1 else (weight * x).sum() / weight.sum())
        elif kind == "gpg":
            out[members] = len(s) / max(np.count_nonzero(s), 1) * (x - mean)
        elif kind == "passk":
            first, second = np.sort(x)[::-1][:2]
            out[members] = 0.0
            out[members[int(np.argmax(x))]] = (first - second) / (std + 1e-6)
    return out


def trl_group(s: np.ndarray, size: int, scale: str) -> np.ndarray:
    """The advantages of trl/trainer/grpo_trainer.py with scale_rewards group, batch or none."""
    x = s.reshape(-1, size)
    out = x - x.mean(1, keepdims=True)
    if scale != "none":
        std = x.std(1, ddof=1, keepdims=True) if scale == "group" else np.full((1, 1), s.std(ddof=1))
        out = out / (std + 1e-4)
    return out.reshape(-1)


def areal_group(s: np.ndarray, size: int, std_level: str | None) -> np.ndarray:
    """Normalization of areal/utils/data.py, with mean_level batch, std_level batch, group or None, and std_unbiased."""
    x = s.reshape(-1, size) - s.mean()
    if std_level is None:
        return x.reshape(-1)
    over, count = (None, s.size) if std_level == "batch" else (1, size)
    std = np.ones((len(x), 1)) if count == 1 else np.sqrt((x**2).sum(over, keepdims=True) / (count - 1))
    return (x / (std + 1e-5)).reshape(-1)


# ---- a second implementation of the scan's contract -----------------------------------------------------------------


def fma(a: Any, b: Any, c: Any) -> Any:
    """fl32(a * b + c) in x86's extended type. Its second rounding matters at most once in 2^39 operations."""
    exact = np.asarray(a, np.longdouble) * np.asarray(b, np.longdouble) + np.asarray(c, np.longdouble)
    return exact.astype(np.float32)


def contract_gae(rewards: Any, values: Any, mask: Any, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """The bytes that rk.gae must give for padded finite rows. gamma and lam are not 0."""
    m = np.asarray(mask.cpu()) != 0
    r, v = (np.where(m, a.cpu().numpy(), np.float32(0)) for a in (rewards, values))
    g = np.float32(gamma)
    c_counted = np.float32(g * np.float32(lam))
    rows, length = r.shape
    pad = -length % 128
    m, r, v = (np.pad(a, ((0, 0), (0, pad))) for a in (m, r, v))
    following = np.zeros_like(v)
    now = np.zeros(rows, np.float32)
    for t in reversed(range(length + pad)):
        following[:, t] = now
        now = np.where(m[:, t], v[:, t], now)
    d = np.where(m, fma(g, following, r) - v, np.float32(0))
    c = np.where(m, c_counted, np.float32(1))
    x = np.zeros_like(d)
    behind = np.zeros(rows, np.float32)
    for first in reversed(range(0, length + pad, 128)):
        dc, cc, mc = (a[:, first : first + 128].reshape(rows, 32, 4) for a in (d, c, m))
        block_c, block_d = np.ones((rows, 32), np.float32), np.zeros((rows, 32), np.float32)
        for j in (3, 2, 1, 0):
            block_d = np.where(mc[..., j], fma(cc[..., j], block_d, dc[..., j]), block_d)
            block_c = np.where(mc[..., j], cc[..., j] * block_c, block_c)
        for h in (1, 2, 4, 8, 16):
            new_d = fma(block_c[:, :-h], block_d[:, h:], block_d[:, :-h])
            new_c = block_c[:, :-h] * block_c[:, h:]
            block_d = np.concatenate((new_d, block_d[:, -h:]), 1)
            block_c = np.concatenate((new_c, block_c[:, -h:]), 1)
        state = np.concatenate((fma(block_c[:, 1:], behind[:, None], block_d[:, 1:]), behind[:, None]), 1)
        for j in (3, 2, 1, 0):
            state = np.where(mc[..., j], fma(cc[..., j], state, dc[..., j]), state)
            x[:, first : first + 128].reshape(rows, 32, 4)[..., j] = state
        behind = fma(block_c[:, 0], behind, block_d[:, 0])
    returns = x + np.where(m, v, following)
    return x[:, :length], returns[:, :length]
