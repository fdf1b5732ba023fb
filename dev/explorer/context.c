// context.c: the page's rings of context parallelism, from the header that the trainer uses.
#include "libc.h"
double log(double x), sin(double x);  // of random numbers, which nothing here draws
#include "dev/plot/ring_cells.h"

static RingCells steps[RING_CELLS_RANKS];

// Returns the c steps of a ring, one RingCells after another.
const RingCells *context_run(int c, int zigzag) {
    for (int step = 0; step < c; step++) ring_cells(&steps[step], (size_t)c, zigzag, (size_t)step);
    return steps;
}
