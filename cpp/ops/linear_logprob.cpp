// linear_logprob on every device: the products and the statistics of some rows and columns at a time, in a workspace of a
// given size. A device's own kernels serve what they can; bits do not depend on which.
#include "rlk/ops/linear_logprob.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpp/cpu/linear_logprob.h"
#include "cpp/ops/backend.h"
#include "cpp/ops/linear_logprob_parts.h"
#include "rlk/build.h"
#include "rlk/kernels/lora_rows.h"
#include "rlk/kernels/scored_rows.h"
#if RLK_WITH_CUDA
#include "cuda/linear_logprob/linear_logprob.h"
#endif
#if RLK_WITH_HIP
#include "hip/linear_logprob/linear_logprob.h"
#endif

namespace rlk {
namespace {

constexpr std::int64_t kAlign = 256;
constexpr std::int64_t kRowsOfLogits = 1024;      // that are float32 at a time where gradients or logits are of 16 bits
constexpr std::int64_t kFewestRows = 128;         // of a forward, at best: a tile of the products
constexpr std::int64_t kColumnsTogether = 256;    // chunks of the vocabulary are multiples of this, where they can be
constexpr std::int64_t kLeastColumns = 16;        // a step of rule 1, at which a contraction can be cut
constexpr std::int64_t kMostColumns = 24 * 1024;  // wider chunks gain nothing

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t aligned(std::int64_t bytes) { return ceil_div(bytes, kAlign) * kAlign; }

unsigned char* at(void* base, std::int64_t bytes) { return static_cast<unsigned char*>(base) + bytes; }
const unsigned char* at(const void* base, std::int64_t bytes) {
  return static_cast<const unsigned char*>(base) + bytes;
}
template <class T>
T* from_row(T* array, std::int64_t row, std::int64_t each = 1) {
  return array == nullptr ? nullptr : array + row * each;
}
RowLayout dense(std::int64_t rows, std::int64_t columns) { return {std::max<std::int64_t>(rows, 1), 0, columns}; }

// Pieces of a workspace, one after another; of none at all their sizes alone mean something.
class Pieces {
 public:
  explicit Pieces(void* base) : base_(reinterpret_cast<std::uintptr_t>(base)) {}
  template <class T = unsigned char>
  T* take(std::int64_t bytes) {
    const std::uintptr_t piece = base_ + static_cast<std::uintptr_t>(used_);
    used_ += aligned(bytes);
    return reinterpret_cast<T*>(piece);
  }
  std::int64_t used() const { return used_; }

 private:
  std::uintptr_t base_;
  std::int64_t used_ = 0;
};

void scored_rows(const ScoredRowsParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::scored_rows(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::scored_rows(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::scored_rows(p, device.index, stream);
#endif
  no_backend("linear_logprob", device);
}

void check_head(const LogprobInput& p, const Head& head) {
  RLK_CHECK(p.num_rows >= 0 && head.in_features >= 0, "linear_logprob: sizes are not negative");
  RLK_CHECK(p.num_rows < std::int64_t{1} << 31, "linear_logprob: fewer than 2^31 rows");
  RLK_CHECK(p.dtype == head.dtype || p.dtype == DType::kFloat32,
            "linear_logprob: logits have the operands' type or float32");
  RLK_CHECK(p.num_rows == 0 || p.target_rows.inner >= p.num_rows, "linear_logprob: the target has one stride");
  RLK_CHECK(head.lora_rank >= 0 && std::isfinite(head.lora_scale),
            "linear_logprob: lora_rank is not negative, lora_scale is finite");
  if (p.num_rows == 0) return;
  RLK_CHECK(p.target != nullptr, "linear_logprob: target is given");
  RLK_CHECK(head.in_features == 0 || (head.hidden && head.weight), "linear_logprob: hidden and weight are given");
  RLK_CHECK(head.hidden_rows.inner > 0, "linear_logprob: row layouts have inner >= 1");
  RLK_CHECK(head.lora_rank == 0 || ((head.in_features == 0 || head.lora_a) && (p.num_columns == 0 || head.lora_b)),
            "linear_logprob: lora_a and lora_b are given");
}

bool has_lora(const Head& head) { return head.lora_rank > 0; }

// Rows [row, row + rows) of the inputs of logprob that have one element a row.
template <class Params>
void move_to_rows(Params* p, std::int64_t row, std::int64_t rows) {
  p->target = at(p->target, row * p->target_rows.inner_stride * size_of(p->target_dtype));
  p->target_rows.inner = rows;
  p->temperature = from_row(p->temperature, row);
  p->kept_offsets = from_row(p->kept_offsets, row);
  p->num_rows = rows;
}

void copy_scored(const LogprobInput& p, const Head& head, std::int64_t row, std::int64_t rows, void* to, Device device,
                 Stream stream) {
  ScoredRowsParams q;
  q.from = head.hidden;
  q.to = to;
  q.target = p.target;
  q.from_rows = head.hidden_rows;
  q.first_row = row;
  q.num_rows = rows;
  q.row_bytes = head.in_features * size_of(head.dtype);
  q.target_stride = p.target_rows.inner_stride;
  q.ignore_index = p.ignore_index;
  q.element_bytes = size_of(head.dtype);
  q.target_dtype = p.target_dtype;
  if (q.row_bytes > 0) scored_rows(q, device, stream);
}

// What LoRA takes of a workspace for some rows: u, and the sums that it is rounded from.
struct LoraRows {
  float* sums = nullptr;
  void* u = nullptr;
  void take(Pieces* pieces, const Head& head, std::int64_t rows) {
    if (!has_lora(head)) return;
    sums = pieces->take<float>(rows * head.lora_rank * 4);
    u = pieces->take(rows * head.lora_rank * size_of(head.dtype));
  }
  // Of rows of `hidden` that are side by side.
  void compute(Head head, const void* hidden, std::int64_t rows, Device device, Stream stream) const {
    if (!has_lora(head)) return;
    head.hidden = hidden;
    head.hidden_rows = dense(rows, head.in_features);
    linear(lora_product(head, rows, sums), device, stream);
    tree_sum(lora_rounding(head, rows, sums, u), device, stream);
  }
};

// Whether logits are sums in float32 before they are rounded to another type.
bool sums_logits(const Head& head, DType logits_dtype) { return has_lora(head) && logits_dtype != DType::kFloat32; }

// Logits of rows of `hidden` and columns [first, first + columns), [rows, columns]; with LoRA of rows of u, by way of
// `sums` where sums_logits.
void compute_logits(const Head& head, DType logits_dtype, const void* hidden, const void* u, std::int64_t rows,
                    std::int64_t first, std::int64_t columns, float* sums, void* to, Device device, Stream stream) {
  LinearParams q;
  q.x = hidden;
  q.x_rows = dense(rows, head.in_features);
  q.weight = at(head.weight, first * head.weight_stride * size_of(head.dtype));
  q.weight_stride = head.weight_stride;
  if (head.bias != nullptr) q.bias = at(head.bias, first * size_of(head.bias_dtype));
  q.bias_dtype = head.bias_dtype;
  q.y = to;
  q.y_rows = dense(rows, columns);
  q.num_rows = rows;
  q.in_features = head.in_features;
  q.out_features = columns;
  q.dtype = head.dtype;
  q.out_dtype = logits_dtype;
  q.arithmetic = head.arithmetic;
  if (!has_lora(head)) return linear(q, device, stream);
  LinearParams of_hidden = q;
  of_hidden.bias = nullptr;
  of_hidden.out_dtype = DType::kFloat32;
  of_hidden.y = sums_logits(head, logits_dtype) ? sums : to;
  linear(of_hidden, device, stream);
  q.start = static_cast<const float*>(of_hidden.y);
  q.start_stride = columns;
  q.x = u;
  q.x_rows = dense(rows, head.lora_rank);
  q.weight = at(head.lora_b, first * head.lora_b_stride * size_of(head.dtype));
  q.weight_stride = head.lora_b_stride;
  q.in_features = head.lora_rank;
  linear(q, device, stream);
}

void round_to(const float* from, void* to, DType dtype, std::int64_t size, Device device, Stream stream) {
  TreeSumParams q;
  q.parts[0] = from;
  q.sum = to;
  q.size = size;
  q.out_dtype = dtype;
  tree_sum(q, device, stream);
}

// ---- forward -------------------------------------------------------------------------------------------------------

// Workspace of a forward of `rows` rows at a time.
struct ForwardPieces {
  void *hidden, *logits, *of_logprob;
  LoraRows lora;
  float* sums = nullptr;
  std::int64_t bytes;
  ForwardPieces(const LinearLogprobParams& p, std::int64_t rows, Device device) {
    Pieces pieces(p.workspace);
    hidden = pieces.take(rows * p.head.in_features * size_of(p.head.dtype));
    logits = pieces.take(rows * p.num_columns * size_of(p.dtype));
    lora.take(&pieces, p.head, rows);
    if (sums_logits(p.head, p.dtype)) sums = pieces.take<float>(rows * p.num_columns * 4);
    LogprobParams q = p;
    q.num_rows = rows;
    q.logits_rows = dense(rows, p.num_columns);
    of_logprob = pieces.take(logprob_workspace_bytes(q, device));
    bytes = pieces.used();
  }
};

std::int64_t most_rows(const LinearLogprobParams& p, Device device) {
  std::int64_t low = 1, high = p.num_rows;  // the most of [low, high] that fit, by halves
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    ForwardPieces(p, middle, device).bytes <= p.workspace_bytes ? low = middle : high = middle - 1;
  }
  return low > kFewestRows ? low / kFewestRows * kFewestRows : low;
}

void forward_by_rows(const LinearLogprobParams& p, Device device, Stream stream) {
  const std::int64_t step = most_rows(p, device);
  const ForwardPieces pieces(p, step, device);
  for (std::int64_t row = 0; row < p.num_rows; row += step) {
    const std::int64_t rows = std::min(step, p.num_rows - row);
    copy_scored(p, p.head, row, rows, pieces.hidden, device, stream);
    pieces.lora.compute(p.head, pieces.hidden, rows, device, stream);
    compute_logits(p.head, p.dtype, pieces.hidden, pieces.lora.u, rows, 0, p.num_columns, pieces.sums, pieces.logits,
                   device, stream);
    LogprobParams q = p;
    move_to_rows(&q, row, rows);
    q.logits = pieces.logits;
    q.logits_rows = dense(rows, p.num_columns);
    q.logprob = from_row(p.logprob, row);
    q.lse = from_row(p.lse, row);
    q.entropy = from_row(p.entropy, row);
    q.sum_p_sq = from_row(p.sum_p_sq, row);
    q.status = from_row(p.status, row);
    q.stats = from_row(p.stats, row, kStatsFields);
    q.workspace = pieces.of_logprob;
    logprob(q, device, stream);
  }
}

// ---- backward ------------------------------------------------------------------------------------------------------

bool fuses_gradients([[maybe_unused]] const LinearLogprobBackwardParams& p, [[maybe_unused]] Device device) {
#if RLK_WITH_CUDA
  return device.type == DeviceType::kCuda && cuda::fuses_logit_gradients(p, p.head, device.index);
#else
  return false;
#endif
}

// A block of tokens (rule 9) and a chunk of the vocabulary at a time. Where dweight is float32, or there is one block, it
// is its own accumulator and blocks go outside, with float32 sums of dhidden for one of them; else chunks go outside, with
// sums of dweight for one chunk and of dhidden for all rows. Sums of LoRA's gradients follow.
class Backward {
 public:
  Backward(const LinearLogprobBackwardParams& p, std::int64_t chunk, Device device, void* workspace)
      : p_(p),
        head_(p.head),
        chunk_(std::min(chunk, p.num_columns)),
        device_(device),
        fused_(fuses_gradients(p, device)) {
    block_rows_ = std::min(kTokenBlock, p.num_rows);
    const bool sums_logits_here = sums_logits(head_, p.dtype) && !fused_;
    logit_rows_ = p.dtype == head_.dtype && !sums_logits_here ? block_rows_ : std::min(kRowsOfLogits, block_rows_);
    blocks_ = ceil_div(p.num_rows, kTokenBlock);
    chunks_ = ceil_div(p.num_columns, std::max<std::int64_t>(chunk_, 1));
    sums_dweight_ = p.dweight != nullptr && p.dweight_dtype != DType::kFloat32 && blocks_ > 1;
    Pieces pieces(workspace);
    hidden_ = pieces.take(block_rows_ * features() * operand_bytes());
    gradients_ = pieces.take(block_rows_ * chunk_ * operand_bytes());
    if (p.dtype != head_.dtype && !fused_) logits_ = pieces.take<float>(logit_rows_ * chunk_ * 4);
    if (sums_logits_here) logit_sums_ = pieces.take<float>(logit_rows_ * chunk_ * 4);
    const std::int64_t kept_rows = sums_dweight_ ? p.num_rows : block_rows_;
    if (p.dhidden != nullptr && (chunks_ > 1 || has_lora(head_))) {
      dhidden_ = pieces.take<float>(kept_rows * features() * 4);
    }
    if (sums_dweight_) dweight_ = pieces.take<float>(chunk_ * features() * 4);
    lora_.take(&pieces, head_, block_rows_);
    if (has_lora(head_) && (p.dhidden != nullptr || p.dlora_a != nullptr)) {
      v_sums_ = pieces.take<float>(kept_rows * rank() * 4);
      v_ = pieces.take(block_rows_ * rank() * operand_bytes());
    }
    const bool sums_lora = blocks_ > 1 && head_.dtype != DType::kFloat32;
    if (p.dlora_a != nullptr && sums_lora && !p.wide_dlora_a) dlora_a_ = pieces.take<float>(rank() * features() * 4);
    if (p.dlora_b != nullptr && sums_lora) {
      dlora_b_ = pieces.take<float>((sums_dweight_ ? chunk_ : p.num_columns) * rank() * 4);
    }
    if (p.dbias != nullptr) {
      dbias_ = pieces.take<float>(p.num_columns * 4);
      block_dbias_ = pieces.take<float>(chunk_ * 4);
    }
    bytes_ = pieces.used();
  }
  std::int64_t bytes() const { return bytes_; }

  void run(Stream stream) {
    stream_ = stream;
    if (sums_dweight_) {
      for (std::int64_t c = 0; c < chunks_; ++c) {
        for (std::int64_t b = 0; b < blocks_; ++b) step(b, c);
      }
    } else {
      for (std::int64_t b = 0; b < blocks_; ++b) {
        for (std::int64_t c = 0; c < chunks_; ++c) step(b, c);
      }
    }
  }

 private:
  std::int64_t features() const { return head_.in_features; }
  std::int64_t rank() const { return head_.lora_rank; }
  std::int64_t operand_bytes() const { return size_of(head_.dtype); }

  void step(std::int64_t b, std::int64_t c) {
    row_ = b * kTokenBlock;
    rows_ = std::min(kTokenBlock, p_.num_rows - row_);
    first_ = c * chunk_;
    columns_ = std::min(chunk_, p_.num_columns - first_);
    if (c == 0 || sums_dweight_) {
      copy_scored(p_, head_, row_, rows_, hidden_, device_, stream_);
      lora_.compute(head_, hidden_, rows_, device_, stream_);
    }
    logit_gradients();
    if (v_ != nullptr) compute_v(c);
    if (p_.dhidden != nullptr) hidden_gradient(c);
    if (p_.dlora_a != nullptr && c + 1 == chunks_) lora_a_gradient(b);
    if (p_.dlora_b != nullptr) lora_b_gradient(b);
    if (p_.dweight != nullptr) weight_gradient(b);
    if (p_.dbias != nullptr) bias_gradient(b);
  }

  void logit_gradients() {
#if RLK_WITH_CUDA
    if (fused_) {
      const LogprobBackwardParams q = of_rows(0, rows_, gradients_);
      Head head = head_;
      head.hidden = hidden_;
      head.hidden_rows = dense(rows_, features());
      head.weight = at(head_.weight, first_ * head_.weight_stride * operand_bytes());
      if (has_lora(head_)) head.lora_b = at(head_.lora_b, first_ * head_.lora_b_stride * operand_bytes());
      return cuda::logit_gradients(q, head, lora_.u, device_.index, stream_);
    }
#endif
    for (std::int64_t i = 0; i < rows_; i += logit_rows_) {
      const std::int64_t rows = std::min(logit_rows_, rows_ - i);
      unsigned char* const to = at(gradients_, i * columns_ * operand_bytes());
      void* const logits = logits_ == nullptr ? static_cast<void*>(to) : logits_;
      compute_logits(head_, p_.dtype, at(hidden_, i * features() * operand_bytes()),
                     at(lora_.u, i * rank() * operand_bytes()), rows, first_, columns_, logit_sums_, logits, device_,
                     stream_);
      const LogprobBackwardParams q = of_rows(i, rows, logits);
      logprob_backward(q, device_, stream_);
      if (logits_ != nullptr) round_to(logits_, to, head_.dtype, rows * columns_, device_, stream_);
    }
  }

  // Of rows [i, i + rows) of the step's and its columns; logits and their gradients at `logits`.
  LogprobBackwardParams of_rows(std::int64_t i, std::int64_t rows, void* logits) const {
    LogprobBackwardParams q = p_;
    move_to_rows(&q, row_ + i, rows);
    q.vocab_start += first_;
    q.num_columns = columns_;
    q.logits = q.dlogits = logits;
    q.logits_rows = q.dlogits_rows = dense(rows, columns_);
    q.lse = from_row(p_.lse, row_ + i);
    q.entropy = from_row(p_.entropy, row_ + i);
    q.dlogprob = from_row(p_.dlogprob, row_ + i, p_.dlogprob_rows.inner_stride);
    q.dlse = from_row(p_.dlse, row_ + i, p_.dlse_rows.inner_stride);
    q.dentropy = from_row(p_.dentropy, row_ + i, p_.dentropy_rows.inner_stride);
    q.dlogprob_rows.inner = q.dlse_rows.inner = q.dentropy_rows.inner = rows;
    return q;
  }

  // Of the step's gradients and `weight`, whose rows are the step's columns: `sums`, which go on from chunk to chunk.
  LinearInputGradParams sums_over_columns(const void* weight, std::int64_t stride, std::int64_t width, float* sums,
                                          std::int64_t c) const {
    LinearInputGradParams q;
    q.dy = gradients_;
    q.dy_rows = dense(rows_, columns_);
    q.weight = at(weight, first_ * stride * operand_bytes());
    q.weight_stride = stride;
    q.start = c == 0 ? nullptr : sums;
    q.start_stride = width;
    q.dx = sums;
    q.dx_rows = dense(rows_, width);
    q.dx_dtype = DType::kFloat32;
    q.num_rows = rows_;
    q.in_features = width;
    q.out_features = columns_;
    q.dtype = head_.dtype;
    q.arithmetic = head_.arithmetic;
    return q;
  }

  void hidden_gradient(std::int64_t c) {
    const bool last = c + 1 == chunks_;
    float* const sums = from_row(dhidden_, sums_dweight_ ? row_ : 0, features());
    LinearInputGradParams q = sums_over_columns(head_.weight, head_.weight_stride, features(), sums, c);
    if (last && has_lora(head_)) {
      linear_input_grad(q, device_, stream_);
      q.dy = v_;
      q.dy_rows = dense(rows_, rank());
      q.weight = head_.lora_a;
      q.weight_stride = head_.lora_a_stride;
      q.start = sums;
      q.out_features = rank();
    }
    if (last) {
      q.dx_dtype = p_.wide_dhidden ? DType::kFloat32 : head_.dtype;
      q.dx = at(p_.dhidden, row_ * p_.dhidden_rows.inner_stride * size_of(q.dx_dtype));
      q.dx_rows.inner_stride = p_.dhidden_rows.inner_stride;
    }
    linear_input_grad(q, device_, stream_);
  }

  // The chunk's part of v's sums; with the last chunk v itself.
  void compute_v(std::int64_t c) {
    float* const sums = from_row(v_sums_, sums_dweight_ ? row_ : 0, rank());
    linear_input_grad(sums_over_columns(head_.lora_b, head_.lora_b_stride, rank(), sums, c), device_, stream_);
    if (c + 1 == chunks_) tree_sum(lora_rounding(head_, rows_, sums, v_), device_, stream_);
  }

  void lora_a_gradient(std::int64_t b) {
    LinearWeightGradParams q;
    q.dy = v_;
    q.dy_rows = dense(rows_, rank());
    q.x = hidden_;
    q.x_rows = dense(rows_, features());
    q.out_features = rank();
    q.in_features = features();
    fold_block(&q, b, p_.dlora_a, p_.wide_dlora_a ? DType::kFloat32 : head_.dtype, dlora_a_, p_.adds_dlora_a);
  }

  void lora_b_gradient(std::int64_t b) {
    LinearWeightGradParams q;
    q.dy = gradients_;
    q.dy_rows = dense(rows_, columns_);
    q.x = lora_.u;
    q.x_rows = dense(rows_, rank());
    q.out_features = columns_;
    q.in_features = rank();
    fold_block(&q, b, at(p_.dlora_b, first_ * rank() * operand_bytes()), head_.dtype,
               from_row(dlora_b_, sums_dweight_ ? 0 : first_, rank()), false);
  }

  // Block b of a contiguous dweight, by way of `sums` where blocks are several and it is not float32 itself.
  void fold_block(LinearWeightGradParams* q, std::int64_t b, void* dweight, DType dtype, float* sums, bool adds) {
    const bool kept = sums != nullptr && b + 1 < blocks_;
    q->dweight = kept ? sums : dweight;
    q->dweight_dtype = kept ? DType::kFloat32 : dtype;
    q->dweight_stride = q->main_grad_stride = q->in_features;
    if (b > 0 || adds) q->main_grad = sums != nullptr ? sums : static_cast<const float*>(dweight);
    q->num_rows = rows_;
    q->dtype = head_.dtype;
    q->arithmetic = head_.arithmetic;
    linear_weight_grad(*q, device_, stream_);
  }

  void weight_gradient(std::int64_t b) {
    const bool last = b + 1 == blocks_, kept = sums_dweight_ && !last;
    LinearWeightGradParams q;
    q.dy = gradients_;
    q.dy_rows = dense(rows_, columns_);
    q.x = hidden_;
    q.x_rows = dense(rows_, features());
    q.dweight =
        kept ? static_cast<void*>(dweight_) : at(p_.dweight, first_ * p_.dweight_stride * size_of(p_.dweight_dtype));
    q.dweight_stride = kept ? features() : p_.dweight_stride;
    q.dweight_dtype = kept ? DType::kFloat32 : p_.dweight_dtype;
    if (b == 0) {
      q.main_grad = from_row(p_.main_grad, first_, p_.main_grad_stride);
      q.main_grad_stride = p_.main_grad_stride;
    } else {
      q.main_grad = sums_dweight_ ? dweight_ : static_cast<const float*>(q.dweight);
      q.main_grad_stride = sums_dweight_ ? features() : p_.dweight_stride;
    }
    q.num_rows = rows_;
    q.in_features = features();
    q.out_features = columns_;
    q.dtype = head_.dtype;
    q.arithmetic = head_.arithmetic;
    linear_weight_grad(q, device_, stream_);
  }

  void bias_gradient(std::int64_t b) {
    float* const sums = dbias_ + first_;
    LinearBiasGradParams q;
    q.dy = gradients_;
    q.dy_rows = dense(rows_, columns_);
    q.dbias = b == 0 ? sums : block_dbias_;
    q.dbias_dtype = DType::kFloat32;
    q.num_rows = rows_;
    q.out_features = columns_;
    q.dtype = head_.dtype;
    linear_bias_grad(q, device_, stream_);
    if (b > 0) {
      TreeSumParams t;
      t.parts[0] = sums;
      t.parts[1] = block_dbias_;
      t.count = 2;
      t.sum = sums;
      t.size = columns_;
      tree_sum(t, device_, stream_);
    }
    if (b + 1 == blocks_) {
      round_to(sums, at(p_.dbias, first_ * size_of(p_.dbias_dtype)), p_.dbias_dtype, columns_, device_, stream_);
    }
  }

  const LinearLogprobBackwardParams& p_;
  const Head& head_;
  const std::int64_t chunk_;
  const Device device_;
  const bool fused_;  // gradients of logits without logits in memory
  std::int64_t block_rows_, logit_rows_, blocks_, chunks_, bytes_ = 0;
  bool sums_dweight_;
  void *hidden_, *gradients_;
  float *logits_ = nullptr, *dhidden_ = nullptr, *dweight_ = nullptr, *dbias_ = nullptr, *block_dbias_ = nullptr;
  LoraRows lora_;
  void* v_ = nullptr;
  float *logit_sums_ = nullptr, *v_sums_ = nullptr, *dlora_a_ = nullptr, *dlora_b_ = nullptr;
  Stream stream_{};
  std::int64_t row_ = 0, rows_ = 0, first_ = 0, columns_ = 0;  // of the step
};

std::int64_t backward_bytes(const LinearLogprobBackwardParams& p, std::int64_t chunk, Device device) {
  return Backward(p, chunk, device, nullptr).bytes();
}
std::int64_t widest_chunk(const LinearLogprobBackwardParams& p) { return std::min(p.num_columns, kMostColumns); }

// The widest chunk that the workspace has room for.
std::int64_t chunk_of(const LinearLogprobBackwardParams& p, Device device) {
  const std::int64_t widest = widest_chunk(p);
  if (backward_bytes(p, widest, device) <= p.workspace_bytes) return widest;
  std::int64_t low = 1, high = ceil_div(widest, kLeastColumns);
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    backward_bytes(p, middle * kLeastColumns, device) <= p.workspace_bytes ? low = middle : high = middle - 1;
  }
  const std::int64_t chunk = low * kLeastColumns;
  return chunk > kColumnsTogether ? chunk / kColumnsTogether * kColumnsTogether : chunk;
}

// Gradients of no rows: main_grad as it is, and zeros.
void no_rows(const LinearLogprobBackwardParams& p, Device device, Stream stream) {
  const auto zeros = [&](void* dweight, DType dtype, std::int64_t rows, std::int64_t columns) {
    LinearWeightGradParams q;
    q.dweight = dweight;
    q.dweight_stride = q.in_features = columns;
    q.out_features = rows;
    q.dtype = p.head.dtype;
    q.dweight_dtype = dtype;
    q.arithmetic = p.head.arithmetic;
    if (dweight != nullptr) linear_weight_grad(q, device, stream);
  };
  const Head& head = p.head;
  if (!p.adds_dlora_a) {
    zeros(p.dlora_a, p.wide_dlora_a ? DType::kFloat32 : head.dtype, head.lora_rank, head.in_features);
  }
  zeros(p.dlora_b, head.dtype, p.num_columns, head.lora_rank);
  if (p.dweight != nullptr) {
    LinearWeightGradParams q;
    q.main_grad = p.main_grad;
    q.main_grad_stride = p.main_grad_stride;
    q.dweight = p.dweight;
    q.dweight_stride = p.dweight_stride;
    q.in_features = p.head.in_features;
    q.out_features = p.num_columns;
    q.dtype = p.head.dtype;
    q.dweight_dtype = p.dweight_dtype;
    q.arithmetic = p.head.arithmetic;
    linear_weight_grad(q, device, stream);
  }
  if (p.dbias != nullptr) {
    LinearBiasGradParams q;
    q.dbias = p.dbias;
    q.out_features = p.num_columns;
    q.dtype = p.head.dtype;
    q.dbias_dtype = p.dbias_dtype;
    linear_bias_grad(q, device, stream);
  }
}

void require_workspace(const void* workspace, std::int64_t bytes, std::int64_t least) {
  RLK_CHECK(bytes >= least, "linear_logprob: workspace_bytes: expected at least " + std::to_string(least) + ", got " +
                                std::to_string(bytes));
  RLK_CHECK(workspace != nullptr && reinterpret_cast<std::uintptr_t>(workspace) % kAlign == 0,
            "linear_logprob: the workspace begins at a multiple of 256 bytes");
}

// The CPU's own workspace, where a caller gave none.
template <class Params>
std::vector<unsigned char> own_workspace(Params* p, const WorkspaceRange& range) {
  constexpr std::int64_t kOwn = 64 << 20;
  p->workspace_bytes = std::max(range.least, std::min(range.most, kOwn));
  std::vector<unsigned char> memory(static_cast<std::size_t>(p->workspace_bytes + kAlign));
  const auto first = reinterpret_cast<std::uintptr_t>(memory.data());
  p->workspace = memory.data() + (kAlign - static_cast<std::int64_t>(first % kAlign)) % kAlign;
  return memory;
}

}  // namespace

void require_linear_logprob_backend(Device device) { require_backend("linear_logprob", device); }

WorkspaceRange linear_logprob_workspace(const LinearLogprobParams& p, Device device) {
  if (p.num_rows == 0) return {};
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda && cuda::fuses_linear_logprob(p, device.index)) {
    return cuda::fused_linear_logprob_workspace(p, device.index);
  }
#endif
  return {ForwardPieces(p, 1, device).bytes, ForwardPieces(p, p.num_rows, device).bytes};
}

void linear_logprob(const LinearLogprobParams& p, Device device, Stream stream) {
  require_linear_logprob_backend(device);
  check_head(p, p.head);
  if (p.num_rows == 0) return;
  LinearLogprobParams q = p;
  std::vector<unsigned char> own;
  if (device.type == DeviceType::kCpu && p.workspace == nullptr)
    own = own_workspace(&q, linear_logprob_workspace(p, device));
  require_workspace(q.workspace, q.workspace_bytes, linear_logprob_workspace(p, device).least);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda && cuda::fuses_linear_logprob(q, device.index)) {
    return cuda::fused_linear_logprob(q, device.index, stream);
  }
#endif
  forward_by_rows(q, device, stream);
}

WorkspaceRange linear_logprob_backward_workspace(const LinearLogprobBackwardParams& p, Device device) {
  if (p.num_rows == 0) return {};
  if (is_by_parts(p)) return by_parts_workspace(p, device);
  // All columns at once need no sums of dhidden, which may be less than a narrow chunk with them.
  const std::int64_t most = backward_bytes(p, widest_chunk(p), device);
  return {std::min(backward_bytes(p, std::min(p.num_columns, kLeastColumns), device), most), most};
}

void linear_logprob_backward(const LinearLogprobBackwardParams& p, Device device, Stream stream) {
  require_linear_logprob_backend(device);
  check_head(p, p.head);
  const auto is_one_stride = [&](const RowLayout& rows) { return rows.inner >= p.num_rows; };
  RLK_CHECK((p.dlogprob == nullptr || is_one_stride(p.dlogprob_rows)) &&
                (p.dlse == nullptr || is_one_stride(p.dlse_rows)) &&
                (p.dentropy == nullptr || is_one_stride(p.dentropy_rows)) &&
                (p.dhidden == nullptr || is_one_stride(p.dhidden_rows)),
            "linear_logprob_backward: gradients of rows have one stride");
  RLK_CHECK(p.dh_segments == 1 || p.dh_segments == kNumParts, "linear_logprob_backward: dh_segments is 1 or 8");
  RLK_CHECK(has_lora(p.head) || (p.dlora_a == nullptr && p.dlora_b == nullptr),
            "linear_logprob_backward: dlora_a and dlora_b are of LoRA alone");
  RLK_CHECK(!p.adds_dlora_a || p.wide_dlora_a, "linear_logprob_backward: what dlora_a is added to is float32");
  if (p.num_rows == 0) return no_rows(p, device, stream);
  if (is_by_parts(p)) return backward_by_parts(p, device, stream);
  LinearLogprobBackwardParams q = p;
  std::vector<unsigned char> own;
  const WorkspaceRange range = linear_logprob_backward_workspace(p, device);
  if (device.type == DeviceType::kCpu && p.workspace == nullptr) own = own_workspace(&q, range);
  require_workspace(q.workspace, q.workspace_bytes, range.least);
  Backward(q, chunk_of(q, device), device, q.workspace).run(stream);
}

}  // namespace rlk
