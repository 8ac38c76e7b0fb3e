"""Differentiable calls for JAX: functions such as ``rk.jax.logprob`` work in ``jit`` and ``grad``, and give the same
bits as in torch.

``import rl_kernel_native.jax``, or ``rk.jax`` after ``import rl_kernel_native as rk``. The module needs JAX. Each call
leaves the graph through ``jax.pure_callback`` and computes on the CPU backend. Arrays on a GPU are copied to the host
and back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import rl_kernel_native as rk

from . import _dispatch
from . import _jax_checks as check
from ._arithmetic import product_unit, resolve_exp
from ._native import functions

__all__ = ["linear", "linear_logprob", "logprob", "policy_loss", "rms_norm"]

_C = functions(linear_logprob_backward="object*5, int, object*2, int")


def _call(function: Callable[..., Any], shapes: Any, *arrays: Any) -> Any:
    """Calls `function` on the host with NumPy arrays, from inside the graph. Under vmap, `function` is called once for
    each element."""

    def on_host(*given: Any) -> Any:
        return function(*(None if array is None else np.asarray(array) for array in given))

    return jax.pure_callback(on_host, shapes, *arrays, vmap_method="sequential")


def _like(array: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape if shape is None else shape, array.dtype if dtype is None else dtype)


def _differentiable(forward: Callable[..., Any], backward: Callable[..., Any], *, arrays: int) -> Callable[..., Any]:
    """A function that JAX can differentiate. Its arguments are `arrays` arrays, then options.

    Args:
        forward: takes these arguments, and returns the result and what backward needs.
        backward: takes the options, what forward kept, which arrays need a gradient, and the result's gradient. It
            returns a gradient or None for each array.
    """

    def result(*given: Any) -> Any:
        return forward(*given)[0]

    def forward_of_asked(*given: Any) -> Any:
        operands = given[:arrays]
        found, saved = forward(*(None if x is None else x.value for x in operands), *given[arrays:])
        # JAX would trace boolean flags. It does not trace () and None, which are structure, so these mark the arrays.
        return found, (saved, tuple(None if x is None or not x.perturbed else () for x in operands))

    def backward_of_asked(*given: Any) -> Any:
        *options, (saved, asked), gradient = given
        if isinstance(gradient, jax.custom_derivatives.SymbolicZero):  # no gradient reaches the result
            return (None,) * arrays
        return backward(*options, saved, tuple(x is not None for x in asked), gradient)

    options = len(inspect.signature(forward).parameters) - arrays
    call = jax.custom_vjp(result, nondiff_argnums=tuple(range(arrays, arrays + options)))
    call.defvjp(forward_of_asked, backward_of_asked, symbolic_zeros=True)
    return call


def _logprob_forward(logits: Any, target: Any, temperature: float) -> Any:
    def compute(logits: Any, target: Any) -> Any:
        found = rk.logprob(logits, target, temperature=temperature, return_lse=True)
        return found.logprob, found.lse

    one = _like(target, dtype=np.float32)
    found, lse = _call(compute, (one, one), logits, target)
    return found, (logits, target, lse)


def _logprob_backward(temperature: float, saved: Any, asked: Any, gradient: Any) -> Any:
    logits, target, lse = saved

    def compute(logits: Any, target: Any, lse: Any, gradient: Any) -> Any:
        return rk.logprob_backward(logits, target, lse, dlogprob=gradient, temperature=temperature)

    return _call(compute, _like(logits), logits, target, lse, gradient), None


_logprob = _differentiable(_logprob_forward, _logprob_backward, arrays=2)


def logprob(logits: Any, target: Any, *, temperature: float = 1.0) -> Any:
    """:func:`rl_kernel_native.logprob`, differentiable in ``logits``. Forward and gradient have the same bits as in
    torch.

    Args:
        logits: ``[..., vocab_size]``, float32, bfloat16 or float16.
        target: ``[...]``, int32 or int64; a target of -100 is not scored.
        temperature: a Python number > 0.
    Returns: ``[...]`` float32, nats.
    Raises: TypeError and ValueError as :func:`rl_kernel_native.logprob`, when JAX traces the call.

    Example:
        >>> logits, target = jnp.array([[2.0, 0.0, -1.0]]), jnp.array([0])
        >>> jax.jit(jax.grad(lambda x: rk.jax.logprob(x, target).sum()))(logits).shape
        (1, 3)
    """
    logits, target = check.array("logits", logits), check.array("target", target)
    temperature = check.number("temperature", temperature)
    check.logprob(check.kind(logits), check.kind(target), temperature)
    return _logprob(logits, target, temperature)


def _linear_forward(x: Any, weight: Any, bias: Any) -> Any:
    out = _like(x, (*x.shape[:-1], weight.shape[0]))
    arrays = (x, weight) if bias is None else (x, weight, bias)
    return _call(rk.linear, out, *arrays), (x, weight, bias)


def _linear_backward(saved: Any, asked: Any, gradient: Any) -> Any:
    x, weight, bias = saved
    rows, columns = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
    dx = dweight = dbias = None
    if asked[0]:
        dx = _call(rk.linear_input_grad, _like(x), gradient, weight)
    if asked[1]:
        dtype = x.dtype.name
        dweight = _call(lambda dy, x: rk.linear_weight_grad(dy, x, out_dtype=dtype), _like(weight), rows, columns)
    if asked[2]:
        dbias = _call(lambda dy: rk.linear_bias_grad(dy, out_dtype=bias.dtype.name), _like(bias), rows)
    return dx, dweight, dbias


_linear = _differentiable(_linear_forward, _linear_backward, arrays=3)


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """:func:`rl_kernel_native.linear`, differentiable in ``x``, ``weight`` and ``bias``: ``x @ weight.T + bias`` with
    one fixed order of summation.

    Args:
        x: ``[..., in_features]``, float32, bfloat16 or float16.
        weight: ``[out_features, in_features]``; bias: ``[out_features]`` or None.
    Returns: ``[..., out_features]``, of the dtype of ``x``.
    Raises: TypeError and ValueError as :func:`rl_kernel_native.linear`, when JAX traces the call.

    Example:
        >>> rk.jax.linear(jnp.ones((1, 3)), jnp.ones((2, 3))).tolist()
        [[3.0, 3.0]]
    """
    x, weight = check.array("x", x), check.array("weight", weight)
    bias = None if bias is None else check.array("bias", bias)
    check.linear(check.kind(x), check.kind(weight), None if bias is None else check.kind(bias))
    return _linear(x, weight, bias)


def _linear_logprob_forward(hidden: Any, weight: Any, target: Any, temperature: float, logits_dtype: str) -> Any:
    def compute(hidden: Any, weight: Any, target: Any) -> Any:
        found = rk.linear_logprob(
            hidden, weight, target, temperature=temperature, logits_dtype=logits_dtype, return_lse=True
        )
        return found.logprob, found.lse

    one = _like(target, dtype=np.float32)
    found, lse = _call(compute, (one, one), hidden, weight, target)
    return found, (hidden, weight, target, lse)


def _linear_logprob_backward(temperature: float, logits_dtype: str, saved: Any, asked: Any, gradient: Any) -> Any:
    hidden, weight, *_ = saved

    def compute(hidden: Any, weight: Any, target: Any, lse: Any, gradient: Any) -> Any:
        return _gradients_on_host(hidden, weight, target, lse, gradient, temperature, logits_dtype, asked)

    shapes = tuple(_like(x) if is_asked else None for x, is_asked in zip((hidden, weight), asked, strict=False))
    return *_call(compute, shapes, *saved, gradient), None


def _gradients_on_host(
    hidden: Any, weight: Any, target: Any, lse: Any, gradient: Any, temperature: float, logits_dtype: str, asked: Any
) -> Any:
    """The gradients of hidden and weight as NumPy arrays, or None for a gradient that is not asked for."""
    frame = _dispatch.Frame(hidden, "hidden")
    _dispatch.match_torch_threads()
    operands = {"hidden": hidden, "weight": weight, "target": target, "lse": lse, "gradient": gradient}
    hidden, weight, target, lse, gradient = (frame.export(array, name) for name, array in operands.items())
    options = (temperature, 1.0, None, -100, None, None, None, None)
    dtype = _dispatch.dtype_code(logits_dtype, "logits_dtype")
    how = (resolve_exp(None, frame.device), dtype, None, product_unit(), 1, 1.0, 0.0)
    wanted, no_bias_nor_lora = asked[0] | asked[1] << 1, (None, None, None)
    found = _C.linear_logprob_backward(
        (hidden, weight, *no_bias_nor_lora, target), options, how, None, (lse, None, gradient, None, None), wanted,
        None, frame.allocate, frame.stream,
    )  # fmt: skip
    return found[0], found[1]


_linear_logprob = _differentiable(_linear_logprob_forward, _linear_logprob_backward, arrays=3)


def linear_logprob(
    hidden: Any, weight: Any, target: Any, *, temperature: float = 1.0, logits_dtype: Any = "float32"
) -> Any:
    """:func:`rl_kernel_native.linear_logprob`, differentiable in ``hidden`` and ``weight``, without all logits in
    memory. Forward and gradients have the same bits as in torch.

    Args:
        hidden: ``[..., in_features]``, float32, bfloat16 or float16.
        weight: ``[vocab_size, in_features]``, with the dtype of ``hidden``.
        target: ``[...]``, int32 or int64; a target of -100 is not scored.
        temperature: a Python number > 0.
        logits_dtype: float32, or the dtype of ``hidden``: each logit is rounded once to this dtype.
    Returns: ``[...]`` float32, nats.
    Raises: TypeError and ValueError as :func:`rl_kernel_native.linear_logprob`, when JAX traces the call.

    Example:
        >>> found = rk.jax.linear_logprob(jnp.ones((1, 3)), jnp.ones((2, 3)), jnp.array([1]))
        >>> round(float(found[0]), 4)
        -0.6931
    """
    hidden, weight, target = (check.array(*x) for x in (("hidden", hidden), ("weight", weight), ("target", target)))
    temperature = check.number("temperature", temperature)
    dtype = hidden.dtype if logits_dtype is None else logits_dtype
    dtype = dtype if isinstance(dtype, str) else np.dtype(getattr(dtype, "dtype", dtype)).name
    check.linear_logprob(check.kind(hidden), check.kind(weight), check.kind(target), temperature, dtype)
    return _linear_logprob(hidden, weight, target, temperature, dtype)


def _rms_norm_forward(x: Any, weight: Any, eps: float, round_before_weight: bool) -> Any:
    def compute(x: Any, weight: Any) -> Any:
        return rk.rms_norm(x, weight, eps, round_before_weight=round_before_weight)

    return _call(compute, _like(x), x, weight), (x, weight)


def _rms_norm_backward(eps: float, round_before_weight: bool, saved: Any, asked: Any, gradient: Any) -> Any:
    x, weight = saved
    of_x, of_weight = asked

    def compute(dy: Any, x: Any, weight: Any) -> Any:
        return rk.rms_norm_backward(
            dy, x, weight, eps, round_before_weight=round_before_weight, return_dx=of_x, return_dweight=of_weight
        )

    return _call(compute, (_like(x) if of_x else None, _like(weight) if of_weight else None), gradient, x, weight)


_rms_norm = _differentiable(_rms_norm_forward, _rms_norm_backward, arrays=2)


def rms_norm(x: Any, weight: Any, eps: float, *, round_before_weight: bool = False) -> Any:
    """:func:`rl_kernel_native.rms_norm`, differentiable in ``x`` and ``weight``.

    Args: the same as for :func:`rl_kernel_native.rms_norm`; ``eps`` and ``round_before_weight`` are Python values.
    Returns: shape and dtype of ``x``.
    Raises: TypeError and ValueError as :func:`rl_kernel_native.rms_norm`, when JAX traces the call.

    Example:
        >>> rk.jax.rms_norm(jnp.array([[3.0, 4.0]]), jnp.ones(2), 1e-6).shape
        (1, 2)
    """
    x, weight, eps = check.array("x", x), check.array("weight", weight), check.number("eps", eps)
    round_before_weight = check.flag("round_before_weight", round_before_weight)
    check.rms_norm(check.kind(x), check.kind(weight), eps, round_before_weight)
    return _rms_norm(x, weight, eps, round_before_weight)


def _policy_forward(logprob: Any, old: Any, advantage: Any, mask: Any, spec: Any, denominator: Any) -> Any:
    def compute(logprob: Any, old: Any, advantage: Any, mask: Any) -> Any:
        found = rk.policy_loss_and_grad(logprob, old, advantage, mask, spec=spec, denominator=denominator)
        return np.float32(found.loss), found.d_logprob

    shapes = (jax.ShapeDtypeStruct((), np.float32), _like(logprob))
    return _call(compute, shapes, logprob, old, advantage, mask)


def _policy_backward(spec: Any, denominator: Any, saved: Any, asked: Any, gradient: Any) -> Any:
    return saved * gradient, None, None, None


_policy_loss = _differentiable(_policy_forward, _policy_backward, arrays=4)


def policy_loss(
    logprob: Any, old_logprob: Any, advantage: Any, mask: Any, *, spec: Any, denominator: float | None = None
) -> Any:
    """The loss of :func:`rl_kernel_native.policy_loss`, differentiable in ``logprob``, without its metrics.

    Args:
        logprob, old_logprob, advantage, mask: as for :func:`rl_kernel_native.policy_loss`, without ``cu_seqlens``:
            ``[num_tokens]`` is one sequence.
        spec: a :class:`rl_kernel_native.PolicySpec` without KL, entropy, rollout weights and selected tokens, because
            this function does not accept their arrays. Outside of jit and grad,
            :func:`rl_kernel_native.policy_loss_and_grad` accepts these arrays.
        denominator: as for :func:`rl_kernel_native.policy_loss`, a Python number or None.
    Returns: a float32 scalar.
    Raises: TypeError and ValueError as :func:`rl_kernel_native.policy_loss`, when JAX traces the call.

    Example:
        >>> logprob, advantage, mask = jnp.array([[-1.0, -2.0]]), jnp.array([1.0]), jnp.ones((1, 2))
        >>> jax.grad(rk.jax.policy_loss)(logprob, logprob, advantage, mask, spec=rk.PolicySpec()).tolist()
        [[-0.5, -0.5]]
    """
    given = {"logprob": logprob, "old_logprob": old_logprob, "advantage": advantage, "mask": mask}
    arrays = [None if name == "old_logprob" and x is None else check.array(name, x) for name, x in given.items()]
    denominator = None if denominator is None else check.number("denominator", denominator)
    check.policy_loss(*(None if x is None else check.kind(x) for x in arrays), spec, denominator)
    return _policy_loss(*arrays, spec, denominator)
