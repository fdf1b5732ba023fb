// tool.h: what every small tool of dev/ says the same way: --help, why it fails, and the name that a misspelt word may
// mean.
//
// defines: tool_help, tool_fail, tool_nearest
#ifndef DEV_PLOT_TOOL_H
#define DEV_PLOT_TOOL_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Prints `usage` and ends with 0 if a word of the command line is --help or -h.
static inline void tool_help(int argc, char **argv, const char *usage) {
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) exit(fputs(usage, stdout) < 0);
}

// Prints what is wrong, and returns the exit code.
static inline int tool_fail(const char *tool, const char *text) {
    fprintf(stderr, "%s: %s\n", tool, text);
    return 1;
}

// Returns the fewest insertions, deletions and replacements of letters that turn a into b: words of up to 63 letters.
static inline int tool_distance(const char *a, const char *b) {
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

// Returns the one of `count` names that is nearest to the word.
static inline const char *tool_nearest(const char *word, const char *const *names, size_t count) {
    size_t best = 0;
    for (size_t i = 1; i < count; i++)
        if (tool_distance(word, names[i]) < tool_distance(word, names[best])) best = i;
    return names[best];
}

#endif
