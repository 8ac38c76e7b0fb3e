"""The implementations of each side's operators, which --ops, or --rollout-ops and --training-ops, choose.

Operators without a choice run as torch and transformers ship them, and the table says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .attention import ATTENTION_NAME, EAGER_NAME, FLASH_NAME, attending_by, why_no_flash
from .batches import MicroBatch
from .errors import BadInput, spelled

ServedBy = Literal["stock", "rk", "both"]

# Rows per chunk of the training side's logsumexp; trainers chunk to bound the float32 copy of the logits.
_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class OperatorRow:
    """One line of the operator table: the implementation on each side, and whether it is stock, this library's, or
    both."""

    operator: str
    served_by: ServedBy
    rollout: str
    training: str


_PART_OF_MUL = "part of silu_mul"
_ADD = "torch add"
_LINEAR = "torch.nn.functional.linear"
_SDPA, _EAGER = "torch scaled_dot_product_attention", "transformers' eager attention, products and softmax apart"
_FLASH = "flash-attn, as transformers calls it"
_SDPA_ROW, _EAGER_ROW, _FLASH_ROW = (
    OperatorRow("attention", "stock", f"{words} on a KV cache", f"{words} on the whole sequence")
    for words in (_SDPA, _EAGER, _FLASH)
)
_ATTENTIONS = {
    "stock": (ATTENTION_NAME, _SDPA_ROW),
    "sdpa": (ATTENTION_NAME, _SDPA_ROW),
    "eager": (EAGER_NAME, _EAGER_ROW),
    "flash": (FLASH_NAME, _FLASH_ROW),
}
_STOCK_ROWS = (
    OperatorRow("embedding", "stock", "torch.nn.functional.embedding", "torch.nn.functional.embedding"),
    OperatorRow("rotary_emb", "stock", "transformers, float32 cos and sin", "transformers, float32 cos and sin"),
    OperatorRow("rms_norm", "stock", "transformers, torch operators", "transformers, torch operators"),
    OperatorRow("linear", "stock", _LINEAR, _LINEAR),
    OperatorRow("rope", "stock", "transformers, torch operators", "transformers, torch operators"),
    _SDPA_ROW,
    OperatorRow("add", "stock", _ADD, _ADD),
    OperatorRow("activation", "stock", "torch", "torch"),
    OperatorRow("mul", "stock", "torch mul", "torch mul"),
    OperatorRow("lm_head", "stock", _LINEAR, _LINEAR),
)

# (operator, this library's function), in the order of a forward pass. None means an elementwise sum: it is rounded
# once, so it has the same bits on every machine.
_RK_ROWS = (
    ("embedding", "embedding"),
    ("rotary_emb", "rope's tables of cos and sin"),
    ("rms_norm", "rms_norm, with the residual where one is added before it"),
    ("linear", "linear"),
    ("rope", "rope"),
    ("attention", "attention"),
    ("add", None),
    ("mul", "silu_mul, activation and product"),
    ("lm_head", "linear"),
)


class StockOperators:
    """The two formulas of the log-probability that engines and trainers use today."""

    served_by: ServedBy = "stock"

    def __init__(self, name: str = "stock", argument: str = "training_ops") -> None:
        self.name, self._argument = name, argument
        self._attention, self._attention_row = _ATTENTIONS[name]

    def check(self, model: Any) -> None:
        """Raises BadInput if the requested attention cannot run."""
        reason = why_no_flash(model) if self.name == "flash" else None
        if reason is not None:
            raise BadInput(f"{spelled(self._argument, 'flash')}: {reason}")

    @contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """The unchanged model with the requested attention."""
        with attending_by(model, self._attention):
            yield

    def training_mask(self, batch: MicroBatch) -> dict[str, Any]:
        """The arguments that tell the model where each sequence of a training batch begins and ends."""
        if self.name != "flash":
            return {"attention_mask": batch.mask}
        if batch.cu_seqlens is None:
            return {"attention_mask": batch.key_mask}
        longest = max(length for *_, length in batch.places)
        return {f"cu_seq_lens_{x}": batch.cu_seqlens for x in "qk"} | {f"max_length_{x}": longest for x in "qk"}

    def decode_mask(self, key_mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask of a decode step, from bool [B, L] with 1 for the keys of a row, or from None."""
        if self.name == "flash":
            return key_mask
        return None if key_mask is None else key_mask[:, None, None, :]

    def table(self) -> list[OperatorRow]:
        """The operators in the order of a forward pass."""
        rows = [self._attention_row if row is _SDPA_ROW else row for row in _STOCK_ROWS]
        return [
            *rows,
            OperatorRow(
                "logprob",
                "stock",
                "torch.log_softmax of float32 logits, gathered",
                "logit - torch.logsumexp, in chunks",
            ),
        ]

    def rollout_logprob(self, logits: torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
        """float32 [B], in nats, from logits [B, vocab_size] of any float dtype and target int64 [B]."""
        scores = _wide(logits) / temperature
        return torch.log_softmax(scores, dim=-1).gather(1, target[:, None])[:, 0].float()

    def training_logprob(
        self, head: Any, hidden: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """float32 [N], in nats, from the head's logits [N, vocab_size] of any float dtype and target int64 [N]."""
        return self.logprob_of_logits(logits, target, temperature)

    def logprob_of_logits(self, logits: torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
        """float32 [N], in nats, by the training side's formula, from logits [N, vocab_size] of any float dtype and
        target int64 [N]."""
        parts = []
        for start in range(0, len(target), _CHUNK_ROWS):
            scores = _wide(logits[start : start + _CHUNK_ROWS]) / temperature
            ids = target[start : start + _CHUNK_ROWS, None]
            parts.append(scores.gather(1, ids)[:, 0] - torch.logsumexp(scores, dim=-1))
        return torch.cat(parts).float()


class RkOperators:
    """This library's operators for every step. The rollout scores logits, and training scores hidden states, with the
    same bits."""

    name = "rk"
    served_by: ServedBy = "rk"

    def __init__(self, argument: str = "training_ops") -> None:
        self._argument = argument
        self._library: Any = importlib.import_module("rl_kernel_native")

    def check(self, model: Any) -> None:
        """Raises BadInput if the model's dtype is not supported."""
        if model.lm_head.weight.dtype == torch.float64:
            raise BadInput(
                f"{spelled(self._argument, 'rk')}: the operators take no float64; give {spelled('dtype', 'float32')}"
            )

    @contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """The model with this library's operators, while the context is open."""
        try:
            self._library.patch_model(model, strict=True)
        except (TypeError, ValueError, ImportError) as error:  # ImportError: transformers is too old
            raise BadInput(f"{spelled(self._argument, 'rk')}: {error}") from error
        try:
            yield
        finally:
            self._library.unpatch_model(model)

    def training_mask(self, batch: MicroBatch) -> dict[str, Any]:
        """The arguments that tell the model where each sequence of a training batch begins and ends."""
        if batch.cu_seqlens is not None:
            return {"cu_seq_lens_q": batch.cu_seqlens}
        return {"attention_mask": batch.key_mask}

    def decode_mask(self, key_mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask of a decode step, from bool [B, L] with 1 for the keys of a row, or from None."""
        return key_mask

    def table(self) -> list[OperatorRow]:
        """The operators in the order of a forward pass."""
        return [
            *(
                OperatorRow(operator, "stock", _ADD, _ADD)
                if call is None
                else OperatorRow(operator, "rk", f"rl_kernel_native.{call}", f"rl_kernel_native.{call}")
                for operator, call in _RK_ROWS
            ),
            OperatorRow(
                "logprob",
                "rk",
                "rl_kernel_native.logprob on the logits as the model gives them",
                "rl_kernel_native.linear_logprob on the head's hidden states",
            ),
        ]

    def rollout_logprob(self, logits: torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
        """float32 [B], in nats, from logits [B, vocab_size], float32, bfloat16 or float16, and target int64 [B]."""
        result: torch.Tensor = self._library.logprob(logits, target, temperature=temperature)
        return result

    def training_logprob(
        self, head: Any, hidden: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """float32 [N], in nats, from the head's input [N, hidden_size], float32, bfloat16 or float16, and target int64
        [N]. Only the dtype of ``logits`` is used."""
        result: torch.Tensor = self._library.linear_logprob(
            hidden, head.weight, target, bias=head.bias, temperature=temperature, logits_dtype=logits.dtype
        )
        return result

    def logprob_of_logits(self, logits: torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
        """float32 [N], in nats, from logits [N, vocab_size] and target int64 [N]: the bits of training_logprob for the
        same logits."""
        return self.rollout_logprob(logits, target, temperature)


Operators = StockOperators | RkOperators


def make_operators(name: str, argument: str) -> Operators:
    """The operators that a name in OPERATOR_SETS stands for. Errors name `argument`: rollout_ops or training_ops."""
    return RkOperators(argument) if name == "rk" else StockOperators(name, argument)


def operator_table(rollout: Operators, training: Operators) -> list[OperatorRow]:
    """The implementations on both sides, in the order of a forward pass. If both sides have the same implementation,
    the row names this implementation once."""
    ours = {row.operator: row for row in rollout.table()}
    theirs = {row.operator: row for row in training.table()}
    rows = []
    for operator in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(operator), theirs.get(operator)
        served = a.served_by if a and b and a.served_by == b.served_by else "both"
        row = OperatorRow(operator, served, a.rollout if a else _PART_OF_MUL, b.training if b else _PART_OF_MUL)
        rows.append(row)
    return rows


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
