// Kernels with known results for test_hip_isa.cpp, and some with faults that hip/emulation/isa must report.
#define RLK_KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(128, 128))) void
using u32 = unsigned;
using u64 = unsigned long long;
using i64 = long long;

__attribute__((device)) static int thread() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
__attribute__((device)) static int block() { return static_cast<int>(__builtin_amdgcn_workgroup_id_x()); }
__attribute__((device)) static void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

RLK_KERNEL isa_floats(const float* a, const float* b, float* out, int n) {
  const int i = thread() + 128 * block();
  if (i >= n) return;
  const float x = a[i], y = b[i];
  out[i] = x / y;
  out[n + i] = __builtin_sqrtf(x);
  out[2 * n + i] = __builtin_fmaf(x, y, x);
  out[3 * n + i] = static_cast<float>(static_cast<_Float16>(x));
  out[4 * n + i] = __builtin_rintf(x);
  out[5 * n + i] = __builtin_floorf(y);
  out[6 * n + i] = x * y;
  out[7 * n + i] = x + y;
  out[8 * n + i] = static_cast<float>(static_cast<double>(x) * static_cast<double>(y) + 1.0);
  out[9 * n + i] = __builtin_fminf(x, y);
}

RLK_KERNEL isa_integers(const i64* a, const i64* b, i64* out, int n) {
  const int i = thread() + 128 * block();
  if (i >= n) return;
  const i64 x = a[i], y = b[i] | 1;
  const int by = static_cast<int>(y & 63), narrow = static_cast<int>(y) | 1;
  out[i] = x / y;
  out[n + i] = x % y;
  out[2 * n + i] = static_cast<i64>(static_cast<u64>(x) * static_cast<u64>(y));
  out[3 * n + i] = static_cast<i64>(static_cast<u64>(x) >> by);
  out[4 * n + i] = x >> by;
  out[5 * n + i] = __builtin_popcountll(x) + 100 * __builtin_clzll(x | 1) + 10000 * __builtin_ctzll(x | 1ll << 62);
  out[6 * n + i] = static_cast<int>(x) / narrow;
  out[7 * n + i] = static_cast<u32>(x) % static_cast<u32>(narrow);
  out[8 * n + i] = static_cast<unsigned char>(x >> 8) * static_cast<short>(y) + static_cast<signed char>(x >> 16);
}

// Reverses a wave, counts its votes, runs a loop of another length in each lane, reverses the block, and sums by
// atomics.
RLK_KERNEL isa_waves(const int* a, int* out, int n) {
  __attribute__((shared)) static int lds[128];
  const int t = thread(), i = t + 128 * block();
  int x = i < n ? a[i] : 0;
  x = __builtin_amdgcn_ds_bpermute(4 * (63 - t % 64), x);
  const u64 votes = __builtin_amdgcn_ballot_w64(x & 1);
  int sum = 0;
  for (int k = 0; k < (x & 31); ++k) sum += k ^ x;
  lds[t] = sum;
  barrier();
  if (i >= n) return;
  out[i] = lds[127 - t];
  out[n + i] = static_cast<int>(votes);
  out[2 * n + i] = static_cast<int>(votes >> 32);
  __hip_atomic_fetch_add(&out[3 * n], x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

RLK_KERNEL isa_without_barrier(int* out) {
  __attribute__((shared)) static int lds[128];
  lds[thread()] = thread();
  out[thread()] = lds[(thread() + 64) & 127];
}
RLK_KERNEL isa_blocks_meet(int* out) {
  out[0] = thread() + 128 * block();
  if (out[1] == 12345) out[2] = 1;
  out[1] = block();
}
RLK_KERNEL isa_unwritten(int* out) {
  __attribute__((shared)) static int lds[128];
  if (thread() < 64) lds[thread()] = thread();
  __builtin_amdgcn_s_barrier();
  out[thread()] = lds[thread() ^ 64];
}
RLK_KERNEL isa_beyond(int* out, int at) { out[at + thread()] = 1; }
RLK_KERNEL isa_block_size(int* out) {
  using Shorts = const __attribute__((address_space(4))) unsigned short*;
  const auto implicit = (Shorts)__builtin_amdgcn_implicitarg_ptr();
  out[thread()] = implicit[6];
}
