// THE CONTRACT of three operators on token ids: shift_labels_packed (which token comes next), loss_mask_from_spans and
// tool_mask (which tokens the model wrote). All arithmetic is on integers, so every backend has the same bytes.
//
// Sequences are padded or packed, as in rlk/tokens.h. A position is a token's distance from its sequence's first token.
//
// shift_labels_packed: label[j] = ids[t + 1], where local token j is the packed token t. The label is ignore_index if
// token t + 1 is not in the sequence of token t, or if the mask of token t + 1 is zero. A context-parallel rank with
// cp_size = C and cp_rank = R has these tokens:
//   contiguous: the packed array is cut into C equal parts: t = R num_tokens / C + j
//   zigzag    : each sequence of length L is cut into 2C chunks of L / 2C. A rank has chunks R and 2C - 1 - R, in this
//               order. The local array has these chunks for one sequence after another, so its offsets are
//               cu_seqlens / C. Offsets must be multiples of 2C.
// The CPU throws InvalidArgument for invalid offsets, and for offsets that zigzag cannot cut. A GPU gives ignore_index
// to the tokens of a sequence with such offsets.
// loss_mask_from_spans: mask = 1 for a token at position p of sequence i if a span s in [span_offsets[i],
// span_offsets[i + 1]) has spans[s, 0] <= p < spans[s, 1]; else 0. Spans may overlap and come in any order. The CPU
// throws for span_offsets that are no valid offsets of the spans. The CPU also throws for a span that violates 0 <=
// begin <= end <= the sequence's length. A GPU clamps a span to its sequence, and ignores the spans of a sequence with
// invalid span_offsets.
// tool_mask: the token at position p opens a turn if the `begin` ids end at p inside its sequence. Position p closes a
// turn if the `end` ids end at p and the `begin` ids do not. mask = 1 at p if the last position before p that opens or
// closes a turn opens one. Without include_end, mask is also 0 at the tokens of the `end` ids. So the tokens of the
// `begin` ids are not the model's. The tokens after the `begin` ids are the model's, up to and including the `end` ids.
// A turn that nothing closes lasts until the end of the sequence. For packed tokens outside every sequence the masks
// are 0 and the labels ignore_index. The call enqueues its work on `stream`; it neither allocates nor synchronises. CPU
// backends ignore `stream`.
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
  std::int64_t ids_stride = 0;  // between rows, in elements; unused if packed
  Offsets cu_seqlens;
  std::uint8_t* mask = nullptr;  // shaped as ids, contiguous
  std::int64_t num_sequences = 0, num_tokens = 0;
  Marker begin, end;
  DType dtype = DType::kInt64;  // kInt32, kInt64
  bool include_end = true;
};

void shift_labels_packed(const ShiftLabelsParams& p, Device device, Stream stream);
void loss_mask_from_spans(const SpanMaskParams& p, Device device, Stream stream);
void tool_mask(const ToolMaskParams& p, Device device, Stream stream);

}  // namespace rlk
