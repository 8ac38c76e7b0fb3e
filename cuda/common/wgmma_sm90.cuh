// wgmma: four warps compute D[64, n] += A[64, 16] B[16, n]. The operands lie in shared memory with the 128-byte
// swizzle, and D is fp32 in registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "element.cuh"

namespace rlk::cuda {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Returns the descriptor of an operand tile that TMA wrote with the 128-byte swizzle. K-major: the tile has rows of 64
// k (128 bytes), and groups of eight rows lie 1024 bytes apart. MN-major: the tile has chunks of 64 rows or columns,
// each laid out as [k][64], and the chunks lie `chunk_bytes` apart.
template <bool kMnMajor>
__device__ __forceinline__ std::uint64_t tile_descriptor(std::uint32_t shared, std::uint32_t chunk_bytes) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  const std::uint64_t leading = kMnMajor ? chunk_bytes >> 4 : 1;
  return kSwizzle128 | std::uint64_t{1024 >> 4} << 32 | leading << 16 | (shared >> 4 & 0x3fff);
}
// A descriptor plus this increment describes the operand 16 k further on.
template <bool kMnMajor>
constexpr std::uint64_t kDescriptorStep = (kMnMajor ? 16 * 128 : 16 * 2) >> 4;

// Lists of accumulators for inline assembly, one list for each width of D.
#define RLK_ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RLK_ACC8(d, i) RLK_ACC4(d, i), RLK_ACC4(d, i + 4)
#define RLK_REGS_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define RLK_ACCS_32(d) RLK_ACC8(d, 0), RLK_ACC8(d, 8)
#define RLK_REGS_48 \
  RLK_REGS_32       \
  ","               \
  "%16,%17,%18,%19,%20,%21,%22,%23"
#define RLK_ACCS_48(d) RLK_ACCS_32(d), RLK_ACC8(d, 16)
#define RLK_REGS_64 \
  RLK_REGS_48       \
  ","               \
  "%24,%25,%26,%27,%28,%29,%30,%31"
#define RLK_ACCS_64(d) RLK_ACCS_48(d), RLK_ACC8(d, 24)
#define RLK_REGS_80 \
  RLK_REGS_64       \
  ","               \
  "%32,%33,%34,%35,%36,%37,%38,%39"
#define RLK_ACCS_80(d) RLK_ACCS_64(d), RLK_ACC8(d, 32)
#define RLK_REGS_96 \
  RLK_REGS_64       \
  ","               \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define RLK_ACCS_96(d) RLK_ACCS_64(d), RLK_ACC8(d, 32), RLK_ACC8(d, 40)
#define RLK_REGS_112 \
  RLK_REGS_96        \
  ","                \
  "%48,%49,%50,%51,%52,%53,%54,%55"
#define RLK_ACCS_112(d) RLK_ACCS_96(d), RLK_ACC8(d, 48)
#define RLK_REGS_128 \
  RLK_REGS_112       \
  ","                \
  "%56,%57,%58,%59,%60,%61,%62,%63"
#define RLK_ACCS_128(d) RLK_ACCS_112(d), RLK_ACC8(d, 56)
#define RLK_REGS_160 \
  RLK_REGS_128       \
  ","                \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define RLK_ACCS_160(d) RLK_ACCS_128(d), RLK_ACC8(d, 64), RLK_ACC8(d, 72)
#define RLK_REGS_192                                                                                 \
  RLK_REGS_128                                                                                       \
  ","                                                                                                \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87," \
  "%88,%89,%90,%91,%92,%93,%94,%95"
#define RLK_ACCS_192(d) RLK_ACCS_128(d), RLK_ACC8(d, 64), RLK_ACC8(d, 72), RLK_ACC8(d, 80), RLK_ACC8(d, 88)
#define RLK_REGS_224 \
  RLK_REGS_192       \
  ","                \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define RLK_ACCS_224(d) RLK_ACCS_192(d), RLK_ACC8(d, 96), RLK_ACC8(d, 104)
#define RLK_REGS_256 \
  RLK_REGS_224       \
  ","                \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define RLK_ACCS_256(d) RLK_ACCS_224(d), RLK_ACC8(d, 112), RLK_ACC8(d, 120)

#define RLK_WGMMA(n, a, b, keep, ta, tb)                                                         \
  if constexpr (kN == n) {                                                                       \
    if constexpr (std::is_same_v<T, Bf16>) {                                                     \
      asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" keep                               \
                   ", 0;\n"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" RLK_REGS_##n     \
                   "}, %" a ", %" b ", keep, 1, 1, %" ta ", %" tb ";\n}\n"                       \
                   : RLK_ACCS_##n(d)                                                             \
                   : "l"(desc_a), "l"(desc_b), "r"(accumulate), "n"(kAMnMajor), "n"(kBMnMajor)); \
    } else {                                                                                     \
      asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" keep                               \
                   ", 0;\n"                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" RLK_REGS_##n       \
                   "}, %" a ", %" b ", keep, 1, 1, %" ta ", %" tb ";\n}\n"                       \
                   : RLK_ACCS_##n(d)                                                             \
                   : "l"(desc_a), "l"(desc_b), "r"(accumulate), "n"(kAMnMajor), "n"(kBMnMajor)); \
    }                                                                                            \
  }

// Issues one step of 16 k. With accumulate = 0 the sums start from +0. Thread t of the 128 holds d[4 j + 2 r + c], for
// r and c = 0 or 1: row 16 (t / 32) + (t % 32) / 4 + 8 r, column 8 j + 2 (t % 4) + c.
template <class T, int kN, bool kAMnMajor, bool kBMnMajor>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], std::uint64_t desc_a, std::uint64_t desc_b, int accumulate) {
  RLK_WGMMA(32, "16", "17", "18", "19", "20")
  RLK_WGMMA(48, "24", "25", "26", "27", "28")
  RLK_WGMMA(64, "32", "33", "34", "35", "36")
  RLK_WGMMA(80, "40", "41", "42", "43", "44")
  RLK_WGMMA(96, "48", "49", "50", "51", "52")
  RLK_WGMMA(112, "56", "57", "58", "59", "60")
  RLK_WGMMA(128, "64", "65", "66", "67", "68")
  RLK_WGMMA(160, "80", "81", "82", "83", "84")
  RLK_WGMMA(192, "96", "97", "98", "99", "100")
  RLK_WGMMA(224, "112", "113", "114", "115", "116")
  RLK_WGMMA(256, "128", "129", "130", "131", "132")
}
// Computes like wgmma(), with A in registers. Each warp passes 16 of the 64 rows, in the layout of mma.sync's operand A
// (mma_sm80.cuh).
#define RLK_WGMMA_A(n, type, a_list, desc, keep, tb)                                             \
  asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" keep                                   \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" RLK_REGS_##n \
               "}, {" a_list "}, %" desc ", keep, 1, 1, %" tb ";\n}\n"                           \
               : RLK_ACCS_##n(d)                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(accumulate), "n"(kBMnMajor))
template <class T, int kN, bool kBMnMajor>
__device__ __forceinline__ void wgmma_registers(float (&d)[kN / 2], const std::uint32_t (&a)[4], std::uint64_t desc_b,
                                                int accumulate) {
  constexpr bool kIsBf16 = std::is_same_v<T, Bf16>;
  if constexpr (kN == 64 && kIsBf16) RLK_WGMMA_A(64, "bf16", "%32,%33,%34,%35", "36", "37", "38");
  if constexpr (kN == 64 && !kIsBf16) RLK_WGMMA_A(64, "f16", "%32,%33,%34,%35", "36", "37", "38");
  if constexpr (kN == 80 && kIsBf16) RLK_WGMMA_A(80, "bf16", "%40,%41,%42,%43", "44", "45", "46");
  if constexpr (kN == 80 && !kIsBf16) RLK_WGMMA_A(80, "f16", "%40,%41,%42,%43", "44", "45", "46");
  if constexpr (kN == 96 && kIsBf16) RLK_WGMMA_A(96, "bf16", "%48,%49,%50,%51", "52", "53", "54");
  if constexpr (kN == 96 && !kIsBf16) RLK_WGMMA_A(96, "f16", "%48,%49,%50,%51", "52", "53", "54");
  if constexpr (kN == 128 && kIsBf16) RLK_WGMMA_A(128, "bf16", "%64,%65,%66,%67", "68", "69", "70");
  if constexpr (kN == 128 && !kIsBf16) RLK_WGMMA_A(128, "f16", "%64,%65,%66,%67", "68", "69", "70");
  if constexpr (kN == 192 && kIsBf16) RLK_WGMMA_A(192, "bf16", "%96,%97,%98,%99", "100", "101", "102");
  if constexpr (kN == 192 && !kIsBf16) RLK_WGMMA_A(192, "f16", "%96,%97,%98,%99", "100", "101", "102");
  if constexpr (kN == 256 && kIsBf16) RLK_WGMMA_A(256, "bf16", "%128,%129,%130,%131", "132", "133", "134");
  if constexpr (kN == 256 && !kIsBf16) RLK_WGMMA_A(256, "f16", "%128,%129,%130,%131", "132", "133", "134");
}
#undef RLK_WGMMA_A
#undef RLK_WGMMA
#undef RLK_ACC4
#undef RLK_ACC8
#undef RLK_REGS_32
#undef RLK_ACCS_32
#undef RLK_REGS_48
#undef RLK_ACCS_48
#undef RLK_REGS_64
#undef RLK_ACCS_64
#undef RLK_REGS_80
#undef RLK_ACCS_80
#undef RLK_REGS_96
#undef RLK_ACCS_96
#undef RLK_REGS_112
#undef RLK_ACCS_112
#undef RLK_REGS_128
#undef RLK_ACCS_128
#undef RLK_REGS_160
#undef RLK_ACCS_160
#undef RLK_REGS_192
#undef RLK_ACCS_192
#undef RLK_REGS_224
#undef RLK_ACCS_224
#undef RLK_REGS_256
#undef RLK_ACCS_256

}  // namespace rlk::cuda
