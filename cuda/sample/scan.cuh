// Passes of sample over all logits of its rows. A warp has a group of 32 leaves in shared memory, and a lane a leaf, as
// in logprob's stream. Finishing kernels (finish.cuh) read what a pass writes. Bound by HBM: each pass reads each logit
// once. One body serves every architecture, and each has its own machine code.
#pragma once

#include <algorithm>

#include "../common/dependent_launch.cuh"
#include "../common/kernel_memory.h"
#include "../logprob/leaf_group.cuh"
#include "rlk/kernels/divisor.h"
#include "rlk/kernels/sample_check.h"
#include "rlk/kernels/sample_tree.h"
#include "team.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

// kFirst: the leaves' largest z; for rows that nothing cuts also their nodes. kKept: nodes and masks of the columns that
// waiting rows keep. kRaw: nodes, and for the n best the largest z, of all valid columns at temperature 1.
enum class ScanPass { kFirst, kKept, kRaw };

struct ScanWork {
  SampleChunk chunk;
  int tasks;       // groups of all rows
  Divisor groups;  // groups per row
  Divisor steps;   // groups in a part; 1 if a group holds several parts
  int height;      // height of a part's tree
};
inline ScanWork scan_work(const SampleParams& p, const SampleChunk& chunk, const GroupGrid& grid) {
  return {chunk, static_cast<int>(chunk.rows) * grid.groups, Divisor(static_cast<std::uint32_t>(grid.groups)),
          Divisor(static_cast<std::uint32_t>(std::max(grid.groups_per_part, 1))), leaf_height(p.vocab_size)};
}

// The largest of a leaf's n columns; NaN if any is NaN.
template <class T>
__device__ __forceinline__ float leaf_top(const Leaf<T>& leaf, int n) {
  if (n >= kBlockColumns) return leaf_range<T>(leaf, n).largest;
  float largest = -infinity();
#pragma unroll 1
  for (int column = 0; column < n; ++column) largest = max_nan(largest, T::load(*leaf.element(column)));
  return largest;
}

// Calls fn(eight columns' z, their first column, their bits, shift of the bits in words[k], k) over a leaf's columns.
template <class T, class F>
__device__ __forceinline__ void each_vec8(const Leaf<T>& leaf, int n, const std::uint32_t (&words)[kMaskWords], F fn) {
#pragma unroll
  for (int k = 0; k < kMaskWords; ++k) {
#pragma unroll 1
    for (int shift = 0; shift < 32 && 32 * k + shift < n; shift += kVec8) {
      float z[kVec8];
      leaf.vec8((32 * k + shift) / kVec8).to_float(z);
      fn(z, 32 * k + shift, words[k] >> shift & 0xffu, shift, k);
    }
  }
}
// The largest of the columns with a bit in `words`.
template <class T>
__device__ __forceinline__ float masked_top(const Leaf<T>& leaf, int n, const std::uint32_t (&words)[kMaskWords]) {
  float largest = -infinity();
  each_vec8(leaf, n, words, [&](const float(&z)[kVec8], int, std::uint32_t bits, int, int) {
#pragma unroll
    for (int r = 0; r < kVec8; ++r) largest = max_nan(largest, (bits >> r & 1) != 0 ? z[r] : -infinity());
  });
  return largest;
}
// Statistics of these columns; `largest` is their largest.
template <class T, Exp kExp>
__device__ __forceinline__ SoftmaxStats masked_stats(const Leaf<T>& leaf, int n,
                                                     const std::uint32_t (&words)[kMaskWords], float c, float largest) {
  SoftmaxStats stats;
  const LeafReference reference = leaf_reference(c, largest, &stats);
  if (!reference.usable) return stats;
  Chains<kExp, false> chains;
  const float addend = chains.addend(reference.m);
  each_vec8(leaf, n, words, [&](const float(&z)[kVec8], int, std::uint32_t bits, int, int) {
#pragma unroll
    for (int r = 0; r < kVec8; ++r) {
      const float e = chains.exponential(z[r] > reference.q ? z[r] : reference.q, c, addend);
      chains.add(r, 0.0f, (bits >> r & 1) != 0 && z[r] != -infinity() ? e : 0.0f);
    }
  });
  return chains.total(reference.m);
}

// The columns that a waiting row keeps, by its state.
template <class T, Exp kExp>
class KeptTest : RowTree<BlockTeam<kWarp>, T, kExp> {
  using Base = RowTree<BlockTeam<kWarp>, T, kExp>;

 public:
  __device__ __forceinline__ KeptTest(const SampleParams& p, std::int64_t row, SampleShared* unused,
                                      std::uint32_t* mask, SampleState* state)
      : Base(BlockTeam<kWarp>(), p, row, unused, mask, state, nullptr) {
    this->load_state();
  }
  // The bits of the columns of a leaf that the row keeps.
  __device__ __forceinline__ void find(const Leaf<T>& leaf, std::int64_t slot, int first, int columns,
                                       std::uint32_t (&words)[kMaskWords]) const {
    this->template present_in_leaf<false>(slot, first, columns, words);
    if (!this->cuts_) return;
    each_vec8(leaf, columns, words, [&](const float(&z)[kVec8], int at, std::uint32_t bits, int shift, int k) {
#pragma unroll
      for (int r = 0; r < kVec8; ++r) {
        if ((bits >> r & 1) != 0 && !this->is_kept(z[r], first + at + r)) words[k] &= ~(1u << (shift + r));
      }
    });
  }
  __device__ __forceinline__ float scale() const { return this->c_; }
};

template <class T, Exp kExp, ScanPass kPass, int kMaxWarps>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 1)
    sample_scan_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ GroupGrid grid,
                       const __grid_constant__ ScanWork work) {
  extern __shared__ __align__(128) unsigned char shared[];  // an image for each warp
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const std::uint32_t image = shared_address(shared) + warp * kGroupBytes<T>;
  const std::int64_t slots = std::int64_t{kNumParts} << work.height;
  const auto row_of = [&](int task) { return static_cast<int>(work.groups.quotient(task)); };
  const auto group_of = [&](int task) {
    const int index = task - row_of(task) * static_cast<int>(work.groups.value);
    const int part = static_cast<int>(work.steps.quotient(index));
    return Group{grid.groups_per_part > 0 ? part : index * grid.parts_per_group,
                 index - part * static_cast<int>(work.steps.value)};
  };
  const auto takes = [&](int task) {
    if (task >= work.tasks) return false;
    if constexpr (kPass == ScanPass::kKept) return work.chunk.states[row_of(task)].waits != kDone;
    return kPass != ScanPass::kRaw || p.ids[work.chunk.first + row_of(task)] >= 0;
  };
  const auto start = [&](int task) {
    const auto* logits =
        static_cast<const typename T::Storage*>(p.logits) + (work.chunk.first + row_of(task)) * p.logits_stride;
    const GroupCopy<T> copy(logits, grid, group_of(task), image, lane);
    if (takes(task)) copy.start(image, lane);
    return copy;
  };

  wait_for_previous_kernel();
  allow_next_kernel();
  int task = static_cast<int>(blockIdx.x) + warp * static_cast<int>(gridDim.x);
  if (task >= work.tasks) return;
  GroupCopy<T> copy = start(task);
#pragma unroll 1
  while (task < work.tasks) {
    const int i = row_of(task), n = copy.leaf_columns;
    const Group group = group_of(task);
    const LeafSpan span = leaf_span(grid, group, lane);
    const Leaf<T> leaf = copy.leaf;
    const bool taken = takes(task);
    bool has_node = false, has_top = false, has_mask = false;
    float top = 0.0f;
    SoftmaxStats node = identity_stats();
    std::uint32_t words[kMaskWords] = {};
    int part = group.part, at = group.step * kGroupLeaves + lane;  // the lane's leaf
    if (grid.groups_per_part == 0) {
      part += lane / grid.leaves;
      at = lane % grid.leaves;
    }
    const std::int64_t slot = (std::int64_t{part} << work.height) + at;
    if (taken) {
      const std::int64_t row = work.chunk.first + i;
      std::uint32_t* const mask = work.chunk.masks + i * kMaskWords * slots;
      SampleRow want = {1.0f, 1.0f, 0.0f, 0, false, kOk};
      if constexpr (kPass == ScanPass::kFirst) want = sample_row_of<PlainMemory>(p, row);
      copy_async_wait_all();
      __syncwarp();
      if (copy.shift() != 0) align_leaf<T>(leaf, n, copy.shift());
      if constexpr (kPass == ScanPass::kKept) {
        const KeptTest<T, kExp> test(p, row, reinterpret_cast<SampleShared*>(shared), mask, work.chunk.states + i);
        test.find(leaf, slot, span.first, n, words);
        node = masked_stats<T, kExp>(leaf, n, words, test.scale(), masked_top<T>(leaf, n, words));
        has_node = has_mask = true;
      } else if (want.status == kOk) {
        const bool whole = kPass == ScanPass::kRaw || want.greedy || !want.truncates();
        const bool masked = kPass == ScanPass::kFirst && p.allowed != nullptr;
        has_node = whole;
        has_top = !whole || want.greedy || p.top_ids != nullptr;
        has_mask =
            kPass == ScanPass::kFirst && whole && (p.top_ids != nullptr || (masked && p.kept_offsets != nullptr));
        const float c = log2_scale(want.temperature);
        if (kPass == ScanPass::kFirst && (masked || has_mask)) {
          allowed_in_leaf(masked ? p.allowed + row * p.allowed_stride : nullptr, span.first, n, words);
        }
        if (masked) {
          top = masked_top<T>(leaf, n, words);
          if (has_node) node = masked_stats<T, kExp>(leaf, n, words, c, top);
        } else {
          if (has_top) top = leaf_top<T>(leaf, n);
          if (has_node) node = leaf_stats<T, kExp, false>(leaf, n, c, 1.0f, 0.0f);
        }
      }
      __syncwarp();
    }
    task += static_cast<int>(gridDim.x) * warps;
    if (task < work.tasks) copy = start(task);
    if (!taken) continue;
    if (n > 0) {
      float* const nodes = work.chunk.nodes + i * 4 * slots;
      if (has_node) *reinterpret_cast<float2*>(nodes + 2 * slot) = make_float2(node.m, node.S);
      if (has_top) nodes[2 * slots + slot] = top;
      if (has_mask) {
        *reinterpret_cast<uint4*>(work.chunk.masks + (i * slots + slot) * kMaskWords) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    if constexpr (kPass == ScanPass::kKept) {
      int kept = 0;
#pragma unroll
      for (int k = 0; k < kMaskWords; ++k) kept += set_bits_of(words[k]);
      kept = __reduce_add_sync(kAllLanes, kept);
      if (lane == 0 && kept > 0) BlockTeam<kWarp>().add(&work.chunk.states[i].kept, static_cast<std::uint64_t>(kept));
    }
  }
}

#if RLK_CUDA_SM90
// Warps whose groups shared memory holds, for elements of 4 and of 2 bytes. The test of kept columns needs more registers.
template <class T, ScanPass kPass>
constexpr int kScanWarps = !T::kPacked                ? 14
                           : kPass == ScanPass::kKept ? 20
                                                      : 27;
#else
template <class T, ScanPass kPass>
constexpr int kScanWarps = T::kPacked ? 19 : 9;
#endif

// kAfter: this call's previous kernel lets the scan begin while it ends.
template <class T, Exp kExp, ScanPass kPass, bool kAfter>
void run_scan(const SampleParams& p, const GroupGrid& grid, const SampleChunk& chunk, cudaStream_t stream) {
  constexpr int kMost = kScanWarps<T, kPass>;
  auto* kernel = sample_scan_kernel<T, kExp, kPass, kMost>;
  const int warps = std::min(kMost, allow_shared_memory<sample_scan_kernel<T, kExp, kPass, kMost>>() / kGroupBytes<T>);
  const ScanWork work = scan_work(p, chunk, grid);
  launch_dependent<kAfter && RLK_CUDA_ARCH::kOverlap>(kernel, std::min(multiprocessors(current_device()), work.tasks),
                                                      warps * kWarp, warps * kGroupBytes<T>, stream, p, grid, work);
}

}  // namespace
}  // namespace rlk::cuda
