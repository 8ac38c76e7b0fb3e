// Microbenchmark of preference_loss on CUDA: microseconds of a forward with its metrics, and of a backward.
#include "bench/buffers.h"
#include "bench/gpu_timer.h"
#include "bench/sequence_lengths.h"
#include "rlk/backends.h"
#include "rlk/ops/preference_loss.h"

namespace rlk::bench {
namespace {

void run(std::int64_t num, PreferenceSort sort) {
  const Buffers memory(static_cast<std::size_t>(num) * 4, 16, DType::kFloat32, true);
  const auto at = [&](int i) { return static_cast<float*>(memory.at(i)); };
  PreferenceLossParams p;
  p.chosen.num = p.rejected.num = num;
  p.chosen.policy = at(0);
  p.rejected.policy = at(1);
  p.chosen.reference = at(2);
  p.rejected.reference = at(3);
  p.losses = at(4);
  p.chosen.reward = at(5);
  p.rejected.reward = at(6);
  p.chosen.d_policy = at(7);
  p.rejected.d_policy = at(8);
  float* const metrics = on_device(std::vector<float>(kPreferenceMetrics));
  p.metrics = metrics;
  p.ranks = static_cast<std::int32_t*>(memory.at(9));  // this buffer and the next buffer
  p.order = static_cast<std::int32_t*>(memory.at(11));
  p.sort = sort;
  PreferenceLossBackwardParams q;
  q.dlosses = at(13);
  q.num_losses = num;
  q.chosen = {p.chosen.d_policy, nullptr, 0, num, at(14)};
  q.rejected = {p.rejected.d_policy, nullptr, 0, num, at(15)};
  const auto stream_of = [](cudaStream_t stream) { return reinterpret_cast<Stream>(stream); };
  std::printf("%s of %lld pairs: forward %7.2f us, backward %7.2f us\n", sort == PreferenceSort::kNone ? "dpo" : "aot",
              static_cast<long long>(num),
              median_us([&](cudaStream_t s, int) { cuda::preference_loss(p, 0, stream_of(s)); }, 16, 15),
              median_us([&](cudaStream_t s, int) { cuda::preference_loss_backward(q, 0, stream_of(s)); }, 16, 15));
  cudaFree(metrics);
}

}  // namespace
}  // namespace rlk::bench

int main() {
  using rlk::PreferenceSort;
  if (!rlk::bench::has_hopper()) return 1;
  for (const std::int64_t num : {64, 1024, 65536}) rlk::bench::run(num, PreferenceSort::kNone);
  for (const std::int64_t num : {64, 1024, 8192}) rlk::bench::run(num, PreferenceSort::kAot);
}
