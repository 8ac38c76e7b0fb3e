// Arguments of operators on rows of logits: the logits, and arrays with one element per row, such as those for drawing
// a token. Python may give a number for all rows instead of such an array.
#pragma once

#include "linear_args.h"
#include "logprob_args.h"
#include "rlk/ops/sample.h"
#include "tokens.h"

namespace rlk::bindings {

inline std::int64_t read_vocab_size(nb::handle given) {
  const std::int64_t size = read_integer(given, "vocab_size", "an integer");
  require(size >= 1 && size <= kSampleVocab, "vocab_size", "an integer in [1, ", kSampleVocab, "], got ", size);
  return size;
}

// Checks logits [num_rows, vocab_size], and sets their address, sizes and strides in `p`. vocab_size is None, or the
// size of the vocabulary whose columns they are.
template <class Params>
const Array& read_logits(Frame* frame, nb::handle given, Params* p, nb::handle vocab_size = nb::none(),
                         const char* name = "logits") {
  const Array& x = frame->read(given, name, kFloats);
  const TensorView& v = x.view();
  const bool whole = vocab_size.is_none();
  require_shape(v.ndim == 2, x, "shape [num_rows, vocab_size]");
  require(v.shape[1] >= (whole ? 1 : 0) && v.shape[1] <= kSampleVocab, x, "1 to ", kSampleVocab, " columns, got ",
          v.shape[1]);
  require_columns(x);
  p->logits = v.data;
  p->dtype = v.dtype;
  p->num_rows = v.shape[0];
  p->vocab_size = whole ? v.shape[1] : read_vocab_size(vocab_size);
  p->logits_stride = v.stride(0);
  return x;
}

// The first column of a shard.
inline std::int64_t read_vocab_start(nb::handle given, std::int64_t vocab_size, std::int64_t columns) {
  const std::int64_t start = given.is_none() ? 0 : read_integer(given, "vocab_start", "an integer");
  require(start >= 0 && start <= vocab_size && columns <= vocab_size - start, "vocab_start",
          "0 <= vocab_start and vocab_start + ", columns, " (columns of the shard) <= vocab_size, got vocab_start ",
          start, ", vocab_size ", vocab_size);
  return start;
}

// An array with one element per row, or a number for all rows, which Python has checked.
class RowArgument : public VectorArgument {
 public:
  RowArgument(Frame* frame, nb::handle given, const char* name, const Dtypes& dtypes, std::int64_t num_rows,
              Device device)
      : VectorArgument(frame, is_array(given) ? given : nb::none(), name, dtypes, num_rows, "", device),
        given_(given),
        name_(name) {}
  RowIntegers integers() const {
    if (array()) return VectorArgument::integers();
    return {.value = read_integer(given_, name_, "an integer or an array of them")};
  }
  RowFloats numbers() const {
    if (array()) return {floats(), 0.0f, stride()};
    return {nullptr, static_cast<float>(read_number(given_, name_)), 0};
  }

 private:
  nb::handle given_;
  const char* name_;
};

inline void read_valid_vocab(nb::handle given, SampleParams* p) {
  p->valid_vocab = given.is_none() ? p->vocab_size : read_integer(given, "valid_vocab", "an integer");
  require(p->valid_vocab > 0 && p->valid_vocab <= p->vocab_size, "valid_vocab", "an integer in [1, ", p->vocab_size,
          "], got ", p->valid_vocab);
}

// Reads the arguments for drawing each row. `rows` is (seed, sample_id, position, temperature, top_k, top_p, min_p,
// greedy, allowed). Each is an array with one element per row, or a number for all rows. `allowed` has a bit for each
// column. It may be None, and so may top_p.
inline void read_drawn_rows(Frame* frame, const nb::tuple& rows, Device device, SampleParams* p) {
  const auto read = [&](int i, const char* name, const Dtypes& dtypes) {
    return RowArgument(frame, entry(rows, i), name, dtypes, p->num_rows, device);
  };
  p->seed = read(0, "seed", kIndices).integers();
  p->sample_id = read(1, "sample_id", kIndices).integers();
  p->position = read(2, "position", kIndices).integers();
  p->top_k = read(4, "top_k", kIndices).integers();
  const RowArgument temperature = read(3, "temperature", kFloat32);
  const RowArgument min_p = read(6, "min_p", kFloat32);
  const RowArgument greedy = read(7, "greedy", kBool);
  p->temperature = temperature.numbers();
  p->min_p = min_p.numbers();
  p->is_greedy = greedy.data<std::uint8_t>();
  p->greedy_stride = greedy.stride();
  p->greedy = entry(rows, 7).ptr() == Py_True;
  if (!greedy.array() && !PyBool_Check(entry(rows, 7).ptr())) {
    type_error("greedy", "a bool or an array of them, got ", kind_of(entry(rows, 7)));
  }
  if (!entry(rows, 5).is_none()) p->top_p = read(5, "top_p", kFloat32).numbers();
  const Array* const allowed = frame->optional(entry(rows, 8), "allowed", kInt32, device);
  if (!allowed) return;
  const TensorView& m = allowed->view();
  const std::int64_t words = (p->valid_vocab + 31) / 32;
  require_shape(m.ndim == 2 && m.shape[0] == p->num_rows && m.shape[1] >= words, *allowed, "shape [", p->num_rows, ", ",
                words, "] or wider");
  require_columns(*allowed);
  p->allowed = allowed->data<std::int32_t>();
  p->allowed_stride = m.stride(0);
}

}  // namespace rlk::bindings
