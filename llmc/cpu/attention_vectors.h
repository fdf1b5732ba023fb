// attention_vectors.h: rows of attention as lanes of a CPU's vector registers. A thread
// takes several rows with all their channels, because eight sums and their factors fit
// in the registers. AttentionVectors has the names of AttentionRows in
// llmc/kernels/attention_rows.cuh, whose kernels take either. Included by attention.cuh.
#ifndef LLMC_CPU_ATTENTION_VECTORS_H
#define LLMC_CPU_ATTENTION_VECTORS_H

#include <string.h>

#include <utility>

#ifdef __FMA__
#include <immintrin.h>
#endif

//   CPU_ROWS  The rows of a thread.
//   CPU_SUMS  The rows or channels for which a thread loads an element once.
#if defined(__AVX512F__)
enum { CPU_ROWS = 32, CPU_SUMS = 8 };
#elif defined(__AVX__)
enum { CPU_ROWS = 16, CPU_SUMS = 4 };
#else
enum { CPU_ROWS = 8, CPU_SUMS = 4 };
#endif

// R floats: two vectors, so that each float of a tile is loaded for two products.
template <int R>
struct RowVector {
    typedef float Half __attribute__((vector_size(2 * R)));
    Half a, b;
    RowVector() = default;
    RowVector(Half a_, Half b_) : a(a_), b(b_) {}
    RowVector(float x) : a(x - Half{}), b(x - Half{}) {}  // minus zero is no instruction
    void operator+=(const RowVector &y) {
        a += y.a;
        b += y.b;
    }
    void operator*=(const RowVector &y) {
        a *= y.a;
        b *= y.b;
    }
    friend RowVector operator*(const RowVector &x, const RowVector &y) {
        return {x.a * y.a, x.b * y.b};
    }
    friend RowVector operator-(const RowVector &x, const RowVector &y) {
        return {x.a - y.a, x.b - y.b};
    }
    friend RowVector operator/(const RowVector &x, const RowVector &y) {
        return {x.a / y.a, x.b / y.b};
    }
};

// Returns sum + x y, rounded once where the machine has an instruction for it.
template <int R>
__attribute__((always_inline)) inline RowVector<R> add_product(RowVector<R> sum,
                                                               RowVector<R> x, float y) {
#ifdef __AVX512F__
    if constexpr (sizeof sum.a == 64)
        return {_mm512_fmadd_ps(x.a, _mm512_set1_ps(y), sum.a),
                _mm512_fmadd_ps(x.b, _mm512_set1_ps(y), sum.b)};
#endif
#ifdef __FMA__
    if constexpr (sizeof sum.a == 32)
        return {_mm256_fmadd_ps(x.a, _mm256_set1_ps(y), sum.a),
                _mm256_fmadd_ps(x.b, _mm256_set1_ps(y), sum.b)};
#endif
    return {sum.a + x.a * y, sum.b + x.b * y};
}

template <int R>
__attribute__((always_inline)) inline RowVector<R> exponential(RowVector<R> x) {
    for (int r = 0; r < R; r++) ((float *)&x)[r] = exponential(((float *)&x)[r]);
    return x;
}

template <int R>
__attribute__((always_inline)) inline RowVector<R> larger(RowVector<R> x, RowVector<R> y) {
    return {y.a > x.a ? y.a : x.a, y.b > x.b ? y.b : x.b};
}

// Transposes W vectors of W floats: each of log2(W) stages interleaves the first half of
// them with the second.
template <class V, int... I>
__attribute__((always_inline)) inline void transpose(V *x,
                                                     std::integer_sequence<int, I...>) {
    constexpr int W = sizeof...(I);
    for (int stage = 1; stage < W; stage *= 2) {
        V y[W];
        for (int i = 0; i < W; i++) y[i] = x[i];
        for (int i = 0; i < W / 2; i++) {
            x[2 * i] = V{y[i + I % 2 * (W / 2)][I / 2]...};
            x[2 * i + 1] = V{y[i + I % 2 * (W / 2)][W / 2 + I / 2]...};
        }
    }
}

template <int R_, class Args_ = Attention>
struct AttentionVectors {
    typedef Args_ Args;
    static constexpr int CAPACITY = ATTENTION_MAX_HEAD_SIZE, R = R_, CHANNELS = CAPACITY,
                         LANES = 1;
    static constexpr int TILE = 16, SUMS = CPU_SUMS, W = R / 2, STEP = W > 8 ? W : 8;
    static constexpr unsigned THREADS = 1, BLOCK_ROWS = R;
    typedef RowVector<R> V;
    typedef float Tile[CAPACITY];

    // Rows of the other side: HS channels, as floats.
    struct TileRows {
        const float *at;
        size_t stride;
        const float *operator[](int j) const { return at + j * stride; }
    };

    // Returns HS, padded to a multiple of STEP.
    static int channels(const Attention &a) {
        return (int)((a.HS + STEP - 1) / STEP * STEP);
    }
    static int channel(int i) { return i; }
    static void barrier() {}

    // Whole tiles of floats are read where they are.
    static __forceinline__ TileRows load_tile(Tile *tile, const floatX *p, size_t stride,
                                              int first, int T, const Attention &a) {
        if (sizeof(floatX) == 4 && first + TILE <= T && a.HS % STEP == 0)
            return {(const float *)(const void *)(p + first * stride), stride};
        for (int j = 0; j < TILE; j++) {
            int n = first + j < T ? (int)a.HS : 0, end = channels(a);
            const floatX *from = p + (first + j) * stride;
            for (int c = 0; c < n; c++) tile[j][c] = to_float(from[c]);
            for (int c = n; c < end; c++) tile[j][c] = 0.0f;
        }
        return {tile[0], CAPACITY};
    }

    // Prefetches the tile that begins `rows` rows further.
    static __forceinline__ void prefetch_tile(const TileRows &tile, size_t rows,
                                              const Attention &a) {
        for (int j = 0; j < TILE; j++)
            for (size_t c = 0; c < a.HS; c += 16)
                prefetch(tile.at + (rows + j) * tile.stride + c);
    }

    static __forceinline__ void load_rows(V (&x)[CHANNELS], Tile *tile, const floatX *p,
                                          size_t stride, const AttentionPlace &at,
                                          const Attention &a, float scale) {
        typename V::Half square[W];
        for (int half = 0; half < 2; half++) {
            TileRows from = load_tile(tile, p, stride, at.row + half * W, at.T, a);
            for (int i = 0; i < channels(a); i += W) {
                for (int r = 0; r < W; r++)
                    memcpy(&square[r], from[r] + i, sizeof square[r]);
                transpose(square, std::make_integer_sequence<int, W>());
                for (int c = 0; c < W; c++)
                    (half ? x[i + c].b : x[i + c].a) = square[c] * scale;
            }
        }
    }

    template <class To>
    static __forceinline__ void store_rows(To *p, size_t stride, const AttentionPlace &at,
                                           const Attention &a, const V (&x)[CHANNELS],
                                           V by) {
        typename V::Half square[W];
        for (int r0 = 0; r0 < R; r0 += W) {
            for (size_t c0 = 0; c0 < a.HS; c0 += W) {
                for (int c = 0; c < W; c++)
                    square[c] = r0 ? x[c0 + c].b * by.b : x[c0 + c].a * by.a;
                transpose(square, std::make_integer_sequence<int, W>());
                for (int r = 0; r < W && at.row + r0 + r < at.T; r++) {
                    To *to = p + (at.row + r0 + r) * stride + c0;
                    if (c0 + W <= a.HS)
                        for (int c = 0; c < W; c++)
                            to[c] = from_float<To>(square[r][c]);  // a vector
                    else
                        for (size_t c = 0; c0 + c < a.HS; c++)
                            to[c] = from_float<To>(square[r][c]);
                }
            }
        }
    }
};

// One capacity is enough, as registers hold no row.
template <int, class Args = Attention>
using RowsOf = AttentionVectors<CPU_ROWS, Args>;

#endif
