// What sample and linear_sample are told of their rows.
#pragma once

#include <optional>
#include <string>

#include "row_array.h"

namespace rlk::bindings {

inline void read_valid_vocab(nb::handle given, SampleParams* p) {
  p->valid_vocab = given.is_none() ? p->vocab_size : read_integer(given, "valid_vocab", "an integer");
  require(p->valid_vocab > 0 && p->valid_vocab <= p->vocab_size, "valid_vocab", "an integer in [1, ", p->vocab_size,
          "], got ", p->valid_vocab);
}

// Bits of the columns that each row allows, or nothing; `p` takes them.
class AllowedArgument {
 public:
  AllowedArgument(nb::handle given, Device device, SampleParams* p) {
    if (given.is_none()) return;
    const TensorView& m = mask_.emplace(given, "allowed", kInt32).view();
    require_device(*mask_, device);
    const std::int64_t words = (p->valid_vocab + 31) / 32;
    if (m.ndim != 2 || m.shape[0] != p->num_rows || m.shape[1] < words) {
      argument_error("allowed", "expected shape [" + std::to_string(p->num_rows) + ", " + std::to_string(words) +
                                    "] or wider, got " + shape_text(mask_->shape()));
    }
    require_columns(*mask_);
    p->allowed = static_cast<const std::int32_t*>(m.data);
    p->allowed_stride = m.stride(0);
  }

 private:
  std::optional<Array> mask_;
};

// Arrays of rows, which it keeps alive, or numbers for all; `p` takes them.
class DrawArguments {
 public:
  DrawArguments(nb::handle seed, nb::handle sample_id, nb::handle position, nb::handle temperature, nb::handle top_k,
                nb::handle min_p, nb::handle greedy, Device device, SampleParams* p)
      : seed_(seed, "seed", p->num_rows, &device),
        sample_id_(sample_id, "sample_id", p->num_rows, &device),
        position_(position, "position", p->num_rows, &device),
        top_k_(top_k, "top_k", p->num_rows, &device),
        temperature_(temperature, "temperature", kFloat32, p->num_rows, device),
        min_p_(min_p, "min_p", kFloat32, p->num_rows, device),
        greedy_(greedy, "greedy", kBool, p->num_rows, device) {
    p->seed = seed_.rows();
    p->sample_id = sample_id_.rows();
    p->position = position_.rows();
    p->top_k = top_k_.rows();
    p->temperature = floats_of(temperature_, temperature, "temperature");
    p->min_p = floats_of(min_p_, min_p, "min_p");
    if (greedy_) {
      p->is_greedy = static_cast<const std::uint8_t*>(greedy_->view().data);
      p->greedy_stride = greedy_.stride();
    } else {
      if (!PyBool_Check(greedy.ptr())) {
        throw nb::type_error(("greedy: expected a bool or an array of them, got " + kind_of(greedy)).c_str());
      }
      p->greedy = greedy.ptr() == Py_True;
    }
  }

 private:
  RowIntegersArgument seed_, sample_id_, position_, top_k_;
  RowArray temperature_, min_p_, greedy_;
};

}  // namespace rlk::bindings
