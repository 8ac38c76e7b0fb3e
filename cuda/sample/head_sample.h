// CUDA functions of linear_sample that linear and sample do not have.
#pragma once

#include "rlk/ops/linear.h"
#include "rlk/ops/sample.h"

namespace rlk::cuda {

// `fuses_linear_sample` returns whether one kernel computes a call's product and the leaf statistics of its rows.
// `fused_linear_sample` runs that kernel, then the draw. `draw` describes the product's logits, and has the workspace
// of sample.
bool fuses_linear_sample(const LinearParams& product, const SampleParams& draw, int device);
void fused_linear_sample(const LinearParams& product, const SampleParams& draw, int device, Stream stream);

}  // namespace rlk::cuda
