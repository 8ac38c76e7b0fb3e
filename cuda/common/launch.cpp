#include "launch.h"

#include <array>
#include <atomic>

namespace rlk::cuda {

int compute_capability(int device) {
  constexpr int kMaxDevices = 64;
  static std::array<std::atomic<int>, kMaxDevices> cache{};
  if (device < 0 || device >= kMaxDevices) throw InvalidArgument("CUDA device index " + std::to_string(device));
  int capability = cache[device].load(std::memory_order_relaxed);
  if (capability == 0) {
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    capability = 10 * major + minor;
    cache[device].store(capability, std::memory_order_relaxed);
  }
  return capability;
}

}  // namespace rlk::cuda
