// The forward of logprob on a GPU with 64-lane waves. A leaf is 128 columns. One wave computes the statistics of 32
// leaves, with two lanes per leaf. Another wave then combines the leaves of a row. The exponential is the portable one,
// so results have the CPU's bits. HBM bandwidth bounds the kernels, which read each logit once (vocab_size * sizeof(T)
// bytes per row).
#pragma once

#include "hip/common/element.h"
#include "hip/common/launch_shape.h"
#include "hip/common/wave.h"
#include "hip/logprob/launches.h"
#include "kernels/vocabulary/logprob_row.h"
#include "rlk/math/softmax_stats.h"

namespace rlk::hip {

// number of a lane's chains (sums in one accumulator): even lanes have chains 0 to 3, odd lanes chains 4 to 7
constexpr int kHalf = 4;
template <class T>
constexpr int kLeafBytes = leaf_bytes(sizeof(typename T::Storage));

RLK_DEVICE float max_nan(float a, float b) { return is_nan(a) ? a : is_nan(b) ? b : a > b ? a : b; }

// The leaves of a group in LDS. The columns of leaf i lie in order at i * kLeafBytes.
template <class T>
struct Tile {
  using Storage = typename T::Storage;
  unsigned char* memory;

  RLK_DEVICE Storage* leaf(int i) const { return reinterpret_cast<Storage*>(memory + i * kLeafBytes<T>); }
  RLK_DEVICE std::uint32_t* bitmap() const {
    return reinterpret_cast<std::uint32_t*>(memory + kGroupLeaves * kLeafBytes<T>);
  }
};

// What a lane computes of a group of leaves: half of the chains (lane % 2) of one leaf (lane / 2).
struct LeafHalf {
  LeafSpan span;
  int leaf, half;
};
RLK_DEVICE LeafHalf leaf_half(const GroupGrid& grid, Group group, int lane) {
  return {leaf_span(grid, group, lane / 2), lane / 2, lane % 2};
}

// Copies a group's leaves to LDS. In each round a lane copies one vec8. `row` is the address of
// global column 0, or would be its address if this shard held it.
template <class T>
RLK_DEVICE void load_group(const typename T::Storage* row, const GroupGrid& grid, Group group, const Tile<T>& tile,
                           int lane) {
  constexpr int kVec8s = kLeafColumns / kVec8;
  for (int i = lane; i < kGroupLeaves * kVec8s; i += kWave) {
    const int leaf = i / kVec8s, vec8 = i % kVec8s;
    const LeafSpan span = leaf_span(grid, group, leaf);
    const int left = span.columns - vec8 * kVec8;
    if (left <= 0) continue;
    const typename T::Storage* from = row + span.first + vec8 * kVec8;
    typename T::Storage* to = tile.leaf(leaf) + vec8 * kVec8;
    if (left >= kVec8 && reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
      __builtin_memcpy(__builtin_assume_aligned(to, 16), __builtin_assume_aligned(from, 16), kVec8 * sizeof *to);
    } else {
      for (int j = 0; j < kVec8 && j < left; ++j) to[j] = from[j];
    }
  }
  wave_barrier();
}

// Sets the columns of a group that are not in the row's kept set to -Inf. Returns status bits if the kept set is bad.
template <class T>
RLK_DEVICE std::int32_t restrict_group(const LogprobInput& p, const GroupGrid& grid, Group group, std::int64_t row,
                                       const Tile<T>& tile, int lane) {
  const KeptRange kept = kept_range(p, row);
  if (kept.bad) return kBadKept;
  if (!kept.restricts()) return kOk;
  std::uint32_t* bitmap = tile.bitmap();
  for (int i = lane; i < kKeptWords; i += kWave) bitmap[i] = 0;
  wave_barrier();
  // A column's bit is found by its leaf and its index in the leaf. Leaves of several parts are not contiguous in
  // memory.
  const std::int64_t target = target_of(p, row);
  const bool bad = scan_kept(p, kept, target, lane, kWave, [&](std::int64_t id) {
    const int leaf = leaf_of_column(grid, group, id);
    if (leaf < 0) return;
    const int column = static_cast<int>(id - leaf_span(grid, group, leaf).first);
    atomic_or(&bitmap[leaf * (kLeafColumns / 32) + column / 32], 1u << (column % 32));
  });
  const std::int32_t status = any(bad) ? kBadKept : kOk;
  wave_barrier();
  const LeafHalf mine = leaf_half(grid, group, lane);
  for (int column = mine.half; column < mine.span.columns; column += 2) {
    const std::uint32_t word = bitmap[mine.leaf * (kLeafColumns / 32) + column / 32];
    if (!(word >> (column % 32) & 1)) tile.leaf(mine.leaf)[column] = T::store(-infinity());
  }
  wave_barrier();
  return status;
}

// Loads four columns of a vec8 for a lane, and computes their z. Columns past the leaf's last column become -Inf, which
// contributes nothing.
template <class T>
RLK_DEVICE void load_half(const LogprobInput& p, const typename T::Storage* leaf, int first, int columns, float inverse,
                          float (&z)[kHalf]) {
  typename T::Storage x[kHalf];
  __builtin_memcpy(x, __builtin_assume_aligned(leaf + first, sizeof x), sizeof x);
#pragma unroll
  for (int r = 0; r < kHalf; ++r) {
    z[r] = first + r < columns ? scaled_logit(T::load(x[r]), p.logit_scale, p.softcap, inverse) : -infinity();
  }
}

// The two lanes of a leaf compute its statistics together. Both lanes receive the result.
template <class T, bool kMoments>
RLK_DEVICE SoftmaxStats leaf_stats(const LogprobInput& p, const typename T::Storage* leaf, int columns, int half,
                                   float c) {
  const float inverse = inverse_softcap(p);
  float z[kHalf], largest = -infinity();
  for (int first = half * kHalf; first < columns; first += kVec8) {
    load_half<T>(p, leaf, first, columns, inverse, z);
#pragma unroll
    for (int r = 0; r < kHalf; ++r) largest = max_nan(largest, z[r]);
  }
  largest = max_nan(largest, shuffle_xor(largest, 1));
  SoftmaxStats stats;
  const LeafReference reference = leaf_reference(c, largest, &stats);
  float S[kHalf] = {}, E[kHalf] = {}, Q[kHalf] = {};
  if (reference.usable) {
    const float addend = sub_rn(kStatsShift, reference.m);
    for (int first = half * kHalf; first < columns; first += kVec8) {
      load_half<T>(p, leaf, first, columns, inverse, z);
#pragma unroll
      for (int r = 0; r < kHalf; ++r) {
        const float clamped = z[r] > reference.q ? z[r] : reference.q;
        const float e = stat_exp_portable(clamped, c, addend);
        const bool counts = z[r] != -infinity();
        S[r] = counts ? add_rn(S[r], e) : S[r];
        if (kMoments) {
          E[r] = counts ? fma_rn(e, clamped, E[r]) : E[r];
          Q[r] = counts ? fma_rn(e, e, Q[r]) : Q[r];
        }
      }
    }
  }
  const auto total = [&](const float* chains) {
    const float mine = add_rn(add_rn(chains[0], chains[1]), add_rn(chains[2], chains[3]));
    return add_rn(mine, shuffle_xor(mine, 1));
  };
  const SoftmaxStats sums{reference.m, total(S), kMoments ? total(E) : 0.0f, kMoments ? total(Q) : 0.0f};
  return reference.usable ? sums : stats;
}

// Combines the lanes' statistics by a perfect binary tree, whose first step combines lanes at distance `first`. Every
// lane receives the root.
template <bool kMoments>
RLK_DEVICE SoftmaxStats tree_over_lanes(SoftmaxStats s, int first) {
  for (int distance = first; distance < kWave; distance *= 2) {
    SoftmaxStats other{shuffle_xor(s.m, distance), shuffle_xor(s.S, distance), 0.0f, 0.0f};
    if (kMoments) {
      other.E = shuffle_xor(s.E, distance);
      other.Q = shuffle_xor(s.Q, distance);
    }
    s = combine(s, other);
  }
  return s;
}

RLK_DEVICE void store_node(float* to, const SoftmaxStats& s) {
  to[0] = s.m;
  to[1] = s.S;
  to[2] = s.E;
  to[3] = s.Q;
}
RLK_DEVICE SoftmaxStats load_node(const float* from) { return {from[0], from[1], from[2], from[3]}; }
constexpr int kNodeFloats = kNodeBytes / 4;

// A block is one wave, which computes one group of one row of the launch.
template <class T, bool kMoments>
RLK_DEVICE void groups_kernel(const LogprobParams& p, const GroupGrid& grid, std::int64_t first_row, float* nodes) {
  const int lane = thread_id();
  const std::int64_t row = first_row + block_id_y();
  if (target_of(p, row) == p.ignore_index) return;
  const Group group = group_of_row(grid, block_id_x());
  const Tile<T> tile{lds()};
  load_group<T>(row_of<T>(p, row) - p.vocab_start, grid, group, tile, lane);
  const float temperature = temperature_of(p, row);
  std::int32_t failed = is_temperature(temperature) ? kOk : kBadTemperature;
  if (p.kept_offsets) failed |= restrict_group<T>(p, grid, group, row, tile, lane);
  SoftmaxStats node = failed_stats(failed);
  if (!failed) {
    const LeafHalf mine = leaf_half(grid, group, lane);
    node = tree_over_lanes<kMoments>(
        leaf_stats<T, kMoments>(p, tile.leaf(mine.leaf), mine.span.columns, mine.half, log2_scale(temperature)), 2);
  }
  if (lane == 0) {
    store_node(nodes + (std::int64_t{block_id_y()} * grid.nodes + node_of_group(grid, group)) * kNodeFloats, node);
  }
}

// A block is one wave, which computes the root of one row of the launch.
template <class T>
RLK_DEVICE void roots_kernel(const LogprobParams& p, const GroupGrid& grid, std::int64_t first_row,
                             const float* nodes) {
  const int lane = thread_id();
  const std::int64_t row = first_row + block_id_x();
  const std::int64_t target = target_of(p, row);
  if (target == p.ignore_index) {
    if (lane == 0) write_ignored(p, row);
    return;
  }
  const float* mine = nodes + std::int64_t{block_id_x()} * grid.nodes * kNodeFloats;
  const auto load = [&](int i) {
    return i < grid.nodes && is_group_node(grid, i) ? load_node(mine + i * kNodeFloats) : identity_stats();
  };
  SoftmaxStats root = tree_over_lanes<true>(load(lane), 1);
  if (grid.nodes > kWave) {
    SoftmaxStats of_wave = lane == 0 ? root : identity_stats();
    for (int i = 1; i * kWave < grid.nodes; ++i) {
      const SoftmaxStats s = tree_over_lanes<true>(load(i * kWave + lane), 1);
      if (lane == i) of_wave = s;
    }
    root = tree_over_lanes<true>(of_wave, 1);
  }
  if (lane == 0) write_outputs(p, row, root, target_z<T>(p, row, target));
}

}  // namespace rlk::hip
