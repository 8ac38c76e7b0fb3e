// Python's entry to process_logits.
#include "call.h"
#include "row_array.h"

namespace rlk::bindings {
namespace {

// One of the arrays of a CSR, contiguous, with `size` elements, or as many as it has where that is negative; or nothing.
class Entries {
 public:
  Entries(nb::handle given, const char* name, const Dtypes& dtypes, std::int64_t size, Device device) {
    if (given.is_none()) return;
    array_.emplace(given, name, dtypes);
    require_device(*array_, device);
    const TensorView& v = array_->view();
    if (v.ndim != 1 || (size >= 0 && v.shape[0] != size)) {
      require_shape(false, *array_, "shape [", size < 0 ? "num_entries" : word(size), "]");
    }
    require_columns(*array_);
  }
  explicit operator bool() const { return array_.has_value(); }
  std::int64_t size() const { return array_ ? array_->view().shape[0] : 0; }
  template <class T>
  const T* of() const {
    return array_ ? static_cast<const T*>(array_->view().data) : nullptr;
  }
  RowIntegers integers() const {
    if (!array_) return {};
    const TensorView& v = array_->view();
    return {v.data, 0, 1, v.dtype};
  }

 private:
  std::optional<Array> array_;
};

nb::object processed(nb::handle logits, nb::handle repetition, nb::handle presence, nb::handle frequency,
                     nb::handle history_ids, nb::handle history_offsets, nb::handle is_prompt, nb::handle bias_ids,
                     nb::handle bias_values, nb::handle bias_offsets, int order, nb::handle allocate,
                     std::uintptr_t stream) {
  ProcessLogitsParams p;
  const Array x = read_logits(logits, &p);
  const TensorView& v = x.view();
  p.order = static_cast<SampleOrder>(order);
  const auto rows = [&](nb::handle given, const char* name) {
    return RowArray(given, name, kFloat32, p.num_rows, v.device);
  };
  const RowArray repetitions = rows(repetition, "repetition_penalty"), presences = rows(presence, "presence_penalty"),
                 frequencies = rows(frequency, "frequency_penalty");
  p.repetition = floats_of(repetitions, repetition, "repetition_penalty");
  p.presence = floats_of(presences, presence, "presence_penalty");
  p.frequency = floats_of(frequencies, frequency, "frequency_penalty");
  const auto entries = [&](nb::handle given, const char* name, const Dtypes& dtypes, std::int64_t size) {
    return Entries(given, name, dtypes, size, v.device);
  };
  const Entries ids = entries(history_ids, "history ids", kIndices, -1);
  const Entries offsets = entries(history_offsets, "history offsets", kInt64, p.num_rows + 1);
  const Entries prompt = entries(is_prompt, "history is_prompt", kBool, ids.size());
  const Entries biased = entries(bias_ids, "logit_bias ids", kIndices, -1);
  const Entries values = entries(bias_values, "logit_bias values", kFloat32, biased.size());
  const Entries bounds = entries(bias_offsets, "logit_bias offsets", kInt64, p.num_rows + 1);
  p.history_ids = ids.integers();
  p.history_offsets = offsets.of<std::int64_t>();
  p.is_prompt = prompt.of<std::uint8_t>();
  p.history_size = ids.size();
  p.bias_ids = biased.integers();
  p.bias_values = values.of<float>();
  p.bias_offsets = bounds.of<std::int64_t>();
  p.bias_size = biased.size();
  return Results("process_logits", logits, v.device, allocate, stream)
      .add(&p.out, {p.num_rows, p.vocab_size})
      .add(&p.status, {p.num_rows})
      .run(rlk::process_logits, p);
}

const Functions kFunctions([](nb::module_& m) { define(m, "process_logits", &processed); });

}  // namespace
}  // namespace rlk::bindings
