"""Self-test of attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .._arithmetic import arithmetic
from ..contract import row
from ..ops import attention as attention_op
from ..ops import kv_cache_append as cache_op
from ..reference.attention import attention_facts
from ._tools import Arrays, Bench, Cases, Check, round_to, same_bytes, same_results, timed, within_bound, worst_share


class _Attentions(NamedTuple):
    """Operands of attention, float32 arrays with values of ``dtype``, and its functions on them."""

    dtype: str
    options: dict[str, Any]
    q: np.ndarray  # [batch, queries, heads, head_dim]
    k: np.ndarray  # [batch, keys, kv_heads, head_dim]
    v: np.ndarray
    dout: np.ndarray

    def results(self, arrays: Arrays) -> dict[str, np.ndarray]:
        q, k, v, dout = (arrays.put(a, self.dtype) for a in self[2:])
        options = {**self.options, "exp": "portable"}  # the same bytes everywhere
        out, lse = attention_op.attention(q, k, v, return_lse=True, **options)
        grads = attention_op.attention_backward(dout, q, k, v, out, lse, **options)
        found = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
        return {name: arrays.get(result) for name, result in found.items()}

    def expected(self) -> dict[str, np.ndarray]:
        return attention_op.attention_reference(self.q, self.k, self.v, dout=self.dout, **self.options)


def _attentions(dtypes: tuple[str, ...]) -> Iterator[_Attentions]:
    random = np.random.default_rng(6)
    # Decode; less than a block of keys; a chunk over a block; a window. Grouped heads, and widths of models.
    for queries, keys, heads, kv_heads, head_dim, window in (
        (1, 40, 4, 2, 64, None), (9, 9, 3, 1, 8, None), (33, 150, 4, 2, 128, None), (20, 20, 2, 2, 80, 6)
    ):  # fmt: skip
        for dtype in dtypes:
            q, k, v, dout = (
                round_to(random.normal(0, 1, (3, tokens, count, head_dim)).astype(np.float32), dtype)
                for tokens, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
            )
            yield _Attentions(dtype, {"window_size": window}, q, k, v, dout)


def _attentions_against_float64(arrays: Arrays) -> Iterator[tuple[str, float]]:
    """(case, error as a share of its bound in contract.py)."""
    for case in _attentions(arrays.dtypes):
        expected, shape = case.expected(), case.q.shape
        facts = attention_facts(case.q, case.k, case.v, case.dout, case.dtype, **case.options)
        for name, got in case.results(arrays).items():
            allowed = row("attention", name).allowed(case.dtype, expected=expected[name], **facts[name])
            yield f"{name} of {case.dtype} {list(shape)}", worst_share(got, expected[name], allowed)


def checks(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Attention and its gradients against float64, against itself in other batches, and on a GPU against the CPU."""
    arrays = Arrays(torch, device)

    def float64() -> tuple[bool, str]:
        case, share = max(_attentions_against_float64(arrays), key=lambda item: item[1])
        return within_bound(share, case)

    yield timed("against float64", float64)

    def sequences() -> tuple[bool, str]:
        differ = 0
        for case in _attentions(arrays.dtypes[-1:]):
            whole = case.results(arrays)
            part = case._replace(**{name: getattr(case, name)[1:2] for name in ("q", "k", "v", "dout")})
            differ += sum(same_bytes(a, whole[name][1:2]) for name, a in part.results(arrays).items())
        return differ == 0, f"{differ} values differ between a batch and its sequences"

    yield timed("same bytes for any number of sequences", sequences)
    if device == "cpu":
        return
    cpu = Arrays(torch, "cpu")

    unit = "sm_90" if capability == (9, 0) else "ieee"

    def bytes_of_cpu() -> tuple[bool, str]:
        with arithmetic(unit):
            return same_results((case.results(arrays), case.results(cpu)) for case in _attentions(arrays.dtypes))

    yield timed(f"same bytes as the CPU in {unit} arithmetic", bytes_of_cpu)


def kv_cache_append(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """New keys and values in a paged cache, against the reference, in layouts of engines."""
    arrays, random = Arrays(torch, device), np.random.default_rng(6)

    def reference() -> tuple[bool, str]:
        differ = 0
        for dtype in arrays.dtypes:
            for columns in (8, 5):  # vectors, elements
                k, v = (random.integers(-9, 9, (17, 2, columns)).astype(np.float32) for _ in range(2))
                slots = random.permutation(24)[:17]
                slots[3] = -1
                packed = np.zeros((6, 4, 2, 2 * columns), np.float32)
                whole = arrays.put(packed, dtype)
                cache_op.kv_cache_append(
                    arrays.put(k, dtype), arrays.put(v, dtype), whole[..., :columns], whole[..., columns:],
                    arrays.put(slots),
                )  # fmt: skip
                halves = packed[..., :columns], packed[..., columns:]
                want = cache_op.kv_cache_append_reference(k, v, *halves, slots)
                differ += int((arrays.get(whole) != np.concatenate(want, -1)).sum())
        return differ == 0, f"{differ} values differ from the reference"

    yield timed("against the reference", reference)


CASES = {
    "attention": Cases(
        checks,
        Bench(
            "a causal sequence with grouped heads",
            "attention",
            rows_are="tokens",
            sizes={"q_heads": (32, None), "kv_heads": (8, None), "head_dim": (128, None)},
            compiles=False,
        ),
    ),
    "kv_cache_append": Cases(
        kv_cache_append,
        Bench(
            "keys and values into a paged cache; rows are tokens, columns those of k",
            "sequences",
            rows_are="sequences",
            sizes={"columns": (2048, "tokens of a sequence")},
        ),
    ),
}
