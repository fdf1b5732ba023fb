// test_work.cu: compares the work that every wrapper of llmc/kernels states
// (llmc/kernels/work.cuh) with counts by hand at one small shape.
#include "dev/test/check.h"
#include "llmc/kernels/adamw.cuh"
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/dropout.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/global_norm.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"

static Check checks;
static KernelWork stated;
static Matmul matmul;

// Checks the work stated since the last call: values of floatX and of float read or written, and
// FLOPs.
static void states(const char *what, double values, double floats, double flops) {
    double bytes = values * (double)sizeof(floatX) + 4 * floats;
    check(&checks, stated.bytes == bytes && stated.flops == flops,
          "%s: %g bytes (%g), %g FLOPs (%g)", what, stated.bytes, bytes, stated.flops, flops);
    stated = KernelWork();
}

// Returns n elements of zeros on the device.
template <class T>
static T *zeros(size_t n) {
    T *p;
    CUDA_CHECK(cudaMalloc(&p, n * sizeof(T)));
    CUDA_CHECK(cudaMemset(p, 0, n * sizeof(T)));
    return p;
}

// 2 samples of 3 tokens, 16 channels, 2 heads: a matrix has 96 elements. 40 words, padded to 48;
// 24 hidden units.
static void test_wrappers(cudaStream_t s) {
    const size_t B = 2, T = 3, N = 6, C = 16, NH = 2, V = 40, Vp = 48, F = 24;
    floatX *x = zeros<floatX>(4096), *y = zeros<floatX>(4096), *z = zeros<floatX>(4096),
           *w = zeros<floatX>(4096);
    float *a = zeros<float>(4096), *b = zeros<float>(4096), *c = zeros<float>(4096),
          *d = zeros<float>(4096);
    int *tokens = zeros<int>(N);
    double *out = zeros<double>(1), *scratch = zeros<double>(1);
    Piece range = {0, 100, 0, 0, 0, true, 0}, *ranges = zeros<Piece>(1);
    unsigned blocks = adamw_number(&range, 1);
    CUDA_CHECK(cudaMemcpy(ranges, &range, sizeof range, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());

    encoder_forward(y, tokens, w, x, B, T, C, 0, V, s),
        states("encoder_forward", 96 + 48 + 96, 0, 96);
    encoder_forward(y, tokens, w, NULL, B, T, C, 0, V, s),
        states("... without positions", 96 + 96, 0, 0);
    encoder_backward(a, NULL, x, tokens, B, T, C, 5, 0, V, true, s);
    states("encoder_backward of tokens", 96, 2 * 96, 96);
    encoder_backward(NULL, a, x, tokens, B, T, C, 5, 0, V, true, s),
        states("... of positions", 96, 2 * 48, 96);
    encoder_backward(NULL, a, x, tokens, B, T, C, 5, 0, V, false, s),
        states("... that writes all", 96, 80, 96);

    Layernorm ln = {y, a, b};
    layernorm_forward(ln, x, w, w, N, C, s), states("layernorm_forward", 2 * 96, 0, 8 * 96);
    layernorm_residual_forward(z, ln, x, w, w, w, w, N, C, s, Dropout());
    states("layernorm_residual_forward", 4 * 96, 0, 10 * 96);
    residual_forward(y, x, z, w, N, C, s, Dropout()), states("residual_forward", 3 * 96, 0, 2 * 96);
    layernorm_backward(y, a, b, c, NULL, x, z, w, {y, d, d}, N, C, false, s);
    states("layernorm_backward", 3 * 96, 0, 17 * 96);
    layernorm_backward(y, a, b, c, x, z, w, w, {y, d, d}, N, C, true, s);
    states("... with a residual's gradient", 4 * 96, 0, 17 * 96);

    gelu_forward(y, x, N * C, s), states("gelu_forward", 2 * 96, 0, 9 * 96);
    gelu_backward(y, a, c, x, z, N, C, true, s), states("gelu_backward", 3 * 96, 0, 18 * 96);
    bias_backward(a, x, c, N, C, true, s), states("bias_backward", 96, 0, 96);
    dropout_forward(y, dropout_for(dropout_make(0.5, 1, 1, 1), DROPOUT_FCPROJ, 0), N, C, s);
    states("dropout_forward", 2 * 96, 0, 96);

    matmul_forward(&matmul, y, x, w, z, N, C, F), states("matmul_forward", 96 + 384 + 144, 0, 4608);
    matmul_backward_input(&matmul, y, x, w, N, C, F),
        states("matmul_backward_input", 144 + 384 + 96, 0, 4608);
    matmul_backward_weight(&matmul, a, x, z, N, C, F, false),
        states("matmul_backward_weight", 96 + 144, 384, 4608);
    matmul_backward_weight(&matmul, a, x, z, N, C, F, true),
        states("... that adds", 96 + 144, 2 * 384, 4608);
    linear_forward(&matmul, y, x, w, NULL, N, C, Vp),
        states("linear_forward", 96 + 768 + 288, 0, 9216);
    linear_backward_input(&matmul, y, x, w, N, C, Vp),
        states("linear_backward_input", 288 + 768 + 96, 0, 9216);
    linear_backward_weight(&matmul, a, x, z, N, C, Vp, true),
        states("linear_backward_weight", 96 + 288, 2 * 768, 9216);

    // of each sample and head 6 pairs of a query and a key: products of 8 channels, 2 and 5
    attention_forward(y, a, x, B, T, C, NH, s),
        states("attention_forward", 288 + 96, 0, 2 * 2 * 6 * 2 * 16);
    attention_backward(y, a, z, w, b, x, B, T, C, NH, s);
    states("attention_backward", 288 + 96 + 96 + 288, 0, 2 * 2 * 6 * 5 * 16);

    classifier_stats(a, b, c, x, tokens, N, V, Vp, 0, s),
        states("classifier_stats", 288, 0, 3 * 288);
    classifier_rescale(a, b, c, N, s), states("classifier_rescale", 0, 4 * 6, 3 * 6);
    classifier_gradient(a, x, b, c, d, tokens, 1, N, V, Vp, 0, true, s);
    states("classifier_gradient", 2 * 288, 0, 3 * 288);
    classifier_gradient(a, x, b, c, d, tokens, 1, N, V, Vp, 0, false, s),
        states("... without one", 0, 0, 0);
    loss_sum(out, a, N, s), states("loss_sum", 0, 6, 6);

    AdamW h = adamw_factors(1e-3, 0.9, 0.95, 1e-8, 0.1, 1, 1);
    bool narrow = sizeof(floatX) < sizeof(float);
    adamw_update(x, narrow ? d : NULL, a, b, c, ranges, 1, blocks, 100, h, s);
    states("adamw_update", narrow ? 100 : 0, 7 * 100, 17 * 100);
    global_norm_squared(out, scratch, a, ranges, 1, 100, 100, s),
        states("global_norm_squared", 0, 100, 2 * 100);
    CUDA_CHECK(cudaDeviceSynchronize());
}

int main() {
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    matmul_create(&matmul, stream);
    kernel_tally = &stated;
    test_wrappers(stream);
    global_norm_squared(NULL, NULL, NULL, NULL, 0, 0, 0, stream),
        states("what is not launched", 0, 0, 0);
    return check_summary(&checks);
}
