// Python's entry to random words.
#include "rlk/ops/random_bits.h"

#include "call.h"
#include "row_array.h"

namespace rlk::bindings {
namespace {

nb::object words(Frame* frame, nb::handle sample_id, nb::handle seed, nb::handle position, std::int64_t num_words,
                 std::int64_t random_stream) {
  require(is_array(sample_id), "sample_id", "an array that speaks DLPack, got a number");
  const VectorArgument ids(frame, sample_id, "sample_id", kIndices, "num_rows");
  const RowArgument seeds(frame, seed, "seed", kIndices, ids.size(), ids.device());
  const RowArgument positions(frame, position, "position", kIndices, ids.size(), ids.device());
  RandomBitsParams p;
  p.sample_id = ids.integers();
  p.seed = seeds.integers();
  p.position = positions.integers();
  p.num_rows = ids.size();
  p.num_words = static_cast<std::int32_t>(num_words);  // Python has checked both
  p.random_stream = static_cast<std::int32_t>(random_stream);
  return Results("random_bits", *ids.array(), frame).add(&p.bits, {p.num_rows, num_words}).run(rlk::random_bits, p);
}

const Functions kFunctions([](nb::module_& m) { define(m, "random_bits", &words); });

}  // namespace
}  // namespace rlk::bindings
