// test_llama.c: runs train_llama as a user would. Compares losses, norms, gradients, weights
// and folders with the fp64 reference, llmc/reference_llama.h. Compares the reference with
// PyTorch's numbers (dev/data/golden_llama.py).
//
//   test_llama BUILD_DIR [GROUP]      for example: test_llama build/cpu-fp32 layouts
//
// Run it in the root of the repository.
#define _GNU_SOURCE
#include "dev/test/compare_runs.h"
#include "llmc/reference_llama.h"

// A model and how it is trained. F 0: no more models.
typedef struct {
    const char *name;
    LlamaType type;
    bool tied;
    size_t L, C, NH, KV, F, V, T, micro, global;
    double rotary, factor;
    size_t HS, window;  // 0: C / NH, none
} Model;

// Makes the spec of *m, which must stay where it is, and a model with random weights.
static Reference llama_model(const Model *s, Llama *m, double scale, uint64_t seed) {
    memset(m, 0, sizeof *m);
    m->type = s->type, m->tied = s->tied, m->KV = s->KV, m->F = s->F, m->theta = 100,
    m->rotary = s->rotary;
    m->HS = s->HS ? s->HS : s->C / s->NH, m->window = s->window;
    m->epsilon = s->type == QWEN2 ? 1e-6 : 1e-5, m->factor = s->factor, m->low = 1, m->high = 4,
    m->original = 16;
    llama_make(m);
    GPTConfig config = {s->L, s->C, s->NH, s->V, padded_vocabulary(s->V), 4 * s->T, &m->spec};
    Reference ref = reference_create(&config);
    random_params(&ref, scale, &seed);
    return ref;
}

static char *llama_config(const GPTConfig *g) {
    static const char *const CLASSES[] = {"LlamaForCausalLM", "Qwen2ForCausalLM",
                                          "NemotronForCausalLM", "Qwen3ForCausalLM",
                                          "MistralForCausalLM"};
    const Llama *m = llama_of(g);
    char *text = allocate(2048), scaling[200] = "null", window[64] = "";
    if (m->factor > 0)
        snprintf(scaling, sizeof scaling,
                 "{\"rope_type\": \"llama3\", \"factor\": %g, \"low_freq_factor\": %g, "
                 "\"high_freq_factor\": %g, \"original_max_position_embeddings\": %g}",
                 m->factor, m->low, m->high, m->original);
    if (m->type == MISTRAL && m->window)
        snprintf(window, sizeof window, "\"sliding_window\": %zu, ", m->window);
    else if (m->type == MISTRAL)
        snprintf(window, sizeof window, "\"sliding_window\": null, ");
    snprintf(
        text, 2048,
        "{\"architectures\": [\"%s\"], \"model_type\": \"%s\", \"hidden_size\": %zu, "
        "\"num_hidden_layers\": %zu, \"num_attention_heads\": %zu, \"num_key_value_heads\": %zu, "
        "\"head_dim\": %zu, %s"
        "\"intermediate_size\": %zu, \"vocab_size\": %zu, \"max_position_embeddings\": %zu, "
        "\"hidden_act\": \"%s\", \"%s\": %g, \"rope_theta\": %g, \"rope_scaling\": %s, "
        "\"partial_rotary_factor\": %.17g, \"tie_word_embeddings\": %s, \"bos_token_id\": 1, "
        "\"eos_token_id\": [2, 3]}",
        CLASSES[m->type], LLAMA_TYPES[m->type], g->C, g->L, g->NH, m->KV, m->HS, window,
        m->F, g->V, g->maxT,
        m->type == NEMOTRON ? "relu2" : "silu", m->type == NEMOTRON ? "norm_eps" : "rms_norm_eps",
        m->epsilon, m->theta, scaling, m->rotary, m->tied ? "true" : "false");
    return text;
}

// ---- group reference -------------------------------------------------------------------

static const Model TINY[] = {
    {"llama", LLAMA, false, 2, 8, 4, 2, 5, 7, 4, 1, 1, 1, 8, 0, 0},
    {"qwen2", QWEN2, true, 2, 8, 2, 1, 5, 7, 4, 1, 1, 1, 0, 0, 0},
    {"nemotron", NEMOTRON, false, 2, 8, 2, 2, 5, 7, 4, 1, 1, 0.5, 0, 0, 0},
    {"qwen3", QWEN3, true, 2, 8, 4, 2, 5, 7, 4, 1, 1, 1, 0, 4, 0},
    {"mistral", MISTRAL, false, 2, 8, 2, 1, 5, 7, 4, 1, 1, 1, 0, 0, 2},
};

// Compares backward with central differences of forward, for every single parameter.
static void test_differences(Context *x, const Model *s) {
    enum { B = 2, T = 4 };
    Llama m;
    Reference ref = llama_model(s, &m, 0.5, 1);
    int *tokens = random_tokens(B * T + 1, s->V, 2);
    Errors e = compare_differences(&ref, reference_llama_loss, tokens, B, T);
    check(&x->check, e.worst < 1e-7,
          "reference: %s's gradients against finite differences: %.1e (%s)", s->name, e.worst,
          e.name);
    free(tokens);
    reference_free(&ref);
}

// Tests the independent case: PyTorch in float64, or transformers, whose norms, softmax and
// angles stay in float32. Weights, tokens and directions come from one generator.
static void test_golden(Context *x, const cJSON *item) {
    const cJSON *model = cJSON_GetObjectItem(item, "model"),
                *gradients = cJSON_GetObjectItem(item, "gradients");
    const char *type = cJSON_GetStringValue(cJSON_GetObjectItem(model, "type"));
    Model s = {type,
               LLAMA,
               cJSON_IsTrue(cJSON_GetObjectItem(model, "tied")),
               (size_t)number(model, "L"),
               (size_t)number(model, "C"),
               (size_t)number(model, "NH"),
               (size_t)number(model, "KV"),
               (size_t)number(model, "F"),
               (size_t)number(model, "V"),
               (size_t)number(model, "T"),
               1,
               1,
               number(model, "rotary"),
               number(model, "factor"),
               (size_t)number(model, "HS"),
               (size_t)number(model, "window")};
    while (strcmp(LLAMA_TYPES[s.type], type) != 0) s.type++;
    Llama m;
    Reference ref = llama_model(&s, &m, 0, 0);
    m.theta = number(model, "theta"), m.epsilon = number(model, "epsilon"),
    m.original = number(model, "original");
    uint64_t seed = (uint64_t)number(model, "seed");
    random_params(&ref, number(model, "scale"), &seed);
    size_t B = (size_t)number(model, "B"), N = B * s.T;
    int *tokens = allocate((N + 1) * sizeof(int));
    for (size_t i = 0; i <= N; i++) tokens[i] = (int)((noise(&seed) + 1) / 2 * (double)s.V);
    double loss = reference_llama_loss(&ref, tokens, tokens + 1, B, s.T, 1.0 / (double)N) /
                  (double)N,
           worst = 0;
    for (size_t i = 0; i < ref.table.count; i++) {
        const Tensor *t = &ref.table.tensors[i];
        const cJSON *want = cJSON_GetObjectItem(gradients, t->name);
        double norm = 0, along = 0;
        for (size_t k = 0; k < t->rows * t->cols; k++) {
            double g = ref.grads[t->offset + k];
            norm += g * g, along += g * noise(&seed);
        }
        double scale = want ? cJSON_GetArrayItem(want, 0)->valuedouble : NAN;
        double error = want ? fmax(fabs(sqrt(norm) - scale),
                                   fabs(along - cJSON_GetArrayItem(want, 1)->valuedouble)) /
                                  scale
                            : INFINITY;
        worst = error > worst ? error : worst;
    }
    bool by = cJSON_GetObjectItem(model, "by") != NULL;
    double error = relative(loss, number(item, "loss")), bounds[] = {by ? 1e-7 : 1e-12,
                                                                     by ? 5e-6 : 1e-11};
    check(&x->check,
          error < bounds[0] && worst < bounds[1] &&
              cJSON_GetArraySize(gradients) == (int)ref.table.count,
          "reference: %s's %s: loss %.1e, gradients %.1e (bounds %.0e, %.0e)",
          by ? "transformers" : "PyTorch", type, error, worst, bounds[0], bounds[1]);
    free(tokens);
    reference_free(&ref);
}

static void group_reference(Context *x) {
    for (size_t i = 0; i < sizeof TINY / sizeof *TINY; i++) test_differences(x, &TINY[i]);
    cJSON *golden = read_json("golden/llama.json");
    const cJSON *item;
    cJSON_ArrayForEach(item, golden) test_golden(x, item);
    cJSON_Delete(golden);
}

// ---- runs ------------------------------------------------------------------------------

static const Layout LLAMA_ONE = {"train_llama", 1, ""};

// The token that documents begin with; -1: they are not kept apart.
static int eot = -1;

static double tested_loss(Reference *ref, const int *tokens, const int *targets, size_t B,
                          size_t T, double scale) {
    int *first = eot < 0 ? NULL : document_begins(tokens, B * T, T, eot);
    ref->first = first;
    double loss = reference_llama_loss(ref, tokens, targets, B, T, scale);
    ref->first = NULL;
    free(first);
    return loss;
}

// Puts `eot` into sequences of T tokens, which are of eight kinds. Kind 0 is one document, and
// kind 1 begins with documents of one token. In kind 2 documents begin at its ends and beside the
// borders of a window of 9. The others have random lengths. In bf16 equal tokens have equal
// errors, so `eot` must be rare.
static void add_documents(int *tokens, size_t count, size_t T) {
    static const size_t borders[] = {1, 2, 10, 11, 20, 30, 71};
    int *lengths = random_tokens(count, 14, 36);
    for (size_t n = 0; n < count; n++) {
        size_t kind = n / T % 8, t = n % T;
        if (tokens[n] == eot) tokens[n] = 0;
        if ((kind == 1 && t < 9) || (kind > 2 && lengths[n] == 0)) tokens[n] = eot;
        for (size_t i = 0; i < sizeof borders / sizeof *borders && kind == 2; i++)
            if (t == borders[i]) tokens[n] = eot;
    }
    free(lengths);
}

// A model with its folder, its shard and the reference's results.
typedef struct {
    Llama llama;
    Reference ref;
    Training h;
    Expected want;
    char flags[ARG_BYTES];
} Case;

static void open_case(const Context *x, Case *c, const Model *s, const char *folder) {
    Training h = {s->T, s->global, 2, 1e-4, 0.1, 1.0, 0.9, 0.95, 1e-8, 0};
    size_t count = s->T * s->global * h.steps + 1;
    int *tokens = random_tokens(count, s->V, 31);
    char shard[64];
    if (eot >= 0) add_documents(tokens, count, s->T);
    c->h = h;
    c->ref = llama_model(s, &c->llama, s->C <= 32 ? 0.2 : 0.2 * sqrt(32 / (double)s->C), 30);
    write_folder(folder, llama_config(&c->ref.config), &c->ref.table, c->ref.params, INTACT);
    snprintf(shard, sizeof shard, "%.40s.bin", folder);
    write_shard(shard, 20240520, 1, (int)count, tokens, count);
    Reference trained = reference_copy(&c->ref);
    reference_loss = tested_loss;
    c->want = reference_train(&trained, &h, tokens, x->bf16);
    training_flags(c->flags, &h, folder, shard);
    if (eot >= 0) strcat(c->flags, " --documents 1");
    reference_free(&trained);
    free(tokens);
}

static void close_case(Case *c) {
    expected_free(&c->want);
    reference_free(&c->ref);
}

// Returns GPT-2's bounds. In bf16 they are 1.5 times as wide for all gradients together and twice
// as wide for the worst. Here q and k are tensors of their own, RoPE rounds them once more in
// either direction, and their gradients are differences. Measured are 1.3% and 3.2%; a lost
// micro-batch of 8 would be 12%.
static Bounds llama_bounds(const Context *x, const GPTConfig *g) {
    Bounds b = bounds(x, g);
    if (x->bf16) b.gradient *= 2, b.gradients *= 1.5;
    return b;
}

// Compares one run with the reference: gradients, losses, norms, and the weights of the folder
// that it saves.
static bool run_case(Context *x, Case *c, const Layout *layout, const char *name, double *got) {
    const ParamTable *table = &c->ref.table;
    Bounds bound = llama_bounds(x, &table->config);
    remove_tree("out");
    bool ok = runs(x, layout, "", "%s --log log --dump-gradients gradients --out out", c->flags);
    Measured r = measure_run(table, &c->want, c->h.steps, got);
    double *weights = allocate(table->total * sizeof(double));
    bool saved = read_tensors("out/step-00000002/model.safetensors", "", table, weights);
    Errors e = compare_tensors(table, weights, c->want.weights);
    ok = ok && saved && within(&r, &bound) && e.worst <= bound.weight && e.whole <= bound.weights;
    check(&x->check, ok, "%-64s gradients %.1e, %s %.1e, losses %.1e, norms %.1e, weights %.1e",
          name, r.gradients.whole, r.gradients.name, r.gradients.worst, r.loss, r.norm, e.worst);
    free(weights);
    return ok;
}

// ---- group shapes: one rank, odd sizes -------------------------------------------------

static const Model SHAPES[] = {
    {"nothing divides", LLAMA, false, 3, 18, 3, 1, 25, 33, 7, 1, 3, 1, 8, 0, 0},
    {"nothing divides, biases of q, k, v", QWEN2, true, 3, 18, 3, 3, 13, 33, 7, 1, 3, 1, 0, 0, 0},
    {"half of a head turns", NEMOTRON, false, 2, 30, 5, 1, 7, 29, 9, 2, 4, 0.4, 0, 0, 0},
    {"two tokens, one head", LLAMA, true, 1, 8, 1, 1, 9, 9, 2, 2, 8, 1, 0, 0, 0},
    {"T beyond a tile, six heads a group", QWEN2, false, 1, 24, 6, 1, 20, 97, 70, 1, 2, 1, 0, 0, 0},
    {"wide heads", LLAMA, false, 1, 288, 2, 1, 64, 50, 33, 2, 2, 1, 8, 0, 0},
    {"packs", NEMOTRON, true, 2, 128, 4, 2, 64, 64, 32, 2, 4, 0.5, 0, 0, 0},
    {"heads wider than C / NH", QWEN3, false, 2, 18, 3, 1, 25, 33, 11, 1, 3, 1, 0, 10, 0},
    {"a window, T beyond a tile", MISTRAL, false, 1, 24, 6, 1, 20, 97, 70, 1, 2, 1, 0, 0, 9},
    {"a window of two keys", MISTRAL, false, 1, 16, 2, 2, 20, 50, 6, 2, 2, 1, 0, 0, 2},
    {"a window as long as T", MISTRAL, true, 1, 16, 2, 1, 20, 50, 8, 2, 2, 1, 0, 0, 8},
    {"heads of 128, tied", QWEN3, true, 1, 64, 4, 2, 48, 50, 33, 1, 2, 1, 0, 128, 0},
    {"5 heads of 6 for 24 channels", QWEN3, true, 1, 24, 5, 1, 20, 33, 17, 2, 4, 1, 0, 6, 0},
};

static void group_shapes(Context *x) {
    for (size_t i = 0; i < sizeof SHAPES / sizeof *SHAPES; i++) {
        const Model *s = &SHAPES[i];
        static Case c;
        char name[160];
        open_case(x, &c, s, "model");
        size_t used = strlen(c.flags);
        snprintf(c.flags + used, sizeof c.flags - used, " --micro-batch %zu", s->micro);
        double *got = allocate(c.ref.table.total * sizeof(double));
        snprintf(name, sizeof name, "%s: %s (C=%zu NH=%zu KV=%zu F=%zu T=%zu)",
                 LLAMA_TYPES[s->type], s->name, s->C, s->NH, s->KV, s->F, s->T);
        run_case(x, &c, &LLAMA_ONE, name, got);
        free(got);
        close_case(&c);
    }
}

// ---- group layouts ---------------------------------------------------------------------

static const Model MODELS[] = {
    {"llama", LLAMA, false, 4, 32, 8, 4, 48, 200, 16, 1, 8, 1, 8, 0, 0},
    {"qwen2", QWEN2, true, 4, 32, 8, 4, 44, 200, 16, 1, 8, 1, 0, 0, 0},
    {"nemotron", NEMOTRON, false, 4, 32, 8, 4, 64, 200, 16, 1, 8, 0.5, 0, 0, 0},
    {"qwen3", QWEN3, true, 4, 28, 8, 4, 44, 200, 16, 1, 8, 1, 0, 16, 0},
    {"mistral", MISTRAL, false, 4, 32, 8, 4, 48, 200, 16, 1, 8, 1, 0, 0, 5},
};

enum { NUM_MODELS = sizeof MODELS / sizeof *MODELS };

// A layout: t * d * p ranks, the sequences of a micro-batch, flags.
typedef struct {
    int model, t, d, p, micro;
    const char *flags;
    bool bf16;
} Row;

static const Row ROWS[] = {
    {0, 1, 1, 1, 1, "", true},
    {0, 1, 1, 1, 1, "--recompute gelu", false},
    {0, 1, 1, 1, 1, "--recompute layer", false},
    {0, 1, 1, 1, 4, "", false},
    {0, 2, 1, 1, 1, "", true},
    {0, 4, 1, 1, 1, "--recompute layer", false},
    {0, 2, 1, 1, 1, "--sequence-parallel 1", true},
    {0, 4, 1, 1, 2, "--sequence-parallel 1 --recompute gelu", false},
    {0, 1, 1, 2, 1, "", true},
    {0, 1, 1, 2, 1, "--schedule gpipe --recompute layer", false},
    {0, 1, 1, 2, 1, "--virtual 2", false},
    {0, 1, 1, 4, 1, "", false},
    {0, 1, 2, 1, 1, "", true},
    {0, 1, 2, 1, 1, "--zero 0", false},
    {0, 1, 2, 1, 1, "--overlap 0 --recompute layer", false},
    {0, 1, 8, 1, 1, "", false},
    {0, 2, 2, 2, 1, "", false},
    {0, 2, 2, 2, 1, "--sequence-parallel 1 --virtual 2", true},
    {0, 2, 2, 2, 2, "--sequence-parallel 1 --zero 0 --overlap 0 --recompute gelu", false},
    {1, 1, 1, 1, 1, "", true},
    {1, 4, 1, 1, 1, "", false},
    {1, 2, 1, 2, 1, "--sequence-parallel 1", false},
    {1, 1, 2, 2, 1, "--virtual 2", false},
    {1, 2, 2, 2, 1, "--sequence-parallel 1 --recompute layer", true},
    {1, 1, 4, 2, 1, "", false},
    {2, 1, 1, 1, 1, "", true},
    {2, 4, 1, 1, 1, "--sequence-parallel 1", false},
    {2, 1, 2, 2, 1, "--schedule gpipe", false},
    {2, 2, 2, 2, 1, "--sequence-parallel 1 --virtual 2 --recompute layer", true},
    {3, 1, 1, 1, 1, "", true},
    {3, 4, 1, 1, 1, "", false},
    {3, 2, 2, 1, 1, "--sequence-parallel 1 --recompute gelu", false},
    {3, 2, 2, 2, 1, "--virtual 2", true},
    {3, 2, 2, 2, 1, "--sequence-parallel 1 --virtual 2 --recompute layer", false},
    {4, 1, 1, 1, 4, "", true},
    {4, 4, 1, 1, 1, "--recompute layer", false},
    {4, 2, 2, 2, 1, "--sequence-parallel 1 --virtual 2", true},
};

enum { NUM_ROWS = sizeof ROWS / sizeof *ROWS };

// Rows of the same model, t, d, micro-batch and sequence parallelism have the same bits, if all
// have stages or none.
static bool same_family(const Row *a, const Row *b) {
    bool sp[2] = {strstr(a->flags, "--sequence-parallel 1"),
                  strstr(b->flags, "--sequence-parallel 1")};
    return a->model == b->model && a->t == b->t && a->d == b->d && a->micro == b->micro &&
           sp[0] == sp[1] && (a->p > 1) == (b->p > 1);
}

static void run_rows(Context *x, const Model *models, const Row *rows, size_t count) {
    static Case cases[NUM_MODELS];
    static Log logs[NUM_ROWS];
    double *gradients[NUM_ROWS] = {NULL};
    for (size_t i = 0; i < count; i++) {
        const Row *row = &rows[i];
        Case *c = &cases[row->model];
        const ParamTable *table = &c->ref.table;
        char name[160], flags[256];
        Layout layout = {"train_llama", row->t * row->d * row->p, flags};
        if (layout.ranks > max_ranks(x) || (x->bf16 && !row->bf16)) continue;
        if (!c->want.weights) open_case(x, c, &models[row->model], models[row->model].name);
        snprintf(name, sizeof name, "%s %dx%dx%d of %d %s", models[row->model].name, row->t,
                 row->d, row->p, row->micro, row->flags);
        snprintf(flags, sizeof flags,
                 "--tensor %d --data %d --pipeline %d --micro-batch %d --debug-replicas 1 %s",
                 row->t, row->d, row->p, row->micro, row->flags);
        gradients[i] = allocate(table->total * sizeof(double));
        // The copies of the tied embedding are equal in any order of additions of each
        // communicator.
        setenv("NCCL_ORDER", row->d > 2 ? "any:1" : "", 1);
        run_case(x, c, &layout, name, gradients[i]);
        logs[i] = read_log("log");
        for (size_t j = 0; j < i; j++) {
            if (!gradients[j] || !same_family(&rows[j], row)) continue;
            check(&x->check,
                  same_log(&logs[i], &logs[j]) &&
                      memcmp(gradients[i], gradients[j], table->total * sizeof(double)) == 0,
                  "%s: the bits of row %zu", name, j);
            break;
        }
    }
    for (size_t i = 0; i < count; i++) free(gradients[i]);
    for (size_t i = 0; i < NUM_MODELS; i++) {
        if (cases[i].want.weights) close_case(&cases[i]);
        memset(&cases[i], 0, sizeof cases[i]);
    }
}

static void group_layouts(Context *x) { run_rows(x, MODELS, ROWS, NUM_ROWS); }

// ---- group documents: several in a sequence, with a window and without ------------------

static const Model DOCUMENTS[] = {
    {"llama", LLAMA, false, 4, 32, 8, 4, 48, 200, 72, 1, 8, 1, 8, 0, 0},
    {"mistral", MISTRAL, false, 4, 32, 8, 4, 48, 200, 72, 1, 8, 1, 0, 0, 9},
};

static const Row DOCUMENT_ROWS[] = {
    {0, 1, 1, 1, 4, "", true},
    {0, 2, 2, 2, 1, "--sequence-parallel 1 --virtual 2 --recompute layer", false},
    {1, 1, 1, 1, 2, "--recompute layer", true},
    {1, 4, 1, 1, 1, "", false},
    {1, 2, 1, 4, 1, "--recompute gelu", false},
    {1, 2, 2, 2, 1, "--sequence-parallel 1 --virtual 2", true},
};

// Tests that documents together have the loss and the gradients of documents one by one. Alone
// their positions begin at 0, but RoPE's angles are relative.
static void documents_alone(Context *x, const Model *s) {
    static const size_t lengths[] = {1, 5, 26, 40};
    const Layout one = {"train_llama", 1, "--micro-batch 1"};
    Training h = {s->T, 1, 1, 1e-4, 0.1, 1.0, 0.9, 0.95, 1e-8, 0};
    Llama m;
    Reference ref = llama_model(s, &m, 0.2, 30);  // for its weights and its table
    size_t total = ref.table.total;
    double *want = allocate(total * sizeof(double)), *got = allocate(total * sizeof(double));
    int *tokens = random_tokens(s->T + 1, (size_t)eot, 33);
    char flags[ARG_BYTES];
    double loss = 0;
    bool ok = true;
    write_folder("model", llama_config(&ref.config), &ref.table, ref.params, INTACT);
    for (size_t i = 0, t = 0; i < 4; t += lengths[i++]) tokens[t] = eot;
    for (size_t i = 0, t = 0; i < 4; t += lengths[i++]) {
        double share = (double)lengths[i] / (double)s->T;
        h.seq = lengths[i];
        write_shard("shard.bin", 20240520, 1, (int)h.seq + 1, tokens + t, h.seq + 1);
        training_flags(flags, &h, "model", "shard.bin");
        remove("log");
        ok = ok && runs(x, &one, "", "%s --log log --dump-gradients gradients", flags) &&
             read_tensors("gradients", "", &ref.table, got);
        loss += share * read_log("log").loss[0];
        for (size_t k = 0; k < total; k++) want[k] += share * got[k];
    }
    h.seq = s->T;
    write_shard("shard.bin", 20240520, 1, (int)s->T + 1, tokens, s->T + 1);
    training_flags(flags, &h, "model", "shard.bin");
    Bounds bound = llama_bounds(x, &ref.config);
    for (int apart = 1; apart >= 0; apart--) {
        remove("log");
        ok = ok && runs(x, &one, "", "%s --documents %d --log log --dump-gradients gradients",
                        flags, apart) &&
             read_tensors("gradients", "", &ref.table, got);
        double off = relative(read_log("log").loss[0], loss);
        Errors e = compare_tensors(&ref.table, got, want);
        bool near = off <= bound.loss && e.whole <= 2 * bound.gradients;
        bool far = off > 1e-4 && e.whole > 0.05;
        check(&x->check, ok && (apart ? near : far),
              "%s: loss %.1e and gradients %.1e off those of 4 documents one by one%s", s->name,
              off, e.whole, apart ? "" : " with --documents 0");
    }
    remove("log");
    free(want);
    free(got);
    free(tokens);
    reference_free(&ref);
}

// Tests validation, the line about documents, and a resume with another token.
static void documents_used(Context *x, const Model *s) {
    static Case c;
    Layout layout = {"train_llama", 1, "--micro-batch 2"};
    open_case(x, &c, s, s->name);
    int *tokens = random_tokens(s->T * 8 + 1, s->V, 31);
    add_documents(tokens, s->T * 8 + 1, s->T);
    size_t count = 0;
    for (size_t n = 0; n < s->T * 8; n++) count += n % s->T == 0 || tokens[n] == eot;
    char line[120];
    snprintf(line, sizeof line, "documents    begin at token %d: %zu in the next batch of 8\n",
             eot, count);
    Outcome o = run(x->build, &layout, PLAIN, "%s --dry-run", c.flags);
    check(&x->check, o.code == 0 && strstr(o.out, line), "%s: --dry-run says: %.*s", s->name,
          (int)strlen(line) - 1, line);
    outcome_free(&o);

    double got = NAN, want = reference_mean_loss(&c.ref, tokens, s->T, 0, 8, 0);
    remove_tree("out");
    o = run(x->build, &layout, PLAIN, "%s --steps 1 --out out --val-data %s.bin --val-every 1 "
            "--val-batches 1",
            c.flags, s->name);
    const char *at = strstr(o.out, "validation loss ");
    bool found = at && sscanf(at, "validation loss %lf", &got) == 1;
    double bound = 1e-6 + llama_bounds(x, &c.ref.config).loss;  // six decimals are printed
    check(&x->check, o.code == 0 && found && relative(got, want) <= bound,
          "%s: validation keeps documents apart: %.1e off", s->name, relative(got, want));
    outcome_free(&o);

    const char *rest = strchr(c.flags + 7, ' ');  // behind "--init MODEL"
    for (int other = 0; other < 2; other++) {
        o = run(x->build, &layout, PLAIN, "--resume out/step-00000001 %s --eot %d", rest,
                other ? 7 : eot);
        bool note = strstr(o.out, "trained with eot = 199, this run has 7\n") != NULL;
        check(&x->check, o.code == 0 && note == other, "%s: a run that goes on with %s eot %s",
              s->name, other ? "another" : "the same", other ? "says so" : "has no note");
        outcome_free(&o);
    }

    static const Layout layouts[] = {
        {"train_llama", 1, "--micro-batch 4"},
        {"train_llama", 4, "--tensor 2 --pipeline 2 --sequence-parallel 1 --micro-batch 2"}};
    char *samples[2] = {NULL};
    write_letters("letters.json");
    for (int i = 0; i < 2 && layouts[i].ranks <= max_ranks(x); i++) {
        o = run(x->build, &layouts[i], PLAIN,
                "%s --eot %d --sample-every 2 --sample-tokens 90 --prompt abc "
                "--tokenizer letters.json",
                c.flags, eot);
        at = strstr(o.out, "sample: abc");
        samples[i] = strdup(at ? at : "");
        outcome_free(&o);
    }
    if (samples[1])
        check(&x->check, samples[0][0] && strcmp(samples[0], samples[1]) == 0,
              "%s: 1 and 4 ranks print the same sample, longer than a sequence", s->name);
    free(samples[0]);
    free(samples[1]);
    free(tokens);
    close_case(&c);
}

// Tests that recomputation and the order of streams and messages change no bit.
static void documents_bits(Context *x, const Model *s) {
    static const struct { const char *flags, *env;
    } bits[] = {{"", ""},
                {"--recompute layer", "CPU_STREAM_ORDER=random:1 NCCL_DELAY=random:1:2000"}};
    Layout layout = {"train_llama", 8, "--tensor 2 --data 2 --pipeline 2 --micro-batch 1"};
    static Case c;
    bool same = true;
    if (max_ranks(x) < 8) return;
    open_case(x, &c, s, s->name);
    for (int i = 0; i < 2 && same; i++) {
        const char *out = i ? "other" : "base";
        remove_tree(out);
        same = runs(x, &layout, on_gpu(x) ? "" : bits[i].env, "%s --out %s %s", c.flags, out,
                    bits[i].flags);
    }
    check(&x->check, same && same_checkpoint("base/step-00000002", "other/step-00000002"),
          "%s: the same bits, with recomputation and streams in random order", s->name);
    close_case(&c);
}

static void group_documents(Context *x) {
    eot = 199;
    run_rows(x, DOCUMENTS, DOCUMENT_ROWS, sizeof DOCUMENT_ROWS / sizeof *DOCUMENT_ROWS);
    for (size_t i = 0; i < 2 && !x->bf16; i++) documents_alone(x, &DOCUMENTS[i]);
    if (!x->bf16) {
        documents_used(x, &DOCUMENTS[1]);
        documents_bits(x, &DOCUMENTS[1]);
    }
    eot = -1;
}

// ---- group config: config.json alone ---------------------------------------------------

// Returns `base` as text, with the members of `more` set: "-KEY" removes KEY. "null" for
// `more` changes nothing.
static char *with_members(const char *base, const char *more) {
    cJSON *root = cJSON_Parse(base), *set = cJSON_Parse(more), *item;
    if (!root || !set) die("not JSON:", more);
    while ((item = cJSON_DetachItemFromArray(set, 0)) != NULL) {
        const char *key = item->string[0] == '-' ? item->string + 1 : item->string;
        cJSON_DeleteItemFromObjectCaseSensitive(root, key);
        if (key == item->string) cJSON_AddItemToObject(root, strdup(key), item);
        else cJSON_Delete(item);
    }
    char *text = cJSON_Print(root);
    cJSON_Delete(root);
    cJSON_Delete(set);
    return text;
}

// A change of config.json of one of the three models, and a part of the refusal; NULL: none.
typedef struct {
    LlamaType type;
    const char *members, *says;
} Change;

#define YARN "{\"rope_type\": \"yarn\", \"factor\": 4.0}"
#define SCALED(factor)                                \
    "{\"rope_type\": \"llama3\", \"factor\": " factor \
    ", \"low_freq_factor\": 1.0, "                    \
    "\"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 16}"
#define NESTED(members) "{\"rope_parameters\": {\"rope_type\": \"default\", " members "}"
static const Change CHANGES[] = {
    // two places of RoPE
    {QWEN2, NESTED("\"rope_theta\": 100.0") ", \"rope_scaling\": " YARN "}",
     "\"rope_parameters\" and \"rope_scaling\" disagree"},
    {LLAMA, NESTED("\"rope_theta\": 100.0") ", \"rope_scaling\": " SCALED("8.0") "}",
     "\"rope_scaling\" disagree"},
    {LLAMA, "{\"rope_parameters\": " SCALED("8.0") ", \"rope_scaling\": " SCALED("4.0") "}",
     "\"rope_scaling\" disagree"},
    {LLAMA, "{\"rope_parameters\": " SCALED("8.0") ", \"rope_scaling\": " SCALED("8.0") "}",
     NULL},
    {LLAMA, NESTED("\"rope_theta\": 100.0") ", \"rope_scaling\": null}", NULL},
    {LLAMA, NESTED("\"rope_theta\": 77.0") ", \"rope_scaling\": null}",
     "has \"rope_theta\" twice, and they disagree"},
    {LLAMA, NESTED("\"rope_theta\": 77.0") ", \"-rope_theta\": 0, \"rope_scaling\": null}", NULL},
    {NEMOTRON, NESTED("\"partial_rotary_factor\": 0.25") "}",
     "has \"partial_rotary_factor\" twice"},
    {NEMOTRON, NESTED("\"partial_rotary_factor\": 0.5") "}", NULL},
    {LLAMA, NESTED("\"type\": \"llama3\"") ", \"rope_scaling\": null}",
     "\"rope_type\" and \"type\" disagree"},
    {LLAMA, "{\"rope_scaling\": {\"type\": \"default\"}}", NULL},
    {LLAMA, "{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.0}}",
     "\"rope_type\" linear"},
    {LLAMA, "{\"rope_scaling\": {\"type\": \"default\", \"mrope_section\": [1, 1]}}",
     "\"mrope_section\" of RoPE"},
    {LLAMA, "{\"rope_scaling\": {\"type\": \"default\", \"factor\": 2.0}}", "\"factor\" of RoPE"},
    {LLAMA, "{\"rope_scaling\": {\"full_attention\": {\"rope_theta\": 5.0}}}",
     "\"full_attention\" of RoPE"},
    {LLAMA, "{\"rope_scaling\": 2.0}", "\"rope_scaling\" must be an object"},
    {LLAMA, "{\"rope_scaling\": {\"rope_type\": 3}}", "\"rope_type\" must be a word"},
    // a share of a head's channels, which only Nemotron turns
    {LLAMA, "{\"partial_rotary_factor\": 0.5}", "\"partial_rotary_factor\" must be 1: llama"},
    {QWEN2, NESTED("\"partial_rotary_factor\": 0.5") ", \"-partial_rotary_factor\": 0}",
     "\"partial_rotary_factor\" must be 1: qwen2"},
    {LLAMA, "{\"-partial_rotary_factor\": 0}", NULL},
    // dropout
    {LLAMA, "{\"attention_dropout\": 0.1}", "\"attention_dropout\" must be 0"},
    {QWEN2, "{\"attention_dropout\": 0.1}", "\"attention_dropout\" must be 0"},
    {NEMOTRON, "{\"hidden_dropout\": 0.1}", "\"hidden_dropout\" must be 0"},
    {NEMOTRON, "{\"attention_dropout\": 0.0, \"hidden_dropout\": 0}", NULL},
    // windows
    {QWEN2, "{\"use_sliding_window\": true, \"sliding_window\": 8, \"max_window_layers\": 4}",
     NULL},
    {QWEN2, "{\"use_sliding_window\": true, \"sliding_window\": 8, \"max_window_layers\": 3}",
     "\"use_sliding_window\""},
    {QWEN2, "{\"use_sliding_window\": true, \"sliding_window\": null, \"max_window_layers\": 3}",
     NULL},
    {QWEN2, "{\"sliding_window\": 8, \"max_window_layers\": 0}", NULL},
    {QWEN2, "{\"max_window_layers\": -1}", "\"max_window_layers\" must be a whole number"},
    {QWEN2,
     "{\"layer_types\": [\"full_attention\", \"full_attention\", \"full_attention\", "
     "\"full_attention\"]}",
     NULL},
    {QWEN2,
     "{\"layer_types\": [\"full_attention\", \"full_attention\", \"full_attention\", "
     "\"sliding_attention\"]}",
     "\"layer_types\" must be 4 times full_attention"},
    {LLAMA, "{\"layer_types\": [\"full_attention\"]}", "\"layer_types\" must be 4 times"},
    {LLAMA, "{\"use_sliding_window\": true}", "\"use_sliding_window\""},
    {LLAMA, "{\"sliding_window\": 8}", "\"sliding_window\" must be null"},
    {MISTRAL, "{\"sliding_window\": 8}", NULL},
    {MISTRAL, "{\"sliding_window\": 0}", "\"sliding_window\" must be a whole number"},
    {MISTRAL, "{\"use_sliding_window\": true}", "\"use_sliding_window\""},
    {MISTRAL, "{\"layer_types\": [\"sliding_attention\"]}", "\"layer_types\" must be 4 times"},
    {QWEN3, "{\"use_sliding_window\": true, \"sliding_window\": 8, \"max_window_layers\": 3}",
     "\"use_sliding_window\""},
    {QWEN3, "{\"use_sliding_window\": false, \"sliding_window\": 8, \"max_window_layers\": 0}",
     NULL},
    // heads
    {QWEN3, "{\"attention_bias\": true}", "\"attention_bias\" must be false"},
    {QWEN3, "{\"head_dim\": 5}", "RoPE rotates pairs: 5 of"},
    {QWEN3, "{\"head_dim\": 1024}", "heads of 1024 channels are too large"},
    {LLAMA, "{\"head_dim\": 6}", NULL},
    {LLAMA, "{\"num_attention_heads\": 12}", NULL},
    {LLAMA, "{\"num_attention_heads\": 12, \"-head_dim\": 0}",
     "12 attention heads do not divide 32 channels: give the channels of a head"},
    // members of another kind of model, and unknown ones
    {LLAMA, "{\"norm_eps\": 1e-5}", "\"norm_eps\" must be null"},
    {NEMOTRON, "{\"rms_norm_eps\": 1e-5}", "\"rms_norm_eps\" must be null"},
    {LLAMA, "{\"num_local_experts\": 8}", "\"num_local_experts\" is not supported"},
    {LLAMA, "{\"rope_interleaved\": true}", "\"rope_interleaved\" must be false"},
    {LLAMA, "{\"my_own_scale\": 2}",
     "\"my_own_scale\" is not supported: if it changes nothing in the model, take it out"},
    {LLAMA, "{\"my_own_scale\": null}", NULL},
    {LLAMA, "{\"add_cross_attention\": true}", "\"add_cross_attention\" must be false"},
    {LLAMA, "{\"pruned_heads\": {\"0\": [1]}}", "\"pruned_heads\" must be {}"},
    {LLAMA, "{\"tie_word_embeddings\": \"true\"}", "\"tie_word_embeddings\""},
    {LLAMA, "{\"dtype\": \"float32\", \"torch_dtype\": \"bfloat16\"}",
     "\"dtype\" and \"torch_dtype\" disagree"},
    {LLAMA, "{\"dtype\": \"float32\", \"torch_dtype\": \"float32\"}", NULL},
};

// The members that transformers 5.24 and 4.57 write with all defaults, without sizes and the
// members of llama_config.
#define NEWER                                                                                  \
    "\"_name_or_path\": \"\", \"chunk_size_feed_forward\": 0, \"dtype\": null, \"id2label\": " \
    "{\"0\": \"A\"}, "                                                                         \
    "\"label2id\": {\"A\": 0}, \"initializer_range\": 0.02, \"is_encoder_decoder\": false, "   \
    "\"attention_dropout\": 0.0, "                                                             \
    "\"output_attentions\": false, \"output_hidden_states\": false, \"pad_token_id\": null, "  \
    "\"problem_type\": null, "                                                                 \
    "\"return_dict\": true, \"transformers_version\": \"5.24.0\", \"use_cache\": true"
#define OLDER                                                                                    \
    ", \"add_cross_attention\": false, \"bad_words_ids\": null, \"begin_suppress_tokens\": "     \
    "null, "                                                                                     \
    "\"cross_attention_hidden_size\": null, \"decoder_start_token_id\": null, "                  \
    "\"diversity_penalty\": 0.0, "                                                               \
    "\"do_sample\": false, \"early_stopping\": false, \"encoder_no_repeat_ngram_size\": 0, "     \
    "\"exponential_decay_length_penalty\": null, \"finetuning_task\": null, "                    \
    "\"forced_bos_token_id\": null, "                                                            \
    "\"forced_eos_token_id\": null, \"is_decoder\": false, \"length_penalty\": 1.0, "            \
    "\"max_length\": 20, "                                                                       \
    "\"min_length\": 0, \"no_repeat_ngram_size\": 0, \"num_beam_groups\": 1, \"num_beams\": 1, " \
    "\"num_return_sequences\": 1, \"output_scores\": false, \"prefix\": null, "                  \
    "\"pruned_heads\": {}, "                                                                     \
    "\"remove_invalid_values\": false, \"repetition_penalty\": 1.0, "                            \
    "\"return_dict_in_generate\": false, "                                                       \
    "\"sep_token_id\": null, \"suppress_tokens\": null, \"task_specific_params\": null, "        \
    "\"temperature\": 1.0, "                                                                     \
    "\"tf_legacy_loss\": false, \"tie_encoder_decoder\": false, \"tokenizer_class\": null, "     \
    "\"top_k\": 50, "                                                                            \
    "\"top_p\": 1.0, \"torchscript\": false, \"typical_p\": 1.0, \"use_bfloat16\": false"
#define BIASES ", \"attention_bias\": false, \"mlp_bias\": false"
#define WINDOWS                                                                              \
    ", \"max_window_layers\": 28, \"sliding_window\": null, \"use_sliding_window\": false, " \
    "\"layer_types\": [\"full_attention\", \"full_attention\", \"full_attention\", "         \
    "\"full_attention\"]"
#define LATEST_ROPE                                                               \
    ", \"-rope_theta\": 0, \"-rope_scaling\": 0, \"-partial_rotary_factor\": 0, " \
    "\"rope_parameters\": "
static const Change WRITTEN[] = {
    {LLAMA,
     "{" NEWER BIASES ", \"head_dim\": 4, \"pretraining_tp\": 1" LATEST_ROPE
     "{\"rope_theta\": 100.0, \"rope_type\": \"default\"}}",
     NULL},
    {QWEN2, "{" NEWER WINDOWS LATEST_ROPE "{\"rope_theta\": 100.0, \"rope_type\": \"default\"}}",
     NULL},
    {NEMOTRON,
     "{" NEWER BIASES ", \"head_dim\": 4" LATEST_ROPE
     "{\"partial_rotary_factor\": 0.5, \"rope_theta\": 100.0, \"rope_type\": \"default\"}}",
     NULL},
    {LLAMA, "{" NEWER OLDER BIASES ", \"head_dim\": 4, \"pretraining_tp\": 1}", NULL},
    {QWEN2, "{" NEWER OLDER WINDOWS ", \"-partial_rotary_factor\": 0}", NULL},
    {NEMOTRON, "{" NEWER OLDER BIASES ", \"head_dim\": 4, \"num_key_value_heads\": null}", NULL},
    // SmolLM2's
    {LLAMA,
     "{\"is_llama_config\": true, \"rope_interleaved\": false, \"pretraining_tp\": 1, "
     "\"transformers.js_config\": {\"kv_cache_dtype\": {\"fp16\": \"float16\"}}}",
     NULL},
};

static bool reads(const char *text, GPTConfig *g, Llama *m, Error *err) {
    memset(g, 0, sizeof *g), memset(m, 0, sizeof *m);
    g->spec = &m->spec;
    write_text("config.json", text);
    return llama_read("config.json", g, err);
}

static void check_change(Context *x, char *const *bases, const Change *c) {
    GPTConfig g;
    Llama m;
    Error err = {""};
    char *text = with_members(bases[c->type], c->members);
    bool read = reads(text, &g, &m, &err);
    check(&x->check, read == !c->says && (read || strstr(err.text, c->says)),
          "config.json of %s: %.60s -> %s", LLAMA_TYPES[c->type], c->members, err.text);
    free(text);
}

// Returns true if every member of the struct that llama_read sets is the same in both.
static bool same_llama(const GPTConfig *a, const Llama *x, const GPTConfig *b, const Llama *y) {
    return a->L == b->L && a->C == b->C && a->NH == b->NH && a->V == b->V && a->Vp == b->Vp &&
           a->maxT == b->maxT && x->type == y->type && x->tied == y->tied &&
           memcmp(&x->KV, &y->KV, sizeof *x - offsetof(Llama, KV)) == 0;
}

static void group_config(Context *x) {
    char *bases[NUM_MODELS];
    for (int i = 0; i < NUM_MODELS; i++) {
        Llama m;
        Reference ref = llama_model(&MODELS[i], &m, 0, 0);
        bases[i] = llama_config(&ref.config);
        reference_free(&ref);
    }
    for (size_t i = 0; i < sizeof CHANGES / sizeof *CHANGES; i++)
        check_change(x, bases, &CHANGES[i]);
    for (size_t i = 0; i < sizeof WRITTEN / sizeof *WRITTEN; i++)
        check_change(x, bases, &WRITTEN[i]);
    static const Change EACH[] = {
        {LLAMA, "{}", NULL},
        {LLAMA,
         "{\"rms_norm_eps\": 3e-7, \"rope_theta\": 12345.678, \"tie_word_embeddings\": true}",
         NULL},
        {LLAMA,
         "{\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 3.3, \"low_freq_factor\": "
         "1.1, "
         "\"high_freq_factor\": 4.4, \"original_max_position_embeddings\": 77}}",
         NULL},
        {QWEN2, "{\"num_key_value_heads\": 2, \"intermediate_size\": 60, \"rms_norm_eps\": 0.1}",
         NULL},
        {QWEN3, "{\"-head_dim\": 0}", NULL},  // 128
        {MISTRAL, "{\"-sliding_window\": 0}", NULL},  // 4096
        {MISTRAL, "{\"sliding_window\": null}", NULL},
        {NEMOTRON, "{\"norm_eps\": 0.3, \"partial_rotary_factor\": 1, \"rope_theta\": 1e11}",
         NULL},
    };
    for (size_t i = 0; i < sizeof EACH / sizeof *EACH; i++) {
        GPTConfig a, b;
        Llama m, n;
        Error err = {""};
        char *text = with_members(bases[EACH[i].type], EACH[i].members);
        bool ok = reads(text, &a, &m, &err) && llama_write("again.json", &a, i % 2, &err);
        memset(&n, 0, sizeof n);
        b.spec = &n.spec;
        ok = ok && llama_read("again.json", &b, &err);
        // transformers' own numbers for members that are absent
        bool own_head = m.type == QWEN3 && strstr(EACH[i].members, "-head_dim");
        bool own_window = m.type == MISTRAL && strstr(EACH[i].members, "-sliding_window");
        ok = ok && (!own_head || n.HS == 128) && (!own_window || n.window == 4096);
        check(&x->check, ok && same_llama(&a, &m, &b, &n), "read, written, read: %.60s %s",
              EACH[i].members, err.text);
        free(text);
    }
    for (int i = 0; i < NUM_MODELS; i++) free(bases[i]);
}

// ---- group files -----------------------------------------------------------------------

// The folder in two files of BF16 or F16, and a saved folder, are the same model.
static void test_files(Context *x, const Model *s) {
    static Case c;
    open_case(x, &c, s, "model");
    const ParamTable *table = &c.ref.table;
    for (size_t i = 0; i < table->total; i++) {
        double value = round_to_bf16(c.ref.params[i]);
        // What F16 too has without rounding.
        c.ref.params[i] = fabs(value) < 1.0 / 16384 ? 0 : value;
    }
    write_folder("model", llama_config(&table->config), table, c.ref.params, INTACT);
    write_text("model/generation_config.json", "{\"eos_token_id\": [2, 3]}\n");
    write_text("model/chat_template.jinja", "{{ messages }}");
    char flags[ARG_BYTES], *map = allocate(table->count * 128 + 100);
    const char *rest = strchr(c.flags + 7, ' ');  // behind "--init model"
    snprintf(flags, sizeof flags, "%s --micro-batch 1", rest);
    size_t used = (size_t)sprintf(map, "{\"metadata\": {}, \"weight_map\": {");
    mkdir("parts", 0777);
    char *config = llama_config(&table->config);
    write_text("parts/config.json", config);
    for (size_t i = 0; i < table->count; i++)
        used += (size_t)sprintf(map + used, "%s\"%s\": \"%c.safetensors\"", i ? ", " : "",
                                table->tensors[i].name, i < 5 ? 'a' : 'b');
    sprintf(map + used, "}}");
    write_text("parts/model.safetensors.index.json", map);
    remove_tree("out"), remove_tree("again");
    bool ok = runs(x, &LLAMA_ONE, "", "--init model %s --log one", flags);
    Log one = read_log("one");
    for (int i = 0; i < 2; i++) {
        write_tensors("parts", "a.safetensors", table, c.ref.params, 0, 5, i ? "F16" : "BF16",
                      INTACT);
        write_tensors("parts", "b.safetensors", table, c.ref.params, 5, table->count,
                      i ? "F16" : "BF16", INTACT);
        ok = runs(x, &LLAMA_ONE, "", "--init parts %s --log two", flags) && ok;
        Log two = read_log("two");
        check(&x->check, ok && same_log(&one, &two),
              "%s: two files of %s with an index have the bits of one of F32", s->name,
              i ? "F16" : "BF16");
        remove("two");
    }
    remove("one");
    ok = runs(x, &LLAMA_ONE, "", "--init model %s --save-every 1 --keep 0 --out out --log one",
              flags) &&
         runs(x, &LLAMA_ONE, "", "--resume out/step-00000001 %s --out again --log two", flags);
    check(&x->check, ok && same_checkpoint("again/step-00000002", "out/step-00000002"),
          "%s: a saved folder is read again, and the run goes on with the same bits", s->name);
    check(
        &x->check,
        same_file("model/generation_config.json", "again/step-00000002/generation_config.json") &&
            same_file("model/chat_template.jinja", "again/step-00000002/chat_template.jinja"),
        "%s: and so do the files beside the weights", s->name);
    cJSON *saved = read_json("out/step-00000002/config.json");
    const cJSON *scaling = cJSON_GetObjectItem(saved, "rope_scaling");
    check(&x->check,
          number(saved, "num_key_value_heads") == (double)s->KV &&
              number(saved, "rope_theta") == 100 &&
              cJSON_GetArraySize(cJSON_GetObjectItem(saved, "eos_token_id")) == 2 &&
              (s->factor > 0 ? number(scaling, "factor") == s->factor : cJSON_IsNull(scaling)),
          "%s: config.json has what it was read with", s->name);
    cJSON_Delete(saved);
    char *text = read_file("out/step-00000001/config.json", NULL),
         *warmer = replaced(text, "_theta\": 100", "_theta\": 500");
    write_text("out/step-00000001/config.json", warmer);
    char resumed[ARG_BYTES + 64];
    snprintf(resumed, sizeof resumed, "--resume out/step-00000001 %s", flags);
    check_refusal(x, &LLAMA_ONE, "another rope_theta in a checkpoint", PLAIN, resumed, 2,
                  "config.json is damaged");
    free(text), free(warmer);
    remove("one"), remove("two");
    write_file("parts/model.safetensors.index.json", map, strlen(map) / 2);
    check_refusal(x, &LLAMA_ONE, "half an index file", PLAIN, "--init parts --dry-run", 2,
                  "index.json");
    remove("parts/b.safetensors");
    write_text("parts/model.safetensors.index.json", map);
    check_refusal(x, &LLAMA_ONE, "an index whose file is missing", PLAIN,
                  "--init parts --dry-run", 2, "b.safetensors");
    free(config);
    free(map);
    close_case(&c);
}

static void group_files(Context *x) {
    for (size_t i = 0; i < NUM_MODELS; i++) test_files(x, &MODELS[i]);
}

// ---- group uses: --eval, samples -------------------------------------------------------

// Writes a file for --eval: rows of T + 1 tokens. All but the first of a row count.
static void write_rows(const char *path, const int *tokens, size_t rows, size_t T, size_t V) {
    size_t words = rows * (3 + T + 1);
    char *data = allocate(1024 + 2 * words);
    int32_t header[6] = {20261122, 1, (int32_t)rows, 1, (int32_t)V, 0};
    memcpy(data, header, sizeof header);
    uint16_t *out = (uint16_t *)(void *)(data + 1024);
    for (size_t r = 0; r < rows; r++) {
        *out++ = (uint16_t)(T + 1), *out++ = 1, *out++ = (uint16_t)T;
        for (size_t i = 0; i <= T; i++) *out++ = (uint16_t)tokens[r * T + i];
    }
    write_file(path, data, 1024 + 2 * words);
    free(data);
}

// --eval measures the reference's loss at any layout. A sample's text does not depend on the
// layout; in bf16 roundings do, and may make another token the next one.
static void group_uses(Context *x) {
    static const Layout LAYOUTS[] = {
        {"train_llama", 1, "--micro-batch 4"},
        {"train_llama", 8, "--tensor 2 --pipeline 2 --sequence-parallel 1 --micro-batch 2"},
    };
    enum { EVAL_ROWS = 8 };
    for (size_t k = 0; k < NUM_MODELS; k++) {
        const Model *s = &MODELS[k];
        static Case c;
        open_case(x, &c, s, "model");
        int *tokens = random_tokens(EVAL_ROWS * s->T + 1, s->V, 33);
        double worst = 0, want = reference_mean_loss(&c.ref, tokens, s->T, 0, EVAL_ROWS, 0) *
                                 EVAL_ROWS * (double)s->T;
        char *text = NULL;
        bool ok = true, same = true;
        write_rows("rows.bin", tokens, EVAL_ROWS, s->T, s->V);
        write_letters("letters.json");
        for (size_t i = 0; i < 2; i++) {
            double sum = NAN;
            if (LAYOUTS[i].ranks > max_ranks(x)) continue;
            Outcome o = run(x->build, &LAYOUTS[i], PLAIN,
                            "--init model --eval rows.bin --seq %zu --global-batch 8", s->T);
            const char *at = strstr(o.out, "loss sum ");
            ok = ok && o.code == 0 && at && sscanf(at, "loss sum %lf", &sum) == 1;
            worst = fmax(worst, relative(sum, want));
            outcome_free(&o);
            o = run(x->build, &LAYOUTS[i], PLAIN,
                    "%s --sample-every 2 --sample-tokens 12 --prompt abc "
                    "--tokenizer letters.json",
                    c.flags);
            const char *sample = strstr(o.out, "sample: abc");
            ok = ok && o.code == 0 && sample;
            if (sample && !text) text = strdup(sample);
            same = same && sample && (x->bf16 || strncmp(sample, text, strcspn(text, "\n")) == 0);
            outcome_free(&o);
        }
        check(&x->check, ok && worst <= llama_bounds(x, &c.ref.config).loss,
              "%s: --eval finds the reference's loss on 1 and on 8 ranks: %.1e", s->name, worst);
        check(&x->check, ok && same, "%s: 1 and 8 ranks print %s sample", s->name,
              x->bf16 ? "a" : "the same");
        free(text), free(tokens);
        close_case(&c);
    }
}

// ---- group refusals --------------------------------------------------------------------

typedef struct {
    const char *name;
    int model;
    Damage damage;
    const char *says;
} BadModel;

static const BadModel BAD_MODELS[] = {
    {"config of another model",
     0,
     {"config", "\"llama\"", "\"qwen3_moe\"", 0},
     "qwen3_moe is not supported: llama, qwen2, qwen3, mistral and nemotron are"},
    {"config without hidden_size",
     0,
     {"config", "\"hidden_size\"", "\"hidden\"", 0},
     "hidden_size"},
    {"rope_type yarn", 0, {"config", "\"llama3\"", "\"yarn\"", 0}, "\"rope_type\" yarn"},
    {"scaling without its factor",
     0,
     {"config", "\"factor\": 8, ", "", 0},
     "llama3 needs factor"},
    {"a sliding window", 0, {"config", "{", "{\"sliding_window\": 4096, ", 0}, "sliding_window"},
    {"Qwen2 with a sliding window",
     1,
     {"config", "{", "{\"use_sliding_window\": true, \"max_window_layers\": 2, ", 0},
     "use_sliding_window"},
    {"biases of attention",
     0,
     {"config", "{", "{\"attention_bias\": true, ", 0},
     "attention_bias"},
    {"biases of the MLP", 0, {"config", "{", "{\"mlp_bias\": true, ", 0}, "mlp_bias"},
    {"heads of another size",
     0,
     {"config", "head_dim\": 4", "head_dim\": 6", 0},
     "q_proj.weight has shape [32,32] instead of [48,32]"},
    {"Qwen3 with a window in some layers",
     3,
     {"config", "{", "{\"use_sliding_window\": true, \"max_window_layers\": 2, ", 0},
     "use_sliding_window"},
    {"Qwen3 with biases of attention",
     3,
     {"config", "{", "{\"attention_bias\": true, ", 0},
     "attention_bias"},
    {"Qwen3 without a norm",
     3,
     {"header", "layers.1.self_attn.k_norm", "layers.1.self_attn.k_morn", 0},
     "model.layers.1.self_attn.k_norm.weight"},
    {"quantized weights",
     0,
     {"config", "{", "{\"quantization_config\": {\"bits\": 4}, ", 0},
     "quantization_config"},
    {"another activation", 2, {"config", "relu2", "gelu", 0}, "hidden_act"},
    {"KV heads > heads",
     0,
     {"config", "heads\": 4", "heads\": 16", 0},
     "16 key/value heads are more than the 8"},
    {"KV heads that do not divide",
     0,
     {"config", "heads\": 4", "heads\": 3", 0},
     "3 key/value heads do not divide"},
    {"an odd number of channels to turn",
     2,
     {"config", "0.5", "0.8", 0},
     "RoPE rotates pairs: 3 of"},
    {"a negative theta", 0, {"config", "rope_theta\": 100", "rope_theta\": -1", 0}, "rope_theta"},
    {"missing tensor",
     0,
     {"header", "layers.2.mlp.up", "layers.2.mlp.pu", 0},
     "model.layers.2.mlp.up_proj.weight"},
    {"missing head", 0, {"header", "lm_head.weight", "lm_feet.weight", 0}, "lm_head.weight"},
    {"missing bias",
     1,
     {"header", "k_proj.bias", "k_proj.bios", 0},
     "model.layers.0.self_attn.k_proj.bias"},
    {"wrong shape",
     0,
     {"header", "[16,32]", "[32,16]", 0},
     "k_proj.weight has shape [32,16] instead of [16,32]"},
};

// Flags that are refused beside --init of a sound Llama of 8 heads, 4 of keys and values.
static const struct { const char *name, *flags, *says; int ranks;
} BAD_FLAGS[] = {
    {"KV heads that t does not divide", "--tensor 8",
     "--tensor 8 does not divide the 4 key/value heads", 8},
    {"dropout", "--dropout 0.1", "--dropout", 1},
    {"flags that contradict the folder", "--kv-heads 2", "the checkpoint has 4 key/value heads",
     1},
    {"a window that the folder has not", "--window 8", "a window of 0 keys", 1},
    {"heads of another size than the folder's", "--head-dim 8", "heads of 4 channels", 1},
    {"an unknown size", "--model llama-9000", "--model must be one of", 1},
    {"a token that no document begins with", "--documents 1 --eot 200",
     "--eot 200 is not below the 200 tokens of the model", 1},
    {"a token without documents", "--eot 7", "--eot 7 needs --documents 1", 1},
};

static void group_refusals(Context *x) {
    static Case cases[NUM_MODELS];
    for (int i = 0; i < NUM_MODELS; i++) open_case(x, &cases[i], &MODELS[i], MODELS[i].name);
    for (size_t i = 0; i < sizeof BAD_MODELS / sizeof *BAD_MODELS; i++) {
        const BadModel *b = &BAD_MODELS[i];
        Case *c = &cases[b->model];
        write_folder("bad", llama_config(&c->ref.config), &c->ref.table, c->ref.params, b->damage);
        check_refusal(x, &LLAMA_ONE, b->name, PLAIN, "--init bad --dry-run", 2, b->says);
    }
    for (size_t i = 0; i < sizeof BAD_FLAGS / sizeof *BAD_FLAGS; i++) {
        Layout layout = {"train_llama", BAD_FLAGS[i].ranks, BAD_FLAGS[i].flags};
        check_refusal(x, &layout, BAD_FLAGS[i].name, PLAIN, "--init llama --dry-run", 2,
                      BAD_FLAGS[i].says);
    }
    check_refusal(x, &LLAMA_ONE, "heads that do not divide the channels, without --head-dim", PLAIN,
                  "--channels 24 --heads 5 --dry-run", 2,
                  "5 attention heads do not divide 24 channels");
    for (int i = 0; i < NUM_MODELS; i++) close_case(&cases[i]);
}

// ---- group sizes -----------------------------------------------------------------------

// The published totals, which the names' sizes must make.
static const struct { const char *name, *says; } SIZES[] = {
    {"smollm2-135m", " 134515008 parameters"},      {"llama-3.2-1b", " 1235814400 parameters"},
    {"llama-3.1-8b", " 8030261248 parameters"},     {"llama-3.1-70b", " 70553706496 parameters"},
    {"llama-3.1-405b", " 405853388800 parameters"}, {"qwen2.5-0.5b", " 494032768 parameters"},
    {"qwen3-0.6b", " 596049920 parameters"},        {"qwen3-1.7b", " 1720574976 parameters"},
    {"qwen3-8b", " 8190735360 parameters"},         {"qwen3-32b", " 32762123264 parameters"},
    {"mistral-7b", " 7241732096 parameters"},       {"mistral-7b-v0.3", " 7248023552 parameters"},
    {"nemotron-4-15b", "32 layers, 48 heads"},      {"nemotron-4-340b", "96 layers, 96 heads"},
};

static void group_sizes(Context *x) {
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
        Outcome o = run(x->build, &LLAMA_ONE, PLAIN,
                        "--model %s --dry-run --seq 64 --micro-batch 1", SIZES[i].name);
        bool fits = o.code == 0 || (o.code == 2 && strstr(o.err, "does not fit"));
        check(&x->check, fits && strstr(o.out, SIZES[i].says), "--model %s:%s", SIZES[i].name,
              SIZES[i].says);
        if (!fits || !strstr(o.out, SIZES[i].says)) printf("     %.300s%.300s\n", o.out, o.err);
        outcome_free(&o);
    }
    if (strstr(x->build, "/cuda-")) return;  // no clock
    // A cluster in a file: the memory of a rank of the first stage, and the seconds of a step.
    Outcome o = run(
        x->build, &LLAMA_ONE, PLAIN,
        "--model llama-3.1-405b "
        "--simulate %s/../../dev/clusters/eos-2025.json --ranks 16384 --tensor 8 --pipeline 16 "
        "--seq 8192 --micro-batch 1 --global-batch 2048 "
        "--sequence-parallel 1 --recompute layer",
        x->build);
    const char *memory = strstr(o.out, "activations"),
               *step = strstr(o.out, "of 16 of 16384 ranks");
    double weights = 0, activations = 0;
    if (memory) sscanf(memory, "activations %lf MiB", &activations);
    if (strstr(o.out, "weights ")) sscanf(strstr(o.out, "weights "), "weights %lf MiB", &weights);
    check(&x->check, o.code == 0 && step && weights > 0 && activations > 0,
          "llama-3.1-405b on 16384 ranks (p = 16): %.0f MiB of weights and %.0f of activations "
          "on rank 0",
          weights, activations);
    outcome_free(&o);
}

// ---- main ------------------------------------------------------------------------------

static const Group GROUPS[] = {
    {"reference", group_reference},  // the reference itself, no trainer
    {"shapes", group_shapes},        // odd sizes against the reference
    {"layouts",
     group_layouts},           // layouts against the reference, and the bits that they must share
    {"documents", group_documents},  // several in a sequence, with a window and without
    {"config", group_config},  // config.json alone
    {"files", group_files},    // folders in and out
    {"uses", group_uses},      // --eval and samples
    {"refusals", group_refusals},  // bad input
    {"sizes", group_sizes},        // --model by name
};

int main(int argc, char **argv) {
    static Context context;
    prefer_plain_kernels();
    return test_trainers(&context, GROUPS, sizeof GROUPS / sizeof *GROUPS, argc, argv);
}
