"""Prints whether tests/gpu_log.json covers these sources. Exits with status 0; with --strict, with 1 if the log is
stale."""

from __future__ import annotations

import sys

from gpu_log import why_stale

if __name__ == "__main__":
    problem = why_stale()
    print(f"warning: {problem}" if problem else "tests/gpu_log.json is the log of these sources")
    sys.exit(1 if problem and "--strict" in sys.argv else 0)
