"""Speculative sampling by rejection (algorithm 1 of arXiv:2211.17192), computed with torch's or NumPy's operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _check, _dispatch
from .logprob import logprob
from .random_bits import random_bits
from .sample import sample

STREAM = 1  # random words come from stream 1, because the draft may have been drawn from stream 0
ACCEPTANCE = 16  # index of the random word that decides acceptance; `sample` uses words 0 to 15 at most


class Arrays:
    """The library of an array (torch or NumPy), and wrappers of the functions that the two libraries name
    differently."""

    def __init__(self, like: Any) -> None:
        is_tensor = _dispatch.is_tensor(like)
        self.np: Any = _dispatch.torch_module() if is_tensor else np
        self.on: dict[str, Any] = {"device": like.device} if is_tensor else {}

    def plain(self, x: Any) -> Any:
        """Returns the array with contiguous columns, detached from autograd."""
        return np.ascontiguousarray(x) if self.np is np else x.detach().contiguous()

    def ascending(self, count: int) -> Any:
        return self.np.arange(count, dtype=self.np.int64, **self.on)

    def full(self, value: Any, dtype: Any, shape: tuple[int, ...] = ()) -> Any:
        return self.np.full(shape, value, dtype=dtype, **self.on)

    def cast(self, x: Any, dtype: str) -> Any:
        return x.astype(dtype) if self.np is np else x.to(getattr(self.np, dtype))

    def pick(self, x: Any, at: Any) -> Any:
        """Returns ``x[i, at[i]]`` for each row i. x has at least two dimensions."""
        return x[self.ascending(x.shape[0]), at]

    def leading(self, flags: Any) -> Any:
        """Returns, for each row, the number of true flags before the first false flag, int64."""
        return self.cast(self.np.cumsum(self.cast(~flags, "int64"), 1) == 0, "int64").sum(1)

    def softmax(self, z: Any) -> Any:
        """The softmax of each row. A row whose largest element is infinite becomes NaN."""
        most = z.max(1)[:, None] if self.np is np else z.amax(1, keepdim=True)
        e = self.np.exp(z - self.np.where(abs(most) < np.inf, most, np.nan))
        return e / e.sum(1)[:, None]


class Rejection:
    """The state of one call. A row has one step for each draft token and one more step. ``drawn`` is the result of
    :func:`sample` for all steps, drawn from stream 1. ``keys`` (seed, sample_id, position) and ``cuts`` (temperature,
    top_k and so on) hold arguments of :func:`sample`. Each argument is one number, or an array with one number per
    step. ``how`` holds valid_vocab and exp."""

    def __init__(
        self, x: Arrays, target_logits: Any, draft_ids: Any, draft_logits: Any, drawn: Any, keys: dict[str, Any],
        cuts: dict[str, Any], how: dict[str, Any],
    ) -> None:  # fmt: skip
        self.x, self.keys, self.how = x, keys, how
        self.target_logits, self.draft_logits, self.drawn = target_logits, draft_logits, drawn
        self.rows, self.steps, self.vocab = target_logits.shape
        greedy = cuts["greedy"]
        if isinstance(greedy, bool):
            greedy = x.full(greedy, x.np.bool_ if x.np is np else x.np.bool, (self.rows * self.steps,))
        temperature = cuts["temperature"]
        if _check.is_number(temperature):
            temperature = x.full(_check.number("temperature", temperature), x.np.float32, (self.rows * self.steps,))
        self.temperature = x.cast(x.np.where(greedy, 1.0, temperature), "float32")
        self.greedy = greedy.reshape(self.rows, self.steps)
        self.valid = self.vocab if how["valid_vocab"] is None else how["valid_vocab"]
        self.in_vocab = (draft_ids >= 0) & (draft_ids < self.valid)
        self.draft_ids = x.cast(x.np.where(self.in_vocab, draft_ids, 0), "int64")
        self.p = x.cast(self._scored(self._padded())[:, :-1], "float64")  # under vmap, logprob raises its error here
        self.kept = self._kept_columns()
        self.ids, self.status = (of.reshape(self.rows, self.steps) for of in (drawn.ids, drawn.status))

    def run(self) -> tuple[Any, Any, Any]:
        """Returns num_accepted, next_id, and the log-probabilities of the accepted tokens and the next token."""
        num_accepted = self.x.leading(self._accepts())
        next_id = self._behind(num_accepted)
        where = self.x.np.where
        ahead = self.x.ascending(self.steps)[None]
        token = where(ahead < num_accepted[:, None], self._padded(), where(next_id >= 0, next_id, 0)[:, None])
        known = where(ahead < num_accepted[:, None], True, (next_id >= 0)[:, None])
        return num_accepted, next_id, where(known, self._scored(token), self.x.full(float("nan"), self.x.np.float32))

    def _padded(self) -> Any:
        """Returns the draft's ids with one more column of zeros."""
        join = self.x.np.concatenate if self.x.np is np else self.x.np.cat
        return join([self.draft_ids, self.x.full(0, self.x.np.int64, (self.rows, 1))], 1)

    def _scored(self, ids: Any) -> Any:
        """Returns the log-probabilities of ids [rows, steps] under the distributions from which :func:`sample`
        draws."""
        flat = self.target_logits.reshape(self.rows * self.steps, self.vocab)
        found = logprob(flat, ids.reshape(-1), temperature=self.temperature, kept=self.drawn.kept, **self.how)
        return found.reshape(self.rows, self.steps)

    def _accepts(self) -> Any:
        """Tells whether each draft token would be accepted regardless of earlier tokens: ``u q(x) < p(x)``."""
        x, p, count = self.x, self.p, self.rows * (self.steps - 1)
        is_kept = x.pick(self.kept, self._padded().reshape(-1)).reshape(self.rows, self.steps)[:, :-1]
        q: Any = 0.0
        if self.draft_logits is not None:
            flat, ids = self.draft_logits.reshape(count, self.vocab), self.draft_ids.reshape(-1)
            q = x.cast(logprob(flat, ids, **self.how).reshape(p.shape), "float64")
        sample_id = self.keys["sample_id"]
        if _check.is_number(sample_id):
            sample_id = x.full(sample_id, x.np.int64, (self.rows * self.steps,))
        words = random_bits(self.keys["seed"], sample_id, self.keys["position"], ACCEPTANCE + 1, stream=STREAM)
        words = x.cast(words[:, ACCEPTANCE].reshape(self.rows, self.steps)[:, :-1], "float64")
        words = x.np.where(words < 0, 0.0, words)  # -1 marks a bad position, where no token is accepted
        by_chance = x.np.log((words + 0.5) * 2.0**-32) + q < p
        is_drawn = self.ids[:, :-1] == self.draft_ids
        stands = x.np.where(self.greedy[:, :-1], is_drawn, by_chance)
        return stands & is_kept & self.in_vocab & (self.status[:, :-1] == 0)

    def _behind(self, num_accepted: Any) -> Any:
        """Returns the token after the accepted tokens, drawn from the distribution that remains after a rejection."""
        x = self.x
        where, is_good = x.np.where, x.pick(self.status, num_accepted) == 0
        p = x.softmax(where(is_good[:, None], self._kept_logits(num_accepted), 0.0))
        left = p
        if self.steps > 1:
            last = num_accepted == self.steps - 1
            at = where(last, 0, num_accepted)
            if self.draft_logits is None:
                q = x.cast(x.ascending(self.vocab)[None] == x.pick(self.draft_ids, at)[:, None], "float64")
                q = q * x.pick(self.in_vocab, at)[:, None]
            else:
                z = x.cast(x.pick(self.draft_logits, at), "float64")
                q = x.softmax(where((x.ascending(self.vocab) < self.valid)[None], z, -np.inf))
            left = where(last[:, None] | (p <= q), p * last[:, None], p - q)
            left = where(left.sum(1)[:, None] > 0, left, p)  # if p - q is 0 everywhere by rounding, draw from p
        z = where(left > 0, x.np.log(where(left > 0, left, 1.0)), -np.inf)
        keys = {
            name: value if _check.is_number(value) else x.pick(value.reshape(self.rows, self.steps), num_accepted)
            for name, value in self.keys.items()
        }
        found = sample(x.cast(z, "float32"), **keys, return_logprob="none", stream=STREAM, exp=self.how["exp"]).ids
        found = where(x.pick(self.greedy, num_accepted), x.pick(self.ids, num_accepted), found)
        return where(is_good, found, -1)

    def _kept_columns(self) -> Any:
        """Tells which columns :func:`sample` kept, bool [rows * steps, vocab]."""
        x, kept_ids, offsets = self.x, self.drawn.kept_ids, self.drawn.kept_offsets
        size = self.rows * self.steps * self.vocab
        place = x.ascending(kept_ids.shape[0])
        row = x.np.searchsorted(offsets[1:], place, side="right")
        at = x.np.where(place < offsets[-1], row * self.vocab + kept_ids, size)  # unwritten entries mark a spare slot
        marks = x.full(0, x.np.uint8, (size + 1,))
        marks[at] = 1
        kept = marks[:-1].reshape(self.rows * self.steps, self.vocab) != 0
        return (kept | (offsets[1:] == offsets[:-1])[:, None]) & (x.ascending(self.vocab) < self.valid)[None]

    def _kept_logits(self, num_accepted: Any) -> Any:
        """Returns, for the step after the accepted tokens, the logits divided by the temperature in float64. They are
        -Inf outside the row's kept set."""
        x = self.x
        flat = x.ascending(self.rows) * self.steps + num_accepted
        z = x.cast(x.pick(self.target_logits, num_accepted), "float64")
        temperature = x.cast(x.np.where(self.status.reshape(-1)[flat] == 0, self.temperature[flat], 1.0), "float64")
        return x.np.where(self.kept[flat], z / temperature[:, None], -np.inf)
