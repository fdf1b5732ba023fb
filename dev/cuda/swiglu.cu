// swiglu.cu: the MLP activations of Llama (silu(gate) * up) and Nemotron (relu(x)^2), forward and
// backward. Kernels from naive to llmc/kernels/swiglu.cuh's, checked against
// llmc/reference_llama.h.
#include "dev/cuda/bench.h"

#include "llmc/kernels/swiglu.cuh"
#include "llmc/reference_llama.h"

static Lab lab;

// ---- the kernels -----------------------------------------------------------------------

typedef struct {
    floatX *out;         // [N, F], backward [N, 2F]; of relu^2 [N, F] both times
    floatX *silu;        // [N, F], where version 1 keeps silu(gate)
    const floatX *inp;   // [N, 2F]: a row's gates, then its up channels; of relu^2 [N, F]
    const floatX *dout;  // [N, F]
    size_t N, F;
} Problem;

// 1: two kernels as a framework without fusion has them: silu(gate), which goes to memory, then
// the product.
__global__ void silu_element(floatX *out, const floatX *inp, size_t n, size_t F) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float g = to_float(inp[i / F * 2 * F + i % F]);
    out[i] = from_float<floatX>(g / (1.0f + expf(-g)));
}

__global__ void multiply_element(floatX *out, const floatX *silu, const floatX *inp, size_t n,
                                 size_t F) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = from_float<floatX>(to_float(silu[i]) * to_float(inp[i / F * 2 * F + F + i % F]));
}

// 1, backward: a kernel for each half of the gradient; both read all inputs.
__global__ void gate_gradient_element(floatX *dinp, const floatX *dout, const floatX *inp,
                                      size_t n, size_t F) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, at = i / F * 2 * F + i % F;
    if (i >= n) return;
    float g = to_float(inp[at]), up = to_float(inp[at + F]), s = 1.0f / (1.0f + expf(-g));
    dinp[at] = from_float<floatX>(to_float(dout[i]) * up * (s + g * s * (1.0f - s)));
}

__global__ void up_gradient_element(floatX *dinp, const floatX *dout, const floatX *inp, size_t n,
                                    size_t F) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, at = i / F * 2 * F + i % F;
    if (i >= n) return;
    float g = to_float(inp[at]);
    dinp[at + F] = from_float<floatX>(to_float(dout[i]) * g / (1.0f + expf(-g)));
}

// relu(x)^2, an element a thread.
__global__ void relu2_forward_element(floatX *out, const floatX *inp, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = to_float(inp[i]);
    out[i] = from_float<floatX>(x > 0.0f ? x * x : 0.0f);
}

__global__ void relu2_backward_element(floatX *dinp, const floatX *dout, const floatX *inp,
                                       size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = to_float(inp[i]);
    dinp[i] = from_float<floatX>(x > 0.0f ? 2.0f * x * to_float(dout[i]) : 0.0f);
}

#define FOR_ELEMENTS(kernel) LAUNCH(kernel, CEIL_DIV(p->N * p->F, (size_t)block), block, lab.stream)

static void forward1(const Problem *p, unsigned block) {
    FOR_ELEMENTS(silu_element)(p->silu, p->inp, p->N * p->F, p->F);
    FOR_ELEMENTS(multiply_element)(p->out, p->silu, p->inp, p->N * p->F, p->F);
}
static void forward2(const Problem *p, unsigned) {
    swiglu_forward(p->out, p->inp, p->N, p->F, lab.stream);
}
static void backward1(const Problem *p, unsigned block) {
    FOR_ELEMENTS(gate_gradient_element)(p->out, p->dout, p->inp, p->N * p->F, p->F);
    FOR_ELEMENTS(up_gradient_element)(p->out, p->dout, p->inp, p->N * p->F, p->F);
}
static void backward2(const Problem *p, unsigned) {
    swiglu_backward(p->out, p->dout, p->inp, p->N, p->F, lab.stream);
}
static void relu_forward1(const Problem *p, unsigned block) {
    FOR_ELEMENTS(relu2_forward_element)(p->out, p->inp, p->N * p->F);
}
static void relu_forward2(const Problem *p, unsigned) {
    relu2_forward(p->out, p->inp, p->N * p->F, lab.stream);
}
static void relu_backward1(const Problem *p, unsigned block) {
    FOR_ELEMENTS(relu2_backward_element)(p->out, p->dout, p->inp, p->N * p->F);
}
static void relu_backward2(const Problem *p, unsigned) {
    relu2_backward(p->out, p->dout, p->inp, p->N * p->F, lab.stream);
}

static const LabKernel FORWARD[] = {
    {"swiglu forward", 1, "two kernels, silu(gate) through memory", forward1, 0},
    {"swiglu forward", 2, "one kernel, 128-bit loads, 8 rows a thread (llmc)", forward2,
     SWIGLU_THREADS},
};
static const LabKernel BACKWARD[] = {
    {"swiglu backward", 1, "two kernels, one for each half", backward1, 0},
    {"swiglu backward", 2, "one kernel, 128-bit loads, 8 rows a thread (llmc)", backward2,
     SWIGLU_THREADS},
};
static const LabKernel RELU_FORWARD[] = {
    {"relu2 forward", 1, "an element a thread", relu_forward1, 0},
    {"relu2 forward", 2, "128-bit loads (llmc)", relu_forward2, ELEMENT_THREADS},
};
static const LabKernel RELU_BACKWARD[] = {
    {"relu2 backward", 1, "an element a thread", relu_backward1, 0},
    {"relu2 backward", 2, "128-bit loads (llmc)", relu_backward2, ELEMENT_THREADS},
};

// ---- the checks ------------------------------------------------------------------------

static double forward_errors[LAB_COUNT(FORWARD)], backward_errors[LAB_COUNT(BACKWARD)];
static double relu_forward_errors[LAB_COUNT(RELU_FORWARD)],
    relu_backward_errors[LAB_COUNT(RELU_BACKWARD)];

static void check_kernels_at(size_t N, size_t F) {
    size_t mark = test_count, n = N * F;
    float *x = test_values(2 * n, 0.0, 6.0, 1), *d = test_values(n, 0.0, 2.0, 2);
    double *y = test_doubles(n), *dx = test_doubles(2 * n), *relu_dx = test_doubles(n);
    double *inp = widened(x, 2 * n), *dout = widened(d, n);
    Llama m = Llama();
    Problem p = {test_floatX(2 * n),
                 test_floatX(n),
                 to_device_floatX(x, 2 * n),
                 to_device_floatX(d, n),
                 N,
                 F};
    m.F = F;
    reference_activation(&m, y, inp, NULL, NULL, N);
    reference_activation(&m, NULL, inp, dx, dout, N);
    auto forward = [&] { return test_error_floatX(p.out, y, n, lab.stream); };
    lab_errors(forward_errors, FORWARD, &p, forward);
    lab_errors(backward_errors, BACKWARD, &p,
               [&] { return test_error_floatX(p.out, dx, 2 * n, lab.stream); });
    m.type = NEMOTRON;
    reference_activation(&m, y, inp, NULL, NULL, N);
    reference_activation(&m, NULL, inp, relu_dx, dout, N);
    lab_errors(relu_forward_errors, RELU_FORWARD, &p, forward);
    lab_errors(relu_backward_errors, RELU_BACKWARD, &p,
               [&] { return test_error_floatX(p.out, relu_dx, n, lab.stream); });
    test_release(mark);
}

// Checks large gates: silu is the gate or nothing, nothing overflows, and NaN stays NaN.
static void check_extremes(void) {
    const float x[] = {1e30f, -1e30f, 50.0f, -50.0f, NAN, 0.0f,
                       1,     1,      1,     1,      1,   1};  // six gates, six ups
    const float ones[] = {1, 1, 1, 1, 1, 1};
    floatX *inp = to_device_floatX(x, 12), *dout = to_device_floatX(ones, 6),
           *out = test_floatX(12);
    swiglu_forward(out, inp, 1, 6, lab.stream);
    float *y = to_host_floatX(out, 6, lab.stream);
    swiglu_backward(out, dout, inp, 1, 6, lab.stream);
    float *dx = to_host_floatX(out, 12, lab.stream);
    bool ok = isnan(y[4]) && isnan(dx[4]) && y[5] == 0.0f && dx[5] == 0.5f;
    for (int i = 0; i < 4; i++) {
        float gate = i % 2 ? 0.0f : to_float(from_float<floatX>(x[i]));
        ok = ok && fabsf(y[i] - gate) <= 1e-15f && fabsf(dx[i] - (float)(i % 2 == 0)) <= 1e-15f;
    }
    relu2_forward(out, inp, 5, lab.stream);
    y = to_host_floatX(out, 5, lab.stream);
    ok = ok && y[1] == 0.0f && y[3] == 0.0f && isnan(y[4]);
    check(&lab.checks, ok, "large gates do not overflow, NaN stays NaN");
}

static void checks(void) {
    static const size_t shapes[][2] = {{1, 1}, {1, 7}, {3, 24}, {17, 129}, {9, 1024}, {40, 320},
                                       {8 * 65535 + 9, 2}};  // past a grid's y
    const double bound = FLOATX_ROUNDING + 1e-6;
    for (const size_t(&s)[2] : shapes) check_kernels_at(s[0], s[1]);
    // Version 1 rounds silu(gate) to floatX on its way through memory.
    for (size_t k = 0; k < LAB_COUNT(FORWARD); k++)
        lab_check(&lab, &FORWARD[k], forward_errors[k], bound + (k == 0 ? FLOATX_ROUNDING : 0.0));
    for (size_t k = 0; k < LAB_COUNT(BACKWARD); k++)
        lab_check(&lab, &BACKWARD[k], backward_errors[k], bound);
    for (size_t k = 0; k < LAB_COUNT(RELU_FORWARD); k++)
        lab_check(&lab, &RELU_FORWARD[k], relu_forward_errors[k], bound);
    for (size_t k = 0; k < LAB_COUNT(RELU_BACKWARD); k++)
        lab_check(&lab, &RELU_BACKWARD[k], relu_backward_errors[k], bound);
    check_extremes();
}

// Times the MLP of Llama 3.2 1B: 8192 channels. Traffic is in units of N F elements.
static void bench(void) {
    size_t N = lab.cpu ? 128 : 8192, F = 8192, n = N * F;
    Problem p = {
        test_floatX(2 * n), test_floatX(n), lab_fill(&lab, 2 * n), lab_fill(&lab, n), N, F};
    double unit = (double)(n * sizeof(floatX));
    KernelWork forward = lab_stated(&lab, LAB_LAST(FORWARD), &p),
               backward = lab_stated(&lab, LAB_LAST(BACKWARD), &p);
    for (const LabKernel &k : FORWARD)
        lab_bench(&lab, &k, &p, forward, (k.number == 1 ? 5.0 : 3.0) * unit);
    for (const LabKernel &k : BACKWARD)
        lab_bench(&lab, &k, &p, backward, (k.number == 1 ? 7.0 : 5.0) * unit);
    forward = lab_stated(&lab, LAB_LAST(RELU_FORWARD), &p),
    backward = lab_stated(&lab, LAB_LAST(RELU_BACKWARD), &p);
    for (const LabKernel &k : RELU_FORWARD) lab_bench(&lab, &k, &p, forward, 2.0 * unit);
    for (const LabKernel &k : RELU_BACKWARD) lab_bench(&lab, &k, &p, backward, 3.0 * unit);
}

int main(int argc, char **argv) { return lab_main(&lab, argc, argv, checks, bench); }
