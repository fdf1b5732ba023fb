// matmul.cuh: every matrix product of the trainers, on cuBLASLt.
// Matrices are row-major [rows, cols]; a weight is [IC, OC] as in Hugging Face's GPT-2, the embedding [V, C].
//
// defines: Matmul, matmul_create, matmul_tune, matmul_tuned, GemmArgs, gemm_args, gemm,
//          matmul_forward, matmul_backward_input, matmul_backward_weight,
//          head_forward, head_backward_input, head_backward_weight
#ifndef LLMC_MATMUL_CUH
#define LLMC_MATMUL_CUH

#include <cublasLt.h>
#include <math.h>

#include "llmc/host/gemm_plans.h"
#include "llmc/kernels/cuda_common.cuh"

static constexpr size_t MATMUL_PLANS = 256;

enum {
    GEMM_CANDIDATES = 8,  // algorithms that are timed
    GEMM_RUNS = 5,        // of each, the first left out; the fastest run counts
};
static_assert(sizeof(cublasLtMatmulAlgo_t) == GEMM_ALGORITHM * sizeof(uint64_t), "a file of plans keeps so many words");

// What cuBLASLt may take for itself. The stand-in takes hardly anything, and each rank fills what it allocates.
#ifdef __CUDACC__
static constexpr size_t MATMUL_WORKSPACE = 32 << 20;
#else
static constexpr size_t MATMUL_WORKSPACE = 4 << 10;
#endif

// Which algorithm one problem takes; asking cuBLASLt's heuristic anew costs more than a small product.
typedef struct {
    uint64_t key[GEMM_KEY];
    bool used, supported;
    cublasLtMatmulAlgo_t algo;
} MatmulPlan;

// One per stream: all calls that take it are queued there, in order, and share its workspace.
typedef struct Matmul {
    cublasLtHandle_t handle;
    cudaStream_t stream;
    void *workspace;
    size_t workspace_size;
    MatmulPlan plans[MATMUL_PLANS];
    GemmChoices choices;
} Matmul;

// The Matmul is large: keep it in a struct of the heap or static memory. Failures end the program.
static inline void matmul_create(Matmul *mm, cudaStream_t stream) {
    memset(mm, 0, sizeof *mm);
    mm->stream = stream;
    mm->workspace_size = MATMUL_WORKSPACE;
    CUDA_CHECK(cudaMalloc(&mm->workspace, mm->workspace_size));
    CUBLAS_CHECK(cublasLtCreate(&mm->handle));
}

// From now on the first product of each kind takes the algorithm that the file names, or times several, takes the
// fastest and adds it to the file. False, with a sentence, if the file cannot be used.
static inline bool matmul_tune(Matmul *mm, const char *path, Error *err) {
    int device;
    struct cudaDeviceProp prop;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&prop, device));
    char head[512];
    snprintf(head, sizeof head, "matrix products of %s, " FLOATX_NAME ", cuBLASLt %zu\n", prop.name,
             (size_t)cublasLtGetVersion());
    return gemm_choices_open(&mm->choices, path, head, err);
}

// Products that are not in the file take the heuristic's first algorithm from now on: timing waits for the device,
// which must not be where messages between stages are in flight. All ranks that share the file have done their timing.
static inline void matmul_tuned(Matmul *mm) {
    Error err;
    mm->choices.timing = false;
    if (mm->choices.path && !gemm_choices_update(&mm->choices, &err)) gemm_choices_fail(&err);
}

// d[M,N] = alpha op(a)[M,K] op(b)[K,N] + (accumulate ? d : 0) + bias; op transposes if trans_. Leading dimensions, from
// one row as stored to the next, count elements. A bias goes with a d of type floatX that is not accumulated.
typedef struct {
    const floatX *a, *b;
    void *d; // float if d_fp32, else floatX
    bool d_fp32, trans_a, trans_b;
    size_t M, N, K, lda, ldb, ldd;
    float alpha;
    bool accumulate;
    const floatX *bias; // [N] or NULL
} GemmArgs;

// The arguments of a product of dense matrices.
static inline GemmArgs gemm_args(void *d, bool d_fp32, const floatX *a, bool trans_a, const floatX *b,
                                 bool trans_b, size_t M, size_t N, size_t K) {
    GemmArgs g;
    memset(&g, 0, sizeof g);
    g.a = a, g.b = b, g.d = d, g.d_fp32 = d_fp32, g.trans_a = trans_a, g.trans_b = trans_b;
    g.M = M, g.N = N, g.K = K, g.lda = trans_a ? M : K, g.ldb = trans_b ? K : N, g.ldd = N;
    g.alpha = 1.0f;
    return g;
}

// The largest power of two (up to 256) of which the address is a multiple.
static inline uint32_t gemm_alignment(const void *p) {
    uint32_t align = 256;
    while ((uintptr_t)p % align) align /= 2;
    return align;
}

static inline cublasLtMatrixLayout_t gemm_layout(cudaDataType type, size_t rows, size_t cols, size_t ld) {
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type, rows, cols, (int64_t)ld));
    return layout;
}

// Asks the heuristic for up to `most` algorithms, the one it thinks fastest first. Returns how many there are.
static inline int gemm_search(Matmul *mm, cublasLtMatmulAlgo_t *algos, int most, cublasLtMatmulDesc_t desc,
                              const cublasLtMatrixLayout_t layouts[3] /*A B D*/, const uint32_t align[3]) {
    cublasLtMatmulPreference_t pref;
    uint64_t workspace = mm->workspace_size;
    // Partial sums of a split K are kept in float, not in the type of the output.
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&pref));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &workspace, sizeof workspace));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                      &reduction, sizeof reduction));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                                                      &align[0], sizeof align[0]));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                                      &align[1], sizeof align[1]));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                                                      &align[2], sizeof align[2]));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                                                      &align[2], sizeof align[2]));
    cublasLtMatmulHeuristicResult_t results[GEMM_CANDIDATES];
    int found = 0, count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(mm->handle, desc, layouts[0], layouts[1], layouts[2],
                                                           layouts[2], pref, most, results, &found);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(pref));
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return 0;
    CUBLAS_CHECK(status);
    for (int i = 0; i < found; i++) {
        if (results[i].state == CUBLAS_STATUS_SUCCESS) algos[count++] = results[i].algo;
    }
    return count;
}

// Queues the product with one algorithm; d may be another place than g->d.
static inline void gemm_queue(Matmul *mm, const GemmArgs *g, void *d, cublasLtMatmulDesc_t desc,
                              const cublasLtMatrixLayout_t layouts[3], const cublasLtMatmulAlgo_t *algo) {
    float beta = g->accumulate ? 1.0f : 0.0f;
    gemm_cost(g->M, g->N, g->K, sizeof(floatX), g->d_fp32 ? sizeof(float) : sizeof(floatX), g->accumulate);
    CUBLAS_CHECK(cublasLtMatmul(mm->handle, desc, &g->alpha, g->b, layouts[0], g->a, layouts[1], &beta, g->d,
                                layouts[2], d, layouts[2], algo, mm->workspace, mm->workspace_size, mm->stream));
}

// Which of the algorithms is the fastest, by the clock. A result that is added to comes out elsewhere meanwhile;
// without room for it the heuristic is believed.
static inline int gemm_fastest(Matmul *mm, const GemmArgs *g, cublasLtMatmulDesc_t desc,
                               const cublasLtMatrixLayout_t layouts[3], const cublasLtMatmulAlgo_t *algos, int count) {
    void *d = g->d;
    size_t bytes = ((g->M - 1) * g->ldd + g->N) * (g->d_fp32 ? sizeof(float) : sizeof(floatX));
    if (g->accumulate && cudaMalloc(&d, bytes) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    int best = 0;
    float shortest = INFINITY;
    for (int i = 0; i < count * GEMM_RUNS; i++) {
        float ms;
        CUDA_CHECK(cudaEventRecord(begin, mm->stream));
        gemm_queue(mm, g, d, desc, layouts, &algos[i / GEMM_RUNS]);
        CUDA_CHECK(cudaEventRecord(end, mm->stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i % GEMM_RUNS > 0 && ms < shortest) shortest = ms, best = i / GEMM_RUNS;
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    if (g->accumulate) CUDA_CHECK(cudaFree(d));
    return best;
}

// Finds the algorithm of a problem: in the file, by timing, or as the heuristic says. false: there is none. The device
// is idle before the file is locked: work that waits for a rank which waits for the lock would never end.
static inline bool gemm_choose(Matmul *mm, cublasLtMatmulAlgo_t *algo, const uint64_t key[GEMM_KEY],
                               const GemmArgs *g, cublasLtMatmulDesc_t desc,
                               const cublasLtMatrixLayout_t layouts[3], const uint32_t align[3]) {
    GemmChoices *c = &mm->choices;
    if (c->path && gemm_choices_find(c, key, algo->data)) return true;
    cublasLtMatmulAlgo_t algos[GEMM_CANDIDATES];
    int count = gemm_search(mm, algos, c->timing ? (int)GEMM_CANDIDATES : 1, desc, layouts, align);
    if (count == 0) return false;
    *algo = algos[0];
    if (count == 1) return true;
    CUDA_CHECK(cudaDeviceSynchronize());
    bool known = gemm_choices_begin(c, key, algo->data);
    if (!known) *algo = algos[gemm_fastest(mm, g, desc, layouts, algos, count)];
    gemm_choices_end(c, known ? NULL : key, algo->data);
    return true;
}

// The place of a problem in the table, found or to be filled. A full table reuses the first one tried.
static inline MatmulPlan *gemm_plan(Matmul *mm, const uint64_t key[GEMM_KEY]) {
    uint64_t hash = 0;
    for (int i = 0; i < GEMM_KEY; i++) hash = (hash ^ key[i]) * 0x9E3779B97F4A7C15u + (hash >> 29);
    for (size_t probe = 0; probe < MATMUL_PLANS; probe++) {
        MatmulPlan *plan = &mm->plans[(hash + probe) % MATMUL_PLANS];
        if (!plan->used || memcmp(plan->key, key, sizeof plan->key) == 0) return plan;
    }
    MatmulPlan *plan = &mm->plans[hash % MATMUL_PLANS];
    plan->used = false;
    return plan;
}

// One cuBLASLt call. false: no algorithm for this problem with this epilogue; nothing was queued.
static inline bool gemm_launch(Matmul *mm, const GemmArgs *g, cublasLtEpilogue_t epilogue) {
    // cuBLASLt's matrices are column-major: it sees ours transposed, and computes d^T[N,M] = op(b)^T op(a)^T.
    cudaDataType type = CUDA_FLOATX, type_d = g->d_fp32 ? CUDA_R_32F : CUDA_FLOATX;
    cublasLtMatrixLayout_t layouts[3] = {
        gemm_layout(type, g->trans_b ? g->K : g->N, g->trans_b ? g->N : g->K, g->ldb),
        gemm_layout(type, g->trans_a ? g->M : g->K, g->trans_a ? g->K : g->M, g->lda),
        gemm_layout(type_d, g->N, g->M, g->ldd)};
    cublasLtMatmulDesc_t desc;
    int32_t op_a = g->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = g->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    uint32_t ep = (uint32_t)epilogue;
    bool has_bias = epilogue == CUBLASLT_EPILOGUE_BIAS;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F)); // true float: no TF32
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &ep, sizeof ep));
    if (has_bias) {
        CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias,
                                                    sizeof g->bias));
    }
    uint32_t align[3] = {gemm_alignment(g->b), gemm_alignment(g->a), gemm_alignment(g->d)};
    uint64_t flags = (uint64_t)g->d_fp32 | (uint64_t)g->trans_a << 1 | (uint64_t)g->trans_b << 2 |
                     (uint64_t)g->accumulate << 3 | (uint64_t)ep << 8;
    uint64_t aligns = (uint64_t)align[0] | (uint64_t)align[1] << 10 | (uint64_t)align[2] << 20 |
                      (uint64_t)(has_bias ? gemm_alignment(g->bias) : 0) << 30;
    uint64_t key[GEMM_KEY] = {g->M, g->N, g->K, g->lda, g->ldb, g->ldd, flags, aligns};
    MatmulPlan *plan = gemm_plan(mm, key);
    if (!plan->used) {
        memcpy(plan->key, key, sizeof key);
        plan->used = true;
        plan->supported = gemm_choose(mm, &plan->algo, key, g, desc, layouts, align);
    }
    if (plan->supported) gemm_queue(mm, g, g->d, desc, layouts, &plan->algo);
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(desc));
    for (int i = 0; i < 3; i++) CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(layouts[i]));
    return plan->supported;
}

// x[rows, cols] += bias[cols], where no GEMM would do it.
__global__ void bias_add_kernel(floatX *x, const floatX *bias, size_t rows, size_t cols, size_t ld) {
    size_t col = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= cols) return;
    float add = to_float(bias[col]);
    for (size_t row = blockIdx.y; row < rows; row += gridDim.y) {
        x[row * ld + col] = from_float<floatX>(to_float(x[row * ld + col]) + add);
    }
}

static inline void gemm_fail(const GemmArgs *g, const char *why) {
    fflush(stdout);
    fprintf(stderr, "matrix product [%zu,%zu] x [%zu,%zu]: %s\n", g->M, g->K, g->K, g->N, why);
    exit(1);
}

// See GemmArgs. Where cuBLASLt does not add the bias, a kernel does.
static inline void gemm(Matmul *mm, const GemmArgs *g) {
    if (g->bias && (g->d_fp32 || g->accumulate))
        gemm_fail(g, "a bias is not offered with a float or accumulated result");
    if (g->bias && gemm_launch(mm, g, CUBLASLT_EPILOGUE_BIAS)) return;
    if (!gemm_launch(mm, g, CUBLASLT_EPILOGUE_DEFAULT)) gemm_fail(g, "cuBLASLt has no algorithm");
    if (!g->bias) return;
    kernel_cost(KERNEL_ELEMENTWISE, g->M * g->N, 2 * sizeof(floatX), 1);
    dim3 grid((unsigned)CEIL_DIV(g->N, (size_t)128), (unsigned)(g->M < 256 ? g->M : 256));
    LAUNCH(bias_add_kernel, grid, 128, 0, mm->stream)((floatX *)g->d, g->bias, g->M, g->N, g->ldd);
}

// out[N,OC] = inp[N,IC] weight[IC,OC] (+ bias[OC], unless it is NULL).
static inline void matmul_forward(Matmul *mm, floatX *out, const floatX *inp, const floatX *weight,
                                  const floatX *bias, size_t N, size_t IC, size_t OC) {
    GemmArgs g = gemm_args(out, false, inp, false, weight, false, N, OC, IC);
    g.bias = bias;
    gemm(mm, &g);
}

// dinp[N,IC] = dout[N,OC] weight[IC,OC]^T
static inline void matmul_backward_input(Matmul *mm, floatX *dinp, const floatX *dout, const floatX *weight,
                                         size_t N, size_t IC, size_t OC) {
    GemmArgs g = gemm_args(dinp, false, dout, false, weight, true, N, IC, OC);
    gemm(mm, &g);
}

// dweight[IC,OC] (float) = or += inp[N,IC]^T dout[N,OC].
static inline void matmul_backward_weight(Matmul *mm, float *dweight, const floatX *inp, const floatX *dout,
                                          size_t N, size_t IC, size_t OC, bool accumulate) {
    GemmArgs g = gemm_args(dweight, true, inp, true, dout, false, IC, OC, N);
    g.accumulate = accumulate;
    gemm(mm, &g);
}

// logits[N,Vl] = inp[N,C] wte[Vl,C]^T
static inline void head_forward(Matmul *mm, floatX *logits, const floatX *inp, const floatX *wte, size_t N,
                                size_t C, size_t Vl) {
    GemmArgs g = gemm_args(logits, false, inp, false, wte, true, N, Vl, C);
    gemm(mm, &g);
}

// dinp[N,C] = dlogits[N,Vl] wte[Vl,C]
static inline void head_backward_input(Matmul *mm, floatX *dinp, const floatX *dlogits, const floatX *wte,
                                       size_t N, size_t C, size_t Vl) {
    GemmArgs g = gemm_args(dinp, false, dlogits, false, wte, false, N, C, Vl);
    gemm(mm, &g);
}

// dwte[Vl,C] (float) = or += dlogits[N,Vl]^T inp[N,C].
static inline void head_backward_weight(Matmul *mm, float *dwte, const floatX *inp, const floatX *dlogits,
                                        size_t N, size_t C, size_t Vl, bool accumulate) {
    GemmArgs g = gemm_args(dwte, true, dlogits, true, inp, false, Vl, C, N);
    g.accumulate = accumulate;
    gemm(mm, &g);
}

#endif
