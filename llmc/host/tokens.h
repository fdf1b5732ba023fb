// tokens.h: the tokens of a sequence that a rank holds: all of them, or a part with
// context parallelism.
//
// defines: Tokens, tokens_position, tokens_row
#ifndef LLMC_TOKENS_H
#define LLMC_TOKENS_H

#include "llmc/host/rand.h"

// Row r of a rank is position r + shift[r >= half] of the sequence. All zeros: the whole
// sequence.
typedef struct {
    size_t half, shift[2];
} Tokens;

RANDOM_FUNCTION size_t tokens_position(Tokens t, size_t row) {
    return row + t.shift[row >= t.half];
}

// Returns the row of a position on a rank with T rows of a sequence, or T if another rank
// has it.
RANDOM_FUNCTION size_t tokens_row(Tokens t, size_t position, size_t T) {
    // They wrap around, past every T, if they are before.
    size_t first = position - t.shift[0], second = position - t.shift[1];
    return first < t.half ? first : second >= t.half && second < T ? second : T;
}

#endif
