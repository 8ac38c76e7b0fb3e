// Labels and masks on CUDA, compiled once per architecture.
#include "tokens.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void shift_labels_packed(const ShiftLabelsParams& p, cudaStream_t stream) { run(p, stream); }
void loss_mask_from_spans(const SpanMaskParams& p, cudaStream_t stream) { run(p, stream); }
void tool_mask(const ToolMaskParams& p, cudaStream_t stream) { run(p, stream); }
}  // namespace rlk::cuda::RLK_CUDA_ARCH
