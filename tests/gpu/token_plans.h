// Shared by the tests of token operators' plans: arrays on the device, guard bands, comparison with the CPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/common/launch.h"
#include "cuda/tokens/plan.h"

namespace rlk::cuda {

constexpr int kSkipped = 77;
constexpr std::size_t kGuard = 64;
constexpr float kCanary = -7.0f;

inline bool has_device() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0 && compute_capability(0) == 90) return true;
  std::printf("skipped: no device of compute capability 9.0\n");
  return false;
}

inline std::vector<float> guarded(std::int64_t size) {
  return std::vector<float>(static_cast<std::size_t>(size) + kGuard, kCanary);
}

// Arrays on the device, for the lifetime of this object.
class DeviceArrays {
 public:
  DeviceArrays() = default;
  ~DeviceArrays() {
    for (void* p : kept_) cudaFree(p);
  }
  DeviceArrays(const DeviceArrays&) = delete;
  DeviceArrays& operator=(const DeviceArrays&) = delete;

  void* put(const void* host, std::size_t bytes) {
    void* data = nullptr;
    check(cudaMalloc(&data, bytes + 256), "cudaMalloc");
    kept_.push_back(data);
    if (bytes > 0) check(cudaMemcpy(data, host, bytes, cudaMemcpyHostToDevice), "copy");
    return data;
  }
  // Replaces a host array by a device array; a null array stays null.
  void put(const std::vector<float>& host, const float** array) {
    if (*array != nullptr) *array = static_cast<const float*>(put(host.data(), host.size() * sizeof(float)));
  }
  // Puts a host case's offsets and mask on the device.
  template <class Case>
  void put(const Case& c, Sequences* q, TokenMask* mask) {
    if (mask->data != nullptr) mask->data = put(c.mask.data(), c.mask.size());
    if (!q->packed()) return;
    q->cu_seqlens = q->cu_dtype == DType::kInt64 ? put(c.cuts64.data(), c.cuts64.size() * sizeof(std::int64_t))
                                                 : put(c.cuts32.data(), c.cuts32.size() * sizeof(std::int32_t));
  }
  // A workspace that holds garbage.
  template <class Batch>
  void* workspace(const Sequences& q, const TokenPlan& plan) {
    const auto bytes = static_cast<std::size_t>(TokenWorkspace<Batch>(q, plan.tile, nullptr).bytes);
    const std::vector<unsigned char> garbage(bytes, 0xcd);
    return put(garbage.data(), bytes);
  }
  float* put_guarded(std::size_t size) {
    const std::vector<float> canaries(size, kCanary);
    return static_cast<float*>(put(canaries.data(), size * sizeof(float)));
  }

 private:
  std::vector<void*> kept_;
};

// Shapes: no sequence; no token; one token; short; more sequences than a block sums; one tile and a token; many tiles.
constexpr std::int64_t kPlanShapes[][2] = {{0, 7},     {3, 0},    {1, 1},     {5, 13},    {70, 3},
                                           {300, 129}, {9, 256},  {2, 1025},  {33, 2048}, {1, 9000},
                                           {130, 40},  {4, 8193}, {2, 20000}, {1, 70000}};
// Calls run(seed, sequences, longest) for each shape, with several seeds.
template <class Run>
void for_each_plan_case(const Run& run) {
  unsigned seed = 1;
  for (const auto& shape : kPlanShapes) {
    for (int i = 0; i < (shape[0] * shape[1] > 30000 ? 6 : 25); ++i) run(seed++, shape[0], shape[1]);
  }
}

// Counts outputs that differ from the CPU's, guard bands included, and prints the first of them.
class PlanCheck {
 public:
  void compare(const std::string& text, int tile, int arch, int output, const float* device,
               const std::vector<float>& want) {
    std::vector<float> got(want.size());
    check(cudaMemcpy(got.data(), device, got.size() * sizeof(float), cudaMemcpyDeviceToHost), "copy");
    ++compared_;
    if (std::memcmp(got.data(), want.data(), want.size() * sizeof(float)) == 0) return;
    if (++wrong_ >= 20) return;
    std::size_t at = 0;
    while (std::memcmp(&got[at], &want[at], sizeof(float)) == 0) ++at;
    std::printf("%s, tile %d, sm_%d, output %d, element %zu: wanted %a, got %a\n", text.c_str(), tile, arch, output, at,
                want[at], got[at]);
  }
  void fail(const std::string& text) {
    ++compared_;
    if (++wrong_ < 20) std::printf("%s\n", text.c_str());
  }
  // Returns the exit status.
  int finish() const {
    std::printf("%d of %d outputs differ\n", wrong_, compared_);
    return wrong_ > 0 || compared_ == 0;
  }

 private:
  int wrong_ = 0, compared_ = 0;
};

}  // namespace rlk::cuda
