// An exchange of columns between lanes. In the sums of a product by mma or wgmma, four lanes share a row, and each has
// pairs of columns. After the exchange each lane has eight neighbouring columns.
#pragma once

#include <cstdint>

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// Before the call, x[k] holds columns 8 k + 2 t and the next one, where t = lane % 4, for four tiles k of eight
// columns. After the call, lane t has the eight columns of tile t.
__device__ __forceinline__ void exchange_in_quad(std::uint32_t (&x)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  std::uint32_t a = odd ? x[0] : x[1], b = odd ? x[2] : x[3];
  a = __shfl_xor_sync(0xffffffffu, a, 1);
  b = __shfl_xor_sync(0xffffffffu, b, 1);
  (odd ? x[0] : x[1]) = a;
  (odd ? x[2] : x[3]) = b;
  std::uint32_t e = high ? x[0] : x[2], f = high ? x[1] : x[3];
  e = __shfl_xor_sync(0xffffffffu, e, 2);
  f = __shfl_xor_sync(0xffffffffu, f, 2);
  (high ? x[0] : x[2]) = e;
  (high ? x[1] : x[3]) = f;
}

}  // namespace
}  // namespace rlk::cuda
