"""The data that a reader needs to repeat a run: versions, hardware, arithmetic and the settings that select kernels."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from .._arithmetic import UNITS, arithmetic
from .._arithmetic import arithmetic_of as arithmetic_of
from .._machine import cpu_model
from .errors import BadInput

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "matplotlib")
# These environment variables can select other kernels, and therefore change bits.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "NVIDIA_TF32_OVERRIDE",
)

Value = str | int | float | bool | None


def versions() -> dict[str, Value]:
    """The versions of Python, of this package and of the packages that it uses; None for a package that is absent."""
    found: dict[str, Value] = {"python": platform.python_version()}
    for package in ("rl-kernel-native", *_PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    # This version also names the build ("+cpu", "+cu130"), which some installs' metadata omits.
    found["torch"] = str(torch.__version__)
    found["cuda"] = torch.version.cuda
    return found


def computing_as(unit: str | None, device: torch.device) -> AbstractContextManager[None]:
    """A context that computes in the arithmetic of --arithmetic. None keeps the device's own arithmetic. BadInput for
    an unknown unit."""
    if unit is None:
        return nullcontext()
    if unit not in UNITS:
        raise BadInput(f"--arithmetic {unit}: want one of {', '.join(UNITS)}")
    if device.type == "cpu":
        return arithmetic(unit)
    if unit != arithmetic_of(device):
        raise BadInput(f"--arithmetic {unit}: {device} has {arithmetic_of(device)}; the CPU has any")
    return nullcontext()


def hardware(device: torch.device) -> dict[str, Value]:
    """The machine as torch sees it. Names no host and no user."""
    found: dict[str, Value] = {
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_capability"] = f"{properties.major}.{properties.minor}"
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["allow_tf32"] = torch.backends.cuda.matmul.allow_tf32
    found["deterministic_algorithms"] = torch.are_deterministic_algorithms_enabled()
    for name in _VARIABLES:
        if name in os.environ:
            found[name] = os.environ[name]
    return found


def command_line() -> str:
    """The command as typed, with the program's name in place of its path."""
    return shlex.join([Path(sys.argv[0]).name or "rlk", *sys.argv[1:]])
