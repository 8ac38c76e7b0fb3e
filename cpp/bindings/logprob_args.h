// The only checks of logprob's arguments, and the outputs of logprob and linear_logprob. The checks turn Python's arrays
// and numbers into a LogprobInput, or raise an error that names the argument, what was expected and what came.
#pragma once

#include <array>
#include <type_traits>

#include "call.h"
#include "linear_args.h"
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

// The outputs, each [...], in the order that is used everywhere, by the names in errors. Bit i of `returns` asks for output i.
constexpr std::array<const char*, 5> kOutputs = {"out.logprob", "out.lse", "out.entropy", "out.sum_p_sq", "out.status"};

// Adds outputs over `rows`, and points the params to them. `out` has the caller's outputs of a call, which are checked.
// If only logprob is wanted, it is the only output.
template <class Params>
void add_outputs(Frame* frame, Results* results, std::span<const std::int64_t> rows, int returns, Params* p,
                 const LogprobCall* call = nullptr, nb::handle out = nb::none()) {
  std::array<const Array*, kOutputs.size()> others = {};
  const auto add_one = [&]<class T>(int i, T** field) {
    const bool wanted = returns >> i & 1;
    const nb::object given = wanted && call != nullptr && !out.is_none() ? nb::object(out[i]) : nb::none();
    if (given.is_none()) return void(results->add(field, rows, wanted));
    constexpr DType kDtype = std::is_same_v<T, float> ? DType::kFloat32 : DType::kInt32;
    const Array& a = frame->read(given, kOutputs[i], name_of(kDtype));
    call->check_output(a, kDtype);
    for (const Array* other : others) {
      if (other) check_apart(a, *other);
    }
    others[i] = &a;
    *field = static_cast<T*>(a.view().data);
    results->add(given);
  };
  add_one(0, &p->logprob);
  if (returns == 1) return;
  add_one(1, &p->lse);
  add_one(2, &p->entropy);
  add_one(3, &p->sum_p_sq);
  add_one(4, &p->status);
}

}  // namespace rlk::bindings
