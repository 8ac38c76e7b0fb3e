"""Cases of the operators over sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import rl_kernel_native as rk

from ..contract import row
from ..ops import pack as pack_op
from ..ops import preference_loss as preference_loss_op
from ..ops import sequence_logprob as sequence_logprob_op
from ..ops import shift_labels_packed as labels_op
from ._certificate import BY_BATCH, BY_SEQUENCE
from ._tools import Arrays, Bench, Buffers, Cases, Check, Pass, same_bytes, timed, within_bound, worst_share


class _Ragged(NamedTuple):
    """Sequences of several lengths, padded: log-probabilities, masks and ids."""

    logprob: np.ndarray  # [rows, columns]
    mask: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray  # [rows]


def _ragged() -> Iterator[_Ragged]:
    random = np.random.default_rng(6)
    # Sizes: one token; fewer tokens than one lane sums; more than a chunk of 2,048; many rows.
    for rows, columns in ((1, 1), (5, 37), (4, 5000), (300, 64)):
        logprob = -random.exponential(1, (rows, columns)).astype(np.float32)
        ids = random.integers(0, 4, (rows, columns))
        yield _Ragged(logprob, random.random((rows, columns)) < 0.7, ids, random.integers(0, columns + 1, rows))


def _bytes_on_device_and_cpu(compute: Callable[[Arrays, _Ragged], list[Any]], arrays: Arrays) -> tuple[bool, str]:
    cpu, differ, total = Arrays(arrays.torch, "cpu"), 0, 0
    for case in _ragged():
        here, there = ([a.get(x) for x in compute(a, case)] for a in (arrays, cpu))
        differ += sum(same_bytes(x, y) for x, y in zip(here, there, strict=True))
        total += sum(x.size for x in here)
    return differ == 0, f"{differ} of {total} values differ"


def _packed(arrays: Arrays, case: _Ragged) -> list[Any]:
    given = [arrays.put(x) for x in (case.logprob, case.mask, case.ids)]
    by_length = pack_op.pack(given, arrays.put(case.lengths))
    by_mask = pack_op.pack(given, mask=given[1], fill_value=1)
    columns = case.logprob.shape[1]
    back = pack_op.unpack(by_mask.tensors, by_mask.cu_seqlens, columns, positions=by_mask.positions)
    return [*by_length.tensors, by_length.cu_seqlens, *by_mask.tensors, by_mask.positions, *back]


def pack(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Compares packing and unpacking with NumPy, and on a GPU with the CPU's bytes."""
    arrays = Arrays(torch, device)

    def reference() -> tuple[bool, str]:
        differ = 0
        for case in _ragged():
            got = pack_op.pack(arrays.put(case.logprob), mask=arrays.put(case.mask))
            want = pack_op.pack_reference(case.logprob, mask=case.mask)
            differ += same_bytes(arrays.get(got.tensors), want["packed"])
            columns = case.logprob.shape[1]
            back = pack_op.unpack(got.tensors, got.cu_seqlens, columns, positions=got.positions)
            differ += same_bytes(arrays.get(back), np.where(case.mask, case.logprob, np.float32(0)))
        return differ == 0, f"{differ} values differ from the reference"

    yield timed("against the reference", reference)
    if device != "cpu":
        yield timed("same bytes as the CPU", lambda: _bytes_on_device_and_cpu(_packed, arrays))


def sequence_logprob(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Compares sums with float64, packed with padded, and on a GPU with the CPU's bytes."""
    arrays = Arrays(torch, device)

    def sums(a: Arrays, case: _Ragged) -> list[Any]:
        exists = np.arange(case.mask.shape[1])[None] < case.lengths[:, None]
        logprob, mask = a.put(case.logprob), a.put(case.mask & exists)
        packed = pack_op.pack([logprob, mask], a.put(case.lengths))
        padded = sequence_logprob_op.sequence_logprob(logprob, mask)
        of_packed = sequence_logprob_op.sequence_logprob(packed.tensors[0], packed.tensors[1], packed.cu_seqlens)
        gradient = sequence_logprob_op.sequence_logprob_backward(padded.sum, mask, num_tokens=case.mask.shape[1])
        return [padded.sum, padded.count, of_packed.sum, gradient]

    def float64() -> tuple[bool, str]:
        worst = 0.0
        for case in _ragged():
            exists = np.arange(case.mask.shape[1])[None] < case.lengths[:, None]
            want = sequence_logprob_op.sequence_logprob_reference(case.logprob, case.mask & exists)
            terms = case.mask.shape[1]
            allowed = row("sequence_logprob", "sum").allowed(expected=want["sum"], terms=terms, scale=want["scale"])
            worst = max(worst, worst_share(arrays.get(sums(arrays, case)[0]), want["sum"], allowed))
        return within_bound(worst)

    yield timed("against float64", float64)

    def packed() -> tuple[bool, str]:
        differ = 0
        for case in _ragged():
            padded, _, of_packed, _ = sums(arrays, case)
            differ += same_bytes(arrays.get(padded), arrays.get(of_packed))
        return differ == 0, f"{differ} sums differ between padded and packed"

    yield timed("same bytes padded and packed", packed)
    if device != "cpu":
        yield timed("same bytes as the CPU", lambda: _bytes_on_device_and_cpu(sums, arrays))


def preference_loss(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Compares losses with float64, and on a GPU with the CPU's bytes."""
    arrays = Arrays(torch, device)
    kinds: tuple[Any, ...] = ("dpo", "hinge", "ipo", "nca_pair", "aot", "apo_zero", "discopop", "kto", "simpo", "orpo")

    def sides(case: _Ragged) -> list[np.ndarray]:
        sums = case.logprob[:, :20].sum(1, dtype=np.float32)
        return [sums, np.roll(sums, 1) * np.float32(1.1), sums - 1, sums * np.float32(0.9)]

    def losses(a: Arrays, case: _Ragged) -> list[Any]:
        given = [a.put(x) for x in sides(case)]
        found: list[Any] = []
        for kind in kinds:
            found += preference_loss_op.preference_loss(*given[: 2 if kind in ("simpo", "orpo") else 4], kind=kind)[:3]
        return found

    def float64() -> tuple[bool, str]:
        worst = 0.0
        for case in _ragged():
            got = losses(arrays, case)
            for i, kind in enumerate(kinds):
                given = sides(case)[: 2 if kind in ("simpo", "orpo") else 4]
                want = preference_loss_op.preference_loss_reference(*given, kind=kind)["losses"]
                largest = max(np.abs(x).max(initial=0) for x in (want, *given))
                allowed = row("preference_loss", "losses").allowed(expected=want, largest=largest)
                worst = max(worst, worst_share(arrays.get(got[3 * i]), want, allowed))
        return within_bound(worst)

    yield timed("against float64", float64)
    if device != "cpu":
        yield timed("same bytes as the CPU", lambda: _bytes_on_device_and_cpu(losses, arrays))


def shift_labels_packed(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Compares labels and masks of turns with the reference."""
    arrays = Arrays(torch, device)

    def reference() -> tuple[bool, str]:
        differ = 0
        for case in _ragged():
            ids = case.ids.reshape(-1)
            edges = np.concatenate([[0], np.sort(case.lengths)]) * case.ids.shape[0]
            cu = np.unique(np.minimum(edges, len(ids)))
            got = labels_op.shift_labels_packed(arrays.put(ids), arrays.put(cu))
            differ += int((arrays.get(got) != labels_op.shift_labels_packed_reference(ids, cu)).sum())
            turns = labels_op.tool_mask(arrays.put(case.ids), [1, 2], [3])
            differ += int((arrays.get(turns) != labels_op.tool_mask_reference(case.ids, [1, 2], [3])).sum())
        return differ == 0, f"{differ} values differ from the reference"

    yield timed("against the reference", reference)


# ---- bench -----------------------------------------------------------------------------------------------------------


def _pack_passes(b: Buffers) -> tuple[list[Any], list[Pass]]:
    torch, rows, columns, device = b.torch, b.rows, b.columns, b.device
    lengths = torch.randint(0, columns + 1, (rows,), generator=torch.Generator().manual_seed(0)).to(device)
    kept = torch.arange(columns, device=device)[None] < lengths[:, None]
    total = int(lengths.sum())
    size = b.dtype.itemsize
    count = b.count(rows * columns * size)
    buffers = [torch.randn(rows, columns, device=device).to(b.dtype) for _ in range(count)]
    packed = rk.pack(buffers[0], lengths=lengths, max_tokens=total)

    def scattered(x: Any) -> Any:
        back = torch.zeros_like(x)
        back[kept] = packed.tensors
        return back

    ours = {"rk": lambda x: rk.pack(x, lengths=lengths, max_tokens=total).tensors, "torch x[mask]": lambda x: x[kept]}
    back = {"rk": lambda x: rk.unpack(packed.tensors, packed.cu_seqlens, columns), "torch y[mask] = x": scattered}
    return buffers, [
        Pass("pack", 2 * total * size, ours),
        Pass("unpack", (total + rows * columns) * size, back),
    ]


def _sum_passes(b: Buffers) -> tuple[list[Any], list[Pass]]:
    torch, rows, columns, device = b.torch, b.rows, b.columns, b.device
    size = rows * columns * (b.dtype.itemsize + 1)
    count = b.count(size)
    buffers = [
        (-torch.rand(rows, columns, device=device).to(b.dtype), torch.rand(rows, columns, device=device) < 0.7)
        for _ in range(count)
    ]

    def eager(x: Any) -> Any:
        return torch.where(x[1], x[0], 0).sum(1, dtype=torch.float32), x[1].sum(1)

    peers = {"rk": lambda x: rk.sequence_logprob(*x), "torch": eager}
    return buffers, [Pass("forward", size, peers, compiles="torch")]


def _loss_passes(b: Buffers) -> tuple[list[Any], list[Pass]]:
    torch, rows, device = b.torch, b.rows, b.device
    buffers = [tuple(torch.randn(rows, device=device) * 9 - 30 for _ in range(4)) for _ in range(b.count(16 * rows))]

    def eager(x: Any) -> Any:
        w, l = x[0] - x[2], x[1] - x[3]  # noqa: E741
        losses = -torch.nn.functional.logsigmoid(0.1 * (w - l))
        return losses, 0.1 * w.detach(), 0.1 * l.detach(), losses.mean()

    def trained(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step(x: Any) -> Any:
            leaves = [t.detach().requires_grad_() for t in x[:2]]
            return torch.autograd.grad(function((*leaves, *x[2:]))[0].sum(), leaves)

        return step

    def ours(x: Any) -> Any:
        *of_pairs, metrics = rk.preference_loss(*x)
        return *of_pairs, metrics.vector  # the first is the loss

    return buffers, [
        Pass("dpo, forward", 4 * 9 * rows, {"rk": ours, "torch": eager}, compiles="torch"),
        Pass("dpo, forward + backward", 4 * 13 * rows, {"rk": trained(ours), "torch": trained(eager)}),
    ]


def _label_passes(b: Buffers) -> tuple[list[Any], list[Pass]]:
    torch, rows, columns, device = b.torch, b.rows, b.columns, b.device
    cu = torch.arange(0, rows * columns + 1, columns, device=device)
    buffers = [torch.randint(0, 1000, (rows * columns,), device=device) for _ in range(4)]

    def eager(x: Any) -> Any:
        labels = torch.roll(x, -1)
        labels[cu[1:] - 1] = -100
        return labels

    peers = {"rk": lambda x: rk.shift_labels_packed(x, cu), "torch": eager}
    return buffers, [Pass("labels", 16 * rows * columns, peers)]


def _bench(
    about: str, passes: Callable[[Buffers], tuple[list[Any], list[Pass]]], only_dtype: str | None = None
) -> Bench:
    sizes = {"columns": (2048, "tokens of a sequence")}
    return Bench(about, rows_are="sequences", sizes=sizes, only_dtype=only_dtype, passes=passes)


CASES = {
    "pack": Cases(
        pack, _bench("padded arrays to packed ones and back", _pack_passes), "moves bytes and computes nothing"
    ),
    "preference_loss": Cases(
        preference_loss,
        Bench("losses of preference pairs", rows_are="pairs", only_dtype="float32", passes=_loss_passes),
        BY_BATCH + " but for pairs, whose bytes its own tests compare in other batches and strides",
    ),
    "sequence_logprob": Cases(
        sequence_logprob, _bench("log-probabilities summed over sequences", _sum_passes), BY_SEQUENCE
    ),
    "shift_labels_packed": Cases(
        shift_labels_packed,
        _bench("labels of packed sequences", _label_passes, only_dtype="int64"),
        "integers: its own tests compare them with the definition, byte for byte",
    ),
}
