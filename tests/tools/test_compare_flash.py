"""`rlk compare --ops flash`: missing requirements are named. With a stand-in for flash-attn it is exact up to
rounding."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="rlk compare needs torch")
transformers = pytest.importorskip("transformers", reason="rlk compare needs transformers")

from transformers import modeling_flash_attention_utils as flash_utils  # noqa: E402

import rl_kernel_native as rk  # noqa: E402
from rl_kernel_native.consistency import attention, operators  # noqa: E402
from rl_kernel_native.consistency.errors import BadInput  # noqa: E402

PROMPTS = [[6, 3, 4, 5, 6, 7, 8], [6, 9, 11], [6, 2]]  # decoded in one batch, so keys of other lengths need the mask


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).bfloat16().eval()


def attend(q: Any, k: Any, v: Any, scale: float, causal: bool) -> Any:
    """[T, heads, head_dim] against [L, kv_heads, head_dim]; the last query is at the position of the last key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,lhd->htl", q.float(), k.float()) * scale
    if causal:
        seen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("htl,lhd->thd", scores.softmax(-1), v.float()).to(q.dtype)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with flash-attn's names and semantics, on the CPU. `scale` falsifies its softmax_scale."""
    calls = types.SimpleNamespace(plain=0, packed=0, scale=1.0)

    def flash_attn_func(
        q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False
    ):  # type: ignore[no-untyped-def]
        calls.plain += 1
        return torch.stack([attend(*row, softmax_scale * calls.scale, causal) for row in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(  # type: ignore[no-untyped-def]
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
    ):  # fmt: skip
        calls.packed += 1
        of_q, of_k = ((cu[:-1].tolist(), cu[1:].tolist()) for cu in (cu_seqlens_q, cu_seqlens_k))
        rows = zip(*of_q, *of_k, strict=True)
        scale = softmax_scale * calls.scale
        return torch.cat([attend(q[a:b], k[c:d], v[c:d], scale, causal) for a, b, c, d in rows])

    package = types.ModuleType("flash_attn")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    padding = types.ModuleType("flash_attn.bert_padding")
    package.flash_attn_func, package.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func  # type: ignore[attr-defined]
    package.flash_attn_with_kvcache = flash_attn_func  # type: ignore[attr-defined]
    padding.pad_input, padding.unpad_input = flash_utils._pad_input, flash_utils._unpad_input  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(flash_utils, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    monkeypatch.setattr(operators, "why_no_flash", lambda model: None)
    return calls


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize(("rollout_ops", "training_ops"), [("flash", "flash"), ("flash", "sdpa"), ("eager", "flash")])
def test_flash_is_no_fault(model: Any, flash: Any, rollout_ops: str, training_ops: str, packing: str) -> None:
    options: dict[str, Any] = {"rollout_ops": rollout_ops, "training_ops": training_ops, "packing": packing}
    found = rk.compare(model, None, PROMPTS, max_new_tokens=3, batch_sizes=(3,), **options)
    assert not found.faults, str(found)
    assert flash.packed, "keys of other lengths, padded or packed rows, are sequences to flash-attn"
    assert bool(flash.plain) == (rollout_ops == "flash"), "a prefill is one sequence"
    row = next(row for row in found.operator_table if row.operator == "attention")
    assert "flash-attn" in row.rollout + row.training


def test_a_wrong_scale_of_flash_is_named(model: Any, flash: Any) -> None:
    flash.scale = 1.5
    found = rk.compare(model, None, PROMPTS, rollout_ops="sdpa", training_ops="flash", max_new_tokens=3)
    assert found.faults[0].name == "layers.0.self_attn.attention"


def test_what_flash_lacks_is_named_before_anything_runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(words: str) -> None:
        with pytest.raises(BadInput, match=f"training_ops='flash': .*{words}"):
            rk.compare(model, None, PROMPTS, training_ops="flash")

    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
    refused("pip install flash-attn")
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: object())
    refused("the model is on cpu: give device='cuda'")
    head = types.SimpleNamespace(weight=types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32))
    assert "give dtype='bfloat16'" in str(attention.why_no_flash(types.SimpleNamespace(lm_head=head)))
    head.weight.dtype = torch.bfloat16
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: False)
    assert "2.3.3 or later" in str(attention.why_no_flash(types.SimpleNamespace(lm_head=head)))
