// What a warpgroup computes in attention's wgmma backward. Its rows are 64 keys of a block; it computes their scores
// with tiles of 64 queries. The warpgroup keeps dk and dv of these keys in registers, and computes a share of the
// columns of each tile's dq.
#pragma once

#include "../../common/mma_sm80.cuh"
#include "steps_sm90.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// A thread has two keys, 16 w + g and 16 w + g + 8, where w is its warp and g = lane / 4. An array x of its scores or
// sums holds x[4 j + 2 r + c] for key r (0 or 1). Scores: of query 8 j + 2 (lane % 4) + c. Sums: of the column with
// this number.
template <class T, class Tile, Exp kExp, class Params>
class GradientRows : GradientSteps {
 public:
  __device__ __forceinline__ GradientRows(const Params& p, const GradientCallOf<Params>& call,
                                          const GradientShared<Tile>& shared, int warpgroup)
      : p_(p), call_(call), shared_(shared), warpgroup_(warpgroup), c_(attention_scale(p.softmax_scale)) {
    thread_ = threadIdx.x % 128;
    row_ = warpgroup * 64 + thread_ / 32 * 16 + thread_ % 32 / 4;
  }

  __device__ __forceinline__ void run(const GradientWork& work) {
    const bool has_tiles = work.tile < work.last_tile;
    if (kMayBranch<Params> && has_tiles) begin(work);  // before dk and dv are set, since begin() needs their registers
    if (!kMayBranch<Params> && has_tiles && work.part > 0 && p_.dk != nullptr) {
      load_kept_sums(work);
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i) dk_[i] = dv_[i] = 0.0f;
    }
    pin(dk_);  // so the compiler sets the sums here, not while products are in flight
    pin(dv_);
    if (has_tiles) {
      if (!kMayBranch<Params>) begin(work);
      walk(work);
      release(shared_.keys_empty());
    }
    if (p_.dk == nullptr) return;
    if constexpr (kMayBranch<Params>) {
      add_in_turn(work);
    } else if ((work.part + 1) * call_.part_heads < p_.num_q_heads / p_.num_kv_heads) {
      if (has_tiles) keep_sums(work);
    } else {
      store(work, dk_, p_.softmax_scale, p_.dk, Tile::columns(p_));
      store(work, dv_, 1.0f, p_.dv, Tile::kIsPadded ? static_cast<int>(p_.value_dim) : Tile::kColumns);
    }
  }

 private:
  __device__ __forceinline__ void begin(const GradientWork& work) {
    mbarrier_wait_block(shared_.keys_full(), jobs_++ & 1);
    clear_keys(work);
  }
  __device__ __forceinline__ void release(std::uint32_t barrier) const {
    if (thread_ % 32 == 0) mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ int stage() const { return tiles_ & 1; }
  __device__ __forceinline__ int phase() const { return tiles_ >> 1 & 1; }
  static_assert(Tile::kStages == 2);

  __device__ __forceinline__ void walk(const GradientWork& work) {
    const int end = tiles_ + (work.last_tile - work.tile) / Tile::kQueries * call_.part_heads;
    int tile = work.tile;
#pragma unroll 1
    while (tiles_ < end) {
      const int stage = same_in_warp(this->stage());
      mbarrier_wait_block(shared_.queries_full(stage), phase());
      if (tile < work.first || tile + Tile::kQueries > work.last) clear_queries(work, tile, stage);
      score(shared_.keys(), shared_.queries(stage), s_);
      mbarrier_wait_block(shared_.dout_full(stage), phase());
      score(shared_.values(), shared_.dout(stage), dp_);
      wgmma_wait<1>();
      pin(s_);
      exponentiate(work, tile, stage);
      accumulate<T, Tile::kQueryBox, true>(p_of_, shared_.dout(stage), 0, dv_);
      wgmma_wait<1>();
      pin(dp_);
      differentiate(stage);
      store_ds();
      fence_for_tma();
      meet();
      multiply_dq();
      accumulate<T, Tile::kQueryBox, true>(ds_of_, shared_.queries(stage), 0, dk_);
      wgmma_wait<1>();
      pin(dq_);
      release(shared_.dout_empty(stage));
      store_dq(stage);
      ++tiles_;
      wgmma_wait<0>();
      release(shared_.queries_empty(stage));
      tile = tile + Tile::kQueries < work.last_tile ? tile + Tile::kQueries : work.tile;
    }
    pin(dk_);
    pin(dv_);
  }

  // Computes x = the warpgroup's 64 keys times 64 queries, over all columns, from +0.
  __device__ __forceinline__ void score(std::uint32_t keys, std::uint32_t queries, float (&x)[32]) const {
    multiply<T, Tile::kColumns, Tile::kKeyBox, Tile::kQueryBox>(keys + warpgroup_ * 64 * 128, queries, x);
  }
  // Computes the warpgroup's columns of dq for this tile and block of keys.
  __device__ __forceinline__ void multiply_dq() {
    constexpr int kHalf = Tile::kBoxes == 2 ? Tile::kKeyBox : Tile::kQueryColumns * 2;
    const std::uint64_t a = tile_descriptor<true>(shared_.ds(same_in_warp(stage())), Tile::kKeyBox);
    const std::uint64_t b = tile_descriptor<true>(shared_.keys() + warpgroup_ * kHalf, Tile::kKeyBox);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kKeys / 16; ++step) {
      wgmma<T, Tile::kQueryColumns, true, true>(dq_, a + step * kDescriptorStep<true>, b + step * kDescriptorStep<true>,
                                                step > 0);
    }
    wgmma_commit();
  }

  // Turns the scores in s_ into probabilities. p_of_ gets the rounded probabilities as A operands, in steps of 16
  // queries.
  __device__ __forceinline__ void exponentiate(const GradientWork& work, int tile, int stage) {
    const int first_key = work.key + warpgroup_ * 64, first = max(tile, work.first);
    const bool all = first_key + 64 <= work.num_keys && (!p_.causal || first_key + 63 <= first) &&
                     (p_.window_size == 0 || tile + 63 - first_key < p_.window_size);
    if (!all) hide(work, tile);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 u = load_pair(shared_.u(stage) + (8 * j + thread_ % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float t = fma_rn(s_[4 * j + i], c_, i % 2 == 0 ? -u.x : -u.y);
        s_[4 * j + i] = probability<kExp>(t);
      }
    }
    pack<T>(s_, p_of_);
  }
  // Sets a score to -Inf if a mask hides its key from its query.
  __device__ __forceinline__ void hide(const GradientWork& work, int tile) {
    GradientSteps::hide(
        p_, work.num_keys, [&](int i) { return work.key + row_ + i / 2 % 2 * 8; },
        [&](int i) { return tile + i / 4 * 8 + thread_ % 4 * 2 + i % 2; }, s_);
  }
  // Turns dp into ds.
  __device__ __forceinline__ void differentiate(int stage) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 delta = load_pair(shared_.delta(stage) + (8 * j + thread_ % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dp_[4 * j + i] = mul_rn(s_[4 * j + i], sub_rn(dp_[4 * j + i], i % 2 == 0 ? delta.x : delta.y));
      }
    }
    pack<T>(dp_, ds_of_);
  }

  // Stores ds for the products of dq as [keys][queries], in rows of 128 bytes with the 128-byte swizzle.
  __device__ __forceinline__ void store_ds() const {
    store_weights(ds_of_, shared_.ds(stage()), thread_ % 32, warpgroup_ * 64 + thread_ / 32 * 16, 0);
  }
  // Stores dq in shared memory for the warp that adds it to the sums in global memory. Four sums of each thread lie
  // beside four sums of the next thread.
  __device__ __forceinline__ void store_dq(int stage) {
    mbarrier_wait_block(shared_.dq_empty(stage), phase() ^ 1);
    constexpr int kFours = Tile::kQueryColumns / 8;
    const std::uint32_t to = shared_.dq(stage) + (warpgroup_ * kFours * 128 + thread_) * 16;
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      if (Tile::kIsPadded && Tile::column_of(warpgroup_, j) >= Tile::columns(p_)) break;
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + j * 128 * 16), "f"(dq_[4 * j]),
                   "f"(dq_[4 * j + 1]), "f"(dq_[4 * j + 2]), "f"(dq_[4 * j + 3])
                   : "memory");
    }
    fence_for_tma();
    mbarrier_arrive(shared_.dq_full(stage));
  }

  // Clears rows [first, last) of 128 bytes in each box of a tile, by 256 threads.
  __device__ __forceinline__ void clear_rows(std::uint32_t tile, int box_bytes, int first, int last) const {
    const int chunks = (last - first) * 8;
    for (int i = warpgroup_ * 128 + thread_; i < chunks * Tile::kBoxes; i += 256) {
      const std::uint32_t to = tile + i / chunks * box_bytes + first * 128 + i % chunks * 16;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
  }
  // Sets keys and values past the sequence's last key to +0, since TMA may have loaded NaN there.
  __device__ __forceinline__ void clear_keys(const GradientWork& work) const {
    if constexpr (kMayBranch<Params>) {
      if (work.k_token < 0) return gather_keys(work);
    }
    if (work.key + Tile::kKeys <= work.num_keys) return;
    clear_rows(shared_.keys(), Tile::kKeyBox, work.num_keys - work.key, Tile::kKeys);
    clear_rows(shared_.values(), Tile::kKeyBox, work.num_keys - work.key, Tile::kKeys);
    fence_for_tma();
    meet();
  }
  // Copies the keys and values of a block whose tokens are not consecutive. Keys and values without a token become +0.
  __device__ __forceinline__ void gather_keys(const GradientWork& work) const {
    constexpr int kChunks = Tile::kColumns / 8;
    using Element = typename T::Storage;
    const auto* k = static_cast<const Element*>(p_.k.data) + work.kv_head * p_.k.head_stride;
    const auto* v = static_cast<const Element*>(p_.v.data) + work.kv_head * p_.v.head_stride;
#pragma unroll 1  // unrolled, the loop would spill registers
    for (int i = warpgroup_ * 128 + thread_; i < Tile::kKeys * kChunks; i += 256) {
      const int row = i / kChunks, chunk = i % kChunks;
      const std::int32_t token = rows_of(work)[row].token;
      auto of_key = AttentionGpu::fill_vec8<T>(false), of_value = of_key;
      if (token >= 0) {
        of_key = AttentionGpu::load_vec8<T>(k + token * p_.k.token_stride + chunk * 8, true);
        of_value = AttentionGpu::load_vec8<T>(v + token * p_.v.token_stride + chunk * 8, true);
      }
      const std::uint32_t at = chunk / 8 * Tile::kKeyBox + row * 128 + ((chunk ^ row) & 7) * 16;
      store_shared_16(shared_.keys() + at, of_key.v[0].v);
      store_shared_16(shared_.values() + at, of_value.v[0].v);
    }
    fence_for_tma();
    meet();
  }
  __device__ __forceinline__ const GradientRow* rows_of(const GradientWork& work) const {
    return call_.rows + std::int64_t{work.block} * Tile::kKeys;
  }

  // Clears the rows of q and dout that have no query in use or see no key.
  __device__ __forceinline__ void clear_queries(const GradientWork& work, int tile, int stage) const {
    mbarrier_wait_block(shared_.dout_full(stage), phase());
    const int first = min(max(work.first - tile, 0), Tile::kQueries);
    const int last = max(min(work.last - tile, Tile::kQueries), first);
    clear_rows(shared_.queries(stage), Tile::kQueryBox, 0, first);
    clear_rows(shared_.queries(stage), Tile::kQueryBox, last, Tile::kQueries);
    clear_rows(shared_.dout(stage), Tile::kQueryBox, 0, first);
    clear_rows(shared_.dout(stage), Tile::kQueryBox, last, Tile::kQueries);
    fence_for_tma();
    meet();
  }

  // Scales, rounds and stores dk or dv, whose heads have `columns` columns.
  __device__ __forceinline__ void store(const GradientWork& work, float (&sums)[Tile::kSums], float scale, void* to,
                                        int columns) {
    const std::int64_t sequence_token = p_.cu_seqlens_k != nullptr ? 0 : work.sequence * p_.k_tokens;
#pragma unroll
    for (int tile = 0; tile < Tile::kSums / 4; tile += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 x = rounded<T, Tile::kSums>(sums, tile, r, scale);
        const int key = row_ + 8 * r, column = (tile + thread_ % 4) * 8;
        if (work.key + key < work.num_keys && (!Tile::kIsPadded || column < columns)) {
          auto* row = static_cast<typename T::Storage*>(to) +
                      ((sequence_token + work.k_token + key) * p_.num_kv_heads + work.kv_head) * columns;
          *reinterpret_cast<uint4*>(row + column) = x;
        }
      }
    }
  }

  // Where memory holds dk and dv between two jobs of a block of keys. Four sums of each thread lie beside four sums of
  // the next thread.
  __device__ __forceinline__ float4* kept_sums(const GradientWork& work) const {
    return reinterpret_cast<float4*>(call_.kept) + std::int64_t{work.block} * (Tile::kSums / 2 * 256) +
           warpgroup_ * 128 + thread_;
  }
  __device__ __forceinline__ void load_kept_sums(const GradientWork& work) {
    wait_for_turn(call_.kept_turns + work.block, 8 * work.part);
    const float4* from = kept_sums(work);
#pragma unroll
    for (int i = 0; i < Tile::kSums; i += 4) {
      const float4 of_k = __ldcg(from + i / 4 * 256), of_v = __ldcg(from + (Tile::kSums + i) / 4 * 256);
      dk_[i] = of_k.x, dk_[i + 1] = of_k.y, dk_[i + 2] = of_k.z, dk_[i + 3] = of_k.w;
      dv_[i] = of_v.x, dv_[i + 1] = of_v.y, dv_[i + 2] = of_v.z, dv_[i + 3] = of_v.w;
    }
  }
  __device__ __forceinline__ void keep_sums(const GradientWork& work) const {
    float4* to = kept_sums(work);
#pragma unroll
    for (int i = 0; i < Tile::kSums; i += 4) {
      __stcg(to + i / 4 * 256, make_float4(dk_[i], dk_[i + 1], dk_[i + 2], dk_[i + 3]));
      __stcg(to + (Tile::kSums + i) / 4 * 256, make_float4(dv_[i], dv_[i + 1], dv_[i + 2], dv_[i + 3]));
    }
    __syncwarp();
    if (thread_ % 32 == 0) end_turn(call_.kept_turns + work.block);
  }

  // For trees: waits until all earlier segments have added their dk and dv, and then adds dk and dv of this segment.
  // The last segment writes the gradients.
  __device__ __forceinline__ void add_in_turn(const GradientWork& work) {
    GradientRow rows[2];
    std::int64_t at[2];
    const bool ordered = *call_.unordered == 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows[r] = rows_of(work)[row_ + 8 * r];
      at[r] = rows[r].token * p_.num_kv_heads + work.kv_head;
      if (ordered && rows[r].turn > 1) wait_for_turn(call_.row_turns + at[r], rows[r].turn / 2);
    }
    __syncwarp();
    add_and_store(rows, at, dk_, 0, p_.softmax_scale, p_.dk);
    add_and_store(rows, at, dv_, 1, 1.0f, p_.dv);
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (thread_ % 4 == 0 && rows[r].turn % 2 == 0) end_turn(call_.row_turns + at[r]);
    }
  }
  // Loads sums of earlier segments from L2, or returns +0 if there are none.
  static __device__ __forceinline__ float2 load_kept(const float2* from, bool exists) {
    float2 x = make_float2(0.0f, 0.0f);
    asm volatile(
        "{\n"
        ".reg .pred exists;\n"
        "setp.ne.s32 exists, %3, 0;\n"
        "@exists ld.global.cg.v2.f32 {%0, %1}, [%2];\n"
        "}\n"
        : "+f"(x.x), "+f"(x.y)
        : "l"(from), "r"(static_cast<int>(exists))
        : "memory");
    return x;
  }
  static __device__ __forceinline__ void store_kept(float2* to, const float2& x, bool keeps) {
    asm volatile(
        "{\n"
        ".reg .pred keeps;\n"
        "setp.ne.s32 keeps, %3, 0;\n"
        "@keeps st.global.cg.v2.f32 [%2], {%0, %1};\n"
        "}\n" ::"f"(x.x),
        "f"(x.y), "l"(to), "r"(static_cast<int>(keeps))
        : "memory");
  }
  __device__ __forceinline__ void add_and_store(const GradientRow (&rows)[2], const std::int64_t (&at)[2],
                                                float (&sums)[Tile::kSums], int which, float scale, void* to) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool adds = rows[r].turn > 1, is_last = rows[r].turn % 2 != 0, exists = rows[r].token >= 0;
      auto* const kept = reinterpret_cast<float2*>(call_.row_sums + (at[r] * 2 + which) * Tile::kColumns) + thread_ % 4;
      auto* const row = static_cast<typename T::Storage*>(to) + at[r] * Tile::kColumns;
#pragma unroll
      for (int tile = 0; tile < Tile::kSums / 4; tile += 4) {
        float2 before[4];
        std::uint32_t x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          before[k] = load_kept(kept + (tile + k) * 4, adds);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int i = 4 * (tile + k) + 2 * r;
          const float2 sum = make_float2(add_rn(before[k].x, sums[i]), add_rn(before[k].y, sums[i + 1]));
          store_kept(kept + (tile + k) * 4, sum, !is_last);
          x[k] = T::pack(add_rn(mul_rn(sum.x, scale), 0.0f), add_rn(mul_rn(sum.y, scale), 0.0f));
        }
        exchange_in_quad(x);
        if (is_last && exists) {
          *reinterpret_cast<uint4*>(row + (tile + thread_ % 4) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    }
  }

  const Params& p_;
  const GradientCallOf<Params>& call_;
  const GradientShared<Tile>& shared_;
  const int warpgroup_;
  const float c_;
  int thread_, row_;
  int jobs_ = 0, tiles_ = 0;  // how many jobs and tiles this thread has processed
  float s_[32], dp_[32], dq_[Tile::kQueryColumns / 2];
  float dk_[Tile::kSums], dv_[Tile::kSums];
  std::uint32_t p_of_[4][4], ds_of_[4][4];  // rounded p and ds, as A operands
};

}  // namespace
}  // namespace rlk::cuda
