"""torch: registered operators, torch.compile, export, torch.func, second derivatives, streams, graphs, host cost."""

from __future__ import annotations

import gc
import hashlib
import shutil
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import ALL, Status, differing, mode, raw, torch_logits, torch_targets, truth
from host_cost import host_costs_us

torch = pytest.importorskip("torch")

from torch_properties import assert_no_leak, no_synchronisation  # noqa: E402

VOCAB = 211  # prime: eight uneven parts, and a short last leaf
OPTIONS: dict[str, Any] = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 11.0, "valid_vocab": 200}


@pytest.fixture
def problem(device: str, rng: np.random.Generator) -> tuple[Any, Any]:
    """Logits [3, 5, VOCAB] and targets, of which one is ignored."""
    target = torch_targets(rng, (3, 5), 200)
    target[1, 2] = -100
    return torch_logits(rng, (3, 5, VOCAB)).to(device), target.to(device)


def everything(logits: Any, target: Any, **options: Any) -> tuple[Any, Any, Any]:
    return tuple(rk.logprob(logits, target, return_lse=True, return_entropy=True, **options)[:3])


def weighted(outputs: tuple[Any, ...]) -> Any:
    """A scalar that gives every element of every output another gradient."""
    weights = (
        torch.linspace(i + 0.5, i + 1.5, o.numel(), device=o.device).view(o.shape) for i, o in enumerate(outputs)
    )
    return sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))


def plain(logits: Any, target: Any, *, temperature: Any = 1.0, logit_scale: float = 1.0, softcap: float | None = None,
          valid_vocab: int | None = None) -> tuple[Any, Any, Any]:  # fmt: skip
    """The same outputs by torch's own operators, differentiable any number of times, in the dtype of the logits."""
    z = logits * np.float32(logit_scale).item()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / (np.float32(temperature).item() if isinstance(temperature, float) else temperature.unsqueeze(-1))
    log_p = torch.log_softmax(z[..., :valid_vocab], -1)
    lse = torch.logsumexp(z[..., :valid_vocab], -1)
    counted = target != -100
    outputs = (log_p.gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1), lse, -(log_p.exp() * log_p).sum(-1))
    return tuple(torch.where(counted, o, torch.zeros_like(o)) for o in outputs)


# ---- the registered operators ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "everything", "kept", "bfloat16"])
def test_opcheck(case: str, problem: tuple[Any, Any]) -> None:
    """Schema, fake tensors, autograd registration and dynamic shapes of both operators."""
    rk.ops.register_torch_operators()
    logits, target = problem
    exp = 1 if logits.is_cuda else 0
    temperature = kept_ids = kept_offsets = None
    numbers: tuple[Any, ...] = (1.0, 1.0, None, -100, None, None, exp)
    if case == "everything":
        temperature = torch.rand(3, 5, device=logits.device) + 0.5
        numbers = (1.0, 1.3, 11.0, -100, 200, 256, exp)
    if case == "kept":
        kept_ids = torch.arange(8, dtype=torch.int32, device=logits.device)
        kept_offsets = torch.tensor([0] * 8 + [8] * 8, device=logits.device)
    if case == "bfloat16":
        logits = logits.bfloat16()
    x = logits.clone().requires_grad_(case == "plain")
    arguments = (temperature, kept_ids, kept_offsets, *numbers)
    ops = torch.ops.rl_kernel_native
    torch.library.opcheck(ops.logprob, (x.detach(), target, *arguments, 31))
    torch.library.opcheck(ops.logprob, (x.detach(), target, *arguments, 1))
    saved = everything(logits, target)
    rows = [torch.ones_like(o) for o in saved]
    torch.library.opcheck(ops.logprob_backward, (logits, target, saved[1], saved[2], *rows, *arguments))
    torch.library.opcheck(ops.logprob_backward, (logits, target, saved[1], None, rows[0], None, None, *arguments))


COMPILED: dict[str, dict[str, Any]] = {"plain": {}, "everything": OPTIONS, "outputs": dict(ALL)}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_has_the_bytes_of_eager(case: str, backend: str, problem: tuple[Any, Any]) -> None:
    """fullgraph=True forbids a graph break. Inductor runs only where it has a compiler for the device."""
    if backend == "inductor" and case != "everything":
        pytest.skip("inductor takes seconds a graph; one case shows it")
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    logits, target = problem
    options = COMPILED[case]

    def step(x: Any, y: Any) -> Any:
        result = rk.logprob(x, y, **options)
        return tuple(result) if options is COMPILED["outputs"] else result

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    results = []
    for function in (step, compiled):
        x = logits.clone().requires_grad_()
        outputs = function(x, target)
        first = outputs if isinstance(outputs, torch.Tensor) else weighted(outputs[:3])
        first.sum().backward()
        results.append((outputs if isinstance(outputs, tuple) else (outputs,), x.grad))
    assert not differing(results[0][0], results[1][0])
    assert not differing(results[0][1], results[1][1])
    with torch.no_grad():
        without = compiled(logits, target)
    assert not differing(results[0][0], without if isinstance(without, tuple) else (without,))


def test_compiled_with_arrays_and_dynamic_shapes(problem: tuple[Any, Any]) -> None:
    logits, target = problem
    temperature = torch.rand(3, 5, device=logits.device) + 0.5
    kept = (
        torch.arange(8, dtype=torch.int32, device=logits.device),
        torch.tensor([0] * 8 + [8] * 8, device=logits.device),
    )
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, y, t, k: rk.logprob(x, y, temperature=t, kept=k), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for rows in (3, 2, 1):
        offsets = kept[1][: rows * 5 + 1]
        arguments = (logits[:rows], target[:rows], temperature[:rows], (kept[0], offsets))
        want = rk.logprob(*arguments[:2], temperature=arguments[2], kept=arguments[3])
        assert not differing(compiled(*arguments), want)


def test_a_compiled_graph_is_portable_on_the_cpu_unless_it_says_otherwise(rng: np.random.Generator) -> None:
    """Tracing cannot see rk.arithmetic, and a backward may run outside it. Without a setting, the mode is therefore
    portable."""
    logits, target = torch_logits(rng, (40, VOCAB)), torch_targets(rng, (40,), VOCAB)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, y: rk.logprob(x, y), fullgraph=True, backend="aot_eager")
    assert not differing(compiled(logits, target), rk.logprob(logits, target, exp="portable"))
    with rk.arithmetic("sm_90"), pytest.raises(ValueError, match=r"exp: .*give exp explicitly"):
        compiled(logits, target)


def test_a_compiled_backward_has_the_forwards_mode(rng: np.random.Generator) -> None:
    """As in eager mode, the saved lse comes from one exponential, and the backward must use the same exponential."""
    logits, target = torch_logits(rng, (40, VOCAB)), torch_targets(rng, (40,), VOCAB)
    torch.compiler.reset()

    def hardware(x: Any, y: Any) -> Any:
        return rk.logprob(x, y, exp="hardware")

    grads = []
    for function in (hardware, torch.compile(hardware, fullgraph=True, backend="aot_eager")):
        x = logits.clone().requires_grad_()
        with rk.arithmetic("sm_90"):
            value = function(x, target)
        value.sum().backward()
        grads.append(x.grad)
    assert not differing(*grads)


def test_export(problem: tuple[Any, Any]) -> None:
    logits, target = problem

    class Score(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return rk.logprob(x, y, return_entropy=True, **OPTIONS)[::2]

    program = torch.export.export(Score(), (logits, target))
    assert "rl_kernel_native.logprob" in str(program.graph)
    assert not differing(tuple(program.module()(logits, target)), tuple(Score()(logits, target)))


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(problem: tuple[Any, Any]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    logits, target = problem
    real = rk.logprob(logits, target, **ALL)
    with FakeTensorMode() as fakes:
        fake = rk.logprob(fakes.from_tensor(logits), fakes.from_tensor(target), **ALL)
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


# ---- torch.func -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_dims", [(0, 0), (1, 1), (0, None), (None, 0)])
def test_vmap_has_the_bytes_of_a_loop(in_dims: tuple[Any, Any], device: str, rng: np.random.Generator) -> None:
    logits, target = torch_logits(rng, (4, 4, VOCAB)).to(device), torch_targets(rng, (4, 4), VOCAB).to(device)
    got = torch.vmap(everything, in_dims=in_dims)(
        logits if in_dims[0] is not None else logits[0], target if in_dims[1] is not None else target[0]
    )
    for i in range(4):
        x = logits[0] if in_dims[0] is None else logits.select(in_dims[0], i)
        y = target[0] if in_dims[1] is None else target.select(in_dims[1], i)
        assert not differing(tuple(o[i] for o in got), everything(x, y)), i


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "everything"])
def test_func_grad_has_the_bytes_of_backward(options: dict[str, Any], problem: tuple[Any, Any]) -> None:
    logits, target = problem
    x = logits.clone().requires_grad_()
    weighted(everything(x, target, **options)).backward()
    got = torch.func.grad(lambda z: weighted(everything(z, target, **options)))(logits)
    assert not differing(got, x.grad)
    value, pullback = torch.func.vjp(lambda z: rk.logprob(z, target), logits)
    assert not differing(value, rk.logprob(logits, target))
    assert pullback(torch.ones_like(value))[0].shape == logits.shape


def test_vmap_of_grad_is_per_sample_gradients(problem: tuple[Any, Any]) -> None:
    logits, target = problem
    got = torch.vmap(torch.func.grad(lambda x, y: weighted(everything(x, y))))(logits, target)
    for i in range(3):
        x = logits[i].clone().requires_grad_()
        weighted(everything(x, target[i])).backward()
        assert not differing(got[i], x.grad)


# Tangents and second derivatives are composed from torch's own operators in float64 and rounded to float32 once (6e-8).
# The derivatives use the native forward's lse and entropy, which have errors of up to 2e-5 at these sizes.
SECOND = 5e-5


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "everything"])
def test_jvp_against_float64(options: dict[str, Any], problem: tuple[Any, Any], rng: np.random.Generator) -> None:
    logits, target = problem
    tangent = torch.from_numpy(rng.standard_normal(logits.shape).astype(np.float32)).to(logits.device)
    value, got = torch.func.jvp(lambda z: everything(z, target, **options), (logits,), (tangent,))
    _, want = torch.func.jvp(lambda z: plain(z, target, **options), (logits.double(),), (tangent.double(),))
    assert not differing(tuple(value), everything(logits, target, **options))
    for a, b in zip(got, want, strict=True):
        assert float((a - b).abs().max()) <= SECOND * max(1.0, float(b.abs().max()))


def test_a_dual_tensor_outside_of_torch_func_keeps_its_tangent(problem: tuple[Any, Any]) -> None:
    from torch.autograd import forward_ad

    logits, target = problem
    want = torch.func.jvp(lambda z: rk.logprob(z, target), (logits,), (torch.ones_like(logits),))
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(rk.logprob(forward_ad.make_dual(logits, torch.ones_like(logits)), target))
    assert not differing((got.primal, got.tangent), want)


def test_minus_infinity_is_masked_in_derivatives_of_any_order(device: str, rng: np.random.Generator) -> None:
    """A -Inf column counts as absent, under a softcap too, since infinities pass through it (the contract)."""
    logits, target = torch_logits(rng, (3, 40)).to(device), torch_targets(rng, (3,), 20).to(device)
    logits[:, 20:] = float("-inf")
    tangent = torch.from_numpy(rng.standard_normal((3, 40)).astype(np.float32)).to(device)
    for options in ({}, {"softcap": 5.0}):
        got = torch.func.jvp(lambda z, o=options: everything(z, target, **o), (logits,), (tangent,))[1]
        want = torch.func.jvp(
            lambda z, o=options: plain(z, target, **o), (logits[:, :20].double(),), (tangent[:, :20].double(),)
        )[1]
        for a, b in zip(got, want, strict=True):
            assert float((a - b).abs().max()) <= SECOND * max(1.0, float(b.abs().max())), options
        seconds = []
        for function, x in ((everything, logits.clone()), (plain, logits[:, :20].double())):
            x.requires_grad_()
            (first,) = torch.autograd.grad(weighted(function(x, target, **options)), x, create_graph=True)
            seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
        assert not bool(seconds[0][:, 20:].any()), options
        assert float((seconds[0][:, :20] - seconds[1]).abs().max()) <= SECOND * max(1.0, float(seconds[1].abs().max()))


def test_jacobians_and_hessian_against_float64(device: str, rng: np.random.Generator) -> None:
    logits, target = torch_logits(rng, (2, 17), spread=2.0).to(device), torch.tensor([3, -100], device=device)
    options = {"temperature": 0.8, "softcap": 9.0}

    def ours(z: Any) -> Any:
        return torch.stack(everything(z, target, **options))

    def theirs(z: Any) -> Any:
        return torch.stack(plain(z, target, **options))

    want = torch.func.jacrev(theirs)(logits.double())
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        got = jacobian(ours)(logits)
        assert float((got - want).abs().max()) <= SECOND, jacobian.__name__
        assert not bool(got[:, 1].any()), "the ignored row"
    got = torch.func.hessian(lambda z: ours(z).sum())(logits)
    want = torch.func.hessian(lambda z: theirs(z).sum())(logits.double())
    assert float((got - want).abs().max()) <= SECOND * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "everything"])
def test_a_gradient_penalty_against_float64(options: dict[str, Any], problem: tuple[Any, Any]) -> None:
    """create_graph=True: double backward through the logits and through the incoming gradients."""
    logits, target = problem
    results = []
    for function, dtype in ((everything, torch.float32), (plain, torch.float64)):
        x = logits.to(dtype).requires_grad_()
        w = torch.ones(3, 5, dtype=dtype, device=x.device, requires_grad=True)
        outputs = function(x, target, **options)
        (first,) = torch.autograd.grad(sum((o * w).sum() for o in outputs), x, create_graph=True)
        penalty = first.square().sum()
        results.append((first, *torch.autograd.grad(penalty, (x, w))))
    for got, want in zip(*results, strict=True):
        got, want = got.detach(), want.detach()
        assert float((got - want).abs().max()) <= SECOND * max(1.0, float(want.abs().max()))


def test_second_derivatives_of_ignored_rows_are_zero_whatever_lies_there(problem: tuple[Any, Any]) -> None:
    logits, target = problem
    x = logits.clone()
    x[1, 2] = float("nan")
    x.requires_grad_()
    (first,) = torch.autograd.grad(weighted(everything(x, target)), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert not bool(second[1, 2].any())
    assert bool(torch.isfinite(second).all())


@pytest.mark.parametrize("exp", ["portable", "hardware"])
def test_a_second_derivative_with_a_temperature_per_row(exp: str, problem: tuple[Any, Any]) -> None:
    logits, target = problem
    temperature = torch.linspace(0.5, 2.0, 15, device=logits.device).view(3, 5)
    results = []
    with mode(logits.device.type, exp):
        for x in (logits.clone().requires_grad_(), logits.double().requires_grad_()):
            if x.dtype == torch.float32:
                value = rk.logprob(x, target, temperature=temperature, exp=exp)
            else:
                value = plain(x, target, temperature=temperature.double())[0]
            (first,) = torch.autograd.grad(value.sum(), x, create_graph=True)
            results.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert float((results[0] - results[1]).abs().max()) <= SECOND * max(1.0, float(results[1].abs().max()))


# ---- modes of torch -------------------------------------------------------------------------------------------------


def test_no_grad_inference_mode_and_grad_have_the_same_bytes(problem: tuple[Any, Any]) -> None:
    logits, target = problem
    want = everything(logits.clone().requires_grad_(), target)
    assert all(o.requires_grad for o in want)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            got = everything(logits.clone().requires_grad_(), target)
        assert not any(o.requires_grad for o in got)
        assert not differing(got, want)
    assert not differing(everything(logits, target), want)
    parameter = torch.nn.Parameter(logits.clone())
    assert not differing(everything(parameter, target), want)


def test_autocast_changes_nothing(problem: tuple[Any, Any]) -> None:
    """The caller chooses the dtype of the logits; autocast must not round them silently."""
    logits, target = problem
    results = []
    for enabled in (False, True):
        x = logits.clone().requires_grad_()
        with torch.autocast(logits.device.type, dtype=torch.bfloat16, enabled=enabled):
            outputs = everything(x, target)
            loss = weighted(outputs)
        loss.backward()
        results.append((*outputs, x.grad))
    assert not differing(*results)


def test_saved_tensors_may_not_be_changed_before_backward(problem: tuple[Any, Any]) -> None:
    logits, target = problem
    x = logits.clone().requires_grad_()
    y = x * 1
    value = rk.logprob(y, target)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


def test_backward_twice_and_partial_use_of_outputs(problem: tuple[Any, Any]) -> None:
    logits, target = problem
    x = logits.clone().requires_grad_()
    outputs = everything(x, target)
    outputs[0].sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    outputs[0].sum().backward(retain_graph=True)
    assert not differing(x.grad, first)
    x.grad = None
    outputs[2].sum().backward()
    assert bool(torch.isfinite(x.grad).all())


def test_activation_checkpointing(problem: tuple[Any, Any]) -> None:
    from torch.utils.checkpoint import checkpoint

    logits, target = problem
    grads = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        x = logits.clone().requires_grad_()
        run(lambda z: weighted(everything(z * 2, target)), x).backward()
        grads.append(x.grad)
    assert not differing(*grads)


# ---- processes and threads ------------------------------------------------------------------------------------------


def test_a_fork_after_use_computes_the_same_bytes() -> None:
    """The pool's threads do not survive a fork. 64 rows of 5,003 columns give every thread work."""
    code = """
import hashlib, os, sys, torch, rl_kernel_native as rk
torch.manual_seed(0)
torch.set_num_threads(2)
x, y = torch.randn(64, 5003), torch.arange(64)
digest = lambda: hashlib.sha256(rk.logprob(x, y).numpy().tobytes()).hexdigest()
want = digest()
for _ in range(5):
    child = os.fork()
    if child == 0:
        os._exit(0 if digest() == want else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert digest() == want
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_many_threads_of_the_caller(device: str, rng: np.random.Generator) -> None:
    """On a GPU 8 streams have 8 threads each; on a CPU only threads run. Each result equals the result of a separate
    call."""
    logits, target = torch_logits(rng, (37, 3001), "bfloat16").to(device), torch_targets(rng, (37,), 3001).to(device)
    want = rk.logprob(logits, target, **ALL)
    gradient = rk.logprob_backward(logits, target, want.lse, dlogprob=want.lse)
    wrong: list[str] = []

    def work(stream: Any) -> None:
        try:
            for _ in range(20 if device == "cuda" else 5):
                with torch.cuda.stream(stream) if stream else torch.no_grad():
                    got = rk.logprob(logits, target, **ALL)
                    back = rk.logprob_backward(logits, target, got.lse, dlogprob=got.lse)
                    if stream:
                        stream.synchronize()
                wrong.extend(filter(None, [differing(tuple(got), tuple(want)), differing(back, gradient)]))
        except Exception as error:  # the main thread reports it
            wrong.append(repr(error))

    streams = [torch.cuda.Stream() for _ in range(8)] if device == "cuda" else [None]
    if device == "cuda":
        torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(s,)) for s in streams for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[0]


def test_a_thousand_repeats_have_one_hash(device: str, exp: str, rng: np.random.Generator) -> None:
    logits, target = torch_logits(rng, (9, 2003), "bfloat16").to(device), torch_targets(rng, (9,), 2003).to(device)
    hashes = set()
    with mode(device, exp):
        for _ in range(1000):
            result = rk.logprob(logits, target, **ALL)
            gradient = rk.logprob_backward(logits, target, result.lse, dlogprob=result.lse)
            hashes.add(hashlib.sha256(b"".join(raw(tuple(result))) + raw(gradient)).digest())
    assert len(hashes) == 1


def test_calls_do_not_leak(device: str, rng: np.random.Generator) -> None:
    """2,000 calls with gradients and 2,000 errors. Allocators round by less than 8 MB; leaked logits would be 80 MB."""
    logits, target = torch_logits(rng, (10, 1000)).to(device), torch_targets(rng, (10,), 1000).to(device)

    def burst(n: int) -> None:
        for _ in range(n):
            rk.logprob(logits.requires_grad_(), target).sum().backward()
            logits.grad = None
            with pytest.raises(ValueError, match="target"):
                rk.logprob(logits, target[:1])

    assert_no_leak(burst, device, repetitions=2000)


# ---- host cost ------------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_median_host_cost(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The limits on a GPU are 5 us without autograd and 25 us with autograd. If a launch and an allocation alone take 5
    us on this host, the limits are their time plus 4 us, and 5 times their time. On a CPU the time includes the work
    itself, so the test only prints it."""
    logits, target = torch.randn(8, 128, device=device), torch.zeros(8, dtype=torch.int64, device=device)
    x = logits.clone().requires_grad_()

    calls = {
        "eager": lambda: rk.logprob(logits, target),
        "with_grad": lambda: rk.logprob(x, target),
        "allocation": lambda: torch.empty(8, device=device),
    }
    if device == "cuda":
        calls["launch"] = lambda: torch.cuda._sleep(0)
    cost = host_costs_us(calls)
    with capsys.disabled():
        print(f"\nhost cost on {device} in us:", ", ".join(f"{name} {us:.2f}" for name, us in cost.items()))
    if device == "cuda":
        least = cost["launch"] + cost["allocation"]
        assert cost["eager"] <= max(5, least + 4)
        assert cost["with_grad"] <= max(25, 5 * least)


# ---- GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_no_call_synchronises(rng: np.random.Generator) -> None:
    logits, target = torch_logits(rng, (6, VOCAB)).cuda(), torch_targets(rng, (6,), VOCAB).cuda()
    temperature = torch.ones(6, device="cuda")
    kept = (torch.arange(8, dtype=torch.int32, device="cuda"), torch.tensor([0] * 4 + [8] * 3, device="cuda"))
    x = logits.clone().requires_grad_()
    weighted(everything(x, target))  # the first call of a process loads its kernels
    with no_synchronisation():
        result = rk.logprob(x, target, temperature=temperature, kept=kept, **ALL)
        result.logprob.sum().backward()
        rk.logprob_backward(logits, target, result.lse.detach(), dlogprob=temperature)
        stats = rk.logprob_partial(logits, target, vocab_start=0, vocab_size=VOCAB)
        rk.logprob_merge(stats[None], **ALL)
        with pytest.raises(RuntimeError, match="synchroniz"):  # the mode detects a real synchronisation
            rk.logprob(logits, target, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64])  # one row over the whole GPU; many rows
def test_a_captured_graph_replays_a_thousand_times(rows: int, rng: np.random.Generator) -> None:
    vocab = 32003
    batches = [torch_logits(rng, (rows, vocab), "bfloat16").cuda() for _ in range(8)]
    targets = [torch_targets(rng, (rows,), vocab).cuda() for _ in range(8)]
    x, y = batches[0].clone(), targets[0].clone()
    one = torch.ones(rows, device="cuda")

    def step() -> tuple[Any, ...]:
        result = rk.logprob(x, y, **ALL)
        return (*result, rk.logprob_backward(x, y, result.lse, entropy=result.entropy, dlogprob=one, dentropy=one))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    want = []
    for b, t in zip(batches, targets, strict=True):
        x.copy_(b)
        y.copy_(t)
        want.append([o.clone() for o in step()])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        x.copy_(batches[i % 8])
        y.copy_(targets[i % 8])
        graph.replay()
        for got, expected in zip(outputs, want[i % 8], strict=True):
            a, b = (t.view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32) for t in (got, expected))
            wrong += (a != b).sum()
    assert int(wrong) == 0


@pytest.mark.gpu
def test_autograd_inside_a_captured_graph(rng: np.random.Generator) -> None:
    x = torch_logits(rng, (16, 4099)).cuda().requires_grad_()
    y = torch_targets(rng, (16,), 4099).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            x.grad = None
            weighted(everything(x, y)).backward()
    torch.cuda.current_stream().wait_stream(side)
    want = x.grad.clone()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weighted(everything(x, y)).backward()
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert not differing(x.grad, want)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.gpu_memory(12)
def test_more_than_2_to_the_31_elements() -> None:
    """14,200 rows of 151,936 columns: 32-bit offsets overflow at row 14,134. Chunks must have the same bytes, and only
    a few are compared."""
    rows, vocab = 14_200, 151_936
    torch.manual_seed(0)
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device="cuda")
    for i in range(0, rows, 1000):
        logits[i : i + 1000].normal_(-1, 4)
    target = torch.randint(0, vocab, (rows,), device="cuda")
    whole = rk.logprob(logits, target, **ALL)
    assert not any(int(s) for s in whole.status.unique())
    for i in range(0, rows, 2000):
        part = rk.logprob(logits[i : i + 2000], target[i : i + 2000], **ALL)
        assert not differing(tuple(part), tuple(o[i : i + 2000] for o in whole)), i
    last = slice(rows - 3, rows)
    assert not truth(logits[last], target[last]).failures(rk.LogprobResult(*(o[last] for o in whole)))
    before = logits[-2:].clone()
    one = torch.linspace(0.5, 1.5, rows, device="cuda")
    want = rk.logprob_backward(before, target[-2:], whole.lse[-2:], dlogprob=one[-2:])
    # in place, since a second 4 GiB would not fit
    rk.logprob_backward(logits, target, whole.lse, dlogprob=one, out=logits)
    assert not differing(logits[-2:], want)
    assert not bool(torch.isnan(logits[::997].float()).any())


@pytest.mark.gpu
def test_an_allocation_that_fails_is_a_typed_error_and_the_next_call_works(rng: np.random.Generator) -> None:
    rows = 1 << 20
    logits = torch_logits(rng, (1, 8)).cuda().expand(rows, 8)
    target = torch.zeros(1, dtype=torch.int64, device="cuda").expand(rows)
    want = rk.logprob(logits[:5], target[:5])
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    # 1 MiB more is allowed, while an output takes 4
    torch.cuda.set_per_process_memory_fraction((reserved + (1 << 20)) / total)
    try:
        for _ in range(3):
            hold = []
            with pytest.raises((torch.OutOfMemoryError, MemoryError)):  # noqa: PT012 - one of them must fail
                for _ in range(64):  # cached memory may serve the first calls
                    hold.append(rk.logprob(logits, target, return_lse=True))
            del hold
            gc.collect()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not differing(rk.logprob(logits[:5], target[:5]), want)
    assert rk.logprob(logits, target).shape == (rows,)


@pytest.mark.gpu
def test_a_bad_id_leaves_the_context_alive(rng: np.random.Generator) -> None:
    logits = torch_logits(rng, (4, VOCAB)).cuda().requires_grad_()
    for bad in (-1, VOCAB, 2**31, -(2**40)):
        result = rk.logprob(logits, torch.tensor([1, bad, 2, 3], device="cuda"), **ALL)
        result.logprob.sum().backward()
        torch.cuda.synchronize()
        assert result.status.tolist() == [0, Status.BAD_TARGET, 0, 0]
    assert bool(torch.isfinite(rk.logprob(logits.detach(), torch.zeros(4, dtype=torch.int64).cuda())).all())


@pytest.mark.gpu
def test_the_device_of_the_arguments_is_used_whichever_is_current(rng: np.random.Generator) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    logits, target = torch_logits(rng, (4, VOCAB)), torch_targets(rng, (4,), VOCAB)
    with torch.cuda.device(0):
        got = rk.logprob(logits.to("cuda:1"), target.to("cuda:1"))
    assert got.device.index == 1
    assert not differing(got, rk.logprob(logits.to("cuda:0"), target.to("cuda:0")))


def test_a_torch_without_the_exchange_api_is_named() -> None:
    """A stand-in imitates torch before 2.10, since an attribute of a C type cannot be removed."""
    code = (
        "import sys, types, torch, rl_kernel_native as rk\n"
        "from rl_kernel_native.ops import logprob as op\n"
        "old = types.SimpleNamespace(Tensor=object, __version__='2.9.1')\n"
        "op._dispatch.torch_module = lambda: old\n"
        "try:\n    op._call.engine()\nexcept RuntimeError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "torch tensors need torch 2.10 or later, this is 2.9.1"


def _normed(eps: Any) -> Any:
    return rk.rms_norm(torch.ones(2, 8), torch.ones(8), eps)


def _attended(scale: Any) -> Any:
    return rk.attention(*(torch.ones(1, 1, 2, 16) for _ in range(3)), softmax_scale=scale)


def _scored(scale: Any) -> Any:
    return rk.logprob(torch.ones(2, 8), torch.tensor([1, 2]), logit_scale=scale)


@pytest.mark.parametrize(("name", "call"), [("eps", _normed), ("softmax_scale", _attended), ("logit_scale", _scored)])
@pytest.mark.parametrize("value", [torch.tensor(0.5), torch.tensor(0.5, requires_grad=True), True])
def test_no_number_is_read_from_a_tensor_or_a_bool(name: str, call: Any, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name}: expected .*a number, got {type(value).__name__}"):
        call(value)
    call(0.5)
