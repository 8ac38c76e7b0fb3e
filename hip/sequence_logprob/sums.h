// sequence_logprob. Each block sums one sequence, and each of its waves sums a chunk of 2,048 positions at a time.
// Neighbouring lanes read neighbouring positions, four rows of 64 at a time. HBM bandwidth bounds the kernel, which
// reads log-probabilities and flags once. kernels/packing/sequence_gradient.h computes the gradient, token by token.
#pragma once

#include "hip/common/element.h"
#include "hip/common/wave.h"
#include "hip/sequence_logprob/launches.h"
#include "rlk/math/tree_sum.h"

namespace rlk::hip {

struct SumWave {
  RLK_DEVICE int lane() const { return thread_id() % kWave; }
  RLK_DEVICE float shuffle_xor(float value, int mask) const { return rlk::hip::shuffle_xor(value, mask); }
};

template <class T>
RLK_DEVICE void sequence_logprob_kernel(const SequenceLogprobParams& p, std::int64_t first_block) {
  constexpr int kRows = 4, kStep = kRows * kWave;
  auto* of_waves = reinterpret_cast<std::int64_t*>(lds());
  auto* of_chunks = reinterpret_cast<float*>(of_waves + kSumWaves);
  const std::int64_t sequence = first_block + block_id_x();
  const bool packed = p.cu_seqlens.data != nullptr;
  const Span span = span_of<GlobalMemory>(p.cu_seqlens, p.num_tokens, sequence);
  const auto* logprob = global_pointer(static_cast<const typename T::Storage*>(p.logprob)) +
                        (packed ? span.begin : sequence * p.logprob_stride);
  const std::int64_t mask_at = packed ? span.begin : sequence * p.mask.row_stride;
  const int wave = thread_id() / kWave, lane = thread_id() % kWave;
  const std::int64_t chunks = (span.length + kSequenceChunk - 1) / kSequenceChunk;
  static_assert(kChunksOfRound == kWave);
  const SumWave of_wave;
  TeamSumTree<SumWave> tree(of_wave);
  std::int64_t count = 0;
  for (std::int64_t round = 0; round < chunks; round += kChunksOfRound) {
    const int num = static_cast<int>(chunks - round < kChunksOfRound ? chunks - round : kChunksOfRound);
    for (int c = wave; c < num; c += kSumWaves) {
      const std::int64_t first = (round + c) * kSequenceChunk;
      SumTree<4> steps;
#pragma unroll 1
      for (std::int64_t step = first; step < first + kSequenceChunk; step += kStep) {
        float v[kRows];
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          const std::int64_t at = step + j * kWave + lane;
          const bool exists = at < span.length;
          const bool kept = exists && counts<GlobalMemory>(p.mask, mask_at + at);
          const float x = exists ? T::load(logprob[at]) : 0.0f;
          count += __builtin_popcountll(ballot(kept));
          v[j] = kept ? x : 0.0f;
        }
        steps.take(sum_of_rows<kWave>(of_wave, v));
      }
      if (lane == 0) of_chunks[c] = steps.finish();
    }
    block_barrier();
    tree.take(sum_over_lanes<kWave>(of_wave, lane < num ? of_chunks[lane] : 0.0f));
    block_barrier();
  }
  const float sum = tree.finish();
  if (lane == 0) of_waves[wave] = count;
  block_barrier();
  if (thread_id() != 0) return;
  for (int w = 1; w < kSumWaves; ++w) count += of_waves[w];
  global_pointer(p.sum)[sequence] = span.good ? finished_sum(sum) : canonical_nan();
  global_pointer(p.count)[sequence] = count;
  if (p.status != nullptr) global_pointer(p.status)[sequence] = span.good ? 0 : 1;
}

template <class T>
RLK_DEVICE void sequence_logprob_backward_kernel(const SequenceLogprobBackwardParams& p, const GradientGrid& g,
                                                 std::int64_t first_block) {
  auto* to = global_pointer(static_cast<typename T::Storage*>(p.d_logprob));
  sequence_gradient<GlobalMemory>(
      p, g, first_block + block_id_x(), thread_id(), reinterpret_cast<std::int64_t*>(lds()), [] { block_barrier(); },
      [to](std::int64_t i, float value) { to[i] = T::store(value); });
}

}  // namespace rlk::hip
