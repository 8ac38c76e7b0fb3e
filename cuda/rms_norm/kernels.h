// Host entry points of the rms_norm kernels, one set per architecture, and the ways in which each can serve a call. All
// have the same bits. Arguments were checked in rms_norm.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/rms_norm_row.h"

namespace rlk::cuda {

// A row is `threads` threads with up to `vec8s` times eight columns each in registers; 0 threads: a block goes over the
// row twice, which serves any width and alignment.
struct RmsNormPlan {
  int threads = 0, vec8s = 0;
};
constexpr RmsNormPlan kRmsNormPlans[] = {{8, 4}, {32, 4}, {128, 4}, {256, 4}, {256, 8}, {0, 0}};
constexpr std::int64_t kMostFewRows = 1024;  // rows of a launch that keeps no memory busy for long, at most
bool serves(const RmsNormPlan& plan, const RmsNormParams& p);
RmsNormPlan choose_plan(const RmsNormParams& p);

// Groups: `threads` threads take 64 rows one after another, each row read once. Halves: two blocks a group, for dx and dweight
// together, of 16 bits and rows a stride apart; half of a row is read twice. Rows: a block a row for dx, and beside them threads with two columns of 64 rows for
// dweight: rows are read twice, any width and alignment.
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

// Whether y is wanted, with a weight of the rows' type, and the rows of every array are one stride apart.
bool is_plain(const RmsNormParams& p);
// Whether the rows of every array are one stride of less than 2^31 bytes apart: an address is one instruction then.
bool is_plain(const RmsNormBackwardParams& p);

RLK_CUDA_KERNELS(void rms_norm(const RmsNormParams& p, const RmsNormPlan& plan, cudaStream_t stream);)
RLK_CUDA_KERNELS(void rms_norm_backward(const RmsNormBackwardParams& p, const RmsNormBackwardPlan& plan,
                                        cudaStream_t stream);)

}  // namespace rlk::cuda
