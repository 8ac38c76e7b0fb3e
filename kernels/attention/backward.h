// The backward of attention for the kernels of CUDA and HIP. The backward computes delta of each row, then dq by tiles
// of queries, then dk and dv by tiles of keys. One thread computes each chain, which is a sum by fma in a fixed order.
// The backward therefore needs no atomics and no sums across blocks, but it computes scores twice. The fp32 units bound
// the kernels.
#pragma once

#include "kernels/attention/multiply.h"
#include "kernels/attention/sinks.h"

namespace rlk {

// delta = the sum over d of dout * out, minus dlse, for every query and head that sees a key. Eight lanes share a sum,
// and each lane computes one of its chains.
template <class Gpu, class T>
RLK_DEVICE void attention_delta(const AttentionBackwardParams& p, std::int64_t rows, std::int64_t block,
                                std::int64_t blocks) {
  const int lane = Gpu::thread() % kAttentionChains;
  const std::int64_t first = block * (kAttentionThreads / kAttentionChains);
  const std::int64_t step = blocks * (kAttentionThreads / kAttentionChains);
  for (std::int64_t begin = first; begin < rows; begin += step) {
    const std::int64_t row = begin + Gpu::thread() / kAttentionChains;
    const std::int64_t head = row % p.num_q_heads;
    const AttentionQuery query(p, row < rows ? row / p.num_q_heads : 0);
    const std::int64_t sequence = query.sequence, token = query.token;
    const bool packed = p.cu_seqlens_q != nullptr, used = row < rows && query.used();
    float sum = 0.0f;
    if (used) {
      const auto* dout = attention_head<T>(p.dout, head) + offset_of(p.dout, packed, sequence, token);
      const auto* out = attention_head<T>(p.out, head) + offset_of(p.out, packed, sequence, token);
      for (int d = lane; d < p.value_dim; d += kAttentionChains) sum = fma_rn(T::load(dout[d]), T::load(out[d]), sum);
    }
#pragma unroll
    for (int distance = 1; distance < kAttentionChains; distance *= 2) {
      sum = add_rn(sum, Gpu::shuffle_xor(sum, distance));
    }
    if (!used || lane != 0) continue;
    const std::int64_t at = lse_index(p, sequence, token, head);
    in_memory(static_cast<float*>(p.workspace))[at] = p.dlse == nullptr ? sum : sub_rn(sum, in_memory(p.dlse)[at]);
  }
}

// What the threads must know about the rows that they are computing. This struct lies in shared memory because the sums
// fill the registers.
struct AttentionBackwardScene {
  std::int64_t kv_head, sequence, begin, end;  // begin, end: range of rows
  std::int32_t first, last;                    // range of keys (if rows are queries), or of queries (if rows are keys)
};

// The shared memory of the threads that compute a tile. For dq the rows are queries (q and dout) and the columns are
// keys (k and v). For dk and dv the rows are keys and the columns are queries.
template <class Tile>
struct AttentionBackwardShared {
  float *a, *b, *stage, *weights;
  float* total;      // dq over the blocks of keys so far; a thread's sums are at [row of the thread][sum][thread]
  float *u, *delta;  // an element per row (for dq), or per column (for dk and dv)
  std::int32_t *first, *last;
  std::int64_t *a_offsets, *b_offsets;
  std::uint32_t* flags;
  AttentionBackwardScene* scene;

  static constexpr int kColumnsOrRows = Tile::kBlock;
  static_assert(Tile::kRows <= kColumnsOrRows);
  // Whether the sums of dq lie in shared memory. With 64 columns, sums in registers would spill. With more columns, the
  // sums do not fit into LDS.
  static constexpr bool kSharesTotal = Tile::kColumns <= 64;
  static constexpr int kTotal = kSharesTotal ? Tile::kRows * Tile::kColumns : 0;
  static constexpr int kBytes = 2 * carved(Tile::kRows * Tile::kColumns, 4) + carved(Tile::kStageFloats, 4) +
                                carved(Tile::kWeights, 4) + carved(kTotal, 4) + 2 * carved(kColumnsOrRows, 4) +
                                2 * carved(Tile::kRows, 4) + 2 * carved(kColumnsOrRows, 8) + 16 +
                                carved(1, sizeof(AttentionBackwardScene));

  RLK_DEVICE explicit AttentionBackwardShared(void* memory) {
    Carver carver(memory);
    a = carver.take<float>(Tile::kRows * Tile::kColumns);
    b = carver.take<float>(Tile::kRows * Tile::kColumns);
    stage = carver.take<float>(Tile::kStageFloats);
    weights = carver.take<float>(Tile::kWeights);
    total = carver.take<float>(kTotal);
    u = carver.take<float>(kColumnsOrRows);
    delta = carver.take<float>(kColumnsOrRows);
    first = carver.take<std::int32_t>(Tile::kRows);
    last = carver.take<std::int32_t>(Tile::kRows);
    a_offsets = carver.take<std::int64_t>(kColumnsOrRows);
    b_offsets = carver.take<std::int64_t>(kColumnsOrRows);
    flags = carver.take<std::uint32_t>(4);
    scene = carver.take<AttentionBackwardScene>(1);
  }
};

// The computation on a tile that the pass for dq shares with the pass for dk and dv.
template <class Gpu, class T, class Tile, class Params>
class AttentionBackward {
 public:
  static constexpr int kOfThread = Tile::kOfThread, kRows = Tile::kRows;
  static constexpr int kBlock = Tile::kBlock, kScores = Tile::kScores;

  RLK_DEVICE AttentionBackward(const Params& p, const AttentionGrid& g, void* memory) : p_(p), g_(g), s_(memory) {}

 protected:
  static RLK_DEVICE int tid() { return Gpu::thread(); }
  RLK_DEVICE int head_dim() const { return static_cast<int>(p_.head_dim); }
  RLK_DEVICE int value_dim() const { return static_cast<int>(p_.value_dim); }
  RLK_DEVICE float c() const { return attention_scale(p_); }

  // Turns products of q and k into probabilities p, and products of dout and v into gradients ds of scores. The
  // function rounds p and ds to dtype. An element becomes nothing() (-0) if the row does not see the column, or if the
  // score is -Inf. Returns whether any element of a column between the scene's first column and `end` is nothing().
  template <Exp kExp, bool kByColumn>
  RLK_DEVICE bool weights(float (&scores)[kOfThread][kScores], float (&dp)[kOfThread][kScores], int block,
                          int end) const {
    bool holes = false;
    const int thread = tid(), line = thread % kAttentionLines;
    const AttentionSoftcap softcap(p_);
    if (softcap) {
#pragma unroll
      for (auto& row : scores) {
#pragma unroll
        for (float& s : row) s = softcap.h(s);
      }
    }
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
      const int row = thread / kAttentionLines * kOfThread + r;
      const int sees_first = s_.first[row] - block, sees_last = s_.last[row] - block;
      const int holes_first = s_.scene->first - block, holes_last = s_.last[row] != 0 ? end - block : -1;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int column = Tile::score_column(line, i), of = kByColumn ? column : row;
        const float h = scores[r][i], z = softcap ? softcap.score(h) : h;
        const float p = attention_probability<Gpu>(fma_rn(z, c(), -s_.u[of]), kExp);
        const bool missing = column < sees_first || column >= sees_last || z == -infinity();
        holes |= missing && column >= holes_first && column < holes_last;
        float ds = mul_rn(p, sub_rn(dp[r][i], s_.delta[of]));
        if (softcap) ds = mul_rn(ds, AttentionSoftcap::slope(h));
        // nothing() is -0, so a product that is -0 becomes +0 here
        dp[r][i] = missing ? nothing() : add_rn(as_element<T>(ds), 0.0f);
        scores[r][i] = missing ? nothing() : as_element<T>(p);
      }
    }
    return holes;
  }
  template <bool kByColumn>
  RLK_DEVICE bool weights(float (&scores)[kOfThread][kScores], float (&dp)[kOfThread][kScores], int block,
                          int end) const {
    return Gpu::kHasHardwareExp && p_.exp == Exp::kHardware
               ? weights<Exp::kHardware, kByColumn>(scores, dp, block, end)
               : weights<Exp::kPortable, kByColumn>(scores, dp, block, end);
  }

  RLK_DEVICE void sum(bool holes, const AttentionRows<Gpu, T>& x, int count, int dim,
                      float (&sums)[kOfThread][Tile::kSums]) const {
    if (holes) {
      accumulate<Gpu, Tile, true>(s_.weights, x, count, dim, s_.stage, sums);
    } else {
      accumulate<Gpu, Tile, false>(s_.weights, x, count, dim, s_.stage, sums);
    }
  }

  static RLK_DEVICE void clear(float (&sums)[kOfThread][Tile::kSums]) {
#pragma unroll
    for (auto& row : sums) {
#pragma unroll
      for (float& x : row) x = 0.0f;
    }
  }

  // Stores a contiguous row of a gradient with `dim` columns. Writes zeros for an unused row and ignores its sums.
  RLK_DEVICE void store(bool used, const float (&sums)[Tile::kSums], float scale, void* to, int dim,
                        std::int64_t token_and_head) const {
    auto* out = in_memory(static_cast<typename T::Storage*>(to)) + token_and_head * dim + tid() % kAttentionLines * 4;
    const int columns = dim - tid() % kAttentionLines * 4;
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) {
      const int column = i / 4 * 64 + i % 4;
      if (column < columns) out[column] = T::store(used ? add_rn(mul_rn(sums[i], scale), 0.0f) : 0.0f);
    }
  }
  RLK_DEVICE void store_zeros(void* to, int dim, std::int64_t token_and_head) const {
    auto* out = in_memory(static_cast<typename T::Storage*>(to)) + token_and_head * dim;
    for (int column = tid() % kAttentionLines; column < dim; column += kAttentionLines) out[column] = T::store(0.0f);
  }

  const Params& p_;
  const AttentionGrid& g_;
  AttentionBackwardShared<Tile> s_;
};

// Computes dq of a tile of rows. Each row is a query in one of the query heads that share a key head.
template <class Gpu, class T, class Tile, class Params = AttentionBackwardParams>
class AttentionQueryGradient : AttentionBackward<Gpu, T, Tile, Params> {
  using Base = AttentionBackward<Gpu, T, Tile, Params>;
  using Base::g_;
  using Base::head_dim;
  using Base::kBlock;
  using Base::kOfThread;
  using Base::kRows;
  using Base::kScores;
  using Base::p_;
  using Base::s_;
  using Base::tid;
  using Base::value_dim;

 public:
  using Base::Base;

  RLK_DEVICE std::int64_t run(const AttentionPlace& place, std::int64_t begin) {
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
      for (std::int64_t row = begin + tid() / kAttentionLines; row < segment.last; row += kAttentionLines) {
        this->store_zeros(p_.dq, head_dim(), out_row(place.sequence, place.kv_head, row));
      }
      return segment.last;
    }
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i) total(r, i) = 0.0f;
    }
    Gpu::barrier();
#pragma unroll 1
    for (int block = (s_.scene->last - 1) / kBlock * kBlock; block > s_.scene->first - kBlock; block -= kBlock) {
      run_block(block);
    }
    const AttentionBackwardScene scene = *s_.scene;
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
      const std::int64_t row = scene.begin + tid() / kAttentionLines * kOfThread + r;
      if (row >= scene.end) continue;
      const bool used = s_.last[tid() / kAttentionLines * kOfThread + r] != 0;
      float dq[Tile::kSums];
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i) dq[i] = total(r, i);
      this->store(used, dq, p_.softmax_scale, p_.dq, head_dim(), out_row(scene.sequence, scene.kv_head, row));
    }
    Gpu::barrier();  // the next run() overwrites the shared memory that this run() reads
    return scene.end;
  }

 private:
  RLK_DEVICE std::int64_t out_row(std::int64_t sequence, std::int64_t kv_head, std::int64_t row) const {
    return row_of(p_, sequence, row / g_.group) * p_.num_q_heads + kv_head * g_.group + row % g_.group;
  }

  RLK_DEVICE void begin_rows(const AttentionSpan& span, std::int64_t kv_head, std::int64_t begin, std::int64_t end,
                             AttentionRange keys) {
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
      s_.u[tid()] = used ? mul_rn(in_memory(p_.lse)[at], kLog2e) : 0.0f;
      s_.delta[tid()] = used ? in_memory(static_cast<const float*>(p_.workspace))[at] : 0.0f;
    }
    Gpu::barrier();
    const auto rows = [&](const AttentionHeads& a, const std::int64_t* offsets) {
      return AttentionRows<Gpu, T>{in_memory(static_cast<const typename T::Storage*>(a.data)), offsets, g_.vectors};
    };
    load_transposed<Gpu, T, kRows>(rows(p_.q, s_.a_offsets), head_dim(), s_.a);
    load_transposed<Gpu, T, kRows>(rows(p_.dout, s_.b_offsets), value_dim(), s_.b);
  }

  RLK_DEVICE AttentionRows<Gpu, T> rows_of(const AttentionHeads& a, const std::int64_t* offsets) const {
    return {attention_head<T>(a, s_.scene->kv_head), offsets, g_.vectors};
  }

  RLK_DEVICE void run_block(int block) {
    if (tid() < 2 * kBlock) {
      const bool is_key = tid() < kBlock;
      const int i = tid() % kBlock, j = block + i;
      std::int64_t offset = kZeroRow;
      if (j >= s_.scene->first && j < s_.scene->last) {
        offset = key_offset(p_, is_key ? p_.k : p_.v, AttentionSpan(p_, s_.scene->sequence), j);
      }
      (is_key ? s_.a_offsets : s_.b_offsets)[i] = offset;
    }
    Gpu::barrier();
    const int last = s_.scene->last, end = last - block < kBlock ? last : block + kBlock;
    float scores[kOfThread][kScores], dp[kOfThread][kScores];
    multiply<Gpu, Tile>(s_.a, rows_of(p_.k, s_.a_offsets), head_dim(), s_.stage, scores);
    multiply<Gpu, Tile>(s_.b, rows_of(p_.v, s_.b_offsets), value_dim(), s_.stage, dp);
    const bool mine = this->template weights<false>(scores, dp, block, end);
    store_weights<Gpu, Tile>(s_.weights, dp);
    const bool holes = Gpu::any(mine, s_.flags);
    float of_block[kOfThread][Tile::kSums];
    this->clear(of_block);
    this->sum(holes, rows_of(p_.k, s_.a_offsets), end - block, head_dim(), of_block);
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i) total(r, i) = add_rn(total(r, i), of_block[r][i]);
    }
    Gpu::barrier();  // the next block overwrites the weights and the offsets
  }

  // dq over the blocks of keys so far. The sum lies in registers, or in the thread's elements of shared memory.
  static constexpr bool kShares = AttentionBackwardShared<Tile>::kSharesTotal;
  RLK_DEVICE float& total(int r, int i) {
    if constexpr (kShares) {
      return s_.total[(r * Tile::kSums + i) * kAttentionThreads + tid()];
    } else {
      return dq_[r][i];
    }
  }

  float dq_[kShares ? 1 : kOfThread][kShares ? 1 : Tile::kSums];
};

// Computes dk and dv of a tile of keys.
template <class Gpu, class T, class Tile, class Params = AttentionBackwardParams>
class AttentionKeyGradient : AttentionBackward<Gpu, T, Tile, Params> {
  using Base = AttentionBackward<Gpu, T, Tile, Params>;
  using Base::g_;
  using Base::head_dim;
  using Base::kBlock;
  using Base::kOfThread;
  using Base::kRows;
  using Base::kScores;
  using Base::p_;
  using Base::s_;
  using Base::tid;
  using Base::value_dim;

 public:
  using Base::Base;

  RLK_DEVICE std::int64_t run(const AttentionPlace& place, std::int64_t begin) {
    const AttentionSegment segment(p_, g_, p_.cu_seqlens_k, place, begin);
    if constexpr (kMayBranch<Params>) {
      if (segment.exists) {
        run_segment(segment.sequence, place.kv_head, begin, segment.last);
        return segment.last;
      }
    }
    AttentionRange queries = {0, 0};
    if (segment.exists) {
      const AttentionSpan span(p_, segment.sequence);
      const std::int64_t first = begin - span.k_first, last = segment.last - span.k_first;
      const AttentionRange keys = {first > 0 ? first : 0, last < span.num_keys ? last : span.num_keys};
      if (!keys.empty()) queries = span.queries_of(keys);
      if (!queries.empty()) begin_rows(span, span.k_first, place.kv_head, begin, segment.last, queries);
    }
    if (queries.empty()) {
      for (std::int64_t row = begin + tid() / kAttentionLines; row < segment.last; row += kAttentionLines) {
        this->store_zeros(p_.dk, head_dim(), out_row(place.sequence, place.kv_head, row));
        this->store_zeros(p_.dv, value_dim(), out_row(place.sequence, place.kv_head, row));
      }
      return segment.last;
    }
    walk();
    const AttentionBackwardScene scene = *s_.scene;
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
      const std::int64_t row = scene.begin + tid() / kAttentionLines * kOfThread + r;
      if (row >= scene.end) continue;
      const bool used = s_.last[tid() / kAttentionLines * kOfThread + r] != 0;
      this->store(used, dk_[r], p_.softmax_scale, p_.dk, head_dim(), out_row(scene.sequence, scene.kv_head, row));
      this->store(used, dv_[r], 1.0f, p_.dv, value_dim(), out_row(scene.sequence, scene.kv_head, row));
    }
    Gpu::barrier();  // the next run() overwrites the shared memory that this run() reads
    return scene.end;
  }

 private:
  RLK_DEVICE std::int64_t out_row(std::int64_t sequence, std::int64_t kv_head, std::int64_t row) const {
    return ((g_.packed ? 0 : sequence * p_.k_tokens) + row) * p_.num_kv_heads + kv_head;
  }

  // Computes a tile of keys of one segment of a tree. Every key is seen by at least one query: the query of its own
  // token. The loop's variables lie in shared memory because the sums need the scalar registers.
  RLK_DEVICE void run_segment(std::int64_t segment, std::int64_t kv_head, std::int64_t begin, std::int64_t end) {
    if (tid() == 0) *s_.scene = {kv_head, segment, begin, end, 0, 0};
    Gpu::barrier();
    float dk[kOfThread][Tile::kSums], dv[kOfThread][Tile::kSums];
    this->clear(dk);
    this->clear(dv);
#pragma unroll 1
    for (std::int64_t s = segment; s < p_.num_sequences; ++s) {
      if (!AttentionPath(p_, s).passes(p_, own_segment()) || !begin_keys(s)) continue;
      walk();
#pragma unroll
      for (int r = 0; r < kOfThread; ++r) {
#pragma unroll
        for (int i = 0; i < Tile::kSums; ++i) {
          dk[r][i] = add_rn(dk[r][i], dk_[r][i]);
          dv[r][i] = add_rn(dv[r][i], dv_[r][i]);
        }
      }
      Gpu::barrier();  // the next segment overwrites the shared memory that this segment reads
    }
    const AttentionBackwardScene scene = *s_.scene;
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
      const std::int64_t row = scene.begin + tid() / kAttentionLines * kOfThread + r;
      if (row >= scene.end) continue;
      this->store(true, dk[r], p_.softmax_scale, p_.dk, head_dim(), out_row(scene.sequence, scene.kv_head, row));
      this->store(true, dv[r], 1.0f, p_.dv, value_dim(), out_row(scene.sequence, scene.kv_head, row));
    }
    Gpu::barrier();  // the next tile overwrites the shared memory that this tile reads
  }
  // Finds the segment that the tile's keys belong to.
  RLK_DEVICE std::int64_t own_segment() const {
    return sequence_of(p_.cu_seqlens_k, p_.num_sequences, s_.scene->begin);
  }
  // Prepares the tile's keys for the queries of segment s. Returns whether any query sees any of the keys.
  RLK_DEVICE bool begin_keys(std::int64_t s) {
    const AttentionBackwardScene scene = *s_.scene;
    const AttentionSpan span(p_, s);
    const std::int64_t k_first = AttentionSpan(p_, own_segment()).k_first;
    const AttentionRange queries = span.queries_of(AttentionRange{scene.begin - k_first, scene.end - k_first});
    if (queries.empty()) return false;
    Gpu::barrier();  // all threads have copied the scene, which begin_rows() overwrites
    begin_rows(span, k_first, scene.kv_head, scene.begin, scene.end, queries);
    return true;
  }

  // Sums dk and dv over the queries that begin_rows() stored in the scene.
  RLK_DEVICE void walk() {
    this->clear(dk_);
    this->clear(dv_);
    Gpu::barrier();
    const int group = static_cast<int>(p_.num_q_heads / p_.num_kv_heads);
#pragma unroll 1
    for (int head = 0; head < group; ++head) {
#pragma unroll 1
      for (int block = s_.scene->first; block < s_.scene->last; block += kBlock) run_block(head, block);
    }
  }

  // Prepares the rows, which are tokens [begin, end). Token `k_first` is key 0 of the sequence. `queries` is the range
  // of queries that see a key of the rows.
  RLK_DEVICE void begin_rows(const AttentionSpan& span, std::int64_t k_first, std::int64_t kv_head, std::int64_t begin,
                             std::int64_t end, AttentionRange queries) {
    if (tid() == 0) {
      *s_.scene = {kv_head, span.sequence, begin, end, static_cast<int>(queries.first), static_cast<int>(queries.last)};
    }
    if (tid() < kRows) {
      const std::int64_t row = begin + tid(), j = row - k_first;
      AttentionRange sees = {0, 0};
      if (row < end && j >= 0 && j < span.num_keys) sees = span.queries_of(j);
      const bool used = !sees.empty();
      s_.first[tid()] = used ? static_cast<std::int32_t>(sees.first) : 0;
      s_.last[tid()] = used ? static_cast<std::int32_t>(sees.last) : 0;
      s_.a_offsets[tid()] = used ? key_offset(p_, p_.k, span, j) : kZeroRow;
      s_.b_offsets[tid()] = used ? key_offset(p_, p_.v, span, j) : kZeroRow;
    }
    Gpu::barrier();
    load_transposed<Gpu, T, kRows>(AttentionRows<Gpu, T>{attention_head<T>(p_.k, kv_head), s_.a_offsets, g_.vectors},
                                   head_dim(), s_.a);
    load_transposed<Gpu, T, kRows>(AttentionRows<Gpu, T>{attention_head<T>(p_.v, kv_head), s_.b_offsets, g_.vectors},
                                   value_dim(), s_.b);
  }

  // Adds queries [block, block + kBlock) of one of the query heads that share the key head.
  RLK_DEVICE void run_block(int head_of_group, int block) {
    const std::int64_t head = s_.scene->kv_head * (p_.num_q_heads / p_.num_kv_heads) + head_of_group;
    const int last = s_.scene->last, end = last - block < kBlock ? last : block + kBlock;
    if (tid() < 2 * kBlock) {
      const bool is_query = tid() < kBlock;
      const int column = tid() % kBlock;
      std::int64_t offset = kZeroRow;
      float of_column = 0.0f;
      if (block + column < end) {
        const AttentionSpan span(p_, s_.scene->sequence);
        const std::int64_t token = span.q_first + block + column;
        offset = offset_of(is_query ? p_.q : p_.dout, p_.cu_seqlens_q != nullptr, span.sequence, token);
        const std::int64_t at = lse_index(p_, span.sequence, token, head);
        of_column =
            is_query ? mul_rn(in_memory(p_.lse)[at], kLog2e) : in_memory(static_cast<const float*>(p_.workspace))[at];
      }
      (is_query ? s_.a_offsets : s_.b_offsets)[column] = offset;
      (is_query ? s_.u : s_.delta)[column] = of_column;
    }
    Gpu::barrier();
    const AttentionRows<Gpu, T> q = {attention_head<T>(p_.q, head), s_.a_offsets, g_.vectors};
    const AttentionRows<Gpu, T> dout = {attention_head<T>(p_.dout, head), s_.b_offsets, g_.vectors};
    float scores[kOfThread][kScores], ds[kOfThread][kScores];
    multiply<Gpu, Tile>(s_.a, q, head_dim(), s_.stage, scores);
    multiply<Gpu, Tile>(s_.b, dout, value_dim(), s_.stage, ds);
    const bool mine = this->template weights<true>(scores, ds, block, end);
    store_weights<Gpu, Tile>(s_.weights, scores);
    const bool holes = Gpu::any(mine, s_.flags);
    this->sum(holes, dout, end - block, value_dim(), dv_);
    Gpu::barrier();
    store_weights<Gpu, Tile>(s_.weights, ds);
    Gpu::barrier();
    this->sum(holes, q, end - block, head_dim(), dk_);
    Gpu::barrier();  // the next block overwrites the weights and the offsets
  }

  float dk_[kOfThread][Tile::kSums], dv_[kOfThread][Tile::kSums];
};

}  // namespace rlk
