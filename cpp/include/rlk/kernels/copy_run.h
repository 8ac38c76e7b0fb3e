// Copies of runs of bytes between any addresses, for CUDA and HIP. A thread writes vectors of 16 bytes of the destination; what
// they are made of lies in two vectors of the source, which are shifted together. Bytes around whole vectors go singly.
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

// Bytes [shift, shift + 16) of 32, shift < 16.
RLK_HD Vector16 shifted_vector(const Vector16& a, const Vector16& b, std::int32_t shift) {
  const bool by_eight = (shift & 8) != 0, by_four = (shift & 4) != 0;
  const std::uint32_t w[8] = {a.words[0], a.words[1], a.words[2], a.words[3],
                              b.words[0], b.words[1], b.words[2], b.words[3]};
  std::uint32_t x[6], y[5];
  RLK_UNROLL
  for (int i = 0; i < 6; ++i) x[i] = by_eight ? w[i + 2] : w[i];
  RLK_UNROLL
  for (int i = 0; i < 5; ++i) y[i] = by_four ? x[i + 1] : x[i];
  Vector16 v;
  RLK_UNROLL
  for (int i = 0; i < 4; ++i) {
    const std::uint64_t both = std::uint64_t{y[i + 1]} << 32 | y[i];
    v.words[i] = static_cast<std::uint32_t>(both >> (8 * (shift & 3)));
  }
  return v;
}

// The vectors first, first + step, ... of a run, kRunVectors of them, or where `last` says so all that are left; and
// where `edges` says so the bytes around whole vectors, of which the threads `first` = 0 ... step - 1 have some each.
template <class Memory>
RLK_HD void copy_run(const ByteRun& r, std::int32_t first, std::int32_t step, bool edges, bool last) {
  const auto* from = Memory::global(r.from);
  auto* to = Memory::global(r.to);
  const auto lead = static_cast<std::int32_t>(-reinterpret_cast<std::uintptr_t>(r.to) & 15);  // before the first vector
  const auto shift = static_cast<std::int32_t>((reinterpret_cast<std::uintptr_t>(r.from) + lead) & 15);
  // Vectors [copied_from, copied_to) are copied, [filled_from, vectors) filled.
  const auto within = [](std::int32_t x, std::int32_t least, std::int32_t most) {
    return x < least ? least : x > most ? most : x;
  };
  const std::int32_t vectors = within((r.end - lead) >> 4, 0, kMostRunBytes);
  const std::int32_t copied_from = lead + r.before < shift && vectors > 0 ? 1 : 0;
  const std::int32_t readable = shift == 0 ? r.after : r.after + shift - 16;
  const std::int32_t copied_to =
      within(((readable < r.copied ? readable : r.copied) - lead) >> 4, copied_from, vectors);
  const std::int32_t filled_from = within((r.copied - lead + 15) >> 4, copied_to, vectors);
  // Bytes around: before copied_from, from copied_to to filled_from, behind the last vector.
  const auto around = [&](std::int32_t vector) { return lead + 16 * vector < r.end ? lead + 16 * vector : r.end; };
  const std::int32_t head = around(copied_from), to_middle = around(copied_to) - head;
  const std::int32_t of_middle = around(filled_from) - to_middle, to_tail = around(vectors) - of_middle;
  const std::int32_t singles = edges ? r.end - to_tail : 0;
  const auto place = [&](std::int32_t i) { return i < head ? i : i < of_middle ? i + to_middle : i + to_tail; };
  const auto byte_at = [&](std::int32_t at) {
    return at < r.copied ? from[at] : static_cast<unsigned char>(r.fill >> (8 * (at & 7)));
  };
  unsigned char single = 0;
  if (first < singles) single = byte_at(place(first));  // under way together with the vectors
  const auto* source = Memory::global(reinterpret_cast<const Vector16*>(r.from + lead - shift));
  auto* destination = Memory::global(reinterpret_cast<Vector16*>(r.to + lead));
  const int turned = 8 * (lead & 7);
  const Vector16 fill = filled_vector(turned == 0 ? r.fill : r.fill >> turned | r.fill << (64 - turned));
  const std::int32_t limit = last || vectors < first + kRunVectors * step ? vectors : first + kRunVectors * step;
  RLK_UNROLL_NOT
  for (std::int32_t v = first; v < limit; v += kRunVectors * step) {
    Vector16 low[kRunVectors], high[kRunVectors];
    RLK_UNROLL
    for (int k = 0; k < kRunVectors; ++k) {
      const std::int32_t i = v + k * step;
      if (i >= copied_from && i < copied_to) low[k] = source[i];
      if (shift != 0 && i >= copied_from && i < copied_to) high[k] = source[i + 1];
    }
    RLK_UNROLL
    for (int k = 0; k < kRunVectors; ++k) {
      const std::int32_t i = v + k * step;
      if (i >= copied_from && i < copied_to) {
        destination[i] = shift == 0 ? low[k] : shifted_vector(low[k], high[k], shift);
      } else if (i >= filled_from && i < vectors) {
        destination[i] = fill;
      }
    }
  }
  if (first < singles) to[place(first)] = single;
  for (std::int32_t i = first + step; i < singles; i += step) to[place(i)] = byte_at(place(i));
}

}  // namespace rlk
