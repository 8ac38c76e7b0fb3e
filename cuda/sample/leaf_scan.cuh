// The passes of sample over float32 logits. Eight lanes share a leaf. Each lane loads the columns of one chain into
// registers, without a copy in shared memory. A multiprocessor therefore holds many warps, and some compute while
// others wait for memory. Bound by HBM: each pass reads each logit once. All architectures share this source; each has
// its own machine code.
#pragma once

#include "scan.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kLeafSteps = kLeafColumns / kNumChains, kAtOnce = kWarp / kNumChains;  // leaves of a warp at once
constexpr int kMostInside = kWarp * kLeafSteps;  // columns in the bracket that a warp collects before it lists them
constexpr int kLeafScanWarps = 8;                // warps per block

// Processes the leaves of a group, kAtOnce leaves at a time.
template <class T, Exp kExp, ScanPass kPass>
class LeafScan {
  using Storage = typename T::Storage;
  static constexpr bool kHasMask = kPass == ScanPass::kFirst || kPass == ScanPass::kMasses;
  static constexpr bool kHasEdits = kPass != ScanPass::kRaw;

 public:
  struct Shared {  // results that warps keep for their group
    float2 nodes[kWarp];
    float tops[kWarp];
    std::uint8_t leaves[kWarp];
    uint2 inside[kPass == ScanPass::kMasses ? kMostInside : 1];  // z and place of a warp's columns in the bracket
    uint4 allowed[kHasMask ? kWarp : 1], edited[kHasEdits ? kWarp : 1];  // bits of columns in a warp's leaves
  };

  // `together`: the warps of a block share one group and the results of this group. `shared`: one element for each
  // warp.
  __device__ __forceinline__ LeafScan(const SampleParams& p, const GroupGrid& grid, const ScanWork& work,
                                      Shared* shared, const bool& together)
      : p_(p),
        grid_(grid),
        work_(work),
        s_(shared[together ? 0 : warp()]),
        mine_(shared[warp()]),
        together_(together),
        lane_(static_cast<int>(threadIdx.x % kWarp)),
        chain_(lane_ % kNumChains),
        quarter_(lane_ / kNumChains),
        slots_(std::int64_t{kNumParts} << work.height),
        whole_(grid.groups_per_part > 0) {}

  __device__ __forceinline__ void run(int task) {
    const int i = locate(task);
    if (!takes(i)) return;
    const int row = static_cast<int>(work_.chunk.first) + i;
    leaves_ = whole_ ? max(0, min((columns_ + kLeafColumns - 1) / kLeafColumns, kGroupLeaves)) : kGroupLeaves;
    own_ = span_of(lane_);
    slot_ = slot_of(lane_);
    load_bits(row);
    if constexpr (kPass == ScanPass::kKept) {
      run_kept(row, i);
    } else if constexpr (kPass == ScanPass::kMasses) {
      run_masses(row, i);
    } else {
      run_nodes(row, i);
    }
  }

 private:
  // Sets the group of a task. Returns the row's number in the chunk.
  __device__ __forceinline__ int locate(int task) {
    const int i = static_cast<int>(work_.groups.quotient(task));
    const int index = task - i * static_cast<int>(work_.groups.value);
    const int part = static_cast<int>(work_.steps.quotient(index));
    group_ = {whole_ ? part : index * grid_.parts_per_group, index - part * static_cast<int>(work_.steps.value)};
    first_ = grid_.part_first[group_.part] + group_.step * kGroupColumns;
    columns_ = grid_.part_last[group_.part] - first_;
    const int row = static_cast<int>(work_.chunk.first) + i;
    logits_ = static_cast<const Storage*>(p_.logits) + row * p_.logits_stride;
    return i;
  }
  // The warp's first leaf, the distance to its next leaf, and whether the warp stores the results of the group.
  __device__ __forceinline__ int first_leaf() const { return together_ ? warp() * kAtOnce : 0; }
  __device__ __forceinline__ int step() const { return together_ ? kLeafScanWarps * kAtOnce : kAtOnce; }
  __device__ __forceinline__ bool ends() const { return !together_ || warp() == 0; }
  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x / kWarp); }
  __device__ __forceinline__ void barrier() const { together_ ? __syncthreads() : __syncwarp(); }
  __device__ __forceinline__ bool takes(int i) const {
    if constexpr (kPass == ScanPass::kMasses) return work_.chunk.states[i].waits == kForMasses;
    if constexpr (kPass == ScanPass::kKept) return work_.chunk.states[i].waits == kForTree;
    return kPass != ScanPass::kRaw || p_.ids[work_.chunk.first + i] >= 0;
  }
  // A leaf of the group, below 32.
  __device__ __forceinline__ LeafSpan span_of(int leaf) const {
    if (!whole_) return leaf_span(grid_, group_, leaf);
    const int left = columns_ - leaf * kLeafColumns;
    return {first_ + leaf * kLeafColumns, max(0, min(left, kLeafColumns))};
  }
  __device__ __forceinline__ int slot_of(int leaf) const {
    if (whole_) return (group_.part << work_.height) + group_.step * kGroupLeaves + leaf;
    return (group_.part + leaf / grid_.leaves << work_.height) + leaf % grid_.leaves;
  }
  // Loads two bits for each of the group's columns: whether the column is allowed, and whether it is edited. Each lane
  // has a leaf.
  __device__ __forceinline__ void load_bits(int row) const {
    const bool masked = kHasMask && p_.allowed != nullptr, edited = kHasEdits && p_.edited != nullptr;
    if (!masked && !edited) return;
    std::uint32_t words[kMaskWords];
    __syncwarp();  // the lanes have read the bits of the previous group
    if (masked) {
      allowed_in_leaf(p_.allowed + row * p_.allowed_stride, own_.first, own_.columns, words);
      mine_.allowed[lane_] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (edited) {
      allowed_in_leaf(p_.edited + row * edit_words(p_.vocab_size), own_.first, own_.columns, words);
      mine_.edited[lane_] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    __syncwarp();
  }
  // The bits of a leaf, shifted right by the lane's chain: the lane's k-th column has bit k % 4 * kNumChains of word k
  // / 4.
  __device__ __forceinline__ void bits_from_chain(const uint4& of, std::uint32_t (&words)[kMaskWords]) const {
    words[0] = of.x >> chain_;
    words[1] = of.y >> chain_;
    words[2] = of.z >> chain_;
    words[3] = of.w >> chain_;
  }
  static __device__ __forceinline__ bool has_bit(const std::uint32_t (&words)[kMaskWords], int k) {
    return (words[k / 4] & 1u << (k % 4 * kNumChains)) != 0;
  }
  // Loads z of the lane's columns, and sets -Inf for missing columns. `at`: the leaf's number in the group.
  __device__ __forceinline__ void load(int i, const LeafSpan& leaf, int at, float (&z)[kLeafSteps]) const {
    const Storage* const from = logits_ + leaf.first + chain_;
    if (kHasEdits && p_.edited != nullptr) {  // each column is loaded once, from `edits` if it is edited
      const std::int64_t row = work_.chunk.first + i;
      const float* const edits = p_.edits + row * p_.vocab_size + leaf.first + chain_;
      std::uint32_t words[kMaskWords];
      bits_from_chain(mine_.edited[at], words);
#pragma unroll
      for (int k = 0; k < kLeafSteps; ++k) {
        const float* const column = has_bit(words, k) ? edits : reinterpret_cast<const float*>(from);
        z[k] = k * kNumChains + chain_ < leaf.columns ? column[k * kNumChains] : -infinity();
      }
      return;
    }
    if (__all_sync(kAllLanes, leaf.columns == kLeafColumns)) {
#pragma unroll
      for (int k = 0; k < kLeafSteps; ++k) z[k] = T::load(from[k * kNumChains]);
    } else {
#pragma unroll
      for (int k = 0; k < kLeafSteps; ++k) {
        z[k] = k * kNumChains + chain_ < leaf.columns ? T::load(from[k * kNumChains]) : -infinity();
      }
    }
  }
  // Sets z to -Inf for the lane's columns that are not allowed. `at`: the leaf's number in the group.
  __device__ __forceinline__ void drop(int at, float (&z)[kLeafSteps]) const {
    std::uint32_t words[kMaskWords];
    bits_from_chain(mine_.allowed[at], words);
#pragma unroll
    for (int k = 0; k < kLeafSteps; ++k) {
      if (!has_bit(words, k)) z[k] = -infinity();
    }
  }
  __device__ __forceinline__ float sum_of_chains(float sum) const {
#pragma unroll
    for (int d = 1; d < kNumChains; d *= 2) sum = add_rn(sum, shuffle_xor(sum, d));
    return sum;
  }

  // Runs the first pass or the raw pass (the pass for raw_logprob).
  __device__ __forceinline__ void run_nodes(int row, int i) {
    SampleRow want = {1.0f, 1.0f, 0.0f, 0, false, kOk};
    if constexpr (kPass == ScanPass::kFirst) want = sample_row_of<PlainMemory>(p_, row);
    if (want.status != kOk) return;
    const bool whole = kPass == ScanPass::kRaw || want.greedy || !want.truncates();
    const bool masked = kPass == ScanPass::kFirst && p_.allowed != nullptr;
    const bool has_node = whole || cuts_by_mass(p_, want);
    const bool has_top = !whole || want.greedy || p_.top_ids != nullptr;
    const bool has_mask =
        kPass == ScanPass::kFirst && whole && (p_.top_ids != nullptr || (masked && p_.kept_offsets != nullptr));
    const bool samples = kPass == ScanPass::kFirst && takes_sample(p_, want, work_.chunk);
    float* const sample = reinterpret_cast<float*>(work_.chunk.listed + i * work_.chunk.most_listed);
    const float c = log2_scale(want.temperature);
#pragma unroll 1
    for (int base = first_leaf(); base < leaves_; base += step()) {
      const LeafSpan leaf = span_of(base + quarter_);
      float z[kLeafSteps];
      load(i, leaf, base + quarter_, z);
      if (masked) drop(base + quarter_, z);
      if (samples && leaf.columns > 0) {
        // Samples eight consecutive columns of each leaf. The columns' place in the leaf differs between neighbouring
        // leaves.
        const bool odd = (quarter_ & 1) != 0, high = (quarter_ & 2) != 0;
        static_assert(kSampledColumns == kNumChains);
        sample[slot_of(base + quarter_) * kSampledColumns + chain_] = high ? odd ? z[13] : z[9] : odd ? z[5] : z[1];
      }
      float largest = z[0], smallest = z[0];
#pragma unroll
      for (int k = 1; k < kLeafSteps; ++k) {
        largest = max_nan(largest, z[k]);
        smallest = fminf(smallest, z[k]);
      }
#pragma unroll
      for (int d = 1; d < kNumChains; d *= 2) largest = max_nan(largest, shuffle_xor(largest, d));
      SoftmaxStats stats = identity_stats();
      if (has_node) stats = stats_of(z, c, largest, smallest);
      if (chain_ == 0) {
        s_.nodes[base + quarter_] = make_float2(stats.m, stats.S);
        s_.tops[base + quarter_] = largest;
      }
    }
    barrier();
    if (ends()) store_leaves(i, masked, has_node, has_top, has_mask);
    barrier();
  }
  // Stores the results of the first pass or the raw pass.
  __device__ __forceinline__ void store_leaves(int i, bool masked, bool has_node, bool has_top, bool has_mask) const {
    const bool exists = own_.columns > 0;
    float* const nodes = work_.chunk.nodes + i * 4 * slots_;
    const float2 node = exists ? s_.nodes[lane_] : make_float2(-infinity(), 0.0f);
    if (exists && has_top) nodes[2 * slots_ + slot_] = s_.tops[lane_];
    if (exists && has_mask) {
      std::uint32_t words[kMaskWords];
      allowed_in_leaf(static_cast<const std::int32_t*>(nullptr), own_.first, own_.columns, words);
      reinterpret_cast<uint4*>(work_.chunk.masks)[i * slots_ + slot_] =
          masked ? mine_.allowed[lane_] : make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (has_node) store_nodes(nodes, exists, node);
  }
  // Stores the nodes of the lanes' leaves and their root.
  __device__ __forceinline__ void store_nodes(float* nodes, bool exists, const float2& node) const {
    if (exists) reinterpret_cast<float2*>(nodes)[slot_] = node;
    if (!whole_) return;
    const SoftmaxStats root = tree_over_lanes<false>({node.x, node.y, 0.0f, 0.0f});
    if (lane_ == 0) {
      reinterpret_cast<float2*>(scanned_roots(nodes, slots_))[slot_ / kWarp] = make_float2(root.m, root.S);
    }
  }
  // Statistics of a leaf. In the common case, no column is missing or clamped.
  __device__ __forceinline__ SoftmaxStats stats_of(const float (&z)[kLeafSteps], float c, float largest,
                                                   float smallest) const {
    using Exponential = Chains<kExp, false>;
    const float m = add_rn(ceil_of(mul_rn(c, largest)), 0.0f);
    const bool common = abs_of(m) < 0.5f * kStatsRange && fma_rn(smallest, c, -m) >= 1.0f - kStatsFloor;
    if (__all_sync(kAllLanes, common)) {
      const float addend = Exponential::addend(m);
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < kLeafSteps; ++k) sum = add_rn(sum, Exponential::exponential(z[k], c, addend));
      return {m, sum_of_chains(sum), 0.0f, 0.0f};
    }
    SoftmaxStats stats;
    const LeafReference reference = leaf_reference(c, largest, &stats);
    const float addend = Exponential::addend(reference.m);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kLeafSteps; ++k) {
      const float e = Exponential::exponential(z[k] > reference.q ? z[k] : reference.q, c, addend);
      sum = add_rn(sum, z[k] != -infinity() ? e : 0.0f);
    }
    sum = sum_of_chains(sum);
    if (reference.usable) stats = {reference.m, sum, 0.0f, 0.0f};
    return stats;
  }

  // Runs the pass over the masses around the cut.
  __device__ __forceinline__ void run_masses(int row, int i) {
    const MassRow of_row(p_, row, work_.chunk, i);
    const float addend = Chains<kExp, false>::addend(of_row.m);
    const bool bounded = of_row.high < infinity();  // otherwise no column is above the bracket
    MassSum total, above;                           // a lane adds at most 128 columns
    int size = 0;                                   // columns in `inside`
#pragma unroll 1
    for (int base = first_leaf(); base < leaves_; base += step()) {
      const LeafSpan leaf = span_of(base + quarter_);
      float z[kLeafSteps];
      load(i, leaf, base + quarter_, z);
      if (p_.allowed != nullptr) drop(base + quarter_, z);
      const int place = place_of(slot_of(base + quarter_), chain_);
      size = bounded ? add_masses<true>(of_row, addend, i, place, size, z, &total, &above)
                     : add_masses<false>(of_row, addend, i, place, size, z, &total, &above);
    }
    list(size, i);
    add_sums(total.value(), above.value(), i);
  }
  // Adds the masses of the lane's columns. `place`: the place of the lane's first column. Columns in the bracket are
  // appended to `inside`, which holds `size` columns. Returns the new size.
  template <bool kBounded>
  __device__ __forceinline__ int add_masses(const MassRow& row, float addend, int i, int place, int size,
                                            const float (&z)[kLeafSteps], MassSum* total, MassSum* above) const {
    int count = 0;  // the lane's columns in the bracket
#pragma unroll
    for (int k = 0; k < kLeafSteps; ++k) {
      // The hardware's exponential needs no clamp: for z below the clamp, its mass is 0, too.
      const float clamped = kExp == Exp::kHardware ? z[k] : fmaxf(z[k], row.q);
      const double mass = MassSum::units_of(Chains<kExp, false>::exponential(clamped, row.c, addend));
      total->add(mass);
      if constexpr (kBounded) above->add_from(row.high, z[k], mass);
      count += z[k] >= row.low && (!kBounded || z[k] < row.high) ? 1 : 0;
    }
    if (!__any_sync(kAllLanes, count > 0)) return size;
    int end = count;
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, d);
      end += lane_ >= d ? before : 0;
    }
    const int all = __shfl_sync(kAllLanes, end, kWarp - 1);
    if (size + all > kMostInside) {
      list(size, i);
      size = 0;
    }
    std::uint32_t to = shared_address(mine_.inside + size + end - count);
#pragma unroll
    for (int k = 0; k < kLeafSteps; ++k) store_inside(row, z[k], place + k * kNumChains, &to);
    return size + all;
  }
  // Stores a column at `to` if it is in the bracket, and advances `to`. The stores are predicated: a branch would make
  // the other lanes wait.
  static __device__ __forceinline__ void store_inside(const MassRow& row, float z, int place, std::uint32_t* to) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ge.f32 p, %1, %2;\n\tsetp.lt.and.f32 p, %1, %3, p;\n\t"
        "@p st.shared.v2.b32 [%0], {%4, %5};\n\t@p add.u32 %0, %0, 8;\n\t}"
        : "+r"(*to)
        : "f"(z), "f"(row.low), "f"(row.high), "r"(rlk::bits_of(z)), "r"(place)
        : "memory");
  }
  // Appends the warp's `size` columns in `inside` to the row's list.
  __device__ __forceinline__ void list(int size, int i) const {
    if (size == 0) return;
    std::uint32_t at = 0;
    if (lane_ == 0) at = atomicAdd(&bracket_of(work_.chunk.firsts, i)->listed, static_cast<std::uint32_t>(size));
    at = __shfl_sync(kAllLanes, at, 0);
    __syncwarp();  // orders the accesses of `inside`, like the barrier at the end
    std::uint64_t* const to = work_.chunk.listed + i * work_.chunk.most_listed + at;
    if (at + size <= work_.chunk.most_listed) {
#pragma unroll 1
      for (int k = lane_; k < size; k += kWarp) {
        const uint2 column = mine_.inside[k];
        to[k] = rank_of(float_of(static_cast<std::int32_t>(column.x)), static_cast<int>(column.y));
      }
    }
    __syncwarp();
  }
  // Adds the lanes' masses to the row's masses.
  __device__ __forceinline__ void add_sums(std::uint64_t total, std::uint64_t above, int i) const {
    Bracket* const bracket = bracket_of(work_.chunk.firsts, i);
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      above += __shfl_xor_sync(kAllLanes, above, d);
      total += __shfl_xor_sync(kAllLanes, total, d);
    }
    if (lane_ != 0) return;
    atomicAdd(reinterpret_cast<unsigned long long*>(&bracket->above), above);
    atomicAdd(reinterpret_cast<unsigned long long*>(&bracket->total), total);
  }

  // Runs the pass over the columns that the row keeps.
  __device__ __forceinline__ void run_kept(int row, int i) {
    float* const nodes = work_.chunk.nodes + i * 4 * slots_;
    auto* const masks = reinterpret_cast<uint4*>(work_.chunk.masks) + i * slots_;
    const KeptTest<T, kExp> test(p_, row, reinterpret_cast<SampleShared*>(&s_),
                                 work_.chunk.masks + i * kMaskWords * slots_, work_.chunk.states + i);
    const bool exists = own_.columns > 0;
    const float top = exists ? nodes[2 * slots_ + slot_] : -infinity();
    const bool has = exists && test.may_keep(slot_, top);
    const unsigned needed = __ballot_sync(kAllLanes, has);
    if (ends()) {
      if (has) s_.leaves[set_bits_of(needed & ((1u << lane_) - 1))] = static_cast<std::uint8_t>(lane_);
      s_.tops[lane_] = top;
      s_.nodes[lane_] = make_float2(-infinity(), 0.0f);
      if (exists && !has) masks[slot_] = make_uint4(0, 0, 0, 0);
    }
    barrier();
    const int leaves = set_bits_of(needed);
    int kept = 0;
#pragma unroll 1
    for (int base = first_leaf(); base < leaves; base += step()) {
      const bool takes = base + quarter_ < leaves;
      const int at = takes ? s_.leaves[base + quarter_] : 0, slot = slot_of(at);
      LeafSpan leaf = span_of(at);
      if (!takes) leaf.columns = 0;
      float z[kLeafSteps];
      load(i, leaf, at, z);
      std::uint32_t words[kMaskWords];
      const SoftmaxStats stats = test.find_in_lanes(z, slot, leaf.first, leaf.columns, s_.tops[at], words);
      if (takes && chain_ == 0) {
        masks[slot] = make_uint4(words[0], words[1], words[2], words[3]);
        s_.nodes[at] = make_float2(stats.m, stats.S);
#pragma unroll
        for (int k = 0; k < kMaskWords; ++k) kept += set_bits_of(words[k]);
      }
    }
    barrier();
    if (ends()) store_nodes(nodes, exists, s_.nodes[lane_]);
    kept = __reduce_add_sync(kAllLanes, kept);
    if (lane_ == 0 && kept > 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&work_.chunk.states[i].kept),
                static_cast<unsigned long long>(kept));
    }
    barrier();
  }

  const SampleParams& p_;
  const GroupGrid& grid_;
  const ScanWork& work_;
  Shared& s_;
  Shared& mine_;  // the warp's own element
  const bool& together_;
  const int lane_, chain_, quarter_;
  const std::int64_t slots_;
  const bool whole_;  // whether a group has leaves of one part
  Group group_ = {};
  int first_ = 0, columns_ = 0,
      leaves_ = 0;     // if whole_: the group's first column; columns of the part from there on; leaves of the group
  LeafSpan own_ = {};  // the lane's leaf, and the leaf's slot
  int slot_ = 0;
  const Storage* logits_ = nullptr;
};

// Number of blocks that fit on a multiprocessor. The pass over kept columns needs more registers than the first pass,
// and on sm_80 still more. The pass over masses needs more registers on sm_80, and with the portable exponential.
template <ScanPass kPass, Exp kExp>
constexpr int kLeafScanBlocks = kPass == ScanPass::kKept     ? RLK_CUDA_SM90 ? 3 : 2
                                : kPass == ScanPass::kMasses ? RLK_CUDA_SM90&& kExp == Exp::kHardware ? 4 : 3
                                                             : 4;

template <class T, Exp kExp, ScanPass kPass>
__global__ void __launch_bounds__(kLeafScanWarps* kWarp, kLeafScanBlocks<kPass, kExp>)
    sample_leaf_scan_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ GroupGrid grid,
                            const __grid_constant__ ScanWork work, const __grid_constant__ bool together) {
  using Scan = LeafScan<T, kExp, kPass>;
  __shared__ typename Scan::Shared shared[kLeafScanWarps];
  const int warp = threadIdx.x / kWarp, own = together ? 0 : warp;
  Scan scan(p, grid, work, shared, together);
  wait_for_previous_kernel();
  if (kPass == ScanPass::kFirst && p.kept_offsets != nullptr) clear_published(work.chunk);
  allow_next_kernel();
  const int blocks = static_cast<int>(gridDim.x), step = together ? blocks : kLeafScanWarps * blocks;
#pragma unroll 1
  for (int task = static_cast<int>(blockIdx.x) + own * blocks; task < work.tasks; task += step) {
    // The pass over masses goes backward, because L2 still holds the rows that the previous pass read last.
    scan.run(kPass == ScanPass::kMasses ? work.tasks - 1 - task : task);
  }
}

// `kAfter`: the pass may begin while the previous kernel ends, and then waits for that kernel.
template <class T, Exp kExp, ScanPass kPass, bool kAfter>
void run_pass(const SampleParams& p, const GroupGrid& grid, const SampleChunk& chunk, cudaStream_t stream) {
  if constexpr (T::kPacked) {
    run_scan<T, kExp, kPass, kAfter>(p, grid, chunk, stream);
  } else {
    const ScanWork work = scan_work(p, chunk, grid);
    const int most = multiprocessors(current_device()) * kLeafScanBlocks<kPass, kExp>,
              blocks = std::min(most, work.tasks);
    // In a call with few groups most warps would have no group of their own, so a block's warps share a group.
    const bool together = work.tasks <= kLeafScanWarps / 2 * most;
    launch_dependent<kAfter && RLK_CUDA_ARCH::kOverlap>(sample_leaf_scan_kernel<T, kExp, kPass>, blocks,
                                                        kLeafScanWarps * kWarp, 0, stream, p, grid, work, together);
  }
}

}  // namespace
}  // namespace rlk::cuda
