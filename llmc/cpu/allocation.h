// allocation.h: device and pinned host memory of the stand-in. Every address is known and
// every use is checked.
//
// New memory is NaN. Each allocation has a strip behind it, which cudaFree and every device
// synchronisation check. So any build reports a kernel's write past the end. Under
// AddressSanitizer reads have exact bounds too, and only the scheduler may touch device
// memory. A simulation has device addresses without memory. Its host memory is zeroed, and a
// page of it takes room when the program first writes to it.
#ifndef LLMC_CPU_ALLOCATION_H
#define LLMC_CPU_ALLOCATION_H

#include <sys/mman.h>

#include <map>

#include "clock.h"
#include "fibre.h"

struct CpuAllocation {
    size_t bytes;
    void *base;   // for free(); NULL: nothing is there, or untouched pages of munmap
    bool device;  // cudaMalloc, else cudaMallocHost
};

enum { CPU_FENCE = CPU_ASAN ? 0 : 256, CPU_FENCE_BYTE = 0xA5, CPU_BIG = 4 << 20 };
constexpr size_t CPU_PIECE = 2 << 20;  // also the size and alignment of a huge page

struct CpuMemory {
    std::map<uintptr_t, CpuAllocation> live;
    size_t device_bytes, host_bytes;  // allocated now; host: pinned
    bool open;            // device memory may be touched: the scheduler runs
    // The next address of a simulation, beyond those that a program can have.
    uintptr_t nowhere = (uintptr_t)1 << 52;
};

inline CpuMemory &cpu_memory() {
    static CpuMemory memory;
    return memory;
}

// Device: inside one live allocation of cudaMalloc. Host: no device memory, and not past
// the end of a pinned block.
enum CpuPlace { CPU_NOWHERE, CPU_HOST, CPU_DEVICE };

// Returns where [p, p + bytes) lies.
static inline CpuPlace cpu_place(const void *p, size_t bytes) {
    const auto &live = cpu_memory().live;
    uintptr_t at = (uintptr_t)p;
    auto after = live.upper_bound(at),
         a = after == live.begin() ? live.end() : std::prev(after);
    if (a != live.end() && at - a->first < a->second.bytes)
        return bytes > a->second.bytes - (at - a->first) ? CPU_NOWHERE
               : a->second.device                        ? CPU_DEVICE
                                                         : CPU_HOST;
    return after == live.end() || after->first - at >= bytes ? CPU_HOST : CPU_NOWHERE;
}
static inline bool cpu_is_device_range(const void *p, size_t bytes) {
    return cpu_place(p, bytes) == CPU_DEVICE;
}

// Calls piece(first, bytes) for parts of a range, over the OS threads when it is large.
template <class Piece>
static inline void cpu_in_pieces(size_t bytes, Piece piece) {
    size_t size = bytes < CPU_BIG ? bytes : CPU_PIECE;
#pragma omp parallel for schedule(static) if (bytes > size)
    for (size_t first = 0; first < bytes; first += size)
        piece(first, std::min(size, bytes - first));
}
static inline void cpu_fill(void *p, int byte, size_t bytes) {
    cpu_in_pieces(bytes,
                  [=](size_t first, size_t n) { memset((char *)p + first, byte, n); });
}
static inline void cpu_copy(void *to, const void *from, size_t bytes) {
    cpu_in_pieces(bytes, [=](size_t first, size_t n) {
        memmove((char *)to + first, (const char *)from + first, n);
    });
}

static inline void cpu_poison([[maybe_unused]] void *p, [[maybe_unused]] size_t bytes,
                              [[maybe_unused]] bool poison) {
#if CPU_ASAN
    if (poison)
        ASAN_POISON_MEMORY_REGION(p, bytes);
    else
        ASAN_UNPOISON_MEMORY_REGION(p, bytes);
#endif
}

// Allows or forbids to touch device memory. Returns the state before.
static inline bool cpu_open_memory(bool open) {
    CpuMemory &m = cpu_memory();
    bool before = m.open;
    m.open = open;
    if (CPU_ASAN && before != open && !cpu_simulates())
        for (auto &a : m.live)
            if (a.second.device) cpu_poison((void *)a.first, a.second.bytes, !open);
    return before;
}

static inline void *cpu_allocate(size_t bytes, bool device) {
    CpuMemory &m = cpu_memory();
    if (cpu_simulates()) {
        uintptr_t p = m.nowhere;
        if (device)
            m.nowhere += (bytes + 255) / 256 * 256;
        else
            p = (uintptr_t)mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if ((void *)p == MAP_FAILED) return NULL;
        (device ? m.device_bytes : m.host_bytes) += bytes;
        m.live[p] = {bytes, NULL, device};
        return (void *)p;
    }
    bool big = bytes >= (size_t)CPU_BIG && !CPU_ASAN;
    // Big blocks start on a huge page plus a little: blocks all equal modulo 4 KiB fight
    // for the same cache lines.
    size_t offset = big ? m.live.size() % 13 * 1280 : 0;
    char *base;
    if (bytes > SIZE_MAX / 2 ||
        posix_memalign((void **)&base, big ? CPU_PIECE : 256, bytes + offset + CPU_FENCE))
        return NULL;
    if (big) madvise(base, bytes + offset, MADV_HUGEPAGE);
    char *p = base + offset;
    cpu_fill(p, 0xFF, bytes);
    (device ? m.device_bytes : m.host_bytes) += bytes;
    memset(p + bytes, CPU_FENCE_BYTE, CPU_FENCE);
    m.live[(uintptr_t)p] = {bytes, base, device};
    if (device && !m.open) cpu_poison(p, bytes, true);
    return p;
}

// Ends the program if something was written behind the allocation.
static inline void cpu_check_fence(uintptr_t p, const CpuAllocation &a) {
    const unsigned char *fence = (const unsigned char *)p + a.bytes;
    for (int i = 0; a.base && i < CPU_FENCE; i++)
        if (fence[i] != CPU_FENCE_BYTE)
            cpu_abort("out of bounds: byte %d behind the %zu bytes of %s at %p was written",
                      i, a.bytes, a.device ? "device memory" : "pinned host memory",
                      (void *)p);
}
static inline void cpu_check_fences() {
    for (auto &a : cpu_memory().live) cpu_check_fence(a.first, a.second);
}

// Frees device or pinned memory. Returns false if p is not the start of a live allocation of
// that kind.
static inline bool cpu_release(void *p, bool device) {
    CpuMemory &m = cpu_memory();
    auto a = m.live.find((uintptr_t)p);
    if (a == m.live.end() || a->second.device != device) return false;
    cpu_check_fence(a->first, a->second);
    (device ? m.device_bytes : m.host_bytes) -= a->second.bytes;
    if (a->second.base) cpu_poison(p, a->second.bytes, false);
    if (!a->second.base && !device) munmap(p, a->second.bytes);
    free(a->second.base);
    m.live.erase(a);
    return true;
}

#endif
