"""The setting with which cuBLAS sums in the order of docs/numerics.md, fact 1."""

from __future__ import annotations

import os
from collections.abc import Mapping

from . import _dispatch

# Without a workspace, cuBLAS and cuBLASLt have no memory for partial sums, so they cannot split K.
CANONICAL = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


def canonical_blas() -> dict[str, str]:
    """Makes the GEMMs of cuBLAS in this process sum in ascending order of K, as this library does.

    A trainer's ``torch.nn.Linear`` then gives a row the same bits at any batch size. On recorded shapes these bits
    equal the bits of :func:`linear`. Call this function before the first CUDA work of the process: torch reads the
    environment variables of this setting when it makes its cuBLAS handle and workspace. Clearing torch's workspaces
    later does not help, because torch reads cuBLASLt's variable only once. ``torch.use_deterministic_algorithms(True)``
    accepts only ``:4096:8`` and ``:16:8``, and refuses this setting. This setting is stricter, because cuBLAS still
    splits K under ``:16:8``.

    Without CUDA the call changes only the environment. The call replaces other values of its two variables, and
    processes that are started later inherit the new values.

    Returns: the variables that were set, names to values.
    Raises: RuntimeError if torch has initialised CUDA with other values, even if no GEMM ran yet, because torch does
        not say whether one ran. If the right values were set in ``os.environ`` after a GEMM, there is no error, because
        such values cannot be distinguished from values that were set before the GEMM.
    Source: docs/numerics.md, fact 1.
    """
    wrong = wrong_settings(os.environ)
    if wrong:
        torch = _dispatch.torch_module()
        if torch is not None and torch.cuda.is_initialized():
            raise RuntimeError(
                "canonical_blas: too late, torch has initialised CUDA and may hold cuBLAS workspaces already. Call it "
                f"before the first CUDA call, or start the process with {' '.join(wrong)}"
            )
        os.environ.update(CANONICAL)
    return dict(CANONICAL)


def wrong_settings(environment: Mapping[str, str]) -> list[str]:
    """``NAME=VALUE`` for each variable with a wrong value."""
    return [f"{name}={value}" for name, value in CANONICAL.items() if environment.get(name) != value]
