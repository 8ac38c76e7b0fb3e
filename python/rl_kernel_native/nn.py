"""Torch modules that use this library's operators, with the names, parameters and checkpoints of torch's own modules.

``import rl_kernel_native.nn``, or ``rk.nn`` after ``import rl_kernel_native as rk``. The module needs torch.
"""

from __future__ import annotations

from typing import Any

import rl_kernel_native as rk

from . import _check, _variants

with _variants.needed("rk.nn: expected torch 2.10 or newer", _variants.INSTALL_TORCH, "torch"):
    import torch
    from torch import Tensor

__all__ = ["Embedding", "Linear", "LinearLogprob", "RMSNorm"]


def _main_grad(parameter: Tensor) -> Tensor | None:
    """The float32 gradient buffer that a trainer has attached to a parameter, or None. Backward adds the parameter's
    gradient to this buffer."""
    buffer: Tensor | None = getattr(parameter, "main_grad", None)
    return buffer


class Linear(torch.nn.Linear):
    """torch.nn.Linear computed by :func:`rl_kernel_native.linear`: a row has the same bits in any batch.

    If a trainer sets ``weight.main_grad``, backward adds the weight's gradient to this buffer in float32.

    Example:
        >>> layer = rk.nn.Linear(4, 3)
        >>> x = torch.randn(8, 4)
        >>> torch.equal(layer(x)[2:3], layer(x[2:3]))
        True
    """

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = rk.linear(input, self.weight, self.bias, main_grad=_main_grad(self.weight))
        return result


class Embedding(torch.nn.Embedding):
    """torch.nn.Embedding computed by :func:`rl_kernel_native.embedding`, whose gradient is summed in one fixed order.

    Raises: ValueError for ``max_norm``, ``scale_grad_by_freq`` and ``sparse``, which are not supported.

    Example:
        >>> rk.nn.Embedding(10, 4)(torch.tensor([3, 1])).shape
        torch.Size([2, 4])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, unset in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if getattr(self, name) != unset:
                raise ValueError(
                    f"{name}: expected {unset}, got {_check.shown(getattr(self, name))}; torch.nn.Embedding has it"
                )

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = rk.embedding(
            input, self.weight, padding_idx=self.padding_idx, main_grad=_main_grad(self.weight)
        )
        return result


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, computed by :func:`rl_kernel_native.rms_norm`.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        round_before_weight: True: round to the input's dtype before multiplying by the weight, as Llama and Qwen do.
            False: round once, after multiplying by the weight.
        weight_offset: 1.0 for weights that are stored minus 1, as in Gemma.

    Example:
        >>> norm = rk.nn.RMSNorm(2)
        >>> norm(torch.tensor([[3.0, 4.0]]))
        tensor([[0.8485, 1.1314]], grad_fn=...)
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        round_before_weight: bool = False,
        weight_offset: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps: float = eps
        self.round_before_weight: bool = round_before_weight
        self.weight_offset: float = weight_offset
        self.weight: torch.nn.Parameter = torch.nn.Parameter(
            torch.full((hidden_size,), 1.0 - _check.number("weight_offset", weight_offset), device=device, dtype=dtype)
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Returns ``y``. With a residual, one pass computes both ``y`` and ``x + residual``, and returns the pair."""
        return rk.rms_norm(
            x,
            self.weight,
            self.eps,
            residual=residual,
            round_before_weight=self.round_before_weight,
            weight_offset=self.weight_offset,
            main_grad=_main_grad(self.weight),
        )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, round_before_weight={self.round_before_weight}"


class LinearLogprob(torch.nn.Linear):
    """An LM head whose forward scores tokens by :func:`rl_kernel_native.linear_logprob`, without all logits in memory.

    Parameters and checkpoints have the format of torch.nn.Linear, so the state of a model's ``lm_head`` loads into this
    module.

    Args: the same as for torch.nn.Linear; ``bias`` is False by default, as in LM heads.

    Example:
        >>> head = rk.nn.LinearLogprob(4, 10)
        >>> hidden, target = torch.randn(3, 4), torch.tensor([1, 5, 9])
        >>> torch.equal(head(hidden, target), rk.logprob(rk.linear(hidden, head.weight), target))
        True
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)

    def forward(self, hidden: Tensor, target: Tensor, **options: Any) -> Any:  # type: ignore[override]
        """Scores ``target``. ``options`` are options of :func:`rl_kernel_native.linear_logprob`, such as
        ``temperature``."""
        return rk.linear_logprob(
            hidden, self.weight, target, bias=self.bias, main_grad=_main_grad(self.weight), **options
        )
