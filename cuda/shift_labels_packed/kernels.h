// Host entry points of the kernels of labels and masks, one per architecture. Arguments were checked in
// shift_labels_packed.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/token_labels.h"

namespace rlk::cuda {

void shift_labels_packed_sm80(const ShiftLabelsParams& p, cudaStream_t stream);
void loss_mask_from_spans_sm80(const SpanMaskParams& p, cudaStream_t stream);
void tool_mask_sm80(const ToolMaskParams& p, cudaStream_t stream);
void shift_labels_packed_sm90(const ShiftLabelsParams& p, cudaStream_t stream);
void loss_mask_from_spans_sm90(const SpanMaskParams& p, cudaStream_t stream);
void tool_mask_sm90(const ToolMaskParams& p, cudaStream_t stream);

}  // namespace rlk::cuda
