// bf16.h: bfloat16 on the host: the upper half of a float's bits. Rounds as CUDA's
// cuda_bf16.h does, to the last bit.
//
// defines: bf16_to_float, bf16_from_float
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

#endif
