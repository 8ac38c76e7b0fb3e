// Computes the masses of a leaf's columns in one lane, for the cut by top_p (bracket.cuh). A column's mass is its
// exponential relative to the row's largest z. Its rank is an integer that orders columns by descending z, then by id.
#pragma once

#include "../logprob/leaf_group.cuh"
#include "first_columns.cuh"
#include "kernels/sample/check.h"
#include "team.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

// The row's last kept column has z in [low, high). A scan sums the masses, and lists the ranks of the columns with z in
// this range. In place of a column's id, these ranks hold the column's place (place_of).
struct Bracket {
  std::uint64_t above, total;  // mass of the columns with z >= high; mass of all columns
  float low, high, largest;    // the bracket, and the row's largest z
  std::uint32_t listed;        // number of columns in the list; above the capacity if they do not fit
};
__device__ __forceinline__ Bracket* bracket_of(std::uint64_t* firsts, std::int64_t i) {
  static_assert(sizeof(Bracket) <= 8 * kMaxTeam);  // reuses memory that only rows without a bracket need
  return reinterpret_cast<Bracket*>(firsts + i * kMaxTeam);
}

// The end of the i-th row's list in memory. A row may store its kept ids directly before this end.
__device__ __forceinline__ std::int32_t* ids_of_list(const SampleChunk& chunk, std::int64_t i) {
  return reinterpret_cast<std::int32_t*>(chunk.listed + (i + 1) * chunk.most_listed);
}

// Columns per leaf in the sample from which the bracket is estimated. The first scan stores the sample in the row's
// list.
constexpr int kSampledColumns = 8;
// Whether the first scan stores a sample of the row. If the list can hold all columns, no sample is needed, and the
// list has no room for it.
__device__ __forceinline__ bool takes_sample(const SampleParams& p, const SampleRow& want, const SampleChunk& chunk) {
  return p.valid_vocab > chunk.most_listed && cuts_by_mass(p, want);
}

// A sum of masses without 64-bit integers. The last bit of a double between 2^8 and 2^9 has the value 2^-44. So an
// addition of e with rounding toward zero adds floor(2^44 e) units of 2^-44. The sum of 128 columns stays below 2^9,
// from where on the last bit has another value.
class MassSum {
 public:
  // Adds the mass of e if `takes`. A subnormal e has no mass: neither e nor the double that its bits give reaches a
  // unit.
  __device__ __forceinline__ void add(float e, bool takes = true) {
    const double units = units_of(e);
    sum_ = __dadd_rz(sum_, __hiloint2double(takes ? __double2hiint(units) : 0, __double2loint(units)));
  }
  // e as the double that add() takes.
  static __device__ __forceinline__ double units_of(float e) {
    const auto bits = static_cast<std::uint32_t>(bits_of(e));
    return __hiloint2double(static_cast<int>((bits >> 3) + 0x38000000u), static_cast<int>(bits << 29));
  }
  __device__ __forceinline__ void add(double units) { sum_ = __dadd_rz(sum_, units); }
  // Adds the mass of a column whose z is at least `least`.
  __device__ __forceinline__ void add_from(float least, float z, double units) {
    asm("{\n\t.reg .pred p;\n\tsetp.ge.f32 p, %1, %2;\n\t@p add.rz.f64 %0, %0, %3;\n\t}"
        : "+d"(sum_)
        : "f"(z), "f"(least), "d"(units));
  }
  __device__ __forceinline__ std::uint64_t value() const {
    return static_cast<std::uint64_t>(__double_as_longlong(sum_)) & ((std::uint64_t{1} << 52) - 1);
  }

 private:
  double sum_ = 0x1p8;
};

// The values of a row on which the masses of a leaf depend.
struct MassRow {
  float c = 0.0f, m = 0.0f, q = 0.0f, low = 0.0f, high = 0.0f;

  MassRow() = default;
  __device__ __forceinline__ MassRow(const SampleParams& p, std::int64_t row, const SampleChunk& chunk, int i)
      : c(log2_scale(p.temperature.at(row))),
        m(chunk.states[i].m),
        q(chunk.states[i].q),
        low(bracket_of(chunk.firsts, i)->low),
        high(bracket_of(chunk.firsts, i)->high) {}
};

// Passes over a row's list of ranks. Each of the block's kThreads threads calls fn(ranks, has) for its share, with
// kAtOnce ranks at once; has[k] is whether the list has rank k. L1 holds a list that the block has read before.
template <int kAtOnce, int kThreads, class F>
__device__ __forceinline__ void batches_of_list(const std::uint64_t* list, int size, F fn) {
#pragma unroll 1
  for (int base = static_cast<int>(threadIdx.x); base < size; base += kAtOnce * kThreads) {
    std::uint64_t rank[kAtOnce];
    bool has[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      rank[k] = list[min(base + k * kThreads, size - 1)];
      has[k] = base + k * kThreads < size;
    }
    fn(rank, has);
  }
}

struct LeafMasses {
  std::uint64_t above = 0, total = 0;
};
// The masses of a leaf's n columns, and the bits of the columns in the bracket. `kAll`: the leaf is whole and all of
// its columns count; otherwise only columns with a bit in `words` count. `kBounded`: the bracket has an upper end.
template <class T, Exp kExp, bool kAll, bool kBounded>
__device__ __forceinline__ LeafMasses masses_of_leaf(const Leaf<T>& leaf, int n, const MassRow& row,
                                                     std::uint32_t (&words)[kMaskWords]) {
  using Exponential = Chains<kExp, false>;
  const float addend = Exponential::addend(row.m);
  constexpr int kSums = 4;  // number of separate sums, so additions wait less for one another
  MassSum total[kSums], above[kSums];
#pragma unroll
  for (int k = 0; k < kMaskWords; ++k) {
    std::uint32_t inside = 0;
#pragma unroll 2
    for (int shift = 0; shift < 32 && (kAll || 32 * k + shift < n); shift += kVec8) {
      float z[kVec8];
      leaf.vec8((32 * k + shift) / kVec8).to_float(z);
      std::uint32_t open = 0;
#pragma unroll
      for (int r = 0; r < kVec8; ++r) {
        if (!kAll) z[r] = (words[k] >> shift >> r & 1) != 0 ? z[r] : -infinity();
        // The hardware's exponential needs no clamp: for z below the clamp, its mass is 0, too.
        const float clamped = kExp == Exp::kHardware ? z[r] : fmaxf(z[r], row.q);
        const float e = Exponential::exponential(clamped, row.c, addend);
        const bool is_above = kBounded && z[r] >= row.high;
        total[r % kSums].add(e);
        if constexpr (kBounded) above[r % kSums].add(e, is_above);
        if (z[r] >= row.low && !is_above) open |= 1u << r;
      }
      inside |= open << shift;
    }
    words[k] = inside;
  }
  LeafMasses sum;
#pragma unroll
  for (int i = 0; i < kSums; ++i) sum = {sum.above + above[i].value(), sum.total + total[i].value()};
  return sum;
}

// Adds the masses of a warp's leaves to the row's masses, and lists the leaves' columns in the bracket. `words`: the
// bits of these columns. `slot`: the slot of the lane's leaf.
template <class T>
__device__ __forceinline__ void add_masses(LeafMasses masses, const Leaf<T>& leaf, int slot,
                                           std::uint32_t (&words)[kMaskWords], const SampleChunk& chunk, int row,
                                           int lane) {
  Bracket* const bracket = bracket_of(chunk.firsts, row);
  std::uint64_t* const list = chunk.listed + row * chunk.most_listed;
  std::uint32_t own = 0;
#pragma unroll
  for (int k = 0; k < kMaskWords; ++k) own += static_cast<std::uint32_t>(set_bits_of(words[k]));
  const std::uint32_t found = __reduce_add_sync(kAllLanes, own);
  std::uint32_t at = 0;
  if (found > 0 && lane == 0) at = atomicAdd(&bracket->listed, found);
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    masses.above += __shfl_xor_sync(kAllLanes, masses.above, d);
    masses.total += __shfl_xor_sync(kAllLanes, masses.total, d);
  }
  if (lane == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&bracket->above), masses.above);
    atomicAdd(reinterpret_cast<unsigned long long*>(&bracket->total), masses.total);
  }
  if (found == 0) return;
  at = __shfl_sync(kAllLanes, at, 0);
  if (at + found > chunk.most_listed) return;
#pragma unroll
  for (int k = 0; k < kMaskWords; ++k) {
    std::uint32_t left = words[k];
#pragma unroll 1
    for (unsigned have; (have = __ballot_sync(kAllLanes, left != 0)) != 0;) {
      if (left != 0) {
        const int column = 32 * k + lowest_bit_of(left);
        list[at + set_bits_of(have & ((1u << lane) - 1))] =
            rank_of(T::load(*leaf.element(column)), place_of(slot, column));
        left &= left - 1;
      }
      at += static_cast<std::uint32_t>(set_bits_of(have));
    }
  }
}

}  // namespace
}  // namespace rlk::cuda
