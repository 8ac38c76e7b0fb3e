"""Each family that rk.patch_model serves: the proofs, and the same bytes for every layout of a sequence."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="patch_model patches models of torch")
transformers = pytest.importorskip("transformers", reason="patch_model patches models of transformers")

import rl_kernel_native as rk  # noqa: E402
from chain_cases import neighbours, padded, places_in, sequence  # noqa: E402
from patch_cases import FAMILIES, family, logits_of  # noqa: E402
from rl_kernel_native.integrations.decoder import cache_name  # noqa: E402

MOE = ("Qwen3Moe", "Mixtral")  # experts stay torch's, so the test compares the layers before the experts
DENSE = [name for name in FAMILIES if name not in MOE]
LENGTH = 150  # more than a block of 128 keys, and three windows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_all_dense_operators_are_proved_and_served(name: str, dtype: Any) -> None:
    model = family(name, dtype)
    want = logits_of(model)
    counts = rk.patch_model(model)
    assert all("xperts" in reason or "Router" in reason for reason in counts.unproved.values()), counts.unproved
    assert bool(counts.unproved) == (name in MOE)
    modules = list(model.modules())
    assert counts["linear"] == sum(isinstance(m, torch.nn.Linear) for m in modules)
    assert counts["rms_norm"] == sum(type(m).__name__.endswith("RMSNorm") for m in modules)
    assert counts["silu_mul"] == sum(type(m).__name__.endswith("MLP") for m in modules)
    assert (counts["embedding"], counts["rope"], counts["attention"]) == (1, 2, 2)
    if name not in MOE or dtype == torch.float32:  # a router's choice may depend on a last bit
        # Logits are below 1; the bound is the rounding error of a dtype in a model of two layers.
        torch.testing.assert_close(logits_of(model), want, rtol=0, atol=16 * torch.finfo(dtype).eps)
    rk.unpatch_model(model)
    assert torch.equal(logits_of(model), want)


@pytest.mark.parametrize("name", DENSE)
def test_activations_whose_elements_lie_apart_are_read(name: str) -> None:
    """A projector of images gives a norm activations whose elements lie apart, and hooks may give them to any
    module."""
    model = family(name, torch.float32)
    layer = model.model.layers[0]
    for module in (layer.self_attn, layer.self_attn.o_proj, layer.mlp, layer.mlp.down_proj, model.lm_head):
        module.register_forward_pre_hook(
            lambda m, args, kwargs: (
                tuple(map(apart, args)),
                {key: apart(x) if key == "hidden_states" else x for key, x in kwargs.items()},
            ),
            with_kwargs=True,
        )
    tokens = {"inputs_embeds": apart(model.get_input_embeddings()(torch.arange(24).view(2, 12)).detach())}
    with torch.no_grad():
        want = model(**tokens).logits
        assert not rk.patch_model(model).unproved
        torch.testing.assert_close(model(**tokens).logits, want, rtol=0, atol=1e-5)
        rows = apart(torch.randn(2, 5, 64))
        assert torch.equal(model.model.norm(rows), model.model.norm(rows.contiguous()))


def apart(x: Any) -> Any:
    """The same values, with the last dimension outermost in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


class Seen:
    """A model's result for one sequence: logits, or the input of the first experts."""

    def __init__(self, model: Any) -> None:
        self.model, self.moe = model, model.config.model_type in ("qwen3_moe", "mixtral")
        self.kept: list[Any] = []

    @torch.no_grad()
    def __call__(self, **inputs: Any) -> Any:
        if not self.moe:
            return self.model(**inputs).logits
        handle = self.model.model.layers[0].post_attention_layernorm.register_forward_hook(
            lambda m, a, out: self.kept.append(out)
        )
        self.model(**inputs)
        handle.remove()
        return self.kept.pop()


def layouts(model: Any, ids: Any) -> Iterator[tuple[str, Any]]:
    """The sequence in every layout, by name."""
    seen, name = Seen(model), cache_name(type(model))
    for batch in (1, 3):
        others = neighbours(model, batch - 1, 60, 10 + batch)
        for place in places_in(batch):
            rows = [*others[:place], ids, *others[place:]]
            for side in ("left", "right", "both"):
                slack = 3 if side == "both" else 0
                width = max(map(len, rows)) + 2 * slack
                left = [width - len(row) if side == "left" else slack for row in rows]
                tokens, mask, positions = padded(rows, left, width)
                out = seen(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
                yield f"batch {batch}, row {place}, padded {side}", out[place, left[place] : left[place] + len(ids)]
            ends = torch.tensor([0, *map(len, rows)]).cumsum(0).int().to(ids.device)
            positions = torch.cat([torch.arange(len(row), device=ids.device) for row in rows])[None]
            for named in ({}, {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}):
                out = seen(input_ids=torch.cat(rows)[None], position_ids=positions, use_cache=False, **named)
                yield f"{batch} packed, place {place}, {list(named)}", out[0, ends[place] : ends[place] + len(ids)]
    for chunk in (64, 17, 1):
        cache = transformers.DynamicCache(config=model.config)
        parts = [seen(input_ids=part[None], use_cache=True, **{name: cache})[0] for part in ids.split(chunk)]
        yield f"chunks of {chunk}", torch.cat(parts)
    other = neighbours(model, 1, 60, 7)[0]
    tokens, mask, positions = padded([other, ids], [len(ids) - len(other), 0], len(ids))
    cache, parts = transformers.DynamicCache(config=model.config), []
    for first in range(0, len(ids), 17):
        end = min(first + 17, len(ids))
        step = {"input_ids": tokens[:, first:end], "attention_mask": mask[:, :end], name: cache}
        parts.append(seen(**step, position_ids=positions[:, first:end], use_cache=True)[1])
    yield "chunks of 17 beside a row padded on the left", torch.cat(parts)


def check_layouts(model: Any) -> None:
    ids = sequence(model, LENGTH, 3)
    want = Seen(model)(input_ids=ids[None], use_cache=False)[0]
    assert bool(torch.isfinite(want).all())
    names = []
    for name, got in layouts(model, ids):
        names.append(name)
        differing = int((got.view(torch.int16) != want.view(torch.int16)).any(-1).sum())
        assert differing == 0, f"{name}: {differing} of {LENGTH} tokens differ"
    assert len(names) == 24


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layout_of_a_sequence_has_its_bytes(name: str) -> None:
    model = family(name)
    rk.patch_model(model)
    check_layouts(model)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layout_of_a_sequence_has_its_bytes_on_a_gpu(name: str) -> None:
    model = family(name).to("cuda")
    counts = rk.patch_model(model, strict=name not in MOE)
    assert counts["attention"] == 2
    check_layouts(model)


@pytest.mark.parametrize("name", DENSE)
def test_generation_decodes_what_a_whole_forward_gives(name: str) -> None:
    """Greedy decoding next to a prompt padded on the left, with a cache that grows and with a fixed cache."""
    model = family(name)
    rk.patch_model(model)
    ids = torch.stack([sequence(model, 60, 4), sequence(model, 60, 5)])
    mask = torch.ones_like(ids)
    mask[1, :23] = 0
    for more in ({}, {"cache_implementation": "static", "disable_compile": True}):
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, do_sample=False, output_logits=True,
            return_dict_in_generate=True, pad_token_id=0, eos_token_id=None, **more,
        )  # fmt: skip
        for row, first in ((0, 0), (1, 23)):
            whole = logits_of(model, out.sequences[row : row + 1, first:])[0]
            assert torch.equal(torch.stack(out.logits, 1)[row], whole[-7:-1].float())


@pytest.mark.parametrize("name", DENSE)
def test_every_parameter_gets_its_gradient(name: str) -> None:
    model = family(name, torch.float32)
    ids = torch.arange(24).view(2, 12)

    def grads() -> dict[str, Any]:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, use_cache=False).logits.square().mean().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    want = grads()
    rk.patch_model(model)
    for at, grad in grads().items():
        torch.testing.assert_close(grad, want[at], rtol=0, atol=1e-4 * float(want[at].abs().max()), msg=at)


def test_a_softcap_is_served_as_the_module_has_it() -> None:
    """The cap at patching time does not matter. Queries are scaled, so that scores are as large as the softcaps."""
    model, other = (family("Gemma2", torch.float32, attn_implementation="eager") for _ in range(2))
    rk.patch_model(model)
    found = []
    for net in (model, other):
        for layer in net.model.layers:
            layer.self_attn.q_proj.weight.data *= 50
    for softcap in (0.5, 0.05, None):
        for net in (model, other):
            for layer in net.model.layers:
                layer.self_attn.attn_logit_softcapping = softcap
        found.append(logits_of(model))
        torch.testing.assert_close(found[-1], logits_of(other), rtol=0, atol=2e-5)
    assert float((found[0] - found[1]).abs().max()) > 1e-3
    assert float((found[0] - found[2]).abs().max()) > 1e-3
    assert rk.status(model).unproved == {}


def test_a_softcap_that_the_attention_function_leaves_out_stays_torchs() -> None:
    """sdpa has no softcap: transformers up to 5.23 ignores the softcap, and later versions raise."""
    model = family("Gemma2", torch.float32, attn_implementation="eager")
    model.config._attn_implementation = "sdpa"
    counts = rk.patch_model(model)
    assert (counts["attention"], counts["rope"]) == (0, 2)
    reason = "softcapping is 0.5, and its attention function 'sdpa' takes none"
    assert reason in counts.unproved["model.layers.0.self_attn"]
    later = family("Gemma2", torch.float32, attn_implementation="eager")
    rk.patch_model(later)
    later.config._attn_implementation = "sdpa"
    assert "sdpa" in rk.status(later).unproved["model"]


def _swap(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


WINDOWS = {
    "a layer's": lambda model: setattr(model.model.layers[0].self_attn, "sliding_window", 3),
    "the configuration's": lambda model: setattr(model.config, "sliding_window", 3),
    "no kind slides": lambda model: setattr(model.config, "layer_types", ["full_attention"] * 2),
    "kinds": lambda model: setattr(model.config, "layer_types", model.config.layer_types[::-1]),
    "layers": _swap,
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, change) for name in ("Qwen2", "Gemma2", "Gemma3") for change in WINDOWS),
        ("Mistral", "the configuration's"),
    ],
)
def test_windows_that_are_set_later_are_those_of_the_masks(name: str, change: str) -> None:
    """The configuration and a layer's place give the window. If the module has another window, attention is torch's."""
    model, other = (family(name, torch.float32, sliding_window=5) for _ in range(2))
    rk.patch_model(model)
    for net in (model, other):
        WINDOWS[change](net)
    torch.testing.assert_close(logits_of(model), logits_of(other), rtol=0, atol=1e-5)
    unproved = rk.status(model).unproved
    assert unproved == {} if name == "Mistral" else "sliding_window of layer" in unproved["model"]


@pytest.mark.alone
def test_the_proof_of_an_8b_model_takes_less_than_a_second() -> None:
    """Measures processor time of one thread. torch's threads spin while they wait: 0.25 s became 0.6 to 4.4 next to
    other work. The model has the layers, heads and positions of an 8B model; its hidden size is not part of the
    proof."""
    shape = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 36}
    model = family("Qwen3", **shape, max_position_embeddings=40960)
    rk.patch_model(model)  # it reads sources, once per process
    rk.unpatch_model(model)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        begin = time.process_time()
        rk.patch_model(model)
        assert time.process_time() - begin < 1
    finally:
        torch.set_num_threads(threads)
