// Microbenchmark of linear_sample on CUDA. The operator alternates with the bare product that it contains; times are
// relative to that product.
#include <cmath>
#include <cstdio>
#include <vector>

#include "bench/buffers.h"
#include "bench/gpu_timer.h"
#include "rlk/ops/linear_sample.h"

namespace rlk::bench {
namespace {

constexpr Device kDevice{DeviceType::kCuda, 0};
constexpr std::int64_t kFeatures = 4096, kVocab = 128256;
constexpr int kCalls = 8, kRounds = 9;

void run(std::int64_t rows, DType logits_dtype) {
  const auto bytes = [](std::int64_t elements, int each) { return static_cast<std::size_t>(elements * each); };
  const Buffers hidden(bytes(rows * kFeatures, 2), 1, DType::kBFloat16, true);
  const Buffers weight(bytes(kVocab * kFeatures, 2), 1, DType::kBFloat16, false);
  fill_normal(weight.at(0), static_cast<std::size_t>(kVocab * kFeatures), DType::kBFloat16,
              1.0f / std::sqrt(static_cast<float>(kFeatures)));
  const Buffers logits(bytes(rows * kVocab, size_of(logits_dtype)), 1, logits_dtype, false);
  const Buffers of_rows(bytes(rows, 8 + 4 + 4), 1, DType::kFloat32, false);
  LinearSampleParams p;
  p.product.x = hidden.at(0);
  p.product.weight = weight.at(0);
  p.product.x_rows = {rows, 0, kFeatures};
  p.product.weight_stride = p.product.in_features = kFeatures;
  p.product.num_rows = rows;
  p.product.out_features = kVocab;
  p.product.out_dtype = logits_dtype;
  p.draw.valid_vocab = kVocab;
  p.draw.temperature.value = 0.8f;
  p.draw.top_p.value = 1.0f;
  p.draw.exp = Exp::kHardware;
  p.draw.ids = static_cast<std::int64_t*>(of_rows.at(0));
  p.draw.logprob = reinterpret_cast<float*>(p.draw.ids + rows);
  p.draw.status = reinterpret_cast<std::int32_t*>(p.draw.logprob + rows);
  p.workspace_bytes = linear_sample_workspace(p, kDevice).most;
  const Buffers workspace(static_cast<std::size_t>(p.workspace_bytes), 1, DType::kFloat32, false);
  p.workspace = workspace.at(0);
  LinearParams product = p.product;
  product.y = logits.at(0);
  product.y_rows = {rows, 0, kVocab};
  Replay bare([&](cudaStream_t stream, int) { linear(product, kDevice, reinterpret_cast<Stream>(stream)); }, kCalls);
  Replay ours([&](cudaStream_t stream, int) { linear_sample(p, kDevice, reinterpret_cast<Stream>(stream)); }, kCalls);
  bare.warm_up();
  ours.warm_up();
  for (int i = 0; i < kRounds; ++i) bare.once(), ours.once();
  std::printf("%4lld rows, logits of %d bytes: product %8.1f us, linear_sample %8.1f us, %.3f of the product\n",
              static_cast<long long>(rows), size_of(logits_dtype), bare.median_us(), ours.median_us(),
              ours.median_us() / bare.median_us());
}

}  // namespace
}  // namespace rlk::bench

int main() {
  using namespace rlk;
  if (!bench::has_hopper()) return 1;
  for (const DType logits : {DType::kBFloat16, DType::kFloat32}) {
    for (const std::int64_t rows : {1, 64, 256}) bench::run(rows, logits);
  }
}
