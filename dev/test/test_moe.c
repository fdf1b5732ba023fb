// test_moe.c: tests train_moe.
//   Every gradient tensor agrees with the fp64 reference at many layouts, with tokens dropped and
//   without. Options that must not change bits change none. Another number of expert ranks
//   resumes a checkpoint. Stale copies of experts are found. Ranks send the expected bytes. Bad
//   input is refused.
//
//   test_moe BUILD_DIR [GROUP]      dev/test/run_moe.sh starts it
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "dev/test/compare_runs.h"
#include "llmc/host/moe.h"
#include "llmc/reference_moe.h"

enum {
    L = 2,
    C = 24,
    NH = 2,
    V = 33,
    T = 16,
    G = 24,
    STEPS = 2,
    E = 8
};  // E: but in one row of LAYOUTS

// The experts of a run, as flags and as the reference takes them.
typedef struct {
    size_t experts, k;
    double capacity, balance, z;
} Case;

static ReferenceMoe reference_of(const Case *c, size_t seq) {
    double slots = ceil(c->capacity * (double)seq * (double)c->k / (double)c->experts);
    ReferenceMoe moe = {c->experts, c->k, slots < (double)seq ? (size_t)slots : seq,
                        c->balance, c->z, NULL, false, 0};
    return moe;
}

static void flags_of(char flags[ARG_BYTES], const Case *c) {
    snprintf(flags, ARG_BYTES,
             "--experts %zu --top-k %zu --capacity %g --balance-loss %g --z-loss %g", c->experts,
             c->k, c->capacity, c->balance, c->z);
}

// A model in which every parameter matters, and routers that are sure of themselves.
static void randomize_experts(Reference *ref, uint64_t seed) {
    for (size_t i = 0; i < ref->table.count; i++) {
        const Tensor *x = &ref->table.tensors[i];
        double scale = x->spec->kind == ROUTERW ? 1.0 : 0.2;
        for (size_t k = 0; k < x->rows * x->cols; k++)
            ref->params[x->offset + k] =
                (float)((x->spec->init == INIT_ONE) + scale * noise(&seed));
    }
}

static Reference random_experts(const MoeSpec *spec, uint64_t seed) {
    GPTConfig config = {L, C, NH, V, padded_vocabulary(V), T, &spec->model};
    Reference ref = reference_create(&config);
    randomize_experts(&ref, seed);
    return ref;
}

static void write_experts(const char *folder, const Reference *ref) {
    const char *path = in(folder, "config.json");
    Error err;
    write_model(folder, &ref->table, ref->params, INTACT);
    if (!moe_config_write(path, &ref->config, false, &err)) die("cannot write", path);
}

// The model under test, as reference_train calls it.
static ReferenceMoe tested;

static double tested_loss(Reference *ref, const int *tokens, const int *targets, size_t B,
                          size_t seq, double scale) {
    return reference_moe_loss_and_gradients(ref, &tested, tokens, targets, B, seq, scale, NULL);
}

static const Training TRAINING = {T, G, STEPS, 1e-3, 0.1, 1.0, 0.9, 0.95, 1e-8, 0};
static const Case DROPS = {E, 2, 0.5, 0.1, 0.01};

// ---- group reference -------------------------------------------------------------------

// Returns the loss and the two losses of experts, as the gradients are of their sum.
static double tested_losses(Reference *ref, const int *tokens, const int *targets, size_t B,
                            size_t seq, double scale) {
    double extra, loss = reference_moe_loss_and_gradients(ref, &tested, tokens, targets, B, seq,
                                                          scale, &extra);
    return loss + extra;
}

static void finite_differences(Context *x, const Case *c, double dropout) {
    enum { SHORT = 5, B = 2 };
    MoeSpec spec = moe_spec(c->experts, c->k);
    GPTConfig config = {2, 6, 2, 11, 128, SHORT, &spec.model};
    Reference ref = reference_create(&config);
    int *tokens = random_tokens(B * SHORT + 1, 11, 3);
    uint64_t seed = 5;
    random_params(&ref, 0.5, &seed);
    tested = reference_of(c, SHORT);
    ref.dropout = dropout_make(dropout, 7, 3, 5);
    Errors e = compare_differences(&ref, tested_losses, tokens, B, SHORT);
    check(&x->check, e.worst < 1e-6,
          "reference: E %zu, k %zu, capacity %g, dropout %g: finite differences %.1e (%s)",
          c->experts, c->k, c->capacity, dropout, e.worst, e.name);
    free(tokens);
    reference_free(&ref);
}

static void group_reference(Context *x) {
    static const Case cases[] = {
        {4, 1, 0.5, 0.3, 0.1}, {4, 2, 4, 0.3, 0.1}, {3, 3, 1, 0.3, 0}, {1, 1, 1, 0, 0.1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        finite_differences(x, &cases[i], i == 1 ? 0.3 : 0);
}

// ---- group layouts ---------------------------------------------------------------------

typedef struct {
    int d, e;
    Case of;
    double dropout;
    const char *flags;
} Row;

static const Row LAYOUTS[] = {
    {1, 1, {E, 1, 0.5, 0.1, 0.01}, 0, "--micro-batch 4"},
    {1, 1, {E, 2, 4, 0.1, 0.01}, 0, "--micro-batch 1"},
    {1, 1, {1, 1, 1, 0.1, 0}, 0, "--micro-batch 24"},
    {2, 1, {E, 2, 0.5, 0.1, 0.01}, 0, "--micro-batch 2"},
    {2, 2, {E, 1, 8, 0.1, 0.01}, 0, "--micro-batch 3"},
    {3, 3, {6, 2, 0.7, 0.1, 0.01}, 0, "--micro-batch 2"},
    {4, 1, {E, 1, 0.5, 0.1, 0.01}, 0, "--micro-batch 2 --zero 0"},
    {4, 2, {E, 2, 4, 0.1, 0.01}, 0, "--micro-batch 2"},
    {4, 4, {E, 2, 0.5, 0.1, 0.01}, 0, "--micro-batch 3 --overlap 0"},
    {6, 2, {E, 1, 1.25, 0.1, 0.01}, 0, "--micro-batch 1"},
    {8, 1, {E, 2, 0.5, 0.1, 0.01}, 0, "--micro-batch 1"},
    {8, 2, {E, 1, 0.5, 0.1, 0.01}, 0.2, "--micro-batch 3"},
    {8, 4, {E, 2, 1, 0, 0}, 0, "--micro-batch 1 --recompute layer"},
    {8, 8, {E, 1, 8, 0.1, 0.01}, 0, "--micro-batch 1 --recompute gelu"},
    {8, 8, {E, 2, 0.5, 0.1, 0.01}, 0.2, "--micro-batch 3 --recompute layer"},
};

// In bf16 a token whose k-th and next logits are almost equal may go to another expert than in
// the reference. Then its function and its gradient are other ones. With k = E there is no such
// choice. For the other rows the test looks for a model in whose first step every choice is
// clear. It has few tokens and few experts, and logits MARGIN apart, some 10 times their error.
static const Row LAYOUTS_BF16[] = {
    {1, 1, {E, E, 0.5, 0.1, 0.01}, 0, "--micro-batch 4"},
    {8, 8, {E, E, 0.5, 0.1, 0.01}, 0, "--micro-batch 1 --recompute layer"},
    {4, 2, {E, E, 1, 0.1, 0.01}, 0, "--micro-batch 2"},
    {1, 1, {2, 1, 1, 0.1, 0.01}, 0, "--micro-batch 4"},
    {2, 2, {2, 1, 0.5, 0.1, 0.01}, 0, "--micro-batch 1"},
    {4, 2, {2, 1, 2, 0.1, 0.01}, 0, "--micro-batch 1 --recompute gelu"},
    {4, 4, {4, 2, 0.5, 0.1, 0.01}, 0, "--micro-batch 1"},
    {8, 4, {4, 2, 2, 0.1, 0.01}, 0, "--micro-batch 1 --recompute layer"},
};
static const double MARGIN = 0.1;

// Draws models until one has clear choices for these tokens.
static void randomize_clearly(Reference *ref, const Training *h, const int *tokens, uint64_t seed) {
    double margin = 0, *params = allocate(ref->table.total * sizeof(double));
    tested.margin = &margin;
    for (uint64_t tries = 0; margin < MARGIN; tries++) {
        if (tries == 100000) die("no model has clear choices in", "group layouts");
        randomize_experts(ref, seed + 1000 * tries);
        memcpy(params, ref->params, ref->table.total * sizeof(double));
        for (size_t i = 0; i < ref->table.total; i++)
            ref->params[i] = round_to_bf16(ref->params[i]);
        margin = INFINITY;
        reference_mean_loss(ref, tokens, h->seq, 0, h->global_batch, 0);
        memcpy(ref->params, params, ref->table.total * sizeof(double));
    }
    tested.margin = NULL;
    free(params);
}

static void group_layouts(Context *x) {
    char flags[ARG_BYTES], own[ARG_BYTES], name[160];
    size_t count = G * T * STEPS + 1;
    int *tokens = random_tokens(count, V, 21);
    write_shard("shard.bin", 20240520, 1, (int)count, tokens, count);
    reference_loss = tested_loss;
    size_t rows = x->bf16 ? sizeof LAYOUTS_BF16 / sizeof(Row) : sizeof LAYOUTS / sizeof(Row);
    for (size_t i = 0; i < rows; i++) {
        const Row *row = x->bf16 ? &LAYOUTS_BF16[i] : &LAYOUTS[i];
        MoeSpec spec = moe_spec(row->of.experts, row->of.k);
        Reference ref = random_experts(&spec, 40 + i);
        Training h = TRAINING;
        h.dropout = row->dropout;
        if (x->bf16) h.steps = 1;
        if (x->bf16 && row->of.k < row->of.experts) h.seq = 8, h.global_batch = 8;
        tested = reference_of(&row->of, h.seq);
        if (x->bf16) randomize_clearly(&ref, &h, tokens, 40 + i);
        write_experts("model", &ref);
        Expected want = reference_train(&ref, &h, tokens, x->bf16);
        training_flags(flags, &h, "model", "shard.bin");
        flags_of(own, &row->of);
        Layout layout = {"train_moe", row->d, row->flags};
        if (row->d > max_ranks(x)) continue;
        runs(x, &layout, "", "%s %s --expert-parallel %d --log log --dump-gradients gradients",
             flags, own, row->e);
        Errors errors;
        snprintf(name, sizeof name, "d %d, e %d, E %zu, k %zu, capacity %g, dropout %g, %s",
                 row->d, row->e, row->of.experts, row->of.k, row->of.capacity, row->dropout,
                 row->flags);
        check_run(x, name, &ref.table, &want, h.steps, &errors);
        expected_free(&want);
        reference_free(&ref);
    }
    free(tokens);
}

// ---- group bits ------------------------------------------------------------------------

typedef struct {
    const char *flags, *env;
    int seeds;
} Bits;

static const Bits BITS[] = {
    {"", "", 1}, {"--recompute gelu", "", 1}, {"--recompute layer", "", 1},
    {"--overlap 0", "", 1}, {"--debug-replicas 1", "", 1}, {"--trace trace.json", "", 1},
    {"", "CPU_STREAM_ORDER=random:%d", 4}, {"", "CPU_THREAD_ORDER=random:%d", 2},
    {"--overlap 0", "CPU_STREAM_ORDER=random:%d", 1},
};

static void group_bits(Context *x) {
    static const int PLACES[][2] = {{4, 1}, {4, 2}, {4, 4}};
    char flags[ARG_BYTES], own[ARG_BYTES], env[64];
    size_t count = G * T * STEPS + 1;
    int *tokens = random_tokens(count, V, 22);
    MoeSpec spec = moe_spec(DROPS.experts, DROPS.k);
    Reference ref = random_experts(&spec, 60);
    Training h = TRAINING;
    h.dropout = 0.1;
    write_shard("shard.bin", 20240520, 1, (int)count, tokens, count);
    write_experts("model", &ref);
    training_flags(flags, &h, "model", "shard.bin");
    flags_of(own, &DROPS);
    for (size_t p = 0; p < 3; p++) {
        Layout layout = {"train_moe", 4, ""};
        bool same = true;
        Log base;
        memset(&base, 0, sizeof base);
        for (size_t i = 0; i < sizeof BITS / sizeof *BITS && same; i++) {
            int seeds = on_gpu(x) && strncmp(BITS[i].env, "CPU_", 4) == 0 ? 0 : BITS[i].seeds;
            for (int seed = 1; seed <= seeds && same; seed++) {
                snprintf(env, sizeof env, BITS[i].env, seed);
                remove("log"), remove_tree("other");
                const char *out = i == 0 ? "base" : "other";
                if (i == 0) remove_tree("base");
                same = runs(x, &layout, env,
                            "%s %s --expert-parallel %d --micro-batch 2 --log log --out %s %s",
                            flags, own, PLACES[p][1], out, BITS[i].flags);
                Log log = read_log("log");
                if (i == 0) base = log;
                same = same && same_log(&log, &base) &&
                       (i == 0 || same_checkpoint("base/step-00000002", "other/step-00000002"));
                if (!same) printf("     %s %s\n", BITS[i].flags, env);
            }
        }
        check(&x->check, same,
              "d 4, e %d: same bits with recomputation, without overlap, whatever the order of "
              "streams and threads",
              PLACES[p][1]);
    }
    free(tokens);
    reference_free(&ref);
}

// ---- group checkpoints -----------------------------------------------------------------

static const char FOUR_STEPS[] =
    "--train-data shard.bin --shuffle 1 --seq 16 --global-batch 8 --micro-batch 1 "
    "--steps 4 --lr 0.003 --warmup 2 --val-every 0 --save-every 2 --keep 0 --log log "
    "--top-k 2 --capacity 0.7 --layers 2 --heads 2 --channels 24 --vocab 33 --max-seq 16";

static void group_checkpoints(Context *x) {
    // d and e: each row resumes the one before.
    static const int PLACES[][2] = {{1, 1}, {4, 4}, {8, 2}, {2, 1}, {8, 8}, {4, 2}};
    enum { COUNT = sizeof PLACES / sizeof *PLACES };
    static const char *const SUFFIXES[] = {"", ".m", ".v"};
    size_t count = 1000;
    int *tokens = random_tokens(count, V, 23);
    MoeSpec spec = moe_spec(E, 2);
    Reference ref = random_experts(&spec, 1);  // for its table
    double *want = allocate(ref.table.total * sizeof(double));
    write_shard("shard.bin", 20240520, 1, (int)count, tokens, count);
    for (size_t p = 0; p < COUNT; p++) {
        Layout layout = {"train_moe", PLACES[p][0], ""};
        char from[64];
        remove("log");
        snprintf(from, sizeof from, "place-%zu/step-00000004", p);
        bool ok = runs(x, &layout, "", "%s --expert-parallel %d --out place-%zu", FOUR_STEPS,
                       PLACES[p][1], p);
        Log log = read_log("log");
        ok = ok && runs(x, &layout, "",
                        "%s --expert-parallel %d --out again --resume place-%zu/step-00000002",
                        FOUR_STEPS, PLACES[p][1], p);
        Log again = read_log("log");
        check(&x->check,
              ok && same_log(&again, &log) && same_checkpoint("again/step-00000004", from),
              "d %d, e %d: resumed by itself with the same bits", PLACES[p][0], PLACES[p][1]);
        remove_tree("again");
        if (p == 0) continue;
        ok = runs(x, &layout, "",
                  "%s --expert-parallel %d --out again --resume place-%zu/step-00000002",
                  FOUR_STEPS, PLACES[p][1], p - 1);
        double worst = 0;
        for (int i = 0; i < 3 && ok; i++) {
            const char *file = i ? "optimizer" : "model";
            char path[128];
            snprintf(path, sizeof path, "place-0/step-00000004/%s.safetensors", file);
            ok = read_tensors(path, SUFFIXES[i], &ref.table, want);
            snprintf(path, sizeof path, "again/step-00000004/%s.safetensors", file);
            worst = fmax(worst, state_errors(&ref.table, path, SUFFIXES[i], want).worst);
        }
        check(&x->check, ok && worst < 5e-5,
              "d %d, e %d -> d %d, e %d: the checkpoint is one rank's, %.1e", PLACES[p - 1][0],
              PLACES[p - 1][1], PLACES[p][0], PLACES[p][1], worst);
        remove_tree("again");
    }
    free(want), free(tokens);
    reference_free(&ref);
}

// ---- group replicas --------------------------------------------------------------------

// Tests that wrong copies of experts are found. The last of four ranks has an expert of another
// step, or the weights of the other rank's experts. A checkpoint has an expert of an older one.
static void group_replicas(Context *x) {
    static const struct { int e, kind; bool others; const char *says; } rows[] = {
        {2, FCW, false, "h.1.moe.c_fc.weight differs between the ranks"},
        {2, FCPROJB, true, "h.0.moe.c_fc.weight differs between the ranks"},
        {1, FCPROJW, false, "h.1.moe.c_proj.weight differs between the ranks"},
        {4, QKVW, false, "h.1.attn.c_attn.weight differs between the ranks"},
    };
    MoeSpec spec = moe_spec(E, 1);
    GPTConfig config = x->golden.config;
    config.spec = &spec.model;
    if (mkdir("stale", 0777)) die("cannot make", "stale");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Layout layout = {"train_moe", 4, ""};
        char flags[64], name[64];
        if (layout.ranks > max_ranks(x)) continue;
        Reference ref = reference_create(&config);
        randomize_experts(&ref, 70 + i);
        write_experts("model", &ref);
        for (size_t k = 0; k < ref.table.count; k++) {
            const Tensor *w = &ref.table.tensors[k];
            double *values = ref.params + w->offset;
            size_t half = w->rows * w->cols / 2;
            if (!rows[i].others)
                values[2 * half - 1] += w->spec->kind == rows[i].kind && w->held == 1;
            else if (w->spec->flags & TENSOR_EXPERTS)
                memcpy(values + half, values, half * sizeof(double));
        }
        write_experts("stale/model", &ref);
        snprintf(flags, sizeof flags, "--expert-parallel %d", rows[i].e);
        snprintf(name, sizeof name, "d 4, e %d, %s", rows[i].e,
                 rows[i].others ? "other experts" : "another step");
        check_stale(x, name, layout, flags, rows[i].says);
        reference_free(&ref);
    }
    // model.safetensors has the tensors in the order of the table.
    size_t count = 1000, new_bytes, old_bytes;
    int *tokens = random_tokens(count, V, 23);
    Layout layout = {"train_moe", 2, ""};
    Reference ref = random_experts(&spec, 1);  // for its table
    write_shard("shard.bin", 20240520, 1, (int)count, tokens, count);
    bool ok = runs(x, &layout, "", "%s --expert-parallel 2 --out steps", FOUR_STEPS);
    static const char NEW[] = "steps/step-00000004/model.safetensors";
    char *now = read_file(NEW, &new_bytes),
         *old = read_file("steps/step-00000002/model.safetensors", &old_bytes);
    ok = ok && now && old && new_bytes == old_bytes;
    if (ok) {
        size_t element = x->bf16 ? 2 : 4, at = new_bytes, expert = C * 4 * C * element;
        const Tensor *cut = table_find(&ref.table, FCPROJW, 1),
                     *last = ref.table.tensors + ref.table.count;
        for (const Tensor *w = last; w-- > cut;) at -= w->rows * w->cols * element;
        at += 3 * expert;
        ok = memcmp(now + at, old + at, expert) != 0;
        memcpy(now + at, old + at, expert);
        write_file(NEW, now, new_bytes);
    }
    check(&x->check, ok, "a checkpoint with the weights of one expert of an older one");
    char flags[ARG_BYTES];
    snprintf(flags, sizeof flags, "%s --expert-parallel 2 --resume steps/step-00000004",
             FOUR_STEPS);
    check_refusal(x, &layout, "its --resume", PLAIN, flags, 2,
                  "h.1.moe.c_proj.weight has the checksum");
    free(now), free(old), free(tokens);
    reference_free(&ref);
}

// ---- group traffic ---------------------------------------------------------------------

// Counts the bytes that all ranks send in the exchanges of two steps. A rank with N_r tokens
// sends 4 N_r k C (e-1)/e elements a layer if capacity is 1 and divides evenly. With
// recomputation it sends half as much again.
static void group_traffic(Context *x) {
    static const struct {
        int d, e;
        size_t k;
        double capacity;
        const char *flags;
        double times;
    } rows[] = {
        {4, 2, 1, 1, "", 4}, {4, 4, 2, 1, "", 4},
        {8, 8, 1, 2, "", 8}, {4, 4, 1, 1, "--recompute layer", 6},
        {4, 1, 2, 1, "", 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Layout layout = {"train_moe", rows[i].d, rows[i].flags};
        if (rows[i].d > max_ranks(x)) continue;
        Setting setting = {"NCCL_TRAFFIC=1", 0};
        Outcome o = run(x->build, &layout, setting,
                        "--train-data golden/train.bin --seq 24 --global-batch 8 --steps 2 "
                        "--layers 2 --heads 2 --channels 32 --vocab 61 --micro-batch 1 "
                        "--val-every 0 --experts 8 "
                        "--top-k %zu --capacity %g --expert-parallel %d",
                        rows[i].k, rows[i].capacity, rows[i].e);
        double bytes = 0, e = rows[i].e;
        for (const char *line = strstr(o.err, "traffic: experts "); line;
             line = strstr(line + 1, "traffic: experts ")) {
            unsigned long long sent = 0;
            if (sscanf(line, "traffic: experts rank %*d of %*d, ncclSend: %*u calls, %llu",
                       &sent) == 1)
                bytes += (double)sent;
        }
        double want = rows[i].times * 2 * 2 * (8 * 24) * (double)rows[i].k * 32 * (e - 1) / e *
                      (x->bf16 ? 2 : 4);
        check(&x->check, o.code == 0 && bytes == want,
              "d %d, e %d, k %zu, capacity %g %s: %.0f bytes sent to experts "
              "and back, %.0f by the formula",
              rows[i].d, rows[i].e, rows[i].k, rows[i].capacity, rows[i].flags, bytes, want);
        outcome_free(&o);
    }
}

// ---- group refusals --------------------------------------------------------------------

static void group_refusals(Context *x) {
    static const struct { int d; const char *flags, *says;
    } rows[] = {
        {1, "--top-k 9", "--top-k 9 is more than --experts 8"},
        {1, "--experts 4 --top-k 5", "--top-k 5 is more than --experts 4"},
        {1, "--capacity 0", "--capacity must be a number from 0.01 to 128, not '0'"},
        {1, "--capacity nan", "--capacity must be a number"},
        {1, "--experts 0", "--experts must be a whole number from 1 to 128"},
        {1, "--expert-parallel 2", "--expert-parallel 2 does not divide the 1 data rank"},
        {4, "--expert-parallel 3 --experts 6",
         "--expert-parallel 3 does not divide the 4 data ranks"},
        {4, "--expert-parallel 4 --experts 6", "--expert-parallel 4 does not divide --experts 6"},
        {4, "--expert-parallel 2 --zero 0", "--expert-parallel 2 needs --zero 1"},
        {1, "--init golden", "\"model_type\" is not \"gpt2_moe\""},
        {1, "--expert-paralel 2",
         "unknown flag '--expert-paralel': did you mean --expert-parallel?"},
        {1, "--tensor 2", "--tensor is for train_gpt_tp"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Layout layout = {"train_moe", rows[i].d, rows[i].flags};
        check_refusal(x, &layout, rows[i].flags, PLAIN,
                      "--train-data golden/train.bin --out refused", 2, rows[i].says);
    }
    check(&x->check, !file_exists("refused"), "and nothing is left behind");
}

int main(int argc, char **argv) {
    static Context x;
    static const Group groups[] = {
        {"reference", group_reference}, {"layouts", group_layouts},
        {"bits", group_bits},           {"checkpoints", group_checkpoints},
        {"replicas", group_replicas},   {"traffic", group_traffic},
        {"refusals", group_refusals}};
    prefer_plain_kernels();
    return test_trainers(&x, groups, sizeof groups / sizeof *groups, argc, argv);
}
