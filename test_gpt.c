// test_gpt.c: runs the trainers as a user would, by their command line. Compares their losses,
// norms, gradients, weights, checkpoints and error messages with the fp64 reference,
// llmc/reference.h.
//
//   test_gpt BUILD_DIR [GROUP]      for example: test_gpt build/cpu-fp32 golden
//
// Run it in the root of the repository. BUILD_DIR holds the trainers; -bf16 in its name selects
// the bounds of that precision. The groups are listed above main: one rank's computation, then
// the matrix of all layouts. A new layout is a row in ROWS. dev/test/test_parallel.c has the
// other tests of several ranks. A check that guards against a known bug of this field names it in
// quotation marks. All files go to a folder below BUILD_DIR, which is removed at the end.
#define _GNU_SOURCE
#include "dev/test/check_trace.h"
#include "dev/test/compare_runs.h"

// ---- group reference -------------------------------------------------------------------

// Compares backward with central differences of forward, for every single parameter. Also
// with dropout, with the same masks.
static void test_finite_differences(Context *x, double dropout) {
    enum { B = 2, T = 4 };
    Reference ref = random_model(2, 6, 2, 7, 5, 0.5, 1);
    int *tokens = random_tokens(B * T + 1, 7, 2);
    ref.dropout = dropout_make(dropout, 7, 3, 5);
    Errors e = compare_differences(&ref, reference_loss_and_gradients, tokens, B, T);
    check(&x->check, e.worst < 1e-7,
          "reference: gradients against finite differences, dropout %g: %.1e (%s)", dropout,
          e.worst, e.name);
    free(tokens);
    reference_free(&ref);
}

// Tests that two halves of a batch add up to the whole, and that a larger padding of the
// vocabulary changes nothing.
static void test_reference_sums(Context *x) {
    const Reference *g = &x->golden;
    GPTConfig wide_config = g->config;
    wide_config.Vp += 256;
    Reference ref = reference_copy(g), wide = reference_create(&wide_config);
    for (size_t i = 0; i < g->table.count; i++) {
        const Tensor *from = &g->table.tensors[i], *to = &wide.table.tensors[i];
        memcpy(wide.params + to->offset, g->params + from->offset,
               from->rows * from->cols * sizeof(double));
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

// Tests the independent case. PyTorch in float64 made the losses and norms; its gradients are
// stored as fp32.
static void test_reference_golden(Context *x) {
    Reference ref = reference_copy(&x->golden);
    Expected ours = reference_train(&ref, &x->training, x->tokens, false);
    double *gradients = allocate(ref.table.total * sizeof(double)), loss = 0, norm = 0;
    bool read = read_tensors("golden/gradients.safetensors", "", &ref.table, gradients);
    cJSON *json = read_json("golden/expected.json");
    for (size_t s = 0; s < x->training.steps; s++) {
        const cJSON *losses = cJSON_GetObjectItem(json, "losses");
        const cJSON *norms = cJSON_GetObjectItem(json, "grad_norms");
        loss =
            fmax(loss, relative(ours.losses[s], cJSON_GetArrayItem(losses, (int)s)->valuedouble));
        norm = fmax(norm, relative(ours.norms[s], cJSON_GetArrayItem(norms, (int)s)->valuedouble));
    }
    Errors e = compare_tensors(&ref.table, ours.gradients, gradients);
    check(&x->check, loss < 1e-9, "reference: %zu golden losses %.1e (bound 1e-9)",
          x->training.steps, loss);
    check(&x->check, norm < 1e-9, "reference: %zu golden norms %.1e (bound 1e-9)",
          x->training.steps, norm);
    check(&x->check, read && e.worst < 1e-7, "reference: golden gradients %.1e (%s; bound 1e-7)",
          e.worst, e.name);
    cJSON_Delete(json);
    free(gradients);
    expected_free(&ours);
    reference_free(&ref);
}

static void group_reference(Context *x) {
    test_finite_differences(x, 0.0);
    test_finite_differences(x, 0.3);
    test_reference_sums(x);
    test_reference_golden(x);
}

// ---- group golden: one rank against the golden case ------------------------------------

// Prints the table "is my difference normal?" for one rank, tensor by tensor.
static void print_tensor_table(const Context *x, const double *got, const double *golden) {
    double bound = bounds(x, &x->golden.config).gradient;
    printf("     %-28s %12s %12s %12s %9s\n", "gradient (one rank)", "L2 norm", "vs PyTorch",
           "vs reference", "bound");
    for (size_t i = 0; i < x->golden.table.count; i++) {
        const Tensor *t = &x->golden.table.tensors[i];
        double norm = 0;
        for (size_t k = t->offset; k < t->offset + t->size; k++) norm += golden[k] * golden[k];
        printf("     %-28s %12.5g %12.2e %12.2e %9.2g\n", t->name, sqrt(norm),
               tensor_error(t, got, golden), tensor_error(t, got, x->expected.gradients), bound);
    }
}

static void group_golden(Context *x) {
    // A GPU takes a second and more to start a program: there the whole batch at once, and the
    // smallest micro-batches.
    static const size_t MICRO_BATCHES[] = {1, 8, 2, 4};
    const size_t count = on_gpu(x) ? 2 : 4;
    const ParamTable *table = &x->golden.table;
    Bounds bound = bounds(x, &table->config);
    Errors errors[4];
    char name[32], flags[ARG_BYTES];
    double *got = allocate(table->total * sizeof(double)),
           *golden = allocate(table->total * sizeof(double));
    bool have_golden = read_tensors("golden/gradients.safetensors", "", table, golden);
    training_flags(flags, &x->training, "golden", "golden/train.bin");
    for (size_t i = 0; i < count; i++) {
        snprintf(name, sizeof name, "micro-batches of %zu", MICRO_BATCHES[i]);
        bool ok = trains(x, "%s --micro-batch %zu --log log --dump-gradients gradients --out out",
                         flags, MICRO_BATCHES[i]);
        ok = ok && have_golden && read_tensors("gradients", "", table, got);
        if (i == 0 && ok) print_tensor_table(x, got, golden);
        if (!x->bf16) {
            double worst = ok ? compare_tensors(table, got, golden).worst : INFINITY;
            check(&x->check, worst <= bound.gradient,
                  "%s: gradients against PyTorch's %.1e (bound %.1e)", name, worst,
                  bound.gradient);
        }
        check_run(x, name, table, &x->expected, x->training.steps, &errors[i]);
        Errors e =
            state_errors(table, "out/step-00000005/model.safetensors", "", x->expected.weights);
        check(&x->check, e.worst <= bound.weight && e.whole <= bound.weights,
              "%s: updated weights %.1e (bound %.1e), %s %.1e (%.1e)", name, e.whole,
              bound.weights, e.name, e.worst, bound.weight);
        remove_tree("out");
    }
    print_errors_head(bound.gradient);
    for (size_t i = 0; i < count; i++) {
        snprintf(name, sizeof name, "micro-batches of %zu", MICRO_BATCHES[i]);
        print_errors(name, &errors[i], bound.gradient);
    }
    free(got);
    free(golden);
}

// ---- group shapes: odd sizes against the reference -------------------------------------

typedef struct {
    const char *name;
    size_t L, C, NH, V, maxT, T, micro, global;
} Shape;

// Most of these sizes are no multiples of packs of 4 and 8 elements, of warps of 32 or of
// tiles.
static const Shape SHAPES[] = {
    {"nothing divides", 3, 18, 3, 33, 7, 7, 1, 3},
    {"one token, one head, one layer", 1, 8, 1, 9, 1, 1, 2, 8},
    {"\"T < max T\"", 2, 24, 4, 130, 19, 11, 3, 6},
    {"vocabulary of a multiple of 128", 2, 32, 2, 128, 16, 16, 2, 4},
    {"T beyond a warp", 1, 20, 5, 97, 70, 65, 1, 2},
    {"\"dropped layers\"", 7, 16, 2, 40, 9, 9, 2, 16},
    {"wide heads", 1, 144, 1, 50, 33, 33, 2, 2},
};

static void group_shapes(Context *x) {
    enum { NUM_SHAPES = sizeof SHAPES / sizeof *SHAPES, STEPS = 2 };
    char flags[ARG_BYTES], label[160];
    for (size_t i = 0; i < NUM_SHAPES; i++) {
        const Shape *s = &SHAPES[i];
        Training h = {s->T, s->global, STEPS, 1e-4, 0.1, 1.0, 0.9, 0.95, 1e-8, 0};
        size_t count = s->T * s->global * STEPS + 1;
        // Activations shall not grow with C.
        double scale = s->C <= 32 ? 0.2 : 0.2 * sqrt(32 / (double)s->C);
        Reference ref = random_model(s->L, s->C, s->NH, s->V, s->maxT, scale, 10 + i);
        int *tokens = random_tokens(count, s->V, 20 + i);
        write_model("model", &ref.table, ref.params, INTACT);
        write_shard("shard.bin", 20240520, 1, (int)count, tokens, count);
        Expected want = reference_train(&ref, &h, tokens, x->bf16);
        training_flags(flags, &h, "model", "shard.bin");
        trains(x, "%s --micro-batch %zu --log log --dump-gradients gradients", flags, s->micro);
        Errors errors;
        snprintf(label, sizeof label, "%s (L=%zu C=%zu NH=%zu V=%zu T=%zu)", s->name, s->L, s->C,
                 s->NH, s->V, s->T);
        check_run(x, label, &ref.table, &want, STEPS, &errors);
        expected_free(&want);
        free(tokens);
        reference_free(&ref);
    }
}

// ---- group bits: options that must not change a bit ------------------------------------

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
    {"--trace", {"train_gpt", 1, "--trace trace.json"}, "", 1},
    {"random thread order, \"missing barrier\"",
     {"train_gpt", 1, ""},
     "CPU_THREAD_ORDER=random:%d",
     10},
    {"random stream order, \"stream race\"",
     {"train_gpt", 1, ""},
     "CPU_STREAM_ORDER=random:%d",
     10},
    {"copies to the host in a random order, \"stream race\"",
     {"train_offload", 1, "--offload 1"},
     "CPU_STREAM_ORDER=random:%d",
     10},
    {"the same for a third of the tokens",
     {"train_offload", 1, "--offload 0.33"},
     "CPU_STREAM_ORDER=random:%d",
     5},
};

static void group_bits(Context *x) {
    prefer_plain_kernels();  // group golden and group shapes have used this CPU's own
    char env[256], flags[ARG_BYTES];
    Training h = x->training;
    h.steps = 2;
    Log base;
    memset(&base, 0, sizeof base);
    training_flags(flags, &h, "golden", "golden/train.bin");
    for (size_t i = 0; i < sizeof BIT_ROWS / sizeof *BIT_ROWS; i++) {
        const BitRow *row = &BIT_ROWS[i];
        if (on_gpu(x) && strncmp(row->env, "CPU_", 4) == 0) continue;  // an order of the stand-ins
        const char *out = row->name ? "other" : "base";
        bool same = true;
        for (int seed = 1; seed <= row->seeds && same; seed++) {
            snprintf(env, sizeof env, row->env, seed);
            Setting setting = {env, 0};
            remove_tree(out);
            remove("log");
            Outcome o = run(x->build, &row->layout, setting,
                            "%s --micro-batch 4 --out %s --log log "
                            "--dump-gradients %s.gradients",
                            flags, out, out);
            same = succeeded(&o);
            Log log = read_log("log");
            if (row->name) {
                same = same && same_log(&log, &base) &&
                       same_file("other.gradients", "base.gradients") &&
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

// ---- group resume ----------------------------------------------------------------------

static void group_resume(Context *x) {
    // Six steps of eight samples out of forty, shuffled: the second epoch begins after the fifth
    // step. The schedule is not constant, so that a wrong step number shows too.
    static const char FLAGS[] =
        "--train-data golden/train.bin --shuffle 1 --seq 24 --global-batch 8 "
        "--micro-batch 4 --steps 6 --lr 0.01 --warmup 2 --val-every 0";
    bool ok = trains(x, "--init golden %s --save-every 2 --keep 0 --out whole --log log", FLAGS);
    check(&x->check,
          ok && file_exists("whole/step-00000002") && file_exists("whole/step-00000004") &&
              file_exists("whole/step-00000006"),
          "checkpoints every 2 steps and at the end");
    Log whole = read_log("log");

    // As if interrupted while step 6 was being saved: the log is ahead of the last whole
    // checkpoint.
    mkdir("part", 0777);
    mkdir("part/tmp-00000006-node-7", 0777);
    if (rename("whole/step-00000004", "part/step-00000004"))
        die("cannot move", "whole/step-00000004");
    ok = trains(x, "--resume auto %s --save-every 2 --keep 0 --out part --log log", FLAGS);
    Log part = read_log("log");
    check(&x->check, ok && same_log(&part, &whole),
          "--resume auto: the log reads as if never stopped");
    check(&x->check, ok && same_checkpoint("part/step-00000006", "whole/step-00000006"),
          "--resume auto: same bits, \"master weights\" and moments included");
    check(&x->check, !file_exists("part/tmp-00000006-node-7"),
          "a half-written checkpoint is ignored and removed");

    ok = trains(x, "--resume whole/step-00000002 %s --recompute layer --out again", FLAGS);
    check(&x->check, ok && same_checkpoint("again/step-00000006", "whole/step-00000006"),
          "--resume FOLDER with another recomputation: same bits");
    Layout offload = {"train_offload", 1, "--offload 1"};
    ok = runs(x, &offload, "", "--resume whole/step-00000002 %s --save-every 2 --keep 0 --out host",
              FLAGS) &&
         same_checkpoint("host/step-00000006", "whole/step-00000006") &&
         trains(x, "--resume host/step-00000004 %s --out back", FLAGS);
    check(&x->check, ok && same_checkpoint("back/step-00000006", "whole/step-00000006"),
          "train_offload resumes it, and train_gpt resumes train_offload's: same bits");
    ok = trains(x, "--resume auto %s --layers 2 --heads 2 --channels 16 --vocab 61 --out new",
                FLAGS);
    check(&x->check, ok && file_exists("new/step-00000006"),
          "--resume auto with nothing there starts anew");
    ok = trains(x, "--init golden %s --save-every 1 --keep 2 --out kept", FLAGS);
    check(&x->check, ok && file_exists("kept/step-00000006") && file_exists("kept/step-00000005") &&
          !file_exists("kept/step-00000004") && !file_exists("kept/step-00000001"),
          "--keep 2 keeps the newest two checkpoints");
    ok = trains(x, "--init whole/step-00000006 %s --log next.log", FLAGS);
    Log next = read_log("next.log");
    check(&x->check, ok && next.steps == 6 && next.step[0] == 1,
          "--init FOLDER counts from step 1 again");
}

// ---- group reports: options that only report must not disturb training -----------------

static bool lr_follows(const Log *log, bool cosine, double lr, double final, size_t warmup,
                       size_t steps) {
    bool ok = log->steps == steps;
    size_t peak = warmup ? warmup : 1;
    for (size_t s = 1; s <= log->steps; s++) {
        double at = ((double)s - (double)peak) / (double)(steps - peak);
        double share = cosine ? 0.5 * (1 + cos(acos(-1.0) * at)) : 1 - at;
        double want = s < peak ? lr * (double)s / (double)peak : lr * (final + (1 - final) * share);
        ok = ok && relative(log->lr[s - 1], want) < 1e-6;
    }
    return ok;
}

// Checks validation after 0, 2, 4 and 5 updates of the golden run, over the five batches of its
// shard.
static void check_validation(Context *x, const Log *log) {
    double bound = bounds(x, &x->golden.config).loss, worst = log->vals == 4 ? 0 : INFINITY;
    for (size_t i = 0; i < log->vals; i++) {
        Reference ref = reference_copy(&x->golden);
        Training h = x->training;
        h.steps = (size_t)log->val_step[i];
        Expected e = reference_train(&ref, &h, x->tokens, x->bf16);
        for (size_t k = 0; k < ref.table.total && x->bf16; k++)
            ref.params[k] = round_to_bf16(ref.params[k]);
        worst = fmax(
            worst, relative(log->val[i], reference_mean_loss(&ref, x->tokens, h.seq, 0, 40, 0)));
        expected_free(&e);
        reference_free(&ref);
    }
    check(&x->check, worst <= bound && log->val_step[3] == 5,
          "validation losses %.1e (bound %.1e)", worst, bound);
}

// Returns true if all lines of steps have MFU, in percent, or none has. Only the peak of some
// GPUs is known, and of no CPU.
static bool says_mfu(const char *out, size_t steps, bool gpu) {
    size_t lines = 0;
    for (const char *at = strstr(out, "MFU"); at; at = strstr(at + 1, "MFU")) {
        double percent = 0;
        char unit = 0;
        if (sscanf(at, "MFU %lf%c", &percent, &unit) != 2) return false;
        if (unit != '%' || percent < 0 || percent > 100) return false;
        lines++;
    }
    return lines == 0 || (gpu && lines == steps);
}

static void group_reports(Context *x) {
    char flags[ARG_BYTES];
    training_flags(flags, &x->training, "golden", "golden/train.bin");
    bool ok = trains(x, "%s --micro-batch 8 --log plain.log", flags) &&
              trains(x,
                     "%s --micro-batch 8 --log val.log --val-data golden/train.bin --val-every 2 "
                     "--val-batches 9",
                     flags);
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
    check(&x->check, ok && lr_follows(&cosine, true, 0.002, 0.25, 3, 8),
          "warm-up and cosine schedule");
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

    // The drawn samples depend on the seed alone, not on their cut into micro-batches.
    ok = trains(x, "%s --micro-batch 1 --shuffle 1 --seed 9", BYTES);
    Log singly = read_log("log");
    ok = trains(x, "%s --micro-batch 4 --shuffle 1 --seed 9", BYTES) && ok;
    Log together = read_log("log");
    double difference = ok && singly.steps == 8 && together.steps == 8 ? 0 : INFINITY;
    for (size_t s = 0; s < singly.steps; s++) {
        difference = fmax(difference, relative(together.loss[s], singly.loss[s]));
    }
    check(&x->check, difference <= bounds(x, &ref.config).loss && !same_log(&singly, &cosine),
          "\"seed + rank\": micro-batches choose among the same shuffled samples: %.1e",
          difference);

    const TracedRun traced = {1, 1, 1, 2, 5};
    Error why = {""};
    o = run(x->build, &ONE, PLAIN, "%s --trace trace.json --trace-steps 5", BYTES);
    bool mfu = says_mfu(o.out, 8, on_gpu(x));
    ok = succeeded(&o) && trace_check("trace.json", &traced, &why);
    check(&x->check, ok, "--trace has what ran in --trace-steps 5, in its order %s", why.text);
    check(&x->check, mfu, "\"unknown GPU\": MFU is a true number, or not there");
    ok = trains(x, "%s --out dry --dry-run", BYTES);
    check(&x->check, ok && !file_exists("dry/step-00000008"), "--dry-run does no work");
    o = run(x->build, &ONE, PLAIN, "--help all");
    printed = strstr(o.out, "--micro-batch") && strstr(o.out, "--dump-gradients") && !*o.err;
    check(&x->check, succeeded(&o) && printed, "--help all lists the flags");
    free(tokens);
    reference_free(&ref);
}

// ---- group refusals: bad input ---------------------------------------------------------

#define MODEL "--init golden "
#define DATA "--train-data golden/train.bin "
#define SIZES "--seq 24 --micro-batch 2 --global-batch 8 --steps 2 --val-every 0 "
#define GOOD MODEL DATA SIZES

typedef struct {
    const char *name, *flags;
    int code;          // 2: refused before any work; 1: failed later
    const char *says;  // what the sentence must name
} Refusal;

// dev/test/test_options.c has all refusals of options.h. These rows test that a trainer
// stops then.
static const Refusal REFUSALS[] = {
    {"unknown flag", GOOD "--frobnicate 3", 2, "frobnicate"},
    {"flag of another trainer", GOOD "--pipeline 2", 2, "pipeline"},
    {"layers that contradict the folder", GOOD "--layers 3", 2, "--layers"},
    {"no training data", MODEL SIZES, 2, "--train-data"},
    {"no such model folder", "--init nowhere " DATA SIZES, 2, "nowhere"},
    {"no such checkpoint", "--resume nowhere " DATA SIZES, 2, "nowhere"},
    {"resume auto without a folder", "--resume auto " DATA SIZES, 2, "--resume auto needs --out"},
    {"missing shard", MODEL SIZES "--train-data nowhere/*.bin", 2, "nowhere"},
    {"missing validation shard", GOOD "--val-every 1 --val-data nowhere.bin", 2, "nowhere"},
    {"truncated shard", MODEL SIZES "--train-data truncated.bin", 2, "truncated.bin"},
    {"shard shorter than a batch", MODEL SIZES "--train-data batch.bin", 2, "batch.bin"},
    {"token id >= V", MODEL SIZES "--train-data token.bin", 1, "token.bin"},
    {"--out below a file", GOOD "--out golden/train.bin/out", 2, "golden/train.bin"},
    {"--log in no folder", GOOD "--log nowhere/log", 2, "nowhere/log"},
    {"--dump-gradients in no folder", GOOD "--dump-gradients nowhere/gradients", 2,
     "nowhere/gradients"},
    {"prompt that the model has no token for", GOOD "--sample-every 1000", 2,
     "vocabulary has 61"},
    {"--trace in no folder", GOOD "--trace nowhere/trace", 2, "nowhere/trace"},
};

// More refusals of train_offload.
static const struct {
    Refusal refusal;
    const char *env;
} OFFLOAD_REFUSALS[] = {
    {{"a share above 1", GOOD "--offload 1.5", 2, "--offload must be a number from 0 to 1"}, ""},
    {{"a share that is no number", GOOD "--offload half", 2, "or auto, not 'half'"}, ""},
    {{"--recompute layer", GOOD "--recompute layer", 2, "use --offload 0"}, ""},
    {{"too little host memory", GOOD "--offload 1", 2, "MiB of host memory are needed"},
     "CPU_HOST_MEMORY=0.04"},
    {{"too little for any share", GOOD "--offload auto", 2, "MiB of host memory are needed"},
     "CPU_HOST_MEMORY=0.01"},
};

// Model folders that are refused, made by damaging a good one: one or two faults of each file.
// All faults are in test_checkpoint.c.
typedef struct {
    const char *name;
    Damage damage;
    const char *says;
} BadModel;

static const BadModel BAD_MODELS[] = {
    {"config of another model", {"config", "\"gpt2\"", "\"llama\"", 0}, "config.json"},
    {"config with a negative size", {"config", "\"n_layer\": ", "\"n_layer\": -", 0}, "n_layer"},
    {"truncated data", {"cut", "", "", 20000}, "model.safetensors"},
    {"wrong shape", {"header", "[61,32]", "[32,61]", 0}, "wte.weight"},
    {"wrong dtype", {"header", "\"F32\"", "\"I32\"", 0}, "wte.weight"},
    {"missing tensor", {"header", "\"ln_f.bias\"", "\"ln_g.bias\"", 0}, "ln_f.bias"},
};

static void group_refusals(Context *x) {
    const int *tokens = x->tokens;
    int *foreign_token = allocate(x->token_count * sizeof(int)), magic = 20240520,
        n = (int)x->token_count;
    memcpy(foreign_token, tokens, x->token_count * sizeof(int));
    foreign_token[100] = 61;
    write_shard("truncated.bin", magic, 1, n, tokens, x->token_count / 2);
    write_shard("batch.bin", magic, 1, 24 * 8, tokens, 24 * 8);  // the last target is missing
    write_shard("token.bin", magic, 1, n, foreign_token, x->token_count);
    free(foreign_token);
    // Only the last trainer is built with sanitizers. It reads the same files as the first one.
    Layout one = {x->sanitized ? "train_gpt_3d" : "train_gpt", 1, ""};
    for (size_t i = 0; i < sizeof REFUSALS / sizeof *REFUSALS; i++) {
        const Refusal *r = &REFUSALS[i];
        check_refusal(x, &one, r->name, PLAIN, r->flags, r->code, r->says);
    }
    const Layout offload = {"train_offload", 1, ""};
    bool built = !x->sanitized && !on_gpu(x);
    for (size_t i = 0; built && i < sizeof OFFLOAD_REFUSALS / sizeof *OFFLOAD_REFUSALS; i++) {
        const Refusal *r = &OFFLOAD_REFUSALS[i].refusal;
        Setting setting = {OFFLOAD_REFUSALS[i].env, 0};
        check_refusal(x, &offload, r->name, setting, r->flags, r->code, r->says);
    }
    for (size_t i = 0; i < sizeof BAD_MODELS / sizeof *BAD_MODELS; i++) {
        const BadModel *m = &BAD_MODELS[i];
        write_model("bad", &x->golden.table, x->golden.params, m->damage);
        check_refusal(x, &one, m->name, PLAIN, "--init bad " DATA SIZES, 2, m->says);
    }
    check(&x->check, !file_exists("nowhere"), "refusals leave nothing behind");
}

// ---- group failures: errors in the middle of a run -------------------------------------

#define RUN DATA "--seq 24 --micro-batch 4 --global-batch 8 --val-every 0 "

// Sends a signal: the step is finished and saved, and the run can be resumed.
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
    check(&x->check, succeeded(&o) && log.steps >= 2 && file_exists(path),
          "%s saves the step it is at", name);
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
    check(&x->check, !file_exists("disk/step-00000004"),
          "full disk: no checkpoint that is not whole");
    ok = trains(x, "%s", flags);
    check(&x->check, ok && same_checkpoint("disk/step-00000004", "intact"),
          "full disk: the previous checkpoint is whole and resumes");

    check_refusal(x, &ONE, "a loss that is not finite stops the run and names the step", PLAIN,
                  GOOD "--lr 1000 --lr-final 1 --clip 0 --weight-decay 1000 --steps 60", 1, "step");
    Reference ref = reference_copy(&x->golden);
    ref.params[table_find(&ref.table, FCW, 2)->offset + 5] = NAN;
    write_model("nan", &ref.table, ref.params, INTACT);
    check_refusal(x, &ONE, "a loss that is not finite names a tensor", PLAIN,
                  "--init nan " DATA SIZES, 1, ".weight");
    reference_free(&ref);
    check_signal(x, SIGTERM, "SIGTERM");
    check_signal(x, SIGINT, "SIGINT");
}

// ---- groups layouts and pipeline: every layout against the reference -------------------

// The models of the matrix: the golden case, and random ones for larger and odd layouts.
typedef struct {
    size_t L, C, NH, V, maxT, T, global, steps;
    double dropout;
} Fixture;

enum {
    GOLDEN,
    SHARED,
    WIDE,
    WIDE_24,
    WIDE_10,
    WIDE_14,
    DEEP,
    DROPOUT,
    DROPOUT_ODD,
    DROPOUT_LONG,
    NUM_FIXTURES
};

static const Fixture FIXTURES[NUM_FIXTURES] = {
    {0, 0, 0, 0, 0, 0, 0, 5, 0},        // GOLDEN: 4 layers, 4 heads, 8 sequences of 24 tokens
    {4, 32, 4, 200, 24, 24, 8, 2, 0},   // SHARED: tensor and data ranks all have a part of wte
                                        // that is no padding
    {9, 32, 8, 200, 20, 16, 8, 2, 0},   // WIDE: 8 heads; of 8 tensor ranks the last has only
                                        // padding
    {9, 32, 8, 200, 20, 16, 24, 2, 0},  // WIDE_24, WIDE_10, WIDE_14: the same for 3, 5, 6, 7 data
                                        // ranks
    {9, 32, 8, 200, 20, 16, 10, 2, 0},  {9, 32, 8, 200, 20, 16, 14, 2, 0},
    {25, 16, 4, 50, 4, 4, 144, 1, 0},    // DEEP: enough layers for 8 stages of 3 chunks, and many
                                         // micro-batches
    {4, 32, 4, 200, 20, 20, 8, 2, 0.2},  // DROPOUT: samples, heads and keys that ranks and blocks
                                         // of 8 share
    {3, 18, 2, 33, 7, 7, 4, 2, 0.5},     // DROPOUT_ODD: blocks of 8 do not divide the channels
    {2, 32, 4, 200, 32, 32, 4, 2, 0.2},  // DROPOUT_LONG: a ring's parts have whole blocks of 8
                                         // keys
};

// A layout: t * d * p ranks, and the sequences of a micro-batch.
typedef struct {
    const char *trainer;  // what follows "train_gpt", or a lesson's name, which follows "train_"
    int t, d, p, micro, fixture;
    const char *flags;
    bool bf16;        // in bf16 too, not only in fp32
    const char *bug;  // known bugs that this row would show, in quotation marks; or NULL
} Row;

static const Row ROWS[] = {
    {"", 1, 1, 1, 1, GOLDEN, "", true, NULL},
    {"", 1, 1, 1, 4, GOLDEN, "", false, NULL},
    {"", 1, 1, 1, 8, GOLDEN, "", false, NULL},
    // tensor
    {"_tp", 1, 1, 1, 1, GOLDEN, "", true, NULL},
    {"_tp", 1, 1, 1, 1, GOLDEN, "--sequence-parallel 1", false, NULL},
    {"_tp", 2, 1, 1, 1, GOLDEN, "", true, "\"gathered logits\""},
    {"", 1, 1, 1, 1, SHARED, "", true, NULL},
    {"_tp", 2, 1, 1, 1, SHARED, "", true, NULL},
    {"_tp", 2, 1, 1, 1, SHARED, "", false, "the same command twice"},
    {"_tp", 2, 1, 1, 1, SHARED, "--recompute gelu", false, NULL},
    {"_tp", 2, 1, 1, 1, SHARED, "--recompute layer", true, NULL},
    {"_tp", 2, 1, 1, 4, SHARED, "", false, NULL},
    {"_tp", 4, 1, 1, 1, GOLDEN, "", true, "\"padding tied to t\""},
    {"_tp", 4, 1, 1, 8, SHARED, "", false, NULL},
    {"_tp", 2, 1, 1, 1, SHARED, "--sequence-parallel 1", true, "\"layernorm drift\""},
    {"_tp", 2, 1, 1, 1, SHARED, "--sequence-parallel 1 --recompute layer", true, NULL},
    {"_tp", 4, 1, 1, 1, GOLDEN, "--sequence-parallel 1", true, NULL},
    {"_tp", 4, 1, 1, 4, SHARED, "--sequence-parallel 1", false, NULL},
    // pipeline
    {"_pp", 1, 1, 1, 1, GOLDEN, "", true, NULL},
    {"_pp", 2, 1, 1, 1, SHARED, "", false, NULL},
    {"_pp", 1, 1, 2, 1, GOLDEN, "", true, "\"loss only on the last stage\""},
    {"_pp", 1, 1, 2, 1, GOLDEN, "--schedule gpipe", true, "\"order of send and receive\""},
    {"_pp", 1, 1, 2, 1, GOLDEN, "--virtual 2", true, "\"p = 2 interleaved\""},
    {"_pp", 1, 1, 2, 1, GOLDEN, "--recompute gelu", false, NULL},
    {"_pp", 1, 1, 2, 1, GOLDEN, "--virtual 2 --recompute layer", true, NULL},
    {"_pp", 1, 1, 2, 4, GOLDEN, "--virtual 2", false, NULL},
    {"_pp", 1, 1, 3, 1, GOLDEN, "", false, "\"dropped layers\""},
    {"_pp", 1, 1, 4, 1, GOLDEN, "", true, NULL},
    {"_pp", 1, 1, 4, 8, GOLDEN, "", false, "p > m"},
    {"_pp", 1, 1, 4, 1, GOLDEN, "--schedule gpipe --recompute layer", false, NULL},
    {"_pp", 2, 1, 2, 1, SHARED, "", true, NULL},
    {"_pp", 2, 1, 2, 1, SHARED, "--virtual 2 --recompute gelu", false, NULL},
    {"_pp", 2, 1, 2, 1, SHARED, "--sequence-parallel 1", true, NULL},
    {"_pp", 2, 1, 2, 1, SHARED, "--sequence-parallel 1 --virtual 2", false, NULL},
    {"_pp", 2, 1, 3, 1, SHARED, "", false, "\"dropped layers\""},
    {"_pp", 2, 1, 4, 1, SHARED, "", false, NULL},
    {"_pp", 2, 1, 4, 1, SHARED, "--sequence-parallel 1 --schedule gpipe", false, NULL},
    {"_pp", 4, 1, 2, 1, SHARED, "", false, NULL},
    {"_pp", 4, 1, 2, 1, SHARED, "--sequence-parallel 1", true, NULL},
    // stages of unequal length
    {"_pp", 1, 1, 2, 1, GOLDEN, "--layers-per-stage 1,3", true, NULL},
    {"_pp", 1, 1, 3, 1, GOLDEN, "--schedule gpipe --layers-per-stage 1,1,2", false,
     "\"dropped layers\""},
    {"_pp", 2, 1, 2, 1, SHARED, "--sequence-parallel 1 --layers-per-stage 3,1", false, NULL},
    // backwards by halves, and lists by hand
    {"zero_bubble", 1, 1, 2, 1, GOLDEN, "--schedule zb-h1", true, NULL},
    {"zero_bubble", 1, 1, 2, 1, GOLDEN, "--schedule-file halves-of-one.txt", false, NULL},
    {"zero_bubble", 1, 1, 2, 1, GOLDEN,
     "--schedule-file chunks.txt --virtual 2 --recompute layer", false, NULL},
    {"zero_bubble", 1, 1, 3, 1, GOLDEN, "--schedule zb-auto --recompute gelu", false, NULL},
    {"zero_bubble", 1, 1, 4, 1, GOLDEN, "--schedule zb-auto", true, NULL},
    {"zero_bubble", 1, 1, 4, 8, GOLDEN, "--schedule zb-h1", false, "p > m"},
    {"zero_bubble", 1, 1, 3, 1, GOLDEN, "--schedule zb-h1 --layers-per-stage 2,1,1", false, NULL},
    {"zero_bubble", 2, 1, 2, 1, SHARED, "--schedule zb-h1 --recompute layer", false, NULL},
    {"zero_bubble", 2, 1, 2, 1, SHARED, "--sequence-parallel 1 --schedule zb-auto", true, NULL},
    {"zero_bubble", 2, 1, 4, 1, SHARED, "--sequence-parallel 1 --schedule zb-h1 --recompute gelu",
     false, NULL},
    // chunks in a V
    {"v", 1, 1, 1, 1, GOLDEN, "", true, NULL},
    {"v", 1, 1, 2, 1, GOLDEN, "", true, NULL},
    {"v", 1, 1, 2, 1, GOLDEN, "--schedule v-half --recompute layer", false, NULL},
    {"v", 1, 1, 2, 1, GOLDEN, "--schedule dualpipe-v --recompute gelu", false, NULL},
    {"v", 1, 1, 2, 4, GOLDEN, "--schedule zb-v", false, "m < 2p"},
    {"v", 1, 1, 2, 4, GOLDEN, "--schedule-file v.txt", false, NULL},
    {"v", 2, 1, 2, 1, SHARED, "--schedule v-half", false, NULL},
    {"v", 2, 1, 2, 1, SHARED, "--sequence-parallel 1", true, NULL},
    // the grid: every (t, d, p) with t * d * p <= 8 and t a power of 2
    {"_3d", 1, 1, 1, 1, GOLDEN, "", true, NULL},
    {"_3d", 1, 1, 2, 1, GOLDEN, "", false, NULL},
    {"_3d", 1, 1, 3, 1, GOLDEN, "", false, NULL},
    {"_3d", 1, 1, 4, 1, GOLDEN, "", false, NULL},
    {"_3d", 1, 2, 1, 1, GOLDEN, "", true, "\"shard norm\""},
    {"_3d", 1, 2, 1, 1, GOLDEN, "--zero 0", true, NULL},
    {"_3d", 1, 2, 1, 1, GOLDEN, "--overlap 0", true, "\"stream race\""},
    {"_3d", 1, 2, 1, 1, GOLDEN, "--zero 0 --overlap 0 --recompute layer", false, NULL},
    {"_3d", 1, 2, 1, 4, GOLDEN, "", false, NULL},
    {"_3d", 1, 4, 1, 1, GOLDEN, "", false, NULL},
    {"_3d", 1, 4, 1, 1, GOLDEN, "--zero 0 --recompute gelu", false, NULL},
    {"_3d", 1, 8, 1, 1, GOLDEN, "", true, NULL},
    {"_3d", 1, 8, 1, 1, GOLDEN, "--zero 0", false, NULL},
    {"data", 1, 1, 1, 1, GOLDEN, "", true, NULL},
    {"data", 1, 2, 1, 1, GOLDEN, "", true, "\"stream race\""},
    {"data", 1, 2, 1, 1, GOLDEN, "--zero 0", false, NULL},
    {"data", 1, 2, 1, 1, GOLDEN, "--overlap 0 --recompute gelu", false, NULL},
    {"data", 1, 2, 1, 4, GOLDEN, "--zero 0 --overlap 0 --recompute layer", false, NULL},
    {"data", 1, 4, 1, 1, GOLDEN, "--recompute layer", false, NULL},
    {"data", 1, 8, 1, 1, GOLDEN, "", false, NULL},
    // sequences over neighbours of the data ranks
    {"context", 1, 1, 1, 1, GOLDEN, "", true, NULL},
    {"context", 1, 2, 1, 1, GOLDEN, "--context 2", true, "\"gradients averaged over d\""},
    {"context", 1, 2, 1, 1, GOLDEN, "--zero 0 --overlap 0 --recompute layer --context 2", false,
     NULL},
    {"context", 1, 2, 1, 4, GOLDEN, "--recompute gelu --context 2 --context-layout contiguous",
     false, NULL},
    {"context", 1, 4, 1, 1, GOLDEN, "--context 2", false,
     "\"ranks of a ring read the same samples\""},
    {"context", 1, 4, 1, 2, GOLDEN, "--context 4", true, "\"zigzag lost after the all-to-all\""},
    {"context", 1, 8, 1, 1, GOLDEN, "--context 4 --context-layout contiguous", false, NULL},
    {"context", 1, 2, 1, 1, GOLDEN, "--context 2 --context-by ring", true,
     "\"partial outputs in bf16\""},
    {"context", 1, 2, 1, 2, GOLDEN,
     "--overlap 0 --context 2 --context-by ring --context-layout contiguous", false, NULL},
    {"context", 1, 3, 1, 1, GOLDEN, "--context 3 --context-by ring", true,
     "\"sends and receives that do not pair\", 3 ranks, 4 heads"},
    {"context", 1, 4, 1, 1, GOLDEN, "--context 2 --context-by ring", false, NULL},
    {"context", 1, 4, 1, 1, GOLDEN, "--recompute layer --context 2 --context-by ring", false,
     NULL},
    {"context", 1, 4, 1, 1, GOLDEN, "--recompute rest --context 2 --context-by ring", true, NULL},
    {"context", 1, 4, 1, 1, GOLDEN, "--recompute rest --context 2", false, NULL},
    {"context", 1, 4, 1, 4, GOLDEN, "--zero 0 --context 4 --context-by ring", false, NULL},
    // sharded: with one micro-batch the bits of the rows above
    {"fsdp", 1, 1, 1, 1, GOLDEN, "", true, NULL},
    {"fsdp", 1, 2, 1, 4, GOLDEN, "", true, NULL},
    {"fsdp", 1, 2, 1, 4, GOLDEN, "--shard 2 --overlap 0 --recompute layer", false, NULL},
    {"fsdp", 1, 8, 1, 1, GOLDEN, "--recompute gelu", true, NULL},
    {"fsdp", 1, 2, 1, 1, GOLDEN, "", true, NULL},
    {"fsdp", 1, 2, 1, 1, GOLDEN, "--shard 2 --recompute gelu", false, NULL},
    {"fsdp", 1, 2, 1, 1, GOLDEN, "--overlap 0", false, NULL},
    {"fsdp", 1, 4, 1, 1, GOLDEN, "--recompute layer", false, NULL},
    {"fsdp", 1, 4, 1, 1, GOLDEN, "--replicas 2", true, NULL},
    {"fsdp", 1, 4, 1, 1, GOLDEN, "--shard 2 --overlap 0 --recompute layer --replicas 2", false,
     NULL},
    {"fsdp", 1, 8, 1, 1, GOLDEN, "--recompute gelu --replicas 4", false, NULL},
    {"fsdp", 1, 2, 1, 1, GOLDEN, "--replicas 2", false, "each rank has the whole model"},
    {"_3d", 1, 2, 2, 1, SHARED, "", true, "\"tied-embedding order\""},
    {"_3d", 1, 2, 2, 1, SHARED, "--virtual 2", false, "\"p = 2 interleaved\""},
    {"_3d", 1, 2, 2, 1, SHARED, "--schedule gpipe --zero 0", false, NULL},
    {"_3d", 1, 2, 2, 1, SHARED, "--overlap 0 --recompute layer", false, NULL},
    {"zero_bubble", 1, 2, 2, 1, SHARED, "--schedule zb-h1", true, NULL},
    {"zero_bubble", 1, 2, 2, 1, SHARED, "--schedule zb-h1 --overlap 0 --zero 0", false, NULL},
    {"zero_bubble", 1, 2, 2, 1, SHARED, "--schedule zb-auto --recompute layer", false, NULL},
    {"v", 1, 2, 2, 1, SHARED, "--schedule dualpipe-v", true, NULL},
    {"v", 1, 2, 2, 1, SHARED, "--overlap 0 --zero 0 --recompute layer", false, NULL},
    {"_3d", 1, 2, 3, 1, SHARED, "", false, NULL},
    {"_3d", 1, 2, 4, 1, SHARED, "", false, NULL},
    {"_3d", 1, 2, 4, 1, SHARED, "--schedule gpipe", false, NULL},
    {"zero_bubble", 1, 2, 4, 1, SHARED, "--schedule zb-auto --zero 0", false, NULL},
    {"_3d", 1, 4, 2, 1, SHARED, "", false, NULL},
    {"_3d", 1, 4, 2, 1, SHARED, "--virtual 2 --zero 0", false, NULL},
    {"_3d", 2, 1, 1, 1, SHARED, "", false, NULL},
    {"_3d", 2, 1, 2, 1, SHARED, "", false, NULL},
    {"_3d", 2, 1, 3, 1, SHARED, "", false, NULL},
    {"_3d", 2, 1, 4, 1, SHARED, "", false, NULL},
    {"_3d", 2, 1, 4, 1, SHARED, "--sequence-parallel 1", false, NULL},
    {"_3d", 2, 2, 1, 1, SHARED, "", true, NULL},
    {"_3d", 2, 2, 1, 1, SHARED, "--zero 0 --recompute layer", false, NULL},
    {"_3d", 2, 2, 1, 1, SHARED, "--sequence-parallel 1", true, NULL},
    {"_3d", 2, 2, 1, 1, SHARED, "--sequence-parallel 1 --overlap 0", false, NULL},
    {"_3d", 2, 4, 1, 1, SHARED, "", false, NULL},
    {"_3d", 2, 4, 1, 1, SHARED, "--sequence-parallel 1", false, NULL},
    {"_3d", 2, 2, 2, 1, SHARED, "", true, "\"tied-embedding order\""},
    {"_3d", 2, 2, 2, 1, SHARED, "--virtual 2", true, NULL},
    {"_3d", 2, 2, 2, 1, SHARED, "--zero 0", false, NULL},
    {"_3d", 2, 2, 2, 1, SHARED, "--schedule gpipe --overlap 0", false, NULL},
    {"_3d", 2, 2, 2, 1, SHARED, "--recompute layer", false, NULL},
    {"_3d", 2, 2, 2, 1, SHARED, "--recompute layer", true, NULL},
    {"_3d", 2, 2, 2, 1, SHARED, "--order ptd", false, NULL},
    {"_3d", 2, 2, 2, 1, SHARED, "--layers-per-stage 1,3", true, NULL},
    {"_3d", 2, 2, 2, 1, SHARED, "--sequence-parallel 1", false, "\"layernorm drift\""},
    {"_3d", 2, 2, 2, 1, SHARED, "--sequence-parallel 1 --virtual 2", true, NULL},
    {"_3d", 2, 2, 2, 1, SHARED, "--sequence-parallel 1 --zero 0 --overlap 0", false, NULL},
    {"_3d", 2, 2, 2, 1, SHARED, "--sequence-parallel 1 --recompute gelu", false, NULL},
    {"zero_bubble", 2, 2, 2, 1, SHARED, "--schedule zb-auto", true, NULL},
    {"zero_bubble", 2, 2, 2, 1, SHARED, "--sequence-parallel 1 --schedule zb-h1 --overlap 0",
     false, NULL},
    {"zero_bubble", 2, 2, 2, 1, SHARED,
     "--sequence-parallel 1 --schedule zb-auto --zero 0 --recompute gelu", false, NULL},
    {"v", 2, 2, 2, 1, SHARED, "--sequence-parallel 1 --schedule v-half", true, NULL},
    {"_3d", 2, 2, 2, 2, SHARED, "--sequence-parallel 1 --virtual 2", false, NULL},
    {"_3d", 4, 1, 1, 1, SHARED, "", false, NULL},
    {"_3d", 4, 1, 2, 1, SHARED, "", false, NULL},
    {"_3d", 4, 1, 2, 1, SHARED, "--sequence-parallel 1 --virtual 2", false, NULL},
    {"_3d", 4, 2, 1, 1, SHARED, "", false, NULL},
    {"_3d", 4, 2, 1, 1, SHARED, "--sequence-parallel 1", true, NULL},
    // layouts for which the golden model is too small
    {"", 1, 1, 1, 1, WIDE, "", true, "\"T < max T\""},
    {"_3d", 1, 1, 5, 1, WIDE, "", false, "\"dropped layers\""},
    {"_3d", 1, 1, 6, 1, WIDE, "", false, "\"dropped layers\""},
    {"_3d", 1, 1, 7, 1, WIDE, "", false, "\"dropped layers\""},
    {"_3d", 1, 1, 8, 1, WIDE, "", false, "\"dropped layers\""},
    {"_3d", 1, 1, 8, 1, WIDE, "--schedule gpipe --recompute layer", false, NULL},
    {"_3d", 1, 1, 4, 1, WIDE, "--virtual 2", false, "\"dropped layers\""},
    {"_3d", 1, 1, 2, 1, WIDE, "--virtual 4", true, "\"p = 2 interleaved\""},
    {"_3d", 1, 1, 2, 1, WIDE, "--virtual 2 --layers-per-stage 6,3", false, "\"dropped layers\""},
    {"_3d", 1, 1, 4, 1, WIDE, "--layers-per-stage 1,5,2,1 --recompute layer", false,
     "\"dropped layers\""},
    {"v", 1, 1, 3, 1, WIDE, "--layers-per-stage 3,2,4", false, "\"dropped layers\""},
    {"v", 1, 1, 4, 1, WIDE, "--schedule dualpipe-v", false, "\"dropped layers\""},
    {"v", 2, 1, 4, 1, WIDE, "--sequence-parallel 1 --schedule v-half", false, NULL},
    {"_tp", 8, 1, 1, 1, WIDE, "", false, NULL},
    {"_tp", 8, 1, 1, 1, WIDE, "--sequence-parallel 1", true, "\"gathered logits\""},
    {"_3d", 8, 1, 1, 1, WIDE, "--recompute layer", false, NULL},
    {"context", 1, 8, 1, 1, WIDE, "--context 8", false, "T = 2c"},
    {"context", 1, 8, 1, 1, WIDE, "--context 8 --context-by ring", false, "T = 2c"},
    {"_3d", 2, 2, 2, 1, WIDE, "--sequence-parallel 1 --virtual 4", true, "\"T < max T\""},
    {"", 1, 1, 1, 1, WIDE_24, "", false, NULL},
    {"_3d", 1, 3, 1, 1, WIDE_24, "", false, NULL},
    {"_3d", 1, 3, 1, 1, WIDE_24, "--zero 0", false, NULL},
    {"data", 1, 3, 1, 1, WIDE_24, "", false, NULL},
    {"fsdp", 1, 3, 1, 8, WIDE_24, "", false, NULL},
    {"fsdp", 1, 3, 1, 1, WIDE_24, "--recompute layer", false, NULL},
    {"_3d", 1, 3, 2, 1, WIDE_24, "--virtual 2", false, NULL},
    {"_3d", 2, 3, 1, 1, WIDE_24, "--sequence-parallel 1", false, NULL},
    {"_3d", 1, 6, 1, 1, WIDE_24, "", true, NULL},
    {"_3d", 1, 2, 3, 1, WIDE_24, "--virtual 3", false, NULL},
    {"", 1, 1, 1, 1, WIDE_10, "", false, NULL},
    {"_3d", 1, 5, 1, 1, WIDE_10, "", false, NULL},
    {"", 1, 1, 1, 1, WIDE_14, "", false, NULL},
    {"_3d", 1, 7, 1, 1, WIDE_14, "", false, NULL},
    // activations on the host: the bits of the first rows
    {"offload", 1, 1, 1, 1, GOLDEN, "--offload 0", true, NULL},
    {"offload", 1, 1, 1, 4, GOLDEN, "--offload 0.25", false, NULL},
    {"offload", 1, 1, 1, 1, GOLDEN, "--offload 0.5 --recompute gelu", true, NULL},
    {"offload", 1, 1, 1, 4, GOLDEN, "--offload 1", true, "\"stream race\""},
    {"offload", 1, 1, 1, 8, GOLDEN, "--offload auto", false, NULL},
    {"offload", 1, 1, 1, 1, WIDE, "--offload 0.6", false, "two buffers for 9 layers"},
    // --dropout: the masks of the reference, whatever the layout is
    {"", 1, 1, 1, 1, DROPOUT, "", true, NULL},
    {"offload", 1, 1, 1, 1, DROPOUT, "--offload 0.5", true, "\"masks of the wrong tokens\""},
    {"offload", 1, 1, 1, 1, DROPOUT, "--offload 0 --recompute gelu", false, NULL},
    {"", 1, 1, 1, 1, DROPOUT, "--recompute layer", true, NULL},
    {"", 1, 1, 1, 1, DROPOUT, "--recompute gelu", false, NULL},
    {"", 1, 1, 1, 4, DROPOUT, "", false, NULL},
    {"_tp", 4, 1, 1, 1, DROPOUT, "", false, NULL},
    {"_tp", 2, 1, 1, 2, DROPOUT, "--sequence-parallel 1 --recompute layer", true, NULL},
    {"zero_bubble", 1, 1, 2, 1, DROPOUT, "--schedule zb-h1", false, NULL},
    {"v", 2, 1, 2, 1, DROPOUT, "--schedule v-half", false, NULL},
    {"_pp", 1, 1, 4, 2, DROPOUT, "--schedule gpipe --recompute layer", false, NULL},
    {"_3d", 1, 4, 1, 2, DROPOUT, "", false, NULL},
    {"data", 1, 4, 1, 2, DROPOUT, "--recompute layer", false, NULL},
    {"context", 1, 4, 1, 1, DROPOUT, "--context 4 --context-layout contiguous", false,
     "\"positions of a part\""},
    {"context", 1, 2, 1, 2, DROPOUT, "--recompute layer --context 2", true,
     "\"positions of a part\""},
    {"context", 1, 2, 1, 1, DROPOUT_LONG, "--context 2 --context-by ring", true,
     "\"positions of a part\""},
    {"context", 1, 2, 1, 1, DROPOUT_LONG, "--recompute rest --context 2 --context-by ring", false,
     NULL},
    {"context", 1, 4, 1, 1, DROPOUT_LONG,
     "--context 4 --context-by ring --context-layout contiguous", false, NULL},
    {"fsdp", 1, 4, 1, 2, DROPOUT, "--recompute layer", false, NULL},
    {"fsdp", 1, 2, 1, 1, DROPOUT, "", false, NULL},
    {"fsdp", 1, 2, 1, 1, DROPOUT, "--shard 2 --recompute layer", false, NULL},
    {"_3d", 2, 2, 2, 1, DROPOUT, "--virtual 2", false, NULL},
    {"zero_bubble", 2, 2, 2, 2, DROPOUT, "--sequence-parallel 1 --schedule zb-auto --overlap 0",
     false, NULL},
    {"", 1, 1, 1, 2, DROPOUT_ODD, "", false, NULL},
    {"_tp", 2, 1, 1, 2, DROPOUT_ODD, "", false, NULL},
};

// An open fixture, and the results of its runs.
typedef struct {
    Reference ref;
    Expected want;
    Training h;
    char flags[ARG_BYTES], between[192];  // between: for validation and samples
    double *one_rank;                     // gradients of the first row; NULL before
} Case;

// Rows of a family must have the same bits, whatever else they do differently. A family has the
// same case, t, d, micro-batch, sequence and context parallelism and replicas, and all rows have
// stages or none has. With and without stages, losses and gradients of the first step are the
// same but for the tied embedding. Its two gradients are added in another order. train_fsdp sums
// over the ranks before it adds micro-batches: with several of each it is a family of its own.
typedef struct {
    int fixture, t, d, micro;
    bool sp, ranks_first;
    int stages;  // 0: one, 1: several, 2: a V, whose wte is summed on one stage
    const char *groups;  // its flags from --context or --replicas on, or ""
    size_t row;  // whose run is kept in folder family-ROW
    Log log;
    double *gradients;
} Family;

enum { MAX_ROWS = 256 };

typedef struct {
    Case cases[NUM_FIXTURES];
    size_t rows, families;
    char names[MAX_ROWS][128];
    Errors errors[MAX_ROWS];
    Family family[MAX_ROWS];
} Matrix;

static void open_case(const Context *x, Case *c, int fixture) {
    const Fixture *f = &FIXTURES[fixture];
    char model[32] = "golden", shard[32] = "golden/train.bin";
    if (fixture == GOLDEN) {
        c->h = x->training;
        c->h.steps = f->steps;
        c->ref = reference_copy(&x->golden);
        c->want = reference_train(&c->ref, &c->h, x->tokens, x->bf16);
    } else {
        Training h = {f->T, f->global, f->steps, 1e-4, 0.1, 1.0, 0.9, 0.95, 1e-8, f->dropout};
        size_t count = f->T * f->global * f->steps + 1;
        int *tokens = random_tokens(count, f->V, 31);
        snprintf(model, sizeof model, "model-%d", fixture);
        snprintf(shard, sizeof shard, "shard-%d.bin", fixture);
        c->h = h;
        c->ref = random_model(f->L, f->C, f->NH, f->V, f->maxT, 0.2, 30);
        write_model(model, &c->ref.table, c->ref.params, INTACT);
        write_shard(shard, 20240520, 1, (int)count, tokens, count);
        c->want = reference_train(&c->ref, &h, tokens, x->bf16);
        free(tokens);
    }
    training_flags(c->flags, &c->h, model, shard);
    snprintf(c->between, sizeof c->between,
             "--val-data %s --val-every 3 --val-batches 1 --sample-every 3 "
             "--sample-tokens 1 --prompt ~ --tokenizer letters.json",
             shard);
    write_letters("letters.json");
}

// Returns true if all gradients have the same bits. Skips the tied embedding if it may
// differ.
static bool same_gradients(const ParamTable *table, const double *a, const double *b, bool tied) {
    const Tensor *wte = table_find(table, WTE, 0);
    size_t end = wte->offset + wte->size;
    return (!tied || memcmp(a, b, end * sizeof(double)) == 0) &&
           memcmp(a + end, b + end, (table->total - end) * sizeof(double)) == 0;
}

// Compares the run in "out" with its family, and prints the row that it was compared
// with. The first run of a family begins it.
static bool compare_bits(Matrix *m, const Row *row, const ParamTable *table, const Log *log,
                         double *gradients, char says[48]) {
    bool sp = row->t > 1 && strstr(row->flags, "--sequence-parallel 1");
    const char *groups = strstr(row->flags, "--context");
    if (!groups) groups = strstr(row->flags, "--replicas");
    bool several = m->cases[row->fixture].h.global_batch > (size_t)(row->d * row->micro);
    bool ranks_first = strcmp(row->trainer, "fsdp") == 0 && row->d > 1 && several;
    bool folded = strcmp(row->trainer, "v") == 0 && (row->p == 1 || row->d > 1);
    Family mine = {row->fixture, row->t,      row->d,
                   row->micro,   sp,          ranks_first,
                   folded ? 2 : row->p > 1,   groups ? groups : "",
                   m->rows,      *log,        gradients};
    const Family *same = NULL, *other = NULL;
    char step[48], kept[96];
    for (size_t i = 0; i < m->families; i++) {
        const Family *f = &m->family[i];
        if (f->fixture != mine.fixture || f->t != mine.t || f->d != mine.d ||
            f->micro != mine.micro || f->sp != mine.sp || f->ranks_first != mine.ranks_first ||
            strcmp(f->groups, mine.groups) != 0)
            continue;
        *(f->stages == mine.stages ? &same : &other) = f;
    }
    snprintf(step, sizeof step, "out/step-%08zu", m->cases[row->fixture].h.steps);
    if (same) {
        snprintf(says, 48, "%zu", same->row);
        snprintf(kept, sizeof kept, "family-%zu/%s", same->row, step + 4);
        return same_log(log, &same->log) &&
               same_gradients(table, gradients, same->gradients, true) &&
               same_checkpoint(step, kept);
    }
    snprintf(kept, sizeof kept, "family-%zu", m->rows);
    if (rename("out", kept)) return false;
    m->family[m->families++] = mine;
    snprintf(says, 48, "-");
    if (!other) return true;
    snprintf(says, 48, "%zu but wte", other->row);
    return log->loss[0] == other->log.loss[0] &&
           same_gradients(table, gradients, other->gradients, false);
}

// Writes the flags of a row's trainer and grid, and its name in the table.
static void row_flags(const Row *row, char flags[192], char name[128]) {
    bool one = !*row->trainer || strcmp(row->trainer, "offload") == 0;
    bool pp = strcmp(row->trainer, "_pp") == 0;
    bool dp = !one && !pp && strcmp(row->trainer, "_tp") != 0;
    bool alone = one || is_data_lesson(row->trainer);
    size_t used = (size_t)snprintf(flags, 192, "--micro-batch %d %s", row->micro, row->flags);
    if (!alone) used += (size_t)snprintf(flags + used, 192 - used, " --tensor %d", row->t);
    if ((pp || dp) && !alone)
        used += (size_t)snprintf(flags + used, 192 - used, " --pipeline %d", row->p);
    if (dp) snprintf(flags + used, 192 - used, " --data %d", row->d);
    const char *shown = *row->trainer ? row->trainer + (*row->trainer == '_') : "gpt";
    snprintf(name, 128, "%-4s %dx%dx%d of %d %s", shown, row->t, row->d, row->p, row->micro,
             row->flags);
}

// Returns true if a run with messages launched all its kernels before training began. Prints the
// first that it did not: on a GPU its loading may hang beside a message. Two are excused, as no
// message is in flight then. AdamW comes behind the norm. A sample synchronises before its
// products, which have shapes of their own.
static bool kernels_are_warm(const char *err) {
    static const char LATE[] = "first use after the warm-up: ";
    bool excused = false;  // AdamW must be there, or nothing has been listed
    for (const char *at = strstr(err, LATE); at; at = strstr(at, LATE)) {
        at += strlen(LATE);
        int length = (int)strcspn(at, "\n");
        bool adamw = strncmp(at, "adamw_kernel", (size_t)length) == 0;
        excused = excused || adamw;
        if (adamw || strncmp(at, "a matrix product", 16) == 0) continue;
        printf("     first use after the warm-up: %.*s\n", length, at);
        return false;
    }
    return excused;
}

// Runs one layout: one check, which is one row of the table.
static void run_row(Context *x, Matrix *m, const Row *row) {
    char trainer[32], flags[192], *name = m->names[m->rows], path[64], bits[48] = "";
    Layout layout = {trainer, row->t * row->d * row->p, flags};
    if (layout.ranks > max_ranks(x) || (x->bf16 && !row->bf16) || m->rows == MAX_ROWS) return;
    // A product of fewer rows may have another algorithm on a GPU, and so other bits.
    if (on_gpu(x) && strstr(row->flags, "--offload 0")) return;
    Case *c = &m->cases[row->fixture];
    if (!c->want.weights) open_case(x, c, row->fixture);
    const ParamTable *table = &c->ref.table;
    trainer_program(trainer, sizeof trainer, row->trainer);
    row_flags(row, flags, name);
    remove_tree("out");
    // The warm-up must also load the kernels of validation and samples, which change none of the
    // compared numbers. Larger models have the same kernels.
    bool messages = row->p > 1 || strstr(row->flags, "--context");
    bool between = messages && (row->fixture <= SHARED || c->h.dropout > 0.0);
    Setting listed = {"CPU_FIRST_USES=1", 0};
    Outcome o = run(x->build, &layout, listed,
                    "%s --log log --dump-gradients gradients --out out %s", c->flags,
                    between ? c->between : "");
    bool warm = !messages || on_gpu(x) || kernels_are_warm(o.err);
    bool ok = succeeded(&o) && warm;

    double *got = allocate(table->total * sizeof(double));
    Measured r = measure_run(table, &c->want, c->h.steps, got);
    Bounds bound = bounds_with(x, &table->config, c->h.dropout > 0.0);
    snprintf(path, sizeof path, "out/step-%08zu/model.safetensors", c->h.steps);
    Errors weights = state_errors(table, path, "", c->want.weights);
    bool close = within(&r, &bound) && weights.worst <= bound.weight &&
                 weights.whole <= bound.weights;
    if (!c->one_rank) c->one_rank = got;
    const Tensor *worst = &table->tensors[r.gradients.tensor];
    double alone = tensor_error(worst, c->one_rank, c->want.gradients);

    Log log = read_log("log");
    size_t families = m->families;
    bool same = ok && r.complete && compare_bits(m, row, table, &log, got, bits);
    m->errors[m->rows] = r.gradients;
    check(&x->check, ok && close && same,
          "%3zu %-58s %7.1e %7.1e %-22s %7.1e %7.1e %7.1e %7.1e %7.1e %-11s%s", m->rows, name,
          r.gradients.worst, alone, worst->name, r.gradients.whole, r.loss, r.norm, weights.worst,
          weights.whole, bits, row->bug ? row->bug : "");
    if (!close) printf("     not within the bounds\n");
    else if (!same) printf("     its bits are not those of row %s\n", bits);
    if (m->families == families && c->one_rank != got) free(got);
    remove("log");
    remove("gradients");
    m->rows++;
}

static Matrix *matrix_begin(const Context *x) {
    prefer_plain_kernels();
    Bounds b = bounds(x, &x->golden.config);
    printf(
        "     Each layout against the reference: relative error (L2) of its worst gradient "
        "tensor, that of one rank "
        "in\n     the same tensor, of all gradients together, of losses, of norms, of the worst "
        "weight tensor after "
        "the\n     updates and of all weights together. With 4 layers %.1e, that, %.1e, %.1e, "
        "%.1e, %.1e, %.1e are "
        "allowed.\n     bits: the row that has the same, \"but wte\" where the tied embedding "
        "may differ.\n",
        b.gradient, b.gradients, b.loss, b.norm, b.weight, b.weights);
    printf("     %3s %-58s %7s %7s %-22s %7s %7s %7s %7s %7s %s\n", "row",
           "t x d x p of micro-batch, flags", "worst", "1 rank", "tensor", "all", "losses",
           "norms", "worst", "weights", "bits");
    return allocate(sizeof(Matrix));
}

static void matrix_end(const Context *x, Matrix *m) {
    double bound = bounds(x, &x->golden.config).gradient;
    print_errors_head(bound);
    for (size_t i = 0; i < m->rows; i++) print_errors(m->names[i], &m->errors[i], bound);
    printf("     %zu layouts\n", m->rows);
    for (int i = 0; i < NUM_FIXTURES; i++) {
        if (!m->cases[i].want.weights) continue;
        reference_free(&m->cases[i].ref);
        expected_free(&m->cases[i].want);
    }
    for (size_t i = 0; i < m->families; i++) {
        char kept[48];
        snprintf(kept, sizeof kept, "family-%zu", m->family[i].row);
        remove_tree(kept);
        free(m->family[i].gradients);
    }
    free(m);
}

// Lists that no schedule by name makes, for 2 stages and 8 micro-batches. The first has whole
// backwards on stage 0 and split ones on stage 1. The second is interleaved 1F1B with split
// backwards. Stage 0 runs weight steps at once, stage 1 all of them at the end.
static const char HALVES_OF_ONE[] =
    "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7; F0 B0 F1 B1 F2 W0 B2 F3 B3 F4 B4 F5 B5 F6 "
    "W1 B6 F7 B7 W2 "
    "W3 W4 W5 W6 W7";
static const char CHUNKS[] =
    "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 W0.1 F3.0 B1.1 W1.1 F2.1 B0.0 W0.0 F3.1 B1.0 W1.0 F4.0 B2.1 "
    "W2.1 F5.0 B3.1 "
    "W3.1 F4.1 B2.0 W2.0 F5.1 B3.0 W3.0 F6.0 B4.1 W4.1 F7.0 B5.1 W5.1 F6.1 B4.0 W4.0 F7.1 B5.0 "
    "W5.0 B6.1 W6.1 "
    "B7.1 W7.1 B6.0 W6.0 B7.0 W7.0; F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 "
    "F3.1 B3.1 F4.0 "
    "B2.0 F5.0 B3.0 F4.1 B4.1 F5.1 B5.1 F6.0 B4.0 F7.0 B5.0 F6.1 B6.1 F7.1 B7.1 B6.0 B7.0 W0.1 "
    "W1.1 W0.0 W1.0 "
    "W2.1 W3.1 W2.0 W3.0 W4.1 W5.1 W4.0 W5.0 W6.1 W7.1 W6.0 W7.0";

static const char IN_A_V[] = "F0.0 F1.0 F0.1 B0.1 F1.1 B0.0 B1.1 B1.0; "
                             "F0.0 F1.0 F0.1 F1.1 B0.1 W0.1 B0.0 B1.1 B1.0 W1.1 W0.0 W1.0";

static void group_layouts(Context *x) {
    write_file("halves-of-one.txt", HALVES_OF_ONE, strlen(HALVES_OF_ONE));
    write_file("chunks.txt", CHUNKS, strlen(CHUNKS));
    write_file("v.txt", IN_A_V, strlen(IN_A_V));
    Matrix *m = matrix_begin(x);
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) run_row(x, m, &ROWS[i]);
    matrix_end(x, m);
}

// Compares every p, v and m of the list, with one tensor rank and two, with the same
// micro-batches without stages.
static void group_pipeline(Context *x) {
    static const int STAGES[] = {2, 3, 4, 6, 8};
    Matrix *m = matrix_begin(x);
    for (int t = 1; t <= 2; t++) {
        for (int micros = 1; micros <= 24; micros++) {
            bool first = true;
            for (int i = 0; i < 5; i++) {
                int p = STAGES[i], rounds = micros == 1 ? 0 : micros % p == 0 ? micros / p : -1;
                if (t * p > 8 || rounds < 0 || rounds > 3 || ((t == 2 || x->bf16) && rounds != 2))
                    continue;
                if (x->bf16 && p % 3 == 0)
                    continue;  // how layers divide does not depend on the precision
                Row row = {t == 1 ? "" : "_tp", t, 1, 1, 144 / micros, DEEP, "", true, NULL};
                if (first) run_row(x, m, &row);
                first = false;
                row.trainer = "_pp";
                row.p = p;
                run_row(x, m, &row);
                row.flags = "--schedule gpipe";
                if (rounds == 2) run_row(x, m, &row);
                row.flags = "--virtual 2";
                if (rounds) run_row(x, m, &row);
                row.flags = "--virtual 3";
                if (rounds) run_row(x, m, &row);
            }
        }
    }
    matrix_end(x, m);
}

// ---- main ------------------------------------------------------------------------------

static const Group GROUPS[] = {
    {"reference", group_reference},  // the reference itself, no trainer
    {"golden", group_golden},        // one rank against the golden case
    {"shapes", group_shapes},        // odd sizes against the reference
    {"bits", group_bits},            // what must not change a single bit
    {"resume", group_resume},        // stopping and going on
    {"reports", group_reports},      // validation, samples, schedules, trace, help
    {"refusals", group_refusals},    // bad input
    {"failures", group_failures},    // full disk, NaN, signals
    // Every layout against the reference, and the bits that it must share.
    {"layouts", group_layouts},
    // The same for stages, chunks and micro-batches, systematically.
    {"pipeline", group_pipeline},
};

int main(int argc, char **argv) {
    static Context context;
    return test_trainers(&context, GROUPS, sizeof GROUPS / sizeof *GROUPS, argc, argv);
}
