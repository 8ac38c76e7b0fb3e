// HIP backend of shift_labels_packed and its relatives: gfx90a and gfx942.
#pragma once

#include "rlk/ops/shift_labels_packed.h"

namespace rlk::hip {

void shift_labels_packed(const ShiftLabelsParams& p, int device, Stream stream);
void loss_mask_from_spans(const SpanMaskParams& p, int device, Stream stream);
void tool_mask(const ToolMaskParams& p, int device, Stream stream);

}  // namespace rlk::hip
