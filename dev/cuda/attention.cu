// attention.cu: attention by several kernels, each checked against plain loops in double, forward
// and backward, at ragged sizes. Each must give the same bits again and in any order of threads,
// and its memory must grow with T, not T^2.
//
//   1 gemm     A GEMM a head around a softmax kernel. The probabilities [B,NH,T,T] are stored.
//   2 naive    Flash: a thread per row goes over the other rows in global memory. It stores no
//              score.
//   3 lanes    The rows of a block share tiles in shared memory, several threads a row. llmc's
//              fp32 path on a GPU.
//   4 vectors  4, 8 or 16 rows a thread, the lanes of a vector, no barrier. llmc's fp32 path on
//              a CPU.
//   5 tensor   The products on tensor cores, fragments from product to product in registers.
//              llmc's bf16 path.
//   6 wgmma    Hopper: asynchronous products of four warps, tiles by the copy engine (on a CPU
//              by stand-ins, as late as they may be). llmc's bf16 path for heads of 64 and 128
//              on sm_90.
//   7 llmc     attention_forward and attention_backward: 3 or 4. In bf16 it is 6 or 5, if the
//              head size allows it. For 33 to 64 channels 5 has 32 rows a warp forward: it reads
//              a tile once for both halves.
//
// Grouped queries (GQA, Ainslie et al. 2023), whose heads of k and v serve several heads of q:
//
//   1 copies   k and v are copied for every head of q, and the copies' gradients summed.
//   2 wgmma    6 without a copy: a block of keys goes over the heads of its group.
//   3 llmc     The same kernels as 7.
//
// Attention to some of the keys before a query: the keys of its document, or of a window. Tiles
// that no row of a block meets are skipped:
//
//   1 lanes    3 with the first key of each query.
//   2 llmc     The kernels of 7 without wgmma: 3, 4 or 5.
#include "dev/cuda/bench.h"

#include "llmc/kernels/attention_first.cuh"
#ifdef PRECISION_BF16
#include "llmc/kernels/attention_wgmma.cuh"
#endif
#include "llmc/reference_layers.h"

static Lab lab;
static Dropout dropping;  // of the probabilities, by kernels 3, 4 and 7

// --------------------------------------------------------------------------------- 1 gemm

// Row t of each score matrix, att[rows = B*NH*T, T]: in place the softmax of columns 0..t, then
// exact zeros.
__global__ void __launch_bounds__(ROW_THREADS)
    softmax_forward_kernel(floatX *att, size_t rows, size_t T) {
    size_t row = block_row(), t = row % T;
    if (row >= rows) return;
    floatX *scores = att + row * T;
    Share s = row_share(T);
    float max = -INFINITY, sum = 0.0f;
    for (size_t i = s.begin; i <= t; i += s.step) max = fmaxf(max, to_float(scores[i]));
    if constexpr (ROW_LANES == 32) max = warp_max(max);
    for (size_t i = s.begin; i <= t; i += s.step) sum += exponential(to_float(scores[i]) - max);
    float scale = 1.0f / row_sum(sum);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        scores[i] =
            from_float<floatX>(i > t ? 0.0f : exponential(to_float(scores[i]) - max) * scale);
    }
}

// datt = att * (datt - sum(att * datt)) row by row in place: the gradient of the scores.
// It is 0 if att is 0.
__global__ void __launch_bounds__(ROW_THREADS)
    softmax_backward_kernel(floatX *datt, const floatX *att, size_t rows, size_t T) {
    size_t row = block_row(), t = row % T;
    if (row >= rows) return;
    const floatX *p = att + row * T;
    floatX *d = datt + row * T;
    Share s = row_share(T);
    float sum = 0.0f;
    for (size_t i = s.begin; i <= t; i += s.step) sum += to_float(p[i]) * to_float(d[i]);
    float dot = row_sum(sum);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        d[i] = from_float<floatX>(i > t ? 0.0f : to_float(p[i]) * (to_float(d[i]) - dot));
    }
}

// Returns the bytes kept from forward to backward, per micro-batch and layer: the probabilities
// [B,NH,T,T], and two dense heads.
static inline size_t gemm_saved_bytes(size_t B, size_t T, size_t C, size_t NH) {
    return (B * NH * T * T + 2 * T * (C / NH)) * sizeof(floatX);
}

// Returns the bytes of scratch for backward: the gradient of the probabilities of one sequence
// [NH,T,T], and two dense heads.
static inline size_t gemm_scratch_bytes(size_t, size_t T, size_t C, size_t NH) {
    return (NH * T * T + 2 * T * (C / NH)) * sizeof(floatX);
}

// Copies a head's rows of HS values, times `factor`, because the matrices of a product are dense
// and these rows are not.
__global__ void copy_head_kernel(floatX *to, size_t to_stride, const floatX *from,
                                 size_t from_stride, size_t n, size_t HS, float factor) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / HS, c = i % HS;
    if (i < n)
        to[row * to_stride + c] =
            from_float<floatX>(to_float(from[row * from_stride + c]) * factor);
}
static void copy_head(floatX *to, size_t to_stride, const floatX *from, size_t from_stride,
                      size_t T, size_t HS, float factor = 1.0f) {
    LAUNCH(copy_head_kernel, CEIL_DIV(T * HS, (size_t)256), 256, lab.stream)
    (to, to_stride, from, from_stride, T * HS, HS, factor);
}

// Computes d[T,T] = factor a[T,HS] b[T,HS]^T for each head. a and b are rows of HS values, lda and
// ldb apart. heads[2,T,HS] is scratch.
static inline void gemm_scores(floatX *d, float factor, const floatX *a, size_t lda,
                               const floatX *b, size_t ldb, size_t T, size_t HS, size_t NH,
                               floatX *heads) {
    floatX *dense_a = heads, *dense_b = heads + T * HS;
    for (size_t h = 0; h < NH; h++) {
        copy_head(dense_a, HS, a + h * HS, lda, T, HS, factor);
        copy_head(dense_b, HS, b + h * HS, ldb, T, HS);
        gemm(&lab.mm, d + h * T * T, dense_a, false, dense_b, true, T, T, HS);
    }
}

// Computes d[T,HS] = factor op(att)[T,T] b[T,HS] for each head.
static inline void gemm_mix(floatX *d, size_t ldd, float factor, const floatX *att, bool trans,
                            const floatX *b, size_t ldb, size_t T, size_t HS, size_t NH,
                            floatX *heads) {
    floatX *dense_d = heads, *dense_b = heads + T * HS;
    for (size_t h = 0; h < NH; h++) {
        copy_head(dense_b, HS, b + h * HS, ldb, T, HS);
        gemm(&lab.mm, dense_d, att + h * T * T, trans, dense_b, false, T, HS, T);
        copy_head(d + h * HS, ldd, dense_d, HS, T, HS, factor);
    }
}

// Computes out[B,T,C] from qkv[B,T,3,NH,HS]; fills saved (gemm_saved_bytes) for the backward pass.
static void gemm_forward(floatX *out, void *saved, const floatX *qkv, size_t B, size_t T,
                         size_t C, size_t NH) {
    size_t HS = C / NH;
    floatX *att = (floatX *)saved, *heads = att + B * NH * T * T; // [B,NH,T,T] and [2,T,HS]
    for (size_t b = 0; b < B; b++) {
        const floatX *q = qkv + b * T * 3 * C, *k = q + C;
        gemm_scores(att + b * NH * T * T, 1.0f / sqrtf((float)HS), q, 3 * C, k, 3 * C, T, HS, NH,
                    heads);
    }
    LAUNCH(softmax_forward_kernel, row_blocks(B * NH * T), ROW_THREADS, lab.stream)
    (att, B * NH * T, T);
    for (size_t b = 0; b < B; b++) {
        const floatX *v = qkv + b * T * 3 * C + 2 * C;
        gemm_mix(out + b * T * C, C, 1.0f, att + b * NH * T * T, false, v, 3 * C, T, HS, NH, heads);
    }
}

// Computes dqkv[B,T,3,NH,HS] from dout[B,T,C] and forward's input and saved statistics.
static void gemm_backward(floatX *dqkv, void *scratch, const floatX *dout, const floatX *,
                          const void *saved, const floatX *qkv, size_t B, size_t T, size_t C,
                          size_t NH) {
    size_t HS = C / NH;
    float scale = 1.0f / sqrtf((float)HS);
    floatX *datt = (floatX *)scratch, *heads = datt + NH * T * T; // [NH,T,T] and [2,T,HS]
    for (size_t b = 0; b < B; b++) {
        const floatX *q = qkv + b * T * 3 * C, *k = q + C, *v = q + 2 * C;
        floatX *dq = dqkv + b * T * 3 * C, *dk = dq + C, *dv = dq + 2 * C;
        const floatX *att = (const floatX *)saved + b * NH * T * T, *dout_b = dout + b * T * C;
        gemm_mix(dv, 3 * C, 1.0f, att, true, dout_b, C, T, HS, NH, heads);
        gemm_scores(datt, 1.0f, dout_b, C, v, 3 * C, T, HS, NH, heads);
        LAUNCH(softmax_backward_kernel, row_blocks(NH * T), ROW_THREADS, lab.stream)
        (datt, att, NH * T, T);
        gemm_mix(dq, 3 * C, scale, datt, false, k, 3 * C, T, HS, NH, heads);
        gemm_mix(dk, 3 * C, scale, datt, true, q, 3 * C, T, HS, NH, heads);
    }
}

// -------------------------------------------------------------------------------- 2 naive

static constexpr int NAIVE_CHANNELS = 128;
static constexpr unsigned NAIVE_THREADS = 64;

// One thread per query: max and sum of the softmax so far, and the output so far, which is
// rescaled when the maximum grows.
static __global__ void naive_forward_kernel(Attention a) {
    size_t i = (size_t)blockIdx.x * NAIVE_THREADS + threadIdx.x;
    if (i >= a.B * a.NH * a.T) return;
    size_t t = i % a.T, h = i / a.T % a.NH, b = i / a.T / a.NH;
    const floatX *q = a.q + (b * a.T + t) * a.stride + h * a.HS;
    float mixed[NAIVE_CHANNELS], max = -INFINITY, sum = 0.0f;
    for (size_t c = 0; c < a.HS; c++) mixed[c] = 0.0f;
    for (size_t s = 0; s <= t; s++) {
        size_t at = (b * a.T + s) * a.stride + h * a.HS;
        float score = 0.0f;
        for (size_t c = 0; c < a.HS; c++) score += to_float(q[c]) * to_float(a.k[at + c]);
        score *= a.scale;
        float larger = score > max ? score : max, correction = expf(max - larger),
              p = expf(score - larger);
        for (size_t c = 0; c < a.HS; c++)
            mixed[c] = mixed[c] * correction + p * to_float(a.v[at + c]);
        sum = sum * correction + p;
        max = larger;
    }
    floatX *out = a.out + (b * a.T + t) * a.out_stride + h * a.HS;
    for (size_t c = 0; c < a.HS; c++) out[c] = from_float<floatX>(mixed[c] / sum);
    a.lse[i] = max + logf(sum);
}

// One thread per query: its gradient, from recomputed probabilities.
static __global__ void naive_backward_query_kernel(Attention a) {
    size_t i = (size_t)blockIdx.x * NAIVE_THREADS + threadIdx.x;
    if (i >= a.B * a.NH * a.T) return;
    size_t t = i % a.T, h = i / a.T % a.NH, b = i / a.T / a.NH,
           in = (b * a.T + t) * a.stride + h * a.HS;
    const floatX *q = a.q + in, *d = a.dout + (b * a.T + t) * a.out_stride + h * a.HS;
    const floatX *o = a.y + (b * a.T + t) * a.out_stride + h * a.HS;
    float dq[NAIVE_CHANNELS], of_row = 0.0f;
    for (size_t c = 0; c < a.HS; c++) dq[c] = 0.0f, of_row += to_float(d[c]) * to_float(o[c]);
    for (size_t s = 0; s <= t; s++) {
        const floatX *k = a.k + (b * a.T + s) * a.stride + h * a.HS,
                     *v = a.v + (b * a.T + s) * a.stride + h * a.HS;
        float score = 0.0f, dp = 0.0f;
        for (size_t c = 0; c < a.HS; c++) {
            score += to_float(q[c]) * to_float(k[c]);
            dp += to_float(d[c]) * to_float(v[c]);
        }
        float ds = expf(score * a.scale - a.lse[i]) * (dp - of_row) * a.scale;
        for (size_t c = 0; c < a.HS; c++) dq[c] += ds * to_float(k[c]);
    }
    for (size_t c = 0; c < a.HS; c++) a.dq[in + c] = from_float<floatX>(dq[c]);
    a.dot[i] = of_row;
}

// One thread per key: the gradients of the key and of its value.
static __global__ void naive_backward_key_kernel(Attention a) {
    size_t i = (size_t)blockIdx.x * NAIVE_THREADS + threadIdx.x;
    if (i >= a.B * a.NH * a.T) return;
    size_t s = i % a.T, h = i / a.T % a.NH, b = i / a.T / a.NH,
           in = (b * a.T + s) * a.stride + h * a.HS;
    float dk[NAIVE_CHANNELS], dv[NAIVE_CHANNELS];
    for (size_t c = 0; c < a.HS; c++) dk[c] = dv[c] = 0.0f;
    for (size_t t = s; t < a.T; t++) {
        const floatX *q = a.q + (b * a.T + t) * a.stride + h * a.HS;
        const floatX *d = a.dout + (b * a.T + t) * a.out_stride + h * a.HS;
        float score = 0.0f, dp = 0.0f;
        for (size_t c = 0; c < a.HS; c++) {
            score += to_float(q[c]) * to_float(a.k[in + c]);
            dp += to_float(d[c]) * to_float(a.v[in + c]);
        }
        size_t row = i - s + t;
        float p = expf(score * a.scale - a.lse[row]), ds = p * (dp - a.dot[row]) * a.scale;
        for (size_t c = 0; c < a.HS; c++) {
            dv[c] += p * to_float(d[c]);
            dk[c] += ds * to_float(q[c]);
        }
    }
    for (size_t c = 0; c < a.HS; c++) {
        a.dk[in + c] = from_float<floatX>(dk[c]);
        a.dv[in + c] = from_float<floatX>(dv[c]);
    }
}

// Describes a pass of a flash kernel: `saved` is lse, `scratch` dot.
static Attention flash_forward(floatX *out, void *saved, const floatX *qkv, size_t B, size_t T,
                               size_t C, size_t NH) {
    Attention a = attention_of(qkv, B, T, C, NH);
    a.out = out, a.lse = (float *)saved;
    return a;
}
static Attention flash_backward(floatX *dqkv, void *scratch, const floatX *dout,
                                const floatX *out, const void *saved, const floatX *qkv, size_t B,
                                size_t T, size_t C, size_t NH) {
    Attention a = flash_forward(NULL, (void *)saved, qkv, B, T, C, NH);
    a.y = out, a.dout = dout, a.dq = dqkv, a.dk = dqkv + C, a.dv = dqkv + 2 * C,
    a.dot = (float *)scratch;
    return a;
}

static void naive_forward(floatX *out, void *saved, const floatX *qkv, size_t B, size_t T,
                          size_t C, size_t NH) {
    unsigned blocks = (unsigned)CEIL_DIV(B * NH * T, (size_t)NAIVE_THREADS);
    LAUNCH(naive_forward_kernel, blocks, NAIVE_THREADS, lab.stream)
    (flash_forward(out, saved, qkv, B, T, C, NH));
}

static void naive_backward(floatX *dqkv, void *scratch, const floatX *dout, const floatX *out,
                           const void *saved, const floatX *qkv, size_t B, size_t T, size_t C,
                           size_t NH) {
    Attention a = flash_backward(dqkv, scratch, dout, out, saved, qkv, B, T, C, NH);
    unsigned blocks = (unsigned)CEIL_DIV(B * NH * T, (size_t)NAIVE_THREADS);
    LAUNCH(naive_backward_query_kernel, blocks, NAIVE_THREADS, lab.stream)(a);
    LAUNCH(naive_backward_key_kernel, blocks, NAIVE_THREADS, lab.stream)(a);
}

// ------------------------------------------------------------------------ 3, 4, 5: llmc's

// Runs one row a thread (3), or as many as this machine's threads take (4).
template <int CAPACITY> using OneRow = AttentionRows<CAPACITY>;
template <int CAPACITY> using OwnRows = RowsOf<CAPACITY>;
template <template <int> class Rows>
static void rows_launch(const Attention &a, bool backward) {
    attention_capacity<32, 64, 128>(a.HS, [&](auto capacity) {
        typedef Rows<decltype(capacity)::value> A;
        by_dropout(dropping, [&](auto drops) {
            attention_rows<A, drops>(a, dropping, backward, lab.stream);
        });
    });
}
template <template <int> class Rows>
static void rows_forward(floatX *out, void *saved, const floatX *qkv, size_t B, size_t T,
                         size_t C, size_t NH) {
    rows_launch<Rows>(flash_forward(out, saved, qkv, B, T, C, NH), false);
}
template <template <int> class Rows>
static void rows_backward(floatX *dqkv, void *scratch, const floatX *dout, const floatX *out,
                          const void *saved, const floatX *qkv, size_t B, size_t T, size_t C,
                          size_t NH) {
    rows_launch<Rows>(flash_backward(dqkv, scratch, dout, out, saved, qkv, B, T, C, NH), true);
}

static void llmc_forward(floatX *out, void *saved, const floatX *qkv, size_t B, size_t T,
                         size_t C, size_t NH) {
    attention_forward(out, (float *)saved, qkv, B, T, C, NH, lab.stream, dropping);
}

static void llmc_backward(floatX *dqkv, void *scratch, const floatX *dout, const floatX *out,
                          const void *saved, const floatX *qkv, size_t B, size_t T, size_t C,
                          size_t NH) {
    attention_backward(dqkv, (float *)scratch, dout, out, (const float *)saved, qkv, B, T, C, NH,
                       lab.stream, dropping);
}

// 16 rows a warp, where llmc's takes 32.
struct SixteenRows : AttentionMma<64> {
    template <bool> static constexpr int GROUPS = 1;
};
[[maybe_unused]] static void tensor_forward(floatX *out, void *saved, const floatX *qkv, size_t B,
                                            size_t T, size_t C, size_t NH) {
#ifdef PRECISION_BF16
    Attention a = flash_forward(out, saved, qkv, B, T, C, NH);
    unsigned blocks = attention_blocks(a, false, ATTENTION_MMA_ROWS);
    LAUNCH((attention_forward_mma_kernel<SixteenRows, false>), blocks, ATTENTION_MMA_THREADS,
           lab.stream)
    (a, Dropout());
#else
    (void)out, (void)saved, (void)qkv, (void)B, (void)T, (void)C, (void)NH;
#endif
}

[[maybe_unused]] static void tensor_backward(floatX *dqkv, void *scratch, const floatX *dout,
                                             const floatX *out, const void *saved,
                                             const floatX *qkv, size_t B, size_t T, size_t C,
                                             size_t NH) {
#ifdef PRECISION_BF16
    Attention a = flash_backward(dqkv, scratch, dout, out, saved, qkv, B, T, C, NH);
    attention_mma<AttentionMma<64>, false>(a, Dropout(), true, lab.stream);
#else
    (void)dqkv, (void)scratch, (void)dout, (void)out, (void)saved, (void)qkv, (void)B, (void)T,
        (void)C, (void)NH;
#endif
}

// True where kernel 6 runs: Hopper, and by stand-ins every CPU.
static bool wgmma_runs(void) {
#if defined(PRECISION_BF16) && defined(__CUDACC__)
    return wgmma_device();
#else
    return sizeof(floatX) == 2;
#endif
}
static void wgmma_launch([[maybe_unused]] const Attention &a, [[maybe_unused]] bool backward) {
#ifdef PRECISION_BF16
    attention_wgmma(a, backward, lab.stream);
#endif
}
[[maybe_unused]] static void wgmma_forward(floatX *out, void *saved, const floatX *qkv, size_t B,
                                           size_t T, size_t C, size_t NH) {
    wgmma_launch(flash_forward(out, saved, qkv, B, T, C, NH), false);
}
[[maybe_unused]] static void wgmma_backward(floatX *dqkv, void *scratch, const floatX *dout,
                                            const floatX *out, const void *saved,
                                            const floatX *qkv, size_t B, size_t T, size_t C,
                                            size_t NH) {
    wgmma_launch(flash_backward(dqkv, scratch, dout, out, saved, qkv, B, T, C, NH), true);
}

// Returns the bytes of lse[B,NH,T], which flash attention keeps, and of its scratch dot[B,NH,T].
static size_t flash_bytes(size_t B, size_t T, size_t, size_t NH) {
    return B * NH * T * sizeof(float);
}

typedef size_t Bytes(size_t B, size_t T, size_t C, size_t NH);
typedef void Forward(floatX *, void *, const floatX *, size_t, size_t, size_t, size_t);
typedef void Backward(floatX *, void *, const floatX *, const floatX *, const void *,
                      const floatX *, size_t, size_t, size_t, size_t);

enum { TENSOR = 5, WGMMA = 6, LLMC = 7 };
typedef struct {
    int number;
    const char *name, *text;
    unsigned block;  // 1: differs from kernel to kernel
    Bytes *saved, *scratch;
    Forward *forward;
    Backward *backward;
    size_t most, least, step;  // the largest head, the smallest, and what divides it
} Kernel;

static const Kernel KERNELS[] = {
    {1, "gemm", "GEMMs around a softmax, probabilities stored", 1, gemm_saved_bytes,
     gemm_scratch_bytes, gemm_forward, gemm_backward, 1024, 1, 1},
    {2, "naive", "flash: a thread a row, the others in global memory", NAIVE_THREADS, flash_bytes,
     flash_bytes, naive_forward, naive_backward, NAIVE_CHANNELS, 1, 1},
    {3, "lanes", "flash: tiles in shared memory, several threads a row", 1, flash_bytes,
     flash_bytes, rows_forward<OneRow>, rows_backward<OneRow>, 128, 1, 1},
#ifndef __CUDACC__
    {4, "vectors", "flash: 4 to 16 rows a thread, lanes of a CPU's vector", 1, flash_bytes,
     flash_bytes, rows_forward<OwnRows>, rows_backward<OwnRows>, 128, 1, 1},
#endif
#ifdef PRECISION_BF16
    {TENSOR, "tensor", "flash: tensor cores, fragments stay in registers", ATTENTION_MMA_THREADS,
     flash_bytes, flash_bytes, tensor_forward, tensor_backward, 64, 33, 8},
    {WGMMA, "wgmma", "flash: asynchronous products and copies of sm_90", 1, flash_bytes,
     flash_bytes, wgmma_forward, wgmma_backward, 128, 64, 64},
#endif
    {LLMC, "llmc", "3, 4, or tensor cores: 5 or 6 (llmc)", 1, flash_bytes, flash_bytes,
     llmc_forward, llmc_backward, ATTENTION_MAX_HEAD_SIZE, 1, 1},
};
enum { KERNEL_COUNT = sizeof KERNELS / sizeof *KERNELS };

// True if a kernel can, on this machine, for heads of HS channels.
static bool kernel_takes(const Kernel *k, size_t HS) {
    return HS >= k->least && HS <= k->most && HS % k->step == 0 &&
           (k->number != WGMMA || wgmma_runs());
}

// Returns the number of the kernel that llmc's takes, or the kernel's own.
static int kernel_number(const Kernel *k, size_t B, size_t T, size_t C, size_t NH) {
    if (k->number != LLMC) return k->number;
    Attention a = attention_of(NULL, B, T, C, NH);
#if defined(PRECISION_BF16) && defined(__CUDACC__)
    if (wgmma_runs() && !dropping.threshold && attention_wgmma_takes(a)) return WGMMA;
#endif
    if (sizeof(floatX) == 2 && attention_mma_takes(a))
        return a.HS > 32 && a.HS <= 64 ? LLMC : TENSOR;
    return RowsOf<32>::R == 1 ? 3 : 4;
}

// A row of the table: one pass of one kernel.
typedef struct {
    const Kernel *kernel;
    floatX *out, *dqkv;         // [B,T,C], [B,T,3C]
    const floatX *qkv, *dout;   // [B,T,3C], [B,T,C]
    void *saved, *scratch;
    size_t B, T, C, NH;
} Problem;

static void time_forward(const void *problem, unsigned) {
    const Problem *p = (const Problem *)problem;
    p->kernel->forward(p->out, p->saved, p->qkv, p->B, p->T, p->C, p->NH);
}

static void time_backward(const void *problem, unsigned) {
    const Problem *p = (const Problem *)problem;
    p->kernel->backward(p->dqkv, p->scratch, p->dout, p->out, p->saved, p->qkv, p->B, p->T, p->C,
                        p->NH);
}

static LabKernel forward_row(const Kernel *k) {
    return {"attention", k->number, k->text, time_forward, k->block};
}

static LabKernel backward_row(const Kernel *k) {
    return {"attention backward", k->number, k->text, time_backward, k->block};
}

// --------------------------------------------------------------------------------- checks

// The results of one kernel for one problem.
typedef struct {
    float *out, *dqkv; // [B,T,C], [B,T,3C]
} Result;

// The right results, by plain loops.
typedef struct {
    double *out, *dqkv;
} Want;

static Want want_of(const float *qkv, const float *dout, size_t B, size_t T, size_t C, size_t NH,
                    Dropout d, const int *first = NULL) {
    size_t n = B * T * C;
    double *x = widened(qkv, 3 * n), *dy = widened(dout, n), *att = test_doubles(B * NH * T * T);
    Want want = {test_doubles(n), test_doubles(3 * n)};
    reference_attention_forward(want.out, att, x, B, T, C, NH, d, first);
    reference_attention_backward(want.dqkv, dy, x, att, B, T, C, NH, d, first);
    return want;
}

static Result run(const Kernel *k, const floatX *qkv, const floatX *dout, size_t B, size_t T,
                  size_t C, size_t NH) {
    size_t n = B * T * C;
    floatX *out = test_floatX(n), *dqkv = test_floatX(3 * n);
    void *saved = test_device(k->saved(B, T, C, NH)),
         *scratch = test_device(k->scratch(B, T, C, NH));
    k->forward(out, saved, qkv, B, T, C, NH);
    k->backward(dqkv, scratch, dout, out, saved, qkv, B, T, C, NH);
    Result r = {to_host_floatX(out, n, lab.stream), to_host_floatX(dqkv, 3 * n, lab.stream)};
    return r;
}

// Runs a kernel again in the same order of threads and, if orders can be chosen, in random ones.
static bool same_again(const Kernel *k, const Result *first, const floatX *qkv,
                       const floatX *dout, size_t B, size_t T, size_t C, size_t NH) {
    size_t n = B * T * C;
    const auto same = [=]() {
        Result again = run(k, qkv, dout, B, T, C, NH);
        return same_bits(first->out, again.out, n) && same_bits(first->dqkv, again.dqkv, 3 * n);
    };
    bool ok = same();
#ifndef __CUDACC__
    Random before = cpu_runtime().thread_order;
    for (uint64_t seed = 1; seed <= (CPU_ASAN ? 1 : 3);
         seed++) {  // sanitized, a switch of threads is slow
        cpu_runtime().thread_order = {true, seed, 0};
        ok = same() && ok;
    }
    cpu_runtime().thread_order = before;
#endif
    return ok;
}

// In bf16 the scores (up to about 4 here), the probabilities and their gradients are rounded on
// the way.
static const double BOUND_OUT = sizeof(floatX) == 4 ? 3e-6 : 2.5e-2,
                    BOUND_GRAD = sizeof(floatX) == 4 ? 1e-5 : 5e-2;

// The largest errors of each kernel so far, forward and backward; NAN, which fails, before the
// first.
static double worst[KERNEL_COUNT][2];

static void note_errors(int number, double error, double error_grad) {
    for (int i = 0; i < KERNEL_COUNT; i++) {
        if (KERNELS[i].number != number) continue;
        worst[i][0] = fmax(worst[i][0], error);
        worst[i][1] = fmax(worst[i][1], error_grad);
    }
}

// Prints the table: a row for each kernel and pass with its largest error of all shapes.
static void check_rows(void) {
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < KERNEL_COUNT; i++) {
            if (!kernel_takes(&KERNELS[i], 64)) continue;
            LabKernel row = pass ? backward_row(&KERNELS[i]) : forward_row(&KERNELS[i]);
            lab_check(&lab, &row, worst[i][pass], pass ? BOUND_GRAD : BOUND_OUT);
        }
    }
}

// Checks every kernel at one shape. `repeat`: also the same bits again, and dropout of llmc's.
static void test_shape(size_t B, size_t T, size_t C, size_t NH, bool repeat) {
    size_t mark = test_count, n = B * T * C, HS = C / NH;
    float *qkv = test_values(3 * n, 0, 1.5, 1), *dout = test_values(n, 0, 1, 2);
    floatX *device_qkv = to_device_floatX(qkv, 3 * n), *device_dout = to_device_floatX(dout, n);
    Want want = want_of(qkv, dout, B, T, C, NH, dropping);
    for (const Kernel &k : KERNELS) {
        if (!kernel_takes(&k, HS)) continue;
        if (dropping.threshold && (k.number < 3 || k.number == TENSOR || k.number == WGMMA))
            continue;
        Result r = run(&k, device_qkv, device_dout, B, T, C, NH);
        double error = test_error(r.out, want.out, n),
               error_grad = test_error(r.dqkv, want.dqkv, 3 * n);
        int number = kernel_number(&k, B, T, C, NH);
        note_errors(k.number, error, error_grad);
        if (k.number != number) note_errors(number, error, error_grad);
        bool again = repeat && (!dropping.threshold || k.number == LLMC);
        bool same = !again || same_again(&k, &r, device_qkv, device_dout, B, T, C, NH);
        check(&lab.checks, error <= BOUND_OUT && error_grad <= BOUND_GRAD && same,
              "%d %-7s B %zu T %4zu NH %zu HS %3zu%s: forward %.1e (bound %.1e), backward %.1e "
              "(bound %.1e)%s%s",
              number, k.name, B, T, NH, HS, dropping.threshold ? ", dropout" : "", error,
              BOUND_OUT, error_grad, BOUND_GRAD, again ? ", bits again: " : "",
              !again ? ""
              : same ? "same"
                     : "DIFFERENT");
        if (k.number != 1 && T >= 512) {
            size_t bytes = k.saved(B, T, C, NH) + k.scratch(B, T, C, NH);
            check(&lab.checks, bytes <= 2 * B * NH * T * sizeof(float),
                  "%d %-7s T %zu: %zu bytes beside the activations, where the probabilities "
                  "would be %zu",
                  number, k.name, T, bytes, B * NH * T * T * sizeof(floatX));
        }
    }
    test_release(mark);
}

// Scores of thousands: the softmax is all but a choice, and nothing overflows.
static void test_large_scores(void) {
    const size_t B = 1, T = 72, C = 64, NH = 2, n = B * T * C;
    float *qkv = test_values(3 * n, 0, 60, 3), *dout = test_values(n, 0, 1, 4);
    floatX *device_qkv = to_device_floatX(qkv, 3 * n), *device_dout = to_device_floatX(dout, n);
    for (const Kernel &k : KERNELS) {
        if (!kernel_takes(&k, C / NH)) continue;
        Result r = run(&k, device_qkv, device_dout, B, T, C, NH);
        bool ok = true;
        for (size_t i = 0; i < n; i++) ok = ok && fabsf(r.out[i]) <= 60.5f;
        for (size_t i = 0; i < 3 * n; i++) ok = ok && isfinite(r.dqkv[i]);
        check(&lab.checks, ok, "%d %-7s scores of thousands", kernel_number(&k, B, T, C, NH),
              k.name);
    }
}

// ------------------------------------------------------------------------ grouped queries

typedef struct {
    floatX *out, *dqkv;           // [B,T,C], [B,T,NH + 2 KV,HS]
    const floatX *qkv, *dout;     // [B,T,NH + 2 KV,HS], [B,T,C]
    floatX *wide, *dwide;         // [B,T,3 NH,HS], of the copies
    float *lse, *dot;             // [B,NH,T]
    size_t B, T, C, NH, KV;
    FirstKeys keys;               // of the documents and windows below
    Dropout drop;
} Grouped;

// wide[N,3 NH,HS] from qkv[N,NH + 2 KV,HS]: a block a row.
__global__ void copy_heads(floatX *wide, const floatX *qkv, size_t NH, size_t KV, size_t HS) {
    floatX *to = wide + blockIdx.x * 3 * NH * HS;
    const floatX *from = qkv + blockIdx.x * (NH + 2 * KV) * HS;
    for (size_t i = threadIdx.x; i < 3 * NH * HS; i += blockDim.x) {
        size_t head = i / HS, part = head / NH,
               of = part ? NH + (part - 1) * KV + head % NH / (NH / KV) : head;
        to[i] = from[of * HS + i % HS];
    }
}

// Does the reverse for gradients: a sum over the copies.
__global__ void sum_heads(floatX *dqkv, const floatX *dwide, size_t NH, size_t KV, size_t HS) {
    floatX *to = dqkv + blockIdx.x * (NH + 2 * KV) * HS;
    const floatX *from = dwide + blockIdx.x * 3 * NH * HS;
    for (size_t i = threadIdx.x; i < (NH + 2 * KV) * HS; i += blockDim.x) {
        size_t head = i / HS, group = head < NH ? 1 : NH / KV;
        // The parts of k and v follow each other.
        size_t first = head < NH ? head : NH + (head - NH) * group;
        float sum = 0.0f;
        for (size_t j = 0; j < group; j++) sum += to_float(from[(first + j) * HS + i % HS]);
        to[i] = from_float<floatX>(sum);
    }
}

static void grouped_forward1(const void *problem, unsigned) {
    const Grouped *p = (const Grouped *)problem;
    LAUNCH(copy_heads, p->B * p->T, 256, lab.stream)(p->wide, p->qkv, p->NH, p->KV, p->C / p->NH);
    attention_forward(p->out, p->lse, p->wide, p->B, p->T, p->C, p->NH, lab.stream);
}
static void grouped_forward3(const void *problem, unsigned) {
    const Grouped *p = (const Grouped *)problem;
    attention_forward(p->out, p->lse, p->qkv, p->B, p->T, p->C, p->NH, lab.stream, Dropout(),
                      p->KV);
}
static void grouped_backward1(const void *problem, unsigned) {
    const Grouped *p = (const Grouped *)problem;
    attention_backward(p->dwide, p->dot, p->dout, p->out, p->lse, p->wide, p->B, p->T, p->C,
                       p->NH, lab.stream);
    LAUNCH(sum_heads, p->B * p->T, 256, lab.stream)(p->dqkv, p->dwide, p->NH, p->KV, p->C / p->NH);
}
static void grouped_backward3(const void *problem, unsigned) {
    const Grouped *p = (const Grouped *)problem;
    attention_backward(p->dqkv, p->dot, p->dout, p->out, p->lse, p->qkv, p->B, p->T, p->C, p->NH,
                       lab.stream, Dropout(), p->KV);
}

[[maybe_unused]] static void grouped_forward2(const void *problem, unsigned) {
    const Grouped *p = (const Grouped *)problem;
    Attention a = attention_of(p->qkv, p->B, p->T, p->C, p->NH, p->KV);
    a.out = p->out, a.lse = p->lse;
    wgmma_launch(a, false);
}
[[maybe_unused]] static void grouped_backward2(const void *problem, unsigned) {
    const Grouped *p = (const Grouped *)problem;
    Attention a = attention_of(p->qkv, p->B, p->T, p->C, p->NH, p->KV);
    a.y = p->out, a.lse = p->lse, a.dout = p->dout, a.dot = p->dot;
    a.dq = p->dqkv, a.dk = a.dq + p->C, a.dv = a.dk + p->KV * a.HS;
    wgmma_launch(a, true);
}

static const LabKernel GROUPED_FORWARD[] = {
    {"grouped attention", 1, "k and v copied for every head of q", grouped_forward1, 1},
#ifdef PRECISION_BF16
    {"grouped attention", 2, "asynchronous products and copies of sm_90", grouped_forward2, 1},
#endif
    {"grouped attention", 3, "without copies (llmc)", grouped_forward3, 1},
};
static const LabKernel GROUPED_BACKWARD[] = {
    {"grouped attention backward", 1, "of the copies, then their sum", grouped_backward1, 1},
#ifdef PRECISION_BF16
    {"grouped attention backward", 2, "asynchronous products and copies of sm_90",
     grouped_backward2, 1},
#endif
    {"grouped attention backward", 3, "a block of keys goes over its group's heads (llmc)",
     grouped_backward3, 1},
};

// True if a row of these can, on this machine.
static bool grouped_takes(const LabKernel *k, size_t HS) {
    return k->number != 2 || ((HS == 64 || HS == 128) && wgmma_runs());
}

static Grouped make_grouped(size_t B, size_t T, size_t NH, size_t KV, size_t HS) {
    Grouped p = {NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, B, T, NH * HS, NH, KV,
                 FirstKeys(), Dropout()};
    p.out = test_floatX(B * T * p.C), p.dqkv = test_floatX(B * T * (NH + 2 * KV) * HS);
    p.wide = test_floatX(3 * B * T * p.C), p.dwide = test_floatX(3 * B * T * p.C);
    p.lse = test_floats(B * NH * T), p.dot = test_floats(B * NH * T);
    return p;
}

static double grouped_worst[2][LAB_COUNT(GROUPED_FORWARD)];

// Compares with the plain loops on copies of k and v, whose gradients are summed in double.
static void check_grouped(size_t B, size_t T, size_t NH, size_t KV, size_t HS) {
    size_t mark = test_count, N = B * T, C = NH * HS, heads = NH + 2 * KV, group = NH / KV;
    Grouped p = make_grouped(B, T, NH, KV, HS);
    float *qkv = test_values(N * heads * HS, 0, 1.5, 1), *dout = test_values(N * C, 0, 1, 2);
    float *wide = (float *)test_memory(3 * N * C * sizeof(float));
    double *dqkv = test_doubles(N * heads * HS);
    p.qkv = to_device_floatX(qkv, N * heads * HS), p.dout = to_device_floatX(dout, N * C);
    for (size_t i = 0; i < 3 * N * C; i++) {
        size_t n = i / (3 * C), head = i % (3 * C) / HS, part = head / NH;
        wide[i] =
            qkv[(n * heads + (part ? NH + (part - 1) * KV + head % NH / group : head)) * HS +
                i % HS];
    }
    Want want = want_of(wide, dout, B, T, C, NH, Dropout());
    for (size_t i = 0; i < 3 * N * C; i++) {
        size_t n = i / (3 * C), head = i % (3 * C) / HS, part = head / NH;
        dqkv[(n * heads + (part ? NH + (part - 1) * KV + head % NH / group : head)) * HS +
             i % HS] += want.dqkv[i];
    }
    for (size_t k = 0; k < LAB_COUNT(GROUPED_FORWARD); k++) {
        if (!grouped_takes(&GROUPED_FORWARD[k], HS)) continue;
        GROUPED_FORWARD[k].run(&p, 1);
        GROUPED_BACKWARD[k].run(&p, 1);
        double forward = test_error_floatX(p.out, want.out, N * C, lab.stream);
        double backward = test_error_floatX(p.dqkv, dqkv, N * heads * HS, lab.stream);
        grouped_worst[0][k] = fmax(grouped_worst[0][k], forward);
        grouped_worst[1][k] = fmax(grouped_worst[1][k], backward);
    }
    test_release(mark);
}

static void check_groups(void) {
    check_grouped(2, 33, 6, 3, 9);    // nothing divides
    check_grouped(1, 70, 4, 1, 64);   // one head of k and v for all (MQA)
    check_grouped(2, 65, 8, 2, 32);
    check_grouped(1, 129, 4, 2, 128);
    if (wgmma_runs()) {  // the bounds of fp32 are for fewer keys
        check_grouped(2, 200, 6, 2, 64);
        check_grouped(1, 300, 3, 1, 128);  // more tiles than a ring of 128 has
    }
    for (int pass = 0; pass < 2; pass++) {
        for (size_t k = 0; k < LAB_COUNT(GROUPED_FORWARD); k++) {
            if (!grouped_takes(&GROUPED_FORWARD[k], 64)) continue;
            lab_check(&lab, pass ? &GROUPED_BACKWARD[k] : &GROUPED_FORWARD[k],
                      grouped_worst[pass][k], pass ? BOUND_GRAD : BOUND_OUT);
        }
    }
}

// Times the layer of Llama 3.2 1B: 32 heads of 64 channels, and 8 of k and v.
static void bench_groups(void) {
    Grouped p = lab.cpu ? make_grouped(1, 64, 32, 8, 64) : make_grouped(4, 2048, 32, 8, 64);
    p.qkv = lab_fill(&lab, p.B * p.T * (p.C + 2 * p.KV * 64)),
    p.dout = lab_fill(&lab, p.B * p.T * p.C);
    KernelWork forward = lab_stated(&lab, LAB_LAST(GROUPED_FORWARD), &p);
    KernelWork backward = lab_stated(&lab, LAB_LAST(GROUPED_BACKWARD), &p);
    for (const LabKernel &k : GROUPED_FORWARD)
        if (grouped_takes(&k, 64)) lab_bench(&lab, &k, &p, forward, 0.0);
    if (!lab.list)
        grouped_forward1(&p, 1);  // the copies that backward 1 reads, where --kernel left it out
    for (const LabKernel &k : GROUPED_BACKWARD)
        if (grouped_takes(&k, 64)) lab_bench(&lab, &k, &p, backward, 0.0);
}

// -------------------------------------------------------------------- documents and windows

// One row a thread.
static void first_lanes(const Grouped *p, bool backward) {
    AttentionFirst a = {};
    (Attention &)a = attention_of(p->qkv, p->B, p->T, p->C, p->NH, p->KV);
    a.first = p->keys.first;
    a.out = p->out, a.y = p->out, a.lse = p->lse, a.dout = p->dout, a.dot = p->dot;
    a.dq = p->dqkv, a.dk = a.dq + p->C, a.dv = a.dk + p->KV * a.HS;
    attention_capacity<32, 64, 128>(a.HS, [&](auto capacity) {
        typedef AttentionRows<decltype(capacity)::value, AttentionFirst> A;
        by_dropout(p->drop, [&](auto drops) {
            attention_rows<A, drops>(a, p->drop, backward, lab.stream);
        });
    });
}
static void first_forward1(const Grouped *p, unsigned) { first_lanes(p, false); }
static void first_backward1(const Grouped *p, unsigned) { first_lanes(p, true); }
static void first_forward2(const Grouped *p, unsigned) {
    attention_first_forward(p->out, p->lse, p->qkv, p->keys, p->B, p->T, p->C, p->NH, lab.stream,
                            p->drop, p->KV);
}
static void first_backward2(const Grouped *p, unsigned) {
    attention_first_backward(p->dqkv, p->dot, p->dout, p->out, p->lse, p->qkv, p->keys, p->B, p->T,
                             p->C, p->NH, lab.stream, p->drop, p->KV);
}

static const LabKernel FIRST_FORWARD[] = {
    {"attention, documents", 1, "several threads a row", first_forward1, 1},
    {"attention, documents", 2, "tiles of other documents are skipped (llmc)", first_forward2, 1},
};
static const LabKernel FIRST_BACKWARD[] = {
    {"attention backward, documents", 1, "several threads a row", first_backward1, 1},
    {"attention backward, documents", 2, "tiles of other documents are skipped (llmc)",
     first_backward2, 1},
};
static double first_worst[2][LAB_COUNT(FIRST_FORWARD)];

// Writes the first keys of B sequences: documents of random lengths up to `longest` (1: of one
// token each; 0: whole sequences), and windows of W keys (0: none).
static FirstKeys first_keys(int *host, size_t B, size_t T, size_t longest, size_t W) {
    FirstKeys keys = {NULL, 0};
    int *tokens = (int *)test_memory(T * sizeof(int));
    for (size_t b = 0; b < B; b++) {
        for (size_t t = 0, next = 0; t < T; t++) {
            tokens[t] = longest > 0 && t == next;
            double length = 1 + random_uniform(11, RANDOM_INIT, 0, b, t) * (double)longest;
            if (tokens[t]) next = t + (size_t)length;
        }
        document_keys(host + b * T, tokens, T, 1);
        keys.scores += window_keys(host + b * T, host + b * T, T, W);
    }
    int *device = (int *)test_device(B * T * sizeof(int));
    CUDA_CHECK(cudaMemcpy(device, host, B * T * sizeof(int), cudaMemcpyHostToDevice));
    keys.first = device;
    return keys;
}

static void check_first(size_t B, size_t T, size_t NH, size_t HS, size_t longest, size_t W,
                        bool drop) {
    size_t mark = test_count, n = B * T * NH * HS;
    Grouped p = make_grouped(B, T, NH, NH, HS);
    float *qkv = test_values(3 * n, 0, 1.5, 1), *dout = test_values(n, 0, 1, 2);
    int *first = (int *)test_memory(B * T * sizeof(int));
    p.qkv = to_device_floatX(qkv, 3 * n), p.dout = to_device_floatX(dout, n);
    p.keys = first_keys(first, B, T, longest, W);
    if (drop) p.drop = dropout_for(dropout_make(0.3, 7, 2, 9), DROPOUT_SCORES, 3);
    Want want = want_of(qkv, dout, B, T, p.C, NH, p.drop, first);
    for (size_t k = 0; k < LAB_COUNT(FIRST_FORWARD); k++) {
        if (k == 0 && HS > 128) continue;
        FIRST_FORWARD[k].run(&p, 1);
        FIRST_BACKWARD[k].run(&p, 1);
        double forward = test_error_floatX(p.out, want.out, n, lab.stream);
        double backward = test_error_floatX(p.dqkv, want.dqkv, 3 * n, lab.stream);
        check(&lab.checks, forward <= BOUND_OUT && backward <= BOUND_GRAD,
              "%zu first   B %zu T %4zu NH %zu HS %3zu, documents of up to %zu, window %zu%s: "
              "forward %.1e, backward %.1e",
              k + 1, B, T, NH, HS, longest, W, drop ? ", dropout" : "", forward, backward);
        first_worst[0][k] = fmax(first_worst[0][k], forward);
        first_worst[1][k] = fmax(first_worst[1][k], backward);
    }
    test_release(mark);
}

static void check_firsts(void) {
    check_first(2, 37, 2, 9, 12, 0, true);  // nothing divides
    check_first(2, 40, 1, 24, 1, 0, false);   // a query sees itself alone
    check_first(2, 150, 2, 64, 70, 0, true);
    check_first(2, 200, 1, 64, 90, 0, false);  // groups of 16 rows that begin behind a tile
    check_first(1, 260, 1, 64, 0, 67, false);
    check_first(1, 131, 1, 128, 60, 33, false);
    check_first(1, 131, 1, 128, 0, 1, true);
    check_first(1, 70, 1, 256, 20, 0, false);
    for (int pass = 0; pass < 2; pass++)
        for (size_t k = 0; k < LAB_COUNT(FIRST_FORWARD); k++)
            lab_check(&lab, pass ? &FIRST_BACKWARD[k] : &FIRST_FORWARD[k], first_worst[pass][k],
                      pass ? BOUND_GRAD : BOUND_OUT);
}

// Times the same sequences with all keys, with a window, and as documents.
static void bench_firsts(void) {
    size_t B = lab.cpu ? 1 : 4, T = lab.cpu ? 512 : 4096, NH = lab.cpu ? 1 : 16, W = T / 8;
    static const char *const names[2][3] = {
        {"attention, all keys", "attention, window of T/8", "attention, documents"},
        {"attention backward, all keys", "attention backward, window of T/8",
         "attention backward, documents"}};
    int *first = (int *)test_memory(B * T * sizeof(int));
    Grouped p = make_grouped(B, T, NH, NH, 64);
    p.qkv = lab_fill(&lab, 3 * B * T * p.C), p.dout = lab_fill(&lab, B * T * p.C);
    for (int kind = 0; kind < 3; kind++) {
        p.keys = first_keys(first, B, T, kind == 2 ? T / 4 : 0, kind == 1 ? W : 0);
        if (kind == 0) p.keys.first = NULL;
        for (int pass = 0; pass < 2; pass++) {
            LabKernel row = pass ? *LAB_LAST(FIRST_BACKWARD) : *LAB_LAST(FIRST_FORWARD);
            row.operation = names[pass][kind];
            row.name = "llmc";
            if (pass && !lab.list) first_forward2(&p, 1);  // fills out and lse
            lab_bench(&lab, &row, &p, lab_stated(&lab, &row, &p), 0.0);
        }
    }
}

// Times both passes of the kernels from number `from` on. operations: names of the rows, forward
// and backward.
static void bench_problem(Problem p, int from, const char *const operations[2]) {
    size_t n = p.B * p.T * p.C;
    p.qkv = lab_fill(&lab, 3 * n), p.dout = lab_fill(&lab, n), p.out = test_floatX(n),
    p.dqkv = test_floatX(3 * n);
    for (int pass = 0; pass < 2; pass++) {
        KernelWork must = KernelWork();
        for (int i = -1; i < KERNEL_COUNT; i++) {  // -1: what llmc's states
            const Kernel *k = i < 0 ? LAB_LAST(KERNELS) : &KERNELS[i];
            if (k->number < from || (!lab.list && !kernel_takes(k, p.C / p.NH))) continue;
            size_t mark = test_count;
            p.kernel = k;
            p.saved = test_device(k->saved(p.B, p.T, p.C, p.NH));
            p.scratch = test_device(k->scratch(p.B, p.T, p.C, p.NH));
            LabKernel row = pass ? backward_row(k) : forward_row(k);
            row.operation = operations[pass];
            if (pass) time_forward(&p, 0);  // fills out and saved
            if (i < 0) must = lab_stated(&lab, &row, &p);
            else lab_bench(&lab, &row, &p, must, 0.0);
            test_release(mark);
        }
    }
}

// Times one layer of GPT-2 124M, then heads of 128, as large models have, by the tensor cores
// alone.
static void bench(void) {
    static const char *const small[] = {"attention", "attention backward"};
    static const char *const large[] = {"attention, heads of 128",
                                        "attention backward, heads of 128"};
    Problem p = {NULL, NULL, NULL, NULL, NULL, NULL, NULL, 4, 64, 768, 12}, q = p;
    q.B = 1, q.C = 512, q.NH = 4;
    if (!lab.cpu) p.B = 16, p.T = 1024, q.B = 8, q.T = 2048, q.C = 4096, q.NH = 32;
    size_t mark = test_count;
    bench_problem(p, 1, small);
    test_release(mark);
    bench_problem(q, TENSOR, large);
    test_release(mark);
    bench_groups();
    bench_firsts();
}

// Checks dropout of the probabilities, by the same masks. The kernels have one row a thread (as on
// a GPU in fp32), 8 to 32 (as on a CPU), and llmc's choice (in bf16 the tensor cores). Each visits
// the masks' blocks in another order.
static void check_dropout(size_t B, size_t T, size_t NH, size_t HS) {
    dropping = dropout_for(dropout_make(0.3, 7, 2, 9), DROPOUT_SCORES, 3);
    dropping.head = 2;
    test_shape(B, T, NH * HS, NH, true);
    dropping = Dropout();
}

static void checks(void) {
    for (int i = 0; i < KERNEL_COUNT; i++) worst[i][0] = worst[i][1] = NAN;
    check_dropout(2, 37, 2, 9);  // nothing divides
    check_dropout(2, 37, 2, 24);
    check_dropout(2, 150, 3, 64);
    check_dropout(1, 70, 1, 96);
    check_dropout(1, 131, 2, 128);
    check_dropout(1, 70, 1, 160);
    check_dropout(1, 70, 1, 184);
    check_dropout(1, 67, 1, 256);
    test_shape(2, 1, 18, 3, true);     // heads of 6, of 18, of 8: nothing divides
    test_shape(3, 7, 18, 3, true);
    test_shape(2, 24, 18, 1, true);
    test_shape(2, 65, 16, 2, true);
    test_shape(1, 65, 96, 3, true);    // 32
    test_shape(2, 129, 128, 2, true);  // 64
    test_shape(1, 1, 64, 1, false);
    test_shape(1, 63, 48, 1, false);   // sizes between those that the kernels are made for
    test_shape(1, 70, 80, 1, false);
    test_shape(1, 81, 192, 2, false);
    test_shape(1, 97, 112, 1, false);
    test_shape(1, 67, 256, 2, true);
    test_shape(1, 70, 288, 2, true);   // 144, 160, 184, 256: registers hold part of a gradient
    test_shape(1, 130, 160, 1, false);
    test_shape(2, 33, 184, 1, false);
    test_shape(1, 67, 256, 1, true);
    test_shape(1, 40, 300, 1, false);  // more than 256
    test_shape(1, 514, 64, 1, false);
    // 64 and 128: few tiles, more than a ring has, a whole number of them.
    test_shape(1, 65, 64, 1, true);
    test_shape(1, 65, 128, 1, true);
    test_shape(1, 333, 128, 2, true);
    test_shape(1, 160, 256, 2, true);
    test_shape(2, 128, 256, 2, false);
    check_rows();
    check_groups();
    check_firsts();
    test_large_scores();
}

int main(int argc, char **argv) { return lab_main(&lab, argc, argv, checks, bench); }
