// masks.h: which elements dropout (Srivastava et al. 2014) drops, by their place alone.
//
// A mask's bits come from Philox at (seed, purpose, step, layer, sample, element). The
// purpose is the place in the layer. Samples are numbered within the step's global batch,
// and elements within the sample. So the bits do not depend on ranks, micro-batches,
// recomputation or the order of work, and need no memory. Megatron-LM does that with two
// kinds of generator states (its appendix on random numbers). The kernels and the
// reference call the same functions.
//
// A block of Philox has 8 numbers of 16 bits. An element is dropped if its number is below
// `threshold`; the others are multiplied by 65536 / (65536 - threshold), so that the
// expectation stays exactly the same.
//
// defines: Dropout, dropout_make, dropout_for, dropout_block, dropout_factor, dropout_kept,
//          dropout_probability_block
#ifndef LLMC_MASKS_H
#define LLMC_MASKS_H

#include "llmc/host/rand.h"
#include "llmc/host/tokens.h"

enum { DROPOUT_BLOCK = 8 };  // elements of a block

typedef struct {
    uint32_t threshold;  // of 2^16; 0: nothing is dropped
    float scale;
    uint64_t seed, step;
    uint64_t sample;  // number of the micro-batch's first sample in the step's global batch
    uint64_t layer;
    RandomPurpose purpose;
    uint64_t head;  // number of this rank's first head in the whole model
    uint64_t T,
        row;        // tokens of a sample on this rank; its first row of the residual stream
    Tokens tokens;  // the tokens of a sample on this rank
} Dropout;

// Makes dropout with probability p in [0, 1) for a step, from `sample` on.
static inline Dropout dropout_make(double p, uint64_t seed, uint64_t step,
                                   uint64_t sample) {
    uint32_t threshold = (uint32_t)(p * 65536.0 + 0.5);
    float scale = (float)(65536.0 / (65536.0 - threshold));
    Dropout d = {threshold,         scale, seed, step, sample,     0,
                 DROPOUT_EMBEDDING, 0,     1,    0,    {0, {0, 0}}};
    return d;
}

// Returns the dropout of one place in one layer.
static inline Dropout dropout_for(Dropout d, RandomPurpose purpose, uint64_t layer) {
    d.purpose = purpose;
    d.layer = layer;
    return d;
}

// Returns block number `block` (below 2^40) of sample d.sample + sample.
RANDOM_FUNCTION Philox dropout_block(const Dropout *d, uint64_t sample, uint64_t block) {
    return random_words(d->seed, d->purpose, d->step, d->sample + sample,
                        d->layer << 40 | block);
}

// Returns the factor of element `i` of a block: 0 if it is dropped, else d->scale.
RANDOM_FUNCTION float dropout_factor(const Dropout *d, const Philox *block, unsigned i) {
    return (block->word[i / 2] >> i % 2 * 16 & 0xFFFF) < d->threshold ? 0.0f : d->scale;
}

// Returns the elements of a block that stay: bit i for element i.
RANDOM_FUNCTION uint32_t dropout_kept(const Dropout *d, const Philox *block) {
    uint32_t least = d->threshold << 16, kept = 0;
    for (unsigned i = 0; i < DROPOUT_BLOCK; i += 2) {
        kept |= (uint32_t)(block->word[i / 2] << 16 >= least) << i;
        kept |= (uint32_t)((block->word[i / 2] & 0xFFFF0000u) >= least) << (i + 1);
    }
    return kept;
}

// Returns the block of query q and keys k .. k+7 (k a multiple of 8), for T tokens. h
// counts from head d->head of the model.
RANDOM_FUNCTION Philox dropout_probability_block(const Dropout *d, uint64_t sample,
                                                 uint64_t h, uint64_t q, uint64_t k,
                                                 uint64_t T) {
    uint64_t blocks = (T + DROPOUT_BLOCK - 1) / DROPOUT_BLOCK;  // of a query
    return dropout_block(d, sample, ((d->head + h) * T + q) * blocks + k / DROPOUT_BLOCK);
}

#endif
