// Python's entry to labels and masks.
#include "rlk/ops/shift_labels_packed.h"

#include <vector>

#include "call.h"
#include "linear_args.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

nb::object labels(Frame* frame, nb::handle ids, nb::handle cu_seqlens, nb::handle mask, std::int64_t cp_rank,
                  std::int64_t cp_size, bool zigzag, std::int64_t ignore_index) {
  const Array& in = frame->read(ids, "ids", kIndices);
  const TensorView& v = in.view();
  require_shape(v.ndim == 1, in, "shape [num_tokens]");
  require_columns(in);
  require_given(cu_seqlens, "cu_seqlens");
  const OffsetsArgument offsets(frame, cu_seqlens, v.device);
  ShiftLabelsParams p;
  p.mask = read_mask(frame, mask, in.shape(), "ids", v.device);
  require(cp_size > 0 && cp_size < 1 << 20, "cp_size", "a number in [1, 2^20), got ", cp_size);
  require(cp_rank >= 0 && cp_rank < cp_size, "cp_rank", "a number in [0, ", cp_size, "), got ", cp_rank);
  p.ids = v.data;
  p.cu_seqlens = offsets.offsets;
  p.num_sequences = offsets.num_sequences;
  p.num_tokens = v.shape[0];
  p.cp_rank = static_cast<std::int32_t>(cp_rank);
  p.cp_size = static_cast<std::int32_t>(cp_size);
  p.zigzag = zigzag;
  p.ignore_index = ignore_index;
  p.dtype = v.dtype;
  require(p.num_tokens % cp_size == 0, in, "a number of tokens that is a multiple of ", cp_size, " (cp_size), got ",
          p.num_tokens, "; pad them");
  require(p.dtype == DType::kInt64 || static_cast<std::int32_t>(ignore_index) == ignore_index, "ignore_index",
          "a number that int32 holds, got ", ignore_index);
  return Results("shift_labels_packed", in, frame)
      .add(&p.labels, {p.num_tokens / cp_size}, p.dtype)
      .run(rlk::shift_labels_packed, p);
}

nb::object spans(Frame* frame, nb::handle given, nb::handle span_offsets, nb::handle cu_seqlens,
                 std::int64_t num_tokens) {
  const Array& in = read_spans(frame, given);
  const TensorView& v = in.view();
  const Array& of_sequences = frame->read(span_offsets, "span_offsets", kIndices, v.device);
  const TensorView& o = of_sequences.view();
  const OffsetsArgument offsets(frame, cu_seqlens, v.device);
  const bool packed = !cu_seqlens.is_none();
  if (o.ndim != 1 || o.shape[0] < 1 || !o.is_contiguous() || (packed && o.shape[0] != offsets.num_sequences + 1)) {
    require_shape(false, of_sequences, "a contiguous array of shape [",
                  packed ? word(offsets.num_sequences + 1) : "num_sequences + 1", "]");
  }
  SpanMaskParams p;
  p.spans = v.data;
  p.span_offsets = {o.data, o.dtype};
  p.cu_seqlens = offsets.offsets;
  p.num_sequences = o.shape[0] - 1;
  p.num_tokens = num_tokens;
  p.num_spans = v.shape[0];
  p.dtype = v.dtype;
  std::vector<std::int64_t> shape{num_tokens};
  if (!packed) shape.insert(shape.begin(), p.num_sequences);
  return Results("shift_labels_packed", in, frame).add(&p.mask, shape).run(loss_mask_from_spans, p);
}

Marker read_marker(nb::list ids) {
  Marker m;
  m.length = static_cast<std::int32_t>(nb::len(ids));  // Python has checked their number
  for (int i = 0; i < m.length; ++i) m.ids[i] = nb::cast<std::int64_t>(ids[static_cast<std::size_t>(i)]);
  return m;
}

nb::object turns(Frame* frame, nb::handle ids, nb::list begin, nb::list end, nb::handle cu_seqlens, bool include_end) {
  const TokenArguments tokens(frame, ids, "ids", cu_seqlens, TokenKind::kIntegers);
  const TensorView& v = tokens.array().view();
  ToolMaskParams p;
  p.ids = v.data;
  p.ids_stride = tokens.row_stride();
  p.cu_seqlens = tokens.sequences().offsets();
  p.num_sequences = tokens.sequences().num_sequences;
  p.num_tokens = tokens.sequences().num_tokens;
  p.begin = read_marker(begin);
  p.end = read_marker(end);
  p.dtype = v.dtype;
  p.include_end = include_end;
  return Results("shift_labels_packed", tokens.array(), frame).add(&p.mask, tokens.shape()).run(rlk::tool_mask, p);
}

const Functions kFunctions([](nb::module_& m) {
  define(m, "shift_labels_packed", &labels);
  define(m, "loss_mask_from_spans", &spans);
  define(m, "tool_mask", &turns);
});

}  // namespace
}  // namespace rlk::bindings
