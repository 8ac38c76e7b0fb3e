// top_p without top_k for few rows, on SM90. A cluster of blocks computes one row in one launch, and its threads hold
// the row's columns in registers from the load to the kept ids. Blocks exchange extremes, bins of masses and counts
// through distributed shared memory. Bound by latency: one read of the logits, and about six barriers of the cluster.
#pragma once

#include "../common/cluster_sm90.cuh"
#include "../common/dependent_launch.cuh"
#include "draw.cuh"
#include "kept_list.cuh"
#include "kept_place.cuh"
#include "leaf_scan.cuh"

namespace rlk::cuda {
namespace {

constexpr int kRowBlocks = 16;  // blocks of a cluster
constexpr int kRowGroups = 3;   // groups of 32 leaves that a block may hold
constexpr int kGroupWarps = 8;  // warps of a group; each has four leaves
constexpr int kGroupThreads = kGroupWarps * kWarp;
constexpr int kClusterRows = 7;  // with more rows, scans of all rows are faster
constexpr int kMostAtCut = 512;  // columns in the cut's bin that shared memory lists
constexpr int kFineBins = 512;   // bins of that list
constexpr int kBinsOfBlock = kDigitBins / kRowBlocks, kBinsOfWarp = kBinsOfBlock / kGroupWarps;
static_assert(kBinsOfWarp == kWarp / 2 && kRowBlocks == kWarp / 2);

struct ClusterShared {
  std::uint64_t bins[kDigitBins];                      // masses of the block's columns
  std::uint64_t sums[kBinsOfBlock];                    // masses of all blocks, in the bins of this block
  std::uint64_t parts[kRowBlocks * kGroupWarps];       // sums over kBinsOfWarp bins each, of all blocks
  std::uint64_t found[kMostAtCut];                     // ranks of the block's columns in the cut's bin
  std::uint64_t list[kMostAtCut], masses[kMostAtCut];  // those of all blocks
  uint4 masks[kRowGroups][kGroupLeaves];               // kept columns
  float2 nodes[kRowGroups][kGroupLeaves];
  float2 roots[kMostSlots / kWarp];                              // the groups of all blocks
  float2 of_warps[kRowGroups * kGroupWarps], range[kRowBlocks];  // largest and smallest value
  std::uint32_t counts[kRowBlocks * kRowGroups];                 // kept columns of each group
  std::uint32_t words[kDrawWords];
  std::uint64_t goal, before, last;
  std::int64_t begin;
  int bin;
  std::uint32_t num_found, num_fine;
  std::uint16_t fine[2][kMostAtCut];  // the list's columns in the cut's finer bin, of both steps
};

template <class N>
__device__ __forceinline__ N load_remote(const N* of_block, int rank) {
  const std::uint32_t address = map_to_rank(shared_address(of_block), static_cast<std::uint32_t>(rank));
  static_assert(sizeof(N) == 4 || sizeof(N) == 8 || sizeof(N) == 16);
  N x;
  if constexpr (sizeof(N) == 4) {
    std::uint32_t w;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(w) : "r"(address) : "memory");
    memcpy(&x, &w, sizeof x);
  } else if constexpr (sizeof(N) == 8) {
    std::uint64_t w;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(w) : "r"(address) : "memory");
    memcpy(&x, &w, sizeof x);
  } else {
    std::uint32_t w[4];
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(address)
                 : "memory");
    memcpy(&x, w, sizeof x);
  }
  return x;
}
__device__ __forceinline__ void store_remote_u64(std::uint32_t remote, std::uint64_t x) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(remote), "l"(x) : "memory");
}

template <class T, Exp kExp>
class ClusterRow {
  using Storage = typename T::Storage;
  using Exponential = Chains<kExp, false>;
  static constexpr int kBatch = 4;  // columns that a loop's step processes

 public:
  __device__ __forceinline__ ClusterRow(const SampleParams& p, const GroupGrid& grid, const SampleChunk& chunk,
                                        int height, ClusterShared* shared)
      : p_(p),
        grid_(grid),
        chunk_(chunk),
        s_(*shared),
        height_(height),
        rank_(static_cast<int>(cluster_rank())),
        i_(static_cast<int>(blockIdx.x) / kRowBlocks),
        lane_(lane_of_warp()),
        warp_(warp_of_block()),
        chain_(lane_ % kNumChains) {
    const int task = task_of(warp_ / kGroupWarps);
    const int part = task / grid.groups_per_part, step = task - part * grid.groups_per_part;
    const bool exists = task < grid.groups;
    const int leaf = step * kGroupLeaves + leaf_of_group();
    first_ = exists ? grid.part_first[part] + leaf * kLeafColumns : 0;
    columns_ = exists ? max(0, min(grid.part_last[part] - first_, kLeafColumns)) : 0;
  }

  __device__ __forceinline__ void run() {
    const SampleRow want = sample_row_of<PlainMemory>(p_, row());
    c_ = log2_scale(want.temperature);
    const bool cut = want.top_p < 1.0f;
    load();
    if (rank_ == 0 && warp_ == 1 && lane_ < kDrawWords) {
      s_.words[lane_] = DrawWords<PlainMemory>(p_, row())(draw_word(lane_, height_));
    }
    float smallest = infinity();
    top_ = -infinity();
#pragma unroll
    for (int k = 0; k < kLeafSteps; ++k) {
      top_ = max_nan(top_, z_[k]);
      smallest = fminf(smallest, z_[k] == -infinity() ? infinity() : z_[k]);
    }
#pragma unroll
    for (int d = 1; d < kNumChains; d *= 2) top_ = max_nan(top_, shuffle_xor(top_, d));
    cluster_wait();  // every block of the cluster has begun
    const float2 range = range_of_row(top_, smallest);
    std::int32_t status = want.status;
    if (status == kOk && cut) {
      SoftmaxStats stats;
      const LeafReference reference = leaf_reference(c_, range.x, &stats);
      m_ = reference.m;
      q_ = reference.q;
      if (!reference.usable) status = status_of(stats) | (stats.m == -infinity() ? kEmptyRow : kOk);
    }
    std::uint64_t last = kLastRank;
    if (status == kOk && cut) last = find_last(want.top_p, range);
    if (status == kOk) find_nodes(last);
    meet();
    std::uint32_t before = 0, all = 0;
    if (status == kOk) all = counts_of_groups(&before);
    if (status == kOk && !cut) status = status_of_roots();
    finish(want, status, all, before);
  }

 private:
  __device__ __forceinline__ std::int64_t row() const { return chunk_.first + i_; }
  __device__ __forceinline__ int task_of(int group) const { return rank_ + group * kRowBlocks; }
  __device__ __forceinline__ int leaf_of_group() const { return warp_ % kGroupWarps * kAtOnce + lane_ / kNumChains; }
  static __device__ __forceinline__ int warps() { return static_cast<int>(blockDim.x) / kWarp; }
  static __device__ __forceinline__ void meet() {
    cluster_arrive();
    cluster_wait();
  }
  // The address of a value in the shared memory of another block.
  template <class N>
  __device__ __forceinline__ std::uint32_t of_block(const N* value, int rank) const {
    return map_to_rank(shared_address(value), static_cast<std::uint32_t>(rank));
  }

  // z of the lane's columns; -Inf for missing ones.
  __device__ __forceinline__ void load() {
    const Storage* const from = static_cast<const Storage*>(p_.logits) + row() * p_.logits_stride + first_ + chain_;
#pragma unroll
    for (int k = 0; k < kLeafSteps; ++k) {
      z_[k] = k * kNumChains + chain_ < columns_ ? T::load(from[k * kNumChains]) : -infinity();
    }
    if (sizeof(Storage) == sizeof(float) && p_.edited != nullptr) {
      std::uint32_t words[kMaskWords];
      allowed_in_leaf(p_.edited + row() * edit_words(p_.vocab_size), first_, columns_, words);
      const float* const edits = p_.edits + row() * p_.vocab_size + first_ + chain_;
#pragma unroll
      for (int k = 0; k < kLeafSteps; ++k) {
        if (has_bit(words, k)) z_[k] = edits[k * kNumChains];
      }
    }
    if (p_.allowed != nullptr) {
      std::uint32_t words[kMaskWords];
      allowed_in_leaf(p_.allowed + row() * p_.allowed_stride, first_, columns_, words);
#pragma unroll
      for (int k = 0; k < kLeafSteps; ++k) {
        if (!has_bit(words, k)) z_[k] = -infinity();
      }
    }
  }
  __device__ __forceinline__ bool has_bit(const std::uint32_t (&words)[kMaskWords], int k) const {
    return (words[k / 4] >> (k % 4 * kNumChains + chain_) & 1) != 0;
  }
  __device__ __forceinline__ int id_of(int k) const { return first_ + k * kNumChains + chain_; }
  // Calls fn(k of the first column, z) for the lane's columns, a few at once. Loops keep the code short, since a block
  // runs it once and waits for its instructions.
  template <class F>
  __device__ __forceinline__ void each_batch(F fn) {
#pragma unroll 1
    for (int base = 0; base < kLeafSteps; base += kBatch) {
      float z[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) z[k] = z_[k];
      fn(base, z);
#pragma unroll
      for (int k = 0; k + kBatch < kLeafSteps; ++k) z_[k] = z_[k + kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) z_[kLeafSteps - kBatch + k] = z[k];
    }
  }
  __device__ __forceinline__ std::uint64_t mass_of(float z) const {
    const float clamped = z > q_ ? z : q_;
    MassSum sum;
    sum.add(MassSum::units_of(Exponential::exponential(clamped, c_, Exponential::addend(m_))));
    return z == -infinity() ? 0 : sum.value();
  }

  // The largest and the smallest of a value over the row. A NaN is the largest.
  __device__ __forceinline__ float2 range_of_row(float largest, float smallest) {
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      largest = max_nan(largest, shuffle_xor(largest, d));
      smallest = fminf(smallest, shuffle_xor(smallest, d));
    }
    if (lane_ == 0) s_.of_warps[warp_] = make_float2(largest, smallest);
    __syncthreads();
    if (warp_ == 0) {
      const float2 of = s_.of_warps[lane_ % warps()];
      largest = of.x;
      smallest = of.y;
#pragma unroll
      for (int d = 1; d < kWarp; d *= 2) {
        largest = max_nan(largest, shuffle_xor(largest, d));
        smallest = fminf(smallest, shuffle_xor(smallest, d));
      }
      if (lane_ < kRowBlocks) store_remote_8(of_block(s_.range + rank_, lane_), make_float2(largest, smallest));
    }
    meet();
    const float2 of = s_.range[lane_ % kRowBlocks];
    largest = of.x;
    smallest = of.y;
#pragma unroll
    for (int d = 1; d < kRowBlocks; d *= 2) {
      largest = max_nan(largest, shuffle_xor(largest, d));
      smallest = fminf(smallest, shuffle_xor(smallest, d));
    }
    return make_float2(largest, smallest);
  }

  // The rank of the first column, in the order of ranks, with which the mass reaches top_p's share. Each step of the
  // loop adds masses to bins of equal width and finds the bin of this column, until the bin's columns fit the list. If
  // they all have one z, the bins are those of their ids.
  __device__ __forceinline__ std::uint64_t find_last(float top_p, const float2& range) {
    float high = range.x, low = fmaxf(range.y, range.x - kMassRange / c_);
    std::uint32_t open = (1u << kLeafSteps) - 1;  // bit k: the lane's k-th column may be this column
    bool by_id = false;
#pragma unroll 1
    for (bool is_first = true;; is_first = false) {
      const float scale = kDigitBins / (high - low);
      const auto value_of = [&](float z, int k) { return by_id ? -static_cast<float>(id_of(k)) : z; };
      const auto bin_of = [&](float z, int k) {
        const float x = mul_rn(sub_rn(high, value_of(z, k)), scale);
        return x >= kDigitBins - 1 ? kDigitBins - 1 : x > 0.0f ? static_cast<int>(x) : 0;
      };
      each_batch([&](int base, const float(&z)[kBatch]) {
        std::uint32_t high_half[kBatch];
        std::uint32_t* to[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const std::uint64_t mass = (open >> (base + k) & 1) != 0 ? mass_of(z[k]) : 0;
          const auto low_half = static_cast<std::uint32_t>(mass);
          to[k] = reinterpret_cast<std::uint32_t*>(s_.bins + bin_of(z[k], base + k));
          high_half[k] = static_cast<std::uint32_t>(mass >> 32);
          if (low_half != 0) high_half[k] += atomicAdd(to[k], low_half) > ~low_half ? 1 : 0;
          if (mass == 0) open &= ~(1u << (base + k));
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (high_half[k] != 0) atomicAdd(to[k] + 1, high_half[k]);
        }
      });
      meet();
      sum_bins();
      meet();
      if (warp_ == 0) find_bin(is_first, top_p);
      __syncthreads();
      const int bin = s_.bin;
      for (int i = static_cast<int>(threadIdx.x); i < kDigitBins; i += static_cast<int>(blockDim.x)) s_.bins[i] = 0;
      each_batch([&](int base, const float(&z)[kBatch]) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if ((open >> (base + k) & 1) == 0) continue;
          if (bin_of(z[k], base + k) != bin) {
            open &= ~(1u << (base + k));
          } else {
            const std::uint32_t at = atomicAdd(&s_.num_found, 1u);
            if (at < kMostAtCut) s_.found[at] = rank_of(z[k], id_of(base + k));
          }
        }
      });
      meet();
      const int size = gather();
      if (size <= kMostAtCut) {
        return last_of_list(size, [&](std::uint64_t rank) {
          const float value = by_id ? -static_cast<float>(id_of_rank(rank)) : z_of_rank(rank);
          const float x = mul_rn(sub_rn(mul_rn(sub_rn(high, value), scale), static_cast<float>(bin)), kFineBins);
          return x >= kFineBins - 1 ? kFineBins - 1 : x > 0.0f ? static_cast<int>(x) : 0;
        });
      }
      // Other blocks have read this block's count before they arrive at the barrier of the next reduction.
      high = open_range(open, by_id, &low);
      if (high == low && !by_id) {
        by_id = true;
        meet();  // every block has read the range
        high = open_range(open, by_id, &low);
      }
      if (threadIdx.x == 0) s_.num_found = 0;
    }
  }
  // The range of the open columns' values.
  __device__ __forceinline__ float open_range(std::uint32_t open, bool by_id, float* low) {
    float largest = -infinity(), smallest = infinity();
    each_batch([&](int base, const float(&z)[kBatch]) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if ((open >> (base + k) & 1) == 0) continue;
        const float value = by_id ? -static_cast<float>(id_of(base + k)) : z[k];
        largest = fmaxf(largest, value);
        smallest = fminf(smallest, value);
      }
    });
    __syncthreads();  // every thread has read of_warps and range
    const float2 range = range_of_row(largest, smallest);
    *low = range.y;
    return range.x;
  }
  // Sums this block's bins over all blocks, and sends the sums of every kBinsOfWarp bins to all blocks.
  __device__ __forceinline__ void sum_bins() {
    if (warp_ >= kGroupWarps) return;
    const int bin = warp_ * kBinsOfWarp + lane_ % kBinsOfWarp;
    constexpr int kHalf = kRowBlocks / 2;
    std::uint64_t of[kHalf], sum = 0;
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      of[k] = load_remote(s_.bins + rank_ * kBinsOfBlock + bin, lane_ / kBinsOfWarp * kHalf + k);
    }
#pragma unroll
    for (int k = 0; k < kHalf; ++k) sum += of[k];
    sum += __shfl_xor_sync(kAllLanes, sum, kBinsOfWarp);
    if (lane_ < kBinsOfWarp) s_.sums[bin] = sum;
#pragma unroll
    for (int d = 1; d < kBinsOfWarp; d *= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
    if (lane_ < kRowBlocks) store_remote_u64(of_block(s_.parts + rank_ * kGroupWarps + warp_, lane_), sum);
  }
  // The first warp finds the bin with which the mass reaches the goal.
  __device__ __forceinline__ void find_bin(bool is_first, float top_p) {
    constexpr int kOwn = kRowBlocks * kGroupWarps / kWarp;
    std::uint64_t own[kOwn], mine = 0;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) mine += own[k] = s_.parts[lane_ * kOwn + k];
    std::uint64_t end = scan(mine);
    std::uint64_t base = is_first ? 0 : s_.before;
    const std::uint64_t goal = is_first ? share_of_mass(top_p, __shfl_sync(kAllLanes, end, kWarp - 1)) : s_.goal;
    std::uint64_t before = base + end - mine;
    int part = -1;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      if (before < goal && before + own[k] >= goal) {
        part = lane_ * kOwn + k;
        break;
      }
      before += own[k];
    }
    const int owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, part >= 0))) - 1;
    part = __shfl_sync(kAllLanes, part, max(owner, 0));
    base = __shfl_sync(kAllLanes, before, max(owner, 0));
    mine = lane_ < kBinsOfWarp && part >= 0
               ? load_remote(s_.sums + part % kGroupWarps * kBinsOfWarp + lane_, part / kGroupWarps)
               : 0;
    before = base + scan(mine) - mine;
    if (before < goal && before + mine >= goal) {
      s_.bin = part * kBinsOfWarp + lane_;
      s_.before = before;
    }
    if (lane_ == 0) s_.goal = goal;
  }
  // The sum over the lanes up to this one.
  __device__ __forceinline__ std::uint64_t scan(std::uint64_t x) const {
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const std::uint64_t other = __shfl_up_sync(kAllLanes, x, d);
      if (lane_ >= d) x += other;
    }
    return x;
  }
  // Collects the columns in the cut's bin from all blocks, if they fit the list. Returns their number.
  __device__ __forceinline__ int gather() {
    const auto mine = static_cast<int>(lane_ < kRowBlocks ? load_remote(&s_.num_found, lane_) : 0);
    int end = mine;
#pragma unroll
    for (int d = 1; d < kRowBlocks; d *= 2) {
      const int other = __shfl_up_sync(kAllLanes, end, d);
      if (lane_ >= d) end += other;
    }
    const int size = __shfl_sync(kAllLanes, end, kRowBlocks - 1);
    if (size > kMostAtCut) return size;
#pragma unroll 1
    for (int from = warp_; from < kRowBlocks; from += warps()) {
      const int count = __shfl_sync(kAllLanes, mine, from), begin = __shfl_sync(kAllLanes, end, from) - count;
#pragma unroll 1
      for (int i = lane_; i < count; i += kWarp) {
        const std::uint64_t rank = load_remote(s_.found + i, from);
        s_.list[begin + i] = rank;
        s_.masses[begin + i] = mass_of(z_of_rank(rank));
      }
    }
    __syncthreads();
    return size;
  }
  // The rank of the list's column with which the mass reaches the goal. Finer bins leave few columns to compare. If these
  // have one z, bins of their ids leave fewer. bin_of(rank): the finer bin of a column; bins ascend with ranks, except
  // that they may be equal.
  template <class Bin>
  __device__ __forceinline__ std::uint64_t last_of_list(int size, Bin bin_of) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    int count = size;
    const std::uint16_t* few = nullptr;
#pragma unroll 1
    for (int step = 0; step < 2; ++step) {
      std::uint16_t *const from = s_.fine[0], *const to = s_.fine[step];
      const auto rank_at = [&](int i) { return s_.list[step == 0 ? i : from[i]]; };
      const auto fine_of = [&](std::uint64_t rank) {
        return step == 0 ? bin_of(rank)
                         : static_cast<int>(id_of_rank(rank)) * kFineBins / static_cast<int>(p_.vocab_size);
      };
      if (step > 0) {
        bool same = true;
#pragma unroll 1
        for (int i = thread; i < count; i += threads) same = same && z_of_rank(rank_at(i)) == z_of_rank(rank_at(0));
        if (!__syncthreads_and(same)) break;
#pragma unroll 1
        for (int i = thread; i < kFineBins; i += threads) s_.bins[i] = 0;
        __syncthreads();
      }
#pragma unroll 1
      for (int i = thread; i < count; i += threads) {
        const std::uint64_t mass = s_.masses[step == 0 ? i : from[i]];
        auto* const bin = reinterpret_cast<std::uint32_t*>(fine_bin(fine_of(rank_at(i))));
        const auto low = static_cast<std::uint32_t>(mass);
        const std::uint32_t high = static_cast<std::uint32_t>(mass >> 32) + (atomicAdd(bin, low) > ~low ? 1 : 0);
        if (high != 0) atomicAdd(bin + 1, high);
      }
      if (thread == 0) s_.num_fine = 0;
      __syncthreads();
      if (warp_ == 0) find_fine_bin();
      __syncthreads();
      const int bin = s_.bin;
#pragma unroll 1
      for (int i = thread; i < count; i += threads) {
        if (fine_of(rank_at(i)) != bin) continue;
        to[atomicAdd(&s_.num_fine, 1u)] = static_cast<std::uint16_t>(step == 0 ? i : from[i]);
      }
      __syncthreads();
      count = static_cast<int>(s_.num_fine);
      few = to;
      if (count <= kWarp) break;
    }
    const std::uint64_t goal = s_.goal, before = s_.before;
#pragma unroll 1
    for (int at = thread; at < count; at += threads) {
      const std::uint64_t rank = s_.list[few[at]];
      std::uint64_t sum = before;
#pragma unroll 1
      for (int i = 0; i < count; ++i) sum += s_.list[few[i]] < rank ? s_.masses[few[i]] : 0;
      if (sum < goal && sum + s_.masses[few[at]] >= goal) s_.last = rank;
    }
    __syncthreads();
    return s_.last;
  }
  // The lanes of the first warp have neighbouring bins, which lie in different banks.
  __device__ __forceinline__ std::uint64_t* fine_bin(int bin) const {
    constexpr int kOwn = kFineBins / kWarp;
    return s_.bins + bin % kOwn * kWarp + bin / kOwn;
  }
  // The first warp finds the finer bin with which the mass reaches the goal.
  __device__ __forceinline__ void find_fine_bin() {
    constexpr int kOwn = kFineBins / kWarp;
    std::uint64_t mine = 0;
#pragma unroll 4
    for (int k = 0; k < kOwn; ++k) mine += *fine_bin(lane_ * kOwn + k);
    const std::uint64_t goal = s_.goal;
    std::uint64_t before = s_.before;
    before += scan(mine) - mine;
    __syncwarp();  // every lane has read s_.before
    if (before < goal && before + mine >= goal) {
#pragma unroll 1
      for (int k = 0; k < kOwn; ++k) {
        const std::uint64_t mass = *fine_bin(lane_ * kOwn + k);
        if (before + mass >= goal) {
          s_.bin = lane_ * kOwn + k;
          s_.before = before;
          break;
        }
        before += mass;
      }
    }
  }

  // Nodes and masks of the leaves, the roots of groups, and the number of columns that each group keeps.
  __device__ __forceinline__ void find_nodes(std::uint64_t last) {
    const int group = warp_ / kGroupWarps;
    const bool cut = last != kLastRank;
    const float z_last = cut ? z_of_rank(last) : -infinity();
    const int id_last = cut ? static_cast<int>(id_of_rank(last)) : 0;
    std::uint32_t words[kMaskWords];
    allowed_in_leaf(!cut && p_.allowed != nullptr ? p_.allowed + row() * p_.allowed_stride : nullptr, first_, columns_,
                    words);
    SoftmaxStats stats;
    const LeafReference reference = leaf_reference(c_, top_, &stats);
    const float addend = Exponential::addend(reference.m);
    float sum = 0.0f;
    std::uint32_t keeps = 0;
    each_batch([&](int base, const float(&z)[kBatch]) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const bool has = cut ? z[k] > z_last || (z[k] == z_last && id_of(base + k) <= id_last) : z[k] != -infinity();
        const float e = Exponential::exponential(fmaxf(z[k], reference.q), c_, addend);
        sum = add_rn(sum, has ? e : 0.0f);
        keeps |= has ? 1u << (base + k) : 0;
      }
    });
#pragma unroll
    for (int d = 1; d < kNumChains; d *= 2) sum = add_rn(sum, shuffle_xor(sum, d));
    if (cut) {
#pragma unroll
      for (int k = 0; k < kMaskWords; ++k) {
        std::uint32_t word = ((keeps >> (4 * k) & 0xf) * 0x00204081u & 0x01010101u) << chain_;
#pragma unroll
        for (int d = 1; d < kNumChains; d *= 2) word |= __shfl_xor_sync(kAllLanes, word, d);
        words[k] = word;
      }
    }
    const bool any = (words[0] | words[1] | words[2] | words[3]) != 0;
    if (reference.usable) stats = {reference.m, sum, 0.0f, 0.0f};
    if (!any) stats = identity_stats();
    if (chain_ == 0) {
      s_.masks[group][leaf_of_group()] = make_uint4(words[0], words[1], words[2], words[3]);
      s_.nodes[group][leaf_of_group()] = make_float2(stats.m, stats.S);
    }
    __syncthreads();
    const int task = task_of(group);
    if (warp_ % kGroupWarps != 0 || task >= grid_.groups) return;
    const float2 node = s_.nodes[group][lane_];
    const SoftmaxStats of_group = tree_over_lanes<false>({node.x, node.y, 0.0f, 0.0f});
    const std::uint32_t kept =
        __reduce_add_sync(kAllLanes, static_cast<std::uint32_t>(bits_of(s_.masks[group][lane_])));
    const int part = task / grid_.groups_per_part, step = task - part * grid_.groups_per_part;
    const int root = (part << height_) / kGroupLeaves + step;
    if (lane_ < kRowBlocks) {
      store_remote_8(of_block(s_.roots + root, lane_), make_float2(of_group.m, of_group.S));
      store_remote(of_block(s_.counts + task, lane_), kept);
    }
  }
  // The number of columns that the row keeps. before: those of the groups before the warp's group.
  __device__ __forceinline__ std::uint32_t counts_of_groups(std::uint32_t* before) const {
    const int own = task_of(warp_ / kGroupWarps);
    std::uint32_t all = 0, of_earlier = 0;
#pragma unroll
    for (int k = 0; k < (kRowBlocks * kRowGroups + kWarp - 1) / kWarp; ++k) {
      const int task = k * kWarp + lane_;
      const std::uint32_t count = task < grid_.groups ? s_.counts[task] : 0;
      all += count;
      of_earlier += task < own ? count : 0;
    }
    *before = __reduce_add_sync(kAllLanes, of_earlier);
    return __reduce_add_sync(kAllLanes, all);
  }

  // Draws, writes the results and the kept set. all: the number of kept columns. before: those of earlier groups.
  __device__ __forceinline__ void finish(const SampleRow& want, std::int32_t status, std::uint32_t all,
                                         std::uint32_t before) {
    KeptPlace place(p_, chunk_, i_);
    const bool has_sets = p_.kept_offsets != nullptr;
    const std::int64_t kept = status != kOk || static_cast<std::int64_t>(all) == p_.valid_vocab ? 0 : all;
    // The first set of a call begins at 0, so no block waits for its place.
    const bool waits = has_sets && row() > 0;
    std::int64_t begin = kept <= p_.kept_capacity ? 0 : -1;
    if (rank_ == 0 && warp_ == 0) {
      if (waits) cluster_arrive();
      draw(want, status);
      if (waits) cluster_wait();
    } else if (has_sets) {
      if (rank_ == 0 && warp_ == 1) {
        if (lane_ == 0) place.publish(kept);
        std::uint64_t of_rows = place.is_first() ? 0 : place.counts_before(lane_, kWarp);
#pragma unroll
        for (int d = 1; d < kWarp; d *= 2) of_rows += __shfl_xor_sync(kAllLanes, of_rows, d);
        std::int64_t own = 0;
        if (lane_ == 0) own = place.place(static_cast<std::int64_t>(of_rows), kept);
        own = __shfl_sync(kAllLanes, own, 0);
        if (waits && lane_ < kRowBlocks) store_remote_u64(of_block(&s_.begin, lane_), static_cast<std::uint64_t>(own));
      }
      if (waits) meet();
    }
    if (waits) begin = s_.begin;
    if (has_sets && kept > 0 && begin >= 0) write_ids(p_.kept_ids + begin + before);
    meet();  // block 0 has read the nodes of other blocks, and written the results
    if (has_sets && rank_ == 0 && warp_ == 1 && lane_ == 0) place.mark_overflow();
  }
  __device__ __forceinline__ int num_roots() const { return (kNumParts << height_) / kWarp; }
  // The status of the tree above the roots of all groups.
  __device__ __forceinline__ std::int32_t status_of_roots() const {
    std::uint32_t faults = 0;
    bool any = false;
#pragma unroll 1
    for (int i = lane_; i < num_roots(); i += kWarp) {
      faults |= static_cast<std::uint32_t>(status_of({s_.roots[i].x, s_.roots[i].y, 0.0f, 0.0f}));
      any = any || s_.roots[i].x != -infinity();
    }
    faults = __reduce_or_sync(kAllLanes, faults);
    return static_cast<std::int32_t>(faults) | (__any_sync(kAllLanes, any) ? kOk : kEmptyRow);
  }
  // The first warp of block 0 draws and writes the results.
  __device__ __forceinline__ void draw(const SampleRow& want, std::int32_t status) const {
    std::int64_t id = -1;
    float logprob = canonical_nan();
    if (status == kOk) {
      const auto root_at = [&](int i) {
        const float2 root = i < num_roots() ? s_.roots[i] : make_float2(-infinity(), 0.0f);
        return SoftmaxStats{root.x, root.y, 0.0f, 0.0f};
      };
      const DrawnLane of_roots = draw_over_nodes(num_roots(), root_at, s_.words);
      const int per_part = (1 << height_) / kGroupLeaves;
      const int part = of_roots.lane / per_part, step = of_roots.lane - part * per_part;
      const int task = part * grid_.groups_per_part + step, group = task / kRowBlocks, rank = task % kRowBlocks;
      const float2 node = load_remote(&s_.nodes[group][lane_], rank);
      const int leaf = draw_over_lanes({node.x, node.y, 0.0f, 0.0f}, 0, s_.words).lane;
      const float m = __shfl_sync(kAllLanes, node.x, leaf);
      const uint4 mask = load_remote(&s_.masks[group][leaf], rank);
      const std::uint32_t words[] = {mask.x, mask.y, mask.z, mask.w};
      const int first = grid_.part_first[part] + (step * kGroupLeaves + leaf) * kLeafColumns;
      const LeafReference reference = {m, leaf_clamp(c_, m), true};
      const Storage* const from = static_cast<const Storage*>(p_.logits) + row() * p_.logits_stride + first;
      float z[kOwnColumns], terms[kOwnColumns];
#pragma unroll
      for (int k = 0; k < kOwnColumns; ++k) {
        const int column = k * kWarp + lane_;
        const bool has = (words[k] >> lane_ & 1) != 0;
        z[k] = has ? T::load(from[column]) : -infinity();
        if (sizeof(Storage) == sizeof(float) && p_.edited != nullptr && has) z[k] = edited(first + column, z[k]);
      }
#pragma unroll
      for (int k = 0; k < kOwnColumns; ++k) {
        const float e = Exponential::exponential(fmaxf(z[k], reference.q), c_, Exponential::addend(m));
        terms[k] = z[k] == -infinity() ? 0.0f : e;
      }
      const int column = draw_column(terms, s_.words);
      id = first + column;
      logprob = logprob_outputs(of_roots.root, z_in_lanes(z, column), want.temperature).logprob;
    }
    if (lane_ != 0) return;
    p_.ids[row()] = id;
    p_.status[row()] = status;
    if (p_.logprob != nullptr) p_.logprob[row()] = logprob;
  }
  __device__ __forceinline__ float edited(int column, float z) const {
    const std::uint32_t word = p_.edited[row() * edit_words(p_.vocab_size) + column / 32];
    return (word >> (column % 32) & 1) != 0 ? p_.edits[row() * p_.vocab_size + column] : z;
  }
  // Writes the ids of the warp's four leaves. to: where those of the group begin.
  __device__ __forceinline__ void write_ids(std::int32_t* to) const {
    const int group = warp_ / kGroupWarps, leaf = warp_ % kGroupWarps * kAtOnce;
    if (task_of(group) >= grid_.groups) return;
    const auto own = static_cast<std::uint32_t>(lane_ < leaf ? bits_of(s_.masks[group][lane_]) : 0);
    to += __reduce_add_sync(kAllLanes, own);
    const auto* const words = reinterpret_cast<const std::uint32_t*>(s_.masks[group] + leaf);
    int first = __shfl_sync(kAllLanes, first_, 0) + lane_;
    const std::uint32_t below = (1u << lane_) - 1;
#pragma unroll 4
    for (int k = 0; k < kAtOnce * kMaskWords; ++k, first += kWarp) {
      const std::uint32_t word = words[k];
      if ((word >> lane_ & 1) != 0) to[set_bits_of(word & below)] = first;
      to += set_bits_of(word);
    }
  }

  const SampleParams& p_;
  const GroupGrid& grid_;
  const SampleChunk& chunk_;
  ClusterShared& s_;
  const int height_, rank_, i_, lane_, warp_, chain_;
  int first_ = 0, columns_ = 0;  // the lane's leaf
  float c_ = 0.0f, m_ = 0.0f, q_ = 0.0f, top_ = 0.0f;
  float z_[kLeafSteps];
};

}  // namespace
}  // namespace rlk::cuda
