"""Cases of the sampling operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..contract import row
from ..ops import linear as linear_op
from ..ops import linear_sample as linear_sample_op
from ..ops import logprob as logprob_op
from ..ops import process_logits as process_op
from ..ops import random_bits as random_bits_op
from ..ops import sample as sample_op
from ..ops import sample_shards as shards_op
from ._tools import Arrays, Bench, Cases, Check, round_to, same_results, timed, within_bound, worst_share


def random_bits(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Compares random words with the reference."""
    arrays = Arrays(torch, device)

    def reference() -> tuple[bool, str]:
        ids = np.arange(-40, 40) * 77_777_777_777
        words = random_bits_op.random_bits(-5, arrays.put(ids), 9, 7)
        want = random_bits_op.random_bits_reference(-5, ids, 9, 7)
        halves = ((words >> 16, want >> 16), (words & 0xFFFF, want & 0xFFFF))  # float32 holds these exactly
        differ = sum(int((arrays.get(got) != half).sum()) for got, half in halves)
        return differ == 0, f"{differ} halves of words differ from the reference"

    yield timed("against the reference", reference)


def sample(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Checks that logprob with sample's kept sets gives the bits of sample's log-probabilities."""
    arrays = Arrays(torch, device)

    def replayed() -> tuple[bool, str]:
        random = np.random.default_rng(4)
        x = arrays.put((random.standard_normal((16, 9000)) * 3).astype(np.float32))
        keys: dict[str, Any] = {"seed": 3, "sample_id": arrays.put(np.arange(16)), "position": 5, "exp": "portable"}
        result = sample_op.sample(x, top_k=40, top_p=0.9, return_kept=True, n_logprobs=6, **keys)
        again = logprob_op.logprob(x, result.ids, kept=result.kept, exp="portable")
        differ = int((arrays.get(again) != arrays.get(result.logprob)).sum()) + int((result.status != 0).sum())
        for k in range(6):
            best = arrays.get(result.top_logprobs)[:, k]
            scored = logprob_op.logprob(x, result.top_ids[:, k], kept=result.kept, exp="portable")
            differ += int(((arrays.get(scored) != best) & (best > -np.inf)).sum())
        return differ == 0, f"{differ} log-probabilities differ from logprob with the kept set"

    def float64() -> tuple[bool, str]:
        x = (np.random.default_rng(4).standard_normal((16, 500)) * 3).astype(np.float32)
        result = sample_op.sample(arrays.put(x), seed=3, sample_id=arrays.put(np.arange(16)), position=5, top_k=40)
        want = sample_op.sample_reference(x, top_k=40).logprob[np.arange(16), arrays.get(result.ids).astype(np.int64)]
        allowed = row("sample", "logprob").allowed(expected=want, max_abs_z=np.abs(x).max(1))
        worst = worst_share(arrays.get(result.logprob), want, allowed)
        return within_bound(worst)

    yield timed("against float64", float64)

    def penalised() -> tuple[bool, str]:
        random = np.random.default_rng(4)
        x = (random.standard_normal((8, 500)) * 3).astype(np.float32)
        ids, offsets = random.integers(0, 500, 400), np.arange(9, dtype=np.int64) * 50
        given: dict[str, Any] = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25}
        got = process_op.process_logits(arrays.put(x), history=(arrays.put(ids), arrays.put(offsets)), **given)
        want = process_op.process_logits_reference(x, history=(ids, offsets), **given)
        allowed = row("process_logits", "logits").allowed(expected=want, max_abs_z=np.abs(x).max(1)[:, None] + 3)
        worst = worst_share(arrays.get(got), want, allowed)
        return within_bound(worst)

    def sharded() -> tuple[bool, str]:
        x = (np.random.default_rng(5).standard_normal((16, 512)) * 3).astype(np.float32)
        keys: dict[str, Any] = {"seed": 3, "sample_id": arrays.put(np.arange(16)), "position": 5, "exp": "portable"}
        stack = np.stack if torch is None else torch.stack
        cuts: tuple[dict[str, Any], ...] = ({}, {"top_k": 40, "top_p": 0.9})
        differ = 0
        for given in cuts:
            want = sample_op.sample(arrays.put(x), **given, **keys)
            how = {"vocab_size": 512, **given, **keys}
            halves = {i: arrays.put(x[:, i : i + 256].copy()) for i in (0, 256)}
            parts = [shards_op.sample_partial(half, vocab_start=i, **how) for i, half in halves.items()]
            got = shards_op.sample_merge(stack(parts), **how)
            differ += int((arrays.get(got.ids) != arrays.get(want.ids)).sum())
            differ += int((arrays.get(got.logprob) != arrays.get(want.logprob)).sum())
        return differ == 0, f"{differ} tokens and log-probabilities differ from those of whole rows"

    yield timed("logprob of the kept set", replayed)
    yield timed("a vocabulary in shards", sharded)
    yield timed("penalties against float64", penalised)


def linear_sample(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Checks that linear_sample gives the bits of sample on linear's logits."""
    arrays = Arrays(torch, device)
    dtype = "float32" if device == "cpu" else "bfloat16"
    random = np.random.default_rng(4)
    shapes = ((16, 64), (1500, 64))
    hidden, weight = (round_to(random.standard_normal(shape, np.float32) / 4, dtype) for shape in shapes)
    operands = [arrays.put(a, dtype) for a in (hidden, weight)]
    keys: dict[str, Any] = {"seed": 3, "sample_id": arrays.put(np.arange(16)), "position": 5, "exp": "portable"}

    def composed() -> tuple[bool, str]:
        given = {**keys, "top_k": 40, "temperature": 0.7, "return_logprob": "both"}
        want = sample_op.sample(linear_op.linear(*operands), **given)
        got = linear_sample_op.linear_sample(*operands, workspace_bytes=1 << 17, **given)
        names = ("ids", "logprob", "raw_logprob", "status")
        ours, theirs = ({name: arrays.get(getattr(r, name)) for name in names} for r in (got, want))
        return same_results([(ours, theirs)])

    def float64() -> tuple[bool, str]:
        result = linear_sample_op.linear_sample(*operands, logits_dtype="float32", **keys)
        ids = arrays.get(result.ids).astype(np.int64)
        want = linear_sample_op.linear_sample_reference(hidden, weight).logprob[np.arange(16), ids]
        largest = np.abs(hidden.astype(np.float64) @ weight.astype(np.float64).T).max(1)
        allowed = row("linear_sample", "logprob").allowed(expected=want, max_abs_z=largest)
        return within_bound(worst_share(arrays.get(result.logprob), want, allowed))

    yield timed("against float64", float64)
    yield timed("sample of linear", composed)


CASES = {
    "linear_sample": Cases(
        linear_sample,
        Bench(
            "tokens of hidden states, vocabulary 128256",
            "sampling",
            (8, 64),
            sizes={"in_features": (4096, None)},
            on_gpu=("bfloat16", "float16"),
            compiles=False,
        ),
        "linear's rows and sample's draw: its own tests compare bytes with theirs, in any workspace",
    ),
    "random_bits": Cases(
        random_bits,
        Bench("random words of tokens", "sampling", only_dtype="int64", compiles=False),
        "integers of a row's own keys: its own tests compare them with the definition, byte for byte",
    ),
    "sample": Cases(
        sample,
        Bench("tokens of rows of 128256 logits", "sampling", (8, 256), compiles=False),
        "its own tests compare bytes alone, in other batches and strides, and with logprob of the kept set",
    ),
}
