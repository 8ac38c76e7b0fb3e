// The backward of attention for bf16 and fp16 by mma.sync, for SM80 and later. The kernels serve every shape, stride
// and list of sequences. One pass computes dq: its rows are queries, and it processes keys for each row. A second pass
// computes dk and dv: its rows are keys, and it processes queries. These keys or queries are the "others" of a pass. In
// both passes a block of four warps has 64 rows, and processes 32 others at a time, through two stages of shared
// memory. Both passes compute the scores, so a call takes seven products in place of five. mma.sync limits the speed.
// README.md has measurements.
#pragma once

#include "../forward_mma.cuh"
#include "kernels/attention/backward.h"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// The shape of a block of threads. kColumns: head_dim, rounded up, with +0 in the added columns. kOthers: number of
// others per step. A block of threads writes kOut columns of its gradients.
template <int kColumns_, bool kOfKeys_, int kMostOut = 128>
struct BackwardMmaTile {
  static constexpr int kColumns = kColumns_;
  static constexpr bool kOfKeys = kOfKeys_;  // true: the pass for dk and dv; false: the pass for dq
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16 * kWarps, kOthers = 32;
  static constexpr int kOut = kColumns < kMostOut ? kColumns : kMostOut, kParts = kColumns / kOut;
  static constexpr int kScores = kOthers / 8, kSums = kOut / 8;  // tiles of 8 columns
  static constexpr int kSteps = kColumns / 16;
  static constexpr int kRowBytes = kColumns * 2, kChunks = kColumns / 8;  // a chunk is 16 bytes
  static constexpr int kBlock = attention_block(kColumns);
  // Places in shared memory: K and V of the block's rows, or Q and dO if the rows are queries; two stages of K and V,
  // or Q and dO, of the others; two stages of u = lse * log2(e) and delta.
  static constexpr int kOwnBytes = kRows * kRowBytes, kOtherBytes = kOthers * kRowBytes;
  static constexpr int kOthersAt = 2 * kOwnBytes, kScalarsAt = kOthersAt + 4 * kOtherBytes;
  static constexpr int kBytes = kScalarsAt + 4 * kOthers * 4;
};

// Returns the delta of query i of a sequence and head. `at`: the index in lse of this query and head.
__device__ __forceinline__ float delta_of(const AttentionBackwardParams& p, const AttentionSpan&, std::int64_t,
                                          std::int64_t, std::int64_t at) {
  return static_cast<const float*>(p.workspace)[at];
}

template <class T, class Tile, class Params = AttentionBackwardParams>
class MmaBackward {
 public:
  __device__ __forceinline__ MmaBackward(const Params& p, const AttentionGrid& g, int part, unsigned char* memory)
      : p_(p), g_(g), part_(part), memory_(memory), shared_(shared_address(memory)) {}

  // Processes the rows of a tile from `begin` to the end of the tile or of the sequence. Returns the first row after
  // these.
  __device__ __forceinline__ std::int64_t run(const AttentionPlace& place, std::int64_t begin) {
    const AttentionSegment segment(p_, g_, Tile::kOfKeys ? p_.cu_seqlens_k : p_.cu_seqlens_q, place, begin);
    kv_head_ = place.kv_head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sees_[r][0] = sees_[r][1] = 0;
      u_[r] = delta_[r] = 0.0f;
    }
    clear(a_);
    clear(b_);
    // Tokens outside every sequence have no gradients to compute.
    if (segment.exists) {
      if constexpr (kSharesKeys) {
        visit_segment(segment.sequence, begin, segment.last);
      } else {
        visit(AttentionSpan(p_, segment.sequence), begin, segment.last);
      }
    }
    finish(segment.sequence, begin, segment.last);
    __syncthreads();  // the next segment overwrites memory that the current segment reads
    return segment.last;
  }

 private:
  // Whether the rows are keys of a segment that other segments of its tree see, too.
  static constexpr bool kSharesKeys = kMayBranch<Params> && Tile::kOfKeys;
  using Sums = float[Tile::kSums][4];
  static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (auto& tile : sums) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
  }
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int quad_lane() const { return threadIdx.x % 4; }
  __device__ __forceinline__ int row_of_thread(int r) const { return threadIdx.x / 32 * 16 + lane() / 4 + 8 * r; }
  // own(): an operand of the rows. Operand 0 is K, or Q if the rows are queries. Operand 1 is V, or dO if they are
  // queries.
  __device__ __forceinline__ std::uint32_t own(int operand) const { return shared_ + operand * Tile::kOwnBytes; }
  __device__ __forceinline__ std::uint32_t others(int operand, int stage) const {
    return shared_ + Tile::kOthersAt + (2 * stage + operand) * Tile::kOtherBytes;
  }
  __device__ __forceinline__ float* scalars(int which, int stage) const {
    return reinterpret_cast<float*>(memory_ + Tile::kScalarsAt) + (2 * stage + which) * Tile::kOthers;
  }

  // If the row is a query, returns the range of keys that it sees (no mask hides them). If the row is a key, returns
  // the range of positions of the queries that see it. A query's position is the number of its own token among the
  // keys.
  __device__ __forceinline__ AttentionRange seen_by(const AttentionSpan& span, std::int64_t row) const {
    if constexpr (Tile::kOfKeys) {
      const std::int64_t j = row - first_key_token(span);
      if (j < 0 || j >= span.num_keys) return {0, 0};
      const AttentionRange i = span.queries_of(j);
      if (i.empty()) return {0, 0};
      return {span.position(i.first), span.position(i.last)};
    } else {
      const std::int64_t i = row / g_.group - span.q_first;
      return i < span.num_queries ? span.keys_of(i) : AttentionRange{0, 0};
    }
  }
  __device__ __forceinline__ AttentionRange seen_by_any(const AttentionSpan& span, std::int64_t begin,
                                                        std::int64_t end) const {
    if constexpr (Tile::kOfKeys) {
      const std::int64_t first = begin - first_key_token(span), last = end - first_key_token(span);
      const AttentionRange keys = {first > 0 ? first : 0, last < span.num_keys ? last : span.num_keys};
      if (keys.empty()) return {0, 0};
      const AttentionRange i = span.queries_of(keys);
      if (i.empty()) return {0, 0};
      return {span.position(i.first), span.position(i.last)};
    } else {
      const std::int64_t first = begin / g_.group - span.q_first, last = (end - 1) / g_.group - span.q_first + 1;
      const AttentionRange queries = {first, last < span.num_queries ? last : span.num_queries};
      return queries.empty() ? queries : span.keys_of(queries);
    }
  }

  // Returns a token t: token t + j is key j, for all keys j among the rows. In a tree, other keys may have other
  // tokens.
  __device__ __forceinline__ std::int64_t first_key_token(const AttentionSpan& span) const {
    return kSharesKeys ? own_first_ : span.k_first;
  }
  // Returns the offset of a key in the key head, or kNoPage for a key without a token.
  __device__ __forceinline__ std::int64_t key_at(const AttentionHeads& a, const AttentionSpan& span,
                                                 std::int64_t j) const {
    const std::int64_t offset = key_offset(p_, a, span, j);
    return kMayBranch<Params> && offset == kNoPage ? kNoPage : offset + kv_head_ * a.head_stride;
  }
  __device__ __forceinline__ std::int64_t query_offset(const AttentionHeads& a, const AttentionSpan& span,
                                                       std::int64_t i, std::int64_t head) const {
    return offset_of(a, p_.cu_seqlens_q != nullptr, span.sequence, span.q_first + i) + head * a.head_stride;
  }
  // Copies a chunk of row `row` of an operand with `dim` columns. If `offset` is kZeroRow or kNoPage, the chunk becomes
  // +0.
  __device__ __forceinline__ void load(const AttentionHeads& a, std::int64_t dim, std::int64_t offset,
                                       std::uint32_t operand, int row, int chunk) const {
    load_operand_chunk<T, false>(in_memory(static_cast<const typename T::Storage*>(a.data)), offset, chunk,
                                 static_cast<int>(dim), g_.vectors, chunk_of<Tile>(operand, row, chunk));
  }

  // For keys of a tree's segment: computes separate sums for each segment of queries that sees any of the keys, and
  // adds them in ascending order of segments. At least the query of a key's own token sees the key.
  __device__ __forceinline__ void visit_segment(std::int64_t segment, std::int64_t begin, std::int64_t end) {
    own_first_ = AttentionSpan(p_, segment).k_first;
    Sums dk, dv;
    clear(dk);
    clear(dv);
#pragma unroll 1
    for (std::int64_t s = segment; s < p_.num_sequences; ++s) {
      if (!AttentionPath(p_, s).passes(p_, segment)) continue;
      clear(a_);
      clear(b_);
#pragma unroll
      for (auto& sees : sees_) sees[0] = sees[1] = 0;
      visit(AttentionSpan(p_, s), begin, end);
#pragma unroll
      for (int tile = 0; tile < Tile::kSums; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          dk[tile][i] = add_rn(dk[tile][i], a_[tile][i]);
          dv[tile][i] = add_rn(dv[tile][i], b_[tile][i]);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < Tile::kSums; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a_[tile][i] = dk[tile][i];
        b_[tile][i] = dv[tile][i];
      }
    }
#pragma unroll
    for (auto& sees : sees_) sees[1] = sees[0] + 1;
  }

  __device__ __forceinline__ void visit(const AttentionSpan& span, std::int64_t begin, std::int64_t end) {
    const AttentionRange seen = seen_by_any(span, begin, end);
    if (seen.empty()) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t row = begin + row_of_thread(r);
      if (row >= end) continue;
      const AttentionRange sees = seen_by(span, row);
      if (sees.empty()) continue;
      sees_[r][0] = static_cast<int>(sees.first);
      sees_[r][1] = static_cast<int>(sees.last);
      if constexpr (!Tile::kOfKeys) {
        const std::int64_t head = kv_head_ * g_.group + row % g_.group;
        const std::int64_t at = lse_index(p_, span.sequence, row / g_.group, head);
        u_[r] = mul_rn(p_.lse[at], kLog2e);
        delta_[r] = delta_of(p_, span, row / g_.group - span.q_first, head, at);
      }
    }
    load_own(span, begin, end);
    walk(span, static_cast<int>(seen.first), static_cast<int>(seen.last));
  }

  __device__ __forceinline__ void load_own(const AttentionSpan& span, std::int64_t begin, std::int64_t end) const {
#pragma unroll 2
    for (int i = threadIdx.x; i < Tile::kRows * Tile::kChunks; i += Tile::kThreads) {
      const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
      const std::int64_t at = begin + row;
      const bool used = at < end && !seen_by(span, at).empty();
      if constexpr (Tile::kOfKeys) {
        const std::int64_t j = at - first_key_token(span);
        load(p_.k, p_.head_dim, used ? key_at(p_.k, span, j) : kZeroRow, own(0), row, chunk);
        load(p_.v, p_.value_dim, used ? key_at(p_.v, span, j) : kZeroRow, own(1), row, chunk);
      } else {
        const std::int64_t query = at / g_.group - span.q_first, head = kv_head_ * g_.group + at % g_.group;
        load(p_.q, p_.head_dim, used ? query_offset(p_.q, span, query, head) : kZeroRow, own(0), row, chunk);
        load(p_.dout, p_.value_dim, used ? query_offset(p_.dout, span, query, head) : kZeroRow, own(1), row, chunk);
      }
    }
  }

  // A step of walk(): others [x, x + kOthers). If they are queries, `outer` is their head in the group of heads that
  // share a key head. If they are keys, `outer` is the first key of their block.
  struct Step {
    int outer, x;
  };
  __device__ __forceinline__ Step first_step() const {
    if constexpr (Tile::kOfKeys) return {0, first_};
    const int block = (last_ - 1) / Tile::kBlock * Tile::kBlock;
    return {block, max(block, first_)};
  }
  __device__ __forceinline__ bool ends_outer(Step at) const {
    const int end = Tile::kOfKeys ? last_ : min(at.outer + Tile::kBlock, last_);
    return at.x + Tile::kOthers >= end;
  }
  // Advances to the next step. Returns whether a next step exists.
  __device__ __forceinline__ bool advance(Step* at) const {
    if (!ends_outer(*at)) {
      at->x += Tile::kOthers;
      return true;
    }
    if constexpr (Tile::kOfKeys) {
      *at = {at->outer + 1, first_};
      return at->outer < group_;
    } else {
      at->outer -= Tile::kBlock;
      at->x = max(at->outer, first_);
      return at->outer + Tile::kBlock > first_;
    }
  }

  __device__ __forceinline__ void load_others(const AttentionSpan& span, Step at, int stage) const {
    const std::int64_t past = span.num_keys - span.num_queries;
    const auto exists = [&](std::int64_t x) {
      // True for all keys, even masked ones, since their products are computed.
      if constexpr (!Tile::kOfKeys) return x < span.num_keys;
      return x >= past && x - past < span.num_queries && !span.keys_of(x - past).empty();
    };
    const std::int64_t head = kv_head_ * group_ + (Tile::kOfKeys ? at.outer : 0);
#pragma unroll 2
    for (int i = threadIdx.x; i < Tile::kOthers * Tile::kChunks; i += Tile::kThreads) {
      const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
      const std::int64_t x = at.x + row;
      const bool used = exists(x);
      if constexpr (Tile::kOfKeys) {
        load(p_.q, p_.head_dim, used ? query_offset(p_.q, span, x - past, head) : kZeroRow, others(0, stage), row,
             chunk);
        load(p_.dout, p_.value_dim, used ? query_offset(p_.dout, span, x - past, head) : kZeroRow, others(1, stage),
             row, chunk);
      } else {
        load(p_.k, p_.head_dim, used ? key_at(p_.k, span, x) : kZeroRow, others(0, stage), row, chunk);
        load(p_.v, p_.value_dim, used ? key_at(p_.v, span, x) : kZeroRow, others(1, stage), row, chunk);
      }
    }
    if constexpr (Tile::kOfKeys) {
      if (threadIdx.x < Tile::kOthers) {
        const std::int64_t x = at.x + static_cast<int>(threadIdx.x);
        const bool used = exists(x);
        const std::int64_t index = used ? lse_index(p_, span.sequence, span.q_first + x - past, head) : 0;
        scalars(0, stage)[threadIdx.x] = used ? mul_rn(p_.lse[index], kLog2e) : 0.0f;
        scalars(1, stage)[threadIdx.x] = used ? delta_of(p_, span, x - past, head, index) : 0.0f;
      }
    }
    copy_async_commit();
  }

  __device__ __forceinline__ void walk(const AttentionSpan& span, int first, int last) {
    group_ = static_cast<int>(p_.num_q_heads / p_.num_kv_heads);
    first_ = first & ~(Tile::kOfKeys ? 15 : Tile::kOthers - 1);  // dk and dv add queries in steps of 16, counted from
                                                                 // position 0
    last_ = last;
    Step at = first_step();
    int stage = 0;
    load_others(span, at, stage);
#pragma unroll 1
    for (bool more = true; more; stage ^= 1) {
      Step next = at;
      more = advance(&next);
      if (more) {
        load_others(span, next, stage ^ 1);
      } else {
        copy_async_commit();
      }
      copy_async_wait<1>();
      __syncthreads();
      take(at.x, stage);
      if (!Tile::kOfKeys && ends_outer(at)) add_block();
      __syncthreads();  // all warps have read this stage
      at = next;
    }
  }

  // Adds the products of the block's rows with 32 others to the sums.
  __device__ __forceinline__ void take(int x, int stage) {
    float s[Tile::kScores][4] = {}, dp[Tile::kScores][4] = {};
    const int row = threadIdx.x / 32 * 16 + lane() % 16;
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      std::uint32_t a[4], b[4];
#pragma unroll
      for (int operand = 0; operand < 2; ++operand) {
        auto& products = operand == 0 ? s : dp;
        load_matrices_4<false>(a, chunk_of<Tile>(own(operand), row, 2 * step + lane() / 16));
#pragma unroll
        for (int tile = 0; tile < Tile::kScores; tile += 2) {
          const int other = tile * 8 + lane() / 16 * 8 + lane() % 8;
          load_matrices_4<false>(b, chunk_of<Tile>(others(operand, stage), other, 2 * step + lane() / 8 % 2));
          mma_m16n8k16<T>(products[tile], a, b[0], b[1]);
          mma_m16n8k16<T>(products[tile + 1], a, b[2], b[3]);
        }
      }
    }
    std::uint32_t p[Tile::kScores][2], ds[Tile::kScores][2];
    p_.softcap > 0.0f ? weights<true>(x, stage, s, dp, p, ds) : weights<false>(x, stage, s, dp, p, ds);
    if constexpr (Tile::kOfKeys) accumulate(p, others(1, stage), b_);
    accumulate(ds, others(0, stage), a_);
  }

  // Turns the products of q and k, and of dout and v, into p and ds. p and ds become A operands, in steps of 16 others.
  template <bool kCaps>
  __device__ __forceinline__ void weights(int x, int stage, const float (&s)[Tile::kScores][4],
                                          const float (&dp)[Tile::kScores][4], std::uint32_t (&p)[Tile::kScores][2],
                                          std::uint32_t (&ds)[Tile::kScores][2]) const {
    const float c = attention_scale(p_);
    const AttentionSoftcap softcap(p_);
#pragma unroll
    for (int tile = 0; tile < Tile::kScores; ++tile) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float weight[2], gradient[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = tile * 8 + quad_lane() * 2 + i;
          const float h = kCaps ? softcap.h(s[tile][2 * r + i]) : 0.0f;
          const float z = kCaps ? softcap.score(h) : s[tile][2 * r + i];
          const float u = Tile::kOfKeys ? scalars(0, stage)[column] : u_[r];
          const float delta = Tile::kOfKeys ? scalars(1, stage)[column] : delta_[r];
          const bool missing = x + column < sees_[r][0] || x + column >= sees_[r][1] || z == -infinity();
          const float of_pair = attention_probability<AttentionGpu>(fma_rn(z, c, -u), p_.exp);
          weight[i] = missing ? 0.0f : of_pair;
          float of_score = mul_rn(of_pair, sub_rn(dp[tile][2 * r + i], delta));
          if (kCaps) of_score = mul_rn(of_score, AttentionSoftcap::slope(h));
          gradient[i] = missing ? 0.0f : of_score;
        }
        p[tile][r] = T::pack(weight[0], weight[1]);
        ds[tile][r] = T::pack(gradient[0], gradient[1]);
      }
    }
  }

  __device__ __forceinline__ void accumulate(const std::uint32_t (&weights)[Tile::kScores][2], std::uint32_t operand,
                                             Sums& sums) const {
#pragma unroll
    for (int step = 0; step < Tile::kOthers / 16; ++step) {
      const std::uint32_t a[4] = {weights[2 * step][0], weights[2 * step][1], weights[2 * step + 1][0],
                                  weights[2 * step + 1][1]};
#pragma unroll
      for (int tile = 0; tile < Tile::kSums; tile += 2) {
        std::uint32_t b[4];
        load_matrices_4<true>(
            b, chunk_of<Tile>(operand, step * 16 + lane() % 16, part_ * (Tile::kOut / 8) + tile + lane() / 16));
        mma_m16n8k16<T>(sums[tile], a, b[0], b[1]);
        mma_m16n8k16<T>(sums[tile + 1], a, b[2], b[3]);
      }
    }
  }

  // Adds dq of the current block of keys to the sum over the blocks of higher keys, and clears it for the next block.
  __device__ __forceinline__ void add_block() {
#pragma unroll
    for (int tile = 0; tile < Tile::kSums; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        b_[tile][i] = add_rn(b_[tile][i], a_[tile][i]);
        a_[tile][i] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void finish(std::int64_t sequence, std::int64_t begin, std::int64_t end) const {
    if constexpr (Tile::kOfKeys) {
      store(a_, p_.softmax_scale, p_.dk, p_.head_dim, sequence, begin, end);
      store(b_, 1.0f, p_.dv, p_.value_dim, sequence, begin, end);
    } else {
      store(b_, p_.softmax_scale, p_.dq, p_.head_dim, sequence, begin, end);
    }
  }
  __device__ __forceinline__ void store(const Sums& sums, float scale, void* to, std::int64_t dim,
                                        std::int64_t sequence, std::int64_t begin, std::int64_t end) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t row = begin + row_of_thread(r);
      if (row >= end) continue;
      const bool used = sees_[r][0] < sees_[r][1];
      std::int64_t at;
      if constexpr (Tile::kOfKeys) {
        at = ((g_.packed ? 0 : sequence * p_.k_tokens) + row) * p_.num_kv_heads + kv_head_;
      } else {
        at = row_of(p_, sequence, row / g_.group) * p_.num_q_heads + kv_head_ * g_.group + row % g_.group;
      }
      auto* out = static_cast<typename T::Storage*>(to) + at * dim;
#pragma unroll
      for (int tile = 0; tile < Tile::kSums; ++tile) {
        const int column = part_ * Tile::kOut + tile * 8 + quad_lane() * 2;
        if (column >= dim) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          out[column + i] = T::store(used ? add_rn(mul_rn(sums[tile][2 * r + i], scale), 0.0f) : 0.0f);
        }
      }
    }
  }

  const Params& p_;
  const AttentionGrid& g_;
  const int part_;
  unsigned char* memory_;
  std::uint32_t shared_;
  std::int64_t kv_head_ = 0;
  // kSharesKeys: the value of first_key_token().
  std::int64_t own_first_ = 0;
  int group_ = 1, first_ = 0, last_ = 0;  // query heads per key head; range of others to process
  int sees_[2][2];                        // range of others for each of the thread's two rows
  float u_[2], delta_[2];                 // u and delta of the thread's rows, if the rows are queries
  Sums a_, b_;  // the sums of dk and dv; or dq of the current block of keys, and the sum of dq
};

template <class T, class Tile, class Params>
__global__ void __launch_bounds__(Tile::kThreads)
    attention_backward_mma_kernel(const __grid_constant__ Params p, const __grid_constant__ AttentionGrid g) {
  extern __shared__ __align__(128) unsigned char memory[];
  // Rows with the most work come first: with a causal mask, the last queries or the first keys.
  const unsigned at = blockIdx.x / Tile::kParts, tiles = gridDim.x / Tile::kParts;
  const AttentionPlace place(p, g, Tile::kOfKeys ? tiles - 1 - at : at, Tile::kRows);
  MmaBackward<T, Tile, Params> backward(p, g, static_cast<int>(blockIdx.x % Tile::kParts), memory);
#pragma unroll 1
  for (std::int64_t begin = place.first; begin < place.last;) begin = backward.run(place, begin);
}

template <class T, class Tile, class Params>
void launch_attention_backward_mma(const Params& p, bool vectors, cudaStream_t stream) {
  const AttentionGrid g =
      Tile::kOfKeys ? attention_key_grid(p, Tile::kRows, vectors) : attention_query_grid(p, Tile::kRows, vectors);
  allow_shared_memory<attention_backward_mma_kernel<T, Tile, Params>>();
  const unsigned blocks = checked_blocks(attention_blocks(p, g) * Tile::kParts, "attention_backward");
  attention_backward_mma_kernel<T, Tile, Params><<<blocks, Tile::kThreads, Tile::kBytes, stream>>>(p, g);
  check(cudaGetLastError(), "launch of attention's gradients");
}

// The number of columns of dk and dv that a block of threads writes. In trees a block keeps a second set of sums, so it
// writes fewer columns.
template <class Params>
constexpr int columns_of_keys(int columns) {
  if (!kMayBranch<Params>) return 128;
  return columns > 128 ? 32 : 64;
}

template <class T, class Params>
void run_attention_backward_mma(const Params& p, bool vectors, cudaStream_t stream) {
  const auto launch = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    if (p.dq != nullptr && attention_rows(p) * p.num_q_heads > 0) {
      launch_attention_backward_mma<T, BackwardMmaTile<kColumns, false>>(p, vectors, stream);
    }
    if (p.dk != nullptr && attention_keys(p) > 0) {
      launch_attention_backward_mma<T, BackwardMmaTile<kColumns, true, columns_of_keys<Params>(kColumns)>>(p, vectors,
                                                                                                           stream);
    }
  };
  if (p.head_dim <= 64) {
    launch(std::integral_constant<int, 64>{});
  } else if (p.head_dim <= 128) {
    launch(std::integral_constant<int, 128>{});
  } else {
    launch(std::integral_constant<int, 256>{});
  }
}

}  // namespace
}  // namespace rlk::cuda
