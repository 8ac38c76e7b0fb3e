// CPU backend of ops/shift_labels_packed.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/shift_labels_packed.h"

namespace rlk::cpu {

void shift_labels_packed(const ShiftLabelsParams& p);
void loss_mask_from_spans(const SpanMaskParams& p);
void tool_mask(const ToolMaskParams& p);

}  // namespace rlk::cpu
