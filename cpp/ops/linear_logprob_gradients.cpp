// Computes gradients of logits, and their products, for one block of tokens and one chunk of the vocabulary at a time.
#include "cpp/ops/linear_logprob_gradients.h"

#include <algorithm>
#include <vector>

#include "cpp/ops/linear_logprob_chunks.h"
#include "cpp/ops/linear_logprob_rows.h"
#include "kernels/rows/lora_rows.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/linear_logprob/linear_logprob.h"
#endif

namespace rlk {
namespace {

constexpr std::int64_t kLeastColumns = 16;  // a step of rule 1; a sum over columns can be cut after each step

bool fuses_gradients([[maybe_unused]] const LinearLogprobBackwardParams& p, [[maybe_unused]] Device device) {
#if RLK_WITH_CUDA
  // dbias sums rows by their original index (rule 9), but a fused backward moves the scored rows (whose target is not
  // ignore_index) together.
  return device.type == DeviceType::kCuda && p.dbias == nullptr && cuda::fuses_logit_gradients(p, p.head, device.index);
#else
  return false;
#endif
}

// Computes the gradients for one block of tokens (rule 9) and one chunk of the vocabulary at a time. Usually the outer
// loop is over blocks, and workspace holds float32 sums of dhidden for one block. If dweight is float32, or if there is
// one block, it is accumulated in place. Otherwise dweight needs float32 sums, too. If these would take more memory
// than sums of dhidden for all rows, the outer loop is over chunks, with sums of dweight for one chunk. LoRA's
// gradients have float32 sums of their own. A fused kernel of the gradients of logits skips every group of rows without
// a scored row. A block's hidden states, gradients and sums of dhidden are then those of the remaining groups, and
// zeros follow them.
class Backward {
 public:
  Backward(const LinearLogprobBackwardParams& p, const Cut& cut, Device device, void* workspace)
      : p_(p), head_(p.head), cut_(cut), device_(device), fused_(fuses_gradients(p, device)) {
    const std::int64_t chunk = std::min(cut.chunk, p.num_columns);
    block_rows_ = std::min(kTokenBlock, p.num_rows);
    const bool sums_logits_here = sums_logits(head_, p.dtype) && !fused_;
    logit_rows_ = p.dtype == head_.dtype && !sums_logits_here ? block_rows_ : std::min(kRowsOfLogits, block_rows_);
    blocks_ = ceil_div(p.num_rows, kTokenBlock);
    sums_dweight_ = p.dweight != nullptr && p.dweight_dtype != DType::kFloat32 && blocks_ > 1;
    chunks_outside_ = sums_dweight_ && (p.dhidden == nullptr || p.num_rows < p.num_columns);
    Pieces pieces(workspace);
    if (fused_) all_groups_ = pieces.take<ScoredGroups>((chunks_outside_ ? blocks_ : 1) * sizeof(ScoredGroups));
    if (!cut.borrows) hidden_ = pieces.take(block_rows_ * features() * operand_bytes());
    own_gradients_ = pieces.take(block_rows_ * round_up_8(chunk) * operand_bytes());
    if (p.dtype != head_.dtype && !fused_) logits_ = pieces.take<float>(logit_rows_ * round_up_8(chunk) * 4);
    if (sums_logits_here) logit_sums_ = pieces.take<float>(logit_rows_ * chunk * 4);
    const std::int64_t kept_rows = chunks_outside_ ? p.num_rows : block_rows_;
    const std::int64_t kept_columns = chunks_outside_ ? chunk : p.num_columns;
    if (p.dhidden != nullptr && (chunk < p.num_columns || has_lora(head_) || (fused_ && p.wide_dhidden))) {
      dhidden_ = pieces.take<float>(kept_rows * features() * 4);
    }
    if (sums_dweight_) dweight_ = pieces.take<float>(kept_columns * features() * 4);
    lora_.take(&pieces, head_, block_rows_);
    if (has_lora(head_) && (p.dhidden != nullptr || p.dlora_a != nullptr)) {
      v_sums_ = pieces.take<float>(kept_rows * rank() * 4);
      v_ = pieces.take(block_rows_ * rank() * operand_bytes());
    }
    const bool sums_lora = blocks_ > 1 && head_.dtype != DType::kFloat32;
    if (p.dlora_a != nullptr && sums_lora && !p.wide_dlora_a) dlora_a_ = pieces.take<float>(rank() * features() * 4);
    if (p.dlora_b != nullptr && sums_lora) dlora_b_ = pieces.take<float>(kept_columns * rank() * 4);
    if (p.dbias != nullptr) {
      dbias_ = pieces.take<float>(p.num_columns * 4);
      block_dbias_ = pieces.take<float>(chunk * 4);
    }
    bytes_ = pieces.used();
  }
  std::int64_t bytes() const { return bytes_; }
  // Bytes of float32 sums beyond the sums of one block of tokens.
  std::int64_t sum_bytes() const {
    if (!sums_dweight_) return 0;
    const std::int64_t of_dhidden = dhidden_ == nullptr ? 0 : aligned(p_.num_rows * features() * 4);
    return chunks_outside_ ? of_dhidden : aligned(p_.num_columns * features() * 4);
  }

  void run(Stream stream) {
    stream_ = stream;
    const std::vector<Chunk> chunks = chunks_of(p_, cut_);
    if (chunks_outside_) {
      for (const Chunk& chunk : chunks) {
        for (std::int64_t b = 0; b < blocks_; ++b) step(b, chunk);
      }
    } else {
      for (std::int64_t b = 0; b < blocks_; ++b) {
        for (const Chunk& chunk : chunks) step(b, chunk);
      }
    }
  }

 private:
  std::int64_t features() const { return head_.in_features; }
  std::int64_t rank() const { return head_.lora_rank; }
  std::int64_t operand_bytes() const { return size_of(head_.dtype); }

  std::int64_t pitch() const { return round_up_8(columns_); }

  bool is_first() const { return first_ == 0; }
  bool is_last() const { return first_ + columns_ == p_.num_columns; }

  void step(std::int64_t b, const Chunk& chunk) {
    row_ = b * kTokenBlock;
    rows_ = std::min(kTokenBlock, p_.num_rows - row_);
    void* const gradients_before = gradients_;
    const std::int64_t columns_before = columns_;
    first_ = chunk.first;
    columns_ = chunk.count;
    gradients_ = chunk.in_dweight ? at(p_.dweight, offset_in_dweight(p_, chunk)) : own_gradients_;
    const bool new_rows = is_first() || chunks_outside_;
    if (new_rows) {
      groups_ = from_row(all_groups_, chunks_outside_ ? b : 0);
      if (is_first()) find_groups();  // if the outer loop is over chunks, every block keeps its own groups
      if (cut_.borrows) hidden_ = at(p_.dhidden, row_ * features() * operand_bytes());
      if (is_first() || !cut_.borrows) copy_scored(p_, head_, row_, rows_, groups_, hidden_, device_, stream_);
      lora_.compute(head_, hidden_, rows_, device_, stream_);
    }
    // The zeros from the previous chunk are still valid, unless the rows or the layout of gradients changed.
    if (new_rows || gradients_ != gradients_before || columns_ != columns_before) zero_left_out(gradients_, pitch());
    if (pitch() > columns_) zero_padding();
    logit_gradients();
    if (v_ != nullptr) compute_v();
    if (p_.dlora_a != nullptr && is_last()) lora_a_gradient(b);
    if (p_.dlora_b != nullptr) lora_b_gradient(b);
    if (p_.dweight != nullptr) weight_gradient(b);
    if (p_.dbias != nullptr) bias_gradient(b);
    if (p_.dhidden != nullptr) hidden_gradient();  // with the last chunk, dhidden may overwrite the hidden states
  }

  void find_groups() {
#if RLK_WITH_CUDA
    if (groups_ == nullptr) return;
    LogprobInput q = p_;
    move_to_rows(&q, row_, rows_);
    cuda::find_scored_groups(q, groups_, device_.index, stream_);
#endif
  }
  // Writes zeros to the rows after the groups that have a scored row. Products over all rows read these rows, and
  // nothing else writes them.
  void zero_left_out([[maybe_unused]] void* rows, [[maybe_unused]] std::int64_t width) {
#if RLK_WITH_CUDA
    if (groups_ == nullptr) return;
    cuda::zero_rows_past(groups_, rows, rows_, width * operand_bytes(), device_.index, stream_);
#endif
  }
  // The number of a block's first rows that belong to groups with a scored row, for kernels that can skip the later
  // rows.
  const std::int32_t* row_limit() const { return groups_ == nullptr ? nullptr : &groups_->limit; }

  void logit_gradients() {
#if RLK_WITH_CUDA
    if (fused_) {
      const LogprobBackwardParams q = of_rows(0, rows_, gradients_);
      Head head = head_;
      head.hidden = hidden_;
      head.hidden_rows = dense(rows_, features());
      head.weight = at(head_.weight, first_ * head_.weight_stride * operand_bytes());
      if (has_lora(head_)) head.lora_b = at(head_.lora_b, first_ * head_.lora_b_stride * operand_bytes());
      return cuda::logit_gradients(q, head, lora_.u, groups_, device_.index, stream_);
    }
#endif
    for (std::int64_t i = 0; i < rows_; i += logit_rows_) {
      const std::int64_t rows = std::min(logit_rows_, rows_ - i);
      unsigned char* const to = at(gradients_, i * pitch() * operand_bytes());
      void* const logits = logits_ == nullptr ? static_cast<void*>(to) : logits_;
      compute_logits(head_, p_.dtype, at(hidden_, i * features() * operand_bytes()),
                     at(lora_.u, i * rank() * operand_bytes()), rows, first_, columns_, logit_sums_, logits, pitch(),
                     device_, stream_);
      const LogprobBackwardParams q = of_rows(i, rows, logits);
      logprob_backward(q, device_, stream_);
      if (logits_ != nullptr) round_to(logits_, to, head_.dtype, rows * pitch(), device_, stream_);
    }
  }

  // Clears the padding between rows of gradients. If float32 logits are rounded to gradients in one pass, the function
  // clears the padding of these logits instead.
  void zero_padding() const {
    LinearInputGradParams q;  // an empty sum
    const bool wide = logits_ != nullptr;
    q.num_rows = wide ? logit_rows_ : rows_;
    q.dy_rows = dense(q.num_rows, 0);
    q.weight_stride = q.in_features = pitch() - columns_;
    q.dx = wide ? static_cast<void*>(logits_ + columns_) : at(gradients_, columns_ * operand_bytes());
    q.dx_rows = dense(q.num_rows, pitch());
    q.dx_dtype = wide ? DType::kFloat32 : head_.dtype;
    q.dtype = head_.dtype;
    q.arithmetic = head_.arithmetic;
    linear_input_grad(q, device_, stream_);
  }

  // Params of logprob_backward for rows [i, i + rows) and the columns of the step, with logits and their gradients at
  // `logits`.
  LogprobBackwardParams of_rows(std::int64_t i, std::int64_t rows, void* logits) const {
    LogprobBackwardParams q = p_;
    move_to_rows(&q, row_ + i, rows);
    q.vocab_start += first_;
    q.num_columns = columns_;
    q.logits = q.dlogits = logits;
    q.logits_rows = q.dlogits_rows = dense(rows, pitch());
    q.lse = from_row(p_.lse, row_ + i);
    q.entropy = from_row(p_.entropy, row_ + i);
    q.dlogprob = from_row(p_.dlogprob, row_ + i, p_.dlogprob_rows.inner_stride);
    q.dlse = from_row(p_.dlse, row_ + i, p_.dlse_rows.inner_stride);
    q.dentropy = from_row(p_.dentropy, row_ + i, p_.dentropy_rows.inner_stride);
    q.dlogprob_rows.inner = q.dlse_rows.inner = q.dentropy_rows.inner = rows;
    return q;
  }

  // The product dlogits * weight of one step: `weight` has a row for each column of the vocabulary in the step. `sums`
  // accumulate over the chunks.
  LinearInputGradParams sums_over_columns(const void* weight, std::int64_t stride, std::int64_t width,
                                          float* sums) const {
    LinearInputGradParams q;
    q.dy = gradients_;
    q.dy_rows = dense(rows_, pitch());
    q.weight = at(weight, first_ * stride * operand_bytes());
    q.weight_stride = stride;
    q.start = is_first() ? nullptr : sums;
    q.start_stride = width;
    q.dx = sums;
    q.dx_rows = dense(rows_, width);
    q.dx_dtype = DType::kFloat32;
    q.row_limit = row_limit();
    q.num_rows = rows_;
    q.in_features = width;
    q.out_features = columns_;
    q.dtype = head_.dtype;
    q.arithmetic = head_.arithmetic;
    return q;
  }

  void hidden_gradient() {
    float* const sums = from_row(dhidden_, chunks_outside_ ? row_ : 0, features());
    LinearInputGradParams q = sums_over_columns(head_.weight, head_.weight_stride, features(), sums);
    if (is_last() && has_lora(head_)) {
      linear_input_grad(q, device_, stream_);
      q.dy = v_;
      q.dy_rows = dense(rows_, rank());
      q.weight = head_.lora_a;
      q.weight_stride = head_.lora_a_stride;
      q.start = sums;
      q.out_features = rank();
    }
    if (!is_last()) return linear_input_grad(q, device_, stream_);
    const std::int64_t stride = p_.dhidden_rows.inner_stride;
    q.dx_dtype = p_.wide_dhidden ? DType::kFloat32 : head_.dtype;
    unsigned char* const dhidden = at(p_.dhidden, row_ * stride * size_of(q.dx_dtype));
    if (cut_.borrows) {
      q.dx_dtype = DType::kFloat32;  // dx remains the float32 sums, which are rounded below
    } else if (groups_ == nullptr) {
      q.dx = dhidden;
      q.dx_rows.inner_stride = stride;
    } else {
      q.dx = p_.wide_dhidden ? static_cast<void*>(sums) : hidden_;
    }
    linear_input_grad(q, device_, stream_);
    if (cut_.borrows) {  // the gradients of logits are no longer needed
      round_to(sums, gradients_, head_.dtype, rows_ * features(), device_, stream_);
      q.dx = gradients_;
    }
    const DType dtype = p_.wide_dhidden ? DType::kFloat32 : head_.dtype;
    return_scored(p_, row_, rows_, groups_, q.dx, dhidden, stride, features(), dtype, device_, stream_);
  }

  // Adds the chunk's part to the sums of v, the product of dlogits and lora_b. With the last chunk, the function
  // computes v from these sums.
  void compute_v() {
    float* const sums = from_row(v_sums_, chunks_outside_ ? row_ : 0, rank());
    linear_input_grad(sums_over_columns(head_.lora_b, head_.lora_b_stride, rank(), sums), device_, stream_);
    if (!is_last()) return;
    tree_sum(lora_rounding(head_, rows_, sums, v_), device_, stream_);
    zero_left_out(v_, rank());  // rows past row_limit have no sums
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
    q.dy_rows = dense(rows_, pitch());
    q.x = lora_.u;
    q.x_rows = dense(rows_, rank());
    q.out_features = columns_;
    q.in_features = rank();
    fold_block(&q, b, at(p_.dlora_b, first_ * rank() * operand_bytes()), head_.dtype,
               from_row(dlora_b_, chunks_outside_ ? 0 : first_, rank()), false);
  }

  // Adds block b to a contiguous dweight. If dweight is not float32 and there are several blocks, `sums` holds the sums
  // between blocks.
  void fold_block(LinearWeightGradParams* q, std::int64_t b, void* dweight, DType dtype, float* sums, bool adds) {
    const bool kept = sums != nullptr && b + 1 < blocks_;
    q->dweight = kept ? sums : dweight;
    q->dweight_dtype = kept ? DType::kFloat32 : dtype;
    q->dweight_stride = q->main_grad_stride = q->in_features;
    if (b > 0 || adds) q->main_grad = sums != nullptr ? sums : static_cast<const float*>(dweight);
    q->row_limit = row_limit();
    q->num_rows = rows_;
    q->dtype = head_.dtype;
    q->arithmetic = head_.arithmetic;
    linear_weight_grad(*q, device_, stream_);
  }

  void weight_gradient(std::int64_t b) {
    const bool last = b + 1 == blocks_, kept = sums_dweight_ && !last;
    float* const sums = from_row(dweight_, chunks_outside_ ? 0 : first_, features());
    LinearWeightGradParams q;
    q.dy = gradients_;
    q.dy_rows = dense(rows_, pitch());
    q.x = hidden_;
    q.x_rows = dense(rows_, features());
    q.dweight =
        kept ? static_cast<void*>(sums) : at(p_.dweight, first_ * p_.dweight_stride * size_of(p_.dweight_dtype));
    q.dweight_stride = kept ? features() : p_.dweight_stride;
    q.dweight_dtype = kept ? DType::kFloat32 : p_.dweight_dtype;
    if (b == 0) {
      q.main_grad = from_row(p_.main_grad, first_, p_.main_grad_stride);
      q.main_grad_stride = p_.main_grad_stride;
    } else {
      q.main_grad = sums_dweight_ ? sums : static_cast<const float*>(q.dweight);
      q.main_grad_stride = sums_dweight_ ? features() : p_.dweight_stride;
    }
    q.row_limit = row_limit();
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
    q.dy_rows = dense(rows_, pitch());
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
  const Cut cut_;
  const Device device_;
  const bool fused_;  // one kernel computes gradients of logits without storing logits
  std::int64_t block_rows_, logit_rows_, blocks_, bytes_ = 0;
  bool sums_dweight_, chunks_outside_;
  ScoredGroups *all_groups_ = nullptr, *groups_ = nullptr;  // scored groups of all blocks, and of the step's block
  void *hidden_ = nullptr, *own_gradients_;
  void* gradients_ = nullptr;  // gradients of the step's logits, in the workspace or in dweight
  float *logits_ = nullptr, *dhidden_ = nullptr, *dweight_ = nullptr, *dbias_ = nullptr, *block_dbias_ = nullptr;
  LoraRows lora_;
  void* v_ = nullptr;
  float *logit_sums_ = nullptr, *v_sums_ = nullptr, *dlora_a_ = nullptr, *dlora_b_ = nullptr;
  Stream stream_{};
  std::int64_t row_ = 0, rows_ = 0, first_ = 0, columns_ = 0;  // rows and columns of the step
};

// Whether a block's hidden states may lie in dhidden. The memory for the gradients of logits, those of `chunk` columns,
// must then have room for the block's rounded dhidden.
bool can_borrow(const LinearLogprobBackwardParams& p, std::int64_t chunk) {
  const std::int64_t features = p.head.in_features;
  return p.dhidden != nullptr && !p.wide_dhidden && p.dhidden_rows.inner >= p.num_rows &&
         p.dhidden_rows.inner_stride == features && reinterpret_cast<std::uintptr_t>(p.dhidden) % 16 == 0 &&
         chunk >= features && chunk < p.num_columns;
}
// Whether gradients of logits may lie in dweight: nothing reads dweight before it is written, and no gradient is
// rounded from float32 logits.
bool can_lend(const LinearLogprobBackwardParams& p, Device device) {
  return p.dweight != nullptr && p.main_grad == nullptr && p.dweight_stride == p.head.in_features &&
         p.num_rows <= kTokenBlock &&
         (fuses_gradients(p, device) || (p.dtype == p.head.dtype && !sums_logits(p.head, p.dtype)));
}
std::int64_t backward_bytes(const LinearLogprobBackwardParams& p, const Cut& cut, Device device) {
  return Backward(p, cut, device, nullptr).bytes();
}
std::int64_t widest_chunk(const LinearLogprobBackwardParams& p) { return std::min(p.num_columns, kMostColumns); }

// The widest chunk that fits the workspace.
std::int64_t widest_chunk(const LinearLogprobBackwardParams& p, bool borrows, Device device) {
  const std::int64_t widest = widest_chunk(p);
  if (backward_bytes(p, {widest, borrows}, device) <= p.workspace_bytes) return widest;
  std::int64_t low = 1, high = ceil_div(widest, kLeastColumns);
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    const Cut cut = {middle * kLeastColumns, borrows};
    backward_bytes(p, cut, device) <= p.workspace_bytes ? low = middle : high = middle - 1;
  }
  const std::int64_t chunk = low * kLeastColumns;
  return chunk > kColumnsTogether ? chunk / kColumnsTogether * kColumnsTogether : chunk;
}

// The cut into the fewest chunks, since each chunk loads and stores the sums of dhidden. Among cuts into equally many
// chunks, the first in the list below is taken.
Cut cut_of(const LinearLogprobBackwardParams& p, Device device) {
  const std::int64_t apart = widest_chunk(p, false, device), borrowing = widest_chunk(p, true, device);
  std::vector<Cut> cuts;
  for (const bool lends : {false, true}) {
    if (lends && !can_lend(p, device)) break;
    cuts.push_back({apart, false, lends});
    if (can_borrow(p, borrowing)) cuts.push_back({borrowing, true, lends});
  }
  return *std::ranges::min_element(cuts, {}, [&](const Cut& cut) { return chunks_of(p, cut).size(); });
}

}  // namespace

WorkspaceRange gradients_workspace(const LinearLogprobBackwardParams& p, Device device) {
  // A chunk of all columns needs no sums of dhidden, so such a chunk may take less memory than a narrow chunk with
  // sums.
  const Backward narrow(p, {std::min(p.num_columns, kLeastColumns)}, device, nullptr);
  const std::int64_t most = backward_bytes(p, {widest_chunk(p)}, device);
  const std::int64_t least = std::min(narrow.bytes(), most);
  return {least, most, std::min(narrow.sum_bytes(), least)};
}

void compute_gradients(const LinearLogprobBackwardParams& p, Device device, Stream stream) {
  Backward(p, cut_of(p, device), device, p.workspace).run(stream);
}

}  // namespace rlk
