// muon.cuh: Muon's update of a weight matrix (Jordan et al. 2024), kernel by kernel.
// lesson: muon
//
//   M = mu M + (1 - mu) G            G: the clipped gradient of the whole matrix
//   U = mu M + (1 - mu) G            Nesterov's look ahead
//   X = U / (|U| + 1e-7)             |U|: Frobenius norm
//   X = a X + (b A + c A A) X        with A = X X', several times: Newton-Schulz
//   W = W - lr (0.2 sqrt(max(rows, cols)) X + decay W)
//
// Each step of Newton-Schulz moves all singular values of X towards 1, so X ends near the
// orthogonal matrix that is nearest to U. A tall matrix takes A = X' X and multiplies from
// the right, which is the same polynomial with smaller products. Products are of floatX:
// fp32 or bf16. With the factor 0.2 sqrt(max(rows, cols)) of Liu et al. 2025, AdamW's
// learning rate and decay suit Muon, too.
//
// defines: MuonScratch, muon_momentum, muon_normalise, muon_combine, muon_orthogonalise,
//          muon_update
#ifndef LLMC_MUON_CUH
#define LLMC_MUON_CUH

#include <math.h>

#include "llmc/kernels/matmul.cuh"
#include "llmc/kernels/packs.cuh"
#include "llmc/model_muon.h"

// Buffers for one matrix at a time: rows x cols of the largest, and m, the smaller of the
// two.
typedef struct {
    floatX *x;         // (rows, cols)  the matrix that becomes orthogonal
    floatX *product;   // (rows, cols)
    floatX *square;    // (m, m)        A
    floatX *combined;  // (m, m)        b A + c A A
    double *sums;      // (rows + 1)    squares of each row, then of all
} MuonScratch;

static constexpr float MUON_A = 3.4445f, MUON_B = -4.7750f, MUON_C = 2.0315f;
static constexpr double MUON_EPSILON = 1e-7;

template <int W>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    muon_momentum_kernel(float *grads, float *momentum, size_t n, float mu, float gain,
                         float scale) {
    Share s = element_share<W>(n);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float g[W], m[W];
        load_floats<W>(g, grads + i * W);
        load_floats<W>(m, momentum + i * W);
        for (int k = 0; k < W; k++) {
            g[k] *= gain * scale;
            m[k] = mu * m[k] + g[k];
            g[k] += mu * m[k];
        }
        store_floats<W>(momentum + i * W, m);
        store_floats<W>(grads + i * W, g);
    }
}

// Adds n gradients, which are multiplied by scale first, to their momentum. Replaces them by
// U. Both begin at multiples of 16 bytes.
static inline void muon_momentum(float *grads, float *momentum, size_t n, double mu,
                                 double scale, cudaStream_t stream) {
    kernel_cost(KERNEL_ELEMENTWISE, n, 4 * sizeof(float), 5);
    by_packs<4>(n, [&](auto pack) {
        LAUNCH(muon_momentum_kernel<pack>, element_blocks(n), ELEMENT_THREADS, stream)
        (grads, momentum, n, (float)mu, (float)(1.0 - mu), (float)scale);
    });
}

// Sums the squares of each row in double: a row to the threads of one row.
__global__ void __launch_bounds__(ROW_THREADS)
    muon_rows_kernel(double *sums, const float *u, MuonMatrix shape) {
    size_t row = block_row();
    if (row >= shape.rows) return;
    const float *from = u + row * shape.stride + shape.first;
    double sum = 0.0;
    Share s = row_share(shape.cols);
    for (size_t i = s.begin; i < s.end; i += s.step)
        sum += (double)from[i] * (double)from[i];
    sum = row_sum(sum);
    if (row_lane() == 0) sums[row] = sum;
}

// Adds the rows' sums: one warp, in an order that depends on their number alone.
__global__ void __launch_bounds__(32) muon_rows_sum_kernel(double *sums, size_t rows) {
    double sum = 0.0;
    Share s = share_of(rows, threadIdx.x, 32);
    for (size_t i = s.begin; i < s.end; i += s.step) sum += sums[i];
    sum = warp_sum(sum);
    if (threadIdx.x == 0) sums[rows] = sum;
}

__global__ void __launch_bounds__(ROW_THREADS)
    muon_normalise_kernel(floatX *x, const float *u, const double *sums, MuonMatrix shape) {
    size_t row = block_row();
    if (row >= shape.rows) return;
    const float *from = u + row * shape.stride + shape.first;
    float inverse = (float)(1.0 / (sqrt(sums[shape.rows]) + MUON_EPSILON));
    Share s = row_share(shape.cols);
    for (size_t i = s.begin; i < s.end; i += s.step)
        x[row * shape.cols + i] = from_float<floatX>(from[i] * inverse);
}

// Computes scratch->x = U / (|U| + 1e-7), of the matrix in the tensor u.
static inline void muon_normalise(const MuonScratch *scratch, const float *u,
                                  MuonMatrix shape, cudaStream_t stream) {
    size_t n = shape.rows * shape.cols;
    unsigned blocks = row_blocks(shape.rows);
    kernel_cost(KERNEL_ELEMENTWISE, n, sizeof(float), 2);
    LAUNCH(muon_rows_kernel, blocks, ROW_THREADS, stream)(scratch->sums, u, shape);
    kernel_cost(KERNEL_NONE, shape.rows, sizeof(double), 1);
    LAUNCH(muon_rows_sum_kernel, 1, 32, stream)(scratch->sums, shape.rows);
    kernel_cost(KERNEL_ELEMENTWISE, n, sizeof(float) + sizeof(floatX), 1);
    LAUNCH(muon_normalise_kernel, blocks, ROW_THREADS, stream)
    (scratch->x, u, scratch->sums, shape);
}

template <int W>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    muon_combine_kernel(floatX *out, const floatX *x, const floatX *y, float a, float b,
                        size_t n) {
    Share s = element_share<W>(n);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float p[W], q[W];
        load_floats<W>(p, x + i * W);
        load_floats<W>(q, y + i * W);
        for (int k = 0; k < W; k++) p[k] = a * p[k] + b * q[k];
        store_floats<W>(out + i * W, p);
    }
}

// Computes out[n] = a x + b y. out may be one of them.
static inline void muon_combine(floatX *out, const floatX *x, const floatX *y, float a,
                                float b, size_t n, cudaStream_t stream) {
    kernel_cost(KERNEL_ELEMENTWISE, n, 3 * sizeof(floatX), 3);
    by_packs<ELEMENT_PACK>(n, [&](auto pack) {
        LAUNCH(muon_combine_kernel<pack>, element_blocks(n), ELEMENT_THREADS, stream)
        (out, x, y, a, b, n);
    });
}

// Makes scratch->x nearly orthogonal by `steps` steps of Newton-Schulz.
static inline void muon_orthogonalise(const MuonScratch *scratch, Matmul *mm,
                                      MuonMatrix shape, size_t steps) {
    size_t rows = shape.rows, cols = shape.cols;
    bool tall = rows > cols;
    size_t m = tall ? cols : rows, n = tall ? rows : cols;
    floatX *x = scratch->x, *product = scratch->product;
    floatX *square = scratch->square, *combined = scratch->combined;
    for (size_t step = 0; step < steps; step++) {
        gemm(mm, square, x, tall, x, !tall, m, m, n);
        gemm(mm, combined, square, false, square, false, m, m, m);
        muon_combine(combined, square, combined, MUON_B, MUON_C, m * m, mm->stream);
        const floatX *left = tall ? x : combined, *right = tall ? combined : x;
        gemm(mm, product, left, false, right, false, rows, cols, m);
        muon_combine(x, x, product, MUON_A, 1.0f, rows * cols, mm->stream);
    }
}

__global__ void __launch_bounds__(ROW_THREADS)
    muon_update_kernel(floatX *params, float *master, const floatX *x, MuonMatrix shape,
                       size_t lo, size_t hi, float rate, float shrink) {
    size_t row = block_row();
    if (row >= shape.rows) return;
    Share s = row_share(shape.cols);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        size_t at = row * shape.stride + shape.first + i;
        if (at < lo || at >= hi) continue;
        float w = master ? master[at - lo] : to_float(params[at]);
        w -= rate * to_float(x[row * shape.cols + i]) + shrink * w;
        if (master) master[at - lo] = w;
        params[at] = from_float<floatX>(w);
    }
}

// Updates the matrix in the tensor params by scratch->x, but only its elements among the
// tensor's [lo, hi). master [hi - lo] are their fp32 weights, or NULL if floatX is float.
static inline void muon_update(floatX *params, float *master, const MuonScratch *scratch,
                               MuonMatrix shape, size_t lo, size_t hi, double lr,
                               double decay, cudaStream_t stream) {
    double longer = (double)(shape.rows > shape.cols ? shape.rows : shape.cols);
    size_t n = shape.rows * shape.cols;
    if (hi - lo < n) n = hi - lo;
    kernel_cost(KERNEL_ELEMENTWISE, n,
                sizeof(floatX) + 2 * sizeof(float) + (master ? sizeof(floatX) : 0), 4);
    LAUNCH(muon_update_kernel, row_blocks(shape.rows), ROW_THREADS, stream)
    (params, master, scratch->x, shape, lo, hi, (float)(lr * 0.2 * sqrt(longer)),
     (float)(lr * decay));
}

#endif
