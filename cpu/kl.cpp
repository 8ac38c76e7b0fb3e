// CPU backend of the operator `kl`: tiles of rows are spread over threads.
#include "rlk/ops/kl.h"

#include "kernels/losses/kl_check.h"
#include "kl_simd.h"
#include "rlk/backends.h"
#include "tokens/passes.h"

namespace rlk::cpu {
namespace {

const KlLanes& lanes() { return RLK_CPU_LANES_IN_USE(kl_simd); }

}  // namespace

void kl(const KlParams& p) {
  check_kl(p);
  const KlParams rows = as_one_row(p);
  for_each_tile(rows.sequences, [&](const TokenTile& tile, std::int64_t) { lanes().terms(rows, tile); });
}

}  // namespace rlk::cpu
