"""Runs `rlk align` on a GPU for models with random weights, made on the spot, without a network.

    python tools/align_gpu.py OUT MODEL [SETTINGS [TRAINERS [UPDATES [PAGES_FOR]]]]

MODEL is small (344M), wide (8B-shaped, 2 layers) or whole (8B-shaped, 36 layers). OUT/MODEL gets a model and, per
setting, align.json and align.html. The exit status is 1 if a setting of this library differs. Results are printed and
written after every setting, so a command that is cut off loses one result.

PYTHONPATH must have vLLM 0.26.0 with its libraries and packages (scripts/requirements-vllm.txt), megatron-core
(scripts/requirements-megatron.txt), and this package, built for the GPU.

transformers must be 5.14 or later. torch must be 2.11, which vLLM's wheel pins, with Triton, since without it vLLM runs
its first model runner.

The commands, in this order; each is useful only if those before it succeed:

    python tools/align_gpu.py "$OUT" small stock,rk hf            # the second runner, CUDA graphs, torch.compile
    python tools/align_gpu.py "$OUT" small rk-v1 hf,megatron 3    # the first runner; Megatron; updates with weight sync
    python tools/align_gpu.py "$OUT" small canonical-blas hf      # vLLM's own operators without split products
    python tools/align_gpu.py "$OUT" wide stock,rk hf,megatron
    python tools/align_gpu.py "$OUT" whole rk hf
    python tools/align_gpu.py "$OUT" small rk hf 0 16             # pages for 16 sequences: forced preemption
    python tools/align_gpu.py "$OUT" small rk fsdp2               # on two GPUs

RLK_ALIGN_LOCK=FILE lets several commands run at once on one GPU. The measured rollouts then take turns. The starts of
the engines, which are most of the time, do not.

Settings rk and rk-v1 must not differ at any token from prefill and trainer. No token is drawn differently, and every
ratio is 1. stock and canonical-blas do differ. rk generates at least 0.98 times as many tokens per second as stock.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16},
    "wide": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 2, "num_attention_heads": 32},
    "whole": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
# 128 prompts x 64 tokens: at most 8192.
REQUEST: dict[str, Any] = {"num_prompts": 128, "prompt_tokens": 512, "max_tokens": 64, "logprobs": 5}
UPDATES: dict[str, Any] = {"num_prompts": 8, "prompt_tokens": 64, "max_tokens": 32}
# Enough for all sequences at once. Engines that start together could not each profile their memory.
CACHE_GIB = {"small": 4.0, "wide": 4.0, "whole": 12.0}
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}  # fmt: skip


def make(folder: Path, shape: dict[str, int]) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    options: dict[str, Any] = {
        **shape, "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
        "tie_word_embeddings": shape["hidden_size"] == 1024, "initializer_range": 0.03,
    }  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # the largest model does not fit next to a float32 copy
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**options))
    model.save_pretrained(folder)


def main(
    out: str, name: str, settings: str = "stock,rk", trainers: str = "hf", updates: str = "0", pages: str = "0"
) -> int:
    # Leaves out the command's own packages, which a GPU machine need not have.
    from rl_kernel_native.consistency import align

    folder = Path(out) / name
    if not (folder / "model" / "config.json").is_file():
        subprocess.run([sys.executable, __file__, "--make", str(folder / "model"), name], check=True)
    start, model = time.perf_counter(), folder / "model"
    memory: dict[str, Any] = {"gpu_memory": 0.2, "cache_gib": CACHE_GIB[name]}
    request = align.request_of(model, **REQUEST, **memory, pages_for=int(pages))
    results, steps = [], []
    for setting in settings.split(","):
        results += align.align(request, [setting], trainers.split(","))
        print(align.text(results), f"{time.perf_counter() - start:.0f} s", sep="\n", flush=True)
        align.write_report(folder / settings.replace(",", "_"), request, results)
    if int(updates):
        steps = align.updates(align.request_of(model, **UPDATES, **memory), int(updates))
        print(align.text_of_updates(steps), f"{time.perf_counter() - start:.0f} s", sep="\n", flush=True)
        align.write_report(folder / settings.replace(",", "_"), request, results, steps)
    return int(not all(r.aligned for r in results if r.is_served) or any(s.ratio_not_one for s in steps))


if __name__ == "__main__":
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if sys.argv[1:2] == ["--make"]:
        make(Path(sys.argv[2]), SHAPES[sys.argv[3]])
    elif len(sys.argv) < 3 or sys.argv[2] not in SHAPES:
        sys.exit(__doc__)
    else:
        sys.exit(main(*sys.argv[1:]))
