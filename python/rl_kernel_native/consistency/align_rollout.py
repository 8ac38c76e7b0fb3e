"""The rollout of `rlk align`, which runs as its own process:
`python -m rl_kernel_native.consistency.align_rollout FILE`.

FILE holds the request, a JSON object, and gets the answer: every sequence, its rollout's log-probabilities, and the
log-probabilities that the engine's own prefill gives the same tokens.
"""

from __future__ import annotations

import contextlib
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from . import align_turns as turns

MAX_BATCHED_TOKENS = 64  # on a CPU; longer prompts are prefilled in chunks
PAGE = 16
TIMED = 3  # timed rollouts on a GPU, after an untimed rollout
LAUNCH = re.compile(r"cu(da)?(Launch(Cooperative)?Kernel|GraphLaunch)")  # names in the runtime and driver APIs
KERNEL = re.compile(r"\brlk::(?:\w+::)*(?:\(anonymous namespace\)::)?(\w+)")


def prompts_of(request: dict[str, Any]) -> list[list[int]]:
    """Token ids of the prompts. Every second prompt begins like the first prompt, so that the prefix cache is used."""
    draw = random.Random(request["seed"])
    vocabulary = request["vocab_size"]

    def ids(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    shared = ids(request["prompt_tokens"] // 2)
    found = []
    for i in range(request["num_prompts"]):
        length = draw.randrange(2, request["prompt_tokens"])
        found.append(shared + ids(max(1, length - len(shared))) if i % 2 == 0 else ids(length))
    return found


def chunk_of(request: dict[str, Any]) -> int:
    """The limit of tokens per step on a GPU. The limit is so low that few prompts fit into a step with other requests,
    so the engine splits prompts into chunks."""
    return max(512, request["prompt_tokens"] + request["max_tokens"] + 8)


def make_engine(request: dict[str, Any], on_gpu: bool, **more: Any) -> Any:
    from vllm import LLM

    length = request["prompt_tokens"] + request["max_tokens"] + 8
    options: dict[str, Any] = {
        "model": request["model"],
        "dtype": request["dtype"],
        "skip_tokenizer_init": True,
        "max_model_len": length,
        "enable_prefix_caching": True,
        "seed": request["seed"],
        "logprobs_mode": request["logprobs_mode"],
        "disable_log_stats": False,  # needed to count preemptions and hits of the prefix cache
    }
    if on_gpu:
        options["gpu_memory_utilization"] = request["gpu_memory"]
        if not request["default_batch"]:
            options["max_num_batched_tokens"] = chunk_of(request)
        if request["cache_gib"]:
            options |= {"kv_cache_memory_bytes": int(request["cache_gib"] * (1 << 30))}
    else:
        options |= {"max_num_batched_tokens": MAX_BATCHED_TOKENS, "max_num_seqs": 8, "enforce_eager": True}
    if request["dummy_weights"]:
        options["load_format"] = "dummy"
    if pages_for := request["pages_for"] or (0 if on_gpu else 2):
        # If no page is free for a sequence, the engine preempts sequences and computes them again.
        options |= {"block_size": PAGE, "num_gpu_blocks_override": pages_for * -(-length // PAGE) + 1}
    return LLM(**options | more)


def most_probable(scored: Iterable[dict[int, Any]], count: int) -> list[tuple[int, int, int, float]]:
    """Position, id, rank (1: most probable) and log-probability of the ``count`` most probable tokens at each
    position, as the engine reports them."""
    return [
        (position, token, x.rank, x.logprob)
        for position, of in enumerate(scored)
        for token, x in of.items()
        if x.rank <= count
    ]


def launched(events: Iterable[Any]) -> tuple[int, int]:
    """From a profile's events: the number of host launches (kernels and CUDA graphs), and of kernels on the device."""
    host = device = 0
    for event in events:
        if "CUDA" in str(event.device_type):
            device += not event.name.startswith(("Memcpy", "Memset"))
        else:
            host += LAUNCH.match(event.name) is not None
    return host, device


def on_device(events: Iterable[Any]) -> Iterator[tuple[str, bool, float]]:
    """Yields for each event on the device: its name without template arguments, whether it is a kernel of this library,
    and its seconds."""
    for event in events:
        if "CUDA" in str(event.device_type):
            ours = KERNEL.search(event.name)
            name = ours[1] if ours else re.split(r"[<(]", event.name.removeprefix("void "))[0]
            yield name, ours is not None, event.time_range.elapsed_us() / 1e6


def kernel_names(events: Iterable[Any]) -> dict[str, int]:
    """How often each kernel of this library ran, from a profile's events. An operator chooses a kernel by shape and
    GPU; the names show which kernels it chose."""
    return dict(sorted(Counter(name for name, ours, _ in on_device(events) if ours).items()))


def kernel_calls(events: Iterable[Any]) -> dict[str, int]:
    """How often each kernel ran on the device, kernels of other libraries included."""
    return dict(Counter(name for name, _, _ in on_device(events)))


def kernel_seconds(events: Iterable[Any]) -> dict[str, float]:
    """Seconds of each kernel on the device, in descending order."""
    found: dict[str, float] = {}
    for name, _, seconds in on_device(events):
        found[name] = found.get(name, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def profiled(run: Callable[[], Any]) -> Any:
    """A profile of ``run()`` on host and GPU; its events() are read on first use."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return profile


def profiled_steps(engine: Any, run: Callable[[], Any]) -> tuple[Any, int]:
    """A profile of ``run()``, and its number of engine steps."""

    def steps() -> int:
        return sum(m.count for m in engine.get_metrics() if m.name == "vllm:iteration_tokens_total")

    before = steps()
    profile = profiled(run)
    return profile, steps() - before


def per_step(events: Iterable[Any], steps: int) -> dict[str, float]:
    """The mean number of host launches and of kernels per engine step."""
    host, device = launched(events)
    return {"launches": host / steps, "kernels": device / steps}


def features(engine: Any) -> dict[str, Any]:
    """The engine's settings on which a log-probability could depend, as vLLM resolved them."""
    c = engine.llm_engine.vllm_config
    return {
        "async_scheduling": bool(c.scheduler_config.async_scheduling),
        "chunked_prefill": bool(c.scheduler_config.enable_chunked_prefill),
        "max_num_batched_tokens": c.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": c.scheduler_config.max_num_seqs,
        "prefix_caching": bool(c.cache_config.enable_prefix_caching),
        "cudagraph_mode": getattr(c.compilation_config.cudagraph_mode, "name", None),
    }


@contextlib.contextmanager
def requests_per_step(engine: Any) -> Iterator[list[int]]:
    """A context that yields a list. The list gets the number of requests in each step that the engine schedules inside
    the context."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    own, sizes = scheduler.schedule, []

    def schedule(*args: Any, **options: Any) -> Any:
        output = own(*args, **options)
        sizes.append(len(output.num_scheduled_tokens))
        return output

    scheduler.schedule = schedule
    try:
        yield sizes
    finally:
        del scheduler.schedule


def counted(engine: Any) -> dict[str, Any]:
    return {m.name: getattr(m, "value", None) for m in engine.get_metrics()}


def rates_of(
    engine: Any,
    request: dict[str, Any],
    timed: int,
    rollout: Callable[[], Any],
    forget: Callable[[], None],
    tokens: int,
) -> dict[str, Any]:
    """Rates of timed rollouts, and the seconds of each kernel in one more rollout, for each limit of tokens per step.
    The limits are the engine's own and, with ``default_batch``, that of chunked prefill. Rollouts with the different
    limits alternate.

    Args:
        rollout: generates ``tokens`` tokens.
        forget: empties the prefix cache.
    """
    own = engine.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    limits = [own, chunk_of(request)] if request["default_batch"] else [own]
    rates: dict[int, list[float]] = {limit: [] for limit in limits}
    for limit in limits:  # The first steps of each batch size load kernels and fill caches.
        scheduler.max_num_scheduled_tokens = limit
        forget()
        rollout()
    for limit in limits:
        for _ in range(timed):
            with turns.alone():
                scheduler.max_num_scheduled_tokens = limit
                forget()
                start = time.perf_counter()
                rollout()
                rates[limit].append(tokens / (time.perf_counter() - start))
                print(f"at most {limit} tokens per step: {rates[limit][-1]:.0f} tok/s", flush=True)
    turns.measured()
    found = []
    for limit in limits:
        with turns.alone():
            scheduler.max_num_scheduled_tokens = limit
            forget()
            profile, steps = profiled_steps(engine, rollout)
        events = profile.events()
        found.append(
            {
                "tokens_per_step": limit, "rates": rates[limit], "steps": steps, **per_step(events, steps),
                "seconds": kernel_seconds(events), "calls": kernel_calls(events),
            }
        )  # fmt: skip
    return {"features": features(engine), "tokens": tokens, "limits": found}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        from ..integrations.vllm import cpu

        cpu.install()
    from ..integrations import vllm as plugin

    plugin.plugin()  # sources that are not installed have no entry point
    from vllm import SamplingParams

    engine = make_engine(request, on_gpu)
    draw = random.Random(request["seed"] + 1)
    prompts = prompts_of(request)
    # Sequences of different lengths end at different steps, and waiting sequences replace them in the batch.
    counts = [draw.randrange(max(1, request["max_tokens"] // 2), request["max_tokens"] + 1) for _ in prompts]

    def sampling(max_tokens: int, **more: Any) -> Any:
        return SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **more)

    def generate(token_ids: list[list[int]], how: list[Any]) -> Any:
        return engine.generate([{"prompt_token_ids": ids} for ids in token_ids], how, use_tqdm=False)

    def forget() -> None:
        """Empties the prefix cache. A step that was scheduled in advance may hold pages until the next step."""
        for _ in range(2):
            if engine.reset_prefix_cache():
                return
            generate(prompts[:1], [sampling(1)])
        raise RuntimeError("the prefix cache of an earlier rollout could not be reset")

    how = [sampling(n, logprobs=request["logprobs"]) for n in counts]

    def rollout() -> Any:
        return generate(prompts, how)

    if timed := request.get("rates_only"):
        return rates_of(engine, request, timed, rollout, forget, sum(counts))
    # The first steps of each batch size load kernels and fill caches.
    rollout() if on_gpu else generate(prompts[:2], [sampling(2)] * 2)
    rates = []
    for _ in range(TIMED if on_gpu else 1):
        with turns.alone():
            forget()
            before = counted(engine)
            with requests_per_step(engine) as sizes:
                start = time.perf_counter()
                outputs = rollout()
                rates.append(sum(counts) / (time.perf_counter() - start))
            after = counted(engine)
    turns.measured()
    short = [sampling(16)] * len(prompts[:8])  # runs after `counted`, which counts the rollout alone
    counts_of_step: dict[str, Any] = {"launches": None, "kernels": None, "kernel_names": {}}
    if on_gpu:
        profile, steps = profiled_steps(engine, lambda: generate(prompts[:8], short))
        events = profile.events()
        counts_of_step = {**per_step(events, steps), "kernel_names": kernel_names(events)}
    sequences: list[dict[str, Any]] = []
    for output in outputs:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        given = [of[token] for of, token in zip(completion.logprobs, tokens, strict=True)]
        sequences.append(
            {
                "prompt": list(output.prompt_token_ids),
                "tokens": tokens,
                "rollout": [x.logprob for x in given],
                "ranks": [x.rank for x in given],
                "best": most_probable(completion.logprobs, request["logprobs"]),
                "seed": getattr(completion, "rlk_seed", None),  # our vLLM plugin sets it
            }
        )
    whole = [s["prompt"] + s["tokens"] for s in sequences]
    rescored = generate(whole, [sampling(1, prompt_logprobs=0)] * len(whole))
    for sequence, output in zip(sequences, rescored, strict=True):
        count = len(sequence["tokens"])
        scored = zip(output.prompt_logprobs[-count:], sequence["tokens"], strict=True)
        sequence["prefill"] = [given[token].logprob for given, token in scored]
    replayed = None
    if sequences[0]["seed"] is not None:
        # Draws a few sequences again by their seeds, in another batch. With n=2, vLLM gives the second sample the next
        # seed.
        few = sequences[:3]
        seeds = [s["seed"] for s in few]
        twice = [sampling(len(s["tokens"]), n=2, seed=s["seed"]) for s in few]
        again = generate([s["prompt"] for s in few], twice)
        drawn = [(list(o.outputs[0].token_ids), s["tokens"]) for o, s in zip(again, few, strict=True)]
        drawn += [([o.outputs[1].rlk_seed], [k + 1]) for o, k in zip(again, seeds, strict=True)]
        replayed = sum(a != b for got, expected in drawn for a, b in zip(got, expected, strict=True))
    return {
        "sequences": sequences,
        "replayed": replayed,
        "tokens_per_second": statistics.median(rates),
        "rates": rates,
        "features": features(engine) | {"requests_per_step": [min(filter(None, sizes)), max(sizes)]},
        "runner": "V2" if engine.llm_engine.vllm_config.use_v2_model_runner else "V1",
        "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
        "preemptions": after["vllm:num_preemptions"] - before["vllm:num_preemptions"],
        **counts_of_step,
        "prefix_cache_hits": after["vllm:prefix_cache_hits"] - before["vllm:prefix_cache_hits"],
        "plugin": engine.llm_engine.vllm_config.additional_config,
    }


def traced(request: dict[str, Any]) -> dict[str, Any]:
    import rl_kernel_native as rk

    with rk.trace() as trace:  # opens before the engine exists, because creating an engine captures CUDA graphs
        found = answer(request)
    kernels = found.pop("kernel_names", {})
    return found | {"rollout_trace": trace.as_json() | {"kernels": kernels}}


if __name__ == "__main__":
    turns.serve(traced, measures=True)
