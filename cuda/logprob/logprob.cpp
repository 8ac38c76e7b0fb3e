// CUDA backend of logprob: what would corrupt memory, which architecture's kernel runs, how a row is cut.
#include "logprob.h"

#include <algorithm>
#include <bit>

#include "group_grid.h"
#include "kernels.h"

namespace rlk::cuda {
namespace {

constexpr std::int64_t kMaxBlocks = (std::int64_t{1} << 31) - 1;

void check_input(const LogprobInput& p) {
  RLK_CHECK(p.num_rows >= 0 && p.num_columns >= 0, "logprob: sizes are not negative");
  RLK_CHECK(p.num_rows == 0 || (p.logits && p.target), "logprob: logits and target are given");
  RLK_CHECK(p.logits_rows.inner > 0 && p.target_rows.inner > 0, "logprob: row layouts have inner >= 1");
  RLK_CHECK(p.dtype == DType::kFloat32 || p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16,
            "logprob: logits are float32, bfloat16 or float16");
  RLK_CHECK(p.target_dtype == DType::kInt32 || p.target_dtype == DType::kInt64, "logprob: target is int32 or int64");
  RLK_CHECK(p.valid_vocab >= 0 && p.valid_vocab <= p.vocab_size, "logprob: 0 <= valid_vocab <= vocab_size");
  RLK_CHECK(p.vocab_start >= 0, "logprob: vocab_start is not negative");
  RLK_CHECK((p.kept_ids != nullptr || p.kept_size == 0) && (p.kept_offsets || !p.kept_ids),
            "logprob: kept_ids and kept_offsets come together");
}

}  // namespace

GroupGrid group_grid(const LogprobInput& p) {
  const PartRange parts = parts_of_columns(p.vocab_size, p.valid_vocab, p.vocab_start, p.num_columns);
  RLK_CHECK(parts.count > 0, "logprob: the columns are a whole, aligned group of parts of the vocabulary");
  GroupGrid grid{};
  grid.first_part = parts.first;
  grid.num_parts = parts.count;
  std::int64_t longest = 0;
  for (int i = 0; i < grid.num_parts; ++i) {
    const std::int64_t first = part_cut(p.vocab_size, grid.first_part + i);
    const std::int64_t last = std::min(part_cut(p.vocab_size, grid.first_part + i + 1), p.valid_vocab);
    grid.part_first[i] = static_cast<int>(first);
    grid.part_last[i] = static_cast<int>(last);
    longest = std::max(longest, last - first);
  }
  const int leaves = static_cast<int>((longest + kLeafColumns - 1) / kLeafColumns);
  RLK_CHECK(longest <= std::int64_t{kGroupLeaves} * kGroupColumns, "logprob: a part has at most 131,072 columns");
  grid.leaves = static_cast<int>(std::bit_ceil(static_cast<unsigned>(leaves > 0 ? leaves : 1)));
  if (grid.leaves >= kGroupLeaves) {
    grid.groups_per_part = (leaves + kGroupLeaves - 1) / kGroupLeaves;
    grid.groups = grid.num_parts * grid.groups_per_part;
    grid.nodes = grid.num_parts * (grid.leaves / kGroupLeaves);
  } else {
    const int fit = kGroupLeaves / grid.leaves;
    grid.parts_per_group = fit < grid.num_parts ? fit : grid.num_parts;
    grid.groups = grid.nodes = grid.num_parts / grid.parts_per_group;
  }
  return grid;
}

std::int64_t logprob_workspace_bytes(const LogprobParams& p, int device) {
  if (p.num_rows == 0) return 0;
  if (compute_capability(device) == 90 && has_few_rows_sm90(p, multiprocessors(device))) return 0;
  return stream_workspace(group_grid(p), p.num_rows).bytes;
}

void logprob(const LogprobParams& p, int device, Stream stream) {
  check_input(p);
  if (p.num_rows == 0) return;
  RLK_CHECK(p.vocab_size > 0, "logprob: the vocabulary is not empty");
  const GroupGrid grid = group_grid(p);
  RLK_CHECK(p.num_rows <= kMaxBlocks / grid.nodes, "logprob: too many rows for one launch");
  const DeviceGuard guard(device);
  if (compute_capability(device) < 80) throw Unsupported("logprob: built for compute capability 8.0 and later");
  RLK_CHECK(p.workspace || logprob_workspace_bytes(p, device) == 0, "logprob: a workspace is given");
  if (compute_capability(device) == 90) return logprob_forward_sm90(p, grid, to_stream(stream));
  logprob_forward_sm80(p, grid, to_stream(stream));
}

void logprob_merge(const LogprobMergeParams& p, int device, Stream stream) {
  RLK_CHECK(std::has_single_bit(static_cast<unsigned>(p.num_shards)) && p.num_shards <= kNumParts,
            "logprob_merge: 1, 2, 4 or 8 shards");
  RLK_CHECK(p.num_rows >= 0 && p.num_rows <= kMaxBlocks, "logprob_merge: number of rows");
  if (p.num_rows == 0) return;
  RLK_CHECK(p.stats != nullptr, "logprob_merge: stats are given");
  const DeviceGuard guard(device);
  logprob_merge_sm80(p, to_stream(stream));
}

void logprob_backward(const LogprobBackwardParams& p, int device, Stream stream) {
  check_input(p);
  if (p.num_rows == 0 || p.num_columns == 0) return;
  RLK_CHECK(p.lse && p.dlogits, "logprob_backward: lse and dlogits are given");
  RLK_CHECK(!p.dentropy || p.entropy, "logprob_backward: dentropy needs entropy");
  RLK_CHECK(p.dlogits_rows.inner > 0 && p.dlogprob_rows.inner > 0 && p.dlse_rows.inner > 0 && p.dentropy_rows.inner > 0,
            "logprob_backward: row layouts have inner >= 1");
  const DeviceGuard guard(device);
  if (compute_capability(device) == 90) return logprob_backward_sm90(p, to_stream(stream));
  if (compute_capability(device) < 80) throw Unsupported("logprob: built for compute capability 8.0 and later");
  logprob_backward_sm80(p, to_stream(stream));
}

}  // namespace rlk::cuda
