// warp.h: rendezvous of the threads of a warp or a block: barriers, shuffles and whole
// reductions.
//
// Each thread leaves its value and the function that computes the results of all lanes. The
// last of its warp to arrive calls it and makes the others ready. Operations of a part of a
// warp, which no kernel here has, are refused. Behaviour that a GPU leaves undefined ends
// the program, with kernel, block and thread named.
#ifndef LLMC_CPU_WARP_H
#define LLMC_CPU_WARP_H

#include <cmath>
#include <type_traits>

#include "fibre.h"

template <class T>
static inline uint64_t cpu_to_bits(T value) {
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 8,
                  "not a type that can be shuffled");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T>
static inline T cpu_from_bits(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Adds or compares the values of a full warp in the order of a loop over __shfl_xor_sync by
// 16, 8, 4, 2, 1.
template <class T, bool SUM>
static inline void cpu_butterfly(CpuLane *lanes) {
    T a[CPU_WARP], b[CPU_WARP];
    for (int l = 0; l < CPU_WARP; l++) a[l] = cpu_from_bits<T>(lanes[l].value);
    for (int offset = CPU_WARP / 2; offset; offset /= 2) {
        for (int l = 0; l < CPU_WARP; l++)
            b[l] = SUM ? a[l] + a[l ^ offset] : std::fmax(a[l], a[l ^ offset]);
        memcpy(a, b, sizeof a);
    }
    for (int l = 0; l < CPU_WARP; l++) lanes[l].value = cpu_to_bits(a[l]);
}

// Has one lane run an operation of the whole warp. The values are the addresses of all
// lanes' registers.
template <class Lane>
static inline void cpu_run_together(CpuLane *lanes) {
    Lane *of_lane[CPU_WARP];
    for (int l = 0; l < CPU_WARP; l++) of_lane[l] = cpu_from_bits<Lane *>(lanes[l].value);
    Lane::run(of_lane);
}

// Lanes that shuffle types of different sizes do not meet.
template <size_t SIZE>
static inline void cpu_shuffle_lanes(CpuLane *lanes) {
    uint64_t value[CPU_WARP];
    for (unsigned l = 0; l < CPU_WARP; l++) value[l] = lanes[l].value;
    for (unsigned l = 0; l < CPU_WARP; l++) lanes[l].value = value[lanes[l].source];
}

// Returns true if the last to arrive has to wait too: in random orders it queues among the
// ready.
static inline bool cpu_queue_up(CpuBlock *b) {
    if (b->order.on) cpu_make_ready(b, b->running);
    return b->order.on;
}

// Leaves the running thread's value at its warp's rendezvous. Returns true if it has to
// wait for other lanes, which must all come with the same function; else the results are
// there.
__attribute__((noinline)) inline bool cpu_warp_arrive(CpuBlock *b, CpuResults results,
                                                      uint64_t value, unsigned source) {
    unsigned t = b->current, warp = t / CPU_WARP, lane = t % CPU_WARP;
    CpuLane *lanes = b->lanes + t - lane;
    if (b->count < (warp + 1) * CPU_WARP)
        cpu_kernel_abort(t, "calls a warp operation, and of its warp's lanes only %u exist",
                         b->count % CPU_WARP);
    lanes[lane] = {value, source, results, b->running};
    b->waiting[warp] |= 1u << lane;
    if (b->waiting[warp] != ~0u) return true;
    b->waiting[warp] = 0;
    for (unsigned l = 0; l < CPU_WARP; l++) {
        if (lanes[l].results != results)
            cpu_kernel_abort(t, "and lane %u of its warp are at different warp operations",
                             l);
        if (l != lane) cpu_make_ready(b, lanes[l].fibre);
    }
    results(lanes);
    return cpu_queue_up(b);
}

// Waits for the other lanes and returns this lane's result.
static inline uint64_t cpu_warp_meet(CpuResults results, uint64_t value, unsigned source) {
    CpuBlock *b = cpu_block;
    const CpuLane *self = &b->lanes[b->current];
    if (cpu_warp_arrive(b, results, value, source)) cpu_leave(b, false);
    return self->value;
}

// Has all 32 lanes meet and one of them call Lane::run for all; it is done when this
// returns.
template <class Lane>
static inline void cpu_warp_together(Lane *lane) {
    cpu_warp_meet(cpu_run_together<Lane>, cpu_to_bits(lane), 0);
}

static inline unsigned cpu_lane() {
    return cpu_block->current % CPU_WARP;
}

template <class T>
static inline T cpu_shuffle(unsigned mask, T value, unsigned source) {
    if (mask != ~0u)
        cpu_kernel_abort(cpu_block->current,
                         "shuffles with mask 0x%08x: here all 32 lanes must take part",
                         mask);
    return cpu_from_bits<T>(
        cpu_warp_meet(cpu_shuffle_lanes<sizeof(T)>, cpu_to_bits(value), source));
}

// Shuffles of a whole warp. A source before the first lane is the lane itself; an index
// wraps around.
template <class T>
static inline T __shfl_sync(unsigned mask, T value, int source) {
    return cpu_shuffle(mask, value, (unsigned)source % CPU_WARP);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
    return cpu_shuffle(mask, value, delta <= cpu_lane() ? cpu_lane() - delta : cpu_lane());
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
    return cpu_shuffle(mask, value, cpu_lane() ^ (unsigned)lane_mask % CPU_WARP);
}

static inline void cpu_nothing(CpuLane *) {
}
static inline void __syncwarp() {
    cpu_warp_meet(cpu_nothing, 0, 0);
}

// Reduces over a full warp in one rendezvous, with the bits of five shuffles.
template <bool SUM, class T>
static inline T warp_reduce(T value) {
    return cpu_from_bits<T>(cpu_warp_meet(cpu_butterfly<T, SUM>, cpu_to_bits(value), 0));
}

// Comes to the block's barrier, where all threads must be at the same line. Returns true if
// this one has to wait; else it is the last, and the others are ready.
__attribute__((noinline)) inline bool cpu_block_arrive(CpuBlock *b, const char *file,
                                                       int line) {
    if (b->barrier_count == 0) {
        b->barrier_file = file;
        b->barrier_line = line;
    } else if (b->barrier_line != line ||
               (b->barrier_file != file && strcmp(b->barrier_file, file))) {
        dim3 o = cpu_thread_index(b->barrier[0]->thread);
        cpu_kernel_abort(
            b->current,
            "divergent barrier: it is at %s:%d, thread (%u,%u,%u) waits at %s:%d", file,
            line, o.x, o.y, o.z, b->barrier_file, b->barrier_line);
    }
    if (b->barrier_count + 1 < b->count) {
        b->barrier[b->barrier_count++] = b->running;
        return true;
    }
    for (unsigned i = 0; i < b->barrier_count; i++) cpu_make_ready(b, b->barrier[i]);
    b->barrier_count = 0;
    return false;
}

static inline void cpu_syncthreads(const char *file, int line) {
    CpuBlock *b = cpu_block;
    if (cpu_block_arrive(b, file, line) || cpu_queue_up(b)) cpu_leave(b, false);
}
#define __syncthreads() cpu_syncthreads(__FILE__, __LINE__)

// Ends the program on a misaligned move of 16 bytes, where a GPU would fault.
static inline void cpu_check_aligned(const void *p) {
    if (__builtin_expect((uintptr_t)p % 16 != 0, 0))
        cpu_kernel_abort(cpu_block->current,
                         "moves 16 bytes at %p, which is not a multiple of 16", p);
}

#endif
