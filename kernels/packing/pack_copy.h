// How a pack call's bytes are split among a GPU's threads, and the copy itself, for CUDA and HIP.
//
// Blocks are assigned to padded rows, because the host knows their number. A block finds its row by a division. Two
// offsets then give the row's place in the packed array, without a search. Tokens of a row past its sequence's end are
// not copied. Further blocks fill the packed array after the last sequence.
//
// If a row's tokens are contiguous in both arrays, the row is a run of bytes (kernels/packing/byte_copy.h). If the
// tokens are not contiguous, a token's bytes are copied in units of 1, 2, 4, 8 or 16 bytes. The unit is the largest of
// these sizes that divides every address, stride and token size.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/packing/byte_copy.h"
#include "kernels/rows/row_split.h"
#include "rlk/ops/pack.h"
#include "rlk/tokens.h"

namespace rlk {

constexpr int kPackLog2Threads = 7;  // log2 of the threads per block
constexpr int kPackThreads = 1 << kPackLog2Threads;
constexpr int kPackUnits = 8;     // units per thread
constexpr int kPackTogether = 4;  // number of units that a thread loads before it stores any of them
// Bytes that one block fills at the end of a contiguous packed array. The number is large because these blocks have
// nothing to do if the capacity equals the number of tokens.
constexpr std::int64_t kPackTailBytes = 16 * kPackThreads * 32;

struct PackShare {
  RowSplit split;
  std::uint32_t units = 0;        // units per token
  std::uint32_t row_blocks = 0;   // number of blocks for rows; blocks that fill the packed array follow
  std::uint32_t first_block = 0;  // index of the first block in the launch
  std::int32_t log2_unit = 0;
  bool flat = false;  // a row's tokens are contiguous in both arrays
};
struct PackGrid {
  PackShare shares[kPackArrays];
  std::uint32_t blocks = 0;
  bool all_flat = true;
  // in each padded row, this launch copies tokens [first_token, first_token + num_tokens)
  std::int32_t first_token = 0, num_tokens = 0;
  std::int64_t tail = 0;  // first packed token that the launch may fill; if negative, cu_seqlens' last offset is used
};

// Log2 of the number of bytes in a unit of an array.
inline int pack_log2_unit(const PackArray& a, std::int64_t num_sequences, std::int64_t num_tokens) {
  std::uint64_t bits = static_cast<std::uint64_t>(a.token_bytes) | reinterpret_cast<std::uintptr_t>(a.padded) |
                       reinterpret_cast<std::uintptr_t>(a.packed) | static_cast<std::uint64_t>(a.packed_stride);
  if (num_sequences > 1) bits |= static_cast<std::uint64_t>(a.sequence_stride);
  if (num_tokens > 1) bits |= static_cast<std::uint64_t>(a.token_stride);
  int log2 = 0;
  while (log2 < 4 && (bits >> log2 & 1) == 0) ++log2;
  return log2;
}

// Whether a padded row's tokens are contiguous in the padded and in the packed array.
inline bool is_run(const PackParams& p, const PackArray& a) {
  return p.positions == nullptr && (a.token_stride == a.token_bytes || p.num_tokens <= 1) &&
         a.packed_stride == a.token_bytes && a.token_bytes <= kMostRunBytes;
}

// Sets `g` to the launch that copies every row's tokens from `first` on. With `tail` the launch also fills the tail of
// the packed array. Returns the first token of the next launch.
inline std::int64_t pack_grid(const PackParams& p, std::int64_t first, bool rows, bool tail, PackGrid* g) {
  std::int64_t most = 1, blocks = 0;  // most: largest number of units per token, or of bytes per token if rows are runs
  for (int i = 0; i < p.num_arrays; ++i) {
    const PackArray& a = p.arrays[i];
    most = std::max(most,
                    is_run(p, a) ? a.token_bytes : a.token_bytes >> pack_log2_unit(a, p.num_sequences, p.num_tokens));
  }
  const std::int64_t tokens = rows ? std::min(p.num_tokens - first, std::max<std::int64_t>((1 << 30) / most, 1)) : 0;
  g->first_token = static_cast<std::int32_t>(first);
  g->num_tokens = static_cast<std::int32_t>(tokens);
  g->tail = p.covered ? -1 : 0;
  g->all_flat = true;
  for (int i = 0; i < p.num_arrays; ++i) {
    const PackArray& a = p.arrays[i];
    PackShare& s = g->shares[i];
    s.log2_unit = pack_log2_unit(a, p.num_sequences, p.num_tokens);
    s.units = static_cast<std::uint32_t>(a.token_bytes >> s.log2_unit);
    s.flat = is_run(p, a);
    g->all_flat = g->all_flat && s.flat;
    s.first_block = static_cast<std::uint32_t>(blocks);
    s.row_blocks = 0;
    if (s.units == 0) continue;
    if (tokens > 0 && p.num_sequences > 0) {
      s.split = s.flat ? split_rows((tokens * a.token_bytes + 15) / 16, kRunChunk, kPackLog2Threads)
                       : split_rows(tokens * s.units, kPackUnits, kPackLog2Threads);
      s.row_blocks = static_cast<std::uint32_t>(blocks_of(s.split, p.num_sequences));
      blocks += blocks_of(s.split, p.num_sequences);
    }
    const std::int64_t of_block = s.flat ? kPackTailBytes : kPackThreads * kPackUnits;
    if (tail) blocks += (p.capacity * (s.flat ? a.token_bytes : s.units) + of_block - 1) / of_block;
    RLK_CHECK(blocks < std::int64_t{1} << 31, "pack: too many rows for one launch");
  }
  g->blocks = static_cast<std::uint32_t>(blocks);
  return first + tokens;
}

// Calls launch(grid) for each launch of a call.
template <class F>
void for_each_pack_launch(const PackParams& p, const F& launch) {
  PackGrid g;
  const auto run = [&](std::int64_t first, bool rows, bool tail) {
    const std::int64_t next = pack_grid(p, first, rows, tail, &g);
    if (g.blocks > 0) launch(g);
    return next;
  };
  bool tail = !p.unpacks;
  // fills the packed array first, because later launches copy rows over the filled tokens
  if (tail && (!p.covered || p.num_tokens == 0)) {
    run(0, false, true);
    tail = false;
  }
  for (std::int64_t first = 0; first < p.num_tokens; tail = false) first = run(first, true, tail);
}

namespace pack_detail {

// One unit of the fill. All units of the fill are equal, because a unit holds whole elements or the fill is zero.
template <class Unit>
RLK_HD Unit fill_unit(std::uint64_t fill) {
  if constexpr (sizeof(Unit) == 16) {
    return filled_vector(fill);
  } else {
    return static_cast<Unit>(fill);
  }
}

// Copies a block's part of a row that is a run of bytes in both arrays.
template <class Memory>
RLK_HD void copy_flat_row(const PackParams& p, const PackGrid& g, const PackArray& a, const PackShare& s,
                          std::uint32_t block, int thread) {
  const RowPlace at = place_in_rows(s.split, kRunChunk, block, thread);
  if (at.row >= p.num_sequences) return;
  const Span span = span_of<Memory>(p.cu_seqlens, p.capacity, at.row);
  const std::int64_t size = a.token_bytes, left = span.length - g.first_token;
  const std::int64_t before = (span.begin + g.first_token) * size;  // bytes of the packed array before the run
  const auto within = [](std::int64_t x) {
    return static_cast<std::int32_t>(x < 0 ? 0 : x > kMostRunBytes ? kMostRunBytes : x);
  };
  const auto row = static_cast<std::int32_t>(g.num_tokens * size);
  const std::int32_t copied = left < g.num_tokens ? within(left * size) : row;
  ByteRun run;
  run.from = static_cast<unsigned char*>(a.padded) + at.row * a.sequence_stride + g.first_token * size;
  run.to = static_cast<unsigned char*>(a.packed) + before;
  run.after = row;
  run.copied = run.end = copied;
  run.fill = a.fill;
  if (p.unpacks) {
    run.to = static_cast<unsigned char*>(a.padded) + at.row * a.sequence_stride + g.first_token * size;
    run.from = static_cast<unsigned char*>(a.packed) + before;
    run.before = within(before);
    run.after = within(p.capacity * size - before);
    run.end = row;
  }
  const std::uint32_t chunk = block - s.split.chunks.quotient(block) * s.split.chunks.value;
  copy_byte_run<Memory>(run, at.first, at.step, chunk == 0, chunk + 1 == s.split.chunks.value);
}

template <class Unit, class Memory>
RLK_HD void copy_row(const PackParams& p, const PackGrid& g, const PackArray& a, const PackShare& s,
                     std::uint32_t block, int thread) {
  const RowPlace at = place_in_rows(s.split, kPackUnits, block, thread);
  if (at.row >= p.num_sequences) return;
  const Span span = span_of<Memory>(p.cu_seqlens, p.capacity, at.row);
  auto* padded = static_cast<unsigned char*>(a.padded) + at.row * a.sequence_stride + g.first_token * a.token_stride;
  auto* packed = static_cast<unsigned char*>(a.packed) + span.begin * a.packed_stride;
  const std::uint32_t items = static_cast<std::uint32_t>(g.num_tokens) * s.units;
  const auto first = static_cast<std::uint32_t>(at.first), step = static_cast<std::uint32_t>(at.step);
  const std::int64_t first_position = at.row * p.num_tokens + g.first_token;
  const unsigned char* source = p.unpacks ? packed : padded;
  unsigned char* destination = p.unpacks ? padded : packed;
  RLK_UNROLL_NOT
  for (int begin = 0; begin < kPackUnits; begin += kPackTogether) {
    Unit values[kPackTogether];
    std::int64_t to[kPackTogether];  // offset in bytes to which a unit is written; negative: it is not written
    RLK_UNROLL
    for (int k = 0; k < kPackTogether; ++k) {
      const std::uint32_t item = first + static_cast<std::uint32_t>(begin + k) * step;
      to[k] = -1;
      if (item >= items) continue;
      const std::uint32_t token = s.units == 1 ? item : item / s.units;  // index among the launch's tokens of the row
      const std::int64_t in_token = (item - token * s.units) * static_cast<std::int64_t>(sizeof(Unit));
      const std::int64_t position = p.positions == nullptr ? std::int64_t{g.first_token} + token
                                                           : Memory::global(p.positions)[first_position + token];
      const bool exists = position >= 0 && position < span.length;
      const std::int64_t in_padded = token * a.token_stride + in_token;
      const std::int64_t in_packed = position * a.packed_stride + in_token;
      values[k] = fill_unit<Unit>(a.fill);
      if (exists)
        values[k] = *Memory::global(reinterpret_cast<const Unit*>(source + (p.unpacks ? in_packed : in_padded)));
      if (exists || p.unpacks) to[k] = p.unpacks ? in_padded : in_packed;
    }
    RLK_UNROLL
    for (int k = 0; k < kPackTogether; ++k) {
      if (to[k] >= 0) *Memory::global(reinterpret_cast<Unit*>(destination + to[k])) = values[k];
    }
  }
}

// The first token of the packed array to fill.
template <class Memory>
RLK_HD std::int64_t tail_of(const PackParams& p, const PackGrid& g) {
  if (g.tail >= 0) return g.tail;
  const std::int64_t begin = p.num_sequences == 0 ? 0 : offset_at<Memory>(p.cu_seqlens, p.num_sequences);
  return begin < 0 ? 0 : begin;
}

template <class Memory>
RLK_HD void fill_flat_tail(const PackParams& p, const PackGrid& g, const PackArray& a, std::uint32_t block,
                           int thread) {
  const std::int64_t tail = tail_of<Memory>(p, g) * a.token_bytes, size = p.capacity * a.token_bytes;
  const std::int64_t first = block * kPackTailBytes, begin = first < tail ? tail : first;
  const std::int64_t end = first + kPackTailBytes < size ? first + kPackTailBytes : size;
  if (begin >= end) return;
  auto* to = static_cast<unsigned char*>(a.packed) + begin;
  const ByteRun run = {to, to, 0, 0, 0, static_cast<std::int32_t>(end - begin), a.fill};
  copy_byte_run<Memory>(run, thread, kPackThreads, true, true);
}

template <class Unit, class Memory>
RLK_HD void fill_tail(const PackParams& p, const PackGrid& g, const PackArray& a, const PackShare& s,
                      std::uint32_t block, int thread) {
  const std::int64_t begin = tail_of<Memory>(p, g);
  const std::int64_t first = std::int64_t{block} * (kPackThreads * kPackUnits) + thread;
  if (std::int64_t{block} * (kPackThreads * kPackUnits) + kPackThreads * kPackUnits <= begin * s.units) return;
  RLK_UNROLL_NOT
  for (int k = 0; k < kPackUnits; ++k) {
    const std::int64_t item = first + k * kPackThreads;
    if (item < begin * s.units || item >= p.capacity * s.units) continue;
    const std::int64_t token = s.units == 1 ? item : item / s.units;
    const std::int64_t unit = item - token * s.units;
    auto* to = static_cast<unsigned char*>(a.packed) + token * a.packed_stride;
    Memory::global(reinterpret_cast<Unit*>(to))[unit] = fill_unit<Unit>(a.fill);
  }
}

template <class Unit, class Memory>
RLK_HD void run(const PackParams& p, const PackGrid& g, const PackArray& a, const PackShare& s, std::uint32_t block,
                int thread) {
  if (block < s.row_blocks) return copy_row<Unit, Memory>(p, g, a, s, block, thread);
  fill_tail<Unit, Memory>(p, g, a, s, block - s.row_blocks, thread);
}

}  // namespace pack_detail

// The work of one block of a launch. kAllFlat: all arrays of the launch are flat, so the kernel needs fewer registers.
template <class Memory, bool kAllFlat = false>
RLK_HD void pack_block(const PackParams& p, const PackGrid& g, std::uint32_t block, int thread) {
  int i = 0;
  while (i + 1 < p.num_arrays && block >= g.shares[i + 1].first_block) ++i;
  const PackArray& a = p.arrays[i];
  const PackShare& s = g.shares[i];
  block -= s.first_block;
  if (kAllFlat || s.flat) {
    if (block < s.row_blocks) return pack_detail::copy_flat_row<Memory>(p, g, a, s, block, thread);
    return pack_detail::fill_flat_tail<Memory>(p, g, a, block - s.row_blocks, thread);
  }
  if constexpr (kAllFlat) return;
  switch (s.log2_unit) {
    case 0:
      return pack_detail::run<std::uint8_t, Memory>(p, g, a, s, block, thread);
    case 1:
      return pack_detail::run<std::uint16_t, Memory>(p, g, a, s, block, thread);
    case 2:
      return pack_detail::run<std::uint32_t, Memory>(p, g, a, s, block, thread);
    case 3:
      return pack_detail::run<std::uint64_t, Memory>(p, g, a, s, block, thread);
    default:
      return pack_detail::run<Vector16, Memory>(p, g, a, s, block, thread);
  }
}

}  // namespace rlk
