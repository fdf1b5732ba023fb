// matmul.cuh: every matrix product of the trainers, on cuBLASLt. Matrices are row-major
// [rows, cols]. The weights of matmul_ are [IC, OC], as in Hugging Face's GPT-2. The
// weights of linear_ are [OC, IC], as in its Linear and in the embedding, which is the
// head too.
//
// defines: GEMM_ALGORITHMS, Matmul, matmul_create, gemm, matmul_forward,
//          matmul_backward_input, matmul_backward_weight, linear_forward,
//          linear_backward_input, linear_backward_weight
#ifndef LLMC_MATMUL_CUH
#define LLMC_MATMUL_CUH

#include <cjson/cJSON.h>
#include <cublasLt.h>

#include "llmc/kernels/cuda_common.cuh"

// `make tune` times this number of the algorithms that cuBLASLt proposes for a product.
enum { GEMM_ALGORITHMS = 8 };

// Bytes of scratch for cuBLASLt. The stand-in takes hardly any, and each rank fills its
// allocation.
#ifdef __CUDACC__
static constexpr size_t MATMUL_WORKSPACE = 32 << 20;
#else
static constexpr size_t MATMUL_WORKSPACE = 4 << 10;
#endif

// One per stream: its products run there in order and share its workspace.
typedef struct Matmul {
    cublasLtHandle_t handle;
    cudaStream_t stream;
    void *workspace;
    const cJSON *tuned;  // {problem: number of its fastest algorithm}, or NULL
} Matmul;

// Opens cuBLASLt; ends the program on failure.
static inline void matmul_create(Matmul *mm, cudaStream_t stream) {
    mm->stream = stream;
    CUDA_CHECK(cudaMalloc(&mm->workspace, MATMUL_WORKSPACE));
    CUBLAS_CHECK(cublasLtCreate(&mm->handle));
}

// Returns the largest power of two, at most 16, that divides the address. More gains
// nothing, and would let the algorithm depend on how the layout places a weight.
static inline uint32_t gemm_alignment(const void *p) {
    uint32_t align = 16;
    while ((uintptr_t)p % align) align /= 2;
    return align;
}

static inline cublasLtMatrixLayout_t gemm_layout(cudaDataType type, size_t rows,
                                                 size_t cols) {
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type, rows, cols, (int64_t)rows));
    return layout;
}

template <class T>
static inline void gemm_prefer(cublasLtMatmulPreference_t pref,
                               cublasLtMatmulPreferenceAttributes_t name, T value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(pref, name, &value, sizeof value));
}
template <class T>
static inline void gemm_describe(cublasLtMatmulDesc_t desc,
                                 cublasLtMatmulDescAttributes_t name, T value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, name, &value, sizeof value));
}

// Queues d[M,N] = op(a)[M,K] op(b)[K,N] + (accumulate ? d : 0) + bias[N], unless that is
// NULL; op transposes if trans_. D is floatX or float. A bias needs a d of floatX that is
// not accumulated.
template <class D>
static inline void gemm(Matmul *mm, D *d, const floatX *a, bool trans_a, const floatX *b,
                        bool trans_b, size_t M, size_t N, size_t K,
                        const floatX *bias = NULL, bool accumulate = false) {
    // cuBLASLt's matrices are column-major: it sees ours transposed, and computes d^T[N,M]
    // = op(b)^T op(a)^T.
    cublasLtMatrixLayout_t layouts[3] = {
        gemm_layout(CUDA_FLOATX, trans_b ? K : N, trans_b ? N : K),  // A, B, D
        gemm_layout(CUDA_FLOATX, trans_a ? M : K, trans_a ? K : M),
        gemm_layout(sizeof *d == sizeof(float) ? CUDA_R_32F : CUDA_FLOATX, N, M)};
    cublasLtMatmulDesc_t desc;
    // True float, no TF32.
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    gemm_describe(desc, CUBLASLT_MATMUL_DESC_TRANSA,
                  (int32_t)(trans_b ? CUBLAS_OP_T : CUBLAS_OP_N));
    gemm_describe(desc, CUBLASLT_MATMUL_DESC_TRANSB,
                  (int32_t)(trans_a ? CUBLAS_OP_T : CUBLAS_OP_N));
    gemm_describe(desc, CUBLASLT_MATMUL_DESC_EPILOGUE,
                  (uint32_t)(bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT));
    if (bias) gemm_describe(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    cublasLtMatmulPreference_t pref;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&pref));
    gemm_prefer(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)MATMUL_WORKSPACE);
    // Partial sums of a split K are kept in float, not in the type of the output.
    gemm_prefer(pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                (uint32_t)(CUBLASLT_REDUCTION_SCHEME_NONE |
                           CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    gemm_prefer(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, gemm_alignment(b));
    gemm_prefer(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, gemm_alignment(a));
    gemm_prefer(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, gemm_alignment(d));
    gemm_prefer(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, gemm_alignment(d));
    // The heuristic proposes algorithms; it believes that the first is the fastest. The
    // first is used unless `make tune` has measured a faster one.
    char problem[128];
    snprintf(problem, sizeof problem, "%zu x %zu x %zu %c%c %s to %s%s, aligned %u %u %u",
             M, N, K, "NT"[trans_a], "NT"[trans_b], FLOATX_NAME,
             sizeof *d == sizeof(float) ? "fp32" : FLOATX_NAME, bias ? " + bias" : "",
             gemm_alignment(a), gemm_alignment(b), gemm_alignment(d));
    const cJSON *tuned = cJSON_GetObjectItemCaseSensitive(mm->tuned, problem);
    cublasLtMatmulHeuristicResult_t proposed[GEMM_ALGORITHMS] = {};
    int number = tuned ? tuned->valueint : 0, count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        mm->handle, desc, layouts[0], layouts[1], layouts[2], layouts[2], pref,
        tuned ? GEMM_ALGORITHMS : 1, proposed, &count);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) CUBLAS_CHECK(status);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || count <= number ||
        proposed[number].state != CUBLAS_STATUS_SUCCESS) {
        fflush(stdout);
        fprintf(stderr, "matrix product %s: cuBLASLt has no algorithm %d\n", problem,
                number);
        exit(1);
    }
    const float alpha = 1.0f, beta = accumulate ? 1.0f : 0.0f;
    gemm_cost(M, N, K, sizeof(floatX), sizeof *d, accumulate);
    CUBLAS_CHECK(cublasLtMatmul(mm->handle, desc, &alpha, b, layouts[0], a, layouts[1],
                                &beta, d, layouts[2], d, layouts[2],
                                &proposed[number].algo, mm->workspace, MATMUL_WORKSPACE,
                                mm->stream));
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(pref));
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(desc));
    for (int i = 0; i < 3; i++) CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(layouts[i]));
}

// Computes out[N,OC] = inp[N,IC] weight[IC,OC] (+ bias[OC], unless it is NULL).
static inline void matmul_forward(Matmul *mm, floatX *out, const floatX *inp,
                                  const floatX *weight, const floatX *bias, size_t N,
                                  size_t IC, size_t OC) {
    gemm(mm, out, inp, false, weight, false, N, OC, IC, bias);
}

// Computes dinp[N,IC] = dout[N,OC] weight[IC,OC]^T.
static inline void matmul_backward_input(Matmul *mm, floatX *dinp, const floatX *dout,
                                         const floatX *weight, size_t N, size_t IC,
                                         size_t OC) {
    gemm(mm, dinp, dout, false, weight, true, N, IC, OC);
}

// Computes dweight[IC,OC] (float) = or += inp[N,IC]^T dout[N,OC].
static inline void matmul_backward_weight(Matmul *mm, float *dweight, const floatX *inp,
                                          const floatX *dout, size_t N, size_t IC,
                                          size_t OC, bool accumulate) {
    gemm(mm, dweight, inp, true, dout, false, IC, OC, N, NULL, accumulate);
}

// Computes out[N,OC] = inp[N,IC] weight[OC,IC]^T (+ bias[OC], unless it is NULL).
static inline void linear_forward(Matmul *mm, floatX *out, const floatX *inp,
                                  const floatX *weight, const floatX *bias, size_t N,
                                  size_t IC, size_t OC) {
    gemm(mm, out, inp, false, weight, true, N, OC, IC, bias);
}

// Computes dinp[N,IC] = dout[N,OC] weight[OC,IC].
static inline void linear_backward_input(Matmul *mm, floatX *dinp, const floatX *dout,
                                         const floatX *weight, size_t N, size_t IC,
                                         size_t OC) {
    gemm(mm, dinp, dout, false, weight, false, N, IC, OC);
}

// Computes dweight[OC,IC] (float) = or += dout[N,OC]^T inp[N,IC].
static inline void linear_backward_weight(Matmul *mm, float *dweight, const floatX *inp,
                                          const floatX *dout, size_t N, size_t IC,
                                          size_t OC, bool accumulate) {
    gemm(mm, dweight, dout, true, inp, false, OC, IC, N, NULL, accumulate);
}

#endif
