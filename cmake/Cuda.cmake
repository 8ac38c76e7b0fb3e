# CUDA backend: one file, one architecture, one object library per architecture; spills and stack frames are errors.
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
find_package(CUDAToolkit REQUIRED)

add_library(rlk_cuda STATIC cuda/common/launch.cpp cuda/common/tensor_map.cpp cuda/logprob/logprob.cpp
  cuda/linear/linear.cpp cuda/linear/gemm_plan_sm90.cpp cuda/linear/cublaslt.cpp cuda/linear/cublaslt_records.cpp
  cuda/policy_loss/policy_loss.cpp
  cuda/rms_norm/rms_norm.cpp cuda/rope/rope.cpp cuda/silu_mul/silu_mul.cpp)
target_link_libraries(rlk_cuda PUBLIC rlk_options CUDA::cudart_static ${CMAKE_DL_LIBS})

# 80 keeps its PTX, for later architectures; 90a code runs on compute capability 9.0 alone.
function(rlk_add_cuda_kernels name architectures)
  add_library(${name} OBJECT ${ARGN})
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
  rlk_add_cuda_kernels(rlk_cuda_sm80 80 cuda/logprob/logprob_sm80.cu cuda/logprob/logprob_backward_sm80.cu
    cuda/linear/gemm_sm80.cu cuda/linear/linear_bias_grad_sm80.cu cuda/linear/tree_sum_sm80.cu
    cuda/rms_norm/rms_norm_sm80.cu cuda/rms_norm/rms_norm_backward_sm80.cu
    cuda/policy_loss/policy_loss_sm80.cu
    cuda/rope/rope_sm80.cu cuda/silu_mul/silu_mul_sm80.cu cuda/silu_mul/silu_mul_backward_sm80.cu)
endif()
if("90a" IN_LIST RLK_CUDA_ARCHITECTURES)
  list(APPEND RLK_ARCHITECTURES sm_90a)
  rlk_add_cuda_kernels(rlk_cuda_sm90 90a-real cuda/logprob/logprob_sm90.cu cuda/logprob/logprob_backward_sm90.cu
    cuda/linear/gemm_bf16_sm90.cu cuda/linear/gemm_f16_sm90.cu
    cuda/rms_norm/rms_norm_sm90.cu cuda/rms_norm/rms_norm_backward_sm90.cu
    cuda/policy_loss/policy_loss_sm90.cu
    cuda/rope/rope_sm90.cu cuda/silu_mul/silu_mul_sm90.cu cuda/silu_mul/silu_mul_backward_sm90.cu)
endif()
list(JOIN RLK_ARCHITECTURES " " RLK_ARCHITECTURES)
