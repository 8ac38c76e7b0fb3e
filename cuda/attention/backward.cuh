// attention, backward: delta of each row, then dq by tiles of queries, then dk and dv by tiles of keys. Each chain is one
// thread's, so there is no atomic and no sum across blocks, at the cost of scores that are computed twice. Bound by the
// fp32 units.
#pragma once

#include <type_traits>

#include "rlk/kernels/logprob_gradient.h"
#include "tile.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

__device__ __forceinline__ float probability(float t, Exp exp) {
  const float least = t > 127.0f ? 127.0f : t;  // keeps a NaN
  const float p = exp == Exp::kHardware ? ex2_approx(least) : PortableProbability::of(least);
  return is_nan(t) ? canonical_nan() : p;
}

// The sum over d of dout * out of every query and head that sees a key: a chain for each of eight lanes.
template <class T>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_delta_kernel(const __grid_constant__ AttentionBackwardParams p, std::int64_t rows) {
  const int lane = thread_of_block() % kAttentionChains;
  const std::int64_t first = std::int64_t{blockIdx.x} * (kAttentionThreads / kAttentionChains);
  const std::int64_t step = std::int64_t{gridDim.x} * (kAttentionThreads / kAttentionChains);
  for (std::int64_t begin = first; begin < rows; begin += step) {
    const std::int64_t row = begin + thread_of_block() / kAttentionChains;
    bool used = row < rows;
    const std::int64_t head = row % p.num_q_heads, place = row / p.num_q_heads;
    const bool packed = p.cu_seqlens_q != nullptr;
    std::int64_t sequence = packed ? 0 : place / p.q_tokens, token = packed ? place : place % p.q_tokens;
    if (used && packed) {
      sequence = sequence_of(p.cu_seqlens_q, p.num_sequences, token);
      used = sequence < p.num_sequences && p.cu_seqlens_q[sequence] <= token;
    }
    if (used) {
      const AttentionSpan span(p, sequence);
      const std::int64_t i = token - span.q_first;
      used = i < span.num_queries && !span.keys_of(i).empty();
    }
    float sum = 0.0f;
    if (used) {
      const auto* dout = head_of<T>(p.dout, head) + offset_of(p.dout, packed, sequence, token);
      const auto* out = head_of<T>(p.out, head) + offset_of(p.out, packed, sequence, token);
      for (int d = lane; d < p.head_dim; d += kAttentionChains) sum = fma_rn(T::load(dout[d]), T::load(out[d]), sum);
    }
#pragma unroll
    for (int distance = 1; distance < kAttentionChains; distance *= 2) {
      sum = add_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
    }
    if (!used || lane != 0) continue;
    const std::int64_t at = lse_index(p, sequence, token, head);
    static_cast<float*>(p.workspace)[at] = p.dlse == nullptr ? sum : sub_rn(sum, p.dlse[at]);
  }
}

// The segment of a tile that is at work. In shared memory, since registers are for sums.
struct BackwardScene {
  std::int64_t kv_head, sequence, begin, end;  // rows
  std::int32_t first, last;                    // keys of the queries, or queries of the keys
};

// What the threads of a tile tell one another. A row's two operands are q and dout, or k and v; those of columns k and v,
// or q and dout.
template <class Tile>
struct BackwardShared {
  float *a, *b, *stage, *weights;
  float *u, *delta;  // of a row, or of a column
  std::int32_t *first, *last;
  std::int64_t *a_offsets, *b_offsets;
  BackwardScene* scene;

  static constexpr int kBytes = 2 * carved(Tile::kRows * Tile::kColumns, 4) + carved(Tile::kStageFloats, 4) +
                                carved(Tile::kWeights, 4) + 2 * carved(kAttentionBlock, 4) +
                                2 * carved(Tile::kRows, 4) + 2 * carved(kAttentionBlock, 8) +
                                carved(1, sizeof(BackwardScene));

  __device__ __forceinline__ explicit BackwardShared(void* memory) {
    Carver carver(memory);
    a = carver.take<float>(Tile::kRows * Tile::kColumns);
    b = carver.take<float>(Tile::kRows * Tile::kColumns);
    stage = carver.take<float>(Tile::kStageFloats);
    weights = carver.take<float>(Tile::kWeights);
    u = carver.take<float>(kAttentionBlock);
    delta = carver.take<float>(kAttentionBlock);
    first = carver.take<std::int32_t>(Tile::kRows);
    last = carver.take<std::int32_t>(Tile::kRows);
    a_offsets = carver.take<std::int64_t>(kAttentionBlock);
    b_offsets = carver.take<std::int64_t>(kAttentionBlock);
    scene = carver.take<BackwardScene>(1);
  }
};

// What both passes do with a tile.
template <class T, class Tile>
class Backward {
 public:
  static constexpr int kOfThread = Tile::kOfThread, kRows = Tile::kRows;

  __device__ __forceinline__ Backward(const AttentionBackwardParams& p, const AttentionGrid& g, void* memory)
      : p_(p), g_(g), s_(memory) {}

 protected:
  static __device__ __forceinline__ int tid() { return thread_of_block(); }
  __device__ __forceinline__ int head_dim() const { return static_cast<int>(p_.head_dim); }
  __device__ __forceinline__ float c() const { return attention_scale(p_.softmax_scale); }

  // Scores become p, unrounded, where the row misses the column nothing. Whether it does where the column is in memory.
  template <Exp kExp, bool kByColumn>
  __device__ __forceinline__ bool probabilities(float (&scores)[kOfThread][8], int block, int end) const {
    bool holes = false;
    const int thread = tid(), line = thread % kLines;
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
      const int row = thread / kLines * kOfThread + r;
      const int sees_first = s_.first[row] - block, sees_last = s_.last[row] - block;
      const int holes_first = s_.scene->first - block, holes_last = s_.last[row] != 0 ? end - block : -1;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int column = Tile::score_column(line, i);
        const float z = scores[r][i], u = s_.u[kByColumn ? column : row];
        const float p = probability(fma_rn(z, c(), -u), kExp);
        const bool missing = column < sees_first || column >= sees_last || z == -infinity();
        holes |= missing && column >= holes_first && column < holes_last;
        scores[r][i] = missing ? nothing() : p;
      }
    }
    return holes;
  }
  template <bool kByColumn>
  __device__ __forceinline__ bool probabilities(float (&scores)[kOfThread][8], int block, int end) const {
    return p_.exp == Exp::kHardware ? probabilities<Exp::kHardware, kByColumn>(scores, block, end)
                                    : probabilities<Exp::kPortable, kByColumn>(scores, block, end);
  }

  // ds as elements of dtype hold it. + 0: a product that is -0 is not nothing.
  static __device__ __forceinline__ float gradient(float p, float dp, float delta) {
    return is_nothing(p) ? p : add_rn(rounded<T>(mul_rn(p, sub_rn(dp, delta))), 0.0f);
  }

  __device__ __forceinline__ void sum(bool holes, const Rows<T>& x, int count,
                                      float (&sums)[kOfThread][Tile::kSums]) const {
    if (holes) {
      accumulate<T, Tile, true>(s_.weights, x, count, head_dim(), s_.stage, sums);
    } else {
      accumulate<T, Tile, false>(s_.weights, x, count, head_dim(), s_.stage, sums);
    }
  }

  static __device__ __forceinline__ void clear(float (&sums)[kOfThread][Tile::kSums]) {
#pragma unroll
    for (auto& row : sums) {
#pragma unroll
      for (float& x : row) x = 0.0f;
    }
  }

  // A row of a gradient, contiguous.
  __device__ __forceinline__ void store(const float (&sums)[Tile::kSums], float scale, void* to,
                                        std::int64_t token_and_head) const {
    auto* out = static_cast<typename T::Storage*>(to) + token_and_head * p_.head_dim + line_of() * 4;
    const int columns = head_dim() - line_of() * 4;
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) {
      const int column = i / 4 * 64 + i % 4;
      if (column < columns) out[column] = T::store(add_rn(mul_rn(sums[i], scale), 0.0f));
    }
  }
  __device__ __forceinline__ void store_nothing(void* to, std::int64_t token_and_head) const {
    auto* out = static_cast<typename T::Storage*>(to) + token_and_head * p_.head_dim;
    for (int column = line_of(); column < head_dim(); column += kLines) out[column] = T::store(0.0f);
  }

  const AttentionBackwardParams& p_;
  const AttentionGrid& g_;
  BackwardShared<Tile> s_;
};

// dq of a tile of queries, each with one of the heads that share a key head.
template <class T, class Tile>
class QueryGradient : Backward<T, Tile> {
  using Base = Backward<T, Tile>;
  using Base::g_;
  using Base::head_dim;
  using Base::kOfThread;
  using Base::kRows;
  using Base::p_;
  using Base::s_;
  using Base::tid;

 public:
  using Base::Base;

  __device__ __forceinline__ std::int64_t run(const AttentionPlace& place, std::int64_t begin) {
    const AttentionSegment segment(p_, g_, p_.cu_seqlens_q, place, begin);
    AttentionRange keys = {0, 0};
    if (segment.exists) {
      const AttentionSpan span(p_, segment.sequence);
      const std::int64_t first = begin / g_.group - span.q_first,
                         last = (segment.last - 1) / g_.group - span.q_first + 1;
      const AttentionRange queries = {first, last < span.num_queries ? last : span.num_queries};
      if (!queries.empty()) keys = span.keys_of(queries);
      if (!keys.empty()) begin_rows(span, place.kv_head, begin, segment.last, keys);
    }
    if (keys.empty()) {
      for (std::int64_t row = begin + rows_line(); row < segment.last; row += kLines) {
        this->store_nothing(p_.dq, out_row(place.sequence, place.kv_head, row));
      }
      return segment.last;
    }
    this->clear(dq_);
    __syncthreads();
#pragma unroll 1
    for (int block = s_.scene->first / kAttentionBlock * kAttentionBlock; block < s_.scene->last;
         block += kAttentionBlock) {
      run_block(block);
    }
    const BackwardScene scene = *s_.scene;
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
      const std::int64_t row = scene.begin + rows_line() * kOfThread + r;
      if (row < scene.end) this->store(dq_[r], p_.softmax_scale, p_.dq, out_row(scene.sequence, scene.kv_head, row));
    }
    __syncthreads();  // the next segment writes what this one reads
    return scene.end;
  }

 private:
  __device__ __forceinline__ std::int64_t out_row(std::int64_t sequence, std::int64_t kv_head, std::int64_t row) const {
    return row_of(p_, sequence, row / g_.group) * p_.num_q_heads + kv_head * g_.group + row % g_.group;
  }

  __device__ __forceinline__ void begin_rows(const AttentionSpan& span, std::int64_t kv_head, std::int64_t begin,
                                             std::int64_t end, AttentionRange keys) {
    if (tid() == 0) {
      *s_.scene = {kv_head, span.sequence, begin, end, static_cast<int>(keys.first), static_cast<int>(keys.last)};
    }
    if (tid() < kRows) {
      const std::int64_t row = begin + tid(), token = row / g_.group, i = token - span.q_first;
      AttentionRange sees = {0, 0};
      if (row < end && i < span.num_queries) sees = span.keys_of(i);
      const bool used = !sees.empty(), packed = p_.cu_seqlens_q != nullptr;
      s_.first[tid()] = used ? static_cast<std::int32_t>(sees.first) : 0;
      s_.last[tid()] = used ? static_cast<std::int32_t>(sees.last) : 0;
      const std::int64_t head = kv_head * g_.group + row % g_.group;
      s_.a_offsets[tid()] = used ? offset_of(p_.q, packed, span.sequence, token) + head * p_.q.head_stride : kZeroRow;
      s_.b_offsets[tid()] =
          used ? offset_of(p_.dout, packed, span.sequence, token) + head * p_.dout.head_stride : kZeroRow;
      const std::int64_t at = used ? lse_index(p_, span.sequence, token, head) : 0;
      s_.u[tid()] = used ? mul_rn(p_.lse[at], kLog2e) : 0.0f;
      s_.delta[tid()] = used ? static_cast<const float*>(p_.workspace)[at] : 0.0f;
    }
    __syncthreads();
    const auto rows = [&](const AttentionHeads& a, const std::int64_t* offsets) {
      return Rows<T>{static_cast<const typename T::Storage*>(a.data), offsets, g_.vectors};
    };
    load_transposed<T, kRows>(rows(p_.q, s_.a_offsets), head_dim(), s_.a);
    load_transposed<T, kRows>(rows(p_.dout, s_.b_offsets), head_dim(), s_.b);
  }

  __device__ __forceinline__ Rows<T> rows_of(const AttentionHeads& a, const std::int64_t* offsets) const {
    return {head_of<T>(a, s_.scene->kv_head), offsets, g_.vectors};
  }

  __device__ __forceinline__ void run_block(int block) {
    {
      const bool is_key = tid() < kAttentionBlock;
      const int i = tid() % kAttentionBlock, j = block + i;
      std::int64_t offset = kZeroRow;
      if (j >= s_.scene->first && j < s_.scene->last) {
        offset = key_offset(p_, is_key ? p_.k : p_.v, AttentionSpan(p_, s_.scene->sequence), j);
      }
      (is_key ? s_.a_offsets : s_.b_offsets)[i] = offset;
    }
    __syncthreads();
    const int last = s_.scene->last, end = last - block < kAttentionBlock ? last : block + kAttentionBlock;
    float scores[kOfThread][8], dp[kOfThread][8];
    multiply<T, Tile>(s_.a, rows_of(p_.k, s_.a_offsets), head_dim(), s_.stage, scores);
    const bool mine = this->template probabilities<false>(scores, block, end);
    multiply<T, Tile>(s_.b, rows_of(p_.v, s_.b_offsets), head_dim(), s_.stage, dp);
    const int thread = tid();
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
      const float delta = s_.delta[thread / kLines * kOfThread + r];
#pragma unroll
      for (int i = 0; i < 8; ++i) scores[r][i] = this->gradient(scores[r][i], dp[r][i], delta);
    }
    store_weights<Tile>(s_.weights, scores);
    const bool holes = __syncthreads_or(mine);
    this->sum(holes, rows_of(p_.k, s_.a_offsets), end - block, dq_);
    __syncthreads();  // weights and offsets are written again
  }

  float dq_[kOfThread][Tile::kSums];
};

// dk and dv of a tile of keys.
template <class T, class Tile>
class KeyGradient : Backward<T, Tile> {
  using Base = Backward<T, Tile>;
  using Base::g_;
  using Base::head_dim;
  using Base::kOfThread;
  using Base::kRows;
  using Base::p_;
  using Base::s_;
  using Base::tid;

 public:
  using Base::Base;

  __device__ __forceinline__ std::int64_t run(const AttentionPlace& place, std::int64_t begin) {
    const AttentionSegment segment(p_, g_, p_.cu_seqlens_k, place, begin);
    AttentionRange queries = {0, 0};
    if (segment.exists) {
      const AttentionSpan span(p_, segment.sequence);
      const std::int64_t first = begin - span.k_first, last = segment.last - span.k_first;
      const AttentionRange keys = {first > 0 ? first : 0, last < span.num_keys ? last : span.num_keys};
      if (!keys.empty()) queries = span.queries_of(keys);
      if (!queries.empty()) begin_rows(span, place.kv_head, begin, segment.last, queries);
    }
    if (queries.empty()) {
      for (std::int64_t row = begin + rows_line(); row < segment.last; row += kLines) {
        this->store_nothing(p_.dk, out_row(place.sequence, place.kv_head, row));
        this->store_nothing(p_.dv, out_row(place.sequence, place.kv_head, row));
      }
      return segment.last;
    }
    this->clear(dk_);
    this->clear(dv_);
    __syncthreads();
    const int group = static_cast<int>(p_.num_q_heads / p_.num_kv_heads);
#pragma unroll 1
    for (int head = 0; head < group; ++head) {
#pragma unroll 1
      for (int block = s_.scene->first; block < s_.scene->last; block += kAttentionBlock) run_block(head, block);
    }
    const BackwardScene scene = *s_.scene;
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
      const std::int64_t row = scene.begin + rows_line() * kOfThread + r;
      if (row >= scene.end) continue;
      this->store(dk_[r], p_.softmax_scale, p_.dk, out_row(scene.sequence, scene.kv_head, row));
      this->store(dv_[r], 1.0f, p_.dv, out_row(scene.sequence, scene.kv_head, row));
    }
    __syncthreads();  // the next segment writes what this one reads
    return scene.end;
  }

 private:
  __device__ __forceinline__ std::int64_t out_row(std::int64_t sequence, std::int64_t kv_head, std::int64_t row) const {
    return ((g_.packed ? 0 : sequence * p_.k_tokens) + row) * p_.num_kv_heads + kv_head;
  }

  __device__ __forceinline__ void begin_rows(const AttentionSpan& span, std::int64_t kv_head, std::int64_t begin,
                                             std::int64_t end, AttentionRange queries) {
    if (tid() == 0) {
      *s_.scene = {kv_head, span.sequence, begin, end, static_cast<int>(queries.first), static_cast<int>(queries.last)};
    }
    if (tid() < kRows) {
      const std::int64_t row = begin + tid(), j = row - span.k_first;
      AttentionRange sees = {0, 0};
      if (row < end && j >= 0 && j < span.num_keys) sees = span.queries_of(j);
      const bool used = !sees.empty();
      s_.first[tid()] = used ? static_cast<std::int32_t>(sees.first) : 0;
      s_.last[tid()] = used ? static_cast<std::int32_t>(sees.last) : 0;
      s_.a_offsets[tid()] = used ? key_offset(p_, p_.k, span, j) : kZeroRow;
      s_.b_offsets[tid()] = used ? key_offset(p_, p_.v, span, j) : kZeroRow;
    }
    __syncthreads();
    load_transposed<T, kRows>(Rows<T>{head_of<T>(p_.k, kv_head), s_.a_offsets, g_.vectors}, head_dim(), s_.a);
    load_transposed<T, kRows>(Rows<T>{head_of<T>(p_.v, kv_head), s_.b_offsets, g_.vectors}, head_dim(), s_.b);
  }

  // Queries [block, block + 128) of one of the key head's query heads.
  __device__ __forceinline__ void run_block(int head_of_group, int block) {
    const std::int64_t head = s_.scene->kv_head * (p_.num_q_heads / p_.num_kv_heads) + head_of_group;
    const int last = s_.scene->last, end = last - block < kAttentionBlock ? last : block + kAttentionBlock;
    {
      const bool is_query = tid() < kAttentionBlock;
      const int column = tid() % kAttentionBlock;
      std::int64_t offset = kZeroRow;
      float of_column = 0.0f;
      if (block + column < end) {
        const AttentionSpan span(p_, s_.scene->sequence);
        const std::int64_t token = span.q_first + block + column;
        offset = offset_of(is_query ? p_.q : p_.dout, p_.cu_seqlens_q != nullptr, span.sequence, token);
        const std::int64_t at = lse_index(p_, span.sequence, token, head);
        of_column = is_query ? mul_rn(p_.lse[at], kLog2e) : static_cast<const float*>(p_.workspace)[at];
      }
      (is_query ? s_.a_offsets : s_.b_offsets)[column] = offset;
      (is_query ? s_.u : s_.delta)[column] = of_column;
    }
    __syncthreads();
    const Rows<T> q = {head_of<T>(p_.q, head), s_.a_offsets, g_.vectors};
    const Rows<T> dout = {head_of<T>(p_.dout, head), s_.b_offsets, g_.vectors};
    float scores[kOfThread][8], ds[kOfThread][8];
    multiply<T, Tile>(s_.a, q, head_dim(), s_.stage, scores);
    const bool mine = this->template probabilities<true>(scores, block, end);
    multiply<T, Tile>(s_.b, dout, head_dim(), s_.stage, ds);
    const int line = line_of();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float delta = s_.delta[Tile::score_column(line, i)];
#pragma unroll
      for (int r = 0; r < kOfThread; ++r) {
        ds[r][i] = this->gradient(scores[r][i], ds[r][i], delta);
        scores[r][i] = rounded<T>(scores[r][i]);
      }
    }
    store_weights<Tile>(s_.weights, scores);
    const bool holes = __syncthreads_or(mine);
    this->sum(holes, dout, end - block, dv_);
    __syncthreads();
    store_weights<Tile>(s_.weights, ds);
    __syncthreads();
    this->sum(holes, q, end - block, dk_);
    __syncthreads();  // weights and offsets are written again
  }

  float dk_[kOfThread][Tile::kSums], dv_[kOfThread][Tile::kSums];
};

template <class T, class Tile>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_dq_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ AttentionGrid g) {
  extern __shared__ __align__(16) unsigned char memory[];
  QueryGradient<T, Tile> pass(p, g, memory);
#pragma unroll 1
  for (std::int64_t begin = AttentionPlace(p, g, blockIdx.x, Tile::kRows).first;
       begin < AttentionPlace(p, g, blockIdx.x, Tile::kRows).last;) {
    begin = pass.run(AttentionPlace(p, g, blockIdx.x, Tile::kRows), begin);
  }
}

template <class T, class Tile>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_dkv_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ AttentionGrid g) {
  extern __shared__ __align__(16) unsigned char memory[];
  KeyGradient<T, Tile> pass(p, g, memory);
#pragma unroll 1
  for (std::int64_t begin = AttentionPlace(p, g, blockIdx.x, Tile::kRows).first;
       begin < AttentionPlace(p, g, blockIdx.x, Tile::kRows).last;) {
    begin = pass.run(AttentionPlace(p, g, blockIdx.x, Tile::kRows), begin);
  }
}

inline void run_attention_backward(const AttentionBackwardParams& p, cudaStream_t stream) {
  bool vectors = true;
  for (const AttentionHeads* a : {&p.q, &p.k, &p.v, &p.dout}) vectors = vectors && attention_at_16_bytes(*a, p.dtype);
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    const std::int64_t rows = attention_rows(p) * p.num_q_heads;
    if (rows > 0) {
      constexpr std::int64_t kOfBlock = kAttentionThreads / kAttentionChains;
      const std::int64_t blocks = std::min<std::int64_t>((rows + kOfBlock - 1) / kOfBlock, 1 << 20);
      attention_delta_kernel<T><<<static_cast<unsigned>(blocks), kAttentionThreads, 0, stream>>>(p, rows);
      check(cudaGetLastError(), "launch of attention's delta");
    }
    with_tile(p.head_dim, [&](auto tile) {
      using Tile = decltype(tile);
      constexpr int kBytes = BackwardShared<Tile>::kBytes;
      if (p.dq != nullptr && rows > 0) {
        const AttentionGrid g = attention_query_grid(p, Tile::kRows, vectors);
        allow_shared_memory<attention_dq_kernel<T, Tile>>();
        const unsigned blocks = checked_blocks(attention_blocks(p, g), "attention_backward");
        attention_dq_kernel<T, Tile><<<blocks, kAttentionThreads, kBytes, stream>>>(p, g);
        check(cudaGetLastError(), "launch of attention's dq");
      }
      if (p.dk != nullptr && attention_keys(p) > 0) {
        const AttentionGrid g = attention_key_grid(p, Tile::kRows, vectors);
        allow_shared_memory<attention_dkv_kernel<T, Tile>>();
        const unsigned blocks = checked_blocks(attention_blocks(p, g), "attention_backward");
        attention_dkv_kernel<T, Tile><<<blocks, kAttentionThreads, kBytes, stream>>>(p, g);
        check(cudaGetLastError(), "launch of attention's dk and dv");
      }
    });
  });
}

}  // namespace
}  // namespace rlk::cuda
