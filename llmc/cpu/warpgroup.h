// warpgroup.h: the asynchronous instructions of llmc/kernels/wgmma.cuh on a CPU. A GPU may
// do them late, and here they are done as late as they can be:
//   a copy     when no thread can run without it;
//   a product  when its thread waits for it, with the registers and shared memory of that time.
// In random orders (CPU_THREAD_ORDER) copies also come early, in any order. So a missing
// wait gives a wrong result, and so does a tile that is released too early.
//
// Descriptors, swizzles and fragments are decoded as the PTX ISA defines them.
#ifndef LLMC_CPU_WARPGROUP_H
#define LLMC_CPU_WARPGROUP_H

#include <deque>
#include <map>

#include "tensor_core.h"

#define __grid_constant__

// Few, so that a persistent block does several items.
static inline int device_multiprocessors() {
    return 3;
}

// x[B, T, heads, HS].
struct CUtensorMap {
    const __nv_bfloat16 *x;
    size_t B, T, heads, HS;
};
static inline CUtensorMap tensor_map(const __nv_bfloat16 *x, size_t B, size_t T,
                                     size_t heads, size_t HS) {
    return {x, B, T, heads, HS};
}

struct CpuBarrier {
    unsigned count, missing;  // threads
    long bytes;               // that are still to come
    uint32_t parity;          // of the phase that runs
    std::vector<CpuFibre *> waiting;
};

struct CpuTile {
    CUtensorMap map;
    uint32_t to, barrier;
    int channel, head, row, sequence;
};

// One thread's view of wgmma.mma_async: a[64, 16] b[16, 8 n8], a by fragments if there
// are any.
struct CpuWgmma {
    float (*d)[4];
    int n8;
    const uint32_t *fragments;
    uint64_t a, b;
    bool add;
};
struct CpuWgmmas {
    bool fenced;
    std::vector<CpuWgmma> open;
    std::deque<std::vector<CpuWgmma>> groups;
};

// The copies and products in flight in the block of an OS thread.
struct CpuWarpgroups {
    uint64_t block;
    // By address; those of warpgroups behind all addresses.
    std::map<uint32_t, CpuBarrier> barriers;
    std::vector<CpuTile> tiles;
    CpuWgmmas of_thread[CPU_MAX_THREADS];
};

inline bool cpu_late_tile(CpuBlock *);

// Returns the state of the running block. A new block must find nothing in flight.
static inline CpuWarpgroups &cpu_warpgroups() {
    static thread_local CpuWarpgroups of_block;
    CpuWarpgroups &w = of_block;
    if (w.block == cpu_block->blocks) return w;
    bool left = !w.tiles.empty();
    for (CpuWgmmas &t : w.of_thread) {
        left = left || !t.open.empty() || !t.groups.empty();
        t.fenced = false;
    }
    if (left)
        cpu_kernel_abort(cpu_block->current,
                         "finds copies or products that an earlier block left in flight");
    w.block = cpu_block->blocks;
    w.barriers.clear();
    cpu_block->late = cpu_late_tile;
    return w;
}

static inline uint32_t shared_address(const void *p) {
    return (uint32_t)((const uint8_t *)p - cpu_dynamic_shared());
}

// ---- barriers --------------------------------------------------------------------------

static inline CpuBarrier &cpu_barrier(uint32_t address) {
    CpuWarpgroups &w = cpu_warpgroups();
    auto found = w.barriers.find(address);
    if (found == w.barriers.end())
        cpu_kernel_abort(cpu_block->current, "uses a barrier before its initialisation");
    return found->second;
}

// Ends the phase if nothing is missing.
static inline void cpu_barrier_changed(CpuBarrier *b) {
    if (b->missing || b->bytes) return;
    b->missing = b->count;
    b->parity ^= 1;
    for (CpuFibre *f : b->waiting) cpu_make_ready(cpu_block, f);
    b->waiting.clear();
}

static inline void barrier_init(uint32_t barrier, uint32_t count) {
    if (barrier % 8)
        cpu_kernel_abort(cpu_block->current, "has a barrier at no multiple of 8 bytes");
    cpu_warpgroups().barriers[barrier] = {count, count, 0, 0, {}};
}
static inline void barriers_ready() {
}

static inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
    CpuBarrier &b = cpu_barrier(barrier);
    if (!b.missing)
        cpu_kernel_abort(cpu_block->current,
                         "arrives at a barrier at which all have arrived");
    b.missing--;
    b.bytes += bytes;
    cpu_barrier_changed(&b);
}
static inline void barrier_arrive(uint32_t barrier) {
    barrier_expect(barrier, 0);
}

static inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    while (cpu_barrier(barrier).parity == parity) {
        cpu_barrier(barrier).waiting.push_back(cpu_block->running);
        cpu_leave(cpu_block, false);
    }
}

static inline void warpgroup_barrier(int wg) {
    uint32_t address = CPU_DYNAMIC_SHARED + 8 * (uint32_t)wg;
    if (!cpu_warpgroups().barriers.count(address)) barrier_init(address, 128);
    uint32_t parity = cpu_barrier(address).parity;
    barrier_arrive(address);
    barrier_wait(address, parity);
}

// ---- copies ----------------------------------------------------------------------------

// Returns the element of a swizzled tile at an address of the unswizzled one.
static inline __nv_bfloat16 *cpu_swizzled(uint32_t address) {
    return (__nv_bfloat16 *)(void *)(cpu_dynamic_shared() +
                                     (address ^ (address >> 7 & 7) << 4));
}

// Does one of the copies in flight.
static inline void cpu_copy_tile(size_t which) {
    CpuWarpgroups &w = cpu_warpgroups();
    CpuTile t = w.tiles[which];
    w.tiles.erase(w.tiles.begin() + (ptrdiff_t)which);
    for (int r = 0; r < 64; r++) {
        size_t row = (size_t)(t.row + r), head = (size_t)t.head;
        size_t channel = (size_t)t.channel;
        const __nv_bfloat16 *from = t.map.x;
        from += (((size_t)t.sequence * t.map.T + row) * t.map.heads + head) * t.map.HS +
                channel;
        for (int c = 0; c < 64; c++) {
            *cpu_swizzled(t.to + (uint32_t)(r * 128 + c * 2)) =
                row < t.map.T ? from[c] : __float2bfloat16_rn(0.0f);
        }
    }
    CpuBarrier &b = cpu_barrier(t.barrier);
    b.bytes -= 64 * 128;
    cpu_barrier_changed(&b);
}

static inline size_t cpu_any_tile() {
    CpuBlock *b = cpu_block;
    return b->order.on ? random_next(&b->order) % cpu_warpgroups().tiles.size() : 0;
}

// Does a copy when no thread of the block can go on. Returns false if there is none to do
// and no barrier is waited for.
inline bool cpu_late_tile(CpuBlock *) {
    CpuWarpgroups &w = cpu_warpgroups();
    if (!w.tiles.empty()) return cpu_copy_tile(cpu_any_tile()), true;
    for (auto &at : w.barriers) {
        if (at.second.waiting.empty()) continue;
        cpu_kernel_abort(at.second.waiting[0]->thread,
                         "waits for ever at the barrier at byte %u of shared memory: %u "
                         "threads and %ld bytes are missing",
                         at.first, at.second.missing, at.second.bytes);
    }
    return false;
}

static inline void tile_copy(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                             int channel, int head, int row, int sequence) {
    CpuWarpgroups &w = cpu_warpgroups();
    bool there = (size_t)head < map->heads && (size_t)sequence < map->B &&
                 (size_t)channel + 64 <= map->HS && row >= 0;
    if (to % 1024 || to + 64 * 128 > CPU_DYNAMIC_SHARED || !there)
        cpu_kernel_abort(cpu_block->current, "copies a tile from or to no place");
    w.tiles.push_back({*map, to, barrier, channel, head, row, sequence});
    bool early = cpu_block->order.on && random_next(&cpu_block->order) % 2;
    if (early) cpu_copy_tile(cpu_any_tile());
}

template <int N>
static inline void registers_less() {
}
template <int N>
static inline void registers_more() {
}

// ---- products --------------------------------------------------------------------------

static inline CpuWgmmas &cpu_wgmmas() {
    return cpu_warpgroups().of_thread[cpu_block->current];
}

static inline void wgmma_fence() {
    cpu_wgmmas().fenced = true;
}

static inline void cpu_wgmma(const CpuWgmma &product) {
    if (!cpu_wgmmas().fenced)
        cpu_kernel_abort(cpu_block->current, "begins products without wgmma_fence");
    cpu_wgmmas().open.push_back(product);
}

static inline void wgmma_commit() {
    CpuWgmmas &w = cpu_wgmmas();
    w.groups.push_back(w.open);
    w.open.clear();
    w.fenced = false;
}

// Returns element (k, n) of a described factor. If rows of the tile are rows of k, n lies
// along them.
static inline float cpu_factor(uint64_t matrix, bool rows_of_k, uint32_t k, uint32_t n) {
    uint32_t start = (uint32_t)(matrix & 0x3FFF) << 4;
    uint32_t panel = (uint32_t)(matrix >> 16 & 0x3FFF) << 4;
    uint32_t eight = (uint32_t)(matrix >> 32 & 0x3FFF) << 4;
    uint32_t at = rows_of_k ? n / 64 * panel + n % 64 * 2 + k / 8 * eight + k % 8 * 128
                            : n / 8 * eight + n % 8 * 128 + k * 2;
    return bf16_to_float(cpu_swizzled(start + at)->__x);
}

// The oldest group of a warp's threads: 16 rows of each product.
struct CpuWgmmaGroup {
    std::vector<CpuWgmma> products;
    unsigned warp;  // of its warpgroup

    static void run(CpuWgmmaGroup *const *lanes) {
        float a[16][16], b[16][128];
        for (size_t i = 0; i < lanes[0]->products.size(); i++) {
            const CpuWgmma &first = lanes[0]->products[i];
            int columns = 8 * first.n8;
            if (first.a >> 62 > 1 || first.b >> 62 != 1)
                cpu_kernel_abort(cpu_block->current, "has a factor that is not swizzled");
            for (int r = 0; r < 16; r++) {
                for (int k = 0; k < 16; k++) {
                    const uint32_t *pairs =
                        lanes[r % 8 * 4 + k % 8 / 2]->products[i].fragments;
                    uint32_t row = lanes[0]->warp * 16 + (uint32_t)r;
                    if (pairs)
                        a[r][k] = bf16_to_float(
                            (uint16_t)(pairs[k / 8 * 2 + r / 8] >> k % 2 * 16));
                    else
                        a[r][k] = cpu_factor(first.a, false, (uint32_t)k, row);
                }
            }
            for (int k = 0; k < 16; k++)
                for (int n = 0; n < columns; n++)
                    b[k][n] = cpu_factor(first.b, first.fragments != NULL, (uint32_t)k,
                                         (uint32_t)n);
            for (int r = 0; r < 16; r++) {
                float sum[128] = {};
                for (int k = 0; k < 16; k++)
                    for (int n = 0; n < columns; n++) sum[n] += a[r][k] * b[k][n];
                for (int n = 0; n < columns; n++) {
                    const CpuWgmma &lane = lanes[r % 8 * 4 + n % 8 / 2]->products[i];
                    float &d = lane.d[n / 8][r / 8 * 2 + n % 2];
                    d = lane.add ? d + sum[n] : sum[n];
                }
            }
        }
    }
};

template <int LEFT>
static inline void wgmma_wait() {
    if (!cpu_wgmmas().open.empty())
        cpu_kernel_abort(cpu_block->current, "waits for products without wgmma_commit");
    while (cpu_wgmmas().groups.size() > LEFT) {
        CpuWgmmaGroup lane = {cpu_wgmmas().groups.front(),
                              cpu_block->current / CPU_WARP % 4};
        cpu_warp_together(&lane);
        cpu_wgmmas().groups.pop_front();
    }
}

template <class T, int N>
static inline void pin(T (&)[N][4]) {
}
template <int N>
static inline void fresh(float (&d)[N][4]) {
    for (int i = 0; i < 4 * N; i++) d[i / 4][i % 4] = NAN;
}

template <int N8>
static inline void wgmma_rows(float (&d)[N8][4], uint64_t a, uint64_t b, int add) {
    cpu_wgmma({d, N8, NULL, a, b, add != 0});
}
template <int N8>
static inline void wgmma_columns(float (&d)[N8][4], const uint32_t (&a)[4], uint64_t b) {
    cpu_wgmma({d, N8, a, 0, b, true});
}

#endif
