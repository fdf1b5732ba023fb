// rand.h: random numbers by their place, not by their turn.
//
// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) maps
// a counter and a key to four random words. The key is the seed; the counter holds purpose,
// step, tensor and element. So each rank makes exactly the numbers of its own shard, and no
// layout, thread or call order changes any of them.
//
// defines: RandomPurpose, RANDOM_FUNCTION, Philox, philox4x32_10, random_words,
//          random_uniform, random_normal_fill
#ifndef LLMC_RAND_H
#define LLMC_RAND_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    RANDOM_INIT = 1,
    RANDOM_SHUFFLE,
    RANDOM_SAMPLE,
    DROPOUT_EMBEDDING,
    DROPOUT_SCORES,  // of attention
    DROPOUT_PROJ,    // the residual branches
    DROPOUT_FCPROJ,
} RandomPurpose;

#ifdef __CUDACC__
#define RANDOM_FUNCTION __host__ __device__ static inline
#else
#define RANDOM_FUNCTION static inline
#endif

typedef struct {
    uint32_t word[4];
} Philox;

RANDOM_FUNCTION Philox philox4x32_10(Philox counter, uint32_t key0, uint32_t key1) {
    uint32_t a = counter.word[0], b = counter.word[1], c = counter.word[2];
    uint32_t d = counter.word[3];
    for (int round = 0; round < 10; round++) {
        uint64_t p = (uint64_t)0xD2511F53u * a, q = (uint64_t)0xCD9E8D57u * c;
        a = (uint32_t)(q >> 32) ^ b ^ key0;
        b = (uint32_t)q;
        c = (uint32_t)(p >> 32) ^ d ^ key1;
        d = (uint32_t)p;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    Philox out = {{a, b, c, d}};
    return out;
}

// Returns four random words at a place. block < 2^56, step and tensor < 2^32: no two places
// share a counter.
RANDOM_FUNCTION Philox random_words(uint64_t seed, RandomPurpose purpose, uint64_t step,
                                    uint64_t tensor, uint64_t block) {
    Philox counter = {{(uint32_t)block, (uint32_t)(block >> 32) | (uint32_t)purpose << 24,
                       (uint32_t)tensor, (uint32_t)step}};
    return philox4x32_10(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
}

// Returns a uniform number in [0, 1), with 53 bits: two elements to a block.
static inline double random_uniform(uint64_t seed, RandomPurpose purpose, uint64_t step,
                                    uint64_t tensor, uint64_t index) {
    Philox r = random_words(seed, purpose, step, tensor, index / 2);
    uint32_t high = r.word[index % 2 * 2], low = r.word[index % 2 * 2 + 1];
    return (double)(((uint64_t)high << 32 | low) >> 11) * (1.0 / 9007199254740992.0);
}

// Fills out[count]: stddev times the initial normals of elements first, first + 1, ... of
// the unsharded tensor `tensor`. Four normals to a block: Box-Muller in double on two pairs
// of words.
static inline void random_normal_fill(float *out, uint64_t seed, uint64_t tensor,
                                      size_t first, size_t count, double stddev) {
#ifdef _OPENMP
#pragma omp parallel for if (count > 65536)
#endif
    for (size_t b = first / 4; b < (first + count + 3) / 4; b++) {
        Philox r = random_words(seed, RANDOM_INIT, 0, tensor, b);
        double block[4];
        for (int pair = 0; pair < 2; pair++) {
            // In (0, 1], so that the logarithm is finite.
            double u = ((double)r.word[2 * pair] + 1.0) * (1.0 / 4294967296.0);
            double angle = (double)r.word[2 * pair + 1] *
                           (6.28318530717958647692 / 4294967296.0);
            double radius = sqrt(-2.0 * log(u));
            block[2 * pair] = radius * cos(angle);
            block[2 * pair + 1] = radius * sin(angle);
        }
        for (size_t j = 0; j < 4; j++) {
            size_t i = 4 * b + j;
            if (i >= first && i < first + count)
                out[i - first] = (float)(stddev * block[j]);
        }
    }
}

#endif
