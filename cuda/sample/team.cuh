// Makes a block the team of threads that kernels/sample/row.h requires: the code there computes one row by one team.
#pragma once

#include "../common/element.cuh"
#include "../common/kernels.h"
#include "kernels/sample/process_logits.h"
#include "kernels/sample/row.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kRowThreads = kMaxTeam;
// Threads per block for steps that are limited by latency. On sm_80 more threads would make the code spill registers.
constexpr int kManyThreads = RLK_CUDA_SM90 ? 2 * kRowThreads : kRowThreads;
constexpr int kKeptThreads = 512;

// The work that a row of sample still needs after the first scan: none; masses around its cut, then selection and tree;
// selection and tree; the tree alone; the tree over few leaves; or the levels above the leaves' nodes.
enum Waits : std::int32_t { kDone, kForMasses, kForSelection, kForTree, kForFew, kForRoots };

// Hides a number's value from the compiler. A rare path computes its addresses from the hidden number. So the compiler
// cannot compute these addresses earlier, where they would occupy registers.
__device__ __forceinline__ std::int64_t hidden(std::int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

// Whether the masses of the row's present columns alone decide which column is the last kept column.
__device__ __forceinline__ bool cuts_by_mass(const SampleParams& p, const SampleRow& want) {
  return !want.greedy && want.top_p < 1.0f && (want.top_k <= 0 || want.top_k >= p.valid_vocab) &&
         (want.min_p == 0.0f || p.order != SampleOrder::kVllm);
}

template <int kThreads>
struct BlockTeam {
  using Memory = PlainMemory;
  static constexpr int kLanes = 8, kAhead = 8;
  static constexpr bool kSearchesByZ = true, kEdits = true;
  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  static constexpr int threads() { return kThreads; }
  __device__ __forceinline__ void barrier() const { __syncthreads(); }
  __device__ __forceinline__ float shuffle_xor(float x, int distance) const {
    return __shfl_xor_sync(0xffffffffu, x, distance);
  }
  __device__ __forceinline__ std::int32_t shuffle_xor(std::int32_t x, int distance) const {
    return __shfl_xor_sync(0xffffffffu, x, distance);
  }
  __device__ __forceinline__ void add(std::uint32_t* to, std::uint32_t x) const { atomicAdd(to, x); }
  // Adds the two halves separately, because shared memory has no 64-bit addition.
  __device__ __forceinline__ void add(std::uint64_t* to, std::uint64_t x) const {
    auto* const halves = reinterpret_cast<std::uint32_t*>(to);
    const auto low = static_cast<std::uint32_t>(x);
    const std::uint32_t carry = atomicAdd(halves, low) > ~low ? 1 : 0;
    const std::uint32_t high = static_cast<std::uint32_t>(x >> 32) + carry;
    if (high != 0) atomicAdd(halves + 1, high);
  }
  __device__ __forceinline__ std::uint32_t take(std::uint32_t* counter) const { return atomicAdd(counter, 1u); }
  __device__ __forceinline__ void count(std::uint32_t* word) const { atomicAdd(word, 1u); }
  __device__ __forceinline__ void set_bits(std::uint32_t* word, std::uint32_t bits) const { atomicOr(word, bits); }
  template <Exp kExp>
  __device__ __forceinline__ float exponential(float z, float c, float m) const {
    if constexpr (kExp == Exp::kPortable) {
      return stat_exp_portable(z, c, sub_rn(kStatsShift, m));
    } else {
      return ex2_approx(fma_rn(z, c, -m));
    }
  }
  template <class P>
  __device__ __forceinline__ P* global(P* pointer) const {
    return pointer;
  }
  template <class N>
  __device__ __forceinline__ N own(N x) const {
    return x;
  }
};

}  // namespace
}  // namespace rlk::cuda
