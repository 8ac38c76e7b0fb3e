"""Runs `rlk align` on a GPU for models with random weights, made on the spot, without a network.

    python tools/align_gpu.py OUT MODEL [options]       # --help lists them
    python tools/align_gpu.py OUT --make small,wide     # only the models, beside each other

MODEL is small (344M), wide (8B-shaped, 2 layers) or whole (8B-shaped, 36 layers). OUT/MODEL gets a model, and
OUT/MODEL/NAME gets align.json and align.html. The exit status is 1 if a setting of this library differs. Results are
printed and written after every setting and trainer, so a command that is cut off loses one result.

PYTHONPATH must have vLLM 0.26.0 with its libraries and packages (scripts/requirements-vllm.txt), megatron-core
(scripts/requirements-megatron.txt), and this package, built for the GPU.

transformers must be 5.14 or later. torch must be 2.11, which vLLM's wheel pins, with Triton, since without it vLLM runs
its first model runner.

The commands, in this order; each is useful only if all earlier commands succeed:

    align_gpu.py OUT small --settings stock,rk                     # the second runner, CUDA graphs, torch.compile
    align_gpu.py OUT small --settings rk-v1 --steps 3              # the first runner; updates with weight sync
    align_gpu.py OUT small --settings canonical-blas               # vLLM's own operators without split products
    align_gpu.py OUT small --settings rk --trainers megatron,fsdp2-one-gpu
    align_gpu.py OUT wide --settings stock,rk
    align_gpu.py OUT whole --settings stock,rk
    align_gpu.py OUT small --settings rk --pages-for 16            # pages for 16 sequences: forced preemption
    align_gpu.py OUT small --settings rk --prompts 256 --logprobs 0 --logprobs-mode processed_logprobs
    align_gpu.py OUT small --settings rk --trainers fsdp2          # on two GPUs
    align_gpu.py OUT whole --rates --default-batch --dummy         # rates and kernels alone, with vLLM's own batches

RLK_ALIGN_LOCK=FILE lets several commands run at once on one GPU. The measured rollouts then take turns. The engines'
starts, which take most of the time, do not take turns.

Settings rk and rk-v1 must not differ at any token from prefill and trainer. No token is drawn differently, and every
ratio is 1. stock and canonical-blas do differ. rk generates at least 0.98 times as many tokens per second as stock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16},
    "wide": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 2, "num_attention_heads": 32},
    "whole": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
REQUEST: dict[str, Any] = {"prompt_tokens": 512, "max_tokens": 64}
UPDATES: dict[str, Any] = {"num_prompts": 8, "prompt_tokens": 64, "max_tokens": 32}
# Enough for all sequences at once. Engines that start together could not each profile their memory.
CACHE_GIB = {"small": 4.0, "wide": 4.0, "whole": 12.0}
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}  # fmt: skip


def config_of(shape: dict[str, int]) -> Any:
    from transformers import Qwen3Config

    options: dict[str, Any] = {
        **shape, "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
        "tie_word_embeddings": shape["hidden_size"] == 1024, "initializer_range": 0.03,
    }  # fmt: skip
    return Qwen3Config(architectures=["Qwen3ForCausalLM"], dtype="bfloat16", **options)


def configure(folder: Path, shape: dict[str, int]) -> None:
    """Makes a model without weights if none exists."""
    if not (folder / "config.json").is_file():
        config_of(shape).save_pretrained(folder)


def make(folder: Path, shape: dict[str, int]) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # the largest model does not fit next to a float32 copy
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config_of(shape))
    model.save_pretrained(folder)


def made(out: Path, names: list[str]) -> None:
    """Makes the models that are missing, beside each other."""
    missing = [name for name in names if not (out / name / "model" / "config.json").is_file()]
    commands = [[sys.executable, __file__, str(out), name, "--make-one"] for name in missing]
    for name, process in [(name, subprocess.Popen(command)) for name, command in zip(missing, commands, strict=True)]:
        if process.wait() != 0:
            raise RuntimeError(f"the model {name} was not made")


def main(asked: argparse.Namespace) -> int:
    # Leaves out the command's own packages, which a GPU machine need not have.
    from rl_kernel_native.consistency import align

    if asked.dummy:
        configure(asked.out / asked.model / "model", SHAPES[asked.model])
    else:
        made(asked.out, [asked.model])
    start, folder = time.perf_counter(), asked.out / asked.model
    model, report = folder / "model", folder / (asked.name or asked.settings.replace(",", "_"))
    # The share of memory must be free at the start, although other engines start at the same time.
    memory: dict[str, Any] = {"gpu_memory": 0.05, "cache_gib": CACHE_GIB[asked.model] * max(1, asked.prompts / 128)}
    request = align.request_of(
        model, **REQUEST, **memory, num_prompts=asked.prompts, pages_for=asked.pages_for, logprobs=asked.logprobs,
        logprobs_mode=asked.logprobs_mode, default_batch=asked.default_batch, dummy_weights=asked.dummy,
    )  # fmt: skip
    results: list[align.Result] = []
    steps: list[align.Step] = []

    def say(what: str) -> None:
        print(what, f"{time.perf_counter() - start:.0f} s", sep="\n", flush=True)
        align.write_report(report, request, results, steps)

    def take(result: align.Result) -> None:
        results[:] = [r for r in results if (r.setting, r.trained_by) != (result.setting, result.trained_by)] + [result]
        say(align.text(results))

    if asked.rates:
        found = [align.rates(request, setting) for setting in asked.settings.split(",")]
        report.mkdir(parents=True, exist_ok=True)
        (report / "rates.json").write_text(json.dumps({"request": asdict(request), "results": found}, indent=1) + "\n")
        for one in found:
            for limit in one["limits"]:
                rates, seconds = (f"{rate:.0f}" for rate in limit["rates"]), sum(limit["seconds"].values())
                print(f"{one['setting']}, at most {limit['tokens_per_step']} tokens per step:", *rates, end=" ")
                print(f"tok/s; {seconds:.2f} s in kernels")
        return 0
    for setting in filter(None, asked.settings.split(",")):
        align.align(request, [setting], asked.trainers.split(","), found=take)
    if asked.steps:
        steps = align.updates(align.request_of(model, **UPDATES, **memory), asked.steps)
        say(align.text_of_updates(steps))
    return int(not all(r.aligned for r in results if r.is_served) or any(s.ratio_not_one for s in steps))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", nargs="?", choices=SHAPES)
    parser.add_argument("--settings", default="stock,rk", help="settings of rlk align, by commas; may be empty")
    parser.add_argument("--trainers", default="hf", help="trainers of rlk align, by commas")
    parser.add_argument("--steps", type=int, default=0, help="GRPO updates with weight sync, in setting rk")
    parser.add_argument("--pages-for", type=int, default=0, help="longest sequences that the engine's cache holds")
    parser.add_argument("--prompts", type=int, default=128, help="requests of a rollout")
    parser.add_argument("--logprobs", type=int, default=5, help="most probable tokens to score")
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    parser.add_argument("--rates", action="store_true", help="only rates and times of kernels: rates.json")
    parser.add_argument("--default-batch", action="store_true", help="vLLM's own tokens per step; --rates: both")
    parser.add_argument("--dummy", action="store_true", help="--rates: the engine draws its weights")
    parser.add_argument("--name", help="folder of the report; default: the settings")
    parser.add_argument("--make", help="models to make, by commas, without a run")
    parser.add_argument("--make-one", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    asked = options().parse_args()
    if asked.make:
        made(asked.out, asked.make.split(","))
    elif asked.model is None:
        options().error("expected a MODEL or --make")
    elif asked.make_one:
        make(asked.out / asked.model / "model", SHAPES[asked.model])
    else:
        sys.exit(main(asked))
