// The backward of logprob computes dlogits elementwise over a row, from the row's saved lse and entropy. HBM bandwidth
// bounds the kernel, which reads each logit once and writes each gradient once (2 * vocab_size * sizeof(T) bytes per
// row).
#pragma once

#include "hip/common/element.h"
#include "hip/common/wave.h"
#include "hip/logprob/launches.h"
#include "kernels/vocabulary/logprob_gradient.h"

namespace rlk::hip {

// Marks the columns of the block's segment that are in the row's kept set. Returns false if the row keeps all columns.
// The whole block must call this function.
RLK_DEVICE bool mark_segment(const LogprobBackwardParams& p, std::int64_t row, std::int64_t target, int first,
                             std::uint32_t* bitmap) {
  const KeptRange kept = kept_range(p, row);
  if (!kept.restricts()) return false;
  const int thread = thread_id();
  for (int i = thread; i < kSegmentColumns / 32; i += kBackwardThreads) bitmap[i] = 0;
  block_barrier();
  scan_kept(p, kept, target, thread, kBackwardThreads, [&](std::int64_t id) {
    const std::int64_t bit = id - p.vocab_start - first;
    if (bit >= 0 && bit < kSegmentColumns) atomic_or(&bitmap[bit / 32], 1u << (bit % 32));
  });
  block_barrier();
  return true;
}

// Each block computes one segment of a row of the launch. dlogits may be the same array as logits, because the thread
// that reads a column also writes it.
template <class T>
RLK_DEVICE void backward_kernel(const LogprobBackwardParams& p, std::int64_t first_row) {
  using Storage = typename T::Storage;
  const std::int64_t row = first_row + block_id_y();
  const int first = block_id_x() * kSegmentColumns;
  const RowGradient gradient = row_gradient(p, row);
  const bool empty = gradient.empty(p.ignore_index);
  auto* bitmap = reinterpret_cast<std::uint32_t*>(lds());
  const bool restricted = !empty && p.kept_offsets && mark_segment(p, row, gradient.target, first, bitmap);
  SmoothedRow r{};
  if (!empty) r = smoothed_row(p, gradient, row);
  const std::int64_t valid = p.valid_vocab - p.vocab_start;
  const float inverse = inverse_softcap(p);
  const Storage* logits = row_of<T>(p, row);
  Storage* dlogits = static_cast<Storage*>(p.dlogits) + p.dlogits_rows.offset(row);
  const int begin = thread_id() * kBackwardColumns;
  for (int i = begin; i < begin + kBackwardColumns && first + i < p.num_columns; ++i) {
    const int column = first + i;
    const bool kept = !restricted || (bitmap[i / 32] >> (i % 32) & 1) != 0;
    float d = 0.0f;
    if (!empty && column < valid && kept) {
      d = transformed_gradient<PortableProbability>(T::load(logits[column]), p, inverse, r,
                                                    column + p.vocab_start == gradient.target);
    }
    dlogits[column] = T::store(d);
  }
}

}  // namespace rlk::hip
