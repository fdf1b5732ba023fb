// kernel_times.cuh: times every LAUNCH and every matrix product of a program between two CUDA
// events. Prints a row for each: calls, ms, share, GB/s, TFLOP/s, and the share of the roof.
// `make PROFILE=1` puts this header before the program, which stays as it is:
//
//   make DEVICE=cuda PROFILE=1 build/cuda-bf16-profile/train_gpt
//   build/cuda-bf16-profile/train_gpt --model d12 ... --steps 10 --trace trace.json
//
// The rows come when the trace ends. The wrappers of llmc/ state bytes and FLOPs (work.cuh). The
// roof is the nearer of two: the bytes at the memory's bandwidth, and the FLOPs at the device's
// peak if it is known. Launches of one kernel with the same work count with their median,
// because the first ones also wait for code to be loaded. On the stand-ins events tell this
// CPU's time, or with --virtual-time the clock's.
#ifndef LLMC_KERNEL_TIMES_CUH
#define LLMC_KERNEL_TIMES_CUH

#include <cublasLt.h>
#include <cuda_profiler_api.h>

#include <tuple>

#include "llmc/host/log.h"
#include "llmc/host/memory.h"
#include "llmc/kernels/cuda_common.cuh"

typedef struct {
    const char *name;
    double bytes, flops;
    cudaEvent_t begin, end;
    float ms;
} KernelTime;

typedef struct {
    bool on;
    KernelWork work;  // stated since the last launch
    KernelTime *list;
    size_t count, room;
} KernelTimes;

static inline KernelTimes *kernel_times(void) {
    static KernelTimes times;
    return &times;
}

// From here to the end of the statement that launches.
struct KernelTimer {
    cudaStream_t stream;
    bool on;
    KernelTimer(const char *name, cudaStream_t s, size_t = 0) : stream(s), on(kernel_times()->on) {
        KernelTimes *t = kernel_times();
        if (!on) return;
        if (t->count == t->room) {
            t->room = t->room ? 2 * t->room : 4096;
            t->list = (KernelTime *)realloc(t->list, t->room * sizeof *t->list);
            if (!t->list) exit(1);
        }
        KernelTime *k = &t->list[t->count];
        k->name = name, k->bytes = t->work.bytes, k->flops = t->work.flops;
        t->work = KernelWork();
        CUDA_CHECK(cudaEventCreate(&k->begin));
        CUDA_CHECK(cudaEventCreate(&k->end));
        CUDA_CHECK(cudaEventRecord(k->begin, stream));
    }
    ~KernelTimer() {
        if (on)
            CUDA_CHECK(
                cudaEventRecord(kernel_times()->list[kernel_times()->count++].end, stream));
    }
};

// Orders by name, then work, then time.
static inline int kernel_time_compare(const void *a, const void *b) {
    const KernelTime *x = (const KernelTime *)a, *y = (const KernelTime *)b;
    int names = strcmp(x->name, y->name);
    if (names) return names;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    if (x->flops != y->flops) return x->flops < y->flops ? -1 : 1;
    return (x->ms > y->ms) - (x->ms < y->ms);
}

typedef struct {
    const char *name;
    size_t calls;
    double ms, bytes, flops;
} KernelRow;

static const char MATRIX_PRODUCT[] = "matrix product";  // each size has a row of its own

static inline int kernel_row_compare(const void *a, const void *b) {
    const KernelRow *x = (const KernelRow *)a, *y = (const KernelRow *)b;
    return (x->ms < y->ms) - (x->ms > y->ms);
}

// Returns the bytes and FLOPs per second of the device, 0 where they are unknown.
static inline void kernel_roof(double *bytes, double *flops) {
    struct cudaDeviceProp prop;
    int device, khz = 0, bits = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&prop, device));
#ifdef __CUDACC__
    CUDA_CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device));
#endif
    *bytes = 2e3 * khz * bits / 8;  // two transfers a cycle
    *flops = device_peak_flops(prop.name, sizeof(floatX) == 2);
#ifdef CPU_CLOCK
    const Cluster *c = &cpu_clock().cluster;
    if (cpu_clock().on)
        *bytes = c->hbm_bandwidth, *flops = sizeof(floatX) == 2 ? c->peak_bf16 : c->peak_fp32;
#endif
}

static inline void kernel_times_print(KernelTimes *t) {
    double bandwidth, peak, sum = 0;
    size_t rows = 0;
    KernelRow *row = (KernelRow *)host_alloc(t->count + 1, sizeof *row);
    kernel_roof(&bandwidth, &peak);
    qsort(t->list, t->count, sizeof *t->list, kernel_time_compare);
    for (size_t i = 0, n; i < t->count; i += n) {  // n launches with the same name and work
        const KernelTime *k = &t->list[i];
        for (n = 1; i + n < t->count && strcmp(k[n].name, k->name) == 0 && k[n].bytes == k->bytes &&
                    k[n].flops == k->flops;) n++;
        bool same = rows && k->name != MATRIX_PRODUCT && strcmp(row[rows - 1].name, k->name) == 0;
        if (!same) row[rows++] = {k->name, 0, 0, 0, 0};
        KernelRow *r = &row[rows - 1];
        r->calls += n, r->ms += (double)n * (double)k[n / 2].ms;
        r->bytes += (double)n * k->bytes, r->flops += (double)n * k->flops;
    }
    for (size_t i = 0; i < rows; i++) sum += row[i].ms;
    qsort(row, rows, sizeof *row, kernel_row_compare);
    printf("%-46s %7s %11s %7s %9s %9s %7s\n", "kernel", "calls", "ms", "share", "GB/s",
           "TFLOP/s", "roof");
    for (size_t i = 0; i < rows; i++) {
        const KernelRow *r = &row[i];
        double moving = bandwidth > 0 ? 1e3 * r->bytes / bandwidth : 0;
        double computing = peak > 0 ? 1e3 * r->flops / peak : 0;
        double roof = moving > computing ? moving : computing;
        char name[64];
        // A template's name has commas and is wrapped in parentheses.
        bool product = r->name == MATRIX_PRODUCT, wrapped = r->name[0] == '(';
        if (product)
            snprintf(name, sizeof name, "%s of %.4g GFLOP", r->name,
                     1e-9 * r->flops / (double)r->calls);
        else
            snprintf(name, sizeof name, "%.*s", (int)strlen(r->name) - 2 * wrapped,
                     r->name + wrapped);
        printf("%-46s %7zu %11.3f %6.1f%%", name, r->calls, r->ms, sum > 0 ? 100 * r->ms / sum : 0);
        if (r->bytes > 0 && r->ms > 0) {
            printf(" %9.1f %9.4g", 1e-6 * r->bytes / r->ms, 1e-9 * r->flops / r->ms);
            if (roof > 0) printf(" %6.1f%%", 100 * roof / r->ms);
        }
        printf("\n");
    }
    printf("%-46s %7zu %11.3f\n", "all", t->count, sum);
    free(row);
}

static inline cudaError_t kernel_times_start(void) {
    KernelTimes *t = kernel_times();
    t->on = true, t->work = KernelWork();
    kernel_tally = &t->work;
    return cudaSuccess;
}

static inline cudaError_t kernel_times_stop(void) {
    KernelTimes *t = kernel_times();
    if (!t->on) return cudaSuccess;
    t->on = false, kernel_tally = NULL;
    CUDA_CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < t->count; i++) {
        KernelTime *k = &t->list[i];
        CUDA_CHECK(cudaEventElapsedTime(&k->ms, k->begin, k->end));
        CUDA_CHECK(cudaEventDestroy(k->begin));
        CUDA_CHECK(cudaEventDestroy(k->end));
    }
    kernel_times_print(t);
    free(t->list);
    t->list = NULL, t->count = t->room = 0;
    return cudaSuccess;
}

template <class... T>
static inline cublasStatus_t kernel_times_product(cublasLtHandle_t handle,
                                                  cublasLtMatmulDesc_t desc, const float *alpha,
                                                  T... rest) {
    cudaStream_t stream = std::get<sizeof...(T) - 1>(std::tuple<T...>(rest...));
    KernelTimer timer(MATRIX_PRODUCT, stream);
    return cublasLtMatmul(handle, desc, alpha, rest...);
}

// The program behind this header is timed.
#undef LAUNCH
#define LAUNCH(kernel, grid, block, ...)                                                       \
    (LaunchCheck{__FILE__, "launch of " #kernel, __LINE__}, KernelTimer(#kernel, __VA_ARGS__), \
     LAUNCH_UNCHECKED(kernel, grid, block, __VA_ARGS__))
#define cublasLtMatmul(...) kernel_times_product(__VA_ARGS__)
#define cudaProfilerStart() kernel_times_start()
#define cudaProfilerStop() kernel_times_stop()

#endif
