"""The supported settings of an engine's configuration. Before a model is loaded, an error names every other setting."""

from __future__ import annotations

from typing import Any

from ... import __version__, contract

# Models whose layers compute exactly as the trainer's in integrations/families.py. RMSNorm rounds before it multiplies
# by its weight, the activation is SiLU, and rotary products are rounded to the dtype.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
OPERATORS = ("attention", "embedding", "kv_cache_append", "linear", "logprob", "rms_norm", "rope", "sample", "silu_mul")
KEY = "rl_kernel_native"  # a key in VllmConfig.additional_config
NO_RESET = "sync_weights: the prefix cache, which holds keys of the old weights, could not be reset"


def identity() -> dict[str, Any]:
    """The part of vLLM's compile-cache key for this library: vLLM then never loads an artifact of another version or
    contract."""
    return {"version": __version__, "contract": contract.digest(), "operators": list(OPERATORS)}


def prepare(config: Any) -> None:
    """Sets the attention backend and this library's identity, before vLLM completes its configuration."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if config.model_config is None:
        return
    chosen = config.attention_config.backend
    if chosen not in (None, AttentionBackendEnum.CUSTOM):
        raise ValueError(f"attention_config.backend: expected CUSTOM or none with RLK_VLLM, got {chosen.name}")
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    if not isinstance(config.additional_config, dict):
        kind = type(config.additional_config).__name__
        raise TypeError(f"additional_config: expected a dict with RLK_VLLM, got {kind}")
    config.additional_config = {**config.additional_config, KEY: identity()}
    config.model_config.disable_cascade_attn = True


def require_served(config: Any) -> None:
    """Raises a ValueError that names every unsupported setting of the configuration."""
    if config.model_config is None:
        return
    refused = refusals(config)
    if refused:
        raise ValueError("RLK_VLLM does not serve " + "; ".join(refused))


def refusals(config: Any) -> list[str]:
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    names = tuple(model.architectures or ())
    asked: list[tuple[str, Any, bool]] = [
        ("architectures", list(names), len(names) == 1 and names[0] in ARCHITECTURES),
        ("runner_type", model.runner_type, model.runner_type == "generate"),
        ("use_mla", getattr(model, "use_mla", False), not getattr(model, "use_mla", False)),
        ("is_moe", _is_moe(model), not _is_moe(model)),
        ("tensor_parallel_size", parallel.tensor_parallel_size, parallel.tensor_parallel_size == 1),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, parallel.pipeline_parallel_size == 1),
        _one(parallel, "decode_context_parallel_size"),
        _one(parallel, "prefill_context_parallel_size"),
        ("enable_dbo", parallel.enable_dbo, not parallel.enable_dbo),
        ("quantization", model.quantization, model.quantization is None),
        ("kv_cache_dtype", cache.cache_dtype, cache.cache_dtype in ("auto", _name(model.dtype))),
        ("lora_config", _kind(config.lora_config), config.lora_config is None),
        ("speculative_config", _kind(config.speculative_config), config.speculative_config is None),
        ("dtype", _name(model.dtype), _name(model.dtype) in ("bfloat16", "float16", "float32")),
        ("head_dtype", _name(model.head_dtype), model.head_dtype == model.dtype),
        ("logprobs_mode", model.logprobs_mode, model.logprobs_mode in ("raw_logprobs", "processed_logprobs")),
        ("logits_processors", model.logits_processors, not model.logits_processors),
        ("max_logprobs", model.max_logprobs, model.max_logprobs != -1),
        _rotary(model),
    ]
    return [f"{name} = {value!r}" for name, value, is_served in asked if not is_served]


def _rotary(model: Any) -> tuple[str, Any, bool]:
    """The check of the rotary embedding. Past the original length, frequencies of dynamic and longrope depend on the
    longest sequence of a batch."""
    kind = (getattr(model.hf_text_config, "rope_parameters", None) or {}).get("rope_type", "default")
    by_batch = kind in ("dynamic", "longrope")
    served = not by_batch or model.max_model_len <= original_length(model.hf_text_config)
    return f"rope_type {kind!r} with max_model_len", model.max_model_len, served


def original_length(config: Any) -> int:
    """The sequence length up to which transformers does not scale a rotary embedding."""
    length: int = config.rope_parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    return length


def _one(config: Any, name: str) -> tuple[str, Any, bool]:
    value = getattr(config, name, 1)
    return name, value, value == 1


def _is_moe(model: Any) -> bool:
    return bool(getattr(model, "is_moe", False))


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(config: Any) -> str | None:
    return None if config is None else type(config).__name__
