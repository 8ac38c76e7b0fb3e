# CUDA backend: each kernel file is compiled once per architecture, into one object library for each, so a translation unit
# holds one architecture's machine code; spills and stack frames are errors.
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
find_package(CUDAToolkit REQUIRED)

file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/cuda/*/*.cpp")
add_library(rlk_cuda STATIC ${sources})
target_link_libraries(rlk_cuda PUBLIC rlk_options CUDA::cudart_static ${CMAKE_DL_LIBS})

# Older compilers spill registers of some kernels, and say so.
set(spills_are_errors "")
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  set(spills_are_errors ",--warning-as-error")
endif()

# Each of these files is compiled once for each part behind its name, which the file calls RLK_PART. So compilers share
# the work.
set(files_in_parts
  "attention/attention_wgmma_sm90.cu kPadded kWide kTall"
  "attention/attention_mixed_wgmma_sm90.cu kPadded kWide"
  "attention/attention_backward_wgmma_sm90.cu kPadded kWide"
  "linear/gemm_tiles_sm90.cu Bf16 Fp16"
  "linear_logprob/linear_logprob_sm90.cu Bf16 Fp16"
  "linear_logprob/logit_gradients_sm90.cu Bf16 Fp16"
  "sample/head_sm90.cu Bf16 Fp16"
  "sample/sample_edited.cu Fp32,Exp::kHardware Fp32,Exp::kPortable"
  "sample/sample_rows.cu Fp32,Exp::kHardware Fp32,Exp::kPortable Bf16,Exp::kHardware Bf16,Exp::kPortable \
    Fp16,Exp::kHardware Fp16,Exp::kPortable")
set(whole_files "")
set(part_files "")
foreach(parts IN LISTS files_in_parts)
  separate_arguments(parts UNIX_COMMAND "${parts}")
  list(POP_FRONT parts file)
  list(APPEND whole_files "${PROJECT_SOURCE_DIR}/cuda/${file}")
  get_filename_component(name "${file}" NAME)
  foreach(part IN LISTS parts)
    string(MAKE_C_IDENTIFIER "${part}" folder)
    set(source "${PROJECT_BINARY_DIR}/cuda_parts/${folder}/${name}")
    file(CONFIGURE OUTPUT "${source}" CONTENT "#define RLK_PART ${part}\n#include \"cuda/${file}\"\n")
    list(APPEND part_files "${source}")
  endforeach()
endforeach()

# 80 keeps its PTX, for later architectures; 90a code runs on compute capability 9.0 alone. A file <name>_sm90.cu has
# instructions of that architecture and is compiled for it alone. Every other file is compiled for each architecture, in
# a namespace per architecture.
function(rlk_add_cuda_kernels arch architectures)
  set(name rlk_cuda_${arch})
  file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/cuda/*/*.cu")
  list(REMOVE_ITEM sources ${whole_files})
  list(APPEND sources ${part_files})
  if(NOT arch STREQUAL "sm90")
    list(FILTER sources EXCLUDE REGEX "_sm90\\.cu$")
  endif()
  add_library(${name} OBJECT ${sources})
  target_link_libraries(${name} PRIVATE rlk_options CUDA::cudart_static)
  target_compile_definitions(${name} PRIVATE RLK_CUDA_ARCH=${arch} RLK_CUDA_SM90=$<STREQUAL:${arch},sm90>)
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${architectures}")
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:
    --expt-relaxed-constexpr -Xcompiler=-ffp-contract=off,-fvisibility=hidden
    -Xptxas=--warn-on-spills,--warn-on-local-memory-usage${spills_are_errors}>)
  target_link_libraries(rlk_cuda PRIVATE ${name})
endfunction()

set(RLK_ARCHITECTURES "sm_80 sm_90a")
rlk_add_cuda_kernels(sm80 80)
rlk_add_cuda_kernels(sm90 90a-real)

# Kernels for compute capability 8.0 that no Hopper GPU reaches: none.
set(RLK_CUDA_SM80_ALONE "")
find_program(RLK_CUOBJDUMP cuobjdump HINTS "${CUDAToolkit_BIN_DIR}")
if(RLK_CUOBJDUMP)
  foreach(arch IN ITEMS sm80 sm90)
    file(GENERATE OUTPUT "${PROJECT_BINARY_DIR}/cuda_${arch}.txt" CONTENT "$<JOIN:$<TARGET_OBJECTS:rlk_cuda_${arch}>,\n>\n")
  endforeach()
  set(code "${PROJECT_BINARY_DIR}/cuda_code.txt")
  add_custom_command(
    OUTPUT "${code}"
    COMMAND "${CMAKE_COMMAND}" -DCUOBJDUMP=${RLK_CUOBJDUMP} -DSM80=${PROJECT_BINARY_DIR}/cuda_sm80.txt
            -DSM90=${PROJECT_BINARY_DIR}/cuda_sm90.txt "-DALONE=${RLK_CUDA_SM80_ALONE}" -DRESULT=${code}
            -P "${PROJECT_SOURCE_DIR}/cmake/CheckCudaCode.cmake"
    DEPENDS $<TARGET_OBJECTS:rlk_cuda_sm80> $<TARGET_OBJECTS:rlk_cuda_sm90> "${PROJECT_SOURCE_DIR}/cmake/CheckCudaCode.cmake"
    COMMENT "Every kernel has code for Hopper" VERBATIM)
  add_custom_target(rlk_cuda_code ALL DEPENDS "${code}")
elseif(NOT RLK_CUOBJDUMP)
  message(STATUS "cuobjdump not found: that every kernel has code for Hopper is not checked")
endif()
