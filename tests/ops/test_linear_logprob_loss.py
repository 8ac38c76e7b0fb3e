"""linear_cross_entropy: torch's cross-entropy in float64, and the same bits for any split of the rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import linear_logprob_cases
import rl_kernel_native as rk
from cases import beyond, differing
from linear_logprob_cases import Head
from rl_kernel_native.contract import row

torch = pytest.importorskip("torch")

Z_LOSS = 0.03


def head(device: str = "cpu", rows: int = 9, vocab: int = 90, dtype: str = "bfloat16") -> Head:
    return linear_logprob_cases.head(np.random.default_rng(1), rows, 40, vocab, dtype, device)


def losses_of_torch(h: Head, z_loss: float, reduction: str) -> tuple[Any, tuple[Any, ...]]:
    """cross_entropy in float64, and Liger's z-loss, whose mean is over rows that are not ignored."""
    leaves = [t.double().requires_grad_() for t in h[:3]]
    logits = leaves[0] @ leaves[1].T + leaves[2]
    found = torch.nn.functional.cross_entropy(logits, h.target, reduction="none")
    found = found + torch.where(h.target != -100, z_loss * logits.logsumexp(-1).square(), 0.0)
    if reduction != "none":
        found = found.sum() / ((h.target != -100).sum() if reduction == "mean" else 1)
    found.sum().backward()
    return found.detach(), tuple(t.grad for t in leaves)


@pytest.mark.parametrize("z_loss", [0.0, Z_LOSS])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loss_and_gradients_are_those_of_torch_in_float64(
    dtype: str, reduction: str, z_loss: float, device: str
) -> None:
    if device != "cpu" and dtype == "float32":
        pytest.skip("GPU products have operands of 16 bits")
    h = head(device, dtype=dtype)
    leaves = [t.clone().requires_grad_() for t in h[:3]]
    how: dict[str, Any] = {"reduction": reduction, "z_loss": z_loss}
    loss = rk.linear_cross_entropy(leaves[0], leaves[1], h.target, bias=leaves[2], **how)
    loss.sum().backward()
    unit = "ieee" if device == "cpu" else "sm_90"
    assert not linear_logprob_cases.loss_failures(h, loss, **how)
    want, slopes = losses_of_torch(h, z_loss, reduction)
    reference = rk.linear_cross_entropy_reference(
        *(t.double().cpu().numpy() for t in h[:2]), h.target.cpu().numpy(), bias=h.bias.double().cpu().numpy(), **how
    )
    np.testing.assert_allclose(reference["loss"], want.cpu().numpy(), rtol=1e-12)
    of = linear_logprob_cases.head_truth(h)
    divisor = float(reference["divisor"])
    given = (-1.0 * of.counted / divisor, 2 * z_loss * of.lse / divisor, 0.0 * of.lse)
    off_lse = row("linear_logprob", "lse").allowed(max_abs_z=of.size)
    facts = linear_logprob_cases.gradient_truth(h, of, given, unit, 2 * z_loss * off_lse / divisor)
    for name, leaf, slope in zip(("dhidden", "dweight", "dbias"), leaves, slopes, strict=True):
        assert not beyond("linear_logprob", name, leaf.grad, slope, dtype, **facts[name][1])


def test_the_sum_is_that_of_a_sequence_and_the_mean_its_quotient(device: str) -> None:
    h = head(device, rows=700)
    rows = rk.linear_cross_entropy(*h[:2], h.target, bias=h.bias, reduction="none", z_loss=Z_LOSS)
    total = rk.linear_cross_entropy(*h[:2], h.target, bias=h.bias, reduction="sum", z_loss=Z_LOSS)
    mean = rk.linear_cross_entropy(*h[:2], h.target, bias=h.bias, z_loss=Z_LOSS)
    found = rk.linear_logprob(*h[:2], h.target, bias=h.bias, return_lse=True)
    assert not differing(rows, found.lse * found.lse * Z_LOSS - found.logprob)
    assert not differing(total, rk.sequence_logprob(rows[None]).sum[0])
    assert not differing(mean, total / torch.tensor(699.0, device=h.hidden.device))
    assert not differing(rk.linear_cross_entropy(*h[:2], h.target, bias=h.bias, z_loss=Z_LOSS, denominator=699), mean)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_padded_and_packed_sequences_have_one_loss(reduction: str, device: str) -> None:
    h = head(device, rows=4 * 2100)  # one sequence is longer than a chunk of 2048 positions
    lengths = (2100, 0, 37, 1999)
    hidden, target = h.hidden.view(4, 2100, -1), h.target.view(4, 2100).clone()
    for i, length in enumerate(lengths):
        target[i, length:] = -100
    how: dict[str, Any] = {"bias": h.bias, "z_loss": Z_LOSS, "reduction": reduction}
    want = rk.linear_cross_entropy(hidden, h.weight, target, **how)
    wider = torch.nn.functional.pad(hidden, (0, 0, 0, 50)), torch.nn.functional.pad(target, (0, 50), value=-100)
    assert not differing(rk.linear_cross_entropy(wider[0], h.weight, wider[1], **how), want)
    cu_seqlens = torch.tensor((0, *itertools.accumulate(lengths)), device=device)
    rows = [torch.cat([t[i, :n] for i, n in enumerate(lengths)]) for t in (hidden, target)]
    for cuts in (cu_seqlens, cu_seqlens.int()):
        assert not differing(rk.linear_cross_entropy(rows[0], h.weight, rows[1], cu_seqlens=cuts, **how), want)
    sums = [rk.linear_cross_entropy(hidden[i], h.weight, target[i], **how | {"reduction": "sum"}) for i in range(4)]
    total = rk.sequence_logprob(torch.stack(sums)[None]).sum[0]
    assert not differing(total / (target != -100).sum() if reduction == "mean" else total, want)


@pytest.mark.parametrize("denominator", [1234.0, torch.tensor([1234], dtype=torch.int64), torch.tensor(1234.0)])
def test_a_denominator_gives_gradients_that_no_split_changes(denominator: Any, device: str) -> None:
    h = head(device, rows=8292)  # a block of 8192 tokens, and a remainder
    if isinstance(denominator, torch.Tensor):
        denominator = denominator.to(device)
    outcomes = []
    for cuts in ((0, 8292), (0, 8192, 8292)):
        total = torch.zeros(h.weight.shape, device=device)
        weight, gradients = h.weight.clone().requires_grad_(), []
        for first, last in itertools.pairwise(cuts):
            x = h.hidden[first:last].clone().requires_grad_()
            how = {"denominator": denominator, "z_loss": Z_LOSS, "main_grad": total}
            rk.linear_cross_entropy(x, weight, h.target[first:last], bias=h.bias, **how).backward()
            gradients.append(x.grad)
        outcomes.append((torch.cat(gradients), total))
    assert not differing(*outcomes)
    assert outcomes[0][1].any()


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_loss_of_no_scored_rows_is_0(rows: int, device: str) -> None:
    h = head(device, rows=5)
    leaves = [t.clone().requires_grad_() for t in (h.hidden[:rows], h.weight)]
    mask = torch.zeros(rows, dtype=torch.bool, device=device)
    loss = rk.linear_cross_entropy(*leaves, h.target[:rows], loss_mask=mask, z_loss=Z_LOSS)
    loss.backward()
    assert loss.shape == ()
    assert float(loss.detach()) == 0.0
    assert not leaves[0].grad.any()
    assert not leaves[1].grad.any()


def test_a_bad_target_makes_the_loss_nan() -> None:
    h = head()
    h.target[0] = 90
    assert rk.linear_cross_entropy(*h[:2], h.target).isnan()
    with pytest.raises(ValueError, match=r"row 0 \(the first of 1 bad rows\)"):
        rk.linear_cross_entropy(*h[:2], h.target, check=True)


def test_numpy_and_jax_have_the_bytes_of_torch() -> None:
    h = head(dtype="float32")
    arrays = [t.numpy() for t in h]
    jax = pytest.importorskip("jax")
    for how in (
        {},
        {"z_loss": Z_LOSS},
        {"denominator": 7, "reduction": "mean"},
        {"reduction": "none", "z_loss": Z_LOSS},
    ):
        want = rk.linear_cross_entropy(*h[:2], h.target, bias=h.bias, **how).numpy()
        for found in (arrays, [jax.numpy.asarray(a) for a in arrays]):
            got = np.asarray(rk.linear_cross_entropy(*found[:2], found[3], bias=found[2], **how))
            assert got.shape == want.shape
            assert got.tobytes() == want.tobytes()


def test_compiled_and_func_have_the_bytes_of_eager() -> None:
    h = head()
    mask = torch.arange(9) % 4 > 0

    def loss(x: Any, w: Any) -> Any:
        return rk.linear_cross_entropy(x, w, h.target, bias=h.bias, loss_mask=mask, z_loss=Z_LOSS)

    torch.compiler.reset()
    outcomes = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in h[:2]]
        function(*leaves).backward()
        outcomes.append((function(*leaves).detach(), *(t.grad for t in leaves)))
    assert not differing(*outcomes)
    assert not differing(torch.func.grad(loss, argnums=(0, 1))(*h[:2]), outcomes[0][1:])


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "reduction": ({"reduction": "average"}, ValueError, "reduction: expected"),
    "z_loss": ({"z_loss": -0.1}, ValueError, "z_loss: expected a finite number >= 0"),
    "z_loss type": ({"z_loss": "1"}, TypeError, "z_loss: expected a number"),
    "zero": ({"denominator": 0}, ValueError, "denominator: expected a finite number > 0"),
    "of a sum": ({"denominator": 2, "reduction": "sum"}, ValueError, 'denominator: expected None with reduction="sum"'),
    "cu_seqlens": ({"cu_seqlens": torch.tensor([0, 9]), "reduction": "none"}, ValueError, "cu_seqlens: expected None"),
    "cuts": ({"cu_seqlens": torch.tensor([0.0, 9.0])}, TypeError, "cu_seqlens: expected"),
    "shape": ({"denominator": torch.ones(2)}, ValueError, "denominator: expected one element"),
    "dtype": ({"denominator": torch.ones((), dtype=torch.float64)}, TypeError, "denominator: expected dtype float32"),
    "gradient": ({"denominator": torch.ones((), requires_grad=True)}, ValueError, "denominator: has no gradient here"),
    "type": ({"denominator": "9"}, TypeError, "denominator: expected a number or a torch.Tensor, got str"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    h = head()
    changed, error, text = BAD[case]
    with pytest.raises(error, match=text):
        rk.linear_cross_entropy(*h[:2], h.target, **changed)


def test_packed_targets_have_one_dimension() -> None:
    h = head()
    rows = [t[:8].reshape(2, 4, *t.shape[1:]) for t in (h.hidden, h.target)]
    with pytest.raises(ValueError, match=r"target: expected shape \[num_tokens\] beside cu_seqlens, got \[2, 4\]"):
        rk.linear_cross_entropy(rows[0], h.weight, rows[1], cu_seqlens=torch.tensor([0, 8]))


@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_any_number_of_sequences(strict: bool) -> None:
    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(90, 16, generator=torch.Generator().manual_seed(0)))

        def forward(self, hidden: Any, target: Any) -> Any:
            return rk.linear_cross_entropy(hidden, self.weight, target)

    loss, batch = Loss(), torch.export.Dim("batch", min=2, max=64)
    hidden, target = torch.randn(3, 9, 16), torch.randint(0, 90, (3, 9))
    exported = torch.export.export(loss, (hidden, target), dynamic_shapes=({0: batch}, {0: batch}), strict=strict)
    assert not differing(exported.module()(hidden[:2], target[:2]), loss(hidden[:2], target[:2]))


def weights_of(h: Head) -> Any:
    """Fractions, and NaN where a row is not scored."""
    w = torch.linspace(0.1, 1.7, len(h.target))
    return torch.where(h.target == -100, torch.nan, w)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_token_weights_multiply_rows_and_divide_the_mean(reduction: str) -> None:
    h = head(dtype="float32")
    leaves = [t.clone().requires_grad_() for t in h[:2]]
    w = weights_of(h)
    loss, z = rk.linear_cross_entropy(
        *leaves, h.target, bias=h.bias, reduction=reduction, z_loss=Z_LOSS, token_weight=w, return_z_loss=True
    )
    loss.sum().backward()
    exact = [t.double().requires_grad_() for t in h[:2]]
    logits = exact[0] @ exact[1].T + h.bias.double()
    each = torch.where(h.target == -100, 0.0, w.double())
    of_row = torch.nn.functional.cross_entropy(logits, h.target, reduction="none") * each
    squares = Z_LOSS * logits.logsumexp(-1).square() * each
    divisor = each.sum() if reduction == "mean" else 1.0
    want, want_z = ((x if reduction == "none" else x.sum() / divisor) for x in (of_row + squares, squares))
    want.sum().backward()
    assert not z.requires_grad
    how: dict[str, Any] = {"reduction": reduction, "z_loss": Z_LOSS, "token_weight": w.numpy()}
    assert not linear_logprob_cases.loss_failures(h, loss, z, **how)
    reference = rk.linear_cross_entropy_reference(
        *(t.double().numpy() for t in h[:2]), h.target.numpy(), bias=h.bias.double().numpy(), **how
    )
    ulp = np.finfo(np.float32).eps * abs(want).max().item()  # torch's weights are float32
    for name, exactly in (("loss", want), ("z_loss", want_z)):
        assert abs(reference[name] - exactly.detach().numpy()).max() <= ulp
    of = linear_logprob_cases.head_truth(h)
    share = each.numpy() / float(reference["divisor"])
    given = (-1.0 * of.counted * share, 2 * Z_LOSS * of.lse * share, 0.0 * of.lse)
    off_lse = row("linear_logprob", "lse").allowed(max_abs_z=of.size)
    facts = linear_logprob_cases.gradient_truth(h, of, given, "ieee", 2 * Z_LOSS * off_lse * share)
    for name, leaf, slope in zip(("dhidden", "dweight"), leaves, exact, strict=True):
        assert not beyond("linear_logprob", name, leaf.grad, slope.grad, "float32", **facts[name][1])


def test_token_weights_of_one_change_no_bit_of_the_sum() -> None:
    h = head(dtype="float32")
    how: dict[str, Any] = {"bias": h.bias, "z_loss": Z_LOSS, "denominator": 7.0}
    want = rk.linear_cross_entropy(*h[:2], h.target, **how)
    assert not differing(rk.linear_cross_entropy(*h[:2], h.target, **how, token_weight=torch.ones(9)), want)
    found = rk.linear_cross_entropy(*h[:2], h.target, **how, return_z_loss=True)
    assert not differing(found.loss, want)
    arrays = [None if t is None else t.numpy() for t in (h.hidden, h.weight, h.target, h.bias)]
    of_numpy = rk.linear_cross_entropy(
        *arrays[:3], bias=arrays[3], z_loss=Z_LOSS, token_weight=weights_of(h).numpy(), return_z_loss=True
    )
    of_torch = rk.linear_cross_entropy(
        *h[:2], h.target, bias=h.bias, z_loss=Z_LOSS, token_weight=weights_of(h), return_z_loss=True
    )
    assert all(not differing(torch.as_tensor(a), b) for a, b in zip(of_numpy, of_torch, strict=True))


def test_bad_token_weights() -> None:
    h = head(dtype="float32")

    def loss(w: Any, **how: Any) -> Any:
        return rk.linear_cross_entropy(*h[:2], h.target, token_weight=w, **how)

    assert loss(torch.zeros(9)) == 0.0
    assert loss(-torch.ones(9)).isnan()
    for wrong, kind, words in (
        (torch.ones(8), ValueError, r"^token_weight: expected shape \[9\]"),
        (torch.ones(9).double(), TypeError, r"expected dtype float32, got float64; pass token_weight\.float"),
        (np.ones(9, np.float32), TypeError, "^token_weight: expected an array of the framework of target"),
        (0.5, TypeError, "^token_weight: expected an array of the framework of target, got float"),
        (torch.ones(9, requires_grad=True), ValueError, r"^token_weight: has no gradient here; pass .*detach"),
    ):
        with pytest.raises(kind, match=words):
            loss(wrong)
    with pytest.raises(ValueError, match=r"^return_z_loss: expected False with z_loss=0"):
        loss(None, return_z_loss=True)


TAIL: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "divisor": {"denominator": 3.0},
    "divisor on the device": {"denominator": torch.tensor(3.0)},
    "z-loss": {"z_loss": 0.1, "return_z_loss": True},
    "smoothing": {"label_smoothing": 0.1},
    "accuracy": {"return_token_accuracy": True},
    "weights": {"token_weight": torch.tensor([0.5, 1.0, 0.0, 2.0, torch.nan, torch.inf])},
    "mask": {"loss_mask": torch.tensor([1, 0, 1, 1, 1, 1])},
}


@pytest.mark.parametrize("name", TAIL)
@pytest.mark.parametrize("of", ["eager", "compiled", "NumPy"])
def test_rows_behind_the_last_sequence_may_hold_any_value(name: str, of: str) -> None:
    """A packed buffer of a fixed size ends with rows that nobody wrote."""
    torch.compiler.reset()
    draws = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(6, 16, generator=draws), torch.randn(9, 16, generator=draws)
    hidden[4], hidden[5] = torch.nan, torch.inf
    target, cuts = torch.tensor([1, 8, 0, 3, 2**40, -7]), torch.tensor([0, 1, 4])

    def run(rows: int) -> list[Any]:
        how = {k: x[:rows] if isinstance(x, torch.Tensor) and x.ndim else x for k, x in TAIL[name].items()}
        call = rk.linear_cross_entropy
        if of == "NumPy":
            made = {k: x.numpy() if isinstance(x, torch.Tensor) else x for k, x in how.items()}
            given = (x.numpy() for x in (hidden[:rows], weight, target[:rows]))
            found: Any = call(*given, cu_seqlens=cuts.numpy(), **made)
            return [
                torch.from_numpy(np.asarray(x))
                for x in (found if isinstance(found, tuple) else (found,))
                if x is not None
            ]
        leaves = [hidden[:rows].clone().requires_grad_(), weight.clone().requires_grad_()]
        call = torch.compile(call, backend="aot_eager", fullgraph=True) if of == "compiled" else call
        found = call(*leaves, target[:rows], cu_seqlens=cuts, **how)
        parts = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
        gradients = torch.autograd.grad(parts[0], leaves)
        assert not gradients[0][4:].any()
        return [*(x.detach() for x in parts), gradients[0][:4], gradients[1]]

    for got, want in zip(run(6), run(4), strict=True):
        assert want.isfinite().all()
        assert not differing(got, want)
