// Copies of runs of bytes between any addresses, for CUDA and HIP. A thread writes vectors of 16 bytes of the destination; where
// the source is not aligned alike it reads them as words, which are shifted together where they are not words of it. Bytes
// around whole vectors go singly.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/kernels/sequences.h"

namespace rlk {

constexpr int kRunVectors = 4;  // of a thread, whose loads are under way together

struct alignas(16) Vector16 {
  std::uint32_t words[4];
};

// Bytes [0, copied) of `to` are those of `from`; bytes [copied, end) are `fill`, eight bytes over and over.
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

// What a run is cut into.
struct RunParts {
  std::int32_t lead;     // bytes before the first vector
  std::int32_t shift;    // bytes of the source from a word to where the first vector's are
  std::int32_t vectors;  // of them [copied_from, copied_to) are copied, [filled_from, vectors) filled
  std::int32_t copied_from, copied_to, filled_from;
  bool aligned;  // vectors of both sides begin at multiples of 16 bytes

  RLK_HD explicit RunParts(const ByteRun& r) {
    lead = static_cast<std::int32_t>(-reinterpret_cast<std::uintptr_t>(r.to) & 15);
    const std::uintptr_t source = reinterpret_cast<std::uintptr_t>(r.from) + static_cast<std::uintptr_t>(lead);
    shift = static_cast<std::int32_t>(source & 3);
    aligned = (source & 15) == 0;
    const auto within = [](std::int32_t x, std::int32_t least, std::int32_t most) {
      return x < least ? least : x > most ? most : x;
    };
    vectors = within((r.end - lead) >> 4, 0, kMostRunBytes);
    copied_from = lead + r.before < shift && vectors > 0 ? 1 : 0;
    const std::int32_t readable = shift == 0 ? r.after : r.after + shift - 4;  // words around are read, too
    copied_to = within(((readable < r.copied ? readable : r.copied) - lead) >> 4, copied_from, vectors);
    filled_from = within((r.copied - lead + 15) >> 4, copied_to, vectors);
  }
};

template <bool kAligned, class Memory>
RLK_HD void copy_vectors(const ByteRun& r, const RunParts& parts, std::int32_t first, std::int32_t step,
                         std::int32_t limit) {
  const auto* vectors = Memory::global(reinterpret_cast<const Vector16*>(r.from + parts.lead));
  const auto* words = Memory::global(reinterpret_cast<const std::uint32_t*>(r.from + parts.lead - parts.shift));
  auto* to = Memory::global(reinterpret_cast<Vector16*>(r.to + parts.lead));
  RLK_UNROLL_NOT
  for (std::int32_t v = first; v < limit; v += kRunVectors * step) {
    std::uint32_t x[kRunVectors][kAligned ? 4 : 5];
    RLK_UNROLL
    for (int k = 0; k < kRunVectors; ++k) {
      const std::int32_t i = v + k * step;
      if (i < parts.copied_from || i >= parts.copied_to) continue;
      if constexpr (kAligned) {
        const Vector16 vector = vectors[i];
        RLK_UNROLL
        for (int j = 0; j < 4; ++j) x[k][j] = vector.words[j];
      } else {
        RLK_UNROLL
        for (int j = 0; j < 4; ++j) x[k][j] = words[4 * i + j];
        x[k][4] = 0;
        if (parts.shift != 0) x[k][4] = words[4 * i + 4];
      }
    }
    RLK_UNROLL
    for (int k = 0; k < kRunVectors; ++k) {
      const std::int32_t i = v + k * step;
      if (i < parts.copied_from || i >= parts.copied_to) continue;
      Vector16 vector;
      RLK_UNROLL
      for (int j = 0; j < 4; ++j) {
        vector.words[j] = x[k][j];
        if constexpr (!kAligned) {
          const std::uint64_t both = std::uint64_t{x[k][j + 1]} << 32 | x[k][j];
          vector.words[j] = static_cast<std::uint32_t>(both >> (8 * parts.shift));
        }
      }
      to[i] = vector;
    }
  }
}

// The vectors first, first + step, ... of a run, kRunVectors of them, or where `last` says so all that are left; and
// where `edges` says so the bytes around whole vectors, of which the threads `first` = 0 ... step - 1 have some each.
constexpr std::int32_t kMostRunEdges = 31 + 31 + 15;  // bytes at the head, in the middle, at the tail
template <class Memory>
RLK_HD void copy_run(const ByteRun& r, std::int32_t first, std::int32_t step, bool edges, bool last) {
  if (r.end == 0 || (first > r.end >> 4 && (!edges || first >= kMostRunEdges))) return;
  const RunParts parts(r);
  const auto* from = Memory::global(r.from);
  auto* to = Memory::global(r.to);
  // Bytes around: before copied_from, from copied_to to filled_from, behind the last vector.
  const auto around = [&](std::int32_t vector) {
    return parts.lead + 16 * vector < r.end ? parts.lead + 16 * vector : r.end;
  };
  const std::int32_t head = around(parts.copied_from), to_middle = around(parts.copied_to) - head;
  const std::int32_t of_middle = around(parts.filled_from) - to_middle, to_tail = around(parts.vectors) - of_middle;
  const std::int32_t singles = edges ? r.end - to_tail : 0;
  const auto place = [&](std::int32_t i) { return i < head ? i : i < of_middle ? i + to_middle : i + to_tail; };
  const auto byte_at = [&](std::int32_t at) {
    return at < r.copied ? from[at] : static_cast<unsigned char>(r.fill >> (8 * (at & 7)));
  };
  unsigned char single = 0;
  if (first < singles) single = byte_at(place(first));  // under way together with the vectors
  const std::int32_t chunk = first + kRunVectors * step, limit = last || parts.vectors < chunk ? parts.vectors : chunk;
  parts.aligned ? copy_vectors<true, Memory>(r, parts, first, step, limit)
                : copy_vectors<false, Memory>(r, parts, first, step, limit);
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
  if (first < singles) to[place(first)] = single;
  for (std::int32_t i = first + step; i < singles; i += step) to[place(i)] = byte_at(place(i));
}

}  // namespace rlk
