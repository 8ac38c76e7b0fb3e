"""rk.patch_model with mixed dtypes: under autocast, with float32 norms, and with float32 adapters of PEFT."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="patch_model patches models of torch")
transformers = pytest.importorskip("transformers", reason="patch_model patches models of transformers")

import rl_kernel_native as rk  # noqa: E402
from patch_cases import IDS, family, logits_of, tiny  # noqa: E402
from test_patch_families import DENSE, check_layouts  # noqa: E402

HALF = torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Logits below 1 from two layers, which bfloat16 rounds a dozen times each.
ROUNDING = {"rtol": 0, "atol": 16 * torch.finfo(HALF).eps}


def float32_norms(model: Any) -> Any:
    """Leaves the norms as preparing a quantised model for training does."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.float()
    return model


def mixed(name: str, device: str, **options: Any) -> Any:
    """A model that computes only under autocast, by its name."""
    if name == "norms":
        return float32_norms(family("Qwen3", HALF, **options)).to(device)
    return family(name, torch.float32, **options).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*DENSE, "norms"])
def test_under_autocast_a_patched_model_rounds_as_the_model_does(name: str, device: str) -> None:
    model, ids = mixed(name, device), IDS.to(device)
    with torch.autocast(device, HALF):
        want = logits_of(model, ids)
        counts = rk.patch_model(model, strict=True)
        got = logits_of(model, ids)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, **ROUNDING)
        assert torch.equal(logits_of(model, ids[1:2]), got[1:2])
    assert counts["linear"] >= 9
    rk.unpatch_model(model)
    with torch.autocast(device, HALF):
        assert torch.equal(logits_of(model, ids), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Qwen3", "Gemma3", "norms"])
def test_every_layout_has_its_bytes_under_autocast(name: str, device: str) -> None:
    model = mixed(name, device)
    with torch.autocast(device, HALF):
        rk.patch_model(model, strict=True)
        check_layouts(model)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Olmo2", "Phi3", "norms"])
def test_gradients_under_autocast_are_those_of_the_model(name: str) -> None:
    """Compares with autograd of the float64 model; the bound is twice the error that autocast gives the model
    itself."""
    model = mixed(name, "cpu")
    ids = torch.arange(24).view(2, 12)

    def grads(net: Any, autocast: bool) -> dict[str, Any]:
        net.zero_grad(set_to_none=True)
        with torch.autocast("cpu", HALF, enabled=autocast):
            net(input_ids=ids, use_cache=False).logits.square().mean().backward()
        assert all(p.grad.dtype == p.dtype for p in net.parameters())
        return {at: p.grad.double() for at, p in net.named_parameters()}

    stock = grads(model, True)
    patched = mixed(name, "cpu")
    rk.patch_model(patched)
    got = grads(patched, True)
    for at, exact in grads(model.double(), False).items():
        error, theirs = (float((g[at] - exact).norm() / exact.norm()) for g in (got, stock))
        assert error <= 2 * theirs + 2**-9, at


@pytest.mark.parametrize("ops", [("linear",), ("rms_norm",), ("rope",), ("attention",), ("silu_mul", "embedding")])
def test_some_operators_stand_beside_torchs_under_autocast(ops: tuple[str, ...]) -> None:
    for name in ("Qwen3", "norms"):
        model = mixed(name, "cpu")
        with torch.autocast("cpu", HALF):
            want = logits_of(model)
            rk.patch_model(model, ops, strict=True)
            torch.testing.assert_close(logits_of(model), want, **ROUNDING)


def test_float32_weights_are_multiplied_in_float32_without_autocast() -> None:
    model = tiny(dtype=torch.float32)
    rk.patch_model(model)
    want = logits_of(model)
    with torch.autocast("cpu", HALF):
        assert logits_of(model).dtype == HALF
    assert torch.equal(logits_of(model), want)


def adapted(device: str) -> Any:
    """A bfloat16 model with float32 adapters, which are PEFT's default."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM", lora_dropout=0.0
    )
    net = peft.get_peft_model(tiny("Llama"), config).eval().to(device)
    assert {p.dtype for p in net.parameters()} == {HALF, torch.float32}
    return net


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [False, True])
def test_adapters_in_float32_beside_a_model_in_bfloat16(device: str, autocast: bool) -> None:
    net, ids = adapted(device), IDS.to(device)
    with torch.autocast(device, HALF, enabled=autocast):
        want = logits_of(net, ids)
        counts = rk.patch_model(net)
        got = logits_of(net, ids)
        torch.testing.assert_close(got, want, **ROUNDING)
        # float32 products on a GPU are torch's own, and are reported so
        torchs = device == "cuda" and not autocast
        assert len(counts.unproved) == (2 * 2 * 2 if torchs else 0)
        assert all("lora_" in at and "has dtype float32" in why for at, why in counts.unproved.items())
        net.train()
        net(input_ids=ids, use_cache=False).logits.float().square().mean().backward()
    found = {at: p.grad for at, p in net.named_parameters() if p.requires_grad}
    assert len(found) == 8
    assert all(g is not None and g.dtype == torch.float32 and bool(g.any()) for g in found.values())
