// The primitives of wave.h on a GPU (gfx90a and gfx942). The file uses only compiler builtins, so it needs no ROCm
// header.
#pragma once

#define RLK_KERNEL(threads) \
  extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads))) void
// An attribute that stands between RLK_KERNEL and the kernel's name. The attribute limits the kernel's registers, so
// that at least `waves` waves fit on a SIMD unit.
#define RLK_WAVES_PER_SIMD(waves) __attribute__((amdgpu_waves_per_eu(waves)))
#define RLK_HERE_PARAMETER
#define RLK_HERE_ARGUMENT

namespace rlk::hip {

RLK_DEVICE int thread_id() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
RLK_DEVICE int block_id_x() { return static_cast<int>(__builtin_amdgcn_workgroup_id_x()); }
RLK_DEVICE int block_id_y() { return static_cast<int>(__builtin_amdgcn_workgroup_id_y()); }

// Returns `value` of the lane whose index is this lane's index xor `mask`.
RLK_DEVICE std::int32_t shuffle_xor(std::int32_t value, int mask) {
  const int lane = static_cast<int>(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)));
  return __builtin_amdgcn_ds_bpermute((lane ^ mask) * 4, value);
}
// Returns the value of each lane as one bit of a mask.
RLK_DEVICE std::uint64_t ballot(bool value) { return __builtin_amdgcn_ballot_w64(value); }
RLK_DEVICE void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// Orders the accesses of a wave's lanes to LDS.
RLK_DEVICE void wave_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
// The atomics take generic pointers to LDS, and pointers to global memory from typed_global. With a generic pointer to
// global memory, the compiler may emit a flat instruction if it cannot trace where the pointer comes from.
template <class Word>
RLK_DEVICE void atomic_or(Word* word, std::uint32_t bits) {
  __hip_atomic_fetch_or(word, bits, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
// Returns the pointer with the type of the global address space. Call this function for pointers that were loaded from
// memory.
template <class T>
RLK_DEVICE auto typed_global(T* p) {
  return (__attribute__((address_space(1))) T*)p;
}
// Keeps x in VGPRs. Without this function, the compiler would put a value that all lanes share into SGPRs, and there
// are few SGPRs.
template <class T>
RLK_DEVICE T in_vector(T x) {
  asm("" : "+v"(x));
  return x;
}
// Adds one to a counter in LDS and returns the previous value.
RLK_DEVICE std::uint32_t atomic_take(std::uint32_t* counter) {
  return __hip_atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
// Adds to a counter in LDS, or to a counter that all blocks share in global memory.
template <class To, class T>
RLK_DEVICE void atomic_add(To* to, T value) {
  __hip_atomic_fetch_add(to, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// The block's LDS. The array has the number of bytes that the launch requests, and is aligned to 16 bytes.
extern "C" __attribute__((device)) __attribute__((shared)) __attribute__((aligned(16))) unsigned char rlk_lds[];
RLK_DEVICE unsigned char* lds() { return rlk_lds; }

// Returns the same pointer, which the compiler then knows to point to global memory. Accesses through it neither wait
// for LDS instructions nor delay them.
template <class T>
RLK_DEVICE T* global_pointer(T* p) {
  return (T*)(__attribute__((address_space(1))) T*)p;
}

using Float4Vector = float __attribute__((ext_vector_type(4)));
using Float16Vector = float __attribute__((ext_vector_type(16)));
using Half4Vector = _Float16 __attribute__((ext_vector_type(4)));
using Short4Vector = short __attribute__((ext_vector_type(4)));

// D = A B + C. A: row lane % 32, k = 4 * (lane / 32) + element; B: column lane % 32, the same k; D and C: column
// lane % 32, row 8 * (i / 4) + 4 * (lane / 32) + i % 4.
RLK_DEVICE Accumulator<16> mfma_32x32x8(Fp16x4 a, Fp16x4 b, Accumulator<16> c) {
  return __builtin_bit_cast(Accumulator<16>, __builtin_amdgcn_mfma_f32_32x32x8f16(
                                                 __builtin_bit_cast(Half4Vector, a), __builtin_bit_cast(Half4Vector, b),
                                                 __builtin_bit_cast(Float16Vector, c), 0, 0, 0));
}
RLK_DEVICE Accumulator<16> mfma_32x32x8(Bf16x4 a, Bf16x4 b, Accumulator<16> c) {
  return __builtin_bit_cast(
      Accumulator<16>,
      __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(__builtin_bit_cast(Short4Vector, a), __builtin_bit_cast(Short4Vector, b),
                                               __builtin_bit_cast(Float16Vector, c), 0, 0, 0));
}
// D = A B + C. A: row lane % 16, k = 4 * (lane / 16) + element; B: column lane % 16, the same k; D and C: column lane %
// 16, row 4 * (lane / 16) + i.
RLK_DEVICE Accumulator<4> mfma_16x16x16(Fp16x4 a, Fp16x4 b, Accumulator<4> c) {
  return __builtin_bit_cast(Accumulator<4>, __builtin_amdgcn_mfma_f32_16x16x16f16(
                                                __builtin_bit_cast(Half4Vector, a), __builtin_bit_cast(Half4Vector, b),
                                                __builtin_bit_cast(Float4Vector, c), 0, 0, 0));
}
RLK_DEVICE Accumulator<4> mfma_16x16x16(Bf16x4 a, Bf16x4 b, Accumulator<4> c) {
  return __builtin_bit_cast(Accumulator<4>,
                            __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Short4Vector, a),
                                                                      __builtin_bit_cast(Short4Vector, b),
                                                                      __builtin_bit_cast(Float4Vector, c), 0, 0, 0));
}

}  // namespace rlk::hip
