// compare_runs.h: shared by the tests of whole trainers: the golden case, the reference's
// results, and main. Compares a run's output (log, gradients, checkpoints, messages) with the
// reference.
#ifndef LLMC_COMPARE_RUNS_H
#define LLMC_COMPARE_RUNS_H

#include "dev/test/check.h"
#include "dev/test/make_inputs.h"
#include "dev/test/run_program.h"
#include "llmc/host/bf16.h"
#include "llmc/reference.h"

// Tests that do not concern layouts run on one rank.
static const Layout ONE = {"train_gpt", 1, ""};

// One case that a trainer repeats: hyperparameters of a run at a constant learning rate.
typedef struct {
    size_t seq, global_batch, steps;
    double lr, weight_decay, clip, beta1, beta2, eps;
    double dropout;
} Training;

// The reference's results for such a run.
typedef struct {
    double losses[16], norms[16];
    double *gradients;  // [table.total] of the first step, before clipping
    double *weights;    // [table.total] after the last step
} Expected;

typedef struct {
    Check check;
    char build[PATH_MAX], temp[PATH_MAX];  // absolute; temp is the working directory
    bool bf16, sanitized;
    Reference golden;      // with the golden weights
    Training training;     // the golden run
    Expected expected;     // of the golden run, by the reference, at this build's precision
    int *tokens;           // the golden shard
    size_t token_count;
} Context;

static inline cJSON *read_json(const char *path) {
    char *text = read_file(path, NULL);
    cJSON *json = text ? cJSON_Parse(text) : NULL;
    if (!json) die("cannot read", path);
    free(text);
    return json;
}

// Runs a layout, which must succeed.
__attribute__((format(printf, 4, 5))) static inline bool runs(const Context *x,
                                                              const Layout *layout,
                                                              const char *env, const char *format,
                                                              ...) {
    char flags[ARG_BYTES];
    Setting setting = {env, 0};
    va_list values;
    va_start(values, format);
    vsnprintf(flags, sizeof flags, format, values);
    va_end(values);
    Outcome o = run(x->build, layout, setting, "%s", flags);
    return succeeded(&o);
}

// The same on one rank.
#define trains(x, ...) runs(x, &ONE, "", __VA_ARGS__)

// ---- expectations ----------------------------------------------------------------------

static inline double round_to_bf16(double value) {
    return bf16_to_float(bf16_from_float((float)value));
}

static inline void shard_batch(const int *tokens, size_t first, size_t count, int *inputs,
                               int *targets) {
    for (size_t i = 0; i < count; i++) {
        inputs[i] = tokens[first + i];
        targets[i] = tokens[first + i + 1];
    }
}

typedef double ReferenceLoss(Reference *, const int *tokens, const int *targets, size_t B,
                             size_t T, double scale);

// The reference of the model under test: GPT-2's, unless a test says otherwise.
static ReferenceLoss *reference_loss = reference_loss_and_gradients;

// Update number `step`, from 1, of the optimizer under test: AdamW, unless a test says otherwise.
typedef void ReferenceUpdate(Reference *, const Training *, size_t step, double grad_scale);

static inline void update_adamw(Reference *ref, const Training *h, size_t step,
                                double grad_scale) {
    reference_adamw(ref, step, h->lr, h->beta1, h->beta2, h->eps, h->weight_decay, grad_scale);
}

static ReferenceUpdate *reference_update = update_adamw;

// Returns the same model and weights, without gradients.
static inline Reference reference_copy(const Reference *from) {
    Reference ref = reference_create(&from->config);
    memcpy(ref.params, from->params, ref.table.total * sizeof(double));
    return ref;
}

// Looks back from each token of sequences of T for the one that begins its document; the caller
// frees the [N] positions.
static inline int *document_begins(const int *tokens, size_t N, size_t T, int eot) {
    int *first = allocate(N * sizeof(int));
    for (size_t n = 0; n < N; n++) {
        size_t begin = n;
        while (begin % T > 0 && tokens[begin] != eot) begin--;
        first[n] = (int)(begin % T);
    }
    return first;
}

// Returns the mean loss of sequences first .. first + count of the shard.
static inline double reference_mean_loss(Reference *ref, const int *tokens, size_t T, size_t first,
                                         size_t count, double scale) {
    int *inputs = allocate(count * T * sizeof(int)), *targets = allocate(count * T * sizeof(int));
    shard_batch(tokens, first * T, count * T, inputs, targets);
    double sum = reference_loss(ref, inputs, targets, count, T, scale);
    free(inputs);
    free(targets);
    return sum / (double)(count * T);
}

// Trains the reference from its present weights. With bf16, forward and backward see the weights
// rounded to bf16 while the update acts on the unrounded ones: mixed precision without any other
// rounding.
static inline Expected reference_train(Reference *ref, const Training *h, const int *tokens,
                                       bool bf16) {
    size_t total = ref->table.total, bytes = total * sizeof(double);
    Expected e;
    double *master = allocate(bytes);
    e.gradients = allocate(bytes);
    e.weights = allocate(bytes);
    for (size_t s = 0; s < h->steps; s++) {
        memcpy(master, ref->params, bytes);
        for (size_t i = 0; i < total && bf16; i++) ref->params[i] = round_to_bf16(master[i]);
        reference_zero_gradients(ref);
        ref->dropout = dropout_make(h->dropout, 1337, s, 0);  // the trainers' default seed
        e.losses[s] = reference_mean_loss(ref, tokens, h->seq, s * h->global_batch, h->global_batch,
                                          1.0 / (double)(h->global_batch * h->seq));
        e.norms[s] = reference_gradient_norm(ref);
        if (s == 0) memcpy(e.gradients, ref->grads, bytes);
        memcpy(ref->params, master, bytes);
        double scale = h->clip > 0 && e.norms[s] > h->clip ? h->clip / e.norms[s] : 1.0;
        reference_update(ref, h, s + 1, scale);
    }
    memcpy(e.weights, ref->params, bytes);
    ref->dropout = dropout_make(0, 0, 0, 0);
    free(master);
    return e;
}

static inline void expected_free(Expected *e) {
    free(e->gradients);
    free(e->weights);
}

// Writes the flags of such a run on a model folder to text.
static inline void training_flags(char text[ARG_BYTES], const Training *h, const char *model,
                                  const char *shard) {
    snprintf(text, ARG_BYTES,
             "--init %s --train-data %s --shuffle 0 --seq %zu --global-batch %zu "
             "--steps %zu --lr %g --lr-final 1 --warmup 0 --weight-decay %g --clip %g --beta1 %g "
             "--beta2 %g "
             "--eps %g --dropout %g --val-every 0 --sample-every 0",
             model, shard, h->seq, h->global_batch, h->steps, h->lr, h->weight_decay, h->clip,
             h->beta1, h->beta2, h->eps, h->dropout);
}

static inline double relative(double got, double want) { return fabs(got - want) / fabs(want); }

// Bounds of relative errors (L2), in this order: the worst gradient tensor, all gradients
// together, a loss, a norm, the worst weight tensor after updates, all weights together.
//
// fp32: a bug shows as 1e-4 and more. Measured are 5e-7 for all gradients together, and 1.1e-6
// for the worst tensor of the deepest model.
//
// bf16: the reference sees the same rounded weights, so only activations and their gradients
// differ by rounding. One rounding is wrong by at most u = 2^-9, and by 0.41 u in the root mean
// square. Independent errors add like a random walk: n of them to 0.41 u sqrt(n). Along the
// residual stream forward and backward round twice a layer each, and the branches enter by their
// share. With one layer's own roundings and the head's, n = 8 L + 60 describes all models of
// these tests (L = 1 to 25). All gradients together may be 1.5 times as far off: 1.9% with 25
// layers. One lost micro-batch of 24 is 4%. The worst tensor sums the fewest numbers: 2.4 times.
// Errors at right angles to the gradient do not change its norm, and a loss averages over tokens.
// A bias that started as 0 is nothing but updates, which follow the sign of its gradient. That
// sets the bound of the worst weight tensor.
//
// Dropout rounds the branches once more at its mask, forward and backward, and leaves fewer
// numbers whose errors average: n = 16 L + 60 for all gradients together. On 8 models of 4
// layers, at t = 1, 2 and 4, these were 1.00% off on average, and 0.85% without dropout (1.18
// times; their bound grows 1.16 times). With attention in fp32 arithmetic it was 0.99%. The other
// bounds stay.
typedef struct {
    double gradient, gradients, loss, norm, weight, weights;
} Bounds;

static inline Bounds bounds_with(const Context *x, const GPTConfig *g, bool dropout) {
    Bounds fp32 = {2e-6, 1e-6, 1e-6, 2e-6, 2e-6, 1e-6};
    double walk = sqrt(8.0 * (double)g->L + 60.0) / 512.0;
    double together = 0.6 * (dropout ? sqrt(16.0 * (double)g->L + 60.0) / 512.0 : walk);
    Bounds bf16 = {walk, together, 1.0 / 2048.0, 0.3 * walk, 1.0 / 128.0, 1.0 / 256.0};
    return x->bf16 ? bf16 : fp32;
}
static inline Bounds bounds(const Context *x, const GPTConfig *g) {
    return bounds_with(x, g, false);
}

// Relative L2 error of the tensors: the worst of each kind over the layers, the worst of all, and
// all together.
typedef struct {
    double kinds[MAX_KINDS], worst;
    double whole;      // of all tensors together, as if they were one
    size_t tensor;     // the worst: its place in the table
    const char *name;  // its name
} Errors;

static inline double relative_error(const double *got, const double *want, size_t count) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    double error = difference == 0 ? 0 : sqrt(difference / norm);
    return isnan(error) ? INFINITY : error;
}

static inline double tensor_error(const Tensor *x, const double *got, const double *want) {
    return relative_error(got + x->offset, want + x->offset, x->size);
}

static inline Errors compare_tensors(const ParamTable *table, const double *got,
                                     const double *want) {
    Errors e;
    memset(&e, 0, sizeof e);
    e.name = "none";
    e.whole = relative_error(got, want, table->total);  // the padding is 0 in both
    for (size_t i = 0; i < table->count; i++) {
        const Tensor *x = &table->tensors[i];
        double error = tensor_error(x, got, want);
        if (error > e.kinds[x->spec->kind]) e.kinds[x->spec->kind] = error;
        if (error > e.worst) {
            e.worst = error;
            e.tensor = i;
            e.name = x->name;
        }
    }
    return e;
}

// Compares a loss's gradients with central differences, for every single parameter. tokens [B*T +
// 1].
static inline Errors compare_differences(Reference *ref, ReferenceLoss *loss, const int *tokens,
                                         size_t B, size_t T) {
    double *differences = allocate(ref->table.total * sizeof(double)), h = 1e-5,
           scale = 1.0 / (double)(B * T);
    loss(ref, tokens, tokens + 1, B, T, scale);
    for (size_t k = 0; k < ref->table.count; k++) {
        const Tensor *p = &ref->table.tensors[k];
        for (size_t i = p->offset; i < p->offset + p->rows * p->cols; i++) {
            double value = ref->params[i];
            ref->params[i] = value + h;
            double above = loss(ref, tokens, tokens + 1, B, T, 0);
            ref->params[i] = value - h;
            double below = loss(ref, tokens, tokens + 1, B, T, 0);
            ref->params[i] = value;
            differences[i] = scale * (above - below) / (2 * h);
        }
    }
    Errors e = compare_tensors(&ref->table, ref->grads, differences);
    free(differences);
    return e;
}

// Prints one line of the matrix "layout x tensor": the worst error of each kind of tensor in
// percent of the bound.
static inline void print_errors(const char *name, const Errors *e, double bound) {
    printf("     %-40.40s", name);
    for (int k = 0; k < NUM_KINDS; k++) printf(" %5.1f", 100.0 * e->kinds[k] / bound);
    printf("\n");
}

static inline void print_errors_head(double bound) {
    static const char *HEADS[NUM_KINDS] = {
        "wte", "wpe", "ln1w", "ln1b", "qkvw", "qkvb", "projw", "projb", "ln2w", "ln2b",
        "fcw", "fcb", "fc2w", "fc2b", "lnfw", "lnfb"};
    printf("     relative L2 error of the gradient, worst layer, in percent of the bound %.2g\n",
           bound);
    printf("     %-40s", "");
    for (int k = 0; k < NUM_KINDS; k++) printf(" %5s", HEADS[k]);
    printf("\n");
}

// The errors of a finished run (its files "log" and "gradients") against the expected values.
typedef struct {
    bool complete;  // every step and every tensor is there
    Errors gradients;
    double loss, norm;  // worst relative error
} Measured;

// Measures a finished run, and writes its gradients to got [table->total].
static inline Measured measure_run(const ParamTable *table, const Expected *want, size_t steps,
                                   double *got) {
    Measured m;
    memset(&m, 0, sizeof m);
    Log log = read_log("log");
    m.complete = read_tensors("gradients", "", table, got) && log.steps == steps;
    for (size_t s = 0; s < steps && m.complete; s++) {
        m.loss = fmax(m.loss, relative(log.loss[s], want->losses[s]));
        m.norm = fmax(m.norm, relative(log.norm[s], want->norms[s]));
        m.complete = log.step[s] == (double)(s + 1) && isfinite(log.loss[s]) &&
                     isfinite(log.norm[s]);
    }
    m.gradients = compare_tensors(table, got, want->gradients);
    return m;
}

static inline bool within(const Measured *m, const Bounds *bound) {
    return m->complete && m->gradients.worst <= bound->gradient &&
           m->gradients.whole <= bound->gradients && m->loss <= bound->loss &&
           m->norm <= bound->norm;
}

// Compares a finished run with the expected values: one check. Removes its log and gradients.
static inline void check_run(Context *x, const char *name, const ParamTable *table,
                             const Expected *want, size_t steps, Errors *errors) {
    Bounds bound = bounds(x, &table->config);
    double *got = allocate(table->total * sizeof(double));
    Measured m = measure_run(table, want, steps, got);
    *errors = m.gradients;
    check(&x->check, within(&m, &bound),
          "%s: gradients %.1e (bound %.1e), %s %.1e (%.1e), losses %.1e (%.1e), norms %.1e "
          "(%.1e)%s",
          name, m.gradients.whole, bound.gradients, m.gradients.name, m.gradients.worst,
          bound.gradient, m.loss, bound.loss, m.norm, bound.norm,
          m.complete ? "" : ", the log or a tensor is missing");
    free(got);
    remove("log");
    remove("gradients");
}

// Reads weights (suffix "") or moments (".m", ".v") and returns their errors against the expected
// ones. Leaves out the keys' bias, as the softmax does not see it. Its gradient is rounding
// alone, which AdamW would blow up to steps.
static inline Errors state_errors(const ParamTable *table, const char *path, const char *suffix,
                                  const double *want) {
    size_t C = table->config.C;
    double *got = allocate(table->total * sizeof(double));
    bool saved = read_tensors(path, suffix, table, got);
    for (size_t l = 0; l < table->config.L; l++) {
        size_t keys = table_find(table, QKVB, l)->offset + C;
        memcpy(got + keys, want + keys, C * sizeof(double));
    }
    Errors e = compare_tensors(table, got, want);
    if (!saved) e.worst = e.whole = INFINITY;
    free(got);
    return e;
}

static inline bool same_checkpoint(const char *a, const char *b) {
    static const char *const FILES[] = {"config.json", "model.safetensors",
                                        "optimizer.safetensors"};
    bool same = true;
    for (size_t i = 0; i < 3; i++) {
        char path_a[300], path_b[300];
        snprintf(path_a, sizeof path_a, "%s/%s", a, FILES[i]);
        snprintf(path_b, sizeof path_b, "%s/%s", b, FILES[i]);
        same = same && same_file(path_a, path_b);
    }
    return same;
}

// ---- error messages --------------------------------------------------------------------

// Returns true if stderr has one line that begins with "error: " and names its subject; alone,
// unless mpirun adds more. Several ranks may report an error in the middle of the work.
static inline bool one_sentence(const char *text, const char *says, bool alone, bool once) {
    const char *line = strncmp(text, "error: ", 7) == 0 ? text : strstr(text, "\nerror: ");
    if (!line) return false;
    if (*line == '\n') line++;
    const char *end = strchr(line, '\n'), *named = strstr(line, says);
    if (!end || !named || named > end || (once && strstr(end, "\nerror: "))) return false;
    return !alone || (line == text && end[1] == 0);
}

static inline bool on_gpu(const Context *x) { return strstr(x->build, "/cuda-") != NULL; }

// Returns the number of ranks that this machine can start. Real NCCL wants a GPU for
// each.
static inline int find_max_ranks(const Context *x) {
    static const Layout EIGHT = {"train_gpt_3d", 8, "--data 8 --dry-run"};
    if (!on_gpu(x)) return 8;
    Outcome o = run(x->build, &EIGHT, PLAIN, "--global-batch 8 --micro-batch 1");
    const char *gpus = strstr(o.err, "node with ");
    int ranks = 8;
    if (o.code != 0 && (!gpus || sscanf(gpus, "node with %d", &ranks) != 1)) ranks = 1;
    outcome_free(&o);
    if (ranks < 8)
        printf("     only layouts of up to %d ranks: NCCL wants a GPU for each\n", ranks);
    return ranks;
}

// Returns the same number, found when a test of several ranks first asks. Eight processes on
// a GPU take long to start.
static inline int max_ranks(const Context *x) {
    static int found;
    if (!found) found = find_max_ranks(x);
    return found;
}

static inline void check_refusal(Context *x, const Layout *layout, const char *name,
                                 Setting setting, const char *flags, int code, const char *says) {
    if (layout->ranks > 1 && layout->ranks > max_ranks(x)) return;
    // When a rank ends with an error mpirun ends the others, by default a second after it has
    // asked them to.
    char env[ARG_BYTES];
    snprintf(env, sizeof env, "OMPI_MCA_odls_base_sigkill_timeout=0 %s", setting.env);
    setting.env = env;
    Outcome o = run(x->build, layout, setting, "%s", flags);
    bool ok = o.code == code && one_sentence(o.err, says, layout->ranks == 1, code == 2);
    check(&x->check, ok, "refused: %s", name);
    if (!ok)
        printf("     wanted exit code %d naming '%s', got %d: %.400s\n", code, says, o.code,
               o.err);
    outcome_free(&o);
}

// ---- replicas --------------------------------------------------------------------------

// One node has a stale copy of the model. A script starts the last rank in the folder "stale",
// which has another "model". Nothing fails, and only --debug-replicas reports it.
static inline void check_stale(Context *x, const char *name, Layout layout, const char *flags,
                               const char *says) {
    static const char SCRIPT[] =
        "#!/bin/sh\n[ ${OMPI_COMM_WORLD_RANK:-$PMI_RANK} != %d ] || cd stale\nexec %s/%s \"$@\"\n";
    static const char FLAGS[] =
        "--init model --train-data %s/golden/train.bin --seq 24 --global-batch 8 --micro-batch 1 "
        "--steps 2 --val-every 0 %s --debug-replicas %d";
    char script[PATH_MAX + 256];
    int length =
        snprintf(script, sizeof script, SCRIPT, layout.ranks - 1, x->build, layout.trainer);
    write_file("one-stale.sh", script, (size_t)length);
    if (chmod("one-stale.sh", 0755)) die("cannot make", "one-stale.sh");
    layout.trainer = "one-stale.sh";
    Outcome o = run(x->temp, &layout, PLAIN, FLAGS, x->temp, flags, 1);
    bool ok = o.code == 1 && one_sentence(o.err, says, false, false);
    check(&x->check, ok, "%s: a stale copy on one rank is reported: %s", name, says);
    if (!ok) printf("     got exit code %d: %.400s\n", o.code, o.err);
    outcome_free(&o);
    o = run(x->temp, &layout, PLAIN, FLAGS, x->temp, flags, 0);
    check(&x->check, succeeded(&o), "%s: without --debug-replicas it is not", name);
}

// ---- main ------------------------------------------------------------------------------

static inline void load_golden(Context *x) {
    cJSON *c = read_json("golden/config.json"), *e = read_json("golden/expected.json");
    GPTConfig g = {(size_t)number(c, "n_layer"),
                   (size_t)number(c, "n_embd"),
                   (size_t)number(c, "n_head"),
                   (size_t)number(c, "vocab_size"),
                   0,
                   (size_t)number(c, "n_positions"),
                   NULL};
    Training h = {(size_t)number(e, "seq"),   (size_t)number(e, "global_batch"),
                  (size_t)number(e, "steps"), number(e, "lr"),
                  number(e, "weight_decay"),  number(e, "clip"),
                  number(e, "beta1"),         number(e, "beta2"),
                  number(e, "eps"),           0};
    cJSON_Delete(c);
    cJSON_Delete(e);
    g.Vp = padded_vocabulary(g.V);
    x->training = h;
    x->golden = reference_create(&g);
    x->tokens = read_shard("golden/train.bin", &x->token_count);
    if (!read_tensors("golden/model.safetensors", "", &x->golden.table, x->golden.params)) exit(1);
    Reference ref = reference_copy(&x->golden);
    x->expected = reference_train(&ref, &h, x->tokens, x->bf16);
    reference_free(&ref);
}

typedef struct {
    const char *name;
    void (*test)(Context *x);
} Group;

// Runs all groups, or the one that is named.
static inline int test_trainers(Context *x, const Group *groups, size_t count, int argc,
                                char **argv) {
    size_t known = argc < 3;
    for (size_t i = 0; i < count && argc > 2; i++) known += strcmp(argv[2], groups[i].name) == 0;
    if (argc < 2 || argc > 3 || !known) {
        fprintf(stderr, "usage: %s BUILD_DIR [GROUP], where GROUP is one of", argv[0]);
        for (size_t i = 0; i < count; i++) fprintf(stderr, " %s", groups[i].name);
        fprintf(stderr, "\n");
        return 2;
    }
    char golden[PATH_MAX];
    if (!realpath(argv[1], x->build)) die("cannot open", argv[1]);
    if (!realpath("dev/test/golden", golden)) die("cannot open", "dev/test/golden");
    x->bf16 = strstr(x->build, "-bf16") != NULL;
    x->sanitized = strstr(x->build, "-asan") != NULL;
    if (snprintf(x->temp, sizeof x->temp, "%.4000s/test_gpt.XXXXXX", x->build) < 0 ||
        !mkdtemp(x->temp) || chdir(x->temp))
        die("cannot make a folder in", x->build);
    if (symlink(golden, "golden")) die("cannot link", golden);
    load_golden(x);
    prefer_quick_starts();
    for (size_t i = 0; i < count; i++) {
        if (argc > 2 && strcmp(argv[2], groups[i].name) != 0) continue;
        printf("--- %s\n", groups[i].name);
        time_t begin = time(NULL);
        groups[i].test(x);
        printf("     %.0f s\n", difftime(time(NULL), begin));
    }
    expected_free(&x->expected);
    free(x->tokens);
    reference_free(&x->golden);
    if (chdir("/") == 0) remove_tree(x->temp);
    return check_summary(&x->check);
}

#endif
