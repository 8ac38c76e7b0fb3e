// What follows a scan (scan.cuh): a block has a row. It lists the first columns by the leaves that may hold them, cuts
// the list, computes the tree above the leaves, draws, and writes the results. A row whose cut does not fit a list takes
// the selection of rlk/kernels/sample_select.h. One body serves every architecture.
#pragma once

#include "../common/dependent_launch.cuh"
#include "../logprob/leaf_group.cuh"
#include "rlk/kernels/sample_top.h"
#include "rlk/kernels/sample_tree.h"
#include "team.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kMostSlots = 4096;   // leaf slots of the largest vocabulary
constexpr int kMostListed = 1024;  // columns of a list
constexpr int kMostListedK = 512;  // largest top_k that a list serves
static_assert((kSampleVocab + kLeafColumns - 1) / kLeafColumns <= kMostSlots);

struct FinishShared {
  SampleShared base;
  float2 roots[kMostSlots / kWarp];  // one for 32 neighbouring slots
  std::uint64_t wide[2][kRowWarps];
  std::uint32_t narrow[2][kRowWarps];
  std::uint32_t bitmap[kMostSlots / 32];  // slots that keep a column
  std::uint32_t listed, slots;
};
static_assert(sizeof(FinishShared) <= 48 * 1024);

// Sums over a block. Calls that follow each other name different buffers.
__device__ __forceinline__ std::uint32_t block_sum(std::uint32_t x, FinishShared* s, int buffer) {
  x = __reduce_add_sync(kAllLanes, x);
  if (threadIdx.x % kWarp == 0) s->narrow[buffer][threadIdx.x / kWarp] = x;
  __syncthreads();
  std::uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kRowWarps; ++i) sum += s->narrow[buffer][i];
  return sum;
}
__device__ __forceinline__ std::uint64_t block_sum(std::uint64_t x, FinishShared* s, int buffer) {
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) x += __shfl_xor_sync(kAllLanes, x, d);
  if (threadIdx.x % kWarp == 0) s->wide[buffer][threadIdx.x / kWarp] = x;
  __syncthreads();
  std::uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kRowWarps; ++i) sum += s->wide[buffer][i];
  return sum;
}

// z's bits in ascending order.
__device__ __forceinline__ std::uint32_t key_of(float z) {
  return ~static_cast<std::uint32_t>(rank_of(z, 0) >> kIdBits);
}

// A list in base.list of the ranks of present columns. It holds every column whose key is at least `bound`. So if
// it has `count` columns, the first `count` of the row are among them. size is -1 if the columns do not fit.
struct FirstColumns {
  int size;
  std::uint32_t bound;
};
// tops: the leaves' largest z. leaf_first(slot, &columns), z_at(id), is_allowed(id): those of SampleColumns.
template <class LeafFirst, class ZAt, class IsAllowed>
__device__ FirstColumns list_first_columns(const float* tops, int slots, std::uint32_t count, FinishShared* s,
                                           LeafFirst leaf_first, ZAt z_at, IsAllowed is_allowed) {
  auto* const keys = reinterpret_cast<std::uint32_t*>(s->base.masses);
  auto* const found = reinterpret_cast<std::uint16_t*>(s->base.counts);
  static_assert(sizeof s->base.masses >= 4 * kMostSlots && sizeof s->base.counts >= 2 * kMostSlots);
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (thread == 0) s->listed = s->slots = 0;
  for (int slot = thread; slot < slots; slot += kRowThreads) {
    std::int64_t columns;
    leaf_first(slot, &columns);
    keys[slot] = columns > 0 ? key_of(tops[slot]) : 0;
  }
  // The largest number of 16 upper bits that `count` keys reach. Each thread reads the keys that it wrote.
  std::uint32_t bound = 0;
#pragma unroll 1
  for (int bit = 31; bit >= 16; --bit) {
    const std::uint32_t tried = bound | 1u << bit;
    std::uint32_t mine = 0;
    for (int slot = thread; slot < slots; slot += kRowThreads) mine += keys[slot] >= tried ? 1 : 0;
    if (block_sum(mine, s, bit & 1) >= count) bound = tried;
  }
  for (int slot = thread; slot < slots; slot += kRowThreads) {
    if (keys[slot] != 0 && keys[slot] >= bound) found[atomicAdd(&s->slots, 1u)] = static_cast<std::uint16_t>(slot);
  }
  __syncthreads();
  const int leaves = static_cast<int>(s->slots);
  if (leaves > kMostListed) return {-1, bound};
  const int lane = thread % kWarp;
#pragma unroll 1
  for (int k = thread / kWarp; k < leaves; k += kRowWarps) {
    std::int64_t columns;
    const std::int64_t first = leaf_first(found[k], &columns);
    float z[kLeafColumns / kWarp];
#pragma unroll
    for (int i = 0; i < kLeafColumns / kWarp; ++i) {
      const int column = i * kWarp + lane;
      z[i] = column < columns ? z_at(first + column) : -infinity();
    }
#pragma unroll
    for (int i = 0; i < kLeafColumns / kWarp; ++i) {
      const int column = i * kWarp + lane;
      if (column >= columns || key_of(z[i]) < bound || !is_allowed(first + column)) continue;
      const std::uint32_t at = atomicAdd(&s->listed, 1u);
      if (at < kMostListed) s->base.list[at] = rank_of(z[i], first + column);
    }
  }
  __syncthreads();
  const std::uint32_t size = s->listed;
  return {size <= kMostListed ? static_cast<int>(size) : -1, bound};
}

// Draws among 32 neighbouring nodes, one a lane, by the words of five levels from `level` on. Returns the lane of the
// drawn node.
template <class WordOf>
__device__ __forceinline__ int draw_over_lanes(SoftmaxStats s, int lane, int level, WordOf word_of) {
  unsigned lefts = 0;  // in lane i: which nodes of level i draw their left half
#pragma unroll 1
  for (int i = 0; i < 5; ++i) {
    const SoftmaxStats other{shuffle_xor(s.m, 1 << i), shuffle_xor(s.S, 1 << i), 0.0f, 0.0f};
    const bool is_right = (lane >> i & 1) != 0;
    const SoftmaxStats left{is_right ? other.m : s.m, is_right ? other.S : s.S, 0.0f, 0.0f};
    const SoftmaxStats right{is_right ? s.m : other.m, is_right ? s.S : other.S, 0.0f, 0.0f};
    const unsigned of_level = __ballot_sync(kAllLanes, draws_left_node(word_of(level + i), left, right));
    lefts = lane == i ? of_level : lefts;
    s = combine(left, right);
  }
  int at = 0;
#pragma unroll 1
  for (int i = 4; i >= 0; --i) at += (__shfl_sync(kAllLanes, lefts, i) >> at & 1) != 0 ? 0 : 1 << i;
  return at;
}

template <class T, Exp kExp>
class FinishedRow : RowTree<BlockTeam<kRowThreads>, T, kExp> {
  using Team = BlockTeam<kRowThreads>;
  using Base = RowTree<Team, T, kExp>;
  using Base::allowed_, Base::c_, Base::m_, Base::q_, Base::last_, Base::least_, Base::marked_, Base::cuts_;
  using Base::is_allowed, Base::z_at, Base::mass_of, Base::leaf_first, Base::mask_bit_of;
  using Base::p_, Base::row_, Base::mask_, Base::state_, Base::height_, Base::nodes_, Base::slots_;

 public:
  __device__ FinishedRow(const SampleParams& p, std::int64_t row, FinishShared* shared, std::uint32_t* mask,
                         SampleState* state, std::uint64_t* firsts, float* nodes)
      : Base(Team(), p, row, &shared->base, mask, state, nodes), s_(*shared), firsts_(firsts) {}

  // After the first scan. Rows whose selection does not fit a list wait.
  __device__ void run() {
    const SampleRow want = sample_row_of<PlainMemory>(p_, row_);
    std::int32_t status = want.status;
    const bool cut = !want.greedy && want.truncates();
    c_ = log2_scale(want.temperature);
    cuts_ = false;
    float largest = 0.0f;
    std::int64_t slot = 0, id = -1;
    if (status == kOk && (cut || want.greedy)) status = find_first(&largest, &slot);
    if (thread() == 0) *state_ = {kLastRank, 0, -1, m_, q_, 0, status, 0, 0};
    if (status != kOk) return write_failed(status);
    std::uint64_t kept = 0;
    if (cut) {
      const std::uint64_t min_mass = share_of_mass(want.min_p, mass_of(largest));
      if (!by_list(want, min_mass, &kept)) {
        clear_padding();
        id = first_id(slot, largest);
        if (thread() != 0) return;
        const bool ranks = want.top_p < 1.0f || (want.top_k > 0 && want.top_k < p_.valid_vocab);
        state_->waits = ranks ? kForSelection : kForTree;
        state_->least = ranks ? 0 : min_mass;
        state_->id = id;
        return;
      }
      listed_ = true;
    } else {
      clear_padding();
      if (want.greedy) id = first_id(slot, largest);
      kept = count_allowed();
    }
    finish(want, id, kept);
  }
  // Finds the columns that a waiting row keeps.
  __device__ void run_selection() {
    if (state_->waits != kForSelection) return;
    const SampleRow want = sample_row_of<PlainMemory>(p_, row_);
    RowSelection<Team, T, kExp> selection(Team(), p_, row_, &s_.base, mask_, state_, firsts_);
    __syncthreads();
    if (want.top_k > 0 && want.top_k < p_.valid_vocab) selection.run_first();  // its bounds serve top_k alone
    __syncthreads();
    selection.run_truncate();
    __syncthreads();
    if (thread() == 0) state_->waits = kForTree;
  }
  // After the scan of kept columns.
  __device__ void run_rest() {
    if (state_->waits == kDone) return;
    this->load_state();
    finish(sample_row_of<PlainMemory>(p_, row_), -1, state_->kept);
  }
  // The selection, the tree and the rest of a waiting row, without a scan.
  __device__ void run_alone() {
    if (state_->waits == kDone) return;
    run_selection();
    __syncthreads();
    this->load_state();
    const std::uint64_t kept = block_sum(this->template leaf_nodes<false>(0, slots_), &s_, 0);
    finish(sample_row_of<PlainMemory>(p_, row_), -1, kept);
  }
  // After the raw scan.
  __device__ void run_raw() {
    const std::int64_t id = p_.ids[row_];
    float raw = canonical_nan();
    if (id >= 0) {
      const SoftmaxStats root = root_of();
      if (thread() == 0) store_root(root);
      raw = logprob_outputs(root, z_at(id), 1.0f).logprob;
    }
    if (thread() == 0) p_.raw_logprob[row_] = raw;
  }

 private:
  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % kWarp); }

  __device__ const float* tops() const { return nodes_ + 2 * slots_; }
  // A listed row has nodes in shared memory, for slots that keep a column.
  __device__ float2* listed_nodes() const { return reinterpret_cast<float2*>(s_.base.list); }
  __device__ std::uint16_t* places() const { return reinterpret_cast<std::uint16_t*>(s_.base.masses + kMostListed); }
  __device__ SoftmaxStats node_of(int slot) const {
    std::int64_t columns = 0;
    if (slot < slots_) leaf_first(slot, &columns);
    if (columns == 0 || (listed_ && (s_.bitmap[slot / 32] >> (slot % 32) & 1) == 0)) return identity_stats();
    const float2* const nodes = reinterpret_cast<const float2*>(nodes_);
    const float2 node = listed_ ? listed_nodes()[places()[slot]] : nodes[slot];
    return {node.x, node.y, 0.0f, 0.0f};
  }
  // Clears the masks of slots without columns, which no scan writes.
  __device__ void clear_padding() const {
    if (p_.kept_offsets == nullptr) return;
    for (int i = thread(); i < slots_; i += kRowThreads) {
      std::int64_t columns;
      leaf_first(i, &columns);
      if (columns == 0) reinterpret_cast<uint4*>(mask_)[i] = make_uint4(0, 0, 0, 0);
    }
  }

  // The largest z of the row, its first slot, m_ and q_. Returns the row's status.
  __device__ std::int32_t find_first(float* largest, std::int64_t* slot) {
    std::uint64_t mine = kLastRank;  // rank of the top with the slot in place of the id; 0 for a NaN
    for (int i = thread(); i < slots_; i += kRowThreads) {
      std::int64_t columns;
      leaf_first(i, &columns);
      if (columns == 0) continue;
      const float top = tops()[i];
      const std::uint64_t at = is_nan(top) ? 0 : rank_of(top, i) + 1;
      mine = at < mine ? at : mine;
    }
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const std::uint64_t other = __shfl_xor_sync(kAllLanes, mine, d);
      mine = other < mine ? other : mine;
    }
    if (lane() == 0) s_.wide[0][thread() / kWarp] = mine;
    __syncthreads();
    for (int i = 0; i < kRowWarps; ++i) mine = s_.wide[0][i] < mine ? s_.wide[0][i] : mine;
    *largest = mine == kLastRank ? -infinity() : mine == 0 ? canonical_nan() : z_of_rank(mine - 1);
    *slot = id_of_rank(mine - 1);
    SoftmaxStats stats;
    const LeafReference reference = leaf_reference(c_, *largest, &stats);
    m_ = reference.m;
    q_ = reference.q;
    return reference.usable ? kOk : status_of(stats) | (stats.m == -infinity() ? kEmptyRow : kOk);
  }
  // The first column of a slot with this z, in the lanes of each warp.
  __device__ std::int64_t first_id(std::int64_t slot, float z) const {
    std::int64_t columns;
    const std::int64_t first = leaf_first(slot, &columns);
    int mine = kLeafColumns;
    for (int column = lane(); column < columns; column += kWarp) {
      if (z_at(first + column) == z && is_allowed(first + column)) mine = min(mine, column);
    }
    return first + __reduce_min_sync(kAllLanes, mine);
  }
  // Columns of a row that nothing cuts.
  __device__ std::uint64_t count_allowed() {
    if (allowed_ == nullptr) return static_cast<std::uint64_t>(p_.valid_vocab);
    std::uint32_t mine = 0;
    for (std::int64_t i = thread(); i < (p_.valid_vocab + 31) / 32; i += kRowThreads) {
      const std::int64_t left = p_.valid_vocab - 32 * i;
      const std::uint32_t valid = left >= 32 ? ~0u : (1u << left) - 1;
      mine += static_cast<std::uint32_t>(set_bits_of(static_cast<std::uint32_t>(allowed_[i]) & valid));
    }
    return block_sum(mine, &s_, 1);
  }

  // Cuts the row by a list of its first columns. Returns whether the list was enough; then the mask has the kept
  // columns, and the slots that keep one have nodes.
  __device__ bool by_list(const SampleRow& want, std::uint64_t min_mass, std::uint64_t* kept) {
    const bool vllm = p_.order == SampleOrder::kVllm;
    if (want.top_k <= 0 || want.top_k > kMostListedK || want.top_k >= p_.valid_vocab) return false;
    if (p_.order == SampleOrder::kSglang && want.top_p < 1.0f) return false;  // a share of the whole row
    const auto count = static_cast<std::uint32_t>(want.top_k);
    const FirstColumns found = list_first_columns(
        tops(), static_cast<int>(slots_), count, &s_,
        [&](std::int64_t slot, std::int64_t* columns) { return leaf_first(slot, columns); },
        [&](std::int64_t id) { return z_at(id); }, [&](std::int64_t id) { return is_allowed(id); });
    const int size = found.size;
    if (size < static_cast<int>(count)) return false;
    std::uint64_t* const masses = s_.base.masses;
    for (int i = thread(); i < size; i += kRowThreads) masses[i] = mass_of(z_of_rank(s_.base.list[i]));
    __syncthreads();
    constexpr int kOwn = kMostListed / kRowThreads;
    const std::uint64_t least = vllm ? min_mass : 0;
    std::uint64_t before[kOwn], mine = 0;
    bool keeps[kOwn];
    std::uint32_t survivors = 0;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int at = k * kRowThreads + thread();
      keeps[k] = false;
      before[k] = 0;
      if (at >= size) continue;
      const std::uint64_t rank = s_.base.list[at];
      std::uint32_t place = 0;
#pragma unroll 4
      for (int i = 0; i < size; ++i) {
        const bool precedes = s_.base.list[i] < rank && masses[i] >= least;
        place += precedes ? 1 : 0;
        before[k] += precedes ? masses[i] : 0;
      }
      const bool survives = masses[at] >= least;
      survivors += survives ? 1 : 0;
      keeps[k] = survives && place < count;
      mine += keeps[k] ? masses[at] : 0;
    }
    const std::uint64_t total = block_sum(mine, &s_, 0);
    if (least > 0 && block_sum(survivors, &s_, 0) < count && found.bound > 0) {
      // No other column survives if the mass at the bound is below `least` by far more than an exponential's error.
      const std::uint64_t most = mass_of(z_of_rank(std::uint64_t{~found.bound} << kIdBits));
      if (most + (most >> 12) + 2 >= least) return false;
    }
    const std::uint64_t goal = want.top_p < 1.0f ? share_of_mass(want.top_p, total) : kLastRank;
    std::uint32_t own = 0;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int at = k * kRowThreads + thread();
      keeps[k] = keeps[k] && before[k] < goal && (vllm || masses[at] >= min_mass);
      own += keeps[k] ? 1 : 0;
    }
    *kept = block_sum(own, &s_, 1);
    mark(keeps);
    return true;
  }
  // Makes mask, bitmap, places and nodes of the listed columns that are kept.
  template <int kOwn>
  __device__ void mark(const bool (&keeps)[kOwn]) {
    std::uint32_t* const bitmap = s_.bitmap;
    auto* const found = reinterpret_cast<std::uint16_t*>(s_.base.counts);
    for (int i = thread(); i < slots_; i += kRowThreads) reinterpret_cast<uint4*>(mask_)[i] = make_uint4(0, 0, 0, 0);
    if (thread() < kMostSlots / 32) bitmap[thread()] = 0;
    if (thread() == 0) s_.slots = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      if (!keeps[k]) continue;
      const std::int64_t bit = mask_bit_of(id_of_rank(s_.base.list[k * kRowThreads + thread()]));
      const auto slot = static_cast<int>(bit / kLeafColumns);
      atomicOr(mask_ + bit / 32, 1u << (bit % 32));
      const std::uint32_t own = 1u << (slot % 32);
      if ((atomicOr(bitmap + slot / 32, own) & own) != 0) continue;
      const std::uint32_t place = atomicAdd(&s_.slots, 1u);
      found[place] = static_cast<std::uint16_t>(slot);
      places()[slot] = static_cast<std::uint16_t>(place);
    }
    __syncthreads();
    marked_ = true;
    const int leaves = static_cast<int>(s_.slots), groups = kRowThreads / Team::kLanes;
    for (int base = 0; base < leaves; base += groups) {
      const int at = base + thread() / Team::kLanes;
      std::uint32_t words[kMaskWords];
      const SoftmaxStats node = this->template leaf_of_slot<false>(at < leaves ? found[at] : 0, at < leaves, words);
      if (at < leaves && thread() % Team::kLanes == 0) listed_nodes()[at] = make_float2(node.m, node.S);
    }
    __syncthreads();
  }

  // Roots of 32 neighbouring slots each, in shared memory.
  __device__ void find_roots() const {
#pragma unroll 1
    for (int k = thread() / kWarp; k * kWarp < slots_; k += kRowWarps) {
      const SoftmaxStats root = tree_over_lanes<false>(node_of(k * kWarp + lane()));
      if (lane() == 0) s_.roots[k] = make_float2(root.m, root.S);
    }
    __syncthreads();
  }
  __device__ int num_roots() const { return static_cast<int>((slots_ + kWarp - 1) / kWarp); }
  __device__ SoftmaxStats root_at(int i) const {
    if (i >= num_roots()) return identity_stats();
    return {s_.roots[i].x, s_.roots[i].y, 0.0f, 0.0f};
  }
  __device__ SoftmaxStats root_of() const {
    find_roots();
    return tree_over_nodes<false>(num_roots(), lane(), [&](int i) { return root_at(i); });
  }
  __device__ void store_root(const SoftmaxStats& root) const {
    nodes_[4 * slots_ - 4] = root.m;
    nodes_[4 * slots_ - 3] = root.S;
  }

  // Computes the tree, draws unless the id is given, and writes the row's results. All threads call it.
  __device__ void finish(const SampleRow& want, std::int64_t id, std::uint64_t kept) {
    const SoftmaxStats root = root_of();
    if (thread() >= kWarp) return;
    const std::int32_t status = status_of(root) | (root.m == -infinity() ? kEmptyRow : kOk);
    if (status != kOk) return write_failed(status);
    if (id < 0) id = draw();
    if (lane() != 0) return;
    store_root(root);
    const auto columns = static_cast<std::int64_t>(kept);
    write(id, status, logprob_outputs(root, z_at(id), want.temperature).logprob,
          columns == p_.valid_vocab ? 0 : columns);
  }
  __device__ std::int64_t draw() const {
    const std::uint32_t own = DrawWords<PlainMemory>(p_, row_)(lane());
    const auto word_of = [&](int word) { return __shfl_sync(kAllLanes, own, word > 0 ? word : 0); };
    int at = 0;
#pragma unroll 1
    for (int level = num_roots() > kWarp ? 10 : 5; level >= 0; level -= 5) {
      const int i = at * kWarp + lane();
      SoftmaxStats mine = level == 0 ? node_of(i) : root_at(i);
      if (level == 10) {  // a lane has the root of 32 roots
        mine = identity_stats();
#pragma unroll 1
        for (int k = 0; k < num_roots() / kWarp; ++k) {
          const SoftmaxStats root = tree_over_lanes<false>(root_at(k * kWarp + lane()));
          if (lane() == k) mine = root;
        }
      }
      at = at * kWarp + draw_over_lanes(mine, lane(), level,
                                        [&](int l) { return word_of(l < height_ ? 7 + l : 2 - (l - height_)); });
    }
    const std::uint32_t words[4] = {word_of(kChainWord), word_of(kChainWord + 1), word_of(kChainWord + 2),
                                    word_of(kPrefixWord)};
    return this->draw_of_leaf(at, [&](int word) {
      return word == kPrefixWord      ? words[3]
             : word == kChainWord     ? words[0]
             : word == kChainWord + 1 ? words[1]
                                      : words[2];
    });
  }

  __device__ void write_failed(std::int32_t status) const {
    if (thread() != 0) return;
    store_root(failed_stats(status));
    write(-1, status, canonical_nan(), 0);
  }
  __device__ void write(std::int64_t id, std::int32_t status, float logprob, std::int64_t count) const {
    p_.ids[row_] = id;
    p_.status[row_] = status;
    if (p_.logprob != nullptr) p_.logprob[row_] = logprob;
    if (p_.kept_offsets != nullptr) p_.kept_offsets[row_ + 1] = count;
  }

  FinishShared& s_;
  std::uint64_t* const firsts_;
  bool listed_ = false;  // the nodes are those of a list
};

// The n best, by the leaves that may hold them.
template <class T, bool kRaw>
class BestOfRow : RowTop<BlockTeam<kRowThreads>, T, kRaw> {
  using Base = RowTop<BlockTeam<kRowThreads>, T, kRaw>;

 public:
  __device__ BestOfRow(const SampleParams& p, std::int64_t row, FinishShared* shared, std::uint32_t* mask,
                       SampleState* state, std::uint64_t* firsts, const float* nodes)
      : Base(BlockTeam<kRowThreads>(), p, row, &shared->base, mask, state, firsts, nodes),
        s_(*shared),
        tops_(nodes + 2 * sample_leaf_slots(p.vocab_size)) {}
  __device__ void run() {
    if (this->fails()) return;
    const auto count = static_cast<std::uint32_t>(this->p_.n_logprobs);
    const FirstColumns found = list_first_columns(
        tops_, static_cast<int>(sample_leaf_slots(this->p_.vocab_size)), count, &s_,
        [&](std::int64_t slot, std::int64_t* columns) { return this->leaf_first(slot, columns); },
        [&](std::int64_t id) { return this->z_at(id); }, [&](std::int64_t id) { return this->is_allowed(id); });
    // Fewer columns than n are all columns if no bound left one out.
    if (found.size < 0 || (found.size < static_cast<int>(count) && found.bound > 0)) return this->run_from(false);
    this->list_size_ = found.size;
    this->listed_ = true;
    this->write_listed();
  }

 private:
  FinishShared& s_;
  const float* const tops_;
};

enum class Finish { kFirst, kSelection, kRest, kAlone, kRaw };

template <class T, Exp kExp, Finish kFinish>
__global__ void __launch_bounds__(kRowThreads, 2)
    sample_finish_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const std::int64_t i = blockIdx.x;
  wait_for_previous_kernel();
  allow_next_kernel();
  FinishedRow<T, kExp> row(p, chunk.first + i, reinterpret_cast<FinishShared*>(memory),
                           chunk.masks + i * sample_mask_words(p.vocab_size), chunk.states + i,
                           chunk.firsts + i * kMaxTeam, chunk.nodes + i * sample_node_floats(p.vocab_size));
  if constexpr (kFinish == Finish::kFirst) {
    row.run();
  } else if constexpr (kFinish == Finish::kSelection) {
    row.run_selection();
  } else if constexpr (kFinish == Finish::kRest) {
    row.run_rest();
  } else if constexpr (kFinish == Finish::kAlone) {
    row.run_alone();
  } else {
    row.run_raw();
  }
}

template <class T, bool kRaw>
__global__ void __launch_bounds__(kRowThreads, 2)
    sample_best_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const std::int64_t i = blockIdx.x;
  wait_for_previous_kernel();
  allow_next_kernel();
  BestOfRow<T, kRaw>(p, chunk.first + i, reinterpret_cast<FinishShared*>(memory),
                     chunk.masks + i * sample_mask_words(p.vocab_size), chunk.states + i, chunk.firsts + i * kMaxTeam,
                     chunk.nodes + i * sample_node_floats(p.vocab_size))
      .run();
}

}  // namespace
}  // namespace rlk::cuda
