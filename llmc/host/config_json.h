// config_json.h: config.json as Hugging Face's GPT-2 writes and reads it. Each member is
// read, known to change nothing, or refused by its name. Two members that state the same
// fact must agree.
//
// defines: config_size, config_is, config_agree, config_check_keys, config_read_kind,
//          config_read, config_write_kind, config_write, config_write_again
#ifndef LLMC_CONFIG_JSON_H
#define LLMC_CONFIG_JSON_H

#include "llmc/host/json.h"
#include "llmc/model.h"

enum { CONFIG_MAX_FILE = 1 << 20 };

// Reads member `key` as a size from 1 to max into *out; it must be there.
static inline bool config_size(const cJSON *root, const char *key, size_t max, size_t *out,
                               const char *path, Error *err) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, key);
    uint64_t n;
    if (!item) return error_set(err, "%s has no \"%s\"", path, key);
    if (!json_whole(item, &n) || n < 1 || n > max) {
        return error_set(err, "%s: \"%s\" must be a whole number from 1 to %zu", path, key,
                         max);
    }
    *out = (size_t)n;
    return true;
}

// True if a key is absent, which gives it Hugging Face's default, or has one of the values
// that our kernels compute. values: JSON, with | between them.
static inline bool config_is(const cJSON *root, const char *key, const char *values,
                             const char *path, Error *err) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, key);
    if (!item) return true;
    char *text = (char *)host_check(cJSON_PrintUnformatted(item), 1, 1);
    bool ok = field_choice(values, text) >= 0;
    free(text);
    return ok || error_set(err, "%s: \"%s\" must be %.*s: this variant is not supported",
                           path, key, (int)strcspn(values, "|"), values);
}

// Compares two places of one fact, key of a and another of b. If both are there and not
// null, they must agree.
static inline bool config_agree(const cJSON *a, const char *key, const cJSON *b,
                                const char *another, const char *path, Error *err) {
    const cJSON *x = cJSON_GetObjectItemCaseSensitive(a, key);
    const cJSON *y = cJSON_GetObjectItemCaseSensitive(b, another);
    if (!x || !y || cJSON_IsNull(x) || cJSON_IsNull(y) || cJSON_Compare(x, y, true))
        return true;
    if (strcmp(key, another) == 0)
        return error_set(err, "%s has \"%s\" twice, and they disagree", path, key);
    return error_set(err, "%s: \"%s\" and \"%s\" disagree: keep one of them", path, key,
                     another);
}

// Members that every model's config.json may have and that change nothing here. They tell
// the model's origin, its tokenizer, the generation of text, heads for tasks other than
// language modelling, and the output of transformers.
static const char *const CONFIG_HARMLESS[] = {
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "_commit_hash", "_flash_attn_2_enabled", "_name_or_path", "architectures",
    "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "id2label", "initializer_range",
    "is_decoder", "label2id", "length_penalty", "max_length", "min_length", "model_type",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_past",
    "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    "tf_legacy_loss", "tie_word_embeddings", "tokenizer_class", "top_k", "top_p",
    "torch_dtype", "torchscript", "transformers.js_config", "transformers_version",
    "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    "use_cache", "vocab_size", "xla_device", NULL};

// Members that must have one of these values.
static const char *const CONFIG_VALUES[][2] = {{"add_cross_attention", "false|null"},
                                               {"cross_attention_hidden_size", "null"},
                                               {"is_encoder_decoder", "false|null"},
                                               {"pruned_heads", "{}|null"},
                                               {"quantization_config", "null"},
                                               {"tie_encoder_decoder", "false|null"},
                                               {NULL, NULL}};

static inline bool config_listed(const char *const *names, const char *name) {
    while (*names && strcmp(*names, name) != 0) names++;
    return *names != NULL;
}

// Refuses a member that is on none of the lists, unless it is null. Also refuses a member
// with a wrong value. names: the model's own members that are read or change nothing.
// values: the members that must have one value. Both lists end with NULL.
static inline bool config_check_keys(const cJSON *root, const char *const *names,
                                     const char *const (*values)[2], const char *path,
                                     Error *err) {
    const cJSON *item;
    cJSON_ArrayForEach(item, root) {
        bool known = config_listed(CONFIG_HARMLESS, item->string) ||
                     config_listed(names, item->string);
        for (int list = 0; list < 2; list++) {
            const char *const(*v)[2] = list ? values : CONFIG_VALUES;
            while ((*v)[0] && strcmp((*v)[0], item->string) != 0) v++;
            if (!(*v)[0]) continue;
            if (!config_is(root, item->string, (*v)[1], path, err)) return false;
            known = true;
        }
        if (!known && !cJSON_IsNull(item))
            return error_set(err,
                             "%s: \"%s\" is not supported: if it changes nothing in the "
                             "model, take it out",
                             path, item->string);
    }
    return config_agree(root, "dtype", root, "torch_dtype", path, err);
}

// GPT-2's own members: the newer names of sizes, dropout, which --dropout has here, and
// heads for other tasks.
static const char *const GPT2_NAMES[] = {
    "attn_pdrop", "embd_pdrop", "hidden_size", "max_position_embeddings", "n_ctx", "n_embd",
    "n_head", "n_inner", "n_layer", "n_positions", "n_special", "num_attention_heads",
    "num_hidden_layers", "predict_special_tokens", "reorder_and_upcast_attn", "resid_pdrop",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", NULL};

static const char *const GPT2_VALUES[][2] = {
    {"activation_function", "\"gelu_new\"|\"gelu_pytorch_tanh\""},
    {"layer_norm_epsilon", "1e-05"},
    {"scale_attn_by_inverse_layer_idx", "false"},
    {"scale_attn_weights", "true"},
    {"tie_word_embeddings", "true"},
    {NULL, NULL}};

// Reads a config.json with GPT-2's names, that "model_type", and `more` members, which the
// caller reads (NULL at the end). Returns it, or NULL with an error message that names the
// first member that we do not compute. The caller frees it with cJSON_Delete. Sizes have
// limits no lower than the flags' limits. They keep every product of sizes far from 2^63.
static inline cJSON *config_read_kind(const char *path, const char *type,
                                      const char *const *more, GPTConfig *g, Error *err) {
    cJSON *root = json_read(path, CONFIG_MAX_FILE, err);
    const char *found =
        cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(root, "model_type"));
    const char *names[64];
    size_t count = 0;
    char inner[40] = "";
    for (const char *const *list = GPT2_NAMES; *list; list++) names[count++] = *list;
    while (*more) names[count++] = *more++;
    names[count] = NULL;
    bool ok =
        root &&
        ((found && strcmp(found, type) == 0) ||
         error_set(err,
                   "%s: \"model_type\" is not \"%s\", the only one that can be loaded here",
                   path, type)) &&
        config_size(root, "n_embd", 1 << 17, &g->C, path, err) &&
        config_size(root, "n_layer", 5000, &g->L, path, err) &&
        config_size(root, "n_head", 1 << 17, &g->NH, path, err) &&
        config_size(root, "vocab_size", 1 << 24, &g->V, path, err) &&
        config_size(root, "n_positions", 1 << 24, &g->maxT, path, err) &&
        (g->C % g->NH == 0 ||
         error_set(err, "%s: n_head %zu does not divide n_embd %zu", path, g->NH, g->C));
    if (ok) snprintf(inner, sizeof inner, "%zu|null", 4 * g->C);
    ok = ok && config_is(root, "n_inner", inner, path, err) &&
         config_agree(root, "n_embd", root, "hidden_size", path, err) &&
         config_agree(root, "n_layer", root, "num_hidden_layers", path, err) &&
         config_agree(root, "n_head", root, "num_attention_heads", path, err) &&
         config_agree(root, "n_positions", root, "n_ctx", path, err) &&
         config_agree(root, "n_positions", root, "max_position_embeddings", path, err) &&
         config_check_keys(root, names, GPT2_VALUES, path, err);
    if (ok) {
        g->Vp = padded_vocabulary(g->V);
        return root;
    }
    cJSON_Delete(root);
    return NULL;
}

// Reads config.json of our own folders or Hugging Face's, of that kind of model (NULL:
// GPT-2).
static inline bool config_read(const char *dir, const ModelSpec *spec, GPTConfig *config,
                               Error *err) {
    char path[PATH_MAX];
    config->spec = spec;
    if (!path_print(path, err, "%s/config.json", dir)) return false;
    if (spec && spec->read) return spec->read(path, config, err);
    static const char *const none[] = {NULL};
    cJSON *root = config_read_kind(path, "gpt2", none, config, err);
    bool ok = root != NULL;
    cJSON_Delete(root);
    return ok;
}

// Writes GPT-2's config.json. members: JSON that names the kind of model.
static inline bool config_write_kind(const char *path, const GPTConfig *g, bool bf16,
                                     const char *members, Error *err) {
    char text[2048], end_of_text[24] = "null";
    // In both vocabularies that we prepare data for, <|endoftext|> is the last token.
    if (g->V == 257 || g->V == 50257)
        snprintf(end_of_text, sizeof end_of_text, "%zu", g->V - 1);
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

static inline bool config_write(const char *path, const GPTConfig *g, bool bf16,
                                Error *err) {
    static const char gpt2[] =
        "  \"architectures\": [\"GPT2LMHeadModel\"],\n  \"model_type\": \"gpt2\",\n";
    if (config_spec(g)->write) return config_spec(g)->write(path, g, bf16, err);
    return config_write_kind(path, g, bf16, gpt2, err);
}

// Writes a config.json again. source: the text of the config.json that the model was read
// from; NULL: writes as config_write does. Keeps the source's members, except those that a
// run changes: the type of the weights, the class that gives their names, and the experts'
// capacity.
static inline bool config_write_again(const char *path, const GPTConfig *g, bool bf16,
                                      const char *source, Error *err) {
    if (!config_write(path, g, bf16, err)) return false;
    if (!source) return true;
    size_t bytes;
    const char *end, *value;
    char *own = file_read(path, CONFIG_MAX_FILE, &bytes, err), member[128];
    char *text = host_string(source);
    if (!own) return free(text), false;
    bool newer = json_member(text, "dtype", &end) != NULL;
    bool older = json_member(text, "torch_dtype", &end) != NULL;
    const char *const set[][2] = {
        // a member of the source, and the one of ours that says it
        {"architectures", "architectures"},
        {newer ? "dtype" : "torch_dtype", "torch_dtype"},
        {older || !newer ? "torch_dtype" : "dtype", "torch_dtype"},
        {"capacity_factor", "capacity_factor"},  // of experts: a run may change it
    };
    for (size_t i = 0; i < sizeof set / sizeof *set; i++) {
        if (!(value = json_member(own, set[i][1], &end))) continue;
        snprintf(member, sizeof member, "%.*s", (int)(end - value), value);
        text = json_set_member(text, set[i][0], member);
    }
    bool ok = file_write_text(path, text, err);
    free(own);
    free(text);
    return ok;
}

#endif
