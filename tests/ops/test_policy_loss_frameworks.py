"""Presets of verl, OpenRLHF and slime: compares loss and gradients with the framework's own source, if it is
installed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import framework_sources
import rl_kernel_native as rk
from framework_losses import B, T, batch, compare
from rl_kernel_native import presets

# ---- verl -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verl() -> Any:
    return framework_sources.verl()


OF_LOSS = ("ppo_kl_coef", "dro_beta", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio")


def verl_config(**fields: Any) -> Any:
    from verl.workers.config import ActorConfig, PolicyLossConfig

    of_loss = {k: fields.pop(k) for k in OF_LOSS if k in fields}
    policy = PolicyLossConfig(**{k: v for k, v in of_loss.items() if k != "dro_beta"})
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=False)
    for target, values in ((config, fields), (policy, of_loss)):
        for name, value in values.items():
            object.__setattr__(target, name, value)
    object.__setattr__(config, "policy_loss", policy)
    object.__setattr__(config, "global_batch_info", {})
    return config


VERL = {
    "vanilla": {},
    "vanilla, asymmetric": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5},
    "gspo": {
        "loss_mode": "gspo",
        "clip_ratio_low": 3e-2,
        "clip_ratio_high": 4e-2,
        "loss_agg_mode": "seq-mean-token-mean",
    },
    "sapo": {"loss_mode": "sapo", "loss_agg_mode": "seq-mean-token-mean"},
    "gpg": {"loss_mode": "gpg"},
    "geo_mean": {"loss_mode": "geo_mean", "loss_agg_mode": "seq-mean-token-mean"},
    "geo_mean, the paper's range": {
        "loss_mode": "geo_mean",
        "loss_agg_mode": "seq-mean-token-mean",
        "clip_ratio_low": 0.4,
        "clip_ratio_high": 0.4,
    },
    "gspo, tokens": {"loss_mode": "gspo", "clip_ratio_low": 3e-2, "clip_ratio_high": 4e-2},
    "cispo": {"loss_mode": "cispo"},
    "cispo, without a lower bound": {"loss_mode": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.28},
    "dro": {"loss_mode": "dro", "dro_beta": 0.3},
    "token-sum": {"loss_agg_mode": "token-sum"},
    "seq-mean-token-sum": {"loss_agg_mode": "seq-mean-token-sum"},
    "seq-mean-token-sum-norm": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 40},
    "kl and entropy": {"use_kl_loss": True, "kl_loss_coef": 0.05, "entropy_coeff": 0.01},
    "k3+": {"use_kl_loss": True, "kl_loss_type": "k3+", "kl_loss_coef": 0.05},
    "k2": {"use_kl_loss": True, "kl_loss_type": "mse", "kl_loss_coef": 0.05},
    "abs": {"use_kl_loss": True, "kl_loss_type": "abs", "kl_loss_coef": 0.05},
}


@pytest.mark.parametrize("correction", [None, "token", "sequence", "icepop"])
@pytest.mark.parametrize("name", VERL)
def test_verl(verl: Any, name: str, correction: str | None) -> None:
    a, fields = batch(), dict(VERL[name])
    mode, aggregation = fields.get("loss_mode", "vanilla"), fields.get("loss_agg_mode", "token-mean")
    info = {"loss_scale_factor": fields["loss_scale_factor"]} if "loss_scale_factor" in fields else {}
    config = verl_config(**{
        "clip_ratio": 0.2,
        **{k: fields[k] for k in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "dro_beta") if k in fields},
        "tau_pos": 1.0, "tau_neg": 1.05,
    })  # fmt: skip
    object.__setattr__(config, "global_batch_info", info)
    weights, more = None, {}
    if correction is not None:
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

        threshold = "0.8_1.25" if correction == "icepop" else 1.1
        level = "token" if correction == "icepop" else correction
        if mode == "geo_mean":
            level = "given"
        fields |= {"rollout_is": level, "rollout_is_threshold": threshold}
        weights, _ = compute_rollout_correction_weights(
            a["old_logprob"] - a["rollout_logprob"],
            a["mask"].float(),
            "token" if level == "given" else level,
            threshold,
        )
        more = {"importance_weight": weights} if level == "given" else {"rollout_logprob": a["rollout_logprob"]}
    if fields.get("use_kl_loss"):
        more["ref_logprob"] = a["ref_logprob"]

    def theirs(x: torch.Tensor, h: torch.Tensor) -> Any:
        loss, _ = verl.get_policy_loss_fn(mode)(
            a["old_logprob"], x, a["advantage"], a["mask"].float(), aggregation, config, weights
        )
        if fields.get("entropy_coeff"):
            loss = loss - fields["entropy_coeff"] * verl.agg_loss(h, a["mask"].float(), aggregation, **info)
        if fields.get("use_kl_loss"):
            kind = fields.get("kl_loss_type", "low_var_kl")
            kl = verl.kl_penalty(x, a["ref_logprob"], kind)
            loss = loss + fields["kl_loss_coef"] * verl.agg_loss(kl, a["mask"].float(), aggregation, **info)
        return loss

    compare(a, presets.verl(**fields), theirs, **more)


def verl_loss(verl: Any, a: dict[str, Any], fields: dict[str, Any], x: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """verl's losses of the policy and of the KL, and its policy metrics."""
    mode, aggregation = fields.get("loss_mode", "vanilla"), fields.get("loss_agg_mode", "token-mean")
    info = {"loss_scale_factor": fields["loss_scale_factor"]} if "loss_scale_factor" in fields else {}
    own = {k: fields[k] for k in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "dro_beta") if k in fields}
    config = verl_config(clip_ratio=0.2, tau_pos=1.0, tau_neg=1.05, **own)
    object.__setattr__(config, "global_batch_info", info)
    mask = a["mask"].float()
    loss, metrics = verl.get_policy_loss_fn(mode)(a["old_logprob"], x, a["advantage"], mask, aggregation, config)
    if fields.get("use_kl_loss"):
        kl = verl.kl_penalty(x, a["ref_logprob"], fields.get("kl_loss_type", "low_var_kl"))
        loss = loss + fields["kl_loss_coef"] * verl.agg_loss(kl, mask, aggregation, **info)
    return loss, metrics


@pytest.mark.parametrize("name", ["vanilla", "gspo", "sapo", "cispo", "k1+", "k3", "k3+", "k2", "abs"])
def test_verl_beyond_its_clamps(verl: Any, name: str) -> None:
    """Log-ratios and KL of up to +-30, so that the limits of 20 and 10 bind for some tokens."""
    a = batch(seed=5)
    generator = torch.Generator().manual_seed(0)
    kl = name in ("k1+", "k3", "k3+", "k2", "abs")
    far = a["logprob"] + 60 * torch.rand(B, T, generator=generator) - 30
    if name == "gspo":  # some sequence means exceed the limit of 10; with A < 0 the clip does not hide this
        far[:3] -= 15
        a["advantage"][:3] = -a["advantage"][:3].abs()
        means = ((a["logprob"] - far) * a["mask"]).sum(1) / a["mask"].sum(1)
        assert 0 < int((means > 10).sum()) < B
    a["ref_logprob" if kl else "old_logprob"] = far
    fields = {"use_kl_loss": True, "kl_loss_type": name, "kl_loss_coef": 0.05} if kl else VERL[name]
    more = {"ref_logprob": far} if kl else {}
    compare(a, presets.verl(**fields), lambda x, _: verl_loss(verl, a, fields, x)[0], **more)


@pytest.mark.parametrize("name", [k for k in VERL if "entropy" not in k])
def test_verl_with_a_sequence_without_tokens(verl: Any, name: str) -> None:
    a, fields = batch(seed=6), VERL[name]
    a["mask"][3] = False
    more = {"ref_logprob": a["ref_logprob"]} if fields.get("use_kl_loss") else {}
    compare(a, presets.verl(**fields), lambda x, _: verl_loss(verl, a, fields, x)[0], **more)


def test_metrics_are_those_of_verl(verl: Any) -> None:
    a, fields = batch(seed=7), VERL["vanilla, asymmetric"]
    a["advantage"][4] = -2.0
    a["logprob"] = a["old_logprob"] + 3 * (a["logprob"] - a["old_logprob"])
    spec = presets.verl(**fields)
    ours = rk.policy_loss(a["logprob"], a["old_logprob"], a["advantage"], a["mask"], spec=spec).metrics.asdict()
    _, theirs = verl_loss(verl, a, fields, a["logprob"])
    theirs = {name.removeprefix("actor/"): value for name, value in theirs.items()}
    for name, of_verl in (("clip_fraction", "pg_clipfrac"), ("clip_fraction_dual", "pg_clipfrac_lower"),
                          ("ppo_kl", "ppo_kl")):  # fmt: skip
        assert theirs[of_verl] != 0
        assert ours[name] == pytest.approx(theirs[of_verl], rel=1e-5), name


def test_a_preset_ignores_what_it_has_no_use_for() -> None:
    a = batch()
    operands = (a["logprob"], a["old_logprob"], a["advantage"], a["mask"])
    extra = {k: a[k] for k in ("ref_logprob", "rollout_logprob")}
    extra |= {"importance_weight": torch.full((B, T), 0.5), "selected": torch.ones(B, T)}
    for spec in (presets.verl(), presets.trl(loss_type="grpo"), presets.openrlhf(), presets.slime()):
        want = rk.policy_loss(*operands, spec=spec)
        got = rk.policy_loss(*operands, spec=spec, **extra)
        assert got.loss.equal(want.loss)
        assert got.metrics.vector.equal(want.metrics.vector)
        with pytest.raises(ValueError, match="expected None"):
            rk.policy_loss(*operands, spec=dataclasses.replace(spec, lenient=False), **extra)


@pytest.mark.parametrize(
    ("corrected", "plain"),
    [
        (presets.verl(rollout_is="token", rollout_is_threshold="0.5_2"), presets.verl()),
        (presets.verl(rollout_is="given"), presets.verl()),
        (
            presets.trl(loss_type="grpo", use_vllm=True, off_policy_mask_threshold=0.01),
            presets.trl(loss_type="grpo", off_policy_mask_threshold=0.01),
        ),
        (presets.openrlhf(is_correction_level="seq"), presets.openrlhf()),
        (presets.slime(use_tis=True), presets.slime()),
    ],
)
def test_a_preset_corrects_nothing_without_the_rollout(corrected: rk.PolicySpec, plain: rk.PolicySpec) -> None:
    a = batch()
    results = []
    for spec in (corrected, plain):
        x = a["logprob"].clone().requires_grad_()
        loss = rk.policy_loss(x, a["old_logprob"], a["advantage"], a["mask"], spec=spec).loss
        loss.backward()
        results.append((loss.detach(), x.grad))
    assert all(got.equal(want) for got, want in zip(*results, strict=True))
    strict = dataclasses.replace(corrected, lenient=False)
    with pytest.raises(ValueError, match="expected an array"):
        rk.policy_loss(a["logprob"], a["old_logprob"], a["advantage"], a["mask"], spec=strict)


def test_verl_clip_cov(verl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl has as many candidates as covariance_mask, and is made to draw the same tokens."""
    a, clip = batch(seed=3), {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28}
    how: dict[str, Any] = {"kind": "clip", "lower": 0.2, "upper": 3.0, "epsilon_low": 0.1, "epsilon_high": 0.28}
    operands = (a["logprob"], a["old_logprob"], a["advantage"], a["mask"])
    selected = rk.covariance_mask(*operands, ratio=0.05, seed=11, **how)
    candidates = rk.covariance_mask(*operands, ratio=1.0, seed=0, **how) > 0
    assert 1 < int(selected.sum()) < int(candidates.sum())
    drawn = selected[candidates] > 0

    def permutation(count: int) -> torch.Tensor:
        assert count == len(drawn)
        return torch.cat((drawn.nonzero()[:, 0], (~drawn).nonzero()[:, 0]))

    monkeypatch.setattr(torch, "randperm", permutation)
    config = verl_config(clip_cov_ratio=0.05, clip_cov_lb=0.2, clip_cov_ub=3.0, clip_ratio=0.2, **clip)

    def theirs(x: torch.Tensor, _: torch.Tensor) -> Any:
        arguments = (a["old_logprob"], x, a["advantage"], a["mask"].float(), "token-mean", config)
        return verl.get_policy_loss_fn("clip_cov")(*arguments)[0]

    compare(a, presets.verl(loss_mode="clip_cov", **clip), theirs, selected=selected)


def test_verl_kl_cov(verl: Any) -> None:
    a = batch(seed=3)
    selected = rk.covariance_mask(a["logprob"], None, a["advantage"], a["mask"], kind="kl", ratio=0.1)
    config = verl_config(kl_cov_ratio=0.1, ppo_kl_coef=0.7)

    def theirs(x: torch.Tensor, _: torch.Tensor) -> Any:
        arguments = (a["old_logprob"], x, a["advantage"], a["mask"].float(), "token-mean", config)
        return verl.get_policy_loss_fn("kl_cov")(*arguments)[0]

    compare(a, presets.verl(loss_mode="kl_cov", ppo_kl_coef=0.7), theirs, selected=selected)


@pytest.mark.parametrize("mode", ["dppo_tv", "dppo_kl"])
def test_verl_dppo(verl: Any, mode: str) -> None:
    """Thresholds lie between the divergences of tokens, so tokens lie on both sides of each threshold."""
    a, low, high = batch(seed=4), 0.05, 0.08
    ell, o, raised = a["logprob"], a["old_logprob"], a["advantage"] > 0
    p, q = ell.exp(), o.exp()
    if mode == "dppo_tv":
        selected = torch.where(raised, p - q > high, p - q < -low)
    else:
        kl = q * (o - ell) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
        selected = torch.where(raised, ~(kl <= high) & (p > q), ~(kl <= low) & (p < q))  # kl is NaN where q > 1
    assert all(int((selected & side).sum()) > 1 for side in (raised, ~raised))
    fields: dict[str, Any] = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": 1.3}
    config = verl_config(clip_ratio=0.2, **fields)

    def theirs(x: torch.Tensor, _: torch.Tensor) -> Any:
        arguments = (o, x, a["advantage"], a["mask"].float(), "token-mean", config)
        return verl.get_policy_loss_fn(mode)(*arguments)[0]

    compare(a, presets.verl(loss_mode=mode, **fields), theirs, selected=selected.float())


@pytest.mark.parametrize("correction", [None, "token", "sequence", "icepop"])
def test_verl_reinforce_of_bypass_mode(verl: Any, correction: str | None) -> None:
    """The old policy is the rollout policy. The weights use the current policy, without a gradient."""
    a, threshold = batch(), "0.8_1.25" if correction == "icepop" else 1.1
    level = "token" if correction == "icepop" else correction
    config = verl_config(clip_ratio=0.2)
    object.__setattr__(config, "policy_loss", SimpleNamespace(get=lambda *_: rules))
    rules = {"loss_type": "reinforce", "rollout_is": level, "rollout_is_threshold": threshold}

    def theirs(x: torch.Tensor, _: torch.Tensor) -> Any:
        arguments = (a["rollout_logprob"], x, a["advantage"], a["mask"].float(), "seq-mean-token-sum", config)
        return verl.get_policy_loss_fn("bypass_mode")(*arguments)[0]

    spec = presets.verl(
        loss_mode="reinforce", loss_agg_mode="seq-mean-token-sum", rollout_is=level, rollout_is_threshold=threshold
    )
    compare(a, spec, theirs, **({"rollout_logprob": a["rollout_logprob"]} if correction else {}))


def test_verl_with_a_global_batch(verl: Any) -> None:
    a = batch()
    config = verl_config(clip_ratio=0.2)
    for aggregation, info, size in (
        ("token-mean", {"dp_size": 4, "batch_num_tokens": 777}, 777),
        ("seq-mean-token-mean", {"dp_size": 4, "global_batch_size": 24}, 24),
        ("seq-mean-token-sum", {"dp_size": 4, "global_batch_size": 24}, 24),
        ("seq-mean-token-sum-norm", {"dp_size": 4, "global_batch_size": 24, "loss_scale_factor": 40}, 24),
    ):
        object.__setattr__(config, "global_batch_info", info)

        def theirs(x: torch.Tensor, _: torch.Tensor, mode: str = aggregation) -> Any:
            arguments = (a["old_logprob"], x, a["advantage"], a["mask"].float(), mode, config)
            return verl.get_policy_loss_fn("vanilla")(*arguments)[0]

        spec = presets.verl(loss_agg_mode=aggregation, dp_size=4, loss_scale_factor=info.get("loss_scale_factor"))
        compare(a, spec, theirs, denominator=size)


def test_the_aggregation_of_dr_grpo_divides_by_a_constant_alone(verl: Any) -> None:
    """The sum over all tokens divided by ``loss_scale_factor``. verl 0.9.1 also divides by the number of sequences."""
    a = batch()
    config = verl_config(clip_ratio=0.2)
    info = {"loss_scale_factor": 40, "global_batch_size": 1}
    object.__setattr__(config, "global_batch_info", info)

    def theirs(x: torch.Tensor, _: torch.Tensor) -> Any:
        ratio = torch.exp(x - a["old_logprob"])
        losses = -torch.min(ratio * a["advantage"], ratio.clamp(0.8, 1.2) * a["advantage"])
        losses = torch.where(a["advantage"] < 0, torch.min(losses, -3 * a["advantage"]), losses)
        written = (losses * a["mask"]).sum() / 40
        arguments = (a["old_logprob"], x, a["advantage"], a["mask"].float(), "seq-mean-token-sum-norm", config)
        of_verl = verl.get_policy_loss_fn("vanilla")(*arguments)[0]
        torch.testing.assert_close(of_verl, written)
        return written

    spec = presets.verl(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=40)
    compare(a, spec, theirs, denominator=1)


# ---- OpenRLHF -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def openrlhf() -> Any:
    return framework_sources.openrlhf()


OPENRLHF: dict[str, dict[str, Any]] = {
    "ppo": {},
    "dual clip": {"dual_clip": 1.5, "clip_eps_high": 0.28},
    "samples": {"token_level_loss": False},
    "gspo": {"policy_loss_type": "gspo", "clip_eps_low": 0.03, "clip_eps_high": 0.04},
    "tis": {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": (0.9, 1.1)},
    "icepop": {"is_correction_level": "token", "is_correction_threshold": (0.9, 1.1)},
    "seq-mask-tis": {"is_correction_level": "seq", "is_correction_threshold": (0.98, 1.01)},
}


def openrlhf_loss(loss: Any, a: dict[str, Any]) -> Any:
    """OpenRLHF's PolicyLoss of a batch, in the form that :func:`compare` takes."""
    return lambda x, _: loss(x, a["old_logprob"], a["advantage"], a["mask"].float(), a["rollout_logprob"])[0]


@pytest.mark.parametrize("name", OPENRLHF)
def test_openrlhf(openrlhf: Any, name: str) -> None:
    a, fields = batch(), OPENRLHF[name]
    loss = openrlhf.PolicyLoss(**fields)
    more = {"rollout_logprob": a["rollout_logprob"]} if "is_correction_level" in fields else {}

    compare(a, presets.openrlhf(**fields), openrlhf_loss(loss, a), **more)


def test_openrlhf_beyond_its_clamp(openrlhf: Any) -> None:
    a = batch(seed=5)
    a["old_logprob"] = a["logprob"] + 60 * torch.rand(B, T, generator=torch.Generator().manual_seed(0)) - 30
    a["advantage"] = -a["advantage"].abs()  # with negative advantages, only the clamp bounds the loss from above
    loss = openrlhf.PolicyLoss()

    compare(a, presets.openrlhf(), openrlhf_loss(loss, a))


@pytest.mark.parametrize("level", ["token", "seq"])
@pytest.mark.parametrize(("gating", "delta"), [("binary_kl", 0.006), ("tv", 0.02)])
def test_openrlhf_with_a_gate_of_a_divergence(openrlhf: Any, gating: str, delta: float, level: str) -> None:
    a = batch()
    p, q = (a[name].exp().clamp(1e-6, 1 - 1e-6) for name in ("rollout_logprob", "old_logprob"))  # as OpenRLHF does
    of_token = (p - q).abs() if gating == "tv" else p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    mask = a["mask"].float()
    of_sequence = (of_token * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    statistic = of_token if level == "token" else of_sequence.expand_as(of_token)
    outside = (statistic < 0) | (statistic > delta)  # rounding makes some negative, and OpenRLHF drops these
    assert 0 < int((outside & a["mask"]).sum()) < int(a["mask"].sum())
    fields: dict[str, Any] = {
        "is_correction_level": level, "is_correction_gating": gating, "is_correction_threshold": (0.0, delta),
    }  # fmt: skip
    loss = openrlhf.PolicyLoss(**fields)

    spec = presets.openrlhf(**fields)
    compare(a, spec, openrlhf_loss(loss, a), rollout_logprob=a["rollout_logprob"], selected=outside.float())
    with pytest.raises(ValueError, match=r"^is_correction_mode: expected"):
        presets.openrlhf(**fields, is_correction_mode="clip")


def test_openrlhf_gspo_with_a_correction_is_of_the_rollout_policy(openrlhf: Any) -> None:
    a, fields = batch(), {"policy_loss_type": "gspo", "clip_eps_low": 0.03, "clip_eps_high": 0.04}
    loss = openrlhf.PolicyLoss(**fields, is_correction_level="token")

    spec = presets.openrlhf(**fields, is_correction_level="token")
    compare({**a, "old_logprob": a["rollout_logprob"]}, spec, openrlhf_loss(loss, a))


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("tokens", [True, False])
def test_openrlhf_with_kl_and_entropy_of_a_global_batch(
    openrlhf: Any, estimator: str, tokens: bool, unbiased: bool
) -> None:
    """The sum of three terms is formed as in trainer/ray/ppo_actor.py."""
    a = batch()
    a["ref_logprob"][0, :8] += 30.0  # exceeds the limit of the KL
    info = {"dp_size": 4, **({"batch_num_tokens": 777.0} if tokens else {"global_batch_size": 24.0})}
    mask, policy = a["mask"].float(), openrlhf.PolicyLoss(token_level_loss=tokens)

    def theirs(x: torch.Tensor, h: torch.Tensor) -> Any:
        actor = policy(x, a["old_logprob"], a["advantage"], mask, None, **info)[0]
        kl = openrlhf.compute_approx_kl(x, a["ref_logprob"], a["old_logprob"], estimator, unbiased)
        of_kl, of_entropy = (openrlhf.aggregate_loss(t, mask, token_level_loss=tokens, **info) for t in (kl, h))
        return actor + 0.05 * of_kl - 0.01 * of_entropy

    spec = presets.openrlhf(
        token_level_loss=tokens, use_kl_loss=True, kl_coef=0.05, kl_estimator=estimator, entropy_coef=0.01, dp_size=4,
        unbiased_gradient=unbiased,
    )  # fmt: skip
    compare(a, spec, theirs, ref_logprob=a["ref_logprob"], denominator=777 if tokens else 24)


# ---- slime: formulas from its source, since no package index has it --------------------------------------------------


def slime_loss(a: dict[str, Any], x: torch.Tensor, h: torch.Tensor, **f: Any) -> torch.Tensor:
    mask, advantage = a["mask"].float(), a["advantage"]
    behind = a["old_logprob"] - x
    if f.get("advantage_estimator") == "gspo":
        behind = ((behind * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(x)
    ratio = (-behind).exp()
    low, high = 1 - f.get("eps_clip", 0.2), 1 + f.get("eps_clip_high", f.get("eps_clip", 0.2))
    if f.get("advantage_estimator") == "cispo":
        loss = -ratio.clamp(low, high).detach() * advantage * x
    else:
        loss = torch.maximum(-ratio * advantage, -ratio.clamp(low, high) * advantage)
        if "eps_clip_c" in f:
            loss = torch.where(advantage < 0, torch.min(-f["eps_clip_c"] * advantage, loss), loss)
    if f.get("use_opsm"):
        drift = ((a["old_logprob"] - x.detach()) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        loss = loss * (1 - ((advantage < 0) & (drift > f["opsm_delta"])).float())
    if f.get("use_tis") or f.get("use_icepop"):
        w = torch.exp(a["old_logprob"] - a["rollout_logprob"])
        inside = (w >= f.get("tis_clip_low", 0.0)) & (w <= f["tis_clip"])
        loss = loss * (w * inside if f.get("use_icepop") else w.clamp(f.get("tis_clip_low", 0.0), f["tis_clip"]))

    def over_samples(values: torch.Tensor) -> torch.Tensor:
        if f.get("calculate_per_token_loss"):
            return (values * mask).sum() / mask.sum()
        return ((values * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum() / B

    total = over_samples(loss) - f.get("entropy_coef", 0.0) * over_samples(h)
    if f.get("use_kl_loss"):
        d = a["ref_logprob"] - x
        kinds = {"k1": -d, "k2": d * d / 2, "k3": d.exp() - 1 - d, "low_var_kl": d.exp() - 1 - d}
        kl = kinds[f["kl_loss_type"]]
        if f.get("use_unbiased_kl"):
            kl = kl * torch.exp(x - a["old_logprob"])
        if f["kl_loss_type"] == "low_var_kl":
            kl = kl.clamp(-10, 10)
        total = total + f["kl_loss_coef"] * over_samples(kl)
    return total


SLIME: dict[str, dict[str, Any]] = {
    "grpo": {"eps_clip_high": 0.28},
    "dual clip": {"eps_clip_c": 1.5},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.05},
    "cispo": {"advantage_estimator": "cispo"},
    "tokens": {"calculate_per_token_loss": True, "entropy_coef": 0.01},
    "tis": {"use_tis": True, "tis_clip": 1.1},
    "icepop": {"use_icepop": True, "tis_clip": 1.1, "tis_clip_low": 0.9},
    "opsm": {"use_opsm": True, "opsm_delta": 1e-4},
    **{
        f"kl {k}": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": k}
        for k in ("k1", "k2", "k3", "low_var_kl")
    },
    **{
        f"unbiased kl {k}": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": k, "use_unbiased_kl": True}
        for k in ("k3", "low_var_kl")
    },
}


@pytest.mark.parametrize("name", SLIME)
def test_slime(name: str) -> None:
    a, fields = batch(), SLIME[name]
    more = {"rollout_logprob": a["rollout_logprob"]} if "tis_clip" in fields else {}
    if fields.get("use_kl_loss"):
        more["ref_logprob"] = a["ref_logprob"]
    if fields.get("kl_loss_type") == "low_var_kl":
        a["ref_logprob"][0, :8] += 4.0  # gives a KL of about 50, which exceeds its limit of 10
    compare(a, presets.slime(**fields), lambda x, h: slime_loss(a, x, h, **fields), **more)
    assert presets.vime(**fields) == presets.slime(**fields)
