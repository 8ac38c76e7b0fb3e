// Microbenchmark of the CUDA kernels of mismatch_metrics: one row per case, with the bytes that it must move (both arrays and a
// float32 mask, once) and their share of the copy ceiling measured in the same run. Usage: bench_mismatch_metrics [--plans]
#include "bench/rollout_bench.h"
#include "cuda/mismatch_metrics/kernels.h"

int main(int argc, char** argv) {
  using namespace rlk;
  return bench::bench_rollouts(
      argc, argv, [](std::int64_t sequences, std::int64_t tokens, bool packed, double ceiling, bool every_plan) {
        bench::RolloutBatches b(sequences, tokens, packed);
        std::vector<MismatchMetricsParams> calls;
        for (std::size_t i = 0; i < b.train.size(); ++i) {
          calls.push_back({b.sequences, b.train[i], b.rollout[i], b.mask[i], 20.0f});
          calls[i].metrics = static_cast<float*>(b.allocate(kMismatchMetrics * sizeof(float)));
          calls[i].workspace =
              b.allocate(static_cast<std::size_t>(MismatchWorkspace(b.sequences, cuda::kWarpTile, nullptr).bytes));
        }
        bench::time_plans(packed ? "packed" : "padded", sequences, tokens, b, 3 * b.bytes(), ceiling, every_plan,
                          [&](std::size_t call, const cuda::TokenPlan& plan, cudaStream_t stream) {
                            cuda::mismatch_metrics_sm90(calls[call], plan, stream);
                          });
      });
}
