// Every kernel that can serve a call of attention has the CPU's bits, forward and backward. The test runs all plans
// with both exponentials, as built for sm_90 and as PTX for sm_80. Lists that contradict the arrays must not touch
// other memory.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <utility>

#include "attention_cases.h"
#include "cuda/attention/kernels.h"
#include "plan_memory.h"
#include "rlk/backends.h"
#include "rlk/ops/attention.h"

namespace rlk::cuda {
namespace {

using attention_test::Case;
using attention_test::Data;
using attention_test::Form;
using attention_test::Layout;
using attention_test::Problem;
using Memory = std::vector<unsigned char>;

// A device's copy of host arrays, looked up by the host's addresses.
class Mirror {
 public:
  template <class T>
  const T* operator()(const T* host, std::size_t bytes) {
    if (host == nullptr) return nullptr;
    // The copy has the same address modulo 16 as `host`, so that an unaligned array stays unaligned.
    const std::size_t shift = reinterpret_cast<std::uintptr_t>(host) % 16;
    Memory copy(bytes + shift);
    std::memcpy(copy.data() + shift, host, bytes);
    arrays_.push_back(std::make_unique<OnDevice>(copy));
    return reinterpret_cast<const T*>(static_cast<unsigned char*>(arrays_.back()->data) + shift);
  }

 private:
  std::vector<std::unique_ptr<OnDevice>> arrays_;
};

// Bytes from an array's first element to the last byte that a call may read.
std::size_t extent(const Problem& problem, const AttentionHeads& a) {
  const auto* begin = static_cast<const unsigned char*>(a.data);
  for (const auto& memory : problem.memories()) {
    if (begin >= memory.data() && begin < memory.data() + memory.size()) {
      return static_cast<std::size_t>(memory.data() + memory.size() - begin);
    }
  }
  return 0;
}

AttentionInput on_device(const Problem& problem, Mirror* mirror) {
  AttentionInput p = problem.input;
  for (AttentionHeads* a : {&p.q, &p.k, &p.v}) {
    a->data = (*mirror)(static_cast<const unsigned char*>(a->data), extent(problem, *a));
  }
  const auto list = [&](const std::int32_t*& x, std::int64_t count) {
    x = (*mirror)(x, static_cast<std::size_t>(count) * 4);
  };
  list(p.cu_seqlens_q, p.num_sequences + 1);
  list(p.cu_seqlens_k, p.num_sequences + 1);
  list(p.seqused_q, p.num_sequences);
  list(p.seqused_k, p.num_sequences);
  list(p.leftpad_k, p.num_sequences);
  list(p.block_table, p.num_sequences * p.table_stride);
  list(p.prefix_table, p.num_groups * p.prefix_stride);
  list(p.prefix_lens, p.num_groups);
  list(p.group_offsets, p.num_groups + 1);
  list(p.parents, p.num_sequences);
  if (p.parents != nullptr) p.cu_seqlens_k = p.cu_seqlens_q;
  p.sinks = (*mirror)(p.sinks, static_cast<std::size_t>(p.num_q_heads) * 4);
  return p;
}

// Replaces canonical NaNs in two-byte elements of `memory` by the wanted elements.
void take_nan(const Memory& wanted, Memory* memory) {
  for (std::size_t i = 0; i + 1 < memory->size(); i += 2) {
    if ((*memory)[i] != 0xff || (*memory)[i + 1] != 0x7f) continue;
    (*memory)[i] = wanted[i];
    (*memory)[i + 1] = wanted[i + 1];
  }
}

void run_case(const Case& c) {
  Problem problem(c);
  const std::size_t bytes = static_cast<std::size_t>(size_of(c.dtype));
  const auto size = [&](std::int64_t places, std::int64_t columns) {
    return static_cast<std::size_t>(places * columns) * bytes + 16;  // with a canary behind the array
  };
  const Memory clean_q(size(problem.q_places(), c.head_dim), kCanary),
      clean_out(size(problem.q_places(), c.values()), kCanary);
  const Memory clean_k(size(problem.k_places(), c.head_dim), kCanary),
      clean_v(size(problem.k_places(), c.values()), kCanary);
  const std::size_t rows = static_cast<std::size_t>(problem.q_places()) * 4;
  Memory out = clean_out, lse(rows + 16, kCanary), dq = clean_q, dk = clean_k, dv = clean_v;
  const Memory clean_rows = lse;
  AttentionParams p{problem.input};
  p.arithmetic = Arithmetic::kSm90;
  p.out = out.data();
  p.lse = reinterpret_cast<float*>(lse.data());
  cpu::attention(p);

  Mirror mirror;
  const AttentionInput device = on_device(problem, &mirror);
  for (const AttentionPlan& plan : kAttentionPlans) {
    for (const int arch : {90, 80}) {
      const OnDevice out_got(clean_out), lse_got(clean_rows);
      AttentionParams got{device};
      got.out = out_got.data;
      got.lse = static_cast<float*>(lse_got.data);
      if (!fits_plan(got, plan, arch)) continue;
      const OnDevice workspace(Memory(static_cast<std::size_t>(workspace_bytes_of(got, plan)) + 16, kCanary));
      got.workspace = workspace.data;
      if (got.parents != nullptr) {
        arch == 90 ? sm90::attention_tree(got, plan, nullptr) : sm80::attention_tree(got, plan, nullptr);
      } else {
        arch == 90 ? sm90::attention(got, plan, nullptr) : sm80::attention(got, plan, nullptr);
      }
      check(cudaDeviceSynchronize(), "attention");
      const std::string what = c.text() + ", " + name_of(plan) + ", sm_" + std::to_string(arch);
      expect(out_got.host(), out, what + ", out");
      expect(lse_got.host(), lse, what + ", lse");
    }
  }
  if (c.k_form == Form::kPaged) return;

  AttentionBackwardParams b{problem.input};
  b.arithmetic = Arithmetic::kSm90;
  b.dout = problem.like_out();
  b.out = {out.data(), problem.input.q_tokens * c.q_heads * c.values(), c.q_heads * c.values(), c.values()};
  std::vector<float> dlse(static_cast<std::size_t>(problem.q_places()) + 1), workspace = dlse;
  for (std::size_t i = 0; i < dlse.size(); ++i) dlse[i] = static_cast<float>(static_cast<int>(i * 37 % 11) - 5) / 8;
  b.lse = p.lse;
  if (c.dlse) b.dlse = dlse.data();
  b.workspace = workspace.data();
  b.dq = dq.data();
  b.dk = dk.data();
  b.dv = dv.data();
  Memory dsinks(static_cast<std::size_t>(c.q_heads) * 4 + 16, kCanary);
  const Memory clean_sinks = dsinks;
  if (c.sinks) b.dsinks = reinterpret_cast<float*>(dsinks.data());
  cpu::attention_backward(b);
  const auto compare = [&](GradientKernel kernel, int arch, bool of_queries = true, bool of_keys = true) {
    const OnDevice dq_got(clean_q), dk_got(clean_k), dv_got(clean_v);
    AttentionBackwardParams got{device};
    got.dout = b.dout;
    got.dout.data = mirror(static_cast<const unsigned char*>(b.dout.data), extent(problem, b.dout));
    got.out = b.out;
    got.out.data = mirror(out.data(), out.size());
    got.lse = mirror(p.lse, rows);
    got.dlse = mirror(b.dlse, rows);
    if (of_queries) got.dq = dq_got.data;
    if (of_keys) got.dk = dk_got.data, got.dv = dv_got.data;
    const OnDevice dsinks_got(clean_sinks);
    if (c.sinks) got.dsinks = static_cast<float*>(dsinks_got.data);
    if (!fits_plan(got, kernel, arch)) return;
    const OnDevice workspace_got(Memory(static_cast<std::size_t>(workspace_bytes_of(got, kernel)) + 16, kCanary));
    got.workspace = workspace_got.data;
    if (got.parents != nullptr) {
      arch == 90 ? sm90::attention_tree_backward(got, kernel, nullptr)
                 : sm80::attention_tree_backward(got, kernel, nullptr);
    } else {
      arch == 90 ? sm90::attention_backward(got, kernel, nullptr) : sm80::attention_backward(got, kernel, nullptr);
    }
    check(cudaDeviceSynchronize(), "attention_backward");
    const std::string what = c.text() + ", " + name_of(kernel) + ", sm_" + std::to_string(arch);
    const bool special = c.data == Data::kSpecial && c.dtype != DType::kFloat32;
    const auto same = [&](const OnDevice& found, const Memory& wanted, const char* gradient) {
      Memory memory = found.host();
      // An element that a matrix unit multiplies by 0 may be Inf or NaN, so the result differs between plans.
      if (special) take_nan(wanted, &memory);
      expect(memory, wanted, what + gradient);
    };
    expect(dsinks_got.host(), dsinks, what + ", dsinks");
    same(dq_got, of_queries ? dq : clean_q, ", dq");
    same(dk_got, of_keys ? dk : clean_k, ", dk");
    same(dv_got, of_keys ? dv : clean_v, ", dv");
  };
  for (const GradientKernel kernel : kGradientKernels) {
    compare(kernel, 90);
    if (c.peaks == 0) continue;
    compare(kernel, 90, true, false);
    compare(kernel, 90, false, true);
  }
  compare(GradientKernel::kPasses, 80);
}

// A shard runs every `shards`-th case, from case `shard` on.
void run_cases(unsigned shard, unsigned shards) {
  unsigned seed = 0;
  const auto run = [&](Case c) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      for (const Exp exp : {Exp::kHardware, Exp::kPortable}) {
        c.dtype = dtype;
        c.exp = exp;
        c.seed = ++seed;
        if (seed % shards == shard) run_case(c);
      }
    }
  };
  // Every tile of columns, whole and short, and every tile of rows.
  for (const std::int64_t head_dim : {8, 64, 72, 128, 136, 256}) {
    Case c{{{5, 9}, {70, 130}, {1, 300}}};
    c.q_heads = 6;
    c.kv_heads = 2;
    c.head_dim = head_dim;
    run(c);
    c.causal = false;
    run(c);
  }
  // Tiles of 64 queries and blocks of 128 keys, at positions that are no multiples of these sizes; also more queries
  // than keys.
  for (const std::int64_t head_dim : {64, 128}) {
    for (const Form form : {Form::kPacked, Form::kPadded, Form::kLeftPadded}) {
      Case c{{{300, 300}, {1, 1}, {130, 333}, {200, 150}, {64, 128}, {0, 5}, {5, 0}}};
      c.q_form = form == Form::kLeftPadded ? Form::kPacked : form;
      c.k_form = form;
      c.q_heads = 4;
      c.kv_heads = 2;
      c.head_dim = head_dim;
      run(c);
      c.window = 70;
      run(c);
      c.window = 0;
      c.causal = false;
      run(c);
    }
  }
  // Heads of more than 128 columns, whole and padded: blocks of 64 keys, splits, tokens not in use, windows.
  for (const auto& [head_dim, value_dim] : {std::pair{256, 256}, {192, 128}, {136, 136}, {200, 64}}) {
    for (const Form form : {Form::kPacked, Form::kPadded, Form::kPaged}) {
      Case c{{{150, 150}, {1, 1}, {70, 1190}, {100, 75}, {64, 128}, {0, 5}, {5, 0}}};
      c.q_form = form == Form::kPaged ? Form::kPadded : Form::kPacked;
      c.k_form = form;
      c.q_heads = 2;
      c.head_dim = head_dim;
      c.value_dim = value_dim;
      c.page_size = 16;
      run(c);
      c.window = 70;
      c.sinks = true;
      run(c);
      c.window = 0;
      c.causal = form == Form::kPaged;
      c.lengths = {{130, 140}, {66, 66}};
      run(c);
    }
  }
  // Heads of at most 128 columns that do not fill a tile of wgmma: every tile, and values of other widths. Slices have
  // NaN behind a token's last head, and their strides suit TMA. The arrays of the last run do not suit TMA.
  for (const auto& [head_dim, value_dim] :
       {std::pair{72, 72}, {80, 80}, {96, 96}, {104, 104}, {120, 120}, {40, 40}, {56, 8}, {96, 64}, {128, 64}}) {
    for (const Form form : {Form::kPacked, Form::kPadded, Form::kPaged}) {
      Case c{{{150, 150}, {1, 1}, {30, 1090}, {64, 128}, {0, 5}, {5, 0}}};
      c.q_form = form == Form::kPaged ? Form::kPadded : Form::kPacked;
      c.k_form = form;
      c.layout = form == Form::kPadded ? Layout::kHeadsFirst : Layout::kSlice;
      c.kv_heads = form == Form::kPacked ? 1 : 2;
      c.head_dim = head_dim;
      c.value_dim = value_dim;
      run(c);
      c.window = 70;
      c.sinks = true;
      c.lengths = {{130, 260}, {66, 66}};
      run(c);
      c.window = 0;
      c.causal = form == Form::kPaged;
      c.data = Data::kSpecial;
      run(c);
      c.data = Data::kNormal;
      c.shift = 4;
      run(c);
    }
  }
  // Every form and layout; slices are not aligned to vectors.
  for (const Form q_form : {Form::kPadded, Form::kLeftPadded, Form::kPacked}) {
    for (const Form k_form : {Form::kPadded, Form::kLeftPadded, Form::kPacked, Form::kPaged}) {
      for (const Layout layout : {Layout::kTokens, Layout::kHeadsFirst, Layout::kSlice}) {
        Case c{{{4, 7}, {2, 300}, {90, 90}}};
        if (q_form == Form::kLeftPadded) c.lengths = {{50, 40}, {50, 300}, {50, 50}};
        c.q_form = q_form;
        c.k_form = k_form;
        c.layout = layout;
        c.q_heads = 4;
        c.kv_heads = 2;
        c.head_dim = 40;
        c.page_size = 7;
        c.shift = layout == Layout::kSlice ? 4 : 0;
        run(c);
      }
    }
  }
  // Sinks, with every plan that supports them: splits, windows, rows that see nothing, special values.
  for (const std::int64_t head_dim : {64, 128, 256}) {
    Case c{{{1, 300}, {130, 150}, {3, 1100}, {80, 70}}};
    c.sinks = true;
    c.q_heads = 4;
    c.kv_heads = 2;
    c.head_dim = head_dim;
    run(c);
    c.q_form = c.k_form = Form::kPadded;
    c.softcap = 2.0f;
    c.window = 70;
    run(c);
    c.k_form = Form::kPaged;
    run(c);
    c.k_form = Form::kPadded;
    c.softcap = 0.0f;
    c.data = Data::kSpecial;
    run(c);
  }
  // Shared prefixes, with every plan that supports them: part of a page, whole pages, longer than a sequence, none.
  for (const std::int64_t head_dim : {64, 128, 256}) {
    for (const std::int64_t page_size : {7, 16, 128}) {
      Case c{{{1, 300}, {70, 290}, {3, 1100}, {2, 200}, {1, 90}}};
      c.groups = {{2, 261}, {1, 1040}, {1, 256}};
      c.q_heads = 4;
      c.kv_heads = 2;
      c.head_dim = head_dim;
      c.k_form = Form::kPaged;
      c.page_size = page_size;
      run(c);
    }
  }
  // Pages, for many and few queries: smaller than a block of keys, as large, larger.
  for (const std::int64_t head_dim : {64, 128}) {
    for (const std::int64_t page_size : {8, 16, 128, 256}) {
      Case c{{{300, 300}, {1, 700}, {130, 1333}, {200, 150}, {64, 128}, {0, 5}, {5, 0}}};
      c.q_heads = 4;
      c.kv_heads = 2;
      c.head_dim = head_dim;
      c.k_form = Form::kPaged;
      c.page_size = page_size;
      run(c);
      c.q_form = Form::kPadded;
      c.window = 70;
      run(c);
    }
  }
  // Mixed batches: sequences on both sides of the number of queries from which wgmma serves them, with one and several
  // splits.
  for (const std::int64_t head_dim : {40, 64, 80, 120, 128}) {
    for (const Form form : {Form::kPaged, Form::kPadded, Form::kPacked}) {
      Case c{{{1, 700}, {300, 1300}, {0, 30}, {16, 1040}, {17, 500}, {2, 1100}, {64, 64}, {65, 1090}, {1, 1}, {3, 2}}};
      c.q_heads = 8;
      c.kv_heads = 2;
      c.head_dim = head_dim;
      c.q_form = Form::kPacked;
      c.k_form = form;
      run(c);
      c.window = 70;
      c.sinks = true;
      run(c);
      c.window = 0;
      c.data = Data::kSpecial;
      c.lengths = {{1, 700}, {130, 200}, {16, 900}, {17, 500}, {2, 30}};
      run(c);
    }
  }
  // Splits of a prefix that rows of several sequences read together, and a group in which one sequence has too few
  // keys.
  for (const Form q_form : {Form::kPacked, Form::kPadded}) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
      for (const std::int64_t window : {0, 1500}) {
        Case c{{{1, 2100}, {3, 2060}, {2, 2300}, {1, 1030}, {4, 1100}, {1, 900}, {1, 1500}, {20, 1500}, {2, 70}}};
        c.groups = {{3, 2050}, {0, 5}, {3, 1024}, {2, 1300}};
        c.q_heads = 8;
        c.kv_heads = 2;
        c.head_dim = head_dim;
        c.q_form = q_form;
        c.k_form = Form::kPaged;
        c.window = window;
        c.sinks = window > 0;
        run(c);
      }
    }
  }
  // Trees: several roots, empty segments and segments of one token, branch points inside blocks and tiles, splits.
  for (const std::int64_t head_dim : {40, 64, 128, 256}) {
    Case c{{{170, 170}, {1, 1}, {0, 0}, {61, 61}, {9, 9}, {130, 130}, {20, 20}, {17, 17}}};
    c.parents = {-1, 0, 0, 0, 2, -1, 3, 5};
    c.q_heads = 6;
    c.kv_heads = 2;
    c.head_dim = head_dim;
    c.layout = head_dim == 40 ? Layout::kHeadsFirst : Layout::kTokens;
    run(c);
    c.window = 70;
    c.sinks = true;
    run(c);
    c.window = 0;
    c.softcap = 2.0f;
    c.lengths = {{1000, 1000}, {30, 30}, {100, 100}, {1, 1}};
    c.parents = {-1, 0, 1, 0};
    run(c);
  }
  // Long segments: several splits, tiles and blocks of one segment, keys that four segments see.
  for (const std::int64_t head_dim : {64, 128}) {
    Case c{{{1000, 1000}, {28, 28}, {300, 300}, {330, 330}, {1, 1}, {130, 130}, {64, 64}}};
    c.parents = {-1, 0, 0, 1, 3, 2, 0};
    c.q_heads = 2;
    c.head_dim = head_dim;
    run(c);
    c.window = 1100;
    c.sinks = true;
    run(c);
  }
  // Values narrower than keys: prefill, decode, splits, pages, shared prefixes, trees, strides that are no multiples of
  // 16 bytes.
  for (const auto& [head_dim, value_dim] : {std::pair{64, 8}, {128, 64}, {192, 128}, {40, 24}}) {
    Case c{{{1, 300}, {90, 150}, {3, 1100}}};
    c.q_heads = 4;
    c.kv_heads = 2;
    c.head_dim = head_dim;
    c.value_dim = value_dim;
    run(c);
    c.data = Data::kSpecial;
    c.shift = 4;
    c.sinks = true;
    c.lengths = {{1, 300}, {9, 140}};
    run(c);
    c.shift = 0;
    c.data = Data::kNormal;
    c.k_form = Form::kPaged;
    c.lengths = {{1, 2100}, {3, 2060}, {70, 290}, {2, 200}};
    c.groups = {{2, 2050}, {1, 256}};
    run(c);
    c.groups = {};
    c.softcap = 2.0f;
    run(c);
    c.k_form = Form::kPacked;
    c.lengths = {{170, 170}, {1, 1}, {61, 61}, {9, 9}};
    c.parents = {-1, 0, 0, 2};
    run(c);
  }
  // Softcaps, with every plan that supports them.
  for (const std::int64_t head_dim : {64, 128, 256}) {
    Case c{{{1, 300}, {90, 150}, {3, 1100}}};
    c.softcap = 2.0f;
    c.q_heads = 4;
    c.kv_heads = 2;
    c.head_dim = head_dim;
    run(c);
    c.k_form = Form::kPaged;
    c.window = 70;
    run(c);
    c.k_form = Form::kPacked;
    c.data = Data::kSpecial;
    run(c);
  }
  for (const std::int64_t window : {1, 100, 128}) {
    Case c{{{150, 290}, {3, 2}}};
    c.window = window;
    c.head_dim = 64;
    run(c);
  }
  // Splits, complete and partial, for blocks of either width; a window that begins inside a split; references that
  // rise; special values.
  const std::int64_t split = attention_split_end(0), second = attention_split_end(split);
  for (const float spread : {1.0f, 60.0f}) {
    Case c{{{3, second + 808}, {2, split + 1}, {5, split}}};
    c.spread = spread;
    for (const std::int64_t head_dim : {64, 128, 192}) {
      c.head_dim = head_dim;
      c.window = 0;
      run(c);
      c.window = split + 100;
      run(c);
    }
    c.head_dim = 64;
    c.window = 0;
    c.lengths = {{5, 700}};
    c.scale = 1.0f;
    run(c);
  }
  // Scores that are all below zero, or that a row's reference leaves within a split.
  for (const float bias : {1.0f, 0.3f}) {
    Case c{{{700, 700}, {90, 1500}}};
    c.bias = bias;
    for (const std::int64_t head_dim : {64, 96, 128}) {
      c.head_dim = head_dim;
      run(c);
    }
  }
  for (const Data data : {Data::kWide, Data::kTiny, Data::kSparse, Data::kEqual, Data::kSpecial}) {
    for (const std::int64_t head_dim : {8, 64, 72, 128, 136, 256}) {
      Case c{{{9, 140}, {70, 70}, {150, 300}}};
      c.data = data;
      c.head_dim = head_dim;
      run(c);
    }
  }
  // Scores, delta and dp that overflow: neither a hidden pair nor a score of -Inf contributes.
  for (const std::int64_t head_dim : {8, 64, 72, 128, 136, 256}) {
    for (const int peaks : {0, 97}) {
      for (const Form form : {Form::kPacked, Form::kPadded}) {
        Case c{{{9, 140}, {70, 70}, {150, 300}}};
        c.q_form = c.k_form = form;
        c.q_heads = 4;
        c.kv_heads = 2;
        c.head_dim = head_dim;
        c.data = peaks > 0 ? Data::kNormal : Data::kWide;
        c.peaks = peaks;
        if (peaks > 0) run(c);
        c.window = 70;
        run(c);
        c.window = 0;
        c.causal = false;
        run(c);
        if (form == Form::kPadded || (head_dim != 64 && head_dim != 128)) continue;
        c.causal = true;
        c.lengths = {{150, 150}, {28, 28}, {100, 100}, {130, 130}, {64, 64}};
        c.parents = {-1, 0, 0, 1, -1};
        run(c);
      }
    }
  }
  for (const std::int64_t heads : {1, 70}) {
    Case c{{{5, 20}, {11, 11}, {0, 4}, {4, 0}}};
    c.q_heads = heads;
    run(c);
  }
}

// Nothing out of range is read or written, and every output is written.
void run_bad_lists() {
  for (const std::vector<std::int32_t>& offsets : std::vector<std::vector<std::int32_t>>{
           {1, 4, 6}, {0, 4, 9}, {0, 7, 6}, {0, 4, 3}, {-3, 4, 6}, {0, 2000000000, 6}, {6, 6, 6}, {0, 0, 0}}) {
    for (const auto& [of_queries, head_dim] : {std::pair{true, 8},
                                               {false, 8},
                                               {true, 64},
                                               {false, 64},
                                               {true, 96},
                                               {false, 96},
                                               {true, 136},
                                               {false, 136}}) {
      Case c{{{4, 4}, {2, 2}}};
      c.head_dim = head_dim;
      Problem problem(c);
      (of_queries ? problem.input.cu_seqlens_q : problem.input.cu_seqlens_k) = offsets.data();
      Mirror mirror;
      const AttentionInput device = on_device(problem, &mirror);
      const std::size_t size = static_cast<std::size_t>(problem.q_places() * c.head_dim) * 2;
      const OnDevice out(Memory(size + 16, kCanary)), lse(Memory(problem.q_places() * 4, kCanary));
      AttentionParams p{device};
      p.out = out.data;
      p.lse = static_cast<float*>(lse.data);
      const OnDevice results(Memory(static_cast<std::size_t>(attention_workspace_bytes(p, 0)) + 16, 0));
      p.workspace = results.data;
      attention(p, 0, 0);
      for (const AttentionPlan& plan : kAttentionPlans) {
        if (!fits_plan(p, plan, 90)) continue;
        AttentionParams given = p;
        const OnDevice of_plan(Memory(static_cast<std::size_t>(workspace_bytes_of(p, plan)) + 16, kCanary));
        given.workspace = of_plan.data;
        sm90::attention(given, plan, nullptr);
        check(cudaDeviceSynchronize(), "a plan of attention with bad lists");
        const Memory host = of_plan.host();
        expect(Memory(host.end() - 16, host.end()), Memory(16, kCanary), "bad lists, behind the workspace");
      }
      const OnDevice dq(Memory(size + 16, kCanary)), dk(Memory(size + 16, kCanary)), dv(Memory(size + 16, kCanary));
      AttentionBackwardParams b{device};
      b.dout = b.out = device.q;
      b.lse = p.lse;
      b.dq = dq.data;
      b.dk = dk.data;
      b.dv = dv.data;
      for (const GradientKernel kernel : kGradientKernels) {
        if (!fits_plan(b, kernel, 90)) continue;
        const OnDevice workspace(Memory(static_cast<std::size_t>(workspace_bytes_of(b, kernel)) + 16, kCanary));
        b.workspace = workspace.data;
        sm90::attention_backward(b, kernel, nullptr);
        check(cudaDeviceSynchronize(), "attention_backward with bad lists");
      }
      check(cudaDeviceSynchronize(), "attention with bad lists");
      for (const OnDevice* array : {&out, &dq, &dk, &dv}) {
        const Memory host = array->host();
        expect(Memory(host.begin() + static_cast<std::ptrdiff_t>(host.size()) - 16, host.end()), Memory(16, kCanary),
               "bad lists, behind an output");
      }
    }
  }
}

}  // namespace
}  // namespace rlk::cuda

// Arguments: the index of a shard and the number of shards; no arguments: all cases.
int main(int argc, char** argv) {
  using namespace rlk;
  const unsigned shard = argc > 2 ? static_cast<unsigned>(std::atoi(argv[1])) : 0;
  const unsigned shards = argc > 2 ? static_cast<unsigned>(std::max(std::atoi(argv[2]), 1)) : 1;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 || cuda::compute_capability(0) != 90) {
    std::printf("skipped: no device of compute capability 9.0\n");
    return cuda::kSkipped;
  }
  cuda::run_cases(shard, shards);
  if (shard == 0) cuda::run_bad_lists();
  std::printf("%d of %d outputs differ\n", cuda::wrong, cuda::compared);
  return cuda::wrong > 0;
}
