// Types that every contract, backend and binding shares: element types, streams, row layouts, typed errors.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

// RLK_HD marks functions for host and device. RLK_DEVICE marks functions of GPU kernels; on the host, the emulation of
// GPUs calls them. A file that is compiled once per instruction set defines RLK_CPU_ISA (cpu/simd.h). In such a file,
// RLK_DEVICE is for templates over a type of that file alone: always_inline would double the time of their compilation.
#if defined(__CUDACC__)
#define RLK_HD __host__ __device__ __forceinline__
#define RLK_DEVICE __device__ __forceinline__
#elif defined(__HIP__)
#define RLK_HD __attribute__((host)) __attribute__((device)) inline __attribute__((always_inline))
#define RLK_DEVICE __attribute__((device)) inline __attribute__((always_inline))
#elif defined(RLK_CPU_ISA)
#define RLK_HD inline __attribute__((always_inline))
#define RLK_DEVICE inline
#else
#define RLK_HD inline
#define RLK_DEVICE inline
#endif

namespace rlk {

enum class DType : std::uint8_t {  // kBool: one byte; every byte but 0 is true
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt32,
  kInt64,
  kBool,
  kUInt8
};

constexpr int size_of(DType t) {
  switch (t) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kInt64:
      return 8;
    case DType::kBool:
    case DType::kUInt8:
      return 1;
  }
  return 0;
}

// Where an array lives. `index` is the ordinal of the GPU, 0 on the CPU.
enum class DeviceType : std::uint8_t { kCpu, kCuda, kRocm };
struct Device {
  DeviceType type = DeviceType::kCpu;
  std::int32_t index = 0;
  friend constexpr bool operator==(Device a, Device b) { return a.type == b.type && a.index == b.index; }
};

// A backend's queue (cudaStream_t, hipStream_t) as an integer; 0 is the default stream. The CPU backend ignores the
// stream and returns when the work is done.
using Stream = std::uintptr_t;

// A C++ caller passed a wrong argument. The bindings turn this exception into Python's ValueError.
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};
// This build has no kernel for the device. The bindings turn this exception into Python's RuntimeError.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Throws Unsupported if this build has no kernels of the operator for this kind of device.
void require_backend(const char* op, Device device);

#define RLK_CHECK(condition, message)                                                           \
  do {                                                                                          \
    if (!(condition)) throw ::rlk::InvalidArgument(std::string(message) + " [" #condition "]"); \
  } while (0)

// Layout of the rows of an array whose leading dimensions collapse to two. A matrix needs one stride. With two strides,
// a slice such as logits[:, :-1] of a padded batch needs no copy.
struct RowLayout {
  std::int64_t inner = 1;         // rows per outer step, >= 1
  std::int64_t outer_stride = 0;  // in elements
  std::int64_t inner_stride = 0;  // in elements
  // Element offset of a row's first element. Every backend checks that there are fewer than 2^32 rows, so a 32-bit
  // division suffices. A 64-bit division would cost too much for a row's address.
  RLK_HD std::int64_t offset(std::int64_t row) const {
    if (row < inner) return row * inner_stride;
    const auto r = static_cast<std::uint32_t>(row), n = static_cast<std::uint32_t>(inner);
    return r / n * outer_stride + r % n * inner_stride;
  }
};

}  // namespace rlk
