// Helpers to launch kernels from host code: checked runtime calls and the device guard.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "rlk/base.h"

namespace rlk::cuda {

constexpr int kMaxDevices = 64;  // most devices of a process; the size of per-device caches

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Makes `device` the current device until the end of the scope. So a kernel is launched on the device that has the
// arguments, even if another device was current before.
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

// Declares a function in the namespace of each architecture. Kernels are compiled once per architecture, with a host
// entry point in that architecture's namespace.
#define RLK_CUDA_KERNELS(...) \
  namespace sm80 {            \
  __VA_ARGS__                 \
  }                           \
  namespace sm90 {            \
  __VA_ARGS__                 \
  }
// Calls the entry point for a device: sm_90a code on compute capability 9.0, sm_80 code or its PTX on all others.
#define RLK_CUDA_IN_USE(op, device, function) \
  ::rlk::cuda::of_architecture(op, ::rlk::cuda::compute_capability(device), sm80::function, sm90::function)

// Whether a kernel may begin while the previous kernel still runs (dependent_launch.cuh).
namespace sm80 {
constexpr bool kOverlap = false;
}
namespace sm90 {
constexpr bool kOverlap = true;
}

inline cudaStream_t to_stream(Stream s) { return reinterpret_cast<cudaStream_t>(s); }

// Returns the compute capability as 10 * major + minor. The result is cached per device.
int compute_capability(int device);
int multiprocessors(int device);
int current_device();

[[noreturn]] void no_kernel(const char* op);
template <class Function>
Function* of_architecture(const char* op, int capability, Function* sm80, Function* sm90) {
  if (capability < 80) no_kernel(op);
  return capability == 90 ? sm90 : sm80;
}

}  // namespace rlk::cuda
