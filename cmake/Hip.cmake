# HIP backend: device code by clang for gfx90a and gfx942, an embedded bundle for each operator; no ROCm is needed to
# build. Spills, scratch memory, flat memory instructions and a disassembly without the expected ones are errors.
enable_language(ASM)
find_program(RLK_HIP_CLANG NAMES clang++-19 clang++-20 clang++-21 HINTS /opt/rocm/llvm/bin REQUIRED
             DOC "clang that compiles HIP for gfx90a and gfx942, 19 or later")
get_filename_component(RLK_HIP_CLANG_REAL "${RLK_HIP_CLANG}" REALPATH)
get_filename_component(RLK_HIP_LLVM "${RLK_HIP_CLANG_REAL}" DIRECTORY)
find_program(RLK_HIP_BUNDLER clang-offload-bundler HINTS "${RLK_HIP_LLVM}" NO_DEFAULT_PATH REQUIRED)
find_program(RLK_HIP_OBJDUMP llvm-objdump HINTS "${RLK_HIP_LLVM}" NO_DEFAULT_PATH REQUIRED)

set(RLK_HIP_ARCHITECTURES gfx90a gfx942)
list(JOIN RLK_HIP_ARCHITECTURES " " RLK_ARCHITECTURES)
file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/hip")

# Device code uses no HIP headers: every device function is ours or a builtin of the compiler. clang's own wrappers of
# the standard headers expect the two macros, which HIP's headers would define.
set(RLK_HIP_FLAGS
  -x hip --cuda-device-only --no-gpu-bundle-output -nogpulib -nogpuinc -include stdlib.h
  "-D__host__=__attribute__((host))" "-D__device__=__attribute__((device))"
  -std=c++20 -O3 -ffp-contract=off -Wall -Wextra -I${PROJECT_SOURCE_DIR} -I${PROJECT_SOURCE_DIR}/cpp/include)
set(RLK_HIP_DEVICE_CODE "" CACHE PATH "The hip folder of another build of these sources, whose device code is taken")
# Compiles `source` for every architecture. The disassembly must have each of `instructions`. The objects' paths go into
# `objects`.
function(rlk_compile_hip name source instructions objects)
  set(made "")
  foreach(arch IN LISTS RLK_HIP_ARCHITECTURES)
    set(object "${PROJECT_BINARY_DIR}/hip/${name}.${arch}.hsaco")
    list(APPEND made "${object}")
    if(RLK_HIP_DEVICE_CODE)
      set(there "${RLK_HIP_DEVICE_CODE}/${name}.${arch}.hsaco")
      add_custom_command(OUTPUT "${object}" COMMAND "${CMAKE_COMMAND}" -E copy "${there}" "${object}" DEPENDS "${there}")
      continue()
    endif()
    add_custom_command(
      OUTPUT "${object}"
      COMMAND "${CMAKE_COMMAND}" -DCLANG=${RLK_HIP_CLANG} -DOBJDUMP=${RLK_HIP_OBJDUMP} -DARCH=${arch}
              -DSOURCE=${source} -DOBJECT=${object} "-DFLAGS=${RLK_HIP_FLAGS}" "-DINSTRUCTIONS=${instructions}"
              -P "${PROJECT_SOURCE_DIR}/cmake/CompileHip.cmake"
      DEPENDS "${source}" "${PROJECT_SOURCE_DIR}/cmake/CompileHip.cmake"
      DEPFILE "${object}.d"
      COMMENT "${name} for ${arch}" VERBATIM)
  endforeach()
  set(${objects} "${made}" PARENT_SCOPE)
endfunction()

# Compiles `source` as above and puts the objects into one bundle, whose path goes into `bundle`.
function(rlk_bundle_hip_kernels name source instructions bundle)
  rlk_compile_hip(${name} "${source}" "${instructions}" objects)
  set(targets "host-x86_64-unknown-linux-gnu")
  set(inputs "-input=/dev/null")
  foreach(arch object IN ZIP_LISTS RLK_HIP_ARCHITECTURES objects)
    list(APPEND inputs "-input=${object}")
    string(APPEND targets ",hipv4-amdgcn-amd-amdhsa--${arch}")
  endforeach()
  set(made "${PROJECT_BINARY_DIR}/hip/${name}.hipfb")
  add_custom_command(
    OUTPUT "${made}"
    COMMAND "${RLK_HIP_BUNDLER}" -type=o -bundle-align=4096 "-targets=${targets}" ${inputs} "-output=${made}"
    DEPENDS ${objects} VERBATIM)
  set(${bundle} "${made}" PARENT_SCOPE)
endfunction()

# The kernels of an operator, hip/<op>/<op>_kernels.hip, in one bundle.
set(RLK_HIP_BUNDLES "")  # the entries of bundles.S.in for each bundle
set(RLK_HIP_NUM_BUNDLES 0)
set(RLK_HIP_OPS "")
set(bundle_files "")
function(rlk_bundle_hip op)
  rlk_bundle_hip_kernels(${op} "${PROJECT_SOURCE_DIR}/hip/${op}/${op}_kernels.hip" "${ARGN}" bundle)
  string(APPEND RLK_HIP_BUNDLES "    rlk_hip_bundle ${op}, \"${bundle}\"\n")
  set(RLK_HIP_BUNDLES "${RLK_HIP_BUNDLES}" PARENT_SCOPE)
  math(EXPR count "${RLK_HIP_NUM_BUNDLES} + 1")
  set(RLK_HIP_NUM_BUNDLES ${count} PARENT_SCOPE)
  set(RLK_HIP_OPS ${RLK_HIP_OPS} ${op} PARENT_SCOPE)
  set(bundle_files ${bundle_files} "${bundle}" PARENT_SCOPE)
endfunction()

rlk_bundle_hip(attention "ds_read_b128;global_load_dwordx4;ds_bpermute_b32")
rlk_bundle_hip(covariance_mask "global_load_dword;global_store_dword;ds_bpermute_b32;ds_add_u32;global_atomic_add")
rlk_bundle_hip(elementwise "global_load_dwordx4;global_store_dwordx4")
rlk_bundle_hip(embedding "global_load_dwordx4;global_store_dwordx4")
rlk_bundle_hip(gae "ds_bpermute_b32")
rlk_bundle_hip(group_advantage "ds_bpermute_b32")
rlk_bundle_hip(importance_weights "global_load_dword;global_store_dword;ds_bpermute_b32")
rlk_bundle_hip(kl "global_load_dword;global_store_dword")
rlk_bundle_hip(kv_cache_append "global_load_dwordx4;global_store_dwordx4")
rlk_bundle_hip(linear
  "v_mfma_f32_32x32x8_?bf16;v_mfma_f32_32x32x8_?f16;v_mfma_f32_16x16x16_?bf16;v_mfma_f32_16x16x16_?f16"
  "ds_write2?(st64)?_b64;ds_read2?(st64)?_b64;global_load_dwordx4;global_load_dwordx2")
rlk_bundle_hip(linear_logprob "global_load_dwordx4;global_store_dwordx4")
rlk_bundle_hip(logprob "ds_read_b64;ds_read_b128;ds_bpermute_b32")
rlk_bundle_hip(masked_whiten "ds_bpermute_b32")
rlk_bundle_hip(mismatch_metrics "global_load_dword;ds_bpermute_b32")
rlk_bundle_hip(optimal_token_baseline "global_load_dword;global_store_dword")
rlk_bundle_hip(policy_loss "global_load_dwordx4;global_store_dwordx4;ds_bpermute_b32")
rlk_bundle_hip(random_bits "global_load_dwordx2;global_store_dwordx")
rlk_bundle_hip(rms_norm "global_load_dwordx4;global_store_dwordx4;ds_bpermute_b32")
rlk_bundle_hip(pack "global_load_dwordx4;global_store_dwordx4")
rlk_bundle_hip(preference_loss "global_load_dword;global_store_dword")
rlk_bundle_hip(sample "global_load_dword;ds_bpermute_b32;ds_add_u32;ds_add_u64")
rlk_bundle_hip(scatter_rewards "global_load_dword;global_store_dword;ds_bpermute_b32")
rlk_bundle_hip(sequence_logprob "global_load_dword;ds_bpermute_b32")
rlk_bundle_hip(rope "global_load_dwordx4;global_store_dwordx4")
rlk_bundle_hip(shift_labels_packed "global_load_dword;global_store_byte")
rlk_bundle_hip(value_loss "global_load_dword;global_store_dword;ds_bpermute_b32")
configure_file("${PROJECT_SOURCE_DIR}/hip/common/bundles.S.in" "${PROJECT_BINARY_DIR}/hip/bundles.S" @ONLY)
set_source_files_properties("${PROJECT_BINARY_DIR}/hip/bundles.S" PROPERTIES OBJECT_DEPENDS "${bundle_files}")

file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/hip/*/*.cpp")
list(FILTER sources EXCLUDE REGEX "/hip/emulation/")
add_library(rlk_hip STATIC ${sources} "${PROJECT_BINARY_DIR}/hip/bundles.S")
target_link_libraries(rlk_hip PUBLIC rlk_options ${CMAKE_DL_LIBS})
if(RLK_BUILD_TESTS)
  target_compile_definitions(rlk_hip PRIVATE RLK_HIP_ARGUMENT_SIZES)
endif()
