"""canonical_blas: cuBLAS without a workspace, or an error that says why it is too late."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import rl_kernel_native as rk
from rl_kernel_native import _blas, doctor

WANTED = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores its variables after each test."""
    for name in WANTED:
        monkeypatch.setenv(name, "placeholder")
        monkeypatch.delenv(name)


def test_it_sets_both_variables_and_says_so() -> None:
    assert rk.canonical_blas() == WANTED
    assert {name: os.environ[name] for name in WANTED} == WANTED
    assert rk.canonical_blas() == WANTED, "a second call finds them set"
    assert doctor.cublas_workspace(os.environ)["batch_invariant"] is True


def test_other_values_are_replaced_before_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert rk.canonical_blas() == WANTED
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"


def test_processes_that_are_started_later_inherit_it() -> None:
    rk.canonical_blas()
    code = "import os; print(os.environ['CUBLAS_WORKSPACE_CONFIG'], os.environ['CUBLASLT_WORKSPACE_SIZE'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ":0:0 0\n"


def test_it_is_too_late_once_torch_has_initialised_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with pytest.raises(RuntimeError, match=r"too late.*CUBLAS_WORKSPACE_CONFIG=:0:0 CUBLASLT_WORKSPACE_SIZE=0"):
        rk.canonical_blas()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "nothing was changed"
    for name, value in WANTED.items():
        monkeypatch.setenv(name, value)
    assert rk.canonical_blas() == WANTED, "a process that was started with them"


def test_it_needs_no_torch() -> None:
    code = "import sys, rl_kernel_native as rk; rk.canonical_blas(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_doctor_names_what_it_sets() -> None:
    why = doctor.cublas_workspace({})["why"]
    assert all(f"{name}={value}" in why for name, value in _blas.CANONICAL.items())
    assert "canonical_blas()" in why


GEMM = """
import rl_kernel_native as rk
rk.canonical_blas()
import torch
torch.manual_seed(0)
x, w = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((256, 4096), (4096, 4096)))
whole = torch.nn.functional.linear(x, w)
print(all(torch.equal(torch.nn.functional.linear(x[:n], w), whole[:n]) for n in (1, 2, 16, 64)))
"""


@pytest.mark.gpu
def test_a_gemm_of_torch_is_batch_invariant_then() -> None:
    """K = N = 4096, where cuBLAS with a workspace splits K below 32 rows (docs/numerics.md, fact 1)."""
    environment = {name: value for name, value in os.environ.items() if name not in WANTED}
    done = subprocess.run([sys.executable, "-c", GEMM], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout == "True\n", done.stderr
