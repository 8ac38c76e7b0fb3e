// The primitives of wave.h on the host. The lanes of a block are fibers of one host thread. A lane that reaches one of
// the operations below waits until the other lanes reach it.
//
// The emulation checks that all lanes of a wave reach each wave operation from the same source line. At each barrier it
// checks the same for all threads of a block. Tests launch waves in ascending, descending and shuffled order, and every
// word of LDS starts as a NaN. The tests therefore find results that depend on the order of waves or on old contents of
// LDS. The emulation cannot show timing, real concurrency inside a wave, or the driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#if __has_include(<source_location>)
#include <source_location>
#else  // g++ 10
#include <experimental/source_location>
#endif

#include "rlk/math/mma_model.h"

#define RLK_KERNEL(threads) inline void
#define RLK_WAVES_PER_SIMD(waves)
#define RLK_HERE_PARAMETER , ::rlk::hip::SourceLocation here = ::rlk::hip::SourceLocation::current()
#define RLK_HERE_ARGUMENT , here

namespace rlk::hip {

#if __has_include(<source_location>)
using SourceLocation = std::source_location;
#else
using SourceLocation = std::experimental::source_location;
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Functions that kernels call. `here` is the source line of the caller.
int thread_id();
int block_id_x();
int block_id_y();
std::int32_t shuffle_xor(std::int32_t value, int mask, SourceLocation here = SourceLocation::current());
std::uint64_t ballot(bool value, SourceLocation here = SourceLocation::current());
void block_barrier(SourceLocation here = SourceLocation::current());
void wave_barrier(SourceLocation here = SourceLocation::current());
void atomic_or(std::uint32_t* word, std::uint32_t bits);
template <class T>
T* typed_global(T* p) {
  return p;
}
template <class T>
T in_vector(T x) {
  return x;
}
inline std::uint32_t atomic_take(std::uint32_t* counter) { return __atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED); }
template <class T>
void atomic_add(T* to, T value) {
  __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}
unsigned char* lds();
template <class T>
T* global_pointer(T* p) {
  return p;
}
Accumulator<16> mfma_32x32x8(Fp16x4 a, Fp16x4 b, Accumulator<16> c, SourceLocation here = SourceLocation::current());
Accumulator<16> mfma_32x32x8(Bf16x4 a, Bf16x4 b, Accumulator<16> c, SourceLocation here = SourceLocation::current());
Accumulator<4> mfma_16x16x16(Fp16x4 a, Fp16x4 b, Accumulator<4> c, SourceLocation here = SourceLocation::current());
Accumulator<4> mfma_16x16x16(Bf16x4 a, Bf16x4 b, Accumulator<4> c, SourceLocation here = SourceLocation::current());

// ---------------------------------------------------------------------------------------------------------------------
// Functions and settings for launches.
namespace emulation {

enum class Order { kForward, kBackward, kShuffled };  // order of a block's waves, and of a wave's lanes

struct Launch {
  int blocks_x = 1, blocks_y = 1, threads = kWave;
  std::size_t lds_bytes = 0;
  Order order = Order::kForward;
  MmaUnit unit = MmaUnit::kGfx942;  // the GPU whose matrix instructions are emulated
  int host_threads = 1;             // host threads that run blocks in parallel
};

// Runs `kernel` once per lane of every block. If two lanes reach different wave operations or barriers, the function
// prints their source lines and aborts.
void launch(const Launch& how, const std::function<void()>& kernel);

}  // namespace emulation
}  // namespace rlk::hip
