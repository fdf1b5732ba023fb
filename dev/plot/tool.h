// tool.h: answers that every small tool of dev/ gives alike: --help, --version, why it fails, and
// the name that a misspelt word may mean.
//
// defines: tool_begin, tool_fail, tool_nearest
#ifndef DEV_PLOT_TOOL_H
#define DEV_PLOT_TOOL_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/host/nearest.h"

#ifndef VERSION  // of the Makefile: the commit
#define VERSION "unknown"
#endif

// Prints what is wrong, and returns the exit code.
static inline int tool_fail(const char *tool, const char *text) {
    fprintf(stderr, "%s: %s\n", tool, text);
    return 1;
}

// Returns the one of `count` names that is nearest to the word.
static inline const char *tool_nearest(const char *word, const char *const *names, size_t count) {
    size_t best = 0;
    for (size_t i = 1; i < count; i++)
        if (word_distance(word, names[i]) < word_distance(word, names[best])) best = i;
    return names[best];
}

// Copies the next --flag of the text, without its dashes. Returns the place behind it, or NULL if
// there is none.
static inline const char *tool_flag(const char *text, char name[64]) {
    const char *at = strstr(text, "--");
    if (!at) return NULL;
    size_t length = strspn(at + 2, "abcdefghijklmnopqrstuvwxyz-");
    snprintf(name, 64, "%.*s", length < 63 ? (int)length : 63, at + 2);
    return at + 2 + length;
}

// Answers --help, -h and --version. Refuses a flag if the usage has no flag of that name, or with
// that beginning, and proposes the nearest. Does not return in these cases.
static inline void tool_begin(int argc, char **argv, const char *usage) {
    char names[64][64];
    const char *pointers[64], *slash = strrchr(argv[0], '/'),
                              *program = slash ? slash + 1 : argv[0];
    size_t count = 0;
    for (const char *at = "--help --version"; (at = tool_flag(at, names[count]));) count++;
    for (const char *at = usage; count < 63 && (at = tool_flag(at, names[count]));) count++;
    for (size_t k = 0; k < count; k++) pointers[k] = names[k];
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) exit(fputs(usage, stdout) < 0);
        if (strcmp(word, "--version") == 0)
            exit(printf("%s, built from commit %s\n", program, VERSION) < 0);
    }
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        const char *word = argv[i] + 2;
        size_t length = strcspn(argv[i], "=") - 2, k = 0;
        if (strncmp(argv[i], "--", 2) != 0) continue;
        while (k < count && strncmp(names[k], word, length) != 0) k++;
        if (k < count) continue;
        char wrong[64];
        snprintf(wrong, sizeof wrong, "%.*s", length < 63 ? (int)length : 63, word);
        fprintf(stderr, "error: there is no flag --%s: did you mean --%s?\n", wrong,
                tool_nearest(wrong, pointers, count));
        exit(2);
    }
}

#endif
