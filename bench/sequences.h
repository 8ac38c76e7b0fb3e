// Padded batches of sequences on a GPU for the microbenchmarks of operators over them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/buffers.h"
#include "bench/command_line.h"
#include "bench/gpu_timer.h"
#include "cuda/common/sequence_warps.h"
#include "rlk/tokens.h"

namespace rlk::bench {

struct Shape {
  std::int64_t sequences, tokens;
};
// Decode batches, a training batch of long answers, a training batch of short answers, and a single row with the tokens
// of a packed batch.
constexpr Shape kShapes[] = {{8, 8192}, {64, 8192}, {512, 8192}, {4096, 8192}, {16384, 512}, {1, 262144}};

// Number of buffers that calls rotate among, so that none finds its data in the L2.
inline int buffers_for(std::size_t bytes_of_call) {
  return static_cast<int>(std::clamp<std::size_t>((std::size_t{512} << 20) / bytes_of_call, 1, 64));
}

inline void report(const char* what, const Shape& s, int warps, bool chosen, double us, double moved, double ceiling) {
  std::printf("%-22s [%lld, %lld]  %2d warps%s %9.2f us %8.1f MB %6.2f TB/s %5.1f %% of copy\n", what,
              static_cast<long long>(s.sequences), static_cast<long long>(s.tokens), warps, chosen ? ", chosen" : "",
              us, moved / 1e6, moved / us / 1e6, 100 * moved / (us * 1e-6) / ceiling);
  std::fflush(stdout);
}

// Reads the command line; --plans runs every number of warps. Returns false if the command line is wrong or there is no
// GPU.
inline bool read_options(int argc, char** argv, bool* every_plan) {
  return CommandLine().flag("plans", every_plan).read(argc, argv) && has_hopper();
}

}  // namespace rlk::bench
