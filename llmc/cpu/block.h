// block.h: runs the blocks of a launch, one after the other on each OS thread.
#ifndef LLMC_CPU_BLOCK_H
#define LLMC_CPU_BLOCK_H

#include <omp.h>
#include <time.h>

#include "fibre.h"

static inline double cpu_seconds() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// For a body: starts the next thread; says after a thread whether others should go first.
static inline void cpu_start_thread(CpuBlock *b) {
    unsigned t = b->next++;
    if (b->shuffled) t = b->order[t];
    b->current = t;
    if (b->flat)
        threadIdx.x = t;
    else
        threadIdx = cpu_thread_index(t);
}

static inline bool cpu_others_first(const CpuBlock *b) { return b->suspended && b->ready_count; }

// The OS thread's own block, made at its first kernel and given back when the OS thread ends.
inline CpuBlock *cpu_enter_grid(const CpuGrid *g) {
    struct Owner {
        ~Owner() {
            if (!cpu_block) return;
            for (unsigned i = 1; i < cpu_block->created; i++)
                munmap(cpu_block->fibres[i].stack - CPU_GUARD, CPU_GUARD + CPU_STACK);
            free(cpu_block->shared);
            free(cpu_block);
            cpu_block = NULL;
        }
    };
    CpuBlock *b = cpu_block;
    if (!b) {
        static thread_local Owner owner;
        (void)&owner;
        b = cpu_block = (CpuBlock *)calloc(1, sizeof(CpuBlock));
        if (!b) abort();
        b->created = 1;
        b->fibres[0].started = true;
        b->running = &b->fibres[0];
    }
    b->launch = g;
    b->count = g->block.x * g->block.y * g->block.z;
    b->flat = g->block.y * g->block.z == 1;
    if (b->shared_bytes != g->shared) {
        free(b->shared);
        b->shared = g->shared ? malloc(g->shared) : NULL;
        if (g->shared && !b->shared) abort();
        b->shared_bytes = g->shared;
    }
    blockDim = g->block;
    gridDim = g->grid;
    threadIdx = {0, 0, 0};
    return b;
}

inline void cpu_run_block(CpuBlock *b, size_t number, uint64_t seed) {
    blockIdx = {(unsigned)(number % gridDim.x), (unsigned)(number / gridDim.x % gridDim.y),
                (unsigned)(number / gridDim.x / gridDim.y)};
    b->next = 0;
    b->shuffled = seed != 0;
    if (b->shuffled) {
        b->random = seed + number * 0xD1342543DE82EF95u;
        for (unsigned i = 0; i < b->count; i++) {
            unsigned j = cpu_random(&b->random) % (i + 1);
            b->order[i] = b->order[j], b->order[j] = (uint16_t)i;
        }
    }
    if (b->shared_bytes)
        memset(b->shared, 0xFF, b->shared_bytes);  // NaN: nothing may be read before it is written
    for (;;) {
        b->launch->body(b, b->launch->args);
        if (b->suspended == 0 && b->next == b->count) break;
        cpu_leave(b, true);
    }
    if (b->involved) {
        b->involved = false;
        b->idle_count = 0;
        for (unsigned i = b->created; i-- > 1;) b->idle[b->idle_count++] = &b->fibres[i];
    }
}

// Runs every block of the launch. Waking the other OS threads costs some microseconds, and far more on a busy
// machine: it must be worth it, by what the kernel's threads took last time (a few ns each, until that is
// known).
inline void cpu_run_grid(const CpuGrid *g) {
    size_t blocks = (size_t)g->grid.x * g->grid.y * g->grid.z;
    double threads = (double)blocks * g->block.x * g->block.y * g->block.z;
    CpuOrder &order = cpu_thread_order();
    uint64_t seed = 0;
    std::vector<uint32_t> shuffled;
    if (order.random) {
        seed = cpu_random(&order.state) | 1;
        shuffled.resize(blocks);
        for (size_t i = 0; i < blocks; i++) {
            size_t j = cpu_random(&order.state) % (i + 1);
            shuffled[i] = shuffled[j], shuffled[j] = (uint32_t)i;
        }
    }
    double start = cpu_seconds(), expected = threads * (*g->thread_seconds > 0 ? *g->thread_seconds : 5e-9);
    bool parallel = blocks > 1 && expected > 30e-6 && omp_get_max_threads() > 1 && !omp_in_parallel();
    size_t workers = parallel ? (size_t)omp_get_max_threads() : 1, chunk = blocks / (workers * 8) + 1;
    if (parallel) {
#pragma omp parallel
        {
            CpuBlock *b = cpu_enter_grid(g);
#pragma omp for schedule(dynamic, chunk) nowait
            for (size_t i = 0; i < blocks; i++) cpu_run_block(b, seed ? shuffled[i] : i, seed);
        }
    } else {
        CpuBlock *b = cpu_enter_grid(g);
        for (size_t i = 0; i < blocks; i++) cpu_run_block(b, seed ? shuffled[i] : i, seed);
    }
    *g->thread_seconds = (cpu_seconds() - start) * (double)workers / threads;
}

#endif
