// memory.h: allocates host memory, or ends the program.
//
// defines: host_check, host_alloc, host_resize, host_string
#ifndef LLMC_MEMORY_H
#define LLMC_MEMORY_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Returns the memory. If it is NULL, ends the program with an error message; without
// MPI_Finalize the other ranks end too.
static inline void *host_check(void *memory, size_t count, size_t size) {
    if (memory) return memory;
    fflush(stdout);
    fprintf(stderr, "error: out of host memory: no room for %zu x %zu bytes more\n", count,
            size);
    _exit(1);
}

// Returns `count` objects of `size` bytes, all 0. Never NULL, even for no objects. The
// caller frees them.
static inline void *host_alloc(size_t count, size_t size) {
    return host_check(calloc(count ? count : 1, size), count, size);
}

// Resizes memory, which may be NULL, to `count` objects. New bytes are not set.
static inline void *host_resize(void *memory, size_t count, size_t size) {
    return host_check(reallocarray(memory, count ? count : 1, size), count, size);
}

// Returns a copy of the text. The caller frees it.
static inline char *host_string(const char *text) {
    size_t bytes = strlen(text) + 1;
    return (char *)memcpy(host_alloc(bytes, 1), text, bytes);
}

#endif
