// Host entry points of the rms_norm kernels, one set per architecture, and the plans of the forward and the backward.
// All plans give the same bits. rms_norm.cpp checks the arguments.
#pragma once

#include "../common/launch.h"
#include "kernels/rows/rms_norm_row.h"

namespace rlk::cuda {

// A plan of the forward. A row has `threads` threads, and each thread holds up to `vec8s` times eight columns in
// registers. If `threads` is 0, a block reads the row twice; this plan supports any width and alignment.
struct RmsNormPlan {
  int threads = 0, vec8s = 0;
};
constexpr RmsNormPlan kRmsNormPlans[] = {{8, 4}, {32, 4}, {128, 4}, {256, 4}, {256, 8}, {0, 0}};
constexpr std::int64_t kMostFewRows = 1024;  // calls of at most this many rows are too short to keep memory busy
bool serves(const RmsNormPlan& plan, const RmsNormParams& p);
RmsNormPlan choose_plan(const RmsNormParams& p);

// A plan of the backward. There are three kinds. "Groups": `threads` threads process 64 rows one after another, and
// read each row once. "Halves": two blocks share a group of 64 rows, and half of each row is read twice; 16-bit types
// and arrays whose rows have one stride. "Rows": each block computes one row of dx; other blocks sum dweight, two
// columns of 64 rows per thread. "Rows" reads each row twice, and serves any width and alignment.
struct RmsNormBackwardPlan {
  int threads = 0, vec8s = 0;  // 0 threads: "rows"
  bool halves = false;
};
constexpr RmsNormBackwardPlan kRmsNormBackwardPlans[] = {{16, 1},        {32, 1},  {128, 1}, {256, 1}, {256, 2, true},
                                                         {256, 4, true}, {256, 2}, {256, 4}, {256, 8}, {0, 0}};
bool serves(const RmsNormBackwardPlan& plan, const RmsNormBackwardParams& p);
RmsNormBackwardPlan choose_plan(const RmsNormBackwardParams& p, int multiprocessors);

// Whether rows and the weight consist of whole vectors of eight columns, which begin at multiples of 16 bytes.
bool has_vectors(const RmsNormParams& p);
bool has_vectors(const RmsNormBackwardParams& p);

// Whether the caller wants y, the weight has the dtype of x, and each array has one stride between consecutive rows.
bool is_plain(const RmsNormParams& p);
// Whether each array has one stride between consecutive rows, and the stride is below 2^31 bytes. In this case an
// address takes one instruction.
bool is_plain(const RmsNormBackwardParams& p);

RLK_CUDA_KERNELS(void rms_norm(const RmsNormParams& p, const RmsNormPlan& plan, cudaStream_t stream);)
RLK_CUDA_KERNELS(void rms_norm_backward(const RmsNormBackwardParams& p, const RmsNormBackwardPlan& plan,
                                        cudaStream_t stream);)

}  // namespace rlk::cuda
