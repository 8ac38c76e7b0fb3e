// A thread's accumulators of P V in attention's wgmma kernel, and their totals. A total is the merged sum of all
// earlier splits of the keys.
#pragma once

#include "gpu.cuh"
#include "wgmma_work_sm90.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// Shared memory holds the totals. Totals that do not fit into shared memory are stored in global memory and stay in L2.
template <class Tile, Exp kExp>
class WgmmaTotals {
 protected:
  __device__ __forceinline__ explicit WgmmaTotals(const WgmmaCall* call) : call_(call) {}

  // kIsTight: the kernel has few registers to spare. The sums of each split then start at +0, so their registers are
  // free at the end of a split. If not kIsTight, the first product of a split overwrites the sums. A kIsTight kernel
  // also adds up the first row's probabilities before the second row's.
  static constexpr bool kIsTight = Tile::kIsLean && kExp == Exp::kHardware;
  __device__ __forceinline__ void zero_sums() {
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) o_[i] = 0.0f;
  }
  // Returns the totals of sums 4 j ... 4 j + 3, or +0 before the first merge.
  __device__ __forceinline__ float4 total(int j) const {
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    asm volatile(
        "{\n"
        ".reg .pred has_total;\n"
        "setp.ne.s32 has_total, %5, 0;\n"
        "@has_total ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
        : "r"(total_ + j * 128 * 16), "r"(static_cast<int>(has_total_)));
    return x;
  }
  // The address of the totals in L2. The address is computed again at each use, so that it takes no registers in
  // between.
  __device__ __forceinline__ float4* outer_totals() const {
    return call_->totals + std::int64_t{blockIdx.x} * (Tile::kOuterFours * Tile::kRowThreads) +
           (AttentionGpu::thread() - 128);
  }
  __device__ __forceinline__ float4 outer_total(const float4* totals, int j) const {
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    asm volatile(
        "{\n"
        ".reg .pred has_total;\n"
        "setp.ne.s32 has_total, %5, 0;\n"
        "@has_total ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
        : "l"(totals + (j - Tile::kSharedFours) * Tile::kRowThreads), "r"(static_cast<int>(has_total_))
        : "memory");
    return x;
  }
  __device__ __forceinline__ float4 merged(int j, float4 x) const {
    x.x = fma_rn(x.x, of_total_[0], mul_rn(o_[4 * j], of_split_[0]));
    x.y = fma_rn(x.y, of_total_[0], mul_rn(o_[4 * j + 1], of_split_[0]));
    x.z = fma_rn(x.z, of_total_[1], mul_rn(o_[4 * j + 2], of_split_[1]));
    x.w = fma_rn(x.w, of_total_[1], mul_rn(o_[4 * j + 3], of_split_[1]));
    return x;
  }
  __device__ __forceinline__ void merge_sums(int j) {
    const float4 x = merged(j, total(j));
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(total_ + j * 128 * 16), "f"(x.x), "f"(x.y), "f"(x.z),
                 "f"(x.w)
                 : "memory");
  }
  // Loads kCount groups of four totals at once, so the thread waits for L2 only once.
  template <int kCount>
  __device__ __forceinline__ void load_outer_totals(const float4* totals, int first, float4 (&x)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = outer_total(totals, first + j);
  }
  // Starts the loads of the totals that store() needs next, if these totals lie in L2.
  __device__ __forceinline__ void fetch_totals(int first) {
    if (first >= Tile::kSharedFours && first < Tile::kSums / 4) load_outer_totals(outer_totals(), first, fetched_);
  }
  template <int kCount>
  __device__ __forceinline__ void merge_outer_sums(float4* totals, int first) {
    float4 before[kCount];
    __syncwarp();
    load_outer_totals(totals, first, before);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      __stcg(totals + (first + j - Tile::kSharedFours) * Tile::kRowThreads, merged(first + j, before[j]));
    }
  }
  __device__ __forceinline__ void merge_outer_sums() {
    float4* const totals = outer_totals();
    if constexpr (kIsTight) {
      // After the first part has been merged, its sums' registers are free, so the second part can load more totals at
      // once.
      constexpr int kFirst = Tile::kOuterFours < 8 ? Tile::kOuterFours : 8, kSecond = Tile::kOuterFours - kFirst;
      merge_outer_sums<kFirst>(totals, Tile::kSharedFours);
      if constexpr (kSecond > 0) merge_outer_sums<kSecond>(totals, Tile::kSharedFours + kFirst);
    } else {
      constexpr int kAtOnce = 2;  // more loads at once would spill
#pragma unroll
      for (int j = Tile::kSharedFours; j < Tile::kSums / 4; j += kAtOnce) merge_outer_sums<kAtOnce>(totals, j);
    }
  }

  const WgmmaCall* const call_;
  std::uint32_t total_;  // address of this thread's totals in shared memory
  float of_total_[2], of_split_[2];
  bool has_total_;
  float o_[Tile::kSums];
  static constexpr int kFetched = Tile::kSharedFours % 8 == 0 ? 8 : 4;
  float4 fetched_[kFetched];
};

}  // namespace
}  // namespace rlk::cuda
