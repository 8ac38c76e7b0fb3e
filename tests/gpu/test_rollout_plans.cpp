// Every plan of importance_weights and mismatch_metrics has the CPU's bits, as built for sm_90 and for sm_80, whose PTX runs
// here: random batches, padded and packed, with guard bands around every output.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpp/cpu/importance_weights.h"
#include "cpp/cpu/mismatch_metrics.h"
#include "cuda/importance_weights/kernels.h"
#include "cuda/mismatch_metrics/kernels.h"
#include "tests/rollout_cases.h"

namespace rlk::cuda {
namespace {

constexpr int kSkipped = 77;
constexpr std::size_t kGuard = 64;

class OnDevice {
 public:
  OnDevice(const void* host, std::size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&data_, bytes + 256), "cudaMalloc");
    if (bytes > 0) check(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice), "copy");
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  float* floats() const { return static_cast<float*>(data_); }
  void* data() const { return data_; }
  void get(void* host) const {
    if (bytes_ > 0) check(cudaMemcpy(host, data_, bytes_, cudaMemcpyDeviceToHost), "copy");
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

int wrong = 0, compared = 0;

void compare(const std::vector<float>& got, const std::vector<float>& want, const std::string& what) {
  ++compared;
  if (std::memcmp(got.data(), want.data(), want.size() * sizeof(float)) == 0) return;
  std::size_t at = 0;
  while (std::memcmp(&got[at], &want[at], 4) == 0) ++at;
  if (++wrong < 20) std::printf("%s, element %zu: wanted %a, got %a\n", what.c_str(), at, want[at], got[at]);
}

// The batch on the device.
struct There {
  PolicySequences sequences;
  PolicyTokens train, rollout;
  PolicyMask mask;
  std::vector<std::unique_ptr<OnDevice>> kept;

  explicit There(const rollout_test::Batch& b)
      : sequences(b.sequences), train(b.train), rollout(b.rollout), mask(b.token_mask) {
    const auto put = [&](const void* data, std::size_t bytes) {
      kept.push_back(std::make_unique<OnDevice>(data, bytes));
      return kept.back()->data();
    };
    train.data = static_cast<const float*>(put(b.arrays[0].data(), b.arrays[0].size() * sizeof(float)));
    rollout.data = static_cast<const float*>(put(b.arrays[4].data(), b.arrays[4].size() * sizeof(float)));
    if (mask.data != nullptr) mask.data = put(b.mask.data(), b.mask.size());
    if (!sequences.packed()) return;
    sequences.cu_seqlens = sequences.cu_dtype == DType::kInt64 ? put(b.cuts64.data(), b.cuts64.size() * 8)
                                                               : put(b.cuts32.data(), b.cuts32.size() * 4);
  }
};

ImportanceSpec spec_of(unsigned seed) {
  constexpr ImportanceLevel kLevels[] = {ImportanceLevel::kToken, ImportanceLevel::kSequence,
                                         ImportanceLevel::kGeometric};
  ImportanceSpec s;
  s.level = kLevels[seed % 3];
  s.zero_outside = seed / 3 % 2;
  s.normalize = seed / 2 % 2;
  s.low = seed % 5 == 0 ? -rollout_test::kInf : 0.8f;
  s.high = 1.3f;
  s.limit = seed % 4 == 0 ? rollout_test::kInf : 20.0f;
  if (seed % 7 == 0) s.token.k1_low = -0.3f;
  if (seed % 7 == 1) s.sum.k3 = 0.4f;
  if (seed % 7 == 2) s.mean.k1_high = 0.05f;
  if (seed % 7 == 3) s.most.k2 = 0.4f;
  if (seed % 7 == 4) s.veto_below = -0.9f;
  return s;
}

template <class Run>
void for_each_plan(const PolicySequences& q, const Run& run) {
  for (const TokenPlan& plan : kTokenPlans) {
    if (plan.tile == kWarpTile && q.num_slots() > 200000) continue;  // more slots than the workspace here
    for (const int arch : {90, 80}) run(plan, arch);
  }
}

void run_case(unsigned seed, std::int64_t sequences, std::int64_t longest, bool packed) {
  const rollout_test::Batch b(seed, sequences, longest, packed);
  const There there(b);
  const std::vector<unsigned char> garbage(std::size_t{48} << 20, 0xcd);
  const OnDevice workspace(garbage.data(), garbage.size());
  const auto name = [&](const char* what, const TokenPlan& plan, int arch) {
    return std::string(what) + ", " + b.text + ", tile " + std::to_string(plan.tile) + ", sm_" + std::to_string(arch);
  };

  const std::vector<float> canary(kMismatchMetrics + kGuard, -7.0f);
  std::vector<float> metrics = canary;
  cpu::mismatch_metrics({b.sequences, b.train, b.rollout, b.token_mask, 20.0f, metrics.data()});
  for_each_plan(b.sequences, [&](const TokenPlan& plan, int arch) {
    const OnDevice output(canary.data(), canary.size() * sizeof(float));
    const MismatchMetricsParams p = {there.sequences, there.train,     there.rollout,   there.mask,
                                     20.0f,           output.floats(), workspace.data()};
    arch == 90 ? mismatch_metrics_sm90(p, plan, nullptr) : mismatch_metrics_sm80(p, plan, nullptr);
    check(cudaDeviceSynchronize(), "mismatch_metrics");
    std::vector<float> got(canary.size());
    output.get(got.data());
    compare(got, metrics, name("metrics", plan, arch));
  });

  const ImportanceSpec s = spec_of(seed);
  const std::vector<float> slots(static_cast<std::size_t>(b.sequences.num_slots()) + kGuard, -7.0f);
  std::vector<float> weights = slots, kept = slots;
  cpu::importance_weights({b.sequences, b.train, b.rollout, b.token_mask, s, weights.data(), kept.data()});
  for_each_plan(b.sequences, [&](const TokenPlan& plan, int arch) {
    const OnDevice first(slots.data(), slots.size() * sizeof(float)),
        second(slots.data(), slots.size() * sizeof(float));
    const ImportanceWeightsParams p = {there.sequences, there.train,     there.rollout,   there.mask, s,
                                       first.floats(),  second.floats(), workspace.data()};
    arch == 90 ? importance_weights_sm90(p, plan, nullptr) : importance_weights_sm80(p, plan, nullptr);
    check(cudaDeviceSynchronize(), "importance_weights");
    std::vector<float> got(slots.size());
    first.get(got.data());
    compare(got, weights, name("weights", plan, arch));
    second.get(got.data());
    compare(got, kept, name("kept", plan, arch));
  });
}

}  // namespace
}  // namespace rlk::cuda

int main() {
  using namespace rlk;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 || cuda::compute_capability(0) != 90) {
    std::printf("skipped: no device of compute capability 9.0\n");
    return cuda::kSkipped;
  }
  // No sequence; no token; one; short; more sequences than a block sums; one tile and a token; many tiles.
  constexpr std::int64_t kShapes[][2] = {{0, 7},     {3, 0},    {1, 1},     {5, 13},    {70, 3},
                                         {300, 129}, {9, 256},  {2, 1025},  {33, 2048}, {1, 9000},
                                         {130, 40},  {4, 8193}, {2, 20000}, {1, 70000}};
  unsigned seed = 1;
  for (const auto& shape : kShapes) {
    for (const bool packed : {false, true}) {
      for (int i = 0; i < (shape[0] * shape[1] > 30000 ? 6 : 20); ++i) {
        cuda::run_case(seed++, shape[0], shape[1], packed);
      }
    }
  }
  std::printf("%d of %d outputs differ\n", cuda::wrong, cuda::compared);
  return cuda::wrong > 0;
}
