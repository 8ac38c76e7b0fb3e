"""Arrays and specs for the tests of policy_loss, and helpers for tests of other operators over tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rl_kernel_native import PolicySpec

# NumPy's function names for torch, so that float64 references can be differentiated.
TORCH: Any = SimpleNamespace(
    exp=torch.exp, expm1=torch.expm1, log=torch.log, where=torch.where, abs=torch.abs, minimum=torch.minimum,
    maximum=torch.maximum, asarray=lambda x: torch.as_tensor(x, dtype=torch.float64),
    stop=lambda x: x.detach() if isinstance(x, torch.Tensor) else x,
)  # fmt: skip
NAMES = ("logprob", "old_logprob", "advantage", "ref_logprob", "rollout_logprob", "entropy", "weight", "selected")


def tensors(a: dict[str, np.ndarray], device: str = "cpu") -> dict[str, Any]:
    return {name: torch.from_numpy(x.copy()).to(device) for name, x in a.items()}


def same(got: Any, want: Any) -> bool:
    return np.asarray(got).tobytes() == np.asarray(want).tobytes()


def arrays(rows: int, columns: int, seed: int = 0, masked: float = 0.3) -> dict[str, np.ndarray]:
    """float32 arrays of a batch; with three sequences or more, the second sequence has no token that counts."""
    random = np.random.default_rng(seed)

    def normal(scale: float) -> np.ndarray:
        return random.normal(0, scale, (rows, columns))

    logprob = -np.abs(normal(1.5))
    old = logprob + normal(0.3)
    found = {
        "logprob": logprob,
        "old_logprob": old,
        "advantage": normal(1.0),
        "ref_logprob": logprob + normal(0.2),
        "rollout_logprob": old + normal(0.1),
        "entropy": np.abs(normal(1.0)),
        "weight": np.abs(normal(1.0)),
        "selected": random.random((rows, columns)) < 0.2,
    }
    result = {name: a.astype(np.float32) for name, a in found.items()}
    mask = random.random((rows, columns)) >= masked
    if rows > 2:
        mask[1] = False
    result["mask"] = mask
    return result


def assert_packed_has_the_bits_of_padded(run: Any, a: dict[str, np.ndarray], gradient: str) -> None:
    """Compares ``run(arrays, **options)`` for five sequences, one of them empty, padded and packed."""
    columns = a["mask"].shape[1]
    lengths = [columns, 0, 17, 256, 131]
    padded = run({**a, "mask": a["mask"] & (np.arange(columns) < np.array(lengths)[:, None])})
    flat = {k: np.concatenate([x[:n] for x, n in zip(v, lengths, strict=True)]) for k, v in a.items()}
    cuts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    packed = run(flat, cu_seqlens=cuts)
    assert same(packed.loss, padded.loss)
    assert same(packed.metrics.vector, padded.metrics.vector)
    for s, n in enumerate(lengths):
        assert same(getattr(packed, gradient)[cuts[s] : cuts[s + 1]], getattr(padded, gradient)[s, :n])


def keywords(spec: PolicySpec, a: dict[str, Any]) -> dict[str, Any]:
    """The optional arrays that a spec needs."""
    wanted = {
        "ref_logprob": spec.needs_ref,
        "rollout_logprob": spec.needs_rollout,
        "entropy": True,
    }
    found = {name: a[name] for name, needed in wanted.items() if needed}
    if spec.importance == "given":
        found["importance_weight"] = a["weight"]
    if spec.needs_selected:
        found["selected"] = a["selected"]
    return found


def specs() -> dict[str, PolicySpec]:
    """Specs with every choice at least once; many choices occur in pairs."""
    s = PolicySpec
    mean = {"aggregation": "seq-mean-token-mean"}
    found = {f"aggregation {a}": s(aggregation=a, kl="k3", kl_coef=0.1, entropy_coef=0.01)
             for a in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")}  # fmt: skip
    found |= {
        "all sequences count": s(count_empty=True, **mean),
        "horizon": s(aggregation="seq-mean-token-sum-norm", horizon=50.0),
        "dual clip": s(dual_clip=1.3, epsilon_low=0.1, epsilon_high=0.3),
        "delta": s(delta=1.5),
        "no bound": s(epsilon_low=None, epsilon_high=None),
        "scaled": s(scale=0.25, dp_size=4),
        "clamped log-ratio": s(log_ratio_clamp=0.2),
        "current weights": s(importance="token", importance_of="current", clip="none"),
        "given weights": s(importance="given"),
        "gmpo": s(clip="gmpo", level="geometric", count_empty=True, epsilon_low=0.2, epsilon_high=0.3, **mean),
        "gmpo with weights": s(clip="gmpo", level="geometric", importance="token", **mean),
        "vespo": s(clip="vespo", level="sequence"),
        "vespo, kl": s(
            clip="vespo", level="sequence", kl="k3", kl_coef=0.3, kl_times_ratio=True, kl_ratio_of_token=True
        ),
        "gmpo, kl": s(
            clip="gmpo", level="geometric", kl="k2", kl_coef=0.3, kl_times_ratio=True, kl_ratio_of_token=True, **mean
        ),
        "vespo with weights": s(clip="vespo", level="sequence", importance="token", importance_high=1.1),
        "dro": s(clip="dro", dro_beta=0.5),
        "cispo": s(clip="cispo"),
        "absolute cispo": s(clip="cispo", epsilon_low=None, epsilon_high=1.2, epsilon_absolute=True),
        "clip_cov": s(clip="clip_cov"),
        "selected dropped": s(drop_selected=True, kl="k3", kl_coef=0.1, **mean),
        "gate alone": s(gate=(0.98, 1.02)),
        "dppo": s(clip="dppo", epsilon_low=None, epsilon_high=1.2, epsilon_absolute=True),
        "kl_cov": s(clip="kl_cov", selected_kl_coef=0.3),
        "sapo": s(clip="sapo", **mean),
        "entropy by tokens": s(entropy_coef=0.1, entropy_aggregation="token-mean", entropy_scale=0.5, **mean),
    }
    for k in ("k1", "k2", "k3", "abs"):
        found[f"{k}"] = s(kl=k, kl_coef=0.3)
        found[f"{k} straight through"] = s(kl=k, kl_coef=0.3, kl_straight_through=True)
        found[f"{k} straight through, by the ratio"] = s(
            kl=k, kl_coef=0.3, kl_straight_through=True, kl_gradient_ratio_max=1.1
        )
        found[f"{k} times ratio"] = s(kl=k, kl_coef=0.3, kl_times_ratio=True)
        found[f"{k} clamped"] = s(kl=k, kl_coef=0.3, kl_input_clamp=0.2, kl_clamp=0.03)
    for level in ("sequence", "geometric"):
        for straight in (False, True):
            name = f"{level}{' straight through' if straight else ''}"
            of = {"level": level, "straight_through": straight}
            found[f"{name} ppo"] = s(epsilon_low=0.3, **of)
            found[f"{name} sapo"] = s(clip="sapo", **of)
            found[f"{name} cispo"] = s(clip="cispo", **of)
            found[f"{name} clip_cov"] = s(clip="clip_cov", importance="token", **of)
            found[f"{name} selected dropped"] = s(clip="sapo", drop_selected=True, **of)
            found[f"{name} kl, weights"] = s(
                kl="k3", kl_coef=0.3, kl_times_ratio=True, importance="token", importance_high=1.05, **of
            )
            for k in ("k1", "k3"):
                more = {"kl": k, "kl_coef": 0.3, "kl_times_ratio": True, "kl_ratio_of_token": True, "kl_clamp": 0.05}
                found[f"{name} {k} times a token's ratio"] = s(log_ratio_clamp=0.2, **more, **of)
            found[f"{name} drop, gate"] = s(
                importance="geometric", drop_above=0.02, drop_of="rollout", gate=(0.5, 1.02), **of
            )
    for level in ("token", "sequence", "geometric"):
        for mode in ("truncate", "mask"):
            found[f"{level} weights, {mode}"] = s(
                importance=level, importance_mode=mode, importance_low=0.7, importance_high=1.3
            )
    return found
