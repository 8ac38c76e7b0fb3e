"""shift_labels_packed, loss_mask_from_spans, tool_mask: the references' values everywhere, and users' errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch")

BEGIN, END = [7, 8], [9]


def ids_of(rng: np.random.Generator, tokens: int, dtype: str = "int64") -> np.ndarray:
    """Few distinct ids, so that markers are frequent, complete and cut."""
    return rng.choice([1, 7, 8, 9], tokens, p=[0.4, 0.25, 0.25, 0.1]).astype(dtype)


def offsets(rng: np.random.Generator, sequences: int, unit: int = 1, most: int = 40) -> np.ndarray:
    lengths = rng.integers(0, most, sequences) * unit
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def on(device: str, *arrays: Any) -> list[Any]:
    return [None if a is None else torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in arrays]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_labels_of_every_rank(dtype: str, cp_size: int, layout: str, device: str, rng: np.random.Generator) -> None:
    cu = offsets(rng, 9, 2 * cp_size)
    tokens = int(cu[-1]) + 4 * cp_size  # some tokens have no sequence
    ids = rng.integers(0, 1000, tokens).astype(dtype)
    mask = rng.random(tokens) < 0.7
    for m in (None, mask):
        for rank in range(cp_size):
            how = {"cp_rank": rank, "cp_size": cp_size, "cp_layout": layout}
            i, c, k = on(device, ids, cu, m)
            got = rk.shift_labels_packed(i, c, mask=k, **how)
            want = rk.shift_labels_packed_reference(ids, cu, mask=m, **how)
            assert got.cpu().numpy().tobytes() == want.tobytes()
            numpy = rk.shift_labels_packed(ids, cu, mask=m, **how)
            assert numpy.tobytes() == want.tobytes()


def test_all_ranks_have_every_label_once(device: str, rng: np.random.Generator) -> None:
    cu = offsets(rng, 6, 8)
    ids = np.arange(1, int(cu[-1]) + 1)
    i, c = on(device, ids, cu)
    for layout in ("zigzag", "contiguous"):
        parts = [rk.shift_labels_packed(i, c, cp_rank=r, cp_size=4, cp_layout=layout) for r in range(4)]
        whole = rk.shift_labels_packed(i, c)
        assert torch.equal(torch.cat(parts).sort().values, whole.sort().values)


def test_the_last_token_of_a_sequence_has_no_label() -> None:
    got = rk.shift_labels_packed(torch.arange(10, 16), torch.tensor([0, 2, 2, 5]), ignore_index=-1)
    assert got.tolist() == [11, -1, 13, 14, -1, -1]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_masks_from_spans(dtype: str, packed: bool, device: str, rng: np.random.Generator) -> None:
    for _ in range(5):
        cu = offsets(rng, 7)
        lengths = np.diff(cu) if packed else np.full(7, 50)
        of_sequence = rng.integers(0, 4, 7)
        spans = [sorted(rng.integers(0, n + 1, 2)) for n, k in zip(lengths, of_sequence, strict=True) for _ in range(k)]
        array = np.array(spans, dtype).reshape(-1, 2)
        span_offsets = np.concatenate([[0], np.cumsum(of_sequence)]).astype(dtype)
        how = {"num_tokens": int(cu[-1]) + 3 if packed else 50}
        arrays = (array, span_offsets, cu if packed else None)
        want = rk.loss_mask_from_spans_reference(*arrays, **how)
        got = rk.loss_mask_from_spans(*on(device, *arrays), **how)
        assert got.dtype == torch.bool
        assert got.cpu().numpy().tobytes() == want.tobytes()
        assert rk.loss_mask_from_spans(*arrays, **how).tobytes() == want.tobytes()


@pytest.mark.parametrize("include_end", [True, False])
@pytest.mark.parametrize("markers", [(BEGIN, END), ([7], [8, 9]), ([7, 8, 7], [8]), ([9], [9])], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_turns_between_markers(
    packed: bool, markers: Any, include_end: bool, device: str, rng: np.random.Generator
) -> None:
    """Rows are longer than a GPU's tile of 256 positions, with turns across its edges."""
    cu = offsets(rng, 6, most=700)
    ids = ids_of(rng, int(cu[-1]) + 2, "int32") if packed else ids_of(rng, 6 * 600).reshape(6, 600)
    c = cu if packed else None
    want = rk.tool_mask_reference(ids, *markers, c, include_end=include_end)
    i, of_torch = on(device, ids, c)
    got = rk.tool_mask(i, *markers, of_torch, include_end=include_end)
    assert got.cpu().numpy().tobytes() == want.tobytes()
    assert rk.tool_mask(ids, *markers, c, include_end=include_end).tobytes() == want.tobytes()
    if not packed:  # then the ids are a slice of wider rows
        wide = torch.cat([i, i], 1)
        assert torch.equal(rk.tool_mask(wide[:, :600], *markers, include_end=include_end), got)


def test_a_conversation() -> None:
    #      user  7 8 | reply 9 | tool   7 8 | reply
    ids = [5, 5, 7, 8, 3, 4, 9, 6, 6, 6, 7, 8, 2, 2]
    assert rk.tool_mask(torch.tensor([ids]), BEGIN, END)[0].int().tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1]


def test_padding_behind_a_turn_that_is_not_closed_is_not_marked() -> None:
    ids, mask = np.array([[7, 8, 3, 4, 0, 0], [7, 8, 3, 9, 0, 0]]), np.array([[1, 1, 1, 1, 0, 0]] * 2)
    want = [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0]]
    assert rk.tool_mask(ids, BEGIN, END)[0].tolist() == [False, False, True, True, True, True]
    assert rk.tool_mask(ids, BEGIN, END, mask=mask).astype(int).tolist() == want
    for kind in (torch.bool, torch.int64, torch.float32):
        found = rk.tool_mask(torch.from_numpy(ids), BEGIN, END, mask=torch.from_numpy(mask).to(kind))
        assert found.int().tolist() == want
    with pytest.raises(ValueError, match=r"mask: expected shape \[2, 6\], got \[1, 6\]"):
        rk.tool_mask(ids, BEGIN, END, mask=mask[:1])
    with pytest.raises(TypeError, match="mask: expected an array like ids, got Tensor"):
        rk.tool_mask(ids, BEGIN, END, mask=torch.from_numpy(mask))


def test_padded_and_packed_masks_are_the_same(device: str, rng: np.random.Generator) -> None:
    ids = torch.from_numpy(ids_of(rng, 5 * 300).reshape(5, 300)).to(device)
    lengths = torch.tensor([300, 0, 17, 256, 257], device=device)
    mask = rk.tool_mask(ids, BEGIN, END)
    packed = rk.pack([ids, mask], lengths=lengths)
    got = rk.tool_mask(packed.tensors[0], BEGIN, END, packed.cu_seqlens)
    assert torch.equal(got, packed.tensors[1])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str, device: str) -> None:
    ids, cu = torch.tensor([1, 7, 8, 3, 9, 4, 7, 8], device=device), torch.tensor([0, 4, 8], device=device)
    spans, at = torch.tensor([[1, 3]], device=device), torch.tensor([0, 1, 1], device=device)

    def f(i: Any, c: Any, s: Any, o: Any) -> Any:
        masks = (rk.loss_mask_from_spans(s, o, c, num_tokens=8), rk.tool_mask(i, BEGIN, END, c))
        return rk.shift_labels_packed(i, c, mask=masks[1], cp_rank=1, cp_size=2), *masks

    torch.compiler.reset()
    got = torch.compile(f, backend=backend, fullgraph=True)(ids, cu, spans, at)
    assert all(map(torch.equal, got, f(ids, cu, spans, at)))


def test_opcheck(device: str) -> None:
    rk._call.load()

    ops, check = torch.ops.rl_kernel_native, torch.library.opcheck
    ids, cu = torch.arange(8, device=device), torch.tensor([0, 4, 8], device=device)
    check(ops.shift_labels_packed, (ids, cu, None, 0, 2, True, -100))
    check(ops.loss_mask_from_spans, (ids.view(-1, 2), torch.tensor([0, 2, 4], device=device), None, 16))
    check(ops.tool_mask, (ids, cu, [1, 2], [3], True))


def test_bad_input() -> None:
    ids, cu = torch.arange(8), torch.tensor([0, 4, 8])
    for message, call in {
        "ids: expected dtype int32 or int64, got float32": lambda: rk.shift_labels_packed(ids.float(), cu),
        r"ids: expected shape \[num_tokens\], got \[2, 4\]": lambda: rk.shift_labels_packed(ids.view(2, 4), cu),
        "cu_seqlens: expected an array that speaks DLPack, got NoneType": lambda: rk.shift_labels_packed(ids, None),
        "cu_seqlens: expected 0 first, got 1 at index 0": lambda: rk.shift_labels_packed(ids, cu + 1),
        r"cu_seqlens: expected at most 8 \(the number of tokens\), got 16 at index 2": lambda: rk.shift_labels_packed(
            ids, cu * 2
        ),
        "cu_seqlens: expected multiples of 8 .2 . cp_size, for zigzag., got 4": lambda: rk.shift_labels_packed(
            ids, cu, cp_size=4
        ),
        "ids: expected a number of tokens that is a multiple of 3": lambda: rk.shift_labels_packed(ids, cu, cp_size=3),
        r"cp_rank: expected a number in \[0, 2\), got 2": lambda: rk.shift_labels_packed(ids, cu, cp_rank=2, cp_size=2),
        'cp_layout: expected "zigzag", "contiguous", got \'ring\'': lambda: rk.shift_labels_packed(
            ids, cu, cp_layout="ring"
        ),
        "ignore_index: expected a number that int32 holds": lambda: rk.shift_labels_packed(
            ids.int(), cu, ignore_index=1 << 40
        ),
        r"spans: expected 0 <= begin <= end <= 4": lambda: rk.loss_mask_from_spans(
            torch.tensor([[0, 5]]), torch.tensor([0, 1, 1]), cu, num_tokens=8
        ),
        "span_offsets: expected 0 first, got 5 at index 0": lambda: rk.loss_mask_from_spans(
            torch.zeros(0, 2, dtype=torch.int64), torch.tensor([5]), num_tokens=5
        ),
        r"span_offsets: expected 2 \(the number of spans\) last, got 0 at index 0": lambda: rk.loss_mask_from_spans(
            torch.zeros(2, 2, dtype=torch.int64), torch.tensor([0]), num_tokens=5
        ),
        r"span_offsets: expected at most 1 \(the number of spans\), got 2 at index 1": lambda: rk.loss_mask_from_spans(
            torch.tensor([[0, 5]]), torch.tensor([0, 2]), num_tokens=8
        ),
        "begin: expected 1 to 16 ids, got 0": lambda: rk.tool_mask(ids, [], [1], cu),
        "end: expected a list or tuple of ids, got int": lambda: rk.tool_mask(ids, [1], 1, cu),
        r"ids: expected shape \[num_sequences, num_tokens\] or \[num_tokens\], got \[1, 2, 4\]": lambda: rk.tool_mask(
            ids.view(1, 2, 4), [1], [1]
        ),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()


@pytest.mark.gpu
def test_offsets_that_are_none_touch_nothing_on_a_gpu() -> None:
    ids = torch.arange(16, device="cuda")
    for bad in ([0, 99, 4, 16], [0, -5, 4, 16], [3, 5, 7, 16], [0, 12, 2, 16]):
        cu = torch.tensor(bad, device="cuda")
        for size in (1, 2):
            labels = rk.shift_labels_packed(ids, cu, cp_size=size).tolist()
            assert all(label == -100 or 1 <= label <= 15 for label in labels)
        rk.tool_mask(ids, [1], [2], cu)
        rk.loss_mask_from_spans(torch.tensor([[-5, 99]], device="cuda"), cu, cu, num_tokens=16)
    torch.cuda.synchronize()
