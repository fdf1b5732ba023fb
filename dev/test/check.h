// check.h: how a test program counts its checks. A program has
//   static Check c;                           the counts
//   check(&c, a == b, "sum of %d ranks", n);  once for each group of cases
//   return check_summary(&c);                 at the end of main
#ifndef LLMC_CHECK_H
#define LLMC_CHECK_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

typedef struct Check {
    int passed, failed;
} Check;

// Counts one check and prints `ok   text` or `FAIL text` (printf's form, no newline). Returns ok.
__attribute__((format(printf, 3, 4))) static inline bool check(Check *c, bool ok,
                                                               const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("%s", ok ? "ok   " : "FAIL ");
    vprintf(format, args);
    printf("\n");
    va_end(args);
    fflush(stdout);  // so that the line is seen even if the next check crashes
    if (ok) c->passed++;
    else c->failed++;
    return ok;
}

// Prints the last line and returns the exit code. A program that checked nothing has not passed.
static inline int check_summary(const Check *c) {
    printf("%d passed, %d failed\n", c->passed, c->failed);
    return c->failed > 0 || c->passed == 0;
}

#endif
