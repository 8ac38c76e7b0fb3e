// Python's entry to rope.
#include "rlk/ops/rope.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "call.h"
#include "linear_args.h"

namespace rlk::bindings {
namespace {

using Sizes = std::vector<std::int64_t>;

// [..., num_heads, ..., head_dim] by the axis of the heads; what is left are tokens.
struct HeadsArgument {
  HeadsArgument(nb::handle object, const char* name, nb::handle head_axis) : array(object, name, kFloats) {
    const TensorView& v = array.view();
    if (v.ndim < 2) argument_error(name, "expected shape [..., num_heads, head_dim], got " + shape_text(array.shape()));
    const std::int64_t given = read_integer(head_axis, "head_axis", "an integer");
    axis = static_cast<int>(given < 0 ? given + v.ndim : given);
    if (given < -v.ndim || given >= v.ndim || axis == v.ndim - 1) {
      argument_error("head_axis", "expected an axis of " + std::string(name) + " before its last, in [0, " +
                                      std::to_string(v.ndim - 1) + ") or negative, got " + std::to_string(given));
    }
    require_columns(array);
    TensorView out;  // contiguous
    out.ndim = v.ndim;
    out.shape = v.shape;
    for (int i = 0; i < v.ndim - 1; ++i) {
      if (i == axis) continue;
      tokens.push_back(v.shape[i]);
      in_strides.push_back(v.stride(i));
      out_strides.push_back(out.stride(i));
    }
    heads.num_heads = v.shape[axis];
    heads.x = v.data;
    heads.x_head_stride = v.stride(axis);
    heads.y_head_stride = out.stride(axis);
    head_dim = v.shape[v.ndim - 1];
  }

  Array array;
  int axis = 0;
  Sizes tokens, in_strides, out_strides;
  RopeHeads heads;  // without tokens' strides and y
  std::int64_t head_dim = 0;
};

// Dimensions of tokens of several arrays as two: an outer and an inner one.
class Tokens {
 public:
  explicit Tokens(const Sizes& sizes) : sizes_(sizes) {}

  // Strides of an array, one for each dimension; `to` gets the two. The array may have 1 for any size.
  void add(const Sizes& strides, TokenStrides* to) { arrays_.push_back({strides, to}); }

  // False where dimensions do not merge to two.
  bool merge(RopeParams* p) const {
    std::vector<TokenStrides> merged(arrays_.size());
    std::int64_t inner = 1, outer = 1;
    int levels = 0;
    for (std::size_t i = sizes_.size(); i-- > 0;) {
      if (sizes_[i] == 0) {
        p->num_tokens = 0;
        return true;
      }
      if (sizes_[i] == 1) continue;
      bool walks_on = levels > 0;
      for (std::size_t a = 0; a < arrays_.size() && walks_on; ++a) {
        const std::int64_t step = levels == 1 ? merged[a].inner * inner : merged[a].outer * outer;
        walks_on = arrays_[a].strides[i] == step;
      }
      if (!walks_on && ++levels > 2) return false;
      for (std::size_t a = 0; a < arrays_.size() && !walks_on; ++a) {
        (levels == 1 ? merged[a].inner : merged[a].outer) = arrays_[a].strides[i];
      }
      (levels == 1 ? inner : outer) *= sizes_[i];
    }
    p->num_tokens = inner * outer;
    p->inner_tokens = inner;
    for (std::size_t a = 0; a < arrays_.size(); ++a) *arrays_[a].to = merged[a];
    return true;
  }

 private:
  struct Member {
    Sizes strides;
    TokenStrides* to;
  };
  const Sizes& sizes_;
  std::vector<Member> arrays_;
};

std::int64_t read_rotary_dim(nb::handle partial_dim, const HeadsArgument& q) {
  if (partial_dim.is_none()) {
    if (q.head_dim % 2 == 0) return q.head_dim;
    argument_error(q.array.name(),
                   "expected an even last dimension, or a partial_dim, got shape " + shape_text(q.array.shape()));
  }
  const std::int64_t dim = read_integer(partial_dim, "partial_dim", "an integer or None");
  if (dim < 2 || dim % 2 != 0 || dim > q.head_dim) {
    argument_error("partial_dim", "expected an even number in [2, " + std::to_string(q.head_dim) +
                                      "] (the last dimension of " + q.array.name() + "), got " + std::to_string(dim));
  }
  return dim;
}

void read_sections(nb::handle sections, RopeParams* p) {
  if (sections.is_none()) return;
  const std::string expected = "expected None or three sizes of sections, integers >= 0 that sum to " +
                               std::to_string(p->rotary_dim / 2) + " (half the rotated columns)";
  if (!PyTuple_Check(sections.ptr()) && !PyList_Check(sections.ptr())) {
    throw nb::type_error(("mrope_sections: " + expected + ", got " + kind_of(sections)).c_str());
  }
  const nb::sequence given = nb::borrow<nb::sequence>(sections);
  std::int64_t sum = 0;
  const std::size_t count = nb::len(given);
  bool right = count == 3;
  for (std::size_t i = 0; right && i < count; ++i) {
    const std::int64_t size = read_integer(given[i], "mrope_sections", "integers");
    right = size >= 0 && size <= p->rotary_dim / 2;
    p->section_pairs[i] = static_cast<std::int32_t>(right ? size : 0);
    sum += size;
  }
  if (!right || sum != p->rotary_dim / 2) {
    argument_error("mrope_sections", expected + ", got " + nb::repr(sections).c_str());
  }
  p->num_sections = 3;
}

std::string text_of(Sizes sizes, const std::string& last) {
  std::string text = "[";
  for (std::int64_t s : sizes) text += std::to_string(s) + ", ";
  return text + last + "]";
}

// Strides of the dimensions of tokens, 0 where one serves all, and of sections; an error where the shape is another.
Sizes read_tokens(const Array& a, const HeadsArgument& q, int num_sections, const std::string& last,
                  std::int64_t* section_stride) {
  const TensorView& v = a.view();
  const int first = num_sections > 1 ? 1 : 0, after = last.empty() ? 0 : 1;
  bool right =
      v.ndim == first + after + static_cast<int>(q.tokens.size()) && (first == 0 || v.shape[0] == num_sections);
  Sizes strides;
  for (std::size_t i = 0; right && i < q.tokens.size(); ++i) {
    const int dim = first + static_cast<int>(i);
    right = v.shape[dim] == q.tokens[i] || v.shape[dim] == 1;
    strides.push_back(v.shape[dim] == 1 ? 0 : v.stride(dim));
  }
  if (!right) {
    Sizes expected = q.tokens;
    if (first) expected.insert(expected.begin(), num_sections);
    std::string text = last.empty() ? shape_text(expected) : text_of(expected, last);
    argument_error(a.name(), "expected shape " + text + " (the dimensions of " + q.array.name() +
                                 " but for head_axis and the last, each of which may be 1" +
                                 (first ? ", after one of the sections" : "") + "), got " + shape_text(a.shape()));
  }
  *section_stride = first ? v.stride(0) : 0;
  return strides;
}

// cos or sin.
Array read_angles(nb::handle object, const char* name, const HeadsArgument& q) {
  Array a(object, name, "float32 or that of q");
  check_float32_or(a, q.array);
  require_device(a, q.array.view().device);
  if (a.view().ndim == 0) argument_error(name, "expected a last dimension of angles, got shape []");
  require_columns(a);
  return a;
}

nb::object call(nb::handle q_given, nb::handle k_given, nb::handle cos_given, nb::handle sin_given,
                nb::handle ids_given, bool interleaved, nb::handle partial_dim, bool round_products,
                nb::handle sections, nb::handle head_axis, bool transposed, nb::handle allocate,
                std::uintptr_t stream) {
  HeadsArgument q(q_given, transposed ? "dq_out" : "q", head_axis);
  const Device device = q.array.view().device;
  RopeParams p;
  p.head_dim = q.head_dim;
  p.dtype = q.array.view().dtype;
  p.interleaved = interleaved;
  p.round_products = round_products;
  p.transposed = transposed;
  std::optional<HeadsArgument> k;
  if (!k_given.is_none()) {
    k.emplace(k_given, transposed ? "dk_out" : "k", head_axis);
    check_same(k->array, q.array);
    if (k->axis != q.axis || k->tokens != q.tokens || k->head_dim != q.head_dim) {
      Sizes expected(q.array.shape().begin(), q.array.shape().end());
      std::string text = "[";
      for (int i = 0; i < static_cast<int>(expected.size()); ++i) {
        text += (i ? ", " : "") + (i == q.axis ? std::string("num_kv_heads") : std::to_string(expected[i]));
      }
      argument_error(k->array.name(), "expected shape " + text + "] (that of " + q.array.name() +
                                          " but for the heads), got " + shape_text(k->array.shape()));
    }
  }
  p.rotary_dim = read_rotary_dim(partial_dim, q);
  read_sections(sections, &p);

  const Array cos = read_angles(cos_given, "cos", q), sin = read_angles(sin_given, "sin", q);
  check_same(sin, cos);
  p.angle_dtype = cos.view().dtype;
  p.width = cos.view().shape[cos.view().ndim - 1];
  const std::string widths = std::to_string(p.rotary_dim) + " or " + std::to_string(p.rotary_dim / 2);
  if (p.width != p.rotary_dim && p.width != p.rotary_dim / 2) {
    argument_error("cos", "expected a last dimension of " + widths +
                              " (the rotated columns or their pairs), got shape " + shape_text(cos.shape()));
  }
  check_shape(sin, cos.shape(), "cos");
  p.cos.data = cos.view().data;
  p.sin.data = sin.view().data;

  Tokens tokens(q.tokens);
  std::optional<Array> ids;
  if (!ids_given.is_none()) {
    ids.emplace(ids_given, "position_ids", kIndices);
    require_device(*ids, device);
    if (cos.view().ndim != 2) {
      argument_error("cos", "expected a table [max_position, " + widths + "] beside position_ids, got shape " +
                                shape_text(cos.shape()));
    }
    tokens.add(read_tokens(*ids, q, p.num_sections, "", &p.id_section_stride), &p.id_tokens);
    p.position_ids = ids->view().data;
    p.id_dtype = ids->view().dtype;
    p.max_position = cos.view().shape[0];
    p.cos.tokens.inner = cos.view().stride(0);
    p.sin.tokens.inner = sin.view().stride(0);
  } else {
    const std::string width = std::to_string(p.width);
    tokens.add(read_tokens(cos, q, p.num_sections, width, &p.cos.section_stride), &p.cos.tokens);
    tokens.add(read_tokens(sin, q, p.num_sections, width, &p.sin.section_stride), &p.sin.tokens);
  }

  Results results("rope", q_given, device, allocate, stream);
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
  if (!tokens.merge(&p)) {
    argument_error(q.array.name(), "expected dimensions of tokens that merge, in it, in " +
                                       std::string(transposed ? "dk_out" : "k") +
                                       ", cos, sin and position_ids alike, to at most two strides, got shape " +
                                       shape_text(q.array.shape()) + kCopyHint);
  }
  return results.run(rlk::rope, p);
}

const Functions kFunctions([](nb::module_& m) {
  define(m, "rope", &call);
  define_eager<&call, 5>(m, "rope_eager");
});

}  // namespace
}  // namespace rlk::bindings
