"""Tokens of sequences mean the same to every operator that takes them (docs/tokens.md). Every operator runs with masks
of any dtype, without offsets, with offsets of both integer types, and with offsets that end early. Bad masks and
offsets give the same messages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch")

OFFSETS = (0, 5, 5, 18, 37)  # a short sequence, an empty one, and others whose lengths are no multiple of a vector
TOKENS, SEQUENCES, BEHIND = OFFSETS[-1], len(OFFSETS) - 1, 6
ANY_DTYPE = "bool, of integers or of floats of 16 bits and more"
MASKS = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


class Batch:
    """Inputs of an operator: values by number, per token or per sequence; the mask; the offsets."""

    def __init__(self, shape: tuple[int, ...], mask: Any, offsets: Any, sequences: int) -> None:
        self.shape, self.mask, self.offsets, self.sequences = shape, mask, offsets, sequences
        self.given: Callable[[Any], Any] = lambda tensor: tensor

    def traced(self, given: Callable[[Any], Any]) -> Batch:
        """The same batch with ``given`` applied to each tensor."""
        self.given = given
        self.mask, self.offsets = (None if t is None else given(t) for t in (self.mask, self.offsets))
        return self

    def tokens(self, number: int) -> Any:
        """The first TOKENS values are the same, whatever follows them."""
        count = int(np.prod(self.shape))
        values = np.random.default_rng(number).standard_normal(max(count, TOKENS + BEHIND)).astype(np.float32)
        return self.given(torch.from_numpy(-np.abs(values)[:count].reshape(self.shape)))

    def ids(self) -> Any:
        values = np.random.default_rng(9).integers(0, 7, TOKENS + BEHIND)
        return self.given(torch.from_numpy(values[: int(np.prod(self.shape))].reshape(self.shape)))

    def every(self) -> Any:
        return self.given(torch.ones(self.shape, dtype=torch.bool))

    def per_sequence(self, number: int) -> Any:
        values = np.random.default_rng(90 + number).standard_normal(self.sequences)
        return self.given(torch.from_numpy(values.astype(np.float32)))


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    call: Callable[[Batch], Any]
    first: str = "logprob"  # the array that gives the others their shape
    masked: bool = True
    packed: bool = True  # takes cu_seqlens
    needs_offsets: bool = False


POLICY = rk.PolicySpec(kl="k3", kl_coef=0.1)


def _policy(b: Batch, call: Any) -> Any:
    mask = b.every() if b.mask is None else b.mask
    return call(b.tokens(0), b.tokens(1), b.tokens(2), mask, spec=POLICY, cu_seqlens=b.offsets, ref_logprob=b.tokens(3))


def _scatter(b: Batch) -> Any:
    mask = b.every() if b.mask is None else b.mask
    return rk.scatter_rewards(
        b.per_sequence(0), mask, cu_seqlens=b.offsets, token_rewards=b.tokens(0), logprob=b.tokens(1),
        ref_logprob=b.tokens(2), kl_coef=0.5,
    )  # fmt: skip


def _head(b: Batch) -> Any:
    hidden = torch.from_numpy(np.random.default_rng(5).standard_normal((TOKENS + BEHIND, 16)).astype(np.float32))
    weight = torch.from_numpy(np.random.default_rng(6).standard_normal((7, 16)).astype(np.float32))
    rows = int(np.prod(b.shape))
    return rk.linear_cross_entropy(
        b.given(hidden[:rows].reshape(*b.shape, 16)), b.given(weight), b.ids(), loss_mask=b.mask, cu_seqlens=b.offsets
    )


CASES = [
    Case("kl", lambda b: rk.kl(b.tokens(0), b.tokens(1), b.mask, estimator="k3"), packed=False),
    Case(
        "kl_backward",
        lambda b: rk.kl_backward(b.tokens(2), b.tokens(0), b.tokens(1), b.mask, estimator="k3")[:1],
        packed=False,
    ),
    Case("policy_loss", lambda b: _policy(b, rk.policy_loss)),
    Case("policy_loss_and_grad", lambda b: _policy(b, rk.policy_loss_and_grad)),
    Case(
        "value_loss_and_grad",
        lambda b: rk.value_loss_and_grad(
            b.tokens(0), b.tokens(1), b.tokens(2), b.mask, cu_seqlens=b.offsets, clip=0.2,
            aggregation="seq-mean-token-mean",
        ),
        first="value",
    ),
    Case(
        "importance_weights",
        lambda b: rk.importance_weights(
            b.tokens(0), b.tokens(1), b.mask, cu_seqlens=b.offsets, level="sequence", upper=2.0, return_metrics=True
        ),
    ),
    Case(
        "importance_weights of tokens",
        lambda b: rk.importance_weights(b.tokens(0), b.tokens(1), b.mask, cu_seqlens=b.offsets, upper=2.0),
    ),
    Case(
        "mismatch_metrics",
        lambda b: rk.mismatch_metrics(b.tokens(0), b.tokens(1), b.mask, cu_seqlens=b.offsets),
        first="logprob_train",
    ),
    Case(
        "covariance_mask",
        lambda b: rk.covariance_mask(
            b.tokens(0), None, b.tokens(2), b.mask, kind="kl", ratio=0.2, cu_seqlens=b.offsets
        ),
    ),
    Case(
        "entropy_mask",
        lambda b: rk.entropy_mask(b.tokens(0), b.mask, top_quantile=0.2, cu_seqlens=b.offsets),
        first="entropy",
    ),
    Case(
        "optimal_token_baseline",
        lambda b: rk.optimal_token_baseline(
            b.per_sequence(0)[:, None], b.tokens(1), b.tokens(2).abs(), b.mask, group_size=1, cu_seqlens=b.offsets
        ),
    ),
    Case(
        "gae",
        lambda b: rk.gae(
            b.tokens(0), b.tokens(1), b.mask, b.offsets, gamma=0.9, lam=0.95, bootstrap=b.per_sequence(0)
        ),
        first="rewards",
    ),
    Case(
        "discounted_returns",
        lambda b: rk.discounted_returns(b.tokens(0), b.mask, b.offsets, gamma=0.9),
        first="rewards",
    ),
    Case(
        "vtrace",
        lambda b: rk.vtrace(b.tokens(0), b.tokens(1), b.tokens(2), b.tokens(3), b.mask, b.offsets, gamma=0.9),
        first="rewards",
    ),
    Case(
        "masked_whiten",
        lambda b: rk.masked_whiten(b.tokens(0), b.mask, b.offsets, return_stats=True),
        first="x",
    ),
    Case("scatter_rewards", _scatter, first="mask"),
    Case(
        "sequence_logprob", lambda b: rk.sequence_logprob(b.tokens(0), b.mask, b.offsets, return_status=True)
    ),
    Case(
        "sequence_logprob's gradient",
        lambda b: _gradient(lambda x: rk.sequence_logprob(x, b.mask, b.offsets).sum, b.tokens(0), b.per_sequence(1)),
    ),
    Case(
        "shift_labels_packed",
        lambda b: rk.shift_labels_packed(b.ids(), b.offsets, mask=b.mask, ignore_index=0),
        first="ids",
        needs_offsets=True,
    ),
    Case("tool_mask", lambda b: rk.tool_mask(b.ids(), [3], [5], b.offsets), first="ids", masked=False),
    Case("linear_cross_entropy", _head, first="target"),
]  # fmt: skip
PACKED = [c for c in CASES if c.packed]


def _gradient(call: Any, x: Any, d: Any) -> Any:
    x = x.requires_grad_()
    return torch.autograd.grad(call(x), x, d)[0]


def by_name(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[c.name for c in cases])


def results(found: Any) -> list[Any]:
    if found is None:
        return []
    if isinstance(found, torch.Tensor):
        return [found]
    if hasattr(found, "vector"):
        return [found.vector]
    return [part for item in found for part in results(item)]


def bits(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().numpy().tobytes())


def offsets(values: Any = OFFSETS, dtype: Any = torch.int32) -> Any:
    return torch.tensor(values, dtype=dtype)


def counted(count: int = TOKENS) -> Any:
    return torch.from_numpy(np.random.default_rng(4).random(TOKENS + BEHIND)[:count] < 0.7)


def packed(mask: Any = None, cu_seqlens: Any = None, count: int = TOKENS) -> Batch:
    given = offsets() if cu_seqlens is None else cu_seqlens
    return Batch((count,), mask, given, given.shape[0] - 1)


def canonical(case: Case, mask: Any) -> Batch:
    return packed(mask) if case.packed else Batch((TOKENS,), mask, None, 1)


@pytest.mark.parametrize("dtype", MASKS, ids=str)
@by_name([c for c in CASES if c.masked])
def test_any_mask_counts_by_what_is_not_zero(case: Case, dtype: Any) -> None:
    mask = counted()
    given = mask.to(dtype)
    if dtype.is_floating_point:  # a NaN counts, -0 does not
        given[mask] = torch.tensor([float("nan"), 2.0**-14, -3.0]).repeat(TOKENS)[: int(mask.sum())].to(dtype)
        given[~mask] = torch.tensor([0.0, -0.0]).repeat(TOKENS)[: int((~mask).sum())].to(dtype)
    elif dtype is not torch.bool:  # a number whose lower half is zero, and a negative number
        large = 1 << (8 * dtype.itemsize - 2)
        given[mask] = torch.tensor([large, 1, 1 if dtype is torch.uint8 else -1], dtype=dtype).repeat(TOKENS)[
            : int(mask.sum())
        ]
    want, found = results(case.call(canonical(case, mask))), results(case.call(canonical(case, given)))
    for a, b in zip(want, found, strict=True):
        assert bits(a) == bits(b)


@by_name([c for c in CASES if c.masked])
def test_a_masks_rows_have_any_stride(case: Case) -> None:
    """The mask belongs to a padded batch; its columns are contiguous."""
    if case.needs_offsets:
        return
    rows, columns = 3, 11
    mask = counted(rows * columns).reshape(rows, columns)
    wide = torch.zeros(rows, columns + 5, dtype=torch.int16)
    wide[:, 2 : columns + 2] = mask
    want = results(case.call(Batch((rows, columns), mask, None, rows)))
    found = results(case.call(Batch((rows, columns), wide[:, 2 : columns + 2], None, rows)))
    for a, b in zip(want, found, strict=True):
        assert bits(a) == bits(b)


@by_name([c for c in CASES if not c.needs_offsets])
def test_tokens_without_offsets_are_one_sequence(case: Case) -> None:
    mask = counted()
    want = results(case.call(Batch((1, TOKENS), mask.reshape(1, -1), None, 1)))
    found = results(case.call(Batch((TOKENS,), mask, None, 1)))
    for a, b in zip(want, found, strict=True):
        assert bits(a) == bits(b)
        assert b.shape == (a.shape[1:] if tuple(a.shape) == (1, TOKENS) else a.shape)


@by_name(PACKED)
def test_offsets_are_int32_or_int64(case: Case) -> None:
    want = results(case.call(packed(counted())))
    found = results(case.call(packed(counted(), offsets(dtype=torch.int64))))
    for a, b in zip(want, found, strict=True):
        assert bits(a) == bits(b)


@by_name(PACKED)
def test_tokens_behind_the_last_offset_are_of_no_sequence(case: Case) -> None:
    want = results(case.call(packed(counted())))
    for dtype in (torch.int32, torch.int64):
        longer = packed(counted(TOKENS + BEHIND), offsets(dtype=dtype), TOKENS + BEHIND)
        for a, b in zip(want, results(case.call(longer)), strict=True):
            if a.shape[:1] == (TOKENS,):
                assert b.shape == (TOKENS + BEHIND,)
                assert bits(b[:TOKENS]) == bits(a)
                assert bits(b[TOKENS:]) == bytes(len(bits(b[TOKENS:])))
            else:
                assert bits(a) == bits(b)


@by_name(PACKED)
def test_offsets_may_have_no_sequence_at_all(case: Case) -> None:
    for found in results(case.call(packed(None, offsets([0])))):
        if found.shape[:1] == (TOKENS,):
            assert bits(found) == bytes(len(bits(found)))


BAD_OFFSETS = {
    "the first": ([1, 5, 18, 37], "cu_seqlens: expected 0 first, got 1 at index 0"),
    "descend": ([0, 18, 5, 37], "cu_seqlens: expected ascending offsets, got 5 after 18 at index 2"),
    "negative": ([0, -1, 5, 37], "cu_seqlens: expected ascending offsets, got -1 after 0 at index 1"),
    "beyond": ([0, 5, 38, 38], "cu_seqlens: expected at most 37 (the number of tokens), got 38 at index 2"),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("bad", BAD_OFFSETS)
@by_name(PACKED)
def test_bad_offsets_have_one_error(case: Case, bad: str, dtype: Any) -> None:
    values, words = BAD_OFFSETS[bad]
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        case.call(packed(counted(), offsets(values, dtype)))


def strided(tensor: Any) -> Any:
    return torch.stack((tensor, tensor), -1)[..., 0]


BAD_ARRAYS: dict[str, tuple[Any, type, str]] = {
    "offsets of floats": (
        lambda: packed(counted(), offsets(dtype=torch.float32)),
        TypeError,
        "cu_seqlens: expected dtype int32 or int64, got float32",
    ),
    "offsets of int16": (
        lambda: packed(counted(), offsets(dtype=torch.int16)),
        TypeError,
        "cu_seqlens: expected dtype int32 or int64, got int16",
    ),
    "offsets of two dimensions": (
        lambda: Batch((TOKENS,), counted(), offsets().reshape(1, -1), SEQUENCES),
        ValueError,
        "cu_seqlens: expected shape [num_sequences + 1], got [1, 5]",
    ),
    "no offset": (
        lambda: Batch((TOKENS,), counted(), offsets([]), 0),
        ValueError,
        "cu_seqlens: expected shape [num_sequences + 1], got [0]",
    ),
    "strided offsets": (
        lambda: Batch((TOKENS,), counted(), strided(offsets()), SEQUENCES),
        ValueError,
        "cu_seqlens: expected a contiguous last dimension (stride 1), got stride 2; make it contiguous: "
        "np.ascontiguousarray, or .contiguous() for torch",
    ),
    "padded tokens beside offsets": (
        lambda: Batch((1, TOKENS), counted().reshape(1, -1), offsets(), SEQUENCES),
        ValueError,
        "{first}: expected shape [num_tokens] beside cu_seqlens, got [1, 37]",
    ),
}
BAD_MASKS: dict[str, tuple[Any, type, str]] = {
    "a complex mask": (
        lambda: counted().to(torch.complex64),
        TypeError,
        f"mask: expected dtype {ANY_DTYPE}, got complex64",
    ),
    "a mask of float8": (
        lambda: counted().to(torch.float8_e4m3fn),
        TypeError,
        f"mask: expected dtype {ANY_DTYPE}, got float8_e4m3fn",
    ),
    "a strided mask": (
        lambda: strided(counted()),
        ValueError,
        "mask: expected a contiguous last dimension (stride 1), got stride 2; make it contiguous: "
        "np.ascontiguousarray, or .contiguous() for torch",
    ),
    "a short mask": (
        lambda: counted()[1:],
        ValueError,
        "mask: expected shape [37] (that of {first}), got [36]",
    ),
}


def refuses(case: Case, batch: Any, error: type, words: str) -> None:
    if case.name == "linear_cross_entropy":
        words = re.sub(r"^mask:", "loss_mask:", words)
    with pytest.raises(error, match=f"^{re.escape(words.format(first=case.first))}$"):
        case.call(batch)


@pytest.mark.parametrize("bad", BAD_ARRAYS)
@by_name(PACKED)
def test_bad_arrays_have_one_error(case: Case, bad: str) -> None:
    if case.name == "shift_labels_packed" and bad.startswith("padded"):
        return  # it has no padded form
    make, error, words = BAD_ARRAYS[bad]
    refuses(case, make(), error, words)


@pytest.mark.parametrize("bad", BAD_MASKS)
@by_name([c for c in CASES if c.masked])
def test_bad_masks_have_one_error(case: Case, bad: str) -> None:
    if case.first == "mask" and bad == "a short mask":
        return  # the error names the shape
    if case.name == "linear_cross_entropy" and bad == "a strided mask":
        return  # the mask may have any stride
    make, error, words = BAD_MASKS[bad]
    refuses(case, canonical(case, make()), error, words)


# ---- attention, which has two arrays of offsets ----------------------------------------------------------------------


def attend(cu_seqlens: Any, count: int = TOKENS, which: str = "qk") -> list[Any]:
    """out, lse and gradients; `which` names the offsets that are passed."""
    values = np.random.default_rng(8).standard_normal((4, TOKENS + BEHIND, 2, 8)).astype(np.float32)
    q, k, v, dout = (torch.from_numpy(x[:count]) for x in values)
    lists = {f"cu_seqlens_{x}": cu_seqlens if x in which else offsets() for x in "qk"}
    out, lse = rk.attention(q, k, v, **lists, return_lse=True)
    return [out, lse.T, *rk.attention_backward(dout, q, k, v, out, lse, **lists)]


def test_attention_takes_offsets_of_both_integers_that_end_early() -> None:
    want = attend(offsets())
    for dtype in (torch.int32, torch.int64):
        for count in (TOKENS, TOKENS + BEHIND):
            found = attend(offsets(dtype=dtype), count)
            for i, (a, b) in enumerate(zip(want, found, strict=True)):
                assert bits(a) == bits(b[:TOKENS])
                assert (b[TOKENS:] == (-float("inf") if i == 1 else 0.0)).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("which", ["q", "k"])
@pytest.mark.parametrize("bad", BAD_OFFSETS)
def test_attention_says_the_same_of_bad_offsets(bad: str, which: str, dtype: Any) -> None:
    values, words = BAD_OFFSETS[bad]
    given = offsets([values[0], *values], dtype) if bad == "descend" else offsets([*values, values[-1]], dtype)
    index = int(words[-1]) + (bad == "descend")
    words = words[:-1].replace("cu_seqlens", f"cu_seqlens_{which}") + str(index)
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        attend(given, which=which)


def test_attention_says_the_same_of_bad_arrays() -> None:
    for given, error, words in (
        (offsets(dtype=torch.float32), TypeError, "cu_seqlens_q: expected dtype int32 or int64, got float32"),
        (offsets([]), ValueError, "cu_seqlens_q: expected shape [num_sequences + 1], got [0]"),
        (offsets()[None], ValueError, "cu_seqlens_q: expected shape [num_sequences + 1], got [1, 5]"),
    ):
        with pytest.raises(error, match=f"^{re.escape(words)}$"):
            attend(given, which="q")


# ---- fake tensors ----------------------------------------------------------------------------------------------------


def fake(batch: Batch) -> tuple[Any, Batch]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    return mode, batch.traced(mode.from_tensor)


@pytest.mark.parametrize("bad", BAD_ARRAYS)
@by_name(PACKED)
def test_fake_tensors_have_the_same_errors_of_arrays(case: Case, bad: str) -> None:
    if case.name == "shift_labels_packed" and bad.startswith("padded"):
        return
    make, error, words = BAD_ARRAYS[bad]
    mode, batch = fake(make())
    with mode:
        refuses(case, batch, error, words)


@pytest.mark.parametrize("bad", BAD_MASKS)
@by_name([c for c in CASES if c.masked])
def test_fake_tensors_have_the_same_errors_of_masks(case: Case, bad: str) -> None:
    if (case.first == "mask" and bad == "a short mask") or (case.first == "target" and bad == "a strided mask"):
        return
    make, error, words = BAD_MASKS[bad]
    mode, batch = fake(canonical(case, make()))
    with mode:
        refuses(case, batch, error, words)


def unusual(case: Case) -> Batch:
    """A mask of float16, and offsets of int64 that end early; or one sequence without either."""
    mask = counted(TOKENS + BEHIND).to(torch.float16) if case.masked else None
    if case.packed:
        return packed(mask, offsets(dtype=torch.int64), TOKENS + BEHIND)
    return Batch((TOKENS + BEHIND,), mask, None, 1)


@by_name(CASES)
def test_fake_tensors_have_the_shapes_of_results(case: Case) -> None:
    want = results(case.call(unusual(case)))
    mode, batch = fake(unusual(case))
    with mode:
        found = results(case.call(batch))
    assert [(tuple(t.shape), t.dtype) for t in found] == [(tuple(t.shape), t.dtype) for t in want]


@by_name([c for c in CASES if c.name != "sequence_logprob's gradient"])
def test_compiled_calls_have_the_same_bits(case: Case) -> None:
    want = results(case.call(unusual(case)))
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        kept[len(kept)] = tensor
        return tensor

    case.call(unusual(case).traced(keep))

    def call(tensors: list[Any]) -> list[Any]:
        left = iter(tensors)
        return results(case.call(unusual(case).traced(lambda _: next(left))))

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager")
    for a, b in zip(want, compiled(list(kept.values())), strict=True):
        assert bits(a) == bits(b)


# ---- on a GPU -------------------------------------------------------------------------------------------------------

ON_GPU = [c for c in CASES if c.name != "linear_cross_entropy"]  # its products have other bits on a CPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", MASKS, ids=str)
@by_name(ON_GPU)
def test_a_gpu_has_the_bits_of_the_cpu(case: Case, dtype: Any) -> None:
    """Any mask, offsets that end early, and mask rows that are not aligned to vectors."""
    shapes = [Batch((TOKENS,), None, None, 1), Batch((3, 11), None, None, 3)]
    if case.packed:
        shapes = [packed(None, offsets(), TOKENS + BEHIND), packed(None, offsets([0])), *shapes]
    for like in shapes:
        if case.needs_offsets and like.offsets is None:
            continue
        mask = counted(int(np.prod(like.shape))).reshape(like.shape).to(dtype) if case.masked else None
        batches = [Batch(like.shape, mask, like.offsets, like.sequences) for _ in range(2)]
        want = results(case.call(batches[0]))
        found = results(case.call(batches[1].traced(lambda t: t.cuda())))
        for a, b in zip(want, found, strict=True):
            assert bits(a) == bits(b.cpu())


# Results of a batch, by their index among all results, that a bad offset makes NaN.
SPOILED = {
    "policy_loss": (0,),
    "policy_loss_and_grad": (0,),
    "value_loss_and_grad": (0,),
    "mismatch_metrics": (0,),
    "gae": (0, 1),
    "discounted_returns": (0,),
    "vtrace": (0, 1),
    "masked_whiten": (0, 1, 2),
    "covariance_mask": (0,),
    "entropy_mask": (0,),
    "scatter_rewards": (0,),
    "optimal_token_baseline": (1,),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("bad", [[0, 18, 5, 37], [0, -1, 5, 37], [0, 5, 1 << 30, 37], [9, 3, -7, 99]], ids=str)
@by_name([c for c in ON_GPU if c.packed])
def test_bad_offsets_on_a_gpu_are_safe_and_seen(case: Case, bad: list[int], dtype: Any) -> None:
    """Three sequences; each list makes at least one sequence invalid."""
    batch = packed(counted(), offsets(bad, dtype)).traced(lambda t: t.cuda())
    found = results(case.call(batch))
    torch.cuda.synchronize()
    for i in SPOILED.get(case.name, ()):
        values = found[i].flatten()
        counts = torch.ones_like(values, dtype=torch.bool) if values.numel() != TOKENS else batch.mask
        if case.name in ("gae", "discounted_returns", "vtrace"):
            counts = torch.ones_like(counts)
        assert values[counts].isnan().any()
    if case.name == "sequence_logprob":
        assert (found[0].isnan() == (found[2] == 1)).all()
        assert found[2].any()
