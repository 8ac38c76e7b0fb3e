// Host entry points of the rms_norm kernels, one set per architecture, and each kernel's plans. All plans have the same
// bits. rms_norm.cpp checks the arguments.
#pragma once

#include "../common/launch.h"
#include "kernels/rows/rms_norm_row.h"

namespace rlk::cuda {

// A row has `threads` threads, each with up to `vec8s` times eight columns in registers. 0 threads: a block reads the
// row twice, which serves any width and alignment.
struct RmsNormPlan {
  int threads = 0, vec8s = 0;
};
constexpr RmsNormPlan kRmsNormPlans[] = {{8, 4}, {32, 4}, {128, 4}, {256, 4}, {256, 8}, {0, 0}};
constexpr std::int64_t kMostFewRows = 1024;  // with at most this many rows a launch is too short to keep memory busy
bool serves(const RmsNormPlan& plan, const RmsNormParams& p);
RmsNormPlan choose_plan(const RmsNormParams& p);

// Groups: `threads` threads take 64 rows in turn and read each row once. Halves: two blocks share a group, for dx and
// dweight together; half of each row is read twice. Halves serve 16-bit types and arrays whose rows have one stride.
// Rows: each block computes one row of dx, and other threads each sum two columns of 64 rows for dweight. Rows are read
// twice; this plan serves any width and alignment.
struct RmsNormBackwardPlan {
  int threads = 0, vec8s = 0;  // 0 threads: rows
  bool halves = false;
};
constexpr RmsNormBackwardPlan kRmsNormBackwardPlans[] = {{16, 1},        {32, 1},  {128, 1}, {256, 1}, {256, 2, true},
                                                         {256, 4, true}, {256, 2}, {256, 4}, {256, 8}, {0, 0}};
bool serves(const RmsNormBackwardPlan& plan, const RmsNormBackwardParams& p);
RmsNormBackwardPlan choose_plan(const RmsNormBackwardParams& p, int multiprocessors);

// Whether rows, and the weight, are whole vectors of eight columns at multiples of 16 bytes.
bool has_vectors(const RmsNormParams& p);
bool has_vectors(const RmsNormBackwardParams& p);

// Whether y is wanted, the weight and x have one dtype, and each array has one stride between consecutive rows.
bool is_plain(const RmsNormParams& p);
// Whether each array has one stride between consecutive rows, below 2^31 bytes. An address then takes one instruction.
bool is_plain(const RmsNormBackwardParams& p);

RLK_CUDA_KERNELS(void rms_norm(const RmsNormParams& p, const RmsNormPlan& plan, cudaStream_t stream);)
RLK_CUDA_KERNELS(void rms_norm_backward(const RmsNormBackwardParams& p, const RmsNormBackwardPlan& plan,
                                        cudaStream_t stream);)

}  // namespace rlk::cuda
