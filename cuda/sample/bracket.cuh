// The cut of rows that masses alone cut: top_p without top_k. A block has a row. Before the scan of masses, a sample of
// the row's columns brackets the last kept column. After it, the exact masses of the listed columns decide. A row whose
// bracket fails takes the selection of rlk/kernels/sample_select.h.
#pragma once

#include <cfloat>

#include "first_columns.cuh"
#include "masses.cuh"
#include "rlk/kernels/sample_select.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

template <class T, Exp kExp>
class MassCut : RowSelection<BlockTeam<kRowThreads>, T, kExp> {
  using Team = BlockTeam<kRowThreads>;
  using Base = RowSelection<Team, T, kExp>;
  using Base::allowed_, Base::logits_, Base::z_at, Base::mass_of;
  using Base::c_, Base::m_, Base::q_;
  using Base::p_, Base::row_, Base::state_;

 public:
  __device__ MassCut(const SampleParams& p, std::int64_t row, FinishShared* shared, const SampleChunk& chunk,
                     std::int64_t i)
      : Base(Team(), p, row, &shared->base, nullptr, chunk.states + i, chunk.firsts + i * kMaxTeam),
        s_(*shared),
        map_(SlotMap::make(p, shared->cuts)),
        num_slots_(kNumParts << map_.height),
        nodes_(chunk.nodes + i * 4 * num_slots_),
        bracket_(*bracket_of(chunk.firsts, i)),
        capacity_(static_cast<std::uint32_t>(chunk.most_listed)),
        list_(chunk.listed + i * chunk.most_listed) {
    __syncthreads();
  }

  // After the first scan.
  __device__ void find_bracket() {
    if (state_->waits != kForSelection) return;
    const SampleRow want = sample_row_of<PlainMemory>(p_, row_);
    if (!cuts_by_mass(p_, want)) return;
    if (thread_of_block() == 0) {
      low() = -FLT_MAX;
      high() = infinity();
    }
    __syncthreads();
    if (p_.valid_vocab > static_cast<std::int64_t>(capacity_)) estimate(want);
    __syncthreads();
    if (thread_of_block() != 0) return;
    bracket_ = {0, 0, low(), high(), 0};
    state_->waits = kForMasses;
  }
  // After the scan of masses.
  __device__ void cut() {
    if (state_->waits != kForMasses) return;
    const SampleRow want = sample_row_of<PlainMemory>(p_, row_);
    load_reference(want);
    const float largest = z_at(state_->id);
    const bool found = bracket_.listed <= capacity_ && find_last(largest, share_of_mass(want.top_p, bracket_.total));
    __syncthreads();
    if (thread_of_block() != 0) return;
    if (found) {
      state_->last = s_.base.found_prefix;
      state_->least = share_of_mass(want.min_p, mass_of(largest));
    }
    state_->waits = found ? kForTree : kForSelection;
  }

 private:
  // Columns of a leaf in the sample: two runs of eight, whose place differs from leaf to leaf.
  static constexpr int kRun = 8, kRuns = 2, kEach = kLeafColumns / (kRun * kRuns);  // a sampled column stands for kEach

  // The bracket, the columns below the cut, and the columns around it that the bracket holds, by the estimate.
  __device__ float& low() const { return reinterpret_cast<float*>(s_.base.chunk_masses)[0]; }
  __device__ float& high() const { return reinterpret_cast<float*>(s_.base.chunk_masses)[1]; }
  __device__ float& columns() const { return reinterpret_cast<float*>(s_.base.chunk_masses)[2]; }
  __device__ float& margin() const { return reinterpret_cast<float*>(s_.base.chunk_masses)[3]; }

  __device__ void load_reference(const SampleRow& want) {
    c_ = log2_scale(want.temperature);
    m_ = state_->m;
    q_ = state_->q;
  }
  // Sets low and high. The leaves' largest columns and the sample give the number of columns by bins of equal width in
  // z. The mass that the row drops is (1 - top_p) of the sum of the leaves' nodes.
  __device__ void estimate(const SampleRow& want) {
    load_reference(want);
    std::uint32_t* const counts = s_.base.counts;
    const float largest = z_at(state_->id), *const tops = nodes_ + 2 * num_slots_;
    constexpr float kWidth = kMassRange / kDigitBins;  // a bin's width in log2 of mass
    const float scale = mul_rn(c_, 1.0f / kWidth);
    const auto count = [&](float z, std::uint32_t columns) {
      const float x = fminf(fmaxf(mul_rn(sub_rn(largest, z), scale), 0.0f), kDigitBins - 1);
      atomicAdd(counts + static_cast<int>(x), columns);
    };
    for (int i = thread_of_block(); i < kDigitBins; i += kRowThreads) counts[i] = 0;
    __syncthreads();
    float total = 0.0f;
    for (int slot = thread_of_block(); slot < num_slots_; slot += kRowThreads) {
      if (!map_.has_columns(slot)) continue;
      const float top = tops[slot], m = nodes_[2 * slot], S = nodes_[2 * slot + 1];
      if (top == -infinity()) continue;
      total += S * ex2_approx(fmaxf(m - m_, -120.0f));
      count(top, 1);
    }
    // Four threads have the runs of a slot, and each four columns, which begin at a multiple of four.
    constexpr int kOwn = 4, kOfSlot = kRun * kRuns / kOwn, kAtOnce = kRowThreads / kOfSlot, kAhead = 4;
    const int own_run = thread_of_block() % kOfSlot / 2 * (kLeafColumns / kRuns) + thread_of_block() % 2 * kOwn;
#pragma unroll 1
    for (int base = thread_of_block() / kOfSlot; base < num_slots_; base += kAhead * kAtOnce) {
      float z[kAhead][kOwn], top[kAhead];
      std::uint32_t takes[kAhead];  // bits of the columns that count
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int slot = base + i * kAtOnce;
        int columns;
        const int first = map_.first(min(slot, num_slots_ - 1), &columns), at = own_run + slot * 5 % kRun * kRun;
        const bool has = slot < num_slots_ && at + kOwn <= columns;
        const int column = has ? first + at : 0;
        top[i] = tops[has ? slot : 0];
        takes[i] = has ? ~0u : 0u;
        if (allowed_ != nullptr) takes[i] &= static_cast<std::uint32_t>(allowed_[column / 32]) >> (column % 32);
#pragma unroll
        for (int k = 0; k < kOwn; ++k) z[i][k] = T::load(logits_[has ? column + k : 0]);
        if (!this->has_edits()) continue;
#pragma unroll
        for (int k = 0; k < kOwn; ++k) z[i][k] = this->edited(has ? column + k : 0, z[i][k]);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
          if ((takes[i] >> k & 1) != 0 && z[i][k] != top[i]) count(z[i][k], kEach);
        }
      }
    }
    total = block_sums(make_float4(total, 0.0f, 0.0f, 0.0f), 0).x;  // its barrier ends the counting
    // A thread has eight neighbouring bins, and the first thread has those of the least mass.
    constexpr int kOwnBins = kDigitBins / kRowThreads;
    const int last = kDigitBins - 1 - thread_of_block() * kOwnBins;
    float4 own = {};  // mass, squares of the masses, columns
#pragma unroll
    for (int k = 0; k < kOwnBins; ++k) add_bin(last - k, counts[last - k], &own);
    const float4 before = sums_before(own);
    const float goal = (1.0f - want.top_p) * total / ex2_approx(mul_rn(c_, largest) - m_);
    if (thread_of_block() == 0) columns() = margin() = 0.0f;
    __syncthreads();
    if (before.x < goal && goal <= before.x + own.x) {
      float4 sum = before;
#pragma unroll 1
      for (int k = 0; k < kOwnBins; ++k) {
        const float4 behind = sum;
        add_bin(last - k, counts[last - k], &sum);
        if (sum.x < goal) continue;
        const float mass = mass_of_bin(last - k);
        columns() = behind.z + (goal - behind.x) / mass;
        // Five standard deviations of the number of columns that the sample's masses give, and some for sparse bins.
        margin() = fminf(256.0f + 5.0f * sqrtf((kEach - 1) * sum.y) / mass, 0.45f * static_cast<float>(capacity_));
        break;
      }
    }
    __syncthreads();
    const auto z_behind = [&](float columns, float* z) {  // where that many columns of the row lie below
      if (!(before.z < columns && columns <= before.z + own.z)) return;
      float sum = before.z;
#pragma unroll 1
      for (int k = 0; k < kOwnBins; ++k) {
        const auto in_bin = static_cast<float>(counts[last - k]);
        if (sum + in_bin >= columns) {
          *z = largest - (static_cast<float>(last - k + 1) - (columns - sum) / in_bin) / scale;
          return;
        }
        sum += in_bin;
      }
    };
    z_behind(columns() - margin(), &low());
    z_behind(columns() + margin(), &high());
  }
  static __device__ __forceinline__ float mass_of_bin(int bin) {
    return ex2_approx((static_cast<float>(bin) + 0.5f) * (-kMassRange / kDigitBins));
  }
  static __device__ __forceinline__ void add_bin(int bin, std::uint32_t columns, float4* sum) {
    const float mass = mass_of_bin(bin), n = static_cast<float>(columns);
    sum->x += n * mass;
    sum->y += n * mass * mass;
    sum->z += n;
  }
  static __device__ __forceinline__ float4 plus(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, 0.0f);
  }
  __device__ float4& sum_of_warp(int buffer, int warp) const {
    return reinterpret_cast<float4*>(s_.counts[buffer])[warp];
  }
  // Sums over the block; buffer as in block_sum().
  __device__ float4 block_sums(float4 x, int buffer) const {
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      x = plus(x, make_float4(shuffle_xor(x.x, d), shuffle_xor(x.y, d), shuffle_xor(x.z, d), 0.0f));
    }
    if (lane_of_warp() == 0) sum_of_warp(buffer, warp_of_block()) = x;
    __syncthreads();
    float4 sum = {};
#pragma unroll
    for (int i = 0; i < kRowWarps; ++i) sum = plus(sum, sum_of_warp(buffer, i));
    return sum;
  }
  // Sums over the threads before this one.
  __device__ float4 sums_before(const float4& x) const {
    float4 sum = x;
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const float4 other = make_float4(__shfl_up_sync(kAllLanes, sum.x, d), __shfl_up_sync(kAllLanes, sum.y, d),
                                       __shfl_up_sync(kAllLanes, sum.z, d), 0.0f);
      if (lane_of_warp() >= d) sum = plus(sum, other);
    }
    if (lane_of_warp() == kWarp - 1) sum_of_warp(1, warp_of_block()) = sum;
    __syncthreads();
    float4 before = make_float4(__shfl_up_sync(kAllLanes, sum.x, 1), __shfl_up_sync(kAllLanes, sum.y, 1),
                                __shfl_up_sync(kAllLanes, sum.z, 1), 0.0f);
    if (lane_of_warp() == 0) before = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kRowWarps; ++i) {
      if (i < warp_of_block()) before = plus(before, sum_of_warp(1, i));
    }
    return before;
  }

  // The masses of the threads before this one.
  __device__ std::uint64_t sum_before(std::uint64_t mass) const {
    std::uint64_t sum = mass;
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const std::uint64_t other = __shfl_up_sync(kAllLanes, sum, d);
      sum += lane_of_warp() >= d ? other : 0;
    }
    if (lane_of_warp() == kWarp - 1) s_.wide[warp_of_block()] = sum;
    __syncthreads();
    sum -= mass;
#pragma unroll
    for (int i = 0; i < kRowWarps; ++i) sum += i < warp_of_block() ? s_.wide[i] : 0;
    return sum;
  }
  // Calls fn(rank, z) for this thread's share of the list in memory.
  template <class F>
  __device__ __forceinline__ void each_of_bracket(F fn) const {
    constexpr int kAhead = 8;
    const auto size = static_cast<int>(bracket_.listed);
#pragma unroll 1
    for (int base = thread_of_block(); base < size; base += kAhead * kRowThreads) {
      std::uint64_t rank[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) rank[k] = list_[min(base + k * kRowThreads, size - 1)];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (base + k * kRowThreads < size) fn(rank[k], z_of_rank(rank[k]));
      }
    }
  }
  // Finds the first column in the order of ranks with which the mass reaches the goal; its rank is then found_prefix.
  // Returns whether the bracket and shared memory hold it.
  __device__ bool find_last(float largest, std::uint64_t goal) {
    SampleShared& s = s_.base;
    if (bracket_.above >= goal) return false;
    const float high = fminf(bracket_.high, largest);
    const float low = fmaxf(bracket_.low, largest - kMassRange / c_), scale = kDigitBins / (high - low);
    const auto bin_of = [&](float z) {
      const float x = mul_rn(sub_rn(high, z), scale);
      return x >= kDigitBins - 1 ? kDigitBins - 1 : x > 0.0f ? static_cast<int>(x) : 0;
    };
    for (int i = thread_of_block(); i < kDigitBins; i += kRowThreads) {
      s.counts[i] = 0;
      s.masses[i] = 0;
    }
    __syncthreads();
    each_of_bracket([&](std::uint64_t, float z) {
      Team().add(&s.counts[bin_of(z)], 1u);
      Team().add(&s.masses[bin_of(z)], mass_of(z));
    });
    __syncthreads();
    // A thread has eight neighbouring bins.
    constexpr int kOwnBins = kDigitBins / kRowThreads;
    const int first_bin = thread_of_block() * kOwnBins;
    std::uint64_t own_mass = 0;
#pragma unroll
    for (int k = 0; k < kOwnBins; ++k) own_mass += s.masses[first_bin + k];
    std::uint64_t sum = sum_before(own_mass) + bracket_.above;
    if (thread_of_block() == 0) s.found_count = 0;
    __syncthreads();
    if (sum < goal && sum + own_mass >= goal) {
#pragma unroll 1
      for (int k = 0; k < kOwnBins; ++k) {
        const std::uint64_t mass = s.masses[first_bin + k];
        if (sum + mass >= goal) {
          s.found_prefix = static_cast<std::uint64_t>(first_bin + k);
          s.found_before = sum;
          s.found_count = s.counts[first_bin + k];
          break;
        }
        sum += mass;
      }
    }
    __syncthreads();
    const std::uint64_t before = s.found_before;
    const std::uint32_t size = s.found_count;
    const int bin = static_cast<int>(s.found_prefix);
    if (size == 0 || size > kListColumns) return false;
    if (thread_of_block() == 0) s.listed = 0;
    __syncthreads();
    each_of_bracket([&](std::uint64_t rank, float z) {
      if (bin_of(z) == bin) s.list[Team().take(&s.listed)] = rank;
    });
    __syncthreads();
    if (size > kRowThreads) {
      this->list_size_ = size;
      this->listed_ = true;
      std::uint64_t mine = 0;
      for (std::uint32_t i = thread_of_block(); i < size; i += kRowThreads) mine = max(mine, s.list[i]);
      const std::uint64_t most = this->reduce(mine, [](std::uint64_t a, std::uint64_t b) { return a > b ? a : b; });
      const std::uint64_t last = min(this->last_kept(kLastRank, goal - before, false), most);
      if (thread_of_block() == 0) s.found_prefix = last;
      return true;
    }
    const std::uint64_t own = thread_of_block() < static_cast<int>(size) ? s.list[thread_of_block()] : kLastRank;
    const std::uint64_t mass = own != kLastRank ? mass_of(z_of_rank(own)) : 0;
    s.masses[thread_of_block()] = mass;
    __syncthreads();
    sum = before;
#pragma unroll 1
    for (std::uint32_t i = 0; i < size; ++i) sum += s.list[i] < own ? s.masses[i] : 0;
    if (own != kLastRank && sum < goal && sum + mass >= goal) s.found_prefix = own;
    return true;
  }

  FinishShared& s_;
  const SlotMap map_;
  const int num_slots_;
  const float* const nodes_;
  Bracket& bracket_;
  const std::uint32_t capacity_;
  const std::uint64_t* const list_;
};

}  // namespace
}  // namespace rlk::cuda
