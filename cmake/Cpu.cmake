# The CPU backend: row kernels once per instruction set, chosen at run time.
set(lanes_flags -O3 -fno-math-errno -fno-trapping-math -Wno-psabi)
set(isa_baseline "")
set(isa_avx2 -mavx2 -mfma -mf16c)
set(isa_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c)

set(isas baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  list(APPEND isas avx2 avx512)
endif()

add_library(rlk_cpu STATIC
  cpp/cpu/isa.cpp cpp/cpu/linear.cpp cpp/cpu/linear_product.cpp cpp/cpu/logprob.cpp cpp/cpu/policy_loss.cpp
  cpp/cpu/rms_norm.cpp cpp/cpu/rope.cpp
  cpp/cpu/silu_mul.cpp
  cpp/cpu/thread_pool.cpp)
target_link_libraries(rlk_cpu PUBLIC rlk_options)
target_include_directories(rlk_cpu PRIVATE "${PROJECT_SOURCE_DIR}/cpp")
set_source_files_properties(cpp/cpu/logprob.cpp PROPERTIES COMPILE_OPTIONS "${lanes_flags}")
foreach(isa IN LISTS isas)
  add_library(rlk_cpu_${isa} OBJECT cpp/cpu/linear_lanes.cpp cpp/cpu/logprob_lanes.cpp cpp/cpu/policy_loss_lanes.cpp
    cpp/cpu/rms_norm_lanes.cpp
    cpp/cpu/rope_lanes.cpp cpp/cpu/silu_mul_lanes.cpp)
  target_link_libraries(rlk_cpu_${isa} PRIVATE rlk_options)
  target_include_directories(rlk_cpu_${isa} PRIVATE "${PROJECT_SOURCE_DIR}/cpp")
  target_compile_definitions(rlk_cpu_${isa} PRIVATE RLK_CPU_ISA=${isa})
  target_compile_options(rlk_cpu_${isa} PRIVATE ${lanes_flags} ${isa_${isa}})
  target_link_libraries(rlk_cpu PRIVATE rlk_cpu_${isa})
endforeach()
