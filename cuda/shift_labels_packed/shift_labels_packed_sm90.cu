// Labels and masks for SM90.
#include "tokens.cuh"

namespace rlk::cuda {
void shift_labels_packed_sm90(const ShiftLabelsParams& p, cudaStream_t stream) { run(p, stream); }
void loss_mask_from_spans_sm90(const SpanMaskParams& p, cudaStream_t stream) { run(p, stream); }
void tool_mask_sm90(const ToolMaskParams& p, cudaStream_t stream) { run(p, stream); }
}  // namespace rlk::cuda
