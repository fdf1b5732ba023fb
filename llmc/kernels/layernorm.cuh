// layernorm.cuh: layer normalisation over the channels, alone and after the residual
// addition that precedes it. Its backward pass also adds the gradient of the residual.
//
// defines: Norm, norm_gain, Layernorm, layernorm_forward, layernorm_residual_forward,
//          residual_forward, layernorm_backward, reduce_scratch_floats
#ifndef LLMC_LAYERNORM_CUH
#define LLMC_LAYERNORM_CUH

#include "llmc/kernels/bias.cuh"
#include "llmc/kernels/dropout.cuh"
#include "llmc/kernels/packs.cuh"

#define LAYERNORM_EPSILON 1e-5f

// The norm that the kernels compute. RMSNorm (Zhang and Sennrich 2019): x weight /
// sqrt(mean(x^2) + epsilon), without a mean or a bias. NORM_1P: a layernorm that multiplies
// by weight + 1. Only GPT-2's blocks add a bias before the residual.
typedef enum { NORM_LAYER, NORM_RMS, NORM_1P } Norm;

// Returns the factor of a weight.
template <Norm NORM>
__device__ __forceinline__ float norm_gain(float weight) {
    return NORM == NORM_1P ? weight + 1.0f : weight;
}

// The results of a layernorm of N rows.
typedef struct {
    floatX *out;         // [N, C]
    float *mean, *rstd;  // [N] of each row, and 1 / its standard deviation
} Layernorm;

// Computes W elements of row n, from column c on: residual = inp1 + mask * (inp2 + bias),
// rounded once. Keeps them as the floats that a later read of residual gives.
template <int W, Norm NORM, bool DROP>
__device__ __forceinline__ void add_residual(float (&x)[W], floatX *residual,
                                             const floatX *inp1, const floatX *inp2,
                                             const floatX *bias, const Dropout &drop,
                                             size_t n, size_t c, size_t C) {
    [[maybe_unused]] float y[W], b[W];
    load_floats<W>(x, inp1 + n * C + c);
    load_floats<W>(y, inp2 + n * C + c);
    if constexpr (NORM == NORM_LAYER) {
        load_floats<W>(b, bias + c);
        for (int k = 0; k < W; k++) y[k] += b[k];
    }
    if constexpr (DROP) dropout_mask<W>(y, drop, n, c, C);
    for (int k = 0; k < W; k++) x[k] = (float)from_float<floatX>(x[k] + y[k]);
    store_floats<W>(residual + n * C + c, x);
}

// A warp per row. With inp1, the row is first made by add_residual; each thread reads back
// only what it wrote itself. The variance is of the centred values: no cancellation.
template <int W, Norm NORM, bool DROP>
__global__ void __launch_bounds__(ROW_THREADS)
    layernorm_forward_kernel(floatX *out, float *mean, float *rstd, floatX *residual,
                             const floatX *inp1, const floatX *inp2,
                             const floatX *inp2_bias, const floatX *weight,
                             const floatX *bias, size_t N, size_t C, float epsilon,
                             Dropout drop) {
    size_t n = block_row();
    if (n >= N) return;
    floatX *row = residual + n * C;
    Share s = row_share(C / W);
    float x[W], sums[W] = {0.0f};
    ROLLED
    for (size_t i = s.begin; i < s.end; i += s.step) {
        if (inp1)
            add_residual<W, NORM, DROP>(x, residual, inp1, inp2, inp2_bias, drop, n, i * W,
                                        C);
        else
            load_floats<W>(x, row + i * W);
        for (int k = 0; k < W; k++) sums[k] += x[k];
    }
    float m = NORM == NORM_RMS ? 0.0f : row_sum(sum_of<W>(sums)) / (float)C;
    for (int k = 0; k < W; k++) sums[k] = 0.0f;
    for (size_t i = s.begin; i < s.end; i += s.step) {
        load_floats<W>(x, row + i * W);
        for (int k = 0; k < W; k++) sums[k] += (x[k] - m) * (x[k] - m);
    }
    float r = 1.0f / sqrtf(row_sum(sum_of<W>(sums)) / (float)C + epsilon);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        [[maybe_unused]] float w[W], b[W];
        load_floats<W>(x, row + i * W);
        load_floats<W>(w, weight + i * W);
        if constexpr (NORM == NORM_RMS) {
            for (int k = 0; k < W; k++) x[k] = x[k] * r * w[k];
        } else {
            load_floats<W>(b, bias + i * W);
            for (int k = 0; k < W; k++)
                x[k] = (x[k] - m) * r * norm_gain<NORM>(w[k]) + b[k];
        }
        store_floats<W>(out + n * C + i * W, x);
    }
    if (row_lane() == 0) {
        mean[n] = m;
        rstd[n] = r;
    }
}

template <int W, Norm NORM, bool DROP>
__global__ void __launch_bounds__(ROW_THREADS)
    residual_forward_kernel(floatX *out, const floatX *inp1, const floatX *inp2,
                            const floatX *inp2_bias, size_t N, size_t C, Dropout drop) {
    size_t n = block_row();
    if (n >= N) return;
    Share s = row_share(C / W);
    float x[W];
    for (size_t i = s.begin; i < s.end; i += s.step)
        add_residual<W, NORM, DROP>(x, out, inp1, inp2, inp2_bias, drop, n, i * W, C);
}

// Computes residual[N, C] = inp1 + mask * (inp2 + inp2_bias[C]), rounded once to floatX, and
// ln = layernorm(residual as stored). residual may be inp1 or inp2. With inp1 NULL it is
// only read.
template <Norm NORM = NORM_LAYER>
static inline void layernorm_residual_forward(floatX *residual, const Layernorm &ln,
                                              const floatX *inp1, const floatX *inp2,
                                              const floatX *inp2_bias, const floatX *weight,
                                              const floatX *bias, size_t N, size_t C,
                                              cudaStream_t stream, Dropout drop,
                                              float epsilon = LAYERNORM_EPSILON) {
    if (inp1)
        kernel_cost(KERNEL_RESIDUAL_LAYERNORM, N * C, 4 * sizeof(floatX), 10);
    else
        kernel_cost(KERNEL_LAYERNORM_FORWARD, N * C, 2 * sizeof(floatX), 8);
    by_packs<ELEMENT_PACK>(C, [&](auto W) {
        by_dropout(drop, [&](auto drops) {
            LAUNCH((layernorm_forward_kernel<W, NORM, drops>), row_blocks(N), ROW_THREADS,
                   stream)
            (ln.out, ln.mean, ln.rstd, residual, inp1, inp2, inp2_bias, weight, bias, N, C,
             epsilon, drop);
        });
    });
}

// Computes ln.out[N, C] = (inp - mean) * rstd * weight + bias by rows. Keeps mean[N] and
// rstd[N] for the backward pass.
template <Norm NORM = NORM_LAYER>
static inline void layernorm_forward(const Layernorm &ln, const floatX *inp,
                                     const floatX *weight, const floatX *bias, size_t N,
                                     size_t C, cudaStream_t stream,
                                     float epsilon = LAYERNORM_EPSILON) {
    layernorm_residual_forward<NORM>((floatX *)inp, ln, NULL, NULL, NULL, weight, bias, N,
                                     C, stream, Dropout(), epsilon);
}

// Does the first half of layernorm_residual_forward alone, with the same bits.
template <Norm NORM = NORM_LAYER>
static inline void residual_forward(floatX *out, const floatX *inp1, const floatX *inp2,
                                    const floatX *inp2_bias, size_t N, size_t C,
                                    cudaStream_t stream, Dropout drop) {
    kernel_cost(KERNEL_RESIDUAL, N * C, 3 * sizeof(floatX), 2);
    by_packs<ELEMENT_PACK>(C, [&](auto W) {
        by_dropout(drop, [&](auto drops) {
            LAUNCH((residual_forward_kernel<W, NORM, drops>), row_blocks(N), ROW_THREADS,
                   stream)
            (out, inp1, inp2, inp2_bias, N, C, drop);
        });
    });
}

enum {
    LAYERNORM_MAX_BLOCKS = 264,  // two for each multiprocessor of an H100
    // Most threads of a block, of which one at least fits on a multiprocessor.
    LAYERNORM_THREADS = 768,
};

// The arguments of the two kernels of the first stage.
typedef struct {
    floatX *dinp;
    float *partials;  // [blocks, 2, C]
    const floatX *dresidual, *dout, *inp, *weight;
    const float *mean, *rstd;
    size_t N, C, rows;  // rows of a block
} LayernormBackward;

// First stage of the backward pass. A block takes a.rows rows and leaves the sums of their
// columns in its row of the partials: dweight and dbias. This form serves any C. Its threads
// share a row, and read it again once its sums are known. Each adds its own columns to the
// partials.
template <int W, Norm NORM>
__global__ void __launch_bounds__(LONG_ROW_THREADS)
    layernorm_backward_kernel(LayernormBackward a) {
    const size_t C = a.C;
    float *dweight = a.partials + (size_t)blockIdx.x * 2 * C, *dbias = dweight + C;
    size_t first = (size_t)blockIdx.x * a.rows;
    size_t end = a.N - first < a.rows ? a.N : first + a.rows;
    Share s = share_of(C / W, threadIdx.x, LONG_ROW_THREADS);
    for (size_t n = first; n < end; n++) {
        const floatX *x_row = a.inp + n * C, *dout_row = a.dout + n * C;
        float m = NORM == NORM_RMS ? 0.0f : a.mean[n], r = a.rstd[n];
        float x[W], d[W], w[W], sums[W] = {0.0f}, dots[W] = {0.0f};
        for (size_t i = s.begin; i < s.end; i += s.step) {
            float dw[W] = {0.0f}, db[W] = {0.0f};
            if (n > first) {
                load_floats<W>(dw, dweight + i * W);
                load_floats<W>(db, dbias + i * W);
            }
            load_floats<W>(x, x_row + i * W);
            load_floats<W>(d, dout_row + i * W);
            load_floats<W>(w, a.weight + i * W);
            for (int k = 0; k < W; k++) {
                float normal = (x[k] - m) * r, dnormal = d[k] * norm_gain<NORM>(w[k]);
                dw[k] += d[k] * normal;
                db[k] += d[k];
                sums[k] += dnormal;
                dots[k] += dnormal * normal;
            }
            store_floats<W>(dweight + i * W, dw);
            store_floats<W>(dbias + i * W, db);
        }
        float sum = sum_of<W>(sums), dot = sum_of<W>(dots);
        if constexpr (LONG_ROW_THREADS > 1) {
            sum = block_sum(sum);
            dot = block_sum(dot);
        }
        sum = NORM == NORM_RMS ? 0.0f : sum / (float)C;
        dot /= (float)C;
        for (size_t i = s.begin; i < s.end; i += s.step) {
            float y[W];
            load_floats<W>(x, x_row + i * W);
            load_floats<W>(d, dout_row + i * W);
            load_floats<W>(w, a.weight + i * W);
            for (int k = 0; k < W; k++)
                x[k] = (d[k] * norm_gain<NORM>(w[k]) - sum - (x[k] - m) * r * dot) * r;
            if (a.dresidual) {
                load_floats<W>(y, a.dresidual + n * C + i * W);
                for (int k = 0; k < W; k++) x[k] += y[k];
            }
            store_floats<W>(a.dinp + n * C + i * W, x);
        }
    }
}

// A pack of a row, which may still be on its way from memory. It has words because a
// compiler unpacks elements right behind the load, and so waits for them there.
typedef struct {
    Packed128<uint32_t> x, d, y;  // of inp, dout and dresidual
    float mean, rstd;
} LayernormPack;

__device__ __forceinline__ void unpack(float *out, const Packed128<uint32_t> &words) {
    x128 pack;
    memcpy(&pack, &words, sizeof pack);
    unpack(out, pack);
}

// Does the same if a block's threads can keep all sums in registers, PACKS packs of a row
// each. One pack is read once, and before the barrier of the row before it. Several packs
// leave no registers to keep a row until its sums are known, so the second read takes them
// from the cache. The block has blockDim.y groups of blockDim.x threads, and each group
// takes a row at a time. They meet at a barrier for each row. Their sums are added at the
// end.
template <int W, int PACKS, Norm NORM>
__global__ void __launch_bounds__(PACKS == 1 ? LAYERNORM_THREADS : 512)
    layernorm_backward_columns_kernel(LayernormBackward a) {
    // Sums of all groups but the first.
    alignas(16) __shared__ float of_groups[PACKS == 1 ? LAYERNORM_THREADS * W : W];
    // Sums of two rows, so that one barrier a row does.
    __shared__ float of_warp[2][2][LAYERNORM_THREADS / 32];
    const unsigned warps = blockDim.x / 32, first_warp = threadIdx.y * warps;
    const unsigned lane = threadIdx.x % 32;
    const unsigned columns = (unsigned)a.C, stride = blockDim.x * W;
    unsigned first = blockIdx.x * (unsigned)a.rows, rows = (unsigned)a.N - first;
    if (rows > a.rows) rows = (unsigned)a.rows;
    const auto read = [&](unsigned row, int p) {
        LayernormPack pack = {};
        unsigned column = threadIdx.x * W + p * stride;
        if (row >= rows || column >= columns) return pack;
        size_t n = first + row, at = n * columns + column;
        pack.x = load128((const uint32_t *)(a.inp + at));
        pack.d = load128((const uint32_t *)(a.dout + at));
        if (a.dresidual) pack.y = load128((const uint32_t *)(a.dresidual + at));
        pack.mean = NORM == NORM_RMS ? 0.0f : a.mean[n];
        pack.rstd = a.rstd[n];
        return pack;
    };
    const auto normalise = [](float x, const LayernormPack &pack) {
        return (NORM == NORM_RMS ? x : x - pack.mean) * pack.rstd;
    };
    float dw[PACKS][W] = {}, db[PACKS][W] = {}, x[W], d[W], y[W], w[W];
    LayernormPack next = {}, now[PACKS] = {};
    if (PACKS == 1) next = read(threadIdx.y, 0);
    for (unsigned row = threadIdx.y, stage = 0; row < rows + threadIdx.y;
         row += blockDim.y, stage ^= 1) {
        float sum = 0.0f, dot = 0.0f;
        UNROLL
        for (int p = 0; p < PACKS; p++) {
            unsigned column = threadIdx.x * W + p * stride;
            if (row >= rows || column >= columns) continue;
            now[p] = PACKS == 1 ? next : read(row, p);
            unpack(x, now[p].x);
            unpack(d, now[p].d);
            load_floats<W>(w, a.weight + column);
            for (int k = 0; k < W; k++) {
                float normal = normalise(x[k], now[p]);
                float dnormal = d[k] * norm_gain<NORM>(w[k]);
                dw[p][k] += d[k] * normal;
                db[p][k] += d[k];
                sum += dnormal;
                dot += dnormal * normal;
            }
        }
        if (PACKS == 1) next = read(row + blockDim.y, 0);
        sum = warp_sum(sum);
        dot = warp_sum(dot);
        if (lane == 0) of_warp[stage][0][first_warp + threadIdx.x / 32] = sum;
        if (lane == 0) of_warp[stage][1][first_warp + threadIdx.x / 32] = dot;
        __syncthreads();
        sum = dot = 0.0f;
        for (unsigned i = 0; i < warps; i++) {
            sum += of_warp[stage][0][first_warp + i];
            dot += of_warp[stage][1][first_warp + i];
        }
        sum = NORM == NORM_RMS ? 0.0f : sum / (float)a.C;
        dot /= (float)a.C;
        UNROLL
        for (int p = 0; p < PACKS; p++) {
            unsigned column = threadIdx.x * W + p * stride;
            if (row >= rows || column >= columns) continue;
            if (PACKS > 1) now[p] = read(row, p);
            unpack(x, now[p].x);
            unpack(d, now[p].d);
            unpack(y, now[p].y);
            load_floats<W>(w, a.weight + column);
            for (int k = 0; k < W; k++)
                y[k] +=
                    (d[k] * norm_gain<NORM>(w[k]) - sum - normalise(x[k], now[p]) * dot) *
                    now[p].rstd;
            store_floats<W>(a.dinp + (size_t)(first + row) * columns + column, y);
        }
    }
    float *partial = a.partials + (size_t)blockIdx.x * 2 * a.C;
    for (int which = 0; which < 2; which++) {
        UNROLL
        for (int p = 0; p < PACKS; p++) {
            float sums[W], other[W];
            for (int k = 0; k < W; k++) sums[k] = which == 0 ? dw[p][k] : db[p][k];
            if (blockDim.y > 1) {
                __syncthreads();
                if (threadIdx.y > 0)
                    store_floats<W>(
                        of_groups + ((threadIdx.y - 1) * blockDim.x + threadIdx.x) * W,
                        sums);
                __syncthreads();
            }
            unsigned column = threadIdx.x * W + p * stride;
            if (threadIdx.y > 0 || column >= columns) continue;
            for (unsigned g = 1; g < blockDim.y; g++) {
                load_floats<W>(other, of_groups + ((g - 1) * blockDim.x + threadIdx.x) * W);
                for (int k = 0; k < W; k++) sums[k] += other[k];
            }
            store_floats<W>(partial + which * a.C + column, sums);
        }
    }
}

// Returns the rows of a block of the first stage.
static inline size_t layernorm_backward_rows(size_t N) {
    return bias_chunk_rows(N, LAYERNORM_MAX_BLOCKS);
}

// Returns the floats of scratch, aligned to 16 bytes, that any sum over N rows in a layer's
// backward pass needs. These are sums of layernorms and biases of C columns, and of biases
// of up to F.
static inline size_t reduce_scratch_floats(size_t N, size_t C, size_t F) {
    size_t most = CEIL_DIV(N, layernorm_backward_rows(N)) * 2 * C;
    size_t bias = bias_backward_scratch(N, F > C ? F : C);
    return bias > most ? bias : most;
}

template <int W, int PACKS, Norm NORM>
static inline void layernorm_backward_columns(const LayernormBackward &a, unsigned blocks,
                                              cudaStream_t stream) {
    unsigned x = (unsigned)CEIL_DIV(a.C / W, (size_t)PACKS * 32) * 32;
    unsigned y = LAYERNORM_THREADS / x;
    // Two blocks of half as many threads wait at barriers of their own: one loads meanwhile.
    if (y % 2 == 0) y /= 2;
    if (PACKS > 1) y = 1;
    if (y > a.rows) y = (unsigned)a.rows;
    LAUNCH((layernorm_backward_columns_kernel<W, PACKS, NORM>), blocks, dim3(x, y), stream)
    (a);
}

// Computes dinp[N, C] = dresidual (if not NULL; it may be dinp) + the gradient of layernorm
// with respect to inp. dout may be dinp as well. Overwrites dweight[C] and dbias[C], or adds
// to them with accumulate. A norm without a bias has dbias NULL. scratch:
// reduce_scratch_floats(N, C, C).
template <Norm NORM = NORM_LAYER>
static inline void layernorm_backward(floatX *dinp, float *dweight, float *dbias,
                                      float *scratch, const floatX *dresidual,
                                      const floatX *dout, const floatX *inp,
                                      const floatX *weight, const Layernorm &ln, size_t N,
                                      size_t C, bool accumulate, cudaStream_t stream) {
    constexpr int W = ELEMENT_PACK;
    size_t rows = layernorm_backward_rows(N);
    unsigned blocks = (unsigned)CEIL_DIV(N, rows);
    LayernormBackward a = {dinp,    scratch, dresidual, dout, inp, weight,
                           ln.mean, ln.rstd, N,         C,    rows};
    kernel_cost(KERNEL_LAYERNORM_BACKWARD, N * C, (dresidual ? 4 : 3) * sizeof(floatX), 17);
    bool columns = ROW_LANES > 1 && C % W == 0;
    if (columns && C <= W * LAYERNORM_THREADS)
        layernorm_backward_columns<W, 1, NORM>(a, blocks, stream);
    else if (columns && C <= W * 3 * 512)
        layernorm_backward_columns<W, 3, NORM>(a, blocks, stream);
    else
        by_packs<W>(C, [&](auto width) {
            LAUNCH((layernorm_backward_kernel<width, NORM>), blocks, LONG_ROW_THREADS,
                   stream)
            (a);
        });
    column_sums(dweight, dbias, scratch, blocks, 2 * C, C, accumulate, stream);
}

#endif
