// Cuts rows by masses alone: top_p without top_k. A column's mass is its exponential relative to the row's largest z.
// Each block processes one row. Before the scan of masses, a sample of the row's columns gives a bracket, a range of z
// that should contain the last kept column. The scan lists the columns in the bracket. After the scan, the exact masses
// of the listed columns decide the cut. If the bracket misses the cut, the selection of kernels/sample/select.h
// computes the row.
#pragma once

#include <cfloat>
#include <cstddef>

#include "kept_list.cuh"
#include "kernels/sample/select.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

// A row that needs further launches after the first scan, and the row's largest z.
struct WaitingRow {
  SampleRow want;
  float largest, m;
};

template <class T, Exp kExp, int kThreads>
class MassCut : RowSelection<BlockTeam<kThreads>, T, kExp> {
  using Team = BlockTeam<kThreads>;
  using Masks = LeafMasks<kThreads>;
  using Base = RowSelection<Team, T, kExp>;
  using Base::c_, Base::m_, Base::q_;
  using Base::mass_of;
  using Base::p_, Base::row_, Base::state_;

 public:
  // `map`: after SlotMap::make() has written its cuts to shared memory, the caller passes a barrier. `i`: the row's
  // number in the chunk.
  __device__ __forceinline__ MassCut(const SampleParams& p, const SampleChunk& chunk, std::int64_t i,
                                     FinishShared* shared, const SlotMap& map)
      : Base(Team(), p, chunk.first + i, &shared->base, nullptr, chunk.states + i, chunk.firsts + i * kMaxTeam),
        s_(*shared),
        map_(map),
        num_slots_(kNumParts << map_.height),
        nodes_(chunk.nodes + i * 4 * num_slots_),
        bracket_(*bracket_of(chunk.firsts, i)),
        chunk_(chunk),
        i_(i),
        capacity_(static_cast<std::uint32_t>(chunk.most_listed)),
        list_(chunk.listed + i * chunk.most_listed) {}

  // Runs after the first scan, for a row that needs further launches. Returns whether the row needs a scan of masses.
  __device__ bool find_bracket(const WaitingRow& waiting) {
    if (!cuts_by_mass(p_, waiting.want)) return false;
    if (thread_of_block() == 0) {
      low() = -FLT_MAX;
      high() = infinity();
    }
    __syncthreads();
    if (p_.valid_vocab > static_cast<std::int64_t>(capacity_)) estimate(waiting);
    __syncthreads();
    if (thread_of_block() == 0) bracket_ = {0, 0, low(), high(), waiting.largest, 0};
    return true;
  }
  // Runs after the scan of masses. If the list has all columns that the row keeps, this function also computes the
  // row's nodes.
  __device__ __forceinline__ void cut() {
    const SampleState state = *state_;
    const Bracket bracket = bracket_;
    if (state.waits != kForMasses) return;
    const SampleRow want = sample_row_of<PlainMemory>(p_, row_);
    c_ = log2_scale(want.temperature);
    m_ = state.m;
    q_ = state.q;
    const std::uint64_t least = share_of_mass(want.min_p, mass_of(bracket.largest));
    const Masks masks(&s_, map_);
    const bool lists_all = bracket.high == infinity() && masks.room() > 0;
    const auto survives = [&](float z) { return least == 0 || mass_of(z) >= least; };
    const std::uint64_t goal = share_of_mass(want.top_p, bracket.total);
    if (bracket.listed > capacity_ || !find_last(bracket, goal, lists_all, masks, survives)) {
      if (thread_of_block() == 0) state_->waits = kForSelection;
      return;
    }
    const std::uint64_t last = s_.base.found_prefix;
    __syncthreads();
    std::uint32_t kept = 0;
    bool has_nodes = false, has_ids = false;
    if (lists_all) {
      KeptList<kExp, kThreads> listed(&s_, masks, c_, chunk_.masks + i_ * kMaskWords * num_slots_, nodes_);
      std::int32_t* const ids_end = p_.kept_offsets == nullptr ? nullptr : ids_of_list(chunk_, i_);
      kept = listed.run(list_, static_cast<int>(bracket.listed), ids_end,
                        [&](std::uint64_t rank) { return rank <= last && survives(z_of_rank(rank)); });
      has_nodes = static_cast<int>(kept) <= masks.room();
      has_ids = listed.has_ids();
    }
    if (thread_of_block() != 0) return;
    state_->last =
        last >> kIdBits << kIdBits | static_cast<std::uint64_t>(id_of_place(map_, static_cast<int>(id_of_rank(last))));
    state_->least = least;
    state_->waits = has_nodes ? kForRoots : kForTree;
    state_->kept = has_nodes ? kept : 0;
    state_->listed = has_ids ? static_cast<std::int32_t>(kept) : 0;
  }

 private:
  static constexpr int kShortListRows = 48;                     // with fewer rows, a scan of kept columns is faster
  static constexpr int kEach = kLeafColumns / kSampledColumns;  // columns that one sampled column represents

  struct Binned {  // sums over bins: masses of columns, squares of these masses, number of columns
    float mass, squares, columns;
    __device__ __forceinline__ Binned operator+(const Binned& o) const {
      return {mass + o.mass, squares + o.squares, columns + o.columns};
    }
  };

  // The bracket, and three numbers of columns: the estimated number below the cut, the margin of this estimate, and the
  // number of all columns of the row.
  __device__ float& low() const { return reinterpret_cast<float*>(s_.base.chunk_masses)[0]; }
  __device__ float& high() const { return reinterpret_cast<float*>(s_.base.chunk_masses)[1]; }
  __device__ float& columns() const { return reinterpret_cast<float*>(s_.base.chunk_masses)[2]; }
  __device__ float& margin() const { return reinterpret_cast<float*>(s_.base.chunk_masses)[3]; }
  __device__ float& all() const { return reinterpret_cast<float*>(s_.base.chunk_masses)[4]; }

  // Sets low and high. Bins of equal width in z count columns: the largest column of each leaf once, and each sampled
  // column kEach times. The row's mass is the sum of its leaves' nodes. Columns with the share 1 - top_p of this mass
  // are dropped.
  __device__ void estimate(const WaitingRow& waiting) {
    c_ = log2_scale(waiting.want.temperature);
    m_ = waiting.m;
    std::uint32_t* const counts = s_.base.counts;
    const float largest = waiting.largest, *const tops = nodes_ + 2 * num_slots_;
    constexpr float kWidth = kMassRange / kDigitBins;  // a bin's width in log2 of mass
    const float scale = mul_rn(c_, 1.0f / kWidth);
    std::uint32_t far = 0;  // columns of the last bin, which may hold most columns of a row
    const auto count = [&](float z, std::uint32_t columns) {
      const float x = mul_rn(sub_rn(largest, z), scale);
      if (x >= kDigitBins - 1) {
        far += columns;
      } else {
        atomicAdd(counts + (x > 0.0f ? static_cast<int>(x) : 0), columns);
      }
    };
    for (int i = thread_of_block(); i < kDigitBins; i += kThreads) counts[i] = 0;
    __syncthreads();
    float total = 0.0f;
    constexpr int kAhead = kThreads > kRowThreads ? 2 : 4, kOfSlot = kSampledColumns / 4;
    const auto* const sample = reinterpret_cast<const float4*>(list_);
    const auto* const nodes = reinterpret_cast<const float2*>(nodes_);
#pragma unroll 1
    for (int base = thread_of_block(); base < num_slots_; base += kAhead * kThreads) {
      float top[kAhead];
      float2 node[kAhead];
      float4 z[kAhead][kOfSlot];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int slot = base + i * kThreads;
        const bool has = slot < num_slots_ && map_.has_columns(slot);
        top[i] = has ? tops[slot] : -infinity();
        node[i] = has ? nodes[slot] : make_float2(0.0f, 0.0f);
#pragma unroll
        for (int k = 0; k < kOfSlot; ++k) {
          const float none = -infinity();
          z[i][k] = has ? sample[kOfSlot * slot + k] : make_float4(none, none, none, none);
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (top[i] == -infinity()) continue;
        total += node[i].y * ex2_approx(fmaxf(node[i].x - m_, -120.0f));
        count(top[i], 1);
#pragma unroll
        for (int k = 0; k < kOfSlot; ++k) {
          const float own[] = {z[i][k].x, z[i][k].y, z[i][k].z, z[i][k].w};
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            if (own[r] != -infinity() && own[r] != top[i]) count(own[r], kEach);
          }
        }
      }
    }
    far = __reduce_add_sync(kAllLanes, far);
    if (lane_of_warp() == 0 && far > 0) atomicAdd(counts + kDigitBins - 1, far);
    // After the barrier in block_sum, the counts are complete.
    total = block_sum<kThreads>(total, reinterpret_cast<float*>(s_.counts[0]));
    // Each thread sums neighbouring bins. The first thread has the bins of columns with the least mass.
    constexpr int kOwnBins = kDigitBins / kThreads;
    const int last = kDigitBins - 1 - thread_of_block() * kOwnBins;
    Binned own = {};
#pragma unroll
    for (int k = 0; k < kOwnBins; ++k) add_bin(last - k, counts[last - k], &own);
    const Binned before = block_scan<kThreads>(own, reinterpret_cast<Binned*>(s_.counts[1]));
    const float goal = (1.0f - waiting.want.top_p) * total / ex2_approx(mul_rn(c_, largest) - m_);
    if (thread_of_block() == 0) columns() = margin() = 0.0f;
    if (thread_of_block() == kThreads - 1) all() = before.columns + own.columns;
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
        // The margin is five standard deviations of the estimated number of columns, plus a constant for sparse bins. A
        // bracket of at most 0.8 of the list leaves room for the deviation of the bracket's own number of columns.
        margin() = fminf(256.0f + 5.0f * sqrtf((kEach - 1) * sum.squares) / mass, 0.4f * static_cast<float>(capacity_));
        break;
      }
    }
    __syncthreads();
    const auto z_behind = [&](float columns, float* z) {  // sets *z: `columns` columns of the row lie below this z
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
    // Without an upper end of the bracket, the list holds all columns that the row may keep. Shared memory must have
    // room for them, and the list, too, if the estimate is four standard deviations too low.
    const float listed = all() - columns() + margin(), deviation = sqrtf((kEach - 1) * listed);
    const bool fits = listed <= static_cast<float>(Masks(&s_, map_).room()) &&
                      listed + 4.0f * deviation <= static_cast<float>(capacity_);
    if (chunk_.rows < kShortListRows || !fits) z_behind(columns() + margin(), &high());
  }
  static __device__ __forceinline__ float mass_of_bin(int bin) {
    return ex2_approx((static_cast<float>(bin) + 0.5f) * (-kMassRange / kDigitBins));
  }
  static __device__ __forceinline__ void add_bin(int bin, std::uint32_t columns, Binned* sum) {
    const float mass = mass_of_bin(bin), n = static_cast<float>(columns);
    *sum = *sum + Binned{n * mass, n * mass * mass, n};
  }

  // Ranks (integers that order columns by descending z, then by id) and masses of the columns in one bin. Both arrays
  // reuse the memory of the selection's counts.
  static constexpr std::uint32_t kFewInBin = kThreads;
  __device__ __forceinline__ std::uint64_t* bin_ranks() const {
    return reinterpret_cast<std::uint64_t*>(s_.base.counts);
  }
  __device__ __forceinline__ std::uint64_t* bin_masses() const { return bin_ranks() + kFewInBin; }
  static_assert(sizeof(SampleShared::counts) >= 16 * kFewInBin && offsetof(SampleShared, counts) % 8 == 0);

  static constexpr int kAtOnce =
      kThreads > kRowThreads ? 2 : 4;  // columns of the list that a thread processes together
  // Adds the masses of the list's columns to their bins. A thread adds the lower and upper halves of several columns'
  // masses at once.
  template <class Bin>
  __device__ __forceinline__ void add_to_bins(int size, Bin bin_of) const {
    batches_of_list<kAtOnce, kThreads>(
        list_, size, [&](const std::uint64_t(&rank)[kAtOnce], const bool(&has)[kAtOnce]) {
          std::uint32_t high[kAtOnce];
          std::uint32_t* to[kAtOnce];
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
            const float z = z_of_rank(rank[k]);
            const std::uint64_t mass = has[k] ? mass_of(z) : 0;
            const auto low = static_cast<std::uint32_t>(mass);
            to[k] = reinterpret_cast<std::uint32_t*>(s_.base.masses + bin_of(z));
            high[k] = static_cast<std::uint32_t>(mass >> 32) + (atomicAdd(to[k], low) > ~low ? 1 : 0);
          }
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
            if (high[k] != 0) atomicAdd(to[k] + 1, high[k]);
          }
        });
  }
  // Adds masses in the order of ranks, and stores in `found_prefix` the rank of the first column with which the sum
  // reaches the goal. Returns whether this column lies in the bracket and its bin fits shared memory. If `marks` is
  // true, the function also sets the mask bits of the listed columns up to this column for which `survives` returns
  // true.
  template <class Survives>
  __device__ __forceinline__ bool find_last(const Bracket& bracket, std::uint64_t goal, bool marks, const Masks& masks,
                                            Survives survives) {
    SampleShared& s = s_.base;
    if (bracket.above >= goal) return false;
    const float high = fminf(bracket.high, bracket.largest);
    const float low = fmaxf(bracket.low, bracket.largest - kMassRange / c_), scale = kDigitBins / (high - low);
    const auto bin_of = [&](float z) {
      const float x = mul_rn(sub_rn(high, z), scale);
      return x >= kDigitBins - 1 ? kDigitBins - 1 : x > 0.0f ? static_cast<int>(x) : 0;
    };
    const auto size_of_list = static_cast<int>(bracket.listed);
    for (int i = thread_of_block(); i < kDigitBins; i += kThreads) s.masses[i] = 0;
    if (thread_of_block() == 0) {
      s.found_count = 0;
      s.listed = 0;
    }
    __syncthreads();
    add_to_bins(size_of_list, bin_of);
    __syncthreads();
    // Each thread sums neighbouring bins.
    constexpr int kOwnBins = kDigitBins / kThreads;
    const int first_bin = thread_of_block() * kOwnBins;
    std::uint64_t own_mass = 0;
#pragma unroll
    for (int k = 0; k < kOwnBins; ++k) own_mass += s.masses[first_bin + k];
    std::uint64_t sum = block_scan<kThreads>(own_mass, s_.wide) + bracket.above;
    if (sum < goal && sum + own_mass >= goal) {
#pragma unroll 1
      for (int k = 0; k < kOwnBins; ++k) {
        const std::uint64_t mass = s.masses[first_bin + k];
        if (sum + mass >= goal) {
          s.found_prefix = static_cast<std::uint64_t>(first_bin + k);
          s.found_before = sum;
          s.found_count = 1;
          break;
        }
        sum += mass;
      }
    }
    __syncthreads();
    const std::uint64_t before = s.found_before;
    const int bin = static_cast<int>(s.found_prefix);
    if (s.found_count == 0) return false;
    if (marks) masks.clear();
    __syncthreads();
    batches_of_list<kAtOnce, kThreads>(list_, size_of_list,
                                       [&](const std::uint64_t(&rank)[kAtOnce], const bool(&has)[kAtOnce]) {
                                         LeafColumn column[kAtOnce];
                                         int own[kAtOnce];
#pragma unroll
                                         for (int k = 0; k < kAtOnce; ++k) {
                                           own[k] = has[k] ? bin_of(z_of_rank(rank[k])) : kDigitBins;
                                         }
                                         if (marks) {
#pragma unroll
                                           for (int k = 0; k < kAtOnce; ++k) column[k] = masks.column_of(rank[k]);
                                         }
#pragma unroll
                                         for (int k = 0; k < kAtOnce; ++k) {
                                           if (own[k] == bin) {
                                             const std::uint32_t at = Team().take(&s.listed);
                                             if (at < kFewInBin) bin_ranks()[at] = rank[k];
                                           } else if (marks && own[k] < bin && survives(z_of_rank(rank[k]))) {
                                             masks.add(column[k]);
                                           }
                                         }
                                       });
    __syncthreads();
    const std::uint32_t size = s.listed;
    if (size > kListColumns) return false;
    if (size > kFewInBin) {
      find_among_many(goal - before, bin, bin_of);
      if (!marks) return true;
      const std::uint64_t last = s.found_prefix;
      __syncthreads();
      masks.clear();
      __syncthreads();
      batches_of_list<1, kThreads>(list_, size_of_list, [&](const std::uint64_t(&rank)[1], const bool(&has)[1]) {
        if (has[0] && rank[0] <= last && survives(z_of_rank(rank[0]))) masks.add(masks.column_of(rank[0]));
      });
      __syncthreads();
      return true;
    }
    const bool has = thread_of_block() < static_cast<int>(size);
    const std::uint64_t own = has ? bin_ranks()[thread_of_block()] : kLastRank;
    const std::uint64_t mass = has ? mass_of(z_of_rank(own)) : 0;
    bin_masses()[thread_of_block()] = mass;
    __syncthreads();
    sum = before;
#pragma unroll 1
    for (std::uint32_t i = 0; i < size; ++i) sum += bin_ranks()[i] < own ? bin_masses()[i] : 0;
    if (has && sum < goal && sum + mass >= goal) s.found_prefix = own;
    if (marks && has && sum < goal && survives(z_of_rank(own))) masks.add(masks.column_of(own));
    __syncthreads();
    return true;
  }
  // Does the last step of `find_last` for a bin of many columns. A pass over the list first collects these columns.
  // `goal`: the mass that the bin's columns must reach.
  template <class Bin>
  __device__ __forceinline__ void find_among_many(std::uint64_t goal, int bin, Bin bin_of) {
    SampleShared& s = s_.base;
    __syncthreads();  // every thread has read the number of listed columns
    if (thread_of_block() == 0) s.listed = 0;
    __syncthreads();
    std::uint64_t mine = 0;
    batches_of_list<1, kThreads>(list_, static_cast<int>(bracket_.listed),
                                 [&](const std::uint64_t(&rank)[1], const bool(&has)[1]) {
                                   if (!has[0] || bin_of(z_of_rank(rank[0])) != bin) return;
                                   s.list[Team().take(&s.listed)] = rank[0];
                                   mine = max(mine, rank[0]);
                                 });
    const std::uint64_t most = this->reduce(mine, [](std::uint64_t a, std::uint64_t b) { return a > b ? a : b; });
    this->list_size_ = s.listed;
    this->listed_ = true;
    const std::uint64_t last = min(this->last_kept(kLastRank, goal, false), most);
    if (thread_of_block() == 0) s.found_prefix = last;
    __syncthreads();
  }

  FinishShared& s_;
  const SlotMap map_;
  const int num_slots_;
  float* const nodes_;
  Bracket& bracket_;
  const SampleChunk& chunk_;
  const std::int64_t i_;  // the row's number in the chunk
  const std::uint32_t capacity_;
  const std::uint64_t* const list_;
};

}  // namespace
}  // namespace rlk::cuda
