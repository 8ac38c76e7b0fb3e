"""Selection of tokens with high entropy: arguments and their check. In the contract
cpp/include/rlk/ops/covariance_mask.h, this operator is the third kind of ``covariance_mask``."""

from __future__ import annotations

from collections.abc import Iterator

from .. import _check
from .._call import call
from .._types import AnyArray, ArrayT
from ..contract import BATCH_OF_TOKENS, BITWISE, OF_TOKENS, Row, add_rows
from ..reference.entropy_mask import entropy_mask_reference
from .covariance_mask import COVARIANCE_MASK, ENTROPY

__all__ = ["entropy_mask", "entropy_mask_reference"]


def entropy_mask(
    entropy: ArrayT, mask: AnyArray | None = None, *, top_quantile: float, cu_seqlens: AnyArray | None = None
) -> ArrayT:
    """Selects the tokens whose entropy is not below a quantile over the call's tokens. A policy loss may be restricted
    to these uncertain tokens.

    A radix select finds the exact quantile on the device, for any number of tokens, and nothing waits for the host.
    ``torch.quantile`` sorts instead, and takes at most 16 million tokens. The mask does not depend on padding, packing,
    strides or the backend. The result has no gradient; inputs that require a gradient are treated as detached.

    For the quantile of a global batch, gather the padded entropies and masks of all ranks, and use this rank's rows of
    the result.

    Args:
        entropy: float32 ``[num_sequences, num_tokens]``, or ``[num_tokens]`` packed (or of one sequence); tokens
            contiguous, rows with any stride; as :func:`logprob` returns it.
        mask: of the shape of ``entropy``; any mask (docs/tokens.md). A token counts if its mask is not 0; other tokens
            may hold any value. None: all tokens count.
        top_quantile: the share of tokens to select, in [0, 1], as TRL's ``top_entropy_quantile``. The mask selects
            entropies at or above the quantile ``1 - top_quantile``. If ``torch.quantile`` interpolates between two
            entropies, this function selects the upper entropy. (torch rounds the interpolated value, so it may select
            both entropies if they differ only in the last bits.) Equal entropies are selected together; a share of 0
            selects the largest entropy. A NaN is larger than any number.
        cu_seqlens: int32 or int64 ``[num_sequences + 1]``: packed sequence s is ``[cu_seqlens[s], cu_seqlens[s + 1])``.
    Returns: float32 with the shape of ``entropy``: 1 for a token that counts and is selected, else 0. With
        ``PolicySpec(drop_selected=True)``, pass ``selected=1 - entropy_mask(...)``, the tokens that are not selected.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value; RuntimeError if this
        build has no kernel for the device. On a CPU, bad cu_seqlens are a ValueError (docs/tokens.md); on a GPU the
        whole result is NaN.
    Source: docs/numerics.md, rule 10; docs/objectives/entropy.md; Wang et al. 2025, arXiv:2506.01939; TRL's
        get_high_entropy_mask.

    Example:
        >>> entropy = torch.tensor([[0.1, 0.9, 0.5, 0.7]])
        >>> rk.entropy_mask(entropy, torch.ones(1, 4), top_quantile=0.5)
        tensor([[0., 1., 0., 1.]])
    """
    share = _check.number("top_quantile", top_quantile)
    if not 0 <= share <= 1:
        raise ValueError(f"top_quantile: expected a number in [0, 1], got {_check.shown(top_quantile)}")
    return call(COVARIANCE_MASK, (entropy, None, None, mask, cu_seqlens), (ENTROPY, share, 0.0, 0.0, 0.0, 0.0, 0))[0]


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _contract_rows() -> Iterator[Row]:
    drawn = OF_TOKENS | {"keeps": BATCH_OF_TOKENS, "kind": "integers", "stem": "covariance_mask"}
    yield Row("entropy_mask", "selected", "forward", bound=BITWISE, **drawn)


add_rows(_contract_rows())
