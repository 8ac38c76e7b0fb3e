"""The `rlk` command. Exit status: 0 aligned, 1 drift, 2 bad input, 3 a failure of the program itself."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import _variants
from .errors import BadInput, options_spelled
from .tools import run_tool, version

if TYPE_CHECKING:  # torch and transformers take seconds to import; `rlk --help` does not wait for them
    from .model import LoadedModel
    from .result import Comparison
    from .settings import CompareSettings

EXIT_DRIFT = 1
EXIT_BAD_INPUT = 2
# Python's own status for a traceback is 1, which here means drift.
EXIT_FAILURE = 3
_STARTED = time.monotonic()  # includes the import of torch, which takes seconds

app = typer.Typer(
    name="rlk",
    help="Compare the log-probabilities of rollout and training, and test what this machine can run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

OperatorOption = Annotated[
    list[str] | None, typer.Option(help="Name of an operator; repeat it for more. Default: all.")
]
DeviceOption = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the sampler.")]
ArithmeticOption = Annotated[
    str | None, typer.Option(help="Arithmetic of the CPU: ieee, sm_90, sm_80, gfx942 or gfx90a. A GPU has its own.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
ReportOption = Annotated[Path | None, typer.Option(help="Directory for report.json, report.html and charts.")]


_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}


def _print_version(asked: bool) -> None:
    if asked:
        print(version())
        raise typer.Exit


@app.callback()
def _rlk(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command("doctor", context_settings=_PASSED_ON, add_help_option=False)
def run_doctor(context: typer.Context) -> None:
    """Say which backends this installation runs here and why, and test them."""
    raise typer.Exit(run_tool("doctor", context.args))


@app.command("bench", context_settings=_PASSED_ON, add_help_option=False)
def run_bench(context: typer.Context) -> None:
    """Measure an operator against its peers, side by side in one process."""
    raise typer.Exit(run_tool("bench", context.args))


# Packages that comparisons import.
_COMPARING = ("torch", "transformers", "safetensors", "huggingface_hub", "matplotlib")


@contextmanager
def _statuses(*packages: str) -> Iterator[None]:
    """Turns exceptions into messages and exit statuses. A package that is missing is named before the others are
    imported, which takes seconds."""
    # OpenMP reads the variable once, when torch is imported. If threads spin while they wait, small operators become
    # many times slower when another process uses the cores. How threads wait changes no result.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        for package in packages:
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
        with options_spelled():
            yield
        sys.stdout.flush()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except ModuleNotFoundError as error:
        name = _variants.missing_module(error)
        if (name or "").split(".")[0] == "rl_kernel_native":
            raise
        lacks = f"{name} is not installed" if name else str(error)
        print(f"error: {lacks}; {_variants.how_to_install('demo')}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except (typer.Exit, typer.Abort, KeyboardInterrupt):
        raise
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_FAILURE) from None
    except SystemExit:  # rich exits when the pipe is closed; its status would mean drift here
        raise typer.Exit(EXIT_FAILURE) from None
    except Exception:
        traceback.print_exc()
        raise typer.Exit(EXIT_FAILURE) from None


def parse_batches(text: str) -> tuple[int, ...]:
    """Parses batch sizes: "1,8" gives (1, 8). Raises BadInput."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"--batch {text}: want sizes separated by commas, such as 1,8") from None


def print_table(comparisons: Sequence[Comparison]) -> None:
    """Prints verdicts, a short table and the findings on stdout; as plain text if stdout is not a terminal."""
    from rich.console import Console
    from rich.table import Table

    from .explain import explain

    figures = ("tokens", "differ", "equal logits", "two logprobs", "max |dlogp|", "mean |dlogp|", "KL k3", "clip")
    table = Table("ops", "batch", *figures, "first divergent")
    for comparison in comparisons:
        for run in comparison.runs:
            metrics, first = run.metrics, run.first_divergent
            table.add_row(
                comparison.settings.label,
                str(run.batch_size),
                str(metrics.tokens),
                str(metrics.differing_tokens),
                str(metrics.logits_equal_tokens),
                str(metrics.logprob_differs_on_equal_logits),
                f"{metrics.max_abs_dlogp:.2e}",
                f"{metrics.mean_abs_dlogp:.2e}",
                f"{metrics.kl_k3:.1e}",
                f"{metrics.clip_fraction:.3f}",
                first.name if first else ("none" if not metrics.differing_tokens else "not recorded"),
            )
    for comparison in comparisons:
        print(f"{comparison.settings.label}: {comparison}")
    # A pipe has no width of its own, and names must not be cut in a pipe.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for comparison in comparisons:
        for line in explain(comparison)[1:]:
            console.print(f"[{comparison.settings.label}] {line}", markup=False, soft_wrap=True)


@app.command()
def compare(
    model: Annotated[str, typer.Option(help="Directory or Hub id of a causal LM (Qwen2, Qwen3, Llama, Mistral).")],
    prompts: Annotated[Path | None, typer.Option(help="File of JSON lines with prompt_ids or text.")] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            help="File of JSON lines, in place of --prompts: ids and log-probabilities that an engine recorded."
        ),
    ] = None,
    seed: SeedOption = 0,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype: bfloat16, float16, float32 or float64. Default: the checkpoint's.")
    ] = None,
    device: DeviceOption = "auto",
    batch: Annotated[
        str, typer.Option(help="Most requests in flight; every size of a list such as 1,8 is run and compared.")
    ] = "1,8",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of a response.")] = 64,
    temperature: Annotated[float, typer.Option(help="Temperature of sampling and log-probabilities, > 0.")] = 1.0,
    training_temperature: Annotated[
        float | None, typer.Option(help="Temperature of the training side's log-probabilities. Default: --temperature.")
    ] = None,
    ops: Annotated[
        str,
        typer.Option(
            help="Operators of both sides: stock (torch's, attention sdpa), sdpa, eager, flash (flash-attn), or rk; "
            "both: stock, then rk, beside each other."
        ),
    ] = "stock",
    rollout_ops: Annotated[str | None, typer.Option(help="Operators of the rollout. Default: --ops.")] = None,
    training_ops: Annotated[str | None, typer.Option(help="Operators of the training side. Default: --ops.")] = None,
    packing: Annotated[str, typer.Option(help="Layout of training batches: packed or padded.")] = "packed",
    padding_side: Annotated[
        str, typer.Option(help="Side of the padding in padded training batches: right or left.")
    ] = "right",
    micro_batch_tokens: Annotated[int, typer.Option(help="Most tokens of one training forward.")] = 4096,
    atol: Annotated[float, typer.Option(help="Largest |dlogp| that counts as aligned; 0: equal bytes.")] = 0.0,
    probe_mb: Annotated[int, typer.Option(help="Memory for recorded hidden states, in MiB.")] = 512,
    fault_tolerance: Annotated[
        float | None,
        typer.Option(help="Relative error on equal input above which an operator is at fault. Default: rounding."),
    ] = None,
    training_model: Annotated[
        str | None, typer.Option(help="Another checkpoint for the training side, to find stale or garbled weights.")
    ] = None,
    report: ReportOption = None,
) -> None:
    """Compare the log-probabilities of a rollout with a training forward's.

    Exit status: 0 aligned, 1 drift, 2 bad input, 3 a failure of the program itself.
    """
    with _statuses(*_COMPARING):
        from .compare import run_compare
        from .explain import news
        from .model import load_model, parse_device, parse_dtype
        from .progress import Progress
        from .prompts import load_prompts
        from .report import exit_status, prepare_directory, write_report
        from .settings import CompareSettings

        names = _names_of(ops, rollout_ops or training_ops or recorded)
        settings = CompareSettings(
            seed=seed,
            batch_sizes=parse_batches(batch),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            training_temperature=training_temperature,
            rollout_ops=rollout_ops or names[0],
            training_ops=training_ops or names[0],
            packing=packing,
            padding_side=padding_side,
            atol=atol,
            micro_batch_tokens=micro_batch_tokens,
            probe_mb=probe_mb,
            fault_tolerance=fault_tolerance,
        )
        settings.check()
        if (prompts is None) == (recorded is None):
            raise BadInput("give --prompts FILE to roll out, or --recorded FILE for log-probabilities of an engine")
        torch_dtype, torch_device = parse_dtype(dtype), parse_device(device)
        if recorded is not None:
            status = _compare_recorded(recorded, load_model(model, torch_dtype, torch_device), settings)
            raise typer.Exit(status)
        assert prompts is not None
        if report is not None:
            prepare_directory(report)
        loaded = load_model(model, torch_dtype, torch_device)
        trainer = None
        if training_model:
            trainer = load_model(training_model, torch_dtype, torch_device, "model_b")
        found = load_prompts(prompts, loaded, max_new_tokens)
        each = [settings, *(dataclasses.replace(settings, rollout_ops=x, training_ops=x) for x in names[1:])]
        comparisons = [run_compare(loaded, found, one, training_model=trainer, progress=Progress()) for one in each]
        print(f"model {loaded.name}, {comparisons[0].model['dtype']}, {comparisons[0].model['device']}")
        print_table(comparisons)
        if report is not None:
            print(f"report: {write_report(report, comparisons)[0]}")
        print(news(comparisons))
        status = exit_status(comparisons)
    raise typer.Exit(status)


def _names_of(ops: str, one_alone: object) -> list[str]:
    """The operators of each comparison that --ops asks for. `one_alone` is true if other options allow only one
    comparison."""
    from .settings import OPERATOR_SETS

    if ops in OPERATOR_SETS:
        return [ops]
    if ops != "both":
        raise BadInput(f"--ops {ops}: want one of {', '.join(OPERATOR_SETS)}, both")
    if one_alone:
        raise BadInput(
            "--ops both: want no --rollout-ops, --training-ops or --recorded beside it; each of stock and rk serves "
            "both sides"
        )
    return ["stock", "rk"]


def _compare_recorded(path: Path, loaded: LoadedModel, settings: CompareSettings) -> int:
    from .progress import Progress
    from .recorded import compare_recorded, load_records

    found = compare_recorded(
        loaded,
        load_records(path, loaded.vocab_size),
        temperature=settings.training_temperature or settings.temperature,
        ops=settings.training_ops,
        packing=settings.packing,
        micro_batch_tokens=settings.micro_batch_tokens,
        atol=settings.atol,
        progress=Progress(),
    )
    metrics = found.metrics
    print(f"model {found.model}, {found.dtype}, {found.device}; recorded by an engine: {path}")
    print(found)
    print(
        f"max |ratio - 1| {metrics.max_abs_ratio:.3g}, max |dlogp| {metrics.max_abs_dlogp:.3g}, "
        f"KL (k3) {metrics.kl_k3:.3g}, clip fraction {metrics.clip_fraction:.3g}"
    )
    end = "; fault: larger than rounding" if found.faulty else ""
    if found.better_temperature is not None or found.shift:
        end = "; fault: positions" if found.shift else "; fault: temperature"
    name = settings.training_ops
    print(f"engine against {name}: {metrics.differing_tokens} of {metrics.tokens} tokens differ{end}")
    return 0 if found.aligned else EXIT_DRIFT


@app.command()
def demo(
    report: Annotated[Path, typer.Option(help="Directory for the model, the prompts and the report.")] = Path(
        "rlk-demo"
    ),
    ops: Annotated[str, typer.Option(help="Operators: both, stock or rk.")] = "both",
    minutes: Annotated[
        float, typer.Option(help="Minutes for the whole demo, 0.5 to 60; little time shortens training and responses.")
    ] = 5.0,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
) -> None:
    """Train a small Qwen3-shaped model on the standard library's source text, without downloads, and compare it.

    Exit status: 0 when the demo completes, drift or not; 2 bad input; 3 a failure of the
    program itself.
    """
    with _statuses(*_COMPARING):
        from .demo import run_demo
        from .explain import news
        from .progress import Progress

        result = run_demo(
            report, ops=ops, minutes=minutes, device=device, seed=seed, progress=Progress(), started=_STARTED
        )
        print(result.training)
        print_table(result.comparisons)
        for note in result.notes:
            print(note)
        print(f"report: {result.page}")
        print(f"again:  {result.command}")
        print(news(result.comparisons))


@app.command()
def digest(
    device: DeviceOption = "auto",
    arithmetic: ArithmeticOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score the package's text with its model, and compare the sha256 of the log-probabilities with the recorded
    digest.

    A CPU under `--arithmetic sm_90` computes what a Hopper GPU computes: run this command on both.

    Exit status: 0 the recorded digest, 1 another digest, 2 bad input, 3 a failure of the program itself.
    """
    with _statuses("torch", "transformers", "safetensors"):
        from .digest import compute_digest
        from .model import parse_device

        found = compute_digest(parse_device(device), arithmetic)
        if as_json:
            print(json.dumps({**dataclasses.asdict(found), "agrees": found.agrees}))
        else:
            expected = found.expected or "none recorded"
            print(f"{found.arithmetic} on {found.device}: {found.tokens} tokens, mean {found.mean_logprob:.4f} nats")
            print(f"sha256   {found.sha256}\nrecorded {expected}")
            for layout, same in found.layouts.items():
                print(f"{layout}: {'the same bytes' if same else 'OTHER BYTES'}")
    raise typer.Exit(0 if found.agrees else EXIT_DRIFT)


@app.command("align")
def run_align(
    model: Annotated[Path, typer.Option(help="Directory of a model; its weights may be random.")],
    rollout: Annotated[str, typer.Option(help="Engine of the rollout: vllm.")] = "vllm",
    trainer: Annotated[str, typer.Option(help="Trainers, by commas: hf, fsdp2, fsdp2-one-gpu, megatron.")] = "hf",
    settings: Annotated[
        str, typer.Option(help="Settings, separated by commas: stock, canonical-blas, rk, rk-v1.")
    ] = "stock,rk",
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=4, help="Most tokens of a prompt.")] = 96,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a completion.")] = 64,
    dtype: Annotated[str, typer.Option(help="Dtype: bfloat16, float16 or float32.")] = "bfloat16",
    gpu_memory: Annotated[float, typer.Option(help="Share of a GPU's memory for the engine.")] = 0.5,
    logprobs: Annotated[
        int, typer.Option(min=0, help="Number of most probable tokens to score beside a token's own.")
    ] = 0,
    logprobs_mode: Annotated[
        str, typer.Option(help="raw_logprobs or processed_logprobs, which are equal at temperature 1.")
    ] = "raw_logprobs",
    pages_for: Annotated[
        int, typer.Option(min=0, help="Number of longest sequences that fit; more are preempted. 0: any.")
    ] = 0,
    steps: Annotated[int, typer.Option(min=0, help="Number of GRPO updates with weight sync, in setting rk.")] = 0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    report: Annotated[Path | None, typer.Option(help="Directory for align.json and align.html.")] = None,
) -> None:
    """Compare a real engine's rollout with its own prefill and with a trainer, token by token.

    Exit status: 0 where settings rk and rk-v1 are aligned and every update's ratio is 1; 1 drift, 2 bad input,
    3 a failure of the program itself.
    """
    with _statuses():
        from . import align as runs

        names, trainers = settings.split(","), trainer.split(",")
        if rollout not in runs.ROLLOUTS:
            raise BadInput(f"--rollout {rollout}: expected {', '.join(runs.ROLLOUTS)}")
        if dtype not in ("bfloat16", "float16", "float32"):
            raise BadInput(f"--dtype {dtype}: expected bfloat16, float16 or float32")
        if logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise BadInput(f"--logprobs-mode {logprobs_mode}: expected raw_logprobs or processed_logprobs")
        request = runs.request_of(
            model, num_prompts=prompts, prompt_tokens=prompt_tokens, max_tokens=max_tokens, dtype=dtype, seed=seed,
            gpu_memory=gpu_memory, logprobs=logprobs, pages_for=pages_for, logprobs_mode=logprobs_mode,
        )  # fmt: skip
        runs.require_known(names, trainers)
        runs.require_installed(names, trainers)
        results = runs.align(request, names, trainers)
        updates = runs.updates(request, steps) if steps else []
        if as_json:
            print(json.dumps(runs.as_json(request, results, updates)))
        else:
            served = "\n".join(f"{side}: {operators}" for side, operators in runs.operators(results).items())
            print("\n".join(filter(None, (runs.text(results), served, runs.text_of_updates(updates)))))
        if report is not None:
            runs.write_report(report, request, results, updates)
        aligned = all(r.aligned for r in results if r.is_served) and not any(s.ratio_not_one for s in updates)
    raise typer.Exit(0 if aligned else EXIT_DRIFT)


@app.command("contract")
def print_contract(
    operator: OperatorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what each output's bits do not depend on, and how far each output may differ from float64.

    Exit status: 0 printed, 2 bad input, 3 a failure of the program itself.
    """
    with _statuses():
        from .contract_table import chosen_operators, print_table_of

        print_table_of(chosen_operators(operator or ()), as_json=as_json)


@app.command()
def certify(
    device: DeviceOption = "auto",
    operator: OperatorOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Compute only two shapes of each operator.")] = False,
    arithmetic: ArithmeticOption = None,
    as_json: JsonOption = False,
    out: Annotated[Path | None, typer.Option(help="File for the certificate.")] = None,
    date: Annotated[bool, typer.Option("--date", help="Put the date into the certificate.")] = False,
) -> None:
    """Check that a model's operators, and kl, give a row the same bytes alone, in batches and in other layouts.

    Exit status: 0 invariant, 1 not, 2 bad input, 3 a failure of the program itself.
    """
    with _statuses():
        from .certify import certify as compute
        from .certify import print_certificate, write_certificate

        if out is not None and not out.parent.is_dir():
            raise BadInput(f"--out {out}: there is no directory {out.parent}")
        certificate = compute(device, operator or (), quick, arithmetic=arithmetic)
        print_certificate(certificate, as_json=as_json, date=date)
        if out is not None:
            write_certificate(certificate, out, date=date)
    raise typer.Exit(0 if certificate.invariant else 1)


if __name__ == "__main__":
    app()
