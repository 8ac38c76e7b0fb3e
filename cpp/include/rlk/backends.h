// Declares the functions that the backends define, from the table in operators.inc. CPU functions return when their
// work is done; GPU functions enqueue the work. Only the dispatch and the tests call these functions.
#pragma once

#include <vector>

#include "rlk/base.h"

#define RLK_COMPOSED(operator, function, Params) \
  struct Params;                                 \
  void function(const Params& p, Device device, Stream stream);
#define RLK_RUNS(operator, function, Params)                    \
  struct Params;                                                \
  void function(const Params& p, Device device, Stream stream); \
  namespace cpu {                                               \
  void function(const Params& p);                               \
  }                                                             \
  namespace cuda {                                              \
  void function(const Params& p, int device, Stream stream);    \
  }                                                             \
  namespace hip {                                               \
  void function(const Params& p, int device, Stream stream);    \
  }
#define RLK_WORKSPACE(operator, function, Params)                          \
  std::int64_t function##_workspace_bytes(const Params& p, Device device); \
  namespace cuda {                                                         \
  std::int64_t function##_workspace_bytes(const Params& p, int device);    \
  }                                                                        \
  namespace hip {                                                          \
  std::int64_t function##_workspace_bytes(const Params& p, int device);    \
  }
namespace rlk {
#include "rlk/operators.inc"
}  // namespace rlk
#undef RLK_WORKSPACE
#undef RLK_COMPOSED
#undef RLK_RUNS

// Functions of CUDA alone.
namespace rlk {
struct LinearProducts;
}
namespace rlk::cuda {
std::int64_t attention_workspace_bytes(const AttentionParams& p, int device);
std::int64_t attention_backward_workspace_bytes(const AttentionBackwardParams& p, int device);
template <class Params>
std::int64_t linear_workspace_bytes(const Params& p, int device);
std::vector<LinearProducts> linear_vendor_products(int device);
}  // namespace rlk::cuda
