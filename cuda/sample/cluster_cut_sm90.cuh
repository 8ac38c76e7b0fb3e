// Cuts a row by top_p without top_k, in a cluster of blocks on SM90. Shared memory holds the row's columns, or those
// that fit it. Through distributed shared memory, blocks exchange the extremes of z, bins of masses, and counts. A
// column's mass is its exponential relative to the row's largest z. Its rank is an integer that orders columns by
// descending z, then by id.
#pragma once

#include "cluster_shared_sm90.cuh"

namespace rlk::cuda {
namespace {

// Holds a row's columns and finds its last kept column.
template <class T, Exp kExp, int kBlocks>
class ClusterCut {
 protected:
  using Shared = ClusterShared<kBlocks>;
  using Shape = ClusterShape<kBlocks>;
  static constexpr int kThreads = Shape::kThreads, kWarps = Shape::kWarps, kGroupsAtOnce = Shape::kGroupsAtOnce;

 public:
  __device__ __forceinline__ ClusterCut(const SampleParams& p, const GroupGrid& grid, const SampleChunk& chunk,
                                        int height, Shared* shared)
      : p_(p),
        grid_(grid),
        chunk_(chunk),
        s_(*shared),
        height_(height),
        rank_(static_cast<int>(cluster_rank())),
        i_(static_cast<int>(blockIdx.x) / kBlocks),
        lane_(lane_of_warp()),
        warp_(warp_of_block()),
        chain_(lane_ % kNumChains) {}

  // For each group of the block, finds the first column, and the end of the part of the vocabulary that has the group.
  // All threads call this function.
  __device__ __forceinline__ void find_columns() {
    const int group = static_cast<int>(threadIdx.x), task = task_of(group);
    if (group < Shared::kGroups) {
      int2 columns = make_int2(0, 0);
      if (task < grid_.groups) {
        const int part = task / grid_.groups_per_part, step = task - part * grid_.groups_per_part;
        columns = make_int2(grid_.part_first[part] + step * kGroupLeaves * kLeafColumns, grid_.part_last[part]);
      }
      s_.columns[group] = columns;
    }
    __syncthreads();
  }
  __device__ __forceinline__ void clear_bins() {
    static_assert(kDigitBins <= 4 * kThreads);
#pragma unroll
    for (auto& half : s_.bins) {
      if (kDigitBins == 4 * kThreads || threadIdx.x < kDigitBins / 4) {
        reinterpret_cast<uint4*>(half)[threadIdx.x] = make_uint4(0, 0, 0, 0);
      }
    }
  }

 protected:
  using Storage = typename T::Storage;
  using Exponential = Chains<kExp, false>;
  static constexpr int kBinsOfBlock = Shared::kBinsOfBlock, kBinsOfWarp = Shared::kBinsOfWarp;
  static constexpr int kUpperBytes = sizeof(Shared::bins[0]);  // from the lower half of a bin to the upper half
  static constexpr int kBatch = 4;                             // columns that one step of a loop processes
  static constexpr int kBatches = kLeafSteps / kBatch;
  static constexpr bool kReloads = Shape::kSlots < Shape::kSteps;

  __device__ __forceinline__ std::int64_t row() const { return chunk_.first + i_; }
  __device__ __forceinline__ int task_of(int group) const { return rank_ + group * kBlocks; }
  // The group that the warp processes in a step.
  __device__ __forceinline__ int group_of(int step) const { return step * kGroupsAtOnce + warp_ / kGroupWarps; }
  // Leaves that a lane processes, one after another.
  __device__ __forceinline__ int steps() const { return Shape::steps(grid_.groups); }
  // Four columns of a step's leaf. They lie behind the block's other values in shared memory. A thread's vectors lie
  // kThreads vectors apart.
  __device__ __forceinline__ float4* vector_of(int step, int batch) const {
    const int slot = kReloads ? step % Shape::kSlots : step;
    return reinterpret_cast<float4*>(&s_ + 1) + (slot * kBatches + batch) * kThreads + threadIdx.x;
  }
  struct Place {
    int first, columns;  // first column and size of the lane's leaf; `columns` is at most 0 if the leaf has no column
  };
  __device__ __forceinline__ Place place_of_leaf(int step) const {
    const int2 columns = s_.columns[group_of(step)];
    const int first = columns.x + leaf_of_group() * kLeafColumns;
    // `columns` is not clamped to 0: ptxas 13.0 would then invert a comparison with kLeafColumns
    // (cuda/logprob/README.md).
    return {first, min(columns.y - first, kLeafColumns)};
  }
  __device__ __forceinline__ int leaf_of_group() const { return warp_ % kGroupWarps * kAtOnce + lane_ / kNumChains; }
  static __device__ __forceinline__ void meet() {
    cluster_arrive();
    cluster_wait();
  }
  // The address of a value in the shared memory of another block.
  template <class N>
  __device__ __forceinline__ std::uint32_t of_block(const N* value, int rank) const {
    return map_to_rank(shared_address(value), static_cast<std::uint32_t>(rank));
  }

  // Calls fn(step) for each of the lane's leaves, in ascending or in descending order. Shared memory holds the leaf's
  // columns then. If it cannot hold all leaves, every second call descends, and so reads fewer leaves again.
  template <class F>
  __device__ __forceinline__ void each_step(F fn) {
    const bool descends = kReloads && first_held_ > 0;
#pragma unroll 1
    for (int i = 0; i < steps(); ++i) {
      const int step = descends ? steps() - 1 - i : i;
      if constexpr (kReloads) hold(step);
      fn(step);
    }
  }
  // Reads a step's columns again unless shared memory holds them. The held steps are neighbours.
  __device__ __forceinline__ void hold(int step) {
    if (step >= first_held_ && step < first_held_ + Shape::kSlots) return;
    first_held_ = step < first_held_ ? step : step - Shape::kSlots + 1;
    const Place place = place_of_leaf(step);
    int i = i_;
    // The compiler must compute addresses here, so that they occupy no registers elsewhere.
    asm volatile("" : "+r"(i));
    const std::int64_t row = chunk_.first + i;
#pragma unroll 1
    for (int batch = 0; batch < kBatches; ++batch) {
      const int before = batch * kBatch * kNumChains + chain_, first = place.first + before;
      float z[kBatch];
      const Storage* const from = static_cast<const Storage*>(p_.logits) + row * p_.logits_stride + first;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        z[k] = before + k * kNumChains < place.columns ? T::load(from[k * kNumChains]) : -infinity();
      }
      if (sizeof(Storage) == sizeof(float) && p_.edited != nullptr) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (before + k * kNumChains < place.columns) z[k] = edited(row, first + k * kNumChains, z[k]);
        }
      }
      if (p_.allowed != nullptr) {
        const std::int32_t* const allowed = p_.allowed + row * p_.allowed_stride;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int id = first + k * kNumChains;
          if (before + k * kNumChains < place.columns && (allowed[id / 32] >> id % 32 & 1) == 0) z[k] = -infinity();
        }
      }
      store_columns(step, batch, z);
    }
  }
  // The z of a column, which is `z` unless the column is edited.
  __device__ __forceinline__ float edited(std::int64_t row, int column, float z) const {
    const std::uint32_t word = p_.edited[row * edit_words(p_.vocab_size) + column / 32];
    return (word >> (column % 32) & 1) != 0 ? p_.edits[row * p_.vocab_size + column] : z;
  }
  template <int kCount>
  __device__ __forceinline__ void store_columns(int step, int batch, const float (&z)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kCount; k += kBatch) {
      *vector_of(step, batch + k / kBatch) = make_float4(z[k], z[k + 1], z[k + 2], z[k + 3]);
    }
  }
  // Reads the lane's columns; missing columns become -Inf. Returns the largest and the smallest finite z of the lane.
  __device__ __forceinline__ float2 load() {
    float largest = -infinity(), smallest = infinity();
#pragma unroll 1
    for (int step = 0; step < steps(); ++step) {
      const Place place = place_of_leaf(step);
      float z[kLeafSteps];
      load_leaf(place, z);
      float top = -infinity(), least = infinity();
#pragma unroll
      for (int k = 0; k < kLeafSteps; ++k) {
        top = max_nan(top, z[k]);
        least = fminf(least, z[k]);
      }
      if (least == -infinity()) {
        least = infinity();
#pragma unroll
        for (int k = 0; k < kLeafSteps; ++k) least = fminf(least, z[k] == -infinity() ? infinity() : z[k]);
      }
      smallest = fminf(smallest, least);
      store_columns(step, 0, z);
#pragma unroll
      for (int d = 1; d < kNumChains; d *= 2) top = max_nan(top, shuffle_xor(top, d));
      if (chain_ == 0) s_.tops[group_of(step)][leaf_of_group()] = top;
      largest = max_nan(largest, top);
    }
    if (kReloads) first_held_ = max(steps() - Shape::kSlots, 0);
    return make_float2(largest, smallest);
  }
  __device__ __forceinline__ void load_leaf(const Place& place, float (&z)[kLeafSteps]) const {
    const int first = place.first, columns = place.columns;
    const Storage* const from = static_cast<const Storage*>(p_.logits) + row() * p_.logits_stride + first + chain_;
    if (columns == kLeafColumns) {
#pragma unroll
      for (int k = 0; k < kLeafSteps; ++k) z[k] = T::load(from[k * kNumChains]);
    } else {
#pragma unroll
      for (int k = 0; k < kLeafSteps; ++k) {
        z[k] = k * kNumChains + chain_ < columns ? T::load(from[k * kNumChains]) : -infinity();
      }
    }
    if (sizeof(Storage) == sizeof(float) && p_.edited != nullptr) {
      std::uint32_t words[kMaskWords];
      allowed_in_leaf(p_.edited + row() * edit_words(p_.vocab_size), first, columns, words);
      const float* const edits = p_.edits + row() * p_.vocab_size + first + chain_;
#pragma unroll
      for (int k = 0; k < kLeafSteps; ++k) {
        if (has_bit(words, k)) z[k] = edits[k * kNumChains];
      }
    }
    if (p_.allowed != nullptr) {
      std::uint32_t words[kMaskWords];
      allowed_in_leaf(p_.allowed + row() * p_.allowed_stride, first, columns, words);
#pragma unroll
      for (int k = 0; k < kLeafSteps; ++k) {
        if (!has_bit(words, k)) z[k] = -infinity();
      }
    }
  }
  __device__ __forceinline__ bool has_bit(const std::uint32_t (&words)[kMaskWords], int k) const {
    return (words[k / 4] >> (k % 4 * kNumChains + chain_) & 1) != 0;
  }
  __device__ __forceinline__ float column_of(int step, int k) const {
    return reinterpret_cast<const float*>(vector_of(step, k / kBatch))[k % kBatch];
  }
  // Four columns of a step's leaf.
  __device__ __forceinline__ void batch_of(int step, int batch, float (&z)[kBatch]) const {
    const float4 of = *vector_of(step, batch);
    z[0] = of.x;
    z[1] = of.y;
    z[2] = of.z;
    z[3] = of.w;
  }
  __device__ __forceinline__ std::uint64_t mass_of(float z) const { return z > least_ ? mass_above(z) : 0; }
  // The mass of a column with z above `least_`; for any other z the result is arbitrary.
  __device__ __forceinline__ std::uint64_t mass_above(float z) const {
    MassSum sum;
    sum.add(MassSum::units_of(Exponential::exponential(z, c_, Exponential::addend(m_))));
    return sum.value();
  }

  // The largest and the smallest value over neighbouring lanes.
  template <int kLanes>
  static __device__ __forceinline__ float2 over_lanes(float2 range) {
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) {
      range.x = max_nan(range.x, shuffle_xor(range.x, d));
      range.y = fminf(range.y, shuffle_xor(range.y, d));
    }
    return range;
  }
  // The largest and the smallest value over the row. A NaN counts as the largest.
  __device__ __forceinline__ float2 range_of_row(const float2& own) {
    const float2 of_warp = over_lanes<kWarp>(own);
    if (lane_ == 0) s_.of_warps[warp_] = of_warp;
    __syncthreads();
    if (warp_ == 0) {
      const float2 of_block = over_lanes<kWarps>(s_.of_warps[lane_ % kWarps]);
      if (lane_ < kBlocks) store_remote_8(this->of_block(s_.range + rank_, lane_), of_block);
    }
    meet();
    return over_lanes<kBlocks>(s_.range[lane_ % kBlocks]);
  }

  // Adds masses in the order of ranks, and returns the rank of the first column with which the sum reaches top_p's
  // share. Each step of the loop adds masses to bins of equal width and finds the bin of this column. The loop ends
  // when the bin's columns fit the list, or when they all have one z. A unit other than 1, by which z is multiplied,
  // keeps small differences of z from being subnormal.
  __device__ __forceinline__ std::uint64_t find_last(float top_p, const float2& range) {
    float high = range.x, low = fmaxf(range.y, range.x - kMassRange / c_);
    float unit = 1.0f;
#pragma unroll 1
    for (bool is_first = true;; is_first = false) {
      const float scale = kDigitBins / (high - low);  // infinite if all z in the first step are equal or nearly equal
      if (is_first) {
        add_masses(high, scale);
      } else {
        add_open_masses(high, scale, unit);
      }
      meet();
      sum_bins();
      meet();
      if (warp_ == 0) find_bin(is_first, top_p);
      if (warp_ == 1) clear_open();
      __syncthreads();
      const int bin = s_.bin;
      clear_bins();
      list_bin(bin, high, scale, unit, is_first);
      meet();
      const OpenColumns of_block = lane_ < kBlocks ? load_remote(&s_.of_open, lane_) : no_columns();
      const std::uint32_t low_key = __reduce_min_sync(kAllLanes, of_block.low);
      const std::uint32_t high_key = __reduce_max_sync(kAllLanes, of_block.high);
      if (low_key == high_key) return last_of_ties(z_of_key(low_key));
      const int size = gather(static_cast<int>(of_block.count));
      if (size <= kMostAtCut) {
        return last_of_list(size, [&](std::uint64_t rank) {
          const float value = mul_rn(z_of_rank(rank), unit);
          const float x = mul_rn(sub_rn(mul_rn(sub_rn(high, value), scale), static_cast<float>(bin)), kFineBins);
          return x >= kFineBins - 1 ? kFineBins - 1 : x > 0.0f ? static_cast<int>(x) : 0;
        });
      }
      high = z_of_key(high_key), low = z_of_key(low_key);
      unit = high - low < 0x1p-100f ? 0x1p64f : 1.0f;
      high = mul_rn(high, unit), low = mul_rn(low, unit);
    }
  }
  static __device__ __forceinline__ OpenColumns no_columns() { return {0, ~0u, 0}; }
  // Other blocks have read these values.
  __device__ __forceinline__ void clear_open() {
    if (lane_ < Shared::kGroups) s_.open_of_group[lane_] = 0;
    if (lane_ == 0) s_.of_open = no_columns();
  }
  // The address of a value's bin. If the scale is infinite, all values have one bin.
  static __device__ __forceinline__ std::uint32_t address_of_bin(std::uint32_t bins, float value, float high,
                                                                 float scale) {
    // From 2^23 on, the last bit of a float has the value 1, so the sum's lower bits are the bin.
    const float counted = __fadd_rz(fminf(mul_rn(sub_rn(high, value), scale), kDigitBins - 1), 0x1p23f);
    return bins + 4 * (static_cast<std::uint32_t>(rlk::bits_of(counted)) - 0x4b000000u);
  }
  // Adds the lower half of a mass to a bin; returns the upper half with the carry.
  static __device__ __forceinline__ std::uint32_t add_low(std::uint32_t bin, std::uint64_t mass) {
    const auto low = static_cast<std::uint32_t>(mass);
    std::uint32_t before;
    asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(bin), "r"(low) : "memory");
    return static_cast<std::uint32_t>(((std::uint64_t{before} + low) >> 32) + (mass >> 32));
  }
  static __device__ __forceinline__ void add_high(std::uint32_t bin, std::uint32_t high) {
    asm volatile("red.shared.add.u32 [%0+%2], %1;" ::"r"(bin), "r"(high), "n"(kUpperBytes) : "memory");
  }
  // Adds the masses of all columns to bins of z.
  __device__ __forceinline__ void add_masses(float high, float scale) {
    const std::uint32_t bins = shared_address(s_.bins[0]), unused = shared_address(s_.bins[0] + kDigitBins + lane_);
    each_step([&](int step) {
#pragma unroll 1
      for (int batch = 0; batch < kBatches; ++batch) {
        float z[kBatch];
        std::uint32_t to[kBatch], upper[kBatch];
        std::uint64_t mass[kBatch];
        batch_of(step, batch, z);
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          // Columns without mass add an arbitrary value to a word of their lane that no bin has.
          mass[k] = mass_above(z[k]);
          to[k] = z[k] > least_ ? address_of_bin(bins, z[k], high, scale) : unused;
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) upper[k] = add_low(to[k], mass[k]);
#pragma unroll
        for (int k = 0; k < kBatch; ++k) add_high(to[k], upper[k]);
      }
    });
  }
  // Adds the masses of the open columns (each_open()) to bins of z.
  __device__ __forceinline__ void add_open_masses(float high, float scale, float unit) {
    const std::uint32_t bins = shared_address(s_.bins[0]);
    each_open([&](float z) {
      const std::uint32_t to = address_of_bin(bins, mul_rn(z, unit), high, scale);
      add_high(to, add_low(to, mass_of(z)));
    });
  }
  // Calls fn(z) for the thread's open columns. A column is open as long as it may be the last kept column.
  template <class F>
  __device__ __forceinline__ void each_open(F fn) {
    each_step([&](int step) {
      const std::uint32_t open = s_.open[step][threadIdx.x];
#pragma unroll 1
      for (int k = 0; k < kLeafSteps; ++k) {
        if ((open >> k & 1) != 0) fn(column_of(step, k));
      }
    });
  }
  // Lists the open columns of a bin. All other columns are no longer open.
  __device__ __forceinline__ void list_bin(int bin, float high, float scale, float unit, bool is_first) {
    // The values of the bin's columns, and few other values, lie in [from, to].
    const float width = 1.0f / scale, slack = 1e-5f * (fabsf(high) + kDigitBins * width);
    // `divides` is false for a constant row, and for a row that spans all floats.
    const bool divides = width > 0.0f && width < infinity();
    const float from = divides && bin < kDigitBins - 1 ? high - (bin + 1) * width - slack : -infinity();
    const float to = divides ? high - bin * width + slack : infinity();
    const std::uint32_t bins = shared_address(s_.bins[0]), own_bin = bins + 4 * bin;
    std::uint32_t low_key = no_columns().low, high_key = no_columns().high;
    each_step([&](int step) {
      const std::uint32_t open = is_first ? ~0u : s_.open[step][threadIdx.x];
      std::uint32_t inside = 0;
      if (unit != 1.0f) {
        inside = ~0u >> kLeafSteps;
      } else {
#pragma unroll
        for (int batch = 0; batch < kBatches; ++batch) {
          float z[kBatch];
          batch_of(step, batch, z);
#pragma unroll
          for (int k = 0; k < kBatch; ++k) inside += z[k] >= from && z[k] <= to ? 1u << (batch * kBatch + k) : 0;
        }
      }
      inside &= open;
      std::uint32_t stays = 0;
#pragma unroll 1
      for (; inside != 0; inside &= inside - 1) {
        const int k = __ffs(static_cast<int>(inside)) - 1;
        const float z = column_of(step, k);
        if (mass_of(z) == 0 || address_of_bin(bins, mul_rn(z, unit), high, scale) != own_bin) continue;
        stays |= 1u << k;
        low_key = min(low_key, key_of(z));
        high_key = max(high_key, key_of(z));
      }
      s_.open[step][threadIdx.x] = static_cast<std::uint16_t>(stays);
      list_open(step, stays);
    });
    low_key = __reduce_min_sync(kAllLanes, low_key);
    high_key = __reduce_max_sync(kAllLanes, high_key);
    if (lane_ == 0 && low_key <= high_key) {
      atomicMin(&s_.of_open.low, low_key);
      atomicMax(&s_.of_open.high, high_key);
    }
  }
  // Counts and lists the warp's open columns in a step. `open`: the lane's columns.
  __device__ __forceinline__ void list_open(int step, std::uint32_t open) {
    const auto count = static_cast<std::uint32_t>(__popc(open)), of_warp = __reduce_add_sync(kAllLanes, count);
    if (of_warp == 0) return;
    std::uint32_t at = 0;
    if (lane_ == 0) {
      at = atomicAdd(&s_.of_open.count, of_warp);
      atomicAdd(s_.open_of_group + group_of(step), of_warp);
    }
    at = __shfl_sync(kAllLanes, at, 0) + scan(count) - count;
    const int first = place_of_leaf(step).first + chain_;
#pragma unroll 1
    for (; open != 0 && at < kMostAtCut; open &= open - 1, ++at) {
      const int k = __ffs(static_cast<int>(open)) - 1;
      s_.found[at] = rank_of(column_of(step, k), first + k * kNumChains);
    }
  }
  // The rank of the open column with which the sum of masses reaches the goal, if all open columns have this z. Their
  // masses are equal, so the numbers of open columns in groups, then in leaves, lead to the column.
  __device__ __forceinline__ std::uint64_t last_of_ties(float z) {
    if (warp_ == 0) find_tie(z);
    __syncthreads();
    return s_.last;
  }
  __device__ __forceinline__ void find_tie(float z) {
    const std::uint64_t mass = mass_of(z), goal = s_.goal - s_.before;
    const auto reaches = [&](std::uint32_t columns) { return columns * mass >= goal; };
    // Each lane has neighbouring columns, `count` of them open. Returns the lane whose columns reach the goal.
    // `before`: the open columns before the first lane's; then those before the lane's.
    const auto lane_of_goal = [&](std::uint32_t count, std::uint32_t* before) {
      const std::uint32_t end = *before + scan(count);
      *before = end - count;
      return __ffs(static_cast<int>(__ballot_sync(kAllLanes, !reaches(*before) && reaches(end)))) - 1;
    };
    constexpr int kOwn = 2;
    static_assert(kMostGroups <= kOwn * kWarp);
    std::uint32_t own[kOwn], before = 0;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int task = lane_ * kOwn + k;
      own[k] = task < grid_.groups ? load_remote(s_.open_of_group + task / kBlocks, task % kBlocks) : 0;
    }
    const int of_group = lane_of_goal(own[0] + own[1], &before);
    const bool second = !reaches(before + own[0]);
    before = __shfl_sync(kAllLanes, before + (second ? own[0] : 0), of_group);
    const int task = __shfl_sync(kAllLanes, lane_ * kOwn + (second ? 1 : 0), of_group);
    const int group = task / kBlocks, rank = task % kBlocks;
    const std::uint16_t* const of_leaf =
        s_.open[group / kGroupsAtOnce] + (group % kGroupsAtOnce * kGroupLeaves + lane_) * kNumChains;
    const uint4 open = load_remote(reinterpret_cast<const uint4*>(of_leaf), rank);
    const int first = load_remote(&s_.columns[group].x, rank);
    const auto count = static_cast<std::uint32_t>(__popc(open.x) + __popc(open.y) + __popc(open.z) + __popc(open.w));
    const int leaf = lane_of_goal(count, &before);
    before = __shfl_sync(kAllLanes, before, leaf);
    // Each half of a word has a chain of the leaf. A lane takes one column of each of four chains.
    static_assert(kNumChains == 8 && kLeafSteps == 16);
    const std::uint32_t words[] = {__shfl_sync(kAllLanes, open.x, leaf), __shfl_sync(kAllLanes, open.y, leaf),
                                   __shfl_sync(kAllLanes, open.z, leaf), __shfl_sync(kAllLanes, open.w, leaf)};
    const bool upper = lane_ % 2 != 0;
    const int k = lane_ / 2;
    const std::uint32_t low = (upper ? words[2] : words[0]) >> k, high = (upper ? words[3] : words[1]) >> k;
    std::uint32_t bits = (low & 1) | (low >> 15 & 2) | (high & 1) << 2 | (high >> 13 & 8);
    if (lane_of_goal(static_cast<std::uint32_t>(__popc(bits)), &before) != lane_) return;
#pragma unroll 1
    for (; !reaches(before + 1); ++before) bits &= bits - 1;
    s_.last = rank_of(z, first + leaf * kLeafColumns + lane_ * 4 + __ffs(static_cast<int>(bits)) - 1);
  }
  // Sums this block's bins over all blocks, and sends the sums of every kBinsOfWarp bins to all blocks.
  __device__ __forceinline__ void sum_bins() {
    constexpr int kShare = kBlocks * kBinsOfWarp / kWarp;  // blocks whose bins a lane adds
    const int bin = warp_ * kBinsOfWarp + lane_ % kBinsOfWarp;
    std::uint64_t of[kShare], sum = 0;
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      const int of_bin = rank_ * kBinsOfBlock + bin, from = lane_ / kBinsOfWarp * kShare + k;
      of[k] = load_remote(s_.bins[0] + of_bin, from) | std::uint64_t{load_remote(s_.bins[1] + of_bin, from)} << 32;
    }
#pragma unroll
    for (int k = 0; k < kShare; ++k) sum += of[k];
#pragma unroll
    for (int d = kBinsOfWarp; d < kWarp; d *= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
    if (lane_ < kBinsOfWarp) s_.sums[bin] = sum;
#pragma unroll
    for (int d = 1; d < kBinsOfWarp; d *= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
    if (lane_ < kBlocks) store_remote_u64(of_block(s_.parts + rank_ * kWarps + warp_, lane_), sum);
  }
  // The first warp finds the bin in which the sum of masses reaches the goal.
  __device__ __forceinline__ void find_bin(bool is_first, float top_p) {
    constexpr int kOwn = kBlocks * kWarps / kWarp;
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
    mine = lane_ < kBinsOfWarp && part >= 0 ? load_remote(s_.sums + part % kWarps * kBinsOfWarp + lane_, part / kWarps)
                                            : 0;
    before = base + scan(mine) - mine;
    if (before < goal && before + mine >= goal) {
      s_.bin = part * kBinsOfWarp + lane_;
      s_.before = before;
    }
    if (lane_ == 0) s_.goal = goal;
  }
  // The sum over the lanes up to this lane.
  template <class N>
  __device__ __forceinline__ N scan(N x) const {
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const N other = __shfl_up_sync(kAllLanes, x, d);
      if (lane_ >= d) x += other;
    }
    return x;
  }
  // Collects the columns in the cut's bin from all blocks, if they fit the list. Returns their number. `mine`: the
  // number of columns in block `lane_`.
  __device__ __forceinline__ int gather(int mine) {
    int end = mine;
#pragma unroll
    for (int d = 1; d < kBlocks; d *= 2) {
      const int other = __shfl_up_sync(kAllLanes, end, d);
      if (lane_ >= d) end += other;
    }
    const int size = __shfl_sync(kAllLanes, end, kBlocks - 1);
    if (size > kMostAtCut) return size;
#pragma unroll 1
    for (int from = warp_; from < kBlocks; from += kWarps) {
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
  // The rank of the list's first column, in the order of ranks, at which the sum of masses reaches the goal. Finer bins
  // leave few columns to compare. If all these columns have one z, bins of their ids leave even fewer columns.
  // bin_of(rank): the finer bin of a column; it never decreases as ranks ascend.
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
        for (int i = thread; i < kFineBins; i += threads) s_.bins[0][i] = s_.bins[1][i] = 0;
        __syncthreads();
      }
#pragma unroll 1
      for (int i = thread; i < count; i += threads) {
        const std::uint64_t mass = s_.masses[step == 0 ? i : from[i]];
        const std::uint32_t bin = shared_address(s_.bins[0] + fine_bin(fine_of(rank_at(i))));
        add_high(bin, add_low(bin, mass));
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
  // Place of a finer bin. Each lane of the first warp has kOwn neighbouring bins; the lanes' bins lie in different
  // banks.
  static __device__ __forceinline__ int fine_bin(int bin) {
    constexpr int kOwn = kFineBins / kWarp;
    return bin % kOwn * kWarp + bin / kOwn;
  }
  __device__ __forceinline__ std::uint64_t fine_mass(int bin) const {
    return s_.bins[0][fine_bin(bin)] | std::uint64_t{s_.bins[1][fine_bin(bin)]} << 32;
  }
  // The first warp finds the finer bin in which the sum of masses reaches the goal.
  __device__ __forceinline__ void find_fine_bin() {
    constexpr int kOwn = kFineBins / kWarp;
    std::uint64_t mine = 0;
#pragma unroll 4
    for (int k = 0; k < kOwn; ++k) mine += fine_mass(lane_ * kOwn + k);
    const std::uint64_t goal = s_.goal;
    std::uint64_t before = s_.before;
    before += scan(mine) - mine;
    __syncwarp();  // every lane has read s_.before
    if (before < goal && before + mine >= goal) {
#pragma unroll 1
      for (int k = 0; k < kOwn; ++k) {
        const std::uint64_t mass = fine_mass(lane_ * kOwn + k);
        if (before + mass >= goal) {
          s_.bin = lane_ * kOwn + k;
          s_.before = before;
          break;
        }
        before += mass;
      }
    }
  }

  const SampleParams& p_;
  const GroupGrid& grid_;
  const SampleChunk& chunk_;
  Shared& s_;
  const int height_, rank_, i_, lane_, warp_, chain_;
  int first_held_ = 0;  // the first step whose columns shared memory holds
  float c_ = 0.0f, m_ = 0.0f;
  float least_ = 0.0f;  // columns up to this z have no mass
};

}  // namespace
}  // namespace rlk::cuda
