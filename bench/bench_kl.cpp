// Microbenchmark of the CUDA kernel of kl: one row per case, with the bytes that it must move and their share of the copy
// ceiling measured in the same run. Usage:
// bench_kl [--plans]    --plans: every plan, not the chosen one
#include <vector>

#include "bench/token_bench.h"
#include "cuda/kl/kernels.h"
#include "rlk/kernels/kl_check.h"
#include "rlk/math/ieee.h"

namespace rlk::bench {
namespace {

void run(const char* name, std::int64_t sequences, std::int64_t tokens, bool backward, double ceiling,
         bool every_plan) {
  const int arrays = backward ? 5 : 4;  // logprob, ref_logprob, mask and of a backward d_kl are read, one is written
  const TokenBench bench(sequences, tokens, arrays);
  std::vector<KlParams> calls(static_cast<std::size_t>(bench.buffers()));
  TokenMemory memory;
  for (KlParams& p : calls) {
    p.sequences = {nullptr, DType::kInt32, sequences, tokens};
    for (PolicyTokens* const a : {&p.logprob, &p.ref_logprob}) *a = {memory.normal(bench.slots()), tokens, 1};
    if (backward) p.d_kl = {memory.normal(bench.slots()), tokens, 1};
    p.mask = {memory.normal(bench.slots()), tokens, DType::kFloat32};
    p.spec.estimator = KlEstimator::kK3;
    p.spec.input_limit = 20.0f;
    p.spec.limit = 10.0f;
    (backward ? p.d_logprob : p.kl) = memory.floats(bench.slots());
    p = as_one_row(p);
  }
  const cuda::PolicyPlan chosen = cuda::choose_plan(calls[0].sequences, cuda::multiprocessors(0));
  for (const cuda::PolicyPlan& plan : cuda::kPolicyPlans) {
    if (!every_plan && plan.tile != chosen.tile) continue;
    const auto call = [&](cudaStream_t s, int i) {
      cuda::kl_sm90(calls[static_cast<std::size_t>(i) % calls.size()], plan, s);
    };
    bench.print(name, arrays, call, ceiling, plan.tile, plan.tile == chosen.tile);
  }
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  bool every_plan = false;
  double ceiling = 0.0;
  if (const int status = start_token_bench(argc, argv, "bench_kl", &every_plan, &ceiling)) return status;
  for (const auto& [sequences, tokens] : kTokenShapes) {
    run("k3", sequences, tokens, false, ceiling, every_plan);
    run("k3, backward", sequences, tokens, true, ceiling, every_plan);
  }
  return 0;
}
