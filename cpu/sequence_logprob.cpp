// CPU backend of the operator `sequence_logprob`: sequences are spread over threads. Each block of tokens is first
// copied as fp32, with +0 for tokens that do not count.
#include "rlk/ops/sequence_logprob.h"

#include <algorithm>
#include <cstring>

#include "float_environment.h"
#include "kernels/packing/sequence_logprob_check.h"
#include "rlk/backends.h"
#include "rlk/math/half.h"
#include "thread_pool.h"
#include "tree_sum.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kTaskTokens = 65536;  // a smaller task would save less time than waking a thread costs

struct OfBf16 {
  using Storage = std::uint16_t;
  static float load(Storage s) { return float_of_bf16(s); }
  static Storage store(float x) { return bf16_rn(x); }
};
struct OfFp16 {
  using Storage = std::uint16_t;
  static float load(Storage s) { return float_of_f16(s); }
  static Storage store(float x) { return f16_rn(x); }
};
struct OfFp32 {
  using Storage = float;
  static float load(Storage s) { return s; }
  static Storage store(float x) { return is_nan(x) ? canonical_nan() : x; }
};

template <class F>
void with_type(DType dtype, const F& f) {
  if (dtype == DType::kFloat32) return f(OfFp32{});
  dtype == DType::kBFloat16 ? f(OfBf16{}) : f(OfFp16{});
}

// Calls f with a function that tells whether token i of the mask counts. f is compiled for each element size.
template <class F>
void with_mask(const TokenMask& m, const F& f) {
  const auto of = [&](auto element) {
    using Element = decltype(element);
    const auto* flags = static_cast<const Element*>(m.data);
    const auto bits = static_cast<Element>(m.bits());
    f([flags, bits](std::int64_t i) { return (flags[i] & bits) != 0; });
  };
  switch (m.bytes) {
    case 1:
      return of(std::uint8_t{});
    case 2:
      return of(std::uint16_t{});
    case 4:
      return of(std::uint32_t{});
    case 8:
      return of(std::uint64_t{});
  }
  f([](std::int64_t) { return true; });
}

}  // namespace

void sequence_logprob(const SequenceLogprobParams& p) {
  check_sequence_logprob(p);
  check_offset_values(p.cu_seqlens, p.num_sequences, p.num_tokens);
  if (p.num_sequences == 0) return;
  const bool packed = p.cu_seqlens.data != nullptr;
  const std::int64_t length = std::max<std::int64_t>(packed ? p.num_tokens / p.num_sequences : p.num_tokens, 1);
  const auto run = [&](std::int64_t begin, std::int64_t end, auto type, const auto& counts) {
    using T = decltype(type);
    for (std::int64_t i = begin; i < end; ++i) {
      const Span span = span_of(p.cu_seqlens, p.num_tokens, i);
      const std::int64_t row = packed ? 0 : i;
      const auto* logprob = static_cast<const typename T::Storage*>(p.logprob) + row * p.logprob_stride + span.begin;
      const std::int64_t mask = row * p.mask.row_stride + span.begin;
      std::int64_t count = 0;
      p.sum[i] = tree_sum_of_blocks(span.length, [&](std::int64_t first, int num, float* x) {
        int kept = 0;
        for (int k = 0; k < num; ++k) {
          const bool is_kept = counts(mask + first + k);
          x[k] = is_kept ? T::load(logprob[first + k]) : 0.0f;
          kept += is_kept;
        }
        count += kept;
      });
      p.count[i] = count;
      if (p.status != nullptr) p.status[i] = 0;
    }
  };
  parallel_for(
      p.num_sequences, std::max<std::int64_t>(kTaskTokens / length, 1), [&](std::int64_t begin, std::int64_t end) {
        const FloatEnvironment environment;
        with_type(p.dtype,
                  [&](auto type) { with_mask(p.mask, [&](const auto& counts) { run(begin, end, type, counts); }); });
      });
}

void sequence_logprob_backward(const SequenceLogprobBackwardParams& p) {
  check_sequence_logprob(p);
  check_offset_values(p.cu_seqlens, p.num_sequences, p.num_tokens);
  if (p.num_tokens == 0 || (p.num_sequences == 0 && p.cu_seqlens.data == nullptr)) return;
  const bool packed = p.cu_seqlens.data != nullptr;
  const auto run = [&](std::int64_t begin, std::int64_t end, auto type, const auto& counts) {
    using T = decltype(type);
    auto* to = static_cast<typename T::Storage*>(p.d_logprob);
    for (std::int64_t i = begin; i < end; ++i) {
      const Span span = span_of(p.cu_seqlens, p.num_tokens, i);
      const std::int64_t first = (packed ? 0 : i * p.num_tokens) + span.begin;
      const std::int64_t mask = (packed ? 0 : i * p.mask.row_stride) + span.begin;
      const auto gradient = T::store(p.dsum[i * p.dsum_stride]), zero = T::store(0.0f);
      for (std::int64_t t = 0; t < span.length; ++t) to[first + t] = counts(mask + t) ? gradient : zero;
    }
  };
  const std::int64_t length =
      std::max<std::int64_t>(packed ? p.num_tokens / std::max<std::int64_t>(p.num_sequences, 1) : p.num_tokens, 1);
  parallel_for(
      p.num_sequences, std::max<std::int64_t>(kTaskTokens / length, 1), [&](std::int64_t begin, std::int64_t end) {
        const FloatEnvironment environment;
        with_type(p.dtype,
                  [&](auto type) { with_mask(p.mask, [&](const auto& counts) { run(begin, end, type, counts); }); });
      });
  if (!packed) return;
  const std::int64_t end = p.num_sequences == 0 ? 0 : offset_at(p.cu_seqlens, p.num_sequences);
  std::memset(static_cast<unsigned char*>(p.d_logprob) + end * size_of(p.dtype), 0,
              static_cast<std::size_t>((p.num_tokens - end) * size_of(p.dtype)));
}

}  // namespace rlk::cpu
