"""The model of the tests of vLLM's engine."""

from __future__ import annotations

from pathlib import Path

import pytest


def save(folder: Path) -> Path:
    """Qwen3 with random weights: grouped heads, norms of queries and keys, a head tied to the table."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    shape = transformers.Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.1,  # spreads the log-probabilities
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
    return folder
