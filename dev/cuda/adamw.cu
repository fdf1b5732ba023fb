// adamw.cu: the optimizer's update: kernels from naive to llmc/kernels/adamw.cuh's, checked against plain loops in
// double.
#include "llmc/kernels/adamw.cuh"

#include "dev/cuda/bench.h"

static Lab lab;
static const bool NARROW = sizeof(floatX) < sizeof(float);  // then there are master weights

// ---- the kernels -------------------------------------------------------------------------------------------

typedef struct {
    floatX *params;               // [n]
    float *master, *grads, *m, *v;  // [n]; master NULL if params are float
    size_t n;
    AdamW h;
} Problem;

static float *weights_of(const Problem *p) { return NARROW ? p->master : (float *)(void *)p->params; }

// 1: the formulas as they are written, a kernel for each: every one reads and writes memory anew.
__global__ void adamw_moment1(float *m, const float *g, size_t n, AdamW h) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) m[i] = h.beta1 * m[i] + (1.0f - h.beta1) * (g[i] * h.grad_scale);
}
__global__ void adamw_moment2(float *v, const float *g, size_t n, AdamW h) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) v[i] = h.beta2 * v[i] + (1.0f - h.beta2) * (g[i] * h.grad_scale) * (g[i] * h.grad_scale);
}
__global__ void adamw_step(float *w, const float *m, const float *v, size_t n, AdamW h) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float mhat = m[i] / h.beta1_correction, vhat = v[i] / h.beta2_correction;
    w[i] -= h.lr * (mhat / (sqrtf(vhat) + h.eps) + h.weight_decay * w[i]);
}
__global__ void adamw_round(floatX *params, const float *w, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) params[i] = from_float<floatX>(w[i]);
}

// 2: all of it in one pass, an element a thread.
__global__ void adamw_one_pass(floatX *narrow, float *w, const float *grads, float *ms, float *vs, size_t n, AdamW h) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float g = grads[i] * h.grad_scale, m = h.beta1 * ms[i] + (1.0f - h.beta1) * g;
    float v = h.beta2 * vs[i] + (1.0f - h.beta2) * g * g, x = w[i];
    x -= h.lr * (m / h.beta1_correction / (sqrtf(v / h.beta2_correction) + h.eps) + h.weight_decay * x);
    ms[i] = m;
    vs[i] = v;
    w[i] = x;
    if (narrow) narrow[i] = from_float<floatX>(x);
}

static void update1(const void *problem, unsigned block) {
    const Problem *p = (const Problem *)problem;
    size_t blocks = CEIL_DIV(p->n, (size_t)block);
    float *w = weights_of(p);
    LAUNCH(adamw_moment1, blocks, block, 0, lab.stream)(p->m, p->grads, p->n, p->h);
    LAUNCH(adamw_moment2, blocks, block, 0, lab.stream)(p->v, p->grads, p->n, p->h);
    LAUNCH(adamw_step, blocks, block, 0, lab.stream)(w, p->m, p->v, p->n, p->h);
    if (NARROW) LAUNCH(adamw_round, blocks, block, 0, lab.stream)(p->params, w, p->n);
}
static void update2(const void *problem, unsigned block) {
    const Problem *p = (const Problem *)problem;
    LAUNCH(adamw_one_pass, CEIL_DIV(p->n, (size_t)block), block, 0, lab.stream)
    (NARROW ? p->params : NULL, weights_of(p), p->grads, p->m, p->v, p->n, p->h);
}
static void update3(const void *problem, unsigned) {
    const Problem *p = (const Problem *)problem;
    adamw_update(p->params, p->master, p->grads, p->m, p->v, p->n, &p->h, lab.stream);
}

static const LabKernel UPDATE[] = {
    {"adamw", 1, "a kernel for each formula", update1, 0},
    {"adamw", 2, "one pass over memory", update2, 0},
    {"adamw", 3, "128-bit loads, 16 elements a thread (llmc)", update3, ELEMENT_THREADS},
};

// ---- the checks --------------------------------------------------------------------------------------------

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
    check(&lab.checks, ok, "slices give the bits of the whole (" FLOATX_NAME ")");
    free(p);
    free(g);
    free(zero);
    free(want);
}

// Every kernel of the list at ragged sizes, two steps each.
static void check_kernels(void) {
    static const size_t sizes[] = {1, 7, 255, 4096, 4099, 20011};
    double errors[3] = {0.0};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t n = sizes[i];
        float *x = test_values(n, 0.0, 1.0, 1), *g = test_values(n, 0.0, 0.1, 2);
        double *want = test_doubles(n);
        for (size_t j = 0; j < n; j++) {
            double m = 0.0, v = 0.0, w = (double)x[j];
            for (int t = 1; t <= 2; t++) {
                double grad = (double)g[j] * 0.7;
                m = 0.9 * m + 0.1 * grad;
                v = 0.95 * v + 0.05 * grad * grad;
                w -= 3e-3 * (m / (1.0 - pow(0.9, t)) / (sqrt(v / (1.0 - pow(0.95, t))) + 1e-8) + 0.1 * w);
            }
            want[j] = w;
        }
        for (int k = 0; k < 3; k++) {
            Problem p = {to_device_floatX(x, n), NARROW ? to_device(x, n) : NULL, to_device(g, n),
                         (float *)test_device(n * sizeof(float)), (float *)test_device(n * sizeof(float)), n,
                         {3e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, 0.7f}};
            CUDA_CHECK(cudaMemset(p.m, 0, n * sizeof(float)));
            CUDA_CHECK(cudaMemset(p.v, 0, n * sizeof(float)));
            for (int t = 1; t <= 2; t++) {
                p.h.beta1_correction = (float)(1.0 - pow(0.9, t));
                p.h.beta2_correction = (float)(1.0 - pow(0.95, t));
                UPDATE[k].run(&p, lab_block(&UPDATE[k]));
            }
            float *params = to_host_floatX(p.params, n, lab.stream), *w = to_host(weights_of(&p), n, lab.stream);
            errors[k] = fmax(errors[k], test_error(w, want, n));
            for (size_t j = 0; j < n; j++) {
                if (params[j] != to_float(from_float<floatX>(w[j]))) errors[k] = (double)INFINITY;
            }
            free(params);
            free(w);
            float *buffers[] = {p.grads, p.m, p.v};
            for (int j = 0; j < 3; j++) CUDA_CHECK(cudaFree(buffers[j]));
            CUDA_CHECK(cudaFree(p.params));
            if (p.master) CUDA_CHECK(cudaFree(p.master));
        }
        free(x);
        free(g);
        free(want);
    }
    for (int k = 0; k < 3; k++) lab_check(&lab, &UPDATE[k], errors[k], 1e-6);
}

// Reads of gradient, weight and two moments, writes of the last three, and of the rounded weight: 28 bytes for an
// fp32 weight, 30 for a bf16 one. Three kernels read the gradient and the moments twice: 40, and 46 bytes.
static void bench(void) {
    size_t n = lab.cpu ? (size_t)1 << 20 : (size_t)124 << 20;
    Problem p = {(floatX *)test_device(n * sizeof(floatX)), NARROW ? (float *)test_device(n * sizeof(float)) : NULL,
                 (float *)test_device(n * sizeof(float)), (float *)test_device(n * sizeof(float)),
                 (float *)test_device(n * sizeof(float)), n, {3e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, 0.7f}};
    float *buffers[] = {weights_of(&p), p.grads, p.m, p.v};
    for (int i = 0; i < 4; i++) CUDA_CHECK(cudaMemset(buffers[i], 0, n * sizeof(float)));
    double must = (NARROW ? 30.0 : 28.0) * (double)n, naive = (NARROW ? 46.0 : 40.0) * (double)n;
    for (int k = 0; k < 3; k++) lab_bench(&lab, &UPDATE[k], &p, must, k == 0 ? naive : must, 0.0);
    for (int i = NARROW ? 0 : 1; i < 4; i++) CUDA_CHECK(cudaFree(buffers[i]));
    CUDA_CHECK(cudaFree(p.params));
}

int main(int argc, char **argv) {
    lab_start(&lab, argc, argv, NULL);
    if (lab.bench) {
        bench();
        return lab_finish(&lab);
    }
    cudaStream_t stream = lab.stream;
    check_kernels();
    const size_t sizes[] = {0, 1, 3, 4, 5, 8, 63, 768, 4096, 4099, 30001};
    for (size_t shift = 0; shift < 9; shift = shift * 2 + (shift == 0)) {
        bool ok = true;
        double worst = 0.0;
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            ok &= check_size(sizes[i], shift, i % 2 ? 0.1f : 0.0f, &worst, stream);
        }
        check(&lab.checks, ok, "%zu elements past an aligned address (" FLOATX_NAME "): error %.2e", shift, worst);
    }
    check_slices(stream);
    return lab_finish(&lab);
}
