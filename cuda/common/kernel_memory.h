// Permission for dynamic shared memory beyond 48 KB. A kernel needs this permission once per device, not at every
// launch.
#pragma once

#include <array>
#include <atomic>

#include "launch.h"

namespace rlk::cuda {

// Allows `kKernel` all the dynamic shared memory that a block of the current device may have. Returns the size of this
// memory in bytes.
template <auto* kKernel>
int allow_shared_memory() {
  static std::array<std::atomic<int>, kMaxDevices> allowed{};
  const int device = current_device();
  if (device < 0 || device >= kMaxDevices) throw InvalidArgument("CUDA device index " + std::to_string(device));
  int most = allowed[device].load(std::memory_order_relaxed);
  if (most > 0) return most;
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kKernel), "cudaFuncGetAttributes");
  most -= static_cast<int>(attributes.sharedSizeBytes);
  check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), "dynamic shared memory");
  allowed[device].store(most, std::memory_order_relaxed);
  return most;
}

}  // namespace rlk::cuda
