#!/usr/bin/env python3
"""Fails if pyright does not know the type of a public name, in the operators or in rk.*: `pyright --verifytypes`.

The tools behind `rlk` (consistency, bench, doctor), engines' plug-ins and the modules of an operator's torch layer are
not public; mypy checks them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_PUBLIC = re.compile(
    r"rl_kernel_native\.(_|bench|consistency|doctor|integrations\.|ops\.\w+_(torch|traced|composed|autograd)|ops\.\w+\.[A-Z_]+$)"
)
OF_TORCH = {"Type of metaclass unknown", "Type of base class unknown"}  # caused by the base classes of rk.nn


def main() -> int:
    found = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--verifytypes", "rl_kernel_native",
         "--ignoreexternal", "--outputjson"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "python")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    try:
        symbols = json.loads(found.stdout)["typeCompleteness"]["symbols"]
    except (ValueError, KeyError):
        print(f"pyright gave no report: {found.stdout[-2000:]}{found.stderr[-2000:]}")
        return 1
    public = [s for s in symbols if s["isExported"] and not NOT_PUBLIC.match(s["name"])]
    untyped = []
    for symbol in public:
        said = [d["message"].split("\n")[0] for d in symbol.get("diagnostics", ())]
        if (symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]) or (said and set(said) <= OF_TORCH):
            continue
        untyped.append(symbol)
        print(f"{symbol['name']}: {'; '.join(said) or 'its type is not known'}")
    print(f"{len(public) - len(untyped)} of {len(public)} public symbols have types")
    return int(bool(untyped) or not public)


if __name__ == "__main__":
    sys.exit(main())
