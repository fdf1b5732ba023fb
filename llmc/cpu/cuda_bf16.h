// cuda_bf16.h: the bfloat16 type and its conversions. Arithmetic is left out: kernels compute in float.
#ifndef LLMC_CPU_CUDA_BF16_H
#define LLMC_CPU_CUDA_BF16_H

#include "llmc/host/bf16.h"

struct __nv_bfloat16 {
    unsigned short __x;
    __nv_bfloat16() = default;
    explicit inline __nv_bfloat16(float value);
    explicit inline operator float() const;
};

static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.__x; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 value;
    value.__x = bits;
    return value;
}

static inline float __bfloat162float(__nv_bfloat16 value) { return bf16_to_float(value.__x); }
static inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __ushort_as_bfloat16(bf16_from_float(f)); }

inline __nv_bfloat16::__nv_bfloat16(float value) { *this = __float2bfloat16_rn(value); }
inline __nv_bfloat16::operator float() const { return __bfloat162float(*this); }

#endif
