// test_5d.c: tests train_5d.
//   Every gradient tensor agrees with the fp64 reference, with each of the five dimensions alone
//   and with several together. ALL=1: with every pair, and with all five.
//   The order of streams changes no bit. Another layout resumes a checkpoint. Bad input is refused.
//
//   test_5d BUILD_DIR [GROUP]      for example: test_5d build/cpu-fp32 layouts
#define _GNU_SOURCE
#define Context TestContext  // llmc/host/context.h has another one
#include "dev/test/compare_runs.h"
#undef Context
#include "llmc/reference_5d.h"

enum { L = 4, C = 32, NH = 8, KV = 4, F = 24, V = 200, T = 16, G = 8, STEPS = 2, E = 4, K = 2 };
enum { EOT = V - 1 };  // documents begin with it

// A kind of blocks: with an MLP if E is 0, else with experts, and with their options.
typedef struct {
    const char *name;
    LlamaType type;
    bool tied;
    size_t E, k;
    double capacity, balance, z;
    bool normalised;
    size_t HS;  // channels of a head; 0: C / NH
    bool documents;
    size_t window;
} Kind;

enum { LLAMA_MLP, MIXTRAL, DROPS, QWEN2_MLP, QWEN3_MOE, RAW, NO_CHOICE, MOE_DOCUMENTS, WINDOW,
       WINDOW_DOCUMENTS };

static const Kind KINDS[] = {
    {"llama", LLAMA, false, 0, 0, 0, 0, 0, false, 0, false, 0},
    {"mixtral", LLAMA, false, E, K, 0, 0.1, 0.01, true, 0, false, 0},
    {"mixtral, some tokens dropped", LLAMA, true, E, K, 0.75, 0.1, 0.01, true, 0, false, 0},
    {"qwen2", QWEN2, true, 0, 0, 0, 0, 0, false, 0, false, 0},
    {"qwen3-moe", QWEN3, false, E, K, 0, 0.1, 0.01, true, 16, false, 0},
    {"qwen3-moe, weights not normalised", QWEN3, false, E, 3, 0.9, 0.1, 0.01, false, 16, false, 0},
    {"mixtral, all experts chosen", LLAMA, false, E, E, 0, 0.1, 0.01, true, 0, false, 0},
    {"qwen3-moe, documents", QWEN3, false, E, K, 0, 0.1, 0.01, true, 16, true, 0},
    {"mistral", MISTRAL, false, 0, 0, 0, 0, 0, false, 0, false, 6},
    {"mistral, documents", MISTRAL, false, 0, 0, 0, 0, 0, false, 0, true, 6},
};

// The model under test, as reference_train calls it.
static ReferenceMoe tested;
static bool tested_documents;
static double tested_extra;  // the routers' two losses of the last call

static double tested_loss(Reference *ref, const int *tokens, const int *targets, size_t B,
                          size_t seq, double scale) {
    int *first = tested_documents ? document_begins(tokens, B * seq, seq, EOT) : NULL;
    double loss;
    ref->first = first;
    if (tested.E == 0)
        loss = reference_llama_loss(ref, tokens, targets, B, seq, scale);
    else
        loss = reference_5d_loss(ref, &tested, tokens, targets, B, seq, scale, &tested_extra);
    ref->first = NULL;
    free(first);
    return loss;
}

// Returns the loss and the two losses of experts, as the gradients are of their sum.
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
    llama->window = kind->window;
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

// Tests the independent case: transformers' classes in float64, with norms, softmax and angles in
// float32. Weights, tokens and directions come from one generator.
static void test_golden(TestContext *x, const cJSON *item) {
    const cJSON *g = cJSON_GetObjectItem(item, "model");
    const cJSON *gradients = cJSON_GetObjectItem(item, "gradients");
    const char *type = cJSON_GetStringValue(cJSON_GetObjectItem(g, "type"));
    bool qwen = strcmp(type, "qwen3_moe") == 0;
    Kind kind = {type, qwen ? QWEN3 : LLAMA, false, (size_t)number(g, "E"), (size_t)number(g, "k"),
                 0, 0, 0, cJSON_IsTrue(cJSON_GetObjectItem(g, "normalised")),
                 (size_t)number(g, "HS"), false, 0};
    size_t seq = (size_t)number(g, "T"), B = (size_t)number(g, "B"), N = B * seq;
    size_t vocabulary = (size_t)number(g, "V");
    uint64_t seed = (uint64_t)number(g, "seed");
    GPTConfig config = {(size_t)number(g, "L"), (size_t)number(g, "C"), (size_t)number(g, "NH"),
                        vocabulary, 0, 64, NULL};
    MoeLlama m;
    Reference ref = model_of(&kind, &m, config, (size_t)number(g, "KV"), (size_t)number(g, "F"), 1);
    m.llama.theta = number(g, "theta");
    m.llama.epsilon = number(g, "epsilon");
    random_params(&ref, number(g, "scale"), &seed);
    int *tokens = allocate((N + 1) * sizeof(int));
    for (size_t i = 0; i <= N; i++)
        tokens[i] = (int)((noise(&seed) + 1) / 2 * (double)vocabulary);

    tested = reference_of(&kind, seq, 1);
    double loss = tested_loss(&ref, tokens, tokens + 1, B, seq, 1.0 / (double)N) / (double)N;
    double worst = 0;
    for (size_t i = 0; i < ref.table.count; i++) {
        const Tensor *t = &ref.table.tensors[i];
        const cJSON *want = cJSON_GetObjectItem(gradients, t->name);
        double norm = 0, along = 0;
        for (size_t k = 0; k < t->rows * t->cols; k++) {
            double gradient = ref.grads[t->offset + k];
            norm += gradient * gradient;
            along += gradient * noise(&seed);
        }
        double scale = want ? cJSON_GetArrayItem(want, 0)->valuedouble : NAN;
        double off = want ? fabs(along - cJSON_GetArrayItem(want, 1)->valuedouble) : INFINITY;
        worst = fmax(worst, fmax(fabs(sqrt(norm) - scale), off) / scale);
    }
    double error = relative(loss, number(item, "loss"));
    check(&x->check,
          error < 1e-6 && worst < 1e-5 && cJSON_GetArraySize(gradients) == (int)ref.table.count,
          "reference: transformers' %s, k %zu: loss %.1e, gradients %.1e (bounds 1e-6, 1e-5)", type,
          kind.k, error, worst);
    free(tokens);
    reference_free(&ref);
}

static void group_reference(TestContext *x) {
    cJSON *golden = read_json("golden/5d.json");
    const cJSON *item;
    cJSON_ArrayForEach(item, golden) test_golden(x, item);
    cJSON_Delete(golden);
    enum { SHORT = 8, B = 2 };
    static const Kind kinds[] = {
        {"no token dropped", LLAMA, false, 4, 2, 0, 0.3, 0.1, true, 0, false, 0},
        {"some tokens dropped", LLAMA, true, 3, 2, 0.6, 0.3, 0.1, true, 0, false, 0},
        {"not normalised", QWEN3, false, 3, 2, 0.6, 0.3, 0.1, false, 4, false, 0},
        {"one expert", LLAMA, false, 1, 1, 0, 0, 0.1, true, 0, false, 0}};
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

// ---- group config: config.json alone ---------------------------------------------------

// As published with Qwen3-30B-A3B and Mixtral-8x7B.
static const char QWEN3_MOE_CONFIG[] =
    "{\"architectures\": [\"Qwen3MoeForCausalLM\"], \"attention_bias\": false, "
    "\"attention_dropout\": 0.0, \"bos_token_id\": 151643, \"decoder_sparse_step\": 1, "
    "\"eos_token_id\": 151645, \"head_dim\": 128, \"hidden_act\": \"silu\", \"hidden_size\": 2048, "
    "\"initializer_range\": 0.02, \"intermediate_size\": 6144, "
    "\"max_position_embeddings\": 40960, \"max_window_layers\": 48, \"mlp_only_layers\": [], "
    "\"model_type\": \"qwen3_moe\", \"moe_intermediate_size\": 768, \"norm_topk_prob\": true, "
    "\"num_attention_heads\": 32, \"num_experts\": 128, \"num_experts_per_tok\": 8, "
    "\"num_hidden_layers\": 48, \"num_key_value_heads\": 4, \"output_router_logits\": false, "
    "\"rms_norm_eps\": 1e-06, \"rope_scaling\": null, \"rope_theta\": 1000000.0, "
    "\"router_aux_loss_coef\": 0.001, \"sliding_window\": null, \"tie_word_embeddings\": false, "
    "\"torch_dtype\": \"bfloat16\", \"transformers_version\": \"4.51.0\", \"use_cache\": true, "
    "\"use_sliding_window\": false, \"vocab_size\": 151936}";
static const char MIXTRAL_CONFIG[] =
    "{\"architectures\": [\"MixtralForCausalLM\"], \"attention_dropout\": 0.0, "
    "\"bos_token_id\": 1, \"eos_token_id\": 2, \"hidden_act\": \"silu\", \"hidden_size\": 4096, "
    "\"initializer_range\": 0.02, \"intermediate_size\": 14336, "
    "\"max_position_embeddings\": 32768, \"model_type\": \"mixtral\", "
    "\"num_attention_heads\": 32, \"num_experts_per_tok\": 2, \"num_hidden_layers\": 32, "
    "\"num_key_value_heads\": 8, \"num_local_experts\": 8, \"output_router_logits\": false, "
    "\"rms_norm_eps\": 1e-05, \"rope_theta\": 1000000.0, \"router_aux_loss_coef\": 0.02, "
    "\"sliding_window\": null, \"tie_word_embeddings\": false, \"torch_dtype\": \"bfloat16\", "
    "\"transformers_version\": \"4.36.0.dev0\", \"use_cache\": true, \"vocab_size\": 32000}";

// Reads a config.json; *m holds its spec.
static bool config_of(const char *text, MoeLlama *m, GPTConfig *g, Error *err) {
    memset(m, 0, sizeof *m);
    memset(g, 0, sizeof *g);
    g->spec = &m->llama.spec;
    write_text("config.json", text);
    return moe_llama_read("config.json", g, err);
}

static void group_config(TestContext *x) {
    static const struct {
        const char *name, *text;
        size_t parameters, E, k;
    } published[] = {{"Qwen3-30B-A3B", QWEN3_MOE_CONFIG, 30532122624, 128, 8},
                     {"Mixtral-8x7B", MIXTRAL_CONFIG, 46702792704, 8, 2}};
    static const struct {
        const char *text, *from, *to, *says;
    } bad[] = {
        {QWEN3_MOE_CONFIG, "_step\": 1", "_step\": 2", "decoder_sparse_step"},
        {QWEN3_MOE_CONFIG, "layers\": []", "layers\": [3]", "mlp_only_layers"},
        {QWEN3_MOE_CONFIG, "per_tok\": 8", "per_tok\": 129", "num_experts_per_tok"},
        {MIXTRAL_CONFIG, "per_tok\": 2", "per_tok\": 9", "9 experts of a token"},
        {MIXTRAL_CONFIG, "\"num_local_experts\"", "\"num_experts\"", "num_local_experts"},
        {MIXTRAL_CONFIG, "window\": null", "window\": 4096", "sliding_window"},
    };
    MoeLlama m, n;
    GPTConfig g, again;
    Error err;
    for (size_t i = 0; i < 2; i++) {
        bool ok = config_of(published[i].text, &m, &g, &err) && m.E == published[i].E &&
                  m.k == published[i].k && m.normalised &&
                  count_parameters(&g) == published[i].parameters;
        check(&x->check, ok, "%s's config.json: %zu parameters", published[i].name,
              published[i].parameters);
        if (!ok) printf("     %s\n", err.text);
        ok = ok && moe_llama_write("written.json", &g, true, &err);
        char *text = ok ? read_file("written.json", NULL) : strdup("");
        ok = ok && config_of(text, &n, &again, &err) && n.E == m.E && n.k == m.k &&
             n.normalised == m.normalised && n.llama.HS == m.llama.HS && n.llama.F == m.llama.F &&
             count_parameters(&again) == count_parameters(&g);
        check(&x->check, ok, "%s's config.json: read, written, read", published[i].name);
        free(text);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char *text = replaced(bad[i].text, bad[i].from, bad[i].to);
        bool read = config_of(text, &m, &g, &err);
        check(&x->check, !read && strstr(err.text, bad[i].says), "refused: %s", bad[i].to);
        free(text);
    }
}

// ---- group layouts ---------------------------------------------------------------------

// In bf16 a token whose k-th and next logits are almost equal may go to another expert than in
// the reference. Then its function and its gradient are other ones. With k = E there is no such
// choice.
//
// t * d * p ranks; of the data ranks c share each sequence and e share out the experts.
typedef struct {
    int kind, t, d, p, c, e, micro;
    const char *flags;
    int when;  // 1: ALL=1 only; 2: in bf16, too; 3: in bf16 only
} Row;

static const Row ROWS[] = {
    // each dimension alone
    {LLAMA_MLP, 1, 1, 1, 1, 1, 2, "", 1},
    {MIXTRAL, 1, 1, 1, 1, 1, 2, "", 1},
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
    {QWEN3_MOE, 2, 2, 2, 2, 2, 1, "--sequence-parallel 1 --virtual 2", 0},
    {NO_CHOICE, 2, 2, 2, 2, 2, 1, "--sequence-parallel 1", 3},
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

    // c by all-to-alls
    {QWEN3_MOE, 2, 2, 1, 2, 2, 1, "--context-by ulysses --sequence-parallel 1", 0},
    {LLAMA_MLP, 1, 4, 1, 4, 1, 1, "--context-by ulysses --recompute layer", 1},
    {DROPS, 1, 4, 2, 2, 4, 1, "--context-by ulysses", 1},

    // windows and documents: borders within a rank, between ranks, and across them
    {WINDOW_DOCUMENTS, 1, 1, 1, 1, 1, 2, "", 1},
    {WINDOW, 1, 2, 1, 2, 1, 2, "", 1},
    {WINDOW_DOCUMENTS, 1, 2, 1, 2, 1, 2, "--recompute layer", 1},
    {WINDOW_DOCUMENTS, 2, 4, 1, 4, 1, 1, "--sequence-parallel 1", 2},
    {WINDOW_DOCUMENTS, 2, 2, 2, 2, 1, 1, "--context-by ulysses --virtual 2", 1},
    {MOE_DOCUMENTS, 1, 1, 1, 1, 1, 2, "", 1},
    {MOE_DOCUMENTS, 1, 2, 1, 2, 1, 1, "", 1},
    {MOE_DOCUMENTS, 2, 2, 2, 2, 2, 1, "--sequence-parallel 1 --virtual 2", 0},
    {MOE_DOCUMENTS, 1, 4, 2, 4, 2, 1, "--context-by ulysses --recompute layer", 1},
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
    if (kind->documents) strcat(flags, " --documents 1");
}

// A large eps: if few tokens meet an expert, its gradients are as small as their rounding, and
// AdamW would blow them up to steps.
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

// Returns the error of the routers' two losses in the log's first step against the reference's.
// Returns INFINITY if a layer has no line, lacks choices, or dropped tokens without a bound for
// places.
static double statistics_error(const Kind *kind, Reference *ref, const int *tokens) {
    double got = 0;
    size_t layers = 0;
    bool ok = true;
    char *text = read_file("log", NULL);
    tested_loss(ref, tokens, tokens + 1, G, T, 0);
    for (char *line = text ? strtok(text, "\n") : NULL; line; line = strtok(NULL, "\n")) {
        cJSON *json = cJSON_Parse(line);
        const cJSON *of_expert = cJSON_GetObjectItem(json, "tokens"), *item;
        if (of_expert && number(json, "step") == 1) {
            double choices = 0;
            cJSON_ArrayForEach(item, of_expert) choices += item->valuedouble;
            ok = ok && number(json, "layer") == (double)layers++ &&
                 choices == (double)(G * T * kind->k) &&
                 (number(json, "dropped") > 0) == (kind->capacity > 0);
            got += kind->balance * number(json, "balance") + kind->z * number(json, "z");
        }
        cJSON_Delete(json);
    }
    free(text);
    return ok && layers == L ? relative(got * G * T, tested_extra) : INFINITY;
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
    tested_documents = kind->documents;
    reference_loss = tested_loss;
    Expected want = reference_train(&trained, &h, tokens, x->bf16);
    training_of(flags, &h, row);
    snprintf(name, sizeof name, "%s: t %d, d %d, p %d, c %d, e %d, %s", kind->name, row->t,
             row->d, row->p, row->c, row->e, row->flags);

    // The copies are equal in any order of additions of each communicator.
    setenv("NCCL_ORDER", row->d > 2 ? "any:1" : "", 1);
    remove_tree("out");
    bool ok = runs(x, &layout, "",
                   "%s --log log --dump-gradients gradients --out out --debug-replicas 1",
                   flags);
    setenv("NCCL_ORDER", "", 1);
    double *got = allocate(ref.table.total * sizeof(double));
    Bounds bound = bounds(x, &ref.config);
    // The gradient of a norm of heads is HS sums over all tokens and heads, which cancel: 2.4e-6
    // are measured in fp32.
    if (kind->type == QWEN3) bound.gradient *= 2;
    if (x->bf16) {
        bound.gradient *= 2;
        bound.gradients *= 1.5;
    }
    Measured r = measure_run(&ref.table, &want, h.steps, got);
    bool saved = read_tensors("out/step-00000002/model.safetensors", "", &ref.table, got);
    Errors e = compare_tensors(&ref.table, got, want.weights);
    double routers = kind->E && !x->bf16 ? statistics_error(kind, &ref, tokens) : 0;
    ok = ok && saved && within(&r, &bound) && e.worst <= bound.weight && routers < 1e-6;
    check(&x->check, ok,
          "%-64s gradients %.1e, %s %.1e, losses %.1e, norms %.1e, weights %.1e, routers %.1e",
          name, r.gradients.whole, r.gradients.name, r.gradients.worst, r.loss, r.norm, e.worst,
          routers);
    free(got);
    expected_free(&want);
    reference_free(&trained);
    reference_free(&ref);
}

// Writes tokens of sequences of eight kinds. The first is one document. In the others documents
// begin at the first tokens of 2 or 4 ranks, beside these, at the last token, at each token, or
// at random.
static int *write_tokens(uint64_t seed) {
    size_t count = T * G * STEPS + 1;
    int *tokens = random_tokens(count, EOT, seed), *lengths = random_tokens(count, 5, seed + 1);
    for (size_t n = 0; n < count; n++) {
        size_t at = n % T;
        bool begins[] = {false,   at % 4 == 0, at == 3 || at == 9, at == T - 1,
                         at == 6, true,        lengths[n] == 0,    lengths[n] < 2};
        if (begins[n / T % 8]) tokens[n] = EOT;
    }
    free(lengths);
    write_shard("shard.bin", 20240520, 1, (int)count, tokens, count);
    return tokens;
}

static void group_layouts(TestContext *x) {
    const char *all = getenv("ALL");
    int *tokens = write_tokens(31);
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
        int when = ROWS[i].when;
        bool fp32 = when == 0 || when == 2 || (all && *all);
        bool wanted = x->bf16 ? when >= 2 : fp32;
        if (wanted) test_row(x, &ROWS[i], tokens);
    }
    free(tokens);
}

// ---- group bits ------------------------------------------------------------------------

static const Row ALL_FIVE = {MOE_DOCUMENTS, 2, 2, 2, 2, 2, 1, "--sequence-parallel 1", 0};

// Tests that the order of independent streams changes no bit, with all five dimensions.
static void group_bits(TestContext *x) {
    static const struct {
        const char *flags, *env;
    } others[] = {{"", "CPU_STREAM_ORDER=random:1"},
                  {"--overlap 0 --recompute layer", "CPU_STREAM_ORDER=random:2"}};
    char flags[ARG_BYTES];
    MoeLlama m;
    Layout layout = {"train_5d", 8, ""};
    if (layout.ranks > max_ranks(x)) return;
    int *tokens = write_tokens(32);
    Reference ref = write_model_of(&KINDS[ALL_FIVE.kind], &m);
    training_of(flags, &TRAINING, &ALL_FIVE);
    remove_tree("base");
    bool ok = runs(x, &layout, "", "%s --log log --out base", flags);
    Log base = read_log("log");
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        remove_tree("other"), remove("log");
        const char *env = on_gpu(x) ? "" : others[i].env;
        ok = ok && runs(x, &layout, env, "%s --log log --out other %s", flags, others[i].flags);
        Log log = read_log("log");
        check(&x->check,
              ok && same_log(&log, &base) &&
                  same_checkpoint("base/step-00000002", "other/step-00000002"),
              "five dimensions: the same bits with %s %s", others[i].flags, others[i].env);
    }
    free(tokens);
    reference_free(&ref);
}

// ---- group checkpoints -----------------------------------------------------------------

// Resumes a checkpoint of all five dimensions in other layouts. The results are one
// rank's.
static void group_checkpoints(TestContext *x) {
    static const Row places[] = {{MOE_DOCUMENTS, 1, 4, 1, 4, 2, 1, "", 0},
                                 {MOE_DOCUMENTS, 1, 1, 1, 1, 1, 2, "", 0}};
    char flags[ARG_BYTES], again[ARG_BYTES];
    MoeLlama m;
    Layout layout = {"train_5d", 8, ""};
    if (layout.ranks > max_ranks(x)) return;
    int *tokens = write_tokens(33);
    Reference ref = write_model_of(&KINDS[ALL_FIVE.kind], &m);
    double *want = allocate(ref.table.total * sizeof(double));
    double *got = allocate(ref.table.total * sizeof(double));
    training_of(flags, &TRAINING, &ALL_FIVE);
    remove_tree("out");
    bool ok = runs(x, &layout, "", "%s --save-every 1 --keep 0 --out out", flags);
    ok = ok && read_tensors("out/step-00000002/model.safetensors", "", &ref.table, want);
    for (size_t i = 0; i < 2; i++) {
        const Row *row = &places[i];
        Layout other = {"train_5d", row->t * row->d * row->p, ""};
        training_of(again, &TRAINING, row);
        remove_tree("again");
        const char *behind = strchr(again + 7, ' ');  // behind "--init model"
        bool resumed = ok && runs(x, &other, "", "--resume out/step-00000001 --out again%s",
                                  behind);
        resumed = resumed && read_tensors("again/step-00000002/model.safetensors", "",
                                          &ref.table, got);
        Errors e = compare_tensors(&ref.table, got, want);
        check(&x->check, resumed && e.worst < (x->bf16 ? 2e-2 : 2e-6),
              "a checkpoint of t, d, p, c, e 2 goes on at d %d, c %d, e %d: %.1e (%s)", row->d,
              row->c, row->e, e.worst, e.name);
    }
    free(want), free(got), free(tokens);
    reference_free(&ref);
}

// ---- group uses: --eval, samples -------------------------------------------------------

static void group_uses(TestContext *x) {
    static const Row places[] = {{MOE_DOCUMENTS, 1, 1, 1, 1, 1, 2, "", 0},
                                 {MOE_DOCUMENTS, 1, 2, 2, 2, 2, 2, "", 0}};
    char flags[ARG_BYTES], *text = NULL;
    MoeLlama m;
    int *tokens = write_tokens(34);
    Reference ref = write_model_of(&KINDS[MOE_DOCUMENTS], &m);
    double losses[2] = {0, 1};
    bool ok = true, same = true;
    if (max_ranks(x) < 4) return;
    write_letters("letters.json");
    for (size_t i = 0; i < 2; i++) {
        const Row *row = &places[i];
        Layout layout = {"train_5d", row->t * row->d * row->p, ""};
        training_of(flags, &TRAINING, row);
        Outcome o = run(x->build, &layout, PLAIN,
                        "%s --val-data shard.bin --val-every 2 --val-batches 2 "
                        "--sample-every 2 --sample-tokens 5 --prompt abc "
                        "--tokenizer letters.json",
                        flags);
        const char *sample = strstr(o.out, "sample: abc");
        const char *loss = strstr(o.out, "validation loss ");
        ok = ok && o.code == 0 && sample && loss && sscanf(loss + 16, "%lf", &losses[i]) == 1;
        if (sample && !text) text = strdup(sample);
        same = same && sample && (x->bf16 || strncmp(sample, text, strcspn(text, "\n")) == 0);
        if (!sample || !loss || !same) printf("     %.600s%.600s\n", o.out, o.err);
        outcome_free(&o);
    }
    check(&x->check, ok && same && relative(losses[1], losses[0]) < 1e-3,
          "1 and 4 ranks print the same sample and validation loss: %.6f and %.6f", losses[0],
          losses[1]);
    free(text), free(tokens);
    reference_free(&ref);
}

// ---- group refusals --------------------------------------------------------------------

static const struct {
    const char *flags, *says;
    int ranks;
} BAD_FLAGS[] = {
    {"--model mixtral --context 2 --data 3", "--context 2 does not divide the 3 data ranks", 3},
    {"--model mixtral --context 2 --data 2 --seq 18", "--seq 18 is not a multiple of 4", 2},
    {"--model mixtral --expert-parallel 3 --data 3", "does not divide --experts 8", 3},
    {"--model mixtral --expert-parallel 2", "does not divide the 1 data rank", 1},
    {"--model mixtral --expert-parallel 2 --data 2 --zero 0", "needs --zero 1", 2},
    {"--model mixtral --top-k 9", "--top-k 9 is more than --experts 8", 1},
    {"--model llama --expert-parallel 2 --data 2", "--expert-parallel needs --experts", 2},
    {"--model qwen2 --experts 4", "--experts needs --model mixtral or qwen3-moe", 1},
    {"--model mixtral --dropout 0.1", "--dropout", 1},
    {"--model mixtral --window 16", "only mistral has one", 1},
    {"--model mixtral --heads 4 --kv-heads 2 --context 4 --data 4 --context-by ulysses",
     "does not divide the 2 key/value heads", 4},
};

static void group_refusals(TestContext *x) {
    for (size_t i = 0; i < sizeof BAD_FLAGS / sizeof *BAD_FLAGS; i++) {
        char flags[300];
        Layout layout = {"train_5d", BAD_FLAGS[i].ranks, ""};
        snprintf(flags, sizeof flags, "--seq 32 --dry-run --global-batch 12 --micro-batch 1 %s",
                 BAD_FLAGS[i].flags);
        check_refusal(x, &layout, BAD_FLAGS[i].flags, PLAIN, flags, 2, BAD_FLAGS[i].says);
    }
}

// ---- main ------------------------------------------------------------------------------

static const Group GROUPS[] = {
    {"reference", group_reference},  // the reference itself, no trainer
    {"config", group_config},        // config.json alone
    {"layouts", group_layouts},      // layouts against the reference
    {"bits", group_bits},            // bits that no order of streams may change
    {"checkpoints", group_checkpoints},  // resumed at another layout
    {"uses", group_uses},                // validation and samples
    {"refusals", group_refusals},        // bad input
};

int main(int argc, char **argv) {
    static TestContext context;
    prefer_plain_kernels();
    return test_trainers(&context, GROUPS, sizeof GROUPS / sizeof *GROUPS, argc, argv);
}
