"""Cases of embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import rl_kernel_native as rk

from ..contract import row
from ..ops import embedding as embedding_op
from ._certificate import CHUNKS, DTYPES, TOKENS, Case, Rows, chunks_of, dtypes_of
from ._certificate import Arrays as Device
from ._tools import Arrays, Bench, Cases, Check, round_to, same_bytes, same_results, timed, within_bound, worst_share


class _Table(NamedTuple):
    """Operands of embedding, float32 arrays with values of ``dtype``, and its functions on them."""

    dtype: str
    options: dict[str, Any]
    ids: np.ndarray  # [tokens]
    weight: np.ndarray  # [rows, columns]
    dy: np.ndarray  # [tokens, columns]

    def results(self, arrays: Arrays) -> dict[str, np.ndarray]:
        ids, weight, dy = arrays.put(self.ids), arrays.put(self.weight, self.dtype), arrays.put(self.dy, self.dtype)
        y = embedding_op.embedding(ids, weight, **self.options)
        dweight = embedding_op.embedding_backward(dy, ids, len(self.weight), dweight_dtype="float32", **self.options)
        return {"y": arrays.get(y), "dweight": arrays.get(dweight)}


def _tables(dtypes: tuple[str, ...]) -> Iterator[_Table]:
    random = np.random.default_rng(6)
    # Sizes: one column; odd widths, which allow no vector loads; several slices and blocks of tokens; a shard's rows.
    for tokens, rows, columns, start in ((3, 5, 1, 0), (70, 9, 33, 0), (9000, 300, 64, 0), (600, 20, 1032, 10)):
        for dtype in dtypes:
            ids = (40 + rows) ** random.random(tokens) - 1  # a few ids occur often
            options: dict[str, Any] = {"vocab_start": start, "vocab_size": start + rows, "padding_idx": start + 2}
            weight, dy = (round_to(random.normal(0, 1, (n, columns)).astype(np.float32), dtype) for n in (rows, tokens))
            yield _Table(dtype, options, ids.astype(np.int64), weight, dy)


def _tables_against_float64(arrays: Arrays) -> Iterator[tuple[str, float]]:
    """Yields (case, error as a share of its bound in contract.py). Forward rows must be exact."""
    for case in _tables(arrays.dtypes):
        got = case.results(arrays)
        want = embedding_op.embedding_reference(case.ids, case.weight, dy=case.dy, **case.options)
        exact = np.array_equal(got["y"].astype(np.float64), want["y"], equal_nan=True)
        yield f"y {case.dtype} {list(case.weight.shape)}", 0.0 if exact else np.inf
        facts: dict[str, Any] = {"expected": want["dweight"], "rows": len(case.ids), "scale": want["dweight_scale"]}
        allowed = row("embedding", "dweight").allowed(**facts)
        yield (
            f"dweight {case.dtype} {list(case.weight.shape)}",
            worst_share(got["dweight"], want["dweight"], allowed),
        )


def checks(torch: Any, device: str, _: tuple[int, int] | None) -> Iterator[Check]:
    """Compares rows of tables and their gradients with float64, with shards, and on a GPU with the CPU."""
    arrays = Arrays(torch, device)

    def float64() -> tuple[bool, str]:
        case, share = max(_tables_against_float64(arrays), key=lambda item: item[1])
        return within_bound(share, case)

    yield timed("against float64", float64)

    def shards() -> tuple[bool, str]:
        differ = 0
        for case in _tables(arrays.dtypes[-1:]):
            whole = case.results(arrays)
            part = case._replace(weight=case.weight[1:3])
            part.options["vocab_start"] += 1
            differ += same_bytes(part.results(arrays)["dweight"], whole["dweight"][1:3])
        return differ == 0, f"{differ} values differ between a table and its shards"

    yield timed("same bytes for any shard", shards)
    if device == "cpu":
        return
    cpu = Arrays(torch, "cpu")

    def bytes_of_cpu() -> tuple[bool, str]:
        return same_results((case.results(arrays), case.results(cpu)) for case in _tables(arrays.dtypes))

    yield timed("same bytes as the CPU", bytes_of_cpu)


# ---- certificate ----------------------------------------------------------------------------------------------------


def certified_embedding(arrays: Device, quick: bool) -> Iterator[Case]:
    # Sizes: an odd width; the hidden sizes of Qwen3-0.6B and 8B. The table has 300 rows, whose bits are copied.
    for columns in (37, 1024) if quick else (37, 1024, 4096):
        for dtype in dtypes_of(quick, columns > 1000):
            yield Case(
                "embedding", "forward", dtype, (columns,), ("y",), {"ids": (None, 300)},
                lambda arrays, a: {"y": rk.embedding(a["ids"], a["weight"])},
                {"weight": ((300, columns), 1.0, dtype)},
            )  # fmt: skip
    for dtype in DTYPES:
        rows: Rows = {"dy": ((24,), 1.0), "ids": (None, 7)}

        def dweight(arrays: Device, a: Mapping[str, Any], main_grad: Any = None) -> Mapping[str, Any]:
            if main_grad is not None:
                return {"dweight": rk.embedding_backward(a["dy"], a["ids"], 7, main_grad=main_grad)}
            return {"dweight": rk.embedding_backward(a["dy"], a["ids"], 7, dweight_dtype="float32")}

        def chunked(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
            main_grad = arrays.wrap(arrays.torch.zeros(7, 24, device=arrays.device))
            for part in chunks_of(arrays, a):
                dweight(arrays, part, main_grad)
            return {"dweight": main_grad}

        yield Case(
            "embedding", "backward", dtype, (TOKENS, 7, 24), ("dweight",), rows, dweight,
            token_sum=TOKENS, ways={CHUNKS: chunked},
        )  # fmt: skip


CASES = {
    "embedding": Cases(
        checks,
        Bench(
            "rows of a table by token ids, and the table's gradient",
            "embedding",
            rows_are="tokens",
            sizes={"vocab": (128256, None), "columns": (4096, None)},
        ),
        certified_embedding,
    ),
}
