// The kernel for dk and dv in attention's wgmma backward, for heads of more than 128 columns. A separate kernel
// computes dq (queries_sm90.cuh).
#pragma once

#include "../../common/dependent_launch.cuh"
#include "steps_sm90.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// A tile of products: 64 queries of one head by kKeys keys.
template <int kColumns_, int kValueColumns_, int kKeys_>
struct WideGradientTile {
  static constexpr int kColumns = kColumns_, kValueColumns = kValueColumns_, kQueries = 64, kKeys = kKeys_;
  static constexpr int kStages = 2, kThreads = 3 * 128;
  static constexpr bool kIsPadded = true;  // heads may have fewer columns
  static constexpr int kBoxes = kColumns / 64, kValueBoxes = kValueColumns / 64;
  static constexpr int kQueryBox = kQueries * 128, kKeyBox = kKeys * 128;
  static constexpr int kQueryBytes = kBoxes * kQueryBox, kKeyBytes = kBoxes * kKeyBox;
  static constexpr int kDoutBytes = kValueBoxes * kQueryBox, kValueBytes = kValueBoxes * kKeyBox;
  static constexpr int kScalarBytes = kQueries * 4;
  static constexpr int kValuesAt = kKeyBytes, kQueriesAt = kValuesAt + kValueBytes;
  static constexpr int kDoutAt = kQueriesAt + kStages * kQueryBytes;
  // Whether the warpgroups exchange p and ds through shared memory. This memory has room for two tiles, used
  // alternately.
  static constexpr bool kExchanges = kKeys == 64;
  static constexpr int kScoresAt = kDoutAt + kStages * kDoutBytes;
  static constexpr int kProbabilitiesAt = kScoresAt + (kExchanges ? 2 * kKeyBox : 0);
  static constexpr int kScalarsAt = kProbabilitiesAt + (kExchanges ? 2 * kKeyBox : 0);
  static constexpr int kBarriersAt = kScalarsAt + kStages * 2 * kScalarBytes, kBarriers = 18;
  static constexpr int kWorkAt = kBarriersAt + kBarriers * 8;
  static constexpr int kBytes = kWorkAt + 2 * 64 + 1024;  // 1024 bytes align the start
  static_assert(kBytes <= 227 * 1024);
};

// A warpgroup computes the scores of 64 keys with 32 queries at a time. With blocks of 128 keys, each warpgroup has 64
// of the keys, processes both halves of a tile's queries, and sums all columns. If dk and dv of 128 keys do not fit
// into registers, a block has 64 keys (kExchanges). Then both warpgroups have the same 64 keys. Each warpgroup computes
// p and ds for half of a tile's queries, exchanges them (rounded) with the other warpgroup, and sums half of the
// columns of dk and dv. The rows of scores are keys, and the columns of scores are queries.
template <class T, class Tile, Exp kExp>
class WideGradientRows : GradientSteps {
 public:
  __device__ __forceinline__ WideGradientRows(const AttentionBackwardParams& p, const GradientCall& call,
                                              const GradientShared<Tile>& shared, int warpgroup)
      : p_(p), call_(call), shared_(shared), warpgroup_(warpgroup), c_(attention_scale(p.softmax_scale)) {
    thread_ = threadIdx.x % 128;
  }

  __device__ __forceinline__ void run(const GradientWork& work) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) dk_[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kValueSums; ++i) dv_[i] = 0.0f;
    pin(dk_);  // so the compiler clears the sums here, not while products are in flight
    pin(dv_);
    if (work.tile < work.last_tile) {
      mbarrier_wait_block(shared_.keys_full(), jobs_++ & 1);
      clear_keys(work);
      walk(work);
      release(shared_.keys_empty());
    }
    store<true>(work, dk_, Tile::kExchanges ? warpgroup_ * Tile::kColumns / 2 : 0);
    store<false>(work, dv_, Tile::kExchanges ? warpgroup_ * Tile::kValueColumns / 2 : 0);
  }

 private:
  // Numbers of sums per thread.
  static constexpr int kSums = Tile::kColumns / (Tile::kExchanges ? 4 : 2);
  static constexpr int kValueSums = Tile::kValueColumns / (Tile::kExchanges ? 4 : 2);

  __device__ __forceinline__ void release(std::uint32_t barrier) const {
    if (thread_ % 32 == 0) mbarrier_arrive(barrier);
  }
  // first_key() returns the warpgroup's first key, and row() the thread's first key, both counted from the job's first
  // key.
  __device__ __forceinline__ int first_key() const { return Tile::kKeys == 128 ? warpgroup_ * 64 : 0; }
  __device__ __forceinline__ int row() const { return first_key() + thread_ / 32 * 16 + thread_ % 32 / 4; }

  __device__ __forceinline__ void walk(const GradientWork& work) {
    const int end = tiles_ + (work.last_tile - work.tile) / Tile::kQueries * call_.part_heads;
    int tile = work.tile;
#pragma unroll 1
    while (tiles_ < end) {
      const int stage = same_in_warp(tiles_ & 1), phase = tiles_ >> 1 & 1;
      const std::uint32_t queries = shared_.queries(stage), dout = shared_.dout(stage);
      mbarrier_wait_block(shared_.queries_full(stage), phase);
      if (tile < work.first || tile + Tile::kQueries > work.last) clear_queries(work, tile, stage, phase);
      const int first = Tile::kExchanges ? warpgroup_ * 32 : 0;
      score<Tile::kColumns>(shared_.keys(), queries + first * 128, s_);
      mbarrier_wait_block(shared_.dout_full(stage), phase);
      score<Tile::kValueColumns>(shared_.values(), dout + first * 128, dp_);
      if constexpr (Tile::kExchanges) {
        const std::uint32_t p = shared_.base + Tile::kProbabilitiesAt + stage * Tile::kKeyBox, ds = shared_.ds(stage);
        wgmma_wait<1>();
        pin(s_);
        exponentiate(work, tile, first, stage);
        exchange(s_, p);
        accumulate_half(dv_, p, dout);
        wgmma_wait<1>();
        pin(dp_);
        differentiate(first, stage);
        exchange(dp_, ds);
        accumulate_half(dk_, ds, queries);
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          wgmma_wait<1>();
          pin(s_);
          exponentiate(work, tile, half * 32, stage);
          pack<T>(s_, p_of_);
          accumulate<T, Tile::kQueryBox, true>(p_of_, dout, 2 * half, dv_);
          wgmma_wait<1>();
          pin(dp_);
          differentiate(half * 32, stage);
          pack<T>(dp_, ds_of_);
          accumulate<T, Tile::kQueryBox, true>(ds_of_, queries, 2 * half, dk_);
          if (half == 1) break;
          score<Tile::kColumns>(shared_.keys(), queries + 32 * 128, s_);
          score<Tile::kValueColumns>(shared_.values(), dout + 32 * 128, dp_);
        }
      }
      wgmma_wait<1>();
      release(shared_.dout_empty(stage));
      wgmma_wait<0>();
      release(shared_.queries_empty(stage));
      ++tiles_;
      tile = tile + Tile::kQueries < work.last_tile ? tile + Tile::kQueries : work.tile;
    }
    pin(dk_);
    pin(dv_);
  }

  // Computes x = the warpgroup's 64 keys times 32 queries, over kColumns columns, from +0.
  template <int kColumns>
  __device__ __forceinline__ void score(std::uint32_t keys, std::uint32_t queries, float (&x)[16]) const {
    multiply<T, kColumns, Tile::kKeyBox, Tile::kQueryBox>(keys + first_key() * 128, queries, x);
  }
  // Adds weights (p or ds) times `rows` (dO or Q of a tile) to `sums`, for the warpgroup's half of the columns.
  template <int kCount>
  __device__ __forceinline__ void accumulate_half(float (&sums)[kCount], std::uint32_t weights,
                                                  std::uint32_t rows) const {
    const std::uint64_t a = tile_descriptor<false>(weights, 0);
    const std::uint64_t b = tile_descriptor<true>(rows + warpgroup_ * (kCount / 32) * Tile::kQueryBox, Tile::kQueryBox);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kQueries / 16; ++step) {
      wgmma<T, kCount * 2, false, true>(sums, a + step * kDescriptorStep<false>, b + step * kDescriptorStep<true>, 1);
    }
    wgmma_commit();
  }
  // Rounds weights, and stores them as [keys][queries] in rows of 128 bytes with the 128-byte swizzle. Returns when the
  // other warpgroup has stored its weights, too.
  __device__ __forceinline__ void exchange(const float (&x)[16], std::uint32_t weights) const {
    std::uint32_t pairs[2][4];
    pack<T>(x, pairs);
    store_weights(pairs, weights, thread_ % 32, thread_ / 32 * 16, warpgroup_ * 4);
    fence_for_tma();
    meet();
  }

  // Turns the scores of 32 queries, from query `first` of a tile on, into probabilities.
  __device__ __forceinline__ void exponentiate(const GradientWork& work, int tile, int first, int stage) {
    const int key = work.key + first_key(), query = tile + first;
    const bool all = key + 64 <= work.num_keys && (!p_.causal || key + 63 <= max(query, work.first)) &&
                     (p_.window_size == 0 || query + 31 - key < p_.window_size);
    if (!all) hide(work, query);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 u = load_pair(shared_.u(stage) + (first + 8 * j + thread_ % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float t = fma_rn(s_[4 * j + i], c_, i % 2 == 0 ? -u.x : -u.y);
        s_[4 * j + i] = probability<kExp>(t);
      }
    }
  }
  // Sets a score to -Inf if a mask hides its key from its query.
  __device__ __forceinline__ void hide(const GradientWork& work, int query) {
    GradientSteps::hide(
        p_, work.num_keys, [&](int i) { return work.key + row() + i / 2 % 2 * 8; },
        [&](int i) { return query + i / 4 * 8 + thread_ % 4 * 2 + i % 2; }, s_);
  }
  // Turns dp into ds.
  __device__ __forceinline__ void differentiate(int first, int stage) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 delta = load_pair(shared_.delta(stage) + (first + 8 * j + thread_ % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dp_[4 * j + i] = mul_rn(s_[4 * j + i], sub_rn(dp_[4 * j + i], i % 2 == 0 ? delta.x : delta.y));
      }
    }
  }

  // Clears rows [first, last) of 128 bytes in each box of an operand, by 256 threads.
  __device__ __forceinline__ void clear_rows(std::uint32_t operand, int boxes, int box_bytes, int first,
                                             int last) const {
    const int chunks = (last - first) * 8;
    for (int i = warpgroup_ * 128 + thread_; i < chunks * boxes; i += 256) {
      const std::uint32_t to = operand + i / chunks * box_bytes + first * 128 + i % chunks * 16;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
  }
  // Sets keys and values past the sequence's last key to +0, since TMA may have loaded NaN there.
  __device__ __forceinline__ void clear_keys(const GradientWork& work) const {
    if (work.key + Tile::kKeys <= work.num_keys) return;
    clear_rows(shared_.keys(), Tile::kBoxes, Tile::kKeyBox, work.num_keys - work.key, Tile::kKeys);
    clear_rows(shared_.values(), Tile::kValueBoxes, Tile::kKeyBox, work.num_keys - work.key, Tile::kKeys);
    fence_for_tma();
    meet();
  }
  // Clears the rows of q and dout of a tile that have no query in use or see no key.
  __device__ __forceinline__ void clear_queries(const GradientWork& work, int tile, int stage, int phase) const {
    mbarrier_wait_block(shared_.dout_full(stage), phase);
    const int first = min(max(work.first - tile, 0), Tile::kQueries);
    const int last = max(min(work.last - tile, Tile::kQueries), first);
    clear_rows(shared_.queries(stage), Tile::kBoxes, Tile::kQueryBox, 0, first);
    clear_rows(shared_.queries(stage), Tile::kBoxes, Tile::kQueryBox, last, Tile::kQueries);
    clear_rows(shared_.dout(stage), Tile::kValueBoxes, Tile::kQueryBox, 0, first);
    clear_rows(shared_.dout(stage), Tile::kValueBoxes, Tile::kQueryBox, last, Tile::kQueries);
    fence_for_tma();
    meet();
  }

  // Scales, rounds and stores the columns of dk or dv from `first` on.
  template <bool kIsKey, int kSums>
  __device__ __forceinline__ void store(const GradientWork& work, const float (&sums)[kSums], int first) const {
    const std::int64_t sequence_token = p_.cu_seqlens_k != nullptr ? 0 : work.sequence * p_.k_tokens;
    const int columns = static_cast<int>(kIsKey ? p_.head_dim : p_.value_dim);
    const float scale = kIsKey ? p_.softmax_scale : 1.0f;
#pragma unroll
    for (int four = 0; four < kSums / 4; four += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 x = rounded<T, kSums>(sums, four, r, scale);
        const int key = row() + 8 * r, column = first + four * 8 + thread_ % 4 * 8;
        if (work.key + key < work.num_keys && column < columns) {
          auto* const to = static_cast<typename T::Storage*>(kIsKey ? p_.dk : p_.dv);
          auto* const of_key = to + ((sequence_token + work.k_token + key) * p_.num_kv_heads + work.kv_head) * columns;
          *reinterpret_cast<uint4*>(of_key + column) = x;
        }
      }
    }
  }

  const AttentionBackwardParams& p_;
  const GradientCall& call_;
  const GradientShared<Tile>& shared_;
  const int warpgroup_;
  const float c_;
  int thread_;
  int jobs_ = 0, tiles_ = 0;  // how many jobs and tiles this thread has processed
  float s_[16], dp_[16], dk_[kSums], dv_[kValueSums];
  std::uint32_t p_of_[2][4], ds_of_[2][4];
};

template <class T, class Tile, Exp kExp>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_wide_gradient_kernel(const __grid_constant__ AttentionBackwardParams p,
                                   const __grid_constant__ GradientCall call) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const GradientShared<Tile> shared{shared_address(memory)};
  auto* works = reinterpret_cast<GradientWork*>(memory + Tile::kWorkAt);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  allow_next_kernel();  // the next kernel computes dq
  const int warpgroup = same_in_warp(threadIdx.x / 128) - 1;
  if (warpgroup < 0) {
    GradientRegisters::release();
    if (same_in_warp(threadIdx.x / 32) == 0) load_gradient_work<Tile>(p, call, shared, works);
    return;
  }
  GradientRegisters::claim();
  WideGradientRows<T, Tile, kExp> rows(p, call, shared, warpgroup);
  take_jobs(shared, works, &rows);
}

}  // namespace
}  // namespace rlk::cuda
