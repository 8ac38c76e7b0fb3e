"""Says what this installation contains, what it would run here and why, and whether its operators are right.

    rlk doctor [--json] [--warm], or python -m rl_kernel_native.doctor

Exit status: 0 healthy, 1 a self-test or --warm failed, or two variants are installed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import __version__, _blas, _dispatch, _native, _variants, cases, variant
from ._machine import cpu_model

_PEERS = ("torch", "jax", "cupy")


class Device(NamedTuple):
    """A processor on which operators may run."""

    name: str  # "cpu", "cuda:0"
    kind: str  # "cpu", "cuda", "rocm"
    model: str = ""
    capability: tuple[int, int] | None = None  # only for CUDA devices
    architecture: str | None = None  # only for ROCm devices, such as "gfx942"
    memory_gib: float | None = None


def examine(self_test: bool = True, warm: bool = False) -> dict[str, Any]:
    """The whole report, as one JSON object. With ``warm``, the report also has the results of :func:`compiled_ahead`
    for the GPUs."""
    torch = _import_torch()
    _dispatch.match_torch_threads()
    found, note = gpus(torch)
    devices = [Device("cpu", "cpu", cpu_model()), *found]
    report: dict[str, Any] = {
        "versions": versions(torch),
        "platform": {"system": platform.platform(), "machine": platform.machine()},
        "cpu": {
            "model": cpu_model(),
            "instruction_set": _native.module.cpu_isa(),
            "threads": _native.module.num_threads(),
            "logical_cores": os.cpu_count(),
        },
        "gpus": [gpu._asdict() for gpu in found],
        "gpu_note": note,
        "driver": nvidia_driver(),
        "built_architectures": _native.architectures(),
        "operators": {name: [backend(device) for device in devices] for name in cases.SELF_TESTS},
        "cublas": cublas_workspace(os.environ) if found else {"batch_invariant": None, "why": "no GPU"},
        "linear_engine": {device.name: linear_engine(device) for device in found},
        "installed_variants": installed_variants(),
        "warm": [compiled_ahead(device) for device in found] if warm else [],
        "self_tests": [],
    }
    if self_test:
        runnable = [device for device in devices if backend(device)["backend"] is not None]
        report["self_tests"] = [
            test for name, run in cases.SELF_TESTS.items() for test in _tests(name, run, runnable, torch)
        ]
    passed = all(test["passed"] is not False for test in report["self_tests"])
    warmed = all(row["error"] is None for row in report["warm"])
    report["healthy"] = passed and warmed and not report["installed_variants"]["conflict"]
    return report


def versions(torch: Any) -> dict[str, str | None]:
    """Versions of the package, of Python and of each array framework; None for an absent framework. The function
    imports no framework."""
    found: dict[str, str | None] = {
        "rl_kernel_native": __version__,
        "variant": variant,
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
    }
    for name in _PEERS:
        found[name] = _version_of(name)
    if torch is not None:
        found["torch"] = str(torch.__version__)  # metadata may lack the build, "+cpu" or "+cu130"
    return found


def _version_of(module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    for distribution in (module, f"{module}-cuda12x", f"{module}-cuda13x"):  # CuPy's wheels name the toolkit
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _import_torch() -> Any:
    """torch, or None if it is missing or broken, because the doctor must also work in broken installations."""
    try:
        import torch
    except Exception:
        return None
    return torch


def nvidia_driver() -> str | None:
    """Version of NVIDIA's kernel driver."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\S+)", text)
    return match.group(1) if match else None


def gpus(torch: Any) -> tuple[list[Device], str]:
    """The GPUs that torch sees, else those that the driver sees, and a sentence that says how they were found."""
    if torch is not None and torch.cuda.is_available():
        kind = "rocm" if torch.version.hip else "cuda"
        found = []
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            memory = round(p.total_memory / 2**30, 1)
            if kind == "cuda":
                found.append(Device(f"cuda:{i}", kind, p.name, (p.major, p.minor), memory_gib=memory))
            else:
                found.append(Device(f"cuda:{i}", kind, p.name, None, p.gcnArchName.split(":")[0], memory))
        return found, "as torch sees them"
    found, note = _hip_gpus() if variant == "rocm6" else _driver_gpus()
    if found and torch is not None:
        note += f"; torch {torch.__version__} cannot use them"
    return found, note


def _hip_gpus() -> tuple[list[Device], str]:
    """AMD GPUs found by hip-python, if that is installed."""
    try:
        hip = importlib.import_module("hip.hip")
    except Exception as error:  # hip-python raises its own errors if it cannot open its library
        if isinstance(error, ModuleNotFoundError):
            return [], "neither torch for ROCm nor hip-python (pip install hip-python) is here to ask"
        return [], f"hip-python cannot be imported: {error}"
    status, count = hip.hipGetDeviceCount()
    if int(status) != 0:
        return [], f"the HIP runtime reports {status}"
    found = []
    for i in range(count):
        properties = hip.hipDeviceProp_t()
        hip.hipGetDeviceProperties(properties, i)
        memory = round(properties.totalGlobalMem / 2**30, 1)
        architecture = properties.gcnArchName.decode().split(":")[0]
        found.append(Device(f"rocm:{i}", "rocm", properties.name.decode(), None, architecture, memory))
    return found, "as the HIP runtime sees them"


def _driver_gpus() -> tuple[list[Device], str]:
    """NVIDIA GPUs found through the driver's C interface."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [], "no NVIDIA driver library (libcuda.so.1)"
    status = cuda.cuInit(0)
    if status != 0:
        return [], f"the NVIDIA driver reports error {status} on initialisation"
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    found = []
    for i in range(count.value):
        device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
        cuda.cuDeviceGet(ctypes.byref(device), i)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        capability = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            value = ctypes.c_int()
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            capability.append(value.value)
        model = name.value.decode(errors="replace")
        version = (capability[0], capability[1])
        found.append(Device(f"cuda:{i}", "cuda", model, version, memory_gib=round(memory.value / 2**30, 1)))
    return found, "as the driver sees them"


def backend(device: Device, architectures: list[str] | None = None) -> dict[str, Any]:
    """The backend that an operator would use on ``device``, or None if it would raise an error, and the reason."""
    built = _native.architectures() if architectures is None else architectures
    chosen, why = _choose(device, built)
    return {"device": device.name, "backend": chosen, "why": why}


_PTX = "runs its PTX, which the driver compiles on first use, or all at once for `rlk doctor --warm`"


def _choose(device: Device, built: list[str]) -> tuple[str | None, str]:
    if device.kind == "cpu":
        isa = _native.module.cpu_isa()
        return f"cpu ({isa})", f"always built; {isa} is the widest instruction set of this CPU that it has"
    if device.kind == "rocm":
        gfx = [name for name in built if name.startswith("gfx")]
        if not gfx:
            return None, f"this build (variant {variant}) has no HIP kernels; {_variants.how_to_build('rocm6')}"
        if device.architecture not in gfx:
            return None, f"{device.architecture} is not served by this build ({', '.join(gfx)})"
        return "hip", f"kernels for {' and '.join(gfx)}, verified under emulation alone"
    if not any(name.startswith("sm_") for name in built):
        return None, f"this build (variant {variant}) has no CUDA kernels; {_variants.how_to_build('cu130')}"
    major, minor = device.capability or (0, 0)
    if (major, minor) == (9, 0) and "sm_90a" in built:
        return "cuda (sm_90a)", "compute capability 9.0 has kernels of its own"
    if major >= 8 and (major, minor) != (9, 0) and "sm_80" in built:
        how = "runs its machine code" if major == 8 else _PTX
        return "cuda (sm_80)", f"no kernels for {major}.{minor} itself; it {how}"
    return None, f"compute capability {major}.{minor} is not served by this build ({', '.join(built)})"


# Source of a process that loads all kernels for a device and prints how long that took.
_START = """
import sys, time, torch, rl_kernel_native as rk
began = time.perf_counter()
x = torch.zeros(1, 3, device=sys.argv[1])
rk.kl(x, x, estimator="k1").sum().item()
print(time.perf_counter() - began)
"""


def compiled_ahead(device: Device, architectures: list[str] | None = None) -> dict[str, Any]:
    """If this build has PTX for a GPU but no machine code, makes the driver compile all kernels into its cache.
    ``first_s`` is the time of a process that loads all kernels; ``again_s`` is the time that the next process takes for
    the same call."""
    row: dict[str, Any] = {"device": device.name, "first_s": None, "again_s": None, "error": None}
    chosen, row["why"] = _choose(device, _native.architectures() if architectures is None else architectures)
    if chosen is None or _PTX not in row["why"]:
        return row
    if os.environ.get("CUDA_CACHE_DISABLE", "0") != "0":
        return {**row, "error": "CUDA_CACHE_DISABLE is set, under which the driver keeps no compilation"}
    for name in ("first_s", "again_s"):
        command = [sys.executable, "-c", _START, device.name]
        started = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "CUDA_MODULE_LOADING": "EAGER"}
        )
        if started.returncode:
            return {**row, "error": (started.stderr.strip().split("\n") or [""])[-1]}
        row[name] = float(started.stdout)
    return row


def cublas_workspace(environment: Mapping[str, str]) -> dict[str, Any]:
    """Whether GEMMs of cuBLAS in this process sum in the order of docs/numerics.md, fact 1."""
    state: dict[str, Any] = {name: environment.get(name) for name in _blas.CANONICAL}
    wrong = _blas.wrong_settings(environment)
    state["batch_invariant"] = not wrong
    state["why"] = (
        "without a workspace cuBLAS cannot split K: its GEMMs sum in ascending order for every batch size"
        if not wrong
        else "cuBLAS may split K at small batch sizes, so bits depend on the batch; before the process starts, set "
        + " ".join(wrong)
        + ", or call rl_kernel_native.canonical_blas() before its first CUDA call"
    )
    return state


def linear_engine(device: Device) -> str:
    """The kernels that linear may use on a GPU with engine="auto"."""
    served = backend(device)["backend"]
    if served is None or device.kind != "cuda":
        return "native kernels" if served else "none"
    try:
        recorded = len(_native.module.linear_vendor_products(int(device.name.removeprefix("cuda:"))))
    except RuntimeError as error:
        return f"native kernels; cuBLASLt: {error}"
    if not recorded:
        return "native kernels; there is no record for this GPU and the cuBLASLt that is here"
    return f"native kernels; cuBLASLt where it was recorded faster with the same bits, {recorded} ranges of products"


def installed_variants() -> dict[str, Any]:
    """Distributions that install this package. Two such distributions overwrite each other's files."""
    found = _variants.installed()
    note = "one" if len(found) == 1 else "none: a source tree" if not found else _variants.REMEDY
    return {"distributions": found, "conflict": len(found) > 1, "note": note, "loaded": str(Path(__file__).parent)}


def _tests(
    operator: str, run: Callable[..., Iterator[cases.Check]], devices: list[Device], torch: Any
) -> Iterator[dict[str, Any]]:
    for device in devices:
        common = {"operator": operator, "device": device.name}
        if device.kind != "cpu" and (torch is None or not torch.cuda.is_available()):
            note = "needs a torch that can use this GPU"
            yield {**common, "check": "all", "passed": None, "detail": note, "seconds": 0.0}
            continue
        try:
            for check in run(torch, device.name, device.capability):
                yield {**common, **check._asdict()}
        except Exception as error:  # an operator that fails is a finding, not a failure of the doctor
            detail = f"{type(error).__name__}: {error}"
            yield {**common, "check": "runs at all", "passed": False, "detail": detail, "seconds": 0.0}


def _sections(report: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The report for readers, as titles and rows of two columns."""
    yield "versions", [(name, value or "not installed") for name, value in report["versions"].items()]
    cpu = report["cpu"]
    machine = [
        ("system", report["platform"]["system"]),
        ("cpu", f"{cpu['model']}, {cpu['instruction_set']}, {cpu['threads']} of {cpu['logical_cores']} threads"),
    ]
    for gpu in report["gpus"]:
        version = ".".join(map(str, gpu["capability"])) if gpu["capability"] else gpu["architecture"]
        machine.append((gpu["name"], f"{gpu['model']}, {version}, {gpu['memory_gib']} GiB"))
    machine.append(("gpus", f"{len(report['gpus'])} ({report['gpu_note']})"))
    if report["driver"]:
        machine.append(("driver", report["driver"]))
    machine.append(("built for", ", ".join(["cpu", *report["built_architectures"]])))
    installed = report["installed_variants"]
    machine.append(("installed", f"{', '.join(installed['distributions']) or '-'} ({installed['note']})"))
    machine.append(("loaded from", installed["loaded"]))
    yield "machine", machine
    yield "backends", _backends(report["operators"])
    cublas = report["cublas"]
    verdict = {True: "yes: ", False: "no: ", None: ""}[cublas["batch_invariant"]]
    engines = [(f"linear on {name}", engine) for name, engine in report["linear_engine"].items()]
    yield "cuBLAS", [("batch invariant", verdict + cublas["why"]), *engines]
    if report["warm"]:
        yield "compiled ahead", [(row["device"], _of_warm(row)) for row in report["warm"]]
    yield "self-test", _self_tests(report["self_tests"])


def _self_tests(tests: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """One line for each test that did not pass, then one line for all operators of a device that passed the same
    test."""
    rows, passed = [], dict[tuple[str, str], list[Mapping[str, Any]]]()
    for test in tests:
        said = f"{test['check']}; {test['detail']}"
        if test["passed"]:
            passed.setdefault((test["device"], said), []).append(test)
        else:
            word = "not run" if test["passed"] is None else "FAILED"
            rows.append((f"{test['operator']} {test['device']}", f"{word}: {said} ({test['seconds']:.2f} s)"))
    for (device, said), alike in passed.items():
        names = ", ".join(dict.fromkeys(test["operator"] for test in alike))
        rows.append((device, f"ok: {said}: {names} ({sum(test['seconds'] for test in alike):.2f} s)"))
    return rows


def _of_warm(row: Mapping[str, Any]) -> str:
    if row["error"] is not None:
        return f"FAILED: {row['error']}"
    if row["first_s"] is None:
        return f"nothing to compile: {row['why']}"
    return f"all kernels, in {row['first_s']:.1f} s; a process that starts now takes {row['again_s']:.1f} s"


def _backends(operators: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One line for each device and backend. The line names the operators if the backend does not compute all
    operators."""
    served: dict[tuple[str, str, str], list[str]] = {}
    for operator, rows in operators.items():
        for row in rows:
            served.setdefault((row["device"], row["backend"] or "nothing: an error", row["why"]), []).append(operator)
    return [
        (
            device,
            f"{chosen}: {f'all {len(names)} operators' if len(names) == len(operators) else ', '.join(names)}; {why}",
        )
        for (device, chosen, why), names in served.items()
    ]


def print_report(report: Mapping[str, Any]) -> None:
    """Prints text to stdout: tables if rich is installed and stdout is a terminal, else plain lines."""
    reason = "a self-test failed"
    if report["installed_variants"]["conflict"]:
        reason = "more than one variant is installed"
    elif any(row["error"] for row in report["warm"]):
        reason = "kernels could not be compiled ahead"
    verdict = "healthy" if report["healthy"] else f"NOT HEALTHY: {reason}"
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console(highlight=False)
        for title, rows in _sections(report):
            table = Table(title=title, title_justify="left", show_header=False, expand=True)
            table.add_column(no_wrap=True)
            table.add_column(ratio=1)
            for row in rows:
                table.add_row(*(escape(cell) for cell in row))
            console.print(table)
        console.print(verdict, style="bold green" if report["healthy"] else "bold red")
        return
    for title, rows in _sections(report):
        print(f"\n{title}")
        width = max([18, *(len(name) for name, _ in rows)])
        for name, text in rows:
            print(f"  {name:{width}} {text}")
    print(f"\n{verdict}")


def main(arguments: list[str] | None = None, program: str = "python -m rl_kernel_native.doctor") -> int:
    """Runs the doctor with command line arguments, and returns its exit status."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--no-self-test", action="store_true", help="describe only; takes no device memory")
    parser.add_argument(
        "--warm", action="store_true", help="compile ahead what GPUs later than this build would at use"
    )
    options = parser.parse_args(arguments)
    report = examine(not options.no_self_test, options.warm)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)
    return 0 if report["healthy"] else 1


if __name__ == "__main__":
    sys.exit(main())
