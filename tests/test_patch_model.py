"""rk.patch_model and rk.unpatch_model on small models of transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="patch_model patches models of torch")
transformers = pytest.importorskip("transformers", reason="patch_model patches models of transformers")

import rl_kernel_native as rk  # noqa: E402
from rl_kernel_native.integrations.decoder import CACHE_NAMES  # noqa: E402
from rl_kernel_native.integrations.patch import OPS  # noqa: E402
from rl_kernel_native.integrations.sequences import locate_sequences  # noqa: E402

TINY = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
IDS = torch.arange(3 * 20).view(3, 20) % 101


def tiny(family: str = "Qwen3", dtype: Any = torch.bfloat16, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TINY, **options})
    torch.set_default_dtype(dtype)  # as from_pretrained does it: the frequencies of rope stay float32
    try:
        return getattr(transformers, f"{family}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(params=["Qwen3", "Llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@torch.no_grad()
def logits_of(model: Any, ids: Any = IDS, **inputs: Any) -> Any:
    return model(input_ids=ids, use_cache=False, **inputs).logits


def state_of(model: Any) -> dict[str, dict[str, Any]]:
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


def test_unpatching_restores_the_model_bit_for_bit(model: Any) -> None:
    before, implementation = logits_of(model), model.config._attn_implementation
    attributes = state_of(model)
    counts = rk.patch_model(model)
    assert set(counts) == set(OPS)
    assert all(counts.values())
    patched = logits_of(model)
    assert not torch.equal(patched, before)  # the linears alone are others
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
    """In bfloat16 these operators give what transformers' modules give: where float32 functions and sums differ in the
    last bits, rounding to 8 bits almost never shows it; on this model never."""
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
    """Against autograd of transformers' own forward in float64: twice what bfloat16 costs torch itself."""
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


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_bit(model: Any, side: str) -> None:
    rk.patch_model(model)
    lengths = (20, 3, 11)
    want = [logits_of(model, IDS[i : i + 1, :n])[0] for i, n in enumerate(lengths)]
    begin = [20 - n if side == "left" else 0 for n in lengths]
    ids, mask = torch.full((3, 20), 9), torch.zeros(3, 20, dtype=torch.long)
    for i, (n, b) in enumerate(zip(lengths, begin, strict=True)):
        ids[i, b : b + n], mask[i, b : b + n] = IDS[i, :n], 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    got = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    for i, (n, b) in enumerate(zip(lengths, begin, strict=True)):
        assert torch.equal(got[i, b : b + n], want[i])


def test_generation_decodes_what_a_whole_forward_gives(model: Any) -> None:
    """Greedy, from prompts padded on the left: each token is the largest logit of its own sequence's forward."""
    rk.patch_model(model)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, :7] = 0
    out = model.generate(
        IDS, attention_mask=mask, max_new_tokens=12, do_sample=False, output_logits=True,
        return_dict_in_generate=True, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    steps = torch.stack(out.logits, 1)
    for row in range(3):
        ids = out.sequences[row, 7 if row == 1 else 0 :]
        whole = logits_of(model, ids[None])[0]
        assert torch.equal(steps[row], whole[-13:-1].float())


def test_a_static_cache_is_read_as_far_as_it_is_filled(model: Any) -> None:
    rk.patch_model(model)
    want = logits_of(model, IDS)
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad():
        first = model(input_ids=IDS[:, :13], past_key_values=cache, use_cache=True).logits
        second = model(input_ids=IDS[:, 13:], past_key_values=cache, use_cache=True).logits
    assert torch.equal(torch.cat([first, second], 1), want)


def test_generation_takes_a_static_cache(model: Any) -> None:
    """For which transformers makes a mask for each kind of layer."""
    rk.patch_model(model)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = model.generate(IDS, **options)
    assert torch.equal(model.generate(IDS, cache_implementation="static", disable_compile=True, **options), want)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_attention_reads_a_cache_by_either_name(model: Any, name: str) -> None:
    """Which transformers changed: a name that is not known would be a cache that is not read."""
    rk.patch_model(model)
    want = logits_of(model, IDS)[:, 13:]
    body, cache = model.model, transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        body(input_ids=IDS[:, :13], **{name: cache})
        assert cache.get_seq_length() == 13
        assert torch.equal(model.lm_head(body(input_ids=IDS[:, 13:], **{name: cache})[0]), want)
    with pytest.raises(TypeError, match="key_cache: expected a cache by one of the names"):
        body.layers[0].self_attn(
            hidden_states=torch.zeros(1, 2, 64, dtype=torch.bfloat16),
            position_embeddings=body.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), torch.arange(2)[None]),
            key_cache=cache,
        )


def test_a_signature_that_is_not_known_is_refused_before_anything_is_patched(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(
        self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any, kv: Any = None
    ) -> None: ...

    before = state_of(model)
    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", forward)
    with pytest.raises(ValueError, match=r"Attention.forward with parameters of hidden_states, .*got .*, kv in transf"):
        rk.patch_model(model)
    assert {n: set(d) for n, d in state_of(model).items()} == {n: set(d) for n, d in before.items()}


def test_a_mask_narrower_than_the_cache_and_the_new_tokens_is_refused(model: Any) -> None:
    rk.patch_model(model)
    with torch.no_grad():
        cache = model(input_ids=IDS[:, :13], use_cache=True).past_key_values
        with pytest.raises(ValueError, match=r"attention_mask: expected \[3, at least 20\].*got \[3, 7\]"):
            model(input_ids=IDS[:, 13:], past_key_values=cache, attention_mask=torch.ones(3, 7))


def test_models_of_one_configuration_are_refused_and_all_models_of_a_container_are_patched() -> None:
    model = tiny()
    other = transformers.Qwen3ForCausalLM(model.config)
    rk.patch_model(model)
    with pytest.raises(ValueError, match=r"model: expected a configuration of its own.*copy\.deepcopy"):
        rk.patch_model(other)
    rk.unpatch_model(model)
    both = torch.nn.ModuleDict({"policy": tiny(), "reference": tiny()})
    assert rk.patch_model(both)["attention"] == 4
    assert torch.equal(logits_of(both["policy"]), logits_of(both["reference"]))
    rk.unpatch_model(both)
    assert {x.config._attn_implementation for x in both.values()} == {model.config._attn_implementation}


def test_sliding_windows_are_kept() -> None:
    options = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    windowed = tiny("Qwen3", torch.float32, **options)
    assert "sliding_attention" in windowed.config.layer_types
    want = logits_of(windowed)
    assert not torch.allclose(want, logits_of(tiny("Qwen3", torch.float32)), atol=1e-3)
    rk.patch_model(windowed)
    torch.testing.assert_close(logits_of(windowed), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_float32_is_that_of_transformers_but_for_rounding(family: str) -> None:
    model = tiny(family, torch.float32)
    want = logits_of(copy.deepcopy(model).double()).float()
    rk.patch_model(model)
    torch.testing.assert_close(logits_of(model), want, rtol=1e-4, atol=2e-6)


def test_a_cast_of_the_model_does_not_round_the_frequencies() -> None:
    """model.to(torch.bfloat16) does: at position 100 the angles of transformers' module are then off by radians."""
    model = tiny()
    rk.patch_model(model)
    want = logits_of(model)
    rk.unpatch_model(model)
    model.to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    rk.patch_model(model)
    assert torch.equal(logits_of(model), want)


def test_frequencies_that_are_not_the_configurations_are_refused(model: Any) -> None:
    with torch.no_grad():
        model.model.rotary_emb.inv_freq[3] *= 1.001
    with pytest.raises(ValueError, match="inv_freq of the rotary embedding is not that of the configuration"):
        rk.patch_model(model)


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


def test_compiled_models_have_the_same_bits(model: Any) -> None:
    rk.patch_model(model)
    want = logits_of(model)
    compiled = torch.compile(model)
    with torch.no_grad():
        assert torch.equal(compiled(input_ids=IDS, use_cache=False).logits, want)


def test_cos_and_sin_are_those_of_transformers(model: Any) -> None:
    """float32 within two ulps: theirs are torch's functions of float32, ours are rounded from float64."""
    positions = torch.arange(100)[None]
    x = torch.zeros(1, dtype=torch.float32)
    want = model.model.rotary_emb(x, positions)
    rk.patch_model(model, ("rope",))
    for got, theirs in zip(model.model.rotary_emb(x, positions), want, strict=True):
        assert (got.shape, got.dtype) == (theirs.shape, theirs.dtype)
        assert float((got - theirs).abs().max()) <= 2**-22


def test_positions_past_the_table_are_an_error(model: Any) -> None:
    rk.patch_model(model)
    with pytest.raises(ValueError, match=r"position_ids: expected 0 to 127 .*got 128"):
        logits_of(model, IDS[:1, :2], position_ids=torch.tensor([[127, 128]]))


def test_packed_sequences_are_found_by_positions_in_every_row() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    found = locate_sequences(2, 5, positions.device, attention_mask=None, position_ids=positions, past_key_values=None)
    assert found.cu_seqlens_q is not None
    assert found.cu_seqlens_q.tolist() == [0, 3, 5, 6, 10]
    assert found.cu_seqlens_q.dtype == torch.int32


def test_a_mask_of_padding_alone_is_a_row_without_keys(model: Any) -> None:
    rk.patch_model(model)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1] = 0
    got = logits_of(model, attention_mask=mask)
    assert bool(torch.isfinite(got).all())
    assert torch.equal(got[[0, 2]], logits_of(model)[[0, 2]])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([[1, 0, 1, 1]]), "row 0 has some inside"),
        (torch.ones(1, 1, 4, 4), r"attention_mask: expected None or \[1, at least 4\]"),
        (torch.ones(2, 4), r"attention_mask: expected None or \[1, at least 4\]"),
        (torch.ones(1, 3), r"attention_mask: expected None or \[1, at least 4\]"),
    ],
)
def test_masks_that_say_something_else_are_refused(model: Any, mask: Any, message: str) -> None:
    rk.patch_model(model)
    with pytest.raises(ValueError, match=message):
        logits_of(model, IDS[:1, :4], attention_mask=mask)


def test_bad_calls_are_typed_errors(model: Any) -> None:
    with pytest.raises(TypeError, match=r"ops: expected several names, such as \('rope',\), got a str"):
        rk.patch_model(model, "rope")
    with pytest.raises(ValueError, match=r"ops: expected names of embedding, .*, got 'softmax'"):
        rk.patch_model(model, ("softmax",))
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got int"):
        rk.patch_model(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Llama or Qwen3"):
        rk.patch_model(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="expected one that patch_model was called with"):
        rk.unpatch_model(model)
    rk.patch_model(model)
    with pytest.raises(ValueError, match="patched already"):
        rk.patch_model(model)


def test_a_refused_patch_leaves_nothing_behind() -> None:
    for options, message in (
        ({"attention_dropout": 0.1}, "has attention_dropout 0.1, expected 0"),
        ({"hidden_act": "relu"}, "has hidden_act 'relu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
    ):
        model = tiny("Llama", **options)
        before, attributes = logits_of(model), state_of(model)
        with pytest.raises(ValueError, match=message):
            rk.patch_model(model)
        assert {n: set(d) for n, d in state_of(model).items()} == {n: set(d) for n, d in attributes.items()}
        assert torch.equal(logits_of(model), before)


def test_a_forward_wrapped_since_is_not_torn_out(model: Any) -> None:
    rk.patch_model(model)
    projection = model.model.layers[0].mlp.up_proj
    inner = projection.forward
    projection.forward = lambda x: inner(x) * 2
    with pytest.raises(ValueError, match=r"the forward of model\.layers\.0\.mlp\.up_proj was wrapped since"):
        rk.unpatch_model(model)
    projection.forward = inner
    rk.unpatch_model(model)


def test_a_layer_alone_has_no_sequences(model: Any) -> None:
    rk.patch_model(model)
    x = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    angles = model.model.rotary_emb(x, torch.arange(4)[None])
    with pytest.raises(ValueError, match="was called outside of its model's forward"):
        model.model.layers[0](x, position_embeddings=angles)
