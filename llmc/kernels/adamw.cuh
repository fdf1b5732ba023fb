// adamw.cuh: the optimizer's update, element by element: AdamW with decoupled weight decay.
//
//   m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
//   p = p - lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay p)        c1 = 1 - beta1^t, c2 = 1 - beta2^t
//
// defines: AdamW, adamw_update
#ifndef LLMC_ADAMW_CUH
#define LLMC_ADAMW_CUH

#include "llmc/kernels/packs.cuh"
#include "llmc/kernels/shares.cuh"

typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float beta1_correction, beta2_correction;  // 1 - beta1^t and 1 - beta2^t at step t = 1, 2, ...
    float grad_scale;                          // multiplies the gradients: clipping
} AdamW;

// What the kernel needs of it: the divisions by the corrections are done once, here.
typedef struct {
    float lr, beta1, beta2, eps, decay, m_scale, root_scale, grad_scale;
} AdamWFactors;

__device__ __forceinline__ float adamw_element(float p, float g, float *m, float *v, const AdamWFactors &h) {
    g *= h.grad_scale;
    *m = h.beta1 * *m + (1.0f - h.beta1) * g;
    *v = h.beta2 * *v + (1.0f - h.beta2) * (g * g);
    return p - h.lr * (*m * h.m_scale / (sqrtf(*v) * h.root_scale + h.eps) + h.decay * p);
}

// `weights` are the fp32 weights: master, or params themselves where these are fp32; narrow is then NULL.
template <int W>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    adamw_kernel(floatX *narrow, float *weights, const float *grads, float *ms, float *vs, size_t n,
                 AdamWFactors h) {
    Share s = element_share<W>(n);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float p[W], g[W], m[W], v[W];
        load_floats<W>(p, weights + i * W);
        load_floats<W>(g, grads + i * W);
        load_floats<W>(m, ms + i * W);
        load_floats<W>(v, vs + i * W);
        for (int k = 0; k < W; k++) p[k] = adamw_element(p[k], g[k], &m[k], &v[k], h);
        store_floats<W>(weights + i * W, p);
        store_floats<W>(ms + i * W, m);
        store_floats<W>(vs + i * W, v);
        if (narrow) store_floats<W>(narrow + i * W, p);
    }
    size_t last = element_tail<W>(n);
    if (last < n) {
        weights[last] = adamw_element(weights[last], grads[last], &ms[last], &vs[last], h);
        if (narrow) narrow[last] = from_float<floatX>(weights[last]);
    }
}

// One step of n weights with gradients grads[n] and moments m[n], v[n]. master[n] are the fp32 weights,
// params their rounded copy; master is NULL where floatX is float. Pointers that are not aligned to 16 bytes
// take a slower path.
static inline void adamw_update(floatX *params, float *master, const float *grads, float *m, float *v,
                                size_t n, const AdamW *h, cudaStream_t stream) {
    if (n == 0) return;
    bool fp32 = sizeof(floatX) == sizeof(float);
    float *weights = fp32 ? (float *)(void *)params : master;
    floatX *narrow = fp32 ? NULL : params;
    AdamWFactors f = {h->lr,
                      h->beta1,
                      h->beta2,
                      h->eps,
                      h->weight_decay,
                      (float)(1.0 / (double)h->beta1_correction),
                      (float)(1.0 / sqrt((double)h->beta2_correction)),
                      h->grad_scale};
    kernel_cost(KERNEL_OPTIMIZER, n, 7 * sizeof(float) + (fp32 ? 0 : sizeof(floatX)), 15);
    if (aligned16(params) && aligned16(weights) && aligned16(grads) && aligned16(m) && aligned16(v)) {
        LAUNCH(adamw_kernel<x128::size>, element_blocks(n), ELEMENT_THREADS, 0, stream)
        (narrow, weights, grads, m, v, n, f);
    } else {
        LAUNCH(adamw_kernel<1>, element_blocks(n), ELEMENT_THREADS, 0, stream)
        (narrow, weights, grads, m, v, n, f);
    }
}

#endif
