"""Small random valid calls of every public operator: their arguments by name. Arrays are numbers, which the caller of
this module puts into any framework's memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

import rl_kernel_native as rk
from call_draws import FLOATS, Draw, Operand

# Public functions that compute nothing from arrays.
NOT_OPERATORS = {
    "arithmetic", "attention_splits", "canonical_blas", "checkpoint_contexts", "compare", "current_arithmetic",
    "enable", "patch_model", "status", "trace", "unpatch_model", "workspace_stats",
}  # fmt: skip
OPERATORS = [
    name
    for name in rk.__all__
    if inspect.isfunction(getattr(rk, name)) and not name.endswith("_reference") and name not in NOT_OPERATORS
]


def _paged_attention(d: Draw, batch: int, length: int, group: int, width: int) -> dict[str, Any]:
    """Pages of four keys; each sequence has two own pages after the pages of its group."""

    def table(rows: int) -> Any:
        return Operand(d.rng.integers(0, 5, (rows, 2)), "int32")

    kv = [d.matrix(5, 4, 2, width) for _ in range(2)]
    lens, offsets = Operand(d.rng.integers(0, 9, 1), "int32"), Operand(np.array([0, batch - d.chance()]), "int32")
    shared = d.perhaps(lambda: (table(1), lens, offsets), 0.5)
    used = Operand(d.rng.integers(0, 9, batch), "int32")
    lists = {"seqused_k": used, "block_table": table(batch), "shared_prefix": shared}
    return {"q": d.matrix(batch, length, 2 * group, width), "k": kv[0], "v": kv[1], **lists}


def _attention(d: Draw) -> dict[str, Any]:
    given = _whole_attention(d)
    if not d.chance(0.3):
        return {**given, "return_lse": d.chance()}
    given.update(sinks=None, return_partials=True)
    if given.get("cu_seqlens_k") is not None or given.get("block_table") is not None or d.chance():
        return given
    length = d.size(1024, 1025, 2500)  # one split, two, and three
    own = [s for s in range(4) if d.chance(0.7)]
    held = sum(max(min(1024 * (s + 1), length) - 1024 * s, 0) for s in own)
    batch, _, heads, width = given["q"].values.shape
    kv = {name: d.matrix(batch, held, 1 if heads % 2 else 2, width) for name in "kv"}
    return {**given, **kv, "splits": own, "seqused_k": Operand(np.full(batch, length), "int32")}


def _whole_attention(d: Draw) -> dict[str, Any]:
    batch, length, keys, group, width = d.size(1, 2), d.size(1, 3, 5), d.size(5, 9, 130), d.size(1, 2), d.of(8, 16)
    how = {
        "causal": d.chance(), "softmax_scale": d.of(None, 0.3), "softcap": d.of(None, None, 2.0),
        "exp": d.of(None, "portable"), "sinks": d.perhaps(lambda: d.normal(2 * group), 0.3),
    }  # fmt: skip
    if d.chance(0.3):
        cuts = d.cuts(7, 2, "int32")
        q, kv = d.matrix(7, 2 * group, width), [d.matrix(7, 2, width) for _ in range(2)]
        return {"q": q, "k": kv[0], "v": kv[1], "cu_seqlens_q": cuts, "cu_seqlens_k": cuts, **how}
    if d.chance(0.2):
        return {**_paged_attention(d, batch, length, group, width), **how}
    used = d.perhaps(lambda: Operand(d.rng.integers(length, keys + 1, batch), "int32"), 0.4)
    kv = [d.matrix(batch, keys, 2, width) for _ in range(2)]
    return {"q": d.matrix(batch, length, 2 * group, width), "k": kv[0], "v": kv[1], "seqused_k": used, **how}


def _attention_merge(d: Draw) -> dict[str, Any]:
    rows = (*([d.size(1, 2)] if d.chance() else []), d.size(0, 1, 5), d.size(1, 2))
    splits, width = d.size(0, 1, 3, 9), d.of(8, 16)
    m = d.rng.integers(*d.of((-3, 9), (-200, 200)), (splits, *rows)).astype(np.float32)
    length = d.rng.random((splits, *rows), np.float32) + np.float32(0.5)
    sums = d.normal(splits, *rows, width)
    if d.chance(0.4):  # splits without a contribution, rows that fail, and values beyond float32
        kinds = d.rng.choice(5, m.shape, p=(0.5, 0.2, 0.2, 0.05, 0.05))
        for kind, value in enumerate((-np.inf, -np.inf, np.nan, 2.0**21 - 1), 1):
            m[kinds == kind] = value
        length[kinds == 1], length[(kinds == 2) | (kinds == 3)] = 0, 1
        length[kinds == 3] = 0
        sums.values[d.rng.random(sums.values.shape) < 0.02] = d.of(np.inf, np.nan, 3e38, -np.inf)
    numbers = tuple(d.rng.permutation(40)[:splits].tolist())
    return {
        "partials": (Operand(np.stack([m, length], -1), "float32"), sums, numbers),
        "out_dtype": d.of(*FLOATS), "return_lse": d.chance(), "exp": "portable",
        "sinks": d.perhaps(lambda: _sinks(d, rows[-1])),
    }  # fmt: skip


def _sinks(d: Draw, heads: int) -> Operand:
    found = d.normal(heads)
    if d.chance(0.3):
        found.values[...] = d.of(-np.inf, np.inf, np.nan, 100.0, -100.0, 2e6, -2e6)
    return found


def _attention_merge_approximate(d: Draw) -> dict[str, Any]:
    parts, batch, tokens, heads = d.size(0, 1, 3), d.size(1, 2), d.size(0, 1, 5), d.size(1, 2)
    outs, lses = d.matrix(parts, batch, tokens, heads, 8), d.normal(parts, batch, heads, tokens)
    return {"outs": outs, "lses": lses, "return_lse": d.chance(), "exp": "portable"}


def _attention_backward(d: Draw) -> dict[str, Any]:
    q = (d.size(1, 2), d.size(1, 3, 5), 2, 8)
    names = ("dout", "q", "k", "v", "out")
    lse = d.normal(q[0], q[2], q[1])
    how = {"causal": d.chance(), "softcap": d.of(None, 2.0), "exp": "portable"}
    how["sinks"] = d.perhaps(lambda: d.normal(2), 0.3)
    return {**{name: d.matrix(*q) for name in names}, "lse": lse, **how}


def _tokens_of(*names: str) -> Callable[[Draw], dict[str, Any]]:
    """Arrays of tokens, a mask, offsets."""

    def draw(d: Draw) -> dict[str, Any]:
        shape, cuts, _ = d.sequences()
        arrays = {name: d.logprobs(shape) for name in names}
        return {**arrays, "mask": d.perhaps(lambda: d.mask(shape)), "cu_seqlens": cuts}

    return draw


def _with(base: Callable[[Draw], dict[str, Any]], **options: Callable[[Draw], Any]) -> Callable[[Draw], dict[str, Any]]:
    return lambda d: {**base(d), **{name: option(d) for name, option in options.items()}}


def _covariance_mask(d: Draw) -> dict[str, Any]:
    found = _tokens_of("logprob", "old_logprob", "advantage")(d)
    if d.chance():
        return {**found, "old_logprob": None, "kind": "kl", "ratio": d.of(0.1, 1.0)}
    return {**found, "kind": "clip", "ratio": d.of(0.1, 1.0), "seed": d.of(0, 7), "lower": d.of(None, -1.0)}


def _gae(d: Draw, *more: str) -> dict[str, Any]:
    shape, cuts, sequences = d.sequences()
    arrays = {name: d.normal(*shape) for name in ("rewards", "values", *more)}
    return {
        **arrays, "mask": d.perhaps(lambda: d.mask(shape)), "cu_seqlens": cuts,
        "bootstrap": d.perhaps(lambda: d.normal(sequences)), "gamma": d.of(1.0, 0.9, 0.0), "lam": d.of(1.0, 0.95),
    }  # fmt: skip


def _embedding(d: Draw) -> dict[str, Any]:
    rows, shape = d.size(3, 9), d.tokens()
    grad = d.perhaps(lambda: d.zeros(rows, 8), 0.2)
    return {
        "ids": d.integers(0, rows, *shape), "weight": d.matrix(rows, 8), "padding_idx": d.of(None, 0),
        "check": d.chance(), "main_grad": grad,
    }  # fmt: skip


def _embedding_backward(d: Draw) -> dict[str, Any]:
    rows, shape = d.size(3, 9), d.tokens()
    return {
        "dy": d.matrix(*shape, 8), "ids": d.integers(0, rows, *shape), "num_rows": rows, "padding_idx": d.of(None, 0),
        "main_grad": d.perhaps(lambda: d.zeros(rows, 8)),
    }  # fmt: skip


def _gated(*names: str, **options: Callable[[Draw], Any]) -> Callable[[Draw], dict[str, Any]]:
    def draw(d: Draw) -> dict[str, Any]:
        shape = (*d.tokens(), d.size(1, 8, 20))
        return {**{name: d.matrix(*shape) for name in names}, "round_before_mul": d.chance()}

    return _with(draw, **options)


def _approximate(d: Draw) -> str:
    return str(d.of("tanh", "none"))


def _group_advantage(d: Draw) -> dict[str, Any]:
    groups, size = d.size(1, 2, 5), d.size(1, 2, 4)
    count = groups * size
    kind = d.of("grpo", "grpo_trl", "dr_grpo", "rloo", "remax", "opo", "passk", "gpg", "reinforce_pp_baseline", "areal")
    found: dict[str, Any] = {"rewards": d.normal(count), "kind": kind, "return_stats": d.chance()}
    if kind == "opo":
        found["lengths"] = Operand(d.rng.integers(0, 9, count), d.of("int32", "int64", "float32"))
    if kind == "remax":
        return {**found, "baseline": d.normal(count)}
    by = d.of("group_size", "group_offsets", "group_ids")
    ids = Operand(d.rng.integers(0, groups, count), "int64")
    found[by] = {"group_size": size, "group_offsets": d.cuts(count, groups), "group_ids": ids}[by]
    return {**found, "return_status": d.chance()}


def _importance_weights(d: Draw) -> dict[str, Any]:
    mode = d.of("truncate", "clip", "mask")
    rejection = d.of(None, {"token_ratio": (0.5, 2.0)}, {"seq_mean_k3": 0.1}, {"token_k1": 1.5, "seq_max_k2": 3.0})
    return {
        **_tokens_of("logprob", "rollout_logprob")(d), "level": d.of("token", "sequence", "geometric"), "mode": mode,
        "upper": d.of(2.0, 1.2), "lower": d.of(None, 0.5) if mode != "truncate" else None, "rejection": rejection,
        "veto": d.of(None, 1e-4), "normalize": d.chance(), "return_metrics": d.chance(),
        "log_ratio_clamp": d.of(20.0, None, 1.0), "rollout_nan": d.of("nan", "neutral"),
    }  # fmt: skip


def _kl(d: Draw, *more: str) -> dict[str, Any]:
    shape = d.tokens()
    arrays = {name: d.logprobs(shape) for name in (*more, "logprob", "ref_logprob")}
    weight = d.of("old_logprob", "importance_weight", None)
    if weight:
        arrays[weight] = d.logprobs(shape)
    return {
        **arrays, "mask": d.perhaps(lambda: d.mask(shape)), "estimator": d.of("k1", "k2", "k3", "abs"),
        "input_clamp": d.of(None, 20.0), "clamp": d.of(None, 10.0),
        "straight_through": d.chance() and weight != "old_logprob",
    }  # fmt: skip


def _kv_cache_append(d: Draw) -> dict[str, Any]:
    tokens, pages, heads = d.size(0, 1, 5), d.size(1, 3), d.size(1, 2)
    slots = d.rng.permutation(pages * 4)[:tokens]
    caches = {f"{x}_cache": Operand(np.zeros((pages, 4, heads, 8)), d.dtype, True) for x in "kv"}
    return {
        "k": d.matrix(len(slots), heads, 8), "v": d.matrix(len(slots), heads, 8), **caches,
        "slot_mapping": Operand(np.where(d.rng.random(len(slots)) < 0.2, -1, slots), d.of("int32", "int64")),
    }  # fmt: skip


def _linear(d: Draw) -> dict[str, Any]:
    k, n = d.of(16, 32, 5), d.size(1, 3, 16)
    return {
        "x": d.matrix(*d.tokens(), k), "weight": d.matrix(n, k), "bias": d.perhaps(lambda: d.matrix(n)),
        "k_segments": d.of(1, 2) if k == 32 else 1, "out_dtype": d.of(None, "float32"),
        "main_grad": d.perhaps(lambda: d.zeros(n, k), 0.2),
    }  # fmt: skip


def _linear_partial(d: Draw) -> dict[str, Any]:
    n = d.size(1, 3, 16)
    return {
        "x_shard": d.matrix(d.size(), 16), "weight_shard": d.matrix(n, 16), "k_segments": 2, "num_segments": 1,
        "first_segment": d.of(0, 1),
    }  # fmt: skip


def _linear_weight_grad(d: Draw) -> dict[str, Any]:
    rows, k, n = d.size(0, 1, 5, 70), d.of(16, 5), d.size(1, 3, 16)
    written = d.of({}, {"main_grad": d.zeros(n, k)}, {"out": d.zeros(n, k, dtype=d.dtype)})
    return {"dy": d.matrix(rows, n), "x": d.matrix(rows, k), **written}


def _linear_input_grad(d: Draw) -> dict[str, Any]:
    n, k = d.size(1, 3, 16), d.of(16, 5)
    return {"dy": d.matrix(*d.tokens(), n), "weight": d.matrix(n, k)}


def _head(d: Draw, weight: str = "weight") -> dict[str, Any]:
    rows, vocab, k = d.size(0, 1, 3, 6), d.size(9, 90), 16
    lora = d.chance(0.2)
    return {
        "hidden": d.matrix(rows, k), weight: d.matrix(vocab, k), "target": d.integers(0, vocab, rows),
        "bias": d.perhaps(lambda: d.matrix(vocab)), "temperature": d.of(1.0, 0.7, d.ones(rows)),
        "softcap": d.of(None, 30.0), "logit_scale": d.of(1.0, 0.5), "loss_mask": d.perhaps(lambda: d.mask((rows,))),
        "lora_a": d.matrix(4, k) if lora else None, "lora_b": d.matrix(vocab, 4) if lora else None,
        "exp": d.of("portable", None),
    }  # fmt: skip


def _head_loss(d: Draw) -> dict[str, Any]:
    found = {
        **_head(d), "reduction": d.of("mean", "sum", "none"), "z_loss": d.of(0.0, 1e-3),
        "label_smoothing": d.of(0.0, 0.1), "weight_grad": d.chance(0.7)
    }  # fmt: skip
    found["return_z_loss"] = found["z_loss"] > 0 and d.chance()
    found["return_token_accuracy"] = d.chance(0.3)
    found["token_weight"] = d.perhaps(lambda: d.ones(*found["target"].values.shape))
    if found["reduction"] == "mean":
        found["denominator"] = d.of(None, 3.0, d.normal(1)._replace(values=np.float32([2.5])))
    return found


def _head_pair(d: Draw) -> dict[str, Any]:
    rows, vocab = d.size(1, 3, 6), d.size(9, 90)
    return {
        **{name: d.matrix(rows, 16) for name in ("hidden", "ref_hidden")},
        **{name: d.matrix(vocab, 16) for name in ("weight", "ref_weight")}, "target": d.integers(0, vocab, rows),
        "loss_mask": d.perhaps(lambda: d.mask((rows,))),
    }  # fmt: skip


def _head_partial(d: Draw) -> dict[str, Any]:
    found = _head(d, "weight_shard")
    return {**found, "vocab_start": 0, "vocab_size": found["weight_shard"].values.shape[0]}


def _kept(d: Draw, rows: int, vocab: int) -> Any:
    counts = d.rng.integers(0, 4, rows)
    ids = Operand(d.rng.integers(0, vocab, int(counts.sum())), "int32")
    return ids, Operand(np.concatenate(([0], np.cumsum(counts))), "int64")


def _logits(d: Draw, name: str = "logits") -> dict[str, Any]:
    rows, vocab = d.size(0, 1, 3, 6), d.size(1, 9, 130)
    return {
        name: d.matrix(rows, vocab), "target": d.integers(0, vocab, rows), "logit_scale": d.of(1.0, 0.5),
        "temperature": d.of(1.0, 0.7, d.ones(rows)), "softcap": d.of(None, 30.0),
        "kept": d.perhaps(lambda: _kept(d, rows, vocab), 0.3), "exp": d.of("portable", None),
    }  # fmt: skip


def _logprob(d: Draw) -> dict[str, Any]:
    found = _logits(d)
    rows = found["logits"].values.shape[0]
    flags = {f"return_{name}": d.chance() for name in ("lse", "entropy", "status")}
    return {**found, **flags, "check": d.chance(0.2), "out": d.perhaps(lambda: d.zeros(rows), 0.3)}


def _logprob_backward(d: Draw) -> dict[str, Any]:
    found = _logits(d)
    shape = found["logits"].values.shape
    entropy = {"dentropy": d.normal(shape[0]), "entropy": d.ones(shape[0])} if d.chance() else {}
    return {
        **found, "lse": d.ones(shape[0]), "dlogprob": d.normal(shape[0]), **entropy,
        "out": d.perhaps(lambda: d.zeros(*shape, dtype=d.dtype), 0.3),
    }  # fmt: skip


def _logprob_partial(d: Draw) -> dict[str, Any]:
    found = _logits(d, "logits_shard")
    return {**found, "vocab_start": 0, "vocab_size": found["logits_shard"].values.shape[1]}


def _logprob_merge(d: Draw) -> dict[str, Any]:
    stats = Operand(np.abs(d.rng.standard_normal((d.of(1, 2, 4), d.size(0, 1, 5), 5), np.float32)), "float32")
    return {"stats": stats, "return_lse": d.chance(), "return_entropy": d.chance(), "return_status": d.chance()}


def _spans(d: Draw, sequences: int, length: int) -> tuple[Operand, Operand]:
    count = d.size(0, 1, 3) if sequences and length else 0
    spans = np.sort(d.rng.integers(0, length + 1, (count, 2)), 1)
    return Operand(spans, d.of("int32", "int64")), d.cuts(count, sequences)


def _loss_mask_from_spans(d: Draw) -> dict[str, Any]:
    sequences, length = d.size(1, 2), d.size(0, 1, 7)
    spans, offsets = _spans(d, sequences, length)
    return {"spans": spans, "span_offsets": offsets, "num_tokens": length}


def _optimal_token_baseline(d: Draw) -> dict[str, Any]:
    size = d.size(1, 2)
    shape = (size * d.size(1, 2), d.size(1, 3, 17))
    per = d.of(shape, shape[:1])
    return {
        "rewards": d.normal(*per), "logprob": d.logprobs(shape), "sum_p_sq": d.ones(*shape),
        "mask": d.perhaps(lambda: d.mask(shape)), "group_size": size, "zero_tail": d.chance(),
        "importance_weight": d.perhaps(lambda: d.ones(*shape)),
    }  # fmt: skip


def _pack(d: Draw) -> dict[str, Any]:
    shape = (d.size(0, 1, 3), d.size(0, 1, 7))
    dtype = d.of("float32", "bfloat16", "int64", "int32", "bool", "uint8")
    tensors = Operand(d.rng.integers(0, 2, (*shape, *d.of((), (8,)))), dtype)
    by = {"lengths": d.integers(0, shape[1] + 1, shape[0])} if d.chance() else {"mask": d.mask(shape)}
    return {"tensors": tensors, **by, "max_tokens": d.of(None, shape[0] * shape[1]), "fill_value": d.of(0, 1)}


def _unpack(d: Draw) -> dict[str, Any]:
    total = d.size(0, 1, 9)
    tensors = Operand(d.rng.integers(0, 2, (total, *d.of((), (8,)))), d.of("float32", "bfloat16", "int64", "bool"))
    return {"tensors": tensors, "cu_seqlens": d.cuts(total, d.size(1, 3)), "max_seqlen": total + d.size(0, 3)}


def _policy_loss(d: Draw) -> dict[str, Any]:
    shape, cuts, sequences = d.sequences()
    names = ["logprob", "old_logprob"]
    spec = d.of(
        {}, {"kl": "k3", "kl_coef": 0.1}, {"aggregation": "seq-mean-token-mean", "level": "sequence"},
        {"entropy_coef": 0.01}, {"epsilon_high": 0.28, "dual_clip": 3.0, "importance": "token"},
    )  # fmt: skip
    names += ["rollout_logprob"] if "importance" in spec else []
    names += ["ref_logprob"] if "kl" in spec else ["entropy"] if "entropy_coef" in spec else []
    advantage = d.normal(*d.of(shape, (sequences, 1)))
    return {
        **{name: d.logprobs(shape) for name in names}, "advantage": advantage, "mask": d.mask(shape),
        "cu_seqlens": cuts, "spec": rk.PolicySpec(**spec), "ratio_metrics": d.chance(),
        "token_weight": d.perhaps(lambda: d.ones(*shape)),
        "denominator": d.of(None, 3.0, 2, Operand(np.float32([7.0]), "float32")),
    }  # fmt: skip


def _preference_loss(d: Draw) -> dict[str, Any]:
    pairs = d.size(0, 1, 5)
    kind = d.of("dpo", "hinge", "ipo", "nca_pair", "sppo_hard", "apo_zero", "discopop", "cpo", "orpo", "simpo", "aot")
    names = ["policy_chosen", "policy_rejected"]
    names += [] if kind in ("cpo", "orpo", "simpo") else ["ref_chosen", "ref_rejected"]
    counts = {n: d.integers(1, 9, pairs)._replace(dtype="int64") for n in ("chosen_count", "rejected_count")}
    return {
        **{name: d.logprobs((pairs,)) for name in names}, "kind": kind, "beta": d.of(0.1, 1.0),
        **(counts if d.chance() else {}), "nll_weight": 0.0 if kind == "aot" else d.of(0.0, 1.0),
    }  # fmt: skip


def _random_bits(d: Draw) -> dict[str, Any]:
    rows = d.size(0, 1, 5)
    return {
        "seed": d.of(0, 7, Operand(d.rng.integers(0, 9, rows), "int64")), "sample_id": d.integers(0, 99, rows),
        "position": d.of(3, Operand(d.rng.integers(0, 9, rows), "int64")), "n": d.size(1, 4, 6), "stream": d.of(0, 1),
    }  # fmt: skip


def _rms_norm(d: Draw) -> dict[str, Any]:
    shape = (*d.tokens(), d.size(1, 8, 40))
    weight = d.perhaps(lambda: d.matrix(shape[-1]))
    return {
        "x": d.matrix(*shape), "weight": weight, "eps": d.of(1e-6, 1e-5),
        "residual": d.perhaps(lambda: d.matrix(*shape)), "weight_offset": 0.0 if weight is None else d.of(0.0, 1.0),
        "return_rstd": d.chance(), "round_before_weight": weight is not None and d.chance(),
    }  # fmt: skip


def _rms_norm_backward(d: Draw) -> dict[str, Any]:
    shape = (*d.tokens(), d.size(1, 8, 40))
    weight = d.perhaps(lambda: d.matrix(shape[-1]))
    grad = d.perhaps(lambda: d.zeros(shape[-1])) if weight is not None else None
    return {
        "dy": d.matrix(*shape), "h": d.matrix(*shape), "weight": weight, "eps": 1e-6, "main_grad": grad,
        "d_new_residual": d.perhaps(lambda: d.matrix(*shape)),
    }  # fmt: skip


def _rope(*names: str) -> Callable[[Draw], dict[str, Any]]:
    def draw(d: Draw) -> dict[str, Any]:
        tokens, width = (d.size(0, 1, 2), d.size(0, 1, 5)), d.of(8, 16)
        heads = (d.size(1, 4), d.size(1, 2))
        found: dict[str, Any] = {n: d.matrix(*tokens, h, width) for n, h in zip(names, heads, strict=True)}
        found |= {"interleaved": d.chance(), "intermediate": d.of("float32", "input")}
        half = d.of(width, width // 2)
        if d.chance():
            return {
                **found,
                "cos": d.normal(9, half),
                "sin": d.normal(9, half),
                "position_ids": d.integers(0, 9, *tokens),
            }
        return {**found, "cos": d.normal(*tokens, half), "sin": d.normal(*tokens, half)}

    return draw


def _process_logits(d: Draw) -> dict[str, Any]:
    rows, vocab = d.size(1, 3), d.size(2, 9, 130)
    count = d.size(0, 5, 40)
    history = (d.integers(0, vocab, count), d.cuts(count, rows, "int64"), Operand(d.rng.random(count) < 0.5, "bool"))
    bias = (
        Operand(np.tile([0, vocab - 1], rows), "int32"), d.normal(2 * rows),
        Operand(np.arange(rows + 1) * 2, "int64"),
    )  # fmt: skip
    return {
        "logits": d.matrix(rows, vocab), "repetition_penalty": d.of(1.0, 1.2, d.ones(rows)),
        "presence_penalty": d.of(0.0, 0.5), "frequency_penalty": d.of(0.0, d.normal(rows)), "history": history,
        "logit_bias": d.perhaps(lambda: bias), "order": d.of("vllm", "hf", "sglang"),
    }  # fmt: skip


def _sample(d: Draw) -> dict[str, Any]:
    rows = d.size(0, 1, 4)
    return {
        "logits": d.matrix(rows, d.size(1, 9, 130)), "seed": d.of(0, 7), "sample_id": d.integers(0, 99, rows),
        "position": d.of(3, Operand(d.rng.integers(0, 9, rows), "int64")), "temperature": d.of(1.0, 0.7),
        "greedy": d.chance(0.2),
        "top_k": d.of(0, 3), "top_p": d.of(1.0, 0.9), "min_p": d.of(0.0, 0.1), "order": d.of("vllm", "sglang"),
        "return_logprob": d.of("processed", "raw", "both"), "return_kept": d.chance(0.3), "exp": "portable",
        "n_logprobs": d.of(0, 0, 1),
    }  # fmt: skip


def _of_shards(d: Draw, rows: int) -> dict[str, Any]:
    k = d.of(0, 3)
    return {
        "seed": d.of(0, 7), "sample_id": d.integers(0, 99, rows), "position": 3, "temperature": d.of(1.0, 0.7),
        "top_k": k, "top_p": d.of(1.0, 0.9) if k else 1.0, "greedy": d.chance(0.2), "order": d.of("vllm", "hf"),
        "return_logprob": d.of("processed", "raw", "both"), "exp": "portable",
    }  # fmt: skip


def _sample_partial(d: Draw) -> dict[str, Any]:
    rows, vocab = d.size(0, 1, 4), d.size(1, 9, 130)
    return {"logits_shard": d.matrix(rows, vocab), "vocab_start": 0, "vocab_size": vocab, **_of_shards(d, rows)}


def _sample_merge(d: Draw) -> dict[str, Any]:
    """Words that no partial gives, so every row has a status."""
    rows = d.size(0, 1, 4)
    return {
        "payloads": Operand(d.rng.integers(0, 99, (d.of(1, 2, 8), rows, 16 + 3 * d.of(3, 20))), "int32"),
        "vocab_size": 130,
        **_of_shards(d, rows), "return_kept": d.chance(0.3),
    }  # fmt: skip


def _linear_sample(d: Draw) -> dict[str, Any]:
    rows, vocab = d.size(0, 1, 4), d.size(1, 9, 130)
    return {
        "hidden": d.matrix(rows, 16), "weight": d.matrix(vocab, 16), "seed": d.of(0, 7),
        "sample_id": d.integers(0, 99, rows), "position": d.of(3, Operand(d.rng.integers(0, 9, rows), "int64")),
        "bias": d.perhaps(lambda: d.matrix(vocab), 0.3), "temperature": d.of(1.0, 0.7, d.ones(rows)),
        "top_k": d.of(0, 3), "min_p": d.of(0.0, 0.1), "greedy": d.chance(0.2),
        "valid_vocab": d.of(None, max(vocab - 2, 1)), "return_logprob": d.of("processed", "raw", "both", "none"),
        "logits_dtype": d.of(None, "float32"), "exp": "portable",
    }  # fmt: skip


def _scatter_rewards(d: Draw) -> dict[str, Any]:
    shape, cuts, sequences = d.sequences()
    found: dict[str, Any] = {"rewards": d.normal(sequences), "mask": d.mask(shape), "cu_seqlens": cuts}
    if d.chance():
        found |= {"logprob": d.logprobs(shape), "ref_logprob": d.logprobs(shape), "kl_coef": 0.1}
    if d.chance(0.3):
        found |= {"cost": d.normal(sequences), "lagrange": d.of(0.0, 0.5, Operand(np.float32([0.5]), "float32"))}
    if d.chance(0.3) and cuts is None:
        spans, offsets = _spans(d, sequences, shape[-1])
        rewards = d.normal(spans.values.shape[0])
        found |= {"spans": spans, "span_offsets": offsets, "span_rewards": rewards, "place": d.of("last", "spread")}
    return {**found, "token_rewards": d.perhaps(lambda: d.normal(*shape)), "length_penalty": d.of(0.0, 0.1)}


def _sequence_logprob(d: Draw) -> dict[str, Any]:
    found = _tokens_of("logprob")(d)
    return {**found, "logprob": found["logprob"]._replace(dtype=d.dtype), "return_status": d.chance()}


def _sequence_logprob_backward(d: Draw) -> dict[str, Any]:
    rows, length = d.size(1, 2), d.size(0, 1, 7)
    return {"dsum": d.normal(rows), "mask": d.perhaps(lambda: d.mask((rows, length))), "num_tokens": length}


def _shift_labels_packed(d: Draw) -> dict[str, Any]:
    count = d.size(0, 1, 9)
    return {
        "ids": d.integers(0, 9, count), "cu_seqlens": d.cuts(count, d.size(1, 3)),
        "mask": d.perhaps(lambda: d.mask((count,))), "ignore_index": d.of(-100, 0),
    }  # fmt: skip


def _tool_mask(d: Draw) -> dict[str, Any]:
    shape, cuts, _ = d.sequences()
    return {
        "ids": d.integers(0, 4, *shape), "begin": [1], "end": d.of([2], [2, 3]), "cu_seqlens": cuts,
        "include_end": d.chance(), "mask": d.perhaps(lambda: d.mask(shape)),
    }  # fmt: skip


def _tree_sum(d: Draw) -> dict[str, Any]:
    shape = d.tokens()
    parts = [d.normal(*shape) for _ in range(d.of(1, 2, 4))]
    return {"parts": parts, "out_dtype": d.of(None, "bfloat16", "float32")}


def _value_loss(d: Draw) -> dict[str, Any]:
    clip = d.of(None, 0.5)
    found = _tokens_of("value", "returns", "old_value", "token_weight")(d)
    found["token_weight"] = found["token_weight"] if d.chance() else None
    return {
        **found, "old_value": found["old_value"] if clip else None, "clip": clip,
        "aggregation": d.of("token-mean", "seq-mean-token-mean"), "denominator": d.of(None, 3.0),
    }  # fmt: skip


def _verify_draft(d: Draw) -> dict[str, Any]:
    rows, steps, vocab = d.size(0, 1, 4), d.size(1, 3), d.size(1, 9, 130)
    mode = d.of("same", "rejection")
    return {
        "target_logits": d.normal(rows, steps, vocab), "draft_ids": d.integers(-1, vocab, rows, steps - 1),
        "draft_logits": d.normal(rows, steps - 1, vocab) if mode == "rejection" and d.chance() else None,
        "mode": mode, "seed": 7, "sample_id": d.integers(0, 99, rows), "position": 3, "top_k": d.of(0, 3),
        "temperature": d.of(1.0, 0.7), "greedy": d.chance(0.2), "exp": "portable",
    }  # fmt: skip


CALLS: dict[str, Callable[[Draw], dict[str, Any]]] = {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_merge": _attention_merge,
    "attention_merge_approximate": _attention_merge_approximate,
    "covariance_mask": _covariance_mask,
    "discounted_returns": _with(
        _tokens_of("rewards"), gamma=lambda d: d.of(1.0, 0.9), masked=lambda d: d.of("carry", "reset")
    ),
    "embedding": _embedding,
    "embedding_backward": _embedding_backward,
    "entropy_mask": _with(_tokens_of("entropy"), top_quantile=lambda d: d.of(0.2, 1.0)),
    "gae": _gae,
    "gelu_mul": _gated("gate", "up", approximate=_approximate),
    "gelu_mul_backward": _gated("dy", "gate", "up", approximate=_approximate),
    "group_advantage": _group_advantage,
    "importance_weights": _importance_weights,
    "kl": _kl,
    "kl_backward": lambda d: _kl(d, "d_kl"),
    "kv_cache_append": _kv_cache_append,
    "linear": _linear,
    "linear_bias_grad": lambda d: {"dy": d.matrix(d.size(0, 1, 5, 70), d.size()), "out_dtype": d.of(None, "float32")},
    "linear_cross_entropy": _head_loss,
    "linear_input_grad": _linear_input_grad,
    "linear_logprob": _with(_head, return_lse=Draw.chance, return_entropy=Draw.chance, return_status=Draw.chance),
    "linear_logprob_pair": _head_pair,
    "linear_logprob_partial": _head_partial,
    "linear_partial": _linear_partial,
    "linear_sample": _linear_sample,
    "linear_weight_grad": _linear_weight_grad,
    "logprob": _logprob,
    "logprob_backward": _logprob_backward,
    "logprob_merge": _logprob_merge,
    "logprob_partial": _logprob_partial,
    "loss_mask_from_spans": _loss_mask_from_spans,
    "masked_whiten": _with(_tokens_of("x"), shift_mean=Draw.chance, unbiased=Draw.chance, return_stats=Draw.chance),
    "mismatch_metrics": _with(
        _tokens_of("logprob_train", "logprob_rollout"), rollout_nan=lambda d: d.of("nan", "neutral")
    ),
    "optimal_token_baseline": _optimal_token_baseline,
    "pack": _pack,
    "policy_loss": _policy_loss,
    "policy_loss_and_grad": _policy_loss,
    "preference_loss": _preference_loss,
    "process_logits": _process_logits,
    "random_bits": _random_bits,
    "rms_norm": _rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "rope": _rope("q", "k"),
    "rope_backward": _rope("dq_out", "dk_out"),
    "sample": _sample,
    "sample_merge": _sample_merge,
    "sample_partial": _sample_partial,
    "scatter_rewards": _scatter_rewards,
    "sequence_logprob": _sequence_logprob,
    "sequence_logprob_backward": _sequence_logprob_backward,
    "shift_labels_packed": _shift_labels_packed,
    "silu_mul": _gated("gate", "up"),
    "silu_mul_backward": _gated("dy", "gate", "up"),
    "tool_mask": _tool_mask,
    "tree_sum": _tree_sum,
    "unpack": _unpack,
    "value_loss": _value_loss,
    "value_loss_and_grad": _value_loss,
    "verify_draft": _verify_draft,
    "vtrace": lambda d: {**_gae(d, "logprob", "rollout_logprob"), "rollout_nan": d.of("nan", "neutral")},
}
