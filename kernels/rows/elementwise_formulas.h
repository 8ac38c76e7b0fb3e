// The formulas of all elementwise operators. Files cpu/*_simd.cpp include this file after simd.h, because simd.h
// decides how math/ is compiled.
#pragma once

#define RLK_FORMULAS
#include "rlk/elementwise.inc"
#undef RLK_FORMULAS
