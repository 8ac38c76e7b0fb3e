// CUDA backend of attention: checks of memory safety, the choice of a plan, and the launch for the device's
// architecture.
#include "rlk/ops/attention.h"

#include <algorithm>
#include <initializer_list>

#include "kernels.h"
#include "kernels/attention/check.h"
#include "rlk/backends.h"
#include "rlk/plan_note.h"

namespace rlk::cuda {
namespace {

int supported_capability(int device) {
  const int capability = compute_capability(device);
  if (capability < 80) no_kernel("attention");
  return capability;
}

constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;

bool at_16_bytes(std::initializer_list<const void*> arrays) {
  return std::ranges::all_of(arrays, [](const void* a) { return reinterpret_cast<std::uintptr_t>(a) % 16 == 0; });
}

// Whether TMA can load the heads of an array: TMA needs strides that are multiples of 16 bytes and not 0. `alone`: the
// array has only one sequence, so the stride between sequences is not used.
bool can_fetch(const AttentionInput& p, const AttentionHeads& a, bool alone) {
  constexpr std::int64_t kMostStride = std::int64_t{1} << 39;
  if (!attention_at_16_bytes(a, p.dtype)) return false;
  for (const std::int64_t stride : {a.head_stride, a.token_stride, a.sequence_stride}) {
    if (stride < 0 || stride >= kMostStride) return false;
  }
  if (a.token_stride == 0 || (a.head_stride == 0 && p.num_q_heads > 1)) return false;
  return alone || p.num_sequences <= 1 || a.sequence_stride != 0;
}
// Whether wgmma has tiles for the call's heads.
bool fits_tiles(const AttentionInput& p) {
  if (p.dtype == DType::kFloat32 || p.softcap > 0.0f || (p.parents != nullptr && !fills_tile(p))) return false;
  return p.q_tokens > 0 && p.q_tokens < kMostTokens;
}
// Whether TMA can fetch K and V. If K and V lie in pages, the tensor map has a page where it would have a sequence.
bool can_fetch_keys(const AttentionParams& p) {
  if (p.num_sequences == 0 || p.k_tokens == 0 || p.k_tokens >= kMostTokens) return false;
  const bool paged = p.block_table != nullptr;
  if (paged && (p.num_pages == 0 || p.num_pages >= kMostTokens)) return false;
  // A TMA box is a page or a part of a page. The number of rows of a box must be a multiple of eight, since the swizzle
  // repeats every eight rows.
  if (paged && (p.page_size < 8 || p.page_size >= kMostTokens || (p.page_size & (p.page_size - 1)) != 0)) {
    return false;
  }
  const bool alone = paged ? p.num_pages == 1 : p.cu_seqlens_k != nullptr;
  return can_fetch(p, p.k, alone) && can_fetch(p, p.v, alone) && attention_at_16_bytes(p.q, p.dtype);
}
// Whether 32 bits hold the offset of each key and value, in units of 16 bytes.
bool has_near_keys(const AttentionInput& p) {
  const bool paged = p.block_table != nullptr, packed = p.cu_seqlens_k != nullptr;
  const std::int64_t sequences = paged ? p.num_pages : packed ? 1 : p.num_sequences;
  const std::int64_t tokens = paged ? p.page_size : p.k_tokens;
  constexpr double kMostElements = 8 * 4294967294.0;
  return std::ranges::all_of(std::initializer_list<const AttentionHeads*>{&p.k, &p.v}, [&](const AttentionHeads* a) {
    if (a->sequence_stride < 0 || a->token_stride < 0) return false;
    return static_cast<double>(sequences) * static_cast<double>(a->sequence_stride) +
               static_cast<double>(tokens) * static_cast<double>(a->token_stride) <
           kMostElements;
  });
}
bool can_fetch(const AttentionInput& p) {
  if (p.block_table != nullptr || p.k_tokens == 0 || p.k_tokens >= kMostTokens) return false;
  const bool packed_q = p.cu_seqlens_q != nullptr, packed_k = p.cu_seqlens_k != nullptr;
  return can_fetch(p, p.q, packed_q) && can_fetch(p, p.k, packed_k) && can_fetch(p, p.v, packed_k);
}

bool fits_wgmma(const AttentionParams& p) {
  if (!fits_tiles(p) || p.group_offsets != nullptr || !at_16_bytes({p.out})) return false;
  const bool packed = p.cu_seqlens_q != nullptr;
  if (p.block_table != nullptr ? !can_fetch_keys(p) || !can_fetch(p, p.q, packed) : !can_fetch(p)) return false;
  const std::int64_t blocks = p.q_tokens / 128 + std::max<std::int64_t>(p.num_sequences, 1);
  return blocks * p.num_q_heads * (packed ? 1 : p.num_sequences) < kMostTokens;
}

bool fits_tall(const AttentionParams& p) {
  if (p.exp != Exp::kHardware || p.parents != nullptr || !fits_wgmma(p)) return false;
  return p.head_dim > 128 ? TileColumns::of(p.head_dim, p.value_dim).keys == 192 : p.head_dim == 64 && fills_tile(p);
}

bool fits_wgmma(const AttentionBackwardParams& p, GradientKernel kernel) {
  const bool packed = p.cu_seqlens_q != nullptr;
  if (!fits_tiles(p)) return false;
  if (!can_fetch(p) || !can_fetch(p, p.dout, packed) || !attention_at_16_bytes(p.out, p.dtype)) return false;
  if (!at_16_bytes({p.dq, p.dk, p.dv}) || p.num_sequences == 0) return false;
  if (p.dq == nullptr && p.dk == nullptr) return false;  // the caller wants only dsinks
  const bool has_parts = p.parents == nullptr && p.num_q_heads != p.num_kv_heads && p.head_dim <= 128;
  if (kernel == GradientKernel::kParts && !has_parts) return false;
  const GradientLayout layout(p, kernel);
  constexpr std::int64_t kMostHeads = 65535;  // the largest second dimension of a grid
  // The most blocks of keys, summed over the paths of all segments. Each block takes 1 KiB of workspace.
  constexpr std::int64_t kMostPathBlocks = std::int64_t{1} << 18;
  if (p.parents != nullptr && layout.key_blocks > kMostPathBlocks) return false;
  return layout.slots * p.num_q_heads < kMostTokens / 64 && layout.jobs < kMostTokens && p.num_q_heads <= kMostHeads;
}

bool fits_mixed(const AttentionParams& p) {
  if (p.cu_seqlens_q == nullptr || p.num_sequences == 0 || p.parents != nullptr || p.group_offsets != nullptr)
    return false;
  if (p.dtype == DType::kFloat32 || p.q_tokens >= kMostTokens || p.num_sequences >= kMostTokens) return false;
  return p.num_q_heads < kMostTokens && MixedGrid(p).blocks < kMostTokens;
}

constexpr std::int64_t kWgmmaQueries = 64;  // fewest queries per sequence: half a forward tile, a backward tile

std::int64_t sequences_of(const AttentionInput& p) {
  return p.cu_seqlens_q != nullptr && p.num_sequences > 0 ? p.num_sequences : 1;
}

// Whether sequences are long enough on average for kTall. Tiles of kTall have 192 queries, and short sequences would
// leave many of their rows empty.
bool has_long_sequences(const AttentionParams& p) {
  constexpr std::int64_t kQueries = 1024, kKeys = 2048;
  const std::int64_t keys =
      p.cu_seqlens_k != nullptr ? p.k_tokens / std::max<std::int64_t>(p.num_sequences, 1) : p.k_tokens;
  return p.q_tokens >= kQueries * sequences_of(p) && keys >= kKeys;
}

// Whether a mixed plan may be faster: some sequences may have many queries, and other sequences few queries and many
// keys.
bool may_mix(const AttentionParams& p) {
  if (p.cu_seqlens_q == nullptr || p.num_sequences < 2 || p.q_tokens <= p.num_sequences) return false;
  return p.cu_seqlens_k == nullptr || p.k_tokens > p.q_tokens;
}

}  // namespace

bool fits_plan(const AttentionParams& p, const AttentionPlan& plan, int capability) {
  if (plan.kernel == AttentionKernel::kTiles) return true;
  if (plan.kernel == AttentionKernel::kWgmma) return capability == 90 && fits_wgmma(p);
  if (plan.kernel == AttentionKernel::kTall) return capability == 90 && fits_tall(p);
  if (plan.kernel == AttentionKernel::kMixed) return fits_mixed(p);
  if (p.parents != nullptr) return false;
  if (p.dtype == DType::kFloat32) return plan.kernel == AttentionKernel::kFewRows;
  const std::int64_t rows = p.q_tokens * (p.num_q_heads / p.num_kv_heads);
  if (rows >= kMostTokens || p.num_q_heads >= kMostTokens || p.num_sequences >= kMostTokens) return false;
  if (plan.kernel == AttentionKernel::kFewRows) return true;
  if (plan.kernel == AttentionKernel::kDense) {
    const bool fits = capability == 90 && p.head_dim > 64 && p.head_dim <= 128 && p.group_offsets == nullptr;
    return fits && attention_at_16_bytes(p) && has_near_keys(p);
  }
  if (capability != 90 || p.head_dim > 128 || p.value_dim != p.head_dim || !can_fetch_keys(p)) return false;
  if (plan.kernel == AttentionKernel::kGroups) {
    return SplitGrid(p, SplitGrid::kSharedRows / 2).shares && fits_tiles(p) && fills_tile(p);
  }
  if (p.group_offsets != nullptr) return false;  // one block of keys may have shared and own pages
  return plan.kernel == AttentionKernel::kPairs || p.head_dim > 64;
}

AttentionPlan choose_plan(const AttentionParams& p, int capability, int multiprocessors) {
  const std::int64_t sequences = sequences_of(p);
  const AttentionPlan few_rows = {AttentionKernel::kFewRows}, dense = {AttentionKernel::kDense};
  const AttentionPlan pairs = {AttentionKernel::kPairs};
  const AttentionPlan clusters = {AttentionKernel::kClusters}, groups = {AttentionKernel::kGroups};
  const AttentionPlan wgmma = {AttentionKernel::kWgmma}, mixed = {AttentionKernel::kMixed};
  const bool mixes = may_mix(p) && fits_plan(p, mixed, capability);
  // fits() is called only if the choice depends on it, since the test takes time.
  const auto fits = [&] { return fits_plan(p, wgmma, capability); };
  if (p.q_tokens * (p.num_q_heads / p.num_kv_heads) <= kFewRows * sequences && fits_plan(p, few_rows, capability)) {
    if (fits_plan(p, groups, capability)) return groups;
    const SplitGrid grid(p);
    if (grid.blocks * SplitGrid::kCluster * 4 / 3 <= multiprocessors && fits_plan(p, clusters, capability)) {
      return clusters;
    }
    // The factor 4 / 3 above is there because some multiprocessors do not find three others for a cluster. Calls with
    // more blocks of threads than multiprocessors take kFewRows: three of its blocks run on a multiprocessor and hide
    // each other's waits. But kPairs finishes splits of more than 1024 keys sooner, even if some of its blocks of
    // threads must wait for a multiprocessor.
    constexpr std::int64_t kShortSplits = 8;  // splits of 1024 keys
    const std::int64_t most = grid.splits > kShortSplits ? multiprocessors * 3 / 2 : multiprocessors;
    if (grid.busy <= most && fits_plan(p, pairs, capability)) return pairs;
    // Speculative drafts give all sequences equally many queries. kFewRows computes such calls without kMixed.
    const bool differ = mixes && p.q_tokens % sequences != 0;
    const bool fills = grid.blocks > 3 * std::int64_t{multiprocessors};
    if (differ && fills && fits()) return mixed;
    // kDense runs four blocks of threads per multiprocessor. If a call has more blocks than run at once, kFewRows is
    // faster.
    const bool at_once =
        grid.busy > 3 * std::int64_t{multiprocessors} && grid.busy <= 4 * std::int64_t{multiprocessors};
    return at_once && fits_plan(p, dense, capability) ? dense : few_rows;
  }
  if (mixes) return mixed;
  if (p.q_tokens < kWgmmaQueries * sequences || !fits()) return {};
  const AttentionPlan tall = {AttentionKernel::kTall};
  return has_long_sequences(p) && fits_plan(p, tall, capability) ? tall : wgmma;
}

std::int64_t workspace_bytes_of(const AttentionParams& p, const AttentionPlan& plan) {
  const bool is_tall = plan.kernel == AttentionKernel::kTall;
  if (is_tall || plan.kernel == AttentionKernel::kWgmma) {
    const bool has_outer = has_outer_totals(p) || (is_tall && p.head_dim > 128);
    return attention_path_bytes(p) + (has_outer ? kOuterTotalsAt + kOuterTotals * kOuterTotalBytes : 4);
  }
  if (plan.kernel == AttentionKernel::kMixed) return 4 * MixedGrid(p).end;
  if (plan.kernel == AttentionKernel::kTiles || p.dtype == DType::kFloat32) return attention_path_bytes(p);
  return 4 * SplitGrid(p).end;
}

std::int64_t attention_workspace_bytes(const AttentionParams& p, int device) {
  if (attention_rows(p) * p.num_q_heads == 0) return 0;
  return workspace_bytes_of(p, choose_plan(p, supported_capability(device), multiprocessors(device)));
}

void attention(const AttentionParams& p, int device, Stream stream) {
  check_attention(p);
  if (attention_rows(p) * p.num_q_heads == 0) return;
  const DeviceGuard guard(device);
  const int capability = supported_capability(device);
  const AttentionPlan plan = choose_plan(p, capability, multiprocessors(device));
  RLK_CHECK(p.workspace != nullptr || workspace_bytes_of(p, plan) == 0, "attention: workspace");
  note_plan([&] {
    const char* keys = p.parents != nullptr ? ", tree" : p.group_offsets != nullptr ? ", shared prefix" : "";
    return std::string(name_of(plan)) + keys;
  });
  if (p.parents != nullptr) return RLK_CUDA_IN_USE("attention", device, attention_tree)(p, plan, to_stream(stream));
  RLK_CUDA_IN_USE("attention", device, attention)(p, plan, to_stream(stream));
}

void attention_partials(const AttentionPartialsParams& p, int device, Stream stream) {
  check_attention(p);
  if (attention_rows(p) * p.num_q_heads * p.num_splits == 0) return;
  RLK_CHECK(p.q_tokens * (p.num_q_heads / p.num_kv_heads) < kMostTokens && p.num_sequences < kMostTokens,
            "attention_partials: fewer than 2^31 rows");
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("attention", device, attention_partials)(p, to_stream(stream));
}

void attention_merge(const AttentionMergeParams& p, int device, Stream stream) {
  check_attention(p);
  if (p.rows * p.num_q_heads == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("attention", device, attention_merge)(p, to_stream(stream));
}

bool fits_plan(const AttentionBackwardParams& p, GradientKernel kernel, int capability) {
  return kernel == GradientKernel::kPasses || (capability == 90 && fits_wgmma(p, kernel));
}

GradientKernel choose_plan(const AttentionBackwardParams& p, int capability) {
  // If sequences have at least this many queries on average, and windows at least this many keys, separate jobs for the
  // query heads are faster.
  constexpr std::int64_t kPartQueries = 2048;
  const bool is_narrow = p.window_size > 0 && p.window_size < kPartQueries;
  const std::int64_t sequences = sequences_of(p);
  const auto fits = [&](std::int64_t queries, GradientKernel kernel) {
    return p.q_tokens >= queries * sequences && fits_plan(p, kernel, capability);
  };
  if (!is_narrow && fits(kPartQueries, GradientKernel::kParts)) return GradientKernel::kParts;
  return fits(kWgmmaQueries, GradientKernel::kWgmma) ? GradientKernel::kWgmma : GradientKernel::kPasses;
}

std::int64_t workspace_bytes_of(const AttentionBackwardParams& p, GradientKernel kernel) {
  const std::int64_t delta = 4 * attention_rows(p) * p.num_q_heads;
  if (kernel == GradientKernel::kPasses) return delta + attention_path_bytes(p);
  return GradientLayout(p, kernel).end + (p.dsinks != nullptr ? delta : 0);
}

std::int64_t attention_backward_workspace_bytes(const AttentionBackwardParams& p, int device) {
  return workspace_bytes_of(p, choose_plan(p, supported_capability(device)));
}

void attention_backward(const AttentionBackwardParams& p, int device, Stream stream) {
  check_attention(p);
  if (attention_rows(p) * p.num_q_heads == 0 && attention_keys(p) == 0 && p.dsinks == nullptr) return;
  const DeviceGuard guard(device);
  const int capability = supported_capability(device);
  const GradientKernel kernel = choose_plan(p, capability);
  if (p.parents != nullptr) {
    return RLK_CUDA_IN_USE("attention", device, attention_tree_backward)(p, kernel, to_stream(stream));
  }
  RLK_CUDA_IN_USE("attention", device, attention_backward)(p, kernel, to_stream(stream));
}

}  // namespace rlk::cuda
