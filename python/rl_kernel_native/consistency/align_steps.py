"""The updates of `rlk align --steps N`, which run in their own process: `python -m
rl_kernel_native.consistency.align_steps FILE`.

FILE holds the request, a JSON object, and gets the steps. Each step is a GRPO update of a transformers model while the
engine runs. The rollout gives the old log-probabilities. AdamW makes one step. vLLM's weight-transfer API then copies
the new weights into the engine. The reward is the share of even tokens, which any model can learn.
"""

from __future__ import annotations

from typing import Any

from . import align_turns as turns

GROUP = 4
LEARNING_RATE = 1e-3


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        from ..integrations.vllm import cpu

        cpu.install()
    from transformers import AutoModelForCausalLM

    import rl_kernel_native as rk

    from ..integrations import vllm as plugin
    from . import align_rollout

    plugin.plugin()
    from vllm import SamplingParams

    engine = align_rollout.make_engine(request, on_gpu, weight_transfer_config={"backend": "rl_kernel_native"})
    model: Any = AutoModelForCausalLM.from_pretrained(request["model"], dtype=getattr(torch, request["dtype"]))
    model = model.to("cuda" if on_gpu else "cpu").train()
    rk.patch_model(model, strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    prompts = align_rollout.prompts_of(request)
    how = SamplingParams(
        temperature=1.0, max_tokens=request["max_tokens"], n=GROUP, logprobs=0, ignore_eos=True, detokenize=False
    )
    steps = []
    for _ in range(request["steps"]):
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
        samples = [(list(o.prompt_token_ids), c) for o in outputs for c in o.outputs]
        tokens = [list(c.token_ids) for _, c in samples]
        old = torch.tensor(
            [[of[t].logprob for of, t in zip(c.logprobs, c.token_ids, strict=True)] for _, c in samples],
            device=model.device,
        )
        rewards = torch.tensor([sum(t % 2 == 0 for t in ids) / len(ids) for ids in tokens], device=model.device)
        advantage = rk.group_advantage(rewards, group_size=GROUP)
        rows = [logprobs(model, prompt, ids) for (prompt, _), ids in zip(samples, tokens, strict=True)]
        new = torch.stack(rows)
        found = rk.policy_loss(new, old, advantage, torch.ones_like(old), spec=rk.PolicySpec())
        optimizer.zero_grad(set_to_none=True)
        found.loss.backward()
        optimizer.step()
        plugin.sync_weights(engine, model.named_parameters())
        with torch.no_grad():
            after = logprobs(model, samples[0][0], tokens[0])
        ratio = (new.detach() - old).exp()
        steps.append(
            {
                "tokens": ratio.numel(),
                "ratio_not_one": int((ratio != 1).sum()),
                "max_abs_dlogp": float((new.detach() - old).abs().max()),
                "reward": float(rewards.mean()),
                "moved": int((after != new[0].detach()).sum()),
            }
        )
    return {"updates": steps}


def logprobs(model: Any, prompt: list[int], tokens: list[int]) -> Any:
    """Log-probabilities [tokens] of a completion after its prompt."""
    import torch

    import rl_kernel_native as rk

    ids = torch.tensor([prompt + tokens], device=model.device)
    return rk.logprob(model(ids).logits[0, len(prompt) - 1 : -1], ids[0, len(prompt) :])


if __name__ == "__main__":
    turns.serve(answer, measures=False)
