// llama.h: Llama (Touvron et al. 2023), Qwen2, Qwen3, Mistral and Nemotron-4, which
// differ little.
// lesson: llama
//
// Each model_type has a table of tensors, by Hugging Face's names. Weights are [out, in].
// The matrices of q, k and v lie behind each other in memory, so that one product makes all
// three. So do gate and up. Reads and writes config.json as transformers does.
//
// Letters:
//   HS channels of a head, A = NH HS channels of all queries.
//   KV key/value heads, each shared by NH / KV query heads.
//   F hidden units.
//
// defines: LlamaType, KW and the other kinds beside GPT-2's, Llama, llama_of, llama_rotary,
//          llama_make, llama_rope_table, json_print_real, LlamaOptions, LLAMA_SIZES,
//          LLAMA_ROWS, llama_sizes, llama_resolve
#ifndef LLMC_LLAMA_H
#define LLMC_LLAMA_H

#include <math.h>

#include "llmc/host/config_json.h"
#include "llmc/host/options.h"

typedef enum { LLAMA, QWEN2, NEMOTRON, QWEN3, MISTRAL, LLAMA_TYPE_COUNT } LlamaType;
static const char *const LLAMA_TYPES[] = {"llama", "qwen2", "nemotron", "qwen3", "mistral"};

enum { KW = NUM_KINDS, VW, KB, VB, UPW, HEADW, QNORMW, KNORMW, LLAMA_KINDS };

enum { LLAMA_TENSORS = 22 };

// The sizes and options that GPTConfig lacks. GPTConfig.spec points to the first member.
typedef struct {
    ModelSpec spec;
    TensorSpec tensors[LLAMA_TENSORS];
    LlamaType type;
    bool tied;              // the head is the embedding
    size_t KV, HS, F;       // key/value heads, channels of a head, hidden units
    size_t window;          // keys that a query sees, the last ones; 0: all
    double theta, epsilon;  // of RoPE, of the norms
    double rotary;          // share of a head's channels that RoPE rotates, the first ones
    double factor, low, high, original;  // Llama 3's scaling of RoPE; factor 0: none
} Llama;

static inline const Llama *llama_of(const GPTConfig *g) {
    return (const Llama *)(const void *)g->spec;
}

// Returns the channels of a head that RoPE rotates.
static inline size_t llama_rotary(const Llama *m, size_t HS) {
    return (size_t)(m->rotary * (double)HS);
}

static inline size_t llama_dimension(const GPTConfig *g, char letter) {
    const Llama *m = llama_of(g);
    switch (letter) {
        case 'A': return g->NH * m->HS;
        case 'K': return m->KV * m->HS;
        case 'H': return m->HS;
        default: return m->F;
    }
}

// Returns the FLOPs of a step: for each token, 6 for each weight of its matrices. Attention
// counts as in gpt2_flops, as if every token saw all T, or all of its window.
static inline double llama_flops(const GPTConfig *g, double tokens, size_t T) {
    const Llama *m = llama_of(g);
    double C = (double)g->C, A = (double)llama_dimension(g, 'A');
    double K = (double)llama_dimension(g, 'K'), F = (double)m->F, L = (double)g->L;
    double seen = (double)(m->window && m->window < T ? m->window : T);
    double weights = L * (2 * C * A + 2 * C * K + (m->type == NEMOTRON ? 2 : 3) * C * F) +
                     (double)g->V * C;
    return 6 * tokens * weights + 12 * tokens * L * seen * A;
}

static inline bool llama_read(const char *path, GPTConfig *config, Error *err);
static inline bool llama_write(const char *path, const GPTConfig *g, bool bf16, Error *err);

// Fills in the spec by type and tied. Each row says which models have it.
static inline void llama_make(Llama *m) {
    enum { Q2 = 1 << QWEN2, Q3 = 1 << QWEN3, N = 1 << NEMOTRON };
    enum { UNTIED = 1 << LLAMA_TYPE_COUNT, ALL = UNTIED - 1, GATED = ALL & ~N };
    const unsigned decays = TENSOR_DECAYS, norm = TENSOR_NORM, joined = TENSOR_JOINED;
    // LayerNorm1P adds the one.
    const Init one = m->type == NEMOTRON ? INIT_ZERO : INIT_ONE;
#define LAYER "model.layers.%zu."
    const struct {
        unsigned models;
        TensorSpec row;
    } rows[] = {
        {ALL,
         {WTE, "model.embed_tokens.weight", 'V', 'C', SPLIT_VOCAB, INIT_NORMAL,
          decays | TENSOR_FIRST | (m->tied ? 1u : 0u) * TENSOR_LAST}},
        {ALL, {LN1W, LAYER "input_layernorm.weight", '1', 'C', SPLIT_NONE, one, norm}},
        {N, {LN1B, LAYER "input_layernorm.bias", '1', 'C', SPLIT_NONE, INIT_ZERO, norm}},
        {ALL,
         {QKVW, LAYER "self_attn.q_proj.weight", 'A', 'C', SPLIT_ROWS, INIT_NORMAL,
          decays}},
        {ALL,
         {KW, LAYER "self_attn.k_proj.weight", 'K', 'C', SPLIT_ROWS, INIT_NORMAL,
          decays | joined}},
        {ALL,
         {VW, LAYER "self_attn.v_proj.weight", 'K', 'C', SPLIT_ROWS, INIT_NORMAL,
          decays | joined}},
        {Q2, {QKVB, LAYER "self_attn.q_proj.bias", '1', 'A', SPLIT_COLUMNS, INIT_ZERO, 0}},
        {Q2,
         {KB, LAYER "self_attn.k_proj.bias", '1', 'K', SPLIT_COLUMNS, INIT_ZERO, joined}},
        {Q2,
         {VB, LAYER "self_attn.v_proj.bias", '1', 'K', SPLIT_COLUMNS, INIT_ZERO, joined}},
        {Q3, {QNORMW, LAYER "self_attn.q_norm.weight", '1', 'H', SPLIT_NONE, one, norm}},
        {Q3, {KNORMW, LAYER "self_attn.k_norm.weight", '1', 'H', SPLIT_NONE, one, norm}},
        {ALL,
         {PROJW, LAYER "self_attn.o_proj.weight", 'C', 'A', SPLIT_COLUMNS, INIT_NORMAL,
          decays}},
        {ALL,
         {LN2W, LAYER "post_attention_layernorm.weight", '1', 'C', SPLIT_NONE, one, norm}},
        {N,
         {LN2B, LAYER "post_attention_layernorm.bias", '1', 'C', SPLIT_NONE, INIT_ZERO,
          norm}},
        {GATED,
         {FCW, LAYER "mlp.gate_proj.weight", 'F', 'C', SPLIT_ROWS, INIT_NORMAL, decays}},
        {GATED,
         {UPW, LAYER "mlp.up_proj.weight", 'F', 'C', SPLIT_ROWS, INIT_NORMAL,
          decays | joined}},
        {N, {FCW, LAYER "mlp.up_proj.weight", 'F', 'C', SPLIT_ROWS, INIT_NORMAL, decays}},
        {ALL,
         {FCPROJW, LAYER "mlp.down_proj.weight", 'C', 'F', SPLIT_COLUMNS, INIT_NORMAL,
          decays}},
        {ALL, {LNFW, "model.norm.weight", '1', 'C', SPLIT_NONE, one, norm | TENSOR_LAST}},
        {N, {LNFB, "model.norm.bias", '1', 'C', SPLIT_NONE, INIT_ZERO, norm | TENSOR_LAST}},
        {UNTIED,
         {HEADW, "lm_head.weight", 'V', 'C', SPLIT_VOCAB, INIT_NORMAL,
          decays | TENSOR_LAST}}};
#undef LAYER
    ModelSpec *spec = &m->spec;
    memset(spec, 0, sizeof *spec);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (!(rows[i].models & (1u << m->type | (m->tied ? 0u : (unsigned)UNTIED))))
            continue;
        if (rows[i].row.kind == LN1W) spec->layer = spec->count;
        if (rows[i].row.kind == LNFW) spec->behind = spec->count;
        m->tensors[spec->count++] = rows[i].row;
    }
    spec->tensors = m->tensors;
    spec->stddev = m->type == NEMOTRON ? 0.0134 : 0.02;
    spec->dimension = llama_dimension;
    spec->flops = llama_flops;
    spec->read = llama_read;
    spec->write = llama_write;
}

// Returns the angle of position 1 of RoPE's pair i of D / 2 (Su et al. 2021), with Llama
// 3's scaling. Slow pairs turn `factor` times slower, fast ones as before. Pairs between
// them are interpolated by their turns in `original` positions.
static inline double llama_frequency(const Llama *m, size_t i, size_t D) {
    double f = pow(m->theta, -2.0 * (double)i / (double)D);
    double turns = m->original * f / (2 * acos(-1.0));
    if (m->factor == 0 || turns > m->high) return f;
    if (turns < m->low) return f / m->factor;
    double share = (turns - m->low) / (m->high - m->low);
    return f * ((1 - share) / m->factor + share);
}

// Fills table [T, D/2, 2] with the cosine and sine of each position and pair.
static inline void llama_rope_table(const Llama *m, float *table, size_t T, size_t D) {
    for (size_t i = 0; i < D / 2; i++) {
        double f = llama_frequency(m, i, D);
        for (size_t t = 0; t < T; t++) {
            table[t * D + 2 * i] = (float)cos((double)t * f);
            table[t * D + 2 * i + 1] = (float)sin((double)t * f);
        }
    }
}

// ----------------------------------------------------------------------------------------
// config.json

// Reads a number that may be missing or null; *out then stays.
static inline bool llama_number(const cJSON *root, const char *key, double *out,
                                const char *path, Error *err) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, key);
    if (!item || cJSON_IsNull(item)) return true;
    *out = item->valuedouble;
    return (cJSON_IsNumber(item) && *out > 0 && *out < 1e12) ||
           error_set(err, "%s: \"%s\" must be a number above 0", path, key);
}

// The members that RoPE's object may have, and four more with Llama 3's scaling.
static const char *const ROPE_NAMES[] = {"rope_type", "type", "rope_theta",
                                         "partial_rotary_factor", NULL};
static const char *const ROPE_SCALED[] = {"factor", "low_freq_factor", "high_freq_factor",
                                          "original_max_position_embeddings", NULL};

// Reads RoPE's object, "rope_parameters" or "rope_scaling".
static inline bool llama_read_scaling(const cJSON *rope, Llama *m, const char *path,
                                      Error *err) {
    const cJSON *kind = cJSON_GetObjectItemCaseSensitive(rope, "rope_type"), *item;
    if (!kind) kind = cJSON_GetObjectItemCaseSensitive(rope, "type");
    if (kind && !cJSON_IsString(kind))
        return error_set(err, "%s: \"rope_type\" must be a word", path);
    const char *name = kind ? kind->valuestring : "default";
    bool scaled = strcmp(name, "llama3") == 0;
    size_t original = 0;
    if (!scaled && strcmp(name, "default") != 0)
        return error_set(
            err, "%s: \"rope_type\" %.40s is not supported: only default and llama3 are",
            path, name);
    cJSON_ArrayForEach(item, rope) {
        bool known = config_listed(ROPE_NAMES, item->string) ||
                     (scaled && config_listed(ROPE_SCALED, item->string));
        if (!known && !cJSON_IsNull(item))
            return error_set(err,
                             "%s: \"%s\" of RoPE is not supported with \"rope_type\" %s",
                             path, item->string, name);
    }
    if (!llama_number(rope, "rope_theta", &m->theta, path, err) ||
        !llama_number(rope, "partial_rotary_factor", &m->rotary, path, err))
        return false;
    if (!scaled) return true;
    if (!llama_number(rope, "factor", &m->factor, path, err) ||
        !llama_number(rope, "low_freq_factor", &m->low, path, err) ||
        !llama_number(rope, "high_freq_factor", &m->high, path, err) ||
        !config_size(rope, "original_max_position_embeddings", 1 << 24, &original, path,
                     err))
        return false;
    m->original = (double)original;
    return (m->factor > 0 && m->low > 0 && m->high > m->low) ||
           error_set(err,
                     "%s: \"rope_type\" llama3 needs factor, "
                     "original_max_position_embeddings, and a "
                     "low_freq_factor below high_freq_factor",
                     path);
}

// Reads RoPE's members. transformers 4 has them at the top and in "rope_scaling", 5 writes
// them together in "rope_parameters". If both objects are there they must agree, as
// transformers takes one and ignores the other.
static inline bool llama_read_rope(const cJSON *root, Llama *m, const char *path,
                                   Error *err) {
    static const char *const OBJECTS[] = {"rope_parameters", "rope_scaling"};
    const cJSON *rope = NULL;
    if (!llama_number(root, "rope_theta", &m->theta, path, err) ||
        !llama_number(root, "partial_rotary_factor", &m->rotary, path, err) ||
        !config_agree(root, OBJECTS[0], root, OBJECTS[1], path, err))
        return false;
    for (int i = 0; i < 2; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, OBJECTS[i]);
        if (item && !cJSON_IsNull(item) && !cJSON_IsObject(item))
            return error_set(err, "%s: \"%s\" must be an object", path, OBJECTS[i]);
        if (cJSON_IsObject(item)) rope = item;
    }
    if (!config_agree(root, "rope_theta", rope, "rope_theta", path, err) ||
        !config_agree(root, "partial_rotary_factor", rope, "partial_rotary_factor", path,
                      err) ||
        !config_agree(rope, "rope_type", rope, "type", path, err) ||
        (rope && !llama_read_scaling(rope, m, path, err)))
        return false;
    return m->type == NEMOTRON || m->rotary == 1 ||
           error_set(err, "%s: \"partial_rotary_factor\" must be 1: %s turns all of a head",
                     path, LLAMA_TYPES[m->type]);
}

// The members of all types that are read, or change nothing.
static const char *const LLAMA_NAMES_READ[] = {
    "head_dim", "hidden_act", "hidden_size", "intermediate_size", "is_llama_config",
    "layer_types", "max_position_embeddings", "max_window_layers", "norm_eps",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "partial_rotary_factor", "rms_norm_eps", "rope_parameters", "rope_scaling",
    "rope_theta", "sliding_window", "use_sliding_window", NULL};

// Members that must be off, because no kernel here computes them.
static const char *const LLAMA_VALUES[][2] = {{"attention_bias", "false|null"},
                                              {"attention_dropout", "0|null"},
                                              {"attn_pdrop", "0|null"},
                                              {"embd_pdrop", "0|null"},
                                              {"hidden_dropout", "0|null"},
                                              {"mlp_bias", "false|null"},
                                              {"resid_pdrop", "0|null"},
                                              {"rope_interleaved", "false|null"},
                                              {"tie_word_embeddings", "false|true|null"},
                                              {"use_mrope", "false|null"},
                                              {NULL, NULL}};

// Reads Mistral's window: 4096 if it is absent, none if it is null. Refuses windows that
// only some layers have. Qwen's begin at layer "max_window_layers", 28 if it is absent,
// unless "layer_types" lists the layers that slide.
static inline bool llama_read_windows(const cJSON *root, const GPTConfig *g, Llama *m,
                                      const char *path, Error *err) {
    const cJSON *window = cJSON_GetObjectItemCaseSensitive(root, "sliding_window");
    const bool qwen = m->type == QWEN2 || m->type == QWEN3;
    const cJSON *types = cJSON_GetObjectItemCaseSensitive(root, "layer_types"), *type;
    const cJSON *first = cJSON_GetObjectItemCaseSensitive(root, "max_window_layers");
    uint64_t before = 28;
    if (types && !cJSON_IsNull(types)) {
        bool full = cJSON_IsArray(types) && (size_t)cJSON_GetArraySize(types) == g->L;
        cJSON_ArrayForEach(type, types) {
            full = full && cJSON_IsString(type) &&
                   strcmp(type->valuestring, "full_attention") == 0;
        }
        if (!full)
            return error_set(err,
                             "%s: \"layer_types\" must be %zu times full_attention: "
                             "windows of some layers are not supported",
                             path, g->L);
    }
    if (first && !cJSON_IsNull(first) && !json_whole(first, &before))
        return error_set(err, "%s: \"max_window_layers\" must be a whole number", path);
    if (m->type == MISTRAL) {
        m->window = window ? 0 : 4096;
        if (window && !cJSON_IsNull(window) &&
            !config_size(root, "sliding_window", 1 << 24, &m->window, path, err))
            return false;
    } else if (!qwen && !config_is(root, "sliding_window", "null", path, err))
        return false;
    bool none_slides =
        qwen && (before >= g->L || cJSON_IsArray(types) || cJSON_IsNull(window));
    return config_is(root, "use_sliding_window",
                     none_slides ? "false|true|null" : "false|null", path, err);
}

// Refuses models that our kernels do not compute, and unknown members.
static inline bool llama_check_variant(const cJSON *root, const GPTConfig *g,
                                       Llama *m, const char *path, Error *err) {
    const bool nemotron = m->type == NEMOTRON;
    return llama_read_windows(root, g, m, path, err) &&
           config_is(root, nemotron ? "rms_norm_eps" : "norm_eps", "null", path, err) &&
           config_is(root, "hidden_act", nemotron ? "\"relu2\"" : "\"silu\"", path, err) &&
           config_check_keys(root, LLAMA_NAMES_READ, LLAMA_VALUES, path, err);
}

// Returns the channels of a head by default, or 0 if heads do not divide C.
static inline size_t llama_head(const GPTConfig *g) {
    return g->C % g->NH ? 0 : g->C / g->NH;
}

// Checks the sizes of a file or of the command line against each other.
static inline bool llama_check_sizes(const GPTConfig *g, const Llama *m, Error *err) {
    size_t HS = m->HS;
    if (!HS)
        return error_set(err,
                         "%zu attention heads do not divide %zu channels: give the channels "
                         "of a head, --head-dim or \"head_dim\"",
                         g->NH, g->C);
    if (HS > ATTENTION_MAX_HEAD_SIZE)
        return error_set(err, "heads of %zu channels are too large, %d is the most", HS,
                         ATTENTION_MAX_HEAD_SIZE);
    if (m->KV > g->NH)
        return error_set(err, "%zu key/value heads are more than the %zu attention heads",
                         m->KV, g->NH);
    if (g->NH % m->KV)
        return error_set(err, "%zu key/value heads do not divide the %zu attention heads",
                         m->KV, g->NH);
    size_t D = llama_rotary(m, HS);
    if (m->rotary > 1 || D < 2 || D % 2)
        return error_set(err,
                         "RoPE rotates pairs: %zu of a head's %zu channels "
                         "(partial_rotary_factor %g) must be an "
                         "even number from 2 to %zu",
                         D, HS, m->rotary, HS);
    return true;
}

// Reads config.json's object into *config and the Llama behind its spec.
static inline bool llama_read_root(const cJSON *root, const char *path, GPTConfig *config,
                                   Error *err) {
    Llama *m = (Llama *)(void *)config->spec;
    GPTConfig g = *config;
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, "model_type");
    bool ok = true;
    int type = 0;
    while (type < LLAMA_TYPE_COUNT &&
           !(cJSON_IsString(item) && strcmp(item->valuestring, LLAMA_TYPES[type]) == 0))
        type++;
    if (type == LLAMA_TYPE_COUNT)
        ok = error_set(err,
                       "%s: \"model_type\" %.40s is not supported: llama, qwen2, qwen3, "
                       "mistral and nemotron are",
                       path, cJSON_IsString(item) ? item->valuestring : "?");
    if (ok) {
        memset(m, 0, sizeof *m);
        m->type = (LlamaType)type;
        m->theta = 1e4;
        m->rotary = m->type == NEMOTRON ? 0.5 : 1;
        m->epsilon = m->type == NEMOTRON ? 1e-5 : 1e-6;
        ok = config_size(root, "hidden_size", 1 << 17, &g.C, path, err) &&
             config_size(root, "num_hidden_layers", 5000, &g.L, path, err) &&
             config_size(root, "num_attention_heads", 1 << 17, &g.NH, path, err) &&
             config_size(root, "intermediate_size", 1 << 20, &m->F, path, err) &&
             config_size(root, "vocab_size", 1 << 24, &g.V, path, err) &&
             config_size(root, "max_position_embeddings", 1 << 24, &g.maxT, path, err);
        item = cJSON_GetObjectItemCaseSensitive(root, "num_key_value_heads");
        m->KV = g.NH;
        if (ok && item && !cJSON_IsNull(item))
            ok = config_size(root, "num_key_value_heads", 1 << 17, &m->KV, path, err);
        item = cJSON_GetObjectItemCaseSensitive(root, "head_dim");
        if (ok) m->HS = m->type == QWEN3 ? 128 : llama_head(&g);
        if (ok && item && !cJSON_IsNull(item))
            ok = config_size(root, "head_dim", 1 << 17, &m->HS, path, err);
    }
    ok = ok && llama_check_variant(root, &g, m, path, err) &&
         llama_read_rope(root, m, path, err) &&
         llama_number(root, m->type == NEMOTRON ? "norm_eps" : "rms_norm_eps", &m->epsilon,
                      path, err);
    if (ok)
        m->tied =
            cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(root, "tie_word_embeddings"));
    Error why;
    if (ok && !llama_check_sizes(&g, m, &why))
        ok = error_set(err, "%s: %.900s", path, why.text);
    if (!ok) return false;
    llama_make(m);
    g.Vp = padded_vocabulary(g.V);
    *config = g;
    return true;
}

static inline bool llama_read(const char *path, GPTConfig *config, Error *err) {
    cJSON *root = json_read(path, 1 << 20, err);
    bool ok = root && llama_read_root(root, path, config, err);
    cJSON_Delete(root);
    return ok;
}

// Prints a number as Python writes a float: with the fewest digits that give it back. A
// point or an exponent makes sure that Python reads a float again.
static inline const char *json_print_real(char text[40], double x) {
    int digits = 1;
    do snprintf(text, 40, "%.*e", digits - 1, x);
    while (strtod(text, NULL) != x && ++digits <= 17);
    int exponent = (int)strtod(strchr(text, 'e') + 1, NULL);
    int decimals = digits - 1 - exponent;
    if (exponent >= -4 && exponent < 16)
        snprintf(text, 40, "%.*f", decimals > 1 ? decimals : 1, x);
    return text;
}

// Writes config.json with RoPE's members at the top: transformers 4 and 5 both read these.
// Reals stay floats: 4.57 warns of a factor that is a whole number.
static inline bool llama_write(const char *path, const GPTConfig *g, bool bf16,
                               Error *err) {
    static const char *const CLASSES[] = {"LlamaForCausalLM", "Qwen2ForCausalLM",
                                          "NemotronForCausalLM", "Qwen3ForCausalLM",
                                          "MistralForCausalLM"};
    const Llama *m = llama_of(g);
    char text[2560], rope[320] = "null", own[200] = "", real[3][40];
    if (m->factor > 0)
        snprintf(rope, sizeof rope,
                 "{\"rope_type\": \"llama3\", \"factor\": %s, \"low_freq_factor\": %s, "
                 "\"high_freq_factor\": %s, \"original_max_position_embeddings\": %.0f}",
                 json_print_real(real[0], m->factor), json_print_real(real[1], m->low),
                 json_print_real(real[2], m->high), m->original);
    if (m->type == QWEN2 || m->type == QWEN3)
        snprintf(own, sizeof own, "  \"use_sliding_window\": false,\n%s",
                 m->type == QWEN3 ? "  \"attention_bias\": false,\n" : "");
    else if (m->type == MISTRAL && m->window)
        snprintf(own, sizeof own, "  \"sliding_window\": %zu,\n", m->window);
    else if (m->type == MISTRAL)
        snprintf(own, sizeof own, "  \"sliding_window\": null,\n");
    else
        snprintf(own, sizeof own, "  \"attention_bias\": false,\n  \"mlp_bias\": false,\n");
    if (m->type == NEMOTRON)
        snprintf(own + strlen(own), sizeof own - strlen(own),
                 "  \"partial_rotary_factor\": %s,\n", json_print_real(real[0], m->rotary));
    snprintf(text, sizeof text,
             "{\n"
             "  \"architectures\": [\"%s\"],\n"
             "  \"model_type\": \"%s\",\n"
             "  \"num_hidden_layers\": %zu,\n"
             "  \"hidden_size\": %zu,\n"
             "  \"num_attention_heads\": %zu,\n"
             "  \"num_key_value_heads\": %zu,\n"
             "  \"head_dim\": %zu,\n"
             "  \"intermediate_size\": %zu,\n"
             "  \"vocab_size\": %zu,\n"
             "  \"max_position_embeddings\": %zu,\n"
             "  \"hidden_act\": \"%s\",\n"
             "  \"%s\": %s,\n"
             "  \"rope_theta\": %s,\n"
             "  \"rope_scaling\": %s,\n"
             "%s"
             "  \"initializer_range\": %s,\n"
             "  \"tie_word_embeddings\": %s,\n"
             "  \"bos_token_id\": null,\n"
             "  \"eos_token_id\": null,\n"
             "  \"torch_dtype\": \"%s\"\n"
             "}\n",
             CLASSES[m->type], LLAMA_TYPES[m->type], g->L, g->C, g->NH, m->KV, m->HS, m->F,
             g->V, g->maxT, m->type == NEMOTRON ? "relu2" : "silu",
             m->type == NEMOTRON ? "norm_eps" : "rms_norm_eps",
             json_print_real(real[0], m->epsilon), json_print_real(real[1], m->theta), rope,
             own, json_print_real(real[2], m->spec.stddev), m->tied ? "true" : "false",
             bf16 ? "bfloat16" : "float32");
    return file_write_text(path, text, err);
}

// ----------------------------------------------------------------------------------------
// The command line

// Values of the command line; 0: left out.
typedef struct {
    int model;  // position in LLAMA_SIZES
    size_t KV, HS, F, window;
} LlamaOptions;

// The choices of --model. The first five have none and take them from the other flags.
typedef struct {
    LlamaType type;
    size_t L, C, NH, KV, F, V, maxT;
    double theta, epsilon, factor;
    bool tied;
    size_t HS, window;  // 0: C / NH, none
} LlamaSize;

#define LLAMA_NAMES                                                                        \
    "llama|qwen2|qwen3|mistral|nemotron|smollm2-135m|llama-3.2-1b|llama-3.1-8b|"           \
    "llama-3.1-70b|llama-3.1-405b|qwen2.5-0.5b|qwen3-0.6b|qwen3-1.7b|qwen3-8b|qwen3-32b|"  \
    "mistral-7b|mistral-7b-v0.3|nemotron-4-15b|nemotron-4-340b"

static const LlamaSize LLAMA_SIZES[] = {
    {LLAMA, 0, 0, 0, 0, 0, 0, 0, 1e4, 1e-5, 0, false, 0, 0},
    {QWEN2, 0, 0, 0, 0, 0, 0, 0, 1e6, 1e-6, 0, true, 0, 0},
    {QWEN3, 0, 0, 0, 0, 0, 0, 0, 1e6, 1e-6, 0, true, 0, 0},
    {MISTRAL, 0, 0, 0, 0, 0, 0, 0, 1e4, 1e-5, 0, false, 0, 0},
    {NEMOTRON, 0, 0, 0, 0, 0, 0, 0, 1e4, 1e-5, 0, false, 0, 0},
    {LLAMA, 30, 576, 9, 3, 1536, 49152, 8192, 1e5, 1e-5, 0, true, 0, 0},
    {LLAMA, 16, 2048, 32, 8, 8192, 128256, 131072, 5e5, 1e-5, 32, true, 0, 0},
    {LLAMA, 32, 4096, 32, 8, 14336, 128256, 131072, 5e5, 1e-5, 8, false, 0, 0},
    {LLAMA, 80, 8192, 64, 8, 28672, 128256, 131072, 5e5, 1e-5, 8, false, 0, 0},
    {LLAMA, 126, 16384, 128, 8, 53248, 128256, 131072, 5e5, 1e-5, 8, false, 0, 0},
    {QWEN2, 24, 896, 14, 2, 4864, 151936, 32768, 1e6, 1e-6, 0, true, 0, 0},
    {QWEN3, 28, 1024, 16, 8, 3072, 151936, 40960, 1e6, 1e-6, 0, true, 128, 0},
    {QWEN3, 28, 2048, 16, 8, 6144, 151936, 40960, 1e6, 1e-6, 0, true, 128, 0},
    {QWEN3, 36, 4096, 32, 8, 12288, 151936, 40960, 1e6, 1e-6, 0, false, 128, 0},
    {QWEN3, 64, 5120, 64, 8, 25600, 151936, 40960, 1e6, 1e-6, 0, false, 128, 0},
    {MISTRAL, 32, 4096, 32, 8, 14336, 32000, 32768, 1e4, 1e-5, 0, false, 0, 4096},
    {MISTRAL, 32, 4096, 32, 8, 14336, 32768, 32768, 1e6, 1e-5, 0, false, 0, 0},
    {NEMOTRON, 32, 6144, 48, 8, 24576, 256000, 4096, 1e4, 1e-5, 0, false, 0, 0},
    {NEMOTRON, 96, 18432, 96, 8, 73728, 256000, 4096, 1e4, 1e-5, 0, false, 0, 0},
};

static const Field LLAMA_ROWS[] = {
    {"Model", FIELD_TITLE, 0, NULL, 0, 0, OPTION_BASIC, NULL, NULL},
    {"model", FIELD_CHOICE, offsetof(LlamaOptions, model), "llama", 0, 0, OPTION_BASIC,
     LLAMA_NAMES, "kind of blocks, or a published model's sizes"},
    {"kv-heads", FIELD_SIZE, offsetof(LlamaOptions, KV), NULL, 1, 1e5, OPTION_BASIC, "N",
     "key/value heads; must divide --heads (default: --heads)"},
    {"head-dim", FIELD_SIZE, offsetof(LlamaOptions, HS), NULL, 1, 1e5, OPTION_BASIC, "N",
     "channels of a head (default: --channels / --heads)"},
    {"window", FIELD_SIZE, offsetof(LlamaOptions, window), NULL, 1, 1e8, OPTION_BASIC, "N",
     "mistral: keys that a query sees, the last ones (default: all)"},
    {"hidden", FIELD_SIZE, offsetof(LlamaOptions, F), NULL, 1, 1e7, OPTION_BASIC, "N",
     "hidden units of the MLP (default 3 --channels; nemotron 4)"},
};

// Fills in the sizes of the named model that no flag gives.
static inline bool llama_sizes(Options *o, const void *flags, Error *err) {
    const LlamaSize *s = &LLAMA_SIZES[((const LlamaOptions *)flags)->model];
    const GPTConfig named = {s->L, s->C, s->NH, s->V, 0, s->maxT, NULL};
    return options_take_model(o, &named, false, err);
}

// Fills in *m from the flags and a name's sizes. from_file: *m was read from a file, so
// the flags must agree with it. Checks the sizes for t tensor ranks.
static inline bool llama_resolve_size(Llama *m, const LlamaSize *s,
                                      const LlamaOptions *flags, const GPTConfig *g,
                                      bool from_file, size_t t, Error *err) {
    size_t KV = flags->KV ? flags->KV : s->KV, F = flags->F ? flags->F : s->F;
    size_t HS = flags->HS ? flags->HS : s->HS;
    size_t window = flags->window ? flags->window : s->window;
    if (from_file && ((KV && KV != m->KV) || (F && F != m->F) || (HS && HS != m->HS) ||
                      (window && window != m->window)))
        return error_set(err,
                         "the checkpoint has %zu key/value heads, heads of %zu channels, "
                         "%zu hidden units and a window of %zu keys (0: all): leave out the "
                         "flags that contradict it",
                         m->KV, m->HS, m->F, m->window);
    if (!from_file) {
        memset(m, 0, sizeof *m);
        m->type = s->type;
        m->tied = s->tied;
        m->theta = s->theta;
        m->epsilon = s->epsilon;
        m->rotary = s->type == NEMOTRON ? 0.5 : 1;
        m->KV = KV ? KV : g->NH;
        m->HS = HS ? HS : llama_head(g);
        m->F = F ? F : (s->type == NEMOTRON ? 4 : 3) * g->C;
        m->window = window;
        m->factor = s->factor;
        m->low = 1;
        m->high = 4;
        m->original = 8192;
        if (window && s->type != MISTRAL)
            return error_set(err, "--window %zu: only mistral has one, %s has none", window,
                             LLAMA_TYPES[s->type]);
        if (!llama_check_sizes(g, m, err)) return false;
        llama_make(m);
    }
    if (m->KV % t)
        return error_set(
            err,
            "--tensor %zu does not divide the %zu key/value heads: take a size that does",
            t, m->KV);
    if (m->F % t)
        return error_set(
            err, "--tensor %zu does not divide the %zu hidden units: take a size that does",
            t, m->F);
    return true;
}

static inline bool llama_resolve(Llama *m, const LlamaOptions *flags, const GPTConfig *g,
                                 bool from_file, size_t t, Error *err) {
    const LlamaSize *s = &LLAMA_SIZES[flags->model];
    return llama_resolve_size(m, s, flags, g, from_file, t, err);
}

#endif
