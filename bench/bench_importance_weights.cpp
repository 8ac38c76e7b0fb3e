// Microbenchmark of the CUDA kernels of importance_weights. A row per case shows the bytes that it must move, and their share
// of the copy ceiling of the same run. The kernel reads both arrays and a float32 mask, twice where a sequence decides,
// and writes weights and kept. normalize reads and writes weights again. Usage:
// bench_importance_weights [--plans]    --plans: every plan, not the chosen one
#include <string>
#include <vector>

#include "bench/token_bench.h"
#include "cuda/common/kernels.h"
#include "kernels/losses/rejection_terms.h"

namespace rlk::bench {
namespace {

struct Case {
  const char* name;
  ImportanceLevel level;
  bool rejects, normalize, measures;
};
constexpr Case kCases[] = {{"tokens", ImportanceLevel::kToken, false, false, false},
                           {"tokens, normalized", ImportanceLevel::kToken, false, true, false},
                           {"tokens, metrics", ImportanceLevel::kToken, false, false, true},
                           {"sequences", ImportanceLevel::kSequence, false, false, false},
                           {"tokens, seq_mean_k3, veto", ImportanceLevel::kToken, true, false, false}};

void run(const Case& c, std::int64_t sequences, std::int64_t tokens, bool packed, const TokenRun& of) {
  constexpr int kInputs = 3, kOutputs = 2;  // logprob, rollout_logprob and mask are read
  const TokenBench bench(sequences, tokens, kInputs + kOutputs);
  std::vector<ImportanceWeightsParams> calls(static_cast<std::size_t>(bench.buffers()));
  TokenMemory memory;
  for (ImportanceWeightsParams& p : calls) {
    p.sequences = bench.sequences(packed, &memory);
    for (PolicyTokens* const a : {&p.logprob, &p.rollout_logprob}) *a = {memory.normal(bench.slots(), 0.1f), tokens, 1};
    p.mask = mask_of(memory.normal(bench.slots()), tokens, DType::kFloat32);
    p.spec.level = c.level;
    p.spec.normalize = c.normalize;
    p.spec.low = -infinity();
    p.spec.high = 2.0f;
    p.spec.limit = 20.0f;
    if (c.rejects) {
      p.spec.mean.k3 = 0.01f;
      p.spec.veto_below = -10.0f;
    }
    p.weights = memory.floats(bench.slots());
    p.kept = memory.floats(bench.slots());
    if (c.measures) p.metrics = memory.floats(kImportanceMetrics);
    p.workspace = memory.workspace<ImportanceBatch>(p.sequences);
  }
  const int moved = kOutputs + kInputs * (needs_statistics(calls[0].spec) ? 2 : 1) + (c.normalize ? 2 : 0);
  bench.print((std::string(c.name) + (packed ? ", packed" : "")).c_str(), moved, calls, cuda::sm90::importance_weights,
              of);
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  return bench_tokens(argc, argv, [](std::int64_t sequences, std::int64_t tokens, const TokenRun& of) {
    for (const bool packed : {false, true}) {
      for (const Case& c : kCases) run(c, sequences, tokens, packed, of);
    }
  });
}
