// What a warpgroup computes in attention's wgmma kernel: scores, probabilities, sums, and merges of splits.
#pragma once

#include "../common/wgmma_sm90.cuh"
#include "gpu.cuh"
#include "kernels/attention/row.h"
#include "kernels/attention/sinks.h"
#include "quad_rows.cuh"
#include "wgmma_totals_sm90.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// A warpgroup's 64 rows of a tile. A thread has row 16 w + g (r = 0) and row 16 w + g + 8 (r = 1), where w is its warp
// and g = lane / 4. s_[4 j + 2 r + c] is the score of row r and column (key) 8 j + 2 (lane % 4) + c, for c = 0 and 1.
// o_ has the sums over V in the same layout. Rule 6 of docs/numerics.md defines m (the reference), l and the merge.
template <class T, class Tile, Exp kExp>
class WgmmaRows : protected WgmmaTotals<Tile, kExp> {
 protected:
  using Totals = WgmmaTotals<Tile, kExp>;
  using Totals::fetch_totals;
  using Totals::fetched_;
  using Totals::has_total_;
  using Totals::kIsTight;
  using Totals::merge_outer_sums;
  using Totals::merge_sums;
  using Totals::merged;
  using Totals::o_;
  using Totals::of_split_;
  using Totals::of_total_;
  using Totals::total;
  using Totals::total_;
  using Totals::zero_sums;

 public:
  __device__ __forceinline__ WgmmaRows(const AttentionParams& p, const WgmmaShared<Tile>& shared, int warpgroup,
                                       const WgmmaCall* call = nullptr, float2* row_totals = nullptr)
      : Totals(call),
        p_(p),
        shared_(shared),
        warpgroup_(warpgroup),
        row_totals_(row_totals),
        c_(attention_scale(p.softmax_scale)) {
    thread_ = threadIdx.x % 128;
    first_row_ = warpgroup * 64 + thread_ / 32 * 16 + thread_ % 32 / 4;
    total_ = shared.base + Tile::kTotalAt + warpgroup * (Tile::kTotalBytes / Tile::kWarpgroups) + thread_ * 16;
  }

  // Computes a tile. Values that only the tile's end needs take no registers, since `shared_work` is in shared memory.
  __device__ __forceinline__ void run(const WgmmaWork& shared_work) {
    std::conditional_t<kIsLean, const WgmmaWork&, const WgmmaWork> work = shared_work;
    if constexpr (!kIsLean) find_keys(work);
    begin_split();
#pragma unroll
    for (int r = 0; r < 2; ++r) set_total(r, -infinity(), 0.0f);
    has_total_ = false;
    RowEnds ends;
    if constexpr (kPasses) {
      const KeyRange own = own_keys(work);
      const int begin = work.first_key / Tile::kKeys * Tile::kKeys;
      const int own_begin = own.empty() ? work.last_key : own.first / Tile::kKeys * Tile::kKeys;
      if (work.last_key > work.first_key) {
        mbarrier_wait_block(shared_.queries_full(), queries_phase_);
        queries_phase_ ^= 1;
      }
      pass(work, begin, own_begin);
      if (!own.empty()) {
        walk(work, shared_work, own, &ends);
        pass(work, (own.last + Tile::kKeys - 1) / Tile::kKeys * Tile::kKeys, work.last_key);
      } else {
        if (work.last_key > work.first_key) release(shared_.queries_empty());
        end_unused_rows(shared_work, &ends);
      }
    } else if (work.last_key > work.first_key) {
      walk(work, shared_work, {work.first_key, work.last_key}, &ends);
    } else {
      end_unused_rows(shared_work, &ends);
    }
    store(shared_work, ends);
  }

 protected:
  // If sums fill the registers, shared memory holds the totals of m and l, and each use of key ranges finds them again.
  static constexpr bool kIsLean = Tile::kIsLean;
  __device__ __forceinline__ void find_keys(const WgmmaWork& work) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = first_row_ + 8 * r, n = work.position + i;
      sees_first_[r] = sees_last_[r] = 0;
      if (i < work.queries) {
        sees_last_[r] = p_.causal ? max(n + 1, 0) : work.num_keys;
        if (p_.window_size > 0) {
          sees_first_[r] = static_cast<int>(clamp_to(n + 1 - p_.window_size, 0, sees_last_[r]));
        }
      }
    }
  }
  __device__ __forceinline__ float2* total_of_row(int r) const { return row_totals_ + first_row_ + 8 * r; }
  __device__ __forceinline__ void set_total(int r, float m, float l) {
    if constexpr (kIsLean) {
      __syncwarp();  // four lanes share a row
      *total_of_row(r) = make_float2(m, l);
    } else {
      m_total_[r] = m;
      l_total_[r] = l;
    }
  }
  __device__ __forceinline__ void load_total(int r) {
    if constexpr (kIsLean) {
      const float2 x = *total_of_row(r);
      m_total_[r] = x.x;
      l_total_[r] = x.y;
    }
  }

  // How a thread scales its two rows at the end of a tile.
  struct RowEnds {
    float inverse[2] = {1.0f, 1.0f}, factor[2] = {1.0f, 1.0f};  // `factor` comes from the sink; 1: no sink
    std::uint32_t used[2] = {0xffffffffu, 0xffffffffu};         // 0: the row becomes +0
  };

  static constexpr int kKeyTiles = Tile::kKeys / 8;  // s_ has this many groups of eight keys
  // Whether a warp rescales its two sets of eight rows (r = 0 and 1) separately, and skips a set whose references stay
  // the same. If not, it rescales all sums. kRescalesLate: the rescaling runs beside the next block's scores.
  static constexpr bool kRescalesByRow = kIsTight && Tile::kSums > 32;
  static constexpr bool kRescalesLate = kRescalesByRow && Tile::kWarpgroups > 2;
  // Whether a warpgroup skips blocks of keys that none of its rows sees.
  static constexpr bool kPasses = Tile::kWarpgroups > 2;
  // The position in the ring of the block before the next block of keys.
  __device__ __forceinline__ RingPosition before_block() const {
    if constexpr (!kIsTight) return before_at_;
    return {at_.stage ^ 1, at_.phase ^ at_.stage ^ 1};
  }
  static __device__ __forceinline__ void pin(float (&x)[Tile::kScores]) {
#pragma unroll
    for (int i = 0; i < Tile::kScores; ++i) asm volatile("" : "+f"(x[i])::"memory");
  }
  __device__ __forceinline__ void pin_sums() {
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) asm volatile("" : "+f"(o_[i])::"memory");
  }
  // Makes the compiler add up a row's probabilities here. If the compiler moved the additions to later, each addition
  // would wait for its exponential.
  __device__ __forceinline__ void pin_groups(int r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int k = 0; k < kKeyTiles / 4; ++k) asm volatile("" : "+f"(groups_[r][i][k]));
    }
  }
  __device__ __forceinline__ void release(std::uint32_t barrier) const {
    if (thread_ == 0) mbarrier_arrive(barrier);
  }
  // take_turn() waits until this warpgroup may use the matrix units, and give_turn() lets the next warpgroup use them.
  __device__ __forceinline__ void take_turn() const {
    asm volatile("bar.sync %0, 256;" ::"r"(2 + warpgroup_) : "memory");
  }
  __device__ __forceinline__ int next_turn() const {
    if constexpr (Tile::kWarpgroups == 2) return 3 - warpgroup_;
    return warpgroup_ == Tile::kWarpgroups - 1 ? 2 : 3 + warpgroup_;
  }
  __device__ __forceinline__ void give_turn() const {
    asm volatile("bar.arrive %0, 256;" ::"r"(next_turn()) : "memory");
  }

  // own_keys(): range of keys that the rows of this warpgroup see together. common_keys(): keys that each of them sees.
  struct KeyRange {
    int first, last;
    __device__ __forceinline__ bool empty() const { return last <= first; }
  };
  __device__ __forceinline__ KeyRange keys_of_row(const WgmmaWork& work, int i) const {
    if (!p_.causal) return {0, work.num_keys};
    const int last = max(work.position + i + 1, 0);
    return {p_.window_size > 0 ? static_cast<int>(clamp_to(last - p_.window_size, 0, last)) : 0, last};
  }
  __device__ __forceinline__ KeyRange own_keys(const WgmmaWork& work) const {
    const int first = warpgroup_ * 64, last = min(first + 64, work.queries) - 1;
    if (last < first) return {0, 0};
    return {keys_of_row(work, first).first, keys_of_row(work, last).last};
  }
  __device__ __forceinline__ KeyRange common_keys(const WgmmaWork& work) const {
    if constexpr (!kPasses) return {work.all_first, work.all_last};
    const int first = warpgroup_ * 64, last = min(first + 64, work.queries) - 1;
    return {keys_of_row(work, last).first, keys_of_row(work, first).last};
  }
  // Skips blocks that only other warpgroups need: gives each turn to the next warpgroup, and frees the blocks.
  __device__ __forceinline__ void pass(const WgmmaWork& work, int block, int end) {
#pragma unroll 1
    for (; block < end; block += Tile::kKeys) {
      mbarrier_wait_block(shared_.keys_full(at_.stage), at_.phase);
      take_turn();
      give_turn();
      release(shared_.keys_empty(at_.stage));
      mbarrier_wait_block(shared_.values_full(at_.stage), at_.phase);
      release(shared_.values_empty(at_.stage));
      at_.advance(Tile::kStages);
    }
  }

  // Processes the blocks of `keys`.
  __device__ __forceinline__ void walk(const WgmmaWork& work, const WgmmaWork& shared_work, const KeyRange& keys,
                                       RowEnds* ends) {
    int block = keys.first / Tile::kKeys * Tile::kKeys, split_end = work.split_end;
    if constexpr (kPasses) {
      if (block >= split_end) split_end = static_cast<int>(attention_split_end(block));
    } else {
      mbarrier_wait_block(shared_.queries_full(), queries_phase_);
      queries_phase_ ^= 1;
    }
    mbarrier_wait_block(shared_.keys_full(at_.stage), at_.phase);
    take_turn();
    multiply(at_.stage);
    give_turn();
    wgmma_wait<0>();
    pin(s_);
    release(shared_.keys_empty(at_.stage));
    if (block + Tile::kKeys >= keys.last) release(shared_.queries_empty());
    hide(work, block);
    raise();
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
      exponentiate(j);
      pack(j);
    }
    add_probabilities();
    if constexpr (kIsTight) zero_sums();
    late_ = make_float2(1.0f, 1.0f);
    before_at_ = at_;
    at_.advance(Tile::kStages);
    int keeps = kIsTight;  // 1: P V adds to o_; 0: P V overwrites o_
    block += Tile::kKeys;
    if (block < keys.last) mbarrier_wait_block(shared_.keys_full(at_.stage), at_.phase);
#pragma unroll 1
    for (;;) {
      if constexpr (kExp == Exp::kHardware) {  // the portable one would spill registers here
        const KeyRange all = common_keys(work);
        const int plain_end = block >= all.first ? min(split_end, min(all.last, keys.last)) : 0;
#pragma unroll 1
        for (; block + Tile::kKeys <= plain_end; block += Tile::kKeys) {
          step<true>(work, block, keys.last, keeps, split_end);
          keeps = 1;
        }
      }
      if (block >= (kIsLean && !kPasses ? work.last_key : keys.last)) break;
      keeps = step<false>(work, block, keys.last, keeps, split_end);
      block += Tile::kKeys;
    }
    const RingPosition before = before_block();
    if constexpr (kRescalesLate) rescale_rows(late_);
    mbarrier_wait_block(shared_.values_full(before.stage), before.phase);
    // Only the last block of a sequence has rows past the sequence's end.
    if (block > work.num_keys) clear_values(before.stage, work.num_keys - (block - Tile::kKeys));
    accumulate(before.stage, keeps);
    merge_rows();
    if constexpr (kIsTight) fetch_totals(Tile::kSharedFours);
    end_rows(shared_work, ends);
    wgmma_wait<0>();
    pin_sums();
    release(shared_.values_empty(before.stage));
  }

  // Computes a block's scores and probabilities, while P V of the previous block runs. kPlain: every row sees the whole
  // block, and no split begins. Returns 1 if the block's P V must add to the sums, and 0 if it must overwrite them.
  template <bool kPlain>
  __device__ __forceinline__ int step(const WgmmaWork& work, int block, int last_key, int keeps, int& split_end) {
    const bool begins = !kPlain && block >= split_end;
    take_turn();
    multiply(at_.stage);
    const RingPosition before = before_block();
    if constexpr (kRescalesLate) rescale_rows(late_);
    mbarrier_wait_block(shared_.values_full(before.stage), before.phase);  // scores are computed meanwhile
    accumulate(before.stage, keeps);
    give_turn();
    if (begins) {
      merge_rows();
      split_end = static_cast<int>(attention_split_end(block));
      begin_split();
    }
    wgmma_wait<1>();
    pin(s_);
    release(shared_.keys_empty(at_.stage));
    const bool has_next = block + Tile::kKeys < (kIsLean && !kPasses ? work.last_key : last_key);
    if (!has_next) release(shared_.queries_empty());
    if (!kPlain) hide(work, block);
    const int values_stage_before = before_at_.stage;
    before_at_ = at_;
    at_.advance(Tile::kStages);
    const int values_stage = kIsTight ? at_.stage : values_stage_before;
    // Whether the next keys have arrived. The result is used later, so no instruction waits for the test.
    const bool is_ready = !has_next || mbarrier_test_block(shared_.keys_full(at_.stage), at_.phase);
    // kAhead: the first row's exponentials come before the wait for P V, and the second row's exponentials come between
    // the multiplications that rescale sums. The second row's scores are scaled before the wait.
    constexpr bool kAhead = kExp == Exp::kHardware;
    // If rescaling has branches, the kernel is faster with both rows' exponentials after the wait.
    constexpr bool kFirstAhead = kAhead && !(kPlain && kRescalesByRow && !kRescalesLate);
    raise<kPlain>();
    float2 factors;
    if constexpr (kAhead) {
      if constexpr (kFirstAhead) {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) exponentiate(j, 0);
      }
      if constexpr (kScalesAhead) scale_second_row();
      if constexpr (kIsTight) {
        factors = rescale_chains();
        late_ = begins ? make_float2(1.0f, 1.0f) : factors;
        if constexpr (kFirstAhead) add_probabilities(0);
        asm volatile("// sums of a row" : "+f"(l_[0][0]), "+f"(l_[0][1]));
      } else {
        pin_groups(0);
      }
    }
    // The branch also keeps ptxas from moving the following wait before the code above.
    if (!is_ready) mbarrier_wait_block(shared_.keys_full(at_.stage), at_.phase);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    pin_sums();
    release(shared_.values_empty(values_stage));
    if (begins) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        if (j < Tile::kSharedFours) merge_sums(j);
        if (kIsLean) __syncwarp();  // else ptxas would group too many loads
        if (kAhead && j < kKeyTiles) exponentiate<kScalesAhead>(j, 1);
      }
      if constexpr (kIsTight) pack();  // frees the scores' registers for totals
      if constexpr (Tile::kOuterFours > 0) merge_outer_sums();
      has_total_ = true;
      if constexpr (kIsTight) {
        zero_sums();
      } else {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
          if (!kAhead) exponentiate(j);
          pack(j);
        }
      }
    } else {
      // Tiles with few sums rescale without a branch, since in most blocks the reference of some row rises.
      if (!kAhead || !kIsTight) factors = rescale_chains();
      if constexpr (kRescalesByRow && !kRescalesLate) rescale_rows(factors);
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        if (!kFirstAhead) exponentiate(j, 0);
        exponentiate<kScalesAhead>(j, 1);
        pack(j);
        if constexpr (!kRescalesByRow) rescale_sums<kKeyTiles>(factors, j);
      }
    }
    if (!kFirstAhead || !kIsTight) add_probabilities(0);
    add_probabilities(1);
    asm volatile("// sums of a block" : "+f"(l_[0][0]), "+f"(l_[0][1]), "+f"(l_[1][0]), "+f"(l_[1][1]));
    return kIsTight || !begins;
  }

  __device__ __forceinline__ void multiply(int stage_of_thread) {
    const int stage = same_in_warp(stage_of_thread);
    const std::uint64_t q = tile_descriptor<false>(shared_.queries() + warpgroup_ * 64 * 128, 0);
    const std::uint64_t k =
        tile_descriptor<false>(shared_.keys(0), 0) + static_cast<std::uint32_t>(stage * (Tile::kTileBytes >> 4));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kColumns / 16; ++step) {
      const int within = step % 4 * static_cast<int>(kDescriptorStep<false>);
      wgmma<T, Tile::kKeys, false, false>(s_, q + step / 4 * (Tile::kQueryBoxBytes >> 4) + within,
                                          k + step / 4 * (Tile::kBoxBytes >> 4) + within, step > 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void accumulate(int stage_of_thread, int keeps) {
    const int stage = same_in_warp(stage_of_thread);
    const std::uint64_t v = tile_descriptor<true>(shared_.values(0), Tile::kBoxBytes) +
                            static_cast<std::uint32_t>(stage * (Tile::kValueBytes >> 4));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kKeys / 16; ++step) {
      wgmma_registers<T, Tile::kValueColumns, true>(o_, weights_[step], v + step * kDescriptorStep<true>,
                                                    step > 0 ? 1 : keeps);
    }
    wgmma_commit();
  }

  // Sets the scores of keys that a row does not see to -Inf.
  __device__ __forceinline__ void hide(const WgmmaWork& work, int block) {
    const KeyRange all = common_keys(work);
    if (block >= all.first && block + Tile::kKeys <= all.last) return;
    if constexpr (kIsLean) find_keys(work);
    const int first_key = block + thread_ % 4 * 2;
    if (p_.window_size != 0) {
      const int first[2] = {sees_first_[0] - first_key, sees_first_[1] - first_key};
#pragma unroll
      for (int i = 0; i < Tile::kScores; ++i) {
        if (i / 4 * 8 + i % 2 < first[i / 2 % 2]) s_[i] = -infinity();
      }
    }
    const int last[2] = {sees_last_[0] - first_key, sees_last_[1] - first_key};
#pragma unroll
    for (int i = 0; i < Tile::kScores; ++i) {
      if (i / 4 * 8 + i % 2 >= last[i / 2 % 2]) s_[i] = -infinity();
    }
  }

  // Returns a thread's largest score of row r, by four independent chains of comparisons.
  __device__ __forceinline__ float largest(int r) const {
    float chains[4] = {s_[2 * r], s_[2 * r + 1], s_[4 + 2 * r], s_[4 + 2 * r + 1]};
#pragma unroll
    for (int j = 2; j < kKeyTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        chains[j % 2 * 2 + i] = max_nan(chains[j % 2 * 2 + i], s_[4 * j + 2 * r + i]);
      }
    }
    return max_nan(max_nan(chains[0], chains[1]), max_nan(chains[2], chains[3]));
  }
  // Returns the larger of +0 and a thread's largest score of row r. The bits of fp32 numbers from +0 on, and of the
  // matrix unit's NaN, compare as integers. An instruction compares three integers, but only two fp32 numbers.
  __device__ __forceinline__ float largest_from_zero(int r) const {
    int chains[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
      int& x = chains[j % 4];
      x = max(max(x, __float_as_int(s_[4 * j + 2 * r])), __float_as_int(s_[4 * j + 2 * r + 1]));
    }
    return __int_as_float(max(max(max(chains[0], chains[1]), chains[2]), chains[3]));
  }
  // Updates a row's reference by the block's largest score; `top` is the largest in this thread. m_ becomes the new
  // reference, and before_ the previous one.
  __device__ __forceinline__ void raise(int r, float top) {
    before_[r] = m_[r];
    // Four lanes share the row. Three independent shuffles take less time than two in turn.
    const float second = AttentionGpu::shuffle_xor(top, 1), third = AttentionGpu::shuffle_xor(top, 2);
    top = max_nan(max_nan(top, second), max_nan(third, AttentionGpu::shuffle_xor(top, 3)));
    // Rounds up to an integer, exactly below kStatsRange. If m_ is larger, the row becomes NaN at the split's end.
    const float ceiled = sub_rn(__fadd_ru(mul_rn(c_, top), kStatsShift), kStatsShift);
    m_[r] = max_nan(m_[r], ceiled <= -kStatsRange ? -infinity() : ceiled);
    if constexpr (kExp == Exp::kHardware) {
      addend_[r] = m_[r] == -infinity() ? -kStatsRange : -m_[r];
    } else {
      q_[r] = leaf_clamp(c_, m_[r]);
      addend_[r] = sub_rn(kStatsShift, m_[r]);
    }
  }
  // kPlain: if no reference of the warp is below 0, negative scores do not matter, and largest_from_zero() suffices.
  template <bool kPlain = false>
  __device__ __forceinline__ void raise() {
    float top[2];
    if (kPlain && __all_sync(~0u, m_[0] >= 0.0f && m_[1] >= 0.0f)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) top[r] = largest_from_zero(r);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) top[r] = largest(r);
    }
    raise(0, top[0]);
    raise(1, top[1]);
  }
  // Returns attention_factor(before, m) without a branch. The factor is 0 if m is NaN, or if `before` is -Inf.
  static __device__ __forceinline__ float factor_of(float before, float m) {
    const float e = fmaxf(sub_rn(before, m), -127.0f);
    return __int_as_float(__float_as_int(add_rn(e, kStatsShift + 127.0f)) << 23);
  }
  // Multiplies the partial sums of l by the rows' factors. Returns these factors, since the sums of P V need them, too.
  __device__ __forceinline__ float2 rescale_chains() {
    const float2 factors = make_float2(factor_of(before_[0], m_[0]), factor_of(before_[1], m_[1]));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      l_[0][i] = mul_rn(l_[0][i], factors.x);
      l_[1][i] = mul_rn(l_[1][i], factors.y);
    }
    return factors;
  }
  __device__ __forceinline__ void rescale_rows(const float2& factors) {
    if (!__all_sync(~0u, factors.x == 1.0f)) rescale_row(0, factors.x);
    if (!__all_sync(~0u, factors.y == 1.0f)) rescale_row(1, factors.y);
  }
  __device__ __forceinline__ void rescale_row(int r, float factor) {
#pragma unroll
    for (int i = 2 * r; i < Tile::kSums; i += 4) {
      o_[i] = mul_rn(o_[i], factor);
      o_[i + 1] = mul_rn(o_[i + 1], factor);
    }
  }
  // Rescales one of kParts equal parts of the sums.
  template <int kParts>
  __device__ __forceinline__ void rescale_sums(const float2& factors, int part) {
    constexpr int kEach = (Tile::kSums + kParts - 1) / kParts;
#pragma unroll
    for (int i = part * kEach; i < (part + 1) * kEach; ++i) {
      if (i < Tile::kSums) o_[i] = mul_rn(o_[i], i / 2 % 2 == 0 ? factors.x : factors.y);
    }
  }

  // Turns scores of keys 8 j ... 8 j + 7 into probabilities.
  __device__ __forceinline__ void exponentiate(int j) {
    exponentiate(j, 0);
    exponentiate(j, 1);
  }
  // kIsScaled: s_ already holds fma(score, c, -m).
  template <bool kIsScaled = false>
  __device__ __forceinline__ void exponentiate(int j, int r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& z = s_[4 * j + 2 * r + i];
      if constexpr (kExp == Exp::kHardware) {
        z = ex2_approx(kIsScaled ? z : fma_rn(z, c_, addend_[r]));
      } else {
        const float w = stat_exp_portable(z > q_[r] ? z : q_[r], c_, addend_[r]);
        z = is_nan(m_[r]) ? canonical_nan() : z == -infinity() || m_[r] == -infinity() ? 0.0f : w;
      }
      groups_[r][i][j / 4] = j % 4 == 0 ? z : add_rn(groups_[r][i][j / 4], z);
    }
  }
  static constexpr bool kScalesAhead = kExp == Exp::kHardware && (!kIsLean || kRescalesLate);
  __device__ __forceinline__ void scale_second_row() {
#pragma unroll
    for (int i = 0; i < Tile::kScores; ++i) {
      if (i / 2 % 2 == 0) continue;
      s_[i] = fma_rn(s_[i], c_, addend_[1]);
      asm volatile("" : "+f"(s_[i]));  // keeps the fma before the wait
    }
  }
  __device__ __forceinline__ void pack(int j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) weights_[j / 2][j % 2 * 2 + r] = T::pack(s_[4 * j + 2 * r], s_[4 * j + 2 * r + 1]);
  }
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) pack(j);
  }
  __device__ __forceinline__ void add_probabilities() {
    add_probabilities(0);
    add_probabilities(1);
  }
  __device__ __forceinline__ void add_probabilities(int r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto& g = groups_[r][i];
      float sum = add_rn(g[0], g[1]);
      if constexpr (kKeyTiles == 16) sum = add_rn(sum, add_rn(g[2], g[3]));
      l_[r][i] = add_rn(l_[r][i], sum);
    }
  }

  __device__ __forceinline__ void begin_split() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m_[r] = -infinity();
      l_[r][0] = l_[r][1] = 0.0f;
    }
  }
  // Merges m and l of the split that ends into the totals, while the split's last products run. merge_sums() uses the
  // factors. AttentionMerge has the formula with branches. Here an empty split or total has sums of 0 and the factor 0.
  __device__ __forceinline__ void merge_rows() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float l = add_rn(l_[r][0], l_[r][1]);
      l = add_rn(l, AttentionGpu::shuffle_xor(l, 1));
      l = add_rn(l, AttentionGpu::shuffle_xor(l, 2));
      load_total(r);
      const float of_split = m_[r] >= kStatsRange ? canonical_nan() : m_[r], m = max_nan(m_total_[r], of_split);
      of_total_[r] = factor_of(m_total_[r], m);
      of_split_[r] = factor_of(of_split, m);
      set_total(r, m, fma_rn(l_total_[r], of_total_[r], mul_rn(l, of_split_[r])));
    }
  }
  // Sets rows of V from `first` on to +0. If a warpgroup may skip the block, each warpgroup sets all these rows itself.
  __device__ __forceinline__ void clear_values(int stage, int first) const {
    constexpr int kChunks = Tile::kValueBoxes * 8, kThreads = kPasses ? 128 : Tile::kRowThreads;
    const int thread = kPasses ? thread_ : warpgroup_ * 128 + thread_;
    for (int i = thread + first * kChunks; i < Tile::kKeys * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const std::uint32_t to = shared_.values(stage) + chunk / 8 * Tile::kBoxBytes + row * 128 + chunk % 8 * 16;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
    fence_for_tma();
    const int barrier = kPasses ? 2 + Tile::kWarpgroups + warpgroup_ : 1;
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
  }

  // Padded tiles are for narrower heads. Columns beyond value_dim are not stored.
  __device__ __forceinline__ std::int64_t value_dim() const {
    return Tile::kIsPadded ? p_.value_dim : Tile::kValueColumns;
  }
  // Merges the head's sink into m and l of the rows. factor: factors of the rows' sums. used: 0 if only the sink
  // contributed. O * `factor` differs from the contract's fma(O, factor, +0) only in a zero's sign, which `out` does
  // not keep.
  __device__ __forceinline__ void merge_sinks(const WgmmaWork& work, float (&factor)[2], std::uint32_t (&used)[2]) {
    const AttentionSink sink = attention_sink<AttentionGpu>(p_, work.head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const AttentionMerge merge = sink.into(&m_total_[r], &l_total_[r]);
      factor[r] = merge.factor;
      if (merge.only_split && sink.m > -infinity()) used[r] = 0u;
    }
  }
  static __device__ __forceinline__ std::uint32_t packed(float a, float b, float inverse) {
    return T::pack(attention_output(a, inverse), attention_output(b, inverse));
  }
  // Stores lse and sets `ends`, while the last products run. Four lanes share two rows; each lane computes one row's
  // lse.
  __device__ __forceinline__ void end_rows(const WgmmaWork& work, RowEnds* ends) {
    if constexpr (kIsLean) find_keys(work);
#pragma unroll
    for (int r = 0; r < 2; ++r) load_total(r);
    if (p_.sinks != nullptr) merge_sinks(work, ends->factor, ends->used);
    const bool is_second = thread_ % 2 != 0;
    const float m = is_second ? m_total_[1] : m_total_[0], l = is_second ? l_total_[1] : l_total_[0];
    const bool is_used = (is_second ? sees_last_[1] : sees_last_[0]) != 0, fails = attention_fails(m, is_used);
    const float inverse = fails ? canonical_nan() : div_rn(1.0f, is_used ? l : 1.0f);
    const int row = first_row_ + (is_second ? 8 : 0);
    if (p_.lse != nullptr && thread_ % 4 < 2 && row < work.places) {
      p_.lse[work.lse + row] = fails ? canonical_nan() : is_used ? attention_lse(m, l) : -infinity();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      ends->inverse[r] = __shfl_sync(~0u, inverse, r, 4);
      if (sees_last_[r] == 0) ends->used[r] = 0u;
    }
  }
  // Stores lse and sets `ends` for a tile whose rows see no key.
  __device__ __forceinline__ void end_unused_rows(const WgmmaWork& work, RowEnds* ends) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      ends->used[r] = 0u;
      const int row = first_row_ + 8 * r;
      if (p_.lse != nullptr && thread_ % 4 == 0 && row < work.places) p_.lse[work.lse + row] = -infinity();
    }
  }
  __device__ __forceinline__ void store(const WgmmaWork& work, const RowEnds& ends) {
    bool exists[2];  // whether the thread's rows lie in this sequence
#pragma unroll
    for (int r = 0; r < 2; ++r) exists[r] = first_row_ + 8 * r < work.places;
    constexpr int kAtOnce = Totals::kFetched;
    const std::int64_t stride = p_.num_q_heads * value_dim();
    auto* to = reinterpret_cast<uint4*>(static_cast<typename T::Storage*>(p_.out) + work.out + first_row_ * stride +
                                        thread_ % 4 * 8);
    const auto to_next = static_cast<std::uint32_t>(stride);  // from row r = 0 to row r = 1
    if constexpr (!kIsTight) fetch_totals(Tile::kSharedFours);
#pragma unroll
    for (int first = 0; first < Tile::kSums / 4; first += kAtOnce) {
      float4 before[kAtOnce];
      const bool is_outer = first >= Tile::kSharedFours;
      if (is_outer) {  // loads the next totals early
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) before[j] = fetched_[j];
        fetch_totals(first + kAtOnce);
      }
#pragma unroll
      for (int tile = first; tile < first + kAtOnce; tile += 4) {
        std::uint32_t pairs[2][4];
        float4 x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          x[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (tile + k >= Tile::kSums / 4) continue;
          x[k] = merged(tile + k, is_outer ? before[tile - first + k] : total(tile + k));
        }
        if (p_.sinks != nullptr) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            x[k].x = mul_rn(x[k].x, ends.factor[0]);
            x[k].y = mul_rn(x[k].y, ends.factor[0]);
            x[k].z = mul_rn(x[k].z, ends.factor[1]);
            x[k].w = mul_rn(x[k].w, ends.factor[1]);
          }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          pairs[0][k] = ends.used[0] & packed(x[k].x, x[k].y, ends.inverse[0]);
          pairs[1][k] = ends.used[1] & packed(x[k].z, x[k].w, ends.inverse[1]);
        }
        const bool is_stored = !Tile::kIsPadded || (tile + thread_ % 4) * 8 < value_dim();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          exchange_in_quad(pairs[r]);
          if (exists[r] && is_stored) {
            to[tile + r * to_next] = make_uint4(pairs[r][0], pairs[r][1], pairs[r][2], pairs[r][3]);
          }
        }
      }
    }
  }

  const AttentionParams& p_;
  const WgmmaShared<Tile>& shared_;
  const int warpgroup_;
  float2* const row_totals_;  // kIsLean: the totals of m and l of each row
  const float c_;
  int thread_, first_row_;
  RingPosition at_, before_at_;  // positions in the ring: next block of keys, and the block before it
  int queries_phase_ = 0;
  int sees_first_[2], sees_last_[2];
  float m_[2], before_[2], addend_[2], q_[2], l_[2][2], groups_[2][2][kKeyTiles / 4];
  float2 late_;  // kRescalesLate: factors of the rescaling that is still to be done
  float m_total_[2], l_total_[2];
  float s_[Tile::kScores];
  std::uint32_t weights_[Tile::kKeys / 16][4];
};

}  // namespace
}  // namespace rlk::cuda
