// THE CONTRACT of what training needs to know of each token: shift_labels_packed (which token comes next),
// loss_mask_from_spans and tool_mask (which tokens the model wrote). Integers alone: every backend has the same bytes.
//
// Sequences lie padded or packed, as rlk/tokens.h says; a position is a token's distance from its sequence's first.
//
// shift_labels_packed: label[j] = ids[t + 1], where local token j is the packed token t, t + 1 is in the same sequence, and
// the mask of t + 1 is not zero; else ignore_index. A context-parallel rank, cp_size = C, cp_rank = R, has
//   contiguous: the packed array is cut in C equal parts: t = R num_tokens / C + j
//   zigzag    : each sequence of length L is cut in 2C chunks of L / 2C, of which a rank has chunks R and 2C - 1 - R, in this
//               order; the local array has these of every sequence, one sequence after another, so that its offsets are
//               cu_seqlens / C. Offsets are multiples of 2C
// The CPU throws InvalidArgument for offsets that are none or that zigzag cannot cut; a GPU gives such a sequence's tokens
// ignore_index.
// loss_mask_from_spans: mask = 1 for a token at position p of sequence i where a span s in [span_offsets[i],
// span_offsets[i + 1]) has spans[s, 0] <= p < spans[s, 1]; else 0. Spans may overlap and come in any order. The CPU throws for
// span_offsets that are no offsets of the spans, and for a span that is not 0 <= begin <= end <= the sequence's length. A GPU
// takes the part of a span that lies in the sequence, and no span of a sequence whose span_offsets are none.
// tool_mask: a token at position p opens a turn where the `begin` ids end at p inside of its sequence, and closes one where
// the `end` ids do and `begin` does not. mask = 1 where the last such event before p is an opening; without include_end 0
// for tokens of `end` ids all the same. So the ids of `begin` are not the model's; what follows is, up to and with the ids of
// `end`. A turn that nothing closes goes on to the end of the sequence.
// Masks of packed tokens of no sequence are 0, their labels ignore_index.
// Enqueues on `stream`; neither allocates nor synchronises. CPU backends ignore `stream`.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

struct ShiftLabelsParams {
  const void* ids = nullptr;  // [num_tokens], dtype
  TokenMask mask;             // [num_tokens]
  Offsets cu_seqlens;
  void* labels = nullptr;  // [num_tokens / cp_size], dtype
  std::int64_t num_sequences = 0, num_tokens = 0;
  std::int64_t ignore_index = -100;
  std::int32_t cp_rank = 0, cp_size = 1;
  bool zigzag = true;
  DType dtype = DType::kInt64;  // kInt32, kInt64
};

struct SpanMaskParams {
  const void* spans = nullptr;  // [num_spans, 2], dtype
  Offsets span_offsets;         // [num_sequences + 1]
  Offsets cu_seqlens;
  std::uint8_t* mask = nullptr;  // [num_sequences, num_tokens] or [num_tokens]
  std::int64_t num_sequences = 0, num_tokens = 0, num_spans = 0;
  DType dtype = DType::kInt64;  // kInt32, kInt64
};

constexpr int kMarkerIds = 16;
struct Marker {
  std::int64_t ids[kMarkerIds] = {};
  std::int32_t length = 0;  // in [1, 16]
};
struct ToolMaskParams {
  const void* ids = nullptr;    // [num_sequences, num_tokens] or [num_tokens], dtype; columns contiguous
  std::int64_t ids_stride = 0;  // between rows, in elements; packed: unused
  Offsets cu_seqlens;
  std::uint8_t* mask = nullptr;  // shaped as ids; contiguous
  std::int64_t num_sequences = 0, num_tokens = 0;
  Marker begin, end;
  DType dtype = DType::kInt64;  // kInt32, kInt64
  bool include_end = true;
};

void shift_labels_packed(const ShiftLabelsParams& p, Device device, Stream stream);
void loss_mask_from_spans(const SpanMaskParams& p, Device device, Stream stream);
void tool_mask(const ToolMaskParams& p, Device device, Stream stream);

}  // namespace rlk
