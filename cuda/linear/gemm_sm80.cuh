// Matrix product for compute capability 8.0 and later. cp.async fills a ring of stages, and ldmatrix and
// mma.sync.m16n8k16 multiply the stages. Each block computes one tile of D over the whole contraction. The tensor cores
// limit products with a large D, and memory limits products with few rows. For few rows, tiles are small and stages are
// long, so several blocks of a multiprocessor load weights at once.
#pragma once

#include "../common/async_copy_sm80.cuh"
#include "gemm_load_sm80.cuh"
#include "gemm_store_sm80.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kStepK = 16;         // contraction indices per mma
constexpr int kGroupTiles = 8;     // consecutive tiles of a column, which share L2
constexpr int kSegmentLevels = 3;  // levels of the tree over up to 8 segments

// The launch's arguments.
struct GemmLaunchSm80 {
  GemmParams p;
  std::int64_t part;  // contraction indices per segment or token block; all indices if there is one part
  int tiles_m, tiles_n;
  int stages;
  bool vector_a, vector_b, vector_d;  // whether rows begin at multiples of 16 bytes
};

// A block's tile, the arrangement of its warps, and the contraction indices per stage. `kBlocks`: blocks per
// multiprocessor, which limits the registers of a block. `kStages`: the most stages that gain time.
template <int kTileM, int kTileN, int kNumWarpsM, int kNumWarpsN, int kTileStageK, int kBlocks, int kStages>
struct GemmTileSm80 {
  static constexpr int kM = kTileM, kN = kTileN, kWarpsM = kNumWarpsM, kStageK = kTileStageK, kMinBlocks = kBlocks;
  static constexpr int kMostStages = kStages;
  static constexpr int kThreads = kNumWarpsM * kNumWarpsN * 32;
  static constexpr int kWarpM = kM / kNumWarpsM, kWarpN = kN / kNumWarpsN;
  static constexpr int kRowTiles = kWarpM / 16, kColumnTiles = kWarpN / 8;
  static constexpr int kStageBytes = (kM + kN) * kStageK * 2;
  // Whether a stage's first fragments are loaded while the products of the previous stage run. The last step of the
  // previous stage then waits for this stage's copies. Small tiles lack the registers for these early loads. Instead,
  // warps of other blocks run during the wait.
  static constexpr bool kLoadsAhead = kM * kN >= 128 * 128;
};
using LargeTile = GemmTileSm80<128, 256, 2, 4, 64, 1, 3>;
using SquareTile = GemmTileSm80<128, 128, 2, 2, 32, 2, 7>;
// This tile leaves registers for a running sum besides the accumulators.
using BlocksTile = GemmTileSm80<128, 128, 2, 4, 64, 1, 3>;
using MediumTile = GemmTileSm80<64, 64, 2, 2, 64, 2, 7>;
using SmallMTile = GemmTileSm80<32, 32, 1, 2, 128, 5, 7>;
using FewestRowsTile = GemmTileSm80<16, 32, 1, 2, 128, 6, 7>;

// The products of one stage. In a whole stage, each step's fragments are loaded while the previous step is multiplied.
template <class Tile, bool kContractionA, bool kContractionB>
struct StageProduct {
  using TileA = OperandTile<Tile::kM, Tile::kStageK, kContractionA>;
  using TileB = OperandTile<Tile::kN, Tile::kStageK, kContractionB>;
  static constexpr auto kA = TileA::Order::kA;
  static constexpr auto kB = TileB::Order::kB;
  static_assert(TileA::template fragments_agree<kA, Tile::kWarpM>() &&
                TileB::template fragments_agree<kB, Tile::kWarpN>());
  using Sums = Accumulators<Tile::kRowTiles, Tile::kColumnTiles>;

  typename TileA::template Fragments<kA> at_a;
  typename TileB::template Fragments<kB> at_b;

  __device__ __forceinline__ StageProduct(int warp, int lane)
      : at_a(warp % Tile::kWarpsM * Tile::kWarpM, lane), at_b(warp / Tile::kWarpsM * Tile::kWarpN, lane) {}

  static constexpr int kSteps = Tile::kStageK / kStepK;
  struct Step {
    std::uint32_t a[Tile::kRowTiles][4], b[Tile::kColumnTiles / 2][4];
  };
  __device__ __forceinline__ void load_step(Step& s, std::uint32_t stage, int step) const {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) load_matrices_4<!kContractionA>(s.a[i], stage + at_a.offset(step, i));
#pragma unroll
    for (int j = 0; j < Tile::kColumnTiles / 2; ++j) {
      load_matrices_4<!kContractionB>(s.b[j], stage + TileA::kBytes + at_b.offset(step, j));
    }
  }

  template <class T>
  static __device__ __forceinline__ void multiply_step(const Step& s, Sums& d) {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kColumnTiles; ++j) {
        mma_m16n8k16<T>(d[i][j], s.a[i], s.b[j / 2][j % 2 * 2], s.b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
  // Multiplies a whole stage, whose first fragments s[0] are already loaded. copy(step) runs together with the products
  // of each step except the last step. next() runs after the loads of the last step, so its loads are in flight during
  // the products of the last step.
  template <class T, class Copy, class Next>
  __device__ __forceinline__ void multiply(Step (&s)[2], std::uint32_t stage, Sums& d, const Copy& copy,
                                           const Next& next) const {
    static_assert(kSteps % 2 == 0);  // in the last step, s[0] is free for the next stage
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) {
        load_step(s[(step + 1) % 2], stage, step + 1);
        copy(step);
      } else {
        next();
      }
      multiply_step<T>(s[step % 2], d);
    }
  }
  // Multiplies the last stage of a part; s is already loaded. Steps after the end of the contraction are skipped, not
  // multiplied as zeros.
  template <class T>
  __device__ __forceinline__ void multiply_some(Step& s, std::uint32_t stage, int steps, Sums& d) const {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (step > 0) load_step(s, stage, step);
      multiply_step<T>(s, d);
    }
  }
};

// Holds sums of the contraction's earlier parts. The accumulators hold the sum of the current part.
template <int kLevels, int kRowTiles, int kColumnTiles>
class PendingSums {
 public:
  // Sets `d` to the sum of the largest subtree that part `part` completes. After the last part, `d` is the sum of the
  // whole tree.
  __device__ __forceinline__ void add_segment(int part, Accumulators<kRowTiles, kColumnTiles>& d) {
    bool complete = true;
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      const bool second = part >> level & 1;  // second of a pair
      if (complete && second) add_to(level, d);
      if (complete && !second) keep(level, d);
      complete = complete && second;
    }
  }
  __device__ __forceinline__ void add_block(std::int64_t part, Accumulators<kRowTiles, kColumnTiles>& d) {
    if (part > 0) add_to(0, d);
    keep(0, d);
  }

 private:
  template <class F>
  static __device__ __forceinline__ void for_each(F f) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f(i, j, e);
      }
    }
  }
  __device__ __forceinline__ void keep(int level, const Accumulators<kRowTiles, kColumnTiles>& d) {
    for_each([&](int i, int j, int e) { sums_[level][i][j][e] = d[i][j][e]; });
  }
  __device__ __forceinline__ void add_to(int level, Accumulators<kRowTiles, kColumnTiles>& d) const {
    for_each([&](int i, int j, int e) { d[i][j][e] = __fadd_rn(sums_[level][i][j][e], d[i][j][e]); });
  }

  Accumulators<kRowTiles, kColumnTiles> sums_[kLevels];
};

// `kLevels`: levels of pending sums: 0 for a single part, 1 for token blocks, and kSegmentLevels for segments or token
// blocks.
template <class Tile, bool kContractionA, bool kContractionB, int kLevels>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    gemm_sm80_kernel(const __grid_constant__ GemmLaunchSm80 g) {
  using Product = StageProduct<Tile, kContractionA, kContractionB>;
  using TileA = typename Product::TileA;
  using TileB = typename Product::TileB;
  extern __shared__ __align__(128) unsigned char shared[];  // [stages][A, B]
  const std::uint32_t base = shared_address(shared);
  const GemmParams& p = g.p;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;

  // Tiles are ordered by groups of rows of tiles, and column by column within a group. So the tiles that run at the
  // same time form nearly a square.
  const int per_group = kGroupTiles * g.tiles_n, tile = static_cast<int>(blockIdx.x);
  const int group = tile / per_group, in_group = tile - group * per_group, first_tile = group * kGroupTiles;
  const int height = min(kGroupTiles, g.tiles_m - first_tile);
  const std::int64_t m = std::int64_t{first_tile + in_group % height} * Tile::kM;
  const std::int64_t n = std::int64_t{in_group / height} * Tile::kN;

  const OperandLoad<TileA, kContractionA, Tile::kThreads> load_a(p.a, p.m, m, g.vector_a);
  const OperandLoad<TileB, kContractionB, Tile::kThreads> load_b(p.b, p.n, n, g.vector_b);
  // The next stage to load. Every part begins with a new stage.
  constexpr bool kOnePart = kLevels == 0;
  std::int64_t load_k = 0, load_end = kOnePart ? p.contraction : min(g.part, p.contraction);
  int load_slot = 0;
  const auto load_left = [&] { return static_cast<int>(min(load_end - load_k, std::int64_t{Tile::kStageK})); };
  const auto count_load = [&](int left) {
    load_k += left;
    if (!kOnePart && load_k == load_end) load_end = min(load_end + g.part, p.contraction);
    if (++load_slot == g.stages) load_slot = 0;
  };
  const auto load_next = [&] {
    if (load_k < p.contraction) {
      const std::uint32_t to = base + load_slot * Tile::kStageBytes;
      const int left = load_left();
      load_a.load(to, load_k, left);
      load_b.load(to + TileA::kBytes, load_k, left);
      count_load(left);
    }
    copy_async_commit();
  };
  for (int i = 0; i + 1 < g.stages; ++i) load_next();

  const Product product(warp, lane);
  const LanePosition at = {m + warp % Tile::kWarpsM * Tile::kWarpM + lane / 4,
                           n + warp / Tile::kWarpsM * Tile::kWarpN + lane % 4 * 2};
  Accumulators<Tile::kRowTiles, Tile::kColumnTiles> d;
  [[maybe_unused]] PendingSums<kLevels == 0 ? 1 : kLevels, Tile::kRowTiles, Tile::kColumnTiles> pending;
  int slot = 0;
  std::int64_t part = 0, k = 0;
  typename Product::Step s[2];
  const auto take_stage = [&] {
    copy_async_wait_at_most<Tile::kMostStages - 2>(g.stages - 2);
    // After this barrier the stage is visible to all threads. All threads have also read the previous stage, so a load
    // may overwrite it.
    __syncthreads();
    product.load_step(s[0], base + slot * Tile::kStageBytes, 0);
  };
  const auto next_stage = [&] {
    if (++slot == g.stages) slot = 0;
    if constexpr (Tile::kLoadsAhead) take_stage();
  };
  const auto multiply_stage = [&](auto element, int steps) {
    using T = decltype(element);
    const std::uint32_t stage = base + slot * Tile::kStageBytes;
    if (steps < Product::kSteps) {
      load_next();
      product.template multiply_some<T>(s[0], stage, steps, d);
      next_stage();
    } else if (const int left = load_left();
               Tile::kLoadsAhead && load_a.has_whole(load_k, left) && load_b.has_whole(load_k, left)) {
      // The next copies are spread over all steps except the last step.
      constexpr int kChunksA = decltype(load_a)::kChunks, kAll = kChunksA + decltype(load_b)::kChunks;
      constexpr int kParts = Product::kSteps - 1;
      const std::uint32_t to = base + load_slot * Tile::kStageBytes;
      const std::uint64_t from_a = load_a.start(load_k), from_b = load_b.start(load_k);
      const auto copy = [&](int step) {
#pragma unroll
        for (int i = step * kAll / kParts; i < (step + 1) * kAll / kParts; ++i) {
          if (i < kChunksA) {
            load_a.copy_chunk(i, to, from_a);
          } else {
            load_b.copy_chunk(i - kChunksA, to + TileA::kBytes, from_b);
          }
        }
        if (step + 1 == kParts) copy_async_commit();
      };
      count_load(left);
      product.template multiply<T>(s, stage, d, copy, next_stage);
    } else {
      load_next();
      product.template multiply<T>(
          s, stage, d, [](int) {}, next_stage);
    }
  };
  if constexpr (Tile::kLoadsAhead) take_stage();
  do {
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = 0.0f;
      }
    }
    if (part == 0 && p.continues) {
      for_each_addend<Tile::kRowTiles, Tile::kColumnTiles>(p, at, d, [](float& x, float start) { x = start; });
    }
    const std::int64_t end = kOnePart ? p.contraction : min(k + g.part, p.contraction);
#pragma unroll 1
    for (; k < end; k += Tile::kStageK) {
      if constexpr (!Tile::kLoadsAhead) take_stage();
      const int steps = static_cast<int>(min(end - k + kStepK - 1, std::int64_t{Tile::kStageK})) / kStepK;
      if (p.dtype == DType::kBFloat16) {
        multiply_stage(Bf16{}, steps);
      } else {
        multiply_stage(Fp16{}, steps);
      }
    }
    k = end;
    if (part == 0 && p.addend != nullptr && !p.continues) {
      // An empty contraction adds nothing, so main_grad keeps its bits.
      for_each_addend<Tile::kRowTiles, Tile::kColumnTiles>(
          p, at, d, [&](float& x, float addend) { x = p.contraction == 0 ? addend : __fadd_rn(addend, x); });
    }
    if constexpr (kLevels > 0) {
      if (kLevels == kSegmentLevels && p.segments > 1) {
        pending.add_segment(static_cast<int>(part), d);
      } else {
        pending.add_block(part, d);
      }
    }
    ++part;
  } while (!kOnePart && k < p.contraction);
  store_tile<Tile::kRowTiles, Tile::kColumnTiles>(p, at, g.vector_d, lane, d);
}

}  // namespace
}  // namespace rlk::cuda
