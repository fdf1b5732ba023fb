// adamw.cu: the optimizer's update: kernels from naive to llmc/kernels/adamw.cuh's, checked
// against plain loops in double.
#include "dev/cuda/bench.h"

#include "llmc/host/options_table.h"
#include "llmc/kernels/adamw.cuh"

static Lab lab;
static const bool NARROW = sizeof(floatX) < sizeof(float);  // then there are master weights

// ---- the kernels -----------------------------------------------------------------------

typedef struct {
    floatX *params;               // [n]
    float *master, *grads, *m, *v;  // [n]; master NULL if params are float
    size_t n;
    AdamW h;
    const Piece *ranges;          // on the device: all of it in RUNS runs
    unsigned blocks;
} Problem;

enum { RUNS = 5 };  // of a problem: a model has some ten for each layer

// Copies a table to the device, numbered. Stores the number of its blocks.
static Piece *device_ranges(Piece *host, size_t count, unsigned *blocks) {
    *blocks = adamw_number(host, count);
    return to_device(host, count);
}

static float *weights_of(const Problem *p) {
    return NARROW ? p->master : (float *)(void *)p->params;
}

// 1: the formulas as they are written, a kernel for each. Every one reads and writes memory
// again.
__global__ void adamw_moment1(float *m, const float *g, size_t n, AdamW h) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) m[i] = m[i] - h.gain1 * m[i] + h.gain1 * (g[i] * h.grad_scale);
}
__global__ void adamw_moment2(float *v, const float *g, size_t n, AdamW h) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float grad = g[i] * h.grad_scale;
    v[i] = v[i] - h.gain2 * v[i] + h.gain2 * grad * grad;
}
__global__ void adamw_step(float *w, const float *m, const float *v, size_t n, AdamW h) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float mhat = m[i] * h.m_scale;
    w[i] -= h.lr * (mhat / (sqrtf(v[i]) * h.root_scale + h.eps) + h.decay * w[i]);
}
__global__ void adamw_round(floatX *params, const float *w, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) params[i] = from_float<floatX>(w[i]);
}

// 2: all of it in one pass, an element a thread.
__global__ void adamw_one_pass(floatX *narrow, float *w, const float *grads, float *ms, float *vs,
                               size_t n, AdamW h) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float g = grads[i] * h.grad_scale, m = ms[i] - h.gain1 * ms[i] + h.gain1 * g;
    float v = vs[i] - h.gain2 * vs[i] + h.gain2 * g * g, x = w[i];
    x -= h.lr * (m * h.m_scale / (sqrtf(v) * h.root_scale + h.eps) + h.decay * x);
    ms[i] = m;
    vs[i] = v;
    w[i] = x;
    if (narrow) narrow[i] = from_float<floatX>(x);
}

static void update1(const Problem *p, unsigned block) {
    size_t blocks = CEIL_DIV(p->n, (size_t)block);
    float *w = weights_of(p);
    LAUNCH(adamw_moment1, blocks, block, lab.stream)(p->m, p->grads, p->n, p->h);
    LAUNCH(adamw_moment2, blocks, block, lab.stream)(p->v, p->grads, p->n, p->h);
    LAUNCH(adamw_step, blocks, block, lab.stream)(w, p->m, p->v, p->n, p->h);
    if (NARROW) LAUNCH(adamw_round, blocks, block, lab.stream)(p->params, w, p->n);
}
static void update2(const Problem *p, unsigned block) {
    LAUNCH(adamw_one_pass, CEIL_DIV(p->n, (size_t)block), block, lab.stream)
    (NARROW ? p->params : NULL, weights_of(p), p->grads, p->m, p->v, p->n, p->h);
}
// Returns the first element of a run: the weights of a problem are in RUNS parts, cut at
// multiples of 8.
static size_t run_begin(size_t n, size_t run) { return run == RUNS ? n : n * run / RUNS / 8 * 8; }

static void update3(const Problem *p, unsigned) {
    size_t count = 0;
    for (size_t run = 0; run < RUNS; run++)
        count += run_begin(p->n, run) < run_begin(p->n, run + 1);
    adamw_update(p->params, p->master, p->grads, p->m, p->v, p->ranges, count, p->blocks, p->n,
                 p->h, lab.stream);
}

static const LabKernel UPDATE[] = {
    {"adamw", 1, "a kernel for each formula", update1, 0},
    {"adamw", 2, "one pass over memory", update2, 0},
    {"adamw", 3, "whole sectors, one launch for all runs (llmc)", update3, ELEMENT_THREADS},
};

// ---- the checks ------------------------------------------------------------------------

// The arguments of the formulas, as on the command line.
typedef struct {
    double lr, beta1, beta2, eps, decay;
} Flags;
static const Flags USUAL = {3e-3, 0.9, 0.95, 1e-8, 0.1};

static AdamW adamw_with(const Flags *f, double t) {
    return adamw_factors(f->lr, f->beta1, f->beta2, f->eps, f->decay, t, 0.7);
}
static AdamW adamw_at(double t) { return adamw_with(&USUAL, t); }

// Computes the formulas in double, for step t, on elements [first, end) of weights w, gradients g
// and moments m and v.
static void plain_update(double *w, const float *g, double *m, double *v, size_t first,
                         size_t end, double t, const Flags *f) {
    double c1 = 1.0 - pow(f->beta1, t), c2 = 1.0 - pow(f->beta2, t);
    for (size_t i = first; i < end; i++) {
        double grad = (double)g[i] * 0.7;
        m[i] = f->beta1 * m[i] + (1.0 - f->beta1) * grad;
        v[i] = f->beta2 * v[i] + (1.0 - f->beta2) * grad * grad;
        w[i] -= f->lr * (m[i] / c1 / (sqrt(v[i] / c2) + f->eps) + f->decay * w[i]);
    }
}

static void make_ranges(Problem *p) {
    Piece ranges[RUNS];
    size_t count = 0;
    for (size_t run = 0; run < RUNS; run++) {
        size_t at = run_begin(p->n, run), end = run_begin(p->n, run + 1);
        if (at < end) ranges[count++] = {at, end, at, 0, 0, true, 0};
    }
    p->ranges = device_ranges(ranges, count, &p->blocks);
}

static Problem make_problem(const float *weights, const float *grads, const float *m,
                            const float *v, size_t n) {
    Problem p = {to_device_floatX(weights, n),
                 NARROW ? to_device(weights, n) : NULL,
                 to_device(grads, n),
                 to_device(m, n),
                 to_device(v, n),
                 n,
                 adamw_at(1),
                 NULL,
                 0};
    make_ranges(&p);
    return p;
}

static float *host_weights(const Problem *p) { return to_host(weights_of(p), p->n, lab.stream); }

// True if params are the weights, rounded.
static bool rounded(const Problem *p) {
    float *params = to_host_floatX(p->params, p->n, lab.stream), *w = host_weights(p);
    bool ok = true;
    for (size_t i = 0; i < p->n; i++) ok = ok && params[i] == to_float(from_float<floatX>(w[i]));
    return ok;
}

// Checks three steps on n weights from element `shift` on, in two runs; the second has no decay.
// There are only these n moments and master weights, from element 0 on, as a sharded optimizer
// has them.
static bool check_size(size_t n, size_t shift, double *worst) {
    // The elements around the half must not change.
    size_t mark = test_count, total = n + shift + 4, half = n / 2;
    float *w = test_values(total, 0.0, 1.0, 1), *g = test_values(total, 0.0, 0.1, 2);
    float *m = test_values(total, 0.0, 0.05, 3), *v = test_values(total, 0.01, 0.005, 4);
    double *ww = widened(w, total), *mw = widened(m, total), *vw = widened(v, total);
    Problem p = make_problem(w, g, m, v, total);
    size_t state = NARROW ? 0 : shift;  // fp32 weights are in params
    if (NARROW && n > 0)
        CUDA_CHECK(cudaMemcpy(p.master, w + shift, n * sizeof(float), cudaMemcpyHostToDevice));
    if (n > 0)
        CUDA_CHECK(cudaMemcpy(p.m + state, m + shift, n * sizeof(float), cudaMemcpyHostToDevice));
    if (n > 0)
        CUDA_CHECK(cudaMemcpy(p.v + state, v + shift, n * sizeof(float), cudaMemcpyHostToDevice));
    Piece ranges[2] = {{shift, shift + half, state, 0, 0, true, 0},
                       {shift + half, shift + n, state + half, 0, 0, false, 0}};
    size_t first = half == 0, count = n == 0 ? 0 : 2 - first;
    unsigned blocks = 0;
    const Piece *device = device_ranges(ranges + first, count, &blocks);
    Flags no_decay = USUAL;
    no_decay.decay = 0.0;
    for (int t = 1; t <= 3; t++) {
        AdamW h = adamw_at(t);
        adamw_update(p.params, p.master, p.grads, p.m, p.v, device, count, blocks, n, h,
                     lab.stream);
        plain_update(ww, g, mw, vw, shift, shift + half, t, &USUAL);
        plain_update(ww, g, mw, vw, shift + half, shift + n, t, &no_decay);
    }
    float *got_w = host_weights(&p) + state, *got_m = to_host(p.m, total, lab.stream) + state;
    float *got_v = to_host(p.v, total, lab.stream) + state,
          *params = to_host_floatX(p.params, total, lab.stream);
    double error = fmax(test_error(got_w, ww + shift, n), fmax(test_error(got_m, mw + shift, n),
                                                                test_error(got_v, vw + shift, n)));
    *worst = fmax(*worst, error);
    bool ok = error < 1e-6;
    for (size_t i = 0; i < total; i++) {
        bool inside = i >= shift && i < shift + n;
        float want = inside ? got_w[i - shift] : w[i];
        ok = ok && params[i] == to_float(from_float<floatX>(want));
    }
    for (size_t i = n; i < total - state; i++)
        ok = ok && got_m[i] == m[state + i] && got_v[i] == v[state + i];
    test_release(mark);
    return ok;
}

// Checks that slices give the bits of the whole, wherever it is cut. A sharded optimizer relies
// on it.
static void check_slices(void) {
    enum { N = 5000 };
    float *w = test_values(N, 0.0, 1.0, 1), *g = test_values(N, 0.0, 0.1, 2),
          *zero = test_values(N, 0.0, 0.0, 3);
    float *want = NULL;
    AdamW h = adamw_factors(1e-2, 0.9, 0.95, 1e-8, 0.1, 1, 1);
    bool ok = true;
    static const size_t cuts[] = {0, 64, 1001, 2502, 4999};
    for (size_t k : cuts) {
        Problem p = make_problem(w, g, zero, zero, N);
        Piece ranges[2] = {{0, k, 0, 0, 0, true, 0}, {k, N, k, 0, 0, true, 0}};
        size_t first = k == 0;
        unsigned blocks;
        const Piece *device = device_ranges(ranges + first, 2 - first, &blocks);
        adamw_update(p.params, p.master, p.grads, p.m, p.v, device, 2 - first, blocks, N, h,
                     lab.stream);
        float *got = host_weights(&p);
        ok = ok && (!want || same_bits(want, got, N));
        want = got;
    }
    check(&lab.checks, ok, "slices give the bits of the whole (" FLOATX_NAME ")");
}

// Checks every kernel of the list at ragged sizes, two steps each.
static void check_kernels(void) {
    static const size_t sizes[] = {1, 7, 255, 4096, 4099, 20011};
    double errors[LAB_COUNT(UPDATE)] = {0.0};
    for (size_t n : sizes) {
        size_t mark = test_count;
        float *x = test_values(n, 0.0, 1.0, 1), *g = test_values(n, 0.0, 0.1, 2),
              *zero = test_values(n, 0.0, 0.0, 3);
        double *want = widened(x, n), *m = test_doubles(n), *v = test_doubles(n);
        for (int t = 1; t <= 2; t++) plain_update(want, g, m, v, 0, n, t, &USUAL);
        for (size_t k = 0; k < LAB_COUNT(UPDATE); k++) {
            Problem p = make_problem(x, g, zero, zero, n);
            for (int t = 1; t <= 2; t++) {
                p.h = adamw_at(t);
                UPDATE[k].run(&p, lab_block(&UPDATE[k]));
            }
            double error = test_error(host_weights(&p), want, n);
            errors[k] = fmax(errors[k], rounded(&p) ? error : (double)INFINITY);
        }
        test_release(mark);
    }
    for (size_t k = 0; k < LAB_COUNT(UPDATE); k++) lab_check(&lab, &UPDATE[k], errors[k], 1e-6);
}

// The row of a flag.
static const Field *flag_of(const char *name) {
    void *object;
    FieldTable table = {OPTIONS, OPTION_ROWS, NULL};
    return fields_find(&table, 1, name, &object);
}

// Returns the error of five steps at one end of the range of every flag, by the bits of `ends`.
// Weights, moments and the update are compared with double. Gradients are from 1e-6 to 1: the
// largest --eps hides some, the least none.
static double error_at(const Flags *f) {
    enum { N = 1000, STEPS = 5 };
    size_t mark = test_count;
    float *x = test_values(N, 0.0, 1.0, 1), *zero = test_values(N, 0.0, 0.0, 2);
    double *w = widened(x, N), *m = test_doubles(N), *v = test_doubles(N), worst = 0.0;
    Problem p = make_problem(x, zero, zero, zero, N);
    for (int t = 1; t <= STEPS; t++) {
        float *g = test_values(N, 0.0, 1.0, 2 + (uint64_t)t);
        for (size_t i = 0; i < N; i++) g[i] *= (float)pow(10.0, -(double)(i % 7));
        CUDA_CHECK(cudaMemcpy(p.grads, g, N * sizeof(float), cudaMemcpyHostToDevice));
        // From the kernel's own weights: --lr and --weight-decay at their most grow each rounding
        // a millionfold a step.
        float *before = host_weights(&p);
        for (size_t i = 0; i < N; i++) w[i] = (double)before[i];
        p.h = adamw_with(f, t);
        update3(&p, 0);
        plain_update(w, g, m, v, 0, N, t, f);
        worst = fmax(worst, test_error(host_weights(&p), w, N));
        worst = fmax(worst, test_error(to_host(p.m, N, lab.stream), m, N));
        worst = fmax(worst, test_error(to_host(p.v, N, lab.stream), v, N));
    }
    test_release(mark);
    return worst;
}

// Checks both ends of every range of the command line, together.
static void check_flags(void) {
    const Field *rows[] = {flag_of("lr"), flag_of("beta1"), flag_of("beta2"), flag_of("eps"),
                           flag_of("weight-decay")};
    double worst = 0.0;
    for (unsigned ends = 0; ends < 1u << LAB_COUNT(rows); ends++) {
        double at[LAB_COUNT(rows)];
        for (size_t i = 0; i < LAB_COUNT(rows); i++)
            at[i] = ends >> i & 1 ? rows[i]->max : rows[i]->min;
        Flags f = {at[0], at[1], at[2], at[3], at[4]};
        double error = error_at(&f);
        if (error > worst) worst = error;
        if (!(error < 2e-6))
            check(&lab.checks, false,
                  "--lr %g --beta1 %.9g --beta2 %.9g --eps %g --weight-decay %g: error %.2e",
                  f.lr, f.beta1, f.beta2, f.eps, f.decay, error);
    }
    check(&lab.checks, worst < 2e-6,
          "at the ends of all flags' ranges (" FLOATX_NAME "): error %.2e", worst);
}

static void checks(void) {
    check_kernels();
    check_flags();
    const size_t sizes[] = {0, 1, 3, 4, 5, 8, 63, 768, 4096, 4099, 30001};
    for (size_t shift = 0; shift < 9; shift = shift * 2 + (shift == 0)) {
        bool ok = true;
        double worst = 0.0;
        for (size_t n : sizes) ok &= check_size(n, shift, &worst);
        check(&lab.checks, ok,
              "%zu elements past an aligned address (" FLOATX_NAME "): error %.2e", shift, worst);
    }
    check_slices();
}

// Times the kernels. One pass asks for no more than it must: 28 bytes for an fp32 weight, 30 for
// a bf16 one. Three kernels read the gradient and the moments twice: 40, and 46 bytes.
static void bench(void) {
    size_t n = lab.cpu ? (size_t)1 << 20 : (size_t)124 << 20;
    Problem p = {test_floatX(n),
                 NARROW ? test_floats(n) : NULL,
                 test_floats(n),
                 test_floats(n),
                 test_floats(n),
                 n,
                 adamw_at(1),
                 NULL,
                 0};
    make_ranges(&p);
    float *buffers[] = {weights_of(&p), p.grads, p.m, p.v};
    for (float *x : buffers) CUDA_CHECK(cudaMemset(x, 0, n * sizeof(float)));
    double naive = (NARROW ? 46.0 : 40.0) * (double)n;
    KernelWork must = lab_stated(&lab, LAB_LAST(UPDATE), &p);
    for (const LabKernel &k : UPDATE)
        lab_bench(&lab, &k, &p, must, k.number == 1 ? naive : must.bytes);
}

int main(int argc, char **argv) { return lab_main(&lab, argc, argv, checks, bench); }
