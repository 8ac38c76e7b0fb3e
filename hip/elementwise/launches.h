// Launch shapes and kernel names of elementwise operators, shared by the host and the kernels.
#pragma once

#include "hip/common/launch_shape.h"
#include "kernels/rows/row_split.h"

namespace rlk::hip {

constexpr int kLog2Elementwise = 8, kElementwiseThreads = 1 << kLog2Elementwise;  // threads per block: four waves
constexpr int kElementwiseVec8s = 1;     // vectors per thread; with two vectors, gelu would spill scalar registers
constexpr int kElementwiseElements = 8;  // columns per thread if rows are not whole, aligned vec8s

}  // namespace rlk::hip

// Expands to f(form, ...) for each form of an operator. A form is a variant of the operator's formulas, such as its
// activation.
#define RLK_FORMS_1(f, ...) f(0, __VA_ARGS__)
#define RLK_FORMS_2(f, ...) RLK_FORMS_1(f, __VA_ARGS__) f(1, __VA_ARGS__)
#define RLK_FORMS_3(f, ...) RLK_FORMS_2(f, __VA_ARGS__) f(2, __VA_ARGS__)
// Expands to f(kernel name, element type, whether rows are aligned vec8s, form, ...) for each kernel of a function.
#define RLK_ELEMENTWISE_TYPES(form, f, function, ...)                                                   \
  f(rlk_elementwise_##function##_##form##_vectors_bf16, Bf16, true, form, __VA_ARGS__)                  \
      f(rlk_elementwise_##function##_##form##_vectors_f16, Fp16, true, form, __VA_ARGS__)               \
          f(rlk_elementwise_##function##_##form##_vectors_f32, Fp32, true, form, __VA_ARGS__)           \
              f(rlk_elementwise_##function##_##form##_elements_bf16, Bf16, false, form, __VA_ARGS__)    \
                  f(rlk_elementwise_##function##_##form##_elements_f16, Fp16, false, form, __VA_ARGS__) \
                      f(rlk_elementwise_##function##_##form##_elements_f32, Fp32, false, form, __VA_ARGS__)
#define RLK_ELEMENTWISE_KERNELS(f, function, forms, ...) \
  RLK_FORMS_##forms(RLK_ELEMENTWISE_TYPES, f, function, __VA_ARGS__)
