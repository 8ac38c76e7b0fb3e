"""mypy checks this file, and nothing runs it. The file states the types that a checker infers for calls. Each line
states a promise of the public signatures."""

from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray

import rl_kernel_native as rk


def of_torch(x: torch.Tensor, ids: torch.Tensor, parameter: torch.nn.Parameter) -> None:
    assert_type(rk.logprob(x, ids), torch.Tensor)
    assert_type(rk.logprob(parameter, ids), torch.Tensor)
    assert_type(rk.logprob(x, ids, return_entropy=True).logprob, torch.Tensor)
    assert_type(rk.linear_logprob(x, x, ids), torch.Tensor)
    assert_type(rk.linear(x, parameter), torch.Tensor)
    assert_type(rk.embedding(ids, parameter), torch.Tensor)
    assert_type(rk.attention(x, x, x), torch.Tensor)
    assert_type(rk.attention(x, x, x, return_lse=True).lse, torch.Tensor)
    assert_type(rk.rms_norm(x, parameter, 1e-6), torch.Tensor)
    assert_type(rk.rms_norm(x, parameter, 1e-6, residual=x), tuple[torch.Tensor, torch.Tensor])
    assert_type(rk.gae(x, x).returns, torch.Tensor)
    assert_type(rk.kl(x, x, estimator="k3"), torch.Tensor)
    assert_type(rk.group_advantage(x, group_size=4), torch.Tensor)
    assert_type(rk.group_advantage(x, group_size=4, return_stats=True).advantage, torch.Tensor)
    assert_type(rk.sequence_logprob(x).sum, torch.Tensor)
    assert_type(rk.pack([x, ids], ids).cu_seqlens, torch.Tensor)
    assert_type(rk.unpack(x, ids, 8), torch.Tensor)
    assert_type(rk.policy_loss(x, x, x, ids, spec=rk.PolicySpec()).loss, torch.Tensor)


def of_numpy(x: NDArray[np.float16], ids: NDArray[np.int64]) -> None:
    assert_type(rk.logprob(x, ids), NDArray[Any])  # float32, so not an array of x's own dtype
    assert_type(rk.masked_whiten(x, ids), NDArray[Any])
    assert_type(rk.sample(x, seed=0, sample_id=0, position=0).ids, NDArray[Any])


def refused(x: torch.Tensor, ids: torch.Tensor) -> None:
    rk.kl(x, x, estimator="k4")  # type: ignore[arg-type]
    rk.logprob(x, ids, on_bad_id="ignore")  # type: ignore[call-overload]
    rk.logprob([1.0], ids)  # type: ignore[call-overload]
    rk.gae(x, 3.0)  # type: ignore[arg-type]
