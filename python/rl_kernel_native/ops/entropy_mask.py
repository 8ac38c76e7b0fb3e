"""The tokens of a high entropy: arguments and their check. The contract is cpp/include/rlk/ops/covariance_mask.h, of
which this is the third kind."""

from __future__ import annotations

from .. import _check
from .._call import call
from .._types import AnyArray, ArrayT
from ..reference.entropy_mask import entropy_mask_reference
from .covariance_mask import COVARIANCE_MASK, ENTROPY

__all__ = ["entropy_mask", "entropy_mask_reference"]


def entropy_mask(
    entropy: ArrayT, mask: AnyArray | None = None, *, top_quantile: float, cu_seqlens: AnyArray | None = None
) -> ArrayT:
    """The tokens whose entropy is not below a quantile of all of the call: those that decide, to which a policy loss
    may be restricted.

    The quantile is found on the device by a radix select, exactly, of any number of tokens, and nothing waits for the
    host (``torch.quantile`` sorts, and takes 16 million at most). The mask does not depend on padding, packing, strides
    or the backend. Nothing here is differentiated: inputs that require a gradient are taken as detached.

    A quantile of a global batch needs the entropies of all ranks: gather them, padded, with their masks, and take the
    rows of this rank.

    Args:
        entropy: float32 ``[num_sequences, num_tokens]``, or ``[num_tokens]`` packed (or of one sequence); tokens
            contiguous, rows of any stride; as :func:`logprob` gives.
        mask: of that shape; any mask (docs/tokens.md). A token counts where it is not 0; others may hold
            anything. None: all count.
        top_quantile: the share that is chosen, in [0, 1], TRL's ``top_entropy_quantile``: entropies at or above the
            quantile ``1 - top_quantile``. Where ``torch.quantile`` interpolates between two entropies, the upper one is
            chosen (torch rounds, so two that differ in the last bits may both be). Equal entropies are chosen together;
            a share of 0 chooses the largest. A NaN is larger than any number.
        cu_seqlens: int32 or int64 ``[num_sequences + 1]``: packed sequence s is ``[cu_seqlens[s], cu_seqlens[s + 1])``.
    Returns: float32 of the shape of ``entropy``: 1 where a token counts and is chosen, else 0. With
        ``PolicySpec(drop_selected=True)`` give ``selected=1 - entropy_mask(...)``, the tokens that are not chosen.
    Raises:
        TypeError for a dtype or a type; ValueError for a shape, a layout, a device or a value; RuntimeError where no
        kernel of this build serves the device. On a CPU ValueError for bad cu_seqlens
        (docs/tokens.md); on a GPU all is NaN then.
    Source: docs/numerics.md, rule 10; docs/objectives/entropy.md; Wang et al. 2025, arXiv:2506.01939; TRL's
        get_high_entropy_mask.

    Example:
        >>> entropy = torch.tensor([[0.1, 0.9, 0.5, 0.7]])
        >>> rk.entropy_mask(entropy, torch.ones(1, 4), top_quantile=0.5)
        tensor([[0., 1., 0., 1.]])
    """
    share = _check.number("top_quantile", top_quantile)
    if not 0 <= share <= 1:
        raise ValueError(f"top_quantile: expected a number in [0, 1], got {top_quantile!r}")
    return call(COVARIANCE_MASK, (entropy, None, None, mask, cu_seqlens), (ENTROPY, share, 0.0, 0.0, 0.0, 0.0, 0))[0]
