// classifier.cuh: softmax, cross-entropy and its gradient over the vocabulary, a block per
// token. A tensor rank holds Vl columns of the Vp, and all-reduces stand between the steps:
//
//   classifier_stats             Computes max, sum of exp(x - max), and the target's logit, of
//                                the rank's columns.
//   all-reduce of max            (the operation max, into another buffer: global_max)
//   classifier_rescale           Makes sum relative to the global maximum.
//   all-reduce of sum, target    (the operation sum)
//   classifier_gradient          Computes loss and gradient.
//
// One rank needs the first and the last step only: its maximum is the global one, which
// would rescale by exp(0) = 1.
//
// defines: classifier_stats, classifier_rescale, classifier_gradient, loss_sum
#ifndef LLMC_CLASSIFIER_CUH
#define LLMC_CLASSIFIER_CUH

#include "llmc/kernels/exponential.cuh"
#include "llmc/kernels/mma.cuh"
#include "llmc/kernels/packs.cuh"

// Elements that a thread of the statistics works on at a time.
enum { CLASSIFIER_TILE = 16 };

// Takes a tile into the largest logit that a thread has met, and into its sums of exp(x -
// max). Each place of a tile has its sum. A new largest logit first rescales the sums.
template <int TILE>
__device__ __forceinline__ void row_add(float *max, float (&sums)[TILE],
                                        const float (&x)[TILE]) {
    float largest = max_of<TILE>(x);
    if (largest > *max) {
        float scale = exponential_fast(*max - largest);
        for (int k = 0; k < TILE; k++) sums[k] *= scale;
        *max = largest;
    }
    for (int k = 0; k < TILE; k++) sums[k] += exponential_fast(x[k] - *max);
}

// Returns max and sum of exp(x - max) over the first `valid` (> 0) columns of a row to
// every thread of the block. One pass, several packs at a time, so that their loads
// overlap.
template <int W>
__device__ __forceinline__ void row_stats(float *row_max, float *row_sum, const floatX *row,
                                          size_t valid) {
    constexpr int PACKS = W == 1 ? 1 : CLASSIFIER_TILE / W, TILE = PACKS * W;
    Share s = share_of(CEIL_DIV(valid, (size_t)W), threadIdx.x, blockDim.x);
    size_t i = s.begin;
    size_t whole = s.end < valid / W ? s.end : valid / W;  // packs without padding
    float max = -INFINITY, sums[TILE] = {0.0f}, x[TILE], y[W];
    for (; i + (PACKS - 1) * s.step < whole; i += PACKS * s.step) {
        for (int j = 0; j < PACKS; j++) {
            load_floats<W>(y, row + (i + (size_t)j * s.step) * W);
            for (int k = 0; k < W; k++) x[j * W + k] = y[k];
        }
        row_add<TILE>(&max, sums, x);
    }
    for (; i < s.end; i += PACKS * s.step) {
        for (int j = 0; j < PACKS; j++) {
            size_t first = (i + (size_t)j * s.step) * W;
            size_t end = s.end * W < valid ? s.end * W : valid;
            for (int k = 0; k < W; k++)
                x[j * W + k] = first + (size_t)k < end ? to_float(row[first + (size_t)k])
                                                       : -INFINITY;
        }
        row_add<TILE>(&max, sums, x);
    }
    *row_max = blockDim.x > 1 ? block_max(max) : max;
    // The factor is 0 for a thread without columns.
    *row_sum = sum_of<TILE>(sums) * exponential_fast(max - *row_max);
    if (blockDim.x > 1) *row_sum = block_sum(*row_sum);
}

// Writes row[Vl], the gradients of the logits `from` (which may be row): dloss * (softmax -
// (column == target)), and 0 from column `valid` on. target is a local column. It is any
// larger number if another rank has it.
template <int W>
__device__ __forceinline__ void row_gradient(floatX *row, const floatX *from, float max,
                                             float sum, size_t target, float dloss,
                                             size_t valid, size_t Vl) {
    float scale = dloss / sum, x[W];
    Share s = share_of(Vl / W, threadIdx.x, blockDim.x);
    size_t i = s.begin;
    size_t whole = s.end < valid / W ? s.end : valid / W;  // packs without padding
    // 32 bits are enough, because no row is longer.
    unsigned place = (unsigned)target, mine = (unsigned)(i * W);
    for (; i < whole; i += s.step, mine += (unsigned)(s.step * W)) {
        load_floats<W>(x, from + i * W);
        for (int k = 0; k < W; k++) x[k] = exponential_fast(x[k] - max) * scale;
        if (place - mine < W)
            for (int k = 0; k < W; k++) x[k] -= mine + (unsigned)k == place ? dloss : 0.0f;
        store_floats<W>(row + i * W, x);
    }
    for (; i < s.end; i += s.step) {
        size_t first = i * W;
        load_floats<W>(x, from + first);
        for (int k = 0; k < W; k++) {
            x[k] = exponential_fast(x[k] - max) * scale;
            x[k] -= first + (size_t)k == target ? dloss : 0.0f;
            x[k] = first + (size_t)k < valid ? x[k] : 0.0f;
        }
        store_floats<W>(row + first, x);
    }
}

// Returns how many of a rank's Vl columns, v_start onward, are below V: the others are
// padding.
__host__ __device__ __forceinline__ size_t valid_columns(size_t V, size_t Vl,
                                                         size_t v_start) {
    size_t left = v_start < V ? V - v_start : 0;
    return left < Vl ? left : Vl;
}

template <int W>
__global__ void __launch_bounds__(512, 2)
    classifier_stats_kernel(float *max, float *sum, float *target_logit,
                            const floatX *logits, const int *targets, size_t V, size_t Vl,
                            size_t v_start) {
    size_t n = blockIdx.x, target = (size_t)targets[n] - v_start;
    size_t valid = valid_columns(V, Vl, v_start);
    const floatX *row = logits + n * Vl;
    float row_max = -INFINITY, row_sum = 0.0f;
    if (valid > 0) row_stats<W>(&row_max, &row_sum, row, valid);
    if (threadIdx.x == 0) {
        max[n] = row_max;
        sum[n] = row_sum;
        target_logit[n] = target < valid ? (float)row[target] : 0.0f;
    }
}

__global__ void __launch_bounds__(256)
    classifier_rescale_kernel(float *sum, const float *local_max, const float *global_max,
                              size_t N) {
    size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n < N) sum[n] *= exponential_fast(local_max[n] - global_max[n]);
}

template <int W>
__global__ void __launch_bounds__(512, 2)
    classifier_gradient_kernel(float *losses, floatX *logits, const float *max,
                               const float *sum, const float *target_logit,
                               const int *targets, float dloss, size_t V, size_t Vl,
                               size_t v_start, bool gradient) {
    size_t n = blockIdx.x, target = (size_t)targets[n] - v_start;
    size_t valid = valid_columns(V, Vl, v_start);
    floatX *row = logits + n * Vl;
    if (gradient) row_gradient<W>(row, row, max[n], sum[n], target, dloss, valid, Vl);
    if (threadIdx.x == 0) {
        losses[n] = logf(sum[n]) + max[n] - target_logit[n];
        losses[gridDim.x + n] = max[n] - target_logit[n];
    }
}

// Does the work of both kernels if a rank has all columns. The row stays in shared memory
// between statistics and gradient. A thread copies only the packs that it works on, so it
// waits for no other thread. A row arrives while the other block of the multiprocessor
// computes. Every sum has the order of the two kernels, and so the same bits.
__global__ void __launch_bounds__(512, 2)
    classifier_row_kernel(float *losses, floatX *logits, const int *targets, float dloss,
                          size_t V, size_t Vl, bool gradient) {
    constexpr int W = x128::size;
    DYNAMIC_SHARED(shared);
    floatX *kept = (floatX *)shared;
    size_t n = blockIdx.x, target = (size_t)targets[n];
    floatX *row = logits + n * Vl;
    Share s = share_of(Vl / W, threadIdx.x, blockDim.x);
    for (size_t i = s.begin; i < s.end; i += s.step)
        copy_async16(SharedTile((bfloat16 *)(kept + i * W)), row + i * W, true);
    copy_async_commit();
    copy_async_wait<0>();

    float max, sum;
    row_stats<W>(&max, &sum, kept, V);
    if (gradient) row_gradient<W>(row, kept, max, sum, target, dloss, V, Vl);
    if (threadIdx.x == 0) {
        float target_logit = to_float(kept[target]);  // of another thread: row_stats met it
        losses[n] = logf(sum) + max - target_logit;
        losses[gridDim.x + n] = max - target_logit;
    }
}

// Sums N floats in double by one block.
__global__ void __launch_bounds__(256)
    loss_sum_kernel(double *out, const float *losses, size_t N) {
    double sum = 0.0;
    Share s = share_of(N, threadIdx.x, blockDim.x);
    for (size_t i = s.begin; i < s.end; i += s.step) sum += (double)losses[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *out = sum;
}

// Threads for a row of Vl columns.
static inline unsigned classifier_threads(size_t Vl) {
    return Vl < 4096 && LONG_ROW_THREADS > 128 ? 128 : LONG_ROW_THREADS;
}

// True if classifier_gradient takes the statistics as well, and classifier_stats does
// nothing. For that the rank must have all columns, and a multiprocessor room for two rows:
// one arrives while the block works on the other. If one thread has a whole row, it finds it
// in its cache again and needs none of this.
static inline bool classifier_keeps_row(size_t V, size_t Vl, size_t v_start) {
    return LONG_ROW_THREADS > 1 && v_start == 0 && V <= Vl && Vl % x128::size == 0 &&
           2 * (Vl * sizeof(floatX) + 2048) <= multiprocessor_shared();
}

// Computes max, sum of exp(x - max) and target_logit, each [N], over the columns v_start + j
// < V of logits[N, Vl]. target_logit is 0 if another rank has the target. A rank that has
// only padding gets max -inf and sum 0. Targets must be in [0, V). Does nothing if
// classifier_keeps_row.
static inline void classifier_stats(float *max, float *sum, float *target_logit,
                                    const floatX *logits, const int *targets, size_t N,
                                    size_t V, size_t Vl, size_t v_start,
                                    cudaStream_t stream) {
    if (classifier_keeps_row(V, Vl, v_start)) return;
    kernel_cost(KERNEL_CLASSIFIER, N * Vl, sizeof(floatX), 3);
    by_packs<ELEMENT_PACK>(Vl, [&](auto W) {
        LAUNCH(classifier_stats_kernel<W>, (unsigned)N, classifier_threads(Vl), stream)
        (max, sum, target_logit, logits, targets, V, Vl, v_start);
    });
}

// Multiplies sum[N] by exp(local_max - global_max), before sum is added over the ranks.
static inline void classifier_rescale(float *sum, const float *local_max,
                                      const float *global_max, size_t N,
                                      cudaStream_t stream) {
    kernel_cost(KERNEL_EXPONENTIAL, N, 4 * sizeof(float), 3);
    LAUNCH(classifier_rescale_kernel, (unsigned)CEIL_DIV(N, (size_t)256), 256, stream)
    (sum, local_max, global_max, N);
}

// Computes losses[2, N] from the global statistics. The first row is -log
// softmax(logits[n])[targets[n]]. The second is the distance of the target's logit from the
// largest (0: the first guess was right). With gradient, logits[N, Vl] become dloss * d loss
// / d logits, exactly 0 in the padding.
static inline void classifier_gradient(float *losses, floatX *logits, const float *max,
                                       const float *sum, const float *target_logit,
                                       const int *targets, float dloss, size_t N, size_t V,
                                       size_t Vl, size_t v_start, bool gradient,
                                       cudaStream_t stream) {
    if (classifier_keeps_row(V, Vl, v_start)) {
        kernel_cost(KERNEL_CLASSIFIER, N * Vl, (gradient ? 2 : 1) * sizeof(floatX),
                    gradient ? 6 : 3);
        LAUNCH_LARGE(classifier_row_kernel, (unsigned)N, classifier_threads(Vl), stream,
                     Vl * sizeof(floatX))
        (losses, logits, targets, dloss, V, Vl, gradient);
        return;
    }
    if (gradient) kernel_cost(KERNEL_CLASSIFIER, N * Vl, 2 * sizeof(floatX), 3);
    by_packs<ELEMENT_PACK>(Vl, [&](auto W) {
        LAUNCH(classifier_gradient_kernel<W>, (unsigned)N, classifier_threads(Vl), stream)
        (losses, logits, max, sum, target_logit, targets, dloss, V, Vl, v_start, gradient);
    });
}

// Writes to out[1] the sum of losses[N] in double. The order depends on N alone.
static inline void loss_sum(double *out, const float *losses, size_t N,
                            cudaStream_t stream) {
    kernel_cost(KERNEL_ELEMENTWISE, N, sizeof(float), 1);
    LAUNCH(loss_sum_kernel, 1, 256, stream)(out, losses, N);
}

#endif
