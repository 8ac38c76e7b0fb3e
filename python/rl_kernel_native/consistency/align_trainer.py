"""The trainer of `rlk align`, a process of its own: `python -m rl_kernel_native.consistency.align_trainer FILE`.

FILE holds the rollout's answer (align_rollout.py) and gets the log-probabilities that a model of transformers gives the
same tokens, one sequence after the other.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def answer(request: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    import rl_kernel_native as rk

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, request["dtype"])
    model: Any = AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype)
    model = model.to(device).eval()
    served = request["setting"] == "rk"
    if served:
        request["patched"] = dict(rk.patch_model(model, strict=True))
    with torch.no_grad():
        for sequence in request["sequences"]:
            ids = torch.tensor([sequence["prompt"] + sequence["tokens"]], device=device)
            logits, targets = model(ids).logits[0, :-1], ids[0, 1:]
            if served:
                logprob = rk.logprob(logits, targets)
            else:
                logprob = torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0]
            count = len(sequence["tokens"])
            sequence["trainer"] = logprob[-count:].tolist()
            of_tokens, tokens = logits[-count:], targets[-count:]
            # A token beside others of the same logit has several ranks: vLLM's own, or its place among the first few.
            own = of_tokens.gather(1, tokens[:, None])
            sequence["first_rank"] = ((of_tokens > own).sum(1) + 1).tolist()
            sequence["last_rank"] = (of_tokens >= own).sum(1).tolist()
            if served:
                drawn = rk.sample(
                    of_tokens, seed=sequence["seed"], sample_id=0, position=torch.arange(count, device=device)
                )
                sequence["redrawn"] = drawn.ids.tolist()


def main(path: Path) -> None:
    import rl_kernel_native as rk

    request = json.loads(path.read_text())
    with rk.trace() as traced:
        answer(request)
    path.write_text(json.dumps(request | {"trainer_trace": traced.as_json()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
