// Python's entry to pack and unpack.
#include "rlk/ops/pack.h"

#include <algorithm>
#include <vector>

#include "call.h"

namespace rlk::bindings {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 31;

void check_counts(std::int64_t num_tokens, std::int64_t capacity, bool unpacks) {
  require(num_tokens < kMost, unpacks ? "max_seqlen" : "tensors", "fewer than 2^31", unpacks ? "" : " tokens a row",
          ", got ", num_tokens);
  require(capacity < kMost, "max_tokens", "fewer than 2^31 (cu_seqlens are int32), got ", capacity);
}

// Returns (cu_seqlens, positions or None, status) for lengths [rows] or a mask [rows, tokens].
RLK_FUNCTION(pack_layout, (lengths, mask), std::int64_t num_tokens, std::int64_t capacity) {
  const bool by_lengths = mask.is_none();
  const char* name = by_lengths ? "lengths" : "mask";
  const Array& in = by_lengths ? frame->read(lengths, name, kIndices) : frame->read_any(mask, name);
  check_counts(num_tokens, capacity, false);
  PackLayoutParams p;
  if (by_lengths) {
    require_shape(in->ndim == 1 && in->is_contiguous(), in, "a contiguous array of shape [num_sequences]");
    p.lengths = in->shape[0] == 0 ? nullptr : in->data;
    p.lengths_dtype = in->dtype;
  } else {
    require_shape(in->ndim == 2 && in->shape[1] == num_tokens, in, "shape [num_sequences, ", num_tokens, "]");
    require_flags(in);
    require_columns(in);
    p.mask = flags_of(in);
  }
  p.num_sequences = in->shape[0];
  p.num_tokens = num_tokens;
  p.capacity = capacity;
  return Results("pack", frame)
      .add(&p.cu_seqlens, {p.num_sequences + 1})
      .add(&p.positions, {p.num_sequences, num_tokens}, !by_lengths)
      .add(&p.status, {1})
      .run(rlk::pack_layout, p);
}

// Returns (shape, name of the dtype) of any exporter, even one without these attributes.
RLK_PLAIN_FUNCTION(shape_and_dtype, nb::handle array, const char* name) {
  const Array a = Array::of_any_dtype(array, name);
  nb::list shape;
  for (const std::int64_t size : a.shape()) shape.append(size);
  return nb::make_tuple(nb::tuple(shape), nb::str(a.dtype_name().c_str()));
}

// Number of bytes of a token: the dimensions from `first` on, which must have no gaps.
std::int64_t token_bytes(const Array& a, int first) {
  std::int64_t elements = 1;
  for (int i = a->ndim; i-- > first;) {
    require(a->shape[i] <= 1 || a->stride(i) == elements || a->num_elements() == 0, a,
            "contiguous dimensions after those of tokens, got stride ", a->stride(i), " of dimension ", i, kCopyHint);
    elements *= a->shape[i];
  }
  return elements * a.element_bytes();
}

// Packs or unpacks a list of arrays. `fills` has eight bytes for each array. `num_tokens` is the length of a padded
// row. `capacity` is the length of the new packed arrays.
RLK_FUNCTION(pack, (), nb::list arrays, nb::handle cu_seqlens, nb::handle positions, bool unpacks, bool covered,
             std::int64_t num_tokens, std::int64_t capacity, nb::list fills) {
  const std::size_t count = nb::len(arrays);
  require(count > 0, "tensors", "at least one array, got none");
  std::vector<std::string> names;
  for (std::size_t i = 0; i < count; ++i)
    names.push_back(count == 1 ? "tensors" : "tensors[" + std::to_string(i) + "]");
  std::vector<const Array*> in;
  for (std::size_t i = 0; i < count; ++i) in.push_back(&frame->read_any(arrays[i], names[i].c_str()));
  const Array& first = *in[0];
  check_counts(num_tokens, capacity, unpacks);
  require_given(cu_seqlens, "cu_seqlens");
  const OffsetsArgument offsets(frame, cu_seqlens);
  PackParams p;
  p.unpacks = unpacks;
  p.covered = covered;
  p.cu_seqlens = offsets.offsets;
  p.num_sequences = offsets.num_sequences;
  p.num_tokens = num_tokens;
  p.capacity = unpacks && first->ndim > 0 ? first->shape[0] : capacity;
  if (const Array* const where = frame->optional(positions, "positions", kInt32)) {
    const std::int64_t shape[] = {p.num_sequences, num_tokens};
    require_shape(std::ranges::equal(where->shape(), shape) && where->view().is_contiguous(), *where,
                  "a contiguous array of shape ", Shape(shape));
    p.positions = where->view().num_elements() == 0 ? nullptr : where->data<std::int32_t>();
  }
  const Results results("pack", frame);
  nb::list out;
  std::vector<PackArray> parts;
  for (std::size_t i = 0; i < count; ++i) {
    const Array& a = *in[i];
    const int dims = unpacks ? 1 : 2;  // those of tokens
    if (unpacks ? a->ndim < 1 || a->shape[0] != p.capacity
                : a->ndim < 2 || a->shape[0] != p.num_sequences || a->shape[1] != num_tokens) {
      const std::string tokens =
          unpacks ? (i == 0 ? "num_tokens" : word(p.capacity)) : words(p.num_sequences, ", ", num_tokens);
      require_shape(false, a, "shape [", tokens, ", ...]");
    }
    PackArray part;
    part.token_bytes = token_bytes(a, dims);
    (unpacks ? part.packed : part.padded) = a->data;
    const auto stride = [&](int dim) { return a->stride(dim) * a.element_bytes(); };
    part.packed_stride = unpacks ? stride(0) : part.token_bytes;
    part.sequence_stride = unpacks ? num_tokens * part.token_bytes : stride(0);
    part.token_stride = unpacks ? part.token_bytes : stride(1);
    Sizes shape = unpacks ? Sizes{p.num_sequences, num_tokens} : Sizes{capacity};
    shape.insert(shape.end(), a.shape().begin() + dims, a.shape().end());
    part.fill = nb::cast<std::uint64_t>(fills[i]);
    require(shape.size() <= 8, a, "at most 7 dimensions, got 8");
    Caller::Fresh fresh = results.caller().empty_like(shape, a);
    (unpacks ? part.padded : part.packed) = fresh.data;
    parts.push_back(part);
    out.append(fresh.array);
  }
  for (std::size_t i = 0; i < count; i += kPackArrays) {
    p.num_arrays = static_cast<std::int32_t>(std::min<std::size_t>(kPackArrays, count - i));
    std::copy_n(parts.begin() + static_cast<std::ptrdiff_t>(i), p.num_arrays, p.arrays);
    results.call(rlk::pack, p);
  }
  return out;
}

}  // namespace
}  // namespace rlk::bindings
