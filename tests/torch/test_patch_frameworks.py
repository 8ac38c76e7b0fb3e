"""rk.patch_model next to other changes of a model's modules: PEFT, DDP, FSDP2 and transformers' tensor parallelism."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="patch_model patches models of torch")
transformers = pytest.importorskip("transformers", reason="patch_model patches models of transformers")

import rl_kernel_native as rk  # noqa: E402
from patch_cases import IDS, logits_of, tiny  # noqa: E402
from ports import free_port  # noqa: E402
from rl_kernel_native.consistency.errors import BadInput  # noqa: E402
from rl_kernel_native.integrations.decoder import cache_name  # noqa: E402

# float32 logits below 1, from two layers.
ROUNDING = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A group with one process."""
    port = free_port()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def peft_kinds() -> dict[str, Any]:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "down_proj"]
    causal = {"task_type": "CAUSAL_LM"}
    return {
        "lora": peft.LoraConfig(target_modules=[*targets, "embed_tokens"], init_lora_weights=False, **causal),
        "dora": peft.LoraConfig(target_modules=targets, use_dora=True, init_lora_weights=False, **causal),
        "ia3": peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False, **causal
        ),
        "prefix": peft.PrefixTuningConfig(num_virtual_tokens=4, **causal),
        "prompt": peft.PromptTuningConfig(num_virtual_tokens=4, **causal),
        "adapter": peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, **causal),
    }


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "prefix", "prompt", "adapter"])
def test_adapters_compute_what_they_did(kind: str) -> None:
    peft = pytest.importorskip("peft")
    net = peft.get_peft_model(tiny("Llama", torch.float32), peft_kinds()[kind]).eval()
    if kind == "adapter":
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                if "adaption_gate" in name:
                    parameter.fill_(0.5)
    mask = torch.ones_like(IDS)

    def run() -> Any:
        with torch.no_grad():
            return net(input_ids=IDS, attention_mask=mask, use_cache=False).logits

    want = run()
    counts = rk.patch_model(net)
    assert counts["linear"] >= 15
    torch.testing.assert_close(run(), want, **ROUNDING)
    rk.unpatch_model(net)
    assert torch.equal(run(), want)


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig"])
@pytest.mark.parametrize("first", ["patch", "quantize"])
def test_weights_of_torchao_stay_torchs(kind: str, first: str) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao quantises")
    net = tiny("Llama", torch.float32)
    if first == "patch":
        rk.patch_model(net)
    quantization.quantize_(net, getattr(quantization, kind)())
    if first == "patch":
        with pytest.raises(
            ValueError, match=r"model: .*, got a later Int\w+, which only its own kernels multiply; call"
        ):
            logits_of(net)
        rk.unpatch_model(net)
    want = logits_of(net)
    counts = rk.patch_model(net)
    assert counts["linear"] == 0
    assert len(counts.unproved) == 15
    assert all("its weight is a Int" in why for why in counts.unproved.values())
    assert counts["attention"] == counts["silu_mul"] == 2
    torch.testing.assert_close(logits_of(net), want, **ROUNDING)


class Paged(transformers.DynamicCache):
    """A cache that sets keywords of the attention function, as in transformers' continuous batching."""

    def update(self, key: Any, value: Any, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        kwargs["block_table"] = None
        return super().update(key, value, layer_idx)


@pytest.mark.parametrize("how", ["ops", "is_causal"])
def test_a_cache_of_continuous_batching_is_read_by_torchs_own_attention(how: str) -> None:
    net = tiny("Llama", torch.float32)
    rk.patch_model(net, ops=("linear", "rope") if how == "ops" else None)
    switch = {} if how == "ops" else {"is_causal": False}
    name = cache_name(type(net))
    with torch.no_grad():
        want = net(IDS, use_cache=True, **{name: transformers.DynamicCache()}, **switch).logits
        assert torch.equal(net(IDS, use_cache=True, **{name: Paged()}, **switch).logits, want)


def test_tools_are_strict() -> None:
    """A tool that compares operators must not compare torch with torch. The tool would do so for an unproved part, or
    for a switch that is set later."""
    net = tiny("Llama", hidden_act="relu")
    with pytest.raises(BadInput, match=r"rollout_ops='rk': model: strict=True, without .* serves 2 modules"):
        rk.compare(net, net, [[1, 2, 3]], rollout_ops="rk", max_new_tokens=2)
    net = tiny("Llama", torch.float32)
    want = logits_of(net)
    rk.patch_model(net, strict=True)
    net.model.layers[0].self_attn.is_causal = False
    with pytest.raises(
        ValueError, match="attention of this forward stays torch's: is_causal is False; patch_model was"
    ):
        logits_of(net)
    rk.unpatch_model(net)
    assert not torch.equal(logits_of(net), want)


@pytest.mark.parametrize("first", ["patch", "shard"])
def test_fsdp2_shards_a_patched_model_and_a_sharded_model_is_patched(group: None, first: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))

    def shard() -> None:
        for layer in net.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)

    net = tiny("Qwen3", torch.float32)
    want = logits_of(net)
    if first == "shard":
        shard()
    counts = rk.patch_model(net)
    if first == "patch":
        shard()
    assert not counts.unproved
    assert rk.status(net) == counts
    got = logits_of(net)
    torch.testing.assert_close(got, want, **ROUNDING)
    rk.unpatch_model(net)
    torch.testing.assert_close(logits_of(net), want, **ROUNDING)
    assert not any(hasattr(type(module), "_rk_base") for module in net.modules())


def test_ddp_gives_the_gradients_of_the_model(group: None) -> None:
    def grads(net: Any, run: Any) -> dict[str, Any]:
        net.zero_grad(set_to_none=True)
        run(input_ids=IDS, use_cache=False).logits.square().mean().backward()
        return {name: p.grad.clone() for name, p in net.named_parameters()}

    net = tiny("Llama", torch.float32)
    rk.patch_model(net, strict=True)
    want = grads(net, net)
    got = grads(net, torch.nn.parallel.DistributedDataParallel(net))
    assert all(torch.equal(got[name], grad) for name, grad in want.items())


def test_forwards_of_tensor_parallelism_count_as_unchanged(group: None) -> None:
    """transformers puts these on instances, around the class's own forward."""
    parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
    from torch.distributed.device_mesh import init_device_mesh

    class Local(parallel.TensorParallelLayer):
        """A layer without collectives, since these belong around the forward."""

    net = tiny("Llama", torch.float32)
    want = logits_of(net)
    mesh = init_device_mesh("cpu", (1,))
    layers = net.model.layers
    replaced = [layers[0].mlp.up_proj, layers[1].self_attn.o_proj, layers[1].mlp, layers[0].input_layernorm]
    for module in replaced:
        Local().install_forward(module, mesh)
    installed = [module.forward for module in replaced]
    counts = rk.patch_model(net)
    assert not counts.unproved
    assert [module.forward for module in replaced] == installed
    got = logits_of(net)
    other = tiny("Llama", torch.float32)
    rk.patch_model(other)
    assert torch.equal(got, logits_of(other))
    rk.unpatch_model(net)
    assert [module.forward for module in replaced] == installed
    assert torch.equal(logits_of(net), want)
