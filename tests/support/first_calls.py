"""Measures each operator's first calls in this process: `python tests/support/first_calls.py --device cuda`.

Prints one line of JSON per call. The time covers one call, or one call and its backward, and the wait for the device.
Before the first call, the context exists and all operands are on the device. A call of `kl` and its backward have
already loaded the module, autograd's engine and torch's imports for a first gradient.
The remaining time is the cost of an operator's own kernels at first use: their code is loaded, or compiled if the build
lacks code for the device. With CUDA_CACHE_DISABLE=1 the driver remembers no compilation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import rl_kernel_native as rk
from call_cases import CALLS, FLOATS, OPERATORS, Draw, Operand

REFUSED = (TypeError, ValueError, RuntimeError)
CPU_ALONE = "float32 products are the CPU's alone"  # a GPU refuses such a call, which compiles nothing


def call_of(operator: str, dtype: str) -> dict[str, Any]:
    """A valid call in which every array has elements; for attention, a call that may have gradients."""
    for number in range(400):
        d = Draw(np.random.default_rng([5, number]))
        d.dtype = dtype
        found = CALLS[operator](d)
        if all(x.values.size for x in operands(found)) and "return_partials" not in found:
            return found
    raise LookupError(operator)


def operands(value: Any) -> Iterator[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from operands(x)
    elif isinstance(value, dict):
        for x in value.values():
            yield from operands(x)


def on_device(value: Any, device: str, gradient: bool) -> Any:
    if isinstance(value, Operand):
        x = torch.from_numpy(np.array(value.values)).to(getattr(torch, value.dtype)).to(device)
        return x.requires_grad_(gradient and not value.written and value.dtype in FLOATS)
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(x, device, gradient) for x in value)
    if isinstance(value, dict):
        return {name: on_device(x, device, gradient) for name, x in value.items()}
    return value


def tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (tuple, list)):
        for x in found:
            yield from tensors(x)


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def timed(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    wait(device)
    began = time.perf_counter()
    found = call()
    wait(device)
    return time.perf_counter() - began, found


def step(operator: str, arguments: dict[str, Any]) -> bool:
    """A call with gradients of all operands, or of the first alone, and its backward; False if the operator has no
    backward."""
    leaves = [x for x in tensors(list(arguments.values())) if x.requires_grad]
    for some in (leaves, leaves[:1]):
        for x in leaves:
            x.requires_grad_(any(x is y for y in some))
        try:
            results = [x for x in tensors(getattr(rk, operator)(**arguments)) if x.requires_grad]
        except REFUSED:
            continue
        if results:
            torch.autograd.grad(results, some, [torch.ones_like(x) for x in results], allow_unused=True)
        return bool(results)
    return False


def rows(device: str) -> Iterator[dict[str, Any]]:
    """One row per call: ``pass`` is "forward" or "training" (with the backward); ``error`` is set if a valid call is
    refused."""
    calls = [(operator, dtype, call_of(operator, dtype)) for operator in OPERATORS for dtype in FLOATS]
    ready = [(o, t, on_device(call, device, False), on_device(call, device, True)) for o, t, call in calls]
    x = torch.zeros(1, 3, device=device)
    leaf = x.clone().requires_grad_()
    # the gradient is given, so that torch imports sympy
    torch.autograd.grad(rk.kl(leaf, x, estimator="k1"), leaf, torch.ones_like(leaf))
    for operator, dtype, arguments, with_gradients in ready:
        row = {"operator": operator, "dtype": dtype, "pass": "forward", "seconds": 0.0, "error": ""}
        try:
            row["seconds"], _ = timed(lambda o=operator, a=arguments: getattr(rk, o)(**a), device)
        except REFUSED as error:
            if device != "cpu" and CPU_ALONE in str(error):
                continue
            yield {**row, "error": f"{type(error).__name__}: {error}"}
            continue
        yield row
        if operator.endswith(("_backward", "_grad")):  # a backward has no backward here
            continue
        seconds, has_backward = timed(lambda o=operator, a=with_gradients: step(o, a), device)
        if has_backward:
            yield {**row, "pass": "training", "seconds": seconds}


def faults(found: list[dict[str, Any]], limit_s: float) -> list[str]:
    """Faults of the rows: an operator without a row, a call that is refused, a first call that stalls."""
    missing = sorted(set(OPERATORS) - {row["operator"] for row in found})
    words = [f"{operator}: not called" for operator in missing]
    for row in found:
        name = f"{row['operator']} {row['dtype']} {row['pass']}"
        if row["error"]:
            words.append(f"{name}: {row['error']}")
        elif not row["seconds"] < limit_s:
            words.append(f"{name}: {row['seconds']:.2f} s, of at most {limit_s} s")
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    for row in rows(device):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
