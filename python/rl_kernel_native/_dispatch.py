"""Moves arrays of any framework to and from the extension.

torch tensors are passed directly. The extension reads torch tensors through the DLPack C exchange API, on torch's
current stream, and allocates from torch. Every other array is passed as a DLPack capsule, requested with an explicit
stream. The call's outputs are allocated here, in the caller's framework.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import _check, _cures
from ._native import module as _C

_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "rocm", 11: "cpu"}
_DEFAULT_STREAM = {"cuda": 1, "rocm": 0}  # DLPack's numbers: CUDA's default stream is not 0


_DTYPE_CODES: dict[Any, int] = {"float32": 0, "bfloat16": 1, "float16": 2}  # as `DType` in C++


def dtype_code(dtype: Any, name: str) -> int:
    """The extension's number for float32, bfloat16 or float16. ``dtype`` is any framework's dtype, or a name."""
    try:
        return _DTYPE_CODES[dtype]
    except (KeyError, TypeError):
        pass
    text = ""
    if isinstance(dtype, str):
        text = dtype
    elif type(dtype).__module__ == "torch":
        text = str(dtype).removeprefix("torch.")
    elif isinstance(dtype, (np.dtype, type)):  # a dtype of NumPy, ml_dtypes or JAX
        with contextlib.suppress(TypeError, ValueError):
            found = np.dtype(dtype)
            text = found.name if found.isnative else ""
    if text not in ("float32", "bfloat16", "float16"):
        raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {_check.shown(dtype)}")
    _DTYPE_CODES[dtype] = _DTYPE_CODES[text]
    return _DTYPE_CODES[dtype]


_torch_at_import = sys.modules.get("torch")


SAME = -1  # the number that means: the dtype of another operand


def code_or_same(dtype: Any, name: str) -> int:
    """The extension's number for a dtype. For None, the number ``SAME``."""
    return SAME if dtype is None else dtype_code(dtype, name)


def option_code(dtype: Any, name: str) -> int:
    """The result of :func:`code_or_same`. An option that is already the extension's number is returned unchanged."""
    return dtype if type(dtype) is int else code_or_same(dtype, name)


def _is_torch_loaded() -> bool:
    return "torch" in sys.modules


# Sets the attribute that torch.compiler.assume_constant_result sets, without importing torch. Otherwise a trace of the
# function above would wrap every module of the process. Such a trace would fail on lazy modules that import others when
# they are inspected, as in execnet and apipkg.
_is_torch_loaded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def torch_module() -> Any | None:
    """torch, if this process has loaded it."""
    if _torch_at_import is not None:
        return _torch_at_import
    if not _is_torch_loaded():
        return None
    import torch

    return torch


def is_tensor(array: Any) -> bool:
    torch = torch_module()
    return torch is not None and isinstance(array, torch.Tensor)


def is_compiling() -> bool:
    """Whether torch.compile or torch.export is tracing this code. The result is not cached, because a trace ignores
    Python's caches and warns about them."""
    torch = torch_module()
    return torch is not None and bool(torch.compiler.is_compiling())


_check.is_compiling = is_compiling


def require_torch() -> None:
    """Requires a torch that the extension can read. Must run before the first torch tensor is passed to the
    extension."""
    torch: Any = torch_module()
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        raise RuntimeError(f"torch tensors need torch 2.10 or later, this is {torch.__version__}")


def match_torch_threads() -> None:
    """Gives the CPU backend as many threads as torch uses, if torch is loaded."""
    torch = torch_module()
    if torch is not None:
        _C.set_num_threads(torch.get_num_threads())


def follow_omp_num_threads() -> None:
    """Uses the first number of OMP_NUM_THREADS, as torch does. Other forms of the variable are ignored here; OpenMP may
    still read them."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if first.isdecimal() and int(first) > 0:
        _C.set_num_threads(min(int(first), 1 << 30))


def count_write(array: Any) -> None:
    """Tells torch's autograd that a tensor's values changed, also if the call's other arrays are not torch's. A
    backward that saved the tensor then refuses to run."""
    if is_tensor(array) and not array.is_inference():
        torch: Any = torch_module()
        torch.autograd.graph.increment_version(array)


_NUMPY_1 = np.__version__.startswith("1.")  # capsules of NumPy 1 do not say that an array is read-only


def true_places(flags: Any, option: str) -> Any:
    """The indices of the true flags of a vector. ``option`` asks to read the flags, so they must have values."""
    if is_tensor(flags) and not is_compiling() and _has_no_values(unwrapped(flags, _has_no_values)):
        raise ValueError(
            f"{option}: expected tensors whose values can be read, got a batch of torch.func.vmap, or no memory"
        )
    found = flags.nonzero()
    return found[0] if isinstance(found, tuple) else found.reshape(-1)


def unwrapped(tensor: Any, stops: Callable[[Any], bool] = lambda tensor: False) -> Any:
    """The tensor inside the wrappers of torch.func: the innermost tensor, or the outermost one for which ``stops`` is
    true."""
    functorch = torch_module()._C._functorch  # type: ignore[union-attr]
    while not stops(tensor) and functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _has_no_values(tensor: Any) -> bool:
    is_batch: bool = torch_module()._C._functorch.is_batchedtensor(tensor)  # type: ignore[union-attr]
    return is_batch or tensor.is_meta or type(tensor).__name__ == "FakeTensor"


def is_array(x: Any) -> bool:
    return hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__") and not isinstance(x, type)


def namespace(array: Any, name: str) -> Any:
    """The namespace with the functions of an array's framework, for frameworks except torch."""
    if isinstance(array, np.ndarray):
        return np
    require_array(array, name)
    if not hasattr(array, "__array_namespace__"):
        raise TypeError(
            f"{name}: expected an array of a framework with __array_namespace__, as NumPy, JAX and CuPy have, got "
            f"{type(array).__name__}"
        )
    return array.__array_namespace__()


def require_array(array: Any, name: str) -> None:
    """Refuses values that cannot be passed as a capsule: values that are not arrays, and arrays whose memory does not
    hold plain numbers."""
    kind, module = type(array).__name__, type(array).__module__
    jax = sys.modules.get("jax.core")
    if isinstance(array, getattr(jax, "Tracer", ())):
        raise TypeError(
            f"{name}: expected an array that speaks DLPack, got {kind}; inside JAX's transformations (jit, grad, "
            "vmap) call rl_kernel_native.jax, which has logprob, linear, linear_logprob, rms_norm and policy_loss; "
            "call other operators outside of them, or in jit through jax.pure_callback"
        )
    if module == "torch.fx.proxy":
        raise TypeError(f"{name}: torch.fx.symbolic_trace is not supported; use torch.export")
    if not is_array(array):
        raise _cures.type_error(name, array, _cures.NO_ARRAY + kind)
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask, got {kind}; pass array.filled(value)")
    if isinstance(array, np.ndarray) and not _is_numeric(array.dtype):
        raise TypeError(f"{name}: expected a dtype of numbers in native byte order, got {array.dtype!r}")
    if is_tensor(array) and array.requires_grad:
        raise TypeError(
            f"{name}: requires a gradient, and the first argument is not torch's, so none would come; pass "
            f"{name}.detach()"
        )


def _is_numeric(dtype: np.dtype) -> bool:
    return dtype.isnative and (dtype.kind in "biufc" or dtype.name == "bfloat16")  # bfloat16 has kind V


def _place(array: Any, name: str) -> tuple[int, int]:
    """DLPack's device type and index."""
    try:
        kind, index = array.__dlpack_device__()
        return int(kind), int(index)
    except Exception as error:  # for example from a deleted JAX array
        raise _refused(array, name, error) from error


def _refused(array: Any, name: str, error: Exception) -> Exception:
    kind = BufferError if isinstance(error, BufferError) else TypeError
    reason = str(error).partition("\n")[0]
    return kind(f"{name}: expected an array in memory, got {type(array).__name__}, whose export fails: {reason}")


def device_type(array: Any, name: str) -> str:
    """``"cpu"``, ``"cuda"`` or ``"rocm"`` for an array that supports DLPack."""
    require_array(array, name)
    kind, _ = _place(array, name)
    if kind not in _DLPACK_DEVICES:
        raise TypeError(f"{name}: expected an array on a CPU, CUDA or ROCm device, got DLPack device type {kind}")
    return _DLPACK_DEVICES[kind]


class Frame:
    """The state of one call from a framework other than torch: its arrays as capsules, its stream, and its allocation
    of outputs."""

    wanted = 0  # bits of the wanted gradients: only torch asks for gradients

    def __init__(self, array: Any, name: str) -> None:
        self.device = device_type(array, name)
        self._index = _place(array, name)[1]
        self._owner = array
        self._kind = type(array).__module__.split(".")[0]
        self.stream = self._current_stream()

    def _current_stream(self) -> int:
        if self.device == "cpu":
            return 0
        if self._kind == "cupy":
            with self._on_device():
                return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
        return 0  # the legacy default stream; JAX and others complete an export before later work on this stream

    def _on_device(self) -> Any:
        """A context with the call's device as CuPy's current device, on which CuPy allocates and finds its current
        stream."""
        return _cupy(self.device).cuda.Device(self._index)

    def export(self, array: Any, name: str) -> Any:
        """A DLPack capsule of ``array``. Numbers and None are returned unchanged."""
        if array is None or isinstance(array, (int, float, np.number)):
            return array
        require_array(array, name)
        if isinstance(array, np.ndarray):
            try:
                return _numpy_capsule(array)
            except (BufferError, TypeError) as error:  # for example for longdouble
                raise _refused(array, name, error) from error
        if is_tensor(array) and array.is_neg():
            array = array.resolve_neg()  # the memory holds the negated numbers
        stream = None if self.device == "cpu" else (self.stream or _DEFAULT_STREAM[self.device])
        if _DLPACK_DEVICES.get(_place(array, name)[0]) == "cpu":
            stream = None
        try:
            try:
                capsule = array.__dlpack__(stream=stream, max_version=(1, 3))
            except TypeError:  # exporters older than DLPack 1.0 do not know max_version
                capsule = array.__dlpack__(stream=stream) if stream is not None else array.__dlpack__()
        except Exception as error:
            raise _refused(array, name, error) from error
        if capsule is None:
            raise TypeError(f"{name}: expected a DLPack capsule of {type(array).__name__}.__dlpack__, got NoneType")
        return capsule

    def exports(self, arrays: tuple[Any, ...], names: Sequence[str], written: bool = False) -> tuple[Any, ...]:
        return tuple(map(self.export_output if written else self.export, arrays, names))

    def export_array(self, array: Any, name: str) -> Any:
        """Like :meth:`export`, but refuses a number."""
        if isinstance(array, (int, float, np.number)):
            raise _cures.type_error(name, array, _cures.NO_ARRAY + type(array).__name__)
        return self.export(array, name)

    def export_output(self, array: Any, name: str) -> Any:
        """Like :meth:`export`, for an array that the call writes."""
        if is_tensor(array) and array.is_neg():
            raise ValueError(f"{name}: has torch's negative bit; call .resolve_neg()")
        if _NUMPY_1 and isinstance(array, np.ndarray) and not array.flags.writeable:
            raise BufferError(f"{name}: is read-only")
        return self.export(array, name)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
        """An output for the extension to fill: (array, capsule)."""
        if self.device == "cpu":
            array: Any = np.empty(shape, dtype=_numpy_dtype(dtype))
            return array, _numpy_capsule(array)
        with self._on_device():
            array = _cupy(self.device).empty(shape, dtype=_numpy_dtype(dtype))
        return array, array.__dlpack__(stream=self.stream or _DEFAULT_STREAM[self.device])

    def result(self, array: Any) -> Any:
        """Converts an output of :meth:`allocate` to the framework of the call's own arrays."""
        if array is None or isinstance(array, type(self._owner)):
            return array
        if self._kind in ("jax", "jaxlib"):
            jax = sys.modules["jax"]
            if self.device != "cpu":
                with self._on_device():
                    _cupy(self.device).cuda.Stream(null=True).synchronize()  # JAX continues on other streams
            if not isinstance(array, np.ndarray):
                return jax.dlpack.from_dlpack(array)
            made, devices = jax.numpy.asarray(array), self._owner.devices()
            return made if made.devices() == devices else jax.device_put(array, next(iter(devices)))
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
            f"results for a {device} array of a framework other than torch are CuPy's, which is missing: "
            f"install {wheel}"
        ) from error
    return cupy


def _numpy_dtype(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise RuntimeError(
            "out_dtype: a bfloat16 result for NumPy needs the package ml_dtypes, which is missing: pip install "
            "ml_dtypes, or ask for float32"
        ) from error
    return np.dtype(ml_dtypes.bfloat16)


def _numpy_capsule(array: np.ndarray) -> Any:
    """A NumPy array's capsule. NumPy cannot export ml_dtypes.bfloat16, so its bits are exported and the capsule gets
    DLPack's code for bfloat16."""
    if array.dtype.name == "bfloat16":
        return _C.bfloat16_capsule(_plain_capsule(array.view(np.uint16)))
    return _plain_capsule(array)


def _plain_capsule(array: np.ndarray) -> Any:
    try:
        return array.__dlpack__(max_version=(1, 3))
    except TypeError:  # NumPy 1 has no versioned capsules
        pass
    if not array.flags.writeable:  # NumPy does not export read-only arrays
        array = np.asarray(_Writable(array))
    if array.dtype.kind == "b":  # NumPy before 1.25 does not export booleans
        return _C.bool_capsule(array.view(np.uint8).__dlpack__())
    return array.__dlpack__()


class _Writable:
    """The memory of a read-only array in a form that NumPy 1 exports. The object keeps the array alive, and the call
    only reads the memory."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
