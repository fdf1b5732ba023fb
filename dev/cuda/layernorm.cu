// layernorm.cu: layer normalisation with the residual before it, forward and backward. Kernels
// from naive to llmc/kernels/layernorm.cuh's, checked against llmc/reference_layers.h. Checks
// llmc's own also with a warp and with a thread per row.
#include "dev/cuda/bench.h"

#include "llmc/kernels/layernorm.cuh"
#include "llmc/reference_layers.h"

static Lab lab;

// ---- the kernels -----------------------------------------------------------------------
// Forward: residual = inp1 + (inp2 + bias2), out = layernorm(residual). Backward: dinp =
// dresidual + the gradient, and the sums over the rows of weight's and bias's.

typedef struct {
    floatX *out, *residual;                         // [N, C]
    float *mean, *rstd;                             // [N]
    const floatX *inp1, *inp2, *bias2, *weight, *bias;  // [N, C], [N, C], [C], [C], [C]
    floatX *dinp;                                   // [N, C]
    float *dweight, *dbias, *scratch;               // [C], [C], reduce_scratch_floats
    const floatX *dresidual, *dout;                 // [N, C]
    size_t N, C;
} Problem;

// 1: an addition kernel, then a thread a row: neighbouring threads read addresses that lie C
// apart.
__global__ void add_element(floatX *out, const floatX *inp1, const floatX *inp2,
                            const floatX *bias, size_t n, size_t C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] =
            from_float<floatX>(to_float(inp1[i]) + (to_float(inp2[i]) + to_float(bias[i % C])));
}

__global__ void normalise_thread_a_row(floatX *out, float *mean, float *rstd, const floatX *inp,
                                       const floatX *weight, const floatX *bias, size_t N,
                                       size_t C) {
    size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const floatX *x = inp + n * C;
    float m = 0.0f, v = 0.0f;
    for (size_t i = 0; i < C; i++) m += to_float(x[i]);
    m /= (float)C;
    for (size_t i = 0; i < C; i++) v += (to_float(x[i]) - m) * (to_float(x[i]) - m);
    float r = 1.0f / sqrtf(v / (float)C + LAYERNORM_EPSILON);
    for (size_t i = 0; i < C; i++) {
        out[n * C + i] = from_float<floatX>((to_float(x[i]) - m) * r * to_float(weight[i]) +
                                            to_float(bias[i]));
    }
    mean[n] = m;
    rstd[n] = r;
}

// 2: fused, a block a row: whole cache lines, but two barriers for each reduction.
__global__ void fused_block_a_row(floatX *out, floatX *residual, float *mean, float *rstd,
                                  const floatX *inp1, const floatX *inp2, const floatX *bias2,
                                  const floatX *weight, const floatX *bias, size_t C) {
    size_t n = blockIdx.x;
    floatX *x = residual + n * C;
    float sum = 0.0f, square = 0.0f;
    for (size_t i = threadIdx.x; i < C; i += blockDim.x) {
        x[i] = from_float<floatX>(to_float(inp1[n * C + i]) +
                                  (to_float(inp2[n * C + i]) + to_float(bias2[i])));
        sum += to_float(x[i]);
    }
    float m = block_sum(sum) / (float)C;
    for (size_t i = threadIdx.x; i < C; i += blockDim.x)
        square += (to_float(x[i]) - m) * (to_float(x[i]) - m);
    float r = 1.0f / sqrtf(block_sum(square) / (float)C + LAYERNORM_EPSILON);
    for (size_t i = threadIdx.x; i < C; i += blockDim.x) {
        out[n * C + i] = from_float<floatX>((to_float(x[i]) - m) * r * to_float(weight[i]) +
                                            to_float(bias[i]));
    }
    if (threadIdx.x == 0) {
        mean[n] = m;
        rstd[n] = r;
    }
}

// 1: a thread a row for dinp, and a thread a column for the sums.
__global__ void dinp_thread_a_row(floatX *dinp, const floatX *dresidual, const floatX *dout,
                                  const floatX *inp, const floatX *weight, const float *mean,
                                  const float *rstd, size_t N, size_t C) {
    size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    float m = mean[n], r = rstd[n], sum = 0.0f, dot = 0.0f;
    for (size_t i = 0; i < C; i++) {
        float d = to_float(dout[n * C + i]) * to_float(weight[i]);
        sum += d;
        dot += d * (to_float(inp[n * C + i]) - m) * r;
    }
    for (size_t i = 0; i < C; i++) {
        float d = to_float(dout[n * C + i]) * to_float(weight[i]),
              normal = (to_float(inp[n * C + i]) - m) * r;
        float y = (d - sum / (float)C - normal * (dot / (float)C)) * r;
        dinp[n * C + i] = from_float<floatX>(to_float(dresidual[n * C + i]) + y);
    }
}

// Columns summed over the rows of one chunk: out [chunks, 2, C].
__global__ void sums_thread_a_column(float *out, const floatX *dout, const floatX *inp,
                                     const float *mean, const float *rstd, size_t N, size_t C,
                                     size_t rows) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * rows;
    if (i >= C) return;
    float dw = 0.0f, db = 0.0f;
    for (size_t n = first; n < N && n < first + rows; n++) {
        float d = to_float(dout[n * C + i]);
        dw += d * (to_float(inp[n * C + i]) - mean[n]) * rstd[n];
        db += d;
    }
    out[blockIdx.y * 2 * C + i] = dw;
    out[blockIdx.y * 2 * C + C + i] = db;
}

// 2: a block a row, and the sums by chunks of rows in parallel; everything is still read by two
// kernels.
__global__ void dinp_block_a_row(floatX *dinp, const floatX *dresidual, const floatX *dout,
                                 const floatX *inp, const floatX *weight, const float *mean,
                                 const float *rstd, size_t C) {
    size_t n = blockIdx.x;
    float m = mean[n], r = rstd[n], sum = 0.0f, dot = 0.0f;
    for (size_t i = threadIdx.x; i < C; i += blockDim.x) {
        float d = to_float(dout[n * C + i]) * to_float(weight[i]);
        sum += d;
        dot += d * (to_float(inp[n * C + i]) - m) * r;
    }
    sum = block_sum(sum) / (float)C;
    dot = block_sum(dot) / (float)C;
    for (size_t i = threadIdx.x; i < C; i += blockDim.x) {
        float d = to_float(dout[n * C + i]) * to_float(weight[i]),
              normal = (to_float(inp[n * C + i]) - m) * r;
        dinp[n * C + i] =
            from_float<floatX>(to_float(dresidual[n * C + i]) + (d - sum - normal * dot) * r);
    }
}

// 3: a warp a row. It sums its rows' columns in [2, C] floats of its own in shared memory, which
// has room for few warps if C is large. If C is too large for that, or one thread has the row, a
// block has one warp, which sums in the block's partials.
enum {
    COLUMNS_FLOATS = 48 * 1024 / sizeof(float)
};  // as much as a block may have: 8 warps with C = 768

template <int W>
__global__ void __launch_bounds__(ROW_THREADS)
    columns_in_shared_memory(floatX *dinp, float *partials, const floatX *dresidual,
                             const floatX *dout, const floatX *inp, const floatX *weight,
                             const float *mean, const float *rstd, size_t N, size_t C,
                             size_t rows_per_block, bool in_shared) {
    __shared__ float shared[COLUMNS_FLOATS];
    size_t warp = threadIdx.x / ROW_LANES, warps = blockDim.x / ROW_LANES;
    float *partial = partials + (size_t)blockIdx.x * 2 * C;
    float *dweight = in_shared ? shared + warp * 2 * C : partial, *dbias = dweight + C;
    size_t first = (size_t)blockIdx.x * rows_per_block;
    size_t end = N - first < rows_per_block ? N : first + rows_per_block;
    Share s = row_share(C / W);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float zero[W] = {0.0f};
        store_floats<W>(dweight + i * W, zero);
        store_floats<W>(dbias + i * W, zero);
    }
    for (size_t n = first + warp; n < end; n += warps) {
        const floatX *x_row = inp + n * C, *dout_row = dout + n * C;
        float m = mean[n], r = rstd[n], x[W], d[W], w[W], sums[W] = {0.0f}, dots[W] = {0.0f};
        for (size_t i = s.begin; i < s.end; i += s.step) {
            float dw[W], db[W];
            load_floats<W>(x, x_row + i * W);
            load_floats<W>(d, dout_row + i * W);
            load_floats<W>(w, weight + i * W);
            load_floats<W>(dw, dweight + i * W);
            load_floats<W>(db, dbias + i * W);
            for (int k = 0; k < W; k++) {
                float normal = (x[k] - m) * r, dnormal = d[k] * w[k];
                dw[k] += d[k] * normal;
                db[k] += d[k];
                sums[k] += dnormal;
                dots[k] += dnormal * normal;
            }
            store_floats<W>(dweight + i * W, dw);
            store_floats<W>(dbias + i * W, db);
        }
        float sum = row_sum(sum_of<W>(sums)) / (float)C, dot = row_sum(sum_of<W>(dots)) / (float)C;
        for (size_t i = s.begin; i < s.end; i += s.step) {
            float y[W] = {0.0f};
            load_floats<W>(x, x_row + i * W);
            load_floats<W>(d, dout_row + i * W);
            load_floats<W>(w, weight + i * W);
            if (dresidual) load_floats<W>(y, dresidual + n * C + i * W);
            for (int k = 0; k < W; k++) y[k] += (d[k] * w[k] - sum - (x[k] - m) * r * dot) * r;
            store_floats<W>(dinp + n * C + i * W, y);
        }
    }
    if (!in_shared) return;
    __syncthreads();
    s = share_of(2 * C, threadIdx.x, blockDim.x);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float sum = shared[i];
        for (size_t j = 1; j < warps; j++) sum += shared[j * 2 * C + i];
        partial[i] = sum;
    }
}

static void forward1(const Problem *p, unsigned block) {
    LAUNCH(add_element, CEIL_DIV(p->N * p->C, (size_t)block), block, lab.stream)
    (p->residual, p->inp1, p->inp2, p->bias2, p->N * p->C, p->C);
    LAUNCH(normalise_thread_a_row, CEIL_DIV(p->N, (size_t)block), block, lab.stream)
    (p->out, p->mean, p->rstd, p->residual, p->weight, p->bias, p->N, p->C);
}
static void forward2(const Problem *p, unsigned block) {
    LAUNCH(fused_block_a_row, p->N, block, lab.stream)
    (p->out, p->residual, p->mean, p->rstd, p->inp1, p->inp2, p->bias2, p->weight, p->bias, p->C);
}
static void forward3(const Problem *p, unsigned) {
    residual_forward(p->residual, p->inp1, p->inp2, p->bias2, p->N, p->C, lab.stream, Dropout());
    layernorm_forward({p->out, p->mean, p->rstd}, p->residual, p->weight, p->bias, p->N, p->C,
                      lab.stream);
}
static void forward4(const Problem *p, unsigned) {
    layernorm_residual_forward(p->residual, {p->out, p->mean, p->rstd}, p->inp1, p->inp2,
                               p->bias2, p->weight, p->bias, p->N, p->C, lab.stream, Dropout());
}

static void sum_columns(const Problem *p, unsigned block, size_t rows) {
    size_t chunks = CEIL_DIV(p->N, rows);
    dim3 grid((unsigned)CEIL_DIV(p->C, (size_t)block), (unsigned)chunks);
    LAUNCH(sums_thread_a_column, grid, block, lab.stream)
    (p->scratch, p->dout, p->residual, p->mean, p->rstd, p->N, p->C, rows);
    column_sums(p->dweight, p->dbias, p->scratch, chunks, 2 * p->C, p->C, false, lab.stream);
}
static void backward1(const Problem *p, unsigned block) {
    LAUNCH(dinp_thread_a_row, CEIL_DIV(p->N, (size_t)block), block, lab.stream)
    (p->dinp, p->dresidual, p->dout, p->residual, p->weight, p->mean, p->rstd, p->N, p->C);
    sum_columns(p, block, p->N);
}
static void backward2(const Problem *p, unsigned block) {
    LAUNCH(dinp_block_a_row, p->N, block, lab.stream)
    (p->dinp, p->dresidual, p->dout, p->residual, p->weight, p->mean, p->rstd, p->C);
    sum_columns(p, block, layernorm_backward_rows(p->N));
}
template <int W>
static void backward_in_shared(const Problem *p) {
    size_t rows = layernorm_backward_rows(p->N), blocks = CEIL_DIV(p->N, rows);
    unsigned warps = ROW_LANES == 32 ? BLOCK_ROWS : 1;
    while (warps > 1 && warps * 2 * p->C > COLUMNS_FLOATS) warps /= 2;
    bool in_shared = ROW_LANES == 32 && warps * 2 * p->C <= COLUMNS_FLOATS;
    LAUNCH(columns_in_shared_memory<W>, blocks, ROW_LANES * warps, lab.stream)
    (p->dinp, p->scratch, p->dresidual, p->dout, p->residual, p->weight, p->mean, p->rstd, p->N,
     p->C, rows, in_shared);
    column_sums(p->dweight, p->dbias, p->scratch, blocks, 2 * p->C, p->C, false, lab.stream);
}
static void backward3(const Problem *p, unsigned) {
    if (p->C % x128::size) backward_in_shared<1>(p);
    else backward_in_shared<x128::size>(p);
}
static void backward4(const Problem *p, unsigned) {
    layernorm_backward(p->dinp, p->dweight, p->dbias, p->scratch, p->dresidual, p->dout,
                       p->residual, p->weight, {NULL, p->mean, p->rstd}, p->N, p->C, false,
                       lab.stream);
}

static const LabKernel FORWARD[] = {
    {"residual + layernorm", 1, "an addition kernel, then a thread a row", forward1, 0},
    {"residual + layernorm", 2, "fused, a block a row", forward2, 0},
    {"residual + layernorm", 3, "apart, a warp a row: as between two layers", forward3,
     ROW_THREADS},
    {"residual + layernorm", 4, "a warp a row, 128-bit loads, no barrier (llmc)", forward4,
     ROW_THREADS},
};
static const LabKernel BACKWARD[] = {
    {"layernorm backward", 1, "a thread a row, then a thread a column", backward1, 0},
    {"layernorm backward", 2, "a block a row, then columns by chunks of rows", backward2, 0},
    {"layernorm backward", 3, "one pass: a warp a row, columns in shared memory", backward3,
     ROW_THREADS},
    {"layernorm backward", 4, "a block a row, columns in registers (llmc)", backward4,
     LAYERNORM_THREADS},
};

// ---- the checks ------------------------------------------------------------------------

typedef struct {
    double *out, *dinp, *dweight, *dbias;  // [N, C], [N, C], [C], [C]
    double terms;  // the largest of the numbers that an element of dinp is a sum of
} Want;

static Want reference(const float *x, const float *w, const float *b, const float *dout, size_t N,
                      size_t C) {
    Want want = {test_doubles(N * C), test_doubles(N * C), test_doubles(C), test_doubles(C), 0.0};
    double *inp = widened(x, N * C), *weight = widened(w, C), *mean = test_doubles(N),
           *rstd = test_doubles(N);
    reference_layernorm_forward(want.out, mean, rstd, inp, weight, widened(b, C), N, C);
    reference_layernorm_backward(want.dinp, want.dweight, want.dbias, widened(dout, N * C), inp,
                                 weight, mean, rstd, N, C);
    for (size_t i = 0; i < N * C; i++)
        want.terms = fmax(want.terms, fabs((double)w[i % C] * (double)dout[i]) * rstd[i / C]);
    return want;
}

// Returns a bound for the error of a sum of n floats, relative to their root mean square. It is
// several times the usual error. Every other error here comes from such a sum.
static double sum_bound(size_t n) { return 6e-8 * (8.0 + 0.5 * sqrt((double)n)); }

// Checks llmc's kernels in every form in which the trainers call them.
static void check_shape(size_t N, size_t C, double center) {
    size_t mark = test_count;
    cudaStream_t stream = lab.stream;
    float *inp1 = test_values(N * C, center, 1.5, 1), *inp2 = test_values(N * C, 0.0, 0.5, 2);
    float *bias2 = test_values(C, 0.0, 0.5, 3), *w = test_values(C, 1.0, 0.5, 4),
          *b = test_values(C, 0.0, 1.0, 5);
    float *dout = test_values(N * C, 0.0, 1.0, 6), *dres = test_values(N * C, 0.0, 1.0, 7);
    floatX *d_inp1 = to_device_floatX(inp1, N * C), *d_inp2 = to_device_floatX(inp2, N * C);
    floatX *d_bias2 = to_device_floatX(bias2, C), *d_w = to_device_floatX(w, C),
           *d_b = to_device_floatX(b, C);
    floatX *d_dout = to_device_floatX(dout, N * C), *d_res = test_floatX(N * C),
           *d_sum = test_floatX(N * C);
    floatX *d_out = test_floatX(N * C);
    Layernorm ln = {d_out, test_floats(N), test_floats(N)};
    // A row's mean is a sum of C numbers about center; its error is divided by the deviation,
    // about 1.
    double worst = 0.0, inner = sum_bound(C) * (1.0 + fabs(center)),
           outer = FLOATX_ROUNDING + inner;
    // residual: rounded once, the same bits from both functions, and layernorm of the stored
    // values
    layernorm_residual_forward(d_res, ln, d_inp1, d_inp2, d_bias2, d_w, d_b, N, C, stream,
                               Dropout());
    residual_forward(d_sum, d_inp1, d_inp2, d_bias2, N, C, stream, Dropout());
    float *res = to_host_floatX(d_res, N * C, stream), *sum = to_host_floatX(d_sum, N * C, stream);
    float *out = to_host_floatX(d_out, N * C, stream);
    bool ok = same_bits(res, sum, N * C);
    for (size_t n = 0; n < N * C; n++) {
        ok = ok && res[n] == to_float(from_float<floatX>(inp1[n] + (inp2[n] + bias2[n % C])));
    }
    Want want = reference(res, w, b, dout, N, C);
    worst = fmax(worst, test_error(out, want.out, N * C) / outer);
    layernorm_forward(ln, d_sum, d_w, d_b, N, C, stream);
    // The normalised rows are those of the residual as stored, bit by bit.
    ok = ok && same_bits(out, to_host_floatX(d_out, N * C, stream), N * C);
    // backward: overwriting, then in place with accumulation and the residual's gradient
    float *d_dw = to_device(w, C), *d_db = to_device(b, C);
    float *scratch = test_floats(reduce_scratch_floats(N, C, C));
    layernorm_backward(d_out, d_dw, d_db, scratch, NULL, d_dout, d_res, d_w, ln, N, C, false,
                       stream);
    float *dw = to_host(d_dw, C, stream), *db = to_host(d_db, C, stream);
    float *dinp = to_host_floatX(d_out, N * C, stream);
    worst = fmax(worst, test_error_beside(dinp, want.dinp, N * C, want.terms) / outer);
    worst = fmax(worst, test_error(dw, want.dweight, C) / (inner + sum_bound(N)));
    worst = fmax(worst, test_error(db, want.dbias, C) / sum_bound(N));
    copy_to_floatX(d_sum, dres, N * C);
    layernorm_backward(d_sum, d_dw, d_db, scratch, d_sum, d_dout, d_res, d_w, ln, N, C, true,
                       stream);
    float *dw2 = to_host(d_dw, C, stream), *db2 = to_host(d_db, C, stream);
    for (size_t i = 0; i < N * C; i++) want.dinp[i] += (double)dres[i];
    worst = fmax(worst, test_error_floatX(d_sum, want.dinp, N * C, stream) / outer);
    for (size_t i = 0; i < C; i++) ok = ok && dw2[i] == 2.0f * dw[i] && db2[i] == 2.0f * db[i];
    check(&lab.checks, ok && worst <= 1.0,
          "N %zu C %zu mean %g, %2d threads a row (" FLOATX_NAME "): error %.2f of its bound", N,
          C, center, ROW_LANES, worst);
    test_release(mark);
}

// Checks rows of one channel. Their gradient is 0, because w dout and its mean cancel. A GPU
// multiplies and subtracts in one operation, and leaves the rounding of w dout. That is within
// the bound, and a wrong gradient is not.
static void check_zero(void) {
    size_t mark = test_count;
    enum { N = 30 };
    float *x = test_values(N, 0.0, 1.5, 1), *dout = test_values(N, 0.0, 1.0, 2),
          *w = test_values(1, 1.0, 0.5, 3);
    float left[N], wrong[N], rstd = 316.2f;
    Want want = reference(x, w, w, dout, N, 1);
    for (int i = 0; i < N; i++) {
        volatile float rounded = *w * dout[i];
        left[i] = rstd * fmaf(*w, dout[i], -rounded);
        wrong[i] = rstd * rounded * 1e-4f;
    }
    double of_left = test_error_beside(left, want.dinp, N, want.terms),
           bound = FLOATX_ROUNDING + sum_bound(1);
    double of_wrong = test_error_beside(wrong, want.dinp, N, want.terms);
    check(&lab.checks, of_left <= bound && of_wrong > 5e-5,
          "a gradient of 0: fused, %.2e of its terms (bound %.1e)", of_left, bound);
    test_release(mark);
}

static Problem make_problem(size_t N, size_t C) {
    Problem p;
    p.N = N, p.C = C;
    p.out = test_floatX(N * C), p.residual = test_floatX(N * C), p.dinp = test_floatX(N * C);
    p.mean = test_floats(N), p.rstd = test_floats(N), p.dweight = test_floats(C),
    p.dbias = test_floats(C);
    p.inp1 = to_device_floatX(test_values(N * C, 0.0, 1.5, 1), N * C);
    p.inp2 = to_device_floatX(test_values(N * C, 0.0, 0.5, 2), N * C);
    p.bias2 = to_device_floatX(test_values(C, 0.0, 0.5, 3), C);
    p.weight = to_device_floatX(test_values(C, 1.0, 0.5, 4), C);
    p.bias = to_device_floatX(test_values(C, 0.0, 1.0, 5), C);
    p.dout = to_device_floatX(test_values(N * C, 0.0, 1.0, 6), N * C);
    p.dresidual = to_device_floatX(test_values(N * C, 0.0, 1.0, 7), N * C);
    p.scratch = test_floats(reduce_scratch_floats(N, C, C));
    return p;
}

// The largest error of each kernel as a part of its bound, which depends on the shape.
static double forward_errors[LAB_COUNT(FORWARD)], backward_errors[LAB_COUNT(BACKWARD)];

static void check_kernels_at(size_t N, size_t C) {
    size_t mark = test_count;
    cudaStream_t stream = lab.stream;
    Problem p = make_problem(N, C);
    float *inp1 = to_host_floatX(p.inp1, N * C, stream),
          *inp2 = to_host_floatX(p.inp2, N * C, stream);
    float *bias2 = to_host_floatX(p.bias2, C, stream), *w = to_host_floatX(p.weight, C, stream);
    float *b = to_host_floatX(p.bias, C, stream), *dout = to_host_floatX(p.dout, N * C, stream);
    float *dres = to_host_floatX(p.dresidual, N * C, stream);
    double *sum = test_doubles(N * C), bound = FLOATX_ROUNDING + sum_bound(C);
    for (size_t i = 0; i < N * C; i++)
        sum[i] = (double)inp1[i] + (double)inp2[i] + (double)bias2[i % C];
    Want want;
    lab_errors(forward_errors, FORWARD, &p, [&] {
        want = reference(to_host_floatX(p.residual, N * C, stream), w, b, dout, N, C);
        return fmax(test_error_floatX(p.residual, sum, N * C, stream),
                    test_error_floatX(p.out, want.out, N * C, stream)) / bound;
    });
    for (size_t i = 0; i < N * C; i++) want.dinp[i] += (double)dres[i];
    lab_errors(backward_errors, BACKWARD, &p, [&] {
        double dinp = test_error_floatX(p.dinp, want.dinp, N * C, stream) / bound;
        double dw = test_error_float(p.dweight, want.dweight, C, stream) /
                    (sum_bound(C) + sum_bound(N));
        double db = test_error_float(p.dbias, want.dbias, C, stream) / sum_bound(N);
        return fmax(dinp, fmax(dw, db));
    });
    test_release(mark);
}

static void checks(void) {
    static const size_t ragged[][2] = {{1, 8}, {7, 18}, {33, 64}, {130, 24}, {20, 768}, {3, 1600}};
    for (const size_t(&s)[2] : ragged) check_kernels_at(s[0], s[1]);
    for (size_t k = 0; k < LAB_COUNT(FORWARD); k++)
        lab_check(&lab, &FORWARD[k], forward_errors[k], 1.0);
    for (size_t k = 0; k < LAB_COUNT(BACKWARD); k++)
        lab_check(&lab, &BACKWARD[k], backward_errors[k], 1.0);
    const struct {
        size_t N, C;
        double center;
    } shapes[] = {{1, 8, 0.0},    {3, 1, 0.0},     {7, 18, 0.0},   {33, 64, 0.0},  {130, 24, 0.0},
                  {65, 768, 0.0}, {40, 768, 50.0}, {9, 1600, 0.0}, {5, 6152, 0.0}, {4500, 16, 0.0},
                  {3, 12296, 0.0}};
    for (const auto &s : shapes) check_shape(s.N, s.C, s.center);
    check_zero();
}

// Times all kernels. Memory traffic in units of N C elements: forward reads inp1 and inp2 and
// writes residual and out. The fused kernels read the written residual twice more (6), those
// apart three times in another kernel (7). Backward reads dout, the input and dresidual and
// writes dinp: 4. Unless registers hold the row, it reads dout and the input again once the row's
// sums are known (6). Separate column sums make 8.
static void bench(void) {
    Problem p = make_problem(lab.cpu ? 1024 : 32768, 768);
    double unit = (double)(p.N * p.C * sizeof(floatX));
    KernelWork forward = lab_stated(&lab, LAB_LAST(FORWARD), &p);  // backward reads what it leaves
    KernelWork backward = lab_stated(&lab, LAB_LAST(BACKWARD), &p);
    for (const LabKernel &k : FORWARD)
        lab_bench(&lab, &k, &p, forward, (k.number % 2 ? 7.0 : 6.0) * unit);
    for (const LabKernel &k : BACKWARD) {
        lab_bench(&lab, &k, &p, backward,
                  (k.number < 3              ? 8.0
                   : k.number < 4 || lab.cpu ? 6.0
                                             : 4.0) *
                      unit);
    }
}

int main(int argc, char **argv) { return lab_main(&lab, argc, argv, checks, bench); }
