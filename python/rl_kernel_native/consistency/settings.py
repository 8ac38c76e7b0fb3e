"""The options of a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import BadInput

# Names of --ops, --rollout-ops and --training-ops. "stock" is transformers' default.
OPERATOR_SETS = ("stock", "sdpa", "eager", "flash", "rk")


@dataclass(frozen=True)
class CompareSettings:
    """The options of a comparison run.

    Attributes:
        batch_sizes: largest numbers of requests in flight; each size is run and compared.
        atol: sides are aligned when every |dlogp| <= atol; 0 means equal bytes.
        padding_side: side on which the training batch is padded.
        micro_batch_tokens: tokens of one training forward, padding included.
        probe_mb: memory for recorded hidden states, both sides together.
        temperature: of sampling and of the rollout's log-probabilities; training_temperature: of the training side's,
            None for the same.
        rollout_ops, training_ops: names of OPERATOR_SETS.
        fault_tolerance: relative error on equal input above which an operator is at fault; None: more than rounding
            explains.
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
        """The operators of both sides, by the names of the options."""
        same = self.rollout_ops == self.training_ops
        return self.rollout_ops if same else f"{self.rollout_ops} against {self.training_ops}"

    def check(self) -> None:
        """Raises BadInput that names the option, the value and the expected values."""
        wanted = (
            (0 <= self.seed < 2**64, f"--seed {self.seed}: want 0 <= seed < 2**64"),
            (len(self.batch_sizes) > 0, "--batch: want at least one batch size"),
            (
                all(size > 0 for size in self.batch_sizes),
                f"--batch {','.join(map(str, self.batch_sizes))}: want positive sizes",
            ),
            (len(set(self.batch_sizes)) == len(self.batch_sizes), "--batch: a size is given twice"),
            (self.max_new_tokens > 0, f"--max-new-tokens {self.max_new_tokens}: want at least 1"),
            (0 < self.temperature < math.inf, f"--temperature {self.temperature}: want a number > 0"),
            (
                self.training_temperature is None or 0 < self.training_temperature < math.inf,
                f"--training-temperature {self.training_temperature}: want a number > 0",
            ),
            *(
                (ops in OPERATOR_SETS, f"--{side} {ops}: want one of {', '.join(OPERATOR_SETS)}")
                for side, ops in (("rollout-ops", self.rollout_ops), ("training-ops", self.training_ops))
            ),
            (self.packing in ("packed", "padded"), f"--packing {self.packing}: want packed or padded"),
            (self.padding_side in ("left", "right"), f"--padding-side {self.padding_side}: want left or right"),
            (0 <= self.atol < math.inf, f"--atol {self.atol}: want a number >= 0"),
            (self.micro_batch_tokens > 0, "--micro-batch-tokens: want at least 1"),
            (self.probe_mb > 0, "--probe-mb: want at least 1"),
            (self.fault_tolerance is None or self.fault_tolerance > 0, "--fault-tolerance: want a number > 0"),
        )
        for good, message in wanted:
            if not good:
                raise BadInput(message)
