// Microbenchmark of the CUDA kernels of optimal_token_baseline, groups of eight sequences. A row per case shows the bytes
// that it must move, and their share of the copy ceiling of the same run. The kernel reads three inputs and a float32
// mask, and writes two outputs.
#include <vector>

#include "bench/token_bench.h"
#include "cuda/common/kernels.h"
#include "kernels/advantages/optimal_baseline_scan.h"
#include "rlk/ops/optimal_token_baseline.h"

namespace rlk::bench {
namespace {

void run(std::int64_t sequences, std::int64_t tokens, bool packed, const TokenRun& of) {
  constexpr int kArrays = 6;
  constexpr std::int64_t kMembers = 8;
  const TokenBench bench(sequences, tokens, kArrays);
  std::vector<OptimalTokenBaselineParams> calls(static_cast<std::size_t>(bench.buffers()));
  TokenMemory memory;
  for (OptimalTokenBaselineParams& p : calls) {
    p.sequences = bench.sequences(packed, &memory);
    for (PolicyTokens* const a : {&p.rewards, &p.logprob, &p.sum_p_sq}) {
      *a = {memory.normal(bench.slots(), 0.1f), tokens, 1};
    }
    p.mask = mask_of(memory.normal(bench.slots()), tokens, DType::kFloat32);
    p.group_size = sequences % kMembers == 0 ? kMembers : 1;
    p.num_groups = sequences / p.group_size;
    p.advantages = memory.floats(bench.slots());
    p.returns = memory.floats(bench.slots());
    p.workspace = memory.bytes(BaselineWorkspace(p.sequences, nullptr).bytes);
  }
  const auto call = [](const OptimalTokenBaselineParams& p, const cuda::TokenPlan&, cudaStream_t stream) {
    cuda::sm90::optimal_token_baseline(p, stream);
  };
  bench.print(packed ? "packed" : "padded", kArrays, calls, call, of);
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  return bench_tokens(argc, argv, [](std::int64_t sequences, std::int64_t tokens, const TokenRun& of) {
    for (const bool packed : {false, true}) run(sequences, tokens, packed, of);
  });
}
