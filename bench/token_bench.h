// Parts that microbenchmarks of operators over tokens share: device memory, rotation of buffers, a row of the report.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

#include "bench/command_line.h"
#include "bench/gpu_timer.h"
#include "bench/normal_data.h"
#include "cuda/common/launch.h"
#include "cuda/tokens/plan.h"

namespace rlk::bench {

// A micro-batch; a batch; long sequences; more tokens than caches hold; short sequences; one long sequence.
constexpr std::pair<std::int64_t, std::int64_t> kTokenShapes[] = {{8, 2048},    {256, 2048}, {64, 16384},
                                                                  {1024, 8192}, {8192, 200}, {1, 32768}};

class TokenMemory {
 public:
  TokenMemory() = default;
  ~TokenMemory() {
    for (void* p : kept_) cudaFree(p);
  }
  TokenMemory(const TokenMemory&) = delete;
  TokenMemory& operator=(const TokenMemory&) = delete;

  void* bytes(std::int64_t size) {
    void* p = nullptr;
    cuda::check(cudaMalloc(&p, static_cast<std::size_t>(size) + 64), "cudaMalloc");
    kept_.push_back(p);
    return p;
  }
  // Workspace bytes that suffice for any plan.
  template <class Batch>
  void* workspace(const Sequences& q) {
    return bytes(TokenWorkspace<Batch>(q, cuda::kWarpTile, nullptr).bytes);
  }
  float* floats(std::int64_t count) { return static_cast<float*>(bytes(count * 4)); }
  float* normal(std::int64_t count, float deviation = 1.0f) {
    float* const data = floats(count);
    fill_normal(data, static_cast<std::size_t>(count), DType::kFloat32, deviation);
    return data;
  }

 private:
  std::vector<void*> kept_;
};

struct TokenRun {
  bool every_plan = false;
  double ceiling = 0.0;
};

// A case of float32 arrays [sequences, tokens]. Calls rotate over buffers that the L2 cache does not hold.
class TokenBench {
 public:
  TokenBench(std::int64_t sequences, std::int64_t tokens, int arrays)
      : sequences_(sequences), tokens_(tokens), arrays_(arrays) {}

  std::int64_t slots() const { return sequences_ * tokens_; }
  int buffers() const {
    constexpr std::int64_t kRotated = std::int64_t{512} << 20;
    return static_cast<int>(std::clamp<std::int64_t>(kRotated / (4 * slots() * arrays_), 1, 16));
  }
  // The sequences in memory: padded, or packed.
  Sequences sequences(bool packed, TokenMemory* memory) const {
    if (!packed) return {nullptr, DType::kInt32, sequences_, tokens_};
    std::vector<std::int64_t> cuts;
    for (std::int64_t s = 0; s <= sequences_; ++s) cuts.push_back(s * tokens_);
    const auto bytes = static_cast<std::int64_t>(cuts.size() * sizeof(cuts[0]));
    void* const data = memory->bytes(bytes);
    cuda::check(cudaMemcpy(data, cuts.data(), static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice), "copy");
    return {data, DType::kInt64, sequences_, slots()};
  }
  // Prints a row of run(params, plan, stream) for the chosen plan, or for every plan. `moved` counts the arrays that a
  // call must read or write. A mask of one byte per token counts as a quarter array.
  template <class Params, class Run>
  void print(const char* name, double moved, const std::vector<Params>& calls, const Run& run,
             const TokenRun& of) const {
    print(name, moved, calls, run, of, cuda::choose_token_plan(calls[0].sequences, cuda::multiprocessors(0)));
  }
  template <class Params, class Run>
  void print(const char* name, double moved, const std::vector<Params>& calls, const Run& run, const TokenRun& of,
             const cuda::TokenPlan& chosen) const {
    const double bytes = 4.0 * static_cast<double>(slots()) * moved;
    for (const cuda::TokenPlan& plan : cuda::kTokenPlans) {
      if (!of.every_plan && plan.tile != chosen.tile) continue;
      const auto call = [&](cudaStream_t s, int i) { run(calls[static_cast<std::size_t>(i) % calls.size()], plan, s); };
      const double us = median_us(call, std::max(buffers(), 8), 15);
      std::printf("%-32s [%6lld, %6lld] %9.2f us %8.1f MB %6.2f TB/s %5.1f %% of copy  tile 2^%d%s\n", name,
                  static_cast<long long>(sequences_), static_cast<long long>(tokens_), us, bytes / 1e6,
                  bytes / us / 1e6, 100 * bytes / (us * 1e-6) / of.ceiling, plan.tile,
                  plan.tile == chosen.tile ? ", chosen" : "");
      std::fflush(stdout);
    }
  }

 private:
  std::int64_t sequences_, tokens_;
  int arrays_;
};

// main() of a benchmark. It calls run(sequences, tokens, of) for every shape, or for the given shape. With --plans it
// calls run for every plan, else for the chosen plan.
template <class Run>
int bench_tokens(int argc, char** argv, const Run& run) {
  TokenRun of;
  std::int64_t given_sequences = 0, given_tokens = 0;
  if (!CommandLine()
           .flag("plans", &of.every_plan)
           .value("sequences", "N", &given_sequences, 1)
           .value("tokens", "N", &given_tokens, 1)
           .read(argc, argv)) {
    return 2;
  }
  if (!has_hopper()) return 1;
  of.ceiling = copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", of.ceiling / 1e12);
  if (given_sequences > 0 && given_tokens > 0) {
    run(given_sequences, given_tokens, of);
    return 0;
  }
  for (const auto& [sequences, tokens] : kTokenShapes) run(sequences, tokens, of);
  return 0;
}

}  // namespace rlk::bench
