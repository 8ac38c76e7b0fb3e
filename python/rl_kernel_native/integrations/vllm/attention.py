"""vLLM's attention backend CUSTOM. rk.kv_cache_append writes the pages, and rk.attention reads them.

A batch of prefills, chunks and decodes is one call: packed queries, pages by a block table, lengths on the device. The
host does not synchronise, so CUDA graphs capture whole steps. Decode steps outside a CUDA graph read the pages of a
shared prompt once for a group of sequences (shared.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

import rl_kernel_native as rk

from ...ops.attention import attention_into
from . import shared


class RlkAttentionBackend(AttentionBackend):
    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM's name for a backend that a plugin adds

    @staticmethod
    def get_impl_cls() -> type[RlkAttentionImpl]:
        return RlkAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RlkAttentionBuilder]:
        return RlkAttentionBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(range(8, 257, 8))

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        return False


@dataclass
class RlkAttentionMetadata:
    num_actual_tokens: int  # without padding
    query_start_loc: Tensor  # [num_requests + 1] int32
    seq_lens: Tensor  # [num_requests] int32
    block_table: Tensor  # [num_requests, pages] int32
    slot_mapping: Tensor  # [num_actual_tokens or more] int64
    find: Callable[[int], shared.Prefix | None]  # finds the groups, for a number of slots per page
    found: list[shared.Prefix | None] = field(default_factory=list)  # empty, or the result of `find` for the step

    def prefix(self, page_size: int) -> shared.Prefix | None:
        """The step's groups of sequences that share pages, and the other pages of each sequence. Attention in a CUDA
        graph does not use groups."""
        if not self.found:
            self.found.append(self.find(page_size))
        return self.found[0]


class RlkAttentionBuilder(AttentionMetadataBuilder[RlkAttentionMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        heads = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
        hopper = device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)
        self.least_sequences = (shared.LEAST_ROWS if hopper else shared.LEAST_ROWS_ELSEWHERE) / heads
        self.has_window = getattr(kv_cache_spec, "sliding_window", None) is not None

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Captures a step without groups, because its CUDA graph could replay only the captured number of groups."""
        return replace(super().build_for_cudagraph_capture(common_attn_metadata), find=lambda page_size: None)

    def _find(self, m: Any, page_size: int) -> shared.Prefix | None:
        pages, lengths = shared.pages_of(m.block_table_tensor), m.seq_lens_cpu_upper_bound
        if pages is None or lengths is None or m.max_query_len != 1 or self.has_window:
            return None
        every = shared.of_rows(lengths.numpy(), len(m.block_table_tensor))
        groups = shared.find(pages, every, page_size, self.least_sequences)
        return None if groups is None else shared.prefix_of(groups, m.block_table_tensor)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        m = common_attn_metadata
        if m.causal is not True:
            raise ValueError(f"causal: RLK_VLLM serves causal attention, got {m.causal!r}")
        return RlkAttentionMetadata(
            num_actual_tokens=m.num_actual_tokens,
            query_start_loc=m.query_start_loc,
            seq_lens=m.seq_lens,
            block_table=m.block_table_tensor,
            slot_mapping=m.slot_mapping,
            find=functools.partial(self._find, m),
        )


class RlkAttentionImpl(AttentionImpl[RlkAttentionMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        refused = {
            "alibi_slopes": alibi_slopes is not None,
            f"logits_soft_cap = {logits_soft_cap}": bool(logits_soft_cap),
            f"attn_type = {attn_type}": attn_type != AttentionType.DECODER,
            f"kv_sharing_target_layer_name = {kv_sharing_target_layer_name}": kv_sharing_target_layer_name is not None,
            "sinks": sinks is not None,
        }
        if any(refused.values()):
            raise ValueError("RLK_VLLM's attention does not serve " + "; ".join(k for k, v in refused.items() if v))
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.window_size = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self._updated: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # the updated cache, and its pages

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as [pages, slots of a page, heads, columns]. An update keeps these views for the next call
        alone, because views that are kept longer keep the cache's memory alive."""
        updated, self._updated = self._updated, None
        if updated is not None and updated[0] is kv_cache:
            return updated[1]
        k_pages, v_pages = kv_cache.transpose(1, 2).chunk(2, -1)
        return k_pages, v_pages

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        pages = self._pages(kv_cache)
        rk.kv_cache_append(key, value, *pages, slot_mapping)
        self._updated = kv_cache, pages

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: RlkAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("output_scale: RLK_VLLM's attention does not quantise its output")
        if attn_metadata is None:  # a profiling run, which has no pages
            return output.fill_(0)
        m = attn_metadata
        n = m.num_actual_tokens
        block_table, prefix = m.prefix(kv_cache.shape[2]) or (m.block_table, None)
        is_padded = n != query.shape[0] or n != output.shape[0]
        attention_into(
            output[:n] if is_padded else output, query[:n] if is_padded else query, *self._pages(kv_cache),
            cu_seqlens_q=m.query_start_loc, block_table=block_table, seqused_k=m.seq_lens, softmax_scale=self.scale,
            window_size=self.window_size, shared_prefix=prefix,
        )  # fmt: skip
        return output
