// encoder.cuh: token and position embedding: out[b, t] = wte[token] + wpe[t], and its
// gradient.
//
// defines: encoder_forward, encoder_backward
#ifndef LLMC_ENCODER_CUH
#define LLMC_ENCODER_CUH

#include "llmc/host/tokens.h"
#include "llmc/kernels/packs.cuh"

enum {
    ENCODER_OWNERS = 1024,  // blocks that share the vocabulary
    ENCODER_CHUNK = 1024,   // positions that a block looks at before it counts its own
    ENCODER_LIST = 2 * ENCODER_CHUNK,  // positions that a block keeps: a chunk fits behind
                                       // the positions that still have to be added
    ENCODER_BATCH = 8,                 // positions that a thread reads before it adds them
};

// Threads of a block of the backward pass. On the CPU one is enough, and meets no barrier.
static constexpr int ENCODER_THREADS = ROW_LANES == 1 ? 1 : 128;

// A warp per position.
template <int W>
__global__ void __launch_bounds__(ROW_THREADS)
    encoder_forward_kernel(floatX *out, const int *tokens, const floatX *wte,
                           const floatX *wpe, size_t N, size_t T, size_t C, size_t v_start,
                           size_t Vl, Tokens held) {
    size_t n = block_row();
    if (n >= N) return;
    // Wraps around, past every Vl, if the token is below v_start.
    size_t row = (size_t)tokens[n] - v_start;
    bool mine = row < Vl;
    const floatX *token = wte + (mine ? row * C : 0);
    const floatX *position = wpe ? wpe + tokens_position(held, n % T) * C : NULL;
    Share s = row_share(C / W);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float x[W] = {0.0f}, p[W];
        if (mine) load_floats<W>(x, token + i * W);
        if (position) {
            load_floats<W>(p, position + i * W);
            for (int k = 0; k < W; k++) x[k] += p[k];
        }
        store_floats<W>(out + n * C + i * W, x);
    }
}

// Appends to a block's list, in order, the positions of [first, end) whose token is the
// block's own, and their rows of the embedding. Returns the length of the list. At most
// ENCODER_CHUNK positions.
__device__ __forceinline__ int encoder_collect(int *list, unsigned *rows, int count,
                                               const int *tokens, size_t first, size_t end,
                                               unsigned v_start, unsigned Vl) {
    constexpr int EACH = ENCODER_CHUNK / ENCODER_THREADS;
    size_t begin = first + (size_t)threadIdx.x * EACH;
    size_t stop = begin + EACH < end ? begin + EACH : end;
    unsigned mine = 0;  // of this thread; a token below v_start wraps around, past every Vl
    for (size_t n = begin; n < stop; n++) {
        unsigned row = (unsigned)tokens[n] - v_start;
        mine += row < Vl && row % ENCODER_OWNERS == blockIdx.x;
    }
    unsigned before = 0, all = mine;  // of the threads before this one, and of all
    if constexpr (ENCODER_THREADS > 1) {
        __shared__ unsigned of_warp[32];
        unsigned warp = threadIdx.x / 32;
        before = lanes_before(mine);
        all = 0;
        if (threadIdx.x % 32 == 31) of_warp[warp] = before + mine;
        __syncthreads();
        for (unsigned w = 0; w < ENCODER_THREADS / 32; w++) {
            if (w < warp) before += of_warp[w];
            all += of_warp[w];
        }
    }
    for (size_t n = begin; n < stop && mine > 0; n++) {
        unsigned row = (unsigned)tokens[n] - v_start;
        if (row >= Vl || row % ENCODER_OWNERS != blockIdx.x) continue;
        list[count + (int)before] = (int)n;
        rows[count + (int)before] = row;
        before++;
        mine--;
    }
    if constexpr (ENCODER_THREADS > 1) __syncthreads();
    return count + (int)all;
}

// Adds x to sum. Keeps the rounding error in lost, and the next addition corrects it (Kahan
// 1965). A token may come ten thousands of times, and plain additions would lose a digit
// and more.
__host__ __device__ __forceinline__ void add_compensated(float *sum, float *lost, float x) {
    float y = x - *lost, all = *sum + y;
    *lost = (all - *sum) - y;
    *sum = all;
}

// Each block owns the embedding rows r with r % ENCODER_OWNERS == blockIdx.x. It lists the
// positions of their tokens. Then a thread for each pack of columns goes through the list
// with the sum in registers. It reads ENCODER_BATCH positions before it adds them, and so
// waits for memory once for all of them. It adds in order and without atomics. Rounding
// errors are dropped at the end of a row, and when the list is full.
template <int W>
__global__ void __launch_bounds__(ENCODER_THREADS)
    encoder_backward_wte_kernel(float *dwte, const floatX *dout, const int *tokens,
                                size_t N, size_t C, size_t v_start, size_t Vl) {
    __shared__ int list[ENCODER_LIST];
    __shared__ unsigned rows[ENCODER_LIST];
    int count = 0;
    for (size_t first = 0; first < N; first += ENCODER_CHUNK) {
        size_t end = first + ENCODER_CHUNK < N ? first + ENCODER_CHUNK : N;
        count = encoder_collect(list, rows, count, tokens, first, end, (unsigned)v_start,
                                (unsigned)Vl);
        if (count == 0 || (count <= (int)(ENCODER_LIST - ENCODER_CHUNK) && end < N))
            continue;
        for (size_t i = threadIdx.x * W; i < C; i += ENCODER_THREADS * W) {
            unsigned row = rows[0];
            float sum[W], lost[W] = {}, d[ENCODER_BATCH][W] = {};
            load_floats<W>(sum, dwte + row * C + i);
            for (int k = 0; k < count; k += ENCODER_BATCH) {
                UNROLL
                for (int j = 0; j < ENCODER_BATCH; j++)
                    if (k + j < count)
                        load_floats<W>(d[j], dout + (size_t)list[k + j] * C + i);
                UNROLL
                for (int j = 0; j < ENCODER_BATCH; j++) {
                    if (k + j >= count) break;
                    if (rows[k + j] != row) {
                        store_floats<W>(dwte + row * C + i, sum);
                        row = rows[k + j];
                        load_floats<W>(sum, dwte + row * C + i);
                        for (int e = 0; e < W; e++) lost[e] = 0.0f;
                    }
                    for (int e = 0; e < W; e++) add_compensated(&sum[e], &lost[e], d[j][e]);
                }
            }
            store_floats<W>(dwte + row * C + i, sum);
        }
        count = 0;
        if constexpr (ENCODER_THREADS > 1) __syncthreads();
    }
}

// A warp per position of the sequence, summing over the batch; positions without a row have
// no gradient.
template <int W>
__global__ void __launch_bounds__(ROW_THREADS)
    encoder_backward_wpe_kernel(float *dwpe, const floatX *dout, size_t B, size_t T,
                                size_t rows, size_t C, Tokens held, bool accumulate) {
    size_t position = block_row(), t = tokens_row(held, position, T);
    if (position >= rows) return;
    Share s = row_share(C / W);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float sum[W] = {0.0f}, lost[W] = {0.0f}, d[W];
        for (size_t b = 0; t < T && b < B; b++) {
            load_floats<W>(d, dout + (b * T + t) * C + i * W);
            for (int k = 0; k < W; k++) add_compensated(&sum[k], &lost[k], d[k]);
        }
        if (accumulate) {
            load_floats<W>(d, dwpe + position * C + i * W);
            for (int k = 0; k < W; k++) add_compensated(&sum[k], &lost[k], d[k]);
        }
        store_floats<W>(dwpe + position * C + i * W, sum);
    }
}

// Computes out[B, T, C] = wte[token - v_start] + wpe[position]. wte [Vl, C] holds
// vocabulary rows v_start .. v_start + Vl. A token outside of them contributes 0. wpe
// [maxT, C] is not added if NULL. held: the positions of the T rows.
static inline void encoder_forward(floatX *out, const int *tokens, const floatX *wte,
                                   const floatX *wpe, size_t B, size_t T, size_t C,
                                   size_t v_start, size_t Vl, cudaStream_t stream,
                                   Tokens held = Tokens()) {
    size_t N = B * T;
    // a row of wte and of out for each token; all B samples share the rows of wpe
    kernel_cost(KERNEL_RESIDUAL, N * C, (2 + (wpe ? 1 / (double)B : 0)) * sizeof(floatX),
                wpe ? 1 : 0);
    by_packs(C, [&](auto W) {
        LAUNCH(encoder_forward_kernel<W>, row_blocks(N), ROW_THREADS, stream)
        (out, tokens, wte, wpe, N, T, C, v_start, Vl, held);
    });
}

// Adds dout[B, T, C] to dwte[Vl, C] at the rows of its tokens, and to dwpe[maxT, C].
// Without accumulate_wpe it overwrites all rows of dwpe; rows without a position become 0.
// Either may be NULL.
static inline void encoder_backward(float *dwte, float *dwpe, const floatX *dout,
                                    const int *tokens, size_t B, size_t T, size_t C,
                                    size_t maxT, size_t v_start, size_t Vl,
                                    bool accumulate_wpe, cudaStream_t stream,
                                    Tokens held = Tokens()) {
    if (dwte) {
        // As if no token came twice.
        kernel_cost(KERNEL_ELEMENTWISE, B * T * C, 2 * sizeof(float) + sizeof(floatX), 1);
        by_packs(C, [&](auto W) {
            LAUNCH(encoder_backward_wte_kernel<W>, ENCODER_OWNERS, ENCODER_THREADS, stream)
            (dwte, dout, tokens, B * T, C, v_start, Vl);
        });
    }
    size_t rows = accumulate_wpe ? tokens_position(held, T - 1) + 1 : maxT;
    if (dwpe && rows > 0) {
        kernel_cost(KERNEL_ELEMENTWISE, B * T * C, sizeof(floatX), 1);
        kernel_cost(KERNEL_ELEMENTWISE, rows * C, (accumulate_wpe ? 2 : 1) * sizeof(float),
                    0);
        by_packs(C, [&](auto W) {
            LAUNCH(encoder_backward_wpe_kernel<W>, row_blocks(rows), ROW_THREADS, stream)
            (dwpe, dout, B, T, rows, C, held, accumulate_wpe);
        });
    }
}

#endif
