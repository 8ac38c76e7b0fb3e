// Labels and masks for SM80 and later.
#include "tokens.cuh"

namespace rlk::cuda {
void shift_labels_packed_sm80(const ShiftLabelsParams& p, cudaStream_t stream) { run(p, stream); }
void loss_mask_from_spans_sm80(const SpanMaskParams& p, cudaStream_t stream) { run(p, stream); }
void tool_mask_sm80(const ToolMaskParams& p, cudaStream_t stream) { run(p, stream); }
}  // namespace rlk::cuda
