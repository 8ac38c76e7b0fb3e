"""GRPO in one file: TRL's GRPOTrainer, with its own log-probabilities and loss or with this library's.

A tiny Qwen3 with random weights learns to repeat a given letter: the right answer to "b>" is "bbbbbb". The reward is
the share of right letters. The script creates model, tokenizer and prompts; nothing is downloaded.

    pip install ".[trl]"                      # in a clone; torch first, see README.md
    python examples/grpo.py --ops rk          # this library's log-probabilities and loss
    python examples/grpo.py --ops stock       # TRL's
    python examples/grpo.py --compare         # both: importance ratios, and an error check of each step

examples/README.md explains --compare and shows a run.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import torch
import transformers
import typer
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import rl_kernel_native as rk
from rl_kernel_native.contract import row

LETTERS = "abcd"
LENGTH = 6  # letters of an answer
GROUP = 16  # answers to a prompt
MEASURED = 10  # number of times that --compare measures the ratio in a run
PARTS = ("rollout", "ratio/KL", "logprob", "loss", "backward", "update")

console = Console()
JUDGED_WIDTH = 118  # characters per row of the table of judged steps


# ---- model, tokenizer, reward ---------------------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every character."""
    ids = {token: i for i, token in enumerate(["<pad>", "<eos>", ">", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()  # no spaces between them
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def save_model(tokenizer: PreTrainedTokenizerFast, folder: Path, seed: int) -> None:
    """A Qwen3 of one layer with random weights, saved in a folder, because TRL loads the reference model from there."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of the answer that repeats the prompt's letter: 1 at best."""
    return [answer.count(prompt[0]) / LENGTH for prompt, answer in zip(prompts, completions, strict=True)]


# ---- where the time goes --------------------------------------------------------------------------------------------


class Clock:
    """Seconds of the parts of a run. The time of an inner part is not added to the outer part."""

    def __init__(self, device: str) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device
        self._open: list[str] = []
        self._since = 0.0

    def _lap(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def start(self, part: str) -> None:
        self._lap()
        self._open.append(part)

    def stop(self) -> None:
        self._lap()
        self._open.pop()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.start(name)
        try:
            yield
        finally:
            self.stop()


class Watched(GRPOTrainer):
    """TRL's trainer with a clock. The class calls TRL's methods, or what `enabled()` has put in their place."""

    clock: Clock

    def _prepare_inputs(self, *args: Any) -> Any:
        with self.clock.part("rollout"):  # generate() and rewards
            return super()._prepare_inputs(*args)

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        # Without a gradient: the log-probabilities of the old and the reference policy, for ratio and KL.
        with self.clock.part("logprob" if torch.is_grad_enabled() else "ratio/KL"):
            return super()._get_per_token_logps_and_entropies(*args, **options)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        with self.clock.part("loss"):
            return super()._compute_loss(model, inputs)

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        with self.clock.part("backward"):  # the rest of a step
            return super().training_step(*args, **options)


class Recorder(TrainerCallback):
    """Records the logs of every step and the optimizer's time. With `measure`, also the ratios before some steps."""

    def __init__(self, clock: Clock, measure: Callable[[Any], torch.Tensor] | None = None) -> None:
        self.clock, self.measure = clock, measure
        self.steps: list[dict[str, float]] = []
        self.ratios: dict[int, torch.Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.measure is not None and state.global_step % max(1, state.max_steps // MEASURED) == 0:
            with torch.random.fork_rng():  # so that measuring does not change the training's random numbers
                torch.manual_seed(state.global_step)
                self.ratios[state.global_step + 1] = self.measure(model)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.clock.start("update")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.clock.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.steps.append({"step": state.global_step, **logs})


# ---- both on the same batch, against float64 ------------------------------------------------------------------------


@dataclass
class Judged:
    """A step's loss and gradient: the float64 value, this library's error, and the allowed error."""

    step: int
    loss: float
    loss_off: float
    loss_allowed: float
    gradient: float
    gradient_off: float
    gradient_allowed: float

    @property
    def share(self) -> float:
        """The largest deviation from the reference, as a share of the allowed deviation."""
        return max(self.loss_off / self.loss_allowed, self.gradient_off / self.gradient_allowed)

    @property
    def agrees(self) -> bool:
        return self.share <= 1


class Judge(Watched):
    """Trains as TRL does. Before each step, it checks the errors of this library's loss and gradient."""

    judged: list[Judged]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        metrics, clock = self._metrics, self.clock
        self._metrics = {"train": defaultdict(list)}
        self.clock = Clock("cpu")  # so that the checks do not count as time of TRL
        clock.start("judging")
        self.judged.append(self._judge(model, inputs))
        clock.stop()
        self._metrics, self.clock = metrics, clock
        return super()._compute_loss(model, inputs)

    def _judge(self, model: Any, inputs: dict[str, Any]) -> Judged:
        parameters = list(model.parameters())

        def gradient_of(loss: torch.Tensor) -> torch.Tensor:
            found = torch.autograd.grad(loss, parameters, retain_graph=True)
            return torch.cat([g.flatten().double() for g in found])

        with rk.integrations.trl.enabled():
            ours = super()._compute_loss(model, inputs)
        gradient = gradient_of(ours)
        exact = _in_float64(self, model, inputs)
        value = self._loss_of(exact.logprob, exact.entropy, inputs)
        exact_gradient = gradient_of(value)

        # The loss's derivative with respect to a log-probability. An error of the log-probability changes the
        # derivative, above all if the ratio then crosses its clip.
        def slope_at(shift: float) -> torch.Tensor:
            logprob = (exact.logprob.detach() + shift).requires_grad_()
            return torch.autograd.grad(self._loss_of(logprob, exact.entropy.detach(), inputs), logprob)[0]

        slope = slope_at(0.0)
        moved = [(slope_at(shift) - slope).abs() for shift in (-exact.logprob_allowed, exact.logprob_allowed)]
        slope_allowed = torch.maximum(*moved) + row("policy_loss", "d_logprob").allowed(largest=slope.abs().max())
        # The gradients of sequences partly cancel in their sum, but their errors may all add up.
        slope_allowed *= inputs["completion_mask"]
        sequences = zip(exact.gradient_allowed(slope, slope_allowed), exact.z, strict=True)
        gradient_allowed = sum(float(gradient_of((off * z).sum()).norm()) for off, z in sequences)
        total = float(slope.abs().sum())
        return Judged(
            step=self.state.global_step + 1,
            loss=value.item(),
            loss_off=abs(ours.item() - value.item()),
            loss_allowed=row("policy_loss", "loss").allowed(scale=total + abs(value.item()))
            + total * exact.logprob_allowed,
            gradient=float(exact_gradient.norm()),
            gradient_off=float((gradient - exact_gradient).norm()),
            gradient_allowed=gradient_allowed,
        )

    def _loss_of(self, logprob: torch.Tensor, entropy: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's loss for these log-probabilities."""
        self._get_per_token_logps_and_entropies = lambda *_, **__: (logprob, entropy, None)
        try:
            return super()._compute_loss(self.model, inputs)
        finally:
            del self._get_per_token_logps_and_entropies


@dataclass
class Exact:
    """Logits [B, T, V], log-probabilities and entropies [B, T] in float64. Also the allowed errors of the logits and
    log-probabilities that this library computes."""

    z: torch.Tensor
    logprob: torch.Tensor
    entropy: torch.Tensor
    target: torch.Tensor
    logit_allowed: float
    logprob_allowed: float
    dtype: str

    def gradient_allowed(self, slope: torch.Tensor, slope_allowed: torch.Tensor) -> torch.Tensor:
        """The allowed error of the logits' gradient, [B, T, V], from the loss's derivatives by log-probabilities."""
        z, given = self.z.detach(), slope.abs()[..., None]
        p = z.softmax(-1)
        is_target = torch.nn.functional.one_hot(self.target, z.shape[-1])
        exact = given * (is_target - p).abs()
        of_logprob = row("logprob", "dlogits").allowed(
            self.dtype, expected=exact, max_abs_z=float(z.abs().max()), p=p, log_p=0.0, spread=0.0, given=given,
            given_entropy=0.0, given_target=given * is_target,
        )  # fmt: skip
        return of_logprob + 2 * self.logit_allowed * p * given + slope_allowed[..., None] * (is_target - p).abs()


def _in_float64(trainer: GRPOTrainer, model: Any, inputs: dict[str, Any]) -> Exact:
    """Logits and log-probabilities by an LM head in float64, from the operators' hidden states and weights."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with trainer.accelerator.autocast():
        hidden = model.model(input_ids=ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    dtype = torch.bfloat16 if trainer.args.bf16 else torch.float32
    hidden = hidden[:, -inputs["completion_ids"].size(1) - 1 : -1].to(dtype).double()
    weight = model.lm_head.weight.to(dtype).double()
    z = hidden @ weight.T / trainer.temperature
    logprobs = z.log_softmax(-1)

    name, unit = str(dtype).removeprefix("torch."), "ieee" if z.device.type == "cpu" else "sm_90"
    largest = float(z.detach().abs().max())
    terms = float((hidden.detach().abs() @ weight.detach().abs().T).max())
    of_logit = row("linear", "y").allowed(name, unit=unit, terms=hidden.shape[-1], scale=terms, expected=largest)
    return Exact(
        z=z,
        logprob=logprobs.gather(-1, inputs["completion_ids"][..., None])[..., 0],
        entropy=-(logprobs.exp() * logprobs).sum(-1),
        target=inputs["completion_ids"],
        logit_allowed=float(of_logit),
        logprob_allowed=float(row("logprob", "logprob").allowed(max_abs_z=largest) + 2 * of_logit),
        dtype=name,
    )


# ---- rollout against training ---------------------------------------------------------------------------------------


@torch.no_grad()
def ratios(ops: str, trained: Any, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """exp(training - rollout log-probability) of every token of an answer, by a model in bfloat16.

    The rollout decodes all answers in one batch with a KV cache. The training forward reads whole answers, eight at a
    time. The weights are the same, so an objective with an importance ratio assumes a ratio of 1.
    """
    model = Qwen3ForCausalLM(trained.config)  # a new model, because Accelerate has wrapped the forward of `trained`
    model.load_state_dict(trained.state_dict())
    model = model.to(trained.device, torch.bfloat16).eval()
    if ops == "rk":
        rk.patch_model(model)
    prompts = tokenizer([f"{letter}>" for letter in LETTERS for _ in range(GROUP)], return_tensors="pt").input_ids
    out = model.generate(
        prompts.to(model.device), do_sample=True, max_new_tokens=LENGTH, min_new_tokens=LENGTH, output_logits=True,
        return_dict_in_generate=True, top_k=0,
    )  # fmt: skip
    answers = out.sequences[:, prompts.shape[1] :]
    forward = [model(rows, use_cache=False).logits[:, prompts.shape[1] - 1 : -1] for rows in out.sequences.split(8)]

    def score(logits: torch.Tensor) -> torch.Tensor:
        if ops == "rk":
            return rk.logprob(logits.flatten(0, 1), answers.flatten())
        return logits.float().log_softmax(-1).gather(-1, answers[..., None]).flatten()

    return (score(torch.cat(forward)) - score(torch.stack(out.logits, 1))).exp()


# ---- a run ----------------------------------------------------------------------------------------------------------

OPERATORS: dict[str, Callable[[], Any]] = {
    "stock": contextlib.nullcontext,
    "rk": lambda: rk.integrations.trl.enabled(),
}


@dataclass
class Run:
    """The results of a training run."""

    ops: str
    steps: list[dict[str, float]]
    seconds: dict[str, float]
    ratios: dict[int, torch.Tensor]
    judged: list[Judged] = field(default_factory=list)

    @property
    def rewards(self) -> dict[int, float]:
        """Rewards by step. Two steps use one rollout, so every other step has a reward."""
        return {int(s["step"]): s["reward"] for s in self.steps if "reward" in s}


def train(
    ops: str, *, loss_type: str, steps: int, device: str, seed: int, judge: bool = False, measure: bool = False
) -> Run:
    """Runs a whole training. The seed determines the initial weights."""
    clock = Clock(device)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL uses names that transformers has renamed
        tokenizer = make_tokenizer()
        recorder = Recorder(clock, (lambda model: ratios(ops, model, tokenizer)) if measure else None)
        save_model(tokenizer, Path(folder), seed)
        # adam_epsilon: with 1e-8, Adam takes a full step even if a gradient consists only of rounding errors. The two
        # runs would then diverge.
        trainer = (Judge if judge else Watched)(
            model=Qwen3ForCausalLM.from_pretrained(folder),
            reward_funcs=reward,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": [f"{letter}>" for letter in LETTERS]}),
            callbacks=[recorder],
            args=GRPOConfig(
                output_dir=folder, max_steps=steps, seed=seed, use_cpu=device == "cpu", bf16=device == "cuda",
                loss_type=loss_type, epsilon_high=5.0 if loss_type == "cispo" else None, beta=0.01, num_iterations=2,
                per_device_train_batch_size=len(LETTERS) * GROUP, num_generations=GROUP, max_completion_length=LENGTH,
                learning_rate=1e-2, adam_epsilon=1e-4, lr_scheduler_type="constant", gradient_checkpointing=False,
                logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            ),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.clock, trainer.judged = clock, []
        with OPERATORS[ops]():
            trainer.train()
    return Run(ops, recorder.steps, dict(clock.seconds), recorder.ratios, trainer.judged)


# ---- tables and plot ------------------------------------------------------------------------------------------------


def show_runs(runs: list[Run], device: str) -> None:
    rewards = Table(title="reward: share of right letters")
    rewards.add_column("step", justify="right")
    for run in runs:
        rewards.add_column(run.ops, justify="right")
    at = sorted(runs[0].rewards)
    for step in sorted({*at[:: max(1, len(at) // 10)], at[-1]}):
        rewards.add_row(str(step), *(f"{run.rewards[step]:.4f}" for run in runs))
    console.print(rewards)
    times = Table(title=f"milliseconds a step, mean of {len(runs[0].steps)}, on {device_name(device)}")
    times.add_column("part")
    for run in runs:
        times.add_column(run.ops, justify="right")
    for part in PARTS:
        times.add_row(part, *(f"{1e3 * run.seconds[part] / len(run.steps):.2f}" for run in runs))
    console.print(times)


def show_agreement(judged: list[Judged], stock: Run, ours: Run) -> bool:
    """Prints the checks of steps, and how far the two runs are apart. Returns whether all steps are within bounds."""
    table = Table(
        title="loss and gradient of rk against head and loss in float64, batches and weights of the stock run"
    )
    off = ("off by", "allowed")
    for name in ("step", "loss", *off, "|gradient|", *off):
        table.add_column(name, justify="right", no_wrap=True)
    worst = max(judged, key=lambda j: j.share)
    shown = {id(j): j for j in (*judged[:: max(1, len(judged) // 10)], worst, judged[-1])}
    for j in sorted(shown.values(), key=lambda j: j.step):
        table.add_row(
            f"{'worst: ' if j is worst else ''}{j.step}",
            f"{j.loss:.6f}", f"{j.loss_off:.1e}", f"{j.loss_allowed:.1e}",
            f"{j.gradient:.4f}", f"{j.gradient_off:.1e}", f"{j.gradient_allowed:.1e}",
            style=None if j.agrees else "red",
        )  # fmt: skip
    Console(width=max(console.width, JUDGED_WIDTH)).print(table)  # a narrower console would truncate the figures
    agreeing = sum(j.agrees for j in judged)
    console.print(f"within the contract: {agreeing} of {len(judged)} steps")
    same = sum(stock.rewards[step] == ours.rewards[step] for step in stock.rewards)
    apart = {
        name: max(abs(a[name] - b[name]) for a, b in zip(stock.steps, ours.steps, strict=True))
        for name in ("loss", "grad_norm")
    }
    console.print(
        f"the two runs, each on its own: equal rewards in {same} of {len(stock.rewards)} rollouts; losses at most "
        f"{apart['loss']:.1e} apart, gradient norms {apart['grad_norm']:.1e}"
    )
    return agreeing == len(judged)


def show_ratios(runs: list[Run]) -> None:
    """Prints the difference between rollout and training with the same weights, which this library removes."""
    table = Table(title="rollout against training, same weights, bfloat16")
    for name in ("operators", "tokens that differ", "max |ratio - 1|", "KL (k3)"):
        table.add_column(name, justify="right")
    for run in runs:
        ratio = torch.cat([*run.ratios.values()])
        metrics = rk.mismatch_metrics(ratio.log(), torch.zeros_like(ratio))
        off = float((ratio - 1).abs().max())
        table.add_row(run.ops, f"{int((ratio != 1).sum())} of {len(ratio)}", f"{off:.3g}", f"{float(metrics.k3):.3g}")
    console.print(table)


def plot(runs: list[Run], device: str, path: Path) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = 3 if runs[0].ratios else 2
    figure, axes = plt.subplots(1, panels, figsize=(4.7 * panels, 4.2), layout="constrained")
    beside = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "frameon": False}  # below the plot
    for run, style in zip(runs, ("-", "--"), strict=False):
        axes[0].plot(list(run.rewards), list(run.rewards.values()), style, label=run.ops)
    axes[0].set(xlabel="step", ylabel="share of right letters", title="reward", ylim=(0, 1.02))
    axes[0].legend(ncols=2, **beside)
    for i, run in enumerate(runs):
        bottom = 0.0
        for color, part in enumerate(PARTS):
            height = 1e3 * run.seconds[part] / len(run.steps)
            axes[1].bar(run.ops, height, bottom=bottom, color=f"C{color}", label=part if i == 0 else None)
            bottom += height
    axes[1].set(ylabel="ms a step", title=f"time, {device_name(device)}")
    axes[1].legend(ncols=3, fontsize="small", **beside)
    if panels == 3:
        for i, run in enumerate(runs):
            for step, ratio in run.ratios.items():
                at = step + (i - 0.5) * len(run.steps) / MEASURED / 4  # the two runs' points lie beside each other
                label = run.ops if step == min(run.ratios) else None
                axes[2].plot([at] * len(ratio), ratio.cpu(), ".", ms=4, color=f"C{i}", label=label)
        axes[2].set(xlabel="step", title="ratio of training to rollout, every token")
        axes[2].ticklabel_format(useOffset=False)
        axes[2].legend(ncols=2, **beside)
    figure.savefig(path, dpi=120)
    console.print(f"plot: {path}")


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"the CPU, threads: {torch.get_num_threads()}"


# ---- command line ---------------------------------------------------------------------------------------------------


class Ops(str, Enum):
    stock = "stock"
    rk = "rk"


# GRPOConfig's loss types except vespo: its ratio has no gradient, so the ratio cannot weight the KL term.
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")
LossType = Enum("LossType", {name: name for name in LOSS_TYPES})


class Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


def main(
    ops: Annotated[Ops, typer.Option(help="Whose log-probabilities and loss: TRL's or this library's.")] = Ops.rk,
    compare: Annotated[
        bool, typer.Option("--compare", help="Both: their ratios, and steps judged; status 1 if one is off.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 60,
    loss_type: Annotated[LossType, typer.Option(help="GRPOConfig's loss_type.")] = LossType["dapo"],
    device: Annotated[Device, typer.Option(help="cuda trains in bfloat16 by autocast, cpu in float32.")] = Device.cpu,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; a model this small gains nothing from more.")] = 1,
    seed: int = 0,
    plot_path: Annotated[Path, typer.Option("--plot", help="Where the plot goes.")] = Path("grpo.png"),
) -> None:
    """Trains a tiny Qwen3 to repeat a letter, by GRPO."""
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()  # files are written and read in no time
    options: dict[str, Any] = {"loss_type": loss_type.value, "steps": steps, "device": device.value, "seed": seed}
    judged = train("stock", judge=True, **options).judged if compare else []  # apart: judging takes the caches
    runs = [train(each, measure=compare, **options) for each in (OPERATORS if compare else [ops.value])]
    show_runs(runs, device.value)
    agrees = True
    if compare:
        agrees = show_agreement(judged, *runs)
        show_ratios(runs)  # last, because it is the main result
    plot(runs, device.value, plot_path)
    raise typer.Exit(0 if agrees else 1)


if __name__ == "__main__":
    typer.run(main)
