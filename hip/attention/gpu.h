// The primitives of attention's tiles (kernels/attention/multiply.h), on HIP and under its emulation.
#pragma once

#include "hip/attention/launches.h"
#include "hip/common/vec8.h"

namespace rlk::hip {

template <class T>
struct AttentionVec8 {
  typename T::Storage v[kVec8];
  RLK_DEVICE void to_float(float (&z)[kVec8]) const {
#pragma unroll
    for (int i = 0; i < kVec8; ++i) z[i] = T::load(v[i]);
  }
};

struct AttentionGpu {
  static constexpr bool kHasHardwareExp = false;

  static RLK_DEVICE int thread() { return thread_id(); }
  static RLK_DEVICE int threads() { return kAttentionThreads; }
  static RLK_DEVICE void barrier() { block_barrier(); }
  // Whether the value is true in any thread of the block. The call is also a barrier. `flags` has one word per wave in
  // LDS, and must not be written again before another barrier.
  static RLK_DEVICE bool any(bool value, std::uint32_t* flags) {
    static_assert(kAttentionThreads == 4 * kWave);
    const bool of_wave = hip::any(value);
    if (thread() % kWave == 0) flags[thread() / kWave] = of_wave ? 1 : 0;
    block_barrier();
    return (flags[0] | flags[1] | flags[2] | flags[3]) != 0;
  }
  static RLK_DEVICE float shuffle_xor(float x, int distance) { return hip::shuffle_xor(x, distance); }
  static RLK_DEVICE float max_nan(float a, float b) {
    if (is_nan(a) || is_nan(b)) return canonical_nan();
    return a > b ? a : b;
  }
  // never called, because kHasHardwareExp is false
  static RLK_DEVICE float ex2(float) { return canonical_nan(); }

  template <int kCount>
  static RLK_DEVICE void load_group(const float* from, float (&to)[kCount]) {
    __builtin_memcpy(to, __builtin_assume_aligned(from, 4 * kCount), sizeof to);
  }
  static RLK_DEVICE void store_four(float* to, float a, float b, float c, float d) {
    const float v[4] = {a, b, c, d};
    __builtin_memcpy(__builtin_assume_aligned(to, 16), v, sizeof v);
  }

  template <class T>
  using Vec8 = AttentionVec8<T>;
  template <class T>
  static RLK_DEVICE Vec8<T> fill_vec8(bool nan) {
    Vec8<T> x;
#pragma unroll
    for (auto& element : x.v) element = T::store(nan ? canonical_nan() : 0.0f);
    return x;
  }
  template <class T>
  static RLK_DEVICE Vec8<T> load_vec8(const typename T::Storage* from, bool vectors) {
    Vec8<T> x;
    if (vectors) {
#if defined(__HIP_DEVICE_COMPILE__)
      __builtin_memcpy(x.v, __builtin_assume_aligned(from, 16), sizeof x.v);
#else  // g++ would assume the alignment of 16 bytes even if `vectors` is false
      __builtin_memcpy(x.v, from, sizeof x.v);
#endif
    } else {
#pragma unroll
      for (int i = 0; i < kVec8; ++i) x.v[i] = from[i];
    }
    return x;
  }
};

// A block's own copy of the params. The copy lies in LDS, in front of the block's tile. Each use reads the params from
// LDS, because all params together need more SGPRs than a wave has.
template <class Params>
struct AttentionCall {
  Params p;
  AttentionGrid g;

  static RLK_DEVICE AttentionCall* copy(const Params& p, const AttentionGrid& g) {
    auto* call = reinterpret_cast<AttentionCall*>(lds());
    if (thread_id() == 0) {
      __builtin_memcpy(&call->p, &p, sizeof p);
      __builtin_memcpy(&call->g, &g, sizeof g);
    }
    block_barrier();
    return call;
  }
  RLK_DEVICE void* tile() { return lds() + kAttentionCallLds; }
  static_assert(sizeof(Params) + sizeof(AttentionGrid) <= kAttentionCallLds);
};

template <class T, class Tile, class Params>
RLK_DEVICE void attention_forward_kernel(const Params& p, const AttentionGrid& g, std::int64_t first_block) {
  auto* call = AttentionCall<Params>::copy(p, g);
  AttentionForward<AttentionGpu, T, Tile, Params> forward(call->p, call->g, call->tile());
  const AttentionPlace place(call->p, call->g, first_block + block_id_x(), Tile::kRows);
#pragma unroll 1
  for (std::int64_t begin = place.first; begin < place.last;) begin = forward.run(place, begin);
}

template <class Pass, class Params>
RLK_DEVICE void attention_gradient_kernel(const Params& p, const AttentionGrid& g, std::int64_t first_block) {
  auto* call = AttentionCall<Params>::copy(p, g);
  Pass pass(call->p, call->g, call->tile());
  const AttentionPlace place(call->p, call->g, first_block + block_id_x(), NarrowTile::kRows);
#pragma unroll 1
  for (std::int64_t begin = place.first; begin < place.last;) begin = pass.run(place, begin);
}

}  // namespace rlk::hip
