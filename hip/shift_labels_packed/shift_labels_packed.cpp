// The host side of labels and masks on HIP checks memory safety and launches the kernels.
#include "rlk/ops/shift_labels_packed.h"

#include "hip/common/launch.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {

void shift_labels_packed(const ShiftLabelsParams& p, int device, Stream stream) {
  check_shift_labels(p);
  launch_blocks(device, stream, {kTileThreads, kTileLds}, "rlk_shift_labels_packed_labels",
                tiles_of(p.num_tokens / p.cp_size), p);
}

void loss_mask_from_spans(const SpanMaskParams& p, int device, Stream stream) {
  check_span_mask(p);
  const std::int64_t items = p.cu_seqlens.data != nullptr ? p.num_tokens : p.num_sequences * p.num_tokens;
  launch_blocks(device, stream, {kTileThreads, kTileLds}, "rlk_shift_labels_packed_spans", tiles_of(items), p);
}

void tool_mask(const ToolMaskParams& p, int device, Stream stream) {
  check_tool_mask(p);
  if (p.num_tokens == 0) return;
  if (p.cu_seqlens.data != nullptr) {  // clears tokens outside every sequence
    launch_blocks(device, stream, {kTokenThreads, 0}, "rlk_shift_labels_packed_rest",
                  ceil_div(p.num_tokens, kTokenThreads), p);
  }
  launch_blocks(device, stream, {kTurnThreads, kTurnLds}, "rlk_shift_labels_packed_turns", p.num_sequences, p);
}

}  // namespace rlk::hip
