"""The vLLM that is known: versions, and the signature of everything that is replaced. What differs is an error."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NamedTuple

VERSIONS = ("0.26.0",)


class Hook(NamedTuple):
    """A function or method of vLLM, ``module:name``, and the names of its parameters."""

    place: str
    parameters: str


# What is replaced, or called by what replaces it.
HOOKS = (
    Hook("vllm.config.vllm:VllmConfig.__post_init__", "self"),
    Hook(
        "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
        "self vllm_config model_config prefix",
    ),
    Hook(
        "vllm.model_executor.layers.layernorm:RMSNorm.__init__",
        "self hidden_size eps var_hidden_size has_weight dtype",
    ),
    Hook("vllm.model_executor.layers.layernorm:RMSNorm.forward_native", "self x residual"),
    Hook("vllm.model_executor.layers.activation:SiluAndMul.forward_cuda", "self x"),
    Hook(
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.__init__",
        "self head_size rotary_dim max_position_embeddings base is_neox_style dtype init_cache",
    ),
    Hook("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cuda", "self positions query key"),
    Hook("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase._compute_cos_sin_cache", "self"),
    Hook("vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply", "self layer x bias"),
    Hook("vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading", "self layer"),
    Hook("vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply", "self layer x bias"),
    Hook(
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.embedding",
        "self layer input_",
    ),
    Hook(
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.process_weights_after_loading",
        "self layer",
    ),
    Hook(
        "vllm.model_executor.layers.logits_processor:LogitsProcessor._apply_head",
        "self lm_head hidden_states embedding_bias",
    ),
    Hook("vllm.v1.attention.backends.registry:register_backend", "backend class_path is_mamba"),
    Hook(
        "vllm.v1.attention.backend:AttentionImpl.forward",
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    ),
    Hook(
        "vllm.v1.attention.backend:AttentionMetadataBuilder.build",
        "self common_prefix_len common_attn_metadata fast_build",
    ),
    Hook("vllm.v1.sample.sampler:Sampler.compute_logprobs", "logits"),
    Hook("vllm.v1.sample.sampler:Sampler.gather_logprobs", "logprobs num_logprobs token_ids"),
    Hook("vllm.v1.sample.sampler:Sampler.gather_specific_token_logprobs", "self logprobs logprob_token_ids sampled"),
    # Names of the second model runner.
    Hook("vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs", "logits token_ids"),
)


def find(place: str) -> tuple[Any, str]:
    """The module or class that holds a hook, and its name there."""
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for step in outer:
        owner = getattr(owner, step)
    return owner, name


def unknown(hooks: tuple[Hook, ...]) -> list[str]:
    """What vLLM lacks or has with other parameters, in words."""
    found = []
    for hook in hooks:
        try:
            owner, name = find(hook.place)
            function = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            found.append(f"{hook.place}: {error}")
            continue
        got = " ".join(inspect.signature(function).parameters)
        if got != hook.parameters:
            found.append(f"{hook.place}: expected parameters ({hook.parameters}), got ({got})")
    return found


def require_known() -> None:
    """Raises RuntimeError that names what is not known."""
    import vllm

    version = vllm.__version__.partition("+")[0]
    if version not in VERSIONS:
        raise RuntimeError(f"vllm: expected version {' or '.join(VERSIONS)}, got {vllm.__version__}")
    differing = unknown(HOOKS)
    if differing:
        raise RuntimeError(f"vllm {version}: hooks differ from those that are known: " + "; ".join(differing))
