// files.h: fuzz targets: the binary and JSON files that a trainer reads.
//
// defines: fuzz_promise, fuzz_file, fuzz_shards, fuzz_log, fuzz_eval, fuzz_safetensors,
//          fuzz_index, fuzz_tokenizer, fuzz_tokenizer_keys
#ifndef DEV_FUZZ_FILES_H
#define DEV_FUZZ_FILES_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sys/mman.h>

#include "llmc/host/checkpoint_list.h"
#include "llmc/host/dataloader.h"
#include "llmc/host/eval_file.h"
#include "llmc/host/log.h"
#include "llmc/host/tokenizer_kinds.h"

static void fuzz_promise(bool kept) {
    if (!kept) abort();
}

// Makes a file in memory with these bytes, and its path. close() it.
static int fuzz_file(const uint8_t *data, size_t size, char path[40]) {
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0 || !file_write_at(fd, data, size, 0)) exit(1);
    snprintf(path, 40, "/proc/self/fd/%d", fd);
    return fd;
}

// Opens a shard for sequences of 1 to 16 tokens. The file may lose its end while it is read.
static void fuzz_shards(const uint8_t *data, size_t size) {
    char path[40];
    Error err;
    DataLoader dl;
    int sample[17];
    if (size < 2) return;
    size_t T = 1 + data[0] % 16, V = 1 + (size_t)data[1] * data[1];
    int fd = fuzz_file(data + 2, size - 2, path);
    if (dataloader_open(&dl, path, T, 1, &err)) {
        if (data[0] & 64 && ftruncate(fd, (off_t)(size / 2)) != 0) exit(1);
        for (uint64_t n = 0; n < 3 * dl.samples && n < 200; n++) {
            if (!dataloader_read(&dl, n, data[0] & 128, 7, V, sample, &err)) continue;
            for (size_t i = 0; i <= T; i++) fuzz_promise(sample[i] >= 0 && (size_t)sample[i] < V);
        }
        dataloader_close(&dl);
    }
    close(fd);
}

static bool fuzz_is_eval(const char *line) {
    const char *found = strstr(line, LOG_EVAL);
    return found && found < line + strcspn(line, "\n");
}

// Continues a log: it keeps the beginning, up to the run's first step, and lines of --eval. A
// file that is no log is left alone.
static void fuzz_log(const uint8_t *data, size_t size) {
    char path[40];
    Error err;
    Log log;
    struct stat info;
    if (size < 1) return;
    size_t done = 1 + data[0] % 7;
    int fd = fuzz_file(data + 1, size - 1, path);
    bool is_log = log_open(&log, path, done, 10, 1, 0, &err);
    fuzz_promise(fstat(fd, &info) == 0);
    size_t left = (size_t)info.st_size;
    char *kept = (char *)host_alloc(left + 1, 1);
    fuzz_promise(left <= size - 1 && file_read_at(fd, kept, left, 0));
    size_t same = 0, end;
    while (same < left && kept[same] == (char)data[1 + same]) same++;
    fuzz_promise(is_log || same == left);
    for (end = same; same < left && end > 0 && kept[end - 1] != '\n';) end--;
    for (char *line = kept + end; line < kept + left; line = (char *)rawmemchr(line, '\n') + 1)
        fuzz_promise(fuzz_is_eval(line));
    fuzz_promise(is_log ? size == 1 || data[1] == '{' : left == size - 1);
    for (char *line = kept; is_log && *line; line += strcspn(line, "\n") + 1) {
        fuzz_promise(strncmp(line, "{\"step\":", 8) == 0);
        fuzz_promise(strtoull(line + 8, NULL, 10) <= done || fuzz_is_eval(line));
        if (!strchr(line, '\n') || strlen(line) + (size_t)(line - kept) < left)
            break;  // a 0 byte hides the rest
    }
    if (is_log) fuzz_promise(log_close(&log, &err));
    free(kept);
    close(fd);
}

// Reads a file of --eval, for a model with V tokens and sequences of T.
static void fuzz_eval(const uint8_t *data, size_t size) {
    char path[40];
    Error err;
    EvalFile e;
    if (size < 2) return;
    size_t V = 1 + (size_t)data[0] * data[0], T = 1 + data[1] % 64;
    int fd = fuzz_file(data + 2, size - 2, path);
    if (eval_open(&e, path, V, T, &err)) {
        fuzz_promise(e.rows > 0 && e.count <= size);
        for (size_t i = 0; i < e.rows; i++) {
            const EvalRow *x = &e.row[i];
            fuzz_promise(x->first > 0 && x->count > 0 && x->first + x->count <= x->tokens &&
                         x->tokens <= T + 1);
            fuzz_promise(x->at + x->tokens <= e.count &&
                         x->right == (e.kind == EVAL_CHOICES && (x->right || !i)));
            for (size_t k = 0; k < x->tokens; k++) fuzz_promise(eval_word_at(&e, x->at + k) < V);
        }
        eval_close(&e);
    }
    close(fd);
}

// Reads the header of a safetensors file, its tensors, and a tiny model's tensors by slices.
static void fuzz_safetensors(const uint8_t *data, size_t size) {
    char path[40];
    float values[512];
    Error err;
    SafeTensors st;
    int fd = fuzz_file(data, size, path);
    if (st_open(&st, path, O_RDONLY, &err)) {
        for (size_t i = 0; i < st.count && i < 50; i++) {
            const STEntry *x = &st.entries[i];
            fuzz_promise(x->begin + x->count * ST_TYPES[x->dtype].width <= size &&
                         st_find(&st, x->name) != NULL);
            size_t count = x->count < 512 ? x->count : 512;
            if (x->dtype >= ST_OTHER) continue;
            st_read_floats(&st, x, 0, count, values, &err);
            st_read_floats(&st, x, x->count - count, count, values, &err);
        }
        GPTConfig tiny = {1, 4, 2, 5, 128, 3, NULL};
        bool *used = (bool *)host_alloc(st.count, sizeof(bool));
        for (size_t id = 0; id < count_tensors(&tiny); id++) {
            Tensor x = tensor_describe(&tiny, id, 1, 0);
            const STEntry *entry = slices_find(&st, &x, STATE_WEIGHTS, &err);
            if (entry) st_read_floats(&st, entry, 0, entry->count, values, &err);
            if (entry) used[entry - st.entries] = true;
        }
        slices_check_rest(&st, used, &tiny, &err);
        free(used);
        st_close(&st);
    }
    close(fd);
}

// Reads the index of weights in several files: two sound ones of two tensors each, "900" and
// "901", and "902", whose bytes stand behind the first 0 byte. The folder is this process's open
// files.
static void fuzz_index(const uint8_t *data, size_t size) {
    static bool made = false;
    char path[40], other[40];
    float values[64];
    Error err;
    SafeTensors st;
    for (int i = 0; i < 2 && !made; i++) {
        char text[180] = "";
        uint64_t length = 144;  // 20 bytes of data follow
        snprintf(text + 8, sizeof text - 8,
                 ST_START
                 ",\"%c\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,12]},"
                 "\"%c\":{\"dtype\":\"BF16\",\"shape\":[2,2],\"data_offsets\":[12,20]}}",
                 i ? 'c' : 'a', i ? 'd' : 'b');
        memcpy(text, &length, sizeof length);
        int fd = fuzz_file((uint8_t *)text, 8 + length + 20, path);
        if (dup2(fd, 900 + i) < 0) exit(1);
        close(fd);
    }
    made = true;
    const uint8_t *zero = size ? (const uint8_t *)memchr(data, 0, size) : NULL;
    size_t length = zero ? (size_t)(zero - data) : size;
    int fd = fuzz_file(data, length, path);
    int part = fuzz_file(zero ? zero + 1 : data, zero ? size - length - 1 : 0, other);
    if (dup2(part, 902) < 0) exit(1);
    close(part);
    memset(&st, 0, sizeof st);
    st.path = host_string(path);
    cJSON *root = json_read(path, ST_MAX_HEADER, &err);
    bool sound = root &&
                 st_add_listed(&st, cJSON_GetObjectItemCaseSensitive(root, "weight_map"), &err);
    cJSON_Delete(root);
    for (size_t i = 0; i < st.count && sound; i++) {
        const STEntry *x = &st.entries[i];
        fuzz_promise(x->file < st.file_count && st_find(&st, x->name) != NULL);
        size_t count = x->count < 64 ? x->count : 64;
        fuzz_promise(x->dtype >= ST_OTHER || st_read_floats(&st, x, 0, count, values, &err));
    }
    st_close(&st);
    close(fd);
}

// Encodes a prompt with an open tokenizer: it has no more tokens than bytes, each of them known.
// Frees the tokenizer.
static void fuzz_prompt(Tokenizer *tk, const uint8_t *text, size_t bytes) {
    Error err;
    int *tokens = (int *)host_alloc(bytes + 1, sizeof(int));
    char *prompt = (char *)host_alloc(bytes + 1, 1);
    if (bytes) memcpy(prompt, text, bytes);
    size_t count = tokenizer_encode(tk, prompt, bytes, tokens), read = 0, got;
    if (count == TOKENIZER_FAILED) count = 0;
    fuzz_promise(count <= bytes);
    for (size_t i = 0; i < count; i++) {
        fuzz_promise(tokens[i] >= 0 && (size_t)tokens[i] < tk->numbers);
        const char *part = tokenizer_decode(tk, tokens[i], &got);
        fuzz_promise(part != NULL && tk->text[tokens[i]].bytes != NULL);
        for (size_t j = 0; j < got; j++) read += (unsigned char)part[j];
    }
    fuzz_promise(read <= 255 * bytes * 1024);
    free(tokens);
    tokenizer_prompt(tk, prompt, TOKENIZER_MAX_ID, &tokens, &count, &err);
    free(prompt);
    free(tokens);
    tokenizer_free(tk);
}

// Reads a tokenizer.json and, behind its last 0 byte, a prompt.
static void fuzz_tokenizer(const uint8_t *data, size_t size) {
    char path[40];
    Error err;
    Tokenizer tk;
    const uint8_t *zero = size ? (const uint8_t *)memrchr(data, 0, size) : NULL;
    size_t file_size = zero ? (size_t)(zero - data) : size, bytes = zero ? size - file_size - 1 : 0;
    int fd = fuzz_file(data, file_size, path);
    if (tokenizer_open(&tk, path, &err)) fuzz_prompt(&tk, zero + 1, bytes);
    close(fd);
}

// Returns the object of a sound tokenizer.json that such keys stand in. second: the other one of
// two.
static cJSON *fuzz_key_object(cJSON *root, const char *name, bool second) {
    cJSON *object = strcmp(name, "tokenizer") == 0 ? root : cJSON_GetObjectItem(root, name);
    cJSON *list = cJSON_IsArray(object) ? object : cJSON_GetObjectItem(object, "pretokenizers");
    if (!list) list = cJSON_GetObjectItem(object, "processors");
    cJSON *item = cJSON_GetArrayItem(list, second);
    return item ? item : object;
}

// Keys of a sound tokenizer.json get other values, and one each that no format has. Two bytes are
// a key and its value, which is one of a list, or text up to the next 0 byte. A key of 255 ends
// them, and the prompt follows.
static void fuzz_tokenizer_keys(const uint8_t *data, size_t size) {
    static const char base[] =
        "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[{\"id\":4,"
        "\"content\":"
        "\"<|endoftext|>\",\"special\":true},{\"id\":5,\"content\":\"ba\",\"lstrip\":false}],"
        "\"normalizer\":null,"
        "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\","
        "\"pattern\":{\"Regex\":"
        "\"\\\\p{L}+| "
        "\"},\"behavior\":\"Isolated\",\"invert\":false},{\"type\":\"ByteLevel\",\"add_prefix_"
        "space\":"
        "false,\"use_regex\":false}]},\"post_processor\":{\"type\":\"Sequence\",\"processors\":[{"
        "\"type\":"
        "\"ByteLevel\"},{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":"
        "\"s\"}},{\"Sequence\":"
        "{\"id\":\"A\"}}],\"special_tokens\":{\"s\":{\"ids\":[4]}}}]},\"decoder\":{\"type\":"
        "\"ByteLevel\"},\"model\":"
        "{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"\\u0120\":3,\"<|endoftext|>\":4}"
        ",\"merges\":"
        "[\"a b\"]}}";
    static const char *const values[] = {
        "null",
        "true",
        "false",
        "0",
        "1",
        "4",
        "\"\"",
        "\"ab\"",
        "\"NFC\"",
        "\"ByteLevel\"",
        "\"Sequence\"",
        "\"Digits\"",
        "\"Split\"",
        "\"TemplateProcessing\"",
        "\"BPE\"",
        "\"Isolated\"",
        "\"1.0\"",
        "[]",
        "{}",
        "[[\"a\",\"b\"]]",
        "{\"type\":\"NFC\"}",
        "{\"type\":\"ByteLevel\"}",
        "{\"Regex\":\"(?:a|b)+?\"}",
        "[{\"Sequence\":{\"id\":\"A\"}}]",
        "{\"s\":{\"ids\":[0,1,2]}}",
        "\"a\\u00e9\"",
        "\" \"",
        "5",
        "6",
        "{\"a\":0,\"b\":1,\" \":5}",
    };
    enum { VALUES = sizeof values / sizeof values[0] };
    char path[40];
    Error err;
    Tokenizer tk;
    Options o;
    size_t at = 0;
    cJSON *root = cJSON_Parse(base);
    while (at + 2 <= size && data[at] != 255) {
        size_t row = data[at] % (TOKENIZER_KEY_COUNT + 1), which = data[at + 1] % (VALUES + 2);
        bool second = data[at] >= 128, known = row < TOKENIZER_KEY_COUNT;
        const TokenizerKey *key = &TOKENIZER_KEYS[known ? row : data[at + 1] % TOKENIZER_KEY_COUNT];
        const char *name = known ? key->key : "another";
        cJSON *object = fuzz_key_object(root, key->object, second), *value;
        at += 2;
        if (which < VALUES) {
            value = cJSON_Parse(values[which]);
        } else {
            char *text = strndup((const char *)data + at, size - at);
            at += strlen(text) + (at + strlen(text) < size);
            value = cJSON_CreateString(text);
            if (which == VALUES) {  // a pattern, whatever the key
                cJSON *pattern = cJSON_CreateObject();
                cJSON_AddItemToObject(pattern, "Regex", value);
                value = pattern;
                name = "pattern";
                object = fuzz_key_object(root, "pre_tokenizer", false);
            }
            free(text);
        }
        if (!cJSON_IsObject(object)) {
            cJSON_Delete(value);
            continue;
        }
        cJSON_DeleteItemFromObjectCaseSensitive(object, name);
        cJSON_AddItemToObject(object, name, value);
    }
    size_t begin = at + 1 < size ? at + 1 : size;
    char *json = cJSON_PrintUnformatted(root);
    cJSON_Delete(root);
    int fd = fuzz_file((const uint8_t *)json, strlen(json), path);
    memset(&o, 0, sizeof o);
    o.tokenizer = path;
    if (tokenizer_open_kind(&tk, &o, &err)) fuzz_prompt(&tk, data + begin, size - begin);
    if (tokenizer_open(&tk, path, &err)) fuzz_prompt(&tk, data + begin, size - begin);
    free(json);
    close(fd);
}

#endif
