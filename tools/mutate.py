#!/usr/bin/env python3
"""Plants faults one at a time, runs the tests that should notice, and prints the faults that no test noticed.

    python tools/mutate.py --list                        # the faults that would be planted
    python tools/mutate.py --layer python                # the drawn faults of one layer
    python tools/mutate.py --only python/rl_kernel_native/ops/pack.py:41:bound

Faults are drawn by a rule: every file and every kind of fault in turn, at a place that the seed picks. The work happens
in a copy of the tree, ``build/mutate``. The extension and the C++ tests concerned are built there incrementally; a
fault in Python needs no build. A fault that does not compile is drawn again. So is a fault that does not change the
object code: either the compiler shows it equivalent, or it lies in device code. A test that does not end counts as
having noticed the fault. EQUIVALENT lists faults that change nothing observable, with the reason; these count neither
way.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import functools
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "python/rl_kernel_native"
# Files of each layer. Headers of contracts are left out, since a pure declaration of shapes and types has no place for
# a fault.
LAYERS = {
    "python": [f"{PACKAGE}/ops/*.py", f"{PACKAGE}/_*.py"],
    "bindings": ["cpp/bindings/*.cpp", "cpp/bindings/*.h"],
    "kernels": [
        "cpp/cpu/*.cpp",
        "cpp/cpu/*.h",
        "cpp/include/rlk/kernels/*.h",
        "cpp/include/rlk/elementwise/*.h",
        "cpp/include/rlk/math/*.h",
    ],
}
LEFT_OUT = {"_trace.py", "_types.py", "_machine.py", "_variants.py", "_blas.py", "__init__.py", "module.cpp"}
COUNT = {"python": 70, "bindings": 30, "kernels": 60}

# Tests of files that belong to no operator.
SHARED = {
    "_arithmetic": ["test_sum_order", "test_linear", "test_torch"],
    "_check": ["test_bad_input", "test_words", "test_token_model"],
    "_call": ["test_engine", "test_torch"],
    "_composed": ["test_engine", "test_silu_mul_torch", "test_rms_norm_torch"],
    "_contract_terms": ["test_contract"],
    "_dispatch": ["test_pairs", "test_bad_export", "test_frameworks", "test_bad_input", "test_out_writes"],
    "_cures": ["test_cures"],
    "_in_graph": ["test_changing_numbers", "test_engine"],
    "_jax_checks": ["test_jax"],
    "_metrics": ["test_denominators", "test_policy_loss"],
    "_penalties": ["test_process_logits", "test_sample"],
    "_rewards": ["test_group_advantage"],
    "_main_grad": ["test_linear_bad_output", "test_rms_norm_engine", "test_overlaps"],
    "_engine": ["test_engine", "test_torch"],
    "_native": ["test_interface", "test_doctor"],
    "_operator": ["test_engine", "test_torch"],
    "_register": ["test_engine", "test_torch", "test_fake_tensors"],
    "_rejection": ["test_verify_draft"],
    "_rollout_presets": ["test_presets", "test_verl_advantages"],
    "_run": ["test_engine", "test_torch"],
    "_schema": ["test_engine", "test_fake_tensors"],
    "_described": ["test_fake_tensors", "test_engine", "test_token_model"],
    "_transforms": ["test_engine", "test_torch", "test_linear_func"],
    "_workspace": ["test_linear_logprob", "test_torch"],
    "attention_merge": ["test_attention_partials", "test_attention_partials_bad_input"],
    "linear_cross_entropy": [
        "test_linear_logprob_loss",
        "test_token_accuracy",
        "test_label_smoothing",
        "test_denominators",
        "test_pairs",
    ],
    "policy_loss": ["test_token_weight"],
    "value_loss": ["test_token_weight"],
    "ndarray": ["test_bad_export", "test_bad_input", "test_words"],
    "tokens": ["test_token_model", "test_exact_bounds"],
}
# Tests of C++ files whose names begin with no operator's name.
OF_STEM = {
    "cache_append": ["kv_cache_append"], "byte_copy": ["pack"], "covariance": ["covariance_mask"],
    "importance": ["importance_weights"], "mismatch": ["mismatch_metrics"], "mufu": ["logprob"],
    "optimal": ["optimal_token_baseline"], "policy": ["policy_loss"], "preference": ["preference_loss"],
    "process_logits": ["process_logits", "sample"], "reward": ["scatter_rewards"],
    "rejection": ["policy_loss", "importance_weights"], "sequence": ["sequence_logprob", "policy_loss"],
    "scored": ["linear_logprob"], "softmax": ["logprob"], "span": ["scatter_rewards"], "value": ["value_loss"],
    "team_sum": ["group_advantage", "masked_whiten"], "merge_order": ["group_advantage"],
    "central": ["value_loss", "mismatch_metrics", "importance_weights"], "packed_fields": ["policy_loss"],
    "moment": ["group_advantage", "masked_whiten"], "philox": ["random_bits", "sample"], "mma_model": ["linear"],
    "token_operators": [
        "covariance_mask", "importance_weights", "kl", "masked_whiten", "mismatch_metrics", "optimal_token_baseline",
        "value_loss",
    ],
    "token": ["kl", "value_loss", "sequence_logprob", "policy_loss"], "call": ["workspace", "torch", "frameworks"],
    "plain_tokens": ["kl", "policy_loss"], "flag_words": ["pack", "scatter_rewards"], "lora": ["linear_logprob"],
    "tree_sum": ["sequence_logprob", "linear"], "exp": ["kl", "policy_loss", "logprob"], "log": ["logprob", "kl"],
    "sigmoid": ["preference_loss", "silu_mul"], "tanh": ["logprob", "silu_mul"], "erf": ["silu_mul"],
    "half": ["linear", "rms_norm"], "torch_state": ["torch", "engine"], "row_integers": ["sample", "random_bits"],
    "isa": ["logprob", "kl"], "rows": ["rms_norm", "silu_mul"], "simd": ["logprob", "kl", "rms_norm"],
    "thread_pool": ["logprob", "gae"], "divisor": ["policy_loss"], "vec4": ["policy_loss"], "ieee": ["kl", "logprob"],
    "row_array": ["sample", "random_bits"], "workspace": ["linear_logprob"], "random_words": ["random_bits"],
    "row_split": ["silu_mul", "embedding"], "elementwise": ["silu_mul"],
}  # fmt: skip
ANY = ["test_exact_bounds", "test_out_writes", "test_strides", "test_overlaps", "test_bad_input", "test_token_model",
       "test_other_device"]  # fmt: skip
# Compiled calls run the same formulas, so their tests are left out for a file that is not part of the way to torch.
OF_TORCH = re.compile(r"python/rl_kernel_native/(_\w+|ops/\w+_(torch|traced|composed|autograd))\.py")

# (path, line with the fault) -> why no test can notice. If a line changes, its entry leaves the table and is judged
# again.
EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "cpp/cpu/group_advantage.cpp",
        "const std::int64_t size = p.num_sequences / std::min<std::int64_t>(groups.count(), 1);",
    ): "how many groups a thread takes at once; sequences without a group were refused above",
    (
        "cpp/cpu/importance_weights_simd.cpp",
        "for (std::int64_t k = 0; k <= count; k += kLanes) {",
    ): "a load and a store of 0 elements touch nothing",
    (
        "cpp/cpu/masked_whiten.cpp",
        "all.least = o.least <= all.least ? o.least : all.least;",
    ): "equal minima differ in the sign of zero alone, which a comparison and a magnitude do not see",
    (
        "cpp/cpu/pack.cpp",
        "while (t < p_.num_tokens && (position < 0 ? at(t) < 0 : at(t) == position + t + first)) ++t;",
    ): "runs of tokens that are copied at once end early; kept tokens have ascending positions, so none ends late",
    (
        "cpp/cpu/rope_simd.cpp",
        "if (second >= 0) store_at<T>(row.y + at_b, 0, second, b);",
    ): "a store of 0 elements writes nothing",
}

UNDECIDED = "undecided"  # the machine is busy, or a test fails without the fault: it counts neither way
NO_BUILD, SAME_CODE = "does not compile", "same object code"
TEST_LIMIT_S = 180  # limit of a test, which normally takes seconds


class Fault(NamedTuple):
    layer: str
    path: str
    line: int
    kind: str
    begin: int  # place of the replaced text in the file
    end: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.kind}"


COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
SUMS = {"+": "-", "-": "+", "*": "+", "//": "*", "<<": ">>", ">>": "<<"}


def python_faults(source: str) -> Iterator[tuple[str, int, int, str]]:
    """Each possible fault: its kind, begin and end of the replaced text, and the replacement."""
    encoded, starts = source.encode(), [0]
    for line in encoded.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)

    def at(line: int, column: int) -> int:
        place = starts[line - 1] + column
        return place if source.isascii() else len(encoded[:place].decode())

    def between(left: ast.expr, right: ast.expr, table: dict[str, str]) -> tuple[int, int, str] | None:
        begin = at(left.end_lineno or 0, left.end_col_offset or 0)
        gap = source[begin : at(right.lineno, right.col_offset)]
        found = re.search(r"is not|<<|>>|//|[<>=!]=|\bis\b|[<>+*-]", gap)
        if not found or found[0] not in table:
            return None
        return begin + found.start(), begin + found.end(), table[found[0]]

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                if place := between(left, right, COMPARISONS):
                    yield "bound", *place
        elif isinstance(node, ast.BinOp):
            if place := between(node.left, node.right, SUMS):
                yield "sum", *place
        elif isinstance(node, ast.BoolOp):
            begin = at(node.values[0].end_lineno or 0, node.values[0].end_col_offset or 0)
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            where = source.index(old, begin)
            yield "logic", where, where + len(old), new
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            begin = at(node.lineno, node.col_offset)
            yield "not", begin, begin + 4, ""
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            begin, end = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
            yield "constant", begin, end, str(node.value + 1)
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            begin, end = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
            yield "flag", begin, end, str(not node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            begin, end = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
            yield "call", begin, end, "None"
        elif isinstance(node, ast.If):
            begin = at(node.test.lineno, node.test.col_offset)
            end = at(node.test.end_lineno or 0, node.test.end_col_offset or 0)
            yield "branch", begin, end, "False"


CPP_KINDS: dict[str, list[tuple[str, dict[str, str]]]] = {
    "bound": [(r"(?<=[\w)\]]) (<|<=|>|>=) (?=[\w(-])", COMPARISONS)],
    "equality": [(r"(?<=[\w)\]]) (==|!=) (?=[\w(-])", COMPARISONS)],
    "sum": [(r"(?<=[\w)\]]) (\+|-|\*) (?=[\w(])", SUMS)],
    "logic": [(r" (&&|\|\|) ", {"&&": "||", "||": "&&"})],
    "extremum": [(r"\bstd::(max|min)\b", {"max": "min", "min": "max"})],
    "constant": [(r"(?<=[ (])(0\.0f|1\.0f|0\.5f)(?=[,;) ])", {"0.0f": "1.0f", "1.0f": "0.0f", "0.5f": "0.25f"})],
    "not": [(r"if \((!)", {"!": ""})],
    "call": [(r"(?m)^  +((?:check|require|refuse|note|count)\w*\([^;\n]*\));", {})],
}


def cpp_faults(source: str) -> Iterator[tuple[str, int, int, str]]:
    blank = re.sub(
        r'//[^\n]*|"(?:[^"\\\n]|\\.)*"|^#if defined\(__CUDA_ARCH__\)[\s\S]*?^#(?=else|endif)|^#[^\n]*|template <[^\n]*'
        r"|\boperator\S+",
        lambda m: re.sub(r"[^\n]", " ", m[0]), source, flags=re.M,
    )  # fmt: skip
    for kind, patterns in CPP_KINDS.items():
        for pattern, table in patterns:
            for found in re.finditer(pattern, blank):
                yield kind, found.start(1), found.end(1), table.get(found[1], "(void)0")


def read_by_the_cpu() -> set[Path]:
    """Files that the CPU's extension is compiled from. Headers for devices alone are left to the tests of these
    devices."""
    left = [p for folder in ("cpp/cpu", "cpp/ops", "cpp/bindings") for p in (ROOT / folder).glob("*.cpp")]
    found = set(left)
    while left:
        path = left.pop()
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.M):
            for folder in (path.parent, ROOT, ROOT / "cpp" / "include"):
                header = (folder / name).resolve()
                if header.is_file() and header not in found:
                    found.add(header)
                    left.append(header)
    return found


@functools.cache
def faults_of(layer: str) -> list[Fault]:
    found = []
    paths = sorted({p for pattern in LAYERS[layer] for p in ROOT.glob(pattern)})
    compiled = read_by_the_cpu()
    for path in paths:
        if path.name in LEFT_OUT or (path.suffix == ".h" and path not in compiled):
            continue
        source, name = path.read_text(), str(path.relative_to(ROOT))
        of_file = python_faults(source) if path.suffix == ".py" else cpp_faults(source)
        for kind, begin, end, text in of_file:
            found.append(Fault(layer, name, source.count("\n", 0, begin) + 1, kind, begin, end, text))
    return found


def drawn(layer: str, count: int, seed: int, of: str = "*") -> list[Fault]:
    """Takes files in turn, and from each file the kind that was drawn least so far."""
    rng = random.Random(f"{layer} {seed}")
    left: dict[str, list[Fault]] = {}
    for fault in faults_of(layer):
        if fnmatch.fnmatch(fault.path, of):
            left.setdefault(fault.path, []).append(fault)
    kinds: Counter[str] = Counter()
    chosen: list[Fault] = []
    while left and len(chosen) < count:
        paths = sorted(left)
        rng.shuffle(paths)
        for path in paths[: count - len(chosen)]:
            least = min(kinds[f.kind] for f in left[path])
            fault = rng.choice([f for f in left[path] if kinds[f.kind] == least])
            kinds[fault.kind] += 1
            chosen.append(fault)
            left[path] = [f for f in left[path] if f.line != fault.line]
            if not left[path]:
                del left[path]
    return sorted(chosen)


def redrawn(fault: Fault, used: set[str]) -> Fault | None:
    """Another fault of the same file, and of the same kind if there is one."""
    left = [f for f in faults_of(fault.layer) if f.path == fault.path and f.name not in used]
    left.sort(key=lambda f: (f.kind != fault.kind, abs(f.line - fault.line)))
    return left[0] if left else None


def tests_of(fault: Fault) -> tuple[list[str], list[str], list[str]]:
    """The operator's own tests, its C++ tests, and the tests of shared files and of all operators."""
    stem = Path(fault.path).stem.lstrip("_")
    for suffix in ("_torch", "_traced", "_composed", "_autograd", "_backward", "_kernels", "_fill", "_lists"):
        stem = stem.removesuffix(suffix)
    stem = {"policy_spec": "policy_loss", "preference_kinds": "preference_loss"}.get(stem, stem)
    parts = [stem]
    files = {p.stem: str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py")}
    own = sorted(name for name in files if name.startswith(f"test_{stem}"))
    shared = SHARED.get(Path(fault.path).stem, [])
    if not own and not fault.path.endswith(".py"):
        operators = [p.stem for p in (ROOT / "cpp/include/rlk/ops").glob("*.h") if stem.startswith(p.stem)]
        longest = [max(operators, key=len)] if operators else []
        parts = longest or next((OF_STEM[k] for k in sorted(OF_STEM, key=len)[::-1] if stem.startswith(k)), [])
        own = sorted(name for part in parts for name in files if name.startswith(f"test_{part}"))
    compiled = sorted({p.stem for part in parts for p in (ROOT / "tests/cpp").glob(f"test_{part}*.cpp")})
    own.sort(key=lambda name: (name.endswith("_fuzz"), not name.endswith("_bad_input")))  # the fastest first
    others = [name for name in dict.fromkeys([*shared, *ANY]) if name not in own]
    return (
        *([files[name] for name in names if name in files] for names in (own, others)),
        compiled,
    )


class Copy:
    """A copy of the tree in build/mutate, in which faults are planted."""

    def __init__(self, jobs: int) -> None:
        self.root, self.jobs = ROOT / "build" / "mutate", jobs
        self.of_tree: dict[str, bytes] = {}
        self.tree = ROOT / "build" / "mutate_tree"  # the Python files without a fault
        self.root.mkdir(parents=True, exist_ok=True)
        for name in ("python", "cpp", "tests", "cmake", "bench", "tools", "examples", "docs"):
            self.copy(ROOT / name)
        for path in ROOT.glob("*.*"):
            if path.is_file():
                self.refresh(path)

    def copy(self, folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                self.refresh(path)

    def refresh(self, path: Path) -> None:
        """Unchanged files keep their time stamps, so that a build is incremental."""
        to = self.root / path.relative_to(ROOT)
        if to.exists() and to.read_bytes() == path.read_bytes():
            return
        to.parent.mkdir(parents=True, exist_ok=True)
        to.unlink(missing_ok=True)
        shutil.copyfile(path, to)

    def build(self, *targets: str) -> bool:
        """Whether the targets compile. The extension lies next to the copy's Python files."""
        commands = [["cmake", "--build", "build/cpu", "--parallel", str(self.jobs), "--target", *targets]]
        if not (self.root / "build" / "cpu" / "build.ninja").exists():
            options = ["-DRLK_BUILD_PYTHON=ON", "-DRLK_BUILD_BENCH=OFF", "-Wno-dev"]
            commands.insert(0, ["cmake", "--preset", "cpu", *options, f"-DPython_EXECUTABLE={sys.executable}"])
        for command in commands:
            if subprocess.run(command, cwd=self.root, capture_output=True).returncode:
                return False
        for made in (self.root / "build" / "cpu").glob("_C*.so"):
            to = self.root / PACKAGE / made.name
            to.unlink(missing_ok=True)
            shutil.copyfile(made, to)
        return True

    def code(self) -> dict[str, bytes]:
        """The code of each object file of the extension."""
        built = self.root / "build" / "cpu" / "CMakeFiles"
        objects = [p for of in built.glob("*.dir") if not of.name.startswith("test_") for p in of.rglob("*.o")]
        return {str(p): hashlib.sha256(p.read_bytes()).digest() for p in objects}

    def python_notices(self, fault: Fault, tests: list[str], limit_s: float) -> str:
        """The test that fails, or "" if none does."""
        if not tests:
            return ""
        options = [] if OF_TORCH.fullmatch(fault.path) else ["-k", "not compile"]
        try:
            done = self.pytest(self.root / "python", [*tests, *options], limit_s)
        except subprocess.TimeoutExpired:
            return f"{UNDECIDED}: no end in {limit_s:.0f} s"
        if done.returncode in (0, 5):  # 5: pytest found no test
            return ""
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
        if not failed and "Timeout" in done.stdout + done.stderr:
            return f"a test that takes more than {TEST_LIMIT_S} s"
        if failed and self.pytest(self.tree, [failed[1].partition("[")[0]], limit_s).returncode:
            return f"{UNDECIDED}: {failed[1]} fails without a fault"
        return failed[1] if failed else f"pytest ended with {done.returncode}"

    def pytest(self, package: Path, options: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-m",
                   "not gpu and not slow and not alone", f"--timeout={TEST_LIMIT_S}", "--timeout-method=thread",
                   *options]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=limit_s)

    def compiled_notice(self, tests: list[str]) -> str:
        """The same for C++ tests. A test that does not compile has noticed the fault, since static_asserts check
        constants."""
        for name in tests:
            if not self.build(name):
                return f"the compiler, in {name}"
            command = [f"build/cpu/{name}", "--gtest_brief=1", "--gtest_fail_fast"]
            try:
                done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, timeout=2 * TEST_LIMIT_S)
            except subprocess.TimeoutExpired:
                return f"{name}, without an end in {2 * TEST_LIMIT_S} s"
            if done.returncode:
                failed = re.search(r"^\[  FAILED  \] (\S+)", done.stdout, re.M)
                return f"{name}: {failed[1].rstrip(',') if failed else done.returncode}"
        return ""

    def plant(self, fault: Fault, limit_s: float) -> str:
        path = self.root / fault.path
        whole = path.read_text()
        own, others, compiled = tests_of(fault)
        path.write_text(whole[: fault.begin] + fault.text + whole[fault.end :])
        try:
            if fault.layer == "python":
                return self.python_notices(fault, [*own, *others], limit_s)
            if not self.build("rlk_core") or (fault.layer == "bindings" and not self.build("_C")):
                return NO_BUILD
            if self.code() == self.of_tree:
                return SAME_CODE
            first = path.suffix == ".cpp" and fault.layer == "kernels"  # C++ tests are then only linked
            by = self.compiled_notice(compiled) if first else ""
            if by:
                return by
            if not self.build("_C"):
                return NO_BUILD
            by = self.python_notices(fault, own, limit_s) or ("" if first else self.compiled_notice(compiled))
            return by or self.python_notices(fault, others, limit_s)
        finally:
            path.write_text(whole)


def planted_line(fault: Fault) -> str:
    source = (ROOT / fault.path).read_text()
    begin, end = source.rfind("\n", 0, fault.begin) + 1, source.find("\n", fault.end)
    return (source[begin : fault.begin] + fault.text + source[fault.end : end]).strip()


def shown(fault: Fault) -> str:
    source = (ROOT / fault.path).read_text()
    line = source.split("\n")[fault.line - 1].strip()
    return f"{line}   [{source[fault.begin : fault.end]} -> {fault.text or 'nothing'}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=LAYERS, action="append", help="one or more; all by default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, help="faults of each layer")
    parser.add_argument("--files", default="*", help="a pattern of the paths to draw from")
    parser.add_argument("--only", action="append", help="the name of a fault, as --list prints it; or part of one")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="of the compiler at once")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the tests of one fault")
    arguments = parser.parse_args()
    layers = arguments.layer or list(LAYERS)
    faults = [
        f for layer in layers for f in drawn(layer, arguments.count or COUNT[layer], arguments.seed, arguments.files)
    ]
    if arguments.only:
        everything = [f for layer in layers for f in faults_of(layer)]
        faults = [f for f in everything if any(part in f.name for part in arguments.only)]
    if arguments.list:
        for fault in faults:
            print(fault.name, "  ", shown(fault))
        print(
            f"{len(faults)} faults: {dict(Counter(f.layer for f in faults))}, {dict(Counter(f.kind for f in faults))}"
        )
        return 0
    copy = Copy(arguments.jobs)
    if not copy.build("_C"):
        print("the tree itself does not build")
        return 2
    copy.of_tree = copy.code()
    shutil.copytree(copy.root / "python", copy.tree, dirs_exist_ok=True)
    noticed: Counter[str] = Counter()
    survivors: list[Fault] = []
    used = {fault.name for fault in faults}
    left = faults[::-1]
    while left:
        fault = left.pop()
        if reason := EQUIVALENT.get((fault.path, planted_line(fault))):
            print(f"equivalent {fault.name}: {reason}", flush=True)
            continue
        began = time.monotonic()
        by = copy.plant(fault, arguments.limit)
        if by in (NO_BUILD, SAME_CODE):
            print(f"drawn anew {fault.name}: {by} ({time.monotonic() - began:.0f} s)", flush=True)
            if another := redrawn(fault, used):
                used.add(another.name)
                left.append(another)
            continue
        if by.startswith(UNDECIDED):
            print(f"{by}: {fault.name}", flush=True)
            continue
        noticed[fault.layer] += bool(by)
        if not by:
            survivors.append(fault)
        print(
            f"{'noticed ' if by else 'SURVIVES'} {fault.name} by {by or 'nobody'} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    copy.build("_C")
    total = sum(noticed.values()) + len(survivors)
    of_layer = {x: f"{noticed[x]} of {noticed[x] + sum(f.layer == x for f in survivors)}" for x in layers}
    print(f"\n{sum(noticed.values())} of {total} noticed: {of_layer}; survivors:")
    for fault in survivors:
        print(fault.name, "  ", shown(fault))
    return int(sum(noticed.values()) < 0.95 * total)


if __name__ == "__main__":
    sys.exit(main())
