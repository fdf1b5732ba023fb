// rope.cuh: rotary position embedding (RoFormer, Su et al. 2021), in place on the heads of
// q and k.
// lesson: llama
//
// The first D of a head's HS channels are pairs (i, i + D/2), as Hugging Face has them.
// Pair i at position t turns by an angle. A table [T, D/2, 2] has its cosine and sine. The
// gradient turns back: sign -1.
//
// defines: rope
#ifndef LLMC_ROPE_CUH
#define LLMC_ROPE_CUH

#include "llmc/kernels/packs.cuh"

// A thread turns the same pairs of several rows.
static constexpr unsigned ROPE_THREADS = 128, ROPE_ROWS = 8;

template <int W>
__global__ void __launch_bounds__(ROPE_THREADS)
    rope_kernel(floatX *x, const float *table, size_t N, size_t T, unsigned heads,
                unsigned HS, unsigned D, size_t stride, float sign) {
    unsigned packs = D / 2 / W, i = blockIdx.x * ROPE_THREADS + threadIdx.x;
    if (i >= heads * packs) return;
    unsigned c = i % packs * W;
    for (size_t n = blockIdx.y; n < N; n += gridDim.y) {
        floatX *pair = x + n * stride + i / packs * HS + c;
        float a[W], b[W], turn[2 * W];
        load_floats<W>(a, pair);
        load_floats<W>(b, pair + D / 2);
        load_floats<2 * W>(turn, table + n % T * D + 2 * c);
        for (int k = 0; k < W; k++) {
            float cosine = turn[2 * k], sine = sign * turn[2 * k + 1], y = a[k];
            a[k] = y * cosine - b[k] * sine;
            b[k] = b[k] * cosine + y * sine;
        }
        store_floats<W>(pair, a);
        store_floats<W>(pair + D / 2, b);
    }
}

// Turns the first `heads` heads of each row of x[N, stride], rows in sequences of T, by
// sign (1 or -1) times the angles of table.
static inline void rope(floatX *x, const float *table, size_t N, size_t T, size_t heads,
                        size_t HS, size_t D, size_t stride, float sign,
                        cudaStream_t stream) {
    kernel_cost(KERNEL_ELEMENTWISE, N * heads * D, 2 * sizeof(floatX), 3);
    bool whole = HS % x128::size == 0 && stride % x128::size == 0;
    by_packs(whole ? D / 2 : 1, [&](auto W) {
        dim3 grid((unsigned)CEIL_DIV(heads * (D / 2 / W), (size_t)ROPE_THREADS),
                  row_strides(N, ROPE_ROWS));
        LAUNCH(rope_kernel<W>, grid, ROPE_THREADS, stream)
        (x, table, N, T, (unsigned)heads, (unsigned)HS, (unsigned)D, stride, sign);
    });
}

#endif
