// The parts that the forward and the backward of rms_norm share: the weight, a thread's position, and the contract's
// sum over a row.
#pragma once

#include "hip/common/vec8.h"
#include "hip/rms_norm/launches.h"
#include "kernels/rows/rms_norm_row.h"

namespace rlk::hip {

// Loads weights and adds the offset. Weights have the type of the rows or float32. Without a weight they are 1.
template <class T, bool kVector, class Params>
RLK_DEVICE Columns load_weights(const Params& p, std::int64_t column, std::int64_t count) {
  Columns w;
  if (p.weight == nullptr) {
    for (float& x : w.v) x = 1.0f;
    return w;
  }
  if (p.weight_dtype == DType::kFloat32) {
    w = load_columns<Fp32, kVector>(global_pointer(static_cast<const float*>(p.weight)) + column, count);
  } else {
    w = load_columns<T, kVector>(global_pointer(static_cast<const typename T::Storage*>(p.weight)) + column, count);
  }
#pragma unroll
  for (int j = 0; j < kVec8; ++j) w.v[j] = rms_norm_weight(w.v[j], p.weight_offset);
  return w;
}

// The position of a thread. kThreads threads share a row: a wave or a block.
template <int kThreads>
struct Place {
  std::int64_t row;
  int first;  // first column of the thread's first vec8
  static constexpr int kStep = kThreads * kVec8;
};
template <int kThreads>
RLK_DEVICE Place<kThreads> place(std::int64_t first_block) {
  constexpr int kRows = kNormThreads / kThreads;
  return {(first_block + block_id_x()) * kRows + thread_id() / kThreads, thread_id() % kThreads * kVec8};
}

// Returns the sum of a row to every thread of the row. `lane` is the value of this thread's lane in the contract's
// tree. If a wave computes the row, the tree has at most 64 lanes. If a block computes the row, the sum takes two
// barriers.
template <int kThreads>
RLK_DEVICE float row_sum(float lane) {
#pragma unroll
  for (int distance = 1; distance < kWave; distance *= 2) lane = add_rn(lane, shuffle_xor(lane, distance));
  if constexpr (kThreads > kWave) {
    auto* of_wave = reinterpret_cast<float*>(lds());
    if (thread_id() % kWave == 0) of_wave[thread_id() / kWave] = lane;
    block_barrier();
    lane = add_rn(add_rn(of_wave[0], of_wave[1]), add_rn(of_wave[2], of_wave[3]));
    block_barrier();
  }
  // turns -0 into +0; missing lanes of a tree are +0, so a tree with missing lanes never gives -0
  return add_rn(lane, 0.0f);
}

}  // namespace rlk::hip
