// Host entry points of the attention kernels, one per architecture, and the ways in which each can serve a call. All have
// the same bits. Arguments were checked in attention.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/attention_tile.h"

namespace rlk::cuda {

enum class AttentionKernel : std::int32_t {
  kTiles,    // blocks of 64 rows; float32: 64, or 32 of more than 128 columns
  kFewRows,  // blocks of 16 rows, where a sequence has few; bf16 and fp16: a block for each split
  kPairs,  // sm_90: kFewRows of at most 128 columns that the copy engine can fetch, pages too, for few blocks of threads
  kClusters,  // sm_90: kPairs of 65 to 128 columns, by four blocks of threads a split, for fewer yet
  kWgmma,     // sm_90: bf16 and fp16, heads of 64 and 128 columns that the copy engine can fetch, no softcap
};
struct AttentionPlan {
  AttentionKernel kernel = AttentionKernel::kTiles;
};
constexpr AttentionPlan kAttentionPlans[] = {{AttentionKernel::kTiles},
                                             {AttentionKernel::kFewRows},
                                             {AttentionKernel::kPairs},
                                             {AttentionKernel::kClusters},
                                             {AttentionKernel::kWgmma}};
// Whether a plan can serve a call on `capability` (10 * major + minor), and the one that does on so many multiprocessors.
bool fits_plan(const AttentionParams& p, const AttentionPlan& plan, int capability);
AttentionPlan choose_plan(const AttentionParams& p, int capability, int multiprocessors);
// Bytes of workspace: a counter of tiles for kWgmma, splits' results for kFewRows, kPairs and kClusters.
std::int64_t workspace_bytes_of(const AttentionParams& p, const AttentionPlan& plan);

// kFewRows, kPairs and kClusters: a block of threads, or a cluster, takes one split of kRows rows of a key head; a row
// is one head of a query. The workspace has m and l of each row and split, then O, aligned to 16 bytes.
struct SplitGrid {
  static constexpr int kCluster = 4;  // blocks of threads of kClusters
  static constexpr std::int64_t kRows = 16;
  std::int64_t tiles;   // tiles of rows: per sequence, or, packed, slots of all
  std::int64_t splits;  // that any sequence may have
  std::int64_t blocks;
  std::int64_t sums_at, end;  // offsets of O and of the end, in floats

  explicit SplitGrid(const AttentionParams& p) : SplitGrid(p, attention_splits(p.k_tokens)) {}
  SplitGrid(const AttentionInput& p, std::int64_t of_call) : splits(of_call) {
    const std::int64_t rows = p.q_tokens * (p.num_q_heads / p.num_kv_heads);
    const bool packed = p.cu_seqlens_q != nullptr;
    tiles = packed ? rows / kRows + p.num_sequences : (rows + kRows - 1) / kRows;
    blocks = splits * p.num_kv_heads * tiles * (packed ? 1 : p.num_sequences);
    const std::int64_t results = attention_rows(p) * p.num_q_heads * splits;
    sums_at = (results * 2 + 3) / 4 * 4;
    end = sums_at + results * p.head_dim;
  }
};

// Ways to serve a backward.
enum class GradientKernel : std::int32_t {
  kPasses,  // one pass for dq, one for dk and dv: every call
  kWgmma,   // sm_90: all three at once, for what the forward's kWgmma serves
};
constexpr GradientKernel kGradientKernels[] = {GradientKernel::kPasses, GradientKernel::kWgmma};
bool fits_plan(const AttentionBackwardParams& p, GradientKernel kernel, int capability);
GradientKernel choose_plan(const AttentionBackwardParams& p, int capability);
// Bytes of workspace: delta for kPasses; for kWgmma as GradientLayout says, and delta behind it where dsinks are wanted.
std::int64_t workspace_bytes_of(const AttentionBackwardParams& p, GradientKernel kernel);

// kWgmma's tiles of 64 queries and blocks of 128 keys, and where its workspace has what. Tiles count from a position that
// is a multiple of 64, so a sequence may touch one more than its queries fill.
struct GradientLayout {
  static constexpr std::int64_t kTurnsAt = 16;
  std::int64_t slack;               // slots between packed sequences
  std::int64_t of_sequence, slots;  // tiles of queries: of one unpacked sequence; of all
  std::int64_t key_blocks, jobs;    // key_blocks: of a sequence, or of all if packed; jobs: times all key heads
  std::int64_t works_at, scalars_at, sums_at, end;  // bytes
  static constexpr std::int64_t kWorkBytes = 48;

  explicit GradientLayout(const AttentionBackwardParams& p) {
    // Queries stand at keys of their own number: a sequence begins at a multiple of 64.
    const bool aligned = p.seqused_q == nullptr && p.seqused_k == nullptr && p.leftpad_k == nullptr &&
                         p.cu_seqlens_q == p.cu_seqlens_k && p.q_tokens == p.k_tokens;
    slack = aligned ? 1 : 2;
    of_sequence = (p.q_tokens + 63) / 64 + (aligned ? 0 : 1);
    slots = p.cu_seqlens_q != nullptr ? p.q_tokens / 64 + slack * p.num_sequences : of_sequence * p.num_sequences;
    key_blocks = p.cu_seqlens_k != nullptr ? p.k_tokens / 128 + p.num_sequences : (p.k_tokens + 127) / 128;
    jobs = key_blocks * p.num_kv_heads * (p.cu_seqlens_k != nullptr ? 1 : p.num_sequences);
    const std::int64_t tiles = slots * p.num_q_heads;
    works_at = (kTurnsAt + 4 * tiles + 255) / 256 * 256;
    scalars_at = (works_at + kWorkBytes * jobs + 255) / 256 * 256;
    sums_at = scalars_at + 512 * tiles;
    end = sums_at + (p.dq != nullptr ? 256 * p.head_dim * tiles : 0);
  }
};

RLK_CUDA_KERNELS(void attention(const AttentionParams& p, const AttentionPlan& plan, cudaStream_t stream);)
RLK_CUDA_KERNELS(void attention_partials(const AttentionPartialsParams& p, cudaStream_t stream);)
RLK_CUDA_KERNELS(void attention_merge(const AttentionMergeParams& p, cudaStream_t stream);)
RLK_CUDA_KERNELS(void attention_backward(const AttentionBackwardParams& p, GradientKernel kernel, cudaStream_t stream);)
// Calls of trees, whose plans are kTiles and kPasses.
RLK_CUDA_KERNELS(void attention_tree(const AttentionParams& p, cudaStream_t stream);)
RLK_CUDA_KERNELS(void attention_tree_backward(const AttentionBackwardParams& p, cudaStream_t stream);)

}  // namespace rlk::cuda
