"""sample_partial and sample_merge: sample's bytes on whole rows, for any split into parts; calls that shards refuse."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from cases import part_cut
from rl_kernel_native.ops.sample import SampleStatus
from test_sample import KEYS, logits_of, rows_of, same

# Parts of each shard: 1, 2, 3 and 8 shards, and a split into shards of every size.
SPLITS = {"1": [8], "2": [4, 4], "3": [4, 2, 2], "4": [2] * 4, "uneven": [1, 1, 2, 4], "8": [1] * 8}
OF_MERGE = ("return_kept", "kept_capacity")
OF_PARTIAL = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "history", "logit_bias", "max_top_k",
)  # fmt: skip
NAMES = ("ids", "logprob", "raw_logprob", "kept_offsets", "status")


def edges_of(split: list[int], vocab: int) -> list[int]:
    return [part_cut(vocab, i) for i in (0, *itertools.accumulate(split))]


@pytest.mark.parametrize("call", [rk.sample_partial, rk.sample_merge])
def test_an_order_is_named(call: Any) -> None:
    given: dict[str, Any] = {"vocab_size": 8, "seed": 1, "sample_id": 1, "position": 1}
    if call is rk.sample_partial:
        given["vocab_start"] = 0
    with pytest.raises(ValueError, match=r"^order: expected .*, got 'xyz'$"):
        call(torch.zeros(1, 1, 30) if call is rk.sample_merge else torch.zeros(1, 8), order="xyz", **given)


def payloads_of(x: torch.Tensor, split: list[int], **given: Any) -> torch.Tensor:
    vocab = x.shape[1]
    how = {name: v for name, v in given.items() if name not in OF_MERGE}
    return torch.stack([
        rk.sample_partial(x[:, a:b], vocab_start=a, vocab_size=vocab, **how)
        for a, b in itertools.pairwise(edges_of(split, vocab))
    ])  # fmt: skip


def merged(x: torch.Tensor, split: list[int], payloads: torch.Tensor | None = None, **given: Any) -> Any:
    if payloads is None:
        payloads = payloads_of(x, split, **given)
    how = {name: v for name, v in given.items() if name not in OF_PARTIAL}
    return rk.sample_merge(payloads, vocab_size=x.shape[1], **how)


def asked(x: torch.Tensor, **given: Any) -> dict[str, Any]:
    keys = KEYS | {"sample_id": torch.arange(x.shape[0], device=x.device)} | given
    return {"return_kept": True, "return_logprob": "both", "exp": "portable"} | keys


def assert_same(got: Any, want: Any) -> None:
    for name in NAMES:
        if getattr(want, name) is not None:
            assert same(getattr(got, name), getattr(want, name)), name
    if want.kept_offsets is not None:
        assert rows_of(got) == rows_of(want)


def mixed(rng: np.random.Generator, rows: int, device: str) -> dict[str, torch.Tensor]:
    """Parameters that differ in every row and need one exchange."""
    top_k = rng.choice([0, 1, 7, 20, 50], rows)
    of_cut = top_k > 0
    choose = {
        "temperature": rng.choice([0.6, 1.0, 1.7], rows).astype(np.float32),
        "top_k": top_k,
        "top_p": np.where(of_cut, rng.choice([0.5, 0.9, 1.0], rows), 1.0).astype(np.float32),
        "min_p": np.where(of_cut, rng.choice([0.0, 0.05, 0.3], rows), 0.0).astype(np.float32),
        "greedy": rng.random(rows) < 0.2,
        "sample_id": rng.integers(0, 1 << 40, rows),
        "position": rng.integers(0, 1 << 20, rows),
    }
    return {name: torch.from_numpy(x).to(device) for name, x in choose.items()}


def more_of(rng: np.random.Generator, rows: int, vocab: int, device: str) -> list[dict[str, Any]]:
    """Masks, a padded vocabulary, penalties and bias."""
    words = rng.integers(-(1 << 31), 1 << 31, (rows, (vocab + 31) // 32)).astype(np.int32)
    words[0] = 0  # no column is allowed
    words[1:, -1] = -1
    put = lambda a: torch.from_numpy(a).to(device)  # noqa: E731
    edited: dict[str, Any] = {
        "history": (
            put(rng.integers(0, vocab, 30 * rows)), put(np.arange(rows + 1) * 30), put(rng.random(30 * rows) < 0.3)
        ),
        "logit_bias": (
            put(np.tile([0, vocab - 1], rows) if vocab > 1 else np.zeros(rows, np.int64)),
            put(rng.standard_normal((1 + (vocab > 1)) * rows).astype(np.float32)),
            put(np.arange(rows + 1) * (1 + (vocab > 1))),
        ),
        "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25,
    }  # fmt: skip
    return [{}, {"allowed": put(words)}, {"valid_vocab": 1 + vocab * 2 // 3}, edited | {"allowed": put(words)}]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_have_the_bytes_of_the_whole_row(
    split: str, dtype: torch.dtype, device: str, rng: np.random.Generator
) -> None:
    """Vocabularies: one column; a size with empty parts; a size not divisible by 64; a model's size. bf16 gives ties at
    shard borders."""
    for rows, vocab in ((9, 1), (9, 20), (24, 130), (24, 2100), (5, 32000)):
        x = logits_of(rng, rows, vocab).to(dtype).to(device)
        for more in more_of(rng, rows, vocab, device):
            given = mixed(rng, rows, device)
            for order in ("vllm", "hf"):
                how = asked(x, **given, **more, order=order)
                assert_same(merged(x, SPLITS[split], **how), rk.sample(x, **how))


def test_the_first_ranks_of_a_wide_payload(device: str, rng: np.random.Generator) -> None:
    """256 candidates of each of 8 shards fill the list of the merge. A top_k of at least the vocabulary cuts
    nothing."""
    x = logits_of(rng, 4, 5000, 1.0).to(device)
    for given in (
        {"top_k": 256}, {"top_k": 256, "top_p": 0.9}, {"top_k": 256, "min_p": 0.2, "top_p": 0.7, "order": "hf"},
        {"top_k": 3, "max_top_k": 256}, {"top_k": torch.tensor([64, 0, 1, 200], device=device), "max_top_k": 200},
        {"top_k": 256, "min_p": 0.1, "order": "sglang"},
    ):  # fmt: skip
        how = asked(x, **given)
        want = rk.sample(x, **{name: v for name, v in how.items() if name != "max_top_k"})
        for split in SPLITS.values():
            assert_same(merged(x, split, **how), want)
    x = x[:, :200].contiguous()
    assert_same(merged(x, [1] * 8, **asked(x, top_k=256)), rk.sample(x, **asked(x, top_k=256)))


def test_ties_at_the_borders_of_shards(device: str) -> None:
    x = torch.zeros(3, 130, device=device)
    x[1, ::2] = -0.0  # zeros of both signs are equal
    x[2, 60:80] = 1.0  # parts end at 64 and 80
    for top_k in (1, 17, 63, 64, 65, 70, 129):
        how = asked(x, top_k=top_k)
        want = rk.sample(x, **how)
        assert rows_of(want)[0] == list(range(top_k))
        for split in SPLITS.values():
            assert_same(merged(x, split, **how), want)
    for split in SPLITS.values():
        assert merged(x, split, **asked(x, greedy=True)).ids.tolist() == [0, 0, 60]


def test_infinite_columns_and_nan(device: str, rng: np.random.Generator) -> None:
    """A column of -Inf is kept by rank if top_k reaches it. NaN and +Inf have sample's status, in one shard or in
    several."""
    x = logits_of(rng, 12, 700).to(device)
    x[1, 650], x[2, 3], x[3, 3], x[3, 650] = float("nan"), float("inf"), float("inf"), float("nan")
    x[4] = float("-inf")
    x[5, 20:] = float("-inf")
    x[6, :600] = float("-inf")
    x[7, :690] = float("-inf")
    x[8] = -3e38
    temperature = torch.ones(12, device=device)
    temperature[8], temperature[9], temperature[10] = 1e-30, 1e-36, float("nan")
    allowed = torch.full((12, 22), -1, dtype=torch.int32, device=device)
    allowed[2, 0] = ~(1 << 3)  # only the raw distribution contains the infinity
    for given in ({}, {"top_k": 40}, {"top_k": 40, "top_p": 0.9}, {"top_k": 40, "min_p": 0.01}, {"greedy": True}):
        for more in ({}, {"allowed": allowed}, {"valid_vocab": 640}):
            how = asked(x, temperature=temperature, **given, **more)
            want = rk.sample(x, **how)
            assert (want.status != 0).sum() >= 3
            for split in SPLITS.values():
                assert_same(merged(x, split, **how), want)


def test_bad_parameters_have_the_status_of_sample(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 8, 300).to(device)
    ids, offsets = torch.zeros(8, dtype=torch.int64), torch.arange(9)
    ids[1] = 300
    given = {
        "top_k": torch.tensor([5, 5, -1, 5, 5, 5, 5, 5]), "top_p": torch.tensor([0.9, 0.9, 0.9, 2, 0.9, 0.9, 0.9, 0.9]),
        "min_p": torch.tensor([0.0, 0, 0, 0, -1, 0, 0, 0]), "position": torch.tensor([0, 0, 0, 0, 0, -1, 0, 0]),
        "repetition_penalty": torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 1]), "history": (ids.to(device), offsets.to(device)),
    }  # fmt: skip
    put = {name: v if isinstance(v, tuple) else v.to(device) for name, v in given.items()}
    how = asked(x, **put)
    want = rk.sample(x, **how)
    s = SampleStatus
    bad = [s.BAD_HISTORY, *[s.BAD_PARAMETER] * 3, s.BAD_POSITION, s.BAD_PENALTY]
    assert want.status.tolist() == [0, *bad, 0]
    for split in SPLITS.values():
        assert_same(merged(x, split, **how), want)


def test_rows_that_one_exchange_does_not_serve(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 6, 300).to(device)
    put = lambda *values: torch.tensor(values, device=device)  # noqa: E731
    given = {
        "top_k": put(0, 0, 65, 5, 0, 0), "top_p": put(0.9, 1.0, 1.0, 0.9, 1.0, 0.9), "min_p": put(0.0, 0.1, 0, 0, 0, 0),
        "greedy": put(False, False, False, False, False, True),
    }  # fmt: skip
    how = asked(x, **given)
    bad = SampleStatus.BAD_PARAMETER
    for order, third in (("vllm", 0), ("sglang", bad)):
        got = merged(x, SPLITS["3"], **how, order=order)
        assert got.status.tolist() == [bad, bad, bad, third, 0, 0]
        assert got.ids[:3].tolist() == [-1] * 3
        want = rk.sample(x, **how, order=order)
        for name in ("ids", "logprob", "raw_logprob"):
            assert same(getattr(got, name)[4:], getattr(want, name)[4:])


def test_shards_come_in_any_order_and_each_once(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 5, 700).to(device)
    for given in ({}, {"top_k": 20}, {"greedy": True}):
        how = asked(x, **given)
        want, parts = rk.sample(x, **how), payloads_of(x, SPLITS["uneven"], **how)
        assert_same(merged(x, [], parts.flip(0).contiguous(), **how), want)
        bad = SampleStatus.BAD_SHARDS
        for wrong in (parts[:3], parts[1:], torch.cat((parts, parts[:1])), torch.zeros_like(parts)):
            got = merged(x, [], wrong.contiguous(), **how)
            assert got.status.tolist() == [bad] * 5
            assert got.ids.tolist() == [-1] * 5
            assert got.logprob.isnan().all()
            assert rows_of(got) == [[]] * 5
        one = parts.clone()
        one[2, 3, 0] = 0
        assert merged(x, [], one, **how).status.tolist() == [0, 0, 0, bad, 0]


# For each argument of a call, one value and another value.
OTHER_VALUES: dict[str, tuple[Any, Any]] = {
    "seed": (7, 8), "seed's high half": (7, 7 + (1 << 32)), "the seed's sign": (7, 7 - (1 << 63)),
    "sample_id": (5, 6), "sample_id's high half": (5, 5 + (1 << 40)), "position": (3, 4), "stream": (2, 3),
    "temperature": (0.7, 0.7000001), "top_k": (20, 19), "top_p": (0.9, 1.0), "min_p": (0.1, 0.0),
    "greedy": (False, True), "valid_vocab": (700, 699), "order": ("vllm", "hf"),
    "return_logprob": ("both", "processed"),
}  # fmt: skip


@pytest.mark.parametrize("named", OTHER_VALUES)
@pytest.mark.parametrize("cut", [True, False])
def test_payloads_of_another_call_are_refused(named: str, cut: bool, device: str, rng: np.random.Generator) -> None:
    """The merge, or one shard, is called with another value than the payloads. Every row's status says so."""
    name = named.removeprefix("the ").partition("'")[0]
    mine, other = OTHER_VALUES[named]
    x = logits_of(rng, 2, 700).to(device)
    how = asked(x, top_k=20, top_p=0.8, min_p=0.05) if cut else asked(x)
    if not cut and name in ("top_p", "min_p"):
        pytest.skip("a row that is cut by mass has a top_k")
    how, others = how | {name: mine}, how | {name: other}
    parts, of_others = (payloads_of(x, SPLITS["3"], **call, max_top_k=20) for call in (how, others))
    assert_same(merged(x, [], parts, **how), rk.sample(x, **how))
    bad = [SampleStatus.BAD_SHARDS] * 2
    got = merged(x, [], parts, **others)
    assert got.status.tolist() == bad
    assert got.ids.tolist() == [-1] * 2
    for s in range(3):
        mixed_parts = parts.clone()
        mixed_parts[s] = of_others[s]
        assert merged(x, [], mixed_parts, **how).status.tolist() == bad
    if name in ("order", "valid_vocab", "return_logprob", "stream"):
        return
    dtype = {"temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32}.get(name)
    rows = torch.tensor([mine, other], dtype=dtype, device=device)
    assert merged(x, [], parts, **(how | {name: rows})).status.tolist() == [0, bad[0]]


def test_a_greedy_row_has_a_tag_of_its_keys_alone(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 2, 700).to(device)
    how = asked(x, greedy=True, position=3)
    parts = payloads_of(x, SPLITS["2"], **how)
    for other in ({"temperature": 0.5}, {"top_k": 3}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}):
        assert_same(merged(x, [], parts, **(how | other)), rk.sample(x, **how))
    far = torch.full((2,), 3 + (1 << 32), device=device)  # a greedy row may have any
    for other in ({"seed": 8}, {"sample_id": 9}, {"position": 4}, {"position": far}, {"stream": 1}):
        got = merged(x, [], parts, **(how | other))
        assert got.status.tolist() == [SampleStatus.BAD_SHARDS] * 2, other


def test_payloads_of_two_exponentials_are_refused(rng: np.random.Generator) -> None:
    x = logits_of(rng, 2, 700)
    with rk.arithmetic("sm_90"):
        parts = payloads_of(x, SPLITS["2"], **asked(x, exp="hardware"))
        assert merged(x, [], parts, **asked(x, exp="hardware")).status.tolist() == [0, 0]
        got = merged(x, [], parts, **asked(x))
    assert got.status.tolist() == [SampleStatus.BAD_SHARDS] * 2


def test_payloads_of_noise_stay_in_memory(device: str, rng: np.random.Generator) -> None:
    """The test replaces some words at random. Each row must then be good with an id of the vocabulary, or bad with the
    id -1."""
    x = logits_of(rng, 3, 700).to(device)
    seen = set()
    for given in ({}, {"top_k": 20, "top_p": 0.9}, {"greedy": True}):
        how = asked(x, **given)
        parts = payloads_of(x, SPLITS["3"], **how)
        for trial in range(200):
            noise = parts.cpu().numpy().copy()
            at = tuple(int(rng.integers(n)) for n in noise.shape)
            value = int(rng.choice([-1, 0, 1, 255, 700, 1 << 19, -(1 << 31), 0x7F800000, 0x7FC00000, 0x3F800000]))
            if trial % 4:
                at = (at[0], at[1], int(rng.integers(5, 22)) % noise.shape[2])
            noise[at] = value
            got = merged(x, [], torch.from_numpy(noise).to(device), **how)
            status, ids = got.status.cpu().numpy(), got.ids.cpu().numpy()
            assert ((ids >= -1) & (ids < 700)).all()
            assert ((ids == -1) == (status != 0)).all()
            seen |= set(status.tolist())
    assert SampleStatus.BAD_SHARDS in seen


def test_kept_sets_that_do_not_fit_and_results_not_asked_for(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 6, 400).to(device)
    how = asked(x, top_k=10, kept_capacity=25)
    want = rk.sample(x, **how)
    assert want.status.tolist()[2:] == [SampleStatus.KEPT_OVERFLOW] * 4
    assert_same(merged(x, SPLITS["3"], **how), want)
    for kind in ("none", "processed", "raw"):
        how = asked(x, top_k=10, return_logprob=kind, return_kept=False)
        got = merged(x, SPLITS["3"], **how)
        assert (got.logprob is None, got.raw_logprob is None) == (
            kind in ("none", "raw"),
            kind in ("none", "processed"),
        )
        assert got.kept is None
        assert_same(got, rk.sample(x, **how))
    less = payloads_of(x, SPLITS["3"], **asked(x))
    with_less = rk.sample_merge(less, vocab_size=400, **asked(x, return_logprob="raw"))
    assert same(with_less.raw_logprob, rk.sample(x, **asked(x)).raw_logprob)
    how = asked(x[:0])
    empty = merged(x[:0], SPLITS["3"], **how)
    assert empty.ids.shape == (0,)
    assert empty.kept_offsets.tolist() == [0]
    array = x.cpu().numpy()
    how = {"vocab_size": 400, "sample_id": np.arange(6), "exp": "portable", **KEYS}
    parts = [rk.sample_partial(array[:, a:b], vocab_start=a, **how) for a, b in ((0, 200), (200, 400))]
    assert rk.sample_merge(np.stack(parts), **how).ids.tolist() == rk.sample(x, **asked(x)).ids.tolist()


def test_a_padded_vocabulary_need_not_be_in_memory(device: str, rng: np.random.Generator) -> None:
    """The last shard holds only its valid columns, and a shard after them is empty."""
    x = logits_of(rng, 4, 512).to(device)
    for given in ({}, {"top_k": 12}, {"greedy": True}):
        how = asked(x, **given) | {"valid_vocab": 300}
        own = {name: v for name, v in how.items() if name not in OF_MERGE}
        edges = ((0, 256), (256, 300), (384, 384), (448, 512))
        parts = [rk.sample_partial(x[:, a:b], vocab_start=a, vocab_size=512, **own) for a, b in edges]
        assert_same(merged(x, [], torch.stack(parts), **how), rk.sample(x, **how))


def test_a_payload_has_its_bytes_in_any_batch(device: str, rng: np.random.Generator) -> None:
    x, given = logits_of(rng, 24, 2100).to(device), mixed(rng, 24, device)
    how = asked(x, **given)
    want = payloads_of(x, SPLITS["2"], **how)
    order = torch.from_numpy(rng.permutation(24)).to(device)
    got = payloads_of(x[order], SPLITS["2"], **(how | {name: v[order] for name, v in given.items()}))
    assert torch.equal(got, want[:, order])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str, device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 5, 128).to(device)
    given = mixed(rng, 5, device)
    torch.compiler.reset()

    def f(x: torch.Tensor, given: Any, position: int) -> Any:
        first = merged(x, SPLITS["2"], **asked(x, **given, kept_capacity=400))
        how = asked(x, top_k=3, position=position, return_kept=False, return_logprob="processed")
        second = merged(x, SPLITS["3"], **how)
        return *(getattr(first, name) for name in NAMES), second.ids, second.logprob

    for position in (0, 5):
        got = torch.compile(f, backend=backend, fullgraph=True)(x, given, position)
        assert all(same(a, b) for a, b in zip(got, f(x, given, position), strict=True))


def test_opcheck(device: str) -> None:
    rk._call.load()
    x, ids = torch.randn(4, 64, device=device), torch.arange(4, device=device)
    rows = (None, 7, ids, 0, None, 3, None, 1.0, None, 5, None, 0.9, None, 0.0, None, False, None)
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    ops = torch.ops.rl_kernel_native
    none = (None, None, None)
    own = (x, *rows, None, None, *none, 0, 128, None, 0, 0, 5, 0, True, 0, None, False)
    torch.library.opcheck(ops.sample_partial, own, test_utils=utils)
    payload = ops.sample_partial(*own)[0]
    torch.library.opcheck(ops.sample_merge, (payload[None], *rows, 128, None, 0, 0, 20, 0, 3, False), test_utils=utils)
    earlier: list[torch.Tensor] = []
    for k in range(1, 5):
        how = (*earlier, *none[k - 1 :], 0, 128, None, 0, 0, 0, 0, True, k, None, k == 4)
        of_round = (x, *rows, None, None, *how)
        torch.library.opcheck(ops.sample_partial, of_round, test_utils=utils)
        payload = ops.sample_partial(*of_round)[0]
        if k < 4:
            earlier.append(payload[None])
    torch.library.opcheck(ops.sample_merge, (payload[None], *rows, 128, None, 0, 0, -1, 0, 3, True), test_utils=utils)


def test_bad_input() -> None:
    x = torch.randn(3, 128)
    own: dict[str, Any] = {"sample_id": 0, "vocab_start": 0, "vocab_size": 128}
    for message, given in {
        "logits_shard: expected dtype float32, bfloat16 or float16, got int64": {"logits_shard": x.long()},
        r"logits_shard: expected shape \[num_rows, vocab_size\], got \[128\]": {"logits_shard": x[0]},
        r"vocab_size: expected an integer in \[1, 524288\], got 524289": {"vocab_size": (1 << 19) + 1},
        r"vocab_size: expected an integer in \[1, 524288\], got 0": {"vocab_size": 0, "logits_shard": x[:, :0]},
        r"vocab_start: expected 0 <= vocab_start and vocab_start \+ 128 \(columns of the shard\)": {"vocab_start": 1},
        "vocab_start: expected an integer, got str": {"vocab_start": "0"},
        r"whole parts of a vocabulary of 384 columns .* got \[0, 128\)$": {"vocab_size": 384},
        r"pad the vocabulary to a multiple of 64 columns \(192\)": {"vocab_size": 136},
        r"valid_vocab: expected an integer in \[1, 128\], got 129": {"valid_vocab": 129},
        r"top_k: expected an integer in \[0, 256\] with shards \(0 cuts nothing\), got 257": {"top_k": 257},
        r"max_top_k: expected an integer in \[0, 256\], got 257": {"max_top_k": 257},
        "max_top_k: expected at least top_k, which is 9, got 8": {"max_top_k": 8, "top_k": 9},
        "top_p: expected 1 without top_k, got 0.9: one exchange .*; pass top_k, at most 256, or": {"top_p": 0.9},
        "min_p: expected 0 without top_k, got 0.1: one exchange .*; pass top_k, at most 256, or": {"min_p": 0.1},
        'top_p: expected 1 with order="sglang", .* got 0.9': {"top_p": 0.9, "top_k": 5, "order": "sglang"},
        "temperature: expected a finite number > 0, got 0; for greedy rows pass greedy=True": {"temperature": 0},
        r"allowed: expected shape \[3, 4\] or wider, got \[3, 3\]": {"allowed": torch.zeros(3, 3, dtype=torch.int32)},
        'return_logprob: expected "processed", "raw", "both", "none", got \'all\'': {"return_logprob": "all"},
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            rk.sample_partial(**({"logits_shard": x} | KEYS | own | given))
    parts = rk.sample_partial(x, **KEYS, **own, top_k=5)[None]
    of_merge: dict[str, Any] = {"sample_id": 0, "vocab_size": 128, "top_k": 5}
    shape = r"payloads: expected a contiguous array of shape \[shards, num_rows, 16 \+ 3 \* max_top_k\], with 1 to 8"
    for message, given in {
        "payloads: expected dtype int32, got int64": {"payloads": parts.long()},
        shape: {"payloads": parts[0]},
        shape + r" shards .*, got shape \[9, 3, 31\]": {"payloads": parts.expand(9, 3, 31).contiguous()},
        shape + r" shards .*, got shape \[1, 3, 30\]": {"payloads": parts[..., :30].contiguous()},
        shape + r" shards .*, got shape \[0, 3, 31\]": {"payloads": parts[:0]},
        r"vocab_size: expected an integer in \[1, 524288\], got 0": {"vocab_size": 0},
        r"temperature: expected shape \[3\], got \[2\]": {"temperature": torch.ones(2)},
        "top_p: expected 1 without top_k, got 0.9": {"top_p": 0.9, "top_k": 0},
        "kept_capacity: expected None without return_kept, got 5": {"kept_capacity": 5},
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            rk.sample_merge(**({"payloads": parts} | KEYS | of_merge | given))


ROWS = ("seed", "sample_id", "position", "temperature", "top_k", "top_p", "min_p", "greedy")
OPERATORS = {
    "sample": lambda x, how: rk.sample(x, **how),
    "sample_partial": lambda x, how: rk.sample_partial(x, vocab_start=0, vocab_size=64, **how),
    "sample_merge": lambda x, how: rk.sample_merge(
        torch.zeros(1, 3, 16 + 3 * 64, dtype=torch.int32), vocab_size=64, **how
    ),
}


@pytest.mark.parametrize("argument", ROWS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_of_another_framework_are_arrays_and_no_bad_numbers(operator: str, argument: str) -> None:
    kinds = {"greedy": np.bool_, "temperature": np.float32, "top_p": np.float32, "min_p": np.float32}
    how = {"seed": 7, "sample_id": 0, "position": 0, "top_k": 5, argument: np.ones(3, kinds.get(argument, np.int64))}
    words = f"^{argument}: expected an array of the framework of the first argument, got ndarray; "
    words += rf"the first argument is an array of torch and {argument} one of numpy: convert one of them$"
    with pytest.raises(TypeError, match=words):
        OPERATORS[operator](torch.randn(3, 64), how)
