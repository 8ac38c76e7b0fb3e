// Arguments of sample and linear_sample for their rows.
#pragma once

#include "logprob_args.h"
#include "row_array.h"

namespace rlk::bindings {

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
