"""Speculative decoding: finds the accepted tokens of a draft, and the token after the accepted tokens. The operator is
composed of ``sample`` and ``logprob``."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np

from .. import _check, _cures, _dispatch
from .._types import AnyArray, ArrayT, Exp, Generic, NamedTuple
from ._rejection import STREAM, Arrays, Rejection
from .random_bits import given, position_of, seed_of
from .sample import MOST_COLUMNS, sample

__all__ = ["DraftVerification", "verify_draft"]

MODES = ("same", "rejection")
INTEGERS = ("int32", "int64")
FLOATS = ("float32", "bfloat16", "float16")


class DraftVerification(NamedTuple, Generic[ArrayT]):
    """The result of :func:`verify_draft`.

    Attributes:
        num_accepted: int64 ``[num_rows]``: the number of accepted draft tokens; they are the draft's first tokens.
        next_id: int64 ``[num_rows]``: the token after the accepted tokens; -1 if the logits at its position are bad.
        logprobs: float32 ``[num_rows, num_draft + 1]``: log-probabilities of the accepted tokens and of the next token,
            then NaN.
        status: int32 ``[num_rows]``, :class:`SampleStatus` of the next token's row of logits.
    """

    num_accepted: ArrayT
    next_id: ArrayT
    logprobs: ArrayT
    status: ArrayT


def verify_draft(
    target_logits: ArrayT,
    draft_ids: ArrayT,
    draft_logits: ArrayT | None = None,
    *,
    seed: int | AnyArray,
    sample_id: int | AnyArray,
    position: int | AnyArray,
    mode: Literal["same", "rejection"] = "same",
    temperature: float | AnyArray = 1.0,
    top_k: int | AnyArray = 0,
    top_p: float | AnyArray = 1.0,
    min_p: float | AnyArray = 0.0,
    greedy: bool | AnyArray = False,
    allowed: AnyArray | None = None,
    valid_vocab: int | None = None,
    order: Literal["vllm", "hf", "sglang"] = "vllm",
    exp: Exp = None,
) -> DraftVerification[ArrayT]:
    """Accepts draft tokens from the first on, and draws the token after them.

    ``mode="same"`` accepts a draft token if :func:`sample` draws the same token at its position, and stops at the first
    token that differs. Tokens and log-probabilities therefore equal those of a rollout without speculation, byte for
    byte. The draft affects how many tokens a step gives, but not which tokens.

    ``mode="rejection"`` keeps the distribution of the tokens, but not their bytes. This mode accepts token x with
    probability min(1, p(x) / q(x)). In place of the first rejected token, this mode draws from max(0, p - q). If all
    draft tokens are accepted, the next token is drawn from p. Here p is the distribution from which :func:`sample`
    draws, and q is the draft's. This mode uses the random words of stream 1, so :func:`sample` may draw the draft with
    the same keys. This mode holds the kept sets of all steps in memory: 5 bytes per logit. No result has a gradient;
    logits that require a gradient are treated as detached.

    Args:
        target_logits: ``[num_rows, num_draft + 1, vocab_size]`` float32, float16 or bfloat16, contiguous. Logits [i, j]
            follow the first j draft tokens. With penalties or bias, pass the result of :func:`process_logits`.
        draft_ids: ``[num_rows, num_draft]`` int32 or int64. An id outside the vocabulary, such as -1, is not accepted.
        draft_logits: ``[num_rows, num_draft, vocab_size]``, contiguous, for ``mode="rejection"``: log-probabilities of
            the draft's distribution, or its logits at temperature 1, with -Inf for cut tokens. Columns from
            ``valid_vocab`` on are not read. None: the draft is deterministic, so q(x) is 1.
        seed, sample_id, temperature, top_k, top_p, min_p, greedy: as for :func:`sample`; each is a number, or an array
            ``[num_rows]``.
        position: the position of the row's first draft token in its sample's output: an integer, or ``[num_rows]``.
        allowed: int32 ``[num_rows, num_draft + 1, ceil(vocab_size / 32)]``, or None.
        valid_vocab, order, exp: as for :func:`sample`.
    Returns: :class:`DraftVerification`.
    Raises: as :func:`sample`; TypeError for arrays that are neither torch's nor NumPy's; NotImplementedError for
        torch.func.vmap with ``mode="rejection"``.
    Source: the contract of sample; Leviathan et al. 2023, arXiv:2211.17192, algorithm 1, for ``mode="rejection"``.
    Example:
        >>> logits = torch.tensor([[[0.0, 9.0, 1.0], [9.0, 0.0, 0.0]]])
        >>> rk.verify_draft(logits, torch.tensor([[1]]), seed=7, sample_id=0, position=0, greedy=True)[:2]
        (tensor([1]), tensor([0]))
    """
    _check.one_of("mode", mode, MODES)
    if not _is_array(greedy):
        greedy = _check.flag("greedy", greedy)
    cuts: dict[str, Any] = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "greedy": greedy,
    }  # fmt: skip
    of_rows = {"seed": seed, "sample_id": sample_id, "position": position, **cuts}
    _require_alike(target_logits, draft_ids, {"draft_logits": draft_logits, "allowed": allowed, **of_rows})
    rows, steps = _check_shapes(target_logits, draft_ids, draft_logits, mode)
    _check_dtype("position", position if _is_array(position) else None, INTEGERS)  # steps' positions are int64
    x = Arrays(target_logits)
    target_logits, draft_ids = x.plain(target_logits), x.plain(draft_ids)
    draft_logits = None if draft_logits is None else x.plain(draft_logits)
    ahead = x.ascending(steps)

    def of_steps(name: str, value: Any) -> Any:
        """Returns the values of rows, each repeated for the steps of its row."""
        if not _is_array(value):
            return value  # `sample` raises the error
        if tuple(value.shape) != (rows,):
            raise ValueError(f"{name}: expected shape [{rows}], got {list(value.shape)}")
        return x.np.broadcast_to(x.plain(value)[:, None], (rows, steps)).reshape(-1)

    first = of_steps("position", position_of(position))
    if not _check.is_number(first) and not _is_array(first):
        raise TypeError(f"position: expected an integer or an array of them, got {type(position).__name__}")
    keys = {
        "seed": of_steps("seed", seed_of(seed)),
        "sample_id": of_steps("sample_id", given("sample_id", sample_id)),
        "position": first + x.np.broadcast_to(ahead, (rows, steps)).reshape(-1),
    }
    cuts = {name: of_steps(name, value) for name, value in cuts.items()}
    masks: Any = allowed
    if masks is not None:
        _require_array("allowed", masks)
        if len(shape := _check.shape_of(allowed)) != 3 or tuple(shape[:2]) != (rows, steps):
            raise ValueError(f"allowed: expected shape [{rows}, {steps}, num_words], got {list(shape)}")
        masks = x.plain(masks).reshape(rows * steps, shape[2])
    how: dict[str, Any] = {"valid_vocab": valid_vocab, "exp": exp}
    logits: Any = target_logits
    draw = partial(
        sample, logits.reshape(rows * steps, logits.shape[2]), **keys, **cuts, **how, allowed=masks,
        order=order,
    )  # fmt: skip
    if mode == "same":
        drawn = draw()
        ids = drawn.ids.reshape(rows, steps)
        num_accepted = x.leading((ids[:, :-1] == draft_ids) & (ids[:, :-1] >= 0))
        next_id, logprobs = x.pick(ids, num_accepted), drawn.logprob.reshape(rows, steps)
    else:
        drawn = draw(stream=STREAM, return_kept=True)
        rejection = Rejection(x, target_logits, draft_ids, draft_logits, drawn, keys, cuts, how)
        num_accepted, next_id, logprobs = rejection.run()
    logprobs = x.np.where(ahead[None] <= num_accepted[:, None], logprobs, x.full(float("nan"), x.np.float32))
    return DraftVerification(num_accepted, next_id, logprobs, x.pick(drawn.status.reshape(rows, steps), num_accepted))


def _is_array(value: Any) -> bool:
    """Tells whether the value is an array. Numbers are excluded first, because a trace may hold numbers as symbols."""
    return not _check.is_number(value) and _dispatch.is_array(value)


def _require_array(name: str, value: Any) -> None:
    if not _is_array(value):
        raise TypeError(f"{name}: expected an array or None, got {type(value).__name__}")


def _check_dtype(name: str, value: Any, dtypes: tuple[str, ...]) -> None:
    if value is not None and (dtype := str(value.dtype).removeprefix("torch.")) not in dtypes:
        said = f"expected dtype {', '.join(dtypes[:-1])} or {dtypes[-1]}, got {dtype}"
        raise _cures.type_error(name, value, said)


def _require_alike(target_logits: Any, draft_ids: Any, optional: dict[str, Any]) -> None:
    """Raises an error unless all arrays have one framework and one device."""
    optional = {name: value for name, value in optional.items() if _is_array(value)}
    if _dispatch.is_tensor(target_logits):
        from .._torch import require_tensors

        return require_tensors(target_logits=target_logits, draft_ids=draft_ids, optional=optional)
    if not isinstance(target_logits, np.ndarray):
        raise TypeError(f"target_logits: expected a torch tensor or NumPy array, got {type(target_logits).__name__}")
    for name, value in {"draft_ids": draft_ids, **optional}.items():
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{name}: expected a NumPy array as target_logits is one, got {type(value).__name__}")
    return None


def _check_shapes(target_logits: Any, draft_ids: Any, draft_logits: Any, mode: str) -> tuple[int, int]:
    shape = tuple(target_logits.shape)
    if len(shape) != 3 or shape[1] < 1:
        raise ValueError(f"target_logits: expected shape [num_rows, num_draft + 1, vocab_size], got {list(shape)}")
    rows, steps, vocab = shape
    if type(vocab) is int and not 1 <= vocab <= MOST_COLUMNS:
        raise ValueError(f"target_logits: expected 1 to {MOST_COLUMNS} columns, got {vocab}")
    for name, value, wanted in (
        ("draft_ids", draft_ids, (rows, steps - 1)),
        ("draft_logits", draft_logits, (rows, steps - 1, vocab)),
    ):
        if name == "draft_logits" and value is None:
            continue
        _require_array(name, value)
        if tuple(value.shape) != wanted:
            raise ValueError(f"{name}: expected shape {list(wanted)}, got {list(value.shape)}")
    _check_dtype("target_logits", target_logits, FLOATS)
    _check_dtype("draft_ids", draft_ids, INTEGERS)
    _check_dtype("draft_logits", draft_logits, FLOATS)
    if draft_logits is not None and mode == "same":
        raise ValueError('draft_logits: expected None with mode="same", which does not read them')
    return rows, steps
