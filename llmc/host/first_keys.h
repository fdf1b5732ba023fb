// first_keys.h: the first key that each query of a batch sees, for attention to documents
// and to windows.
// lesson: documents
//
// defines: FirstKeys, window_keys, document_keys, tokens_before, document_rows
#ifndef LLMC_HOST_FIRST_KEYS_H
#define LLMC_HOST_FIRST_KEYS_H

#include "llmc/host/tokens.h"

// Query t of a sequence sees keys first[t] to t. first[t + 1] >= first[t], so that kernels
// can skip tiles.
typedef struct {
    const int *first;  // (B, T) on the device; NULL: from the sequence's beginning on
    double scores;     // pairs of a query and a key that it sees, in all B sequences
} FirstKeys;

// Writes first[T] of one sequence with a window of W keys (Beltagy et al. 2020), which
// include the query's own; 0: no window. document[T] (or NULL) holds the position at which
// each token's document begins. Returns the number of pairs.
static inline double window_keys(int *first, const int *document, size_t T, size_t W) {
    double scores = 0;
    for (size_t t = 0; t < T; t++) {
        int least = document ? document[t] : 0;
        int window = W && t + 1 > W ? (int)(t + 1 - W) : 0;
        first[t] = window > least ? window : least;
        scores += (double)(t + 1) - first[t];
    }
    return scores;
}

// Writes for each of tokens[T] the position at which its document begins. A document begins
// at the sequence's first token, and at each token `eot`.
static inline void document_keys(int *first, const int *tokens, size_t T, int eot) {
    for (size_t t = 0; t < T; t++)
        first[t] = t == 0 || tokens[t] == eot ? (int)t : first[t - 1];
}

// Returns how many of a rank's T rows have positions before the given one.
static inline size_t tokens_before(Tokens t, size_t position, size_t T) {
    size_t first = position > t.shift[0] ? position - t.shift[0] : 0;
    size_t second = position > t.shift[1] ? position - t.shift[1] : 0;
    if (first > t.half) first = t.half;
    if (second < t.half) second = t.half;
    if (second > T) second = T;
    return first + second - t.half;
}

// Writes rows[T] (NULL: does not) for the T queries of one rank and the T keys of another.
// It has the first row of the keys that is not before the beginning of the query's document.
// document: for each token of the whole sequence, the position at which its document begins.
// Returns the number of pairs of a query and a key that it sees.
static inline double document_rows(int *rows, const int *document, Tokens queries,
                                   Tokens keys, size_t T) {
    size_t scores = 0;
    for (size_t q = 0; q < T; q++) {
        size_t position = tokens_position(queries, q);
        size_t begin = tokens_before(keys, (size_t)document[position], T);
        if (rows) rows[q] = (int)begin;
        scores += tokens_before(keys, position + 1, T) - begin;
    }
    return (double)scores;
}

#endif
