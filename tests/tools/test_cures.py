"""Errors name the remedy, and results print with their names."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlpack
import rl_kernel_native as rk
from call_cases import CALLS, OPERATORS, Draw, Operand

L = np.full((2, 3), -1.0, np.float32)
A, M = np.array([1.0, -1.0], np.float32), np.ones((2, 3), np.float32)
S = np.zeros(2, np.float32)

CURES = {
    "no spec": (
        lambda: rk.policy_loss(L, L, A, M),
        TypeError,
        r"spec: expected a PolicySpec, got NoneType; .*rk\.presets\.trl\(loss_type=\"grpo\"\)",
    ),
    "no mask": (
        lambda: rk.policy_loss(L, L, A, spec=rk.PolicySpec()),
        TypeError,
        r"^mask: expected an array of the shape of logprob, .*got None; a token counts where .*counts every token",
    ),
    "no mask of the function without autograd": (
        lambda: rk.policy_loss_and_grad(L, L, A, spec=rk.PolicySpec()),
        TypeError,
        r"^mask: expected an array of the shape of logprob, .*got None; a token counts where .*counts every token",
    ),
    "a spec by name": (
        lambda: rk.policy_loss(L, L, A, M, spec="grpo"),
        TypeError,
        r"spec: expected a PolicySpec, got 'grpo'; .*presets",
    ),
    "TRL's dapo": (
        lambda: rk.policy_loss(L, L, A, M, spec=rk.presets.trl(loss_type="dapo")),
        ValueError,
        "denominator: expected a number .*the global number of scored tokens, num_items_in_batch / num_processes",
    ),
    "TRL's sigmoid": (
        lambda: rk.preference_loss(S, S, S, S, kind="sigmoid"),
        ValueError,
        "kind: expected .*got 'sigmoid', which is \"dpo\" here",
    ),
}


def of_torch() -> dict[str, tuple[Any, type[Exception], str]]:
    """Calls with torch's tensors and modules."""
    torch = pytest.importorskip("torch")
    nn, x, ids = torch.nn, torch.ones(2, 4), torch.arange(2)
    a, m, s = torch.tensor([1.0, -1.0]), torch.ones(2, 3), torch.zeros(2)
    lp = torch.full((2, 3), -1.0)
    scores, spec = rk.sequence_logprob(lp, m), rk.PolicySpec()
    use_weight, no_field = r"got \w+; pass weight\.weight$", "; its fields are "

    def policy(lp: Any, a: Any = a, m: Any = m, **more: Any) -> Any:
        return rk.policy_loss(lp, more.pop("old", lp), a, m, spec=spec, **more)

    def preference(**more: Any) -> Any:
        return rk.preference_loss(s, s, **more)

    return {
        "a Linear": (lambda: rk.linear(x, nn.Linear(4, 4)), TypeError, use_weight),
        "an RMSNorm": (lambda: rk.rms_norm(x, nn.RMSNorm(4), 1e-6), TypeError, use_weight),
        "an Embedding": (lambda: rk.embedding(ids, nn.Embedding(4, 4)), TypeError, use_weight),
        "a head": (lambda: rk.linear_logprob(x, nn.Linear(4, 4), ids), TypeError, use_weight),
        "a head of a loss": (lambda: rk.linear_cross_entropy(x, nn.Linear(4, 4), ids), TypeError, use_weight),
        "a list of lengths": (
            lambda: rk.pack(lp, lengths=[2, 3]), TypeError, r"got list; pass torch\.tensor\(lengths\) or np\.array\(",
        ),
        "a list of offsets": (
            lambda: policy(lp.flatten(), cu_seqlens=[0, 3, 6]), TypeError, r"; pass torch\.tensor\(cu_seqlens\) or np",
        ),
        "a list of rewards": (lambda: rk.gae([1.0], [1.0]), TypeError, r"; pass torch\.tensor\(rewards\) or np\.arr"),
        "NumPy's target": (
            lambda: rk.logprob(x, ids.numpy()), TypeError,
            "; the first argument is an array of torch and target one of numpy: convert one of them$",
        ),
        "NumPy's target of a head": (
            lambda: rk.linear_logprob(x, x, ids.numpy()), TypeError, "argument is an array of torch and target",
        ),
        "NumPy's advantage": (
            lambda: policy(lp, A), TypeError, "argument is an array of torch and advantage one of numpy: convert",
        ),
        "integer advantages": (lambda: policy(lp, a.int()), TypeError, r"got int32; pass advantage\.float\(\)$"),
        "a logprob in bf16": (
            lambda: policy(lp.bfloat16(), old=lp), TypeError, r"got bfloat16; pass logprob\.float\(\)$"
        ),
        "a logprob in bf16 with a gradient": (
            lambda: policy(lp.bfloat16().requires_grad_(), old=lp), TypeError, r"got bfloat16; pass logprob\.float",
        ),
        "NumPy's float64": (
            lambda: policy(L.astype("float64"), A, M, old=L), TypeError, r"got float64; pass logprob\.astype",
        ),
        "a model in float64": (
            lambda: rk.linear(x.double(), x.double()), TypeError,
            r"got float64; pass x\.float\(\), or call model\.float\(\) for a model in float64$",
        ),
        "packed tokens without offsets": (
            lambda: policy(lp.flatten(), m=m.flatten()), ValueError, r"got \[2\]; packed sequences need cu_seqlens$",
        ),
        "a SequenceLogprob": (
            lambda: rk.preference_loss(scores, scores), TypeError, r"got SequenceLogprob; pass policy_chosen\.sum$",
        ),
        "logprobs of tokens": (
            lambda: rk.preference_loss(lp, lp), ValueError, r"got \[2, 3\]; sums over tokens are those of rk\.seq",
        ),
        "backward of a result": (lambda: policy(lp).backward(), AttributeError, no_field + r".*: use \.loss\.back"),
        "the loss of pairs": (lambda: preference().loss, AttributeError, no_field + r".*: use \.losses\.mean\(\)$"),
        "backward of pairs": (lambda: preference().backward(), AttributeError, no_field + r".*: use \.losses\.back"),
        "a field of no meaning": (lambda: scores.total, AttributeError, no_field + "sum, count$"),
        "no patch": (lambda: rk.status(nn.Linear(2, 2)), ValueError, r"; call rk\.patch_model\(model\) first$"),
    }  # fmt: skip


def test_errors_of_torchs_arrays_and_modules_name_their_cure() -> None:
    lacking = []
    for case, (call, kind, words) in of_torch().items():
        with pytest.raises(kind) as found:
            call()
        if not re.search(words, str(found.value)):
            lacking.append(f"{case}: {found.value}")
    assert not lacking, "\n".join(lacking)


class Module:
    def __init__(self, weight: Any) -> None:
        self.weight = weight


def made(value: Any, make: Any) -> Any:
    if isinstance(value, Operand):
        return make(value)
    return type(value)(made(v, make) for v in value) if type(value) in (tuple, list) else value


def of_numpy(o: Operand) -> np.ndarray:
    return np.ascontiguousarray(o.values).astype("float32" if o.dtype == "bfloat16" else o.dtype)


def wrong_calls(operator: str, make: Any, widen: Any, cast: str) -> Iterator[tuple[Any, str]]:
    """Calls with one array as a list, in float64, or as a module's weight, and the cure of each."""
    for seed in range(12):  # enough draws for every operator to use most of its arrays
        d = Draw(np.random.default_rng(seed))
        d.dtype = "float32"
        drawn = CALLS[operator](d)
        given = {name: made(value, make) for name, value in drawn.items()}
        for name in (k for k, v in drawn.items() if isinstance(v, Operand) and not v.written):
            x = given[name]
            yield given | {name: x.tolist()}, "torch.tensor(NAME)"
            yield given | {name: widen(x)}, cast
            yield given | {name: Module(x)}, "NAME.weight"


# What the extension says of an array that a call reads.
SAID = (
    r"(?!out\b|main_grad|k_cache|v_cache)(\w+): "
    r"expected (an array that speaks DLPack, got (list|Module)|dtype .*float32.*, got float64)"
)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("operator", sorted(set(OPERATORS) & set(CALLS) - {"tree_sum"}))  # which takes a list of arrays
def test_every_operator_says_what_to_do_about_a_wrong_array(operator: str, framework: str) -> None:
    kind: Any = (of_numpy, lambda x: x.astype("float64"), "NAME.astype('float32')")
    if framework == "torch":
        torch = pytest.importorskip("torch")
        kind = (lambda o: torch.from_numpy(of_numpy(o)), lambda x: x.double(), "NAME.float()")
    refused, lacking = 0, set()
    for arguments, cure in wrong_calls(operator, *kind):
        with contextlib.suppress(BufferError):
            try:
                getattr(rk, operator)(**arguments)
            except (TypeError, ValueError) as error:
                if said := re.match(SAID, str(error)):
                    refused += 1
                    if f"; pass {cure.replace('NAME', said[1])}" not in str(error):
                        lacking.add(str(error))
    assert not lacking, "\n".join(sorted(lacking))
    assert refused


def test_a_build_without_a_backend_says_how_to_build_it() -> None:
    """No index has wheels, so their names would lead nowhere."""
    from rl_kernel_native import _variants, doctor

    there = {"cu130": dlpack.CUDA, "rocm6": dlpack.ROCM}
    gpus = {"cu130": doctor.Device("cuda:0", "cuda", "H100", (9, 0)), "rocm6": doctor.Device("0", "rocm", "MI300X")}
    for variant, device in there.items():
        if variant == rk.variant:
            continue
        with pytest.raises((RuntimeError, TypeError)) as found:
            rk.sequence_logprob(dlpack.Exporter(L, device=device))
        for said in (str(found.value), doctor.backend(gpus[variant], [])["why"]):
            assert said.endswith(f"; {_variants.how_to_build(variant)}"), said


def test_a_result_without_the_protocols_of_an_array_is_still_a_tuple() -> None:
    import copy
    import pickle

    found = rk.policy_loss(L, L, A, M, spec=rk.PolicySpec())
    assert not hasattr(found, "__array__")
    assert type(copy.deepcopy(found)) is rk.PolicyLoss
    assert pickle.loads(pickle.dumps(rk.SequenceLogprob(1, 2))) == (1, 2)


@pytest.mark.parametrize("case", CURES)
def test_an_error_names_its_cure(case: str) -> None:
    call, error, words = CURES[case]
    with pytest.raises(error, match=words):
        call()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model's directory without a tokenizer, and the same model in memory."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=16, num_key_value_heads=1, bos_token_id=None, eos_token_id=2, pad_token_id=0, **size
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    import torch

    from rl_kernel_native.consistency.model import load_model

    return load_model(folder, None, torch.device("cpu"))


def prompts(folder: Path, line: str, encode: Any = None) -> Any:
    from rl_kernel_native.consistency.prompts import load_prompts

    path = folder.parent / "prompts.jsonl"
    path.write_text(line + "\n")
    return load_prompts(path, loaded(folder), 4, encode)


def beside_another_bos(folder: Path) -> None:
    import transformers

    policy = transformers.LlamaForCausalLM.from_pretrained(folder)
    trainer = transformers.LlamaForCausalLM.from_pretrained(folder)
    trainer.config.bos_token_id = 1
    rk.compare(policy, trainer, [[3, 4]], max_new_tokens=2)


def missing_extra(folder: Path) -> None:
    """`rlk` of an installed wheel without typer."""
    from rl_kernel_native.consistency import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main.importlib.util, "find_spec", lambda name: None)
        patch.setattr(main._variants, "installed", lambda: ["rl-kernel-cpu 0.1.0"])
        patch.setattr(sys, "argv", ["rlk", "compare"])
        with pytest.raises(SystemExit) as left:
            main.main()
        assert left.value.code == 2


# Errors of `rlk compare` with a model's directory as its argument.
CURES_OF_COMPARE: dict[str, tuple[Any, str]] = {
    "text without a tokenizer": (
        lambda folder: prompts(folder, '{"text": "a"}'),
        r"has no usable tokenizer .*; save one there by tokenizer\.save_pretrained, or give prompt_ids",
    ),
    "an empty prompt": (
        lambda folder: prompts(folder, '{"text": ""}', lambda text: []),
        "the prompt is empty; give at least one id, or a text that the tokenizer does not drop",
    ),
    "two checkpoints": (
        beside_another_bos,
        r"bos token: rollout has none, training has \[1\]; set bos_token_id alike in both",
    ),
    "a file for a model": (
        lambda folder: rk.compare(folder / "model.safetensors", None, [[1]]),
        "want the model's directory, got a file; give /",
    ),
    "a Hub id without a network": (
        lambda folder: rk.compare("nobody/none", None, [[1]]),
        r"Without a network, run `hf download nobody/none --local-dir DIR`",
    ),
    "a path of nothing": (
        lambda folder: rk.compare(folder / "nowhere", None, [[1]]),
        r"does not exist; give a directory, or a Hub id such as Qwen/Qwen3-0\.6B",
    ),
    "a wheel without its extra": (missing_extra, r'not installed; pip install "rl-kernel-cpu\[compare\]"'),
}


@pytest.mark.parametrize("case", CURES_OF_COMPARE)
def test_rlk_compare_names_the_cure(
    case: str, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    call, words = CURES_OF_COMPARE[case]
    try:
        call(checkpoint)
    except (ValueError, RuntimeError) as error:
        said = str(error)
    else:
        said = capsys.readouterr().err
    assert re.search(words, said), said


@pytest.mark.parametrize(
    ("absent", "call", "words"),
    [
        (name, call, f"{what}: expected torch .* transformers .*, found no {name} installed; .*")
        for what, call in {
            "patch_model": "rk.patch_model(None)",
            "status": "rk.status(None)",
            "rk.compare": "rk.compare(None, None, [[1]])",
        }.items()
        for name in ("torch", "transformers")
    ]
    + [
        ("trl", "rk.enable(rollout=None, trainer='trl')", "trl: expected version .*, found none installed; .*"),
        ("vllm", "rk.enable(rollout='vllm', trainer=None)", "vllm: expected version .*, found none installed; "),
        (
            "megatron",
            "rk.integrations.megatron.patch(None)",
            "megatron-core: expected .*, found none installed; ",
        ),
        ("vllm", "rk.integrations.vllm.enable()", "vllm: expected version .*, found none installed; "),
        ("trl", "rk.integrations.trl.enabled().__enter__()", "trl: expected version .*, found none installed; .*"),
        ("torch", "rk.integrations.trl.enabled()", "integrations.trl: expected torch .*, found none installed; "),
        (
            "torch",
            "rk.integrations.megatron.patch(None)",
            "integrations.megatron: expected torch .*, found none inst.*; ",
        ),
        ("torch", "rk.enable(trainer='trl')", "integrations.trl: expected torch .*, found none installed; "),
        ("torch", "rk.enable(rollout='vllm')", "vllm: expected version .*, found none installed; "),
        ("torch", "rk.nn", "rk.nn: expected torch .*, found none installed; "),
        ("torch", "import_module('rl_kernel_native.nn')", "rk.nn: expected torch .*, found none installed; "),
        ("jax", "rk.jax", "rk.jax: expected jax, found none installed; "),
    ],
)
def test_a_missing_package_is_named_with_its_installation(absent: str, call: str, words: str) -> None:
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {absent!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import os\n"
        "from importlib import import_module\n"
        "import rl_kernel_native as rk\n"
        "try:\n"
        f"    {call}\n"
        "except ImportError as error:\n"
        "    print(error, os.environ.get('RLK_VLLM'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert re.fullmatch(words + "pip install .* None\n", done.stdout), done.stdout + done.stderr


def test_a_loss_takes_what_pack_gives_without_max_tokens() -> None:
    """The tensors then end with slots that belong to no sequence, and no sum counts these."""
    torch = pytest.importorskip("torch")
    logprob = torch.tensor([[-1.0, -2.0, -9.0, -9.0], [-0.5, -0.25, -3.0, -9.0]])
    lengths, advantage, losses = torch.tensor([2, 3]), torch.tensor([1.0, -1.0]), []
    for most in (None, 5):
        packed = rk.pack([logprob, logprob - 0.125], lengths=lengths, max_tokens=most)
        new, old = packed.tensors
        mask = torch.ones_like(new)
        found = rk.policy_loss(new, old, advantage, mask, spec=rk.PolicySpec(), cu_seqlens=packed.cu_seqlens)
        losses.append(found.loss)
    assert torch.equal(*losses)


def results() -> dict[str, Any]:
    return {
        "PolicyMetrics": rk.policy_loss(L, L, A, M, spec=rk.PolicySpec()).metrics,
        "MismatchMetrics": rk.mismatch_metrics(L, L - np.float32(0.05)),
        "ValueMetrics": rk.value_loss(L, None, L, M).metrics,
        "ImportanceMetrics": rk.importance_weights(L, L, M, upper=2.0, return_metrics=True).metrics,
        "PreferenceMetrics": rk.preference_loss(S, S, S, S, kind="dpo").metrics,
    }


def test_metrics_print_with_their_names() -> None:
    for kind, metrics in results().items():
        shown = repr(metrics)
        assert re.fullmatch(rf"{kind}\(\w+=.*\)", shown), shown
        first = metrics.names[0]
        assert f"{first}={metrics.asdict()[first]:.6g}" in shown
    assert "histogram={0.01..0.1: 1}" in repr(results()["MismatchMetrics"]), "bins by their edges"


def test_metrics_without_values_print_all_the_same() -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert repr(rk.MismatchMetrics(torch.zeros(31))).startswith("MismatchMetrics(FakeTensor")


def test_what_is_served_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=16, num_key_value_heads=1, **size)
    model = transformers.LlamaForCausalLM(config)
    with caplog.at_level(logging.INFO, logger="rl_kernel_native"):
        rk.patch_model(model)
    lines = [record.getMessage() for record in caplog.records if record.name == "rl_kernel_native"]
    assert lines == [
        "patch_model: modules of LlamaForCausalLM that each operator serves: "
        "embedding 1, linear 8, rms_norm 3, rope 1, attention 1, silu_mul 1"
    ]


def test_trl_says_once_what_it_serves(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("trl")
    enabled = rk.integrations.trl.enabled
    with caplog.at_level(logging.INFO, logger="rl_kernel_native"), enabled(), enabled():
        pass
    lines = [record.getMessage() for record in caplog.records if record.name == "rl_kernel_native"]
    assert len(lines) == 1
    assert "GRPOTrainer's loss by policy_loss" in lines[0]


def test_a_silent_hub_is_asked_once_and_not_waited_for(tmp_path: Path) -> None:
    """A server accepts connections and never answers. 20 s allow for imports on a busy machine, but not for a retry."""
    code = (
        "import time; from rl_kernel_native.consistency import model; import huggingface_hub; "
        "model._HUB_SECONDS = 1.0; start = time.monotonic()\n"
        "try: model.find_directory('nobody/none')\n"
        "except model.BadInput as error: print(time.monotonic() - start, error)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
        server.setblocking(False)
        server.accept()[0].close()
        with pytest.raises(BlockingIOError):
            server.accept()
    seconds, _, said = done.stdout.partition(" ")
    assert float(seconds) < 20
    assert "the Hub does not answer (" in said
    assert "run `hf download nobody/none --local-dir DIR`" in said
