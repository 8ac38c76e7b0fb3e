// The inner loop of the operator `kl`. CMake compiles this file once per instruction set.
#include "kl_simd.h"

#include "kernels/losses/kl_terms.h"
#include "tokens/tile_simd.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

void terms(const KlParams& p, const TokenTile& tile) { run_tile<KlTokenTerms>(p, {}, tile, nullptr); }

}  // namespace

const KlLanes kl_simd = {terms};

}  // namespace rlk::cpu::RLK_CPU_ISA
