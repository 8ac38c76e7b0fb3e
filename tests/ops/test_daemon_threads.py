"""If a daemon thread is inside an operator when the interpreter ends, the process ends normally and not by a signal."""

from __future__ import annotations

import subprocess
import sys

import pytest

CALLS = {
    "linear": "rk.linear(np.ones((64, 512), f), np.ones((512, 512), f))",
    "logprob": "rk.logprob(np.ones((64, 50000), f), np.zeros(64, np.int64))",
    "attention": "rk.attention(*(np.ones((1, 256, 4, 64), f) for _ in range(3)))",
    "kl": "rk.kl(np.ones(1 << 20, f), np.ones(1 << 20, f), estimator='k3')",
}


@pytest.mark.parametrize("name", CALLS)
def test_the_process_ends_with_status_0(name: str) -> None:
    """pytorch#38228, pybind11#2215, nanobind#891."""
    code = f"""
import threading, time
import numpy as np
import rl_kernel_native as rk
f = np.float32
began = threading.Event()
def loop():
    while True:
        {CALLS[name]}
        began.set()
threading.Thread(target=loop, daemon=True).start()
assert began.wait(60)
time.sleep(0.05)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
