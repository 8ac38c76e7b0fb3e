"""Models that differ from what their class usually computes: patch_model replaces nothing that it cannot prove.

Each test alters a small Llama, records its logits, patches it, and expects the same logits within rounding.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="patch_model patches models of torch")
transformers = pytest.importorskip("transformers", reason="patch_model patches models of transformers")

from transformers.models.llama import modeling_llama as llama  # noqa: E402

import rl_kernel_native as rk  # noqa: E402
from rl_kernel_native.integrations import unchanged  # noqa: E402

IDS = (torch.arange(24).view(2, 12) * 7 + 3) % 97
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 64,
}  # fmt: skip
# float32 logits of this model are below 1; both sides round float32 sums of at most 96 products.
ROUNDING = 1e-5


def make(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **changes})).eval()


@torch.no_grad()
def logits(net: Any, ids: Any = IDS, **inputs: Any) -> Any:
    return net(ids, use_cache=False, **inputs).logits


class OnePlus(llama.LlamaRMSNorm):
    def forward(self, h: Any) -> Any:
        f = h.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (f * (1 + self.weight.float())).to(h.dtype)


class Tripled(llama.LlamaMLP):
    def forward(self, x: Any) -> Any:
        return 3 * super().forward(x)


class Damped(llama.LlamaDecoderLayer):
    def forward(self, h: Any, *args: Any, **kwargs: Any) -> Any:
        return h + 0.1 * (super().forward(h, *args, **kwargs) - h)


class Doubled(llama.LlamaRotaryEmbedding):
    def forward(self, x: Any, position_ids: Any) -> Any:
        return super().forward(x, position_ids * 2)


class Looser(llama.LlamaAttention):
    """Passes on a mask that the layer makes itself, in place of the model's."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, attention_mask=torch.zeros(1, 1, 12, 12), **kwargs)


class Unmasked(llama.LlamaDecoderLayer):
    def forward(self, h: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(h, attention_mask=torch.zeros(1, 1, 12, 12), **kwargs)


class Scaled(torch.nn.Embedding):
    def forward(self, ids: Any) -> Any:
        return 2 * super().forward(ids)


class Capped(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        return 0.1 * torch.tanh(10 * super().forward(x))


Change = Callable[[Any], Any]


def become(base: type, new: type) -> Change:
    def change(net: Any) -> None:
        for module in net.modules():
            if type(module) is base:
                module.__class__ = new

    return change


def each(path: str, **attributes: Any) -> Change:
    """Sets attributes on a module of every layer."""

    def change(net: Any) -> None:
        for layer in net.model.layers:
            for name, value in attributes.items():
                setattr(layer.get_submodule(path), name, value)

    return change


def put(path: str, module: Callable[[], Any]) -> Change:
    return lambda net: net.set_submodule(path, module())


def hooked(path: str, function: Any, kind: str = "forward") -> Change:
    return lambda net: getattr(net.get_submodule(path), f"register_{kind}_hook")(function)


def on_class(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Change:
    """Replaces something of transformers while the context of `restored` is open."""

    def change(net: Any) -> None:
        setattr(owner, name, wrap(getattr(owner, name)))

    return change


def registered(net: Any) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def halved(module: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, 0.5 * q, *args, **kwargs)

    AttentionInterface.register("halved", halved)
    net.set_attn_implementation("halved")


def parametrized(net: Any) -> None:
    class Half(torch.nn.Module):
        def forward(self, weight: Any) -> Any:
            return weight / 2

    torch.nn.utils.parametrize.register_parametrization(net.model.layers[0].mlp.up_proj, "weight", Half())


class Quantized(torch.Tensor):
    """A weight that only its own class of linear layer can multiply, like torchao's weights."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [x.as_subclass(torch.Tensor) / 2 if isinstance(x, Quantized) else x for x in args]
        if func is torch.nn.functional.linear:
            return func(*plain, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


def quantized(net: Any) -> None:
    projection = net.model.layers[1].mlp.down_proj
    weight = projection.weight.detach().as_subclass(Quantized)
    projection.weight = torch.nn.Parameter(weight, requires_grad=False)


LAYER = "model.layers.0"
NORM = f"{LAYER}.post_attention_layernorm"
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}

# name: (change of the model, parts listed as torch's own; None: every part may be served)
ALTERED: dict[str, tuple[Change, str | None]] = {
    "a bidirectional attention": (each("self_attn", is_causal=False), "self_attn"),
    "a subclass of the norm": (become(llama.LlamaRMSNorm, OnePlus), "norm"),
    "a subclass of the MLP": (become(llama.LlamaMLP, Tripled), "mlp"),
    "a subclass of the layer": (become(llama.LlamaDecoderLayer, Damped), "layers.0"),
    "a layer with a mask of its own": (become(llama.LlamaDecoderLayer, Unmasked), "self_attn"),
    "an attention with a mask of its own": (become(llama.LlamaAttention, Looser), "self_attn"),
    "a subclass of the rotary embedding": (become(llama.LlamaRotaryEmbedding, Doubled), "rotary_emb"),
    "MLP.forward of the class": (
        on_class(llama.LlamaMLP, "forward", lambda old: lambda self, x: 3 * old(self, x)), "mlp",
    ),
    "attention's rotation": (
        on_class(llama, "apply_rotary_pos_emb", lambda old: lambda q, k, cos, sin: old(q, k, sin, cos)), "self_attn",
    ),
    "half of the rotation": (on_class(llama, "rotate_half", lambda old: lambda x: old(2 * x)), "self_attn"),
    "the mask of the family": (
        on_class(llama, "create_causal_mask", lambda old: lambda *a, **k: torch.zeros(1, 1, 12, 12)), "self_attn",
    ),
    "an attention function": (registered, "self_attn"),
    "another norm": (put(NORM, lambda: torch.nn.RMSNorm(64, eps=1.0)), NORM),
    "no norm": (put(NORM, torch.nn.Identity), None),
    "another activation": (each("mlp", act_fn=torch.nn.ReLU()), "mlp"),
    "an epsilon": (each("input_layernorm", variance_epsilon=0.5), None),
    "a scale of attention": (each("self_attn", scaling=0.5), None),
    "a scaled rotary embedding": (lambda net: setattr(net.model.rotary_emb, "attention_scaling", 2.0), None),
    "other frequencies": (lambda net: net.model.rotary_emb.inv_freq.mul_(1.5), "rotary_emb"),
    "a head of another class": (lambda net: setattr(net.lm_head, "__class__", Capped), "lm_head"),
    "an embedding of another class": (lambda net: setattr(net.model.embed_tokens, "__class__", Scaled), "embed_tokens"),
    "a forward of one module": (
        lambda net: setattr(net.lm_head, "forward", lambda x: x @ net.lm_head.weight.T * 2), "lm_head",
    ),
    "a parametrized weight": (parametrized, "up_proj"),
    "a quantized weight": (quantized, "down_proj"),
    "a hook on a norm": (hooked(NORM, lambda m, a, out: out * 2), None),
    "a pre-hook on a norm": (hooked(NORM, lambda m, a: (a[0] + 2,), "forward_pre"), None),
    "a hook on an activation": (hooked(f"{LAYER}.mlp.act_fn", lambda m, a, out: out * 2), "mlp"),
    "a hook on an attention": (hooked(f"{LAYER}.self_attn", lambda m, a, out: (out[0] * 2, out[1])), None),
}  # fmt: skip


@contextlib.contextmanager
def restored() -> Iterator[None]:
    kept = {name: getattr(llama, name) for name in ("apply_rotary_pos_emb", "rotate_half", "create_causal_mask")}
    forward = llama.LlamaMLP.forward
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(llama, name, function)
        llama.LlamaMLP.forward = forward


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_model_computes_what_it_did(name: str) -> None:
    change, listed = ALTERED[name]
    net = make()
    stock = logits(net)
    with restored(), torch.no_grad():
        change(net)
        want = logits(net)
        assert name == "no norm" or not torch.allclose(want, stock, atol=100 * ROUNDING), "nothing was altered"
        counts = rk.patch_model(net)
        assert float((logits(net) - want).abs().max()) < ROUNDING
        assert counts["linear"] > 0
        if listed is None:
            assert not counts.unproved
        else:
            assert any(listed in x for x in counts.unproved), counts.unproved
            rk.unpatch_model(net)
            with pytest.raises(ValueError, match="strict"):
                rk.patch_model(net, strict=True)
            rk.patch_model(net)
        assert rk.status(net) == counts
        rk.unpatch_model(net)
        assert torch.equal(logits(net), want)


def test_a_bidirectional_configuration_is_computed_as_one() -> None:
    net = make(is_causal=False)
    want = logits(net)
    assert not torch.allclose(want, logits(make()), atol=1e-3)
    counts = rk.patch_model(net)
    assert float((logits(net) - want).abs().max()) < ROUNDING
    assert counts["attention"] == 0
    assert "is_causal" in counts.unproved["model.layers.0.self_attn"]


def test_switches_are_read_at_call_time() -> None:
    net = make()
    rk.patch_model(net)
    other = make()
    for change in (each("self_attn", is_causal=False), each("self_attn", is_causal=True, scaling=0.5)):
        for model in (net, other):
            change(model)
        assert float((logits(net) - logits(other)).abs().max()) < ROUNDING
    assert float((logits(net, is_causal=False) - logits(other, is_causal=False)).abs().max()) < ROUNDING
    each("mlp", act_fn=torch.nn.ReLU())(net)
    each("mlp", act_fn=torch.nn.ReLU())(other)
    assert float((logits(net) - logits(other)).abs().max()) < ROUNDING
    net.config.is_causal = other.config.is_causal = False
    each("self_attn", is_causal=False)(net)
    each("self_attn", is_causal=False)(other)
    assert float((logits(net) - logits(other)).abs().max()) < ROUNDING


def test_frequencies_and_attention_functions_that_are_set_later_are_heeded(caplog: pytest.LogCaptureFixture) -> None:
    """If a part changes after its proof, torch's own code computes it; with strict patching that is an error."""
    scaled = (lambda net: net.model.rotary_emb.inv_freq.mul_(1.5), "cos and sin", "model.rotary_emb")
    for change, what, at in (scaled, (registered, "attention", "model")):
        net, other = make(), make()
        rk.patch_model(net)
        before = logits(net)
        for model in (net, other):
            change(model)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="rl_kernel_native"):
            for _ in range(2):
                assert float((logits(net) - logits(other)).abs().max()) < ROUNDING
        assert [f"model: {what} of this forward stays torch's" in record.message for record in caplog.records] == [True]
        assert at in rk.status(net).unproved
        assert not torch.equal(logits(net), before)
        rk.unpatch_model(net)
        assert torch.equal(logits(net), logits(other))
    net = make()
    rk.patch_model(net, strict=True)
    scaled[0](net)
    with pytest.raises(ValueError, match="cos and sin of this forward stays torch's: inv_freq is not that of the conf"):
        logits(net)
    net = make()
    rk.patch_model(net)
    want = logits(net)
    net.set_attn_implementation("eager")  # transformers has this function, too
    assert torch.equal(logits(net), want)
    assert not rk.status(net).unproved


@pytest.mark.parametrize("name", ["MLP.forward of the class", "attention's rotation", "half of the rotation"])
def test_a_function_that_is_replaced_later_is_refused(name: str) -> None:
    net = make()
    rk.patch_model(net)
    want = logits(net)
    with restored():
        ALTERED[name][0](net)
        with pytest.raises(ValueError, match=r"expected \w+(\.forward)? as patch_model found it, got a later one"):
            logits(net)
        other = make()
        counts = rk.patch_model(other)  # patched with the current function
        assert ALTERED[name][1] in "".join(counts.unproved)
        logits(other)
    rk.unpatch_model(net)
    rk.patch_model(net)
    assert torch.equal(logits(net), want)


class Halved(llama.LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return output / 2, weights


def test_classes_that_are_set_later_are_torchs_and_named() -> None:
    net, other = make(), make()
    rk.patch_model(net)
    for model in (net, other):
        model.model.layers[1].self_attn.__class__ = Halved
        model.model.layers[0].mlp.__class__ = Tripled
        model.lm_head.__class__ = torch.nn.Linear
    assert float((logits(net) - logits(other)).abs().max()) < ROUNDING
    found = rk.status(net)
    assert (found["attention"], found["silu_mul"], found["linear"]) == (0, 1, 14)
    assert set(found.unproved) == {"model", "model.layers.1.self_attn", "model.layers.0.mlp", "lm_head"}


def doubled(module: Any) -> Callable[..., Any]:
    own = type(module).forward
    return lambda *args, **kwargs: 2 * own(module, *args, **kwargs)


@pytest.mark.parametrize(
    "path", ["lm_head", "model.norm", "model.embed_tokens", "model.layers.0.mlp", "model.layers.1.self_attn.q_proj"]
)
def test_a_forward_that_is_set_later_runs_and_is_named(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """This case includes a new forward that calls the patched one, such as the forwards of accelerate's hooks."""
    net = make()
    stock = copy.deepcopy(net)
    rk.patch_model(net, probe=False)
    for each in (net, stock):
        module = each.get_submodule(path)
        module.forward = doubled(module)
    with caplog.at_level(logging.WARNING, logger="rl_kernel_native"):
        assert (logits(net) - logits(stock)).abs().max() < 2 * ROUNDING
        logits(net)
    assert [r.message.count(f"{path} of this forward stays torch's") for r in caplog.records] == [1]
    assert rk.status(net).unproved == {path: "all: a forward of its own was set after the patch"}
    strict = make()
    rk.patch_model(strict, strict=True, probe=False)
    module = strict.get_submodule(path)
    ours = module.forward
    module.forward = functools.wraps(ours)(functools.partial(ours))
    logits(strict)
    assert not rk.status(strict).unproved
    module.forward = doubled(module)
    with pytest.raises(ValueError, match=rf"{path} of this forward stays torch's: a forward of its own.*strict=True"):
        logits(strict)


def test_a_class_that_is_set_later_raises_where_the_patch_was_strict() -> None:
    net = make()
    rk.patch_model(net, strict=True, probe=False)
    net.model.norm.__class__ = OnePlus
    with pytest.raises(
        ValueError, match="norm of this forward stays torch's: its class was set to OnePlus after the patch"
    ):
        logits(net)


def test_attention_dropout_is_none_in_evaluation_and_torchs_in_training() -> None:
    net = make(attention_dropout=0.5)
    want = logits(net)
    rk.patch_model(net)
    assert float((logits(net) - want).abs().max()) < ROUNDING
    net.train()
    torch.manual_seed(3)
    dropped = logits(net)
    assert not torch.allclose(dropped, want, atol=1e-3)
    other = make(attention_dropout=0.5).train()
    torch.manual_seed(3)
    assert float((logits(other) - dropped).abs().max()) < ROUNDING


def test_hooks_see_a_tensor_and_its_edit_is_kept() -> None:
    net, seen = make(), []
    net.get_submodule(NORM).register_forward_hook(lambda m, a, out: seen.append((len(a), out)))
    logits(net)
    rk.patch_model(net)
    logits(net)
    (count, before), (count_after, after) = seen
    assert (count, type(before)) == (count_after, type(after)) == (1, torch.Tensor)
    torch.testing.assert_close(after, before, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("path", [LAYER, f"{LAYER}.self_attn"])
@pytest.mark.parametrize(
    ("given", "got"),
    [
        ({"attention_mask": torch.zeros(1, 1, 12, 12)}, r"\[1, 1, 12, 12\]"),
        ({"attention_mask": None}, "None"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_a_hook_that_gives_a_layer_another_mask_is_refused(path: str, given: Any, got: str) -> None:
    net = make()
    net.get_submodule(path).register_forward_pre_hook(lambda m, a, k: (a, {**k, **given}), with_kwargs=True)
    want = logits(net)
    rk.patch_model(net)
    with pytest.raises(ValueError, match=f"attention_mask: expected the one that the model's .*, got {got}"):
        logits(net)
    rk.unpatch_model(net)
    counts = rk.patch_model(net, ["linear", "rms_norm", "rope", "silu_mul"])
    assert counts["rope"] == 2
    assert float((logits(net) - want).abs().max()) < ROUNDING


def test_a_hook_changes_no_bit() -> None:
    """The residual is added in the norm's pass only if the norm has no hook."""
    net = make()
    rk.patch_model(net)
    want = logits(net)
    for layer in net.model.layers:
        layer.post_attention_layernorm.register_forward_hook(lambda m, a, out: None)
    assert torch.equal(logits(net), want)


@pytest.mark.parametrize("length", [60, 200])
def test_yarn_goes_on_past_the_configurations_positions(length: int) -> None:
    """Original 32, factor 4, max_position_embeddings 40, as in Qwen3's own recipe; lengths also exceed 128."""
    net = make(max_position_embeddings=40, rope_parameters=dict(YARN))
    ids = torch.arange(length)[None] % 97
    want = logits(net, ids)
    counts = rk.patch_model(net)
    assert not counts.unproved
    got = logits(net, ids)
    assert float((got - want).abs().max()) < ROUNDING
    assert torch.equal(logits(net, ids[:, :50]), got[:, :50])  # whatever was computed before


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_keeps_transformers_angles(kind: str) -> None:
    more = {"factor": 2.0} if kind == "dynamic" else {
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32, "factor": 2.0,
    }  # fmt: skip
    net = make(rope_parameters={"rope_type": kind, "rope_theta": 1e4, **more})
    ids = torch.arange(80)[None] % 97
    want = logits(net, ids)
    counts = rk.patch_model(net)
    assert counts["rope"] == 2
    assert kind in counts.unproved["model.rotary_emb"]
    assert float((logits(net, ids) - want).abs().max()) < ROUNDING


def test_models_of_one_configuration_do_not_know_of_each_other() -> None:
    config = make().config
    policy, reference = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    want, own = logits(reference), logits(policy)
    rk.patch_model(policy)
    assert torch.equal(logits(reference), want)
    assert config._attn_implementation == reference.config._attn_implementation == "sdpa"
    rk.patch_model(reference)
    assert float((logits(reference) - want).abs().max()) < ROUNDING
    rk.unpatch_model(reference)
    assert torch.equal(logits(reference), want)
    assert float((logits(policy) - own).abs().max()) < ROUNDING


def test_the_default_device_may_be_another() -> None:
    net = make()
    want = logits(net)
    torch.set_default_device("meta")
    try:
        counts = rk.patch_model(net)
        got = logits(net)
    finally:
        torch.set_default_device(None)
    assert not counts.unproved
    assert torch.equal(logits(net), got)
    assert float((got - want).abs().max()) < ROUNDING


def test_a_replica_computes_with_weights_of_its_own() -> None:
    """A replica as DataParallel makes it: modules share everything except their tensors."""
    net = make()
    rk.patch_model(net)
    want = logits(net)
    copies = {id(m): m._replicate_for_data_parallel() for m in net.modules()}
    for module in net.modules():
        replica = copies[id(module)]
        for name, child in module._modules.items():
            setattr(replica, name, copies[id(child)])
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            setattr(replica, name, None if tensor is None else tensor.detach().clone())
    replica = copies[id(net)]
    assert torch.equal(logits(replica), want)
    replica.lm_head.weight.zero_()
    assert not logits(replica).any()
    assert torch.equal(logits(net), want)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "copy"])
def test_a_copy_is_patched_and_of_its_own(how: str) -> None:
    net = make()
    stock = logits(net)
    counts = rk.patch_model(net)
    want = logits(net)
    if how == "deepcopy":
        other = copy.deepcopy(net)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(net))
    elif how == "copy":
        other = copy.copy(net)
        other._modules = {**net._modules, "lm_head": copy.copy(net.lm_head)}
        other.lm_head._parameters = {"weight": torch.nn.Parameter(net.lm_head.weight.clone()), "bias": None}
    else:
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert rk.status(other) == counts
    assert torch.equal(logits(other) if how != "copy" else other.lm_head(other.model(IDS)[0]), want)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert torch.equal(logits(net), want)
    if how != "copy":
        assert not logits(other).any()
        rk.unpatch_model(other)
        assert torch.equal(logits(net), want)
        rk.unpatch_model(net)
        assert torch.equal(logits(net), stock)
        assert not logits(other).any()


def test_memory_is_given_back_at_once() -> None:
    """Without the garbage collector, as for a model that was never patched."""
    net = make()
    rk.patch_model(net)
    logits(net)
    watched = [weakref.ref(net.lm_head.weight), weakref.ref(net.model), weakref.ref(net.model.layers[0])]
    gc.collect()
    gc.disable()
    try:
        del net
        assert [x() for x in watched] == [None, None, None]
    finally:
        gc.enable()


def test_probes_leave_the_random_state_hooks_and_weights_alone() -> None:
    net, fired = make(), []
    for module in net.modules():
        module.register_forward_hook(lambda m, a, out: fired.append(m))
        module.register_forward_pre_hook(lambda m, a: fired.append(m))
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, a, out: fired.append(m))
    state, weights = torch.get_rng_state(), {k: v.clone() for k, v in net.state_dict().items()}
    try:
        rk.patch_model(net)
    finally:
        handle.remove()
    assert not fired
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, weights[k]) for k, v in net.state_dict().items())


def test_a_replacement_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the probe can find such a replacement, so it stays hidden without the probe."""
    honest = rk.silu_mul
    monkeypatch.setattr(rk, "silu_mul", lambda *a, **k: honest(*a, **k) * 1.001)
    net = make()
    counts = rk.patch_model(net)
    assert counts["silu_mul"] == 0
    assert "mlp" in "".join(counts.unproved)
    rk.unpatch_model(net)
    assert rk.patch_model(net, probe=False)["silu_mul"] == 2


def test_functions_of_other_packages_are_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers keeps flash attention's functions in its module once loaded; a replaced import is reported."""
    from transformers import modeling_flash_attention_utils as flash
    from transformers.integrations.flash_attention import flash_attention_forward

    monkeypatch.setattr(flash, "_flash_fn", lambda *args: None)
    monkeypatch.setattr(flash, "_unpad_fn", flash._unpad_input)
    assert unchanged.why_changed(flash_attention_forward, "flash_attention_forward") is None
    monkeypatch.setattr(flash, "_is_packed_sequence", lambda *args: False)
    assert "was replaced by" in str(unchanged.why_changed(flash_attention_forward, "flash_attention_forward"))


def test_what_stays_torchs_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    net = make()
    become(llama.LlamaMLP, Tripled)(net)
    with caplog.at_level(logging.WARNING, logger="rl_kernel_native"):
        counts = rk.patch_model(net)
        logits(net)
    assert len(caplog.records) == 1
    assert "model.layers.0.mlp" in caplog.text
    assert counts.unproved["model.layers.0.mlp"].startswith("silu_mul: ")
    with pytest.raises(ValueError, match="model: expected one that patch_model was called with"):
        rk.status(make())


def test_layers_that_come_later_are_refused() -> None:
    for change in (
        lambda net: net.model.layers.__setitem__(0, llama.LlamaDecoderLayer(net.config, 0)),
        lambda net: setattr(net.model.layers[1], "mlp", llama.LlamaMLP(net.config)),
        lambda net: setattr(net, "model", llama.LlamaModel(net.config)),
        lambda net: net.resize_token_embeddings(110, mean_resizing=False),
        lambda net: setattr(net.model, "norm", llama.LlamaRMSNorm(64)),
    ):
        net = make()
        rk.patch_model(net)
        change(net)
        with pytest.raises(ValueError, match=r"model: expected the modules that patch_model found, got a later one, "):
            logits(net)


class Fused(torch.nn.Module):
    """A framework's own head that is not a linear, so there is nothing to serve or to refuse."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def test_wrappers_of_what_was_patched_may_come_later() -> None:
    net = make()
    rk.patch_model(net)
    want = logits(net)
    net.model.layers[0].mlp = Fused(net.model.layers[0].mlp)
    assert torch.equal(logits(net), want)
