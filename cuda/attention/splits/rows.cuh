// The forward of attention for sequences with few queries. A block of threads computes 16 rows for one split of the
// keys. Rule 6 of docs/numerics.md fixes where splits begin. A row is a query in one of the heads that share a key
// head. Each warp computes the scores of 32 keys. Then each warp sums its share of V's columns over all keys of the
// split, since rule 6 does not allow partial sums over a part of the keys. The headers mma.cuh (SM80 and later),
// pairs_sm90.cuh and clusters_sm90.cuh load K and V.
#pragma once

#include "../forward_mma.cuh"
#include "kernels/attention/partials.h"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// kWarps warps process kBlocks blocks of keys together. Four warps compute the scores of a block of 128 keys. A block
// of 64 keys has only two warps that compute scores.
template <int kColumns_, int kBlocks_>
struct SplitShape {
  static constexpr int kColumns = kColumns_, kRows = SplitGrid::kRows, kBlocks = kBlocks_, kWarps = 4 * kBlocks;
  static constexpr int kKeys = attention_block(kColumns), kGroups = kKeys / 32;
  static constexpr int kSteps = kColumns / 16,
                       kShare = kColumns / kWarps / 8;  // a score has kSteps steps of 16 columns; a warp sums kShare
                                                        // times 8 columns of V
  static constexpr int kRowBytes = kColumns * 2, kChunks = kColumns / 8, kOperandBytes = kKeys * kRowBytes;
  using Params = AttentionParams;
  static constexpr bool kPartial = false;     // whether the caller wants partials: the sums of single splits
  static constexpr bool kMixed = false;       // whether the kernel computes a part of a mixed batch
  static constexpr bool kShares = false;      // whether another kernel computes the splits that a group shares
  static constexpr bool kAllowsNext = false;  // whether calls without a merge let the next kernel begin early
  // Bytes of shared memory for probabilities, largest scores, sums of probabilities, and factors for rescaling.
  static constexpr int kWeightBytes = kBlocks * kKeys / 16 * 512, kMaximaBytes = kWarps * 16 * 4;
  static constexpr int kSumBytes = kBlocks * kGroups * 16 * 8 * 4, kFactorBytes = kBlocks * 16 * 4;
};

// Divides numbers below 2^31 by means of a multiplication. A block of threads needs ten dependent divisions before it
// loads its first keys. An ordinary integer division takes about twenty dependent instructions.
struct Divisor {
  std::uint32_t value = 0, factor = 0, shift = 0;

  Divisor() = default;
  RLK_HD explicit Divisor(std::uint32_t divisor) : value(divisor), shift(31) {
    while (divisor > std::uint64_t{1} << (shift - 31)) ++shift;
    if (divisor > 0) factor = static_cast<std::uint32_t>(((std::uint64_t{1} << shift) + divisor - 1) / divisor);
  }
  friend RLK_HD std::uint32_t operator/(std::uint32_t n, const Divisor& d) {
    return static_cast<std::uint32_t>(std::uint64_t{n} * d.factor >> d.shift);
  }
  friend RLK_HD std::uint32_t operator%(std::uint32_t n, const Divisor& d) { return n - n / d * d.value; }
};

// Arguments of a launch of splits. For row (token, head) and split s, m and l are stored at rows[row][s][2], and O at
// sums[row][s][value_dim].
struct SplitCall {
  std::uint32_t tiles, splits;    // as in SplitGrid; in a mixed batch `tiles` is MixedGrid::slots
  std::uint32_t stride;           // as in SplitGrid
  std::uint32_t kv_heads, group;  // `group`: query heads per key head
  bool merges;                    // as in SplitGrid
  float* rows;
  float* sums;
  std::uint32_t of_split = 0;  // blocks of threads per split if the last splits begin first, else 0
  Divisor by_tiles{tiles}, by_splits{splits}, by_stride{stride}, by_heads{kv_heads}, by_group{group};
  Divisor by_blocks{of_split}, by_slot{group + static_cast<std::uint32_t>(SplitGrid::kRows)};
};

// Returns the number of the first tile of a packed sequence s: floor(first row / kRows) + s. This formula needs no sum
// over earlier sequences, but some numbers have no rows.
__device__ __forceinline__ unsigned first_row_slot(const AttentionInput& p, unsigned group, unsigned sequence) {
  const int row = min(max(p.cu_seqlens_q[sequence], 0), static_cast<int>(p.q_tokens));
  return row * group / SplitGrid::kRows + sequence;
}

// Returns the number of shared splits of a group of sequences, which groups.cuh computes for 64 rows of the group at a
// time. The keys of these splits lie in the shared pages, and every sequence of the group has these keys. `span`: any
// sequence of the group. All lanes of a warp call this function.
__device__ __forceinline__ unsigned shared_splits(const AttentionParams& p, const AttentionSpan& span) {
  if (p.group_offsets == nullptr || span.prefix == 0) return 0;
  const std::int64_t first = clamp_to(p.group_offsets[span.group], 0, p.num_sequences);
  const std::int64_t last = clamp_to(p.group_offsets[span.group + 1], first, p.num_sequences);
  if (span.sequence < first || span.sequence >= last) return 0;
  int keys = static_cast<int>(span.prefix);
  if (p.seqused_k != nullptr) {
    for (std::int64_t i = first + threadIdx.x % 32; i < last; i += 32) keys = min(keys, p.seqused_k[i]);
    keys = max(__reduce_min_sync(~0u, keys), 0);
  }
  return static_cast<unsigned>(attention_splits(keys + std::int64_t{1}) - 1);
}

// The rows of a block of threads. Tile is a SplitShape with two additions: places in shared memory (constants like
// kWeightsAt) and the function chunk(operand, row, chunk).
template <class T, class Tile>
class SplitRows {
 public:
  using Params = typename Tile::Params;
  __device__ __forceinline__ SplitRows(const Params& p, const SplitCall& call, unsigned char* memory, bool vectors)
      : p_(p), call_(call), memory_(memory), shared_(shared_address(memory)), vectors_(vectors) {
    const bool shifts = p.page_size > 0 && (p.page_size & (p.page_size - 1)) == 0 && p.page_size < INT32_MAX;
    page_shift_ = shifts ? __ffs(static_cast<int>(p.page_size)) - 1 : -1;
  }

 protected:
  static constexpr int kAhead = 2;  // shared memory is read kAhead steps before the product

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int group_of_keys() const { return warp() % 4; }
  __device__ __forceinline__ bool scores_keys() const { return group_of_keys() < Tile::kGroups; }
  __device__ __forceinline__ float* maxima() const { return reinterpret_cast<float*>(memory_ + Tile::kMaximaAt); }
  __device__ __forceinline__ float* group_sums() const { return reinterpret_cast<float*>(memory_ + Tile::kSumsAt); }
  __device__ __forceinline__ float* factors() const { return reinterpret_cast<float*>(memory_ + Tile::kFactorsAt); }

  // Guesses the sequence of tile `at`. The guess is right if every sequence has one query.
  __device__ __forceinline__ unsigned guess_of(unsigned at) const {
    unsigned guess = at;
    if (!Tile::kMixed) guess = p_.cu_seqlens_q != nullptr ? at - at * call_.group / call_.by_slot : at / call_.by_tiles;
    return min(guess, static_cast<unsigned>(p_.num_sequences) - 1);
  }
  // query_of() returns the number of a row's query in its sequence, and head_of() returns the row's query head.
  __device__ __forceinline__ unsigned query_of(unsigned row) const { return row / call_.by_group; }
  __device__ __forceinline__ unsigned head_of(unsigned row) const {
    return kv_head_ * call_.group + row % call_.by_group;
  }
  // Prefetches entries of the lists, page numbers and queries into L2, all at once. Without the prefetch, a block of
  // threads would wait for one load after another. The prefetched addresses assume one query for each sequence. `at`:
  // the tile's number in SplitGrid or, in a mixed batch, the sequence.
  __device__ __forceinline__ void prefetch(unsigned at) const {
    const bool packed = p_.cu_seqlens_q != nullptr;
    const std::int64_t sequence = guess_of(at);
    const void* from = nullptr;
    if (lane() < 8) {
      const unsigned head = kv_head_ * call_.group + static_cast<unsigned>(lane()) % call_.by_group;
      const std::int64_t step = packed ? p_.q.token_stride : p_.q.sequence_stride;
      if (!packed || sequence < p_.q_tokens) {
        from = static_cast<const typename T::Storage*>(p_.q.data) + sequence * step + head * p_.q.head_stride;
      }
    } else if (lane() == 8) {
      from = packed ? p_.cu_seqlens_q + sequence : p_.seqused_q != nullptr ? p_.seqused_q + sequence : nullptr;
    } else if (lane() == 9) {
      from = p_.seqused_k != nullptr ? p_.seqused_k + sequence : nullptr;
    } else if (lane() == 10) {
      from = p_.cu_seqlens_k != nullptr ? p_.cu_seqlens_k + sequence : nullptr;
    } else if (p_.block_table != nullptr) {
      std::int64_t begin = attention_split_begin(split_);
      if constexpr (Tile::kPartial) begin -= p_.absent_keys;
      const std::int64_t page = (begin >> max(page_shift_, 0)) + (lane() - 11) * 32;
      if (page_shift_ >= 0 && page < p_.max_pages) from = p_.block_table + sequence * p_.table_stride + page;
    }
    if (from != nullptr) asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }
  // Finds the block's tile: its sequence, split and key head, and its first row in the sequence. Returns whether the
  // call has sequences.
  __device__ __forceinline__ bool find_tile(unsigned block, std::int64_t* first_row) {
    split_ = block % call_.by_stride;
    if constexpr (Tile::kPartial) split_ += static_cast<unsigned>(p_.first_split);
    unsigned of_heads = block / call_.by_stride;
    if (call_.of_split > 0) {
      split_ = call_.stride - 1 - block / call_.by_blocks;
      of_heads = block % call_.by_blocks;
    }
    const unsigned at = of_heads / call_.by_heads;
    kv_head_ = static_cast<int>(of_heads % call_.by_heads);
    first_slot_ = at == 0;
    const unsigned guess = guess_of(at);
    // The order of the two calls matters. After allow_next_kernel() the merge may begin, and the merge reads the lists
    // of sequences. The previous kernel may write these lists, so it must have ended before.
    if (!Tile::kShares) wait_for_previous_kernel();
    if (Tile::kAllowsNext || call_.merges) allow_next_kernel();
    if (p_.num_sequences == 0) return false;
    if (warp() == 0) prefetch(at);
    if (p_.cu_seqlens_q != nullptr) {
      // Finds the tile's sequence: the last sequence that begins at or before the tile. With one query for each
      // sequence, it is sequence `guess` or `guess` - 1, and three independent loads are enough.
      const auto sequences = static_cast<unsigned>(p_.num_sequences);
      unsigned low = 0, high = sequences, slot = 0;
      if (sequences > 1) {
        const unsigned before = max(guess, 1u) - 1;
        const unsigned slot_before = first_row_slot(p_, call_.group, before),
                       middle = first_row_slot(p_, call_.group, guess);
        const unsigned after = first_row_slot(p_, call_.group, guess + 1);
        if (middle <= at && (after > at || guess + 1 == sequences)) {
          low = guess;
          high = low + 1;
          slot = middle;
        } else if (middle > at && slot_before <= at) {
          low = before;
          high = low + 1;
          slot = slot_before;
        }
      }
      if (high - low > 1 || sequences == 1) {
        while (high - low > 1) {
          const unsigned middle = (low + high) / 2;
          (first_row_slot(p_, call_.group, middle) <= at ? low : high) = middle;
        }
        slot = first_row_slot(p_, call_.group, low);
      }
      sequence_ = static_cast<int>(low);
      *first_row = (std::int64_t{at} - slot) * Tile::kRows;
    } else {
      sequence_ = static_cast<int>(at / call_.by_tiles);
      *first_row = at % call_.by_tiles * Tile::kRows;
    }
    return true;
  }
  // Finds the tile's rows and the range of the split's keys that these rows see. Returns whether the rows see any key.
  // If the rows see no key, the ranges are not valid.
  __device__ __forceinline__ bool find(const AttentionSpan& span, std::int64_t first_row) {
    first_place_ = row_of(p_, sequence_, span.q_first);
    const std::int64_t rows = span.num_queries * call_.group;
    if (!call_.merges) {
      const std::int64_t places = (places_of(span) * call_.group);
      first_row_ = last_row_ = static_cast<unsigned>(clamp_to(first_row, 0, places));
      end_row_ = static_cast<unsigned>(clamp_to(first_row + Tile::kRows, first_row_, places));
    }
    if (first_row < 0 || first_row >= rows) return false;
    first_row_ = static_cast<unsigned>(first_row);
    last_row_ = static_cast<unsigned>(min(first_row + Tile::kRows, rows));
    if constexpr (Tile::kShares) {
      split_ += shared_splits(p_, span);
      return find_keys(span) || find_next(span);
    }
    if (!find_keys(span)) last_row_ = first_row_;
    return first_row_ < last_row_;
  }
  // Finds the block's sequence, split and key head in a mixed batch; find_rows() then finds its tiles. Returns whether
  // the sequence has few queries.
  __device__ __forceinline__ bool find_sequence(unsigned block) {
    const unsigned of_slots = block / call_.by_tiles, of_splits = of_slots / call_.by_splits;
    first_row_ = block % call_.by_tiles * Tile::kRows;
    split_ = of_slots % call_.by_splits;
    kv_head_ = static_cast<int>(of_splits % call_.by_heads);
    sequence_ = static_cast<int>(of_splits / call_.by_heads);
    if (warp() == 0) prefetch(of_splits / call_.by_heads);
    const AttentionRange q = attention_place(p_.cu_seqlens_q, sequence_, p_.q_tokens);
    first_place_ = q.first;
    return q.last - q.first <= p_.few;
  }
  // Selects the tile whose rows begin at `first`. Returns whether the tile has rows that see a key of the split.
  __device__ __forceinline__ bool find_rows(const AttentionSpan& span, unsigned first) {
    const auto rows = static_cast<unsigned>(span.num_queries) * call_.group;
    first_row_ = first;
    end_row_ = min(first + Tile::kRows, static_cast<unsigned>(places_of(span)) * call_.group);
    last_row_ = max(first, min(end_row_, rows));
    if (first_row_ < last_row_ && !find_keys(span)) last_row_ = first_row_;
    return first_row_ < last_row_;
  }
  // Finds the range of keys of the split that the rows see together. Returns whether it has any keys.
  __device__ __forceinline__ bool find_keys(const AttentionSpan& span) {
    AttentionRange keys = span.keys_of(AttentionRange{query_of(first_row_), query_of(last_row_ - 1) + 1});
    if constexpr (Tile::kPartial) keys = span.here(keys);
    first_key_ = static_cast<int>(max(keys.first, attention_split_begin(split_)));
    last_key_ = static_cast<int>(min(keys.last, attention_split_begin(split_ + 1)));
    return first_key_ < last_key_;
  }
  // Finds the next split of this block of threads whose keys the rows see. Returns whether such a split exists.
  __device__ __forceinline__ bool find_next(const AttentionSpan& span) {
    for (split_ += call_.stride; split_ < call_.splits; split_ += call_.stride) {
      if (find_keys(span)) return true;
    }
    return false;
  }
  // Returns how many tokens of q a sequence has, in use or not. With packed q, the last sequence gets all tokens up to
  // the end of q.
  __device__ __forceinline__ std::int64_t places_of(const AttentionSpan& span) const {
    if (p_.cu_seqlens_q == nullptr) return p_.q_tokens;
    if (!Tile::kMixed && sequence_ + 1 == p_.num_sequences) return p_.q_tokens - span.q_first;
    return clamp_to(p_.cu_seqlens_q[sequence_ + 1], span.q_first, p_.q_tokens) - span.q_first;
  }
  __device__ __forceinline__ void begin(const AttentionSpan& span) {
    see_keys(span);
    reference_[0] = reference_[1] = {};
    chain_ = 0.0f;
#pragma unroll
    for (auto& tile : sums_) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
  }
  __device__ __forceinline__ void see_keys(const AttentionSpan& span) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned row = first_row_ + lane() / 4 + 8 * r;
      const AttentionRange sees = row < last_row_ ? span.keys_of(query_of(row)) : AttentionRange{0, 0};
      sees_[r][0] = static_cast<int>(sees.first);
      sees_[r][1] = static_cast<int>(sees.last);
    }
    common_[0] = static_cast<int>(span.keys_of(query_of(last_row_ - 1)).first);
    common_[1] = static_cast<int>(span.keys_of(query_of(first_row_)).last);
  }

  // Whether row r of a lane may be in use. If the tile has at most eight rows in use, the second rows of all lanes are
  // not in use. Results of rows that are not in use are never stored.
  __device__ __forceinline__ bool has_row(int r) const { return r == 0 || last_row_ - first_row_ > 8; }
  __device__ __forceinline__ bool has_key(const AttentionSpan& span, int key) const {
    if (Tile::kPartial && key >= span.last_key) return false;
    return key / Tile::kKeys * Tile::kKeys < last_key_ && key < span.num_keys;
  }
  // Returns a key's entry in the block table. The caller ensures that the table and the entry exist.
  __device__ __forceinline__ int page_of_key(const AttentionSpan& span, int key) const {
    const int number = number_in_table(span, key);
    const std::int64_t page = page_shift_ >= 0 ? number >> page_shift_ : number / p_.page_size;
    const std::int32_t* row = key < span.prefix ? p_.prefix_table + span.group * p_.prefix_stride
                                                : p_.block_table + span.sequence * p_.table_stride;
    return row[page];
  }
  // Returns the key's number among the keys of its own table: the shared prefix's table or the sequence's table.
  __device__ __forceinline__ int number_in_table(const AttentionSpan& span, int key) const {
    if (key < span.prefix) return key;
    const int absent = Tile::kPartial ? static_cast<int>(p_.absent_keys) : 0;
    return key - static_cast<int>(span.prefix) - absent;
  }
  __device__ __forceinline__ bool is_page(int page) const { return page >= 0 && page < p_.num_pages; }

  // Starts asynchronous copies of the queries to the kRows * kRowBytes bytes at `to`.
  template <int kThreads>
  __device__ __forceinline__ void load_queries(const AttentionSpan& span, std::uint32_t to) const {
    const bool packed = p_.cu_seqlens_q != nullptr;
    const auto* data = in_memory(static_cast<const typename T::Storage*>(p_.q.data));
    for (int i = threadIdx.x; i < Tile::kRows * Tile::kChunks; i += kThreads) {
      const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
      const unsigned at = first_row_ + row;
      std::int64_t offset = kZeroRow;
      if (at < last_row_) {
        offset = offset_of(p_.q, packed, span.sequence, span.q_first + query_of(at)) + head_of(at) * p_.q.head_stride;
      }
      load_operand_chunk<T, false>(data, offset, chunk, static_cast<int>(p_.head_dim), vectors_,
                                   chunk_of<Tile>(to, row, chunk));
    }
    copy_async_commit();
  }
  __device__ __forceinline__ void read_queries(std::uint32_t from) {
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      load_matrices_4<false>(q_[step], chunk_of<Tile>(from, lane() % 16, 2 * step + lane() / 16));
    }
  }

  // Computes the scores of this warp's keys, from the block of K at `keys`.
  __device__ __forceinline__ void multiply(std::uint32_t keys, float (&s)[4][4]) const {
#pragma unroll
    for (auto& tile : s) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
    std::uint32_t b[kAhead + 1][2][4];
    const auto fetch = [&](int step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = group_of_keys() * 32 + half * 16 + lane() / 16 * 8 + lane() % 8;
        load_matrices_4<false>(b[step % (kAhead + 1)][half], Tile::chunk(keys, key, 2 * step + lane() / 8 % 2));
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
    const AttentionSoftcap softcap(p_);
    if (!softcap) return;
#pragma unroll
    for (auto& tile : s) {
#pragma unroll
      for (float& x : tile) x = softcap.score(softcap.h(x));
    }
  }
  __device__ __forceinline__ void hide(int block, float (&s)[4][4]) const {
    if (block >= common_[0] && block + Tile::kKeys <= common_[1]) return;
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = block + group_of_keys() * 32 + tile * 8 + lane() % 4 * 2 + i % 2;
        if (key < sees_[i / 2][0] || key >= sees_[i / 2][1]) s[tile][i] = -infinity();
      }
    }
  }
  // Returns the largest score of the lane's row r (0 or 1) over this warp's keys. The four lanes that share the row
  // exchange their results.
  __device__ __forceinline__ float largest(const float (&s)[4][4], int r) const {
    float most = s[0][2 * r];
#pragma unroll
    for (const auto& tile : s) most = max_nan(max_nan(most, tile[2 * r]), tile[2 * r + 1]);
    most = max_nan(most, AttentionGpu::shuffle_xor(most, 1));
    return max_nan(most, AttentionGpu::shuffle_xor(most, 2));
  }
  __device__ __forceinline__ void put_largest(const float (&s)[4][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!has_row(r)) continue;
      const float most = largest(s, r);
      if (lane() % 4 == 0) maxima()[warp() * 16 + lane() / 4 + 8 * r] = most;
    }
  }
  // Updates the reference m of every row with the scores of block `which` of the current blocks. Every warp does this
  // for all rows.
  template <bool kClamps>
  __device__ __forceinline__ void raise(int which, float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = 1.0f;
      if (!has_row(r)) continue;
      const float* of_warps = maxima() + which * 64 + lane() / 4 + 8 * r;
      float most = of_warps[0];
#pragma unroll
      for (int w = 1; w < Tile::kGroups; ++w) most = max_nan(most, of_warps[w * 16]);
      factor[r] = reference_[r].template raise<kClamps>(attention_scale(p_), most);
      if (warp() == 0 && lane() % 4 == 0) factors()[which * 16 + lane() / 4 + 8 * r] = factor[r];
    }
  }
  // Where shared memory holds data of a group of 32 keys. sums_of(): the sums of probabilities of a lane's row r.
  // weights_of(): the probabilities of a step of 16 keys.
  __device__ __forceinline__ int sums_of(int group, int r) const {
    return Tile::kSumsAt + ((group * 16 + lane() / 4 + 8 * r) * 8 + lane() % 4 * 2) * 4;
  }
  __device__ __forceinline__ int weights_of(int group, int step) const {
    return Tile::kWeightsAt + (group * 2 + step) * 512 + lane() * 16;
  }
  // Turns scores into probabilities. l has eight partial sums ("chains"): a key belongs to chain key % 8. put_sums(r,
  // float2) stores what the group of 32 keys adds to chains 2 * (lane % 4) and 2 * (lane % 4) + 1. put_weights(step,
  // uint4) stores the rounded probabilities of a step.
  template <Exp kExp, class PutSums, class PutWeights>
  __device__ __forceinline__ void probabilities(const AttentionReference (&reference)[2], float (&s)[4][4],
                                                PutSums&& put_sums, PutWeights&& put_weights) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!has_row(r)) continue;
      const MmaProbability<kExp> probability(reference[r], attention_scale(p_));
      float sum[2];
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float w = s[tile][2 * r + i] = probability(s[tile][2 * r + i]);
          sum[i] = tile == 0 ? w : add_rn(sum[i], w);
        }
      }
      put_sums(r, make_float2(sum[0], sum[1]));
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {  // as the A operand of a step of 16 keys
      const float(&a)[4] = s[2 * step], (&b)[4] = s[2 * step + 1];
      put_weights(step, make_uint4(T::pack(a[0], a[1]), T::pack(a[2], a[3]), T::pack(b[0], b[1]), T::pack(b[2], b[3])));
    }
  }
  // Computes probabilities and stores them in the shared memory of this block of threads.
  template <Exp kExp>
  __device__ __forceinline__ void put_probabilities(const AttentionReference (&reference)[2], float (&s)[4][4]) const {
    const int group = warp() / 4 * Tile::kGroups + group_of_keys();
    probabilities<kExp>(
        reference, s, [&](int r, float2 x) { *reinterpret_cast<float2*>(memory_ + sums_of(group, r)) = x; },
        [&](int step, uint4 x) { *reinterpret_cast<uint4*>(memory_ + weights_of(group, step)) = x; });
  }
  // Adds the sums of probabilities of block `which` to the chains of l. Thread t of 128 has chain t % 8 of row t / 8.
  __device__ __forceinline__ void add_probabilities(int which, int thread) {
    const float* sums = group_sums() + which * Tile::kGroups * 128 + thread;
    float sum = add_rn(sums[0], sums[128]);
    if constexpr (Tile::kGroups == 4) sum = add_rn(sum, add_rn(sums[256], sums[384]));
    chain_ = add_rn(mul_rn(chain_, factors()[which * 16 + thread / 8]), sum);
  }
  // Returns l of a row: the sum of the chains in its eight threads.
  __device__ __forceinline__ float sum_of_chains() const {
    float l = chain_;
    l = add_rn(l, AttentionGpu::shuffle_xor(l, 1));
    l = add_rn(l, AttentionGpu::shuffle_xor(l, 2));
    return add_rn(l, AttentionGpu::shuffle_xor(l, 4));
  }
  // Multiplies the sums over V by the factors that follow from a block's new references.
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int tile = 0; tile < Tile::kShare; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_[tile][i] = mul_rn(sums_[tile][i], factor[i / 2]);
    }
  }
  // Adds a part of V, weighted by its probabilities, to the sums. The part lies at `values`. `which` counts the parts
  // of the current blocks; each block has kParts parts.
  template <int kParts = 1>
  __device__ __forceinline__ void accumulate(int which, std::uint32_t values) {
    constexpr int kSteps = Tile::kKeys / 16 / kParts, kPairs = (Tile::kShare + 1) / 2;
    const unsigned char* weights = memory_ + Tile::kWeightsAt + which * kSteps * 512 + lane() * 16;
    std::uint32_t a[kAhead + 1][4], b[kAhead + 1][kPairs][4];
    const auto fetch = [&](int step) {
      const int slot = step % (kAhead + 1), key = step * 16 + lane() % 16;
      const uint4 x = *reinterpret_cast<const uint4*>(weights + step * 512);
      a[slot][0] = x.x;
      a[slot][1] = x.y;
      a[slot][2] = x.z;
      a[slot][3] = x.w;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int chunk = warp() * Tile::kShare + (Tile::kShare > 1 ? 2 * pair + lane() / 16 : 0);
        load_matrices_4<true>(b[slot][pair], Tile::chunk(values, key, chunk));
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

  __device__ __forceinline__ std::int64_t index(unsigned row) const {
    std::int64_t token = first_place_ + query_of(row);
    if constexpr (Tile::kMixed) {
      if (!p_.by_token) token += sequence_ * p_.few - first_place_;
    }
    return (token * p_.num_q_heads + head_of(row)) * call_.splits + split_;
  }
  // The index of a row's partials among the partials of all splits and rows.
  __device__ __forceinline__ std::int64_t partial_index(unsigned row) const {
    const std::int64_t cells = (split_ - p_.first_split) * attention_rows(p_) * p_.num_q_heads;
    return cells + (first_place_ + query_of(row)) * p_.num_q_heads + head_of(row);
  }
  // Stores the partials of rows that see a key of the split. Partials of other rows keep the values that
  // attention_blank_kernel wrote.
  __device__ __forceinline__ void store_partials() const {
    const float l = sum_of_chains();
    const int of_stats = threadIdx.x / 8 % Tile::kRows, lane_of_row = of_stats % 8 * 4;
    const bool upper = of_stats >= 8;
    bool sees[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) sees[r] = sees_[r][0] < last_key_ && sees_[r][1] > first_key_;
    const float m = __shfl_sync(~0u, upper ? reference_[1].m : reference_[0].m, lane_of_row);
    const bool seen = __shfl_sync(~0u, upper ? sees[1] : sees[0], lane_of_row);
    if (warp() < 4 && threadIdx.x % 8 == 0 && first_row_ + of_stats < last_row_ && seen) {
      const AttentionPartial partial(m, l);
      const std::int64_t at = partial_index(first_row_ + of_stats);
      call_.rows[at * 2] = partial.m;
      call_.rows[at * 2 + 1] = partial.l;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned row = first_row_ + lane() / 4 + 8 * r;
      if (row >= last_row_ || !sees[r]) continue;
      const AttentionPartial partial(reference_[r].m, 0.0f);
      float* to = call_.sums + partial_index(row) * p_.value_dim;
#pragma unroll
      for (int tile = 0; tile < Tile::kShare; ++tile) {
        const int column = (warp() * Tile::kShare + tile) * 8 + lane() % 4 * 2;
        if (column >= p_.value_dim) continue;
        to[column] = partial.sum(sums_[tile][2 * r]);
        to[column + 1] = partial.sum(sums_[tile][2 * r + 1]);
      }
    }
  }
  // In calls without a merge: clears the outputs of tokens of q that are not in use. One block of threads also clears
  // the outputs before the first sequence, if offsets do not begin at 0.
  __device__ __forceinline__ void store_unused() const {
    if constexpr (!Tile::kPartial) {
      if (call_.merges) return;
      if (!Tile::kMixed && p_.cu_seqlens_q != nullptr && split_ == 0 && first_slot_ && sequence_ == 0) {
        clear_rows(0, static_cast<unsigned>(clamp_to(p_.cu_seqlens_q[0], 0, p_.q_tokens)) * call_.group, 0);
      }
      clear_rows(last_row_, end_row_, first_place_);
    }
  }
  __device__ __forceinline__ void clear_rows(unsigned first, unsigned end, std::int64_t place) const {
    auto* out = static_cast<typename T::Storage*>(p_.out);
    for (unsigned row = first; row < end; ++row) {
      const std::int64_t head = head_of(row), at = place + query_of(row);
      for (int column = threadIdx.x; column < p_.value_dim; column += blockDim.x) {
        out[(at * p_.num_q_heads + head) * p_.value_dim + column] = T::store(0.0f);
      }
      if (threadIdx.x == 0) put_lse(at, head, -infinity());
    }
  }
  __device__ __forceinline__ void put_lse(std::int64_t place, std::int64_t head, float lse) const {
    if (p_.lse == nullptr) return;
    const bool packed = p_.cu_seqlens_q != nullptr;
    p_.lse[lse_index(p_, sequence_, packed ? place : place - sequence_ * p_.q_tokens, head)] = lse;
  }
  // For calls without a merge: the two factors of a row's sums. Sums are multiplied by `factor`, which comes from the
  // sink, and then by `inverse` = 1 / l. finish_row() computes both factors from m and l, and stores lse. `used`:
  // whether the row sees keys.
  struct RowScale {
    float factor, inverse;  // if `factor` is negative, the row's sums count as 0
  };
  __device__ __forceinline__ RowScale finish_row(unsigned row, bool used, float m, float l) const {
    const std::int64_t head = head_of(row);
    RowScale scale = {1.0f, 0.0f};
    if (used && p_.sinks != nullptr) {
      const AttentionMerge merge = attention_sink<AttentionGpu>(p_, head).into(&m, &l);
      scale.factor = merge.only_split ? -1.0f : merge.only_before ? 1.0f : merge.factor;
    }
    const bool fails = attention_fails(m, used);
    if (!used) scale.factor = -1.0f;
    if (used) scale.inverse = fails ? canonical_nan() : div_rn(1.0f, l);
    put_lse(first_place_ + query_of(row), head, fails ? canonical_nan() : used ? attention_lse(m, l) : -infinity());
    return scale;
  }
  __device__ __forceinline__ void put_output(unsigned row, int column, const RowScale& scale, float a, float b) const {
    const std::int64_t head = head_of(row), at = first_place_ + query_of(row);
    auto* to = static_cast<typename T::Storage*>(p_.out) + (at * p_.num_q_heads + head) * p_.value_dim + column;
    const bool none = scale.factor < 0.0f;
    to[0] = T::store(attention_output(none ? 0.0f : fma_rn(a, scale.factor, 0.0f), scale.inverse));
    to[1] = T::store(attention_output(none ? 0.0f : fma_rn(b, scale.factor, 0.0f), scale.inverse));
  }
  // The threads that hold a row's chains read the row's m from shared memory; +Inf means that the row sees no key. One
  // of these threads writes the row's RowScale to shared memory.
  __device__ __forceinline__ RowScale* scales() const { return reinterpret_cast<RowScale*>(maxima() + 16); }
  __device__ __forceinline__ void put_references() const {
    if (warp() != 0 || lane() % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maxima()[lane() / 4 + 8 * r] = sees_[r][0] < sees_[r][1] ? reference_[r].m : infinity();
    }
  }
  // `thread` is 0 ... 127.
  __device__ __forceinline__ void put_scales(int thread, float l) const {
    const unsigned row = first_row_ + thread / 8;
    if (thread % 8 != 0 || row >= last_row_) return;
    const float m = maxima()[thread / 8];
    scales()[thread / 8] = finish_row(row, !(m == infinity()), m, l);
  }
  template <class Meet>
  __device__ __forceinline__ void store_outputs(const Meet& meet) const {
    const float l = sum_of_chains();
    put_references();
    meet();
    if (warp() < 4) put_scales(threadIdx.x, l);
    meet();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned row = first_row_ + lane() / 4 + 8 * r;
      if (row >= last_row_) continue;
      const RowScale scale = scales()[lane() / 4 + 8 * r];
#pragma unroll
      for (int tile = 0; tile < Tile::kShare; ++tile) {
        const int column = (warp() * Tile::kShare + tile) * 8 + lane() % 4 * 2;
        if (column < p_.value_dim) put_output(row, column, scale, sums_[tile][2 * r], sums_[tile][2 * r + 1]);
      }
    }
  }
  template <class Meet>
  __device__ __forceinline__ void store(const Meet& meet) const {
    if constexpr (Tile::kPartial) {
      return store_partials();
    } else if (!call_.merges) {
      return store_outputs(meet);
    }
    const float l = sum_of_chains();
    if (warp() < 4 && threadIdx.x % 8 == 0 && first_row_ + threadIdx.x / 8 < last_row_) {
      call_.rows[index(first_row_ + threadIdx.x / 8) * 2 + 1] = l;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned row = first_row_ + lane() / 4 + 8 * r;
      if (row >= last_row_) continue;
      const std::int64_t at = index(row);
      if (warp() == 0 && lane() % 4 == 0) call_.rows[at * 2] = reference_[r].m;
#pragma unroll
      for (int tile = 0; tile < Tile::kShare; ++tile) {
        const int column = (warp() * Tile::kShare + tile) * 8 + lane() % 4 * 2;
        if (column >= p_.value_dim) continue;
        *reinterpret_cast<float2*>(call_.sums + at * p_.value_dim + column) =
            make_float2(sums_[tile][2 * r], sums_[tile][2 * r + 1]);
      }
    }
  }

  const Params& p_;
  const SplitCall& call_;
  unsigned char* memory_;
  std::uint32_t shared_;
  bool vectors_;
  int page_shift_;  // log2 of the page size if it is a power of 2, else -1
  unsigned split_ = 0, first_row_ = 0, last_row_ = 0;
  unsigned end_row_ = 0;     // without a merge: end of the tile's rows, in use or not
  bool first_slot_ = false;  // whether the tile has number 0
  int sequence_ = 0, kv_head_ = 0;
  std::int64_t first_place_ = 0;      // index of the sequence's first token in q
  int first_key_ = 0, last_key_ = 0;  // range of the split's keys that the rows see together
  int common_[2];                     // the range of keys that every row sees
  int sees_[2][2];
  AttentionReference reference_[2];
  float chain_;
  float sums_[Tile::kShare][4];
  std::uint32_t q_[Tile::kSteps][4];
};

}  // namespace
}  // namespace rlk::cuda
