// The cut of rows whose masses alone decide it: top_p without top_k. A block has a row. Before the scan of masses, a
// sample of the row's columns brackets the last kept column. After it, the exact masses of the listed columns decide. A
// row whose bracket fails takes the selection of rlk/kernels/sample_select.h.
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
  using Base::c_, Base::m_, Base::q_;
  using Base::p_, Base::row_, Base::state_;
  using Base::z_at, Base::mass_of;

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
  static constexpr int kEach = kLeafColumns / kSampledColumns;  // columns that one of the sample stands for

  struct Binned {  // sums over bins: the columns' masses, the squares of these, and the columns
    float mass, squares, columns;
    __device__ __forceinline__ Binned operator+(const Binned& o) const {
      return {mass + o.mass, squares + o.squares, columns + o.columns};
    }
  };

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
  // Sets low and high. Bins of equal width in z count columns: the largest one of each leaf, and kEach for each sampled
  // one. The row drops the share 1 - top_p of its mass, which is the sum of the leaves' nodes.
  __device__ void estimate(const SampleRow& want) {
    load_reference(want);
    std::uint32_t* const counts = s_.base.counts;
    const float largest = z_at(state_->id), *const tops = nodes_ + 2 * num_slots_;
    constexpr float kWidth = kMassRange / kDigitBins;  // a bin's width in log2 of mass
    const float scale = mul_rn(c_, 1.0f / kWidth);
    std::uint32_t far = 0;  // columns of the last bin, which may be most of a row's
    const auto count = [&](float z, std::uint32_t columns) {
      const float x = mul_rn(sub_rn(largest, z), scale);
      if (x >= kDigitBins - 1) {
        far += columns;
      } else {
        atomicAdd(counts + (x > 0.0f ? static_cast<int>(x) : 0), columns);
      }
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
    const auto* const sample = reinterpret_cast<const float4*>(list_);
    constexpr int kAhead = 8, kOfSlot = kSampledColumns / 4;  // columns of a thread's load are of one leaf
#pragma unroll 1
    for (int base = thread_of_block(); base < kOfSlot * num_slots_; base += kAhead * kRowThreads) {
      float4 z[kAhead];
      float top[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = base + i * kRowThreads;
        const bool has = at < kOfSlot * num_slots_ && map_.has_columns(at / kOfSlot);
        z[i] = has ? sample[at] : make_float4(-infinity(), -infinity(), -infinity(), -infinity());
        top[i] = has ? tops[at / kOfSlot] : -infinity();
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float own[] = {z[i].x, z[i].y, z[i].z, z[i].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (own[k] != -infinity() && own[k] != top[i]) count(own[k], kEach);
        }
      }
    }
    far = __reduce_add_sync(kAllLanes, far);
    if (lane_of_warp() == 0 && far > 0) atomicAdd(counts + kDigitBins - 1, far);
    total = block_sum(total, reinterpret_cast<float*>(s_.counts[0]));  // its barrier ends the counting
    // A thread has eight neighbouring bins, and the first thread has those of the least mass.
    constexpr int kOwnBins = kDigitBins / kRowThreads;
    const int last = kDigitBins - 1 - thread_of_block() * kOwnBins;
    Binned own = {};
#pragma unroll
    for (int k = 0; k < kOwnBins; ++k) add_bin(last - k, counts[last - k], &own);
    const Binned before = block_scan(own, reinterpret_cast<Binned*>(s_.counts[1]));
    const float goal = (1.0f - want.top_p) * total / ex2_approx(mul_rn(c_, largest) - m_);
    if (thread_of_block() == 0) columns() = margin() = 0.0f;
    __syncthreads();
    if (before.mass < goal && goal <= before.mass + own.mass) {
      Binned sum = before;
#pragma unroll 1
      for (int k = 0; k < kOwnBins; ++k) {
        const Binned behind = sum;
        add_bin(last - k, counts[last - k], &sum);
        if (sum.mass < goal) continue;
        const float mass = mass_of_bin(last - k);
        columns() = behind.columns + (goal - behind.mass) / mass;
        // Five standard deviations of the number of columns that the sample's masses give, and some for sparse bins.
        margin() =
            fminf(256.0f + 5.0f * sqrtf((kEach - 1) * sum.squares) / mass, 0.45f * static_cast<float>(capacity_));
        break;
      }
    }
    __syncthreads();
    const auto z_behind = [&](float columns, float* z) {  // where that many columns of the row lie below
      if (!(before.columns < columns && columns <= before.columns + own.columns)) return;
      float sum = before.columns;
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
  static __device__ __forceinline__ void add_bin(int bin, std::uint32_t columns, Binned* sum) {
    const float mass = mass_of_bin(bin), n = static_cast<float>(columns);
    *sum = *sum + Binned{n * mass, n * mass * mass, n};
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
    std::uint64_t sum = block_scan(own_mass, s_.wide) + bracket_.above;
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
