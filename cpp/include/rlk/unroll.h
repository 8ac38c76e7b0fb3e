// How often a loop's body is there, in code that runs on a GPU and is compiled for hosts, too.
#pragma once

// Before a loop whose indices must be constants; before one whose body is to be there once.
#if defined(__CUDACC__) || defined(__HIP__)
#define RLK_UNROLL _Pragma("unroll")
#define RLK_UNROLL_NOT _Pragma("unroll 1")
#else
#define RLK_UNROLL
#define RLK_UNROLL_NOT
#endif
