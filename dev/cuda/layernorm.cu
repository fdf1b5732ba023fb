// layernorm.cu: checks llmc/layernorm.cuh against plain loops in double, with a warp and with a thread per
// row.
#include "dev/cuda/kernel_test.h"
#include "llmc/layernorm.cuh"

static Check c;

typedef struct {
    double *out, *dinp, *dweight, *dbias;  // [N, C], [N, C], [C], [C]
} Want;

static Want reference(const float *x, const float *w, const float *b, const float *dout, size_t N, size_t C) {
    Want want = {test_doubles(N * C), test_doubles(N * C), test_doubles(C), test_doubles(C)};
    for (size_t n = 0; n < N; n++) {
        const float *row = x + n * C, *d = dout + n * C;
        double m = 0.0, variance = 0.0, sum = 0.0, dot = 0.0;
        for (size_t i = 0; i < C; i++) m += (double)row[i] / (double)C;
        for (size_t i = 0; i < C; i++) variance += ((double)row[i] - m) * ((double)row[i] - m) / (double)C;
        double r = 1.0 / sqrt(variance + 1e-5);
        for (size_t i = 0; i < C; i++) {
            double normal = ((double)row[i] - m) * r, dnormal = (double)d[i] * (double)w[i];
            want.out[n * C + i] = normal * (double)w[i] + (double)b[i];
            want.dweight[i] += (double)d[i] * normal;
            want.dbias[i] += (double)d[i];
            sum += dnormal / (double)C;
            dot += dnormal * normal / (double)C;
        }
        for (size_t i = 0; i < C; i++) {
            double normal = ((double)row[i] - m) * r, dnormal = (double)d[i] * (double)w[i];
            want.dinp[n * C + i] = (dnormal - sum - normal * dot) * r;
        }
    }
    return want;
}

static bool bounded(double *worst, double error, double bound) {
    if (error > *worst || isnan(error)) *worst = error;
    return error <= bound;
}

template <int LANES>
static void check_shape(size_t N, size_t C, double center, cudaStream_t stream) {
    float *inp1 = test_values(N * C, center, 1.5, 1), *inp2 = test_values(N * C, 0.0, 0.5, 2);
    float *bias2 = test_values(C, 0.0, 0.5, 3), *w = test_values(C, 1.0, 0.5, 4),
          *b = test_values(C, 0.0, 1.0, 5);
    float *dout = test_values(N * C, 0.0, 1.0, 6), *dres = test_values(N * C, 0.0, 1.0, 7);
    floatX *d_inp1 = to_device_floatX(inp1, N * C), *d_inp2 = to_device_floatX(inp2, N * C);
    floatX *d_bias2 = to_device_floatX(bias2, C), *d_w = to_device_floatX(w, C),
           *d_b = to_device_floatX(b, C);
    floatX *d_dout = to_device_floatX(dout, N * C), *d_res = (floatX *)test_device(N * C * sizeof(floatX));
    floatX *d_sum = (floatX *)test_device(N * C * sizeof(floatX)),
           *d_out = (floatX *)test_device(N * C * sizeof(floatX));
    float *d_mean = (float *)test_device(N * sizeof(float)),
          *d_rstd = (float *)test_device(N * sizeof(float));
    double worst = 0.0, outer = FLOATX_ROUNDING + 4e-6 * (1.0 + fabs(center));
    // residual: rounded once, the same bits from both functions, and layernorm of what was stored
    layernorm_forward_launch<LANES>(d_out, d_mean, d_rstd, d_res, d_inp1, d_inp2, d_bias2, d_w, d_b, N, C,
                                    stream);
    residual_forward(d_sum, d_inp1, d_inp2, d_bias2, N, C, stream);
    float *res = to_host_floatX(d_res, N * C, stream), *sum = to_host_floatX(d_sum, N * C, stream);
    float *out = to_host_floatX(d_out, N * C, stream);
    bool ok = same_bits(res, sum, N * C);
    for (size_t n = 0; n < N * C; n++) {
        ok = ok && res[n] == to_float(from_float<floatX>(inp1[n] + (inp2[n] + bias2[n % C])));
    }
    Want want = reference(res, w, b, dout, N, C);
    ok = bounded(&worst, test_error(out, want.out, N * C), outer) && ok;
    layernorm_forward_launch<LANES>(d_out, d_mean, d_rstd, d_sum, NULL, NULL, NULL, d_w, d_b, N, C, stream);
    float *plain = to_host_floatX(d_out, N * C, stream);
    ok = ok && same_bits(out, plain, N * C);  // out = LN(residual as stored): not one bit of difference
    // backward: overwriting, then in place with accumulation and the residual's gradient
    float *d_dw = to_device(w, C), *d_db = to_device(b, C);
    float *scratch = (float *)test_device(layernorm_backward_scratch(N, C) * sizeof(float));
    layernorm_backward_launch<LANES>(d_out, d_dw, d_db, scratch, NULL, d_dout, d_res, d_w, d_mean, d_rstd, N,
                                     C, false, stream);
    float *dinp = to_host_floatX(d_out, N * C, stream), *dw = to_host(d_dw, C, stream),
          *db = to_host(d_db, C, stream);
    ok = bounded(&worst, test_error(dinp, want.dinp, N * C), outer) && ok;
    ok = bounded(&worst, test_error(dw, want.dweight, C), 4e-6 * (1.0 + fabs(center))) && ok;
    ok = bounded(&worst, test_error(db, want.dbias, C), 4e-6) && ok;
    copy_to_floatX(d_sum, dres, N * C);
    layernorm_backward_launch<LANES>(d_sum, d_dw, d_db, scratch, d_sum, d_dout, d_res, d_w, d_mean, d_rstd, N,
                                     C, true, stream);
    float *dinp2 = to_host_floatX(d_sum, N * C, stream), *dw2 = to_host(d_dw, C, stream),
          *db2 = to_host(d_db, C, stream);
    for (size_t i = 0; i < N * C; i++) want.dinp[i] += (double)dres[i];
    ok = bounded(&worst, test_error(dinp2, want.dinp, N * C), outer) && ok;
    for (size_t i = 0; i < C; i++) ok = ok && dw2[i] == 2.0f * dw[i] && db2[i] == 2.0f * db[i];
    check(&c, ok, "N %zu C %zu mean %g, %2d threads a row (" FLOATX_NAME "): error %.2e", N, C, center, LANES,
          worst);
    floatX *x_buffers[] = {d_inp1, d_inp2, d_bias2, d_w, d_b, d_dout, d_res, d_sum, d_out};
    float *f_buffers[] = {d_mean, d_rstd, d_dw, d_db, scratch};
    void *host[] = {inp1, inp2, bias2, w,     b,   dout, dres,     res,       sum,          out,       plain,
                    dinp, dw,   db,    dinp2, dw2, db2,  want.out, want.dinp, want.dweight, want.dbias};
    for (size_t i = 0; i < sizeof x_buffers / sizeof *x_buffers; i++) CUDA_CHECK(cudaFree(x_buffers[i]));
    for (size_t i = 0; i < sizeof f_buffers / sizeof *f_buffers; i++) CUDA_CHECK(cudaFree(f_buffers[i]));
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) free(host[i]);
}

int main(void) {
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    const struct {
        size_t N, C;
        double center;
    } shapes[] = {{1, 8, 0.0},    {3, 1, 0.0},     {7, 18, 0.0},   {33, 64, 0.0},  {130, 24, 0.0},
                  {65, 768, 0.0}, {40, 768, 50.0}, {9, 1600, 0.0}, {5, 6152, 0.0}, {4500, 16, 0.0}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_shape<32>(shapes[i].N, shapes[i].C, shapes[i].center, stream);
        check_shape<1>(shapes[i].N, shapes[i].C, shapes[i].center, stream);
    }
    // no rows: the sums are 0, or stay as they are
    float one = 1.0f, *dw = to_device(&one, 1), *db = to_device(&one, 1);
    layernorm_backward(NULL, dw, db, dw, NULL, NULL, NULL, NULL, NULL, NULL, 0, 1, true, stream);
    float *kept = to_host(dw, 1, stream);
    layernorm_backward(NULL, dw, db, dw, NULL, NULL, NULL, NULL, NULL, NULL, 0, 1, false, stream);
    float *zero = to_host(db, 1, stream);
    check(&c, *kept == 1.0f && *zero == 0.0f, "no rows");
    free(kept);
    free(zero);
    CUDA_CHECK(cudaFree(dw));
    CUDA_CHECK(cudaFree(db));
    CUDA_CHECK(cudaStreamDestroy(stream));
    return check_summary(&c);
}
