// matmul.cuh: every matrix product of the trainers, on cuBLASLt.
// Matrices are row-major [rows, cols]. The weights of matmul_ are [IC, OC], as in Hugging Face's GPT-2. Those of
// linear_ are [OC, IC], as in its Linear and in the embedding, which is the head too.
//
// defines: Matmul, matmul_create, GemmArgs, gemm_args, gemm, matmul_forward, matmul_backward_input,
//          matmul_backward_weight, linear_forward, linear_backward_input, linear_backward_weight
#ifndef LLMC_MATMUL_CUH
#define LLMC_MATMUL_CUH

#include <cublasLt.h>

#include "llmc/kernels/cuda_common.cuh"

static constexpr size_t MATMUL_PLANS = 256;
static constexpr int MATMUL_ALGORITHMS = 8;  // most that the heuristic is asked for

// Bytes of scratch for cuBLASLt. The stand-in takes hardly any, and each rank fills its allocation.
#ifdef __CUDACC__
static constexpr size_t MATMUL_WORKSPACE = 32 << 20;
#else
static constexpr size_t MATMUL_WORKSPACE = 4 << 10;
#endif

// The algorithm of one problem, kept because the heuristic takes longer than a small product.
typedef struct {
    uint64_t key[14];
    bool used, supported;
    cublasLtMatmulAlgo_t algo;
} MatmulPlan;

// One per stream: its products run there in order and share its workspace.
typedef struct Matmul {
    cublasLtHandle_t handle;
    cudaStream_t stream;
    void *workspace;
    int algorithm;  // which of the heuristic's list new plans take, or the last: 0 but in the laboratory
    MatmulPlan plans[MATMUL_PLANS];
} Matmul;

// Opens cuBLASLt; ends the program on failure. A Matmul is too large for the stack.
static inline void matmul_create(Matmul *mm, cudaStream_t stream) {
    memset(mm, 0, sizeof *mm);
    mm->stream = stream;
    CUDA_CHECK(cudaMalloc(&mm->workspace, MATMUL_WORKSPACE));
    CUBLAS_CHECK(cublasLtCreate(&mm->handle));
}

// d[M,N] = alpha op(a)[M,K] op(b)[K,N] + (accumulate ? d : 0) + bias; op transposes if trans_. Leading dimensions are
// elements from one stored row to the next. A bias needs a d of type floatX that is not accumulated.
typedef struct {
    const floatX *a, *b;
    void *d; // float if d_fp32, else floatX
    bool d_fp32, trans_a, trans_b;
    size_t M, N, K, lda, ldb, ldd;
    float alpha;
    bool accumulate;
    const floatX *bias; // [N] or NULL
} GemmArgs;

// Returns the arguments of a product of dense matrices.
static inline GemmArgs gemm_args(void *d, bool d_fp32, const floatX *a, bool trans_a, const floatX *b, bool trans_b,
                                 size_t M, size_t N, size_t K, const floatX *bias = NULL, bool accumulate = false) {
    GemmArgs g = {};
    g.a = a, g.b = b, g.d = d, g.d_fp32 = d_fp32, g.trans_a = trans_a, g.trans_b = trans_b;
    g.M = M, g.N = N, g.K = K, g.lda = trans_a ? M : K, g.ldb = trans_b ? K : N, g.ldd = N;
    g.alpha = 1.0f, g.accumulate = accumulate, g.bias = bias;
    return g;
}

// Returns the largest power of two, at most 16, that divides the address. More gains nothing, and would let the
// algorithm depend on how the layout places a weight.
static inline uint32_t gemm_alignment(const void *p) {
    uint32_t align = 16;
    while ((uintptr_t)p % align) align /= 2;
    return align;
}

static inline cublasLtMatrixLayout_t gemm_layout(cudaDataType type, size_t rows, size_t cols, size_t ld) {
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type, rows, cols, (int64_t)ld));
    return layout;
}

template <class T>
static inline void gemm_prefer(cublasLtMatmulPreference_t pref, cublasLtMatmulPreferenceAttributes_t name, T value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(pref, name, &value, sizeof value));
}
template <class T>
static inline void gemm_describe(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t name, T value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, name, &value, sizeof value));
}

// Asks the heuristic for algorithms, the one that it takes for the fastest first. False if it has none.
static inline bool gemm_algorithm(Matmul *mm, cublasLtMatmulAlgo_t *algo, cublasLtMatmulDesc_t desc,
                                  const cublasLtMatrixLayout_t layouts[3] /*A B D*/, const uint32_t align[3]) {
    cublasLtMatmulPreference_t pref;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&pref));
    gemm_prefer(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)MATMUL_WORKSPACE);
    // Partial sums of a split K are kept in float, not in the type of the output.
    gemm_prefer(pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                (uint32_t)(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    gemm_prefer(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align[0]);
    gemm_prefer(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align[1]);
    gemm_prefer(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align[2]);
    gemm_prefer(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align[2]);
    cublasLtMatmulHeuristicResult_t results[MATMUL_ALGORITHMS], *result = results;
    int found = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(mm->handle, desc, layouts[0], layouts[1], layouts[2],
                                                           layouts[2], pref, mm->algorithm + 1, results, &found);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(pref));
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return false;
    CUBLAS_CHECK(status);
    if (found > 0 && found <= mm->algorithm) mm->algorithm = found - 1;
    if (found == 0 || (result += mm->algorithm)->state != CUBLAS_STATUS_SUCCESS) return false;
    *algo = result->algo;
    return true;
}

// Returns the place of a problem in the table, found or to be filled. A full table starts anew.
static inline MatmulPlan *gemm_plan(Matmul *mm, const uint64_t *key) {
    for (MatmulPlan &plan : mm->plans)
        if (!plan.used || memcmp(plan.key, key, sizeof plan.key) == 0) return &plan;
    memset(mm->plans, 0, sizeof mm->plans);
    return mm->plans;
}

// Queues one cuBLASLt call. False, with nothing queued, if no algorithm takes this problem with this epilogue.
static inline bool gemm_launch(Matmul *mm, const GemmArgs &g, cublasLtEpilogue_t epilogue) {
    // cuBLASLt's matrices are column-major: it sees ours transposed, and computes d^T[N,M] = op(b)^T op(a)^T.
    cudaDataType type = CUDA_FLOATX, type_d = g.d_fp32 ? CUDA_R_32F : CUDA_FLOATX;
    cublasLtMatrixLayout_t layouts[3] = {
        gemm_layout(type, g.trans_b ? g.K : g.N, g.trans_b ? g.N : g.K, g.ldb),
        gemm_layout(type, g.trans_a ? g.M : g.K, g.trans_a ? g.K : g.M, g.lda),
        gemm_layout(type_d, g.N, g.M, g.ldd)};
    cublasLtMatmulDesc_t desc;
    bool has_bias = epilogue == CUBLASLT_EPILOGUE_BIAS;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F)); // true float: no TF32
    gemm_describe(desc, CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)(g.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N));
    gemm_describe(desc, CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)(g.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N));
    gemm_describe(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)epilogue);
    if (has_bias) gemm_describe(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias);
    uint32_t align[3] = {gemm_alignment(g.b), gemm_alignment(g.a), gemm_alignment(g.d)};
    uint64_t key[] = {g.M, g.N, g.K, g.lda, g.ldb, g.ldd, g.d_fp32, g.trans_a, g.trans_b, g.accumulate,
                      align[0], align[1], align[2], has_bias ? gemm_alignment(g.bias) : 0};
    MatmulPlan *plan = gemm_plan(mm, key);
    if (!plan->used) {
        memcpy(plan->key, key, sizeof key);
        plan->used = true;
        plan->supported = gemm_algorithm(mm, &plan->algo, desc, layouts, align);
    }
    if (plan->supported) {
        float beta = g.accumulate ? 1.0f : 0.0f;
        gemm_cost(g.M, g.N, g.K, sizeof(floatX), g.d_fp32 ? sizeof(float) : sizeof(floatX), g.accumulate);
        CUBLAS_CHECK(cublasLtMatmul(mm->handle, desc, &g.alpha, g.b, layouts[0], g.a, layouts[1], &beta, g.d,
                                    layouts[2], g.d, layouts[2], &plan->algo, mm->workspace, MATMUL_WORKSPACE,
                                    mm->stream));
    }
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(desc));
    for (int i = 0; i < 3; i++) CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(layouts[i]));
    return plan->supported;
}

// Adds bias[cols] to x[rows, cols], for products whose epilogue cannot.
__global__ void bias_add_kernel(floatX *x, const floatX *bias, size_t rows, size_t cols, size_t ld) {
    size_t col = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= cols) return;
    float add = to_float(bias[col]);
    for (size_t row = blockIdx.y; row < rows; row += gridDim.y)
        x[row * ld + col] = from_float<floatX>(to_float(x[row * ld + col]) + add);
}

// Queues the product that GemmArgs describes. A kernel adds the bias if cuBLASLt has no algorithm that does.
static inline void gemm(Matmul *mm, const GemmArgs &g) {
    if (g.bias && gemm_launch(mm, g, CUBLASLT_EPILOGUE_BIAS)) return;
    if (!gemm_launch(mm, g, CUBLASLT_EPILOGUE_DEFAULT)) {
        fflush(stdout);
        fprintf(stderr, "matrix product [%zu,%zu] x [%zu,%zu]: cuBLASLt has no algorithm\n", g.M, g.K, g.K, g.N);
        exit(1);
    }
    if (!g.bias) return;
    kernel_cost(KERNEL_ELEMENTWISE, g.M * g.N, 2 * sizeof(floatX), 1);
    dim3 grid((unsigned)CEIL_DIV(g.N, (size_t)128), (unsigned)(g.M < 256 ? g.M : 256));
    LAUNCH(bias_add_kernel, grid, 128, 0, mm->stream)((floatX *)g.d, g.bias, g.M, g.N, g.ldd);
}

// out[N,OC] = inp[N,IC] weight[IC,OC] (+ bias[OC], unless it is NULL).
static inline void matmul_forward(Matmul *mm, floatX *out, const floatX *inp, const floatX *weight,
                                  const floatX *bias, size_t N, size_t IC, size_t OC) {
    gemm(mm, gemm_args(out, false, inp, false, weight, false, N, OC, IC, bias));
}

// dinp[N,IC] = dout[N,OC] weight[IC,OC]^T
static inline void matmul_backward_input(Matmul *mm, floatX *dinp, const floatX *dout, const floatX *weight,
                                         size_t N, size_t IC, size_t OC) {
    gemm(mm, gemm_args(dinp, false, dout, false, weight, true, N, IC, OC));
}

// dweight[IC,OC] (float) = or += inp[N,IC]^T dout[N,OC].
static inline void matmul_backward_weight(Matmul *mm, float *dweight, const floatX *inp, const floatX *dout,
                                          size_t N, size_t IC, size_t OC, bool accumulate) {
    gemm(mm, gemm_args(dweight, true, inp, true, dout, false, IC, OC, N, NULL, accumulate));
}

// out[N,OC] = inp[N,IC] weight[OC,IC]^T (+ bias[OC], unless it is NULL).
static inline void linear_forward(Matmul *mm, floatX *out, const floatX *inp, const floatX *weight,
                                  const floatX *bias, size_t N, size_t IC, size_t OC) {
    gemm(mm, gemm_args(out, false, inp, false, weight, true, N, OC, IC, bias));
}

// dinp[N,IC] = dout[N,OC] weight[OC,IC]
static inline void linear_backward_input(Matmul *mm, floatX *dinp, const floatX *dout, const floatX *weight,
                                         size_t N, size_t IC, size_t OC) {
    gemm(mm, gemm_args(dinp, false, dout, false, weight, false, N, IC, OC));
}

// dweight[OC,IC] (float) = or += dout[N,OC]^T inp[N,IC].
static inline void linear_backward_weight(Matmul *mm, float *dweight, const floatX *inp, const floatX *dout,
                                          size_t N, size_t IC, size_t OC, bool accumulate) {
    gemm(mm, gemm_args(dweight, true, dout, true, inp, false, OC, IC, N, NULL, accumulate));
}

#endif
