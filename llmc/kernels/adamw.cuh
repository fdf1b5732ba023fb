// adamw.cuh: the optimizer's update, element by element: AdamW with decoupled weight decay.
//
//   m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
//   p = p - lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay p)        c1 = 1 - beta1^t, c2 = 1 - beta2^t
//
// defines: AdamW, AdamWRange, adamw_number, adamw_update
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

// A run of weights: elements [at, at + size) of params and grads, of which the moments and master have copies from
// element `at_state` on. A table of them is sorted by first_block; each has CEIL_DIV(size, ADAMW_CHUNK) blocks.
typedef struct {
    size_t at, at_state, size;
    unsigned first_block;
    bool decays;
} AdamWRange;

static constexpr size_t ADAMW_CHUNK = (size_t)ELEMENT_THREADS * ELEMENTS_PER_THREAD; // elements of a block

// `weights` are the fp32 weights: master, or params themselves where these are fp32; narrow is then NULL. The block's
// chunk of n elements; all pointers are to its first.
template <int W>
__device__ __forceinline__ void adamw_chunk(floatX *narrow, float *weights, const float *grads, float *ms, float *vs,
                                            size_t n, const AdamWFactors &h) {
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
    size_t last = n - n % W + threadIdx.x;
    if (last < n) {
        weights[last] = adamw_element(weights[last], grads[last], &ms[last], &vs[last], h);
        if (narrow) narrow[last] = from_float<floatX>(weights[last]);
    }
}

// All runs of a table in one launch: a block finds the run to which its number belongs.
__global__ void __launch_bounds__(ELEMENT_THREADS)
    adamw_kernel(floatX *params, float *master, const float *grads, float *ms, float *vs, const AdamWRange *ranges,
                 size_t count, AdamWFactors h) {
    size_t low = 0, high = count - 1;
    while (low < high) {
        size_t middle = (low + high + 1) / 2;
        if (ranges[middle].first_block <= blockIdx.x) low = middle;
        else high = middle - 1;
    }
    AdamWRange r = ranges[low];
    size_t first = (blockIdx.x - r.first_block) * ADAMW_CHUNK, left = r.size - first;
    size_t n = left < ADAMW_CHUNK ? left : ADAMW_CHUNK;
    size_t at = r.at + first, at_state = r.at_state + first;
    floatX *narrow = master ? params + at : NULL;
    float *weights = master ? master + at_state : (float *)(void *)params + at;
    if (!r.decays) h.decay = 0.0f;
    if ((at | at_state) % 4 == 0) {  // 16 bytes of float; buffers begin at multiples of that
        adamw_chunk<4>(narrow, weights, grads + at, ms + at_state, vs + at_state, n, h);
    } else {
        adamw_chunk<1>(narrow, weights, grads + at, ms + at_state, vs + at_state, n, h);
    }
}

// Gives the ranges their blocks; returns how many there are.
static inline unsigned adamw_number(AdamWRange *ranges, size_t count) {
    size_t blocks = 0;
    for (size_t i = 0; i < count; i++) {
        ranges[i].first_block = (unsigned)blocks;
        blocks += CEIL_DIV(ranges[i].size, ADAMW_CHUNK);
    }
    return (unsigned)blocks;
}

// One step of the weights that ranges[count] on the device names, of `blocks` blocks by adamw_number; none is empty. n
// is how many weights these are, give or take padding. master are the fp32 weights, params their rounded copy; master
// is NULL where floatX is float. All begin at multiples of 16 bytes; ranges that do not take a slower path.
static inline void adamw_update(floatX *params, float *master, const float *grads, float *m, float *v,
                                const AdamWRange *ranges, size_t count, unsigned blocks, size_t n, const AdamW *h,
                                cudaStream_t stream) {
    if (blocks == 0) return;
    AdamWFactors f = {h->lr,
                      h->beta1,
                      h->beta2,
                      h->eps,
                      h->weight_decay,
                      (float)(1.0 / (double)h->beta1_correction),
                      (float)(1.0 / sqrt((double)h->beta2_correction)),
                      h->grad_scale};
    kernel_cost(KERNEL_OPTIMIZER, n, 7 * sizeof(float) + (master ? sizeof(floatX) : 0), 17);
    LAUNCH(adamw_kernel, blocks, ELEMENT_THREADS, 0, stream)(params, master, grads, m, v, ranges, count, f);
}

#endif
