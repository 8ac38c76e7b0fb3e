// Launching from host code: checked runtime calls and the device guard.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "rlk/base.h"

namespace rlk::cuda {

constexpr int kMaxDevices = 64;  // of a process, for what is cached per device

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Makes `device` current for the scope: a launch goes to the device of its arguments, not to the caller's current one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device != previous_) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = device != previous_;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

inline cudaStream_t to_stream(Stream s) { return reinterpret_cast<cudaStream_t>(s); }

// Compute capability as 10 * major + minor, cached per device.
int compute_capability(int device);
int multiprocessors(int device);
int current_device();

}  // namespace rlk::cuda
