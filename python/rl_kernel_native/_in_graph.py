"""autograd Functions that torch.compile puts into its graph without tracing them, so that torch.func finds their rules
at run time.

Dynamo traces a Function's forward as if no transform surrounded it. Under torch.func.grad inside a compiled function,
the Function's gradient would therefore be zero. :data:`in_graph`, which calls a Function by name, is put into the graph
untraced.
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
    """Makes ``in_graph`` when Dynamo first looks for it. If ``in_graph`` were made at import, every import would load
    Dynamo, which takes 1.4 s."""
    if name != "in_graph":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = torch.compiler.allow_in_graph(apply)
    return globals()[name]
