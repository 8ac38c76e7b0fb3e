"""Cases of linear_logprob."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import rl_kernel_native as rk

from .._arithmetic import arithmetic
from ..contract import row
from ..ops import linear as linear_op
from ..ops import linear_logprob as op
from ..ops import logprob as logprob_op
from ._certificate import CHUNKS, STATISTICS, TEMPERATURE, TOKENS, Call, Case, Rows, chunks_of
from ._certificate import Arrays as Device
from ._tools import (
    IGNORED,
    Arrays,
    Bench,
    Cases,
    Check,
    round_to,
    same_bytes,
    same_results,
    timed,
    within_bound,
    worst_share,
)

_WANTED: dict[str, Any] = {f"return_{name}": True for name in ("lse", "entropy", "sum_p_sq")}


class _Head(NamedTuple):
    """Operands of linear_logprob, float32 arrays with values of ``dtype``."""

    dtype: str
    hidden: np.ndarray  # [rows, in_features]
    weight: np.ndarray  # [vocab, in_features]
    bias: np.ndarray  # [vocab]
    target: np.ndarray  # [rows]; the second row is ignored

    def results(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """The outputs. With torch, also the gradients of sum(logprob)."""
        put = [arrays.put(a, self.dtype) for a in self[1:4]]
        leaves = put if arrays.torch is None else [t.requires_grad_() for t in put]
        found = op.linear_logprob(leaves[0], leaves[1], arrays.put(self.target), bias=leaves[2], **_WANTED)
        if arrays.torch is None:
            return {name: arrays.get(getattr(found, name)) for name in _OUTPUTS}
        found.logprob.sum().backward()
        of = {name: arrays.get(getattr(found, name).detach()) for name in _OUTPUTS}
        return of | {name: arrays.get(t.grad) for name, t in zip(_GRADIENTS, leaves, strict=True)}

    def composed(self, arrays: Arrays) -> dict[str, np.ndarray]:
        hidden, weight, bias = (arrays.put(a, self.dtype) for a in self[1:4])
        target = arrays.put(self.target)
        logits = linear_op.linear(hidden, weight, bias, out_dtype="float32")
        found = logprob_op.logprob(logits, target, **_WANTED)
        of = {name: arrays.get(getattr(found, name)) for name in _OUTPUTS}
        if arrays.torch is None:
            return of
        d = logprob_op.logprob_backward(logits, target, found.lse, dlogprob=arrays.torch.ones_like(found.lse))
        d = d.to(hidden.dtype)
        hidden[1] = 0  # ignored
        grads = (
            linear_op.linear_input_grad(d, weight),
            linear_op.linear_weight_grad(d, hidden),
            linear_op.linear_bias_grad(d),
        )
        return of | {name: arrays.get(g) for name, g in zip(_GRADIENTS, grads, strict=True)}

    def with_lora(self, arrays: Arrays, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """logprob and lse with LoRA; then logprob and lse of one product without LoRA, whose operands have LoRA's
        factors as further columns."""
        random, (vocab, ins) = np.random.default_rng(rank), self.weight.shape
        a, b = (
            round_to(random.normal(0, deviation, shape).astype(np.float32), self.dtype)
            for shape, deviation in (((rank, ins), 1 / ins**0.5), ((vocab, rank), 2 / rank**0.5))
        )
        hidden, weight, bias = (arrays.put(x, self.dtype) for x in self[1:4])
        factors = {"lora_a": arrays.put(a, self.dtype), "lora_b": arrays.put(b, self.dtype), "lora_scale": 0.5}
        target = arrays.put(self.target)
        found = op.linear_logprob(hidden, weight, target, bias=bias, return_lse=True, **factors)
        sums = arrays.get(linear_op.linear(hidden, factors["lora_a"], out_dtype="float32"))
        u = round_to(np.float32(0.5) * sums, self.dtype)
        x, w = (arrays.put(_side_by_side(*pair), self.dtype) for pair in ((self.hidden, u), (self.weight, b)))
        logits = linear_op.linear(x, w, bias, out_dtype="float32")
        want = logprob_op.logprob(logits, target, return_lse=True)
        got, expected = (np.stack([arrays.get(of.logprob), arrays.get(of.lse)]) for of in (found, want))
        return got, expected

    def over_ranks(self, arrays: Arrays, ranks: int) -> np.ndarray:
        """logprob through the vocabulary-parallel form."""
        width, stats = len(self.weight) // ranks, []
        hidden, weight, bias = (arrays.put(a, self.dtype) for a in self[1:4])
        for first in range(0, len(self.weight), width):
            own = slice(first, first + width)
            how = {"vocab_start": first, "vocab_size": len(self.weight), "bias": bias[own]}
            stats.append(arrays.get(op.linear_logprob_partial(hidden, weight[own], arrays.put(self.target), **how)))
        return arrays.get(logprob_op.logprob_merge(arrays.put(np.stack(stats))))


def _side_by_side(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Concatenates a, zeros up to a multiple of 16 columns, and b."""
    return np.concatenate([a, np.zeros((len(a), -a.shape[1] % 16), np.float32), b], 1)


_OUTPUTS = ("logprob", "lse", "entropy", "sum_p_sq")
_GRADIENTS = ("dhidden", "dweight", "dbias")


def _heads(dtypes: tuple[str, ...]) -> Iterator[_Head]:
    random = np.random.default_rng(8)
    # Sizes: few columns; an odd vocabulary over several leaves of 128 columns; whole tiles of a fused kernel, in a
    # vocabulary whose eighths can be shards.
    for rows, ins, vocab in ((3, 16, 7), (9, 40, 1031), (130, 256, 4096)):
        for dtype in dtypes:
            hidden, weight, bias = (
                round_to(random.normal(0, deviation, shape).astype(np.float32), dtype)
                for shape, deviation in (((rows, ins), 1.0), ((vocab, ins), 2 / ins**0.5), ((vocab,), 1.0))
            )
            target = random.integers(0, vocab, rows)
            target[1] = IGNORED
            yield _Head(dtype, hidden, weight, bias, target)


def _against_float64(arrays: Arrays, dtypes: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """Yields (case, error as a share of its bound in contract.py)."""
    for case in _heads(dtypes):
        want = op.linear_logprob_reference(case.hidden, case.weight, case.target, bias=case.bias)
        got = case.results(arrays)
        for name in _OUTPUTS:
            facts: dict[str, Any] = {"sum_p_sq": want["sum_p_sq"]} if name == "sum_p_sq" else {}
            allowed = row("linear_logprob", name).allowed(max_abs_z=want["max_abs_z"], **facts)
            yield f"{name} {case.dtype} {list(case.weight.shape)}", worst_share(got[name], want[name], allowed)


def checks(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Compares the head's scores and gradients with float64 and with ``logprob(linear(...))``, also with shards and
    LoRA. An sm_90 GPU is also compared with the CPU."""
    arrays = Arrays(torch, device)
    dtypes = arrays.dtypes if device == "cpu" else arrays.dtypes[1:]  # only the CPU multiplies float32

    def float64() -> tuple[bool, str]:
        case, share = max(_against_float64(arrays, dtypes), key=lambda item: item[1])
        return within_bound(share, case)

    yield timed("against float64", float64)

    def composed() -> tuple[bool, str]:
        differ = total = 0
        for case in _heads(dtypes):
            fused, apart = case.results(arrays), case.composed(arrays)
            differ += sum(same_bytes(fused[name], apart[name]) for name in fused)
            if len(case.weight) % 64 == 0:
                differ += sum(same_bytes(fused["logprob"], case.over_ranks(arrays, n)) for n in (1, 2, 4, 8))
            total += sum(value.size for value in fused.values())
        return differ == 0, f"{differ} of {total} values differ from logprob of linear, or on 1, 2, 4, 8 ranks"

    yield timed("same bytes as logprob of linear, on any number of ranks", composed)

    def lora() -> tuple[bool, str]:
        pairs = [case.with_lora(arrays, rank) for case in _heads(dtypes) for rank in (5, 16)]
        differ, total = sum(same_bytes(*pair) for pair in pairs), sum(got.size for got, _ in pairs)
        return differ == 0, f"{differ} of {total} values differ from a head of more features"

    yield timed("LoRA continues the head's sums", lora)
    if capability != (9, 0) or device == "cpu":
        return
    cpu = Arrays(torch, "cpu")

    def bytes_of_cpu() -> tuple[bool, str]:
        with arithmetic("sm_90"):  # a GPU always computes with its own arithmetic
            return same_results((case.results(arrays), case.results(cpu)) for case in _heads(dtypes))

    yield timed("same bytes as the CPU as an sm_90", bytes_of_cpu)


# ---- certificate ----------------------------------------------------------------------------------------------------


LORA_SCALE = 0.5


def certified_linear_logprob(arrays: Device, quick: bool) -> Iterator[Case]:
    # Sizes: an odd vocabulary over several leaves of 128 columns; a vocabulary of whole tiles, whose eighths can be
    # shards.
    for ins, vocab in ((40, 1031), (128, 2048)):
        for dtype in arrays.product_dtypes if not quick or ins < 100 else arrays.product_dtypes[:1]:
            for exp in arrays.exponentials:
                yield from _certified_linear_logprob(ins, vocab, dtype, exp, arrays.has_autograd)
    if not arrays.has_autograd:
        return
    for dtype in arrays.product_dtypes:
        given: Rows = {
            "hidden": ((24,), 1.0), "target": (None, 17), "dy": ((), 1.0),
        }  # fmt: skip
        fixed = {"weight": ((17, 24), 0.2, dtype), "bias": ((17,), 1.0, dtype)}
        shape = (TOKENS, 24, 17)
        for name, ways in (("dweight", {CHUNKS: _certified_head_chunks}), ("dbias", {})):
            yield Case(
                "linear_logprob", "backward", dtype, shape, (name,), given, partial(_certified_head_sums, name=name),
                fixed, TOKENS, ways, "portable",
            )  # fmt: skip
        factors = {"lora_a": ((8, 24), 0.2, dtype), "lora_b": ((17, 8), 0.5, dtype)}
        yield Case(
            "linear_logprob", "backward", dtype, (*shape, 8), ("dlora_a", "dlora_b"), given, _certified_head_factors,
            fixed | factors, TOKENS, {}, "portable", options="lora",
        )  # fmt: skip


def _certified_linear_logprob(ins: int, vocab: int, dtype: str, exp: Any, gradients: bool) -> Iterator[Case]:
    how: dict[str, Any] = {"temperature": TEMPERATURE, "exp": exp}
    wanted: dict[str, Any] = {f"return_{name}": True for name in STATISTICS[1:]}

    def forward(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
        found = rk.linear_logprob(a["hidden"], a["weight"], a["target"], bias=a["bias"], **wanted, **how)
        return dict(zip(STATISTICS, found, strict=False))

    def sharded(arrays: Device, a: Mapping[str, Any], shards: int) -> Mapping[str, Any]:
        weight, bias, stats = arrays.unwrap(a["weight"]), arrays.unwrap(a["bias"]), []
        for first in range(0, vocab, vocab // shards):
            own = slice(first, first + vocab // shards)
            shard = {"bias": arrays.wrap(bias[own]), "vocab_start": first, "vocab_size": vocab}
            part = rk.linear_logprob_partial(a["hidden"], arrays.wrap(weight[own]), a["target"], **shard, **how)
            stats.append(arrays.unwrap(part))
        merged = rk.logprob_merge(arrays.wrap(arrays.torch.stack(stats)), temperature=TEMPERATURE, **wanted)
        return dict(zip(STATISTICS, merged, strict=False))

    def backward(arrays: Device, a: Mapping[str, Any], dh_segments: int) -> Mapping[str, Any]:
        leaf = arrays.unwrap(a["hidden"]).detach().requires_grad_()
        rest = [arrays.unwrap(a[name]) for name in ("weight", "target")]
        found = rk.linear_logprob(
            leaf, *rest, bias=arrays.unwrap(a["bias"]), return_entropy=True, dh_segments=dh_segments, **how
        )
        dys = [arrays.unwrap(a[name]) for name in ("dlogprob", "dentropy")]
        return {"dhidden": arrays.torch.autograd.grad((found.logprob, found.entropy), leaf, dys)[0]}

    rows: Rows = {"hidden": ((ins,), 1.0), "target": (None, vocab)}
    fixed = {"weight": ((vocab, ins), 2 / ins**0.5, dtype), "bias": ((vocab,), 1.0, dtype)}
    ways: dict[str, Call] = {}
    if vocab % 64 == 0:
        ways = {f"{n} shards": partial(sharded, shards=n) for n in (2, 4, 8)}
    shape = (ins, vocab)
    yield Case("linear_logprob", "forward", dtype, shape, STATISTICS, rows, forward, fixed, ways=ways, exp=exp)
    given: Rows = {"dlogprob": ((), 1.0), "dentropy": ((), 0.5)}
    for dh_segments in (1, 8) if gradients else ():
        yield Case(
            "linear_logprob", "backward", dtype, shape, ("dhidden",), rows | given,
            partial(backward, dh_segments=dh_segments), fixed, exp=exp, options=f"dh_segments={dh_segments}",
        )  # fmt: skip


def _certified_head_sums(arrays: Device, a: Mapping[str, Any], name: str, total: Any = None) -> Mapping[str, Any]:
    """dweight through main_grad, which is float32; dbias."""
    weight, bias = (arrays.unwrap(a[n]).detach().requires_grad_() for n in ("weight", "bias"))
    if total is None and name == "dweight":
        total = arrays.torch.zeros(weight.shape, device=weight.device)
    hidden, target, dlogprob = (arrays.unwrap(a[n]) for n in ("hidden", "target", "dy"))
    rk.linear_logprob(hidden, weight, target, bias=bias, exp="portable", main_grad=total).backward(dlogprob)
    return {name: bias.grad if total is None else total}


def _certified_head_factors(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
    """Gradients of LoRA's factors."""
    lora: dict[str, Any] = {n: arrays.unwrap(a[n]).detach().requires_grad_() for n in ("lora_a", "lora_b")}
    hidden, weight, bias, target, dlogprob = (arrays.unwrap(a[n]) for n in ("hidden", "weight", "bias", "target", "dy"))
    found = rk.linear_logprob(hidden, weight, target, bias=bias, exp="portable", lora_scale=LORA_SCALE, **lora)
    found.backward(dlogprob)
    return {f"d{name}": leaf.grad for name, leaf in lora.items()}


def _certified_head_chunks(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
    total = arrays.torch.zeros(17, 24, device=arrays.device)
    for part in chunks_of(arrays, a):
        _certified_head_sums(arrays, part, "dweight", total)
    return {"dweight": total}


CASES = {
    "linear_logprob": Cases(
        checks,
        Bench(
            "selected log-probability from hidden states",
            "linear_logprob",
            sizes={"in_features": (4096, None), "vocab": (128256, None)},
            on_gpu=("bfloat16", "float16"),
        ),
        certified_linear_logprob,
    ),
}
