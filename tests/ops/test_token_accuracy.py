"""Token accuracy of linear_cross_entropy: NumPy's argmax of the logits, and a loss whose bits the flag does not
change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import linear_logprob_cases
import rl_kernel_native as rk
from cases import differing
from linear_logprob_cases import Head

torch = pytest.importorskip("torch")

FORMS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "denominator": {"denominator": 5.0},
    "z-loss": {"z_loss": 0.03, "return_z_loss": True},
    "temperature": {"temperature": 0.7, "logit_scale": 0.5, "softcap": 3.0},
    "16-bit logits": {"logits_dtype": "bfloat16"},
    "small workspace": {"workspace_bytes": 100_000},
    "valid_vocab": {"valid_vocab": 70},
}


def head(device: str = "cpu", rows: int = 40, vocab: int = 90, dtype: str = "bfloat16") -> Head:
    """A head; the target of every third row is its largest logit."""
    h = linear_logprob_cases.head(np.random.default_rng(3), rows, 40, vocab, dtype, device)
    best = rk.linear(h.hidden, h.weight, bias=h.bias, out_dtype="float32")[:, :70].argmax(-1)
    is_third = torch.arange(rows, device=device) % 3 == 2
    return h._replace(target=torch.where(is_third, best, h.target % 70 - 100 * (h.target == -100)))


def hits_of(logits: Any, target: Any) -> Any:
    """Computed by NumPy, whose argmax returns the first maximum."""
    x = logits.float().cpu().numpy()
    return (x.argmax(-1) == target.cpu().numpy()) & np.isfinite(x.max(-1)) & (target.cpu().numpy() != -100)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_accuracy_is_that_of_the_logits(form: str, dtype: str, device: str) -> None:
    options = dict(FORMS[form])
    if device != "cpu" and dtype == "float32":
        pytest.skip("GPU products have operands of 16 bits")
    if "logits_dtype" in options:
        options["logits_dtype"] = dtype
    h = head(device, dtype=dtype)
    found = rk.linear_cross_entropy(*h[:2], h.target, bias=h.bias, return_token_accuracy=True, **options)
    logits = rk.linear(h.hidden, h.weight, bias=h.bias, out_dtype=options.get("logits_dtype", "float32"))
    hits = hits_of(logits[:, : options.get("valid_vocab", 90)], h.target)
    assert 0 < hits.sum() < len(hits)
    divisor = float(options.get("denominator", (h.target != -100).sum().item()))
    reduction = options.get("reduction", "mean")
    want = hits.astype(np.float32) if reduction == "none" else np.float32(hits.sum())
    if reduction == "mean":
        want = want / np.float32(divisor)
    assert found.token_accuracy.dtype == torch.float32
    assert found.token_accuracy.cpu().numpy().tobytes() == np.asarray(want, np.float32).tobytes()
    plain = rk.linear_cross_entropy(*h[:2], h.target, bias=h.bias, **options)
    wanted = (plain.loss, plain.z_loss) if "z_loss" in options else (plain,)
    assert not differing((found.loss, *(() if found.z_loss is None else (found.z_loss,))), wanted)
    reference = rk.linear_cross_entropy_reference(
        *(t.double().cpu().numpy() for t in h[:2]), h.target.cpu().numpy(), bias=h.bias.double().cpu().numpy(),
        **{k: v for k, v in options.items() if k not in ("logits_dtype", "workspace_bytes", "return_z_loss")},
    )  # fmt: skip
    if "logits_dtype" not in options:  # rounding to logits_dtype makes ties that float64 does not have
        assert (np.float32(reference["token_accuracy"]) == want).all()


def test_gradients_keep_their_bits_and_accuracy_has_none(device: str) -> None:
    h = head(device)
    outcomes = []
    for flag in (False, True):
        leaves = [t.clone().requires_grad_() for t in h[:3]]
        found = rk.linear_cross_entropy(*leaves[:2], h.target, bias=leaves[2], return_token_accuracy=flag)
        loss = found.loss if flag else found
        if flag:
            assert not found.token_accuracy.requires_grad
        loss.backward()
        outcomes.append((loss.detach(), *(t.grad for t in leaves)))
    assert not differing(*outcomes)


def rows_of(logits: Any, target: Any, device: str, **options: Any) -> Any:
    """Accuracy of rows with these logits; the hidden states are rows of the identity."""
    x = torch.tensor(logits, dtype=torch.bfloat16, device=device)
    eye = torch.eye(16, dtype=torch.bfloat16, device=device)[: len(x)]
    weight = torch.zeros(x.shape[1], 16, dtype=torch.bfloat16, device=device)
    weight[:, : len(x)] = x.T
    y = torch.tensor(target, device=device)
    found = rk.linear_cross_entropy(eye, weight, y, reduction="none", return_token_accuracy=True, **options)
    return found.token_accuracy.tolist()


def test_of_several_largest_logits_the_lowest_id_counts(device: str) -> None:
    row = [0.0, 2.0, -1.0, 2.0, 2.0]
    assert rows_of([row] * 5, [0, 1, 2, 3, 4], device) == [0, 1, 0, 0, 0]
    signs = [-0.0, 0.0, -1.0, -2.0]  # 0.0 and -0.0 are equal
    assert rows_of([signs] * 2, [0, 1], device) == [1, 0]
    assert rows_of([[5.0, 5.0, 9.0]] * 2, [0, 1], device, valid_vocab=2) == [1, 0]
    # A softcap rounds 40 and 50 to one number, but does not change the order.
    assert rows_of([[40.0, 50.0]] * 2, [0, 1], device, softcap=1.0) == [0, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e7])
def test_a_bad_row_counts_as_wrong(value: float, device: str) -> None:
    h = head(device, rows=6)
    bias = h.bias.clone()
    bias[:] = value if value < 0 else bias
    bias[3] = value
    for y in (3, -1, 90):  # the largest column itself, and bad targets
        target = torch.full_like(h.target, y)
        found = rk.linear_cross_entropy(
            *h[:2], target, bias=bias, reduction="none", return_token_accuracy=True
        )  # fmt: skip
        assert not found.token_accuracy.any()
        assert found.loss.isnan().all()


def test_ignored_rows_do_not_count(device: str) -> None:
    h = head(device)
    mask = torch.arange(40, device=device) % 2 == 0
    hidden = h.hidden.clone()
    hidden[~mask] = torch.nan
    ours = {"bias": h.bias, "return_token_accuracy": True}
    rows = rk.linear_cross_entropy(hidden, h.weight, h.target, loss_mask=mask, reduction="none", **ours).token_accuracy
    assert not rows[~mask].any()
    counted = mask & (h.target != -100)
    mean = rk.linear_cross_entropy(hidden, h.weight, h.target, loss_mask=mask, **ours).token_accuracy
    assert not differing(mean, rows.sum() / counted.sum())
    nothing = rk.linear_cross_entropy(*h[:2], torch.full_like(h.target, -100), **ours)
    assert float(nothing.token_accuracy) == 0.0
    zeroth = rk.linear_cross_entropy(*h[:2], torch.zeros_like(h.target), ignore_index=0, reduction="none", **ours)
    assert not zeroth.token_accuracy.any()


def test_token_weights_weigh_the_accuracy(device: str) -> None:
    h = head(device)
    w = torch.linspace(0.25, 1.75, 40, device=device)
    ours: dict[str, Any] = {"bias": h.bias, "return_token_accuracy": True}
    rows = rk.linear_cross_entropy(*h[:2], h.target, reduction="none", **ours).token_accuracy
    weighed = rk.linear_cross_entropy(*h[:2], h.target, reduction="none", token_weight=w, **ours).token_accuracy
    assert not differing(weighed, rows * w)
    mean = rk.linear_cross_entropy(*h[:2], h.target, token_weight=w, **ours).token_accuracy
    each = torch.where(h.target == -100, 0.0, w)
    total, divisor = (rk.sequence_logprob(x[None]).sum[0] for x in (rows * w, each))
    assert not differing(mean, total / divisor)
    assert rk.linear_cross_entropy(*h[:2], h.target, token_weight=-w, **ours).token_accuracy.isnan()


def test_padded_packed_and_chunked_rows_have_one_accuracy(device: str) -> None:
    h = head(device, rows=60)
    hidden, target = h.hidden.view(3, 20, -1), h.target.view(3, 20).clone()
    lengths = (20, 0, 7)
    for i, n in enumerate(lengths):
        target[i, n:] = -100
    ours: dict[str, Any] = {"bias": h.bias, "return_token_accuracy": True}
    want = rk.linear_cross_entropy(hidden, h.weight, target, **ours)
    cuts = torch.tensor((0, 20, 20, 27), device=device)
    rows = [torch.cat([t[i, :n] for i, n in enumerate(lengths)]) for t in (hidden, target)]
    assert not differing(rk.linear_cross_entropy(rows[0], h.weight, rows[1], cu_seqlens=cuts, **ours)[:2], want[:2])
    for size in (40_000, 60_000, 1 << 20):
        found = rk.linear_cross_entropy(hidden, h.weight, target, **ours, workspace_bytes=size)
        assert not differing(found[:2], want[:2])


def test_lora_counts() -> None:
    h = head()
    of_lora = linear_logprob_cases.lora(np.random.default_rng(4), h, 8, 0.5)
    found = rk.linear_cross_entropy(*h[:2], h.target, reduction="none", return_token_accuracy=True, **of_lora.options)
    u = rk.linear(h.hidden, of_lora.a, out_dtype="float32") * of_lora.scale
    logits = h.hidden.double() @ h.weight.double().T + u.to(torch.bfloat16).double() @ of_lora.b.double().T
    np.testing.assert_array_equal(found.token_accuracy.numpy(), hits_of(logits, h.target))


def test_numpy_jax_compiled_and_func_agree() -> None:
    h = head(dtype="float32")
    arrays = [t.numpy() for t in h]
    jax = pytest.importorskip("jax")
    how: dict[str, Any] = {"return_token_accuracy": True, "z_loss": 0.03, "return_z_loss": True}

    def ours(x: Any, w: Any) -> Any:
        return rk.linear_cross_entropy(x, w, h.target, bias=h.bias, **how)

    want = ours(*h[:2])
    for found in (arrays, [jax.numpy.asarray(a) for a in arrays]):
        got = rk.linear_cross_entropy(*found[:2], found[3], bias=found[2], **how)
        assert all(np.asarray(a).tobytes() == b.numpy().tobytes() for a, b in zip(got, want, strict=True))
    torch.compiler.reset()
    leaves = [t.clone().requires_grad_() for t in h[:2]]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")(*leaves)
    assert not differing(tuple(t.detach() for t in compiled), tuple(want))
    assert not compiled.token_accuracy.requires_grad
    of_rows = torch.func.vmap(
        lambda x: rk.linear_cross_entropy(x, h.weight, h.target, bias=h.bias, **how).token_accuracy
    )
    assert not differing(of_rows(h.hidden[None])[0], want.token_accuracy)


def test_what_it_cannot_serve_is_refused() -> None:
    h = head()
    with pytest.raises(TypeError, match=r"^return_token_accuracy: expected a bool"):
        rk.linear_cross_entropy(*h[:2], h.target, return_token_accuracy="no")
    with pytest.raises(ValueError, match=r"^return_token_accuracy: expected False with a process_group"):
        rk.linear_cross_entropy(*h[:2], h.target, return_token_accuracy=True, process_group=object())
    wide = torch.zeros((1 << 19) + 1, 1)
    with pytest.raises(ValueError, match=r"^weight: expected at most 524288 rows for the token accuracy, got 524289"):
        rk.linear_cross_entropy(torch.ones(1, 1), wide, torch.tensor([0]), return_token_accuracy=True)
