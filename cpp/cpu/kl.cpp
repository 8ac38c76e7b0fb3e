// CPU backend of kl: tiles of rows are spread over threads.
#include "kl.h"

#include "isa.h"
#include "kl_lanes.h"
#include "rlk/kernels/kl_check.h"
#include "token_passes.h"

namespace rlk::cpu {
namespace {

const KlLanes& lanes() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::kAvx512:
      return avx512::kl_lanes;
    case Isa::kAvx2:
      return avx2::kl_lanes;
    case Isa::kBaseline:
      break;
  }
#endif
  return baseline::kl_lanes;
}

}  // namespace

void kl(const KlParams& p) {
  check_kl(p);
  const KlParams rows = as_one_row(p);
  for_each_tile(rows.sequences, [&](const TokenTile& tile, std::int64_t) { lanes().terms(rows, tile); });
}

}  // namespace rlk::cpu
