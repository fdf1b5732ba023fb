// attention_dropout.cuh: the masks of attention's probabilities, tile by tile. The 8 numbers of a block of Philox
// belong to 8 neighbouring keys of a query.
//
// In attention_rows.cuh a thread makes the blocks of its own rows; A is AttentionRows there, and Place RowPlace. On
// tensor cores (AttentionMma, MmaPlace) the elements of a block are spread over lanes: each lane makes as many blocks
// as the others, and they exchange which elements stay, a bit each.
//
// defines: drop_keys, drop_queries, kept_keys, kept_queries, drop_fragments
#ifndef LLMC_ATTENTION_DROPOUT_CUH
#define LLMC_ATTENTION_DROPOUT_CUH

#include "llmc/dropout.h"
#include "llmc/kernels/mma.cuh"

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

// Bit 4 n + i: does element d[n][i] of the product of the warp's queries and keys first .. first + KEYS - 1 stay? A
// block is a row of 8 columns, four lanes wide: lane t of the four makes those of row t % 2 and every second n.
template <class A, class Place>
__device__ __forceinline__ uint32_t kept_keys(const Dropout &d, const Place &at, int first) {
    int t = at.pair / 2;
    uint32_t own = 0, of_row[4], kept = 0;
    UNROLL
    for (int i = 0; i < A::KEYS / 16; i++) {
        int query = at.row + t % 2 * 8, key = first + (2 * i + t / 2) * 8;
        Philox block = dropout_probability_block(&d, at.b, at.h, (size_t)query, (size_t)key, (size_t)at.T);
        own |= dropout_kept(&d, &block) << 8 * i;
    }
    warp_gather<4, 1>(of_row, own);
    UNROLL
    for (int i = 0; i < 4; i++) kept |= (of_row[i] >> at.pair & 0x03030303u) << 2 * i;
    return kept;
}

// The same where the warp's rows are keys and the columns queries first .. first + QUERIES - 1. A block is half a
// column: lane g of the eight of a column pair makes those of d[n][g % 4] for every second n.
template <class A, class Place>
__device__ __forceinline__ uint32_t kept_queries(const Dropout &d, const Place &at, int first) {
    int g = at.row % 8;
    uint32_t own = 0, of_column[8], kept = 0;
    UNROLL
    for (int i = 0; i < A::QUERIES / 16; i++) {
        int query = first + (2 * i + g / 4) * 8 + at.pair + g % 2, key = at.warp_row + g / 2 % 2 * 8;
        Philox block = dropout_probability_block(&d, at.b, at.h, (size_t)query, (size_t)key, (size_t)at.T);
        own |= dropout_kept(&d, &block) << 8 * i;
    }
    warp_gather<8, 4>(of_column, own);
    UNROLL
    for (int i = 0; i < 8; i++) kept |= (of_column[i] >> g & 0x01010101u) << i;
    return kept;
}

// to[n][i] = x[n][i], or 0 where it is dropped. to may be x.
template <int N8>
__device__ __forceinline__ void drop_fragments(float (&to)[N8][4], const float (&x)[N8][4], uint32_t kept) {
    UNROLL
    for (int n = 0; n < N8; n++) {
        UNROLL
        for (int i = 0; i < 4; i++) to[n][i] = kept >> (4 * n + i) & 1 ? x[n][i] : 0.0f;
    }
}

#endif
