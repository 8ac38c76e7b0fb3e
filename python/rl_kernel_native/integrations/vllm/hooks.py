"""Installs this library's operators at vLLM's extension points, once per process, before an engine is created."""

from __future__ import annotations

import functools
import logging
from typing import Any

from . import config, versions

_log = logging.getLogger(__name__)
_enabled: Any = None  # the function enabled() of this package, which install() receives


def install(enabled: Any) -> None:
    """Installs the hooks. Raises a RuntimeError, and replaces nothing, if this vLLM version is unknown."""
    global _enabled
    _enabled = enabled
    versions.require_known()
    untried = versions.untried_torch()
    if untried is not None:
        _log.warning(untried)

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from . import attention, layers, logprobs, requests, rotary, sampler, second_sampler, shared, weights

    classes = {
        "RMSNorm": layers.RlkRMSNorm,
        "SiluAndMul": layers.RlkSiluAndMul,
        "RotaryEmbedding": rotary.RlkRotaryEmbedding,
        **rotary.SCALED,
    }
    taken = [f"{name} ({op_registry_oot[name].__name__})" for name in classes if name in op_registry_oot]
    if taken:
        raise RuntimeError(f"vllm: another plugin has replaced {', '.join(taken)}")
    for name, replacement in classes.items():
        CustomOp.register_oot(replacement, name=name)
    _replace("vllm.model_executor.layers.rotary_embedding:Phi3LongRoPEScaledRotaryEmbedding", rotary.RlkLongRope)
    register_backend(AttentionBackendEnum.CUSTOM, f"{attention.__name__}.{attention.RlkAttentionBackend.__qualname__}")
    _wrap("vllm.v1.worker.block_table:BlockTable.get_device_tensor", shared.given)
    _wrap("vllm.v1.worker.gpu.block_table:BlockTables.append_block_ids", shared.appended)
    _wrap("vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn", shared.prepared)
    _replace("vllm.model_executor.layers.linear:UnquantizedLinearMethod", layers.RlkLinearMethod)
    _replace(
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod", layers.RlkEmbeddingMethod
    )
    _replace("vllm.v1.sample.sampler:Sampler.compute_logprobs", staticmethod(logprobs.compute_logprobs))
    _replace("vllm.v1.sample.sampler:Sampler.gather_logprobs", staticmethod(logprobs.gather_logprobs))
    _replace("vllm.v1.sample.sampler:Sampler.gather_specific_token_logprobs", logprobs.gather_specific_token_logprobs)
    _replace("vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs", logprobs.compute_token_logprobs)
    WeightTransferEngineFactory.register_engine(weights.BACKEND, weights.LocalTransfer)
    _replace("vllm.v1.sample.sampler:Sampler.sample", sampler.sample)
    _wrap("vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample", sampler.keyed)
    _wrap("vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_sampler_run", sampler.rehearsed)
    _replace("vllm.v1.worker.gpu.sample.sampler:Sampler.sample", second_sampler.sample)
    _wrap("vllm.v1.worker.gpu.sample.sampler:Sampler.__init__", second_sampler.made)
    _wrap("vllm.v1.worker.gpu.sample.sampler:Sampler.add_request", second_sampler.added)
    _wrap("vllm.v1.worker.gpu.sample.sampler:compute_topk_scores", second_sampler.compute_topk_scores)
    _wrap("vllm.v1.engine.input_processor:InputProcessor.process_inputs", requests.arrived)
    _wrap("vllm.v1.engine.output_processor:OutputProcessor.add_request", requests.followed)
    _wrap("vllm.v1.engine.output_processor:RequestState._new_completion_output", requests.completed)
    _wrap("vllm.config.vllm:VllmConfig.__post_init__", _completed)
    _wrap("vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model", _loaded)


def _replace(place: str, replacement: Any) -> None:
    owner, name = versions.find(place)
    setattr(owner, name, replacement)


def _wrap(place: str, around: Any) -> None:
    owner, name = versions.find(place)
    own = getattr(owner, name)

    @functools.wraps(own)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(own, self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _completed(own: Any, vllm_config: Any) -> None:
    config.prepare(vllm_config)
    own(vllm_config)
    config.require_served(vllm_config)


def _loaded(own: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    model = own(self, *args, **kwargs)
    left = not_served(model)
    if left:
        text = "RLK_VLLM does not serve these modules, whose bits are vLLM's own: " + "; ".join(left)
        if _enabled() == "check":
            raise ValueError(text)
        _log.warning(text)
    return model


def not_served(model: Any) -> list[str]:
    """The modules that compute with other operators than this library's, each as "name (class)"."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from . import attention, layers, rotary

    found = []
    for name, module in model.named_modules():
        if next(module.children(), None) is not None and not isinstance(module, Attention):
            continue  # composed of other modules, which this loop checks
        method = getattr(module, "quant_method", None)
        if isinstance(module, LinearBase):
            served = type(method) is layers.RlkLinearMethod
        elif isinstance(module, VocabParallelEmbedding):
            served = type(method) is layers.RlkEmbeddingMethod
        elif isinstance(module, Attention):
            served = isinstance(module.impl, attention.RlkAttentionImpl)
        else:
            known = (layers.RlkRMSNorm, layers.RlkSiluAndMul, *rotary.KNOWN, torch_identity())
            served = isinstance(module, known) or type(module).__name__ in _WITHOUT_ARITHMETIC
        if not served:
            found.append(f"{name} ({type(module).__name__})")
    return found


# Modules that compute nothing. ApplyRotaryEmb is one, because its parent RotaryEmbedding computes the rotation.
_WITHOUT_ARITHMETIC = ("ApplyRotaryEmb", "LogitsProcessor", "PPMissingLayer")


def torch_identity() -> Any:
    import torch

    return torch.nn.Identity
