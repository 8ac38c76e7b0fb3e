// Microbenchmark of the CUDA kernels of value_loss: one row per case, with the bytes that it must move and their share of
// the copy ceiling measured in the same run. Usage:
// bench_value_loss [--plans]    --plans: every plan, not the chosen one
#include <vector>

#include "bench/token_bench.h"
#include "cuda/common/kernels.h"
#include "kernels/losses/value_terms.h"
#include "rlk/math/ieee.h"

namespace rlk::bench {
namespace {

void run(const char* name, std::int64_t sequences, std::int64_t tokens, bool counts, const TokenRun& of) {
  constexpr int kArrays = 5;  // value, old_value, returns and mask are read, d_value is written
  const TokenBench bench(sequences, tokens, kArrays);
  std::vector<ValueLossParams> calls(static_cast<std::size_t>(bench.buffers()));
  TokenMemory memory;
  for (ValueLossParams& p : calls) {
    p.sequences = bench.sequences(false, &memory);
    for (PolicyTokens* const a : {&p.value, &p.old_value, &p.returns}) *a = {memory.normal(bench.slots()), tokens, 1};
    p.mask = mask_of(memory.normal(bench.slots()), tokens, DType::kFloat32);
    p.spec.clip = 0.2f;
    p.spec.huber = infinity();
    p.denominator_value = counts ? 0.0f : static_cast<float>(bench.slots());
    p.loss = memory.floats(1);
    p.metrics = memory.floats(kValueMetrics);
    p.d_value = memory.floats(bench.slots());
    p.workspace = memory.workspace<ValueBatch>(p.sequences);
  }
  bench.print(name, kArrays + counts, calls, cuda::sm90::value_loss, of);
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  return bench_tokens(argc, argv, [](std::int64_t sequences, std::int64_t tokens, const TokenRun& of) {
    run("clip", sequences, tokens, false, of);
    run("clip, counts", sequences, tokens, true, of);
  });
}
