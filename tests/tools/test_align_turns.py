"""Runs of `rlk align` that share a GPU take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROUNDS = 3
RUN = f"""
import sys, time
from rl_kernel_native.consistency import align_turns as turns

def note(what):
    with open(sys.argv[2], "a", buffering=1) as log:
        log.write(f"{{sys.argv[1]}} {{what}}\\n")

turns.beside_others(measures=sys.argv[1] != "other")
note("starts")
while open(sys.argv[2]).read().count(" starts") < int(sys.argv[4]):
    time.sleep(0.01)
time.sleep(float(sys.argv[3]))  # loads its model
note("started")
if sys.argv[1] != "other":
    for _ in range({ROUNDS}):
        with turns.alone():
            note("begins")
            time.sleep(0.05)
            note("ends")
    turns.measured()
    note("goes on")
"""


def test_one_process_measures_at_a_time_and_none_goes_on_before_all_have(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    environment = {**os.environ, "RLK_ALIGN_LOCK": str(tmp_path / "lock")}
    # The second run is ready later than the first; the third run only computes.
    runs = [
        subprocess.Popen([sys.executable, "-c", RUN, name, str(log), str(delay), "3"], env=environment)
        for name, delay in (("a", 0.0), ("b", 0.4), ("other", 0.2))
    ]
    assert [run.wait(60) for run in runs] == [0, 0, 0]
    assert len((tmp_path / "lock.before").read_bytes()) == 2  # those that measure
    lines = log.read_text().splitlines()
    turns = [line for line in lines if line.endswith((" begins", " ends"))]
    assert sorted(turns) == sorted(f"{name} {what}" for name in "ab" for what in ("begins", "ends") * ROUNDS)
    for begins, ends in zip(turns[::2], turns[1::2], strict=True):
        assert (begins.removesuffix(" begins"), ends.removesuffix(" ends")) == (begins[0], begins[0])
    assert lines.index("other started") < lines.index(turns[0])
    assert lines.index("b started") < lines.index("a goes on")
    assert max(i for i, line in enumerate(lines) if line.endswith(" ends")) < min(
        lines.index(f"{name} goes on") for name in "ab"
    )


def test_without_the_variable_a_process_is_alone(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RLK_ALIGN_LOCK"}
    log = tmp_path / "log"
    subprocess.run([sys.executable, "-c", RUN, "a", str(log), "0", "1"], env=environment, check=True, timeout=60)
    assert log.read_text().splitlines()[-1] == "a goes on"
    assert [*tmp_path.iterdir()] == [log]


def test_a_part_adds_its_answer_to_the_request_in_its_file(tmp_path: Path) -> None:
    code = (
        "from rl_kernel_native.consistency import align_turns as turns\n"
        "turns.serve(lambda request: {'twice': 2 * request['n']}, measures=False)"
    )
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"n": 3, "twice": 0}))
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=60)
    assert json.loads(file.read_text()) == {"n": 3, "twice": 6}
