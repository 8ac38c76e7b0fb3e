"""The command. Needs torch; the table is drawn by rich and the plot by matplotlib where they are installed."""

from __future__ import annotations

import argparse
import importlib.util
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import _native, _variants, variant


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
    """The device to measure on; auto is the GPU where torch and this build can use it. ValueError says why not."""
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


def make_parser(program: str) -> argparse.ArgumentParser:
    """The command line, an operator a command."""
    parser = argparse.ArgumentParser(prog=program, description="An operator against its peers, in one process.")
    operators = parser.add_subparsers(dest="operator", required=True)
    logprob = operators.add_parser("logprob", help="selected log-probability from logits")
    logprob.add_argument("--rows", type=_count, help="default 8192 on a GPU, 64 on the CPU")
    logprob.add_argument("--vocab", type=_count, default=128256)
    logprob.add_argument("--no-compile", action="store_true", help="leave torch.compile out: compiling takes a while")
    linear = operators.add_parser("linear", help="matrix product with a weight, and its gradients")
    linear.add_argument("--rows", type=_count, help="default 8192 on a GPU, 64 on the CPU")
    linear.add_argument("--in-features", type=_count, default=4096)
    linear.add_argument("--out-features", type=_count, default=4096)
    linear_logprob = operators.add_parser("linear_logprob", help="selected log-probability from hidden states")
    linear_logprob.add_argument("--rows", type=_count, help="default 8192 on a GPU, 64 on the CPU")
    linear_logprob.add_argument("--in-features", type=_count, default=4096)
    linear_logprob.add_argument("--vocab", type=_count, default=128256)
    linear_logprob.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    rms_norm = operators.add_parser("rms_norm", help="root-mean-square norm, with a residual and without")
    rms_norm.add_argument("--rows", type=_count, help="default 8192 on a GPU, 64 on the CPU")
    rms_norm.add_argument("--columns", type=_count, default=4096)
    rms_norm.add_argument("--no-compile", action="store_true", help="leave torch.compile out: compiling takes a while")
    embedding = operators.add_parser("embedding", help="rows of a table by token ids, and the table's gradient")
    embedding.add_argument("--rows", type=_count, help="tokens; default 8192 on a GPU, 64 on the CPU")
    embedding.add_argument("--vocab", type=_count, default=128256)
    embedding.add_argument("--columns", type=_count, default=4096)
    embedding.add_argument("--no-compile", action="store_true", help="leave torch.compile out: compiling takes a while")
    attention = operators.add_parser("attention", help="a causal sequence with grouped heads")
    attention.add_argument("--rows", type=_count, help="tokens; default 8192 on a GPU, 64 on the CPU")
    attention.add_argument("--q-heads", type=_count, default=32)
    attention.add_argument("--kv-heads", type=_count, default=8)
    attention.add_argument("--head-dim", type=_count, default=128)
    policy_loss = operators.add_parser("policy_loss", help="clipped policy objective with a KL term, and its gradient")
    policy_loss.add_argument("--rows", type=_count, help="sequences; default 256 on a GPU, 16 on the CPU")
    policy_loss.add_argument("--tokens", type=_count, default=2048, help="of a sequence")
    policy_loss.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out: compiling takes a while"
    )
    token_terms = []
    for name, text in (
        ("kl", "estimators of a KL divergence, a value a token"),
        ("value_loss", "clipped value loss, and its gradient"),
        ("importance_weights", "weights of a batch's tokens for the engine that sampled it"),
        ("mismatch_metrics", "how far a trainer and the engine that sampled are apart"),
        ("covariance_mask", "the tokens that clip-cov singles out"),
        ("entropy_mask", "the tokens of the highest entropy, by a quantile"),
    ):
        token_terms.append(operators.add_parser(name, help=text))
        token_terms[-1].add_argument("--rows", type=_count, help="sequences; default 256 on a GPU, 16 on the CPU")
        token_terms[-1].add_argument("--tokens", type=_count, default=2048, help="of a sequence")
        token_terms[-1].add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    rope = operators.add_parser("rope", help="rotary position embedding of queries and keys")
    rope.add_argument("--rows", type=_count, help="tokens; default 8192 on a GPU, 64 on the CPU")
    rope.add_argument("--q-heads", type=_count, default=32)
    rope.add_argument("--kv-heads", type=_count, default=8)
    rope.add_argument("--head-dim", type=_count, default=128)
    rope.add_argument("--no-compile", action="store_true", help="leave torch.compile out: compiling takes a while")
    advantages = []
    for name, text in (
        ("gae", "generalised advantage estimation"),
        ("group_advantage", "advantages of sequences in their groups"),
        ("optimal_token_baseline", "advantages against a baseline of each position of a group"),
        ("masked_whiten", "whitening of a batch's tokens"),
        ("scatter_rewards", "rewards of sequences and a KL as rewards of tokens"),
    ):
        advantage = operators.add_parser(name, help=text)
        advantage.add_argument("--rows", type=_count, help="sequences; default 4096 on a GPU, 64 on the CPU")
        advantage.add_argument("--tokens", type=_count, default=1 if name == "group_advantage" else 8192)
        advantage.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
        advantages.append(advantage)
    silu_mul = operators.add_parser("silu_mul", help="gated activations, of one array and of two")
    silu_mul.add_argument("--rows", type=_count, help="default 8192 on a GPU, 64 on the CPU")
    silu_mul.add_argument(
        "--columns", type=_count, default=12288, help="of the result; a packed input has twice as many"
    )
    silu_mul.add_argument("--no-compile", action="store_true", help="leave torch.compile out: compiling takes a while")
    sequences = []
    for name, text in (
        ("kv_cache_append", "keys and values into a paged cache; rows are tokens, columns those of k"),
        ("pack", "padded arrays to packed ones and back"),
        ("preference_loss", "losses of preference pairs; rows are pairs"),
        ("sequence_logprob", "log-probabilities summed over sequences"),
        ("shift_labels_packed", "labels of packed sequences"),
    ):
        sequences.append(operators.add_parser(name, help=text))
        sequences[-1].add_argument("--rows", type=_count, help="sequences; default 8192 on a GPU, 64 on the CPU")
        sequences[-1].add_argument("--columns", type=_count, default=2048, help="tokens of a sequence")
        sequences[-1].add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    sample = operators.add_parser("sample", help="tokens of rows of 128256 logits")
    sample.add_argument("--rows", type=_count, help="default 256 on a GPU, 8 on the CPU")
    linear_sample = operators.add_parser("linear_sample", help="tokens of hidden states, vocabulary 128256")
    linear_sample.add_argument("--rows", type=_count, help="default 64 on a GPU, 8 on the CPU")
    linear_sample.add_argument("--in-features", type=_count, default=4096)
    random_bits = operators.add_parser("random_bits", help="random words of tokens")
    random_bits.add_argument("--rows", type=_count, help="default 8192 on a GPU, 64 on the CPU")
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
    for operator in (
        logprob,
        linear,
        linear_logprob,
        rms_norm,
        embedding,
        attention,
        policy_loss,
        rope,
        silu_mul,
        random_bits,
        sample,
        linear_sample,
        model,
        *sequences,
        *advantages,
        *token_terms,
    ):
        if operator in (*advantages, *token_terms):
            operator.set_defaults(dtype="float32")
        else:
            operator.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
        operator.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
        operator.add_argument("--threads", type=_count, help="of the CPU, ours and torch's; default torch's own choice")
        operator.add_argument("--seconds", type=_seconds, default=2.0, help="of measuring per peer and pass")
        operator.add_argument("--json", type=Path, metavar="FILE", help="write the measurements")
        if operator is not model:
            operator.add_argument("--plot", type=Path, metavar="FILE", help="write a chart (png, svg, pdf)")
    return parser


def main(arguments: Sequence[str] | None = None, program: str = "python -m rl_kernel_native.bench") -> int:
    """Runs a benchmark with command line arguments; its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(program)
    options = parser.parse_args(given)
    options.command = shlex.join(["python", "-m", "rl_kernel_native.bench", *given])
    if (
        options.operator != "model" and options.plot and importlib.util.find_spec("matplotlib") is None
    ):  # before minutes of measuring
        parser.error(f"--plot: matplotlib is not installed; {_variants.how_to_install('bench')}")
    try:
        import torch
    except ImportError:
        parser.error("torch is not installed; it is a peer, and its arrays are what is measured")

    from . import advantage as bench_advantage
    from . import attention as bench_attention
    from . import embedding as bench_embedding
    from . import linear as bench_linear
    from . import linear_logprob as bench_linear_logprob
    from . import logprob as bench_logprob
    from . import policy_loss as bench_policy_loss
    from . import rms_norm as bench_rms_norm
    from . import rollout as bench_rollout
    from . import rope as bench_rope
    from . import sampling as bench_sampling
    from . import sequences as bench_sequences
    from . import silu_mul as bench_silu_mul
    from . import token_terms as bench_token_terms
    from .report import print_table, write_json, write_plot

    try:
        device = _device(torch, options.device)
    except ValueError as error:
        parser.error(str(error))
    products = ("linear", "linear_logprob", "linear_sample")
    if options.operator in products and device != "cpu" and options.dtype == "float32":
        parser.error(f"--dtype float32: {options.operator} has float32 operands on the CPU alone")
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.operator == "model":
        from . import model as bench_model

        for name in set(options.family or ()).difference(bench_model.FAMILIES):
            parser.error(f"--family {name}: want one of {', '.join(bench_model.FAMILIES)}")
        return bench_model.main(options, device)
    rows = options.rows or (64 if device == "cpu" else 8192)
    if options.operator == "linear":
        shape = (rows, options.in_features, options.out_features)
        run = bench_linear.run(shape, options.dtype, device, seconds=options.seconds)
    elif options.operator == "linear_logprob":
        run = bench_linear_logprob.run(
            rows, options.in_features, options.vocab, options.dtype, device, seconds=options.seconds,
            use_compile=not options.no_compile,
        )  # fmt: skip
    elif options.operator in ("rms_norm", "silu_mul"):
        bench = bench_rms_norm if options.operator == "rms_norm" else bench_silu_mul
        run = bench.run(
            rows, options.columns, options.dtype, device, seconds=options.seconds, use_compile=not options.no_compile
        )
    elif options.operator == "embedding":
        run = bench_embedding.run(
            rows, options.vocab, options.columns, options.dtype, device, seconds=options.seconds,
            use_compile=not options.no_compile,
        )  # fmt: skip
    elif options.operator in bench_advantage.OPERATORS:
        run = bench_advantage.run(
            options.operator, options.rows or (64 if device == "cpu" else 4096), options.tokens, device,
            seconds=options.seconds, use_compile=not options.no_compile,
        )  # fmt: skip
    elif options.operator == "attention":
        heads = (options.q_heads, options.kv_heads)
        run = bench_attention.run(rows, heads, options.head_dim, options.dtype, device, seconds=options.seconds)
    elif options.operator in bench_sequences.OPERATORS:
        run = bench_sequences.run(
            options.operator, rows, options.columns, options.dtype, device, seconds=options.seconds,
            use_compile=not options.no_compile,
        )  # fmt: skip
    elif options.operator == "policy_loss":
        run = bench_policy_loss.run(
            options.rows or (16 if device == "cpu" else 256), options.tokens, device, seconds=options.seconds,
            use_compile=not options.no_compile,
        )  # fmt: skip
    elif options.operator in (*bench_token_terms.OPERATORS, *bench_rollout.OPERATORS):
        of_tokens = bench_rollout if options.operator in bench_rollout.OPERATORS else bench_token_terms
        run = of_tokens.run(
            options.operator, options.rows or (16 if device == "cpu" else 256), options.tokens, device,
            seconds=options.seconds, use_compile=not options.no_compile,
        )  # fmt: skip
    elif options.operator in bench_sampling.OPERATORS:
        on_cpu, on_gpu = {"sample": (8, 256), "linear_sample": (8, 64), "random_bits": (64, 8192)}[options.operator]
        run = bench_sampling.run(
            options.operator, options.rows or (on_cpu if device == "cpu" else on_gpu), device, dtype_name=options.dtype,
            seconds=options.seconds, in_features=getattr(options, "in_features", 0),
        )  # fmt: skip
    elif options.operator == "rope":
        heads = (options.q_heads, options.kv_heads)
        run = bench_rope.run(
            rows, heads, options.head_dim, options.dtype, device, seconds=options.seconds,
            use_compile=not options.no_compile,
        )  # fmt: skip
    else:
        run = bench_logprob.run(
            rows, options.vocab, options.dtype, device, seconds=options.seconds, use_compile=not options.no_compile
        )
    run["command"] = options.command
    print_table(run)
    if options.json:
        write_json(run, options.json)
    if options.plot:
        write_plot(run, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
