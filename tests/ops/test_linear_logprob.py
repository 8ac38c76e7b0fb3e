"""linear_logprob has the bits of logprob of linear, forward and backward, with any workspace."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import linear_cases
import linear_logprob_cases
import rl_kernel_native as rk
from cases import differing
from rl_kernel_native.contract import row

torch = pytest.importorskip("torch")

HIDDEN, VOCAB = 48, 300
LEAST = 1 << 20  # a workspace that holds some rows, or some columns, at a time
ALL = {"return_lse": True, "return_entropy": True, "return_sum_p_sq": True, "return_status": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"temperature": 0.7, "logit_scale": 1.3, "softcap": 11.0, "valid_vocab": 290},
}


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
def head(request: pytest.FixtureRequest, device: str) -> tuple[Any, Any, Any, Any]:
    """hidden [3, 7, HIDDEN], weight, bias, and targets, one of them ignored."""
    if device != "cpu" and request.param is torch.float32:
        pytest.skip("GPU products have operands of 16 bits")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator) / HIDDEN**0.5
    bias = torch.randn(VOCAB, generator=generator) / 4
    target = torch.randint(0, 290, (3, 7), generator=generator)
    target[1, 2] = -100
    return *(t.to(device, request.param) for t in (hidden, weight, bias)), target.to(device)


def composed(
    hidden: Any, weight: Any, target: Any, *, bias: Any = None, logits_dtype: Any = "float32", **o: Any
) -> Any:
    return rk.logprob(rk.linear(hidden, weight, bias, out_dtype=logits_dtype), target, **o)


@pytest.mark.parametrize("logits_dtype", ["float32", "same"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_has_the_bits_of_logprob_of_linear(
    head: tuple[Any, ...], options: str, with_bias: bool, logits_dtype: str
) -> None:
    hidden, weight, bias, target = head
    o = {**OPTIONS[options], **ALL, "bias": bias if with_bias else None}
    o["logits_dtype"] = hidden.dtype if logits_dtype == "same" else logits_dtype
    want = composed(hidden, weight, target, **o)
    hidden = hidden.clone()
    hidden[1, 2] = float("nan")  # ignored, so never read
    assert not differing(tuple(rk.linear_logprob(hidden, weight, target, **o)), tuple(want))


@pytest.mark.parametrize("which", [0, 1], ids=["hidden", "weight"])
def test_expanded_rows_have_the_bytes_of_copies(which: int, device: str) -> None:
    """Expanded rows have stride 0, which no tensor map describes."""
    generator = torch.Generator().manual_seed(0)
    arrays = [torch.randn(n, HIDDEN, generator=generator).to(device, torch.bfloat16) for n in (20, VOCAB)]
    arrays[which] = arrays[which][:1].expand_as(arrays[which])
    target = torch.arange(20, device=device)
    got, want = [], []
    for found, copy in ((got, False), (want, True)):
        hidden, weight = ((x.contiguous() if copy else x).detach().requires_grad_() for x in arrays)
        out = rk.linear_logprob(hidden, weight, target)
        out.sum().backward()
        found += [out.detach(), hidden.grad, weight.grad]
    assert not differing(tuple(got), tuple(want))


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_are_those_of_rounded_logit_gradients(head: tuple[Any, ...], options: str) -> None:
    hidden, weight, bias, target = head
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    result = rk.linear_logprob(leaves[0], leaves[1], target, bias=leaves[2], return_lse=True, return_entropy=True,
                               **OPTIONS[options])  # fmt: skip
    w = torch.linspace(0.5, 1.5, target.numel(), device=hidden.device).view(target.shape)
    ((result.logprob * w).sum() + 0.1 * (result.lse * w).sum() - 0.2 * (result.entropy * w).sum()).backward()
    logits = rk.linear(hidden, weight, bias, out_dtype="float32")
    d = rk.logprob_backward(logits, target, result.lse.detach(), dlogprob=w, dlse=0.1 * w, dentropy=-0.2 * w,
                            entropy=result.entropy.detach(), **OPTIONS[options]).to(hidden.dtype)  # fmt: skip
    scored = torch.where((target != -100).unsqueeze(-1), hidden, torch.zeros_like(hidden))
    want = (rk.linear_input_grad(d, weight), rk.linear_weight_grad(d, scored), rk.linear_bias_grad(d))
    assert not differing(tuple(t.grad for t in leaves), want)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_outside_of_the_loss_mask_are_as_ignored_ones(head: tuple[Any, ...], index: Any) -> None:
    hidden, weight, bias, target = head
    target = target.to(index)
    mask = torch.rand(target.shape, generator=torch.Generator().manual_seed(1)).to(target.device) < 0.6
    ignored = torch.where(mask, target, -100)
    outcomes = []
    for ids, options in ((ignored, {}), (target, {"loss_mask": mask})):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        leaves[0].data[~mask] = float("nan")  # not scored, so never read
        result = rk.linear_logprob(leaves[0], leaves[1], ids, bias=leaves[2], **ALL, **options)
        (result.logprob + result.lse + result.entropy).sum().backward()
        outcomes.append((*(o.detach() for o in result), *(t.grad for t in leaves)))
    assert not differing(*outcomes)
    assert not outcomes[1][0][~mask].any()
    assert not outcomes[1][5][~mask].any()
    assert outcomes[1][5][mask & (target != -100)].any(-1).all()


def test_a_loss_mask_of_numpy_and_jax_has_the_bytes_of_torch() -> None:
    rng = np.random.default_rng(3)
    hidden, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 3, 32), (70, 32)))
    target, mask = rng.integers(0, 70, (4, 3)).astype(np.int32), rng.random((4, 3)) < 0.5
    want = rk.linear_logprob(*(torch.from_numpy(a) for a in (hidden, weight, target)), loss_mask=torch.from_numpy(mask))
    assert rk.linear_logprob(hidden, weight, target, loss_mask=mask).tobytes() == want.numpy().tobytes()
    jax = pytest.importorskip("jax")
    arrays = [jax.numpy.asarray(a) for a in (hidden, weight, target, mask)]
    got = rk.linear_logprob(*arrays[:3], loss_mask=arrays[3])
    assert np.asarray(got).tobytes() == want.numpy().tobytes()
    reference = rk.linear_logprob_reference(hidden, weight, target, loss_mask=mask)
    allowed = row("linear_logprob", "logprob").allowed(max_abs_z=reference["max_abs_z"])
    assert (abs(want.numpy() - reference["logprob"]) <= allowed).all()


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_workspace_of_any_size_changes_no_bit(rows: int, device: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = torch.randn(rows, 64, generator=generator), torch.randn(2000, 64, generator=generator) / 8
    target = torch.randint(0, 2000, (rows,), generator=generator).to(device)
    hidden, weight = hidden.to(device, torch.bfloat16), weight.to(device, torch.bfloat16)
    found = []
    for size in (LEAST, 4 << 20, 512 << 20):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        result = rk.linear_logprob(*leaves, target, return_entropy=True, workspace_bytes=size)
        (result.logprob + result.entropy).sum().backward()
        found.append((result.logprob, result.entropy, *(t.grad for t in leaves)))
    assert not differing(found[0], found[1])
    assert not differing(found[0], found[2])


@pytest.mark.parametrize("in_features", [64, 13])  # with and without 16-byte aligned rows of dweight
@pytest.mark.parametrize("logits_dtype", ["bfloat16", "float32"])
def test_gradients_of_logits_may_lie_in_dweight(in_features: int, logits_dtype: str, device: str) -> None:
    """The workspace has room for few columns, so most gradients of logits lie in dweight's memory before dweight is
    written."""
    generator = torch.Generator().manual_seed(in_features)
    hidden = torch.randn(300, in_features, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(20_000, in_features, generator=generator).to(device, torch.bfloat16)
    target = torch.randint(0, 20_000, (300,), generator=generator).to(device)
    target[40:200] = -100
    found = []
    for size in (256 << 10, 512 << 20):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        logprob = rk.linear_logprob(*leaves, target, logits_dtype=logits_dtype, workspace_bytes=size)
        found.append((logprob.detach(), *torch.autograd.grad(logprob.sum(), leaves)))
    assert not differing(found[0], found[1])


# Rows of a chunk's gradients begin at multiples of 16 bytes, and the last chunk has an odd number of columns.
@pytest.mark.parametrize("form", ["plain", "rounded", "bias", "softcap"])
@pytest.mark.parametrize("size", [LEAST, None], ids=["chunks", "at once"])
def test_gradients_of_an_odd_vocabulary(form: str, size: int | None, device: str) -> None:
    rows, features, columns = 300, 64, 4003
    generator = torch.Generator().manual_seed(5)
    hidden, weight, of_columns, dy = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for shape in ((rows, features), (columns, features), (columns,), (rows,))
    )
    target = torch.randint(0, columns, (rows,), generator=generator).to(device)
    target[40:90] = -100
    logits_dtype = "bfloat16" if form == "rounded" else "float32"
    options: dict[str, Any] = {"softcap": 9.0} if form == "softcap" else {}
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, of_columns)[: 3 if form == "bias" else 2]]
    bias = leaves[2] if form == "bias" else None
    kept = {"return_lse": True, "workspace_bytes": size}
    result = rk.linear_logprob(*leaves[:2], target, bias=bias, logits_dtype=logits_dtype, **kept, **options)
    result.logprob.backward(dy.float())
    logits = rk.linear(hidden, weight, bias, out_dtype=logits_dtype).detach()
    d = rk.logprob_backward(logits, target, result.lse.detach(), dlogprob=dy.float(), **options).to(hidden.dtype)
    scored = torch.where((target != -100).unsqueeze(-1), hidden, torch.zeros_like(hidden))
    want = (rk.linear_input_grad(d, weight), rk.linear_weight_grad(d, scored), rk.linear_bias_grad(d))
    assert not differing(tuple(t.grad for t in leaves), want[: len(leaves)])


def test_the_default_workspace_serves_many_rows(device: str) -> None:
    if device == "cpu":
        pytest.skip("a CPU allocates its own workspace; tests/cpp/test_linear_logprob.cpp tests the sizes")
    rows, features, columns = 32768, 4096, 40_000  # more than 512 MiB for float32 sums of gradients of 16 bits
    hidden = torch.randn(rows, features, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(columns, features, device=device) / 64).bfloat16().requires_grad_()
    target = torch.randint(0, columns, (rows,), device=device)
    dy = torch.randn(rows, device=device)
    found = []
    for size in (None, 2 << 30):
        logprob = rk.linear_logprob(hidden, weight, target, workspace_bytes=size)
        found.append(torch.autograd.grad(logprob, (hidden, weight), dy))
    assert not differing(*found)
    total = torch.zeros(columns, features, device=device)
    rk.workspace_stats(reset=True)
    rk.linear_logprob(hidden, weight, target, main_grad=total).backward(dy)
    assert rk.workspace_stats()[f"cuda:{torch.cuda.current_device()}"].most_bytes <= 256 << 20
    assert not differing(hidden.grad, found[0][0])


def test_a_workspace_serves_the_rows_that_are_left_over(device: str) -> None:
    """A fused kernel takes 8192 rows, then 7296, which leave more work for the last wave of 132 blocks."""
    if device == "cpu":
        pytest.skip("its workspaces do not depend on the rows")
    rows, columns = 8192 + 7296, 20_000
    hidden, weight = torch.randn(rows, 64, device=device).bfloat16(), torch.randn(columns, 64, device=device).bfloat16()
    target = torch.randint(0, columns, (rows,), device=device)
    found = rk.linear_logprob(hidden, weight, target)
    for part in (slice(0, 8192), slice(8192, rows)):
        assert not differing(rk.linear_logprob(hidden[part], weight, target[part]), found[part])


@pytest.mark.parametrize("columns", [200, 8400])  # fewer columns than rows, and more: this decides which sums are kept
def test_a_gradient_of_16_bits_is_rounded_once(columns: int, device: str) -> None:
    rows = 8192 + 100  # two blocks of tokens
    hidden = torch.randn(rows, 16, device=device).bfloat16().requires_grad_()
    weight = torch.randn(columns, 16, device=device).bfloat16().requires_grad_()
    target = torch.randint(0, columns, (rows,), device=device)
    total = torch.zeros(columns, 16, device=device)
    rk.linear_logprob(hidden, weight, target, main_grad=total).sum().backward()
    wanted, hidden.grad = hidden.grad, None
    rk.linear_logprob(hidden, weight, target).sum().backward()
    assert not differing(weight.grad, total.bfloat16())
    assert not differing(hidden.grad, wanted)


@pytest.mark.parametrize("form", ["plain", "two blocks", "dh_segments", "lora", "main_grad"])
def test_a_workspace_too_small_for_backward_is_refused_in_forward(form: str, device: str) -> None:
    rows, features, columns = 8200 if form in ("two blocks", "main_grad") else 40, 16, 192

    def leaf(*shape: int) -> Any:
        return torch.randn(shape).to(device, torch.bfloat16).requires_grad_()

    leaves = {"hidden": leaf(rows, features), "weight": leaf(columns, features)}
    options: dict[str, Any] = {}
    if form == "dh_segments":
        options = {"dh_segments": 8}
    elif form == "lora":
        leaves |= {"lora_a": leaf(8, features), "lora_b": leaf(columns, 8)}
    elif form == "main_grad":
        options = {"main_grad": torch.zeros(columns, features, device=device)}
    target = torch.randint(0, columns, (rows,), generator=torch.Generator().manual_seed(1)).to(device)
    refused = r"workspace_bytes: expected at least (\d+) for the backward of this call, got "
    with pytest.raises(ValueError, match=refused) as error:
        rk.linear_logprob(**leaves, target=target, workspace_bytes=0, **options)
    match = re.search(refused, str(error.value))
    assert match
    least = int(match[1])
    with pytest.raises(ValueError, match=refused):
        rk.linear_logprob(**leaves, target=target, workspace_bytes=least - 1, **options)
    try:
        found = rk.linear_logprob(**leaves, target=target, workspace_bytes=least, **options)
    except ValueError as of_forward:
        more = re.search(r"expected at least (\d+) for this call", str(of_forward))
        assert more
        found = rk.linear_logprob(**leaves, target=target, workspace_bytes=int(more[1]), **options)
    found.sum().backward()


def test_flags_are_true_or_false(device: str) -> None:
    hidden, weight = (torch.randn(n, 16, device=device).bfloat16() for n in (5, 40))
    target = torch.arange(5, device=device)
    for flags in ({"return_lse": 2}, {"return_entropy": None}):
        with pytest.raises(TypeError, match=f"{next(iter(flags))}: expected a bool, got (int|None)"):
            rk.linear_logprob(hidden, weight, target, **flags)


def test_of_a_pair_the_bad_head_is_named() -> None:
    hidden, weight, target = torch.randn(5, 16), torch.randn(40, 16), torch.arange(5)
    with pytest.raises(ValueError, match=r"^row 0 "):
        rk.linear_logprob_pair(hidden * float("nan"), weight, hidden, weight, target, check=True)
    with pytest.raises(ValueError, match=r"^ref_hidden, ref_weight: row 0 "):
        rk.linear_logprob_pair(hidden, weight, hidden * float("nan"), weight, target, check=True)


def test_main_grad_is_no_memory_of_what_backward_reads(device: str) -> None:
    total = torch.zeros(64, 16, device=device)
    hidden = torch.randn(40, 16, device=device).bfloat16()
    weight = torch.randn(64, 16, device=device).bfloat16().requires_grad_()
    target = torch.randint(0, 64, (40,), device=device)
    kept = (total.view(torch.int32).view(-1)[:40], torch.arange(41, device=device))
    for name, given in (("temperature", {"temperature": total.view(-1)[:40]}), ("kept_ids", {"kept": kept})):
        with pytest.raises(ValueError, match=f"main_grad: may share memory with {name}"):
            rk.linear_logprob(hidden, weight, target, main_grad=total, **given)


def test_a_row_has_one_result_in_any_batch(head: tuple[Any, ...]) -> None:
    hidden, weight, bias, target = head
    rows, targets = hidden.reshape(-1, HIDDEN), target.reshape(-1)
    whole = rk.linear_logprob(rows, weight, targets, bias=bias)
    for i in range(len(rows)):
        assert not differing(rk.linear_logprob(rows[i], weight, targets[i], bias=bias), whole[i])
        assert not differing(rk.linear_logprob(rows[i:], weight, targets[i:], bias=bias), whole[i:])
    assert not differing(rk.linear_logprob(hidden[:, :-1], weight, target[:, :-1], bias=bias),
                         whole.view(3, 7)[:, :-1].contiguous())  # fmt: skip


def test_main_grad_is_added_to(head: tuple[Any, ...]) -> None:
    hidden, weight, _, target = head
    total = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5)).to(hidden.device)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    rk.linear_logprob(*leaves, target).sum().backward()
    start, grown = total.clone(), total.clone()
    other = [t.clone().requires_grad_() for t in (hidden, weight)]
    rk.linear_logprob(*other, target, main_grad=grown).sum().backward()
    assert other[1].grad is None
    assert not differing(other[0].grad, leaves[0].grad)
    lse = rk.linear_logprob(hidden, weight, target, return_lse=True).lse
    logits = rk.linear(hidden, weight, out_dtype="float32")
    d = rk.logprob_backward(logits, target, lse, dlogprob=torch.ones_like(lse)).to(hidden.dtype)
    scored = torch.where((target != -100).unsqueeze(-1), hidden, torch.zeros_like(hidden))
    assert not differing(grown, rk.linear_weight_grad(d, scored, main_grad=start))


def test_main_grad_waits_for_a_backward_that_asks_for_the_gradient_of_weight(head: tuple[Any, ...]) -> None:
    hidden, weight, _, target = head
    total = torch.zeros(VOCAB, HIDDEN, device=hidden.device)
    x, w = (t.clone().requires_grad_() for t in (hidden, weight))
    rk.linear_logprob(x, w, target, main_grad=total).sum().backward(inputs=[x])
    assert x.grad.any()
    assert not total.any()


@pytest.mark.parametrize("ref_grad", [False, True])
def test_a_pair_has_the_bits_of_two_calls(ref_grad: bool, head: tuple[Any, ...]) -> None:
    hidden, weight, bias, target = head
    generator = torch.Generator().manual_seed(7)
    other = [torch.randn(s, generator=generator).to(hidden) for s in ((3, 7, 32), (VOCAB, 32), (VOCAB,))]
    mask = torch.arange(target.numel(), device=target.device).view(target.shape) % 3 > 0
    options = {**OPTIONS["everything"], **ALL, "loss_mask": mask}
    want = []
    for operands in ((hidden, weight, bias), other):
        leaves = [t.clone().requires_grad_() for t in operands]
        result = rk.linear_logprob(leaves[0], leaves[1], target, bias=leaves[2], **options)
        result.logprob.sum().backward()
        want.append((*result, *(t.grad for t in leaves)))
    policy, reference = ([t.clone().requires_grad_() for t in o] for o in ((hidden, weight, bias), other))
    biases = {"bias": policy[2], "ref_bias": reference[2]}
    pair = rk.linear_logprob_pair(*policy[:2], *reference[:2], target, **biases, ref_grad=ref_grad, **options)
    assert pair.ref_logprob.requires_grad is ref_grad
    (pair.logprob.sum() + pair.ref_logprob.sum()).backward()
    assert not differing((*pair[0::2], *(t.grad for t in policy)), want[0])
    assert not differing(
        (*pair[1::2], *(t.grad if ref_grad else w for t, w in zip(reference, want[1][5:], strict=True))), want[1]
    )
    assert ref_grad or all(t.grad is None for t in reference)
    only = rk.linear_logprob_pair(hidden, weight, *other[:2], target)
    assert only[2:] == (None,) * 8


def test_an_error_about_the_reference_names_it() -> None:
    x, w, target = torch.randn(3, 16), torch.randn(40, 16), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"ref_weight: expected \[40\] rows \(those of weight\), got \[41\]"):
        rk.linear_logprob_pair(x, w, x, torch.randn(41, 16), target)
    with pytest.raises(ValueError, match=r"ref_weight: expected shape .* of ref_hidden"):
        rk.linear_logprob_pair(x, w, x, torch.randn(40, 8), target)
    with pytest.raises(TypeError, match=r"linear_logprob_pair\(\) got an unexpected keyword argument 'tmperature'"):
        rk.linear_logprob_pair(x, w, x, w, target, tmperature=1)
    padded = rk.linear_logprob_pair(x, w, x, torch.cat([w, w]), target, valid_vocab=40, canonical_vocab=80)
    assert not differing(padded.logprob, padded.ref_logprob)
    found = rk.linear_logprob_pair(*(t.numpy() for t in (x, w, x, w, target)))
    assert found.logprob.tobytes() == found.ref_logprob.tobytes()


def test_a_frozen_head_gets_no_gradient(head: tuple[Any, ...]) -> None:
    hidden, weight, _, target = head
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    rk.linear_logprob(*leaves, target, weight_grad=False).sum().backward()
    assert leaves[1].grad is None
    assert leaves[0].grad is not None


def test_numpy_has_the_bytes_of_torch() -> None:
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((5, 32)).astype(np.float32)
    weight = rng.standard_normal((70, 32)).astype(np.float32)
    target = np.array([1, 5, -100, 69, 0])
    want = rk.linear_logprob(*(torch.from_numpy(a) for a in (hidden, weight, target)), return_entropy=True)
    got = rk.linear_logprob(hidden, weight, target, return_entropy=True)
    assert got.logprob.tobytes() == want.logprob.numpy().tobytes()
    assert got.entropy.tobytes() == want.entropy.numpy().tobytes()


def test_no_rows(device: str) -> None:
    hidden = torch.zeros(0, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.ones(40, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
    result = rk.linear_logprob(hidden, weight, torch.zeros(0, dtype=torch.int64, device=device))
    result.sum().backward()
    assert result.shape == (0,)
    assert not weight.grad.any()


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "target shape": ({"target": torch.zeros(4, dtype=torch.int64)}, ValueError, "target: expected shape"),
    "weight width": ({"weight": torch.zeros(40, 8)}, ValueError, "weight: expected"),
    "weight dtype": ({"weight": torch.zeros(40, 16, dtype=torch.float16)}, TypeError, "weight: expected"),
    "bias": ({"bias": torch.zeros(41)}, ValueError, "bias: expected"),
    "logits_dtype": ({"logits_dtype": "float16"}, TypeError, "logits_dtype: expected float32"),
    "workspace": ({"workspace_bytes": 10}, ValueError, "workspace_bytes: expected at least"),
    "temperature": ({"temperature": 0.0}, ValueError, "temperature: expected a finite number > 0"),
    "main_grad": ({"main_grad": torch.zeros(40, 16), "weight_grad": False}, ValueError, "main_grad: weight_grad"),
    "loss_mask dtype": ({"loss_mask": torch.ones(3) * 1j}, TypeError, "loss_mask: expected dtype bool, of integers"),
    "loss_mask shape": ({"loss_mask": torch.ones(1, dtype=torch.bool)}, ValueError, r"loss_mask: expected shape \[3\]"),
    "loss_mask type": ({"loss_mask": [True] * 3}, TypeError, "loss_mask: expected a torch.Tensor, got list"),
    "masked int32": (
        {
            "loss_mask": torch.ones(3, dtype=torch.bool),
            "target": torch.zeros(3, dtype=torch.int32),
            "ignore_index": 1 << 31,
        },
        ValueError,
        "ignore_index: expected an integer of 32 bits",
    ),
    "checked": ({"target": torch.tensor([1, 77, 3]), "check": True}, ValueError, r"row 1 \(the first of 1 bad rows\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.randn(3, 16), "weight": torch.randn(40, 16), "target": torch.tensor([1, 2, 3]),
    }  # fmt: skip
    changed, error, text = BAD[case]
    with pytest.raises(error, match=text):
        rk.linear_logprob(**{**arguments, **changed})


@pytest.mark.parametrize("name", ["hidden", "weight"])
def test_a_lone_number_is_named(name: str) -> None:
    head = {"hidden": torch.randn(3, 16).bfloat16(), "weight": torch.randn(40, 16).bfloat16()}
    head[name] = torch.tensor(1.0).bfloat16()
    with pytest.raises(ValueError, match=f"{name}: expected shape"):
        rk.linear_logprob(**{k: v.requires_grad_() for k, v in head.items()}, target=torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("unit", "dtype"), linear_cases.UNIT_DTYPES)
def test_outputs_and_gradients_are_near_float64(unit: str, dtype: str, options: str) -> None:
    """Products of every unit, within the bounds of contract.py."""
    rng = np.random.default_rng(linear_cases.UNITS.index(unit))
    with rk.arithmetic(unit):
        for rows, ins, vocab in ((9, 48, 300), (3, 200, 1031)):
            given = OPTIONS[options] | ({"valid_vocab": vocab - 7} if options == "everything" else {})
            o = linear_logprob_cases.head(rng, rows, ins, vocab, dtype)
            o.target[o.target >= vocab - 7] = 0
            assert not linear_logprob_cases.failures(o, unit, **given)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("valid_vocab", True, "expected an integer, got bool"),
        ("canonical_vocab", 1.5, "expected an integer, got float"),
        ("ignore_index", True, "expected an integer, got bool"),
        ("temperature", "1", "expected a number, got str"),
        ("workspace_bytes", True, "expected a.*, got bool"),
        ("workspace_bytes", 1 << 70, "expected an integer of 64 bits"),
    ],
)
def test_numbers_are_checked_where_a_call_is_compiled_too(compiled: bool, name: str, value: Any, text: str) -> None:
    def score(hidden: Any) -> Any:
        return rk.linear_logprob(hidden, torch.ones(40, 16), torch.arange(5), **{name: value})

    with pytest.raises((TypeError, ValueError), match=f"{name}: {text}"):
        (torch.compile(score, backend="eager") if compiled else score)(torch.ones(5, 16))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_has_the_bytes_of_eager(backend: str, head: tuple[Any, ...]) -> None:
    hidden, weight, bias, target = head
    mask = torch.arange(target.numel(), device=target.device).view(target.shape) % 3 > 0

    def step(x: Any, w: Any, b: Any) -> Any:
        options = {**OPTIONS["everything"], "loss_mask": mask}
        result = rk.linear_logprob(x, w, target, bias=b, return_entropy=True, **options)
        return result.logprob, result.entropy

    torch.compiler.reset()
    outcomes = []
    for function in (step, torch.compile(step, fullgraph=True, backend=backend)):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        outputs = function(*leaves)
        (outputs[0].sum() - 0.1 * outputs[1].sum()).backward()
        outcomes.append((*outputs, *(t.grad for t in leaves)))
    assert not differing(*outcomes)


def test_func_grad_has_the_bytes_of_backward(head: tuple[Any, ...]) -> None:
    hidden, weight, _, target = head
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    mask = torch.arange(target.numel(), device=target.device).view(target.shape) % 3 > 0
    rk.linear_logprob(*leaves, target, loss_mask=mask).sum().backward()

    def loss(x: Any, w: Any) -> Any:
        return rk.linear_logprob(x, w, target, loss_mask=mask).sum()

    found = torch.func.grad(loss, argnums=(0, 1))(hidden, weight)
    assert not differing(found, tuple(t.grad for t in leaves))


def test_a_second_derivative_is_an_error(head: tuple[Any, ...]) -> None:
    hidden, weight, _, target = head
    x = hidden.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="has no backward"):
        torch.autograd.grad(rk.linear_logprob(x, weight, target).sum(), x, create_graph=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_tangent_is_an_error(rng: np.random.Generator, device: str) -> None:
    hidden, weight, _, target = linear_logprob_cases.head(rng, 5, 32, 90, device=device)
    forward_ad = torch.autograd.forward_ad

    def score(x: Any) -> Any:
        return rk.linear_logprob(x, weight, target)

    def push(x: Any) -> Any:
        return torch.func.jvp(score, (x,), (x,))[1]

    torch.compiler.reset()
    words = "call logprob of linear for that|jvp function|a derivative is wanted where it would be lost"
    compiled = torch.compile(score, backend="eager")
    compiled(hidden)  # a graph without tangents
    for function in (push, torch.compile(push, backend="eager")):
        with pytest.raises(Exception, match=words):
            function(hidden)
    for function in (score, compiled):
        with forward_ad.dual_level(), pytest.raises(Exception, match=words):
            function(forward_ad.make_dual(hidden, hidden))
    y = score(hidden.clone().requires_grad_())
    with forward_ad.dual_level(), pytest.raises(Exception, match=words):
        y.backward(forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


def test_workspaces_are_counted_by_device(device: str) -> None:
    rk.workspace_stats(reset=True)
    assert rk.workspace_stats() == {}
    hidden, weight = torch.randn(300, 64, device=device).bfloat16(), torch.randn(1000, 64, device=device).bfloat16()
    target = torch.arange(300, device=device)
    for bytes_ in (LEAST, 2 * LEAST):
        rk.linear_logprob(hidden, weight, target, kept=None, softcap=30.0, workspace_bytes=bytes_)
    if device == "cpu":  # the CPU backend allocates its own workspace
        assert rk.workspace_stats() == {}
        return
    found = rk.workspace_stats(reset=True)[f"{device}:{torch.cuda.current_device()}"]
    assert found.calls == 2
    assert 0 < found.last_bytes <= found.most_bytes <= 2 * LEAST
    assert rk.workspace_stats() == {}
