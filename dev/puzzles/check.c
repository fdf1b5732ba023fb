// check.c: checks an answer to a puzzle: `check PUZZLE COPY PROGRAMS [--exact] [--level N]`.
// PUZZLE is its folder in dev/puzzles, COPY the learner's folder, PROGRAMS the folder of the built
// trainers. Runs the levels of PUZZLE/check.txt (README.md has its format), prints its findings,
// and ends with a line `stars N of M`. Stops behind the first level that fails. The exit code is 0
// with all stars, else 1.
//
// dev/test/run_puzzles.sh makes stricter calls. With --exact a budget must equal the answer's own
// number. --level N runs that level alone, up to its first line that is wrong.
#define _GNU_SOURCE
#define TIME_LIMIT 60
#include "dev/test/compare_runs.h"

enum { MAX_NAME = 80, MAX_RUNS = 64, STEPS = 3 };

// Prints to out, in which all of it must have room. Returns how much that is.
__attribute__((format(printf, 3, 4))) static size_t print_to(char *out, size_t size,
                                                             const char *format, ...) {
    va_list values;
    va_start(values, format);
    int used = vsnprintf(out, size, format, values);
    va_end(values);
    if (used < 0 || (size_t)used >= size) die("too long:", out);
    return (size_t)used;
}

// Returns the next line of a text, or NULL.
static const char *next_line(const char *at) {
    const char *end = strchr(at, '\n');
    return end ? end + 1 : NULL;
}

// ---- tensors by name -------------------------------------------------------------------

typedef struct {
    char name[MAX_NAME];
    size_t at, count;  // elements of values
} Named;

typedef struct {
    size_t count;
    Named *list;
    double *values;
} Tensors;

static Tensors tensors_of(const ParamTable *table, const double *values) {
    Tensors t = {table->count, allocate(table->count * sizeof(Named)),
                 allocate(table->total * sizeof(double))};
    memcpy(t.values, values, table->total * sizeof(double));
    for (size_t i = 0; i < t.count; i++) {
        const Tensor *x = &table->tensors[i];
        print_to(t.list[i].name, MAX_NAME, "%s", x->name);
        t.list[i].at = x->offset;
        t.list[i].count = x->rows * x->cols;
    }
    return t;
}

// Reads all tensors of a safetensors file. Returns none if it cannot be read.
static Tensors tensors_read(const char *path) {
    Tensors t = {0, NULL, NULL};
    SafeTensors file;
    Error err;
    if (!st_open(&file, path, O_RDONLY, &err)) return t;
    size_t total = 0;
    for (size_t i = 0; i < file.count; i++)
        total += file.entries[i].count;
    t.list = allocate(file.count * sizeof(Named));
    t.values = allocate(total * sizeof(double));
    float *floats = allocate(total * sizeof(float));
    size_t at = 0;
    bool ok = true;
    for (size_t i = 0; i < file.count && ok; i++) {
        const STEntry *x = &file.entries[i];
        ok = st_read_floats(&file, x, 0, x->count, floats + at, &err);
        print_to(t.list[i].name, MAX_NAME, "%s", x->name);
        t.list[i].at = at;
        t.list[i].count = x->count;
        at += x->count;
    }
    for (size_t i = 0; i < total; i++)
        t.values[i] = floats[i];
    if (ok) t.count = file.count;
    free(floats);
    st_close(&file);
    return t;
}

static void tensors_free(Tensors *t) {
    free(t->list);
    free(t->values);
}

static const Named *tensors_find(const Tensors *t, const char *name) {
    for (size_t i = 0; i < t->count; i++) {
        if (strcmp(t->list[i].name, name) == 0) return &t->list[i];
    }
    return NULL;
}

// Writes the name with a star for the layer's number: tensors of one kind have one name.
static void kind_of(char kind[MAX_NAME], const char *name) {
    int skip = 0;
    if (sscanf(name, "h.%*d.%n", &skip) == 0 && skip > 0)
        print_to(kind, MAX_NAME, "h.*.%s", name + skip);
    else
        print_to(kind, MAX_NAME, "%s", name);
}

static int layer_of(const char *name) {
    int layer = -1;
    sscanf(name, "h.%d.", &layer);
    return layer;
}

// Returns the place of a tensor in the order in which backward makes the gradients: a wrong one
// makes those behind it wrong.
static int backward_place(const char *name) {
    static const char *const LAYER[] = {"mlp.c_proj.weight",  "mlp.c_proj.bias",   "mlp.c_fc.bias",
                                        "mlp.c_fc.weight",    "mlp.",              "ln_2.",
                                        "attn.c_proj.weight", "attn.c_proj.bias",
                                        "attn.c_attn.weight",
                                        "attn.c_attn.bias",   "attn.",             "ln_1."};
    enum { PARTS = sizeof LAYER / sizeof *LAYER };
    int layer = layer_of(name), part = 0;
    if (strncmp(name, "ln_f.", 5) == 0) return 0;
    if (layer < 0) return 1 << 20;
    while (part < PARTS && !strstr(name, LAYER[part]))
        part++;
    return 1 + (9999 - layer) * (PARTS + 1) + part;
}

// ---- fixtures --------------------------------------------------------------------------

// A model, its data and the results of STEPS steps. The reference in fp64 makes the results; of
// "own", the program itself on the layout that check.txt names first.
typedef struct {
    const char *name;
    bool made;
    Reference ref;
    Training training;
    char flags[ARG_BYTES];
    double losses[STEPS], norms[STEPS];
    Tensors gradients;
    double bound;  // of the worst tensor's relative error, as of losses and norms
    size_t steps;  // that are compared: rounding grows from step to step where scores are large
} Fixture;

static Fixture fixtures[] = {{.name = "golden", .bound = 2e-6, .steps = STEPS},
                             {.name = "wide", .bound = 2e-6, .steps = STEPS},
                             {.name = "large", .bound = 1e-2, .steps = 1},
                             {.name = "ramp", .bound = 2e-6, .steps = STEPS},
                             {.name = "own", .bound = 2e-6, .steps = STEPS}};

typedef struct {
    Context golden;             // the golden model, its tokens, and `temp`
    char puzzle[PATH_MAX], copy[PATH_MAX], root[PATH_MAX];
    char programs[MAX_RUNS][MAX_NAME];
    size_t program_count;
    char knocked[MAX_RUNS][MAX_NAME];  // tensors that are set to 0 if forward is wrong
    size_t knocked_count;
    bool exact;
    int only;  // the one level that is run; 0: all
} Puzzle;

static void fixture_reference(Fixture *f, const int *tokens, const char *model,
                              const char *shard) {
    f->training.steps = STEPS;
    Reference ref = reference_copy(&f->ref);
    Expected e = reference_train(&ref, &f->training, tokens, false);
    for (size_t s = 0; s < STEPS; s++) {
        f->losses[s] = e.losses[s];
        f->norms[s] = e.norms[s];
    }
    f->gradients = tensors_of(&f->ref.table, e.gradients);
    training_flags(f->flags, &f->training, model, shard);
    expected_free(&e);
    reference_free(&ref);
}

//   golden  4 layers, 4 heads, 32 channels, vocabulary 61, 8 sequences of 24 tokens.
//   wide    2 layers, 8 heads and a vocabulary of 200. Of 2 and 4 tensor ranks each has a part of
//           it. The last of 8 ranks has padding alone.
//   large   Golden with scores so large that exp() overflows unless it is shifted.
//   ramp    Golden while the batch grows. Its steps have half of the largest batch's sequences.
static Fixture *fixture_make(Puzzle *p, const char *name) {
    Fixture *f = NULL;
    for (size_t i = 0; i < sizeof fixtures / sizeof *fixtures; i++) {
        if (strcmp(fixtures[i].name, name) == 0) f = &fixtures[i];
    }
    if (!f || f->made) return f;
    f->made = true;
    f->training = p->golden.training;
    if (strcmp(name, "own") == 0) {
        print_to(f->flags, sizeof f->flags,
                 "--train-data golden/train.bin --shuffle 0 --seq 24 --global-batch 8 --steps %d "
                 "--lr 1e-3 --lr-final 1 --warmup 0 --clip 1 --val-every 0",
                 STEPS);
    } else if (strcmp(name, "wide") == 0) {
        f->ref = random_model(2, 32, 8, 200, 24, 0.2, 30);
        f->training.seq = 24;
        f->training.global_batch = 8;
        int count = STEPS * 8 * 24 + 1;
        int *tokens = random_tokens((size_t)count, 200, 31);
        write_shard("wide.bin", 20240520, 1, count, tokens, (size_t)count);
        write_model("wide", &f->ref.table, f->ref.params, INTACT);
        fixture_reference(f, tokens, "wide", "wide.bin");
        free(tokens);
    } else {
        bool large = strcmp(name, "large") == 0;
        f->ref = reference_copy(&p->golden.golden);
        for (size_t l = 0; l < f->ref.config.L && large; l++) {
            const Tensor *x = table_find(&f->ref.table, QKVW, l);
            for (size_t i = 0; i < x->size; i++)
                f->ref.params[x->offset + i] = (float)(20 * f->ref.params[x->offset + i]);
        }
        if (large) write_model("large", &f->ref.table, f->ref.params, INTACT);
        bool ramp = strcmp(name, "ramp") == 0;
        if (ramp) f->training.global_batch /= 2;
        fixture_reference(f, p->golden.tokens, large ? "large" : "golden", "golden/train.bin");
        if (ramp) {
            char *flags =
                replaced(f->flags, "--global-batch 4", "--global-batch 8 --ramp 4,4,1000");
            print_to(f->flags, sizeof f->flags, "%s", flags);
            free(flags);
        }
    }
    return f;
}

// ---- one run ---------------------------------------------------------------------------

// A line of check.txt that starts a program: FIXTURE [PROGRAM] RANKS FLAGS [: ENVIRONMENT].
typedef struct {
    Fixture *fixture;
    char program[MAX_NAME], flags[ARG_BYTES], env[ARG_BYTES];
    int ranks;
} RunLine;

// The result of a run.
typedef struct {
    bool ended;              // with exit code 0, all steps and all tensors
    char why[2048];          // else: its message
    bool right;
    double loss[STEPS];      // relative errors
    double norm[STEPS];      // ratios to the right ones
    size_t wrong, total;     // tensors
    const Named *first;      // the first wrong one in backward's order
    double factor, rest;     // of it: got = factor * want + rest
    double from, to;         // of it: the shares between which elements are wrong
    bool alike;              // all wrong ones have this factor and no rest
    size_t zeros;            // wrong ones that are all zeros
    bool *bad;               // [total]
    char note[256];          // whose gradient it is, if the checker knows
} Found;

// Adds a line of a program's output to its message, cut at the first semicolon or at 90 columns.
static void add_line(char *out, size_t size, const char *line, size_t length) {
    char copy[512];
    size_t semicolon = 0, used = strlen(out);
    while (semicolon < length && line[semicolon] != ';')
        semicolon++;
    if (semicolon < length) length = semicolon;
    if (length > 90) length = 90;
    print_to(copy, sizeof copy, "\n      %.*s", (int)length, line);
    if (!strstr(out, copy) && used + strlen(copy) < size) strcat(out, copy);
}

// Writes why a run has not ended well: the lines of the stall report, one for each operation that
// waits, or the first error.
static void message_of(char *out, size_t size, const Outcome *o) {
    *out = 0;
    if (o->code == TIMED_OUT) {
        print_to(out, size, "it did not end within %d s", TIME_LIMIT);
        return;
    }
    const char *error = NULL;
    size_t lines = 0;
    for (const char *at = o->err; at && *at; at = next_line(at)) {
        size_t length = strcspn(at, "\n");
        const char *waits = strstr(at, " waits in ");
        if (waits && waits < at + length && lines < 8) {
            if (lines++ == 0) print_to(out, size, "it hangs");
            add_line(out, size, at, length);
        } else if (!error && strncmp(at, "error: ", 7) == 0) {
            error = at;
        }
    }
    if (lines > 0) return;
    if (error) {
        print_to(out, size, "it ended early");
        add_line(out, size, error, strcspn(error, "\n"));
    } else if (o->code == KILLED || o->code > 128 || strstr(o->err, "signal")) {
        print_to(out, size, "it crashed (a signal ended it); gdb shows where");
    } else {
        print_to(out, size, "exit code %d: %.90s", o->code, o->err);
    }
}

// Runs a line. A busy machine may stand still for some seconds, which is no deadlock.
static Outcome run_start(const Puzzle *p, const RunLine *r, const char *env, const char *flags) {
    Layout layout = {r->program, r->ranks, flags};
    char all[ARG_BYTES + 256];
    print_to(all, sizeof all,
             "%s OMPI_MCA_odls_base_sigkill_timeout=0 CPU_STALL_SECONDS=8 OMP_NUM_THREADS=1", env);
    Setting setting = {all, 0};
    return run(p->golden.build, &layout, setting, "%s", "");
}

// The micro-batch is 2 unless a line of check.txt says another.
static const char *micro_batch(const RunLine *r) {
    return strstr(r->flags, "--micro-batch ") ? "" : "--micro-batch 2";
}

// Compares the tensors of a dump with the right ones.
static void compare_gradients(Found *x, const Tensors *want, const Tensors *got, double bound) {
    int first_place = INT_MAX;
    x->total = want->count;
    x->bad = allocate(want->count);
    x->alike = true;
    double common = NAN;
    for (size_t i = 0; i < want->count; i++) {
        const Named *w = &want->list[i], *g = tensors_find(got, w->name);
        if (!g || g->count != w->count) {
            x->ended = false;
            print_to(x->why, sizeof x->why, "the gradient of %s is not in the dump", w->name);
            return;
        }
        const double *a = got->values + g->at, *b = want->values + w->at;
        if (relative_error(a, b, w->count) <= bound) continue;
        double product = 0, square = 0, rest = 0;
        for (size_t k = 0; k < w->count; k++) {
            product += a[k] * b[k];
            square += b[k] * b[k];
        }
        double factor = product / square;
        for (size_t k = 0; k < w->count; k++)
            rest += (a[k] - factor * b[k]) * (a[k] - factor * b[k]);
        rest = sqrt(rest / square);
        x->bad[i] = true;
        x->wrong++;
        x->zeros += factor == 0 && rest == 0;
        if (isnan(common)) common = factor;
        if (!(rest < 1e-4) || !(fabs(factor - common) < 1e-4 * fabs(common))) x->alike = false;
        int place = backward_place(w->name);
        if (place >= first_place) continue;
        first_place = place;
        x->first = w;
        x->factor = factor;
        x->rest = rest;
        double mean = sqrt(square / (double)w->count);
        size_t from = w->count, to = 0;
        for (size_t k = 0; k < w->count; k++) {
            if (fabs(a[k] - b[k]) <= 1e-3 * mean) continue;
            if (from == w->count) from = k;
            to = k + 1;
        }
        x->from = (double)from / (double)w->count;
        x->to = (double)to / (double)w->count;
    }
}

// Returns true if got is k times the gradient of some of the batch's sequences alone.
static bool fits(const Puzzle *p, const Fixture *f, const Tensors *got, size_t first, size_t count,
                 const char *name, double *factor) {
    Reference ref = reference_copy(&f->ref);
    reference_zero_gradients(&ref);
    reference_mean_loss(&ref, p->golden.tokens, f->training.seq, first, count,
                        1.0 / (double)(f->training.global_batch * f->training.seq));
    Tensors part = tensors_of(&ref.table, ref.grads);
    const Named *w = tensors_find(&part, name), *g = tensors_find(got, name);
    double product = 0, square = 0, rest = 0;
    for (size_t k = 0; k < w->count; k++) {
        double a = got->values[g->at + k], b = part.values[w->at + k];
        product += a * b;
        square += b * b;
    }
    *factor = product / square;
    for (size_t k = 0; k < w->count; k++) {
        double off = got->values[g->at + k] - *factor * part.values[w->at + k];
        rest += off * off;
    }
    reference_free(&ref);
    tensors_free(&part);
    return sqrt(rest / square) < 1e-4 * fabs(*factor);
}

// Notes if a wrong gradient equals the gradient of the first or of the last micro-batch alone.
static void note_micro_batch(const Puzzle *p, const RunLine *r, const Tensors *got, Found *x) {
    const char *micro = strstr(r->flags, "--micro-batch ");
    size_t size = micro ? strtoul(micro + 14, NULL, 10) : 2;
    size_t all = r->fixture->training.global_batch;
    if (strcmp(r->fixture->name, "golden") != 0 || r->ranks > 1 || size >= all || !x->first) return;
    for (int last = 0; last < 2; last++) {
        double factor;
        size_t first = last ? all - size : 0;
        if (!fits(p, r->fixture, got, first, size, x->first->name, &factor)) continue;
        print_to(x->note, sizeof x->note,
                 "it is %.4g times the gradient of the %s micro-batch of the step alone", factor,
                 last ? "LAST" : "FIRST");
    }
}

// Runs the line once. The log and the gradients of an earlier run are removed before.
static Found run_once(const Puzzle *p, RunLine *r, const char *env, bool learn) {
    Found x;
    memset(&x, 0, sizeof x);
    Fixture *f = r->fixture;
    char flags[2 * ARG_BYTES];
    print_to(flags, sizeof flags, "%s %s %s --log log --dump-gradients gradients", f->flags,
             micro_batch(r), r->flags);
    remove("log");
    remove("gradients");
    Outcome o = run_start(p, r, env, flags);
    x.ended = o.code == 0;
    if (!x.ended) message_of(x.why, sizeof x.why, &o);
    outcome_free(&o);
    if (!x.ended) return x;

    Log log = read_log("log");
    Tensors got = tensors_read("gradients");
    if (log.steps != STEPS || got.count == 0) {
        x.ended = false;
        print_to(x.why, sizeof x.why, "it wrote %zu of %d steps and %zu gradients", log.steps,
                 STEPS, got.count);
    } else if (learn) {
        memcpy(f->losses, log.loss, sizeof f->losses);
        memcpy(f->norms, log.norm, sizeof f->norms);
        f->gradients = got;
        x.right = true;
        return x;
    } else {
        x.right = true;
        for (size_t s = 0; s < STEPS; s++)
            x.norm[s] = 1;
        for (size_t s = 0; s < f->steps; s++) {
            x.loss[s] = relative(log.loss[s], f->losses[s]);
            x.norm[s] = log.norm[s] / f->norms[s];
            x.right = x.right && x.loss[s] <= f->bound && fabs(x.norm[s] - 1) <= f->bound;
        }
        compare_gradients(&x, &f->gradients, &got, f->bound);
        if (x.ended && x.wrong && x.loss[0] <= f->bound) note_micro_batch(p, r, &got, &x);
        x.right = x.right && x.ended && x.wrong == 0;
    }
    tensors_free(&got);
    return x;
}

// ---- what is printed -------------------------------------------------------------------

static void print_row(const char *left, const char *format, ...) {
    va_list values;
    va_start(values, format);
    printf("  %-*s ", 44, left);
    vprintf(format, values);
    printf("\n");
    fflush(stdout);
    va_end(values);
}

// Writes one line for a wrong run.
static void summary_of(char *out, size_t size, const Found *x, double bound) {
    if (!x->ended) {
        print_to(out, size, "wrong: %s", x->why);
        return;
    }
    size_t used = print_to(out, size, "wrong: ");
    if (x->loss[0] <= bound) used += print_to(out + used, size - used, "loss right");
    else used += print_to(out + used, size - used, "loss off by %.1e", x->loss[0]);
    if (fabs(x->norm[0] - 1) > bound)
        used += print_to(out + used, size - used, ", gradient norm x%.4g", x->norm[0]);
    print_to(out + used, size - used, ", %zu of %zu gradients wrong", x->wrong, x->total);
}

// Prints the kinds of tensors that are right or the kinds that are wrong, the shorter list.
static void print_kinds(const Found *x, const Tensors *want) {
    char kinds[256][MAX_NAME];
    size_t count = 0, wrong[256] = {0}, all[256] = {0}, wrong_kinds = 0, right_kinds = 0;
    for (size_t i = 0; i < want->count; i++) {
        char kind[MAX_NAME];
        size_t k = 0;
        kind_of(kind, want->list[i].name);
        while (k < count && strcmp(kinds[k], kind) != 0)
            k++;
        if (k == 256) continue;
        if (k == count) strcpy(kinds[count++], kind);
        all[k]++;
        wrong[k] += x->bad[i];
    }
    for (size_t k = 0; k < count; k++) {
        wrong_kinds += wrong[k] > 0;
        right_kinds += wrong[k] < all[k];
    }
    bool show_wrong = wrong_kinds <= right_kinds;
    if (x->wrong == x->total) {
        printf("      no gradient is right\n");
        return;
    }
    printf("      %s:", show_wrong ? "wrong" : "right");
    size_t shown = 0;
    for (size_t k = 0; k < count; k++) {
        size_t matching = show_wrong ? wrong[k] : all[k] - wrong[k];
        if (matching == 0) continue;
        if (shown++ == 8) printf(" ...");
        if (shown > 8) continue;
        if (matching == all[k]) {
            printf(" %s", kinds[k]);
            continue;
        }
        printf(" %.2s", kinds[k]);
        const char *separator = "";
        for (size_t i = 0; i < want->count; i++) {
            char kind[MAX_NAME];
            kind_of(kind, want->list[i].name);
            if (strcmp(kind, kinds[k]) != 0 || x->bad[i] != show_wrong) continue;
            printf("%s%d", separator, layer_of(want->list[i].name));
            separator = ",";
        }
        printf("%s", kinds[k] + 3);
    }
    printf("; %s: all others\n", show_wrong ? "right" : "wrong");
}

// Sets one kind of tensor to 0, in the program and in the reference. If the two then agree, the
// fault is in the part of the model that the zeros silence.
static void knock_out(const Puzzle *p, RunLine *r) {
    const ParamTable *table = &r->fixture->ref.table;
    char right[1024] = "", less[1024] = "";
    for (size_t k = 0; k < p->knocked_count; k++) {
        Fixture zeros = *r->fixture;
        zeros.ref = reference_copy(&r->fixture->ref);
        for (size_t i = 0; i < table->count; i++) {
            const Tensor *x = &table->tensors[i];
            if (strstr(x->name, p->knocked[k]))
                memset(zeros.ref.params + x->offset, 0, x->size * sizeof(double));
        }
        write_model("zeros", table, zeros.ref.params, INTACT);
        fixture_reference(&zeros, p->golden.tokens, "zeros", "golden/train.bin");
        RunLine silent = *r;
        silent.fixture = &zeros;
        Found x = run_once(p, &silent, "", false);
        if (x.ended && x.loss[0] <= zeros.bound) {
            char *list = x.wrong <= table->config.L ? right : less;
            size_t used = strlen(list);
            print_to(list + used, 1024 - used, " %s", p->knocked[k]);
        }
        free(x.bad);
        tensors_free(&zeros.gradients);
        reference_free(&zeros.ref);
    }
    if (*right) printf("      right as soon as this is set to zero:%s\n", right);
    if (*less) printf("      forward is right as soon as this is set to zero:%s\n", less);
    if (!*right && !*less)
        printf("      no tensor that is set to zero makes it right\n");
}

// Says more about the first wrong run of a level.
static void explain(const Puzzle *p, RunLine *r, const Found *x) {
    double bound = r->fixture->bound;
    if (strstr(r->env, "CPU_STREAM_ORDER"))
        printf("    an operation reads or writes something before another one is done with it\n");
    if (!x->ended) return;
    if (x->wrong == 0 && x->loss[0] > bound) {
        printf("    all gradients are right: it is the loss alone that is wrong\n");
        return;
    }
    if (x->loss[0] > bound || isnan(x->loss[0])) {
        printf("    forward is wrong already, so that gradients tell little: look at the loss of "
               "step 1\n");
        if (p->knocked_count && r->ranks > 1 && strcmp(r->fixture->name, "golden") == 0)
            knock_out(p, r);
        return;
    }
    if (x->wrong == 0) {
        size_t s = 0;
        while (s + 1 < STEPS && x->loss[s] <= bound && fabs(x->norm[s] - 1) <= bound)
            s++;
        printf("    all gradients of step 1 are right; in step %zu the loss is off by %.1e and the "
               "norm x%.5g\n",
               s + 1, x->loss[s], x->norm[s]);
        return;
    }
    printf("    the first wrong gradient in backward's order: %s\n", x->first->name);
    if (x->factor == 0 && x->rest == 0) {
        printf("      it is all zeros: nothing writes it (%zu of the gradients are)\n", x->zeros);
    } else if (!isfinite(x->factor)) {
        printf("      it is not finite: something is read before it is written\n");
    } else if (x->rest < 1e-4) {
        printf("      it is %.4g times the right gradient%s\n", x->factor,
               x->alike && x->wrong > 1 ? ", as are all wrong ones" : "");
    } else {
        printf("      %.2f times the right gradient, and %.2f that has nothing to do with it%s\n",
               x->factor, x->rest, x->wrong > 1 ? "" : "; it is the only wrong one");
    }
    if (*x->note) printf("      %s\n", x->note);
    if (x->to - x->from < 0.9 && x->rest >= 1e-4)
        printf("      its elements are wrong from %.0f%% to %.0f%% of it\n", 100 * x->from,
               100 * x->to);
    print_kinds(x, &r->fixture->gradients);
}

// ---- the lines of check.txt ------------------------------------------------------------

// Cuts the next word off the text.
static char *word(char **text) {
    while (**text == ' ')
        ++*text;
    char *begin = *text;
    while (**text && **text != ' ')
        ++*text;
    if (**text) *(*text)++ = 0;
    return begin;
}

static void bad_line(const char *line) {
    fprintf(stderr, "error: check.txt has a line that is none: %s\n", line);
    exit(2);
}

// Reads [PROGRAM] RANKS FLAGS [: ENVIRONMENT]. "COPY/" in flags becomes the learner's folder.
static void parse_run(const Puzzle *p, RunLine *r, char *text) {
    char *env = strstr(text, " : "), *first, *at;
    *r->env = 0;
    if (env) {
        *env = 0;
        print_to(r->env, sizeof r->env, "%s", env + 3);
    }
    first = word(&text);
    print_to(r->program, MAX_NAME, "%s", p->programs[0]);
    if (strncmp(first, "train_", 6) == 0) {
        print_to(r->program, MAX_NAME, "%s", first);
        first = word(&text);
    }
    r->ranks = atoi(first);
    if (r->ranks < 1 || r->ranks > 64) bad_line(first);
    at = strstr(text, "COPY/");
    int before = at ? (int)(at - text) : 0;
    if (at) print_to(r->flags, sizeof r->flags, "%.*s%s/%s", before, text, p->copy, at + 5);
    else print_to(r->flags, sizeof r->flags, "%s", text);
}

static void name_run(char *out, size_t size, const Puzzle *p, const RunLine *r) {
    bool other = strcmp(r->program, p->programs[0]) != 0;
    print_to(out, size, "%s%s%s, %d rank%s %s", other ? r->program : "", other ? ", " : "",
             r->fixture ? r->fixture->name : "simulated", r->ranks, r->ranks > 1 ? "s" : "",
             r->flags);
}

// Runs a line under each of its environments. NAME=random:1..6 is six environments. Prints a row.
// Returns true if all are right; else *found has the first wrong one.
static bool check_run_line(const Puzzle *p, RunLine *r, Found *found) {
    char left[ARG_BYTES + 200], summary[4096], env[ARG_BYTES + 64], wrong_env[ARG_BYTES + 64] = "";
    static bool learnt;
    bool learn = strcmp(r->fixture->name, "own") == 0 && !learnt;
    int first = 1, last = 1, wrong = 0, before = 0;
    char *range = strstr(r->env, "..");
    if (range) {
        char *begin = range;
        while (begin > r->env && begin[-1] >= '0' && begin[-1] <= '9')
            begin--;
        before = (int)(begin - r->env);
        first = atoi(begin);
        last = (int)strtol(range + 2, &range, 10);
    }
    name_run(left, sizeof left, p, r);
    double worst = 0;
    for (int n = first; n <= last; n++) {
        if (first < last) print_to(env, sizeof env, "%.*s%d%s", before, r->env, n, range);
        else print_to(env, sizeof env, "%s", r->env);
        Found x = run_once(p, r, env, learn);
        for (int s = 0; s < STEPS; s++)
            worst = fmax(worst, x.loss[s]);
        if (x.right) {
            free(x.bad);
            continue;
        }
        if (wrong++ == 0) {
            *found = x;
            print_to(wrong_env, sizeof wrong_env, "%s", env);
        }
        // A hang takes seconds, so it is not asked for again.
        if (!x.ended && (strstr(x.why, " waits in ") || strstr(x.why, "did not end"))) {
            last = n;
            break;
        }
    }
    learnt = learnt || learn;
    if (!wrong) {
        if (first < last) print_row(left, "right in %d of %d runs: %s", last, last, r->env);
        else if (learn) print_row(left, "is what the others are compared with");
        else print_row(left, "right%s%s", *r->env ? ": " : "", r->env);
        return true;
    }
    summary_of(summary, sizeof summary, found, r->fixture->bound);
    print_row(left, "%s", summary);
    if (*wrong_env)
        printf("    with %s; wrong in %d of %d runs\n", wrong_env, wrong, last - first + 1);
    return false;
}

// resume FIXTURE RANKS FLAGS -> RANKS FLAGS: continues a checkpoint behind step 2 in another
// layout.
static bool check_resume(const Puzzle *p, RunLine *r, char *then) {
    RunLine second = *r;
    Fixture *f = r->fixture;
    char left[3 * ARG_BYTES], flags[4 * ARG_BYTES], rest[ARG_BYTES], message[2048];
    parse_run(p, &second, then);
    name_run(left, sizeof left, p, r);
    size_t used = strlen(left);
    print_to(left + used, sizeof left - used, " -> %d rank%s %s", second.ranks,
             second.ranks > 1 ? "s" : "", second.flags);
    remove_tree("kept");
    remove("log");
    for (int half = 0; half < 2; half++) {
        RunLine *now = half ? &second : r;
        print_to(rest, sizeof rest, "%s", f->flags);
        char *steps = strstr(rest, "--steps "), *behind = strchr(steps + 8, ' ');
        *steps = 0;
        print_to(flags, sizeof flags, "%s --steps %d %s %s --out kept --log log %s %s",
                 half ? strstr(rest, "--train-data") : rest, half ? STEPS : STEPS - 1, behind,
                 half ? "--resume auto" : "", micro_batch(now), now->flags);
        Outcome o = run_start(p, now, "", flags);
        bool ended = o.code == 0;
        if (!ended) message_of(message, sizeof message, &o);
        outcome_free(&o);
        if (ended) continue;
        print_row(left, "wrong, in the %s run: %s", half ? "resumed" : "first", message);
        return false;
    }
    Log log = read_log("log");
    double loss = relative(log.loss[STEPS - 1], f->losses[STEPS - 1]);
    double norm = log.norm[STEPS - 1] / f->norms[STEPS - 1];
    bool ok = log.steps == STEPS && loss <= 1e-6 && fabs(norm - 1) <= 1e-5;
    if (ok) print_row(left, "resumes right");
    else print_row(left, "wrong behind the resume: loss off by %.1e, norm x%.5g", loss, norm);
    return ok;
}

// Compiles a C program of dev/puzzles against the copy and runs it: host FILE.c ARGUMENTS. Its
// output is shown if it fails.
static bool check_host(const Puzzle *p, char *text) {
    char command[3 * PATH_MAX + 512], *source = word(&text), path[2 * PATH_MAX];
    print_to(path, sizeof path, "%s/%s", p->puzzle, source);
    if (!file_exists(path)) print_to(path, sizeof path, "%s/dev/puzzles/%s", p->root, source);
    print_to(command, sizeof command,
             "{ %s -std=gnu11 -O1 -w -I%s -I%s -o host %s -lcjson -lm && "
             "timeout 20 ./host %s %s; } >host.out 2>&1",
             getenv("CC") ? getenv("CC") : "cc", p->copy, p->root, path, p->copy, text);
    bool ok = system(command) == 0;
    char *out = read_file("host.out", NULL);
    char left[ARG_BYTES];
    print_to(left, sizeof left, "%.*s %s", (int)strcspn(source, "."), source, text);
    if (ok) {
        char *end = out ? strchr(out, '\n') : NULL;
        if (end) *end = 0;
        print_row(left, "%s", out && *out ? out : "right");
    } else {
        print_row(left, "wrong:");
        int lines = 0;
        for (char *line = strtok(out, "\n"); line && lines < 12; line = strtok(NULL, "\n"), lines++)
            printf("      %.150s\n", line);
    }
    free(out);
    return ok;
}

// The counts and limits of a budget, from its line in check.txt.
typedef struct {
    const char *kind, *group, *operation, *name;
    double value, calls;  // the budget
    double more;          // percent that are allowed on top
    RunLine run;
} Budget;

// Starts the budget's program: one step of a fixture that counts its messages, or a simulation,
// or for memory its --dry-run.
static Outcome budget_run(Puzzle *p, Budget *b) {
    char flags[3 * ARG_BYTES], rest[ARG_BYTES];
    RunLine r = b->run;
    if (strcmp(b->kind, "memory") == 0) {
        print_to(flags, sizeof flags, "--dry-run %s", r.flags);
        return run_start(p, &r, "", flags);
    }
    if (!r.fixture) {
        print_to(flags, sizeof flags, "--simulate %s/dev/clusters/dgx-a100.json --ranks %d %s",
                 p->root, r.ranks, r.flags);
        r.ranks = 1;
        return run_start(p, &r, "", flags);
    }
    print_to(rest, sizeof rest, "%s", r.fixture->flags);
    char *steps = strstr(rest, "--steps "), *behind = strchr(steps + 8, ' ');
    *steps = 0;
    print_to(flags, sizeof flags, "%s --steps 1 %s %s %s", rest, behind, micro_batch(&r), r.flags);
    return run_start(p, &r, "NCCL_TRAFFIC=1", flags);
}

// Reads the calls and bytes that rank 0 of a group has sent by an operation: 0 if none.
static double read_traffic(const Budget *b, const char *text, double *calls) {
    char format[160];
    double bytes = 0;
    print_to(format, sizeof format, "traffic: %s rank 0 of %%*d, %s: %%lf calls, %%lf bytes sent",
             b->group, b->operation);
    *calls = 0;
    for (const char *at = text; at; at = next_line(at)) {
        if (sscanf(at, format, calls, &bytes) == 2) return bytes;
    }
    return 0;
}

// Reads the milliseconds of a simulated step.
static double read_clock(const char *text) {
    for (const char *at = text; at; at = next_line(at)) {
        double seconds;
        char unit;
        if (sscanf(at, "step %lf %c |", &seconds, &unit) == 2 && unit == 's') return 1000 * seconds;
    }
    return NAN;
}

// Reads the MiB of a buffer in the head of a run.
static double read_memory(const Budget *b, const char *text) {
    double value = NAN;
    size_t length = strlen(b->name);
    for (const char *at = text; at; at = next_line(at)) {
        if (strncmp(at, b->name, length) == 0 && at[length] == ' ')
            sscanf(at + length, "%lf", &value);
    }
    return value;
}

// Reads the largest number of a column in the table that ends a simulation.
static double read_column(const Budget *b, char *text) {
    char *table = strstr(text, "\n rank "), *save = NULL, *inner = NULL;
    int column = -1, index = 0;
    double largest = NAN;
    char *line = table ? strtok_r(table + 1, "\n", &save) : NULL;
    for (char *w = line ? strtok_r(line, " ", &inner) : NULL; w; w = strtok_r(NULL, " ", &inner)) {
        if (strcmp(w, b->name) == 0) column = index;
        index++;
    }
    while ((line = line ? strtok_r(NULL, "\n", &save) : NULL)) {
        index = 0;
        for (char *w = strtok_r(line, " ", &inner); w; w = strtok_r(NULL, " ", &inner)) {
            double value = strtod(w, NULL);
            if (index++ == column && !(value <= largest)) largest = value;
        }
    }
    return largest;
}

// Compares a number with check.txt's: at most so much, or exactly so much (--exact). Prints a row.
static bool within_budget(const Puzzle *p, const Budget *b, const char *what, double got,
                          double budget) {
    char left[ARG_BYTES + 200];
    bool ok = got <= budget * (1 + b->more / 100) * (1 + 1e-9);
    name_run(left, sizeof left, p, &b->run);
    if (!b->run.fixture)
        print_to(left, sizeof left, "%s, %d ranks",
                 strcmp(b->kind, "memory") == 0 ? "dry run" : "simulated", b->run.ranks);
    if (p->exact && !(fabs(got - budget) <= 1e-6 * budget)) {
        print_row(left, "wrong: %.9g %s, and check.txt says %.9g", got, what, budget);
        return false;
    }
    print_row(left, "%s: %.9g %s, the budget is %.9g", ok ? "right" : "too much", got, what,
              budget);
    return ok;
}

// Checks a budget. kind and line: clock MS, column NAME PERCENT, memory NAME MIB: [+N%] :
// [PROGRAM] RANKS FLAGS, and traffic GROUP OPERATION CALLS BYTES : FIXTURE [PROGRAM] RANKS FLAGS.
static bool check_budget(Puzzle *p, const char *kind, char *line) {
    static Budget b;
    memset(&b, 0, sizeof b);
    char *colon = strstr(line, " : "), what[64];
    if (!colon) bad_line(line);
    *colon = 0;
    char *run_text = colon + 3;
    b.kind = kind;
    if (strcmp(kind, "traffic") == 0) {
        b.group = word(&line);
        b.operation = word(&line);
        b.calls = strtod(word(&line), NULL);
        b.run.fixture = fixture_make(p, word(&run_text));
        if (!b.run.fixture) bad_line(run_text);
    } else if (strcmp(kind, "clock") != 0) {
        b.name = word(&line);
    }
    b.value = strtod(word(&line), NULL);
    char *plus = strchr(line, '+');
    if (plus) b.more = strtod(plus + 1, NULL);
    parse_run(p, &b.run, run_text);

    Outcome o = budget_run(p, &b);
    bool ok = o.code == 0;
    if (!ok) {
        char message[2048];
        message_of(message, sizeof message, &o);
        print_row(kind, "wrong: %s", message);
    } else if (strcmp(kind, "traffic") == 0) {
        double calls, bytes = read_traffic(&b, o.err, &calls);
        if (calls == 0) bytes = read_traffic(&b, o.out, &calls);
        print_to(what, sizeof what, "bytes by %s", b.operation);
        ok = within_budget(p, &b, what, bytes, b.value);
        print_to(what, sizeof what, "calls of %s", b.operation);
        ok = within_budget(p, &b, what, calls, b.calls) && ok;
    } else if (strcmp(kind, "clock") == 0) {
        ok = within_budget(p, &b, "ms a step", read_clock(o.out), b.value);
    } else if (strcmp(kind, "memory") == 0) {
        print_to(what, sizeof what, "MiB of %s", b.name);
        ok = within_budget(p, &b, what, read_memory(&b, o.out), b.value);
    } else {
        bool percent = strcmp(b.name, "GiB") != 0 && strcmp(b.name, "ms") != 0;
        print_to(what, sizeof what, "%s%s", percent ? "% of " : "", b.name);
        ok = within_budget(p, &b, what, read_column(&b, o.out), b.value);
    }
    outcome_free(&o);
    return ok;
}

// The first wrong run of a level, which is explained behind the level's rows.
typedef struct {
    bool set;
    RunLine run;
    Found found;
} FirstWrong;

// Runs one line of a level. Returns true if it is right.
static bool check_line(Puzzle *p, char *line, FirstWrong *first) {
    char copy[ARG_BYTES], *text = copy;
    print_to(copy, sizeof copy, "%s", line);
    char *kind = word(&text);
    if (strcmp(kind, "host") == 0) return check_host(p, text);
    if (strcmp(kind, "clock") == 0 || strcmp(kind, "column") == 0 || strcmp(kind, "memory") == 0 ||
        strcmp(kind, "traffic") == 0)
        return check_budget(p, kind, text);
    bool resume = strcmp(kind, "resume") == 0;
    if (resume) kind = word(&text);
    static RunLine r;
    r.fixture = fixture_make(p, kind);
    if (!r.fixture) bad_line(line);
    char *then = resume ? strstr(text, " -> ") : NULL;
    if (resume) {
        if (!then) bad_line(line);
        *then = 0;
        parse_run(p, &r, text);
        return check_resume(p, &r, then + 4);
    }
    parse_run(p, &r, text);
    Found found;
    if (check_run_line(p, &r, &found)) return true;
    if (first->set) {
        free(found.bad);
        return false;
    }
    first->set = true;
    first->run = r;
    first->found = found;
    return false;
}

// Adds the words of a line to a list.
static void add_words(char list[][MAX_NAME], size_t *count, char *line) {
    for (char *save = NULL, *w = strtok_r(line, " ", &save); w; w = strtok_r(NULL, " ", &save)) {
        if (*count < MAX_RUNS) print_to(list[(*count)++], MAX_NAME, "%s", w);
    }
}

// Ends a level: explains its first wrong run. Returns true if all was right.
static bool end_level(const Puzzle *p, FirstWrong *first, bool right) {
    if (first->set) {
        explain(p, &first->run, &first->found);
        free(first->found.bad);
        first->set = false;
    }
    return right;
}

// Runs the levels of check.txt up to the first that is wrong. Returns how many are right.
static int check_levels(Puzzle *p, char *rules) {
    static FirstWrong first;
    int stars = 0, level = 0;
    bool right = true;
    for (char *save = NULL, *line = strtok_r(rules, "\n", &save); line;
         line = strtok_r(NULL, "\n", &save)) {
        int number;
        char title[256];
        while (*line == ' ')
            line++;
        if (strncmp(line, "verdict ", 8) == 0 || *line == '#' || !*line) {
            continue;
        } else if (sscanf(line, "level %d %255[^\n]", &number, title) == 2) {
            right = end_level(p, &first, right);
            if (!right) return stars;
            stars += level > 0;
            level = number;
            if (!p->only || p->only == level) printf("level %d: %s\n", level, title);
        } else if (sscanf(line, "program %255[^\n]", title) == 1) {
            add_words(p->programs, &p->program_count, title);
        } else if (sscanf(line, "knock-out %255[^\n]", title) == 1) {
            add_words(p->knocked, &p->knocked_count, title);
        } else if (level == 0) {
            bad_line(line);
        } else if (!p->only || (p->only == level && right)) {
            right = check_line(p, line, &first) && right;
        }
    }
    return stars + (end_level(p, &first, right) && level > 0);
}

// Counts the lines that begin a level.
static int count_levels(const char *rules) {
    int count = 0;
    for (const char *at = rules; at; at = next_line(at))
        count += strncmp(at, "level ", 6) == 0;
    return count;
}

int main(int argc, char **argv) {
    static Puzzle p;
    char golden[PATH_MAX];
    if (argc < 4) {
        fprintf(stderr, "usage: check PUZZLE COPY PROGRAMS [--exact] [--level N]\n");
        return 2;
    }
    for (int i = 4; i < argc; i++) {
        if (strcmp(argv[i], "--exact") == 0) p.exact = true;
        if (strcmp(argv[i], "--level") == 0 && i + 1 < argc) p.only = atoi(argv[i + 1]);
    }
    Context *x = &p.golden;
    if (!realpath(argv[1], p.puzzle)) die("cannot open", argv[1]);
    if (!realpath(argv[2], p.copy)) die("cannot open", argv[2]);
    if (!realpath(argv[3], x->build)) die("cannot open", argv[3]);
    if (!realpath("dev/test/golden", golden)) die("cannot open", "dev/test/golden");
    if (!realpath(".", p.root)) die("cannot open", ".");
    char *rules = read_file(in(p.puzzle, "check.txt"), NULL);
    if (!rules) die("cannot read", in(p.puzzle, "check.txt"));
    print_to(x->temp, sizeof x->temp, "%.4000s/check.XXXXXX", x->build);
    if (!mkdtemp(x->temp) || chdir(x->temp)) die("cannot make a folder in", x->build);
    if (symlink(golden, "golden")) die("cannot link", golden);
    load_golden(x);
    prefer_quick_starts();
    prefer_plain_kernels();
    int levels = count_levels(rules), stars = check_levels(&p, rules);
    printf("stars %d of %d\n", stars, levels);
    free(rules);
    if (chdir("/") == 0) remove_tree(x->temp);
    return stars < levels;
}
