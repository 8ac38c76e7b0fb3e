// attention, forward, of few queries a sequence by mma.sync, for SM80 and later: decode, and short chunks behind a cache. A
// block has 16 rows, each a query with one of the heads that share a key head, and one canonical split of their keys; a
// second kernel merges the splits. Four warps share a block of keys: each scores 32 of them, and sums a quarter of V's
// columns, since a chain over keys cannot be dealt out. One block of K and one of V are on their way by cp.async, so that
// three blocks of threads fit a multiprocessor and hide each other's waits. Bound by HBM; numbers: README.md.
#pragma once

#include "../common/dependent_launch.cuh"
#include "forward_mma.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

template <int kColumns_>
struct SplitTile {
  static constexpr int kColumns = kColumns_, kRows = 16, kWarps = 4, kThreads = 128;
  static constexpr int kKeys = attention_block(kColumns), kGroups = kKeys / 32;
  static constexpr int kSteps = kColumns / 16,
                       kShare = kColumns / kWarps / 8;  // steps of a score; tiles of a warp's sums
  static constexpr int kRowBytes = kColumns * 2, kChunks = kColumns / 8;
  static constexpr int kOperandBytes = kKeys * kRowBytes;
  // K and V; where keys lie (K's and V's of two blocks); probabilities; maxima, sums and factors.
  static constexpr int kValuesAt = kOperandBytes, kOffsetsAt = 2 * kOperandBytes,
                       kWeightsAt = kOffsetsAt + 4 * kKeys * 8;
  static constexpr int kMaximaAt = kWeightsAt + kKeys / 16 * 512, kSumsAt = kMaximaAt + kWarps * 16 * 4;
  static constexpr int kFactorsAt = kSumsAt + kGroups * 16 * 8 * 4, kBytes = kFactorsAt + 16 * 4;
  static_assert(kRows * kRowBytes <= kOperandBytes);  // queries pass through V's memory
};

// Partial results: of row (token, head) and split s, m and l at [row][s][2], O at [row][s][head_dim].
struct SplitCall {
  std::int32_t tiles;   // of rows: of a sequence, or, packed, slots of all
  std::int32_t splits;  // that any sequence may have
  float* rows;
  float* sums;
};

// Packed queries: rows of sequence s begin at slot floor(first row / 16) + s, so that no sum over the others is needed.
__device__ __forceinline__ std::int64_t first_row_slot(const AttentionParams& p, std::int64_t group,
                                                       std::int64_t sequence) {
  return clamp_to(p.cu_seqlens_q[sequence], 0, p.q_tokens) * group / 16 + sequence;
}

template <class T, class Tile>
class SplitRows {
 public:
  __device__ __forceinline__ SplitRows(const AttentionParams& p, const SplitCall& call, unsigned char* memory,
                                       bool vectors)
      : p_(p), call_(call), memory_(memory), shared_(shared_address(memory)), vectors_(vectors) {
    const bool shifts = p.page_size > 0 && (p.page_size & (p.page_size - 1)) == 0 && p.page_size < INT32_MAX;
    same_places_ = p.k.sequence_stride == p.v.sequence_stride && p.k.token_stride == p.v.token_stride;
    page_shift_ = shifts ? __ffs(static_cast<int>(p.page_size)) - 1 : -1;
  }

  __device__ __forceinline__ void run() {
    const int group = static_cast<int>(p_.num_q_heads / p_.num_kv_heads);
    const int split = blockIdx.x % call_.splits;
    std::int64_t at = blockIdx.x / call_.splits, sequence = 0, first_row;
    kv_head_ = at % p_.num_kv_heads;
    at /= p_.num_kv_heads;
    if (p_.num_sequences == 0) return;  // there are no offsets to look at
    if (p_.cu_seqlens_q != nullptr) {
      std::int64_t low = 0, high = p_.num_sequences;  // the last sequence that begins no later
      while (high - low > 1) {
        const std::int64_t middle = (low + high) / 2;
        (first_row_slot(p_, group, middle) <= at ? low : high) = middle;
      }
      sequence = low;
      first_row = (at - first_row_slot(p_, group, low)) * Tile::kRows;
    } else {
      sequence = at / call_.tiles;
      first_row = at % call_.tiles * Tile::kRows;
    }
    const AttentionSpan span(p_, sequence);
    if (first_row < 0 || first_row >= span.num_queries * group) return;
    const std::int64_t last_row = min(first_row + Tile::kRows, span.num_queries * group);
    const AttentionRange keys = span.keys_of(AttentionRange{first_row / group, (last_row - 1) / group + 1});
    first_key_ = static_cast<int>(max(keys.first, attention_split_begin(split)));
    last_key_ = static_cast<int>(min(keys.last, attention_split_begin(split + 1)));
    if (first_key_ >= last_key_) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t row = first_row + lane() / 4 + 8 * r;
      const AttentionRange sees = row < last_row ? span.keys_of(row / group) : AttentionRange{0, 0};
      sees_[r][0] = static_cast<int>(sees.first);
      sees_[r][1] = static_cast<int>(sees.last);
    }
    common_[0] = static_cast<int>(span.keys_of((last_row - 1) / group).first);
    common_[1] = static_cast<int>(span.keys_of(first_row / group).last);
    k_head_ = attention_head<T>(p_.k, kv_head_);
    v_head_ = attention_head<T>(p_.v, kv_head_);
    asm volatile("" : "+l"(k_head_), "+l"(v_head_));  // computed once
    walk(span, first_row, last_row, group);
    store(span, first_row, last_row, group, split);
  }

 private:
  static constexpr int kAhead = 2;  // steps that operands are read ahead of their products

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ std::uint32_t keys_at() const { return shared_; }
  __device__ __forceinline__ std::uint32_t values_at() const { return shared_ + Tile::kValuesAt; }
  // Where the rows of K (0) or V (1) lie, of even or odd blocks.
  __device__ __forceinline__ std::int64_t* offsets(int which, int parity) const {
    return reinterpret_cast<std::int64_t*>(memory_ + Tile::kOffsetsAt) + (which * 2 + parity) * Tile::kKeys;
  }
  __device__ __forceinline__ float* maxima() const { return reinterpret_cast<float*>(memory_ + Tile::kMaximaAt); }
  __device__ __forceinline__ float* group_sums() const { return reinterpret_cast<float*>(memory_ + Tile::kSumsAt); }
  __device__ __forceinline__ float* factors() const { return reinterpret_cast<float*>(memory_ + Tile::kFactorsAt); }

  __device__ __forceinline__ bool has_key(const AttentionSpan& span, int key) const {
    return key / Tile::kKeys * Tile::kKeys < last_key_ && key < span.num_keys;
  }
  // The page of this thread's key of a block: fetched early, since it takes as long as a row of K.
  __device__ __forceinline__ int fetch_page(const AttentionSpan& span, int block) const {
    const int key = block + threadIdx.x;
    if (p_.block_table == nullptr || threadIdx.x >= Tile::kKeys || !has_key(span, key)) return -1;
    const std::int64_t page = page_shift_ >= 0 ? key >> page_shift_ : key / p_.page_size;
    return p_.block_table[span.sequence * p_.table_stride + page];
  }
  __device__ __forceinline__ std::int64_t offset_of_key(const AttentionSpan& span, const AttentionHeads& a, int key,
                                                        int page) const {
    if (!has_key(span, key)) return kZeroRow;
    if (p_.block_table == nullptr) return offset_of(a, p_.cu_seqlens_k != nullptr, span.sequence, span.k_first + key);
    if (page < 0 || page >= p_.num_pages) return kNoPage;
    const std::int64_t place = page_shift_ >= 0 ? key & ((1 << page_shift_) - 1) : key % p_.page_size;
    return page * a.sequence_stride + place * a.token_stride;
  }
  // Whether the key is in memory.
  __device__ __forceinline__ bool locate(const AttentionSpan& span, int block, int page) const {
    if (threadIdx.x >= Tile::kKeys) return true;
    const int parity = block / Tile::kKeys % 2, key = block + threadIdx.x;
    const std::int64_t offset = offset_of_key(span, p_.k, key, page);
    offsets(0, parity)[threadIdx.x] = offset;
    offsets(1, parity)[threadIdx.x] = same_places_ ? offset : offset_of_key(span, p_.v, key, page);
    return offset > kZeroRow;
  }
  // `whole`: all of the block's rows are in memory.
  template <bool kIsKey>
  __device__ __forceinline__ void load(int block, bool whole) const {
    if (block < last_key_) {
      const auto* head = kIsKey ? k_head_ : v_head_;
      const std::int64_t* from = offsets(kIsKey ? 0 : 1, block / Tile::kKeys % 2);
      const std::uint32_t to = kIsKey ? keys_at() : values_at();
      if (vectors_ && whole) {
        copy_rows(head, from, to);
      } else {
        load_operand_rows<T, Tile, kIsKey>(head, from, static_cast<int>(p_.head_dim), vectors_, to);
      }
    }
    copy_async_commit();
  }
  // A thread copies the same 16 bytes of every few rows. It reads places first: behind a copy the compiler would wait for
  // each. A store among copies would cost more instructions than they have.
  __device__ __forceinline__ void copy_rows(const typename T::Storage* head, const std::int64_t* from,
                                            std::uint32_t to) const {
    constexpr int kRowsAtOnce = Tile::kThreads / Tile::kChunks;
    constexpr int kRows = Tile::kKeys / kRowsAtOnce, kAtOnce = kRows < 8 ? kRows : 8;
    const int first = threadIdx.x / Tile::kChunks, chunk = threadIdx.x % Tile::kChunks;
    if (chunk * 8 >= p_.head_dim) return;
    const auto* column = head + chunk * 8;
#pragma unroll
    for (int i = 0; i < kRows; i += kAtOnce) {
      std::int64_t offset[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) offset[j] = from[first + (i + j) * kRowsAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        copy_async_16(chunk_of<Tile>(to, first + (i + j) * kRowsAtOnce, chunk), column + offset[j]);
      }
    }
  }
  // Columns past head_dim, which no copy reaches.
  __device__ __forceinline__ void clear_columns() const {
    const int begin = static_cast<int>(p_.head_dim) / 8;
    for (int row = threadIdx.x; row < 2 * Tile::kKeys; row += Tile::kThreads) {
      for (int chunk = begin; chunk < Tile::kChunks; ++chunk) {
        store_shared_16(chunk_of<Tile>(shared_, row, chunk), make_uint4(0, 0, 0, 0));
      }
    }
  }

  __device__ __forceinline__ void load_queries(const AttentionSpan& span, std::int64_t first, std::int64_t last,
                                               int group) {
    const bool packed = p_.cu_seqlens_q != nullptr;
    const auto* data = in_memory(static_cast<const typename T::Storage*>(p_.q.data));
    for (int i = threadIdx.x; i < Tile::kRows * Tile::kChunks; i += Tile::kThreads) {
      const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
      const std::int64_t at = first + row;
      std::int64_t offset = kZeroRow;
      if (at < last) {
        offset = offset_of(p_.q, packed, span.sequence, span.q_first + at / group) +
                 (kv_head_ * group + at % group) * p_.q.head_stride;
      }
      load_operand_chunk<T, false>(data, offset, chunk, static_cast<int>(p_.head_dim), vectors_,
                                   chunk_of<Tile>(values_at(), row, chunk));
    }
    copy_async_commit();
  }

  __device__ __forceinline__ void walk(const AttentionSpan& span, std::int64_t first_row, std::int64_t last_row,
                                       int group) {
    reference_[0] = reference_[1] = {};
    chain_ = 0.0f;
#pragma unroll
    for (auto& tile : sums_) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
    int block = first_key_ / Tile::kKeys * Tile::kKeys;
    const int first_page = fetch_page(span, block);
    int page = fetch_page(span, block + Tile::kKeys);  // of the next block
    if (p_.head_dim < Tile::kColumns) {
      clear_columns();
      __syncthreads();
    }
    load_queries(span, first_row, last_row, group);
    bool whole = __syncthreads_and(locate(span, block, first_page));
    load<true>(block, whole);
    copy_async_wait<1>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      load_matrices_4<false>(q_[step], chunk_of<Tile>(values_at(), lane() % 16, 2 * step + lane() / 16));
    }
#pragma unroll 1
    for (; block < last_key_; block += Tile::kKeys) {
      copy_async_wait<0>();
      __syncthreads();  // K is there; V's memory and where the block before lay were read
      load<false>(block, whole);
      const bool in_memory = locate(span, block + Tile::kKeys, page);
      page = fetch_page(span, block + 2 * Tile::kKeys);
      float s[4][4];
      if (scores_keys()) {
        multiply(s);
        if (block < common_[0] || block + Tile::kKeys > common_[1]) hide(block, s);
        largest(s);
      }
      whole = __syncthreads_and(in_memory);  // K was read; every warp's maxima are there
      load<true>(block + Tile::kKeys, whole);
      float factor[2];
      if (Machine::kHasHardwareExp && p_.exp == Exp::kHardware) {
        raise<false>(factor);
        if (scores_keys()) probabilities<Exp::kHardware>(s);
      } else {
        raise<true>(factor);
        if (scores_keys()) probabilities<Exp::kPortable>(s);
      }
      copy_async_wait<1>();
      __syncthreads();  // V is there, and every warp's probabilities
      add_probabilities();
#pragma unroll
      for (auto& tile : sums_) {
        tile[0] = mul_rn(tile[0], factor[0]);
        tile[1] = mul_rn(tile[1], factor[0]);
        tile[2] = mul_rn(tile[2], factor[1]);
        tile[3] = mul_rn(tile[3], factor[1]);
      }
      accumulate();
    }
  }

  // A warp scores 32 keys, so that a group of keys is one warp's: of blocks of 64 keys two warps have none.
  __device__ __forceinline__ bool scores_keys() const { return warp() < Tile::kGroups; }

  __device__ __forceinline__ void multiply(float (&s)[4][4]) const {
#pragma unroll
    for (auto& tile : s) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
    std::uint32_t b[kAhead + 1][2][4];
    const auto fetch = [&](int step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = warp() * 32 + half * 16 + lane() / 16 * 8 + lane() % 8;
        load_matrices_4<false>(b[step % (kAhead + 1)][half], chunk_of<Tile>(keys_at(), key, 2 * step + lane() / 8 % 2));
      }
    };
#pragma unroll
    for (int step = 0; step < kAhead; ++step) fetch(step);
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      if (step + kAhead < Tile::kSteps) fetch(step + kAhead);
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        const std::uint32_t* of = b[step % (kAhead + 1)][tile / 2] + tile % 2 * 2;
        mma_m16n8k16<T>(s[tile], q_[step], of[0], of[1]);
      }
    }
  }
  __device__ __forceinline__ void hide(int block, float (&s)[4][4]) const {
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = block + warp() * 32 + tile * 8 + lane() % 4 * 2 + i % 2;
        if (key < sees_[i / 2][0] || key >= sees_[i / 2][1]) s[tile][i] = -infinity();
      }
    }
  }
  __device__ __forceinline__ void largest(const float (&s)[4][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = s[0][2 * r];
#pragma unroll
      for (const auto& tile : s) most = max_nan(max_nan(most, tile[2 * r]), tile[2 * r + 1]);
      most = max_nan(most, Machine::shuffle_xor(most, 1));
      most = max_nan(most, Machine::shuffle_xor(most, 2));
      if (lane() % 4 == 0) maxima()[warp() * 16 + lane() / 4 + 8 * r] = most;
    }
  }
  // By every warp for all rows.
  template <bool kClamps>
  __device__ __forceinline__ void raise(float (&factor)[2]) {
    float most[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* of_warps = maxima() + lane() / 4 + 8 * r;
      most[r] = of_warps[0];
#pragma unroll
      for (int w = 1; w < Tile::kGroups; ++w) most[r] = max_nan(most[r], of_warps[w * 16]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = reference_[r].template raise<kClamps>(attention_scale(p_.softmax_scale), most[r]);
      if (warp() == 0 && lane() % 4 == 0) factors()[lane() / 4 + 8 * r] = factor[r];
    }
  }
  template <Exp kExp>
  __device__ __forceinline__ void probabilities(float (&s)[4][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const MmaProbability<kExp> probability(reference_[r], attention_scale(p_.softmax_scale));
      float sum[2];
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float w = s[tile][2 * r + i] = probability(s[tile][2 * r + i]);
          sum[i] = tile == 0 ? w : add_rn(sum[i], w);
        }
      }
      float* to = group_sums() + (warp() * 16 + lane() / 4 + 8 * r) * 8 + lane() % 4 * 2;
      to[0] = sum[0];
      to[1] = sum[1];
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {  // as the A operand of a step of 16 keys
      const float(&a)[4] = s[2 * step], (&b)[4] = s[2 * step + 1];
      *reinterpret_cast<uint4*>(memory_ + Tile::kWeightsAt + (warp() * 2 + step) * 512 + lane() * 16) =
          make_uint4(T::pack(a[0], a[1]), T::pack(a[2], a[3]), T::pack(b[0], b[1]), T::pack(b[2], b[3]));
    }
  }
  // A thread has chain threadIdx.x % 8 of row threadIdx.x / 8.
  __device__ __forceinline__ void add_probabilities() {
    const float* sums = group_sums() + threadIdx.x;
    float sum = add_rn(sums[0], sums[128]);
    if constexpr (Tile::kGroups == 4) sum = add_rn(sum, add_rn(sums[256], sums[384]));
    chain_ = add_rn(mul_rn(chain_, factors()[threadIdx.x / 8]), sum);
  }
  __device__ __forceinline__ void accumulate() {
    constexpr int kSteps = Tile::kKeys / 16, kPairs = Tile::kShare / 2;
    std::uint32_t a[kAhead + 1][4], b[kAhead + 1][kPairs][4];
    const auto fetch = [&](int step) {
      const int slot = step % (kAhead + 1), key = step * 16 + lane() % 16;
      const uint4 x = *reinterpret_cast<const uint4*>(memory_ + Tile::kWeightsAt + step * 512 + lane() * 16);
      a[slot][0] = x.x;
      a[slot][1] = x.y;
      a[slot][2] = x.z;
      a[slot][3] = x.w;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int chunk = warp() * Tile::kShare + 2 * pair + lane() / 16;
        load_matrices_4<true>(b[slot][pair], chunk_of<Tile>(values_at(), key, chunk));
      }
    };
#pragma unroll
    for (int step = 0; step < kAhead; ++step) fetch(step);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + kAhead < kSteps) fetch(step + kAhead);
      const int slot = step % (kAhead + 1);
#pragma unroll
      for (int tile = 0; tile < Tile::kShare; ++tile) {
        const std::uint32_t* of = b[slot][tile / 2] + tile % 2 * 2;
        mma_m16n8k16<T>(sums_[tile], a[slot], of[0], of[1]);
      }
    }
  }

  __device__ __forceinline__ std::int64_t index(const AttentionSpan& span, std::int64_t row, int group,
                                                int split) const {
    const std::int64_t token = row_of(p_, span.sequence, span.q_first + row / group);
    return (token * p_.num_q_heads + kv_head_ * group + row % group) * call_.splits + split;
  }
  __device__ __forceinline__ void store(const AttentionSpan& span, std::int64_t first, std::int64_t last, int group,
                                        int split) {
    float l = chain_;
    l = add_rn(l, Machine::shuffle_xor(l, 1));
    l = add_rn(l, Machine::shuffle_xor(l, 2));
    l = add_rn(l, Machine::shuffle_xor(l, 4));
    if (threadIdx.x % 8 == 0 && first + threadIdx.x / 8 < last) {
      call_.rows[index(span, first + threadIdx.x / 8, group, split) * 2 + 1] = l;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t row = first + lane() / 4 + 8 * r;
      if (row >= last) continue;
      const std::int64_t at = index(span, row, group, split);
      if (warp() == 0 && lane() % 4 == 0) call_.rows[at * 2] = reference_[r].m;
#pragma unroll
      for (int tile = 0; tile < Tile::kShare; ++tile) {
        const int column = (warp() * Tile::kShare + tile) * 8 + lane() % 4 * 2;
        if (column >= p_.head_dim) continue;
        *reinterpret_cast<float2*>(call_.sums + at * p_.head_dim + column) =
            make_float2(sums_[tile][2 * r], sums_[tile][2 * r + 1]);
      }
    }
  }

  const AttentionParams& p_;
  const SplitCall& call_;
  unsigned char* memory_;
  std::uint32_t shared_;
  bool vectors_;
  bool same_places_;  // of K and V
  int page_shift_;    // of a page's size that is a power of 2, else -1
  std::int64_t kv_head_ = 0;
  const typename T::Storage *k_head_ = nullptr, *v_head_ = nullptr;
  int first_key_ = 0, last_key_ = 0;
  int common_[2];  // keys that every row sees
  int sees_[2][2];
  AttentionReference reference_[2];
  float chain_;
  float sums_[Tile::kShare][4];
  std::uint32_t q_[Tile::kSteps][4];
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    attention_split_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ SplitCall call,
                           bool vectors) {
  extern __shared__ __align__(128) unsigned char memory[];
  allow_next_kernel();
  SplitRows<T, Tile>(p, call, memory, vectors).run();
}

// A warp merges the splits of a row, and writes every row: also those of no sequence, and of queries not in use.
template <class T>
__global__ void __launch_bounds__(128)
    attention_merge_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ SplitCall call,
                           std::int64_t rows) {
  const std::int64_t row = blockIdx.x * std::int64_t{4} + threadIdx.x / 32;
  if (row >= rows) return;
  const std::int64_t token = row / p.num_q_heads, head = row % p.num_q_heads;
  std::int64_t sequence = 0, place = token;
  bool exists = true;
  if (p.cu_seqlens_q != nullptr) {
    sequence = sequence_of(p.cu_seqlens_q, p.num_sequences, token);
    exists = sequence < p.num_sequences && p.cu_seqlens_q[sequence] <= token;
  } else {
    sequence = token / p.q_tokens;
    place = token % p.q_tokens;
  }
  AttentionRange sees = {0, 0};
  if (exists) {
    const AttentionSpan span(p, sequence);
    const std::int64_t query = place - span.q_first;
    if (query < span.num_queries) sees = span.keys_of(query);
  }
  const bool used = !sees.empty();
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32;
  float m = -infinity(), l = 0.0f, o[8] = {};
  const std::int64_t at = row * call.splits;
  const int last = used ? static_cast<int>(attention_splits(sees.last)) : 0;
#pragma unroll 1
  for (int s = used ? static_cast<int>(attention_splits(sees.first + 1)) - 1 : 0; s < last; ++s) {
    const float2 of_split = __ldcg(reinterpret_cast<const float2*>(call.rows) + at + s);
    const AttentionMerge merge(m, of_split.x);
    const float* sums = call.sums + (at + s) * p.head_dim;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (lane + 32 * i < p.head_dim) o[i] = merge(o[i], __ldcg(sums + lane + 32 * i));
    }
    l = merge(l, of_split.y);
    m = merge.m;
  }
  const bool fails = attention_fails(m, used);
  const float inverse = fails ? canonical_nan() : div_rn(1.0f, used ? l : 1.0f);
  auto* to = static_cast<typename T::Storage*>(p.out) + row * p.head_dim;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (lane + 32 * i < p.head_dim) to[lane + 32 * i] = T::store(used ? attention_output(o[i], inverse) : 0.0f);
  }
  if (lane == 0 && p.lse != nullptr) {
    p.lse[lse_index(p, sequence, place, head)] = fails ? canonical_nan() : used ? attention_lse(m, l) : -infinity();
  }
}

// Rows of queries and heads, and the splits that any sequence may have.
inline std::int64_t split_rows(const AttentionParams& p) { return attention_rows(p) * p.num_q_heads; }

template <class T, class Tile, bool kOverlap>
void launch_attention_splits(const AttentionParams& p, bool vectors, cudaStream_t stream) {
  const std::int64_t group = p.num_q_heads / p.num_kv_heads, rows = split_rows(p);
  const bool packed = p.cu_seqlens_q != nullptr;
  SplitCall call;
  call.tiles = static_cast<std::int32_t>(packed ? p.q_tokens * group / Tile::kRows + p.num_sequences
                                                : (p.q_tokens * group + Tile::kRows - 1) / Tile::kRows);
  call.splits = static_cast<std::int32_t>(attention_splits(p.k_tokens));
  call.rows = static_cast<float*>(p.workspace);
  call.sums = call.rows + (rows * call.splits * 2 + 3) / 4 * 4;
  const std::int64_t blocks = std::int64_t{call.splits} * p.num_kv_heads * call.tiles * (packed ? 1 : p.num_sequences);
  if (blocks > 0) {
    allow_shared_memory<attention_split_kernel<T, Tile>>();
    attention_split_kernel<T, Tile>
        <<<checked_blocks(blocks, "attention"), Tile::kThreads, Tile::kBytes, stream>>>(p, call, vectors);
    check(cudaGetLastError(), "launch of attention's splits");
  }
  launch_dependent<kOverlap>(attention_merge_kernel<T>, static_cast<int>(checked_blocks((rows + 3) / 4, "attention")),
                             128, 0, stream, p, call, rows);
}

template <class T, bool kOverlap>
void run_attention_splits(const AttentionParams& p, bool vectors, cudaStream_t stream) {
  if (p.head_dim <= 64) {
    launch_attention_splits<T, SplitTile<64>, kOverlap>(p, vectors, stream);
  } else if (p.head_dim <= 128) {
    launch_attention_splits<T, SplitTile<128>, kOverlap>(p, vectors, stream);
  } else {
    launch_attention_splits<T, SplitTile<256>, kOverlap>(p, vectors, stream);
  }
}

}  // namespace
}  // namespace rlk::cuda
