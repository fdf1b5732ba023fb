// classifier.cu: softmax, cross-entropy and its gradient. Kernels from naive to
// llmc/kernels/classifier.cuh's, checked against plain loops in double. Checks llmc's own also in
// vocabulary parts, which give the same bits on one rank.
#include "dev/cuda/bench.h"

#include "llmc/kernels/classifier.cuh"

static Lab lab;

// ---- the kernels -----------------------------------------------------------------------

typedef struct {
    float *losses;       // [2, N]
    float *stats;        // [3, N]: maximum, sum of exponentials, target's logit
    floatX *logits;      // [N, Vp], becomes the gradient
    const int *targets;  // [N]
    float dloss;
    size_t N, V, Vp;
} Problem;

// 1: a thread a row: four passes, and neighbouring threads read addresses that lie Vp apart.
__global__ void classify_thread_a_row(float *losses, floatX *logits, const int *targets,
                                      float dloss, size_t N, size_t V, size_t Vp) {
    size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    floatX *row = logits + n * Vp;
    size_t target = (size_t)targets[n];
    float max = -INFINITY, sum = 0.0f;
    for (size_t j = 0; j < V; j++) max = fmaxf(max, to_float(row[j]));
    for (size_t j = 0; j < V; j++) sum += expf(to_float(row[j]) - max);
    losses[n] = logf(sum) + max - to_float(row[target]);
    for (size_t j = 0; j < Vp; j++) {
        float p = j < V ? expf(to_float(row[j]) - max) / sum : 0.0f;
        row[j] = from_float<floatX>(dloss * (p - (j == target ? 1.0f : 0.0f)));
    }
}

// 2: a block a row: the same passes, read by whole cache lines.
__global__ void classify_block_a_row(float *losses, floatX *logits, const int *targets,
                                     float dloss, size_t V, size_t Vp) {
    floatX *row = logits + blockIdx.x * Vp;
    size_t target = (size_t)targets[blockIdx.x];
    float max = -INFINITY, sum = 0.0f, target_logit = to_float(row[target]);
    for (size_t j = threadIdx.x; j < V; j += blockDim.x) max = fmaxf(max, to_float(row[j]));
    max = block_max(max);
    for (size_t j = threadIdx.x; j < V; j += blockDim.x) sum += exponential(to_float(row[j]) - max);
    sum = block_sum(sum);
    for (size_t j = threadIdx.x; j < Vp; j += blockDim.x) {
        float p = j < V ? exponential(to_float(row[j]) - max) / sum : 0.0f;
        row[j] = from_float<floatX>(dloss * (p - (j == target ? 1.0f : 0.0f)));
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) + max - target_logit;
}

typedef struct {
    size_t N, V, Vp;
} Shape;

// 3: maximum and sum in one pass, by packs of 128 bits. Tensor ranks need these two kernels, so a
// row comes from memory twice, as it may leave the cache between.
static void classify_in_steps(float *losses, float *stats, floatX *logits, const int *targets,
                              float dloss, Shape k, bool gradient) {
    float *max = stats, *sum = stats + k.N, *target = stats + 2 * k.N;
    unsigned threads = classifier_threads(k.Vp);
    by_packs<ELEMENT_PACK>(k.Vp, [&](auto W) {
        LAUNCH(classifier_stats_kernel<W>, (unsigned)k.N, threads, lab.stream)
        (max, sum, target, logits, targets, k.V, k.Vp, 0);
        LAUNCH(classifier_gradient_kernel<W>, (unsigned)k.N, threads, lab.stream)
        (losses, logits, max, sum, target, targets, dloss, k.V, k.Vp, 0, gradient);
    });
}

// 4: llmc's. If a rank has all columns, and a multiprocessor has room for two rows, one kernel
// copies a row to shared memory and reads it there.
static void classify(float *losses, float *stats, floatX *logits, const int *targets, float dloss,
                     Shape k, bool gradient) {
    float *max = stats, *sum = stats + k.N, *target = stats + 2 * k.N;
    classifier_stats(max, sum, target, logits, targets, k.N, k.V, k.Vp, 0, lab.stream);
    classifier_gradient(losses, logits, max, sum, target, targets, dloss, k.N, k.V, k.Vp, 0,
                        gradient, lab.stream);
}

static void classify1(const Problem *p, unsigned block) {
    LAUNCH(classify_thread_a_row, CEIL_DIV(p->N, (size_t)block), block, lab.stream)
    (p->losses, p->logits, p->targets, p->dloss, p->N, p->V, p->Vp);
}
static void classify2(const Problem *p, unsigned block) {
    LAUNCH(classify_block_a_row, p->N, block, lab.stream)
    (p->losses, p->logits, p->targets, p->dloss, p->V, p->Vp);
}
static void classify3(const Problem *p, unsigned) {
    classify_in_steps(p->losses, p->stats, p->logits, p->targets, p->dloss, {p->N, p->V, p->Vp},
                      true);
}
static void classify4(const Problem *p, unsigned) {
    classify(p->losses, p->stats, p->logits, p->targets, p->dloss, {p->N, p->V, p->Vp}, true);
}

static const LabKernel CLASSIFIER[] = {
    {"classifier", 1, "a thread a row: maximum, sum, gradient", classify1, 0},
    {"classifier", 2, "a block a row", classify2, 0},
    {"classifier", 3, "statistics in one pass, then the gradient", classify3, LONG_ROW_THREADS},
    {"classifier", 4, "a row stays in shared memory between them (llmc)", classify4,
     LONG_ROW_THREADS},
};

// ---- the checks ------------------------------------------------------------------------

// Logits whose padding would show: larger than all others.
static float *test_logits(Shape k, double scale) {
    float *x = test_values(k.N * k.Vp, 0.0, scale, 1);
    for (size_t n = 0; n < k.N; n++) {
        for (size_t j = k.V; j < k.Vp; j++) x[n * k.Vp + j] = 1e4f;
    }
    return x;
}

static int *test_targets(Shape k) {
    int *targets = (int *)test_memory(k.N * sizeof(int));
    uint64_t seed = 9;
    for (size_t n = 0; n < k.N; n++)
        targets[n] = (int)((0.5 + 0.5 * test_random(&seed)) * (double)(k.V - 1));
    targets[0] = (int)k.V - 1;
    return targets;
}

// Computes losses [2, N] and the gradient [N, Vp] in double.
static void reference(double *losses, double *gradient, const float *x, const int *targets,
                      double dloss, Shape k) {
    for (size_t n = 0; n < k.N; n++) {
        const float *row = x + n * k.Vp;
        double max = (double)row[0], sum = 0.0;
        for (size_t j = 0; j < k.V; j++) max = fmax(max, (double)row[j]);
        for (size_t j = 0; j < k.V; j++) sum += exp((double)row[j] - max);
        losses[n] = log(sum) + max - (double)row[targets[n]];
        losses[k.N + n] = max - (double)row[targets[n]];
        for (size_t j = 0; j < k.Vp; j++) {
            double p = j < k.V ? exp((double)row[j] - max) / sum : 0.0;
            gradient[n * k.Vp + j] = dloss * (p - (j == (size_t)targets[n] ? 1.0 : 0.0));
        }
    }
}

static bool bounded(double *worst, double error, double bound) {
    if (error > *worst || isnan(error)) *worst = error;
    return error <= bound;
}

// Checks that the padding is exactly 0 and everything else within the bound. At the target 1 - p
// keeps only p's rounding if p is nearly 1, so the error there is measured against dloss.
static bool check_gradient(const float *got, const double *want, double dloss, Shape k,
                           double *worst) {
    bool ok = true;
    for (size_t n = 0; n < k.N; n++) {
        const double *row = want + n * k.Vp;
        double square = 0.0;
        for (size_t j = 0; j < k.Vp; j++) square += row[j] * row[j];
        for (size_t j = 0; j < k.Vp; j++) {
            double size = fabs(row[j]) + (row[j] < 0.0 ? dloss : sqrt(square / (double)k.V));
            double error = fabs((double)got[n * k.Vp + j] - row[j]);
            ok =
                (j < k.V ? bounded(worst, error / size, FLOATX_ROUNDING + 2e-6) : error == 0.0) &&
                ok;
        }
    }
    return ok;
}

// Checks the losses. log(sum) + max - target has the rounding of its terms, which are at least 1
// in effect: sum >= 1.
static bool check_losses(const float *got, const double *want, size_t N, double *worst) {
    bool ok = true;
    for (size_t n = 0; n < N; n++) {
        ok = bounded(worst, fabs((double)got[n] - want[n]) / (1.0 + fabs(want[n])), 2e-6) && ok;
    }
    return ok;
}

static void check_whole(Shape k, double scale) {
    size_t mark = test_count;
    float *x = test_logits(k, scale), dloss = 1.0f / 37.0f;
    int *targets = test_targets(k), *d_targets = to_device(targets, k.N);
    double *losses = test_doubles(2 * k.N), *gradient = test_doubles(k.N * k.Vp), worst = 0.0,
           loss_worst = 0.0;
    reference(losses, gradient, x, targets, (double)dloss, k);
    floatX *d_x = to_device_floatX(x, k.N * k.Vp);
    float *d_losses = test_floats(2 * k.N);
    float *stats = test_floats(3 * k.N);
    classify(d_losses, stats, d_x, d_targets, dloss, k, false);
    float *loss1 = to_host(d_losses, 2 * k.N, lab.stream),
          *same = to_host_floatX(d_x, k.N * k.Vp, lab.stream);
    bool ok = true;
    for (size_t i = 0; i < k.N * k.Vp; i++)
        ok = ok && same[i] == to_float(from_float<floatX>(x[i]));
    classify(d_losses, stats, d_x, d_targets, dloss, k, true);
    float *loss2 = to_host(d_losses, 2 * k.N, lab.stream),
          *got = to_host_floatX(d_x, k.N * k.Vp, lab.stream);
    ok = ok && same_bits(loss1, loss2, 2 * k.N);
    ok = check_losses(loss2, losses, 2 * k.N, &loss_worst) && ok;
    ok = check_gradient(got, gradient, (double)dloss, k, &worst) && ok;
    // The two kernels of tensor ranks give the same bits. So does their rescaling, which the
    // parallel trainers do on one rank too.
    floatX *d_steps = to_device_floatX(x, k.N * k.Vp);
    classify_in_steps(d_losses, stats, d_steps, d_targets, dloss, k, true);
    bool steps = same_bits(loss2, to_host(d_losses, 2 * k.N, lab.stream), 2 * k.N) &&
                 same_bits(got, to_host_floatX(d_steps, k.N * k.Vp, lab.stream), k.N * k.Vp);
    float *sum = to_host(stats + k.N, k.N, lab.stream);
    classifier_rescale(stats + k.N, stats, stats, k.N, lab.stream);
    bool bits = same_bits(sum, to_host(stats + k.N, k.N, lab.stream), k.N);
    check(&lab.checks, ok && bits && steps,
          "N %zu V %zu of %zu, logits to %g (" FLOATX_NAME "): loss %.2e, gradient %.2e%s%s", k.N,
          k.V, k.Vp, scale, loss_worst, worst,
          bits ? "" : ", rescaling with one rank's maximum changes the sum",
          steps ? "" : ", one kernel and two differ in bits");
    test_release(mark);
}

// Checks the columns cut into `ranks` parts, with the all-reduces done here.
static void check_parts(Shape k, size_t ranks) {
    size_t mark = test_count;
    size_t N = k.N, Vl = k.Vp / ranks;
    float *x = test_logits(k, 9.0), dloss = 1.0f / 11.0f;
    int *targets = test_targets(k), *d_targets = to_device(targets, N);
    double *losses = test_doubles(2 * N), *gradient = test_doubles(N * k.Vp), worst = 0.0,
           loss_worst = 0.0;
    reference(losses, gradient, x, targets, (double)dloss, k);
    float *part = (float *)test_memory(N * Vl * sizeof(float)),
          *got = (float *)test_memory(N * k.Vp * sizeof(float));
    float *max = (float *)test_memory(N * sizeof(float)),
          *sum = (float *)test_memory(N * sizeof(float));
    float *target = (float *)test_memory(N * sizeof(float));
    float *d_local = test_floats(N), *d_sum = test_floats(N), *d_target = test_floats(N);
    float *d_losses = test_floats(2 * N);
    for (size_t n = 0; n < N; n++) {
        max[n] = -INFINITY;
        sum[n] = target[n] = 0.0f;
    }
    floatX *d_part = test_floatX(N * Vl);
    float *d_max = NULL;
    bool ok = true;
    for (int pass = 0; pass < 3; pass++) {  // 0: maxima, 1: sums and targets, 2: gradients
        for (size_t r = 0; r < ranks; r++) {
            for (size_t n = 0; n < N; n++)
                memcpy(part + n * Vl, x + n * k.Vp + r * Vl, Vl * sizeof(float));
            copy_to_floatX(d_part, part, N * Vl);
            if (pass == 2) {
                classifier_gradient(d_losses, d_part, d_max, d_sum, d_target, d_targets, dloss, N,
                                    k.V, Vl, r * Vl, true, lab.stream);
                float *slice = to_host_floatX(d_part, N * Vl, lab.stream),
                      *loss = to_host(d_losses, 2 * N, lab.stream);
                for (size_t n = 0; n < N; n++)
                    memcpy(got + n * k.Vp + r * Vl, slice + n * Vl, Vl * sizeof(float));
                ok = check_losses(loss, losses, 2 * N, &loss_worst) && ok;
                continue;
            }
            classifier_stats(d_local, d_sum, d_target, d_part, d_targets, N, k.V, Vl, r * Vl,
                             lab.stream);
            if (pass == 1) classifier_rescale(d_sum, d_local, d_max, N, lab.stream);
            float *a = to_host(d_local, N, lab.stream), *b = to_host(d_sum, N, lab.stream),
                  *t = to_host(d_target, N, lab.stream);
            for (size_t n = 0; n < N; n++) {
                if (r * Vl >= k.V) ok = ok && a[n] == -INFINITY && b[n] == 0.0f && t[n] == 0.0f;
                if (pass == 0) max[n] = fmaxf(max[n], a[n]);
                if (pass == 1) {
                    sum[n] += b[n];
                    target[n] += t[n];
                }
            }
        }
        if (pass == 0) d_max = to_device(max, N);
        if (pass == 1) d_sum = to_device(sum, N), d_target = to_device(target, N);
    }
    ok = check_gradient(got, gradient, (double)dloss, k, &worst) && ok;
    check(&lab.checks, ok,
          "gathered logits: V %zu of %zu in %zu parts (" FLOATX_NAME
          "): loss %.2e, gradient %.2e",
          k.V, k.Vp, ranks, loss_worst, worst);
    test_release(mark);
}

// Checks the block sizes that this machine may not choose: results agree to rounding.
static void check_block_sizes(Shape k) {
    float *x = test_logits(k, 6.0), *first = NULL, *first_loss = NULL;
    int *targets = test_targets(k), *d_targets = to_device(targets, k.N);
    float *d_losses = test_floats(2 * k.N);
    float *max = test_floats(k.N), *sum = test_floats(k.N), *target = test_floats(k.N);
    const unsigned sizes[] = {32, 128, 512};
    bool ok = true;
    for (int i = 0; i < 3; i++) {
        floatX *d_x = to_device_floatX(x, k.N * k.Vp);
        LAUNCH(classifier_stats_kernel<x128::size>, (unsigned)k.N, sizes[i], lab.stream)
        (max, sum, target, d_x, d_targets, k.V, k.Vp, 0);
        LAUNCH(classifier_gradient_kernel<x128::size>, (unsigned)k.N, sizes[i], lab.stream)
        (d_losses, d_x, max, sum, target, d_targets, 1.0f, k.V, k.Vp, 0, true);
        float *got = to_host_floatX(d_x, k.N * k.Vp, lab.stream),
              *loss = to_host(d_losses, k.N, lab.stream);
        for (size_t j = 0; first && j < k.N * k.Vp; j++) {
            ok = ok && fabs((double)(got[j] - first[j])) <=
                           (2.0 * FLOATX_ROUNDING + 2e-6) * fabs((double)first[j]);
        }
        for (size_t n = 0; first && n < k.N; n++)
            ok = ok && fabsf(loss[n] - first_loss[n]) <= 4e-6f * first_loss[n];
        if (!first) first = got, first_loss = loss;
    }
    check(&lab.checks, ok, "missing barrier: blocks of 32, 128 and 512 threads agree");
}

static void check_special(void) {
    const Shape k = {3, 6, 8};
    float x[24] = {0}, nan = NAN;
    int targets[3] = {1, 2, 3};
    x[1] = 1e30f;
    x[8 + 2] = nan;
    x[16 + 3] = -1e30f;
    floatX *d_x = to_device_floatX(x, 24);
    int *d_targets = to_device(targets, 3);
    float *d_losses = test_floats(6);
    classify(d_losses, test_floats(3 * k.N), d_x, d_targets, 1.0f, k, true);
    float *loss = to_host(d_losses, 3, lab.stream), *got = to_host_floatX(d_x, 24, lab.stream);
    check(&lab.checks,
          loss[0] == 0.0f && got[1] == 0.0f && isnan(loss[1]) && loss[2] > 9e29f &&
              got[16 + 3] == -1.0f && got[6] == 0.0f,
          "a huge logit, a NaN, a target without probability");
}

static void check_loss_sum(void) {
    bool ok = true;
    const size_t sizes[] = {1, 31, 256, 257, 5000};
    for (size_t N : sizes) {
        float *x = test_values(N, 3.0, 1.0, N), *d_x = to_device(x, N);
        double *d_out = test_array<double>(1), want = 0.0;
        for (size_t n = 0; n < N; n++) want += (double)x[n];
        loss_sum(d_out, d_x, N, lab.stream);
        ok = ok && fabs(*to_host(d_out, 1, lab.stream) - want) <= 1e-13 * want;
    }
    check(&lab.checks, ok, "loss_sum");
}

// Checks every kernel of the list at ragged sizes. The errors of losses and gradients count
// against the same bound.
static void check_kernels(void) {
    static const Shape shapes[] = {{1, 2, 8}, {5, 257, 384}, {7, 31, 31}, {3, 5003, 5120}};
    double errors[LAB_COUNT(CLASSIFIER)] = {0.0}, dloss = (double)(1.0f / 37.0f),
           bound = FLOATX_ROUNDING + 2e-6;
    for (Shape k : shapes) {
        size_t mark = test_count;
        float *x = test_logits(k, 9.0);
        int *targets = test_targets(k);
        double *losses = test_doubles(2 * k.N), *gradient = test_doubles(k.N * k.Vp);
        reference(losses, gradient, x, targets, dloss, k);
        for (size_t i = 0; i < LAB_COUNT(CLASSIFIER); i++) {
            Problem p = {test_floats(2 * k.N),
                         test_floats(3 * k.N),
                         to_device_floatX(x, k.N * k.Vp),
                         to_device(targets, k.N),
                         (float)dloss,
                         k.N,
                         k.V,
                         k.Vp};
            CLASSIFIER[i].run(&p, lab_block(&CLASSIFIER[i]));
            float *loss = to_host(p.losses, k.N, lab.stream),
                  *got = to_host_floatX(p.logits, k.N * k.Vp, lab.stream);
            if (!check_losses(loss, losses, k.N, &errors[i])) errors[i] = (double)INFINITY;
            bool ok = check_gradient(got, gradient, dloss, k, &errors[i]);
            if (!ok && errors[i] <= bound) errors[i] = (double)INFINITY;  // the padding
        }
        test_release(mark);
    }
    for (size_t i = 0; i < LAB_COUNT(CLASSIFIER); i++)
        lab_check(&lab, &CLASSIFIER[i], errors[i], bound);
}

static void checks(void) {
    check_kernels();
    const Shape shapes[] = {{1, 2, 8},       {5, 257, 384},   {7, 31, 31},      {3, 100, 104},
                            {4, 1000, 1024}, {3, 5003, 5120}, {2, 50257, 50304}};
    for (Shape k : shapes) {
        check_whole(k, 4.0);
        check_whole(k, 60.0);
    }
    for (size_t ranks : {2, 3, 4, 8}) check_parts({6, 257, 384}, ranks);
    Shape wide = {2, 5003, 5120};
    check_parts(wide, 2);
    check_block_sizes(wide);
    check_special();
    check_loss_sum();
}

// Times all kernels. They ask for these bytes, in units of N Vp elements. The naive kernels read
// a row for the maximum, the sum and the gradient, and write it (4). Kernel 3 reads it for both
// statistics at once, and for the gradient (3). llmc's reads it once on a GPU (2).
static void bench(void) {
    Shape k = {lab.cpu ? (size_t)32 : (size_t)4096, 50257, 50304};
    float *x = test_values(k.Vp, 0.0, 4.0, 1);
    int *targets = test_targets(k);
    Problem p = {test_floats(2 * k.N),
                 test_floats(3 * k.N),
                 test_floatX(k.N * k.Vp),
                 to_device(targets, k.N),
                 1e-3f,
                 k.N,
                 k.V,
                 k.Vp};
    for (size_t n = 0; n < k.N; n++) copy_to_floatX(p.logits + n * k.Vp, x, k.Vp);
    double unit = (double)(k.N * k.Vp * sizeof(floatX));
    KernelWork must = lab_stated(&lab, LAB_LAST(CLASSIFIER), &p);
    bool kept = classifier_keeps_row(k.V, k.Vp, 0);
    for (const LabKernel &c : CLASSIFIER)
        lab_bench(&lab, &c, &p, must,
                  (c.number < 3              ? 4.0
                   : c.number == 4 && kept   ? 2.0
                                             : 3.0) *
                      unit);
}

int main(int argc, char **argv) { return lab_main(&lab, argc, argv, checks, bench); }
