// shares.cuh: the division of arrays and rows among threads, and sums over a row's threads.
//
// defines: Piece, Share, share_of, ROW_LANES, LONG_ROW_THREADS, BLOCK_ROWS, ROW_THREADS,
//          row_blocks, block_row, row_lane, row_share, row_sum, lanes_before, row_strides,
//          element_share, element_blocks
#ifndef LLMC_SHARES_CUH
#define LLMC_SHARES_CUH

#include "llmc/kernels/cuda_common.cuh"

// Elements [lo, hi) of a rank's flat buffers of weights and gradients. The optimizer's
// buffers hold only the owned slices: there the piece begins at element `at`.
typedef struct {
    size_t lo, hi, at;
    size_t tensor;         // an index into the parameter table
    unsigned first_block;  // of the optimizer's launch, which has blocks for all pieces
    bool decays;
    size_t first;  // the element of the rank's part of the tensor that `lo` is
} Piece;

// The packs of one thread: for (size_t i = s.begin; i < s.end; i += s.step).
typedef struct {
    size_t begin, end, step;
} Share;

// Divides n packs among `count` threads. A GPU's threads run in step, so neighbours take
// neighbouring packs and a warp reads whole cache lines. A CPU's run one after the other,
// so each takes a contiguous piece.
//
// ROW_LANES threads of a warp share a row, and LONG_ROW_THREADS a row of tens of thousands
// of elements. On a GPU these are many: a row is read at once, and long rows in flight fit
// in the L2 cache. Without GPU_SHAPES a CPU has one.
#if defined(__CUDACC__) || defined(GPU_SHAPES)
static constexpr int ROW_LANES = 32;
static constexpr unsigned LONG_ROW_THREADS = 512, ELEMENT_THREADS = 256;

__device__ __forceinline__ Share share_of(size_t n, size_t index, size_t count) {
    Share s = {index, n, count};
    return s;
}
#else
static constexpr int ROW_LANES = 1;
static constexpr unsigned LONG_ROW_THREADS = 1, ELEMENT_THREADS = 32;

static inline Share share_of(size_t n, size_t index, size_t count) {
    size_t piece = CEIL_DIV(n, count), begin = index * piece < n ? index * piece : n;
    Share s = {begin, n - begin < piece ? n : begin + piece, 1};
    return s;
}
#endif

// A block of BLOCK_ROWS rows: a warp for each, or a CPU's thread.
static constexpr unsigned BLOCK_ROWS = 8, ROW_THREADS = BLOCK_ROWS * ROW_LANES;
static inline unsigned row_blocks(size_t rows) {
    return (unsigned)CEIL_DIV(rows, (size_t)BLOCK_ROWS);
}
__device__ __forceinline__ size_t block_row(void) {
    return (size_t)blockIdx.x * BLOCK_ROWS + threadIdx.x / ROW_LANES;
}
__device__ __forceinline__ unsigned row_lane(void) {
    return threadIdx.x % ROW_LANES;
}

// Divides a row of n packs among its threads.
__device__ __forceinline__ Share row_share(size_t n) {
    return share_of(n, row_lane(), ROW_LANES);
}

// Returns the sum over the threads that share a row.
template <typename T>
__device__ __forceinline__ T row_sum(T x) {
    return ROW_LANES > 1 ? warp_sum(x) : x;
}

// Returns the sum of x over the lanes of a row below this one.
template <typename T>
__device__ __forceinline__ T lanes_before(T x) {
    unsigned sum = (unsigned)x;
    for (unsigned delta = 1; delta < ROW_LANES; delta *= 2) {
        unsigned other = __shfl_up_sync(0xFFFFFFFFu, sum, delta);
        if (threadIdx.x % 32 >= delta) sum += other;
    }
    return sum - x;
}

// Returns the number of blocks along y for rows that share them. Each block takes about
// `each` rows: y, y + blocks, y + 2 blocks, and so on. A grid has at most 65535 along y,
// and rows grow with the tokens.
static inline unsigned row_strides(size_t rows, size_t each) {
    size_t blocks = CEIL_DIV(rows, each);
    return blocks < 65535 ? (unsigned)blocks : 65535;
}

static constexpr size_t ELEMENT_CHUNK = 4096;  // of a block of ELEMENT_THREADS

// Returns the whole packs of an array of n elements for this thread of an element kernel.
template <int W>
__device__ __forceinline__ Share element_share(size_t n) {
    size_t packs = n / W, chunk = ELEMENT_CHUNK / W;
    size_t first = blockIdx.x * chunk;
    size_t count = first >= packs ? 0 : packs - first < chunk ? packs - first : chunk;
    Share s = share_of(count, threadIdx.x, ELEMENT_THREADS);
    s.begin += first;
    s.end += first;
    return s;
}

static inline unsigned element_blocks(size_t n) {
    return (unsigned)CEIL_DIV(n, ELEMENT_CHUNK);
}

#endif
