// The formulas of all elementwise operators. In files of cpp/cpu/*_simd.cpp after simd.h, which decides how math/ is compiled.
#pragma once

#define RLK_FORMULAS
#include "rlk/elementwise.inc"
#undef RLK_FORMULAS
