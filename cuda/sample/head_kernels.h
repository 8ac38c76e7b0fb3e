// Host entry points of linear_sample's kernels. head_sample.cpp checks the arguments.
#pragma once

#include "../common/launch.h"
#include "rlk/ops/linear.h"
#include "rlk/ops/sample.h"

namespace rlk::cuda {

struct Bf16;  // the operands' types (../common/element.cuh)
struct Fp16;

constexpr std::int64_t kMostFusedRows = 64;  // rows of one warpgroup

// The rows of each operand have one stride, and TMA can read the operands.
template <class T>
void run_fused_rows(const LinearParams& product, const SampleParams& draw, cudaStream_t stream);

}  // namespace rlk::cuda
