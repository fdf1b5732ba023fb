// memory.h: host memory, or the end of the program.
//
// defines: host_alloc, host_resize, host_string
#ifndef LLMC_MEMORY_H
#define LLMC_MEMORY_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Ends the program with one sentence unless there is memory: no caller could go on. Leaving MPI without MPI_Finalize
// takes the other ranks down too.
static inline void *host_check(void *memory, size_t count, size_t size) {
    if (memory) return memory;
    fflush(stdout);
    fprintf(stderr, "error: out of host memory: no room for %zu x %zu bytes more\n", count, size);
    _exit(1);
}

// `count` objects of `size` bytes, all 0; not NULL even if that is no byte. free() them.
static inline void *host_alloc(size_t count, size_t size) {
    size_t bytes;
    bool fits = !__builtin_mul_overflow(count, size, &bytes);
    return host_check(fits ? calloc(bytes ? bytes : 1, 1) : NULL, count, size);
}

// The same memory with room for `count` objects; what is new is not set. memory may be NULL.
static inline void *host_resize(void *memory, size_t count, size_t size) {
    size_t bytes;
    bool fits = !__builtin_mul_overflow(count, size, &bytes);
    return host_check(fits ? realloc(memory, bytes ? bytes : 1) : NULL, count, size);
}

// A copy of the text.
static inline char *host_string(const char *text) {
    size_t bytes = strlen(text) + 1;
    return (char *)memcpy(host_alloc(bytes, 1), text, bytes);
}

#endif
