// arena.cuh: one allocation per purpose. A layout function takes its buffers from an arena
// twice. The first time base is NULL, which only counts the bytes. The second time base is
// the allocation, which gives the pointers.
//
// defines: Arena, take, host_array
#ifndef LLMC_ARENA_CUH
#define LLMC_ARENA_CUH

#include <stddef.h>

#include "llmc/host/memory.h"

typedef struct {
    char *base;   // NULL: count only
    size_t used;  // bytes taken so far
} Arena;

// Sets p to the next `count` elements, aligned to 256 bytes, or to NULL while counting.
template <class T>
static inline void take(Arena *arena, T *&p, size_t count) {
    p = arena->base ? (T *)(arena->base + arena->used) : NULL;
    arena->used += (count * sizeof(T) + 255) / 256 * 256;
}

// Sets p to a host array of `count` zeroed elements, the first time. A second layout finds
// it there.
template <class T>
static inline void host_array(T *&p, size_t count) {
    if (!p) p = (T *)host_alloc(count + 1, sizeof(T));
}

#endif
