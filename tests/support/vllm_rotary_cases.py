"""Compares vLLM's rotary embeddings with transformers' for the same configuration, without an engine. `run()` runs in a
process with vLLM enabled (tests/frameworks/test_vllm.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

HEAD, LENGTH = 32, 96
FACTORS = [1.0 + 0.25 * i for i in range(HEAD // 2)]
# Parameters of each kind, and the longest sequence.
SERVED: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({}, LENGTH),
    "linear": ({"factor": 4.0}, 4 * LENGTH),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        LENGTH,
    ),
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": LENGTH // 4, "beta_fast": 32.0}, LENGTH),
    "dynamic": ({"factor": 2.0}, LENGTH),
    "longrope": (
        {"factor": 2.0, "short_factor": FACTORS, "long_factor": FACTORS[::-1], "original_max_position_embeddings": 48},
        48,
    ),
}  # fmt: skip


def of_vllm(kind: str, parameters: dict[str, Any], length: int) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    given = {"rope_type": kind, "rope_theta": 10000.0, **parameters}
    engine = VllmConfig()
    engine.model_config = SimpleNamespace(hf_text_config=of_transformers(kind, parameters).config, max_model_len=length)
    with set_current_vllm_config(engine, check_compile=False):
        return get_rope(HEAD, LENGTH, rope_parameters=given, dtype=torch.bfloat16)


def of_transformers(kind: str, parameters: dict[str, Any]) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    shape = LlamaConfig(
        hidden_size=4 * HEAD, num_attention_heads=4, head_dim=HEAD, max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **parameters},
    )  # fmt: skip
    return LlamaRotaryEmbedding(shape)


def run() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from rl_kernel_native.integrations.rotary import ROPE_TYPES, make_tables
    from rl_kernel_native.integrations.vllm import hooks

    for kind, (parameters, length) in SERVED.items():
        ours, trainers = of_vllm(kind, parameters, length), of_transformers(kind, parameters)
        assert hooks.not_served(torch.nn.ModuleDict({"rotary": ours})) == [], kind
        positions = torch.arange(length)
        heads = torch.randn(1, 2, length, HEAD, generator=torch.Generator().manual_seed(0)).bfloat16()
        if kind in ROPE_TYPES:
            table = make_tables(trainers)[None]
            cos, sin = table(positions[None], torch.bfloat16, table.scaling)
        else:
            cos, sin = trainers(heads, positions[None])
        assert ours.cos_sin_cache.shape[0] >= length, kind
        assert torch.equal(ours.cos_sin_cache[:length], torch.cat((cos, sin), -1)[0][:, HEAD // 2 : -HEAD // 2]), kind
        want, _ = apply_rotary_pos_emb(heads, heads, cos, sin)
        rows = heads[0].transpose(0, 1).reshape(length, -1)
        got, _ = ours(positions, rows, rows)
        assert torch.equal(got.view(length, 2, HEAD).transpose(0, 1), want[0]), kind

    with pytest.raises(ValueError, match=r"serves what transformers reads, got attn_factor = 2\.0"):
        of_vllm("yarn", {**SERVED["yarn"][0], "attn_factor": 2.0}, LENGTH)
