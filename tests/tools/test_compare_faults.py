"""Planted faults: `rk.compare` and `rlk compare` name the operator, and never call rounding a fault."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="rlk compare needs torch")
transformers = pytest.importorskip("transformers", reason="rlk compare needs transformers")
for _name in ("typer", "rich", "matplotlib"):
    pytest.importorskip(_name, reason="rlk compare needs it")

from typer.testing import CliRunner  # noqa: E402

import rl_kernel_native as rk  # noqa: E402
from rl_kernel_native.consistency import cli  # noqa: E402
from rl_kernel_native.consistency.cli import app  # noqa: E402
from rl_kernel_native.consistency.errors import BadInput, options_spelled  # noqa: E402
from rl_kernel_native.consistency.explain import explain  # noqa: E402
from rl_kernel_native.consistency.model import in_memory  # noqa: E402
from rl_kernel_native.consistency.page import render_page  # noqa: E402
from rl_kernel_native.consistency.recorded import compare_recorded, load_records  # noqa: E402

PROMPTS = [[96, 3, 4, 5, 6, 7, 8], [96, 9, 11, 12]]
NEW = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Models this small gain nothing from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(family: str = "qwen3", **changes: Any) -> Any:
    """The same random weights in every call. Queries and keys are as large as in a trained model."""
    shape = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "bos_token_id": 96,
        "eos_token_id": 97,
        "pad_token_id": 98,
        "tie_word_embeddings": False,
        **changes,
    }
    config_type, model_type = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }[family]
    if family == "qwen2":
        del shape["head_dim"]
    torch.manual_seed(1)
    model = model_type(config_type(**shape))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers initialises them to zeros, which would hide a missing bias
            torch.nn.init.normal_(parameter, std=0.1)
        # weights start as ones, which would hide a swap of two
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    return model


def scaled(path: str, factor: float) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        with torch.no_grad():
            model.get_parameter(path).mul_(factor)

    return plant


def epsilon(path: str, value: float) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        model.get_submodule(path).variance_epsilon = value

    return plant


def swapped_rope(model: Any) -> None:
    """One layer rotates by (sin, cos)."""

    def swap(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "position_embeddings": kwargs["position_embeddings"][::-1]}

    model.model.layers[1].self_attn.register_forward_pre_hook(swap, with_kwargs=True)


def missing_bias(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias.zero_()


def dropped_bias(model: Any) -> None:
    model.model.layers[2].self_attn.q_proj.bias = None


def norms_swapped(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_norm, attention.k_norm = attention.k_norm, attention.q_norm


def untied_head(model: Any) -> None:
    torch.manual_seed(7)
    weight = model.lm_head.weight.detach()
    model.lm_head.weight = torch.nn.Parameter(weight + 0.03 * weight.std() * torch.randn_like(weight))


def softmax_scale(model: Any) -> None:
    model.model.layers[2].self_attn.scaling *= 2


def other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()


def gate_and_up_swapped(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def residual_left_out(model: Any) -> None:
    def forget(module: Any, args: Any, out: Any) -> Any:
        return out - args[0]

    model.model.layers[2].register_forward_hook(forget)


def stale_layer(model: Any) -> None:
    with torch.no_grad():
        torch.manual_seed(7)
        weight = model.model.layers[2].self_attn.q_proj.weight
        weight.add_(0.03 * weight.std() * torch.randn_like(weight))


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault planted into the training side's model, and the operator that must be named first."""

    name: str
    operator: str
    plant: Callable[[Any], None] = lambda model: None
    family: str = "qwen3"
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    trainer_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


FAULTS = [
    Fault("weight 1 % off", "layers.1.mlp.down_proj", scaled("model.layers.1.mlp.down_proj.weight", 1.01)),
    Fault("norm's weight 1 % off", "norm", scaled("model.norm.weight", 1.01)),
    Fault("head 1 % off", "lm_head", scaled("lm_head.weight", 1.01)),
    Fault("doubled projection", "layers.0.self_attn.o_proj", scaled("model.layers.0.self_attn.o_proj.weight", 2.0)),
    Fault("wrong eps of a norm", "layers.2.post_attention_layernorm",
          epsilon("model.layers.2.post_attention_layernorm", 1.0)),
    # With embeddings of usual size, the other common epsilon changes the result by 1 %.
    Fault("wrong eps of the model", "layers.0.input_layernorm",
          config={"initializer_range": 0.02, "rms_norm_eps": 1e-6}, trainer_config={"rms_norm_eps": 1e-5}),
    Fault("swapped rope", "layers.1.self_attn.rope_q", swapped_rope),
    Fault("wrong rope theta", "rotary_emb", config={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
          trainer_config={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    Fault("missing bias", "layers.0.self_attn.k_proj", missing_bias, family="qwen2"),
    Fault("temperature on one side", "logprob", options={"training_temperature": 0.7}),
    Fault("embedding scaled", "embed_tokens", scaled("model.embed_tokens.weight", 32**0.5)),
    Fault("another softmax scale", "layers.2.self_attn.attention", softmax_scale),
    Fault("another activation", "layers.0.mlp.act_fn", other_activation, family="llama"),
    Fault("gate and up swapped", "layers.1.mlp.gate_proj", gate_and_up_swapped),
    Fault("norm of queries halved", "layers.1.self_attn.q_norm",
          scaled("model.layers.1.self_attn.q_norm.weight", 0.5)),
    Fault("residual left out", "layers.2.mlp_residual", residual_left_out),
    Fault("dropped bias", "layers.2.self_attn.q_proj", dropped_bias, family="qwen2"),
    Fault("norms of queries and keys swapped", "layers.1.self_attn.q_norm", norms_swapped),
    Fault("tied head untied", "lm_head", untied_head, config={"tie_word_embeddings": True}),
    Fault("theta of another Llama", "rotary_emb", family="llama",
          config={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
          trainer_config={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    Fault("temperature 1 % off", "logprob", options={"training_temperature": 0.99}),
    Fault("garbled weight", "layers.2.self_attn.q_proj", stale_layer),
]  # fmt: skip


# One bfloat16 rounding is 0.4 %, so faults of about 1 % are the hard faults.
IN_BFLOAT16 = (
    "weight 1 % off", "norm's weight 1 % off", "head 1 % off", "wrong eps of the model", "garbled weight",
    "tied head untied", "temperature 1 % off",
)  # fmt: skip
CASES = [(fault, "float32") for fault in FAULTS]
CASES += [(fault, "bfloat16") for fault in FAULTS if fault.name in IN_BFLOAT16]


@pytest.mark.parametrize(("fault", "dtype"), CASES, ids=[f"{fault.name}, {dtype}" for fault, dtype in CASES])
def test_a_planted_fault_is_named_first(fault: Fault, dtype: str) -> None:
    rollout = tiny(fault.family, **fault.config).to(DTYPES[dtype])
    trainer = tiny(fault.family, **{**fault.config, **fault.trainer_config}).to(DTYPES[dtype])
    fault.plant(trainer)
    found = rk.compare(rollout, trainer, PROMPTS, max_new_tokens=NEW, **fault.options)
    assert found.faults, str(found)
    assert found.faults[0].name == fault.operator, [(x.name, x.error, x.factor) for x in found.faults]
    assert str(found).startswith(f"fault: {fault.operator}, ")
    assert not found.aligned


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rollout_ops", "training_ops"), [("stock", "stock"), ("eager", "sdpa"), ("rk", "eager"), ("stock", "rk")]
)
def test_rounding_is_no_fault(rollout_ops: str, training_ops: str, dtype: str) -> None:
    model = tiny().to(DTYPES[dtype]).train()
    attention = model.config._attn_implementation
    found = rk.compare(
        model,
        None,
        torch.tensor([[96, 3, 4, 5]]),
        rollout_ops=rollout_ops,
        training_ops=training_ops,
        max_new_tokens=12,
    )
    assert not found.faults
    assert str(found).startswith(("rounding, no fault:", "aligned:"))
    assert model.training, "the caller's model is as it was"
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("factor", [1.005, 2.0, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_is_named_only_where_it_explains_the_error(factor: float | None, dtype: str) -> None:
    """Wrong weights have a component along the right weights. The report once named this component as a factor of the
    weights."""
    rollout, trainer = tiny(), tiny()
    plant = scaled("model.layers.1.mlp.down_proj.weight", factor) if factor else gate_and_up_swapped
    plant(trainer)
    found = str(rk.compare(*(model.to(DTYPES[dtype]) for model in (rollout, trainer)), PROMPTS, max_new_tokens=NEW))
    named = [float(number) for number in re.findall(r"outputs are ([\d.]+) times", found)]
    assert named == ([pytest.approx(factor, abs=1e-3)] if factor else []), found


def test_a_verdict_of_rounding_says_what_finds_smaller_faults() -> None:
    """The advice is given for two models of equal weights. A single model cannot have a fault of weights."""
    words = "with rollout_ops='rk' and training_ops='rk' equal weights give equal bytes."
    for other, told in ((tiny(), True), (None, False)):
        found = rk.compare(tiny(), other, PROMPTS, rollout_ops="sdpa", training_ops="eager", max_new_tokens=NEW)
        assert str(found).startswith("rounding, no fault")
        assert any(line.endswith(words) for line in explain(found)) == told


OPS = [("stock", "rk"), ("sdpa", "eager"), ("eager", "sdpa"), ("rk", "stock"), ("rk", "rk")]


@pytest.mark.parametrize("options", [{}, *({"rollout_ops": a, "training_ops": b} for a, b in OPS)], ids=str)
@pytest.mark.parametrize("sides", ["both", "rollout", "trainer"])
def test_patched_models_are_compared_as_their_unpatched_twins(sides: str, options: dict[str, str]) -> None:
    models, plain = {"rollout": tiny(), "trainer": tiny()}, {"rollout": tiny(), "trainer": tiny()}
    patched = [model for side, model in models.items() if sides in ("both", side)]
    for model in patched:
        rk.patch_model(model)
    attention = [model.config._attn_implementation for model in patched]
    rollout_ops, training_ops = ("rk" if sides in ("both", side) else "stock" for side in models)
    named = {"rollout_ops": rollout_ops, "training_ops": training_ops, **options}
    found = rk.compare(*models.values(), PROMPTS, max_new_tokens=NEW, **options)
    want = rk.compare(*plain.values(), PROMPTS, max_new_tokens=NEW, **named)
    assert {key: getattr(found.settings, key) for key in named} == named
    assert [run.metrics for run in found.runs] == [run.metrics for run in want.runs]
    assert found.aligned == (named["rollout_ops"] == named["training_ops"] == "rk")
    for model in patched:
        assert not rk.status(model).unproved, "the caller's model stays patched"
        assert sum(rk.status(model).values()) > 0
    assert [model.config._attn_implementation for model in patched] == attention


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}], ids=str)
def test_a_forward_on_the_patched_instance_does_not_run_the_original(options: dict[str, str]) -> None:
    """TRL's GRPOTrainer puts such a forward on its model."""
    want = rk.compare(tiny(), None, PROMPTS, max_new_tokens=NEW, rollout_ops="rk", **options)
    model = tiny()
    original = model.forward
    model.forward = types.MethodType(lambda self, *args, **more: original(*args, **more), model)
    rk.patch_model(model)
    found = rk.compare(model, None, PROMPTS, max_new_tokens=NEW, **options)
    assert found.aligned
    assert [run.metrics for run in found.runs] == [run.metrics for run in want.runs]
    assert "forward" in model.__dict__, "the caller's model is as it was"


def test_a_comparison_names_operators_by_their_public_names() -> None:
    """As many names as a reader can look up; "mul" and "add" are no operators of this library."""
    operators = "embedding, rope, rms_norm, linear, attention, silu_mul, logprob"
    sums = "torch computes residual sums, which have the same bits everywhere."
    for ops, words in {
        ("rk", "rk"): f"rl_kernel_native serves {operators}; {sums}",
        ("rk", "eager"): f"rl_kernel_native serves one side's {operators}, and torch the other's; {sums}",
        ("sdpa", "eager"): "All operators are torch's and transformers' own (sdpa against eager).",
    }.items():
        found = rk.compare(tiny(), None, [[96]], rollout_ops=ops[0], training_ops=ops[1], max_new_tokens=1)
        assert explain(found)[1] == words
    assert all(hasattr(rk, name) for name in operators.split(", "))


def test_the_page_says_what_the_output_begins_with_and_how_it_ends(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
    tiny().save_pretrained(tmp_path)
    (tmp_path / "prompts").write_text('{"prompt_ids": [96, 3]}\n')
    command = ["compare", "--model", str(tmp_path), "--prompts", str(tmp_path / "prompts"), "--device", "cpu"]
    done = CliRunner().invoke(app, [*command, "--ops", "rk", "--max-new-tokens", "2"])
    first, second = done.stdout.splitlines()[:2]
    assert first == f"model {tmp_path}, float32, cpu"
    assert second == "rk: aligned: all 4 log-probabilities have the same bytes on both sides."
    words = re.search(r"The first line [^.]*\.", page.replace("\n", " "))
    assert words is not None
    assert re.search(r"first line.* model.* dtype.* device.* second line.* verdict", words[0]), words[0]
    for status in (0, 1, cli.EXIT_BAD_INPUT, cli.EXIT_FAILURE):
        assert f"\n| {status} | " in page
    recorded = {drift.kind: drift.name.partition("layers.1.")[2] for drift in rk.compare(
        tiny(), None, [[96, 3]], max_new_tokens=1).runs[0].operators if drift.layer == 1}  # fmt: skip
    for kind in ("attention", "activation", "mul", "add"):
        assert f"`{recorded[kind]}`" in page


def test_a_fault_of_a_patched_model_is_named() -> None:
    trainer = tiny()
    rk.patch_model(trainer)
    scaled("model.layers.1.mlp.down_proj.weight", 1.5)(trainer)
    found = rk.compare(rollout := tiny(), trainer, PROMPTS, max_new_tokens=NEW, rollout_ops="rk")
    assert found.faults[0].name == "layers.1.mlp.down_proj"
    rk.patch_model(rollout.model)
    found = rk.compare(rollout, None, PROMPTS, max_new_tokens=NEW)
    assert (found.settings.label, found.aligned) == ("rk", True)


def test_a_patch_that_cannot_be_taken_off_names_the_model_and_the_cure() -> None:
    part, wrapped, held = tiny(), tiny(), torch.nn.ModuleList([tiny()])
    rk.patch_model(part, ops=("linear", "rope"))
    cure = r'model_b: expected .* serves whole, .* got .* ops=linear, rope; pass training_ops="rk" .*unpatch_model'
    with pytest.raises(BadInput, match=cure):
        rk.compare(tiny(), part, PROMPTS)
    assert rk.compare(part, None, PROMPTS[:1], max_new_tokens=1, rollout_ops="rk").aligned
    rk.patch_model(held)
    with pytest.raises(BadInput, match=r"model_a: expected .* got a part of that module; call rk.unpatch_model on"):
        rk.compare(held[0], None, PROMPTS)
    rk.patch_model(wrapped)
    norm, forward = wrapped.model.norm, wrapped.model.norm.forward
    norm.forward = lambda *arguments: forward(*arguments)
    with pytest.raises(
        BadInput, match=r"model_a: it is patched.*the forward of model.norm was wrapped after the patch; undo"
    ):
        rk.compare(wrapped, None, PROMPTS)


def test_an_operator_is_judged_by_itself() -> None:
    """Operators after a fault get other inputs in their own run. On equal inputs only the faulty one differs."""
    trainer = tiny()
    scaled("model.layers.0.self_attn.v_proj.weight", 1.5)(trainer)
    found = rk.compare(tiny(), trainer, PROMPTS, max_new_tokens=NEW)
    assert [fault.name for fault in found.faults] == ["layers.0.self_attn.v_proj"]
    (fault,) = found.faults
    assert fault.factor == pytest.approx(1.5, rel=1e-5)
    for run in found.runs:
        after = [drift for drift in run.operators if drift.name.startswith("layers.2")]
        assert all(drift.differing_tokens == drift.tokens for drift in after if drift.kind == "linear")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: rk.compare(model), "ids: expected prompts"),
        (lambda model: rk.compare(model, None, []), "ids: expected at least one prompt"),
        (lambda model: rk.compare(model, None, [[]]), r"ids\[0\]: the prompt is empty"),
        (lambda model: rk.compare(model, None, [["a"]]), r"ids\[0\]: expected a list of token ids"),
        (lambda model: rk.compare(model, None, [[1000]]), "outside the vocabulary of 99"),
        (lambda model: rk.compare(torch.nn.Linear(2, 2), None, [[1]]), "model_a: expected a causal language model"),
        (lambda model: rk.compare(model, tiny(vocab_size=120), [[1]]), "model_b .*expected the shape of model_a"),
        (lambda model: rk.compare(model, tiny().bfloat16(), [[1]]), "model_b .*expected model_a.*float32"),
        (lambda model: rk.compare(model, tiny(bos_token_id=1), [[1]]), "bos token: .* set bos_token_id alike"),
        (
            lambda model: rk.compare(model, tiny().bfloat16(), [[1]]),
            "got torch.bfloat16; give dtype='float32' to compare both in that dtype$",
        ),
        (lambda model: rk.compare(model, None, 3), "ids: expected prompts, lists of token ids, got int"),
        *(
            (lambda model, bad=bad: rk.compare(model, None, [[1]], **bad), f"^{next(iter(bad))}=.{{,200}}: want ")
            for name in ("dtype", "device", "packing", "rollout_ops")
            for bad in ({name: 10**5000}, {name: "y" * 5000}, {name: [10**5000]})
        ),
        (lambda model: rk.compare(model, None, [[1, 10**5000]]), "token id an integer of 16610 bits at position 1"),
        (lambda model: rk.compare("y" * 5000, None, [[1]]), "^model_a='y*.*: File name too long$"),
        (lambda model: rk.compare(model, None, [[1, 98]]), "pad from position 1; give the prompt's own tokens without"),
        (lambda model: rk.compare(model.double(), None, [[1]], rollout_ops="rk"), "='rk': .*; give dtype='float32'"),
        (lambda model: rk.compare(model, None, [[1]], report="/dev/null/x"), "report='/dev/null/x': Not a directory"),
        (lambda model: rk.compare(model, "/dev/null", [[1]]), "model_b='/dev/null'|model directory /dev/null does not"),
        *(
            (
                lambda model, options=options: rk.compare(model, None, [[1]], **options),
                "^" + re.escape("{}={!r}: {}".format(*next(iter(options.items())), words)),
            )
            for options, words in (
                ({"rollout_ops": "fast"}, "want one of stock, sdpa, eager, flash, rk"),
                ({"training_ops": "fast"}, "want one of stock, sdpa, eager, flash, rk"),
                ({"max_new_tokens": 0}, "want at least 1"),
                ({"batch_sizes": (1, 0)}, "want positive sizes"),
                ({"batch_sizes": ()}, "want at least one batch size"),
                ({"batch_sizes": (2, 2)}, "a size is given twice"),
                ({"seed": -1}, "want 0 <= seed < 2**64"),
                ({"temperature": 0.0}, "want a number > 0"),
                ({"training_temperature": -1.0}, "want a number > 0"),
                ({"fault_tolerance": 0.0}, "want a number > 0"),
                ({"packing": "tight"}, "want packed or padded"),
                ({"dtype": "int8"}, "want one of bfloat16, float16, float32, float64"),
                ({"device": "tpu"}, "want auto, cpu, cuda or cuda:N"),
                ({"device": "meta"}, "want auto, cpu, cuda or cuda:N"),
            )
        ),
    ],
)
def test_bad_input_names_its_cure_in_the_words_of_python(call: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message) as found:
        call(tiny())
    assert "--" not in str(found.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": "4"}, "max_new_tokens: expected an integer, got str"),
        ({"batch_sizes": 2}, "batch_sizes: expected a sequence of integers, got int"),
        ({"batch_sizes": (1.5,)}, "batch_sizes: expected an integer, got float"),
        ({"temperature": "1"}, "temperature: expected a number, got str"),
        ({"seed": None}, "seed: expected an integer, got NoneType"),
    ],
)
def test_an_argument_of_another_type_is_named(options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        rk.compare(tiny(), None, [[1]], **options)


def test_the_command_line_speaks_of_options(tmp_path: Path) -> None:
    for name, dtype in DTYPES.items():
        tiny().to(dtype).save_pretrained(tmp_path / name)
    (tmp_path / "prompts").write_text('{"prompt_ids": [1, 2]}\n')
    command = ["compare", "--device", "cpu", "--prompts", str(tmp_path / "prompts"), "--max-new-tokens"]
    both = ["--model", str(tmp_path / "float32"), "--training-model", str(tmp_path / "bfloat16")]
    said = CliRunner().invoke(app, [*command, "2", *both])
    assert (said.exit_code, said.output.splitlines()[-1].partition("; ")[2]) == (
        2, "give --dtype float32 to compare both in that dtype",
    )  # fmt: skip
    assert "error: --max-new-tokens 0: want at least 1\n" in CliRunner().invoke(app, [*command, "0", *both]).output
    file = ["--training-model", str(tmp_path / "prompts")]
    assert "error: --training-model /" in CliRunner().invoke(app, [*command, "2", *both, *file]).output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", torch.float32])
def test_a_dtype_is_that_of_both_sides(dtype: Any) -> None:
    rollout, trainer = tiny(), tiny().bfloat16()
    rk.patch_model(trainer)
    found = rk.compare(rollout, trainer, PROMPTS, max_new_tokens=NEW, dtype=dtype, rollout_ops="rk")
    name = str(dtype).removeprefix("torch.")
    assert found.model["dtype"] == name
    assert found.aligned == (name == "bfloat16"), "bfloat16 weights are the rounded ones of the other side"
    assert (rollout.lm_head.weight.dtype, trainer.lm_head.weight.dtype) == (torch.float32, torch.bfloat16)
    assert not rk.status(trainer).unproved


# ---- the command


def test_the_command_names_the_fault_of_another_checkpoint(tmp_path: Path) -> None:
    model, trainer = tiny().bfloat16(), tiny().bfloat16()
    scaled("model.layers.1.mlp.up_proj.weight", 1.01)(trainer)
    model.save_pretrained(tmp_path / "rollout")
    trainer.save_pretrained(tmp_path / "trainer")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in PROMPTS))
    out = tmp_path / "report"
    arguments = ["compare", "--model", str(tmp_path / "rollout"), "--training-model", str(tmp_path / "trainer")]
    arguments += ["--prompts", str(prompts), "--max-new-tokens", str(NEW), "--device", "cpu", "--report", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    assert "bfloat16, cpu" in lines[0], "the checkpoint's dtype, and where it ran"
    assert "fault: layers.1.mlp.up_proj" in lines[1], "the verdict comes first"
    assert lines[-1].endswith("tokens differ; fault: layers.1.mlp.up_proj"), "the last line is the summary"
    (comparison,) = json.loads((out / "report.json").read_text())["comparisons"]
    assert comparison["verdict"].startswith("fault: layers.1.mlp.up_proj")
    assert comparison["runs"][0]["faults"][0]["name"] == "layers.1.mlp.up_proj"
    page = (out / "report.html").read_text()
    assert "FAULT: layers.1.mlp.up_proj" in page, "the chart names it on its axis"
    assert page.index("fault: layers.1.mlp.up_proj") < page.index("Settings")


def test_a_model_that_is_not_there_names_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    for name, message in [
        (str(file), f"got a file; give {tmp_path}"),
        ("org/nothing-of-that-name", "hf download org/nothing-of-that-name --local-dir DIR"),
        ("/nowhere", "or a Hub id such as"),
    ]:
        result = CliRunner().invoke(app, ["compare", "--model", name, "--prompts", str(file)])
        assert result.exit_code == 2
        assert message in result.output.replace("\n", "")


# ---- log-probabilities that an engine recorded


def recorded_file(tmp_path: Path, model: Any, temperature: float, dialect: str) -> Path:
    """A dump of two responses in an engine's format, computed in another order than the trainer's packed forward."""
    lines = []
    for ids in ([96, 3, 4, 5, 6, 7, 8, 9], [96, 9, 11, 12, 13]):
        prompt, response = ids[:2], ids[2:]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, 1:-1].float() / temperature
        logprobs = torch.log_softmax(logits, -1)[torch.arange(len(response)), response].tolist()
        lines.append(
            {
                "rk": {"prompt_ids": prompt, "response_ids": response, "logprobs": logprobs},
                "vllm": {
                    "prompt_token_ids": prompt,
                    "outputs": [
                        {
                            "token_ids": response,
                            "logprobs": [{str(i): {"logprob": x}} for i, x in zip(response, logprobs, strict=True)],
                        }
                    ],
                },
                "sglang": {
                    "input_ids": prompt,
                    "meta_info": {
                        "output_token_logprobs": [[x, i, None] for i, x in zip(response, logprobs, strict=True)]
                    },
                },
                "verl": {"prompts": prompt, "responses": response, "rollout_log_probs": logprobs},
            }[dialect]
        )
    path = tmp_path / f"{dialect}-{temperature}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model, directory = tiny(), tmp_path_factory.mktemp("saved")
    model.save_pretrained(directory)
    return model, directory


def test_a_python_caller_meets_arguments_and_a_command_line_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page, the explanation and the errors about an engine's records name settings as the caller gives them."""
    monkeypatch.setattr(sys, "argv", ["train.py"])  # the page shows the command, and pytest's has options
    rollout, trainer = tiny(), tiny()
    scaled("model.layers.1.mlp.down_proj.weight", 1.0001)(trainer)
    found = rk.compare(rollout, trainer, PROMPTS, max_new_tokens=NEW, atol=9.0, fault_tolerance=1.0, report=tmp_path)
    unseen = dataclasses.replace(found.runs[0], first_divergent=None, aligned=False)
    scaled("model.layers.1.mlp.down_proj.weight", 1.5)(trainer)
    with in_memory(rollout, "model_a") as loaded:
        records = load_records(recorded_file(tmp_path, trainer, 1.0, "rk"), loaded.vocab_size)
        recorded = compare_recorded(loaded, records)

    def sentences() -> str:
        page = render_page(json.loads((tmp_path / "report.json").read_text()), [found], {"overview": ""})
        seen = re.sub(r"<style>.*?</style>|<[^>]*>", "", page, flags=re.S)
        return "\n".join([seen, *explain(found), *explain(dataclasses.replace(found, runs=[unseen])), str(recorded)])

    by_options = {"atol": "--atol", "atol=9.0": "--atol 9.0", "probe_mb": "--probe-mb", "model_b": "--training-model"}
    assert all(name in sentences() for name in by_options)
    assert not re.search(r"--[a-z]", sentences())
    with options_spelled():
        assert all(option in sentences() for option in by_options.values())


@pytest.mark.parametrize("dialect", ["rk", "vllm", "sglang", "verl"])
def test_what_an_engine_recorded_is_compared_with_a_training_forward(
    saved: tuple[Any, Path], tmp_path: Path, dialect: str
) -> None:
    model, directory = saved
    path = recorded_file(tmp_path, model, 1.0, dialect)
    result = CliRunner().invoke(app, ["compare", "--model", str(directory), "--recorded", str(path)])
    assert "rounding, no fault" in result.output or "aligned" in result.output, result.output
    assert "of 9 tokens differ" in result.output.splitlines()[-1]


def test_a_temperature_of_the_engine_alone_is_named(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, directory = saved
    path = recorded_file(tmp_path, model, 0.7, "rk")
    result = CliRunner().invoke(app, ["compare", "--model", str(directory), "--recorded", str(path)])
    assert result.exit_code == 1, result.output
    assert "fault: temperature: the recorded log-probabilities fit 0.7" in result.output
    right = ["compare", "--model", str(directory), "--recorded", str(path), "--temperature", "0.7"]
    assert "no fault" in CliRunner().invoke(app, right).output


@pytest.mark.parametrize(("shift", "which"), [(1, "after"), (-1, "before")])
def test_log_probabilities_beside_their_neighbours_are_named(
    saved: tuple[Any, Path], tmp_path: Path, shift: int, which: str
) -> None:
    """The usual off-by-one error of a recorder. The report once named it as other weights."""
    model, directory = saved
    path = recorded_file(tmp_path, model, 1.0, "rk")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["logprobs"] = line["logprobs"][shift:] + line["logprobs"][:shift]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = CliRunner().invoke(app, ["compare", "--model", str(directory), "--recorded", str(path)])
    assert result.exit_code == 1, result.output
    assert f"fault: positions: each recorded log-probability fits the token {which} its own" in result.output
    assert result.output.splitlines()[-1].endswith("; fault: positions")


def test_log_probabilities_stamped_as_of_another_kind_are_refused(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, directory = saved
    path = recorded_file(tmp_path, model, 1.0, "rk")
    lines = path.read_text().splitlines()
    for stamp, message in (
        ({"logits_dtype": "float32", "top_p": 0.9}, ":1: semantics: expected log-probabilities of the same kind"),
        ({"logits_dtype": "float32", "top_q": 0.9}, "logprob_semantics: semantics: expected fields of"),
    ):
        path.write_text("".join(json.dumps(json.loads(x) | {"logprob_semantics": stamp}) + "\n" for x in lines))
        result = CliRunner().invoke(app, ["compare", "--model", str(directory), "--recorded", str(path)])
        assert result.exit_code != 0
        assert message in " ".join(result.output.split()), result.output


def test_other_weights_than_the_engines_are_told_from_rounding(saved: tuple[Any, Path], tmp_path: Path) -> None:
    _, directory = saved
    other = tiny()
    scaled("model.layers.1.mlp.down_proj.weight", 1.5)(other)
    path = recorded_file(tmp_path, other, 1.0, "verl")
    result = CliRunner().invoke(app, ["compare", "--model", str(directory), "--recorded", str(path)])
    assert result.exit_code == 1
    assert "fault: larger than rounding to float32 explains" in result.output
    assert "--training-model" in result.output


def test_stock_and_rk_are_compared_beside_each_other(saved: tuple[Any, Path], tmp_path: Path) -> None:
    """The last line is the summary, and one page shows both."""
    (tmp_path / "prompts").write_text('{"prompt_ids": [96, 3, 4, 5]}\n')
    command = ["compare", "--model", str(saved[1]), "--prompts", str(tmp_path / "prompts"), "--device", "cpu"]
    done = CliRunner().invoke(app, [*command, "--ops", "both", "--max-new-tokens", "8", "--report", str(tmp_path)])
    assert done.exit_code == 1, done.output
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"stock: [1-9]\d* of 16 tokens differ; rl_kernel_native: 0 of 16", last)
    found = json.loads((tmp_path / "report.json").read_text())["comparisons"]
    assert [x["settings"]["training_ops"] for x in found] == ["stock", "rk"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ops", "both", "--training-ops", "rk"], "--ops both: want no --rollout-ops, --training-ops or --recorded"),
        (["--ops", "both", "--recorded", "file"], "--ops both: want no --rollout-ops, --training-ops or --recorded"),
        (["--ops", "torch"], "--ops torch: want one of stock, sdpa, eager, flash, rk, both"),
    ],
)
def test_operators_that_no_comparison_has(saved: tuple[Any, Path], options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["compare", "--model", str(saved[1]), *options])
    assert (done.exit_code, message in done.output.replace("\n", " ")) == (2, True), done.output


def test_prompts_or_a_record_has_to_be_given(saved: tuple[Any, Path]) -> None:
    result = CliRunner().invoke(app, ["compare", "--model", str(saved[1])])
    assert result.exit_code == 2
    assert "give --prompts FILE to roll out, or --recorded FILE" in result.output
