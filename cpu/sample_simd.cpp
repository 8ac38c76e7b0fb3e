// The computation of a row of the operator `sample`. CMake compiles this file once per instruction set. The functions
// of kernels/ expect a team of threads for each row. Here a team is one thread, and its vector lanes compute the chains
// of a leaf.
#include "sample_simd.h"

#include "kernels/sample/kept.h"
#include "kernels/sample/merge.h"
#include "kernels/sample/process_logits.h"
#include "kernels/sample/round.h"
#include "kernels/sample/shard.h"
#include "kernels/sample/top.h"
#include "kernels/sample/tree.h"
#include "rlk/math/half.h"
#include "rlk/math/mufu_model.h"
#include "simd.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

struct Fp32 {
  using Storage = float;
  static RLK_HD float load(Storage s) { return s; }
};
struct Bf16 {
  using Storage = std::uint16_t;
  static RLK_HD float load(Storage s) { return float_of_bf16(s); }
};
struct Fp16 {
  using Storage = std::uint16_t;
  static RLK_HD float load(Storage s) { return float_of_f16(s); }
};

struct Alone {
  using Memory = PlainMemory;
  static constexpr int kLanes = 1, kAhead = 1;
  static constexpr bool kSearchesByZ = true, kEdits = false;
  static constexpr int thread() { return 0; }
  static constexpr int threads() { return 1; }
  static void barrier() {}
  static float shuffle_xor(float x, int) { return x; }
  static std::int32_t shuffle_xor(std::int32_t x, int) { return x; }
  template <class N>
  static void add(N* to, N x) {
    *to += x;
  }
  static std::uint32_t take(std::uint32_t* counter) { return (*counter)++; }
  static void count(std::uint32_t* word) { ++*word; }
  static void set_bits(std::uint32_t* word, std::uint32_t bits) { *word |= bits; }
  template <Exp kExp>
  static RLK_HD float exponential(float z, float c, float m) {
    if constexpr (kExp == Exp::kPortable) return stat_exp_portable(z, c, rlk::sub_rn(kStatsShift, m));
    return mufu_ex2_sm90_bounded(rlk::fma_rn(z, c, -m));
  }
  template <class P>
  static P* global(P* pointer) {
    return pointer;
  }
  template <class N>
  static N own(N x) {
    return x;
  }
};

// Calls fn(T(), mode) for the dtype and the exponential of the params.
template <Exp kExp>
using Mode = std::integral_constant<Exp, kExp>;
template <class F>
void by_type(DType dtype, F fn) {
  dtype == DType::kFloat32 ? fn(Fp32()) : dtype == DType::kBFloat16 ? fn(Bf16()) : fn(Fp16());
}
template <class F>
void by_type_and_mode(const SampleParams& p, F fn) {
  by_type(p.dtype, [&](auto type) {
    p.exp == Exp::kHardware ? fn(type, Mode<Exp::kHardware>()) : fn(type, Mode<Exp::kPortable>());
  });
}

void process(const ProcessLogitsParams& p, std::int64_t row) {
  by_type(p.dtype, [&](auto type) { process_row<Alone, decltype(type)>(Alone(), p, row); });
}
void row(const SampleParams& p, std::int64_t row, std::uint32_t* mask, float* nodes, std::int64_t* count) {
  SampleShared shared;
  by_type_and_mode(p, [&](auto type, auto mode) {
    using T = decltype(type);
    SampleState state;
    std::uint64_t firsts[1];
    RowSelection<Alone, T, mode()> selection(Alone(), p, row, &shared, mask, &state, firsts);
    selection.run_first();
    selection.run_truncate();
    RowTree<Alone, T, mode()> tree(Alone(), p, row, &shared, mask, &state, nodes);
    tree.run_tree();
    tree.run_draw(count);
    if (p.top_ids != nullptr) {
      RowTop<Alone, T, false>(Alone(), p, row, &shared, mask, &state, firsts, nodes).run();
    }
  });
}
void raw(const SampleParams& p, std::int64_t row, float* nodes) {
  SampleShared shared;
  by_type_and_mode(p, [&](auto type, auto mode) {
    SampleState state;
    using T = decltype(type);
    RowTree<Alone, T, mode()>(Alone(), p, row, &shared, nullptr, &state, nodes).run_raw();
    std::uint64_t firsts[1];
    if (p.top_ids != nullptr) {
      RowTop<Alone, T, true>(Alone(), p, row, &shared, nullptr, &state, firsts, nodes).run();
    }
  });
}
void partial(const SamplePartialParams& p, std::int64_t row, std::uint32_t* mask, float* nodes, std::int64_t* count,
             std::uint64_t* sorted) {
  SampleShared shared;
  by_type_and_mode(p, [&](auto type, auto mode) {
    using T = decltype(type);
    SampleState state;
    std::uint64_t firsts[1];
    if (p.round == 0) {
      RowOfShard<Alone, T>(Alone(), p, row, &shared, mask, &state, firsts).run();
    } else if (p.round == kRounds) {
      RowOfCut<Alone, mode()>(Alone(), p, row, &shared, mask, &state, firsts).run();
    } else {
      RowOfRound<Alone, T, mode()>(Alone(), p, row, &shared, mask, &state, firsts, sorted).run();
      return;
    }
    TreeOfShard<Alone, T, mode()> tree(Alone(), p, row, &shared, mask, &state, nodes);
    tree.run_tree(count);
    tree.run_draw();
  });
}
void partial_raw(const SamplePartialParams& p, std::int64_t row, float* nodes) {
  SampleShared shared;
  by_type_and_mode(p, [&](auto type, auto mode) {
    SampleState state;
    TreeOfShard<Alone, decltype(type), mode()>(Alone(), p, row, &shared, nullptr, &state, nodes).run_raw();
  });
}
void merge(const SampleMergeParams& p, std::int64_t row, std::uint32_t* mask, float* nodes, std::int64_t* count) {
  SampleShared shared;
  by_type_and_mode(p, [&](auto, auto mode) {
    SampleState state;
    std::uint64_t firsts[kMostCandidates];
    RowOfMerge<Alone, mode()>(Alone(), p, row, &shared, mask, &state, firsts).run(count);
    TreeOfMerge<Alone, mode()>(Alone(), p, row, &shared, mask, &state, firsts, nodes).run(count);
  });
}
void offsets(const SampleParams& p, std::int64_t first, std::int64_t rows, std::uint32_t* closed) {
  SampleShared shared;
  offsets_of_counts(Alone(), p, first, rows, closed, &shared);
}
void kept(const SampleParams& p, std::int64_t row, const std::uint32_t* mask) {
  SampleShared shared;
  write_kept_ids(Alone(), p, row, mask, &shared);
}

}  // namespace

const SampleLanes sample_simd = {process, row, raw, offsets, partial, partial_raw, merge, kept};

}  // namespace rlk::cpu::RLK_CPU_ISA
