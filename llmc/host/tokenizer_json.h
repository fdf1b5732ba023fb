// tokenizer_json.h: what a tokenizer holds, and how it is read from a Hugging Face tokenizer.json.
//
// defines: Tokenizer, tokenizer_open, tokenizer_free
#ifndef LLMC_TOKENIZER_JSON_H
#define LLMC_TOKENIZER_JSON_H

#include "llmc/host/json.h"
#include "llmc/host/unicode.h"

enum { TOKENIZER_MAX_FILE = 128 << 20, TOKENIZER_MAX_ID = 1 << 22 };

#define END_OF_TEXT "<|endoftext|>"

// Two neighbouring tokens that become one; of all that are possible, the one of the lowest rank goes first.
typedef struct {
    int left, right, merged;  // left is -1 in an empty slot
    int rank;
} TokenMerge;

typedef struct {
    const char *bytes;
    size_t count;
} TokenText;

typedef struct {
    size_t V;            // every token is below it
    TokenText *text;     // [V] what it stands for; count 0: no such token
    char *pool;          // the bytes of all texts
    int of_byte[256];    // the token of a byte alone, or -1
    TokenMerge *merges;  // [merge_slots] hash table, a power of two
    size_t merge_slots;
    int *added;          // [added_count] tokens that are found in the text before anything else
    size_t added_count;
    int end_of_text;     // -1: none
} Tokenizer;

static inline void tokenizer_free(Tokenizer *tk) {
    free(tk->text);
    free(tk->pool);
    free(tk->merges);
    free(tk->added);
    memset(tk, 0, sizeof *tk);
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading tokenizer.json

static inline size_t token_hash(const char *s, size_t n) {
    uint64_t h = 1469598103934665603u;
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)s[i]) * 1099511628211u;
    return (size_t)(h ^ h >> 32);
}

static inline size_t merge_hash(int left, int right) {
    uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15u;
    return (size_t)(h >> 29);
}

// The slot of the pair, or the empty one where it belongs.
static inline TokenMerge *merge_slot(const Tokenizer *tk, int left, int right) {
    size_t i = merge_hash(left, right) & (tk->merge_slots - 1);
    while (tk->merges[i].left != -1 && (tk->merges[i].left != left || tk->merges[i].right != right)) {
        i = (i + 1) & (tk->merge_slots - 1);
    }
    return &tk->merges[i];
}

static inline size_t hash_slots(size_t count) {
    size_t slots = 16;
    while (slots < 2 * count) slots *= 2;
    return slots;
}

// Byte-level BPE writes each byte as a printable character: the printable ones of Latin-1 as themselves, the
// other 68 as U+0100 onwards.
static inline unsigned byte_to_character(unsigned byte) {
    if ((byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173)) return byte;
    return byte <= 32 ? 256 + byte : byte <= 160 ? 256 + 33 + (byte - 127) : 256 + 67;
}

static inline int character_to_byte(unsigned c) {
    if (c < 256) return byte_to_character(c) == c ? (int)c : -1;
    if (c < 256 + 33) return (int)(c - 256);
    if (c < 256 + 67) return (int)(c - 256 - 33 + 127);
    return c == 256 + 67 ? 173 : -1;
}

// Turns the characters of a vocabulary entry into bytes; an entry with other characters stands for itself.
static inline TokenText token_bytes(const char *characters, char *out) {
    size_t length = strlen(characters), n = 0, used;
    for (size_t i = 0; i < length; i += used) {
        int byte = character_to_byte(utf8_decode(characters + i, length - i, &used));
        if (byte < 0) {
            memcpy(out, characters, length);
            TokenText raw = {out, length};
            return raw;
        }
        out[n++] = (char)byte;
    }
    TokenText text = {out, n};
    return text;
}

// What reading needs beside the tokenizer itself.
typedef struct {
    const char *path;
    const char **names;  // [V] a token's characters, in the JSON tree; NULL: no such token
    int *slots;          // [slot_count] hash table from characters to tokens; -1: empty
    size_t slot_count;
    char *scratch;       // room for the characters of two tokens
    size_t pool_used;
} TokenizerReader;

// The slot of those characters, or the empty one where they belong.
static inline int *token_slot(const TokenizerReader *r, const char *s, size_t n) {
    size_t i = token_hash(s, n) & (r->slot_count - 1);
    while (r->slots[i] != -1 && (strncmp(r->names[r->slots[i]], s, n) != 0 || r->names[r->slots[i]][n])) {
        i = (i + 1) & (r->slot_count - 1);
    }
    return &r->slots[i];
}

// Reads the vocabulary {"characters": id, ...} into names, slots and texts.
static inline bool tokenizer_read_vocab(Tokenizer *tk, TokenizerReader *r, const cJSON *vocab, Error *err) {
    const cJSON *item;
    cJSON_ArrayForEach(item, vocab) {
        int id = (int)item->valuedouble, *slot = token_slot(r, item->string, strlen(item->string));
        if (r->names[id]) return error_set(err, "%s gives the token %d twice", r->path, id);
        if (*slot != -1) {
            return error_set(err, "%s gives the tokens %d and %d the same text", r->path, *slot, id);
        }
        r->names[id] = item->string;
        *slot = id;
        tk->text[id] = token_bytes(item->string, tk->pool + r->pool_used);
        r->pool_used += strlen(item->string);
    }
    for (unsigned byte = 0; byte < 256; byte++) {
        char character[4];
        tk->of_byte[byte] = *token_slot(r, character, utf8_encode(byte_to_character(byte), character));
    }
    return true;
}

// Reads ["a b", ...] or [["a", "b"], ...], lowest rank first.
static inline bool tokenizer_read_merges(Tokenizer *tk, TokenizerReader *r, const cJSON *merges, Error *err) {
    const cJSON *item;
    int rank = 0;
    cJSON_ArrayForEach(item, merges) {
        const char *left = NULL, *right = NULL;
        size_t left_size = 0;
        if (cJSON_IsString(item) && (right = strchr(item->valuestring, ' '))) {
            left = item->valuestring;
            left_size = (size_t)(right++ - left);
        } else if (cJSON_IsArray(item) && cJSON_GetArraySize(item) == 2 && cJSON_IsString(item->child) &&
                   cJSON_IsString(item->child->next)) {
            left = item->child->valuestring;
            left_size = strlen(left);
            right = item->child->next->valuestring;
        }
        if (!left) return error_set(err, "%s: merge %d is no pair of tokens", r->path, rank);
        size_t right_size = strlen(right);
        int a = *token_slot(r, left, left_size), b = *token_slot(r, right, right_size), merged = -1;
        if (a != -1 && b != -1) {
            memcpy(r->scratch, left, left_size);
            memcpy(r->scratch + left_size, right, right_size);
            merged = *token_slot(r, r->scratch, left_size + right_size);
        }
        if (merged == -1) {
            return error_set(err, "%s: merge %d is not of tokens in the vocabulary", r->path, rank);
        }
        TokenMerge merge = {a, b, merged, rank++};
        *merge_slot(tk, a, b) = merge;
    }
    return true;
}

static inline bool tokenizer_read_added(Tokenizer *tk, TokenizerReader *r, const cJSON *added, Error *err) {
    const cJSON *item, *id, *content;
    cJSON_ArrayForEach(item, added) {
        if (!json_get(item, "id", &id, r->path, err)) return false;
        if (!json_get(item, "content", &content, r->path, err)) return false;
        int token = (int)id->valuedouble;
        size_t n = strlen(content->valuestring);
        if (n == 0) continue;
        tk->text[token].bytes = (const char *)memcpy(tk->pool + r->pool_used, content->valuestring, n);
        tk->text[token].count = n;
        r->pool_used += n;
        tk->added[tk->added_count++] = token;
        if (strcmp(content->valuestring, END_OF_TEXT) == 0) tk->end_of_text = token;
    }
    return true;
}

// Raises *V above the token's number; false if it is no number of a token.
static inline bool tokenizer_count_token(const cJSON *id, size_t *V) {
    uint64_t n;
    if (!id || !json_whole(id, &n) || n >= TOKENIZER_MAX_ID) return false;
    if (n >= *V) *V = (size_t)n + 1;
    return true;
}

// First pass: checks the tokens' numbers, and counts what has to be allocated.
static inline bool tokenizer_measure(Tokenizer *tk, const TokenizerReader *r, const cJSON *vocab,
                                     const cJSON *added, size_t *pool, size_t *longest, Error *err) {
    const cJSON *item, *id, *content;
    cJSON_ArrayForEach(item, vocab) {
        size_t n = strlen(item->string);
        if (!tokenizer_count_token(item, &tk->V)) {
            return error_set(err, "%s: a token has an absurd number", r->path);
        }
        if (n > *longest) *longest = n;
        *pool += n;
    }
    cJSON_ArrayForEach(item, added) {
        if (!json_get(item, "id", &id, r->path, err)) return false;
        if (!json_get(item, "content", &content, r->path, err)) return false;
        if (!tokenizer_count_token(id, &tk->V) || !cJSON_IsString(content)) {
            return error_set(err, "%s: an added token lacks a sound id and content", r->path);
        }
        *pool += strlen(content->valuestring);
    }
    return true;
}

// Is a member of this object missing, null, false, empty or 0?
static inline bool json_is_off(const cJSON *object, const char *key) {
    const cJSON *x = cJSON_GetObjectItemCaseSensitive(object, key);
    return !x || cJSON_IsNull(x) || cJSON_IsFalse(x) || (cJSON_IsString(x) && !x->valuestring[0]) ||
           (cJSON_IsNumber(x) && x->valuedouble == 0.0);
}

// Refuses the tokenizers whose tokens we would get wrong.
static inline bool tokenizer_check_kind(const cJSON *root, const cJSON *model, const char *path, Error *err) {
    const cJSON *splitter = cJSON_GetObjectItemCaseSensitive(root, "pre_tokenizer");
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(model, "type");
    const cJSON *split_type = cJSON_GetObjectItemCaseSensitive(splitter, "type");
    if (!cJSON_IsObject(model) ||
        (type && !(cJSON_IsString(type) && strcmp(type->valuestring, "BPE") == 0))) {
        return error_set(err, "%s: the model is not BPE", path);
    }
    if (!cJSON_IsString(split_type) || strcmp(split_type->valuestring, "ByteLevel") != 0 ||
        cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(splitter, "use_regex"))) {
        return error_set(err, "%s: only the pre-tokenizer ByteLevel, as GPT-2 has it, is supported", path);
    }
    static const char *const off[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix",
                                      "byte_fallback"};
    for (int i = 0; i < 4; i++) {
        if (!json_is_off(model, off[i])) return error_set(err, "%s: \"%s\" is not supported", path, off[i]);
    }
    if (!json_is_off(splitter, "add_prefix_space")) {
        return error_set(err, "%s: \"add_prefix_space\" is not supported", path);
    }
    return json_is_off(root, "normalizer") || error_set(err, "%s: a normalizer is not supported", path);
}

static inline bool tokenizer_read(Tokenizer *tk, TokenizerReader *r, const cJSON *root, Error *err) {
    const cJSON *model, *vocab, *merges, *added;
    if (!json_get(root, "model", &model, r->path, err) ||
        !json_get(root, "added_tokens", &added, r->path, err) ||
        !tokenizer_check_kind(root, model, r->path, err) || !json_get(model, "vocab", &vocab, r->path, err) ||
        !json_get(model, "merges", &merges, r->path, err)) {
        return false;
    }
    if (!cJSON_IsObject(vocab) || !cJSON_IsArray(merges) || (added && !cJSON_IsArray(added))) {
        return error_set(err, "%s: vocab, merges or added_tokens is missing or malformed", r->path);
    }
    size_t pool = 0, longest = 0, merge_count = (size_t)cJSON_GetArraySize(merges);
    if (!tokenizer_measure(tk, r, vocab, added, &pool, &longest, err)) return false;
    if (tk->V == 0) return error_set(err, "%s has no tokens", r->path);
    tk->merge_slots = hash_slots(merge_count);
    r->slot_count = hash_slots((size_t)cJSON_GetArraySize(vocab));
    tk->text = (TokenText *)calloc(tk->V, sizeof(TokenText));
    tk->pool = (char *)malloc(pool + 1);
    tk->merges = (TokenMerge *)malloc(tk->merge_slots * sizeof(TokenMerge));
    tk->added = (int *)malloc(((size_t)cJSON_GetArraySize(added) + 1) * sizeof(int));
    r->names = (const char **)calloc(tk->V, sizeof(char *));
    r->slots = (int *)malloc(r->slot_count * sizeof(int));
    r->scratch = (char *)malloc(2 * longest + 1);
    if (!tk->text || !tk->pool || !tk->merges || !tk->added || !r->names || !r->slots || !r->scratch) {
        return error_set(err, "cannot read %s: out of host memory", r->path);
    }
    for (size_t i = 0; i < r->slot_count; i++) r->slots[i] = -1;
    for (size_t i = 0; i < tk->merge_slots; i++) tk->merges[i].left = -1;
    return tokenizer_read_vocab(tk, r, vocab, err) && tokenizer_read_merges(tk, r, merges, err) &&
           tokenizer_read_added(tk, r, added, err);
}

static inline bool tokenizer_make_bytes(Tokenizer *tk, Error *err) {
    tk->V = 257;
    tk->merge_slots = 16;
    tk->text = (TokenText *)calloc(tk->V, sizeof(TokenText));
    tk->pool = (char *)malloc(256 + sizeof END_OF_TEXT);
    tk->merges = (TokenMerge *)malloc(tk->merge_slots * sizeof(TokenMerge));
    tk->added = (int *)malloc(sizeof(int));
    if (!tk->text || !tk->pool || !tk->merges || !tk->added) return error_set(err, "out of host memory");
    for (size_t i = 0; i < tk->merge_slots; i++) tk->merges[i].left = -1;
    for (int byte = 0; byte < 257; byte++) {
        tk->text[byte].bytes = tk->pool + byte;
        tk->text[byte].count = byte < 256 ? 1 : sizeof END_OF_TEXT - 1;
        if (byte == 256) break;
        tk->pool[byte] = (char)byte;
        tk->of_byte[byte] = byte;
    }
    memcpy(tk->pool + 256, END_OF_TEXT, sizeof END_OF_TEXT);
    tk->added[tk->added_count++] = tk->end_of_text = 256;
    return true;
}

// path: a tokenizer.json; NULL: the byte tokenizer. On failure nothing is left to free.
static inline bool tokenizer_open(Tokenizer *tk, const char *path, Error *err) {
    memset(tk, 0, sizeof *tk);
    tk->end_of_text = -1;
    bool ok;
    if (path) {
        TokenizerReader reader;
        memset(&reader, 0, sizeof reader);
        reader.path = path;
        cJSON *root = json_read(path, TOKENIZER_MAX_FILE, err);
        ok = root && tokenizer_read(tk, &reader, root, err);
        cJSON_Delete(root);
        free(reader.names);
        free(reader.slots);
        free(reader.scratch);
    } else {
        ok = tokenizer_make_bytes(tk, err);
    }
    if (!ok) tokenizer_free(tk);
    return ok;
}

#endif
