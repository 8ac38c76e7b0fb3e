# CUDA backend: one file, one architecture, one object library per architecture; spills and stack frames are errors.
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
find_package(CUDAToolkit REQUIRED)

file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/cuda/*/*.cpp")
add_library(rlk_cuda STATIC ${sources})
target_link_libraries(rlk_cuda PUBLIC rlk_options CUDA::cudart_static ${CMAKE_DL_LIBS})

# 80 keeps its PTX, for later architectures; 90a code runs on compute capability 9.0 alone.
function(rlk_add_cuda_kernels arch architectures)
  set(name rlk_cuda_${arch})
  file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/cuda/*/*_${arch}.cu")
  add_library(${name} OBJECT ${sources})
  target_link_libraries(${name} PRIVATE rlk_options CUDA::cudart_static)
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${architectures}")
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:
    --expt-relaxed-constexpr -Xcompiler=-ffp-contract=off,-fvisibility=hidden
    -Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error>)
  target_link_libraries(rlk_cuda PRIVATE ${name})
endfunction()

set(RLK_ARCHITECTURES "")
if("80" IN_LIST RLK_CUDA_ARCHITECTURES)
  list(APPEND RLK_ARCHITECTURES sm_80)
  rlk_add_cuda_kernels(sm80 80)
endif()
if("90a" IN_LIST RLK_CUDA_ARCHITECTURES)
  list(APPEND RLK_ARCHITECTURES sm_90a)
  rlk_add_cuda_kernels(sm90 90a-real)
endif()
list(JOIN RLK_ARCHITECTURES " " RLK_ARCHITECTURES)
