// config_json.h: config.json as Hugging Face's GPT-2 writes and reads it.
//
// defines: config_read, config_write
#ifndef LLMC_CONFIG_JSON_H
#define LLMC_CONFIG_JSON_H

#include "llmc/host/json.h"
#include "llmc/model.h"

// Reads member `key` as a size from 1 to max into *out; it must be there.
static inline bool config_size(const cJSON *root, const char *key, size_t max, size_t *out, const char *path,
                               Error *err) {
    const cJSON *item;
    uint64_t n;
    if (!json_get(root, key, &item, path, err)) return false;
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
    const cJSON *item;
    if (!json_get(root, key, &item, path, err)) return false;
    char *text = item ? cJSON_PrintUnformatted(item) : NULL;
    bool ok = !item || (text && (strcmp(text, value) == 0 || strcmp(text, another) == 0));
    cJSON_free(text);
    return ok || error_set(err, "%s: \"%s\" must be %s: this variant is not supported", path, key, value);
}

static inline bool config_check_variant(const cJSON *root, size_t channels, const char *path, Error *err) {
    const cJSON *item;
    char inner[24];
    snprintf(inner, sizeof inner, "%zu", 4 * channels);
    if (!json_get(root, "model_type", &item, path, err)) return false;
    if (!cJSON_IsString(item) || strcmp(item->valuestring, "gpt2") != 0)
        return error_set(err, "%s: \"model_type\" is not \"gpt2\": only GPT-2 can be loaded", path);
    return config_is(root, "activation_function", "\"gelu_new\"", "\"gelu_pytorch_tanh\"", path, err) &&
           config_is(root, "layer_norm_epsilon", "1e-05", "", path, err) &&
           config_is(root, "n_inner", inner, "null", path, err) &&
           config_is(root, "tie_word_embeddings", "true", "", path, err) &&
           config_is(root, "scale_attn_weights", "true", "", path, err) &&
           config_is(root, "scale_attn_by_inverse_layer_idx", "false", "", path, err) &&
           config_is(root, "add_cross_attention", "false", "", path, err);
}

// Reads a model of that kind (NULL: GPT-2). False with a sentence that names the first thing that is not as we compute
// it.
static inline bool config_read(const char *path, const ModelSpec *spec, GPTConfig *config, Error *err) {
    config->spec = spec;
    if (spec && spec->read) return spec->read(path, config, err);
    cJSON *root = json_read(path, 1 << 20, err);
    if (!root) return false;
    GPTConfig g;
    memset(&g, 0, sizeof g);
    // The limits, which are no lower than those of the flags, keep every product of sizes far from 2^63.
    bool ok = config_size(root, "n_embd", 1 << 17, &g.C, path, err) && config_check_variant(root, g.C, path, err) &&
              config_size(root, "n_layer", 5000, &g.L, path, err) &&
              config_size(root, "n_head", 1 << 17, &g.NH, path, err) &&
              config_size(root, "vocab_size", 1 << 24, &g.V, path, err) &&
              config_size(root, "n_positions", 1 << 24, &g.maxT, path, err);
    if (ok && g.C % g.NH) ok = error_set(err, "%s: n_head %zu does not divide n_embd %zu", path, g.NH, g.C);
    cJSON_Delete(root);
    g.Vp = padded_vocabulary(g.V);
    if (ok) *config = g;
    return ok;
}

static inline bool config_write(const char *path, const GPTConfig *g, bool bf16, Error *err) {
    if (config_spec(g)->write) return config_spec(g)->write(path, g, bf16, err);
    char text[2048], end_of_text[24] = "null";
    // In both vocabularies that we prepare data for, <|endoftext|> is the last token.
    if (g->V == 257 || g->V == 50257) snprintf(end_of_text, sizeof end_of_text, "%zu", g->V - 1);
    snprintf(text, sizeof text,
             "{\n"
             "  \"architectures\": [\"GPT2LMHeadModel\"],\n"
             "  \"model_type\": \"gpt2\",\n"
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
             g->L, g->NH, g->C, g->maxT, g->maxT, g->V, end_of_text, end_of_text,
             bf16 ? "bfloat16" : "float32");
    return file_write_text(path, text, err);
}

#endif
