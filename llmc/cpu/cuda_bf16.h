// cuda_bf16.h: the bfloat16 type and its conversions. Arithmetic is left out: kernels compute in float.
#ifndef LLMC_CPU_CUDA_BF16_H
#define LLMC_CPU_CUDA_BF16_H

#include <stdint.h>
#include <string.h>

struct __nv_bfloat16 {
    unsigned short __x;
    __nv_bfloat16() = default;
    explicit inline __nv_bfloat16(float value);
    explicit inline operator float() const;
};
typedef __nv_bfloat16 nv_bfloat16;

static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.__x; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 value;
    value.__x = bits;
    return value;
}

static inline float __bfloat162float(__nv_bfloat16 value) {
    uint32_t bits = (uint32_t)value.__x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

// To nearest, ties to even; every NaN becomes 0x7FFF, as on the GPU.
static inline __nv_bfloat16 __float2bfloat16_rn(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
    bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    return __ushort_as_bfloat16((unsigned short)(nan ? 0x7FFFu : rounded));
}
static inline __nv_bfloat16 __float2bfloat16(float f) { return __float2bfloat16_rn(f); }

inline __nv_bfloat16::__nv_bfloat16(float value) { *this = __float2bfloat16_rn(value); }
inline __nv_bfloat16::operator float() const { return __bfloat162float(*this); }

#endif
