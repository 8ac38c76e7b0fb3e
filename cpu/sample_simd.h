// The computation of a row of the operator `sample`. CMake compiles sample_simd.cpp once per instruction set.
#pragma once

#include "lanes.h"
#include "rlk/ops/sample.h"

namespace rlk::cpu {

struct SampleLanes {
  void (*process)(const ProcessLogitsParams& p, std::int64_t row);
  // Computes everything except kept ids and raw_logprob. `mask` and `nodes` are the row's workspace. `count` gets the
  // number of columns that the row kept, or is null.
  void (*row)(const SampleParams& p, std::int64_t row, std::uint32_t* mask, float* nodes, std::int64_t* count);
  void (*raw)(const SampleParams& p, std::int64_t row,
              float* nodes);  // raw_logprob and the n best columns, from the params that raw_pass() makes
  void (*offsets)(const SampleParams& p, std::int64_t first, std::int64_t rows, std::uint32_t* closed);
  // `partial` computes a shard's payload, except for the words about the raw logits. `partial_raw` computes those
  // words, from the params that raw_pass() makes. `sorted` has room for 2 * sorted_columns ranks.
  // `merge` computes the results of `row` and `raw` from payloads. `count` is null except in round 4.
  void (*partial)(const SamplePartialParams& p, std::int64_t row, std::uint32_t* mask, float* nodes,
                  std::int64_t* count, std::uint64_t* sorted);
  void (*partial_raw)(const SamplePartialParams& p, std::int64_t row, float* nodes);
  void (*merge)(const SampleMergeParams& p, std::int64_t row, std::uint32_t* mask, float* nodes, std::int64_t* count);
  void (*kept)(const SampleParams& p, std::int64_t row, const std::uint32_t* mask);
};

RLK_CPU_LANES(SampleLanes, sample_simd)

}  // namespace rlk::cpu
