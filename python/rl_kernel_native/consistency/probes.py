"""Records the output of every operator for chosen tokens, in execution order, on each side.

A token is identified by (prompt, position of the input token). A Recorder's hooks only read, so a probed run computes
the same bits as an unprobed run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..integrations.decoder import OBSERVER_ATTRIBUTE
from ..integrations.served import is_served

_POSITION_BITS = 32


def token_key(prompt: int, position: int) -> int:
    """One int64 that sorts by prompt, then position."""
    return (prompt << _POSITION_BITS) | position


def split_key(key: int) -> tuple[int, int]:
    """(prompt, position) of a token_key."""
    return key >> _POSITION_BITS, key & ((1 << _POSITION_BITS) - 1)


def logits_digests(logits: torch.Tensor) -> list[bytes]:
    """A 16-byte hash of the raw bytes of each row of [n, vocab_size]."""
    raw = logits.detach().contiguous().cpu().view(torch.uint8).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in raw]


@dataclass(frozen=True)
class ProbePlan:
    """The tokens to record: positions below limits[prompt], for each prompt in ``limits``.

    These positions always include the beginning of the sequence, because a token's attention reads all earlier
    positions. Without these earlier positions, the agreement of all earlier operators would not imply that an
    operator's inputs agree.
    """

    limits: dict[int, int]

    def wants(self, prompt: int, position: int) -> bool:
        """Whether this token is recorded."""
        return position < self.limits.get(prompt, 0)


def plan_probes(lengths: Sequence[int], bytes_per_token: int, budget_bytes: int) -> ProbePlan:
    """Plans all tokens if they fit the budget, else whole sequences spread over the prompts, else a part of one
    sequence.

    Args:
        lengths: longest possible length of each sequence.
    """
    tokens = max(budget_bytes // bytes_per_token, 1)
    if sum(lengths) <= tokens:
        return ProbePlan(dict(enumerate(lengths)))
    count = max(min(len(lengths), tokens // max(lengths)), 1)
    chosen = sorted({index * len(lengths) // count for index in range(count)})
    return ProbePlan({index: min(lengths[index], tokens) for index in chosen})


def probe_bytes_per_token(config: Any, itemsize: int) -> int:
    """Bytes that one recorded token takes on both sides together, from the model's shape."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layer = 6 * config.hidden_size + 4 * q + 4 * kv + 4 * config.intermediate_size
    total = config.num_hidden_layers * layer + 2 * config.hidden_size + 2 * head_dim + config.vocab_size
    return int(2 * itemsize * total)


class Trace:
    """The values of operators for recorded tokens. Names are in the order in which the operators first ran."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self._chunks: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._sorted: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # operators whose values were requested, sorted

    def add(self, name: str, kind: str, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds values [n, ...] of operator `name` for the tokens with the keys int64 [n]."""
        self.kinds.setdefault(name, kind)
        self._chunks.setdefault(name, []).append((keys, values.detach().reshape(len(keys), -1).cpu()))

    def values(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys int64 [n] ascending, values [n, width]) of one operator. After this call, no more values may be added
        to it."""
        if name not in self._sorted:
            chunks = self._chunks.pop(name)
            keys = torch.cat([chunk[0] for chunk in chunks])
            order = torch.argsort(keys)
            self._sorted[name] = (keys[order], torch.cat([chunk[1] for chunk in chunks])[order])
        return self._sorted[name]

    def lookup(self, name: str, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """bool [n], whether each of the keys int64 [n] is recorded; and the values of the recorded keys."""
        have, values = self.values(name)
        place = torch.searchsorted(have, keys).clamp_max(len(have) - 1)
        known = have[place] == keys
        return known, values[place[known]]


class Recorder:
    """Fills a Trace from hooks. Before each forward, `begin` says which token is at each row and column of the
    batch."""

    replaces = False  # whether the model continues with values other than its own

    def __init__(self, plan: ProbePlan) -> None:
        self.plan = plan
        self.trace = Trace()
        self._keys = torch.zeros(0, dtype=torch.long)
        self._rows = self._columns = self._key_columns = self._keys

    def begin(self, tokens: Sequence[tuple[int, int, int, int, int]], device: torch.device) -> None:
        """Starts a batch. Each token is (row, column, column among the attention keys, prompt, position)."""
        wanted = [item for item in tokens if self.plan.wants(item[3], item[4])]
        self._keys = torch.tensor([token_key(item[3], item[4]) for item in wanted], dtype=torch.long)
        index = torch.tensor([item[:3] for item in wanted], dtype=torch.long).reshape(-1, 3).to(device)
        self._rows, self._columns, self._key_columns = index.unbind(1)

    def add(self, name: str, kind: str, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Records values [B, T, ...] of one operator for the current batch. Returns the values with which the model
        continues."""
        return self._take(name, kind, values, self._keys, self._rows, self._columns)

    def add_keys(self, name: str, kind: str, value: torch.Tensor) -> torch.Tensor:
        """Records value [B, L, ...], indexed by column among the attention keys. Returns the values with which the
        model continues."""
        return self._take(name, kind, (value,), self._keys, self._rows, self._key_columns)[0]

    def add_tokens(
        self, name: str, kind: str, prompts: Sequence[int], positions: Sequence[int], value: torch.Tensor
    ) -> torch.Tensor:
        """Records value [n, ...] of listed tokens; tokens outside the plan are dropped."""
        chosen = [i for i, item in enumerate(zip(prompts, positions, strict=True)) if self.plan.wants(*item)]
        keys = torch.tensor([token_key(prompts[i], positions[i]) for i in chosen], dtype=torch.long)
        return self._take(name, kind, (value,), keys, torch.tensor(chosen, dtype=torch.long, device=value.device))[0]

    def _take(
        self, name: str, kind: str, values: tuple[torch.Tensor, ...], keys: torch.Tensor, *index: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if len(keys):
            self.trace.add(name, kind, keys, gathered(values, index))
        return values


def gathered(values: tuple[torch.Tensor, ...], index: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """One operator's values for the chosen tokens, one row per token."""
    rows = [value[index].reshape(len(index[0]), -1) for value in values]
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)


@contextmanager
def attached(model: Any, recorder: Recorder) -> Iterator[None]:
    """Probes every operator of a Qwen3 or Llama model (transformers classes) while the context is open."""
    handles: list[Any] = []
    attentions: list[torch.nn.Module] = []

    def output(module: torch.nn.Module | None, name: str, kind: str) -> None:
        if isinstance(module, torch.nn.Module):
            handles.append(module.register_forward_hook(lambda m, args, out: _output(recorder, name, kind, out)))

    def input(module: torch.nn.Module, name: str, kind: str) -> None:
        handles.append(module.register_forward_pre_hook(lambda m, args: _input(recorder, name, kind, args)))

    body = model.model
    try:
        output(body.embed_tokens, "embed_tokens", "embedding")
        output(body.rotary_emb, "rotary_emb", "rotary_emb")
        for index, layer in enumerate(body.layers):
            prefix, attention, mlp = f"layers.{index}.", layer.self_attn, layer.mlp
            output(layer.input_layernorm, prefix + "input_layernorm", "rms_norm")
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                output(getattr(attention, name), f"{prefix}self_attn.{name}", "linear")
            for name in ("q_norm", "k_norm"):  # Llama has no such norms
                output(getattr(attention, name, None), f"{prefix}self_attn.{name}", "rms_norm")
            setattr(attention, OBSERVER_ATTRIBUTE, _AttentionObserver(recorder, prefix))
            attentions.append(attention)
            input(layer.post_attention_layernorm, prefix + "attn_residual", "add")
            output(layer.post_attention_layernorm, prefix + "post_attention_layernorm", "rms_norm")
            for name in ("gate_proj", "up_proj"):
                output(getattr(mlp, name), f"{prefix}mlp.{name}", "linear")
            if not is_served(mlp):  # in a patched MLP, activation and product are one operator without a module
                output(mlp.act_fn, prefix + "mlp.act_fn", "activation")
            input(mlp.down_proj, prefix + "mlp.gate_up_mul", "mul")
            output(mlp.down_proj, prefix + "mlp.down_proj", "linear")
            output(layer, prefix + "mlp_residual", "add")
        output(body.norm, "norm", "rms_norm")
        yield
    finally:
        for handle in handles:
            handle.remove()
        for attention in attentions:
            delattr(attention, OBSERVER_ATTRIBUTE)


def _output(recorder: Recorder, name: str, kind: str, out: Any) -> Any:
    # rotary_emb returns (cos, sin), which are recorded as one operator. In any other tuple, the first element is the
    # hidden state.
    if not isinstance(out, tuple):
        return recorder.add(name, kind, out)[0]
    if len(out) == 2 and isinstance(out[1], torch.Tensor):
        return recorder.add(name, kind, *out)
    return (*recorder.add(name, kind, out[0]), *out[1:])


def _input(recorder: Recorder, name: str, kind: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*recorder.add(name, kind, args[0]), *args[1:])


class _AttentionObserver:
    """The observer that decoder.OBSERVER_ATTRIBUTE holds: it records the operands of attention."""

    def __init__(self, recorder: Recorder, prefix: str) -> None:
        self._recorder, self._prefix = recorder, prefix + "self_attn."

    def operands(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (turned,) = self._recorder.add(self._prefix + "rope_q", "rope", query.transpose(1, 2))
        keys = self._recorder.add_keys(self._prefix + "rope_k", "rope", key.transpose(1, 2))
        return turned.transpose(1, 2), keys.transpose(1, 2)

    def output(self, out: torch.Tensor) -> torch.Tensor:
        return self._recorder.add(self._prefix + "attention", "attention", out)[0]
