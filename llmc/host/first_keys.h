// first_keys.h: the first key that each query of a batch sees, for attention to documents
// and to windows.
// lesson: documents
//
// defines: FirstKeys, window_keys, document_keys
#ifndef LLMC_HOST_FIRST_KEYS_H
#define LLMC_HOST_FIRST_KEYS_H

#include <stddef.h>

// Query t of a sequence sees keys first[t] to t. first[t + 1] >= first[t], so that kernels
// can skip tiles.
typedef struct {
    const int *first;  // (B, T) on the device; NULL: from the sequence's beginning on
    double scores;     // pairs of a query and a key that it sees, in all B sequences
} FirstKeys;

// Writes first[T] of one sequence with a window of W keys (Beltagy et al. 2020), the
// query's own among them; 0: of any number. document[T], if it is there, says where the
// document of each token begins. Returns the number of pairs.
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

// Writes where the document of each of tokens[T] begins: a document begins at the sequence's
// first token, and at each token `eot`.
static inline void document_keys(int *first, const int *tokens, size_t T, int eot) {
    for (size_t t = 0; t < T; t++)
        first[t] = t == 0 || tokens[t] == eot ? (int)t : first[t - 1];
}

#endif
