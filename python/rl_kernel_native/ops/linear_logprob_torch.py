"""Parts of ``linear_logprob`` for torch that its description (linear_logprob_traced.py) does not cover: a vocabulary
that is split over ranks, and masks of targets."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from .. import _check
from .._dispatch import count_write
from .._native import module as _C
from .._ranks import require_group
from .._run import straight
from .._torch import CODES, is_direct, prepare, require_dense, require_tensors
from .linear_logprob_traced import bits, native_backward

__all__ = ["before", "contiguous", "require_tensors", "shard_of"]


class Shard(NamedTuple):
    """The columns of the vocabulary that a rank's weight holds."""

    group: Any  # a torch.distributed group
    vocab_start: int
    vocab_size: int  # number of columns on all ranks

    def forward(self, head: Any, arguments: Any, how: Any, returns: int) -> Any:
        stats = _gathered(_C.linear_logprob_partial(head, arguments, how, self[1:], None, 0), self.group)
        return _C.logprob_merge(
            stats, arguments[0], returns, how[-1], _valid_vocab(self.vocab_size, arguments), None, 0
        )

    def gradients(self, call: Any, main_grad: Any, arrays: Any, how: Any, needs: Any) -> Any:
        """Returns the gradients of the operands. If dh_segments is 1, the gradient of hidden is this rank's share. If
        dh_segments is 8, it is the tree sum over all ranks."""
        if call is not straight:
            raise TypeError("process_group: its backward takes plain gradients, outside of torch.func and of modes")
        prepare(arrays[0])
        dhidden, dweight, *others = native_backward(
            arrays, (*how, bits(needs)), None, 0, main_grad=main_grad, place=self[1:]
        )
        if needs[0] and how[10] > 1:  # so far, dhidden holds only this rank's part of the sum
            shares = _gathered(dhidden, self.group).unbind(0)
            dhidden = _C.tree_sum(list(shares), None, CODES[arrays[0].dtype], None, 0)
        if needs[1] and main_grad is not None:
            count_write(main_grad)
            dweight = None
        return dhidden, dweight, *others


def shard_of(
    head: tuple[Any, ...], arguments: tuple[Any, ...], group: Any, vocab_start: Any, vocab_size: Any
) -> Shard | None:
    """Returns this rank's shard, or None if the weight has every column. Every rank checks that it has the parts of the
    vocabulary that belong to its rank in the group, so that no part is missing or repeated."""
    if group is not None and not is_direct(*head, *arguments):
        raise ValueError("process_group: not under torch.compile, torch.func or a dispatch mode")
    weight = head[1]
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None  # no matrix: the extension raises the error
    columns = weight.shape[0]
    start = _check.integer("vocab_start", vocab_start)
    size = columns if vocab_size is None else _check.integer("vocab_size", vocab_size)
    if vocab_size is not None and size < start + columns:
        raise ValueError(
            f"vocab_size: expected at least {start + columns}, vocab_start and the {columns} rows of weight, got {size}"
        )
    if group is None:
        if start == 0 and size == columns:
            return None
        raise ValueError(
            f"process_group: expected the group whose ranks have the other columns of a vocabulary of {size}, got None "
            f"for weight with columns [{start}, {start + columns}); linear_logprob_partial takes one shard"
        )
    require_group(group)
    ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
    if ranks not in (1, 2, 4, 8):
        raise ValueError(f"process_group: expected 1, 2, 4 or 8 ranks, this one among them, got {ranks}")
    if vocab_size is None and ranks > 1:
        raise ValueError("vocab_size: expected the columns of all ranks of process_group, got None")
    canonical = arguments[5]
    canonical = size if canonical is None else _check.integer("canonical_vocab", canonical)
    valid = _valid_vocab(size, arguments)
    cuts = [_part_cut(canonical, 8 // ranks * i) for i in range(ranks + 1)]
    if (
        len({*cuts}) <= ranks
    ):  # every rank raises this error, because ranks with columns would wait for a rank without columns
        raise ValueError(
            f"process_group: expected columns for each of {ranks} ranks, got a vocabulary of {canonical}, whose cuts "
            f"are {cuts}"
        )
    first, last = cuts[rank : rank + 2]
    end = start + columns
    if start != first or min(end, valid) != min(last, valid) or (rank + 1 < ranks and end > last):
        raise ValueError(
            f"vocab_start: expected rank {rank} of {ranks} to have columns [{first}, {last}), its parts of a "
            f"vocabulary of {canonical}, got [{start}, {end})"
        )
    return None if ranks == 1 and size == columns else Shard(group, start, size)


def _valid_vocab(size: int, arguments: tuple[Any, ...]) -> int:
    """Returns the number of real tokens in a vocabulary of ``size`` columns."""
    valid, canonical = arguments[4:6]
    if valid is not None:
        return _check.integer("valid_vocab", valid)
    return size if canonical is None else min(size, _check.integer("canonical_vocab", canonical))


def _part_cut(vocab: int, i: int) -> int:
    """Returns the first column of part ``i`` (0 to 7) of the vocabulary by rule 5 of docs/numerics.md. For 8, returns
    the vocabulary's end."""
    return vocab if i == 8 else min(8 * (i * -(-vocab // 8) // 8), vocab)


def _gathered(share: Tensor, group: Any) -> Tensor:
    """Returns the shares of all ranks, ``[ranks, ...]`` in rank order."""
    found = share.new_empty((distributed.get_world_size(group), *share.shape))
    distributed.all_gather(list(found.unbind(0)), share, group=group)
    return found


def contiguous(target: Tensor) -> Tensor:
    require_dense(target, "target")
    return target.contiguous()


def before(target: Tensor, cu_seqlens: Tensor) -> Tensor | None:
    """Tells which rows of the target come before the last offset. Returns None for offsets that a later check
    refuses."""
    if cu_seqlens.layout != torch.strided or cu_seqlens.device != target.device:
        return None
    return torch.arange(target.shape[0], device=target.device) < cu_seqlens[-1]
