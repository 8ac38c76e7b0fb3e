# The extension module: nanobind, stable ABI from Python 3.12 on.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module OPTIONAL_COMPONENTS Development.SABIModule)
execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)
nanobind_add_module(_C NB_STATIC STABLE_ABI
  cpp/bindings/module.cpp cpp/bindings/ndarray.cpp cpp/bindings/torch_state.cpp
  cpp/bindings/linear_args.cpp cpp/bindings/linear.cpp cpp/bindings/logprob_args.cpp cpp/bindings/logprob.cpp
  cpp/bindings/policy_loss.cpp cpp/bindings/token_args.cpp
  cpp/bindings/rms_norm.cpp cpp/bindings/rope.cpp cpp/bindings/silu_mul.cpp)
target_link_libraries(_C PRIVATE rlk_core)
install(TARGETS _C LIBRARY DESTINATION rl_kernel_native)

# nanobind is linked in, with a hash table of its own, and their licenses ask to be passed on.
execute_process(COMMAND "${Python_EXECUTABLE}" -c
  "import importlib.metadata as m; d = m.distribution('nanobind'); print(*(d.locate_file(f) for f in d.files if f.name == 'LICENSE'))"
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE RLK_NANOBIND_LICENSE COMMAND_ERROR_IS_FATAL ANY)
if(EXISTS "${RLK_NANOBIND_LICENSE}")
  file(READ "${RLK_NANOBIND_LICENSE}" RLK_LICENSES)
  file(READ "${nanobind_ROOT}/../ext/robin_map/include/tsl/robin_hash.h" RLK_HASH_TABLE)
  string(REGEX MATCH "MIT License.*\n \\*/" RLK_HASH_TABLE_LICENSE "${RLK_HASH_TABLE}")
  string(REGEX REPLACE "\n \\*/.*" "" RLK_HASH_TABLE_LICENSE "${RLK_HASH_TABLE_LICENSE}")
  file(WRITE "${PROJECT_BINARY_DIR}/nanobind.txt" "${RLK_LICENSES}\n\nrobin_map:\n${RLK_HASH_TABLE_LICENSE}\n")
  install(FILES "${PROJECT_BINARY_DIR}/nanobind.txt" DESTINATION rl_kernel_native/licenses)
endif()
