"""Forwards of the modules of a transformers decoder on this library's operators. `patch_model` puts them in place.

Each takes the module as its first argument and calls submodules as the original does, so hooks, adapters and sharding
of those go on working. What rounds where is what transformers 5.23 and 5.24 round: `rope`, `embedding`, `rms_norm` and
`silu_mul` differ from the originals by the last bits of float32 functions and sums alone.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
import torch

import rl_kernel_native as rk

from .sequences import Sequences, locate_sequences

# transformers looks attention up by name; both registries know this one once a model was patched.
ATTENTION_NAME = "rl_kernel_native"
SEQUENCES = "rk_sequences"  # keyword that carries the Sequences of a forward through the layers
BODY_RECORD = "_rk_record"  # attribute of a patched body: what was patched with it

# What models call their cache: from transformers 5.24 on, and before.
CACHE_NAMES = ("cache", "past_key_values")

# A tool may look at what attention reads and gives: called as observer(module, query [B, H, T, D], key [B, Hkv, L, D],
# output [B, T, H, D]).
OBSERVER_ATTRIBUTE = "_rlk_attention_observer"


def embedding(module: Any, input: torch.Tensor) -> torch.Tensor:
    """torch.nn.Embedding: ids [...] to [..., hidden]."""
    return rk.embedding(input, module.weight, padding_idx=module.padding_idx)


def linear(module: Any, input: torch.Tensor) -> torch.Tensor:
    """torch.nn.Linear: [..., in_features] to [..., out_features]."""
    return rk.linear(input, module.weight, module.bias)


def rms_norm(module: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """LlamaRMSNorm and Qwen3RMSNorm; with a residual the pair (normalised, hidden_states + residual)."""
    return rk.rms_norm(
        hidden_states, module.weight, module.variance_epsilon, residual=residual, round_before_weight=True
    )


def silu_mul_mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    """LlamaMLP and Qwen3MLP whose activation is SiLU."""
    return module.down_proj(rk.silu_mul(module.gate_proj(x), module.up_proj(x), round_before_mul=True))


def gelu_mul_mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    """LlamaMLP and Qwen3MLP whose activation is GELU by tanh."""
    return module.down_proj(rk.gelu_mul(module.gate_proj(x), module.up_proj(x), round_before_mul=True))


def layer(module: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
    """LlamaDecoderLayer and Qwen3DecoderLayer, where the norm after attention adds the residual."""
    normed = module.input_layernorm(hidden_states)
    attended, _ = module.self_attn(hidden_states=normed, attention_mask=attention_mask, **kwargs)
    normed, residual = module.post_attention_layernorm(attended, hidden_states)
    return residual + module.mlp(normed)


def take_cache(kwargs: dict[str, Any]) -> Any:
    """The cache among a forward's keywords, which no longer have it then; None without one."""
    given = [cache for cache in (kwargs.pop(name, None) for name in CACHE_NAMES) if cache is not None]
    if len(given) > 1:
        raise ValueError(f"{CACHE_NAMES[0]}: expected one cache, got another as {CACHE_NAMES[1]}")
    return given[0] if given else None


def cache_name(model: Any) -> str:
    """What the forward of a model's class calls its cache."""
    parameters = inspect.signature(model.forward).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise TypeError(
        f"{model.__name__}.forward: expected a cache by one of the names {CACHE_NAMES}, got {list(parameters)}"
    )


def rope_attention(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """LlamaAttention and Qwen3Attention: heads stay where projections put them; queries and keys turn in one call."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    cache = take_cache(kwargs)
    for name, value in kwargs.items():
        if callable(getattr(value, "update", None)) and hasattr(value, "get_seq_length"):
            raise TypeError(
                f"{name}: expected a cache by one of the names {CACHE_NAMES}, got one that would be left out"
            )
    shape = hidden_states.shape[:-1]
    query = module.q_proj(hidden_states).view(*shape, -1, module.head_dim)
    key = module.k_proj(hidden_states).view(*shape, -1, module.head_dim)
    value = module.v_proj(hidden_states).view(*shape, -1, module.head_dim)
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    query, key = rk.rope(query, key, *position_embeddings, intermediate="input")
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    output, weights = attend(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=module.attention_dropout if module.training else 0.0,
        scaling=module.scaling,
        sliding_window=getattr(module, "sliding_window", None),
        **kwargs,
    )
    return module.o_proj(output.reshape(*shape, -1).contiguous()), weights


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention entry of transformers: query [B, H, T, D], key and value [B, Hkv, L, D] to [B, T, H, D]."""
    if dropout:
        raise ValueError(f"attention_dropout: expected 0, got {dropout}; this attention drops nothing")
    sequences: Sequences | None = kwargs.get(SEQUENCES)
    if sequences is None:
        raise ValueError(f"attention: {type(module).__name__} was called outside of its model's forward")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    num_keys = sequences.num_keys
    if num_keys is not None and num_keys != k.shape[1]:
        k, v = (rows_of_cache(x, num_keys, q.shape[1], sliding_window) for x in (k, v))
    options: dict[str, Any] = {"softmax_scale": scaling, "window_size": sliding_window}
    if sequences.cu_seqlens_q is not None:
        packed = rk.attention(
            *(x.flatten(0, 1) for x in (q, k, v)),
            cu_seqlens_q=sequences.cu_seqlens_q,
            cu_seqlens_k=sequences.cu_seqlens_k,
            **options,
        )
        output = packed.view(q.shape)
    else:
        output = rk.attention(q, k, v, leftpad_k=sequences.leftpad_k, seqused_k=sequences.seqused_k, **options)
    observer = getattr(module, OBSERVER_ATTRIBUTE, None)
    if observer is not None:
        observer(module, query, key, output)
    return output, None


def rows_of_cache(x: torch.Tensor, num_keys: int, num_queries: int, window: int | None) -> torch.Tensor:
    """Keys or values [B, L, Hkv, D] of a cache as [B, num_keys, Hkv, D].

    A static cache is longer than it is filled. A cache of a sliding window dropped the first keys; attention counts its
    blocks from a sequence's first key, so zeros take their places, which no query reads.
    """
    missing = num_keys - x.shape[1]
    if missing <= 0:
        return x[:, :num_keys]
    if window is None or x.shape[1] < num_queries + window - 1:
        wanted = f"all {num_keys}" if window is None else f"the last {num_queries + window - 1} or more"
        raise ValueError(f"{CACHE_NAMES[0]}: expected {wanted} keys of a row, got {x.shape[1]}")
    return torch.cat([x.new_zeros(x.shape[0], missing, *x.shape[2:]), x], 1)


def no_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
    """The mask that transformers makes for this attention: what the model was given."""
    return attention_mask


def makes_cache(module: Any, use_cache: bool | None) -> bool:
    """Whether the forward of LlamaModel or Qwen3Model makes a cache where it is given none, as transformers decides."""
    checkpointed = module.gradient_checkpointing and module.training and torch.is_grad_enabled()
    return bool(module.config.use_cache if use_cache is None else use_cache) and not checkpointed


def body(
    module: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """LlamaModel and Qwen3Model: finds the batch's sequences once, then goes on as the original does."""
    if not torch.compiler.is_compiling():
        getattr(module, BODY_RECORD).require_no_others()
    cache = take_cache(kwargs)
    tokens = input_ids if input_ids is not None else inputs_embeds
    if tokens is not None:
        kwargs[SEQUENCES] = located = locate_sequences(
            tokens.shape[0],
            tokens.shape[1],
            tokens.device,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=makes_cache(module, kwargs.get("use_cache")),
            cu_seq_lens_q=kwargs.get("cu_seq_lens_q"),
            cu_seq_lens_k=kwargs.get("cu_seq_lens_k"),
        )
        if position_ids is None:  # as generate counts them; the original would count padding, too
            position_ids = located.positions(tokens.shape[1])
    if cache is not None:
        kwargs[cache_name(type(module))] = cache
    return type(module).forward(
        module, input_ids=input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds, **kwargs
    )


class RotaryTables:
    """cos and sin of every position, the same on every device: taken by the host, in float64, and rounded.

    Angles are transformers' own: float32 products of a position and a frequency, as the configuration gives it.
    """

    def __init__(self, inv_freq: torch.Tensor, scaling: float, num_positions: int) -> None:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = (positions[:, None] * inv_freq).numpy()
        wide = angles.astype(np.float64)
        self._tables = [torch.from_numpy(function(wide).astype(np.float32)) * scaling for function in (np.cos, np.sin)]
        self._placed: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What a file or another process is given: the tables, without their copies on devices."""
        return {**self.__dict__, "_placed": {}}

    def half_width(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), float32 [positions, frequencies], on the CPU."""
        cos, sin = self._tables
        return cos, sin

    def __call__(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), [..., 2 * frequencies] in `dtype`, of positions [...]; past the end NaN, on the CPU an error.

        What is compiled or exported gives NaN on the CPU too: it asks nothing of the host.
        """
        device = position_ids.device
        tables = self._placed.get((device, dtype))
        if tables is None:
            tables = [torch.cat([table, table], -1).to(dtype).to(device) for table in self._tables]
            # An export or a mode makes tensors without memory, which no later call could read.
            if not torch.compiler.is_exporting() and type(tables[0]) is torch.Tensor:
                self._placed[device, dtype] = tables
        last = len(self._tables[0]) - 1
        inside = position_ids.clamp(0, last)
        outside = inside != position_ids
        if device.type == "cpu" and not torch.compiler.is_compiling() and bool(outside.any()):
            at = int(position_ids[outside][0])
            raise ValueError(f"position_ids: expected 0 to {last} (max_position_embeddings - 1), got {at}")
        cos, sin = (table[inside].masked_fill(outside[..., None], torch.nan) for table in tables)
        return cos, sin


def rotary_embedding(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """LlamaRotaryEmbedding and Qwen3RotaryEmbedding: x gives the dtype, position_ids [B, T]."""
    return module._rk_tables(position_ids, x.dtype)
