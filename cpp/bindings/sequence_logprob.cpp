// Python's entry to sequence_logprob.
#include "rlk/ops/sequence_logprob.h"

#include <vector>

#include "call.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

// Returns (sum, count, status or None).
nb::object forward(Frame* frame, nb::handle logprob, nb::handle mask, nb::handle cu_seqlens, bool return_status) {
  TokenArguments tokens(frame, logprob, "logprob", cu_seqlens, TokenKind::kFloats);
  SequenceLogprobParams p;
  p.logprob = tokens.array().view().data;
  p.logprob_stride = tokens.row_stride();
  p.mask = tokens.mask(mask);
  p.cu_seqlens = tokens.sequences().offsets();
  p.num_sequences = tokens.sequences().num_sequences;
  p.num_tokens = tokens.sequences().num_tokens;
  p.dtype = tokens.array().view().dtype;
  return Results("sequence_logprob", tokens.array(), frame)
      .add(&p.sum, {p.num_sequences})
      .add(&p.count, {p.num_sequences})
      .add(&p.status, {p.num_sequences}, return_status)
      .run(rlk::sequence_logprob, p);
}

// Returns d_logprob for `num_tokens` tokens (per row, or of all packed sequences). `code` is the number of its DType. The
// mask has the same shape. With `is_flat`, tokens of one sequence without offsets have the shape [num_tokens].
nb::object backward(Frame* frame, nb::handle dsum, nb::handle mask, nb::handle cu_seqlens, std::int64_t num_tokens,
                    int code, bool is_flat) {
  const Array& in = frame->read(dsum, "dsum", kFloat32);
  const TensorView& v = in.view();
  const OffsetsArgument offsets(frame, cu_seqlens, v.device);
  const bool packed = !cu_seqlens.is_none();
  if (v.ndim != 1 || (packed && v.shape[0] != offsets.num_sequences)) {
    require_shape(false, in, "shape [", packed ? word(offsets.num_sequences) : "num_sequences", "]");
  }
  SequenceLogprobBackwardParams p;
  p.dsum = in.data<float>();
  p.dsum_stride = v.shape[0] > 1 ? v.stride(0) : 1;
  p.cu_seqlens = offsets.offsets;
  p.num_sequences = v.shape[0];
  p.num_tokens = num_tokens;
  p.dtype = static_cast<DType>(code);
  require_shape(!is_flat || packed || p.num_sequences == 1, in, "shape [1] (one sequence)");
  std::vector<std::int64_t> shape{num_tokens};
  if (!packed && !is_flat) shape.insert(shape.begin(), p.num_sequences);
  p.mask = read_mask(frame, mask, shape, "logprob", v.device);
  return Results("sequence_logprob", in, frame)
      .add(&p.d_logprob, shape, p.dtype)
      .run(rlk::sequence_logprob_backward, p);
}

const Functions kFunctions([](nb::module_& m) {
  define(m, "sequence_logprob", &forward);
  define_eager<&forward, 3>(m, "sequence_logprob_eager");
  define(m, "sequence_logprob_backward", &backward);
});

}  // namespace
}  // namespace rlk::bindings
