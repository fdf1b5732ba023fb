// matmul.cu: checks matmul.cuh against plain loops in double at ragged sizes.
// `matmul bench [ROWS]` instead times the products of GPT-2 124M (256 rows unless told) and prints GFLOP/s.
#include "llmc/matmul.cuh"

#include "dev/cuda/kernel_test.h"

static Check checks;

typedef struct {
    size_t N, IC, OC;
} Shape;

// c[M,N] = op(a) op(b), row-major; what is transposed is stored so.
static double *plain_product(const float *a, bool trans_a, const float *b, bool trans_b, size_t M, size_t N,
                             size_t K) {
    double *c = test_doubles(M * N);
    for (size_t i = 0; i < M; i++) {
        for (size_t j = 0; j < N; j++) {
            double sum = 0.0;
            for (size_t k = 0; k < K; k++) {
                sum += (double)a[trans_a ? k * M + i : i * K + k] *
                       (double)b[trans_b ? j * K + k : k * N + j];
            }
            c[i * N + j] = sum;
        }
    }
    return c;
}

static double plain_gelu(double x) {
    return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

static double plain_gelu_gradient(double x) {
    double scale = sqrt(2 / M_PI), t = tanh(scale * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x);
}

static double error_floatX(const floatX *device, const double *want, size_t n, cudaStream_t stream) {
    float *got = to_host_floatX(device, n, stream);
    double error = test_error(got, want, n);
    free(got);
    return error;
}

static double error_float(const float *device, const double *want, size_t n, cudaStream_t stream) {
    float *got = to_host(device, n, stream);
    double error = test_error(got, want, n);
    free(got);
    return error;
}

// Sums of up to a few hundred products in float, then one or two roundings to floatX.
static const double FLOAT_BOUND = 2e-6, OUT_BOUND = FLOATX_ROUNDING + FLOAT_BOUND;

static void test_linear(Matmul *mm, Shape s) {
    size_t N = s.N, IC = s.IC, OC = s.OC;
    cudaStream_t stream = mm->stream;
    float *x = test_values(N * IC, 0, 1, 1), *w = test_values(IC * OC, 0, 0.5, 2),
          *bias = test_values(OC, 0, 1, 3);
    floatX *dx = to_device_floatX(x, N * IC), *dw = to_device_floatX(w, IC * OC),
           *db = to_device_floatX(bias, OC);
    floatX *out = (floatX *)test_device(N * OC * sizeof(floatX)),
           *pre = (floatX *)test_device(N * OC * sizeof(floatX));
    double *plain = plain_product(x, false, w, false, N, OC, IC);
    double *with_bias = test_doubles(N * OC), *activated = test_doubles(N * OC);
    for (size_t i = 0; i < N * OC; i++) {
        with_bias[i] = plain[i] + (double)bias[i % OC];
        activated[i] = plain_gelu(with_bias[i]);
    }

    matmul_forward(mm, out, dx, dw, NULL, NULL, N, IC, OC);
    double error = error_floatX(out, plain, N * OC, stream);
    matmul_forward(mm, out, dx, dw, db, NULL, N, IC, OC);
    error = fmax(error, error_floatX(out, with_bias, N * OC, stream));
    check(&checks, error <= OUT_BOUND, "forward %zu x %zu x %zu (%.1e, bound %.1e)", N, IC, OC, error,
          OUT_BOUND);

    for (int fuse = 0; fuse <= 1; fuse++) {
        mm->fuse_gelu = fuse;
        matmul_forward(mm, out, dx, dw, db, pre, N, IC, OC);
        // Unfused, as it also is where cuBLASLt has no fused one (rows not a multiple of 8), what is rounded
        // first goes through a slope of up to 1.13 and is rounded again.
        double bound = fuse && OC % 8 == 0 ? OUT_BOUND : 2.2 * OUT_BOUND;
        error = fmax(error_floatX(out, activated, N * OC, stream),
                     error_floatX(pre, with_bias, N * OC, stream));
        check(&checks, error <= bound, "forward with %s gelu %zu x %zu x %zu (%.1e, bound %.1e)",
              fuse ? "fused" : "separate", N, IC, OC, error, bound);
    }
    mm->fuse_gelu = false;
    matmul_forward(mm, out, dx, dw, db, pre, N, IC, OC);
    float *kept = to_host_floatX(out, N * OC, stream);
    gelu_forward(out, pre, N * OC, stream);
    float *recomputed = to_host_floatX(out, N * OC, stream);
    check(&checks, same_bits(kept, recomputed, N * OC), "recomputed gelu %zu x %zu x %zu: same bits", N, IC,
          OC);

    free(x), free(w), free(bias), free(plain), free(with_bias), free(activated), free(kept), free(recomputed);
    CUDA_CHECK(cudaFree(dx)), CUDA_CHECK(cudaFree(dw)), CUDA_CHECK(cudaFree(db));
    CUDA_CHECK(cudaFree(out)), CUDA_CHECK(cudaFree(pre));
}

static void test_linear_backward(Matmul *mm, Shape s) {
    size_t N = s.N, IC = s.IC, OC = s.OC;
    cudaStream_t stream = mm->stream;
    float *x = test_values(N * IC, 0, 1, 4), *w = test_values(IC * OC, 0, 0.5, 5),
          *d = test_values(N * OC, 0, 1, 6);
    float *pre = test_values(N * IC, 0, 3, 7), *g = (float *)test_memory(IC * OC * sizeof(float));
    for (size_t i = 0; i < IC * OC; i++) g[i] = 0.25f * (float)(i % 7);
    floatX *dx = to_device_floatX(x, N * IC), *dw = to_device_floatX(w, IC * OC),
           *dd = to_device_floatX(d, N * OC);
    floatX *dpre = to_device_floatX(pre, N * IC), *dinp = (floatX *)test_device(N * IC * sizeof(floatX));
    float *dweight = to_device(g, IC * OC);
    double *plain = plain_product(d, false, w, true, N, IC, OC), *through = test_doubles(N * IC);
    double *weight = plain_product(x, true, d, false, IC, OC, N), *sum = test_doubles(IC * OC);
    for (size_t i = 0; i < N * IC; i++) through[i] = plain[i] * plain_gelu_gradient((double)pre[i]);
    for (size_t i = 0; i < IC * OC; i++) sum[i] = weight[i] + (double)g[i];

    matmul_backward_input(mm, dinp, dd, dw, NULL, N, IC, OC);
    double error = error_floatX(dinp, plain, N * IC, stream);
    check(&checks, error <= OUT_BOUND, "backward input %zu x %zu x %zu (%.1e, bound %.1e)", N, IC, OC, error,
          OUT_BOUND);
    matmul_backward_input(mm, dinp, dd, dw, dpre, N, IC, OC);
    error = error_floatX(dinp, through, N * IC, stream);
    // Where cuBLASLt does not fuse it, the product is rounded before gelu's gradient, which reaches 1.13.
    check(&checks, error <= 2.2 * OUT_BOUND, "backward input through gelu %zu x %zu x %zu (%.1e, bound %.1e)",
          N, IC, OC, error, 2.2 * OUT_BOUND);

    matmul_backward_weight(mm, dweight, dx, dd, N, IC, OC, true);
    error = error_float(dweight, sum, IC * OC, stream);
    matmul_backward_weight(mm, dweight, dx, dd, N, IC, OC, false);
    error = fmax(error, error_float(dweight, weight, IC * OC, stream));
    check(&checks, error <= FLOAT_BOUND, "backward weight %zu x %zu x %zu (%.1e, bound %.1e)", N, IC, OC,
          error, FLOAT_BOUND);

    free(x), free(w), free(d), free(pre), free(g), free(plain), free(through), free(weight), free(sum);
    CUDA_CHECK(cudaFree(dx)), CUDA_CHECK(cudaFree(dw)), CUDA_CHECK(cudaFree(dd)), CUDA_CHECK(cudaFree(dpre));
    CUDA_CHECK(cudaFree(dinp)), CUDA_CHECK(cudaFree(dweight));
}

// The head shares its weight with the embedding, [V, C]: everything is transposed.
static void test_head(Matmul *mm, size_t N, size_t C, size_t V) {
    cudaStream_t stream = mm->stream;
    float *x = test_values(N * C, 0, 1, 8), *w = test_values(V * C, 0, 0.5, 9),
          *d = test_values(N * V, 0, 1, 10);
    floatX *dx = to_device_floatX(x, N * C), *dw = to_device_floatX(w, V * C),
           *dd = to_device_floatX(d, N * V);
    floatX *logits = (floatX *)test_device(N * V * sizeof(floatX)),
           *dinp = (floatX *)test_device(N * C * sizeof(floatX));
    float *dwte = (float *)test_device(V * C * sizeof(float));
    double *want_logits = plain_product(x, false, w, true, N, V, C);
    double *want_inp = plain_product(d, false, w, false, N, C, V),
           *want_wte = plain_product(d, true, x, false, V, C, N);

    head_forward(mm, logits, dx, dw, N, C, V);
    head_backward_input(mm, dinp, dd, dw, N, C, V);
    double error = fmax(error_floatX(logits, want_logits, N * V, stream),
                        error_floatX(dinp, want_inp, N * C, stream));
    check(&checks, error <= OUT_BOUND, "head %zu x %zu x %zu (%.1e, bound %.1e)", N, C, V, error, OUT_BOUND);
    head_backward_weight(mm, dwte, dx, dd, N, C, V, false);
    error = error_float(dwte, want_wte, V * C, stream);
    head_backward_weight(mm, dwte, dx, dd, N, C, V, true);
    for (size_t i = 0; i < V * C; i++) want_wte[i] *= 2;
    error = fmax(error, error_float(dwte, want_wte, V * C, stream));
    check(&checks, error <= FLOAT_BOUND, "head weight %zu x %zu x %zu (%.1e, bound %.1e)", N, C, V, error,
          FLOAT_BOUND);

    free(x), free(w), free(d), free(want_logits), free(want_inp), free(want_wte);
    CUDA_CHECK(cudaFree(dx)), CUDA_CHECK(cudaFree(dw)), CUDA_CHECK(cudaFree(dd)),
        CUDA_CHECK(cudaFree(logits));
    CUDA_CHECK(cudaFree(dinp)), CUDA_CHECK(cudaFree(dwte));
}

// offset: elements by which dout is off its alignment.
static void test_bias(cudaStream_t stream, size_t N, size_t OC, size_t offset) {
    float *d = test_values(N * OC + offset, 0, 1, 11);
    floatX *dd = to_device_floatX(d, N * OC + offset);
    float *scratch = (float *)test_device(bias_backward_scratch(N, OC) * sizeof(float));
    float *dbias = (float *)test_device(OC * sizeof(float));
    double *want = (double *)calloc(OC, sizeof(double));
    for (size_t i = 0; i < N * OC; i++) want[i % OC] += (double)d[offset + i];
    bias_backward(dbias, dd + offset, scratch, N, OC, false, stream);
    double error = error_float(dbias, want, OC, stream);
    bias_backward(dbias, dd + offset, scratch, N, OC, true, stream);
    for (size_t i = 0; i < OC; i++) want[i] *= 2;
    error = fmax(error, error_float(dbias, want, OC, stream));
    check(&checks, error <= FLOAT_BOUND, "bias %zu x %zu, offset %zu (%.1e, bound %.1e)", N, OC, offset,
          error, FLOAT_BOUND);
    free(d), free(want);
    CUDA_CHECK(cudaFree(dd)), CUDA_CHECK(cudaFree(scratch)), CUDA_CHECK(cudaFree(dbias));
}

// More problems than the table of plans has places: each still gets its own algorithm.
static void test_plans(Matmul *mm) {
    size_t largest = MATMUL_PLANS + 40;
    float *x = test_values(largest * 8, 0, 1, 12);
    floatX *dx = to_device_floatX(x, largest * 8), *out = (floatX *)test_device(largest * sizeof(floatX));
    double worst = 0.0;
    for (int round = 0; round < 2; round++) {
        for (size_t N = 1; N <= largest; N++) {
            matmul_forward(mm, out, dx, dx, NULL, NULL, N, 8, 1);
            if (N % 37) continue;
            double *want = plain_product(x, false, x, false, N, 1, 8);
            worst = fmax(worst, error_floatX(out, want, N, mm->stream));
            free(want);
        }
    }
    check(&checks, worst <= OUT_BOUND, "more shapes than plans (%.1e, bound %.1e)", worst, OUT_BOUND);
    free(x);
    CUDA_CHECK(cudaFree(dx)), CUDA_CHECK(cudaFree(out));
}

enum { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, HEAD_FORWARD, HEAD_BACKWARD_INPUT, HEAD_BACKWARD_WEIGHT };

// Best of several runs, by events.
static void bench(Matmul *mm, const char *name, int kind, size_t N, size_t IC, size_t OC) {
    floatX *x = (floatX *)test_device(N * IC * sizeof(floatX)),
           *y = (floatX *)test_device(N * OC * sizeof(floatX));
    floatX *w = (floatX *)test_device(IC * OC * sizeof(floatX));
    float *dw = (float *)test_device(IC * OC * sizeof(float));
    CUDA_CHECK(cudaMemset(x, 0, N * IC * sizeof(floatX))),
        CUDA_CHECK(cudaMemset(y, 0, N * OC * sizeof(floatX)));
    CUDA_CHECK(cudaMemset(w, 0, IC * OC * sizeof(floatX))),
        CUDA_CHECK(cudaMemset(dw, 0, IC * OC * sizeof(float)));
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    double flops = 2.0 * (double)N * (double)IC * (double)OC;
    int runs = flops > 1e10 ? 6 : 20;
    float best = 1e30f;
    for (int i = 0; i < runs; i++) {
        CUDA_CHECK(cudaEventRecord(begin, mm->stream));
        switch (kind) {
        case FORWARD: matmul_forward(mm, y, x, w, NULL, NULL, N, IC, OC); break;
        case BACKWARD_INPUT: matmul_backward_input(mm, x, y, w, NULL, N, IC, OC); break;
        case BACKWARD_WEIGHT: matmul_backward_weight(mm, dw, x, y, N, IC, OC, true); break;
        case HEAD_FORWARD: head_forward(mm, y, x, w, N, IC, OC); break;
        case HEAD_BACKWARD_INPUT: head_backward_input(mm, x, y, w, N, IC, OC); break;
        case HEAD_BACKWARD_WEIGHT: head_backward_weight(mm, dw, x, y, N, IC, OC, true); break;
        }
        CUDA_CHECK(cudaEventRecord(end, mm->stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        best = ms < best ? ms : best;
    }
    printf("%-24s %6zu x %5zu x %6zu  %9.3f ms  %9.1f GFLOP/s\n", name, N, IC, OC, (double)best,
           flops / (double)best * 1e-6);
    CUDA_CHECK(cudaEventDestroy(begin)), CUDA_CHECK(cudaEventDestroy(end));
    CUDA_CHECK(cudaFree(x)), CUDA_CHECK(cudaFree(y)), CUDA_CHECK(cudaFree(w)), CUDA_CHECK(cudaFree(dw));
}

static void bench_all(Matmul *mm, size_t N) {
    static const char *layer[] = {"qkv", "attention projection", "mlp up", "mlp down"};
    static const char *pass[] = {"forward", "backward input", "backward weight"};
    const size_t C = 768, V = 50304, sizes[4][2] = {{C, 3 * C}, {C, C}, {C, 4 * C}, {4 * C, C}};
    printf("%s, %zu rows, rows x in x out\n", FLOATX_NAME, N);
    for (int kind = FORWARD; kind <= BACKWARD_WEIGHT; kind++) {
        printf("%s:\n", pass[kind]);
        for (int i = 0; i < 4; i++) bench(mm, layer[i], kind, N, sizes[i][0], sizes[i][1]);
        bench(mm, "head", kind + HEAD_FORWARD, N, C, V);
    }
}

int main(int argc, char **argv) {
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    Matmul *mm = (Matmul *)test_memory(sizeof(Matmul));
    matmul_create(mm, stream);
    bool benchmark = argc > 1 && strcmp(argv[1], "bench") == 0;
    if (benchmark) {
        bench_all(mm, argc > 2 ? strtoul(argv[2], NULL, 10) : 256);
    } else {
        static const Shape shapes[] = {{1, 1, 1},     {7, 18, 54},    {24, 18, 72},
                                       {65, 64, 192}, {64, 128, 512}, {33, 100, 36}};
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) test_linear(mm, shapes[i]);
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) test_linear_backward(mm, shapes[i]);
        test_head(mm, 24, 18, 384);
        test_head(mm, 7, 64, 33);
        test_bias(stream, 1, 1, 0);
        test_bias(stream, 65, 18, 0);
        test_bias(stream, 100, 512, 0);
        test_bias(stream, 100, 512, 1);
        test_bias(stream, 3000, 2304, 0);
        test_plans(mm);
    }
    matmul_destroy(mm);
    free(mm);
    CUDA_CHECK(cudaStreamDestroy(stream));
    return benchmark ? 0 : check_summary(&checks);
}
