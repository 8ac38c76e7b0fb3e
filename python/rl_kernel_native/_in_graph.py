"""autograd Functions that torch.compile puts into its graph without tracing them. torch.func then finds their rules at
run time.

Dynamo traces a Function's forward as if no transform surrounded it. Under torch.func.grad inside of a compiled function
the Function's gradient would be zero. :data:`in_graph`, a call by name, goes into the graph as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from ._transforms import in_batches

_functions: dict[str, Any] = {}

in_graph: Any


def callable_in_graph(function: Any, batch: Any = None) -> Any:
    """Class decorator: an autograd Function that :data:`in_graph` calls by the name of its class. A Function without a
    vmap rule gets :func:`in_batches`."""
    if function.vmap is torch.autograd.Function.vmap:
        function.vmap = staticmethod(in_batches(function.apply, batch))
    if function.__name__ in _functions:
        raise ValueError(f"two autograd Functions are called {function.__name__}")
    _functions[function.__name__] = function
    return function


def apply(name: str, *arguments: Any) -> Any:
    return _functions[name].apply(*arguments)


def __getattr__(name: str) -> Any:
    """Makes ``in_graph`` when Dynamo first looks for it. Making it earlier would load Dynamo, which adds 1.4 s to every
    import."""
    if name != "in_graph":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = torch.compiler.allow_in_graph(apply)
    return globals()[name]
