// config_json.h: config.json as Hugging Face's GPT-2 writes and reads it.
//
// defines: config_size, config_is, config_read_kind, config_read, config_write_kind, config_write
#ifndef LLMC_CONFIG_JSON_H
#define LLMC_CONFIG_JSON_H

#include "llmc/host/json.h"
#include "llmc/model.h"

// Reads member `key` as a size from 1 to max into *out; it must be there.
static inline bool config_size(const cJSON *root, const char *key, size_t max, size_t *out, const char *path,
                               Error *err) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, key);
    uint64_t n;
    if (!item) return error_set(err, "%s has no \"%s\"", path, key);
    if (!json_whole(item, &n) || n < 1 || n > max) {
        return error_set(err, "%s: \"%s\" must be a whole number from 1 to %zu", path, key, max);
    }
    *out = (size_t)n;
    return true;
}

// A key that is absent, as it then has Hugging Face's default, or has the value that our kernels compute, as JSON.
static inline bool config_is(const cJSON *root, const char *key, const char *value, const char *another,
                             const char *path, Error *err) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, key);
    char *text = item ? cJSON_PrintUnformatted(item) : NULL;
    bool ok = !item || (text && (strcmp(text, value) == 0 || strcmp(text, another) == 0));
    cJSON_free(text);
    return ok || error_set(err, "%s: \"%s\" must be %s: this variant is not supported", path, key, value);
}

// Reads a config.json with GPT-2's names and that "model_type". Returns it, for members of its own, or NULL with a
// sentence that names the first thing that is not as we compute it. The caller frees it with cJSON_Delete. The limits
// of sizes, which are no lower than those of the flags, keep every product of sizes far from 2^63.
static inline cJSON *config_read_kind(const char *path, const char *type, GPTConfig *g, Error *err) {
    cJSON *root = json_read(path, 1 << 20, err);
    const char *found = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(root, "model_type"));
    char inner[24] = "";
    bool ok = root && ((found && strcmp(found, type) == 0) ||
                       error_set(err, "%s: \"model_type\" is not \"%s\", the only one that can be loaded here", path,
                                 type)) &&
              config_size(root, "n_embd", 1 << 17, &g->C, path, err) &&
              config_size(root, "n_layer", 5000, &g->L, path, err) &&
              config_size(root, "n_head", 1 << 17, &g->NH, path, err) &&
              config_size(root, "vocab_size", 1 << 24, &g->V, path, err) &&
              config_size(root, "n_positions", 1 << 24, &g->maxT, path, err) &&
              (g->C % g->NH == 0 || error_set(err, "%s: n_head %zu does not divide n_embd %zu", path, g->NH, g->C));
    if (ok) snprintf(inner, sizeof inner, "%zu", 4 * g->C);
    ok = ok && config_is(root, "activation_function", "\"gelu_new\"", "\"gelu_pytorch_tanh\"", path, err) &&
         config_is(root, "layer_norm_epsilon", "1e-05", "", path, err) &&
         config_is(root, "n_inner", inner, "null", path, err) &&
         config_is(root, "tie_word_embeddings", "true", "", path, err) &&
         config_is(root, "scale_attn_weights", "true", "", path, err) &&
         config_is(root, "scale_attn_by_inverse_layer_idx", "false", "", path, err) &&
         config_is(root, "add_cross_attention", "false", "", path, err);
    if (ok) {
        g->Vp = padded_vocabulary(g->V);
        return root;
    }
    cJSON_Delete(root);
    return NULL;
}

// Reads config.json of our own folders or Hugging Face's, of that kind of model (NULL: GPT-2).
static inline bool config_read(const char *dir, const ModelSpec *spec, GPTConfig *config, Error *err) {
    char path[PATH_MAX];
    config->spec = spec;
    if (!path_print(path, err, "%s/config.json", dir)) return false;
    if (spec && spec->read) return spec->read(path, config, err);
    cJSON *root = config_read_kind(path, "gpt2", config, err);
    bool ok = root != NULL;
    cJSON_Delete(root);
    return ok;
}

// Writes GPT-2's config.json; members: those that say what kind of model it is.
static inline bool config_write_kind(const char *path, const GPTConfig *g, bool bf16, const char *members, Error *err) {
    char text[2048], end_of_text[24] = "null";
    // In both vocabularies that we prepare data for, <|endoftext|> is the last token.
    if (g->V == 257 || g->V == 50257) snprintf(end_of_text, sizeof end_of_text, "%zu", g->V - 1);
    snprintf(text, sizeof text,
             "{\n"
             "%s"
             "  \"n_layer\": %zu,\n"
             "  \"n_head\": %zu,\n"
             "  \"n_embd\": %zu,\n"
             "  \"n_inner\": null,\n"
             "  \"n_positions\": %zu,\n"
             "  \"n_ctx\": %zu,\n"
             "  \"vocab_size\": %zu,\n"
             "  \"activation_function\": \"gelu_new\",\n"
             "  \"layer_norm_epsilon\": 1e-05,\n"
             "  \"initializer_range\": 0.02,\n"
             "  \"attn_pdrop\": 0.0,\n"
             "  \"embd_pdrop\": 0.0,\n"
             "  \"resid_pdrop\": 0.0,\n"
             "  \"scale_attn_weights\": true,\n"
             "  \"tie_word_embeddings\": true,\n"
             "  \"bos_token_id\": %s,\n"
             "  \"eos_token_id\": %s,\n"
             "  \"torch_dtype\": \"%s\"\n"
             "}\n",
             members, g->L, g->NH, g->C, g->maxT, g->maxT, g->V, end_of_text, end_of_text,
             bf16 ? "bfloat16" : "float32");
    return file_write_text(path, text, err);
}

static inline bool config_write(const char *path, const GPTConfig *g, bool bf16, Error *err) {
    static const char gpt2[] = "  \"architectures\": [\"GPT2LMHeadModel\"],\n  \"model_type\": \"gpt2\",\n";
    if (config_spec(g)->write) return config_spec(g)->write(path, g, bf16, err);
    return config_write_kind(path, g, bf16, gpt2, err);
}

#endif
