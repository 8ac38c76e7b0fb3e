"""The options of a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .. import _check
from .errors import BadInput, spelled

# Names of --ops, --rollout-ops and --training-ops. "stock" means what transformers uses by default.
OPERATOR_SETS = ("stock", "sdpa", "eager", "flash", "rk")


@dataclass(frozen=True)
class CompareSettings:
    """The options of a comparison run.

    Attributes:
        batch_sizes: the most requests in flight; the comparison runs once for each size.
        atol: the sides are aligned if every |dlogp| <= atol; 0 requires equal bytes.
        padding_side: side on which the training batch is padded.
        micro_batch_tokens: most tokens of one training forward, padding included.
        probe_mb: MiB for recorded hidden states, for both sides together.
        temperature: temperature of sampling and of the rollout's log-probabilities. training_temperature: that of the
            training side; None means the same temperature.
        rollout_ops, training_ops: names of OPERATOR_SETS.
        fault_tolerance: relative error, on equal input, above which an operator is at fault; None: the error that
            rounding explains.
    """

    seed: int = 0
    batch_sizes: tuple[int, ...] = (1, 8)
    max_new_tokens: int = 64
    temperature: float = 1.0
    training_temperature: float | None = None
    rollout_ops: str = "stock"
    training_ops: str = "stock"
    packing: str = "packed"
    padding_side: str = "right"
    atol: float = 0.0
    micro_batch_tokens: int = 4096
    probe_mb: int = 512
    fault_tolerance: float | None = None

    @property
    def label(self) -> str:
        """The operators of both sides, under their names in OPERATOR_SETS."""
        same = self.rollout_ops == self.training_ops
        return self.rollout_ops if same else f"{self.rollout_ops} against {self.training_ops}"

    def check(self) -> None:
        """Raises BadInput for a bad value, or TypeError for a value of another type. The error names the argument, the
        value and the expected values."""
        for name in ("seed", "max_new_tokens", "micro_batch_tokens", "probe_mb"):
            _check.integer(name, getattr(self, name))
        for size in self.batch_sizes:
            _check.integer("batch_sizes", size)
        for name in ("temperature", "training_temperature", "atol", "fault_tolerance"):
            if getattr(self, name) is not None or name in ("temperature", "atol"):
                _check.number(name, getattr(self, name))
        wanted = (
            ("seed", 0 <= self.seed < 2**64, "want 0 <= seed < 2**64"),
            ("batch_sizes", len(self.batch_sizes) > 0, "want at least one batch size"),
            ("batch_sizes", all(size > 0 for size in self.batch_sizes), "want positive sizes"),
            ("batch_sizes", len(set(self.batch_sizes)) == len(self.batch_sizes), "a size is given twice"),
            ("max_new_tokens", self.max_new_tokens > 0, "want at least 1"),
            ("temperature", 0 < self.temperature < math.inf, "want a number > 0"),
            (
                "training_temperature",
                self.training_temperature is None or 0 < self.training_temperature < math.inf,
                "want a number > 0",
            ),
            *(
                (name, getattr(self, name) in OPERATOR_SETS, f"want one of {', '.join(OPERATOR_SETS)}")
                for name in ("rollout_ops", "training_ops")
            ),
            ("packing", self.packing in ("packed", "padded"), "want packed or padded"),
            ("padding_side", self.padding_side in ("left", "right"), "want left or right"),
            ("atol", 0 <= self.atol < math.inf, "want a number >= 0"),
            ("micro_batch_tokens", self.micro_batch_tokens > 0, "want at least 1"),
            ("probe_mb", self.probe_mb > 0, "want at least 1"),
            ("fault_tolerance", self.fault_tolerance is None or self.fault_tolerance > 0, "want a number > 0"),
        )
        for name, good, message in wanted:
            if not good:
                raise BadInput(f"{spelled(name, getattr(self, name))}: {message}")
