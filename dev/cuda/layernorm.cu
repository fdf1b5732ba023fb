// layernorm.cu: layer normalisation with the residual before it, forward and backward: kernels from naive to
// llmc/kernels/layernorm.cuh's, checked against plain loops in double. llmc's own also with a warp and with a thread
// per row.
#include "llmc/kernels/layernorm.cuh"

#include "dev/cuda/bench.h"

static Lab lab;

// ---- the kernels -------------------------------------------------------------------------------------------
// Forward: residual = inp1 + (inp2 + bias2), out = layernorm(residual). Backward: dinp = dresidual + the gradient,
// and the sums over the rows of weight's and bias's.

typedef struct {
    floatX *out, *residual;                         // [N, C]
    float *mean, *rstd;                             // [N]
    const floatX *inp1, *inp2, *bias2, *weight, *bias;  // [N, C], [N, C], [C], [C], [C]
    floatX *dinp;                                   // [N, C]
    float *dweight, *dbias, *scratch;               // [C], [C], layernorm_backward_scratch
    const floatX *dresidual, *dout;                 // [N, C]
    size_t N, C;
} Problem;

// 1: an addition kernel, then a thread a row: neighbouring threads read addresses that lie C apart.
__global__ void add_element(floatX *out, const floatX *inp1, const floatX *inp2, const floatX *bias, size_t n,
                            size_t C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = from_float<floatX>(to_float(inp1[i]) + (to_float(inp2[i]) + to_float(bias[i % C])));
}

__global__ void normalise_thread_a_row(floatX *out, float *mean, float *rstd, const floatX *inp, const floatX *weight,
                                       const floatX *bias, size_t N, size_t C) {
    size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const floatX *x = inp + n * C;
    float m = 0.0f, v = 0.0f;
    for (size_t i = 0; i < C; i++) m += to_float(x[i]);
    m /= (float)C;
    for (size_t i = 0; i < C; i++) v += (to_float(x[i]) - m) * (to_float(x[i]) - m);
    float r = 1.0f / sqrtf(v / (float)C + LAYERNORM_EPSILON);
    for (size_t i = 0; i < C; i++) {
        out[n * C + i] = from_float<floatX>((to_float(x[i]) - m) * r * to_float(weight[i]) + to_float(bias[i]));
    }
    mean[n] = m;
    rstd[n] = r;
}

// 2: fused, a block a row: whole cache lines, but two barriers for each reduction.
__global__ void fused_block_a_row(floatX *out, floatX *residual, float *mean, float *rstd, const floatX *inp1,
                                  const floatX *inp2, const floatX *bias2, const floatX *weight, const floatX *bias,
                                  size_t C) {
    size_t n = blockIdx.x;
    floatX *x = residual + n * C;
    float sum = 0.0f, square = 0.0f;
    for (size_t i = threadIdx.x; i < C; i += blockDim.x) {
        x[i] = from_float<floatX>(to_float(inp1[n * C + i]) + (to_float(inp2[n * C + i]) + to_float(bias2[i])));
        sum += to_float(x[i]);
    }
    float m = block_sum(sum) / (float)C;
    for (size_t i = threadIdx.x; i < C; i += blockDim.x) square += (to_float(x[i]) - m) * (to_float(x[i]) - m);
    float r = 1.0f / sqrtf(block_sum(square) / (float)C + LAYERNORM_EPSILON);
    for (size_t i = threadIdx.x; i < C; i += blockDim.x) {
        out[n * C + i] = from_float<floatX>((to_float(x[i]) - m) * r * to_float(weight[i]) + to_float(bias[i]));
    }
    if (threadIdx.x == 0) {
        mean[n] = m;
        rstd[n] = r;
    }
}

// 1: a thread a row for dinp, and a thread a column for the sums.
__global__ void dinp_thread_a_row(floatX *dinp, const floatX *dresidual, const floatX *dout, const floatX *inp,
                                  const floatX *weight, const float *mean, const float *rstd, size_t N, size_t C) {
    size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    float m = mean[n], r = rstd[n], sum = 0.0f, dot = 0.0f;
    for (size_t i = 0; i < C; i++) {
        float d = to_float(dout[n * C + i]) * to_float(weight[i]);
        sum += d;
        dot += d * (to_float(inp[n * C + i]) - m) * r;
    }
    for (size_t i = 0; i < C; i++) {
        float d = to_float(dout[n * C + i]) * to_float(weight[i]), normal = (to_float(inp[n * C + i]) - m) * r;
        float y = (d - sum / (float)C - normal * (dot / (float)C)) * r;
        dinp[n * C + i] = from_float<floatX>(to_float(dresidual[n * C + i]) + y);
    }
}

// Columns summed over the rows of one chunk: out [chunks, 2, C].
__global__ void sums_thread_a_column(float *out, const floatX *dout, const floatX *inp, const float *mean,
                                     const float *rstd, size_t N, size_t C, size_t rows) {
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

// 2: a block a row, and the sums by chunks of rows in parallel; everything is still read by two kernels.
__global__ void dinp_block_a_row(floatX *dinp, const floatX *dresidual, const floatX *dout, const floatX *inp,
                                 const floatX *weight, const float *mean, const float *rstd, size_t C) {
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
        float d = to_float(dout[n * C + i]) * to_float(weight[i]), normal = (to_float(inp[n * C + i]) - m) * r;
        dinp[n * C + i] = from_float<floatX>(to_float(dresidual[n * C + i]) + (d - sum - normal * dot) * r);
    }
}

static void forward1(const void *problem, unsigned block) {
    const Problem *p = (const Problem *)problem;
    LAUNCH(add_element, CEIL_DIV(p->N * p->C, (size_t)block), block, 0, lab.stream)
    (p->residual, p->inp1, p->inp2, p->bias2, p->N * p->C, p->C);
    LAUNCH(normalise_thread_a_row, CEIL_DIV(p->N, (size_t)block), block, 0, lab.stream)
    (p->out, p->mean, p->rstd, p->residual, p->weight, p->bias, p->N, p->C);
}
static void forward2(const void *problem, unsigned block) {
    const Problem *p = (const Problem *)problem;
    LAUNCH(fused_block_a_row, p->N, block, 0, lab.stream)
    (p->out, p->residual, p->mean, p->rstd, p->inp1, p->inp2, p->bias2, p->weight, p->bias, p->C);
}
static void forward3(const void *problem, unsigned) {
    const Problem *p = (const Problem *)problem;
    layernorm_residual_forward(p->residual, p->out, p->mean, p->rstd, p->inp1, p->inp2, p->bias2, p->weight, p->bias,
                               p->N, p->C, lab.stream);
}

static void sum_columns(const Problem *p, unsigned block, size_t rows) {
    size_t chunks = CEIL_DIV(p->N, rows);
    dim3 grid((unsigned)CEIL_DIV(p->C, (size_t)block), (unsigned)chunks);
    LAUNCH(sums_thread_a_column, grid, block, 0, lab.stream)
    (p->scratch, p->dout, p->residual, p->mean, p->rstd, p->N, p->C, rows);
    LAUNCH(layernorm_backward_sum_kernel, CEIL_DIV(2 * p->C, (size_t)128), 128, 0, lab.stream)
    (p->dweight, p->dbias, p->scratch, chunks, p->C, false);
}
static void backward1(const void *problem, unsigned block) {
    const Problem *p = (const Problem *)problem;
    LAUNCH(dinp_thread_a_row, CEIL_DIV(p->N, (size_t)block), block, 0, lab.stream)
    (p->dinp, p->dresidual, p->dout, p->residual, p->weight, p->mean, p->rstd, p->N, p->C);
    sum_columns(p, block, p->N);
}
static void backward2(const void *problem, unsigned block) {
    const Problem *p = (const Problem *)problem;
    LAUNCH(dinp_block_a_row, p->N, block, 0, lab.stream)
    (p->dinp, p->dresidual, p->dout, p->residual, p->weight, p->mean, p->rstd, p->C);
    sum_columns(p, block, CEIL_DIV(p->N, layernorm_backward_blocks(p->N)));
}
static void backward3(const void *problem, unsigned) {
    const Problem *p = (const Problem *)problem;
    layernorm_backward(p->dinp, p->dweight, p->dbias, p->scratch, p->dresidual, p->dout, p->residual, p->weight,
                       p->mean, p->rstd, p->N, p->C, false, lab.stream);
}

static const LabKernel FORWARD[] = {
    {"residual + layernorm", 1, "an addition kernel, then a thread a row", forward1, 0},
    {"residual + layernorm", 2, "fused, a block a row", forward2, 0},
    {"residual + layernorm", 3, "a warp a row, 128-bit loads, no barrier (llmc)", forward3, 32 * LAYERNORM_WARPS},
};
static const LabKernel BACKWARD[] = {
    {"layernorm backward", 1, "a thread a row, then a thread a column", backward1, 0},
    {"layernorm backward", 2, "a block a row, then columns by chunks of rows", backward2, 0},
    {"layernorm backward", 3, "one pass: columns summed in shared memory (llmc)", backward3, 32 * LAYERNORM_WARPS},
};

// ---- the checks --------------------------------------------------------------------------------------------

typedef struct {
    double *out, *dinp, *dweight, *dbias;  // [N, C], [N, C], [C], [C]
} Want;

static Want reference(const float *x, const float *w, const float *b, const float *dout, size_t N, size_t C) {
    Want want = {test_doubles(N * C), test_doubles(N * C), test_doubles(C), test_doubles(C)};
    for (size_t n = 0; n < N; n++) {
        const float *row = x + n * C, *d = dout + n * C;
        double m = 0.0, variance = 0.0, sum = 0.0, dot = 0.0;
        for (size_t i = 0; i < C; i++) m += (double)row[i] / (double)C;
        for (size_t i = 0; i < C; i++) variance += ((double)row[i] - m) * ((double)row[i] - m) / (double)C;
        double r = 1.0 / sqrt(variance + 1e-5);
        for (size_t i = 0; i < C; i++) {
            double normal = ((double)row[i] - m) * r, dnormal = (double)d[i] * (double)w[i];
            want.out[n * C + i] = normal * (double)w[i] + (double)b[i];
            want.dweight[i] += (double)d[i] * normal;
            want.dbias[i] += (double)d[i];
            sum += dnormal / (double)C;
            dot += dnormal * normal / (double)C;
        }
        for (size_t i = 0; i < C; i++) {
            double normal = ((double)row[i] - m) * r, dnormal = (double)d[i] * (double)w[i];
            want.dinp[n * C + i] = (dnormal - sum - normal * dot) * r;
        }
    }
    return want;
}

static bool bounded(double *worst, double error, double bound) {
    if (error > *worst || isnan(error)) *worst = error;
    return error <= bound;
}

template <int LANES>
static void check_shape(size_t N, size_t C, double center, cudaStream_t stream) {
    float *inp1 = test_values(N * C, center, 1.5, 1), *inp2 = test_values(N * C, 0.0, 0.5, 2);
    float *bias2 = test_values(C, 0.0, 0.5, 3), *w = test_values(C, 1.0, 0.5, 4),
          *b = test_values(C, 0.0, 1.0, 5);
    float *dout = test_values(N * C, 0.0, 1.0, 6), *dres = test_values(N * C, 0.0, 1.0, 7);
    floatX *d_inp1 = to_device_floatX(inp1, N * C), *d_inp2 = to_device_floatX(inp2, N * C);
    floatX *d_bias2 = to_device_floatX(bias2, C), *d_w = to_device_floatX(w, C),
           *d_b = to_device_floatX(b, C);
    floatX *d_dout = to_device_floatX(dout, N * C), *d_res = (floatX *)test_device(N * C * sizeof(floatX));
    floatX *d_sum = (floatX *)test_device(N * C * sizeof(floatX)),
           *d_out = (floatX *)test_device(N * C * sizeof(floatX));
    float *d_mean = (float *)test_device(N * sizeof(float)),
          *d_rstd = (float *)test_device(N * sizeof(float));
    double worst = 0.0, outer = FLOATX_ROUNDING + 4e-6 * (1.0 + fabs(center));
    // residual: rounded once, the same bits from both functions, and layernorm of what was stored
    layernorm_forward_launch<LANES>(d_out, d_mean, d_rstd, d_res, d_inp1, d_inp2, d_bias2, d_w, d_b, N, C,
                                    stream);
    residual_forward(d_sum, d_inp1, d_inp2, d_bias2, N, C, stream);
    float *res = to_host_floatX(d_res, N * C, stream), *sum = to_host_floatX(d_sum, N * C, stream);
    float *out = to_host_floatX(d_out, N * C, stream);
    bool ok = same_bits(res, sum, N * C);
    for (size_t n = 0; n < N * C; n++) {
        ok = ok && res[n] == to_float(from_float<floatX>(inp1[n] + (inp2[n] + bias2[n % C])));
    }
    Want want = reference(res, w, b, dout, N, C);
    ok = bounded(&worst, test_error(out, want.out, N * C), outer) && ok;
    layernorm_forward_launch<LANES>(d_out, d_mean, d_rstd, d_sum, NULL, NULL, NULL, d_w, d_b, N, C, stream);
    float *plain = to_host_floatX(d_out, N * C, stream);
    ok = ok && same_bits(out, plain, N * C);  // out = LN(residual as stored): not one bit of difference
    // backward: overwriting, then in place with accumulation and the residual's gradient
    float *d_dw = to_device(w, C), *d_db = to_device(b, C);
    float *scratch = (float *)test_device(layernorm_backward_scratch(N, C) * sizeof(float));
    layernorm_backward_launch<LANES>(d_out, d_dw, d_db, scratch, NULL, d_dout, d_res, d_w, d_mean, d_rstd, N,
                                     C, false, stream);
    float *dinp = to_host_floatX(d_out, N * C, stream), *dw = to_host(d_dw, C, stream),
          *db = to_host(d_db, C, stream);
    ok = bounded(&worst, test_error(dinp, want.dinp, N * C), outer) && ok;
    ok = bounded(&worst, test_error(dw, want.dweight, C), 4e-6 * (1.0 + fabs(center))) && ok;
    ok = bounded(&worst, test_error(db, want.dbias, C), 4e-6) && ok;
    copy_to_floatX(d_sum, dres, N * C);
    layernorm_backward_launch<LANES>(d_sum, d_dw, d_db, scratch, d_sum, d_dout, d_res, d_w, d_mean, d_rstd, N,
                                     C, true, stream);
    float *dinp2 = to_host_floatX(d_sum, N * C, stream), *dw2 = to_host(d_dw, C, stream),
          *db2 = to_host(d_db, C, stream);
    for (size_t i = 0; i < N * C; i++) want.dinp[i] += (double)dres[i];
    ok = bounded(&worst, test_error(dinp2, want.dinp, N * C), outer) && ok;
    for (size_t i = 0; i < C; i++) ok = ok && dw2[i] == 2.0f * dw[i] && db2[i] == 2.0f * db[i];
    check(&lab.checks, ok, "N %zu C %zu mean %g, %2d threads a row (" FLOATX_NAME "): error %.2e", N, C, center, LANES,
          worst);
    floatX *x_buffers[] = {d_inp1, d_inp2, d_bias2, d_w, d_b, d_dout, d_res, d_sum, d_out};
    float *f_buffers[] = {d_mean, d_rstd, d_dw, d_db, scratch};
    void *host[] = {inp1, inp2, bias2, w,     b,   dout, dres,     res,       sum,          out,       plain,
                    dinp, dw,   db,    dinp2, dw2, db2,  want.out, want.dinp, want.dweight, want.dbias};
    for (size_t i = 0; i < sizeof x_buffers / sizeof *x_buffers; i++) CUDA_CHECK(cudaFree(x_buffers[i]));
    for (size_t i = 0; i < sizeof f_buffers / sizeof *f_buffers; i++) CUDA_CHECK(cudaFree(f_buffers[i]));
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) free(host[i]);
}

static Problem make_problem(size_t N, size_t C) {
    float *inp1 = test_values(N * C, 0.0, 1.5, 1), *inp2 = test_values(N * C, 0.0, 0.5, 2);
    float *bias2 = test_values(C, 0.0, 0.5, 3), *w = test_values(C, 1.0, 0.5, 4), *b = test_values(C, 0.0, 1.0, 5);
    float *dout = test_values(N * C, 0.0, 1.0, 6), *dres = test_values(N * C, 0.0, 1.0, 7);
    size_t bytes = N * C * sizeof(floatX);
    Problem p;
    p.N = N, p.C = C;
    p.out = (floatX *)test_device(bytes), p.residual = (floatX *)test_device(bytes);
    p.dinp = (floatX *)test_device(bytes);
    p.mean = (float *)test_device(N * sizeof(float)), p.rstd = (float *)test_device(N * sizeof(float));
    p.inp1 = to_device_floatX(inp1, N * C), p.inp2 = to_device_floatX(inp2, N * C);
    p.bias2 = to_device_floatX(bias2, C), p.weight = to_device_floatX(w, C), p.bias = to_device_floatX(b, C);
    p.dresidual = to_device_floatX(dres, N * C), p.dout = to_device_floatX(dout, N * C);
    p.dweight = (float *)test_device(C * sizeof(float)), p.dbias = (float *)test_device(C * sizeof(float));
    p.scratch = (float *)test_device(layernorm_backward_scratch(N, C) * sizeof(float));
    float *host[] = {inp1, inp2, bias2, w, b, dout, dres};
    for (int i = 0; i < 7; i++) free(host[i]);
    return p;
}

static void free_problem(Problem *p) {
    const void *buffers[] = {p->out, p->residual, p->mean, p->rstd, p->inp1, p->inp2, p->bias2, p->weight, p->bias,
                             p->dinp, p->dweight, p->dbias, p->scratch, p->dresidual, p->dout};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) CUDA_CHECK(cudaFree((void *)buffers[i]));
}

// Every kernel of the lists at ragged sizes.
static void check_kernels(void) {
    static const size_t shapes[][2] = {{1, 8}, {7, 18}, {33, 64}, {130, 24}, {20, 768}, {3, 1600}};
    double errors[2][3] = {{0.0}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        size_t N = shapes[s][0], C = shapes[s][1];
        for (int k = 0; k < 3; k++) {
            Problem p = make_problem(N, C);
            FORWARD[k].run(&p, lab_block(&FORWARD[k]));
            BACKWARD[k].run(&p, lab_block(&BACKWARD[k]));
            float *res = to_host_floatX(p.residual, N * C, lab.stream), *out = to_host_floatX(p.out, N * C, lab.stream);
            float *dinp = to_host_floatX(p.dinp, N * C, lab.stream), *dout = to_host_floatX(p.dout, N * C, lab.stream);
            float *dres = to_host_floatX(p.dresidual, N * C, lab.stream);
            float *dw = to_host(p.dweight, C, lab.stream), *db = to_host(p.dbias, C, lab.stream);
            float *inp1 = to_host_floatX(p.inp1, N * C, lab.stream), *inp2 = to_host_floatX(p.inp2, N * C, lab.stream);
            float *bias2 = to_host_floatX(p.bias2, C, lab.stream), *w = to_host_floatX(p.weight, C, lab.stream);
            float *b = to_host_floatX(p.bias, C, lab.stream);
            Want want = reference(res, w, b, dout, N, C);
            double *sum = test_doubles(N * C);
            for (size_t i = 0; i < N * C; i++) {
                sum[i] = (double)inp1[i] + (double)inp2[i] + (double)bias2[i % C];
                want.dinp[i] += (double)dres[i];
            }
            errors[0][k] = fmax(errors[0][k], fmax(test_error(res, sum, N * C), test_error(out, want.out, N * C)));
            errors[1][k] = fmax(errors[1][k], test_error(dinp, want.dinp, N * C));
            // Sums in float have no rounding to floatX: their error counts in full against the smaller bound.
            double scale = (FLOATX_ROUNDING + 6e-6) / 6e-6;
            errors[1][k] = fmax(errors[1][k], scale * test_error(dw, want.dweight, C));
            errors[1][k] = fmax(errors[1][k], scale * test_error(db, want.dbias, C));
            void *host[] = {res, out, dinp, dout, dres, dw, db, inp1, inp2, bias2, w, b, sum,
                            want.out, want.dinp, want.dweight, want.dbias};
            for (size_t i = 0; i < sizeof host / sizeof *host; i++) free(host[i]);
            free_problem(&p);
        }
    }
    for (int k = 0; k < 3; k++) lab_check(&lab, &FORWARD[k], errors[0][k], FLOATX_ROUNDING + 6e-6);
    for (int k = 0; k < 3; k++) lab_check(&lab, &BACKWARD[k], errors[1][k], FLOATX_ROUNDING + 6e-6);
}

// In units of N C elements. Forward must read inp1 and inp2 and write residual and out: 4; the fused kernels read
// what they have just written of residual twice more (6), the naive one does so three times in another kernel (7).
// Backward must read dout, the input and dresidual and write dinp: 4; a second look at dout and the input, needed
// once the row's sums are known, makes 6, and the separate column sums 8.
static void bench(void) {
    Problem p = make_problem(lab.cpu ? 1024 : 32768, 768);
    double unit = (double)(p.N * p.C * sizeof(floatX));
    forward3(&p, 0);
    for (int k = 0; k < 3; k++) lab_bench(&lab, &FORWARD[k], &p, 4.0 * unit, (k == 0 ? 7.0 : 6.0) * unit, 0.0);
    for (int k = 0; k < 3; k++) lab_bench(&lab, &BACKWARD[k], &p, 4.0 * unit, (k < 2 ? 8.0 : 6.0) * unit, 0.0);
    free_problem(&p);
}

int main(int argc, char **argv) {
    lab_start(&lab, argc, argv, NULL);
    if (lab.bench) {
        bench();
        return lab_finish(&lab);
    }
    cudaStream_t stream = lab.stream;
    check_kernels();
    const struct {
        size_t N, C;
        double center;
    } shapes[] = {{1, 8, 0.0},    {3, 1, 0.0},     {7, 18, 0.0},   {33, 64, 0.0},  {130, 24, 0.0},
                  {65, 768, 0.0}, {40, 768, 50.0}, {9, 1600, 0.0}, {5, 6152, 0.0}, {4500, 16, 0.0}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_shape<32>(shapes[i].N, shapes[i].C, shapes[i].center, stream);
        check_shape<1>(shapes[i].N, shapes[i].C, shapes[i].center, stream);
    }
    // no rows: the sums are 0, or stay as they are
    float one = 1.0f, *dw = to_device(&one, 1), *db = to_device(&one, 1);
    layernorm_backward(NULL, dw, db, dw, NULL, NULL, NULL, NULL, NULL, NULL, 0, 1, true, stream);
    float *kept = to_host(dw, 1, stream);
    layernorm_backward(NULL, dw, db, dw, NULL, NULL, NULL, NULL, NULL, NULL, 0, 1, false, stream);
    float *zero = to_host(db, 1, stream);
    check(&lab.checks, *kept == 1.0f && *zero == 0.0f, "no rows");
    free(kept);
    free(zero);
    CUDA_CHECK(cudaFree(dw));
    CUDA_CHECK(cudaFree(db));
    return lab_finish(&lab);
}
