// AMD's HIP runtime. The first call with an array on an AMD GPU opens the library libamdhip64 by name. All later calls
// use the library's stable C interface. One build therefore works with ROCm 6 and 7, and it also loads where ROCm is
// not installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "rlk/base.h"

namespace rlk::hip {

// Throws Unsupported if there is no runtime or no device.
class Runtime {
 public:
  static const Runtime& get();

  int device_count() const;  // throws Unsupported without a device

  struct Grid {
    std::int64_t x, y;
    int threads;
    std::size_t lds_bytes;
  };
  static constexpr std::uint64_t kSizesFollow = 0x5a5a1234abcd9876;
  // Launches a kernel of the embedded bundles on `device`. `args` must have the types that the kernel declares.
  template <class... Args>
  void launch(int device, const char* kernel, const Grid& grid, Stream stream, Args... args) const {
    // In builds with tests, a mark and the arguments' sizes follow the arguments. Only hip/emulation/isa reads them.
#ifdef RLK_HIP_ARGUMENT_SIZES
    void* pointers[] = {&args..., reinterpret_cast<void*>(kSizesFollow), reinterpret_cast<void*>(sizeof(args))...};
#else
    void* pointers[] = {&args...};
#endif
    launch(device, kernel, grid, stream, pointers);
  }

 private:
  Runtime();
  void launch(int device, const char* kernel, const Grid& grid, Stream stream, void** arguments) const;
  void check(int status, const char* what) const;
  void* function(int device, const char* kernel) const;
  class DeviceGuard;

  struct Api {
    int (*hipGetDeviceCount)(int*);
    int (*hipGetDevice)(int*);
    int (*hipSetDevice)(int);
    int (*hipModuleLoadData)(void**, const void*);
    int (*hipModuleGetFunction)(void**, void*, const char*);
    int (*hipModuleLaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                                 void**, void**);
    const char* (*hipGetErrorString)(int);
    int (*hipGetLastError)();
    int (*hipRuntimeGetVersion)(int*);
  };
  Api api_{};
};

}  // namespace rlk::hip
