// THE CONTRACT of `pack` and `unpack`: `pack` copies padded arrays [num_sequences, num_tokens, ...] to packed arrays
// [capacity, ...], in which sequences follow one another without padding. `unpack` copies packed arrays back to padded
// arrays. Both operators copy bytes, so NaNs keep their bits.
//
// pack_layout takes lengths, or a mask of the tokens that are kept:
//   positions[i, t] = the number of kept tokens of row i before t, if t is kept, else -1. The positions
//   are written only if a mask is given. On the CPU, `unpack` throws InvalidArgument if the positions of a row with
//   tokens are not 0, 1, 2, ..., one for each token of the sequence, and -1 at all other places.
//   length[i]       = lengths[i], which must lie in [0, num_tokens], or the number of kept tokens of row i
//   cu_seqlens[i]   = min(length[0] + ... + length[i - 1], capacity)
//   status          : bit 0: a length was out of range and is clamped; bit 1: there are more tokens than `capacity`
// Where a GPU would set a bit of `status`, the CPU throws InvalidArgument before it writes anything.
// pack:   packed[cu_seqlens[i] + p] = padded[i, t] for each p below cu_seqlens[i + 1] - cu_seqlens[i]. Without
//         positions t = p; with positions, t is the token with positions[i, t] = p.
//         packed[cu_seqlens[num_sequences] ...] = fill.
// unpack: padded[i, t] = packed[cu_seqlens[i] + p] with the same t and p; fill for all other t.
// The real number of tokens, cu_seqlens[num_sequences], stays on the device; `capacity` is the caller's upper bound for
// it. The CPU throws InvalidArgument for invalid offsets (rlk/tokens.h) and for a sequence longer than num_tokens. A
// GPU takes length 0 for invalid offsets, and copies the first num_tokens tokens of a longer sequence.
// The call enqueues its work on `stream`; it neither allocates nor synchronises. CPU backends ignore `stream`.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

constexpr std::int32_t kPackBadLength = 1, kPackOverflow = 2;

struct PackLayoutParams {
  const void* lengths = nullptr;       // [num_sequences], lengths_dtype; or null
  TokenMask mask;                      // [num_sequences, num_tokens]; required where lengths is null
  std::int32_t* cu_seqlens = nullptr;  // [num_sequences + 1]
  std::int32_t* positions = nullptr;   // [num_sequences, num_tokens]; required with a mask
  std::int32_t* status = nullptr;      // [1]
  std::int64_t num_sequences = 0;
  std::int64_t num_tokens = 0;          // < 2^31
  std::int64_t capacity = 0;            // < 2^31
  DType lengths_dtype = DType::kInt64;  // kInt32, kInt64
};

// One array in padded and in packed form. Strides are in bytes, and the bytes of a token are contiguous.
struct PackArray {
  void* padded = nullptr;  // [num_sequences, num_tokens, token_bytes]
  std::int64_t sequence_stride = 0;
  std::int64_t token_stride = 0;
  void* packed = nullptr;  // [capacity, token_bytes]
  std::int64_t packed_stride = 0;
  std::int64_t token_bytes = 0;
  std::uint64_t fill = 0;  // eight bytes, repeated from the start of each token; 0 if an element has sixteen bytes
};

constexpr int kPackArrays = 8;  // most arrays per call
struct PackParams {
  PackArray arrays[kPackArrays];
  std::int32_t num_arrays = 0;
  bool unpacks = false;
  // True if pack_layout made cu_seqlens and positions for these rows. Every packed token before the last offset then
  // has a padded token as its source. If false, packed tokens without a source are set to `fill`, which costs one more
  // kernel launch.
  bool covered = true;
  Offsets cu_seqlens;                       // [num_sequences + 1]
  const std::int32_t* positions = nullptr;  // [num_sequences, num_tokens] or null
  std::int64_t num_sequences = 0;
  std::int64_t num_tokens = 0;  // tokens per padded row, < 2^31
  std::int64_t capacity = 0;    // tokens of a packed array
};

void pack_layout(const PackLayoutParams& p, Device device, Stream stream);
void pack(const PackParams& p, Device device, Stream stream);  // unpacks if p.unpacks

}  // namespace rlk
