// Python's entry to process_logits.
#include "call.h"
#include "row_array.h"

namespace rlk::bindings {
namespace {

nb::object processed(Frame* frame, nb::handle logits, nb::handle repetition, nb::handle presence, nb::handle frequency,
                     nb::handle history_ids, nb::handle history_offsets, nb::handle is_prompt, nb::handle bias_ids,
                     nb::handle bias_values, nb::handle bias_offsets, int order, nb::handle vocab_start,
                     nb::handle vocab_size) {
  ProcessLogitsParams p;
  const Array& x = read_logits(frame, logits, &p, vocab_size);
  p.num_columns = x.view().shape[1];
  p.vocab_start = read_vocab_start(vocab_start, p.vocab_size, p.num_columns);
  const TensorView& v = x.view();
  p.order = static_cast<SampleOrder>(order);
  const auto rows = [&](nb::handle given, const char* name) {
    return RowArgument(frame, given, name, kFloat32, p.num_rows, v.device);
  };
  const RowArgument repetitions = rows(repetition, "repetition_penalty"),
                    presences = rows(presence, "presence_penalty"), frequencies = rows(frequency, "frequency_penalty");
  p.repetition = repetitions.numbers();
  p.presence = presences.numbers();
  p.frequency = frequencies.numbers();
  // Reads one contiguous array of a CSR, or nothing. It has `size` elements, or any number if `size` is negative.
  const auto entries = [&](nb::handle given, const char* name, const Dtypes& dtypes, std::int64_t size) {
    VectorArgument found(frame, given, name, dtypes, size, size < 0 ? "num_entries" : "", v.device);
    if (found.array()) require_columns(*found.array());
    return found;
  };
  const VectorArgument ids = entries(history_ids, "history ids", kIndices, -1);
  const VectorArgument offsets = entries(history_offsets, "history offsets", kInt64, p.num_rows + 1);
  const VectorArgument prompt = entries(is_prompt, "history is_prompt", kBool, ids.size());
  const VectorArgument biased = entries(bias_ids, "logit_bias ids", kIndices, -1);
  const VectorArgument values = entries(bias_values, "logit_bias values", kFloat32, biased.size());
  const VectorArgument bounds = entries(bias_offsets, "logit_bias offsets", kInt64, p.num_rows + 1);
  p.history_ids = ids.integers();
  p.history_offsets = offsets.data<std::int64_t>();
  p.is_prompt = prompt.data<std::uint8_t>();
  p.history_size = ids.size();
  p.bias_ids = biased.integers();
  p.bias_values = values.data<float>();
  p.bias_offsets = bounds.data<std::int64_t>();
  p.bias_size = biased.size();
  return Results("process_logits", x, frame)
      .add(&p.out, {p.num_rows, p.num_columns})
      .add(&p.status, {p.num_rows})
      .run(rlk::process_logits, p);
}

const Functions kFunctions([](nb::module_& m) { define(m, "process_logits", &processed); });

}  // namespace
}  // namespace rlk::bindings
