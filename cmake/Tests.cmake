# C++ tests under ctest, one executable per operator or header family.
find_package(GTest REQUIRED)
include(GoogleTest)

function(rlk_add_test name)
  add_executable(${name} tests/${name}.cpp)
  target_link_libraries(${name} PRIVATE rlk_core GTest::gtest GTest::gtest_main)
  target_compile_options(${name} PRIVATE -Wno-psabi)
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/cpp" "${PROJECT_SOURCE_DIR}/tests")
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60)
endfunction()

rlk_add_test(test_isa)
rlk_add_test(test_logprob)
rlk_add_test(test_logprob_backward)
rlk_add_test(test_math)
rlk_add_test(test_models)
rlk_add_test(test_thread_pool)

if(RLK_WITH_CUDA)
  # A GPU test is built wherever CUDA is, and skips itself (exit code 77) where there is no device.
  add_executable(gpu_test_models tests/gpu/test_models.cu)
  set_target_properties(gpu_test_models PROPERTIES CUDA_ARCHITECTURES 90a-real)
  target_link_libraries(gpu_test_models PRIVATE rlk_options CUDA::cudart_static)
  add_executable(gpu_test_few_multiprocessors tests/gpu/test_few_multiprocessors.cpp)
  target_link_libraries(gpu_test_few_multiprocessors PRIVATE rlk_core)
  foreach(test gpu_test_models gpu_test_few_multiprocessors)
    add_test(NAME ${test} COMMAND ${test})
    set_tests_properties(${test} PROPERTIES LABELS gpu SKIP_RETURN_CODE 77)
  endforeach()
endif()

if(RLK_WITH_HIP)
  # A libamdhip64 whose devices are the host: kernels run under the emulation, the rest is the real path.
  add_library(hip_standin SHARED tests/hip_standin.cpp hip/emulation/wave_emulation.cpp)
  target_link_libraries(hip_standin PRIVATE rlk_options)
  target_compile_options(hip_standin PRIVATE -Wno-psabi -Wno-unknown-pragmas)
  set_target_properties(hip_standin PROPERTIES
    OUTPUT_NAME amdhip64 SOVERSION 6 LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/hip_standin")

  function(rlk_add_hip_test name source)
    add_executable(${name} tests/${source})
    target_link_libraries(${name} PRIVATE rlk_core GTest::gtest GTest::gtest_main)
    target_compile_definitions(${name} PRIVATE RLK_TEST_HIP=1)
    target_compile_options(${name} PRIVATE -Wno-psabi -Wno-unknown-pragmas)
    target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/cpp" "${PROJECT_SOURCE_DIR}/tests")
    add_dependencies(${name} hip_standin)
    gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 TEST_PREFIX hip.
      PROPERTIES ENVIRONMENT "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/hip_standin" LABELS hip)
  endfunction()
  rlk_add_hip_test(test_hip_host test_hip_host.cpp)
  rlk_add_hip_test(test_hip_logprob test_logprob.cpp)
  rlk_add_hip_test(test_hip_logprob_backward test_logprob_backward.cpp)
  rlk_add_hip_test(test_hip_emulation test_hip_emulation.cpp)
  target_sources(test_hip_emulation PRIVATE hip/emulation/wave_emulation.cpp)
  # The tiles for the GPUs: their matrix instructions must be in the disassembly.
  rlk_compile_hip(tiles "${PROJECT_SOURCE_DIR}/tests/hip_tiles.hip" "v_mfma_f32_32x32x8;v_mfma_f32_16x16x16" tiles_objects)
  add_custom_target(hip_tiles ALL DEPENDS ${tiles_objects})
endif()
