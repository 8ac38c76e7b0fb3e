// The work after a scan (scan.cuh): each block finishes one row. The block lists the row's first columns (the largest
// z) from the leaves that may hold these columns, and cuts the list. Then the block computes the tree above the leaves,
// draws, and writes the results. If no list can hold a row's cut, the selection of kernels/sample/select.h computes the
// row. All architectures share this source.
#pragma once

#include "bracket.cuh"
#include "kept_ids.cuh"
#include "kept_place.cuh"
#include "kernels/sample/tree.h"
#include "launches.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

// Finds the columns that a waiting row keeps, by kRowThreads threads. `kByCount`: rows may have a top_k.
template <class T, Exp kExp, bool kByCount>
__device__ __forceinline__ void select_row(const SampleParams& p, const SampleChunk& chunk, std::int64_t i,
                                           SampleShared* shared) {
  using Team = BlockTeam<kRowThreads>;
  using Selection = RowSelection<Team, T, kExp>;
  const auto selection_of = [&](std::int64_t k) {
    const ChunkRow of = row_of(p, chunk, k);
    return Selection(Team(), p, of.row, shared, of.mask, of.state, of.firsts);
  };
  __syncthreads();
  if constexpr (kByCount) {
    const SampleRow want = sample_row_of<PlainMemory>(p, chunk.first + i);
    if (want.top_k > 0 && want.top_k < p.valid_vocab)
      selection_of(hidden(i)).run_first();  // only top_k needs the bounds of run_first()
    __syncthreads();
  }
  selection_of(i).run_truncate();
  __syncthreads();
  if (thread_of_block() == 0) chunk.states[i].waits = kForTree;
}

template <class T, Exp kExp>
class EditedRow;

template <class T, Exp kExp, int kThreads = kRowThreads>
class FinishedRow : RowTree<BlockTeam<kThreads>, T, kExp> {
  using Team = BlockTeam<kThreads>;
  using Base = RowTree<Team, T, kExp>;
  using Base::allowed_, Base::logits_, Base::c_, Base::m_, Base::q_;
  using Base::mass_of;
  using Base::p_, Base::row_, Base::mask_, Base::state_, Base::nodes_, Base::slots_;
  friend class EditedRow<T, kExp>;
  static constexpr int kOwn = kOwnColumns, kWarps = kThreads / kWarp;
  static constexpr int kMostFewLeaves = kRowThreads / Team::kLanes;  // leaves that kRowThreads threads compute at once

 public:
  using Base::has_edits, Base::edited, Base::is_edited, Base::edit_at;
  // Returns the same as Base's function, but requires a valid column.
  __device__ __forceinline__ bool is_allowed(int column) const {
    return allowed_ == nullptr || (static_cast<std::uint32_t>(allowed_[column >> 5]) >> (column & 31) & 1) != 0;
  }
  __device__ __forceinline__ float logit_at(int column) const { return T::load(logits_[column]); }
  __device__ __forceinline__ float z_at(int column) const {
    const float z = logit_at(column);
    return has_edits() ? edited(column, z) : z;
  }

  // `i`: the row's number in the chunk. `draws`: whether this launch draws most rows. If it draws only a few rows, the
  // random words are computed when a row needs them.
  __device__ FinishedRow(const SampleParams& p, const SampleChunk& chunk, std::int64_t i, FinishShared* shared,
                         bool draws)
      : Base(Team(), p, chunk.first + i, &shared->base, chunk.masks + i * sample_mask_words(p.vocab_size),
             chunk.states + i, chunk.nodes + i * sample_node_floats(p.vocab_size)),
        s_(*shared),
        firsts_(chunk.firsts + i * kMaxTeam),
        map_(SlotMap::make(p, shared->cuts)),
        num_slots_(static_cast<int>(slots_)),
        place_(p, chunk, i) {
    if (draws) find_words();
    __syncthreads();
  }

  __device__ const SlotMap& map() const { return map_; }
  // The leaf with the row's largest z. The lanes of each warp hold z of the leaf's columns.
  struct Best {
    int slot;
    float largest, z[kOwn];
  };
  struct Waiting {
    WaitingRow row;
    std::uint64_t min_mass;
    Best best;
  };
  // Runs after the first scan. Returns whether the row has to wait for later launches, because no list can hold its
  // selection. `kEnds`: no later launch reads the mask for the kept set. `kByCount`: rows may have a top_k.
  template <bool kEnds, bool kByCount>
  __device__ __forceinline__ bool run(Waiting* waiting) {
    const SampleRow want = sample_row_of<PlainMemory>(p_, row_);
    std::int32_t status = want.status;
    const bool cut = !want.greedy && want.truncates();
    c_ = log2_scale(want.temperature);
    std::uint64_t kept = 0;
    Best best;
    if (status == kOk && (cut || want.greedy)) {
      const LeafKeys<kThreads> keys = load_keys<kThreads>(tops(), num_slots_, map_, &s_);
      const float largest = keys.largest == 0     ? -infinity()
                            : keys.largest == ~0u ? canonical_nan()
                                                  : z_of_key(keys.largest);
      status = refer_to(largest);
      if (status == kOk && cut) {
        const std::uint64_t min_mass = share_of_mass(want.min_p, mass_of(largest));
        bool listed = false;
        if constexpr (kByCount) listed = by_list<kEnds>(want, min_mass, keys, &kept);
        if (!listed) {
          load_best(keys.slot, largest, &best);
          *waiting = {{want, largest, m_}, min_mass, best};
          return true;
        }
        listed_ = true;
        scanned_ = false;
      } else if (status == kOk) {
        load_best(keys.slot, largest, &best);
      }
    }
    if (thread() == 0) *state_ = {kLastRank, 0, -1, m_, q_, 0, status, 0, kDone};
    if (status != kOk) {
      write_failed(status);
      return false;
    }
    if (!kEnds) {
      find_words();
      __syncthreads();
    }
    if (!listed_) {
      clear_padding();
      kept = count_allowed();
    }
    finish<kEnds>(want, want.greedy, best, kept);
    return false;
  }
  // Leaves a row to later launches. `by_mass`: these launches sum the row's masses.
  __device__ __forceinline__ void wait(const Waiting& waiting, bool by_mass) const {
    clear_padding();
    const SampleRow& want = waiting.row.want;
    const bool ranks = want.top_p < 1.0f || (want.top_k > 0 && want.top_k < p_.valid_vocab);
    const std::int64_t first = best_of(waiting.best).id;
    if (thread() != 0) return;
    SampleState state = {kLastRank, ranks ? 0 : waiting.min_mass, first, m_, q_, 0, kOk, 0, 0};
    state.waits = by_mass ? kForMasses : ranks ? kForSelection : kForTree;
    *state_ = state;
  }
  // Finds the kept columns of a row that the first launch could not finish.
  __device__ void run_selection() {
    if (state_->waits == kForSelection) select_row<T, kExp, true>(p_, place_.chunk(), place_.number(), &s_.base);
  }
  // Runs after the selection. If the row's kept columns lie in few leaves, run_few() will compute the row, and no scan
  // reads it.
  __device__ void find_few() {
    if (state_->waits != kForTree || state_->marked != 0 || state_->last == kLastRank) return;
    const float least = z_of_rank(state_->last);
    std::uint32_t own = 0;
    each_leaf(least, [&](int, bool keeps) { own += keeps ? 1 : 0; });
    const std::uint32_t leaves = block_sum<kThreads>(own, &s_, 0);
    if (thread() == 0 && leaves <= kMostFewLeaves) state_->waits = kForFew;
  }
  // Runs after the scan of kept columns. The first warp draws while the other warps write the kept set.
  __device__ void run_rest() {
    if (state_->waits == kDone) {
      kept_ = static_cast<std::int64_t>(state_->kept);
      return write_kept();
    }
    this->load_state();
    masked_ = true;
    std::uint64_t kept = state_->kept;
    scanned_ = state_->waits != kForFew;
    if (!scanned_) kept = run_few();
    // The row's largest z is usable and kept, so the tree does not fail.
    const auto columns = static_cast<std::int64_t>(kept);
    kept_ = columns == p_.valid_vocab ? 0 : columns;
    if (!has_scanned_roots()) find_roots();
    if (thread() < kWarp) {
      draw_from(root_of(), sample_row_of<PlainMemory>(p_, row_), false, {});
    } else if (p_.kept_offsets != nullptr) {
      write_beside_draw();
    }
    if (p_.kept_offsets == nullptr) return;
    __syncthreads();  // the first warp has written the results
    if (thread() == kWarp) place_.mark_overflow();
  }
  // Computes the remaining steps of a row, from the selection on, without a scan.
  __device__ void run_alone() {
    __syncthreads();
    run_selection();
    __syncthreads();
    this->load_state();
    masked_ = true;
    scanned_ = false;
    const std::uint64_t kept = block_sum<kThreads>(this->template leaf_nodes<false>(0, slots_), &s_);
    finish<true>(sample_row_of<PlainMemory>(p_, row_), false, {}, kept);
  }
  // Writes the row's offset and kept ids. Only the n best are written later.
  __device__ void write_kept() {
    if (p_.kept_offsets == nullptr) return;
    if (thread() == 0) place_.publish(kept_);
    std::uint64_t before = 0;
    if (!place_.is_first()) {
      if (warp_of_block() > 0) before = place_.counts_before(thread() - kWarp, kThreads - kWarp);
      before = block_sum<kThreads>(before, &s_);  // up to the barrier in block_sum the first warp may still draw
    }
    if (thread() == 0) {
      s_.kept_begin = place_.place(static_cast<std::int64_t>(before), kept_);
      place_.mark_overflow();
    }
    __syncthreads();
    const std::int64_t begin = s_.kept_begin;
    if (begin < 0) return;
    if (!listed_) return write_mask<0>(begin);
#pragma unroll 1
    for (int i = thread(); i < static_cast<int>(kept_); i += kThreads) p_.kept_ids[begin + i] = ids()[i];
  }
  // Stores the row's number of kept columns for a later launch.
  __device__ void store_count() const {
    if (thread() == 0) state_->kept = static_cast<std::uint64_t>(kept_);
  }
  // Runs after the raw scan, which computes the nodes for raw_logprob (temperature 1, no cuts).
  __device__ void run_raw() {
    const std::int64_t id = p_.ids[row_];
    float raw = canonical_nan();
    if (id >= 0) {
      const float z = z_at(static_cast<int>(id));
      if (!has_scanned_roots()) find_roots();
      const SoftmaxStats root = root_of().root;
      if (thread() == 0) store_root(root);
      raw = logprob_outputs(root, z, 1.0f).logprob;
    }
    if (thread() == 0) p_.raw_logprob[row_] = raw;
  }

 private:
  static __device__ __forceinline__ int thread() { return thread_of_block(); }
  static __device__ __forceinline__ int lane() { return lane_of_warp(); }

  // Calls fn(slot, whether the slot's largest z is at least `least`) for the thread's slots.
  template <class F>
  __device__ __forceinline__ void each_leaf(float least, F fn) const {
#pragma unroll 4
    for (int slot = thread(); slot < num_slots_; slot += kThreads) {
      fn(slot, map_.has_columns(slot) && tops()[slot] >= least);
    }
  }
  // Computes nodes and masks of a row whose kept columns lie in few leaves. Returns the number of these columns.
  __device__ std::uint64_t run_few() {
    auto* const found = reinterpret_cast<std::uint16_t*>(s_.base.counts);
    if (thread() == 0) s_.slots = 0;
    __syncthreads();
    each_leaf(z_of_rank(this->last_), [&](int slot, bool keeps) {
      if (keeps) {
        found[atomicAdd(&s_.slots, 1u)] = static_cast<std::uint16_t>(slot);
      } else {
        reinterpret_cast<uint4*>(mask_)[slot] = make_uint4(0, 0, 0, 0);
        reinterpret_cast<float2*>(nodes_)[slot] = make_float2(-infinity(), 0.0f);
      }
    });
    __syncthreads();
    const auto leaves = static_cast<int>(s_.slots);
    std::uint32_t own = 0;
#pragma unroll 1
    for (int base = 0; base < leaves; base += kThreads / Team::kLanes) {
      const int place = base + thread() / Team::kLanes, slot = place < leaves ? found[place] : 0;
      std::uint32_t words[kMaskWords];
      const SoftmaxStats stats = this->template leaf_of_slot<false>(slot, place < leaves, words);
      if (place >= leaves || thread() % Team::kLanes != 0) continue;
      reinterpret_cast<uint4*>(mask_)[slot] = make_uint4(words[0], words[1], words[2], words[3]);
      reinterpret_cast<float2*>(nodes_)[slot] = make_float2(stats.m, stats.S);
      for (int k = 0; k < kMaskWords; ++k) own += static_cast<std::uint32_t>(set_bits_of(words[k]));
    }
    return block_sum<kThreads>(own, &s_, 1);
  }

  __device__ const float* tops() const { return nodes_ + 2 * slots_; }
  // The threads from `kFirst` on write the ids of the row's mask.
  template <int kFirst>
  __device__ __forceinline__ void write_mask(std::int64_t begin) const {
    auto* const counts = reinterpret_cast<std::uint32_t*>(s_.counts[0]);
    write_ids_of_mask<kThreads - kFirst, kFirst>(map_, mask_, kMaskWords * num_slots_, p_.kept_ids + begin, counts,
                                                 reinterpret_cast<std::uint32_t*>(s_.base.list),
                                                 reinterpret_cast<uint4*>(s_.base.masses));
    static_assert(sizeof(SampleShared::list) >= 4 * kMaskAhead * kThreads);
    static_assert(sizeof(SampleShared::masses) >= 16 * kThreads);
  }
  // Finds the place of the row's kept set, and writes its ids. All warps except the first call this function.
  __device__ __forceinline__ void write_beside_draw() {
    constexpr int kWriters = kThreads - kWarp;
    if (thread() == kWarp) place_.publish(kept_);
    std::uint64_t before = place_.is_first() ? 0 : place_.counts_before(thread() - kWarp, kWriters);
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) before += __shfl_xor_sync(kAllLanes, before, d);
    if (lane() == 0) s_.wide[warp_of_block()] = before;
    meet<kWriters>();
    if (thread() == kWarp) {
      before = 0;
#pragma unroll
      for (int i = 1; i < kWarps; ++i) before += s_.wide[i];
      s_.kept_begin = place_.place(static_cast<std::int64_t>(before), kept_);
    }
    meet<kWriters>();
    const std::int64_t begin = s_.kept_begin;
    if (begin < 0) return;
    const int listed = state_->listed;
    if (listed == 0) return write_mask<kWarp>(begin);
    const std::int32_t* const from = place_.listed_ids() - listed;
#pragma unroll 4
    for (int i = thread() - kWarp; i < listed; i += kWriters) p_.kept_ids[begin + i] = from[i];
  }
  // Shared memory of a list, which replaces the arrays of Base. This memory holds the nodes and masks of the slots that
  // keep a column, in ascending order. sorted() and ids() hold z and ids of the kept columns, ascending by id. ends()
  // holds the index at which each slot's columns end.
  __device__ uint4* masks() const { return reinterpret_cast<uint4*>(s_.base.masses); }
  __device__ float2* listed_nodes() const { return reinterpret_cast<float2*>(s_.base.list); }
  __device__ float* sorted() const { return reinterpret_cast<float*>(s_.base.list + kMostListed); }
  __device__ std::int32_t* ids() const { return reinterpret_cast<std::int32_t*>(sorted() + kMostListedK); }
  __device__ std::uint32_t* ends() const { return reinterpret_cast<std::uint32_t*>(ids() + kMostListedK); }
  static_assert(sizeof(SampleShared::masses) >= 16 * kMostListedK);
  static_assert(sizeof(SampleShared::list) >= 8 * kMostListed + 12 * kMostListedK);
  // Index of a listed slot among the slots that keep a column.
  __device__ int place_of(int slot) const {
    const int word = slot / 32;
    return static_cast<int>(s_.before[word]) + set_bits_of(s_.bitmap[word] & ((1u << (slot % 32)) - 1));
  }

  __device__ SoftmaxStats node_of(int slot) const {
    float2 node = {-infinity(), 0.0f};
    if (!listed_) {
      if (slot < num_slots_ && map_.has_columns(slot)) node = reinterpret_cast<const float2*>(nodes_)[slot];
    } else if (slot < num_slots_ && (s_.bitmap[slot / 32] >> (slot % 32) & 1) != 0) {
      node = listed_nodes()[place_of(slot)];
    }
    return {node.x, node.y, 0.0f, 0.0f};
  }
  // Clears the masks of slots without columns, which no scan writes.
  __device__ void clear_padding() const {
    if (p_.kept_offsets == nullptr) return;
#pragma unroll 1
    for (int i = thread(); i < num_slots_; i += kThreads) {
      if (!map_.has_columns(i)) reinterpret_cast<uint4*>(mask_)[i] = make_uint4(0, 0, 0, 0);
    }
  }
  // Computes the random words in shared memory. The caller needs a barrier before it reads them.
  __device__ void find_words() const {
    if (thread() >= kDrawWords) return;
    s_.words[thread()] = DrawWords<PlainMemory>(p_, row_)(draw_word(thread(), map_.height));
  }

  // Sets m_ and q_ from the row's largest z, and returns the row's status.
  __device__ std::int32_t refer_to(float largest) {
    SoftmaxStats stats;
    const LeafReference reference = leaf_reference(c_, largest, &stats);
    m_ = reference.m;
    q_ = reference.q;
    return reference.usable ? kOk : status_of(stats) | (stats.m == -infinity() ? kEmptyRow : kOk);
  }
  __device__ __forceinline__ void load_best(int slot, float largest, Best* best) const {
    int columns;
    const int first = map_.first(slot, &columns);
    best->slot = slot;
    best->largest = largest;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int column = k * kWarp + lane();
      best->z[k] = column < columns ? logit_at(first + column) : -infinity();
    }
    edit_columns(first, columns, best->z);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int column = k * kWarp + lane();
      best->z[k] = column < columns && is_allowed(first + column) ? best->z[k] : -infinity();
    }
  }
  // The first column of this leaf with the largest z.
  __device__ __forceinline__ Drawn best_of(const Best& best) const {
    int columns, mine = kLeafColumns;
    const int first = map_.first(best.slot, &columns);
#pragma unroll
    for (int k = kOwn - 1; k >= 0; --k) mine = best.z[k] == best.largest ? k * kWarp + lane() : mine;
    const int column = __reduce_min_sync(kAllLanes, mine);
    return {first + column, z_in_lanes(best.z, column)};
  }
  // Replaces z of the lane's edited columns in a leaf. All bits are loaded before the first edit.
  __device__ __forceinline__ void edit_columns(int first, int columns, float (&z)[kOwn]) const {
    if (!has_edits() || columns == 0) return;
    bool has[kOwn];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) has[k] = is_edited(first + min(k * kWarp + lane(), columns - 1));
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int column = k * kWarp + lane();
      if (has[k] && column < columns) z[k] = edit_at(first + column);
    }
  }
  // Number of columns that a row without cuts keeps.
  __device__ std::uint64_t count_allowed() {
    if (allowed_ == nullptr) return static_cast<std::uint64_t>(p_.valid_vocab);
    std::uint32_t mine = 0;
    const int valid_vocab = map_.valid;
#pragma unroll 4
    for (int i = thread(); i < (valid_vocab + 31) / 32; i += kThreads) {
      const int left = valid_vocab - 32 * i;
      const std::uint32_t valid = left >= 32 ? ~0u : (1u << left) - 1;
      mine += static_cast<std::uint32_t>(set_bits_of(static_cast<std::uint32_t>(allowed_[i]) & valid));
    }
    return block_sum<kThreads>(mine, &s_, 1);
  }
  // Cuts the row by a list of its first columns. Returns whether the list was long enough. If the list was long enough,
  // the mask has the kept columns, and each slot that keeps a column has a node.
  template <bool kEnds>
  __device__ __forceinline__ bool by_list(const SampleRow& want, std::uint64_t min_mass, const LeafKeys<kThreads>& keys,
                                          std::uint64_t* kept) {
    const bool vllm = p_.order == SampleOrder::kVllm;
    if (want.top_k <= 0 || want.top_k > kMostListedK || want.top_k >= p_.valid_vocab) return false;
    if (p_.order == SampleOrder::kSglang && want.top_p < 1.0f) return false;  // top_p needs the mass of the whole row
    const auto count = static_cast<std::uint32_t>(want.top_k);
    const FirstColumns found = list_first_columns(keys, count, map_, &s_, *this);
    if (found.size < static_cast<int>(count)) return false;
    return cut_list<kEnds>(want, min_mass, vllm, found, kept);
  }
  // Cuts a list that has the row's first top_k columns, or all columns that can survive.
  template <bool kEnds>
  __device__ __forceinline__ bool cut_list(const SampleRow& want, std::uint64_t min_mass, bool vllm,
                                           const FirstColumns& found, std::uint64_t* kept) {
    const auto count = static_cast<std::uint32_t>(want.top_k);
    const int size = found.size;
    std::uint64_t* const masses = s_.base.masses;
#pragma unroll 1
    for (int i = thread(); i < size; i += kThreads) masses[i] = mass_of(z_of_rank(s_.base.list[i]));
    __syncthreads();
    constexpr int kOwnListed = kMostListed / kThreads;
    const std::uint64_t least = vllm ? min_mass : 0;
    std::uint64_t before[kOwnListed], mass[kOwnListed], mine = 0;
    bool keeps[kOwnListed];
    std::uint32_t survivors = 0, kept_bits = 0;
    // In a short list, two lanes share a column. Each lane compares the column with half of the other columns.
    const bool shares = size <= kThreads / 2;
    const int first = shares ? warp_of_block() * (kWarp / 2) + lane() % (kWarp / 2) : thread();
    const int from = shares ? lane() / (kWarp / 2) : 0, step = shares ? 2 : 1;
#pragma unroll
    for (int k = 0; k < kOwnListed; ++k) {
      const int at = k * kThreads + first;
      keeps[k] = false;
      before[k] = mass[k] = 0;
      if (k > 0 && at >= size) continue;
      const std::uint64_t rank = at < size ? s_.base.list[at] : 0;
      std::uint32_t place = 0;
#pragma unroll 8
      for (int i = from; i < size; i += step) {
        const std::uint64_t other = masses[i];
        const bool precedes = s_.base.list[i] < rank && other >= least;
        place += precedes ? 1 : 0;
        before[k] += precedes ? other : 0;
      }
      if (k == 0 && shares) {
        place += __shfl_xor_sync(kAllLanes, place, kWarp / 2);
        before[k] += __shfl_xor_sync(kAllLanes, before[k], kWarp / 2);
      }
      if (at >= size || from > 0) continue;
      mass[k] = masses[at];
      const bool survives = mass[k] >= least;
      survivors += survives ? 1 : 0;
      keeps[k] = survives && place < count;
      mine += keeps[k] ? mass[k] : 0;
    }
    const std::uint64_t total = block_sum<kThreads>(mine, &s_);
    if (least > 0 && found.bound > 0 && block_sum<kThreads>(survivors, &s_, 0) < count) {
      // If the mass at the bound is below `least` by far more than an exponential's error, no unlisted column survives.
      const std::uint64_t most = mass_of(z_of_key(found.bound));
      if (most + (most >> 12) + 2 >= least) return false;
    }
    const std::uint64_t goal = want.top_p < 1.0f ? share_of_mass(want.top_p, total) : kLastRank;
    std::uint32_t own = 0;
#pragma unroll
    for (int k = 0; k < kOwnListed; ++k) {
      const bool stays = keeps[k] && before[k] < goal && (vllm || mass[k] >= min_mass);
      kept_bits |= stays ? 1u << k : 0;
      own += stays ? 1 : 0;
    }
    *kept = block_sum<kThreads>(own, &s_, 1);
    mark<kEnds>(kept_bits, first);
    return true;
  }
  // Computes the masks, the sorted columns and the nodes of the slots that keep a listed column. `kept`: bit k is set
  // if the thread's k-th column of the list is kept. `first`: the thread's first column of the list.
  template <bool kEnds>
  __device__ __forceinline__ void mark(std::uint32_t kept, int first) {
    std::uint32_t* const bitmap = s_.bitmap;
    auto* const words = reinterpret_cast<std::uint32_t*>(masks());
#pragma unroll 1
    for (int i = thread(); i < kMostListedK; i += kThreads) masks()[i] = make_uint4(0, 0, 0, 0);
    if (thread() < kMostSlots / 32) bitmap[thread()] = 0;
    __syncthreads();
    // Calls fn(rank, slot, column in the slot) for the thread's columns.
    const auto each = [&](auto fn) {
#pragma unroll 1
      for (std::uint32_t left = kept; left != 0; left &= left - 1) {
        const std::uint64_t rank = s_.base.list[lowest_bit_of(left) * kThreads + first];
        int column;
        const int slot = map_.slot_of(static_cast<int>(id_of_rank(rank)), &column);
        fn(rank, slot, column);
      }
    };
    each([&](std::uint64_t, int slot, int) { atomicOr(bitmap + slot / 32, 1u << (slot % 32)); });
    __syncthreads();
    static_assert(kMostSlots / 32 <= kThreads);
    const auto of_word = static_cast<std::uint32_t>(thread() < kMostSlots / 32 ? set_bits_of(bitmap[thread()]) : 0);
    const std::uint32_t before = block_scan<kThreads>(of_word, &s_, 0);
    if (thread() < kMostSlots / 32) s_.before[thread()] = before;
    if (thread() == kThreads - 1) s_.slots = before + of_word;
    __syncthreads();
    each([&](std::uint64_t, int slot, int column) {
      atomicOr(words + place_of(slot) * kMaskWords + column / 32, 1u << (column % 32));
    });
    __syncthreads();
    const int leaves = static_cast<int>(s_.slots);
    constexpr int kOwnPlaces = kMostListedK / kThreads;
    std::uint32_t of_place[kOwnPlaces], of_thread = 0;
#pragma unroll
    for (int k = 0; k < kOwnPlaces; ++k) {
      of_place[k] = static_cast<std::uint32_t>(bits_before(thread() * kOwnPlaces + k, kLeafColumns));
      of_thread += of_place[k];
    }
    std::uint32_t end = block_scan<kThreads>(of_thread, &s_, 1);
#pragma unroll
    for (int k = 0; k < kOwnPlaces; ++k) ends()[thread() * kOwnPlaces + k] = end += of_place[k];
    if ((!kEnds && p_.kept_offsets != nullptr) || p_.top_ids != nullptr) {
#pragma unroll 1
      for (int i = thread(); i < num_slots_; i += kThreads) {
        const bool has = (bitmap[i / 32] >> (i % 32) & 1) != 0;
        reinterpret_cast<uint4*>(mask_)[i] = has ? masks()[place_of(i)] : make_uint4(0, 0, 0, 0);
      }
    }
    __syncthreads();
    each([&](std::uint64_t rank, int slot, int column) {
      const int place = place_of(slot);
      const auto at = ends()[place] - bits_before(place, kLeafColumns) + bits_before(place, column);
      sorted()[at] = z_of_rank(rank);
      ids()[at] = static_cast<std::int32_t>(id_of_rank(rank));
    });
    __syncthreads();
#pragma unroll 1
    for (int place = thread(); place < leaves; place += kThreads) {
      const int count = bits_before(place, kLeafColumns);
      const float* column = sorted() + ends()[place] - count;
      float largest = -infinity();
#pragma unroll 1
      for (int i = 0; i < count; ++i) largest = Base::larger(largest, column[i]);
      SoftmaxStats stats;
      const LeafReference reference = leaf_reference(c_, largest, &stats);
      if (reference.usable) {
        const float sum = sum_of_kept(words + place * kMaskWords, [&] { return this->term(*column++, reference); });
        stats = {reference.m, sum, 0.0f, 0.0f};
      }
      listed_nodes()[place] = make_float2(stats.m, stats.S);
    }
    __syncthreads();
  }
  // Kept columns of a listed slot before `column`.
  __device__ __forceinline__ int bits_before(int place, int column) const {
    return rlk::cuda::bits_before(masks()[place], column);
  }

  // Computes the root of every 32 neighbouring slots in shared memory, and draws a slot below each root. If a scan has
  // stored the row's roots, the row does not need this function.
  __device__ void find_roots() const {
    constexpr int kPair = 2;  // trees whose steps overlap
#pragma unroll 1
    for (int base = warp_of_block(); base < num_roots(); base += kPair * kWarps) {
      SoftmaxStats nodes[kPair];
      DrawnLane drawn[kPair];
#pragma unroll
      for (int i = 0; i < kPair; ++i) nodes[i] = node_of((base + i * kWarps) * kWarp + lane());
      draw_over_lanes(nodes, 0, s_.words, drawn);
#pragma unroll
      for (int i = 0; i < kPair; ++i) {
        const int k = base + i * kWarps;
        if (lane() != 0 || k >= num_roots()) continue;
        s_.roots[k] = make_float2(drawn[i].root.m, drawn[i].root.S);
        s_.drawn[k] = static_cast<std::uint8_t>(drawn[i].lane);
      }
    }
    __syncthreads();
  }
  __device__ bool has_scanned_roots() const { return scanned_ && map_.scans_roots(); }
  __device__ int num_roots() const { return (num_slots_ + kWarp - 1) / kWarp; }
  // From the roots of all groups: the root of all slots, and the drawn group of 32 slots.
  __device__ DrawnLane root_of() const {
    const bool stored = has_scanned_roots();
    const auto* const roots = stored ? reinterpret_cast<const float2*>(scanned_roots(nodes_, slots_)) : s_.roots;
    const auto root_at = [&](int i) {
      const bool has = i < num_roots() && (!stored || map_.has_columns(i * kWarp));
      const float2 root = has ? roots[i] : make_float2(-infinity(), 0.0f);
      return SoftmaxStats{root.x, root.y, 0.0f, 0.0f};
    };
    return draw_over_nodes(num_roots(), root_at, s_.words);
  }
  __device__ void store_root(const SoftmaxStats& root) const {
    nodes_[4 * slots_ - 4] = root.m;
    nodes_[4 * slots_ - 3] = root.S;
  }

  // Computes the tree, draws unless `best` gives the token, and writes the row's results. All threads call this
  // function. `kEnds`: this launch writes the kept set, and publishes the set's count before the draw.
  template <bool kEnds>
  __device__ __forceinline__ void finish(const SampleRow& want, bool has_best, const Best& best, std::uint64_t kept) {
    if (!has_scanned_roots()) find_roots();
    const DrawnLane of_roots = root_of();
    const std::int32_t status = status_of_root(of_roots.root);
    const auto columns = static_cast<std::int64_t>(kept);
    kept_ = status != kOk || columns == p_.valid_vocab ? 0 : columns;
    if (kEnds && p_.kept_offsets != nullptr && thread() == 0) place_.publish(kept_);
    if (thread() < kWarp) draw_from(of_roots, want, has_best, best);
  }
  static __device__ __forceinline__ std::int32_t status_of_root(const SoftmaxStats& root) {
    return status_of(root) | (root.m == -infinity() ? kEmptyRow : kOk);
  }
  // The first warp draws, unless `best` gives the token, and writes the results.
  __device__ __forceinline__ void draw_from(const DrawnLane& of_roots, const SampleRow& want, bool has_best,
                                            const Best& best) {
    const SoftmaxStats root = of_roots.root;
    const std::int32_t status = status_of_root(root);
    if (status != kOk) return write_failed(status);
    const Drawn drawn = has_best ? best_of(best) : draw(of_roots.lane);
    if (lane() != 0) return;
    store_root(root);
    write(drawn.id, status, logprob_outputs(root, drawn.z, want.temperature).logprob);
  }
  // One warp calls this function. `group` is the drawn group of 32 slots.
  __device__ Drawn draw(int group) const {
    const bool is_known = !has_scanned_roots();
    const SoftmaxStats node = node_of(group * kWarp + (is_known ? s_.drawn[group] : lane()));
    const int at = is_known ? s_.drawn[group] : draw_over_lanes(node, 0, s_.words).lane, slot = group * kWarp + at;
    const float m = __shfl_sync(kAllLanes, node.m, at);
    int columns;
    const int first = map_.first(slot, &columns);
    float z[kOwn], terms[kOwn];
    load_kept(slot, first, columns, z);
    const LeafReference reference = {m, leaf_clamp(c_, m), true};
#pragma unroll
    for (int k = 0; k < kOwn; ++k) terms[k] = this->term(z[k], reference);
    const int column = draw_column(terms, s_.words);
    return {first + column, z_in_lanes(z, column)};
  }
  // Loads z of a slot's columns into the lanes of a warp; z is -Inf for columns that are not kept.
  __device__ void load_kept(int slot, int first, int columns, float (&z)[kOwn]) const {
    if (listed_) {
      const int place = place_of(slot);
      const float* const from = sorted() + ends()[place] - bits_before(place, kLeafColumns);
      const auto* const words = reinterpret_cast<const std::uint32_t*>(masks() + place);
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        const bool has = (words[k] >> lane() & 1) != 0;
        z[k] = has ? from[bits_before(place, k * kWarp + lane())] : -infinity();
      }
      return;
    }
    bool has[kOwn];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      const int column = k * kWarp + lane();
      has[k] = column < columns;
      z[k] = has[k] ? logit_at(first + column) : -infinity();
    }
    edit_columns(first, columns, z);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
      if (masked_) {
        has[k] = (mask_[slot * kMaskWords + k] >> lane() & 1) != 0;
      } else if (has[k]) {
        has[k] = is_allowed(first + k * kWarp + lane());
      }
      z[k] = has[k] ? z[k] : -infinity();
    }
  }
  __device__ void write_failed(std::int32_t status) const {
    if (thread() != 0) return;
    store_root(failed_stats(status));
    write(-1, status, canonical_nan());
  }
  __device__ void write(std::int64_t id, std::int32_t status, float logprob) const {
    p_.ids[row_] = id;
    p_.status[row_] = status;
    if (p_.logprob != nullptr) p_.logprob[row_] = logprob;
  }

  FinishShared& s_;
  std::uint64_t* const firsts_;
  const SlotMap map_;
  const int num_slots_;
  std::int64_t kept_ = 0;  // columns of the kept set; 0 if nothing was cut
  bool listed_ = false;    // the nodes lie in the shared memory of a list
  bool scanned_ = true;    // a scan has stored the nodes
  bool masked_ = false;    // the mask in memory has the kept columns
  KeptPlace place_;
};

}  // namespace
}  // namespace rlk::cuda
