"""logprob, forward: values against float64, and the same bytes however a row is presented."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import ALL, DTYPES, Status, differing, mode, numpy_of, part_cut, raw, torch_logits, torch_targets, truth
from rl_kernel_native._native import module as native
from rl_kernel_native.contract import row

torch = pytest.importorskip("torch", reason="layouts are made with torch; test_frameworks.py has the others")

# One column; around a vec8; around a leaf. Further: a prime with eight uneven parts, and GPT-2. GPT-2's last leaf is
# short, and its parts are not 16-byte aligned.
VOCAB = [1, 7, 8, 9, 127, 128, 129, 4099, 50257]
FULL_VOCAB = [128256, 151936]  # Llama 3, Qwen3: wide enough for one row to occupy the whole GPU


def call(logits: Any, target: Any, exp: str, **options: Any) -> Any:
    with mode(logits.device.type, exp):
        return rk.logprob(logits, target, exp=exp, **{**ALL, **options})


def assert_same(a: Any, b: Any, what: str = "") -> None:
    found = differing(a, b)
    assert not found, f"{what}: {found}"


def problem(rng: np.random.Generator, shape: tuple[int, ...], device: str, dtype: str = "bfloat16") -> tuple[Any, Any]:
    return torch_logits(rng, shape, dtype).to(device), torch_targets(rng, shape[:-1], shape[-1]).to(device)


# ---- values ---------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.05},  # z up to 300, so the second term of the bound dominates
    "hot": {"temperature": 3.0},
    "scaled": {"logit_scale": 0.0625},  # Cohere
    "capped": {"softcap": 30.0},  # Gemma 2
    "everything": {"temperature": 0.7, "logit_scale": 1.7, "softcap": 20.0},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCAB)
def test_values_lie_within_the_bounds_of_float64(
    vocab: int, dtype: str, device: str, exp: str, rng: np.random.Generator
) -> None:
    rows = 33 if vocab < 10_000 else 5  # more than the CPU's tasks for two threads, and odd
    logits, target = problem(rng, (rows, vocab), device, dtype)
    for name, options in OPTIONS.items():
        found = truth(logits, target, **options).failures(call(logits, target, exp, **options))
        assert not found, f"{name}: {found}"


@pytest.mark.parametrize("vocab", FULL_VOCAB)
def test_full_vocabularies_lie_within_the_bounds(vocab: int, device: str, exp: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (2, vocab), device)
    assert not truth(logits, target).failures(call(logits, target, exp))


def test_each_rows_own_temperature(device: str, exp: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (3, 5, 1000), device)
    temperature = torch.from_numpy(rng.uniform(0.1, 2.0, (3, 5)).astype(np.float32)).to(device)
    result = call(logits, target, exp, temperature=temperature)
    assert not truth(logits, target, temperature=temperature).failures(result)
    one = call(logits[1, 2:3], target[1, 2:3], exp, temperature=float(temperature[1, 2]))
    assert_same(one, tuple(o[1, 2:3] for o in result), "a number and an array of the same temperature")


def test_order_is_scale_then_softcap_then_temperature(device: str, rng: np.random.Generator) -> None:
    """The six orders differ by far more than the bound, so only one can pass."""
    logits, target = problem(rng, (4, 257), device, "float32")
    options = {"logit_scale": 3.0, "softcap": 5.0, "temperature": 0.5}
    want = truth(logits, target, **options)
    assert not want.failures(call(logits, target, "portable", **options))
    wrong = truth(5.0 * torch.tanh(logits.double() * 3.0 / 0.5 / 5.0), target)
    assert np.abs(wrong.logprob - want.logprob).min() > 100 * want.bound.max()


def test_the_reference_path_agrees_with_the_tests_own_truth(rng: np.random.Generator) -> None:
    """Two float64 implementations of the same formulas; 1e-12 is their rounding at |z| < 100."""
    logits, target = problem(rng, (9, 301), "cpu", "float32")
    target[4] = -100
    kept = (torch.arange(12, dtype=torch.int32), torch.tensor([0, 3, 3, 12, *[12] * 6]))
    options = {"temperature": 0.5, "logit_scale": 1.5, "softcap": 9.0, "valid_vocab": 290}
    got = rk.logprob_reference(
        logits.numpy(), target.numpy().clip(-100, 289), kept=[k.numpy() for k in kept], **options
    )
    want = truth(logits, target.clamp(max=289), kept=kept, **options)
    for name in ("logprob", "lse", "entropy", "sum_p_sq"):
        np.testing.assert_allclose(got[name], getattr(want, name), rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("vocab", [1, 5, 129])
def test_post_conditions(vocab: int, device: str, exp: str, rng: np.random.Generator) -> None:
    """logprob <= 0, 0 <= entropy <= ln V, 1/V <= sum p^2 <= 1, with float32 roundings allowed at the upper ends."""
    logits, target = problem(rng, (2000, vocab), device, "float32")
    logits[0] = 3.0  # uniform, for the upper end of entropy
    result = call(logits, target, exp)
    assert bool((result.logprob <= 0).all())
    assert bool((result.entropy >= 0).all())
    # The upper end is reached if all logits are equal, here 3, so only the constant of the bound applies.
    assert float(result.entropy.max()) <= np.log(vocab) + row("logprob", "entropy").allowed(max_abs_z=3.0)
    allowed = row("logprob", "sum_p_sq").allowed(max_abs_z=3.0, sum_p_sq=1.0)
    assert float(result.sum_p_sq.max()) <= 1 + allowed
    assert float(result.sum_p_sq.min()) >= (1 - allowed) / vocab


# ---- the same bytes -------------------------------------------------------------------------------------------------


def test_any_batch_size_and_any_position_give_the_same_bytes(device: str, exp: str, rng: np.random.Generator) -> None:
    """1 to 129 rows: around every grid that kernels choose by the number of rows, up to one wave."""
    rows = 129
    logits, target = problem(rng, (rows, 1031), device)
    whole = call(logits, target, exp)
    for n in range(1, rows + 1):
        first = (37 * n) % (rows - n + 1)
        part = call(logits[first : first + n], target[first : first + n], exp)
        assert_same(part, tuple(o[first : first + n] for o in whole), f"{n} rows from {first}")


def test_one_row_alone_and_in_a_large_batch_at_a_full_vocabulary(
    device: str, exp: str, rng: np.random.Generator
) -> None:
    """One row is spread over the whole machine; many rows are not. 24 rows are whole rows for two threads."""
    logits, target = problem(rng, (24, 32003), device)
    whole = call(logits, target, exp)
    for i in (0, 11, 23):
        assert_same(call(logits[i : i + 1], target[i : i + 1], exp), tuple(o[i : i + 1] for o in whole), f"row {i}")


def test_neighbours_do_not_matter(device: str, exp: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (6, 700), device, "float32")
    before = call(logits, target, exp)
    others = logits.clone()
    others[::2] = torch.tensor([float("nan"), float("inf"), 1e30], device=device)[:, None]
    after = call(others, target, exp)
    assert_same(tuple(o[1::2] for o in after), tuple(o[1::2] for o in before))


@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_storage_gives_the_same_bytes(dtype: str, device: str, exp: str, rng: np.random.Generator) -> None:
    """Offsets of 1 to 15 elements give every misalignment of 16-byte vectors, for 2-byte and 4-byte elements."""
    vocab = 1000
    logits, target = problem(rng, (3, vocab), device, dtype)
    aligned = call(logits, target, exp)
    for offset in range(1, 16):
        for stride in (vocab, vocab + 1, vocab + 13):
            memory = torch.full((offset + 3 * stride,), float("nan"), dtype=logits.dtype, device=device)
            moved = memory.as_strided((3, vocab), (stride, 1), offset)
            moved.copy_(logits)
            assert_same(call(moved, target, exp), aligned, f"offset {offset}, row stride {stride}")


def test_misaligned_small_arguments_give_the_same_bytes(device: str, exp: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (5, 300), device)
    temperature = torch.rand(5, device=device) + 0.5
    kept = (torch.arange(9, dtype=torch.int32, device=device), torch.tensor([0, 3, 3, 9, 9, 9], device=device))
    aligned = call(logits, target, exp, temperature=temperature, kept=kept)

    def shifted(x: Any, offset: int) -> Any:
        memory = torch.zeros(len(x) + offset, dtype=x.dtype, device=device)
        memory[offset:] = x
        return memory[offset:]

    for offset in range(1, 16):
        moved = call(
            logits, shifted(target, offset), exp, temperature=shifted(temperature, offset),
            kept=tuple(shifted(k, offset) for k in kept), out=tuple(shifted(o, offset) for o in aligned),
        )  # fmt: skip
        assert_same(moved, aligned, f"offset {offset}")


LAYOUTS = {
    "sliced rows": lambda x: x[:, 1:4],
    "every second row": lambda x: x[:, ::2],
    "transposed rows": lambda x: x.transpose(0, 1),
    "one row for all": lambda x: x[:1, :1].expand(4, 6, -1),
    "one batch for all": lambda x: x[:1].expand(4, -1, -1),
    "a middle row": lambda x: x[:, 2],
    "no rows dimension": lambda x: x[2, 3],
    "sliced columns": lambda x: x[..., 5:77],
    "more dimensions": lambda x: x.reshape(2, 2, 2, 3, -1),
    "dimensions of size 1": lambda x: x[:, None, :1, None],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_gives_the_bytes_of_its_copy(layout: str, device: str, exp: str, rng: np.random.Generator) -> None:
    view = LAYOUTS[layout](torch_logits(rng, (4, 6, 101)).to(device))
    target = torch_targets(rng, tuple(view.shape[:-1]), view.shape[-1]).to(device)
    assert_same(call(view, target, exp), call(view.contiguous(), target.contiguous(), exp), layout)


@pytest.mark.parametrize("target_dtype", ["int32", "int64"])
def test_the_shifted_slices_of_a_padded_batch(
    target_dtype: str, device: str, exp: str, rng: np.random.Generator
) -> None:
    """logits[:, :-1] with ids[:, 1:], as every trainer calls it for the next token, without a copy."""
    logits = torch_logits(rng, (3, 8, 501), "bfloat16").to(device)
    ids = torch_targets(rng, (3, 8), 501, target_dtype).to(device)
    got = call(logits[:, :-1], ids[:, 1:], exp)
    want = call(logits[:, :-1].contiguous(), ids[:, 1:].contiguous().long(), exp)
    assert_same(got, want)
    assert not truth(logits[:, :-1], ids[:, 1:]).failures(got)


def test_targets_of_any_stride(device: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (4, 6, 50), device)
    want = call(logits, target, "portable")
    assert_same(call(logits, target.t().contiguous().t(), "portable"), want, "transposed")
    same = target[0, 0].expand(4, 6)
    assert_same(call(logits, same, "portable"), call(logits, same.contiguous(), "portable"), "expanded")


def test_a_column_stride_is_a_typed_error(device: str) -> None:
    logits = torch.zeros(6, 4, device=device).t()
    with pytest.raises(ValueError, match=r"logits: expected a contiguous last dimension \(stride 1\), got stride 4"):
        rk.logprob(logits, torch.zeros(4, dtype=torch.int64, device=device))


def test_three_incompatible_row_strides_are_a_typed_error(device: str) -> None:
    logits = torch.zeros(4, 6, 8, 5, device=device).permute(2, 0, 1, 3)[:, ::2, ::3]
    target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="logits: expected leading dimensions that collapse to at most two strides"):
        rk.logprob(logits, target)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab", [64, 1000, 32003, 128256])  # even parts; uneven parts; an uneven prime; Llama 3
def test_merged_shards_have_the_bytes_of_the_whole_row(
    vocab: int, shards: int, device: str, exp: str, rng: np.random.Generator
) -> None:
    rows = 7 if vocab < 100_000 else 2
    logits, target = problem(rng, (rows, vocab), device)
    target[0] = -100
    logits[1, vocab // 2] = float("nan") if rows > 2 else 1.0
    temperature = torch.rand(rows, device=device) + 0.5
    options = {"temperature": temperature, "softcap": 25.0, "valid_vocab": vocab - 3}
    edges = [part_cut(vocab, 8 * i // shards) for i in range(shards + 1)]
    with mode(device, exp):
        stats = [
            rk.logprob_partial(logits[:, a:b], target, vocab_start=a, vocab_size=vocab, exp=exp, **options)
            for a, b in itertools.pairwise(edges)
        ]
        merged = rk.logprob_merge(torch.stack(stats), temperature=temperature, **ALL)
    assert_same(merged, call(logits, target, exp, **options))


def test_tensor_parallel_shards_of_equal_width_are_whole_parts(device: str, rng: np.random.Generator) -> None:
    """With U % 64 = 0 the eight parts are the eight equal shards that every engine makes."""
    logits, target = problem(rng, (2, 3, 640), device)
    shards = logits.chunk(8, -1)
    stats = [
        rk.logprob_partial(s, target, vocab_start=80 * i, vocab_size=640, exp="portable") for i, s in enumerate(shards)
    ]
    assert_same(rk.logprob_merge(torch.stack(stats), **ALL), call(logits, target, "portable"))


@pytest.mark.parametrize("padded", [(1000, 1024), (1000, 1088), (1017, 1024)])
def test_engines_that_pad_differently_agree_on_canonical_vocab(
    padded: tuple[int, int], device: str, exp: str, rng: np.random.Generator
) -> None:
    """Two engines pad 1,000 real tokens to different widths; both pass the same canonical_vocab."""
    logits, target = problem(rng, (9, 1100), device)
    target %= 1000
    results = [call(logits[:, :width], target, exp, valid_vocab=1000, canonical_vocab=1088) for width in padded]
    assert_same(*results)
    assert not truth(logits[:, :1000], target).failures(results[0])


def test_logits_wider_than_the_canonical_vocabulary(device: str, exp: str, rng: np.random.Generator) -> None:
    """The call follows the advice of the error for a missing valid_vocab."""
    logits, target = problem(rng, (9, 1100), device)
    target %= 1000
    with pytest.raises(ValueError, match=r"canonical_vocab: expected at least the 1100 columns .* or give valid_vocab"):
        call(logits, target, exp, canonical_vocab=1088)
    options = {"valid_vocab": 1000, "canonical_vocab": 1088}
    want = call(logits[:, :1000], target, exp, **options)
    assert_same(call(logits, target, exp, **options), want)
    gradients = []
    with mode(device, exp):
        for x in (logits[:, :1000], logits):
            gradients.append(rk.logprob_backward(x, target, want.lse, dlogprob=want.lse, exp=exp, **options))
    assert_same(gradients[1][:, :1000], gradients[0])
    assert not bool(gradients[1][:, 1000:].any())


def test_a_last_shard_may_lack_the_padding_of_the_canonical_vocabulary(device: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (4, 1000), device)
    stats = [
        rk.logprob_partial(logits[:, a:b], target, vocab_start=a, vocab_size=1000, canonical_vocab=1024, exp="portable")
        for a, b in ((0, 512), (512, 1000))
    ]
    assert_same(rk.logprob_merge(torch.stack(stats), **ALL), call(logits, target, "portable", canonical_vocab=1024))


@pytest.mark.parametrize("exp", ["portable"])
def test_one_shard_of_a_much_wider_canonical_vocabulary(exp: str, device: str, rng: np.random.Generator) -> None:
    """[0, 24) ends at cut 3 of 74 columns, and holds every valid column: it is the whole row, not three parts."""
    logits, target = problem(rng, (4, 24), device)
    stats = rk.logprob_partial(logits, target, vocab_start=0, vocab_size=24, canonical_vocab=74, exp=exp)
    assert_same(rk.logprob_merge(stats[None], **ALL), call(logits, target, exp, canonical_vocab=74))


@pytest.mark.parametrize("canonical", [10_000, 700_000_000, 2**31 - 1])
@pytest.mark.parametrize("rows", [3, 600])
def test_a_canonical_vocabulary_far_beyond_the_columns(
    rows: int, canonical: int, device: str, rng: np.random.Generator
) -> None:
    logits, target = torch_logits(rng, (rows, 5000)), torch_targets(rng, (rows,), 5000)
    want = call(logits, target, "portable", canonical_vocab=canonical)
    got = call(logits.to(device), target.to(device), "portable", canonical_vocab=canonical)
    assert_same(want, got)


@pytest.mark.parametrize(("start", "width", "valid"), [(0, 8, 8), (64, 128, 64)])
def test_a_shard_without_columns_is_the_identity(start: int, width: int, valid: int, device: str) -> None:
    empty, target = torch.empty(3, 0, device=device), torch.tensor([1, 2, -100], device=device)
    stats = rk.logprob_partial(empty, target, vocab_start=start, vocab_size=width, valid_vocab=valid)
    assert torch.isneginf(stats[:, 0]).all()
    assert (stats[:, 1:4] == 0).all()


def test_the_canonical_vocabulary_decides_the_order_of_summation(rng: np.random.Generator) -> None:
    """If the canonical vocabulary had no effect, the tests above would still pass. Some of 500 rows differ when the
    parts move."""
    logits, target = problem(rng, (500, 1000), "cpu", "float32")
    assert differing(call(logits, target, "portable"), call(logits, target, "portable", canonical_vocab=1088))


def test_thread_counts_and_instruction_sets_give_the_same_bytes(
    exp: str, rng: np.random.Generator, native_settings: None
) -> None:
    from test_fuzz import ISAS

    threads = torch.get_num_threads()
    try:
        for shape in ((1, 50257), (3, 20011), (70, 129)):  # one row over all threads; a few rows; more rows than tasks
            logits, target = problem(rng, shape, "cpu")
            native.set_cpu_isa(ISAS[0])
            torch.set_num_threads(1)
            want = call(logits, target, exp)
            for isa in ISAS:
                for n in (1, 2, 3, 5):
                    native.set_cpu_isa(isa)
                    torch.set_num_threads(n)
                    assert_same(call(logits, target, exp), want, f"{shape}, {isa}, {n} threads")
                    assert native.num_threads() == n
    finally:
        torch.set_num_threads(threads)


def test_a_repeated_call_gives_the_same_bytes(device: str, exp: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (16, 5003), device)
    want = call(logits, target, exp)
    for _ in range(100):
        assert_same(call(logits, target, exp), want)


def test_asking_for_less_gives_the_same_bytes(device: str, exp: str, rng: np.random.Generator) -> None:
    """Without entropy and sum of squares a kernel accumulates less; this must not change the log-probability."""
    logits, target = problem(rng, (16, 3001), device)
    everything = call(logits, target, exp)
    names = list(ALL)
    for asked in range(1 << len(names)):
        flags = {name: bool(asked >> i & 1) for i, name in enumerate(names)}
        got = call(logits, target, exp, **flags)
        got = (got,) if asked == 0 else got
        want = [everything.logprob, *(o if flags[f"return_{f}"] else None for f, o in everything._asdict().items()
                                      if f != "logprob")]  # fmt: skip
        assert_same(tuple(got), tuple(want[: len(got)]), str(flags))


def test_the_two_exponentials_differ_and_the_default_follows_the_device(device: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (500, 500), device, "float32")
    portable, hardware = (call(logits, target, exp) for exp in ("portable", "hardware"))
    assert differing(portable, hardware), "a mode that changes nothing is not tested by anything"
    default = rk.logprob(logits, target, **ALL)
    assert_same(default, hardware if device == "cuda" else portable)
    with rk.arithmetic("sm_90"):
        assert_same(rk.logprob(logits, target, **ALL), hardware)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [*VOCAB, *FULL_VOCAB])
def test_the_cpu_has_the_bytes_of_cuda(vocab: int, dtype: str, exp: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (5, vocab), "cpu", dtype)
    for options in OPTIONS.values():
        assert_same(
            call(logits, target, exp, **options), call(logits.cuda(), target.cuda(), exp, **options), str(options)
        )


# ---- kept sets ------------------------------------------------------------------------------------------------------


def test_a_kept_set_has_the_bytes_of_minus_infinity_elsewhere(device: str, exp: str, rng: np.random.Generator) -> None:
    """Lists of 0 (no restriction), 1, some, many and repeated ids, unsorted. The target is always kept."""
    rows, vocab = 12, 1000
    logits, target = problem(rng, (rows, vocab), device, "float32")
    lists = [rng.integers(0, vocab, n) for n in (0, 1, 1, 2, 20, 20, 500, 999, 4000, 0, 3, 3)]
    lists[10] = np.array([7, 7, 7])
    masked = torch.full_like(logits, float("-inf"))
    for i, ids in enumerate(lists):
        columns = torch.tensor([*ids, int(target[i])], device=device) if len(ids) else slice(None)
        masked[i, columns] = logits[i, columns]
    kept = (
        torch.from_numpy(np.concatenate(lists).astype(np.int32)).to(device),
        torch.tensor(np.concatenate([[0], np.cumsum([len(x) for x in lists])]), device=device),
    )
    got = call(logits, target, exp, kept=kept)
    assert_same(got, call(masked, target, exp))
    assert not truth(logits, target, kept=kept).failures(got)


def test_garbage_that_is_masked_changes_no_byte(device: str, exp: str, rng: np.random.Generator) -> None:
    """NaN and Inf in ignored rows, beyond valid_vocab and outside kept sets never affect a result."""
    rows, vocab, valid = 10, 777, 700
    clean, target = problem(rng, (rows, vocab), device)
    target %= valid
    target[3], target[7] = -100, -100
    ids = torch.arange(0, 50, dtype=torch.int32, device=device)
    offsets = torch.tensor([0, *[0] * 5, *[50] * 5], device=device)  # only row 5 is restricted
    options = {"valid_vocab": valid, "kept": (ids, offsets), "temperature": torch.full((rows,), 0.9, device=device)}
    want = call(clean, target, exp, **options)
    for garbage in (float("nan"), float("inf"), float("-inf"), 3e38):
        dirty = clean.clone()
        dirty[3] = dirty[7] = garbage
        dirty[:, valid:] = garbage
        kept_there = clean[5, :50].clone(), clean[5, target[5]].clone()
        dirty[5] = garbage
        dirty[5, :50], dirty[5, target[5]] = kept_there
        bad_options = {**options, "temperature": options["temperature"].clone()}
        bad_options["temperature"][3] = garbage  # the temperature of an ignored row is not read either
        assert_same(call(dirty, target, exp, **bad_options), want, str(garbage))


def test_an_ignored_rows_kept_set_is_not_looked_at(device: str) -> None:
    logits, target = torch.zeros(3, 10, device=device), torch.tensor([1, -100, 2], device=device)
    kept = (torch.tensor([1, 99, 2], dtype=torch.int32, device=device), torch.tensor([0, 1, 2, 3], device=device))
    result = call(logits, target, "portable", kept=kept)
    assert result.status.tolist() == [0, 0, 0]
    assert result.logprob.tolist() == [0, 0, 0]


# ---- statuses -------------------------------------------------------------------------------------------------------


def test_every_status_and_nothing_else_in_its_row(device: str, exp: str) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [
        ([1, 2, 3], 1, 1.0, Status.OK),
        ([1, 2, 3], -100, nan, Status.OK),  # ignored
        ([1, 2, 3], 3, 1.0, Status.BAD_TARGET),
        ([1, 2, 3], -1, 1.0, Status.BAD_TARGET),
        ([1, nan, 3], 0, 1.0, Status.NAN_LOGIT),
        ([1, nan, 3], 1, 1.0, Status.NAN_LOGIT),
        ([1, inf, 3], 0, 1.0, Status.INF_LOGIT),
        ([1, 3e38, 3], 0, 1e-3, Status.INF_LOGIT),  # the product with log2e / T overflows
        ([-inf, -inf, -inf], 0, 1.0, Status.EMPTY_ROW),
        ([1, 2, 3], 0, 0.0, Status.BAD_TEMPERATURE),
        ([1, 2, 3], 0, -1.0, Status.BAD_TEMPERATURE),
        ([1, 2, 3], 0, nan, Status.BAD_TEMPERATURE),
        ([1, 2, 3], 0, inf, Status.BAD_TEMPERATURE),
        ([1, 2, 3], 0, 1e-39, Status.BAD_TEMPERATURE),  # subnormal, so its reciprocal overflows
        ([1, -inf, 3], 1, 1.0, Status.LABEL_MASKED),
        ([1, -inf, 3], 2, 1.0, Status.OK),
        ([1, inf, 3], 9, 1.0, Status.INF_LOGIT | Status.BAD_TARGET),
        ([1, 2, 3], 0, 1e-6, Status.INF_LOGIT),  # log2e / T alone is past 2^20
        ([-3, -2, -3], 0, 1e-6, Status.EMPTY_ROW),
        ([1, 1453635, 3], 1, 1.0, Status.INF_LOGIT),  # times log2e: 2^21 and 0.1
        ([1, 1453634, 3], 1, 1.0, Status.OK),
    ]
    x, y, t, status = zip(*rows, strict=True)
    logits, target = torch.tensor(x, device=device), torch.tensor(y, device=device)
    temperature = torch.tensor(t, device=device)
    result = call(logits, target, exp, temperature=temperature)
    assert [Status(s) for s in result.status.tolist()] == list(status)
    assert not truth(logits, target, temperature=temperature).failures(result)
    bad_id = [s == Status.BAD_TARGET for s in status]
    for i, s in enumerate(status):
        values = [float(o[i]) for o in result[:4]]
        if s & ~Status.LABEL_MASKED:
            assert np.isnan(values[0]), i
            assert np.isnan(values[1:]).all() != bad_id[i], "only a bad target leaves the row's statistics valid"
    assert float(result.logprob[14]) == -inf
    words = numpy_of(result.logprob).view(np.uint32)
    assert set(words[np.isnan(numpy_of(result.logprob))]) == {0x7FC00000}, "one canonical NaN"


def test_bad_kept_sets_are_a_status(device: str) -> None:
    """Ids out of range, and offsets that descend or are out of bounds. No kernel dereferences such an id or offset."""
    logits, target = torch.zeros(3, 10, device=device), torch.tensor([1, 1, 1], device=device)
    for ids, offsets, bad in (
        ([1, 10, 2], [0, 1, 2, 3], [False, True, False]),
        ([1, -1, 2], [0, 1, 2, 3], [False, True, False]),
        ([1, 2, 2**31 - 1], [0, 1, 2, 3], [False, False, True]),
        ([1, 2, 3], [0, 2, 1, 3], [False, True, False]),
        ([1, 2, 3], [0, 1, 2, 4], [False, False, True]),
        ([1, 2, 3], [-1, 1, 2, 3], [True, False, False]),
        ([1, 2, 3], [0, 1, 2**62, 3], [False, True, True]),
        ([], [0, 0, 0, -(2**63)], [False, False, True]),
    ):
        kept = (torch.tensor(ids, dtype=torch.int32, device=device), torch.tensor(offsets, device=device))
        result = call(logits, target, "portable", kept=kept)
        assert [bool(s & Status.BAD_KEPT) for s in result.status.tolist()] == bad, (ids, offsets)
        assert torch.isnan(result.logprob).tolist() == bad


def test_ignore_index_may_be_any_integer(device: str) -> None:
    logits = torch.randn(4, 10, device=device)
    for ignored in (-100, -1, 0, 5, 2**31 - 1, -(2**31), 2**40):
        target = torch.tensor([ignored, 1, 2, ignored], device=device)
        result = call(logits, target, "portable", ignore_index=ignored)
        assert not any(int(s) for s in result.status), ignored
        for output in result[:4]:
            assert output[[0, 3]].tolist() == [0, 0]
            assert bool((output[1:3] != 0).all())


# ---- empty ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 5), (0, 0), (3, 0, 7), (0, 3, 7), (0, 200_000)])
def test_no_rows_give_empty_results(shape: tuple[int, ...], device: str, exp: str) -> None:
    logits = torch.zeros(shape, device=device)
    target = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
    result = call(logits, target, exp, check=True)
    assert all(tuple(o.shape) == shape[:-1] for o in result)
    assert [o.dtype for o in result] == [torch.float32] * 4 + [torch.int32]
    with mode(device, exp):
        gradient = rk.logprob_backward(logits, target, result.lse, dlogprob=result.logprob, exp=exp)
    assert gradient.shape == logits.shape


def test_autograd_through_no_rows(device: str) -> None:
    logits = torch.zeros(0, 5, device=device, requires_grad=True)
    rk.logprob(logits, torch.zeros(0, dtype=torch.int64, device=device)).sum().backward()
    assert logits.grad.shape == (0, 5)


def test_no_columns_with_rows_are_an_error(device: str) -> None:
    target = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"logits: expected at least one column, got shape \[3, 0\]"):
        rk.logprob(torch.zeros(3, 0, device=device), target)


def test_the_result_has_what_was_asked_for(device: str) -> None:
    logits, target = torch.randn(2, 3, 10, device=device), torch.zeros(2, 3, dtype=torch.int64, device=device)
    assert isinstance(rk.logprob(logits, target), torch.Tensor)
    result = rk.logprob(logits, target, return_entropy=True)
    assert isinstance(result, rk.LogprobResult)
    assert [o is None for o in result] == [False, True, False, True, True]
    assert result.entropy.shape == (2, 3)
    assert result.entropy.device == logits.device


def test_out_receives_the_results(device: str, exp: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (2, 9, 50), device)
    want = call(logits, target, exp)
    out = tuple(torch.full_like(o, 7) for o in want)
    got = call(logits, target, exp, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert_same(out, tuple(want))
    single = torch.empty(2, 9, device=device)
    with mode(device, exp):
        assert rk.logprob(logits, target, out=single, exp=exp) is single
    assert raw(single) == raw(want.logprob)
