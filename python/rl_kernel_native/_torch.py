"""What calls with torch tensors need: whether a call may skip the dispatcher, on which device a tensor is, and how a
registered operator's autograd Function is applied."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _in_graph
from ._dispatch import unwrapped
from ._native import module as _C

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the index is the extension's number for the dtype
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

PLAIN = (Tensor, torch.nn.Parameter)
functorch_active = torch._C._are_functorch_transforms_active
_modes_active = torch._C._len_torch_dispatch_stack
_is_jit_tracing = torch._C._is_tracing
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
is_compiling = torch.compiler.is_compiling
is_read_by_dynamo = torch.compiler.is_dynamo_compiling
is_grad_enabled = torch.is_grad_enabled
is_autocasting = torch._C._is_any_autocast_enabled
_num_threads = torch.get_num_threads

_GPU = "rocm" if torch.version.hip else "cuda"


def is_direct(*tensors: Any) -> bool:
    """Whether a call may skip the dispatcher: nothing traces or transforms the call, and memory holds the tensors'
    numbers. The extension checks this, because checks in Python would take as long as the call. The extension refuses
    values that are not tensors."""
    return not is_read_by_dynamo() and _C.wanted_gradients(tensors) >= 0


def is_direct_gradient(dy: Tensor) -> bool:
    """Whether a backward may skip the dispatcher. The gradients are checked again, because a gradient may be another
    kind of tensor than the forward's inputs."""
    return not is_read_by_dynamo() and _C.is_direct_gradient(dy)


def wants_grad(*tensors: Any) -> bool:
    if is_grad_enabled():
        for t in tensors:
            if t is not None and isinstance(t, Tensor) and t.requires_grad:
                return True
    return False


def lost_derivative(tensor: Any) -> str | None:
    """Says which derivative of ``tensor`` an operator without derivatives would lose; None if none would be lost.

    A trace does not show tangents. Under torch.func.grad, only a view of the argument shows that it needs a
    gradient."""
    if not isinstance(tensor, Tensor):
        return None
    if wants_grad(tensor.view_as(tensor) if is_compiling() and is_grad_enabled() else tensor):
        return "requires a gradient"
    if is_compiling() or forward_ad._current_level < 0 or forward_ad.unpack_dual(tensor).tangent is None:
        return None
    return "has a tangent"


class Eager(torch.autograd.Function):
    """A Function for calls that :func:`is_direct` allows. The Function's ``run`` is ``apply`` without the checks for
    torch.func, which are already done. These checks would take a third of an empty Function's time."""

    run: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        base: Any = super(torch.autograd.Function, cls)
        cls.run = base.apply


def is_batched(tensor: Tensor) -> bool:
    return functorch_active() or _is_legacy_batched(tensor)


def apply_function(operator: Any, name: str, *arguments: Any, more: tuple[Any, ...] = ()) -> Any:
    """Applies the autograd Function that :mod:`_in_graph` knows as ``name``. Under Dynamo, the registered operator goes
    into the graph, and its derivative is again this Function. ``more`` holds the arguments that only the Function
    takes."""
    if not is_read_by_dynamo():
        return _in_graph.apply(name, *arguments, *more)
    if operator is None or functorch_active() or forward_ad._current_level >= 0 or torch.compiler.is_exporting():
        return _in_graph.in_graph(name, *arguments, *more)
    return operator(*arguments)


def autocast(*operands: Any) -> tuple[Any, ...]:
    """Casts the operands of a matrix product as torch.autocast does for torch's own products. The first operand decides
    the device. Values that are not tensors, or have other dtypes, pass unchanged.
    """
    first = operands[0]
    kind = first.device.type if isinstance(first, Tensor) else ""
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return operands
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in DTYPES else x for x in operands)


def autocast_hint() -> str:
    """The end of an error about different dtypes, for operators other than matrix products."""
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return "; autocast is not followed: cast the operands yourself"
    return ""


def require_tensors(*, cures: Any = None, optional: dict[str, Any] | None = None, **required: Any) -> None:
    """Refuses arguments that are no valid tensors, before a call through the dispatcher. The dispatcher's own errors
    would only name schemas. The first argument decides the device. ``cures``: see :class:`_operator.Operator`."""
    if not is_compiling() and _is_jit_tracing():
        raise RuntimeError("torch.jit.trace is not supported; use torch.export or torch.compile")
    first, cures = next(iter(required.values())), cures or {}
    for name, tensor in (*required.items(), *(optional or {}).items()):
        if tensor is None and name not in required:
            continue
        cure = "" if tensor is None else cures.get("DTensor" if type(tensor).__name__ == "DTensor" else name, "")
        if type(tensor).__name__ == "DTensor":
            raise TypeError(f"{name}: expected a local tensor, got a DTensor; pass tensor.to_local(){cure}")
        if not isinstance(tensor, Tensor):
            # A call of any framework may pass None, so the error about None is the extension's.
            wanted = "an array that speaks DLPack" if tensor is None else "a torch.Tensor"
            raise TypeError(f"{name}: expected {wanted}, got {type(tensor).__name__}{cure}")
        require_dense(tensor, name)
        if type(tensor).__name__ == "FakeTensor" != type(first).__name__ and not _modes_active():
            raise TypeError(f"{name}: expected a tensor with memory, as the others are, got a FakeTensor")
        if tensor.device != first.device:
            raise ValueError(f"{name}: expected device {first.device}, got {tensor.device}")


def require_dense(tensor: Tensor, name: str) -> None:
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        of_layout = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        kind = "nested" if tensor.is_nested else of_layout
        raise TypeError(f"{name}: expected a dense tensor, got a {kind} one")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def memory(x: Any) -> Any:
    """An operand for a kernel: the tensor with its numbers in memory. Any other value is returned unchanged."""
    return x.resolve_neg().detach() if isinstance(x, Tensor) else x


def readable(tensor: Tensor, dims: int | None = 3) -> Tensor:
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if dims is None or tensor.is_contiguous():
        return tensor
    if tensor.dim() <= dims and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1):
        return tensor
    return tensor.contiguous()


def with_memory(tensor: Tensor) -> Tensor:
    """A tangent of forward mode, in memory. If one factor of a product has no tangent, torch makes zeros without memory
    (a ZeroTensor). A kernel would get such zeros as one expanded element, so they are copied."""
    return tensor.clone() if unwrapped(tensor)._is_zerotensor() else tensor


def gradient(dy: Tensor, dtype: torch.dtype, name: str = "dy", dims: int | None = 3) -> Tensor:
    """A gradient as an operand: rounded to ``dtype``, and copied if kernels cannot read its strides. Kernels read up to
    ``dims`` dimensions with any strides, if the last dimension is contiguous."""
    if is_compiling():  # a trace may not read strides in a backward; a contiguous tensor is unchanged
        return dy.to(dtype).contiguous()
    if dy.layout is not torch.strided:
        require_dense(dy, name)
    return readable(dy if dy.dtype is dtype else dy.to(dtype), dims)


def device_type(tensor: Tensor, name: str) -> str:
    """The backend's name for a tensor's device; a meta tensor counts as a CPU's."""
    if tensor.is_cuda:
        return _GPU
    if not tensor.is_cpu and not tensor.is_meta:
        raise TypeError(f"{name}: expected a tensor on a CPU, CUDA or ROCm device, got {tensor.device}")
    return "cpu"


def prepare(tensor: Tensor) -> None:
    """Prepares a native call: on the CPU, it sets as many threads as torch uses."""
    if not tensor.is_cuda:
        _C.set_num_threads(_num_threads())


_PREDICATES = (functorch_active, _modes_active, _is_jit_tracing, torch._C._is_torch_function_mode_enabled)
_MORE_PREDICATES = (torch._C._autograd._profiler_enabled, is_autocasting, is_grad_enabled, _is_wrapped)
_TYPES = (*PLAIN, torch.dtype, Tensor.__torch_dispatch__)
_NAMES = ("requires_grad", "is_cuda", "is_meta", "_is_compiling_flag", "_current_level", "__torch_dispatch__")
_DICTS = (vars(torch.compiler), vars(forward_ad))
_C.set_torch(
    (*_PREDICATES, *_MORE_PREDICATES, _is_legacy_batched, autocast_hint, *_TYPES, *_DICTS, *_NAMES),
    torch._C._disabled_torch_function_impl,
)
