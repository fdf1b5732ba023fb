// gelu.cu: the activation, forward and backward: kernels from naive to llmc/kernels/gelu.cuh's,
// checked against llmc/reference_layers.h.
#include "dev/cuda/bench.h"

#include "llmc/kernels/gelu.cuh"
#include "llmc/reference_layers.h"

static Lab lab;

// ---- the kernels -----------------------------------------------------------------------

typedef struct {
    floatX *out;              // [n]; also the gradient of inp
    const floatX *inp, *dout; // [n]
    size_t n, F;              // n / F rows of F
    float *dbias, *scratch;   // [F], bias_backward_scratch
} Problem;

// 1: the formula as it is written.
__global__ void gelu_forward_tanh(floatX *out, const floatX *inp, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = to_float(inp[i]);
    out[i] =
        from_float<floatX>(0.5f * x * (1.0f + tanhf(0.797884561f * (x + 0.044715f * x * x * x))));
}

__global__ void gelu_backward_tanh(floatX *dinp, const floatX *dout, const floatX *inp, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = to_float(inp[i]), t = tanhf(0.797884561f * (x + 0.044715f * x * x * x));
    float slope = 0.5f * (1.0f + t) +
                  0.5f * x * (1.0f - t * t) * 0.797884561f * (1.0f + 0.134145f * x * x);
    dinp[i] = from_float<floatX>(to_float(dout[i]) * slope);
}

// 2: llmc's arithmetic, one exponential instead of tanh, still an element a thread.
__global__ void gelu_forward_element(floatX *out, const floatX *inp, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = from_float<floatX>(gelu(to_float(inp[i])));
}

__global__ void gelu_backward_element(floatX *dinp, const floatX *dout, const floatX *inp,
                                      size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) dinp[i] = from_float<floatX>(to_float(dout[i]) * gelu_gradient(to_float(inp[i])));
}

static void forward1(const Problem *p, unsigned block) {
    LAUNCH(gelu_forward_tanh, CEIL_DIV(p->n, (size_t)block), block, lab.stream)
    (p->out, p->inp, p->n);
}
static void forward2(const Problem *p, unsigned block) {
    LAUNCH(gelu_forward_element, CEIL_DIV(p->n, (size_t)block), block, lab.stream)
    (p->out, p->inp, p->n);
}
static void forward3(const Problem *p, unsigned) {
    gelu_forward(p->out, p->inp, p->n, lab.stream);
}
static void backward1(const Problem *p, unsigned block) {
    LAUNCH(gelu_backward_tanh, CEIL_DIV(p->n, (size_t)block), block, lab.stream)
    (p->out, p->dout, p->inp, p->n);
}
static void backward2(const Problem *p, unsigned block) {
    LAUNCH(gelu_backward_element, CEIL_DIV(p->n, (size_t)block), block, lab.stream)
    (p->out, p->dout, p->inp, p->n);
}
static void backward3(const Problem *p, unsigned) {
    gelu_backward(p->out, p->dbias, p->scratch, p->dout, p->inp, p->n / p->F, p->F, false,
                  lab.stream);
}

static const LabKernel FORWARD[] = {
    {"gelu forward", 1, "an element a thread, tanh as written", forward1, 0},
    {"gelu forward", 2, "one exponential instead of tanh", forward2, 0},
    {"gelu forward", 3, "128-bit loads, 16 elements a thread (llmc)", forward3, ELEMENT_THREADS},
};
static const LabKernel BACKWARD[] = {
    {"gelu backward", 1, "an element a thread, tanh as written", backward1, 0},
    {"gelu backward", 2, "one exponential instead of tanh", backward2, 0},
    {"gelu backward", 3, "128-bit loads, and the sums of columns for the bias (llmc)", backward3,
     BIAS_THREADS},
};

// ---- the checks ------------------------------------------------------------------------

// The exponential is exp to `bound` in relative error from e^-80, below which it is 0, to
// overflow.
__global__ void exponential_kernel(float *x, size_t n) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        x[i] = exponential(x[i]);
}

static void check_exponential(void) {
    enum { N = 200000 };
    float *x = (float *)test_memory(N * sizeof(float));
    for (int i = 0; i < N; i++) x[i] = -110.0f + 205.0f * (float)i / N;
    const float special[] = {0.0f,   -0.0f, INFINITY, -INFINITY, NAN,    1e30f,
                             -1e30f, 88.7f, 88.8f,    -79.9f,    -80.1f};
    memcpy(x, special, sizeof special);
    float *device = to_device(x, N);
    LAUNCH(exponential_kernel, 64, 128, lab.stream)(device, N);
    float *got = to_host(device, N, lab.stream);
    double worst = 0.0;
    bool ok = true;
    for (int i = 0; i < N; i++) {
        double want = exp((double)x[i]);
        if (isnan(x[i])) ok = ok && isnan(got[i]);
        else if (want > FLT_MAX) ok = ok && isinf(got[i]);
        else if (x[i] < -80.0f) ok = ok && got[i] == 0.0f;
        else if (x[i] < 88.3f || !isinf(got[i]))
            worst = fmax(worst, fabs((double)got[i] - want) / want);
    }
    check(&lab.checks, ok && got[0] == 1.0f && got[1] == 1.0f,
          "exponential: 0, infinities, NaN, small results");
    check(&lab.checks, worst < 2.5e-7, "exponential: relative error %.2e <= 2.5e-7", worst);
}

// Checks n elements, in place or not.
static bool check_size(size_t n, bool in_place, double *worst) {
    size_t mark = test_count;
    float *x = test_values(n, 0.0, 6.0, 1), *d = test_values(n, 0.0, 2.0, 2);
    floatX *inp = test_floatX(n), *dout = test_floatX(n), *out = test_floatX(n);
    floatX *dinp = in_place ? dout : test_floatX(n);
    double *want = test_doubles(n), *dwant = test_doubles(n);
    reference_gelu_forward(want, widened(x, n), n);
    reference_gelu_backward(dwant, widened(d, n), widened(x, n), n);
    copy_to_floatX(inp, x, n);
    copy_to_floatX(dout, d, n);
    gelu_forward(out, inp, n, lab.stream);
    double error = test_error_floatX(out, want, n, lab.stream);
    if (n > 0) {
        gelu_backward(dinp, test_floats(n), test_floats(n), dout, inp, 1, n, false, lab.stream);
        error = fmax(error, test_error_floatX(dinp, dwant, n, lab.stream));
    }
    *worst = fmax(*worst, error);
    test_release(mark);
    return error < FLOATX_ROUNDING + 4e-7;
}

static void check_extremes(void) {
    const float x[] = {1e30f, -1e30f, 50.0f, -50.0f, 12.0f, -12.0f, 0.0f, NAN, 3e38f, -3e38f};
    const float ones[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const size_t n = sizeof x / sizeof *x;
    floatX *inp = to_device_floatX(x, n), *out = to_device_floatX(ones, n),
           *d = to_device_floatX(ones, n);
    gelu_forward(out, inp, n, lab.stream);
    gelu_backward(d, test_floats(n), test_floats(n), d, inp, 1, n, false, lab.stream);
    float *y = to_host_floatX(out, n, lab.stream), *dx = to_host_floatX(d, n, lab.stream);
    bool ok = isnan(y[7]) && isnan(dx[7]) && y[6] == 0.0f && fabsf(dx[6] - 0.5f) < 1e-6f;
    for (size_t i = 0; i < n; i++) {
        if (i == 6 || i == 7) continue;
        ok = ok && fabsf(y[i] - (x[i] > 0.0f ? to_float(from_float<floatX>(x[i])) : 0.0f)) < 1e-25f;
        ok = ok && fabsf(dx[i] - (x[i] > 0.0f ? 1.0f : 0.0f)) < 1e-25f;
    }
    check(&lab.checks, ok, "fast math: no overflow at large inputs, NaN stays NaN");
}

// Checks that the bias gets the bits of bias_backward, in place or not, overwriting and adding.
static void check_bias(size_t N, size_t F) {
    size_t mark = test_count, n = N * F;
    floatX *inp = to_device_floatX(test_values(n, 0.0, 6.0, 1), n);
    floatX *dout = to_device_floatX(test_values(n, 0.0, 2.0, 2), n);
    floatX *want = test_floatX(n), *dinp = test_floatX(n);
    float *bias = test_floats(F), *got = to_device(test_values(F, 0.0, 1.0, 3), F);
    float *scratch = test_floats(bias_backward_scratch(N, F));
    bool ok = true;
    gelu_backward(want, bias, scratch, dout, inp, N, F, false, lab.stream);
    float *host = to_host_floatX(want, n, lab.stream);
    bias = to_device(test_values(F, 0.0, 1.0, 3), F);
    for (int i = 0; i < 3; i++) {  // adding, overwriting, in place
        bias_backward(bias, want, scratch, N, F, i == 0, lab.stream);
        gelu_backward(i == 2 ? dout : dinp, got, scratch, dout, inp, N, F, i == 0, lab.stream);
        ok = ok && same_bits(host, to_host_floatX(i == 2 ? dout : dinp, n, lab.stream), n) &&
             same_bits(to_host(bias, F, lab.stream), to_host(got, F, lab.stream), F);
    }
    check(&lab.checks, ok, "the bias, N %zu F %zu: the bits of bias_backward", N, F);
    test_release(mark);
}

// Checks every kernel of the lists at ragged sizes.
static void check_kernels(void) {
    static const size_t sizes[] = {1, 7, 255, 1024, 4097, 20011};
    double forward[LAB_COUNT(FORWARD)] = {0.0}, backward[LAB_COUNT(BACKWARD)] = {0.0};
    for (size_t n : sizes) {
        size_t mark = test_count;
        float *x = test_values(n, 0.0, 6.0, 1), *d = test_values(n, 0.0, 2.0, 2);
        double *y = test_doubles(n), *dx = test_doubles(n);
        reference_gelu_forward(y, widened(x, n), n);
        reference_gelu_backward(dx, widened(d, n), widened(x, n), n);
        Problem p = {test_floatX(n), to_device_floatX(x, n), to_device_floatX(d, n), n, n,
                     test_floats(n), test_floats(n)};
        lab_errors(forward, FORWARD, &p,
                   [&] { return test_error_floatX(p.out, y, n, lab.stream); });
        lab_errors(backward, BACKWARD, &p,
                   [&] { return test_error_floatX(p.out, dx, n, lab.stream); });
        test_release(mark);
    }
    for (size_t k = 0; k < LAB_COUNT(FORWARD); k++)
        lab_check(&lab, &FORWARD[k], forward[k], FLOATX_ROUNDING + 4e-7);
    // 1 - tanh^2, as the naive kernel has it, cancels where tanh is near 1.
    for (size_t k = 0; k < LAB_COUNT(BACKWARD); k++)
        lab_check(&lab, &BACKWARD[k], backward[k], FLOATX_ROUNDING + (k == 0 ? 4e-6 : 4e-7));
}

static void checks(void) {
    check_kernels();
    check_exponential();
    check_extremes();
    check_bias(1, 1), check_bias(17, 24), check_bias(300, 129), check_bias(5000, 16),
        check_bias(33, 3072);
    const size_t sizes[] = {1, 3, 4, 7, 8, 255, 1000, 4095, 4096, 4097, 20011};
    bool ok = true;
    double worst = 0.0;
    for (size_t n : sizes)
        for (bool in_place : {false, true}) ok &= check_size(n, in_place, &worst);
    check(&lab.checks, ok,
          "forward and backward, ragged sizes, in place (" FLOATX_NAME "): error %.2e", worst);
}

// Times the activations of an MLP with C = 768.
static void bench(void) {
    size_t n = (size_t)(lab.cpu ? 512 : 16384) * 3072;
    Problem p = {test_floatX(n), lab_fill(&lab, n), lab_fill(&lab, n), n, 3072, test_floats(3072),
                 test_floats(bias_backward_scratch(n / 3072, 3072))};
    double bytes = (double)(n * sizeof(floatX));
    KernelWork forward = lab_stated(&lab, LAB_LAST(FORWARD), &p),
               backward = lab_stated(&lab, LAB_LAST(BACKWARD), &p);
    for (const LabKernel &k : FORWARD) lab_bench(&lab, &k, &p, forward, 2.0 * bytes);
    for (const LabKernel &k : BACKWARD) lab_bench(&lab, &k, &p, backward, 3.0 * bytes);
}

int main(int argc, char **argv) { return lab_main(&lab, argc, argv, checks, bench); }
