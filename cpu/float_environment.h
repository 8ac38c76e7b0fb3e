// Sets IEEE arithmetic for the lifetime of the object: nearest even, subnormals kept, no traps. An application, or a
// library it loads, may have switched any thread to flush-to-zero.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace rlk::cpu {

class FloatEnvironment {
 public:
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

#if defined(__x86_64__)
  FloatEnvironment() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // all exceptions masked, all other bits off
  ~FloatEnvironment() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}) : "memory");
  }
  ~FloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(before_) : "memory"); }

 private:
  std::uint64_t before_;
#else
  FloatEnvironment() {}
#endif
};

}  // namespace rlk::cpu
