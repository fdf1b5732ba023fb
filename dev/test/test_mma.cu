// test_mma.cu: checks the wrappers of tensor-core instructions and of cp.async against plain
// products and copies. The fragment layouts are the PTX ISA's, which mma.cuh repeats. Runs on a
// GPU and on the stand-in.
#include "llmc/kernels/mma.cuh"

#include "dev/cuda/kernel_test.h"

static Check c;

// out[matrix][row][column] from four 8 x 8 matrices, rows in any order in memory.
template <bool TRANS>
static __global__ void ldmatrix_kernel(float *out, const bfloat16 *in) {
    int lane = (int)threadIdx.x;
    uint32_t registers[4];
    // matrix m, row r is in memory at row (8 m + r) 5 % 32
    ldmatrix_x4<TRANS>(registers, SharedTile(in + (lane * 5 % 32) * 8));
    for (int i = 0; i < 4; i++) {
        out[i * 64 + lane / 4 * 8 + lane % 4 * 2] = low_float(registers[i]);
        out[i * 64 + lane / 4 * 8 + lane % 4 * 2 + 1] = high_float(registers[i]);
    }
}

// d[16, 8 N8] += a[16, 16 K16] b.
template <bool TRANS, int N8, int K16>
static __global__ void product_kernel(float *d, const bfloat16 *a, const bfloat16 *tile) {
    constexpr int N = N8 * 8, K = K16 * 16, STRIDE = (TRANS ? N : K) + 8;
    int lane = (int)threadIdx.x, g = lane / 4, t = lane % 4 * 2;
    float fragment_d[N8][4];
    uint32_t fragment_a[K16][4];
    for (int n = 0; n < N8; n++)
        for (int i = 0; i < 4; i++) fragment_d[n][i] = d[(g + i / 2 * 8) * N + n * 8 + t + i % 2];
    for (int k = 0; k < K16; k++)
        for (int i = 0; i < 4; i++)
            memcpy(&fragment_a[k][i], a + (g + i % 2 * 8) * K + k * 16 + t + i / 2 * 8, 4);
    mma_product<TRANS, STRIDE>(fragment_d, fragment_a, matrix_row<TRANS, STRIDE>(tile));
    for (int n = 0; n < N8; n++)
        for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * N + n * 8 + t + i % 2] = fragment_d[n][i];
}

static __global__ void quad_kernel(float *out, const float *in) {
    float largest[2] = {in[threadIdx.x], in[32 + threadIdx.x]}, sum[2] = {largest[0], largest[1]};
    quad_max(largest), quad_sum(sum);
    for (int i = 0; i < 2; i++) {
        out[i * 32 + threadIdx.x] = largest[i];
        float x = in[i * 32 + threadIdx.x];
        for (int offset = 1; offset < 4; offset *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, offset);
        out[64 + i * 32 + threadIdx.x] = sum[i] - x;
    }
}

// Gathers the lanes of a row, then of a column. out[i * 32 + lane] = 1 where a word differs from
// its shuffle, else 0.
static __global__ void gather_kernel(float *out, const float *in) {
    int lane = (int)threadIdx.x;
    uint32_t x = (uint32_t)(int)(1000.0f * in[lane]), of_row[4], of_column[8];
    warp_gather<4, 1>(of_row, x);
    warp_gather<8, 4>(of_column, x);
    for (int i = 0; i < 12; i++) {
        int from = i < 4 ? lane / 4 * 4 + i : lane % 4 + (i - 4) * 4;
        uint32_t shuffled = __shfl_sync(0xFFFFFFFFu, x, from);
        out[i * 32 + lane] = (i < 4 ? of_row[i] : of_column[i - 4]) == shuffled ? 0.0f : 1.0f;
    }
}

// Moves tiles of 32 floats through two buffers, the next one in flight while one is read. The
// fourth float of each tile does not exist.
template <int LEFT>
static __global__ void copy_kernel(float *out, const float *in, int tiles) {
    __shared__ float tile[2][32];
    int lane = (int)threadIdx.x;
    copy_async4(&tile[0][lane], in + lane, lane != 3);
    copy_async_commit();
    for (int i = 0; i < tiles; i++) {
        if (i + 1 < tiles)
            copy_async4(&tile[(i + 1) % 2][lane], in + (i + 1) * 32 + lane, lane != 3);
        copy_async_commit();
        copy_async_wait<LEFT>();
        __syncthreads();
        out[i * 32 + lane] = tile[i % 2][31 - lane];
        __syncthreads();
    }
}

static bfloat16 *to_device_bf16(const float *x, size_t n) {
    bfloat16 *host = (bfloat16 *)test_memory(n * sizeof(bfloat16));
    for (size_t i = 0; i < n; i++) host[i] = __float2bfloat16_rn(x[i]);
    return to_device(host, n);
}

// Whole numbers up to 8 in absolute value: bf16 holds them and fp32 their sums, so that every
// result is exact.
static float *whole_numbers(size_t n, uint64_t seed) {
    float *x = (float *)test_memory(n * sizeof(float));
    for (size_t i = 0; i < n; i++) x[i] = (float)(int)(test_random(&seed) * 8.0);
    return x;
}

static void test_instructions(cudaStream_t stream) {
    size_t mark = test_count;
    float *a = whole_numbers(256, 1), *out = test_floats(256);
    bfloat16 *device_a = to_device_bf16(a, 256);
    bool ok;
    for (int trans = 0; trans < 2; trans++) {
        if (trans) LAUNCH(ldmatrix_kernel<true>, 1, 32, stream)(out, device_a);
        else LAUNCH(ldmatrix_kernel<false>, 1, 32, stream)(out, device_a);
        float *matrices = to_host(out, 256, stream);
        ok = true;
        for (int m = 0; m < 4; m++)
            for (int r = 0; r < 8; r++)
                for (int column = 0; column < 8; column++)
                    ok = ok && matrices[m * 64 + (trans ? column * 8 + r : r * 8 + column)] ==
                                   a[(m * 8 + r) * 5 % 32 * 8 + column];
        check(&c, ok, "ldmatrix.x4%s", trans ? ".trans" : "");
    }
    float *x = test_values(64, 0, 1, 4), *device_x = to_device(x, 64), *reduced;
    LAUNCH(quad_kernel, 1, 32, stream)(out, device_x);
    reduced = to_host(out, 128, stream);
    ok = true;
    for (int i = 0; i < 64; i++) {
        float largest = x[i];
        for (int j = i / 4 * 4; j < i / 4 * 4 + 4; j++) largest = x[j] > largest ? x[j] : largest;
        ok = ok && reduced[i] == largest && reduced[64 + i] == 0.0f;
    }
    check(&c, ok, "sum and largest of groups of four lanes have the bits of their shuffles");
    float *gathered = test_floats(12 * 32), *wrong;
    LAUNCH(gather_kernel, 1, 32, stream)(gathered, device_x);
    wrong = to_host(gathered, 12 * 32, stream);
    ok = true;
    for (int i = 0; i < 12 * 32; i++) ok = ok && wrong[i] == 0.0f;
    check(&c, ok, "the words of the lanes of a row and of a column are those of their shuffles");
    test_release(mark);
}

static void test_copies(cudaStream_t stream) {
    enum { TILES = 5, N = 32 * TILES };
    size_t mark = test_count;
    float *x = test_values(N, 0, 1, 10), *device_x = to_device(x, N), *out = test_floats(N), *got;
    LAUNCH(copy_kernel<1>, 1, 32, stream)(out, device_x, TILES);
    got = to_host(out, N, stream);
    bool ok = true;
    for (int i = 0; i < N; i++)
        ok = ok && got[i] == (i % 32 == 28 ? 0.0f : x[i / 32 * 32 + 31 - i % 32]);
    check(&c, ok, "cp.async brings what is waited for, and zeros for what does not exist");
#ifndef __CUDACC__
    LAUNCH(copy_kernel<2>, 1, 32, stream)(out, device_x, TILES);
    got = to_host(out, N, stream);
    for (int i = 0; i < N; i++) ok = ok && (i % 32 == 28 || got[i] != x[i / 32 * 32 + 31 - i % 32]);
    check(&c, ok && isnan(got[0]), "what was not waited for is not there");
#endif
    test_release(mark);
}

template <bool TRANS, int N8, int K16>
static void test_product(cudaStream_t stream) {
    constexpr int N = N8 * 8, K = K16 * 16, ROWS = TRANS ? K : N, STRIDE = (TRANS ? N : K) + 8;
    size_t mark = test_count;
    float *a = whole_numbers(16 * K, 5), *tile = whole_numbers(ROWS * STRIDE, 6),
          *d = whole_numbers(16 * N, 7);
    bfloat16 *device_a = to_device_bf16(a, 16 * K),
             *device_tile = to_device_bf16(tile, ROWS * STRIDE);
    float *device_d = to_device(d, 16 * N), *got;
    LAUNCH((product_kernel<TRANS, N8, K16>), 1, 32, stream)(device_d, device_a, device_tile);
    got = to_host(device_d, 16 * N, stream);
    bool exact = true;
    for (int row = 0; row < 16; row++)
        for (int n = 0; n < N; n++) {
            float sum = d[row * N + n];
            for (int k = 0; k < K; k++)
                sum += a[row * K + k] * tile[TRANS ? k * STRIDE + n : n * STRIDE + k];
            exact = exact && got[row * N + n] == sum;
        }
    check(&c, exact, "product 16 x %d x %d%s", N, K, TRANS ? ", factor not transposed" : "");
    test_release(mark);
}

int main(void) {
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    for (unsigned seed = 0; seed < 3; seed++) { // in order, then in two random orders
#ifndef __CUDACC__
        cpu_runtime().thread_order = {seed > 0, seed, 0};
#endif
        test_instructions(stream);
        test_copies(stream);
        test_product<false, 2, 1>(stream);
        test_product<true, 2, 1>(stream);
        test_product<false, 8, 4>(stream);
        test_product<true, 8, 4>(stream);
        test_product<false, 4, 8>(stream);
        test_product<true, 16, 2>(stream);
    }
    return check_summary(&c);
}
