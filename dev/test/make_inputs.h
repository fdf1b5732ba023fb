// make_inputs.h: makes inputs for trainers: token shards, model folders (sound, or damaged in one
// place) and small models with random weights. They are made without the code that a trainer
// writes and draws with.
#ifndef LLMC_MAKE_INPUTS_H
#define LLMC_MAKE_INPUTS_H

#include "dev/test/run_program.h"
#include "llmc/reference.h"
#include "llmc/host/safetensors.h"

// Writes a tokenizer.json whose tokens are the blank, the signs and the letters of ASCII,
// numbered by their codes.
static inline void write_letters(const char *path) {
    char text[2048];
    size_t n =
        (size_t)sprintf(text,
                        "{\"pre_tokenizer\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\","
                        "\"vocab\":{\"\\u0120\":32");
    for (int c = 33; c < 127; c++) {
        n += (size_t)sprintf(text + n, ",\"%s%c\":%d", strchr("\"\\", c) ? "\\" : "", c, c);
    }
    sprintf(text + n, "},\"merges\":[]}}");
    write_text(path, text);
}

// Writes a shard: 256 int32 (magic, version, count), then tokens, uint16 in version 1, else
// uint32.
static inline void write_shard(const char *path, int magic, int version, int stated,
                               const int *tokens, size_t count) {
    size_t width = version == 1 ? 2 : 4, bytes = 1024 + width * count;
    char *data = allocate(bytes);
    int32_t header[3] = {magic, version, stated};
    memcpy(data, header, sizeof header);
    for (size_t i = 0; i < count; i++) {
        memcpy(data + 1024 + width * i, &tokens[i], width);  // little-endian
    }
    write_file(path, data, bytes);
    free(data);
}

// Returns the tokens of a shard.
static inline int *read_shard(const char *path, size_t *count) {
    size_t bytes = 0;
    char *data = read_file(path, &bytes);
    if (!data) die("cannot read", path);
    *count = (bytes - 1024) / 2;
    int *tokens = allocate(*count * sizeof(int));
    for (size_t i = 0; i < *count; i++) {
        uint16_t token;
        memcpy(&token, data + 1024 + 2 * i, 2);
        tokens[i] = token;
    }
    free(data);
    return tokens;
}

// A fault of a model folder. Kinds "config" and "header" (of model.safetensors) replace the
// first `from` of that text by `to`. Kind "cut" ends the file after `number` bytes.
typedef struct {
    const char *kind, *from, *to;
    uint64_t number;
} Damage;

static const Damage INTACT = {"", "", "", 0};

static inline char *damaged(char *text, Damage damage) {
    char *out = replaced(text, damage.from, damage.to);
    free(text);
    return out;
}

// Returns the upper half of a float, or its F16. Both must hold the number exactly.
static inline uint16_t half_of(float value, bool f16) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (!f16 || value == 0) return (uint16_t)(bits >> 16);
    return (uint16_t)((bits >> 16 & 0x8000) | ((bits >> 23 & 255) - 112) << 10 |
                      (bits >> 13 & 1023));
}

// Writes tensors [first, end) of the table to a safetensors file of the folder, as F32, BF16 or
// F16.
static inline void write_tensors(const char *folder, const char *name, const ParamTable *table,
                                 const double *params, size_t first, size_t end,
                                 const char *dtype, Damage damage) {
    char shape[64], *header = (char *)allocate(256 * (end - first + 1));
    size_t data = 0, used = 0, bytes = strcmp(dtype, "F32") == 0 ? 4 : 2;
    for (size_t i = first; i < end; i++) {
        const Tensor *x = &table->tensors[i];
        size_t begin = data;
        data += x->rows * x->cols * bytes;
        if (x->spec->rows != '1') snprintf(shape, sizeof shape, "%zu,%zu", x->rows, x->cols);
        else snprintf(shape, sizeof shape, "%zu", x->cols);
        used += (size_t)sprintf(
            header + used,
            "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
            i > first ? "," : "{", x->name, dtype, shape, begin, data);
    }
    sprintf(header + used, "}");
    if (strcmp(damage.kind, "header") == 0) header = damaged(header, damage);
    uint64_t length = strlen(header);
    size_t total = 8 + length + data, at = 8 + length;
    char *file = allocate(total);
    memcpy(file + 8, header, length);
    for (size_t i = first; i < end; i++) {
        const Tensor *x = &table->tensors[i];
        for (size_t k = 0; k < x->rows * x->cols; k++, at += bytes) {
            float value = (float)params[x->offset + k];
            uint16_t half = half_of(value, strcmp(dtype, "F16") == 0);
            memcpy(file + at, bytes == 4 ? (const void *)&value : (const void *)&half, bytes);
        }
    }
    if (strcmp(damage.kind, "cut") == 0) total = damage.number;
    memcpy(file, &length, 8);
    write_file(in(folder, name), file, total);
    free(header);
    free(file);
}

// Writes a Hugging Face folder: config.json from `config`, which it frees, and
// model.safetensors (F32).
static inline void write_folder(const char *folder, char *config, const ParamTable *table,
                                const double *params, Damage damage) {
    if (strcmp(damage.kind, "config") == 0) config = damaged(config, damage);
    mkdir(folder, 0777);
    write_text(in(folder, "config.json"), config);
    write_tensors(folder, "model.safetensors", table, params, 0, table->count, "F32", damage);
    free(config);
}

// Writes a folder of GPT-2.
static inline void write_model(const char *folder, const ParamTable *table, const double *params,
                               Damage damage) {
    const GPTConfig *g = &table->config;
    char *config = (char *)allocate(1024);
    snprintf(config, 1024,
             "{\"model_type\": \"gpt2\", \"architectures\": [\"GPT2LMHeadModel\"], "
             "\"n_layer\": %zu, \"n_head\": %zu, \"n_embd\": %zu, \"n_positions\": %zu, "
             "\"n_ctx\": %zu, "
             "\"vocab_size\": %zu, \"activation_function\": \"gelu_new\", "
             "\"layer_norm_epsilon\": 1e-05, "
             "\"tie_word_embeddings\": true}\n",
             g->L, g->NH, g->C, g->maxT, g->maxT, g->V);
    write_folder(folder, config, table, params, damage);
}

// Reads every tensor of the table, by its name and a suffix, from a safetensors file into its
// place in flat. Leaves the padding as it is. Prints the reason and returns false if a tensor
// cannot be read.
static inline bool read_tensors(const char *path, const char *suffix, const ParamTable *table,
                                double *flat) {
    SafeTensors file;
    Error err;
    if (!st_open(&file, path, O_RDONLY, &err)) {
        printf("     %s\n", err.text);
        return false;
    }
    bool ok = true;
    for (size_t i = 0; i < table->count && ok; i++) {
        const Tensor *x = &table->tensors[i];
        char name[sizeof x->name + 16];
        snprintf(name, sizeof name, "%s%s", x->name, suffix);
        const STEntry *entry = st_find(&file, name);
        size_t count = x->rows * x->cols;
        float *values = allocate(count * sizeof(float));
        ok = entry && st_read_floats(&file, entry, 0, count, values, &err);
        if (!entry) printf("     %s has no %s\n", path, name);
        else if (!ok) printf("     %s\n", err.text);
        for (size_t k = 0; k < count && ok; k++) flat[x->offset + k] = values[k];
        free(values);
    }
    st_close(&file);
    return ok;
}

// Returns a number in [-1, 1) from a small generator of the tests' own.
static inline double noise(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) / 4503599627370496.0 - 1.0;
}

// Makes every parameter matter: uniform in [-scale, scale), norms' weights around 1, all fp32.
static inline void random_params(Reference *ref, double scale, uint64_t *seed) {
    for (size_t i = 0; i < ref->table.count; i++) {
        const Tensor *x = &ref->table.tensors[i];
        for (size_t k = 0; k < x->rows * x->cols; k++) {
            ref->params[x->offset + k] = (float)((x->spec->init == INIT_ONE) + scale * noise(seed));
        }
    }
}

static inline Reference random_model(size_t L, size_t C, size_t NH, size_t V, size_t maxT,
                                     double scale, uint64_t seed) {
    GPTConfig config = {L, C, NH, V, padded_vocabulary(V), maxT, NULL};
    Reference ref = reference_create(&config);
    random_params(&ref, scale, &seed);
    return ref;
}

static inline int *random_tokens(size_t count, size_t V, uint64_t seed) {
    int *tokens = allocate(count * sizeof(int));
    for (size_t i = 0; i < count; i++) tokens[i] = (int)((noise(&seed) + 1.0) / 2.0 * (double)V);
    return tokens;
}

#endif
