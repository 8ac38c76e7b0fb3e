#!/usr/bin/env python3
"""Regenerates every coefficient table of cpp/include/rlk/math (needs mpmath and numpy).

A table is the polynomial p of one degree that minimises max |weight(x) * (p(x) - target(x))| over an interval. Remez
exchange on a Chebyshev grid finds it. Coefficients are then rounded to fp32 one at a time, lowest degree first. The
rest is solved again after each rounding, so later coefficients absorb the errors of earlier ones.

    tools/minimax.py            prints each table as C++ and the error it reaches
    tools/minimax.py --check    exit status 1 if a header or docs/math.md differs from this script's results
"""

import argparse
import pathlib
import re
import sys
from collections.abc import Callable
from typing import NamedTuple

import mpmath as mp
import numpy as np

mp.mp.dps = 50
GRID = 3001
ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADERS = ROOT / "cpp" / "include" / "rlk" / "math"
DOCUMENT = ROOT / "docs" / "math.md"


class Table(NamedTuple):
    name: str
    header: str
    degree: int
    low: float
    high: float
    target: Callable  # mpf -> mpf
    weight: Callable  # mpf -> mpf
    fixed: tuple = ()  # values that the leading coefficients must have exactly


def hexfloat(value: float) -> str:
    """The shortest C++ fp32 literal, e.g. 0x1.62e43p-1f."""
    mantissa, exponent = float(value).hex().split("p")
    mantissa = mantissa.rstrip("0")
    return f"{mantissa}{'0' if mantissa.endswith('.') else ''}p{exponent}f"


def remez(x, target, weight, degree):
    """The polynomial that minimises max |weight * (p - target)| over the grid; weight >= 0."""
    count = degree + 1
    powers = np.stack([x**k for k in range(count)])
    order = np.cos(np.pi * np.arange(count + 1) / count)[::-1]
    reference = np.searchsorted(x, (x[0] + x[-1]) / 2 + order * (x[-1] - x[0]) / 2).clip(0, len(x) - 1)
    # A point of weight zero cannot be part of an alternation.
    reference = np.array([i if weight[i] != 0 else i + 1 for i in reference])
    best, best_error = None, np.inf
    for _ in range(60):
        system = mp.matrix(count + 1, count + 1)
        right = mp.matrix(count + 1, 1)
        for row, i in enumerate(reference):
            for column in range(count):
                system[row, column] = mp.mpf(float(powers[column, i]))
            system[row, count] = mp.mpf((-1) ** row) / mp.mpf(float(weight[i]))
            right[row] = mp.mpf(float(target[i]))
        solution = mp.lu_solve(system, right)
        coefficients = np.array([float(solution[k]) for k in range(count)])
        error = weight * (coefficients @ powers - target)
        worst = np.abs(error).max()
        if worst < best_error:
            best, best_error = coefficients, worst
        if worst <= abs(float(solution[count])) * (1 + 1e-6):
            break
        edges = np.flatnonzero(np.diff(np.sign(error)) != 0) + 1
        extrema = [int(s[0] + np.argmax(np.abs(error[s]))) for s in np.split(np.arange(len(x)), edges)]
        while len(extrema) > count + 1:  # keep the alternation with the larger error
            if len(extrema) == count + 2:
                extrema.pop(0 if abs(error[extrema[0]]) < abs(error[extrema[-1]]) else -1)
            else:
                smallest = min(range(len(extrema)), key=lambda k: abs(error[extrema[k]]))
                del extrema[smallest]
                if 0 < smallest < len(extrema):  # its two neighbours have the same sign: keep the larger one
                    pair = (smallest - 1, smallest)
                    del extrema[min(pair, key=lambda k: abs(error[extrema[k]]))]
        if len(extrema) < count + 1:
            break
        reference = np.array(extrema)
    return best


def solve(table: Table):
    """fp32 coefficients, and the weighted error of the rounded polynomial."""
    angle = np.cos(np.pi * (np.arange(GRID) + 0.5) / GRID)[::-1]
    x = (table.low + table.high) / 2 + angle * (table.high - table.low) / 2
    x[0], x[-1] = table.low, table.high
    x = x[np.abs(x) > 1e-6]  # the steps below divide by x
    target = np.array([float(table.target(mp.mpf(float(v)))) for v in x])
    weight = np.array([float(table.weight(mp.mpf(float(v)))) for v in x])
    coefficients = [float(np.float32(c)) for c in table.fixed]
    for k in range(len(coefficients), table.degree + 1):
        rest = target - np.polynomial.polynomial.polyval(x, coefficients or [0.0])
        # x^k divides the remainder. Without this division the powers x^k ... x^degree all vanish at 0, and Remez may
        # not converge.
        higher = remez(x, rest / x**k, np.abs(weight * x**k), table.degree - k)
        coefficients.append(float(np.float32(higher[0])))
    error = weight * (np.polynomial.polynomial.polyval(x, coefficients) - target)
    return coefficients, float(np.abs(error).max())


def exp2_relative(f):
    """Weight of the relative error."""
    return mp.mpf(2) ** -f


def log2_slope(f):
    """log2(1 + f) / f - 1."""
    return mp.log1p(f) / (f * mp.log(2)) - 1


def log1p_curvature(f):
    """(log(1 + f) - f) / f^2."""
    return (mp.log1p(f) - f) / f**2


def expm1_curvature(r):
    """(exp(r) - 1 - r) / r^2."""
    return (mp.expm1(r) - r) / r**2


def tanh_slope(u):
    """(tanh(x) / x - 1) / x^2 with u = x^2."""
    x = mp.sqrt(u)
    return (mp.tanh(x) / x - 1) / u


def erf_slope(u):
    """erf(x) / x - 1 with u = x^2."""
    x = mp.sqrt(u)
    return mp.erf(x) / x - 1


def log2_erfc(d):
    """log2(1 - erf(1 + d))."""
    return mp.log(mp.erfc(1 + d), 2)


LOG_LOW, LOG_HIGH = float(mp.sqrt(0.5) - 1), float(mp.sqrt(2) - 1)  # significand - 1
HALF_LN2 = 0.34658  # half of ln 2, plus the rounding error of x * log2(e)
SQUARE_LOW = 1e-4  # start of tables in x^2: below it the series is constant in fp32, and quotients by x^2 lose digits
TANH_SPLIT = 0.7

# The weight of a table converts an error of its polynomial into the relative error of the function's result.
TABLES = [
    Table("kExp2StatC", "exp2.h", 4, -0.5, 0.5, lambda f: mp.mpf(2) ** f, exp2_relative, fixed=(1.0,)),
    Table("kExp2C", "exp2.h", 6, -0.5, 0.5, lambda f: mp.mpf(2) ** f, exp2_relative, fixed=(1.0,)),
    Table("kLog2C", "log2.h", 9, LOG_LOW, LOG_HIGH, log2_slope, lambda f: f * mp.log(2) / mp.log1p(f)),
    Table("kLog1pC", "log2.h", 8, LOG_LOW, LOG_HIGH, log1p_curvature, lambda f: f**2 / mp.log1p(f)),
    Table("kExpm1C", "expm1.h", 5, -HALF_LN2, HALF_LN2, expm1_curvature, lambda r: r**2 / mp.expm1(r)),
    Table("kTanhC", "tanh.h", 5, SQUARE_LOW, TANH_SPLIT**2, tanh_slope, lambda u: u * mp.sqrt(u) / mp.tanh(mp.sqrt(u))),
    Table("kErfC", "erf.h", 6, SQUARE_LOW, 1.0, erf_slope, lambda u: mp.sqrt(u) / mp.erf(mp.sqrt(u))),
    Table("kErfcC", "erf.h", 6, 0.0, 3.0, log2_erfc, lambda d: mp.erfc(1 + d) * mp.log(2) / mp.erf(1 + d)),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the headers and docs/math.md")
    parser.add_argument("--only", default="", help="tables whose name starts with this")
    arguments = parser.parse_args()
    status = 0
    for table in TABLES:
        if not table.name.startswith(arguments.only):
            continue
        coefficients, error = solve(table)
        literals = [hexfloat(c) for c in coefficients]
        print(
            f"// {table.header} {table.name}: degree {table.degree} on [{table.low!r}, {table.high!r}], "
            f"weighted error 2^{float(mp.log(error, 2)):.2f}"
        )
        if arguments.check:
            text = (HEADERS / table.header).read_text()
            for k, literal in enumerate(literals):
                found = re.search(rf"constexpr float {table.name}{k} = (\S+);", text)
                if not found or found[1] != literal:
                    print(f"{table.name}{k}: header {found and found[1]}, computed {literal}")
                    status = 1
            row = f"{table.name}: {', '.join(c.removesuffix('f') for c in literals)}"
            if row not in " ".join(DOCUMENT.read_text().split()):
                print(f"{DOCUMENT.name} lacks: {row}")
                status = 1
        else:
            for k, literal in enumerate(literals):
                print(f"constexpr float {table.name}{k} = {literal};")
    return status


if __name__ == "__main__":
    sys.exit(main())
