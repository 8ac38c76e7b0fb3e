// Loop unrolling on GPUs, in code that is also compiled for hosts.
#pragma once

// RLK_UNROLL goes before a loop whose indices must be constants, RLK_UNROLL_NOT before a loop that must stay rolled.
#if defined(__CUDACC__) || defined(__HIP__)
#define RLK_UNROLL _Pragma("unroll")
#define RLK_UNROLL_NOT _Pragma("unroll 1")
#else
#define RLK_UNROLL
#define RLK_UNROLL_NOT
#endif
