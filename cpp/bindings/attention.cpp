// Python's entry to attention.
#include "rlk/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "call.h"
#include "linear_args.h"
#include "logprob_args.h"
#include "rlk/kernels/attention_row.h"
#include "rlk/kernels/attention_span.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

std::string number_text(double x) { return nb::repr(nb::float_(x)).c_str(); }

// Arguments that say where sequences are, and which keys a query sees.
struct Options {
  nb::handle sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, parents, block_table;
  nb::handle prefix_table, prefix_lens, group_offsets;
  bool causal;
  nb::handle window_size, softmax_scale, softcap;
  int exp;
};

// Checked arguments, shared by forward and backward. Holds the arrays.
class Call {
 public:
  Call(nb::handle q, nb::handle k, nb::handle v, const Options& o)
      : q_(q, "q", kFloats), k_(k, "k", kFloats.names), v_(v, "v", kFloats.names) {
    const TensorView& of_q = q_.view();
    check_same(k_, q_);
    check_same(v_, q_);
    input_.dtype = of_q.dtype;
    input_.exp = o.exp == 1 ? Exp::kHardware : Exp::kPortable;
    input_.causal = o.causal;
    is_tree_ = !o.parents.is_none();
    read_queries(o.cu_seqlens_q);
    is_tree_ ? read_tree(o) : read_keys(o);
    read_window(o.window_size);
    read_scale(o.softmax_scale);
    read_softcap(o.softcap);
    const std::int64_t b = input_.num_sequences;
    input_.seqused_q = list(&seqused_q_, o.seqused_q, "seqused_q", b, "the sequences");
    input_.seqused_k = list(&seqused_k_, o.seqused_k, "seqused_k", b, "the sequences");
    read_sinks(o.sinks);
    input_.leftpad_k = list(&leftpad_k_, o.leftpad_k, "leftpad_k", b, "the sequences");
  }

  const AttentionInput& input() const { return input_; }
  Device device() const { return q_.view().device; }
  const Array& q() const { return q_; }
  const Array& k() const { return k_; }
  bool packed() const { return input_.cu_seqlens_q != nullptr; }
  std::vector<std::int64_t> lse_shape() const {
    if (packed()) return {input_.num_q_heads, input_.q_tokens};
    return {input_.num_sequences, input_.num_q_heads, input_.q_tokens};
  }

  // The address and strides of an array [..., tokens, heads, head_dim].
  static AttentionHeads heads(const Array& a) {
    const TensorView& v = a.view();
    AttentionHeads h;
    h.data = v.data;
    h.head_stride = v.stride(v.ndim - 2);
    h.token_stride = v.stride(v.ndim - 3);
    h.sequence_stride = v.ndim == 4 ? v.stride(0) : 0;
    return h;
  }

 private:
  const std::int32_t* list(std::optional<Array>* holder, nb::handle given, const char* name, std::int64_t size,
                           const char* what) {
    if (given.is_none()) return nullptr;
    const Array& a = holder->emplace(given, name, kInt32);
    const TensorView& v = a.view();
    require_device(a, device());
    if (v.ndim != 1 || v.shape[0] != size) {
      argument_error(name,
                     "expected shape [" + std::to_string(size) + "] (" + what + "), got " + shape_text(a.shape()));
    }
    require_columns(a);
    // An empty list's pointer may be null, which would mean that there is none.
    static constexpr std::int32_t kEmpty = 0;
    return v.data != nullptr ? static_cast<const std::int32_t*>(v.data) : &kEmpty;
  }

  // Kernels read int32. Offsets of int64 in the CPU's memory are copied. One that no int32 holds becomes one out of range.
  // ops/attention.py does the same with torch tensors, on their device.
  struct HeldOffsets {
    std::optional<OffsetsArgument> given;
    std::vector<std::int32_t> narrow;
  };
  const std::int32_t* offsets(HeldOffsets* held, nb::handle given, const char* name, std::int64_t size) {
    held->given.emplace(given, device(), name);
    const std::int64_t count = held->given->num_sequences + 1;
    if (size >= 0 && count != size) {
      argument_error(name, "expected shape [" + std::to_string(size) + "] (num_sequences + 1), got [" +
                               std::to_string(count) + "]");
    }
    const Offsets& o = held->given->offsets;
    if (o.dtype == DType::kInt32) return static_cast<const std::int32_t*>(o.data);
    if (device().type != DeviceType::kCpu) {
      throw nb::type_error((std::string(name) + ": expected dtype int32 on a GPU, got int64").c_str());
    }
    for (std::int64_t i = 0; i < count; ++i) {
      held->narrow.push_back(static_cast<std::int32_t>(clamp_index(offset_at(o, i), INT32_MIN, INT32_MAX)));
    }
    return held->narrow.data();
  }

  void read_queries(nb::handle cu_seqlens_q) {
    const TensorView& v = q_.view();
    const bool packed = !cu_seqlens_q.is_none();
    if (v.ndim != (packed ? 3 : 4)) {
      argument_error(
          "q", packed ? std::string("expected shape [tokens, heads, head_dim] beside ") + offsets_name() + ", got " +
                            shape_text(q_.shape())
                      : "expected shape [batch, tokens, heads, head_dim], or packed [tokens, heads, head_dim] beside "
                        "cu_seqlens_q, got " +
                            shape_text(q_.shape()));
    }
    require_columns(q_);
    input_.head_dim = v.shape[v.ndim - 1];
    if (input_.head_dim < 8 || input_.head_dim > kMaxHeadDim || input_.head_dim % 8 != 0) {
      argument_error("q", "expected a last dimension (head_dim) that is a multiple of 8 in [8, " +
                              std::to_string(kMaxHeadDim) + "], got shape " + shape_text(q_.shape()));
    }
    input_.num_q_heads = v.shape[v.ndim - 2];
    input_.q_tokens = v.shape[v.ndim - 3];
    input_.q = heads(q_);
    if (packed) {
      input_.cu_seqlens_q = offsets(&cu_seqlens_q_, cu_seqlens_q, offsets_name(), -1);
      input_.num_sequences = cu_seqlens_q_.given->num_sequences;
    } else {
      input_.num_sequences = v.shape[0];
    }
  }

  const char* offsets_name() const { return is_tree_ ? "cu_segments" : "cu_seqlens_q"; }

  // ops/attention.py has refused what does not go beside a tree.
  void read_tree(const Options& o) {
    if (o.cu_seqlens_q.is_none() || !o.causal) argument_error("tree", "expected causal and packed tokens, got others");
    read_heads(true, false);
    input_.k_tokens = k_.view().shape[0];
    if (input_.k_tokens != input_.q_tokens) {
      argument_error("k", "expected a first dimension of " + std::to_string(input_.q_tokens) +
                              " (the tokens of q) beside cu_segments, got shape " + shape_text(k_.shape()));
    }
    input_.cu_seqlens_k = input_.cu_seqlens_q;
    input_.parents = list(&parents_, o.parents, "parents", input_.num_sequences, "the segments");
  }

  void read_keys(const Options& o) {
    const TensorView& v = k_.view();
    const bool packed = !o.cu_seqlens_k.is_none(), paged = !o.block_table.is_none();
    if (paged && packed)
      argument_error("cu_seqlens_k", "expected None beside block_table, whose pages have no offsets, got a list");
    if (!o.leftpad_k.is_none() && (packed || paged)) {
      argument_error("leftpad_k", std::string("expected None beside ") + (packed ? "cu_seqlens_k" : "block_table") +
                                      ": it is for k of shape [batch, tokens, heads, head_dim], got a list");
    }
    if (!paged && !o.prefix_table.is_none()) {
      argument_error("shared_prefix", "expected None without block_table: what is shared are pages, got a tuple");
    }
    if (paged && o.seqused_k.is_none())
      argument_error("seqused_k", "expected the keys in use of each sequence beside block_table, got None");
    read_heads(packed, paged);
    const std::int64_t b = input_.num_sequences;
    if (packed) {
      input_.k_tokens = v.shape[0];
      input_.cu_seqlens_k = offsets(&cu_seqlens_k_, o.cu_seqlens_k, "cu_seqlens_k", b + 1);
    } else if (paged) {
      read_table(o.block_table);
      read_prefix(o);
    } else {
      input_.k_tokens = v.shape[1];
      if (v.shape[0] != b) {
        argument_error("k", "expected a first dimension of " + std::to_string(b) + " (the sequences of q), got shape " +
                                shape_text(k_.shape()));
      }
    }
  }

  // Reads the shapes and addresses of k and v.
  void read_heads(bool packed, bool paged) {
    const TensorView& v = k_.view();
    if (v.ndim != (packed ? 3 : 4)) {
      argument_error(
          "k",
          std::string("expected shape ") +
              (is_tree_ ? "[tokens, heads, head_dim] beside cu_segments"
               : packed ? "[tokens, heads, head_dim] beside cu_seqlens_k"
               : paged  ? "[pages, page_size, heads, head_dim] beside block_table"
                        : "[batch, tokens, heads, head_dim], or packed [tokens, heads, head_dim] beside cu_seqlens_k") +
              ", got " + shape_text(k_.shape()));
    }
    require_columns(k_);
    input_.num_kv_heads = v.shape[v.ndim - 2];
    if (v.shape[v.ndim - 1] != input_.head_dim) {
      argument_error("k", "expected a last dimension of " + std::to_string(input_.head_dim) +
                              " (that of q), got shape " + shape_text(k_.shape()));
    }
    if (input_.num_kv_heads < 1 || input_.num_q_heads % input_.num_kv_heads != 0) {
      argument_error("k", "expected a number of heads that divides q's " + std::to_string(input_.num_q_heads) +
                              ", got shape " + shape_text(k_.shape()));
    }
    check_shape(v_, k_.shape(), "k");
    require_columns(v_);
    input_.k = heads(k_);
    input_.v = heads(v_);
  }

  // Reads a table of pages with `rows` rows.
  const std::int32_t* table(std::optional<Array>* holder, nb::handle given, const char* name, std::int64_t rows,
                            const std::string& shape, std::int64_t* pages, std::int64_t* stride) {
    const TensorView& t = holder->emplace(given, name, kInt32).view();
    require_device(**holder, device());
    if (t.ndim != 2 || t.shape[0] != rows) {
      argument_error(
          name, "expected shape [" + std::to_string(rows) + ", " + shape + ", got " + shape_text((*holder)->shape()));
    }
    require_columns(**holder);
    *pages = t.shape[1];
    *stride = t.stride(0);
    static constexpr std::int32_t kEmpty = 0;
    return t.data != nullptr ? static_cast<const std::int32_t*>(t.data) : &kEmpty;
  }
  void read_table(nb::handle block_table) {
    input_.block_table = table(&table_, block_table, "block_table", input_.num_sequences,
                               "max_pages] (the sequences of q)", &input_.max_pages, &input_.table_stride);
    input_.num_pages = k_.view().shape[0];
    input_.page_size = k_.view().shape[1];
    if (input_.page_size < 1)
      argument_error("k", "expected pages of at least one key, got shape " + shape_text(k_.shape()));
    input_.k_tokens = input_.page_size * input_.max_pages;
  }
  void read_prefix(const Options& o) {
    if (o.prefix_table.is_none()) return;
    input_.group_offsets = offsets(&group_offsets_, o.group_offsets, "group_offsets", -1);
    input_.num_groups = group_offsets_.given->num_sequences;
    input_.prefix_lens = list(&prefix_lens_, o.prefix_lens, "prefix_lens", input_.num_groups, "the groups");
    input_.prefix_table =
        table(&prefix_table_, o.prefix_table, "prefix_table", input_.num_groups,
              "max_prefix_pages] (the groups of group_offsets)", &input_.max_prefix_pages, &input_.prefix_stride);
    input_.k_tokens += input_.page_size * input_.max_prefix_pages;
  }

  void read_window(nb::handle window) {
    if (window.is_none()) return;
    if (PyBool_Check(window.ptr()) || !PyIndex_Check(window.ptr())) {
      throw nb::type_error(("window_size: expected None or an integer, got " + kind_of(window)).c_str());
    }
    const Py_ssize_t size = PyNumber_AsSsize_t(window.ptr(), nullptr);  // clipped
    if (size < 1) argument_error("window_size", "expected None or a number of keys >= 1, got " + std::to_string(size));
    if (!input_.causal)
      argument_error("window_size",
                     "expected None beside causal=False: the window ends at the query, got " + std::to_string(size));
    input_.window_size = std::min<std::int64_t>(size, std::int64_t{1} << 32);
  }

  void read_scale(nb::handle scale) {
    if (scale.is_none()) {
      input_.softmax_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(input_.head_dim)));
      return;
    }
    const double x = read_number(scale, "softmax_scale", "None or a number");
    input_.softmax_scale = static_cast<float>(x);
    const float c = attention_scale(input_.softmax_scale);
    if (!(c >= 0x1p-126f) || !std::isfinite(c)) {
      argument_error("softmax_scale",
                     "expected None or a finite number > 0 (fp32, not subnormal), got " + number_text(x));
    }
  }

  void read_sinks(nb::handle given) {
    if (given.is_none()) return;
    const TensorView& v = sinks_.emplace(given, "sinks", kFloat32).view();
    require_device(*sinks_, device());
    if (v.ndim != 1 || v.shape[0] != input_.num_q_heads) {
      argument_error("sinks", "expected shape [" + std::to_string(input_.num_q_heads) + "] (the heads of q), got " +
                                  shape_text(sinks_->shape()));
    }
    require_columns(*sinks_);
    static constexpr float kEmpty = 0.0f;  // no heads: the array may be null, which would mean no sinks
    input_.sinks = v.data != nullptr ? static_cast<const float*>(v.data) : &kEmpty;
  }

  void read_softcap(nb::handle softcap) {
    if (softcap.is_none()) return;
    const double x = read_number(softcap, "softcap", "None or a number");
    input_.softcap = static_cast<float>(x);
    if (!(input_.softcap > 0.0f) || !std::isfinite(input_.softcap)) {
      argument_error("softcap", "expected None or a finite number > 0, got " + number_text(x));
    }
    const float inner = AttentionSoftcap(input_).inner;
    if (!(inner >= 0x1p-126f) || !std::isfinite(inner)) {
      argument_error("softcap",
                     "expected None or a number for which softmax_scale / softcap is finite and not subnormal in fp32, "
                     "got " +
                         number_text(x));
    }
  }

  Array q_, k_, v_;
  HeldOffsets cu_seqlens_q_, cu_seqlens_k_, group_offsets_;
  std::optional<Array> seqused_q_, seqused_k_, leftpad_k_, parents_, table_, prefix_table_, prefix_lens_, sinks_;
  AttentionInput input_;
  bool is_tree_ = false;
};

nb::object run(nb::handle q, const Call& call, Arithmetic arithmetic, bool wants_lse, nb::handle allocate,
               std::uintptr_t stream) {
  AttentionParams p{call.input()};
  p.arithmetic = arithmetic;
  return Results("attention", q, call.device(), allocate, stream)
      .add(&p.out, call.q().shape(), p.dtype)
      .add(&p.lse, call.lse_shape(), wants_lse)
      .run(rlk::attention, &p, attention_workspace_bytes);
}

nb::object forward(nb::handle q, nb::handle k, nb::handle v, nb::handle sinks, nb::handle cu_seqlens_q,
                   nb::handle cu_seqlens_k, nb::handle seqused_q, nb::handle seqused_k, nb::handle leftpad_k,
                   nb::handle parents, nb::handle block_table, nb::handle prefix_table, nb::handle prefix_lens,
                   nb::handle group_offsets, bool causal, nb::handle window_size, nb::handle softmax_scale,
                   nb::handle softcap, int exp, int arithmetic, bool wants_lse, nb::handle allocate,
                   std::uintptr_t stream) {
  const Call call(q, k, v,
                  {sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, parents, block_table,
                   prefix_table, prefix_lens, group_offsets, causal, window_size, softmax_scale, softcap, exp});
  return run(q, call, static_cast<Arithmetic>(arithmetic), wants_lse, allocate, stream);
}

// The fast way for an eager call on plain CUDA tensors without gradient, such as a decode step. Every other call gets
// NotImplemented and takes the general way.
nb::object eager(nb::handle q, nb::handle k, nb::handle v, nb::handle sinks, nb::handle cu_seqlens_q,
                 nb::handle cu_seqlens_k, nb::handle seqused_q, nb::handle seqused_k, nb::handle leftpad_k,
                 nb::handle parents, nb::handle block_table, nb::handle prefix_table, nb::handle prefix_lens,
                 nb::handle group_offsets, bool causal, nb::handle window_size, nb::handle softmax_scale,
                 nb::handle softcap, nb::handle exp, bool wants_lse) {
  const int mode = may_bypass_dispatcher({q, k, v, sinks}) ? read_exp(exp) : -1;
  if (mode < 0) return nb::borrow(Py_NotImplemented);
  const Call call(q, k, v,
                  {sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, parents, block_table,
                   prefix_table, prefix_lens, group_offsets, causal, window_size, softmax_scale, softcap, mode});
  if (call.device().type != DeviceType::kCuda) return nb::borrow(Py_NotImplemented);
  return run(q, call, Arithmetic::kIeee, wants_lse, nb::none(), 0);
}

// Numbers of splits that a call of partials computes: ascending.
std::vector<std::int64_t> read_splits(nb::handle given, const AttentionInput& p) {
  std::vector<std::int64_t> splits;
  if (given.is_none()) {
    for (std::int64_t s = 0; s < attention_splits(p.k_tokens); ++s) splits.push_back(s);
    return splits;
  }
  constexpr std::int64_t kMostSplits = attention_splits(INT32_MAX);
  std::int64_t least = 0;
  for (const nb::handle number : given) {
    splits.push_back(nb::cast<std::int64_t>(number));
    if (splits.back() < least || splits.back() >= kMostSplits) {
      argument_error("splits", "expected ascending numbers in [0, " + std::to_string(kMostSplits) + "), got " +
                                   std::to_string(splits.back()) + " at [" + std::to_string(splits.size() - 1) + "]");
    }
    least = splits.back() + 1;
  }
  if (p.seqused_k == nullptr)
    argument_error("seqused_k", "expected the keys of each whole sequence beside splits, got None");
  if (p.group_offsets != nullptr) {
    argument_error("shared_prefix",
                   "expected None beside splits, which cut a prefix: list all pages of a sequence in block_table");
  }
  return splits;
}

nb::object partials(nb::handle q, nb::handle k, nb::handle v, nb::handle cu_seqlens_q, nb::handle cu_seqlens_k,
                    nb::handle seqused_q, nb::handle seqused_k, nb::handle leftpad_k, nb::handle block_table,
                    nb::handle prefix_table, nb::handle prefix_lens, nb::handle group_offsets, nb::handle splits_given,
                    bool causal, nb::handle window_size, nb::handle softmax_scale, nb::handle softcap, int exp,
                    int arithmetic, nb::handle allocate, std::uintptr_t stream) {
  const Call call(q, k, v,
                  {nb::none(), cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, nb::none(), block_table,
                   prefix_table, prefix_lens, group_offsets, causal, window_size, softmax_scale, softcap, exp});
  AttentionPartialsParams p{call.input()};
  p.arithmetic = static_cast<Arithmetic>(arithmetic);
  const std::vector<std::int64_t> splits = read_splits(splits_given, p);
  std::vector<std::int64_t> shape(call.q().shape().begin(), call.q().shape().end());
  shape.insert(shape.begin(), static_cast<std::int64_t>(splits.size()));
  std::vector<std::int64_t> of_stats = shape;
  of_stats.back() = 2;
  Results results("attention", q, call.device(), allocate, stream);
  results.add(&p.stats, of_stats).add(&p.sums, shape);
  const std::int64_t rows = attention_rows(p) * p.num_q_heads;
  std::int64_t held = 0;  // keys of the splits so far
  for (std::size_t i = 0, count = 1; i < splits.size(); i += count, count = 1) {
    while (i + count < splits.size() && splits[i + count] == splits[i] + static_cast<std::int64_t>(count)) ++count;
    AttentionPartialsParams run = p;
    run.first_split = splits[i];
    run.num_splits = static_cast<std::int64_t>(count);
    run.absent_keys = attention_split_begin(run.first_split) - held;
    run.stats += 2 * rows * static_cast<std::int64_t>(i);
    run.sums += p.head_dim * rows * static_cast<std::int64_t>(i);
    results.call(rlk::attention_partials, run);
    held = attention_split_begin(run.first_split + run.num_splits) - run.absent_keys;
  }
  return results.result();
}

const float* read_rows(const Array& a, const Call& call) {
  require_device(a, call.device());
  check_shape(a, call.lse_shape(), "lse");
  if (!a.view().is_contiguous()) argument_error(a.name(), std::string("expected a contiguous array") + kCopyHint);
  return static_cast<const float*>(a.view().data);
}

nb::object backward(nb::handle dout_given, nb::handle dlse_given, nb::handle q, nb::handle k, nb::handle v,
                    nb::handle out_given, nb::handle lse_given, nb::handle sinks, nb::handle cu_seqlens_q,
                    nb::handle cu_seqlens_k, nb::handle seqused_q, nb::handle seqused_k, nb::handle leftpad_k,
                    nb::handle parents, bool causal, nb::handle window_size, nb::handle softmax_scale,
                    nb::handle softcap, int exp, int arithmetic, bool wants_q, bool wants_kv, bool wants_sinks,
                    nb::handle allocate, std::uintptr_t stream) {
  const Call call(q, k, v,
                  {sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, parents, nb::none(), nb::none(),
                   nb::none(), nb::none(), causal, window_size, softmax_scale, softcap, exp});
  AttentionBackwardParams p{call.input()};
  p.arithmetic = static_cast<Arithmetic>(arithmetic);
  if (wants_sinks && p.sinks == nullptr) throw nb::type_error("sinks: expected an array, got None");
  const Array dout(dout_given, "dout", kFloats.names), out(out_given, "out", kFloats.names);
  for (const Array* a : {&dout, &out}) {
    check_same(*a, call.q());
    check_shape(*a, call.q().shape(), "q");
    require_columns(*a);
  }
  p.dout = Call::heads(dout);
  p.out = Call::heads(out);
  if (lse_given.is_none()) throw nb::type_error("lse: expected the lse that attention returned, got None");
  const Array lse(lse_given, "lse", kFloat32);
  p.lse = read_rows(lse, call);
  std::optional<Array> dlse;
  if (!dlse_given.is_none()) {
    dlse.emplace(dlse_given, "dlse", kFloat32);
    p.dlse = read_rows(*dlse, call);
  }
  return Results("attention", q, call.device(), allocate, stream)
      .add(&p.dq, call.q().shape(), p.dtype, wants_q)
      .add(&p.dk, call.k().shape(), p.dtype, wants_kv)
      .add(&p.dv, call.k().shape(), p.dtype, wants_kv)
      .add(&p.dsinks, {call.input().num_q_heads}, wants_sinks)
      .run(rlk::attention_backward, &p, attention_backward_workspace_bytes);
}

const Functions kFunctions([](nb::module_& m) {
  define(m, "attention", &forward);
  define(m, "attention_eager", &eager);
  define(m, "attention_backward", &backward);
  define(m, "attention_partials", &partials);
});

}  // namespace
}  // namespace rlk::bindings
