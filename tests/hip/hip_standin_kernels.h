// The kernels that the stand-in for libamdhip64 runs, by name. The kernels are split over files hip_standin_<part>.cpp.
// With all kernels in one file, one core would compile them while the other cores wait.
#pragma once

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>

namespace rlk::hip::standin {

// Calls a kernel with arguments as hipModuleLaunchKernel gets them: a pointer to each argument.
using Kernel = std::function<std::function<void()>(void**)>;
template <class... Args>
Kernel kernel_of(void (*kernel)(Args...)) {
  return [kernel](void** pointers) -> std::function<void()> {
    return [kernel, arguments = [&]<std::size_t... i>(std::index_sequence<i...>) {
      return std::tuple<Args...>(*static_cast<Args*>(pointers[i])...);
    }(std::index_sequence_for<Args...>{})] { std::apply(kernel, arguments); };
  };
}

// The kernels of each operator by name; most exist for several element types.
struct Table {
  Table(std::initializer_list<std::pair<const std::string_view, Kernel>> kernels) { all().insert(kernels); }
  static std::map<std::string_view, Kernel>& all();
};
#define RLK_OF(name) \
  { #name, kernel_of(&name) }
#define RLK_OF_HALVES(name) RLK_OF(name##_bf16), RLK_OF(name##_f16)
#define RLK_OF_FLOATS(name) RLK_OF_HALVES(name), RLK_OF(name##_f32)

#define RLK_OF_MOMENTS(name) \
  RLK_OF(name##_moments_tokens), RLK_OF(name##_moments_sums), RLK_OF(name##_moments_few), RLK_OF(name##_moments_results)

#define RLK_OF_COPIES(name) RLK_OF(name##_vectors), RLK_OF(name##_words), RLK_OF(name##_halves)

}  // namespace rlk::hip::standin
