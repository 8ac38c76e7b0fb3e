"""The table of contract.py is complete, has no duplicates, agrees with itself and the documents, and gives the tests
their bounds."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from rl_kernel_native import cases as library_cases
from rl_kernel_native import contract
from rl_kernel_native.contract import ROUNDING, ROWS, Row, row

torch = pytest.importorskip("torch", reason="the tests of operators make their operands with torch")

import advantage_cases  # noqa: E402
import linear_cases  # noqa: E402
import linear_logprob_cases  # noqa: E402
import reward_batches  # noqa: E402
import silu_mul_cases  # noqa: E402
from advantage_cases import Batch, whiten_failures  # noqa: E402
from attention_bounds import attention_failures  # noqa: E402
from cases import ALL, beyond, torch_logits, torch_targets, truth  # noqa: E402
from policy_loss_cases import TORCH  # noqa: E402
from policy_loss_cases import arrays as policy_arrays  # noqa: E402
from rollout_cases import rollouts  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
STEMS = sorted(path.stem for path in (ROOT / "cpp" / "include" / "rlk" / "ops").glob("*.h"))
# Operators without gradients: their results are constants of a loss, or integers.
WITHOUT_GRADIENT = (
    "covariance_mask",
    "gae",
    "group_advantage",
    "importance_weights",
    "kv_cache_append",
    "linear_sample",
    "masked_whiten",
    "mismatch_metrics",
    "scatter_rewards",
    "optimal_token_baseline",
    "random_bits",
    "sample",
    "shift_labels_packed",
)
SELF_TESTS = sorted((ROOT / "python/rl_kernel_native/cases").glob("*.py"))
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test draws the same numbers in any order of tests."""
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(0))


def names(rows: Any) -> set[tuple[str, str]]:
    return {(r.operator, r.output) for r in rows}


# ---- the table itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", STEMS)
def test_every_operator_has_rows_forward_and_backward(stem: str) -> None:
    rows = [r for r in ROWS if r.stem == stem]
    directions = {"forward"} if stem in WITHOUT_GRADIENT else {"forward", "backward"}
    assert {r.direction for r in rows} == directions, f"contract.py lacks rows of {stem}"
    exported = {name for name in rk.__all__ if name == stem or f"{name}_backward" in rk.__all__}
    assert {r.operator for r in rows} >= {name for name in exported if callable(getattr(rk, name))} & {stem}


@pytest.mark.parametrize("found", ROWS, ids=lambda r: r.name)
def test_a_row_uses_the_words_of_the_table(found: Row) -> None:
    assert found.kind in contract.KINDS
    assert found.direction in ("forward", "backward")
    assert found.backends in contract.BACKENDS
    assert set(found.keeps) <= set(contract.VARIATIONS)
    assert "runs" in found.keeps, "nothing in this library depends on the run"
    assert set(found.dtypes) <= set(ROUNDING)
    assert set(found.bound.facts) <= set(contract.FACTS)
    assert row(found.operator, found.output) is found, "a row is there twice"
    assert found.bound.why


def test_every_word_of_the_table_is_used() -> None:
    facts = {name for r in ROWS for b in (r.bound, r.unit_bound) if b for name in b.facts}
    assert facts == set(contract.FACTS)
    assert {r.kind for r in ROWS} == set(contract.KINDS)
    assert {r.backends for r in ROWS} == set(contract.BACKENDS)


def shorthand(facts: dict[str, Any]) -> dict[str, Any]:
    found = {"min": np.minimum, "max": np.maximum}
    for name, text in contract.SHORTHAND.items():
        if all(word in facts for word in re.findall(r"[a-z_]{2,}", text)):
            found[name] = eval(text, {}, facts)
    return found


@pytest.mark.parametrize("found", ROWS, ids=lambda r: r.name)
def test_the_text_of_a_bound_says_what_its_function_computes(found: Row) -> None:
    for bound in filter(None, (found.bound, found.unit_bound)):
        for _ in range(20):
            integers = {"terms", "rows", "columns", "keys", "head_dim"}
            facts: dict[str, Any] = {
                name: int(RNG.integers(1, 20_000)) if name in integers else RNG.exponential(3.0, 5)
                for name in bound.facts
            }
            said = eval(bound.text, {}, facts | shorthand(facts))
            np.testing.assert_allclose(bound.of(**facts), said, rtol=1e-12)
        left_out = dict.fromkeys(bound.required, 0.5)
        defaults = {n: p.default for n, p in inspect.signature(bound.of).parameters.items() if n not in left_out}
        assert bound.of(**left_out) == bound.of(**left_out, **defaults)


def test_numbers_and_arrays_give_the_same_bound() -> None:
    found = row("linear", "y")
    expected, scale = RNG.standard_normal(7), RNG.exponential(3.0, 7)
    whole = found.allowed("bfloat16", expected=expected, terms=40, scale=scale)
    each = [found.allowed("bfloat16", expected=e, terms=40, scale=s) for e, s in zip(expected, scale, strict=True)]
    assert whole.tolist() == each


def test_missing_and_unknown_facts_are_errors() -> None:
    with pytest.raises(TypeError, match="max_abs_z"):
        row("logprob", "lse").allowed()
    with pytest.raises(TypeError, match="columns"):
        row("logprob", "lse").allowed(max_abs_z=1.0, columns=3)
    with pytest.raises(ValueError, match=r'unit: expected "ieee", .*got .h100.'):
        row("linear", "y").allowed(unit="h100", terms=1, scale=1.0)
    with pytest.raises(KeyError, match="no row for rope z"):
        row("rope", "z")
    assert contract.rows_of("nothing") == ()
    assert names(contract.rows_of("gelu_mul")) < names(contract.rows_of("silu_mul")) | names(ROWS)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rounding_is_what_torch_rounds(dtype: str) -> None:
    """A value between two neighbours is off by at most half their distance, and exactly by that at a tie."""
    rounding, kind = ROUNDING[dtype], getattr(torch, dtype)
    info = torch.finfo(kind)
    assert rounding.relative == info.eps / 2
    assert rounding.least == info.smallest_normal * info.eps / 2
    wide = torch.from_numpy(RNG.standard_normal(100_000) * np.exp2(RNG.integers(-30, 10, 100_000)))
    off = (wide.to(kind).double() - wide).abs()
    assert bool((off <= rounding.inner * wide.abs() + rounding.least).all())
    # torch rounds float64 to the 16-bit types through float32
    source = np.float64 if dtype == "float32" else np.float32
    edge = source(rounding.limit)
    over = torch.from_numpy(np.array([edge, np.nextafter(edge, source(0))])).to(kind)
    assert over.isinf().tolist() == [True, False]


def test_the_module_needs_the_standard_library_alone() -> None:
    """The module's own rows describe a whole model; each operator enters its rows at import."""
    code = (
        "import importlib, pathlib, sys, types; p = types.ModuleType('alone'); sys.modules['alone'] = p;"
        "p.__path__ = [str(pathlib.Path(sys.argv[1]).parent)]; m = importlib.import_module('alone.contract');"
        "print(len(m.ROWS), sorted({'numpy', 'torch', 'rl_kernel_native'} & set(sys.modules)))"
    )
    file = inspect.getsourcefile(contract)
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == f"{len(contract.rows_of('chain'))} []"


# ---- bounds in tests ---------------------------------------------------------------------------------------------


def of_logprob() -> str:
    logits, target = torch_logits(RNG, (5, 301)), torch_targets(RNG, (5,), 301)
    found = rk.logprob(logits, target, exp="portable", **ALL)
    one = np.ones(5, np.float32)
    dlogits = rk.logprob_backward(
        logits, target, found.lse, dlogprob=torch.from_numpy(one), dentropy=torch.from_numpy(one), entropy=found.entropy
    )
    of = truth(logits, target)
    return f"{of.failures(found)}; {of.gradient_failures(dlogits, 'float32', dlogprob=one, dentropy=one)}"


def of_linear() -> str:
    o = linear_cases.operands(RNG, (5,), 40, 9)
    found = linear_cases.failures(o, linear_cases.results(o), "ieee")
    with rk.arithmetic("sm_90"):
        return found + linear_cases.failures(o, linear_cases.results(o), "sm_90")


def of_linear_logprob() -> str:
    h = linear_logprob_cases.head(RNG, 5, 40, 90)
    loss = rk.linear_cross_entropy(*h[:2], h.target, bias=h.bias)
    of_lora = linear_logprob_cases.lora_failures(h, linear_logprob_cases.lora(RNG, h, 8, 2.0))
    return f"{linear_logprob_cases.failures(h)}; {linear_logprob_cases.loss_failures(h, loss)}; {of_lora}"


def of_attention() -> str:
    values = RNG.standard_normal((4, 40, 2, 16))
    return attention_failures(*(torch.from_numpy(a).bfloat16() for a in values), sinks=torch.tensor([0.5, -1.0]))


def of_gae() -> str:
    b = advantage_cases.batch(RNG, [40, 9], share=1.0)
    b = b._replace(**{name: torch.nan_to_num(getattr(b, name)) for name in Batch._fields[:4]})
    mask = b.mask.numpy()
    arrays = {name: value.numpy() for name, value in b.policies().items()}
    tokens = {name: arrays[name] for name in ("rewards", "values")}
    found = (
        ("gae", rk.gae(**b.tokens(), mask=b.mask), rk.gae_reference(**tokens, mask=mask)),
        ("vtrace", rk.vtrace(**b.policies(), mask=b.mask), rk.vtrace_reference(**arrays, mask=mask)),
        (
            "discounted_returns", (rk.discounted_returns(b.rewards, b.mask),),
            rk.discounted_returns_reference(tokens["rewards"], mask),
        ),
    )  # fmt: skip
    return "; ".join(f"{name} {advantage_cases.scan_failures(name, got, want)}" for name, got, want in found)


def of_group_advantage() -> str:
    s = RNG.standard_normal(40).astype(np.float32)
    want = rk.group_advantage_reference(s, group_size=8)
    got = rk.group_advantage(s, group_size=8)
    return beyond("group_advantage", "advantage", got, want["advantage"], scale=want["scale"])


def of_masked_whiten() -> str:
    x = RNG.standard_normal((5, 40)).astype(np.float32)
    return whiten_failures(rk.masked_whiten(x, return_stats=True), rk.masked_whiten_reference(x))


def of_sequence_logprob() -> str:
    x, dsum = (RNG.standard_normal(shape).astype(np.float32) for shape in ((3, 40), 3))
    want, got = rk.sequence_logprob_reference(x, dsum=dsum), rk.sequence_logprob(x)
    d = rk.sequence_logprob_backward(torch.from_numpy(dsum), num_tokens=40, dtype="bfloat16")
    found = (
        beyond("sequence_logprob", "sum", got.sum, want["sum"], terms=40, scale=want["scale"]),
        beyond("sequence_logprob", "count", got.count, want["count"]),
        beyond("sequence_logprob", "d_logprob", d, want["d_logprob"], "bfloat16"),
    )
    return "; ".join(found)


def of_policy_loss() -> str:
    a = policy_arrays(6, 37)
    spec = rk.PolicySpec(kl="k3", kl_coef=0.1, entropy_coef=0.01)
    operands = [a[name] for name in ("logprob", "old_logprob", "advantage", "mask")]
    more = {"ref_logprob": a["ref_logprob"], "entropy": a["entropy"]}
    got = rk.policy_loss_and_grad(*operands, spec=spec, **more)
    want = rk.policy_loss_reference(*operands, spec=spec, **more)
    mask, tokens = a["mask"], a["mask"].sum()
    ratio = np.exp(a["logprob"].astype(np.float64) - a["old_logprob"])
    clipped = np.where(a["advantage"] > 0, ratio > 1 + spec.epsilon_high, ratio < 1 - spec.epsilon_low)
    log_ratio = a["ref_logprob"].astype(np.float64) - a["logprob"]
    d_logprob = np.where(clipped, 0, -a["advantage"] * ratio) - 0.1 * np.expm1(log_ratio)
    d_logprob = np.where(mask, d_logprob, 0) / tokens
    d_entropy = np.where(mask, -0.01, 0) / tokens
    scale = np.abs(d_logprob).sum() + abs(float(want["loss"]))
    found = (
        beyond("policy_loss", "loss", got.loss, float(want["loss"]), scale=scale),
        beyond("policy_loss", "metrics", got.metrics.asdict()["kl_sum"], float(want["kl_sum"])),
        beyond("policy_loss", "d_logprob", got.d_logprob, d_logprob, largest=np.abs(d_logprob).max()),
        beyond("policy_loss", "d_entropy", got.d_entropy, d_entropy, largest=np.abs(d_entropy).max()),
    )
    return "; ".join(found)


def of_kl() -> str:
    a = {k: torch.from_numpy(x) for k, x in policy_arrays(6, 37).items()}
    ell, weight = a["logprob"].double().requires_grad_(), a["weight"].double().requires_grad_()
    how: dict[str, Any] = {"estimator": "k3", "mask": a["mask"]}
    want = rk.kl_reference(ell, a["ref_logprob"], **how, importance_weight=weight, xp=TORCH)
    slopes = torch.autograd.grad(want.sum(), (ell, weight))
    more = how | {"importance_weight": a["weight"]}
    got = rk.kl(a["logprob"], a["ref_logprob"], **more)
    d = rk.kl_backward(torch.ones_like(got), a["logprob"], a["ref_logprob"], **more)
    return "; ".join(
        beyond("kl", name, found, wanted.detach(), largest=float(wanted.detach().abs().max()))
        for name, found, wanted in zip(
            ("kl", "d_logprob", "d_importance_weight"), (got, *d), (want, *slopes), strict=True
        )
    )


def of_value_loss() -> str:
    v, o, r = (RNG.standard_normal((6, 37)).astype(np.float32) for _ in range(3))
    got = rk.value_loss_and_grad(v, o, r, clip=0.5)
    leaf = torch.from_numpy(v).double().requires_grad_()
    want = rk.value_loss_reference(leaf, o, r, clip=0.5, xp=TORCH)
    (d_value,) = torch.autograd.grad(want["loss"], leaf)
    want = {k: x.detach() if isinstance(x, torch.Tensor) else x for k, x in want.items()}
    scale = float(d_value.abs().sum() + want["loss"])
    found = (
        beyond("value_loss", "loss", got.loss, float(want["loss"]), scale=scale),
        beyond("value_loss", "metrics", got.metrics.asdict()["loss_sum"], float(want["loss_sum"])),
        beyond("value_loss", "d_value", got.d_value, d_value, largest=float(d_value.abs().max())),
    )
    return "; ".join(found)


def of_importance_weights() -> str:
    a, options = rollouts(6, 37), {"level": "sequence", "upper": 2.0, "rejection": {"token_k3": 0.05}}
    got: Any = rk.importance_weights(a["train"], a["rollout"], a["mask"], return_metrics=True, **options)
    want = rk.importance_weights_reference(a["train"], a["rollout"], a["mask"], **options)
    metrics = np.array(list(want["metrics"].values()))
    found = (
        beyond("importance_weights", "weights", got.weights, want["weights"], terms=37),
        beyond("importance_weights", "metrics", got.metrics.vector, metrics, terms=37, spread=1.0),
        beyond("importance_weights", "mask", got.mask, want["mask"]),
    )
    return "; ".join(found)


def of_scatter_rewards() -> str:
    a = reward_batches.batch(6, 37)
    got, want = reward_batches.run(a, "all")._asdict(), reward_batches.reference(a, "all")
    facts = {"rewards": {"largest": 8.0}, "combined": {"largest": 8.0}}
    return "; ".join(beyond("scatter_rewards", k, got[k], x, **facts.get(k, {})) for k, x in want.items())


def of_covariance_mask() -> str:
    a = policy_arrays(6, 37)
    operands = (a["logprob"], None, a["advantage"], a["mask"])
    want = rk.covariance_mask_reference(*operands, kind="kl", ratio=0.1)
    got = rk.covariance_mask(*operands, kind="kl", ratio=0.1)
    entropy, mask = operands[0], operands[-1]
    found = (
        beyond("covariance_mask", "selected", got, want["selected"]),
        beyond(
            "entropy_mask", "selected", rk.entropy_mask(-entropy, mask, top_quantile=0.2),
            rk.entropy_mask_reference(-entropy, mask, top_quantile=0.2),
        ),
    )  # fmt: skip
    return "; ".join(found)


def of_optimal_token_baseline() -> str:
    a = policy_arrays(6, 37)
    operands = (a["advantage"], a["logprob"], np.abs(a["selected"]), a["mask"])
    got = rk.optimal_token_baseline(*operands, group_size=3)
    want = rk.optimal_token_baseline_reference(*operands, group_size=3)
    facts = {"scale": want["scale"], "terms": 4}
    found = (
        beyond("optimal_token_baseline", "advantages", got.advantages, want["advantages"], **facts),
        beyond("optimal_token_baseline", "returns", got.returns, want["returns"], **facts),
    )
    return "; ".join(found)


def of_mismatch_metrics() -> str:
    a = rollouts(6, 37)
    want = rk.mismatch_metrics_reference(a["train"], a["rollout"], a["mask"])
    got = rk.mismatch_metrics(a["train"], a["rollout"], a["mask"])
    return beyond("mismatch_metrics", "metrics", got.vector, np.array(list(want.values())))


def of_preference_loss() -> str:
    arrays = [RNG.standard_normal(9).astype(np.float32) for _ in range(4)]
    leaf, *rest = (torch.from_numpy(a) for a in arrays)
    got = rk.preference_loss(leaf.requires_grad_(), *rest)
    want = rk.preference_loss_reference(*arrays)
    got.losses.sum().backward()
    z = 0.1 * (arrays[0].astype(np.float64) - arrays[1] - arrays[2] + arrays[3])
    want["d_policy"] = -0.1 / (1 + np.exp(z))
    rewards = want["chosen_rewards"], want["rejected_rewards"]
    means = want["losses"], *rewards, rewards[0] - rewards[1], rewards[0] > rewards[1]
    want["metrics"] = np.array([values.mean() for values in means])
    outputs = got._asdict() | {"d_policy": leaf.grad, "metrics": got.metrics.vector}
    return "; ".join(
        beyond("preference_loss", name, outputs[name], value, largest=np.abs(value).max())
        for name, value in want.items()
    )


def of_pack() -> str:
    x, lengths = RNG.standard_normal((3, 7)), np.array([7, 0, 4])
    leaf = torch.from_numpy(x).requires_grad_()
    got = rk.pack(leaf, lengths=torch.from_numpy(lengths), max_tokens=11)
    want = rk.pack_reference(x, lengths=lengths, max_tokens=11)
    back = rk.unpack(got.tensors, got.cu_seqlens, 7)
    padded = rk.unpack_reference(want["packed"], want["cu_seqlens"], 7)
    dy = RNG.standard_normal(11)
    (d_padded,) = torch.autograd.grad(got.tensors, leaf, torch.from_numpy(dy), retain_graph=True)
    (d_packed,) = torch.autograd.grad(back, got.tensors, torch.from_numpy(x))
    found = (
        beyond("pack", "packed", got.tensors, want["packed"]),
        beyond("pack", "d_padded", d_padded, rk.unpack_reference(dy, want["cu_seqlens"], 7)),
        beyond("unpack", "padded", back, padded),
        beyond("unpack", "d_packed", d_packed, want["packed"]),
    )
    return "; ".join(found)


def of_kv_cache_append() -> str:
    k, v = (RNG.standard_normal((5, 2, 8)).astype(np.float32) for _ in range(2))
    caches, slots = (np.zeros((3, 4, 2, 8), np.float32), np.ones((3, 4, 2, 8), np.float32)), np.array([7, -1, 0, 11, 2])
    want = rk.kv_cache_append_reference(k, v, *caches, slots)
    rk.kv_cache_append(k, v, *caches, slots)
    names = ("k_cache", "v_cache")
    found = (beyond("kv_cache_append", n, c, w) for n, c, w in zip(names, caches, want, strict=True))
    return "; ".join(found)


def of_shift_labels_packed() -> str:
    ids, cu = RNG.integers(1, 5, 12), np.array([0, 7, 12])
    spans, offsets = np.array([[1, 3]]), np.array([0, 1, 1])
    found = (
        beyond(
            "shift_labels_packed", "labels", rk.shift_labels_packed(ids, cu), rk.shift_labels_packed_reference(ids, cu)
        ),
        beyond(
            "loss_mask_from_spans", "mask", rk.loss_mask_from_spans(spans, offsets, cu, num_tokens=12),
            rk.loss_mask_from_spans_reference(spans, offsets, cu, num_tokens=12),
        ),
        beyond("tool_mask", "mask", rk.tool_mask(ids, [1], [2], cu), rk.tool_mask_reference(ids, [1], [2], cu)),
    )  # fmt: skip
    return "; ".join(found)


def of_random_bits() -> str:
    ids = RNG.integers(-9, 9, 5)
    return beyond("random_bits", "bits", rk.random_bits(7, ids, 3, 6), rk.random_bits_reference(7, ids, 3, 6))


def of_sample() -> str:
    x = RNG.standard_normal((5, 40)).astype(np.float32)
    keys: dict[str, Any] = {"seed": 7, "sample_id": np.arange(5), "position": 3, "top_k": 4, "exp": "portable"}
    got, again = rk.sample(x, return_logprob="both", n_logprobs=4, **keys), rk.sample(x, **keys)
    of_row = (np.arange(5), got.ids)
    kept = rk.sample_reference(x, top_k=4)
    cut, whole = kept.logprob[of_row], rk.sample_reference(x).logprob[of_row]
    best = kept.best(4)
    largest = np.abs(x).max(1)
    seen = {"presence_penalty": 0.5, "repetition_penalty": 1.2, "history": (RNG.integers(0, 40, 50), np.arange(6) * 10)}
    found = (
        beyond(
            "process_logits", "logits", rk.process_logits(x, **seen), rk.process_logits_reference(x, **seen),
            max_abs_z=largest[:, None] + 1,
        ),
        beyond("sample", "ids", got.ids, again.ids),
        beyond("sample", "logprob", got.logprob, cut, max_abs_z=largest),
        beyond("sample", "raw_logprob", got.raw_logprob, whole, max_abs_z=largest),
        beyond("sample", "top_ids", got.top_ids, best[0]),
        beyond("sample", "top_logprobs", got.top_logprobs, best[1], max_abs_z=largest[:, None]),
    )  # fmt: skip
    return "; ".join(found)


def of_linear_sample() -> str:
    hidden, weight = (RNG.standard_normal(shape).astype(np.float32) for shape in ((5, 24), (40, 24)))
    keys: dict[str, Any] = {"seed": 7, "sample_id": np.arange(5), "position": 3, "top_k": 4, "exp": "portable"}
    got = rk.linear_sample(hidden, weight, return_logprob="both", **keys)
    of_row, z = (np.arange(5), got.ids), rk.linear(hidden, weight)
    largest = np.abs(z).max(1)
    cut, whole = (rk.linear_sample_reference(hidden, weight, top_k=k).logprob[of_row] for k in (4, 0))
    found = (
        beyond("linear_sample", "ids", got.ids, rk.sample(z, **keys).ids),
        beyond("linear_sample", "logprob", got.logprob, cut, max_abs_z=largest),
        beyond("linear_sample", "raw_logprob", got.raw_logprob, whole, max_abs_z=largest),
    )
    return "; ".join(found)


# How the tests of each operator compare with float64. A new operator's tests/support/<op>_cases.py defines its own
# comparison as contract_failures, which takes a generator of numbers.
CHECKS: dict[str, Callable[[], str]] = {
    "attention": of_attention,
    "covariance_mask": of_covariance_mask,
    "gae": of_gae,
    "group_advantage": of_group_advantage,
    "importance_weights": of_importance_weights,
    "kl": of_kl,
    "kv_cache_append": of_kv_cache_append,
    "linear": of_linear,
    "linear_logprob": of_linear_logprob,
    "linear_sample": of_linear_sample,
    "logprob": of_logprob,
    "masked_whiten": of_masked_whiten,
    "mismatch_metrics": of_mismatch_metrics,
    "optimal_token_baseline": of_optimal_token_baseline,
    "pack": of_pack,
    "policy_loss": of_policy_loss,
    "preference_loss": of_preference_loss,
    "random_bits": of_random_bits,
    "sample": of_sample,
    "scatter_rewards": of_scatter_rewards,
    "sequence_logprob": of_sequence_logprob,
    "shift_labels_packed": of_shift_labels_packed,
    "value_loss": of_value_loss,
}


def checked(stem: str) -> str:
    """Returns the names of outputs that lie beyond their bounds, or nothing."""
    own = (ROOT / "tests" / "support" / f"{stem}_cases.py").is_file() and importlib.import_module(f"{stem}_cases")
    if hasattr(own, "contract_failures"):
        assert stem not in CHECKS, f"{stem} is checked in two places"
        return str(own.contract_failures(RNG))
    assert stem in CHECKS, f"{stem}_cases.py lacks contract_failures: how the tests of {stem} compare with float64"
    return CHECKS[stem]()


@pytest.mark.parametrize("stem", STEMS)
def test_every_output_is_checked_through_the_table(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bound at a time is replaced by a bound that nothing meets; the operator's own test must then fail. A test may
    ask for rows by name, to compare a further property. Such rows are found in its source."""
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "tests/ops").glob(f"test_{stem}*.py")))
    right, broken = Row.allowed, [("", "")]

    def allowed(self: Row, *arguments: Any, **facts: Any) -> Any:
        found = right(self, *arguments, **facts)
        return found * 0 - 1 if (self.operator, self.output) == broken[0] else found

    monkeypatch.setattr(Row, "allowed", allowed)
    assert not re.search(r"off by|truth|wrong", checked(stem)), "fails as it is"
    for found in (r for r in ROWS if r.stem == stem):
        broken[0] = (found.operator, found.output)
        if not re.search(rf"(^|[;\s]){found.output}(\[|:)", checked(stem)):
            asked = re.search(rf'row\((\w+|"{found.operator}"),\s*"{re.escape(found.output)}"\)', sources)
            assert asked, f"no test compares {found.name} with its bound"


@pytest.mark.parametrize("operator", library_cases.SELF_TESTS)
def test_the_doctor_goes_by_the_table(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no error is allowed, a mere rounding to the dtype fails."""
    monkeypatch.setattr(Row, "allowed", lambda self, *a, expected=0.0, **facts: np.abs(expected) * 0 + 1e-300)
    checks = {check.check: check for check in library_cases.SELF_TESTS[operator](None, "cpu", None)}
    if "against float64" not in checks:  # an exact operator is compared with its definition instead
        assert {r.bound.text for r in ROWS if r.stem == operator} == {"0"}
        return
    assert checks["against float64"].passed is False


# Number of comparisons with float64 that a test file may bound by its own numbers, and the reason.
OWN_NUMBERS = {
    "test_attention.py": 6,  # torch's own float32 results, not float64
    "test_attention_partials.py": 8,  # l and O of a split; two float64 implementations, twice; the approximate merge
    "test_attention_torch.py": 2,  # finite differences: steps and curvature
    "test_gae.py": 5,  # two float64 implementations of the reference, three times; advantages of gae and of vtrace
    "test_group_advantage.py": 3,  # another order of sums; two float64 implementations of AReaL's baseline
    "test_kl.py": 1,  # float32 sums of gradients over a vocabulary, besides float64
    "test_linear_logprob_loss.py": 1,  # two float64 implementations of the reference
    "test_logprob.py": 1,  # two float64 implementations of the reference
    "test_logprob_backward.py": 1,  # finite differences: steps and curvature
    "test_policy_loss.py": 1,  # compares splits of a batch within the bound of rule 10
    "framework_losses.py": 3,  # the frameworks' own float32 results, not float64
    "test_preference_loss.py": 5,  # finite differences; TRL's own float32 loss of a batch
    "test_value_loss.py": 1,  # compares splits of a batch within the bound of rule 10
    "test_linear_engine.py": 2,  # two ways in torch to compute a Hessian of the same operator
    "test_rms_norm_engine.py": 2,  # likewise
    "test_sample.py": 1,  # the margin within which rounding of float64 sums may change the kept set
}


def test_no_test_of_an_operator_has_a_tolerance_of_its_own() -> None:
    number = re.compile(r"(<=?[^#\n]*(\d[eE]-\d+|\b2(\.0)?\s?\*\*\s?-)|\b[ar]tol=\d*\.?\d*[eE]-\d)")
    files = [
        path
        for stem in STEMS
        for pattern in (f"test_{stem}*.py", f"{stem}_cases.py")
        for path in sorted((ROOT / "tests").rglob(pattern))
    ]
    others = ("cases.py", "framework_losses.py", "test_fuzz.py", "test_frameworks.py", "test_torch.py")
    files += [path for name in others for path in (ROOT / "tests").rglob(name)]
    found = {path.name: len(number.findall(path.read_text())) for path in files}
    assert {name: count for name, count in found.items() if count} == OWN_NUMBERS
    for path in SELF_TESTS:
        assert not number.findall(path.read_text()), path.name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", silu_mul_cases.ACTIVATIONS)
def test_all_gates_of_16_bits_lie_within_the_bounds(activation: str, dtype: str) -> None:
    """The bound of the slope is the doctor's bound. An earlier bound was wider by one float32 rounding."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(getattr(torch, dtype))
    gate = bits[torch.isfinite(bits)]
    gate = gate[gate.double().abs() < 10_000][None].expand(2, -1)  # so that products stay finite
    up, dy = (torch.from_numpy(RNG.standard_normal(gate.shape)).to(gate.dtype) for _ in range(2))
    for kind in (gate.dtype, torch.float32):
        o = silu_mul_cases.Operands(gate.to(kind).contiguous(), up.to(kind), dy.to(kind))
        for rounds in (False, True):
            got = silu_mul_cases.results(o, activation, round_before_mul=rounds)
            assert not silu_mul_cases.failures(o, got, activation, rounds), (kind, rounds)


# ---- documents and the command --------------------------------------------------------------------------------------


def test_documents_state_the_numbers_of_the_table() -> None:
    """docs/numerics.md and README.md say the bounds of a log-probability and of entropy in figures."""
    number = r"(\d+e-\d+) \+ (\d+e-\d+) ?\*? ?max\|z\|"
    for page, outputs in (("docs/numerics.md", ("logprob", "entropy")), ("README.md", ("logprob",))):
        text = (ROOT / page).read_text()
        found = re.findall(number, text)
        assert len(found) == len(outputs), page
        for (constant, slope), output in zip(found, outputs, strict=True):
            bound = row("logprob", output)
            assert bound.allowed(max_abs_z=0.0) == float(constant)
            assert bound.allowed(max_abs_z=1.0) - float(constant) == pytest.approx(float(slope))
    equal = (ROOT / "docs" / "numerics.md").read_text().partition('## What "equal" means')[2]
    assert "contract.py" in equal
    assert "rlk contract" in equal


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from rl_kernel_native.consistency.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_prints_the_table() -> None:
    pytest.importorskip("rich")
    pytest.importorskip("typer")
    done = run("contract")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    for operator in contract.operators():
        assert re.search(rf"(?m)^{operator} *$", done.stdout), operator
    one = run("contract", "--operator", "rope").stdout
    assert "rope" in one
    assert "logits" not in one
    table = json.loads(run("contract", "--json").stdout)
    assert {(r["operator"], r["output"]) for r in table["rows"]} == names(ROWS)
    done = run("contract", "--operator", "softmax")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --operator softmax: want one of attention, ")


@pytest.mark.parametrize("arguments", [("--json",), ("--operator", "rope")], ids=["long", "short"])
def test_a_reader_that_has_enough_gets_no_traceback(arguments: tuple[str, ...]) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("typer")
    command = [sys.executable, "-c", "from rl_kernel_native.consistency.main import main; main()", "contract"]
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as closed:
        done = subprocess.run([*command, *arguments], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize("dtype", ROUNDING)
def test_roundings_are_those_of_the_dtype(dtype: str) -> None:
    """At each number and next to it, torch rounds as the table says."""
    of, to = ROUNDING[dtype], getattr(torch, dtype)
    info = torch.finfo(to)

    def rounded(x: float) -> float:
        return torch.tensor(x, dtype=torch.float64).to(to).item()

    assert of.relative == info.eps / 2
    assert rounded(1 + of.relative) == 1, "a tie goes to the even one"
    assert rounded(1 + of.relative * 1.25) == 1 + info.eps
    assert rounded(of.least) == 0
    assert rounded(of.least * 1.25) == 2 * of.least == info.smallest_normal * info.eps
    assert rounded(of.limit) == np.inf
    assert rounded((of.limit + info.max) / 2) == info.max
