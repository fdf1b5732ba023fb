// attention_tiles.cuh: the parts of the tensor-core kernels of attention beside the
// products. They are the rows of a block, a warp and a lane, the other side's rows as tiles
// in shared memory, fragments, and masks.
//
// defines: AttentionMma, MmaPlace, mma_place, TileCopy, TilePair, load_pair, load_two,
//          load_fragments, tile_fragments, store_fragments, round_fragments,
//          hide_fragments, kept_keys, kept_queries, stays
#ifndef LLMC_ATTENTION_TILES_CUH
#define LLMC_ATTENTION_TILES_CUH

#include "llmc/kernels/attention_rows.cuh"
#include "llmc/kernels/mma.cuh"

static constexpr unsigned ATTENTION_MMA_THREADS = 128;
static constexpr size_t ATTENTION_MMA_ROWS = 64;
static constexpr float LOG2_E = 1.44269504f;

// CAPACITY: a multiple of 16, at least HS; the channels between are zero. A tile's rows are
// 16 bytes longer than its channels, so that the 8 rows that an ldmatrix reads lie in
// different banks.
template <int CAPACITY_, class Args_ = Attention>
struct AttentionMma {
    typedef Args_ Args;
    static constexpr int CAPACITY = CAPACITY_, STRIDE = CAPACITY + 8;
    static constexpr int K16 = CAPACITY / 16;  // steps over the channels
    static constexpr int KEYS = CAPACITY <= 64    ? 64
                                : CAPACITY <= 160 ? 32
                                                  : 16;       // of a tile, as registers
    static constexpr int QUERIES = CAPACITY <= 64 ? 64 : 16;  // and 48 KiB allow
    // Large heads leave no registers for all of a gradient: a block makes 1 / parts of its
    // channels.
    template <bool DROP>
    static constexpr int QUERY_PARTS = CAPACITY <= 192 ? 1
                                       : DROP          ? 4
                                                       : 2;
    template <bool DROP>
    static constexpr int KEY_PARTS = CAPACITY <= 128   ? 1
                                     : CAPACITY <= 160 ? 2
                                     : CAPACITY <= 192 ? 3
                                     : DROP            ? 8
                                                       : 4;
    // Groups of 16 rows of a warp in the forward pass. Two groups share the loads of a
    // tile.
    template <bool DROP>
    static constexpr int GROUPS = CAPACITY == 64 && !DROP ? 2 : 1;
    // Nor for the block's own values at 128: they are read again, half a row at a time.
    static constexpr bool VALUES_SHARED = CAPACITY == 128;
};

// The work of a lane: rows row and row + 8.
struct MmaPlace : AttentionPlace {
    int warp_row;
    int pair;  // first column of the lane in a fragment
};

// Returns the place of a warp's first 16 rows. It has GROUPS times 16.
template <class A, int GROUPS = 1>
__device__ __forceinline__ MmaPlace mma_place(const typename A::Args &a, bool keys) {
    MmaPlace p;
    attention_place<A>(p, a, keys, GROUPS * (unsigned)ATTENTION_MMA_ROWS);
    p.warp_row = p.block_row + (int)(threadIdx.x / 32) * GROUPS * 16;
    p.row = p.warp_row + (int)(threadIdx.x % 32) / 4;
    p.pair = (int)(threadIdx.x % 4) * 2;
    return p;
}

// Returns the place of the warp's group m of 16 rows.
__device__ __forceinline__ MmaPlace mma_group(MmaPlace p, int m) {
    p.warp_row += m * 16;
    p.row += m * 16;
    return p;
}

// A thread's part in the copy of every tile: 16 bytes of each STEP-th row, always of the
// same channels.
template <class A>
struct TileCopy {
    // Packs of a row, or more: a power of two.
    static constexpr int PACKS = A::CAPACITY <= 32    ? 4
                                 : A::CAPACITY <= 64  ? 8
                                 : A::CAPACITY <= 128 ? 16
                                                      : 32;
    static constexpr int STEP = (int)ATTENTION_MMA_THREADS / PACKS;
    const bfloat16 *from;  // of the next copy
    // row, channel: of a tile's first copy. left: rows that are left, from the next tile's
    // first on.
    size_t step;           // elements to the one after it
    int row, channel, left;
    bool exists;  // channels beyond HS are zero

    __device__ __forceinline__ TileCopy(const bfloat16 *p, size_t stride, int first,
                                        int rows, const Attention &a) {
        row = (int)threadIdx.x / PACKS;
        channel = (int)threadIdx.x % PACKS * 8;
        left = rows - first;
        exists = channel < (int)a.HS;
        step = STEP * stride;
        from = p + (size_t)(first + row) * stride + (exists ? channel : 0);
    }

    // Returns the place in a tile that the thread copies to.
    __device__ __forceinline__ SharedTile to(const bfloat16 *tile) const {
        return SharedTile(tile + row * A::STRIDE + channel);
    }

    // Starts the copy of the next ROWS rows; zeros beyond T and HS.
    template <int ROWS>
    __device__ __forceinline__ void next(SharedTile to) {
        static_assert(ROWS % STEP == 0 && A::CAPACITY % 8 == 0,
                      "every thread copies from as many rows");
        bool mine = A::CAPACITY == PACKS * 8 || channel < A::CAPACITY;
        if (left >= ROWS) {
            UNROLL
            for (int i = 0; i < ROWS; i += STEP, from += step)
                if (mine) copy_async16(to + i * A::STRIDE, from, exists);
        } else {
            const bfloat16 *valid = from;  // some address: nothing is read
            for (int i = 0; i < ROWS; i += STEP, from += step) {
                bool there = exists && row + i < left;
                if (there) valid = from;
                if (mine) copy_async16(to + i * A::STRIDE, there ? from : valid, there);
            }
        }
        left -= ROWS;
    }
};

// Tiles of ROWS rows of two matrices, double-buffered: [2 stages][2 matrices][TILE
// elements] of shared memory. `stage` is 0 or 2 * TILE.
template <class A, int ROWS>
struct TilePair {
    static constexpr int TILE = ROWS * A::STRIDE;
    SharedTile row, column;  // of x's tile: its rows as b^T, its columns as b
    TileCopy<A> x, y;
    SharedTile to;  // where the thread copies to

    // x[rows, x_stride] and y[rows, y_stride] from row `first` on.
    __device__ __forceinline__ TilePair(const bfloat16 *tiles, const bfloat16 *x,
                                        size_t x_stride, const bfloat16 *y, size_t y_stride,
                                        int first, int rows, const Attention &a)
        : row(matrix_row<false, A::STRIDE>(tiles)),
          column(matrix_row<true, A::STRIDE>(tiles)),
          x(x, x_stride, first, rows, a),
          y(y, y_stride, first, rows, a),
          to(this->x.to(tiles)) {}

    // Starts the copy of the next tiles.
    __device__ __forceinline__ void next(int stage) {
        x.template next<ROWS>(to + stage);
        y.template next<ROWS>(to + (stage + TILE));
    }
};

// Returns pair i of the warp's 16 rows of p as a fragments; zeros beyond T and HS.
template <class A>
__device__ __forceinline__ uint32_t load_pair(const bfloat16 *p, size_t stride,
                                              const MmaPlace &at, const Attention &a,
                                              int i) {
    int row = at.row + i % 2 * 8, c = i / 2 * 8 + at.pair;
    // Both are before the branch, so that the compiler computes less in each.
    const void *from = p + row * stride + c;
    bool exists = row < at.T && c < (int)a.HS;
    uint32_t pair = 0;
    if (exists) pair = *(const uint32_t *)from;
    return pair;
}

template <class A>
__device__ __forceinline__ void load_fragments(uint32_t (&x)[A::K16][4], const bfloat16 *p,
                                               size_t stride, const MmaPlace &at,
                                               const Attention &a) {
    UNROLL
    for (int i = 0; i < 4 * A::K16; i++)
        x[i / 4][i % 4] = load_pair<A>(p, stride, at, a, i);
}

// Loads 16 rows of a tile as a fragments; rows is matrix_row<true> of the first.
template <int K16>
__device__ __forceinline__ void tile_fragments(uint32_t (&x)[K16][4], SharedTile rows) {
    UNROLL
    for (int k = 0; k < K16; k++) ldmatrix_x4<false>(x[k], rows + k * 16);
}

// Loads two neighbouring floats, the first at a multiple of 8 bytes.
__device__ __forceinline__ void load_two(float (&x)[2], const float *p) {
    memcpy(x, __builtin_assume_aligned(p, 8), sizeof x);
}

// Writes two neighbouring elements.
__device__ __forceinline__ void store_two(bfloat16 *p, float x, float y) {
    *reinterpret_cast<uint32_t *>(p) = pack_bf16(x, y);
}
__device__ __forceinline__ void store_two(float *p, float x, float y) {
    p[0] = x;
    p[1] = y;
}

// Writes d fragments from channel `first` on, the rows times scale0 and scale1.
template <class To, int N8>
__device__ __forceinline__ void store_fragments(To *p, size_t stride, int first,
                                                const MmaPlace &at, const Attention &a,
                                                const float (&d)[N8][4], float scale0,
                                                float scale1) {
    UNROLL
    for (int n = 0; n < N8; n++) {
        int c = first + n * 8 + at.pair;
        if (c >= (int)a.HS) continue;
        if (at.row < at.T)
            store_two(p + (size_t)at.row * stride + c, d[n][0] * scale0, d[n][1] * scale0);
        if (at.row + 8 < at.T)
            store_two(p + (size_t)(at.row + 8) * stride + c, d[n][2] * scale1,
                      d[n][3] * scale1);
    }
}

// True if dropout keeps element i % 4 of fragment i / 4: its bit in the masks below.
template <bool DROP>
__device__ __forceinline__ bool stays(uint32_t kept, int i) {
    return !DROP || kept >> i & 1;
}

// Rounds the d fragments of a product, to be a fragments of the next; dropped elements
// become 0.
template <bool DROP, int K16>
__device__ __forceinline__ void round_fragments(uint32_t (&a)[K16][4],
                                                const float (&d)[2 * K16][4],
                                                uint32_t kept) {
    UNROLL
    for (int i = 0; i < 4 * K16; i++) {
        const float *pair = &d[i / 2][i % 2 * 2];
        a[i / 4][i % 4] = pack_bf16(stays<DROP>(kept, 2 * i) ? pair[0] : 0.0f,
                                    stays<DROP>(kept, 2 * i + 1) ? pair[1] : 0.0f);
    }
}

// Sets the scores of keys that a query does not see to minus infinity. With KEYS the rows
// are the warp's queries and the columns keys first, first + 1, ...; else the other way
// round.
template <bool KEYS, int N8>
__device__ __forceinline__ void hide_fragments(float (&s)[N8][4], const MmaPlace &at,
                                               int first) {
    if (!KEYS && (at.full || first >= at.warp_row + 15)) return;
    if (KEYS && at.full) {  // of keys that do not exist only
        UNROLL
        for (int i = 0; i < 4 * N8; i++)
            if (first + i / 4 * 8 + at.pair + i % 2 >= at.others)
                s[i / 4][i % 4] = -INFINITY;
    } else if (!KEYS || first + 8 * N8 > at.warp_row + 1) {
        UNROLL
        for (int i = 0; i < 4 * N8; i++) {
            int column = i / 4 * 8 + at.pair + i % 2, row = at.row - first + i % 4 / 2 * 8;
            if (KEYS ? column > row : column < row) s[i / 4][i % 4] = -INFINITY;
        }
    }
}

// Returns dropout's mask of the warp's queries and keys first .. first + KEYS - 1. The 8
// numbers of a block of Philox belong to 8 neighbouring keys of a query, a row of 8 columns
// that four lanes share. Lane t of the four computes the blocks of row t % 2 and every
// second n. The lanes exchange a bit an element.
template <class A>
__device__ __forceinline__ uint32_t kept_keys(const Dropout &d, const MmaPlace &at,
                                              const typename A::Args &a, int first) {
    int t = at.pair / 2;
    uint32_t own = 0, of_row[4], kept = 0;
    UNROLL
    for (int i = 0; i < A::KEYS / 16; i++) {
        int query = at.row + t % 2 * 8, key = first + (2 * i + t / 2) * 8;
        Philox block = a.scores_block(d, at.b, at.h, (size_t)query, (size_t)key);
        own |= dropout_kept(&d, &block) << 8 * i;
    }
    warp_gather<4, 1>(of_row, own);
    UNROLL
    for (int i = 0; i < 4; i++) kept |= (of_row[i] >> at.pair & 0x03030303u) << 2 * i;
    return kept;
}

// Returns the mask of the warp's keys and queries first .. first + QUERIES - 1. A block is
// half a column. Lane g of a column pair's eight lanes computes the blocks of fragment
// element g % 4 for every second n.
template <class A>
__device__ __forceinline__ uint32_t kept_queries(const Dropout &d, const MmaPlace &at,
                                                 const typename A::Args &a, int first) {
    int g = at.row % 8;
    uint32_t own = 0, of_column[8], kept = 0;
    UNROLL
    for (int i = 0; i < A::QUERIES / 16; i++) {
        int query = first + (2 * i + g / 4) * 8 + at.pair + g % 2;
        int key = at.warp_row + g / 2 % 2 * 8;
        Philox block = a.scores_block(d, at.b, at.h, (size_t)query, (size_t)key);
        own |= dropout_kept(&d, &block) << 8 * i;
    }
    warp_gather<8, 4>(of_column, own);
    UNROLL
    for (int i = 0; i < 8; i++) kept |= (of_column[i] >> g & 0x01010101u) << i;
    return kept;
}

#endif
