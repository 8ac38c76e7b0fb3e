// The kernel for dq in attention's wgmma backward, for heads of more than 128 columns. A job is 128 queries of a head,
// 64 for each warpgroup. A job processes the blocks of keys that its queries see, in descending order, and keeps the
// sums of dq in registers.
#pragma once

#include "../../common/dependent_launch.cuh"
#include "steps_sm90.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// A tile of products: 64 queries of one head by 64 keys.
template <int kColumns_, int kValueColumns_>
struct QueryGradientTile {
  static constexpr int kColumns = kColumns_, kValueColumns = kValueColumns_, kQueries = 64, kKeys = 64;
  static constexpr int kThreads = 3 * 128;
  static constexpr int kBoxes = kColumns / 64, kValueBoxes = kValueColumns / 64, kBox = 64 * 128;
  static constexpr int kQueryBytes = kBoxes * kBox, kDoutBytes = kValueBoxes * kBox;  // bytes of Q or of K; of dO or of
                                                                                      // V
  static constexpr int kStages = kColumns > 192 ? 2 : 3, kValueStages = kColumns > 192 ? 1 : 3;
  static constexpr int kScalarBytes = 2 * kQueries * 4;  // u = lse * log2(e) and delta of a tile
  static constexpr int kDoutAt = 2 * kQueryBytes, kKeysAt = kDoutAt + 2 * kDoutBytes;
  static constexpr int kValuesAt = kKeysAt + kStages * kQueryBytes;
  static constexpr int kScalarsAt = kValuesAt + kValueStages * kDoutBytes;
  static constexpr int kBarriersAt = kScalarsAt + 2 * kScalarBytes, kBarriers = 20;
  static constexpr int kWorkAt = kBarriersAt + kBarriers * 8;
  static constexpr int kBytes = kWorkAt + 2 * 64 + 1024;  // 1024 bytes align the start
  static_assert(kBytes <= 227 * 1024);
};

template <class Tile>
struct QueryGradientShared {
  std::uint32_t base;
  __device__ __forceinline__ std::uint32_t queries(int tile) const { return base + tile * Tile::kQueryBytes; }
  __device__ __forceinline__ std::uint32_t dout(int tile) const {
    return base + Tile::kDoutAt + tile * Tile::kDoutBytes;
  }
  __device__ __forceinline__ std::uint32_t keys(int stage) const {
    return base + Tile::kKeysAt + stage * Tile::kQueryBytes;
  }
  __device__ __forceinline__ std::uint32_t values(int stage) const {
    return base + Tile::kValuesAt + stage * Tile::kDoutBytes;
  }
  __device__ __forceinline__ std::uint32_t scalars(int tile) const {
    return base + Tile::kScalarsAt + tile * Tile::kScalarBytes;
  }
  __device__ __forceinline__ std::uint32_t barrier(int i) const { return base + Tile::kBarriersAt + i * 8; }
  __device__ __forceinline__ std::uint32_t queries_full(int tile) const { return barrier(tile); }
  __device__ __forceinline__ std::uint32_t queries_empty(int tile) const { return barrier(2 + tile); }
  __device__ __forceinline__ std::uint32_t work_full(int slot) const { return barrier(4 + slot); }
  __device__ __forceinline__ std::uint32_t work_empty(int slot) const { return barrier(6 + slot); }
  __device__ __forceinline__ std::uint32_t keys_full(int stage) const { return barrier(8 + stage); }
  __device__ __forceinline__ std::uint32_t keys_empty(int stage) const { return barrier(11 + stage); }
  __device__ __forceinline__ std::uint32_t values_full(int stage) const { return barrier(14 + stage); }
  __device__ __forceinline__ std::uint32_t values_empty(int stage) const { return barrier(17 + stage); }

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(queries_full(i), 1);
      mbarrier_init(queries_empty(i), 4);  // the four warps of the tile's warpgroup arrive
      mbarrier_init(work_full(i), 1);
      mbarrier_init(work_empty(i), 256);
    }
    for (int i = 0; i < 3; ++i) {
      mbarrier_init(keys_full(i), 1);
      mbarrier_init(keys_empty(i), 8);
      mbarrier_init(values_full(i), 1);
      mbarrier_init(values_empty(i), 8);
    }
    mbarrier_init_fence();
  }
};

// The loading warp: takes jobs, announces each job to the warpgroups, and loads its queries, dout, keys and values.
template <class Tile>
__device__ __forceinline__ void load_query_work(const AttentionBackwardParams& p, const GradientCall& call,
                                                const QueryGradientShared<Tile>& shared, QueryWork* works) {
  RingPosition keys_at, values_at, slot;
  int phases = 3;  // one bit for the tile of each warpgroup
  const auto load = [&](int boxes, std::uint32_t to, const CUtensorMap* map, int head, int token, int sequence,
                        std::uint32_t barrier) {
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      load_passing_head_box(to + box * Tile::kBox, map, box * 64, head, token, sequence, barrier);
    }
  };
  const auto group = static_cast<std::int32_t>(p.num_q_heads / p.num_kv_heads);
  std::int32_t job = blockIdx.x;
#pragma unroll 1
  for (;;) {
    // Jobs are numbered by key head, so that a head's keys stay in L2. A sequence's last queries come first, since they
    // see the most keys.
    const bool more = job < call.query_jobs;
    const std::int32_t of_head = call.query_jobs / static_cast<std::int32_t>(p.num_kv_heads);
    const std::int32_t kv_head = job / of_head, within = job - kv_head * of_head;
    const QueryWork& listed = call.query_works[of_head / group - 1 - within / group];
    const bool exists = !more || listed.sequence >= 0;
    const QueryWork& work = works[slot.stage];
    if (exists) {
      mbarrier_wait_block(shared.work_empty(slot.stage), slot.phase ^ 1);
      if (threadIdx.x == 0) {
        if (more) {
          works[slot.stage] = listed;
          works[slot.stage].head = kv_head * group + within % group;
        } else {
          works[slot.stage].sequence = -1;
        }
        mbarrier_arrive(shared.work_full(slot.stage));
      }
      __syncwarp();
      slot.advance(2);
    }
    if (!more) return;
    if (exists) {
      const int sequence_q = p.cu_seqlens_q != nullptr ? 0 : work.sequence;
      const int sequence_k = p.cu_seqlens_k != nullptr ? 0 : work.sequence;
#pragma unroll 1
      for (int tile = 0; tile < 2; ++tile) {
        if (work.high[tile] < 0) continue;
        mbarrier_wait_block(shared.queries_empty(tile), phases >> tile & 1);
        phases ^= 1 << tile;
        if (elect_one()) {
          const std::uint32_t full = shared.queries_full(tile);
          mbarrier_arrive_expect(full, Tile::kQueryBytes + Tile::kDoutBytes + Tile::kScalarBytes);
          const int token = work.q_token + work.tile + tile * Tile::kQueries;
          load(Tile::kBoxes, shared.queries(tile), &call.q, work.head, token, sequence_q, full);
          load(Tile::kValueBoxes, shared.dout(tile), &call.dout, work.head, token, sequence_q, full);
          load_bytes(shared.scalars(tile),
                     call.scalars + (work.head * std::int64_t{call.slots} + work.slot + tile) * (2 * Tile::kQueries),
                     Tile::kScalarBytes, full);
        }
      }
      const int last = work.last_block();
#pragma unroll 1
      for (int block = work.first_block(); block >= last; --block) {
        const int token = work.k_token + block * Tile::kKeys;
        mbarrier_wait_block(shared.keys_empty(keys_at.stage), keys_at.phase ^ 1);
        if (elect_one()) {
          const std::uint32_t full = shared.keys_full(keys_at.stage);
          mbarrier_arrive_expect(full, Tile::kQueryBytes);
          load(Tile::kBoxes, shared.keys(keys_at.stage), &call.k, kv_head, token, sequence_k, full);
        }
        keys_at.advance(Tile::kStages);
        mbarrier_wait_block(shared.values_empty(values_at.stage), values_at.phase ^ 1);
        if (elect_one()) {
          const std::uint32_t full = shared.values_full(values_at.stage);
          mbarrier_arrive_expect(full, Tile::kDoutBytes);
          load(Tile::kValueBoxes, shared.values(values_at.stage), &call.v, kv_head, token, sequence_k, full);
        }
        values_at.advance(Tile::kValueStages);
      }
    }
    std::uint32_t taken = 0;
    if (threadIdx.x == 0) taken = atomicAdd(call.query_counter, 1u);
    taken = __shfl_sync(0xffffffffu, taken, 0);
    job = static_cast<std::int32_t>(gridDim.x + taken);
  }
}

// The two warpgroups that multiply. Rows are queries, and the columns of scores are keys.
template <class T, class Tile, Exp kExp>
class QueryGradientRows : GradientSteps {
 public:
  __device__ __forceinline__ QueryGradientRows(const AttentionBackwardParams& p, const GradientCall& call,
                                               const QueryGradientShared<Tile>& shared, int warpgroup)
      : p_(p), call_(call), shared_(shared), warpgroup_(warpgroup), c_(attention_scale(p.softmax_scale)) {
    thread_ = threadIdx.x % 128;
    row_ = thread_ / 32 * 16 + thread_ % 32 / 4;
  }

  __device__ __forceinline__ void run(const QueryWork& work) {
    const int high = same_in_warp(work.high[warpgroup_]), low = same_in_warp(work.low[warpgroup_]);
    const int tile = work.tile + warpgroup_ * Tile::kQueries;
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 2; ++i) sums_[i] = 0.0f;
    pin(sums_);  // so the compiler clears the sums here, not while products are in flight
    if (high >= 0) {
      mbarrier_wait_block(shared_.queries_full(warpgroup_), tiles_++ & 1);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t from = shared_.scalars(warpgroup_) + (row_ + 8 * r) * 4;
        u_[r] = load_float(from);
        delta_[r] = load_float(from + Tile::kQueries * 4);
      }
    }
    const int last = same_in_warp(work.last_block());
#pragma unroll 1
    for (int block = same_in_warp(work.first_block()); block >= last; --block) {
      const int keys_stage = same_in_warp(keys_at_.stage), values_stage = same_in_warp(values_at_.stage);
      mbarrier_wait_block(shared_.keys_full(keys_stage), keys_at_.phase);
      const bool partial = (block + 1) * Tile::kKeys > work.num_keys, sees = block <= high && block >= low;
      if (partial || !sees) mbarrier_wait_block(shared_.values_full(values_stage), values_at_.phase);
      if (partial) clear_keys(work.num_keys - block * Tile::kKeys, keys_stage, values_stage);
      if (sees) {
        const std::uint32_t keys = shared_.keys(keys_stage);
        multiply<T, Tile::kColumns, Tile::kBox, Tile::kBox>(shared_.queries(warpgroup_), keys, s_);
        mbarrier_wait_block(shared_.values_full(values_stage), values_at_.phase);
        multiply<T, Tile::kValueColumns, Tile::kBox, Tile::kBox>(shared_.dout(warpgroup_), shared_.values(values_stage),
                                                                 dp_);
        wgmma_wait<1>();
        pin(s_);
        exponentiate(work, tile, block * Tile::kKeys);
        wgmma_wait<0>();
        pin(dp_);
        release(shared_.values_empty(values_stage));
        differentiate();
        add_block(keys);
      } else {
        release(shared_.values_empty(values_stage));
      }
      release(shared_.keys_empty(keys_stage));
      keys_at_.advance(Tile::kStages);
      values_at_.advance(Tile::kValueStages);
    }
    if (high < 0) return;
    release(shared_.queries_empty(warpgroup_));
    store(work, tile);
  }

 private:
  __device__ __forceinline__ void release(std::uint32_t barrier) const {
    if (thread_ % 32 == 0) mbarrier_arrive(barrier);
  }
  // Computes x = ds times 64 columns of the 64 keys, from +0.
  __device__ __forceinline__ void multiply_columns(std::uint32_t keys, float (&x)[32]) const {
    accumulate<T, Tile::kBox, false>(ds_, keys, 0, x);
  }
  // Computes dq of this block of keys, 64 columns at a time, and adds it to the sums. The products use the registers of
  // s_ (scores) and of dp_ alternately.
  __device__ __forceinline__ void add_block(std::uint32_t keys) {
    multiply_columns(keys, s_);
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      if (box + 1 < Tile::kBoxes) {
        multiply_columns(keys + (box + 1) * Tile::kBox, box % 2 == 0 ? dp_ : s_);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      float(&x)[32] = box % 2 == 0 ? s_ : dp_;
      pin(x);
#pragma unroll
      for (int i = 0; i < 32; ++i) sums_[box * 32 + i] = add_rn(sums_[box * 32 + i], x[i]);
    }
  }

  // Turns scores into probabilities.
  __device__ __forceinline__ void exponentiate(const QueryWork& work, int tile, int first_key) {
    const bool all = first_key + Tile::kKeys <= work.num_keys &&
                     (!p_.causal || first_key + Tile::kKeys - 1 <= max(tile, work.first)) &&
                     (p_.window_size == 0 || tile + Tile::kQueries - 1 - first_key < p_.window_size);
    if (!all) hide(work, tile, first_key);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float t = fma_rn(s_[i], c_, -u_[i / 2 % 2]);
      s_[i] = probability<kExp>(t);
    }
  }
  // Sets a score to -Inf if a mask hides its key from its query.
  __device__ __forceinline__ void hide(const QueryWork& work, int tile, int first_key) {
    GradientSteps::hide(
        p_, work.num_keys, [&](int i) { return first_key + i / 4 * 8 + thread_ % 4 * 2 + i % 2; },
        [&](int i) { return tile + row_ + i / 2 % 2 * 8; }, s_);
  }
  // Computes ds, which becomes the A operand of dq's products, in steps of 16 keys.
  __device__ __forceinline__ void differentiate() {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        const float x = mul_rn(s_[i], sub_rn(dp_[i], delta_[r])), y = mul_rn(s_[i + 1], sub_rn(dp_[i + 1], delta_[r]));
        ds_[j / 2][j % 2 * 2 + r] = T::pack(x, y);
      }
    }
  }

  // Sets keys and values past the sequence's last key to +0, since TMA may have loaded NaN there. Both warpgroups must
  // call this function.
  __device__ __forceinline__ void clear_keys(int used, int keys_stage, int values_stage) const {
    const int chunks = (Tile::kKeys - used) * 8;
    for (int i = warpgroup_ * 128 + thread_; i < chunks * (Tile::kBoxes + Tile::kValueBoxes); i += 256) {
      const int box = i / chunks;
      const std::uint32_t of_box = box < Tile::kBoxes
                                       ? shared_.keys(keys_stage) + box * Tile::kBox
                                       : shared_.values(values_stage) + (box - Tile::kBoxes) * Tile::kBox;
      const std::uint32_t to = of_box + used * 128 + i % chunks * 16;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
    fence_for_tma();
    meet();
  }

  // Scales, rounds and stores the rows in use.
  __device__ __forceinline__ void store(const QueryWork& work, int tile) {
    const int columns = static_cast<int>(p_.head_dim);
    const std::int64_t first_token = (p_.cu_seqlens_q != nullptr ? 0 : work.sequence * p_.q_tokens) + work.q_token;
#pragma unroll
    for (int four = 0; four < Tile::kColumns / 8; four += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 x = rounded<T, Tile::kColumns / 2>(sums_, four, r, p_.softmax_scale);
        const int n = tile + row_ + 8 * r, column = four * 8 + thread_ % 4 * 8;
        if (n >= work.first && n < work.last && column < columns) {
          auto* to = static_cast<typename T::Storage*>(p_.dq) +
                     ((first_token + n) * p_.num_q_heads + work.head) * columns + column;
          *reinterpret_cast<uint4*>(to) = x;
        }
      }
    }
    // One column is enough, since a ds of NaN makes all columns of its query's dq NaN.
    if (is_nan(sums_[0]) || is_nan(sums_[2])) *call_.has_nan = 1;
  }

  const AttentionBackwardParams& p_;
  const GradientCall& call_;
  const QueryGradientShared<Tile>& shared_;
  const int warpgroup_;
  const float c_;
  int thread_, row_;
  int tiles_ = 0;
  RingPosition keys_at_, values_at_;
  float u_[2], delta_[2];
  float s_[32], dp_[32], sums_[Tile::kColumns / 2];
  std::uint32_t ds_[4][4];
};

// `waits`: this kernel ends only after the previous kernel, which computes dk and dv. The next kernel waits only for
// this kernel, so it then has the results of both.
template <class T, class Tile, Exp kExp>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_query_gradient_kernel(const __grid_constant__ AttentionBackwardParams p,
                                    const __grid_constant__ GradientCall call, bool waits) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const QueryGradientShared<Tile> shared{shared_address(memory)};
  auto* works = reinterpret_cast<QueryWork*>(memory + Tile::kWorkAt);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const int warpgroup = same_in_warp(threadIdx.x / 128) - 1;
  if (warpgroup < 0) {
    GradientRegisters::release();
    if (same_in_warp(threadIdx.x / 32) == 0) load_query_work<Tile>(p, call, shared, works);
    if (waits && blockIdx.x == 0) wait_for_previous_kernel();
    return;
  }
  GradientRegisters::claim();
  QueryGradientRows<T, Tile, kExp> rows(p, call, shared, warpgroup);
  take_jobs(shared, works, &rows);
}

}  // namespace
}  // namespace rlk::cuda
