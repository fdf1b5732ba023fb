// test_5d.c: every gradient tensor of train_5d against the fp64 reference, at each of the five
// dimensions alone and at several together; bits that the order of streams may not change;
// checkpoints that another layout resumes; refusals. ALL=1: every pair, and all five.
//
//   test_5d BUILD_DIR [GROUP]      for example: test_5d build/cpu-fp32 layouts
#define _GNU_SOURCE
#define Context TestContext  // llmc/host/context.h has another one
#include "dev/test/compare_runs.h"
#undef Context
#include "llmc/reference_5d.h"

enum { L = 4, C = 32, NH = 8, KV = 4, F = 24, V = 200, T = 16, G = 8, STEPS = 2, E = 4, K = 2 };

// A kind of blocks. E 0: with an MLP; else experts, and what the command line says of them.
typedef struct {
    const char *name;
    LlamaType type;
    bool tied;
    size_t E, k;
    double capacity, balance, z;
    bool normalised;
    size_t HS;  // channels of a head; 0: C / NH
} Kind;

enum { LLAMA_MLP, MIXTRAL, DROPS, QWEN2_MLP, QWEN3_MOE, RAW };

static const Kind KINDS[] = {
    {"llama", LLAMA, false, 0, 0, 0, 0, 0, false, 0},
    {"mixtral", LLAMA, false, E, K, 0, 0.1, 0.01, true, 0},
    {"mixtral, some tokens dropped", LLAMA, true, E, K, 0.75, 0.1, 0.01, true, 0},
    {"qwen2", QWEN2, true, 0, 0, 0, 0, 0, false, 0},
    {"qwen3-moe", QWEN3, false, E, K, 0, 0.1, 0.01, true, 6},
    {"qwen3-moe, weights not normalised", QWEN3, false, E, 3, 0.9, 0.1, 0.01, false, 6},
};

// The model under test, as reference_train calls it.
static ReferenceMoe tested;

static double tested_loss(Reference *ref, const int *tokens, const int *targets, size_t B,
                          size_t seq, double scale) {
    if (tested.E == 0) return reference_llama_loss(ref, tokens, targets, B, seq, scale);
    return reference_5d_loss(ref, &tested, tokens, targets, B, seq, scale, NULL);
}

// With the two losses of experts, whose gradients are among those of the loss.
static double tested_losses(Reference *ref, const int *tokens, const int *targets, size_t B,
                            size_t seq, double scale) {
    double extra;
    double loss = reference_5d_loss(ref, &tested, tokens, targets, B, seq, scale, &extra);
    return loss + extra;
}

static ReferenceMoe reference_of(const Kind *kind, size_t seq, size_t c) {
    double part = (double)(seq / c), choices = (double)kind->k / (double)kind->E;
    double slots = kind->capacity > 0 ? ceil(kind->capacity * part * choices) : part;
    ReferenceMoe moe = {kind->E, kind->k, (size_t)(slots < part ? slots : part), kind->balance,
                        kind->z, NULL, kind->normalised, c};
    return moe;
}

// Makes a model with random weights and routers that are sure of themselves. *m stays.
static Reference model_of(const Kind *kind, MoeLlama *m, GPTConfig config, size_t kv,
                          size_t hidden, uint64_t seed) {
    Llama *llama = &m->llama;
    memset(m, 0, sizeof *m);
    llama->type = kind->type;
    llama->tied = kind->tied;
    llama->KV = kv;
    llama->F = hidden;
    llama->theta = 100;
    llama->epsilon = 1e-5;
    llama->rotary = 1;
    llama->HS = kind->HS ? kind->HS : config.C / config.NH;
    m->E = kind->E;
    m->k = kind->k;
    m->normalised = kind->normalised;
    moe_llama_make(m);
    config.spec = &llama->spec;
    config.Vp = padded_vocabulary(config.V);
    Reference ref = reference_create(&config);
    random_params(&ref, 0.2, &seed);
    for (size_t l = 0; l < config.L && m->E; l++) {
        const Tensor *x = table_find(&ref.table, ROUTER, l);
        for (size_t i = 0; i < x->rows * x->cols; i++)
            ref.params[x->offset + i] = (float)(5 * ref.params[x->offset + i]);
    }
    return ref;
}

// ---- group reference -------------------------------------------------------------------

static void group_reference(TestContext *x) {
    enum { SHORT = 8, B = 2 };
    static const Kind kinds[] = {
        {"no token dropped", LLAMA, false, 4, 2, 0, 0.3, 0.1, true, 0},
        {"some tokens dropped", LLAMA, true, 3, 2, 0.6, 0.3, 0.1, true, 0},
        {"not normalised", QWEN3, false, 3, 2, 0.6, 0.3, 0.1, false, 4},
        {"one expert", LLAMA, false, 1, 1, 0, 0, 0.1, true, 0}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        GPTConfig config = {2, 8, 4, 7, 0, SHORT, NULL};
        MoeLlama m;
        Reference ref = model_of(&kinds[i], &m, config, 2, 5, 1);
        int *tokens = random_tokens(B * SHORT + 1, 7, 2);
        tested = reference_of(&kinds[i], SHORT, 1 + i % 2);
        Errors e = compare_differences(&ref, tested_losses, tokens, B, SHORT);
        check(&x->check, e.worst < 1e-6, "reference: %s: finite differences %.1e (%s)",
              kinds[i].name, e.worst, e.name);
        free(tokens);
        reference_free(&ref);
    }
}

// ---- group layouts ---------------------------------------------------------------------

// t * d * p ranks; of the data ranks c share each sequence and e share out the experts.
typedef struct {
    int kind, t, d, p, c, e, micro;
    const char *flags;
    int when;  // 1: ALL=1 only; 2: in bf16, too
} Row;

static const Row ROWS[] = {
    // each dimension alone
    {LLAMA_MLP, 1, 1, 1, 1, 1, 2, "", 1},
    {MIXTRAL, 1, 1, 1, 1, 1, 2, "", 2},
    {QWEN3_MOE, 1, 1, 1, 1, 1, 4, "--recompute gelu", 1},
    {RAW, 1, 1, 1, 1, 1, 1, "--recompute layer", 1},
    {MIXTRAL, 2, 1, 1, 1, 1, 1, "", 1},
    {LLAMA_MLP, 1, 2, 1, 2, 1, 1, "", 2},
    {QWEN3_MOE, 1, 2, 1, 2, 1, 2, "", 1},
    {MIXTRAL, 1, 2, 1, 1, 2, 1, "", 1},
    {MIXTRAL, 1, 2, 1, 1, 1, 1, "", 1},
    {QWEN3_MOE, 1, 1, 2, 1, 1, 1, "", 1},

    // pairs: t with c, e, d, p
    {LLAMA_MLP, 2, 2, 1, 2, 1, 1, "--sequence-parallel 1", 1},
    {MIXTRAL, 2, 2, 1, 2, 1, 1, "--sequence-parallel 1", 1},
    {QWEN3_MOE, 2, 2, 1, 1, 2, 1, "--sequence-parallel 1 --recompute gelu", 0},
    {MIXTRAL, 2, 2, 1, 1, 1, 1, "", 1},
    {QWEN3_MOE, 2, 1, 2, 1, 1, 1, "--sequence-parallel 1", 1},

    // c with e (the same two ranks, and others), d, p
    {RAW, 1, 2, 1, 2, 2, 1, "", 0},
    {MIXTRAL, 1, 4, 1, 2, 4, 1, "", 1},
    {MIXTRAL, 1, 4, 1, 4, 2, 1, "", 1},
    {QWEN2_MLP, 1, 4, 1, 2, 1, 1, "--recompute layer", 1},
    {LLAMA_MLP, 1, 2, 2, 2, 1, 1, "--virtual 2", 1},

    // e with d, p; d with p
    {DROPS, 1, 4, 1, 1, 2, 1, "--overlap 0", 1},
    {QWEN3_MOE, 1, 2, 2, 1, 2, 1, "--recompute layer", 1},
    {MIXTRAL, 1, 2, 2, 1, 1, 1, "--zero 0 --schedule gpipe", 1},

    // three and more, on 8 ranks
    {QWEN3_MOE, 2, 2, 2, 2, 2, 1, "--sequence-parallel 1 --virtual 2", 2},
    {DROPS, 2, 2, 2, 2, 1, 1, "--recompute layer", 1},
    {QWEN3_MOE, 2, 2, 2, 1, 2, 1, "--sequence-parallel 1 --recompute gelu", 1},
    {RAW, 2, 4, 1, 2, 4, 1, "", 1},
    {DROPS, 2, 4, 1, 2, 2, 1, "--sequence-parallel 1", 1},
    {MIXTRAL, 2, 4, 1, 4, 2, 1, "--recompute layer --overlap 0", 1},
    {QWEN3_MOE, 1, 4, 2, 2, 2, 1, "--order dpt", 1},
    {DROPS, 1, 4, 2, 2, 4, 1, "", 1},
    {QWEN3_MOE, 1, 8, 1, 4, 4, 1, "", 1},
    {LLAMA_MLP, 1, 8, 1, 8, 1, 1, "", 1},
    {LLAMA_MLP, 4, 2, 1, 2, 1, 1, "--sequence-parallel 1", 1},
    {QWEN3_MOE, 4, 2, 1, 2, 2, 1, "", 1},
};

static void training_of(char flags[ARG_BYTES], const Training *h, const Row *row) {
    const Kind *kind = &KINDS[row->kind];
    training_flags(flags, h, "model", "shard.bin");
    size_t used = strlen(flags);
    snprintf(flags + used, ARG_BYTES - used,
             " --tensor %d --data %d --pipeline %d --context %d --expert-parallel %d "
             "--micro-batch %d --capacity %g --balance-loss %g --z-loss %g %s",
             row->t, row->d, row->p, row->c, row->e, row->micro, kind->capacity, kind->balance,
             kind->z, row->flags);
}

// A large eps: an expert that few tokens meet has gradients of the size of their rounding, which
// AdamW would blow up to steps.
static const Training TRAINING = {T, G, STEPS, 1e-4, 0.1, 1.0, 0.9, 0.95, 1e-6, 0};

// Writes the folder "model" and returns its reference.
static Reference write_model_of(const Kind *kind, MoeLlama *m) {
    GPTConfig config = {L, C, NH, V, 0, 4 * T, NULL};
    Reference ref = model_of(kind, m, config, KV, F, 30);
    Error err;
    write_folder("model", strdup("{}"), &ref.table, ref.params, INTACT);
    if (!moe_llama_write("model/config.json", &ref.config, false, &err))
        die("cannot write", "model/config.json");
    return ref;
}

static void test_row(TestContext *x, const Row *row, const int *tokens) {
    const Kind *kind = &KINDS[row->kind];
    char flags[ARG_BYTES], name[200];
    MoeLlama m;
    Layout layout = {"train_5d", row->t * row->d * row->p, ""};
    Training h = TRAINING;
    if (layout.ranks > max_ranks(x)) return;
    Reference ref = write_model_of(kind, &m);
    Reference trained = reference_copy(&ref);
    tested = kind->E ? reference_of(kind, T, (size_t)row->c) : (ReferenceMoe){0};
    reference_loss = tested_loss;
    Expected want = reference_train(&trained, &h, tokens, x->bf16);
    training_of(flags, &h, row);
    snprintf(name, sizeof name, "%s: t %d, d %d, p %d, c %d, e %d, %s", kind->name, row->t,
             row->d, row->p, row->c, row->e, row->flags);

    // The copies are equal in whatever order each communicator adds.
    setenv("NCCL_ORDER", row->d > 2 ? "any:1" : "", 1);
    remove_tree("out");
    bool ok = runs(x, &layout, "",
                   "%s --log log --dump-gradients gradients --out out --debug-replicas 1",
                   flags);
    setenv("NCCL_ORDER", "", 1);
    double *got = allocate(ref.table.total * sizeof(double));
    Bounds bound = bounds(x, &ref.config);
    if (x->bf16) {
        bound.gradient *= 2;
        bound.gradients *= 1.5;
    }
    Measured r = measure_run(&ref.table, &want, h.steps, got);
    bool saved = read_tensors("out/step-00000002/model.safetensors", "", &ref.table, got);
    Errors e = compare_tensors(&ref.table, got, want.weights);
    ok = ok && saved && within(&r, &bound) && e.worst <= bound.weight;
    check(&x->check, ok,
          "%-64s gradients %.1e, %s %.1e, losses %.1e, norms %.1e, weights %.1e", name,
          r.gradients.whole, r.gradients.name, r.gradients.worst, r.loss, r.norm, e.worst);
    free(got);
    expected_free(&want);
    reference_free(&trained);
    reference_free(&ref);
}

static int *write_tokens(uint64_t seed) {
    size_t count = T * G * STEPS + 1;
    int *tokens = random_tokens(count, V, seed);
    write_shard("shard.bin", 20240520, 1, (int)count, tokens, count);
    return tokens;
}

static void group_layouts(TestContext *x) {
    const char *all = getenv("ALL");
    int *tokens = write_tokens(31);
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
        bool wanted = x->bf16 ? ROWS[i].when == 2 : ROWS[i].when != 1 || (all && *all);
        if (wanted) test_row(x, &ROWS[i], tokens);
    }
    free(tokens);
}

// ---- main ------------------------------------------------------------------------------

static const Group GROUPS[] = {
    {"reference", group_reference},  // the reference itself, no trainer
    {"layouts", group_layouts},      // layouts against the reference
};

int main(int argc, char **argv) {
    static TestContext context;
    prefer_plain_kernels();
    return test_trainers(&context, GROUPS, sizeof GROUPS / sizeof *GROUPS, argc, argv);
}
