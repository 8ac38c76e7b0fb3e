"""preference_loss: float64, derivatives, TRL's own losses, frameworks, transforms, and users' errors."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import framework_sources
import rl_kernel_native as rk
from cases import beyond, differing, float64
from rl_kernel_native.ops.preference_kinds import KINDS
from rl_kernel_native.ops.preference_loss import METRICS

torch = pytest.importorskip("torch")

PAIRS = 70
FREE = tuple(k for k, kind in KINDS.items() if kind.reference is False)
AVERAGED = ("ipo", "sigmoid_norm", "simpo", "alphapo", "orpo")
UNPAIRED = ("kto", "apo_zero_unpaired")
SORTED = ("aot", "aot_unpaired")


def problem(kind: str, rng: np.random.Generator, smooth: float = 0.1) -> tuple[list[np.ndarray], dict[str, Any]]:
    """float32 sums of the policy and the reference for both sides, and options."""
    sizes = (PAIRS, PAIRS // 2 if kind in UNPAIRED else PAIRS)
    counts = [rng.integers(0, 40, n) for n in sizes]
    scale = [np.maximum(c, 1) for c in counts]
    policy = [(-s * rng.uniform(0.05, 2, len(s))).astype(np.float32) for s in scale]
    ref = [(p + rng.normal(0, 3, len(p))).astype(np.float32) for p in policy]
    options: dict[str, Any] = {"kind": kind, "beta": 0.1}
    if "label_smoothing" in KINDS[kind].options and smooth:
        options["label_smoothing"] = smooth
    if kind == "alphapo":
        options["alpha"] = 0.25
    if kind == "kto":
        options |= {"kl": np.array([0.3], np.float32), "chosen_weight": 1.2, "rejected_weight": 0.7}
    if kind in AVERAGED:
        options |= {"chosen_count": counts[0], "rejected_count": counts[1]}
    return [*policy, *([] if kind in FREE else ref)], options


def plain(found: Any) -> tuple[Any, ...]:
    """Converts a result to arrays."""
    return (*found[:3], found.metrics.vector)


def torch_of(x: Any, device: str = "cpu") -> Any:
    return torch.from_numpy(x).to(device) if isinstance(x, np.ndarray) else x


def failures(output: str, got: Any, want: Any) -> str:
    """Outputs that are further from float64 than the contract allows."""
    return beyond("preference_loss", output, got, want, largest=float(np.abs(want).max(initial=0)))


def close(got: Any, want: np.ndarray, relative: float) -> None:
    """Compares with another program's float32 result."""
    np.testing.assert_allclose(
        float64(got), want, rtol=relative, atol=relative * max(1.0, float(np.abs(want).max(initial=0)))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_losses_rewards_and_means_against_float64(kind: str, device: str, rng: np.random.Generator) -> None:
    arrays, options = problem(kind, rng)
    got = rk.preference_loss(
        *(torch_of(a, device) for a in arrays), **{k: torch_of(v, device) for k, v in options.items()}
    )
    want = rk.preference_loss_reference(*arrays, **options)
    for name in ("losses", "chosen_rewards", "rejected_rewards"):
        assert not failures(name, getattr(got, name), want[name])
    assert rk.PreferenceMetrics.names == METRICS
    assert not failures("metrics", got.metrics.loss, want["losses"].mean())
    assert not differing(got.metrics.chosen_reward.cpu(), got.metrics.vector[1].cpu())
    if kind not in UNPAIRED:
        assert not failures("metrics", got.metrics.accuracy, (want["chosen_rewards"] > want["rejected_rewards"]).mean())
    numpy = rk.preference_loss(*arrays, **options)
    assert not differing(plain(numpy), tuple(t.cpu() for t in plain(got)))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_against_differences_of_float64(kind: str, device: str, rng: np.random.Generator) -> None:
    arrays, options = problem(kind, rng)
    leaves = [torch_of(a, device).requires_grad_() for a in arrays[:2]]
    rest = [torch_of(a, device) for a in arrays[2:]]
    got = rk.preference_loss(*leaves, *rest, **{k: torch_of(v, device) for k, v in options.items()})
    dlosses = rng.standard_normal(got.losses.shape[0]).astype(np.float32)
    got.losses.backward(torch_of(dlosses, device))
    assert not got.chosen_rewards.requires_grad
    assert not got.metrics.vector.requires_grad

    def total(policy: list[np.ndarray]) -> float:
        losses = rk.preference_loss_reference(*policy, *arrays[2:], **options)["losses"]
        return float((losses * dlosses).sum())

    step = 1e-5
    for side in range(2):
        numeric = []
        for i in range(len(arrays[side])):
            found = []
            for sign in (1, -1):
                policy = [a.astype(np.float64) for a in arrays[:2]]
                policy[side][i] += sign * step
                found.append(total(policy))
            numeric.append((found[0] - found[1]) / (2 * step))
        want = np.array(numeric)
        np.testing.assert_allclose(
            leaves[side].grad.cpu().numpy(), want, rtol=2e-3, atol=2e-4 * np.abs(want).max() + 1e-9
        )


@pytest.mark.parametrize("name", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_divergences(name: str, device: str, rng: np.random.Generator) -> None:
    arrays, options = problem("dpo", rng)
    options |= {"f_divergence": name} | ({"f_alpha": 0.5} if name == "alpha_divergence" else {})
    leaves = [torch_of(a, device).requires_grad_() for a in arrays]
    got = rk.preference_loss(*leaves[:2], *(t.detach() for t in leaves[2:]), **options)
    assert not failures("losses", got.losses, rk.preference_loss_reference(*arrays, **options)["losses"])
    got.losses.sum().backward()
    x = [t.detach().cpu().double().requires_grad_() for t in leaves]
    w, l = x[0] - x[2], x[1] - x[3]  # noqa: E741
    score = {
        "forward_kl": lambda v: 1 - torch.exp(-v),
        "js_divergence": lambda v: np.log(2) + torch.nn.functional.logsigmoid(v),
        "alpha_divergence": lambda v: (torch.exp(-0.5 * v) - 1) / -0.5,
    }[name]
    z = 0.1 * (score(w) - score(l))
    log_sigmoid = torch.nn.functional.logsigmoid
    (-0.9 * log_sigmoid(z) - 0.1 * log_sigmoid(-z)).sum().backward()
    for a, b in zip(leaves[:2], x[:2], strict=True):
        assert not failures("d_policy", a.grad, b.grad.numpy())


def test_weights_of_wpo_and_a_likelihood_term(device: str, rng: np.random.Generator) -> None:
    arrays, options = problem("dpo", rng)
    counts = {f"{side}_count": rng.integers(0, 30, PAIRS) for side in ("chosen", "rejected")}
    aligned = {f"{side}_aligned": (-rng.uniform(0, 20, PAIRS)).astype(np.float32) for side in ("chosen", "rejected")}
    options |= {**counts, **aligned, "nll_weight": 0.7}
    leaf = torch_of(arrays[0], device).requires_grad_()
    moved = {k: torch_of(v, device) for k, v in options.items()}
    got = rk.preference_loss(leaf, *(torch_of(a, device) for a in arrays[1:]), **moved)
    assert not failures("losses", got.losses, rk.preference_loss_reference(*arrays, **options)["losses"])
    (gradient,) = torch.autograd.grad(got.losses.sum(), leaf)
    step, both = 1e-4, []
    for sign in (1, -1):
        moved_arrays = [arrays[0].astype(np.float64) + sign * step, *arrays[1:]]
        both.append(rk.preference_loss_reference(*moved_arrays, **options)["losses"])
    np.testing.assert_allclose(gradient.cpu().numpy(), (both[0] - both[1]) / (2 * step), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in SORTED])
def test_a_pair_has_the_same_bits_in_any_batch_and_at_any_stride(
    kind: str, device: str, rng: np.random.Generator
) -> None:
    arrays, options = problem(kind, rng)
    if kind in UNPAIRED:
        arrays = [a[: PAIRS // 2] for a in arrays]
    per_pair = ("chosen_count", "rejected_count")
    tensors = [torch_of(a, device) for a in arrays]
    options = {k: torch_of(v, device) for k, v in options.items()}
    whole = rk.preference_loss(*tensors, **options)
    one = {k: v[3:4] if k in per_pair else v for k, v in options.items()}
    got = rk.preference_loss(*(t[3:4] for t in tensors), **one)
    assert not differing(tuple(t[0] for t in got[:3]), tuple(t[3] for t in whole[:3]))
    spread = [torch.stack([t, t], 1)[:, 0] for t in tensors]
    assert not differing(plain(rk.preference_loss(*spread, **options)), plain(whole))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["dpo", "kto", "aot", "aot_unpaired", "simpo"])
def test_compiled_has_the_bytes_of_eager(kind: str, backend: str, device: str, rng: np.random.Generator) -> None:
    arrays, options = problem(kind, rng)
    options = {k: torch_of(v, device) for k, v in options.items()}
    rest = [torch_of(a, device) for a in arrays[2:]]

    def f(w: Any, l: Any) -> Any:  # noqa: E741
        return rk.preference_loss(w, l, *rest, **options)

    torch.compiler.reset()
    outcomes = []
    for function in (f, torch.compile(f, backend=backend, fullgraph=True)):
        leaves = [torch_of(a, device).requires_grad_() for a in arrays[:2]]
        out = function(*leaves)
        out.losses.square().sum().backward()
        outcomes.append((*plain(out), *(t.grad for t in leaves)))
    assert not differing(*outcomes)


@pytest.mark.parametrize("kind", ["cpo", "kto", "aot", "aot_unpaired"])
def test_transforms(kind: str, rng: np.random.Generator) -> None:
    """Tangents agree with gradients, and vmap with a loop; a second derivative raises an error."""
    arrays, options = problem(kind, rng)
    tensors, options = [torch_of(a) for a in arrays], {k: torch_of(v) for k, v in options.items()}

    def f(w: Any, l: Any) -> Any:  # noqa: E741
        return rk.preference_loss(w, l, *tensors[2:], **options).losses

    forward, backward = (j(f, argnums=(0, 1))(*tensors[:2]) for j in (torch.func.jacfwd, torch.func.jacrev))
    assert all(map(torch.equal, forward, backward))  # zeros may have either sign
    batch = torch.stack([tensors[0], tensors[0] * 1.5])
    got = torch.func.vmap(f, in_dims=(0, None))(batch, tensors[1])
    assert not differing(got[1], f(batch[1], tensors[1]))
    with pytest.raises(RuntimeError, match="preference_loss: has no second derivative"):
        torch.func.hessian(lambda w: f(w, tensors[1]).sum())(tensors[0])
    leaf = tensors[0].clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf, tensors[1]).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="preference_loss: has no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("name", ["ref_chosen", "ref_rejected", "chosen_aligned", "rejected_aligned", "kl"])
def test_constants_that_have_a_tangent_are_refused(name: str) -> None:
    """Without the refusal, their part of the derivative would silently be zero."""
    w = torch.randn(3)
    arrays = {"ref_chosen": w, "ref_rejected": w * 2}
    if name == "kl":
        arrays["kl"] = torch.ones(1)
    else:
        arrays |= {"chosen_aligned": w, "rejected_aligned": w}

    def losses(x: Any) -> Any:
        return rk.preference_loss(w, w * 3, **(arrays | {name: x}), kind="kto" if name == "kl" else "dpo").losses

    x = arrays[name]

    def along(x: Any) -> Any:
        return torch.func.jvp(losses, (x,), (torch.ones_like(x),))[1]

    with pytest.raises(ValueError, match=f"^{name}: has a tangent, and preference_loss has no derivative in it"):
        along(x)
    with pytest.raises(Exception, match=f"{name}: has a tangent"):  # Dynamo raises its own error in a traced call
        torch.compile(along, fullgraph=True, backend="eager")(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match=f"^{name}: has a tangent"):
        losses(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
    assert not torch.func.jvp(lambda x: losses(x.detach()), (x,), (torch.ones_like(x),))[1].any()


def test_opcheck(device: str) -> None:
    rk._call.load()
    w = torch.randn(4, device=device)
    numbers = [0.1, 0.0, 0.0, 0.05, 1.0, 0.0, 5.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for sort in (0, 1):
        arguments = (w, w * 2, w, w, None, None, None, None, None, 0, sort, 0, 0, numbers)
        torch.library.opcheck(torch.ops.rl_kernel_native.preference_loss, arguments, test_utils=tests)


def test_empty_batches_and_special_values(device: str) -> None:
    empty = torch.empty(0, device=device)
    got = rk.preference_loss(empty, empty, kind="cpo")
    assert got.losses.shape == (0,)
    assert got.metrics.vector.tolist() == [0.0] * 5
    w = torch.tensor([0.0, float("nan"), -float("inf")], device=device, requires_grad=True)
    for kind in ("cpo", "orpo", "hinge", "apo_down"):
        out = rk.preference_loss(w, torch.full((3,), -1.0, device=device), kind=kind)
        (gradient,) = torch.autograd.grad(out.losses.sum(), w)
        assert out.losses[1].isnan()
        assert gradient[1].isnan()
        assert not out.losses[0].isnan()
        assert not gradient[0].isnan()


def test_an_alpha_that_float32_has_not_is_its_limit() -> None:
    w, l = torch.randn(2, 20)  # noqa: E741
    want = rk.preference_loss(w, l, kind="simpo", gamma=0.3).losses
    for alpha in (0, 1e-46, -1e-40):
        assert not differing(rk.preference_loss(w, l, kind="alphapo", alpha=alpha, gamma=0.3).losses, want)


def test_bad_input() -> None:
    w = torch.randn(3)
    call = rk.preference_loss
    for message, f in {
        "kind: expected": lambda: call(w, w, kind="ppo"),
        "beta: expected a finite number > 0, got 0": lambda: call(w, w, beta=0.0),
        r"beta: expected a finite number > 0, got 1e\+39, which is inf in float32": lambda: call(w, w, beta=1e39),
        "tau: expected a finite number > 0, got 1e-46, which is below": lambda: call(w, w, kind="discopop", tau=1e-46),
        "gamma / beta: expected a finite number, got": lambda: call(w, w, kind="simpo", gamma=1e30, beta=1e-20),
        r"label_smoothing: expected a number in \[0, 1\), got 0.999999999999, which is 1": lambda: call(
            w, w, label_smoothing=0.999999999999
        ),
        "tau: expected None for kind 'dpo', which has no such option, got 0.1": lambda: call(w, w, tau=0.1),
        r"label_smoothing: expected a number in \[0, 0.5\), got 0.5": lambda: call(
            w, w, kind="robust", label_smoothing=0.5
        ),
        r"label_smoothing: expected a number in \(0, 1\), got 0": lambda: call(w, w, kind="exo_pair"),
        "ref_rejected: expected an array beside ref_chosen, got None": lambda: call(w, w, w),
        "ref_chosen: expected an array for kind 'aot', got None": lambda: call(w, w, kind="aot"),
        "ref_chosen: expected None for kind 'simpo', which has no reference, got Tensor": lambda: call(
            w, w, w, w, kind="simpo"
        ),
        "chosen_count: expected an array for kind 'sigmoid_norm'": lambda: call(w, w, kind="sigmoid_norm"),
        "nll_weight: expected 0 for kind 'kto', which has no pairs, got 1.0": lambda: call(
            w, w, kind="kto", nll_weight=1.0
        ),
        "alpha: expected a number for kind 'alphapo'": lambda: call(w, w, kind="alphapo"),
        "f_alpha: expected a number for f_divergence='alpha_divergence'": lambda: call(
            w, w, f_divergence="alpha_divergence"
        ),
        "policy_chosen: expected dtype float32, got float64": lambda: call(w.double(), w),
        r"policy_rejected: expected shape \[3\] .that of policy_chosen., got \[2\]": lambda: call(w, w[:2]),
        r"policy_chosen: expected shape \[num_pairs\], got \[1, 3\]": lambda: call(w[None], w),
        "policy_rejected: expected an array that speaks DLPack, got NoneType": lambda: call(w, None),
        "chosen_count: expected dtype int64, got float32": lambda: call(w, w, chosen_count=w, rejected_count=w),
        r"kl: expected shape \[1\]": lambda: call(w, w, kind="kto", kl=w),
        "ref_chosen: is a constant of the loss": lambda: call(w, w, w.clone().requires_grad_(), w),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            f()


RANKS = {
    "int64": torch.zeros(2, 3, dtype=torch.int64),
    "one side": torch.zeros(3, dtype=torch.int32),
    "three sides": torch.zeros(3, 3, dtype=torch.int32),
    "four pairs": torch.zeros(2, 4, dtype=torch.int32),
    "strided": torch.zeros(3, 2, dtype=torch.int32).T,
}


@pytest.mark.parametrize("name", RANKS)
def test_ranks_that_are_not_the_forwards_are_refused(name: str) -> None:
    call, d = torch.ops.rl_kernel_native.preference_loss_backward, torch.ones(3)
    call(d, d, d, torch.zeros(2, 3, dtype=torch.int32), 1)
    with pytest.raises((TypeError, ValueError), match=r"^ranks: expected "):
        call(d, d, d, RANKS[name], 1)


# ---- TRL's own losses -----------------------------------------------------------------------------------------------


def trl_sides(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Log-probabilities of tokens after the first, [chosen and rejected, T - 1]; a completion mask [.., T];
    references."""
    completion = torch.from_numpy(rng.integers(1, 20, 2 * PAIRS))[:, None] > torch.arange(-3, 20)[None]
    completion[:, :3] = False  # a prompt of three tokens
    logps = -torch.from_numpy(rng.exponential(0.6, (2 * PAIRS, 22)).astype(np.float32)) * completion[:, 1:]
    ref = logps.sum(1) + torch.from_numpy(rng.normal(0, 2, 2 * PAIRS).astype(np.float32))
    return logps, completion, ref


TRL_DPO = {
    "sigmoid": {"kind": "dpo"},
    **{
        kind: {"kind": kind}
        for kind in (
            "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
            "apo_zero", "apo_down", "discopop", "sigmoid_norm",
        )
    },
}  # fmt: skip


def trl_dpo(leaf: Any, completion: Any, ref: Any, log_sum_sq: Any = None, **own: Any) -> tuple[Any, Any, Any]:
    """The attributes that DPOTrainer._compute_loss reads: those of the trainer, its inputs, and the model."""
    outputs = SimpleNamespace(
        log_probs=leaf, log_sum_sq_probs=log_sum_sq, entropy=torch.zeros(leaf.shape),
        mean_logits=torch.zeros(leaf.shape), is_top1=torch.zeros(leaf.shape, dtype=torch.bool),
    )  # fmt: skip
    common = {
        "model": SimpleNamespace(training=True), "accelerator": mock.Mock(), "aux_loss_enabled": False,
        "ld_alpha": None, "precompute_ref_logps": True, "f_divergence_type": "reverse_kl", "loss_types": ["sigmoid"],
        "loss_weights": [1.0], "beta": 0.1, "label_smoothing": 0.0, "args": SimpleNamespace(discopop_tau=0.05),
        "use_weighting": False, "_tp_size": 1, "_total_train_tokens": 0,
        "_metrics": {"train": collections.defaultdict(list)},
    }  # fmt: skip
    trainer = SimpleNamespace(**common | own)
    trainer.accelerator.device = "cpu"
    trainer.accelerator.gather_for_metrics = trainer.accelerator.gather = lambda x: x
    inputs = {
        "input_ids": torch.zeros(completion.shape, dtype=torch.int64), "attention_mask": torch.ones(completion.shape),
        "completion_mask": completion.long(), "ref_chosen_logps": ref[:PAIRS], "ref_rejected_logps": ref[PAIRS:],
    }  # fmt: skip
    return trainer, inputs, lambda **_: outputs


@pytest.mark.parametrize("wpo", [False, True], ids=["", "wpo"])
@pytest.mark.parametrize(
    ("loss_type", "divergence"),
    [
        (loss_type, divergence)
        for loss_type, options in TRL_DPO.items()
        for divergence in ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
        if divergence == "reverse_kl" or "f_divergence" in KINDS[options["kind"]].options
    ],
)
def test_the_losses_of_trl_dpo(loss_type: str, divergence: str, wpo: bool, rng: np.random.Generator) -> None:
    trainer = framework_sources.trl("trl.trainer.dpo_trainer").DPOTrainer
    options: dict[str, Any] = dict(TRL_DPO[loss_type])
    if divergence != "reverse_kl":
        options["f_divergence"] = divergence
    if divergence == "alpha_divergence":
        options["f_alpha"] = 0.5
    if wpo and loss_type in SORTED:
        pytest.skip("TRL refuses weights of sorted losses")
    if wpo and loss_type == "hinge":
        pytest.skip("TRL multiplies what its relu saved in place, so that its own backward fails")
    smoothing = 0.1 if loss_type in ("exo_pair", "robust", "aot", "aot_unpaired") else 0.0
    if smoothing:
        options["label_smoothing"] = smoothing
    logps, completion, ref = trl_sides(rng)
    log_sum_sq = -torch.rand(logps.shape)
    leaf = logps.clone().requires_grad_()
    own = {
        "f_divergence_type": divergence,
        "f_alpha_divergence_coef": 0.5,
        "loss_types": [loss_type],
        "label_smoothing": smoothing,
        "use_weighting": wpo,
    }
    ours_of_them, inputs, model = trl_dpo(leaf, completion, ref, log_sum_sq, **own)
    want = trainer._compute_loss(ours_of_them, model, inputs, False)
    want.backward()

    mine = logps.clone().requires_grad_()
    mask = completion[:, 1:]
    sums = rk.sequence_logprob(mine, mask)
    if loss_type in ("ipo", "sigmoid_norm") or wpo:
        options |= {"chosen_count": sums.count[:PAIRS], "rejected_count": sums.count[PAIRS:]}
    if wpo:
        aligned = rk.sequence_logprob(logps - log_sum_sq, mask).sum
        options |= {"chosen_aligned": aligned[:PAIRS], "rejected_aligned": aligned[PAIRS:]}
    got = rk.preference_loss(sums.sum[:PAIRS], sums.sum[PAIRS:], ref[:PAIRS], ref[PAIRS:], **options)
    got.losses.mean().backward()
    close(got.losses.mean(), np.array(want.item()), 1e-5)
    close(mine.grad, (leaf.grad * mask).double().numpy(), 2e-5)
    rewards = ours_of_them._metrics["train"]
    close(got.metrics.chosen_reward, np.array(rewards["rewards/chosen"][0]), 1e-5)
    close(got.metrics.accuracy, np.array(rewards["rewards/accuracies"][0]), 1e-6)


@pytest.mark.parametrize(
    ("loss_type", "alpha", "kind"),
    [("sigmoid", 0.0, "cpo"), ("simpo", 0.0, "simpo"), ("simpo", 0.25, "alphapo")],
)
def test_the_losses_of_trl_cpo(loss_type: str, alpha: float, kind: str, rng: np.random.Generator) -> None:
    trainer = framework_sources.trl("trl.experimental.cpo.cpo_trainer").CPOTrainer
    self = SimpleNamespace(
        alpha=alpha, beta=2.0, loss_type=loss_type, simpo_gamma=0.5, label_smoothing=0.1,
        accelerator=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    w, l = (-torch.from_numpy(rng.exponential(1.0, PAIRS).astype(np.float32)) for _ in range(2))  # noqa: E741
    theirs, mine = ([t.clone().requires_grad_() for t in (w, l)] for _ in range(2))
    losses, chosen, rejected = trainer.cpo_loss(self, *theirs)
    losses.sum().backward()
    options: dict[str, Any] = {"gamma": 0.5} if kind != "cpo" else {}
    if kind == "alphapo":
        options["alpha"] = alpha
    got = rk.preference_loss(*mine, kind=kind, beta=2.0, label_smoothing=0.1, **options)
    got.losses.sum().backward()
    for a, b in zip((*got[:3], mine[0].grad, mine[1].grad), (losses, chosen, rejected, theirs[0].grad, theirs[1].grad),
                    strict=True):  # fmt: skip
        close(a, b.detach().double().numpy(), 2e-5)


def test_the_loss_of_trl_orpo(rng: np.random.Generator) -> None:
    trainer = framework_sources.trl("trl.experimental.orpo.orpo_trainer").ORPOTrainer
    self = SimpleNamespace(beta=0.1, accelerator=SimpleNamespace(device="cpu"))
    w, l = (-torch.from_numpy(rng.exponential(0.7, PAIRS).astype(np.float32)) for _ in range(2))  # noqa: E741
    theirs, mine = ([t.clone().requires_grad_() for t in (w, l)] for _ in range(2))
    losses, chosen, _, _, _ = trainer.odds_ratio_loss(self, *theirs)
    (-losses).sum().backward()
    got = rk.preference_loss(*mine, kind="orpo", beta=0.1)
    got.losses.sum().backward()
    close(got.losses, -losses.detach().double().numpy(), 2e-5)
    close(got.chosen_rewards, chosen.double().numpy(), 2e-5)
    for a, b in zip(mine, theirs, strict=True):
        close(a.grad, b.grad.double().numpy(), 2e-4)


def trl_batch(rng: np.random.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Chosen and rejected rows of a prompt and an answer, as TRL's collator makes them, and logits for all rows."""
    vocab, width = 23, 14
    batch = {}
    for side in ("chosen", "rejected"):
        ids = torch.from_numpy(rng.integers(1, vocab, (PAIRS, width)))
        lengths = torch.from_numpy(rng.integers(6, width + 1, (PAIRS, 1)))
        there = torch.arange(width) < lengths
        answer = there & (torch.arange(width) >= 4)
        batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"] = ids * there, there.long()
        batch[f"{side}_labels"] = torch.where(answer, ids, -100)
    logits = torch.from_numpy(rng.normal(0, 1.5, (2 * PAIRS, width, vocab)).astype(np.float32))
    return batch, logits


@pytest.mark.parametrize("name", ["cpo", "orpo"])
def test_the_loss_of_a_batch_of_trl(name: str, rng: np.random.Generator) -> None:
    """Includes the likelihood of the chosen tokens, which TRL averages over the whole batch. CPO takes the answers,
    ORPO prompts and answers."""
    module = framework_sources.trl(f"trl.experimental.{name}.{name}_trainer")
    trainer = module.CPOTrainer if name == "cpo" else module.ORPOTrainer
    batch, logits = trl_batch(rng)
    same = SimpleNamespace(gather_for_metrics=lambda x: x, device="cpu")
    self = SimpleNamespace(
        is_encoder_decoder=False, pad_token_id=0, accelerator=same, aux_loss_enabled=False, cpo_alpha=0.7, alpha=0.0,
        padding_value=0,
        loss_type="sigmoid", beta=0.1, label_smoothing=0.0, concatenated_inputs=trainer.concatenated_inputs,
        get_batch_logps=trainer.get_batch_logps,
    )  # fmt: skip
    for method in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(trainer, method):
            setattr(self, method, getattr(trainer, method).__get__(self))
    theirs, mine = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    want, _ = trainer.get_batch_loss_metrics(self, lambda *_, **__: SimpleNamespace(logits=theirs), batch)
    want.backward()

    def sums(key: str, fill: int) -> rk.SequenceLogprob:
        labels = torch.cat([batch[f"chosen_{key}"], batch[f"rejected_{key}"]])[:, 1:]
        counts = labels != fill
        logprob = rk.logprob(mine[:, :-1], torch.where(counts, labels, -100).contiguous())
        return rk.sequence_logprob(logprob, counts)

    answers = sums("labels", -100)
    of = answers if name == "cpo" else sums("input_ids", 0)
    nll = -of.sum[:PAIRS].sum() / of.count[:PAIRS].sum()
    counts = {"chosen_count": answers.count[:PAIRS], "rejected_count": answers.count[PAIRS:]} if name == "orpo" else {}
    losses = rk.preference_loss(answers.sum[:PAIRS], answers.sum[PAIRS:], kind=name, beta=0.1, **counts).losses
    got = losses.mean() + (0.7 if name == "cpo" else 1.0) * nll
    got.backward()
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    assert mine.grad is not None
    assert theirs.grad is not None
    assert float((mine.grad - theirs.grad).abs().max()) <= 2e-5 * float(theirs.grad.abs().max())


@pytest.mark.parametrize(("loss_type", "shift"), [("kto", 1.0), ("kto", -40.0), ("apo_zero_unpaired", 1.0)])
def test_the_losses_of_trl_kto(loss_type: str, shift: float, rng: np.random.Generator) -> None:
    """``shift`` moves the mean of the KL; a negative mean counts as 0."""
    trainer = framework_sources.trl("trl.trainer.kto_trainer").KTOTrainer
    logps, completion, ref = trl_sides(rng)
    label = torch.from_numpy(rng.random(2 * PAIRS) < 0.6)
    of_others, ref_of_others = logps.sum(1) + shift, ref - 0.5
    assert ((of_others - ref_of_others).mean() > 0) == (shift > 0)
    leaf = logps.clone().requires_grad_()
    outputs = SimpleNamespace(log_probs=leaf, entropy=torch.zeros_like(logps), mean_logits=torch.zeros_like(logps))
    accelerator = mock.Mock(device="cpu", gather_for_metrics=lambda x: x)
    self = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, aux_loss_enabled=False,
        precompute_ref_logps=True, calculate_KL=loss_type == "kto", loss_type=loss_type, beta=0.1,
        desirable_weight=1.2, undesirable_weight=0.7, _tp_size=1, _total_train_tokens=0,
        _compute_kl_logps=lambda *_: of_others, _metrics={"train": collections.defaultdict(list)},
    )  # fmt: skip
    ids = torch.zeros(completion.shape, dtype=torch.int64)
    inputs = {
        "input_ids": ids, "attention_mask": ids + 1, "completion_mask": completion.long(), "label": label,
        "ref_logps": ref, "ref_KL_logps": ref_of_others,
    }  # fmt: skip
    want = trainer._compute_loss(self, lambda **_: outputs, inputs, False)
    want.backward()

    mine = logps.clone().requires_grad_()
    sums = rk.sequence_logprob(mine, completion[:, 1:]).sum
    options: dict[str, Any] = {"kl": (of_others - ref_of_others).mean()[None]} if loss_type == "kto" else {}
    got = rk.preference_loss(
        sums[label], sums[~label], ref[label], ref[~label], kind=loss_type, beta=0.1, chosen_weight=1.2,
        rejected_weight=0.7, **options,
    )  # fmt: skip
    got.losses.mean().backward()
    close(got.losses.mean(), np.array(want.item()), 1e-5)
    close(mine.grad, (leaf.grad * completion[:, 1:]).double().numpy(), 2e-5)


def test_the_length_desensitized_loss_of_trl(rng: np.random.Generator) -> None:
    """``ld_alpha``: each sequence has two sums, one over tokens up to the shorter answer's length and one over the
    remaining tokens."""
    trainer = framework_sources.trl("trl.trainer.dpo_trainer").DPOTrainer
    logps, completion, ref = trl_sides(rng)
    leaf = logps.clone().requires_grad_()
    self, inputs, model = trl_dpo(leaf, completion, ref, ld_alpha=0.3)
    want = trainer._compute_loss(self, model, inputs, False)
    want.backward()

    mine, mask = logps.clone().requires_grad_(), completion[:, 1:]
    length = mask.sum(1)
    shorter = torch.minimum(length[:PAIRS], length[PAIRS:]).repeat(2)
    front = mask & (mask.cumsum(1) <= shorter[:, None])
    sums = rk.sequence_logprob(mine, front).sum + 0.3 * rk.sequence_logprob(mine, mask & ~front).sum
    got = rk.preference_loss(sums[:PAIRS], sums[PAIRS:], ref[:PAIRS], ref[PAIRS:])
    got.losses.mean().backward()
    close(got.losses.mean(), np.array(want.item()), 1e-5)
    close(mine.grad, (leaf.grad * mask).double().numpy(), 2e-5)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"ipo": True}], ids=str)
def test_the_losses_of_openrlhf(options: dict[str, Any], rng: np.random.Generator) -> None:
    """OpenRLHF's IPO uses sums, so no counts are given here."""
    arrays, _ = problem("dpo", rng)
    theirs, mine = ([torch_of(a) for a in arrays] for _ in range(2))
    for side in (*theirs[:2], *mine[:2]):
        side.requires_grad_()
    want, chosen, rejected = framework_sources.openrlhf().DPOLoss(0.1, **options)(*theirs)
    want.backward()
    how = {"kind": "ipo"} if options.pop("ipo", False) else {"kind": "dpo", **options}
    got = rk.preference_loss(*mine, beta=0.1, **how)
    got.losses.mean().backward()
    close(got.losses.mean(), np.array(want.item()), 1e-5)
    close(got.metrics.chosen_reward, chosen.mean().double().numpy(), 1e-5)
    close(got.metrics.rejected_reward, rejected.mean().double().numpy(), 1e-5)
    for a, b in zip(mine[:2], theirs[:2], strict=True):
        close(a.grad, b.grad.double().numpy(), 2e-5)
