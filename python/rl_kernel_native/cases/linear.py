"""Cases of linear."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import rl_kernel_native as rk

from .._arithmetic import arithmetic, current_arithmetic
from .._types import Engine
from ..contract import row
from ..ops import linear as linear_op
from ._certificate import CHUNKS, DTYPES, TOKENS, Case, Rows, chunks_of
from ._certificate import Arrays as Device
from ._tools import Arrays, Bench, Cases, Check, round_to, same_bytes, same_results, timed, within_bound, worst_share


class _Product(NamedTuple):
    """Operands of linear, float32 arrays with values of ``dtype``, and its functions on them."""

    dtype: str
    x: np.ndarray  # [rows, in_features]
    weight: np.ndarray  # [out_features, in_features]
    bias: np.ndarray  # [out_features]
    dy: np.ndarray  # [rows, out_features]

    def results(self, arrays: Arrays, engine: Engine = "auto") -> dict[str, np.ndarray]:
        x, weight, bias, dy = (arrays.put(a, self.dtype) for a in self[1:])
        results = {
            "y": linear_op.linear(x, weight, bias, out_dtype="float32", engine=engine),
            "dx": linear_op.linear_input_grad(dy, weight, engine=engine),
            "dweight": linear_op.linear_weight_grad(dy, x, out_dtype="float32", engine=engine),
            "dbias": linear_op.linear_bias_grad(dy, out_dtype="float32"),
        }
        return {name: arrays.get(result) for name, result in results.items()}

    def over_ranks(self, arrays: Arrays, ranks: int) -> np.ndarray:
        """y from the row-parallel form of a layer with eight segments."""
        shard = self.x.shape[1] // ranks
        parts = [
            linear_op.linear_partial(
                arrays.put(self.x[:, i * shard : (i + 1) * shard], self.dtype),
                arrays.put(self.weight[:, i * shard : (i + 1) * shard], self.dtype),
                k_segments=8,
                first_segment=i * 8 // ranks,
                num_segments=8 // ranks,
            )
            for i in range(ranks)
        ]
        return arrays.get(linear_op.tree_sum(parts, bias=arrays.put(self.bias, self.dtype)))


def _products(dtypes: tuple[str, ...]) -> Iterator[_Product]:
    random = np.random.default_rng(3)
    # Sizes: 1 x 1 x 1; odd sizes, with K below one step of 16; whole tiles with eight segments; rows in two blocks.
    for rows, ins, outs in ((1, 1, 1), (5, 13, 7), (33, 1024, 130), (8200, 24, 17)):
        for dtype in dtypes:
            shapes = ((rows, ins), (outs, ins), (outs,), (rows, outs))
            yield _Product(dtype, *(round_to(random.normal(0, 1, s).astype(np.float32), dtype) for s in shapes))


def _products_against_float64(arrays: Arrays, dtypes: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """Yields (case, error as a share of its bound in contract.py)."""
    unit = current_arithmetic() if arrays.device == "cpu" else "the device's"
    for case in _products(dtypes):
        expected = linear_op.linear_reference(case.x, case.weight, case.bias, dy=case.dy)
        rows = len(case.x)
        facts = {
            "y": {"terms": case.x.shape[1]},
            "dx": {"terms": case.dy.shape[1]},
            "dweight": {"terms": rows},
            "dbias": {"rows": rows},
        }
        for name, got in case.results(arrays).items():
            dtype = case.dtype if name == "dx" else "float32"
            allowed = row("linear", name).allowed(
                dtype, unit=unit, expected=expected[name], scale=expected[f"{name}_scale"], **facts[name]
            )
            yield f"{name} {case.dtype} {list(case.x.shape)}", worst_share(got, expected[name], allowed)


def checks(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Compares products with float64, with other batches and more ranks, and on a GPU with the CPU."""
    arrays = Arrays(torch, device)
    dtypes = arrays.dtypes if device == "cpu" else arrays.dtypes[1:]  # only the CPU multiplies float32

    def float64() -> tuple[bool, str]:
        case, share = max(_products_against_float64(arrays, dtypes), key=lambda item: item[1])
        return within_bound(share, case)

    yield timed("against float64", float64)
    wide = next(case for case in _products(dtypes[-1:]) if case.x.shape[1] == 1024)

    def rows() -> tuple[bool, str]:
        whole = wide.results(arrays)
        differ = 0
        for first, last in ((0, 1), (7, 9), (16, 33)):
            part = wide._replace(x=wide.x[first:last], dy=wide.dy[first:last]).results(arrays)
            differ += sum(same_bytes(part[name], whole[name][first:last]) for name in ("y", "dx"))
        return differ == 0, f"{differ} values differ between a batch and its rows"

    yield timed("same bytes for any number of rows", rows)

    def ranks() -> tuple[bool, str]:
        x, weight, bias = (arrays.put(a, wide.dtype) for a in wide[1:4])
        whole = arrays.get(linear_op.linear(x, weight, bias, k_segments=8, out_dtype="float32"))
        differ = sum(same_bytes(whole, wide.over_ranks(arrays, n)) for n in (1, 2, 4, 8))
        return differ == 0, f"{differ} values differ between 1, 2, 4, 8 ranks and the whole layer"

    yield timed("same bytes on any number of ranks", ranks)
    if capability != (9, 0):
        return
    cpu = Arrays(torch, "cpu")
    for engine in ("auto", "native"):

        def bytes_of_cpu(engine: Engine = engine) -> tuple[bool, str]:
            with arithmetic("sm_90"):  # a GPU always computes with its own arithmetic
                return same_results((case.results(arrays, engine), case.results(cpu)) for case in _products(dtypes))

        yield timed(f"same bytes as the CPU as an sm_90, engine {engine}", bytes_of_cpu)


# ---- certificate ----------------------------------------------------------------------------------------------------


def certified_linear(arrays: Device, quick: bool) -> Iterator[Case]:
    # Sizes: an odd size within a tile; Qwen3-8B's projection to key heads; Qwen3-0.6B's down projection.
    shapes = ((13, 7), (4096, 1024)) if quick else ((13, 7), (1000, 130), (4096, 1024), (3072, 1024))
    for ins, outs in shapes:
        for dtype in arrays.product_dtypes if not quick or ins < 100 else arrays.product_dtypes[:1]:
            weight = {"weight": ((outs, ins), 1.0, dtype)}
            yield Case(
                "linear", "forward", dtype, (ins, outs), ("y",), {"x": ((ins,), 1.0)},
                lambda arrays, a: {"y": rk.linear(a["x"], a["weight"], a["bias"])},
                weight | {"bias": ((outs,), 1.0, dtype)},
            )  # fmt: skip
            yield Case(
                "linear", "backward", dtype, (ins, outs), ("dx",), {"dy": ((outs,), 1.0)},
                lambda arrays, a: {"dx": rk.linear_input_grad(a["dy"], a["weight"])}, weight,
            )  # fmt: skip
    for dtype in arrays.product_dtypes:
        rows: Rows = {"x": ((24,), 1.0), "dy": ((17,), 1.0)}
        yield Case(
            "linear", "backward", dtype, (TOKENS, 24, 17), ("dweight",), rows,
            lambda arrays, a: {"dweight": rk.linear_weight_grad(a["dy"], a["x"], out_dtype="float32")},
            token_sum=TOKENS, ways={CHUNKS: _certified_linear_chunks},
        )  # fmt: skip
    for dtype in DTYPES:
        yield Case(
            "linear", "backward", dtype, (TOKENS, 17), ("dbias",), {"dy": ((17,), 1.0)},
            lambda arrays, a: {"dbias": rk.linear_bias_grad(a["dy"], out_dtype="float32")}, token_sum=TOKENS,
        )  # fmt: skip


def _certified_linear_chunks(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
    main_grad = arrays.wrap(arrays.torch.zeros(17, 24, device=arrays.device))
    for part in chunks_of(arrays, a):
        rk.linear_weight_grad(part["dy"], part["x"], main_grad=main_grad)
    return {"dweight": main_grad}


CASES = {
    "linear": Cases(
        checks,
        Bench(
            "matrix product with a weight, and its gradients",
            "linear",
            sizes={"in_features": (4096, None), "out_features": (4096, None)},
            on_gpu=("bfloat16", "float16"),
            compiles=False,
        ),
        certified_linear,
    ),
}
