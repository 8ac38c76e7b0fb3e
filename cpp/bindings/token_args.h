// Arrays over the tokens of padded or packed sequences: each is read from Python, or raises an error that names it, what
// was expected and what came.
#pragma once

#include <optional>
#include <vector>

#include "ndarray.h"
#include "rlk/policy_sequences.h"

namespace rlk::bindings {

// [num_sequences, num_tokens], or [num_tokens] with cu_seqlens, or of one sequence; float32, tokens contiguous.
class TokenArguments {
 public:
  // By an array of float32, or by the mask, whose memory first_mask() then is.
  TokenArguments(nb::handle tokens, const char* name, nb::handle cu_seqlens);
  static TokenArguments of_mask(nb::handle mask, nb::handle cu_seqlens) { return {mask, "mask", cu_seqlens, true}; }

  const PolicySequences& sequences() const { return sequences_; }
  Device device() const { return first_.view().device; }
  std::span<const std::int64_t> shape() const { return first_.shape(); }
  const PolicyTokens& first() const { return tokens_; }
  PolicyMask first_mask() const { return read_mask(first_); }

  // An array of the same shape, or, where `per_sequence`, one value a sequence. None gives an array without data.
  PolicyTokens optional(nb::handle object, const char* name, bool per_sequence);
  PolicyTokens required(nb::handle object, const char* name, bool per_sequence);
  PolicyMask mask(nb::handle object);
  PolicyMask optional_mask(nb::handle object);  // None: every token counts
  // A number as it is; of one float32 element on the device its address in `element`, and 0; of None 0.
  float denominator(nb::handle object, const float** element) { return number(object, "denominator", element); }
  float number(nb::handle object, const char* name, const float** element);

 private:
  TokenArguments(nb::handle tokens, const char* name, nb::handle cu_seqlens, bool is_mask);
  PolicyMask read_mask(const Array& a) const;
  PolicyTokens read(const Array& a, bool per_sequence) const;

  Array first_;
  std::vector<Array> kept_;  // exporters' memory, as long as the call
  PolicySequences sequences_;
  PolicyTokens tokens_;
};

}  // namespace rlk::bindings
