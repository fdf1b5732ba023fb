// attention_wgmma.cuh: flash attention for Hopper (sm_90a): bf16, heads of 64 or 128
// channels, no dropout. The products are asynchronous and read tiles in shared memory. The
// copy engine writes them there (wgmma.cuh).
//
// A block has two warpgroups of 64 rows each: queries, or keys for the gradients of keys
// and values. It goes over tiles of the other side, which pass through a ring of stages. A
// stage holds two tiles, x and y: keys and values, or queries and the gradients of their
// outputs. A stage has these barriers:
//
//   full    One for x and one for y. The warps wait until the copy engine has filled a stage.
//   empty   The copying thread waits until all eight warps have released a stage, and fills
//           it again.
//   own     The same two for the block's own rows, which stay in shared memory while the
//           tiles pass.
//
// Each sum is made by one warp in a fixed order: there are no atomics, and every run has
// the same bits. Backward makes the scores twice instead, as in attention_mma.cuh.
//
// defines, in bf16: attention_wgmma_takes, attention_wgmma
#ifndef LLMC_ATTENTION_WGMMA_CUH
#define LLMC_ATTENTION_WGMMA_CUH

#include <algorithm>

#include "llmc/kernels/attention_tiles.cuh"
#include "llmc/kernels/packs.cuh"
#include "llmc/kernels/wgmma.cuh"

#ifdef PRECISION_BF16

//   TILE        Rows of a tile.
//   BLOCKS      Blocks of a multiprocessor.
//   PERSISTENT  A third warpgroup copies and gives its registers to the others. A block does
//               item after item, so that the copies for one overlap the end of another.
//               Without it the first thread copies between products.
template <int HS_, int TILE_, int STAGES_, int BLOCKS_, bool PERSISTENT_>
struct AttentionWgmma {
    static constexpr int HS = HS_, TILE = TILE_, STAGES = STAGES_, BLOCKS = BLOCKS_;
    static constexpr bool PERSISTENT = PERSISTENT_;
    static constexpr int CONSUMERS = 256, THREADS = CONSUMERS + (PERSISTENT ? 128 : 0),
                         WARPS = CONSUMERS / 32;
    // Rows of a block; places for them.
    static constexpr int OWN = 128, BUFFERS = PERSISTENT ? 2 : 1;
    static constexpr int OWN_BYTES = OWN * HS * 2, TILE_BYTES = TILE * HS * 2;
};

// The fastest variant that was timed on an H200 (dev/results/h200-2026-11-27.md).
template <int HS>
using WgmmaForward = std::conditional_t<HS == 64, AttentionWgmma<64, 64, 4, 2, false>,
                                        AttentionWgmma<128, 128, 2, 1, true>>;
template <int HS>
using WgmmaQuery = std::conditional_t<HS == 64, AttentionWgmma<64, 64, 4, 2, false>,
                                      AttentionWgmma<128, 64, 3, 1, true>>;
template <int HS>
using WgmmaKey = std::conditional_t<HS == 64, AttentionWgmma<64, 64, 4, 1, true>,
                                    AttentionWgmma<128, 64, 3, 1, false>>;

// ---- items: which rows a block has -----------------------------------------------------

// A block's rows of one head, and its tiles.
struct WgmmaItem {
    bool exists;
    int b, h;   // sequence; head, of the keys in their kernel
    int row;    // first own row
    int tiles;  // of one head
};

// Each head has `blocks` items; rank 0 has the most tiles. Persistent blocks take turns
// from either end, so that large and small items alternate. They take `group` heads
// together, the items of one rank first, so that the heads' tensors stay in L2.
struct WgmmaItems {
    int T, heads, count, blocks, group;  // heads of a sequence, and of all

    template <class C, bool KEYS>
    __device__ __forceinline__ WgmmaItem item(int round) const {
        int rank = (int)blockIdx.x % blocks, head = (int)blockIdx.x / blocks;
        bool exists = round == 0;
        if constexpr (C::PERSISTENT) {
            const int blocks_ = (int)gridDim.x;
            const int turn = round % 2 ? blocks_ - 1 - (int)blockIdx.x : (int)blockIdx.x;
            const int i = round * blocks_ + turn;
            exists = i < blocks * count;
            const int first = i / (blocks * group) * group, rest = i % (blocks * group);
            const int size = group < count - first ? group : count - first;
            rank = exists ? rest / size : 0;
            head = exists ? first + rest % size : 0;
        }
        WgmmaItem at = {exists, head / heads, head % heads,
                        (KEYS ? rank : blocks - 1 - rank) * C::OWN, 0};
        // The end of the keys that its queries see.
        const int end = at.row + C::OWN < T ? at.row + C::OWN : T;
        at.tiles = ((KEYS ? T - at.row : end) + C::TILE - 1) / C::TILE;
        return at;
    }
};

// ---- the ring --------------------------------------------------------------------------

// A position in the ring, and the parity of its barriers' phase there.
template <int STAGES>
struct WgmmaStage {
    int s = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++s < STAGES) return;
        s = 0;
        parity ^= 1;
    }
};

// Shared memory: OWNS tiles of own rows (twice in a persistent kernel), the ring, EXTRA
// bytes, barriers.
template <class C, int OWNS, int EXTRA = 0>
struct WgmmaRing {
    static constexpr int S = C::STAGES, RING = OWNS * C::BUFFERS * C::OWN_BYTES;
    static constexpr int EXTRA_AT = RING + S * 2 * C::TILE_BYTES,
                         BARRIERS = EXTRA_AT + EXTRA;
    static constexpr int BYTES = BARRIERS + 8 * (3 * S + 2 * C::BUFFERS);
    static_assert(BYTES <= 232448 / C::BLOCKS, "shared memory of a multiprocessor");
    uint32_t base;

    __device__ __forceinline__ WgmmaRing(const void *shared)
        : base(shared_address(shared)) {
        if (threadIdx.x == 0) {
            for (int s = 0; s < S; s++) {
                barrier_init(x_full(s), 1);
                barrier_init(y_full(s), 1);
                barrier_init(empty(s), C::WARPS);
            }
            for (int i = 0; i < C::BUFFERS; i++) {
                barrier_init(own_full(i), 1);
                barrier_init(own_empty(i), C::WARPS);
            }
            barriers_ready();
        }
        __syncthreads();
    }

    __device__ __forceinline__ uint32_t own(int i, int buffer) const {
        return base + (buffer * OWNS + i) * C::OWN_BYTES;
    }
    __device__ __forceinline__ uint32_t x(int s) const {
        return base + RING + s * 2 * C::TILE_BYTES;
    }
    __device__ __forceinline__ uint32_t y(int s) const { return x(s) + C::TILE_BYTES; }
    __device__ __forceinline__ uint32_t barrier(int i) const {
        return base + BARRIERS + 8 * i;
    }
    __device__ __forceinline__ uint32_t x_full(int s) const { return barrier(s); }
    __device__ __forceinline__ uint32_t y_full(int s) const { return barrier(S + s); }
    __device__ __forceinline__ uint32_t empty(int s) const { return barrier(2 * S + s); }
    __device__ __forceinline__ uint32_t own_full(int i) const { return barrier(3 * S + i); }
    __device__ __forceinline__ uint32_t own_empty(int i) const {
        return barrier(3 * S + C::BUFFERS + i);
    }

    // Releases a stage, or a buffer of own rows, for this warp.
    __device__ __forceinline__ void release(int s) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty(s));
    }
    __device__ __forceinline__ void release_own(int i) const {
        __syncwarp();
        if (C::PERSISTENT && threadIdx.x % 32 == 0) barrier_arrive(own_empty(i));
    }
    // Passes a tile that this warp does not need. The tile must have come: an arrival that
    // is too early would count for the tile before it.
    __device__ __forceinline__ void skip(const WgmmaStage<S> &at) const {
        barrier_wait(x_full(at.s), at.parity);
        release(at.s);
    }

    // Starts the copy of ROWS rows of a head.
    template <int ROWS>
    __device__ __forceinline__ static void copy(uint32_t to, const CUtensorMap *map,
                                                uint32_t barrier, int head, int row,
                                                int sequence) {
        UNROLL
        for (int panel = 0; panel < C::HS / 64; panel++) {
            UNROLL
            for (int r = 0; r < ROWS; r += 64)
                tile_copy(to + (panel * ROWS + r) * 128, map, barrier, panel * 64, head,
                          row + r, sequence);
        }
    }
    // Copies the own rows of item number `round`: of map0's head0 and, with two, of map1's
    // head1.
    __device__ __forceinline__ void copy_own(int round, const CUtensorMap *map0, int head0,
                                             const CUtensorMap *map1, int head1,
                                             const WgmmaItem &item) const {
        const int i = round % C::BUFFERS;
        if (round >= C::BUFFERS) barrier_wait(own_empty(i), (round / C::BUFFERS - 1) & 1);
        barrier_expect(own_full(i), OWNS * C::OWN_BYTES);
        copy<C::OWN>(own(0, i), map0, own_full(i), head0, item.row, item.b);
        if (OWNS == 2) copy<C::OWN>(own(1, i), map1, own_full(i), head1, item.row, item.b);
    }
    // Copies x and y, the block's tile number `total`.
    __device__ __forceinline__ void copy_tiles(int total, const CUtensorMap *map0,
                                               int head0, const CUtensorMap *map1,
                                               int head1, int row, int sequence) const {
        const int s = total % S;
        if (total >= S) barrier_wait(empty(s), (total / S - 1) & 1);
        barrier_expect(x_full(s), C::TILE_BYTES);
        copy<C::TILE>(x(s), map0, x_full(s), head0, row, sequence);
        barrier_expect(y_full(s), C::TILE_BYTES);
        copy<C::TILE>(y(s), map1, y_full(s), head1, row, sequence);
    }
};

// Starts the copies: own(item, round) copies an item's own rows, tile(item, total, n) its
// tile n of `group` heads'. In a persistent kernel the copying warpgroup does all of them. It
// returns true to its threads, which must exit. Otherwise the first thread begins, and calls
// copy_ahead later.
template <class C, bool KEYS, class Own, class Tile>
__device__ __forceinline__ bool start_copies(const WgmmaItems &items, int group, Own own,
                                             Tile tile) {
    if constexpr (C::PERSISTENT) {
        if (threadIdx.x < C::CONSUMERS) {
            registers_more<240>();
            return false;
        }
        registers_less<24>();
        if (threadIdx.x != C::CONSUMERS) return true;
        WgmmaItem item = items.item<C, KEYS>(0);
        for (int round = 0, total = 0; item.exists; item = items.item<C, KEYS>(++round)) {
            own(item, round);
            for (int n = 0; n < group * item.tiles; n++) tile(item, total++, n);
        }
        return true;
    } else {
        const WgmmaItem item = items.item<C, KEYS>(0);
        if (threadIdx.x == 0) {
            own(item, 0);
            for (int n = 0; n < C::STAGES - 1 && n < group * item.tiles; n++)
                tile(item, n, n);
        }
        __syncwarp();
        return false;
    }
}

// Has the first thread copy the tile STAGES - 1 behind tile n. No product may be in flight,
// as the thread diverges.
template <class C, class Tile>
__device__ __forceinline__ void copy_ahead(const WgmmaItem &item, int n, int tiles,
                                           Tile tile) {
    if constexpr (!C::PERSISTENT) {
        n += C::STAGES - 1;
        if (threadIdx.x == 0 && n < tiles) tile(item, n, n);
        __syncwarp();
    }
}

// ---- rows of a warp --------------------------------------------------------------------

// Returns the number of the thread's warp. The compiler then knows that its neighbours have
// the same number.
__device__ __forceinline__ int wgmma_warp() {
    return (int)__shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
}

// Places a lane in the block's rows.
__device__ __forceinline__ MmaPlace wgmma_place(const WgmmaItem &item, int warp, int T) {
    MmaPlace p = MmaPlace();
    p.T = T;
    p.warp_row = item.row + warp * 16;
    p.row = p.warp_row + (int)(threadIdx.x % 32) / 4;
    p.pair = (int)(threadIdx.x % 4) * 2;
    return p;
}

// Returns the number of tiles that the 64 queries from `row` on see.
template <class C>
__device__ __forceinline__ int wgmma_tiles(int row, int T) {
    const int end = row + 64 < T ? row + 64 : T;  // of the keys
    return row < T ? (end + C::TILE - 1) / C::TILE : 0;
}

template <int N8>
__device__ __forceinline__ void clear(float (&d)[N8][4]) {
    UNROLL
    for (int i = 0; i < 4 * N8; i++) d[i / 4][i % 4] = 0.0f;
}

// Writes d fragments as rows of bf16 times scale0 and scale1; p is the lane's first row.
// The lanes of a row exchange pairs, so that each writes 16 bytes.
template <int N8>
__device__ __forceinline__ void store_rows(bfloat16 *p, size_t stride, const MmaPlace &at,
                                           const float (&d)[N8][4], float scale0,
                                           float scale1) {
    const int t = (int)threadIdx.x % 4;
    UNROLL
    for (int half = 0; half < 2; half++) {
        UNROLL
        for (int n = 0; n < N8; n += 4) {
            const float scale = half ? scale1 : scale0;
            uint32_t w[4];
            UNROLL
            for (int i = 0; i < 4; i++)
                w[i] =
                    pack_bf16(d[n + i][half * 2] * scale, d[n + i][half * 2 + 1] * scale);
            UNROLL
            for (int step = 1; step < 4; step *= 2) {  // transposes the lanes' 4 x 4 words
                UNROLL
                for (int i = 0; i < 4; i++) {
                    if (i & step) continue;
                    uint32_t &low = w[i], &high = w[i + step];
                    const uint32_t other =
                        __shfl_xor_sync(0xFFFFFFFFu, t & step ? low : high, step);
                    (t & step ? low : high) = other;
                }
            }
            if (at.row + half * 8 < at.T)
                store_whole(p + half * 8 * stride + (n + t) * 8, w);
        }
    }
}

// ---- forward ---------------------------------------------------------------------------

// Makes scores into probabilities relative to the largest so far. Returns true if the
// largest of a row of the warp grew (or if SKIP is false). Then `correction` is the factor
// of the earlier sums.
template <bool SKIP, int N8>
__device__ __forceinline__ bool softmax_tile(float (&s)[N8][4], float (&max)[2],
                                             float (&sum)[2], float (&correction)[2],
                                             float to_log2) {
    float odd[2] = {s[0][1], s[0][3]}, largest[2] = {max[0], max[1]};
    float part[2] = {0.0f, 0.0f};
    UNROLL
    for (int i = 0; i < 4 * N8; i++) {
        float &to = i % 2 ? odd[i % 4 / 2] : largest[i % 4 / 2];
        to = larger(to, s[i / 4][i % 4]);
    }
    UNROLL
    for (int i = 0; i < 2; i++) largest[i] = larger(largest[i], odd[i]);
    quad_max(largest);
    const float shift[2] = {largest[0] * to_log2, largest[1] * to_log2};
    const bool grew = !SKIP || warp_any(largest[0] > max[0] || largest[1] > max[1]);
    if (grew) {
        UNROLL
        for (int i = 0; i < 2; i++) {
            correction[i] = exponential2(max[i] * to_log2 - shift[i]);
            sum[i] *= correction[i];
            max[i] = largest[i];
        }
    }
    UNROLL
    for (int i = 0; i < 4 * N8; i++) {
        float &x = s[i / 4][i % 4];
        x = exponential2(fmaf(x, to_log2, -shift[i % 4 / 2]));
        (i % 2 ? part : sum)[i % 4 / 2] += x;
    }
    sum[0] += part[0];
    sum[1] += part[1];
    return grew;
}

// P V of a tile and the scores of the next are one queue; the softmax between runs beside
// the other warpgroups' products.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    attention_forward_wgmma_kernel(const __grid_constant__ CUtensorMap qkv, Attention a,
                                   WgmmaItems items) {
#ifdef WGMMA_CODE
    constexpr int HS = C::HS, KEYS = C::TILE;
    DYNAMIC_SHARED(shared);
    const WgmmaRing<C, 1> ring(shared);
    const int T = (int)a.T, NH = (int)a.NH, KV = (int)a.KV;
    const auto own = [&](const WgmmaItem &i, int round) {
        ring.copy_own(round, &qkv, i.h, &qkv, i.h, i);
    };
    const auto copy = [&](const WgmmaItem &i, int total, int n) {
        const int key = NH + i.h / (NH / KV);
        ring.copy_tiles(total, &qkv, key, &qkv, key + KV, n * KEYS, i.b);
    };
    if (start_copies<C, false>(items, 1, own, copy)) return;

    const int warp = wgmma_warp(), wg = warp / 4;
    const float to_log2 = a.scale * LOG2_E;
    WgmmaStage<C::STAGES> at;
    WgmmaItem item = items.item<C, false>(0);
    for (int round = 0; item.exists; item = items.item<C, false>(++round)) {
        const MmaPlace rows = wgmma_place(item, warp, T);
        const int buffer = round % C::BUFFERS, mine = wgmma_tiles<C>(item.row + wg * 64, T);
        float o[HS / 8][4], s[KEYS / 8][4], max[2] = {-INFINITY, -INFINITY};
        float sum[2] = {0.0f, 0.0f}, correction[2];
        uint32_t p[KEYS / 16][4];
        const auto scores = [&] {
            barrier_wait(ring.x_full(at.s), at.parity);
            fresh(s);
            wgmma_fence();
            product_rows<HS, C::OWN>(s, ring.own(0, buffer) + wg * 64 * 128, ring.x(at.s));
            wgmma_commit();
        };
        const auto mix = [&] {
            barrier_wait(ring.y_full(at.s), at.parity);
            pin(o);
            pin(p);
            wgmma_fence();
            product_columns(o, p, ring.y(at.s));
            wgmma_commit();
        };
        // A tile whose scores are in flight. last: of the warpgroup's.
        const auto tile = [&](int n, auto last) {
            wgmma_wait<0>();
            pin(s);
            copy_ahead<C>(item, n, item.tiles, copy);
            hide_fragments<true>(s, rows, n * KEYS);
            if (softmax_tile<HS == 64>(s, max, sum, correction, to_log2)) {
                UNROLL
                for (int i = 0; i < HS / 2; i++) o[i / 4][i % 4] *= correction[i % 4 / 2];
            }
            round_fragments<false>(p, s, 0);
            mix();
            const int done = at.s;
            at.next();
            if constexpr (last.value) {
                wgmma_wait<0>();
            } else {
                scores();
                wgmma_wait<1>();
            }
            pin(o);
            ring.release(done);
        };
        if (mine > 0) {
            clear(o);
            barrier_wait(ring.own_full(buffer), round / C::BUFFERS & 1);
            pin(o);
            scores();
            for (int n = 0; n + 1 < mine; n++) tile(n, std::false_type());
            tile(mine - 1, std::true_type());
        }
        ring.release_own(buffer);
        for (int n = mine; n < item.tiles; n++, at.next()) {
            copy_ahead<C>(item, n, item.tiles, copy);
            ring.skip(at);
        }
        if (mine > 0) {
            quad_sum(sum);
            bfloat16 *to = a.out + ((size_t)item.b * T + rows.row) * a.out_stride +
                           (size_t)item.h * HS;
            store_rows(to, a.out_stride, rows, o, 1.0f / sum[0], 1.0f / sum[1]);
            float *lse = a.lse + ((size_t)item.b * NH + item.h) * T + rows.row;
            UNROLL
            for (int i = 0; i < 2; i++)
                if (rows.pair == 0 && rows.row + i * 8 < T)
                    lse[i * 8] = max[i] * a.scale + logf(sum[i]);
        }
    }
#endif
}

// ---- backward: queries -----------------------------------------------------------------

// Returns the dot product of 16 bytes of two rows.
__device__ __forceinline__ float dot_eight(const bfloat16 *x, const bfloat16 *y) {
    const Packed128<uint32_t> a = load128((const uint32_t *)x),
                              b = load128((const uint32_t *)y);
    float sum = 0.0f;
    UNROLL
    for (int i = 0; i < 4; i++)
        sum += low_float(a.v[i]) * low_float(b.v[i]) +
               high_float(a.v[i]) * high_float(b.v[i]);
    return sum;
}

// Computes the gradient of the queries, and dot, which the other kernel needs too.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    attention_backward_query_wgmma_kernel(const __grid_constant__ CUtensorMap qkv,
                                          const __grid_constant__ CUtensorMap dout,
                                          Attention a, WgmmaItems items) {
#ifdef WGMMA_CODE
    constexpr int HS = C::HS, KEYS = C::TILE;
    DYNAMIC_SHARED(shared);
    const WgmmaRing<C, 2> ring(shared);
    const int T = (int)a.T, NH = (int)a.NH, KV = (int)a.KV;
    const auto own = [&](const WgmmaItem &i, int round) {
        ring.copy_own(round, &qkv, i.h, &dout, i.h, i);
    };
    const auto copy = [&](const WgmmaItem &i, int total, int n) {
        const int key = NH + i.h / (NH / KV);
        ring.copy_tiles(total, &qkv, key, &qkv, key + KV, n * KEYS, i.b);
    };
    if (start_copies<C, false>(items, 1, own, copy)) return;

    const int warp = wgmma_warp(), wg = warp / 4;
    const float to_log2 = a.scale * LOG2_E;
    WgmmaStage<C::STAGES> at;
    WgmmaItem item = items.item<C, false>(0);
    for (int round = 0; item.exists; item = items.item<C, false>(++round)) {
        const MmaPlace rows = wgmma_place(item, warp, T);
        const int buffer = round % C::BUFFERS, mine = wgmma_tiles<C>(item.row + wg * 64, T);
        const uint32_t q = ring.own(0, buffer) + wg * 64 * 128;
        const uint32_t d = ring.own(1, buffer) + wg * 64 * 128;
        float of_row[2] = {0.0f, 0.0f}, norm[2];
        float dq[HS / 8][4], s[KEYS / 8][4], ds[KEYS / 8][4];
        uint32_t e[KEYS / 16][4];
        if (mine > 0) {
            UNROLL
            for (int i = 0; i < 2; i++) {
                if (rows.row + i * 8 >= T) continue;
                const size_t row = (size_t)item.b * T + rows.row + i * 8;
                const size_t from = row * a.out_stride + (size_t)item.h * HS +
                                    rows.pair * 4;
                UNROLL
                for (int c = 0; c < HS; c += 32)
                    of_row[i] += dot_eight(a.y + from + c, a.dout + from + c);
            }
            quad_sum(of_row);
            UNROLL
            for (int i = 0; i < 2; i++) {
                const size_t row = ((size_t)item.b * NH + item.h) * T + rows.row + i * 8;
                const bool exists = rows.row + i * 8 < T;
                norm[i] = exists ? a.lse[row] * LOG2_E : INFINITY;
                if (exists && rows.pair == 0) a.dot[row] = of_row[i];
            }
            clear(dq);
            barrier_wait(ring.own_full(buffer), round / C::BUFFERS & 1);
        }
        for (int n = 0; n < mine; n++) {
            copy_ahead<C>(item, n, item.tiles, copy);
            barrier_wait(ring.x_full(at.s), at.parity);
            fresh(s);
            wgmma_fence();
            product_rows<HS, C::OWN>(s, q, ring.x(at.s));
            wgmma_commit();
            barrier_wait(ring.y_full(at.s), at.parity);
            fresh(ds);
            wgmma_fence();
            product_rows<HS, C::OWN>(ds, d, ring.y(at.s));
            wgmma_commit();
            wgmma_wait<1>();  // the scores are there, dP is on its way
            pin(s);
            hide_fragments<true>(s, rows, n * KEYS);
            UNROLL
            for (int i = 0; i < KEYS / 2; i++)
                s[i / 4][i % 4] =
                    exponential2(fmaf(s[i / 4][i % 4], to_log2, -norm[i % 4 / 2]));
            wgmma_wait<0>();
            pin(ds);
            UNROLL
            for (int i = 0; i < KEYS / 2; i++)
                ds[i / 4][i % 4] = s[i / 4][i % 4] * (ds[i / 4][i % 4] - of_row[i % 4 / 2]);
            round_fragments<false>(e, ds, 0);
            pin(dq);
            pin(e);
            wgmma_fence();
            product_columns(dq, e, ring.x(at.s));
            wgmma_commit();
            wgmma_wait<0>();
            pin(dq);
            ring.release(at.s);
            at.next();
        }
        ring.release_own(buffer);
        for (int n = mine; n < item.tiles; n++, at.next()) {
            copy_ahead<C>(item, n, item.tiles, copy);
            ring.skip(at);
        }
        if (mine > 0) {
            bfloat16 *to = a.dq + ((size_t)item.b * T + rows.row) * a.stride +
                           (size_t)item.h * HS;
            store_rows(to, a.stride, rows, dq, a.scale, a.scale);
        }
    }
#endif
}

// ---- backward: keys and values ---------------------------------------------------------

// With lse and dot of the queries of two tiles, a copy for each of two warpgroups.
template <class C>
using WgmmaKeyRing = WgmmaRing<C, 2, 2 * 2 * 2 * C::TILE * sizeof(float)>;

// Computes the gradients of the keys and values. Rows are keys, and columns of the
// (transposed) scores are queries. A head of keys takes the query heads that it serves one
// after the other.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    attention_backward_key_wgmma_kernel(const __grid_constant__ CUtensorMap qkv,
                                        const __grid_constant__ CUtensorMap dout,
                                        Attention a, WgmmaItems items) {
#ifdef WGMMA_CODE
    constexpr int HS = C::HS, QUERIES = C::TILE;
    static_assert(QUERIES == 64,
                  "half of a warpgroup's threads have a query's lse, the others its dot");
    DYNAMIC_SHARED(shared);
    const WgmmaKeyRing<C> ring(shared);
    const int T = (int)a.T, NH = (int)a.NH, KV = (int)a.KV, group = NH / KV;
    const auto own = [&](const WgmmaItem &i, int round) {
        ring.copy_own(round, &qkv, NH + i.h, &qkv, NH + KV + i.h, i);
    };
    const auto copy = [&](const WgmmaItem &i, int total, int n) {
        int h = i.h * group;
        for (; n >= i.tiles; n -= i.tiles) h++;
        ring.copy_tiles(total, &qkv, h, &dout, h, i.row + n * QUERIES, i.b);
    };
    if (start_copies<C, true>(items, group, own, copy)) return;

    const float to_log2 = a.scale * LOG2_E;
    const int warp = wgmma_warp(), wg = warp / 4, t = (int)threadIdx.x % 128;
    // [2 tiles][lse, dot][QUERIES]
    float *of_query = (float *)(void *)(shared + ring.EXTRA_AT) + wg * 4 * QUERIES;
    WgmmaStage<C::STAGES> at, before;
    WgmmaItem item = items.item<C, true>(0), next;
    // Reads a statistic of a tile of query head i: thread 64 + j has dot of query j, the
    // first threads have lse. A query that does not exist has probabilities of 0.
    float stat;
    const auto fetch = [&](const WgmmaItem &of, int i, int n) {
        const int query = of.row + n * QUERIES + t % QUERIES;
        const size_t row = ((size_t)of.b * NH + of.h * group + i) * T + query;
        if (t < QUERIES)
            stat = query < T ? a.lse[row] * LOG2_E : INFINITY;
        else
            stat = query < T ? a.dot[row] : 0.0f;
    };
    fetch(item, 0, wg * 64 / QUERIES);
    for (int round = 0, turn = 0; item.exists; round++, item = next) {
        const MmaPlace rows = wgmma_place(item, warp, T);
        const int buffer = round % C::BUFFERS, tiles = group * item.tiles;
        // The first tile with a query that sees a key of the warpgroup.
        const int first = item.row + wg * 64 < T ? wg * 64 / QUERIES : item.tiles;
        const uint32_t k = ring.own(0, buffer) + wg * 64 * 128;
        const uint32_t v = ring.own(1, buffer) + wg * 64 * 128;
        float dk[HS / 8][4], dv[HS / 8][4], s[QUERIES / 8][4], ds[QUERIES / 8][4];
        uint32_t p[QUERIES / 16][4], e[QUERIES / 16][4];
        // Shares the statistics with the warpgroup. All have read those of the tile before
        // last when they come here.
        const auto share = [&](int i, int n) {
            of_query[turn % 2 * 2 * QUERIES + t] = stat;
            if (n + 1 < item.tiles) fetch(item, i, n + 1);
            warpgroup_barrier(wg);
        };
        const auto start = [&] {
            barrier_wait(ring.x_full(at.s), at.parity);
            fresh(s);
            wgmma_fence();
            product_rows<HS, C::OWN>(s, k, ring.x(at.s));
            wgmma_commit();
            barrier_wait(ring.y_full(at.s), at.parity);
            fresh(ds);
            wgmma_fence();
            product_rows<HS, C::OWN>(ds, v, ring.y(at.s));
            wgmma_commit();
        };
        const auto probabilities = [&](int n) {
            const float *stats = of_query + turn % 2 * 2 * QUERIES + rows.pair;
            hide_fragments<false>(s, rows, item.row + n * QUERIES);
            UNROLL
            for (int j = 0; j < QUERIES / 8; j++) {
                float x[2];
                load_two(x, stats + j * 8);
                UNROLL
                for (int i = 0; i < 4; i++)
                    s[j][i] = exponential2(fmaf(s[j][i], to_log2, -x[i % 2]));
            }
            round_fragments<false>(p, s, 0);
        };
        const auto gradients = [&] {
            const float *stats = of_query + (turn % 2 * 2 + 1) * QUERIES + rows.pair;
            UNROLL
            for (int j = 0; j < QUERIES / 8; j++) {
                float x[2];
                load_two(x, stats + j * 8);
                UNROLL
                for (int i = 0; i < 4; i++) ds[j][i] = s[j][i] * (ds[j][i] - x[i % 2]);
            }
            round_fragments<false>(e, ds, 0);
        };
        const auto values = [&] {
            pin(dv);
            pin(p);
            wgmma_fence();
            product_columns(dv, p, ring.y(at.s));
            wgmma_commit();
        };
        const auto keys = [&] {
            pin(dk);
            pin(e);
            wgmma_fence();
            product_columns(dk, e, ring.x(at.s));
            wgmma_commit();
        };
        // Heads of 64: the last products of a tile and the first of the next are one queue,
        // with one wait.
        const auto queued_tile = [&](int i, int n, auto last) {
            share(i, n);
            wgmma_wait<0>();
            pin(s);
            pin(ds);
            pin(dk);
            pin(dv);
            if (n > first) ring.release(before.s);
            before = at;
            probabilities(n);
            gradients();
            values();
            keys();
            turn++;
            at.next();
            if constexpr (!last.value) start();
        };
        // Heads of 128 leave no registers for that.
        const auto tile = [&](int i, int n) {
            copy_ahead<C>(item, i * item.tiles + n, tiles, copy);
            start();
            share(i, n);
            wgmma_wait<1>();  // the scores are there, dP is on its way
            pin(s);
            probabilities(n);
            values();
            wgmma_wait<1>();
            pin(ds);
            gradients();
            keys();
            wgmma_wait<0>();
            pin(dk);
            pin(dv);
            ring.release(at.s);
            turn++;
            at.next();
        };
        clear(dk);
        clear(dv);
        if (first < item.tiles) barrier_wait(ring.own_full(buffer), round / C::BUFFERS & 1);
        for (int i = 0; i < group; i++) {
            if (i > 0) fetch(item, i, wg * 64 / QUERIES);
            for (int n = 0; n < first; n++, at.next())
                ring.skip(at);  // not of the first thread's warpgroup
            if (first == item.tiles) continue;
            if constexpr (C::PERSISTENT) {
                pin(dk);
                pin(dv);
                start();
                for (int n = first; n + 1 < item.tiles; n++)
                    queued_tile(i, n, std::false_type());
                queued_tile(i, item.tiles - 1, std::true_type());
                wgmma_wait<0>();
                pin(dk);
                pin(dv);
                ring.release(before.s);
            } else {
                for (int n = first; n < item.tiles; n++) tile(i, n);
            }
        }
        ring.release_own(buffer);
        next = items.item<C, true>(round + 1);
        if (next.exists) fetch(next, 0, wg * 64 / QUERIES);
        if (first < item.tiles) {
            const size_t to = ((size_t)item.b * T + rows.row) * a.k_stride +
                              (size_t)item.h * HS;
            store_rows(a.dk + to, a.k_stride, rows, dk, a.scale, a.scale);
            store_rows(a.dv + to, a.k_stride, rows, dv, 1.0f, 1.0f);
        }
    }
#endif
}

// ---- launches --------------------------------------------------------------------------

// Describes the items of a kernel, and sets its grid.
template <class C>
static inline WgmmaItems wgmma_items(const Attention &a, bool keys, unsigned *grid) {
    WgmmaItems items = {(int)a.T, (int)(keys ? a.KV : a.NH), 0,
                        (int)CEIL_DIV(a.T, (size_t)C::OWN), 1};
    items.count = (int)a.B * items.heads;
    const int all = items.blocks * items.count;
    const int blocks = device_multiprocessors() * C::BLOCKS;
    *grid = (unsigned)(C::PERSISTENT && blocks < all ? blocks : all);
    // as many heads as make whole turns, there and back
    int common = 2 * blocks;
    for (int rest = items.blocks; rest;) {
        const int smaller = common % rest;
        common = rest;
        rest = smaller;
    }
    items.group = std::min(items.count, 2 * blocks / common);
    return items;
}

// True if these kernels can: heads of 64 or 128 channels at multiples of 16 bytes.
static inline bool attention_wgmma_takes(const Attention &a) {
    uintptr_t places = (uintptr_t)a.q | (uintptr_t)a.out | (uintptr_t)a.y |
                       (uintptr_t)a.dout | (uintptr_t)a.dq;
    return (a.HS == 64 || a.HS == 128) && places % 16 == 0;
}

// Queues the forward or the backward pass.
template <int HS>
static inline void attention_wgmma_heads(const Attention &a, bool backward,
                                         cudaStream_t stream) {
    typedef WgmmaForward<HS> F;
    typedef WgmmaQuery<HS> Q;
    typedef WgmmaKey<HS> K;
    const CUtensorMap qkv = tensor_map(a.q, a.B, a.T, a.NH + 2 * a.KV, HS);
    unsigned grid;
    if (!backward) {
        const WgmmaItems items = wgmma_items<F>(a, false, &grid);
        LAUNCH_LARGE(attention_forward_wgmma_kernel<F>, grid, F::THREADS, stream,
                     (WgmmaRing<F, 1>::BYTES))
        (qkv, a, items);
        return;
    }
    const CUtensorMap dout = tensor_map(a.dout, a.B, a.T, a.NH, HS);
    const WgmmaItems queries = wgmma_items<Q>(a, false, &grid);
    LAUNCH_LARGE(attention_backward_query_wgmma_kernel<Q>, grid, Q::THREADS, stream,
                 (WgmmaRing<Q, 2>::BYTES))
    (qkv, dout, a, queries);
    const WgmmaItems keys = wgmma_items<K>(a, true, &grid);
    LAUNCH_LARGE(attention_backward_key_wgmma_kernel<K>, grid, K::THREADS, stream,
                 WgmmaKeyRing<K>::BYTES)
    (qkv, dout, a, keys);
}

static inline void attention_wgmma(const Attention &a, bool backward, cudaStream_t stream) {
    if (a.HS == 64)
        attention_wgmma_heads<64>(a, backward, stream);
    else
        attention_wgmma_heads<128>(a, backward, stream);
}

#endif  // PRECISION_BF16

#endif
