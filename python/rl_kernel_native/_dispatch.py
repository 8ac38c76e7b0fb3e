"""Arrays of any framework to and from the extension.

torch tensors go as they are: the extension reads them through the DLPack C exchange API, on torch's current stream, and
allocates from torch. Every other array goes as a DLPack capsule that is asked for with an explicit stream, and outputs
are made here, in the caller's framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ._native import module as _C

_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "rocm", 11: "cpu"}
_DEFAULT_STREAM = {"cuda": 1, "rocm": 0}  # in DLPack's numbering, where CUDA's is not 0


def torch_module() -> Any | None:
    """torch if this process has loaded it."""
    return sys.modules.get("torch")


def match_torch_threads() -> None:
    """The CPU backend uses as many threads as torch does, where torch is loaded."""
    torch = torch_module()
    if torch is not None:
        n = torch.get_num_threads()
        if n != _C.num_threads():
            _C.set_num_threads(n)


def is_array(x: Any) -> bool:
    return hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")


def device_type(array: Any, name: str) -> str:
    """``"cpu"``, ``"cuda"`` or ``"rocm"`` of an array that speaks DLPack."""
    if not is_array(array):
        raise TypeError(f"{name}: expected an array that speaks DLPack, got {type(array).__name__}")
    kind = int(array.__dlpack_device__()[0])
    if kind not in _DLPACK_DEVICES:
        raise TypeError(f"{name}: expected an array on a CPU, CUDA or ROCm device, got DLPack device type {kind}")
    return _DLPACK_DEVICES[kind]


class Frame:
    """One call of a framework other than torch: its arrays as capsules, its stream, its way to make outputs."""

    def __init__(self, array: Any, name: str) -> None:
        self.device = device_type(array, name)
        self._index = int(array.__dlpack_device__()[1])
        self._owner = array
        self._kind = type(array).__module__.split(".")[0]
        self.stream = self._current_stream()

    def _current_stream(self) -> int:
        if self.device == "cpu":
            return 0
        if self._kind == "cupy":
            with self._on_device():
                return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
        return 0  # the legacy default stream: JAX and others order their exports before it

    def _on_device(self) -> Any:
        """CuPy's current device decides where it allocates and whose stream is current."""
        return _cupy(self.device).cuda.Device(self._index)

    def export(self, array: Any, name: str) -> Any:
        """A DLPack capsule of ``array``; numbers and None pass through."""
        if array is None or isinstance(array, (int, float, np.number)):
            return array
        if not is_array(array):
            raise TypeError(f"{name}: expected an array that speaks DLPack, got {type(array).__name__}")
        stream = None if self.device == "cpu" else (self.stream or _DEFAULT_STREAM[self.device])
        kind = int(array.__dlpack_device__()[0])
        if _DLPACK_DEVICES.get(kind) == "cpu":
            stream = None
        if isinstance(array, np.ndarray):
            return _numpy_capsule(array)
        try:
            return array.__dlpack__(stream=stream, max_version=(1, 3))
        except TypeError:  # exporters older than DLPack 1.0 do not know max_version
            return array.__dlpack__(stream=stream) if stream is not None else array.__dlpack__()

    def allocate(self, shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
        """An output for the extension to fill: (array, capsule)."""
        if self.device == "cpu":
            array: Any = np.empty(shape, dtype=_numpy_dtype(dtype))
            return array, _numpy_capsule(array)
        with self._on_device():
            array = _cupy(self.device).empty(shape, dtype=_numpy_dtype(dtype))
        return array, array.__dlpack__(stream=self.stream or _DEFAULT_STREAM[self.device])

    def result(self, array: Any) -> Any:
        """An output of :meth:`allocate` in the framework of the call's own arrays."""
        if array is None or isinstance(array, type(self._owner)):
            return array
        if self._kind in ("jax", "jaxlib"):
            jax = sys.modules["jax"]
            if self.device != "cpu":
                with self._on_device():
                    _cupy(self.device).cuda.Stream(null=True).synchronize()  # JAX takes over on streams of its own
            if isinstance(array, np.ndarray):
                return jax.numpy.asarray(array)
            return jax.dlpack.from_dlpack(array)
        namespace: Callable[[], Any] | None = getattr(self._owner, "__array_namespace__", None)
        if namespace is not None and hasattr(namespace(), "from_dlpack"):
            return namespace().from_dlpack(array)
        return array


def _cupy(device: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        wheel = "a ROCm build of CuPy" if device == "rocm" else "cupy-cuda12x or cupy-cuda13x"
        raise RuntimeError(
            f"logits: results for a {device} array of a framework other than torch are CuPy's, which is missing: "
            f"install {wheel}"
        ) from error
    return cupy


def _numpy_dtype(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes  # NumPy has no bfloat16 of its own; whoever passed one has this package

    return np.dtype(ml_dtypes.bfloat16)


def _numpy_capsule(array: np.ndarray) -> Any:
    """NumPy's capsule. ml_dtypes.bfloat16, which NumPy cannot export, goes under DLPack's own code for it."""
    if array.dtype.name == "bfloat16":
        return _C.bfloat16_capsule(_plain_capsule(array.view(np.uint16)))
    return _plain_capsule(array)


def _plain_capsule(array: np.ndarray) -> Any:
    try:
        return array.__dlpack__(max_version=(1, 3))
    except TypeError:  # NumPy 1: no versioned capsules, and read-only arrays are refused
        return array.__dlpack__()
