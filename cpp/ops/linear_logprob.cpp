// The operator `linear_logprob` on every device. It computes products and statistics of some rows and columns at a
// time, in a workspace of a given size. If the device has a fused kernel that supports the call, the kernel runs
// instead, with the same bits.
#include "rlk/ops/linear_logprob.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpp/ops/linear_logprob_gradients.h"
#include "cpp/ops/linear_logprob_parts.h"
#include "cpp/ops/linear_logprob_rows.h"
#include "rlk/build.h"
#include "rlk/ops/sample.h"
#if RLK_WITH_CUDA
#include "cuda/linear_logprob/linear_logprob.h"
#endif

namespace rlk {
namespace {

void check_head(const LogprobInput& p, const Head& head) {
  RLK_CHECK(p.num_rows >= 0 && head.in_features >= 0, "linear_logprob: sizes are not negative");
  RLK_CHECK(p.num_rows < std::int64_t{1} << 31, "linear_logprob: fewer than 2^31 rows");
  RLK_CHECK(p.dtype == head.dtype || p.dtype == DType::kFloat32,
            "linear_logprob: logits have the operands' type or float32");
  RLK_CHECK(p.num_rows == 0 || p.target_rows.inner >= p.num_rows, "linear_logprob: the target has one stride");
  RLK_CHECK(head.lora_rank >= 0 && std::isfinite(head.lora_scale),
            "linear_logprob: lora_rank is not negative, lora_scale is finite");
  if (p.num_rows == 0) return;
  RLK_CHECK(p.target != nullptr, "linear_logprob: target is given");
  RLK_CHECK(head.in_features == 0 || (head.hidden && head.weight), "linear_logprob: hidden and weight are given");
  RLK_CHECK(head.hidden_rows.inner > 0, "linear_logprob: row layouts have inner >= 1");
  RLK_CHECK(head.lora_rank == 0 || ((head.in_features == 0 || head.lora_a) && (p.num_columns == 0 || head.lora_b)),
            "linear_logprob: lora_a and lora_b are given");
}

// Params of the operator `sample` that give the column with the largest logit of each row: every row is greedy.
SampleParams first_ranks(const LinearLogprobParams& p, const void* logits, std::int64_t rows) {
  SampleParams s;
  s.logits = logits;
  s.dtype = p.dtype;
  s.logits_stride = s.vocab_size = p.num_columns;
  s.valid_vocab = std::min(p.valid_vocab, p.num_columns);
  s.num_rows = rows;
  s.greedy = true;
  s.exp = p.exp;
  s.ids = p.largest;
  return s;
}

// Workspace of a forward that takes `rows` rows at a time.
struct ForwardPieces {
  void *hidden, *logits, *of_logprob, *of_sample = nullptr;
  std::int32_t* sample_status = nullptr;
  LoraRows lora;
  float* sums = nullptr;
  std::int64_t bytes;
  ForwardPieces(const LinearLogprobParams& p, std::int64_t rows, Device device) {
    Pieces pieces(p.workspace);
    hidden = pieces.take(rows * p.head.in_features * size_of(p.head.dtype));
    logits = pieces.take(rows * p.num_columns * size_of(p.dtype));
    lora.take(&pieces, p.head, rows);
    if (sums_logits(p.head, p.dtype)) sums = pieces.take<float>(rows * p.num_columns * 4);
    LogprobParams q = p;
    q.num_rows = rows;
    q.logits_rows = dense(rows, p.num_columns);
    of_logprob = pieces.take(logprob_workspace_bytes(q, device));
    if (p.largest != nullptr) {
      of_sample = pieces.take(sample_workspace_bytes(first_ranks(p, nullptr, rows), device));
      sample_status = pieces.take<std::int32_t>(rows * 4);
    }
    bytes = pieces.used();
  }
};

// Rows [row, row + rows) of all arrays except the hidden states.
LinearLogprobParams rows_of(const LinearLogprobParams& p, std::int64_t row, std::int64_t rows) {
  LinearLogprobParams q = p;
  move_to_rows(&q, row, rows);
  q.logprob = from_row(p.logprob, row);
  q.lse = from_row(p.lse, row);
  q.entropy = from_row(p.entropy, row);
  q.sum_p_sq = from_row(p.sum_p_sq, row);
  q.status = from_row(p.status, row);
  q.stats = from_row(p.stats, row, kStatsFields);
  q.largest = from_row(p.largest, row);
  return q;
}

void forward_by_rows(const LinearLogprobParams& p, Device device, Stream stream) {
  const auto bytes_of = [&](std::int64_t rows) { return ForwardPieces(p, rows, device).bytes; };
  const std::int64_t step = most_rows(p.num_rows, p.workspace_bytes, bytes_of);
  const ForwardPieces pieces(p, step, device);
  for (std::int64_t row = 0; row < p.num_rows; row += step) {
    const std::int64_t rows = std::min(step, p.num_rows - row);
    copy_scored(p, p.head, row, rows, nullptr, pieces.hidden, device, stream);
    pieces.lora.compute(p.head, pieces.hidden, rows, device, stream);
    compute_logits(p.head, p.dtype, pieces.hidden, pieces.lora.u, rows, 0, p.num_columns, pieces.sums, pieces.logits,
                   p.num_columns, device, stream);
    const LinearLogprobParams of_rows = rows_of(p, row, rows);
    LogprobParams q = of_rows;
    q.logits = pieces.logits;
    q.logits_rows = dense(rows, p.num_columns);
    q.workspace = pieces.of_logprob;
    logprob(q, device, stream);
    if (p.largest == nullptr) continue;
    SampleParams s = first_ranks(of_rows, pieces.logits, rows);
    s.status = pieces.sample_status;
    s.workspace = pieces.of_sample;
    sample(s, device, stream);
  }
}

#if RLK_WITH_CUDA
bool is_fused(const LinearLogprobParams& p, int device) {
  return p.largest == nullptr && p.label_smoothing == 0.0f && cuda::fuses_linear_logprob(p, device);
}

// A fused forward reads rows with one stride that are 16-byte aligned. linear_logprob copies other layouts, such as
// hidden[:, :-1], this many rows at a time.
constexpr std::int64_t kMostCopies = 8192;

LinearLogprobParams of_copies(const LinearLogprobParams& p, std::int64_t row, std::int64_t rows, void* hidden) {
  LinearLogprobParams q = rows_of(p, row, rows);
  q.head.hidden = hidden;
  q.head.hidden_rows = dense(rows, p.head.in_features);
  return q;
}
bool fuses_copies(const LinearLogprobParams& p, int device) {
  return is_fused(of_copies(p, 0, std::min(p.num_rows, kMostCopies), nullptr), device);
}
std::int64_t copy_bytes(const LinearLogprobParams& p, std::int64_t rows) {
  return aligned(rows * p.head.in_features * size_of(p.head.dtype));
}
WorkspaceRange copies_workspace(const LinearLogprobParams& p, std::int64_t rows, int device) {
  const WorkspaceRange fused = cuda::fused_linear_logprob_workspace(of_copies(p, 0, rows, nullptr), device);
  return {copy_bytes(p, rows) + fused.least, copy_bytes(p, rows) + fused.most};
}

void forward_of_copies(const LinearLogprobParams& p, Device device, Stream stream) {
  std::int64_t step = std::min(p.num_rows, kMostCopies);
  while (step > kFewestRows && copies_workspace(p, step, device.index).most > p.workspace_bytes) {
    step = (step - 1) / kFewestRows * kFewestRows;
  }
  for (std::int64_t row = 0; row < p.num_rows; row += step) {
    const std::int64_t rows = std::min(step, p.num_rows - row);
    LinearLogprobParams q = of_copies(p, row, rows, p.workspace);
    q.workspace = at(p.workspace, copy_bytes(p, step));
    q.workspace_bytes = p.workspace_bytes - copy_bytes(p, step);
    copy_scored(p, p.head, row, rows, nullptr, p.workspace, device, stream);
    cuda::fused_linear_logprob(q, device.index, stream);
  }
}
#endif

// The CPU allocates its own workspace if the caller gives none.
template <class Params>
std::vector<unsigned char> own_workspace(Params* p, const WorkspaceRange& range) {
  constexpr std::int64_t kOwn = 64 << 20;
  p->workspace_bytes = std::max(range.least, std::min(range.most, kOwn));
  std::vector<unsigned char> memory(static_cast<std::size_t>(p->workspace_bytes + kWorkspaceAlign));
  const auto first = reinterpret_cast<std::uintptr_t>(memory.data());
  p->workspace =
      memory.data() + (kWorkspaceAlign - static_cast<std::int64_t>(first % kWorkspaceAlign)) % kWorkspaceAlign;
  return memory;
}

}  // namespace

WorkspaceRange linear_logprob_workspace(const LinearLogprobParams& p, Device device) {
  if (p.num_rows == 0) return {};
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda && is_fused(p, device.index)) {
    return cuda::fused_linear_logprob_workspace(p, device.index);
  }
  if (device.type == DeviceType::kCuda && fuses_copies(p, device.index)) {
    return {copies_workspace(p, std::min(p.num_rows, kFewestRows), device.index).least,
            copies_workspace(p, std::min(p.num_rows, kMostCopies), device.index).most};
  }
#endif
  constexpr std::int64_t kMoreRows = 256 << 20;  // fewer rows of logits at a time take longer (cuda/linear_logprob)
  return {ForwardPieces(p, 1, device).bytes, ForwardPieces(p, p.num_rows, device).bytes, kMoreRows};
}

void linear_logprob(const LinearLogprobParams& p, Device device, Stream stream) {
  require_backend("linear_logprob", device);
  check_head(p, p.head);
  RLK_CHECK(p.largest == nullptr || (p.stats == nullptr && p.kept_offsets == nullptr && p.num_columns <= kSampleVocab),
            "linear_logprob: largest is of a whole vocabulary of at most 2^19 columns, without kept sets");
  if (p.num_rows == 0) return;
  LinearLogprobParams q = p;
  std::vector<unsigned char> own;
  if (device.type == DeviceType::kCpu && p.workspace == nullptr)
    own = own_workspace(&q, linear_logprob_workspace(p, device));
  require_workspace("linear_logprob", q.workspace, q.workspace_bytes, linear_logprob_workspace(p, device).least);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda && is_fused(q, device.index)) {
    return cuda::fused_linear_logprob(q, device.index, stream);
  }
  if (device.type == DeviceType::kCuda && fuses_copies(q, device.index)) return forward_of_copies(q, device, stream);
#endif
  forward_by_rows(q, device, stream);
}

WorkspaceRange linear_logprob_backward_workspace(const LinearLogprobBackwardParams& p, Device device) {
  if (p.num_rows == 0 || p.num_columns == 0) return {};
  if (is_by_parts(p)) return by_parts_workspace(p, device);
  return gradients_workspace(p, device);
}

void linear_logprob_backward(const LinearLogprobBackwardParams& p, Device device, Stream stream) {
  require_backend("linear_logprob", device);
  check_head(p, p.head);
  const auto is_one_stride = [&](const RowLayout& rows) { return rows.inner >= p.num_rows; };
  RLK_CHECK((p.dlogprob == nullptr || is_one_stride(p.dlogprob_rows)) &&
                (p.dlse == nullptr || is_one_stride(p.dlse_rows)) &&
                (p.dentropy == nullptr || is_one_stride(p.dentropy_rows)) &&
                (p.dhidden == nullptr || is_one_stride(p.dhidden_rows)),
            "linear_logprob_backward: gradients of rows have one stride");
  RLK_CHECK(p.dh_segments == 1 || p.dh_segments == kNumParts, "linear_logprob_backward: dh_segments is 1 or 8");
  RLK_CHECK(has_lora(p.head) || (p.dlora_a == nullptr && p.dlora_b == nullptr),
            "linear_logprob_backward: dlora_a and dlora_b are of LoRA alone");
  RLK_CHECK(!p.adds_dlora_a || p.wide_dlora_a, "linear_logprob_backward: what dlora_a is added to is float32");
  if (p.num_rows == 0 || p.num_columns == 0) return gradients_of_empty(p, device, stream);
  if (is_by_parts(p)) return backward_by_parts(p, device, stream);
  LinearLogprobBackwardParams q = p;
  std::vector<unsigned char> own;
  const WorkspaceRange range = linear_logprob_backward_workspace(p, device);
  if (device.type == DeviceType::kCpu && p.workspace == nullptr) own = own_workspace(&q, range);
  require_workspace("linear_logprob", q.workspace, q.workspace_bytes, range.least);
  compute_gradients(q, device, stream);
}

}  // namespace rlk
