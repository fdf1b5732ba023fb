// add.cuh: adds one array of floats to another, on any stream: gradients that several
// micro-batches have left.
// lesson: fsdp
//
// defines: add_floats
#ifndef LLMC_ADD_CUH
#define LLMC_ADD_CUH

#include "llmc/kernels/packs.cuh"

__global__ void __launch_bounds__(ELEMENT_THREADS)
    add_floats_kernel(float *sum, const float *x, size_t n) {
    Share s = element_share<4>(n);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        float a[4], b[4];
        load_floats<4>(a, sum + i * 4);
        load_floats<4>(b, x + i * 4);
        for (int k = 0; k < 4; k++) a[k] += b[k];
        store_floats<4>(sum + i * 4, a);
    }
}

// Adds x[n] to sum[n], fp32. n is a multiple of 4, and both begin at multiples of 16
// bytes.
static inline void add_floats(float *sum, const float *x, size_t n, cudaStream_t stream) {
    if (n == 0) return;
    kernel_cost(KERNEL_ELEMENTWISE, n, 3 * sizeof(float), 1);
    LAUNCH(add_floats_kernel, element_blocks(n), ELEMENT_THREADS, stream)(sum, x, n);
}

#endif
