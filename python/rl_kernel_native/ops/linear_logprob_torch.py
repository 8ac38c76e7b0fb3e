"""linear_logprob for torch tensors.

An eager call goes directly to the extension, or through one autograd.Function if a gradient is wanted. A call under a
trace or a transform goes through linear_logprob_traced.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from .. import _check, _main_grad, _torch
from .._arithmetic import AS_CALLED, product_unit, resolve_exp, unresolved_exp
from .._composed import Composing
from .._dispatch import count_write
from .._native import module as _C
from .._ranks import require_group
from .._run import straight, traced
from .._torch import (
    CODES,
    autocast,
    is_autocasting,
    is_compiling,
    is_direct,
    is_grad_enabled,
    prepare,
    require_dense,
    require_tensors,
    wants_grad,
)
from .linear_logprob_traced import FORWARD, LARGEST, bits, native_backward, no_second
from .logprob_torch import _selected, check_temperature
from .logprob_traced import split

__all__ = ["linear_logprob", "partial", "require_tensors", "scored_target"]


class Shard(NamedTuple):
    """The vocabulary columns of a rank's weight."""

    group: Any  # torch.distributed's
    vocab_start: int
    vocab_size: int  # number of columns on all ranks

    def gradients(self, call: Any, main_grad: Any, arrays: Any, how: Any, needs: Any) -> Any:
        """Gradients of the operands. The gradient of hidden is this rank's share, or with segments the tree over all
        ranks."""
        if call is not straight:
            raise TypeError("process_group: its backward takes plain gradients, outside of torch.func and of modes")
        prepare(arrays[0])
        dhidden, dweight, *others = native_backward(
            arrays, (*how, bits(needs)), None, 0, main_grad=main_grad, place=self[1:]
        )
        if needs[0] and how[10] > 1:  # dhidden is only this rank's part of the tree sum
            shares = _gathered(dhidden, self.group).unbind(0)
            dhidden = _C.tree_sum(list(shares), None, CODES[arrays[0].dtype], None, 0)
        if needs[1] and main_grad is not None:
            count_write(main_grad)
            dweight = None
        return dhidden, dweight, *others


def linear_logprob(
    head: tuple[Any, ...], target: Any, arguments: tuple[Any, ...], exp: str | None, logits: int, returns: int,
    weight_grad: bool, main_grad: Any, workspace_bytes: int | None, dh_segments: int, where: tuple[Any, Any, Any],
) -> Any:  # fmt: skip
    """``head`` holds hidden, weight, bias, lora_a, lora_b, lora_scale and label_smoothing; ``where`` holds
    process_group, vocab_start and vocab_size."""
    hidden, weight, bias, lora_a, lora_b, lora_scale, label_smoothing = head
    if is_autocasting():
        hidden, weight, bias, lora_a, lora_b = autocast(hidden, weight, bias, lora_a, lora_b)
    temperature, *_, kept_ids, kept_offsets = arguments
    direct = is_direct(hidden, weight, bias, lora_a, lora_b, target, temperature, kept_ids, kept_offsets)
    check_temperature(temperature)
    compiling = not direct and is_compiling()
    mode = unresolved_exp(exp) if compiling else resolve_exp(exp, _torch.device_type(hidden, "hidden"))
    unit = AS_CALLED if compiling else product_unit()
    if main_grad is not None:
        if not weight_grad:
            raise ValueError("main_grad: weight_grad is False, so nothing would be added to it")
        _main_grad.check(
            main_grad, weight, hidden=hidden, bias=bias, lora_a=lora_a, lora_b=lora_b, target=target,
            temperature=temperature, kept_ids=kept_ids, kept_offsets=kept_offsets,
        )  # fmt: skip
    if isinstance(target, Tensor):
        require_dense(target, "target")
        target = target.contiguous()
    if not weight_grad and isinstance(weight, Tensor):
        weight = weight.detach()
    if not direct and where[0] is not None:
        raise ValueError("process_group: not under torch.compile, torch.func or a dispatch mode")
    shard = _shard(weight, arguments, *where)
    if not direct:
        options = (mode, logits, workspace_bytes, unit, dh_segments, lora_scale, label_smoothing, returns)
        rows, options = split(arguments, *options, None, main_grad)
        outputs = traced(FORWARD, (hidden, weight, bias, lora_a, lora_b, target, *rows), options)
        return _selected(outputs if returns & LARGEST else outputs[:-1], returns)
    how = (mode, logits, workspace_bytes, unit, dh_segments, lora_scale, label_smoothing)
    given = (hidden, weight, bias, lora_a, lora_b, target)
    if wants_grad(*given[:5]):
        return _selected(_LinearLogprob.run(*given, arguments, how, shard, returns, main_grad), returns)
    prepare(hidden)
    return _forward(given, arguments, how, shard, returns)


def _shard(weight: Any, arguments: tuple[Any, ...], group: Any, vocab_start: Any, vocab_size: Any) -> Shard | None:
    """This rank's shard, or None if the weight has every column. Every rank checks that it has the parts of its place
    in the group, so that no part is missing or repeated."""
    if group is None and vocab_start == 0 and vocab_size is None:
        return None
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None  # the extension refuses such a weight
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
    ):  # every rank raises an error; otherwise the others would wait for the rank without columns
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
    """The number of real tokens in a vocabulary of ``size`` columns."""
    valid, canonical = arguments[4:6]
    if valid is not None:
        return _check.integer("valid_vocab", valid)
    return size if canonical is None else min(size, _check.integer("canonical_vocab", canonical))


def _part_cut(vocab: int, i: int) -> int:
    """The first column of part ``i`` by rule 5 of docs/numerics.md, or the vocabulary's end for part 8."""
    return vocab if i == 8 else min(8 * (i * -(-vocab // 8) // 8), vocab)


def _gathered(share: Tensor, group: Any) -> Tensor:
    """The shares of all ranks, ``[ranks, ...]`` in rank order."""
    found = share.new_empty((distributed.get_world_size(group), *share.shape))
    distributed.all_gather(list(found.unbind(0)), share, group=group)
    return found


def partial(
    head: tuple[Any, ...], target: Any, arguments: tuple[Any, ...], exp: str | None, logits: int,
    workspace_bytes: int | None, vocab_start: int, vocab_size: int,
) -> Tensor:  # fmt: skip
    hidden, weight, bias, lora_a, lora_b, lora_scale = head
    if is_autocasting():
        hidden, weight, bias, lora_a, lora_b = autocast(hidden, weight, bias, lora_a, lora_b)
    if not is_direct(hidden, weight, bias, lora_a, lora_b, target):
        optional = {"bias": bias, "lora_a": lora_a, "lora_b": lora_b}
        require_tensors(hidden=hidden, weight_shard=weight, target=target, optional=optional)
        raise TypeError("linear_logprob_partial: expected plain torch.Tensors in eager mode, got others or a trace")
    if wants_grad(hidden, weight, bias, lora_a, lora_b):
        raise ValueError(
            "hidden: linear_logprob_partial has no autograd, its ranks exchange statistics in between; call it under "
            "torch.no_grad(), or linear_logprob with process_group"
        )
    mode = resolve_exp(exp, _torch.device_type(hidden, "hidden"))
    how = (mode, logits, workspace_bytes, product_unit(), 1, lora_scale, 0.0)
    given = (hidden, weight, bias, lora_a, lora_b, target)
    prepare(hidden)
    stats: Tensor = _C.linear_logprob_partial(given, arguments, how, (vocab_start, vocab_size), None, 0)
    return stats


def before(target: Tensor, cu_seqlens: Tensor) -> Tensor | None:
    """Which rows of the target are before the last cut; None for cuts that a later check refuses."""
    if cu_seqlens.layout != torch.strided or cu_seqlens.device != target.device:
        return None
    return torch.arange(target.shape[0], device=target.device) < cu_seqlens[-1]


def scored_target(target: Tensor, loss_mask: Any, ignored: int) -> Tensor:
    require_tensors(target=target, loss_mask=loss_mask)
    _check.mask_dtype("loss_mask", _torch.dtype_name(loss_mask.dtype))
    if loss_mask.shape != target.shape:
        wanted = list(target.shape)
        raise ValueError(f"loss_mask: expected shape {wanted} (that of target), got {list(loss_mask.shape)}")
    if target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target: expected dtype int32 or int64, got {_torch.dtype_name(target.dtype)}")
    _check.held_by("target", ignored, "ignore_index", str(target.dtype))
    return torch.where(loss_mask != 0, target, ignored)


def _forward(
    head: tuple[Any, ...], arguments: tuple[Any, ...], how: tuple[Any, ...], shard: Shard | None, returns: int
) -> Any:
    if shard is None:
        return _C.linear_logprob(head, arguments, how, returns, None, 0)
    stats = _gathered(_C.linear_logprob_partial(head, arguments, how, shard[1:], None, 0), shard.group)
    valid = _valid_vocab(shard.vocab_size, arguments)
    return _C.logprob_merge(stats, arguments[0], returns, how[-1], valid, None, 0)


class _LinearLogprob(Composing):
    """Eager autograd. Its forward first asks for the workspace of backward; for a shard it computes statistics."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Any, lora_a: Any, lora_b: Any, target: Tensor,
        arguments: tuple[Any, ...], how: tuple[Any, ...], shard: Shard | None, returns: int, main_grad: Any,
    ) -> Any:  # fmt: skip
        prepare(hidden)
        head, needs = (hidden, weight, bias, lora_a, lora_b, target), bits(ctx.needs_input_grad[:5])
        # Raises before forward if the workspace is too small for backward.
        place = None if shard is None else shard[1:]
        if how[2] is not None:
            _C.linear_logprob_require_workspace(head, arguments, how, place, needs, main_grad is not None)
        outputs = _forward(head, arguments, how, shard, returns | 2)
        # main_grad is not saved, because other backwards may add to it in between
        rows, options = split(arguments, *how, returns, shard, main_grad)
        ctx.save_for_backward(outputs[1], *head, outputs[2], *rows)
        ctx.state = FORWARD, options, torch.float32, ()
        ctx.mark_non_differentiable(*(o for o in outputs[3:] if o is not None))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        if is_grad_enabled():
            _main_grad.refuse_create_graph(ctx.state[1][-1])
            no_second()
        return Composing.backward(ctx, *incoming)
