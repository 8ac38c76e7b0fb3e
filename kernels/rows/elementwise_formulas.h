// The formulas of all elementwise operators. Files cpu/*_simd.cpp include this file after simd.h, because simd.h
// redefines RLK_HD, with which the functions of math/ are declared.
#pragma once

#define RLK_FORMULAS
#include "rlk/elementwise.inc"
#undef RLK_FORMULAS
