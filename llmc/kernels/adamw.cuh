// adamw.cuh: the optimizer's update, element by element: AdamW with decoupled weight decay.
//
//   m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
//   p = p - lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay p)
//   c1 = 1 - beta1^t,  c2 = 1 - beta2^t
//
// defines: AdamW, adamw_factors, adamw_number, adamw_update
#ifndef LLMC_ADAMW_CUH
#define LLMC_ADAMW_CUH

#include "llmc/kernels/packs.cuh"

// A beta near 1 may round to 1 as a float, but 1 - beta keeps all its digits if it is
// computed first and then rounded. The kernel reads only this number, so that the decay of
// a moment matches its gain.
typedef struct {
    float lr, eps, decay;
    float gain1, gain2;         // 1 - beta1 and 1 - beta2
    float m_scale, root_scale;  // 1 / c1 and 1 / sqrt(c2)
    float grad_scale;           // multiplies the gradients: clipping
} AdamW;

// Returns the factors of step t = 1, 2, ...
static inline AdamW adamw_factors(double lr, double beta1, double beta2, double eps,
                                  double decay, double t, double grad_scale) {
    AdamW h;
    h.lr = (float)lr;
    h.eps = (float)eps;
    h.decay = (float)decay;
    h.gain1 = (float)(1.0 - beta1);
    h.gain2 = (float)(1.0 - beta2);
    h.m_scale = (float)(1.0 / (1.0 - pow(beta1, t)));
    h.root_scale = (float)(1.0 / sqrt(1.0 - pow(beta2, t)));
    h.grad_scale = (float)grad_scale;
    return h;
}

__device__ __forceinline__ float adamw_element(float p, float g, float *m, float *v,
                                               const AdamW &h) {
    g *= h.grad_scale;
    *m = *m - h.gain1 * *m + h.gain1 * g;
    *v = *v - h.gain2 * *v + h.gain2 * (g * g);
    return p - h.lr * (*m * h.m_scale / (sqrtf(*v) * h.root_scale + h.eps) + h.decay * p);
}

// Updates a block's chunk of n elements, a multiple of W. `weights` are fp32: the master
// weights, or params if these are fp32. In the second case narrow is NULL.
template <int W>
__device__ __forceinline__ void adamw_chunk(floatX *__restrict narrow,
                                            float *__restrict weights,
                                            const float *__restrict grads,
                                            float *__restrict ms, float *__restrict vs,
                                            size_t n, const AdamW &h) {
    Share s = share_of(n / W, threadIdx.x, ELEMENT_THREADS);
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
}

// Updates all pieces in one launch: each block finds the piece that its number belongs to.
__global__ void __launch_bounds__(ELEMENT_THREADS)
    adamw_kernel(floatX *params, float *master, const float *grads, float *ms, float *vs,
                 const Piece *pieces, size_t count, AdamW h) {
    size_t low = 0, high = count - 1;
    while (low < high) {
        size_t middle = (low + high + 1) / 2;
        if (pieces[middle].first_block <= blockIdx.x)
            low = middle;
        else
            high = middle - 1;
    }
    Piece r = pieces[low];
    size_t first = (blockIdx.x - r.first_block) * ELEMENT_CHUNK, left = r.hi - r.lo - first;
    size_t n = left < ELEMENT_CHUNK ? left : ELEMENT_CHUNK;
    size_t at = r.lo + first, at_state = r.at + first;
    floatX *narrow = master ? params + at : NULL;
    float *weights = master ? master + at_state : (float *)(void *)params + at;
    if (!r.decays) h.decay = 0.0f;
    // Packs on a GPU; a CPU's compiler makes vectors of the plain loop.
    if (ROW_LANES > 1 && (at | at_state | n) % 4 == 0)
        adamw_chunk<4>(narrow, weights, grads + at, ms + at_state, vs + at_state, n, h);
    else
        adamw_chunk<1>(narrow, weights, grads + at, ms + at_state, vs + at_state, n, h);
}

// Gives each of the pieces, none of them empty, its first block. Returns the number of
// blocks.
static inline unsigned adamw_number(Piece *pieces, size_t count) {
    size_t blocks = 0;
    for (size_t i = 0; i < count; i++) {
        pieces[i].first_block = (unsigned)blocks;
        blocks += CEIL_DIV(pieces[i].hi - pieces[i].lo, ELEMENT_CHUNK);
    }
    return (unsigned)blocks;
}

// Updates the weights of pieces[count], on the device and numbered by adamw_number. n is
// the number of their elements, or a little more for padding. master are the fp32 weights
// and params their rounded copy. If floatX is float, master is NULL. All buffers begin at
// multiples of 16 bytes; pieces that do not take a slower path.
static inline void adamw_update(floatX *params, float *master, const float *grads, float *m,
                                float *v, const Piece *pieces, size_t count,
                                unsigned blocks, size_t n, AdamW h, cudaStream_t stream) {
    if (blocks == 0) return;
    kernel_cost(KERNEL_OPTIMIZER, n, 7 * sizeof(float) + (master ? sizeof(floatX) : 0), 17);
    LAUNCH(adamw_kernel, blocks, ELEMENT_THREADS, stream)
    (params, master, grads, m, v, pieces, count, h);
}

#endif
