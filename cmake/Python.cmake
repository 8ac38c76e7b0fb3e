# The extension module: nanobind, stable ABI from Python 3.12 on.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module OPTIONAL_COMPONENTS Development.SABIModule)
execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)
nanobind_add_module(_C NB_STATIC STABLE_ABI
  cpp/bindings/module.cpp cpp/bindings/ndarray.cpp cpp/bindings/torch_state.cpp
  cpp/bindings/linear_args.cpp cpp/bindings/linear.cpp cpp/bindings/logprob_args.cpp cpp/bindings/logprob.cpp)
target_link_libraries(_C PRIVATE rlk_core)
install(TARGETS _C LIBRARY DESTINATION rl_kernel_native)
