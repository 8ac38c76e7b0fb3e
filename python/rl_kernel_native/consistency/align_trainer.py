"""The trainer of `rlk align`, which runs as its own process:
`python -m rl_kernel_native.consistency.align_trainer FILE`.

FILE holds the rollout's answer (align_rollout.py). The trainer writes its own log-probabilities of the same tokens to
that file.

- hf: a transformers model, which scores one sequence at a time.
- fsdp2: a transformers model whose parameters are sharded over processes, each on its own GPU. torch.distributed.run
  starts the processes. Sequences are packed if the model uses this library.
- fsdp2-one-gpu: as fsdp2, but with all processes on one GPU. NCCL refuses a shared GPU, so gloo gathers the shards
  through the host.
- megatron: a megatron-core model. Sequences are packed if the model uses this library.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import align_rollout
from . import align_turns as turns

PACKED_TOKENS = 4096  # most tokens in one forward; a longer sequence runs alone
SHARDED = ("fsdp2", "fsdp2-one-gpu")


def of_transformers(request: dict[str, Any], device: str, dtype: Any, served: bool) -> Callable[..., Iterator[Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    import rl_kernel_native as rk

    model: Any = AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype)
    model = model.to(device).eval()
    if served:
        request["patched"] = dict(rk.patch_model(model, strict=True))
    if request["trained_by"] in SHARDED:
        shard(model, device)
        if served:
            return lambda sequences: (x for pack in packs(sequences) for x in packed(model, pack, device))
    return lambda sequences: (model(torch.tensor([ids], device=device)).logits[0] for ids in sequences)


def packed(model: Any, sequences: list[list[int]], device: str) -> list[Any]:
    """Logits of each sequence, from one packed forward of a patched model."""
    import torch

    lengths = [len(ids) for ids in sequences]
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    ids = torch.tensor([[x for ids in sequences for x in ids]], device=device)
    return list(model(ids, cu_seq_lens_q=starts, cu_seq_lens_k=starts, use_cache=False).logits[0].split(lengths))


def join(trained_by: str, device: str) -> str:
    """Joins the process group of a sharded model, and returns the device of this process.

    Raises: RuntimeError for fsdp2 with fewer GPUs than processes.
    """
    import torch

    alone = device == "cuda" and trained_by == "fsdp2"
    torch.distributed.init_process_group("nccl" if alone else "gloo")
    if device == "cpu":
        return device
    processes, gpus = torch.distributed.get_world_size(), torch.cuda.device_count()
    if alone and gpus < processes:
        raise RuntimeError(f"fsdp2: expected {processes} GPUs, got {gpus}; trainer fsdp2-one-gpu shares one")
    device = f"cuda:{torch.distributed.get_rank() if alone else 0}"
    torch.cuda.set_device(device)
    return device


def shard(model: Any, device: str) -> None:
    """Every process receives the whole model and keeps its part."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.partition(":")[0], (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def of_megatron(request: dict[str, Any], device: str, dtype: Any, served: bool) -> Callable[..., Iterator[Any]]:
    from ..integrations import megatron
    from . import align_megatron

    model = align_megatron.make(request["model"], dtype, device)
    if not served:
        return lambda sequences: (align_megatron.alone(model, ids, device) for ids in sequences)
    request["patched"] = megatron.patch(model)
    return lambda sequences: (x for pack in packs(sequences) for x in align_megatron.packed(model, pack, device))


def packs(sequences: list[list[int]]) -> Iterator[list[list[int]]]:
    found: list[list[int]] = []
    for ids in sequences:
        if found and sum(map(len, found)) + len(ids) > PACKED_TOKENS:
            yield found
            found = []
        found.append(ids)
    yield found


def logprobs_of(logits: Any, ids: Any, served: bool) -> Any:
    import torch

    import rl_kernel_native as rk

    if served:
        return rk.logprob(logits, ids)
    return torch.log_softmax(logits.float(), -1).gather(1, ids[:, None])[:, 0]


def ranks_of(logits: Any, ids: Any) -> tuple[list[int], list[int]]:
    """The first and the last valid rank of each token. A token whose logit equals those of other tokens has several
    valid ranks: vLLM may report any of them."""
    own = logits.gather(1, ids[:, None])
    return ((logits > own).sum(1) + 1).tolist(), (logits >= own).sum(1).tolist()


def best_of(logits: Any, best: list[list[Any]], served: bool) -> list[tuple[float, int, int]]:
    """For each of the engine's most probable tokens: its log-probability here, and its first and last valid rank."""
    import torch

    if not best:
        return []
    positions, ids = (torch.tensor([row[i] for row in best], device=logits.device) for i in (0, 1))
    rows = logits[positions]
    return list(zip(logprobs_of(rows, ids, served).tolist(), *ranks_of(rows, ids), strict=True))


def answer(request: dict[str, Any]) -> None:
    import torch

    import rl_kernel_native as rk

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if request["trained_by"] in SHARDED:
        device = join(request["trained_by"], device)
    served = request["served"]
    make = of_megatron if request["trained_by"] == "megatron" else of_transformers
    score = make(request, device, getattr(torch, request["dtype"]), served)
    every = [sequence["prompt"] + sequence["tokens"] for sequence in request["sequences"]]
    with torch.no_grad():
        if device != "cpu":
            one = align_rollout.profiled(lambda: list(score(every[:1]))).events()
            request["kernel_names"] = align_rollout.kernel_names(one)
        for sequence, whole, row in zip(request["sequences"], every, score(every), strict=True):
            count = len(sequence["tokens"])
            logits, targets = row[:-1], torch.tensor(whole[1:], device=device)
            sequence["trainer"] = logprobs_of(logits, targets, served)[-count:].tolist()
            of_tokens = logits[-count:]
            sequence["first_rank"], sequence["last_rank"] = ranks_of(of_tokens, targets[-count:])
            sequence["trainer_best"] = best_of(of_tokens, sequence["best"], served)
            if served:
                drawn = rk.sample(
                    of_tokens, seed=sequence["seed"], sample_id=0, position=torch.arange(count, device=device)
                )
                sequence["redrawn"] = drawn.ids.tolist()


def main(path: Path) -> None:
    import rl_kernel_native as rk

    request = json.loads(path.read_text())
    turns.beside_others(measures=False)
    with rk.trace() as traced:
        answer(request)
    kernels = request.pop("kernel_names", {})
    if int(os.environ.get("RANK", "0")) == 0:
        path.write_text(json.dumps(request | {"trainer_trace": traced.as_json() | {"kernels": kernels}}))
    if request["trained_by"] in SHARDED:
        import torch

        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
