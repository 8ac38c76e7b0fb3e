"""rk.trace records which operators of a model ran, on which backend, by which kernel plans and how often. The counts
include replays of CUDA graphs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import _dispatch, contract
from ._native import functions

_C = functions(note_plans="bool", take_plans="")

# The recorded operators (a model's forward, log-probabilities, sampling and loss), each with its functions of the
# extension.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "attention": ("attention", "attention_eager"),
    "embedding": ("embedding", "embedding_eager"),
    "kv_cache_append": ("kv_cache_append", "kv_cache_append_eager"),
    "linear": ("linear", "linear_eager"),
    "linear_logprob": ("linear_logprob",),
    "logprob": ("logprob", "logprob_eager"),
    "policy_loss": ("policy_loss",),
    "rms_norm": ("rms_norm", "rms_norm_eager"),
    "rope": ("rope", "rope_eager"),
    "sample": ("sample",),
    "silu_mul": ("gated_mul", "gated_mul_eager"),
}

Calls = Counter[tuple[str, str, str]]  # (operator, backend, plan)


class Trace:
    """The record of :func:`trace`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Calls = Counter()
        self._graphs: dict[int, Calls] = {}  # calls of each CUDA graph, by its id
        self._captured: int | None = None  # the graph that is being captured

    def count(self, operator: str, backend: str, plan: str) -> None:
        with self._lock:
            calls = self._calls if self._captured is None else self._graphs[self._captured]
            calls[operator, backend, plan] += 1

    def begin_capture(self, graph: Any) -> None:
        self._captured = id(graph)
        self._graphs[id(graph)] = Counter()

    def end_capture(self) -> None:
        self._captured = None

    def replay(self, graph: Any) -> None:
        with self._lock:
            self._calls += self._graphs.get(id(graph), Counter())

    @property
    def calls(self) -> dict[str, dict[str, int]]:
        """Calls that ran, by operator and backend (``"cpu"``, ``"cuda sm_90"``, ``"rocm"``)."""
        found: dict[str, dict[str, int]] = {}
        for (operator, backend, _), count in sorted(self._calls.items()):
            of_operator = found.setdefault(operator, {})
            of_operator[backend] = of_operator.get(backend, 0) + count
        return found

    @property
    def plans(self) -> dict[str, dict[str, dict[str, int]]]:
        """Calls that ran, by operator, backend and kernel plan.

        A plan is a text that names how the library computed a call: a kernel and its tile on a GPU, an instruction set
        and the arithmetic of products on a CPU. If a call needs several kernels, the plan names all of them, joined by
        ``" + "``. A call without elements runs no kernel, and its plan is ``""``. All plans give the same bits.
        """
        found: dict[str, dict[str, dict[str, int]]] = {}
        for (operator, backend, plan), count in sorted(self._calls.items()):
            found.setdefault(operator, {}).setdefault(backend, {})[plan] = count
        return found

    def as_json(self) -> dict[str, Any]:
        """The calls, their plans, and the digest of the contract that they follow."""
        return {"contract": contract.digest(), "calls": self.calls, "plans": self.plans}


_active: Trace | None = None


@contextmanager
def trace() -> Iterator[Trace]:
    """Records which operators of a model run inside the context, on which backend, by which plans and how often.

    The trace records the forwards of ``attention``, ``embedding``, ``kv_cache_append``, ``linear``, ``linear_logprob``,
    ``logprob``, ``policy_loss``, ``rms_norm``, ``rope``, ``sample`` and ``silu_mul``, eager or inside a compiled
    function. Calls that a CUDA graph captures inside the context are counted at each replay. A trace observes the whole
    process, so only one trace can be open. A trace around a step of a trainer shows whether :func:`enable` is active.

    Yields: a :class:`Trace`, whose ``calls`` and ``plans`` grow with every call.
    Raises: RuntimeError inside another trace.
    Source: specific to this library; ``rlk align`` uses it to name the operators of engine and trainer.
    Example:
        >>> with rk.trace() as found:
        ...     y = rk.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)
        >>> found.calls
        {'rms_norm': {'cpu': 1}}
    """
    global _active
    if _active is not None:
        raise RuntimeError("trace: expected one at a time, got one inside of another")
    found = Trace()
    undo: list[Callable[[], None]] = []
    _active = found
    try:
        for operator, names in FUNCTIONS.items():
            for name in names:
                undo.append(_replace(_C, name, _counting(found, operator, getattr(_C, name))))
        undo += _follow_graphs(found)
        _C.note_plans(True)
        undo.append(lambda: _C.note_plans(False))
        yield found
    finally:
        for step in undo:
            step()
        _active = None


def _replace(owner: Any, name: str, replacement: Any) -> Callable[[], None]:
    own = getattr(owner, name)
    setattr(owner, name, replacement)
    return lambda: setattr(owner, name, own)


def _counting(found: Trace, operator: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        _C.take_plans()  # drops the plans of earlier calls
        result = own(*arguments)
        # A NotImplemented result is not counted, because the general path repeats and counts the call. A call in a
        # torch trace is not counted, because it runs no kernel.
        if result is not NotImplemented and not _is_described(arguments):
            found.count(operator, _backend(arguments), " + ".join(_C.take_plans()))
        return result

    return counted


def _backend(arguments: tuple[Any, ...]) -> str:
    tensor = _first_tensor(arguments)
    if tensor is None or not tensor.is_cuda:
        return "cpu"
    torch: Any = _dispatch.torch_module()
    if torch.version.hip:
        return "rocm"
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return f"cuda sm_{major}{minor}"


def _is_described(arguments: tuple[Any, ...]) -> bool:
    """Whether a call had tensors without memory, and therefore ran no kernel (_described.py)."""
    return any(
        _is_described(x) if isinstance(x, tuple) else isinstance(getattr(x, "layout", None), bytes) for x in arguments
    )


def _first_tensor(arguments: tuple[Any, ...]) -> Any:
    """The first tensor. Tuples are searched too, because attention passes its arrays in tuples."""
    for argument in arguments:
        found = _first_tensor(argument) if isinstance(argument, tuple) else argument
        if _dispatch.is_tensor(found):
            return found
    return None


def _follow_graphs(found: Trace) -> list[Callable[[], None]]:
    torch = _dispatch.torch_module()
    if torch is None:
        return []
    kind: Any = torch.cuda.CUDAGraph
    begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.begin_capture(self)
        return begin(self, *args, **kwargs)

    def capture_end(self: Any) -> Any:
        found.end_capture()
        return end(self)

    def replay_it(self: Any) -> Any:
        found.replay(self)
        return replay(self)

    pairs = (("capture_begin", capture_begin), ("capture_end", capture_end), ("replay", replay_it))
    return [_replace(kind, name, function) for name, function in pairs]
