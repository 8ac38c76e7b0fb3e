"""Every numeric option at the ends of its range, in one table. The last value inside each end is accepted. The first
value outside is refused, with the option's name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import rl_kernel_native as rk
from test_words import ONE, P, Q, W, X, Y, Z

torch = pytest.importorskip("torch")

INF, NAN = math.inf, math.nan
TINY, MOST = 2.0**-126, 2.0**128 - 2.0**104  # the smallest normal and the largest number of float32
BELOW_1, ABOVE_1 = 1 - 2.0**-24, 1 + 2.0**-23
Range = tuple[tuple[Any, ...], tuple[Any, ...]]  # accepted values, refused values
POSITIVE: Range = (TINY, MOST), (0.0, -TINY, INF, NAN)
AT_LEAST_0: Range = (0.0, TINY, MOST), (-TINY, INF, NAN)
SHARE: Range = (0.0, 1.0), (-TINY, ABOVE_1, NAN)
PART: Range = (TINY, 1.0), (0.0, ABOVE_1, NAN)  # a share above 0
FINITE: Range = (-MOST, MOST), (-INF, INF, NAN)
COUNT: Range = (1, 3), (0, -1)


def integers(least: int, most: int) -> Range:
    return (least, most), (least - 1, most + 1)


def or_none(of: Range) -> Range:
    return (*of[0], None), of[1]


KEYS: dict[str, Any] = {"seed": 1, "sample_id": Y, "position": 3}
HISTORY = (Y, torch.arange(4), torch.zeros(3, dtype=torch.bool))
IDS, WIDE, NO_IDS = torch.arange(12), torch.zeros(3, 300), torch.zeros(0, dtype=torch.int64)
PADDED = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)
ROW = ONE[:, 0]
Call = Callable[..., Any]


def given(call: Call, *arrays: Any, **others: Any) -> Call:
    """The call with default options; the tested option replaces its default."""
    return lambda **option: call(*arrays, **(others | option))


def preference(kind: str) -> Call:
    return given(rk.preference_loss, P[0], P[1], P[0], P[1], kind=kind)


def rotated(partial_dim: Any) -> Any:
    angles = torch.ones(1, 4, (16 if partial_dim is None else max(partial_dim, 2)) // 2)
    return rk.rope(Q, None, angles, angles, partial_dim=partial_dim)


ATTENTION = given(rk.attention, Q, Q, Q)
SAMPLE, BITS = given(rk.sample, Z, **KEYS), given(rk.random_bits, **KEYS, n=1)
CLIP_COV = given(rk.covariance_mask, P, P, P, kind="clip", ratio=0.5, seed=1)
LOSS_OF_HEAD = given(rk.linear_cross_entropy, X, W, Y)
HEAD, DRAW = given(rk.linear_logprob, X, W, Y), given(rk.linear_sample, X, W, **KEYS)
REWARDS = given(rk.scatter_rewards, ROW, ONE)
PENALISED = given(rk.scatter_rewards, ROW, ONE, logprob=P, ref_logprob=P, kl_coef=0.5)
WEIGHTS, KL = given(rk.importance_weights, P, P, upper=2.0), given(rk.kl, P, P, estimator="k3")
GROUPS = given(rk.group_advantage, P[0], group_size=3)
BASELINE = given(rk.optimal_token_baseline, torch.ones(3), P.view(3, 2), -P.view(3, 2), group_size=3)
PROCESSED, VTRACE = given(rk.process_logits, Z, history=HISTORY), given(rk.vtrace, P, P, P, P)
SHIFT = given(rk.shift_labels_packed, IDS, torch.tensor([0, 12]), cp_size=3)
VALUE, SPEC = given(rk.value_loss, P, None, P), rk.PolicySpec
SPANS = given(rk.loss_mask_from_spans, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))

# A call, an option of it, and the option's range.
OPTIONS: list[tuple[str, Call, str, Range]] = [
    # softmax_scale is 1 / 4 here, and the quotient of both scales is a normal number, too.
    ("attention", ATTENTION, "softcap", ((TINY, 2.0**124, None), (0.0, -TINY, 2.0**125, INF, NAN))),
    ("attention", ATTENTION, "softmax_scale", ((TINY, 2.0**126, None), (0.0, -TINY, INF, NAN))),
    ("attention", ATTENTION, "window_size", ((1, None), (0, -1))),
    ("covariance_mask", CLIP_COV, "ratio", PART),
    ("covariance_mask", CLIP_COV, "epsilon_low", SHARE),
    ("covariance_mask", CLIP_COV, "epsilon_high", ((0.0, INF), (-TINY, NAN))),
    ("covariance_mask", CLIP_COV, "lower", ((-INF, 5 * BELOW_1), (NAN,))),
    ("covariance_mask", CLIP_COV, "upper", ((ABOVE_1, INF), (1.0, BELOW_1, NAN))),
    ("covariance_mask", CLIP_COV, "seed", integers(0, 2**63 - 1)),
    ("discounted_returns", given(rk.discounted_returns, P), "gamma", SHARE),
    ("entropy_mask", given(rk.entropy_mask, -P), "top_quantile", SHARE),
    ("gae", given(rk.gae, P, P), "gamma", SHARE),
    ("gae", given(rk.gae, P, P), "lam", SHARE),
    ("group_advantage", GROUPS, "eps", AT_LEAST_0),
    ("group_advantage", GROUPS, "group_size", COUNT),
    ("importance_weights", WEIGHTS, "upper", ((TINY, INF), (0.0, -TINY, NAN))),
    ("importance_weights", WEIGHTS, "log_ratio_clamp", or_none(POSITIVE)),
    ("importance_weights", WEIGHTS, "veto", or_none(POSITIVE)),
    ("importance_weights(mask)", given(WEIGHTS, mode="mask"), "lower",
     ((0.0, 2.0, None), (-TINY, 2 * ABOVE_1, NAN))),
    ("kl", KL, "input_clamp", or_none(POSITIVE)),
    ("kl", KL, "clamp", or_none(POSITIVE)),
    ("linear_cross_entropy", LOSS_OF_HEAD, "label_smoothing", ((0.0, BELOW_1), (-TINY, 1.0, NAN))),
    ("linear_cross_entropy", LOSS_OF_HEAD, "z_loss", AT_LEAST_0),
    ("linear_cross_entropy", LOSS_OF_HEAD, "denominator", or_none(POSITIVE)),
    ("linear_logprob", HEAD, "temperature", POSITIVE),
    ("linear_logprob", HEAD, "softcap", or_none(POSITIVE)),
    ("linear_logprob", HEAD, "valid_vocab", integers(1, 9)),
    ("linear_sample", DRAW, "temperature", POSITIVE),
    ("linear_sample", DRAW, "min_p", SHARE),
    ("linear_sample", DRAW, "top_k", integers(0, 64)),
    ("logprob", given(rk.logprob, Z, Y), "temperature", POSITIVE),
    ("logprob", given(rk.logprob, Z, Y), "softcap", or_none(POSITIVE)),
    ("logprob", given(rk.logprob, Z, Y), "logit_scale", POSITIVE),
    ("logprob", given(rk.logprob, Z, Y), "valid_vocab", integers(1, 9)),
    ("loss_mask_from_spans", SPANS, "num_tokens", ((0, 5), (-1,))),
    ("masked_whiten", given(rk.masked_whiten, P), "eps", POSITIVE),
    ("mismatch_metrics", given(rk.mismatch_metrics, P, P), "log_ratio_clamp", or_none(POSITIVE)),
    ("optimal_token_baseline", BASELINE, "eps", POSITIVE),
    ("optimal_token_baseline", BASELINE, "group_size", COUNT),
    ("pack", given(rk.pack, PADDED, torch.tensor([3, 2])), "max_tokens", ((5, 6), (4, -1))),
    ("policy_loss", given(rk.policy_loss, P, P, P, ONE, spec=SPEC()), "denominator", or_none(POSITIVE)),
    ("preference_loss", preference("dpo"), "beta", POSITIVE),
    ("preference_loss", preference("dpo"), "label_smoothing", ((0.0, BELOW_1), (-TINY, 1.0, NAN))),
    ("preference_loss(robust)", preference("robust"), "label_smoothing", ((0.0, BELOW_1 / 2), (-TINY, 0.5, NAN))),
    ("preference_loss(exo_pair)", preference("exo_pair"), "label_smoothing", ((TINY, BELOW_1), (0.0, 1.0, NAN))),
    ("process_logits", PROCESSED, "repetition_penalty", POSITIVE),
    ("process_logits", PROCESSED, "presence_penalty", FINITE),
    ("process_logits", PROCESSED, "frequency_penalty", FINITE),
    ("random_bits", BITS, "seed", integers(-(2**63), 2**64 - 1)),
    ("random_bits", BITS, "position", integers(0, 2**32 - 1)),
    ("random_bits", BITS, "stream", integers(0, 2**24 - 1)),
    ("rms_norm", given(rk.rms_norm, X, None), "eps", POSITIVE),
    ("rope", rotated, "partial_dim", ((2, 16, None), (0, 1, 17, 18))),
    ("sample", SAMPLE, "temperature", POSITIVE),
    ("sample", SAMPLE, "top_p", PART),
    ("sample", SAMPLE, "min_p", SHARE),
    ("sample", SAMPLE, "top_k", ((0, 9, 10), (-1,))),
    ("sample", SAMPLE, "valid_vocab", integers(1, 9)),
    ("sample", SAMPLE, "n_logprobs", integers(0, 9)),
    ("sample(300 columns)", given(rk.sample, WIDE, **KEYS), "n_logprobs", integers(0, 256)),
    ("sample(return_kept)", given(SAMPLE, return_kept=True), "kept_capacity", ((0, 27), (-1,))),
    ("sample(history)", given(SAMPLE, history=HISTORY), "repetition_penalty", POSITIVE),
    ("scatter_rewards", PENALISED, "kl_coef", AT_LEAST_0),
    ("scatter_rewards", PENALISED, "kl_input_clamp", or_none(POSITIVE)),
    ("scatter_rewards", PENALISED, "kl_clamp", or_none(POSITIVE)),
    ("scatter_rewards", REWARDS, "length_penalty", AT_LEAST_0),
    ("scatter_rewards", given(REWARDS, cost=ROW), "lagrange", AT_LEAST_0),
    ("scatter_rewards(penalty)", lambda overlong: REWARDS(overlong=(4, 2, overlong)), "overlong", AT_LEAST_0),
    ("scatter_rewards(length)", lambda overlong: REWARDS(overlong=(overlong, 2, 1.0)), "overlong",
     integers(2, 2**33 - 1)),
    ("scatter_rewards(buffer)", lambda overlong: REWARDS(overlong=(4, overlong, 1.0)), "overlong", integers(1, 4)),
    ("shift_labels_packed", SHIFT, "cp_rank", integers(0, 2)),
    ("shift_labels_packed", given(rk.shift_labels_packed, NO_IDS, torch.tensor([0])), "cp_size",
     integers(1, 2**20 - 1)),
    ("unpack", given(rk.unpack, PADDED[0], torch.tensor([0, 1, 3])), "max_seqlen", ((2, 3), (-1,))),
    ("value_loss", given(rk.value_loss, P, P, P), "clip", POSITIVE),
    ("value_loss", given(VALUE, loss_type="huber"), "huber_delta", POSITIVE),
    ("value_loss", VALUE, "denominator", or_none(POSITIVE)),
    ("value_loss", VALUE, "scale", FINITE),
    ("value_loss", VALUE, "dp_size", COUNT),
    ("vtrace", VTRACE, "gamma", SHARE),
    ("vtrace", VTRACE, "lam", SHARE),
    ("vtrace", VTRACE, "rho_bar", POSITIVE),
    ("vtrace", VTRACE, "c_bar", POSITIVE),
    ("PolicySpec", SPEC, "epsilon_low", ((0.0, 1.0, None), (-TINY, ABOVE_1, INF, NAN))),
    ("PolicySpec(dro)", given(SPEC, clip="dro"), "dro_beta", POSITIVE),
    ("PolicySpec(k1)", given(SPEC, kl="k1"), "kl_coef", FINITE),
    ("PolicySpec", SPEC, "dual_clip", ((ABOVE_1, MOST, None), (1.0, BELOW_1, INF, NAN))),
    ("PolicySpec", SPEC, "epsilon_high", or_none(AT_LEAST_0)),
    *(("PolicySpec", SPEC, name, or_none(POSITIVE)) for name in ("log_ratio_clamp", "delta")),
    *(("PolicySpec", SPEC, name, POSITIVE) for name in ("tau_positive", "tau_negative")),
    *(("PolicySpec", SPEC, name, FINITE) for name in ("entropy_coef", "k_positive", "k_negative", "scale")),
    *(("PolicySpec", SPEC, name, AT_LEAST_0) for name in ("lambda_positive", "lambda_negative")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "option", "of"), OPTIONS, ids=[f"{n}-{o}" for n, _, o, _ in OPTIONS])
def test_an_option_is_accepted_up_to_its_ends_and_not_beyond(name: str, call: Call, option: str, of: Range) -> None:
    accepted, refused = of
    for value in accepted:
        call(**{option: value})
    for value in refused:
        with pytest.raises(ValueError, match=rf"^{option}\b"):
            call(**{option: value})
