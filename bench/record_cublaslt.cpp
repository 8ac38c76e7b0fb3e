// Records which algorithms of cuBLASLt give the bits of our kernels and take less time. The program prints the rows of
// cuda/linear/cublaslt_<gpu>_<version>.inc on standard output, and a line per product on standard error. Usage:
// LD_LIBRARY_PATH=<folder of torch's libcublasLt> record_cublaslt [--rows M,M,...] [--from M] [--to M] [--seconds S]
// --rows: forward products of only these numbers of rows; --from, --to: forward products of at least and at most so
// many rows; --seconds: no product begins later
//
// An algorithm is admitted if its result equals ours to the byte and its time, in alternation, is at least kGain below
// ours. Times are taken under a lasting load, in which the power limit lowers the clocks. Every buffer of weights must
// agree, with normal data and with exponents that spread over many orders. A record covers all numbers of rows above
// the next smaller one of the list if the algorithm is faster at both ends. The bits are then equal at every number up
// to 1024, and beyond that at some numbers between the ends. If no algorithm is faster at both ends of a range, but one
// is faster at one end, the range is halved, up to kMostHalvings times. At the lower end a short run decides this.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bench/command_line.h"
#include "bench/gpu_timer.h"
#include "bench/linear_products.h"
#include "cuda/linear/cublaslt_records.h"
#include "cuda/linear/gemm_sm90.h"

namespace rlk::bench {

std::uint64_t count_differences(const void* a, const void* b, std::int64_t bytes);  // same_bytes.cu

namespace {

constexpr double kGain = 0.01;
// Algorithms that are slower than our kernel by more than this share in a short run are not timed again.
constexpr double kQuickMargin = 0.03;
constexpr double kHeatMs = 250;  // load before a time is taken
constexpr int kMostProposals = 16, kMostTimedAtFirst = 3, kMostHalvings = 2;
constexpr std::int64_t kLeastHalved = 32;  // ranges of fewer rows are not halved
constexpr std::int64_t kMostOutputs = 2'300'000'000;
constexpr double kSlowFlops = 4e11;  // a replay has one such product

// Batch sizes of decode, as engines capture them; beyond them steps, since the time of a product rises in steps.
std::vector<std::int64_t> forward_rows() {
  std::vector<std::int64_t> rows = {1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128};
  for (const auto& [last, step] : {std::pair{512, 16}, {1024, 32}, {2048, 64}, {4096, 128}, {16384, 1024}}) {
    while (rows.back() < last) rows.push_back(rows.back() + step);
  }
  return rows;
}
// The numbers of rows from first to last at which bits are compared.
std::vector<std::int64_t> compared_rows(std::int64_t first, std::int64_t last) {
  const std::int64_t most = last <= 1024 ? last : last <= 4096 ? 24 : 6;
  const std::int64_t step = std::max<std::int64_t>(1, (last - first) / most);
  std::vector<std::int64_t> rows;
  for (std::int64_t m = first; m < last; m += step) rows.push_back(m);
  rows.push_back(last);
  return rows;
}
constexpr std::int64_t kBackwardRows[] = {4096, 8192, 16384};

const char* name(LinearPass pass) {
  return pass == LinearPass::kForward ? "kForward" : pass == LinearPass::kInputGrad ? "kInputGrad" : "kWeightGrad";
}
long long number(std::int64_t x) { return x; }
const char* name(DType t) { return t == DType::kFloat32 ? "kFloat32" : "kBFloat16"; }

void print(const cuda::CublasLtRecord& r) {
  const LinearProducts& p = r.products;
  std::printf("{{%s, %s, %s, %lld, %lld, %lld, %lld}, {", name(p.pass), name(p.dtype), name(p.out_dtype),
              number(p.in_features), number(p.out_features), number(p.last_rows), number(p.first_rows));
  for (std::size_t i = 0; i < r.algorithm.size(); ++i)
    std::printf(i == 0 ? "0x%llx" : ", 0x%llx", number(r.algorithm[i]));
  std::printf("}},\n");
}

// What a range of rows yields.
struct Found {
  std::optional<cuda::CublasLtRecord> record;
  // without a record: whether an algorithm is faster at the least number of rows
  bool is_faster_at_first = false;
};

class Recorder {
 public:
  Recorder(const cuda::CublasLt& library, LinearPass pass, std::int64_t rows, const Layer& layer, DType out_dtype)
      : library_(library),
        pass_(pass),
        rows_(rows),
        layer_(layer),
        out_dtype_(out_dtype),
        memory_(pass, rows, layer, out_dtype, false) {
    cuda::check(cudaMalloc(&ours_, static_cast<std::size_t>(memory_.result_bytes())), "cudaMalloc");
  }
  ~Recorder() { cudaFree(ours_); }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // A record, if an algorithm is admitted. `before` is the next smaller number of rows in the list. The record begins
  // at `before` + 1 if the algorithm is faster there, too; otherwise it holds this number of rows alone.
  Found record(std::int64_t before) {
    const std::int64_t wanted = pass_ == LinearPass::kForward ? before + 1 : rows_;
    const auto proposals = proposals_of(wanted);
    const Times quick = times(proposals, rows_, 3, 30);
    std::vector<cuda::CublasLtAlgorithm> equal;
    int slower = 0;
    for (std::size_t i = 0; i < proposals.size(); ++i) {
      if (quick.vendor_us[i] > (1 + kQuickMargin) * quick.native_us) {
        ++slower;
      } else if (is_equal(proposals[i], {rows_}, rows_ <= 1024 ? memory_.buffers() : 1)) {
        equal.push_back(proposals[i]);
      }
    }
    std::int64_t first = rows_;
    std::size_t best = 0;
    double ratio = 1;
    if (!equal.empty()) {
      const Times last = times(equal, rows_, 8, kHeatMs);
      std::vector<double> ratios(equal.size()), widest(equal.size(), 1.0);
      std::vector<std::size_t> order(equal.size());
      for (std::size_t i = 0; i < equal.size(); ++i) ratios[i] = last.vendor_us[i] / last.native_us, order[i] = i;
      std::ranges::sort(order, {}, [&](std::size_t i) { return ratios[i]; });
      order.resize(std::min<std::size_t>(order.size(), kMostTimedAtFirst));
      for (const std::size_t i : order) {
        if (ratios[i] > 1 - kGain) break;
        if (wanted == rows_) {
          widest[i] = ratios[i];
        } else if (runs(equal[i], wanted)) {
          const Times low = times({equal[i]}, wanted, 8, kHeatMs / 2);
          widest[i] = std::max(ratios[i], low.vendor_us[0] / low.native_us);
        }
      }
      const auto least = [](const std::vector<double>& v) { return std::ranges::min_element(v) - v.begin(); };
      best = least(widest);
      if (widest[best] < 1 - kGain && is_equal(equal[best], compared_rows(wanted, rows_), 1)) {
        first = wanted;
      } else {
        best = least(ratios);
      }
      ratio = ratios[best];
    }
    const bool admitted = ratio < 1 - kGain;
    std::fprintf(stderr, "%-11s %-9s %6lld x %6lld x %5lld  ours %9.2f us  cuBLASLt / ours %.3f  %zu of %zu equal",
                 name(pass_), name(out_dtype_), number(rows_), number(layer_.out_features), number(layer_.in_features),
                 quick.native_us, ratio, equal.size(), proposals.size() - slower);
    std::fprintf(stderr, admitted ? "  recorded from %lld rows on\n" : "\n", number(first));
    Found found;
    found.is_faster_at_first = !admitted && wanted < rows_ && is_faster_at(wanted, proposals);
    if (admitted) {
      found.record = cuda::CublasLtRecord{
          {pass_, DType::kBFloat16, out_dtype_, layer_.in_features, layer_.out_features, rows_, first}, equal[best]};
    }
    return found;
  }

 private:
  struct Times {
    double native_us;
    std::vector<double> vendor_us;
  };

  cuda::GemmParams params(int buffer, std::int64_t rows) const {
    cuda::GemmParams p = memory_.params(buffer);
    if (pass_ == LinearPass::kForward) p.m = rows;
    return p;
  }
  static void run_native(const cuda::GemmParams& p, cudaStream_t stream) {
    cuda::gemm_sm90(p, cuda::choose_plan_sm90(p, cuda::multiprocessors(0)), stream);
  }

  // What the library proposes for several numbers of rows from `wanted` on. The library may propose other algorithms
  // for 414 than for 416 rows, although each algorithm supports both numbers.
  std::vector<cuda::CublasLtAlgorithm> proposals_of(std::int64_t wanted) const {
    std::vector<cuda::CublasLtAlgorithm> all;
    for (const std::int64_t rows : {rows_, rows_ - 2, (wanted + rows_) / 2}) {
      if (rows < wanted) continue;
      for (const auto& each : library_.propose(params(0, rows), kMostProposals)) {
        if (std::ranges::find(all, each) == all.end()) all.push_back(each);
      }
    }
    return all;
  }

  // Whether the library runs the algorithm for a number of rows for which the library did not propose it.
  bool runs(const cuda::CublasLtAlgorithm& algorithm, std::int64_t rows) {
    try {
      library_.run(params(0, rows), algorithm, nullptr);
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  // Whether any of the algorithms is faster than our kernel at a number of rows, in a short run.
  bool is_faster_at(std::int64_t rows, std::vector<cuda::CublasLtAlgorithm> algorithms) {
    std::erase_if(algorithms, [&](const cuda::CublasLtAlgorithm& each) { return !runs(each, rows); });
    const Times quick = times(algorithms, rows, 3, 30);
    return std::ranges::any_of(quick.vendor_us, [&](double us) { return us < (1 - kGain) * quick.native_us; });
  }

  // Whether the algorithm has our bits for each number of rows. The result is overwritten beforehand, so that missing
  // writes show.
  bool is_equal(const cuda::CublasLtAlgorithm& algorithm, const std::vector<std::int64_t>& each, int buffers) {
    bool equal = true;
    for (float spread : {0.0f, 4.0f}) {
      memory_.fill(spread);
      for (std::size_t i = 0; equal && i < each.size(); ++i) {
        for (int buffer = 0; equal && buffer < buffers; ++buffer) {
          cuda::GemmParams p = params(buffer, each[i]);
          const std::int64_t bytes = p.m * p.n * size_of(out_dtype_);
          cuda::check(cudaMemsetAsync(p.d, 0xff, static_cast<std::size_t>(bytes)), "cudaMemset");
          library_.run(p, algorithm, nullptr);
          p.d = ours_;
          run_native(p, nullptr);
          equal = count_differences(ours_, memory_.result(), bytes) == 0;
        }
      }
    }
    memory_.fill(0);
    return equal;
  }

  // Median times of our kernel and of each algorithm, in alternation.
  Times times(const std::vector<cuda::CublasLtAlgorithm>& algorithms, std::int64_t rows, int rounds,
              double warm_up_ms) {
    const int buffers = memory_.buffers();
    const int calls = memory_.flops() > kSlowFlops
                          ? 1
                          : std::max(buffers, static_cast<int>(std::min(48.0, kSlowFlops / memory_.flops())));
    Replay native([&](cudaStream_t s, int i) { run_native(params(i % buffers, rows), s); }, calls);
    std::vector<std::unique_ptr<Replay>> vendor;
    for (const auto& algorithm : algorithms) {
      vendor.push_back(std::make_unique<Replay>(
          [&](cudaStream_t s, int i) { library_.run(params(i % buffers, rows), algorithm, s); }, calls));
    }
    native.warm_up(warm_up_ms);  // to reach the clocks of a lasting load
    for (int i = 0; i < rounds; ++i) {
      native.once();
      for (const auto& each : vendor) each->once();
    }
    Times found{native.median_us(), {}};
    for (const auto& each : vendor) found.vendor_us.push_back(each->median_us());
    return found;
  }

  const cuda::CublasLt& library_;
  LinearPass pass_;
  std::int64_t rows_;
  Layer layer_;
  DType out_dtype_;
  ProductMemory memory_;
  void* ours_ = nullptr;
};

// Appends the records of the rows above `range.first` up to `range.second`. If an algorithm is faster at one end of the
// range alone, the halves of the range are tried.
void record_range(const cuda::CublasLt& library, LinearPass pass, std::pair<std::int64_t, std::int64_t> range,
                  const Layer& layer, DType out_dtype, int halvings, std::vector<cuda::CublasLtRecord>* records) {
  const auto [before, last] = range;
  const auto [record, is_faster_at_first] = Recorder(library, pass, last, layer, out_dtype).record(before);
  const bool is_whole = record && record->products.first_rows == before + 1, has_part = record || is_faster_at_first;
  if (pass == LinearPass::kForward && has_part && !is_whole && halvings > 0 && last - before >= kLeastHalved) {
    const std::int64_t middle = (before + last) / 2;
    record_range(library, pass, {before, middle}, layer, out_dtype, halvings - 1, records);
    record_range(library, pass, {middle, last}, layer, out_dtype, halvings - 1, records);
  } else if (record) {
    records->push_back(*record);
  }
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk;
  using namespace rlk::bench;
  std::vector<std::int64_t> only;
  CommandLine line;
  std::int64_t from = 1;
  std::int64_t to = 1 << 20;
  double seconds = 1e9;
  line.value("rows", "M,M,...", [&](const char* text) { return row_list(text, &only); });
  line.value("from", "M", [&](const char* text) { return (from = std::atoll(text)) > 0; });
  line.value("to", "M", [&](const char* text) { return (to = std::atoll(text)) > 0; });
  line.value("seconds", "S", [&](const char* text) { return (seconds = std::atof(text)) > 0; });
  if (!line.read(argc, argv)) return 2;
  if (!has_hopper()) return 1;
  const cuda::CublasLt* library = cuda::CublasLt::on(0);
  if (library == nullptr) {
    std::fprintf(stderr, "no libcublasLt.so.%d: name its folder in LD_LIBRARY_PATH\n", CUDART_VERSION / 1000);
    return 1;
  }
  cudaDeviceProp properties;
  cuda::check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::fprintf(stderr, "%s, %d multiprocessors, cuBLASLt %zu\n", properties.name, properties.multiProcessorCount,
               library->version());
  std::vector<cuda::CublasLtRecord> records;
  int tried = 0, left = 0;
  const auto start = std::chrono::steady_clock::now();
  const auto each = [&](LinearPass pass, const auto& rows, DType out_dtype) {
    std::int64_t before = 0;
    for (std::int64_t m : rows) {
      const std::int64_t smaller = std::exchange(before, m);
      if ((from > 1 || to < 1 << 20) && (pass != LinearPass::kForward || m < from || m > to)) continue;
      if (!only.empty() && (pass != LinearPass::kForward || std::ranges::find(only, m) == only.end())) continue;
      for (const Layer& layer : kLayers) {
        const bool head = layer.out_features > 1 << 16;
        if (m * layer.out_features > kMostOutputs || (head && pass != LinearPass::kForward)) continue;
        if (pass == LinearPass::kWeightGrad && m > kTokenBlock) continue;
        if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > seconds) {
          ++left;
          continue;
        }
        record_range(*library, pass, {smaller, m}, layer, out_dtype, kMostHalvings, &records);
        ++tried;
      }
    }
  };
  each(LinearPass::kForward, forward_rows(), DType::kBFloat16);
  each(LinearPass::kInputGrad, kBackwardRows, DType::kBFloat16);
  each(LinearPass::kWeightGrad, kBackwardRows, DType::kBFloat16);
  each(LinearPass::kWeightGrad, kBackwardRows, DType::kFloat32);
  std::fprintf(stderr, "recorded %zu of %d products; %d not tried, no time left\n", records.size(), tried, left);
  std::ranges::sort(records, {}, &cuda::CublasLtRecord::products);
  for (const auto& record : records) print(record);
}
