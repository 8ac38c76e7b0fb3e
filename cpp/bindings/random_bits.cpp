// Python's entry to random words: fields move from checked arguments to the contract's params, the output comes from the
// caller.
#include "rlk/ops/random_bits.h"

#include <string>

#include "define.h"
#include "gil.h"
#include "module.h"
#include "row_integers.h"

namespace rlk::bindings {
namespace {

nb::object words(nb::handle sample_id, nb::handle seed, nb::handle position, std::int64_t num_words,
                 std::int64_t random_stream, nb::handle allocate, std::uintptr_t stream) {
  if (!is_array(sample_id)) argument_error("sample_id", "expected an array that speaks DLPack, got a number");
  const RowIntegersArgument ids(sample_id, "sample_id", -1, nullptr);
  const TensorView& v = ids.array()->view();
  require_backend("random_bits", v.device);
  const RowIntegersArgument seeds(seed, "seed", v.shape[0], &v.device);
  const RowIntegersArgument positions(position, "position", v.shape[0], &v.device);
  RandomBitsParams p;
  p.sample_id = ids.rows();
  p.seed = seeds.rows();
  p.position = positions.rows();
  p.num_rows = v.shape[0];
  p.num_words = static_cast<std::int32_t>(num_words);  // Python checked both
  p.random_stream = static_cast<std::int32_t>(random_stream);
  const Caller caller = make_caller(sample_id, v.device, allocate, stream);
  const std::int64_t shape[] = {p.num_rows, num_words};
  const Caller::Fresh out = caller.empty(shape, DType::kInt64);
  p.bits = static_cast<std::int64_t*>(out.data);
  {
    const ReleasedGil released;
    rlk::random_bits(p, v.device, caller.stream);
  }
  return out.array;
}

}  // namespace

void bind_random_bits(nb::module_& m) { define(m, "random_bits", &words); }

}  // namespace rlk::bindings
