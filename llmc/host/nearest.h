// nearest.h: finds the known word that a misspelt one may mean.
//
// defines: word_distance
#ifndef LLMC_NEAREST_H
#define LLMC_NEAREST_H

#include <string.h>

// Returns the fewest insertions, deletions and replacements of letters that turn a into b:
// words of up to 63 letters.
static inline int word_distance(const char *a, const char *b) {
    int row[64];
    size_t n = strlen(b);
    if (n > 63 || strlen(a) > 63) return 64;
    for (size_t j = 0; j <= n; j++) row[j] = (int)j;
    for (size_t i = 0; a[i]; i++) {
        int diagonal = row[0];
        row[0] = (int)i + 1;
        for (size_t j = 1; j <= n; j++) {
            int least = diagonal + (a[i] != b[j - 1]);
            if (row[j] + 1 < least) least = row[j] + 1;
            if (row[j - 1] + 1 < least) least = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = least;
        }
    }
    return row[n];
}

#endif
