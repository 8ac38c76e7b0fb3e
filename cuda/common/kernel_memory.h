// Dynamic shared memory beyond 48 KB must be allowed per kernel and device: asked for once, not at every launch.
#pragma once

#include <array>
#include <atomic>

#include "launch.h"

namespace rlk::cuda {

// Allows `kKernel` all that a block of the current device may have.
template <auto* kKernel>
void allow_shared_memory() {
  static std::array<std::atomic<bool>, kMaxDevices> allowed{};
  const int device = current_device();
  if (device < 0 || device >= kMaxDevices) throw InvalidArgument("CUDA device index " + std::to_string(device));
  if (allowed[device].load(std::memory_order_relaxed)) return;
  int most = 0;
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), "dynamic shared memory");
  allowed[device].store(true, std::memory_order_relaxed);
}

}  // namespace rlk::cuda
