// arena.h: one allocation per purpose. A layout function takes its buffers from an arena twice:
// once with base NULL, which only counts the bytes, and once with the allocation, which gives the pointers.
#ifndef LLMC_ARENA_H
#define LLMC_ARENA_H

#include <stddef.h>

typedef struct {
    char *base;   // NULL: count only
    size_t used;  // bytes taken so far
} Arena;

// The next `count` elements of `size` bytes, aligned to 256 bytes; NULL while counting.
static inline void *arena_take(Arena *arena, size_t count, size_t size) {
    void *p = arena->base ? arena->base + arena->used : NULL;
    arena->used += (count * size + 255) / 256 * 256;
    return p;
}

#endif
