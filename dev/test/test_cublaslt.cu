// test_cublaslt.cu: the CPU stand-in cublasLt.h against plain loops in double: every
// transposition, epilogue and type at ragged sizes; and its refusals.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <omp.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dev/test/check.h"

static Check checks;

typedef struct {
    cudaDataType type;
    size_t count;
    float *host; // the values, rounded to the type
    void *device;
} Array;

static size_t type_size(cudaDataType type) {
    return type == CUDA_R_16BF ? sizeof(__nv_bfloat16) : sizeof(float);
}

// Makes an array of numbers uniform in [-1, 1), rounded to the type.
static Array array_create(cudaDataType type, size_t count, uint32_t *seed) {
    Array a = {type, count, (float *)malloc(count * sizeof(float)), NULL};
    void *stored = malloc(count * type_size(type));
    for (size_t i = 0; i < count; i++) {
        *seed = *seed * 1664525u + 1013904223u;
        float x = (float)(*seed >> 8) / 8388608.0f - 1.0f;
        if (type == CUDA_R_16BF) {
            ((__nv_bfloat16 *)stored)[i] = __float2bfloat16_rn(x);
            x = __bfloat162float(((__nv_bfloat16 *)stored)[i]);
        } else {
            ((float *)stored)[i] = x;
        }
        a.host[i] = x;
    }
    if (cudaMalloc(&a.device, count * type_size(type)) != cudaSuccess) exit(1);
    cudaMemcpy(a.device, stored, count * type_size(type), cudaMemcpyHostToDevice);
    free(stored);
    return a;
}

// Returns the array's values on the device.
static float *array_read(const Array *a) {
    float *values = (float *)malloc(a->count * sizeof(float));
    void *stored = malloc(a->count * type_size(a->type));
    cudaMemcpy(stored, a->device, a->count * type_size(a->type), cudaMemcpyDeviceToHost);
    for (size_t i = 0; i < a->count; i++) {
        values[i] = a->type == CUDA_R_16BF ? __bfloat162float(((__nv_bfloat16 *)stored)[i])
                                           : ((float *)stored)[i];
    }
    free(stored);
    return values;
}

static void array_free(Array *a) {
    cudaFree(a->device);
    free(a->host);
}

typedef struct {
    cudaDataType type, type_d;
    int trans_a, trans_b;
    uint32_t epilogue;
    float beta;
    size_t m, n, k;
} Case;

static cublasLtMatrixLayout_t layout(cudaDataType type, size_t rows, size_t cols) {
    cublasLtMatrixLayout_t l;
    cublasLtMatrixLayoutCreate(&l, type, rows, cols, (int64_t)rows);
    return l;
}

// All arguments of a call, so that the tests of misuse can spoil one of them.
typedef struct {
    cublasLtHandle_t handle;
    cudaStream_t stream;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    const void *A, *B;
    void *D;
    float alpha, beta;
} Call;

static cublasStatus_t call_matmul(const Call *c, const cublasLtMatmulAlgo_t *algo) {
    return cublasLtMatmul(c->handle, c->desc, &c->alpha, c->A, c->a, c->B, c->b, &c->beta, c->D,
                          c->d, c->D, c->d, algo, NULL, 0, c->stream);
}

static void set_pointer(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attr,
                        const void *p) {
    cublasLtMatmulDescSetAttribute(desc, attr, &p, sizeof p);
}

// Returns the dot product of two vectors, and the sum of the sizes of its terms. Sanitized, it
// would be most of the time.
__attribute__((no_sanitize("address", "undefined"))) static double plain_dot(
    const float *a, size_t step_a, const float *b, size_t step_b, size_t n, double *size) {
    double sum = 0;
    *size = 0;
    for (size_t i = 0; i < n; i++) {
        double product = (double)a[i * step_a] * (double)b[i * step_b];
        sum += product;
        *size += fabs(product);
    }
    return sum;
}

// Returns the largest error of D as a multiple of the bound.
static double run_case(cublasLtHandle_t handle, cudaStream_t stream, const Case *c) {
    uint32_t seed = (uint32_t)(c->m * 31 + c->n * 17 + c->k + c->epilogue);
    size_t a_rows = c->trans_a ? c->k : c->m, a_cols = c->trans_a ? c->m : c->k;
    size_t b_rows = c->trans_b ? c->n : c->k, b_cols = c->trans_b ? c->k : c->n;
    size_t nd = c->m * c->n;
    Array a = array_create(c->type, a_rows * a_cols, &seed),
          b = array_create(c->type, b_rows * b_cols, &seed);
    Array d = array_create(c->type_d, nd, &seed), bias = array_create(c->type_d, c->m, &seed);

    Call call = {handle,   stream,   NULL,     NULL, NULL,   NULL,
                 a.device, b.device, d.device, 1.0f, c->beta};
    cublasLtMatmulDescCreate(&call.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    int32_t trans_a = c->trans_a, trans_b = c->trans_b;
    cublasLtMatmulDescSetAttribute(call.desc, CUBLASLT_MATMUL_DESC_TRANSA, &trans_a,
                                   sizeof trans_a);
    cublasLtMatmulDescSetAttribute(call.desc, CUBLASLT_MATMUL_DESC_TRANSB, &trans_b,
                                   sizeof trans_b);
    cublasLtMatmulDescSetAttribute(call.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &c->epilogue,
                                   sizeof c->epilogue);
    if (c->epilogue & 4) set_pointer(call.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.device);
    call.a = layout(c->type, a_rows, a_cols);
    call.b = layout(c->type, b_rows, b_cols);
    call.d = layout(c->type_d, c->m, c->n);
    if (c->beta == 0)
        cudaMemset(d.device, 0xff, nd * type_size(c->type_d));  // then NaN in D must not matter
    cublasStatus_t status = call_matmul(&call, NULL);
    cudaStreamSynchronize(stream);
    float *got = array_read(&d);

    double worst = status == CUBLAS_STATUS_SUCCESS ? 0 : 1e30;
    double half_ulp = c->type_d == CUDA_R_16BF ? 1.0 / 256 : 1.2e-7;
    for (size_t i = 0; i < nd; i++) {
        size_t col = i / c->m, row = i % c->m;
        double size,
            v = plain_dot(a.host + (c->trans_a ? row * a_rows : row), c->trans_a ? 1 : a_rows,
                          b.host + (c->trans_b ? col : col * b_rows), c->trans_b ? b_rows : 1,
                          c->k, &size);
        if (c->beta != 0) v += c->beta * d.host[i];
        if (c->epilogue & 4) v += bias.host[row];
        double bound = 1e-6 * (size + 1);
        worst = fmax(worst, fabs(got[i] - v) / (1.2 * bound + half_ulp * fabs(v)));
        if (!(fabs(got[i]) < 1e30)) worst = 1e30;
    }
    free(got);
    array_free(&a), array_free(&b), array_free(&d), array_free(&bias);
    cublasLtMatrixLayoutDestroy(call.a), cublasLtMatrixLayoutDestroy(call.b),
        cublasLtMatrixLayoutDestroy(call.d);
    cublasLtMatmulDescDestroy(call.desc);
    return worst;
}

static void test_products(cublasLtHandle_t handle, cudaStream_t stream) {
    static const struct {
        const char *name;
        cudaDataType in, out;
    } types[] = {{"float32", CUDA_R_32F, CUDA_R_32F},
                 {"bfloat16", CUDA_R_16BF, CUDA_R_16BF},
                 {"bfloat16 to float32", CUDA_R_16BF, CUDA_R_32F}};
    static const struct {
        const char *name;
        uint32_t value;
    } epilogues[] = {{"default", CUBLASLT_EPILOGUE_DEFAULT}, {"bias", CUBLASLT_EPILOGUE_BIAS}};
    static const size_t shapes[][3] = {{1, 1, 1},     {7, 5, 3},     {18, 24, 65}, {130, 61, 97},
                                       {64, 64, 64},  {65, 33, 18},  {6, 24, 24},  {1, 9, 70},
                                       {97, 270, 12}, {390, 20, 800}};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        for (size_t e = 0; e < sizeof epilogues / sizeof *epilogues; e++) {
            double worst = 0;
            for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
                for (int variant = 0; variant < 8; variant++) {
                    const size_t *z = shapes[s];
                    Case c = {types[t].in,
                              types[t].out,
                              variant & 1,
                              variant >> 1 & 1,
                              epilogues[e].value,
                              variant & 4 ? 1.0f : 0.0f,
                              z[0],
                              z[1],
                              z[2]};
                    if (e != 0 && (s == 9 ? variant > 0 : (variant ^ variant >> 2) & 1))
                        continue; // fewer will do
                    worst = fmax(worst, run_case(handle, stream, &c));
                }
            }
            check(&checks, worst <= 1, "%s, %s (error %.2f of the bound)", types[t].name,
                  epilogues[e].name, worst);
        }
    }
    // Large enough for several tiles and blocks of K, and rows a multiple of 4 KiB apart.
    double worst = 0;
    for (int v = 0; v < 4; v++) {
        Case c = {v & 1 ? CUDA_R_16BF : CUDA_R_32F, CUDA_R_32F, 0, 1, CUBLASLT_EPILOGUE_DEFAULT,
                  v & 2 ? 1.0f : 0.0f, 410, 1024, 50};
        worst = fmax(worst, run_case(handle, stream, &c));
        Case long_k = {v & 1 ? CUDA_R_16BF : CUDA_R_32F,
                       CUDA_R_32F,
                       0,
                       1,
                       CUBLASLT_EPILOGUE_DEFAULT,
                       v & 2 ? 1.0f : 0.0f,
                       17,
                       1024,
                       1700};
        worst = fmax(worst, run_case(handle, stream, &long_k));
    }
    check(&checks, worst <= 1, "several tiles and blocks of K (error %.2f of the bound)", worst);
}

// Checks that the bits do not depend on the number of threads: ranks of other layouts have more
// or fewer.
static void test_threads(cublasLtHandle_t handle, cudaStream_t stream) {
    uint32_t seed = 1;
    size_t m = 600, n = 300, k = 500;
    Array a = array_create(CUDA_R_32F, m * k, &seed), b = array_create(CUDA_R_32F, k * n, &seed);
    Array d = array_create(CUDA_R_32F, m * n, &seed);
    Call call = {handle, stream, NULL, layout(CUDA_R_32F, m, k), layout(CUDA_R_32F, k, n),
                 layout(CUDA_R_32F, m, n), a.device, b.device, d.device, 1.0f, 0.0f};
    cublasLtMatmulDescCreate(&call.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    float *first = NULL;
    bool same = true;
    int threads = omp_get_max_threads();
    for (int t = 1; t <= 5; t++) {
        omp_set_num_threads(t);
        same &= call_matmul(&call, NULL) == CUBLAS_STATUS_SUCCESS;
        cudaStreamSynchronize(stream);
        float *got = array_read(&d);
        if (first)
            same &= memcmp(first, got, m * n * sizeof(float)) == 0, free(got);
        else
            first = got;
    }
    omp_set_num_threads(threads);
    check(&checks, same, "same bits with 1 to 5 threads");
    free(first);
    array_free(&a), array_free(&b), array_free(&d);
    cublasLtMatrixLayoutDestroy(call.a), cublasLtMatrixLayoutDestroy(call.b),
        cublasLtMatrixLayoutDestroy(call.d);
    cublasLtMatmulDescDestroy(call.desc);
}

// Checks that every algorithm is right, and that no two have the same bits.
static void test_algorithms(cublasLtHandle_t handle, cudaStream_t stream) {
    const size_t n = 64;
    uint32_t seed = 5;
    Array a = array_create(CUDA_R_32F, n * n, &seed), b = array_create(CUDA_R_32F, n * n, &seed);
    Array d = array_create(CUDA_R_32F, n * n, &seed);
    cublasLtMatrixLayout_t square = layout(CUDA_R_32F, n, n);
    cublasLtMatmulDesc_t desc;
    cublasLtMatmulPreference_t pref;
    cublasLtMatmulHeuristicResult_t results[8];
    int found = 0;
    cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulPreferenceCreate(&pref);
    uint32_t align = 4;
    for (int i = 0; i < 4; i++)
        cublasLtMatmulPreferenceSetAttribute(
            pref,
            (cublasLtMatmulPreferenceAttributes_t)(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES + i),
            &align, sizeof align);
    const Call call = {handle,   stream,   desc,     square, square, square,
                       a.device, b.device, d.device, 1.0f,   0.0f};
    cublasLtMatmulAlgoGetHeuristic(handle, desc, square, square, square, square, pref, 8, results,
                                   &found);
    check(&checks, found == CPU_LT_ALGORITHMS, "8 algorithms wanted, %d proposed", found);

    float *got[8] = {};
    double worst = 0;
    bool differ = true;
    for (int i = 0; i < found; i++) {
        if (call_matmul(&call, &results[i].algo) != CUBLAS_STATUS_SUCCESS) worst = 1e30;
        cudaStreamSynchronize(stream);
        got[i] = array_read(&d);
        for (size_t at = 0; at < n * n; at++) {
            double size, want = plain_dot(a.host + at % n, n, b.host + at / n * n, 1, n, &size);
            worst = fmax(worst, fabs(got[i][at] - want) / (1e-6 * (size + 1)));
        }
        for (int j = 0; j < i; j++)
            differ &= memcmp(got[i], got[j], n * n * sizeof(float)) != 0;
    }
    check(&checks, worst <= 1 && differ, "all are right (error %.2f of the bound), none has the "
          "bits of another", worst);
    for (int i = 0; i < found; i++) free(got[i]);
    array_free(&a);
    array_free(&b);
    array_free(&d);
    cublasLtMatrixLayoutDestroy(square);
    cublasLtMatmulPreferenceDestroy(pref);
    cublasLtMatmulDescDestroy(desc);
}

static void expect(cublasStatus_t got, cublasStatus_t want, const char *what) {
    check(&checks, got == want, "%s: status %d", what, (int)got);
}

static void test_misuse(cublasLtHandle_t handle, cudaStream_t stream) {
    const cublasStatus_t ok = CUBLAS_STATUS_SUCCESS, invalid = CUBLAS_STATUS_INVALID_VALUE;
    const cublasStatus_t unsupported = CUBLAS_STATUS_NOT_SUPPORTED;
    const size_t n = 16;
    float *buffer, *host = (float *)calloc(4 * n * n, sizeof(float));
    cudaMalloc((void **)&buffer, 4 * n * n * sizeof(float));
    float *A = buffer, *B = A + n * n, *D = B + n * n, *last = D + n * n;
    cublasLtMatrixLayout_t square = layout(CUDA_R_32F, n, n), tall = layout(CUDA_R_32F, n + 1, n);
    cublasLtMatrixLayout_t half = layout(CUDA_R_16BF, n, n), empty = layout(CUDA_R_32F, 0, n), none;
    expect(cublasLtMatrixLayoutCreate(&none, CUDA_R_32F, n, n, n + 1), unsupported,
           "columns with gaps");
    cublasLtMatmulDesc_t desc;
    cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    const Call good = {handle, stream, desc, square, square, square, A, B, D, 1.0f, 0.0f};
    Call c;

    const struct {
        cublasLtMatrixLayout_t a, d;
        const void *A;
        void *D;
        cublasStatus_t status;
        const char *what;
    } calls[] = {
        {square, square, A, D, ok, "the legal call of these tests"},
        {tall, square, A, D, invalid, "sizes that do not fit"},
        {empty, square, A, D, invalid, "no rows"},
        {half, square, A, D, unsupported, "float32 times bfloat16"},
        {square, half, A, D, unsupported, "float32 to bfloat16"},
        {square, square, host, D, invalid, "input in host memory"},
        {square, square, A, last + 4, invalid, "output past its allocation"},
        {square, square, A, A, invalid, "output over an input"},
        {square, square, A, B + 4, invalid, "output over part of an input"},
        {square, square, (const char *)A + 2, D, invalid, "input between two floats"},
    };
    for (const auto &call : calls) {
        c = good, c.a = call.a, c.d = call.d, c.A = call.A, c.D = call.D;
        expect(call_matmul(&c, NULL), call.status, call.what);
    }
    c = good, c.alpha = 0.5f;
    expect(call_matmul(&c, NULL), unsupported, "a factor");
    c = good;
    expect(cublasLtMatmul(handle, desc, &c.alpha, A, square, B, square, &c.beta, D, square, D,
                          square, NULL, host, 64, stream),
           invalid, "workspace in host memory");

    uint32_t plain = CUBLASLT_EPILOGUE_DEFAULT, bias = CUBLASLT_EPILOGUE_BIAS;
    int64_t wide_value = CUBLASLT_EPILOGUE_BIAS;
    expect(cublasLtMatmulDescSetAttribute(desc, (cublasLtMatmulDescAttributes_t)99, &plain,
                                          sizeof plain),
           invalid, "unknown attribute");
    expect(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &wide_value,
                                          sizeof wide_value),
           invalid, "attribute of the wrong size");
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &bias, sizeof bias);
    expect(call_matmul(&good, NULL), invalid, "bias without a pointer");
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &plain, sizeof plain);

    cublasLtMatmulPreference_t pref;
    cublasLtMatmulHeuristicResult_t result;
    int found = -1;
    uint64_t workspace = 1 << 20;
    cublasLtMatmulPreferenceCreate(&pref);
    expect(cublasLtMatmulAlgoGetHeuristic(handle, desc, square, square, square, square, pref, 1,
                                          &result, &found),
           ok, "an algorithm");
    check(&checks, found == 1 && result.state == ok && result.workspaceSize == 0,
          "one algorithm without workspace");
    c = good, c.A = A + 4, c.D = last, c.d = square;
    expect(call_matmul(&c, &result.algo), invalid,
           "pointer less aligned than promised to the heuristic");
    expect(call_matmul(&good, &result.algo), ok, "the algorithm with what was promised");
    int32_t trans = CUBLAS_OP_T, plain_op = CUBLAS_OP_N;
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &trans, sizeof trans);
    expect(call_matmul(&good, &result.algo), invalid, "an algorithm of another problem");
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &plain_op, sizeof plain_op);
    cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                         sizeof workspace);
    cublasLtMatmulAlgoGetHeuristic(handle, desc, square, square, square, square, pref, 1, &result,
                                   &found);
    expect(call_matmul(&good, &result.algo), invalid, "less workspace than the algorithm needs");

    cudaStreamSynchronize(stream);
    cublasLtMatrixLayout_t all[] = {square, tall, half, empty};
    for (cublasLtMatrixLayout_t l : all) cublasLtMatrixLayoutDestroy(l);
    cublasLtMatmulPreferenceDestroy(pref);
    cublasLtMatmulDescDestroy(desc);
    cudaFree(buffer);
    free(host);
}

int main(void) {
    cublasLtHandle_t handle;
    cudaStream_t stream;
    cublasLtCreate(&handle);
    cudaStreamCreate(&stream);
    test_products(handle, stream);
    test_threads(handle, stream);
    test_algorithms(handle, stream);
    test_misuse(handle, stream);
    return check_summary(&checks);
}
