// kernel_test.h: shared by the checks of the element and row kernels: test data, device buffers,
// errors.
#ifndef LLMC_KERNEL_TEST_H
#define LLMC_KERNEL_TEST_H

#include <float.h>
#include <math.h>
#include <stdint.h>

#include "dev/test/check.h"
#include "llmc/kernels/cuda_common.cuh"

// Largest relative error of one rounding to floatX, for bounds.
static const double FLOATX_ROUNDING = sizeof(floatX) == 4 ? 6.0e-8 : 4.0e-3;

// The buffers of a check. The functions below allocate them on the host or the device. A check
// frees its buffers together: mark = the count at the beginning, test_release(mark) at the end.
static struct {
    void *p;
    bool on_device;
} test_buffers[1024];
static size_t test_count;

static inline void *test_keep(void *p, bool on_device) {
    if (!p || test_count == sizeof test_buffers / sizeof *test_buffers) {
        fprintf(stderr, "error: out of host memory\n");
        exit(1);
    }
    test_buffers[test_count].p = p;
    test_buffers[test_count++].on_device = on_device;
    return p;
}

static inline void test_release(size_t mark) {
    while (test_count > mark) {
        test_count--;
        if (test_buffers[test_count].on_device) CUDA_CHECK(cudaFree(test_buffers[test_count].p));
        else free(test_buffers[test_count].p);
    }
}

static inline void *test_memory(size_t bytes) { return test_keep(malloc(bytes + 16), false); }

// Returns the next of a sequence of numbers in [-1, 1).
static inline double test_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 40) / (double)(1 << 23) - 1.0;
}

// Returns n values in [center - scale, center + scale) that floatX holds exactly.
static inline float *test_values(size_t n, double center, double scale, uint64_t seed) {
    float *x = (float *)test_memory(n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        x[i] = to_float(from_float<floatX>((float)(center + scale * test_random(&seed))));
    return x;
}

static inline void *test_device(size_t bytes) {
    void *p;
    CUDA_CHECK(cudaMalloc(&p, bytes ? bytes : 1));
    return test_keep(p, true);
}

// Returns n elements on the device, not initialised.
template <class T> static inline T *test_array(size_t n) { return (T *)test_device(n * sizeof(T)); }
static inline floatX *test_floatX(size_t n) { return test_array<floatX>(n); }
static inline float *test_floats(size_t n) { return test_array<float>(n); }

template <class T> static inline T *to_device(const T *host, size_t n) {
    T *p = test_array<T>(n);
    if (n) CUDA_CHECK(cudaMemcpy(p, host, n * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

// Rounds n host floats to a device buffer of floatX, whose first element is at dst.
static inline void copy_to_floatX(floatX *dst, const float *host, size_t n) {
    size_t mark = test_count;
    floatX *narrow = (floatX *)test_memory(n * sizeof(floatX));
    for (size_t i = 0; i < n; i++) narrow[i] = from_float<floatX>(host[i]);
    if (n) CUDA_CHECK(cudaMemcpy(dst, narrow, n * sizeof(floatX), cudaMemcpyHostToDevice));
    test_release(mark);
}

static inline floatX *to_device_floatX(const float *host, size_t n) {
    floatX *p = test_floatX(n);
    copy_to_floatX(p, host, n);
    return p;
}

template <class T> static inline T *to_host(const T *device, size_t n, cudaStream_t stream) {
    T *x = (T *)test_memory(n * sizeof(T));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    if (n) CUDA_CHECK(cudaMemcpy(x, device, n * sizeof(T), cudaMemcpyDeviceToHost));
    return x;
}

static inline float *to_host_floatX(const floatX *device, size_t n, cudaStream_t stream) {
    float *x = (float *)test_memory(n * sizeof(float));
    size_t mark = test_count;
    floatX *narrow = to_host(device, n, stream);
    for (size_t i = 0; i < n; i++) x[i] = to_float(narrow[i]);
    test_release(mark);
    return x;
}

// Returns the largest |got - want| / (|want| + the root mean square of want). It is infinite if
// got has a NaN. If all of want is 0, because numbers cancel up to their rounding, `terms`
// replaces the root mean square. It is the size of these numbers.
static inline double test_error_beside(const float *got, const double *want, size_t n,
                                       double terms) {
    double square = 0.0, worst = 0.0;
    for (size_t i = 0; i < n; i++) square += want[i] * want[i];
    double rms = square > 0.0 ? sqrt(square / (double)n) : terms;
    for (size_t i = 0; i < n; i++) {
        double error = fabs((double)got[i] - want[i]) / (fabs(want[i]) + rms + 1e-30);
        if (!(error <= worst)) worst = isnan(error) ? (double)INFINITY : error;
    }
    return worst;
}
static inline double test_error(const float *got, const double *want, size_t n) {
    return test_error_beside(got, want, n, 0.0);
}

// Does the same for an array on the device.
static inline double test_error_floatX(const floatX *device, const double *want, size_t n,
                                       cudaStream_t stream) {
    size_t mark = test_count;
    double error = test_error(to_host_floatX(device, n, stream), want, n);
    test_release(mark);
    return error;
}
static inline double test_error_float(const float *device, const double *want, size_t n,
                                      cudaStream_t stream) {
    size_t mark = test_count;
    double error = test_error(to_host(device, n, stream), want, n);
    test_release(mark);
    return error;
}

static inline bool same_bits(const void *a, const void *b, size_t n) {
    return memcmp(a, b, n * sizeof(float)) == 0;
}

static inline double *test_doubles(size_t n) {
    double *x = (double *)test_memory(n * sizeof(double));
    for (size_t i = 0; i < n; i++) x[i] = 0.0;
    return x;
}

// Returns the same numbers as doubles.
static inline double *widened(const float *x, size_t n) {
    double *y = test_doubles(n);
    for (size_t i = 0; i < n; i++) y[i] = (double)x[i];
    return y;
}

#endif
