// test_gpt.c: runs the trainers as a user would, by their command line, and compares what they leave behind
// (losses, norms, gradients, weights, checkpoints, error messages) with the fp64 reference, llmc/reference.h.
//
//   test_gpt BUILD_DIR [GROUP]      for example: test_gpt build/cpu-fp32 golden
//
// Run it in the root of the repository. BUILD_DIR holds the trainers; -bf16 in its name selects the bounds of
// that precision. The groups are listed above main. A new trainer or layout is a row in LAYOUTS and, where
// its bits must equal another's, in BIT_ROWS. A check that guards against a known bug of this field names it
// in quotation marks. All files go to a folder below BUILD_DIR, which is removed at the end.
#define _XOPEN_SOURCE 700
#include "dev/test/check.h"
#include "dev/test/fixture.h"
#include "dev/test/runner.h"
#include "llmc/reference.h"

// Every layout is held against the golden case.
static const Layout LAYOUTS[] = {
    {"train_gpt", 1, "--micro-batch 1"},
    {"train_gpt", 1, "--micro-batch 2"},
    {"train_gpt", 1, "--micro-batch 4"},
    {"train_gpt", 1, "--micro-batch 8"},
};
enum { NUM_LAYOUTS = sizeof LAYOUTS / sizeof *LAYOUTS };

// What is not about layouts is tested on one rank.
static const Layout ONE = {"train_gpt", 1, ""};

// One case that a trainer repeats: hyperparameters of a run at a constant learning rate.
typedef struct {
    size_t seq, global_batch, steps;
    double lr, weight_decay, clip, beta1, beta2, eps;
} Training;

// What the reference says about such a run.
typedef struct {
    double losses[16], norms[16];
    double *gradients;  // [table.total] of the first step, before clipping
    double *weights;    // [table.total] after the last step
} Expected;

typedef struct {
    Check check;
    char build[PATH_MAX], temp[PATH_MAX];  // absolute; temp is the working directory
    bool bf16;
    Reference golden;      // with the golden weights
    Training training;     // the golden run
    Expected expected;     // of the golden run, by the reference, at this build's precision
    int *tokens;           // the golden shard
    size_t token_count;
} Context;

static cJSON *read_json(const char *path) {
    char *text = read_file(path, NULL);
    cJSON *json = text ? cJSON_Parse(text) : NULL;
    if (!json) die("cannot read", path);
    free(text);
    return json;
}

// Runs the one-rank trainer, which must succeed.
__attribute__((format(printf, 2, 3))) static bool trains(const Context *x, const char *format, ...) {
    char flags[ARG_BYTES];
    va_list values;
    va_start(values, format);
    vsnprintf(flags, sizeof flags, format, values);
    va_end(values);
    Outcome o = run(x->build, &ONE, PLAIN, "%s", flags);
    return succeeded(&o);
}

// ---- expectations ---------------------------------------------------------------------------------------

static double round_to_bf16(double value) {
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&single, &bits, 4);
    return single;
}

static void shard_batch(const int *tokens, size_t first, size_t count, int *inputs, int *targets) {
    for (size_t i = 0; i < count; i++) {
        inputs[i] = tokens[first + i];
        targets[i] = tokens[first + i + 1];
    }
}

// Mean loss of sequences first .. first + count of the shard.
static double reference_mean_loss(Reference *ref, const int *tokens, size_t T, size_t first, size_t count,
                                  double scale) {
    int *inputs = allocate(count * T * sizeof(int)), *targets = allocate(count * T * sizeof(int));
    shard_batch(tokens, first * T, count * T, inputs, targets);
    double sum = reference_loss_and_gradients(ref, inputs, targets, count, T, scale);
    free(inputs);
    free(targets);
    return sum / (double)(count * T);
}

// Trains the reference from its present weights. With bf16, forward and backward see the weights rounded to
// bf16 while the update acts on the unrounded ones: mixed precision without any other rounding.
static Expected reference_train(Reference *ref, const Training *h, const int *tokens, bool bf16) {
    size_t total = ref->table.total, bytes = total * sizeof(double);
    Expected e;
    double *master = allocate(bytes);
    e.gradients = allocate(bytes);
    e.weights = allocate(bytes);
    for (size_t s = 0; s < h->steps; s++) {
        memcpy(master, ref->params, bytes);
        for (size_t i = 0; i < total && bf16; i++) ref->params[i] = round_to_bf16(master[i]);
        reference_zero_gradients(ref);
        e.losses[s] = reference_mean_loss(ref, tokens, h->seq, s * h->global_batch, h->global_batch,
                                          1.0 / (double)(h->global_batch * h->seq));
        e.norms[s] = reference_gradient_norm(ref);
        if (s == 0) memcpy(e.gradients, ref->grads, bytes);
        memcpy(ref->params, master, bytes);
        double scale = h->clip > 0 && e.norms[s] > h->clip ? h->clip / e.norms[s] : 1.0;
        reference_adamw(ref, s + 1, h->lr, h->beta1, h->beta2, h->eps, h->weight_decay, scale);
    }
    memcpy(e.weights, ref->params, bytes);
    free(master);
    return e;
}

static void expected_free(Expected *e) {
    free(e->gradients);
    free(e->weights);
}

// The flags of such a run on a model folder, written to text.
static void training_flags(char text[ARG_BYTES], const Training *h, const char *model, const char *shard) {
    snprintf(text, ARG_BYTES, "--init %s --train-data %s --shuffle 0 --seq %zu --global-batch %zu "
             "--steps %zu --lr %g --lr-final 1 --warmup 0 --weight-decay %g --clip %g --beta1 %g --beta2 %g "
             "--eps %g --val-every 0 --sample-every 0", model, shard, h->seq, h->global_batch, h->steps,
             h->lr, h->weight_decay, h->clip, h->beta1, h->beta2, h->eps);
}

static double relative(double got, double want) { return fabs(got - want) / fabs(want); }

// Bounds of the relative error of a gradient tensor (L2), a loss, a norm, a weight tensor after updates.
//
// fp32: 1e-5, the contract. bf16: the reference sees the same rounded weights; what is left is the rounding
// of activations and their gradients. One rounding is wrong by at most u = 2^-9. Between the loss and a
// gradient lie about 10 roundings a layer in forward and 10 in backward; their errors are independent and add
// like a random walk: u * sqrt(20 L + 10). Twice that covers the spread between tensors. Losses and norms
// average over many of these.
typedef struct {
    double gradient, loss, norm, weight;
} Bounds;

static Bounds bounds(const Context *x, const GPTConfig *g) {
    Bounds fp32 = {1e-5, 1e-5, 1e-5, 1e-5};
    double walk = sqrt(20.0 * (double)g->L + 10.0) / 512.0;
    Bounds bf16 = {2 * walk, 1.0 / 512.0, walk, 1.0 / 128.0};
    return x->bf16 ? bf16 : fp32;
}

// Relative L2 error of every tensor: the worst of each kind over the layers, and the worst of all.
typedef struct {
    double kinds[NUM_KINDS], worst;
    const char *name;  // of the worst
} Errors;

static double tensor_error(const Tensor *x, const double *got, const double *want) {
    double difference = 0, norm = 0;
    for (size_t i = x->offset; i < x->offset + x->size; i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    double error = difference == 0 ? 0 : sqrt(difference / norm);
    return isnan(error) ? INFINITY : error;
}

static Errors compare_tensors(const ParamTable *table, const double *got, const double *want) {
    Errors e;
    memset(&e, 0, sizeof e);
    e.name = "none";
    for (size_t i = 0; i < table->count; i++) {
        const Tensor *x = &table->tensors[i];
        double error = tensor_error(x, got, want);
        if (error > e.kinds[x->kind]) e.kinds[x->kind] = error;
        if (error > e.worst) {
            e.worst = error;
            e.name = x->name;
        }
    }
    return e;
}

// One line of the matrix "layout x tensor": the worst error of each kind of tensor in percent of the bound.
static void print_errors(const char *name, const Errors *e, double bound) {
    printf("     %-40.40s", name);
    for (int k = 0; k < NUM_KINDS; k++) printf(" %5.1f", 100.0 * e->kinds[k] / bound);
    printf("\n");
}

static void print_errors_head(double bound) {
    static const char *HEADS[NUM_KINDS] = {"wte", "wpe", "ln1w", "ln1b", "qkvw", "qkvb", "projw", "projb",
                                           "ln2w", "ln2b", "fcw", "fcb", "fc2w", "fc2b", "lnfw", "lnfb"};
    printf("     relative L2 error of the gradient, worst layer, in percent of the bound %.2g\n", bound);
    printf("     %-40s", "");
    for (int k = 0; k < NUM_KINDS; k++) printf(" %5s", HEADS[k]);
    printf("\n");
}

// Compares a finished run (the files "log" and "gradients") with what is expected: one check.
static void check_run(Context *x, const char *name, const ParamTable *table, const Expected *want,
                      size_t steps, Errors *errors) {
    Bounds bound = bounds(x, &table->config);
    double *got = allocate(table->total * sizeof(double)), loss = 0, norm = 0;
    Log log = read_log("log");
    bool complete = read_tensors("gradients", table, got) && log.steps == steps;
    for (size_t s = 0; s < steps && complete; s++) {
        loss = fmax(loss, relative(log.loss[s], want->losses[s]));
        norm = fmax(norm, relative(log.norm[s], want->norms[s]));
        complete = log.step[s] == (double)(s + 1) && isfinite(log.loss[s]) && isfinite(log.norm[s]);
    }
    *errors = compare_tensors(table, got, want->gradients);
    bool ok = complete && errors->worst <= bound.gradient && loss <= bound.loss && norm <= bound.norm;
    check(&x->check, ok, "%s: gradients %.1e (%s; bound %.1e), losses %.1e (%.1e), norms %.1e (%.1e)%s", name,
          errors->worst, errors->name, bound.gradient, loss, bound.loss, norm, bound.norm,
          complete ? "" : ", the log or a tensor is missing");
    free(got);
    remove("log");
    remove("gradients");
}

static const char *layout_name(const Layout *layout, char text[128]) {
    snprintf(text, 128, "%s %s", layout->trainer, layout->flags);
    return text;
}

// ---- group reference ------------------------------------------------------------------------------------

// Backward against central differences of forward, every single parameter.
static void test_finite_differences(Context *x) {
    enum { B = 2, T = 4 };
    Reference ref = random_model(2, 6, 2, 7, 5, 0.5, 1);
    int *tokens = random_tokens(B * T + 1, 7, 2), *targets = tokens + 1;
    double *differences = allocate(ref.table.total * sizeof(double)), h = 1e-5, scale = 1.0 / (B * T);
    reference_loss_and_gradients(&ref, tokens, targets, B, T, scale);
    for (size_t k = 0; k < ref.table.count; k++) {
        const Tensor *p = &ref.table.tensors[k];
        for (size_t i = p->offset; i < p->offset + p->rows * p->cols; i++) {
            double value = ref.params[i];
            ref.params[i] = value + h;
            double above = reference_loss_and_gradients(&ref, tokens, targets, B, T, 0);
            ref.params[i] = value - h;
            double below = reference_loss_and_gradients(&ref, tokens, targets, B, T, 0);
            ref.params[i] = value;
            differences[i] = scale * (above - below) / (2 * h);
        }
    }
    Errors e = compare_tensors(&ref.table, ref.grads, differences);
    check(&x->check, e.worst < 1e-7, "reference: gradients against finite differences %.1e (%s)", e.worst,
          e.name);
    free(differences);
    free(tokens);
    reference_free(&ref);
}

// Two halves of a batch add up to the whole; a larger padding of the vocabulary changes nothing.
static void test_reference_sums(Context *x) {
    const Reference *g = &x->golden;
    GPTConfig wide_config = g->config;
    wide_config.Vp += 256;
    Reference ref = reference_create(&g->config), wide = reference_create(&wide_config);
    memcpy(ref.params, g->params, g->table.total * sizeof(double));
    for (size_t i = 0; i < g->table.count; i++) {
        const Tensor *from = &g->table.tensors[i], *to = &wide.table.tensors[i];
        memcpy(wide.params + to->offset, g->params + from->offset, from->rows * from->cols * sizeof(double));
    }
    double loss = (reference_mean_loss(&ref, x->tokens, 24, 0, 4, 1.0 / 192) +
                   reference_mean_loss(&ref, x->tokens, 24, 4, 4, 1.0 / 192)) / 2;
    double wide_loss = reference_mean_loss(&wide, x->tokens, 24, 0, 8, 1.0 / 192), worst = 0;
    for (size_t i = 0; i < g->table.count; i++) {
        const Tensor *from = &g->table.tensors[i], *to = &wide.table.tensors[i];
        for (size_t k = 0; k < from->rows * from->cols; k++) {
            worst = fmax(worst, fabs(wide.grads[to->offset + k] - ref.grads[from->offset + k]));
        }
    }
    check(&x->check, relative(loss, wide_loss) < 1e-14 && worst < 1e-15 && worst >= 0,
          "reference: two micro-batches add up to one, whatever the padding of the vocabulary is");
    reference_free(&ref);
    reference_free(&wide);
}

// The independent case: PyTorch in float64 made the losses and norms; its gradients are stored as fp32.
static void test_reference_golden(Context *x) {
    Reference ref = reference_create(&x->golden.config);
    size_t bytes = ref.table.total * sizeof(double);
    memcpy(ref.params, x->golden.params, bytes);
    Expected ours = reference_train(&ref, &x->training, x->tokens, false);
    double *gradients = allocate(bytes), loss = 0, norm = 0;
    bool read = read_tensors("golden/gradients.safetensors", &ref.table, gradients);
    cJSON *json = read_json("golden/expected.json");
    for (size_t s = 0; s < x->training.steps; s++) {
        const cJSON *losses = cJSON_GetObjectItem(json, "losses");
        const cJSON *norms = cJSON_GetObjectItem(json, "grad_norms");
        loss = fmax(loss, relative(ours.losses[s], cJSON_GetArrayItem(losses, (int)s)->valuedouble));
        norm = fmax(norm, relative(ours.norms[s], cJSON_GetArrayItem(norms, (int)s)->valuedouble));
    }
    Errors e = compare_tensors(&ref.table, ours.gradients, gradients);
    check(&x->check, loss < 1e-9, "reference: %zu golden losses %.1e (bound 1e-9)", x->training.steps, loss);
    check(&x->check, norm < 1e-9, "reference: %zu golden norms %.1e (bound 1e-9)", x->training.steps, norm);
    check(&x->check, read && e.worst < 1e-7, "reference: golden gradients %.1e (%s; bound 1e-7)", e.worst,
          e.name);
    cJSON_Delete(json);
    free(gradients);
    expected_free(&ours);
    reference_free(&ref);
}

static void group_reference(Context *x) {
    test_finite_differences(x);
    test_reference_sums(x);
    test_reference_golden(x);
}

// ---- group golden: every layout against the golden case -------------------------------------------------

// The table "is my difference normal?" for one rank, tensor by tensor.
static void print_tensor_table(const Context *x, const double *got, const double *golden) {
    double bound = bounds(x, &x->golden.config).gradient;
    printf("     %-28s %12s %12s %12s %9s\n", "gradient (one rank)", "L2 norm", "vs PyTorch", "vs reference",
           "bound");
    for (size_t i = 0; i < x->golden.table.count; i++) {
        const Tensor *t = &x->golden.table.tensors[i];
        double norm = 0;
        for (size_t k = t->offset; k < t->offset + t->size; k++) norm += golden[k] * golden[k];
        printf("     %-28s %12.5g %12.2e %12.2e %9.2g\n", t->name, sqrt(norm), tensor_error(t, got, golden),
               tensor_error(t, got, x->expected.gradients), bound);
    }
}

// The weights after the last update.
static void check_weights(Context *x, const char *name, const char *path) {
    const ParamTable *table = &x->golden.table;
    size_t C = table->config.C;
    double *got = allocate(table->total * sizeof(double));
    bool saved = read_tensors(path, table, got);
    // The gradient of the keys' bias is 0 but for rounding, which AdamW would blow up to whole steps. The
    // softmax does not see that bias, so it is left out.
    for (size_t l = 0; l < table->config.L; l++) {
        size_t keys = table_offset(table, QKVB, l) + C;
        memcpy(got + keys, x->expected.weights + keys, C * sizeof(double));
    }
    Errors e = compare_tensors(table, got, x->expected.weights);
    double bound = bounds(x, &table->config).weight;
    check(&x->check, saved && e.worst <= bound, "%s: updated weights %.1e (%s; bound %.1e)", name, e.worst,
          e.name, bound);
    free(got);
}

static void group_golden(Context *x) {
    const ParamTable *table = &x->golden.table;
    Errors errors[NUM_LAYOUTS];
    char name[128], flags[ARG_BYTES];
    double *got = allocate(table->total * sizeof(double)), *golden = allocate(table->total * sizeof(double));
    bool have_golden = read_tensors("golden/gradients.safetensors", table, golden);
    training_flags(flags, &x->training, "golden", "golden/train.bin");
    for (size_t i = 0; i < NUM_LAYOUTS; i++) {
        layout_name(&LAYOUTS[i], name);
        Outcome o = run(x->build, &LAYOUTS[i], PLAIN, "%s --log log --dump-gradients gradients --out out",
                        flags);
        bool ok = succeeded(&o) && have_golden && read_tensors("gradients", table, got);
        if (i == 0 && ok) print_tensor_table(x, got, golden);
        if (!x->bf16) {
            double worst = ok ? compare_tensors(table, got, golden).worst : INFINITY;
            check(&x->check, worst <= 1e-5, "%s: gradients against PyTorch's %.1e (bound 1e-5)", name, worst);
        }
        check_run(x, name, table, &x->expected, x->training.steps, &errors[i]);
        check_weights(x, name, "out/step-00000005/model.safetensors");
        remove_tree("out");
    }
    double bound = bounds(x, &table->config).gradient;
    print_errors_head(bound);
    for (size_t i = 0; i < NUM_LAYOUTS; i++) print_errors(layout_name(&LAYOUTS[i], name), &errors[i], bound);
    free(got);
    free(golden);
}

// ---- group shapes: odd sizes against the reference ------------------------------------------------------

typedef struct {
    const char *name;
    size_t L, C, NH, V, maxT, T, micro, global;
} Shape;

// Packs of 4 and 8 elements, warps of 32 and tiles do not divide most of these.
static const Shape SHAPES[] = {
    {"nothing divides", 3, 18, 3, 33, 7, 7, 1, 3},
    {"one token, one head, one layer", 1, 8, 1, 9, 1, 1, 2, 8},
    {"\"T < max T\"", 2, 24, 4, 130, 19, 11, 3, 6},
    {"vocabulary of a multiple of 128", 2, 32, 2, 128, 16, 16, 2, 4},
    {"T beyond a warp", 1, 20, 5, 97, 70, 65, 1, 2},
    {"\"dropped layers\"", 7, 16, 2, 40, 9, 9, 2, 4},
    {"wide heads", 1, 144, 1, 50, 33, 33, 2, 2},
};

static void group_shapes(Context *x) {
    enum { NUM_SHAPES = sizeof SHAPES / sizeof *SHAPES, STEPS = 2 };
    char flags[ARG_BYTES], label[160];
    for (size_t i = 0; i < NUM_SHAPES; i++) {
        const Shape *s = &SHAPES[i];
        Training h = {s->T, s->global, STEPS, 1e-4, 0.1, 1.0, 0.9, 0.95, 1e-8};
        size_t count = s->T * s->global * STEPS + 1;
        Reference ref = random_model(s->L, s->C, s->NH, s->V, s->maxT, 0.2, 10 + i);
        int *tokens = random_tokens(count, s->V, 20 + i);
        write_model("model", &ref.table, ref.params, INTACT);
        write_shard("shard.bin", 20240520, 1, (int)count, tokens, count);
        Expected want = reference_train(&ref, &h, tokens, x->bf16);
        training_flags(flags, &h, "model", "shard.bin");
        trains(x, "%s --micro-batch %zu --log log --dump-gradients gradients", flags, s->micro);
        Errors errors;
        snprintf(label, sizeof label, "%s (L=%zu C=%zu NH=%zu V=%zu T=%zu)", s->name, s->L, s->C, s->NH, s->V,
                 s->T);
        check_run(x, label, &ref.table, &want, STEPS, &errors);
        expected_free(&want);
        free(tokens);
        reference_free(&ref);
    }
}

// ---- group bits: what must not change a single bit ------------------------------------------------------

typedef struct {
    const char *name;  // NULL: the first of a family, which those below must equal
    Layout layout;
    const char *env;   // %d: the seed
    int seeds;         // repeat with seeds 1 .. seeds
} BitRow;

static const BitRow BIT_ROWS[] = {
    {NULL, {"train_gpt", 1, ""}, "", 1},
    {"the same command again", {"train_gpt", 1, ""}, "", 1},
    {"--recompute gelu", {"train_gpt", 1, "--recompute gelu"}, "", 1},
    {"--recompute layer", {"train_gpt", 1, "--recompute layer"}, "", 1},
    {"one host thread", {"train_gpt", 1, ""}, "OMP_NUM_THREADS=1", 1},
    {"three host threads", {"train_gpt", 1, ""}, "OMP_NUM_THREADS=3", 1},
    {"--trace and --profile", {"train_gpt", 1, "--trace trace.json --profile 1"}, "", 1},
    {"random thread order, \"missing barrier\"", {"train_gpt", 1, ""}, "CPU_THREAD_ORDER=random:%d", 10},
    {"random stream order, \"stream race\"", {"train_gpt", 1, ""}, "CPU_STREAM_ORDER=random:%d", 10},
};

static bool same_checkpoint(const char *a, const char *b) {
    static const char *const FILES[] = {"config.json", "model.safetensors", "optimizer.safetensors"};
    bool same = true;
    for (size_t i = 0; i < 3; i++) {
        char path_a[300], path_b[300];
        snprintf(path_a, sizeof path_a, "%s/%s", a, FILES[i]);
        snprintf(path_b, sizeof path_b, "%s/%s", b, FILES[i]);
        same = same && same_file(path_a, path_b);
    }
    return same;
}

static void group_bits(Context *x) {
    char env[256], flags[ARG_BYTES];
    Training h = x->training;
    h.steps = 2;
    Log base;
    memset(&base, 0, sizeof base);
    training_flags(flags, &h, "golden", "golden/train.bin");
    for (size_t i = 0; i < sizeof BIT_ROWS / sizeof *BIT_ROWS; i++) {
        const BitRow *row = &BIT_ROWS[i];
        const char *out = row->name ? "other" : "base";
        bool same = true;
        for (int seed = 1; seed <= row->seeds && same; seed++) {
            snprintf(env, sizeof env, row->env, seed);
            Setting setting = {env, 0};
            remove_tree(out);
            remove("log");
            Outcome o = run(x->build, &row->layout, setting, "%s --micro-batch 4 --out %s --log log "
                            "--dump-gradients %s.gradients", flags, out, out);
            same = succeeded(&o);
            Log log = read_log("log");
            if (row->name) {
                same = same && same_log(&log, &base) && same_file("other.gradients", "base.gradients") &&
                       same_checkpoint("other/step-00000002", "base/step-00000002");
            } else {
                base = log;
            }
            if (!same) printf("     %s\n", env);
            remove("other.gradients");
        }
        if (row->name) check(&x->check, same, "same bits: %s (%d)", row->name, row->seeds);
        else check(&x->check, same, "%s, whose bits the next ones must have", row->layout.trainer);
    }
}

// ---- group resume ---------------------------------------------------------------------------------------

static void group_resume(Context *x) {
    // Six steps of eight samples out of forty, shuffled: the second epoch begins after the fifth step. The
    // schedule is not constant, so that a wrong step number shows too.
    static const char FLAGS[] = "--train-data golden/train.bin --shuffle 1 --seq 24 --global-batch 8 "
                                "--micro-batch 4 --steps 6 --lr 0.01 --warmup 2 --val-every 0";
    bool ok = trains(x, "--init golden %s --save-every 2 --keep 0 --out whole --log log", FLAGS);
    check(&x->check, ok && file_exists("whole/step-00000002") && file_exists("whole/step-00000004") &&
          file_exists("whole/step-00000006"), "checkpoints every 2 steps and at the end");
    Log whole = read_log("log");

    // As if interrupted while step 6 was being saved: the log is ahead of the last whole checkpoint.
    mkdir("part", 0777);
    mkdir("part/tmp-00000006", 0777);
    if (rename("whole/step-00000004", "part/step-00000004")) die("cannot move", "whole/step-00000004");
    ok = trains(x, "--resume auto %s --save-every 2 --keep 0 --out part --log log", FLAGS);
    Log part = read_log("log");
    check(&x->check, ok && same_log(&part, &whole), "--resume auto: the log reads as if never stopped");
    check(&x->check, ok && same_checkpoint("part/step-00000006", "whole/step-00000006"),
          "--resume auto: same bits, \"master weights\" and moments included");
    check(&x->check, !file_exists("part/tmp-00000006"), "a half-written checkpoint is ignored and removed");

    ok = trains(x, "--resume whole/step-00000002 %s --recompute layer --out again", FLAGS);
    check(&x->check, ok && same_checkpoint("again/step-00000006", "whole/step-00000006"),
          "--resume FOLDER with another recomputation: same bits");
    ok = trains(x, "--resume auto %s --layers 2 --heads 2 --channels 16 --vocab 61 --out new", FLAGS);
    check(&x->check, ok && file_exists("new/step-00000006"), "--resume auto with nothing there starts anew");
    ok = trains(x, "--init golden %s --save-every 1 --keep 2 --out kept", FLAGS);
    check(&x->check, ok && file_exists("kept/step-00000006") && file_exists("kept/step-00000005") &&
          !file_exists("kept/step-00000004") && !file_exists("kept/step-00000001"),
          "--keep 2 keeps the newest two checkpoints");
    ok = trains(x, "--init whole/step-00000006 %s --log next.log", FLAGS);
    Log next = read_log("next.log");
    check(&x->check, ok && next.steps == 6 && next.step[0] == 1, "--init FOLDER counts from step 1 again");
}

// ---- group reports: what must not disturb training, and what is said ------------------------------------

static bool lr_follows(const Log *log, bool cosine, double lr, double final, size_t warmup, size_t steps) {
    bool ok = log->steps == steps;
    for (size_t s = 0; s < log->steps; s++) {
        double at = ((double)s - (double)warmup) / (double)(steps - warmup);
        double share = cosine ? 0.5 * (1 + cos(acos(-1.0) * at)) : 1 - at;
        double want = s < warmup ? lr * (double)(s + 1) / (double)warmup : lr * (final + (1 - final) * share);
        ok = ok && relative(log->lr[s], want) < 1e-6;
    }
    return ok;
}

// Validation after 0, 2, 4 and 5 updates of the golden run, over the five batches that its shard has.
static void check_validation(Context *x, const Log *log) {
    double bound = bounds(x, &x->golden.config).loss, worst = log->vals == 4 ? 0 : INFINITY;
    for (size_t i = 0; i < log->vals; i++) {
        Reference ref = reference_create(&x->golden.config);
        memcpy(ref.params, x->golden.params, ref.table.total * sizeof(double));
        Training h = x->training;
        h.steps = (size_t)log->val_step[i];
        Expected e = reference_train(&ref, &h, x->tokens, x->bf16);
        for (size_t k = 0; k < ref.table.total && x->bf16; k++) ref.params[k] = round_to_bf16(ref.params[k]);
        worst = fmax(worst, relative(log->val[i], reference_mean_loss(&ref, x->tokens, h.seq, 0, 40, 0)));
        expected_free(&e);
        reference_free(&ref);
    }
    check(&x->check, worst <= bound && log->val_step[3] == 5, "validation losses %.1e (bound %.1e)", worst,
          bound);
}

static void group_reports(Context *x) {
    char flags[ARG_BYTES];
    training_flags(flags, &x->training, "golden", "golden/train.bin");
    bool ok = trains(x, "%s --micro-batch 8 --log plain.log", flags) &&
              trains(x, "%s --micro-batch 8 --log val.log --val-data golden/train.bin --val-every 2 "
                     "--val-batches 9", flags);
    Log plain = read_log("plain.log"), val = read_log("val.log");
    check(&x->check, ok && same_log(&plain, &val),
          "\"accumulator not reset\": validation leaves training alone");
    check_validation(x, &val);

    // Byte-level text, so that samples can be printed.
    Reference ref = random_model(2, 32, 2, 257, 16, 0.1, 5);
    int *tokens = random_tokens(500, 257, 6);
    write_model("bytes", &ref.table, ref.params, INTACT);
    write_shard("bytes.bin", 20240520, 1, 500, tokens, 500);
    static const char BYTES[] = "--init bytes --train-data bytes.bin --seq 16 --micro-batch 2 "
                                "--global-batch 4 --steps 8 --lr 0.002 --val-every 0 --log log";
    ok = trains(x, "%s --warmup 3 --lr-final 0.25", BYTES);
    Log cosine = read_log("log");
    check(&x->check, ok && lr_follows(&cosine, true, 0.002, 0.25, 3, 8), "warm-up and cosine schedule");
    ok = trains(x, "%s --lr-final 0.5 --lr-schedule linear", BYTES);
    Log linear = read_log("log");
    check(&x->check, ok && lr_follows(&linear, false, 0.002, 0.5, 0, 8), "linear schedule");
    Outcome o = run(x->build, &ONE, PLAIN, "%s --warmup 3 --lr-final 0.25 --sample-every 3 "
                    "--sample-tokens 20 --prompt Once~upon", BYTES);
    bool printed = strstr(o.out, "Once upon");
    ok = succeeded(&o);
    Log sampled = read_log("log");
    check(&x->check, ok && printed && same_log(&sampled, &cosine),
          "samples start with the prompt and leave training alone");

    // Which samples are drawn depends on the seed alone, not on how they are cut into micro-batches.
    ok = trains(x, "%s --micro-batch 1 --shuffle 1 --seed 9", BYTES);
    Log singly = read_log("log");
    ok = trains(x, "%s --micro-batch 4 --shuffle 1 --seed 9", BYTES) && ok;
    Log together = read_log("log");
    double difference = ok && singly.steps == 8 && together.steps == 8 ? 0 : INFINITY;
    for (size_t s = 0; s < singly.steps; s++) {
        difference = fmax(difference, relative(together.loss[s], singly.loss[s]));
    }
    check(&x->check, difference <= bounds(x, &ref.config).loss && !same_log(&singly, &cosine),
          "\"seed + rank\": micro-batches choose among the same shuffled samples: %.1e", difference);

    o = run(x->build, &ONE, PLAIN, "%s --trace trace.json --profile 1", BYTES);
    bool plausible = !strstr(o.out, "MFU -") && (strstr(o.out, "n/a") || strstr(o.out, "%"));
    char *text = succeeded(&o) ? read_file("trace.json", NULL) : NULL;
    cJSON *trace = text ? cJSON_Parse(text) : NULL;
    check(&x->check, trace != NULL, "--trace writes JSON");
    check(&x->check, plausible, "\"unknown GPU\": MFU is a true number or n/a");
    cJSON_Delete(trace);
    free(text);
    ok = trains(x, "%s --out dry --dry-run", BYTES);
    check(&x->check, ok && !file_exists("dry/step-00000008"), "--dry-run does no work");
    o = run(x->build, &ONE, PLAIN, "--help");
    printed = strstr(o.out, "--micro-batch") && strstr(o.out, "--dump-gradients") && !*o.err;
    check(&x->check, succeeded(&o) && printed, "--help lists the flags");
    free(tokens);
    reference_free(&ref);
}

// ---- group refusals: bad input --------------------------------------------------------------------------

#define MODEL "--init golden "
#define DATA "--train-data golden/train.bin "
#define SIZES "--seq 24 --micro-batch 2 --global-batch 8 --steps 2 --val-every 0 "
#define GOOD MODEL DATA SIZES

typedef struct {
    const char *name, *flags;
    int code;          // 2: refused before any work; 1: failed later
    const char *says;  // what the sentence must name
} Refusal;

static const Refusal REFUSALS[] = {
    {"unknown flag", GOOD "--frobnicate 3", 2, "frobnicate"},
    {"flag of another trainer", GOOD "--pipeline 2", 2, "pipeline"},
    {"stray word", GOOD "word", 2, "word"},
    {"number with a tail", GOOD "--steps 12x", 2, "--steps"},
    {"negative count", GOOD "--micro-batch -1", 2, "--micro-batch"},
    {"count of 30 digits", GOOD "--steps 100000000000000000000000000000", 2, "--steps"},
    {"not a number", GOOD "--lr nan", 2, "--lr"},
    {"missing value", GOOD "--seed", 2, "--seed"},
    {"unknown choice", GOOD "--recompute some", 2, "--recompute"},
    {"heads that do not divide channels", DATA SIZES "--heads 5 --channels 32 --vocab 61", 2, "heads"},
    {"T > max T", GOOD "--seq 25", 2, "25"},
    {"micro-batch that does not divide", GOOD "--micro-batch 3", 2, "--micro-batch"},
    {"layers that contradict the folder", GOOD "--layers 3", 2, "--layers"},
    {"no training data", MODEL SIZES, 2, "--train-data"},
    {"no such model folder", "--init nowhere " DATA SIZES, 2, "nowhere"},
    {"no such checkpoint", "--resume nowhere " DATA SIZES, 2, "nowhere"},
    {"missing shard", MODEL SIZES "--train-data nowhere/*.bin", 2, "nowhere"},
    {"missing validation shard", GOOD "--val-every 1 --val-data nowhere.bin", 2, "nowhere"},
    {"truncated shard", MODEL SIZES "--train-data truncated.bin", 2, "truncated.bin"},
    {"shard without a whole header", MODEL SIZES "--train-data header.bin", 2, "header.bin"},
    {"foreign magic", MODEL SIZES "--train-data foreign.bin", 2, "foreign.bin"},
    {"foreign version", MODEL SIZES "--train-data version.bin", 2, "version.bin"},
    {"shard with a negative count", MODEL SIZES "--train-data negative.bin", 2, "negative.bin"},
    {"shard shorter than a sample", MODEL SIZES "--train-data sample.bin", 2, "sample.bin"},
    {"shard shorter than a batch", MODEL SIZES "--train-data batch.bin", 2, "batch.bin"},
    {"token id >= V", MODEL SIZES "--train-data token.bin", 1, "token.bin"},
    {"--out below a file", GOOD "--out golden/train.bin/out", 2, "golden/train.bin"},
    {"--log in no folder", GOOD "--log nowhere/log", 2, "nowhere/log"},
    {"--dump-gradients in no folder", GOOD "--dump-gradients nowhere/gradients", 2, "nowhere/gradients"},
    {"--trace in no folder", GOOD "--trace nowhere/trace", 2, "nowhere/trace"},
};

// Model folders that are refused, made by damaging a good one.
typedef struct {
    const char *name;
    Damage damage;
    const char *says;
} BadModel;

static const BadModel BAD_MODELS[] = {
    {"config of another model", {"config", "\"gpt2\"", "\"llama\"", 0}, "config.json"},
    {"config that is no JSON", {"config", "{", "[", 0}, "config.json"},
    {"config that ends early", {"config", "\"vocab_size\"", "\"vocab_si", 0}, "config.json"},
    {"config without n_head", {"config", "\"n_head\"", "\"n_hat\"", 0}, "n_head"},
    {"config with a negative size", {"config", "\"n_layer\": ", "\"n_layer\": -", 0}, "n_layer"},
    {"config with an absurd size", {"config", "\"n_layer\": 4", "\"n_layer\": 1e300", 0}, "n_layer"},
    {"config with another activation", {"config", "gelu_new", "relu", 0}, "activation_function"},
    {"config with another epsilon", {"config", "1e-05", "1e-06", 0}, "layer_norm_epsilon"},
    {"config with an untied head", {"config", "gs\": true", "gs\": false", 0}, "tie_word_embeddings"},
    {"truncated header", {"cut", "", "", 100}, "model.safetensors"},
    {"empty file", {"cut", "", "", 0}, "model.safetensors"},
    {"truncated data", {"cut", "", "", 20000}, "model.safetensors"},
    {"header longer than the file", {"length", "", "", 1 << 30}, "model.safetensors"},
    {"header of 2^64 - 1 bytes", {"length", "", "", UINT64_MAX}, "model.safetensors"},
    {"header that is no JSON", {"header", "{", "x", 0}, "model.safetensors"},
    {"absurd offsets", {"header", "[0,7808]", "[0,99999999999999999999]", 0}, "wte.weight"},
    {"offsets that run backwards", {"header", "[0,7808]", "[7808,0]", 0}, "wte.weight"},
    {"offsets that overlap", {"header", "[7808,10880]", "[7804,10876]", 0}, "overlap"},
    {"shape that overflows", {"header", "[61,32]", "[4294967296,4294967296]", 0}, "wte.weight"},
    {"negative shape", {"header", "[61,32]", "[-61,-32]", 0}, "wte.weight"},
    {"wrong shape", {"header", "[61,32]", "[32,61]", 0}, "wte.weight"},
    {"wrong dtype", {"header", "\"F32\"", "\"I32\"", 0}, "wte.weight"},
    {"unknown dtype", {"header", "\"F32\"", "\"Q4\"", 0}, "wte.weight"},
    {"missing tensor", {"header", "\"ln_f.bias\"", "\"ln_g.bias\"", 0}, "ln_f.bias"},
    {"tensor twice", {"header", "h.3.ln_1.bias", "h.2.ln_1.bias", 0}, "h.2.ln_1.bias"},
};

// One line on stderr that begins with "error: " and names what it is about; alone, unless mpirun adds more.
static bool one_sentence(const char *text, const char *says, bool alone) {
    const char *line = strncmp(text, "error: ", 7) == 0 ? text : strstr(text, "\nerror: ");
    if (!line) return false;
    if (*line == '\n') line++;
    const char *end = strchr(line, '\n'), *named = strstr(line, says);
    if (!end || !named || named > end || strstr(end, "\nerror: ")) return false;
    return !alone || (line == text && end[1] == 0);
}

static void check_refusal(Context *x, const Layout *layout, const char *name, Setting setting,
                          const char *flags, int code, const char *says) {
    Outcome o = run(x->build, layout, setting, "%s", flags);
    bool ok = o.code == code && one_sentence(o.err, says, layout->ranks == 1);
    check(&x->check, ok, "refused: %s", name);
    if (!ok) printf("     wanted exit code %d naming '%s', got %d: %.400s\n", code, says, o.code, o.err);
    outcome_free(&o);
}

static void group_refusals(Context *x) {
    const int *tokens = x->tokens;
    int *foreign_token = allocate(x->token_count * sizeof(int)), magic = 20240520, n = (int)x->token_count;
    memcpy(foreign_token, tokens, x->token_count * sizeof(int));
    foreign_token[100] = 61;
    write_shard("truncated.bin", magic, 1, n, tokens, x->token_count / 2);
    write_shard("foreign.bin", 0x46554747, 1, n, tokens, x->token_count);
    write_shard("version.bin", magic, 9, n, tokens, x->token_count);
    write_shard("negative.bin", magic, 1, -5, tokens, x->token_count);
    write_shard("sample.bin", magic, 1, 24, tokens, 24);
    write_shard("batch.bin", magic, 1, 24 * 8, tokens, 24 * 8);  // the last target is missing
    write_shard("token.bin", magic, 1, n, foreign_token, x->token_count);
    write_file("header.bin", "short", 5);
    free(foreign_token);
    for (size_t i = 0; i < sizeof REFUSALS / sizeof *REFUSALS; i++) {
        const Refusal *r = &REFUSALS[i];
        check_refusal(x, &ONE, r->name, PLAIN, r->flags, r->code, r->says);
    }
    for (size_t i = 0; i < sizeof BAD_MODELS / sizeof *BAD_MODELS; i++) {
        const BadModel *m = &BAD_MODELS[i];
        write_model("bad", &x->golden.table, x->golden.params, m->damage);
        check_refusal(x, &ONE, m->name, PLAIN, "--init bad " DATA SIZES, 2, m->says);
    }
    check(&x->check, !file_exists("nowhere"), "refusals leave nothing behind");
}

// ---- group failures: what goes wrong in the middle ------------------------------------------------------

#define RUN DATA "--seq 24 --micro-batch 4 --global-batch 8 --val-every 0 "

// A signal: the step is finished and saved, and the run can go on.
static void check_signal(Context *x, int number, const char *name) {
    remove_tree("signal");
    remove("log");
    pid_t child = start(x->build, &ONE, PLAIN, MODEL RUN "--steps 1000000 --log log --out signal");
    for (int wait = 0; wait < 10000 && read_log("log").steps < 2; wait++) pause_ms(3);
    kill(child, number);
    Outcome o = finish(child);
    Log log = read_log("log");
    char path[64];
    snprintf(path, sizeof path, "signal/step-%08zu/trainer.json", log.steps);
    check(&x->check, succeeded(&o) && log.steps >= 2 && file_exists(path), "%s saves the step it is at",
          name);
    bool ok = trains(x, "--resume auto " RUN "--steps 1000000 --log log --out signal --dry-run");
    check(&x->check, ok, "%s: the run can go on", name);
}

static void group_failures(Context *x) {
    static const char FLAGS[] = RUN "--steps 4 --save-every 2 --keep 0 --out disk ";
    bool ok = trains(x, MODEL "%s", FLAGS);
    check(&x->check, ok, "four steps with checkpoints");
    if (rename("disk/step-00000004", "intact")) die("cannot move", "disk/step-00000004");
    char flags[ARG_BYTES];
    snprintf(flags, sizeof flags, "--resume auto %s", FLAGS);
    Setting full = {"", 300000};  // more than model.safetensors, less than optimizer.safetensors
    check_refusal(x, &ONE, "full disk while saving", full, flags, 1, "disk");
    check(&x->check, !file_exists("disk/step-00000004"), "full disk: no checkpoint that is not whole");
    ok = trains(x, "%s", flags);
    check(&x->check, ok && same_checkpoint("disk/step-00000004", "intact"),
          "full disk: the previous checkpoint is whole and resumes");

    check_refusal(x, &ONE, "a loss that is not finite stops the run and names the step", PLAIN,
                  GOOD "--lr 1000 --lr-final 1 --clip 0 --weight-decay 1000 --steps 60", 1, "step");
    Reference ref = reference_create(&x->golden.config);
    memcpy(ref.params, x->golden.params, ref.table.total * sizeof(double));
    ref.params[table_offset(&ref.table, FCW, 2) + 5] = NAN;
    write_model("nan", &ref.table, ref.params, INTACT);
    check_refusal(x, &ONE, "a loss that is not finite names a tensor", PLAIN, "--init nan " DATA SIZES, 1,
                  ".weight");
    reference_free(&ref);
    check_signal(x, SIGTERM, "SIGTERM");
    check_signal(x, SIGINT, "SIGINT");
}

// ---- main -----------------------------------------------------------------------------------------------

static void load_golden(Context *x) {
    cJSON *c = read_json("golden/config.json"), *e = read_json("golden/expected.json");
    GPTConfig g = {(size_t)number(c, "n_layer"), (size_t)number(c, "n_embd"), (size_t)number(c, "n_head"),
                   (size_t)number(c, "vocab_size"), 0, (size_t)number(c, "n_positions")};
    Training h = {(size_t)number(e, "seq"), (size_t)number(e, "global_batch"), (size_t)number(e, "steps"),
                  number(e, "lr"), number(e, "weight_decay"), number(e, "clip"), number(e, "beta1"),
                  number(e, "beta2"), number(e, "eps")};
    cJSON_Delete(c);
    cJSON_Delete(e);
    g.Vp = padded_vocabulary(g.V);
    x->training = h;
    x->golden = reference_create(&g);
    x->tokens = read_shard("golden/train.bin", &x->token_count);
    if (!read_tensors("golden/model.safetensors", &x->golden.table, x->golden.params)) exit(1);
    Reference ref = reference_create(&g);
    memcpy(ref.params, x->golden.params, ref.table.total * sizeof(double));
    x->expected = reference_train(&ref, &h, x->tokens, x->bf16);
    reference_free(&ref);
}

typedef struct {
    const char *name;
    void (*test)(Context *x);
} Group;

static const Group GROUPS[] = {
    {"reference", group_reference},  // the reference itself, no trainer
    {"golden", group_golden},        // every layout against the golden case
    {"shapes", group_shapes},        // odd sizes against the reference
    {"bits", group_bits},            // what must not change a single bit
    {"resume", group_resume},        // stopping and going on
    {"reports", group_reports},      // validation, samples, schedules, trace, help
    {"refusals", group_refusals},    // bad input
    {"failures", group_failures},    // full disk, NaN, signals
};

int main(int argc, char **argv) {
    static Context context;
    Context *x = &context;
    size_t count = sizeof GROUPS / sizeof *GROUPS, known = argc < 3;
    for (size_t i = 0; i < count && argc > 2; i++) known += strcmp(argv[2], GROUPS[i].name) == 0;
    if (argc < 2 || argc > 3 || !known) {
        fprintf(stderr, "usage: test_gpt BUILD_DIR [GROUP], where GROUP is one of");
        for (size_t i = 0; i < count; i++) fprintf(stderr, " %s", GROUPS[i].name);
        fprintf(stderr, "\n");
        return 2;
    }
    char golden[PATH_MAX];
    if (!realpath(argv[1], x->build)) die("cannot open", argv[1]);
    if (!realpath("dev/test/golden", golden)) die("cannot open", "dev/test/golden");
    x->bf16 = strstr(x->build, "-bf16") != NULL;
    if (snprintf(x->temp, sizeof x->temp, "%.4000s/test_gpt.XXXXXX", x->build) < 0 || !mkdtemp(x->temp) ||
        chdir(x->temp)) die("cannot make a folder in", x->build);
    if (symlink(golden, "golden")) die("cannot link", golden);
    load_golden(x);
    for (size_t i = 0; i < count; i++) {
        if (argc > 2 && strcmp(argv[2], GROUPS[i].name) != 0) continue;
        printf("--- %s\n", GROUPS[i].name);
        time_t begin = time(NULL);
        GROUPS[i].test(x);
        printf("     %.0f s\n", difftime(time(NULL), begin));
    }
    expected_free(&x->expected);
    free(x->tokens);
    reference_free(&x->golden);
    if (chdir("/") == 0) remove_tree(x->temp);
    return check_summary(&x->check);
}
