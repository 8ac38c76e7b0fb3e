// Computes rows with two properties: a list of the row's first columns (the largest z) cuts the row, and history and
// bias edit some columns. The first scan reads the unedited logits. The block that finishes a row computes the row's
// edits before it waits for the scan. The block applies the edits to the leaves' largest z and to the list. CMake
// compiles this file once per architecture and exponential.

#include "finish_kernels.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kEditTableBits = 11, kEditTable = 1 << kEditTableBits;
constexpr int kMostEdits = kEditTable / 2, kMostProbes = 128;

// The edits of a block's row. The edits lie in a table in shared memory, or in device memory if the table is too small.
// A larger table would leave less of L1 for the loads of other blocks.
template <class T>
class RowListEdits {
  using Team = BlockTeam<kRowThreads>;

 public:
  static constexpr bool kAny = true;

  __device__ __forceinline__ RowListEdits(const SampleParams& p, const ProcessLogitsParams& of, std::int64_t row,
                                          const RowEdits<Team>& edits, FinishShared* s)
      : of_(of),
        row_(row),
        map_{s->cuts, static_cast<int>(p.valid_vocab), leaf_height(p.vocab_size)},
        s_(*s),
        logits_(static_cast<const typename T::Storage*>(of.logits) + row * of.logits_stride),
        allowed_(p.allowed == nullptr ? nullptr : p.allowed + row * p.allowed_stride),
        edits_(edits) {}

  // Clears the table and begins loads. The caller then passes a barrier and calls find().
  __device__ __forceinline__ void begin() {
    clear(reinterpret_cast<uint4*>(keys()), 8 * kEditTable);
    clear(reinterpret_cast<uint4*>(after()), 8 * kFewEditSlots);
    if (thread_of_block() == 0) *count() = *full() = 0;
    edits_.find_faults(found());
    first_ = load(edits_.history(), edits_.history().begin + thread_of_block());
    take(&first_);
  }
  // Computes the edits. The caller passes a barrier next.
  __device__ __forceinline__ void find() const {
    const RowEdits<Team>& edits = edits_;
    count_history();
    if (of_.bias_offsets != nullptr) {
      edits.each_of_bias(0, of_.vocab_size, found(), [&](std::int64_t j, std::int64_t) {
        const auto column = static_cast<int>(j);
        if (!takes(column)) return;
        const int place = insert(column, 0.0f);
        if (place >= 0) atomicOr(words() + place, kHasBias);
      });
    }
    __syncthreads();
    if (!fits()) return;
#pragma unroll 1
    for (int i = thread_of_block(); i < static_cast<int>(*count()); i += kRowThreads) {
      const int place = places()[i];
      const std::uint32_t word = words()[place];
      if ((word & kHasBias) == 0) set(place, z()[i], edits.penalties.of(z()[i], word, 0.0f, of_.order));
    }
    if (of_.bias_offsets == nullptr) return;
    __syncthreads();  // all threads have read the flags of columns with a bias
    edits.each_of_bias(0, of_.vocab_size, found(), [&](std::int64_t j, std::int64_t i) {
      const auto column = static_cast<int>(j);
      if (!takes(column)) return;
      const int place = place_of(column);
      const float z = T::load(logits_[column]);
      set(place, z, edits.penalties.of(z, words()[place], of_.bias_values[i], of_.order));
    });
  }
  // Returns the row's faults, if the edits fit the table. The caller has passed a barrier after find().
  __device__ __forceinline__ std::int32_t faults() const { return static_cast<std::int32_t>(*found()); }
  // Whether `allowed` includes the given valid column.
  __device__ __forceinline__ bool allows(int column) const {
    return allowed_ == nullptr || (static_cast<std::uint32_t>(allowed_[column >> 5]) >> (column & 31) & 1) != 0;
  }
  __device__ __forceinline__ bool fits() const { return *full() == 0; }
  // Computes the edits and the faults in memory, where edited() finds the edits. All threads call this function.
  __device__ __forceinline__ void find_in_memory() const {
    const RowEdits<Team>& edits = edits_;
    const std::int64_t columns = of_.vocab_size;
    auto* const to = reinterpret_cast<std::uint32_t*>(out());
    __syncthreads();
    if (thread_of_block() == 0) *full() = 1;
#pragma unroll 1
    for (int i = thread_of_block(); i < static_cast<int>(edit_words(columns)); i += kRowThreads) marks()[i] = 0;
    __syncthreads();
    const auto mark = [&](std::int64_t j) {
      to[j] = 0;
      atomicOr(marks() + j / 32, 1u << (j % 32));
    };
#pragma unroll 1
    for (std::int64_t base = edits.history().begin + thread_of_block(); base < edits.history().end; base += kBatch) {
      const Entries entries = load(edits.history(), base);
      note(entries.bad);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (entries.column[k] >= 0) mark(entries.column[k]);
      }
    }
    edits.each_of_bias(0, columns, found(), [&](std::int64_t j, std::int64_t) { mark(j); });
    __syncthreads();
#pragma unroll 1
    for (std::int64_t base = edits.history().begin + thread_of_block(); base < edits.history().end; base += kBatch) {
      const Entries entries = load(edits.history(), base);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (entries.column[k] >= 0) count_entry(to + entries.column[k], (entries.prompt >> k & 1) != 0);
      }
    }
    edits.each_of_bias(0, columns, found(), [&](std::int64_t j, std::int64_t) { atomicOr(to + j, kHasBias); });
    __syncthreads();
    const auto write = [&](int j, std::uint32_t word, float bias) {
      const float z = T::load(logits_[j]), edited = edits.penalties.of(z, word, bias, of_.order);
      out()[j] = edited;
      add_keys(j, z, edited);
    };
    each_marked([&](int j) {
      const std::uint32_t word = to[j];
      if ((word & kHasBias) == 0) write(j, word, 0.0f);
    });
    __syncthreads();  // all threads have read the flags of columns with a bias
    edits.each_of_bias(0, columns, found(), [&](std::int64_t j, std::int64_t i) {
      if (takes(static_cast<int>(j))) write(static_cast<int>(j), to[j], of_.bias_values[i]);
    });
    __syncthreads();
  }
  // z of an allowed column, given its logit.
  __device__ __forceinline__ float edited(int column, float z) const { return is_marked(column) ? out()[column] : z; }

  // key() and reach() as in NoEdits. The leaf's largest z may have been that of an edited column. In this case only the
  // z of edited columns after the edits are certainly reached.
  __device__ __forceinline__ std::uint32_t key(int slot, std::uint32_t key) const {
    const std::uint32_t edited = after()[slot], reach = max(key, edited);
    const bool spoiled = before()[slot] >= key;
    after()[slot] = reach;
    most_ = max(most_, reach);
    return spoiled ? edited : reach;
  }
  __device__ __forceinline__ std::uint32_t reach(int slot, std::uint32_t) const { return after()[slot]; }
  __device__ __forceinline__ std::uint32_t* bins(FinishShared*) const { return s_.base.counts + kBinsAt; }
  __device__ __forceinline__ bool has(int column) const { return fits() ? place_of(column) >= 0 : is_marked(column); }
  template <class F>
  __device__ __forceinline__ void each(F fn) const {
    if (!fits()) return each_marked([&](int j) { fn(rank_of(out()[j], j)); });
#pragma unroll 1
    for (int i = thread_of_block(); i < static_cast<int>(*count()); i += kRowThreads) {
      const int place = places()[i];
      fn(rank_of(z_at(place), keys()[place] - 1));
    }
  }
  // The largest key that reach() returns for the thread's leaves.
  __device__ __forceinline__ std::uint32_t most() const { return most_; }

 private:
  static __device__ __forceinline__ void clear(uint4* to, int bytes) {
#pragma unroll
    for (int i = 0; i < bytes / 16 / kRowThreads; ++i) to[i * kRowThreads + thread_of_block()] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ bool takes(int column) const { return column < map_.valid && allows(column); }
  __device__ __forceinline__ float z_at(int place) const { return float_of(static_cast<std::int32_t>(words()[place])); }
  static __device__ __forceinline__ std::uint32_t home(int column) {
    return static_cast<std::uint32_t>(column) * 2654435761u >> (32 - kEditTableBits);
  }
  // The place of a column, or -1.
  __device__ __forceinline__ int place_of(int column) const {
    std::uint32_t at = home(column);
#pragma unroll 1
    for (int i = 0; i < kMostProbes; ++i, at = (at + 1) % kEditTable) {
      const std::uint32_t key = keys()[at];
      if (key == static_cast<std::uint32_t>(column) + 1) return static_cast<int>(at);
      if (key == 0) break;
    }
    return -1;
  }
  // Inserts a column into the table unless the table has it. Returns the column's place, or -1 if the table has no
  // room.
  __device__ __forceinline__ int insert(int column, float z) const {
    const std::uint32_t own = static_cast<std::uint32_t>(column) + 1;
    std::uint32_t at = home(column);
#pragma unroll 1
    for (int i = 0; i < kMostProbes; ++i, at = (at + 1) % kEditTable) {
      const std::uint32_t key = atomicCAS(keys() + at, 0u, own);
      if (key == own) return static_cast<int>(at);
      if (key != 0) continue;
      const std::uint32_t index = atomicAdd(count(), 1u);
      if (index >= kMostEdits) break;
      places()[index] = static_cast<std::uint16_t>(at);
      this->z()[index] = z;
      return static_cast<int>(at);
    }
    *full() = 1;
    return -1;
  }
  // Entries of the history that a thread loads together. `column` is -1 if sample cannot keep the entry's column.
  static constexpr int kAhead = 2, kBatch = kAhead * kRowThreads;
  struct Entries {
    int column[kAhead];
    float z[kAhead];
    std::uint32_t prompt;  // bit k: whether entry k belongs to the prompt
    bool bad;
  };
  // Loads the thread's entries that begin at `base`.
  __device__ __forceinline__ Entries load(const RowSpan& history, std::int64_t base) const {
    Entries entries = {};
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const std::int64_t i = base + k * kRowThreads;
      entries.column[k] = -1;
      if (i >= history.end) continue;
      const std::int64_t id = of_.history_ids.template at<PlainMemory>(i);
      if (of_.is_prompt != nullptr && of_.is_prompt[i] != 0) entries.prompt |= 1u << k;
      entries.bad |= id < 0 || id >= of_.vocab_size;
      if (id >= 0 && id < map_.valid) entries.column[k] = static_cast<int>(id);
    }
    return entries;
  }
  // Loads z of the entries' columns, and drops entries whose columns are not allowed.
  __device__ __forceinline__ void take(Entries* entries) const {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int column = entries->column[k];
      if (column >= 0 && !allows(column)) entries->column[k] = -1;
      entries->z[k] = column >= 0 ? T::load(logits_[column]) : 0.0f;
    }
  }
  __device__ __forceinline__ void note(bool bad) const {
    if (bad) atomicOr(found(), static_cast<std::uint32_t>(kBadHistory));
  }
  static __device__ __forceinline__ void count_entry(std::uint32_t* word, bool in_prompt) {
    in_prompt ? atomicOr(word, kInPrompt) : atomicAdd(word, 1u);
  }
  // Counts the entries of the history in the table, as long as all columns fit.
  __device__ __forceinline__ void count_history() const {
    const RowSpan& history = edits_.history();
    std::int64_t base = history.begin + thread_of_block();
    Entries entries = first_;
#pragma unroll 1
    for (;;) {
      note(entries.bad);
#pragma unroll 1
      for (int k = 0; k < kAhead && base + k * kRowThreads < history.end; ++k) {
        const int place = entries.column[0] < 0 ? -1 : insert(entries.column[0], entries.z[0]);
        if (place >= 0) count_entry(words() + place, (entries.prompt >> k & 1) != 0);
#pragma unroll
        for (int i = 0; i + 1 < kAhead; ++i) {
          entries.column[i] = entries.column[i + 1];
          entries.z[i] = entries.z[i + 1];
        }
      }
      base += kBatch;
      if (base >= history.end || *static_cast<volatile std::uint32_t*>(full()) != 0) return;
      entries = load(history, base);
      take(&entries);
    }
  }
  // Stores z after edits of the column at a place.
  __device__ __forceinline__ void set(int place, float was, float is) const {
    words()[place] = static_cast<std::uint32_t>(rlk::bits_of(is));
    add_keys(static_cast<int>(keys()[place]) - 1, was, is);
  }
  __device__ __forceinline__ void add_keys(int column, float was, float is) const {
    const auto key_of_any = [](float z) { return is_nan(z) ? ~0u : key_of(z); };
    int in_slot;
    const int slot = map_.slot_of(column, &in_slot);
    atomicMax(after() + slot, key_of_any(is));
    atomicMax(before() + slot, key_of_any(was));
  }

  // If the edits lie in memory, a bit marks each edited column. `out` first holds the columns' words (counts and flags
  // of process_logits), then their z.
  __device__ __forceinline__ float* out() const { return of_.out + row_ * of_.vocab_size; }
  __device__ __forceinline__ std::uint32_t* marks() const { return of_.edited + row_ * edit_words(of_.vocab_size); }
  __device__ __forceinline__ bool is_marked(int column) const {
    return (marks()[column / 32] >> (column % 32) & 1) != 0;
  }
  // Calls fn(column) for the thread's marked columns that are allowed.
  template <class F>
  __device__ __forceinline__ void each_marked(F fn) const {
#pragma unroll 1
    for (int i = thread_of_block(); i < static_cast<int>(edit_words(map_.valid)); i += kRowThreads) {
#pragma unroll 1
      for (std::uint32_t left = marks()[i]; left != 0; left &= left - 1) {
        const int column = 32 * i + lowest_bit_of(left);
        if (takes(column)) fn(column);
      }
    }
  }
  // A hash table with open addressing, for the edited columns that are allowed. Each place has a key and a word. The
  // key is the column + 1, or 0 in a free place. The word first holds the column's count in the history and two flags,
  // as in process_logits, and later z after the edits.
  __device__ __forceinline__ std::uint32_t* keys() const { return reinterpret_cast<std::uint32_t*>(s_.base.masses); }
  __device__ __forceinline__ std::uint32_t* words() const { return keys() + kEditTable; }
  static_assert(sizeof(SampleShared::masses) >= 8 * kEditTable);
  // z of the columns before the edits, in the order in which the columns were inserted. Later the array holds the
  // leaves of a list.
  __device__ __forceinline__ float* z() const { return reinterpret_cast<float*>(s_.base.counts); }
  static_assert(4 * kMostEdits >= 2 * kFewEditSlots);
  // The columns' places in the table, in the order in which the columns were inserted.
  __device__ __forceinline__ std::uint16_t* places() const {
    return reinterpret_cast<std::uint16_t*>(s_.base.counts + kMostEdits);
  }
  static constexpr int kBinsAt = kMostEdits + kMostEdits / 2;  // index at which bins() begin, behind places()
  static_assert(sizeof(SampleShared::counts) >= 4 * (kBinsAt + kRowThreads));
  __device__ __forceinline__ std::uint32_t* count() const { return s_.base.chunk_counts; }
  __device__ __forceinline__ std::uint32_t* found() const { return s_.base.chunk_counts + 1; }
  // Nonzero if the table has no room for all columns.
  __device__ __forceinline__ std::uint32_t* full() const { return s_.base.chunk_counts + 2; }
  // For each leaf, the largest key of its edited columns, after and before the edits; 0 if the leaf has none. A list
  // later overwrites these arrays.
  __device__ __forceinline__ std::uint32_t* after() const { return reinterpret_cast<std::uint32_t*>(s_.base.list); }
  __device__ __forceinline__ std::uint32_t* before() const { return after() + kFewEditSlots; }
  static_assert(sizeof(SampleShared::list) >= 8 * kFewEditSlots);

  const ProcessLogitsParams& of_;
  const std::int64_t row_;
  const SlotMap map_;
  FinishShared& s_;
  const typename T::Storage* const logits_;
  const std::int32_t* const allowed_;
  const RowEdits<Team>& edits_;
  Entries first_ = {};
  mutable std::uint32_t most_ = 0;
};

template <class T, Exp kExp>
class EditedRow : public FinishedRow<T, kExp> {
  using Base = FinishedRow<T, kExp>;
  using Edits = RowListEdits<T>;
  using Base::c_, Base::m_, Base::q_, Base::state_, Base::mass_of;
  using Base::p_, Base::row_, Base::s_, Base::map_, Base::num_slots_, Base::listed_, Base::scanned_;
  using Base::thread, Base::lane;

 public:
  using Base::Base;

  // Finishes the row except for its kept set.
  __device__ __forceinline__ void run_edited(const Edits& edits) {
    const SampleRow want = sample_row_of<PlainMemory>(p_, row_);
    c_ = log2_scale(want.temperature);
    std::uint64_t kept = 0;
    const std::int32_t status = cut(want, edits, &kept);
    listed_ = true;
    scanned_ = false;
    if (thread() == 0) *state_ = {kLastRank, 0, -1, m_, q_, 0, status, 0, kDone};
    if (status != kOk) return this->write_failed(status);
    this->template finish<true>(want, false, {}, kept);
  }

 private:
  // Lists the columns that the row keeps. Returns the row's status.
  __device__ __forceinline__ std::int32_t cut(const SampleRow& want, const Edits& edits, std::uint64_t* kept) {
    const auto count = static_cast<std::uint32_t>(want.top_k);
    const bool vllm = p_.order == SampleOrder::kVllm;
#pragma unroll 1
    for (bool by_leaves = true;; by_leaves = false) {
      if (__builtin_expect(!by_leaves || !edits.fits(), 0)) edits.find_in_memory();
      std::int32_t status = want.status | edits.faults();
      if (status != kOk) return status;
      std::uint32_t largest;
      FirstColumns found;
      if (__builtin_expect(by_leaves, 1)) {
        const auto keys = load_keys<kRowThreads>(this->tops(), num_slots_, map_, &s_, edits);
        // If a leaf may reach a key above the largest certain key, the row's largest z is known only after the list.
        const bool known = __syncthreads_or(edits.most() > keys.largest ? 1 : 0) == 0;
        largest = keys.largest;
        if (known) status = refer(largest);
        if (status != kOk) return status;
        found = list_first_columns(keys, count, map_, &s_, *this, edits);
        if (found.size < static_cast<int>(count)) continue;
        if (!known) {
          largest = largest_listed(found.size);
          status = refer(largest);
        }
      } else {
        largest = largest_column(edits);
        status = refer(largest);
      }
      if (status != kOk) return status;
      const std::uint64_t min_mass = share_of_mass(want.min_p, mass_of(z_of_key(largest)));
      if (!by_leaves) found = search(want, edits, vllm ? min_mass : 0);
      if (this->template cut_list<true>(want, min_mass, vllm, found, kept)) return kOk;
    }
  }
  // Sets the row's reference m_ (exponentials are relative to 2^m_) by the key of its largest z, and returns the row's
  // status.
  __device__ __forceinline__ std::int32_t refer(std::uint32_t largest) {
    return this->refer_to(largest == 0 ? -infinity() : largest == ~0u ? canonical_nan() : z_of_key(largest));
  }
  // The largest key of the list.
  __device__ __forceinline__ std::uint32_t largest_listed(int size) const {
    std::uint32_t own = 0;
#pragma unroll 1
    for (int i = thread(); i < size; i += kRowThreads) {
      own = max(own, ~static_cast<std::uint32_t>(s_.base.list[i] >> kIdBits));
    }
    return block_max(own);
  }
  __device__ __forceinline__ std::uint32_t block_max(std::uint32_t own) const {
    own = __reduce_max_sync(kAllLanes, own);
    if (lane() == 0) s_.counts[1][warp_of_block()].x = own;
    __syncthreads();
    return __reduce_max_sync(kAllLanes, s_.counts[1][lane() % (kRowThreads / kWarp)].x);
  }

  // Serves rows for which no list from the leaves' largest z suffices: many columns have nearly the same z, or edits
  // lower the largest z of too many leaves. Calls fn(column, z) for the thread's allowed columns.
  template <class F>
  __device__ __forceinline__ void each_column(const Edits& edits, F fn) const {
    constexpr int kAhead = 4;
#pragma unroll 1
    for (int base = thread(); base < map_.valid; base += kAhead * kRowThreads) {
      float z[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) z[k] = this->logit_at(min(base + k * kRowThreads, map_.valid - 1));
#pragma unroll 1
      for (int column = base; column < min(base + kAhead * kRowThreads, map_.valid); column += kRowThreads) {
        if (edits.allows(column)) fn(column, edits.edited(column, z[0]));
#pragma unroll
        for (int k = 0; k + 1 < kAhead; ++k) z[k] = z[k + 1];
      }
    }
  }
  // The key of the row's largest z.
  __device__ __forceinline__ std::uint32_t largest_column(const Edits& edits) const {
    std::uint32_t own = 0;
    each_column(edits, [&](int, float z) { own = max(own, is_nan(z) ? ~0u : key_of(z)); });
    __syncthreads();
    return block_max(own);
  }
  // Lists columns of at least mass `least`: the first top_k of them, or all if there are fewer.
  __device__ __forceinline__ FirstColumns search(const SampleRow& want, const Edits& edits, std::uint64_t least) const {
    std::uint32_t* const bins = s_.base.counts;
    constexpr int kOwnBins = kDigitBins / kRowThreads;
    const auto count = static_cast<std::uint32_t>(want.top_k);
    const auto each = [&](auto fn) {
      each_column(edits, [&](int column, float z) {
        if (least == 0 || mass_of(z) >= least) fn(rank_of(z, column));
      });
    };
    std::uint64_t last = 0;  // leading digits of the largest rank that the list needs
    std::uint32_t before = 0;
    int shift = 64 - 1;
#pragma unroll 1
    for (int digit = 0; digit < kRankDigits; ++digit) {
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kOwnBins; ++k) bins[k * kRowThreads + thread()] = 0;
      if (thread() == 0) s_.bin = make_uint3(~0u, 0, 0);
      __syncthreads();
      const int bits = digit_bits(digit);
      shift = digit_shift(digit);
      each([&](std::uint64_t rank) {
        if (rank >> (shift + bits) == last) atomicAdd(bins + (rank >> shift & ((1u << bits) - 1)), 1u);
      });
      __syncthreads();
      std::uint32_t own = 0;
#pragma unroll 1
      for (int k = 0; k < kOwnBins; ++k) own += bins[thread() * kOwnBins + k];
      std::uint32_t reach = before + block_scan(own, &s_, 0);
#pragma unroll 1
      for (int k = 0; k < kOwnBins; ++k) {
        const int bin = thread() * kOwnBins + k;
        const std::uint32_t from = reach;
        reach += bins[bin];
        if (from < count && reach >= count) s_.bin = make_uint3(bin, from, reach);
      }
      __syncthreads();
      const uint3 bin = s_.bin;
      last = last << bits | bin.x;
      before = bin.y;
      if (bin.x == ~0u) last = kLastRank;  // fewer columns than top_k
      if (bin.x == ~0u || bin.z <= kMostListed) break;
    }
    __syncthreads();
    if (thread() == 0) s_.listed = 0;
    __syncthreads();
    each([&](std::uint64_t rank) {
      if (rank >> shift > last) return;
      const std::uint32_t at = atomicAdd(&s_.listed, 1u);
      s_.base.list[at] = rank;
    });
    __syncthreads();
    return {static_cast<int>(s_.listed), 0};
  }
};

template <class T, Exp kExp>
__global__ void __launch_bounds__(kRowThreads, kFinishBlocks<Finish::kWhole>)
    sample_edited_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk,
                         const __grid_constant__ ProcessLogitsParams of) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const shared = reinterpret_cast<FinishShared*>(memory);
  const std::int64_t i = blockIdx.x;
  // The history, the bias and the logits are complete before the scan begins, so the block may read them before it
  // waits.
  const BlockTeam<kRowThreads> team;
  const RowEdits<BlockTeam<kRowThreads>> of_row(team, of, chunk.first + i);
  RowListEdits<T> edits(p, of, chunk.first + i, of_row, shared);
  edits.begin();
  EditedRow<T, kExp> row(p, chunk, i, shared, true);
  edits.find();
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  row.run_edited(edits);
  row.write_kept();
}

}  // namespace

namespace RLK_CUDA_ARCH {

template <class T, Exp kExp>
void finish_edited_rows(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  launch_dependent<kOverlap>(sample_edited_kernel<T, kExp>, static_cast<int>(chunk.rows), kRowThreads,
                             sizeof(FinishShared), stream, p, chunk, *p.process);
}

template void finish_edited_rows<RLK_PART>(const SampleParams&, const SampleChunk&, cudaStream_t);

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
