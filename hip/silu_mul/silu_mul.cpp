// Host side of the HIP backend of silu_mul: checks of memory safety, which kernel serves a call, its launches.
#include "rlk/ops/silu_mul.h"

#include <string>

#include "hip/common/launch.h"
#include "launches.h"
#include "rlk/backends.h"
#include "rlk/kernels/silu_mul_check.h"

namespace rlk::hip {
namespace {

template <class Params>
void launch_over_rows(const char* pass, bool vectors, const Params& p, int device, Stream stream) {
  constexpr const char* kActivations[] = {"silu", "gelu", "gelu_tanh"};
  const std::string name = std::string("rlk_silu_mul_") + pass + "_" + kActivations[static_cast<int>(p.activation)] +
                           (vectors ? "_vectors" : "_elements") + type_suffix(p.dtype);
  const RowSplit split = vectors ? split_rows(p.columns / kVec8, kGatedVec8s, kLog2Gated)
                                 : split_rows(p.columns, kGatedElements, kLog2Gated);
  const std::int64_t blocks = blocks_of(split, p.num_rows);
  RLK_CHECK(blocks < std::int64_t{1} << 31, "silu_mul: not too many rows");
  launch_blocks(device, stream, {kGatedThreads, 0}, name, blocks, p, split);
}

}  // namespace

void gated_mul(const GatedMulParams& p, int device, Stream stream) {
  check_gated_mul(p);
  if (p.num_rows == 0 || p.columns == 0) return;
  const bool vectors = p.columns % kVec8 == 0 && has_vectors(p.gate, p.gate_rows, p.dtype) &&
                       has_vectors(p.up, p.up_rows, p.dtype) && has_vectors(p.y, p.y_rows, p.dtype);
  launch_over_rows("forward", vectors, p, device, stream);
}

void gated_mul_backward(const GatedMulBackwardParams& p, int device, Stream stream) {
  check_gated_mul_backward(p);
  if (p.num_rows == 0 || p.columns == 0 || (p.d_gate == nullptr && p.d_up == nullptr)) return;
  const bool vectors = p.columns % kVec8 == 0 && has_vectors(p.dy, p.dy_rows, p.dtype) &&
                       has_vectors(p.gate, p.gate_rows, p.dtype) && has_vectors(p.up, p.up_rows, p.dtype) &&
                       has_vectors(p.d_gate, p.d_gate_rows, p.dtype) && has_vectors(p.d_up, p.d_up_rows, p.dtype);
  launch_over_rows("backward", vectors, p, device, stream);
}

}  // namespace rlk::hip
