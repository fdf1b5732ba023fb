// encoder.cu: checks llmc/encoder.cuh against plain loops in double.
#include "dev/cuda/kernel_test.h"
#include "llmc/encoder.cuh"

static Check c;

typedef struct {
    size_t B, T, maxT, C, V, ranks;
} Case;  // ranks: into how many parts the vocabulary is cut

static bool check_case(Case k, double *worst, cudaStream_t stream) {
    size_t N = k.B * k.T, C = k.C, Vl = CEIL_DIV(k.V, k.ranks), Vp = Vl * k.ranks;
    float *wte = test_values(Vp * C, 0.0, 1.0, 1), *wpe = test_values(k.maxT * C, 0.0, 1.0, 2);
    float *dout = test_values(N * C, 0.0, 1.0, 3), *start = test_values((Vp + k.maxT) * C, 0.0, 1.0, 4);
    int *tokens = (int *)test_memory(N * sizeof(int));
    uint64_t seed = 5;
    for (size_t n = 0; n < N; n++) {  // a third of them are the same token
        double r = 0.5 + 0.5 * test_random(&seed);
        tokens[n] = n % 3 == 1 ? (int)(k.V / 2) : (int)(r * (double)(k.V - 1));
    }
    double *out = test_doubles(N * C), *dwte = test_doubles(Vp * C), *dwpe = test_doubles(k.maxT * C);
    for (size_t n = 0; n < N; n++) {
        for (size_t i = 0; i < C; i++) {
            out[n * C + i] = (double)wte[(size_t)tokens[n] * C + i] + (double)wpe[n % k.T * C + i];
            dwte[(size_t)tokens[n] * C + i] += (double)dout[n * C + i];
            dwpe[n % k.T * C + i] += (double)dout[n * C + i];
        }
    }
    int *d_tokens = to_device_int(tokens, N);
    floatX *d_wpe = to_device_floatX(wpe, k.maxT * C), *d_dout = to_device_floatX(dout, N * C);
    float *whole = (float *)test_memory(N * C * sizeof(float)),
          *d_dwpe = to_device(start + Vp * C, k.maxT * C);
    for (size_t i = 0; i < N * C; i++) whole[i] = 0.0f;
    double error = 0.0;
    for (size_t r = 0; r < k.ranks; r++) {  // the parts add up to the whole
        floatX *d_wte = to_device_floatX(wte + r * Vl * C, Vl * C),
               *d_out = (floatX *)test_device(N * C * sizeof(floatX));
        float *d_dwte = to_device(start + r * Vl * C, Vl * C);
        encoder_forward(d_out, d_tokens, d_wte, r == 0 ? d_wpe : NULL, k.B, k.T, C, r * Vl, Vl, stream);
        encoder_backward(d_dwte, NULL, d_dout, d_tokens, k.B, k.T, C, k.maxT, r * Vl, Vl, true, stream);
        float *part = to_host_floatX(d_out, N * C, stream), *grad = to_host(d_dwte, Vl * C, stream);
        for (size_t i = 0; i < N * C; i++) whole[i] += part[i];
        double *want = test_doubles(Vl * C);
        for (size_t i = 0; i < Vl * C; i++) want[i] = (double)start[r * Vl * C + i] + dwte[r * Vl * C + i];
        double e = test_error(grad, want, Vl * C);
        error = fmax(error, e > 2e-6 ? INFINITY : e);
        free(part);
        free(grad);
        free(want);
        CUDA_CHECK(cudaFree(d_wte));
        CUDA_CHECK(cudaFree(d_out));
        CUDA_CHECK(cudaFree(d_dwte));
    }
    double e = test_error(whole, out, N * C);
    error = fmax(error, e > (k.ranks > 1 ? 3.0 : 1.0) * FLOATX_ROUNDING + 2e-7 ? INFINITY : e);
    for (int accumulate = 1; accumulate >= 0; accumulate--) {  // added first, overwritten then
        encoder_backward(NULL, d_dwpe, d_dout, d_tokens, k.B, k.T, C, k.maxT, 0, k.V, accumulate, stream);
        float *grad = to_host(d_dwpe, k.maxT * C, stream);
        double *want = test_doubles(k.maxT * C);
        for (size_t i = 0; i < k.maxT * C; i++)
            want[i] = dwpe[i] + (accumulate ? (double)start[Vp * C + i] : 0.0);
        e = test_error(grad, want, k.maxT * C);
        error = fmax(error, e > 2e-6 ? INFINITY : e);
        free(grad);
        free(want);
    }
    CUDA_CHECK(cudaFree(d_tokens));
    CUDA_CHECK(cudaFree(d_wpe));
    CUDA_CHECK(cudaFree(d_dout));
    CUDA_CHECK(cudaFree(d_dwpe));
    free(wte);
    free(wpe);
    free(dout);
    free(start);
    free(tokens);
    free(out);
    free(dwte);
    free(dwpe);
    free(whole);
    *worst = fmax(*worst, error);
    return isfinite(error);
}

int main(void) {
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    const Case cases[] = {{1, 1, 1, 1, 3, 1},      {2, 7, 9, 18, 40, 2},   {4, 16, 16, 64, 257, 1},
                          {3, 24, 30, 20, 100, 3}, {2, 33, 40, 768, 5, 4}, {2, 65, 65, 24, 4000, 8},
                          {1, 9, 64, 1604, 50, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Case k = cases[i];
        double worst = 0.0;
        bool ok = check_case(k, &worst, stream);
        check(&c, ok, "B %zu T %zu maxT %zu C %zu V %zu in %zu parts (" FLOATX_NAME "): error %.2e", k.B, k.T,
              k.maxT, k.C, k.V, k.ranks, worst);
    }
    CUDA_CHECK(cudaStreamDestroy(stream));
    return check_summary(&c);
}
