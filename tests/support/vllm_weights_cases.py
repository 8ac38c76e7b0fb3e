"""Tests when weights are copied into an engine, and when that is refused. `run()` runs in a process with vLLM enabled
(tests/frameworks/test_vllm.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_kernel_native.integrations import vllm as plugin


def engine(called: list[Any], *, runs: bool, resets: bool) -> Any:
    """An engine that notes its calls."""

    def note(name: str, answer: Any = None) -> Any:
        def call(*args: Any) -> Any:
            called.append((name, *args))
            return answer

        return call

    return SimpleNamespace(
        llm_engine=SimpleNamespace(has_unfinished_requests=lambda: runs),
        start_weight_update=note("start"), update_weights=note("update"), finish_weight_update=note("finish"),
        reset_prefix_cache=note("reset", resets),
    )  # fmt: skip


def run() -> None:
    weight = torch.ones(2)
    shard = SimpleNamespace(full_tensor=lambda: weight)  # as FSDP2 shards a weight
    called: list[Any] = []
    plugin.sync_weights(engine(called, runs=False, resets=True), [("own", weight), ("sharded", shard)])
    assert [name for name, *_ in called] == ["start", "update", "finish", "reset"]
    sent = called[1][1]["update_info"]["weights"]
    assert [name for name, _ in sent] == ["own", "sharded"]
    assert all(torch.equal(given, weight) for _, given in sent)
    with pytest.raises(RuntimeError, match="the prefix cache, which holds keys of the old weights, could not be reset"):
        plugin.sync_weights(engine([], runs=False, resets=False), [("own", weight)])
    called.clear()
    with pytest.raises(RuntimeError, match="expected an engine whose requests are finished, got some that run"):
        plugin.sync_weights(engine(called, runs=True, resets=True), [("own", weight)])
    assert called == [], "weights changed under requests that run"
