// cuda_bf16.h: the bfloat16 type and its conversions. Arithmetic is left out: kernels
// compute in float.
#ifndef LLMC_CPU_CUDA_BF16_H
#define LLMC_CPU_CUDA_BF16_H

#include "llmc/host/bf16.h"

struct __nv_bfloat16 {
    unsigned short __x;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float value) : __x(bf16_from_float(value)) {}
    explicit operator float() const { return bf16_to_float(__x); }
};

static inline float __bfloat162float(__nv_bfloat16 value) {
    return (float)value;
}
static inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    return __nv_bfloat16(value);
}

// bf16.h's conversions of eight numbers, for loops over memory that the compiler does not
// vectorise by itself.
typedef uint16_t Bf16x8 __attribute__((vector_size(16)));
typedef uint32_t Word8 __attribute__((vector_size(32)));

static inline void bf16x8_to_float(float *out, const uint16_t *in) {
    Bf16x8 half;
    memcpy(&half, in, sizeof half);
    Word8 word = __builtin_convertvector(half, Word8) << 16;
    memcpy(out, &word, sizeof word);
}

static inline void bf16x8_from_float(uint16_t *out, const float *in) {
    Word8 word;
    memcpy(&word, in, sizeof word);
    Word8 rounded = (word + 0x7FFFu + (word >> 16 & 1)) >> 16;
    Word8 nan = (Word8)((word & 0x7FFFFFFFu) > 0x7F800000u);  // all ones where true
    Bf16x8 half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7FFFu), Bf16x8);
    memcpy(out, &half, sizeof half);
}

#endif
