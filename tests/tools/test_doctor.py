"""The doctor: its JSON, its choices, its verdict."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rl_kernel_native import _variants, cases, doctor
from rl_kernel_native.cases._tools import within_bound
from rl_kernel_native.ops import attention as attention_op
from rl_kernel_native.ops import embedding as embedding_op
from rl_kernel_native.ops import linear as linear_op
from rl_kernel_native.ops import logprob as op
from rl_kernel_native.ops import rms_norm as rms_norm_op
from rl_kernel_native.ops import rope as rope_op
from rl_kernel_native.ops import silu_mul as silu_mul_op

GPU_90 = doctor.Device("cuda:0", "cuda", "H200", (9, 0), memory_gib=139.8)


def run_doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rl_kernel_native.doctor", *arguments], capture_output=True, text=True, timeout=120
    )


def test_json_is_one_object_and_the_status_says_healthy():
    done = run_doctor("--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["healthy"] is True
    assert {"versions", "gpus", "built_architectures", "operators", "cublas", "self_tests"} <= set(report)
    on_cpu = [(t["operator"], t["passed"]) for t in report["self_tests"] if t["device"] == "cpu"]
    # Exact operators have one check. linear also checks the models of other hardware, linear_logprob checks LoRA, and
    # sample checks process_logits and shards.
    one = (
        "covariance_mask", "importance_weights", "kl", "kv_cache_append", "mismatch_metrics", "pack", "policy_loss",
        "preference_loss", "random_bits", "scatter_rewards", "shift_labels_packed", "value_loss",
    )  # fmt: skip
    checks = {
        operator: {"linear": 3, "linear_logprob": 3, "sample": 4}.get(operator, 2 - (operator in one))
        for operator in cases.SELF_TESTS
    }
    assert on_cpu == [(operator, True) for operator, count in checks.items() for _ in range(count)]
    for operator in checks:
        assert report["operators"][operator][0]["backend"].startswith("cpu")
    bounded = [t for t in report["self_tests"] if "float64" in t["check"]]
    assert bounded
    for test in bounded:
        assert test["detail"].startswith("every error is within its bound"), "what passes does not read like a failure"


def test_text_names_every_section():
    done = run_doctor("--no-self-test")
    assert done.returncode == 0
    for title in ("versions", "machine", "backends", "cuBLAS", "self-test", "healthy"):
        assert title in done.stdout
    cpu = [line for line in done.stdout.splitlines() if line.startswith("  cpu ") and "operators" in line]
    assert len(cpu) == 1, "one line a backend"
    assert f"all {len(cases.SELF_TESTS)} operators" in cpu[0]


def test_a_backend_that_serves_some_operators_names_them():
    rows = {
        name: [{"device": "cuda:0", "backend": None if name == "kl" else "cuda", "why": "w"}] for name in ("a", "kl")
    }
    assert doctor._backends(rows) == [("cuda:0", "cuda: a; w"), ("cuda:0", "nothing: an error: kl; w")]


def test_an_error_at_its_bound_reads_as_passed():
    assert within_bound(1.0, "y") == (True, "every error is within its bound")
    assert within_bound(1.5, "y") == (False, "an error is 1.50 times its bound, in y")
    assert within_bound(float("nan"))[0] is False


@pytest.mark.parametrize(
    ("device", "built", "backend", "why"),
    [
        (GPU_90, ["sm_80", "sm_90a"], "cuda (sm_90a)", "kernels of its own"),
        (GPU_90, [], None, "RLK_VARIANT=cu130"),
        (GPU_90, ["sm_80"], None, "not served"),
        (doctor.Device("cuda:0", "cuda", "A100", (8, 0)), ["sm_80", "sm_90a"], "cuda (sm_80)", "machine code"),
        (doctor.Device("cuda:0", "cuda", "B200", (10, 0)), ["sm_80", "sm_90a"], "cuda (sm_80)", "PTX"),
        (doctor.Device("cuda:0", "cuda", "V100", (7, 0)), ["sm_80", "sm_90a"], None, "7.0 is not served"),
        (doctor.Device("cuda:0", "rocm", "MI300X", None, "gfx942"), [], None, "no HIP kernels"),
        (doctor.Device("cuda:0", "rocm", "MI250X", None, "gfx90a"), ["gfx90a", "gfx942"], "hip", "emulation"),
        (doctor.Device("cuda:0", "rocm", "7900 XTX", None, "gfx1100"), ["gfx90a", "gfx942"], None, "gfx1100 is not"),
    ],
)
def test_choice_of_a_backend(device, built, backend, why):
    choice = doctor.backend(device, built)
    assert choice["backend"] == backend
    assert why in choice["why"]


BUILT = ["sm_80", "sm_90a"]


@pytest.mark.parametrize(
    ("device", "built", "compiles"),
    [
        (doctor.Device("cpu", "cuda", "RTX 5090", (12, 0)), BUILT, True),
        (doctor.Device("cpu", "cuda", "H100", (9, 0)), BUILT, False),
        (doctor.Device("cpu", "cuda", "L40", (8, 9)), BUILT, False),
        (doctor.Device("cpu", "cuda", "V100", (7, 0)), BUILT, False),
        (doctor.Device("cpu", "cuda", "B200", (10, 0)), [], False),
        (doctor.Device("cpu", "rocm", "MI300X", None, "gfx942"), ["gfx942"], False),
    ],
)
def test_later_gpus_have_their_kernels_compiled_ahead(monkeypatch, capsys, device, built, compiles):
    """The processes that would compile run on this CPU."""
    monkeypatch.setattr(
        doctor, "_START", doctor._START + "\nimport os; assert os.environ['CUDA_MODULE_LOADING'] == 'EAGER'"
    )
    monkeypatch.setattr(doctor, "gpus", lambda torch: ([device], "one"))
    monkeypatch.setattr(doctor._native, "architectures", lambda prefix="": [x for x in built if x.startswith(prefix)])
    monkeypatch.setattr(doctor, "linear_engine", lambda device: "none")
    monkeypatch.delenv("CUDA_CACHE_DISABLE", raising=False)
    report = doctor.examine(self_test=False, warm=True)
    (row,) = report["warm"]
    assert row["error"] is None
    assert report["healthy"]
    assert [row[name] is not None and row[name] > 0 for name in ("first_s", "again_s")] == [compiles] * 2
    assert ("--warm" in row["why"]) == compiles
    doctor.print_report(report)
    words = (
        r"all kernels, in \d+\.\d s; a process that starts now takes \d+\.\d s" if compiles else "nothing to compile"
    )
    assert re.search(words, capsys.readouterr().out)


@pytest.mark.parametrize("start", ["fails", "without a cache"])
def test_kernels_that_could_not_be_compiled_ahead_are_not_healthy(monkeypatch, capsys, start):
    monkeypatch.setattr(doctor, "gpus", lambda torch: ([doctor.Device("cpu", "cuda", "B200", (10, 0))], "one"))
    monkeypatch.setattr(doctor._native, "architectures", lambda prefix="": BUILT)
    monkeypatch.setattr(doctor, "linear_engine", lambda device: "none")
    monkeypatch.setattr(doctor, "_START", "raise RuntimeError('out of memory')")
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1" if start == "without a cache" else "0")
    assert doctor.main(["--no-self-test", "--warm"]) == 1
    text = capsys.readouterr().out
    assert ("CUDA_CACHE_DISABLE is set" if start == "without a cache" else "RuntimeError: out of memory") in text
    assert "NOT HEALTHY: kernels could not be compiled ahead" in text


def test_nothing_is_compiled_ahead_unasked(monkeypatch):
    monkeypatch.setattr(doctor, "gpus", lambda torch: ([doctor.Device("cpu", "cuda", "B200", (10, 0))], "one"))
    monkeypatch.setattr(doctor, "linear_engine", lambda device: "none")
    assert doctor.examine(self_test=False)["warm"] == []


def test_cublas_is_batch_invariant_only_without_either_workspace():
    both = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
    assert doctor.cublas_workspace(both)["batch_invariant"]
    for missing in both:
        state = doctor.cublas_workspace({k: v for k, v in both.items() if k != missing})
        assert not state["batch_invariant"]
        assert f"{missing}={both[missing]}" in state["why"]
    # The setting that engines use still splits K for one and two rows.
    assert not doctor.cublas_workspace(both | {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})["batch_invariant"]


def test_a_machine_without_a_gpu_gets_no_advice_on_cublas(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gpus", lambda torch: ([], "none"))
    assert doctor.examine(self_test=False)["cublas"] == {"batch_invariant": None, "why": "no GPU"}
    assert doctor.main(["--no-self-test"]) == 0
    text = capsys.readouterr().out
    assert "batch invariant    no GPU" in text
    assert "WORKSPACE" not in text
    monkeypatch.setattr(doctor, "gpus", lambda torch: ([GPU_90], "one"))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert doctor.main(["--no-self-test"]) == 0
    assert "before the process starts, set CUBLAS_WORKSPACE_CONFIG=:0:0" in capsys.readouterr().out


def test_operators_that_passed_the_same_test_share_a_line():
    """The doctor would otherwise print one sentence 23 times. A test that failed, or did not run, has its own line
    before the other tests."""
    passed = {"device": "cpu", "check": "against float64", "passed": True, "detail": "within", "seconds": 1.0}
    tests = [
        {**passed, "operator": "kl"},
        {**passed, "operator": "rope", "passed": False, "detail": "off"},
        {**passed, "operator": "gae"},
        {**passed, "operator": "gae", "check": "same bytes"},
        {**passed, "operator": "kl", "device": "cuda:0", "passed": None, "detail": "no torch"},
    ]
    assert doctor._self_tests(tests) == [
        ("rope cpu", "FAILED: against float64; off (1.00 s)"),
        ("kl cuda:0", "not run: against float64; no torch (1.00 s)"),
        ("cpu", "ok: against float64; within: kl, gae (2.00 s)"),
        ("cpu", "ok: same bytes; within: gae (1.00 s)"),
    ]


def test_two_variants_are_not_healthy(monkeypatch, capsys):
    monkeypatch.setattr(_variants, "installed", lambda: ["rl-kernel-cpu 0.1.0", "rl-kernel-cu130 0.1.0"])
    assert doctor.main(["--no-self-test"]) == 1
    text = capsys.readouterr().out
    assert "NOT HEALTHY: more than one variant is installed" in text
    assert "uninstall all of them" in text


def test_hip_python_that_cannot_open_its_library_is_a_note(monkeypatch):
    def broken(name):
        raise RuntimeError("cannot open libamdhip64.so.6")

    monkeypatch.setattr(doctor, "variant", "rocm6")
    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    assert doctor.gpus(None) == ([], "hip-python cannot be imported: cannot open libamdhip64.so.6")


@pytest.fixture
def two_self_tests(monkeypatch):
    """Two self tests suffice to see how a doctor treats a failure; test_json_is_one_object... runs all."""
    monkeypatch.setattr(cases, "SELF_TESTS", {name: cases.SELF_TESTS[name] for name in ("logprob", "pack")})


@pytest.mark.usefixtures("two_self_tests")
def test_a_wrong_operator_is_reported(monkeypatch, capsys):
    right = op.logprob

    def wrong(*arguments, **options):
        result = right(*arguments, **options)
        return result._replace(lse=result.lse + 1e-3)

    monkeypatch.setattr(op, "logprob", wrong)
    assert doctor.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is False
    failed = [t for t in report["self_tests"] if t["passed"] is False]
    assert failed
    assert {t["operator"] for t in failed} == {"logprob"}
    assert "lse" in failed[0]["detail"]


@pytest.mark.usefixtures("two_self_tests")
def test_a_raising_operator_is_reported(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(op, "logprob", broken)
    report = doctor.examine()
    assert report["healthy"] is False
    assert "no kernel image" in report["self_tests"][0]["detail"]
    assert [t["passed"] for t in report["self_tests"] if t["operator"] == "pack"] == [True]  # the other tests still run


@pytest.mark.parametrize("operator", cases.SELF_TESTS)
def test_self_test_without_torch_uses_numpy(operator):
    assert all(check.passed for check in cases.SELF_TESTS[operator](None, "cpu", None))


@pytest.mark.parametrize("broken", ["linear", "linear_input_grad", "linear_weight_grad", "linear_bias_grad"])
def test_a_wrong_product_is_reported(broken, monkeypatch):
    """Results are off by a thousandth, far above the bound: 2^-23 of the sum of absolute values for each term."""
    right = getattr(linear_op, broken)
    monkeypatch.setattr(linear_op, broken, lambda *arguments, **options: right(*arguments, **options) * 1.001)
    checks = {check.check: check for check in cases.SELF_TESTS["linear"](None, "cpu", None)}
    assert checks["against float64"].passed is False


@pytest.mark.parametrize("broken", ["rms_norm", "rms_norm_backward"])
def test_a_wrong_norm_is_reported(broken, monkeypatch):
    """The results are off by a thousandth in every output; the float32 cases allow about 50 roundings of 2^-24."""
    right = getattr(rms_norm_op, broken)
    monkeypatch.setattr(
        rms_norm_op, broken, lambda *arguments, **options: tuple(a * 1.001 for a in right(*arguments, **options))
    )
    checks = {check.check: check for check in cases.SELF_TESTS["rms_norm"](None, "cpu", None)}
    assert checks["against float64"].passed is False


@pytest.mark.parametrize("broken", ["embedding", "embedding_backward"])
def test_a_wrong_table_is_reported(broken, monkeypatch):
    """The results are off by a thousandth. Rows are exact, and gradients are exact in float32."""
    right = getattr(embedding_op, broken)
    monkeypatch.setattr(embedding_op, broken, lambda *arguments, **options: right(*arguments, **options) * 1.001)
    checks = {check.check: check for check in cases.SELF_TESTS["embedding"](None, "cpu", None)}
    assert checks["against float64"].passed is False


@pytest.mark.parametrize("broken", ["attention", "attention_backward"])
def test_wrong_attention_is_reported(broken, monkeypatch):
    """The results are off by a thousandth; the float32 cases allow 2^-16 of an operand."""
    right = getattr(attention_op, broken)
    monkeypatch.setattr(
        attention_op, broken, lambda *arguments, **options: tuple(a * 1.001 for a in right(*arguments, **options))
    )
    checks = {check.check: check for check in cases.SELF_TESTS["attention"](None, "cpu", None)}
    assert checks["against float64"].passed is False


@pytest.mark.parametrize("broken", ["rope", "rope_backward"])
def test_a_wrong_rotation_is_reported(broken, monkeypatch):
    """The results are off by a thousandth; the float32 cases allow three roundings of 2^-24."""
    right = getattr(rope_op, broken)
    monkeypatch.setattr(
        rope_op, broken, lambda *arguments, **options: tuple(a * 1.001 for a in right(*arguments, **options))
    )
    checks = {check.check: check for check in cases.SELF_TESTS["rope"](None, "cpu", None)}
    assert checks["against float64"].passed is False


@pytest.mark.parametrize("check", ["against float64", "same bytes as logprob of linear, on any number of ranks"])
def test_a_wrong_head_is_reported(check, monkeypatch):
    """The head's logarithms are about 5. The wrong logarithms differ by a factor of 1.001, or by one bit."""
    module = importlib.import_module("rl_kernel_native.ops.linear_logprob")
    right, factor = module.linear_logprob, 1.001 if check == "against float64" else np.float32(1 + 2.0**-23)

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        return found._replace(lse=found.lse * factor)

    monkeypatch.setattr(module, "linear_logprob", wrong)
    checks = {found.check: found for found in cases.SELF_TESTS["linear_logprob"](None, "cpu", None)}
    assert checks[check].passed is False


def test_lora_of_another_scale_is_reported(monkeypatch):
    module = importlib.import_module("rl_kernel_native.ops.linear_logprob")
    right = module.linear_logprob

    def wrong(*arguments, lora_scale=1.0, **options):
        return right(*arguments, lora_scale=lora_scale * (1 + 2.0**-8), **options)

    monkeypatch.setattr(module, "linear_logprob", wrong)
    checks = {found.check: found for found in cases.SELF_TESTS["linear_logprob"](None, "cpu", None)}
    assert checks["LoRA continues the head's sums"].passed is False


@pytest.mark.parametrize("broken", ["gae", "group_advantage", "masked_whiten", "optimal_token_baseline"])
def test_a_wrong_advantage_is_reported(broken, monkeypatch):
    """The results are about 1, and off by a thousandth."""
    module = importlib.import_module(f"rl_kernel_native.ops.{broken}")
    right = getattr(module, broken)

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        return tuple(a * 1.001 for a in found) if isinstance(found, tuple) else found * 1.001

    monkeypatch.setattr(module, broken, wrong)
    checks = {check.check: check for check in cases.SELF_TESTS[broken](None, "cpu", None)}
    assert checks["against float64"].passed is False


@pytest.mark.parametrize("broken", ["importance_weights", "mismatch_metrics"])
def test_a_wrong_rollout_correction_is_reported(broken, monkeypatch):
    """The results are about 1, and off by a thousandth."""
    module = importlib.import_module(f"rl_kernel_native.ops.{broken}")
    right = getattr(module, broken)

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        if broken == "mismatch_metrics":
            return type(found)(found.vector * 1.001)
        return found._replace(weights=found.weights * 1.001)

    monkeypatch.setattr(module, broken, wrong)
    checks = {check.check: check for check in cases.SELF_TESTS[broken](None, "cpu", None)}
    assert checks["against float64"].passed is False


def test_a_wrong_reward_is_reported(monkeypatch):
    """The results are about 1, and off by a thousandth."""
    module = importlib.import_module("rl_kernel_native.ops.scatter_rewards")
    right = module.scatter_rewards

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        return found._replace(rewards=found.rewards * 1.001)

    monkeypatch.setattr(module, "scatter_rewards", wrong)
    checks = {check.check: check for check in cases.SELF_TESTS["scatter_rewards"](None, "cpu", None)}
    assert checks["against float64"].passed is False


def test_a_wrong_choice_is_reported(monkeypatch):
    module = importlib.import_module("rl_kernel_native.ops.covariance_mask")
    right = module.covariance_mask
    monkeypatch.setattr(module, "covariance_mask", lambda *a, **o: np.roll(right(*a, **o), 1))
    checks = {check.check: check for check in cases.SELF_TESTS["covariance_mask"](None, "cpu", None)}
    assert checks["against the definition"].passed is False


@pytest.mark.parametrize("broken", ["silu_mul", "gelu_mul", "silu_mul_backward", "gelu_mul_backward"])
def test_a_wrong_gate_is_reported(broken, monkeypatch):
    """The results are off by a thousandth in every output; the float32 cases allow about 50 roundings of 2^-24."""
    right = getattr(silu_mul_op, broken)

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        return tuple(a * 1.001 for a in found) if isinstance(found, tuple) else found * 1.001

    monkeypatch.setattr(silu_mul_op, broken, wrong)
    checks = {check.check: check for check in cases.SELF_TESTS["silu_mul"](None, "cpu", None)}
    assert checks["against float64"].passed is False


def test_rounding_to_bfloat16_is_to_nearest_even():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).normal(0, 4, 4096).astype(np.float32)
    x[:2] = 1 + 2.0**-8, 1 + 3 * 2.0**-8  # these are ties
    expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(cases._tools.round_to(x, "bfloat16"), expected)


def test_amd_gpus_come_from_hip_python(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, gcnArchName, totalGlobalMem = b"AMD Instinct MI300X", b"gfx942:sramecc+:xnack-", 192 * 2**30

    stand_in = SimpleNamespace(
        hipGetDeviceCount=lambda: (0, 1), hipDeviceProp_t=Properties, hipGetDeviceProperties=lambda properties, i: (0,)
    )
    monkeypatch.setattr(doctor, "variant", "rocm6")
    monkeypatch.setattr(doctor.importlib, "import_module", lambda name: stand_in)
    found, note = doctor.gpus(None)
    assert [(d.name, d.kind, d.memory_gib) for d in found] == [("rocm:0", "rocm", 192.0)]
    assert found[0].architecture == "gfx942"
    assert "HIP" in note
    assert doctor.backend(found[0], ["gfx90a", "gfx942"])["backend"] == "hip"
    assert doctor.backend(found[0], ["sm_80"])["backend"] is None


def test_names_of_any_length_leave_one_column_of_results(monkeypatch, capsys):
    rows = [("kl cpu", "ok"), ("optimal_token_baseline cpu", "ok")]
    monkeypatch.setattr(doctor, "_sections", lambda report: [("self-test", rows), ("nothing", [])])
    doctor.print_report({"installed_variants": {"conflict": False}, "warm": [], "healthy": True})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("ok")]
    assert len({line.index(" ok") for line in lines}) == 1, lines
