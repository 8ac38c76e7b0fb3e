"""scatter_rewards for torch tensors, and as a torch operator: what torch.compile, export and FakeTensor see. It has no
derivative: inputs are detached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._constants import call_constant, check_vector
from .._shapes import check_element, check_first_mask, check_offsets, check_tokens, dtype_name, is_static
from .._torch import implement, memory, prepare
from .scatter_rewards import call_native

_library = torch.library.Library("rl_kernel_native", "FRAGMENT")
# What is not asked for is an empty tensor.
_library.define(
    "scatter_rewards(Tensor mask, Tensor? rewards, Tensor? token_rewards, Tensor? spans, Tensor? span_offsets, "
    "Tensor? span_rewards, Tensor? logprob, Tensor? ref_logprob, Tensor? cost, Tensor? cu_seqlens, Tensor? lagrange, "
    "float[] spec, bool has_value, float value) -> (Tensor, Tensor, Tensor, Tensor)"
)


def call(tensors: dict[str, Any], how: tuple[Any, ...]) -> tuple[Any, ...]:
    spec, has_value, value = how
    found = call_constant(call_native, "scatter_rewards", tensors, (list(spec), has_value, value))
    wanted = (True, tensors["cost"] is not None, has_value or tensors["lagrange"] is not None, True)
    return tuple(array if is_wanted else None for array, is_wanted in zip(found, wanted, strict=True))


def _kernel(mask: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    prepare(mask)
    *operands, spec, has_value, value = arguments
    found = call_native(memory(mask), *map(memory, operands), spec, has_value, value, None, 0)
    return tuple(mask.new_empty(0, dtype=torch.float32) if array is None else array for array in found)


implement(_library, "scatter_rewards", _kernel)


@torch.library.register_fake("rl_kernel_native::scatter_rewards", lib=_library)
def _fake(
    mask: Tensor, rewards: Any, token_rewards: Any, spans: Any, span_offsets: Any, span_rewards: Any, logprob: Any,
    ref_logprob: Any, cost: Any, cu_seqlens: Any, lagrange: Any, _spec: Any, has_value: bool, _value: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    num = check_first_mask(mask, cu_seqlens)
    for name, tokens in (("token_rewards", token_rewards), ("logprob", logprob), ("ref_logprob", ref_logprob)):
        check_tokens(tokens, name, mask, "mask")
    for name, vector in (("rewards", rewards), ("cost", cost)):
        if vector is not None:
            check_vector(vector, name, (torch.float32,), num, "one a sequence")
    if spans is not None:
        if spans.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"spans: expected dtype int32 or int64, got {dtype_name(spans.dtype)}")
        if spans.dim() != 2 or spans.shape[1] != 2:
            raise ValueError(f"spans: expected a contiguous array of shape [num_spans, 2], got {list(spans.shape)}")
        check_offsets(span_offsets, "span_offsets")
        if is_static(span_offsets) and type(num) is int and span_offsets.shape[0] != num + 1:
            shape = list(span_offsets.shape)
            raise ValueError(f"span_offsets: expected shape [{num + 1}] (num_sequences + 1), got {shape}")
        check_vector(span_rewards, "span_rewards", (torch.float32,), spans.shape[0], "one a span")
    check_element(lagrange, "lagrange")

    def empty(is_wanted: bool) -> Tensor:
        return mask.new_empty(mask.shape if is_wanted else (0,), dtype=torch.float32)

    costs, combined = empty(cost is not None), empty(has_value or lagrange is not None)
    return empty(True), costs, combined, mask.new_empty((num,), dtype=torch.int64)
