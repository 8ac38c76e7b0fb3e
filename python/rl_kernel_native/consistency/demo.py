"""A complete demonstration on any machine in minutes: train a small model, roll it out, compare, write the report."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .compare import run_compare
from .demo_model import MAX_STEPS, demo_files, demo_tokenizer, encode_bytes, new_model, train
from .errors import BadInput
from .model import load_model, parse_device, quiet_transformers
from .progress import Progress
from .prompts import load_prompts
from .report import prepare_directory, write_report
from .result import Comparison
from .settings import CompareSettings

_PROMPTS = 16
_MAX_NEW_TOKENS = 64
_TRIAL_TOKENS = 4
_BATCHES = (1, 8)
# Training may take this share of the time that remains after the imports, up to a limit in seconds.
_TRAINING_SHARE = 0.25
_TRAINING_SECONDS = 45.0
# The comparison's share of the time after the trial. The rest is for charts, with a reserve for a slower machine.
_COMPARISON_SHARE = 0.7


@dataclass(frozen=True)
class DemoResult:
    """The demo's results: a line about the training, the comparisons, notes on omitted parts, and the paths of the
    files."""

    training: str
    comparisons: list[Comparison]
    notes: list[str]
    page: Path
    command: str


def write_prompts(path: Path, texts: Sequence[str], bos_id: int) -> None:
    """Writes JSON lines with text and ids, so that loading the prompts also checks the tokenizer."""
    lines = [json.dumps({"text": text, "prompt_ids": [bos_id, *text.encode()]}) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def demo_prompts(source: bytes, count: int) -> list[str]:
    """`count` pieces of ASCII text, 16 to 136 bytes long, spread over a file that was not trained on."""
    text = source.decode("ascii", errors="ignore")
    stride = len(text) // count
    return [text[index * stride : index * stride + 16 + 8 * (index * 7 % 16)] for index in range(count)]


def run_demo(
    directory: Path,
    *,
    ops: str,
    minutes: float,
    device: str,
    seed: int,
    progress: Progress | None = None,
    started: float | None = None,
) -> DemoResult:
    """Trains, saves, compares and reports.

    Args:
        directory: receives model/, prompts.jsonl and the report files.
        ops: "stock", "rk" or "both", which compares stock and then rk.
        minutes: the time for the whole demo. If time is short, training ends early, and a trial of a few tokens decides
            how long responses are. Imports, some training, the trial and the charts need at least half a minute on two
            free cores.
        started: time.monotonic() when the program began, imports included; None: now.

    Raises:
        BadInput: a bad option.
    """
    started = time.monotonic() if started is None else started
    progress = progress or Progress(silent=True)

    def left() -> float:
        """Seconds that are left."""
        return 60 * minutes - (time.monotonic() - started)

    if ops not in ("both", "stock", "rk"):
        raise BadInput(f"--ops {ops}: want both, stock or rk")
    if not 0.5 <= minutes <= 60:
        raise BadInput(f"--minutes {minutes}: want 0.5 to 60")
    settings = CompareSettings(seed=seed, batch_sizes=_BATCHES, max_new_tokens=_MAX_NEW_TOKENS)
    settings.check()
    torch_device = parse_device(device)
    names = ["stock", "rk"] if ops == "both" else [ops]
    notes: list[str] = []
    prepare_directory(directory)

    quiet_transformers()
    training_started = time.perf_counter()
    training_files, held_out = demo_files()
    tokenizer = demo_tokenizer()
    model = new_model(seed).to(torch_device)
    with progress.task("training", MAX_STEPS) as advance:
        outcome = train(
            model,
            encode_bytes(training_files),
            seed=seed,
            seconds=min(_TRAINING_SECONDS, max(1.0, left()) * _TRAINING_SHARE),
            advance=advance,
        )
    model_directory, prompt_file = directory / "model", directory / "prompts.jsonl"
    model.to(torch.bfloat16).save_pretrained(model_directory)
    tokenizer.save_pretrained(model_directory)
    write_prompts(prompt_file, demo_prompts(held_out, _PROMPTS), tokenizer.bos_token_id)
    training = (
        f"trained {sum(p.numel() for p in model.parameters()):,} parameters for {outcome.steps} steps, "
        f"{time.perf_counter() - training_started:.0f} s, on {len(training_files)} files of the standard library; "
        f"loss {outcome.first_loss:.2f} -> {outcome.last_loss:.2f} nats a byte"
    )
    # Reads the saved files as `rlk compare` would, so the comparison tests the saved model.
    loaded = load_model(model_directory, torch.bfloat16, torch_device)
    prompts = load_prompts(prompt_file, loaded, _MAX_NEW_TOKENS)

    def compare_all(new_tokens: int) -> list[Comparison]:
        chosen = dataclasses.replace(settings, max_new_tokens=new_tokens)
        each = [dataclasses.replace(chosen, rollout_ops=name, training_ops=name) for name in names]
        return [run_compare(loaded, prompts, one, progress=progress) for one in each]

    trial_started = time.monotonic()
    comparisons = compare_all(_TRIAL_TOKENS)
    new_tokens = _affordable(left(), time.monotonic() - trial_started)
    if new_tokens > _TRIAL_TOKENS:
        comparisons = compare_all(new_tokens)
    page = write_report(directory, comparisons)[0]
    shorter = [] if new_tokens == _MAX_NEW_TOKENS else ["--max-new-tokens", str(new_tokens)]
    if shorter:
        notes.append(
            f"responses of {new_tokens} tokens, not {_MAX_NEW_TOKENS}: as long as {minutes:g} minutes allow here; "
            "--minutes gives more"
        )
    command = [
        *(*_program(), "compare", "--model", str(model_directory), "--prompts", str(prompt_file)),
        *("--seed", str(seed), "--ops", names[-1], *shorter),
    ]
    return DemoResult(training, comparisons, notes, page, shlex.join(command))


def _affordable(seconds_left: float, trial_seconds: float) -> int:
    """The response length that the time allows, if the trial took `trial_seconds` and time is proportional to
    tokens."""
    fitting = int(_TRIAL_TOKENS * _COMPARISON_SHARE * seconds_left / trial_seconds)
    return min(max(fitting, _TRIAL_TOKENS), _MAX_NEW_TOKENS)


def _program() -> list[str]:
    """The name under which `rlk` was run, or `rlk` if another program called this function."""
    return [sys.argv[0] if Path(sys.argv[0]).name == "rlk" else "rlk"]
