// Which instruction set the CPU backend's inner loops run on. All give the same bits; they differ in speed.
#pragma once

namespace rlk::cpu {

enum class Isa {
  kBaseline,  // what every CPU of the architecture has; fma is a call on x86-64, so for old machines and tests only
  kAvx2,      // AVX2, FMA, F16C: x86-64-v3
  kAvx512,    // AVX-512 F, BW, DQ, VL: x86-64-v4
};
constexpr Isa kIsas[] = {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512};

const char* isa_name(Isa isa);  // "baseline", "avx2", "avx512": also the values of the environment variable RLK_CPU_ISA
bool isa_supported(Isa isa);    // by this CPU, its operating system and this build

// The one in use: set_isa's, else RLK_CPU_ISA's, else the last supported one of kIsas. A wrong RLK_CPU_ISA is an
// InvalidArgument, at every call until set_isa.
Isa isa();
void set_isa(Isa isa);  // InvalidArgument when it is not supported

}  // namespace rlk::cpu
