// Python's entry to labels and masks: fields move from checked arguments to the contract's params, outputs come from the
// caller.
#include "rlk/ops/shift_labels_packed.h"

#include <string>
#include <vector>

#include "define.h"
#include "gil.h"
#include "linear_args.h"
#include "module.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

Array read_integers(nb::handle object, const char* name) {
  Array a(object, name, "int32 or int64");
  if (a.view().dtype != DType::kInt32 && a.view().dtype != DType::kInt64) dtype_error(a, "int32 or int64");
  require_backend("shift_labels_packed", a.view().device);
  return a;
}

nb::object labels(nb::handle ids, nb::handle cu_seqlens, nb::handle mask, std::int64_t cp_rank, std::int64_t cp_size,
                  bool zigzag, std::int64_t ignore_index, nb::handle allocate, std::uintptr_t stream) {
  const Array in = read_integers(ids, "ids");
  const TensorView& v = in.view();
  if (v.ndim != 1) argument_error("ids", "expected shape [num_tokens], got " + shape_text(in.shape()));
  require_columns(in);
  const OffsetsArgument offsets(cu_seqlens, v.device);
  offsets.require_given();
  const MaskArgument flags(mask, in.shape(), "ids", v.device);
  if (cp_size < 1 || cp_size >= 1 << 20) {
    argument_error("cp_size", "expected a number in [1, 2^20), got " + std::to_string(cp_size));
  }
  if (cp_rank < 0 || cp_rank >= cp_size) {
    argument_error("cp_rank",
                   "expected a number in [0, " + std::to_string(cp_size) + "), got " + std::to_string(cp_rank));
  }
  ShiftLabelsParams p;
  p.ids = v.data;
  p.mask = flags.mask;
  p.cu_seqlens = offsets.offsets;
  p.num_sequences = offsets.num_sequences;
  p.num_tokens = v.shape[0];
  p.cp_rank = static_cast<std::int32_t>(cp_rank);
  p.cp_size = static_cast<std::int32_t>(cp_size);
  p.zigzag = zigzag;
  p.ignore_index = ignore_index;
  p.dtype = v.dtype;
  if (p.num_tokens % cp_size != 0) {
    argument_error("ids", "expected a number of tokens that is a multiple of " + std::to_string(cp_size) +
                              " (cp_size), got " + std::to_string(p.num_tokens) + "; pad them");
  }
  if (p.dtype == DType::kInt32 && static_cast<std::int32_t>(ignore_index) != ignore_index) {
    argument_error("ignore_index", "expected a number that int32 holds, got " + std::to_string(ignore_index));
  }
  const Caller caller = make_caller(ids, v.device, allocate, stream);
  const std::int64_t shape[] = {p.num_tokens / cp_size};
  Caller::Fresh out = caller.empty(shape, p.dtype);
  p.labels = out.data;
  {
    const ReleasedGil released;
    shift_labels_packed(p, v.device, caller.stream);
  }
  return out.array;
}

nb::object spans(nb::handle given, nb::handle span_offsets, nb::handle cu_seqlens, std::int64_t num_tokens,
                 nb::handle allocate, std::uintptr_t stream) {
  const Array in = read_spans(given);
  const TensorView& v = in.view();
  require_backend("shift_labels_packed", v.device);
  const Array of_sequences(span_offsets, "span_offsets", "int32 or int64");
  const TensorView& o = of_sequences.view();
  if (o.dtype != DType::kInt32 && o.dtype != DType::kInt64) dtype_error(of_sequences, "int32 or int64");
  require_device(of_sequences, v.device);
  const OffsetsArgument offsets(cu_seqlens, v.device);
  const bool packed = !cu_seqlens.is_none();
  if (o.ndim != 1 || o.shape[0] < 1 || !o.is_contiguous() || (packed && o.shape[0] != offsets.num_sequences + 1)) {
    argument_error("span_offsets", "expected a contiguous array of shape [" +
                                       (packed ? std::to_string(offsets.num_sequences + 1) : "num_sequences + 1") +
                                       "], got " + shape_text(of_sequences.shape()));
  }
  SpanMaskParams p;
  p.spans = v.data;
  p.span_offsets = {o.data, o.dtype};
  p.cu_seqlens = offsets.offsets;
  p.num_sequences = o.shape[0] - 1;
  p.num_tokens = num_tokens;
  p.num_spans = v.shape[0];
  p.dtype = v.dtype;
  const Caller caller = make_caller(given, v.device, allocate, stream);
  std::vector<std::int64_t> shape;
  if (!packed) shape.push_back(p.num_sequences);
  shape.push_back(num_tokens);
  Caller::Fresh out = caller.empty(shape, DType::kBool);
  p.mask = static_cast<std::uint8_t*>(out.data);
  {
    const ReleasedGil released;
    loss_mask_from_spans(p, v.device, caller.stream);
  }
  return out.array;
}

Marker read_marker(nb::list ids) {
  Marker m;
  m.length = static_cast<std::int32_t>(nb::len(ids));  // Python checked how many
  for (int i = 0; i < m.length; ++i) m.ids[i] = nb::cast<std::int64_t>(ids[static_cast<std::size_t>(i)]);
  return m;
}

nb::object turns(nb::handle ids, nb::list begin, nb::list end, nb::handle cu_seqlens, bool include_end,
                 nb::handle allocate, std::uintptr_t stream) {
  const TokenArguments tokens(ids, "ids", cu_seqlens, TokenKind::kIntegers);
  const TensorView& v = tokens.array().view();
  require_backend("shift_labels_packed", v.device);
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
  const Caller caller = make_caller(ids, v.device, allocate, stream);
  Caller::Fresh out = caller.empty(tokens.shape(), DType::kBool);
  p.mask = static_cast<std::uint8_t*>(out.data);
  {
    const ReleasedGil released;
    tool_mask(p, v.device, caller.stream);
  }
  return out.array;
}

}  // namespace

void bind_shift_labels_packed(nb::module_& m) {
  define(m, "shift_labels_packed", &labels);
  define(m, "loss_mask_from_spans", &spans);
  define(m, "tool_mask", &turns);
}

}  // namespace rlk::bindings
