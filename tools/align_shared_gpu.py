"""Rates of vLLM rollouts whose completions share long prompts, with and without attention's groups, on a GPU.

    python tools/align_shared_gpu.py OUT MODEL [options]       # MODEL and PYTHONPATH as for align_gpu.py

Rollouts with and without groups alternate in one engine. With --default, a second engine follows. The second engine has
vLLM's default CUDA graphs, so its decode steps have no groups. Every rollout must have the same tokens and
log-probabilities, byte for byte. The exit status is 1 if one differs, or if no call of the first engine had groups.
OUT/MODEL/shared.json gets the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import align_gpu

NEVER = 1 << 30  # keys in common that no prompt has


def rollout(engine: Any, asked: argparse.Namespace, least_keys: int) -> tuple[list[Any], float, int]:
    """Tokens with their log-probabilities, tokens per second, and the calls of attention that had groups."""
    from vllm import SamplingParams

    import rl_kernel_native as rk
    from rl_kernel_native.integrations.vllm import shared

    shared.LEAST_KEYS = least_keys
    prompts = [[(7919 * i + 31 * j) % 151936 for j in range(asked.keys)] for i in range(asked.prompts)]
    how = SamplingParams(
        temperature=1.0, max_tokens=asked.tokens, n=asked.completions, seed=1, logprobs=0, ignore_eos=True,
        detokenize=False,
    )  # fmt: skip
    engine.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(max_tokens=1), use_tqdm=False)
    with rk.trace() as found:  # the prompts are in the prefix cache
        start = time.perf_counter()
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
        seconds = time.perf_counter() - start
    plans = [item for of in found.plans.get("attention", {}).values() for item in of.items()]
    tokens = [
        [(t, x[t].logprob.hex()) for t, x in zip(c.token_ids, c.logprobs, strict=True)]
        for o in outputs
        for c in o.outputs
    ]
    return tokens, sum(map(len, tokens)) / seconds, sum(n for plan, n in plans if plan.endswith("shared prefix"))


def make_engine(asked: argparse.Namespace, mode: str) -> Any:
    from vllm import LLM

    more: dict[str, Any] = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}} if mode == "piecewise" else {}
    return LLM(
        model=str(asked.out / asked.model / "model"), dtype="bfloat16", skip_tokenizer_init=True, seed=0,
        enable_prefix_caching=True, max_model_len=4096, kv_cache_memory_bytes=8 << 30, gpu_memory_utilization=0.05,
        **more,
    )  # fmt: skip


def main(asked: argparse.Namespace) -> int:
    from rl_kernel_native.integrations import vllm as plugin
    from rl_kernel_native.integrations.vllm import shared

    align_gpu.made(asked.out, [asked.model])
    plugin.enable(check=True)
    least, same, grouped = shared.LEAST_KEYS, True, 0
    found: dict[str, list[float]] = {}
    first: Any = None
    for mode in ("piecewise", "default")[: 1 + asked.default]:
        engine = make_engine(asked, mode)
        rollout(engine, asked, least)  # loads kernels
        for turn in range(asked.turns):
            for name, keys in (("groups", least), ("none", NEVER)):
                tokens, rate, calls = rollout(engine, asked, keys)
                first = first or tokens
                same = same and tokens == first
                grouped += calls if mode == "piecewise" else 0
                label = f"{mode} {name}"
                found.setdefault(label, []).append(rate)
                print(
                    f"{label}: turn {turn}, {rate:.0f} tok/s, {calls} calls with groups, same {tokens == first}",
                    flush=True,
                )
        del engine
    for label, rates in found.items():
        print(f"{label}: {statistics.median(rates):.0f} tok/s")
    result = {"request": {k: str(v) for k, v in vars(asked).items()}, "rates": found, "same": same, "calls": grouped}
    (asked.out / asked.model / "shared.json").write_text(json.dumps(result, indent=1) + "\n")
    return int(not same or grouped == 0)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", choices=align_gpu.SHAPES)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--keys", type=int, default=3968, help="tokens of a prompt")
    parser.add_argument("--completions", type=int, default=32, help="completions of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--default", action="store_true", help="also an engine with vLLM's default CUDA graphs")
    return parser


if __name__ == "__main__":
    for variable, value in {**align_gpu.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
        os.environ.setdefault(variable, value)
    sys.exit(main(options().parse_args()))
