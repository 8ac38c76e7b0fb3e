// Python's entry to masked_whiten: fields move from checked arguments to the contract's params, outputs come from the caller.
#include "rlk/ops/masked_whiten.h"

#include <limits>

#include "define.h"
#include "gil.h"
#include "module.h"
#include "tokens.h"
#include "workspace.h"

namespace rlk::bindings {
namespace {

// (y, mean or None, var or None).
nb::object call(nb::handle x, nb::handle mask, nb::handle cu_seqlens, nb::handle eps, bool shift_mean, bool unbiased,
                bool return_stats, nb::handle allocate, std::uintptr_t stream) {
  TokenArguments sequences(x, "x", cu_seqlens);
  const Device device = sequences.device();
  require_backend("masked_whiten", device);
  MaskedWhitenParams p;
  p.sequences = sequences.sequences();
  p.x = rows_of(sequences.first());
  p.mask = sequences.optional_mask(mask);
  p.eps = read_number_in(eps, "eps", std::numeric_limits<float>::min(), std::numeric_limits<float>::max(),
                         "a finite number > 0 in float32");
  p.shift_mean = shift_mean;
  p.unbiased = unbiased;
  const Caller caller = make_caller(x, device, allocate, stream);
  Caller::Fresh y = caller.empty(sequences.shape(), DType::kFloat32);
  p.y = {static_cast<float*>(y.data), sequences.contiguous_stride()};
  nb::object mean = nb::none(), var = nb::none();
  if (return_stats) {
    Caller::Fresh of_mean = caller.empty({}, DType::kFloat32), of_var = caller.empty({}, DType::kFloat32);
    p.mean = static_cast<float*>(of_mean.data);
    p.var = static_cast<float*>(of_var.data);
    mean = std::move(of_mean.array);
    var = std::move(of_var.array);
  }
  const nb::object workspace = take_workspace(caller, masked_whiten_workspace_bytes(p, device), &p.workspace);
  {
    const ReleasedGil released;
    rlk::masked_whiten(p, device, caller.stream);
  }
  return nb::make_tuple(y.array, mean, var);
}

}  // namespace

void bind_masked_whiten(nb::module_& m) { define(m, "masked_whiten", &call); }

}  // namespace rlk::bindings
