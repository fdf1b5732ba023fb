// mma.h: tensor-core instructions on a CPU: ldmatrix and mma.m16n8k16 in bf16, with the registers of the 32
// lanes laid out as the PTX ISA documents them. Included by llmc/kernels/mma.cuh.
//
// Each lane leaves the addresses of its registers at one rendezvous of the warp, and the last to arrive does
// the work of all.
#ifndef LLMC_CPU_MMA_H
#define LLMC_CPU_MMA_H

#include <string.h>

#include "cuda_bf16.h"
#include "warp.h"

static inline float cpu_bf16_half(uint32_t pair, int half) {
    return bf16_to_float((uint16_t)(half ? pair >> 16 : pair));
}

// Fragment A, 16 x 16: register i of lane l holds row l/4 + 8 (i % 2), columns 2 (l % 4) + 8 (i / 2) and the next.
static inline void cpu_mma_decode_a(float (*a)[16], const uint32_t *const *lanes) {
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++)
            for (int half = 0; half < 2; half++)
                a[l / 4 + i % 2 * 8][l % 4 * 2 + i / 2 * 8 + half] = cpu_bf16_half(lanes[l][i], half);
}

// Fragment B, 16 x 8: register i of lane l holds rows 2 (l % 4) + 8 i and the next of column l/4.
static inline void cpu_mma_decode_b(float *b, int stride, int l, int i, uint32_t pair) {
    for (int half = 0; half < 2; half++)
        b[(l % 4 * 2 + i * 8 + half) * stride + l / 4] = cpu_bf16_half(pair, half);
}

// Fragment D, 16 x 8: register i of lane l holds row l/4 + 8 (i / 2), column 2 (l % 4) + i % 2.
static inline float *cpu_mma_d(float *d, int stride, int l, int i) {
    return d + (l / 4 + i / 2 * 8) * stride + l % 4 * 2 + i % 2;
}

// d[16, n] += a[16, 16] b[16, n], one k after the other.
static inline void cpu_mma_multiply(float *d, const float (*a)[16], const float *b, int n) {
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < n; j++) d[row * n + j] += a[row][k] * b[k * n + j];
}

// Four 8 x 8 matrices: lane l gives the address of row l % 8 of matrix l / 8. Register i of lane l: row l/4 of
// matrix i, columns 2 (l % 4) and the next; of the transposed matrix, if asked for.
static inline void cpu_ldmatrix_x4(uint32_t (*registers)[4], const __nv_bfloat16 *const *rows, bool trans) {
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < 32; l++) {
            int row = l / 4, column = l % 4 * 2;
            if (trans) {
                uint32_t low = rows[i * 8 + column][row].__x, high = rows[i * 8 + column + 1][row].__x;
                registers[l][i] = high << 16 | low;
            } else {
                memcpy(&registers[l][i], rows[i * 8 + row] + column, 4);
            }
        }
}

struct CpuLdmatrix : CpuTogether {
    uint32_t *registers;
    const __nv_bfloat16 *row;
    bool trans;
    static void run(CpuTogether *const *lanes) {
        uint32_t registers[32][4];
        const __nv_bfloat16 *rows[32];
        for (int l = 0; l < 32; l++) rows[l] = static_cast<CpuLdmatrix *>(lanes[l])->row;
        cpu_ldmatrix_x4(registers, rows, static_cast<CpuLdmatrix *>(lanes[0])->trans);
        for (int l = 0; l < 32; l++)
            memcpy(static_cast<CpuLdmatrix *>(lanes[l])->registers, registers[l], sizeof registers[l]);
    }
};

struct CpuMma : CpuTogether {
    float *d;
    const uint32_t *a;
    uint32_t b0, b1;
    static void run(CpuTogether *const *lanes) {
        float a[16][16], b[16 * 8], d[16 * 8];
        const uint32_t *fragment[32];
        for (int l = 0; l < 32; l++) {
            const CpuMma *lane = static_cast<CpuMma *>(lanes[l]);
            fragment[l] = lane->a;
            cpu_mma_decode_b(b, 8, l, 0, lane->b0);
            cpu_mma_decode_b(b, 8, l, 1, lane->b1);
            for (int i = 0; i < 4; i++) *cpu_mma_d(d, 8, l, i) = lane->d[i];
        }
        cpu_mma_decode_a(a, fragment);
        cpu_mma_multiply(d, a, b, 8);
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) static_cast<CpuMma *>(lanes[l])->d[i] = *cpu_mma_d(d, 8, l, i);
    }
};

// The loops of mma_product: for each step of k and pair of column tiles an ldmatrix and two mma, whose results
// it has to the last bit: what ldmatrix leaves in registers goes straight to where mma takes it from.
template <int N8, int K16>
struct CpuMmaProduct : CpuTogether {
    typedef float Eight __attribute__((vector_size(32)));
    float (*d)[4];
    const uint32_t (*a)[4];
    const __nv_bfloat16 *row;   // what the lane gives to the first ldmatrix
    size_t k_step, n_step;      // elements from there to the next step of k, and to the next pair of tiles
    bool trans;

    // Row r of one 8 x 8 matrix, and where it goes in b: a row, or without trans a column.
    static void decode_row(float (*b)[N8 * 8], const __nv_bfloat16 *row, int r, bool trans) {
        float x[8];
        bf16x8_to_float(x, &row->__x);
        if (trans) memcpy(b[r], x, sizeof x);
        else for (int c = 0; c < 8; c++) b[c][r] = x[c];
    }
    static void run(CpuTogether *const *lanes) {
        float a[16][16 * K16], b[16 * K16][N8 * 8];
        Eight d[16][N8];
        for (int l = 0; l < 32; l++) {
            const CpuMmaProduct *lane = static_cast<CpuMmaProduct *>(lanes[l]);
            int g = l / 4, t = l % 4 * 2, matrix = l / 8;
            for (int n = 0; n < N8; n++)
                for (int i = 0; i < 2; i++) memcpy((float *)&d[g + i * 8][n] + t, lane->d[n] + i * 2, 8);
            for (int k = 0; k < K16; k++) {
                for (int i = 0; i < 4; i++)
                    for (int half = 0; half < 2; half++)
                        a[g + i % 2 * 8][k * 16 + i / 2 * 8 + t + half] = cpu_bf16_half(lane->a[k][i], half);
                for (int n = 0; n < N8; n += 2) {
                    float (*at)[N8 * 8] =
                        (float (*)[N8 * 8])&b[k * 16 + matrix % 2 * 8][(n + matrix / 2) * 8];
                    decode_row(at, lane->row + k * lane->k_step + n / 2 * lane->n_step, l % 8, lane->trans);
                }
            }
        }
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < 16 * K16; k++)
                for (int n = 0; n < N8; n++) {
                    Eight factor;
                    memcpy(&factor, &b[k][n * 8], sizeof factor);
                    d[row][n] += a[row][k] * factor;
                }
        for (int l = 0; l < 32; l++) {
            const CpuMmaProduct *lane = static_cast<CpuMmaProduct *>(lanes[l]);
            for (int n = 0; n < N8; n++)
                for (int i = 0; i < 2; i++)
                    memcpy(lane->d[n] + i * 2, (const float *)&d[l / 4 + i * 8][n] + l % 4 * 2, 8);
        }
    }
};

// The words of the COUNT lanes that are STRIDE apart, for each of them.
template <int COUNT, int STRIDE>
struct CpuGather : CpuTogether {
    uint32_t *all;  // [COUNT]
    uint32_t x;
    static void run(CpuTogether *const *lanes) {
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < COUNT; i++) {
                int from = l - l / STRIDE % COUNT * STRIDE + i * STRIDE;
                static_cast<CpuGather *>(lanes[l])->all[i] = static_cast<CpuGather *>(lanes[from])->x;
            }
    }
};

// Sum or largest, over groups of four lanes, of two values each: the bits of the shuffles by 1 and 2.
struct CpuQuad : CpuTogether {
    float *x;
    bool sum;
    static void run(CpuTogether *const *lanes) {
        for (int first = 0; first < 32; first += 4)
            for (int i = 0; i < 2; i++) {
                float v[4];
                bool sum = static_cast<CpuQuad *>(lanes[0])->sum;
                for (int l = 0; l < 4; l++) v[l] = static_cast<CpuQuad *>(lanes[first + l])->x[i];
                float total = cpu_combine(sum, cpu_combine(sum, v[0], v[1]), cpu_combine(sum, v[2], v[3]));
                for (int l = 0; l < 4; l++) static_cast<CpuQuad *>(lanes[first + l])->x[i] = total;
            }
    }
};

#endif
