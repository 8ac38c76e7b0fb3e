// Python's entry to sequence_logprob: fields move from checked arguments to the contract's params, outputs come from the
// caller.
#include "rlk/ops/sequence_logprob.h"

#include <vector>

#include "define.h"
#include "gil.h"
#include "linear_args.h"
#include "module.h"
#include "tokens.h"
#include "torch_state.h"

namespace rlk::bindings {
namespace {

// (sum, count, status or None).
nb::object forward(nb::handle logprob, nb::handle mask, nb::handle cu_seqlens, bool return_status, nb::handle allocate,
                   std::uintptr_t stream) {
  TokenArguments tokens(logprob, "logprob", cu_seqlens, TokenKind::kFloats);
  const TensorView& v = tokens.array().view();
  require_backend("sequence_logprob", v.device);
  SequenceLogprobParams p;
  p.logprob = v.data;
  p.logprob_stride = tokens.row_stride();
  p.mask = tokens.optional_mask(mask);
  p.cu_seqlens = tokens.sequences().offsets();
  p.num_sequences = tokens.sequences().num_sequences;
  p.num_tokens = tokens.sequences().num_tokens;
  p.dtype = v.dtype;
  const Caller caller = make_caller(logprob, v.device, allocate, stream);
  const std::int64_t shape[] = {p.num_sequences};
  Caller::Fresh sum = caller.empty(shape, DType::kFloat32), count = caller.empty(shape, DType::kInt64);
  p.sum = static_cast<float*>(sum.data);
  p.count = static_cast<std::int64_t*>(count.data);
  nb::object status = nb::none();
  if (return_status) {
    Caller::Fresh fresh = caller.empty(shape, DType::kInt32);
    p.status = static_cast<std::int32_t*>(fresh.data);
    status = fresh.array;
  }
  {
    const ReleasedGil released;
    sequence_logprob(p, v.device, caller.stream);
  }
  return nb::make_tuple(sum.array, count.array, status);
}

// An eager call on plain CUDA tensors without gradient. NotImplemented sends every other call the general way.
nb::object eager(nb::handle logprob, nb::handle mask, nb::handle cu_seqlens, bool return_status) {
  if (!may_bypass_dispatcher({logprob, mask, cu_seqlens})) return nb::borrow(Py_NotImplemented);
  return forward(logprob, mask, cu_seqlens, return_status, nb::none(), 0);
}

// d_logprob of `num_tokens` (of a row, or of all packed ones) and of the dtype that `code` is. The mask has their shape;
// `is_flat`: that of tokens of one sequence without offsets is [num_tokens].
nb::object backward(nb::handle dsum, nb::handle mask, nb::handle cu_seqlens, std::int64_t num_tokens, int code,
                    bool is_flat, nb::handle allocate, std::uintptr_t stream) {
  const Array in(dsum, "dsum", "float32");
  const TensorView& v = in.view();
  require_backend("sequence_logprob", v.device);
  if (v.dtype != DType::kFloat32) dtype_error(in, "float32");
  const OffsetsArgument offsets(cu_seqlens, v.device);
  const bool packed = !cu_seqlens.is_none();
  if (v.ndim != 1 || (packed && v.shape[0] != offsets.num_sequences)) {
    argument_error("dsum", "expected shape [" +
                               (packed ? std::to_string(offsets.num_sequences) : std::string("num_sequences")) +
                               "], got " + shape_text(in.shape()));
  }
  SequenceLogprobBackwardParams p;
  p.dsum = static_cast<const float*>(v.data);
  p.dsum_stride = v.shape[0] > 1 ? v.stride(0) : 1;
  p.cu_seqlens = offsets.offsets;
  p.num_sequences = v.shape[0];
  p.num_tokens = num_tokens;
  p.dtype = static_cast<DType>(code);
  const Caller caller = make_caller(dsum, v.device, allocate, stream);
  std::vector<std::int64_t> shape;
  if (is_flat && !packed && p.num_sequences != 1) {
    argument_error("dsum", "expected shape [1] (one sequence), got " + shape_text(in.shape()));
  }
  if (!packed && !is_flat) shape.push_back(p.num_sequences);
  shape.push_back(num_tokens);
  Caller::Fresh out = caller.empty(shape, p.dtype);
  p.d_logprob = out.data;
  const MaskArgument flags(mask, shape, "logprob", v.device);
  p.mask = flags.mask;
  {
    const ReleasedGil released;
    sequence_logprob_backward(p, v.device, caller.stream);
  }
  return out.array;
}

}  // namespace

void bind_sequence_logprob(nb::module_& m) {
  define(m, "sequence_logprob", &forward);
  define(m, "sequence_logprob_eager", &eager);
  define(m, "sequence_logprob_backward", &backward);
}

}  // namespace rlk::bindings
