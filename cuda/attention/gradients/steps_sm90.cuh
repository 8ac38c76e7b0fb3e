// Functions that the kernels of attention's wgmma backward share: the loop over jobs of a block of threads, products,
// masks, and the rounding of gradients.
#pragma once

#include "../../common/async_copy_sm80.cuh"
#include "../../common/register_shares_sm90.cuh"
#include "../../common/wgmma_sm90.cuh"
#include "../gpu.cuh"
#include "../quad_rows.cuh"
#include "kernels/attention/backward.h"
#include "work_sm90.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// Registers per thread: one warpgroup loads (24 registers), and two warpgroups multiply (240 registers).
using GradientRegisters = RegisterShares<24, 240>;

// Takes jobs from the loading warp until none are left.
template <class Shared, class Work, class Rows>
__device__ __forceinline__ void take_jobs(const Shared& shared, const Work* works, Rows* rows) {
#pragma unroll 1
  for (int job = 0;; ++job) {
    mbarrier_wait_block(shared.work_full(job & 1), job >> 1 & 1);
    const Work& work = works[job & 1];
    if (work.sequence < 0) break;
    rows->run(work);
    mbarrier_arrive(shared.work_empty(job & 1));  // this thread no longer reads the job
  }
}

// Functions for the threads of the two warpgroups that multiply. In a product of 64 rows, a thread has row 16 w + g (r
// = 0) and row 16 w + g + 8 (r = 1), where w is its warp and g = lane / 4. x[4 j + 2 r + c] is column 8 j + 2 (lane %
// 4) + c of row r, for c = 0 and 1.
struct GradientSteps {
  // Makes the compiler compute the values of x before this point, not while later products are in flight.
  template <int kCount>
  static __device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
  }
  // A barrier of the two warpgroups that multiply.
  static __device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

  static __device__ __forceinline__ float load_float(std::uint32_t from) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from));
    return x;
  }
  static __device__ __forceinline__ float2 load_pair(std::uint32_t from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from));
    return x;
  }

  // Computes x = A B^T from +0, where A is 64 rows of `a_at`, and B is 2 kCount rows of `b_at`. Both have kColumns
  // columns, in boxes of 64 columns. A box of A takes kBoxA bytes, and a box of B takes kBoxB bytes.
  template <class T, int kColumns, int kBoxA, int kBoxB, int kCount>
  static __device__ __forceinline__ void multiply(std::uint32_t a_at, std::uint32_t b_at, float (&x)[kCount]) {
    const std::uint64_t a = tile_descriptor<false>(a_at, 0), b = tile_descriptor<false>(b_at, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
      const int within = step % 4 * static_cast<int>(kDescriptorStep<false>);
      wgmma<T, 2 * kCount, false, false>(x, a + step / 4 * (kBoxA >> 4) + within, b + step / 4 * (kBoxB >> 4) + within,
                                         step > 0);
    }
    wgmma_commit();
  }
  // Computes sums += weights times rows (p or ds times the rows of an operand). Each step takes 16 rows, and the first
  // row is 16 * first_step. If kKeeps is false, the sums begin at +0.
  template <class T, int kBox, bool kKeeps, int kSteps, int kCount>
  static __device__ __forceinline__ void accumulate(const std::uint32_t (&weights)[kSteps][4], std::uint32_t rows,
                                                    int first_step, float (&sums)[kCount]) {
    const std::uint64_t b = tile_descriptor<true>(rows, kBox);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      wgmma_registers<T, 2 * kCount, true>(sums, weights[step], b + (first_step + step) * kDescriptorStep<true>,
                                           kKeeps || step > 0);
    }
    wgmma_commit();
  }

  // Rounds weights (p or ds). The result is the A operand of a product, in steps of 16 keys or queries.
  template <class T, int kSteps>
  static __device__ __forceinline__ void pack(const float (&x)[8 * kSteps], std::uint32_t (&to)[kSteps][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) to[i / 4][i % 4] = T::pack(x[2 * i], x[2 * i + 1]);
  }
  // Stores weights as rows of 128 bytes with the 128-byte swizzle. The warp's 16 rows begin at row `first_row`, and
  // their columns begin at chunk `first_chunk` of 16 bytes.
  template <int kSteps>
  static __device__ __forceinline__ void store_weights(const std::uint32_t (&x)[kSteps][4], std::uint32_t to, int lane,
                                                       int first_row, int first_chunk) {
    const int row = first_row + lane % 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::uint32_t at = to + row * 128 + ((first_chunk + 2 * step + lane / 16) ^ (row & 7)) * 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[step][0]),
                   "r"(x[step][1]), "r"(x[step][2]), "r"(x[step][3])
                   : "memory");
    }
  }

  // Sets a score to -Inf if a mask hides its key from its query. For scores[i], key_of(i) returns the number of the
  // key, and query_of(i) returns the number of the query's own token among the keys.
  template <int kCount, class KeyOf, class QueryOf>
  static __device__ __forceinline__ void hide(const AttentionBackwardParams& p, int num_keys, const KeyOf& key_of,
                                              const QueryOf& query_of, float (&scores)[kCount]) {
    const std::int64_t window = p.window_size > 0 ? p.window_size : std::int64_t{1} << 32;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int key = key_of(i), n = query_of(i);
      const bool seen = key < num_keys && (!p.causal || (key <= n && n - key < window));
      if (!seen) scores[i] = -infinity();
    }
  }
  template <Exp kExp>
  static __device__ __forceinline__ float probability(float t) {
    return kExp == Exp::kHardware ? ex2_approx(t) : attention_probability<AttentionGpu>(t, kExp);
  }
  // Scales and rounds 32 columns of the thread's row r. They are four groups of eight columns, which begin with group
  // `first` and lie in four lanes. The thread gets the eight columns of group first + lane % 4.
  template <class T, int kCount>
  static __device__ __forceinline__ uint4 rounded(const float* sums, int first, int r, float scale) {
    std::uint32_t x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x[k] = 0u;
      if (first + k >= kCount / 4) continue;
      const float* const of = sums + 4 * (first + k) + 2 * r;
      x[k] = T::pack(add_rn(mul_rn(of[0], scale), 0.0f), add_rn(mul_rn(of[1], scale), 0.0f));
    }
    exchange_in_quad(x);
    return make_uint4(x[0], x[1], x[2], x[3]);
  }
};

}  // namespace
}  // namespace rlk::cuda
