// top_p without top_k on SM90: one launch computes each row in a cluster of blocks. Shared memory holds the row's
// columns from the load until the kept ids are written. Latency limits calls of few rows, and instructions limit calls
// of many rows.
#pragma once

#include "../common/dependent_launch.cuh"
#include "cluster_cut_sm90.cuh"
#include "kept_list.cuh"
#include "kept_place.cuh"

namespace rlk::cuda {
namespace {

template <class T, Exp kExp, int kBlocks>
class ClusterRow : ClusterCut<T, kExp, kBlocks> {
  using Cut = ClusterCut<T, kExp, kBlocks>;
  using Cut::batch_of;
  using Cut::c_;
  using Cut::chain_;
  using Cut::chunk_;
  using Cut::each_step;
  using Cut::edited;
  using Cut::find_last;
  using Cut::grid_;
  using Cut::group_of;
  using Cut::height_;
  using Cut::i_;
  using Cut::kBatch;
  using Cut::kBatches;
  using Cut::kGroupsAtOnce;
  using Cut::lane_;
  using Cut::leaf_of_group;
  using Cut::least_;
  using Cut::load;
  using Cut::m_;
  using Cut::meet;
  using Cut::of_block;
  using Cut::p_;
  using Cut::place_of_leaf;
  using Cut::range_of_row;
  using Cut::rank_;
  using Cut::row;
  using Cut::s_;
  using Cut::steps;
  using Cut::task_of;
  using Cut::warp_;
  using typename Cut::Exponential;
  using typename Cut::Place;
  using typename Cut::Storage;

 public:
  using Cut::clear_bins;
  using Cut::Cut;
  using Cut::find_columns;

  __device__ __forceinline__ void run() {
    const float2 own = load();
    const SampleRow want = sample_row_of<PlainMemory>(p_, row());
    c_ = log2_scale(want.temperature);
    const bool cut = want.top_p < 1.0f;
    if (rank_ == 0 && warp_ == 1 && lane_ < kDrawWords) {
      s_.words[lane_] = DrawWords<PlainMemory>(p_, row())(draw_word(lane_, height_));
    }
    cluster_wait();  // every block of the cluster has begun
    const float2 range = range_of_row(own);
    std::int32_t status = want.status;
    if (status == kOk && cut) {
      SoftmaxStats stats;
      const LeafReference reference = leaf_reference(c_, range.x, &stats);
      m_ = reference.m;
      least_ = fmaxf(reference.q, range.x - kMassRange / c_);
      if (!reference.usable) status = status_of(stats) | (stats.m == -infinity() ? kEmptyRow : kOk);
    }
    std::uint64_t last = kLastRank;
    if (status == kOk && cut) last = find_last(want.top_p, range);
    if (status == kOk) find_nodes(last);
    meet();
    std::uint32_t all = 0;
    if (status == kOk) all = kept_columns(grid_.groups);
    if (status == kOk && !cut) status = status_of_roots();
    finish(want, status, all);
  }

 private:
  // Computes the nodes and masks of the leaves, the roots of groups, and the number of columns that each group keeps.
  __device__ __forceinline__ void find_nodes(std::uint64_t last) {
    const bool cut = last != kLastRank;
    // A column is kept if its z reaches a bound. The bound is `least` for ids up to the last kept column's id, and
    // `above` for larger ids.
    const float least = cut ? z_of_rank(last) : -0x1.fffffep127f, above = cut ? next_above(least) : least;
    const int id_last = cut ? static_cast<int>(id_of_rank(last)) : 0;
    each_step([&](int step) {
      const Place place = place_of_leaf(step);
      const int group = group_of(step), first = place.first + chain_;
      SoftmaxStats stats;
      const LeafReference reference = leaf_reference(c_, s_.tops[group][leaf_of_group()], &stats);
      const float addend = Exponential::addend(reference.m);
      float sum = 0.0f;
      std::uint32_t words[kMaskWords];
#pragma unroll
      for (int batch = 0; batch < kBatches; ++batch) {
        float z[kBatch];
        std::uint32_t votes[kBatch];
        batch_of(step, batch, z);
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int id = first + (batch * kBatch + k) * kNumChains;
          const bool has = z[k] >= (id <= id_last ? least : above);
          const float e = Exponential::exponential(fmaxf(z[k], reference.q), c_, addend);
          sum = add_rn(sum, has ? e : 0.0f);
          votes[k] = __ballot_sync(kAllLanes, has);
        }
        words[batch] = bytes_of_leaf(votes);
      }
#pragma unroll
      for (int d = 1; d < kNumChains; d *= 2) sum = add_rn(sum, shuffle_xor(sum, d));
      if (!cut) {
        allowed_in_leaf(p_.allowed != nullptr ? p_.allowed + row() * p_.allowed_stride : nullptr, place.first,
                        place.columns, words);
      }
      const bool any = (words[0] | words[1] | words[2] | words[3]) != 0;
      if (reference.usable) stats = {reference.m, sum, 0.0f, 0.0f};
      if (!any) stats = identity_stats();
      if (chain_ == 0) {
        s_.masks[group][leaf_of_group()] = make_uint4(words[0], words[1], words[2], words[3]);
        s_.nodes[group][leaf_of_group()] = make_float2(stats.m, stats.S);
      }
    });
    __syncthreads();
    const int group = warp_, task = task_of(group);
    if (group >= steps() * kGroupsAtOnce || task >= grid_.groups) return;
    const float2 node = s_.nodes[group][lane_];
    const SoftmaxStats of_group = tree_over_lanes<false>({node.x, node.y, 0.0f, 0.0f});
    const std::uint32_t kept =
        __reduce_add_sync(kAllLanes, static_cast<std::uint32_t>(bits_of(s_.masks[group][lane_])));
    const int part = task / grid_.groups_per_part, step = task - part * grid_.groups_per_part;
    const int root = (part << height_) / kGroupLeaves + step;
    if (lane_ < kBlocks) {
      store_remote_8(of_block(s_.roots + root, lane_), make_float2(of_group.m, of_group.S));
      store_remote(of_block(s_.counts + task, lane_), kept);
    }
  }
  // The next float above a finite z. +0 and -0 give the same result.
  static __device__ __forceinline__ float next_above(float z) {
    const std::int32_t bits = rlk::bits_of(add_rn(z, 0.0f));
    return float_of(bits >= 0 ? bits + 1 : bits - 1);
  }
  // The mask word of the lane's leaf, from the warp's ballots of four chain steps. Each byte of a ballot belongs to one
  // of four leaves.
  __device__ __forceinline__ std::uint32_t bytes_of_leaf(const std::uint32_t (&votes)[kBatch]) const {
    const std::uint32_t leaf = static_cast<std::uint32_t>(lane_ / kNumChains), pick = leaf | (leaf + 4) << 4;
    const std::uint32_t low = __byte_perm(votes[0], votes[1], pick), high = __byte_perm(votes[2], votes[3], pick);
    return __byte_perm(low, high, 0x5410);
  }
  // The number of columns that the first `groups` groups of the row keep.
  __device__ __forceinline__ std::uint32_t kept_columns(int groups) const {
    std::uint32_t sum = 0;
#pragma unroll
    for (int k = 0; k < (kMostGroups + kWarp - 1) / kWarp; ++k) {
      const int task = k * kWarp + lane_;
      sum += task < groups ? s_.counts[task] : 0;
    }
    return __reduce_add_sync(kAllLanes, sum);
  }

  // Draws, and writes the results and the kept set. `all`: the number of kept columns.
  __device__ __forceinline__ void finish(const SampleRow& want, std::int32_t status, std::uint32_t all) {
    KeptPlace place(p_, chunk_, i_);
    const bool has_sets = p_.kept_offsets != nullptr;
    const std::int64_t kept = status != kOk || static_cast<std::int64_t>(all) == p_.valid_vocab ? 0 : all;
    // The kept ids of the call's first row begin at index 0, so the blocks of this row need not wait for other rows'
    // counts.
    const bool waits = has_sets && row() > 0;
    std::int64_t begin = kept <= p_.kept_capacity ? 0 : -1;
    const bool draws = rank_ == 0 && warp_ == 0;
    if (draws) {
      if (waits) cluster_arrive();
      draw(want, status);
      if (waits) cluster_wait();
      cluster_arrive();
    } else if (has_sets) {
      if (rank_ == 0 && warp_ == 1) {
        if (lane_ == 0) place.publish(kept);
        std::uint64_t of_rows = place.is_first() ? 0 : place.counts_before(lane_, kWarp);
#pragma unroll
        for (int d = 1; d < kWarp; d *= 2) of_rows += __shfl_xor_sync(kAllLanes, of_rows, d);
        std::int64_t own = 0;
        if (lane_ == 0) own = place.place(static_cast<std::int64_t>(of_rows), kept);
        own = __shfl_sync(kAllLanes, own, 0);
        if (waits && lane_ < kBlocks) store_remote_u64(of_block(&s_.begin, lane_), static_cast<std::uint64_t>(own));
      }
      if (waits) meet();
    }
    if (!draws) cluster_arrive_relaxed();  // before the ids are written: other blocks do not read them
    if (waits) begin = s_.begin;
    if (has_sets && kept > 0 && begin >= 0) {
#pragma unroll 1
      for (int step = 0; step < steps(); ++step) write_ids(p_.kept_ids + begin, step);
    }
    cluster_wait();  // block 0 has read the nodes of other blocks, and written the results
    if (has_sets && rank_ == 0 && warp_ == 1 && lane_ == 0) place.mark_overflow();
  }
  __device__ __forceinline__ int num_roots() const { return (kNumParts << height_) / kWarp; }
  // The status of the tree above the roots of all groups.
  __device__ __forceinline__ std::int32_t status_of_roots() const {
    std::uint32_t faults = 0;
    bool any = false;
#pragma unroll 1
    for (int i = lane_; i < num_roots(); i += kWarp) {
      faults |= static_cast<std::uint32_t>(status_of({s_.roots[i].x, s_.roots[i].y, 0.0f, 0.0f}));
      any = any || s_.roots[i].x != -infinity();
    }
    faults = __reduce_or_sync(kAllLanes, faults);
    return static_cast<std::int32_t>(faults) | (__any_sync(kAllLanes, any) ? kOk : kEmptyRow);
  }
  // The first warp of block 0 draws and writes the results.
  __device__ __forceinline__ void draw(const SampleRow& want, std::int32_t status) const {
    std::int64_t id = -1;
    float logprob = canonical_nan();
    if (status == kOk) {
      const auto root_at = [&](int i) {
        const float2 root = i < num_roots() ? s_.roots[i] : make_float2(-infinity(), 0.0f);
        return SoftmaxStats{root.x, root.y, 0.0f, 0.0f};
      };
      const DrawnLane of_roots = draw_over_nodes(num_roots(), root_at, s_.words);
      const int per_part = (1 << height_) / kGroupLeaves;
      const int part = of_roots.lane / per_part, step = of_roots.lane - part * per_part;
      const int task = part * grid_.groups_per_part + step, group = task / kBlocks, rank = task % kBlocks;
      const float2 node = load_remote(&s_.nodes[group][lane_], rank);
      const int leaf = draw_over_lanes({node.x, node.y, 0.0f, 0.0f}, 0, s_.words).lane;
      const float m = __shfl_sync(kAllLanes, node.x, leaf);
      const uint4 mask = load_remote(&s_.masks[group][leaf], rank);
      const std::uint32_t words[] = {mask.x, mask.y, mask.z, mask.w};
      const int first = grid_.part_first[part] + (step * kGroupLeaves + leaf) * kLeafColumns;
      const LeafReference reference = {m, leaf_clamp(c_, m), true};
      const Storage* const from = static_cast<const Storage*>(p_.logits) + row() * p_.logits_stride + first;
      float z[kOwnColumns], terms[kOwnColumns];
#pragma unroll
      for (int k = 0; k < kOwnColumns; ++k) {
        const int column = k * kWarp + lane_;
        const bool has = (words[k] >> lane_ & 1) != 0;
        z[k] = has ? T::load(from[column]) : -infinity();
        if (sizeof(Storage) == sizeof(float) && p_.edited != nullptr && has) z[k] = edited(row(), first + column, z[k]);
      }
#pragma unroll
      for (int k = 0; k < kOwnColumns; ++k) {
        const float e = Exponential::exponential(fmaxf(z[k], reference.q), c_, Exponential::addend(m));
        terms[k] = z[k] == -infinity() ? 0.0f : e;
      }
      const int column = draw_column(terms, s_.words);
      id = first + column;
      logprob = logprob_outputs(of_roots.root, z_in_lanes(z, column), want.temperature).logprob;
    }
    if (lane_ != 0) return;
    p_.ids[row()] = id;
    p_.status[row()] = status;
    if (p_.logprob != nullptr) p_.logprob[row()] = logprob;
  }
  // Writes the kept ids of the warp's four leaves in a step. `to`: where the row's ids begin.
  __device__ __forceinline__ void write_ids(std::int32_t* to, int step) const {
    const int group = group_of(step), leaf = warp_ % kGroupWarps * kAtOnce;
    if (task_of(group) >= grid_.groups) return;
    const auto own = static_cast<std::uint32_t>(lane_ < leaf ? bits_of(s_.masks[group][lane_]) : 0);
    asm volatile("" : "+l"(to));  // makes the compiler keep `to`, so all stores use `to` plus offsets
    __builtin_assume(__isGlobal(to));
    // Each lane counts the bits of one word of the leaves' masks. The sum over earlier words is where its ids begin.
    constexpr int kWords = kAtOnce * kMaskWords;
    const auto* const masks = s_.masks[group] + leaf;
    const int count = lane_ < kWords ? set_bits_of(reinterpret_cast<const std::uint32_t*>(masks)[lane_ % kWords]) : 0;
    int begin = count;
#pragma unroll
    for (int d = 1; d < kWords; d *= 2) {
      const int before = __shfl_up_sync(kAllLanes, begin, d);
      if (lane_ >= d) begin += before;
    }
    begin += static_cast<int>(kept_columns(task_of(group)) + __reduce_add_sync(kAllLanes, own)) - count;
    int first = __shfl_sync(kAllLanes, place_of_leaf(step).first, 0) + lane_;
    const std::uint32_t bit = 1u << lane_;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, first += kLeafColumns) {
      const uint4 mask = masks[i];
      const std::uint32_t words[kMaskWords] = {mask.x, mask.y, mask.z, mask.w};
      if ((words[0] | words[1] | words[2] | words[3]) == 0) continue;
#pragma unroll
      for (int k = 0; k < kMaskWords; ++k) {
        const int at = __shfl_sync(kAllLanes, begin, i * kMaskWords + k);
        if ((words[k] & bit) != 0) to[at + static_cast<int>(set_bits_of(words[k] & (bit - 1)))] = first + k * kWarp;
      }
    }
  }
};

}  // namespace
}  // namespace rlk::cuda
