// Python's entry to random words.
#include "rlk/ops/random_bits.h"

#include "call.h"
#include "row_integers.h"

namespace rlk::bindings {
namespace {

nb::object words(nb::handle sample_id, nb::handle seed, nb::handle position, std::int64_t num_words,
                 std::int64_t random_stream, nb::handle allocate, std::uintptr_t stream) {
  if (!is_array(sample_id)) argument_error("sample_id", "expected an array that speaks DLPack, got a number");
  const RowIntegersArgument ids(sample_id, "sample_id", -1, nullptr);
  const TensorView& v = ids.array()->view();
  const RowIntegersArgument seeds(seed, "seed", v.shape[0], &v.device);
  const RowIntegersArgument positions(position, "position", v.shape[0], &v.device);
  RandomBitsParams p;
  p.sample_id = ids.rows();
  p.seed = seeds.rows();
  p.position = positions.rows();
  p.num_rows = v.shape[0];
  p.num_words = static_cast<std::int32_t>(num_words);  // Python checked both
  p.random_stream = static_cast<std::int32_t>(random_stream);
  return Results("random_bits", sample_id, v.device, allocate, stream)
      .add(&p.bits, {p.num_rows, num_words})
      .run(rlk::random_bits, p);
}

const Functions kFunctions([](nb::module_& m) { define(m, "random_bits", &words); });

}  // namespace
}  // namespace rlk::bindings
