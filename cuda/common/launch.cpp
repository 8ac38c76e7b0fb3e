#include "launch.h"

#include <array>
#include <atomic>

namespace rlk::cuda {
namespace {

using Cache = std::array<std::atomic<int>, kMaxDevices>;

// Returns a device attribute, which is queried once per device.
int cached_attribute(Cache& cache, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= kMaxDevices) throw InvalidArgument("CUDA device index " + std::to_string(device));
  int value = cache[device].load(std::memory_order_relaxed);
  if (value == 0) {
    check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
    cache[device].store(value, std::memory_order_relaxed);
  }
  return value;
}

}  // namespace

int compute_capability(int device) {
  static Cache major{}, minor_plus_one{};
  const int high = cached_attribute(major, cudaDevAttrComputeCapabilityMajor, device);
  int low = minor_plus_one[device].load(std::memory_order_relaxed) - 1;  // stored plus one, since 0 means "not yet
                                                                         // known"
  if (low < 0) {
    check(cudaDeviceGetAttribute(&low, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    minor_plus_one[device].store(low + 1, std::memory_order_relaxed);
  }
  return 10 * high + low;
}

void no_kernel(const char* op) { throw Unsupported(std::string(op) + ": built for compute capability 8.0 and later"); }

int multiprocessors(int device) {
  static Cache cache{};
  return cached_attribute(cache, cudaDevAttrMultiProcessorCount, device);
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

}  // namespace rlk::cuda
