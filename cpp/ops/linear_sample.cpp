// The operator `linear_sample` on every device. It runs `linear` and `sample` on some rows at a time, with their logits
// in a workspace of a given size. If the device has a fused kernel that supports the call, the kernel runs instead,
// with the same bits.
#include "rlk/ops/linear_sample.h"

#include <algorithm>

#include "cpp/ops/workspace.h"
#include "rlk/backends.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/sample/head_sample.h"
#endif

namespace rlk {
namespace {

void check_linear_sample(const LinearSampleParams& p) {
  const LinearParams& product = p.product;
  const SampleParams& draw = p.draw;
  RLK_CHECK(product.num_rows >= 0 && product.num_rows < std::int64_t{1} << 31, "linear_sample: fewer than 2^31 rows");
  RLK_CHECK(product.out_features >= 1 && product.out_features <= kSampleVocab,
            "linear_sample: the weight has 1 to 2^19 rows");
  RLK_CHECK(product.out_dtype == product.dtype || product.out_dtype == DType::kFloat32,
            "linear_sample: logits have the operands' type or float32");
  RLK_CHECK(product.num_rows == 0 || product.x_rows.inner >= product.num_rows, "linear_sample: x has one stride");
  RLK_CHECK(product.y == nullptr && product.start == nullptr && product.k_segments == 1,
            "linear_sample: the product has no y, no start and one segment");
  RLK_CHECK(draw.top_p.data == nullptr && draw.top_p.value == 1.0f && draw.allowed == nullptr &&
                draw.edited == nullptr && draw.raw_logits == nullptr && draw.row_status == nullptr &&
                draw.n_logprobs == 0 && draw.top_ids == nullptr && draw.raw_top_ids == nullptr &&
                draw.kept_offsets == nullptr,
            "linear_sample: neither top_p, allowed columns, other raw logits, the n best nor kept sets");
}

// sample's params for rows [row, row + rows).
SampleParams draw_of(const LinearSampleParams& p, std::int64_t row, std::int64_t rows) {
  SampleParams q = p.draw;
  const auto move_floats = [&](RowFloats* of_rows) { of_rows->data = from_row(of_rows->data, row, of_rows->stride); };
  const auto move_integers = [&](RowIntegers* of_rows) {
    if (of_rows->data != nullptr) of_rows->data = at(of_rows->data, row * of_rows->stride * size_of(of_rows->dtype));
  };
  move_floats(&q.temperature);
  move_floats(&q.min_p);
  move_integers(&q.top_k);
  move_integers(&q.seed);
  move_integers(&q.sample_id);
  move_integers(&q.position);
  q.is_greedy = from_row(q.is_greedy, row, q.greedy_stride);
  q.ids = from_row(q.ids, row);
  q.status = from_row(q.status, row);
  q.logprob = from_row(q.logprob, row);
  q.raw_logprob = from_row(q.raw_logprob, row);
  q.num_rows = rows;
  q.vocab_size = q.logits_stride = p.product.out_features;
  q.dtype = p.product.out_dtype;
  q.most_top_k = std::min(q.most_top_k, kLinearSampleTopK);
  return q;
}

// Whether one kernel computes the product of these rows and their leaf statistics, without storing logits.
bool is_fused([[maybe_unused]] const LinearParams& product, [[maybe_unused]] const SampleParams& draw,
              [[maybe_unused]] Device device) {
#if RLK_WITH_CUDA
  return device.type == DeviceType::kCuda && cuda::fuses_linear_sample(product, draw, device.index);
#else
  return false;
#endif
}

struct RowPieces {
  void *logits, *of_sample;
  std::int64_t bytes;
  RowPieces(const LinearSampleParams& p, std::int64_t rows, Device device) {
    Pieces pieces(p.workspace);
    // If the kernel supports all rows of a call, it also supports any part of these rows.
    const std::int64_t stored = is_fused(p.product, p.draw, device) ? 0 : rows;
    logits = pieces.take(stored * p.product.out_features * size_of(p.product.out_dtype));
    of_sample = pieces.take(sample_workspace_bytes(draw_of(p, 0, rows), device));
    bytes = pieces.used();
  }
};

}  // namespace

WorkspaceRange linear_sample_workspace(const LinearSampleParams& p, Device device) {
  if (p.product.num_rows == 0) return {};
  return {RowPieces(p, 1, device).bytes, RowPieces(p, p.product.num_rows, device).bytes};
}

void linear_sample(const LinearSampleParams& p, Device device, Stream stream) {
  require_backend("linear_sample", device);
  check_linear_sample(p);
  const std::int64_t num_rows = p.product.num_rows;
  if (num_rows == 0) return;
  require_workspace("linear_sample", p.workspace, p.workspace_bytes, linear_sample_workspace(p, device).least);
  const std::int64_t step =
      most_rows(num_rows, p.workspace_bytes, [&](std::int64_t rows) { return RowPieces(p, rows, device).bytes; });
  const RowPieces pieces(p, step, device);
  for (std::int64_t row = 0; row < num_rows; row += step) {
    const std::int64_t rows = std::min(step, num_rows - row);
    LinearParams product = p.product;
    product.x = at(product.x, row * product.x_rows.inner_stride * size_of(product.dtype));
    product.num_rows = rows;
    product.y = pieces.logits;
    product.y_rows = dense(rows, product.out_features);
    SampleParams draw = draw_of(p, row, rows);
    draw.logits = pieces.logits;
    draw.workspace = pieces.of_sample;
#if RLK_WITH_CUDA
    if (is_fused(product, draw, device)) {
      cuda::fused_linear_sample(product, draw, device.index, stream);
      continue;
    }
#endif
    linear(product, device, stream);
    sample(draw, device, stream);
  }
}

}  // namespace rlk
