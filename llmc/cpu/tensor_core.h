// tensor_core.h: tensor-core instructions on a CPU: ldmatrix, cp.async, and products by
// mma.m16n8k16 in bf16. The registers of the 32 lanes are laid out as the PTX ISA documents
// them. Included by llmc/kernels/mma.cuh.
//
// Each lane leaves the addresses of its registers at one rendezvous of the warp. The last
// lane to arrive works for all.
#ifndef LLMC_CPU_TENSOR_CORE_H
#define LLMC_CPU_TENSOR_CORE_H

#include <stddef.h>
#include <string.h>

#include <vector>

#include "cuda_bf16.h"
#include "warp.h"

// Four 8 x 8 matrices: lane l gives the address of row l % 8 of matrix l / 8. Register i of
// lane l receives row l/4 of matrix i, columns 2 (l % 4) and the next; of the transposed
// matrix if trans.
struct CpuLdmatrix {
    uint32_t *registers;
    const __nv_bfloat16 *row;
    bool trans;
    static void run(CpuLdmatrix *const *lanes) {
        for (int l = 0; l < 32; l++) {
            CpuLdmatrix *lane = lanes[l];
            int row = l / 4, column = l % 4 * 2;
            for (int i = 0; i < 4; i++) {
                const auto at = [&](int r, int c) {
                    return (uint32_t)lanes[i * 8 + r]->row[c].__x;
                };
                lane->registers[i] = lane->trans
                                         ? at(column + 1, row) << 16 | at(column, row)
                                         : at(row, column + 1) << 16 | at(row, column);
            }
        }
    }
};

// Does the loops of mma_product, one k after the other. Each step of 16 and each pair of
// column tiles has an ldmatrix and two mma.m16n8k16. The rows of ldmatrix go straight to
// the operand of mma.
template <int N8, int K16>
struct CpuMmaProduct {
    typedef float Eight __attribute__((vector_size(32)));
    float (*d)[4];
    const uint32_t (*a)[4];
    const __nv_bfloat16 *row;  // the lane's row of the first ldmatrix
    // elements from there to the next step of k, and to the next pair of tiles
    size_t k_step, n_step;
    bool trans;

    // Widens row r of one 8 x 8 matrix into b: a row of it, or without trans a column.
    static void decode_row(float (*b)[N8 * 8], const __nv_bfloat16 *row, int r,
                           bool trans) {
        float x[8];
        bf16x8_to_float(x, &row->__x);
        if (trans)
            memcpy(b[r], x, sizeof x);
        else
            for (int c = 0; c < 8; c++) b[c][r] = x[c];
    }
    static void run(CpuMmaProduct *const *lanes) {
        float a[16][16 * K16], b[16 * K16][N8 * 8];
        Eight d[16][N8];
        for (int l = 0; l < 32; l++) {
            const CpuMmaProduct *lane = lanes[l];
            int g = l / 4, t = l % 4 * 2, matrix = l / 8;
            for (int n = 0; n < N8; n++)
                for (int i = 0; i < 2; i++)
                    memcpy((float *)&d[g + i * 8][n] + t, lane->d[n] + i * 2, 8);
            for (int k = 0; k < K16; k++) {
                for (int i = 0; i < 4; i++)
                    for (int half = 0; half < 2; half++)
                        a[g + i % 2 * 8][k * 16 + i / 2 * 8 + t + half] =
                            bf16_to_float((uint16_t)(lane->a[k][i] >> 16 * half));
                for (int n = 0; n < N8; n += 2) {
                    float(*at)[N8 * 8] = (float(*)[N8 * 8]) &
                                         b[k * 16 + matrix % 2 * 8][(n + matrix / 2) * 8];
                    decode_row(at, lane->row + k * lane->k_step + n / 2 * lane->n_step,
                               l % 8, lane->trans);
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
            const CpuMmaProduct *lane = lanes[l];
            for (int n = 0; n < N8; n++)
                for (int i = 0; i < 2; i++)
                    memcpy(lane->d[n] + i * 2,
                           (const float *)&d[l / 4 + i * 8][n] + l % 4 * 2, 8);
        }
    }
};

// cp.async: a copy happens when its thread waits for its group, as late as a GPU may do it.
// Until then NaN is there.
struct CpuCopy {
    void *to;
    const void *from;  // NULL: zeros
    size_t bytes, group;
};
struct CpuCopies {
    uint64_t block;  // to which they belong; those of a block that has ended are dropped
    size_t group;    // the next to be committed
    std::vector<CpuCopy> waiting;
};

// Returns the running thread's copies.
static inline CpuCopies &cpu_copies() {
    static thread_local CpuCopies of_thread[CPU_MAX_THREADS];
    CpuCopies &c = of_thread[cpu_block->current];
    if (c.block != cpu_block->blocks) {
        c.waiting.clear();
        c.block = cpu_block->blocks;
    }
    return c;
}
static inline void cpu_copy_async(void *to, const void *from, size_t bytes) {
    memset(to, 0xFF, bytes);
    CpuCopies &c = cpu_copies();
    c.waiting.push_back({to, from, bytes, c.group});
}
static inline void cpu_copy_wait(size_t left) {
    CpuCopies &c = cpu_copies();
    size_t done = 0;
    for (; done < c.waiting.size() && c.waiting[done].group + left < c.group; done++) {
        const CpuCopy &copy = c.waiting[done];
        if (copy.from)
            memcpy(copy.to, copy.from, copy.bytes);
        else
            memset(copy.to, 0, copy.bytes);
    }
    c.waiting.erase(c.waiting.begin(), c.waiting.begin() + (ptrdiff_t)done);
}

// ---- shared memory whose size the launch gives -----------------------------------------

enum { CPU_DYNAMIC_SHARED = 232448 };  // bytes, as a block of an H100 may have
static inline size_t multiprocessor_shared() {
    return 233472;
}

// Every block has the most; it finds NaN there.
static inline uint8_t *cpu_dynamic_shared() {
    alignas(1024) static thread_local uint8_t shared[CPU_DYNAMIC_SHARED];
    static thread_local uint64_t block;
    if (block != cpu_block->blocks) memset(shared, 0xFF, sizeof shared);
    block = cpu_block->blocks;
    return shared;
}
#define DYNAMIC_SHARED(name) uint8_t *const name = cpu_dynamic_shared()
#define LAUNCH_LARGE LAUNCH

#endif
