// ptx_attention.cu: attention of one head of 64 channels on tensor cores, forward and backward.
// dev/test/run_ptx.sh plants bugs in this instance, because it compiles fast. Prints the sums of
// the gradients.
#include "dev/cuda/kernel_test.h"
#include "llmc/kernels/attention_mma.cuh"

int main(void) {
    const size_t T = 130, HS = 64, n = T * HS;
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    Attention a = Attention();
    a.B = a.NH = a.KV = 1, a.T = a.Tk = a.rows = T, a.HS = a.out_stride = HS,
    a.stride = a.k_stride = 3 * HS;
    a.scale = 0.125f;
    a.q = to_device_floatX(test_values(3 * n, 0, 1.5, 1), 3 * n), a.k = a.q + HS, a.v = a.k + HS;
    a.dout = to_device_floatX(test_values(n, 0, 1, 2), n);
    a.y = a.out = test_floatX(n), a.dq = test_floatX(3 * n), a.dk = a.dq + HS, a.dv = a.dk + HS;
    a.lse = test_floats(T), a.dot = test_floats(T);
    attention_mma<AttentionMma<64>, false>(a, Dropout(), false, stream);
    attention_mma<AttentionMma<64>, false>(a, Dropout(), true, stream);
    double sum = 0.0, square = 0.0;
    float *x = to_host_floatX(a.dq, 3 * n, stream);
    for (size_t i = 0; i < 3 * n; i++) sum += (double)x[i], square += (double)x[i] * (double)x[i];
    printf("sum %.2f, of squares %.2f\n", sum, square);
    test_release(0);
    return 0;
}
