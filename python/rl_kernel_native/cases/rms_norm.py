"""Cases of rms_norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import rl_kernel_native as rk

from ..contract import ROUNDING, row
from ..ops import rms_norm as rms_norm_op
from ._certificate import CHUNKS, DTYPES, TOKENS, Case, Rows, chunks_of, dtypes_of, in_words
from ._certificate import Arrays as Device
from ._tools import Arrays, Bench, Cases, Check, round_to, same_bytes, same_results, timed, within_bound, worst_share


class _Norm(NamedTuple):
    """Operands of rms_norm, float32 arrays with values of ``dtype``, and its functions on them."""

    dtype: str
    options: dict[str, Any]
    x: np.ndarray  # [rows, columns]
    residual: np.ndarray
    dy: np.ndarray
    d_new_residual: np.ndarray
    weight: np.ndarray  # [columns]

    def results(self, arrays: Arrays) -> dict[str, np.ndarray]:
        x, residual, dy, third, weight = (arrays.put(a, self.dtype) for a in self[2:])
        y, h, rstd = rms_norm_op.rms_norm(x, weight, _NORM_EPS, residual=residual, return_rstd=True, **self.options)
        dx, dweight = rms_norm_op.rms_norm_backward(
            dy, h, weight, _NORM_EPS, rstd=rstd, d_new_residual=third, dweight_dtype="float32", **self.options
        )
        found = {"y": y, "new_residual": h, "rstd": rstd, "dx": dx, "dweight": dweight}
        return {name: arrays.get(result) for name, result in found.items()}


_NORM_EPS = 1e-6


def _norms(dtypes: tuple[str, ...]) -> Iterator[_Norm]:
    random = np.random.default_rng(4)
    options: tuple[dict[str, Any], ...] = ({}, {"round_before_weight": True}, {"weight_offset": 1.0})
    # Sizes: one column; an odd number; heads of 128; a hidden size; rows of two blocks.
    for i, (rows, columns) in enumerate(((3, 1), (5, 37), (200, 128), (33, 4096), (8200, 24))):
        for j, dtype in enumerate(dtypes):
            shapes = ((rows, columns),) * 4 + ((columns,),)
            values = (round_to(random.normal(0, 1, s).astype(np.float32), dtype) for s in shapes)
            yield _Norm(dtype, options[(i + j) % 3], *values)


def _norms_against_float64(arrays: Arrays) -> Iterator[tuple[str, float]]:
    """Yields (case, error as a share of its bound in contract.py)."""
    for case in _norms(arrays.dtypes):
        got = case.results(arrays)
        offset = case.options.get("weight_offset", 0.0)
        expected = rms_norm_op.rms_norm_reference(
            got["new_residual"], case.weight, _NORM_EPS, weight_offset=offset, dy=case.dy,
            d_new_residual=case.d_new_residual,
        )  # fmt: skip
        rows, columns = case.x.shape
        inner: dict[str, Any] = {}
        if case.options.get("round_before_weight"):
            inner = {"inner": ROUNDING[case.dtype].inner, "inner_least": ROUNDING[case.dtype].least}
        facts: dict[str, dict[str, Any]] = {
            "y": {"other_scale": expected["y_other_scale"], **inner},
            "rstd": {},
            "dx": {"scale": expected["dx_scale"]},
            "dweight": {
                "rows": rows,
                "scale": expected["dweight_scale"],
                "other_scale": expected["dweight_other_scale"],
                **inner,
            },
        }
        for name, of in facts.items():
            dtype = case.dtype if name in ("y", "dx") else "float32"
            bound = row("rms_norm", name).allowed(dtype, expected=expected[name], columns=columns, **of)
            yield f"{name} {case.dtype} {list(case.x.shape)}", worst_share(got[name], expected[name], bound)


def checks(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Compares norms and gradients with float64, with other batches, and on a GPU with the CPU."""
    arrays = Arrays(torch, device)

    def float64() -> tuple[bool, str]:
        case, share = max(_norms_against_float64(arrays), key=lambda item: item[1])
        return within_bound(share, case)

    yield timed("against float64", float64)

    def rows() -> tuple[bool, str]:
        differ = 0
        for case in _norms(arrays.dtypes[-1:]):
            whole = case.results(arrays)
            part = case._replace(**{name: getattr(case, name)[1:3] for name in _Norm._fields[2:6]}).results(arrays)
            differ += sum(same_bytes(part[n], whole[n][1:3]) for n in ("y", "new_residual", "rstd", "dx"))
        return differ == 0, f"{differ} values differ between a batch and its rows"

    yield timed("same bytes for any number of rows", rows)
    if device == "cpu":
        return
    cpu = Arrays(torch, "cpu")

    def bytes_of_cpu() -> tuple[bool, str]:
        return same_results((case.results(arrays), case.results(cpu)) for case in _norms(arrays.dtypes))

    yield timed("same bytes as the CPU", bytes_of_cpu)


# ---- certificate ----------------------------------------------------------------------------------------------------


_EPS = 1e-6


def certified_rms_norm(arrays: Device, quick: bool) -> Iterator[Case]:
    # Sizes: an odd width; a head; the hidden sizes of Qwen3-8B and 14B. Options: the roundings of Llama and Qwen, or
    # the weight offset of Gemma.
    for columns in (1003, 4096) if quick else (1, 128, 1003, 4096, 5120):
        options: dict[str, Any] = {"weight_offset": 1.0} if columns == 1003 else {"round_before_weight": True}
        for dtype in dtypes_of(quick, columns == 4096):
            yield from _certified_rms_norm(columns, dtype, options)
    for dtype in DTYPES:
        rows: Rows = {"dy": ((24,), 1.0), "h": ((24,), 1.0)}

        def dweight(arrays: Device, a: Mapping[str, Any], main_grad: Any = None) -> Mapping[str, Any]:
            kind: dict[str, Any] = {} if main_grad is not None else {"dweight_dtype": "float32"}
            found = rk.rms_norm_backward(
                a["dy"], a["h"], a["weight"], _EPS, main_grad=main_grad, return_dx=False, **kind
            )
            return {"dweight": found[1] if main_grad is None else main_grad}

        def chunked(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
            main_grad = arrays.wrap(arrays.torch.zeros(24, device=arrays.device))
            for part in chunks_of(arrays, a):
                dweight(arrays, part, main_grad)
            return {"dweight": main_grad}

        yield Case(
            "rms_norm", "backward", dtype, (TOKENS, 24), ("dweight",), rows, dweight,
            {"weight": ((24,), 1.0, dtype)}, TOKENS, {CHUNKS: chunked},
        )  # fmt: skip


def _certified_rms_norm(columns: int, dtype: str, options: dict[str, Any]) -> Iterator[Case]:
    row = (columns,)
    weight = {"weight": (row, 1.0, dtype)}

    def forward(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
        found = rk.rms_norm(a["x"], a["weight"], _EPS, residual=a["residual"], return_rstd=True, **options)
        return dict(zip(("y", "new_residual", "rstd"), found, strict=True))

    def backward(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
        more = {"d_new_residual": a["d_new_residual"], "return_dweight": False}
        return {"dx": rk.rms_norm_backward(a["dy"], a["h"], a["weight"], _EPS, **more, **options)[0]}

    outputs, words = ("y", "new_residual", "rstd"), in_words(options)
    rows: Rows = {"x": (row, 1.0), "residual": (row, 1.0)}
    yield Case("rms_norm", "forward", dtype, row, outputs, rows, forward, weight, options=words)
    rows = dict.fromkeys(("dy", "h", "d_new_residual"), (row, 1.0))
    yield Case("rms_norm", "backward", dtype, row, ("dx",), rows, backward, weight, options=words)


CASES = {
    "rms_norm": Cases(
        checks,
        Bench("root-mean-square norm, with a residual and without", "rms_norm", sizes={"columns": (4096, None)}),
        certified_rms_norm,
    ),
}
