// CPU backend of the operator `pack`: rows are spread over threads, and runs of neighbouring tokens are copied at once.
#include "rlk/ops/pack.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/packing/pack_check.h"
#include "rlk/backends.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kTaskBytes = 1 << 17;  // a smaller task would save less time than waking a thread costs

std::int64_t length_at(const PackLayoutParams& p, std::int64_t i) {
  if (p.lengths_dtype == DType::kInt64) return static_cast<const std::int64_t*>(p.lengths)[i];
  return static_cast<const std::int32_t*>(p.lengths)[i];
}

void fill_bytes(unsigned char* to, std::int64_t bytes, std::uint64_t fill) {
  if (fill == 0) {
    std::memset(to, 0, static_cast<std::size_t>(bytes));
    return;
  }
  for (std::int64_t i = 0; i < bytes; i += 8) {
    std::memcpy(to + i, &fill, static_cast<std::size_t>(std::min<std::int64_t>(8, bytes - i)));
  }
}

class Row {
 public:
  Row(const PackParams& p, std::int64_t sequence) : p_(p) {
    const Span span = span_of(p.cu_seqlens, p.capacity, sequence);
    begin_ = span.begin;
    length_ = std::min(span.length, p.num_tokens);
    positions_ = p.positions == nullptr ? nullptr : p.positions + sequence * p.num_tokens;
    sequence_ = sequence;
  }

  void run(const PackArray& a) const {
    for (std::int64_t t = 0; t < p_.num_tokens;) {
      const std::int64_t position = at(t), first = t++;
      while (t < p_.num_tokens && (position < 0 ? at(t) < 0 : at(t) == position + t - first)) ++t;
      copy(a, first, position, t - first);
    }
  }

 private:
  // The token's position, or -1 for a token without a position.
  std::int64_t at(std::int64_t t) const {
    const std::int64_t position = positions_ == nullptr ? t : positions_[t];
    return position >= 0 && position < length_ ? position : -1;
  }
  void copy(const PackArray& a, std::int64_t t, std::int64_t position, std::int64_t num) const {
    unsigned char* padded = static_cast<unsigned char*>(a.padded) + sequence_ * a.sequence_stride + t * a.token_stride;
    if (position < 0) {
      for (std::int64_t i = 0; p_.unpacks && i < num; ++i)
        fill_bytes(padded + i * a.token_stride, a.token_bytes, a.fill);
      return;
    }
    unsigned char* packed = static_cast<unsigned char*>(a.packed) + (begin_ + position) * a.packed_stride;
    const bool whole = a.token_stride == a.token_bytes && a.packed_stride == a.token_bytes;
    const auto bytes = static_cast<std::size_t>(whole ? num * a.token_bytes : a.token_bytes);
    for (std::int64_t i = 0; i < (whole ? 1 : num); ++i) {
      unsigned char *in_padded = padded + i * a.token_stride, *in_packed = packed + i * a.packed_stride;
      p_.unpacks ? std::memcpy(in_padded, in_packed, bytes) : std::memcpy(in_packed, in_padded, bytes);
    }
  }

  const PackParams& p_;
  std::int64_t begin_, length_, sequence_;
  const std::int32_t* positions_;
};

}  // namespace

void pack_layout(const PackLayoutParams& p) {
  check_pack_layout(p);
  std::int64_t total = 0;
  if (p.mask.data == nullptr) {
    for (std::int64_t i = 0; i < p.num_sequences && p.lengths != nullptr; ++i) {
      const std::int64_t length = length_at(p, i);
      if (length < 0 || length > p.num_tokens) {
        throw InvalidArgument("lengths: expected numbers in [0, " + std::to_string(p.num_tokens) +
                              "] (the tokens of a row), got " + std::to_string(length) + " for row " +
                              std::to_string(i));
      }
      total += length;
    }
  } else {
    for (std::int64_t i = 0; i < p.num_sequences; ++i) {
      for (std::int64_t t = 0; t < p.num_tokens; ++t) total += counts(p.mask, i * p.mask.row_stride + t);
    }
  }
  if (total > p.capacity) {
    throw InvalidArgument("max_tokens: expected at least " + std::to_string(total) +
                          " (the tokens that are kept), got " + std::to_string(p.capacity));
  }
  std::int64_t begin = 0;
  p.cu_seqlens[0] = 0;
  for (std::int64_t i = 0; i < p.num_sequences; ++i) {
    if (p.mask.data != nullptr) {
      std::int32_t position = 0;
      for (std::int64_t t = 0; t < p.num_tokens; ++t) {
        p.positions[i * p.num_tokens + t] = counts(p.mask, i * p.mask.row_stride + t) ? position++ : -1;
      }
      begin += position;
    } else if (p.lengths != nullptr) {
      begin += length_at(p, i);
    }
    p.cu_seqlens[i + 1] = static_cast<std::int32_t>(begin);
  }
  p.status[0] = 0;
}

// Checks that the kept tokens of a row have the positions 0, 1, 2 and so on, as many positions as the sequence has
// tokens.
static void check_positions(const PackParams& p, std::int64_t row, std::int64_t length) {
  const std::int32_t* const positions = p.positions + row * p.num_tokens;
  const auto refuse = [&](const std::string& expected, const std::string& got) {
    throw InvalidArgument("positions: expected " + expected + ", got " + got + " in row " + std::to_string(row));
  };
  std::int64_t kept = 0;
  for (std::int64_t t = 0; t < p.num_tokens; ++t) {
    if (positions[t] == -1) continue;
    if (positions[t] != kept) {
      refuse("-1 or " + std::to_string(kept) + ", the number of kept tokens before",
             std::to_string(positions[t]) + " at token " + std::to_string(t));
    }
    ++kept;
  }
  if (kept != length) {
    refuse("one for each of the sequence's " + std::to_string(length) + " tokens", std::to_string(kept));
  }
}

void pack(const PackParams& p) {
  check_pack(p);
  check_offset_values(p.cu_seqlens, p.num_sequences, p.capacity);
  for (std::int64_t i = 0; i < p.num_sequences; ++i) {
    const std::int64_t length = span_of(p.cu_seqlens, p.capacity, i).length;
    if (length <= p.num_tokens) {
      if (p.unpacks && p.positions != nullptr && length > 0) check_positions(p, i, length);
      continue;
    }
    throw InvalidArgument("cu_seqlens: expected sequences of at most " + std::to_string(p.num_tokens) +
                          " tokens (those of a padded row), got " + std::to_string(length) + " for sequence " +
                          std::to_string(i));
  }
  for (int k = 0; k < p.num_arrays; ++k) {
    const PackArray& a = p.arrays[k];
    if (a.token_bytes == 0) continue;
    const std::int64_t bytes = std::max<std::int64_t>(p.num_tokens * a.token_bytes, 1);
    const auto clear = [&](std::int64_t begin) {
      for (std::int64_t t = begin; t < p.capacity; ++t) {
        fill_bytes(static_cast<unsigned char*>(a.packed) + t * a.packed_stride, a.token_bytes, a.fill);
      }
    };
    if (!p.unpacks) clear(p.covered ? offset_at(p.cu_seqlens, p.num_sequences) : 0);
    parallel_for(p.num_sequences, std::max<std::int64_t>(kTaskBytes / bytes, 1),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t i = begin; i < end; ++i) Row(p, i).run(a);
                 });
  }
}

}  // namespace rlk::cpu
