// Python's entry to the operator `rope`.
#include "rlk/ops/rope.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "call.h"

namespace rlk::bindings {
namespace {

// An array [..., num_heads, ..., head_dim] with the axis of its heads. The remaining dimensions are tokens.
struct HeadsArgument {
  HeadsArgument(Frame* frame, nb::handle object, const char* name, nb::handle head_axis)
      : array(frame->read(object, name, kFloats)) {
    require_shape(array->ndim >= 2, array, "shape [..., num_heads, head_dim]");
    const std::int64_t given = read_integer(head_axis, "head_axis", "an integer");
    axis = static_cast<int>(given < 0 ? given + array->ndim : given);
    require(given >= -array->ndim && given < array->ndim && axis != array->ndim - 1, "head_axis", "an axis of ", name,
            " before its last, in [0, ", array->ndim - 1, ") or negative, got ", given);
    require_columns(array);
    TensorView out;  // contiguous
    out.ndim = array->ndim;
    out.shape = array->shape;
    for (int i = 0; i < array->ndim - 1; ++i) {
      if (i == axis) continue;
      tokens.push_back(array->shape[i]);
      in_strides.push_back(array->stride(i));
      out_strides.push_back(out.stride(i));
    }
    heads.num_heads = array->shape[axis];
    heads.x = array->data;
    heads.x_head_stride = array->stride(axis);
    heads.y_head_stride = out.stride(axis);
    head_dim = array->shape[array->ndim - 1];
  }

  const Array& array;
  int axis = 0;
  Sizes tokens, in_strides, out_strides;
  RopeHeads heads;  // the strides of tokens and y are not set
  std::int64_t head_dim = 0;
};

// Merges the token dimensions of several arrays into two: an outer and an inner index.
class Tokens {
 public:
  explicit Tokens(const Sizes& sizes) : sizes_(sizes) {
    for (std::int64_t size : sizes) num_ *= size;
    inner_ = num_;
  }

  // Adds an array by its strides, one per dimension; `to` gets the two merged strides. The stride is 0 for a dimension
  // in which the array has size 1.
  void add(const Sizes& strides, TokenStrides* to) {
    TensorView view;
    view.ndim = static_cast<std::int32_t>(sizes_.size());
    view.shape = sizes_.data();
    view.strides = strides.data();
    const std::optional<RowLayout> layout = row_layout(view, view.ndim);
    merges_ = merges_ && layout && (layout->inner == num_ || layout->inner == inner_ || inner_ == num_);
    if (!merges_) return;
    inner_ = std::min(inner_, layout->inner);
    arrays_.emplace_back(*layout, to);
  }

  // Returns false if the dimensions do not merge to two.
  bool merge(RopeParams* p) const {
    p->num_tokens = num_;
    if (num_ > 0) p->inner_tokens = inner_;
    for (const auto& [rows, to] : arrays_) {
      *to = {rows.inner == inner_ ? rows.outer_stride : inner_ * rows.inner_stride, rows.inner_stride};
    }
    return merges_;
  }

 private:
  const Sizes& sizes_;
  std::int64_t num_ = 1, inner_ = 1;  // numbers of tokens, and of tokens per outer index
  bool merges_ = true;
  std::vector<std::pair<RowLayout, TokenStrides*>> arrays_;
};

std::int64_t read_rotary_dim(nb::handle partial_dim, const HeadsArgument& q) {
  if (partial_dim.is_none()) {
    require(q.head_dim % 2 == 0, q.array, "an even last dimension, or a partial_dim, got shape ", q.array.shape());
    return q.head_dim;
  }
  const std::int64_t dim = read_integer(partial_dim, "partial_dim", "an integer or None");
  require(dim >= 2 && dim % 2 == 0 && dim <= q.head_dim, "partial_dim", "an even number in [2, ", q.head_dim,
          "] (the last dimension of ", q.array, "), got ", dim);
  return dim;
}

void read_sections(nb::handle sections, RopeParams* p) {
  if (sections.is_none()) return;
  const std::string expected = words("None or three sizes of sections, integers >= 0 that sum to ", p->rotary_dim / 2,
                                     " (half the rotated columns)");
  if (!PyTuple_Check(sections.ptr()) && !PyList_Check(sections.ptr())) {
    type_error("mrope_sections", expected, ", got ", kind_of(sections));
  }
  const nb::sequence given = nb::borrow<nb::sequence>(sections);
  std::int64_t sum = 0;
  bool right = nb::len(given) == 3;
  for (int i = 0; right && i < 3; ++i) {
    const std::int64_t size = read_integer(given[i], "mrope_sections", "integers");
    right = size >= 0 && size <= p->rotary_dim / 2;
    p->section_pairs[i] = static_cast<std::int32_t>(right ? size : 0);
    sum += size;
  }
  require(right && sum == p->rotary_dim / 2, "mrope_sections", expected, ", got ", sections);
  p->num_sections = 3;
}

// Strides of the token dimensions and of the sections; 0 for a dimension of size 1, since its element is used for all
// indices. Any other shape is an error. `width` is the last dimension, or negative if there are only token dimensions.
Sizes read_tokens(const Array& a, const HeadsArgument& q, int num_sections, std::int64_t width,
                  std::int64_t* section_stride) {
  const int first = num_sections > 1 ? 1 : 0, after = width < 0 ? 0 : 1;
  bool right =
      a->ndim == first + after + static_cast<int>(q.tokens.size()) && (first == 0 || a->shape[0] == num_sections);
  Sizes strides;
  for (std::size_t i = 0; right && i < q.tokens.size(); ++i) {
    const int dim = first + static_cast<int>(i);
    right = a->shape[dim] == q.tokens[i] || a->shape[dim] == 1;
    strides.push_back(a->shape[dim] == 1 ? 0 : a->stride(dim));
  }
  if (!right) {
    Sizes expected = q.tokens;
    if (first) expected.insert(expected.begin(), num_sections);
    if (after) expected.push_back(width);
    require_shape(false, a, "shape ", expected, " (the dimensions of ", q.array,
                  " but for head_axis and the last, each of which may be 1", first ? ", after one of the sections" : "",
                  ")");
  }
  *section_stride = first ? a->stride(0) : 0;
  return strides;
}

// cos or sin.
const Array& read_angles(Frame* frame, nb::handle object, const char* name, const HeadsArgument& q) {
  const Array& a = frame->read(object, name, "float32 or that of q");
  check_float32_or(a, q.array);
  require(a->ndim > 0, a, "a last dimension of angles, got shape []");
  require_columns(a);
  return a;
}

RLK_EAGER_FUNCTION(rope, 5, (q_given, k_given, cos_given, sin_given, ids_given), bool interleaved,
                   nb::handle partial_dim, bool round_products, nb::handle sections, nb::handle head_axis,
                   bool transposed) {
  HeadsArgument q(frame, q_given, transposed ? "dq_out" : "q", head_axis);
  RopeParams p;
  p.head_dim = q.head_dim;
  p.dtype = q.array->dtype;
  RLK_FILL(p, as_given, interleaved, round_products, transposed)
  std::optional<HeadsArgument> k;
  if (!k_given.is_none()) {
    k.emplace(frame, k_given, transposed ? "dk_out" : "k", head_axis);
    check_dtype(k->array, q.array);
    if (k->axis != q.axis || k->tokens != q.tokens || k->head_dim != q.head_dim) {
      const std::string before = shape_text(q.array.shape().first(q.axis)),
                        after = shape_text(q.array.shape().subspan(q.axis + 1));
      require_shape(false, k->array, "shape ", before.substr(0, before.size() - 1), q.axis > 0 ? ", " : "",
                    "num_kv_heads, ", after.substr(1), " (that of ", q.array, " but for the heads)");
    }
  }
  p.rotary_dim = read_rotary_dim(partial_dim, q);
  read_sections(sections, &p);

  const Array &cos = read_angles(frame, cos_given, "cos", q), &sin = read_angles(frame, sin_given, "sin", q);
  check_dtype(sin, cos);
  p.angle_dtype = cos->dtype;
  p.width = cos->shape[cos->ndim - 1];
  const std::int64_t pairs = p.rotary_dim / 2;
  require(p.width == p.rotary_dim || p.width == pairs, cos, "a last dimension of ", p.rotary_dim, " or ", pairs,
          " (the rotated columns or their pairs), got shape ", cos.shape());
  check_shape(sin, cos.shape(), " (that of cos)");
  p.cos.data = cos->data;
  p.sin.data = sin->data;

  Tokens tokens(q.tokens);
  if (const Array* const ids = frame->optional(ids_given, "position_ids", kIndices)) {
    require(cos->ndim == 2, cos, "a table [max_position, ", p.rotary_dim, " or ", pairs,
            "] beside position_ids, got shape ", cos.shape());
    tokens.add(read_tokens(*ids, q, p.num_sections, -1, &p.id_section_stride), &p.id_tokens);
    p.position_ids = ids->view().data;
    p.id_dtype = ids->view().dtype;
    p.max_position = cos->shape[0];
    p.cos.tokens.inner = cos->stride(0);
    p.sin.tokens.inner = sin->stride(0);
  } else {
    tokens.add(read_tokens(cos, q, p.num_sections, p.width, &p.cos.section_stride), &p.cos.tokens);
    tokens.add(read_tokens(sin, q, p.num_sections, p.width, &p.sin.section_stride), &p.sin.tokens);
  }

  Results results("rope", frame);
  const auto place = [&](HeadsArgument* from, RopeHeads* to) {
    results.add(&from->heads.y, from->array.shape(), p.dtype);
    *to = from->heads;
    tokens.add(from->in_strides, &to->x_tokens);
    tokens.add(from->out_strides, &to->y_tokens);
  };
  place(&q, &p.q);
  if (k) {
    place(&*k, &p.k);
  } else {
    results.add(nb::none());
  }
  require(tokens.merge(&p), q.array, "dimensions of tokens that merge, in it, in ", transposed ? "dk_out" : "k",
          ", cos, sin and position_ids alike, to at most two strides, got shape ", q.array.shape(), kCopyHint);
  return results.run(rlk::rope, p);
}

}  // namespace
}  // namespace rlk::bindings
