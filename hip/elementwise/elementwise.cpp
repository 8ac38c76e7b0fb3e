// The host side of elementwise operators on HIP checks memory safety, and chooses and launches the kernel of a call.
#include <string>

#include "hip/common/launch.h"
#include "kernels/rows/elementwise_check.h"
#include "kernels/rows/elementwise_formulas.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {
namespace {

template <int kForms, class Params>
void run(const char* function, const Params& p, int device, Stream stream) {
  check_elementwise<kForms>(p);
  if (!writes(p)) return;
  bool vectors = p.columns % kVec8 == 0;
  const auto look = [&](auto array, int) { vectors = vectors && has_vectors(p.*array.kData, p.*array.kRows, p.dtype); };
  for_each(typename Elementwise<Params>::Inputs{}, look);
  for_each(typename Elementwise<Params>::Outputs{}, look);
  const std::string name = std::string("rlk_elementwise_") + function + "_" + std::to_string(form_of(p)) +
                           (vectors ? "_vectors" : "_elements") + type_suffix(p.dtype);
  const RowSplit split = vectors ? split_rows(p.columns / kVec8, kElementwiseVec8s, kLog2Elementwise)
                                 : split_rows(p.columns, kElementwiseElements, kLog2Elementwise);
  const std::int64_t blocks = blocks_of(split, p.num_rows);
  RLK_CHECK(blocks < std::int64_t{1} << 31, std::string(Elementwise<Params>::kName) + ": not too many rows");
  launch_blocks(device, stream, {kElementwiseThreads, 0}, name, blocks, p, split);
}

}  // namespace

#define RLK_ELEMENTWISE(operator, function, Params, forms) \
  void function(const Params& p, int device, Stream stream) { run<forms>(#function, p, device, stream); }
#include "rlk/elementwise.inc"

}  // namespace rlk::hip
