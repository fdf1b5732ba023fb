// bench.h: the driver of the kernel laboratory, which gives every program of dev/cuda the same
// flags and table.
//
//   PROGRAM                     Checks every kernel against plain loops in double: a row for
//                               each.
//   PROGRAM --bench             Times every kernel: a row for each, with the share of the
//                               roofline.
//   PROGRAM --bench --log FILE  Also appends JSON Lines, one for each kernel and block size.
//   PROGRAM --bench --kernel N  Times the kernels of number N only: `ncu PROGRAM --bench --kernel
//                               3`.
//   PROGRAM --list              Prints the kernels, and times none.
//
// A program has one list of kernels for an operation, numbered from naive to best. The last is
// the kernel of llmc/. Its wrappers state "must MB" and FLOPs (llmc/kernels/work.cuh says how
// they are counted). All kernels of the list have the same, and so have PROFILE=1 and the virtual
// clock. A row has these columns:
//
//   asks MB  The bytes of this kernel's own loads and stores. A cache should serve the excess.
//   GB/s     Counts the bytes that must move, so that a kernel cannot look fast by moving more.
//   roof     The nearer of two: the bytes at the speed of a device copy, and the FLOPs at the
//            speed of a large matrix product. Both are measured first in the same run.
//   regs     A thread's registers (on a GPU).
//   occup.   The share of a multiprocessor's threads that can be resident (on a GPU). Registers,
//            shared memory and block size limit it.
//
// A program includes this header first, because it counts the launches of the headers behind it.
//
// defines: Lab, LabLaunch, LabKernel, LAB_COUNT, LAB_LAST, lab_main, lab_start, lab_block,
//          lab_fill, lab_check, lab_errors, lab_stated, lab_bench, lab_finish
#ifndef LLMC_BENCH_H
#define LLMC_BENCH_H

#include <float.h>

#include <functional>

#include "dev/cuda/kernel_test.h"

// The launch with the most registers while `on`; 0 registers: none.
typedef struct {
    bool on;
    int registers;
    double occupancy;
} LabLaunch;

static inline LabLaunch *lab_launched(void) {
    static LabLaunch launched;
    return &launched;
}

#ifdef __CUDACC__
template <class... P>
static inline void lab_launch(void (*kernel)(P...), dim3 block, cudaStream_t, size_t bytes = 0) {
    LabLaunch *l = lab_launched();
    struct cudaFuncAttributes of;
    if (l->on) CUDA_CHECK(cudaFuncGetAttributes(&of, (const void *)kernel));
    if (l->on && of.numRegs > l->registers) {
        int device, most, threads = (int)(block.x * block.y * block.z), blocks;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxThreadsPerMultiProcessor, device));
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, (const void *)kernel,
                                                                 threads, bytes));
        l->registers = of.numRegs, l->occupancy = (double)blocks * threads / most;
    }
}
#undef LAUNCH_UNCHECKED
#define LAUNCH_UNCHECKED(kernel, grid, block, ...) \
    (lab_launch(&kernel, block, __VA_ARGS__),      \
     [=](auto... args) {                           \
         kernel<<<grid, block, launch_bytes(__VA_ARGS__), launch_stream(__VA_ARGS__)>>>(args...); \
     })
#endif

#include "llmc/kernels/packs.cuh"
#include "llmc/kernels/matmul.cuh"

typedef struct {
    Check checks;
    bool bench, cpu;            // cpu: the stand-ins, where sizes are small
    bool list;
    int only;                   // the number of the kernels to be timed, 0: all
    bool found;                 // there was one
    FILE *log;                  // NULL: none
    cudaStream_t stream;
    Matmul mm;                  // on that stream
    char device[256];
    double copy_gb, gemm_tflop; // the measured peaks, per second
    void *flush;  // written between two runs, so that no run finds its data in a cache
    size_t flush_bytes;
    double (*slowest)(double);  // of several ranks, or NULL
} Lab;

// One kernel. run queues it once on a problem of its own type with the given number of threads
// per block. A kernel of llmc/ has its own block size, `block`. If block is 0, lab_bench tries
// several.
struct LabKernel {
    const char *operation;
    int number;
    const char *name;
    std::function<void(const void *problem, unsigned block)> run;
    unsigned block;

    template <class P>
    LabKernel(const char *operation, int number, const char *name,
              void (*run)(const P *, unsigned), unsigned block)
        : operation(operation),
          number(number),
          name(name),
          run([run](const void *problem, unsigned threads) { run((const P *)problem, threads); }),
          block(block) {}
};

// The kernels of a list, and the last one: llmc's.
#define LAB_COUNT(list) (sizeof(list) / sizeof *(list))
#define LAB_LAST(list) ((list) + LAB_COUNT(list) - 1)

static constexpr unsigned LAB_DEFAULT_BLOCK = 256;
enum { LAB_MAX_RUNS = 50 };

static inline unsigned lab_block(const LabKernel *k) {
    return k->block ? k->block : LAB_DEFAULT_BLOCK;
}

static inline int lab_compare(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

// Milliseconds of one run: the median of several, the first left out; of several ranks the
// slowest counts.
template <class Run> static inline double lab_time(Lab *lab, const Run &run) {
    cudaEvent_t begin, end;
    float ms[LAB_MAX_RUNS + 1];
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    int runs = 1;
    for (int i = 0; i <= runs; i++) {
        CUDA_CHECK(cudaMemsetAsync(lab->flush, 0, lab->flush_bytes, lab->stream));
        CUDA_CHECK(cudaEventRecord(begin, lab->stream));
        run();
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaEventRecord(end, lab->stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms[i], begin, end));
        if (i == 0) {  // how many runs fit in the time that a row may take; all ranks must agree
            double first = lab->slowest ? lab->slowest((double)ms[0]) : (double)ms[0];
            double fit = (lab->cpu ? 100.0 : 300.0) / (first + 1e-3);
            runs = fit < 3.0 ? 3 : fit > LAB_MAX_RUNS ? (int)LAB_MAX_RUNS : (int)fit;
        }
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    qsort(ms + 1, (size_t)runs, sizeof *ms, lab_compare);
    double median = (double)ms[1 + runs / 2];
    return lab->slowest ? lab->slowest(median) : median;
}

__global__ void __launch_bounds__(ELEMENT_THREADS)
    lab_copy_kernel(float *to, const float *from, size_t n) {
    Share s = element_share<f128::size>(n);
    for (size_t i = s.begin; i < s.end; i += s.step)
        store128(to + i * f128::size, load128(from + i * f128::size));
}

// Numbers in [-0.5, 0.5): a GPU multiplies zeros at a higher clock than data.
__global__ void __launch_bounds__(ELEMENT_THREADS) lab_fill_kernel(floatX *x, size_t n) {
    Share s = element_share<1>(n);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        x[i] = from_float<floatX>((float)(((uint32_t)i * 2654435769u) >> 16) / 65536.0f - 0.5f);
    }
}

// Returns n numbers on the device, unlike each other.
static inline floatX *lab_fill(Lab *lab, size_t n) {
    floatX *x = test_floatX(n);
    LAUNCH(lab_fill_kernel, element_blocks(n), ELEMENT_THREADS, lab->stream)(x, n);
    CUDA_CHECK(cudaStreamSynchronize(lab->stream));
    return x;
}

// Measures the peaks with the same calls and timer as the kernels.
static inline void lab_measure_peaks(Lab *lab) {
    size_t mark = test_count, n = lab->cpu ? (size_t)1 << 24 : (size_t)1 << 26;
    size_t side = lab->cpu ? 1024 : sizeof(floatX) == 2 ? 8192 : 4096;
    floatX *x = lab_fill(lab, n * sizeof(float) / sizeof(floatX));
    float *to = test_floats(n), *from = (float *)(void *)x;
    double copy = lab_time(lab, [&] {
        LAUNCH(lab_copy_kernel, element_blocks(n), ELEMENT_THREADS, lab->stream)(to, from, n);
    });
    double call = lab_time(lab, [&] {
        CUDA_CHECK(
            cudaMemcpyAsync(to, from, n * sizeof(float), cudaMemcpyDeviceToDevice, lab->stream));
    });
    lab->copy_gb = 2e-6 * (double)(n * sizeof(float)) / (copy < call ? copy : call);
    double product = lab_time(lab, [&] {
        matmul_forward(&lab->mm, (floatX *)(void *)to, x, x, NULL, side, side, side);
    });
    lab->gemm_tflop = 2e-9 * (double)side * (double)side * (double)side / product;
    test_release(mark);
}

// Reads the flags, makes the stream, and prints the head of the table. slowest: see Lab.
static inline void lab_start(Lab *lab, int argc, char **argv, double (*slowest)(double)) {
    memset(lab, 0, sizeof *lab);
    lab->slowest = slowest;
    const char *log = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--bench") == 0) lab->bench = true;
        else if (strcmp(argv[i], "--list") == 0) lab->bench = lab->list = true;
        else if (strcmp(argv[i], "--kernel") == 0 && i + 1 < argc &&
                 (lab->only = atoi(argv[i + 1])) > 0)
            i++;
        else if (strcmp(argv[i], "--log") == 0 && i + 1 < argc) log = argv[++i];
        else {
            fprintf(stderr, "usage: %s [--bench [--kernel N] [--log FILE] | --list]\n", argv[0]);
            exit(2);
        }
    }
    if ((log || lab->only) && !lab->bench) {
        fprintf(stderr, "error: --%s goes with --bench\n", log ? "log" : "kernel");
        exit(2);
    }
    if (log && !(lab->log = fopen(log, "ab"))) {
        fprintf(stderr, "error: cannot write %s\n", log);
        exit(1);
    }
    int device;
    struct cudaDeviceProp prop;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&prop, device));
    snprintf(lab->device, sizeof lab->device, "%s", prop.name);
    lab->cpu = strncmp(prop.name, "CPU", 3) == 0;
    CUDA_CHECK(cudaStreamCreate(&lab->stream));
    matmul_create(&lab->mm, lab->stream);
    if (lab->bench && !lab->list) {
        lab->flush_bytes = (size_t)(lab->cpu ? 32 : 256) << 20;
        lab->flush = test_device(lab->flush_bytes);
        lab_measure_peaks(lab);
        printf("%s, " FLOATX_NAME ": copy %.1f GB/s, matrix product %.3f TFLOP/s\n", lab->device,
               lab->copy_gb, lab->gemm_tflop);
        printf("%-26s %2s  %-52s %5s %4s %6s %10s %9s %9s %9s %9s %7s\n", "operation", "#",
               "kernel", "block", "regs", "occup.", "ms", "must MB", "asks MB", "GB/s", "GFLOP/s",
               "roof");
    } else if (!lab->list) {
        printf("     %-26s %2s  %-52s %9s %9s  " FLOATX_NAME "\n", "operation", "#", "kernel",
               "error", "bound");
    }
    fflush(stdout);
}

// Prints the row of one kernel's check: its largest error over all problems.
static inline void lab_check(Lab *lab, const LabKernel *k, double error, double bound) {
    check(&lab->checks, error <= bound, "%-26s %2d  %-52s %9.2e %9.2e", k->operation, k->number,
          k->name, error, bound);
}

// Runs every kernel of a list on one problem; worst: the largest error() of each so far.
template <size_t COUNT, class P, class Error>
static inline void lab_errors(double (&worst)[COUNT], const LabKernel (&list)[COUNT],
                              const P *problem, Error error) {
    for (size_t k = 0; k < COUNT; k++) {
        list[k].run(problem, lab_block(&list[k]));
        worst[k] = fmax(worst[k], error());
    }
}

// Returns the work that the wrappers of llmc/ state for one run of this kernel. It must be the
// one that they launch.
static inline KernelWork lab_stated(Lab *lab, const LabKernel *k, const void *problem) {
    KernelWork work = KernelWork();
    if (lab->list) return work;
    kernel_tally = &work;
    k->run(problem, lab_block(k));
    kernel_tally = NULL;
    CUDA_CHECK(cudaStreamSynchronize(lab->stream));
    if (work.bytes <= 0.0) {
        fprintf(stderr, "error: %s, kernel %d: its wrapper states no work\n", k->operation,
                k->number);
        exit(1);
    }
    return work;
}

// Times one kernel with its block size. A kernel without a fixed size is timed with several.
// Prints the best and logs all. must: lab_stated of the last kernel of its list. asks: bytes, or
// 0 if not counted.
static inline void lab_bench(Lab *lab, const LabKernel *k, const void *problem, KernelWork must,
                             double asks) {
    static const unsigned SWEEP[] = {32, 64, 128, 256, 512, 1024};
    if (lab->only && k->number != lab->only) return;
    lab->found = true;
    if (lab->list) return (void)printf("%-26s %2d  %s\n", k->operation, k->number, k->name);
    double best = DBL_MAX, copy = 1e-6 * must.bytes / lab->copy_gb,
           product = 1e-9 * must.flops / lab->gemm_tflop;
    double roof = copy > product ? copy : product;  // ms that the operation takes at least
    unsigned best_block = 0;
    LabLaunch best_launch = LabLaunch();
    for (int i = 0; i < (k->block ? 1 : 6); i++) {
        unsigned block = k->block ? k->block : SWEEP[i];
        if (lab->cpu && !k->block && block != 64 && block != 256)
            continue;  // threads are cheap or dear alike
        double ms = lab_time(lab, [&] { k->run(problem, block); });
        if (ms < best) {
            best = ms;
            best_block = block;
        }
        LabLaunch *launched = lab_launched();
        *launched = {true, 0, 0.0};
        k->run(problem, block);
        launched->on = false;
        if (block == best_block) best_launch = *launched;
        if (!lab->log) continue;
        fprintf(lab->log,
                "{\"operation\":\"%s\",\"number\":%d,\"kernel\":\"%s\",\"block\":%u,\"ms\":%.6g",
                k->operation, k->number, k->name, block, ms);
        fprintf(lab->log, ",\"must_bytes\":%.0f,\"flops\":%.0f", must.bytes, must.flops);
        if (launched->registers)
            fprintf(lab->log, ",\"registers\":%d,\"occupancy\":%.4g", launched->registers,
                    launched->occupancy);
        if (asks > 0.0) fprintf(lab->log, ",\"asks_bytes\":%.0f", asks);
        fprintf(lab->log, ",\"gb_per_s\":%.6g,\"tflop_per_s\":%.6g", 1e-6 * must.bytes / ms,
                1e-9 * must.flops / ms);
        fprintf(lab->log, ",\"share\":%.4g,\"device\":\"%s\",\"precision\":\"" FLOATX_NAME "\"",
                roof / ms, lab->device);
        fprintf(lab->log, ",\"peak_gb_per_s\":%.6g,\"peak_tflop_per_s\":%.6g}\n", lab->copy_gb,
                lab->gemm_tflop);
    }
    char block[16] = "-", asked[16] = "-", registers[16] = "-", occupancy[16] = "-";
    if (best_block > 1) snprintf(block, sizeof block, "%u", best_block);
    if (asks > 0.0) snprintf(asked, sizeof asked, "%.2f", 1e-6 * asks);
    if (best_launch.registers) {
        snprintf(registers, sizeof registers, "%d", best_launch.registers);
        snprintf(occupancy, sizeof occupancy, "%.0f%%", 100.0 * best_launch.occupancy);
    }
    printf("%-26s %2d  %-52s %5s %4s %6s %10.4f %9.2f %9s %9.1f %9.4g %6.1f%%\n", k->operation,
           k->number, k->name, block, registers, occupancy, best, 1e-6 * must.bytes, asked,
           1e-6 * must.bytes / best, 1e-6 * must.flops / best, 100.0 * roof / best);
    fflush(stdout);
}

// Returns the exit code: 0 if all checks passed and the log could be written.
static inline int lab_finish(Lab *lab) {
    CUDA_CHECK(cudaStreamSynchronize(lab->stream));
    if (lab->log && (ferror(lab->log) | (fclose(lab->log) != 0))) {
        fprintf(stderr, "error: the log is incomplete\n");
        return 1;
    }
    test_release(0);
    if (lab->only && !lab->found) {
        fprintf(stderr, "error: there is no kernel %d here: --list prints them\n", lab->only);
        return 2;
    }
    return lab->bench ? 0 : check_summary(&lab->checks);
}

// Runs a program for one rank.
static inline int lab_main(Lab *lab, int argc, char **argv, void (*checks)(void),
                           void (*bench)(void)) {
    lab_start(lab, argc, argv, NULL);
    if (lab->bench) bench();
    else checks();
    return lab_finish(lab);
}

#endif
