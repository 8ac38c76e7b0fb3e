"""Cases of attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import rl_kernel_native as rk

from .._arithmetic import arithmetic
from ..contract import row
from ..ops import attention as attention_op
from ..ops import kv_cache_append as cache_op
from ..reference.attention import attention_facts
from ._certificate import DTYPES, TOKENS, Case, Rows, dtypes_of
from ._certificate import Arrays as Device
from ._tools import (
    Arrays,
    Bench,
    Buffers,
    Cases,
    Check,
    Pass,
    round_to,
    same_bytes,
    same_results,
    timed,
    within_bound,
    worst_share,
)


class _Attentions(NamedTuple):
    """Operands of attention, float32 arrays with values of ``dtype``, and its functions on them."""

    dtype: str
    options: dict[str, Any]
    q: np.ndarray  # [batch, queries, heads, head_dim]
    k: np.ndarray  # [batch, keys, kv_heads, head_dim]
    v: np.ndarray  # the last dimension is value_dim, as in dout
    dout: np.ndarray

    def results(self, arrays: Arrays) -> dict[str, np.ndarray]:
        q, k, v, dout = (arrays.put(a, self.dtype) for a in self[2:])
        options = {**self.options, "exp": "portable"}  # gives the same bytes on every device
        out, lse = attention_op.attention(q, k, v, return_lse=True, **options)
        grads = attention_op.attention_backward(dout, q, k, v, out, lse, **options)
        found = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
        return {name: arrays.get(result) for name, result in found.items()}

    def expected(self) -> dict[str, np.ndarray]:
        return attention_op.attention_reference(self.q, self.k, self.v, dout=self.dout, **self.options)


def _attentions(dtypes: tuple[str, ...]) -> Iterator[_Attentions]:
    random = np.random.default_rng(6)
    # Shapes: decode; less than a block of keys; a chunk of queries over more than a block of keys; a window; values
    # narrower than keys. The shapes include grouped heads and head sizes of published models.
    for queries, keys, heads, kv_heads, head_dim, value_dim, window in (
        (1, 40, 4, 2, 64, 64, None), (9, 9, 3, 1, 8, 8, None), (33, 150, 4, 2, 128, 128, None),
        (20, 20, 2, 2, 80, 80, 6), (9, 70, 2, 2, 192, 128, None),
    ):  # fmt: skip
        of_q, of_k = (queries, heads), (keys, kv_heads)
        for dtype in dtypes:
            q, k, v, dout = (
                round_to(random.normal(0, 1, (3, *places, columns)).astype(np.float32), dtype)
                for places, columns in ((of_q, head_dim), (of_k, head_dim), (of_k, value_dim), (of_q, value_dim))
            )
            yield _Attentions(dtype, {"window_size": window}, q, k, v, dout)


def _attentions_against_float64(arrays: Arrays) -> Iterator[tuple[str, float]]:
    """Yields (case, error as a share of its bound in contract.py)."""
    for case in _attentions(arrays.dtypes):
        expected, shape = case.expected(), case.q.shape
        facts = attention_facts(case.q, case.k, case.v, case.dout, case.dtype, **case.options)
        for name, got in case.results(arrays).items():
            allowed = row("attention", name).allowed(case.dtype, expected=expected[name], **facts[name])
            yield f"{name} of {case.dtype} {list(shape)}", worst_share(got, expected[name], allowed)


def checks(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Compares attention and its gradients with float64, with other batches, and on a GPU with the CPU."""
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
    """Compares writes into a paged cache with the reference, in the engines' layouts."""
    arrays, random = Arrays(torch, device), np.random.default_rng(6)

    def reference() -> tuple[bool, str]:
        differ = 0
        for dtype in arrays.dtypes:
            for columns in (8, 5):  # kernels copy 8 columns as vectors, 5 as single elements
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


# ---- certificate ----------------------------------------------------------------------------------------------------


def certified_attention(arrays: Device, quick: bool) -> Iterator[Case]:
    # Here a row of a case is a sequence. Sizes: within a block; just over a block of 128 keys; heads of Qwen3 (not in a
    # quick run).
    shapes = ((37, 3, 1, 24), (130, 2, 1, 128), (150, 4, 2, 128))
    for tokens, heads, kv_heads, dim in shapes[: 2 if quick else 3]:
        for dtype in dtypes_of(quick, tokens > 128):
            for exp in arrays.exponentials:
                yield from _certified_attention((tokens, heads, kv_heads, dim), dtype, exp)
    for dtype in DTYPES:
        for exp in arrays.exponentials:
            rows: Rows = dict.fromkeys(("q", "k", "v"), ((2, 16), 1.0))
            yield Case(
                "attention", "backward", dtype, (TOKENS, 2, 16), ("dsinks",), rows | {"dy": ((2, 16), 1.0)},
                partial(_certified_sinks, exp=exp), {"sinks": ((2,), 1.0, "float32")}, token_sum=TOKENS, exp=exp,
            )  # fmt: skip


def _certified_sinks(arrays: Device, a: Mapping[str, Any], exp: Any) -> Mapping[str, Any]:
    """Tokens are packed sequences of 64."""
    count = arrays.unwrap(a["q"]).shape[0]
    offsets = arrays.torch.arange(0, count + 64, 64, dtype=arrays.torch.int32, device=arrays.device).clamp(max=count)
    how: dict[str, Any] = {"cu_seqlens_q": arrays.wrap(offsets), "cu_seqlens_k": arrays.wrap(offsets)}
    how |= {"sinks": a["sinks"], "exp": exp}
    out, lse = rk.attention(a["q"], a["k"], a["v"], return_lse=True, **how)
    return {"dsinks": rk.attention_backward(a["dy"], a["q"], a["k"], a["v"], out, lse, **how)[3]}


def _certified_attention(shape: tuple[int, int, int, int], dtype: str, exp: Any) -> Iterator[Case]:
    tokens, heads, kv_heads, dim = shape
    of_q, of_k = ((tokens, heads, dim), 1.0), ((tokens, kv_heads, dim), 1.0)
    rows: Rows = {"q": of_q, "k": of_k, "v": of_k}

    def forward(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
        found = rk.attention(a["q"], a["k"], a["v"], exp=exp, return_lse=True)
        return {"out": found[0], "lse": found[1]}

    def packed(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sequences one after the other."""
        count = arrays.unwrap(a["q"]).shape[0]
        offsets = arrays.wrap(arrays.torch.arange(count + 1, dtype=arrays.torch.int32, device=arrays.device) * tokens)
        q, k, v = (arrays.wrap(arrays.unwrap(a[name]).flatten(0, 1)) for name in "qkv")
        found = rk.attention(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, exp=exp, return_lse=True)
        out, lse = (arrays.unwrap(t) for t in found)
        return {"out": out.view(count, tokens, heads, dim), "lse": lse.view(heads, count, tokens).transpose(0, 1)}

    def chunked(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
        """17 queries at a time, as in a chunked prefill with a cache."""
        q, k, v = (arrays.unwrap(a[name]) for name in "qkv")
        parts = []
        for first in range(0, tokens, 17):
            last = min(first + 17, tokens)
            part = (arrays.wrap(t) for t in (q[:, first:last], k[:, :last], v[:, :last]))
            parts.append([arrays.unwrap(t) for t in rk.attention(*part, exp=exp, return_lse=True)])
        return {"out": arrays.torch.cat([p[0] for p in parts], 1), "lse": arrays.torch.cat([p[1] for p in parts], 2)}

    def padded(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
        """Five tokens of padding at the front."""
        q, k, v = (
            arrays.torch.nn.functional.pad(arrays.unwrap(a[name]), (0, 0, 0, 0, 5, 0), value=7.0) for name in "qkv"
        )
        pads = arrays.torch.full((q.shape[0],), 5, dtype=arrays.torch.int32, device=arrays.device)
        wrapped = (arrays.wrap(t) for t in (q, k, v))
        out, lse = rk.attention(*wrapped, leftpad_k=arrays.wrap(pads), exp=exp, return_lse=True)
        return {"out": arrays.unwrap(out)[:, 5:], "lse": arrays.unwrap(lse)[:, :, 5:]}

    def backward(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
        q, k, v = a["q"], a["k"], a["v"]
        out, lse = rk.attention(q, k, v, exp=exp, return_lse=True)
        found = rk.attention_backward(a["dout"], q, k, v, out, lse, exp=exp)
        return dict(zip(("dq", "dk", "dv"), found, strict=True))

    ways = {"packed": packed, "chunks of 17 queries": chunked, "5 tokens of padding": padded}
    yield Case("attention", "forward", dtype, shape, ("out", "lse"), rows, forward, ways=ways, exp=exp)
    yield Case("attention", "backward", dtype, shape, ("dq", "dk", "dv"), rows | {"dout": of_q}, backward, exp=exp)


def _append_passes(b: Buffers) -> tuple[list[Any], list[Pass]]:
    """Rows are tokens; columns are the columns of k in all heads. The cache packs K and V side by side, in pages of 16
    slots, with room for twice the tokens."""
    torch, rows, columns, device = b.torch, b.rows, b.columns, b.device
    page, width = 16, 128 if columns % 128 == 0 else columns
    heads, pages = columns // width, 2 * -(-rows // page)
    moved = 4 * rows * columns * b.dtype.itemsize
    count = b.count(moved)
    buffers = [torch.randn(2, rows, heads, width, device=device).to(b.dtype) for _ in range(count)]
    caches = torch.zeros(2, pages, page, heads, 2 * width, device=device, dtype=b.dtype)
    ours, theirs = ((cache[..., :width], cache[..., width:]) for cache in caches)
    slots = torch.randperm(pages * page, generator=torch.Generator().manual_seed(0))[:rows].to(device)

    def append(x: Any) -> tuple[Any, Any]:
        rk.kv_cache_append(x[0], x[1], *ours, slots)
        return ours

    def eager(x: Any) -> tuple[Any, Any]:
        for cache, rows_of in zip(theirs, x, strict=True):
            cache[slots // page, slots % page] = rows_of
        return theirs

    peers = {"rk": append, "torch cache[slot] = k": eager}
    return buffers, [Pass("append", moved, peers)]


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
        certified_attention,
    ),
    "kv_cache_append": Cases(
        kv_cache_append,
        Bench(
            "keys and values into a paged cache; rows are tokens, columns those of k",
            rows_are="sequences",
            sizes={"columns": (2048, "tokens of a sequence")},
            passes=_append_passes,
        ),
        "moves bytes and computes nothing",
    ),
}
