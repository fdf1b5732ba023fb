// rmsnorm.cu: RMSNorm with the residual before it, forward and backward: a naive kernel and
// llmc/kernels/layernorm.cuh's, checked against llmc/reference_llama.h. The steps between the two
// are layernorm.cu's. Also LayerNorm1P, Nemotron's norm, and the norms of heads of
// llmc/kernels/head_norm.cuh, Qwen3's.
#include "dev/cuda/bench.h"

#include "llmc/kernels/head_norm.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/reference_llama.h"

static Lab lab;

// ---- the kernels -----------------------------------------------------------------------
// Forward: residual = inp1 + inp2, out = residual / sqrt(mean(residual^2) + epsilon) * weight.
// There is no mean to subtract and no bias. Backward: dinp = dresidual + the gradient, and
// weight's, which is a sum over the rows.

typedef struct {
    floatX *out, *residual;             // [N, C]
    float *mean, *rstd;                 // [N]; the mean is not read
    const floatX *inp1, *inp2, *weight; // [N, C], [N, C], [C]
    floatX *dinp;                       // [N, C]
    float *dweight, *scratch;           // [C], reduce_scratch_floats
    const floatX *dresidual, *dout;     // [N, C]
    size_t N, C;
} Problem;

// 1: an addition kernel, then a thread a row: neighbouring threads read addresses that lie C
// apart.
__global__ void add_element(floatX *out, const floatX *inp1, const floatX *inp2, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = from_float<floatX>(to_float(inp1[i]) + to_float(inp2[i]));
}

__global__ void scale_thread_a_row(floatX *out, float *rstd, const floatX *inp,
                                   const floatX *weight, size_t N, size_t C) {
    size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const floatX *x = inp + n * C;
    float square = 0.0f;
    for (size_t i = 0; i < C; i++) square += to_float(x[i]) * to_float(x[i]);
    float r = rstd[n] = 1.0f / sqrtf(square / (float)C + LAYERNORM_EPSILON);
    for (size_t i = 0; i < C; i++)
        out[n * C + i] = from_float<floatX>(to_float(x[i]) * r * to_float(weight[i]));
}

// 1: a thread a row for dinp, and a thread a column for the sums.
__global__ void dinp_thread_a_row(Problem p) {
    size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= p.N) return;
    const floatX *x = p.residual + n * p.C, *dout = p.dout + n * p.C;
    float r = p.rstd[n], dot = 0.0f;
    for (size_t i = 0; i < p.C; i++)
        dot += to_float(dout[i]) * to_float(p.weight[i]) * to_float(x[i]) * r;
    for (size_t i = 0; i < p.C; i++) {
        float y = (to_float(dout[i]) * to_float(p.weight[i]) -
                   to_float(x[i]) * r * (dot / (float)p.C)) *
                  r;
        p.dinp[n * p.C + i] = from_float<floatX>(to_float(p.dresidual[n * p.C + i]) + y);
    }
}

__global__ void dweight_thread_a_column(Problem p) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.C) return;
    float dw = 0.0f;
    for (size_t n = 0; n < p.N; n++) {
        dw += to_float(p.dout[n * p.C + i]) * to_float(p.residual[n * p.C + i]) * p.rstd[n];
    }
    p.dweight[i] = dw;
}

static void forward1(const Problem *p, unsigned block) {
    LAUNCH(add_element, CEIL_DIV(p->N * p->C, (size_t)block), block, lab.stream)
    (p->residual, p->inp1, p->inp2, p->N * p->C);
    LAUNCH(scale_thread_a_row, CEIL_DIV(p->N, (size_t)block), block, lab.stream)
    (p->out, p->rstd, p->residual, p->weight, p->N, p->C);
}
static void forward2(const Problem *p, unsigned) {
    layernorm_residual_forward<NORM_RMS>(p->residual, {p->out, p->mean, p->rstd}, p->inp1,
                                         p->inp2, NULL, p->weight, NULL, p->N, p->C, lab.stream,
                                         Dropout());
}

static void backward1(const Problem *p, unsigned block) {
    LAUNCH(dinp_thread_a_row, CEIL_DIV(p->N, (size_t)block), block, lab.stream)(*p);
    LAUNCH(dweight_thread_a_column, CEIL_DIV(p->C, (size_t)block), block, lab.stream)(*p);
}
static void backward2(const Problem *p, unsigned) {
    layernorm_backward<NORM_RMS>(p->dinp, p->dweight, NULL, p->scratch, p->dresidual, p->dout,
                                 p->residual, p->weight, {NULL, p->mean, p->rstd}, p->N, p->C,
                                 false, lab.stream);
}

static const LabKernel FORWARD[] = {
    {"residual + rmsnorm", 1, "an addition kernel, then a thread a row", forward1, 0},
    {"residual + rmsnorm", 2, "a warp a row, 128-bit loads, no barrier (llmc)", forward2,
     ROW_THREADS},
};
static const LabKernel BACKWARD[] = {
    {"rmsnorm backward", 1, "a thread a row, then a thread a column", backward1, 0},
    {"rmsnorm backward", 2, "a block a row, columns in registers (llmc)", backward2,
     LAYERNORM_THREADS},
};

// ---- the checks ------------------------------------------------------------------------

// Returns a bound for the rounding of a float sum of n squares, one after another, with a margin.
// They have one sign, so the sum grows and each addition rounds a larger number.
static double sum_bound(size_t n) { return 6e-8 * (8.0 + sqrt((double)n)); }

static Problem make_problem(size_t N, size_t C) {
    Problem p;
    p.N = N, p.C = C;
    p.out = test_floatX(N * C), p.residual = test_floatX(N * C), p.dinp = test_floatX(N * C);
    p.mean = test_floats(N), p.rstd = test_floats(N), p.dweight = test_floats(C);
    p.inp1 = to_device_floatX(test_values(N * C, 0.5, 1.5, 1), N * C);
    p.inp2 = to_device_floatX(test_values(N * C, 0.0, 0.5, 2), N * C);
    p.weight = to_device_floatX(test_values(C, 1.0, 0.5, 4), C);
    p.dout = to_device_floatX(test_values(N * C, 0.0, 1.0, 6), N * C);
    p.dresidual = to_device_floatX(test_values(N * C, 0.0, 1.0, 7), N * C);
    p.scratch = test_floats(reduce_scratch_floats(N, C, C));
    return p;
}

typedef struct {
    double *out, *dinp, *dweight;  // [N, C], [N, C], [C]
} Want;

static Want reference(const float *x, const float *w, const float *dout, const float *dresidual,
                      size_t N, size_t C) {
    Want want = {test_doubles(N * C), widened(dresidual, N * C), test_doubles(C)};
    double *inp = widened(x, N * C), *weight = widened(w, C);
    Llama m = Llama();
    m.epsilon = (double)LAYERNORM_EPSILON;
    reference_norm_forward(&m, want.out, inp, weight, NULL, N, C);
    reference_norm_backward(&m, want.dinp, want.dweight, NULL, widened(dout, N * C), inp, weight,
                            N, C);
    return want;
}

// The largest error of each kernel as a part of its bound, which depends on the shape.
static double forward_errors[LAB_COUNT(FORWARD)], backward_errors[LAB_COUNT(BACKWARD)];

static void check_kernels_at(size_t N, size_t C) {
    size_t mark = test_count;
    cudaStream_t stream = lab.stream;
    Problem p = make_problem(N, C);
    float *inp1 = to_host_floatX(p.inp1, N * C, stream),
          *inp2 = to_host_floatX(p.inp2, N * C, stream);
    float *w = to_host_floatX(p.weight, C, stream), *dout = to_host_floatX(p.dout, N * C, stream);
    float *dresidual = to_host_floatX(p.dresidual, N * C, stream);
    double *sum = test_doubles(N * C), bound = FLOATX_ROUNDING + sum_bound(C);
    for (size_t i = 0; i < N * C; i++) sum[i] = (double)inp1[i] + (double)inp2[i];
    Want want;
    lab_errors(forward_errors, FORWARD, &p, [&] {
        want = reference(to_host_floatX(p.residual, N * C, stream), w, dout, dresidual, N, C);
        return fmax(test_error_floatX(p.residual, sum, N * C, stream),
                    test_error_floatX(p.out, want.out, N * C, stream)) / bound;
    });
    lab_errors(backward_errors, BACKWARD, &p, [&] {
        double dinp = test_error_floatX(p.dinp, want.dinp, N * C, stream) / bound;
        double dw = test_error_float(p.dweight, want.dweight, C, stream) /
                    (sum_bound(C) + sum_bound(N));
        return fmax(dinp, dw);
    });
    test_release(mark);
}

// Checks that LayerNorm1P equals the layernorm whose weights are larger by one, bit by bit,
// forward and backward.
static void check_one_more(size_t N, size_t C) {
    size_t mark = test_count;
    Problem p = make_problem(N, C);
    cudaStream_t stream = lab.stream;
    float *less = (float *)test_memory(C * sizeof(float)),
          *more = (float *)test_memory(C * sizeof(float));
    for (size_t i = 0; i < C; i++)
        less[i] = (float)((int)(i % 13) - 6) / 16.0f, more[i] = less[i] + 1.0f;  // exact
    const floatX *weight = to_device_floatX(less, C), *one_more = to_device_floatX(more, C),
                 *bias = p.inp2;
    float *dbias = test_floats(C);
    Layernorm ln = {p.out, p.mean, p.rstd};
    layernorm_forward<NORM_1P>(ln, p.inp1, weight, bias, N, C, stream);
    layernorm_backward<NORM_1P>(p.dinp, p.dweight, dbias, p.scratch, NULL, p.dout, p.inp1, weight,
                                ln, N, C, false, stream);
    float *out = to_host_floatX(p.out, N * C, stream),
          *dinp = to_host_floatX(p.dinp, N * C, stream);
    float *dw = to_host(p.dweight, C, stream);
    layernorm_forward(ln, p.inp1, one_more, bias, N, C, stream);
    layernorm_backward(p.dinp, p.dweight, dbias, p.scratch, NULL, p.dout, p.inp1, one_more, ln, N,
                       C, false, stream);
    check(&lab.checks,
          same_bits(out, to_host_floatX(p.out, N * C, stream), N * C) &&
              same_bits(dinp, to_host_floatX(p.dinp, N * C, stream), N * C) &&
              same_bits(dw, to_host(p.dweight, C, stream), C),
          "LayerNorm1P, N %zu C %zu: the bits of a layernorm whose weights are larger by one", N,
          C);
    test_release(mark);
}

// Checks the norms of the heads of q and k in rows of q|k|v. Forward must leave v as it is. A
// second backward must add to the results of the first.
static void check_head_norms(size_t N, size_t NH, size_t KV, size_t HS) {
    size_t mark = test_count, S = (NH + 2 * KV) * HS, A = NH * HS, n = N * S;
    cudaStream_t stream = lab.stream;
    Llama m = Llama();
    m.HS = HS, m.epsilon = (double)LAYERNORM_EPSILON;
    floatX *x = to_device_floatX(test_values(n, 0.5, 1.5, 1), n);
    floatX *dx = to_device_floatX(test_values(n, 0.0, 1.0, 2), n);
    const floatX *w = to_device_floatX(test_values(HS, 1.0, 0.5, 3), HS);
    const floatX *wk = to_device_floatX(test_values(HS, 1.0, 0.5, 4), HS);
    float *dw = test_floats(HS), *dwk = test_floats(HS);
    float *scratch = test_floats(reduce_scratch_floats(N, HS, HS));
    double *inp = widened(to_host_floatX(x, n, stream), n), *out = test_doubles(n);
    double *dout = widened(to_host_floatX(dx, n, stream), n), *dinp = test_doubles(n);
    double *weight = widened(to_host_floatX(w, HS, stream), HS), *dweight = test_doubles(HS);
    double *weight_k = widened(to_host_floatX(wk, HS, stream), HS), *dweight_k = test_doubles(HS);
    memcpy(out, inp, n * sizeof *out);
    for (size_t i = 0; i < n; i++)
        if (i % S >= A + KV * HS) dinp[i] = dout[i];
    reference_head_norm_forward(&m, out, inp, weight, N, NH, S);
    reference_head_norm_forward(&m, out + A, inp + A, weight_k, N, KV, S);
    reference_head_norm_backward(&m, dinp, dweight, dout, inp, weight, N, NH, S);
    reference_head_norm_backward(&m, dinp + A, dweight_k, dout + A, inp + A, weight_k, N, KV, S);

    HeadNorm a = {x, test_floatX(N * (NH + KV) * HS), w, wk, N, NH, KV, HS, LAYERNORM_EPSILON};
    head_norm_forward(a, stream);
    double bound = FLOATX_ROUNDING + sum_bound(HS);
    double forward = test_error_floatX(x, out, n, stream) / bound;
    floatX *again = to_device_floatX(to_host_floatX(dx, n, stream), n);
    a.x = dx;
    head_norm_backward(a, dw, dwk, scratch, false, stream);
    double backward = test_error_floatX(dx, dinp, n, stream) / bound;
    a.x = again;
    head_norm_backward(a, dw, dwk, scratch, true, stream);
    for (size_t i = 0; i < HS; i++) dweight[i] *= 2, dweight_k[i] *= 2;
    double sums = sum_bound(HS) + sum_bound(N * NH);
    double weights = fmax(test_error_float(dw, dweight, HS, stream),
                          test_error_float(dwk, dweight_k, HS, stream)) / sums;
    check(&lab.checks, forward < 1 && backward < 1 && weights < 1,
          "norms of heads, N %zu NH %zu KV %zu HS %zu: %.2f, %.2f and %.2f of the bounds", N, NH,
          KV, HS, forward, backward, weights);
    test_release(mark);
}

static void checks(void) {
    static const size_t ragged[][2] = {{5, 3},    {1, 8},    {7, 18},   {33, 64},  {130, 24},
                                       {20, 768}, {3, 1600}, {5, 6152}, {3, 12296}};
    for (const size_t(&s)[2] : ragged) check_kernels_at(s[0], s[1]);
    for (size_t k = 0; k < LAB_COUNT(FORWARD); k++)
        lab_check(&lab, &FORWARD[k], forward_errors[k], 1.0);
    for (size_t k = 0; k < LAB_COUNT(BACKWARD); k++)
        lab_check(&lab, &BACKWARD[k], backward_errors[k], 1.0);
    check_one_more(33, 18), check_one_more(20, 768), check_one_more(3, 6152);
    check_head_norms(5, 3, 1, 6), check_head_norms(70, 4, 2, 64), check_head_norms(33, 16, 8, 128);
    check_head_norms(3, 2, 2, 512);
}

// Times all kernels. Memory traffic is in units of N C elements, counted as in layernorm.cu.
static void bench(void) {
    Problem p = make_problem(lab.cpu ? 512 : 16384, 2048);
    double unit = (double)(p.N * p.C * sizeof(floatX));
    KernelWork forward = lab_stated(&lab, LAB_LAST(FORWARD), &p);  // backward reads what it leaves
    KernelWork backward = lab_stated(&lab, LAB_LAST(BACKWARD), &p);
    for (const LabKernel &k : FORWARD) lab_bench(&lab, &k, &p, forward, 6.0 * unit);
    double last = lab.cpu ? 6.0 : 4.0;
    for (const LabKernel &k : BACKWARD)
        lab_bench(&lab, &k, &p, backward, (k.number == 1 ? 8.0 : last) * unit);
}

int main(int argc, char **argv) { return lab_main(&lab, argc, argv, checks, bench); }
