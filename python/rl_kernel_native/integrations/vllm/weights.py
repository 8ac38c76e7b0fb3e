"""Copies a trainer's weights into a running engine of the same process, by vLLM's own weight-transfer API.

``weight_transfer_config={"backend": "rl_kernel_native"}`` selects this module's transfer engine, which passes tensors
on unchanged. For engines in other processes, use vLLM's ``nccl`` or ``ipc``. An update leaves keys of the old weights
in the prefix cache. :func:`sync` resets the cache, and raises an error if vLLM cannot reset it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from .config import NO_RESET

BACKEND = "rl_kernel_native"


@dataclass
class LocalInit(WeightTransferInitInfo):
    """The transfer needs no setup."""


@dataclass
class LocalUpdate(WeightTransferUpdateInfo):
    weights: list[tuple[str, Tensor]]  # checkpoint names


class LocalTransfer(WeightTransferEngine[LocalInit, LocalUpdate]):
    init_info_cls = LocalInit
    update_info_cls = LocalUpdate

    def init_transfer_engine(self, init_info: LocalInit) -> None:
        """Does nothing, because trainer and engine are in one process."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: LocalUpdate) -> None:
        self.model.load_weights(update_info.weights)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Does nothing, because the engine holds no resources."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("rl_kernel_native.integrations.vllm.sync_weights sends the weights")


def sync(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    if llm.llm_engine.has_unfinished_requests():
        raise RuntimeError("sync_weights: expected an engine whose requests are finished, got some that run")
    llm.start_weight_update()
    llm.update_weights({"update_info": {"weights": [(name, whole(w)) for name, w in weights]}})
    llm.finish_weight_update()
    if not llm.reset_prefix_cache():
        raise RuntimeError(NO_RESET)


def whole(weight: Tensor) -> Tensor:
    """The whole parameter: gathered from all ranks if FSDP2 shards it."""
    gather: Any = getattr(weight, "full_tensor", None)
    found: Tensor = (gather() if callable(gather) else weight).detach()
    return found
