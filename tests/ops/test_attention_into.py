"""attention_into, the call of an engine that owns the result's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rl_kernel_native as rk
from rl_kernel_native._native import module
from rl_kernel_native.ops.attention import attention_into

LISTS: dict[str, Any] = {
    "cu_seqlens_q": torch.tensor([0, 3, 4], dtype=torch.int32),
    "seqused_k": torch.tensor([5, 2], dtype=torch.int32),
    "block_table": torch.tensor([[1, 0], [2, 3]], dtype=torch.int32),
}
HOW: dict[str, Any] = {**LISTS, "softmax_scale": 0.3, "window_size": 4}


def paged() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(4, 2, 8), torch.randn(4, 4, 1, 8), torch.randn(4, 4, 1, 8)


def test_the_result_is_written_and_nothing_beside_it() -> None:
    q, k, v = paged()
    buffer = torch.full((6, 2, 8), 7.0)
    version = buffer._version
    attention_into(buffer[1:5], q, k, v, shared_prefix=None, **HOW)
    assert torch.equal(buffer[1:5], rk.attention(q, k, v, **HOW))
    assert (buffer[[0, 5]] == 7).all()
    assert buffer._version > version


def test_the_extension_writes_to_a_given_array_and_refuses_others() -> None:
    """The eager call passes the array to the extension only on a GPU, so this test calls the extension itself."""
    q, k, v = paged()

    def call(out: Any) -> Any:
        lists = (LISTS["cu_seqlens_q"], None, None, LISTS["seqused_k"], None, None, LISTS["block_table"])
        return module.attention(
            (q, k, v, None, *lists, None, None, None), (True, 4, 0.3, None), 0, 0, False, out, None, 0
        )

    out = torch.empty(4, 2, 8)
    found, lse = call(out)
    assert found is out
    assert lse is None
    assert torch.equal(out, rk.attention(q, k, v, exp="portable", **HOW))
    for given, words in (
        (torch.empty(4, 2, 16), r"out: expected shape \[4, 2, 8\]"),
        (torch.empty(4, 2, 16)[..., ::2], "out: expected a contiguous array"),
        (q, "out: may share memory with q"),
    ):
        with pytest.raises(ValueError, match=words):
            call(given)
    with pytest.raises(TypeError, match="out: expected dtype float32"):
        call(torch.empty(4, 2, 8, dtype=torch.bfloat16))
