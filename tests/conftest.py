"""Shared by every test: devices, seeds, and the reason why a GPU test cannot run."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest

# Without this setting, JAX would take three quarters of the GPU's memory with its first array.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@functools.cache
def cuda_device_count() -> int:
    """Asks the driver itself, since importing torch for this would cost every run seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@functools.cache
def why_no_gpu() -> str | None:
    """Why GPU tests cannot run here, or None."""
    if cuda_device_count() == 0:
        return "no CUDA device"
    import rl_kernel_native

    if not rl_kernel_native.variant.startswith("cu"):
        return f"this build has no CUDA kernels (variant {rl_kernel_native.variant})"
    import torch

    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if on_gpu else None
    for item in on_gpu if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))
    for item in items:
        if item.get_closest_marker("gpu_memory"):
            item.add_marker(pytest.mark.xdist_group("gpu_memory"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if mark := item.get_closest_marker("gpu_memory"):
        import torch

        gib, free = mark.args[0], torch.cuda.mem_get_info()[0] >> 30
        if free < gib:
            pytest.skip(f"needs {gib} GiB of GPU memory, {free} GiB are free")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu_memory"):
        import torch

        torch.cuda.empty_cache()


def pytest_collection_finish() -> None:
    """Registers the torch operators. If the package is imported before torch, it registers its operators only at the
    first tensor.

    The 700,000 objects that exist by now live until the end. They are frozen, because every collection would look
    through them.
    """
    if "torch" in sys.modules and "rl_kernel_native" in sys.modules:
        sys.modules["rl_kernel_native"].ops.register_torch_operators()
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["portable", "hardware"])
def exp(request: pytest.FixtureRequest) -> str:
    """Runs a test with both exponentials of softmax statistics. cases.mode gives the CPU the hardware's exponential."""
    return request.param


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """The seed is the test's own name, so adding a test changes no other test's numbers."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture
def native_settings() -> Iterator[None]:
    """Restores the CPU backend's instruction set and thread count."""
    from rl_kernel_native._native import module

    isa, threads = module.cpu_isa(), module.num_threads()
    yield
    module.set_cpu_isa(isa)
    module.set_num_threads(threads)
