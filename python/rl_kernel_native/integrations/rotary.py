"""Computes cos and sin of positions with the same bits on every device: the host computes them in float64 and rounds
them.

Angles are those of transformers: float32 products of a position and a frequency that the configuration gives.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

# Types whose frequencies come from the configuration. By design, the frequencies of dynamic and longrope depend on the
# longest sequence of a batch.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# The most rows of a table: 32 MiB per device for a head of 128 in bfloat16. Positions past the last row are computed in
# each call.
MOST_ROWS = 65536


class RotaryTables:
    """cos and sin of positions. Tables hold the positions within the configuration's length; later positions are
    computed."""

    def __init__(self, inv_freq: torch.Tensor, scaling: float, num_positions: int) -> None:
        self.scaling = scaling
        self.inv_freq = inv_freq.detach().to("cpu", torch.float32)
        self.num_positions = num_positions  # number of rows of the table
        self._tables: list[torch.Tensor] = []
        self._placed: dict[tuple[Any, ...], torch.Tensor] = {}
        self._seen: tuple[Any, int, bool] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state for a file or another process. The state has the frequencies but no tables: the tables are made
        again from the frequencies."""
        return {**self.__dict__, "_tables": [], "_placed": {}, "_seen": None}

    def agrees(self, inv_freq: torch.Tensor) -> bool:
        """Whether a module's frequencies still equal the frequencies of the tables, apart from rounding. The host
        compares them again only if the module's frequencies may have changed."""
        if torch.compiler.is_compiling() or type(inv_freq) is not torch.Tensor:
            return True
        version = 0 if inv_freq.is_inference() else inv_freq._version
        if self._seen is None or self._seen[0]() is not inv_freq or self._seen[1] != version:
            self._seen = (weakref.ref(inv_freq), version, self._equals(inv_freq))
        return self._seen[2]

    def _equals(self, inv_freq: torch.Tensor) -> bool:
        """Compares with a tolerance for a cast of the module and for the error of a device's power function. If the
        exponent is off by one ulp, the power theta^exponent is off by ln(theta) ulps."""
        found = inv_freq.detach().cpu()
        cast = 0.0 if found.dtype == torch.float32 else torch.finfo(found.dtype).eps
        tolerance = cast + 32 * torch.finfo(torch.float32).eps
        return found.shape == self.inv_freq.shape and torch.allclose(found.float(), self.inv_freq, tolerance, 0)

    def half_width(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), float32 [positions, frequencies], on the CPU."""
        if not self._tables:
            positions = torch.arange(self.num_positions, dtype=torch.float32, device="cpu")
            self._tables = [x * self.scaling for x in self._on_host(positions)]
        cos, sin = self._tables
        return cos, sin

    def _on_host(self, positions: torch.Tensor) -> list[torch.Tensor]:
        """(cos, sin) of float32 positions [...] on the CPU, float32 [..., frequencies], not scaled."""
        wide = (positions[..., None] * self.inv_freq).numpy().astype(np.float64)
        return [torch.from_numpy(function(wide).astype(np.float32)) for function in (np.cos, np.sin)]

    def __call__(
        self, position_ids: torch.Tensor, dtype: torch.dtype, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of positions [...], each [..., 2 * frequencies] in `dtype` and multiplied by `scaling`.

        Positions past the table, and negative positions, are computed at each call. The CPU uses the functions that
        made the table; other devices and compiled code use the device's float64 functions. Their results round to the
        same float32, except once in many millions. Positions are never copied back to the host.
        """
        if scaling != self.scaling:
            self.scaling, self._tables, self._placed = scaling, [], {}
        device = position_ids.device
        key = (device, dtype)
        table = self._placed.get(key)
        if table is None:
            wide = torch.stack([torch.cat([x, x], -1) for x in self.half_width()], 1)
            table = wide.to(dtype).to(device)
            # An export or a dispatch mode makes tensors without memory. Such a table is not kept, because a later call
            # could not read it.
            if not torch.compiler.is_exporting() and type(table) is torch.Tensor:
                self._placed[key] = table
        inside = position_ids.clamp(0, self.num_positions - 1)
        found = table[inside]
        outside = inside != position_ids
        if device.type == "cpu" and not torch.compiler.is_compiling():
            if bool(outside.any()):
                found[outside] = self._past(position_ids[outside].float(), dtype, self._on_host)
        else:
            past = self._past(position_ids.float(), dtype, self._on_device)
            found = torch.where(outside[..., None, None], past, found)
        cos, sin = found.unbind(-2)
        return cos, sin

    def _past(self, positions: torch.Tensor, dtype: torch.dtype, functions: Any) -> torch.Tensor:
        cos, sin = (torch.cat([x, x], -1) for x in (y * self.scaling for y in functions(positions)))
        return torch.stack([cos, sin], -2).to(dtype)

    def _on_device(self, positions: torch.Tensor) -> list[torch.Tensor]:
        key = (positions.device, "frequencies")
        inv_freq = self._placed.get(key)
        if inv_freq is None:
            inv_freq = self.inv_freq.to(positions.device)
            if not torch.compiler.is_exporting() and type(inv_freq) is torch.Tensor:
                self._placed[key] = inv_freq
        wide = (positions[..., None] * inv_freq).double()
        return [wide.cos().float(), wide.sin().float()]


def make_tables(rotary: Any) -> dict[str | None, RotaryTables]:
    """Tables of a rotary embedding by kind of layer; the key is None if all layers are of one kind.

    Raises: ValueError with the reason why tables cannot be used.
    """
    kinds: Any = rotary.rope_type if isinstance(rotary.rope_type, dict) else {None: rotary.rope_type}
    return {layer: _make(rotary, layer, kind) for layer, kind in kinds.items()}


def _make(rotary: Any, layer: str | None, kind: str) -> RotaryTables:
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope type {kind!r} depends on the batch; cos and sin stay transformers'")
    inv_freq, scaling = _frequencies(rotary, layer, kind)
    config = rotary.config
    parameters = config.rope_parameters if layer is None else config.rope_parameters[layer]
    length = config.max_position_embeddings
    original = parameters.get("original_max_position_embeddings") or length
    reach = max(length, int(original * (parameters.get("factor") or 1)))
    tables = RotaryTables(inv_freq, float(scaling), min(reach, MOST_ROWS))
    if not tables.agrees(getattr(rotary, "inv_freq" if layer is None else f"{layer}_inv_freq")):
        raise ValueError("inv_freq is not that of the configuration")
    return tables


def _frequencies(rotary: Any, layer: str | None, kind: str) -> tuple[torch.Tensor, float]:
    """(inv_freq float32, scaling) from the configuration, on the CPU.

    The function does not read the module's buffer, because a device computes the buffer with its own power function,
    and `model.to(torch.bfloat16)` rounds it.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    own: Any = rotary.compute_default_rope_parameters
    function = own if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    with torch.device("cpu"):
        inv_freq, scaling = function(rotary.config, **({} if layer is None else {"layer_type": layer}))
    return inv_freq.cpu(), scaling
