// CUDA backend of elementwise operators: checks memory safety, then picks a kernel, and its build for the GPU's
// architecture.
#include "kernels.h"
#include "kernels/rows/elementwise_check.h"
#include "kernels/rows/elementwise_formulas.h"
#include "rlk/backends.h"
#include "rlk/plan_note.h"

namespace rlk::cuda {

#define RLK_ELEMENTWISE(operator, function, Params, forms)                                \
  void function(const Params& p, int device, Stream stream) {                             \
    check_elementwise<forms>(p);                                                          \
    if (!writes(p)) return;                                                               \
    const DeviceGuard guard(device);                                                      \
    const int vec8s = choose_vec8s(p, multiprocessors(device));                           \
    note_plan([=] { return vec8s == 0 ? "columns" : std::to_string(vec8s) + " vec8s"; }); \
    RLK_CUDA_IN_USE(#operator, device, function)(p, vec8s, to_stream(stream));            \
  }
#include "rlk/elementwise.inc"

}  // namespace rlk::cuda
