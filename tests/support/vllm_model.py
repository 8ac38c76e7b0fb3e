"""The model of the tests of vLLM's engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def save(folder: Path) -> Path:
    """A Qwen3 that is trained for a moment: grouped heads, norms of queries and keys, a head tied to the table."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    shape = transformers.Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.1,  # spreads the log-probabilities
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(shape)
    train(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def train(model: Any) -> None:
    """Teaches the model sequences of neighbouring ids, of which small ones are more frequent. It still draws widely."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        ids = (512 * torch.rand(8, 1) ** 3 + torch.randint(8, (8, 24))).long() % 512
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1, losses
