"""Says in an error what to do about a refused argument. The extension and the checks say what is wrong; this module
runs only for errors."""

from __future__ import annotations

import numbers
import re
from typing import Any

NO_ARRAY = "expected an array that speaks DLPack, got "
_FOREIGN = "expected an array of the framework of the first argument, got "
_ONLY_FLOAT32 = re.compile(r"expected dtype float32, got (bfloat16|u?int\d+|float16|float64)$")
_DTYPES = re.compile(r"expected dtype .*float32.* got float64$")
# Arguments that a call writes. No remedy is given for them: a call would write into the converted copy.
_WRITTEN = re.compile(r"(out\b.*|main_grad|k_cache|v_cache)$")


def of_value(name: str, value: Any) -> str:
    """The remedy for a value that is no array; empty if no remedy is known."""
    if isinstance(value, list) or type(value) is tuple:
        return f"; pass torch.tensor({name}) or np.array({name})"
    if isinstance(value, numbers.Number):
        return "; put a number in an array: torch.tensor(3) or np.array(3)"
    for field in ("sum", "logprob") if isinstance(value, tuple) else ("weight",):
        if hasattr(value, field) and hasattr(getattr(value, field), "__dlpack__"):
            return f"; pass {name}.{field}"
    return ""


def of(name: str, value: Any, said: str) -> str:
    """The remedy for what the extension says about an argument: "; " and the advice, or an empty text.

    Args:
        value: a torch tensor, or a trace's description of a tensor; the DLPack capsule of another framework's array; or
            a value that is no array.
        said: the message without the argument's name.
    """
    if _WRITTEN.match(name):
        return ""
    if said.startswith(NO_ARRAY):
        return of_value(name, value)
    if said.startswith(_FOREIGN):
        framework = type(value).__module__.split(".")[0]
        return f"; the first argument is an array of torch and {name} one of {framework}: convert one of them"
    if not (_ONLY_FLOAT32.match(said) or _DTYPES.match(said)):
        return ""
    if not hasattr(value, "is_cuda"):
        return f"; pass {name}.astype('float32')"
    of_model = ", or call model.float() for a model in float64" if name in ("x", "hidden") else ""
    return f"; pass {name}.float(){of_model}"


def type_error(name: str, value: Any, said: str) -> TypeError:
    """The TypeError of a check in Python, with the extension's words and with a remedy."""
    return TypeError(f"{name}: {said}{of(name, value, said)}")


def name_fields(*kinds: type) -> None:
    """Makes the AttributeError of a result that is a named tuple list its fields. If the
    attribute is one of a tensor, the error names the field to use."""

    def missing(self: Any, name: str) -> Any:
        kind, fields = type(self).__name__, self._fields
        words = f"{kind!r} object has no attribute {name!r}"
        if not name.startswith("__"):
            words += f"; its fields are {', '.join(fields)}"
            if hasattr(self[0], name):
                words += f": use .{fields[0]}.{name}"
            elif f"{name}es" in fields:
                words += f": use .{name}es.mean()"
        raise AttributeError(words, name=name, obj=self)

    for kind in kinds:
        kind.__getattr__ = missing  # type: ignore[attr-defined]
