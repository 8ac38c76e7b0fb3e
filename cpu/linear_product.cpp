// Computes products of two operands, A and B. A thread takes blocks of outputs one by one, and keeps a block's sums
// until the whole contraction index is summed. The thread packs the block's rows of A, in as many panels of kPanelK
// indices as fit in L2. It packs one panel of B at a time and reads the panel from L1 for all these rows. With few rows
// of A, many panels of A fit, and the thread reads B along its rows. No thread needs panels of another thread.
#include "linear_product.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "float_environment.h"
#include "note_isa.h"
#include "rlk/math/ieee.h"
#include "rlk/math/mma_model.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kBlockRows = 384;     // kBlockRows x kPanelStride floats of A: 408 KiB, for an L2 of 512 KiB
constexpr std::int64_t kBlockColumns = 512;  // kBlockRows x kBlockColumns floats of sums: 768 KiB
constexpr std::int64_t kTasksPerThread = 4;  // several tasks per thread, so that one slow task does not keep all others
                                             // waiting
// Products per thread. A thread with fewer products would save less time than waking it costs.
constexpr std::int64_t kTaskProducts = 200000;
constexpr int kLevels = 3;  // levels of rule 2's tree

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

// Memory aligned to cache lines.
template <class T>
class Aligned {
 public:
  explicit Aligned(std::int64_t n) : data_(static_cast<T*>(::operator new(n * sizeof(T), kLine))) {}
  T* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Delete {
    void operator()(T* p) const { ::operator delete(p, kLine); }
  };
  std::unique_ptr<T, Delete> data_;
};

struct Blocks {
  std::int64_t rows, columns, down, across;
};

Blocks blocks_of(const LinearProduct& p, const LinearLanes& lanes) {
  const std::int64_t row_unit = lanes.tile_rows, column_unit = lanes.tile_columns;
  Blocks b = {std::min(kBlockRows, p.a_size), std::min(kBlockColumns, round_up(p.b_size, column_unit)), 0, 0};
  const auto count = [&] {
    b.down = ceil_div(p.a_size, b.rows);
    b.across = ceil_div(p.b_size, b.columns);
    return b.down * b.across;
  };
  const std::int64_t wanted = num_threads() == 1 ? 1 : kTasksPerThread * num_threads();
  while (count() < wanted) {
    const bool split_columns = b.columns > 2 * column_unit && b.columns >= b.rows;
    if (split_columns) {
      b.columns = round_up(b.columns / 2, column_unit);
    } else if (b.rows > 2 * row_unit) {
      b.rows = round_up(b.rows / 2, row_unit);
    } else if (b.columns > 2 * column_unit) {
      b.columns = round_up(b.columns / 2, column_unit);
    } else {
      break;
    }
  }
  return b;
}

// Panels and sums of one thread.
class Worker {
 public:
  Worker(const LinearProduct& p, const LinearLanes& lanes, const Blocks& blocks)
      : p_(p),
        lanes_(lanes),
        stride_(round_up(blocks.columns, lanes.tile_columns)),
        sums_size_(blocks.rows * stride_),
        panels_(std::clamp(kBlockRows / blocks.rows, std::int64_t{1}, ceil_div(p.contraction, kPanelK) + 1)),
        a_size_(blocks.rows * kPanelStride),
        a_(panels_ * a_size_),
        b_(kPanelK * lanes.tile_columns),
        a_exponents_(aligned_unit() ? panels_ * a_size_ : 0),
        b_exponents_(aligned_unit() ? kPanelK * lanes.tile_columns / 2 : 0),
        memory_(sums_size_ * (1 + kept_sums())),
        pointers_(static_cast<std::size_t>(std::max<std::int64_t>(blocks.rows, kPanelK))) {}

  // Computes outputs [row, row + rows) x [column, column + columns).
  void block(std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns) {
    row_ = row;
    rows_ = rows;
    column_ = column;
    columns_ = columns;
    bool loaded = false;
    if (p_.load) {
      float* const to = p_.continues ? sums() : kept(0);
      for (std::int64_t i = 0; i < rows; ++i) p_.load(row + i, column, columns, to + i * stride_);
      loaded = !p_.continues;
    }
    const std::int64_t segments = ceil_div(p_.contraction, p_.segment);
    for (std::int64_t s = 0; s < segments; ++s) {
      if (!p_.continues) std::fill_n(sums(), rows_ * stride_, 0.0f);
      dot(s * p_.segment, std::min((s + 1) * p_.segment, p_.contraction));
      if (p_.tree) {
        add_to_tree(s, s + 1 == segments);
      } else if (segments > 1 || loaded) {
        if (s == 0 && !loaded) {
          std::copy_n(sums(), rows * stride_, kept(0));
        } else {
          add(kept(0), sums(), kept(0));
        }
        loaded = true;
      }
    }
    if (segments == 0 && !loaded && !p_.continues) std::fill_n(sums(), rows * stride_, 0.0f);
    const float* result = loaded ? kept(0) : sums();
    for (std::int64_t i = 0; i < rows; ++i) p_.store(row + i, column, columns, result + i * stride_);
  }

 private:
  bool aligned_unit() const { return !ieee() && p_.unit.arithmetic != Arithmetic::kGfx90a; }
  int kept_sums() const {
    if (p_.contraction <= p_.segment && !p_.load) return 0;
    return p_.tree ? kLevels : 1;
  }
  float* sums() const { return memory_.get(); }
  float* kept(int level) const { return memory_.get() + (1 + level) * sums_size_; }

  void add(const float* x, const float* y, float* sum) const {
    for (std::int64_t i = 0; i < rows_ * stride_; ++i) sum[i] = add_rn(x[i], y[i]);
  }

  // Adds segment s's sums to the tree. Complete pairs of nodes are added, with the earlier node as the left operand.
  // After the last segment, the result is in sums().
  void add_to_tree(std::int64_t s, bool last) const {
    int level = 0;
    for (; (s >> level & 1) != 0; ++level) add(kept(level), sums(), sums());
    if (!last) std::copy_n(sums(), rows_ * stride_, kept(level));
  }

  // Continues the dot products in sums() over indices [begin, end), ascending.
  void dot(std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; k += panels_ * kPanelK) {
      const int panels = static_cast<int>(std::min(panels_, ceil_div(end - k, kPanelK)));
      for (int i = 0; i < panels; ++i) pack_a(i, panel_at(k + i * kPanelK, end));
      for (std::int64_t j = 0; j < columns_; j += lanes_.tile_columns) {
        for (int i = 0; i < panels; ++i) {
          const Panel panel = panel_at(k + i * kPanelK, end);
          pack_b(column_ + j, std::min<std::int64_t>(lanes_.tile_columns, columns_ - j), panel);
          lanes_.multiply(
              {p_.unit, a(i), a_exponents(i), b_.get(), b_exponents_.get(), sums() + j, rows_, stride_, panel.padded});
        }
      }
    }
  }

  // A panel of indices from k on: `count` indices, padded with zeros to `padded` indices for the unit.
  struct Panel {
    std::int64_t k;
    int count, padded;
  };
  Panel panel_at(std::int64_t k, std::int64_t end) const {
    const int count = static_cast<int>(std::min<std::int64_t>(kPanelK, end - k));
    return {k, count, ieee() ? count : static_cast<int>(round_up(count, kMmaStepK))};
  }

  // Rows [first, first + num) in an operand's memory, from element `from` of each row on.
  LinearRows rows_at(const LinearOperand& x, std::int64_t first, std::int64_t num, std::int64_t from,
                     std::int64_t count) {
    const int bytes = size_of(p_.unit.dtype);
    for (std::int64_t i = 0; i < num; ++i) {
      pointers_[static_cast<std::size_t>(i)] = x.data + (x.rows.offset(first + i) + from) * bytes;
    }
    return {pointers_.data(), num, count, p_.unit.dtype};
  }

  void pack_a(int i, const Panel& panel) {
    if (panel.padded != panel.count) {
      for (std::int64_t r = 0; r < rows_; ++r) {
        float* row = a(i) + r * kPanelStride;
        std::fill(row + panel.count, row + panel.padded, 0.0f);
      }
    }
    if (p_.a.rows_contracted) {
      lanes_.pack_columns(rows_at(p_.a, panel.k, panel.count, row_, rows_), a(i), kPanelStride);
    } else {
      lanes_.pack_rows(rows_at(p_.a, row_, rows_, panel.k, panel.count), a(i), kPanelStride);
    }
    if (!ieee()) lanes_.prepare_a(p_.unit, a(i), a_exponents(i), rows_, panel.padded);
  }

  void pack_b(std::int64_t column, std::int64_t columns, const Panel& panel) {
    const int width = lanes_.tile_columns;
    if (columns != width || panel.padded != panel.count) std::fill_n(b_.get(), panel.padded * width, 0.0f);
    if (p_.b.rows_contracted) {
      lanes_.pack_rows(rows_at(p_.b, panel.k, panel.count, column, columns), b_.get(), width);
    } else {
      lanes_.pack_columns(rows_at(p_.b, column, columns, panel.k, panel.count), b_.get(), width);
    }
    if (!ieee()) lanes_.prepare_b(p_.unit, b_.get(), b_exponents_.get(), panel.padded);
  }

  bool ieee() const { return p_.unit.arithmetic == Arithmetic::kIeee; }
  float* a(int i) const { return a_.get() + i * a_size_; }
  std::int32_t* a_exponents(int i) const { return aligned_unit() ? a_exponents_.get() + i * a_size_ : nullptr; }

  const LinearProduct& p_;
  const LinearLanes& lanes_;
  const std::int64_t stride_, sums_size_, panels_, a_size_;
  const Aligned<float> a_, b_;
  const Aligned<std::int32_t> a_exponents_, b_exponents_;
  const Aligned<float> memory_;
  std::vector<const unsigned char*> pointers_;
  std::int64_t row_ = 0, rows_ = 0, column_ = 0, columns_ = 0;
};

}  // namespace

const LinearLanes& linear_simd() { return RLK_CPU_LANES_IN_USE(linear_simd); }

void linear_product(const LinearProduct& p) {
  if (p.a_size == 0 || p.b_size == 0) return;
  note_isa(p.unit.arithmetic);
  const LinearLanes& lanes = linear_simd();
  const Blocks blocks = blocks_of(p, lanes);
  const std::int64_t tasks = blocks.down * blocks.across;
  const double products =
      static_cast<double>(p.a_size) * static_cast<double>(p.b_size) * static_cast<double>(p.contraction + 1);
  const bool small = products < static_cast<double>(2 * kTaskProducts);
  const std::int64_t workers = small ? 1 : std::min<std::int64_t>(tasks, num_threads());
  std::atomic<std::int64_t> next{0};
  parallel_for(workers, 1, [&](std::int64_t, std::int64_t) {
    const FloatEnvironment environment;
    std::int64_t task = next.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks) return;
    Worker worker(p, lanes, blocks);
    for (; task < tasks; task = next.fetch_add(1, std::memory_order_relaxed)) {
      const std::int64_t row = task % blocks.down * blocks.rows, column = task / blocks.down * blocks.columns;
      worker.block(row, std::min(blocks.rows, p.a_size - row), column, std::min(blocks.columns, p.b_size - column));
    }
  });
}

}  // namespace rlk::cpu
