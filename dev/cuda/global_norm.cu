// global_norm.cu: checks llmc/global_norm.cuh against plain loops in double, with a warp and with a thread
// per chunk.
#include "dev/cuda/kernel_test.h"
#include "llmc/global_norm.cuh"

static Check c;

enum { RANGES = 12, EXTRA = 17 };

static double *norms(const float *d_grads, const NormRange *ranges, size_t count, bool warp,
                     cudaStream_t stream) {
    size_t largest = 0;
    for (size_t i = 0; i < count; i++) largest = ranges[i].size > largest ? ranges[i].size : largest;
    NormRange *d_ranges = (NormRange *)test_device(count * sizeof *ranges);
    CUDA_CHECK(cudaMemcpy(d_ranges, ranges, count * sizeof *ranges, cudaMemcpyHostToDevice));
    double *d_out = (double *)test_device(count * sizeof(double)), *out = test_doubles(count);
    double *scratch = (double *)test_device(global_norm_scratch(count, largest) * sizeof(double));
    if (warp) global_norm_launch<32>(d_out, scratch, d_grads, d_ranges, count, largest, stream);
    else global_norm_launch<1>(d_out, scratch, d_grads, d_ranges, count, largest, stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaMemcpy(out, d_out, count * sizeof(double), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(d_ranges));
    CUDA_CHECK(cudaFree(d_out));
    CUDA_CHECK(cudaFree(scratch));
    return out;
}

int main(void) {
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    const size_t sizes[RANGES] = {0, 1, 7, 64, 768, 16384, 16385, 40000, 131072, 200003, 589824, 9};
    NormRange ranges[RANGES];
    size_t total = 0;
    for (int i = 0; i < RANGES; i++) {
        ranges[i].offset = total;
        ranges[i].size = sizes[i];
        total += CEIL_DIV(sizes[i], (size_t)64) * 64;
    }
    float *g = (float *)test_memory((total + EXTRA) * sizeof(float));
    uint64_t seed = 3;
    for (size_t i = 0; i < total; i++)
        g[i] = (float)(test_random(&seed) * pow(10.0, 20.0 * test_random(&seed)));
    for (int warp = 0; warp < 2; warp++) {
        float *d_g = to_device(g, total);
        double *got = norms(d_g, ranges, RANGES, warp, stream), worst = 0.0;
        for (int i = 0; i < RANGES; i++) {
            double want = 0.0;
            for (size_t j = 0; j < sizes[i]; j++)
                want += (double)g[ranges[i].offset + j] * (double)g[ranges[i].offset + j];
            worst = fmax(worst, fabs(got[i] - want) / (want + 1e-300));
        }
        check(&c, worst < 1e-12 && got[0] == 0.0, "%d threads a chunk: error %.2e", warp ? 32 : 1, worst);
        // at another place, aligned or not, and alone: the same bits
        bool ok = true;
        for (size_t shift = 1; shift < EXTRA; shift += 3) {
            NormRange one = {shift, sizes[9]};
            float *d_one = (float *)test_device((sizes[9] + shift) * sizeof(float));
            CUDA_CHECK(cudaMemcpy(d_one + shift, g + ranges[9].offset, sizes[9] * sizeof(float),
                                  cudaMemcpyHostToDevice));
            double *alone = norms(d_one, &one, 1, warp, stream);
            ok = ok && alone[0] == got[9];
            free(alone);
            CUDA_CHECK(cudaFree(d_one));
        }
        check(&c, ok, "%d threads a chunk: the order depends on the size alone", warp ? 32 : 1);
        float broken[] = {NAN, INFINITY};
        CUDA_CHECK(
            cudaMemcpy(d_g + ranges[7].offset + 39999, &broken[0], sizeof(float), cudaMemcpyHostToDevice));
        CUDA_CHECK(cudaMemcpy(d_g + ranges[3].offset, &broken[1], sizeof(float), cudaMemcpyHostToDevice));
        double *bad = norms(d_g, ranges, RANGES, warp, stream);
        for (int i = 0; i < RANGES; i++)
            ok = ok && (i == 7 ? isnan(bad[i]) : i == 3 ? isinf(bad[i]) : bad[i] == got[i]);
        check(&c, ok, "%d threads a chunk: a NaN stays in its tensor", warp ? 32 : 1);
        free(got);
        free(bad);
        CUDA_CHECK(cudaFree(d_g));
    }
    NormRange empty = {0, 0};
    float *d_g = to_device(g, 1);
    double *zero = norms(d_g, &empty, 1, true, stream);
    check(&c, *zero == 0.0, "an empty range is 0");
    free(zero);
    free(g);
    CUDA_CHECK(cudaFree(d_g));
    // chunk counts never exceed those of a larger range: scratch is sized by the largest
    bool ok = true;
    for (size_t s = 1, last = 0; s < ((size_t)1 << 40); s = s + s / 7 + 1) {
        ok = ok && norm_chunk_count(s) >= last && norm_chunk_count(s) <= NORM_CHUNKS;
        last = norm_chunk_count(s);
    }
    check(&c, ok, "int overflow: chunks of ranges up to 2^40");
    CUDA_CHECK(cudaStreamDestroy(stream));
    return check_summary(&c);
}
