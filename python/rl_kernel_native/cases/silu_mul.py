"""Cases of silu_mul and gelu_mul."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import rl_kernel_native as rk

from ..contract import ROUNDING, row
from ..ops import silu_mul as silu_mul_op
from ._certificate import Arrays as Device
from ._certificate import Case, Rows, dtypes_of, in_words
from ._tools import Arrays, Bench, Cases, Check, round_to, same_bytes, same_results, timed, within_bound, worst_share


class _Gates(NamedTuple):
    """Operands of silu_mul and gelu_mul, float32 arrays with values of ``dtype``, and these functions on them."""

    dtype: str
    activation: str
    gate: np.ndarray  # [rows, columns]
    up: np.ndarray
    dy: np.ndarray

    def _functions(self) -> tuple[Any, Any, dict[str, Any]]:
        if self.activation == "silu":
            return silu_mul_op.silu_mul, silu_mul_op.silu_mul_backward, {}
        return silu_mul_op.gelu_mul, silu_mul_op.gelu_mul_backward, {"approximate": self.activation}

    def results(self, arrays: Arrays) -> dict[str, np.ndarray]:
        gate, up, dy = (arrays.put(a, self.dtype) for a in self[2:])
        gate_up = arrays.put(np.concatenate((self.gate, self.up), -1), self.dtype)
        forward, backward, options = self._functions()
        d_gate, d_up = backward(dy, gate, up, **options)
        found = {
            "y": forward(gate, up, **options),
            "d_gate": d_gate,
            "d_up": d_up,
            "packed": forward(gate_up, round_before_mul=True, **options),
            "d_packed": backward(dy, gate_up, round_before_mul=True, **options),
        }
        return {name: arrays.get(result) for name, result in found.items()}

    def expected(self) -> dict[str, np.ndarray]:
        if self.activation == "silu":
            return silu_mul_op.silu_mul_reference(self.gate, self.up, dy=self.dy)
        return silu_mul_op.gelu_mul_reference(self.gate, self.up, approximate=self.activation, dy=self.dy)


def _gates(dtypes: tuple[str, ...]) -> Iterator[_Gates]:
    random = np.random.default_rng(5)
    # Sizes: one column; an odd number; a block's share of a row plus one vec8; an intermediate size.
    for rows, columns in ((3, 1), (5, 37), (7, 1032), (3, 12288)):
        for dtype, activation in itertools.product(dtypes, ("silu", "tanh", "none")):
            values = (round_to(random.normal(0, d, (rows, columns)).astype(np.float32), dtype) for d in (3, 1, 1))
            yield _Gates(dtype, activation, *values)


def _gates_against_float64(arrays: Arrays) -> Iterator[tuple[str, float]]:
    """Yields (case, error as a share of its bound in contract.py)."""
    for case in _gates(arrays.dtypes):
        got, expected = case.results(arrays), case.expected()
        got["packed d_gate"], got["packed d_up"] = np.split(got["d_packed"], 2, -1)
        rounding = ROUNDING[case.dtype]
        operator = "silu_mul" if case.activation == "silu" else "gelu_mul"
        gate, up, dy = (np.abs(a.astype(np.float64)) for a in (case.gate, case.up, case.dy))
        value = {"act": np.abs(expected["act"]), "gate": gate}
        rounded = value | {"inner": rounding.inner, "inner_least": rounding.least}  # the activation is rounded
        facts = {
            ("y", "y"): value | {"other": up},
            ("d_gate", "d_gate"): {"gate": gate, "other": up * dy},
            ("d_up", "d_up"): value | {"other": dy},
            ("packed", "y"): rounded | {"other": up},
            ("packed d_gate", "d_gate"): {"gate": gate, "other": up * dy},
            ("packed d_up", "d_up"): rounded | {"other": dy},
        }
        for (name, output), of in facts.items():
            bound = row(operator, output).allowed(case.dtype, expected=expected[output], **of)
            yield (
                f"{name} {case.activation} {case.dtype} {list(case.gate.shape)}",
                worst_share(got[name], expected[output], bound),
            )


def checks(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Compares gated activations and gradients with float64, with other places in a batch, and on a GPU with the
    CPU."""
    arrays = Arrays(torch, device)

    def float64() -> tuple[bool, str]:
        case, share = max(_gates_against_float64(arrays), key=lambda item: item[1])
        return within_bound(share, case)

    yield timed("against float64", float64)

    def rows() -> tuple[bool, str]:
        differ = 0
        for case in _gates(arrays.dtypes[-1:]):
            whole = case.results(arrays)
            part = case._replace(gate=case.gate[1:3], up=case.up[1:3], dy=case.dy[1:3]).results(arrays)
            differ += sum(same_bytes(part[name], whole[name][1:3]) for name in whole)
        return differ == 0, f"{differ} values differ between a batch and its rows"

    yield timed("same bytes for any number of rows", rows)
    if device == "cpu":
        return
    cpu = Arrays(torch, "cpu")

    def bytes_of_cpu() -> tuple[bool, str]:
        return same_results((case.results(arrays), case.results(cpu)) for case in _gates(arrays.dtypes))

    yield timed("same bytes as the CPU", bytes_of_cpu)


# ---- certificate ----------------------------------------------------------------------------------------------------


def certified_silu_mul(arrays: Device, quick: bool) -> Iterator[Case]:
    # Sizes: an odd width; the intermediate sizes of Qwen3-8B and Llama 3.1 8B.
    yield from _certified_gates("silu_mul", {}, quick, (37, 12288) if quick else (37, 12288, 14336))


def certified_gelu_mul(arrays: Device, quick: bool) -> Iterator[Case]:
    for approximate in ("tanh", "none"):
        yield from _certified_gates("gelu_mul", {"approximate": approximate}, quick, (37, 10240))  # odd; Gemma 3 4B's


def _certified_gates(operator: str, options: dict[str, Any], quick: bool, widths: tuple[int, ...]) -> Iterator[Case]:
    words = in_words(options)
    for columns in widths:
        for dtype in dtypes_of(quick, columns > 1000):
            row = ((columns,), 1.0)
            rows: Rows = {"gate": ((columns,), 3.0), "up": row}

            def forward(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
                return {"y": getattr(rk, operator)(a["gate"], a["up"], round_before_mul=True, **options)}

            def backward(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
                function = getattr(rk, f"{operator}_backward")
                found = function(a["dy"], a["gate"], a["up"], round_before_mul=True, **options)
                return dict(zip(("d_gate", "d_up"), found, strict=True))

            yield Case(operator, "forward", dtype, (columns,), ("y",), rows, forward, options=words)
            outputs = ("d_gate", "d_up")
            rows = rows | {"dy": row}
            yield Case(operator, "backward", dtype, (columns,), outputs, rows, backward, options=words)


CASES = {
    "silu_mul": Cases(
        checks,
        Bench(
            "gated activations, of one array and of two",
            "silu_mul",
            sizes={"columns": (12288, "of the result; a packed input has twice as many")},
        ),
        certified_silu_mul,
    ),
    "gelu_mul": Cases(None, None, certified_gelu_mul),
}
