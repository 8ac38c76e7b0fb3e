"""Finds the sequences of a batch: turns the inputs of a transformers model into arguments of attention.

The canonical order of attention counts keys from a sequence's first real token. Attention must therefore know which
tokens are padding, and where packed sequences begin. Each forward finds the sequences once, before its layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


def packed_positions(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The position of each packed token in its sequence, [num_tokens] int64. The host does not read the offsets. Bad
    offsets therefore raise no error; the positions are then wrong, but in range."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    begins = cu_seqlens[(torch.searchsorted(cu_seqlens, tokens, right=True) - 1).clamp_min(0)]
    return (tokens - begins).clamp(0, num_tokens - 1).long()


@dataclass(frozen=True)
class Sequences:
    """The sequences of one forward of the model.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 [num_sequences + 1] for packed sequences, else None.
        leftpad_k: int32 [batch], the number of padding columns before each row's first key, or None.
        seqused_k: int32 [batch], the number of each row's keys after the padding; None means all.
        num_keys: number of keys of a row, including padding; a cache may be longer.
    """

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    num_keys: int | None = None

    def positions(self, batch: int, num_queries: int) -> torch.Tensor | None:
        """Positions of the last `num_queries` columns, or None if the rotary embedding can count columns itself.

        Shape [batch, num_queries]. Each packed sequence counts from 0; each padded row counts from its first key. The
        host does not read the offsets. Bad offsets therefore raise no error; positions are then wrong, but in range.
        """
        if self.cu_seqlens_q is not None:
            return packed_positions(self.cu_seqlens_q, batch * num_queries).view(batch, num_queries)
        if self.leftpad_k is None or self.num_keys is None:
            return None
        columns = torch.arange(self.num_keys - num_queries, self.num_keys, device=self.leftpad_k.device)
        return (columns - self.leftpad_k[:, None]).clamp_min(0)


def locate_sequences(
    batch: int,
    num_queries: int,
    device: torch.device,
    *,
    attention_mask: torch.Tensor | dict[str, Any] | None,
    position_ids: torch.Tensor | None,
    past_key_values: Any,
    use_cache: bool = False,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
) -> Sequences:
    """Sequences of a forward over `batch` rows of `num_queries` tokens.

    On a GPU, a forward synchronises once, because the host reads the mask, or the positions if there is no mask. With
    `cu_seq_lens_q`, as from transformers' flattening collator, there is no synchronisation.

    Args:
        attention_mask: None, or [batch, keys], nonzero for real tokens. There must be no padding between real tokens.
            With a static cache the mask may be wider than the keys; columns past the keys are not read.
        position_ids: None, or [batch or 1, num_queries]. Without mask and cache, a position that is not the previous
            one plus 1 begins another sequence, as in transformers' own attention.
        past_key_values: None or a cache.
        use_cache: whether the forward makes a cache if it is given none.

    Raises:
        TypeError: positions that are not integers; a mask that is no tensor.
        TypeError: offsets that are no tensor of int32 or int64.
        ValueError: no token; positions, a mask or offsets with a wrong shape; `cu_seq_lens_k` without `cu_seq_lens_q`.
        ValueError: a mask narrower than the cache and the new tokens, or with padding inside a sequence.
        ValueError: positions that begin another sequence, if a cache is given or made.
        ValueError: `cu_seq_lens_q` with several rows, with a cache that is given, or with a mask that has zeros.
    """
    if batch == 0 or num_queries == 0:
        raise ValueError(f"input_ids: expected at least one row and one token, got [{batch}, {num_queries}]")
    if position_ids is not None:
        _require_positions(batch, num_queries, position_ids)
    # For static caches, generate passes a dict with a mask per kind of layer. All entries are the same mask here.
    if isinstance(attention_mask, dict):
        attention_mask = next(iter(attention_mask.values()), None)
    if attention_mask is not None and not isinstance(attention_mask, torch.Tensor):
        raise TypeError(f"attention_mask: expected a torch.Tensor or None, got a {type(attention_mask).__name__}")
    if cu_seq_lens_k is not None:
        if cu_seq_lens_q is None:
            raise ValueError(
                "cu_seq_lens_q: expected offsets of the packed sequences beside cu_seq_lens_k, got None; "
                "pass the same tensor as both"
            )
        _require_offsets("cu_seq_lens_k", cu_seq_lens_k)
    if cu_seq_lens_q is not None:
        _require_offsets("cu_seq_lens_q", cu_seq_lens_q)
        if batch != 1:
            raise ValueError(
                f"input_ids: expected one row that holds all sequences of cu_seq_lens_q, got {batch} rows; "
                "pass ids of [1, num_tokens], or padded rows with an attention_mask"
            )
        if past_key_values is not None:
            raise ValueError("past_key_values: expected None beside cu_seq_lens_q; a cache has one sequence a row")
        if attention_mask is not None and not bool((attention_mask != 0).all()):
            raise ValueError("attention_mask: expected None or no zero beside cu_seq_lens_q, which names all sequences")
        of_keys = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        return Sequences(cu_seqlens_q=cu_seq_lens_q.int(), cu_seqlens_k=of_keys.int())
    keys = None if past_key_values is None else _cached(past_key_values, num_queries)
    if attention_mask is not None:
        return _masked(batch, num_queries, attention_mask, past_key_values is not None, keys)
    if past_key_values is not None or use_cache:
        _require_one_sequence(position_ids)
        return Sequences(num_keys=keys)
    if position_ids is None or num_queries < 2:
        return Sequences()
    return _packed(batch, num_queries, device, position_ids)


def _require_offsets(name: str, offsets: Any) -> None:
    if not isinstance(offsets, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor or None, got a {type(offsets).__name__}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {offsets.dtype}")
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(f"{name}: expected [num_sequences + 1], got {list(offsets.shape)}")


def _require_positions(batch: int, num_queries: int, position_ids: torch.Tensor) -> None:
    if position_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"position_ids: expected int64 or int32, got {position_ids.dtype}")
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != num_queries:
        rows = "1" if batch == 1 else f"{batch} or 1"
        raise ValueError(f"position_ids: expected [{rows}, {num_queries}], got {list(position_ids.shape)}")


def _cached(cache: Any, num_queries: int) -> int | None:
    """The number of keys of a row after this forward. None for a cache that gives each layer exactly the keys of the
    row."""
    length = getattr(cache, "get_seq_length", None)
    return None if length is None else int(length()) + num_queries


def _require_one_sequence(position_ids: torch.Tensor | None) -> None:
    """Raises a ValueError if positions begin another sequence in a row of a cache.

    With such positions, some of transformers' attention functions treat the rows as packed sequences, and others do
    not. In both cases the next forward could not read the cache. The check is skipped in a trace, so it does not break
    one.
    """
    if position_ids is None or position_ids.shape[-1] < 2 or torch.compiler.is_compiling():
        return
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if bool(restarts.any()):
        row, column = restarts.nonzero()[0].tolist()
        before, after = position_ids[row, column : column + 2].tolist()
        raise ValueError(
            f"position_ids: expected positions that go on by one beside a cache, which has one sequence a row, got "
            f"{after} after {before} in row {row}; for packed sequences pass use_cache=False"
        )


def _masked(batch: int, num_queries: int, mask: torch.Tensor, has_cache: bool, keys: int | None) -> Sequences:
    fits = mask.dim() == 2 and mask.shape[0] == batch and mask.shape[1] >= num_queries
    if not fits or (not has_cache and mask.shape[1] != num_queries):
        raise ValueError(
            f"attention_mask: expected None or [{batch}, {'at least ' if has_cache else ''}{num_queries}], 1 where a "
            f"token is real, got {list(mask.shape)}; packed sequences are named by position_ids or cu_seq_lens_q"
        )
    if keys is not None:
        mask = mask[:, :keys]
    width = mask.shape[1]
    if keys is not None and width < keys:
        raise ValueError(
            f"attention_mask: expected [{batch}, at least {keys}], the tokens of the cache and {num_queries} new ones, "
            f"got {list(mask.shape)}"
        )
    real = mask != 0
    columns = torch.arange(width, device=mask.device)
    first = torch.where(real, columns, width).amin(1)
    end = torch.where(real, columns + 1, 0).amax(1)
    count = real.sum(1)
    facts = torch.stack([count == (end - first).clamp_min(0), count == width, count > 0]).cpu()
    if not bool(facts[0].all()):
        row = int((~facts[0]).nonzero()[0])
        raise ValueError(
            f"attention_mask: expected padding around a sequence only, row {row} has some inside; "
            "move the row's real tokens together, or pack its sequences in one row and name them by cu_seq_lens_q"
        )
    if bool(facts[1].all()):
        return Sequences(num_keys=width)
    # Causal attention never reads keys to the right of a query, so padding on the right matters only if a row has one
    # query: this query is the row's last token.
    last = end if num_queries == 1 else torch.full_like(end, width)
    leftpad = torch.where(count > 0, first, width)
    return Sequences(leftpad_k=leftpad.int(), seqused_k=(last - leftpad).clamp_min(0).int(), num_keys=width)


def _packed(batch: int, num_queries: int, device: torch.device, position_ids: torch.Tensor) -> Sequences:
    goes_on = position_ids[:, 1:] == position_ids[:, :-1] + 1
    if bool(goes_on.all()):
        return Sequences()
    begins = torch.ones(batch, num_queries, dtype=torch.bool, device=device)
    begins[:, 1:] = ~goes_on
    starts = begins.flatten().nonzero()[:, 0]
    total = torch.full((1,), batch * num_queries, dtype=starts.dtype, device=device)
    cu_seqlens = torch.cat([starts, total]).int()
    return Sequences(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
