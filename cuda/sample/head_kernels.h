// Host entry points of linear_sample's kernels. head_sample.cpp checks the arguments.
#pragma once

#include "../common/launch.h"
#include "rlk/ops/linear.h"
#include "rlk/ops/sample.h"

namespace rlk::cuda {

constexpr std::int64_t kMostFusedRows = 64;  // rows of one warpgroup

// Rows have one stride, and TMA can read them.
void linear_sample_bf16_sm90(const LinearParams& product, const SampleParams& draw, cudaStream_t stream);
void linear_sample_f16_sm90(const LinearParams& product, const SampleParams& draw, cudaStream_t stream);

}  // namespace rlk::cuda
