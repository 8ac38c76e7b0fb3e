"""References in float64 for calls of fuzz_calls.py, written from the contracts alone. A reference judges the results of
a call by bounds, and leaves out what the contract leaves open."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

U = 2.0**-24  # float32's unit roundoff
LOG2E = math.log2(math.e)
# Relative error of a rounding to the dtype, and absolute error below its normal numbers.
ROUNDED = {"float32": (U, 2.0**-149), "bfloat16": (2.0**-8, 2.0**-133), "float16": (2.0**-11, 2.0**-24)}
LARGEST = {"float32": 3.3e38, "bfloat16": 3.3e38, "float16": 6.5e4}
FAILS = 2.0**21  # a row with this m is NaN; with -m it is the identity
SURE = 1e37  # sums of this size may overflow in float32, in an order that bounds do not know
CANONICAL = {"float32": 0x7FC00000, "bfloat16": 0x7FFF, "float16": 0x7FFF}


class Found(NamedTuple):
    """An array of a call's arguments or results: its numbers in float64, its dtype, and its bits if it has floats."""

    numbers: np.ndarray
    dtype: str
    bits: np.ndarray | None = None


def found_of(stored: np.ndarray, dtype: str) -> Found:
    """``stored`` has the array's own dtype; bfloat16 is stored as int16."""
    if dtype == "bfloat16":
        bits = stored.view(np.uint16)
        return Found((bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64), dtype, bits)
    if dtype in ("float32", "float16"):
        return Found(stored.astype(np.float64), dtype, stored.view(f"uint{8 * stored.itemsize}"))
    return Found(stored, dtype)


def split_begin(number: int) -> int:
    return 1024 * number if number < 8 else 8192 + 2048 * (number - 8) if number < 36 else 65536 + 4096 * (number - 36)


# ---- sequences ------------------------------------------------------------------------------------------------------


class Sequence(NamedTuple):
    """Rows of q, and keys by their numbers: the place of each among all tokens of k, -1 where the call does not hold
    the key."""

    rows: np.ndarray
    keys: np.ndarray


def _sequences(a: dict[str, Any], splits: Any) -> Iterator[Sequence]:
    q, k = a["q"].numbers, a["k"].numbers
    cuts_q, cuts_k, used = (None if a.get(n) is None else a[n].numbers for n in _LISTS[:3])
    count = len(cuts_q) - 1 if cuts_q is not None else len(q)
    for b in range(count):
        rows = np.arange(*(cuts_q[b : b + 2] if cuts_q is not None else (b * q.shape[1], (b + 1) * q.shape[1])))
        if a.get("block_table") is not None:
            places = _paged(a, b, k.shape[1])
        else:
            places = np.arange(*(cuts_k[b : b + 2] if cuts_k is not None else (b * k.shape[1], (b + 1) * k.shape[1])))
        length = len(places) if used is None else int(used[b])
        if splits is None:
            yield Sequence(rows, places[:length])
            continue
        keys, first = np.full(length, -1), 0
        for s in splits:
            begin, end = (min(split_begin(n), length) for n in (s, s + 1))
            keys[begin:end] = places[first : first + end - begin]
            first += end - begin
        yield Sequence(rows, keys)


_LISTS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "shared_prefix")


def _paged(a: dict[str, Any], b: int, size: int) -> np.ndarray:
    own, shared, prefix = a["block_table"].numbers[b], np.zeros(0, np.int64), 0
    if a.get("shared_prefix") is not None:
        table, lens, offsets = (x.numbers for x in a["shared_prefix"])
        for g, (begin, end) in enumerate(itertools.pairwise(offsets)):
            if begin <= b < end:
                shared, prefix = table[g], int(lens[g])
    places = [pages.astype(np.int64)[:, None] * size + np.arange(size) for pages in (shared, own)]
    return np.concatenate([places[0].ravel()[:prefix], places[1].ravel()])


# ---- one split ------------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """A row's partials in a split. ``off`` is None if the contract leaves the numbers open, and m is then unknown.

    Attributes:
        x: the largest score in base 2; NaN for a row that fails, -Inf if nothing contributes.
        sees: whether the row sees a key of the split.
        l, o: sums of 2^score and of 2^score * v, times 2^-m for a given m.
        off: absolute error of x.
    """

    x: float
    sees: bool
    sums: Callable[[float], tuple[float, np.ndarray, np.ndarray]]
    off: float | None


def _split(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, how: dict[str, Any], dtype: str) -> Split:
    scale = q.shape[-1] ** -0.5 if how.get("softmax_scale") is None else float(how["softmax_scale"])
    cap = None if how.get("softcap") is None else float(how["softcap"])
    with np.errstate(all="ignore"):
        terms = q * k[seen]
        size = float(np.abs(np.where(np.isfinite(terms), terms, 0)).sum(1).max(initial=0.0))
        s = terms.sum(1)
        x = s * (LOG2E * scale) if cap is None else np.tanh(s * (scale / cap)) * (cap * LOG2E)
    off = U * ((q.size + 6) * size * LOG2E * scale + 8 * np.abs(x[np.isfinite(x)]).max(initial=0.0))
    off += 0 if cap is None else 8 * U * cap * LOG2E
    inside = x > -np.inf
    top = float(x.max(initial=-np.inf)) if not np.isnan(x).any() else math.nan
    values, weights = v[seen][inside], x[inside]
    others = v[~seen] if inside.all() else np.concatenate([v[~seen], v[seen][~inside]])
    inner, least = (0.0, 0.0) if dtype == "float32" else ROUNDED[dtype]

    def sums(m: float) -> tuple[float, np.ndarray, np.ndarray]:
        """l, O and O's bound. A bound of Inf: other keys of the sequence, or an overflow, may make O NaN."""
        p = np.exp2(weights - m)
        with np.errstate(all="ignore"):
            o = p @ values
            sizes = p @ np.abs(values)
            relative = 2e-5 + 2 * off + 2 * (len(p) + 48) * U + inner
            bound = relative * sizes + (least + 2.0**-119) * np.abs(values).sum(0) + 2.0**-140
            is_open = (sizes > SURE) & np.isfinite(values).all(0)
            is_open |= ~np.isfinite(others).all(0) | (~np.isfinite(values) & (p < 1e-30)[:, None]).any(0)
        return float(p.sum()), o, np.where(is_open, np.inf, bound)

    return Split(top, bool(seen.any()), sums, None if size * max(scale, 1.0) > SURE or off > 0.05 else off)


def _splits(a: dict[str, Any], count: int | None) -> Iterator[tuple[tuple[int, ...], Split]]:
    """The partials of each split, row and head, by their place in the results of a call with ``count`` splits. None:
    those of the splits that a sequence has."""
    own = a.get("splits")
    q, k, v = (a[n].numbers for n in "qkv")
    dtype = a["q"].dtype
    flat = [x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) for x in (q, k, v)]
    group = q.shape[-2] // max(k.shape[-2], 1)
    window = math.inf if a.get("window_size") is None else int(a["window_size"])
    for rows, keys in _sequences(a, own):
        numbers = range(len(keys) and sum(split_begin(s) < len(keys) for s in range(64))) if count is None else (
            range(count) if own is None else own
        )  # fmt: skip
        for (i, row), head in itertools.product(enumerate(rows), range(q.shape[-2])):
            n = len(keys) - len(rows) + i
            for place, s in enumerate(numbers):
                at = np.arange(min(split_begin(s), len(keys)), min(split_begin(s + 1), len(keys)))
                seen = (at <= n) & (at > n - window) if a.get("causal", True) else np.ones(len(at), bool)
                of = keys[at]
                yield (
                    (place, int(row), head),
                    _split(flat[0][row, head], flat[1][of, head // group], flat[2][of, head // group], seen, a, dtype),
                )


def _wrong_split(got: tuple[float, float, np.ndarray], s: Split) -> str:
    m, l, o = got  # noqa: E741
    if s.off is None:
        return ""
    is_zero = not (o.any() or np.signbit(o).any())
    if not s.sees or s.x == -math.inf or s.x < -FAILS - 1:
        wanted = (-math.inf, float(s.sees))
        return "" if (m, l) == wanted and is_zero else f"(m, l) {(m, l)}, not {wanted} and O +0"
    if math.isnan(s.x) or s.x > FAILS:
        return "" if math.isnan(m) and l == 0 and is_zero else f"(m, l) {(m, l)}, not (NaN, 0) and O +0"
    if abs(abs(s.x) - FAILS) <= 1 + s.off:
        return ""
    if not math.ceil(s.x - s.off) <= m <= math.ceil(s.x + s.off):
        return f"m {m}, not the ceiling of {s.x}"
    want_l, want_o, bound = s.sums(m)
    if not abs(l - want_l) <= want_l * (2e-5 + 2 * s.off + 1e-4 * (want_l > 1e4)) + 2.0**-110:
        return f"l {l}, not {want_l}"
    return _apart("O", o, want_o, bound)


def _apart(name: str, got: Any, want: Any, bound: Any) -> str:
    """The first number that is further from the reference than the bound."""
    got, want, bound = np.broadcast_arrays(np.atleast_1d(got), want, bound)
    with np.errstate(invalid="ignore"):
        right = (np.abs(got - want) <= bound) | (got == want) | (np.isnan(got) & np.isnan(want)) | np.isinf(bound)
    if right.all():
        return ""
    i = int(np.argmin(right.ravel()))
    return f"{name} {got.ravel()[i]}, not {want.ravel()[i]} within {bound.ravel()[i]}"


# ---- the merge ------------------------------------------------------------------------------------------------------


def _merged(parts: list[tuple[float, float, np.ndarray]], sink: float | None) -> tuple[float, float, Any, Any] | None:
    """m, l, O and the sum of finite |O|, folded as they come. The sum is Inf if O may have overflowed. m is NaN for a
    row that fails, and -Inf for a row that sees nothing. None: the contract says nothing of such partials."""
    m, l, o, size, sees = -math.inf, 0.0, 0.0, 0.0, False  # noqa: E741
    is_nan = False
    for m_b, l_b, o_b in parts:
        if m_b == -math.inf:
            if l_b not in (0, 1):
                return None
            sees |= l_b == 1
            continue
        sees = True
        if math.isnan(m_b):
            is_nan = True
            continue
        if not (m_b == math.inf or m_b == int(m_b)) or not 0 < l_b < SURE:
            return None
        m, l, o, size = _fold((m, l, o, size), (m_b, l_b, o_b, np.where(np.isfinite(o_b), np.abs(o_b), 0.0)))  # noqa: E741
    if not sees:
        return -math.inf, 0.0, 0.0, 0.0
    u = -math.inf if sink is None else sink
    is_nan |= not u < FAILS
    if -FAILS < u < FAILS:
        of_sink = float(math.ceil(u)), 2.0 ** (u - math.ceil(u)), np.zeros_like(o), np.zeros_like(o)
        m, l, o, size = _fold((m, l, o, size), of_sink)  # noqa: E741
    return (math.nan if is_nan or m == -math.inf or m >= FAILS else m), l, o, size


def _fold(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    if a[0] == -math.inf:
        return b
    m = max(a[0], b[0])
    f, g = (2.0 ** (x[0] - m) if x[0] - m >= -126 else 0.0 for x in (a, b))
    with np.errstate(all="ignore"):
        size = a[3] * f + b[3] * g
        is_open = np.isinf(a[3]) | (size > LARGEST["float32"])  # an infinity times 0 is NaN
        return m, a[1] * f + b[1] * g, a[2] * f + b[2] * g, np.where(is_open, np.inf, size)


def _wrong_row(
    out: np.ndarray, lse: float | None, row: tuple[float, float, Any], off_o: Any, off_l: float, dtype: str
) -> str:
    """``row``: m, l and O; ``off_o``: absolute error of O; ``off_l``: relative error of l."""
    m, l, o = row  # noqa: E741
    if m == -math.inf:
        right = not out.any() and not np.signbit(out).any() and lse in (None, -math.inf)
        return "" if right else f"out {out} and lse {lse} of a row that sees nothing"
    if math.isnan(m):
        right = bool(np.isnan(out).all()) and (lse is None or math.isnan(lse))
        return "" if right else f"out {out} and lse {lse} of a row that fails"
    if not 1e-30 < l < SURE:
        return ""
    inner, least = ROUNDED[dtype]
    with np.errstate(all="ignore"):
        want = o / l
        bound = off_o / l + np.abs(want) * (off_l + 4 * U + inner) + least + 2.0**-140 / l
        is_open = np.isfinite(want) & (np.abs(want) + bound > LARGEST[dtype])
    if words := _apart("out", out, want, np.where(is_open, np.inf, bound)):
        return words
    return "" if lse is None else _apart("lse", lse, (m + math.log2(l)) / LOG2E, 1e-5 + off_l + 4e-7 * abs(m))


# ---- the table ------------------------------------------------------------------------------------------------------


def _attention(a: dict[str, Any], found: list[Any]) -> str:
    if a.get("return_partials"):
        (stats, sums), numbers = found[:2], found[2:]
        wanted = a.get("splits")
        if numbers != list(range(len(stats.numbers)) if wanted is None else wanted):
            return f"splits {numbers}"
        *rows, heads, _ = a["q"].numbers.shape
        flat_stats = stats.numbers.reshape(len(numbers), math.prod(rows), heads, 2)
        flat_sums = sums.numbers.reshape(*flat_stats.shape[:-1], sums.numbers.shape[-1])
        untouched = np.ones(flat_stats.shape[:-1], bool)
        for at, split in _splits(a, len(numbers)):
            untouched[at] = False
            if words := _wrong_split((*flat_stats[at], flat_sums[at]), split):
                return f"{words}, at split, row and head {at}"
        rest = flat_stats[untouched]
        if not ((rest[:, 0] == -np.inf).all() and (rest[:, 1] == 0).all() and not flat_sums[untouched].any()):
            return "partials of a row that is not in use"
        return _not_canonical(stats) or _not_canonical(sums)
    out = found[0]
    heads = a["q"].numbers.shape[-2]
    flat = out.numbers.reshape(math.prod(a["q"].numbers.shape[:-2]), heads, out.numbers.shape[-1])
    lses = found[1].numbers if a.get("return_lse") else None
    flat_lse = None if lses is None else np.moveaxis(lses, -2, -1).reshape(len(flat), heads)
    sinks = None if a.get("sinks") is None else a["sinks"].numbers
    rows: dict[tuple[int, int], list[Split]] = {}
    for (_, row, head), split in _splits(a, None):
        rows.setdefault((row, head), []).append(split)
    for (row, head), splits in rows.items():
        sink = None if sinks is None else float(sinks[head] * LOG2E)
        if any(s.off is None or abs(abs(s.x) - FAILS) <= 2 for s in splits):
            continue
        want = _merged([_part(s, flat.shape[-1]) for s in splits], sink)
        if want is None or abs(abs(sink or 0.0) - FAILS) <= 2:
            continue
        off, used = max(s.off or 0.0 for s in splits), [s for s in splits if abs(s.x) < FAILS]
        off_o = sum((s.sums(want[0])[2] for s in used), 4 * len(splits) * U * want[3])
        lse = None if flat_lse is None else float(flat_lse[row, head])
        if words := _wrong_row(flat[row, head], lse, want[:3], off_o, 3e-5 + 2 * off, out.dtype):
            return f"{words}, at row and head {row, head}"
    return _not_canonical(out)


def _part(s: Split, width: int) -> tuple[float, float, np.ndarray]:
    if s.sees and abs(s.x) < FAILS:
        m = float(math.ceil(s.x))
        return (m, *s.sums(m)[:2])
    return math.nan if s.sees and not s.x < FAILS else -math.inf, float(s.sees), np.zeros(width)


def _attention_merge(a: dict[str, Any], found: list[Any]) -> str:
    stats, sums, numbers = a["partials"]
    order = np.argsort(numbers)
    heads, width = sums.numbers.shape[-2:]
    out = found[0]
    flat = out.numbers.reshape(math.prod(out.numbers.shape[:-2]), heads, width)
    m, l = (stats.numbers[..., i].reshape(len(order), len(flat), heads)[order] for i in range(2))  # noqa: E741
    o = sums.numbers.reshape(len(order), len(flat), heads, width)[order]
    lses = found[1].numbers if a.get("return_lse") else None
    flat_lse = None if lses is None else np.moveaxis(lses, -2, -1).reshape(len(flat), heads)
    sinks = None if a.get("sinks") is None else a["sinks"].numbers
    for row, head in itertools.product(range(len(flat)), range(heads)):
        parts = [(float(m[s, row, head]), float(l[s, row, head]), o[s, row, head]) for s in range(len(order))]
        sink = None if sinks is None else float(sinks[head] * LOG2E)
        want = None if sink is not None and abs(abs(sink) - FAILS) < 2 else _merged(parts, sink)
        if want is None:
            continue
        lse = None if flat_lse is None else float(flat_lse[row, head])
        relative = 4 * len(order) * U
        off_l = relative + (0.0 if sink is None else 2e-5)
        if words := _wrong_row(flat[row, head], lse, want[:3], relative * want[3], off_l, out.dtype):
            return f"{words}, at row and head {row, head}"
    return _not_canonical(out) or (_not_canonical(found[1]) if lses is not None else "")


def _not_canonical(found: Found) -> str:
    assert found.bits is not None
    bits = found.bits[np.isnan(found.numbers)]
    return "" if (bits == CANONICAL[found.dtype]).all() else f"a NaN with the bits {int(bits.max()):x}"


# An operator's judgement of its results, from its arguments: what is wrong, or nothing.
REFERENCES: dict[str, Callable[[dict[str, Any], list[Any]], str]] = {
    "attention": _attention,
    "attention_merge": _attention_merge,
}
