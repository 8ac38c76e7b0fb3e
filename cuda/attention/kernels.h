// Host entry points of the attention kernels, one per architecture, and the plans of the forward and the backward. All
// plans give the same bits. attention.cpp checks the arguments. A row is one query in one query head. A split is 1024
// or more consecutive keys with their own sums m (reference), l and O. The splits of a row are merged later.
#pragma once

#include <algorithm>

#include "../common/launch.h"
#include "kernels/attention/tile.h"

namespace rlk::cuda {

enum class AttentionKernel : std::int32_t {
  kTiles,     // a block of threads has 64 rows; float32: 32 rows with more than 128 columns
  kFewRows,   // for sequences with few rows: a block of threads has 16 rows and, in bf16 and fp16, one split
  kDense,     // sm_90: kFewRows with four blocks of threads per multiprocessor in place of three, if heads have 65 to
              // 128 columns and begin at multiples of 16 bytes
  kPairs,     // sm_90: kFewRows for calls with few blocks of threads. Conditions: at most 128 columns, value_dim equal
              // to head_dim, and K and V, or their pages, that TMA can load. kClusters and kGroups have the same
              // conditions
  kClusters,  // sm_90: four blocks of threads per split, for calls with even fewer splits; 65 to 128 columns
  kGroups,    // sm_90: kFewRows for shared prefixes; a warpgroup computes a shared split for 64 rows of a group of
              // sequences
  kWgmma,     // sm_90: bf16 and fp16, if TMA can load the heads, without a softcap; trees need heads of 64 or 128
              // columns
  kTall,      // sm_90: kWgmma with tiles of 192 queries in place of 128. Conditions: the hardware's exponential, no
              // trees, and heads of 64 columns, or of 136 to 192 with at most 128 columns of values
  kMixed,  // bf16 and fp16, packed queries: sequences with few queries are served as in kFewRows, and all others by the
           // kernel of kWgmma if it fits, else by the kernel of kTiles
};
struct AttentionPlan {
  AttentionKernel kernel = AttentionKernel::kTiles;
};
constexpr AttentionPlan kAttentionPlans[] = {
    {AttentionKernel::kTiles}, {AttentionKernel::kFewRows},  {AttentionKernel::kDense},
    {AttentionKernel::kPairs}, {AttentionKernel::kClusters}, {AttentionKernel::kGroups},
    {AttentionKernel::kWgmma}, {AttentionKernel::kTall},     {AttentionKernel::kMixed}};
constexpr const char* name_of(const AttentionPlan& plan) {
  constexpr const char* kNames[] = {"tiles",  "few rows", "dense", "pairs", "clusters",
                                    "groups", "wgmma",    "tall",  "mixed"};
  return kNames[static_cast<int>(plan.kernel)];
}
// fits_plan() returns whether a plan supports a call on a GPU of compute capability `capability` (10 * major + minor).
// choose_plan() returns the plan for the call on a GPU with this number of multiprocessors.
bool fits_plan(const AttentionParams& p, const AttentionPlan& plan, int capability);
AttentionPlan choose_plan(const AttentionParams& p, int capability, int multiprocessors);
// Bytes of workspace. A tree needs its table of paths, and kWgmma needs a counter of tiles behind that table. The plans
// from kFewRows to kGroups need the sums of splits. The workspace of kMixed is described by MixedGrid.
std::int64_t workspace_bytes_of(const AttentionParams& p, const AttentionPlan& plan);

// Columns of the wgmma kernels' tiles. A head may have fewer columns than its tile.
struct TileColumns {
  std::int64_t keys, values;
  static constexpr TileColumns of(std::int64_t head_dim, std::int64_t value_dim) {
    if (head_dim > 128) return head_dim <= 192 && value_dim <= 128 ? TileColumns{192, 128} : TileColumns{256, 256};
    const std::int64_t columns = head_dim <= 64 ? 64 : head_dim <= 80 ? 80 : head_dim <= 96 ? 96 : 128;
    return {columns, columns};
  }
};
// Whether heads of at most 128 columns fill a tile. Other heads have separate instances of the kernels (kPadded), which
// store nothing past the head's last column. Trees and shared splits have no such instances.
inline bool fills_tile(const AttentionInput& p) {
  return p.value_dim == p.head_dim && (p.head_dim == 64 || p.head_dim == 128);
}

// The kernel of kWgmma merges each split into totals. With more than 128 columns of v, the workspace holds those totals
// that do not fit into shared memory, for up to kOuterTotals blocks of threads. No GPU of compute capability 9.0 has
// more multiprocessors. The counter of tiles lies before the totals.
constexpr int kOuterTotals = 132;
constexpr std::int64_t kOuterTotalsAt = 16, kOuterTotalBytes = 24 * 256 * 16;
inline bool has_outer_totals(const AttentionParams& p) {
  return p.head_dim > 128 && TileColumns::of(p.head_dim, p.value_dim).values > 128;
}

// Up to this number of rows per key head and sequence, on average, choose_plan() returns a plan of kFewRows to kGroups.
// So few rows would leave most of a larger tile empty.
constexpr std::int64_t kFewRows = 32;

// The grid of the plans from kFewRows to kGroups. A block of threads, or a cluster, computes one split for kRows rows
// of a key head. The workspace has m and l of each row and split, then O, aligned to 16 bytes.
struct SplitGrid {
  static constexpr int kCluster = 4;  // blocks of threads of kClusters
  static constexpr std::int64_t kRows = 16, kSharedRows = 64;
  std::int64_t tiles;   // tiles of rows per sequence; if packed, at least the tiles of all sequences
  std::int64_t splits;  // largest number of splits of any sequence
  // Whether the rows of a group of sequences read the splits of their shared prefix together, 64 rows at a time. Groups
  // must have at least kSharedRows rows on average, or half as many for kGroups; with fewer rows, sharing would be
  // slower.
  bool shares;
  // Blocks of threads per tile and key head. A block of threads computes one split or, if groups share splits, its
  // first split and every `stride`-th split after it.
  std::int64_t stride;
  std::int64_t blocks;
  // An estimate of the blocks of threads that have work, for calls without shared splits. The estimate assumes that
  // every sequence has a tile of rows and the most keys. With packed queries `blocks` may be larger, since some blocks
  // have no rows.
  std::int64_t busy;
  std::int64_t sums_at, end;  // where O begins and ends in the workspace, in floats
  bool merges;                // false: the call has one split, and its blocks write the results without a workspace
  bool long_first;  // whether the last splits begin first; true for one sequence with splits of more than 1024 keys

  explicit SplitGrid(const AttentionParams& p, std::int64_t shared_rows = kSharedRows)
      : SplitGrid(p, attention_splits(p.k_tokens),
                  p.num_groups > 0 && p.max_prefix_pages > 0 &&
                      attention_rows(p) * (p.num_q_heads / p.num_kv_heads) >= shared_rows * p.num_groups) {}
  SplitGrid(const AttentionInput& p, std::int64_t of_call, bool is_shared = false)
      : splits(of_call), shares(is_shared) {
    const std::int64_t rows = p.q_tokens * (p.num_q_heads / p.num_kv_heads);
    const bool packed = p.cu_seqlens_q != nullptr;
    tiles = packed ? rows / kRows + p.num_sequences : (rows + kRows - 1) / kRows;
    const std::int64_t own_keys = p.k_tokens - p.page_size * p.max_prefix_pages;
    stride = shares ? std::min(splits, attention_splits(own_keys) + 1) : splits;
    blocks = stride * p.num_kv_heads * tiles * (packed ? 1 : p.num_sequences);
    busy = splits * p.num_kv_heads * (packed ? std::max(p.num_sequences, rows / kRows) : tiles * p.num_sequences);
    const std::int64_t results = attention_rows(p) * p.num_q_heads * splits;
    sums_at = (results * 2 + 3) / 4 * 4;
    merges = splits != 1 || p.num_sequences == 0 || p.group_offsets != nullptr;
    end = merges ? sums_at + results * p.value_dim : 0;
    constexpr std::int64_t kShortSplits = 8;  // splits of 1024 keys
    long_first = p.num_sequences == 1 && !shares && splits > kShortSplits;
  }
};

// The grid of kMixed: splits compute sequences with at most `few` queries, and tiles of queries compute all other
// sequences. The host cannot read the sequences' lengths, so its sizes are upper bounds.
struct MixedGrid {
  static constexpr std::int64_t kMostRows = 64;  // most rows per key head of a sequence with few queries
  static constexpr std::int64_t kMostBytes = std::int64_t{256} << 20;  // most bytes of the splits' sums; a large call
                                                                       // has a smaller `few`
  std::int64_t few, splits;
  bool is_decode;              // whether sequences have few queries on average
  bool by_token;               // true: splits' sums are indexed by token; false: each sequence has room for `few`
                               // queries
  std::int64_t slots, blocks;  // slots: blocks of threads that share the tiles of one split; blocks: all blocks of
                               // threads
  std::int64_t rows_at, sums_at, totals_at, end;  // places in the workspace, in floats; two counters come first
  bool merges;                                    // false: as in SplitGrid

  explicit MixedGrid(const AttentionParams& p) : splits(attention_splits(p.k_tokens)), merges(splits != 1) {
    const std::int64_t group = p.num_q_heads / p.num_kv_heads, rows = p.q_tokens * group;
    few = std::max<std::int64_t>(kMostRows / group, 1);
    const std::int64_t results = p.num_q_heads * splits;  // splits' sums of one query: one m, l and O each
    is_decode = rows <= kFewRows * p.num_sequences;
    while (!is_decode && merges && few > 1 && places(p) * results * (2 + p.value_dim) * 4 > kMostBytes) few /= 2;
    by_token = p.q_tokens <= few * p.num_sequences;
    // Tiles of one split run at once, so that the later tiles find the split's keys in L2. With speculative drafts all
    // sequences have about equally many tiles. In batches with long prompts, most other sequences have one tile, and a
    // few have two.
    const std::int64_t mean = (rows + SplitGrid::kRows * p.num_sequences - 1) / (SplitGrid::kRows * p.num_sequences);
    slots = std::clamp<std::int64_t>(by_token ? mean : 2, 1, (few * group + SplitGrid::kRows - 1) / SplitGrid::kRows);
    blocks = slots * splits * p.num_kv_heads * p.num_sequences;
    rows_at = 4;
    sums_at = rows_at + (merges ? (places(p) * results * 2 + 3) / 4 * 4 : 0);
    totals_at = sums_at + (merges ? places(p) * results * p.value_dim : 0);
    end = totals_at + (has_outer_totals(p) ? kOuterTotals * kOuterTotalBytes / 4 : 0);
  }
  std::int64_t places(const AttentionParams& p) const { return std::min(p.q_tokens, few * p.num_sequences); }
};
struct MixedParams : AttentionParams {
  std::int64_t few;  // `few` and `by_token` are those of MixedGrid
  bool by_token;
  // Whether splits compute sequence b.
  RLK_HD bool has_few(std::int64_t b) const {
    const AttentionRange q = attention_place(cu_seqlens_q, b, q_tokens);
    return q.last - q.first <= few;
  }
};
// Whether a kernel with these Params computes mixed batches. Such a kernel tests which sequences have few queries, and
// computes either these sequences or all others.
template <class Params>
constexpr bool kMayMix = std::is_same_v<Params, MixedParams>;

// The plans of a backward.
enum class GradientKernel : std::int32_t {
  kPasses,  // one pass computes dq, and a second pass computes dk and dv; for every call
  kWgmma,   // sm_90: dq, dk and dv in one pass; for the calls that the forward's kWgmma supports
  kParts,   // kWgmma with a separate job for each query head, if key heads have several query heads; no trees, and at
            // most 128 columns
};
constexpr GradientKernel kGradientKernels[] = {GradientKernel::kPasses, GradientKernel::kWgmma, GradientKernel::kParts};
constexpr const char* name_of(GradientKernel kernel) {
  constexpr const char* kNames[] = {"passes", "wgmma", "parts"};
  return kNames[static_cast<int>(kernel)];
}
bool fits_plan(const AttentionBackwardParams& p, GradientKernel kernel, int capability);
GradientKernel choose_plan(const AttentionBackwardParams& p, int capability);
// Bytes of workspace. kPasses needs delta. The other plans need a GradientLayout, then delta if dsinks are wanted.
std::int64_t workspace_bytes_of(const AttentionBackwardParams& p, GradientKernel kernel);

// For kWgmma and kParts: the numbers of tiles of 64 queries, of blocks of keys and of jobs, and the parts of the
// workspace. Tiles begin at positions that are multiples of 64. A sequence's first query need not begin a tile, so its
// queries may lie in one tile more than they would fill.
struct GradientLayout {
  static constexpr std::int64_t kTurnsAt = 16;
  std::int64_t slack;               // a packed sequence gets up to this many tiles more than its queries fill
  std::int64_t of_sequence, slots;  // tiles of queries per sequence if q is not packed; tiles of queries in all
  std::int64_t key_blocks;          // blocks of keys per sequence, or of all sequences if packed
  // A job has a block of keys of a key head, and all query heads of the key head or one of them. block_jobs: blocks of
  // keys times key heads.
  std::int64_t block_jobs, parts, jobs;
  std::int64_t works_at, scalars_at, sums_at, end;  // bytes
  // For trees: counters and sums of the rows of dk and dv, since several segments add to a row. After them come the
  // keys of each block, the number of blocks of earlier segments, and the table of paths.
  std::int64_t row_turns_at, row_sums_at, rows_at, firsts_at, paths_at;
  std::int64_t kept_turns_at, kept_at;  // dk and dv between two jobs of a block of keys
  // For more than 128 columns: the number of pairs of tiles of queries in all sequences. A separate kernel computes dq
  // for one such pair at a time.
  std::int64_t query_pairs, query_works_at;
  static constexpr std::int64_t kWorkBytes = 64, kRowBytes = 8;

  GradientLayout(const AttentionBackwardParams& p, GradientKernel kernel) {
    // `aligned`: in each sequence, query i is the query of key i, so query 0 begins a tile.
    const bool trees = p.parents != nullptr;
    const bool aligned = !trees && p.seqused_q == nullptr && p.seqused_k == nullptr && p.leftpad_k == nullptr &&
                         p.cu_seqlens_q == p.cu_seqlens_k && p.q_tokens == p.k_tokens;
    slack = aligned ? 1 : 2;
    of_sequence = (p.q_tokens + 63) / 64 + (aligned ? 0 : 1);
    slots = p.cu_seqlens_q != nullptr ? p.q_tokens / 64 + slack * p.num_sequences : of_sequence * p.num_sequences;
    const bool wide = p.head_dim > 128;
    const std::int64_t columns = TileColumns::of(p.head_dim, p.value_dim).keys, keys = columns == 256 ? 64 : 128;
    const std::int64_t of_pairs = (of_sequence + 1) / 2;
    query_pairs = !wide                       ? 0
                  : p.cu_seqlens_q != nullptr ? p.q_tokens / 128 + 2 * p.num_sequences
                                              : of_pairs * p.num_sequences;
    key_blocks = p.cu_seqlens_k != nullptr ? p.k_tokens / keys + p.num_sequences : (p.k_tokens + keys - 1) / keys;
    if (trees) key_blocks = (p.q_tokens / 128 + 1) * p.num_sequences;  // an upper bound
    block_jobs = key_blocks * p.num_kv_heads * (p.cu_seqlens_k != nullptr ? 1 : p.num_sequences);
    parts = kernel == GradientKernel::kParts ? p.num_q_heads / p.num_kv_heads : 1;
    jobs = block_jobs * parts;
    const std::int64_t keeping = parts > 1 && p.dk != nullptr ? block_jobs : 0;
    const std::int64_t tiles = slots * p.num_q_heads;
    const std::int64_t rows = trees && p.dk != nullptr ? p.k_tokens * p.num_kv_heads : 0;
    row_turns_at = kTurnsAt + (wide ? 0 : 4 * tiles);
    kept_turns_at = row_turns_at + 4 * rows;
    works_at = (kept_turns_at + 4 * keeping + 255) / 256 * 256;
    query_works_at = works_at + kWorkBytes * jobs;
    scalars_at = (query_works_at + kWorkBytes * query_pairs + 255) / 256 * 256;
    sums_at = scalars_at + 512 * tiles;
    row_sums_at = sums_at + (p.dq != nullptr && !wide ? 256 * p.head_dim * tiles : 0);
    rows_at = row_sums_at + 8 * p.head_dim * rows;
    kept_at = rows_at;  // kParts serves no trees
    firsts_at = kept_at + 8 * keys * columns * keeping + (trees ? 128 * kRowBytes * key_blocks : 0);
    paths_at = firsts_at + (trees ? 4 * (p.num_sequences + 1) : 0);
    end = paths_at + attention_path_bytes(p);
  }
};

RLK_CUDA_KERNELS(void attention(const AttentionParams& p, const AttentionPlan& plan, cudaStream_t stream);)
RLK_CUDA_KERNELS(void attention_mixed(const AttentionParams& p, cudaStream_t stream);)
RLK_CUDA_KERNELS(void attention_partials(const AttentionPartialsParams& p, cudaStream_t stream);)
RLK_CUDA_KERNELS(void attention_merge(const AttentionMergeParams& p, cudaStream_t stream);)
RLK_CUDA_KERNELS(void attention_backward(const AttentionBackwardParams& p, GradientKernel kernel, cudaStream_t stream);)
// Entry points for calls with trees. The plans of their forward are kTiles and kWgmma.
RLK_CUDA_KERNELS(void attention_tree(const AttentionParams& p, const AttentionPlan& plan, cudaStream_t stream);)
RLK_CUDA_KERNELS(void attention_tree_backward(const AttentionBackwardParams& p, GradientKernel kernel,
                                              cudaStream_t stream);)

// The wgmma kernels have four forms, which are compiled separately. kWhole: heads of 64 or 128 columns. kPadded: other
// heads of at most 128 columns. kWide: heads of more than 128 columns. kTall: the plan of that name. Only kWhole serves
// trees.
enum class WgmmaForm { kWhole, kPadded, kWide, kTall };
namespace sm90 {
template <WgmmaForm kForm>
void attention_wgmma(const AttentionParams& p, cudaStream_t stream);
template <WgmmaForm kForm>
void attention_mixed_wgmma(const AttentionParams& p, cudaStream_t stream);
template <WgmmaForm kForm>
void attention_backward_wgmma(const AttentionBackwardParams& p, GradientKernel kernel, cudaStream_t stream);
}  // namespace sm90

}  // namespace rlk::cuda
