// cublasLt.h (CPU): the cuBLASLt calls that the trainers use, on oneDNN or, with
// -DUSE_CBLAS, on a CBLAS. Names, signatures, numbers, field sizes, units and status codes
// are cuBLASLt's. Other cuBLASLt calls do not compile here.
//
// Matrices are column-major, as cuBLASLt documents them, and dense: D[m,n] = op(A)[m,k] *
// op(B)[k,n] + beta * D[m,n], then the epilogue. They are float32 or bfloat16 in memory, and
// the arithmetic is float32. gemm.h computes. Here cuBLASLt's C must be D, and its alpha 1.
//
// Refuses misuse with cuBLASLt's status and an error message on stderr. It makes more
// checks than cuBLASLt:
//   - Ranges must lie in device memory.
//   - The output must not overlap an input.
//   - Pointers must have the alignment promised to the heuristic.
//   - An algorithm serves only its own problem.
#ifndef LLMC_CPU_CUBLASLT_H
#define LLMC_CPU_CUBLASLT_H

#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "llmc/cpu/gemm.h"

#ifdef USE_CBLAS
// OpenBLAS would start threads of its own inside each of ours; other libraries lack the
// function.
extern "C" void openblas_set_num_threads(int) __attribute__((weak));
#endif

typedef enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
} cublasStatus_t;

typedef enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 } cublasOperation_t;
typedef enum { CUBLAS_COMPUTE_32F = 68 } cublasComputeType_t;
typedef enum {
    CUBLASLT_EPILOGUE_DEFAULT = 1,
    CUBLASLT_EPILOGUE_BIAS = 4
} cublasLtEpilogue_t;

typedef enum {
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB = 4,
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8
} cublasLtMatmulDescAttributes_t;

typedef enum {
    CUBLASLT_REDUCTION_SCHEME_NONE = 0,
    CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2
} cublasLtReductionScheme_t;

typedef enum {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
} cublasLtMatmulPreferenceAttributes_t;

struct cublasLtMatrixLayoutOpaque_t {
    cudaDataType type;
    uint64_t rows, cols;
};

// Attributes, each at its number: a pointer or a size has 8 bytes, any other the low 4 of
// its word.
typedef uint64_t CpuLtAttributes[9];
struct cublasLtMatmulDescOpaque_t {
    CpuLtAttributes value;
};
struct cublasLtMatmulPreferenceOpaque_t {
    CpuLtAttributes value;
};

typedef struct cublasLtContext {
} * cublasLtHandle_t;
typedef struct cublasLtMatrixLayoutOpaque_t *cublasLtMatrixLayout_t;
typedef struct cublasLtMatmulDescOpaque_t *cublasLtMatmulDesc_t;
typedef struct cublasLtMatmulPreferenceOpaque_t *cublasLtMatmulPreference_t;

// data: [0] fingerprint of the problem, [1] bytes of workspace, [2..5] alignment of A B C D,
// [6] blocks of k
typedef struct {
    uint64_t data[8];
} cublasLtMatmulAlgo_t;

typedef struct {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
} cublasLtMatmulHeuristicResult_t;

// Prints an error message and returns the status.
__attribute__((format(printf, 2, 3))) static inline cublasStatus_t cpu_lt_refuse(
    cublasStatus_t status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "cuBLASLt: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    return status;
}

// ---- handles and descriptors ----

// cuBLASLt's are larger.
static inline size_t cublasLtGetVersion(void) { return 1; }

static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = new cublasLtContext();
#ifdef USE_CBLAS
    if (openblas_set_num_threads) openblas_set_num_threads(1);
#endif
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout,
                                                        cudaDataType type, uint64_t rows,
                                                        uint64_t cols, int64_t ld) {
    if (ld != (int64_t)rows)
        return cpu_lt_refuse(CUBLAS_STATUS_NOT_SUPPORTED,
                             "columns of %zu elements lie %lld apart: only dense ones do",
                             (size_t)rows, (long long)ld);
    return *layout = new cublasLtMatrixLayoutOpaque_t{type, rows, cols},
           CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc,
                                                      cublasComputeType_t, cudaDataType) {
    *desc = new cublasLtMatmulDescOpaque_t();  // CUBLAS_OP_N
    (*desc)->value[CUBLASLT_MATMUL_DESC_EPILOGUE] = CUBLASLT_EPILOGUE_DEFAULT;
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceCreate(
    cublasLtMatmulPreference_t *pref) {
    *pref = new cublasLtMatmulPreferenceOpaque_t();
    for (int i = 0; i < 4; i++)
        (*pref)->value[CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES + i] = 256;
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    return delete layout, CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
    return delete desc, CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtMatmulPreferenceDestroy(
    cublasLtMatmulPreference_t pref) {
    return delete pref, CUBLAS_STATUS_SUCCESS;
}

// Copies the value of an attribute if it has the size that is wanted.
static inline cublasStatus_t cpu_lt_set(CpuLtAttributes value, unsigned number,
                                        size_t wanted, const void *buf, size_t bytes) {
    if (number >= sizeof(CpuLtAttributes) / 8 || bytes != wanted)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&value[number], buf, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulDescSetAttribute(
    cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attr, const void *buf,
    size_t bytes) {
    return cpu_lt_set(desc->value, attr, attr == CUBLASLT_MATMUL_DESC_BIAS_POINTER ? 8 : 4,
                      buf, bytes);
}

static inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t pref, cublasLtMatmulPreferenceAttributes_t attr,
    const void *buf, size_t bytes) {
    return cpu_lt_set(pref->value, attr,
                      attr == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4, buf, bytes);
}

// ---- checks ----

static inline size_t cpu_lt_type_size(cudaDataType type) {
    return type == CUDA_R_16BF ? 2 : 4;
}

static inline uint64_t cpu_lt_bytes(cublasLtMatrixLayout_t m) {
    return m->rows * m->cols * cpu_lt_type_size(m->type);
}

// Checks everything that does not depend on addresses. layouts: A, B, D.
static inline cublasStatus_t cpu_lt_check(cublasLtMatmulDesc_t desc,
                                          cublasLtMatrixLayout_t const layouts[3]) {
    cublasLtMatrixLayout_t a = layouts[0], b = layouts[1], d = layouts[2];
    for (int i = 0; i < 3; i++) {
        cublasLtMatrixLayout_t l = layouts[i];
        if (!l->rows || !l->cols || l->cols > INT32_MAX || l->rows > INT32_MAX)
            return cpu_lt_refuse(CUBLAS_STATUS_INVALID_VALUE, "%c is %zu x %zu", "ABD"[i],
                                 (size_t)l -> rows, (size_t)l -> cols);
    }
    bool trans_a = desc->value[CUBLASLT_MATMUL_DESC_TRANSA];
    bool trans_b = desc->value[CUBLASLT_MATMUL_DESC_TRANSB];
    uint64_t m = trans_a ? a->cols : a->rows, k = trans_a ? a->rows : a->cols;
    uint64_t kb = trans_b ? b->cols : b->rows, n = trans_b ? b->rows : b->cols;
    if (k != kb || d->rows != m || d->cols != n)
        return cpu_lt_refuse(
            CUBLAS_STATUS_INVALID_VALUE, "op(A) is %zu x %zu, op(B) %zu x %zu, D %zu x %zu",
            (size_t)m, (size_t)k, (size_t)kb, (size_t)n, (size_t)d->rows, (size_t)d->cols);
    if (a->type != b->type || (a->type == CUDA_R_32F && d->type != CUDA_R_32F))
        return cpu_lt_refuse(CUBLAS_STATUS_NOT_SUPPORTED, "data types A %d, B %d, D %d",
                             (int)a->type, (int)b->type, (int)d->type);
    return CUBLAS_STATUS_SUCCESS;
}

// Hashes a problem, to recognise an algorithm of another one (FNV-1a over the numbers).
static inline uint64_t cpu_lt_fingerprint(cublasLtMatmulDesc_t desc,
                                          cublasLtMatrixLayout_t const layouts[3]) {
    uint64_t h = 14695981039346656037ull;
    const auto mix = [&h](uint64_t x) { h = (h ^ x) * 1099511628211ull; };
    for (int i = 0; i < CUBLASLT_MATMUL_DESC_BIAS_POINTER; i++) mix(desc->value[i]);
    for (int i = 0; i < 3; i++) {
        mix(layouts[i]->type);
        mix(layouts[i]->rows);
        mix(layouts[i]->cols);
    }
    return h;
}

// ---- the product ----

// Proposes up to CPU_LT_ALGORITHMS algorithms. Number i sums a product in i + 1 blocks of
// k, so each has bits of its own. They claim a little workspace so that callers must really
// provide it. Legal problems without an algorithm here return NOT_SUPPORTED.
enum { CPU_LT_ALGORITHMS = 3 };
static inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t pref, int wanted, cublasLtMatmulHeuristicResult_t results[],
    int *returned) {
    cublasLtMatrixLayout_t layouts[3] = {a, b, d};
    if (wanted < 1) return CUBLAS_STATUS_INVALID_VALUE;
    cublasStatus_t status = cpu_lt_check(desc, layouts);
    *returned = status == CUBLAS_STATUS_SUCCESS ? std::min(wanted, (int)CPU_LT_ALGORITHMS)
                                                : 0;
    for (int i = 0; i < *returned; i++) {
        cublasLtMatmulHeuristicResult_t *r = &results[i];
        memset(r, 0, sizeof *r);
        r->workspaceSize =
            pref->value[CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES] < 1024 ? 0 : 1024;
        r->algo.data[0] = cpu_lt_fingerprint(desc, layouts);
        r->algo.data[1] = r->workspaceSize;
        memcpy(&r->algo.data[2], &pref->value[CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES],
               4 * sizeof(uint64_t));
        r->algo.data[6] = (uint64_t)i + 1;
    }
    return status;
}

static inline CpuMatrix cpu_lt_matrix(const void *p, cublasLtMatrixLayout_t m) {
    return CpuMatrix{(char *)p, m->type == CUDA_R_16BF, (size_t)m->rows};
}

// Queues the product on the stream. alpha and beta are host pointers, read now. algo NULL
// promises no alignment.
static inline cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void *alpha, const void *A,
    cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b, const void *beta,
    const void *C, cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
    const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes,
    cudaStream_t stream) {
    const cublasStatus_t invalid = CUBLAS_STATUS_INVALID_VALUE;
    cublasLtMatrixLayout_t layouts[3] = {a, b, d};
    const void *pointers[3] = {A, B, D};
    cublasStatus_t status = cpu_lt_check(desc, layouts);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (C != D || c != d || *(const float *)alpha != 1)
        return cpu_lt_refuse(CUBLAS_STATUS_NOT_SUPPORTED, "C is not D, or alpha is not 1");
    uint64_t bytes_d = cpu_lt_bytes(d);
    for (int i = 0; i < 3; i++) {
        size_t size = cpu_lt_type_size(layouts[i]->type);
        size_t align = algo ? algo->data[i < 2 ? 2 + i : 5] : size;
        uint64_t bytes = cpu_lt_bytes(layouts[i]);
        const char *p = (const char *)pointers[i];
        if (!cpu_is_device_range(p, bytes))
            return cpu_lt_refuse(invalid, "%c (%zu x %zu) leaves its device allocation",
                                 "ABD"[i], (size_t)layouts[i] -> rows,
                                 (size_t)layouts[i] -> cols);
        if ((uintptr_t)p % std::max(align, size))
            return cpu_lt_refuse(
                invalid, "%c is not aligned to the %zu bytes promised to the heuristic",
                "ABD"[i], align);
        if (i < 2 && p < (const char *)D + bytes_d && (const char *)D < p + bytes)
            return cpu_lt_refuse(invalid, "D overlaps %c", "ABD"[i]);
    }
    bool has_bias = desc->value[CUBLASLT_MATMUL_DESC_EPILOGUE] == CUBLASLT_EPILOGUE_BIAS;
    const char *bias = (const char *)desc->value[CUBLASLT_MATMUL_DESC_BIAS_POINTER];
    if (has_bias && !cpu_is_device_range(bias, d->rows * cpu_lt_type_size(d->type)))
        return cpu_lt_refuse(invalid, "the bias (%zu) leaves its device allocation",
                             (size_t)d->rows);
    uint64_t problem = cpu_lt_fingerprint(desc, layouts);
    if (algo && algo->data[0] != problem)
        return cpu_lt_refuse(invalid, "the algorithm was found for another problem");
    if ((algo && workspace_bytes < algo->data[1]) ||
        (workspace_bytes &&
         (!cpu_is_device_range(workspace, workspace_bytes) || (uintptr_t)workspace % 16)))
        return cpu_lt_refuse(invalid,
                             "the workspace is too small, unaligned or no device memory");

    // Column-major D = op(A) op(B) is, in the same memory, the row-major D^T = op(B)^T
    // op(A)^T.
    CpuGemm g = CpuGemm();
    g.x = cpu_lt_matrix(B, b);
    g.y = cpu_lt_matrix(A, a);
    g.d = cpu_lt_matrix(D, d);
    g.trans_x = desc->value[CUBLASLT_MATMUL_DESC_TRANSB];
    g.trans_y = desc->value[CUBLASLT_MATMUL_DESC_TRANSA];
    g.rows = d->cols;
    g.cols = d->rows;
    g.depth = g.trans_y ? a->rows : a->cols;
    g.blocks = algo ? algo->data[6] : 1;
    g.beta = *(const float *)beta;
    if (has_bias) g.bias = bias;
    // Another problem may need another kernel, and so may another algorithm, unaligned
    // pointers and a sum with D.
    uint64_t plan = (problem + g.blocks) * 2 + (g.beta != 0.0f);
    for (int i = 0; algo && i < 4; i++) plan = plan * 2 + (algo->data[2 + i] < 16);
    if (cpu_runtime().gemms.insert(plan).second) {
        char name[96];
        snprintf(name, sizeof name, "a matrix product %zu x %zu x %zu", g.rows, g.cols,
                 g.depth);
        cpu_first_use(name);
    }
    cpu_enqueue_work(stream, "cublasLtMatmul", [g] { cpu_gemm(&g); });
    return CUBLAS_STATUS_SUCCESS;
}

#endif
