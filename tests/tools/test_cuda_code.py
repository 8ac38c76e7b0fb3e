"""The check that every CUDA kernel has code for Hopper, tested on output of cuobjdump. The check needs neither a GPU
nor CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from cmake_scripts import NEEDS_CMAKE, make_tool, run_script

pytestmark = NEEDS_CMAKE


def symbols(architecture: str, *kernels: str) -> str:
    """The output of ``cuobjdump -symbols`` for an object."""
    lines = [f"Fatbin elf code:\n================\narch = {architecture}\ncode version = [1,8]\n\nsymbols:"]
    lines += [f"FUNC LOCAL DEFAULT ENTRY _ZN3rlk4cuda43_GLOBAL__N__66df6762_11_sums_cu_699841d1{k}" for k in kernels]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("sm_80", "sm_90a", "alone", "said"),
    [
        (
            ["9kl_kernelNS_8KlParamsEli", "15tree_sum_kernelILi8EE"],
            ["9kl_kernelNS_8", "15tree_sum_kernelILi1EE"],
            "",
            None,
        ),
        (["9kl_kernelNS_8KlParamsEli", "15tree_sum_kernelILi8EE"], ["9kl_kernelNS_8"], "", "tree_sum_kernel"),
        (["9kl_kernelNS_8KlParamsEli", "15tree_sum_kernelILi8EE"], ["9kl_kernelNS_8"], "tree_sum_kernel", None),
        ([], ["9kl_kernelNS_8"], "", "no kernel has sm_80 code"),
    ],
    ids=["all", "one is missing", "one is not reached", "nothing is read"],
)
def test_a_kernel_without_code_for_hopper_fails_the_build(
    tmp_path: Path, sm_80: list[str], sm_90a: list[str], alone: str, said: str | None
) -> None:
    for name, printed in (("sm80", symbols("sm_80", *sm_80)), ("sm90", symbols("sm_90a", *sm_90a))):
        (tmp_path / f"{name}.o").write_text(printed)
        (tmp_path / name).write_text(f"{tmp_path / name}.o\n")
    dump = make_tool(tmp_path / "cuobjdump", argument=2)
    options = {"CUOBJDUMP": dump, "SM80": tmp_path / "sm80", "SM90": tmp_path / "sm90", "ALONE": alone}
    ran = run_script("CheckCudaCode.cmake", **options, RESULT=tmp_path / "result")
    assert (ran.returncode == 0) is (said is None) is (tmp_path / "result").exists()
    if said is not None:
        assert said in ran.stderr
