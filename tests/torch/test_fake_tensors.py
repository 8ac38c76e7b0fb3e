"""Fake tensors, from which torch.compile and torch.export build graphs, raise the same errors as real tensors. A bad
shape, dtype, layout or number must raise before the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import rl_kernel_native as rk

S = rk.PolicySpec()
INTS = torch.int64
KEYS: dict[str, Any] = {"seed": 1, "sample_id": 0, "position": 0}


def z(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def ints(*shape: int, dtype: torch.dtype = INTS) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


# Calls by operator and mistake.
CASES: dict[str, Callable[[], Any]] = {
    "policy_loss: two denominators": lambda: rk.policy_loss(z(3, 5), z(3, 5), z(3), z(3, 5), spec=S, denominator=z(2)),
    "policy_loss: offsets of two dimensions": lambda: rk.policy_loss(
        z(5), None, z(5), z(5), spec=S, cu_seqlens=ints(1, 3, dtype=torch.int32)
    ),
    "policy_loss: no offsets": lambda: rk.policy_loss(
        z(5), None, z(5), z(5), spec=S, cu_seqlens=ints(0, dtype=torch.int32)
    ),
    "policy_loss: strided offsets": lambda: rk.policy_loss(
        z(5), None, z(5), z(5), spec=S, cu_seqlens=ints(6, dtype=torch.int32)[::2]
    ),
    "policy_loss: transposed tokens": lambda: rk.policy_loss(z(5, 3).T, None, z(3), z(3, 5), spec=S),
    "policy_loss: transposed mask": lambda: rk.policy_loss(z(3, 5), None, z(3), z(5, 3).T, spec=S),
    "policy_loss: expanded tokens": lambda: rk.policy_loss(z(3, 5), z(3, 1).expand(3, 5), z(3), z(3, 5), spec=S),
    "policy_loss: expanded packed tokens": lambda: rk.policy_loss(
        z(5), None, z(1).expand(5), z(5), spec=S, cu_seqlens=ints(3, dtype=torch.int32)
    ),
    "policy_loss: dtype of tokens": lambda: rk.policy_loss(
        z(3, 5), None, z(3), z(3, 5), spec=rk.PolicySpec(drop_selected=True), selected=z(3, 5, dtype=torch.bool)
    ),
    "policy_loss: dimensions of an advantage": lambda: rk.policy_loss(z(3, 5), None, z(3, 1, 1), z(3, 5), spec=S),
    "value_loss: two denominators": lambda: rk.value_loss(z(3, 5), None, z(3, 5), denominator=z(2)),
    "kl: transposed tokens": lambda: rk.kl(z(5, 3).T, z(3, 5), estimator="k1"),
    "importance_weights: offsets of two dimensions": lambda: rk.importance_weights(
        z(5), z(5), upper=2.0, cu_seqlens=ints(1, 3, dtype=torch.int32)
    ),
    "optimal_token_baseline: group_size": lambda: rk.optimal_token_baseline(z(3), z(3, 5), z(3, 5), group_size=2),
    "optimal_token_baseline: eps": lambda: rk.optimal_token_baseline(z(3), z(3, 5), z(3, 5), group_size=3, eps=0.0),
    "optimal_token_baseline: offsets of no groups": lambda: rk.optimal_token_baseline(
        z(3), z(3, 5), z(3, 5), group_offsets=ints(1)
    ),
    "optimal_token_baseline: no offsets of groups": lambda: rk.optimal_token_baseline(
        z(3), z(3, 5), z(3, 5), group_offsets=ints(0)
    ),
    "optimal_token_baseline: no rewards": lambda: rk.optimal_token_baseline(None, z(3, 5), z(3, 5), group_size=1),
    "covariance_mask: no advantage": lambda: rk.covariance_mask(z(3, 5), z(3, 5), None, kind="clip", ratio=0.1, seed=1),
    "group_advantage: group_size": lambda: rk.group_advantage(z(5), group_size=2),
    "group_advantage: dimensions of rewards": lambda: rk.group_advantage(z(5, 1), group_size=1),
    "group_advantage: eps": lambda: rk.group_advantage(z(4), group_size=2, eps=-1.0),
    "group_advantage: f_norm": lambda: rk.group_advantage(z(4), group_size=2, kind="gpg", f_norm=0.0),
    "group_advantage: number of group_ids": lambda: rk.group_advantage(z(4), group_ids=ints(3)),
    "group_advantage: dtype of group_ids": lambda: rk.group_advantage(z(4), group_ids=z(4)),
    "group_advantage: offsets of no groups": lambda: rk.group_advantage(z(4), ints(1)),
    "group_advantage: number of lengths": lambda: rk.group_advantage(z(4), group_size=2, kind="opo", lengths=ints(3)),
    "group_advantage: number of baselines": lambda: rk.group_advantage(z(4), kind="remax", baseline=z(3)),
    "gae: gamma": lambda: rk.gae(z(3, 5), z(3, 5), gamma=1.5),
    "gae: lam": lambda: rk.gae(z(3, 5), z(3, 5), lam=-1.0),
    "gae: number of bootstraps": lambda: rk.gae(z(3, 5), z(3, 5), bootstrap=z(4)),
    "gae: strided bootstrap": lambda: rk.gae(z(3, 5), z(3, 5), bootstrap=z(6)[::2]),
    "gae: shape of values": lambda: rk.gae(z(3, 5), z(3, 4)),
    "discounted_returns: gamma": lambda: rk.discounted_returns(z(3, 5), gamma=2.0),
    "vtrace: rho_bar": lambda: rk.vtrace(z(3, 5), z(3, 5), z(3, 5), z(3, 5), rho_bar=0.0),
    "masked_whiten: eps": lambda: rk.masked_whiten(z(3, 5), eps=0.0),
    "masked_whiten: shape of the mask": lambda: rk.masked_whiten(z(3, 5), z(3, 4)),
    "masked_whiten: dtype": lambda: rk.masked_whiten(z(3, 5, dtype=torch.float64)),
    "sequence_logprob: no offsets": lambda: rk.sequence_logprob(z(5), cu_seqlens=ints(0)),
    "sequence_logprob: strided offsets": lambda: rk.sequence_logprob(z(5), cu_seqlens=ints(6)[::2]),
    "sequence_logprob: shape of the mask": lambda: rk.sequence_logprob(z(3, 5), z(3, 4)),
    "preference_loss: two numbers of kl": lambda: rk.preference_loss(z(3), z(3), kind="kto", kl=z(2)),
    "preference_loss: number of references": lambda: rk.preference_loss(z(3), z(3), z(2), z(3)),
    "preference_loss: dimensions of rewards": lambda: rk.preference_loss(z(3, 1), z(3, 1)),
    "preference_loss: number of references of kto": lambda: rk.preference_loss(z(3), z(2), z(3), z(3), kind="kto"),
    "preference_loss: dtype of counts": lambda: rk.preference_loss(z(3), z(3), chosen_count=z(3), rejected_count=z(3)),
    "scatter_rewards: number of rewards": lambda: rk.scatter_rewards(z(2), z(3, 5)),
    "scatter_rewards: two weights": lambda: rk.scatter_rewards(z(3), z(3, 5), cost=z(3), lagrange=z(2)),
    "scatter_rewards: dtype of a weight": lambda: rk.scatter_rewards(
        z(3), z(3, 5), cost=z(3), lagrange=z(1, dtype=torch.float64)
    ),
    "scatter_rewards: shape of spans": lambda: rk.scatter_rewards(
        None, z(3, 5), spans=ints(2, 3), span_offsets=ints(4), span_rewards=z(2)
    ),
    "scatter_rewards: number of span_offsets": lambda: rk.scatter_rewards(
        None, z(3, 5), spans=ints(2, 2), span_offsets=ints(3), span_rewards=z(2)
    ),
    "scatter_rewards: number of span_rewards": lambda: rk.scatter_rewards(
        None, z(3, 5), spans=ints(2, 2), span_offsets=ints(4), span_rewards=z(3)
    ),
    "scatter_rewards: shape of token_rewards": lambda: rk.scatter_rewards(None, z(3, 5), token_rewards=z(3, 4)),
    "kv_cache_append: shape of v": lambda: rk.kv_cache_append(z(3, 2, 8), z(3, 1, 8), *z(2, 4, 4, 2, 8), ints(3)),
    "kv_cache_append: dtype of k": lambda: rk.kv_cache_append(ints(3, 2, 8), z(3, 2, 8), *z(2, 4, 4, 2, 8), ints(3)),
    "kv_cache_append: shape of k_cache": lambda: rk.kv_cache_append(*z(2, 3, 2, 8), *z(2, 4, 2, 4, 8), ints(3)),
    "kv_cache_append: dtype of v_cache": lambda: rk.kv_cache_append(
        *z(2, 3, 2, 8), z(4, 4, 2, 8), z(4, 4, 2, 8, dtype=torch.float16), ints(3)
    ),
    "kv_cache_append: too many slots": lambda: rk.kv_cache_append(*z(2, 3, 2, 8), *z(2, 4, 4, 2, 8), ints(4)),
    "kv_cache_append: dtype of slots": lambda: rk.kv_cache_append(*z(2, 3, 2, 8), *z(2, 4, 4, 2, 8), z(3)),
    "pack: number of lengths": lambda: rk.pack(z(3, 5), ints(4)),
    "pack: max_tokens": lambda: rk.pack(z(3, 5), ints(3), max_tokens=2**31),
    "pack: shape of the second array": lambda: rk.pack([z(3, 5), z(3, 4)], ints(3)),
    "pack: strided lengths": lambda: rk.pack(z(3, 5), ints(6)[::2]),
    "unpack: offsets of two dimensions": lambda: rk.unpack(z(5), ints(0), 3),
    "unpack: shape of positions": lambda: rk.unpack(z(5), ints(3), 3, positions=ints(2, 4, dtype=torch.int32)),
    "unpack: dtype of positions": lambda: rk.unpack(z(5), ints(3), 3, positions=ints(2, 3)),
    "unpack: max_seqlen": lambda: rk.unpack(z(5), ints(3), 2**31),
    "shift_labels_packed: cp_size": lambda: rk.shift_labels_packed(ints(5), ints(2), cp_size=0),
    "shift_labels_packed: cp_rank": lambda: rk.shift_labels_packed(ints(8), ints(2), cp_size=2, cp_rank=2),
    "shift_labels_packed: a number that cp_size does not divide": lambda: rk.shift_labels_packed(
        ints(5), ints(2), cp_size=2
    ),
    "shift_labels_packed: ignore_index": lambda: rk.shift_labels_packed(
        ints(5, dtype=torch.int32), ints(2), ignore_index=2**40
    ),
    "shift_labels_packed: number of group_ids": lambda: rk.shift_labels_packed(z(5), ints(2)),
    "loss_mask_from_spans: shape of spans": lambda: rk.loss_mask_from_spans(ints(2, 3), ints(3), num_tokens=5),
    "loss_mask_from_spans: number of span_offsets": lambda: rk.loss_mask_from_spans(
        ints(2, 2), ints(3), ints(5), num_tokens=5
    ),
    "random_bits: dtype": lambda: rk.random_bits(1, z(5), 0, 4),
    "random_bits: number of seeds": lambda: rk.random_bits(ints(4), ints(5), 0, 4),
    "random_bits: dimensions of position": lambda: rk.random_bits(1, ints(5), ints(5, 1), 4),
    "process_logits: dtype": lambda: rk.process_logits(ints(5, 3)),
    "process_logits: history offsets": lambda: rk.process_logits(
        z(5, 3), history=(ints(4), ints(5)), presence_penalty=1.0
    ),
    "process_logits: values of the bias": lambda: rk.process_logits(z(5, 3), logit_bias=(ints(4), z(3), ints(6))),
    "linear_sample: dtype": lambda: rk.linear_sample(ints(5, 3), z(9, 3), **KEYS),
    "linear_sample: dimensions": lambda: rk.linear_sample(z(2, 5, 3), z(9, 3), **KEYS),
    "linear_sample: columns of the weight": lambda: rk.linear_sample(z(5, 3), z(9, 4), **KEYS),
    "linear_sample: dtype of the weight": lambda: rk.linear_sample(z(5, 3), z(9, 3).half(), **KEYS),
    "linear_sample: rows of the weight": lambda: rk.linear_sample(z(5, 3), z(0, 3), **KEYS),
    "linear_sample: shape of the bias": lambda: rk.linear_sample(z(5, 3), z(9, 3), bias=z(8), **KEYS),
    "linear_sample: logits_dtype": lambda: rk.linear_sample(z(5, 3), z(9, 3), logits_dtype="float16", **KEYS),
    "linear_sample: valid_vocab": lambda: rk.linear_sample(z(5, 3), z(9, 3), valid_vocab=10, **KEYS),
    "linear_sample: number of temperatures": lambda: rk.linear_sample(z(5, 3), z(9, 3), temperature=z(4), **KEYS),
    "sample_partial: dtype": lambda: rk.sample_partial(ints(5, 3), vocab_start=0, vocab_size=3, **KEYS),
    "sample_partial: vocab_start": lambda: rk.sample_partial(z(5, 3), vocab_start=1, vocab_size=3, **KEYS),
    "sample_partial: valid_vocab": lambda: rk.sample_partial(
        z(5, 3), vocab_start=0, vocab_size=3, valid_vocab=4, **KEYS
    ),
    "sample_partial: words of allowed": lambda: rk.sample_partial(
        z(5, 40), vocab_start=0, vocab_size=40, allowed=ints(5, 1).int(), **KEYS
    ),
    "sample_merge: dtype": lambda: rk.sample_merge(z(2, 5, 16), vocab_size=9, **KEYS),
    "sample_merge: words": lambda: rk.sample_merge(ints(2, 5, 17).int(), vocab_size=9, **KEYS),
    "sample_merge: shards": lambda: rk.sample_merge(ints(9, 5, 16).int(), vocab_size=9, **KEYS),
    "sample_merge: number of temperatures": lambda: rk.sample_merge(
        ints(2, 5, 16).int(), vocab_size=9, temperature=z(4), **KEYS
    ),
    "sample: dtype": lambda: rk.sample(ints(5, 3), seed=1, sample_id=0, position=0),
    "sample: dimensions": lambda: rk.sample(z(5), seed=1, sample_id=0, position=0),
    "sample: number of temperatures": lambda: rk.sample(z(5, 3), seed=1, sample_id=0, position=0, temperature=z(4)),
    "sample: valid_vocab": lambda: rk.sample(z(5, 3), seed=1, sample_id=0, position=0, valid_vocab=4),
    "sample: number of sample_ids": lambda: rk.sample(z(5, 3), seed=1, sample_id=ints(4), position=0),
    "tool_mask: dtype": lambda: rk.tool_mask(z(5), [1], [2]),
    "mismatch_metrics: shapes": lambda: rk.mismatch_metrics(z(3, 5), z(3, 4)),
}


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    return f"{error.type.__name__}: {error.value}"


@pytest.mark.parametrize("case", CASES)
def test_fake_tensors_meet_the_errors_of_tensors(case: str) -> None:
    call = CASES[case]
    want = refusal(call)
    with FakeTensorMode():
        assert refusal(call) == want


@pytest.mark.parametrize("operator", ["group_advantage", "optimal_token_baseline"])
def test_offsets_of_no_group_are_refused_without_memory_too(operator: str) -> None:
    """Offsets of shape [1] can only be [0]. Such offsets cannot end with the number of sequences, which is known
    without reading them."""
    with FakeTensorMode():
        tokens, offsets = torch.zeros(2, 3), torch.zeros(1, dtype=torch.int64)
        arrays = (tokens[:, 0],) if operator == "group_advantage" else (tokens, tokens, tokens)
        with pytest.raises(ValueError, match=r"^group_offsets: expected 2 \(the number of sequences\) last"):
            getattr(rk, operator)(*arrays, group_offsets=offsets)


def test_a_trace_of_open_sizes_refuses_what_it_has_seen() -> None:
    with pytest.raises(ValueError, match=r"^x: expected a contiguous last dimension \(stride 1\), got stride 3"):
        make_fx(lambda x: rk.masked_whiten(x), tracing_mode="symbolic")(z(5, 3).T)


def test_a_size_that_is_known_only_at_the_run_is_accepted() -> None:
    def whitened(count: torch.Tensor) -> torch.Tensor:
        rows = count.item()
        torch._check(rows >= 0)
        result: torch.Tensor = rk.masked_whiten(torch.zeros(int(rows), 5))
        return result

    graph = make_fx(whitened, tracing_mode="symbolic")(torch.tensor(4))
    assert "masked_whiten" in graph.code


def test_fake_tensors_of_a_gpu_need_none() -> None:
    """A build without CUDA kernels traces them too, for a run on another machine."""
    with FakeTensorMode():
        hidden = torch.zeros(3, 16, device="cuda", dtype=torch.bfloat16)
        target = torch.zeros(3, device="cuda", dtype=INTS)
        assert rk.linear(hidden, hidden).device.type == "cuda"
        assert rk.linear_logprob(hidden, hidden, target).shape == (3,)
        with pytest.raises(TypeError, match=r"^x: expected dtype bfloat16 or float16 on cuda:0"):
            rk.linear(hidden.float(), hidden.float())


# Calls that read ids or a status after they ran.
CHECKED: dict[str, Callable[..., Any]] = {
    "embedding": lambda x, ids, **how: rk.embedding(ids, x.new_zeros(9, 3), **how),
    "logprob": lambda x, ids, **how: rk.logprob(x, ids, **how),
    "linear_logprob": lambda x, ids, **how: rk.linear_logprob(x, x.new_zeros(9, x.shape[-1]), ids, **how),
    "linear_cross_entropy": lambda x, ids, **how: rk.linear_cross_entropy(x, x.new_zeros(9, x.shape[-1]), ids, **how),
}


@pytest.mark.parametrize("how", [{"check": True}, {"on_bad_id": "raise"}], ids=str)
@pytest.mark.parametrize("operator", CHECKED)
def test_a_check_of_values_is_refused_where_there_are_none(operator: str, how: dict[str, Any]) -> None:
    """vmap raised torch's error about nonzero; meta and fake tensors other ones."""

    def call(x: Any, ids: Any) -> Any:
        return CHECKED[operator](x, ids, **how)

    x, ids = torch.linspace(-1.0, 1.0, 2 * 3 * 9).view(2, 3, 9), torch.zeros(2, 3, dtype=torch.int64)
    want = call(x[0], ids[0])
    assert torch.equal(torch.compile(call, backend="eager")(x[0], ids[0]), want)
    if operator != "embedding":
        assert torch.func.grad(lambda y: call(y, ids[0]).sum())(x[0]).shape == x[0].shape
    message = rf"^{next(iter(how))}: expected tensors whose values can be read, got"
    for way in (
        lambda: torch.func.vmap(call)(x, ids),
        lambda: torch.func.vmap(torch.func.grad(lambda y, i: call(y, i).sum()))(x, ids),
        lambda: call(x[0].to("meta"), ids[0].to("meta")),
    ):
        with pytest.raises(ValueError, match=message):
            way()
    with FakeTensorMode(), pytest.raises(ValueError, match=message):
        call(torch.zeros(3, 9), torch.zeros(3, dtype=torch.int64))
