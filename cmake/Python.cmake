# The extension module: nanobind, stable ABI from Python 3.12 on.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module OPTIONAL_COMPONENTS Development.SABIModule)
execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_installed COMMAND_ERROR_IS_FATAL ANY)
# nanobind is built from a copy: pip puts it into a folder with a new name each time, which a compiler cache does not
# recognise.
get_filename_component(nanobind_installed "${nanobind_installed}" DIRECTORY)
file(COPY "${nanobind_installed}/" DESTINATION "${PROJECT_BINARY_DIR}/nanobind" PATTERN "__pycache__" EXCLUDE)
set(nanobind_ROOT "${PROJECT_BINARY_DIR}/nanobind/cmake")
find_package(nanobind CONFIG REQUIRED)
file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/bindings/*.cpp")
nanobind_add_module(_C NB_STATIC STABLE_ABI ${sources})
target_link_libraries(_C PRIVATE rlk_core)
install(TARGETS _C LIBRARY DESTINATION rl_kernel_native)
# The pages that docstrings name.
install(DIRECTORY "${PROJECT_SOURCE_DIR}/docs/" DESTINATION rl_kernel_native/docs
  FILES_MATCHING PATTERN "*.md" PATTERN "reports" EXCLUDE)

# nanobind and its hash table are linked in, and their licenses require that they are passed on.
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
