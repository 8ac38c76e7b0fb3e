// The forward of attention for bf16 and fp16 by mma.sync, for SM80 and later. The kernel supports every shape, stride
// and list of sequences. A block of four warps computes 64 rows. A row is one query in one of the heads that share a
// key head. The warps process one block of keys after another. K and V pass through shared memory; scores,
// probabilities and sums stay in registers. While products with K run, cp.async loads V, and while products with V run,
// the next K. mma.sync limits the speed. README.md has measurements.
#pragma once

#include "../common/async_copy_groups_sm80.cuh"
#include "../common/async_copy_sm80.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/mma_sm80.cuh"
#include "gpu.cuh"
#include "kernels/attention/row.h"
#include "kernels/attention/sinks.h"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// The shape of a block of threads. kColumns: head_dim, rounded up. The added columns (past head_dim in Q and K, past
// value_dim in V and O) are +0.
template <int kColumns_>
struct MmaTile {
  static constexpr int kColumns = kColumns_, kWarps = 4;
  static constexpr int kThreads = 32 * kWarps, kRows = 16 * kWarps;
  static constexpr int kKeys = attention_block(kColumns);
  static constexpr int kScores = kKeys / 8, kSums = kColumns / 8;         // tiles of 8 columns
  static constexpr int kSteps = kColumns / 16;                            // a score is a sum of steps of 16 columns
  static constexpr int kRowBytes = kColumns * 2, kChunks = kColumns / 8;  // a chunk is 16 bytes
  static constexpr int kOperandBytes = kKeys * kRowBytes;
  // Whether queries stay in registers; else they are read from shared memory for each block of keys.
  static constexpr bool kHoldsQueries = kColumns <= 128;
  static constexpr bool kMerges = true;  // whether a block of threads processes several splits of its rows
  static constexpr int kQueryBytes = kRows * kRowBytes;
  // Places in shared memory: K; V; the totals of O over earlier splits; queries; for the keys of two blocks, their
  // offsets in the arrays of K and V. If kHoldsQueries, queries are loaded to V's place first, and then to registers.
  static constexpr int kTotal = 2 * kOperandBytes, kTotalEnd = kTotal + kThreads * kSums * 16;
  static constexpr int kQueries = kHoldsQueries ? kOperandBytes : kTotalEnd;
  static constexpr int kOffsets = kTotalEnd + (kHoldsQueries ? 0 : kQueryBytes), kBytes = kOffsets + 4 * kKeys * 8;
  static_assert(!kHoldsQueries || kQueryBytes <= kOperandBytes);
};

// The address of chunk `chunk` of row `row` of an operand. Rows that ldmatrix reads together lie in different banks.
template <class Tile>
__device__ __forceinline__ std::uint32_t chunk_of(std::uint32_t operand, int row, int chunk) {
  return operand + row * Tile::kRowBytes + (chunk ^ (row & 7)) * 16;
}

// Loads a chunk of a row. The chunk becomes +0 past `dim` columns and in rows that do not exist. A key of an invalid
// page becomes NaN, so every row that sees the key (no mask hides it) becomes NaN. The value of this key becomes +0, so
// that no other row changes.
template <class T, bool kIsKey>
__device__ __forceinline__ void load_operand_chunk(const typename T::Storage* head, std::int64_t offset, int chunk,
                                                   int dim, bool vectors, std::uint32_t to) {
  const bool exists = offset > kZeroRow && chunk * 8 < dim;
  if (exists && vectors) {
    copy_async_16(to, head + offset + chunk * 8);
  } else {
    const auto x = exists ? AttentionGpu::load_vec8<T>(head + offset + chunk * 8, false)
                          : AttentionGpu::fill_vec8<T>(kIsKey && offset == kNoPage && chunk * 8 < dim);
    store_shared_16(to, x.v[0].v);
  }
}
// Loads a block of keys or values; `offsets` has the place of each in its array.
template <class T, class Tile, bool kIsKey>
__device__ __forceinline__ void load_operand_rows(const typename T::Storage* head, const std::int64_t* offsets, int dim,
                                                  bool vectors, std::uint32_t to) {
#pragma unroll 2
  for (int i = threadIdx.x; i < Tile::kKeys * Tile::kChunks; i += Tile::kThreads) {
    const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
    load_operand_chunk<T, kIsKey>(head, offsets[row], chunk, dim, vectors, chunk_of<Tile>(to, row, chunk));
  }
}

// Computes the probabilities of a row from its scores and its reference m (its largest score, scaled and rounded up).
template <Exp kExp>
struct MmaProbability {
  float c, m, q, addend;

  __device__ __forceinline__ MmaProbability(const AttentionReference& reference, float scale)
      : c(scale), m(reference.m), q(reference.q) {
    addend = kExp == Exp::kHardware ? -m : sub_rn(kStatsShift, reference.contributes() ? m : 0.0f);
  }
  __device__ __forceinline__ float operator()(float z) const {
    if constexpr (kExp == Exp::kHardware) {
      const float w = ex2_approx(fma_rn(z, c, addend));
      return m == -infinity() ? 0.0f : w;
    } else {
      const float w = stat_exp_portable(z > q ? z : q, c, addend);
      return is_nan(m) ? canonical_nan() : m == -infinity() || z == -infinity() ? 0.0f : w;
    }
  }
};

template <class T, class Tile, class Params = AttentionParams>
class MmaForward {
 public:
  __device__ __forceinline__ MmaForward(const Params& p, const AttentionGrid& g, unsigned char* memory)
      : p_(p), g_(g), memory_(memory), shared_(shared_address(memory)) {}

  // Processes the rows of a tile from `begin` to the end of the tile or of the sequence. Returns the first row after
  // these.
  __device__ __forceinline__ std::int64_t run(const AttentionPlace& place, std::int64_t begin) {
    const AttentionSegment segment(p_, g_, p_.cu_seqlens_q, place, begin);
    if constexpr (kMayMix<Params>) {
      if (segment.exists && p_.has_few(segment.sequence)) return segment.last;
    }
    kv_head_ = place.kv_head;
    first_key_ = last_key_ = 0;
#pragma unroll
    for (auto& sees : sees_) sees[0] = sees[1] = 0;
    begin_rows();
    // Tokens outside every sequence see no keys.
    if (segment.exists) visit(AttentionSpan(p_, segment.sequence), begin, segment.last);
    finish(segment.sequence, begin, segment.last);
    __syncthreads();  // the next segment overwrites shared memory that the current segment reads
    return segment.last;
  }

 protected:
  __device__ __forceinline__ void visit(const AttentionSpan& span, std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin / g_.group - span.q_first, last = (end - 1) / g_.group - span.q_first + 1;
    const AttentionRange queries = {first, last < span.num_queries ? last : span.num_queries};
    if (queries.empty()) return;
    const AttentionRange keys = span.keys_of(queries);
    if (keys.empty()) return;
      // A thread's rows, and the keys that they see.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t row = begin + row_of_thread(r), i = row / g_.group - span.q_first;
      if (row >= end || i >= span.num_queries) continue;
      const AttentionRange sees = span.keys_of(i);
      if (sees.empty()) continue;
      sees_[r][0] = static_cast<int>(sees.first);
      sees_[r][1] = static_cast<int>(sees.last);
    }
    first_key_ = static_cast<int>(keys.first);
    last_key_ = static_cast<int>(keys.last);
    load_queries([&](int row) {
      const std::int64_t at = begin + row, query = at / g_.group - span.q_first;
      if (at >= end || query >= span.num_queries || span.keys_of(query).empty()) return kZeroRow;
      return offset_of(p_.q, p_.cu_seqlens_q != nullptr, span.sequence, span.q_first + query) +
             (kv_head_ * g_.group + at % g_.group) * p_.q.head_stride;
    });
    walk(span);
    merge_split();
    if (p_.sinks != nullptr) merge_sinks(begin);
  }
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int quad_lane() const { return threadIdx.x % 4; }
  __device__ __forceinline__ int row_of_thread(int r) const { return threadIdx.x / 32 * 16 + lane() / 4 + 8 * r; }
  __device__ __forceinline__ float c() const { return attention_scale(p_); }
  __device__ __forceinline__ std::uint32_t keys_at() const { return shared_; }
  __device__ __forceinline__ std::uint32_t values_at() const { return shared_ + Tile::kOperandBytes; }
  __device__ __forceinline__ float4* total() const {
    return reinterpret_cast<float4*>(memory_ + Tile::kTotal) + threadIdx.x;
  }
  // Offsets of the rows of K (which = 0) or V (which = 1), for even or odd blocks of keys.
  __device__ __forceinline__ std::int64_t* offsets(int which, int parity) const {
    return reinterpret_cast<std::int64_t*>(memory_ + Tile::kOffsets) + (which * 2 + parity) * Tile::kKeys;
  }

  __device__ __forceinline__ void begin_rows() {
    has_total_ = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      reference_[r] = {};
      m_[r] = -infinity();
      l_[r] = 0.0f;
      chains_[r][0] = chains_[r][1] = 0.0f;
    }
#pragma unroll
    for (int t = 0; t < Tile::kSums; ++t) sums_[t][0] = sums_[t][1] = sums_[t][2] = sums_[t][3] = 0.0f;
  }

  template <bool kIsKey>
  __device__ __forceinline__ void load_operand(const AttentionHeads& a, const std::int64_t* offsets,
                                               std::uint32_t to) const {
    load_operand_rows<T, Tile, kIsKey>(attention_head<T>(a, kv_head_), offsets,
                                       static_cast<int>(kIsKey ? p_.head_dim : p_.value_dim), g_.vectors, to);
    copy_async_commit();
  }
  __device__ __forceinline__ void locate(const AttentionSpan& span, int block) const {
    const int parity = block / Tile::kKeys % 2;
    for (int i = threadIdx.x; i < Tile::kKeys; i += Tile::kThreads) {
      const int j = block + i;
      const bool used = j < span.num_keys;  // also true for masked keys, whose products are computed
      offsets(0, parity)[i] = used ? key_offset(p_, p_.k, span, j) : kZeroRow;
      offsets(1, parity)[i] = used ? key_offset(p_, p_.v, span, j) : kZeroRow;
    }
  }

  // Loads the tile's queries. offset_of_row(row): the offset in q of a row of the tile, or kZeroRow.
  template <class OffsetOfRow>
  __device__ __forceinline__ void load_queries(OffsetOfRow&& offset_of_row) {
    const std::uint32_t to = shared_ + Tile::kQueries;
#pragma unroll 2
    for (int i = threadIdx.x; i < Tile::kRows * Tile::kChunks; i += Tile::kThreads) {
      const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
      load_operand_chunk<T, false>(in_memory(static_cast<const typename T::Storage*>(p_.q.data)), offset_of_row(row),
                                   chunk, static_cast<int>(p_.head_dim), g_.vectors, chunk_of<Tile>(to, row, chunk));
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    if constexpr (Tile::kHoldsQueries) {
#pragma unroll
      for (int step = 0; step < Tile::kSteps; ++step) queries_of(step, q_[step]);
    }
  }
  // Loads a step of 16 columns of the warp's query rows.
  __device__ __forceinline__ void queries_of(int step, std::uint32_t (&a)[4]) const {
    const int row = threadIdx.x / 32 * 16 + lane() % 16;
    load_matrices_4<false>(a, chunk_of<Tile>(shared_ + Tile::kQueries, row, 2 * step + lane() / 16));
  }

  // Processes the blocks of keys up to last_key_. The sums of the last split stay in registers.
  __device__ __forceinline__ void walk(const AttentionSpan& span) {
    int block = first_key_ / Tile::kKeys * Tile::kKeys;
    int split_end = static_cast<int>(attention_split_end(block));
    locate(span, block);
    __syncthreads();
    load_operand<true>(p_.k, offsets(0, block / Tile::kKeys % 2), keys_at());
#pragma unroll 1
    for (; block < last_key_; block += Tile::kKeys) {
      if (Tile::kMerges && block >= split_end) {
        merge_split();
        split_end = static_cast<int>(attention_split_end(block));
      }
      const int next = block + Tile::kKeys, parity = block / Tile::kKeys % 2;
      if (next < last_key_) locate(span, next);
      copy_async_wait<0>();
      __syncthreads();  // K has arrived; the previous V has been read; offsets() is ready for the next keys
      load_operand<false>(p_.v, offsets(1, parity), values_at());
      float s[Tile::kScores][4];
      multiply(s);
      cap(s);
      hide(block, s);
      raise(s);
      __syncthreads();  // all warps have read K
      if (next < last_key_) {
        load_operand<true>(p_.k, offsets(0, 1 - parity), keys_at());
      } else {
        copy_async_commit();
      }
      std::uint32_t weights[Tile::kScores][2];
      AttentionGpu::kHasHardwareExp&& p_.exp == Exp::kHardware ? probabilities<Exp::kHardware>(s, weights)
                                                               : probabilities<Exp::kPortable>(s, weights);
      copy_async_wait<1>();
      __syncthreads();  // V has arrived
      accumulate(weights);
    }
  }

  __device__ __forceinline__ void multiply(float (&s)[Tile::kScores][4]) {
#pragma unroll
    for (auto& tile : s) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      std::uint32_t a[4];
      if constexpr (!Tile::kHoldsQueries) queries_of(step, a);
#pragma unroll
      for (int tile = 0; tile < Tile::kScores; tile += 2) {
        std::uint32_t b[4];  // columns 0 ... 7 and 8 ... 15 of 8 keys, then of the next 8 keys
        const int key = tile * 8 + lane() / 16 * 8 + lane() % 8;
        load_matrices_4<false>(b, chunk_of<Tile>(keys_at(), key, 2 * step + lane() / 8 % 2));
        if constexpr (Tile::kHoldsQueries) {
          mma_m16n8k16<T>(s[tile], q_[step], b[0], b[1]);
          mma_m16n8k16<T>(s[tile + 1], q_[step], b[2], b[3]);
        } else {
          mma_m16n8k16<T>(s[tile], a, b[0], b[1]);
          mma_m16n8k16<T>(s[tile + 1], a, b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void cap(float (&s)[Tile::kScores][4]) const {
    const AttentionSoftcap softcap(p_);
    if (!softcap) return;
#pragma unroll
    for (auto& tile : s) {
#pragma unroll
      for (float& x : tile) x = softcap.score(softcap.h(x));
    }
  }

  // Sets the scores of keys that a row does not see to -Inf.
  __device__ __forceinline__ void hide(int block, float (&s)[Tile::kScores][4]) const {
    const int first = max(sees_[0][0], sees_[1][0]), last = min(sees_[0][1], sees_[1][1]);
    if (__all_sync(0xffffffffu, block >= first && block + Tile::kKeys <= last)) return;
#pragma unroll
    for (int tile = 0; tile < Tile::kScores; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = block + tile * 8 + quad_lane() * 2 + i % 2;
        if (key < sees_[i / 2][0] || key >= sees_[i / 2][1]) s[tile][i] = -infinity();
      }
    }
  }

  __device__ __forceinline__ void raise(const float (&s)[Tile::kScores][4]) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = s[0][2 * r];
#pragma unroll
      for (int tile = 0; tile < Tile::kScores; ++tile)
        most = max_nan(max_nan(most, s[tile][2 * r]), s[tile][2 * r + 1]);
      most = max_nan(most, AttentionGpu::shuffle_xor(most, 1));
      most = max_nan(most, AttentionGpu::shuffle_xor(most, 2));
      factor[r] = reference_[r].raise(c(), most);
    }
    if (__all_sync(0xffffffffu, factor[0] == 1.0f && factor[1] == 1.0f)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      chains_[r][0] = mul_rn(chains_[r][0], factor[r]);
      chains_[r][1] = mul_rn(chains_[r][1], factor[r]);
#pragma unroll
      for (auto& tile : sums_) {
        tile[2 * r] = mul_rn(tile[2 * r], factor[r]);
        tile[2 * r + 1] = mul_rn(tile[2 * r + 1], factor[r]);
      }
    }
  }

  // Turns scores into probabilities. The eight partial sums of l ("chains") add the unrounded probabilities. The
  // rounded probabilities become the A operand of P V, in steps of 16 keys.
  template <Exp kExp>
  __device__ __forceinline__ void probabilities(float (&s)[Tile::kScores][4],
                                                std::uint32_t (&weights)[Tile::kScores][2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const MmaProbability<kExp> probability(reference_[r], c());
      float groups[2][Tile::kScores / 4];
#pragma unroll
      for (int tile = 0; tile < Tile::kScores; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float w = s[tile][2 * r + i] = probability(s[tile][2 * r + i]);
          groups[i][tile / 4] = tile % 4 == 0 ? w : add_rn(groups[i][tile / 4], w);
        }
        weights[tile][r] = T::pack(s[tile][2 * r], s[tile][2 * r + 1]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = add_rn(groups[i][0], groups[i][1]);
        if constexpr (Tile::kScores == 16) sum = add_rn(sum, add_rn(groups[i][2], groups[i][3]));
        chains_[r][i] = add_rn(chains_[r][i], sum);
      }
    }
  }

  __device__ __forceinline__ void accumulate(const std::uint32_t (&weights)[Tile::kScores][2]) {
#pragma unroll
    for (int step = 0; step < Tile::kKeys / 16; ++step) {
      const std::uint32_t a[4] = {weights[2 * step][0], weights[2 * step][1], weights[2 * step + 1][0],
                                  weights[2 * step + 1][1]};
#pragma unroll
      for (int tile = 0; tile < Tile::kSums; tile += 2) {
        std::uint32_t b[4];  // keys 0 ... 7 and 8 ... 15 of 8 columns, then of the next 8
        const int key = step * 16 + lane() % 16;
        load_matrices_4<true>(b, chunk_of<Tile>(values_at(), key, tile + lane() / 16));
        mma_m16n8k16<T>(sums_[tile], a, b[0], b[1]);
        mma_m16n8k16<T>(sums_[tile + 1], a, b[2], b[3]);
      }
    }
  }

  // Merges the sums of the current split into the totals over earlier splits.
  __device__ __forceinline__ void merge_split() {
    float before[2], of_split[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float l = add_rn(chains_[r][0], chains_[r][1]);
      l = add_rn(l, AttentionGpu::shuffle_xor(l, 1));
      l = add_rn(l, AttentionGpu::shuffle_xor(l, 2));
      const AttentionMerge merge(m_[r], reference_[r].m);
      before[r] = merge.factor;
      of_split[r] = merge.factor_of_split;
      l_[r] = merge(l_[r], l);
      m_[r] = merge.m;
      reference_[r] = {};
      chains_[r][0] = chains_[r][1] = 0.0f;
    }
#pragma unroll
    for (int tile = 0; tile < Tile::kSums; ++tile) {
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (has_total_) x = total()[tile * Tile::kThreads];
      x.x = fma_rn(x.x, before[0], mul_rn(sums_[tile][0], of_split[0]));
      x.y = fma_rn(x.y, before[0], mul_rn(sums_[tile][1], of_split[0]));
      x.z = fma_rn(x.z, before[1], mul_rn(sums_[tile][2], of_split[1]));
      x.w = fma_rn(x.w, before[1], mul_rn(sums_[tile][3], of_split[1]));
      total()[tile * Tile::kThreads] = x;
      sums_[tile][0] = sums_[tile][1] = sums_[tile][2] = sums_[tile][3] = 0.0f;
    }
    has_total_ = true;
  }

  // Merges the sink of each row's head into the row. Only rows that see a key use the result.
  __device__ __forceinline__ void merge_sinks(std::int64_t begin) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t head = kv_head_ * g_.group + (begin + row_of_thread(r)) % g_.group;
      const AttentionMerge merge = attention_sink<AttentionGpu>(p_, head).into(&m_[r], &l_[r]);
#pragma unroll 4
      for (int tile = 0; tile < Tile::kSums; ++tile) {
        float2* sums = reinterpret_cast<float2*>(total() + tile * Tile::kThreads) + r;
        *sums = make_float2(merge(sums->x, 0.0f), merge(sums->y, 0.0f));
      }
    }
  }

  __device__ __forceinline__ void finish(std::int64_t sequence, std::int64_t begin, std::int64_t end) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t row = begin + row_of_thread(r);
      if (row >= end) continue;
      const std::int64_t token = row_of(p_, sequence, row / g_.group), head = kv_head_ * g_.group + row % g_.group;
      const bool used = sees_[r][1] != 0, fails = attention_fails(m_[r], used);
      if (p_.lse != nullptr && quad_lane() == 0) {
        p_.lse[lse_index(p_, sequence, row / g_.group, head)] = fails  ? canonical_nan()
                                                                : used ? attention_lse(m_[r], l_[r])
                                                                       : -infinity();
      }
      const float inverse = used ? div_rn(1.0f, l_[r]) : 0.0f;
      auto* to = static_cast<typename T::Storage*>(p_.out) + (token * p_.num_q_heads + head) * p_.value_dim;
#pragma unroll
      for (int tile = 0; tile < Tile::kSums; ++tile) {
        const int column = tile * 8 + quad_lane() * 2;
        if (column >= p_.value_dim) continue;
        float x[2] = {0.0f, 0.0f};
        if (used) {
          const float4 sum = total()[tile * Tile::kThreads];
          x[0] = fails ? canonical_nan() : attention_output(r == 0 ? sum.x : sum.z, inverse);
          x[1] = fails ? canonical_nan() : attention_output(r == 0 ? sum.y : sum.w, inverse);
        }
        const std::uint32_t pair = T::store(x[0]) | std::uint32_t{T::store(x[1])} << 16;
        if (reinterpret_cast<std::uintptr_t>(p_.out) % 4 == 0) {
          *reinterpret_cast<std::uint32_t*>(to + column) = pair;
        } else {
          to[column] = static_cast<typename T::Storage>(pair);
          to[column + 1] = static_cast<typename T::Storage>(pair >> 16);
        }
      }
    }
  }

  const Params& p_;
  const AttentionGrid& g_;
  unsigned char* memory_;
  std::uint32_t shared_;
  std::int64_t kv_head_ = 0;
  int first_key_ = 0, last_key_ = 0;
  int sees_[2][2];                   // the range of keys that each of a thread's rows sees
  AttentionReference reference_[2];  // the references of the current split
  float m_[2], l_[2];                // totals of m and l over earlier splits
  bool has_total_ = false;
  float chains_[2][2];          // for each row, two of the eight chains of l: keys 2 t and 2 t + 1 of every eight keys,
                                // t = lane % 4
  float sums_[Tile::kSums][4];  // O of the current split
  std::uint32_t q_[Tile::kHoldsQueries ? Tile::kSteps : 1][4];
};

template <class T, class Tile, class Params>
__global__ void __launch_bounds__(Tile::kThreads)
    attention_mma_kernel(const __grid_constant__ Params p, const __grid_constant__ AttentionGrid g) {
  extern __shared__ __align__(128) unsigned char memory[];
  if constexpr (kMayMix<Params>) allow_next_kernel();
  const AttentionPlace place(p, g, blockIdx.x, Tile::kRows);
  MmaForward<T, Tile, Params> forward(p, g, memory);
#pragma unroll 1
  for (std::int64_t begin = place.first; begin < place.last;) begin = forward.run(place, begin);
}

template <class T, class Tile, class Params>
void launch_attention_mma(const Params& p, bool vectors, cudaStream_t stream) {
  const AttentionGrid g = attention_query_grid(p, Tile::kRows, vectors);
  allow_shared_memory<attention_mma_kernel<T, Tile, Params>>();
  const unsigned blocks = checked_blocks(attention_blocks(p, g), "attention");
  attention_mma_kernel<T, Tile, Params><<<blocks, Tile::kThreads, Tile::kBytes, stream>>>(p, g);
}

template <class T, class Params>
void run_attention_mma(const Params& p, bool vectors, cudaStream_t stream) {
  if (p.head_dim <= 64) {
    launch_attention_mma<T, MmaTile<64>>(p, vectors, stream);
  } else if (p.head_dim <= 128) {
    launch_attention_mma<T, MmaTile<128>>(p, vectors, stream);
  } else {
    launch_attention_mma<T, MmaTile<256>>(p, vectors, stream);
  }
}

}  // namespace
}  // namespace rlk::cuda
