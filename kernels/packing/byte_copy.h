// Copies byte ranges between any addresses, for CUDA and HIP. A thread writes aligned 16-byte vectors of the
// destination. The alignment of a vector's source decides how the thread reads it. The thread reads the 16 bytes as one
// vector, as two halves of 8 bytes, or as 4 + 8 + 4 bytes. If the source is not aligned to 4 bytes, it reads five words
// of 4 bytes and shifts them together. Bytes before and after the whole vectors are copied one by one.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

constexpr int kRunChunk = 8;    // vectors per thread
constexpr int kRunVectors = 4;  // number of vectors that a thread loads before it stores any of them

struct alignas(16) Vector16 {
  std::uint32_t words[4];
};

// A run of bytes. Bytes [0, copied) of `to` are copied from `from`. Bytes [copied, end) repeat the eight bytes of
// `fill`.
constexpr std::int32_t kMostRunBytes = 1 << 30;
struct ByteRun {
  const unsigned char* from = nullptr;
  unsigned char* to = nullptr;
  std::int32_t before = 0, after = 0;  // bytes [-before, after) of `from` may be read
  std::int32_t copied = 0, end = 0;    // at most kMostRunBytes
  std::uint64_t fill = 0;
};

RLK_HD Vector16 filled_vector(std::uint64_t fill) {
  const auto low = static_cast<std::uint32_t>(fill), high = static_cast<std::uint32_t>(fill >> 32);
  return {{low, high, low, high}};
}

// The parts of a byte range.
struct RunParts {
  std::int32_t lead;     // bytes before the first vector
  std::int32_t shift;    // address from which the first vector is copied, modulo 4
  std::int32_t vectors;  // number of vectors: [copied_from, copied_to) are copied, [filled_from, vectors) are filled
  std::int32_t copied_from, copied_to, filled_from;
  std::int32_t from_vector;  // address from which the first vector is copied, modulo 16

  RLK_HD explicit RunParts(const ByteRun& r) {
    lead = static_cast<std::int32_t>(-reinterpret_cast<std::uintptr_t>(r.to) & 15);
    const std::uintptr_t source = reinterpret_cast<std::uintptr_t>(r.from) + static_cast<std::uintptr_t>(lead);
    shift = static_cast<std::int32_t>(source & 3);
    from_vector = static_cast<std::int32_t>(source & 15);
    const auto within = [](std::int32_t x, std::int32_t least, std::int32_t most) {
      return x < least ? least : x > most ? most : x;
    };
    vectors = within((r.end - lead) >> 4, 0, kMostRunBytes);
    copied_from = lead + r.before < shift && vectors > 0 ? 1 : 0;
    // number of source bytes that whole vectors may use; kShifted also reads the words around a vector
    const std::int32_t readable = shift == 0 ? r.after : r.after + shift - 4;
    copied_to = within(((readable < r.copied ? readable : r.copied) - lead) >> 4, copied_from, vectors);
    filled_from = within((r.copied - lead + 15) >> 4, copied_to, vectors);
  }
};

struct alignas(8) Half16 {
  std::uint32_t words[2];
};
// How a vector is read from the source.
enum class RunRead : std::uint8_t { kVector, kHalves, kHalfBetweenWords, kShifted };

// Loads the words of a vector at `from`, and for kShifted also the next word.
template <RunRead kRead, class Memory>
RLK_HD void load_vector(const unsigned char* from, std::uint32_t (&x)[5]) {
  const auto* words = Memory::global(reinterpret_cast<const std::uint32_t*>(from));
  const auto half = [&](int j) {
    const Half16 both = *Memory::global(reinterpret_cast<const Half16*>(from + 4 * j));
    x[j] = both.words[0];
    x[j + 1] = both.words[1];
  };
  if constexpr (kRead == RunRead::kVector) {
    const Vector16 vector = *Memory::global(reinterpret_cast<const Vector16*>(from));
    RLK_UNROLL
    for (int j = 0; j < 4; ++j) x[j] = vector.words[j];
  } else if constexpr (kRead == RunRead::kHalves) {
    half(0);
    half(2);
  } else if constexpr (kRead == RunRead::kHalfBetweenWords) {
    x[0] = words[0];
    half(1);
    x[3] = words[3];
  } else {
    RLK_UNROLL
    for (int j = 0; j < 5; ++j) x[j] = words[j];
  }
}

template <RunRead kRead, class Memory>
RLK_HD void copy_vectors(const ByteRun& r, const RunParts& parts, std::int32_t first, std::int32_t step,
                         std::int32_t limit) {
  const unsigned char* from = r.from + parts.lead - (kRead == RunRead::kShifted ? parts.shift : 0);
  auto* to = Memory::global(reinterpret_cast<Vector16*>(r.to + parts.lead));
  RLK_UNROLL_NOT
  for (std::int32_t v = first; v < limit; v += kRunVectors * step) {
    std::uint32_t x[kRunVectors][5];
    RLK_UNROLL
    for (int k = 0; k < kRunVectors; ++k) {
      const std::int32_t i = v + k * step;
      if (i >= parts.copied_from && i < parts.copied_to) load_vector<kRead, Memory>(from + 16 * i, x[k]);
    }
    RLK_UNROLL
    for (int k = 0; k < kRunVectors; ++k) {
      const std::int32_t i = v + k * step;
      if (i < parts.copied_from || i >= parts.copied_to) continue;
      Vector16 vector;
      RLK_UNROLL
      for (int j = 0; j < 4; ++j) {
        vector.words[j] = x[k][j];
        if constexpr (kRead == RunRead::kShifted) {
          const std::uint64_t both = std::uint64_t{x[k][j + 1]} << 32 | x[k][j];
          vector.words[j] = static_cast<std::uint32_t>(both >> (8 * parts.shift));
        }
      }
      to[i] = vector;
    }
  }
}

// Copies vectors first, first + step, ... of a run: kRunChunk vectors, or all remaining vectors if `last`. With `edges`
// the function also copies the bytes around the whole vectors. Threads `first` = 0 ... step - 1 share these bytes, and
// copy them as words if source and destination are aligned.
constexpr std::int32_t kMostRunEdges = 31 + 31 + 15;  // most bytes that lie outside whole vectors
template <class Memory>
RLK_HD void copy_byte_run(const ByteRun& r, std::int32_t first, std::int32_t step, bool edges, bool last) {
  if (r.end == 0 || (first > r.end >> 4 && (!edges || first >= kMostRunEdges))) return;
  const RunParts parts(r);
  const auto* from = Memory::global(r.from);
  auto* to = Memory::global(r.to);
  // The bytes outside whole vectors: before copied_from, from copied_to to filled_from, and after the last vector.
  const auto around = [&](std::int32_t vector) {
    return parts.lead + 16 * vector < r.end ? parts.lead + 16 * vector : r.end;
  };
  const std::int32_t head = around(parts.copied_from), to_middle = around(parts.copied_to) - head;
  const std::int32_t of_middle = around(parts.filled_from) - to_middle, to_tail = around(parts.vectors) - of_middle;
  const std::int32_t singles = edges ? r.end - to_tail : 0;
  const auto place = [&](std::int32_t i) { return i < head ? i : i < of_middle ? i + to_middle : i + to_tail; };
  const bool words = ((parts.lead | parts.shift | r.copied | r.end) & 3) == 0;
  const auto load = [&](std::int32_t at) {
    if (at >= r.copied) return static_cast<std::uint32_t>(r.fill >> (8 * (at & 7)));
    return words ? *Memory::global(reinterpret_cast<const std::uint32_t*>(r.from + at)) : std::uint32_t{from[at]};
  };
  const auto store = [&](std::int32_t at, std::uint32_t x) {
    if (words) {
      *Memory::global(reinterpret_cast<std::uint32_t*>(r.to + at)) = x;
    } else {
      to[at] = static_cast<unsigned char>(x);
    }
  };
  const int unit = words ? 4 : 1;
  std::uint32_t single = 0;
  // This thread's first byte or word outside the vectors is loaded here, so that its load is in flight with the
  // vectors' loads.
  if (first * unit < singles) single = load(place(first * unit));
  const std::int32_t chunk = first + kRunChunk * step, limit = last || parts.vectors < chunk ? parts.vectors : chunk;
  if (parts.from_vector == 0) {
    copy_vectors<RunRead::kVector, Memory>(r, parts, first, step, limit);
  } else if (parts.from_vector % 8 == 0) {
    copy_vectors<RunRead::kHalves, Memory>(r, parts, first, step, limit);
  } else if (parts.from_vector % 4 == 0) {
    copy_vectors<RunRead::kHalfBetweenWords, Memory>(r, parts, first, step, limit);
  } else {
    copy_vectors<RunRead::kShifted, Memory>(r, parts, first, step, limit);
  }
  if (parts.filled_from < limit) {
    const int turned = 8 * (parts.lead & 7);
    const Vector16 fill = filled_vector(turned == 0 ? r.fill : r.fill >> turned | r.fill << (64 - turned));
    auto* vectors = Memory::global(reinterpret_cast<Vector16*>(r.to + parts.lead));
    std::int32_t v = first;
    RLK_UNROLL_NOT
    for (; v < limit; v += step) {
      if (v >= parts.filled_from) vectors[v] = fill;
    }
  }
  if (first * unit < singles) store(place(first * unit), single);
  for (std::int32_t i = (first + step) * unit; i < singles; i += step * unit) store(place(i), load(place(i)));
}

}  // namespace rlk
