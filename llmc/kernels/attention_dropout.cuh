// attention_dropout.cuh: the masks of attention's probabilities, tile by tile, for attention_rows.cuh. The 8 numbers of
// a block of Philox belong to 8 neighbouring keys of a query.
//
// A and Place are AttentionRows and RowPlace of attention_rows.cuh.
//
// defines: drop_keys, drop_queries
#ifndef LLMC_ATTENTION_DROPOUT_CUH
#define LLMC_ATTENTION_DROPOUT_CUH

#include "llmc/dropout.h"
#include "llmc/kernels/cuda_common.cuh"

// keep[j][r] = what dropout multiplies the probability of query row + r and key first + j by.
template <class A, class Place>
__device__ __forceinline__ void drop_keys(typename A::Scores &keep, const Dropout &d, const Place &at, size_t first,
                                          size_t T) {
    for (int j0 = 0; j0 < A::TILE; j0 += DROPOUT_BLOCK) {
        for (int r = 0; r < A::R; r++) {
            Philox block = dropout_probability_block(&d, at.b, at.h, at.row + r, first + j0, T);
            for (int j = 0; j < DROPOUT_BLOCK; j++) keep[j0 + j][r] = dropout_factor(&d, &block, j);
        }
    }
}

// The same where the rows are keys and the tile's rows queries: of query first + j and key row + r.
template <class A, class Place>
__device__ __forceinline__ void drop_queries(typename A::Scores &keep, const Dropout &d, const Place &at,
                                             size_t first, size_t T) {
    constexpr int COUNT = A::R < DROPOUT_BLOCK ? A::R : DROPOUT_BLOCK;
    for (int j = 0; j < A::TILE; j++) {
        for (int r0 = 0; r0 < A::R; r0 += COUNT) {
            unsigned place = (unsigned)((at.row + r0) % DROPOUT_BLOCK);
            Philox block = dropout_probability_block(&d, at.b, at.h, first + j, at.row + r0 - place, T);
            for (int r = 0; r < COUNT; r++) keep[j][r0 + r] = dropout_factor(&d, &block, place + r);
        }
    }
}

#endif
