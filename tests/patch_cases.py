"""Small models of transformers to patch, and what they give."""

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
    torch.set_default_dtype(dtype)  # as from_pretrained does it: the frequencies of rope stay float32
    try:
        return getattr(transformers, f"{family}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def logits_of(model: Any, ids: Any = IDS, **inputs: Any) -> Any:
    return model(input_ids=ids, use_cache=False, **inputs).logits


def state_of(model: Any) -> dict[str, dict[str, Any]]:
    return {name: dict(module.__dict__) for name, module in model.named_modules()}
