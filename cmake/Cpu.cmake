# The CPU backend: row kernels are compiled once per instruction set and chosen at run time.
set(lanes_flags -fno-math-errno -fno-trapping-math -Wno-psabi)
set(isa_baseline "")
set(isa_avx2 -mavx2 -mfma -mf16c)
set(isa_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c)

set(isas baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  list(APPEND isas avx2 avx512)
  # On x86-64 the baseline serves only CPUs without AVX2, and gcc takes half as long again at -O3.
  set(isa_baseline $<$<CONFIG:Release>:-O2>)
endif()

file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/cpu/*.cpp")
set(simd_sources ${sources})
list(FILTER simd_sources INCLUDE REGEX "_simd\\.cpp$")
list(REMOVE_ITEM sources ${simd_sources})
add_library(rlk_cpu STATIC ${sources})
target_link_libraries(rlk_cpu PUBLIC rlk_options)
set_source_files_properties(cpu/logprob.cpp cpu/sequence_logprob.cpp PROPERTIES COMPILE_OPTIONS "${lanes_flags}")
# Under the sanitizers these files compile at -O1 in half the time, and tests take about as long.
foreach(isa IN LISTS isas)
  add_library(rlk_cpu_${isa} OBJECT ${simd_sources})
  target_link_libraries(rlk_cpu_${isa} PRIVATE rlk_options)
  target_compile_definitions(rlk_cpu_${isa} PRIVATE RLK_CPU_ISA=${isa})
  target_compile_options(rlk_cpu_${isa} PRIVATE ${lanes_flags} ${isa_${isa}} $<$<CONFIG:Sanitize>:-O1>)
  target_link_libraries(rlk_cpu PRIVATE rlk_cpu_${isa})
  # Without optimisation, and under the sanitizers, compilers emit more functions.
  if(CMAKE_NM AND CMAKE_SYSTEM_NAME STREQUAL "Linux" AND NOT CMAKE_BUILD_TYPE MATCHES "Debug|Sanitize")
    set(list "${PROJECT_BINARY_DIR}/cpu_${isa}.txt")
    set(code "${PROJECT_BINARY_DIR}/cpu_${isa}_code.txt")
    set(script "${PROJECT_SOURCE_DIR}/cmake/CheckSimdCode.cmake")
    file(GENERATE OUTPUT "${list}" CONTENT "$<JOIN:$<TARGET_OBJECTS:rlk_cpu_${isa}>,\n>\n")
    add_custom_command(
      OUTPUT "${code}"
      COMMAND "${CMAKE_COMMAND}" -DNM=${CMAKE_NM} -DISA=${isa} -DOBJECTS=${list} -DRESULT=${code} -P "${script}"
      DEPENDS $<TARGET_OBJECTS:rlk_cpu_${isa}> "${script}"
      COMMENT "Functions of ${isa} stay in its files" VERBATIM)
    add_custom_target(rlk_cpu_${isa}_code ALL DEPENDS "${code}")
    add_dependencies(rlk_cpu rlk_cpu_${isa}_code)
  endif()
endforeach()
