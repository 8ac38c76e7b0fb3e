// Microbenchmark of the CUDA kernels of policy_loss: one row per case, with the bytes that it must move and their share of
// the copy ceiling measured in the same run. Usage:
// bench_policy_loss [--plans] [--sequences N --tokens N]    --plans: every plan, not the chosen one
#include <vector>

#include "bench/token_bench.h"
#include "cuda/policy_loss/kernels.h"

namespace rlk::bench {
namespace {

struct Case {
  const char* name;
  RatioLevel level = RatioLevel::kToken;
  bool importance = false, entropy = false, counts = false, packed = false;
  int odd = 0;                // tokens more
  bool of_sequences = false;  // advantages
};
constexpr Case kCases[] = {{"ppo, kl"},
                           {"grpo, kl", RatioLevel::kToken, false, false, false, false, 0, true},
                           {"ppo, kl, counts", RatioLevel::kToken, false, false, true},
                           {"ppo, kl, tis, entropy", RatioLevel::kToken, true, true},
                           {"gspo, kl", RatioLevel::kGeometric},
                           {"ppo, kl, packed", RatioLevel::kToken, false, false, false, true},
                           {"ppo, kl, packed, odd", RatioLevel::kToken, false, false, false, true, 1}};

void run(const Case& c, std::int64_t sequences, std::int64_t tokens, const TokenRun& of) {
  // The mask counts as one array.
  const int inputs = 5 + c.importance + c.entropy - c.of_sequences, outputs = 1 + c.entropy;
  const TokenBench bench(sequences, tokens, inputs + outputs);
  std::vector<PolicyLossParams> calls(static_cast<std::size_t>(bench.buffers()));
  TokenMemory memory;
  for (PolicyLossParams& p : calls) {
    p.sequences = bench.sequences(c.packed, &memory);
    PolicyTokens* const arrays[] = {&p.logprob,     &p.old_logprob, &p.advantage,
                                    &p.ref_logprob, &p.importance,  &p.entropy};
    const bool given[] = {true, true, true, true, c.importance, c.entropy};
    for (int i = 0; i < 6; ++i) {
      if (given[i]) *arrays[i] = {memory.normal(bench.slots(), 0.1f), tokens, 1};
    }
    if (c.of_sequences) p.advantage = {memory.normal(sequences), 1, 0};
    p.mask = mask_of(memory.normal(bench.slots()), tokens, DType::kFloat32);
    PolicySpec& s = p.spec;
    s.level = c.level;
    s.straight_through = 1;
    s.log_ratio_min = -20.0f;
    s.log_ratio_max = 20.0f;
    s.clip_low = 0.8f;
    s.clip_high = 1.28f;
    s.ratio_cap = infinity();
    s.dual_clip = 3.0f;
    s.kl = KlEstimator::kK3;
    s.kl_coef = 1e-3f;
    s.kl_input_limit = 20.0f;
    s.kl_limit = 10.0f;
    s.importance = c.importance ? ImportanceLevel::kToken : ImportanceLevel::kNone;
    s.importance_low = -infinity();
    s.importance_high = 2.0f;
    s.importance_limit = s.drop_above = infinity();
    s.entropy_coef = c.entropy ? 1e-3f : 0.0f;
    p.denominator_value = c.counts ? 0.0f : static_cast<float>(bench.slots());
    p.loss = memory.floats(1);
    p.metrics = memory.floats(kPolicyMetrics);
    p.d_logprob = memory.floats(bench.slots());
    p.d_entropy = c.entropy ? memory.floats(bench.slots()) : nullptr;
    p.workspace = memory.workspace<PolicyBatch>(p.sequences);
  }
  // A ratio over sequences reads logprob, old_logprob, advantage and mask twice; counts read the mask twice.
  const int again = c.level != RatioLevel::kToken ? 4 : c.counts;
  bench.print(c.name, inputs + outputs + again, calls, cuda::sm90::policy_loss_alone, of,
              cuda::choose_policy_plan(calls[0], cuda::multiprocessors(0)));
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  return bench_tokens(argc, argv, [](std::int64_t sequences, std::int64_t tokens, const TokenRun& of) {
    for (const Case& c : kCases) run(c, sequences, tokens + c.odd, of);
  });
}
