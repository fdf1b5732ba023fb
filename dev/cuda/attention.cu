// attention.cu: checks attention.cuh, forward and backward, against plain loops in double at ragged sizes.
// `attention bench [B T]` instead times one layer of GPT-2 124M (4 x 64 unless told).
#include "llmc/attention.cuh"

#include "dev/cuda/kernel_test.h"

static Check checks;

// out[B,T,C] and the probabilities att[B,NH,T,T] from qkv[B,T,3,NH,HS].
static void plain_forward(double *out, double *att, const float *qkv, size_t B, size_t T, size_t C,
                          size_t NH) {
    size_t HS = C / NH;
    double scale = 1.0 / sqrt((double)HS);
    for (size_t b = 0; b < B; b++) {
        for (size_t h = 0; h < NH; h++) {
            for (size_t t = 0; t < T; t++) {
                const float *q = qkv + (b * T + t) * 3 * C + h * HS;
                double *row = att + ((b * NH + h) * T + t) * T, largest = -INFINITY, sum = 0.0;
                for (size_t s = 0; s <= t; s++) {
                    const float *k = qkv + (b * T + s) * 3 * C + C + h * HS;
                    for (size_t i = 0; i < HS; i++) row[s] += (double)q[i] * (double)k[i] * scale;
                    largest = fmax(largest, row[s]);
                }
                for (size_t s = 0; s <= t; s++) sum += row[s] = exp(row[s] - largest);
                for (size_t s = 0; s <= t; s++) {
                    const float *v = qkv + (b * T + s) * 3 * C + 2 * C + h * HS;
                    row[s] /= sum;
                    for (size_t i = 0; i < HS; i++)
                        out[(b * T + t) * C + h * HS + i] += row[s] * (double)v[i];
                }
            }
        }
    }
}

// dqkv[B,T,3,NH,HS], which begins at zero.
static void plain_backward(double *dqkv, const float *dout, const double *att, const float *qkv, size_t B,
                           size_t T, size_t C, size_t NH) {
    size_t HS = C / NH;
    double scale = 1.0 / sqrt((double)HS), *datt = test_doubles(T);
    for (size_t b = 0; b < B; b++) {
        for (size_t h = 0; h < NH; h++) {
            for (size_t t = 0; t < T; t++) {
                size_t at = (b * T + t) * 3 * C + h * HS;
                const float *d = dout + (b * T + t) * C + h * HS;
                const double *row = att + ((b * NH + h) * T + t) * T;
                double dot = 0.0;
                for (size_t s = 0; s <= t; s++) {
                    size_t from = (b * T + s) * 3 * C + h * HS;
                    datt[s] = 0.0;
                    for (size_t i = 0; i < HS; i++) {
                        datt[s] += (double)d[i] * (double)qkv[from + 2 * C + i];
                        dqkv[from + 2 * C + i] += row[s] * (double)d[i];
                    }
                    dot += row[s] * datt[s];
                }
                for (size_t s = 0; s <= t; s++) {
                    size_t from = (b * T + s) * 3 * C + h * HS;
                    double dscore = row[s] * (datt[s] - dot) * scale;
                    for (size_t i = 0; i < HS; i++) {
                        dqkv[at + i] += dscore * (double)qkv[from + C + i];
                        dqkv[from + C + i] += dscore * (double)qkv[at + i];
                    }
                }
            }
        }
    }
    free(datt);
}

static void test_attention(Matmul *mm, size_t B, size_t T, size_t C, size_t NH) {
    // In bf16 the scores (up to about 4 here), the probabilities and their gradients are rounded on the way.
    const double bound_out = sizeof(floatX) == 4 ? 3e-6 : 2.5e-2,
                 bound_grad = sizeof(floatX) == 4 ? 1e-5 : 5e-2;
    size_t n = B * T * C, rows = B * NH * T;
    float *qkv = test_values(3 * n, 0, 1.5, 1), *dout = test_values(n, 0, 1, 2);
    floatX *dev_qkv = to_device_floatX(qkv, 3 * n), *dev_dout = to_device_floatX(dout, n);
    floatX *out = (floatX *)test_device(n * sizeof(floatX)),
           *dqkv = (floatX *)test_device(3 * n * sizeof(floatX));
    void *saved = test_device(attention_saved_bytes(B, T, C, NH));
    void *scratch = test_device(attention_scratch_bytes(B, T, C, NH));
    double *want_out = test_doubles(n), *want_att = test_doubles(rows * T), *want_dqkv = test_doubles(3 * n);
    plain_forward(want_out, want_att, qkv, B, T, C, NH);
    plain_backward(want_dqkv, dout, want_att, qkv, B, T, C, NH);

    attention_forward(mm, out, saved, dev_qkv, B, T, C, NH);
    attention_backward(mm, dqkv, scratch, dev_dout, out, saved, dev_qkv, B, T, C, NH);
    float *got_out = to_host_floatX(out, n, mm->stream),
          *got_att = to_host_floatX((floatX *)saved, rows * T, mm->stream);
    float *got_dqkv = to_host_floatX(dqkv, 3 * n, mm->stream);
    bool causal = true;
    for (size_t i = 0; i < rows * T; i++) causal &= i % T <= i / T % T || got_att[i] == 0.0f;
    double error = fmax(test_error(got_out, want_out, n), test_error(got_att, want_att, rows * T));
    double error_grad = test_error(got_dqkv, want_dqkv, 3 * n);
    check(&checks, causal, "B %zu T %zu C %zu NH %zu: zero after the diagonal", B, T, C, NH);
    check(&checks, error <= bound_out, "B %zu T %zu C %zu NH %zu: forward (%.1e, bound %.1e)", B, T, C, NH,
          error, bound_out);
    check(&checks, error_grad <= bound_grad, "B %zu T %zu C %zu NH %zu: backward (%.1e, bound %.1e)", B, T, C,
          NH, error_grad, bound_grad);

    free(qkv), free(dout), free(want_out), free(want_att), free(want_dqkv);
    free(got_out), free(got_att), free(got_dqkv);
    CUDA_CHECK(cudaFree(dev_qkv)), CUDA_CHECK(cudaFree(dev_dout)), CUDA_CHECK(cudaFree(out));
    CUDA_CHECK(cudaFree(dqkv)), CUDA_CHECK(cudaFree(saved)), CUDA_CHECK(cudaFree(scratch));
}

// Scores far apart must neither overflow nor become NaN.
static void test_large_scores(Matmul *mm) {
    size_t B = 1, T = 24, C = 16, NH = 2, n = B * T * C;
    float *qkv = test_values(3 * n, 0, 60, 3);
    floatX *dev_qkv = to_device_floatX(qkv, 3 * n), *out = (floatX *)test_device(n * sizeof(floatX));
    void *saved = test_device(attention_saved_bytes(B, T, C, NH));
    attention_forward(mm, out, saved, dev_qkv, B, T, C, NH);
    float *att = to_host_floatX((floatX *)saved, NH * T * T, mm->stream);
    double worst = 0.0;
    for (size_t row = 0; row < NH * T; row++) {
        double sum = 0.0;
        for (size_t s = 0; s < T; s++) sum += (double)att[row * T + s];
        worst = fmax(worst, isnan(sum) ? (double)INFINITY : fabs(sum - 1));
    }
    check(&checks, worst <= 3 * FLOATX_ROUNDING, "large scores: rows sum to 1 (%.1e)", worst);
    free(qkv), free(att);
    CUDA_CHECK(cudaFree(dev_qkv)), CUDA_CHECK(cudaFree(out)), CUDA_CHECK(cudaFree(saved));
}

// The softmax p of rows of T scores x, and the gradient dx of the scores from d, that of the probabilities q.
static void plain_softmax(double *p, double *dx, const float *x, const float *d, const float *q, size_t rows,
                          size_t T) {
    for (size_t row = 0; row < rows; row++) {
        size_t at = row * T, t = row % T;
        double largest = -INFINITY, sum = 0.0, dot = 0.0;
        for (size_t s = 0; s <= t; s++) largest = fmax(largest, (double)x[at + s]);
        for (size_t s = 0; s <= t; s++) sum += p[at + s] = exp((double)x[at + s] - largest);
        for (size_t s = 0; s <= t; s++) p[at + s] /= sum;
        for (size_t s = 0; s <= t; s++) dot += (double)q[at + s] * (double)d[at + s];
        for (size_t s = 0; s <= t; s++) dx[at + s] = (double)q[at + s] * ((double)d[at + s] - dot);
    }
}

// A CPU takes a row by one thread, a GPU by a warp: here both do both, one by one and in packs.
static void test_softmax(cudaStream_t stream, size_t T) {
    size_t rows = 3 * T;
    unsigned blocks = (unsigned)CEIL_DIV(rows, (size_t)SOFTMAX_WARPS);
    // The gradient is compared with that of the probabilities as rounded; it loses digits where they cancel.
    const double bound_p = FLOATX_ROUNDING + 3e-6, bound_d = FLOATX_ROUNDING + 1e-5;
    float *x = test_values(rows * T, 0, 5, 4), *d = test_values(rows * T, 0, 1, 5);
    double *want_p = test_doubles(rows * T), *want_d = test_doubles(rows * T);
    for (int warp = 0; warp < 2; warp++) {
        floatX *att = to_device_floatX(x, rows * T), *datt = to_device_floatX(d, rows * T);
        if (warp) {
            LAUNCH((softmax_forward_kernel<x128::size, 32>), blocks, SOFTMAX_WARPS * 32, 0, stream)
            (att, rows, T);
            LAUNCH((softmax_backward_kernel<x128::size, 32>), blocks, SOFTMAX_WARPS * 32, 0, stream)
            (datt, att, rows, T);
        } else {
            LAUNCH((softmax_forward_kernel<1, 1>), blocks, SOFTMAX_WARPS * 32, 0, stream)(att, rows, T);
            LAUNCH((softmax_backward_kernel<1, 1>), blocks, SOFTMAX_WARPS * 32, 0, stream)
            (datt, att, rows, T);
        }
        float *got_p = to_host_floatX(att, rows * T, stream), *got_d = to_host_floatX(datt, rows * T, stream);
        plain_softmax(want_p, want_d, x, d, got_p, rows, T);
        double error_p = test_error(got_p, want_p, rows * T), error_d = test_error(got_d, want_d, rows * T);
        check(&checks, error_p <= bound_p && error_d <= bound_d,
              "softmax T %zu by a %s (%.1e, bound %.1e; gradient %.1e, bound %.1e)", T,
              warp ? "warp" : "thread", error_p, bound_p, error_d, bound_d);
        free(got_p), free(got_d);
        CUDA_CHECK(cudaFree(att)), CUDA_CHECK(cudaFree(datt));
    }
    free(x), free(d), free(want_p), free(want_d);
}

// Best of several runs, by events.
static void bench(Matmul *mm, size_t B, size_t T) {
    size_t C = 768, NH = 12, n = B * T * C;
    float *qkv = test_values(3 * n, 0, 1, 1);
    floatX *dev_qkv = to_device_floatX(qkv, 3 * n), *dout = to_device_floatX(qkv, n);
    floatX *out = (floatX *)test_device(n * sizeof(floatX)),
           *dqkv = (floatX *)test_device(3 * n * sizeof(floatX));
    void *saved = test_device(attention_saved_bytes(B, T, C, NH));
    void *scratch = test_device(attention_scratch_bytes(B, T, C, NH));
    cudaEvent_t event[3];
    for (int i = 0; i < 3; i++) CUDA_CHECK(cudaEventCreate(&event[i]));
    float forward = 1e30f, backward = 1e30f;
    for (int run = 0; run < 20; run++) {
        float ms;
        CUDA_CHECK(cudaEventRecord(event[0], mm->stream));
        attention_forward(mm, out, saved, dev_qkv, B, T, C, NH);
        CUDA_CHECK(cudaEventRecord(event[1], mm->stream));
        attention_backward(mm, dqkv, scratch, dout, out, saved, dev_qkv, B, T, C, NH);
        CUDA_CHECK(cudaEventRecord(event[2], mm->stream));
        CUDA_CHECK(cudaEventSynchronize(event[2]));
        CUDA_CHECK(cudaEventElapsedTime(&ms, event[0], event[1]));
        forward = fminf(forward, ms);
        CUDA_CHECK(cudaEventElapsedTime(&ms, event[1], event[2]));
        backward = fminf(backward, ms);
    }
    double flops = 4.0 * (double)(B * T * T) * (double)C; // of the two full products of forward
    printf("%s B %zu T %zu C %zu NH %zu: forward %.3f ms (%.1f GFLOP/s), backward %.3f ms (%.1f GFLOP/s)\n",
           FLOATX_NAME, B, T, C, NH, (double)forward, flops / (double)forward * 1e-6, (double)backward,
           2 * flops / (double)backward * 1e-6);
    for (int i = 0; i < 3; i++) CUDA_CHECK(cudaEventDestroy(event[i]));
    free(qkv);
    CUDA_CHECK(cudaFree(dev_qkv)), CUDA_CHECK(cudaFree(dout)), CUDA_CHECK(cudaFree(out));
    CUDA_CHECK(cudaFree(dqkv)), CUDA_CHECK(cudaFree(saved)), CUDA_CHECK(cudaFree(scratch));
}

int main(int argc, char **argv) {
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    Matmul *mm = (Matmul *)test_memory(sizeof(Matmul));
    matmul_create(mm, stream);
    bool benchmark = argc > 1 && strcmp(argv[1], "bench") == 0;
    if (benchmark) {
        bench(mm, argc > 2 ? strtoul(argv[2], NULL, 10) : 4, argc > 3 ? strtoul(argv[3], NULL, 10) : 64);
    } else {
        test_attention(mm, 2, 1, 18, 3);
        test_attention(mm, 3, 7, 18, 3);
        test_attention(mm, 2, 24, 64, 4);
        test_attention(mm, 2, 24, 18, 1);
        test_attention(mm, 1, 65, 96, 2);
        test_attention(mm, 1, 136, 64, 1);
        test_large_scores(mm);
        test_softmax(stream, 8);
        test_softmax(stream, 264);
    }
    matmul_destroy(mm);
    free(mm);
    CUDA_CHECK(cudaStreamDestroy(stream));
    return benchmark ? 0 : check_summary(&checks);
}
