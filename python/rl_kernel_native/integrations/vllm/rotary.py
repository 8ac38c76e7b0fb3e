"""vLLM's rotary embeddings on rk.rope, with the trainer's tables. cos and sin are on the device before a CUDA graph is
captured.

The host computes cos and sin of :data:`integrations.rotary.ROPE_TYPES` in float64. In a patched trainer, transformers
computes dynamic and longrope, so here torch computes these two as transformers does, up to the original length. Past
the original length, their frequencies depend on the batch, which a cache of keys cannot support.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_scaling_rope import DynamicNTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

import rl_kernel_native as rk

from ..rotary import ROPE_TYPES, RotaryTables
from .config import original_length

# Parameters that only vLLM reads: with such a parameter, vLLM and transformers would differ.
OF_VLLM_ALONE = (
    "apply_yarn_scaling", "attn_factor", "extrapolation_factor", "max_trained_positions", "short_mscale", "long_mscale",
)  # fmt: skip


class RlkRotaryEmbedding(RotaryEmbedding):
    def _compute_cos_sin_cache(self) -> Tensor:
        with torch.device("cpu"):
            frequencies = self._compute_inv_freq(self.base)
        return host_table(frequencies, 1.0, self.max_position_embeddings)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        half = self.rotary_dim // 2
        table = self.cos_sin_cache
        flat = positions.flatten()
        split = (flat.shape[0], -1, self.head_size)
        q, k = rk.rope(
            query.view(split), None if key is None else key.view(split), table[:, :half], table[:, half:],
            position_ids=flat, interleaved=not self.is_neox_style, partial_dim=self.rotary_dim, intermediate="input",
        )  # fmt: skip
        return q.view(query.shape), None if key is None else k.view(key.shape)


class Scaled:
    """Tables from the model's own rope_parameters. vLLM caches a module for later engines of the process."""

    def _compute_cos_sin_cache(self) -> Tensor:
        model = get_current_vllm_config().model_config
        return scaled_table(model.hf_text_config, model.max_model_len)


class RlkLinearScaling(Scaled, LinearScalingRotaryEmbedding):
    forward = RlkRotaryEmbedding.forward


class RlkLlama3(Scaled, Llama3RotaryEmbedding):
    forward = RlkRotaryEmbedding.forward


class RlkYaRN(Scaled, YaRNScalingRotaryEmbedding):
    forward = RlkRotaryEmbedding.forward


class RlkDynamicNTK(Scaled, DynamicNTKScalingRotaryEmbedding):
    forward = RlkRotaryEmbedding.forward


class RlkLongRope(Scaled, RlkRotaryEmbedding):
    """Replaces Phi3LongRoPEScaledRotaryEmbedding, whose class vLLM looks up by name."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        original_max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        short_factor: list[float],
        long_factor: list[float],
        short_mscale: float | None = None,
        long_mscale: float | None = None,
    ) -> None:
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)


SCALED = {
    "LinearScalingRotaryEmbedding": RlkLinearScaling,
    "Llama3RotaryEmbedding": RlkLlama3,
    "YaRNScalingRotaryEmbedding": RlkYaRN,
    "DynamicNTKScalingRotaryEmbedding": RlkDynamicNTK,
}
KNOWN = (RlkRotaryEmbedding, *SCALED.values())


def host_table(frequencies: Tensor, scaling: float, rows: int) -> Tensor:
    cos, sin = RotaryTables(frequencies, scaling, rows).half_width()
    return torch.cat((cos, sin), -1).to(torch.get_default_device())


def scaled_table(config: Any, length: int) -> Tensor:
    """[positions, cos and sin] float32 for a transformers configuration, with at least `length` positions.

    Raises: ValueError for parameters that transformers does not read.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    alone = [f"{name} = {parameters[name]!r}" for name in OF_VLLM_ALONE if name in parameters]
    if alone:
        raise ValueError(f"rope_parameters: RLK_VLLM serves what transformers reads, got {', '.join(alone)}")
    if kind in ROPE_TYPES:
        with torch.device("cpu"):
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config)
        return host_table(frequencies, float(scaling), max(length, config.max_position_embeddings))
    rows = original_length(config)  # `config.refusals` refuses longer sequences
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=rows)
    device = torch.get_default_device()
    angles = torch.arange(rows, dtype=torch.float32, device=device)[:, None] * frequencies.float().to(device)
    return torch.cat((angles.cos() * scaling, angles.sin() * scaling), -1)
