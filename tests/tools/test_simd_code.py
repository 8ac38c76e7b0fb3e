"""The check that functions of an instruction set stay in its own files, tested on output of nm."""

from __future__ import annotations

from pathlib import Path

import pytest

from cmake_scripts import NEEDS_CMAKE, make_tool, run_script

pytestmark = NEEDS_CMAKE

OWN = "W int rlk::sum<rlk::cpu::avx2::Floats>(int [4], rlk::cpu::avx2::Floats)"


@pytest.mark.parametrize(
    ("symbols", "said"),
    [
        (["T rlk::cpu::avx2::kl", "t rlk::helper(int)"], None),
        ([OWN, "V rlk::kTable", "u rlk::f()::kTable", "T rlk::cpu::avx2::kl"], None),
        ([OWN, "W rlk::combine(int const&)"], "rlk::combine(int const&)"),
        ([OWN, "W rlk::f<rlk::cpu::avx512::Floats>()"], "rlk::f<rlk::cpu::avx512::Floats>()"),
        (["T rlk::kl"], "no function of their own"),
        ([], "no function of their own"),
    ],
    ids=["none is weak", "own and data", "one is shared", "another instruction set's", "not its objects", "nothing"],
)
def test_a_function_that_other_objects_may_share_fails_the_build(
    tmp_path: Path, symbols: list[str], said: str | None
) -> None:
    (tmp_path / "kl.o").write_text("".join(f"0000000000000000 {symbol}\n" for symbol in symbols))
    (tmp_path / "objects").write_text(f"{tmp_path / 'kl.o'}\n")
    nm = make_tool(tmp_path / "nm", argument=3)
    options = {"NM": nm, "ISA": "avx2", "OBJECTS": tmp_path / "objects", "RESULT": tmp_path / "result"}
    ran = run_script("CheckSimdCode.cmake", **options)
    assert (ran.returncode == 0) is (said is None) is (tmp_path / "result").exists()
    if said is not None:
        assert said in ran.stderr
