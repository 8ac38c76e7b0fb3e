// Bindings of the operator `attention` with its splits, their merge and its gradients, and of `kv_cache_append`.
#include "rlk/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <forward_list>
#include <functional>
#include <numeric>
#include <vector>

#include "call.h"
#include "kernels/attention/row.h"
#include "kernels/attention/span.h"
#include "rlk/ops/kv_cache_append.h"

namespace rlk::bindings {
namespace {

// Arrays of every call, in the order in which Python passes them. All but the first three may be None.
constexpr int kQ = 0, kK = 1, kV = 2, kSinks = 3, kCuSeqlensQ = 4, kCuSeqlensK = 5, kSequsedQ = 6, kSequsedK = 7,
              kLeftpadK = 8, kParents = 9, kBlockTable = 10, kPrefixTable = 11, kPrefixLens = 12, kGroupOffsets = 13;
constexpr const char* kNames[] = {
    "q",         "k",         "v",       "sinks",       "cu_seqlens_q", "cu_seqlens_k", "seqused_q",
    "seqused_k", "leftpad_k", "parents", "block_table", "prefix_table", "prefix_lens",  "group_offsets"};

// Checked arguments, shared by all calls: params that point into the arrays.
struct Call : AttentionInput {
  // `options`: (causal, window_size, softmax_scale, softcap).
  Call(Frame* frame, const nb::tuple& arrays, const nb::tuple& options, nb::handle given_exp, int unit)
      : frame_(frame),
        arrays_(arrays),
        of_q(frame->read(given(kQ), "q", kFloats)),
        of_k(frame->read(given(kK), "k", kFloats.names)),
        of_v(frame->read(given(kV), "v", kFloats.names)) {
    check_dtype(of_k, of_q);
    check_dtype(of_v, of_q);
    dtype = of_q->dtype;
    exp = read_exp(given_exp, frame->device());
    arithmetic = static_cast<Arithmetic>(unit);
    causal = entry(options, 0).ptr() == Py_True;
    read_queries();
    has(kParents) ? read_tree() : read_keys();
    read_window(entry(options, 1));
    read_scale(entry(options, 2));
    read_softcap(entry(options, 3));
    seqused_q = list(kSequsedQ, num_sequences, "the sequences");
    seqused_k = list(kSequsedK, num_sequences, "the sequences");
    sinks = list<float>(kSinks, num_q_heads, "the heads of q", kFloat32);
    leftpad_k = list(kLeftpadK, num_sequences, "the sequences");
  }

  Sizes out_shape() const { return shape_with(of_q.shape().first(of_q.shape().size() - 1), value_dim); }
  Sizes lse_shape() const {
    if (cu_seqlens_q != nullptr) return {num_q_heads, q_tokens};
    return {num_sequences, num_q_heads, q_tokens};
  }

  // The address and strides of an array [..., tokens, heads, head_dim].
  static AttentionHeads heads(const Array& a) {
    return {a->data, a->ndim == 4 ? a->stride(0) : 0, a->stride(a->ndim - 3), a->stride(a->ndim - 2)};
  }

 private:
  nb::handle given(int of) const { return entry(arrays_, of); }
  bool has(int of) const { return !given(of).is_none(); }

  // A contiguous list of `size` elements, or null for None. `what` names the size in errors.
  template <class T = std::int32_t>
  const T* list(int of, std::int64_t size, const char* what, const Dtypes& dtypes = kInt32) {
    const Array* const a = frame_->optional(given(of), kNames[of], dtypes);
    if (!a) return nullptr;
    check_shape(*a, {size}, " (", what, ")");
    require_columns(*a);
    return a->elements<T>();
  }

  // Kernels read int32, so this function copies int64 offsets in the CPU's memory. An offset that does not fit int32
  // becomes the nearest int32. A kernel treats that int32 as out of range, too. ops/attention.py does the same for
  // torch tensors, on their device.
  const std::int32_t* offsets(int of, const char* name, std::int64_t size, std::int64_t* num) {
    const OffsetsArgument list(frame_, given(of), name);
    const std::int64_t count = list.num_sequences + 1;
    *num = list.num_sequences;
    require(size < 0 || count == size, name, "shape [", size, "] (num_sequences + 1), got [", count, "]");
    const Offsets& o = list.offsets;
    if (o.dtype == DType::kInt32 || of_q.is_described()) return static_cast<const std::int32_t*>(o.data);
    if (frame_->device().type != DeviceType::kCpu) type_error(name, "dtype int32 on a GPU, got int64");
    std::vector<std::int32_t>& narrow = narrow_.emplace_front();
    for (std::int64_t i = 0; i < count; ++i) {
      narrow.push_back(static_cast<std::int32_t>(clamp_index(offset_at(o, i), INT32_MIN, INT32_MAX)));
    }
    return narrow.data();
  }

  // Requires an array of tokens with heads: a batch, pages, or packed tokens with a list of offsets.
  void require_tokens(const Array& a, bool packed, bool paged, const char* offsets) const {
    if (a->ndim == (packed ? 3 : 4)) return require_columns(a);
    require_shape(false, a, "shape ",
                  paged ? "[pages, page_size, heads, head_dim] beside block_table"
                        : words(packed ? "" : "[batch, tokens, heads, head_dim], or packed ",
                                "[tokens, heads, head_dim] beside ", offsets));
  }

  void read_queries() {
    const bool packed = has(kCuSeqlensQ);
    const char* const name = packed && has(kParents) ? "cu_segments" : "cu_seqlens_q";
    require_tokens(of_q, packed, false, name);
    head_dim = of_q->shape[of_q->ndim - 1];
    check_head_dim(of_q);
    num_q_heads = of_q->shape[of_q->ndim - 2];
    q_tokens = of_q->shape[of_q->ndim - 3];
    q = heads(of_q);
    num_sequences = of_q->shape[0];
    if (packed) cu_seqlens_q = offsets(kCuSeqlensQ, name, -1, &num_sequences);
  }

  // ops/attention.py has already refused the arguments that cannot be combined with a tree of token segments.
  void read_tree() {
    require(has(kCuSeqlensQ) && causal, "tree", "causal and packed tokens, got others");
    read_heads(true, false, "cu_segments");
    k_tokens = of_k->shape[0];
    require_keys(q_tokens, "the tokens of q) beside cu_segments");
    cu_seqlens_k = cu_seqlens_q;
    parents = list(kParents, num_sequences, "the segments");
  }

  void require_keys(std::int64_t size, const char* what) const {
    require(of_k->shape[0] == size, of_k, "a first dimension of ", size, " (", what, ", got shape ", of_k.shape());
  }

  void read_keys() {
    const bool packed = has(kCuSeqlensK), paged = has(kBlockTable);
    require(!paged || !packed, "cu_seqlens_k", "None beside block_table, whose pages have no offsets, got a list");
    require(!has(kLeftpadK) || !(packed || paged), "leftpad_k", "None beside ", packed ? "cu_seqlens_k" : "block_table",
            ": it is for k of shape [batch, tokens, heads, head_dim], got a list");
    require(paged || !has(kPrefixTable), "shared_prefix",
            "None without block_table: what is shared are pages, got a tuple");
    require(!paged || has(kSequsedK), "seqused_k", "the keys in use of each sequence beside block_table, got None");
    read_heads(packed, paged, "cu_seqlens_k");
    if (packed) {
      k_tokens = of_k->shape[0];
      cu_seqlens_k = offsets(kCuSeqlensK, "cu_seqlens_k", num_sequences + 1, &num_sequences);
    } else if (paged) {
      read_pages();
    } else {
      k_tokens = of_k->shape[1];
      require_keys(num_sequences, "the sequences of q)");
    }
  }

  // Reads the shapes and addresses of k and v.
  void read_heads(bool packed, bool paged, const char* offsets) {
    require_tokens(of_k, packed, paged, offsets);
    num_kv_heads = of_k->shape[of_k->ndim - 2];
    require(of_k->shape[of_k->ndim - 1] == head_dim, of_k, "a last dimension of ", head_dim, " (that of q), got shape ",
            of_k.shape());
    require(num_kv_heads >= 1 && num_q_heads % num_kv_heads == 0, of_k, "a number of heads that divides q's ",
            num_q_heads, ", got shape ", of_k.shape());
    const std::span keys = of_k.shape(), values = of_v.shape();
    require_shape(values.size() == keys.size() && std::equal(keys.begin(), keys.end() - 1, values.begin()), of_v,
                  "shape ", keys, " (that of k; the last dimension may be smaller)");
    value_dim = values.back();
    require(value_dim >= 8 && value_dim <= head_dim && value_dim % 8 == 0, of_v,
            "a last dimension that is a multiple of 8 in [8, ", head_dim, "] (at most that of k), got shape ", values);
    require_columns(of_v);
    k = heads(of_k);
    v = heads(of_v);
  }

  // Reads a table of page ids with `rows` rows. `rest` is the end of the expected shape in error messages.
  const std::int32_t* table(int of, std::int64_t rows, const char* rest, std::int64_t* pages, std::int64_t* stride) {
    const Array& a = frame_->read(given(of), kNames[of], kInt32);
    require_shape(a->ndim == 2 && a->shape[0] == rows, a, "shape [", rows, ", ", rest);
    require_columns(a);
    *pages = a->shape[1];
    *stride = a->stride(0);
    return a.elements<std::int32_t>();
  }
  void read_pages() {
    block_table = table(kBlockTable, num_sequences, "max_pages] (the sequences of q)", &max_pages, &table_stride);
    num_pages = of_k->shape[0];
    page_size = of_k->shape[1];
    require(page_size >= 1, of_k, "pages of at least one key, got shape ", of_k.shape());
    k_tokens = page_size * max_pages;
    if (!has(kPrefixTable)) return;
    group_offsets = offsets(kGroupOffsets, "group_offsets", -1, &num_groups);
    prefix_lens = list(kPrefixLens, num_groups, "the groups");
    prefix_table = table(kPrefixTable, num_groups, "max_prefix_pages] (the groups of group_offsets)", &max_prefix_pages,
                         &prefix_stride);
    k_tokens += page_size * max_prefix_pages;
  }

  void read_window(nb::handle window) {
    if (window.is_none()) return;
    if (PyBool_Check(window.ptr()) || !PyIndex_Check(window.ptr())) {
      type_error("window_size", "None or an integer, got ", kind_of(window));
    }
    const Py_ssize_t size = PyNumber_AsSsize_t(window.ptr(), nullptr);  // clips an integer beyond Py_ssize_t
    require(size >= 1, "window_size", "None or a number of keys >= 1, got ", size);
    require(causal, "window_size", "None beside causal=False: the window ends at the query, got ", size);
    window_size = std::min<std::int64_t>(size, std::int64_t{1} << 32);
  }

  static bool is_normal(float x) { return x > 0.0f && std::isnormal(x); }

  void read_scale(nb::handle scale) {
    if (scale.is_none()) {
      softmax_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
      return;
    }
    const double x = read_number(scale, "softmax_scale", "None or a number");
    softmax_scale = static_cast<float>(x);
    require(is_normal(attention_scale(softmax_scale)), "softmax_scale",
            "None or a finite number > 0 (fp32, not subnormal), got ", x);
  }

  void read_softcap(nb::handle given) {
    if (given.is_none()) return;
    const double x = read_number(given, "softcap", "None or a number");
    softcap = static_cast<float>(x);
    require(softcap > 0.0f && std::isfinite(softcap), "softcap", "None or a finite number > 0, got ", x);
    require(is_normal(AttentionSoftcap(*this).inner), "softcap",
            "None or a number for which softmax_scale / softcap is finite and not subnormal in fp32, got ", x);
  }

  Frame* frame_;
  const nb::tuple& arrays_;
  std::forward_list<std::vector<std::int32_t>> narrow_;

 public:
  const Array &of_q, &of_k, &of_v;
};

RLK_EAGER_FUNCTION(attention, 14, (), nb::tuple arrays, nb::tuple options, nb::handle exp, int arithmetic,
                   bool wants_lse, nb::handle out_given) {
  const Call call(frame, arrays, options, exp, arithmetic);
  AttentionParams p{call};
  const Sizes shape = call.out_shape();
  const Array* const out = frame->optional(out_given, "out", kFloats);
  Results results("attention", frame);
  if (out) {
    check_dtype(*out, call.of_q);
    check_shape(*out, shape, " (that of q)");
    require_contiguous(*out);
    frame->require_writable(*out);
    p.out = out->view().data;
    results.add(out->object());
  } else {
    results.add(&p.out, shape, p.dtype);
  }
  return results.add(&p.lse, call.lse_shape(), wants_lse).run(rlk::attention, &p, attention_workspace_bytes);
}

// The ascending numbers of the splits for which a call computes partials: the results of each split before the merge.
Sizes read_splits(nb::handle given, const AttentionInput& p) {
  Sizes splits;
  if (given.is_none()) {
    for (std::int64_t s = 0; s < attention_splits(p.k_tokens); ++s) splits.push_back(s);
    return splits;
  }
  constexpr std::int64_t kMostSplits = attention_splits(INT32_MAX);
  std::int64_t least = 0;
  for (const nb::handle number : given) {
    splits.push_back(nb::cast<std::int64_t>(number));
    require(splits.back() >= least && splits.back() < kMostSplits, "splits", "ascending numbers in [0, ", kMostSplits,
            "), got ", splits.back(), " at [", splits.size() - 1, "]");
    least = splits.back() + 1;
  }
  require(p.seqused_k != nullptr, "seqused_k", "the keys of each whole sequence beside splits, got None");
  require(p.group_offsets == nullptr, "shared_prefix",
          "None beside splits, which cut a prefix: list all pages of a sequence in block_table");
  return splits;
}

RLK_FUNCTION(attention_partials, (), nb::tuple arrays, nb::tuple options, nb::handle splits_given, nb::handle exp,
             int arithmetic) {
  const Call call(frame, arrays, options, exp, arithmetic);
  AttentionPartialsParams p{call};
  const Sizes splits = read_splits(splits_given, p);
  Sizes shape = call.out_shape();
  shape.insert(shape.begin(), std::ssize(splits));
  Results results("attention", frame);
  results.add(&p.stats, shape_with(std::span(shape).first(shape.size() - 1), 2)).add(&p.sums, shape);
  const std::int64_t rows = attention_rows(p) * p.num_q_heads;
  std::int64_t held = 0;  // number of keys in the splits so far
  for (std::size_t i = 0, count = 1; i < splits.size(); i += count, count = 1) {
    while (i + count < splits.size() && splits[i + count] == splits[i] + static_cast<std::int64_t>(count)) ++count;
    AttentionPartialsParams run = p;
    run.first_split = splits[i];
    run.num_splits = static_cast<std::int64_t>(count);
    run.absent_keys = attention_split_begin(run.first_split) - held;
    run.stats += 2 * rows * static_cast<std::int64_t>(i);
    run.sums += p.value_dim * rows * static_cast<std::int64_t>(i);
    results.call(rlk::attention_partials, run);
    held = attention_split_begin(run.first_split + run.num_splits) - run.absent_keys;
  }
  return results.result();
}

// Reads a contiguous float32 array of this shape. The result is null if Python passed None. `what` explains the shape
// in errors.
const float* read_rows(Frame* frame, nb::handle given, const char* name, std::span<const std::int64_t> shape,
                       const char* what) {
  const Array* const a = frame->optional(given, name, kFloat32);
  if (!a) return nullptr;
  check_shape(*a, shape, " (", what, ")");
  require_contiguous(*a);
  return a->elements<float>();
}

RLK_FUNCTION(attention_backward, (dout_given, dlse_given, out_given, lse_given), nb::tuple arrays, nb::tuple options,
             nb::handle exp, int arithmetic, bool wants_q, bool wants_kv, bool wants_sinks) {
  const Call call(frame, arrays, options, exp, arithmetic);
  AttentionBackwardParams p{call};
  if (wants_sinks && p.sinks == nullptr) type_error("sinks", "an array, got None");
  const Array &dout = frame->read(dout_given, "dout", kFloats.names),
              &out = frame->read(out_given, "out", kFloats.names);
  for (const Array* a : {&dout, &out}) {
    check_dtype(*a, call.of_q);
    check_shape(*a, call.out_shape(), " (that of q with the last dimension of v)");
    require_columns(*a);
  }
  p.dout = Call::heads(dout);
  p.out = Call::heads(out);
  if (lse_given.is_none()) type_error("lse", "the lse that attention returned, got None");
  p.lse = read_rows(frame, lse_given, "lse", call.lse_shape(), "that of lse");
  p.dlse = read_rows(frame, dlse_given, "dlse", call.lse_shape(), "that of lse");
  return Results("attention", frame)
      .add(&p.dq, call.of_q.shape(), p.dtype, wants_q)
      .add(&p.dk, call.of_k.shape(), p.dtype, wants_kv)
      .add(&p.dv, call.of_v.shape(), p.dtype, wants_kv)
      .add(&p.dsinks, {p.num_q_heads}, wants_sinks)
      .run(rlk::attention_backward, &p, attention_backward_workspace_bytes);
}

// Reads the sizes of the arrays to merge from their shape: [parts, batch, tokens, heads, head_dim], or without batch if
// packed.
void read_shape(const Array& a, AttentionMergeParams* p) {
  require_shape(a->ndim == 4 || a->ndim == 5, a,
                "shape [splits, batch, tokens, heads, head_dim], or packed [splits, tokens, heads, head_dim]");
  p->num_splits = a->shape[0];
  p->value_dim = a->shape[a->ndim - 1];
  p->num_q_heads = a->shape[a->ndim - 2];
  p->q_tokens = a->shape[a->ndim - 3];
  p->rows = p->q_tokens * (a->ndim == 5 ? a->shape[1] : 1);
  check_head_dim(a);
  require(p->num_splits <= kMaxMergedSplits, a, "at most ", kMaxMergedSplits, " splits, got shape ", a.shape());
  require_contiguous(a);
}

// The shape of lse, where heads precede tokens.
Sizes rows_of(const Array& a) {
  Sizes shape(a.shape().begin() + 1, a.shape().end() - 1);
  std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
  return shape;
}

nb::object run_merge(Frame* frame, AttentionMergeParams* p, const Array& first, bool wants_lse) {
  return Results("attention", frame)
      .add(&p->out, first.shape().subspan(1), p->dtype)
      .add(&p->lse, rows_of(first), wants_lse)
      .run(rlk::attention_merge, *p);
}

// `splits` has the split numbers of the partials, in any order.
RLK_FUNCTION(attention_merge, (sums_given, stats_given, sinks_given, splits), int dtype, int exp, bool wants_lse) {
  AttentionMergeParams p;
  const Array& sums = frame->read(sums_given, "sums", kFloat32);
  require_given(stats_given, "stats");
  read_shape(sums, &p);
  const Sizes of_stats = shape_with(sums.shape().first(sums->ndim - 1), 2);
  p.sums = sums.data<float>();
  p.stats = read_rows(frame, stats_given, "stats", of_stats, "m and l of each row of sums");
  Sizes numbers;
  for (const nb::handle number : splits) numbers.push_back(nb::cast<std::int64_t>(number));
  require(std::ssize(numbers) == p.num_splits, "splits", p.num_splits, " numbers (the first dimension of sums), got ",
          numbers.size());
  std::iota(p.order, p.order + p.num_splits, std::int16_t{0});
  std::sort(p.order, p.order + p.num_splits, [&](std::int16_t a, std::int16_t b) { return numbers[a] < numbers[b]; });
  for (std::int64_t i = 1; i < p.num_splits; ++i) {
    const std::int64_t number = numbers[p.order[i]];
    require(number != numbers[p.order[i - 1]], "splits", "each number once, got ", number, " twice");
  }
  p.sinks = read_rows(frame, sinks_given, "sinks", Sizes{p.num_q_heads}, "the heads of sums");
  RLK_FILL(p, as_given, dtype, exp)
  return run_merge(frame, &p, sums, wants_lse);
}

RLK_FUNCTION(attention_merge_approximate, (outs_given, lses_given), int exp, bool wants_lse) {
  AttentionMergeParams p;
  const Array& outs = frame->read(outs_given, "outs", kFloats);
  require_given(lses_given, "lses");
  read_shape(outs, &p);
  Sizes of_lses = rows_of(outs);
  of_lses.insert(of_lses.begin(), p.num_splits);
  p.lses = read_rows(frame, lses_given, "lses", of_lses, "a number for each row of outs, heads in front of tokens");
  std::iota(p.order, p.order + p.num_splits, std::int16_t{0});
  p.outs = outs.data();
  p.dtype = outs->dtype;
  RLK_FILL(p, as_given, exp)
  return run_merge(frame, &p, outs, wants_lse);
}

// ---- kv_cache_append -------------------------------------------------------------------------------------------------

// Reads k or v: [num_tokens, num_heads, columns].
const Array& read_tokens(Frame* frame, nb::handle object, const char* name) {
  const Array& a = frame->read(object, name, kFloats);
  require_shape(a->ndim == 3, a, "shape [num_tokens, num_heads, columns]");
  require_columns(a);
  return a;
}

// Reads k_cache or v_cache, to which `tokens` are written: [num_pages, page_size, num_heads, columns], or one row per
// slot.
const Array& read_cache(Frame* frame, nb::handle object, const char* name, const Array& tokens,
                        const Array* other = nullptr) {
  const Array& a = frame->read(object, name, kFloats.names);
  check_dtype(a, tokens);
  const TensorView &v = a.view(), &t = tokens.view();
  const int ndim = v.ndim;
  const std::int64_t heads = t.shape[1], columns = t.shape[2];
  require_shape((ndim == 3 || ndim == 4) && v.shape[ndim - 2] == heads && v.shape[ndim - 1] == columns, a,
                "shape [num_pages, page_size, ", heads, ", ", columns, "] or [num_slots, ", heads, ", ", columns,
                "] (heads and columns of ", tokens, ")");
  const std::int64_t page_size = ndim == 4 ? v.shape[1] : 1;
  require(page_size > 0, a, "pages of at least one slot, got shape ", a.shape());
  require(v.shape[0] < (std::int64_t{1} << 31) / page_size, a, "fewer than 2^31 slots, got shape ", a.shape());
  frame->require_writable(a, other);
  require_columns(a);
  return a;
}

// A dimension of pages, slots or heads: its stride in bytes, and the largest difference between two of its indices.
struct Step {
  std::int64_t stride, most;
};

// Whether a row of k_cache shares a byte with a row of v_cache. `steps` holds the dimensions of both caches, in
// descending order of their strides. v_cache begins `apart` bytes after k_cache.
bool rows_meet(std::span<const Step> steps, std::int64_t apart, std::int64_t k_bytes, std::int64_t v_bytes) {
  if (steps.empty()) return -v_bytes < apart && apart < k_bytes;
  std::int64_t reach = std::max(k_bytes, v_bytes);
  for (const Step& step : steps.subspan(1)) reach += step.stride * step.most;
  const Step step = steps.front();
  const std::int64_t first = std::max(-step.most, (apart - reach) / step.stride - 1);
  const std::int64_t last = std::min(step.most, (apart + reach) / step.stride + 1);
  for (std::int64_t i = first; i <= last; ++i) {
    if (rows_meet(steps.subspan(1), apart - i * step.stride, k_bytes, v_bytes)) return true;
  }
  return false;
}

// If the caches have different strides, the function only compares the addresses at which they begin.
bool share_memory(const TensorView& k, const TensorView& v, int element_bytes) {
  if (k.num_elements() == 0 || v.num_elements() == 0) return false;
  std::vector<Step> steps;
  for (int i = 0; i + 1 < k.ndim; ++i) {
    if (k.shape[i] < 2) continue;
    if (k.stride(i) != v.stride(i)) return k.data == v.data;
    steps.push_back({std::abs(k.stride(i)) * element_bytes, k.shape[i] - 1});
  }
  std::ranges::sort(steps, std::greater{}, &Step::stride);
  const std::int64_t apart = static_cast<const char*>(v.data) - static_cast<const char*>(k.data);
  return rows_meet(steps, apart, k.shape[k.ndim - 1] * element_bytes, v.shape[v.ndim - 1] * element_bytes);
}

CacheAppendSide side_of(const Array& tokens, const Array& cache) {
  const TensorView &t = tokens.view(), &c = cache.view();
  CacheAppendSide s;
  s.tokens = t.data;
  s.token_stride = t.stride(0);
  s.head_stride = t.stride(1);
  s.columns = t.shape[2];
  s.cache = c.data;
  s.page_stride = c.stride(0);
  s.slot_stride = c.ndim == 4 ? c.stride(1) : 0;
  s.cache_head_stride = c.stride(c.ndim - 2);
  return s;
}

RLK_EAGER_FUNCTION(kv_cache_append, 5, (k_given, v_given, k_cache_given, v_cache_given, slot_mapping)) {
  const Array &k = read_tokens(frame, k_given, "k"), &v = read_tokens(frame, v_given, "v");
  check_dtype(v, k);
  const std::int64_t num_tokens = k->shape[0], num_heads = k->shape[1];
  require_shape(v->shape[0] == num_tokens && v->shape[1] == num_heads, v, "shape [", num_tokens, ", ", num_heads,
                ", columns] (tokens and heads of k)");
  const Array& k_cache = read_cache(frame, k_cache_given, "k_cache", k);
  const Array& v_cache = read_cache(frame, v_cache_given, "v_cache", v, &k_cache);
  const TensorView &kc = k_cache.view(), &vc = v_cache.view();
  require_shape(vc.ndim == kc.ndim && vc.shape[0] == kc.shape[0] && (kc.ndim == 3 || vc.shape[1] == kc.shape[1]),
                v_cache, "as many slots, in the same pages, as k_cache of shape ", k_cache.shape());
  require(!share_memory(kc, vc, k_cache.element_bytes()), v_cache, "memory other than k_cache's");
  const Array& slots = frame->read(slot_mapping, "slot_mapping", kIndices);
  require(slots->ndim == 1 && slots->shape[0] <= num_tokens && slots->is_contiguous(), slots,
          "a contiguous array of at most ", num_tokens, " slots (the tokens of k), got shape ", slots.shape());
  frame->require_writable(k_cache, &v_cache);  // the second check also covers `slots`
  frame->require_writable(v_cache, &k_cache);
  CacheAppendParams p;
  p.k = side_of(k, k_cache);
  p.v = side_of(v, v_cache);
  p.slots = slots->data;
  p.slot_dtype = slots->dtype;
  p.num_slots = slots->shape[0];
  p.num_heads = num_heads;
  p.num_pages = kc.shape[0];
  p.page_size = kc.ndim == 4 ? kc.shape[1] : 1;
  p.dtype = k->dtype;
  return Results("kv_cache_append", frame).run(rlk::kv_cache_append, p);
}

}  // namespace
}  // namespace rlk::bindings
