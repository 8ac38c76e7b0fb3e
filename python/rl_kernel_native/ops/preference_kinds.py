"""The kinds of preference losses: the number of each kind in the contract, and the arguments that it takes."""

from __future__ import annotations

from typing import NamedTuple

# Enum values of the contract.
SIGMOID, HINGE, IPO, EXO_PAIR, NCA_PAIR, ROBUST, BCO_PAIR, SPPO_HARD = range(8)
APO_ZERO, APO_DOWN, DISCOPOP, ORPO, KTO = range(8, 13)
UNSORTED, AOT, AOT_UNPAIRED = range(3)
LOG_RATIO, FORWARD_KL, JS_DIVERGENCE, ALPHA_DIVERGENCE, ALPHA_PO = range(5)
NO_AVERAGE, OF_LOGPROB, OF_SCORE = range(3)


class Kind(NamedTuple):
    number: int
    sort: int = UNSORTED
    average: int = NO_AVERAGE  # what is divided by the token counts, if counts are given
    options: tuple[str, ...] = ()  # the options that this kind takes
    reference: bool | None = None  # reference model: True: needed, False: refused, None: optional


_SMOOTH = ("label_smoothing",)
_DIVERGES = ("f_divergence", "f_alpha")
KINDS = {
    "dpo": Kind(SIGMOID, options=_SMOOTH + _DIVERGES),
    "sigmoid_norm": Kind(SIGMOID, average=OF_SCORE, options=_SMOOTH + _DIVERGES),
    "hinge": Kind(HINGE, options=_DIVERGES),
    "ipo": Kind(IPO, average=OF_SCORE, options=_DIVERGES),
    "exo_pair": Kind(EXO_PAIR, options=_SMOOTH + _DIVERGES),
    "nca_pair": Kind(NCA_PAIR),
    "robust": Kind(ROBUST, options=_SMOOTH + _DIVERGES),
    "bco_pair": Kind(BCO_PAIR),
    "sppo_hard": Kind(SPPO_HARD),
    "aot": Kind(SIGMOID, AOT, options=_SMOOTH, reference=True),
    "aot_unpaired": Kind(SIGMOID, AOT_UNPAIRED, options=_SMOOTH, reference=True),
    "apo_zero": Kind(APO_ZERO),
    "apo_down": Kind(APO_DOWN),
    "discopop": Kind(DISCOPOP, options=("tau", *_DIVERGES)),
    "kto": Kind(KTO, options=("kl", "chosen_weight", "rejected_weight")),
    "apo_zero_unpaired": Kind(KTO, options=("chosen_weight", "rejected_weight")),
    "cpo": Kind(SIGMOID, options=_SMOOTH, reference=False),
    "simpo": Kind(SIGMOID, average=OF_LOGPROB, options=("gamma", *_SMOOTH), reference=False),
    "alphapo": Kind(SIGMOID, average=OF_LOGPROB, options=("gamma", "alpha", *_SMOOTH), reference=False),
    "orpo": Kind(ORPO, average=OF_LOGPROB, reference=False),
}
# Names of kinds in TRL and OpenRLHF that differ from the names in this library.
KNOWN_AS = {
    "sigmoid": "dpo",
    "kto_pair": "kto",
    "exo": "exo_pair",
    "nca": "nca_pair",
    "bco": "bco_pair",
    "sppo": "sppo_hard",
}
DIVERGENCES = {
    "reverse_kl": LOG_RATIO,
    "forward_kl": FORWARD_KL,
    "js_divergence": JS_DIVERGENCE,
    "alpha_divergence": ALPHA_DIVERGENCE,
}

# The arrays of `preference_loss`, in the order of the extension's arguments.
NAMES = (
    "policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected", "chosen_count", "rejected_count",
    "chosen_aligned", "rejected_aligned", "kl",
)  # fmt: skip
