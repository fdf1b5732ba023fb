// moe.cu: the routing of a mixture of experts, forward and backward. Checks llmc/kernels/moe.cuh
// against llmc/reference_moe.h and plain loops in double.
#include "dev/cuda/bench.h"

#include "llmc/kernels/moe.cuh"
#include "llmc/reference_moe.h"

static Lab lab;

typedef struct {
    Moe moe;
    Routing r;
    size_t B, T, N, C, rows;      // rows: of all experts
    floatX *x, *weight, *y, *dout; // [N,C], [E,C], [rows,C], [N,C]
    floatX *gathered, *out;       // [rows,C], [N,C]
    float *dlogits, *dweight, *scratch;
} Problem;

static const float DLOSS = 0.125f;

static void route(const Problem *p, unsigned) {
    moe_route(p->r, p->x, p->weight, p->moe, p->B, p->T, p->C, lab.stream);
}
static void gather(const Problem *p, unsigned) {
    moe_gather(p->gathered, p->x, p->r, p->moe, p->B, p->C, true, lab.stream);
}
static void combine(const Problem *p, unsigned) {
    moe_combine(p->out, p->x, p->y, p->r, p->moe, p->N, p->C, lab.stream, Dropout());
}
static void backward_router(const Problem *p, unsigned) {
    moe_backward_router(p->dlogits, p->dout, p->y, p->r, p->moe, DLOSS, p->B, p->T, p->C,
                        lab.stream);
}
static void backward_input(const Problem *p, unsigned) {
    moe_backward_input(p->out, p->y, p->dlogits, p->weight, p->r, p->moe, p->N, p->C, lab.stream);
}
static void backward_weight(const Problem *p, unsigned) {
    moe_backward_weight(p->dweight, p->scratch, p->dlogits, p->x, p->N, p->C, p->moe.E, false,
                        lab.stream);
}

enum { ROUTE, GATHER, COMBINE, BACKWARD_ROUTER, BACKWARD_INPUT, BACKWARD_WEIGHT, KERNELS };
static const LabKernel MOE[KERNELS] = {
    {"moe route", 1, "a warp a token, then one a sequence and expert (llmc)", route, ROW_THREADS},
    {"moe gather", 1, "a warp a place (llmc)", gather, ROW_THREADS},
    {"moe combine", 1, "a warp a token (llmc)", combine, ROW_THREADS},
    {"moe backward router", 1, "a warp a token (llmc)", backward_router, ROW_THREADS},
    {"moe backward input", 1, "a warp a token (llmc)", backward_input, ROW_THREADS},
    {"moe backward weight", 1, "an element a thread, chunks of the rows (llmc)", backward_weight,
     BIAS_THREADS},
};

static Problem problem_make(Moe moe, size_t B, size_t T, size_t C) {
    Problem p = {};
    size_t E = moe.E, N = B * T, X = N * moe.k;
    p.moe = moe, p.B = B, p.T = T, p.N = N, p.C = C, p.rows = moe_rows(moe, B);
    p.r.probs = test_floats(N * E), p.r.lse = test_floats(N), p.r.mass = test_floats(B * E);
    p.r.choice = test_array<size_t>(X), p.r.place = test_array<size_t>(X);
    p.r.source = test_array<size_t>(p.rows), p.r.tokens = test_floats(B * E);
    p.r.whole = p.r.tokens;
    p.r.weight = test_floats(X);
    p.gathered = test_floatX(p.rows * C), p.out = test_floatX(N * C);
    p.dlogits = test_floats(N * E), p.dweight = test_floats(E * C);
    p.scratch = test_floats(bias_backward_scratch(N, E * C));
    return p;
}

// ---- the checks ------------------------------------------------------------------------

// Runs all kernels on one problem. Returns true if the integers are right, and each kernel's
// error in errors. ties: two experts have the same weights, so every token gives them equal
// logits.
static bool check_problem(Moe moe, size_t B, size_t T, size_t C, bool ties,
                          double errors[KERNELS]) {
    size_t mark = test_count, E = moe.E, k = moe.k, N = B * T, X = N * k;
    Problem p = problem_make(moe, B, T, C);
    float *x = test_values(N * C, 0.0, 1.0, 1), *w = test_values(E * C, 0.0, 1.0, 2);
    float *y = test_values(p.rows * C, 0.0, 1.0, 3), *d = test_values(N * C, 0.0, 1.0, 4);
    if (ties) memcpy(w + (E - 1) * C, w, C * sizeof(float));
    p.x = to_device_floatX(x, N * C), p.weight = to_device_floatX(w, E * C);
    p.y = to_device_floatX(y, p.rows * C), p.dout = to_device_floatX(d, N * C);

    ReferenceMoe reference = {E, k, moe.slots, (double)moe.balance, (double)moe.z, NULL,
                              false, 0};
    ReferenceRouting want = reference_routing_create(&reference, B, T, 1, 1);
    double *dx = test_doubles(N * C), *dw = test_doubles(E * C), *dlogits = test_doubles(N * E);
    double *rows = test_doubles(p.rows * C), *out = widened(x, N * C);
    double *inputs = widened(x, N * C), *weights = widened(w, E * C);
    reference_route(&reference, &want, inputs, weights, B, T, C);

    MOE[ROUTE].run(&p, 0);
    size_t *choice = to_host(p.r.choice, X, lab.stream), *place = to_host(p.r.place, X, lab.stream);
    size_t *source = to_host(p.r.source, p.rows, lab.stream);
    float *tokens = to_host(p.r.tokens, B * E, lab.stream);
    float *mass = to_host(p.r.mass, B * E, lab.stream);
    bool ok = memcmp(choice, want.choice, X * sizeof(size_t)) == 0;
    size_t *used = (size_t *)test_memory(B * E * sizeof(size_t));
    for (size_t i = 0; i < B * E; i++) {
        double sum = 0.0;
        for (size_t t = 0; t < T; t++) sum += want.probs[(i / E * T + t) * E + i % E];
        ok = ok && (double)tokens[i] == rint(want.share[i] * (double)(T * k)) &&
             fabs((double)mass[i] - sum) < 1e-4;
        used[i] = 0;
    }
    for (size_t i = 0; i < X; i++) {  // places are given in the order of the tokens
        size_t b = i / k / T, e = want.choice[i], at = (e * B + b) * moe.slots + used[b * E + e];
        ok = ok && place[i] == (want.kept[i] ? at : MOE_NONE) && (!want.kept[i] || source[at] == i);
        used[b * E + e] += want.kept[i];
    }
    for (size_t row = 0; row < p.rows; row++) {
        size_t b = row / moe.slots % B, e = row / moe.slots / B;
        ok = ok && (row % moe.slots < used[b * E + e] || source[row] == MOE_NONE);
    }
    errors[ROUTE] =
        fmax(errors[ROUTE], fmax(test_error_float(p.r.probs, want.probs, N * E, lab.stream),
                                 test_error_float(p.r.lse, want.lse, N, lab.stream)));
    if (!ok) {  // what follows would read beyond its arrays
        reference_routing_free(&want);
        test_release(mark);
        return false;
    }
    for (size_t n = 0; n < N; n++) {
        double mean = 0.0, *dl = dlogits + n * E;
        const double *probs = want.probs + n * E;
        for (size_t e = 0; e < E; e++)
            dl[e] = (double)moe.balance * (double)E * want.share[n / T * E + e] * (double)DLOSS;
        for (size_t i = n * k; i < (n + 1) * k; i++) {
            for (size_t c = 0; c < C && want.kept[i]; c++) {
                double there = (double)y[place[i] * C + c];
                rows[place[i] * C + c] = probs[choice[i]] * (double)x[n * C + c];
                out[n * C + c] += probs[choice[i]] * there;
                dl[choice[i]] += (double)d[n * C + c] * there;
                dx[n * C + c] += there;
            }
        }
        for (size_t e = 0; e < E; e++) mean += probs[e] * dl[e];
        for (size_t e = 0; e < E; e++)
            dl[e] = probs[e] * (dl[e] - mean + 2.0 * (double)moe.z * want.lse[n] * (double)DLOSS);
        for (size_t i = 0; i < E * C; i++) {
            dx[n * C + i % C] += dl[i / C] * weights[i];
            dw[i] += dl[i / C] * inputs[n * C + i % C];
        }
    }
    for (int i = GATHER; i < COMBINE; i++) MOE[i].run(&p, 0);
    errors[GATHER] =
        fmax(errors[GATHER], test_error_floatX(p.gathered, rows, p.rows * C, lab.stream));
    MOE[COMBINE].run(&p, 0);
    errors[COMBINE] = fmax(errors[COMBINE], test_error_floatX(p.out, out, N * C, lab.stream));
    for (int i = BACKWARD_ROUTER; i < KERNELS; i++) MOE[i].run(&p, 0);
    errors[BACKWARD_ROUTER] =
        fmax(errors[BACKWARD_ROUTER], test_error_float(p.dlogits, dlogits, N * E, lab.stream));
    errors[BACKWARD_INPUT] =
        fmax(errors[BACKWARD_INPUT], test_error_floatX(p.out, dx, N * C, lab.stream));
    errors[BACKWARD_WEIGHT] =
        fmax(errors[BACKWARD_WEIGHT], test_error_float(p.dweight, dw, E * C, lab.stream));
    moe_backward_weight(p.dweight, p.scratch, p.dlogits, p.x, N, C, E, true, lab.stream);
    for (size_t i = 0; i < E * C; i++) dw[i] *= 2.0;
    errors[BACKWARD_WEIGHT] =
        fmax(errors[BACKWARD_WEIGHT], test_error_float(p.dweight, dw, E * C, lab.stream));
    reference_routing_free(&want);
    test_release(mark);
    return ok;
}

static void checks(void) {
    static const struct { size_t E, k, slots, B, T, C; bool ties; const char *name; } rows[] = {
        {1, 1, 1, 1, 1, 8, false, "one token, one expert"},
        {8, 1, 3, 3, 16, 24, false, "k = 1, some are dropped"},
        {8, 2, 40, 2, 40, 32, false, "k = 2, nobody is dropped"},
        {4, 4, 65, 2, 65, 16, false, "every expert for every token"},
        {5, 2, 7, 1, 33, 20, false, "nothing divides"},
        {6, 2, 9, 4, 70, 18, false, "a sequence beyond a warp"},
        {64, 8, 1, 2, 31, 8, false, "64 experts of one place"},
        {4, 1, 20, 2, 30, 16, true, "ties go to the lower number"},
        {3, 2, 20, 2, 30, 16, true, "both of a tie, in their order"},
    };
    double errors[KERNELS] = {0.0};
    for (const auto &row : rows) {
        bool ok = check_problem({row.E, row.k, row.slots, 0.7f, 0.3f}, row.B, row.T, row.C,
                                row.ties, errors);
        check(&lab.checks, ok, "choices and places: %s", row.name);
    }
    for (int i = 0; i < KERNELS; i++) {
        bool float_out = i == ROUTE || i == BACKWARD_ROUTER || i == BACKWARD_WEIGHT;
        lab_check(&lab, &MOE[i], errors[i], (float_out ? 6e-8 : FLOATX_ROUNDING) + 4e-6);
    }
    check(&lab.checks, moe_capacity(1.0, 64, 1, 8) == 8 && moe_capacity(1.0, 65, 1, 8) == 9 &&
          moe_capacity(0.001, 64, 1, 8) == 1 && moe_capacity(100.0, 64, 2, 8) == 64,
          "places: rounded up, at least one, at most a sequence's tokens");
}

// Times the layer of 8 experts that a token of 1024 channels meets, capacity 1.
static void bench(void) {
    size_t B = lab.cpu ? 1 : 8, T = lab.cpu ? 256 : 1024, C = 1024;
    Moe moe = {8, 2, moe_capacity(1.0, T, 2, 8), 0.01f, 0.001f};
    Problem p = problem_make(moe, B, T, C);
    p.x = lab_fill(&lab, p.N * C), p.weight = lab_fill(&lab, moe.E * C);
    p.y = lab_fill(&lab, p.rows * C), p.dout = lab_fill(&lab, p.N * C);
    route(&p, 0);
    for (const LabKernel &k : MOE) {
        KernelWork work = lab_stated(&lab, &k, &p);
        lab_bench(&lab, &k, &p, work, work.bytes);
    }
}

int main(int argc, char **argv) { return lab_main(&lab, argc, argv, checks, bench); }
