"""Label smoothing of linear_cross_entropy: torch's float64 loss and gradients, and equal results on every path."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import linear_logprob_cases
import rl_kernel_native as rk
from cases import differing
from linear_logprob_cases import Head

torch = pytest.importorskip("torch")

VOCAB = 1100  # parts of 144 and 92 columns: one has a whole and a short leaf, the other a short leaf only
FORMS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "denominator": {"denominator": 5.0},
    "z-loss": {"z_loss": 0.03},
    "temperature": {"temperature": 0.7, "logit_scale": 0.5},
    "softcap": {"softcap": 3.0},
    "valid_vocab": {"valid_vocab": 1001},
    "tree of dhidden": {"dh_segments": 8},
}


def head(device: str = "cpu", rows: int = 24, vocab: int = VOCAB, dtype: str = "bfloat16") -> Head:
    h = linear_logprob_cases.head(np.random.default_rng(5), rows, 32, vocab, dtype, device)
    return h._replace(target=torch.where(h.target == -100, h.target, h.target % min(vocab, 1000)))


def of_torch(h: Head, e: float, options: dict[str, Any], weights: Any = None) -> tuple[Any, ...]:
    """Loss and gradients of torch's cross-entropy in float64."""
    leaves = [t.double().detach().requires_grad_() for t in h[:3]]
    z = torch.nn.functional.linear(*leaves)[..., : options.get("valid_vocab")] * options.get("logit_scale", 1.0)
    cap = options.get("softcap")
    z = (z if cap is None else cap * torch.tanh(z / cap)) / options.get("temperature", 1.0)
    rows = torch.nn.functional.cross_entropy(z, h.target.long(), reduction="none", label_smoothing=e)
    scored = h.target != -100
    rows = rows + torch.where(scored, options.get("z_loss", 0.0) * z.logsumexp(-1).square(), 0.0)
    if weights is not None:
        rows = rows * weights.double()
    reduction = options.get("reduction", "mean")
    counted = scored.sum() if weights is None else (weights.double() * scored).sum()
    loss = rows if reduction == "none" else rows.sum()
    if reduction == "mean":
        loss = loss / options.get("denominator", counted)
    loss.sum().backward()
    return loss.detach(), *(t.grad for t in leaves)


def ours(h: Head, e: float, **options: Any) -> tuple[Any, ...]:
    leaves = [t.clone().requires_grad_() for t in h[:3]]
    loss = rk.linear_cross_entropy(*leaves[:2], h.target, bias=leaves[2], label_smoothing=e, **options)
    loss.sum().backward()
    return loss.detach(), *(t.grad for t in leaves)


@pytest.mark.parametrize("e", [0.1, 0.9])
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_torchs(form: str, e: float, device: str) -> None:
    """1e-4 is linear_logprob's bound for logits of this size. Gradients of logits and of operands are rounded to
    bfloat16 once each: 2^-8 of the largest."""
    h, options = head(device), FORMS[form]
    found, wanted = ours(h, e, **options), of_torch(h, e, options)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=2e-5, atol=1e-4)
    for x, y in zip(found[1:], wanted[1:], strict=True):
        assert (x.double() - y).abs().max() <= 2**-7 * y.abs().max()
    arrays = [t.double().cpu().numpy() for t in h[:3]]
    kept = {k: v for k, v in options.items() if k != "dh_segments"}
    reference = rk.linear_cross_entropy_reference(
        *arrays[:2], h.target.cpu().numpy(), bias=arrays[2], label_smoothing=e, **kept
    )
    np.testing.assert_allclose(reference["loss"], wanted[0].cpu().numpy(), rtol=1e-12)


def test_float32_gradients_have_no_rounding_to_hide_in() -> None:
    h = head(dtype="float32")
    for options in ({}, {"softcap": 2.0, "temperature": 1.3}):
        for x, y in zip(ours(h, 0.3, **options), of_torch(h, 0.3, options), strict=True):
            torch.testing.assert_close(x.double(), y, rtol=3e-5, atol=1e-6 * float(y.abs().max()) + 1e-7)


def test_tokens_weights_and_counts_stay_defined(device: str) -> None:
    h = head(device)
    w = torch.linspace(0.25, 1.75, 24, device=device)
    found = rk.linear_cross_entropy(*h[:2], h.target, bias=h.bias, label_smoothing=0.2, token_weight=w)
    torch.testing.assert_close(found.double(), of_torch(h, 0.2, {}, w)[0], rtol=2e-5, atol=1e-4)
    nothing = torch.full_like(h.target, -100)
    assert float(rk.linear_cross_entropy(*h[:2], nothing, label_smoothing=0.2)) == 0.0
    hidden = h.hidden.clone()
    hidden[h.target == -100] = torch.nan  # not read
    rows = rk.linear_cross_entropy(hidden, *(h.weight, h.target), bias=h.bias, label_smoothing=0.2, reduction="none")
    assert not rows[h.target == -100].any()
    assert rows.isfinite().all()
    both = rk.linear_cross_entropy(
        *h[:2], h.target, bias=h.bias, label_smoothing=0.2, z_loss=0.1, return_z_loss=True, return_token_accuracy=True
    )  # fmt: skip
    plain = rk.linear_cross_entropy(
        *h[:2], h.target, bias=h.bias, z_loss=0.1, return_z_loss=True, return_token_accuracy=True
    )  # fmt: skip
    assert not differing(both[1:], plain[1:])
    assert float(both.loss) != float(plain.loss)


def test_no_smoothing_has_the_bits_of_none(device: str) -> None:
    h = head(device)
    leaves = [t.clone().requires_grad_() for t in h[:3]]
    loss = rk.linear_cross_entropy(*leaves[:2], h.target, bias=leaves[2])
    loss.backward()
    assert not differing(ours(h, 0.0), (loss.detach(), *(t.grad for t in leaves)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_have_no_loss(value: float, device: str) -> None:
    """A logit of -Inf makes the mean, and therefore the loss, infinite, as in torch. NaN and +Inf make the loss NaN."""
    h = head(device, rows=4)
    bias = h.bias.clone()
    bias[3] = value
    target = torch.tensor([1, 3, 5, 7], device=device)
    rows = rk.linear_cross_entropy(*h[:2], target, bias=bias, label_smoothing=0.1, reduction="none")
    assert (rows == torch.inf).all() if value < 0 else rows.isnan().all()
    for bad in (-1, VOCAB):
        found = rk.linear_cross_entropy(
            *h[:2], torch.full_like(target, bad), bias=h.bias, label_smoothing=0.1, reduction="none"
        )  # fmt: skip
        assert found.isnan().all()
    for temperature in (0.0, float("nan")):
        t = torch.full((4,), temperature, device=device)
        found = rk.linear_cross_entropy(
            *h[:2], target, bias=h.bias, temperature=t, label_smoothing=0.1, reduction="none"
        )  # fmt: skip
        assert found.isnan().all()


def test_one_result_for_any_workspace_split_and_rows(device: str) -> None:
    h = head(device, rows=60)
    want = ours(h, 0.1, reduction="none")
    for size in (300_000, 1 << 20):
        assert not differing(ours(h, 0.1, reduction="none", workspace_bytes=size), want)
    for i in (0, 17, 59):  # a single row takes the CPU's tree by runs, and a GPU's path for few rows
        one = rk.linear_cross_entropy(
            h.hidden[i : i + 1], h.weight, h.target[i : i + 1], bias=h.bias, label_smoothing=0.1, reduction="none"
        )  # fmt: skip
        assert not differing(one, want[0][i : i + 1])
    hidden, target = h.hidden.view(3, 20, -1), h.target.view(3, 20).clone()
    lengths = (20, 0, 7)
    for i, n in enumerate(lengths):
        target[i, n:] = -100
    mean = rk.linear_cross_entropy(hidden, h.weight, target, bias=h.bias, label_smoothing=0.1)
    packed = [torch.cat([t[i, :n] for i, n in enumerate(lengths)]) for t in (hidden, target)]
    cuts = torch.tensor((0, 20, 20, 27), device=device)
    found = rk.linear_cross_entropy(packed[0], h.weight, packed[1], bias=h.bias, label_smoothing=0.1, cu_seqlens=cuts)
    assert not differing(found, mean)


def test_the_mean_has_the_tree_of_the_vocabulary() -> None:
    """Computed in float32 by NumPy from the contract's definition: chains of eight, leaves of 128, parts, and trees
    over them."""

    def tree(terms: list[np.float32]) -> np.float32:
        while len(terms) & (len(terms) - 1):
            terms = [*terms, np.float32(0)]
        while len(terms) > 1:
            terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
        return terms[0] if terms else np.float32(0)

    h = head(dtype="float32", rows=3)
    e, z = np.float32(0.25), rk.linear(h.hidden, h.weight, bias=h.bias).numpy()
    target = torch.tensor([1, 2, 3])
    found = rk.linear_cross_entropy(*h[:2], target, bias=h.bias, label_smoothing=0.25, reduction="none").numpy()
    of = rk.logprob(torch.from_numpy(z), target, return_lse=True)
    cuts = [min(8 * (i * -(-VOCAB // 8) // 8), VOCAB) for i in range(8)] + [VOCAB]
    for i, row in enumerate(z):
        parts = []
        for first, last in itertools.pairwise(cuts):
            leaves = [row[k : min(k + 128, last)] for k in range(first, last, 128)]
            chains = [
                [np.add.accumulate(np.append(np.float32(0), leaf[r::8]))[-1] for r in range(8)] for leaf in leaves
            ]
            parts.append(tree([tree(c) for c in chains]))
        mean = tree(parts) / np.float32(VOCAB) - of.lse[i].numpy()
        rest = (np.float32(1) - e) * of.logprob[i].numpy()
        want = np.float32(np.float64(e) * np.float64(mean) + np.float64(rest))  # exact product, one rounding
        assert (-want).tobytes() == found[i].tobytes()


def test_numpy_compiled_and_func_agree() -> None:
    h = head(dtype="float32")

    def loss(x: Any, w: Any, e: Any = 0.1) -> Any:
        return rk.linear_cross_entropy(x, w, h.target, bias=h.bias, label_smoothing=e)

    want = loss(*h[:2])
    arrays = [t.numpy() for t in h]
    got = rk.linear_cross_entropy(*arrays[:2], arrays[3], bias=arrays[2], label_smoothing=0.1)
    assert np.asarray(got).tobytes() == want.numpy().tobytes()
    torch.compiler.reset()
    results = []
    for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in h[:2]]
        value = call(*leaves)
        value.backward()
        results.append((value.detach(), *(t.grad for t in leaves)))
    assert not differing(*results)
    of_func = torch.func.grad(loss)(*h[:2])
    assert not differing(of_func, results[0][1])


@pytest.mark.gpu
@pytest.mark.parametrize("logits_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocab", [1104, 1099, 40_000])  # whole vectors; not 16-byte aligned; several groups
def test_a_gpu_has_the_bits_of_the_cpu(vocab: int, logits_dtype: str) -> None:
    """With and without a bias, since gradients of logits are fused only without a bias, and under a softcap."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("products of another architecture")
    h = head(vocab=vocab, rows=70)
    on_gpu = Head(*(t.cuda() for t in h))
    for more in ({}, {"softcap": 5.0, "temperature": 0.8, "valid_vocab": vocab - 30}):
        for has_bias in (False, True):
            outcomes = []
            for of in (h, on_gpu):
                with rk.arithmetic("sm_90"):
                    leaves = [t.clone().requires_grad_() for t in of[:3]]
                    bias = leaves[2] if has_bias else None
                    rows = rk.linear_cross_entropy(
                        *leaves[:2], of.target, bias=bias, label_smoothing=0.1, z_loss=0.01, reduction="none",
                        exp="portable", logits_dtype=logits_dtype, **more,
                    )  # fmt: skip
                    rows.sum().backward()
                outcomes.append(tuple(t.cpu() for t in (rows.detach(), *(x.grad for x in leaves[: 2 + has_bias]))))
            assert not differing(*outcomes)


def test_what_it_cannot_serve_is_refused() -> None:
    h = head()
    for bad in (1.0, -0.1, float("nan"), 1 - 1e-9):
        with pytest.raises(ValueError, match=r"^label_smoothing: expected a number in \[0, 1\), got"):
            rk.linear_cross_entropy(*h[:2], h.target, label_smoothing=bad)
    with pytest.raises(TypeError, match=r"^label_smoothing: expected"):
        rk.linear_cross_entropy(*h[:2], h.target, label_smoothing="0.1")
