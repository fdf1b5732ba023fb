// ptx_cases.cu: runs attention of every capacity at small sizes. Also runs kernels of llmc/ that
// no program of dev/cuda checks in the interpreter. Prints their results as a CPU computes them,
// and as dev/ptx.py interprets them. `make ptx` compares both.
#include "dev/cuda/kernel_test.h"
#include "llmc/kernels/attention_first.cuh"
#include "llmc/kernels/add.cuh"
#include "llmc/kernels/dropout.cuh"
#include "llmc/kernels/muon.cuh"
#include "llmc/kernels/rope.cuh"

static cudaStream_t stream;

static void print(const char *name, const float *x, size_t n) {
    printf("result %s", name);
    for (size_t i = 0; i < n; i++) printf(" %.6g", (double)x[i]);
    printf("\n");
}
static void result(const char *name, const floatX *x, size_t n) {
    print(name, to_host_floatX(x, n, stream), n);
}

static floatX *values(size_t n, double scale, uint64_t seed) {
    return to_device_floatX(test_values(n, 0, scale, seed), n);
}

// Runs forward and backward; the second sequence's last tile is ragged.
static void attention_case(size_t B, size_t T, size_t NH, size_t KV, size_t HS, double drop) {
    size_t mark = test_count, C = NH * HS, width = C + 2 * KV * HS, N = B * T;
    floatX *qkv = values(N * width, 1.5, 1), *dout = values(N * C, 1, 2), *out = test_floatX(N * C);
    floatX *dqkv = test_floatX(N * width);
    float *lse = test_floats(B * NH * T), *dot = test_floats(B * NH * T);
    Dropout d = dropout_for(dropout_make(drop, 5, 1, 3), DROPOUT_SCORES, 2);
    Attention a = attention_of(qkv, B, T, C, NH, KV);
    a.y = a.out = out, a.lse = lse, a.dout = dout, a.dot = dot, a.dq = dqkv, a.dk = dqkv + C,
    a.dv = a.dk + KV * HS;
    attention_launch(a, d, false, stream);
    attention_launch(a, d, true, stream);
    char name[64];
    snprintf(name, sizeof name, "attention_%zu_%zu_%zu_%zu%s", T, NH, KV, HS,
             drop > 0 ? "_dropout" : "");
    result(name, out, N * C);
    print(name, to_host(lse, B * NH * T, stream), B * NH * T);
    result(name, dqkv, N * width);
    test_release(mark);
}

// Queries that see keys from their document's beginning on; documents of 1, 2, 4, 8, ... tokens.
template <int CAPACITY, bool DROP>
static void first_case(size_t T, size_t HS) {
    size_t mark = test_count, n = T * HS;
    floatX *out = test_floatX(n), *dqkv = test_floatX(3 * n);
    int *first = (int *)test_memory(T * sizeof(int)), *device = (int *)test_device(T * sizeof(int));
    for (size_t t = 0; t < T; t++) first[t] = ((t + 1) & t) == 0 ? (int)t : first[t - 1];
    CUDA_CHECK(cudaMemcpy(device, first, T * sizeof(int), cudaMemcpyHostToDevice));
    Dropout d = dropout_for(dropout_make(DROP ? 0.2 : 0, 5, 1, 3), DROPOUT_SCORES, 2);
    AttentionFirst a = {};
    (Attention &)a = attention_of(values(3 * n, 1.5, 1), 1, T, HS, 1);
    a.first = device;
    a.y = a.out = out, a.lse = test_floats(T), a.dot = test_floats(T);
    a.dout = values(n, 1, 2), a.dq = dqkv, a.dk = dqkv + HS, a.dv = a.dk + HS;
    for (int backward = 0; backward < 2; backward++) {
#ifdef PRECISION_BF16
        attention_mma<AttentionMma<CAPACITY, AttentionFirst>, DROP>(a, d, backward, stream);
#else
        attention_rows<AttentionRows<CAPACITY, AttentionFirst>, DROP>(a, d, backward, stream);
#endif
    }
    result("attention_first", out, n);
    result("attention_first", dqkv, 3 * n);
    test_release(mark);
}

static void element_cases(size_t N, size_t F) {
    size_t mark = test_count, n = N * F;
    floatX *x = values(n, 4, 1), *out = test_floatX(n);
    Dropout d = dropout_for(dropout_make(0.3, 5, 1, 3), DROPOUT_EMBEDDING, 0);
    d.T = N;
    dropout_backward(out, x, d, N, F, stream);
    result("dropout", out, n);
    float *sum = to_device(test_values(n, 0, 1, 3), n),
          *more = to_device(test_values(n, 0, 1, 4), n);
    add_floats(sum, more, n, stream);
    print("add_floats", to_host(sum, n, stream), n);
    test_release(mark);
}

static void rope_case(size_t N, size_t heads, size_t HS) {
    size_t mark = test_count, n = N * (heads + 1) * HS;
    floatX *x = values(n, 2, 1);
    rope(x, to_device(test_values(N * HS, 0, 1, 2), N * HS), N, N, heads, HS, HS,
         (heads + 1) * HS, -1.0f, stream);
    result("rope", x, n);
    test_release(mark);
}

// Runs the middle matrix of three side by side through all of Muon's kernels but its products.
// An owner of elements [lo, hi) updates these.
static void muon_case(size_t rows, size_t cols, size_t lo, size_t hi) {
    size_t mark = test_count, n = 3 * rows * cols;
    MuonMatrix shape = {rows, cols, 3 * cols, cols};
    MuonScratch s = {test_floatX(rows * cols), NULL, NULL, NULL, test_array<double>(rows + 1)};
    float *grads = to_device(test_values(n, 0, 1, 1), n);
    float *momentum = to_device(test_values(n, 0, 1, 2), n);
    float *weights = test_values(n, 0, 1, 3);
    floatX *params = to_device_floatX(weights, n), *product = values(rows * cols, 1, 4);
    float *master = sizeof(floatX) == 4 ? NULL : to_device(weights + lo, hi - lo);
    muon_momentum(grads, momentum, n, 0.95, 0.5, stream);
    muon_normalise(&s, grads, shape, stream);
    muon_combine(s.x, s.x, product, MUON_A, 1.0f, rows * cols, stream);
    muon_update(params, master, &s, shape, lo, hi, 0.02, 0.1, stream);
    print("muon_momentum", to_host(momentum, n, stream), n);
    result("muon_combine", s.x, rows * cols);
    result("muon_update", params, n);
    test_release(mark);
}

int main(void) {
    CUDA_CHECK(cudaStreamCreate(&stream));
    attention_case(2, 70, 1, 1, 64, 0);
    static const size_t sizes[] = {8, 24, 72, 120, 136, 184, 248};  // each of another capacity
    for (size_t HS : sizes) attention_case(1, 67, 2, HS < 100 ? 1 : 2, HS, 0);
    for (size_t HS : sizes) attention_case(1, 67, 1, 1, HS, 0.2);
    attention_case(1, 37, 3, 3, 9, 0.2), attention_case(1, 33, 2, 1, 300, 0);
    attention_case(1, 37, 2, 2, 50, 0), attention_case(1, 37, 1, 1, 50, 0.2);
    first_case<64, false>(150, 64), first_case<128, true>(70, 128);
    element_cases(5, 48), element_cases(3, 37);
    rope_case(13, 2, 32), rope_case(7, 3, 6);
    muon_case(8, 16, 0, 384), muon_case(5, 7, 11, 80);
    test_release(0);
    return 0;
}
