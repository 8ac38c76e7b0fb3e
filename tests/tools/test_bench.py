"""The bench: what it measures, writes and draws. Times are not judged here."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from rl_kernel_native.bench import __main__ as command  # noqa: E402
from rl_kernel_native.bench import (  # noqa: E402
    attention,
    comparison,
    embedding,
    linear,
    logprob,
    measure,
    passes,
    policy_loss,
    rms_norm,
    rope,
    sampling,
    silu_mul,
    token_terms,
)
from rl_kernel_native.contract import ROUNDING, row  # noqa: E402
from scripts import load_script  # noqa: E402


def benched_by(module: str) -> list[str]:
    """Operators whose bench is in a module."""
    found = [name for name, bench in command.BENCHES.items() if bench.module == module]
    assert found
    return found


def test_command_writes_json_and_a_plot(tmp_path, capsys):
    files = {kind: tmp_path / "out" / f"run.{kind}" for kind in ("json", "png")}
    arguments = ["logprob", "--rows", "4", "--vocab", "257", "--device", "cpu", "--seconds", "0.05", "--no-compile"]
    assert command.main([*arguments, "--json", str(files["json"]), "--plot", str(files["png"])]) == 0
    run = json.loads(files["json"].read_text())
    rows = {(r["pass"], r["peer"]): r for r in run["results"]}
    assert {p for p, _ in rows} == set(logprob.PASSES)
    assert all(rows[p, "rk"]["times_rk"] == 1.0 for p in logprob.PASSES)
    assert rows["forward", "rk"]["max_error"] < row("logprob", "logprob").allowed(max_abs_z=20)  # logits of deviation 3
    assert all(r["median_ms"] > 0 and r["samples"] >= measure.ROUNDS for r in rows.values())
    assert "--rows 4" in run["command"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "torch gather - logsumexp" in capsys.readouterr().out


def test_command_for_linear_writes_json_and_a_plot(tmp_path, capsys):
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "png")}
    shape = ["--rows", "4", "--in-features", "65", "--out-features", "33"]
    arguments = ["linear", *shape, "--device", "cpu", "--seconds", "0.05"]
    assert command.main([*arguments, "--json", str(files["json"]), "--plot", str(files["png"])]) == 0
    run = json.loads(files["json"].read_text())
    rows = {(r["pass"], r["peer"]): r for r in run["results"]}
    assert {p for p, _ in rows} == set(linear.PASSES)
    assert all(rows[p, "rk"]["times_rk"] == 1.0 and rows[p, "rk"]["tflops"] > 0 for p in linear.PASSES)
    assert rows["forward", "rk"]["max_error"] < ROUNDING["bfloat16"].relative  # relative to the largest
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "linear [4, 65] x [33, 65] bfloat16" in capsys.readouterr().out


def test_command_for_rms_norm_writes_json_and_a_plot(tmp_path, capsys):
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "png")}
    arguments = ["rms_norm", "--rows", "4", "--columns", "65", "--device", "cpu", "--seconds", "0.05", "--no-compile"]
    assert command.main([*arguments, "--json", str(files["json"]), "--plot", str(files["png"])]) == 0
    run = json.loads(files["json"].read_text())
    rows = {(r["pass"], r["peer"]): r for r in run["results"]}
    assert {p for p, _ in rows} == set(rms_norm.PASSES)
    assert all(rows[p, "rk"]["times_rk"] == 1.0 for p in rms_norm.PASSES)
    assert rows["forward", "rk"]["max_error"] < ROUNDING["bfloat16"].relative  # relative to the largest
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "rms_norm [4, 65] bfloat16" in capsys.readouterr().out


def test_command_for_silu_mul_writes_json_and_a_plot(tmp_path, capsys):
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "png")}
    arguments = ["silu_mul", "--rows", "4", "--columns", "65", "--device", "cpu", "--seconds", "0.05", "--no-compile"]
    assert command.main([*arguments, "--json", str(files["json"]), "--plot", str(files["png"])]) == 0
    run = json.loads(files["json"].read_text())
    rows = {(r["pass"], r["peer"]): r for r in run["results"]}
    assert {p for p, _ in rows} == set(silu_mul.PASSES)
    assert all(rows[p, "rk"]["times_rk"] == 1.0 for p in silu_mul.PASSES)
    assert all(
        rows[p, "rk"]["max_error"] < ROUNDING["bfloat16"].relative for p in silu_mul.PASSES[:3]
    )  # relative to the largest
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "silu_mul [4, 65] bfloat16" in capsys.readouterr().out


def test_every_peer_computes_the_same_gates():
    device = torch.device("cpu")
    o = silu_mul._buffers(5, 40, torch.float32, device)[0]
    found, _ = silu_mul.peers(device, use_compile=False)
    for which in silu_mul.PASSES:
        expected = None
        for peer in found:
            got = silu_mul._call(peer, which, [o])(0)
            expected = got if expected is None else expected
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_every_peer_computes_the_same_norm():
    device = torch.device("cpu")
    o = rms_norm._buffers(5, 40, torch.float32, device)[0]
    found, _ = rms_norm.peers(device, use_compile=False)
    for which in rms_norm.PASSES:
        expected = None
        for peer in found:
            got = rms_norm._call(peer, which, [o])(0)
            expected = got if expected is None else expected
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_command_for_embedding_writes_json_and_a_plot(tmp_path, capsys):
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "png")}
    arguments = ["embedding", "--rows", "4", "--vocab", "50", "--columns", "65", "--device", "cpu", "--seconds", "0.05"]
    arguments += ["--no-compile", "--json", str(files["json"]), "--plot", str(files["png"])]
    assert command.main(arguments) == 0
    run = json.loads(files["json"].read_text())
    rows = {(r["pass"], r["peer"]): r for r in run["results"]}
    assert {p for p, _ in rows} == set(embedding.PASSES)
    assert all(rows[p, "rk"]["times_rk"] == 1.0 for p in embedding.PASSES)
    assert rows["forward", "rk"]["max_error"] == 0
    assert rows["forward + backward", "rk"]["max_error"] < 2**-8  # bfloat16's rounding of the largest
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "embedding 4 of [50, 65] bfloat16" in capsys.readouterr().out


def test_every_peer_computes_the_same_rows():
    device = torch.device("cpu")
    o, weight = embedding._buffers(50, 9, 16, torch.float32, device)[0], embedding._table(9, 16, torch.float32, device)
    found, _ = embedding.peers(device, use_compile=False)
    for which in embedding.PASSES:
        expected = None
        for peer in found:
            got = embedding._call(peer, which, weight, [o])(0)
            expected = got if expected is None else expected
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_command_for_attention_writes_json_and_a_plot(tmp_path, capsys):
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "png")}
    arguments = [
        "attention",
        "--rows",
        "40",
        "--q-heads",
        "4",
        "--kv-heads",
        "2",
        "--head-dim",
        "64",
        "--device",
        "cpu",
    ]
    arguments += ["--seconds", "0.05", "--json", str(files["json"]), "--plot", str(files["png"])]
    assert command.main(arguments) == 0
    run = json.loads(files["json"].read_text())
    rows = {(r["pass"], r["peer"]): r for r in run["results"]}
    assert {p for p, _ in rows} == set(attention.PASSES)
    assert all(rows[p, "rk"]["times_rk"] == 1.0 for p in attention.PASSES)
    known = ("rk", "torch SDPA", "rk, partials merged")
    assert all(rows["forward", peer]["max_error"] < 2**-7 for peer in known)  # bfloat16's roundings
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "attention [40, 4 + 2, 64] bfloat16" in capsys.readouterr().out


def test_every_peer_computes_the_same_attention():
    device = torch.device("cpu")
    o = attention._buffers(9, (4, 2), 16, torch.float32, device)[0]
    for which in attention.PASSES:
        expected = None
        for peer in attention.of_pass(attention.peers(device)[0], which):
            got = attention._call(peer, which, [o])(0)
            expected = got if expected is None else expected
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_command_for_policy_loss_writes_json(tmp_path, capsys):
    file = tmp_path / "run.json"
    arguments = ["policy_loss", "--rows", "4", "--tokens", "64", "--device", "cpu", "--seconds", "0.05", "--no-compile"]
    assert command.main([*arguments, "--json", str(file)]) == 0
    rows = {(r["pass"], r["peer"]): r for r in json.loads(file.read_text())["results"]}
    assert {p for p, _ in rows} == set(policy_loss.PASSES)
    assert all(rows[p, "rk"]["times_rk"] == 1.0 for p in policy_loss.PASSES)
    assert rows["through backward()", "rk"]["max_error"] < 1e-6
    assert "policy_loss [4, 64] float32" in capsys.readouterr().out


@pytest.mark.parametrize("operator", benched_by("token_terms"))
def test_command_for_terms_of_tokens_writes_json(operator, tmp_path, capsys):
    file = tmp_path / "run.json"
    arguments = [operator, "--rows", "4", "--tokens", "64", "--device", "cpu", "--seconds", "0.05", "--no-compile"]
    assert command.main([*arguments, "--json", str(file)]) == 0
    rows = {(r["pass"], r["peer"]): r for r in json.loads(file.read_text())["results"]}
    assert {p for p, _ in rows} == set(token_terms.PASSES)
    for which in token_terms.PASSES:
        assert rows[which, "rk"]["times_rk"] == 1.0
        assert rows[which, "rk"]["max_error"] < 1e-6
    assert f"{operator} [4, 64] float32" in capsys.readouterr().out


@pytest.mark.parametrize("operator", benched_by("rollout"))
def test_command_for_rollouts_writes_json(operator, tmp_path):
    file = tmp_path / "run.json"
    arguments = [operator, "--rows", "4", "--tokens", "64", "--device", "cpu", "--seconds", "0.05", "--no-compile"]
    assert command.main([*arguments, "--json", str(file)]) == 0
    rows = {r["peer"]: r for r in json.loads(file.read_text())["results"]}
    assert rows["rk"]["times_rk"] == 1.0
    if operator in ("covariance_mask", "entropy_mask"):  # only the counts of chosen tokens are compared
        assert rows["rk"]["max_error"] == 0
        return
    output = {"importance_weights": "weights", "mismatch_metrics": "metrics"}[operator]
    facts = {"terms": 64} if output == "weights" else {}
    assert rows["rk"]["max_error"] < row(operator, output).allowed(expected=2.0, **facts)


def test_command_for_rope_writes_json_and_a_plot(tmp_path, capsys):
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "png")}
    arguments = ["rope", "--rows", "4", "--head-dim", "64", "--device", "cpu", "--seconds", "0.05", "--no-compile"]
    assert command.main([*arguments, "--json", str(files["json"]), "--plot", str(files["png"])]) == 0
    run = json.loads(files["json"].read_text())
    rows = {(r["pass"], r["peer"]): r for r in run["results"]}
    assert {p for p, _ in rows} == set(rope.PASSES)
    assert all(rows[p, "rk"]["times_rk"] == 1.0 for p in rope.PASSES)
    assert rows["forward", "rk"]["max_error"] < ROUNDING["bfloat16"].relative  # relative to the largest
    assert rows["forward", "rk, input"]["max_error"] == rows["forward", "torch written out"]["max_error"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "rope [4, 32 + 8, 64] bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize("operator", benched_by("passes"))
def test_command_for_sequences_writes_json(operator, tmp_path, capsys):
    file, bench = tmp_path / "run.json", command.BENCHES[operator]
    columns = ["--columns", "8"] if bench.sizes else []
    arguments = [operator, "--rows", "4", *columns, "--device", "cpu", "--seconds", "0.02", "--no-compile"]
    assert command.main([*arguments, "--json", str(file)]) == 0
    run = json.loads(file.read_text())
    assert all(r["times_rk"] == 1.0 for r in run["results"] if r["peer"] == "rk")
    shape = "[4, 8]" if bench.sizes else "[4]"
    assert f"{operator} {shape} {bench.only_dtype or 'bfloat16'}" in capsys.readouterr().out


@pytest.mark.parametrize("operator", benched_by("sampling"))
def test_command_for_sampling_writes_json(operator, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sampling, "VOCAB", 1000)
    file = tmp_path / "run.json"
    assert command.main([operator, "--rows", "4", "--device", "cpu", "--seconds", "0.02", "--json", str(file)]) == 0
    run = json.loads(file.read_text())
    of_rk = [r["times_rk"] for r in run["results"] if r["peer"] == "rk"]
    assert of_rk == [1.0] * max(len(of_rk), 1)
    assert len(run["results"]) > 1
    assert operator in capsys.readouterr().out


@pytest.mark.parametrize("operator", benched_by("passes"))
def test_every_peer_computes_the_same_of_sequences(operator):
    buffers, found = passes.passes_of(operator, 6, 10, torch.float32, torch.device("cpu"))
    for which in found:
        got = [f(buffers[0]) for f in which.peers.values()]
        for peer in got[1:]:
            pairs = zip(peer, got[0], strict=False) if isinstance(peer, tuple) else [(peer, got[0])]
            for a, b in pairs:
                torch.testing.assert_close(a, b if a.shape == b.shape else b[0], rtol=1e-5, atol=1e-5)


def test_every_peer_computes_the_same_rotation():
    device = torch.device("cpu")
    o = rope._buffers(5, (3, 2), 16, torch.float32, device)[0]
    found, _ = rope.peers(device, rope.angles(5, 16, torch.float32, device), use_compile=False)
    for which in rope.PASSES:
        expected = None
        for peer in found:
            got = rope._call(peer, which, [o])(0)
            expected = got if expected is None else expected
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operator", benched_by("advantage"))
def test_command_for_advantages_writes_json(operator, tmp_path, capsys):
    file = tmp_path / "run.json"
    tokens = [] if operator == "group_advantage" else ["--tokens", "130"]
    arguments = [operator, "--rows", "16", *tokens, "--device", "cpu", "--seconds", "0.05", "--no-compile"]
    assert command.main([*arguments, "--json", str(file)]) == 0
    rows = {r["peer"]: r for r in json.loads(file.read_text())["results"]}
    assert rows["rk"]["times_rk"] == 1.0
    assert all(r["max_error"] < 1e-5 for r in rows.values())
    assert f"{operator} [16," in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)], ids=str)
def test_every_peer_computes_the_same_products(dtype, tolerance):
    device = torch.device("cpu")
    o = linear._buffers((5, 40, 30), dtype, device)[0]
    peers = linear.peers(device, dtype)
    assert ("rk as sm_90" in {peer.name for peer in peers}) == (dtype != torch.float32)
    for which in linear.PASSES:
        expected = None
        for peer in peers:
            got = linear._call(peer, which, [o])(0)
            expected = got if expected is None else expected
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=10 * tolerance)


def test_a_note_says_which_cublas_was_measured(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert "CUBLAS_WORKSPACE_CONFIG=:0:0" in linear._notes(torch.device("cuda"))[0]
    assert linear._notes(torch.device("cpu")) == []


def test_every_peer_computes_the_same_log_probability():
    device = torch.device("cpu")
    batch = logprob._batches(5, 301, torch.float32, device)[0]
    found, _ = logprob.peers(device, torch.float32, use_compile=False)
    for peer in found:
        torch.testing.assert_close(peer.forward(batch), found[0].forward(batch), rtol=0, atol=2e-5)
        if peer.with_entropy:
            for got, expected in zip(peer.with_entropy(batch), found[0].with_entropy(batch), strict=True):
                torch.testing.assert_close(got, expected, rtol=0, atol=4e-5)


def test_an_absent_peer_is_named():
    _, absent = logprob.peers(torch.device("cpu"), torch.bfloat16, use_compile=False)
    assert {line.split(":")[0] for line in absent} == {"liger_kernel", "quack"}


def test_a_peer_that_fails_is_named_and_the_others_are_measured():
    run = comparison.Comparison(torch.device("cpu"), 0.01)
    run.add("forward", [comparison.Candidate("rk", abs), comparison.Candidate("torch", lambda i: [][i])], 1)
    assert [row["peer"] for row in run.results] == ["rk"]
    assert run.absent == ["torch, forward: IndexError: list index out of range"]


def test_times_are_told_against_ours_or_not_at_all():
    run = comparison.Comparison(torch.device("cpu"), 0.01)
    with pytest.raises(IndexError):
        run.add("forward", [comparison.Candidate("rk", lambda i: [][i]), comparison.Candidate("torch", abs)], 1)
    assert run.results == []


def test_candidates_are_visited_in_turn():
    order = []
    measure.measure([lambda i: order.append("a"), lambda i: order.append("b")], torch.device("cpu"), 0.01)
    switches = sum(x != y for x, y in itertools.pairwise(order))
    assert switches >= 2 * measure.ROUNDS


def test_timing_is_the_median():
    timing = measure.timing_of([3.0, 1.0, 100.0, 2.0, 4.0])
    assert timing.median_ms == 3.0
    assert timing.samples == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "-1"], "argument --rows: want a whole number > 0, got -1"),
        (["--rows", "0"], "argument --rows: want a whole number > 0, got 0"),
        (["--vocab", "1.5"], "argument --vocab: want a whole number > 0, got 1.5"),
        (["--threads", "0"], "argument --threads: want a whole number > 0"),
        (["--dtype", "int8"], "argument --dtype: invalid choice"),
        (["--seconds", "0"], "argument --seconds: want a finite number > 0, got 0"),
        (["--seconds", "nan"], "argument --seconds: want a finite number > 0, got nan"),
        (["--device", "tpu"], "--device tpu: want auto, cpu, cuda or cuda:N"),
        (["--device", "meta"], "--device meta: want auto, cpu, cuda or cuda:N"),
    ],
)
def test_bad_arguments_exit_with_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as error:
        command.main(["logprob", *arguments])
    assert error.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("operator", command.BENCHES)
def test_a_dtype_is_obeyed_or_refused(operator, monkeypatch, capsys):
    bench = command.BENCHES[operator]
    if bench.only_dtype is not None:
        with pytest.raises(SystemExit):
            command.main([operator, "--dtype", "float16"])
        assert "unrecognized arguments: --dtype float16" in capsys.readouterr().err
    elif bench.passes is not None:
        buffers, _ = passes.passes_of(operator, 6, 10, torch.float16, torch.device("cpu"))
        assert torch.float16 in {t.dtype for b in buffers for t in ([b] if isinstance(b, torch.Tensor) else b)}
    else:
        monkeypatch.setattr(comparison.Comparison, "add", lambda *_, **__: None)  # nothing is measured
        options = comparison.Options(operator, 2, dict.fromkeys(bench.sizes, 32), "float16", "cpu", 0.01, False)
        module = importlib.import_module(f"rl_kernel_native.bench.{bench.module}")
        assert module.measured(options)["dtype"] == "float16"


def test_the_command_without_typer_names_an_installation_that_works(capsys, monkeypatch):
    from rl_kernel_native.consistency import main

    monkeypatch.setattr(main.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as error:
        main.main()
    assert error.value.code == 2
    assert 'typer and rich not installed; in a clone of the repository: pip install ".[compare]"' in (
        capsys.readouterr().err
    )


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as error:
        command.main(["logprob", "--rows", "4", "--plot", str(tmp_path / "run.png")])
    assert error.value.code == 2
    assert '--plot: matplotlib is not installed; in a clone of the repository: pip install ".[bench]"' in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("built", "visible", "words"),
    [
        ([], 1, "--device cuda:1: this build (variant"),
        (["sm_80", "sm_90a"], 1, "--device cuda:1: torch sees 1 CUDA devices"),
    ],
)
def test_a_gpu_that_cannot_be_used_exits_with_2_and_auto_is_the_cpu_without_kernels(
    built, visible, words, capsys, monkeypatch
):
    monkeypatch.setattr(command._native, "architectures", lambda prefix="": built)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit) as error:
        command.main(["logprob", "--device", "cuda:1"])
    assert error.value.code == 2
    assert words in capsys.readouterr().err
    assert command._device(torch, "auto") == ("cuda" if built else "cpu")


def test_the_ways_of_a_grpo_step_have_the_same_loss_and_gradients():
    path = Path(__file__).parents[2] / "bench" / "grpo_head_memory.py"
    script = load_script(path)
    batch = script.make_batch(3, 40, 64, 700, "cpu")
    expected = script.step(script.stock, batch)
    gradients = [batch.hidden.grad.clone(), batch.weight.grad.clone()]
    total = torch.zeros(700, 64)
    for main_grad in (None, total):
        got = script.step(functools.partial(script.ours, main_grad=main_grad), batch)
        assert abs(got - expected) < 1e-2 * abs(expected)  # torch rounds its logits to bfloat16
        weight_grad = batch.weight.grad if main_grad is None else main_grad
        for mine, torchs in zip((batch.hidden.grad, weight_grad), gradients, strict=True):
            assert (mine - torchs).float().norm() < 1e-2 * torchs.float().norm()
