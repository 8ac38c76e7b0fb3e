// Python's entry to process_logits: fields move from checked arguments to the contract's params, outputs come from the caller.
#include "define.h"
#include "gil.h"
#include "module.h"
#include "row_array.h"

namespace rlk::bindings {
namespace {

// One of the arrays of a CSR, contiguous, with `size` elements, or as many as it has where that is negative; or nothing.
class Entries {
 public:
  Entries(nb::handle given, const char* name, const char* dtypes, std::int64_t size, Device device) {
    if (given.is_none()) return;
    array_.emplace(given, name, dtypes);
    require_device(*array_, device);
    const TensorView& v = array_->view();
    if (v.ndim != 1 || (size >= 0 && v.shape[0] != size)) {
      argument_error(name, "expected shape [" + (size < 0 ? "num_entries" : std::to_string(size)) + "], got " +
                               shape_text(array_->shape()));
    }
    require_columns(*array_);
  }
  explicit operator bool() const { return array_.has_value(); }
  std::int64_t size() const { return array_ ? array_->view().shape[0] : 0; }
  template <class T>
  const T* of(DType dtype, const char* expected) const {
    if (!array_) return nullptr;
    if (array_->view().dtype != dtype) dtype_error(*array_, expected);
    return static_cast<const T*>(array_->view().data);
  }
  RowIntegers integers() const {
    if (!array_) return {};
    const TensorView& v = array_->view();
    if (v.dtype != DType::kInt32 && v.dtype != DType::kInt64) dtype_error(*array_, "int32 or int64");
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
  const Array x = read_logits(logits, "process_logits", &p);
  const TensorView& v = x.view();
  p.order = static_cast<SampleOrder>(order);
  const auto rows = [&](nb::handle given, const char* name) {
    return RowArray(given, name, "float32", p.num_rows, v.device);
  };
  const RowArray repetitions = rows(repetition, "repetition_penalty"), presences = rows(presence, "presence_penalty"),
                 frequencies = rows(frequency, "frequency_penalty");
  p.repetition = floats_of(repetitions, repetition, "repetition_penalty");
  p.presence = floats_of(presences, presence, "presence_penalty");
  p.frequency = floats_of(frequencies, frequency, "frequency_penalty");
  const auto entries = [&](nb::handle given, const char* name, const char* dtypes, std::int64_t size) {
    return Entries(given, name, dtypes, size, v.device);
  };
  const Entries ids = entries(history_ids, "history ids", "int32 or int64", -1);
  const Entries offsets = entries(history_offsets, "history offsets", "int64", p.num_rows + 1);
  const Entries prompt = entries(is_prompt, "history is_prompt", "bool", ids.size());
  const Entries biased = entries(bias_ids, "logit_bias ids", "int32 or int64", -1);
  const Entries values = entries(bias_values, "logit_bias values", "float32", biased.size());
  const Entries bounds = entries(bias_offsets, "logit_bias offsets", "int64", p.num_rows + 1);
  p.history_ids = ids.integers();
  p.history_offsets = offsets.of<std::int64_t>(DType::kInt64, "int64");
  p.is_prompt = prompt.of<std::uint8_t>(DType::kBool, "bool");
  p.history_size = ids.size();
  p.bias_ids = biased.integers();
  p.bias_values = values.of<float>(DType::kFloat32, "float32");
  p.bias_offsets = bounds.of<std::int64_t>(DType::kInt64, "int64");
  p.bias_size = biased.size();
  const Caller caller = make_caller(logits, v.device, allocate, stream);
  const std::int64_t of_rows[] = {p.num_rows}, of_out[] = {p.num_rows, p.vocab_size};
  const Caller::Fresh out = caller.empty(of_out, DType::kFloat32), status = caller.empty(of_rows, DType::kInt32);
  p.out = static_cast<float*>(out.data);
  p.status = static_cast<std::int32_t*>(status.data);
  {
    const ReleasedGil released;
    rlk::process_logits(p, v.device, caller.stream);
  }
  return nb::make_tuple(out.array, status.array);
}

}  // namespace

void bind_process_logits(nb::module_& m) { define(m, "process_logits", &processed); }

}  // namespace rlk::bindings
