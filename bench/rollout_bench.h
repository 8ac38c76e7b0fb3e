// What the microbenchmarks of importance_weights and mismatch_metrics share: batches on the device, and rows of a table.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "bench/gpu_timer.h"
#include "bench/normal_data.h"
#include "cuda/common/launch.h"
#include "cuda/common/token_plan.h"

namespace rlk::bench {

constexpr std::int64_t kRolloutShapes[][2] = {{8, 2048},    {256, 2048}, {64, 16384},
                                              {1024, 8192}, {8192, 200}, {1, 32768}};

// Calls in turn use one of several batches, together larger than the L2 cache.
class RolloutBatches {
 public:
  RolloutBatches(std::int64_t sequences, std::int64_t tokens, bool packed) {
    const std::int64_t slots = sequences * tokens;
    bytes_ = static_cast<std::size_t>(slots) * sizeof(float);
    count = static_cast<int>(std::clamp<std::size_t>((512u << 20) / (bytes_ * 3), 1, 16));
    std::vector<std::int32_t> cuts;
    for (std::int64_t s = 0; s <= sequences; ++s) cuts.push_back(static_cast<std::int32_t>(s * tokens));
    void* const device_cuts = allocate(cuts.size() * 4);
    cuda::check(cudaMemcpy(device_cuts, cuts.data(), cuts.size() * 4, cudaMemcpyHostToDevice), "copy");
    this->sequences = {nullptr, DType::kInt32, sequences, tokens};
    if (packed) this->sequences = {device_cuts, DType::kInt32, sequences, slots};
    for (int i = 0; i < count; ++i) {
      train.push_back({normal(), tokens, 1});
      rollout.push_back({normal(), tokens, 1});
      mask.push_back({normal(), tokens, DType::kFloat32});
    }
  }
  ~RolloutBatches() {
    for (void* p : memory_) cudaFree(p);
  }
  RolloutBatches(const RolloutBatches&) = delete;
  RolloutBatches& operator=(const RolloutBatches&) = delete;

  void* allocate(std::size_t size) {
    void* p = nullptr;
    cuda::check(cudaMalloc(&p, size + 64), "cudaMalloc");
    memory_.push_back(p);
    return p;
  }
  float* array() { return static_cast<float*>(allocate(bytes_)); }
  double bytes() const { return static_cast<double>(bytes_); }

  int count;
  PolicySequences sequences;
  std::vector<PolicyTokens> train, rollout;
  std::vector<PolicyMask> mask;

 private:
  float* normal() {
    float* const data = array();
    fill_normal(data, bytes_ / sizeof(float), DType::kFloat32, 0.1f);
    return data;
  }
  std::size_t bytes_;
  std::vector<void*> memory_;
};

// Rows of `run(call, plan, stream)` for the chosen plan, or for every one.
template <class Run>
void time_plans(const char* name, std::int64_t sequences, std::int64_t tokens, const RolloutBatches& b, double moved,
                double ceiling, bool every_plan, const Run& run) {
  const cuda::TokenPlan chosen = cuda::choose_token_plan(b.sequences, cuda::multiprocessors(0));
  for (const cuda::TokenPlan& plan : cuda::kTokenPlans) {
    if (!every_plan && plan.tile != chosen.tile) continue;
    const double us =
        median_us([&](cudaStream_t s, int call) { run(static_cast<std::size_t>(call % b.count), plan, s); },
                  std::max(b.count, 8), 15);
    std::printf("%-28s [%6lld, %6lld] %9.2f us %8.1f MB %6.2f TB/s %5.1f %% of copy  tile 2^%d%s\n", name,
                static_cast<long long>(sequences), static_cast<long long>(tokens), us, moved / 1e6, moved / us / 1e6,
                100 * moved / (us * 1e-6) / ceiling, plan.tile, plan.tile == chosen.tile ? ", chosen" : "");
    std::fflush(stdout);
  }
}

// main() of both: run(sequences, tokens, packed, ceiling, every_plan) of every shape.
template <class Run>
int bench_rollouts(int argc, char** argv, const Run& run) {
  bool every_plan = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--plans") != 0) {
      std::fprintf(stderr, "usage: %s [--plans]    --plans: every plan, not the chosen one\n", argv[0]);
      return 2;
    }
    every_plan = true;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 || cuda::compute_capability(0) != 90) {
    std::fprintf(stderr, "no device of compute capability 9.0\n");
    return 1;
  }
  const double ceiling = copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  for (const auto& shape : kRolloutShapes) {
    for (const bool packed : {false, true}) run(shape[0], shape[1], packed, ceiling, every_plan);
  }
  return 0;
}

}  // namespace rlk::bench
