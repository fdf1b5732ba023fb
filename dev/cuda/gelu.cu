// gelu.cu: the activation, forward and backward: kernels from naive to llmc/kernels/gelu.cuh's, checked against plain
// loops in double.
#include "llmc/kernels/gelu.cuh"

#include "dev/cuda/bench.h"

static Lab lab;

// ---- the kernels -------------------------------------------------------------------------------------------

typedef struct {
    floatX *out;              // [n]; also the gradient of inp
    const floatX *inp, *dout; // [n]
    size_t n;
} Problem;

// 1: the formula as it is written.
__global__ void gelu_forward_tanh(floatX *out, const floatX *inp, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = to_float(inp[i]);
    out[i] = from_float<floatX>(0.5f * x * (1.0f + tanhf(0.797884561f * (x + 0.044715f * x * x * x))));
}

__global__ void gelu_backward_tanh(floatX *dinp, const floatX *dout, const floatX *inp, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = to_float(inp[i]), t = tanhf(0.797884561f * (x + 0.044715f * x * x * x));
    float slope = 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.797884561f * (1.0f + 0.134145f * x * x);
    dinp[i] = from_float<floatX>(to_float(dout[i]) * slope);
}

// 2: llmc's arithmetic, one exponential instead of tanh, still an element a thread.
__global__ void gelu_forward_element(floatX *out, const floatX *inp, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = from_float<floatX>(gelu(to_float(inp[i])));
}

__global__ void gelu_backward_element(floatX *dinp, const floatX *dout, const floatX *inp, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) dinp[i] = from_float<floatX>(to_float(dout[i]) * gelu_gradient(to_float(inp[i])));
}

static void forward1(const void *problem, unsigned block) {
    const Problem *p = (const Problem *)problem;
    LAUNCH(gelu_forward_tanh, CEIL_DIV(p->n, (size_t)block), block, 0, lab.stream)(p->out, p->inp, p->n);
}
static void forward2(const void *problem, unsigned block) {
    const Problem *p = (const Problem *)problem;
    LAUNCH(gelu_forward_element, CEIL_DIV(p->n, (size_t)block), block, 0, lab.stream)(p->out, p->inp, p->n);
}
static void forward3(const void *problem, unsigned) {
    const Problem *p = (const Problem *)problem;
    gelu_forward(p->out, p->inp, p->n, lab.stream);
}
static void backward1(const void *problem, unsigned block) {
    const Problem *p = (const Problem *)problem;
    LAUNCH(gelu_backward_tanh, CEIL_DIV(p->n, (size_t)block), block, 0, lab.stream)(p->out, p->dout, p->inp, p->n);
}
static void backward2(const void *problem, unsigned block) {
    const Problem *p = (const Problem *)problem;
    LAUNCH(gelu_backward_element, CEIL_DIV(p->n, (size_t)block), block, 0, lab.stream)(p->out, p->dout, p->inp, p->n);
}
static void backward3(const void *problem, unsigned) {
    const Problem *p = (const Problem *)problem;
    gelu_backward(p->out, p->dout, p->inp, p->n, lab.stream);
}

static const LabKernel FORWARD[] = {
    {"gelu forward", 1, "an element a thread, tanh as written", forward1, 0},
    {"gelu forward", 2, "one exponential instead of tanh", forward2, 0},
    {"gelu forward", 3, "128-bit loads, 16 elements a thread (llmc)", forward3, ELEMENT_THREADS},
};
static const LabKernel BACKWARD[] = {
    {"gelu backward", 1, "an element a thread, tanh as written", backward1, 0},
    {"gelu backward", 2, "one exponential instead of tanh", backward2, 0},
    {"gelu backward", 3, "128-bit loads, 16 elements a thread (llmc)", backward3, ELEMENT_THREADS},
};

// ---- the checks --------------------------------------------------------------------------------------------

static double reference_gelu(double x) {
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

static double reference_gradient(double x) {
    double tanh_u = tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x));
    double du = sqrt(2.0 / M_PI) * (1.0 + 3.0 * 0.044715 * x * x);
    return 0.5 * (1.0 + tanh_u) + 0.5 * x * (1.0 - tanh_u * tanh_u) * du;
}

// The exponential is exp to `bound` in relative error from underflow to overflow.
__global__ void exponential_kernel(float *x, size_t n) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        x[i] = exponential(x[i]);
}

static void check_exponential(cudaStream_t stream) {
    enum { N = 200000 };
    float *x = (float *)test_memory(N * sizeof(float));
    for (int i = 0; i < N; i++) x[i] = -110.0f + 205.0f * (float)i / N;
    const float special[] = {0.0f,   -0.0f, INFINITY, -INFINITY, NAN,    1e30f,
                             -1e30f, 88.7f, 88.8f,    -87.4f,    -103.9f};
    memcpy(x, special, sizeof special);
    float *device = to_device(x, N);
    LAUNCH(exponential_kernel, 64, 128, 0, stream)(device, N);
    float *got = to_host(device, N, stream);
    double worst = 0.0;
    bool ok = true;
    for (int i = 0; i < N; i++) {
        double want = exp((double)x[i]);
        if (isnan(x[i])) ok = ok && isnan(got[i]);
        else if (want > FLT_MAX) ok = ok && isinf(got[i]);
        else if (want < FLT_MIN) ok = ok && fabs((double)got[i] - want) <= 2e-38 * 1e-6 + 1.5e-45;
        else worst = fmax(worst, fabs((double)got[i] - want) / want);
    }
    check(&lab.checks, ok && got[0] == 1.0f && got[1] == 1.0f, "exponential: 0, infinities, NaN, subnormal results");
    check(&lab.checks, worst < 2.5e-7, "exponential: relative error %.2e <= 2.5e-7", worst);
    free(x);
    free(got);
    CUDA_CHECK(cudaFree(device));
}

// n elements from `shift` elements after an aligned address, in place or not.
static bool check_size(size_t n, size_t shift, bool in_place, double *worst, cudaStream_t stream) {
    float *x = test_values(n, 0.0, 6.0, 1), *d = test_values(n, 0.0, 2.0, 2);
    floatX *buffer[3];
    for (int i = 0; i < 3; i++) buffer[i] = (floatX *)test_device((n + shift) * sizeof(floatX));
    floatX *inp = buffer[0] + shift, *out = buffer[1] + shift, *dout = buffer[2] + shift;
    copy_to_floatX(inp, x, n);
    copy_to_floatX(dout, d, n);
    gelu_forward(out, inp, n, stream);
    float *y = to_host_floatX(out, n, stream);
    gelu_backward(in_place ? dout : out, dout, inp, n, stream);
    float *dx = to_host_floatX(in_place ? dout : out, n, stream);
    double *want = test_doubles(n), error = 0.0;
    for (size_t i = 0; i < n; i++) want[i] = reference_gelu((double)x[i]);
    error = test_error(y, want, n);
    for (size_t i = 0; i < n; i++) want[i] = (double)d[i] * reference_gradient((double)x[i]);
    error = fmax(error, test_error(dx, want, n));
    if (error > *worst) *worst = error;
    for (int i = 0; i < 3; i++) CUDA_CHECK(cudaFree(buffer[i]));
    free(x);
    free(d);
    free(y);
    free(dx);
    free(want);
    return error < FLOATX_ROUNDING + 4e-7;
}

static void check_extremes(cudaStream_t stream) {
    const float x[] = {1e30f, -1e30f, 50.0f, -50.0f, 12.0f, -12.0f, 0.0f, NAN, 3e38f, -3e38f};
    const float ones[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const size_t n = sizeof x / sizeof *x;
    floatX *inp = to_device_floatX(x, n), *out = to_device_floatX(ones, n), *d = to_device_floatX(ones, n);
    gelu_forward(out, inp, n, stream);
    gelu_backward(d, d, inp, n, stream);
    float *y = to_host_floatX(out, n, stream), *dx = to_host_floatX(d, n, stream);
    bool ok = isnan(y[7]) && isnan(dx[7]) && y[6] == 0.0f && fabsf(dx[6] - 0.5f) < 1e-6f;
    for (size_t i = 0; i < n; i++) {
        if (i == 6 || i == 7) continue;
        ok = ok && fabsf(y[i] - (x[i] > 0.0f ? to_float(from_float<floatX>(x[i])) : 0.0f)) < 1e-25f;
        ok = ok && fabsf(dx[i] - (x[i] > 0.0f ? 1.0f : 0.0f)) < 1e-25f;
    }
    check(&lab.checks, ok, "fast math: no overflow at large inputs, NaN stays NaN");
    CUDA_CHECK(cudaFree(inp));
    CUDA_CHECK(cudaFree(out));
    CUDA_CHECK(cudaFree(d));
    free(y);
    free(dx);
}

// Every kernel of the lists at ragged sizes.
static void check_kernels(void) {
    static const size_t sizes[] = {1, 7, 255, 1024, 4097, 20011};
    double errors[2][3] = {{0.0}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t n = sizes[i];
        float *x = test_values(n, 0.0, 6.0, 1), *d = test_values(n, 0.0, 2.0, 2);
        floatX *inp = to_device_floatX(x, n), *dout = to_device_floatX(d, n);
        double *y = test_doubles(n), *dx = test_doubles(n);
        for (size_t j = 0; j < n; j++) {
            y[j] = reference_gelu((double)x[j]);
            dx[j] = (double)d[j] * reference_gradient((double)x[j]);
        }
        for (int k = 0; k < 6; k++) {
            Problem p = {(floatX *)test_device(n * sizeof(floatX)), inp, dout, n};
            const LabKernel *kernel = k < 3 ? &FORWARD[k] : &BACKWARD[k - 3];
            kernel->run(&p, lab_block(kernel));
            float *got = to_host_floatX(p.out, n, lab.stream);
            errors[k / 3][k % 3] = fmax(errors[k / 3][k % 3], test_error(got, k < 3 ? y : dx, n));
            free(got);
            CUDA_CHECK(cudaFree(p.out));
        }
        CUDA_CHECK(cudaFree(inp));
        CUDA_CHECK(cudaFree(dout));
        free(x);
        free(d);
        free(y);
        free(dx);
    }
    for (int k = 0; k < 3; k++) lab_check(&lab, &FORWARD[k], errors[0][k], FLOATX_ROUNDING + 4e-7);
    // 1 - tanh^2, as the naive kernel has it, cancels where tanh is near 1.
    for (int k = 0; k < 3; k++) lab_check(&lab, &BACKWARD[k], errors[1][k], FLOATX_ROUNDING + (k == 0 ? 4e-6 : 4e-7));
}

// The activations of an MLP with C = 768.
static void bench(void) {
    size_t n = (size_t)(lab.cpu ? 512 : 16384) * 3072;
    Problem p = {(floatX *)test_device(n * sizeof(floatX)), (floatX *)test_device(n * sizeof(floatX)),
                 (floatX *)test_device(n * sizeof(floatX)), n};
    CUDA_CHECK(cudaMemset((void *)p.inp, 0, n * sizeof(floatX)));
    CUDA_CHECK(cudaMemset((void *)p.dout, 0, n * sizeof(floatX)));
    double bytes = (double)(n * sizeof(floatX));
    for (int k = 0; k < 3; k++) lab_bench(&lab, &FORWARD[k], &p, 2.0 * bytes, 2.0 * bytes, 0.0);
    for (int k = 0; k < 3; k++) lab_bench(&lab, &BACKWARD[k], &p, 3.0 * bytes, 3.0 * bytes, 0.0);
    CUDA_CHECK(cudaFree(p.out));
    CUDA_CHECK(cudaFree((void *)p.inp));
    CUDA_CHECK(cudaFree((void *)p.dout));
}

int main(int argc, char **argv) {
    lab_start(&lab, argc, argv, NULL);
    if (lab.bench) {
        bench();
        return lab_finish(&lab);
    }
    cudaStream_t stream = lab.stream;
    check_kernels();
    check_exponential(stream);
    check_extremes(stream);
    const size_t sizes[] = {0, 1, 3, 4, 7, 8, 255, 1000, 4095, 4096, 4097, 20011};
    bool ok = true;
    double worst = 0.0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int variant = 0; variant < 4; variant++) {
            ok &= check_size(sizes[i], variant / 2 ? 1 : 0, variant % 2, &worst, stream);
        }
    }
    check(&lab.checks, ok, "forward and backward, ragged sizes, unaligned, in place (" FLOATX_NAME "): error %.2e",
          worst);
    return lab_finish(&lab);
}
