// adamw.cu: checks llmc/adamw.cuh against plain loops in double.
#include "dev/cuda/kernel_test.h"
#include "llmc/adamw.cuh"

static Check c;

// Three steps on n weights that start `shift` elements after an aligned address.
static bool check_size(size_t n, size_t shift, float decay, double *worst, cudaStream_t stream) {
    size_t total = n + shift + 4;  // the elements around must not change
    bool narrow = sizeof(floatX) < sizeof(float);
    float *p = test_values(total, 0.0, 1.0, 1), *g = test_values(total, 0.0, 0.1, 2);
    float *m = test_values(total, 0.0, 0.05, 3), *v = test_values(total, 0.01, 0.005, 4);
    double *pw = test_doubles(total), *mw = test_doubles(total), *vw = test_doubles(total);
    for (size_t i = 0; i < total; i++) {
        pw[i] = (double)p[i];
        mw[i] = (double)m[i];
        vw[i] = (double)v[i];
    }
    floatX *d_params = to_device_floatX(p, total);
    float *d_master = narrow ? to_device(p, total) : NULL, *d_g = to_device(g, total),
          *d_m = to_device(m, total);
    float *d_v = to_device(v, total);
    for (int t = 1; t <= 3; t++) {
        AdamW h = {3e-3f, 0.9f, 0.95f, 1e-8f, decay, (float)(1.0 - pow(0.9, t)), (float)(1.0 - pow(0.95, t)),
                   0.7f};
        adamw_update(d_params + shift, narrow ? d_master + shift : NULL, d_g + shift, d_m + shift,
                     d_v + shift, n, &h, stream);
        for (size_t i = shift; i < shift + n; i++) {
            double grad = (double)g[i] * 0.7;
            mw[i] = 0.9 * mw[i] + 0.1 * grad;
            vw[i] = 0.95 * vw[i] + 0.05 * grad * grad;
            double mhat = mw[i] / (1.0 - pow(0.9, t)), vhat = vw[i] / (1.0 - pow(0.95, t));
            pw[i] -= 3e-3 * (mhat / (sqrt(vhat) + 1e-8) + (double)decay * pw[i]);
        }
    }
    float *params = to_host_floatX(d_params, total, stream),
          *weights = narrow ? to_host(d_master, total, stream) : params;
    float *got_m = to_host(d_m, total, stream), *got_v = to_host(d_v, total, stream);
    double error = fmax(fmax(test_error(weights, pw, total), test_error(got_m, mw, total)),
                        test_error(got_v, vw, total));
    if (error > *worst) *worst = error;
    bool ok = error < 1e-6;
    for (size_t i = 0; i < total; i++) {
        ok = ok && params[i] == to_float(from_float<floatX>(weights[i]));
        if (i < shift || i >= shift + n)
            ok = ok && weights[i] == p[i] && got_m[i] == m[i] && got_v[i] == v[i];
    }
    if (narrow) {
        CUDA_CHECK(cudaMemset(d_params, 0, total * sizeof(floatX)));
        params_from_master(d_params + shift, d_master + shift, n, stream);
        float *again = to_host_floatX(d_params, total, stream);
        for (size_t i = 0; i < total; i++)
            ok = ok && again[i] == (i < shift || i >= shift + n ? 0.0f : params[i]);
        free(again);
        free(weights);
        CUDA_CHECK(cudaFree(d_master));
    }
    CUDA_CHECK(cudaFree(d_params));
    CUDA_CHECK(cudaFree(d_g));
    CUDA_CHECK(cudaFree(d_m));
    CUDA_CHECK(cudaFree(d_v));
    free(p);
    free(g);
    free(m);
    free(v);
    free(pw);
    free(mw);
    free(vw);
    free(params);
    free(got_m);
    free(got_v);
    return ok;
}

// A slice of the whole gives the bits of the whole, wherever it is cut: what a sharded optimizer relies on.
static void check_slices(cudaStream_t stream) {
    enum { N = 5000 };
    float *p = test_values(N, 0.0, 1.0, 1), *g = test_values(N, 0.0, 0.1, 2),
          *zero = test_values(N, 0.0, 0.0, 3), *want = NULL;
    AdamW h = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, 1.0f};
    bool ok = true, narrow = sizeof(floatX) < sizeof(float);
    const size_t cuts[] = {0, 64, 1001, 2502, 4999};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        floatX *d_p = to_device_floatX(p, N);
        float *d_w = narrow ? to_device(p, N) : NULL, *d_g = to_device(g, N), *d_m = to_device(zero, N),
              *d_v = to_device(zero, N);
        size_t k = cuts[i];
        adamw_update(d_p, d_w, d_g, d_m, d_v, k, &h, stream);
        adamw_update(d_p + k, narrow ? d_w + k : NULL, d_g + k, d_m + k, d_v + k, N - k, &h, stream);
        float *got = narrow ? to_host(d_w, N, stream) : to_host_floatX(d_p, N, stream);
        if (want) ok = ok && same_bits(want, got, N);
        if (want) free(got);
        else want = got;
        if (narrow) CUDA_CHECK(cudaFree(d_w));
        CUDA_CHECK(cudaFree(d_p));
        CUDA_CHECK(cudaFree(d_g));
        CUDA_CHECK(cudaFree(d_m));
        CUDA_CHECK(cudaFree(d_v));
    }
    check(&c, ok, "slices give the bits of the whole (" FLOATX_NAME ")");
    free(p);
    free(g);
    free(zero);
    free(want);
}

int main(void) {
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    const size_t sizes[] = {0, 1, 3, 4, 5, 8, 63, 768, 4096, 4099, 30001};
    for (size_t shift = 0; shift < 9; shift = shift * 2 + (shift == 0)) {
        bool ok = true;
        double worst = 0.0;
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            ok &= check_size(sizes[i], shift, i % 2 ? 0.1f : 0.0f, &worst, stream);
        }
        check(&c, ok, "%zu elements past an aligned address (" FLOATX_NAME "): error %.2e", shift, worst);
    }
    check_slices(stream);
    CUDA_CHECK(cudaStreamDestroy(stream));
    return check_summary(&c);
}
