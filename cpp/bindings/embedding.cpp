// Python's entry to embedding.
#include "rlk/ops/embedding.h"

#include <algorithm>

#include "call.h"
#include "linear_args.h"

namespace rlk::bindings {
namespace {

std::int64_t read_size(nb::handle value, const char* name) {
  const std::int64_t size = read_integer(value, name, "an integer");
  require(size >= 0, name, "an integer >= 0, got ", size);
  return size;
}

// Reads ids [...], with any shape whose dimensions collapse to two strides.
const Array& read_ids(Frame* frame, nb::handle object, Device device, EmbeddingTokens* to) {
  const Array& ids = frame->read(object, "ids", kIndices, device);
  const TensorView& v = ids.view();
  to->id_rows = read_layout(ids, v.ndim, "dimensions");
  to->ids = v.data;
  to->id_dtype = v.dtype;
  to->num_tokens = v.num_elements();
  require(to->num_tokens < std::int64_t{1} << 32, ids, "fewer than 2^32 ids, got ", to->num_tokens);
  return ids;
}

// Reads the vocabulary of a table of num_rows rows. It returns padding_idx, or -1 for None.
std::int64_t read_vocabulary(nb::handle vocab_start, nb::handle vocab_size, nb::handle padding_idx, const char* table,
                             EmbeddingTokens* to) {
  require(to->num_rows < INT32_MAX, table, "fewer than 2^31 - 1 rows, got ", to->num_rows);
  const std::int64_t start = to->vocab_start = read_size(vocab_start, "vocab_start");
  require(start <= INT64_MAX - to->num_rows, "vocab_start", "vocab_start + rows in 64 bits, got ", start);
  const std::int64_t size = vocab_size.is_none() ? start + to->num_rows : read_size(vocab_size, "vocab_size");
  require(start <= size, "vocab_start", "an id in [0, ", size, "] (vocab_size), got ", start);
  to->vocab_size = size;
  if (padding_idx.is_none()) return -1;
  const std::int64_t id = read_integer(padding_idx, "padding_idx", "an integer or None");
  require(id >= 0 && id < size, "padding_idx", "None or an id in [0, ", size, ") (vocab_size), got ", id);
  return id;
}

nb::object forward(Frame* frame, nb::handle ids, nb::handle weight, nb::handle vocab_start, nb::handle vocab_size,
                   nb::handle padding_idx) {
  const RowsArgument table(frame, weight, "weight");
  const TensorView& w = table.view();
  require_shape(w.ndim == 2, table.array, "shape [rows, columns]");
  require_columns_below(table, 31);
  EmbeddingParams p;
  const Array& tokens = read_ids(frame, ids, w.device, &p);
  p.num_rows = table.num_rows;
  p.columns = table.columns;
  read_vocabulary(vocab_start, vocab_size, padding_idx, "weight", &p);
  p.weight = w.data;
  p.weight_stride = w.stride(0);
  p.dtype = w.dtype;
  p.y_stride = p.columns;
  return Results("embedding", table.array, frame)
      .add(&p.y, shape_with(tokens.shape(), p.columns), p.dtype)
      .run(rlk::embedding, p);
}

// Returns dweight, or main_grad, which is accumulated in place.
nb::object backward(Frame* frame, nb::handle dy, nb::handle ids, nb::handle num_rows, nb::handle vocab_start,
                    nb::handle vocab_size, nb::handle padding_idx, nb::handle main_grad, int dweight_dtype) {
  const RowsArgument g(frame, dy, "dy");
  require_columns_below(g, 31);
  const Device device = g.view().device;
  EmbeddingBackwardParams p;
  const Array& tokens = read_ids(frame, ids, device, &p);
  require_shape(std::ranges::equal(tokens.shape(), g.leading()), tokens, "shape ", g.leading(),
                " (the leading dimensions of dy)");
  p.num_rows = read_size(num_rows, "num_rows");
  p.columns = g.columns;
  p.padding_idx = read_vocabulary(vocab_start, vocab_size, padding_idx, "num_rows", &p);
  g.put(&p.dy, &p.dy_rows);
  p.dtype = g.view().dtype;
  p.dweight_dtype = main_grad.is_none() ? read_dtype(dweight_dtype, p.dtype) : DType::kFloat32;
  check_gradient_dtype("dweight_dtype", p.dweight_dtype, p.dtype);
  Results results("embedding", g.array, frame);
  if (main_grad.is_none()) {
    p.dweight_stride = p.columns;
    results.add(&p.dweight, {p.num_rows, p.columns}, p.dweight_dtype);
  } else {
    const Array& given = frame->read(main_grad, "main_grad", kFloat32);
    p.dweight_stride = check_output(given, p.num_rows, p.columns, device, "num_rows, columns of dy");
    check_apart(given, g.array);
    check_apart(given, tokens);
    p.dweight = given.view().data;
    p.accumulate = true;
    results.add(main_grad);
  }
  return results.run(rlk::embedding_backward, &p, embedding_backward_workspace_bytes, p.accumulate);
}

const Functions kFunctions([](nb::module_& m) {
  define(m, "embedding", &forward);
  define_eager<&forward, 2>(m, "embedding_eager");
  define(m, "embedding_backward", &backward);
});

}  // namespace
}  // namespace rlk::bindings
