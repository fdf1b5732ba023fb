// bf16.h: bfloat16 on the host: the upper half of a float's bits. Rounds as CUDA's cuda_bf16.h does, to the last
// bit.
//
// defines: bf16_to_float, bf16_from_float, and eight at a time bf16x8_to_float, bf16x8_from_float
#ifndef LLMC_BF16_H
#define LLMC_BF16_H

#include <stdint.h>
#include <string.h>

static inline float bf16_to_float(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

// Rounds to nearest, ties to even; every NaN becomes 0x7FFF.
static inline uint16_t bf16_from_float(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : rounded);
}

// The same in vectors, for loops over memory that the compiler does not vectorize by itself.
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
