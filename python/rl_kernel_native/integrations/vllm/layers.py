"""vLLM's layers on this library's operators. Rounding points are the same as in transformers' layers, so a patched
trainer has the same bits. Parameters in vLLM are tensor subclasses. Operators get the plain tensors in them, which
saves a pass through the dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

import rl_kernel_native as rk


class RlkRMSNorm(RMSNorm):
    """RMSNorm. With a residual, forward returns the pair (normalised, x + residual)."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        has_weight: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__(hidden_size, eps, var_hidden_size, has_weight, dtype)
        if self.variance_size_override is not None or not has_weight:
            raise ValueError(
                "RMSNorm: RLK_VLLM serves norms of all columns with a weight, got var_hidden_size = "
                f"{var_hidden_size}, has_weight = {has_weight}"
            )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return rk.rms_norm(x, self.weight.data, self.variance_epsilon, residual=residual, round_before_weight=True)


class RlkSiluAndMul(SiluAndMul):
    def __init__(self, *, compile_native: bool = True) -> None:
        super(SiluAndMul, self).__init__(
            compile_native=compile_native
        )  # SiluAndMul's own __init__ asks for vLLM's kernel

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = rk.silu_mul(x, round_before_mul=True)
        return y


class RlkLinearMethod(UnquantizedLinearMethod):
    """Linear layers of one rank. A row-parallel layer over several ranks would need `linear_partial`, a sum over ranks,
    and then the bias."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leaves weights as they are loaded. vLLM would repack them for its own CPU product."""

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(layer, x, bias)


class RlkEmbeddingMethod(UnquantizedEmbeddingMethod):
    """The token embedding, and the LM head, which may use the same table."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leaves weights as they are loaded, as for linear layers."""

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(layer, x, bias)

    def embedding(self, layer: torch.nn.Module, input_: Tensor) -> Tensor:
        table: Any = layer.weight.data
        rows: Tensor = rk.embedding(input_, table)
        return rows


def linear(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = rk.linear(x, layer.weight.data, None if bias is None else bias.data)
    return y
