// tokenizer.h: opens a tokenizer: bytes (256 of them and <|endoftext|>), or the byte-level BPE of a Hugging Face
// tokenizer.json such as GPT-2's; prompts and samples.
//
// defines: tokenizer_open, tokenizer_prompt, tokenizer_check_prompt, tokenizer_print, and what bpe.h defines
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "llmc/host/bpe.h"
#include "llmc/host/json.h"

enum { TOKENIZER_MAX_FILE = 128 << 20, TOKENIZER_MAX_ID = 1 << 22 };

#define END_OF_TEXT "<|endoftext|>"

// ---------------------------------------------------------------------------------------------------------------------
// How the vocabulary is written: each byte as a printable character, those of Latin-1 as themselves, the other 68 as
// U+0100 onwards

static inline unsigned byte_to_character(unsigned byte) {
    if ((byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173)) return byte;
    return byte <= 32 ? 256 + byte : byte <= 160 ? 256 + 33 + (byte - 127) : 256 + 67;
}

// -1: the character of no byte.
static inline int character_to_byte(unsigned c) {
    if (c < 256) return byte_to_character(c) == c ? (int)c : -1;
    for (unsigned byte = 0; byte < 256; byte++) {
        if (byte_to_character(byte) == c) return (int)byte;
    }
    return -1;
}

// The character of a byte in UTF-8 and a NUL; returns its length.
static inline size_t byte_to_utf8(unsigned byte, char out[3]) {
    unsigned c = byte_to_character(byte);
    size_t n = c < 128 ? 1 : 2;
    out[0] = (char)(n == 1 ? c : 0xc0 | c >> 6);
    out[1] = (char)(n == 1 ? 0 : 0x80 | (c & 0x3f));
    out[2] = '\0';
    return n;
}

// Turns a name of the vocabulary into bytes; one that has other characters stands for itself.
static inline size_t name_to_bytes(const char *name, char *out) {
    size_t n = 0;
    for (const unsigned char *s = (const unsigned char *)name; *s; s++) {
        unsigned c = *s;
        if (c >= 0xc2 && c < 0xe0 && (s[1] & 0xc0) == 0x80) c = (c & 0x1f) << 6 | (*++s & 0x3f);
        else if (c >= 128) c = 0xfffd;
        int byte = character_to_byte(c);
        if (byte < 0) {
            n = strlen(name);
            memcpy(out, name, n);
            return n;
        }
        out[n++] = (char)byte;
    }
    return n;
}

typedef struct {
    const char *name;
    int token;
} TokenName;

// The vocabulary while it is read.
typedef struct {
    const char *path;
    TokenName *names;  // [count] sorted; they point into the JSON tree
    size_t count, longest;
} TokenNames;

static inline int name_compare(const void *a, const void *b) {
    return strcmp(((const TokenName *)a)->name, ((const TokenName *)b)->name);
}

// The token of that name, or -1.
static inline int name_find(const TokenNames *v, const char *name) {
    TokenName key = {name, 0};
    const TokenName *found = (const TokenName *)bsearch(&key, v->names, v->count, sizeof key, name_compare);
    return found ? found->token : -1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading tokenizer.json

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
    static const char *const off[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
                                      "ignore_merges", "add_prefix_space", "normalizer"};
    for (int i = 0; i < 7; i++) {
        const cJSON *holder = i < 5 ? model : i == 5 ? splitter : root;
        if (!json_is_off(holder, off[i])) return error_set(err, "%s: \"%s\" is not supported", path, off[i]);
    }
    return true;
}

static inline void tokenizer_allocate(Tokenizer *tk, size_t pool, size_t added) {
    tk->text = (TokenText *)host_alloc(tk->V, sizeof(TokenText));
    tk->pool = (char *)host_alloc(pool, 1);
    tk->added = (int *)host_alloc(added, sizeof(int));
}

// Makes `content`, which is copied to `bytes`, an added token; returns its length.
static inline size_t tokenizer_add(Tokenizer *tk, int token, char *bytes, const char *content) {
    TokenText text = {bytes, strlen(content)};
    memcpy(bytes, content, text.count);
    tk->text[token] = text;
    tk->added[tk->added_count++] = token;
    if (strcmp(content, END_OF_TEXT) == 0) tk->end_of_text = token;
    return text.count;
}

// Takes a token's number and raises V above it.
static inline bool tokenizer_read_number(Tokenizer *tk, const cJSON *item, int *token) {
    uint64_t n;
    if (!item || !json_whole(item, &n) || n >= TOKENIZER_MAX_ID) return false;
    if (n >= tk->V) tk->V = (size_t)n + 1;
    *token = (int)n;
    return true;
}

// Reads the vocabulary {"name": number, ...} and the numbers of the added tokens; *pool: bytes of all their texts.
static inline bool tokenizer_read_names(Tokenizer *tk, TokenNames *v, const cJSON *vocab, const cJSON *added,
                                        size_t *pool, Error *err) {
    const cJSON *item, *id, *content;
    v->names = (TokenName *)host_alloc((size_t)cJSON_GetArraySize(vocab), sizeof(TokenName));
    cJSON_ArrayForEach(item, vocab) {
        TokenName *x = &v->names[v->count++];
        x->name = item->string;
        if (!tokenizer_read_number(tk, item, &x->token)) {
            return error_set(err, "%s: a token has an absurd number", v->path);
        }
        size_t n = strlen(x->name);
        if (n > v->longest) v->longest = n;
        *pool += n;
    }
    cJSON_ArrayForEach(item, added) {
        int token;
        if (!json_get(item, "id", &id, v->path, err) || !json_get(item, "content", &content, v->path, err)) {
            return false;
        }
        if (!cJSON_IsString(content) || !tokenizer_read_number(tk, id, &token)) {
            return error_set(err, "%s: an added token lacks a sound id and content", v->path);
        }
        *pool += strlen(content->valuestring);
    }
    qsort(v->names, v->count, sizeof(TokenName), name_compare);
    for (size_t i = 1; i < v->count; i++) {
        const TokenName *x = &v->names[i - 1], *y = &v->names[i];
        if (name_compare(x, y) == 0) {
            return error_set(err, "%s gives the tokens %d and %d the same text", v->path, x->token, y->token);
        }
    }
    return true;
}

// Reads ["a b", ...] or [["a", "b"], ...], lowest rank first.
static inline bool tokenizer_read_merges(Tokenizer *tk, const TokenNames *v, const cJSON *merges, Error *err) {
    const cJSON *item;
    char *both = (char *)host_alloc(v->longest + 1, 1);
    bool ok = true;
    tk->merges = (TokenMerge *)host_alloc((size_t)cJSON_GetArraySize(merges), sizeof(TokenMerge));
    cJSON_ArrayForEach(item, merges) {
        const char *left = NULL, *right = NULL;
        char *space = cJSON_IsString(item) ? strchr(item->valuestring, ' ') : NULL;
        if (space) {
            *space = '\0';
            left = item->valuestring;
            right = space + 1;
        } else if (cJSON_IsArray(item) && cJSON_GetArraySize(item) == 2) {
            left = cJSON_GetStringValue(item->child);
            right = cJSON_GetStringValue(item->child->next);
        }
        TokenMerge merge = {-1, -1, -1, (int)tk->merge_count};
        ok = (left && right) || error_set(err, "%s: merge %d is no pair of tokens", v->path, merge.rank);
        if (!ok) break;
        merge.left = name_find(v, left);
        merge.right = name_find(v, right);
        if (strlen(left) + strlen(right) <= v->longest) {
            strcat(strcpy(both, left), right);
            merge.merged = name_find(v, both);
        }
        ok = (merge.left >= 0 && merge.right >= 0 && merge.merged >= 0) ||
             error_set(err, "%s: merge %d is not of tokens in the vocabulary", v->path, merge.rank);
        if (!ok) break;
        tk->merges[tk->merge_count++] = merge;
    }
    free(both);
    qsort(tk->merges, tk->merge_count, sizeof(TokenMerge), merge_compare);
    for (size_t i = 1; i < tk->merge_count && ok; i++) {
        const TokenMerge *x = &tk->merges[i];
        ok = merge_compare(x - 1, x) != 0 ||
             error_set(err, "%s gives the merge of the tokens %d and %d twice", v->path, x->left, x->right);
    }
    return ok;
}

static inline bool tokenizer_read(Tokenizer *tk, TokenNames *v, const cJSON *root, Error *err) {
    const cJSON *model, *vocab, *merges, *added, *item;
    if (!json_get(root, "model", &model, v->path, err) || !json_get(root, "added_tokens", &added, v->path, err) ||
        !tokenizer_check_kind(root, model, v->path, err) || !json_get(model, "vocab", &vocab, v->path, err) ||
        !json_get(model, "merges", &merges, v->path, err)) {
        return false;
    }
    if (!cJSON_IsObject(vocab) || !cJSON_IsArray(merges) || (added && !cJSON_IsArray(added))) {
        return error_set(err, "%s: vocab, merges or added_tokens is missing or malformed", v->path);
    }
    size_t pool = 0;
    if (!tokenizer_read_names(tk, v, vocab, added, &pool, err)) return false;
    if (!tokenizer_read_merges(tk, v, merges, err)) return false;
    if (tk->V == 0) return error_set(err, "%s has no tokens", v->path);
    tokenizer_allocate(tk, pool, (size_t)cJSON_GetArraySize(added));
    pool = 0;
    for (size_t i = 0; i < v->count; i++) {
        TokenText *text = &tk->text[v->names[i].token];
        if (text->bytes) return error_set(err, "%s gives the token %d twice", v->path, v->names[i].token);
        text->bytes = tk->pool + pool;
        text->count = name_to_bytes(v->names[i].name, tk->pool + pool);
        pool += text->count;
    }
    for (unsigned byte = 0; byte < 256; byte++) {
        char character[3];
        byte_to_utf8(byte, character);
        tk->of_byte[byte] = name_find(v, character);
    }
    cJSON_ArrayForEach(item, added) {
        const char *content = cJSON_GetObjectItemCaseSensitive(item, "content")->valuestring;
        int token = (int)cJSON_GetObjectItemCaseSensitive(item, "id")->valuedouble;
        if (content[0]) pool += tokenizer_add(tk, token, tk->pool + pool, content);
    }
    int failure;
    size_t place;
    tk->words = pcre2_compile((PCRE2_SPTR)BPE_WORD, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_ANCHORED, &failure, &place,
                              NULL);
    return tk->words || error_set(err, "cannot split text into words: PCRE2's error %d (it needs Unicode)", failure);
}

static inline void tokenizer_make_bytes(Tokenizer *tk) {
    tk->V = 257;
    tokenizer_allocate(tk, 256 + sizeof END_OF_TEXT, 1);
    for (int byte = 0; byte < 256; byte++) {
        tk->of_byte[byte] = byte;
        tk->pool[byte] = (char)byte;
        tk->text[byte].bytes = &tk->pool[byte];
        tk->text[byte].count = 1;
    }
    tokenizer_add(tk, 256, tk->pool + 256, END_OF_TEXT);
}

// path: a tokenizer.json; NULL: the byte tokenizer. On failure nothing is left to free.
static inline bool tokenizer_open(Tokenizer *tk, const char *path, Error *err) {
    memset(tk, 0, sizeof *tk);
    tk->end_of_text = -1;
    if (!path) {
        tokenizer_make_bytes(tk);
        return true;
    }
    TokenNames names = {path, NULL, 0, 0};
    cJSON *root = json_read(path, TOKENIZER_MAX_FILE, err);
    bool ok = root && tokenizer_read(tk, &names, root, err);
    cJSON_Delete(root);
    free(names.names);
    if (!ok) tokenizer_free(tk);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// Prompts and samples

// Prints a token, but no control characters, of which an untrained model makes plenty: terminals obey them.
static inline void tokenizer_print(const Tokenizer *tk, int token) {
    size_t bytes;
    const char *text = tokenizer_decode(tk, token, &bytes);
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        putchar((c < 32 && c != '\n' && c != '\t') || c == 127 ? '?' : c);
    }
}

// The tokens of a prompt, with room for `extra` more behind them: free(*tokens). No prompt, or an empty one,
// is <|endoftext|>. Every token must be below the model's vocabulary V.
static inline bool tokenizer_prompt(const Tokenizer *tk, const char *prompt, size_t extra, size_t V,
                                    int **tokens, size_t *count, Error *err) {
    *tokens = NULL;
    if (!prompt || !prompt[0]) {
        if (tk->end_of_text < 0) {
            return error_set(err, "the tokenizer has no " END_OF_TEXT ": give a --prompt");
        }
        prompt = END_OF_TEXT;
    }
    size_t bytes = strlen(prompt);
    *tokens = (int *)host_alloc(bytes + extra + 1, sizeof(int));
    *count = tokenizer_encode(tk, prompt, bytes, *tokens);
    bool ok = *count > 0 || error_set(err, "the tokenizer has no token for this --prompt");
    for (size_t i = 0; i < *count && ok; i++) {
        if ((size_t)(*tokens)[i] >= V) {
            ok = error_set(err, "the prompt has token %d, but the model's vocabulary has %zu: give the "
                           "--tokenizer that the data was made with, or set --sample-every 0", (*tokens)[i], V);
        }
    }
    if (!ok) free(*tokens);
    return ok;
}

// Can a sample start with this prompt? For the check before any work.
static inline bool tokenizer_check_prompt(const Tokenizer *tk, const char *prompt, size_t V, Error *err) {
    int *tokens;
    size_t count;
    if (!tokenizer_prompt(tk, prompt, 0, V, &tokens, &count, err)) return false;
    free(tokens);
    return true;
}

#endif
