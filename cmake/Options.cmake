# Flags that every target shares. The bits depend on two of them: no contraction, no fast math.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")

find_package(Threads REQUIRED)
add_library(rlk_options INTERFACE)
target_include_directories(rlk_options INTERFACE
  "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/cpp/include" "${PROJECT_BINARY_DIR}/include")
target_compile_options(rlk_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off;-fvisibility=hidden;-Wall;-Wextra>)
target_link_libraries(rlk_options INTERFACE Threads::Threads)

# ccache rewrites paths relative to the build folder. So a build in any other folder two levels below the sources, in
# any copy of them, finds the cached objects.
find_program(CCACHE ccache)
if(CCACHE)
  set(launcher "${CMAKE_COMMAND}" -E env
    "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1 CCACHE_ABSSTDERR=1 "${CCACHE}")
  set(CMAKE_CXX_COMPILER_LAUNCHER "${launcher}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${launcher}")
endif()
