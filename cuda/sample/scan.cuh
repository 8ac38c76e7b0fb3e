// Passes of sample over all 16-bit logits, and the code that these passes share with the passes of leaf_scan.cuh. As in
// logprob's stream, a warp copies a group of 32 leaves to shared memory, and each lane processes one leaf. Finishing
// kernels (finish_kernels.cuh) read what a pass writes. Bound by HBM: each pass reads each logit once. All
// architectures share this source; each has its own machine code.
#pragma once

#include <algorithm>

#include "../common/dependent_launch.cuh"
#include "../common/kernel_memory.h"
#include "../logprob/leaf_group.cuh"
#include "draw.cuh"
#include "kept_place.cuh"
#include "kernels/rows/divisor.h"
#include "kernels/sample/check.h"
#include "masses.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

// The results of each pass. kFirst: the largest z of each leaf; for rows that nothing cuts, or that masses alone cut,
// also the nodes of the leaves. kMasses: masses around the cut, for rows that wait for these masses. kKept: nodes and
// masks of the columns that waiting rows keep. kRaw: nodes of all valid columns at temperature 1, and for the n best
// the leaves' largest z. If each group holds leaves of one part, a pass also stores the root of each group.
enum class ScanPass { kFirst, kMasses, kKept, kRaw };

struct ScanWork {
  SampleChunk chunk;
  int tasks;       // groups of all rows
  Divisor groups;  // groups per row
  Divisor steps;   // groups per part; 1 if a group holds several parts
  int height;      // height of a part's tree
};
inline ScanWork scan_work(const SampleParams& p, const SampleChunk& chunk, const GroupGrid& grid) {
  return {chunk, static_cast<int>(chunk.rows) * grid.groups, Divisor(static_cast<std::uint32_t>(grid.groups)),
          Divisor(static_cast<std::uint32_t>(std::max(grid.groups_per_part, 1))), leaf_height(p.vocab_size)};
}

// The largest of a leaf's n columns; NaN if any column is NaN.
template <class T>
__device__ __forceinline__ float leaf_top(const Leaf<T>& leaf, int n) {
  if (n >= kBlockColumns) return leaf_range<T>(leaf, n).largest;
  float largest = -infinity();
#pragma unroll 1
  for (int column = 0; column < n; ++column) largest = max_nan(largest, T::load(*leaf.element(column)));
  return largest;
}

// Calls fn(z, first column, bits, shift, k) for each vector of eight columns of a leaf. `bits` are the columns' bits in
// words[k], from bit `shift` on.
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
// Statistics of the columns with a bit in `words`. `largest`: the largest z of these columns.
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

// Writes z of eight consecutive columns, and -Inf for absent columns. The place of the eight columns differs between
// neighbouring leaves.
template <class T>
__device__ __forceinline__ void sample_leaf(const Leaf<T>& leaf, int n, bool masked,
                                            const std::uint32_t (&words)[kMaskWords], int lane, float* to) {
  static_assert(kSampledColumns == kVec8);
  const int first = lane % (kLeafColumns / kVec8) * kVec8;
  float z[kVec8];
  leaf.vec8(first / kVec8).to_float(z);
  const bool odd = (lane & 4) != 0, behind = (lane & 8) != 0;
  const std::uint32_t low = odd ? words[1] : words[0], high = odd ? words[3] : words[2];
  const std::uint32_t bits = masked ? (behind ? high : low) >> first % 32 : ~0u;
#pragma unroll
  for (int r = 0; r < kVec8; ++r) z[r] = first + r < n && (bits >> r & 1) != 0 ? z[r] : -infinity();
  reinterpret_cast<float4*>(to)[0] = make_float4(z[0], z[1], z[2], z[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(z[4], z[5], z[6], z[7]);
}

// Decides, from a waiting row's state, which columns the row keeps. Two bounds of z decide most columns; rank and mass
// decide the columns between the bounds.
template <class T, Exp kExp>
class KeptTest : RowTree<BlockTeam<kWarp>, T, kExp> {
  using Base = RowTree<BlockTeam<kWarp>, T, kExp>;

 public:
  __device__ __forceinline__ KeptTest(const SampleParams& p, std::int64_t row, SampleShared* unused,
                                      std::uint32_t* mask, SampleState* state)
      : Base(BlockTeam<kWarp>(), p, row, unused, mask, state, nullptr) {
    this->load_state();
    if (!this->cuts_) return;
    if (this->least_ > 0) {
      // The margin is far larger than the sum of three errors: of the exponential, of its exponent, and of this
      // logarithm.
      const float margin = 0x1p-6f + abs_of(this->m_) * 0x1p-18f;
      const float exponent = __log2f(__ull2float_rn(this->least_)) - 44.0f + this->m_;
      const float below = div_rn(exponent - margin, this->c_), above = div_rn(exponent + margin, this->c_);
      lower_ = below < infinity() ? below : -infinity();
      upper_ = is_nan(above) ? infinity() : above;
    }
    if (this->last_ != kLastRank) {
      const float last = z_of_rank(this->last_);
      const float behind = is_nan(last) ? infinity() : nextafterf(last, infinity());
      lower_ = last > lower_ ? last : lower_;
      upper_ = behind > upper_ ? behind : upper_;
    }
  }
  // Whether the row may keep a column of a leaf with this largest z.
  __device__ __forceinline__ bool may_keep(std::int64_t slot, float largest) const {
    if (!this->marked_) return !(largest < lower_);
    const uint4 words = reinterpret_cast<const uint4*>(this->mask_)[slot];
    return (words.x | words.y | words.z | words.w) != 0;
  }
  // Returns the statistics of a leaf's columns that the row keeps, and sets the bits of these columns in `words`. A
  // leaf that keeps any column also keeps its largest column.
  __device__ __forceinline__ SoftmaxStats find(const Leaf<T>& leaf, std::int64_t slot, int first, int columns,
                                               float largest, std::uint32_t (&words)[kMaskWords]) const {
    this->template present_in_leaf<false>(slot, first, columns, words);
    SoftmaxStats stats;
    const LeafReference reference = leaf_reference(this->c_, largest, &stats);
    Chains<kExp, false> chains;
    const float c = this->c_, addend = chains.addend(reference.m);
    constexpr int kStep = 2 * kVec8;
    std::uint32_t any = 0;
#pragma unroll
    for (int k = 0; k < kMaskWords; ++k) {
      std::uint32_t kept = 0;
#pragma unroll 1
      for (int shift = 0; shift < 32 && 32 * k + shift < columns; shift += kStep) {
        const int at = 32 * k + shift;
        float half[2][kVec8], z[kStep];
#pragma unroll
        for (int i = 0; i < 2; ++i) leaf.vec8(at / kVec8 + i).to_float(half[i]);
#pragma unroll
        for (int r = 0; r < kStep; ++r) z[r] = half[r / kVec8][r % kVec8];
        const std::uint32_t bits = words[k] >> shift;
        std::uint32_t keeps = 0, open = 0;
#pragma unroll
        for (int r = 0; r < kStep; ++r) {
          const bool must = z[r] >= upper_;
          keeps |= must ? 1u << r : 0;
          open |= z[r] >= lower_ && !must ? 1u << r : 0;
        }
        keeps &= bits;
#pragma unroll 1
        for (open &= bits; open != 0; open &= open - 1) {
          const int r = lowest_bit_of(open);
          if (this->is_kept(T::load(*leaf.element(at + r)), first + at + r)) keeps |= 1u << r;
        }
        kept |= keeps << shift;
        if (upper_ == -infinity()) {  // a column of -Inf has no term
#pragma unroll
          for (int r = 0; r < kStep; ++r) keeps &= z[r] == -infinity() ? ~(1u << r) : ~0u;
        }
#pragma unroll
        for (int r = 0; r < kStep; ++r) {
          const float e = chains.exponential(fmaxf(z[r], reference.q), c, addend);
          chains.add(r % kVec8, 0.0f, (keeps >> r & 1) != 0 ? e : 0.0f);
        }
      }
      words[k] = kept;
      any |= kept;
    }
    return any == 0 ? identity_stats() : reference.usable ? chains.total(reference.m) : stats;
  }

  // Returns the same as find(). The eight lanes of a leaf compute the result together; each lane has the columns of one
  // chain. All lanes of a warp call this function.
  __device__ __forceinline__ SoftmaxStats find_in_lanes(const float (&z)[kLeafColumns / kNumChains], std::int64_t slot,
                                                        int first, int columns, float largest,
                                                        std::uint32_t (&words)[kMaskWords]) const {
    constexpr int kSteps = kLeafColumns / kNumChains;
    const int lane = static_cast<int>(threadIdx.x % kWarp), chain = lane % kNumChains;
    SoftmaxStats stats;
    const LeafReference reference = leaf_reference(this->c_, largest, &stats);
    using Exponential = Chains<kExp, false>;
    const float addend = Exponential::addend(reference.m);
    std::uint32_t bits[kSteps];
    // The common case: no column is missing, the bounds decide every column, and no kept column reaches the clamp.
    const bool whole = columns == kLeafColumns && this->allowed_ == nullptr && !this->marked_;
    if (__all_sync(kAllLanes, whole && reference.usable && lower_ > reference.q)) {
      float sum = 0.0f, nearest = infinity();  // the least z that reaches the lower bound
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const bool has = z[k] >= lower_;
        bits[k] = __ballot_sync(kAllLanes, has);
        nearest = fminf(nearest, has ? z[k] : infinity());
        const float e = Exponential::exponential(z[k], this->c_, addend);
        sum = add_rn(sum, has ? e : 0.0f);
      }
      if (__all_sync(kAllLanes, nearest >= upper_)) {
#pragma unroll
        for (int d = 1; d < kNumChains; d *= 2) sum = add_rn(sum, shuffle_xor(sum, d));
        return words_of_lanes(bits, words) ? SoftmaxStats{reference.m, sum, 0.0f, 0.0f} : identity_stats();
      }
    }
    this->template present_in_leaf<false>(slot, first, columns, words);
    const bool all = __all_sync(kAllLanes, (words[0] & words[1] & words[2] & words[3]) == ~0u);
    std::uint32_t keeps = 0, open = 0;  // bit k: the lane's k-th column
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      keeps |= z[k] >= upper_ ? 1u << k : 0;
      open |= z[k] >= lower_ ? 1u << k : 0;
    }
    if (!all) {
      std::uint32_t present = 0;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) present |= (words[k / 4] >> (k % 4 * kNumChains + chain) & 1) << k;
      keeps &= present;
      open &= present;
    }
    if (__any_sync(kAllLanes, open != keeps)) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (((open ^ keeps) >> k & 1) != 0 && this->is_kept(z[k], first + k * kNumChains + chain)) keeps |= 1u << k;
      }
    }
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const bool has = (keeps >> k & 1) != 0;
      bits[k] = __ballot_sync(kAllLanes, has);
      const float e = Exponential::exponential(fmaxf(z[k], reference.q), this->c_, addend);
      sum = add_rn(sum, has && z[k] != -infinity() ? e : 0.0f);  // a column of -Inf has no term
    }
#pragma unroll
    for (int d = 1; d < kNumChains; d *= 2) sum = add_rn(sum, shuffle_xor(sum, d));
    return !words_of_lanes(bits, words) ? identity_stats()
           : reference.usable           ? SoftmaxStats{reference.m, sum, 0.0f, 0.0f}
                                        : stats;
  }

 private:
  // Gathers the bits of the lane's leaf into `words`. `bits` has one word of the warp for each step of the chains of
  // its four leaves. Returns whether the leaf has any bits.
  static __device__ __forceinline__ bool words_of_lanes(const std::uint32_t (&bits)[kLeafColumns / kNumChains],
                                                        std::uint32_t (&words)[kMaskWords]) {
    const auto quarter = static_cast<std::uint32_t>(threadIdx.x % kWarp / kNumChains), pair = quarter | (quarter + 4)
                                                                                                            << 4;
    std::uint32_t any = 0;
#pragma unroll
    for (int k = 0; k < kMaskWords; ++k) {
      const std::uint32_t low = __byte_perm(bits[4 * k], bits[4 * k + 1], pair);
      const std::uint32_t high = __byte_perm(bits[4 * k + 2], bits[4 * k + 3], pair);
      words[k] = __byte_perm(low, high, 0x5410);
      any |= words[k];
    }
    return any != 0;
  }

  float lower_ = -infinity(), upper_ = -infinity();
};

template <class T, Exp kExp, ScanPass kPass, int kMaxWarps>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 1)
    sample_scan_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ GroupGrid grid,
                       const __grid_constant__ ScanWork work) {
  extern __shared__ __align__(128) unsigned char shared[];  // for each warp, a copy of a group's logits
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
    if constexpr (kPass == ScanPass::kMasses) return work.chunk.states[row_of(task)].waits == kForMasses;
    if constexpr (kPass == ScanPass::kKept) return work.chunk.states[row_of(task)].waits == kForTree;
    return kPass != ScanPass::kRaw || p.ids[work.chunk.first + row_of(task)] >= 0;
  };
  const auto slot_of = [&](const Group& group) {  // the lane's leaf
    const bool whole = grid.groups_per_part > 0;
    const int part = group.part + (whole ? 0 : lane / grid.leaves);
    return (std::int64_t{part} << work.height) + (whole ? group.step * kGroupLeaves + lane : lane % grid.leaves);
  };
  // Values of the group whose copy has started: the largest z of the lane's leaf, and the leaves that may keep a
  // column.
  float next_top = 0.0f;
  unsigned next_leaves = kAllLanes;
  const auto test_of = [&](int i) {
    return KeptTest<T, kExp>(p, work.chunk.first + i, reinterpret_cast<SampleShared*>(shared),
                             work.chunk.masks + i * kMaskWords * slots, work.chunk.states + i);
  };
  const auto start = [&](int task) {
    const int i = row_of(task);
    const Group group = group_of(task);
    const auto* logits = static_cast<const typename T::Storage*>(p.logits) + (work.chunk.first + i) * p.logits_stride;
    const GroupCopy<T> copy(logits, grid, group, image, lane);
    if (!takes(task)) return copy;
    if constexpr (kPass == ScanPass::kKept) {
      const std::int64_t slot = slot_of(group);
      next_top = copy.leaf_columns > 0 ? work.chunk.nodes[i * 4 * slots + 2 * slots + slot] : -infinity();
      next_leaves = __ballot_sync(kAllLanes, copy.leaf_columns > 0 && test_of(i).may_keep(slot, next_top));
      const unsigned needed = grid.groups_per_part > 0 || next_leaves == 0 ? next_leaves : kAllLanes;
      copy.start(image, lane, [needed](int byte) {
        const int first = byte / Leaf<T>::kBytes, last = (byte + 15) / Leaf<T>::kBytes;
        return (needed >> max(first, 0) & 1) != 0 || (needed >> min(last, kWarp - 1) & 1) != 0;
      });
    } else {
      copy.start(image, lane);
    }
    return copy;
  };

  wait_for_previous_kernel();
  if (kPass == ScanPass::kFirst && p.kept_offsets != nullptr) clear_published(work.chunk);
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
    const std::int64_t slot = slot_of(group);
    if (taken) {
      const std::int64_t row = work.chunk.first + i;
      SampleRow want = {1.0f, 1.0f, 0.0f, 0, false, kOk};
      if constexpr (kPass == ScanPass::kFirst) want = sample_row_of<PlainMemory>(p, row);
      MassRow of_row;
      if constexpr (kPass == ScanPass::kMasses) of_row = MassRow(p, row, work.chunk, i);
      copy_async_wait_all();
      __syncwarp();
      if (copy.shift() != 0) align_leaf<T>(leaf, n, copy.shift());
      if constexpr (kPass == ScanPass::kKept) {
        if ((next_leaves >> lane & 1) != 0) {
          node = test_of(i).find(leaf, slot, span.first, n, next_top, words);
        }
        has_node = has_mask = true;
      } else if constexpr (kPass == ScanPass::kMasses) {
        LeafMasses masses;
        if (p.allowed == nullptr && __all_sync(kAllLanes, n == 0 || n == kLeafColumns)) {
          if (n > 0) {
            masses = of_row.high < infinity() ? masses_of_leaf<T, kExp, true, true>(leaf, n, of_row, words)
                                              : masses_of_leaf<T, kExp, true, false>(leaf, n, of_row, words);
          }
        } else {
          allowed_in_leaf(p.allowed ? p.allowed + row * p.allowed_stride : nullptr, span.first, n, words);
          masses = masses_of_leaf<T, kExp, false, true>(leaf, n, of_row, words);
        }
        __syncwarp();
        add_masses<T>(masses, leaf, static_cast<int>(slot), words, work.chunk, i, lane);
      } else if (want.status == kOk) {
        const bool whole = kPass == ScanPass::kRaw || want.greedy || !want.truncates();
        const bool masked = kPass == ScanPass::kFirst && p.allowed != nullptr;
        has_node = whole || cuts_by_mass(p, want);
        has_top = !whole || want.greedy || p.top_ids != nullptr;
        has_mask =
            kPass == ScanPass::kFirst && whole && (p.top_ids != nullptr || (masked && p.kept_offsets != nullptr));
        const float c = log2_scale(want.temperature);
        if (masked || has_mask) {
          allowed_in_leaf(masked ? p.allowed + row * p.allowed_stride : nullptr, span.first, n, words);
        }
        if (kPass == ScanPass::kFirst && n > 0 && takes_sample(p, want, work.chunk)) {
          float* const list = reinterpret_cast<float*>(work.chunk.listed + i * work.chunk.most_listed);
          sample_leaf<T>(leaf, n, masked, words, lane, list + slot * kSampledColumns);
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
    if (has_node && grid.groups_per_part > 0) {
      const SoftmaxStats root = tree_over_lanes<false>(n > 0 ? node : identity_stats());
      if (lane == 0) {
        float* const roots = scanned_roots(work.chunk.nodes + i * 4 * slots, slots);
        *reinterpret_cast<float2*>(roots + 2 * (slot / kWarp)) = make_float2(root.m, root.S);
      }
    }
    if constexpr (kPass == ScanPass::kKept) {
      int kept = 0;
#pragma unroll
      for (int k = 0; k < kMaskWords; ++k) kept += set_bits_of(words[k]);
      kept = __reduce_add_sync(kAllLanes, kept);
      if (lane == 0 && kept > 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(&work.chunk.states[i].kept),
                  static_cast<unsigned long long>(kept));
      }
    }
  }
}

#if RLK_CUDA_SM90
// Warps per block; shared memory holds a group for each warp. The test of kept columns needs more registers, so the
// pass over kept columns has fewer warps. With 22 warps, the first scan leaves shared memory for a finishing block,
// which waits on the same multiprocessor.
template <ScanPass kPass>
constexpr int kScanWarps = kPass == ScanPass::kKept || kPass == ScanPass::kMasses ? 20
                           : kPass == ScanPass::kFirst                            ? 22
                                                                                  : 27;
#else
template <ScanPass kPass>
constexpr int kScanWarps = 19;
#endif

// `kAfter`: the scan may begin while the previous kernel ends, and then waits for that kernel.
template <class T, Exp kExp, ScanPass kPass, bool kAfter>
void run_scan(const SampleParams& p, const GroupGrid& grid, const SampleChunk& chunk, cudaStream_t stream) {
  static_assert(T::kPacked);
  constexpr int kMost = kScanWarps<kPass>;
  auto* kernel = sample_scan_kernel<T, kExp, kPass, kMost>;
  const int warps = std::min(kMost, allow_shared_memory<sample_scan_kernel<T, kExp, kPass, kMost>>() / kGroupBytes<T>);
  const ScanWork work = scan_work(p, chunk, grid);
  launch_dependent<kAfter && RLK_CUDA_ARCH::kOverlap>(kernel, std::min(multiprocessors(current_device()), work.tasks),
                                                      warps * kWarp, warps * kGroupBytes<T>, stream, p, grid, work);
}

}  // namespace
}  // namespace rlk::cuda
