"""`rlk align`: compares a real engine's rollout with its own prefill and with a trainer, one setting after another.
Every setting runs in its own processes, because the environment variables of a setting take effect only when a process
starts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import _check, _variants
from ..integrations.vllm import versions as vllm_versions
from .errors import BadInput

# The environment variables that a setting changes for its processes.
SETTINGS: dict[str, dict[str, str]] = {
    "stock": {"RLK_VLLM": "0"},
    "canonical-blas": {"RLK_VLLM": "0", "CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"},
    "rk": {"RLK_VLLM": "check"},
    "rk-v1": {"RLK_VLLM": "check", "VLLM_USE_V2_MODEL_RUNNER": "0"},  # vLLM's first runner, on GPUs too
}
ROLLOUTS = ("vllm",)
TRAINERS = ("hf", "fsdp2", "fsdp2-one-gpu", "megatron")
RATES = 4  # timed rollouts of rates()
SHARDS = 2  # processes of a sharded trainer


@dataclass(frozen=True)
class Request:
    """The options of a run. ``model`` is a directory; prompts are drawn by ``seed`` from the model's vocabulary.

    Attributes:
        logprobs: number of most probable tokens per position whose log-probabilities are returned, in addition to the
            drawn token's.
        pages_for: how many of the longest sequences fit into the engine's cache at once. If more sequences run, the
            engine must preempt some. 0: ``gpu_memory`` decides the cache's size on a GPU; on a CPU 0 means 2.
        cache_gib: GiB of the engine's cache on a GPU. 0: vLLM measures its memory use and gives the cache the rest of
            ``gpu_memory``.
        logprobs_mode: the engine's option: ``"raw_logprobs"`` or ``"processed_logprobs"``, which are equal at
            temperature 1.
        default_batch: whether the engine keeps vLLM's own limits of tokens and sequences per step on a GPU. Otherwise a
            step takes about as many tokens as the longest sequence has, which forces chunked prefill.
        dummy_weights: whether the engine draws small random weights. The directory then needs only config.json, and no
            trainer can score the rollout.
    """

    model: str
    vocab_size: int
    num_prompts: int = 32
    prompt_tokens: int = 96
    max_tokens: int = 64
    seed: int = 0
    dtype: str = "bfloat16"
    gpu_memory: float = 0.5
    logprobs: int = 0
    pages_for: int = 0
    cache_gib: float = 0.0
    logprobs_mode: str = "raw_logprobs"
    default_batch: bool = False
    dummy_weights: bool = False


@dataclass(frozen=True)
class Difference:
    """Differences between two sets of log-probabilities of the same tokens."""

    tokens: int
    differing: int
    max_abs_dlogp: float
    mean_abs_dlogp: float
    kl_k3: float


@dataclass(frozen=True)
class Result:
    """The result of one setting with one trainer.

    Attributes:
        runner: vLLM's model runner, V1 or V2.
        ranks: number of tokens whose rank (place in the descending order of logits) differs in the trainer's logits.
        best: counts of most probable tokens: all (``tokens``), those whose log-probability differs in the trainer
            (``differing``), and those whose rank differs (``ranks``).
        tokens_per_second: rate of the rollout; on a GPU the median of ``rates``, which follow a rollout that is not
            timed.
        rates: tokens per second of every timed rollout.
        features: the engine's settings: asynchronous scheduling, chunked prefill, tokens and sequences per step, prefix
            caching, CUDA graphs; and the fewest and the most requests in a step of the rollout.
        redrawn: number of tokens that come out differently when drawn again: by rk.sample from the trainer's logits and
            the request's seed, or by the engine in another batch. None if vLLM's own sampler drew the tokens.
        preemptions: number of sequences that the engine preempted and computed again.
        launches, kernels: host launches (kernels and CUDA graphs) and kernels on the device per engine step, the mean
            over eight requests of 16 tokens; None on a CPU.
        prefix_cache_hits: number of rollout tokens whose keys and values were already in the cache.
        served: the records of rk.trace for the engine (``"rollout"``) and the trainer: contract, and calls by operator,
            backend and kernel plan.
            On a GPU, also this library's kernels by name: the engine's in the steps that ``launches`` counts, the
            trainer's in its first forward.
        same_contract: whether engine and trainer used the same contract; None: neither of them used this library.
        first_divergent: the first operator whose result differs between the eagerly run engine and the transformers
            model: operator, layer, module, differing tokens, and the largest difference. None if no token differs, or
            if the trainer is not hf.
    """

    setting: str
    trained_by: str
    prefill: Difference
    trainer: Difference
    tokens_per_second: float
    device: str
    runner: str
    ranks: int
    best: dict[str, int]
    redrawn: int | None
    preemptions: int
    launches: float | None
    kernels: float | None
    prefix_cache_hits: int
    served: dict[str, Any]
    same_contract: bool | None
    first_divergent: dict[str, Any] | None = None
    rates: tuple[float, ...] = ()
    features: dict[str, Any] = field(default_factory=dict)

    @property
    def is_served(self) -> bool:
        """Whether the setting uses this library's operators."""
        return serves(self.setting)

    @property
    def aligned(self) -> bool:
        of_tokens = (self.prefill.differing, self.trainer.differing, self.ranks, self.redrawn)
        of_best = (self.best["differing"], self.best["ranks"])
        return (of_tokens, of_best) == ((0, 0, 0, 0), (0, 0)) and self.same_contract is True


def serves(setting: str) -> bool:
    return SETTINGS[setting]["RLK_VLLM"] == "check"


def difference(sequences: Sequence[dict[str, Any]], other: str) -> Difference:
    """Compares the rollout's log-probabilities with the log-probabilities named ``other``. A NaN counts as
    different."""
    pairs = [p for s in sequences for p in zip(s["rollout"], s[other], strict=True)]
    apart = [b - a for a, b in pairs]
    size = [abs(d) if not math.isnan(d) else math.inf for d in apart]
    return Difference(
        tokens=len(pairs),
        differing=sum(a != b for a, b in pairs),
        max_abs_dlogp=max(size),
        mean_abs_dlogp=sum(size) / len(size),
        kl_k3=sum(map(_k3, apart)) / len(apart),
    )


def _k3(d: float) -> float:
    """exp(d) - 1 - d; Inf where Python's exponential would raise."""
    return math.inf if d > 700 else math.expm1(d) - d


def _apart(these: list[int], those: list[int]) -> int:
    return sum(a != b for a, b in zip(these, those, strict=True))


def _best(sequences: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Compares the rollout's most probable tokens with the trainer: log-probability, and rank among the logits."""
    pairs = [pair for s in sequences for pair in zip(s["best"], s["trainer_best"], strict=True)]
    return {
        "tokens": len(pairs),
        "differing": sum(logprob != trainer for (*_, logprob), (trainer, _, _) in pairs),
        "ranks": sum(not first <= rank <= last for (_, _, rank, _), (_, first, last) in pairs),
    }


def _outside(ranks: list[int], first: list[int], last: list[int]) -> int:
    return sum(not low <= rank <= high for rank, low, high in zip(ranks, first, last, strict=True))


def result_of(setting: str, answer: dict[str, Any], trained_by: str = "hf") -> Result:
    served = {side: answer[f"{side}_trace"] for side in ("rollout", "trainer")}
    contracts = {trace["contract"] if trace["calls"] else None for trace in served.values()}
    return Result(
        setting=setting,
        trained_by=trained_by,
        prefill=difference(answer["sequences"], "prefill"),
        trainer=difference(answer["sequences"], "trainer"),
        tokens_per_second=answer["tokens_per_second"],
        device=answer["device"],
        runner=answer["runner"],
        ranks=sum(_outside(s["ranks"], s["first_rank"], s["last_rank"]) for s in answer["sequences"]),
        best=_best(answer["sequences"]),
        redrawn=None
        if answer["replayed"] is None
        else answer["replayed"] + sum(_apart(s["tokens"], s["redrawn"]) for s in answer["sequences"]),
        preemptions=answer["preemptions"],
        launches=answer["launches"],
        kernels=answer["kernels"],
        prefix_cache_hits=answer["prefix_cache_hits"],
        served=served,
        same_contract=None if contracts == {None} else len(contracts) == 1,
        rates=tuple(answer["rates"]),
        features=answer["features"],
    )


def request_of(model: Path, **options: Any) -> Request:
    """The request for a model's directory. Raises BadInput for a path that is not such a directory."""
    file = model / "config.json"
    if not file.is_file():
        raise BadInput(f"--model {model}: expected a directory with config.json, got none")
    vocab_size = json.loads(file.read_text()).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise BadInput(f"--model {model}: expected a vocab_size in config.json, got {_check.shown(vocab_size)}")
    return Request(str(model.resolve()), vocab_size, **options)


def require_known(settings: Sequence[str], trainers: Sequence[str]) -> None:
    """Raises BadInput for an unknown setting or trainer."""
    for name in settings:
        if name not in SETTINGS:
            raise BadInput(f"--settings {name}: expected {', '.join(SETTINGS)}")
    for name in trainers:
        if name not in TRAINERS:
            raise BadInput(f"--trainer {name}: expected {', '.join(TRAINERS)}")


def require_installed(settings: Sequence[str], trainers: Sequence[str]) -> None:
    """Raises BadInput if a package that the processes of a run need is not installed."""
    cures = {
        "vllm": vllm_versions.INSTALL,
        **dict.fromkeys(("torch", "transformers"), _variants.how_to_install("compare")),
    }
    if "megatron" in trainers:
        cures["megatron"] = "pip install megatron-core (docs/models.md)"
    for module, cure in cures.items():
        if importlib.util.find_spec(module) is None:
            raise BadInput(f"rlk align needs {module}, which is not installed; {cure}")
    try:
        found = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # vLLM is a source tree: its importer checks the version
        return
    if any(map(serves, settings)) and found.partition("+")[0] not in vllm_versions.VERSIONS:
        expected = " or ".join(vllm_versions.VERSIONS)
        raise BadInput(f"rlk align needs vllm {expected} for settings rk and rk-v1, got {found}; {cures['vllm']}")


def align(
    request: Request,
    settings: Sequence[str],
    trainers: Sequence[str] = ("hf",),
    *,
    workers: int = 1,
    found: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Runs the settings, ``workers`` at a time; tokens per second are meaningful only with one worker. All trainers
    score the same rollout. ``found`` gets each result as soon as it is known, and again when its first divergent
    operator is known.

    Raises: BadInput for an unknown setting or trainer; RuntimeError if a process fails.
    """
    require_known(settings, trainers)
    with ThreadPoolExecutor(workers) as pool:
        every = pool.map(lambda name: _results(request, name, trainers, found), settings)
        return [result for of_setting in every for result in of_setting]


def _results(request: Request, setting: str, trainers: Sequence[str], found: Callable[[Result], None]) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "request.json"
        file.write_text(json.dumps({**asdict(request), "setting": setting, "served": serves(setting)}))
        _run("align_rollout", file, setting)
        rollout, results = json.loads(file.read_text()), []
        for name in trainers:
            file.write_text(json.dumps({**rollout, "trained_by": name}))
            _run("align_trainer", file, setting, SHARDS if name.startswith("fsdp2") else 1)
            result = result_of(setting, json.loads(file.read_text()), name)
            found(result)
            if name == "hf" and result.trainer.differing:
                _run("align_layers", file, setting)
                result = replace(result, first_divergent=json.loads(file.read_text())["first_divergent"])
                found(result)
            results.append(result)
        return results


def rates(request: Request, setting: str) -> dict[str, Any]:
    """Measures rollouts on a GPU, without a comparison: tokens per second, launches and kernels per step, and calls and
    seconds of each kernel in one rollout. With ``default_batch``, rates are measured for the engine's own limit of
    tokens per step and for chunked prefill."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "request.json"
        file.write_text(json.dumps({**asdict(request), "setting": setting, "rates_only": RATES}))
        _run("align_rollout", file, setting, shown=True)
        answer = json.loads(file.read_text())
        return {"setting": setting, **{name: answer[name] for name in ("features", "tokens", "limits")}}


@dataclass(frozen=True)
class Step:
    """One GRPO update with weight sync.

    Attributes:
        ratio_not_one: number of tokens whose ratio of new to old policy, before the update, is not exactly 1.
        moved: number of tokens in the first completion whose log-probability the update changes.
    """

    tokens: int
    ratio_not_one: int
    max_abs_dlogp: float
    reward: float
    moved: int


def updates(request: Request, steps: int) -> list[Step]:
    """Runs GRPO updates in setting rk; the engine continues with the weights of each update.

    Raises: RuntimeError if the process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "request.json"
        file.write_text(json.dumps({**asdict(request), "steps": steps}))
        _run("align_steps", file, "rk")
        return [Step(**step) for step in json.loads(file.read_text())["updates"]]


def _run(part: str, file: Path, setting: str, processes: int = 1, *, shown: bool = False) -> None:
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", **SETTINGS[setting],
    }  # fmt: skip
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] * (processes > 1)
    command = [sys.executable, *several, "-m", f"rl_kernel_native.consistency.{part}", str(file)]
    done = subprocess.run(command, env=environment, capture_output=not shown, text=True)
    if done.returncode != 0:
        said = "see above" if shown else (done.stdout + done.stderr)[-6000:]
        raise RuntimeError(f"{setting}: {part} failed:\n{said}")


# ---- the report in words --------------------------------------------------------------------------------------------

HEAD = (
    "setting", "runner", "trainer", "tokens", "against prefill: differing", "max |dlogp|", "mean |dlogp|",
    "against trainer: differing", "max |dlogp|", "mean |dlogp|", "KL k3", "other rank",
    "most probable: differing", "other rank", "drawn otherwise", "tok/s", "launches/step", "kernels/step",
    "preemptions", "cached tokens", "same contract", "first divergent",
)  # fmt: skip


def rows(results: Sequence[Result]) -> list[list[Any]]:
    said = {True: "yes", False: "NO", None: "-"}
    return [
        [
            r.setting, r.runner, r.trained_by, r.trainer.tokens,
            r.prefill.differing, r.prefill.max_abs_dlogp, r.prefill.mean_abs_dlogp,
            r.trainer.differing, r.trainer.max_abs_dlogp, r.trainer.mean_abs_dlogp, r.trainer.kl_k3,
            r.ranks, r.best["differing"], r.best["ranks"],
            *("-" if x is None else x for x in (r.redrawn, r.tokens_per_second, r.launches, r.kernels)),
            r.preemptions, r.prefix_cache_hits, said[r.same_contract], place_of(r.first_divergent),
        ]
        for r in results
    ]  # fmt: skip


def place_of(divergent: dict[str, Any] | None) -> str:
    if divergent is None:
        return "-"
    return (
        divergent["operator"] if divergent["layer"] is None else f"layer {divergent['layer']}, {divergent['operator']}"
    )


def text(results: Sequence[Result]) -> str:
    cells = [[f"{c:.4g}" if isinstance(c, float) else str(c) for c in row] for row in [list(HEAD), *rows(results)]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEAD))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)


def text_of_updates(steps: Sequence[Step]) -> str:
    return "\n".join(
        f"update {i}: ratio other than 1 at {s.ratio_not_one} of {s.tokens} tokens, max |dlogp| {s.max_abs_dlogp:.4g}, "
        f"reward {s.reward:.4g}, {s.moved} log-probabilities moved"
        for i, s in enumerate(steps)
    )


def as_json(request: Request, results: Sequence[Result], steps: Sequence[Step] = ()) -> dict[str, Any]:
    return {
        "request": asdict(request),
        "results": [{**asdict(r), "aligned": r.aligned} for r in results],
        "updates": [asdict(s) for s in steps],
    }


def operators(results: Sequence[Result]) -> dict[str, str]:
    """The calls of engine and trainer by operator, backend and plan, such as ``linear 8 (cuda sm_90: 128x256 6, few
    rows 64x8 2)``."""
    return {
        f"{r.setting}, {r.trained_by}: {side} was served by": ", ".join(
            f"{operator} {sum(plans.values())} ({backend}: {', '.join(f'{plan} {n}' for plan, n in plans.items())})"
            for operator, backends in trace["plans"].items()
            for backend, plans in backends.items()
        )
        or "its own operators"
        for r in results
        for side, trace in r.served.items()
    }


def write_report(directory: Path, request: Request, results: Sequence[Result], steps: Sequence[Step] = ()) -> None:
    """Writes align.json and align.html."""
    from .page import table_page

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "align.json").write_text(json.dumps(as_json(request, results, steps), indent=1) + "\n")
    title = f"vLLM's rollout against its prefill and a trainer: {request.model}"
    kernels = {
        f"{r.setting}, {r.trained_by}: kernels of the {side}": ", ".join(f"{name} {n}" for name, n in found.items())
        for r in results
        for side, trace in r.served.items()
        if (found := trace.get("kernels"))
    }
    engines = {f"{r.setting}: engine": ", ".join(f"{k} {v}" for k, v in r.features.items()) for r in results}
    facts = asdict(request) | engines | operators(results) | kernels
    (directory / "align.html").write_text(table_page(title, HEAD, rows(results), facts))
