"""With the plugin off, vLLM's outputs equal, byte for byte, those of an environment without this package, on a CPU.

The test needs `tools/fetch_vllm.sh` and its folder on PYTHONPATH, like the tests of test_vllm.py.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import vllm_model
from rl_kernel_native.integrations import vllm as plugin

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and "RLK_REQUIRE_ENGINES" not in os.environ,
    reason="vllm is not on PYTHONPATH: tools/fetch_vllm.sh",
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_model.save(tmp_path_factory.mktemp("model"))


PACKAGE = "rl_kernel_native"
ROLLOUT = """
import importlib.util, json, sys

model, answer, off = sys.argv[1], sys.argv[2], sys.argv[3] == "off"
assert (importlib.util.find_spec("rl_kernel_native") is not None) == off
import host_platform  # a copy of cpu.py, which imports nothing of its package

host_platform.install()
if off:
    from rl_kernel_native.integrations import vllm as plugin

    plugin.plugin()  # the entry point, which an uninstalled source tree lacks
    assert plugin.enabled() is None
from vllm import LLM, SamplingParams

engine = LLM(
    model=model, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=128, enable_prefix_caching=True,
    max_num_batched_tokens=64, max_num_seqs=6, enforce_eager=True, block_size=16, seed=3,
)
prompts = [{"prompt_token_ids": [(7 * i * i + 3 * j) % 512 for j in range(20 + 9 * i)]} for i in range(8)]
common = {"max_tokens": 16, "ignore_eos": True, "detokenize": False, "logprobs": 4, "prompt_logprobs": 1}
how = [SamplingParams(temperature=0.0 if i == 2 else 1.0, top_p=0.9 if i == 3 else 1.0, **common) for i in range(8)]

def plain(scored):
    return [x and sorted((token, of.logprob.hex(), of.rank) for token, of in x.items()) for x in scored]

outputs = engine.generate(prompts, how, use_tqdm=False)
found = [[plain(o.prompt_logprobs), list(o.outputs[0].token_ids), plain(o.outputs[0].logprobs)] for o in outputs]
assert off == ("rl_kernel_native" in sys.modules)
json.dump(found, open(answer, "w"))
"""


def environment_without_the_package(folder: Path) -> list[str]:
    """A folder with everything that is installed but this package, for PYTHONPATH under ``python -S``."""
    folder.mkdir()
    for name in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(name).iterdir():
            if not entry.name.startswith((PACKAGE, "_" + PACKAGE)) and entry.suffix != ".pth":
                (folder / entry.name).symlink_to(entry)
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return [str(folder), *(path for path in others if not (Path(path) / PACKAGE).is_dir())]


def test_off_every_byte_is_that_of_an_environment_without_the_package(model: Path, tmp_path: Path) -> None:
    shutil.copy(Path(plugin.__file__).with_name("cpu.py"), tmp_path / "host_platform.py")
    base = {name: value for name, value in os.environ.items() if name not in ("RLK_VLLM", "PYTHONPATH")}
    own = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(Path(plugin.__file__).parents[3])]
    ways = {"absent": (["-S"], environment_without_the_package(tmp_path / "site")), "off": ([], own)}
    runs = {}
    for name, (flags, path) in ways.items():
        runs[name] = subprocess.Popen(
            [sys.executable, *flags, "-c", ROLLOUT, str(model), str(tmp_path / name), name],
            env=base | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, path)])},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
        )  # fmt: skip
    for name, run in runs.items():
        said, _ = run.communicate()
        assert run.returncode == 0, f"{name}: {said}"
    off, absent = ((tmp_path / name).read_bytes() for name in ("off", "absent"))
    assert len(off) > 10_000
    assert off == absent
