// The only checks of logprob's arguments. They turn Python's arrays and numbers into a LogprobInput, or raise an error
// that names the argument, what was expected and what came.
#pragma once

#include <array>

#include "ndarray.h"
#include "rlk/ops/logprob.h"

namespace rlk::bindings {

// Arguments that the Python operator passes; None if the user gave nothing.
struct LogprobArguments {
  nb::handle logits, target;
  // (temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab, kept ids, kept offsets)
  const nb::tuple& numbers;
  int exp;
  nb::handle vocab_start = Py_None, vocab_size = Py_None;  // None if the logits hold the whole row
  double label_smoothing = 0.0;
};
// An element of a tuple, valid as long as the tuple.
inline nb::handle entry(const nb::tuple& of, int i) {
  if (PyObject* const found = PyTuple_GetItem(of.ptr(), i)) return found;
  throw nb::python_error();
}

// The arrays of a call, together with the params that point into them.
class LogprobCall {
 public:
  LogprobCall(Frame* frame, const LogprobArguments& a);
  // For logits [rows of hidden, num_columns] that are not in memory; a.logits is not read.
  LogprobCall(Frame* frame, const LogprobArguments& a, const Array& hidden, std::int64_t num_columns,
              DType logits_dtype);

  const LogprobInput& input() const { return input_; }
  const Array& logits() const { return *logits_; }
  Device device() const { return rows_of_->view().device; }
  std::span<const std::int64_t> rows_shape() const { return rows_of_->shape().first(rows_of_->view().ndim - 1); }

  // Checks a further input or output with one element per row: [rows], contiguous unless `layout` takes its strides.
  void check_rows(const Array& array, DType dtype, RowLayout* layout = nullptr) const;
  void check_output(const Array& array, DType dtype) const;
  // Raises an error if an output shares memory with an input. Logits may be excepted, for work in place.
  void check_apart(const Array& output, bool from_logits) const;

 private:
  void count_rows();
  void read(Frame* frame, const LogprobArguments& a);
  void read_temperature(Frame* frame, nb::handle temperature);
  void read_vocabulary(const LogprobArguments& a);
  void require_whole_parts() const;
  void read_kept(Frame* frame, nb::handle ids, nb::handle offsets);
  void check_device(const Array& array) const;

  LogprobInput input_;
  const Array* rows_of_;  // array whose leading dimensions are the rows: logits or hidden
  const Array *logits_ = nullptr, *target_ = nullptr, *temperature_ = nullptr, *kept_ids_ = nullptr,
              *kept_offsets_ = nullptr;
};

// Reads the inputs of a backward besides those of forward: `rows` is (lse, entropy, dlogprob, dlse, dentropy). Returns
// them, with null for None.
template <class Params>
std::array<const Array*, 5> read_backward_rows(Frame* frame, const LogprobCall& call, const nb::tuple& rows,
                                               Params* p) {
  const auto read = [&](int i, const char* name, const float** data, RowLayout* layout) {
    const Array* const array = frame->optional(entry(rows, i), name, "float32");
    if (array) call.check_rows(*array, DType::kFloat32, layout);
    if (array) *data = array->data<float>();
    return array;
  };
  return {read(0, "lse", &p->lse, nullptr), read(1, "entropy", &p->entropy, nullptr),
          read(2, "dlogprob", &p->dlogprob, &p->dlogprob_rows), read(3, "dlse", &p->dlse, &p->dlse_rows),
          read(4, "dentropy", &p->dentropy, &p->dentropy_rows)};
}

float read_temperature_value(nb::handle temperature);
// Number of a call's exp on a GPU, or -1 if Python must decide.
int read_exp(nb::handle exp);
// Refuses a shard that is not whole parts of rule 5. The message puts `names` before the padded width: the name of the
// argument that takes it, with "=", or an empty text.
[[noreturn]] void refuse_parts(std::int64_t vocab_size, std::int64_t start, std::int64_t columns, const char* names);

}  // namespace rlk::bindings
