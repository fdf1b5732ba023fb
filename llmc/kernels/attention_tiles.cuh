// attention_tiles.cuh: what the tensor-core kernels of attention do besides multiplying: which rows a block, a warp
// and a lane own, how the other side's rows come as tiles into shared memory, how fragments are read and written.
//
// defines: AttentionMma, MmaPlace, TileCopy, load_fragments, matrix_rows, tile_fragments, store_fragments,
//          round_fragments, load_pair, load_two
#ifndef LLMC_ATTENTION_TILES_CUH
#define LLMC_ATTENTION_TILES_CUH

#include "llmc/kernels/attention_rows.cuh"
#include "llmc/kernels/mma.cuh"

static constexpr unsigned ATTENTION_MMA_THREADS = 128;
static constexpr size_t ATTENTION_MMA_ROWS = 64;

// CAPACITY: a multiple of 16, at least HS; the channels between are zero. A tile's rows are 16 bytes longer than
// its channels, so that the 8 rows that an ldmatrix reads lie in different banks.
template <int CAPACITY_>
struct AttentionMma {
    static constexpr int CAPACITY = CAPACITY_, STRIDE = CAPACITY + 8;
    static constexpr int K16 = CAPACITY / 16;                                            // steps over the channels
    static constexpr int KEYS = CAPACITY <= 64 ? 64 : CAPACITY <= 160 ? 32 : 16;         // of a tile, as registers
    static constexpr int QUERIES = CAPACITY <= 64 ? 64 : 16;                             // and 48 KiB allow
    // Large heads leave no registers for all of a gradient: a block makes 1 / parts of its channels.
    static constexpr int QUERY_PARTS = CAPACITY <= 192 ? 1 : 2;
    static constexpr int KEY_PARTS = CAPACITY <= 128 ? 1 : CAPACITY <= 160 ? 2 : CAPACITY / 64;
    static constexpr int DROP_PARTS = CAPACITY <= 192 ? 1 : 2; // with dropout so many times as many
    // Nor for the block's own values at 128: they are read again, half a row at a time.
    static constexpr bool VALUES_SHARED = CAPACITY == 128;
};

// Where a warp and a lane of it work: rows row and row + 8 are the lane's. Rows are int, as registers are short.
typedef struct {
    size_t head, qkv, out; // b * NH + h; where the head begins in qkv, and in out
    unsigned b, h;         // sequence and head
    int block_row, warp_row, row;
    int pair;              // first column of the lane in a fragment
    int T;
} MmaPlace;

// The blocks of a head are neighbours: their keys and values stay in the L2 cache. Those with most work begin first.
__device__ __forceinline__ MmaPlace mma_place(const AttentionShape &a, bool last_first) {
    unsigned T = (unsigned)a.T, NH = (unsigned)a.NH, blocks = CEIL_DIV(T, (unsigned)ATTENTION_MMA_ROWS);
    unsigned head = blockIdx.x / blocks, block = blockIdx.x % blocks, b = head / NH;
    size_t C = a.NH * a.HS, from_head = (head - b * NH) * a.HS;
    MmaPlace p;
    p.T = (int)T, p.head = head, p.b = b, p.h = head - b * NH;
    p.qkv = b * a.T * 3 * C + from_head, p.out = b * a.T * C + from_head;
    p.block_row = (int)((last_first ? blocks - 1 - block : block) * ATTENTION_MMA_ROWS);
    p.warp_row = p.block_row + (int)(threadIdx.x / 32) * 16;
    p.row = p.warp_row + (int)(threadIdx.x % 32) / 4;
    p.pair = (int)(threadIdx.x % 4) * 2;
    return p;
}

// What a thread copies of every tile: 16 bytes of each STEP-th row, always of the same channels.
template <class A>
struct TileCopy {
    // Packs of a row, or more: a power of two.
    static constexpr int PACKS = A::CAPACITY <= 32 ? 4 : A::CAPACITY <= 64 ? 8 : A::CAPACITY <= 128 ? 16 : 32;
    static constexpr int STEP = (int)ATTENTION_MMA_THREADS / PACKS;
    const bfloat16 *from;  // of the next copy
    size_t step;           // elements to the one after it
    int row, channel, left; // of a tile's first copy; rows that are left, from the next tile's first on
    bool exists;           // channels beyond HS are zero

    __device__ __forceinline__ TileCopy(const bfloat16 *p, size_t stride, int first, const AttentionShape &a) {
        row = (int)threadIdx.x / PACKS, channel = (int)threadIdx.x % PACKS * 8, left = (int)a.T - first;
        exists = channel < (int)a.HS, step = STEP * stride;
        from = p + (size_t)(first + row) * stride + (exists ? channel : 0);
    }

    // Where in a tile the thread copies to.
    __device__ __forceinline__ SharedTile to(const bfloat16 *tile) const {
        return SharedTile(tile + row * A::STRIDE + channel);
    }

    // Starts the copy of the next ROWS rows; zeros beyond T and HS.
    template <int ROWS>
    __device__ __forceinline__ void next(SharedTile to) {
        static_assert(ROWS % STEP == 0 && A::CAPACITY % 8 == 0, "every thread copies from as many rows");
        bool mine = A::CAPACITY == PACKS * 8 || channel < A::CAPACITY;
        if (left >= ROWS) {
            UNROLL
            for (int i = 0; i < ROWS; i += STEP, from += step)
                if (mine) copy_async16(to + i * A::STRIDE, from, exists);
        } else {
            const bfloat16 *valid = from; // some address: nothing is read
            for (int i = 0; i < ROWS; i += STEP, from += step) {
                bool there = exists && row + i < left;
                if (there) valid = from;
                if (mine) copy_async16(to + i * A::STRIDE, there ? from : valid, there);
            }
        }
        left -= ROWS;
    }
};

// Two neighbouring elements; zeros where there are none.
__device__ __forceinline__ uint32_t load_pair(const bfloat16 *p, bool exists) {
    uint32_t pair = 0;
    if (exists) pair = *reinterpret_cast<const uint32_t *>(p);
    return pair;
}

// The warp's 16 rows of p as a fragments.
template <class A>
__device__ __forceinline__ void load_fragments(uint32_t (&x)[A::K16][4], const bfloat16 *p, size_t stride,
                                               const MmaPlace &at, const AttentionShape &a) {
    UNROLL
    for (int k = 0; k < A::K16; k++) {
        UNROLL
        for (int i = 0; i < 4; i++) {
            int row = at.row + i % 2 * 8, c = k * 16 + i / 2 * 8 + at.pair;
            x[k][i] = load_pair(p + (size_t)row * stride + c, row < at.T && c < (int)a.HS);
        }
    }
}

// Where the lane reads rows of a tile, of which p is the warp's first, as a fragments.
template <int STRIDE>
__device__ __forceinline__ SharedTile matrix_rows(const bfloat16 *p) {
    return SharedTile(p + threadIdx.x % 16 * STRIDE + threadIdx.x % 32 / 16 * 8);
}
template <int K16>
__device__ __forceinline__ void tile_fragments(uint32_t (&x)[K16][4], SharedTile rows) {
    UNROLL
    for (int k = 0; k < K16; k++) ldmatrix_x4<false>(x[k], rows + k * 16);
}

// Two neighbouring floats, the first at a multiple of 8 bytes.
__device__ __forceinline__ void load_two(float (&x)[2], const float *p) {
#ifdef __CUDACC__
    float2 two = *reinterpret_cast<const float2 *>(p);
    x[0] = two.x, x[1] = two.y;
#else
    memcpy(x, p, sizeof x);
#endif
}

// Writes d fragments from channel `first` on, the rows times scale0 and scale1.
template <int N8>
__device__ __forceinline__ void store_fragments(bfloat16 *p, size_t stride, int first, const MmaPlace &at,
                                                const AttentionShape &a, const float (&d)[N8][4], float scale0,
                                                float scale1) {
    UNROLL
    for (int n = 0; n < N8; n++) {
        int c = first + n * 8 + at.pair;
        if (c >= (int)a.HS) continue;
        if (at.row < at.T)
            *reinterpret_cast<uint32_t *>(p + (size_t)at.row * stride + c) =
                pack_bf16(d[n][0] * scale0, d[n][1] * scale0);
        if (at.row + 8 < at.T)
            *reinterpret_cast<uint32_t *>(p + (size_t)(at.row + 8) * stride + c) =
                pack_bf16(d[n][2] * scale1, d[n][3] * scale1);
    }
}

// The d fragments of a product, rounded, as a fragments of the next.
template <int K16>
__device__ __forceinline__ void round_fragments(uint32_t (&a)[K16][4], const float (&d)[2 * K16][4]) {
    UNROLL
    for (int k = 0; k < K16; k++) {
        UNROLL
        for (int i = 0; i < 4; i++) a[k][i] = pack_bf16(d[2 * k + i / 2][i % 2 * 2], d[2 * k + i / 2][i % 2 * 2 + 1]);
    }
}

#endif
