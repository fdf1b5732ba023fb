// context.cuh: sequences cut over c ranks: rows in the order of Ulysses' all-to-all.
// lesson: context
//
// defines: tokens_of, heads_cut, heads_join, tokens_join, tokens_cut
#ifndef LLMC_CONTEXT_CUH
#define LLMC_CONTEXT_CUH

#include "llmc/host/tokens.h"
#include "llmc/kernels/packs.cuh"
#include "llmc/kernels/shares.cuh"

// The T/c tokens of rank i of c: the i-th part, or (zigzag) chunks i and 2c-1-i of 2c, so that a causal mask leaves all
// ranks as much work.
RANDOM_FUNCTION Tokens tokens_of(size_t T, size_t c, size_t i, bool zigzag) {
    size_t half = zigzag ? T / c / 2 : 0;
    Tokens tokens = {half, {i * half, zigzag ? (2 * c - 2 - i) * half : i * (T / c)}};
    return tokens;
}

// ---- Ulysses (Jacobs et al. 2023) -----------------------------------------------------------------------------------

// Moves W elements, of one kind, without arithmetic.
template <int W>
__device__ __forceinline__ void move(floatX *to, const floatX *from) {
    if constexpr (W == (int)x128::size) store128(to, load128(from));
    else *to = *from;
}

// apart[c, N, parts, A/c] <-> joined[N, parts, A]: the channels of each rank's heads, and those of all heads.
template <int W>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    heads_kernel(floatX *to, const floatX *from, size_t N, size_t parts, size_t A, size_t c, bool join) {
    Share s = element_share<W>(N * parts * A);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        size_t joined = i * W, row = joined / A, channel = joined % A, width = A / c;
        size_t apart = (channel / width * N * parts + row) * width + channel % width;
        move<W>(to + (join ? joined : apart), from + (join ? apart : joined));
    }
}

static inline void heads_move(floatX *to, const floatX *from, size_t N, size_t parts, size_t A, size_t c, bool join,
                              cudaStream_t stream) {
    kernel_cost(KERNEL_ELEMENTWISE, N * parts * A, 2 * sizeof(floatX), 0);
    by_packs(A / c, [&](auto width) {
        constexpr int W = width;
        LAUNCH(heads_kernel<W>, element_blocks(N * parts * A), ELEMENT_THREADS, 0, stream)
        (to, from, N, parts, A, c, join);
    });
}

// Writes joined[N, parts, A] as apart[c, N, parts, A/c]: what goes to each of c ranks, which has 1/c of the heads.
static inline void heads_cut(floatX *apart, const floatX *joined, size_t N, size_t parts, size_t A, size_t c,
                             cudaStream_t stream) {
    heads_move(apart, joined, N, parts, A, c, false, stream);
}

// The reverse, of what came from each rank.
static inline void heads_join(floatX *joined, const floatX *apart, size_t N, size_t parts, size_t A, size_t c,
                              cudaStream_t stream) {
    heads_move(joined, apart, N, parts, A, c, true, stream);
}

// apart[c, B, T/c, width] <-> joined[B, T, width]: the rows of each rank, and those of all ranks by their position.
template <int W>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    tokens_kernel(floatX *to, const floatX *from, size_t B, size_t T, size_t width, size_t c, bool zigzag, bool join) {
    Share s = element_share<W>(B * T * width);
    size_t held = T / c;
    for (size_t i = s.begin; i < s.end; i += s.step) {
        size_t apart = i * W, row = apart / width, of_rank = row / (B * held), b = row / held % B;
        size_t position = tokens_position(tokens_of(T, c, of_rank, zigzag), row % held);
        size_t joined = (b * T + position) * width + apart % width;
        move<W>(to + (join ? joined : apart), from + (join ? apart : joined));
    }
}

static inline void tokens_move(floatX *to, const floatX *from, size_t B, size_t T, size_t width, size_t c, bool zigzag,
                               bool join, cudaStream_t stream) {
    kernel_cost(KERNEL_ELEMENTWISE, B * T * width, 2 * sizeof(floatX), 0);
    by_packs(width, [&](auto pack) {
        constexpr int W = pack;
        LAUNCH(tokens_kernel<W>, element_blocks(B * T * width), ELEMENT_THREADS, 0, stream)
        (to, from, B, T, width, c, zigzag, join);
    });
}

// Writes apart[c, B, T/c, width], which came from c ranks, as joined[B, T, width].
static inline void tokens_join(floatX *joined, const floatX *apart, size_t B, size_t T, size_t width, size_t c,
                               bool zigzag, cudaStream_t stream) {
    tokens_move(joined, apart, B, T, width, c, zigzag, true, stream);
}

// The reverse: what goes to each rank.
static inline void tokens_cut(floatX *apart, const floatX *joined, size_t B, size_t T, size_t width, size_t c,
                              bool zigzag, cudaStream_t stream) {
    tokens_move(apart, joined, B, T, width, c, zigzag, false, stream);
}

#endif
