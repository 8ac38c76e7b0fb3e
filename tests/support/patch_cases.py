"""Small models of transformers to patch, and their outputs."""

from __future__ import annotations

from typing import Any

import torch
import transformers

TINY = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


IDS = torch.arange(3 * 20).view(3, 20) % 101


def tiny(family: str = "Qwen3", dtype: Any = torch.bfloat16, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TINY, **options})
    torch.set_default_dtype(dtype)  # as from_pretrained does; rope's frequencies stay float32
    try:
        return getattr(transformers, f"{family}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def logits_of(model: Any, ids: Any = IDS, **inputs: Any) -> Any:
    return model(input_ids=ids, use_cache=False, **inputs).logits


def state_of(model: Any) -> dict[str, dict[str, Any]]:
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


# Options with which a small model of each family uses the family's features.
_TWO_WINDOWS = {"sliding_window": 50, "layer_types": ["sliding_attention", "full_attention"]}
_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, **_TWO_WINDOWS},
    "Qwen3": {},
    "Mistral": {"sliding_window": 50},
    "Gemma2": {  # sdpa, the default of some releases, does not apply the softcap
        "attn_implementation": "eager",
        "attn_logit_softcapping": 0.5,
        "query_pre_attn_scalar": 16,
        **_TWO_WINDOWS,
    },
    "Gemma3": {"query_pre_attn_scalar": 16, **_TWO_WINDOWS},
    "Phi3": {"pad_token_id": 0, **_PARTIAL},
    "Olmo2": {},
    "Glm4": {"pad_token_id": 0, **_PARTIAL},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "Mixtral": {"num_local_experts": 4},
}


def family(name: str, dtype: Any = torch.bfloat16, **options: Any) -> Any:
    """A model of two layers, whose norms and biases differ from their initial values."""
    prefix = f"{name}Text" if name == "Gemma3" else name
    shape = {**TINY, "max_position_embeddings": 512, **FAMILIES[name], **options}
    config = getattr(transformers, f"{prefix}Config")(**shape)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape).to(dtype)
    return model
