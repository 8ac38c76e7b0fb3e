"""A GPTModel of megatron-core with the weights of a model of transformers: Llama or Qwen3, on one rank."""

from __future__ import annotations

import contextlib
import os
from typing import Any


def on_a_cpu() -> None:
    """Makes megatron-core use the CPU in calls that ask for a CUDA device but work with any device."""
    import torch
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    tracker: Any = CudaRNGStatesTracker
    tracker.fork = lambda self, name="": contextlib.nullcontext()


def make(directory: str, dtype: Any, device: str) -> Any:
    """The model in evaluation mode. Initialises a process group of one rank."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from transformers import AutoModelForCausalLM

    if device == "cpu":
        on_a_cpu()
    if not torch.distributed.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        store = torch.distributed.HashStore()
        backend = "gloo" if device == "cpu" else "nccl"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        if device != "cpu":
            model_parallel_cuda_manual_seed(0)
    source: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    c = source.config
    norms = hasattr(source.model.layers[0].self_attn, "q_norm")
    heads, groups = c.num_attention_heads, c.num_key_value_heads
    width = getattr(c, "head_dim", None) or c.hidden_size // heads
    config = TransformerConfig(
        num_layers=c.num_hidden_layers, hidden_size=c.hidden_size, ffn_hidden_size=c.intermediate_size,
        num_attention_heads=heads, num_query_groups=groups, kv_channels=width, normalization="RMSNorm",
        layernorm_epsilon=c.rms_norm_eps, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, qk_layernorm=norms, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype,
        bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16, use_cpu_initialization=True,
        perform_initialization=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(qk_layernorm=norms, normalization="RMSNorm"), c.vocab_size,
        c.max_position_embeddings, position_embedding_type="rope", rotary_base=c.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=c.tie_word_embeddings,
    )  # fmt: skip
    weights = renamed(source.state_dict(), heads, groups)
    missing = {*weights} ^ {name for name, _ in model.named_parameters()}
    if missing:
        raise ValueError(
            f"{directory}: expected the parameters of a GPTModel, got others: {', '.join(sorted(missing))}"
        )
    model.load_state_dict(weights, strict=False)  # only transformer-engine's checkpoints have _extra_state
    return model.to(device=device, dtype=dtype).eval()


def renamed(state: dict[str, Any], heads: int, groups: int) -> dict[str, Any]:
    """transformers' parameters under megatron-core's names. In the merged projection, the rows of each query group are
    together: its queries, its key and its value. The gate's rows come before up's rows."""
    import torch

    found: dict[str, Any] = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    if "lm_head.weight" in state and state["lm_head.weight"] is not None:
        tied = state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
        if not tied:
            found["output_layer.weight"] = state["lm_head.weight"]
    same = {
        "input_layernorm.weight": "input_layernorm.weight",
        "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
        "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
        "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
        "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
        "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    }
    layer = 0
    while f"model.layers.{layer}.input_layernorm.weight" in state:
        old, new = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        found |= {new + to: state[old + name] for name, to in same.items() if old + name in state}
        q, k, v = (state[f"{old}self_attn.{x}_proj.weight"].unflatten(0, (groups, -1)) for x in "qkv")
        found[new + "self_attention.linear_qkv.weight"] = torch.cat((q, k, v), 1).flatten(0, 1)
        both = [state[f"{old}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        found[new + "mlp.linear_fc1.weight"] = torch.cat(both)
        layer += 1
    return found


def alone(model: Any, sequence: list[int], device: str) -> Any:
    """Logits of a sequence in a batch of one: megatron's local attention does not support packed sequences."""
    import torch

    n = len(sequence)
    hidden = torch.ones(1, 1, n, n, dtype=torch.bool, device=device).triu(1)
    return model(torch.tensor([sequence], device=device), torch.arange(n, device=device)[None], hidden)[0]


def packed(model: Any, sequences: list[list[int]], device: str) -> list[Any]:
    """Logits of each sequence, from one packed forward of all sequences."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [len(s) for s in sequences]
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    ids = torch.tensor([[x for s in sequences for x in s]], device=device)
    position = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    return list(model(ids, position, None, packed_seq_params=params)[0].split(lengths))
