// attention, forward, for few queries a sequence: splits that lie in the shared pages of a group. A block of threads
// takes 64 rows of the group, whatever their sequences, and one split. So pages are read once for 64 rows. Results are
// those of split_rows.cuh, at the same places. The tile is that of forward_mma.cuh.
#pragma once

#include "forward_mma.cuh"
#include "split_rows.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

template <int kColumns_>
struct GroupTile : MmaTile<kColumns_> {
  using Mma = MmaTile<kColumns_>;
  static constexpr bool kMerges = false;
  static constexpr int kQueries = (Mma::kHoldsQueries ? 1 : 2) * Mma::kOperandBytes;
  static constexpr int kOffsets = 2 * Mma::kOperandBytes + (Mma::kHoldsQueries ? 0 : Mma::kQueryBytes);
  static constexpr int kBytes = kOffsets + 4 * Mma::kKeys * 8;
};

// The tiles of the groups' rows. Those of group g begin at slot floor(first row / kRows) + g.
template <class Tile>
struct GroupGrid {
  std::int64_t splits;  // the most that any group shares
  std::int64_t tiles, blocks;

  explicit GroupGrid(const AttentionParams& p) : splits(attention_splits(p.page_size * p.max_prefix_pages)) {
    const std::int64_t rows = attention_rows(p) * (p.num_q_heads / p.num_kv_heads);
    tiles = rows / Tile::kRows + p.num_groups;
    blocks = splits * p.num_kv_heads * tiles;
  }
};

template <class T, class Tile>
class GroupRows : MmaForward<T, Tile> {
 public:
  __device__ __forceinline__ GroupRows(const AttentionParams& p, const AttentionGrid& g, const SplitCall& call,
                                       unsigned char* memory)
      : MmaForward<T, Tile>(p, g, memory), call_(call) {}

  // `splits`: that of GroupGrid.
  __device__ __forceinline__ void run(unsigned block, unsigned splits) {
    split_ = block % splits;
    const unsigned of_heads = block / splits, at = of_heads / call_.kv_heads;
    kv_head_ = of_heads % call_.kv_heads;
    std::int64_t group = 0, end = p_.num_groups;  // finds the last group that begins at or before the tile
    while (end - group > 1) {
      const std::int64_t middle = (group + end) / 2;
      (first_tile(middle) <= at ? group : end) = middle;
    }
    sequences_.first = clamp_to(p_.group_offsets[group], 0, p_.num_sequences);
    sequences_.last = clamp_to(p_.group_offsets[group + 1], sequences_.first, p_.num_sequences);
    if (sequences_.empty()) return;
    const AttentionSpan span(p_, sequences_.first);
    if (span.group != group || split_ >= shared_splits(p_, span)) return;
    first_place_ = place_of_sequence(sequences_.first);
    first_row_ = (at - first_tile(group)) * Tile::kRows;
    last_row_ = (place_of_sequence(sequences_.last) - first_place_) * g_.group;
    if (first_row_ < 0 || first_row_ >= last_row_ || !find_keys(group)) return;
    this->begin_rows();
    this->load_queries([rows = this->offsets(0, 0)](int row) { return rows[row]; });
    this->walk(span);
    store();
  }

 private:
  using Rows = MmaForward<T, Tile>;
  using Rows::p_, Rows::g_, Rows::memory_, Rows::kv_head_, Rows::first_key_, Rows::last_key_, Rows::sees_;
  using Rows::reference_, Rows::chains_, Rows::sums_;

  // The place of a sequence's first query among all queries.
  __device__ __forceinline__ std::int64_t place_of_sequence(std::int64_t sequence) const {
    if (p_.cu_seqlens_q == nullptr) return sequence * p_.q_tokens;
    return clamp_to(p_.cu_seqlens_q[sequence], 0, p_.q_tokens);
  }
  __device__ __forceinline__ std::int64_t first_tile(std::int64_t group) const {
    const std::int64_t sequence = clamp_to(p_.group_offsets[group], 0, p_.num_sequences);
    return place_of_sequence(sequence) * g_.group / Tile::kRows + group;
  }
  // The token of a row's query: in its sequence's q or, if packed, in q.
  struct Place {
    std::int64_t sequence, token;
  };
  __device__ __forceinline__ Place place_of(std::int64_t row) const {
    const std::int64_t place = first_place_ + row / g_.group;
    if (p_.cu_seqlens_q == nullptr) return {place / p_.q_tokens, place % p_.q_tokens};
    const auto [first, last] = sequences_;
    return {min(first + sequence_of(p_.cu_seqlens_q + first, last - first, place), last - 1), place};
  }
  // Finds the split's keys that any row sees, and the rows' offsets in q. Returns whether there are any keys.
  __device__ __forceinline__ bool find_keys(std::int64_t group) {
    const AttentionRange split = {attention_split_begin(split_), attention_split_begin(split_ + 1)};
    int least = INT32_MAX, most = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sees_[r][0] = sees_[r][1] = 0;
      const std::int64_t row = first_row_ + this->row_of_thread(r);
      std::int64_t* offset = this->offsets(0, 0) + this->row_of_thread(r);  // until the walk has keys there
      if (this->quad_lane() == 0) *offset = kZeroRow;
      if (row >= last_row_) continue;
      const Place of = place_of(row);
      if (this->quad_lane() == 0) {
        *offset = offset_of(p_.q, p_.cu_seqlens_q != nullptr, of.sequence, of.token) +
                  (kv_head_ * g_.group + row % g_.group) * p_.q.head_stride;
      }
      const AttentionSpan span(p_, of.sequence);
      if (span.group != group || of.token - span.q_first >= span.num_queries) continue;
      const AttentionRange keys = span.keys_of(of.token - span.q_first);
      if (keys.empty() || keys.first >= split.last || keys.last <= split.first) continue;
      sees_[r][0] = static_cast<int>(keys.first);
      sees_[r][1] = static_cast<int>(keys.last);
      least = min(least, sees_[r][0]);
      most = max(most, sees_[r][1]);
    }
    int* of_warps = reinterpret_cast<int*>(memory_);
    least = __reduce_min_sync(~0u, least);
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32 == 0) {
      of_warps[threadIdx.x / 32] = least;
      of_warps[Tile::kWarps + threadIdx.x / 32] = most;
    }
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < Tile::kWarps; ++warp) {
      least = min(least, of_warps[warp]);
      most = max(most, of_warps[Tile::kWarps + warp]);
    }
    __syncthreads();  // queries pass through this memory
    first_key_ = max(least, static_cast<int>(split.first));
    last_key_ = min(most, static_cast<int>(split.last));
    return first_key_ < last_key_;
  }
  // Stores rows that see a key of the split. The merge reads no others.
  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float l = add_rn(chains_[r][0], chains_[r][1]);
      l = add_rn(l, Machine::shuffle_xor(l, 1));
      l = add_rn(l, Machine::shuffle_xor(l, 2));
      if (sees_[r][1] == 0) continue;
      const std::int64_t row = first_row_ + this->row_of_thread(r);
      const std::int64_t head = kv_head_ * g_.group + row % g_.group;
      const std::int64_t at =
          ((first_place_ + row / g_.group) * p_.num_q_heads + head) * call_.splits + static_cast<std::int64_t>(split_);
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
  unsigned split_ = 0;
  AttentionRange sequences_ = {0, 0};  // the group's
  std::int64_t first_place_ = 0;       // place of the group's first query
  std::int64_t first_row_ = 0, last_row_ = 0;
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    attention_group_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ AttentionGrid g,
                           const __grid_constant__ SplitCall call, unsigned splits) {
  extern __shared__ __align__(128) unsigned char memory[];
  GroupRows<T, Tile>(p, g, call, memory).run(blockIdx.x, splits);
}

template <class T, class Tile>
void run_attention_groups(const AttentionParams& p, const SplitCall& call, bool vectors, cudaStream_t stream) {
  const GroupGrid<Tile> grid(p);
  if (grid.blocks == 0) return;
  allow_shared_memory<attention_group_kernel<T, Tile>>();
  attention_group_kernel<T, Tile><<<checked_blocks(grid.blocks, "attention"), Tile::kThreads, Tile::kBytes, stream>>>(
      p, attention_query_grid(p, Tile::kRows, vectors), call, static_cast<unsigned>(grid.splits));
}

}  // namespace
}  // namespace rlk::cuda
