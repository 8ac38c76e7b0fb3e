"""The command ``python -m rl_kernel_native.bench``. It needs torch. If the package rich is installed, rich draws the
table; --plot needs matplotlib."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import _native, _variants, variant
from ..cases import CASES, Bench

BENCHES = {name: of.bench for name, of in CASES.items() if of.bench is not None}


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"want a whole number > 0, got {text}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"want a finite number > 0, got {text}")
    return seconds


def _device(torch: Any, name: str) -> str:
    """Returns the device to measure on. The name auto means the GPU if torch and this build can use one, else the CPU.
    A ValueError says why a named device cannot be used."""
    if name == "auto":
        return "cuda" if _native.architectures("sm_") and torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: want auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not _native.architectures("sm_"):
        raise ValueError(f"--device {name}: this build (variant {variant}) has no CUDA kernels")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices")
    return "cpu" if device.type == "cpu" else name


def _parser_of(operators: Any, name: str, bench: Bench) -> argparse.ArgumentParser:
    """Adds the subcommand of one operator."""
    parser: argparse.ArgumentParser = operators.add_parser(name, help=bench.about)
    unit, (on_cpu, on_gpu) = f"{bench.rows_are}; " if bench.rows_are else "", bench.rows
    parser.add_argument("--rows", type=_count, help=f"{unit}default {on_gpu} on a GPU, {on_cpu} on the CPU")
    for size, (default, words) in bench.sizes.items():
        parser.add_argument(f"--{size.replace('_', '-')}", type=_count, default=default, help=words)
    if bench.compiles:
        words = "leave torch.compile out: compiling takes a while"
        parser.add_argument("--no-compile", action="store_true", help=words)
    else:
        parser.set_defaults(no_compile=True)
    if bench.only_dtype is not None:
        parser.set_defaults(dtype=bench.only_dtype)
    return parser


def make_parser(program: str) -> argparse.ArgumentParser:
    """Returns the parser of the command line, with one subcommand per operator."""
    parser = argparse.ArgumentParser(prog=program, description="An operator against its peers, in one process.")
    operators = parser.add_subparsers(dest="operator", required=True)
    commands = [_parser_of(operators, name, bench) for name, bench in BENCHES.items()]
    model = operators.add_parser(
        "model", help="whole models of transformers, as they are and patched; needs transformers"
    )
    model.add_argument(
        "--family", action="append", metavar="NAME", help="of patch_model, such as Llama; repeatable; default Qwen3"
    )
    model.add_argument("--size", choices=("small", "published"), help="default published on a GPU, small on the CPU")
    model.add_argument("--layers", type=_count, help="default those of the shape")
    model.add_argument("--rows", type=_count, help="sequences of a batch; default 4, small models 2")
    model.add_argument("--tokens", type=_count, help="of a sequence; default 1024, small models 32")
    model.add_argument("--decode-rows", type=_count, help="sequences of a decode step; default 32, small models 2")
    model.add_argument("--ops", type=lambda text: tuple(text.split(",")), help="what is patched; default all")
    for operator in (*commands, model):
        if operator.get_default("dtype") is None:
            operator.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
        operator.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
        operator.add_argument("--threads", type=_count, help="of the CPU, ours and torch's; default torch's own choice")
        operator.add_argument("--seconds", type=_seconds, default=2.0, help="of measuring per peer and pass")
        operator.add_argument("--json", type=Path, metavar="FILE", help="write the measurements")
        if operator is not model:
            operator.add_argument("--plot", type=Path, metavar="FILE", help="write a chart (png, svg, pdf)")
    return parser


def main(arguments: Sequence[str] | None = None, program: str = "python -m rl_kernel_native.bench") -> int:
    """Runs a benchmark with command line arguments, and returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(program)
    options = parser.parse_args(given)
    options.command = shlex.join(["python", "-m", "rl_kernel_native.bench", *given])
    if (
        options.operator != "model" and options.plot and importlib.util.find_spec("matplotlib") is None
    ):  # this error is raised early, before minutes of measuring
        parser.error(f"--plot: matplotlib is not installed; {_variants.how_to_install('bench')}")
    try:
        import torch
    except ImportError:
        parser.error("torch is not installed; it is a peer, and its arrays are what is measured")

    from .comparison import Options
    from .report import print_table, write_json, write_plot

    try:
        device = _device(torch, options.device)
    except ValueError as error:
        parser.error(str(error))
    bench = BENCHES.get(options.operator)
    if bench and bench.only_dtype is None and device != "cpu" and options.dtype not in bench.on_gpu:
        parser.error(f"--dtype {options.dtype}: {options.operator} has {options.dtype} operands on the CPU alone")
    if options.threads:
        torch.set_num_threads(options.threads)
    if bench is None:
        from . import model as bench_model

        for name in set(options.family or ()).difference(bench_model.FAMILIES):
            parser.error(f"--family {name}: want one of {', '.join(bench_model.FAMILIES)}")
        return bench_model.main(options, device)
    asked = Options(
        options.operator,
        options.rows or bench.rows[device != "cpu"],
        {size: getattr(options, size) for size in bench.sizes},
        options.dtype,
        device,
        options.seconds,
        not options.no_compile,
    )
    run = importlib.import_module(f"{__package__}.{bench.module}").measured(asked)
    run["command"] = options.command
    print_table(run)
    if options.json:
        write_json(run, options.json)
    if options.plot:
        write_plot(run, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
