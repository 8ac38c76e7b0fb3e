// What the dispatch of every operator says where this build lacks the kernels for a device.
#pragma once

#include <string>

#include "rlk/base.h"
#include "rlk/build.h"

namespace rlk {

[[noreturn]] inline void no_backend(const char* op, Device device) {
  const std::string build = std::string(op) + ": this build (variant " RLK_VARIANT_NAME ") has no ";
  throw Unsupported(build + (device.type == DeviceType::kRocm
                                 ? "HIP kernels; uninstall it and install rl-kernel-rocm6"
                                 : "CUDA kernels; uninstall it and install rl-kernel-cu130 or rl-kernel-cu124"));
}

inline void require_backend(const char* op, Device device) {
  if (device.type == DeviceType::kCpu) return;
  if (RLK_WITH_CUDA && device.type == DeviceType::kCuda) return;
  if (RLK_WITH_HIP && device.type == DeviceType::kRocm) return;
  no_backend(op, device);
}

}  // namespace rlk
