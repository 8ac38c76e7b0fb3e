// Tests the host path of the HIP backend on the stand-in runtime: devices, module, launch, errors.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "hip/common/runtime.h"
#include "logprob_backend.h"
#include "logprob_reference.h"
#include "rlk/ops/logprob.h"

namespace logprob_test {
namespace {

// Sets an environment variable for a scope.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Setting() { unsetenv(name_); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* name_;
};

struct Call {
  Problem problem{3, 1000, DType::kBFloat16, 1};
  Result result{3};
  std::vector<unsigned char> workspace = std::vector<unsigned char>(1 << 16);

  void on(int device) {
    auto p = problem.params<rlk::LogprobParams>();
    result.point(&p);
    p.workspace = workspace.data();
    rlk::logprob(p, {rlk::DeviceType::kRocm, device}, 0);
  }
  void expect_right() {
    for (int i = 0; i < 3; ++i) expect_row(reference(problem, i), result, i, "host");
  }
};

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

int last_error_of_the_process() {
  void* runtime = dlopen("libamdhip64.so.6", RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<int (*)()>(dlsym(runtime, "hipGetLastError"))();
}

TEST(HipHost, EveryDeviceServes) {
  for (const int device : {0, 1, 0}) {
    Call call;
    call.on(device);
    call.expect_right();
  }
}

TEST(HipHost, ADeviceThatIsNotThereIsAnError) {
  Call call;
  EXPECT_EQ(message_of([&] { call.on(2); }), "HIP device index 2 of 2");
  EXPECT_EQ(message_of([&] { call.on(-1); }), "HIP device index -1 of 2");
  const Setting none("RLK_STANDIN_DEVICES", "0");
  EXPECT_EQ(message_of([&] { call.on(0); }), "HIP: no device: no ROCm-capable device is detected");
  EXPECT_THROW(call.on(0), rlk::Unsupported);
}

TEST(HipHost, AnotherArchitectureIsUnsupported) {
  // Uses its own device, since modules stay loaded.
  const Setting devices("RLK_STANDIN_DEVICES", "8"), arch("RLK_STANDIN_ARCH", "gfx1100");
  Call call;
  EXPECT_THROW(call.on(5), rlk::Unsupported);
  EXPECT_NE(message_of([&] { call.on(5); }).find("neither gfx90a nor gfx942"), std::string::npos);
}

TEST(HipHost, BothArchitecturesAreInTheBundle) {
  for (const char* name : {"gfx90a", "gfx942"}) {
    const Setting devices("RLK_STANDIN_DEVICES", "8"), arch("RLK_STANDIN_ARCH", name);
    Call call;
    call.on(name[4] == '0' ? 6 : 7);
    call.expect_right();
  }
}

// A launch without blocks is refused after the kernel is found. The stand-in searches only the module's code object.
TEST(HipHost, KernelsAreFoundInTheirOwnOperatorsCodeObject) {
  const rlk::hip::Runtime& runtime = rlk::hip::Runtime::get();
  for (const std::string kernel : {"rlk_linear_logprob_rows_vectors", "rlk_linear_tree_sum_bf16", "rlk_logprob_merge",
                                   "rlk_random_bits_words", "rlk_value_loss_moments_sums"}) {
    const auto launch = [&] { runtime.launch(0, kernel.c_str(), {0, 1, 64, 0}, 0); };
    EXPECT_EQ(message_of(launch), "HIP: " + kernel + ": invalid argument");
  }
  EXPECT_EQ(message_of([&] { runtime.launch(0, "rlk_nobodys", {0, 1, 64, 0}, 0); }), "HIP: no bundle has rlk_nobodys");
}

TEST(HipHost, FailuresNameTheFunctionAndTheNextCallWorks) {
  const Setting devices("RLK_STANDIN_DEVICES", "8");
  Call call;
  {
    const Setting fail("RLK_STANDIN_FAIL", "hipModuleLoadData");
    EXPECT_EQ(message_of([&] { call.on(3); }), "HIP: hipModuleLoadData: invalid argument");
  }
  {
    const Setting fail("RLK_STANDIN_FAIL", "hipModuleGetFunction");
    EXPECT_EQ(message_of([&] { call.on(3); }), "HIP: rlk_logprob_groups_moments_bf16: named symbol not found");
  }
  {
    const Setting fail("RLK_STANDIN_FAIL", "hipModuleLaunchKernel");
    EXPECT_EQ(message_of([&] { call.on(3); }), "HIP: rlk_logprob_groups_moments_bf16: unspecified launch failure");
  }
  {
    const Setting fail("RLK_STANDIN_FAIL", "hipGetDeviceCount");
    EXPECT_EQ(message_of([&] { call.on(3); }), "HIP: no device: no ROCm-capable device is detected");
  }
  for (const char* function : {"hipGetDevice", "hipSetDevice"}) {
    const Setting fail("RLK_STANDIN_FAIL", function);
    EXPECT_EQ(message_of([&] { call.on(3); }).rfind(std::string("HIP: ") + function + ": ", 0), 0u) << function;
  }
  EXPECT_EQ(last_error_of_the_process(), 0);  // otherwise the next launch of another library would be blamed
  call.on(3);
  call.expect_right();
}

TEST(HipHost, OnlyThePortableExponential) {
  Call call;
  call.problem.exp = rlk::Exp::kHardware;
  EXPECT_THROW(call.on(0), rlk::Unsupported);
}

TEST(HipHost, ManyRowsTakeSeveralLaunches) {
  constexpr int kRows = 66000;  // more rows than a grid's second dimension holds
  const int checked[] = {0, 1, 65534, 65535, 65536, kRows - 1};
  Problem p(kRows, 8, DType::kFloat32, 2);
  const auto targets = p.target;
  p.target.assign(kRows, -100);  // ignored rows take the emulation no time
  for (int i : checked) p.target[i] = targets[i];
  auto params = p.params<rlk::LogprobParams>();
  Result got(kRows);
  got.point(&params);
  run(params);
  for (int i : checked) expect_row(reference(p, i), got, i, "many rows");
}

}  // namespace
}  // namespace logprob_test
