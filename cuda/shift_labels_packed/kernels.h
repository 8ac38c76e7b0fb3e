// Host entry points of the kernels of labels and masks, one per architecture. Arguments were checked in
// shift_labels_packed.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/token_labels.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void shift_labels_packed(const ShiftLabelsParams& p, cudaStream_t stream);)
RLK_CUDA_KERNELS(void loss_mask_from_spans(const SpanMaskParams& p, cudaStream_t stream);)
RLK_CUDA_KERNELS(void tool_mask(const ToolMaskParams& p, cudaStream_t stream);)

}  // namespace rlk::cuda
