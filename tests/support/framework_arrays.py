"""Tests an operator on every framework's arrays: the bytes of NumPy, in the caller's own kind of array.

``everything(make, dtype)`` calls every function of an operator on arrays that ``make`` converts from NumPy's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cases import raw

DTYPES = ["float32", "float16", "bfloat16"]
Everything = Callable[[Callable[[np.ndarray], Any], str], list[Any]]


def of(dtype: str, *arrays: np.ndarray) -> list[np.ndarray]:
    if dtype == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy's bfloat16 comes from ml_dtypes")
        return [a.astype(ml_dtypes.bfloat16) for a in arrays]
    return [a.astype(dtype) for a in arrays]


def bytes_of(results: list[Any]) -> list[bytes]:
    return [raw(r) for r in results]


def of_torch(a: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    if a.dtype.name != "bfloat16":
        return torch.from_numpy(a)
    return torch.from_numpy(a.astype(np.float32)).bfloat16()


def assert_torch_has_the_bytes_of_numpy(everything: Everything, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    got = everything(of_torch, dtype)
    assert all(isinstance(r, torch.Tensor) for r in got)
    assert bytes_of(got) == bytes_of(everything(lambda a: a, dtype))


def assert_jax_has_the_bytes_of_numpy(everything: Everything, dtype: str) -> None:
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]
    got = everything(lambda a: jax.device_put(a, cpu), dtype)
    assert all(isinstance(r, jax.Array) for r in got)
    assert bytes_of(got) == bytes_of(everything(lambda a: a, dtype))


def assert_cupy_has_the_bytes_of_torch(everything: Everything, dtype: str) -> None:
    cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")
    got = everything(cupy.asarray, dtype)
    assert all(isinstance(r, cupy.ndarray) for r in got)
    assert bytes_of(got) == bytes_of(everything(lambda a: torch.from_numpy(a).cuda(), dtype))


def assert_prints_without_torch(code: str, printed: str, **environment: str) -> None:
    """Runs ``code`` in another process, with these variables, where it must not import torch."""
    whole = f"import sys, numpy as np, rl_kernel_native as rk\n{code}\nassert 'torch' not in sys.modules\n"
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=False, env=env)
    assert (done.stdout, done.returncode) == (f"{printed}\n", 0), done.stderr
