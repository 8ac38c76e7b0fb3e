// Microbenchmark of the CUDA kernel of kl: one row per case, with the bytes that it must move and their share of the copy
// ceiling measured in the same run. Usage:
// bench_kl [--plans]    --plans: every plan, not the chosen one
#include <vector>

#include "bench/token_bench.h"
#include "cuda/common/kernels.h"
#include "kernels/losses/kl_check.h"
#include "rlk/math/ieee.h"

namespace rlk::bench {
namespace {

void run(const char* name, std::int64_t sequences, std::int64_t tokens, bool backward, const TokenRun& of) {
  const int arrays = backward ? 5 : 4;  // reads logprob, ref_logprob, mask and, in a backward, d_kl; writes one array
  const TokenBench bench(sequences, tokens, arrays);
  std::vector<KlParams> calls(static_cast<std::size_t>(bench.buffers()));
  TokenMemory memory;
  for (KlParams& p : calls) {
    p.sequences = bench.sequences(false, &memory);
    for (PolicyTokens* const a : {&p.logprob, &p.ref_logprob}) *a = {memory.normal(bench.slots()), tokens, 1};
    if (backward) p.d_kl = {memory.normal(bench.slots()), tokens, 1};
    p.mask = mask_of(memory.normal(bench.slots()), tokens, DType::kFloat32);
    p.spec.estimator = KlEstimator::kK3;
    p.spec.input_limit = 20.0f;
    p.spec.limit = 10.0f;
    (backward ? p.d_logprob : p.kl) = memory.floats(bench.slots());
    p = as_one_row(p);
  }
  bench.print(name, arrays, calls, cuda::sm90::kl, of);
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  return bench_tokens(argc, argv, [](std::int64_t sequences, std::int64_t tokens, const TokenRun& of) {
    run("k3", sequences, tokens, false, of);
    run("k3, backward", sequences, tokens, true, of);
  });
}
