"""rk.patch_model and rk.unpatch_model on small models of transformers."""

from __future__ import annotations

import copy
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="patch_model patches models of torch")
transformers = pytest.importorskip("transformers", reason="patch_model patches models of transformers")

import rl_kernel_native as rk  # noqa: E402
from patch_cases import IDS, logits_of, state_of, tiny  # noqa: E402
from rl_kernel_native.integrations import unchanged  # noqa: E402
from rl_kernel_native.integrations.patch import OPS  # noqa: E402


@pytest.fixture(params=["Qwen3", "Llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@pytest.fixture
def compiler() -> Any:
    """Gives torch.compile an empty cache of models, since it compiles only a few."""
    torch._dynamo.reset()
    return torch.compile


def test_unpatching_restores_the_model_bit_for_bit(model: Any) -> None:
    before, implementation = logits_of(model), model.config._attn_implementation
    attributes = state_of(model)
    counts = rk.patch_model(model)
    assert set(counts) == set(OPS)
    assert all(counts.values())
    patched = logits_of(model)
    assert not torch.equal(patched, before)  # only the linears are replaced
    assert torch.allclose(patched.float(), before.float(), atol=0.05)
    rk.unpatch_model(model)
    assert torch.equal(logits_of(model), before)
    assert model.config._attn_implementation == implementation
    assert {n: set(d) for n, d in state_of(model).items()} == {n: set(d) for n, d in attributes.items()}


def test_it_counts_what_it_serves(model: Any) -> None:
    norms = 4 * 2 + 1 if model.config.model_type == "qwen3" else 2 * 2 + 1
    assert rk.patch_model(model) == {
        "embedding": 1, "linear": 7 * 2 + 1, "rms_norm": norms, "rope": 2, "attention": 2, "silu_mul": 2,
    }  # fmt: skip


@pytest.mark.parametrize("op", ["embedding", "rope", "silu_mul", "rms_norm"])
def test_what_rounds_where_is_transformers(model: Any, op: str) -> None:
    """In bfloat16 these operators give the results of transformers' modules. Functions and sums in float32 differ
    in the last bits, but rounding to 8 bits almost never shows it; on this model it never does."""
    want = logits_of(model)
    rk.patch_model(model, (op,))
    assert torch.equal(logits_of(model), want)


def test_parameters_stay_the_same_objects(model: Any) -> None:
    before = {name: id(p) for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    rk.patch_model(model)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == keys


def test_every_parameter_gets_its_gradient(model: Any) -> None:
    """Compares with autograd of transformers' own forward in float64; the bound is twice the error of bfloat16 in torch
    itself."""
    target = IDS.roll(-1, 1)

    def grads(net: Any) -> dict[str, Any]:
        net.zero_grad(set_to_none=True)
        out = net(input_ids=IDS, use_cache=False).logits
        torch.nn.functional.cross_entropy(out.flatten(0, 1).double(), target.flatten()).backward()
        return {name: p.grad.double() for name, p in net.named_parameters()}

    want, stock = grads(copy.deepcopy(model).double()), grads(model)
    rk.patch_model(model)
    got = grads(model)
    for name, exact in want.items():
        error, theirs = (float((g[name] - exact).norm() / exact.norm()) for g in (got, stock))
        assert error <= 2 * theirs + 2**-9, name


def test_hooks_see_what_they_saw(model: Any) -> None:
    def shapes(net: Any) -> list[tuple[str, Any]]:
        seen: list[tuple[str, Any]] = []
        handles = [
            module.register_forward_hook(
                lambda m, a, out, name=name: (
                    seen.append((name, tuple(out.shape))) if isinstance(out, torch.Tensor) else None
                )
            )
            for name, module in net.named_modules()
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        ]
        logits_of(net)
        for handle in handles:
            handle.remove()
        return seen

    want = shapes(model)
    rk.patch_model(model)
    assert shapes(model) == want
    assert len(want) == 16


def test_a_signature_that_is_not_known_stays_torchs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def signature(kind: Any, role: str) -> str | None:
        return "Attention.forward has the parameters kv" if role == "Attention" else None

    assert unchanged._signature(type(model.model.layers[0].self_attn), "Attention") is None
    monkeypatch.setattr(unchanged, "_signature", signature)
    want = logits_of(model)
    counts = rk.patch_model(model, ("rope", "attention"))
    assert counts == {"rope": 0, "attention": 0}
    assert "the parameters kv" in counts.unproved["model.layers.1.self_attn"]
    assert torch.equal(logits_of(model), want)


def test_all_models_of_a_container_are_patched() -> None:
    both = torch.nn.ModuleDict({"policy": tiny(), "reference": tiny()})
    implementation = both["policy"].config._attn_implementation
    assert rk.patch_model(both)["attention"] == 4
    assert torch.equal(logits_of(both["policy"]), logits_of(both["reference"]))
    assert {x.config._attn_implementation for x in both.values()} == {implementation}
    rk.unpatch_model(both)


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_float32_is_that_of_transformers_but_for_rounding(family: str) -> None:
    model = tiny(family, torch.float32)
    want = logits_of(copy.deepcopy(model).double()).float()
    rk.patch_model(model)
    torch.testing.assert_close(logits_of(model), want, rtol=1e-4, atol=2e-6)


def test_a_cast_of_the_model_does_not_round_the_frequencies() -> None:
    """model.to(torch.bfloat16) rounds the frequencies: at position 100 the angles of transformers' module are then off
    by radians."""
    model = tiny()
    rk.patch_model(model)
    want = logits_of(model)
    rk.unpatch_model(model)
    model.to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    rk.patch_model(model)
    assert torch.equal(logits_of(model), want)


def test_frequencies_that_are_not_the_configurations_stay(model: Any) -> None:
    with torch.no_grad():
        model.model.rotary_emb.inv_freq[3] *= 1.001
    counts = rk.patch_model(model)
    assert counts.unproved == {"model.rotary_emb": "rope: inv_freq is not that of the configuration"}


@pytest.mark.parametrize("theta", [1e4, 1e6, 1e8])
@pytest.mark.parametrize("width", [96, 128])
def test_frequencies_of_a_device_that_divides_by_a_reciprocal_are_the_configurations(theta: float, width: int) -> None:
    """On CUDA, torch divides by a number through its reciprocal, so the exponent of theta is off by an ulp."""
    model = tiny("Llama", head_dim=width, rope_parameters={"rope_type": "default", "rope_theta": theta})
    exponents = torch.arange(0, width, 2).float() * torch.tensor(1 / width)
    exponents = torch.nextafter(exponents, torch.ones(()))
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.copy_(1 / theta**exponents)
    assert not rk.patch_model(model).unproved


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_rotary_embeddings_are_those_of_transformers(kind: str) -> None:
    scaled = {
        "linear": {"factor": 4.0},
        "llama3": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    }[kind]  # fmt: skip
    model = tiny("Llama", torch.float32, rope_parameters={"rope_type": kind, "rope_theta": 1e4, **scaled})
    positions, x = torch.arange(100)[None], torch.zeros(1, dtype=torch.float32)
    want = model.model.rotary_emb(x, positions)
    rk.patch_model(model, ("rope",))
    for got, theirs in zip(model.model.rotary_emb(x, positions), want, strict=True):
        assert float((got - theirs).abs().max()) <= 2**-22


def test_checkpointing_gives_the_same_gradients(model: Any) -> None:
    rk.patch_model(model)

    def grads() -> list[Any]:
        model.zero_grad(set_to_none=True)
        model.train()
        model(input_ids=IDS, use_cache=False).logits.float().square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    want = grads()
    model.gradient_checkpointing_enable()
    assert all(torch.equal(a, b) for a, b in zip(grads(), want, strict=True))


def test_a_copy_is_a_patched_model_of_its_own(model: Any) -> None:
    rk.patch_model(model)
    want = logits_of(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert torch.equal(logits_of(model), want)
    assert not logits_of(other).any()
    rk.unpatch_model(other)
    assert torch.equal(logits_of(model), want)
    rk.unpatch_model(model)


def test_a_module_that_a_served_class_makes_is_of_the_class_under_it(tmp_path: Path) -> None:
    """Such a module has another configuration and other weights, and nothing about it was proved."""
    body = tiny("Qwen3", torch.float32).model
    rk.patch_model(body)
    body.save_pretrained(tmp_path)
    with torch.no_grad():
        want = body(IDS, use_cache=False)[0]
        made = type(body).from_pretrained(tmp_path)
        torch.testing.assert_close(made(IDS, use_cache=False)[0], want, rtol=0, atol=1e-5)
        for module in (made, type(body)(body.config), type(body.layers[0].mlp)(config=body.config)):
            assert not any(hasattr(type(each), "_rk_base") for each in module.modules())
        rk.patch_model(made)
        assert torch.equal(made(IDS, use_cache=False)[0], want)


def test_compiled_models_have_the_same_bits(model: Any) -> None:
    rk.patch_model(model)
    want = logits_of(model)
    compiled = torch.compile(model)
    with torch.no_grad():
        assert torch.equal(compiled(input_ids=IDS, use_cache=False).logits, want)


def test_compiled_and_exported_graphs_are_whole_and_have_the_same_bits(model: Any, compiler: Any) -> None:
    rk.patch_model(model)
    options = {"input_ids": IDS, "use_cache": False}
    with torch.no_grad():
        # The export comes first, so that it does not see changes of an eager call.
        exported = torch.export.export(model, (), options, strict=False).module()(**options).logits
        want = model(**options).logits
        compiled = compiler(model, fullgraph=True)(**options).logits
    assert torch.equal(exported, want)
    assert torch.equal(compiled, want)


def test_a_compiled_model_goes_on_past_the_table(model: Any, compiler: Any) -> None:
    rk.patch_model(model)
    compiled = compiler(model, fullgraph=True)
    with torch.no_grad():
        for position in (127, 128, 5000):
            options = {"position_ids": torch.tensor([[position]]), "use_cache": False}
            out = compiled(input_ids=IDS[:1, :1], **options).logits
            assert torch.equal(out, model(input_ids=IDS[:1, :1], **options).logits)


def test_cos_and_sin_are_those_of_transformers(model: Any) -> None:
    """float32 within two ulps: theirs are torch's functions of float32, ours are rounded from float64."""
    positions = torch.arange(100)[None]
    x = torch.zeros(1, dtype=torch.float32)
    want = model.model.rotary_emb(x, positions)
    rk.patch_model(model, ("rope",))
    for got, theirs in zip(model.model.rotary_emb(x, positions), want, strict=True):
        assert (got.shape, got.dtype) == (theirs.shape, theirs.dtype)
        assert float((got - theirs).abs().max()) <= 2**-22


def test_positions_past_the_table_are_transformers(model: Any) -> None:
    positions, x = torch.tensor([[0, 127, 128, 900, 70000]]), torch.zeros(1, dtype=torch.float32)
    want = model.model.rotary_emb(x, positions)
    rk.patch_model(model)
    for got, theirs in zip(model.model.rotary_emb(x, positions), want, strict=True):
        assert float((got - theirs).abs().max()) <= 2**-22


@pytest.mark.parametrize("length", [131072, 10_000_000])
def test_tables_are_never_as_long_as_the_longest_contexts(length: int) -> None:
    model = tiny("Llama", max_position_embeddings=length)
    rk.patch_model(model)
    logits_of(model)
    (tables,) = model.model.rotary_emb.__dict__["_rk_tables"].values()
    assert len(tables.half_width()[0]) <= 65536
    positions, x = torch.tensor([[65535, 65536, length - 1]]), torch.zeros(1, dtype=torch.float32)
    eager = model.model.rotary_emb(x, positions)
    on_device = tables._past(positions.float(), torch.float32, tables._on_device).unbind(-2)
    for got, theirs in zip(eager, on_device, strict=True):  # a device's own functions give the same bits here
        assert torch.equal(got, theirs)


def test_bad_calls_are_typed_errors(model: Any) -> None:
    from rl_kernel_native.integrations import vllm

    with pytest.raises(TypeError, match=r"ops: expected several names, such as \('rope',\), got a str"):
        rk.patch_model(model, "rope")
    with pytest.raises(TypeError, match="ops: expected an iterable of names, or None, got int"):
        rk.patch_model(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ops: expected names of embedding, .*, got 'softmax'"):
        rk.patch_model(model, ("softmax",))
    for name, value in (("strict", "False"), ("probe", 3), ("strict", None)):
        with pytest.raises(TypeError, match=f"{name}: expected a bool, got {type(value).__name__}"):
            rk.patch_model(model, **{name: value})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="check: expected a bool, got "):
            vllm.enable(check=value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got int"):
        rk.patch_model(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"families Llama, Qwen2, Qwen3, Mistral, .*got"):
        rk.patch_model(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="expected one that patch_model was called with"):
        rk.unpatch_model(model)
    rk.patch_model(model)
    with pytest.raises(ValueError, match="patched already"):
        rk.patch_model(model)


def test_an_older_transformers_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = sys.modules["transformers"]  # transformers itself replaces this module by another module
    monkeypatch.setattr(loaded, "__version__", "5.13.1")
    with pytest.raises(ImportError, match=r"transformers: expected version 5\.14 or newer, found 5\.13\.1; pip"):
        rk.patch_model(model)
    monkeypatch.setattr(loaded, "__version__", "5.14.0.dev0")
    assert rk.patch_model(model)["attention"] == 2


def test_the_floor_is_that_of_the_packaging() -> None:
    from rl_kernel_native.integrations.patch import MIN_TRANSFORMERS

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.findall(r'"transformers>=([\d.]+)"', text) == [".".join(map(str, MIN_TRANSFORMERS))]


def test_a_model_without_data_is_refused() -> None:
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(tiny().config)
    attributes = state_of(model)
    with pytest.raises(
        ValueError, match=r"model: .*, got model\.embed_tokens\.weight on the meta device; load the wei"
    ):
        rk.patch_model(model)
    assert {n: set(d) for n, d in state_of(model).items()} == {n: set(d) for n, d in attributes.items()}


LOAD = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
ids = torch.arange(3 * 20).view(3, 20) % 101
with torch.no_grad():
    torch.save(model(input_ids=ids, use_cache=False).logits, sys.argv[2])
"""


def test_a_saved_model_is_a_patched_model_in_another_process(model: Any, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stock = logits_of(model)
    rk.patch_model(model)
    want = logits_of(model)
    torch.save(model, tmp_path / "model.pt")
    subprocess.run([sys.executable, "-c", LOAD, tmp_path / "model.pt", tmp_path / "logits.pt"], check=True)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), want)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    rk.unpatch_model(loaded)
    assert torch.equal(logits_of(loaded), stock)
    # A saved model must be the unpatched model.
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    assert list(saved) == list(state)
    assert all(torch.equal(saved[name], state[name]) for name in state)
    model.save_pretrained(tmp_path / "model")
    assert torch.equal(logits_of(type(model).from_pretrained(tmp_path / "model").eval()), stock)


class Adapter(torch.nn.Module):
    """A linear with a low-rank update, which PEFT puts in place of the linear."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = torch.nn.Linear(base.in_features, 8, bias=False, dtype=base.weight.dtype)
        self.lora_b = torch.nn.Linear(8, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Any) -> Any:
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


def test_modules_that_came_after_the_patch_are_refused(model: Any) -> None:
    rk.patch_model(model)
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapter(attention.q_proj)
    with pytest.raises(
        ValueError, match=r"model: .*, got a later one, model\.layers\.1\.self_attn\.q_proj\.lora_a, .*them"
    ):
        logits_of(model)
    rk.unpatch_model(model)
    assert rk.patch_model(model)["linear"] == 7 * 2 + 1 + 2
    adapted = logits_of(model)
    assert torch.equal(adapted[:1, :3], logits_of(model, IDS[:1, :3]))
    attention.q_proj = attention.q_proj.base_layer  # the adapter is removed; every remaining module was patched
    assert not torch.equal(logits_of(model), adapted)
    model.resize_token_embeddings(110, mean_resizing=False)
    with pytest.raises(ValueError, match="modules that patch_model found, got a later one, lm_head, "):
        logits_of(model)


def test_weights_may_be_tied_and_set_after_the_patch(model: Any) -> None:
    rk.patch_model(model)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    want = logits_of(model)
    rk.unpatch_model(model)
    rk.patch_model(model)
    assert torch.equal(logits_of(model), want)


def test_errors_name_the_part_that_is_patched(model: Any) -> None:
    rk.patch_model(model)
    both = torch.nn.ModuleDict({"policy": model})
    with pytest.raises(ValueError, match="model: policy, a part of it, is patched already; call unpatch_model on that"):
        rk.patch_model(both)
    with pytest.raises(ValueError, match="expected one that patch_model was called with, which is its policy"):
        rk.unpatch_model(both)


@pytest.mark.parametrize(
    ("options", "op", "message"),
    [
        ({"hidden_act": "relu"}, "silu_mul", "its activation is a .*, which no operator computes"),
        ({"head_dim": 12}, "attention", "head_dim is 12, expected a multiple of 8, at most 256"),
        ({"dtype": torch.float64}, "linear", "its weight has dtype float64, expected float32, bfloat16 or float16"),
    ],
)
def test_what_an_operator_does_not_compute_stays_torchs(options: Any, op: str, message: str) -> None:
    model = tiny("Llama", **options)
    before, attributes = logits_of(model), state_of(model)
    proof = r"model: strict=True, without proof that this serves (1 module|\d+ modules): .*"
    with pytest.raises(ValueError, match=proof + message):
        rk.patch_model(model, strict=True)
    assert {n: set(d) for n, d in state_of(model).items()} == {n: set(d) for n, d in attributes.items()}
    assert not any(hasattr(type(module), "_rk_base") for module in model.modules())
    assert torch.equal(logits_of(model), before)
    counts = rk.patch_model(model)
    assert counts[op] == 0
    assert any(re.search(message, reason) for reason in counts.unproved.values())
    torch.testing.assert_close(logits_of(model), before, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("name", "op", "stride"),
    [
        ("model.layers.0.mlp.down_proj", "linear", 64),
        ("model.norm", "rms_norm", 2),
        ("model.embed_tokens", "embedding", 2),
    ],
)
def test_weights_whose_elements_lie_apart_stay_torchs(model: Any, name: str, op: str, stride: int) -> None:
    module = model.get_submodule(name)
    weight = module.weight.detach()
    apart = weight.t().contiguous().t() if op == "linear" else weight.repeat_interleave(2, -1)[..., ::2]
    module.weight = torch.nn.Parameter(apart)
    before = logits_of(model)
    counts = rk.patch_model(model)
    wanted = f"{op}: its weight has stride {stride} in its last dimension, expected 1"
    assert counts.unproved == {name: wanted}
    torch.testing.assert_close(logits_of(model), before, rtol=0, atol=0.05)


def test_a_forward_wrapped_since_is_not_torn_out(model: Any) -> None:
    rk.patch_model(model)
    projection = model.model.layers[0].mlp.up_proj
    inner = projection.forward
    projection.forward = lambda x: inner(x) * 2
    with pytest.raises(ValueError, match=r"the forward of model\.layers\.0\.mlp\.up_proj was wrapped after the patch"):
        rk.unpatch_model(model)
    projection.forward = inner
    rk.unpatch_model(model)
