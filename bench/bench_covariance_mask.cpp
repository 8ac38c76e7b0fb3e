// Microbenchmark of the CUDA kernels of covariance_mask. A row per case shows the bytes that it must move, and their share of
// the copy ceiling of the same run. The kernel reads the inputs and a float32 mask once, and writes the chosen tokens.
// Usage:
// bench_covariance_mask [--plans]    --plans: every plan, not the chosen one
#include <string>
#include <vector>

#include "bench/token_bench.h"
#include "cuda/common/kernels.h"
#include "kernels/losses/covariance_terms.h"

namespace rlk::bench {
namespace {

void run(CovarianceKind kind, std::int64_t sequences, std::int64_t tokens, bool packed, const TokenRun& of) {
  const bool draws = kind == CovarianceKind::kClip, entropy = kind == CovarianceKind::kEntropy;
  const int arrays = draws ? 5 : entropy ? 3 : 4;
  const TokenBench bench(sequences, tokens, arrays);
  std::vector<CovarianceMaskParams> calls(static_cast<std::size_t>(bench.buffers()));
  TokenMemory memory;
  for (CovarianceMaskParams& p : calls) {
    p.sequences = bench.sequences(packed, &memory);
    p.logprob = {memory.normal(bench.slots()), tokens, 1};
    if (draws) p.old_logprob = {memory.normal(bench.slots()), tokens, 1};
    if (!entropy) p.advantage = {memory.normal(bench.slots()), tokens, 1};
    p.mask = mask_of(memory.normal(bench.slots()), tokens, DType::kFloat32);
    p.kind = kind;
    if (entropy) p.ratio = 0.2;
    p.selected = memory.floats(bench.slots());
    p.workspace = memory.workspace<CovarianceBatch>(p.sequences);
  }
  bench.print((std::string(draws     ? "clip"
                           : entropy ? "entropy"
                                     : "kl") +
               (packed ? ", packed" : ""))
                  .c_str(),
              arrays, calls, cuda::sm90::covariance_mask, of);
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  return bench_tokens(argc, argv, [](std::int64_t sequences, std::int64_t tokens, const TokenRun& of) {
    for (const bool packed : {false, true}) {
      using Kind = rlk::CovarianceKind;
      for (const Kind kind : {Kind::kClip, Kind::kKl, Kind::kEntropy}) {
        run(kind, sequences, tokens, packed, of);
      }
    }
  });
}
