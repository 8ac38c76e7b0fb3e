"""A hand-made DLPack exporter with which a test can claim anything about an array, true or not."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6
CPU, CUDA, CUDA_HOST, METAL, ROCM, ROCM_HOST = 1, 2, 3, 8, 10, 11
READ_ONLY = 1


class Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", Deleter))


class Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("version", Version),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

_alive: list[Any] = []  # a capsule points into these until its deleter has run; tests make few


class Exporter:
    """Exports ``array``'s memory by DLPack, with any field of its description replaced.

    ``deleted`` counts the calls of the capsules' deleter: 1 for each capsule that was consumed and released.
    """

    def __init__(self, array: np.ndarray, **fields: Any) -> None:
        self.array = array
        self.fields = fields
        self.deleted = 0
        self.exported = 0
        self.arguments: dict[str, Any] = {}

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.fields.get("device", CPU), self.fields.get("index", 0)

    def __dlpack__(self, **arguments: Any) -> Any:
        self.arguments = arguments
        self.exported += 1
        return self.capsule()

    def capsule(self) -> Any:
        a, f = self.array, self.fields
        shape = f.get("shape", a.shape)
        strides = f.get("strides", tuple(s // a.itemsize for s in a.strides))
        code = {"f": FLOAT, "i": INT, "u": UINT, "c": COMPLEX, "b": BOOL}.get(a.dtype.kind, FLOAT)
        dims = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        steps = None if strides is None else (ctypes.c_int64 * max(len(strides), 1))(*strides)
        tensor = Tensor(
            f.get("data", a.ctypes.data),
            Device(f.get("device", CPU), f.get("index", 0)),
            f.get("ndim", len(shape)),
            DataType(f.get("code", code), f.get("bits", a.itemsize * 8), f.get("lanes", 1)),
            dims,
            steps,
            f.get("byte_offset", 0),
        )

        def delete(_: int) -> None:
            self.deleted += 1

        deleter = Deleter(delete)
        if f.get("versioned", True):
            managed: Any = ManagedVersioned(
                Version(*f.get("version", (1, 0))), None, deleter, f.get("flags", 0), tensor
            )
            name = b"dltensor_versioned"
        else:
            managed = Managed(tensor, None, deleter)
            name = b"dltensor"
        name = f.get("name", name)
        _alive.append((a, dims, steps, deleter, managed, name))
        return _new_capsule(ctypes.addressof(managed), name, None)


class SameCapsule:
    """Returns the same capsule every time, which an exporter must not do."""

    def __init__(self, array: np.ndarray) -> None:
        self.exporter = Exporter(array)
        self.kept = self.exporter.capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, **_: Any) -> Any:
        return self.kept


class OldExporter:
    """An exporter from before DLPack 1.0: no max_version, and a capsule without version or flags."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, stream: Any = None) -> Any:
        return Exporter(self.array, versioned=False).capsule()
