// attention's wgmma backward for more than 128 columns: its tiles, the warps that add dq, and the rows of a warpgroup. A
// job has 64 keys. Both warpgroups score all of them, each against half of a tile's queries. Then each sums half of the
// columns of dk, dv and dq.
#pragma once

#include "gradient_rows_sm90.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

// A tile of products: 64 queries of one head by 64 keys. kColumns: those of q and k. kValueColumns: those of v and dout.
template <int kColumns_, int kValueColumns_>
struct WideGradientTile {
  static constexpr int kColumns = kColumns_, kValueColumns = kValueColumns_;
  static constexpr int kQueries = 64, kKeys = 64, kStages = 2, kDoutStages = kValueColumns > 128 ? 1 : 2;
  static constexpr int kThreads = 3 * 128;
  static constexpr int kBoxes = kColumns / 64, kValueBoxes = kValueColumns / 64;
  static constexpr int kBox = 64 * 128, kQueryBox = kBox, kKeyBox = kBox;
  static constexpr int kQueryBytes = kBoxes * kBox, kKeyBytes = kQueryBytes;
  static constexpr int kDoutBytes = kValueBoxes * kBox, kValueBytes = kDoutBytes;
  static constexpr int kQueryColumns = kColumns / 2;
  static constexpr int kTileBytes = kQueries * kColumns * 4;  // a tile of dq in fp32
  static constexpr int kScalarBytes = kQueries * 4;
  static constexpr int kValuesAt = kKeyBytes, kQueriesAt = kValuesAt + kValueBytes;
  static constexpr int kDoutAt = kQueriesAt + kStages * kQueryBytes;
  static constexpr int kScoresAt = kDoutAt + kDoutStages * kDoutBytes;  // ds of two tiles, alternating
  static constexpr int kProbabilitiesAt = kScoresAt + 2 * kBox;         // p likewise
  static constexpr int kDqAt = kProbabilitiesAt + 2 * kBox;             // a part of dq
  // A warpgroup's dq has two parts: 64 columns, and the others.
  static constexpr int kOthers = kQueryColumns - 64;
  static constexpr int kFirstBytes = kQueries * 2 * 64 * 4, kOtherBytes = kQueries * 2 * kOthers * 4;
  static constexpr int kScalarsAt = kDqAt + kFirstBytes;
  static constexpr int kBarriersAt = kScalarsAt + kStages * 2 * kScalarBytes, kBarriers = 18;
  static constexpr int kWorkAt = kBarriersAt + kBarriers * 8;
  static constexpr int kBytes = kWorkAt + 2 * 64 + 1024;  // 1024 bytes align the start
  static_assert(kBytes <= 227 * 1024 && (kOthers == 32 || kOthers == 64));

  // As in GradientTile.
  static constexpr int kFours = kQueryColumns / 8;
  static __device__ __forceinline__ int four_at(int half, int four) {
    return four < 8 ? half * 8 + four : 16 + half * (kOthers / 8) + four - 8;
  }
  static __device__ __forceinline__ int column_of(int half, int four) {
    return four < 8 || kOthers == 64 ? half * 128 + four * 8 : 64 + half * 32 + (four - 8) * 8;
  }
};

// One of two warps that add the tiles' dq to the sums in memory, a part at a time. Each takes every other tile.
template <class Tile>
__device__ __forceinline__ void add_wide_gradients(const AttentionBackwardParams& p, const GradientCall& call,
                                                   const GradientShared<Tile>& shared, const GradientWork* works,
                                                   int parity) {
  RingPosition slot;
  int tiles = 0;
  if (!elect_one()) return;
  const bool ordered = *call.unordered == 0, wanted = p.dq != nullptr;
#pragma unroll 1
  for (;;) {
    mbarrier_wait_block(shared.work_full(slot.stage), slot.phase);
    const GradientWork& work = works[slot.stage];
    if (work.sequence < 0) return;
#pragma unroll 1
    for (int head = work.q_head; head < work.q_head + call.part_heads; ++head) {
      std::int64_t at = head * std::int64_t{call.slots} + work.slot;
#pragma unroll 1
      for (int tile = work.tile; tile < work.last_tile; tile += Tile::kQueries, ++at) {
        if ((tiles++ & 1) != parity) continue;
        const auto turn = static_cast<std::uint32_t>(first_contributor<Tile::kKeys>(p.causal, work.num_keys, tile) -
                                                     work.key / Tile::kKeys);
        float* sums = call.sums + at * (Tile::kQueries * Tile::kColumns);
        if (wanted && ordered && turn > 0) wait_for_turn(call.turns + at, turn);
        const std::uint64_t policy = l2_policy(work.key > 0);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          mbarrier_wait_block(shared.dq_full(parity), part);
          if (wanted) {
            float* to = sums + part * (Tile::kFirstBytes / 4);
            const int bytes = part == 0 ? Tile::kFirstBytes : Tile::kOtherBytes;
            if (turn == 0) {
              store_bytes(to, shared.dq(0), bytes, policy);
            } else {
              add_floats(to, shared.dq(0), bytes, policy);
            }
            wait_for_stored_boxes<0>();
          }
          mbarrier_arrive(shared.dq_empty(0));
        }
        if (!wanted) continue;
        wait_for_writes();
        end_turn(call.turns + at);
      }
    }
    mbarrier_arrive(shared.work_empty(slot.stage));
    slot.advance(2);
  }
}

// Sums of a warpgroup's half of kColumns columns: of 64 rows, in one or two products.
template <int kHalf>
struct HalfSums {
  float x[kHalf / 2];
};
template <>
struct HalfSums<96> {
  float x[32], others[16];
};

// A thread has two keys: 16 w + g and the one 8 behind, where w is its warp and g = lane / 4. For scores it has the
// queries 32 {warpgroup} + 8 j + 2 (lane % 4) and the next, for sums columns: x[4 j + 2 {row} + {column}].
template <class T, class Tile, Exp kExp>
class WideGradientRows {
 public:
  __device__ __forceinline__ WideGradientRows(const AttentionBackwardParams& p, const GradientCall& call,
                                              const GradientShared<Tile>& shared, int warpgroup)
      : p_(p), call_(call), shared_(shared), warpgroup_(warpgroup), c_(attention_scale(p.softmax_scale)) {
    thread_ = threadIdx.x % 128;
    row_ = thread_ / 32 * 16 + thread_ % 32 / 4;
  }

  __device__ __forceinline__ void run(const GradientWork& work) {
    const bool has_tiles = work.tile < work.last_tile;
    if (has_tiles && work.part > 0 && p_.dk != nullptr) {
      load_kept_sums(work);
    } else {
      each_four([](int, float4& x) { x = make_float4(0.0f, 0.0f, 0.0f, 0.0f); });
    }
    pin(dk_);  // computed here, not among products in flight
    pin(dv_);
    if (has_tiles) {
      mbarrier_wait_block(shared_.keys_full(), jobs_++ & 1);
      clear_keys(work);
      walk(work);
      release(shared_.keys_empty());
    }
    if (p_.dk == nullptr) return;
    if ((work.part + 1) * call_.part_heads < p_.num_q_heads / p_.num_kv_heads) {
      if (has_tiles) keep_sums(work);
    } else {
      store(work);
    }
  }

 private:
  static constexpr int kHalf = Tile::kColumns / 2, kValueHalf = Tile::kValueColumns / 2;
  static constexpr int kFours = kHalf / 8, kValueFours = kValueHalf / 8;

  template <int kCount>
  static __device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
  }
  template <int kColumns>
  static __device__ __forceinline__ void pin(HalfSums<kColumns>& sums) {
    pin(sums.x);
    if constexpr (kColumns == 96) pin(sums.others);
  }
  __device__ __forceinline__ void release(std::uint32_t barrier) const {
    if (thread_ % 32 == 0) mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ int stage() const { return tiles_ & 1; }
  __device__ __forceinline__ int phase() const { return tiles_ >> 1 & 1; }
  __device__ __forceinline__ int dout_stage() const { return Tile::kDoutStages == 1 ? 0 : stage(); }
  __device__ __forceinline__ int dout_phase() const { return Tile::kDoutStages == 1 ? stage() : phase(); }
  static __device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
  __device__ __forceinline__ std::uint32_t probabilities(int stage) const {
    return shared_.base + Tile::kProbabilitiesAt + stage * Tile::kBox;
  }

  __device__ __forceinline__ void walk(const GradientWork& work) {
    const int begin = tiles_, end = begin + (work.last_tile - work.tile) / Tile::kQueries * call_.part_heads;
    int tile = work.tile;
#pragma unroll 1
    while (tiles_ < end) {
      const int stage = same_in_warp(this->stage()), dout_stage = same_in_warp(this->dout_stage());
      mbarrier_wait_block(shared_.queries_full(stage), phase());
      if (tile < work.first || tile + Tile::kQueries > work.last) clear_queries(work, tile, stage, dout_stage);
      // The previous tile's second part of dq comes here, so that the parts are added half a tile apart. A job's first
      // tile computes one that is not used.
      float others[Tile::kOthers / 2];
      multiply_others(others, stage ^ 1);
      multiply<Tile::kBoxes>(shared_.keys(), shared_.queries(stage), s_);
      wgmma_wait<1>();
      pin(others);
      if (tiles_ > begin) store_dq<1>(others, stage ^ 1);
      mbarrier_wait_block(shared_.dout_full(dout_stage), dout_phase());
      multiply<Tile::kValueBoxes>(shared_.values(), shared_.dout(dout_stage), dp_);
      wgmma_wait<1>();
      pin(s_);
      exponentiate(work, tile, stage);
      store_weights(s_, probabilities(stage));
      fence_for_tma();
      meet();
      accumulate<kValueHalf>(dv_, probabilities(stage), shared_.dout(dout_stage));
      wgmma_wait<1>();
      pin(dp_);
      differentiate(dout_stage);
      store_weights(dp_, shared_.ds(stage));
      fence_for_tma();
      meet();
      multiply_dq<64>(dq_, shared_.ds(stage), shared_.keys() + warpgroup_ * 2 * Tile::kBox);
      accumulate<kHalf>(dk_, shared_.ds(stage), shared_.queries(stage));
      wgmma_wait<2>();
      release(shared_.dout_empty(dout_stage));
      wgmma_wait<1>();
      pin(dq_);
      store_dq<0>(dq_, stage);
      wgmma_wait<0>();
      release(shared_.queries_empty(stage));
      ++tiles_;
      tile = tile + Tile::kQueries < work.last_tile ? tile + Tile::kQueries : work.tile;
    }
    const int stage = same_in_warp(this->stage() ^ 1);
    float others[Tile::kOthers / 2];
    multiply_others(others, stage);
    wgmma_wait<0>();
    pin(others);
    store_dq<1>(others, stage);
    pin(dk_);
    pin(dv_);
  }
  // The offset, in an operand of kColumns columns, of the columns that follow a warpgroup's first 64.
  static __device__ __forceinline__ int others_at(int warpgroup) {
    return Tile::kOthers == 64 ? (warpgroup * 2 + 1) * Tile::kBox : Tile::kBox + warpgroup * 64;
  }

  // x = the 64 keys of `a` times the warpgroup's 32 queries, over all columns, from +0.
  template <int kBoxes>
  __device__ __forceinline__ void multiply(std::uint32_t keys, std::uint32_t queries, float (&x)[16]) const {
    const std::uint64_t a = tile_descriptor<false>(keys, 0);
    const std::uint64_t b = tile_descriptor<false>(queries + warpgroup_ * 32 * 128, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBoxes * 4; ++step) {
      const int at = step / 4 * (Tile::kBox >> 4) + step % 4 * static_cast<int>(kDescriptorStep<false>);
      wgmma<T, 32, false, false>(x, a + at, b + at, step > 0);
    }
    wgmma_commit();
  }
  // sums += weights times the 64 queries' rows, of which the warpgroup has half of the columns.
  template <int kColumns>
  __device__ __forceinline__ void accumulate(HalfSums<kColumns>& sums, std::uint32_t weights,
                                             std::uint32_t rows) const {
    constexpr int kFirst = kColumns == 96 ? 64 : kColumns;
    const std::uint64_t a = tile_descriptor<false>(weights, 0);
    const std::uint32_t first = rows + warpgroup_ * (kColumns == 64 ? 1 : 2) * Tile::kBox;
    const std::uint64_t b = tile_descriptor<true>(first, Tile::kBox);
    const std::uint64_t others = tile_descriptor<true>(rows + others_at(warpgroup_), Tile::kBox);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kQueries / 16; ++step) {
      wgmma<T, kFirst, false, true>(sums.x, a + step * kDescriptorStep<false>, b + step * kDescriptorStep<true>, 1);
      if constexpr (kColumns == 96) {
        wgmma<T, 32, false, true>(sums.others, a + step * kDescriptorStep<false>, others + step * kDescriptorStep<true>,
                                  1);
      }
    }
    wgmma_commit();
  }
  // x = ds of the tile times kColumns columns of the 64 keys, from +0.
  template <int kColumns>
  __device__ __forceinline__ void multiply_dq(float (&x)[kColumns / 2], std::uint32_t ds, std::uint32_t keys) const {
    const std::uint64_t a = tile_descriptor<true>(ds, Tile::kBox), b = tile_descriptor<true>(keys, Tile::kBox);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kKeys / 16; ++step) {
      wgmma<T, kColumns, true, true>(x, a + step * kDescriptorStep<true>, b + step * kDescriptorStep<true>, step > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void multiply_others(float (&x)[Tile::kOthers / 2], int stage) const {
    multiply_dq<Tile::kOthers>(x, shared_.ds(stage), shared_.keys() + others_at(warpgroup_));
  }

  static __device__ __forceinline__ float2 load_pair(std::uint32_t from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from));
    return x;
  }
  // Turns scores into probabilities.
  __device__ __forceinline__ void exponentiate(const GradientWork& work, int tile, int stage) {
    const int first_query = tile + warpgroup_ * 32, first = max(first_query, work.first);
    const bool all = work.key + Tile::kKeys <= work.num_keys && (!p_.causal || work.key + Tile::kKeys - 1 <= first) &&
                     (p_.window_size == 0 || first_query + 31 - work.key < p_.window_size);
    if (!all) hide(work, first_query);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 u = load_pair(shared_.u(stage) + (warpgroup_ * 32 + 8 * j + thread_ % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float t = fma_rn(s_[4 * j + i], c_, i % 2 == 0 ? -u.x : -u.y);
        s_[4 * j + i] = kExp == Exp::kHardware ? ex2_approx(t) : attention_probability<Machine>(t, kExp);
      }
    }
  }
  // Sets the scores of pairs that do not see one another to -Inf.
  __device__ __forceinline__ void hide(const GradientWork& work, int first_query) {
    const std::int64_t window = p_.window_size > 0 ? p_.window_size : std::int64_t{1} << 32;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int key = work.key + row_ + i / 2 % 2 * 8, n = first_query + i / 4 * 8 + thread_ % 4 * 2 + i % 2;
      const bool seen = key < work.num_keys && (!p_.causal || (key <= n && n - key < window));
      if (!seen) s_[i] = -infinity();
    }
  }
  // Turns dp into ds.
  __device__ __forceinline__ void differentiate(int dout_stage) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 delta = load_pair(shared_.delta(dout_stage) + (warpgroup_ * 32 + 8 * j + thread_ % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dp_[4 * j + i] = mul_rn(s_[4 * j + i], sub_rn(dp_[4 * j + i], i % 2 == 0 ? delta.x : delta.y));
      }
    }
  }
  // Rounds weights, and stores them as [keys][queries]: rows of 128 bytes with the 128-byte swizzle.
  __device__ __forceinline__ void store_weights(const float (&x)[16], std::uint32_t weights) const {
    const int lane = thread_ % 32, row = thread_ / 32 * 16 + lane % 16;
    const std::uint32_t to = weights + row * 128;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      std::uint32_t pairs[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int i = 4 * (2 * step + k / 2) + k % 2 * 2;
        pairs[k] = T::pack(x[i], x[i + 1]);
      }
      const std::uint32_t at = to + ((warpgroup_ * 4 + 2 * step + lane / 16) ^ (row & 7)) * 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(pairs[0]),
                   "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                   : "memory");
    }
  }
  // Hands a part of dq to the warp that adds it, in the order of the threads' sums.
  template <int kPart, int kCount>
  __device__ __forceinline__ void store_dq(const float (&x)[kCount], int stage) {
    mbarrier_wait_block(shared_.dq_empty(0), kPart ^ 1);  // two parts a tile, so a part's phase is its number
    const std::uint32_t to = shared_.dq(0) + (warpgroup_ * (kCount / 4) * 128 + thread_) * 16;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + j * 128 * 16), "f"(x[4 * j]),
                   "f"(x[4 * j + 1]), "f"(x[4 * j + 2]), "f"(x[4 * j + 3])
                   : "memory");
    }
    fence_for_tma();
    mbarrier_arrive(shared_.dq_full(stage));
  }

  // Clears rows [first, last) of 128 bytes in each box of an operand, by 256 threads.
  __device__ __forceinline__ void clear_rows(std::uint32_t operand, int boxes, int first, int last) const {
    const int chunks = (last - first) * 8;
    for (int i = warpgroup_ * 128 + thread_; i < chunks * boxes; i += 256) {
      const std::uint32_t to = operand + i / chunks * Tile::kBox + first * 128 + i % chunks * 16;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
  }
  // Sets keys past the sequence's last to +0, whatever they hold.
  __device__ __forceinline__ void clear_keys(const GradientWork& work) const {
    if (work.key + Tile::kKeys <= work.num_keys) return;
    clear_rows(shared_.keys(), Tile::kBoxes, work.num_keys - work.key, Tile::kKeys);
    clear_rows(shared_.values(), Tile::kValueBoxes, work.num_keys - work.key, Tile::kKeys);
    fence_for_tma();
    meet();
  }
  // Clears rows that are no queries in use, or see no key.
  __device__ __forceinline__ void clear_queries(const GradientWork& work, int tile, int stage, int dout_stage) const {
    mbarrier_wait_block(shared_.dout_full(dout_stage), dout_phase());
    const int first = min(max(work.first - tile, 0), Tile::kQueries);
    const int last = max(min(work.last - tile, Tile::kQueries), first);
    clear_rows(shared_.queries(stage), Tile::kBoxes, 0, first);
    clear_rows(shared_.queries(stage), Tile::kBoxes, last, Tile::kQueries);
    clear_rows(shared_.dout(dout_stage), Tile::kValueBoxes, 0, first);
    clear_rows(shared_.dout(dout_stage), Tile::kValueBoxes, last, Tile::kQueries);
    fence_for_tma();
    meet();
  }

  // Calls f with the number and the sums of each four of dk, then of dv.
  template <class F>
  __device__ __forceinline__ void each_four(F&& f) {
#pragma unroll
    for (int four = 0; four < kFours + kValueFours; ++four) {
      float* const x = of_four(four);
      float4 sums = make_float4(x[0], x[1], x[2], x[3]);
      f(four, sums);
      x[0] = sums.x, x[1] = sums.y, x[2] = sums.z, x[3] = sums.w;
    }
  }
  __device__ __forceinline__ float* of_four(int four) {
    if (four >= kFours) return dv_.x + (four - kFours) * 4;
    if constexpr (kHalf == 96) {
      if (four >= 8) return dk_.others + (four - 8) * 4;
    }
    return dk_.x + four * 4;
  }
  template <bool kIsKey>
  __device__ __forceinline__ void store_half(const GradientWork& work, float scale, void* to) {
    const std::int64_t sequence_token = p_.cu_seqlens_k != nullptr ? 0 : work.sequence * p_.k_tokens;
    const int columns = static_cast<int>(kIsKey ? p_.head_dim : p_.value_dim);
#pragma unroll
    for (int tile = 0; tile < (kIsKey ? kFours : kValueFours); tile += 4) {
      const int first = kIsKey ? Tile::column_of(warpgroup_, tile) : warpgroup_ * kValueHalf + tile * 8;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        std::uint32_t x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float* const sums = of_four((kIsKey ? 0 : kFours) + tile + k) + 2 * r;
          x[k] = T::pack(add_rn(mul_rn(sums[0], scale), 0.0f), add_rn(mul_rn(sums[1], scale), 0.0f));
        }
        exchange_in_quad(x);
        const int key = row_ + 8 * r, column = first + thread_ % 4 * 8;
        if (work.key + key < work.num_keys && column < columns) {
          auto* row = static_cast<typename T::Storage*>(to) +
                      ((sequence_token + work.k_token + key) * p_.num_kv_heads + work.kv_head) * columns;
          *reinterpret_cast<uint4*>(row + column) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    }
  }
  __device__ __forceinline__ void store(const GradientWork& work) {
    store_half<true>(work, p_.softmax_scale, p_.dk);
    store_half<false>(work, 1.0f, p_.dv);
  }

  // Between two jobs of a block of keys, memory holds dk and dv, four sums of each thread at a time.
  __device__ __forceinline__ float4* kept_sums(const GradientWork& work) const {
    return reinterpret_cast<float4*>(call_.kept) + std::int64_t{work.block} * ((kFours + kValueFours) * 256) +
           warpgroup_ * 128 + thread_;
  }
  __device__ __forceinline__ void load_kept_sums(const GradientWork& work) {
    wait_for_turn(call_.kept_turns + work.block, 8 * work.part);
    const float4* from = kept_sums(work);
    each_four([&](int four, float4& x) { x = __ldcg(from + four * 256); });
  }
  __device__ __forceinline__ void keep_sums(const GradientWork& work) {
    float4* to = kept_sums(work);
    each_four([&](int four, float4& x) { __stcg(to + four * 256, x); });
    __syncwarp();
    if (thread_ % 32 == 0) end_turn(call_.kept_turns + work.block);
  }

  const AttentionBackwardParams& p_;
  const GradientCall& call_;
  const GradientShared<Tile>& shared_;
  const int warpgroup_;
  const float c_;
  int thread_, row_;
  int jobs_ = 0, tiles_ = 0;  // jobs begun, tiles done
  float s_[16], dp_[16], dq_[32];
  HalfSums<kHalf> dk_;
  HalfSums<kValueHalf> dv_;
};

template <class T, class Tile, Exp kExp>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_wide_gradient_kernel(const __grid_constant__ AttentionBackwardParams p,
                                   const __grid_constant__ GradientCall call) {
  using Registers = RegisterShares<24, 240>;
  extern __shared__ unsigned char unaligned[];
  unsigned char* memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const GradientShared<Tile> shared{shared_address(memory)};
  auto* works = reinterpret_cast<GradientWork*>(memory + Tile::kWorkAt);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const int warpgroup = same_in_warp(threadIdx.x / 128) - 1;
  if (warpgroup < 0) {
    Registers::release();
    const int warp = same_in_warp(threadIdx.x / 32);
    if (warp == 0) load_gradient_work<Tile>(p, call, shared, works);
    if (warp == 1 || warp == 2) add_wide_gradients<Tile>(p, call, shared, works, warp - 1);
    return;
  }
  Registers::claim();
  WideGradientRows<T, Tile, kExp> rows(p, call, shared, warpgroup);
#pragma unroll 1
  for (int job = 0;; ++job) {
    mbarrier_wait_block(shared.work_full(job & 1), job >> 1 & 1);
    const GradientWork& work = works[job & 1];
    if (work.sequence < 0) break;
    rows.run(work);
    mbarrier_arrive(shared.work_empty(job & 1));  // every thread arrives after its read
  }
}

}  // namespace
}  // namespace rlk::cuda
