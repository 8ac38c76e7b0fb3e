"""A pytest plugin for test_hip.py on hip/emulation/isa. The plugin puts arrays between pages that fault; only kernels
may access them.

``pytest -p hip_guarded_arrays`` puts arrays directly before such a page; ``RLK_ISA_GUARD=before`` puts them after such
a page. Outputs hold NaN at first.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from typing import Any

import torch

PAGE = 4096
READ_AND_WRITE, PRIVATE_AND_ANONYMOUS = 3, 0x22
BEFORE = os.environ.get("RLK_ISA_GUARD", "after") == "before"

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
hip = ctypes.CDLL("libamdhip64.so.6")
hip.rlk_isa_register.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
hip.rlk_isa_forget.argtypes = (ctypes.c_uint64,)

copies: list[tuple[Any, Any, int, int]] = []  # (tensor, its copy between pages, end of the copy, end of the page)


def release(base: int, size: int) -> None:
    hip.rlk_isa_forget(base + PAGE)
    libc.munmap(base, size)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same bytes, strides and address modulo 16, between two pages that fault."""
    if tensor.numel() == 0:
        return tensor
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size, offset = (last + 1) * tensor.element_size(), tensor.data_ptr() % 16
    pages = -(-(size + 32) // PAGE) * PAGE
    base = libc.mmap(None, pages + 2 * PAGE, READ_AND_WRITE, PRIVATE_AND_ANONYMOUS, -1, 0)
    for page in (base, base + PAGE + pages):
        libc.mprotect(page, PAGE, 0)
    ctypes.memset(base + PAGE, 0xFF, pages)
    end = base + PAGE + pages
    at = base + PAGE + offset if BEFORE else end - size - (end - size - offset) % 16
    ctypes.memmove(at, tensor.data_ptr(), size)
    buffer = (ctypes.c_char * size).from_address(at)
    hip.rlk_isa_register(base + PAGE, pages)
    weakref.finalize(buffer, release, base, pages + 2 * PAGE)
    found = torch.frombuffer(buffer, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)
    found._keeps = buffer  # type: ignore[attr-defined]
    copies.append((weakref.ref(tensor), weakref.ref(found), at + size, end))
    return found


def fetch() -> None:
    """Copies the kernels' results back to the tests' tensors."""
    for given, copy, at, end in copies:
        tensor, found = given(), copy()
        if tensor is None or found is None:
            continue
        behind = ctypes.string_at(at, end - at)
        assert behind == b"\xff" * len(behind), "written beyond the end of an array"
        if not any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
            tensor.copy_(found)
    copies[:] = [c for c in copies if c[0]() is not None and c[1]() is not None]


def closed_to_the_host(function: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        hip.rlk_isa_close(1)
        try:
            return function(*args, **options)
        finally:
            hip.rlk_isa_close(0)

    return call


def with_garbage(host_cupy: Any) -> Any:
    """Fills the memory of outputs with set bits: NaN, -1."""

    def cupy(device: str) -> Any:
        found = host_cupy(device)
        plain = found.empty

        def empty(shape: Any, dtype: Any) -> Any:
            array = plain(shape, dtype)
            ctypes.memset(array.tensor.data_ptr(), 0xFF, array.tensor.nbytes)
            return array

        found.empty = empty
        return found

    return cupy


def pytest_collection_modifyitems() -> None:
    test_hip, cases = sys.modules["test_hip"], sys.modules["cases"]
    test_hip.host_cupy = with_garbage(test_hip.host_cupy)
    plain = test_hip.RocmArray.__init__

    def initialize(self: Any, tensor: Any) -> None:
        plain(self, guarded(tensor))
        self.original = tensor

    test_hip.RocmArray.__init__ = initialize
    for name in dir(test_hip.native):
        function = getattr(test_hip.native, name)
        if not name.startswith("_") and type(function).__name__ == "nb_func":
            setattr(test_hip.native, name, closed_to_the_host(function))
    for module in (test_hip, test_hip.fuzz, cases):
        differing = getattr(module, "differing", None)
        if differing is None:
            continue

        def fetched(*args: Any, differing: Any = differing) -> Any:
            fetch()
            return differing(*args)

        module.differing = fetched
