// The first pass of calls that need only the number of tokens of each sequence from this pass. The pass reads only the
// masks, in 16-byte vectors. Bound by HBM.
#pragma once

#include "../common/dependent_launch.cuh"
#include "gpu.cuh"
#include "kernels/tokens/passes.h"
#include "kernels/tokens/weights.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

// The number of elements of a mask's vector that count. An element counts if any bit that `bits` selects is set. For
// elements of eight bytes, `bits` applies to the upper word.
__device__ __forceinline__ unsigned counted_in(const uint4& v, int bytes, std::uint32_t bits) {
  const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
  unsigned count = 0;
  switch (bytes) {
    case 2:
#pragma unroll
      for (const std::uint32_t word : words) count += __popc(__vcmpne2(word & bits, 0)) / 16;
      break;
    case 4:
#pragma unroll
      for (const std::uint32_t word : words) count += (word & bits) != 0;
      break;
    case 8:
      count = ((v.x | (v.y & bits)) != 0) + ((v.z | (v.w & bits)) != 0);
      break;
    default:
#pragma unroll
      for (const std::uint32_t word : words) count += __popc(__vcmpne4(word, 0)) / 8;
  }
  return count;
}
// `threads` threads together add up how many elements count in a mask of `length` tokens at `from`. Returns this
// thread's part of the count.
__device__ __forceinline__ unsigned count_tokens(const TokenMask& mask, const unsigned char* from, int length,
                                                 int thread, int threads) {
  constexpr int kAtOnce = 8;
  const int bytes = mask.bytes;
  const std::uint32_t bits = bytes == 2 ? mask.bits<std::uint16_t>() * 0x10001u : mask.bits<std::uint32_t>();
  const TokenMask here = {from, 0, mask.bytes, mask.is_float};
  const auto before = static_cast<int>((0 - reinterpret_cast<std::uintptr_t>(from)) % 16) / bytes;
  const int head = min(before, length), vectors = (length - head) * bytes / 16, whole = vectors * (16 / bytes);
  unsigned count = 0;
  for (int i = thread; i < head; i += threads) count += counts(here, i);
  for (int i = head + whole + thread; i < length; i += threads) count += counts(here, i);
  const auto* const at = reinterpret_cast<const uint4*>(from + head * bytes);
#pragma unroll 1
  for (int begin = thread; begin < vectors; begin += kAtOnce * threads) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int vector = begin + i * threads;
      v[i] = vector < vectors ? __ldg(at + vector) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (const uint4& x : v) count += counted_in(x, bytes, bits);
  }
  return count;
}

// The sum of a count over the threads of a block.
__device__ __forceinline__ unsigned sum_over_block(unsigned count, unsigned (&of_waves)[kTokenWaves<TokenGpu>]) {
  count = TokenGpu::sum_over_wave(count);
  if (threadIdx.x % TokenGpu::kLanes == 0) of_waves[threadIdx.x / TokenGpu::kLanes] = count;
  __syncthreads();
  unsigned sum = 0;
#pragma unroll
  for (const unsigned of : of_waves) sum += of;
  return sum;
}

// This kernel replaces token_statistics_kernel. It stores the number of tokens of each tile, and 0 for all other
// partial results.
template <class Batch>
__global__ void __launch_bounds__(kTokenThreads)
    token_counts_kernel(const __grid_constant__ typename Batch::Params p, const TokenWorkspace<Batch> w,
                        std::int64_t slots, int tile) {
  constexpr int kWaves = kTokenWaves<TokenGpu>, kLanes = TokenGpu::kLanes;
  using Terms = typename Batch::Statistics;
  __shared__ unsigned of_waves[kWaves];
  allow_next_kernel();
  wait_for_previous_kernel();
  const int thread = static_cast<int>(threadIdx.x), wave = thread / kLanes, lane = thread % kLanes;
  if (blockIdx.x == 0 && thread == 0) *w.shared = typename Batch::Shared{};
  const bool of_wave = tile == kWaveTile<TokenGpu>;
  const std::int64_t slot = of_wave ? std::int64_t{blockIdx.x} * kWaves + wave : blockIdx.x;
  if (slot >= slots) return;
  const Sequences& q = Terms::sequences(p);
  const std::int64_t s = find_sequence<TokenGpu>(q, slot, tile);
  if (q.packed() && is_rest(q, s)) return;
  const TokenSpan span = span_of(q, s);
  const std::int64_t first = (slot - first_slot(q, s, tile)) << tile, rest = span.length - first;
  const int length = rest < 0 ? 0 : rest < 1 << tile ? static_cast<int>(rest) : 1 << tile;
  const TokenMask& mask = Terms::mask(p);
  unsigned count = 0;
  if (mask.data == nullptr) {
    count = (of_wave ? lane : thread) == 0 ? static_cast<unsigned>(length) : 0;
  } else if (length > 0) {
    const std::int64_t at = (q.packed() ? span.begin : s * mask.row_stride) + first;
    const auto* const from = static_cast<const unsigned char*>(mask.data) + at * mask.bytes;
    count = of_wave ? count_tokens(mask, from, length, lane, kLanes)
                    : count_tokens(mask, from, length, thread, kTokenThreads);
  }
  TilePartial<8> partial{};
  if (of_wave) {
    partial.count[kCountTokens] = TokenGpu::sum_over_wave(count);
    if (lane == 0) w.partials[0][slot] = partial;
    return;
  }
  partial.count[kCountTokens] = sum_over_block(count, of_waves);
  if (thread == 0) w.partials[0][slot] = partial;
}

}  // namespace
}  // namespace rlk::cuda
