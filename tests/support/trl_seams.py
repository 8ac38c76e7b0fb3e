"""The installed TRL: the functions that rl_kernel_native.integrations.trl replaces, and their originals."""

from __future__ import annotations

from typing import Any

import pytest

import framework_sources
import rl_kernel_native as rk

torch = pytest.importorskip("torch", reason="TRL trains models of torch")
trl, grpo_trainer, utils = map(framework_sources.trl, ("trl", "trl.trainer.grpo_trainer", "trl.trainer.utils"))

OLDEST, NEWEST = rk.integrations.trl.OLDEST, rk.integrations.trl.NEWEST
if tuple(map(int, trl.__version__.split(".")[:2])) < tuple(map(int, OLDEST.split("."))):
    pytest.skip(f"expected TRL {OLDEST} or newer, {trl.__version__} is installed", allow_module_level=True)

SEAMS = [
    (utils, "_ChunkedLogProbFunction"),
    (grpo_trainer.GRPOTrainer, "_compute_loss"),
    (grpo_trainer.GRPOTrainer, "_get_per_token_logps_and_entropies"),
]


class PlainHead:
    """TRL's head by torch's own operators, since TRL 1.15 has no head without Triton."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, softcap=None, scale=1.0, outputs=()):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    @staticmethod
    def apply(
        hidden: Any, weight: Any, bias: Any, targets: Any, temperature: float, chunk_size: int,
        softcap: float | None = None, scale: float = 1.0, outputs: tuple[str, ...] = (),
    ) -> tuple[Any, ...]:  # fmt: skip
        z = torch.nn.functional.linear(hidden, weight, bias).float() * scale
        z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
        logp = z.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        with torch.no_grad():
            squares, mean, top = (2 * logp).logsumexp(-1), z.mean(-1), z.argmax(-1) == targets
        return logp.gather(-1, targets[:, None])[:, 0], entropy, squares, mean, top


if utils._ChunkedLogProbFunction is None:
    utils._ChunkedLogProbFunction = PlainHead
STOCK = [vars(owner)[name] for owner, name in SEAMS]
