// rope.cu: rotary position embedding on the heads of q and k, forward and back. Kernels from
// naive to llmc/kernels/rope.cuh's, checked against llmc/reference_llama.h.
#include "dev/cuda/bench.h"

#include "llmc/kernels/rope.cuh"
#include "llmc/reference_llama.h"

static Lab lab;

// ---- the kernels -----------------------------------------------------------------------

typedef struct {
    floatX *x;           // [N, stride], turned in place
    const float *table;  // [T, D/2, 2]
    size_t N, T, heads, HS, D, stride;
    float sign;
} Problem;

static constexpr double ROPE_BASE = 10000.0;

// Returns the angle by which pair i of D/2 turns at position t.
__host__ __device__ static inline double rope_angle(size_t t, size_t i, size_t D) {
    return (double)t * pow(ROPE_BASE, -2.0 * (double)i / (double)D);
}

// 1: a pair a thread, which computes its angle: a power, a sine and a cosine in double for 2
// elements.
__global__ void rope_computes(Problem p) {
    size_t j = (size_t)blockIdx.x * blockDim.x + threadIdx.x, half = p.D / 2,
           pairs = p.heads * half;
    if (j >= p.N * pairs) return;
    size_t n = j / pairs, head = j % pairs / half, i = j % half;
    double angle = rope_angle(n % p.T, i, p.D);
    floatX *pair = p.x + n * p.stride + head * p.HS + i;
    float a = to_float(pair[0]), b = to_float(pair[half]);
    float cosine = (float)cos(angle), sine = p.sign * (float)sin(angle);
    pair[0] = from_float<floatX>(a * cosine - b * sine);
    pair[half] = from_float<floatX>(b * cosine + a * sine);
}

// 2: a pair a thread, with cosine and sine from the table.
__global__ void rope_looks_up(Problem p) {
    size_t j = (size_t)blockIdx.x * blockDim.x + threadIdx.x, half = p.D / 2,
           pairs = p.heads * half;
    if (j >= p.N * pairs) return;
    size_t n = j / pairs, head = j % pairs / half, i = j % half;
    floatX *pair = p.x + n * p.stride + head * p.HS + i;
    const float *turn = p.table + n % p.T * p.D + 2 * i;
    float a = to_float(pair[0]), b = to_float(pair[half]), sine = p.sign * turn[1];
    pair[0] = from_float<floatX>(a * turn[0] - b * sine);
    pair[half] = from_float<floatX>(b * turn[0] + a * sine);
}

static size_t pairs_of(const Problem *p) { return p->N * p->heads * (p->D / 2); }

static void rope1(const Problem *p, unsigned block) {
    LAUNCH(rope_computes, CEIL_DIV(pairs_of(p), (size_t)block), block, lab.stream)(*p);
}
static void rope2(const Problem *p, unsigned block) {
    LAUNCH(rope_looks_up, CEIL_DIV(pairs_of(p), (size_t)block), block, lab.stream)(*p);
}
static void rope3(const Problem *p, unsigned) {
    rope(p->x, p->table, p->N, p->T, p->heads, p->HS, p->D, p->stride, p->sign, lab.stream);
}

static const LabKernel ROPE[] = {
    {"rope", 1, "a pair a thread, which computes its angle", rope1, 0},
    {"rope", 2, "cosine and sine from a table", rope2, 0},
    {"rope", 3, "128-bit loads, a thread turns 8 rows (llmc)", rope3, ROPE_THREADS},
};

// ---- the checks ------------------------------------------------------------------------

static const float *make_table(size_t T, size_t D) {
    float *table = (float *)test_memory(T * D * sizeof(float));
    for (size_t j = 0; j < T * D / 2; j++) {
        double angle = rope_angle(j / (D / 2), j % (D / 2), D);
        table[2 * j] = (float)cos(angle), table[2 * j + 1] = (float)sin(angle);
    }
    return to_device(table, T * D);
}

// Makes rows of `heads` heads that turn and one that stays. `part` of a head's channels
// turn.
static Problem make_problem(size_t N, size_t T, size_t heads, size_t HS, size_t D, float sign) {
    return {NULL, make_table(T, D), N, T, heads, HS, D, (heads + 1) * HS, sign};
}

static double rope_errors[LAB_COUNT(ROPE)];

static bool check_kernels_at(size_t N, size_t T, size_t heads, size_t HS, size_t D, float sign) {
    size_t mark = test_count;
    Problem p = make_problem(N, T, heads, HS, D, sign);
    size_t n = N * p.stride;
    float *x = test_values(n, 0.0, 2.0, 1);
    double *want = widened(x, n);
    Llama m = Llama();
    m.theta = ROPE_BASE, m.rotary = (double)D / (double)HS;
    reference_rope(&m, want, N, T, heads, HS, p.stride, (double)sign);
    bool ok = true;
    for (size_t k = 0; k < LAB_COUNT(ROPE); k++) {
        p.x = to_device_floatX(x, n);
        ROPE[k].run(&p, lab_block(&ROPE[k]));
        rope_errors[k] = fmax(rope_errors[k], test_error_floatX(p.x, want, n, lab.stream));
        float *got = to_host_floatX(p.x, n, lab.stream);
        for (size_t i = 0; i < n; i++) {
            if (i % p.stride / HS >= heads || i % HS >= D) ok = ok && got[i] == x[i];
        }
    }
    test_release(mark);
    return ok;
}

// Checks that turning back by the same angles gives the input.
static void check_inverse(void) {
    size_t mark = test_count;
    Problem p = make_problem(50, 25, 3, 64, 64, 1.0f);
    size_t n = p.N * p.stride;
    float *x = test_values(n, 0.0, 2.0, 1);
    double *want = widened(x, n);
    p.x = to_device_floatX(x, n);
    rope3(&p, 0);
    p.sign = -1.0f;
    rope3(&p, 0);
    double error = test_error_floatX(p.x, want, n, lab.stream);
    check(&lab.checks, error < 2.0 * FLOATX_ROUNDING + 4e-7, "turned and turned back: error %.2e",
          error);
    test_release(mark);
}

static void checks(void) {
    static const size_t shapes[][5] = {
        {1, 1, 1, 2, 2},       {7, 5, 3, 6, 4},
        {9, 9, 2, 24, 12},     {40, 20, 5, 64, 64},
        {33, 33, 4, 128, 64},  {17, 8, 2, 80, 40},
        {600, 300, 2, 16, 16}, {8 * 65535 + 9, 25, 1, 2, 2}};  // past a grid's y
    bool ok = true;
    for (const size_t(&s)[5] : shapes) {
        ok &= check_kernels_at(s[0], s[1], s[2], s[3], s[4], 1.0f);
        ok &= check_kernels_at(s[0], s[1], s[2], s[3], s[4], -1.0f);
    }
    for (size_t k = 0; k < LAB_COUNT(ROPE); k++)
        lab_check(&lab, &ROPE[k], rope_errors[k], FLOATX_ROUNDING + 4e-7);
    check(&lab.checks, ok,
          "other heads, and channels beyond the part of a head that turns, keep their bits");
    check_inverse();
}

// Times q and k of Llama 3 8B: 32 and 8 heads of 128, in rows with v's 8 behind them.
static void bench(void) {
    size_t N = lab.cpu ? 512 : 8192;
    Problem p = make_problem(N, N, 40, 128, 128, 1.0f);
    p.stride = 48 * 128;
    p.x = lab_fill(&lab, N * p.stride);
    KernelWork work = lab_stated(&lab, LAB_LAST(ROPE), &p);
    double moved = 2.0 * (double)(N * 40 * 128 * sizeof(floatX)),
           table = (double)(N * 128 * sizeof(float));
    // Each head reads the table's row again.
    double asks[] = {moved, moved + 40.0 * table, moved + 40.0 * table};
    for (const LabKernel &k : ROPE) lab_bench(&lab, &k, &p, work, asks[k.number - 1]);
}

int main(int argc, char **argv) { return lab_main(&lab, argc, argv, checks, bench); }
