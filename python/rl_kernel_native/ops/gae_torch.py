"""gae, discounted_returns and vtrace for torch tensors, and as torch operators: what torch.compile, export and
FakeTensor see. They have no derivative: inputs are detached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._constants import (
    call_constant,
    check_contiguous,
    check_positive,
    check_share,
    check_vector,
)
from .._native import module as _C
from .._shapes import check_first, check_mask, check_tokens
from .._torch import implement, memory, prepare

_library = torch.library.Library("rl_kernel_native", "FRAGMENT")
_SEQUENCES = "Tensor? mask, Tensor? cu_seqlens"
_library.define(
    f"gae(Tensor rewards, Tensor values, {_SEQUENCES}, Tensor? bootstrap, float gamma, float lam) -> (Tensor, Tensor)"
)
# The first output is an empty tensor.
_library.define(f"discounted_returns(Tensor rewards, {_SEQUENCES}, float gamma, bool reset) -> (Tensor, Tensor)")
_library.define(
    f"vtrace(Tensor rewards, Tensor values, Tensor logprob, Tensor rollout_logprob, {_SEQUENCES}, Tensor? bootstrap, "
    "float gamma, float lam, float rho_bar, float c_bar) -> (Tensor, Tensor)"
)


def call(name: str, tensors: dict[str, Any], options: tuple[Any, ...]) -> tuple[Any, Any]:
    found: tuple[Any, Any] = call_constant(getattr(_C, name), name, tensors, options)
    return found


def _kernel(name: str) -> Any:
    function = getattr(_C, name)

    def kernel(rewards: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        prepare(rewards)
        given = (memory(a) if isinstance(a, Tensor) else a for a in arguments)
        advantages, returns = function(memory(rewards), *given, None, 0)
        return rewards.new_empty(0) if advantages is None else advantages, returns

    return kernel


for _name in ("gae", "discounted_returns", "vtrace"):
    implement(_library, _name, _kernel(_name))


def _like(rewards: Tensor, mask: Any, cu_seqlens: Any, bootstrap: Any = None, **tokens: Tensor) -> Tensor:
    num = check_first(rewards, "rewards", cu_seqlens)
    for name, tensor in tokens.items():
        check_tokens(tensor, name, rewards, "rewards")
    check_mask(mask, rewards.shape, "rewards")
    if bootstrap is not None:
        check_vector(bootstrap, "bootstrap", (torch.float32,), num, "num_sequences")
        check_contiguous(bootstrap, "bootstrap")
    return rewards.new_empty(rewards.shape)


@torch.library.register_fake("rl_kernel_native::gae", lib=_library)
def _gae_fake(
    rewards: Tensor, values: Tensor, mask: Any, cu_seqlens: Any, bootstrap: Any, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    check_share("gamma", gamma)
    check_share("lam", lam)
    out = _like(rewards, mask, cu_seqlens, bootstrap, values=values)
    return out, torch.empty_like(out)


@torch.library.register_fake("rl_kernel_native::discounted_returns", lib=_library)
def _discounted_returns_fake(
    rewards: Tensor, mask: Any, cu_seqlens: Any, gamma: float, _reset: bool
) -> tuple[Tensor, Tensor]:
    check_share("gamma", gamma)
    return rewards.new_empty(0), _like(rewards, mask, cu_seqlens)


@torch.library.register_fake("rl_kernel_native::vtrace", lib=_library)
def _vtrace_fake(
    rewards: Tensor, values: Tensor, logprob: Tensor, rollout_logprob: Tensor, mask: Any, cu_seqlens: Any,
    bootstrap: Any, gamma: float, lam: float, rho_bar: float, c_bar: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_share("gamma", gamma)
    check_share("lam", lam)
    check_positive("rho_bar", rho_bar)
    check_positive("c_bar", c_bar)
    out = _like(rewards, mask, cu_seqlens, bootstrap, values=values, logprob=logprob, rollout_logprob=rollout_logprob)
    return out, torch.empty_like(out)
