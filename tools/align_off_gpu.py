"""Compares vLLM's outputs with this package's plugin off, byte for byte, with the outputs of processes without the
package.

    python tools/align_off_gpu.py OUT MODEL

OUT and MODEL are as for align_gpu.py, which says what PYTHONPATH must have; this package must be there too, and not be
installed. OUT/MODEL/off.json gets the result, and the exit status is 1 unless all bytes are equal.

Three processes draw the same 256 requests and score prompts, with vLLM's own operators and defaults:

- absent: the package is nowhere on the path. It compiles.
- off: vLLM finds and calls the package's entry point, and RLK_VLLM is not set. This process loads the code that the
  first one compiled.
- again: as the first, at the same time as the second. This process shows whether vLLM repeats its own bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import align_gpu

PACKAGE = "rl_kernel_native"
ROOT = Path(__file__).resolve().parents[1]
ROLLOUT = """
import importlib.metadata, importlib.util, json, random, sys

model, answer, off = sys.argv[1], sys.argv[2], sys.argv[3] == "off"
assert (importlib.util.find_spec("rl_kernel_native") is not None) == off
import torch
from vllm import LLM, SamplingParams

draw = random.Random(5)
engine = LLM(
    model=model, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=584, enable_prefix_caching=True, seed=3,
    gpu_memory_utilization=0.05, kv_cache_memory_bytes=6 << 30,
)
assert off == ("rl_kernel_native" in sys.modules)  # vLLM loads entry points
if off:
    from rl_kernel_native.integrations import vllm as plugin

    assert plugin.enabled() is None
shared = [draw.randrange(151936) for _ in range(256)]
prompts, how = [], []
for i in range(256):
    own = [draw.randrange(151936) for _ in range(draw.randrange(2, 256))]
    prompts.append({"prompt_token_ids": shared + own if i % 2 == 0 else own})
    how.append(SamplingParams(
        temperature=0.0 if i % 8 == 7 else 1.0, top_p=0.9 if i % 8 == 5 else 1.0, top_k=50 if i % 8 == 6 else 0,
        seed=i if i % 2 else None, max_tokens=draw.randrange(32, 65), ignore_eos=True, detokenize=False, logprobs=5,
    ))

def plain(scored):
    return [x and sorted((token, of.logprob.hex(), of.rank) for token, of in x.items()) for x in scored]

def found(outputs):
    return [[list(o.outputs[0].token_ids), plain(o.outputs[0].logprobs)] for o in outputs]

first = found(engine.generate(prompts, how, use_tqdm=False))
cached = found(engine.generate(prompts, how, use_tqdm=False))  # prompts from the prefix cache
one = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=1)
scored = [plain(o.prompt_logprobs) for o in engine.generate(prompts[:32], one, use_tqdm=False)]
json.dump([first, cached, scored], open(answer + ".bytes", "w"))
config = engine.llm_engine.vllm_config
json.dump({
    "tokens": sum(len(ids) for part in (first, cached) for ids, _ in part), "prompt_tokens": sum(map(len, scored)),
    "runner": "V2" if config.use_v2_model_runner else "V1", "device": torch.cuda.get_device_name(0),
    "torch": torch.__version__, "vllm": importlib.metadata.version("vllm"),
    "compile_cache": config.compute_hash(), "additional_config": repr(config.additional_config),
}, open(answer, "w"))
"""


def entry_point(folder: Path) -> None:
    """The entry point that an installation of the package adds to its files (pyproject.toml): vLLM finds the plugin by
    it."""
    facts = folder / f"{PACKAGE}-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 0\n")
    (facts / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PACKAGE} = {PACKAGE}.integrations.vllm:plugin\n")


def main(out: Path, name: str) -> int:
    align_gpu.made(out, [name])
    model = out / name / "model"
    base = {key: value for key, value in os.environ.items() if key != "RLK_VLLM"}
    base |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    path = [entry for entry in base.get("PYTHONPATH", "").split(os.pathsep) if entry]
    without = [entry for entry in path if not (Path(entry) / PACKAGE).is_dir()]
    own = [entry for entry in path if entry not in without] or [str(ROOT / "python")]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        entry_point(folder)

        def start(kind: str, entries: list[str]) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", ROLLOUT, str(model), str(folder / kind), kind]
            return subprocess.Popen(command, env=base | {"PYTHONPATH": os.pathsep.join(entries)}, cwd=folder / "work")

        (folder / "work").mkdir()
        if start("absent", without).wait() != 0:
            raise RuntimeError("the process without the package failed")
        beside = {"off": start("off", [*own, str(folder), *without]), "again": start("again", without)}
        for kind, process in beside.items():
            if process.wait() != 0:
                raise RuntimeError(f"the process {kind} failed")
        facts = {kind: json.loads((folder / kind).read_text()) for kind in ("absent", "off", "again")}
        texts = {kind: (folder / f"{kind}.bytes").read_bytes() for kind in facts}
    sums = {kind: hashlib.sha256(text).hexdigest() for kind, text in texts.items()}
    result = {
        "model": name, "facts": facts, "size": len(texts["absent"]), "sha256": sums,
        "off_is_absent": texts["off"] == texts["absent"], "again_is_absent": texts["again"] == texts["absent"],
    }  # fmt: skip
    (out / name / "off.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(not (result["off_is_absent"] and result["again_is_absent"] and facts["off"] == facts["absent"]))


if __name__ == "__main__":
    for variable, value in align_gpu.ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if len(sys.argv) != 3 or sys.argv[2] not in align_gpu.SHAPES:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2]))
