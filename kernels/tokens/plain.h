// The arrays of most calls are plain: they have padded sequences whose lengths are multiples of four, rows are aligned
// to four elements, and no required array is missing. CUDA has a separate pass for plain arrays, which tests none of
// these properties per token.
//
// Terms that this pass can compute have these members in addition to those that terms.h requires:
//   kInputs                       inputs from kFirstOptional on may be missing; input kShareable may have one value
//                                 per sequence
//   output(p), kCounts            one output; counts are numbered from 1
//   token(p, factors, inputs, mask, output, sums, count)      reads inputs of masked tokens as they are; it calls
//                                                             count(i, condition) for counts 1 to kCounts
#pragma once

#include "kernels/tokens/terms.h"
#include "kernels/tokens/vec4.h"

namespace rlk {

// What a token adds to the first kLowerSums sums, and its value for the first maximum.
template <class F>
struct PlainSums {
  F sum[kLowerSums];
  F maximum;
};

// Masks with two bytes per element and masks of doubles are rare, so the general pass computes calls with such masks.
inline bool is_plain_mask(const TokenMask& m) { return m.bytes != 2 && !(m.bytes == 8 && m.is_float); }
// Whether the input with the index kShareable has one value per sequence.
template <class Terms>
inline bool shares_input(const typename Terms::Params& p) {
  return Terms::input(p, Terms::kShareable).token_stride == 0;
}
template <class Terms>
inline bool has_plain_arrays(const typename Terms::Params& p) {
  const Sequences& q = Terms::sequences(p);
  const auto whole = [&](const void* data, std::int64_t stride, int bytes) {  // bytes: size of an element
    const int vec4 = bytes * kVec4 < 16 ? bytes * kVec4 : 16;
    return data != nullptr && is_aligned(data, static_cast<unsigned>(vec4)) && stride * bytes % vec4 == 0;
  };
  if (q.packed() || q.num_slots() == 0 || q.num_tokens % kVec4 != 0 || q.num_tokens >= std::int64_t{1} << 30) {
    return false;
  }
  for (int i = 0; i < Terms::kInputs; ++i) {
    const PolicyTokens a = Terms::input(p, i);
    const bool missing = i >= Terms::kFirstOptional && a.data == nullptr;
    const bool shared = i == Terms::kShareable && a.data != nullptr && shares_input<Terms>(p);
    if (!missing && !shared && (a.token_stride != 1 || !whole(a.data, a.sequence_stride, 4))) return false;
  }
  const TokenMask& mask = Terms::mask(p);
  return whole(Terms::output(p), q.num_tokens, 4) &&
         (mask.data == nullptr || (is_plain_mask(mask) && whole(mask.data, mask.row_stride, mask.bytes)));
}

}  // namespace rlk
