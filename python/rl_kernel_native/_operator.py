"""An operator as data: its arrays, options, outputs, extension functions and derivatives.

From this description, :mod:`_engine` builds everything that torch needs: the schema, the fake kernel, the eager call
and autograd. It also builds the rules of torch.func and torch.compile. :mod:`_call` calls the operator with arrays of
any framework.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _check
from ._arithmetic import AS_CALLED, product_unit, resolve_exp, unresolved_exp
from ._native import module as _C

Dtype = str | int | Callable[[tuple[Any, ...]], int | None] | None

OPERATORS: list[Operator] = []  # all operators, in the order of their modules


@dataclass(frozen=True)
class Array:
    """An operand.

    Attributes:
        name: its name in the schema; also in errors if ``called`` gives no other name.
        called: a function that returns its name in errors, from the options and, if known, the arrays.
        written: whether the operator writes the array; such an operator has no outputs.
        added: whether the operator adds to the array's values.
        is_float32: whether a real number on the device, of any dtype, is cast to float32; only for the last array.
        number: the schema's type of a number that may replace the array. The schema then has both arguments.
        listed: name of the schema's list of tensors to which the array belongs. A list is the schema's first argument.
    """

    name: str
    optional: bool = False
    called: Callable[..., str] | None = None
    number: str = ""
    written: bool = False
    added: bool = False
    is_float32: bool = False
    listed: str = ""

    @staticmethod
    def all_of(given: Array | str) -> list[Array]:
        """The arrays of a text such as "x, bias?, cache!, seed|SymInt": ? marks an optional array, and ! an array that
        is written. The type after | is the type of a number that may replace the array."""
        if isinstance(given, Array):
            return [given]
        parts = [text.partition("|") for text in given.split(", ")]
        return [Array(x.rstrip("?!"), x.endswith("?"), written=x.endswith("!"), number=n) for x, _, n in parts]

    @staticmethod
    def list_of(name: str, most: int) -> list[Array]:
        """The arrays of a list with one to ``most`` arrays."""
        return [Array(f"{name}[{i}]", optional=i > 0, listed=name) for i in range(most)]

    def label(self, how: tuple[Any, ...], arrays: Sequence[Any] = ()) -> str:
        return self.name if self.called is None else self.called(how, arrays)


def products(call: Any, d: Any, kept: Sequence[Any], how: tuple[Any, ...]) -> Sequence[Any]:
    """The gradients ``kept`` by the forward of a scalar loss, multiplied by the incoming gradient ``d``."""
    return [None if g is None else g * d for g in kept]


def sum_of_products(tangents: Sequence[Any], kept: Sequence[Any], how: tuple[Any, ...]) -> Any:
    """The transpose of :func:`products`: the sum, over the operands, of kept gradient times tangent."""
    found = kept[0].new_zeros(())
    for g, t in zip(kept, tangents, strict=True):
        if g is not None and t is not None:
            found = found + (g * t).sum()
    return found


@dataclass(frozen=True)
class Loss:
    """The description, for :func:`kept`, of a loss whose forward computes the gradients and keeps them. A backward
    multiplies the kept gradients by the incoming gradient. There is no second derivative.

    Attributes:
        outputs: number of outputs before the gradients: the loss, then outputs that have no gradient.
        incoming: name of the incoming gradient.
        reads: number of options that the functions ``scale`` and ``along`` get.
        scale: a function that returns gradients. Its arguments are a function that calls operators, the incoming
            gradient, what the forward kept and the first ``reads`` options.
        along: a function that returns the loss's tangent. Its arguments are tangents of ``of`` or None, what the
            forward kept and the first ``reads`` options.
    """

    outputs: int
    incoming: str = "d_loss"
    reads: int = 0
    scale: Callable[..., Sequence[Any]] = products
    along: Callable[..., Any] = sum_of_products


def _always(i: int, how: tuple[Any, ...]) -> bool:
    return True


@dataclass(slots=True)
class Like:
    """The shape and dtype of an array, for a backward that does not need the array's values."""

    shape: Any
    dtype: Any

    @staticmethod
    def of(array: Any) -> Like | None:
        return None if array is None else Like(array.shape, array.dtype)


@dataclass(frozen=True)
class Composed:
    """Derivatives composed of torch's own operators, in addition to a native first derivative. These derivatives are
    built for correctness, not for speed.

    Attributes:
        of: positions of the arrays that may have a gradient.
        composed: a function of the arrays ``of`` and the options. The function computes the call's first outputs by
            torch's operators. None if ``backward`` and ``tangents`` are given.
        reads: positions of the constants that ``composed`` takes after the arrays ``of``.
        incoming: names of the incoming gradients, one for each of the first outputs.
        kept: a function of arrays and outputs that returns what the backward reads.
        prepared: a function of arrays, options and needed gradients that returns the options of an eager forward with a
            backward. None: the options stay those of the schema.
        eager: a function that returns the autograd Function of eager calls. Operators with short kernels have their own
            Function, because the engine's general Function would add a tenth to their time.
        backward: a function that returns the gradients of ``of``, None for unwanted gradients. Its arguments are a
            function that calls operators, the incoming gradients or None, the kept arrays, the options and which
            gradients are wanted. None: use ``composed``.
        tangents: a function that returns the tangents of the first outputs. Its arguments are a function that calls
            operators, tangents and arrays of ``of``, and the options. None: use ``composed``.
        asked: a function of arrays and options that tells whether outputs after the first are asked for. Otherwise
            autograd sees only the first output.
        accumulates: position of the array whose gradient a backward may add to the caller's buffer ``main_grad``. This
            buffer is the last option of an eager call, and is in no schema.
        beside: position of an array whose gradient costs little, if the gradient of ``accumulates`` is computed too.
        batch: a function of torch.func's info, dimensions, inputs and a call. It returns outputs with the batch in
            front, and their dimensions. None: each element gets its own call.
        once: text of the error for an eager backward with create_graph; "" if the backward has derivatives.
        constants: text of the error for a gradient of an array outside ``of``; "" selects the common text. With None
            there is no error: arrays outside ``of`` are results of a forward, which depend on the arrays ``of``.
        allows: a function of a position in ``of`` and the options that tells whether that array may have a gradient.
        likes: positions of arrays of which a backward gets only the :class:`Like`, before the kept arrays.
        reads_kept: whether ``tangents`` reads what a backward reads, instead of the arrays ``of`` and ``reads``.
        loss: the :class:`Loss` of :func:`kept`.
        no_tangent: text of the error for a tangent of an array outside ``of``; "" selects the common text.
        dims: the most dimensions that kernels read with any strides; the last dimension must be contiguous. None:
            kernels read any number of dimensions with any strides.
        as_kept: whether ``backward`` reads kept arrays with any strides, so that a trace copies none, and incoming
            gradients unchanged. Without this flag, incoming gradients are cast to the dtype of the first kept array.
    """

    of: tuple[int, ...]
    composed: Callable[[Sequence[Any], tuple[Any, ...]], Sequence[Any]] | None = None
    reads: tuple[int, ...] = ()
    incoming: tuple[str, ...] = ()
    kept: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]] = lambda arrays, outputs: arrays
    prepared: Callable[..., tuple[Any, ...]] | None = None
    eager: Callable[[], Any] | None = None
    backward: Callable[..., Sequence[Any]] | None = None
    tangents: Callable[..., Sequence[Any]] | None = None
    asked: Callable[[Sequence[Any], tuple[Any, ...]], bool] = lambda arrays, how: False
    accumulates: int | None = None
    beside: int | None = None
    batch: Callable[..., Any] | None = None
    once: str = ""
    constants: str | None = None
    allows: Callable[[int, tuple[Any, ...]], bool] = _always
    likes: tuple[int, ...] = ()
    reads_kept: bool = False
    loss: Loss | None = None
    no_tangent: str = ""
    dims: int | None = 3
    as_kept: bool = False


def linear(
    of: tuple[int, ...], along: Callable[..., Any], constants: str = "", reads: tuple[int, ...] = (), **more: Any
) -> Composed:
    """Derivatives of an operator that is linear in the arrays ``of``.

    The operator itself maps tangents, and its transpose, which is also linear, maps gradients.

    Args:
        along: a function that returns tangents of the first outputs, or gradients of ``of``. Its arguments are: a
            function that calls operators; the tangents or incoming gradients, None for a missing one; the operands; the
            options; and which gradients are wanted, None for tangents. The operands are a :class:`Like` of each array
            ``of``, then the arrays ``reads``.
    """

    def tangents(call: Any, given: Any, arrays: Any, how: Any) -> Sequence[Any]:
        return along(call, given, arrays, how, None)

    more |= {"backward": along, "tangents": tangents, "constants": constants, "reads": reads, "reads_kept": True}
    more |= {"no_tangent": constants.replace("gets no gradient", "carries no tangent")}
    more |= {"asked": lambda arrays, how: True, "kept": lambda arrays, outputs: [arrays[i] for i in reads]}
    return Composed(of, likes=of, as_kept=True, **more)


def kept(of: tuple[int, ...], loss: Loss, constants: str = "") -> Composed:
    """Derivatives of a loss whose forward also computes its gradients.

    ``native`` takes further options: for each array ``of``, whether its gradient is wanted. Without these options,
    ``native`` computes the gradients of all arrays that are present.
    """

    def read(arrays: Any, outputs: Any) -> Sequence[Any]:
        return *outputs[loss.outputs :], *(arrays[i] for i in of)

    more: dict[str, Any] = {"incoming": (loss.incoming,), "kept": read, "reads_kept": True, "as_kept": True}
    return Composed(of, loss=loss, constants=constants, **more)


def declared(options: str) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that converts options to the types that a schema declares. Errors name the option."""
    parts = tuple(tuple(option.split()) for option in options.split(", ") if option)
    return lambda how: tuple(_declared(kind, name, x) for (kind, name), x in zip(parts, how, strict=True))


def _declared(kind: str, name: str, x: Any) -> Any:
    is_symbol = not isinstance(x, (int, float)) and hasattr(x, "node")  # a symbolic number, in the trace of a backward
    if is_symbol or (x is None and kind.endswith("?")):
        return x
    kind = kind.rstrip("?")
    if kind == "float":
        return _check.number(name.removesuffix("_value"), x)
    if kind == "SymInt":
        return _check.integer64(name, x)
    if kind == "ScalarType" and type(x) is int:  # the extension's number of a dtype
        from ._torch import DTYPES

        return None if x < 0 else DTYPES[x]
    return x


@dataclass(eq=False)
class Operator:
    """One operator. Arrays and options are always in the order of this description.

    Attributes:
        arrays: operands. A text in the form of :meth:`Array.all_of` may replace arrays.
        options: the options in the schema's form.
        outputs: a function of arrays and options that returns each output's shape, or None for an output that is not
            asked for. If left out, every output has the shape of the leading array.
        dtypes: one entry for each output. An entry is a dtype's name, None for the dtype of the leading array, or the
            position of the array that has the dtype. It may also be a function of the options that returns the
            extension's number or None.
        native: a function of arrays, options, allocate and stream. It returns the outputs, or None if it writes arrays
            instead. Default: the extension's function with the operator's name.
        gradient: None for an operator without gradients, which treats its inputs as detached.
        schema_options: a function that converts options to the schema's form. Default: :func:`declared` converts
            options to the types that ``options`` declares.
        follows: whether the operator gets ``exp`` and ``unit`` as the numbers that its forward used.
        casts: positions of the operands of a matrix product, which torch.autocast casts.
        leads: position of the leading array: all other arrays must have its device and framework.
        cures: the advice at the end of an error, by the name of an argument that is no tensor. The entry "DTensor" is
            the advice for any DTensor.
        flops: a function of the arrays' shapes that returns the number of operations for torch's FlopCounterMode.
        main_grad_call: name of the function to which callers without autograd pass a main_grad.
        function: the Function of eager calls, once the engine has registered the operator.
    """

    name: str
    arrays: Any
    options: str
    outputs: Any = None
    dtypes: tuple[Dtype, ...] = ("float32",)
    native: Any = None
    gradient: Composed | None = None
    schema_options: Any = None
    follows: bool = False
    casts: tuple[int, ...] = ()
    leads: int = 0
    cures: dict[str, str] = field(default_factory=dict)
    flops: Callable[..., int] | None = None
    main_grad_call: str = ""
    function: Any = None

    def __post_init__(self) -> None:
        given = (self.arrays,) if isinstance(self.arrays, str) else self.arrays
        self.arrays = tuple(itertools.chain.from_iterable(map(Array.all_of, given)))
        names = self.options.split(", ")
        self.outputs = self.outputs or (lambda arrays, how: (arrays[self.leads].shape,) * len(self.dtypes))
        self.schema_options = self.schema_options or declared(self.options)
        self.in_context = tuple(
            (i, name == "int exp") for i, name in enumerate(names) if name in ("int exp", "int unit")
        )
        self.has_exp = "int exp" in names
        self.num_options = len(names) if self.options else 0
        self.num_listed = sum(bool(a.listed) for a in self.arrays)
        # Whether the schema has exactly these arrays.
        self.is_schema = not self.num_listed and not any(a.number for a in self.arrays)
        self.has_float32 = self.arrays[-1].is_float32
        self.written = tuple(i for i, a in enumerate(self.arrays) if a.written)
        name = self.name
        if self.native is None and len(self.dtypes) == 1:
            self.native = lambda arrays, how, *tail: (getattr(_C, name)(*arrays, *how, *tail),)
        elif self.native is None:
            self.native = lambda arrays, how, *tail: getattr(_C, name)(*arrays, *how, *tail)
        # Bit i: array i may have a gradient, with any options.
        of = self.gradient.of if self.gradient is not None and self.gradient.allows is _always else ()
        self.differentiable = sum(1 << i for i in of)
        OPERATORS.append(self)

    def into(self, at: int) -> Operator:
        """The operator that adds output ``at`` to main_grad, its first array, and returns the other outputs.

        The new operator does not have the option for the dtype of output ``at``. ``native`` gets None for this option,
        and main_grad by name.
        """
        options = self.options.split(", ")
        place = next((i for i, option in enumerate(options) if option.startswith("ScalarType")), len(options))

        def others(found: Sequence[Any]) -> tuple[Any, ...]:
            return *found[:at], *found[at + 1 :]

        def whole(how: tuple[Any, ...]) -> tuple[Any, ...]:
            return (*how[:place], None, *how[place:])[: len(options)]

        flops = self.flops
        return Operator(
            f"{self.name}_",
            (Array("main_grad", written=True, added=True), *self.arrays),
            ", ".join(options[:place] + options[place + 1 :]),
            outputs=lambda arrays, how: others(self.outputs(arrays[1:], whole(how))),
            dtypes=others([d + 1 if isinstance(d, int) else d for d in self.dtypes]),
            native=lambda arrays, how, *tail: others(self.native(arrays[1:], whole(how), *tail, main_grad=arrays[0])),
            follows=self.follows,
            leads=self.leads + 1,
            cures=self.cures,
            flops=None if flops is None else lambda main_grad, *given: flops(*given),
        )

    def resolved(self, how: tuple[Any, ...], device: str, is_compiling: bool = False) -> tuple[Any, ...]:
        """The options, in which the extension's numbers replace ``exp`` and a ``unit`` of None.

        The context ``rk.arithmetic`` decides these numbers; a compiled call reads it when it runs."""
        found = list(how)
        for i, is_exp in self.in_context:
            if is_exp:
                found[i] = unresolved_exp(how[i]) if is_compiling else resolve_exp(how[i], device)
            elif how[i] is None:
                found[i] = AS_CALLED if is_compiling else product_unit()
        return tuple(found)
