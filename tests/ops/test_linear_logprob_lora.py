"""LoRA on the head of linear_logprob has the bits of a head with more features, forward and backward."""

from __future__ import annotations

import contextlib
import multiprocessing
from typing import Any

import numpy as np
import pytest

import linear_cases
import linear_logprob_cases
import rl_kernel_native as rk
from cases import ALL, beyond, differing
from linear_logprob_cases import Head, Lora
from ports import free_port
from rl_kernel_native.contract import row

torch = pytest.importorskip("torch")

RANKS = [1, 7, 16, 64]  # one; a multiple of neither 16 nor 16 bytes; one step; one stage of the fused kernels
SCALES = {1: 1.0, 7: -0.5, 16: 2.0, 64: 0.25}
UNITS = ["ieee", "sm_90"]
VOCAB = 320  # eight parts of 40
# Features that do not fill a step of 16, and whole rows of 16 bytes, which the fused kernels take.
SHAPES = [(9, 44), (9, 64)]


def operands(
    rank: int = 16,
    ins: int = 48,
    dtype: str = "bfloat16",
    device: str = "cpu",
    vocab: int = VOCAB,
    rows: int = 9,
    scale: float | None = None,
) -> tuple[Head, Lora]:
    rng = np.random.default_rng([rank, ins, vocab])
    h = linear_logprob_cases.head(rng, rows, ins, vocab, dtype, device)
    scale = SCALES.get(rank, 0.5) if scale is None else scale
    return h, linear_logprob_cases.lora(rng, h, rank, scale)


def unit_of(unit: str, device: str) -> Any:
    """The context for a unit; a GPU computes with its own arithmetic."""
    return contextlib.nullcontext() if device == "cuda" else rk.arithmetic(unit)


def side_by_side(a: Any, b: Any) -> Any:
    """Rows [a, zeros up to a multiple of 16, b]."""
    return torch.cat([a, a.new_zeros(len(a), -a.shape[1] % 16), b], dim=1)


def scored(h: Head) -> Any:
    return torch.where((h.target != -100)[:, None], h.hidden, 0)


def u_of(h: Head, of_lora: Lora) -> Any:
    return (rk.linear(scored(h), of_lora.a, out_dtype="float32") * of_lora.scale).to(h.hidden.dtype)


def logits_of(h: Head, of_lora: Lora, out_dtype: Any = "float32") -> Any:
    wide = side_by_side(h.weight, of_lora.b)
    return rk.linear(side_by_side(scored(h), u_of(h, of_lora)), wide, h.bias, out_dtype=out_dtype)


def called(h: Head, of_lora: Lora, leaves: list[Any] | None = None, **options: Any) -> Any:
    x, w, bias, a, b = leaves or (*h[:3], of_lora.a, of_lora.b)
    how = {"lora_a": a, "lora_b": b, "lora_scale": of_lora.scale}
    return rk.linear_logprob(x, w, h.target, bias=bias, **how, **options)


def leaves_of(h: Head, of_lora: Lora) -> list[Any]:
    return [t.clone().requires_grad_() for t in (*h[:3], of_lora.a, of_lora.b)]


def gradients(h: Head, of_lora: Lora, **options: Any) -> tuple[Any, ...]:
    """Gradients of hidden, weight, bias, lora_a and lora_b, for 1, 0.1 and -0.2 of logprob, lse and entropy."""
    leaves = leaves_of(h, of_lora)
    found = called(h, of_lora, leaves, return_lse=True, return_entropy=True, **options)
    (found.logprob + 0.1 * found.lse - 0.2 * found.entropy).sum().backward()
    return tuple(t.grad for t in leaves)


def logit_gradients(h: Head, of_lora: Lora) -> Any:
    found = called(h, of_lora, return_lse=True, return_entropy=True)
    ones = torch.ones_like(found.lse)
    slopes = {"dlogprob": ones, "dlse": 0.1 * ones, "dentropy": -0.2 * ones}
    d = rk.logprob_backward(logits_of(h, of_lora), h.target, found.lse, entropy=found.entropy, **slopes)
    return d.to(h.hidden.dtype)


def v_of(d: Any, of_lora: Lora) -> Any:
    return (rk.linear(d, of_lora.b.T.contiguous(), out_dtype="float32") * of_lora.scale).to(d.dtype)


def share_of_hidden(d: Any, h: Head, of_lora: Lora, out_dtype: Any = None) -> Any:
    factors = side_by_side(d, v_of(d, of_lora)), side_by_side(h.weight.T, of_lora.a.T)
    return rk.linear(*factors, out_dtype=out_dtype)


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("logits_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_has_the_bits_of_a_head_of_more_features(
    shape: tuple[int, int], rank: int, logits_dtype: str, unit: str, device: str
) -> None:
    h, of_lora = operands(rank, shape[1], device=device)
    with unit_of(unit, device):
        want = rk.logprob(logits_of(h, of_lora, logits_dtype), h.target, **ALL)
        h.hidden[1] = float("nan")  # ignored, so never read
        assert not differing(tuple(called(h, of_lora, logits_dtype=logits_dtype, **ALL)), tuple(want))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_continued_products(shape: tuple[int, int], rank: int, unit: str, device: str) -> None:
    h, of_lora = operands(rank, shape[1], device=device)
    with unit_of(unit, device):
        d = logit_gradients(h, of_lora)
        want = (
            share_of_hidden(d, h, of_lora),
            rk.linear_weight_grad(d, scored(h)),
            rk.linear_bias_grad(d),
            rk.linear_weight_grad(v_of(d, of_lora), scored(h)),
            rk.linear_weight_grad(d, u_of(h, of_lora)),
        )
        h.hidden[1] = float("nan")
        got = gradients(h, of_lora)
    assert not differing(got, want)
    assert all(g.any() for g in got)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_of_other_dtypes(dtype: str) -> None:
    h, of_lora = operands(7, 44, dtype)
    want = rk.logprob(logits_of(h, of_lora), h.target, **ALL)
    assert not differing(tuple(called(h, of_lora, **ALL)), tuple(want))
    d = logit_gradients(h, of_lora)
    got = gradients(h, of_lora)
    assert not differing(got[0], share_of_hidden(d, h, of_lora))
    assert not differing(got[3], rk.linear_weight_grad(v_of(d, of_lora), scored(h)))
    assert not differing(got[4], rk.linear_weight_grad(d, u_of(h, of_lora)))


def test_options_meet_the_logits(device: str) -> None:
    options = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 11.0, "valid_vocab": 290}
    h, of_lora = operands(device=device)
    h.target.clamp_(max=289)
    want = rk.logprob(logits_of(h, of_lora), h.target, **ALL, **options)
    assert not differing(tuple(called(h, of_lora, **ALL, **options)), tuple(want))


def test_a_scale_of_zero_is_the_head_itself(device: str) -> None:
    h, of_lora = operands(device=device, scale=0.0)
    want = rk.linear_logprob(*h[:2], h.target, bias=h.bias, **ALL)
    assert not differing(tuple(called(h, of_lora, **ALL)), tuple(want))
    of_hidden, _, _, of_a, of_b = gradients(h, of_lora)
    assert of_hidden.any()
    assert not of_a.any()
    assert not of_b.any()


@pytest.mark.parametrize("rank", [7, 16])
def test_a_row_has_one_result_in_any_batch(rank: int, device: str) -> None:
    h, of_lora = operands(rank, device=device, rows=70)
    whole, whole_gradient = called(h, of_lora), gradients(h, of_lora)[0]
    for i in (0, 1, 2, 33, 69):
        for rows in (slice(i, i + 1), slice(i, None)):
            part = h._replace(hidden=h.hidden[rows], target=h.target[rows])
            assert not differing(called(part, of_lora), whole[rows])
            assert not differing(gradients(part, of_lora)[0], whole_gradient[rows])


@pytest.mark.parametrize("rank", [7, 16])
def test_strides_change_no_bit(rank: int, device: str) -> None:
    h, of_lora = operands(rank, device=device)
    want = called(h, of_lora, **ALL), gradients(h, of_lora)
    for pad, shift in ((3, 1), (8, 0)):
        a, b = (
            torch.cat([t.new_zeros(len(t), shift), t, t.new_zeros(len(t), pad)], 1)[:, shift : shift + t.shape[1]]
            for t in (of_lora.a, of_lora.b)
        )
        strided = of_lora._replace(a=a, b=b)
        assert not differing(tuple(called(h, strided, **ALL)), tuple(want[0]))
        assert not differing(gradients(h, strided), want[1])


@pytest.mark.parametrize("rank", [7, 16])
@pytest.mark.parametrize("rows", [7, 300])
def test_a_workspace_of_any_size_changes_no_bit(rows: int, rank: int, device: str) -> None:
    h, of_lora = operands(rank, device=device, vocab=2048, rows=rows)
    found = []
    for logits_dtype in ("float32", "bfloat16"):
        for size in (1 << 22, 6 << 20, 512 << 20):
            options = {"workspace_bytes": size, "logits_dtype": logits_dtype}
            found.append((called(h, of_lora, **options), *gradients(h, of_lora, **options)))
        assert not differing(found[-3], found[-1])
        assert not differing(found[-2], found[-1])


def test_the_least_workspace_is_named_and_is_enough() -> None:
    h, of_lora = operands(16, vocab=2048)
    want = called(h, of_lora)
    with pytest.raises(ValueError, match="workspace_bytes: expected at least") as refused:
        called(h, of_lora, workspace_bytes=10)
    least = int(str(refused.value).split("at least ")[1].split(" ")[0])
    assert not differing(called(h, of_lora, workspace_bytes=least), want)
    with pytest.raises(ValueError, match=f"expected at least {least}"):
        called(h, of_lora, workspace_bytes=least - 1)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_statistics_of_shards_merge_to_the_bits_of_the_whole(shards: int, unit: str, device: str) -> None:
    h, of_lora = operands(device=device)
    with unit_of(unit, device):
        want = called(h, of_lora, **ALL)
        width, stats = VOCAB // shards, []
        for first in range(0, VOCAB, width):
            own = slice(first, first + width)
            how = {"vocab_start": first, "vocab_size": VOCAB, "lora_a": of_lora.a, "lora_scale": of_lora.scale}
            shard = {"bias": h.bias[own], "lora_b": of_lora.b[own]}
            stats.append(rk.linear_logprob_partial(h.hidden, h.weight[own], h.target, **shard, **how))
        assert not differing(tuple(rk.logprob_merge(torch.stack(stats), **ALL)), tuple(want))


@pytest.mark.parametrize("rank", [7, 16])
def test_dh_segments_give_each_part_of_the_vocabulary_its_own_sums(rank: int, device: str) -> None:
    h, of_lora = operands(rank, dtype="float32" if device == "cpu" else "bfloat16", device=device, scale=0.7)
    d, shares, dlora_a = logit_gradients(h, of_lora), [], None
    for first in range(0, VOCAB, 40):
        own = slice(first, first + 40)
        part = of_lora._replace(b=of_lora.b[own].contiguous())
        of_part = d[:, own].contiguous()
        shares.append(share_of_hidden(of_part, h._replace(weight=h.weight[own]), part, "float32"))
        dlora_a = rk.linear_weight_grad(v_of(of_part, part), scored(h), out_dtype="float32", main_grad=dlora_a)
    got = gradients(h, of_lora, dh_segments=8)
    one = gradients(h, of_lora)
    assert not differing(got[0], rk.tree_sum(shares, out_dtype=h.hidden.dtype))
    assert not differing(got[3], dlora_a.to(h.hidden.dtype))
    assert not differing((*got[1:3], got[4]), (*one[1:3], one[4]))
    assert device != "cpu" or (differing(got[0], one[0]) and differing(got[3], one[3])), "float32 shows the parts"
    # A request for fewer gradients gives the same bits.
    a = of_lora.a.clone().requires_grad_()
    found = called(h, of_lora, [*h[:3], a, of_lora.b], return_lse=True, return_entropy=True, dh_segments=8)
    (found.logprob + 0.1 * found.lse - 0.2 * found.entropy).sum().backward()
    assert not differing(a.grad, got[3])


def test_blocks_of_tokens_are_folded() -> None:
    """8300 rows are two blocks of rule 9, whose float32 sums are rounded once."""
    h, of_lora = operands(5, 8, vocab=64, rows=8300)
    d, got = logit_gradients(h, of_lora), gradients(h, of_lora)
    assert not differing(got[3], rk.linear_weight_grad(v_of(d, of_lora), scored(h)))
    assert not differing(got[4], rk.linear_weight_grad(d, u_of(h, of_lora)))
    frozen = h._replace(weight=h.weight.detach())
    leaves = leaves_of(frozen, of_lora)
    found = called(frozen, of_lora, leaves, return_lse=True, return_entropy=True, weight_grad=False)
    (found.logprob + 0.1 * found.lse - 0.2 * found.entropy).sum().backward()
    assert leaves[1].grad is None
    assert not differing((leaves[0].grad, leaves[3].grad, leaves[4].grad), (got[0], got[3], got[4]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rank", [1, 7, 8, 16, 64, 72])
@pytest.mark.parametrize("logits_dtype", ["float32", "same"])
@pytest.mark.parametrize(("rows", "ins", "vocab"), [(5, 40, 300), (130, 256, 4096), (300, 44, 1031)])
def test_a_gpu_has_the_bytes_of_the_cpu_as_an_sm_90(
    rows: int, ins: int, vocab: int, logits_dtype: str, rank: int, dtype: str
) -> None:
    """Fused and unfused: with ranks and features whose rows are multiples of 16 bytes, and others."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("products of another architecture")
    h, of_lora = operands(rank, ins, dtype, vocab=vocab, rows=rows, scale=0.5)
    on_gpu = Head(*(t.cuda() for t in h)), of_lora._replace(a=of_lora.a.cuda(), b=of_lora.b.cuda())
    options = {"logits_dtype": dtype if logits_dtype == "same" else logits_dtype}
    outcomes = []
    for bias in (True, False):
        for of in ((h, of_lora), on_gpu):
            head = of[0] if bias else of[0]._replace(bias=None)
            with rk.arithmetic("sm_90"):
                leaves = [None if t is None else t.clone().requires_grad_() for t in (*head[:3], *of[1][:2])]
                found = called(head, of[1], leaves, **ALL, **options)
                (found.logprob + 0.1 * found.lse - 0.2 * found.entropy).sum().backward()
            outputs = (*found, *(None if t is None else t.grad for t in leaves))
            outcomes.append(tuple(None if t is None else t.detach().cpu() for t in outputs))
        assert not differing(outcomes[-2], outcomes[-1])


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("unit", "dtype"), linear_cases.UNIT_DTYPES)
def test_outputs_and_gradients_are_near_float64(unit: str, dtype: str, rank: int) -> None:
    with rk.arithmetic(unit):
        for ins, vocab in ((48, 300), (200, 1031)):
            assert not linear_logprob_cases.lora_failures(*operands(rank, ins, dtype, vocab=vocab), unit)


def test_float64_is_what_torch_differentiates() -> None:
    """Compares the truth of the test above with torch's autograd of the merged weight, and with the reference."""
    h, of_lora = operands(16, dtype="float32")
    of = linear_logprob_cases.lora_truth(h, of_lora)
    x, w, bias, a, b = (t.double().requires_grad_() for t in (*h[:3], of_lora.a, of_lora.b))
    logits = x @ (w + of_lora.scale * b @ a).T + bias
    logprob = torch.log_softmax(logits, -1).gather(1, h.target.clamp(min=0)[:, None])[:, 0] * (h.target != -100)
    logprob.sum().backward()
    for name, leaf in zip(("dhidden", "dweight", "dlora_a", "dlora_b"), (x, w, a, b), strict=True):
        want, facts = of.gradients[name]
        assert not beyond("linear_logprob", name, leaf.grad, want, "float32", **facts)
    arrays = [t.detach().numpy() for t in (x, w, bias, a, b)]
    reference = rk.linear_logprob_reference(
        *arrays[:2], h.target.numpy(), bias=arrays[2], lora_a=arrays[3], lora_b=arrays[4], lora_scale=of_lora.scale
    )
    allowed = row("linear_logprob", "logprob").allowed(max_abs_z=reference["max_abs_z"])
    assert (abs(reference["logprob"] - logprob.detach().numpy()) <= allowed).all()
    assert (abs(reference["logprob"] - of.logprob) <= of.off).all()


# ---- callers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_outside_of_the_loss_mask_are_as_ignored_ones(index: Any) -> None:
    h, of_lora = operands()
    mask = torch.arange(9) % 3 > 0
    ignored = h._replace(target=torch.where(mask, h.target, -100).to(index))
    masked = h._replace(hidden=torch.where(mask[:, None], h.hidden, float("nan")), target=h.target.to(index))
    outcomes = [
        (called(of, of_lora, **options), *gradients(of, of_lora, **options))
        for of, options in ((ignored, {}), (masked, {"loss_mask": mask}))
    ]
    assert not differing(*outcomes)


def test_no_rows(device: str) -> None:
    h, of_lora = operands(device=device)
    none = h._replace(hidden=h.hidden[:0], target=h.target[:0])
    leaves = leaves_of(none, of_lora)
    found = called(none, of_lora, leaves)
    found.sum().backward()
    assert found.shape == (0,)
    for leaf in leaves[1:]:
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


def test_only_ignored_rows(device: str) -> None:
    h, of_lora = operands(device=device)
    h = h._replace(hidden=torch.full_like(h.hidden, float("nan")), target=torch.full_like(h.target, -100))
    assert not called(h, of_lora).any()
    assert not any(g.any() for g in gradients(h, of_lora))


def test_numpy_and_jax_have_the_bytes_of_torch() -> None:
    h, of_lora = operands(7, dtype="float32")
    want = called(h, of_lora).numpy().tobytes()
    arrays = {"lora_a": of_lora.a.numpy(), "lora_b": of_lora.b.numpy()}
    x, w, bias, target = (t.numpy() for t in h)
    given = {"lora_scale": of_lora.scale}
    assert rk.linear_logprob(x, w, target, bias=bias, **arrays, **given).tobytes() == want
    stats = rk.linear_logprob_partial(x, w, target, bias=bias, vocab_start=0, vocab_size=VOCAB, **arrays, **given)
    assert rk.logprob_merge(stats[None]).tobytes() == want
    jax = pytest.importorskip("jax")
    arrays = {name: jax.numpy.asarray(t) for name, t in arrays.items()}
    x, w, bias, target = (jax.numpy.asarray(t) for t in (x, w, bias, target.astype(np.int32)))
    assert np.asarray(rk.linear_logprob(x, w, target, bias=bias, **arrays, **given)).tobytes() == want


@pytest.mark.parametrize("ref_grad", [False, True])
def test_a_pair_of_a_policy_with_lora_and_its_base(ref_grad: bool) -> None:
    h, of_lora = operands()
    rng = np.random.default_rng(1)
    other = linear_logprob_cases.lora(rng, h, 4, 0.25)
    want = called(h, of_lora), rk.linear_logprob(*h[:2], h.target)
    pair = rk.linear_logprob_pair(
        *h[:2], *h[:2], h.target, bias=h.bias, lora_a=of_lora.a, lora_b=of_lora.b, lora_scale=of_lora.scale
    )
    assert not differing((pair.logprob, pair.ref_logprob), want)
    a, b = (t.clone().requires_grad_() for t in other[:2])
    how = {"ref_lora_a": a, "ref_lora_b": b, "ref_lora_scale": 0.25, "ref_bias": h.bias, "ref_grad": ref_grad}
    pair = rk.linear_logprob_pair(*h[:2], *h[:2], h.target, **how)
    assert not differing((pair.logprob, pair.ref_logprob.detach()), (want[1], called(h, other)))
    assert pair.ref_logprob.requires_grad is ref_grad
    if ref_grad:
        leaves = leaves_of(h, other)
        called(h, other, leaves).sum().backward()
        pair.ref_logprob.sum().backward()
        assert not differing((a.grad, b.grad), (leaves[3].grad, leaves[4].grad))
    with pytest.raises(ValueError, match=r"^ref_lora_b: expected shape \[320, 4\]"):
        rk.linear_logprob_pair(*h[:2], *h[:2], h.target, ref_lora_a=a, ref_lora_b=b[:-1])


def test_a_cross_entropy_is_of_these_log_probabilities() -> None:
    h, of_lora = operands()
    outcomes = []
    for compute in (
        lambda o: rk.linear_cross_entropy(
            *o[:2], h.target, bias=o[2], lora_a=o[3], lora_b=o[4], lora_scale=of_lora.scale, reduction="none"
        ),
        lambda o: 0.0 - called(h, of_lora, o),
    ):
        leaves = leaves_of(h, of_lora)
        losses = compute(leaves)
        losses.sum().backward()
        outcomes.append((losses.detach(), *(t.grad for t in leaves)))
    assert not differing(*outcomes)


def test_frozen_weights_get_no_gradient_and_cost_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernel_native.ops import linear_logprob_traced
    from rl_kernel_native.ops.linear_logprob_traced import bools

    asked: list[tuple[bool, ...]] = []

    class Recording:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def linear_logprob_backward(self, *arguments: Any) -> Any:
            asked.append(tuple(bools(arguments[5])))
            return native.linear_logprob_backward(*arguments)

    native = linear_logprob_traced._C
    monkeypatch.setattr(linear_logprob_traced, "_C", Recording())
    h, of_lora = operands()
    want = gradients(h, of_lora)
    for with_bias in (True, False):
        leaves = leaves_of(h, of_lora)
        x, w, bias, a, b = leaves
        score = called(h, of_lora, [x, w, bias if with_bias else None, a, b], weight_grad=False).sum()
        every = (True, False, with_bias, True, True)
        asked.clear()
        score.backward(retain_graph=True)
        assert asked == [every]
        assert w.grad is None
        # Only the requested gradients are computed.
        for leaf, i in ((x, 0), (a, 3), (b, 4)):
            asked.clear()
            torch.autograd.grad(score, leaf, retain_graph=True)
            score.backward(inputs=[leaf], retain_graph=True)
            assert asked == [tuple(j == i for j in range(5))] * 2
    frozen = called(h, of_lora, [*h[:3], *(t.clone().requires_grad_() for t in of_lora[:2])])
    asked.clear()
    frozen.sum().backward()
    assert asked == [(False, False, False, True, True)]
    assert want[3].any()


def test_main_grad_is_added_to_beside_lora() -> None:
    h, of_lora = operands()
    want = gradients(h, of_lora)
    total = torch.zeros(h.weight.shape)
    leaves = leaves_of(h, of_lora)
    found = called(h, of_lora, leaves, return_lse=True, return_entropy=True, main_grad=total)
    (found.logprob + 0.1 * found.lse - 0.2 * found.entropy).sum().backward()
    assert leaves[1].grad is None
    assert not differing(total.to(h.weight.dtype), want[1])
    assert not differing(tuple(leaves[i].grad for i in (0, 2, 3, 4)), tuple(want[i] for i in (0, 2, 3, 4)))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_has_the_bytes_of_eager(backend: str, with_bias: bool) -> None:
    h, of_lora = operands()

    def step(*o: Any) -> Any:
        leaves = [*o[:2], o[2] if with_bias else None, *o[3:]]
        found = called(h, of_lora, leaves, return_entropy=True, dh_segments=8)
        return found.logprob, found.entropy

    torch.compiler.reset()
    outcomes = []
    for function in (step, torch.compile(step, fullgraph=True, backend=backend)):
        leaves = leaves_of(h, of_lora)
        outputs = function(*leaves)
        (outputs[0].sum() - 0.1 * outputs[1].sum()).backward()
        outcomes.append((*outputs, *(t.grad for t in leaves)))
    assert not differing(*outcomes)
    assert all(g.any() for g in outcomes[0][5:])


def test_func_grad_has_the_bytes_of_backward() -> None:
    h, of_lora = operands()
    leaves = leaves_of(h, of_lora)
    called(h, of_lora, leaves).sum().backward()

    def loss(*o: Any) -> Any:
        return called(h, of_lora, list(o)).sum()

    found = torch.func.grad(loss, argnums=tuple(range(5)))(*(t.detach() for t in leaves))
    assert not differing(found, tuple(t.grad for t in leaves))


def test_vmap_is_a_loop() -> None:
    """Batched over the adapters of several tenants."""
    h, first = operands()
    _, second = h, linear_logprob_cases.lora(np.random.default_rng(5), h, 16, first.scale)
    a, b = (torch.stack(pair) for pair in zip(first[:2], second[:2], strict=True))

    def score(lora_a: Any, lora_b: Any) -> Any:
        return called(h, first, [*h[:3], lora_a, lora_b])

    want = torch.stack([called(h, first), called(h, second)])
    assert not differing(torch.func.vmap(score)(a, b), want)
    found = torch.func.vmap(torch.func.grad(lambda *o: score(*o).sum(), argnums=(0, 1)))(a, b)
    for i, of_lora in enumerate((first, second)):
        leaves = leaves_of(h, of_lora)
        called(h, of_lora, leaves).sum().backward()
        assert not differing(tuple(g[i] for g in found), (leaves[3].grad, leaves[4].grad))


def test_a_second_derivative_is_an_error() -> None:
    h, of_lora = operands()
    leaves = leaves_of(h, of_lora)
    with pytest.raises(RuntimeError, match="has no backward"):
        torch.autograd.grad(called(h, of_lora, leaves).sum(), leaves[3], create_graph=True)


# ---- ranks -----------------------------------------------------------------------------------------------------------


def on_a_rank(rank: int, ranks: int, port: int) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    h, of_lora = operands(dtype="float32", scale=0.7)
    width = VOCAB // ranks
    own = slice(rank * width, (rank + 1) * width)
    where = {"process_group": dist.group.WORLD, "vocab_start": own.start, "vocab_size": VOCAB}
    shard, of_shard = h._replace(weight=h.weight[own], bias=h.bias[own]), of_lora._replace(b=of_lora.b[own])
    assert not differing(tuple(called(shard, of_shard, **ALL, **where)), tuple(called(h, of_lora, **ALL)))
    want = gradients(h, of_lora, dh_segments=8)
    got = gradients(shard, of_shard, dh_segments=8, **where)
    assert not differing(got[0], want[0])
    for mine, whole in ((got[1], want[1]), (got[2], want[2]), (got[4], want[4])):
        assert not differing(mine, whole[own].contiguous())
    # A rank's gradient of lora_a is a share. It is the sum over the rank's parts, one part after another.
    d, share = logit_gradients(h, of_lora), None
    for first in range(own.start, own.stop, 40):
        part = of_lora._replace(b=of_lora.b[first : first + 40].contiguous())
        v = v_of(d[:, first : first + 40].contiguous(), part)
        share = rk.linear_weight_grad(v, scored(h), out_dtype="float32", main_grad=share)
    assert not differing(got[3], share)
    dist.destroy_process_group()


def test_ranks_have_the_bits_of_one_and_shares_of_lora_a() -> None:
    port = free_port()
    context = multiprocessing.get_context("spawn")
    running = [context.Process(target=on_a_rank, args=(rank, 2, port)) for rank in range(2)]
    for process in running:
        process.start()
    for process in running:
        process.join(120)
    assert [process.exitcode for process in running] == [0, 0]
