"""GRPO with vLLM's rollouts on this library's operators: the ratio to the old policy is exactly 1 before every update.

A tiny Qwen3 with random weights learns to repeat the token that it is given. Engine and trainer share a process; each
update's weights go into the running engine. Old log-probabilities are the rollout's: nothing is scored twice.

    python examples/grpo_vllm.py --steps 20   # vLLM 0.26 on PYTHONPATH: docs/vllm.md

Without a GPU vLLM runs on the CPU (tools/fetch_vllm.sh). The exit status is 1 where a ratio is not 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import rl_kernel_native as rk
from rl_kernel_native.integrations import vllm as plugin

VOCABULARY, LENGTH, GROUP = 16, 6, 16
PROMPTS = [[token] for token in range(4)]


def make_model(folder: str, seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def make_engine(folder: str, seed: int) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are handed over within the process
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        from rl_kernel_native.integrations.vllm import cpu

        cpu.install()
    plugin.enable(check=True)
    from vllm import LLM

    return LLM(
        model=folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=64, seed=seed, block_size=16,
        gpu_memory_utilization=0.3, enforce_eager=not on_gpu, weight_transfer_config={"backend": "rl_kernel_native"},
    )  # fmt: skip


def main(steps: int, seed: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model, other = make_model(folder, seed), 0
        engine = make_engine(folder, seed)
        from vllm import SamplingParams

        rk.patch_model(model, strict=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        how = SamplingParams(max_tokens=LENGTH, n=GROUP, logprobs=0, ignore_eos=True, detokenize=False)
        for step in range(steps):
            outputs = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], how, use_tqdm=False)
            answers = [answer for output in outputs for answer in output.outputs]
            tokens = torch.tensor([list(a.token_ids) for a in answers], device=model.device)
            asked = torch.tensor([p for p in PROMPTS for _ in range(GROUP)], device=model.device)
            given = [[of[t].logprob for of, t in zip(a.logprobs, a.token_ids, strict=True)] for a in answers]
            old = torch.tensor(given, device=model.device)
            reward = (tokens == asked).float().mean(1)

            logits = model(torch.cat((asked, tokens), 1)).logits[:, :-1]
            new = rk.logprob(logits, tokens)
            advantage = rk.group_advantage(reward, group_size=GROUP)
            loss = rk.policy_loss(new, old, advantage, torch.ones_like(old), spec=rk.PolicySpec()).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            plugin.sync_weights(engine, model.named_parameters())

            apart = int(((new.detach() - old).exp() != 1).sum())
            other += apart
            print(f"step {step}: reward {reward.mean():.3f}, ratio other than 1 at {apart} of {old.numel()} tokens")
    return int(other > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(main(**vars(parser.parse_args())))
