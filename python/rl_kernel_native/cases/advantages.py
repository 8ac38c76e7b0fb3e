"""Cases of group_advantage, gae, optimal_token_baseline and masked_whiten."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..contract import row
from ..ops import gae as gae_op
from ..ops import group_advantage as group_op
from ..ops import masked_whiten as whiten_op
from ..ops import optimal_token_baseline as baseline_op
from ._certificate import BY_BATCH, BY_SEQUENCE
from ._tools import Arrays, Bench, Cases, Check, same_bytes, same_results, timed, within_bound, worst_share


class _Answers(NamedTuple):
    """A batch of answers in groups of eight: one reward per answer, and rewards and values of tokens, some of which
    count."""

    scores: np.ndarray  # [sequences]
    rewards: np.ndarray  # [sequences, tokens]
    values: np.ndarray
    mask: np.ndarray

    def tokens(self) -> tuple[np.ndarray, ...]:
        """rewards, logprob, sum_p_sq, mask."""
        p = np.exp(-np.abs(self.values))
        return self.rewards, -np.abs(self.values), p * p, self.mask

    def results(self, name: str, arrays: Arrays) -> dict[str, np.ndarray]:
        if name == "group_advantage":
            found = {
                kind: group_op.group_advantage(arrays.put(self.scores), group_size=8, kind=kind)
                for kind in ("grpo", "rloo", "passk")
            }
        elif name == "gae":
            tokens = (arrays.put(self.rewards), arrays.put(self.values), arrays.put(self.mask))
            found = dict(zip(("advantages", "returns"), gae_op.gae(*tokens, gamma=0.99, lam=0.95), strict=True))
        elif name == "optimal_token_baseline":
            result = baseline_op.optimal_token_baseline(*map(arrays.put, self.tokens()), group_size=8)
            found = dict(zip(("advantages", "returns"), result, strict=True))
        else:
            found = {"y": whiten_op.masked_whiten(arrays.put(self.values), arrays.put(self.mask))}
        return {key: arrays.get(value) for key, value in found.items()}

    def expected(self, name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The results in float64, and the allowed error of each result."""
        if name == "group_advantage":
            found = {}
            for kind in ("grpo", "rloo", "passk"):
                want = group_op.group_advantage_reference(self.scores, group_size=8, kind=kind)
                value = want["advantage"]
                found[kind] = value, row(name, "advantage").allowed(expected=value, scale=want["scale"])
            return found
        if name == "gae":
            want = gae_op.gae_reference(self.rewards, self.values, self.mask, gamma=0.99, lam=0.95)
            scale = np.maximum.accumulate(want["scale"][:, ::-1], 1)[:, ::-1]
            keys = ("advantages", "returns")
            return {key: (want[key], row(name, key).allowed(expected=want[key], scale=scale)) for key in keys}
        if name == "optimal_token_baseline":
            want = baseline_op.optimal_token_baseline_reference(*self.tokens(), group_size=8)
            facts = {"scale": want["scale"], "terms": 8 + self.mask.shape[1] // 256}
            return {k: (want[k], row(name, k).allowed(expected=want[k], **facts)) for k in ("advantages", "returns")}
        y = whiten_op.masked_whiten_reference(self.values, self.mask)["y"]
        return {"y": (y, row(name, "y").allowed(expected=y, largest=np.abs(y).max()))}


def _answers() -> Iterator[_Answers]:
    random = np.random.default_rng(5)
    # Sizes: one token; a chunk plus one token; several chunks.
    for sequences, tokens in ((8, 1), (16, 129), (40, 700)):
        scores, rewards, values = (
            random.normal(0, 1, shape).astype(np.float32)
            for shape in (sequences, (sequences, tokens), (sequences, tokens))
        )
        yield _Answers(scores, rewards, values, random.integers(0, 4, (sequences, tokens)).astype(np.int32))


def checks(name: str, torch: Any, device: str, _: tuple[int, int] | None) -> Iterator[Check]:
    """Compares with float64; on a GPU also with the CPU, and on the CPU with another batch."""
    arrays = Arrays(torch, device)

    def float64() -> tuple[bool, str]:
        worst = 0.0
        for case in _answers():
            got, expected = case.results(name, arrays), case.expected(name)
            worst = max(worst, *(worst_share(a, *expected[key]) for key, a in got.items()))
        return within_bound(worst)

    yield timed("against float64", float64)
    if device == "cpu":

        def batch() -> tuple[bool, str]:
            differ = 0
            for case in _answers():
                twice = _Answers(*(np.concatenate((a, a)) for a in case))
                whole, part = twice.results(name, arrays), case.results(name, arrays)
                if name == "masked_whiten":  # depends on the whole batch: compares the halves
                    part = {key: value[: len(case.scores)] for key, value in whole.items()}
                differ += sum(same_bytes(part[key], value[len(case.scores) :]) for key, value in whole.items())
            return differ == 0, f"{differ} values differ between a batch and its half"

        yield timed("same bytes in another batch", batch)
        return
    cpu = Arrays(torch, "cpu")

    def bytes_of_cpu() -> tuple[bool, str]:
        return same_results((case.results(name, arrays), case.results(name, cpu)) for case in _answers())

    yield timed("same bytes as the CPU", bytes_of_cpu)


def _bench(about: str, tokens: int = 8192) -> Bench:
    return Bench(about, "advantage", (64, 4096), "sequences", {"tokens": (tokens, None)}, only_dtype="float32")


_BENCHES = {
    "gae": _bench("generalised advantage estimation"),
    "group_advantage": _bench("advantages of sequences in their groups", 1),
    "masked_whiten": _bench("whitening of a batch's tokens"),
    "optimal_token_baseline": _bench("advantages against a baseline of each position of a group"),
}
_CERTIFICATES: dict[str, Any] = {
    "gae": BY_SEQUENCE,
    "group_advantage": "a row is a group: its own tests compare bytes in other batches, orders and forms of groups",
    "masked_whiten": BY_BATCH,
    "optimal_token_baseline": "a row is of a group: its own tests compare bytes padded, packed and in other batches",
}
CASES = {name: Cases(partial(checks, name), bench, _CERTIFICATES[name]) for name, bench in _BENCHES.items()}
