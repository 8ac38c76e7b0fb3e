// Microbenchmark of the CUDA kernels of mismatch_metrics. It prints one row per case: the bytes that it must move, and
// their share of the bandwidth of a copy in the same run. A case reads both arrays and a float32 mask once. Usage:
// bench_mismatch_metrics [--plans]    --plans: every plan, not the chosen one
#include <vector>

#include "bench/token_bench.h"
#include "cuda/common/kernels.h"
#include "kernels/losses/mismatch_terms.h"

namespace rlk::bench {
namespace {

void run(std::int64_t sequences, std::int64_t tokens, bool packed, const TokenRun& of) {
  constexpr int kArrays = 3;  // logprob_train, logprob_rollout and mask are read
  const TokenBench bench(sequences, tokens, kArrays);
  std::vector<MismatchMetricsParams> calls(static_cast<std::size_t>(bench.buffers()));
  TokenMemory memory;
  for (MismatchMetricsParams& p : calls) {
    p.sequences = bench.sequences(packed, &memory);
    for (PolicyTokens* const a : {&p.logprob_train, &p.logprob_rollout}) {
      *a = {memory.normal(bench.slots(), 0.1f), tokens, 1};
    }
    p.mask = mask_of(memory.normal(bench.slots()), tokens, DType::kFloat32);
    p.limit = 20.0f;
    p.metrics = memory.floats(kMismatchMetrics);
    p.workspace = memory.workspace<MismatchBatch>(p.sequences);
  }
  bench.print(packed ? "packed" : "padded", kArrays, calls, cuda::sm90::mismatch_metrics, of);
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  return bench_tokens(argc, argv, [](std::int64_t sequences, std::int64_t tokens, const TokenRun& of) {
    for (const bool packed : {false, true}) run(sequences, tokens, packed, of);
  });
}
