// CUDA backend of the operators in operators.inc: checks memory safety, divides the work into tiles, and calls the
// kernels for the GPU's architecture.
#include "../common/kernels.h"
#include "../policy_loss/kernels.h"
#include "kernels/losses/covariance_terms.h"
#include "kernels/losses/mismatch_terms.h"
#include "kernels/losses/policy_check.h"
#include "kernels/losses/rejection_terms.h"
#include "kernels/losses/value_check.h"
#include "kernels/losses/value_terms.h"
#include "rlk/backends.h"
#include "rlk/plan_note.h"

namespace rlk::cuda {
namespace {

template <class Params>
TokenPlan choose_plan(const Params& p, int multiprocessors) {
  return choose_token_plan(p.sequences, multiprocessors);
}
TokenPlan choose_plan(const PolicyLossParams& p, int multiprocessors) { return choose_policy_plan(p, multiprocessors); }

}  // namespace

#define RLK_TOKEN_OPERATOR(op, function, Params, Batch)                                                              \
  std::int64_t function##_workspace_bytes(const Params& p, int) { return most_workspace_bytes<Batch>(p.sequences); } \
  void function(const Params& p, int device, Stream stream) {                                                        \
    check_##op(p);                                                                                                   \
    RLK_CHECK(p.workspace, #op ": a workspace is given");                                                            \
    const DeviceGuard guard(device);                                                                                 \
    const TokenPlan plan = choose_plan(p, multiprocessors(device));                                                  \
    note_plan([&] { return "tiles of " + std::to_string(1 << plan.tile) + " tokens"; });                             \
    RLK_CUDA_IN_USE(#op, device, function)(p, plan, to_stream(stream));                                              \
  }
#include "operators.inc"

}  // namespace rlk::cuda
