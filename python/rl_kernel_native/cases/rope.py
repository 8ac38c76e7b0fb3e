"""Cases of rope."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import rl_kernel_native as rk

from ..contract import ROUNDING, row
from ..ops import rope as rope_op
from ._certificate import Arrays as Device
from ._certificate import Case, Rows, dtypes_of, in_words
from ._tools import Arrays, Bench, Cases, Check, round_to, same_bytes, same_results, timed, within_bound, worst_share


class _Rotation(NamedTuple):
    """Operands of rope, float32 arrays with values of ``dtype``, and its functions on them."""

    dtype: str
    options: dict[str, Any]
    q: np.ndarray  # [tokens, num_q_heads, head_dim]
    k: np.ndarray
    cos: np.ndarray  # [max_position, rotary_dim / 2]
    sin: np.ndarray
    position_ids: np.ndarray  # [tokens]

    def results(self, arrays: Arrays) -> dict[str, np.ndarray]:
        q, k = arrays.put(self.q, self.dtype), arrays.put(self.k, self.dtype)
        constants = (arrays.put(self.cos), arrays.put(self.sin))
        options = {"position_ids": arrays.put(self.position_ids), **self.options}
        found = dict(zip(("q", "k"), rope_op.rope(q, k, *constants, **options), strict=True))
        found |= dict(zip(("dq", "dk"), rope_op.rope_backward(q, k, *constants, **options), strict=True))
        return {name: arrays.get(result) for name, result in found.items()}


def _rotations(dtypes: tuple[str, ...], device: str) -> Iterator[_Rotation]:
    random = np.random.default_rng(5)
    # Sizes: one pair; odd widths, which allow no vector loads; heads of 128; half of a head. The last size occupies
    # every thread of a GPU, for each launch plan.
    most = 250 if device == "cpu" else 2500
    for i, (tokens, heads, dim, rest) in enumerate(((3, 1, 2, 0), (5, 3, 18, 1), (33, 8, 128, 0), (most, 40, 64, 64))):
        for j, dtype in enumerate(dtypes):
            options: dict[str, Any] = {"interleaved": (i + j) % 2 == 0, "partial_dim": dim}
            if (i + j) % 3 == 0:
                options["intermediate"] = "input"
            angles = np.arange(700)[:, None] / 100.0 ** (np.arange(dim // 2) / (dim // 2))
            q, k = (
                round_to(random.normal(0, 1, (tokens, n, dim + rest)).astype(np.float32), dtype) for n in (heads, 1)
            )
            cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
            yield _Rotation(dtype, options, q, k, cos, sin, random.integers(0, 700, tokens))


def _rotations_against_float64(arrays: Arrays) -> Iterator[tuple[str, float]]:
    """Yields (case, error as a share of its bound in contract.py)."""
    for case in _rotations(arrays.dtypes, arrays.device):
        got = case.results(arrays)
        options = {name: value for name, value in case.options.items() if name != "intermediate"}
        rounding = ROUNDING[case.dtype]
        rounds = "intermediate" in case.options
        facts: dict[str, Any] = {"inner": rounding.inner, "inner_least": rounding.least} if rounds else {}
        for transposed, names in ((False, ("q", "k")), (True, ("dq", "dk"))):
            expected = rope_op.rope_reference(
                case.q, case.k, case.cos, case.sin, position_ids=case.position_ids, transposed=transposed, **options
            )
            for name, of in zip(names, ("q", "k"), strict=True):
                scale = expected[f"{of}_scale"]
                bound = row("rope", name).allowed(case.dtype, expected=expected[of], scale=scale, **facts)
                yield f"{name} {case.dtype} {list(case.q.shape)}", worst_share(got[name], expected[of], bound)


def checks(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Compares rotations and their gradients with float64, with the same rows in other batches, and on a GPU with the
    CPU."""
    arrays = Arrays(torch, device)

    def float64() -> tuple[bool, str]:
        case, share = max(_rotations_against_float64(arrays), key=lambda item: item[1])
        return within_bound(share, case)

    yield timed("against float64", float64)

    def tokens() -> tuple[bool, str]:
        differ = 0
        for case in _rotations(arrays.dtypes[-1:], device):
            whole = case.results(arrays)
            part = case._replace(**{name: getattr(case, name)[1:3] for name in ("q", "k", "position_ids")})
            differ += sum(same_bytes(a, whole[name][1:3]) for name, a in part.results(arrays).items())
        return differ == 0, f"{differ} values differ between a batch and its tokens"

    yield timed("same bytes for any number of tokens", tokens)
    if device == "cpu":
        return
    cpu = Arrays(torch, "cpu")

    def bytes_of_cpu() -> tuple[bool, str]:
        return same_results(
            (case.results(arrays), case.results(cpu)) for case in _rotations(arrays.dtypes, arrays.device)
        )

    yield timed("same bytes as the CPU", bytes_of_cpu)


# ---- certificate ----------------------------------------------------------------------------------------------------


def certified_rope(arrays: Device, quick: bool) -> Iterator[Case]:
    # Sizes: an odd width, which allows no vector loads; heads of Qwen3-8B; half of a head.
    odd: tuple[Any, ...] = ((3, 1, 18), 16, {"interleaved": True, "intermediate": "input"})
    qwen: tuple[Any, ...] = ((32, 8, 128), 128, {})
    half: tuple[Any, ...] = ((5, 1, 64), 32, {})
    for (heads, kv_heads, dim), rotary, options in (odd, qwen) if quick else (odd, qwen, half):
        for dtype in dtypes_of(quick, heads == 32):
            rows: Rows = {
                "q": ((heads, dim), 1.0), "k": ((kv_heads, dim), 1.0), "position_ids": (None, 700),
            }  # fmt: skip
            table = ((700, rotary // 2), 0.5, "float32")
            given = {"partial_dim": rotary, **options}
            for direction, outputs in (("forward", ("q", "k")), ("backward", ("dq", "dk"))):

                def call(
                    arrays: Device,
                    a: Mapping[str, Any],
                    given: Any = given,
                    backward: bool = direction == "backward",
                    outputs: tuple[str, ...] = outputs,
                ) -> Mapping[str, Any]:
                    function = rk.rope_backward if backward else rk.rope
                    found = function(a["q"], a["k"], a["cos"], a["sin"], position_ids=a["position_ids"], **given)
                    return dict(zip(outputs, found, strict=True))

                shape = (heads, kv_heads, dim)
                tables = {"cos": table, "sin": table}
                words = in_words(given)
                yield Case("rope", direction, dtype, shape, outputs, rows, call, tables, options=words)


CASES = {
    "rope": Cases(
        checks,
        Bench(
            "rotary position embedding of queries and keys",
            "rope",
            rows_are="tokens",
            sizes={"q_heads": (32, None), "kv_heads": (8, None), "head_dim": (128, None)},
        ),
        certified_rope,
    ),
}
