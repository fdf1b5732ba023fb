// gelu.cu: checks llmc/gelu.cuh against plain loops in double.
#include "dev/cuda/kernel_test.h"
#include "llmc/gelu.cuh"

static Check c;

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
    check(&c, ok && got[0] == 1.0f && got[1] == 1.0f, "exponential: 0, infinities, NaN, subnormal results");
    check(&c, worst < 2.5e-7, "exponential: relative error %.2e <= 2.5e-7", worst);
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
    check(&c, ok, "fast math: no overflow at large inputs, NaN stays NaN");
    CUDA_CHECK(cudaFree(inp));
    CUDA_CHECK(cudaFree(out));
    CUDA_CHECK(cudaFree(d));
    free(y);
    free(dx);
}

int main(void) {
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
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
    check(&c, ok, "forward and backward, ragged sizes, unaligned, in place (" FLOATX_NAME "): error %.2e",
          worst);
    CUDA_CHECK(cudaStreamDestroy(stream));
    return check_summary(&c);
}
