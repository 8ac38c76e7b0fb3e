"""sample: the reference's kept sets, logprob's bytes, equal rows in any batch, bad rows, draws."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from cases import mode, part_cut
from rl_kernel_native.ops.sample import SampleStatus

NAMES = ("ids", "logprob", "raw_logprob", "status")
KEYS: dict[str, Any] = {"seed": 11, "position": 3}


def logits_of(rng: np.random.Generator, rows: int, vocab: int, scale: float = 4.0) -> torch.Tensor:
    return torch.from_numpy((rng.standard_normal((rows, vocab)) * scale).astype(np.float32))


def draw(x: torch.Tensor, **given: Any) -> Any:
    keys = KEYS | {"sample_id": torch.arange(x.shape[0], device=x.device)} | given
    return rk.sample(x, **({"return_kept": True, "return_logprob": "both", "exp": "portable"} | keys))


def rows_of(result: Any) -> list[list[int]]:
    ids, offsets = result.kept_ids.tolist(), result.kept_offsets.tolist()
    return [ids[a:b] for a, b in itertools.pairwise(offsets)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    width = {4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.cpu().view(width), b.cpu().view(width))


def mixed(rng: np.random.Generator, rows: int, device: str) -> dict[str, torch.Tensor]:
    """Parameters that differ in every row."""
    choose = {
        "temperature": rng.choice([0.6, 1.0, 1.7], rows).astype(np.float32),
        "top_k": rng.choice([0, 1, 20, 50], rows),
        "top_p": rng.choice([0.5, 0.9, 0.95, 1.0], rows).astype(np.float32),
        "min_p": rng.choice([0.0, 0.0, 0.05, 0.3], rows).astype(np.float32),
        "greedy": rng.random(rows) < 0.1,
        "sample_id": rng.integers(0, 1 << 40, rows),
        "position": rng.integers(0, 1 << 20, rows),
    }
    return {name: torch.from_numpy(x).to(device) for name, x in choose.items()}


def failures(x: torch.Tensor, result: Any, **given: Any) -> str:
    """Differences from the float64 reference; rows whose cuts are within rounding are left out."""
    plain = {name: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for name, v in given.items()}
    want = rk.sample_reference(x.float().cpu().numpy(), **plain)
    ids, logprob = result.ids.tolist(), result.logprob.cpu().double().numpy()
    valid = given.get("valid_vocab") or x.shape[1]
    found, sets = [], rows_of(result)
    for i, kept in enumerate(want.kept):
        if want.margin[i] < 1e-4:  # 2^-18.4 for the exponential, plus float64's own sums, with some reserve
            continue
        if sets[i] != ([] if len(kept) == valid else kept.tolist()):
            found.append(f"row {i}: kept {len(sets[i])}, expected {len(kept)}")
        elif not np.isfinite(want.logprob[i, ids[i]]):
            found.append(f"row {i}: drew {ids[i]}, which is cut")
        else:
            bound = rk.contract.row("sample", "logprob").allowed(
                max_abs_z=np.abs(x[i].float().cpu().numpy()).max() / 0.6
            )
            if abs(logprob[i] - want.logprob[i, ids[i]]) > bound:
                found.append(f"row {i}: logprob {logprob[i]}, expected {want.logprob[i, ids[i]]}")
    return "; ".join(found)


@pytest.mark.parametrize("order", ["vllm", "hf", "sglang"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kept_sets_are_the_references(order: str, dtype: torch.dtype, device: str, rng: np.random.Generator) -> None:
    # a short vocabulary; a vocabulary long enough for every level; a model's vocabulary
    cases = ((64, 1000, 1.0), (24, 5000, 4.0), (8, 32000, 10.0))
    for rows, vocab, scale in cases:
        x = logits_of(rng, rows, vocab, scale).to(dtype).to(device)
        given = mixed(rng, rows, device)
        allowed = torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, (rows, (vocab + 31) // 32)).astype(np.int32))
        for more in ({}, {"allowed": allowed.to(device)}, {"valid_vocab": vocab - 77}):
            result = draw(x, **given, **more, order=order)
            assert (result.status == 0).all()
            known = {n: v for n, v in given.items() if n not in ("sample_id", "position")}
            assert not failures(x, result, **known, **more, order=order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logprob_is_that_of_logprob_with_the_kept_set(
    dtype: torch.dtype, device: str, rng: np.random.Generator
) -> None:
    for exp in ("portable", "hardware") if device != "cpu" else ("portable",):
        for rows, vocab in ((40, 1), (40, 129), (40, 3000), (6, 151_936)):
            x = logits_of(rng, rows, vocab).to(dtype).to(device)
            given = mixed(rng, rows, device)
            result = draw(x, **given, exp=exp)
            temperature = torch.where(given["greedy"], torch.ones_like(given["temperature"]), given["temperature"])
            again = rk.logprob(x, result.ids, temperature=temperature, kept=result.kept, exp=exp)
            assert same(again, result.logprob)
            assert same(rk.logprob(x, result.ids, exp=exp), result.raw_logprob)


def test_a_row_has_its_bytes_in_any_batch(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 48, 2100).to(device)
    x[5, 7] = float("nan")
    given = mixed(rng, 48, device)
    want = draw(x, **given)
    order = torch.from_numpy(rng.permutation(48)).to(device)
    got = draw(x[order], **{name: v[order] for name, v in given.items()})
    assert all(same(getattr(got, n), getattr(want, n)[order]) for n in NAMES)
    sets = rows_of(want)
    assert rows_of(got) == [sets[i] for i in order.tolist()]
    for i in range(0, 48, 7):
        alone = draw(x[i : i + 1], **{name: v[i : i + 1] for name, v in given.items()})
        assert all(same(getattr(alone, n), getattr(want, n)[i : i + 1]) for n in NAMES)
        assert rows_of(alone) == [sets[i]]
    apart = torch.full((48, 4205), float("nan"), device=device)
    apart[:, 1:2101] = x
    strided = draw(apart[:, 1:2101], **given)
    assert all(same(getattr(strided, n), getattr(want, n)) for n in NAMES)


def chi(counts: np.ndarray, p: np.ndarray) -> float:
    """Distance of chi-square from its expectation, in standard deviations."""
    assert (counts[p == 0] == 0).all()
    n, some = counts.sum(), p > 0
    degrees = int(some.sum()) - 1
    return abs(((counts - n * p)[some] ** 2 / (n * p[some])).sum() - degrees) / np.sqrt(2 * degrees)


DRAWS = 1 << 20  # per distribution; five deviations are rare, and the draws are the same in every run


def test_draws_follow_the_distribution(device: str) -> None:
    z = torch.tensor([0.0, 1.0, -1.0, 2.0, 2.0, -3.0, 0.5, 1.5, -2.0, 0.25] * 2 + [0.7])
    x, sample_id = z.to(device).expand(DRAWS, len(z)), torch.arange(DRAWS, device=device)
    for given in ({}, {"temperature": 2.0}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}):
        ids = rk.sample(x, seed=5, sample_id=sample_id, position=0, exp="portable", **given).ids
        p = np.exp(rk.sample_reference(z[None].numpy(), **given).logprob[0])
        assert chi(np.bincount(ids.cpu().numpy(), minlength=len(z)).astype(float), p) < 5, given


@pytest.mark.parametrize("vary", ["sample_id", "position", "seed"])
def test_draws_are_independent(vary: str, device: str) -> None:
    """Pairs of tokens whose keys are neighbours in one integer have the product of the two distributions."""
    z = torch.tensor([0.0, 1.0, -1.0, 2.0, 2.0, 0.5])
    p = np.exp(rk.sample_reference(z[None].numpy()).logprob[0])
    keys: dict[str, Any] = {"seed": 5, "sample_id": 9, "position": 0} | {vary: torch.arange(DRAWS, device=device)}
    ids = rk.sample(z.to(device).expand(DRAWS, len(z)), exp="portable", **keys).ids.cpu().numpy().reshape(-1, 2)
    pairs = np.bincount(ids[:, 0] * len(z) + ids[:, 1], minlength=len(z) ** 2).astype(float)
    assert chi(pairs, np.outer(p, p).reshape(-1)) < 5


def test_members_of_a_group_differ_and_a_replay_does_not(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 1, 500, 1.0).to(device).expand(64, 500)
    first, again = draw(x), draw(x)
    assert same(first.ids, again.ids)
    assert len(set(first.ids.tolist())) > 32
    assert not same(first.ids, draw(x, position=4).ids)
    assert not same(first.ids, draw(x, seed=12).ids)
    assert not same(first.ids, draw(x, stream=1).ids)


def test_equal_logits_are_kept_by_id(device: str) -> None:
    x = torch.zeros(2, 300, device=device)
    x[1, ::2] = -0.0  # zeros of both signs are equal
    x[:, 200] = 1.0
    assert rows_of(draw(x, top_k=4)) == [[0, 1, 2, 200]] * 2
    assert rows_of(draw(x, top_k=1)) == [[200]] * 2
    assert rows_of(draw(x, top_k=300)) == [[]] * 2
    assert draw(torch.zeros(1, 9, device=device), greedy=True).ids.tolist() == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cut_among_many_equal_logits_has_the_cpus_bytes(
    dtype: torch.dtype, exp: str, rng: np.random.Generator
) -> None:
    """Logits are multiples of ``step``, so in most rows 257 to 2,048 listed columns share the bin of the cut. A block
    then collects this bin in a second pass over its list, whose warps run at other speeds in every call.

    Calls of 64 rows list all columns that a row may keep. Calls of 12 rows, and flat rows, list only a bracket."""
    for rows, vocab, scale, step in ((64, 128_256, 4.0, 0.5), (64, 128_256, 4.0, 1.0), (12, 128_256, 4.0, 1.0),
                                     (64, 20_000, 1.0, 0.25)):  # fmt: skip
        x = (torch.round(logits_of(rng, rows, vocab, scale) / step) * step).to(dtype)
        given = {"top_p": torch.linspace(0.88, 0.98, rows), "sample_id": torch.arange(rows), "exp": exp}
        with mode("cpu", exp):
            want = draw(x, **given)
        on_gpu = {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in given.items()}
        z, kept = x.cuda(), int(want.kept_offsets[-1])
        for call in range(20):
            got = draw(z, **on_gpu)
            assert all(same(getattr(got, n), getattr(want, n)) for n in NAMES), (rows, vocab, step, call)
            assert torch.equal(got.kept_offsets.cpu(), want.kept_offsets), (rows, vocab, step, call)
            assert torch.equal(got.kept_ids[:kept].cpu(), want.kept_ids[:kept]), (rows, vocab, step, call)


def test_bad_rows_are_minus_one_and_touch_no_other(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 10, 700).to(device)
    good = draw(x)
    bad = x.clone()
    bad[1, 3], bad[2, 3] = float("nan"), float("inf")
    bad[3] = float("-inf")
    given = {
        "temperature": torch.ones(10), "top_k": torch.zeros(10, dtype=torch.int64), "top_p": torch.ones(10),
        "min_p": torch.zeros(10), "position": torch.full((10,), 3),
    }  # fmt: skip
    given["temperature"][4], given["top_k"][5], given["top_p"][6], given["min_p"][7] = 0.0, -1, float("nan"), 1.5
    given["position"][8] = -1
    got = draw(bad, **{name: v.to(device) for name, v in given.items()})
    s = SampleStatus
    want = [s.NAN_LOGIT, s.INF_LOGIT, s.EMPTY_ROW, s.BAD_TEMPERATURE, *[s.BAD_PARAMETER] * 3, s.BAD_POSITION]
    assert got.status.tolist() == [0, *want, 0]
    assert got.ids.tolist()[1:9] == [-1] * 8
    assert got.logprob[1:9].isnan().all()
    assert got.raw_logprob[1:9].isnan().all()
    for i in (0, 9):
        assert all(same(getattr(got, n)[i : i + 1], getattr(good, n)[i : i + 1]) for n in NAMES)
    nothing = torch.zeros(10, 22, dtype=torch.int32, device=device)
    assert draw(x, allowed=nothing).status.tolist() == [s.EMPTY_ROW] * 10
    assert draw(x, allowed=nothing, greedy=True).status.tolist() == [s.EMPTY_ROW] * 10


def test_what_is_forbidden_is_not_read(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 4, 256).to(device)
    allowed = torch.full((4, 8), 0x0F0F0F0F, dtype=torch.int32, device=device)
    want = draw(x, allowed=allowed, top_p=0.9, return_logprob="processed")
    x.view(4, 32, 8)[:, :, 4:] = float("nan")
    got = draw(x, allowed=allowed, top_p=0.9, return_logprob="processed")
    assert all(same(getattr(got, n), getattr(want, n)) for n in ("ids", "logprob", "status"))
    assert rows_of(got) == rows_of(want)


def test_kept_sets_that_do_not_fit(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 6, 400).to(device)
    whole = draw(x, top_k=10)
    cut = draw(x, top_k=10, kept_capacity=25)
    assert cut.kept_offsets.tolist() == [0, 10, 20, 20, 20, 20, 20]
    assert cut.status.tolist() == [0, 0, *[SampleStatus.KEPT_OVERFLOW] * 4]
    assert same(cut.ids, whole.ids)
    assert same(cut.logprob[:2], whole.logprob[:2])
    assert cut.logprob[2:].isnan().all()
    assert not cut.raw_logprob.isnan().any()
    assert rows_of(cut)[:2] == rows_of(whole)[:2]


def test_results_that_are_not_asked_for(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 3, 40).to(device)
    for kind, wants in {"none": (False, False), "processed": (True, False), "raw": (False, True)}.items():
        r = draw(x, return_logprob=kind, return_kept=False)
        assert (r.logprob is not None, r.raw_logprob is not None) == wants
        assert r.kept is None
        assert same(r.ids, draw(x).ids)
    without = draw(x, return_status=False)
    assert without.status is None
    assert same(without.logprob, draw(x).logprob)
    with pytest.raises(TypeError, match="return_status: expected a bool"):
        draw(x, return_status=1)
    empty = draw(x[:0])
    assert empty.ids.shape == (0,)
    assert empty.kept_offsets.tolist() == [0]
    array = rk.sample(x.cpu().numpy(), sample_id=np.arange(3), exp="portable", **KEYS)
    assert array.ids.tolist() == draw(x).ids.tolist()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str, device: str, rng: np.random.Generator) -> None:
    x, given = logits_of(rng, 5, 90).to(device), mixed(rng, 5, device)
    torch.compiler.reset()

    def f(x: torch.Tensor, given: Any, position: int) -> Any:
        first = draw(x, **given, kept_capacity=400, n_logprobs=7)
        second = draw(x, top_k=3, position=position, return_kept=False, return_logprob="processed", n_logprobs=2)
        return *first, second.ids, second.logprob, second.top_ids, second.top_logprobs

    for position in (0, 5):
        got = torch.compile(f, backend=backend, fullgraph=True)(x, given, position)
        want = f(x, given, position)
        ids = rk.SampleResult._fields.index("kept_ids")
        used = int(want[ids + 1][-1])
        assert torch.equal(got[ids][:used], want[ids][:used])
        assert all(same(a, b) for i, (a, b) in enumerate(zip(got, want, strict=True)) if i != ids)


def test_opcheck(device: str) -> None:
    rk._call.load()

    x, ids = torch.randn(4, 50, device=device), torch.arange(4, device=device)
    rows = (
        None,
        7,
        ids,
        0,
        None,
        3,
        None,
        1.0,
        None,
        0,
        torch.full((4,), 0.9, device=device),
        0.0,
        None,
        0.0,
        None,
        False,
    )
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        torch.ops.rl_kernel_native.sample,
        (x, *rows, None, None, 1.0, None, 0.0, None, 0.0, *(None,) * 6, 40, 0, 0, -1, 2, 0, 3),
        test_utils=utils,
    )


def test_bad_input() -> None:
    x = torch.randn(3, 40)
    ids = torch.arange(3)
    for message, given in {
        "logits: expected dtype float32, bfloat16 or float16, got int64": {"logits": torch.zeros(3, 4).long()},
        r"logits: expected shape \[num_rows, vocab_size\], got \[40\]": {"logits": x[0]},
        r"stream: expected an integer in \[0, 2\^24\), got -1": {"stream": -1},
        "logits: expected a contiguous last dimension": {"logits": torch.randn(40, 3).t()},
        "logits: expected 1 to 524288 columns, got 524289": {"logits": torch.zeros(1, (1 << 19) + 1), "sample_id": 0},
        "temperature: expected a finite number > 0, got 0; for greedy rows pass greedy=True": {"temperature": 0},
        "temperature: expected a finite number > 0, got -1.0": {"temperature": -1.0},
        r"temperature: expected shape \[3\], got \[2\]": {"temperature": torch.ones(2)},
        "temperature: expected dtype float32, got int64": {"temperature": ids},
        r"top_k: expected an integer >= 0 \(0 cuts nothing\), got -1": {"top_k": -1},
        "top_k: expected an integer, got float": {"top_k": 1.5},
        r"top_p: expected a number in \(0, 1\], got 0": {"top_p": 0.0},
        r"top_p: expected a number in \(0, 1\], got 1.1": {"top_p": 1.1},
        r"n_logprobs: expected an integer in \[0, 256\], got 257": {"n_logprobs": 257},
        r"n_logprobs: expected an integer in \[0, 256\], got -1": {"n_logprobs": -1},
        r"n_logprobs: expected an integer in \[0, 40\], got 41": {"n_logprobs": 41},
        r"n_logprobs: expected an integer in \[0, 9\], got 10": {"n_logprobs": 10, "valid_vocab": 9},
        "n_logprobs: expected an integer, got float": {"n_logprobs": 1.0},
        'n_logprobs: expected 0 with return_logprob="none", got 1': {"n_logprobs": 1, "return_logprob": "none"},
        "top_p: expected a number or an array of them, got NoneType": {"top_p": None},
        r"min_p: expected a number in \[0, 1\], got -0.1": {"min_p": -0.1},
        "greedy: expected a bool, got int": {"greedy": 1},
        "greedy: expected dtype bool, got int64": {"greedy": ids},
        r"allowed: expected shape \[3, 2\] or wider, got \[3, 1\]": {"allowed": torch.zeros(3, 1, dtype=torch.int32)},
        "allowed: expected dtype int32, got int64": {"allowed": torch.zeros(3, 2, dtype=torch.int64)},
        r"valid_vocab: expected an integer in \[1, 40\], got 41": {"valid_vocab": 41},
        'order: expected "vllm", "hf", "sglang", got \'trt\'': {"order": "trt"},
        "return_logprob: expected": {"return_logprob": True},
        "kept_capacity: expected None without return_kept": {"kept_capacity": 4, "return_kept": False},
        "kept_capacity: expected an integer >= 0, got -2": {"kept_capacity": -2},
        "sample_id: expected an integer or an array of them, got NoneType": {"sample_id": None},
    }.items():
        logits = given.pop("logits", x)
        with pytest.raises((TypeError, ValueError), match=message):
            draw(logits, **({"sample_id": ids} | given))


@pytest.mark.gpu
def test_a_gpu_has_the_bytes_of_the_cpu(rng: np.random.Generator) -> None:
    for vocab, rows in itertools.product((1, 130, 4099, 128_256), (33, 70)):  # few rows take clusters
        x, given = logits_of(rng, rows, vocab), mixed(rng, rows, "cpu")
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for order in ("vllm", "hf", "sglang"):
                want = draw(x.to(dtype), **given, order=order)
                got = draw(x.to(dtype).cuda(), **{n: v.cuda() for n, v in given.items()}, order=order)
                assert all(same(getattr(got, n), getattr(want, n)) for n in NAMES)
                assert rows_of(got) == rows_of(want)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [1, 50, 512, 513])
@pytest.mark.parametrize("vocab", [5, 600, 9000, 128_256])
def test_ties_that_fit_no_list_have_the_bytes_of_the_cpu(vocab: int, top_k: int, rng: np.random.Generator) -> None:
    """Rows of one value, of few values, and of a value that only one leaf has."""
    x = torch.zeros(3, vocab)
    x[1] = torch.from_numpy(rng.integers(0, 3, vocab).astype(np.float32))
    x[2, vocab // 2 : vocab // 2 + 100] = 1.0
    for how in (
        {"top_k": top_k},
        {"top_k": top_k, "top_p": 0.7, "min_p": 0.01},
        {"n_logprobs": min(top_k, 200, vocab)},
    ):
        for order in ("vllm", "hf", "sglang"):
            want, got = (draw(y, **how, order=order) for y in (x, x.cuda()))
            assert all(
                same(getattr(got, n), getattr(want, n))
                for n in (*NAMES, "top_ids", "top_logprobs")
                if getattr(want, n) is not None
            )
            assert rows_of(got) == rows_of(want)


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [1, 8])  # few rows take clusters
@pytest.mark.parametrize("vocab", [1000, 9000, 32_000, 128_256])
def test_top_p_alone_has_the_bytes_of_the_cpu(vocab: int, copies: int, rng: np.random.Generator) -> None:
    """A sample of the leaves' columns brackets the last kept column. Some rows fail its bracket: a flat row, rows of
    few values or one value, and a row that is low wherever the sample looks."""
    scales = torch.tensor([1e-6, 0.01, 0.5, 1.0, 2.4, 10.0, 1.0, 1.0, 1.0])[:, None]
    x = logits_of(rng, len(scales), vocab, 1.0) * scales
    x[6] = torch.from_numpy(rng.integers(0, 3, vocab).astype(np.float32))
    x[7] = 0.25
    for begin, end in itertools.pairwise(part_cut(vocab, i) for i in range(9)):
        for leaf, first in enumerate(range(begin, end, 128)):
            for run in (0, 64):
                at = first + run + 40 * leaf % 64
                x[8, min(at, end) : min(at + 8, end)] = -3.0
    x = x.repeat(copies, 1)
    allowed = torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, (len(x), (vocab + 31) // 32)).astype(np.int32))
    for how in ({}, {"min_p": 0.01}, {"allowed": allowed}, {"valid_vocab": vocab - 77}):
        for order, top_p in itertools.product(("vllm", "hf", "sglang"), (0.5, 0.95)):
            given = {**how, "order": order, "top_p": top_p}
            want = draw(x, **given)
            got = draw(x.cuda(), **{n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in given.items()})
            assert all(same(getattr(got, n), getattr(want, n)) for n in NAMES)
            assert rows_of(got) == rows_of(want)


@pytest.mark.gpu
def test_nothing_waits_for_the_host_and_a_graph_replays(rng: np.random.Generator) -> None:
    x, given = logits_of(rng, 8, 32000).cuda(), mixed(rng, 8, "cuda")
    want = draw(x, **given, kept_capacity=1 << 18)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        draw(x, **given, kept_capacity=1 << 18)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = draw(x, **given, kept_capacity=1 << 18)
    x.mul_(0.5)
    graph.replay()
    half = draw(x, **given, kept_capacity=1 << 18)
    assert same(got.ids, half.ids)
    assert not same(half.logprob, want.logprob)
