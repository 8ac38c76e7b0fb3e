"""What patch_model knows about each family of transformers models: its classes, and how their forwards differ.

Names and roundings are those of transformers 5.14 to 5.24. patch_model does not rely on this table alone: `unchanged`
compares functions with their source, and `probe` compares results.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any, Literal

# Names of the cache argument: the first from transformers 5.24 on, the second in earlier versions.
CACHE_NAMES = ("cache", "past_key_values")


@dataclass(frozen=True)
class Family:
    """The decoder of one family.

    Attributes:
        prefix: first part of the names of the family's classes.
        module: transformers.models.<module>.modeling_<module>.
        body: the class name, after the prefix, of the decoder without a head.
        norm: name of the forward in `decoder` that replaces the family's RMSNorm.
        fused_mlp: gate and up are one projection, `gate_up_proj`.
        fused_qkv: queries, keys and values are one projection, `qkv_proj`.
        qk_norm: how queries and keys are normalised: over each head ("head"), over each head after heads are moved
            before tokens ("transposed"), over all heads ("row"), or not at all (None).
        interleaved: the two columns of a rotated pair are neighbours.
        rope_rounding: rk.rope's `intermediate`.
        window: the object that holds attention's sliding window.
        softcap: attention has `attn_logit_softcapping`.
        norms: a layer's norms, in the order: attention's input, attention's output, the MLP's input, the MLP's output.
            None: the layer keeps transformers' forward.
        dropouts: a layer's dropouts on the outputs of attention and the MLP.
        scaled_embedding: the embedding is multiplied by a scale.
    """

    prefix: str
    module: str
    body: str = "Model"
    norm: Literal["rms_norm", "offset_rms_norm", "wide_rms_norm"] = "rms_norm"
    fused_mlp: bool = False
    fused_qkv: bool = False
    qk_norm: Literal["head", "transposed", "row"] | None = None
    interleaved: bool = False
    rope_rounding: Literal["input", "float32"] = "input"
    window: Literal["module", "config"] | None = None
    softcap: bool = False
    norms: tuple[str, str | None, str, str | None] | None = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    dropouts: tuple[str, str] | None = None
    scaled_embedding: bool = False

    @property
    def modeling(self) -> Any:
        """transformers' module of the family."""
        return importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")

    def type(self, role: str) -> Any:
        """The class with a given role, or None if the family has none."""
        return getattr(self.modeling, self.prefix + (self.body if role == "Model" else role), None)


_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
FAMILIES = (
    Family("Llama", "llama"),
    Family("Qwen2", "qwen2", window="module"),
    Family("Qwen3", "qwen3", qk_norm="head", window="module"),
    Family("Mistral", "mistral", window="config"),
    Family("Gemma2", "gemma2", norm="offset_rms_norm", window="module", softcap=True, norms=_GEMMA_NORMS,
           scaled_embedding=True),
    Family("Gemma3", "gemma3", body="TextModel", norm="offset_rms_norm", qk_norm="transposed", window="module",
           norms=_GEMMA_NORMS, scaled_embedding=True),
    Family("Phi3", "phi3", fused_mlp=True, fused_qkv=True, window="config",
           dropouts=("resid_attn_dropout", "resid_mlp_dropout")),
    Family("Olmo2", "olmo2", norm="wide_rms_norm", qk_norm="row", rope_rounding="float32", norms=None),
    Family("Glm4", "glm4", fused_mlp=True, interleaved=True,
           norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")),
    Family("Qwen3Moe", "qwen3_moe", qk_norm="head", window="module"),
    Family("Mixtral", "mixtral", window="config"),
)  # fmt: skip
BY_PREFIX = {family.prefix: family for family in FAMILIES}
ROLES = ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding", "TextScaledWordEmbedding")

# The known parameters of the forwards that this library replaces, without the cache's. A forward with another parameter
# might compute something else.
PARAMETERS = {
    "Model": "input_ids attention_mask position_ids inputs_embeds use_cache cache_position",
    "DecoderLayer": "hidden_states attention_mask position_ids use_cache cache_position position_embeddings",
    "Attention": "hidden_states position_embeddings attention_mask cache_position",
    "MLP": "x hidden_states",
    "RMSNorm": "hidden_states x",
    "RotaryEmbedding": "x position_ids layer_type",
    "TextScaledWordEmbedding": "input_ids",
}


@functools.cache
def known_types() -> dict[Any, tuple[Family, str]]:
    """Family and role of each known class."""
    found = {}
    for family in FAMILIES:
        for role in ROLES:
            kind = family.type(role)
            if kind is not None:
                found[kind] = (family, role)
    return found


def plain_type(module: Any) -> Any:
    """A module's class. If fully_shard has put its own class in front, which changes no forward, the class behind
    it."""
    kind = type(module)
    bases = kind.__mro__
    if len(bases) > 2 and bases[1].__name__ == "FSDPModule" and bases[1].__module__.startswith("torch.distributed."):
        return bases[2]
    return kind


def known(module: Any) -> tuple[Family, str] | None:
    """Family and role of a module whose class is exactly a class of a family, else None."""
    return known_types().get(plain_type(module))


def resembles(module: Any) -> tuple[Family, str] | None:
    """Family and role of the known class from which a module's own class is derived."""
    if known(module) is not None:
        return None
    return next((known_types()[kind] for kind in type(module).__mro__ if kind in known_types()), None)


# The operators of each role. patch_model handles a role if at least one of its operators is selected.
ROLE_OPS = {
    "Model": ("attention",),
    "DecoderLayer": ("rms_norm",),
    "Attention": ("rope", "attention"),
    "MLP": ("silu_mul",),
    "RMSNorm": ("rms_norm",),
    "RotaryEmbedding": ("rope",),
    "TextScaledWordEmbedding": ("embedding",),
}


def servable(module: Any, chosen: frozenset[str]) -> bool:
    """Whether patch_model would examine a module of this class for these operators."""
    import torch

    dense = {torch.nn.Linear: "linear", torch.nn.Embedding: "embedding"}.get(plain_type(module))
    found = known(module)
    return dense in chosen or (found is not None and not chosen.isdisjoint(ROLE_OPS[found[1]]))
