// Tests attention's tiles of every shape under the emulation. This includes tiles that only CUDA's kernels have and
// that no LDS would hold. The bits must be the CPU's.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "hip/attention/gpu.h"
#include "rlk/backends.h"
#include "rlk/ops/attention.h"

namespace attention_test {
namespace {

using rlk::AttentionGrid;
using rlk::AttentionTile;
using rlk::hip::AttentionGpu;
namespace emulation = rlk::hip::emulation;
using Memory = std::vector<unsigned char>;

void expect_same(const Memory& got, const Memory& want, const Case& c, const char* what) {
  const auto bytes = static_cast<std::size_t>(rlk::size_of(c.dtype));
  for (std::size_t i = 0; i < want.size() / bytes; ++i) {
    const std::uint32_t a = linear_test::load_pattern(got.data(), c.dtype, static_cast<std::int64_t>(i));
    const std::uint32_t b = linear_test::load_pattern(want.data(), c.dtype, static_cast<std::int64_t>(i));
    ASSERT_EQ(a, b) << what << ", element " << i << " of " << want.size() / bytes << ": " << c.text();
  }
}

template <class F>
void launch(std::int64_t blocks, int lds_bytes, emulation::Order order, const F& kernel) {
  emulation::Launch how;
  how.blocks_x = static_cast<int>(blocks);
  how.threads = rlk::kAttentionThreads;
  how.lds_bytes = static_cast<std::size_t>(lds_bytes);
  how.order = order;
  emulation::launch(how, kernel);
}

template <class Pass, class Params>
void run_pass(const Params& p, const AttentionGrid& g, int rows, int lds_bytes, emulation::Order order) {
  launch(rlk::attention_blocks(p, g), lds_bytes, order, [&] {
    Pass pass(p, g, rlk::hip::lds());
    const rlk::AttentionPlace place(p, g, rlk::hip::block_id_x(), rows);
    for (std::int64_t begin = place.first; begin < place.last;) begin = pass.run(place, begin);
  });
}

template <class T, class Tile>
void check_forward(const Problem& problem, emulation::Order order) {
  const Case& c = problem.what();
  const auto size = static_cast<std::size_t>(problem.q_places());
  Memory out(size * c.values() * rlk::size_of(c.dtype), 0x5a), want = out;
  std::vector<float> lse(size, 1.0f), want_lse = lse;
  AttentionParams p{problem.input};
  p.out = want.data();
  p.lse = want_lse.data();
  rlk::cpu::attention(p);
  p.out = out.data();
  p.lse = lse.data();
  const bool vectors = c.shift == 0;
  run_pass<rlk::AttentionForward<AttentionGpu, T, Tile>>(p, rlk::attention_query_grid(p, Tile::kRows, vectors),
                                                         Tile::kRows, rlk::AttentionForwardShared<Tile>::kBytes, order);
  expect_same(out, want, c, "out");
  EXPECT_EQ(0, std::memcmp(lse.data(), want_lse.data(), size * 4)) << c.text();
}

template <class T, class Tile>
void check_backward(Problem& problem, emulation::Order order) {
  const Case& c = problem.what();
  const auto rows = static_cast<std::size_t>(problem.q_places());
  const auto bytes = static_cast<std::size_t>(c.head_dim * rlk::size_of(c.dtype));
  const auto value_bytes = static_cast<std::size_t>(c.values() * rlk::size_of(c.dtype));
  AttentionParams forward{problem.input};
  Memory out(rows * value_bytes);
  std::vector<float> lse(rows), workspace(rows), dlse(rows, 0.25f);
  forward.out = out.data();
  forward.lse = lse.data();
  rlk::cpu::attention(forward);
  AttentionBackwardParams p{problem.input};
  p.dout = problem.like_out();
  p.out = {out.data(), problem.input.q_tokens * c.q_heads * c.values(), c.q_heads * c.values(), c.values()};
  p.lse = lse.data();
  p.dlse = dlse.data();
  p.workspace = workspace.data();
  const auto keys = static_cast<std::size_t>(problem.k_places());
  Memory dq(rows * bytes, 0x5a), dk(keys * bytes, 0x5a), dv(keys * value_bytes, 0x5a);
  Memory want_dq = dq, want_dk = dk, want_dv = dv;
  const auto point = [&](Memory& q, Memory& k, Memory& v) {
    p.dq = q.data();
    p.dk = k.data();
    p.dv = v.data();
  };
  point(want_dq, want_dk, want_dv);
  rlk::cpu::attention_backward(p);
  point(dq, dk, dv);
  workspace.assign(rows, 0.0f);
  const bool vectors = c.shift == 0;
  launch(2, 0, order,
         [&] { rlk::attention_delta<AttentionGpu, T>(p, static_cast<std::int64_t>(rows), rlk::hip::block_id_x(), 2); });
  constexpr int kBytes = rlk::AttentionBackwardShared<Tile>::kBytes;
  run_pass<rlk::AttentionQueryGradient<AttentionGpu, T, Tile>>(p, rlk::attention_query_grid(p, Tile::kRows, vectors),
                                                               Tile::kRows, kBytes, order);
  run_pass<rlk::AttentionKeyGradient<AttentionGpu, T, Tile>>(p, rlk::attention_key_grid(p, Tile::kRows, vectors),
                                                             Tile::kRows, kBytes, order);
  expect_same(dq, want_dq, c, "dq");
  expect_same(dk, want_dk, c, "dk");
  expect_same(dv, want_dv, c, "dv");
}

// Full and short tiles of columns and rows, several sequences in a tile, unseen keys at the diagonal, a window, special
// values.
std::vector<Case> cases(std::int64_t widest) {
  std::vector<Case> found;
  for (const std::int64_t head_dim : {widest, widest - 24}) {
    Case c{{{5, 9}, {70, 140}, {1, 30}}};
    c.q_heads = 2;
    c.kv_heads = 1;
    c.head_dim = head_dim;
    found.push_back(c);
    c.q_form = c.k_form = Form::kPadded;
    c.data = Data::kSpecial;
    c.shift = head_dim == widest ? 0 : 2;
    found.push_back(c);
  }
  Case c{{{150, 150}}};
  c.q_heads = 1;
  c.head_dim = widest;
  c.value_dim = widest - 40;
  c.window = 40;
  found.push_back(c);
  c.lengths = {{3, 150}, {5, 140}, {2, 60}};
  c.groups = {{2, 133}};  // a prefix that ends inside a page
  c.window = 0;
  c.k_form = Form::kPaged;
  found.push_back(c);
  return found;
}

template <class Tile>
void check_tile(bool backward) {
  unsigned seed = 1;
  for (Case c : cases(Tile::kColumns)) {
    c.dtype = c.shift != 0 || seed % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
    c.seed = ++seed;
    if (backward && c.k_form == Form::kPaged) continue;
    Problem problem(c);
    const auto order = seed % 3 == 0   ? emulation::Order::kForward
                       : seed % 3 == 1 ? emulation::Order::kBackward
                                       : emulation::Order::kShuffled;
    const auto check = [&](auto t) {
      using T = decltype(t);
      backward ? check_backward<T, Tile>(problem, order) : check_forward<T, Tile>(problem, order);
    };
    c.dtype == DType::kBFloat16 ? check(rlk::hip::Bf16{}) : check(rlk::hip::Fp32{});
  }
}

TEST(AttentionTiles, FourRowsAThread) {
  check_tile<AttentionTile<4, 64, 32>>(false);
  check_tile<AttentionTile<4, 128, 16>>(false);
}
TEST(AttentionTiles, TwoRowsAThread) { check_tile<AttentionTile<2, 256, 16>>(false); }
TEST(AttentionTiles, OneRowAThread) {
  check_tile<AttentionTile<1, 128, 16>>(false);
  check_tile<AttentionTile<1, 256, 16>>(false);
}
TEST(AttentionTiles, GradientsFourRowsAThread) {
  check_tile<AttentionTile<4, 64, 32>>(true);
  check_tile<AttentionTile<4, 128, 32>>(true);
}
TEST(AttentionTiles, GradientsTwoRowsAThread) { check_tile<AttentionTile<2, 256, 32>>(true); }

}  // namespace
}  // namespace attention_test
