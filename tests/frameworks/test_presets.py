"""Presets have the frameworks' defaults, and an option that a preset does not know is an error."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import framework_sources
from rl_kernel_native import presets


def test_defaults_are_trls() -> None:
    grpo = framework_sources.trl("trl.trainer.grpo_config").GRPOConfig
    rloo = framework_sources.trl("trl.trainer.rloo_config").RLOOConfig
    gmpo = framework_sources.trl("trl.experimental.gmpo.gmpo_config").GMPOConfig
    for preset, config in ((presets.trl, grpo), (presets.trl_rloo, rloo), (presets.trl_gmpo, gmpo)):
        theirs = {field.name: field.default for field in dataclasses.fields(config)}
        for name, ours in inspect.signature(preset).parameters.items():
            assert ours.default == theirs[name], (preset.__name__, name)


def test_defaults_are_verls() -> None:
    framework_sources.verl()
    from verl.workers.config import ActorConfig

    theirs = {field.name: field.default for field in dataclasses.fields(ActorConfig)}
    ours = {name: p.default for name, p in inspect.signature(presets.verl).parameters.items()}
    both = set(ours) & set(theirs)
    assert len(both) >= 10, both
    for name in both - {"clip_ratio_low", "clip_ratio_high"}:
        assert ours[name] == theirs[name], name
    for name in ("clip_ratio_low", "clip_ratio_high"):  # None stands for clip_ratio
        assert ours[name] is None
        assert theirs[name] == theirs["clip_ratio"]


def test_defaults_are_openrlhfs() -> None:
    theirs = inspect.signature(framework_sources.openrlhf().PolicyLoss.__init__).parameters
    ours = inspect.signature(presets.openrlhf).parameters
    both = set(ours) & set(theirs)
    assert len(both) >= 8, both
    for name in both:
        assert ours[name].default == theirs[name].default, name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: presets.verl(loss_mode="dppo"), "loss_mode: expected"),
        (lambda: presets.verl(loss_agg_mode="seq-mean-token-sum-norm"), "loss_scale_factor: expected a number"),
        (lambda: presets.verl(loss_mode="sapo", use_kl_loss=True), "one loss has one aggregation"),
        (lambda: presets.verl(use_kl_loss=True, kl_loss_type="full"), "kl_loss_type: expected"),
        (lambda: presets.verl(kl_loss_type="k33"), "kl_loss_type: expected"),
        (lambda: presets.slime(advantage_estimator="GSPO"), "advantage_estimator: expected 'grpo', 'gspo', 'cispo'"),
        (lambda: presets.trl(loss_type="dpo"), "loss_type: expected"),
        (lambda: presets.trl(use_vllm=True, vllm_importance_sampling_mode="x"), "vllm_importance_sampling_mode"),
        (lambda: presets.slime(kl_loss_type="k4"), "kl_loss_type: expected"),
        (
            lambda: presets.openrlhf(policy_loss_type="gspo", use_kl_loss=True, unbiased_gradient=True),
            "unbiased_gradient: expected False",
        ),
        (
            lambda: presets.openrlhf(is_correction_level="seq", is_correction_gating="tv"),
            r"is_correction_threshold: expected \(0, delta\)",
        ),
        (lambda: presets.openrlhf(is_correction_threshold=(1, 2, 3)), "is_correction_threshold: expected two numbers"),
        (lambda: presets.trl(top_entropy_quantile=1.5), "top_entropy_quantile: expected a number in"),
        (lambda: presets.trl(gradient_accumulation_steps=0), "gradient_accumulation_steps: expected an integer > 0"),
        (lambda: presets.trl_gmpo(gradient_accumulation_steps=-2), "gradient_accumulation_steps: expected an integer"),
        (lambda: presets.verl(loss_agg_mode="constant"), "loss_agg_mode: expected"),
        (lambda: presets.verl(rollout_is="token", rollout_is_threshold="a"), "rollout_is_threshold: expected a number"),
        (
            lambda: presets.verl(rollout_is="token", rollout_is_threshold="3_2"),
            "^rollout_is_threshold: expected finite numbers > 0, ascending, got '3_2'$",
        ),
        (
            lambda: presets.verl_rollout_correction(rollout_rs="seq_mean_k3", rollout_rs_threshold="-1"),
            "^rollout_rs_threshold: expected finite numbers > 0, got '-1'$",
        ),
        (lambda: presets.openrlhf(is_correction_gating="kl"), "is_correction_gating: expected"),
        (
            lambda: presets.openrlhf(is_correction_level="seq", is_correction_mode="clip"),
            'is_correction_mode: expected "mask"',
        ),
    ],
)
def test_what_a_preset_does_not_know_is_an_error(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


BOUNDS: tuple[tuple[Any, dict[str, Any], str, Any], ...] = (
    (presets.verl, {}, "clip_ratio", -1),
    (presets.verl, {}, "clip_ratio_low", -1),
    (presets.verl, {}, "clip_ratio_high", 1e39),
    (presets.verl, {}, "clip_ratio_c", 0.5),
    (presets.verl, {"loss_mode": "dppo_tv"}, "clip_ratio_c", -1),
    (presets.verl, {"loss_mode": "sapo"}, "tau_pos", 0),
    (presets.verl, {"loss_mode": "sapo"}, "tau_neg", 0),
    (presets.verl, {"loss_mode": "kl_cov"}, "ppo_kl_coef", -1),
    (presets.verl, {"loss_agg_mode": "seq-mean-token-sum-norm"}, "loss_scale_factor", 0),
    (presets.verl, {"use_kl_loss": True}, "kl_loss_coef", "1"),
    (presets.verl, {"use_kl_loss": True}, "kl_loss_type", ["k1"]),
    (presets.verl, {"rollout_is": "token"}, "rollout_is_threshold", 1e39),
    (presets.verl, {}, "entropy_coeff", None),
    (presets.verl, {}, "use_kl_loss", "False"),
    (presets.verl, {}, "dp_size", 10**30),
    (presets.trl, {}, "epsilon", -1),
    (presets.trl, {}, "epsilon_high", -1),
    (presets.trl, {}, "beta", "1"),
    (presets.trl, {"loss_type": "sapo"}, "sapo_temperature_neg", 0),
    (presets.trl, {"loss_type": "vespo"}, "vespo_k_pos", "1"),
    (presets.trl, {"loss_type": "vespo"}, "vespo_lambda_neg", "1"),
    (presets.trl, {"loss_type": "dr_grpo"}, "max_completion_length", 0),
    (presets.trl, {"use_vllm": True}, "vllm_importance_sampling_clip_min", 5),
    (presets.trl, {"use_vllm": True}, "vllm_importance_sampling_clip_max", -1),
    (presets.trl, {}, "off_policy_mask_threshold", "1"),
    (presets.trl, {}, "use_vllm", "False"),
    (presets.trl, {}, "gradient_accumulation_steps", 10**400),
    (presets.trl_rloo, {}, "epsilon_high", -1),
    (presets.trl_gmpo, {}, "beta", "1"),
    (presets.slime, {}, "eps_clip_high", -1),
    (presets.slime, {}, "eps_clip_c", 1),
    (presets.slime, {"use_kl_loss": True}, "kl_loss_coef", "1"),
    (presets.slime, {}, "kl_loss_type", ["k1"]),
    (presets.slime, {"use_tis": True}, "tis_clip_low", 3),
    (presets.slime, {"use_opsm": True}, "opsm_delta", None),
    (presets.slime, {}, "use_icepop", 1),
    (presets.openrlhf, {}, "clip_eps_low", -1),
    (presets.openrlhf, {"is_correction_level": "seq"}, "is_correction_threshold", (0.5, 1e39)),
    (presets.openrlhf, {"is_correction_level": "token"}, "is_correction_threshold", (-1, 5)),
    (presets.openrlhf, {}, "token_level_loss", "False"),
    (presets.slime_mis, {}, "mis_level", ["token"]),
)


@pytest.mark.parametrize(("preset", "more", "name", "value"), BOUNDS)
def test_errors_speak_of_the_frameworks_configuration(preset: Any, more: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected .*got"):
        preset(**more, **{name: value})


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: presets.verl(clip_ratio=None), "clip_ratio"),  # type: ignore[arg-type]
        (lambda: presets.trl(epsilon=None), "epsilon"),  # type: ignore[arg-type]
        (lambda: presets.trl_rloo(epsilon=None), "epsilon"),  # type: ignore[arg-type]
        (lambda: presets.trl_gmpo(epsilon=None), "epsilon"),  # type: ignore[arg-type]
        (lambda: presets.slime(eps_clip=None), "eps_clip"),  # type: ignore[arg-type]
        (
            lambda: presets.trl(loss_type="dr_grpo", max_completion_length=None),  # type: ignore[arg-type]
            "max_completion_length",
        ),
    ],
)
def test_a_bound_that_is_null_is_no_bound_left_out(call: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected a number, got NoneType"):
        call()


# For each number of a preset: the values of EDGES that the preset refuses, and the options with which the number has an
# effect.
EDGES = {"0": 0.0, "1": 1.0, "-1": -1.0, "inf": float("inf"), "-inf": -float("inf"), "nan": float("nan")}
COEFFICIENT, NO_NEGATIVE = "inf -inf nan", "-1 inf -inf nan"
POSITIVE, ABOVE_ONE = f"0 {NO_NEGATIVE}", f"0 1 {NO_NEGATIVE}"
REFUSED: tuple[tuple[Any, dict[str, Any], str, str], ...] = (
    (presets.openrlhf, {}, "clip_eps_low clip_eps_high", NO_NEGATIVE),
    (presets.openrlhf, {}, "dual_clip dp_size", ABOVE_ONE),
    (presets.openrlhf, {"use_kl_loss": True}, "kl_coef entropy_coef", COEFFICIENT),
    *(
        row
        for preset in (presets.slime, presets.vime)
        for row in (
            (preset, {}, "eps_clip eps_clip_high", NO_NEGATIVE),
            (preset, {}, "eps_clip_c", ABOVE_ONE),
            (preset, {"use_kl_loss": True}, "kl_loss_coef entropy_coef", COEFFICIENT),
            (preset, {"use_tis": True}, "tis_clip tis_clip_low", NO_NEGATIVE),
            (preset, {"use_opsm": True}, "opsm_delta", COEFFICIENT),
        )
    ),
    (presets.slime_mis, {}, "mis_upper_bound mis_lower_bound", POSITIVE),
    (presets.slime_mis, {"mis_mode": "clip"}, "mis_lower_bound", POSITIVE),
    (presets.trl, {}, "epsilon epsilon_high top_entropy_quantile", NO_NEGATIVE),
    (presets.trl, {}, "delta", POSITIVE),
    (presets.trl, {}, "beta entropy_coef off_policy_mask_threshold", COEFFICIENT),
    (presets.trl, {}, "gradient_accumulation_steps", ABOVE_ONE),
    (presets.trl, {"loss_type": "sapo"}, "sapo_temperature_pos sapo_temperature_neg", POSITIVE),
    (presets.trl, {"loss_type": "vespo"}, "vespo_k_pos vespo_k_neg", COEFFICIENT),
    (presets.trl, {"loss_type": "vespo"}, "vespo_lambda_pos vespo_lambda_neg", "inf nan"),  # TRL clamps them from below
    (presets.trl, {"use_vllm": True}, "vllm_importance_sampling_clip_max", NO_NEGATIVE),
    (presets.trl_gmpo, {}, "epsilon epsilon_high", NO_NEGATIVE),
    (presets.trl_rloo, {}, "epsilon epsilon_high", NO_NEGATIVE),
    (presets.verl, {}, "clip_ratio clip_ratio_low clip_ratio_high", NO_NEGATIVE),
    (presets.verl, {}, "clip_ratio_c dp_size", ABOVE_ONE),
    (presets.verl, {"use_kl_loss": True}, "kl_loss_coef entropy_coeff", COEFFICIENT),
    (presets.verl, {"loss_mode": "sapo"}, "tau_pos tau_neg", POSITIVE),
    (presets.verl, {"loss_mode": "dro"}, "dro_beta", POSITIVE),
    (presets.verl, {"rollout_is": "token"}, "rollout_is_threshold", POSITIVE),
    (presets.verl_rollout_correction, {}, "rollout_is_threshold", POSITIVE),
)


@pytest.mark.parametrize(
    ("preset", "more", "name", "refused"),
    [(preset, more, name, refused) for preset, more, names, refused in REFUSED for name in names.split()],
)
def test_a_number_on_the_edge_is_taken_or_refused_by_name(
    preset: Any, more: dict[str, Any], name: str, refused: str
) -> None:
    found = []
    for edge, value in EDGES.items():
        try:
            preset(**more, **{name: value})
        except (TypeError, ValueError) as error:
            found.append(edge if str(error).startswith(f"{name}: expected") else str(error))
    assert sorted(found) == sorted(refused.split())
