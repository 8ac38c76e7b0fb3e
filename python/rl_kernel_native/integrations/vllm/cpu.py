"""Runs vLLM's engine on a CPU without vLLM's native libraries, for tests and `rlk align`.

The CPU engine consists of an out-of-tree platform, Python versions of the two C++ operators that the runner calls, and
torch's operators for layers that stay stock.

This engine is slow, and supports only eager mode. Call :func:`install` in a separate process, before any other part of
vLLM.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
from torch import Tensor

_library: Any = None

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def install() -> None:
    """Makes vLLM in this process run on the CPU. Repeated calls do nothing."""
    global _library
    if _library is not None:
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _library = torch.library.Library("_C", "FRAGMENT")
    _library.define("init_cpu_memory_env(int[] nodes) -> ()")
    _library.define(
        "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
        "Tensor(a!) slot_mapping, int block_size) -> ()"
    )
    _library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
    _library.impl("compute_slot_mapping_kernel_impl", _slot_mapping, "CPU")

    import vllm.platforms
    import vllm.utils.torch_utils
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import PlatformEnum

    class HostPlatform(CpuPlatform):
        _enum = PlatformEnum.OOT
        device_name = "cpu"

        @classmethod
        def import_kernels(cls) -> None:
            """Imports nothing, because this platform has no compiled kernels."""

        @classmethod
        def is_cpu(cls) -> bool:
            return True

        @classmethod
        def get_attn_backend_cls(cls, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
            from vllm.v1.attention.backends.registry import AttentionBackendEnum

            if selected_backend == AttentionBackendEnum.CUSTOM:
                return AttentionBackendEnum.CUSTOM.get_path()
            return f"{__name__}.TorchAttentionBackend"

    vllm.platforms.current_platform = HostPlatform()
    vllm.utils.torch_utils.PIN_MEMORY = False  # vLLM's import set it, before the platform was known
    _serve_by_torch()


def _slot_mapping(start: Tensor, positions: Tensor, block_table: Tensor, slots: Tensor, block_size: int) -> None:
    """Writes the slots of a batch's tokens, then -1 up to the end of ``slots``."""
    lengths = start[1:] - start[:-1]
    total = int(start[-1])
    request = torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths.long())
    position = positions[:total].long()
    pages = block_table[request, position // block_size].long()
    slots[:total] = pages * block_size + position % block_size
    slots[total:] = -1


def _serve_by_torch() -> None:
    """Replaces the C++ kernels of vLLM's own layers with torch's operators, for the stock setting."""
    from vllm.model_executor.layers import linear, vocab_parallel_embedding
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def own(self: Any, *, compile_native: bool = True) -> None:
        super(SiluAndMul, self).__init__(compile_native=compile_native)

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, layer.weight.data, None if bias is None else bias.data)

    changed: Any = SiluAndMul
    changed.__init__ = own
    changed.forward_cpu = lambda self, x: SiluAndMul.forward_native(x)
    changed = RotaryEmbedding
    changed.forward_cpu = RotaryEmbedding.forward_native
    for changed in (linear.UnquantizedLinearMethod, vocab_parallel_embedding.UnquantizedEmbeddingMethod):
        changed.apply = apply
        changed.process_weights_after_loading = lambda self, layer: None


def _backend() -> Any:
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionImpl,
        AttentionMetadataBuilder,
        AttentionType,
        MultipleOf,
    )

    class TorchAttentionBuilder(AttentionMetadataBuilder):
        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return common_attn_metadata

    class TorchAttentionImpl(AttentionImpl):
        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int | None = None,
            alibi_slopes: Any = None,
            sliding_window: int | None = None,
            kv_cache_dtype: str = "auto",
            logits_soft_cap: float | None = None,
            attn_type: str = AttentionType.DECODER,
            kv_sharing_target_layer_name: str | None = None,
        ) -> None:
            self.head_size, self.scale, self.kv_cache_dtype = head_size, scale, kv_cache_dtype

        def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
            kept = slots >= 0
            page, place = slots[kept] // cache.shape[2], slots[kept] % cache.shape[2]
            cache[page, :, place] = torch.cat([key, value], -1)[: kept.shape[0]][kept]

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            output_scale: Any = None,
            output_block_scale: Any = None,
        ) -> Tensor:
            if attn_metadata is None:
                return output.fill_(0)
            starts = attn_metadata.query_start_loc.tolist()
            for i, length in enumerate(attn_metadata.seq_lens.tolist()):
                q = query[starts[i] : starts[i + 1]].transpose(0, 1)
                pages = attn_metadata.block_table_tensor[i, : -(-length // kv_cache.shape[2])].long()
                both = kv_cache[pages].transpose(0, 1).flatten(1, 2)[:, :length]
                seen = torch.ones(q.shape[1], length, dtype=torch.bool).tril(length - q.shape[1])
                attended = torch.nn.functional.scaled_dot_product_attention(
                    q[None], both[None, ..., : self.head_size], both[None, ..., self.head_size :],
                    attn_mask=seen, scale=self.scale, enable_gqa=True,
                )  # fmt: skip
                output[starts[i] : starts[i + 1]] = attended[0].transpose(0, 1)
            return output

    class TorchAttentionBackend(AttentionBackend):
        accept_output_buffer = True
        forward_includes_kv_cache_update = False
        supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]

        @staticmethod
        def get_name() -> str:
            return "CPU_ATTN"

        @staticmethod
        def get_impl_cls() -> Any:
            return TorchAttentionImpl

        @staticmethod
        def get_builder_cls() -> Any:
            return TorchAttentionBuilder

        @staticmethod
        def get_kv_cache_shape(
            num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
        ) -> tuple[int, ...]:
            return num_blocks, num_kv_heads, block_size, 2 * head_size

        @staticmethod
        def get_supported_kernel_block_sizes() -> list[Any]:
            return [MultipleOf(16)]

    return TorchAttentionBackend


def __getattr__(name: str) -> Any:
    if name != "TorchAttentionBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _backend()
    return globals()[name]
