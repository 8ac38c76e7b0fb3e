// Records which algorithms of cuBLASLt give the bits of our kernels and take less time. It prints the rows of
// cuda/linear/cublaslt_<gpu>_<version>.inc on standard output, and a line per product on standard error. Usage:
// LD_LIBRARY_PATH=<folder of torch's libcublasLt> record_cublaslt [--rows M,M,...] > rows --rows: forward products of
// these numbers of rows alone
//
// An algorithm is admitted if its result equals ours to the byte and its time, in alternation, is at least kGain below ours.
// Every buffer of weights must agree, with normal data and with exponents that spread over many orders. Up to
// kMostRangeRows rows an algorithm is also tried with every number of rows above the next smaller batch, and recorded
// for all of them.
#include <algorithm>
#include <cstdio>
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
constexpr int kMostProposals = 16;
constexpr std::int64_t kMostOutputs = 2'300'000'000;
constexpr std::int64_t kMostRangeRows = 512;

// Batch sizes of decode, as engines capture them, and token counts of prefill and training.
constexpr std::int64_t kForwardRows[] = {1,   2,   4,   8,   16,  24,  32,  48,  64,   80,   96,   112,  128,
                                         160, 192, 224, 256, 320, 384, 448, 512, 1024, 2048, 4096, 8192, 16384};
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

  // A record, if an algorithm is admitted. `before` is the next smaller number of rows in the list.
  std::optional<cuda::CublasLtRecord> record(std::int64_t before) {
    const auto proposals = library_.propose(memory_.params(0), kMostProposals);
    std::vector<cuda::CublasLtAlgorithm> equal;
    for (const auto& algorithm : proposals) {
      if (is_equal(algorithm, rows_, rows_, memory_.buffers())) equal.push_back(algorithm);
    }
    const auto [best, ratio, native_us] = fastest(equal, rows_);
    const bool admitted = ratio < 1 - kGain;
    std::int64_t first = rows_;
    if (admitted && pass_ == LinearPass::kForward && rows_ <= kMostRangeRows && before + 1 < rows_ &&
        fastest({equal[best]}, before + 1).ratio < 1 - kGain && is_equal(equal[best], before + 1, rows_, 1)) {
      first = before + 1;
    }
    std::fprintf(stderr, "%-11s %-9s %6lld x %6lld x %5lld  ours %9.2f us  cuBLASLt / ours %.3f  %zu of %zu equal",
                 name(pass_), name(out_dtype_), number(rows_), number(layer_.out_features), number(layer_.in_features),
                 native_us, ratio, equal.size(), proposals.size());
    std::fprintf(stderr, admitted ? "  recorded from %lld rows on\n" : "\n", number(first));
    if (!admitted) return std::nullopt;
    return cuda::CublasLtRecord{
        {pass_, DType::kBFloat16, out_dtype_, layer_.in_features, layer_.out_features, rows_, first}, equal[best]};
  }

 private:
  struct Fastest {
    std::size_t index;
    double ratio, native_us;
  };

  cuda::GemmParams params(int buffer, std::int64_t rows) const {
    cuda::GemmParams p = memory_.params(buffer);
    if (pass_ == LinearPass::kForward) p.m = rows;
    return p;
  }
  static void run_native(const cuda::GemmParams& p, cudaStream_t stream) {
    cuda::gemm_sm90(p, cuda::choose_plan_sm90(p, cuda::multiprocessors(0)), stream);
  }

  // Whether the algorithm has our bits for every number of rows from first to last. The result is overwritten
  // beforehand, so that missing writes show.
  bool is_equal(const cuda::CublasLtAlgorithm& algorithm, std::int64_t first, std::int64_t last, int buffers) {
    bool equal = true;
    for (float spread : {0.0f, 4.0f}) {
      memory_.fill(spread);
      for (std::int64_t rows = first; equal && rows <= last; ++rows) {
        for (int buffer = 0; equal && buffer < buffers; ++buffer) {
          cuda::GemmParams p = params(buffer, rows);
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

  // The fastest algorithm, and its time over ours.
  Fastest fastest(const std::vector<cuda::CublasLtAlgorithm>& algorithms, std::int64_t rows) {
    const int buffers = memory_.buffers(),
              calls = std::max(buffers, static_cast<int>(std::min(48.0, 1e12 / memory_.flops())));
    Replay native([&](cudaStream_t s, int i) { run_native(params(i % buffers, rows), s); }, calls);
    std::vector<std::unique_ptr<Replay>> vendor;
    for (const auto& algorithm : algorithms) {
      vendor.push_back(std::make_unique<Replay>(
          [&](cudaStream_t s, int i) { library_.run(params(i % buffers, rows), algorithm, s); }, calls));
    }
    native.warm_up(200);  // to reach the clocks of a lasting load
    std::size_t best = 0;
    const auto rounds = [&](int count, bool all) {
      for (int i = 0; i < count; ++i) {
        native.once();
        for (std::size_t j = 0; j < vendor.size(); ++j) {
          if (all || j == best) vendor[j]->once();
        }
      }
    };
    rounds(5, true);
    for (std::size_t i = 1; i < vendor.size(); ++i) {
      if (vendor[i]->median_us() < vendor[best]->median_us()) best = i;
    }
    rounds(8, false);
    const double ours = native.median_us();
    return {best, vendor.empty() ? 1 : vendor[best]->median_us() / ours, ours};
  }

  const cuda::CublasLt& library_;
  LinearPass pass_;
  std::int64_t rows_;
  Layer layer_;
  DType out_dtype_;
  ProductMemory memory_;
  void* ours_ = nullptr;
};

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk;
  using namespace rlk::bench;
  std::vector<std::int64_t> only;
  CommandLine line;
  line.value("rows", "M,M,...", [&](const char* text) { return row_list(text, &only); });
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
  int tried = 0;
  const auto each = [&](LinearPass pass, const auto& rows, DType out_dtype) {
    std::int64_t before = 0;
    for (std::int64_t m : rows) {
      const std::int64_t smaller = std::exchange(before, m);
      if (!only.empty() && (pass != LinearPass::kForward || std::ranges::find(only, m) == only.end())) continue;
      for (const Layer& layer : kLayers) {
        const bool head = layer.out_features > 1 << 16;
        if (m * layer.out_features > kMostOutputs || (head && pass != LinearPass::kForward)) continue;
        if (pass == LinearPass::kWeightGrad && m > kTokenBlock) continue;
        const auto record = Recorder(*library, pass, m, layer, out_dtype).record(smaller);
        if (record) records.push_back(*record);
        ++tried;
      }
    }
  };
  each(LinearPass::kForward, kForwardRows, DType::kBFloat16);
  each(LinearPass::kInputGrad, kBackwardRows, DType::kBFloat16);
  each(LinearPass::kWeightGrad, kBackwardRows, DType::kBFloat16);
  each(LinearPass::kWeightGrad, kBackwardRows, DType::kFloat32);
  std::fprintf(stderr, "recorded %zu of %d products\n", records.size(), tried);
  std::ranges::sort(records, {}, &cuda::CublasLtRecord::products);
  for (const auto& record : records) print(record);
}
