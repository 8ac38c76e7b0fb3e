"""The oldest NumPy that the package declares: masks of bool and read-only arrays are read; read-only outputs are
refused by name. `RLK_OLDEST_NUMPY` names a folder that has it (scripts/test.sh). The newest NumPy runs the same calls
here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rl_kernel_native as rk

CALLS = """
import sys
import numpy as np
import rl_kernel_native as rk

P = -np.linspace(0.1, 1.0, 6, dtype=np.float32).reshape(2, 3)
Z = np.linspace(-1.0, 1.0, 27, dtype=np.float32).reshape(3, 9)
Y = np.array([1, 0, 8])
M = np.array([[1, 1, 0], [1, 0, 0]], bool)


def locked(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def same(a, b):
    assert a.tobytes() == b.tobytes() and a.dtype == b.dtype, (a, b)


integers = M.astype(np.int64)
same(rk.masked_whiten(P, M), rk.masked_whiten(P, integers))
same(rk.masked_whiten(locked(P), locked(M)), rk.masked_whiten(P, M))
same(rk.masked_whiten(np.broadcast_to(P[:1], (2, 3)), M), rk.masked_whiten(P[[0, 0]], M))
same(rk.logprob(locked(Z.astype(np.float16)), locked(Y)), rk.logprob(Z.astype(np.float16), Y))
how = {"spec": rk.PolicySpec()}
same(rk.policy_loss(locked(P), P, P, locked(M), **how).loss, rk.policy_loss(P, P, P, integers, **how).loss)
same(rk.masked_whiten(locked(P[:0])), P[:0])
packed = rk.pack(locked(M), mask=M)
assert packed.tensors.dtype == bool and packed.tensors[:3].all(), packed
before = P.tobytes()
out = locked(np.zeros(3, np.float32))
try:
    rk.logprob(Z, Y, out=out)
except BufferError as error:
    assert str(error) in ("out: is read-only", "out.logprob: is read-only", "logprob: is read-only"), error
else:
    raise AssertionError("a read-only output is written")
assert not out.any() and P.tobytes() == before
print(np.__version__)
"""


def run(*path: str) -> str:
    root = Path(rk.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", CALLS], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_numpy_at_hand() -> None:
    assert run() == np.__version__


def test_the_oldest_numpy_that_is_declared() -> None:
    folder = os.environ.get("RLK_OLDEST_NUMPY")
    if not folder:
        pytest.skip("RLK_OLDEST_NUMPY names no folder that has it")
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    declared = re.search(r'"numpy>=([0-9.]+)"', text)
    assert declared
    assert run(folder).startswith(declared[1] + ".")
