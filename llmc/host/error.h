// error.h: how a function of llmc/ that meets bad input says so.
// It fills an Error with one clear sentence and returns false; the caller decides what becomes of the run.
//
// defines: Error, error_set
#ifndef LLMC_ERROR_H
#define LLMC_ERROR_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

typedef struct {
    char text[1024];
} Error;

// Writes the sentence (printf's form, no newline) and returns false, so that `return error_set(...)` reads well. What
// it quotes may come from anybody: control characters, which could make two lines of it or move the cursor, become '?'.
__attribute__((format(printf, 2, 3))) static inline bool error_set(Error *err, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    for (char *c = err->text; *c; c++) {
        if ((unsigned char)*c < ' ' || *c == 127) *c = '?';
    }
    return false;
}

#endif
