// tune.cuh: times the algorithms that cuBLASLt proposes for each matrix product of a trainer.
// Writes the fastest of each to build/gemm-GPU.json, which trainers read (llmc/trainer/tuned.cuh).
// `make TUNE=1` puts this header before the trainer, which stays as it is:
//
//   make tune                               GPT-2 124M in micro-batches of 64 sequences
//   make tune TUNED='--model d48 ...'       another model, batch or layout
//
// A product that the file has is not timed again, so calls add up. Algorithms take turns, and each
// counts with its fastest turn. cuBLASLt's own first choice stays unless another one is 1% faster.
// Otherwise the next call might order the two the other way round. The timed products write, or
// add to, the step's own results, so its losses and gradients mean nothing.
#ifndef LLMC_TUNE_CUH
#define LLMC_TUNE_CUH

#include <cublasLt.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <string>
#include <vector>

#include "llmc/kernels/cuda_common.cuh"

struct cJSON;
template <class Multiply>
static inline cublasStatus_t tune_product(const char *problem, const cJSON *tuned, double flops,
                                          const cublasLtMatmulHeuristicResult_t *proposed,
                                          int count, cudaStream_t stream, Multiply multiply);

// Only gemm makes these calls. The names behind them are gemm's variables.
#define cublasLtMatmulAlgoGetHeuristic(handle, desc, a, b, c, d, pref, wanted, results, returned) \
    cublasLtMatmulAlgoGetHeuristic(handle, desc, a, b, c, d, pref, GEMM_ALGORITHMS, results,      \
                                   returned)
#define cublasLtMatmul(handle, desc, alpha, A, a, B, b, beta, C, c, D, d, first, ...)         \
    tune_product(problem, tuned, 2.0 * (double)M * (double)N * (double)K, proposed, count,    \
                 mm->stream, [&](int i) {                                                     \
                     return cublasLtMatmul(handle, desc, alpha, A, a, B, b, beta, C, c, D, d, \
                                           &proposed[i].algo, __VA_ARGS__);                   \
                 })

#include "llmc/trainer.cuh"

enum { TUNE_TURNS = 5, TUNE_CALLS = 4 };  // of an algorithm, and its products in a turn

// A product that this run has timed.
struct TunedProduct {
    std::string problem;
    int number;
    float first, best;  // ms of cuBLASLt's first choice, and of the fastest
    double flops;
};

static inline std::vector<TunedProduct> *tuned_products(void) {
    static std::vector<TunedProduct> products;
    return &products;
}

static inline void tune_fail(const Error *err) {
    fprintf(stderr, "error: %s\n", err->text);
    _exit(1);
}

// Adds this run's products to the file. Ranks that end at once do it one after the other.
static inline void tune_write(void) {
    char path[PATH_MAX], part[PATH_MAX + 8];
    struct cudaDeviceProp device;
    Error err;
    size_t bytes = 0;
    CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
    tuned_path(path, device.name);
    mkdir("build", 0777);
    int folder = open("build", O_RDONLY);
    flock(folder, LOCK_EX);

    cJSON *root = NULL;
    if (access(path, F_OK) == 0) {
        char *text = file_read(path, TUNED_MAX_FILE, &bytes, &err);
        root = text ? tuned_parse(text, bytes, path, device.name, &err) : NULL;
        if (!root) tune_fail(&err);
        free(text);
    } else {
        root = cJSON_CreateObject();
        cJSON_AddStringToObject(root, "gpu", device.name);
        cJSON_AddNumberToObject(root, "cublaslt", (double)cublasLtGetVersion());
        cJSON_AddObjectToObject(root, "products");
    }
    cJSON *products = cJSON_GetObjectItemCaseSensitive(root, "products");
    for (const TunedProduct &p : *tuned_products()) {
        const char *problem = p.problem.c_str();
        printf("%-64s %7.1f -> %7.1f TFLOP/s, algorithm %d\n", problem, 1e-9 * p.flops / p.first,
               1e-9 * p.flops / p.best, p.number);
        if (!cJSON_HasObjectItem(products, problem))  // else another rank was faster
            cJSON_AddNumberToObject(products, problem, p.number);
    }

    char *text = cJSON_Print(root);
    snprintf(part, sizeof part, "%s.part", path);
    if (!file_write_text(part, (std::string(text) + "\n").c_str(), &err)) tune_fail(&err);
    rename(part, path);
    printf("tuned        %zu products, %d in %s\n", tuned_products()->size(),
           cJSON_GetArraySize(products), path);
    cJSON_free(text);
    cJSON_Delete(root);
    close(folder);
}

// Times what cuBLASLt proposes, unless the file has the problem or this run has timed it. Then
// makes the product by the fastest algorithm.
template <class Multiply>
static inline cublasStatus_t tune_product(const char *problem, const cJSON *tuned, double flops,
                                          const cublasLtMatmulHeuristicResult_t *proposed,
                                          int count, cudaStream_t stream, Multiply multiply) {
    std::vector<TunedProduct> *products = tuned_products();
    if (tuned) return multiply(tuned->valueint);
    for (const TunedProduct &p : *products) {
        if (p.problem == problem) return multiply(p.number);
    }

    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    float ms[GEMM_ALGORITHMS], of_turn;
    for (int i = 0; i < count; i++) ms[i] = INFINITY;
    for (int turn = -1; turn < TUNE_TURNS; turn++) {  // the first one loads code
        for (int i = 0; i < count; i++) {
            if (proposed[i].state != CUBLAS_STATUS_SUCCESS) continue;
            CUDA_CHECK(cudaEventRecord(begin, stream));
            for (int call = 0; call < TUNE_CALLS; call++) CUBLAS_CHECK(multiply(i));
            CUDA_CHECK(cudaEventRecord(end, stream));
            CUDA_CHECK(cudaEventSynchronize(end));
            CUDA_CHECK(cudaEventElapsedTime(&of_turn, begin, end));
            if (turn >= 0 && of_turn / TUNE_CALLS < ms[i]) ms[i] = of_turn / TUNE_CALLS;
        }
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));

    int best = 0;
    for (int i = 1; i < count; i++) {
        if (ms[i] < ms[best] && ms[i] < 0.99f * ms[0]) best = i;
    }
    if (products->empty()) atexit(tune_write);
    products->push_back({problem, best, ms[0], ms[best], flops});
    return multiply(best);
}

#endif
