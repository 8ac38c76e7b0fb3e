"""Every operator has all its pieces; each test checks one piece and has the piece's name."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS = sorted((ROOT / "cpp" / "include" / "rlk" / "ops").glob("*.h"))
OPS = [path.stem for path in CONTRACTS]

PIECES = {
    "contract": "cpp/include/rlk/ops/{op}.h",
    "binding": "bindings/{op}.cpp",
    "CPU backend": "cpu/{op}.cpp",
    "CUDA dispatch": "cuda/{op}/{op}.cpp",
    "CUDA kernel": "cuda/{op}/{op}*.cu",
    "CUDA figures": "cuda/{op}/README.md",
    "Python function": "python/rl_kernel_native/ops/{op}.py",
    "reference": "python/rl_kernel_native/reference/{op}.py",
    "C++ test": "tests/cpp/test_{op}.cpp",
    "Python test": "tests/ops/test_{op}.py",
    "microbenchmark": "bench/bench_{op}.cpp",
}
if (ROOT / "hip").is_dir():
    PIECES["HIP dispatch"] = "hip/{op}/{op}.cpp"
    PIECES["HIP kernel"] = "hip/{op}/{op}*.hip"
    PIECES["HIP notes"] = "hip/{op}/README.md"

# The most lines that a file may have. A longer file does more than one thing.
MAX_LINES = 700
SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".hip", ".py", ".cmake", ".md", ".in", ".toml"}
CODE = ("bindings", "cpp", "cpu", "cuda", "hip", "kernels")
FOLDERS = (*CODE, "python", "tests", "bench", "cmake", "docs", "tools")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in SUFFIXES and path.is_file() and "__pycache__" not in path.parts
) + sorted(path for path in ROOT.glob("*.*") if path.suffix in SUFFIXES or path.name == "CMakeLists.txt")
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

# A promise to do something later belongs in the issue tracker. The words are split, so that this file does not contain
# them.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK")) + r")\b")
# Names that say when something was made, or that praise it, instead of saying what it is.
OVERCLAIMING = re.compile(r"(^|_)(v2|v3|fast|opt|optimized|new|old|final)(_|\.|$)")


def test_there_is_an_operator() -> None:
    """An empty list would make every test below pass."""
    assert "logprob" in OPS
    assert len(FILES) > 60


# The two tables of operators, and how an operator's line in them begins. An operator made of other operators has no
# kernel of its own. Elementwise operators share one body and one microbenchmark.
OPERATOR_TABLE = "cpp/include/rlk/operators.inc"
ELEMENTWISE_TABLE = "cpp/include/rlk/elementwise.inc"
COMPOSED = (OPERATOR_TABLE, "RLK_COMPOSED({op}, ")
ELEMENTWISE = (ELEMENTWISE_TABLE, "RLK_ELEMENTWISE({op}, ")
BINDINGS = ("attention", "logprob", "row_operators", "sample", "token_operators")  # each serves several operators
TABLES = {
    "binding": [
        *((f"bindings/{name}.cpp", f"RLK_{kind}FUNCTION({{op}}, ") for name in BINDINGS for kind in ("", "EAGER_")),
        ("bindings/row_operators.cpp", '#include "rlk/ops/{op}.h"'),  # one function serves all gated products
    ],
    "CUDA dispatch": [("cuda/tokens/operators.inc", "RLK_TOKEN_OPERATOR({op}, "), COMPOSED, ELEMENTWISE],
    **{piece: [COMPOSED, ELEMENTWISE] for piece in ("CPU backend", "CUDA kernel", "CUDA figures")},
    **{piece: [COMPOSED, ELEMENTWISE] for piece in ("HIP dispatch", "HIP kernel", "HIP notes")},
    "microbenchmark": [ELEMENTWISE],
}


def in_table(op: str, piece: str) -> bool:
    return any("\n" + line.format(op=op) in (ROOT / table).read_text() for table, line in TABLES.get(piece, ()))


def test_what_is_composed_has_its_one_body() -> None:
    lines = re.findall(r"^RLK_COMPOSED\((\w+), ", (ROOT / OPERATOR_TABLE).read_text(), re.M)
    assert lines
    assert not [op for op in lines if not (ROOT / f"cpp/ops/{op}.cpp").is_file()]
    assert not [op for op in lines if list(ROOT.glob(f"cuda/{op}/*.cu")) or list(ROOT.glob(f"hip/{op}/*.hip"))]


def test_what_is_elementwise_has_its_formulas_and_no_kernel_of_its_own() -> None:
    table = (ROOT / ELEMENTWISE_TABLE).read_text()
    lines = set(re.findall(r"^RLK_ELEMENTWISE\((\w+), ", table, re.M))
    formulas = {path.stem for path in (ROOT / "cpp/include/rlk/elementwise").glob("*.h")}
    assert lines == formulas == set(re.findall(r'^#include "rlk/elementwise/(\w+)\.h"', table, re.M))
    own = (
        "cpu/{op}[._]*",
        "kernels/*/{op}[._]*",
        "cuda/{op}/*",
        "hip/{op}/*",
        "bench/bench_{op}.cpp",
    )
    assert not [path for op in lines for pattern in own for path in ROOT.glob(pattern.format(op=op))]


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("op", OPS)
def test_the_operator_has(op: str, piece: str) -> None:
    pattern = PIECES[piece].format(op=op)
    assert list(ROOT.glob(pattern)) or in_table(op, piece), f"{op} lacks its {piece}: {pattern}"


@pytest.mark.parametrize("op", OPS)
def test_the_dispatch_table_has_a_line_of(op: str) -> None:
    """The table declares the functions of every backend; a line that no backend defines fails at the link."""
    lines = (ROOT / OPERATOR_TABLE).read_text().splitlines() + (ROOT / ELEMENTWISE_TABLE).read_text().splitlines()
    begin = tuple(f"RLK_{line}({op}, " for line in ("RUNS", "RUNS_IN_WORKSPACE", "COMPOSED", "ELEMENTWISE"))
    assert [line for line in lines if line.startswith(begin)]


@pytest.mark.parametrize("op", [*OPS, "elementwise"])
def test_hip_kernels_are_built_and_emulated(op: str) -> None:
    """A kernel without a bundle would be missing at its launch, and a kernel that no test includes would never run."""
    if list((ROOT / "hip" / op).glob("*_kernels.hip")):
        assert re.search(rf"^rlk_bundle_hip\({op}\b", (ROOT / "cmake" / "Hip.cmake").read_text(), re.M)
        standin = [path.read_text() for path in (ROOT / "tests" / "hip").glob("hip_standin_*.cpp")]
        assert sum(f'#include "hip/{op}/{op}_kernels.hip"' in text for text in standin) == 1


def test_one_place_chooses_the_backend() -> None:
    """Only the dispatch compares device types. linear_logprob also asks for CUDA by name, since CUDA fuses it."""
    asking = [
        n for n, p in zip(NAMES, FILES, strict=True) if n.startswith("cpp/ops/") and "DeviceType::k" in p.read_text()
    ]
    assert {Path(n).stem.split("_")[0] for n in asking} == {"dispatch", "linear"}


def test_every_cuda_kernel_has_code_for_hopper() -> None:
    """CMake compiles <name>.cu once per architecture, and <name>_sm90.cu for sm_90a. No other suffix names an
    architecture."""
    kernels = list((ROOT / "cuda").rglob("*.cu"))
    assert not [path.name for path in kernels if re.search(r"_sm(?!90\.cu$)\d+", path.name)]
    once = {path for path in kernels if not path.name.endswith("_sm90.cu")}
    assert not [
        path.name for path in once if "namespace RLK_CUDA_ARCH" not in path.read_text().replace("rlk::cuda::", "")
    ]


def test_cmake_lists_the_parts_of_each_cuda_file_that_has_some() -> None:
    """A file that names its RLK_PART but has no list would not compile; the list of a whole file would repeat it."""
    listed = re.findall(r'^  "(\w+/\w+\.cu) [^"]+"', (ROOT / "cmake" / "Cuda.cmake").read_text(), re.M)
    files = {str(path.relative_to(ROOT / "cuda")): path.read_text() for path in (ROOT / "cuda").glob("*/*.cu")}
    assert listed
    assert sorted(listed) == sorted(name for name, text in files.items() if "RLK_PART" in text)


@pytest.mark.parametrize("op", OPS)
def test_the_docs_have_a_row_of(op: str) -> None:
    lines = (ROOT / "docs" / "operators.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("|") and re.search(rf"\b{op}\b", line)]
    assert rows, f"docs/operators.md has no table row that mentions {op}"


@pytest.mark.parametrize("op", OPS)
def test_the_benchmark_against_peers_knows(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    from rl_kernel_native.bench.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main([op, "--help"])
    assert ended.value.code == 0
    assert f"bench {op}" in capsys.readouterr().out


@pytest.mark.parametrize("op", OPS)
def test_the_operator_has_example_inputs(op: str) -> None:
    """The doctor's self-test, the bench's command and the certificate use these inputs."""
    from rl_kernel_native.cases import CASES

    assert op in CASES, f"no module of rl_kernel_native/cases has CASES[{op!r}]"
    assert CASES[op].checks is not None
    assert CASES[op].bench is not None


def test_every_module_of_cases_is_found() -> None:
    """The package imports exactly the modules in its folder. This test notices a module without CASES, and a module
    that packaging leaves out."""
    from rl_kernel_native import cases

    modules = {path.stem for path in (PACKAGE / "cases").glob("[!_]*.py")}
    assert modules == {name for name in vars(cases) if name in modules}
    assert len(cases.CASES) > len(modules) > 5


@pytest.mark.parametrize("op", OPS)
def test_the_package_exports(op: str) -> None:
    import rl_kernel_native

    assert callable(getattr(rl_kernel_native, op))
    assert op in rl_kernel_native.__all__
    assert getattr(rl_kernel_native, op).__doc__
    assert callable(getattr(rl_kernel_native, f"{op}_reference"))


@pytest.mark.parametrize("name", ["README.md", "docs/numerics.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_the_repository_has(name: str) -> None:
    assert (ROOT / name).is_file()


def test_the_numerical_contract_holds_all_ten_rules() -> None:
    text = (ROOT / "docs" / "numerics.md").read_text()
    assert [n for n in range(1, 11) if not re.search(rf"(?m)^(#+ )?{n}\. ", text)] == []


# The folder of a test file by its name; the first matching pattern decides. A test that matches no other pattern
# belongs to all operators, in ops/. Any other module is shared by tests, in support/.
PLACES = [
    (".", "__init__.py conftest.py run_gpu.py gpu_log.py check_gpu_log.py"),
    ("hip", "hip_* test_hip*"),
    ("gpu", "*.cu *_plans.* plan_memory.h test_few_multiprocessors.cpp"),
    ("cpp", "*.cpp *.h"),
    ("ops", " ".join(f"test_{op}.py test_{op}_*.py" for op in OPS)),
    (
        "torch",
        "test_autocast* test_blas* test_changing_numbers* test_compiled_transforms* test_engine* test_fake_tensors*",
    ),
    ("torch", "test_nn* test_patch_* test_torch*"),
    ("frameworks", "*_frameworks.py test_example_* test_frameworks* test_integrations_* test_jax* test_megatron*"),
    ("frameworks", "test_oldest_numpy* test_presets* test_switch* test_verl_* test_vllm*"),
    (
        "tools",
        "test_bench* test_certify* test_charts* test_check_prose* test_command* test_compare* test_contract*",
    ),
    (
        "tools",
        "test_cuda_* test_cures* test_demo* test_digest* test_docs* test_docstrings* test_doctor* test_gpu_log*",
    ),
    (
        "tools",
        "test_interface* test_layout* test_mutate* test_pages* test_semantics* test_trace* test_variants* test_wheels*",
    ),
    ("tools", "test_align_* test_simd_code* test_workflows*"),
    ("ops", "test_*"),
    ("support", "*"),
]


def test_tests_are_in_the_folder_of_their_kind() -> None:
    found = {name: name.split("/") for name in NAMES if name.startswith("tests/") and not name.endswith(".md")}
    assert {parts[1] for parts in found.values() if len(parts) > 2} == {folder for folder, _ in PLACES} - {"."}
    wrong = {}
    for name, parts in found.items():
        (folder, *_) = (to for to, patterns in PLACES if any(fnmatchcase(parts[-1], p) for p in patterns.split()))
        if parts[1:-1] != ([] if folder == "." else [folder]):
            wrong[name] = f"belongs in tests/{folder}, or in PLACES of this test with its folder"
    assert not wrong


def test_files_are_short() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in zip(NAMES, FILES, strict=True)}
    long = {name: n for name, n in lengths.items() if n > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines: {long}"


def test_nothing_is_left_for_later() -> None:
    found = {}
    for name, path in zip(NAMES, FILES, strict=True):
        lines = [i for i, line in enumerate(path.read_text().splitlines(), 1) if UNFINISHED.search(line)]
        if lines:
            found[name] = lines
    assert not found


PACKAGE = ROOT / "python" / "rl_kernel_native"
LIBRARY = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
LIBRARY = {name.removesuffix("__init__").removesuffix("."): path for name, path in LIBRARY.items()}


def imports_of(module: str) -> set[str]:
    """Modules of the library that a module imports: at its top, inside a function, or only for annotations. The result
    leaves out the package itself, which users import and modules that work as user code import, too."""
    parts = module.split(".") if module else []
    folder = parts if LIBRARY[module].name == "__init__.py" else parts[:-1]
    found = set()
    left: list[ast.AST] = [ast.parse(LIBRARY[module].read_text())]
    while left:
        node = left.pop()
        left += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and node.level:
            of = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
            base = ".".join(part for part in of if part)
            names = {f"{base}.{alias.name}".lstrip(".") for alias in node.names}
            found |= names & set(LIBRARY)
            if not names <= set(LIBRARY):
                found.add(base)
    return (found & set(LIBRARY)) - {module, ""}


def test_imports_go_one_way() -> None:
    """From commands to operators, to the engine, to its base: no two modules import each other."""
    left = {module: imports_of(module) for module in LIBRARY}
    assert left["ops.kl"] >= {"_call", "_operator"}  # so relative imports are resolved
    assert left["integrations.vllm"] >= {"integrations.vllm.hooks"}
    while ready := [module for module, found in left.items() if not found & set(left)]:
        for module in ready:
            del left[module]
    assert not left, f"in circles, or above one: {sorted(left)}"


def test_the_engine_knows_arguments_from_descriptions_alone() -> None:
    """No layer that operators share compares a name with that of one operator's array."""
    descriptions = (PACKAGE / "ops").glob("*_traced.py")
    arrays = {"target", "main_grad", *re.findall(r"\b(\w+)[?!]", "".join(path.read_text() for path in descriptions))}
    for module in ("_composed", "_described", "_engine", "_register", "_run", "_torch", "_transforms"):
        compared = [x for x in ast.walk(ast.parse(LIBRARY[module].read_text())) if isinstance(x, ast.Compare)]
        texts = {x.value for of in compared for x in ast.walk(of) if isinstance(x, ast.Constant)}
        assert not texts & arrays, module


def test_names_say_what_a_file_is() -> None:
    assert not [name for name in NAMES if OVERCLAIMING.search(Path(name).name)]


@pytest.mark.parametrize("name", [p.name for p in (ROOT / "bindings").iterdir() if p.stem != "ndarray"])
def test_only_ndarray_knows_dlpack(name: str) -> None:
    """A binding moves fields; only one file knows how an array is read."""
    binding = (ROOT / "bindings" / name).read_text()
    assert "DLTensor" not in binding
    assert "DLManagedTensor" not in binding


def test_the_library_never_exits_the_process() -> None:
    code = [
        p
        for p in FILES
        if p.suffix in {".cpp", ".cu", ".cuh", ".h"}
        and p.relative_to(ROOT).parts[0] in CODE
        and "emulation" not in p.parts
    ]
    assert not [str(p) for p in code if re.search(r"(?<![\w.>])(std::)?(exit|abort|quick_exit)\s*\(", p.read_text())]
