// Loads, stores and masks of four neighbouring tokens of a sequence. These tokens are a lane's share of a chunk.
#pragma once

#include <cstdint>

#include "kernels/packing/flag_words.h"
#include "rlk/tokens.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kLaneTokens = 4;

// Four neighbouring tokens of an array of fp32.
struct FourTokens {
  float v[kLaneTokens];
};

// Vector loads bypass L1, because each value is read once.
__device__ __forceinline__ FourTokens load_tokens(const float* from, int count, bool vectors) {
  FourTokens q = {};
  if (vectors && count == kLaneTokens) {
    const float4 v = __ldcs(reinterpret_cast<const float4*>(from));
    q.v[0] = v.x;
    q.v[1] = v.y;
    q.v[2] = v.z;
    q.v[3] = v.w;
  } else {
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) {
      if (j < count) q.v[j] = from[j];
    }
  }
  return q;
}
__device__ __forceinline__ void store_tokens(float* to, int count, bool vectors, const FourTokens& q) {
  if (vectors && count == kLaneTokens) {
    __stcs(reinterpret_cast<float4*>(to), make_float4(q.v[0], q.v[1], q.v[2], q.v[3]));
  } else {
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) {
      if (j < count) to[j] = q.v[j];
    }
  }
}

// Whether the masks of four tokens are loaded as one word.
__device__ __forceinline__ bool are_bytes(const TokenMask& mask, int count, bool vectors) {
  return mask.bytes == 1 && vectors && count == kLaneTokens;
}

// The masks of four tokens, as the words that were loaded. The words are converted to bits only when the bits are
// needed, so no instruction waits directly after a load. `kWide`: masks may have 64 bits per token.
template <bool kWide = true>
struct TokenMasks {
  uint32_t low[kLaneTokens] = {}, high[kWide ? kLaneTokens : 1] = {};

  // Bit j is set if token j counts, for the first `count` tokens. `count` and `vectors` have the same values as for the
  // load.
  __device__ __forceinline__ unsigned bits(const TokenMask& mask, int count, bool vectors) const {
    const unsigned all = (1u << max(count, 0)) - 1;
    if (mask.data == nullptr || count <= 0) return all;
    if (are_bytes(mask, count, vectors)) return bytes_not_zero(low[0]);
    unsigned found = 0;
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) {
      uint32_t word = low[j];
      if (mask.is_float) {  // the sign bit does not count
        word = kWide && mask.bytes == 8 ? word | high[kWide ? j : 0] << 1 : word << (mask.bytes == 2 ? 17 : 1);
      } else if (kWide) {
        word |= high[kWide ? j : 0];
      }
      found |= (word != 0 ? 1u : 0u) << j;
    }
    return found & all;
  }
};

template <bool kWide = true>
__device__ __forceinline__ TokenMasks<kWide> load_mask(const TokenMask& mask, std::int64_t at, int count,
                                                       bool vectors) {
  TokenMasks<kWide> q;
  if (mask.data == nullptr) return q;
  if (mask.bytes == 1) {
    const uint8_t* from = static_cast<const uint8_t*>(mask.data) + at;
    if (are_bytes(mask, count, vectors)) {
      q.low[0] = __ldcs(reinterpret_cast<const unsigned*>(from));
    } else {
#pragma unroll
      for (int j = 0; j < kLaneTokens; ++j) q.low[j] = j < count ? from[j] : 0;
    }
  } else if (mask.bytes == 2) {
    const uint16_t* from = static_cast<const uint16_t*>(mask.data) + at;
    if (vectors && count == kLaneTokens) {
      const uint2 v = __ldcs(reinterpret_cast<const uint2*>(from));
      q.low[0] = v.x & 0xffff;
      q.low[1] = v.x >> 16;
      q.low[2] = v.y & 0xffff;
      q.low[3] = v.y >> 16;
    } else {
#pragma unroll
      for (int j = 0; j < kLaneTokens; ++j) q.low[j] = j < count ? from[j] : 0;
    }
  } else if (kWide && mask.bytes == 8) {
    const int2* from = reinterpret_cast<const int2*>(static_cast<const std::int64_t*>(mask.data) + at);
    if (vectors && count == kLaneTokens) {
#pragma unroll
      for (int i = 0; i < kLaneTokens / 2; ++i) {
        const int4 v = __ldcs(reinterpret_cast<const int4*>(from) + i);
        q.low[2 * i] = v.x;
        q.high[kWide ? 2 * i : 0] = v.y;
        q.low[2 * i + 1] = v.z;
        q.high[kWide ? 2 * i + 1 : 0] = v.w;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kLaneTokens; ++j) {
        if (j < count) {
          const int2 v = from[j];
          q.low[j] = v.x;
          q.high[kWide ? j : 0] = v.y;
        }
      }
    }
  } else {
    const int* from = static_cast<const int*>(mask.data) + at;
    if (vectors && count == kLaneTokens) {
      const int4 v = __ldcs(reinterpret_cast<const int4*>(from));
      q.low[0] = v.x;
      q.low[1] = v.y;
      q.low[2] = v.z;
      q.low[3] = v.w;
    } else {
#pragma unroll
      for (int j = 0; j < kLaneTokens; ++j) q.low[j] = j < count ? from[j] : 0;
    }
  }
  return q;
}

// Whether the masks of four tokens of a sequence can be loaded as a vector.
__device__ __forceinline__ bool mask_has_vectors(const TokenMask& mask, const TokenSpan& span) {
  const int bytes = mask.bytes, most = bytes < 4 ? 4 * bytes : 16;
  const auto at =
      reinterpret_cast<std::uintptr_t>(mask.data) + static_cast<std::uintptr_t>(span.offset(mask.row_stride) * bytes);
  return mask.data == nullptr || at % most == 0;
}

}  // namespace
}  // namespace rlk::cuda
