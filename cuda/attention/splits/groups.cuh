// The forward of attention for sequences with few queries and a shared prefix. A group is the sequences that share a
// prefix. This file computes the splits of keys that lie in the shared pages of a group. A block of threads computes
// one split for 64 rows of the group, which may belong to several sequences. So pages are read once for 64 rows. The
// results are bit-identical to those of rows.cuh, and are stored at the same addresses. The code that computes a tile
// is in forward_mma.cuh.
#pragma once

#include "../../common/dependent_launch.cuh"
#include "../forward_mma.cuh"
#include "rows.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

template <int kColumns_>
struct GroupTile : MmaTile<kColumns_> {
  using Mma = MmaTile<kColumns_>;
  static constexpr bool kMerges = false;
  static constexpr int kQueries = (Mma::kHoldsQueries ? 1 : 2) * Mma::kOperandBytes;
  static constexpr int kOffsets = 2 * Mma::kOperandBytes + (Mma::kHoldsQueries ? 0 : Mma::kQueryBytes);
  static constexpr int kBytes = kOffsets + 4 * Mma::kKeys * 8;
};

// The grid: tiles of rows of all groups. The tiles of group g have numbers from floor(first row / kRows) + g on.
template <class Tile>
struct GroupGrid {
  std::int64_t splits;  // the most splits that a group can share
  std::int64_t tiles, blocks;

  explicit GroupGrid(const AttentionParams& p) : splits(attention_splits(p.page_size * p.max_prefix_pages)) {
    const std::int64_t rows = attention_rows(p) * (p.num_q_heads / p.num_kv_heads);
    tiles = rows / Tile::kRows + p.num_groups;
    blocks = splits * p.num_kv_heads * tiles;
  }
};

// The job of a block of threads: one split, and up to kRows rows of a group. A row is one head of a query. The rows of
// a job may belong to several sequences.
template <int kRows>
class GroupJob {
 public:
  // Finds the job of block `block`. `splits`: GroupGrid::splits. Returns whether the block has rows and a shared split.
  // All lanes of a warp call this function.
  __device__ __forceinline__ bool find(const AttentionParams& p, const SplitCall& call, unsigned block,
                                       unsigned splits) {
    split = block % splits;
    const unsigned of_heads = block / splits, at = of_heads / call.kv_heads;
    kv_head = static_cast<int>(of_heads % call.kv_heads);
    heads = static_cast<int>(call.group);
    std::int64_t low = 0, high = p.num_groups;  // finds the last group that begins at or before the tile
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (first_tile(p, middle) <= at ? low : high) = middle;
    }
    group = low;
    first = clamp_to(p.group_offsets[group], 0, p.num_sequences);
    last = clamp_to(p.group_offsets[group + 1], first, p.num_sequences);
    if (first >= last) return false;
    const AttentionSpan span(p, first);
    if (span.group != group || split >= shared_splits(p, span)) return false;
    first_place = place_of_sequence(p, first);
    first_row = (at - first_tile(p, group)) * kRows;
    last_row = (place_of_sequence(p, last) - first_place) * heads;
    return first_row >= 0 && first_row < last_row;
  }
  // Returns the range of all keys that row `number` of the tile sees (that no mask hides), or an empty range if the row
  // sees no key of the split. Sets *offset to the offset of the row's query in q, or to kZeroRow if there is no query.
  __device__ __forceinline__ AttentionRange row(const AttentionParams& p, int number, std::int64_t* offset) const {
    *offset = kZeroRow;
    const std::int64_t row = first_row + number, place = first_place + row / heads;
    if (row >= last_row) return {0, 0};
    const bool packed = p.cu_seqlens_q != nullptr;
    std::int64_t sequence, token = place;  // token of q in its sequence or, if packed, in q
    if (packed) {
      sequence = min(first + sequence_of(p.cu_seqlens_q + first, last - first, place), last - 1);
    } else {
      sequence = place / p.q_tokens;
      token = place % p.q_tokens;
    }
    *offset = offset_of(p.q, packed, sequence, token) + (kv_head * heads + row % heads) * p.q.head_stride;
    const AttentionSpan span(p, sequence);
    if (span.group != group || token - span.q_first >= span.num_queries) return {0, 0};
    const AttentionRange keys = span.keys_of(token - span.q_first);
    if (keys.empty() || keys.first >= attention_split_begin(split + 1) || keys.last <= attention_split_begin(split)) {
      return {0, 0};
    }
    return keys;
  }
  // The index of a row's sums among the sums of all rows and splits.
  __device__ __forceinline__ std::int64_t index(const AttentionParams& p, const SplitCall& call, int number) const {
    const std::int64_t row = first_row + number;
    return ((first_place + row / heads) * p.num_q_heads + kv_head * heads + row % heads) * call.splits + split;
  }

  unsigned split;
  int kv_head, heads;               // heads: number of query heads per key head
  std::int64_t group, first, last;  // number of the group; range of its sequences
  std::int64_t first_place, first_row, last_row;

 private:
  // Returns the index of a sequence's first query among the queries of all sequences.
  static __device__ __forceinline__ std::int64_t place_of_sequence(const AttentionParams& p, std::int64_t sequence) {
    if (p.cu_seqlens_q == nullptr) return sequence * p.q_tokens;
    return clamp_to(p.cu_seqlens_q[sequence], 0, p.q_tokens);
  }
  __device__ __forceinline__ std::int64_t first_tile(const AttentionParams& p, std::int64_t of_group) const {
    const std::int64_t sequence = clamp_to(p.group_offsets[of_group], 0, p.num_sequences);
    return place_of_sequence(p, sequence) * heads / kRows + of_group;
  }
};

// Returns the range of keys of a split that the rows of a block of threads see together. [least, most) is the range
// that this thread's rows see. `memory` is shared memory for two ints per warp.
template <int kWarps>
__device__ __forceinline__ AttentionRange keys_of_block(int* memory, unsigned split, int least, int most) {
  least = __reduce_min_sync(~0u, least);
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) {
    memory[threadIdx.x / 32] = least;
    memory[kWarps + threadIdx.x / 32] = most;
  }
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    least = min(least, memory[warp]);
    most = max(most, memory[kWarps + warp]);
  }
  __syncthreads();  // so the caller may overwrite `memory`
  return {max(std::int64_t{least}, attention_split_begin(split)),
          min(std::int64_t{most}, attention_split_begin(split + 1))};
}

template <class T, class Tile>
class GroupRows : MmaForward<T, Tile> {
 public:
  __device__ __forceinline__ GroupRows(const AttentionParams& p, const AttentionGrid& g, const SplitCall& call,
                                       unsigned char* memory)
      : MmaForward<T, Tile>(p, g, memory), call_(call) {}

  __device__ __forceinline__ void run(unsigned block, unsigned splits) {
    if (!job_.find(p_, call_, block, splits)) return;
    this->kv_head_ = job_.kv_head;
    int least = INT32_MAX, most = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      std::int64_t offset;
      const AttentionRange keys = job_.row(p_, this->row_of_thread(r), &offset);
      // load_queries() reads these offsets of queries. Later walk() stores offsets of keys in the same memory.
      if (this->quad_lane() == 0) this->offsets(0, 0)[this->row_of_thread(r)] = offset;
      sees_[r][0] = static_cast<int>(keys.first);
      sees_[r][1] = static_cast<int>(keys.last);
      if (keys.empty()) continue;
      least = min(least, sees_[r][0]);
      most = max(most, sees_[r][1]);
    }
    const AttentionRange keys =
        keys_of_block<Tile::kWarps>(reinterpret_cast<int*>(this->memory_), job_.split, least, most);
    if (keys.empty()) return;
    this->first_key_ = static_cast<int>(keys.first);
    this->last_key_ = static_cast<int>(keys.last);
    this->begin_rows();
    this->load_queries([rows = this->offsets(0, 0)](int row) { return rows[row]; });
    this->walk(AttentionSpan(p_, job_.first));
    store();
  }

 private:
  using Rows = MmaForward<T, Tile>;
  using Rows::p_, Rows::sees_, Rows::reference_, Rows::chains_, Rows::sums_;

  // Stores the sums of the split for those rows that see any of its keys. The merge reads no sums of other rows.
  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float l = add_rn(chains_[r][0], chains_[r][1]);
      l = add_rn(l, AttentionGpu::shuffle_xor(l, 1));
      l = add_rn(l, AttentionGpu::shuffle_xor(l, 2));
      if (sees_[r][1] == 0) continue;
      const std::int64_t at = job_.index(p_, call_, this->row_of_thread(r));
      if (this->quad_lane() == 0) {
        *reinterpret_cast<float2*>(call_.rows + at * 2) = make_float2(reference_[r].m, l);
      }
#pragma unroll
      for (int tile = 0; tile < Tile::kSums; ++tile) {
        const int column = tile * 8 + this->quad_lane() * 2;
        if (column >= p_.value_dim) continue;
        *reinterpret_cast<float2*>(call_.sums + at * p_.value_dim + column) =
            make_float2(sums_[tile][2 * r], sums_[tile][2 * r + 1]);
      }
    }
  }

  const SplitCall& call_;
  GroupJob<Tile::kRows> job_;
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    attention_group_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ AttentionGrid g,
                           const __grid_constant__ SplitCall call, unsigned splits) {
  extern __shared__ __align__(128) unsigned char memory[];
  allow_next_kernel();
  GroupRows<T, Tile>(p, g, call, memory).run(blockIdx.x, splits);
}

template <class T, class Tile>
void launch_groups(const AttentionParams& p, const SplitCall& call, bool vectors, cudaStream_t stream) {
  const GroupGrid<Tile> grid(p);
  if (grid.blocks == 0) return;
  allow_shared_memory<attention_group_kernel<T, Tile>>();
  attention_group_kernel<T, Tile><<<checked_blocks(grid.blocks, "attention"), Tile::kThreads, Tile::kBytes, stream>>>(
      p, attention_query_grid(p, Tile::kRows, vectors), call, static_cast<unsigned>(grid.splits));
}

}  // namespace
}  // namespace rlk::cuda
