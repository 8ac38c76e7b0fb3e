"""Compares a rollout by `generate` with a KV cache to a training forward of the same tokens, stock and patched."""

import torch
import transformers

import rl_kernel_native as rk

torch.manual_seed(0)
size = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 4096, "num_hidden_layers": 4, "head_dim": 32}
config = transformers.Qwen3Config(num_attention_heads=8, num_key_value_heads=2, initializer_range=0.1, **size)
model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
prompt = torch.randint(4096, (6, 16))


@torch.no_grad()
def ratio(score):
    options = {"output_logits": True, "return_dict_in_generate": True}
    out = model.generate(prompt, do_sample=True, top_k=0, max_new_tokens=32, **options)
    answer = out.sequences[:, 16:]
    rollout = score(torch.stack(out.logits, 1), answer)  # one token at a time, batch 6, with a KV cache
    logits = torch.cat([model(rows).logits for rows in out.sequences.split(2)])[:, 15:-1]  # micro-batches of 2
    return (score(logits, answer) - rollout).exp()


ratios = {"stock": ratio(lambda logits, ids: logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0])}
rk.patch_model(model)
ratios["rl_kernel_native"] = ratio(rk.logprob)
for name, r in ratios.items():
    print(f"{name}: {(r != 1).sum()} of {r.numel()} tokens differ, max |ratio - 1| {(r - 1).abs().max():.3g}")
