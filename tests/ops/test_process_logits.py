"""process_logits: the reference's numbers, sample's distribution to the bit, equal rows in any batch, bad entries."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from rl_kernel_native.ops.sample import SampleStatus
from test_sample import KEYS, draw, logits_of, mixed, rows_of, same


def csr(rng: np.random.Generator, rows: int, each: int) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(rng.integers(0, each, rows))]).astype(np.int64)


def edits(rng: np.random.Generator, rows: int, vocab: int, device: str = "cpu") -> dict[str, Any]:
    """Penalties, a history and a bias that differ between rows."""
    offsets, bounds = csr(rng, rows, 3 * vocab), csr(rng, rows, min(vocab, 30))
    few = [np.sort(rng.choice(vocab, n, replace=False)) for n in np.diff(bounds)]
    given = {
        "repetition_penalty": rng.choice([1.0, 1.3, 0.8], rows).astype(np.float32),
        "presence_penalty": rng.choice([0.0, 0.7, -0.4], rows).astype(np.float32),
        "frequency_penalty": rng.choice([0.0, 0.3, -0.1], rows).astype(np.float32),
        "history": (rng.integers(0, vocab, offsets[-1]), offsets, rng.random(offsets[-1]) < 0.4),
        "logit_bias": (
            np.concatenate(few).astype(np.int32),
            rng.choice([-3.0, 0.5, -np.inf], bounds[-1]).astype(np.float32),
            bounds,
        ),
    }

    def put(x: Any) -> Any:
        return tuple(map(put, x)) if isinstance(x, tuple) else torch.from_numpy(x).to(device)

    return {name: put(x) for name, x in given.items()}


def plain(given: dict[str, Any]) -> dict[str, Any]:
    return {n: tuple(x.cpu().numpy() for x in v) if isinstance(v, tuple) else v.cpu().numpy() for n, v in given.items()}


def taken(given: dict[str, Any], rows: Any) -> dict[str, Any]:
    """Selects the arguments of the given rows."""

    def of(csr: tuple[Any, ...], offsets: Any) -> tuple[Any, ...]:
        at = torch.cat([torch.arange(offsets[i], offsets[i + 1]) for i in rows]).to(offsets.device)
        counts = torch.tensor([0, *(offsets[i + 1] - offsets[i] for i in rows)])
        return (*(x[at] for x in csr), counts.cumsum(0).to(offsets.device))

    found = {n: v[rows] for n, v in given.items() if not isinstance(v, tuple)}
    ids, offsets, is_prompt = given["history"]
    ids, is_prompt, offsets = of((ids, is_prompt), offsets)
    return found | {
        "history": (ids, offsets, is_prompt),
        "logit_bias": of(given["logit_bias"][:2], given["logit_bias"][2]),
    }


@pytest.mark.parametrize("order", ["vllm", "hf", "sglang"])
def test_it_is_the_references(order: str, device: str, rng: np.random.Generator) -> None:
    for dtype, vocab in ((torch.float32, 1), (torch.float32, 300), (torch.bfloat16, 1000)):
        x = logits_of(rng, 9, vocab).to(dtype).to(device)
        given = edits(rng, 9, vocab, device)
        got = rk.process_logits(x, **given, order=order).cpu().double().numpy()
        want = rk.process_logits_reference(x.float().cpu().numpy(), **plain(given), order=order)
        assert (np.isinf(got) == np.isinf(want)).all()
        allowed = rk.contract.row("process_logits", "logits").allowed(
            max_abs_z=40.0
        )  # the frequency penalty then reaches 0.3 * 100
        finite = np.isfinite(want)
        assert np.abs(got[finite] - want[finite]).max(initial=0) <= allowed


@pytest.mark.parametrize("order", ["vllm", "sglang"])
def test_sample_draws_from_it(order: str, device: str, rng: np.random.Generator) -> None:
    """The trainer's equality: logprob of the processed logits over the kept set has the bits of sample's logprob."""
    for dtype, vocab in ((torch.float32, 1500), (torch.bfloat16, 1500), (torch.float32, 9000)):
        x = logits_of(rng, 24, vocab).to(dtype).to(device)
        given, penalties = mixed(rng, 24, device), edits(rng, 24, vocab, device)
        result = draw(x, **given, **penalties, order=order)
        assert (result.status == 0).all()
        z = rk.process_logits(x, **penalties, order=order)
        again = draw(z, **given, order=order)
        assert same(again.ids, result.ids)
        assert rows_of(again) == rows_of(result)
        temperature = torch.where(given["greedy"], torch.ones_like(given["temperature"]), given["temperature"])
        scored = rk.logprob(z, result.ids, temperature=temperature, kept=result.kept, exp="portable")
        assert same(scored, result.logprob)
        assert same(rk.logprob(x, result.ids, exp="portable"), result.raw_logprob)


def test_a_row_has_its_bytes_in_any_batch(device: str, rng: np.random.Generator) -> None:
    x, given = logits_of(rng, 12, 333).to(device), edits(rng, 12, 333, device)
    want = rk.process_logits(x, **given)
    for rows in ([3], list(rng.permutation(12))):
        assert same(rk.process_logits(x[rows], **taken(given, rows)), want[rows])
    ids, offsets, is_prompt = given["history"]
    backward = torch.cat([torch.arange(b - 1, a - 1, -1) for a, b in itertools.pairwise(offsets.tolist())])
    turned = given | {"history": (ids[backward].int(), offsets, is_prompt[backward])}
    assert same(rk.process_logits(x, **turned), want)
    assert same(torch.from_numpy(rk.process_logits(x.cpu().numpy(), **plain(given))), want)
    apart = torch.full((12, 700), float("nan"), device=device)
    apart[:, 1:334] = x
    assert same(rk.process_logits(apart[:, 1:334], **given), want)


def test_penalties_of_no_effect_change_no_bit(device: str, rng: np.random.Generator) -> None:
    x, given = logits_of(rng, 5, 80).to(device), edits(rng, 5, 80, device)
    for order in ("vllm", "sglang"):
        assert same(rk.process_logits(x, history=given["history"], order=order), x)
        assert same(draw(x, history=given["history"], order=order).logprob, draw(x, order=order).logprob)


def test_bad_rows_are_nan_and_touch_no_other(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 6, 50).to(device)
    offsets = torch.tensor([0, 2, 4, 6, 8, 10, 12], device=device)
    ids = torch.tensor([1, 2, 3, 50, 3, 4, 5, 6, 1, 2, 7, 7], device=device)
    bias_ids = torch.tensor([1, 2, 3, 4, 3, 4, 6, 6, 1, 2, 7, 8], device=device)
    penalty = torch.tensor([1.2, 1.2, 0.0, 1.2, 1.2, 1.2], device=device)
    given = {
        "repetition_penalty": penalty,
        "history": (ids, offsets),
        "logit_bias": (bias_ids, torch.ones(12, device=device), offsets),
    }
    z = rk.process_logits(x, **given)
    s = SampleStatus
    result = draw(x, **given)
    assert result.status.tolist() == [0, s.BAD_HISTORY, s.BAD_PENALTY, s.BAD_BIAS, 0, 0]
    assert result.ids.tolist()[1:4] == [-1] * 3
    assert z.isnan().all(1).tolist() == [False, True, True, True, False, False]
    good = rk.process_logits(x[4:], repetition_penalty=1.2, history=(ids[8:], offsets[:3]),
                             logit_bias=(bias_ids[8:], torch.ones(4, device=device), offsets[:3]))  # fmt: skip
    assert same(z[4:], good)
    beyond = torch.tensor([0, 2, 1, 99, 8, 10, 12], device=device)  # descends, then exceeds the entries
    bad = draw(x, history=(ids, beyond), presence_penalty=1.0).status.tolist()
    assert bad == [0, s.BAD_HISTORY, s.BAD_HISTORY, s.BAD_HISTORY, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["vllm", "hf", "sglang"])
@pytest.mark.parametrize(("vocab", "rows"), [(90, 8), (5000, 8), (128_256, 40), (300_000, 8)])
def test_edits_of_rows_that_a_list_cuts_have_the_bytes_of_the_cpu(
    order: str, vocab: int, rows: int, rng: np.random.Generator
) -> None:
    """Rows of one value and of few; histories that are empty, too long for a list, or of a row's largest columns."""
    x = logits_of(rng, rows, vocab)
    x[0], x[1] = 0.5, x[1].round()
    counts = rng.integers(0, 200, rows)
    counts[2], counts[3], counts[4] = 0, 3000, min(vocab, 500)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))
    ids = torch.from_numpy(rng.integers(0, vocab, int(offsets[-1])))
    ids[offsets[4] : offsets[5]] = x[4].topk(int(counts[4])).indices
    given = edits(rng, rows, min(vocab, 300)) | {"history": (ids, offsets, torch.rand(len(ids)) < 0.5)}
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, (rows, (vocab + 31) // 32)).astype(np.int32))

    def put(v: Any) -> Any:
        return tuple(map(put, v)) if isinstance(v, tuple) else v.cuda() if isinstance(v, torch.Tensor) else v

    for how in (
        {"top_k": 50},
        {"top_k": 7, "top_p": 0.9, "min_p": 0.02},
        {"top_k": 512, "valid_vocab": vocab - vocab // 9},
    ):
        for mask in ({}, {"allowed": words}):
            here = given | how | mask | {"order": order, "temperature": 0.8}
            want, got = draw(x, **here), draw(x.cuda(), **{n: put(v) for n, v in here.items()})
            assert all(same(getattr(got, n), getattr(want, n)) for n in ("ids", "logprob", "raw_logprob", "status"))
            assert rows_of(got) == rows_of(want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str, device: str, rng: np.random.Generator) -> None:
    x, given = logits_of(rng, 5, 90).to(device), edits(rng, 5, 90, device)
    torch.compiler.reset()

    def f(x: torch.Tensor, penalty: float) -> Any:
        found = draw(x, **(given | {"presence_penalty": penalty}), return_kept=False)
        return rk.process_logits(x, **given), found.ids, found.logprob, found.raw_logprob

    for penalty in (0.5, 0.75):
        got = torch.compile(f, backend=backend, fullgraph=True)(x, penalty)
        assert all(same(a, b) for a, b in zip(got, f(x, penalty), strict=True))


def test_bad_input() -> None:
    x, one, none = torch.randn(3, 40), torch.tensor([1]), torch.zeros(4, dtype=torch.int64)
    for message, given in {
        "logits: expected a tensor without gradient": {"logits": torch.randn(3, 4, requires_grad=True)},
        r"history: expected \(ids, offsets, is_prompt\) beside presence_penalty, got NoneType": {"presence_penalty": 1},
        r"repetition_penalty: expected a finite number > 0 \(1 changes nothing\), got 0": {"repetition_penalty": 0.0},
        "frequency_penalty: expected a finite number, got inf": {"frequency_penalty": float("inf")},
        "presence_penalty: expected a number or an array of them, got NoneType": {"presence_penalty": None},
        r"history: expected None or \(ids, offsets, is_prompt\), got Tensor": {"history": one},
        "history offsets: expected an array that speaks DLPack, got NoneType": {"history": (one, None)},
        r"history offsets: expected shape \[4\], got \[1\]": {"history": (one, one)},
        "history ids: expected dtype int32 or int64, got float32": {"history": (torch.ones(1), none)},
        r"history is_prompt: expected shape \[1\], got \[2\]": {"history": (one, none, torch.ones(2).bool())},
        "history is_prompt: expected dtype bool, got int64": {"history": (one, none, one)},
        r"logit_bias: expected None or \(ids, values, offsets\), got tuple": {"logit_bias": (one, none)},
        "logit_bias values: expected dtype float32, got int64": {"logit_bias": (one, one, none)},
        r"repetition_penalty: expected shape \[3\], got \[1\]": {
            "repetition_penalty": torch.ones(1), "history": (one, none)
        },
    }.items():  # fmt: skip
        logits = given.pop("logits", x)
        with pytest.raises((TypeError, ValueError), match=message):
            rk.process_logits(logits, **given)
        if not logits.requires_grad:
            biased = {"logit_bias": (one, torch.ones(1), none)} | given
            with pytest.raises((TypeError, ValueError), match=message):
                rk.sample(logits, sample_id=0, **KEYS, **biased)


@pytest.mark.gpu
def test_a_gpu_has_the_bytes_of_the_cpu(rng: np.random.Generator) -> None:
    for vocab in (1, 1000, 128_256):
        for order in ("vllm", "sglang"):
            x, given = logits_of(rng, 7, vocab), edits(rng, 7, min(vocab, 3000))
            there = {n: tuple(x.cuda() for x in v) if isinstance(v, tuple) else v.cuda() for n, v in given.items()}
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                want = rk.process_logits(x.to(dtype), **given, order=order)
                assert same(rk.process_logits(x.to(dtype).cuda(), **there, order=order), want)


def test_shards_are_columns_of_the_whole(device: str, rng: np.random.Generator) -> None:
    """Ids of other shards are checked and have no other effect."""
    x = torch.from_numpy(rng.standard_normal((4, 700)).astype(np.float32)).to(device)
    put = lambda a: torch.from_numpy(a).to(device)  # noqa: E731
    ids = rng.integers(0, 700, 400)
    ids[150] = 700  # a bad id of row 1, which is in no shard
    given: dict[str, Any] = {
        "history": (put(ids), put(np.arange(5) * 100), put(rng.random(400) < 0.3)),
        "logit_bias": (
            put(np.tile([3, 320, 699], 4)), put(rng.standard_normal(12).astype(np.float32)), put(np.arange(5) * 3)
        ),
        "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25,
    }  # fmt: skip
    for order in ("vllm", "sglang"):
        whole = rk.process_logits(x, **given, order=order)
        assert whole[1].isnan().all()
        for edges in ((0, 333, 700), (0, 0, 1, 699, 700)):
            cut = [
                rk.process_logits(x[:, a:b], **given, order=order, vocab_start=a, vocab_size=700)
                for a, b in itertools.pairwise(edges)
            ]
            assert torch.equal(torch.cat(cut, 1).view(torch.int32), whole.view(torch.int32))
    with pytest.raises(
        ValueError, match=r"vocab_start: expected 0 <= vocab_start and vocab_start \+ 700 .* got vocab_start 1"
    ):
        rk.process_logits(x, **given, vocab_start=1)
    with pytest.raises(ValueError, match=r"vocab_size: expected an integer in \[1, 524288\], got 0"):
        rk.process_logits(x[:, :0], **given, vocab_size=0)


def test_a_tangent_of_the_logits_is_refused() -> None:
    """As a gradient is; the tangent was lost."""
    z = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"^logits: expected a tensor without gradient"):
        torch.func.jvp(rk.process_logits, (z,), (z,))


@pytest.mark.parametrize(
    "name", ["repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias values"]
)  # fmt: skip
def test_a_penalty_refuses_a_gradient_as_logits_do(name: str, rng: np.random.Generator) -> None:
    """The gradient was lost."""
    logits, given = torch.randn(3, 9), edits(rng, 3, 9)
    argument, _, part = name.partition(" ")
    ids, values, offsets = given["logit_bias"]

    def call(x: Any) -> Any:
        return rk.process_logits(logits, **given | {argument: (ids, x, offsets) if part else x})

    x = values if part else given[argument]
    want = call(x)
    with torch.no_grad():
        assert same(call(x.clone().requires_grad_()), want)
    words = f"^{name}: requires a gradient, and process_logits gives none; call .detach\\(\\)"
    with pytest.raises(ValueError, match=words):
        call(x.clone().requires_grad_())
    with pytest.raises(ValueError, match=f"^{name}: has a tangent"):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))
