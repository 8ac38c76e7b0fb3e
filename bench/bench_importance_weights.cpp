// Microbenchmark of the CUDA kernels of importance_weights: one row per case, with the bytes that it must move (both arrays and
// a float32 mask read, twice where something is a sequence's, weights and what is kept written; with normalize the weights
// read and written again) and their share of the copy ceiling measured in the same run. Usage: bench_importance_weights [--plans]
#include "bench/rollout_bench.h"
#include "cuda/importance_weights/kernels.h"

namespace {

struct Case {
  const char* name;
  rlk::ImportanceLevel level;
  bool rejects, normalize;
};
constexpr Case kCases[] = {{"tokens", rlk::ImportanceLevel::kToken, false, false},
                           {"tokens, normalized", rlk::ImportanceLevel::kToken, false, true},
                           {"sequences", rlk::ImportanceLevel::kSequence, false, false},
                           {"tokens, seq_mean_k3, veto", rlk::ImportanceLevel::kToken, true, false}};

}  // namespace

int main(int argc, char** argv) {
  using namespace rlk;
  return bench::bench_rollouts(
      argc, argv, [](std::int64_t sequences, std::int64_t tokens, bool packed, double ceiling, bool every_plan) {
        for (const Case& c : kCases) {
          bench::RolloutBatches b(sequences, tokens, packed);
          ImportanceSpec s;
          s.level = c.level;
          s.normalize = c.normalize;
          s.low = -std::numeric_limits<float>::infinity();
          s.high = 2.0f;
          s.limit = 20.0f;
          if (c.rejects) {
            s.mean.k3 = 0.01f;
            s.veto_below = -10.0f;
          }
          std::vector<ImportanceWeightsParams> calls;
          for (std::size_t i = 0; i < b.train.size(); ++i) {
            calls.push_back({b.sequences, b.train[i], b.rollout[i], b.mask[i], s, b.array(), b.array()});
            calls[i].workspace =
                b.allocate(static_cast<std::size_t>(ImportanceWorkspace(b.sequences, cuda::kWarpTile, nullptr).bytes));
          }
          const int passes = (needs_statistics(s) ? 8 : 5) + (c.normalize ? 2 : 0);
          bench::time_plans((std::string(c.name) + (packed ? ", packed" : "")).c_str(), sequences, tokens, b,
                            passes * b.bytes(), ceiling, every_plan,
                            [&](std::size_t call, const cuda::TokenPlan& plan, cudaStream_t stream) {
                              cuda::importance_weights_sm90(calls[call], plan, stream);
                            });
        }
      });
}
