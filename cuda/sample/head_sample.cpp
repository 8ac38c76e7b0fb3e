// Host side of linear_sample on CUDA: the calls whose product also computes leaf statistics.
#include "head_sample.h"

#include "../common/alignment.h"
#include "../common/launch.h"
#include "head_kernels.h"
#include "kernels/rows/linear_check.h"
#include "kernels/sample/check.h"
#include "rlk/backends.h"
#include "rlk/plan_note.h"

namespace rlk::cuda {

bool fuses_linear_sample(const LinearParams& product, const SampleParams& draw, int device) {
  const RowLayout weight_rows{product.out_features, 0, product.weight_stride};
  // Calls with cuts or greedy rows need the leaves' largest z, and calls with raw_logprob need other statistics.
  const bool draws_from_all = draw.is_greedy == nullptr && !draw.greedy && !cuts(draw.top_k, 0) &&
                              !cuts(draw.min_p, 0.0f) && draw.raw_logprob == nullptr;
  return draws_from_all && compute_capability(device) == 90 &&
         (product.dtype == DType::kBFloat16 || product.dtype == DType::kFloat16) && product.num_rows > 0 &&
         product.num_rows <= kMostFusedRows && product.in_features > 0 && product.in_features < std::int64_t{1} << 30 &&
         tma_reads_rows(product.x, product.x_rows, product.num_rows, 2) &&
         tma_reads_rows(product.weight, weight_rows, product.out_features, 2);
}

void fused_linear_sample(const LinearParams& product, const SampleParams& draw, int device, Stream stream) {
  check_linear(product);
  check_sample(draw);
  RLK_CHECK(draw.workspace != nullptr, "sample: a workspace is given");
  const DeviceGuard guard(device);
  note_plan([] { return std::string("fused, few rows"); });
  product.dtype == DType::kBFloat16 ? run_fused_rows<Bf16>(product, draw, to_stream(stream))
                                    : run_fused_rows<Fp16>(product, draw, to_stream(stream));
}

}  // namespace rlk::cuda
