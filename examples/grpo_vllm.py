"""TRL's GRPOTrainer with a colocated vLLM, and one switch: the ratio of training to rollout is exactly 1 at every step.

A tiny Qwen3 with random weights learns to repeat a given letter, as in grpo.py. vLLM generates the answers. TRL scores
them again with the same weights. Each update copies TRL's weights into the running engine.

    python examples/grpo_vllm.py --steps 20                # rk: one line, rk.enable(rollout="vllm", trainer="trl")
    python examples/grpo_vllm.py --steps 20 --ops stock    # vLLM's and TRL's own operators
    python examples/grpo_vllm.py --steps 20 --compare      # both, each in its own process, and a plot

Needs vLLM 0.26 and TRL (docs/vllm.md). Without a GPU vLLM runs on the CPU: tools/fetch_vllm.sh FOLDER, then FOLDER on
PYTHONPATH. The exit status is 1 if a ratio of rk is not 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rl_kernel_native as rk

LENGTH, GROUP = 6, 16
SIZE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
# Logged at every step, for the weights that generated the answers. The first two values describe the ratio of training
# to rollout.
METRICS = ("ratio_at_step0/differing", "ratio_at_step0/max_off", "mismatch/k3", "mismatch/chi2", "tokens_per_second")


def save_model(folder: str, seed: int) -> Any:
    """Saves model and tokenizer, which vLLM and TRL then load, and returns the tokenizer."""
    from grpo import make_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen3Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **SIZE, **ids)
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return tokenizer


def measured_trainer() -> Any:
    """GRPOTrainer with this example's metrics in its logs."""
    from trl import GRPOTrainer

    class Measured(GRPOTrainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.vllm_generation.generate = self._timed(self.vllm_generation.generate)

        def _timed(self, generate: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **options: Any) -> Any:
                start = time.perf_counter()
                found = generate(*args, **options)
                tokens = sum(len(ids) for ids in found[1])
                self._metrics["train"]["tokens_per_second"].append(tokens / (time.perf_counter() - start))
                return found

            return timed

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            out = super()._generate_and_score_completions(inputs)
            for name, value in mismatch(out).items():
                self._metrics["train"][name].append(value)
            return out

    return Measured


def mismatch(batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the engine's, before any update."""
    new, old = batch["old_per_token_logps"].float(), batch["sampling_per_token_logps"].float()
    mask = batch["completion_mask"].bool()
    off = (torch.where(mask, new - old, 0.0).exp() - 1).abs()
    metrics = rk.mismatch_metrics(torch.where(mask, new, 0.0), torch.where(mask, old, 0.0), mask.float())
    return {
        "ratio_at_step0/differing": int((off != 0).sum()),
        "ratio_at_step0/max_off": off.max().item(),
        "mismatch/k3": metrics.k3.item(),
        "mismatch/chi2": metrics.chi2_token.item(),
    }


def make_trainer(folder: str, steps: int, seed: int) -> Any:
    """A trainer with its colocated engine. After ``rk.enable`` both use this library's operators."""
    from datasets import Dataset
    from grpo import LETTERS, reward
    from transformers import Qwen3ForCausalLM
    from trl import GRPOConfig

    tokenizer = save_model(folder, seed)
    return measured_trainer()(
        model=Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [f"{letter}>" for letter in LETTERS]}),
        # bf16=False: no autocast is needed, because the weights are bfloat16 in trainer and engine.
        args=GRPOConfig(
            output_dir=folder, max_steps=steps, seed=seed, use_cpu=not torch.cuda.is_available(), bf16=False, beta=0.0,
            use_vllm=True, vllm_mode="colocate", vllm_max_model_length=64, vllm_gpu_memory_utilization=0.3,
            per_device_train_batch_size=len(LETTERS) * GROUP, num_generations=GROUP, max_completion_length=LENGTH,
            learning_rate=3e-3, lr_scheduler_type="constant", gradient_checkpointing=False, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True,
        ),
    )  # fmt: skip


def train(ops: str, steps: int, seed: int) -> list[dict[str, float]]:
    """The logs of each step of a training. Call it once per process, because vLLM's plugin cannot be removed."""
    if not torch.cuda.is_available():
        from rl_kernel_native.integrations.vllm import cpu

        cpu.install()
    if ops == "rk":
        rk.enable(rollout="vllm", trainer="trl")
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, steps, seed)
        trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def in_its_own_process(ops: str, steps: int, seed: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.json"
        options = ["--ops", ops, "--steps", str(steps), "--seed", str(seed), "--log", str(log)]
        subprocess.run([sys.executable, __file__, *options], check=False)  # the log shows whether a ratio is not 1
        found: list[dict[str, float]] = json.loads(log.read_text())
    return found


def show(runs: dict[str, list[dict[str, float]]]) -> bool:
    """Prints each run's summary; returns whether every ratio of rk was 1."""
    for ops, steps in runs.items():
        differing, off = (max(step[name] for step in steps) for name in METRICS[:2])
        rate = sum(step["tokens_per_second"] for step in steps) / len(steps)
        print(
            f"{ops}: reward {steps[0]['reward']:.3f} -> {steps[-1]['reward']:.3f}; ratio other than 1 at "
            f"{sum(step[METRICS[0]] for step in steps):.0f} tokens of {len(steps)} steps, at most {differing:.0f} in "
            f"one; max |ratio - 1| {off:.3g}; {rate:.0f} tokens/s of rollout"
        )
    return not any(step[METRICS[0]] for step in runs.get("rk", []))


def plot(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    panels = {
        "reward": "reward: share of right letters", "ratio_at_step0/max_off": "max |ratio - 1| before the update",
        "mismatch/k3": "KL (k3) of training to rollout", "tokens_per_second": f"rollout, tokens/s on {device}",
    }  # fmt: skip
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.8), layout="constrained")
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for (ops, steps), style in zip(runs.items(), ("-", "--"), strict=False):
            axis.plot(range(1, len(steps) + 1), [step[name] for step in steps], style, label=ops)
        axis.set(xlabel="step", title=title)
        axis.set_ylim(bottom=-0.04 * axis.get_ylim()[1])  # so that a line at 0 can be seen
    axes[0].legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", choices=("rk", "stock"), default="rk")
    parser.add_argument("--compare", action="store_true", help="stock, then rk")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="JSON of every step's logs")
    parser.add_argument("--plot", type=Path, default=Path("grpo_vllm.png"))
    options = parser.parse_args()
    if options.compare:
        runs = {ops: in_its_own_process(ops, options.steps, options.seed) for ops in ("stock", "rk")}
        plot(runs, options.plot)
    else:
        runs = {options.ops: train(options.ops, options.steps, options.seed)}
    if options.log is not None:
        options.log.write_text(json.dumps(runs if options.compare else runs[options.ops]))
    return 0 if show(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
