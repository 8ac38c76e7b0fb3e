"""Runs megatron-core's GPTModel, built by its local spec, on this library's operators.

:func:`patch` replaces the forwards of one model's modules and leaves other models of the process unchanged. Rounding
points are the same as in transformers' layers. A token therefore has the log-probability of the patched Hugging Face
model and of a vLLM rollout. Batches are supported. Packed sequences (``PackedSeqParams``, format ``thd``), which the
local spec itself refuses, are also supported.
"""

from __future__ import annotations

import types
from collections import Counter
from typing import Any

import rl_kernel_native as rk

from .. import _variants

with _variants.needed("integrations.megatron: expected torch 2.10 or newer", _variants.INSTALL_TORCH, "torch"):
    import torch
    from torch import Tensor

from .rotary import RotaryTables
from .sequences import packed_positions

__all__ = ["VERSIONS", "patch"]

VERSIONS = ("0.16.1",)
_rotary_is_replaced = False


def patch(model: Any, *, inv_freq: Tensor | None = None) -> dict[str, int]:
    """Replaces operators in a GPTModel of megatron-core's local spec with this library's operators.

    Args:
        model: a ``GPTModel`` on one rank: tensor, pipeline and context parallel size 1.
        inv_freq: frequencies of the rotary embedding, float32. None: the frequencies of the model's ``rotary_base``. A
            scaled embedding needs its own frequencies.
    Returns: for each operator, the number of modules that it computes.
    Raises: ImportError without megatron-core; RuntimeError for an unsupported version; TypeError for another model;
        ValueError for an unsupported setting of the configuration, or for an unknown module that computes something.
        The ValueError names the setting or module.
    Source: docs/numerics.md. The patch replaces forwards of modules, and
        ``megatron.core.transformer.attention.apply_rotary_pos_emb``, whose replacement reads each model's
        configuration.
    """
    expected, cure = f"megatron-core: expected {' or '.join(VERSIONS)}", f"pip install megatron-core=={VERSIONS[-1]}"
    with _variants.needed(expected, cure, "megatron", "megatron.core"):
        import megatron.core
    from megatron.core.models.gpt import GPTModel

    if megatron.core.__version__ not in VERSIONS:
        raise RuntimeError(f"{expected}, got {megatron.core.__version__}; {cure}")
    if not isinstance(model, GPTModel):
        raise TypeError(f"model: expected megatron.core's GPTModel, got {type(model).__name__}")
    refused = [f"{name} = {value!r}" for name, value, expected in _asked(model) if value != expected]
    if refused:
        raise ValueError("rl_kernel_native does not serve a GPTModel with " + "; ".join(refused))
    plan = _plan(model)
    model.config.rlk_rotary = _tables(model, inv_freq)
    _replace_rotary()
    for module, forward in plan:
        forward(module)
    model.compute_language_model_loss = types.MethodType(_loss, model)
    return {**Counter(forward.__name__.removeprefix("_serve_") for _, forward in plan), "logprob": 1, "rope": 1}


def _asked(model: Any) -> list[tuple[str, Any, Any]]:
    """For each checked name of the configuration: the name, its value, and the supported value."""
    served = {
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
        "sequence_parallel": False, "normalization": "RMSNorm", "layernorm_zero_centered_gamma": False,
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0, "apply_rope_fusion": False, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "gradient_accumulation_fusion": False, "fp32_residual_connection": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "num_moe_experts": None, "multi_latent_attention": False,
        "window_size": None, "softmax_type": "vanilla", "apply_query_key_layer_scaling": False, "fp8": None,
        "mrope_section": None, "attention_output_gate": False, "defer_embedding_wgrad_compute": False,
    }  # fmt: skip
    asked = [(name, getattr(model.config, name, expected), expected) for name, expected in served.items()]
    return [*asked, ("position_embedding_type", model.position_embedding_type, "rope")]


def _plan(model: Any) -> list[tuple[Any, Any]]:
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_layer import TransformerLayer

    by_class = {
        ColumnParallelLinear: _serve_linear, RowParallelLinear: _serve_linear, VocabParallelEmbedding: _serve_embedding,
        torch.nn.RMSNorm: _serve_rms_norm, DotProductAttention: _serve_attention, MLP: _serve_silu_mul,
    }  # fmt: skip
    composed = (
        type(model), LanguageModelEmbedding, RotaryEmbedding, SelfAttention, TransformerBlock, TransformerLayer,
        IdentityOp, IdentityFuncOp, torch.nn.ModuleList, torch.nn.Dropout,
    )  # fmt: skip
    plan, unknown = [], []
    within: set[Any] = set()
    for name, module in model.named_modules():
        serve = by_class.get(type(module))
        if serve is not None:
            plan.append((module, serve))
            within |= set(module.children())  # children such as softmax are not called
        elif type(module) not in composed and module not in within:
            unknown.append(f"{name} ({type(module).__name__})")
    if unknown:
        raise ValueError("rl_kernel_native does not serve these modules of a GPTModel: " + "; ".join(unknown))
    return plan


# ---- forwards --------------------------------------------------------------------------------------------------------


def _serve_linear(module: Any) -> None:
    def product(input: Tensor, weight: Tensor, bias: Tensor | None, **of_ranks: Any) -> Tensor:
        y: Tensor = rk.linear(input, weight, bias)
        return y

    module._forward_impl = product


def _serve_embedding(module: Any) -> None:
    def forward(self: Any, input_: Tensor) -> Tensor:
        rows: Tensor = rk.embedding(input_, self.weight)
        return rows.transpose(0, 1).contiguous() if self.reduce_scatter_embeddings else rows

    module.forward = types.MethodType(forward, module)


def _serve_rms_norm(module: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = rk.rms_norm(x, self.weight, self.eps, round_before_weight=True)
        return y

    module.forward = types.MethodType(forward, module)


def _serve_silu_mul(module: Any) -> None:
    def forward(self: Any, hidden_states: Tensor, per_token_scale: Any = None, **more: Any) -> Any:
        if per_token_scale is not None:
            raise ValueError("per_token_scale: expected None outside of a mixture of experts")
        both, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            both = both + bias
        return self.linear_fc2(rk.silu_mul(both, round_before_mul=True))

    module.forward = types.MethodType(forward, module)


def _serve_attention(module: Any) -> None:
    """Replaces attention. Only the type of the mask is read: a causal mask needs no padding mask, because no real token
    sees padding on the right."""
    from megatron.core.transformer.enums import AttnMaskType

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, attn_mask_type: Any = None,
        attention_bias: Any = None, packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        kind = attn_mask_type or self.attn_mask_type
        if kind != AttnMaskType.causal or attention_bias is not None:
            raise ValueError(f"attn_mask_type: expected causal without a bias, got {kind} and {attention_bias!r}")
        packed = packed_seq_params
        if packed is None:
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            out: Tensor = rk.attention(q, k, v, softmax_scale=self.softmax_scale)
            return out.transpose(0, 1).flatten(2)
        if packed.qkv_format != "thd" or packed.cu_seqlens_q_padded is not None:
            raise ValueError(
                "packed_seq_params: expected qkv_format 'thd' without padding between sequences, got "
                f"{packed.qkv_format!r}"
            )
        out = rk.attention(
            query, key, value, softmax_scale=self.softmax_scale, cu_seqlens_q=packed.cu_seqlens_q,
            cu_seqlens_k=packed.cu_seqlens_kv,
        )  # fmt: skip
        return out.flatten(1)

    module.forward = types.MethodType(forward, module)


def _loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
    """-log p of each label, [batch, sequence], from logits [sequence, batch, vocabulary]."""
    logprob: Tensor = rk.logprob(logits.transpose(0, 1), labels)
    return -logprob


# ---- rotary ----------------------------------------------------------------------------------------------------------


def _tables(model: Any, inv_freq: Tensor | None) -> RotaryTables:
    own = model.rotary_pos_emb
    if inv_freq is None:
        width = 2 * own.inv_freq.shape[0]
        exponents = torch.arange(0, width, 2, dtype=torch.int64, device="cpu").float() / width
        inv_freq = 1.0 / (float(model.rotary_base) ** exponents)
        close = torch.allclose(own.inv_freq.float().cpu(), inv_freq, rtol=1e-6, atol=0)
        if not close or own.seq_len_interpolation_factor is not None:
            raise ValueError("inv_freq: expected the frequencies of a scaled rotary embedding, got None")
    return RotaryTables(inv_freq, 1.0, model.max_sequence_length)


def _replace_rotary() -> None:
    global _rotary_is_replaced
    if _rotary_is_replaced:
        return
    from megatron.core.transformer import attention

    own = attention.apply_rotary_pos_emb

    def apply_rotary_pos_emb(
        t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None = None, mscale: float = 1.0,
        cp_group: Any = None,
    ) -> Tensor:  # fmt: skip
        tables = getattr(config, "rlk_rotary", None)
        if tables is None:
            rotated: Tensor = own(t, freqs, config, cu_seqlens=cu_seqlens, mscale=mscale, cp_group=cp_group)
            return rotated
        return _rotated(t, tables, config, cu_seqlens, mscale)

    attention.apply_rotary_pos_emb = apply_rotary_pos_emb
    _rotary_is_replaced = True


def _rotated(t: Tensor, tables: RotaryTables, config: Any, cu_seqlens: Tensor | None, mscale: float) -> Tensor:
    """`t` is [sequence, batch, heads, columns], or packed [tokens, heads, columns]."""
    if cu_seqlens is None:
        position = torch.arange(t.shape[0], device=t.device)
    else:
        position = packed_positions(cu_seqlens, t.shape[0])
    cos, sin = tables(position, t.dtype, mscale)
    if t.dim() == 4:
        cos, sin = cos[:, None], sin[:, None]
    y, _ = rk.rope(
        t, None, cos, sin, interleaved=config.rotary_interleaved, partial_dim=cos.shape[-1], intermediate="input"
    )
    return y
