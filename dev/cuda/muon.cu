// muon.cu: one step of Newton-Schulz. The product A = X X' comes by a thread for each element, by
// tiles, by half of the tiles (A is symmetric), and by the library. Then the whole step, fused and
// by llmc/kernels/muon.cuh. Checked against llmc/reference_muon.h, with Muon's other kernels.
#include "dev/cuda/bench.h"

#include "llmc/kernels/muon.cuh"
#include "llmc/reference_muon.h"

static Lab lab;

// ---- the kernels -----------------------------------------------------------------------

// A wide matrix: m <= n.
typedef struct {
    size_t m, n;
    MuonScratch s;  // x is the input; square, combined and product are outputs
} Problem;

static constexpr unsigned TILE = 16;

// 1: an element a thread.
__global__ void square_naive(floatX *out, const floatX *x, size_t m, size_t n) {
    size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= m * m) return;
    const floatX *a = x + at / m * n, *b = x + at % m * n;
    float sum = 0.0f;
    for (size_t k = 0; k < n; k++) sum += to_float(a[k]) * to_float(b[k]);
    out[at] = from_float<floatX>(sum);
}

// Returns this thread's element of X X': row blockIdx.y * TILE + threadIdx.y, a column of the
// block's tile in x. Every row of X that the block needs is read once.
__device__ static float square_element(const floatX *x, size_t m, size_t n) {
    __shared__ float rows[TILE][TILE + 1], cols[TILE][TILE + 1];
    unsigned tx = threadIdx.x % TILE, ty = threadIdx.x / TILE;
    size_t row = (size_t)blockIdx.y * TILE + ty, col = (size_t)blockIdx.x * TILE + ty;
    float sum = 0.0f;
    for (size_t k = 0; k < n; k += TILE) {
        bool inside = k + tx < n;
        rows[ty][tx] = inside && row < m ? to_float(x[row * n + k + tx]) : 0.0f;
        cols[ty][tx] = inside && col < m ? to_float(x[col * n + k + tx]) : 0.0f;
        __syncthreads();
        for (unsigned i = 0; i < TILE; i++) sum += rows[ty][i] * cols[tx][i];
        __syncthreads();
    }
    return sum;
}

// 2: tiles in shared memory. 3 (HALF): only those on the diagonal and above it; each element is
// written twice.
template <bool HALF>
__global__ void square_tiles(floatX *out, const floatX *x, size_t m, size_t n) {
    if (HALF && blockIdx.x < blockIdx.y) return;
    size_t row = (size_t)blockIdx.y * TILE + threadIdx.x / TILE;
    size_t col = (size_t)blockIdx.x * TILE + threadIdx.x % TILE;
    floatX sum = from_float<floatX>(square_element(x, m, n));
    if (row >= m || col >= m) return;
    out[row * m + col] = sum;
    if (HALF) out[col * m + row] = sum;
}

// The combination in the same launch as A A: out = a I + b A + c A A. With a I in it X needs no
// addition behind its product, but in bf16 the diagonal rounds as a number near 3.4.
__global__ void combine_tiles(floatX *out, const floatX *square, size_t m) {
    if (blockIdx.x < blockIdx.y) return;
    size_t row = (size_t)blockIdx.y * TILE + threadIdx.x / TILE;
    size_t col = (size_t)blockIdx.x * TILE + threadIdx.x % TILE;
    float sum = MUON_C * square_element(square, m, m);  // A is its own transpose
    if (row >= m || col >= m) return;
    sum += MUON_B * to_float(square[row * m + col]) + (row == col ? MUON_A : 0.0f);
    out[row * m + col] = out[col * m + row] = from_float<floatX>(sum);
}

static dim3 tiles(size_t m) {
    unsigned count = (unsigned)CEIL_DIV(m, (size_t)TILE);
    return dim3(count, count);
}

static void square1(const Problem *p, unsigned block) {
    LAUNCH(square_naive, CEIL_DIV(p->m * p->m, (size_t)block), block, lab.stream)
    (p->s.square, p->s.x, p->m, p->n);
}
static void square2(const Problem *p, unsigned) {
    LAUNCH(square_tiles<false>, tiles(p->m), TILE * TILE, lab.stream)
    (p->s.square, p->s.x, p->m, p->n);
}
static void square3(const Problem *p, unsigned) {
    LAUNCH(square_tiles<true>, tiles(p->m), TILE * TILE, lab.stream)
    (p->s.square, p->s.x, p->m, p->n);
}
static void square4(const Problem *p, unsigned) {
    gemm(&lab.mm, p->s.square, p->s.x, false, p->s.x, true, p->m, p->m, p->n);
}

// The step leaves its result in product (1), or in x (2), which the checks copy there.
static void step1(const Problem *p, unsigned) {
    square3(p, 0);
    LAUNCH(combine_tiles, tiles(p->m), TILE * TILE, lab.stream)
    (p->s.combined, p->s.square, p->m);
    gemm(&lab.mm, p->s.product, p->s.combined, false, p->s.x, false, p->m, p->n, p->m);
}
static void step2(const Problem *p, unsigned) {
    muon_orthogonalise(&p->s, &lab.mm, {p->m, p->n, p->n, 0}, 1);
}

static const LabKernel SQUARE[] = {
    {"muon square", 1, "an element a thread", square1, 0},
    {"muon square", 2, "tiles in shared memory", square2, TILE *TILE},
    {"muon square", 3, "tiles on one side of the diagonal", square3, TILE *TILE},
    {"muon square", 4, "cuBLASLt, all of A (llmc)", square4, 1},
};
static const LabKernel STEP[] = {
    {"muon step", 1, "half tiles, combination fused with A A", step1, TILE *TILE},
    {"muon step", 2, "three products, two combinations (llmc)", step2, 1},
};

// ---- the checks ------------------------------------------------------------------------

static MuonScratch make_scratch(size_t rows, size_t cols) {
    size_t m = rows < cols ? rows : cols;
    return {test_floatX(rows * cols), test_floatX(rows * cols), test_floatX(m * m),
            test_floatX(m * m), test_array<double>(rows + 1)};
}

static double square_errors[LAB_COUNT(SQUARE)], step_errors[LAB_COUNT(STEP)];

static void check_step(size_t m, size_t n) {
    size_t mark = test_count, count = m * n;
    Problem p = {m, n, make_scratch(m, n)};
    float *x = test_values(count, 0.0, 1.5 / sqrt((double)n), 1);
    double *wide = widened(x, count), *turned = test_doubles(count);
    double *square = test_doubles(m * m), *fourth = test_doubles(m * m);
    reference_transpose(turned, wide, m, n);
    reference_product(square, wide, turned, m, m, n);
    copy_to_floatX(p.s.x, x, count);
    lab_errors(square_errors, SQUARE, &p,
               [&] { return test_error_floatX(p.s.square, square, m * m, lab.stream); });

    reference_product(fourth, square, square, m, m, m);
    for (size_t i = 0; i < m * m; i++) fourth[i] = -4.7750 * square[i] + 2.0315 * fourth[i];
    reference_product(turned, fourth, wide, m, n, m);
    for (size_t i = 0; i < count; i++) turned[i] += 3.4445 * wide[i];
    step1(&p, 0);
    step_errors[0] = fmax(step_errors[0],
                          test_error_floatX(p.s.product, turned, count, lab.stream));
    step2(&p, 0);
    step_errors[1] = fmax(step_errors[1], test_error_floatX(p.s.x, turned, count, lab.stream));
    test_release(mark);
}

// Checks the whole update of a matrix inside a tensor [rows, stride]: momentum, norm, five steps,
// and weights. Only elements [lo, hi) are updated. The rest keeps its bits.
static void check_update(size_t rows, size_t cols, size_t stride, size_t first, size_t lo,
                         size_t hi) {
    size_t mark = test_count, count = rows * stride;
    MuonMatrix shape = {rows, cols, stride, first};
    MuonScratch s = make_scratch(rows, cols);
    float *g = test_values(count, 0.0, 1.0, 2), *m = test_values(count, 0.0, 1.0, 3);
    float *w = test_values(count, 0.0, 0.1, 4);
    float *grads = to_device(g, count), *momentum = to_device(m, count);
    bool narrow = sizeof(floatX) != sizeof(float);
    floatX *params = to_device_floatX(w, count);
    float *master = narrow ? to_device(w + lo, hi - lo) : NULL;
    muon_momentum(grads, momentum, count, 0.95, 0.5, lab.stream);
    muon_normalise(&s, grads, shape, lab.stream);
    muon_orthogonalise(&s, &lab.mm, shape, 5);
    muon_update(params, master, &s, shape, lo, hi, 0.02, 0.1, lab.stream);

    double *want_m = test_doubles(count), *update = test_doubles(rows * cols);
    double *want = widened(w, count);
    for (size_t i = 0; i < count; i++) want_m[i] = 0.95 * m[i] + 0.05 * 0.5 * g[i];
    for (size_t i = 0; i < rows * cols; i++) {
        size_t at = i / cols * stride + first + i % cols;
        update[i] = 0.95 * want_m[at] + 0.05 * 0.5 * g[at];
    }
    reference_orthogonalise(update, rows, cols, 5);
    double factor = 0.2 * sqrt((double)(rows > cols ? rows : cols));
    for (size_t i = 0; i < rows * cols; i++) {
        size_t at = i / cols * stride + first + i % cols;
        if (at >= lo && at < hi) want[at] -= 0.02 * (factor * update[i] + 0.1 * want[at]);
    }
    double momentum_error = test_error_float(momentum, want_m, count, lab.stream);
    double error = test_error_floatX(params, want, count, lab.stream);
    float *got = to_host_floatX(params, count, lab.stream);
    bool kept = true;
    for (size_t i = 0; i < count; i++) {
        size_t col = i % stride;
        bool ours = i >= lo && i < hi && col >= first && col < first + cols;
        kept = kept && (ours || got[i] == w[i]);
    }
    check(&lab.checks, kept && momentum_error < 1e-6 && error < (narrow ? 0.05 : 2e-5),
          "%zu x %zu of [%zu, %zu], elements %zu to %zu: momentum %.1e, weights %.1e", rows, cols,
          rows, stride, lo, hi, momentum_error, error);
    test_release(mark);
}

static void checks(void) {
    static const size_t shapes[][2] = {{1, 1}, {7, 9}, {16, 16}, {33, 70}, {64, 256}, {96, 100}};
    for (const size_t(&s)[2] : shapes) check_step(s[0], s[1]);
    for (size_t k = 0; k < LAB_COUNT(SQUARE); k++)
        lab_check(&lab, &SQUARE[k], square_errors[k], FLOATX_ROUNDING + 2e-6);
    for (size_t k = 0; k < LAB_COUNT(STEP); k++)
        lab_check(&lab, &STEP[k], step_errors[k], 8 * FLOATX_ROUNDING + 4e-6);
    check_update(24, 24, 72, 24, 0, 24 * 72);
    check_update(24, 96, 96, 0, 0, 24 * 96);
    check_update(96, 24, 24, 0, 64, 960);
    check_update(17, 5, 15, 10, 32, 160);
}

// Times a matrix of GPT-2 124M's MLP.
static void bench(void) {
    size_t m = lab.cpu ? 64 : 768, n = 4 * m;
    Problem p = {m, n, make_scratch(m, n)};
    p.s.x = lab_fill(&lab, m * n);
    KernelWork square = lab_stated(&lab, LAB_LAST(SQUARE), &p);
    for (const LabKernel &k : SQUARE) lab_bench(&lab, &k, &p, square, 0.0);
    KernelWork step = lab_stated(&lab, LAB_LAST(STEP), &p);
    for (const LabKernel &k : STEP) lab_bench(&lab, &k, &p, step, 0.0);
}

int main(int argc, char **argv) { return lab_main(&lab, argc, argv, checks, bench); }
