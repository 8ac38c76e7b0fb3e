"""The supported versions of vLLM, and the signature of every function that is replaced. Any difference is an error."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NamedTuple

from ... import _variants

VERSIONS = ("0.26.0",)
TORCH = {"cuda": "2.11", "cpu": "2.13"}  # torch version tried with this vLLM, by device
INSTALL = f"pip install vllm=={VERSIONS[-1]} (docs/vllm.md)"


class Hook(NamedTuple):
    """A function or method of vLLM, ``module:name``, and the names of its parameters."""

    place: str
    parameters: str


# The replaced functions, and the functions that the replacements call.
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
    *(
        Hook(
            f"vllm.model_executor.layers.rotary_embedding.{module}.__init__", f"self head_size rotary_dim {parameters}"
        )
        for module, parameters in {
            "linear_scaling_rope:LinearScalingRotaryEmbedding": "max_position_embeddings base is_neox_style "
            "scaling_factors dtype",
            "llama3_rope:Llama3RotaryEmbedding": "max_position_embeddings base is_neox_style dtype scaling_factor "
            "low_freq_factor high_freq_factor orig_max_position",
            "yarn_scaling_rope:YaRNScalingRotaryEmbedding": "max_position_embeddings base is_neox_style scaling_factor "
            "dtype extrapolation_factor attn_factor beta_fast beta_slow apply_yarn_scaling truncate",
            "dynamic_ntk_scaling_rope:DynamicNTKScalingRotaryEmbedding": "max_position_embeddings "
            "max_trained_positions base is_neox_style scaling_factor dtype",
            "phi3_long_rope_scaled_rope:Phi3LongRoPEScaledRotaryEmbedding": "max_position_embeddings "
            "original_max_position_embeddings base is_neox_style dtype short_factor long_factor short_mscale "
            "long_mscale",
        }.items()
    ),
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
    Hook(
        "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine",
        "name module_path_or_cls class_name",
    ),
    Hook("vllm.entrypoints.llm:LLM.start_weight_update", "self"),
    Hook("vllm.entrypoints.llm:LLM.update_weights", "self request"),
    Hook("vllm.entrypoints.llm:LLM.finish_weight_update", "self"),
    Hook("vllm.entrypoints.llm:LLM.reset_prefix_cache", "self reset_running_requests reset_connector"),
    Hook("vllm.v1.sample.sampler:Sampler.compute_logprobs", "logits"),
    Hook("vllm.v1.sample.sampler:Sampler.gather_logprobs", "logprobs num_logprobs token_ids"),
    Hook("vllm.v1.sample.sampler:Sampler.gather_specific_token_logprobs", "self logprobs logprob_token_ids sampled"),
    Hook("vllm.v1.sample.sampler:Sampler.sample", "self logits sampling_metadata logprobs_mode_override"),
    Hook("vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample", "self logits spec_decode_metadata"),
    Hook("vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_sampler_run", "self hidden_states"),
    Hook(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        "self request_id prompt params supported_tasks arrival_time lora_request tokenization_kwargs trace_headers "
        "priority data_parallel_rank resumable",
    ),
    Hook(
        "vllm.v1.engine.output_processor:OutputProcessor.add_request",
        "self request prompt parent_req request_index queue",
    ),
    Hook(
        "vllm.v1.engine.output_processor:RequestState._new_completion_output",
        "self token_ids finish_reason stop_reason",
    ),
    Hook("vllm.v1.worker.block_table:BlockTable.get_device_tensor", "self num_reqs"),
    # Names of the second model runner.
    Hook(
        "vllm.v1.worker.gpu.block_table:BlockTables.append_block_ids",
        "self req_index new_block_ids overwrite",
    ),
    Hook("vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn", "self input_batch"),
    Hook("vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs", "logits token_ids"),
    Hook(
        "vllm.v1.worker.gpu.sample.sampler:compute_topk_scores",
        "logits num_logprobs sampled_token_ids cu_num_logits logprob_token_ids_state expanded_idx_mapping "
        "max_per_req_token_ids logits_mode",
    ),
    Hook(
        "vllm.v1.worker.gpu.sample.sampler:Sampler.__init__",
        "self max_num_reqs vocab_size device req_states logprobs_mode num_speculative_tokens use_fp64_gumbel",
    ),
    Hook("vllm.v1.worker.gpu.sample.sampler:Sampler.add_request", "self req_idx prompt_len sampling_params"),
    Hook(
        "vllm.v1.worker.gpu.sample.sampler:Sampler.sample",
        "self logits expanded_idx_mapping idx_mapping_np pos input_ids expanded_local_pos return_logprobs",
    ),
    Hook("vllm.v1.worker.gpu.sample.states:SamplingStates.max_num_logprobs", "self idx_mapping_np"),
    Hook(
        "vllm.v1.worker.gpu.sample.logit_bias:LogitBiasState.apply_logit_bias",
        "self logits expanded_idx_mapping idx_mapping_np pos",
    ),
    Hook(
        "vllm.v1.worker.gpu.sample.bad_words:BadWordsState.apply_bad_words",
        "self logits expanded_idx_mapping idx_mapping_np input_ids expanded_local_pos",
    ),
)


def find(place: str) -> tuple[Any, str]:
    """The module or class that holds a hook, and the hook's name in it."""
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for step in outer:
        owner = getattr(owner, step)
    return owner, name


def unknown(hooks: tuple[Hook, ...]) -> list[str]:
    """The hooks that this vLLM does not have, or has with other parameters, in words."""
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


def untried_torch() -> str | None:
    """A warning if this torch was not tried beside vLLM."""
    import torch

    tried = TORCH["cuda" if torch.version.cuda else "cpu"]
    if torch.__version__.startswith(tried + "."):
        return None
    every = " and ".join(f"{version} ({device})" for device, version in TORCH.items())
    return f"vllm {VERSIONS[-1]} was tried with torch {every}, got {torch.__version__}"


def require_known() -> None:
    """Raises a ModuleNotFoundError without vLLM, else a RuntimeError that names the unknown parts."""
    expected = f"vllm: expected version {' or '.join(VERSIONS)}"
    with _variants.needed(expected, INSTALL, "vllm"):
        import vllm

    version = vllm.__version__.partition("+")[0]
    if version not in VERSIONS:
        raise RuntimeError(f"{expected}, got {vllm.__version__}; {INSTALL}")
    differing = unknown(HOOKS)
    if differing:
        raise RuntimeError(f"vllm {version}: hooks differ from those that are known: " + "; ".join(differing))
