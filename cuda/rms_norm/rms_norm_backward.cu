// The backward of rms_norm. HBM limits the speed. The kernels read dy, h and the gradient of the new residual once, and
// write dx once. For dweight, they also write and read 4 bytes per column and group of 64 rows.
//
// rms_norm_groups_kernel: kThreads threads process a group of 64 rows, row by row. Thread t has vec8s t, t + kThreads,
//   ... of each row. It copies them into a ring of stages in shared memory, and reads only its own copies. Registers
//   hold the sums of dweight over the group's rows ("chains") for the thread's columns. The copies of later rows run
//   during the computation. rms_norm_halves_kernel: two blocks share a group. A block computes dx of every second row,
//   and the chains of dweight over all rows for half of the columns. So a block also reads half of each row whose dx
//   the other block computes, from L2. rms_norm_rows_kernel: serves any width and alignment, and calls with too few
//   groups for all multiprocessors. In each group, 64 blocks compute dx of one row each. Other blocks compute the
//   chains of dweight, each for some columns of all rows. rms_norm_fold_kernel: adds the groups' sums of dweight: a
//   tree over the groups of 8192 rows, and then one block of 8192 rows after another. A block of threads computes eight
//   columns. All architectures share this source; each has its own machine code.
#include <type_traits>

#include "../common/async_copy_groups_sm80.cuh"
#include "../common/async_copy_sm80.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/kernel_memory.h"
#include "kernels.h"
#include "row.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

constexpr int kGroupRows = kRmsNormGroupRows;
constexpr int kBlockGroups = static_cast<int>(kRmsNormBlock) / kGroupRows;  // groups per 8192 rows

// A pointer to a thread's first column in each row of a group. kPlain: is_plain() is true for the call.
template <class Element, bool kPlain>
class GroupRows {
 public:
  template <class Array>
  __device__ __forceinline__ GroupRows(Array* array, const RowLayout& rows, std::int64_t first_row, int column)
      : from_(static_cast<Element*>(array) + column + (kPlain ? first_row * rows.inner_stride : 0)),
        rows_(rows),
        first_row_(first_row) {}
  __device__ __forceinline__ Element* operator[](int row) const {
    if constexpr (kPlain) {
      using Byte = std::conditional_t<std::is_const_v<Element>, const unsigned char, unsigned char>;
      const auto stride = static_cast<std::uint32_t>(rows_.inner_stride) * static_cast<std::uint32_t>(sizeof(Element));
      const std::uint64_t bytes = std::uint64_t{static_cast<std::uint32_t>(row)} * stride;
      return reinterpret_cast<Element*>(reinterpret_cast<Byte*>(from_) + bytes);
    } else {
      return from_ + rows_.offset(first_row_ + row);
    }
  }

 private:
  Element* from_;
  const RowLayout& rows_;
  std::int64_t first_row_;
};

// The shape of a step of the kernel "groups". In a step a thread processes its columns of dy, of h and, if given, of
// the new residual's gradient, for one or two rows. Each step executes one barrier of the block. A step processes two
// rows if the values of both rows fit in registers (kKept).
template <class T, int kThreads, int kVec8s>
struct GroupShape {
  static constexpr int kArrays = 3;
  static constexpr bool kKept = Vec8<T>::kVectors * kVec8s <= 2;
  static constexpr int kRows = kKept ? 2 : 1;
  static constexpr int kBlock = kThreads < 128 ? 128 : kThreads, kGroups = kBlock / kThreads;
  static constexpr int kVectors = Vec8<T>::kVectors;
  static constexpr int kArrayBytes = kBlock * kVec8s * kVectors * 16, kStageBytes = kRows * kArrays * kArrayBytes;
  // kShared: shared memory per block if several blocks share a multiprocessor. A multiprocessor of compute capability
  // 9.0 has 227 KB. If too few stages fit into kShared, a multiprocessor has one block with up to 192 KB.
  static constexpr int kShared = kBlock < 256 ? 48 << 10 : 96 << 10;
  static constexpr bool kSeveral = kShared / kStageBytes >= (kKept ? 2 : 3);
  static constexpr int kMost = (kSeveral ? kShared : 192 << 10) / kStageBytes;
  static constexpr int kStages = kMost < 8 / kRows ? kMost : 8 / kRows;
  static constexpr int kBlocks = kBlock < 256 ? 4 : kSeveral ? 2 : 1;  // blocks per multiprocessor
  static_assert(kStages >= 2);
};

template <class T, int kThreads, int kVec8s, bool kPlain>
__global__ void __launch_bounds__((GroupShape<T, kThreads, kVec8s>::kBlock), (GroupShape<T, kThreads, kVec8s>::kBlocks))
    rms_norm_groups_kernel(const __grid_constant__ RmsNormBackwardParams p) {
  using Storage = typename T::Storage;
  using Shape = GroupShape<T, kThreads, kVec8s>;
  constexpr int kVectors = Shape::kVectors, kRows = Shape::kRows, kStages = Shape::kStages;
  static_assert(kVec8s == 1 || kThreads == kRmsNormLanes);  // all vec8s of a thread belong to one lane of the sum
  extern __shared__ uint4 ring[];
  __shared__ float rstd_of_row[Shape::kGroups][kGroupRows];
  __shared__ float of_warps[2][Shape::kGroups][kRows * kSumNodes<kThreads, 1>];  // one for even and one for odd steps
  const int of_block = static_cast<int>(threadIdx.x) / kThreads, thread = static_cast<int>(threadIdx.x) % kThreads;
  const std::int64_t group = std::int64_t{blockIdx.x} * Shape::kGroups + of_block, first_row = group * kGroupRows;
  const auto rows_from = [&](std::int64_t row) {
    const std::int64_t left = p.num_rows - row;
    return left < 0 ? 0 : left < kGroupRows ? static_cast<int>(left) : kGroupRows;
  };
  const int rows = rows_from(first_row);
  const int last = rows_from(std::int64_t{blockIdx.x} * Shape::kGroups * kGroupRows);  // rows of the block's first
                                                                                       // group, the fullest
  const int vec8s = static_cast<int>(p.columns) / kVec8;
  const bool third = p.d_new_residual != nullptr;
  using Rows = GroupRows<const Storage, kPlain>;
  const Rows dy_rows(p.dy, p.dy_rows, first_row, thread * kVec8), h_rows(p.h, p.h_rows, first_row, thread * kVec8);
  const Rows third_rows(p.d_new_residual, p.d_new_residual_rows, first_row, thread * kVec8);
  const GroupRows<Storage, kPlain> dx_rows(p.dx, p.dx_rows, first_row, thread * kVec8);
  wait_for_previous_kernel();

  for (int i = thread; i < rows; i += kThreads) rstd_of_row[of_block][i] = p.rstd[first_row + i];
  float w[kVec8s][kVec8], sums[kVec8s][kVec8]{};
#pragma unroll
  for (int i = 0; i < kVec8s; ++i) {
    const int vec8 = thread + i * kThreads;
    if (vec8 < vec8s) load_weights<T, true>(p, vec8 * kVec8, kVec8, w[i]);
  }

  // slot() returns this thread's place in the ring for 16 bytes: vector v of vec8 i of an array, in row r of a stage.
  uint4* const mine = ring + threadIdx.x;
  const auto slot = [&](int stage, int r, int array, int i, int v) {
    return mine + ((((stage * kRows + r) * Shape::kArrays + array) * kVec8s + i) * kVectors + v) * Shape::kBlock;
  };
  const auto read = [&](int stage, int r, int array, int i) {
    Vec8<T> x;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) x.v[v].v = *slot(stage, r, array, i, v);
    return x;
  };
  const auto copy_rows = [&](int row, int stage) {
#pragma unroll
    for (int r = 0; r < kRows; ++r, ++row) {
      if (row >= rows) continue;
      const Storage* const from[Shape::kArrays] = {dy_rows[row], h_rows[row], third ? third_rows[row] : nullptr};
#pragma unroll
      for (int array = 0; array < Shape::kArrays; ++array) {
        if (array == 2 && !third) continue;
#pragma unroll
        for (int i = 0; i < kVec8s; ++i) {
          const int vec8 = thread + i * kThreads;
          if (vec8 >= vec8s) continue;
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            copy_async_16(shared_address(slot(stage, r, array, i, v)),
                          from[array] + i * kThreads * kVec8 + v * Vector<T>::kColumns);
          }
        }
      }
    }
    copy_async_commit();
  };
#pragma unroll 1
  for (int ahead = 0; ahead < kStages - 1; ++ahead) copy_rows(ahead * kRows, ahead);
  if constexpr (Shape::kKept) copy_rows((kStages - 1) * kRows, kStages - 1);
  __syncthreads();  // rstd_of_row is complete
  int stage = 0, free_stage = kStages - 1, step = 0;
#pragma unroll 1
  for (int row = 0; row < last; row += kRows, ++step) {
    // If a thread copies the rows of a step to registers (kKept), the step's stage is free at once. Otherwise the stage
    // is free after the step.
    Vec8<T> dy[kRows][kVec8s]{}, h[kRows][kVec8s]{}, more[kRows][kVec8s]{};
    if constexpr (Shape::kKept) {
      copy_async_wait<kStages - 1>();
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kVec8s; ++i) {
          if (third) more[r][i] = read(stage, r, 2, i);
          dy[r][i] = read(stage, r, 0, i);
          h[r][i] = read(stage, r, 1, i);
        }
      }
    } else {
      copy_async_wait<kStages - 2>();
      copy_rows(row + (kStages - 1) * kRows, free_stage);  // the previous step has read this stage
    }
    float rstd[kRows], lanes[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) rstd[r] = row + r < rows ? rstd_of_row[of_block][row + r] : 0.0f;
    // Computes dy and xhat = h * rstd of vec8 i of row r.
    const auto values = [&](int r, int i, float(&g)[kVec8], float(&xhat)[kVec8]) {
      (Shape::kKept ? dy[r][i] : read(stage, r, 0, i)).to_float(g);
      (Shape::kKept ? h[r][i] : read(stage, r, 1, i)).to_float(xhat);
#pragma unroll
      for (int j = 0; j < kVec8; ++j) xhat[j] = __fmul_rn(xhat[j], rstd[r]);
    };
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kVec8s; ++i) {
        if (row + r >= rows || thread + i * kThreads >= vec8s) continue;
        float g[kVec8], xhat[kVec8];
        values(r, i, g, xhat);
#pragma unroll
        for (int j = 0; j < kVec8; ++j) lanes[r] = __fmaf_rn(__fmul_rn(g[j], w[i][j]), xhat[j], lanes[r]);
      }
    }
    float c[kRows] = {};
    if (p.dx != nullptr) {
      row_sums<kThreads, kRows>(lanes, of_warps[step % 2][of_block]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) c[r] = __fdiv_rn(lanes[r], static_cast<float>(p.columns));
    }
    // The thread issues the loads of later rows only after the sum. Earlier loads would delay the loads for which other
    // threads wait.
    if constexpr (Shape::kKept) copy_rows(row + kStages * kRows, stage);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool exists = row + r < rows;
      Storage* const dx = dx_rows[exists ? row + r : 0];
#pragma unroll
      for (int i = 0; i < kVec8s; ++i) {
        const int vec8 = thread + i * kThreads;
        if (!exists || vec8 >= vec8s) continue;
        float g[kVec8], z[kVec8];
        values(r, i, g, z);
        if (p.dx != nullptr) {
          float d[kVec8] = {};
          if (third) (Shape::kKept ? more[r][i] : read(stage, r, 2, i)).to_float(d);
#pragma unroll
          for (int j = 0; j < kVec8; ++j) d[j] = rms_norm_dx(__fmul_rn(g[j], w[i][j]), z[j], c[r], rstd[r], d[j]);
          store_vec8(dx + i * kThreads * kVec8, vec8_of<T>(d));
        }
        if (p.round_before_weight) round_vec8<T>(z);
#pragma unroll
        for (int j = 0; j < kVec8; ++j) sums[i][j] = __fmaf_rn(g[j], z[j], sums[i][j]);
      }
    }
    free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  allow_next_kernel();
  if (p.dweight == nullptr || rows == 0) return;
  float* const to = static_cast<float*>(p.workspace) + group * p.columns;
#pragma unroll
  for (int i = 0; i < kVec8s; ++i) {
    const int vec8 = thread + i * kThreads;
    if (vec8 >= vec8s) continue;
#pragma unroll
    for (int j = 0; j < kVec8; j += 4) {
      *reinterpret_cast<float4*>(to + vec8 * kVec8 + j) =
          make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
    }
  }
}

// The shape of a step of the kernel "halves", in which each of the two blocks of a group computes dx of one row. A
// stage holds the data of a step. For the block's own row, a thread has its vec8s of dy, h and, with kThird, the
// gradient of the new residual. For the other block's row, it has dy and h only of the kOwn vec8s for which it sums
// dweight.
template <class T, int kVec8s, bool kThird>
struct HalfShape {
  static constexpr int kThreads = kRmsNormLanes, kVectors = Vec8<T>::kVectors, kOwn = kVec8s / 2;
  static constexpr int kArrays = kThird ? 3 : 2, kOfRow = kArrays * kVec8s * kVectors;  // a thread has kOfRow vectors
                                                                                        // in its own row
  static constexpr int kStageBytes = (kOfRow + 2 * kOwn * kVectors) * kThreads * 16;
  static constexpr int kBlocks = kStageBytes <= 32 << 10 ? 2 : 1;  // blocks per multiprocessor
  static constexpr int kStages = (192 << 10) / kBlocks / kStageBytes;
  static_assert(kStages >= 2);
};

template <class T, int kVec8s, bool kThird>
__global__ void __launch_bounds__((HalfShape<T, kVec8s, kThird>::kThreads), (HalfShape<T, kVec8s, kThird>::kBlocks))
    rms_norm_halves_kernel(const __grid_constant__ RmsNormBackwardParams p) {
  using Storage = typename T::Storage;
  using Shape = HalfShape<T, kVec8s, kThird>;
  constexpr int kThreads = Shape::kThreads, kVectors = Shape::kVectors, kOwn = Shape::kOwn, kStages = Shape::kStages;
  extern __shared__ uint4 ring[];
  __shared__ float rstd_of_row[kGroupRows];
  __shared__ float of_warps[2][kSumNodes<kThreads, 1>];  // one for even and one for odd steps
  const int thread = static_cast<int>(threadIdx.x), half = static_cast<int>(blockIdx.x % 2);
  const std::int64_t group = blockIdx.x / 2, first_row = group * kGroupRows, left = p.num_rows - first_row;
  const int rows = left < kGroupRows ? static_cast<int>(left) : kGroupRows;
  const int vec8s = static_cast<int>(p.columns) / kVec8;
  const auto vec8_at = [&](int i) { return thread + i * kThreads; };
  using Rows = GroupRows<const Storage, true>;
  const Rows dy_rows(p.dy, p.dy_rows, first_row, thread * kVec8), h_rows(p.h, p.h_rows, first_row, thread * kVec8);
  const Rows third_rows(p.d_new_residual, p.d_new_residual_rows, first_row, thread * kVec8);
  const GroupRows<Storage, true> dx_rows(p.dx, p.dx_rows, first_row, thread * kVec8);
  wait_for_previous_kernel();

  if (thread < rows) rstd_of_row[thread] = p.rstd[first_row + thread];
  float w[kVec8s][kVec8], sums[kOwn][kVec8]{};
#pragma unroll
  for (int i = 0; i < kVec8s; ++i) {
    if (vec8_at(i) < vec8s) load_weights<T, true>(p, vec8_at(i) * kVec8, kVec8, w[i]);
  }

  constexpr int kOfStage = Shape::kStageBytes / 16 / kThreads;
  const auto slot = [&](int stage, int vector) { return ring + (stage * kOfStage + vector) * kThreads + thread; };
  const auto copy = [&](const Storage* row, int i, int stage, int vector) {
    if (vec8_at(i) >= vec8s) return;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      copy_async_16(shared_address(slot(stage, vector + v)), row + i * kThreads * kVec8 + v * Vector<T>::kColumns);
    }
  };
  const auto read = [&](int stage, int vector) {
    Vec8<T> x;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) x.v[v].v = *slot(stage, vector + v);
    return x;
  };
  const auto copy_step = [&](int step, int stage) {
    const int mine = 2 * step + half, other = mine ^ 1;
    if (mine < rows) {
      const Storage* const from[3] = {dy_rows[mine], h_rows[mine], kThird ? third_rows[mine] : nullptr};
#pragma unroll
      for (int array = 0; array < Shape::kArrays; ++array) {
#pragma unroll
        for (int i = 0; i < kVec8s; ++i) copy(from[array], i, stage, (array * kVec8s + i) * kVectors);
      }
    }
    if (other < rows) {
      const Storage* const from[2] = {dy_rows[other], h_rows[other]};
#pragma unroll
      for (int array = 0; array < 2; ++array) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
          copy(from[array], half * kOwn + j, stage, Shape::kOfRow + (array * kOwn + j) * kVectors);
        }
      }
    }
    copy_async_commit();
  };
#pragma unroll 1
  for (int step = 0; step < kStages; ++step) copy_step(step, step);
  __syncthreads();  // rstd_of_row is complete
  const auto to_xhat = [](const Vec8<T>& h, float rstd, float(&xhat)[kVec8]) {
    h.to_float(xhat);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) xhat[j] = __fmul_rn(xhat[j], rstd);
  };
  const auto add_to = [&](float(&sum)[kVec8], const float(&g)[kVec8], float(&xhat)[kVec8]) {
    if (p.round_before_weight) round_vec8<T>(xhat);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) sum[j] = __fmaf_rn(g[j], xhat[j], sum[j]);
  };
  int stage = 0;
#pragma unroll 1
  for (int step = 0; 2 * step < rows; ++step) {
    const int mine = 2 * step + half, other = mine ^ 1;
    copy_async_wait<kStages - 1>();
    Vec8<T> dy[kVec8s], h[kVec8s], more[kVec8s]{}, other_dy[kOwn], other_h[kOwn];
#pragma unroll
    for (int i = 0; i < kVec8s; ++i) {
      dy[i] = read(stage, i * kVectors);
      h[i] = read(stage, (kVec8s + i) * kVectors);
      if constexpr (kThird) more[i] = read(stage, (2 * kVec8s + i) * kVectors);
    }
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      other_dy[j] = read(stage, Shape::kOfRow + j * kVectors);
      other_h[j] = read(stage, Shape::kOfRow + (kOwn + j) * kVectors);
    }
    const bool is_mine = mine < rows;
    const float rstd = is_mine ? rstd_of_row[mine] : 0.0f;
    float lanes[1] = {};
#pragma unroll
    for (int i = 0; i < kVec8s; ++i) {
      if (!is_mine || vec8_at(i) >= vec8s) continue;
      float g[kVec8], xhat[kVec8];
      dy[i].to_float(g);
      to_xhat(h[i], rstd, xhat);
#pragma unroll
      for (int j = 0; j < kVec8; ++j) lanes[0] = __fmaf_rn(__fmul_rn(g[j], w[i][j]), xhat[j], lanes[0]);
    }
    copy_step(step + kStages, stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    const auto add_other = [&] {
      if (other >= rows) return;
      const float rstd_of_other = rstd_of_row[other];
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        if (vec8_at(half * kOwn + j) >= vec8s) continue;
        float g[kVec8], xhat[kVec8];
        other_dy[j].to_float(g);
        to_xhat(other_h[j], rstd_of_other, xhat);
        add_to(sums[j], g, xhat);
      }
    };
    if (half == 1) add_other();  // the other row comes before this block's row
    const float c = __fdiv_rn(row_sum<kThreads>(lanes, of_warps[step % 2]), static_cast<float>(p.columns));
    Storage* const dx = dx_rows[is_mine ? mine : 0];
#pragma unroll
    for (int i = 0; i < kVec8s; ++i) {
      if (!is_mine || vec8_at(i) >= vec8s) continue;
      float g[kVec8], xhat[kVec8], d[kVec8] = {};
      dy[i].to_float(g);
      to_xhat(h[i], rstd, xhat);
      if constexpr (kThird) more[i].to_float(d);
#pragma unroll
      for (int j = 0; j < kVec8; ++j) d[j] = rms_norm_dx(__fmul_rn(g[j], w[i][j]), xhat[j], c, rstd, d[j]);
      store_vec8(dx + i * kThreads * kVec8, vec8_of<T>(d));
      if (i / kOwn == half) add_to(sums[i % kOwn], g, xhat);
    }
    if (half == 0) add_other();  // the other row comes after this block's row
  }
  allow_next_kernel();
  float* const to = static_cast<float*>(p.workspace) + group * p.columns;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const int vec8 = vec8_at(half * kOwn + j);
    if (vec8 >= vec8s) continue;
#pragma unroll
    for (int k = 0; k < kVec8; k += 4) {
      *reinterpret_cast<float4*>(to + vec8 * kVec8 + k) =
          make_float4(sums[j][k], sums[j][k + 1], sums[j][k + 2], sums[j][k + 3]);
    }
  }
}

constexpr int kRowThreads = kRmsNormLanes;
constexpr int kChainRows = 16;    // a thread loads this many rows at once, since few threads share the work and each
                                  // waits for its loads
constexpr int kChainColumns = 2;  // columns per thread

// Loads two neighbouring columns, of which the first `count` exist. kVector: both exist, and the address is a multiple
// of their size.
template <class T, bool kVector>
__device__ __forceinline__ void load_pair(const typename T::Storage* from, int count, float (&z)[kChainColumns]) {
  using Storage = typename T::Storage;
  struct alignas(2 * sizeof(Storage)) Pair {
    Storage first, second;
  };
  if constexpr (kVector) {
    const Pair pair = *reinterpret_cast<const Pair*>(from);
    z[0] = T::load(pair.first);
    z[1] = T::load(pair.second);
  } else {
    z[0] = T::load(from[0]);
    z[1] = count > 1 ? T::load(from[1]) : 0.0f;
  }
}

template <class T, bool kVector>
__device__ __forceinline__ void dx_of_row(const RmsNormBackwardParams& p, std::int64_t row, float* of_warps) {
  using Storage = typename T::Storage;
  constexpr int kStep = kRowThreads * kVec8;
  const int columns = static_cast<int>(p.columns), first = static_cast<int>(threadIdx.x) * kVec8;
  const Storage* dy = static_cast<const Storage*>(p.dy) + p.dy_rows.offset(row);
  const Storage* h = static_cast<const Storage*>(p.h) + p.h_rows.offset(row);
  const float rstd = p.rstd[row];
  float lanes[1] = {};
#pragma unroll 1
  for (std::int64_t k = first; k < columns; k += kStep) {
    const int count = static_cast<int>(columns - k);
    float g[kVec8], x[kVec8], w[kVec8];
    load_columns<T, kVector>(dy + k, count, g);
    load_columns<T, kVector>(h + k, count, x);
    load_weights<T, kVector>(p, static_cast<int>(k), count, w);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) {
      if (kVector || j < count) lanes[0] = __fmaf_rn(__fmul_rn(g[j], w[j]), __fmul_rn(x[j], rstd), lanes[0]);
    }
  }
  const float c = __fdiv_rn(row_sum<kRowThreads>(lanes, of_warps), static_cast<float>(columns));
  const Storage* third = nullptr;
  if (p.d_new_residual != nullptr) {
    third = static_cast<const Storage*>(p.d_new_residual) + p.d_new_residual_rows.offset(row);
  }
  Storage* dx = static_cast<Storage*>(p.dx) + p.dx_rows.offset(row);
#pragma unroll 1
  for (std::int64_t k = first; k < columns; k += kStep) {
    const int count = static_cast<int>(columns - k);
    float g[kVec8], x[kVec8], w[kVec8], z[kVec8] = {};
    load_columns<T, kVector>(dy + k, count, g);
    load_columns<T, kVector>(h + k, count, x);
    load_weights<T, kVector>(p, static_cast<int>(k), count, w);
    if (third != nullptr) load_columns<T, kVector>(third + k, count, z);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) {
      z[j] = rms_norm_dx(__fmul_rn(g[j], w[j]), __fmul_rn(x[j], rstd), c, rstd, z[j]);
    }
    store_columns<T, kVector>(dx + k, count, z);
  }
}

template <class T, bool kVector>
__device__ __forceinline__ void chains_of_group(const RmsNormBackwardParams& p, std::int64_t group,
                                                std::int64_t column) {
  using Storage = typename T::Storage;
  if (column >= p.columns) return;
  const std::int64_t first = group * kGroupRows, left = p.num_rows - first;
  const int rows = left < kGroupRows ? static_cast<int>(left) : kGroupRows;
  const int count = p.columns - column < kChainColumns ? 1 : kChainColumns;
  const Storage* dy = static_cast<const Storage*>(p.dy) + column;
  const Storage* h = static_cast<const Storage*>(p.h) + column;
  float sums[kChainColumns] = {};
#pragma unroll 1
  for (int row = 0; row < rows; row += kChainRows) {
    // In place of rows past the end, the last row is loaded again. So there is no branch, and all loads are in flight
    // before the first wait.
    float a[kChainRows][kChainColumns], b[kChainRows][kChainColumns], rstd[kChainRows];
#pragma unroll
    for (int i = 0; i < kChainRows; ++i) {
      const std::int64_t from = first + min(row + i, rows - 1);
      load_pair<T, kVector>(dy + p.dy_rows.offset(from), count, a[i]);
      load_pair<T, kVector>(h + p.h_rows.offset(from), count, b[i]);
      rstd[i] = p.rstd[from];
    }
#pragma unroll
    for (int i = 0; i < kChainRows; ++i) {
#pragma unroll
      for (int j = 0; j < kChainColumns; ++j) {
        const float xhat = __fmul_rn(b[i][j], rstd[i]);
        const float sum = __fmaf_rn(a[i][j], p.round_before_weight ? T::load(T::store(xhat)) : xhat, sums[j]);
        sums[j] = row + i < rows ? sum : sums[j];
      }
    }
  }
  float* const to = static_cast<float*>(p.workspace) + group * p.columns + column;
#pragma unroll
  for (int j = 0; j < kChainColumns; ++j) {
    if (j < count) to[j] = sums[j];
  }
}

// Each group of 64 rows has `row_blocks` blocks for dx, one per row, or none if the caller does not want dx. After
// these come `column_blocks` blocks for dweight.
template <class T, bool kVector>
__global__ void __launch_bounds__(kRowThreads, 2)
    rms_norm_rows_kernel(const __grid_constant__ RmsNormBackwardParams p, int row_blocks, int column_blocks) {
  __shared__ float of_warps[kSumNodes<kRowThreads, 1>];
  const int blocks = row_blocks + column_blocks, local = static_cast<int>(blockIdx.x) % blocks;
  const std::int64_t group = blockIdx.x / static_cast<unsigned>(blocks), row = group * kGroupRows + local;
  wait_for_previous_kernel();
  if (local >= row_blocks) {
    chains_of_group<T, kVector>(p, group,
                                (std::int64_t{local - row_blocks} * kRowThreads + threadIdx.x) * kChainColumns);
  } else if (row < p.num_rows) {
    dx_of_row<T, kVector>(p, row, of_warps);
  }
  allow_next_kernel();
}

constexpr int kFoldColumns = 8;  // columns per block: 32 bytes, the smallest read of memory
constexpr int kFoldGroups = 16;  // groups that a thread adds at a time
constexpr int kFoldUnits = kBlockGroups / kFoldGroups;
constexpr int kFoldMostBlocks = 16;  // blocks of 8192 rows at a time

__global__ void __launch_bounds__(kFoldColumns* kFoldUnits* kFoldMostBlocks)
    rms_norm_fold_kernel(const __grid_constant__ RmsNormBackwardParams p) {
  __shared__ float of_unit[kFoldUnits * kFoldMostBlocks][kFoldColumns];
  const int local = static_cast<int>(threadIdx.x) % kFoldColumns, unit = static_cast<int>(threadIdx.x) / kFoldColumns;
  const int at_once = static_cast<int>(blockDim.x) / (kFoldColumns * kFoldUnits);
  const std::int64_t column = std::int64_t{blockIdx.x} * kFoldColumns + local;
  const std::int64_t groups = rms_norm_groups(p.num_rows);
  const float* const sums = static_cast<const float*>(p.workspace) + column;
  const bool exists = column < p.columns;
  wait_for_previous_kernel();
  bool is_first = p.main_grad == nullptr;
  float total = is_first || !exists ? 0.0f : p.main_grad[column];
#pragma unroll 1
  for (std::int64_t begin = 0; begin < groups; begin += std::int64_t{at_once} * kBlockGroups) {
    const std::int64_t first = begin + unit * kFoldGroups;
    float x[kFoldGroups];
#pragma unroll
    for (int i = 0; i < kFoldGroups; ++i) x[i] = exists && first + i < groups ? sums[(first + i) * p.columns] : 0.0f;
#pragma unroll
    for (int distance = 1; distance < kFoldGroups; distance *= 2) {
#pragma unroll
      for (int i = 0; i < kFoldGroups; i += 2 * distance) x[i] = __fadd_rn(x[i], x[i + distance]);
    }
    of_unit[unit][local] = x[0];
    __syncthreads();
    if (unit == 0) {
#pragma unroll 1
      for (int block = 0; block < at_once && begin + block * kBlockGroups < groups; ++block) {
        float y[kFoldUnits];
#pragma unroll
        for (int i = 0; i < kFoldUnits; ++i) y[i] = of_unit[block * kFoldUnits + i][local];
#pragma unroll
        for (int distance = 1; distance < kFoldUnits; distance *= 2) {
#pragma unroll
          for (int i = 0; i < kFoldUnits; i += 2 * distance) y[i] = __fadd_rn(y[i], y[i + distance]);
        }
        total = is_first ? y[0] : __fadd_rn(total, y[0]);
        is_first = false;
      }
    }
    __syncthreads();
  }
  if (unit == 0 && exists) store_element(p.dweight, p.dweight_dtype, column, Fp32::store(total));
}

template <bool kOverlap>
void run_fold(const RmsNormBackwardParams& p, cudaStream_t stream) {
  const std::int64_t blocks = (p.num_rows + kRmsNormBlock - 1) / kRmsNormBlock;
  const int at_once = static_cast<int>(std::clamp<std::int64_t>(blocks, 1, kFoldMostBlocks));
  const int grid = static_cast<int>((p.columns + kFoldColumns - 1) / kFoldColumns);
  launch_dependent<kOverlap>(rms_norm_fold_kernel, grid, at_once * kFoldColumns * kFoldUnits, 0, stream, p);
}

// Launches a kernel that has a ring of stages. If blocks begin while the previous kernel ends, they go to the
// multiprocessors that have room first. Some multiprocessors would get two blocks, and others none. So if there are
// enough multiprocessors, each block requests more than half of the shared memory, and gets a multiprocessor of its
// own.
template <bool kOverlap, class Shape, auto* kKernel>
void run_ring(const RmsNormBackwardParams& p, std::int64_t blocks, int threads, cudaStream_t stream) {
  constexpr int kBytes = Shape::kStages * Shape::kStageBytes;
  const int most = allow_shared_memory<kKernel>();
  RLK_CHECK(most >= kBytes, "rms_norm_backward: the device has shared memory for the plan");
  const auto count = static_cast<int>(checked_blocks(blocks, "rms_norm"));
  const bool alone = count <= multiprocessors(current_device());
  launch_dependent<kOverlap>(kKernel, count, threads, alone ? std::max(kBytes, most * 5 / 8) : kBytes, stream, p);
}

template <bool kOverlap, class T, int kThreads, int kVec8s>
void run_groups(const RmsNormBackwardParams& p, cudaStream_t stream) {
  using Shape = GroupShape<T, kThreads, kVec8s>;
  const std::int64_t blocks = (rms_norm_groups(p.num_rows) + Shape::kGroups - 1) / Shape::kGroups;
  if (is_plain(p)) {
    run_ring<kOverlap, Shape, &rms_norm_groups_kernel<T, kThreads, kVec8s, true>>(p, blocks, Shape::kBlock, stream);
  } else {
    run_ring<kOverlap, Shape, &rms_norm_groups_kernel<T, kThreads, kVec8s, false>>(p, blocks, Shape::kBlock, stream);
  }
}

template <bool kOverlap, class T, int kVec8s, bool kThird>
void run_halves(const RmsNormBackwardParams& p, cudaStream_t stream) {
  using Shape = HalfShape<T, kVec8s, kThird>;
  run_ring<kOverlap, Shape, &rms_norm_halves_kernel<T, kVec8s, kThird>>(p, 2 * rms_norm_groups(p.num_rows),
                                                                        Shape::kThreads, stream);
}
template <bool kOverlap, class T, int kVec8s>
void run_halves(const RmsNormBackwardParams& p, cudaStream_t stream) {
  p.d_new_residual != nullptr ? run_halves<kOverlap, T, kVec8s, true>(p, stream)
                              : run_halves<kOverlap, T, kVec8s, false>(p, stream);
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void rms_norm_backward(const RmsNormBackwardParams& p, const RmsNormBackwardPlan& plan, cudaStream_t stream) {
  if (p.num_rows > 0) {
    with_element_type(p.dtype, [&](auto t) {
      using T = decltype(t);
      if (plan.threads == 0) {
        const int row_blocks = p.dx != nullptr ? kGroupRows : 0;
        const int column_blocks =
            p.dweight != nullptr
                ? static_cast<int>((p.columns + kRowThreads * kChainColumns - 1) / (kRowThreads * kChainColumns))
                : 0;
        const unsigned blocks = checked_blocks(rms_norm_groups(p.num_rows) * (row_blocks + column_blocks), "rms_norm");
        launch_dependent<kOverlap>(has_vectors(p) ? rms_norm_rows_kernel<T, true> : rms_norm_rows_kernel<T, false>,
                                   static_cast<int>(blocks), kRowThreads, 0, stream, p, row_blocks, column_blocks);
      } else if (plan.halves) {
        if constexpr (T::kPacked) {
          plan.vec8s == 2 ? run_halves<kOverlap, T, 2>(p, stream) : run_halves<kOverlap, T, 4>(p, stream);
        }
      } else if (plan.threads == 16) {
        run_groups<kOverlap, T, 16, 1>(p, stream);
      } else if (plan.threads == 32) {
        run_groups<kOverlap, T, 32, 1>(p, stream);
      } else if (plan.threads == 128) {
        run_groups<kOverlap, T, 128, 1>(p, stream);
      } else if (plan.vec8s == 1) {
        run_groups<kOverlap, T, 256, 1>(p, stream);
      } else if (plan.vec8s == 2) {
        run_groups<kOverlap, T, 256, 2>(p, stream);
      } else if (plan.vec8s == 4) {
        run_groups<kOverlap, T, 256, 4>(p, stream);
      } else if constexpr (T::kPacked) {  // shared memory does not hold eight vec8s of fp32
        run_groups<kOverlap, T, 256, 8>(p, stream);
      }
    });
    check(cudaGetLastError(), "launch of rms_norm_backward");
  }
  if (p.dweight != nullptr) run_fold<kOverlap>(p, stream);
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
