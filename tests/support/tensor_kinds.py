"""Kinds of tensors that are not plain memory."""

from __future__ import annotations

from typing import Any

import torch


class Wrapper(torch.Tensor):
    """A subclass without memory of its own, like the subclasses of FSDP and quantisation."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{cls.__name__} does not do {func}")


DTensor = type("DTensor", (Wrapper,), {})  # like torch.distributed's; torch code recognises the class by name


def fake(tensor: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)
