"""vLLM on this library's operators: its refusals, and equal tokens on a real engine on the CPU.

Tests of the engine need `tools/fetch_vllm.sh` and its folder on PYTHONPATH. RLK_REQUIRE_ENGINES=1 makes them fail
without it. scripts/test.sh engines runs them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import vllm_model  # noqa: E402
from rl_kernel_native import contract  # noqa: E402
from rl_kernel_native.consistency import align, align_layers, align_rollout, align_trainer  # noqa: E402
from rl_kernel_native.consistency.errors import BadInput  # noqa: E402
from rl_kernel_native.integrations import vllm as plugin  # noqa: E402
from rl_kernel_native.integrations.vllm import config, requests, versions  # noqa: E402

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(
    not HAS_VLLM and "RLK_REQUIRE_ENGINES" not in os.environ, reason="vllm is not on PYTHONPATH: tools/fetch_vllm.sh"
)


def engine_config(**changed: Any) -> SimpleNamespace:
    """A supported configuration with changes by the name of a part: ``model.dtype=...``."""
    parts = {
        "model": SimpleNamespace(
            architectures=["Qwen3ForCausalLM"], runner_type="generate", use_mla=False, is_moe=False, quantization=None,
            dtype=torch.bfloat16, head_dtype=torch.bfloat16, logprobs_mode="raw_logprobs", max_logprobs=20,
            logits_processors=None, hf_text_config=SimpleNamespace(max_position_embeddings=64), max_model_len=96,
        ),
        "parallel": SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1, enable_dbo=False,
        ),
        "cache": SimpleNamespace(cache_dtype="auto"),
    }  # fmt: skip
    whole = SimpleNamespace(
        model_config=parts["model"], parallel_config=parts["parallel"], cache_config=parts["cache"],
        lora_config=None, speculative_config=None,
    )  # fmt: skip
    for name, value in changed.items():
        part, _, field = name.partition("__")
        setattr(parts[part] if field else whole, field or part, value)
    return whole


def rotary(kind: str, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(rope_parameters={"rope_type": kind, **more}, max_position_embeddings=64)


# Refused settings, and how the error names them.
REFUSED = {
    "tensor_parallel_size = 2": {"parallel__tensor_parallel_size": 2},
    "pipeline_parallel_size = 2": {"parallel__pipeline_parallel_size": 2},
    "decode_context_parallel_size = 2": {"parallel__decode_context_parallel_size": 2},
    "prefill_context_parallel_size = 2": {"parallel__prefill_context_parallel_size": 2},
    "enable_dbo = True": {"parallel__enable_dbo": True},
    "quantization = 'fp8'": {"model__quantization": "fp8"},
    "kv_cache_dtype = 'fp8'": {"cache__cache_dtype": "fp8"},
    "lora_config = 'SimpleNamespace'": {"lora_config": SimpleNamespace()},
    "speculative_config = 'SimpleNamespace'": {"speculative_config": SimpleNamespace()},
    "is_moe = True": {"model__is_moe": True},
    "use_mla = True": {"model__use_mla": True},
    "head_dtype = 'float32'": {"model__head_dtype": torch.float32},
    "dtype = 'float64'": {"model__dtype": torch.float64, "model__head_dtype": torch.float64},
    "runner_type = 'pooling'": {"model__runner_type": "pooling"},
    "architectures = ['Gemma2ForCausalLM']": {"model__architectures": ["Gemma2ForCausalLM"]},
    "logprobs_mode = 'raw_logits'": {"model__logprobs_mode": "raw_logits"},
    "logits_processors = ['mine']": {"model__logits_processors": ["mine"]},
    "max_logprobs = -1": {"model__max_logprobs": -1},
    "rope_type 'dynamic' with max_model_len = 96": {"model__hf_text_config": rotary("dynamic")},
    "rope_type 'longrope' with max_model_len = 96": {
        "model__hf_text_config": rotary("longrope", original_max_position_embeddings=95)
    },
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_is_not_served_is_refused_by_name(named: str) -> None:
    config.require_served(engine_config())
    config.require_served(engine_config(model__hf_text_config=rotary("dynamic"), model__max_model_len=64))
    config.require_served(engine_config(model__hf_text_config=rotary("llama3")))
    assert config.refusals(engine_config(**REFUSED[named])) == [named]
    with pytest.raises(ValueError, match="RLK_VLLM does not serve"):
        config.require_served(engine_config(**REFUSED[named]))


def asked(**changed: Any) -> SimpleNamespace:
    """Supported parameters of a request, with changes."""
    served: dict[str, Any] = {
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None,
        "structured_outputs": None, "thinking_token_budget": None, "logprob_token_ids": None, "logprobs": 5,
        "prompt_logprobs": None, "extra_args": {"sample_id": 3}, "seed": None, "n": 1,
    }  # fmt: skip
    return SimpleNamespace(**served | changed)


@pytest.mark.parametrize(
    ("named", "changed"),
    [
        (name, {name: value})
        for name, value in (
            ("presence_penalty", 0.5), ("frequency_penalty", -0.5), ("repetition_penalty", 1.2),
            ("logit_bias", {3: 1.0}), ("structured_outputs", SimpleNamespace(regex="a")),
            ("thinking_token_budget", 4), ("logprob_token_ids", [1]), ("logprobs", -1), ("prompt_logprobs", -1),
        )
    ]
    + [("seed", {"seed": 2**63 - 1, "n": 2}), ("sample_id", {"extra_args": {"sample_id": 1 << 63}})],
)  # fmt: skip
def test_a_request_that_is_not_served_is_refused_as_it_arrives(named: str, changed: dict[str, Any]) -> None:
    requests.require_served(asked(), resumable=False)
    with pytest.raises(ValueError, match=named):
        requests.require_served(asked(**changed), resumable=False)


def test_a_request_is_keyed_by_its_sample_id_and_seed() -> None:
    assert [requests.sample_id_of(asked(extra_args=x)) for x in (None, {}, {"sample_id": -2})] == [0, 0, -2]
    with pytest.raises(TypeError, match=r"extra_args\['sample_id'\]: expected an int, got str"):
        requests.require_served(asked(extra_args={"sample_id": "3"}), resumable=False)
    with pytest.raises(ValueError, match="resumable = True"):
        requests.require_served(asked(), resumable=True)

    def engine(seed: int, rank: int = 0) -> SimpleNamespace:
        parallel = SimpleNamespace(_api_process_rank=rank)
        return SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(seed=seed), parallel_config=parallel)
        )

    first, same = engine(7), engine(7)
    drawn = [requests.draw_seed(first) for _ in range(3)]
    assert drawn == [requests.draw_seed(same) for _ in range(3)]
    assert len({*drawn, requests.draw_seed(engine(8)), requests.draw_seed(engine(7, rank=1))}) == 5


def test_an_artifact_of_another_contract_has_another_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    before = config.identity()
    assert before["operators"] == sorted(before["operators"])
    assert set(before["operators"]) <= {*contract.operators()}
    json.dumps(before)  # vLLM hashes this dict as JSON
    monkeypatch.setattr(contract, "ROWS", contract.ROWS[1:])
    assert config.identity()["contract"] != before["contract"]


def test_a_hook_that_is_gone_or_differs_is_named() -> None:
    hooks = (
        versions.Hook("json:dumps", "obj"),
        versions.Hook("json:nothing", "obj"),
        versions.Hook("rl_kernel_native.nothing:f", ""),
        versions.Hook("fractions:Fraction.limit_denominator", "self max_denominator"),
    )
    found = versions.unknown(hooks)
    assert [text.partition(": ")[0] for text in found] == [hook.place for hook in hooks[:3]]
    assert "expected parameters (obj), got (obj skipkeys" in found[0]


@pytest.mark.parametrize(
    ("version", "cuda", "is_tried"),
    [("2.11.0+cu130", "13.0", True), ("2.13.1+cpu", None, True), ("2.13.0", "13.0", False), ("2.1.0", None, False)],
)
def test_a_torch_that_was_not_tried_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None, is_tried: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    said = versions.untried_torch()
    assert (said is None) == is_tried
    assert is_tried or said == f"vllm 0.26.0 was tried with torch 2.11 (cuda) and 2.13 (cpu), got {version}"


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_VLLM", "yes")
    with pytest.raises(ValueError, match="RLK_VLLM: expected 0, 1 or check, got 'yes'"):
        plugin.plugin()
    for off in ("", "0"):
        monkeypatch.setenv("RLK_VLLM", off)
        plugin.plugin()
    assert plugin.enabled() is None
    assert "rl_kernel_native.integrations.vllm.hooks" not in sys.modules


def test_differences_of_two_sides() -> None:
    sequences = [{"rollout": [-1.0, -2.0], "trainer": [-1.0, -2.5]}, {"rollout": [-3.0], "trainer": [-3.0]}]
    found = align.difference(sequences, "trainer")
    assert (found.tokens, found.differing, found.max_abs_dlogp) == (3, 1, 0.5)
    assert found.mean_abs_dlogp == pytest.approx(0.5 / 3)
    assert found.kl_k3 == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 3)
    sequences[1]["trainer"] = [math.nan]
    assert align.difference(sequences, "trainer").differing == 2
    assert align.difference(sequences, "trainer").max_abs_dlogp == math.inf
    for rollout, trainer, kl in ((-800.0, 0.0, math.inf), (-math.inf, -1.0, math.inf), (-1.0, -math.inf, math.inf)):
        sequences[1] = {"rollout": [rollout], "trainer": [trainer]}
        assert align.difference(sequences, "trainer").kl_k3 == kl


@pytest.mark.parametrize(
    ("on_gpu", "pages_for", "blocks"), [(False, 0, 2 * 4 + 1), (False, 3, 3 * 4 + 1), (True, 0, None), (True, 5, 21)]
)
def test_pages_of_the_engine(monkeypatch: pytest.MonkeyPatch, on_gpu: bool, pages_for: int, blocks: int | None) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **options: options))
    request = align.Request("model", 10, prompt_tokens=40, max_tokens=10, pages_for=pages_for)
    options = align_rollout.make_engine(dataclasses.asdict(request), on_gpu)
    assert options["max_model_len"] == 58
    assert options["logprobs_mode"] == "raw_logprobs"
    assert options.get("num_gpu_blocks_override") == blocks
    assert options.get("block_size") == (None if blocks is None else 16)


@pytest.mark.parametrize(("default_batch", "tokens"), [(False, 584), (True, None)])
def test_tokens_per_step_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, default_batch: bool, tokens: int | None
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **options: options))
    request = align.Request("model", 10, prompt_tokens=512, default_batch=default_batch, dummy_weights=default_batch)
    options = align_rollout.make_engine(dataclasses.asdict(request), on_gpu=True)
    assert options.get("max_num_batched_tokens") == tokens
    assert options.get("load_format") == ("dummy" if default_batch else None)
    assert "max_num_seqs" not in options


@pytest.mark.parametrize(("default_batch", "limits"), [(False, [16384]), (True, [16384, 584])])
def test_rates_of_an_engine_by_its_limit_of_tokens_per_step(
    monkeypatch: pytest.MonkeyPatch, default_batch: bool, limits: list[int]
) -> None:
    """Every rollout follows an empty cache; each limit has a rollout that is not timed, and a rollout that is
    profiled."""
    scheduler = SimpleNamespace(max_num_scheduled_tokens=0)
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    done: list[int] = []
    event = SimpleNamespace(
        device_type=torch.autograd.DeviceType.CUDA, name="rlk::rope()", time_range=SimpleNamespace(elapsed_us=lambda: 5)
    )
    engine = SimpleNamespace(
        llm_engine=SimpleNamespace(
            vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=16384)),
            engine_core=core,
        ),
        get_metrics=lambda: [SimpleNamespace(name="vllm:iteration_tokens_total", count=2 * len(done))],
    )

    def profiled(run: Any) -> Any:
        run()
        return SimpleNamespace(events=lambda: [event] * 4)

    monkeypatch.setattr(align_rollout, "profiled", profiled)
    monkeypatch.setattr(align_rollout, "features", lambda engine: {})
    request = dataclasses.asdict(align.Request("model", 10, prompt_tokens=512, default_batch=default_batch))
    found = align_rollout.rates_of(
        engine, request, 3, lambda: done.append(scheduler.max_num_scheduled_tokens), lambda: done.append(0), 100
    )
    assert done[::2] == [0] * len(done[1::2])
    assert done[1::2] == limits + [limit for limit in limits for _ in range(3)] + limits
    assert [one["tokens_per_step"] for one in found["limits"]] == limits
    for one in found["limits"]:
        assert len(one["rates"]) == 3
        assert (one["steps"], one["kernels"], one["calls"]) == (2, 2.0, {"rope": 4})
        assert one["seconds"] == {"rope": pytest.approx(2e-5)}


@pytest.mark.parametrize(
    ("trained_by", "gpus", "rank", "backend", "device"),
    [
        ("fsdp2", 0, 1, "gloo", "cpu"), ("fsdp2", 2, 1, "nccl", "cuda:1"), ("fsdp2-one-gpu", 0, 1, "gloo", "cpu"),
        ("fsdp2-one-gpu", 1, 1, "gloo", "cuda:0"), ("fsdp2", 1, 1, "nccl", None),
    ],
)  # fmt: skip
def test_a_sharded_trainer_has_a_gpu_for_each_process_or_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, trained_by: str, gpus: int, rank: int, backend: str, device: str | None
) -> None:
    joined, chosen = [], []
    monkeypatch.setattr(torch.distributed, "init_process_group", joined.append)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    given = "cuda" if gpus else "cpu"
    if device is None:
        with pytest.raises(RuntimeError, match="fsdp2: expected 2 GPUs, got 1; trainer fsdp2-one-gpu shares one"):
            align_trainer.join(trained_by, given)
    else:
        assert align_trainer.join(trained_by, given) == device
        assert chosen == [device] * bool(gpus)
    assert joined == [backend]


def test_launches_and_kernels_of_a_step() -> None:
    on_host = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaLaunchHostFunc")
    on_device = ("Memcpy DtoH (Device -> Pageable)", "Memset (Device)", "gemm", "norm", "norm")
    events = [SimpleNamespace(device_type=torch.autograd.DeviceType.CPU, name=name) for name in on_host]
    events += [SimpleNamespace(device_type=torch.autograd.DeviceType.CUDA, name=name) for name in on_device]
    assert align_rollout.launched(events) == (4, 3)


def test_kernels_of_this_library_are_named_without_their_templates() -> None:
    names = (
        "void rlk::cuda::(anonymous namespace)::rms_norm_kernel<rlk::cuda::Half, 4>(rlk::NormParams)",
        "rlk::cuda::sm90::rope_kernel(rlk::RopeParams)", "void at::native::vectorized_elementwise_kernel<4>(int)",
        "void rlk::cuda::(anonymous namespace)::rms_norm_kernel<float, 2>(rlk::NormParams)", "nvjet_hsh_128x64",
    )  # fmt: skip
    half = SimpleNamespace(elapsed_us=lambda: 500_000)
    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    events = [SimpleNamespace(device_type=cuda, name=name, time_range=half) for name in names]
    events.append(SimpleNamespace(device_type=cpu, name=names[0]))
    assert align_rollout.kernel_names(events) == {"rms_norm_kernel": 2, "rope_kernel": 1}
    seconds = align_rollout.kernel_seconds(events)
    assert next(iter(seconds.items())) == ("rms_norm_kernel", 1.0)
    assert seconds["at::native::vectorized_elementwise_kernel"] == seconds["nvjet_hsh_128x64"] == 0.5


def test_the_first_operator_that_differs_is_named() -> None:
    """The engine computes in two chunks, the trainer at once; a module that one side lacks is not compared."""
    names = [name for name, *_ in align_layers.places(2)]
    assert len(names) == 2 + 2 * len(align_layers.IN_LAYER)
    rows = torch.arange(15.0).view(5, 3).bfloat16()
    trainer = {name: [rows.clone()] for name in names if not name.endswith("q_norm")}
    for planted in ("layers.1.self_attn.attn", "layers.0.mlp.down_proj", "layers.0.self_attn.q_norm", None):
        engine = {name: [rows[:2].clone(), rows[2:].clone()] for name in names}
        if planted is not None:
            for name in names[names.index(planted) :]:
                engine[name][1][1, 2] += 0.5
        found = align_layers.first_divergent(2, engine, trainer, 5)
        seen = "layers.0.self_attn.k_norm" if planted == "layers.0.self_attn.q_norm" else planted
        assert found["module"] == (seen or "lm_head")
        assert found["modules"] == len(trainer) == len(names) - 2
        assert (found["tokens"], found["max_abs"]) == ((0, 0.0) if planted is None else (1, 0.5))
    assert align.place_of(None) == "-"
    assert align.place_of(found) == "head or log-probability"
    assert align.place_of(found | {"operator": "linear", "layer": 3}) == "layer 3, linear"
    assert align_layers.split("layers.12.mlp.act_fn") == ("layers.12", "mlp.act_fn")
    assert align_layers.split("norm") == ("", "norm")


def test_two_contracts_are_not_aligned() -> None:
    side = {
        "rollout": [-1.0], "prefill": [-1.0], "trainer": [-1.0], "ranks": [2], "first_rank": [1],
        "last_rank": [2], "tokens": [5], "redrawn": [5], "best": [[0, 7, 1, -0.5]], "trainer_best": [[-0.5, 1, 1]],
    }  # fmt: skip
    base = {
        "sequences": [side], "tokens_per_second": 1.0, "device": "cpu", "runner": "V1", "preemptions": 0,
        "launches": None, "kernels": None, "prefix_cache_hits": 0, "replayed": 0,
        "rates": [1.0], "features": {},
    }  # fmt: skip

    def traced(contract: str, *operators: str) -> dict[str, Any]:
        return {"contract": contract, "calls": {name: {"cpu": 1} for name in operators}}

    def result(engine: Any, trainer: Any) -> align.Result:
        return align.result_of("rk", base | {"rollout_trace": engine, "trainer_trace": trainer})

    assert result(traced("a", "linear"), traced("a", "linear")).aligned
    for name, value in (
        ("ranks", [3]), ("first_rank", [3]), ("redrawn", [6]), ("trainer", [-1.5]), ("trainer_best", [[-0.6, 1, 1]]),
        ("trainer_best", [[-0.5, 2, 2]]),
    ):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(side, name, value)
            assert not result(traced("a", "linear"), traced("a", "linear")).aligned
    for engine, trainer in (
        (traced("b", "linear"), traced("a", "linear")),
        (traced("a", "linear"), traced("a")),
        (traced("a"), traced("a")),
    ):
        assert not result(engine, trainer).aligned


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"expected a directory with config\.json"):
        align.request_of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"expected a vocab_size in config\.json, got None"):
        align.request_of(tmp_path)
    with pytest.raises(BadInput, match="--trainer best: expected hf, fsdp2, fsdp2-one-gpu, megatron"):
        align.align(align.Request("none", 5), ["rk"], ["best"])
    with pytest.raises(BadInput, match="--settings best: expected stock, canonical-blas, rk, rk-v1"):
        align.align(align.Request("none", 5), ["best"])


# ---- with the engine ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_model.save(tmp_path_factory.mktemp("model"))


OFF = """
import sys
from rl_kernel_native.integrations.vllm import cpu, versions
cpu.install()
from vllm.model_executor.custom_op import op_registry_oot
from vllm.v1.attention.backends.registry import AttentionBackendEnum
import vllm.plugins

def functions():
    return {hook.place: getattr(*versions.find(hook.place)) for hook in versions.HOOKS}

def identity():
    # What vLLM's compile cache names the artifacts of an engine by, in one VLLM_CACHE_ROOT.
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, max_model_len=64)
    return arguments.create_engine_config().compute_hash()

before, registered = functions(), dict(op_registry_oot)
import rl_kernel_native.integrations.vllm as plugin
vllm.plugins.load_plugins_by_group = lambda group: {"rl_kernel_native": plugin.plugin}
vllm.plugins.load_general_plugins()
after = functions()
assert all(before[place] == after[place] for place in before), "replaced while it is off"
assert op_registry_oot == registered == {}
assert "rl_kernel_native.integrations.vllm.hooks" not in sys.modules

from vllm.v1.sample.sampler import Sampler
own = Sampler.compute_logprobs
Sampler.compute_logprobs = staticmethod(lambda logits, temperature: logits)
try:
    plugin.enable()
except RuntimeError as error:
    assert "Sampler.compute_logprobs: expected parameters (logits), got (logits temperature)" in str(error), error
else:
    raise AssertionError("an unknown hook was replaced")
Sampler.compute_logprobs = staticmethod(own)
assert op_registry_oot == {}

first = identity()
assert identity() == first
plugin.enable()
with_plugin = identity()
assert len({first, with_plugin}) == 2 and identity() == with_plugin
from rl_kernel_native.integrations.vllm import config
own, config.identity = config.identity, lambda: {**own(), "contract": "another"}
assert identity() not in (first, with_plugin), "vLLM does not hash what the plugin says of itself"
config.identity = own
changed = [place for place, function in functions().items() if function != before[place]]
assert "vllm.v1.sample.sampler:Sampler.compute_logprobs" in changed
assert {"RMSNorm", "RotaryEmbedding", "SiluAndMul", "Llama3RotaryEmbedding"} <= {*op_registry_oot}

import torch
import rl_kernel_native as rk
from rl_kernel_native.integrations.vllm import hooks

assert AttentionBackendEnum.CUSTOM.get_class().get_name() == "CUSTOM"
layers = torch.nn.ModuleDict({"nothing": torch.nn.Identity(), "norm": torch.nn.LayerNorm(8)})
assert hooks.not_served(layers) == ["norm (LayerNorm)"]

from vllm.v1.worker.gpu.sample import logprob as of_second_runner

generator = torch.Generator().manual_seed(0)
logits, ids = torch.randn(5, 300, generator=generator).bfloat16() * 4, torch.tensor([0, 299, 7, 120, 33])
for x in (logits, logits.float()):
    kept = Sampler.compute_logprobs(x)
    want = rk.logprob(x, ids)
    found = Sampler.gather_logprobs(kept, 5, ids)
    assert torch.equal(found.logprobs[:, 0], want) and torch.equal(want, rk.logprob(logits, ids))
    assert found.logprob_token_ids[:, 0].tolist() == ids.tolist()
    ranked = x.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(found.logprob_token_ids[:, 1:].long(), ranked[:, :5])
    for row in range(5):
        order = sorted(range(300), key=lambda j: -float(x[row, j]))
        tied = [j for j in order if float(x[row, j]) == float(x[row, ids[row]])]
        assert int(found.selected_token_ranks[row]) == order.index(tied[-1]) + 1
        for k in range(6):
            one = rk.logprob(x[row : row + 1], found.logprob_token_ids[row, k : k + 1].long())
            assert torch.equal(one, found.logprobs[row, k : k + 1])
    assert torch.equal(of_second_runner.compute_token_logprobs(x, found.logprob_token_ids), found.logprobs)
kept = Sampler.compute_logprobs(logits)
logits.zero_()
assert kept.any(), "the sampler writes into its logits"

import vllm_refusal_cases
import vllm_rotary_cases
import vllm_sampler_cases
import vllm_weights_cases

vllm_refusal_cases.run()
vllm_weights_cases.run()
vllm_sampler_cases.run()
vllm_rotary_cases.run()
print("as expected")
"""


@needs_vllm
def test_off_nothing_of_vllm_is_touched_and_unknown_hooks_are_refused(model: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RLK_VLLM"}
    environment["PYTHONPATH"] = os.pathsep.join(
        (str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", ""))
    )
    done = subprocess.run([sys.executable, "-c", OFF, str(model)], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("as expected\n"), done.stdout + done.stderr


TRAINERS = ["hf", "fsdp2"] + ["megatron"] * (importlib.util.find_spec("megatron") is not None)


@pytest.fixture(scope="session")
def runs(model: Path) -> dict[str, Any]:
    """Runs with stock operators as the control, with this library's operators and every trainer, and with updates. Two
    runs go at a time, each with several processes.

    Runs include chunked prefill, prefix caching, preemption, and batches whose members change.
    """
    request = align.request_of(model, num_prompts=16, prompt_tokens=90, max_tokens=24, logprobs=5)
    few = align.request_of(model, num_prompts=2, prompt_tokens=20, max_tokens=6)
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(align.align, request, ["rk"], TRAINERS)
        stock = pool.submit(align.align, request, ["stock"])
        steps = pool.submit(align.updates, few, 3)
        return {"request": request, "rk": ours.result(), "stock": stock.result()[0], "steps": steps.result()}


@needs_vllm
def test_no_token_of_a_rollout_differs_and_stock_ones_do(runs: dict[str, Any], tmp_path: Path) -> None:
    """The stock control shows that the test can fail."""
    stock = runs["stock"]
    assert [r.trained_by for r in runs["rk"]] == TRAINERS
    for ours in runs["rk"]:
        assert ours.trainer.tokens == stock.trainer.tokens > 200
        assert ours.aligned, align.text([stock, *runs["rk"]])
        assert (ours.ranks, ours.redrawn, stock.redrawn) == (0, 0, None)
        assert ours.best == {"tokens": 5 * ours.trainer.tokens, "differing": 0, "ranks": 0}
        assert ours.first_divergent is None
        assert ours.preemptions > 0
        assert ours.prefix_cache_hits > 0
        assert ours.features["chunked_prefill"]
        assert ours.features["prefix_caching"]
        fewest, most = ours.features["requests_per_step"]
        assert fewest == 1 < most
        assert ours.trainer.max_abs_dlogp == ours.prefill.max_abs_dlogp == 0.0
        assert set(ours.served["rollout"]["calls"]) == set(config.OPERATORS)
        assert set(ours.served["trainer"]["calls"]) == {*config.OPERATORS} - {"kv_cache_append"}
    assert stock.served["rollout"]["calls"] == stock.served["trainer"]["calls"] == {}
    assert stock.first_divergent["layer"] == 0
    assert stock.first_divergent["modules"] == 2 + 2 * len(align_layers.IN_LAYER)
    assert stock.trainer.differing > 0, "the control does not differ: the comparison would not see a difference"
    align.write_report(tmp_path, runs["request"], [stock, *runs["rk"]], runs["steps"])
    report = json.loads((tmp_path / "align.json").read_text())
    assert [r["aligned"] for r in report["results"]] == [False] + [True] * len(TRAINERS)
    assert [s["ratio_not_one"] for s in report["updates"]] == [0, 0, 0]
    assert "max |dlogp|" in (tmp_path / "align.html").read_text()


@needs_vllm
def test_the_ratio_is_one_before_every_update(runs: dict[str, Any]) -> None:
    for step in runs["steps"]:
        assert step.tokens == 2 * 4 * 6
        assert (step.ratio_not_one, step.max_abs_dlogp) == (0, 0.0), align.text_of_updates(runs["steps"])
        assert step.moved > 0, "the update changed nothing, so the next ratio would be 1 without a sync"
