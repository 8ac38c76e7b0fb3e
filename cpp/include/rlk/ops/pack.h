// THE CONTRACT of pack and unpack: padded arrays [num_sequences, num_tokens, ...] to packed ones [capacity, ...], where
// sequences follow one another without padding, and back. Bytes are moved, whatever they mean: NaNs keep theirs.
//
// pack_layout, by lengths or by a mask of the tokens that are kept:
//   positions[i, t] = how many tokens of row i before t are kept, where t is kept, else -1     (by a mask alone); others that
//   unpack is given for a row with tokens are an InvalidArgument on the CPU
//   length[i]       = lengths[i], which lies in [0, num_tokens], or the number of kept tokens of row i
//   cu_seqlens[i]   = min(length[0] + ... + length[i - 1], capacity)
//   status          : bit 0: a length was out of range, and is clamped; bit 1: the tokens are more than `capacity`
// The CPU throws InvalidArgument in both cases before it writes anything.
// pack:   packed[cu_seqlens[i] + p] = padded[i, t] for the token t of row i that is at position p, p < the length that
//         cu_seqlens has: t = p, or by positions the t with positions[i, t] = p. packed[cu_seqlens[num_sequences] ...]
//         = fill.
// unpack: padded[i, t] = packed[cu_seqlens[i] + p] likewise, and fill where there is no such token.
// The real number of tokens stays on the device, cu_seqlens[num_sequences]; `capacity` is the caller's bound.
// Offsets that are no offsets (rlk/tokens.h), or a sequence longer than num_tokens: the CPU throws InvalidArgument. A
// GPU gives such offsets the length 0, and takes the first num_tokens tokens of such a sequence.
// Enqueues on `stream`; neither allocates nor synchronises. CPU backends ignore `stream`.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

constexpr std::int32_t kPackBadLength = 1, kPackOverflow = 2;

struct PackLayoutParams {
  const void* lengths = nullptr;       // [num_sequences], lengths_dtype; or null
  TokenMask mask;                      // [num_sequences, num_tokens]; with data where lengths is null
  std::int32_t* cu_seqlens = nullptr;  // [num_sequences + 1]
  std::int32_t* positions = nullptr;   // [num_sequences, num_tokens]; with a mask
  std::int32_t* status = nullptr;      // [1]
  std::int64_t num_sequences = 0;
  std::int64_t num_tokens = 0;          // < 2^31
  std::int64_t capacity = 0;            // < 2^31
  DType lengths_dtype = DType::kInt64;  // kInt32, kInt64
};

// One array in both forms. Strides are in bytes; the bytes of a token are contiguous.
struct PackArray {
  void* padded = nullptr;  // [num_sequences, num_tokens, token_bytes]
  std::int64_t sequence_stride = 0;
  std::int64_t token_stride = 0;
  void* packed = nullptr;  // [capacity, token_bytes]
  std::int64_t packed_stride = 0;
  std::int64_t token_bytes = 0;
  std::uint64_t fill = 0;  // eight bytes, repeated from a token's first on; 0 where an element has sixteen
};

constexpr int kPackArrays = 8;  // arrays per call, at most
struct PackParams {
  PackArray arrays[kPackArrays];
  std::int32_t num_arrays = 0;
  bool unpacks = false;
  // That cu_seqlens and positions are pack_layout's of these rows: then every packed token before the last offset has one.
  // Where they are not, packed tokens that no token is copied to are `fill`, too, which costs a launch.
  bool covered = true;
  Offsets cu_seqlens;                       // [num_sequences + 1]
  const std::int32_t* positions = nullptr;  // [num_sequences, num_tokens] or null
  std::int64_t num_sequences = 0;
  std::int64_t num_tokens = 0;  // tokens per padded row, < 2^31
  std::int64_t capacity = 0;    // tokens of a packed array
};

void pack_layout(const PackLayoutParams& p, Device device, Stream stream);
void pack(const PackParams& p, Device device, Stream stream);  // or unpacks

}  // namespace rlk
