// gemm.h (CPU): computes the products of cublasLt.h, of row-major matrices:
//   D[rows, cols] = op(X)[rows, depth] * op(Y)[depth, cols] + beta * D[rows, cols] + bias[cols]
//
// The shape of D's tiles depends on the sizes alone. One thread computes a tile by a
// single-threaded sgemm and finishes it in its cache. So the bits do not depend on the
// number of threads, which depends on the layout of the ranks.
#ifndef LLMC_CPU_GEMM_H
#define LLMC_CPU_GEMM_H

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef USE_CBLAS
#define bfloat16 \
    cblas_bfloat16  // OpenBLAS's name for its 16 bits, which the kernels have for their own
                    // type
#include <cblas.h>
#undef bfloat16
#else
#include <dnnl.h>
#endif

#include "fibre.h"
#include "llmc/host/bf16.h"

// A matrix, in elements of the problem's type: bfloat16 (as its bits) or float32.
struct CpuMatrix {
    char *data;
    bool bf16;
    size_t ld;  // elements of a row

    char *at(size_t row, size_t col) const {
        return data + (row * ld + col) * (bf16 ? 2 : 4);
    }
};

struct CpuGemm {
    CpuMatrix x, y, d;
    bool trans_x, trans_y;
    size_t rows, cols, depth;
    size_t blocks;  // of depth, at least: a sum for each, and then their sum
    float beta;
    const char *bias;  // [cols], of D's type, or NULL
};

// ---- elements ----

typedef uint16_t __attribute__((may_alias)) CpuBits16;

// Converts n elements to float.
static inline void cpu_load(float *out, const char *in, bool bf16, size_t n) {
    if (bf16) {
        const CpuBits16 *bits = (const CpuBits16 *)in;
        for (size_t i = 0; i < n; i++) out[i] = bf16_to_float(bits[i]);
    } else {
        memcpy(out, in, n * sizeof(float));
    }
}

// Converts n floats to elements, rounded to nearest even.
static inline void cpu_store(char *out, const float *in, bool bf16, size_t n) {
    if (bf16) {
        CpuBits16 *bits = (CpuBits16 *)out;
        for (size_t i = 0; i < n; i++) bits[i] = bf16_from_float(in[i]);
    } else if (out != (const char *)in) {
        memcpy(out, in, n * sizeof(float));
    }
}

// ---- a tile ----

// Computes c[m,n] = op(a) op(b) + beta c, row-major, on one thread.
static inline void cpu_sgemm(bool trans_a, bool trans_b, size_t m, size_t n, size_t k,
                             const float *a, size_t lda, const float *b, size_t ldb,
                             float beta, float *c, size_t ldc) {
#ifdef USE_CBLAS
    cblas_sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans,
                trans_b ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, 1.0f, a,
                (int)lda, b, (int)ldb, beta, c, (int)ldc);
#else
    dnnl_status_t status = dnnl_sgemm(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N',
                                      (dnnl_dim_t)m, (dnnl_dim_t)n, (dnnl_dim_t)k, 1.0f, a,
                                      (dnnl_dim_t)lda, b, (dnnl_dim_t)ldb, beta, c,
                                      (dnnl_dim_t)ldc);
    if (status != dnnl_success)
        cpu_abort("cublasLtMatmul: dnnl_sgemm failed with status %d", (int)status);
#endif
}

// Transposes in[rows, cols] to out[cols, rows], both dense. Blocks keep both sides in a few
// cache lines.
static inline void cpu_transpose(float *out, const float *in, size_t rows, size_t cols) {
    for (size_t r0 = 0; r0 < rows; r0 += 16) {
        for (size_t c0 = 0; c0 < cols; c0 += 16) {
            size_t r1 = std::min(rows, r0 + 16), c1 = std::min(cols, c0 + 16);
            for (size_t c = c0; c < c1; c++) {
                for (size_t r = r0; r < r1; r++) out[c * rows + r] = in[r * cols + c];
            }
        }
    }
}

// Copies a block of a stored matrix to dense floats in `out` (rows * cols).
static inline void cpu_load_block(float *out, const CpuMatrix *m, size_t row, size_t col,
                                  size_t rows, size_t cols) {
    for (size_t r = 0; r < rows; r++)
        cpu_load(out + r * cols, m->at(row + r, col), m->bf16, cols);
}

static const size_t CPU_GEMM_TILE = 768 * 768;  // elements of D in the largest tile
static const size_t CPU_GEMM_DEPTH = 768;       // of a copied block
static const size_t CPU_GEMM_PACK = 16384;      // floats of Y worth a dense copy (64 KiB)

static inline void cpu_gemm_tile(const CpuGemm *g, size_t r0, size_t rows, size_t c0,
                                 size_t cols) {
    bool widen = g->x.bf16;
    // Columns a multiple of 4 KiB apart fight for the same cache lines: a dense copy is
    // worth it.
    bool dense_x = widen || (g->trans_x && g->x.ld % 1024 == 0);
    size_t depth = (g->depth + g->blocks - 1) / g->blocks;
    if (dense_x) depth = std::min(depth, CPU_GEMM_DEPTH);
    // A small Y is read many times: dense and untransposed it makes small products up to
    // twice as fast.
    bool pack = depth * cols <= CPU_GEMM_PACK && rows >= 16;

    static thread_local std::vector<float> scratch;
    size_t x_size = dense_x ? rows * depth : 0, y_size = widen || pack ? depth * cols : 0;
    size_t acc_size = g->d.bf16 ? rows * cols : 0;
    size_t total = x_size + 2 * y_size + acc_size + cols;
    if (scratch.size() < total + 16) scratch.resize(total + 16);
    float *aligned = (float *)(((uintptr_t)scratch.data() + 63) / 64 * 64);
    float *x_dense = aligned, *y_dense = x_dense + x_size, *y_stored = y_dense + y_size;
    float *bias = y_stored + y_size;
    float *acc = g->d.bf16 ? bias + cols : (float *)g->d.at(r0, c0);
    size_t ldacc = g->d.bf16 ? cols : g->d.ld;

    if (g->beta != 0.0f && g->d.bf16) cpu_load_block(acc, &g->d, r0, c0, rows, cols);
    for (size_t k0 = 0; k0 < g->depth; k0 += depth) {
        size_t k = std::min(depth, g->depth - k0);
        size_t x_row = g->trans_x ? k0 : r0, x_col = g->trans_x ? r0 : k0;
        size_t y_row = g->trans_y ? c0 : k0, y_col = g->trans_y ? k0 : c0;
        const float *x = (const float *)g->x.at(x_row, x_col);
        const float *y = (const float *)g->y.at(y_row, y_col);
        size_t ldx = g->x.ld, ldy = g->y.ld;
        bool trans_y = g->trans_y;
        if (dense_x) {
            ldx = g->trans_x ? rows : k;
            cpu_load_block(x_dense, &g->x, x_row, x_col, g->trans_x ? k : rows, ldx);
            x = x_dense;
        }
        if (widen || pack) {
            float *block = pack && trans_y ? y_stored : y_dense;
            ldy = trans_y ? k : cols;
            cpu_load_block(block, &g->y, y_row, y_col, trans_y ? cols : k, ldy);
            if (pack && trans_y) {
                cpu_transpose(y_dense, y_stored, cols, k);
                trans_y = false;
                ldy = cols;
            }
            y = y_dense;
        }
        cpu_sgemm(g->trans_x, trans_y, rows, cols, k, x, ldx, y, ldy, k0 ? 1.0f : g->beta,
                  acc, ldacc);
    }
    if (!g->bias && !g->d.bf16) return;
    if (g->bias) cpu_load(bias, g->bias + c0 * (g->d.bf16 ? 2 : 4), g->d.bf16, cols);
    for (size_t r = 0; r < rows; r++) {
        float *row = acc + r * ldacc;
        for (size_t j = 0; g->bias && j < cols; j++) row[j] += bias[j];
        cpu_store(g->d.at(r0 + r, c0), row, g->d.bf16, cols);
    }
}

// Returns the size of `pieces` equal pieces, a multiple of `unit`. The last one may be
// smaller.
static inline size_t cpu_gemm_piece(size_t size, size_t pieces, size_t unit) {
    size_t piece = (size + pieces - 1) / pieces;
    return std::min(size, (piece + unit - 1) / unit * unit);
}

// Computes the whole problem. Sizes are at least 1 and have been checked.
static inline void cpu_gemm(const CpuGemm *g) {
    // Enough tiles for a few threads, as long as a tile is worth its overhead (a few
    // microseconds).
    size_t worth = std::max((size_t)1, g->rows * g->cols * g->depth >> 18);
    size_t wanted = std::max(std::min((size_t)4, worth),
                             (g->rows * g->cols + CPU_GEMM_TILE - 1) / CPU_GEMM_TILE);
    size_t tile_rows = 1, tile_cols = 1;
    for (size_t i = 1; i <= wanted; i++) {  // of all such tiles the squarest
        size_t rows = cpu_gemm_piece(g->rows, i, 16);
        // The blocks of sgemm itself are 48 wide.
        size_t cols = cpu_gemm_piece(g->cols, (wanted + i - 1) / i, 48);
        if (rows * cols * (tile_rows + tile_cols) <= tile_rows * tile_cols * (rows + cols))
            continue;
        tile_rows = rows;
        tile_cols = cols;
    }
    size_t row_tiles = (g->rows + tile_rows - 1) / tile_rows;
    size_t tiles = row_tiles * ((g->cols + tile_cols - 1) / tile_cols);
    // Always inside a parallel region, where sgemm uses one thread.
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < tiles; i++) {
        size_t r0 = i % row_tiles * tile_rows, c0 = i / row_tiles * tile_cols;
        cpu_gemm_tile(g, r0, std::min(tile_rows, g->rows - r0), c0,
                      std::min(tile_cols, g->cols - c0));
    }
}

#endif
