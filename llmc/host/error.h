// error.h: the error message of a function that refuses its input. The function returns
// false, and its caller decides what to do.
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

// Prints the error message, without a newline, and returns false for `return
// error_set(...)`. Control characters become '?', also UTF-8's (C2 80 to C2 9F): quoted
// input could otherwise break the line or move the cursor.
__attribute__((format(printf, 2, 3))) static inline bool error_set(Error *err,
                                                                   const char *format,
                                                                   ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    for (char *c = err->text; *c; c++) {
        if ((unsigned char)*c < ' ' || *c == 127) *c = '?';
        if (*c == '\xc2' && (unsigned char)c[1] >= 0x80 && (unsigned char)c[1] < 0xa0)
            *c = c[1] = '?';
    }
    return false;
}

#endif
