// rope for queries and keys in one launch. HBM limits the speed: heads are read once and written once. All heads of a
// token have the same angles, so every read of the angles except the first hits a cache.
//
// rope_vec8s_kernel: a thread has columns [c, c + 8) and [d, d + 8), d = c + rotary_dim / 2, of kHeads heads of a
// token. The ranges hold the first and the second columns of eight pairs. If pairs are interleaved, each of the two
// vec8s holds four whole pairs. In both layouts neighbouring threads read neighbouring vectors. The thread first loads
// all vec8s, then the position and the angles, and then rotates every head by these angles. Separate threads copy the
// columns that are not rotated. rope_lanes_kernel (lanes_sm90.cuh, many tokens): a thread has one vec8 of each of two
// heads, and lanes exchange vec8s. rope_stream_kernel (stream_sm90.cuh, many tokens): TMA moves whole tokens through
// shared memory. rope_elements_kernel: one thread rotates one pair of one head. This form supports any width and any
// alignment.
#include <algorithm>

#include "../common/dependent_launch.cuh"
#include "../common/element_dtype.cuh"
#include "rotate.cuh"
#if RLK_CUDA_SM90
#include "lanes_sm90.cuh"
#include "stream_sm90.cuh"
#endif

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// head_in() and head_out() return the address of a head of a token in the input and in the output. The query heads are
// numbered first, and then the key heads.
template <class T>
__device__ __forceinline__ const typename T::Storage* head_in(const RopeParams& p, const RopePlace& at, int head) {
  const int queries = static_cast<int>(p.q.num_heads);
  const RopeHeads& heads = head < queries ? p.q : p.k;
  const int i = head < queries ? head : head - queries;
  return static_cast<const typename T::Storage*>(heads.x) + at.offset(heads.x_tokens) + i * heads.x_head_stride;
}
template <class T>
__device__ __forceinline__ typename T::Storage* head_out(const RopeParams& p, const RopePlace& at, int head) {
  const int queries = static_cast<int>(p.q.num_heads);
  const RopeHeads& heads = head < queries ? p.q : p.k;
  const int i = head < queries ? head : head - queries;
  return static_cast<typename T::Storage*>(heads.y) + at.offset(heads.y_tokens) + i * heads.y_head_stride;
}

// The number of blocks per multiprocessor. It is limited because a thread needs registers for its loads in flight.
template <class T, int kHeads, class Angles>
constexpr int kRopeBlocks = kHeads* Vec8<T>::kVectors >= 4   ? 4
                            : kHeads* Vec8<T>::kVectors == 2 ? (Angles::kRegisters <= 16 ? 6 : 5)
                                                             : (Angles::kRegisters <= 16 ? 8 : 6);

template <class T, int kHeads, class Angles>
__global__ void __launch_bounds__(kRopeThreads, (kRopeBlocks<T, kHeads, Angles>))
    rope_vec8s_kernel(const __grid_constant__ RopeParams p, const __grid_constant__ RopeGrid g) {
  allow_next_kernel();
  const RopePlace at(p, g, blockIdx.x, threadIdx.x);
  const int heads = static_cast<int>(p.q.num_heads + p.k.num_heads), lanes = static_cast<int>(g.lanes.value);
  if constexpr (kHeads == 1) {  // only for few tokens: with many, prefetches make the launch 2 % slower
    if (at.exists && at.first_unit == 0 && at.lane < heads) {
      prefetch_to_l2(head_in<T>(p, at, at.lane), static_cast<std::uint32_t>(p.head_dim * sizeof(typename T::Storage)));
    }
  }
  wait_for_previous_kernel();
  if (!at.exists) return;
#pragma unroll 1
  for (int unit = at.first_unit; unit < g.units; unit += static_cast<int>(g.threads.value)) {
    const bool rotates = unit < g.rotated;
    const int rotary_dim = static_cast<int>(p.rotary_dim), head_dim = static_cast<int>(p.head_dim);
    const int column_a = rotates ? unit * kVec8 : rotary_dim + (unit - g.rotated) * kVec8;
    const int column_b = column_a + (rotates ? rotary_dim / 2 : (g.units - g.rotated) * kVec8);
    const bool has_b = column_b < head_dim;  // false: an odd number of vec8s is only copied, and this is the last
    Vec8<T> a[kHeads], b[kHeads];
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const int head = at.lane + j * lanes;
      if (head >= heads) continue;
      const typename T::Storage* x = head_in<T>(p, at, head);
      a[j] = load_vec8_once<T>(x + column_a);
      if (has_b) b[j] = load_vec8_once<T>(x + column_b);
    }
    Angles angles;
    if (rotates) angles.load(p, TableAngles{p, at}, column_a, column_b);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const int head = at.lane + j * lanes;
      if (head >= heads) continue;
      if (rotates) rotate_vec8s<T>(p, angles, &a[j], &b[j]);
      typename T::Storage* y = head_out<T>(p, at, head);
      store_vec8<T>(y + column_a, a[j]);
      if (has_b) store_vec8<T>(y + column_b, b[j]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kRopeThreads)
    rope_elements_kernel(const __grid_constant__ RopeParams p, const __grid_constant__ RopeGrid g) {
  const RopePlace at(p, g, blockIdx.x, threadIdx.x);
  allow_next_kernel();
  wait_for_previous_kernel();
  if (!at.exists) return;
  const typename T::Storage* x = head_in<T>(p, at, at.lane);
  typename T::Storage* y = head_out<T>(p, at, at.lane);
#pragma unroll 1
  for (int unit = at.first_unit; unit < g.units; unit += static_cast<int>(g.threads.value)) {
    if (unit >= g.rotated) {
      const int column = unit + g.rotated;  // the first g.rotated units have two columns each
      y[column] = x[column];
      continue;
    }
    const int column_a = p.interleaved ? 2 * unit : unit;
    const int column_b = p.interleaved ? 2 * unit + 1 : unit + static_cast<int>(p.rotary_dim) / 2;
    const bool per_pair = p.width < p.rotary_dim;
    const RopeRows rows = TableAngles{p, at}.rows_of_pair(unit);
    const auto angle = [&](const void* from, std::int64_t row, int column) {
      if (!rows.exist) return canonical_nan();
      const float value = load_element(from, p.angle_dtype, row + (per_pair ? unit : column));
      return p.round_products ? T::load(T::store(value)) : value;
    };
    RopeAngle<float> by = {angle(p.cos.data, rows.cos, column_a), angle(p.sin.data, rows.sin, column_a),
                           angle(p.cos.data, rows.cos, column_b), angle(p.sin.data, rows.sin, column_b)};
    if (p.transposed) by = {by.cos_a, -by.sin_b, by.cos_b, -by.sin_a};
    float a = T::load(x[column_a]), b = T::load(x[column_b]);
    if (p.round_products) {
      rope_rotate_rounded(
          by, [](float value) { return T::load(T::store(value)); }, &a, &b);
    } else {
      rope_rotate(by, &a, &b);
    }
    y[column_a] = T::store(a);
    y[column_b] = T::store(b);
  }
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void rope(const RopeParams& p, const RopePlan& plan, cudaStream_t stream) {
#if RLK_CUDA_SM90
  if (plan.streams) return stream_rope(p, stream);
  if (plan.lanes) return lanes_rope(p, stream);
#endif
  for (std::int64_t first = 0; first < p.num_tokens;) {
    RopeGrid g;
    first += rope_grid(p, plan.heads > 0, std::max(plan.heads, 1), kRopeThreads, first, &g);
    const int blocks = static_cast<int>(rope_blocks(g));
    with_element_type(p.dtype, [&](auto t) {
      using T = decltype(t);
      const auto launch = [&](auto* kernel) {
        launch_dependent<kOverlap>(kernel, blocks, kRopeThreads, 0, stream, p, g);
      };
      if (plan.heads == 0) return launch(rope_elements_kernel<T>);
      with_angles<T>(p, [&](auto angles) {
        using Angles = decltype(angles);
        if (plan.heads == 1) {
          launch(rope_vec8s_kernel<T, 1, Angles>);
        } else if (plan.heads == 2) {
          launch(rope_vec8s_kernel<T, 2, Angles>);
        } else if constexpr (T::kPacked) {  // registers do not hold four heads of fp32
          launch(rope_vec8s_kernel<T, 4, Angles>);
        }
      });
    });
  }
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
