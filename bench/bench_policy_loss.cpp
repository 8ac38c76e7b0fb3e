// Microbenchmark of the CUDA kernels of policy_loss: one row per case, with the bytes that it must move and their share of
// the copy ceiling measured in the same run. Usage:
// bench_policy_loss [--only PART_OF_A_NAME] [--plans]    --plans: every plan, not the chosen one
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "bench/gpu_timer.h"
#include "bench/normal_data.h"
#include "cuda/policy_loss/kernels.h"
#include "cuda/policy_loss/policy_loss.h"

namespace rlk::bench {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Case {
  const char* name;
  std::int64_t sequences, tokens;
  RatioLevel level = RatioLevel::kToken;
  bool kl = true, importance = false, entropy = false, counts = false, packed = false;
};

void run(const Case& c, double ceiling, bool every_plan) {
  const std::int64_t slots = c.sequences * c.tokens;
  const auto bytes = static_cast<std::size_t>(slots) * sizeof(float);
  const int inputs = 3 + c.kl + c.importance + c.entropy, outputs = 1 + c.entropy;
  // Of a ratio over sequences logprob, old_logprob, advantage and mask are read twice.
  const int passes = inputs + outputs + 1 + (c.level == RatioLevel::kToken ? (c.counts ? 1 : 0) : 4);
  const int count = static_cast<int>(std::clamp<std::size_t>((512u << 20) / (bytes * (inputs + outputs + 1)), 1, 16));
  std::vector<void*> memory;
  const auto allocate = [&](std::size_t size) {
    void* p = nullptr;
    cuda::check(cudaMalloc(&p, size + 64), "cudaMalloc");
    memory.push_back(p);
    return p;
  };
  std::vector<PolicyLossParams> calls(static_cast<std::size_t>(count));
  std::vector<std::int32_t> cuts;
  for (std::int64_t s = 0; s <= c.sequences; ++s) cuts.push_back(static_cast<std::int32_t>(s * c.tokens));
  void* const device_cuts = allocate(cuts.size() * 4);
  cuda::check(cudaMemcpy(device_cuts, cuts.data(), cuts.size() * 4, cudaMemcpyHostToDevice), "copy");
  for (PolicyLossParams& p : calls) {
    p.sequences = {nullptr, DType::kInt32, c.sequences, c.tokens};
    if (c.packed) p.sequences = {device_cuts, DType::kInt32, c.sequences, slots};
    PolicyTokens* const arrays[] = {&p.logprob,     &p.old_logprob, &p.advantage,
                                    &p.ref_logprob, &p.importance,  &p.entropy};
    const bool given[] = {true, true, true, c.kl, c.importance, c.entropy};
    for (int i = 0; i < 6; ++i) {
      if (!given[i]) continue;
      auto* const data = static_cast<float*>(allocate(bytes));
      fill_normal(data, static_cast<std::size_t>(slots), DType::kFloat32, 0.1f);
      *arrays[i] = {data, c.tokens, 1};
    }
    auto* const mask = static_cast<float*>(allocate(bytes));
    fill_normal(mask, static_cast<std::size_t>(slots), DType::kFloat32, 1.0f);
    p.mask = {mask, c.tokens, DType::kFloat32};
    PolicySpec& s = p.spec;
    s.level = c.level;
    s.straight_through = 1;
    s.log_ratio_min = -20.0f;
    s.log_ratio_max = 20.0f;
    s.clip_low = 0.8f;
    s.clip_high = 1.28f;
    s.ratio_cap = kInf;
    s.dual_clip = 3.0f;
    s.kl = c.kl ? KlEstimator::kK3 : KlEstimator::kNone;
    s.kl_coef = 1e-3f;
    s.kl_input_limit = 20.0f;
    s.kl_limit = 10.0f;
    s.importance = c.importance ? ImportanceLevel::kToken : ImportanceLevel::kNone;
    s.importance_low = -kInf;
    s.importance_high = 2.0f;
    s.importance_limit = s.drop_above = kInf;
    s.entropy_coef = c.entropy ? 1e-3f : 0.0f;
    p.denominator_value = c.counts ? 0.0f : static_cast<float>(slots);
    p.loss = static_cast<float*>(allocate(4));
    p.metrics = static_cast<float*>(allocate(kPolicyMetrics * 4));
    p.d_logprob = static_cast<float*>(allocate(bytes));
    p.d_entropy = c.entropy ? static_cast<float*>(allocate(bytes)) : nullptr;
    p.workspace = allocate(static_cast<std::size_t>(PolicyWorkspace(p.sequences, 7, nullptr).bytes));
  }
  const double moved = static_cast<double>(bytes) * passes;
  const cuda::TokenPlan chosen = cuda::choose_token_plan(calls[0].sequences, cuda::multiprocessors(0));
  for (const cuda::TokenPlan& plan : cuda::kTokenPlans) {
    if (!every_plan && plan.tile != chosen.tile) continue;
    const double us =
        median_us([&](cudaStream_t s,
                      int call) { cuda::policy_loss_sm90(calls[static_cast<std::size_t>(call % count)], plan, s); },
                  std::max(count, 8), 15);
    std::printf("%-28s [%6lld, %6lld] %9.2f us %8.1f MB %6.2f TB/s %5.1f %% of copy  tile 2^%d%s\n", c.name,
                static_cast<long long>(c.sequences), static_cast<long long>(c.tokens), us, moved / 1e6,
                moved / us / 1e6, 100 * moved / (us * 1e-6) / ceiling, plan.tile,
                plan.tile == chosen.tile ? ", chosen" : "");
    std::fflush(stdout);
  }
  for (void* p : memory) cudaFree(p);
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  std::string only;
  bool every_plan = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--plans") == 0) {
      every_plan = true;
    } else if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) {
      only = argv[++i];
    } else {
      std::fprintf(stderr, "usage: bench_policy_loss [--only PART_OF_A_NAME] [--plans]\n");
      return 2;
    }
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 || rlk::cuda::compute_capability(0) != 90) {
    std::fprintf(stderr, "no device of compute capability 9.0\n");
    return 1;
  }
  const double ceiling = copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  using rlk::RatioLevel;
  std::vector<Case> cases;
  for (const auto& [sequences, tokens] : {std::pair<std::int64_t, std::int64_t>{8, 2048},
                                          {256, 2048},
                                          {64, 16384},
                                          {1024, 8192},
                                          {8192, 200},
                                          {1, 32768}}) {
    cases.push_back({"ppo, kl", sequences, tokens});
    cases.push_back({"ppo, kl, counts", sequences, tokens, RatioLevel::kToken, true, false, false, true});
    cases.push_back({"ppo, kl, tis, entropy", sequences, tokens, RatioLevel::kToken, true, true, true});
    cases.push_back({"gspo, kl", sequences, tokens, RatioLevel::kGeometric});
    cases.push_back({"ppo, kl, packed", sequences, tokens, RatioLevel::kToken, true, false, false, false, true});
    cases.push_back(
        {"ppo, kl, packed, odd", sequences, tokens + 1, RatioLevel::kToken, true, false, false, false, true});
  }
  for (const Case& c : cases) {
    if (std::string(c.name).find(only) != std::string::npos) run(c, ceiling, every_plan);
  }
  return 0;
}
