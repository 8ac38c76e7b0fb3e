// CPU backend of linear_logprob: linear and logprob of some rows at a time. Their logits are all that is ever in memory.
#include "linear_logprob.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "linear.h"
#include "logprob.h"
#include "rlk/load_index.h"
#include "rlk/math/half.h"
#include "rlk/math/ieee.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kLogitsBytes = 64 << 20;  // of the rows that are computed at once
constexpr std::int64_t kMostRows = 512;
constexpr std::int64_t kChunkColumns = 2048;  // of a block of 8192 rows: 64 MiB in float32

unsigned char* bytes_of(void* p) { return static_cast<unsigned char*>(p); }
const unsigned char* bytes_of(const void* p) { return static_cast<const unsigned char*>(p); }

bool is_ignored(const LogprobInput& p, std::int64_t row) {
  return load_index(p.target, p.target_dtype, p.target_rows.offset(row)) == p.ignore_index;
}
// f(first, last) for each run of rows of [begin, end) that are not ignored.
template <class F>
void for_scored_runs(const LogprobInput& p, std::int64_t begin, std::int64_t end, const F& f) {
  for (std::int64_t row = begin; row < end;) {
    if (is_ignored(p, row)) {
      ++row;
      continue;
    }
    const std::int64_t first = row;
    while (row < end && !is_ignored(p, row)) ++row;
    f(first, row);
  }
}

// Rows of a matrix as those of an array by themselves, [count, columns]: what products read. Ignored ones are +0.
std::vector<unsigned char> gathered(const LogprobInput& p, const void* from, const RowLayout& rows, DType dtype,
                                    std::int64_t columns, std::int64_t begin, std::int64_t end) {
  const std::int64_t bytes = columns * size_of(dtype);
  std::vector<unsigned char> to(static_cast<std::size_t>((end - begin) * bytes));
  for_scored_runs(p, begin, end, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) {
      std::memcpy(&to[static_cast<std::size_t>((row - begin) * bytes)],
                  bytes_of(from) + rows.offset(row) * size_of(dtype), static_cast<std::size_t>(bytes));
    }
  });
  return to;
}

// Logits of rows [begin, end) and columns [first, first + columns) into `to`, [end - begin, columns]; of ignored rows none.
void compute_logits(const Head& head, const LogprobInput& p, std::int64_t begin, std::int64_t end, std::int64_t first,
                    std::int64_t columns, unsigned char* to) {
  const std::vector<unsigned char> hidden =
      gathered(p, head.hidden, head.hidden_rows, head.dtype, head.in_features, begin, end);
  for_scored_runs(p, begin, end, [&](std::int64_t from, std::int64_t last) {
    LinearParams q;
    q.x = &hidden[static_cast<std::size_t>((from - begin) * head.in_features * size_of(head.dtype))];
    q.x_rows = {last - from, 0, head.in_features};
    q.weight = bytes_of(head.weight) + first * head.weight_stride * size_of(head.dtype);
    q.weight_stride = head.weight_stride;
    if (head.bias != nullptr) q.bias = bytes_of(head.bias) + first * size_of(head.bias_dtype);
    q.bias_dtype = head.bias_dtype;
    q.y = to + (from - begin) * columns * size_of(p.dtype);
    q.y_rows = {last - from, 0, columns};
    q.num_rows = last - from;
    q.in_features = head.in_features;
    q.out_features = columns;
    q.dtype = head.dtype;
    q.out_dtype = p.dtype;
    q.arithmetic = head.arithmetic;
    linear(q);
  });
}

std::int64_t rows_at_once(std::int64_t columns) {
  return std::clamp<std::int64_t>(kLogitsBytes / std::max<std::int64_t>(4 * columns, 1), 1, kMostRows);
}

// What of an input with one element a row belongs to rows from `row` on.
template <class T>
T* from_row(T* array, std::int64_t row, std::int64_t each = 1) {
  return array == nullptr ? nullptr : array + row * each;
}
template <class Params>
void move_to_row(Params* p, std::int64_t row, std::int64_t rows, std::vector<unsigned char>* targets) {
  const int bytes = size_of(p->target_dtype);
  targets->resize(static_cast<std::size_t>(rows * bytes));
  for (std::int64_t i = 0; i < rows; ++i) {
    std::memcpy(&(*targets)[static_cast<std::size_t>(i * bytes)],
                bytes_of(p->target) + p->target_rows.offset(row + i) * bytes, static_cast<std::size_t>(bytes));
  }
  p->target = targets->data();
  p->target_rows = {rows, 0, 1};
  p->temperature = from_row(p->temperature, row);
  p->kept_offsets = from_row(p->kept_offsets, row);
  p->num_rows = rows;
}

float load_float(const unsigned char* from, DType dtype, std::int64_t i) {
  if (dtype == DType::kFloat32) return reinterpret_cast<const float*>(from)[i];
  const std::uint16_t h = reinterpret_cast<const std::uint16_t*>(from)[i];
  return dtype == DType::kBFloat16 ? float_of_bf16(h) : float_of_f16(h);
}
void store_float(unsigned char* to, DType dtype, std::int64_t i, float x) {
  if (dtype == DType::kFloat32) {
    reinterpret_cast<float*>(to)[i] = x;
  } else {
    reinterpret_cast<std::uint16_t*>(to)[i] = dtype == DType::kBFloat16 ? bf16_rn(x) : f16_rn(x);
  }
}

// g of rows [begin, end) and columns [first, first + columns), rounded to the operands' type; +0 in ignored rows.
std::vector<unsigned char> logit_gradients(const LinearLogprobBackwardParams& p, std::int64_t begin, std::int64_t end,
                                           std::int64_t first, std::int64_t columns) {
  const std::int64_t rows = end - begin;
  std::vector<unsigned char> logits(static_cast<std::size_t>(rows * columns * size_of(p.dtype))), targets;
  compute_logits(p.head, p, begin, end, first, columns, logits.data());
  // In float32, which holds each logit as it is: a gradient is rounded once, to the operands' type.
  std::vector<float> wide(static_cast<std::size_t>(rows * columns));
  parallel_for(rows, 1, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t i = from * columns; i < to * columns; ++i) {
      wide[static_cast<std::size_t>(i)] = load_float(logits.data(), p.dtype, i);
    }
  });
  LogprobBackwardParams q = p;
  move_to_row(&q, begin, rows, &targets);
  q.vocab_start += first;
  q.num_columns = columns;
  q.logits = q.dlogits = wide.data();
  q.logits_rows = q.dlogits_rows = {rows, 0, columns};
  q.dtype = DType::kFloat32;
  q.lse = from_row(p.lse, begin);
  q.entropy = from_row(p.entropy, begin);
  std::vector<float> given[3];
  const std::pair<const float**, RowLayout*> gradients[] = {
      {&q.dlogprob, &q.dlogprob_rows}, {&q.dlse, &q.dlse_rows}, {&q.dentropy, &q.dentropy_rows}};
  for (int i = 0; i < 3; ++i) {
    const auto [from, layout] = gradients[i];
    if (*from == nullptr) continue;
    for (std::int64_t row = begin; row < end; ++row) given[i].push_back((*from)[layout->offset(row)]);
    *from = given[i].data();
    *layout = {rows, 0, 1};
  }
  logprob_backward(q);
  std::vector<unsigned char> g(static_cast<std::size_t>(rows * columns * size_of(p.head.dtype)));
  parallel_for(rows, 1, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t i = from * columns; i < to * columns; ++i) {
      store_float(g.data(), p.head.dtype, i, wide[static_cast<std::size_t>(i)]);
    }
  });
  return g;
}

void hidden_gradient(const LinearLogprobBackwardParams& p) {
  const Head& head = p.head;
  const std::int64_t row_bytes = head.in_features * size_of(head.dtype), step = rows_at_once(p.num_columns);
  std::vector<unsigned char> dhidden(static_cast<std::size_t>(step * row_bytes));
  for (std::int64_t row = 0; row < p.num_rows; row += step) {
    const std::int64_t rows = std::min(step, p.num_rows - row);
    const std::vector<unsigned char> g = logit_gradients(p, row, row + rows, 0, p.num_columns);
    LinearInputGradParams q;
    q.dy = g.data();
    q.weight = head.weight;
    q.dx = dhidden.data();
    q.dy_rows = {rows, 0, p.num_columns};
    q.dx_rows = {rows, 0, head.in_features};
    q.weight_stride = head.weight_stride;
    q.num_rows = rows;
    q.in_features = head.in_features;
    q.out_features = p.num_columns;
    q.dtype = q.dx_dtype = head.dtype;
    q.arithmetic = head.arithmetic;
    linear_input_grad(q);
    for (std::int64_t i = 0; i < rows; ++i) {
      unsigned char* const to = bytes_of(p.dhidden) + p.dhidden_rows.offset(row + i) * size_of(head.dtype);
      if (is_ignored(p, row + i)) {
        std::memset(to, 0, static_cast<std::size_t>(row_bytes));
      } else {
        std::memcpy(to, &dhidden[static_cast<std::size_t>(i * row_bytes)], static_cast<std::size_t>(row_bytes));
      }
    }
  }
}

// dweight and dbias of columns [first, first + columns): token blocks one after another, in float32.
void weight_gradients(const LinearLogprobBackwardParams& p, std::int64_t first, std::int64_t columns) {
  const Head& head = p.head;
  const std::int64_t features = head.in_features;
  std::vector<float> dweight(p.dweight == nullptr ? 0 : static_cast<std::size_t>(columns * features));
  std::vector<float> dbias(static_cast<std::size_t>(columns)), of_block(static_cast<std::size_t>(columns));
  const float* total = nullptr;
  std::int64_t total_stride = features;
  if (p.main_grad != nullptr) {
    total = p.main_grad + first * p.main_grad_stride;
    total_stride = p.main_grad_stride;
  }
  for (std::int64_t row = 0; row == 0 || row < p.num_rows; row += kTokenBlock) {
    const std::int64_t rows = std::min(kTokenBlock, p.num_rows - row);
    const std::vector<unsigned char> g = logit_gradients(p, row, row + rows, first, columns);
    if (p.dweight != nullptr) {
      const std::vector<unsigned char> hidden =
          gathered(p, head.hidden, head.hidden_rows, head.dtype, features, row, row + rows);
      LinearWeightGradParams q;
      q.dy = g.data();
      q.x = hidden.data();
      q.main_grad = total;
      q.main_grad_stride = total_stride;
      q.dweight = dweight.data();
      q.dweight_stride = features;
      q.dy_rows = {std::max<std::int64_t>(rows, 1), 0, columns};
      q.x_rows = {std::max<std::int64_t>(rows, 1), 0, features};
      q.num_rows = rows;
      q.in_features = features;
      q.out_features = columns;
      q.dtype = head.dtype;
      q.dweight_dtype = DType::kFloat32;
      q.arithmetic = head.arithmetic;
      linear_weight_grad(q);
      total = dweight.data();
      total_stride = features;
    }
    if (p.dbias == nullptr) continue;
    LinearBiasGradParams b;
    b.dy = g.data();
    b.dbias = of_block.data();
    b.dy_rows = {std::max<std::int64_t>(rows, 1), 0, columns};
    b.num_rows = rows;
    b.out_features = columns;
    b.dtype = head.dtype;
    b.dbias_dtype = DType::kFloat32;
    linear_bias_grad(b);
    for (std::int64_t j = 0; j < columns; ++j) {
      const auto at = static_cast<std::size_t>(j);
      dbias[at] = row == 0 ? of_block[at] : add_rn(dbias[at], of_block[at]);
    }
  }
  for (std::int64_t j = 0; j < columns; ++j) {
    if (p.dbias != nullptr)
      store_float(bytes_of(p.dbias), p.dbias_dtype, first + j, dbias[static_cast<std::size_t>(j)]);
    if (p.dweight == nullptr) continue;
    unsigned char* const to = bytes_of(p.dweight) + (first + j) * p.dweight_stride * size_of(p.dweight_dtype);
    for (std::int64_t k = 0; k < features; ++k) {
      store_float(to, p.dweight_dtype, k, dweight[static_cast<std::size_t>(j * features + k)]);
    }
  }
}

}  // namespace

void linear_logprob(const LinearLogprobParams& p) {
  const std::int64_t columns = p.num_columns, step = rows_at_once(columns);
  std::vector<unsigned char> logits, targets;
  for (std::int64_t row = 0; row < p.num_rows; row += step) {
    const std::int64_t rows = std::min(step, p.num_rows - row);
    logits.resize(static_cast<std::size_t>(rows * columns * size_of(p.dtype)));
    compute_logits(p.head, p, row, row + rows, 0, columns, logits.data());
    LogprobParams q = p;
    move_to_row(&q, row, rows, &targets);
    q.logits = logits.data();
    q.logits_rows = {rows, 0, columns};
    q.logprob = from_row(p.logprob, row);
    q.lse = from_row(p.lse, row);
    q.entropy = from_row(p.entropy, row);
    q.sum_p_sq = from_row(p.sum_p_sq, row);
    q.status = from_row(p.status, row);
    q.stats = from_row(p.stats, row, kStatsFields);
    logprob(q);
  }
}

void linear_logprob_backward(const LinearLogprobBackwardParams& p) {
  RLK_CHECK(p.dh_segments == 1, "linear_logprob_backward: dh_segments is 1 on the CPU");
  if (p.dhidden != nullptr && p.num_rows > 0) hidden_gradient(p);
  if (p.dweight == nullptr && p.dbias == nullptr) return;
  for (std::int64_t first = 0; first < p.num_columns; first += kChunkColumns) {
    weight_gradients(p, first, std::min(kChunkColumns, p.num_columns - first));
  }
}

}  // namespace rlk::cpu
