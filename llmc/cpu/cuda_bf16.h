// cuda_bf16.h: the bfloat16 type and its conversions. Arithmetic is left out: kernels compute in float.
#ifndef LLMC_CPU_CUDA_BF16_H
#define LLMC_CPU_CUDA_BF16_H

#include "llmc/host/bf16.h"

struct __nv_bfloat16 {
    unsigned short __x;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float value) : __x(bf16_from_float(value)) {}
    explicit operator float() const { return bf16_to_float(__x); }
};

static inline float __bfloat162float(__nv_bfloat16 value) { return (float)value; }
static inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }

#endif
