// Host side of linear_logprob on CUDA: the calls that are fused, and the number of rows that one launch takes.
#include "linear_logprob.h"

#include <algorithm>

#include "../common/alignment.h"
#include "../common/launch.h"
#include "head_plan.h"
#include "kernels.h"
#include "kernels/rows/lora_rows.h"
#include "rlk/backends.h"
#include "rlk/ops/linear.h"
#include "rlk/plan_note.h"

namespace rlk::cuda {
namespace {

constexpr std::int64_t kManyRows = 2048;   // with fewer rows, each loaded weight is used less often
constexpr std::int64_t kFewestRows = 128;  // the rows of a block

// The number of rows whose nodes take at most 16 MiB. More rows per launch do not make a call faster.
std::int64_t rows_at_once(const LinearLogprobParams& p) { return has_moments(p) ? 4096 : 8192; }

// LoRA's part of the workspace, which comes first: u of some rows, and the fp32 sums that are rounded to u.
struct LoraBytes {
  std::int64_t u, all;
  LoraBytes(const Head& head, std::int64_t rows) {
    const auto aligned = [](std::int64_t bytes) { return (bytes + 255) / 256 * 256; };
    u = aligned(rows * head.lora_rank * 2);
    all = u + aligned(rows * head.lora_rank * 4);
  }
};

// Whether TMA can read lora_b and u. The rows of u are contiguous.
bool reads_lora(const Head& head, std::int64_t columns) {
  const RowLayout rows{std::max<std::int64_t>(columns, 1), 0, head.lora_b_stride};
  return head.lora_rank == 0 || (head.lora_rank % 8 == 0 && head.lora_rank < std::int64_t{1} << 30 &&
                                 tma_reads_rows(head.lora_b, rows, columns, 2));
}

// Workspace bytes of a call that takes `step` rows at a time.
std::int64_t fused_bytes(const LinearLogprobParams& p, std::int64_t step, int device) {
  const HeadColumns columns = head_columns(p);
  const int blocks = multiprocessors(device), row_blocks = static_cast<int>((step + kPairRows - 1) / kPairRows);
  return LoraBytes(p.head, step).all + (is_small_m(p, step)
                                            ? head_workspace(columns, blocks).bytes
                                            : pair_workspace(columns, row_blocks, blocks, node_bytes(p)).bytes);
}

}  // namespace

void scored_rows(const ScoredRowsParams& p, int device, Stream stream) {
  if (p.num_rows == 0 || p.row_bytes == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("linear_logprob", device, scored_rows)(p, to_stream(stream));
}

void find_scored_groups(const LogprobInput& p, ScoredGroups* groups, int device, Stream stream) {
  RLK_CHECK(p.num_rows <= kScoredGroupRows * kMostScoredGroups, "linear_logprob: groups of a block of 8192 rows");
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("linear_logprob", device, find_scored_groups)(p, groups, to_stream(stream));
}

void zero_rows_past(const ScoredGroups* groups, void* rows, std::int64_t num_rows, std::int64_t row_bytes, int device,
                    Stream stream) {
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("linear_logprob", device, zero_rows_past)(groups, rows, num_rows, row_bytes, to_stream(stream));
}

bool fuses_linear_logprob(const LinearLogprobParams& p, int device) {
  const Head& head = p.head;
  const RowLayout weight_rows{std::max<std::int64_t>(p.num_columns, 1), 0, head.weight_stride};
  return compute_capability(device) == 90 && (head.dtype == DType::kBFloat16 || head.dtype == DType::kFloat16) &&
         p.kept_offsets == nullptr && p.num_rows > 0 && head.in_features > 0 &&
         p.num_columns < (std::int64_t{1} << 30) && tma_reads_rows(head.hidden, head.hidden_rows, p.num_rows, 2) &&
         tma_reads_rows(head.weight, weight_rows, p.num_columns, 2) && reads_lora(head, p.num_columns) &&
         parts_of_columns(p.vocab_size, p.valid_vocab, p.vocab_start, p.num_columns).count > 0 &&
         fits_one_tree(head_columns(p));
}

WorkspaceRange fused_linear_logprob_workspace(const LinearLogprobParams& p, int device) {
  const std::int64_t least = fused_bytes(p, std::min(p.num_rows, kFewestRows), device);
  return {least, std::max(least, fused_bytes(p, std::min(p.num_rows, rows_at_once(p)), device))};
}

void fused_linear_logprob(const LinearLogprobParams& p, int device, Stream stream) {
  const DeviceGuard guard(device);
  std::int64_t step = std::min(p.num_rows, rows_at_once(p));
  while (step > kFewestRows && fused_bytes(p, step, device) > p.workspace_bytes) {
    const std::int64_t multiple = step > kManyRows ? kManyRows : kFewestRows;
    step = (step - 1) / multiple * multiple;
  }
  note_plan([&] { return std::string(is_small_m(p, step) ? "fused, few rows" : "fused, pairs of tiles"); });
  const LoraBytes of_lora(p.head, step);
  auto* const memory = static_cast<unsigned char*>(p.workspace);
  for (std::int64_t row = 0; row < p.num_rows; row += step) {
    const std::int64_t rows = std::min(step, p.num_rows - row);
    const auto from = [&](auto* array, std::int64_t each) { return array == nullptr ? nullptr : array + row * each; };
    LinearLogprobParams q = p;
    q.num_rows = rows;
    q.head.hidden = static_cast<const unsigned char*>(p.head.hidden) + row * p.head.hidden_rows.inner_stride * 2;
    q.target = static_cast<const unsigned char*>(p.target) + row * p.target_rows.inner_stride * size_of(p.target_dtype);
    q.temperature = from(p.temperature, 1);
    q.logprob = from(p.logprob, 1);
    q.lse = from(p.lse, 1);
    q.entropy = from(p.entropy, 1);
    q.sum_p_sq = from(p.sum_p_sq, 1);
    q.status = from(p.status, 1);
    q.stats = from(p.stats, kStatsFields);
    q.workspace = memory + of_lora.all;
    q.workspace_bytes = p.workspace_bytes - of_lora.all;
    void* u = nullptr;
    if (p.head.lora_rank > 0) {
      u = memory;
      auto* const sums = reinterpret_cast<float*>(memory + of_lora.u);
      linear(lora_product(q.head, rows, sums), device, stream);
      tree_sum(lora_rounding(q.head, rows, sums, u), device, stream);
    }
    p.head.dtype == DType::kBFloat16 ? run_heads<Bf16>(q, u, to_stream(stream))
                                     : run_heads<Fp16>(q, u, to_stream(stream));
  }
}

bool fuses_logit_gradients(const LogprobBackwardParams& p, const Head& head, int device) {
  const RowLayout weight_rows{std::max<std::int64_t>(p.num_columns, 1), 0, head.weight_stride};
  return compute_capability(device) == 90 && (head.dtype == DType::kBFloat16 || head.dtype == DType::kFloat16) &&
         head.bias == nullptr && p.logit_scale == 1.0f && p.softcap == 0.0f && p.kept_offsets == nullptr &&
         head.in_features > 0 && head.in_features % 8 == 0 && p.num_columns < (std::int64_t{1} << 30) &&
         tma_reads_rows(head.weight, weight_rows, p.num_columns, 2) && reads_lora(head, p.num_columns);
}

void logit_gradients(const LogprobBackwardParams& p, const Head& head, const void* u, const ScoredGroups* groups,
                     int device, Stream stream) {
  RLK_CHECK(rows_begin_at_16_bytes(p.dlogits, p.dlogits_rows, p.num_rows, 2),
            "linear_logprob: rows of gradients begin at multiples of 16 bytes");
  const DeviceGuard guard(device);
  head.dtype == DType::kBFloat16 ? run_logit_gradients<Bf16>(p, head, u, groups, to_stream(stream))
                                 : run_logit_gradients<Fp16>(p, head, u, groups, to_stream(stream));
}

}  // namespace rlk::cuda
