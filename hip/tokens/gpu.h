// Functions and types of HIP for passes over tokens, which kernels/tokens/lane_passes.h describes.
#pragma once

#include "hip/common/wave.h"
#include "kernels/tokens/lane_passes.h"

namespace rlk::hip {

struct TokenGpu {
  static constexpr int kLanes = kWave;
  static constexpr bool kReadsAgain = true;
  // false: code that reads few sums at once would take scratch memory on gfx942
  static constexpr bool kFewAtOnce = false;
  // one token per lane: the comparison results of four tokens would need more SGPRs than a wave has
  using Tokens = float;
  // Returns `p` in a form that makes each use read it again from the memory of the kernel's arguments. Otherwise the
  // compiler would keep more numbers in SGPRs over a loop than there are SGPRs. `p` must be the kernel's whole first
  // argument, not another object or a part of it.
  template <class Params>
  static RLK_DEVICE const Params& first_argument([[maybe_unused]] const Params& p) {
#if defined(__HIP_DEVICE_COMPILE__)
    auto at = (std::uintptr_t)__builtin_amdgcn_kernarg_segment_ptr();
    asm volatile("" : "+s"(at));
    return *(const Params*)(const __attribute__((address_space(4))) Params*)at;
#else
    return p;
#endif
  }
  static RLK_DEVICE int thread() { return thread_id(); }
  static RLK_DEVICE float shuffle_xor(float x, int distance) { return hip::shuffle_xor(x, distance); }
  static RLK_DEVICE void barrier() { block_barrier(); }
  // The hardware performs a wave's memory accesses in order. This fence also makes the compiler and the lanes of the
  // emulation keep that order.
  static RLK_DEVICE void wave_barrier() {
#if defined(__HIP_DEVICE_COMPILE__)
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
#else
    hip::shuffle_xor(std::int32_t{0}, 1);
#endif
  }
  static RLK_DEVICE std::uint32_t sum_over_wave(std::uint32_t x) {
    for (int distance = 1; distance < kLanes; distance *= 2) {
      x += static_cast<std::uint32_t>(hip::shuffle_xor(static_cast<std::int32_t>(x), distance));
    }
    return x;
  }
  static RLK_DEVICE std::uint32_t max_over_wave(std::uint32_t x) {
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const auto other = static_cast<std::uint32_t>(hip::shuffle_xor(static_cast<std::int32_t>(x), distance));
      x = x > other ? x : other;
    }
    return x;
  }
  static RLK_DEVICE rlk::Vec4 load_vec4(const float* from) {
    rlk::Vec4 x;
    __builtin_memcpy(&x, __builtin_assume_aligned(from, 16), sizeof x);
    return x;
  }
  static RLK_DEVICE void store_vec4(float* to, const rlk::Vec4& x) {
    __builtin_memcpy(__builtin_assume_aligned(to, 16), &x, sizeof x);
  }
  static RLK_DEVICE std::uintptr_t of_lane(std::uintptr_t address) {
#if defined(__HIP_DEVICE_COMPILE__)
    asm volatile("" : "+v"(address));
#endif
    return address;
  }
  static RLK_DEVICE float load(const float* from) { return *from; }
  static RLK_DEVICE void store(float* to, float x) { *to = x; }
  static RLK_DEVICE void count_on(std::int64_t* to, std::int64_t count) { atomic_add(to, count); }
  static RLK_DEVICE void count_on(std::uint32_t* to, std::uint32_t count) { atomic_add(to, count); }
  template <class Shared>
  static RLK_DEVICE Shared* shared() {
    return reinterpret_cast<Shared*>(lds());
  }
};

}  // namespace rlk::hip
