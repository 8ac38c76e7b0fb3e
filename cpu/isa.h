// The instruction set that the CPU backend's inner loops use. All instruction sets give the same bits; the sets differ
// in speed.
#pragma once

namespace rlk::cpu {

enum class Isa {
  kBaseline,  // instructions that every CPU of the architecture has. On x86-64 each fma is then a function call, so
              // this set is meant for old machines and tests
  kAvx2,      // AVX2, FMA, F16C: x86-64-v3
  kAvx512,    // AVX-512 F, BW, DQ, VL: x86-64-v4
};
constexpr Isa kIsas[] = {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512};

const char* isa_name(Isa isa);  // "baseline", "avx2", "avx512": also the values of the environment variable RLK_CPU_ISA
bool isa_supported(Isa isa);    // whether this CPU, its operating system and this build support the instruction set

// The instruction set in use: the one that set_isa chose, else the one that RLK_CPU_ISA names, else the last supported
// entry of kIsas. An invalid RLK_CPU_ISA throws InvalidArgument in every call until set_isa.
Isa isa();
void set_isa(Isa isa);  // InvalidArgument if the CPU does not support `isa`

}  // namespace rlk::cpu
