// ring_cells.h: the work of each rank of a ring in a step, in pairs of chunks. It comes from
// the trainer's own pairs (llmc/host/context.h). The picture of doc/course/7-context.md and the
// explorer use it.
// it.
//
// defines: RingCells, ring_cells
#ifndef LLMC_RING_CELLS_H
#define LLMC_RING_CELLS_H

#include "llmc/host/context.h"

enum { RING_CELLS_RANKS = 16, RING_CELLS = 2 * RING_CELLS_RANKS, RING_NOBODY = -1 };

//   rank[q][k]  The rank that attends from chunk q to chunk k in this step, or RING_NOBODY.
//   work        Pairs of chunks of each rank. A pair on the diagonal is half.
typedef struct {
    double work[RING_CELLS_RANKS];
    int rank[RING_CELLS][RING_CELLS];
} RingCells;

static inline void ring_cells(RingCells *x, size_t c, bool zigzag, size_t step) {
    for (size_t n = 0; n < RING_CELLS * RING_CELLS; n++)
        x->rank[n / RING_CELLS][n % RING_CELLS] = RING_NOBODY;
    for (size_t i = 0; i < c; i++) {
        size_t owner = (i + c - step) % c;
        TokenPair pair = token_pair(2, i, owner, zigzag);
        Tokens mine = tokens_of(2 * c, c, i, zigzag), others = tokens_of(2 * c, c, owner, zigzag);
        x->work[i] = 0;
        for (size_t n = 0; n < pair.Tq * pair.Tk; n++) {
            size_t q = tokens_position(mine, pair.q + n / pair.Tk),
                   k = tokens_position(others, pair.k + n % pair.Tk);
            if (k > q) continue;
            x->work[i] += k == q ? 0.5 : 1;
            x->rank[q][k] = (int)i;
        }
    }
}

#endif
