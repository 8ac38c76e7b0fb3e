// The kernels of labels and masks under the names that the host looks up. The kernels are compiled for gfx90a and
// gfx942, and for the emulation. The formulas are in kernels/tokens/labels.h, shared with the CPU and CUDA.
#include "hip/common/wave.h"
#include "hip/shift_labels_packed/launches.h"

RLK_KERNEL(rlk::kTileThreads)
rlk_shift_labels_packed_labels(rlk::ShiftLabelsParams p, std::int64_t first_block) {
  rlk::shift_labels_block<rlk::hip::GlobalMemory>(p, first_block + rlk::hip::block_id_x(), rlk::hip::thread_id(),
                                                  reinterpret_cast<std::int64_t*>(rlk::hip::lds()),
                                                  [] { rlk::hip::block_barrier(); });
}
RLK_KERNEL(rlk::kTileThreads)
rlk_shift_labels_packed_spans(rlk::SpanMaskParams p, std::int64_t first_block) {
  rlk::span_mask_block<rlk::hip::GlobalMemory>(p, first_block + rlk::hip::block_id_x(), rlk::hip::thread_id(),
                                               reinterpret_cast<std::int64_t*>(rlk::hip::lds()),
                                               [] { rlk::hip::block_barrier(); });
}
RLK_KERNEL(rlk::hip::kTokenThreads)
rlk_shift_labels_packed_rest(rlk::ToolMaskParams p, std::int64_t first_block) {
  const std::int64_t i = (first_block + rlk::hip::block_id_x()) * rlk::hip::kTokenThreads + rlk::hip::thread_id();
  if (i < p.num_tokens) rlk::hip::global_pointer(p.mask)[i] = 0;
}
RLK_KERNEL(rlk::kTurnThreads)
rlk_shift_labels_packed_turns(rlk::ToolMaskParams p, std::int64_t first_block) {
  rlk::tool_mask_block<rlk::hip::GlobalMemory>(p, first_block + rlk::hip::block_id_x(), rlk::hip::thread_id(),
                                               reinterpret_cast<std::int64_t*>(rlk::hip::lds()),
                                               [] { rlk::hip::block_barrier(); });
}
