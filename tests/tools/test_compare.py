"""`rlk compare` and `rlk demo` on tiny random models, on the CPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="rlk compare needs torch")
transformers = pytest.importorskip("transformers", reason="rlk compare needs transformers")
for _name in ("typer", "rich", "matplotlib"):
    pytest.importorskip(_name, reason="rlk compare needs it")

from typer.testing import CliRunner  # noqa: E402

import rl_kernel_native  # noqa: E402
from rl_kernel_native.consistency import demo, demo_model  # noqa: E402
from rl_kernel_native.consistency.batches import batch_inputs, make_batches, plan_batches  # noqa: E402
from rl_kernel_native.consistency.checks import SideInputs, check_sides  # noqa: E402
from rl_kernel_native.consistency.cli import app  # noqa: E402
from rl_kernel_native.consistency.compare import run_compare  # noqa: E402
from rl_kernel_native.consistency.divergence import compare_traces, first_divergent  # noqa: E402
from rl_kernel_native.consistency.errors import BadInput, InputMismatch  # noqa: E402
from rl_kernel_native.consistency.explain import news  # noqa: E402
from rl_kernel_native.consistency.metrics import compare_logprobs  # noqa: E402
from rl_kernel_native.consistency.model import ForwardCounter, LoadedModel, load_model  # noqa: E402
from rl_kernel_native.consistency.operators import StockOperators  # noqa: E402
from rl_kernel_native.consistency.probes import ProbePlan, Recorder, plan_probes  # noqa: E402
from rl_kernel_native.consistency.progress import Progress  # noqa: E402
from rl_kernel_native.consistency.prompts import load_prompts  # noqa: E402
from rl_kernel_native.consistency.rollout import run_rollout  # noqa: E402
from rl_kernel_native.consistency.settings import CompareSettings  # noqa: E402
from rl_kernel_native.consistency.training import run_training  # noqa: E402

BOS, EOS, PAD, VOCAB = 96, 97, 98, 99
PROMPTS = [[BOS, *range(3 + i, 3 + i + 2 + 3 * (i % 4))] for i in range(6)]
NEW = 8
EVERYTHING = ProbePlan(dict.fromkeys(range(len(PROMPTS)), 1000))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Models this small gain nothing from threads, and waiting threads slow down a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(family: str, **changes: Any) -> Any:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
        **changes,
    }
    config_type, model_type = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[family]
    torch.manual_seed(1)
    return model_type(config_type(**shape))


def write_prompts(path: Path, prompts: list[list[int]] = PROMPTS) -> Path:
    path.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in prompts))
    return path


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved models "qwen3", "llama" and "exact". In "exact" every operator of the head is exact, so both sides must
    agree to the bit."""
    root = tmp_path_factory.mktemp("models")
    models = {family: tiny(family) for family in ("qwen3", "llama")}
    exact = tiny("qwen3")
    with torch.no_grad():
        # All logits are equal, so both stock formulas round to the same -log(vocab_size).
        exact.lm_head.weight.zero_()
    models["exact"] = exact
    for name, model in models.items():
        model.save_pretrained(root / name)
    write_prompts(root / "prompts.jsonl")
    return {name: root / name for name in [*models, "prompts.jsonl"]}


@pytest.fixture(scope="module")
def qwen(directories: dict[str, Path]) -> LoadedModel:
    return load_model(directories["qwen3"], torch.float32, torch.device("cpu"))


def rollout_of(loaded: LoadedModel, batch_size: int, plan: ProbePlan = EVERYTHING, **changes: Any) -> Any:
    options = {"seed": 5, "temperature": 1.0, "max_new_tokens": NEW, "batch_size": batch_size, **changes}
    return run_rollout(loaded, PROMPTS, StockOperators(), Recorder(plan), **options)


def training_of(loaded: LoadedModel, rollout: Any, packing: str = "packed", side: Any = "right") -> Any:
    sequences = [request.ids for request in rollout.requests]
    batches = make_batches(sequences, packing, 4096, PAD, side, loaded.device)
    inputs = batch_inputs(batches, packing, side, loaded)
    lengths = [len(ids) for ids in PROMPTS]
    return run_training(loaded, batches, inputs, lengths, StockOperators(), Recorder(EVERYTHING), temperature=1.0)


def command(directories: dict[str, Path], model: str, *more: str) -> list[str]:
    files = ["--model", str(directories[model]), "--prompts", str(directories["prompts.jsonl"])]
    return ["compare", *files, "--seed", "5", "--max-new-tokens", str(NEW), "--device", "cpu", *more]


# ---- rollout


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_forward_calls_are_one_per_prompt_and_one_per_decode_step(qwen: LoadedModel, batch_size: int) -> None:
    with ForwardCounter(qwen.model) as counter:
        rollout = rollout_of(qwen, batch_size)
    assert counter.calls == rollout.forward_calls == len(PROMPTS) + len(rollout.membership)
    # Every response token except the first comes from one row of one decode step.
    assert sum(map(len, rollout.membership)) == sum(len(request.response) - 1 for request in rollout.requests)
    with ForwardCounter(qwen.model) as counter:
        training_of(qwen, rollout)
    assert counter.calls == 1


def test_nothing_is_sampled_twice(qwen: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, int, int]] = []
    real = rl_kernel_native.sample

    def record(logits: Any, *, seed: int, sample_id: Any, position: Any, **more: Any) -> Any:
        drawn.extend((seed, *key) for key in zip(sample_id.tolist(), position.tolist(), strict=True))
        return real(logits, seed=seed, sample_id=sample_id, position=position, **more)

    monkeypatch.setattr("rl_kernel_native.consistency.rollout.sample", record)
    result = run_compare(qwen, prompts_of(qwen), CompareSettings(seed=5, batch_sizes=(3,), max_new_tokens=NEW))
    run = result.runs[0]
    assert len(drawn) == len(set(drawn)) == run.response_tokens
    assert run.rollout_forwards == run.prefills + run.decode_steps
    assert run.training_forwards == 1


def prompts_of(loaded: LoadedModel) -> Any:
    path = loaded.directory.parent / "prompts.jsonl"
    return load_prompts(path, loaded, NEW)


def test_batch_membership_changes_while_requests_are_in_flight(qwen: LoadedModel) -> None:
    steps = rollout_of(qwen, 3).membership
    assert max(map(len, steps)) == 3
    joined = [set(b) - set(a) for a, b in itertools.pairwise(steps) if set(a) & set(b)]
    left = [set(a) - set(b) for a, b in itertools.pairwise(steps) if set(a) & set(b)]
    assert sum(map(bool, joined)) >= 3
    assert sum(map(bool, left)) >= 3


def test_rollout_agrees_with_the_models_own_forward(qwen: LoadedModel) -> None:
    rollout = rollout_of(qwen, 3)
    for request in rollout.requests:
        ids = torch.tensor([request.ids])
        with torch.no_grad():
            logits = qwen.model(input_ids=ids).logits[0]
        want = torch.log_softmax(logits.double(), -1)[torch.arange(len(ids[0]) - 1), ids[0, 1:]]
        torch.testing.assert_close(
            rollout.logprob(request.index).double(), want[len(request.prompt) - 1 :], rtol=0, atol=1e-5
        )


def test_every_token_is_the_one_that_sample_draws(qwen: LoadedModel) -> None:
    for request in rollout_of(qwen, 3, temperature=0.5).requests:
        with torch.no_grad():
            logits = qwen.model(input_ids=torch.tensor([request.ids[:-1]])).logits[0, len(request.prompt) - 1 :]
        positions = torch.arange(len(request.response))
        drawn = rl_kernel_native.sample(logits, seed=5, sample_id=request.index, position=positions, temperature=0.5)
        assert drawn.ids.tolist() == request.response


def test_a_row_that_cannot_be_drawn_is_named(directories: dict[str, Path]) -> None:
    loaded = load_model(directories["exact"], torch.float32, torch.device("cpu"))
    with torch.no_grad():
        loaded.model.lm_head.weight[3, 0] = torch.nan
    with pytest.raises(BadInput, match="prompt 0, output token 0: no token drawn, nan_logit"):
        rollout_of(loaded, 1)


def test_equal_logits_sample_equal_ids_at_any_batch_size(directories: dict[str, Path]) -> None:
    loaded = load_model(directories["exact"], torch.float32, torch.device("cpu"))
    runs = [rollout_of(loaded, size) for size in (1, 2, 5)]
    ids = [[request.ids for request in run.requests] for run in runs]
    assert ids[0] == ids[1] == ids[2]
    assert [request.ids for request in rollout_of(loaded, 2, seed=6).requests] != ids[0]


# ---- training side


@pytest.mark.parametrize(("packing", "side"), [("packed", "right"), ("padded", "right"), ("padded", "left")])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_training_scores_the_rollouts_ids(directories: dict[str, Path], family: str, packing: str, side: str) -> None:
    loaded = load_model(directories[family], torch.float32, torch.device("cpu"))
    rollout = rollout_of(loaded, 3)
    training = training_of(loaded, rollout, packing, side)
    check_sides(rollout.inputs, training.inputs)
    for index in range(len(PROMPTS)):
        torch.testing.assert_close(training.logprobs[index], rollout.logprob(index), rtol=0, atol=1e-4)


def test_micro_batches_keep_the_token_limit() -> None:
    assert plan_batches([5, 5, 5, 20, 1], "packed", 11) == [[0, 1], [2], [3], [4]]
    assert plan_batches([2, 6, 2, 2], "padded", 12) == [[0, 1], [2, 3]]


# ---- checks


def side(name: str, **changes: Any) -> SideInputs:
    fields = {
        "ids": [[BOS, 5, 6, EOS], [BOS, 7, 8]],
        "positions": [[0, 1, 2, 3], [0, 1, 2]],
        "special_ids": {"bos": (BOS,), "eos": (EOS,), "pad": (PAD,)},
    }
    return SideInputs(name=name, **{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message", "where"),
    [
        ({"ids": [[BOS, 5, 6, EOS], [BOS, 7, 9]]}, "prompt 1: ids differ first at position 2", (1, 2)),
        ({"ids": [[BOS, 5, 6, EOS], [BOS, 7]]}, "prompt 1: ids differ first at position 2.*training nothing", (1, 2)),
        ({"ids": [[5, 6, EOS], [BOS, 7, 8]]}, r"prompt 0: special tokens differ first at position 0.*\(bos\)", (0, 0)),
        ({"ids": [[BOS, 5, 6, 7], [BOS, 7, 8]]}, r"prompt 0: special tokens differ first at position 3", (0, 3)),
        ({"positions": [[0, 1, 2, 3], [0, 2, 3]]}, "prompt 1: position ids differ first at position 1", (1, 1)),
        (
            {"padding_side": "right", "masks": [[1, 1, 1, 1], [0, 1, 1, 1]]},
            r"training, prompt 1: attention mask is 0 at column 0.*padding side: right",
            (1, 0),
        ),
        (
            {"padding_side": "left", "masks": [[1, 1, 1, 1], [1, 1, 1, 0]]},
            r"training, prompt 1: attention mask is 1 at column 0.*padding side: left",
            (1, 0),
        ),
    ],
)
def test_mismatched_sides_name_the_first_position(
    changes: dict[str, Any], message: str, where: tuple[int, int]
) -> None:
    check_sides(side("rollout"), side("training"))
    with pytest.raises(InputMismatch, match=message) as caught:
        check_sides(side("rollout"), side("training", **changes))
    assert (caught.value.prompt, caught.value.position) == where


def test_sides_must_agree_on_special_ids() -> None:
    with pytest.raises(BadInput, match=r"eos token: rollout has \[97\], training has \[3\]"):
        check_sides(side("rollout"), side("training", special_ids={"bos": (BOS,), "eos": (3,), "pad": (PAD,)}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"prompts.jsonl:2: want JSON such as"),
        ("[1]", r":2: want a JSON object"),
        ('{"prompt": [1], "id": 3}', "want 'prompt_ids' or 'text', got 'prompt', 'id'$"),
        ("{}", "want 'prompt_ids' or 'text', got no field$"),
        (
            '{"text": "2 + 3 ="}',
            r"/qwen3 has no tokenizer \(none of .*tokenizer.json.*\); save one there by tokenizer\.s",
        ),
        ('{"prompt_ids": []}', "the prompt is empty"),
        ('{"prompt_ids": [1, true]}', "must be a list of integers"),
        ('{"prompt_ids": [1, 99]}', "token id 99 at position 1 .*; give ids of this model"),
        ('{"prompt_ids": [1, 2, -1]}', "token id -1 at position 2"),
        ('{"prompt_ids": [96, 96, 1]}', "bos token 96 twice, again at position 1; give one"),
        ('{"prompt_ids": [98, 98, 1]}', "padded on the left: pad at position 0; give the prompt's own tokens"),
        ('{"prompt_ids": [1, 2, 98, 98]}', "padded on the right: pad from position 2; give the prompt's own tokens"),
        ('{"prompt_ids": [1, 2, 3], "position_ids": [0, 1, 3]}', "position id 3 at position 2, want 2"),
        ('{"prompt_ids": [1, 2, 3], "attention_mask": [0, 1, 1]}', "attention mask is 0 at column 0"),
        ('{"prompt_ids": [1, 2, 3], "attention_mask": [1, 1]}', "as long as the prompt"),
        (json.dumps({"prompt_ids": [1] * 60}), "60 prompt tokens .* exceed the model's 64"),
    ],
)
def test_bad_prompts(qwen: LoadedModel, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_ids": [1, 2]}\n' + line + "\n")
    with pytest.raises(BadInput, match=message):
        load_prompts(path, qwen, NEW)


def test_text_and_ids_of_a_prompt_must_agree(qwen: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "abc", "prompt_ids": [1, 2, 4]}\n')
    with pytest.raises(InputMismatch, match="first at position 2"):
        load_prompts(path, qwen, NEW, encode=lambda text: [1, 2, 3])
    assert load_prompts(path, qwen, NEW, encode=lambda text: [1, 2, 4])[0].ids == (1, 2, 4)


# ---- finding the operator

FAULTS = [
    ("embed_tokens", lambda m: m.model.embed_tokens.weight),
    ("layers.0.input_layernorm", lambda m: m.model.layers[0].input_layernorm.weight),
    ("layers.1.self_attn.q_norm", lambda m: m.model.layers[1].self_attn.q_norm.weight),
    ("layers.1.self_attn.v_proj", lambda m: m.model.layers[1].self_attn.v_proj.weight),
    ("layers.2.self_attn.o_proj", lambda m: m.model.layers[2].self_attn.o_proj.weight),
    ("layers.2.mlp.up_proj", lambda m: m.model.layers[2].mlp.up_proj.weight),
    ("layers.3.mlp.down_proj", lambda m: m.model.layers[3].mlp.down_proj.weight),
    ("norm", lambda m: m.model.norm.weight),
    ("lm_head", lambda m: m.lm_head.weight),
]


@pytest.mark.parametrize(("operator", "weight"), FAULTS, ids=[name for name, _ in FAULTS])
def test_a_planted_weight_fault_is_located(qwen: LoadedModel, operator: str, weight: Any) -> None:
    rollout = rollout_of(qwen, 3)
    clean = training_of(qwen, rollout)
    parameter = weight(qwen.model)
    saved = parameter.clone()
    with torch.no_grad():
        parameter.mul_(1.01)
    try:
        faulty = training_of(qwen, rollout)
    finally:
        with torch.no_grad():
            parameter.copy_(saved)
    lengths = [len(ids) for ids in PROMPTS]
    # Both sides use the same code, so nothing differs before the fault, and bytes alone name it.
    found = first_divergent(compare_traces(clean.recorder.trace, faulty.recorder.trace, lengths))
    assert found is not None
    assert found.name == operator


@pytest.mark.parametrize("operator", ["rope", "attention"])
def test_a_planted_attention_fault_is_located(qwen: LoadedModel, operator: str) -> None:
    rollout = rollout_of(qwen, 3)
    clean = training_of(qwen, rollout)
    attention = qwen.model.model.layers[2].self_attn
    saved = attention.scaling
    if operator == "attention":
        attention.scaling = saved * 1.01
        handle = None
    else:
        # Shifts the positions in one layer only.
        def shift(module: Any, args: Any, kwargs: Any) -> Any:
            cos, sin = kwargs["position_embeddings"]
            return args, {**kwargs, "position_embeddings": (cos.roll(1, 1), sin.roll(1, 1))}

        handle = attention.register_forward_pre_hook(shift, with_kwargs=True)
    try:
        faulty = training_of(qwen, rollout)
    finally:
        attention.scaling = saved
        if handle is not None:
            handle.remove()
    lengths = [len(ids) for ids in PROMPTS]
    found = first_divergent(compare_traces(clean.recorder.trace, faulty.recorder.trace, lengths))
    assert found is not None
    assert found.name == {"rope": "layers.2.self_attn.rope_q", "attention": "layers.2.self_attn.attention"}[operator]


def test_probes_cover_every_operator_in_execution_order_and_change_nothing(qwen: LoadedModel) -> None:
    probed, plain = rollout_of(qwen, 3), rollout_of(qwen, 3, ProbePlan({}))
    assert [request.ids for request in probed.requests] == [request.ids for request in plain.requests]
    assert all(torch.equal(probed.logprob(i), plain.logprob(i)) for i in range(len(PROMPTS)))
    names = list(probed.recorder.trace.kinds)
    layer = "input_layernorm q_proj q_norm k_proj k_norm v_proj rope_q rope_k attention o_proj attn_residual "
    layer += "post_attention_layernorm gate_proj act_fn up_proj gate_up_mul down_proj mlp_residual"
    want = [f"{index}.{name}" for index in range(4) for name in layer.split()]
    assert [re.sub(r"layers\.(\d)\..*?(\w+)$", r"\1.\2", name) for name in names[2:-3]] == want
    assert names[:2] + names[-3:] == ["embed_tokens", "rotary_emb", "norm", "lm_head", "logprob"]
    assert list(plain.recorder.trace.kinds) == []


def test_probe_plan_keeps_beginnings_of_sequences_within_the_budget() -> None:
    assert plan_probes([10, 20], 100, 3000).limits == {0: 10, 1: 20}
    assert plan_probes([10] * 10, 100, 3000).limits == {0: 10, 3: 10, 6: 10}
    assert plan_probes([50], 100, 3000).limits == {0: 30}


def test_a_run_against_itself_is_aligned(qwen: LoadedModel) -> None:
    rollout = rollout_of(qwen, 3)
    logprobs = [rollout.logprob(index) for index in range(len(PROMPTS))]
    responses = [request.response for request in rollout.requests]
    lengths = [len(ids) for ids in PROMPTS]
    equal = [[True] * len(response) for response in responses]
    metrics = compare_logprobs(logprobs, logprobs, responses, lengths, equal)
    assert metrics.differing_tokens == metrics.max_abs_dlogp == metrics.kl_k3 == metrics.clip_fraction == 0
    assert metrics.worst is None
    trace = rollout.recorder.trace
    assert first_divergent(compare_traces(trace, trace, lengths)) is None


def test_metrics_against_plain_formulas() -> None:
    old = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -3.0, float("-inf")])]
    new = [torch.tensor([-1.0, -1.5]), torch.tensor([-0.5, -3.001, float("-inf")])]
    metrics = compare_logprobs(old, new, [[1, 2], [3, 4, 5]], [4, 6], [[True, False], [True, True, True]])
    ratio = np.array([0.0, 0.5, 0.0, np.float64(np.float32(-3.001)) + 3.0, 0.0])
    assert metrics.tokens == 5
    assert metrics.differing_tokens == 2
    assert metrics.max_abs_dlogp == 0.5
    assert metrics.mean_abs_dlogp == pytest.approx(np.abs(ratio).mean())
    assert metrics.kl_k1 == pytest.approx(-ratio.mean())
    assert metrics.kl_k3 == pytest.approx((np.exp(ratio) - 1 - ratio).mean())
    assert metrics.clip_fraction == 0.2
    assert metrics.zero_tokens == 3
    assert sum(metrics.histogram_negative) == sum(metrics.histogram_positive) == 1
    assert metrics.logits_equal_tokens == 4
    assert metrics.logprob_differs_on_equal_logits == 1
    assert metrics.worst is not None
    assert (metrics.worst.prompt, metrics.worst.position, metrics.worst.token) == (0, 5, 2)
    nan = compare_logprobs([torch.tensor([0.0])], [torch.tensor([float("nan")])], [[1]], [1], [[False]])
    assert nan.non_finite == nan.differing_tokens == nan.clip_fraction == 1


# ---- the command


def run_cli(arguments: list[str]) -> Any:
    return CliRunner().invoke(app, arguments)


def test_exit_status_0_when_aligned(directories: dict[str, Path]) -> None:
    for more in ([], ["--packing", "padded"], ["--packing", "padded", "--padding-side", "left"]):
        result = run_cli(command(directories, "exact", "--batch", "1,3", "--dtype", "bfloat16", *more))
        assert result.exit_code == 0, result.output
        assert "have the same bytes on both sides" in result.output
        head = re.search(r".*\bequal logits\b.*\btwo logprobs\b.*", result.output)
        assert head, "the table tells a log-probability's own drift from what its logits bring"
    result = run_cli(command(directories, "llama", "--batch", "1,3", "--dtype", "float32", "--atol", "1e-3"))
    assert result.exit_code == 0, result.output


def test_exit_status_1_and_report_on_drift(directories: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    faulty = tmp_path / "faulty"
    model = transformers.AutoModelForCausalLM.from_pretrained(directories["qwen3"])
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.05)
    model.save_pretrained(faulty)
    options = ["--dtype", "float32", "--batch", "1,3", "--report", str(out), "--training-model", str(faulty)]
    result = run_cli(command(directories, "qwen3", *options))
    assert result.exit_code == 1, result.output

    report = json.loads((out / "report.json").read_text())
    assert report["exit_status"] == 1
    assert report["aligned"] is False
    assert {"command_line", "versions", "hardware", "schema_version", "created"} <= set(report)
    assert report["versions"]["torch"] == torch.__version__
    assert report["hardware"]["cpu_count"] >= 1
    (comparison,) = report["comparisons"]
    assert [run["batch_size"] for run in comparison["runs"]] == [1, 3]
    assert {row["operator"]: row["served_by"] for row in comparison["operator_table"]}["logprob"] == "stock"
    assert comparison["across_batches"][0]["batch_b"] == 3
    for run in comparison["runs"]:
        assert [fault["name"] for fault in run["faults"]] == ["layers.2.mlp.up_proj"]
        assert run["first_divergent"]["layer"] is not None or run["first_divergent"]["name"] == "embed_tokens"
        wanted = {"max_abs_dlogp", "mean_abs_dlogp", "kl_k1", "kl_k3", "clip_fraction", "histogram_edges"}
        assert wanted <= set(run["metrics"])
        assert run["rollout_forwards"] == run["prefills"] + run["decode_steps"]
    assert any("layers.2.mlp.up_proj is at fault" in line for line in comparison["summary"])

    page = (out / "report.html").read_text()
    assert "layers.2.mlp.up_proj" in page
    assert page.count("<svg") == 3
    for outside in ("http:", "https:", "<script", "<link", "src=", "@import"):
        assert outside not in page
    assert set(re.findall(r'href="(.)', page)) <= {"#"}
    for title in ("equal logits", "two logprobs", "max |ratio - 1|"):
        assert title in page
    for name in ("overview", "drift_stock", "log_ratio_stock"):
        assert (out / f"{name}.svg").read_text().startswith("<?xml")
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--temperature", "0"], "--temperature 0.0: want a number > 0"),
        (["--temperature", "nan"], "--temperature nan"),
        (["--batch", "0"], "want positive sizes"),
        (["--batch", "a"], "--batch a: want sizes separated by commas"),
        (["--dtype", "int8"], "--dtype int8: want one of"),
        (["--device", "tpu"], "--device tpu"),
        (["--ops", "each"], "--ops each: want one of stock, sdpa, eager, flash, rk, both"),
        (["--rollout-ops", "both"], "--rollout-ops both: want one of stock, sdpa, eager, flash, rk"),
        (["--packing", "tight"], "--packing tight: want packed or padded"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--model", "/nowhere"], "model directory /nowhere does not exist"),
        (["--prompts", "/nowhere"], "cannot read prompts /nowhere"),
    ],
)
def test_exit_status_2_on_bad_input(directories: dict[str, Path], more: list[str], message: str) -> None:
    result = run_cli([*command(directories, "qwen3"), *more])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_exit_status_2_on_an_unusable_model(directories: dict[str, Path], tmp_path: Path) -> None:
    def status(name: str, config: dict[str, Any] | None, weights: bytes | None, file: str = "model.safetensors") -> str:
        directory = tmp_path / name
        directory.mkdir()
        if config is not None:
            (directory / "config.json").write_text(json.dumps(config))
        if weights is not None:
            (directory / file).write_bytes(weights)
        result = run_cli([*command(directories, "qwen3"), "--model", str(directory)])
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output
        return str(result.output)

    config = json.loads((directories["qwen3"] / "config.json").read_text())
    weights = (directories["qwen3"] / "model.safetensors").read_bytes()
    assert "config.json does not exist" in status("a", None, weights)
    assert "model_type 'gpt2' is not supported" in status("b", {**config, "model_type": "gpt2"}, weights)
    assert "holds no *.safetensors" in status("c", config, weights, "pytorch_model.bin")
    assert "cannot load the model" in status("d", config, weights[:1000])
    deeper = {**config, "num_hidden_layers": 5, "layer_types": None}
    assert "weights lack model.layers.4." in status("e", deeper, weights)
    assert "quantised" in status("f", {**config, "quantization_config": {"bits": 4}}, weights)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    window = status("h", {**config, "use_sliding_window": True, "sliding_window": 4}, weights)
    assert 'compare copies whose config.json has "sliding_window": null' in " ".join(window.split())
    assert "rope type 'dynamic'" in status("g", {**config, "rope_parameters": dynamic}, weights)


def test_no_progress_in_a_pipe(directories: dict[str, Path]) -> None:
    arguments = command(directories, "exact", "--batch", "2")
    process = subprocess.run(
        [sys.executable, "-m", "rl_kernel_native.consistency.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    assert "\r" not in process.stdout
    assert "\x1b" not in process.stdout


def test_progress_counts_every_token_once(qwen: LoadedModel) -> None:
    done: list[int] = []
    rollout_of(qwen, 3, advance=done.append)
    assert sum(done) == len(PROMPTS) * NEW
    with Progress(enabled=True).task("rollout", 3) as advance:
        advance(3)


def test_a_crash_is_not_reported_as_drift(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("rl_kernel_native.consistency.compare.run_compare", crash)
    assert run_cli(command(directories, "exact")).exit_code == 3


# ---- this library's operators


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize(("packing", "side"), [("packed", "right"), ("padded", "left"), ("padded", "right")])
def test_with_this_librarys_operators_no_token_differs(
    directories: dict[str, Path], family: str, packing: str, side: str
) -> None:
    loaded = load_model(directories[family], torch.bfloat16, torch.device("cpu"))
    settings = CompareSettings(
        seed=5,
        batch_sizes=(1, 3),
        max_new_tokens=NEW,
        rollout_ops="rk",
        training_ops="rk",
        packing=packing,
        padding_side=side,
    )
    result = run_compare(loaded, prompts_of(loaded), settings)
    assert result.aligned
    for run in result.runs:
        assert run.metrics.tokens > 0
        assert run.metrics.differing_tokens == 0
        assert run.metrics.logits_equal_tokens == run.metrics.tokens
        assert {drift.differing_tokens for drift in run.operators} == {0}
        # An operator that is not recorded on both sides would be missing above.
        assert {drift.kind for drift in run.operators} == {row.operator for row in result.operator_table}
    for cross in result.across_batches:
        assert cross.sequences_differing == cross.differing_tokens == 0
        assert cross.common_tokens == result.runs[0].metrics.tokens
    assert {row.operator for row in result.operator_table if row.served_by == "stock"} == {"add"}
    stock = run_compare(
        loaded, prompts_of(loaded), dataclasses.replace(settings, rollout_ops="stock", training_ops="stock")
    )
    assert not stock.aligned  # the model is unchanged


# ---- the demo


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_demo_shows_drift_and_names_where_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr(demo_model, "MAX_STEPS", 2)
    monkeypatch.setattr(demo, "_PROMPTS", 4)
    monkeypatch.setattr(demo, "_MAX_NEW_TOKENS", 16)
    program = str(tmp_path / "with space" / "rlk")
    monkeypatch.setattr(sys, "argv", [program, "demo"])
    result = run_cli(["demo", "--report", str(tmp_path), "--device", device, "--minutes", "0.5"])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    names = [comparison["settings"]["rollout_ops"] for comparison in report["comparisons"]]
    assert names == ["stock", "rk"]
    for run in report["comparisons"][0]["runs"]:
        assert run["aligned"] is False
        assert run["first_divergent"]["name"]
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert re.match(r"stock: \d+ of \d+ tokens differ", result.output.splitlines()[-1])
    command = re.search(r"again:  (.*)", result.output)
    assert command is not None
    rlk, *arguments = shlex.split(command.group(1))
    assert rlk == program
    # The command compares the last operators of the demo: this library's align, torch's do not.
    again = run_cli([*arguments, "--max-new-tokens", "4", "--device", device])
    assert again.exit_code == 0, again.output
    for comparison in report["comparisons"][1:]:
        assert comparison["aligned"] is True
        assert {run["metrics"]["differing_tokens"] for run in comparison["runs"]} == {0}


def test_without_the_rlk_command_the_demo_names_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pytest", "tests"])
    assert demo._program() == ["rlk"]


def test_the_verdict_and_the_news(qwen: LoadedModel) -> None:
    settings = CompareSettings(seed=5, batch_sizes=(3,), max_new_tokens=NEW)
    found = run_compare(qwen, prompts_of(qwen), settings)
    (run,) = found.runs

    def changed(ops: str = "stock", **metrics: Any) -> Any:
        figures = {"tokens": 8, "differing_tokens": 5, "max_abs_ratio": 0.25, **metrics}
        new = dataclasses.replace(run, metrics=dataclasses.replace(run.metrics, **figures), aligned=False)
        chosen = dataclasses.replace(settings, rollout_ops=ops, training_ops=ops)
        aligned = not figures["differing_tokens"]
        return dataclasses.replace(found, settings=chosen, runs=[new, new], aligned=aligned)

    drift, none = changed(), changed("rk", differing_tokens=0)
    assert str(drift).startswith("rounding, no fault: 10 of 16 tokens differ, max |ratio - 1| 0.25; it begins in ")
    below = str(changed("rk"))  # no rounding lies between two sides of this library
    assert below.startswith("weights or settings differ, by less than rounding: 10 of 16 tokens differ"), below
    assert str(none) == "aligned: all 16 log-probabilities have the same bytes on both sides."
    assert news([drift, none]) == "stock: 10 of 16 tokens differ; rl_kernel_native: 0 of 16"
    mixed = dataclasses.replace(drift, settings=dataclasses.replace(settings, rollout_ops="eager"))
    assert news([mixed]) == "eager against stock: 10 of 16 tokens differ"
    across = dataclasses.replace(none, aligned=False)
    assert str(across).startswith("drift across batch sizes alone")
