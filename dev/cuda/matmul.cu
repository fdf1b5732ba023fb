// matmul.cu: the matrix products and the gradient of a bias. Kernels from naive to
// llmc/kernels/matmul.cuh's, checked against llmc/reference_layers.h and reference_llama.h at
// ragged sizes. With --bench, llmc's products also at the shapes of GPT-2 124M.
#include "dev/cuda/bench.h"

#include "llmc/kernels/bias.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/matmul.cuh"
#include "llmc/kernels/mma.cuh"
#include "llmc/reference_llama.h"

static Lab lab;

// ---- the kernels -----------------------------------------------------------------------
// out = inp weight, + bias and through GELU where activated; dinp = dout weight^T; dweight =
// inp^T dout.

typedef struct {
    floatX *out, *pre_gelu, *dinp;              // [N, OC], [N, OC], [N, IC]
    float *dweight, *dbias, *scratch;           // [IC, OC], [OC], bias_backward_scratch
    const floatX *inp, *weight, *bias, *dout;   // [N, IC], [IC, OC], [OC], [N, OC]
    size_t N, IC, OC;
} Problem;

// Returns element (row, col) of op(x), where the stored x has ld columns.
template <bool TRANS>
__device__ __forceinline__ float element(const floatX *x, size_t row, size_t col, size_t ld) {
    return to_float(x[TRANS ? col * ld + row : row * ld + col]);
}

// 1: a thread an output element; every factor is read from memory as often as it is used.
template <class T, bool TRANS_A, bool TRANS_B>
__global__ void product_naive(T *d, const floatX *a, const floatX *b, size_t M, size_t N,
                              size_t K) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / N, col = i % N;
    if (row >= M) return;
    float sum = 0.0f;
    for (size_t k = 0; k < K; k++) {
        sum += element<TRANS_A>(a, row, k, TRANS_A ? M : K) *
               element<TRANS_B>(b, k, col, TRANS_B ? K : N);
    }
    d[i] = from_float<T>(sum);
}

// 2: a block a tile of 16 x 16 outputs; tiles of the factors lie in shared memory and are used 16
// times.
enum { TILE = 16 };

__global__ void __launch_bounds__(TILE * TILE)
    product_tiled(floatX *d, const floatX *a, const floatX *b, size_t M, size_t N, size_t K) {
    __shared__ float tile_a[TILE][TILE + 1];
    __shared__ float tile_b[TILE][TILE + 1];
    size_t x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    size_t row = (size_t)blockIdx.y * TILE + y, col = (size_t)blockIdx.x * TILE + x;
    float sum = 0.0f;
    for (size_t first = 0; first < K; first += TILE) {
        tile_a[y][x] = row < M && first + x < K ? to_float(a[row * K + first + x]) : 0.0f;
        tile_b[y][x] = first + y < K && col < N ? to_float(b[(first + y) * N + col]) : 0.0f;
        __syncthreads();
        for (size_t k = 0; k < TILE; k++) sum += tile_a[y][k] * tile_b[k][x];
        __syncthreads();
    }
    if (row < M && col < N) d[row * N + col] = from_float<floatX>(sum);
}

// 3 and 4: a block of 256 threads a tile of 64 x 64 outputs, a thread 4 x 4 of them in registers.
// A number that it reads from shared memory is used four times. 4: the next tiles are copied by
// cp.async while these are multiplied.
enum { WIDE = 64, DEPTH = 16, SUMS = 4 };

// Multiplies tiles a[WIDE][DEPTH] and b[DEPTH][WIDE]; this thread sums rows y + 16 i, columns x +
// 16 j.
template <class F>
__device__ __forceinline__ void multiply_tiles(float (&sum)[SUMS][SUMS], const F (*a)[DEPTH],
                                               const F (*b)[WIDE]) {
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    for (int k = 0; k < DEPTH; k++) {
        float of_a[SUMS], of_b[SUMS];
        UNROLL
        for (int i = 0; i < SUMS; i++)
            of_a[i] = to_float(a[y + 16 * i][k]), of_b[i] = to_float(b[k][x + 16 * i]);
        UNROLL
        for (int i = 0; i < SUMS; i++)
            for (int j = 0; j < SUMS; j++) sum[i][j] += of_a[i] * of_b[j];
    }
}
__device__ __forceinline__ void store_sums(floatX *d, const float (&sum)[SUMS][SUMS], size_t M,
                                           size_t N) {
    size_t row = (size_t)blockIdx.y * WIDE + threadIdx.x / 16,
           col = (size_t)blockIdx.x * WIDE + threadIdx.x % 16;
    for (size_t i = 0; i < SUMS; i++)
        for (size_t j = 0; j < SUMS; j++)
            if (row + 16 * i < M && col + 16 * j < N)
                d[(row + 16 * i) * N + col + 16 * j] = from_float<floatX>(sum[i][j]);
}

__global__ void __launch_bounds__(256)
    product_registers(floatX *d, const floatX *a, const floatX *b, size_t M, size_t N, size_t K) {
    __shared__ float tile_a[WIDE][DEPTH], tile_b[DEPTH][WIDE];
    size_t row = (size_t)blockIdx.y * WIDE, col = (size_t)blockIdx.x * WIDE;
    float sum[SUMS][SUMS] = {};
    for (size_t first = 0; first < K; first += DEPTH) {
        for (size_t i = threadIdx.x; i < WIDE * DEPTH; i += 256) {
            size_t r = row + i / DEPTH, k = first + i % DEPTH, c = col + i % WIDE,
                   l = first + i / WIDE;
            tile_a[i / DEPTH][i % DEPTH] = r < M && k < K ? to_float(a[r * K + k]) : 0.0f;
            tile_b[i / WIDE][i % WIDE] = l < K && c < N ? to_float(b[l * N + c]) : 0.0f;
        }
        __syncthreads();
        multiply_tiles(sum, tile_a, tile_b);
        __syncthreads();
    }
    store_sums(d, sum, M, N);
}

// Starts the copy of tile[ROWS][COLS], rows STRIDE apart, from x[rows, cols], 16 bytes a thread;
// zeros outside. Packs of 16 bytes must divide cols.
template <int ROWS, int COLS, int STRIDE>
__device__ __forceinline__ void copy_tile(floatX *tile, const floatX *x, size_t row, size_t col,
                                          size_t rows, size_t cols) {
    constexpr int PACK = 16 / sizeof(floatX), PACKS = COLS / PACK;
    for (int i = (int)threadIdx.x; i < ROWS * PACKS; i += (int)blockDim.x) {
        size_t r = row + (size_t)(i / PACKS), c = col + (size_t)(i % PACKS * PACK);
        bool exists = r < rows && c < cols;
        SharedTile to(
            (const bfloat16 *)(const void *)(tile + i / PACKS * STRIDE + i % PACKS * PACK));
        copy_async16(to, exists ? x + r * cols + c : x, exists);
    }
}

__global__ void __launch_bounds__(256)
    product_copies(floatX *d, const floatX *a, const floatX *b, size_t M, size_t N, size_t K) {
    alignas(16) __shared__ floatX tile_a[2][WIDE][DEPTH], tile_b[2][DEPTH][WIDE];
    size_t row = (size_t)blockIdx.y * WIDE, col = (size_t)blockIdx.x * WIDE;
    float sum[SUMS][SUMS] = {};
    int stage = 0;
    copy_tile<WIDE, DEPTH, DEPTH>(tile_a[0][0], a, row, 0, M, K);
    copy_tile<DEPTH, WIDE, WIDE>(tile_b[0][0], b, 0, col, K, N);
    copy_async_commit();
    for (size_t first = 0; first < K; first += DEPTH, stage ^= 1) {
        if (first + DEPTH < K) {
            copy_tile<WIDE, DEPTH, DEPTH>(tile_a[stage ^ 1][0], a, row, first + DEPTH, M, K);
            copy_tile<DEPTH, WIDE, WIDE>(tile_b[stage ^ 1][0], b, first + DEPTH, col, K, N);
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        multiply_tiles(sum, tile_a[stage], tile_b[stage]);
        __syncthreads();
    }
    store_sums(d, sum, M, N);
}

// 5: as 4, but four warps multiply by tensor cores, each 16 rows of the tile.
#ifdef PRECISION_BF16
enum {
    MMA_DEPTH = 32,
    STRIDE_A = MMA_DEPTH + 8,
    STRIDE_B = WIDE + 8
};  // 8 more: rows in other banks

__global__ void __launch_bounds__(128)
    product_mma(floatX *d, const floatX *a, const floatX *b, size_t M, size_t N, size_t K) {
    alignas(16) __shared__ floatX tile_a[2][WIDE * STRIDE_A], tile_b[2][MMA_DEPTH * STRIDE_B];
    size_t row = (size_t)blockIdx.y * WIDE, col = (size_t)blockIdx.x * WIDE;
    // own: the warp's first row.
    int lane = threadIdx.x % 32, own = (int)threadIdx.x / 32 * 16, stage = 0;
    float sum[WIDE / 8][4] = {};
    copy_tile<WIDE, MMA_DEPTH, STRIDE_A>(tile_a[0], a, row, 0, M, K);
    copy_tile<MMA_DEPTH, WIDE, STRIDE_B>(tile_b[0], b, 0, col, K, N);
    copy_async_commit();
    for (size_t first = 0; first < K; first += MMA_DEPTH, stage ^= 1) {
        if (first + MMA_DEPTH < K) {
            copy_tile<WIDE, MMA_DEPTH, STRIDE_A>(tile_a[stage ^ 1], a, row, first + MMA_DEPTH, M,
                                                 K);
            copy_tile<MMA_DEPTH, WIDE, STRIDE_B>(tile_b[stage ^ 1], b, first + MMA_DEPTH, col, K,
                                                 N);
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        uint32_t of_a[MMA_DEPTH / 16][4];
        UNROLL
        for (int k = 0; k < MMA_DEPTH / 16; k++)
            ldmatrix_x4<false>(of_a[k], SharedTile(tile_a[stage] + (own + lane % 16) * STRIDE_A +
                                                   k * 16 + lane / 16 * 8));
        mma_product<true, STRIDE_B>(sum, of_a, matrix_row<true, STRIDE_B>(tile_b[stage]));
        __syncthreads();
    }
    for (int n = 0; n < WIDE / 8; n++)
        for (int i = 0; i < 4; i++) {
            size_t r = row + (size_t)(own + lane / 4 + i / 2 * 8),
                   c = col + (size_t)(n * 8 + lane % 4 * 2 + i % 2);
            if (r < M && c < N) d[r * N + c] = from_float<floatX>(sum[n][i]);
        }
}
#endif

template <class T, bool TRANS_A, bool TRANS_B>
static void naive(T *d, const floatX *a, const floatX *b, size_t M, size_t N, size_t K,
                  unsigned block) {
    LAUNCH((product_naive<T, TRANS_A, TRANS_B>), CEIL_DIV(M * N, (size_t)block), block, lab.stream)
    (d, a, b, M, N, K);
}

static void forward1(const Problem *p, unsigned block) {
    naive<floatX, false, false>(p->out, p->inp, p->weight, p->N, p->OC, p->IC, block);
}
static void forward2(const Problem *p, unsigned) {
    dim3 grid((unsigned)CEIL_DIV(p->OC, (size_t)TILE), (unsigned)CEIL_DIV(p->N, (size_t)TILE));
    LAUNCH(product_tiled, grid, TILE * TILE, lab.stream)
    (p->out, p->inp, p->weight, p->N, p->OC, p->IC);
}
// Kernels 4 and 5 copy packs of 16 bytes; if these do not divide the rows of both factors, 3 is
// launched.
static dim3 wide_grid(const Problem *p) {
    return dim3((unsigned)CEIL_DIV(p->OC, (size_t)WIDE), (unsigned)CEIL_DIV(p->N, (size_t)WIDE));
}
static bool has_packs(const Problem *p) { return (p->IC | p->OC) % (16 / sizeof(floatX)) == 0; }
static void forward3(const Problem *p, unsigned) {
    LAUNCH(product_registers, wide_grid(p), 256, lab.stream)
    (p->out, p->inp, p->weight, p->N, p->OC, p->IC);
}
static void forward4(const Problem *p, unsigned block) {
    if (!has_packs(p)) return forward3(p, block);
    LAUNCH(product_copies, wide_grid(p), 256, lab.stream)
    (p->out, p->inp, p->weight, p->N, p->OC, p->IC);
}
#ifdef PRECISION_BF16
static void forward5(const Problem *p, unsigned block) {
    if (!has_packs(p)) return forward3(p, block);
    LAUNCH(product_mma, wide_grid(p), 128, lab.stream)
    (p->out, p->inp, p->weight, p->N, p->OC, p->IC);
}
#endif
static void forward6(const Problem *p, unsigned) {
    matmul_forward(&lab.mm, p->out, p->inp, p->weight, NULL, p->N, p->IC, p->OC);
}
static void input1(const Problem *p, unsigned block) {
    naive<floatX, false, true>(p->dinp, p->dout, p->weight, p->N, p->IC, p->OC, block);
}
static void input2(const Problem *p, unsigned) {
    matmul_backward_input(&lab.mm, p->dinp, p->dout, p->weight, p->N, p->IC, p->OC);
}
static void weight1(const Problem *p, unsigned block) {
    naive<float, true, false>(p->dweight, p->inp, p->dout, p->IC, p->OC, p->N, block);
}
static void weight2(const Problem *p, unsigned) {
    matmul_backward_weight(&lab.mm, p->dweight, p->inp, p->dout, p->N, p->IC, p->OC, false);
}

// The product with bias and activation, in three kernels and in two.
__global__ void bias_add(floatX *x, const floatX *bias, size_t n, size_t cols) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = from_float<floatX>(to_float(x[i]) + to_float(bias[i % cols]));
}

static void activated1(const Problem *p, unsigned) {
    size_t n = p->N * p->OC;
    matmul_forward(&lab.mm, p->pre_gelu, p->inp, p->weight, NULL, p->N, p->IC, p->OC);
    LAUNCH(bias_add, CEIL_DIV(n, (size_t)256), 256, lab.stream)(p->pre_gelu, p->bias, n, p->OC);
    gelu_forward(p->out, p->pre_gelu, p->N * p->OC, lab.stream);
}
static void activated2(const Problem *p, unsigned) {
    matmul_forward(&lab.mm, p->pre_gelu, p->inp, p->weight, p->bias, p->N, p->IC, p->OC);
    gelu_forward(p->out, p->pre_gelu, p->N * p->OC, lab.stream);
}

// 1: a thread a column walks over all rows. 2: a thread a column of some rows adds its sum to
// memory. The order is open, so another run has other bits.
__global__ void bias_thread_a_column(float *dbias, const floatX *dout, size_t N, size_t OC) {
    size_t col = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= OC) return;
    float sum = 0.0f;
    for (size_t row = 0; row < N; row++) sum += to_float(dout[row * OC + col]);
    dbias[col] = sum;
}

#ifndef __CUDACC__
static inline void atomicAdd(float *sum, float x) {
#pragma omp atomic
    *sum += x;
}
#endif
enum { ATOMIC_ROWS = 64 };
__global__ void bias_atomic(float *dbias, const floatX *dout, size_t N, size_t OC) {
    size_t col = (size_t)blockIdx.x * blockDim.x + threadIdx.x,
           first = (size_t)blockIdx.y * ATOMIC_ROWS;
    if (col >= OC) return;
    float sum = 0.0f;
    for (size_t row = first; row < N && row < first + ATOMIC_ROWS; row++)
        sum += to_float(dout[row * OC + col]);
    atomicAdd(&dbias[col], sum);
}

static void bias1(const Problem *p, unsigned block) {
    LAUNCH(bias_thread_a_column, CEIL_DIV(p->OC, (size_t)block), block, lab.stream)
    (p->dbias, p->dout, p->N, p->OC);
}
static void bias2(const Problem *p, unsigned block) {
    dim3 grid((unsigned)CEIL_DIV(p->OC, (size_t)block),
              (unsigned)CEIL_DIV(p->N, (size_t)ATOMIC_ROWS));
    CUDA_CHECK(cudaMemsetAsync(p->dbias, 0, p->OC * sizeof(float), lab.stream));
    LAUNCH(bias_atomic, grid, block, lab.stream)(p->dbias, p->dout, p->N, p->OC);
}
static void bias3(const Problem *p, unsigned) {
    bias_backward(p->dbias, p->dout, p->scratch, p->N, p->OC, false, lab.stream);
}

enum Result { OUT, DINP, DWEIGHT, DBIAS, OUT_GELU };
typedef struct {
    LabKernel kernel;
    Result result;  // what it computes
} Row;

// A block of 1: the library chooses. cuBLASLt could apply GELU too, but it would see the sum
// before rounding. Recomputing GELU from the stored sum would then give other bits.
static const Row ROWS[] = {
    {{"matmul forward", 1, "a thread an output", forward1, 0}, OUT},
    {{"matmul forward", 2, "tiles in shared memory", forward2, TILE *TILE}, OUT},
    {{"matmul forward", 3, "4 x 4 sums a thread in registers", forward3, 256}, OUT},
    {{"matmul forward", 4, "and the next tiles copied meanwhile, by cp.async", forward4, 256},
     OUT},
#ifdef PRECISION_BF16
    {{"matmul forward", 5, "and tensor cores, by ldmatrix and mma.sync", forward5, 128}, OUT},
#endif
    {{"matmul forward", 6, "cuBLASLt, tensor cores in bf16 (llmc)", forward6, 1}, OUT},
    {{"matmul backward input", 1, "a thread an output", input1, 0}, DINP},
    {{"matmul backward input", 2, "cuBLASLt, tensor cores in bf16 (llmc)", input2, 1}, DINP},
    {{"matmul backward weight", 1, "a thread an output", weight1, 0}, DWEIGHT},
    {{"matmul backward weight", 2, "cuBLASLt, fp32 result, may accumulate (llmc)", weight2, 1},
     DWEIGHT},
    {{"matmul + bias + gelu", 1, "three kernels", activated1, 1}, OUT_GELU},
    {{"matmul + bias + gelu", 2, "two: bias in the epilogue (llmc)", activated2, 1}, OUT_GELU},
    {{"bias gradient", 1, "a thread a column", bias1, 0}, DBIAS},
    {{"bias gradient", 2, "a chunk of rows a thread, atomicAdd: bits that vary", bias2, 0},
     DBIAS},
    {{"bias gradient", 3, "128-bit loads, chunks of rows, then their sum (llmc)", bias3,
      BIAS_THREADS},
     DBIAS},
};

// ---- the checks ------------------------------------------------------------------------

typedef struct {
    size_t N, IC, OC;
} Shape;

// Sums of up to a few hundred products in float, then one or two roundings to floatX.
static const double FLOAT_BOUND = 2e-6, OUT_BOUND = FLOATX_ROUNDING + FLOAT_BOUND;

static void test_linear(Shape s) {
    size_t mark = test_count, N = s.N, IC = s.IC, OC = s.OC;
    float *x = test_values(N * IC, 0, 1, 1), *w = test_values(IC * OC, 0, 0.5, 2),
          *bias = test_values(OC, 0, 1, 3);
    floatX *dx = to_device_floatX(x, N * IC), *dw = to_device_floatX(w, IC * OC),
           *db = to_device_floatX(bias, OC);
    floatX *out = test_floatX(N * OC);
    double *want = test_doubles(N * OC), *inp = widened(x, N * IC), *weight = widened(w, IC * OC);
    reference_matmul_forward(want, inp, weight, test_doubles(OC), N, IC, OC);
    matmul_forward(&lab.mm, out, dx, dw, NULL, N, IC, OC);
    double error = test_error_floatX(out, want, N * OC, lab.stream);
    reference_matmul_forward(want, inp, weight, widened(bias, OC), N, IC, OC);
    matmul_forward(&lab.mm, out, dx, dw, db, N, IC, OC);
    error = fmax(error, test_error_floatX(out, want, N * OC, lab.stream));
    check(&lab.checks, error <= OUT_BOUND, "forward %zu x %zu x %zu (%.1e, bound %.1e)", N, IC,
          OC, error, OUT_BOUND);
    test_release(mark);
}

static void test_linear_backward(Shape s) {
    size_t mark = test_count, N = s.N, IC = s.IC, OC = s.OC;
    float *x = test_values(N * IC, 0, 1, 4), *w = test_values(IC * OC, 0, 0.5, 5),
          *d = test_values(N * OC, 0, 1, 6);
    float *g = (float *)test_memory(IC * OC * sizeof(float));
    for (size_t i = 0; i < IC * OC; i++) g[i] = 0.25f * (float)(i % 7);
    floatX *dx = to_device_floatX(x, N * IC), *dw = to_device_floatX(w, IC * OC),
           *dd = to_device_floatX(d, N * OC);
    floatX *dinp = test_floatX(N * IC);
    float *dweight = to_device(g, IC * OC);
    double *plain = test_doubles(N * IC), *weight = test_doubles(IC * OC),
           *sum = widened(g, IC * OC);
    reference_matmul_backward(plain, weight, test_doubles(OC), widened(d, N * OC),
                              widened(x, N * IC), widened(w, IC * OC), N, IC, OC);
    for (size_t i = 0; i < IC * OC; i++) sum[i] += weight[i];

    matmul_backward_input(&lab.mm, dinp, dd, dw, N, IC, OC);
    double error = test_error_floatX(dinp, plain, N * IC, lab.stream);
    check(&lab.checks, error <= OUT_BOUND, "backward input %zu x %zu x %zu (%.1e, bound %.1e)", N,
          IC, OC, error, OUT_BOUND);
    matmul_backward_weight(&lab.mm, dweight, dx, dd, N, IC, OC, true);
    error = test_error_float(dweight, sum, IC * OC, lab.stream);
    matmul_backward_weight(&lab.mm, dweight, dx, dd, N, IC, OC, false);
    error = fmax(error, test_error_float(dweight, weight, IC * OC, lab.stream));
    check(&lab.checks, error <= FLOAT_BOUND, "backward weight %zu x %zu x %zu (%.1e, bound %.1e)",
          N, IC, OC, error, FLOAT_BOUND);
    test_release(mark);
}

// Checks the head, which shares its weight [V, C] with the embedding: everything is transposed.
static void test_head(size_t N, size_t C, size_t V) {
    size_t mark = test_count;
    float *x = test_values(N * C, 0, 1, 8), *w = test_values(V * C, 0, 0.5, 9),
          *d = test_values(N * V, 0, 1, 10);
    floatX *dx = to_device_floatX(x, N * C), *dw = to_device_floatX(w, V * C),
           *dd = to_device_floatX(d, N * V);
    floatX *logits = test_floatX(N * V), *dinp = test_floatX(N * C);
    float *dwte = test_floats(V * C);
    double *want_logits = test_doubles(N * V), *want_inp = test_doubles(N * C),
           *want_wte = test_doubles(V * C);
    double *inp = widened(x, N * C), *weight = widened(w, V * C);
    reference_linear_forward(want_logits, V, inp, weight, NULL, N, C, V);
    reference_linear_backward(want_inp, want_wte, NULL, widened(d, N * V), V, inp, weight, N, C, V);

    linear_forward(&lab.mm, logits, dx, dw, NULL, N, C, V);
    linear_backward_input(&lab.mm, dinp, dd, dw, N, C, V);
    double error = fmax(test_error_floatX(logits, want_logits, N * V, lab.stream),
                        test_error_floatX(dinp, want_inp, N * C, lab.stream));
    check(&lab.checks, error <= OUT_BOUND, "head %zu x %zu x %zu (%.1e, bound %.1e)", N, C, V,
          error, OUT_BOUND);
    linear_backward_weight(&lab.mm, dwte, dx, dd, N, C, V, false);
    error = test_error_float(dwte, want_wte, V * C, lab.stream);
    linear_backward_weight(&lab.mm, dwte, dx, dd, N, C, V, true);
    for (size_t i = 0; i < V * C; i++) want_wte[i] *= 2;
    error = fmax(error, test_error_float(dwte, want_wte, V * C, lab.stream));
    check(&lab.checks, error <= FLOAT_BOUND, "head weight %zu x %zu x %zu (%.1e, bound %.1e)", N,
          C, V, error, FLOAT_BOUND);
    test_release(mark);
}

static void test_bias(size_t N, size_t OC) {
    size_t mark = test_count;
    float *d = test_values(N * OC, 0, 1, 11);
    floatX *dd = to_device_floatX(d, N * OC);
    float *scratch = test_floats(bias_backward_scratch(N, OC)), *dbias = test_floats(OC);
    double *want = test_doubles(OC);
    for (size_t i = 0; i < N * OC; i++) want[i % OC] += (double)d[i];
    bias_backward(dbias, dd, scratch, N, OC, false, lab.stream);
    double error = test_error_float(dbias, want, OC, lab.stream);
    bias_backward(dbias, dd, scratch, N, OC, true, lab.stream);
    for (size_t i = 0; i < OC; i++) want[i] *= 2;
    error = fmax(error, test_error_float(dbias, want, OC, lab.stream));
    check(&lab.checks, error <= FLOAT_BOUND, "bias %zu x %zu (%.1e, bound %.1e)", N, OC, error,
          FLOAT_BOUND);
    test_release(mark);
}

static Problem make_problem(size_t N, size_t IC, size_t OC) {
    return {test_floatX(N * OC),
            test_floatX(N * OC),
            test_floatX(N * IC),
            test_floats(IC * OC),
            test_floats(OC),
            test_floats(bias_backward_scratch(N, OC)),
            to_device_floatX(test_values(N * IC, 0, 1, 1), N * IC),
            to_device_floatX(test_values(IC * OC, 0, 0.5, 2), IC * OC),
            to_device_floatX(test_values(OC, 0, 1, 3), OC),
            to_device_floatX(test_values(N * OC, 0, 1, 4), N * OC),
            N,
            IC,
            OC};
}

// Returns the expected values of one result, in double.
static double *wanted(const Problem *p, Result result) {
    size_t N = p->N, IC = p->IC, OC = p->OC;
    float *x = to_host_floatX(p->inp, N * IC, lab.stream),
          *w = to_host_floatX(p->weight, IC * OC, lab.stream);
    float *b = to_host_floatX(p->bias, OC, lab.stream),
          *d = to_host_floatX(p->dout, N * OC, lab.stream);
    double *inp = widened(x, N * IC), *weight = widened(w, IC * OC), *out = test_doubles(N * OC);
    double *dinp = test_doubles(N * IC), *dweight = test_doubles(IC * OC),
           *dbias = test_doubles(OC);
    reference_matmul_forward(out, inp, weight, result == OUT ? test_doubles(OC) : widened(b, OC),
                             N, IC, OC);
    if (result == OUT_GELU) reference_gelu_forward(out, out, N * OC);
    reference_matmul_backward(dinp, dweight, dbias, widened(d, N * OC), inp, weight, N, IC, OC);
    return result == DINP ? dinp : result == DWEIGHT ? dweight : result == DBIAS ? dbias : out;
}

// Returns the error of one kernel at one shape.
static double row_error(const Row *row, Shape s) {
    size_t mark = test_count;
    Problem p = make_problem(s.N, s.IC, s.OC);
    double *want = wanted(&p, row->result), error;
    row->kernel.run(&p, lab_block(&row->kernel));
    if (row->result == DWEIGHT) error = test_error_float(p.dweight, want, p.IC * p.OC, lab.stream);
    else if (row->result == DBIAS) error = test_error_float(p.dbias, want, p.OC, lab.stream);
    else if (row->result == DINP) error = test_error_floatX(p.dinp, want, p.N * p.IC, lab.stream);
    else error = test_error_floatX(p.out, want, p.N * p.OC, lab.stream);
    test_release(mark);
    return error;
}

// Checks every kernel of the list at ragged sizes.
static void check_kernels(void) {
    static const Shape shapes[] = {{1, 1, 1},     {7, 18, 54},   {24, 18, 72},
                                   {65, 64, 192}, {33, 100, 36}, {70, 200, 88}};
    for (const Row &row : ROWS) {
        double error = 0.0,
               bound = row.result == DWEIGHT || row.result == DBIAS ? FLOAT_BOUND : OUT_BOUND;
        for (Shape s : shapes) error = fmax(error, row_error(&row, s));
        // Between separate kernels the product is rounded, and the sum with the bias once more.
        if (row.result == OUT_GELU) bound *= row.kernel.number == 1 ? 3.5 : 2.2;
        lab_check(&lab, &row.kernel, error, bound);
    }
}

// Returns the bytes that a row with an activation or a bias asks for, in elements of floatX, or 0
// if not counted.
static double row_asks(const Problem *p, const Row *row) {
    double out = (double)(p->N * p->OC), inp = (double)(p->N * p->IC),
           weight = (double)(p->IC * p->OC), elements = 0.0;
    if (row->result == DBIAS) elements = out;
    // pre_gelu is written and read, out written; a bias kernel reads and writes.
    if (row->result == OUT_GELU) {
        elements = inp + weight + (row->kernel.number == 1 ? 5.0 : 3.0) * out;
    }
    return elements * (double)sizeof(floatX);
}

// The products of a layer, and of the head, by llmc. The head's weight is the embedding, [V, C].
typedef struct {
    floatX *x, *y, *w;  // [N, IC], [N, OC], [IC, OC]
    float *dw;          // [IC, OC]
    size_t N, IC, OC;
} Product;

static void layer_forward(const Product *q, unsigned) {
    matmul_forward(&lab.mm, q->y, q->x, q->w, NULL, q->N, q->IC, q->OC);
}
static void layer_input(const Product *q, unsigned) {
    matmul_backward_input(&lab.mm, q->x, q->y, q->w, q->N, q->IC, q->OC);
}
static void layer_weight(const Product *q, unsigned) {
    matmul_backward_weight(&lab.mm, q->dw, q->x, q->y, q->N, q->IC, q->OC, true);
}
static void logits_forward(const Product *q, unsigned) {
    linear_forward(&lab.mm, q->y, q->x, q->w, NULL, q->N, q->IC, q->OC);
}
static void logits_input(const Product *q, unsigned) {
    linear_backward_input(&lab.mm, q->x, q->y, q->w, q->N, q->IC, q->OC);
}
static void logits_weight(const Product *q, unsigned) {
    linear_backward_weight(&lab.mm, q->dw, q->x, q->y, q->N, q->IC, q->OC, true);
}

static void bench_products(size_t N) {
    const size_t C = 768, V = 50304;
    const struct {
        const char *name;
        size_t IC, OC;
    } shapes[] = {{"qkv", C, 3 * C},
                  {"attention projection", C, C},
                  {"mlp up", C, 4 * C},
                  {"mlp down", 4 * C, C},
                  {"head", C, V}};
    void (*const layer[])(const Product *, unsigned) = {layer_forward, layer_input, layer_weight};
    void (*const head[])(const Product *, unsigned) = {logits_forward, logits_input, logits_weight};
    static const char *pass[] = {"matmul forward", "matmul backward input",
                                 "matmul backward weight"};
    for (int i = 0; i < 5; i++) {
        size_t mark = test_count;
        Product q = {NULL, NULL, NULL, NULL, N, shapes[i].IC, shapes[i].OC};
        q.x = lab_fill(&lab, N * q.IC), q.y = lab_fill(&lab, N * q.OC),
        q.w = lab_fill(&lab, q.IC * q.OC);
        q.dw = test_floats(q.IC * q.OC);
        CUDA_CHECK(cudaMemset(q.dw, 0, q.IC * q.OC * sizeof(float)));
        for (int k = 0; k < 3; k++) {
            char name[64];
            snprintf(name, sizeof name, "%s, %zu x %zu x %zu (llmc)", shapes[i].name, N, q.IC,
                     q.OC);
            LabKernel kernel = {pass[k], k ? 2 : 6, name, i < 4 ? layer[k] : head[k], 1};
            lab_bench(&lab, &kernel, &q, lab_stated(&lab, &kernel, &q), 0.0);
        }
        test_release(mark);
    }
}

static void bench(void) {
    Problem p = lab.cpu ? make_problem(32, 256, 256) : make_problem(4096, 768, 3072);
    Problem large = lab.cpu ? make_problem(256, 768, 3072) : make_problem(16384, 768, 3072);
    for (const Row &row : ROWS) {
        const Row *last = &row;  // of the same operation
        while (last < LAB_LAST(ROWS) && last[1].result == row.result) last++;
        const Problem *q = row.result <= DWEIGHT ? &p : &large;
        lab_bench(&lab, &row.kernel, q, lab_stated(&lab, &last->kernel, q), row_asks(q, &row));
    }
    bench_products(lab.cpu ? 64 : 16384);
}

static void checks(void) {
    check_kernels();
    static const Shape shapes[] = {{1, 1, 1},     {7, 18, 54},    {24, 18, 72},
                                   {65, 64, 192}, {64, 128, 512}, {33, 100, 36}};
    for (Shape s : shapes) test_linear(s);
    for (Shape s : shapes) test_linear_backward(s);
    test_head(24, 18, 384);
    test_head(7, 64, 33);
    test_bias(1, 1);
    test_bias(65, 18);
    test_bias(100, 512);
    test_bias(3000, 2304);
}

int main(int argc, char **argv) { return lab_main(&lab, argc, argv, checks, bench); }
