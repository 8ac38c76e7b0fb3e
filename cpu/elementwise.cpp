// CPU backend of elementwise operators: checks a call and spreads rows, or parts of rows, over threads.
#include <algorithm>

#include "elementwise_simd.h"
#include "float_environment.h"
#include "kernels/rows/elementwise_check.h"
#include "kernels/rows/elementwise_formulas.h"
#include "note_isa.h"
#include "rlk/backends.h"
#include "rows.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

// Sets at[k] to the address of column `first` of row `row` in array k. If array k is null, at[k] is null.
template <class Params, class List, class Byte>
void point(const Params& p, List arrays, std::int64_t row, std::int64_t first, Byte** at) {
  for_each(arrays, [&](auto array, int k) {
    Byte* begin = row_at(p.*array.kData, p.*array.kRows, row, p.dtype);
    at[k] = begin == nullptr ? begin : begin + first * size_of(p.dtype);
  });
}

template <int kForms, class Params>
void run(const Params& p, const ElementwiseLanes<Params>& lanes) {
  check_elementwise<kForms>(p);
  if (!writes(p)) return;
  note_isa();
  const std::int64_t pieces = (p.columns + kTaskElements - 1) / kTaskElements;  // tasks per row
  parallel_for(p.num_rows * pieces, pieces > 1 ? 1 : rows_of_a_task(p.columns),
               [&](std::int64_t begin, std::int64_t end) {
                 const FloatEnvironment environment;
                 const unsigned char* in[kInputs<Params>];
                 unsigned char* out[kOutputs<Params>];
                 for (std::int64_t i = begin; i < end; ++i) {
                   const std::int64_t first = i % pieces * kTaskElements;
                   point(p, typename Elementwise<Params>::Inputs{}, i / pieces, first, in);
                   point(p, typename Elementwise<Params>::Outputs{}, i / pieces, first, out);
                   lanes.columns(p, in, out, std::min(kTaskElements, p.columns - first));
                 }
               });
}

}  // namespace

#define RLK_ELEMENTWISE(operator, function, Params, forms) \
  void function(const Params& p) { run<forms>(p, RLK_CPU_LANES_IN_USE(function##_columns)); }
#include "rlk/elementwise.inc"

}  // namespace rlk::cpu
