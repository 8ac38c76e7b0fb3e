// Microbenchmark of the CUDA kernels of scatter_rewards. A row per case shows the bytes that it must move, and their share of
// the copy ceiling of the same run. The kernel reads a mask of bytes and, with a KL, two arrays. The kernel writes
// rewards, and with a cost costs and combined. Usage:
// bench_scatter_rewards [--plans]    --plans: every plan, not the chosen one
#include <string>
#include <vector>

#include "bench/token_bench.h"
#include "cuda/common/kernels.h"
#include "kernels/advantages/reward_sequence.h"

namespace rlk::bench {
namespace {

constexpr int kSpans = 8;  // spans per sequence, where there are any

struct Case {
  const char* name;
  bool kl, cost, spans;
  SpanPlace place;
};
constexpr Case kCases[] = {{"sequences", false, false, false, SpanPlace::kLast},
                           {"k1", true, false, false, SpanPlace::kLast},
                           {"cost, lagrange", false, true, false, SpanPlace::kLast},
                           {"8 turns", false, false, true, SpanPlace::kLast},
                           {"8 turns, spread", false, false, true, SpanPlace::kSpread},
                           {"k1, 8 turns, spread", true, false, true, SpanPlace::kSpread}};

void* put(TokenMemory* memory, const std::vector<std::int64_t>& values) {
  const std::size_t bytes = values.size() * sizeof(values[0]);
  void* const data = memory->bytes(static_cast<std::int64_t>(bytes));
  cuda::check(cudaMemcpy(data, values.data(), bytes, cudaMemcpyHostToDevice), "copy");
  return data;
}

void run(const Case& c, std::int64_t sequences, std::int64_t tokens, bool packed, const TokenRun& of) {
  const int arrays = 1 + (c.kl ? 2 : 0) + (c.cost ? 2 : 0);
  const TokenBench bench(sequences, tokens, arrays);
  std::vector<ScatterRewardsParams> calls(static_cast<std::size_t>(bench.buffers()));
  TokenMemory memory;
  std::vector<std::int64_t> spans, offsets = {0};
  for (std::int64_t s = 0; s < sequences; ++s) {
    for (std::int64_t i = 0; i < kSpans; ++i) {
      spans.push_back(i * tokens / kSpans);
      spans.push_back((i + 1) * tokens / kSpans);
    }
    offsets.push_back((s + 1) * kSpans);
  }
  for (ScatterRewardsParams& p : calls) {
    p.sequences = bench.sequences(packed, &memory);
    p.mask = rlk::mask_of(memory.bytes(bench.slots()), tokens, DType::kBool);
    cuda::check(cudaMemset(const_cast<void*>(p.mask.data), 1, static_cast<std::size_t>(bench.slots())), "memset");
    p.rewards = {memory.normal(sequences), 1, 0};
    if (c.kl) {
      for (PolicyTokens* const a : {&p.logprob, &p.ref_logprob}) *a = {memory.normal(bench.slots()), tokens, 1};
      p.spec.kl = KlEstimator::kK1;
      p.spec.kl_coef = 0.05f;
    }
    if (c.cost) {
      p.cost = {memory.normal(sequences), 1, 0};
      p.lagrange_value = 0.5f;
      p.costs = memory.floats(bench.slots());
      p.combined = memory.floats(bench.slots());
    }
    if (c.spans) {
      p.spans = {put(&memory, spans), DType::kInt64};
      p.span_offsets = {put(&memory, offsets), DType::kInt64};
      p.num_spans = sequences * kSpans;
      p.span_rewards = memory.normal(p.num_spans);
      p.spec.place = c.place;
    }
    p.to_tokens = memory.floats(bench.slots());
    p.lengths = static_cast<std::int64_t*>(memory.bytes(sequences * 8));
    p.workspace = memory.bytes(reward_workspace_bytes(p.sequences, cuda::kWarpTile));
  }
  bench.print((std::string(c.name) + (packed ? ", packed" : "")).c_str(), arrays + 0.25, calls,
              cuda::sm90::scatter_rewards, of);
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  return bench_tokens(argc, argv, [](std::int64_t sequences, std::int64_t tokens, const TokenRun& of) {
    const std::int64_t rows = sequences == 1024 ? 4096 : sequences;  // the batch that gae's target speed is set for
    for (const bool packed : {false, true}) {
      for (const Case& c : kCases) run(c, rows, tokens, packed, of);
    }
  });
}
