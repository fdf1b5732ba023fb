// tokenizer_kinds.h: the tokenizer.json of Llama 3, Qwen2 and SmolLM2.
// lesson: llama
//
// They are byte-level BPE that splits text into words in other ways than GPT-2, takes a word that is a token as it is
// (ignore_merges), or composes characters first (NFC).
//
// defines: tokenizer_open_kind
#ifndef LLMC_TOKENIZER_KINDS_H
#define LLMC_TOKENIZER_KINDS_H

#include "llmc/host/options_table.h"
#include "llmc/host/tokenizer.h"

enum { WORD_PATTERN = 4096 };  // bytes of a regular expression

// GPT-2's words in text that was cut before and behind every digit.
#define DIGIT_WORD "\\p{N}|'(?:[stmd]|re|ve|ll)| ?\\p{L}+| ?[^" BPE_SPACE "\\p{L}\\p{N}]+|" \
                   "[" BPE_SPACE "]+(?![^" BPE_SPACE "\\p{N}])|[" BPE_SPACE "]+"

// What NFC may change: marks, which it composes and reorders, and all characters of which it knows a better form, with
// some neighbours that it leaves alone.
#define NFC_CHANGES "[\\p{M}\\x{374}\\x{37e}\\x{387}\\x{958}-\\x{95f}\\x{9dc}-\\x{9df}\\x{a33}-\\x{a5e}" \
                    "\\x{b5c}\\x{b5d}" \
                    "\\x{f43}-\\x{f69}\\x{1161}-\\x{11c2}\\x{1f71}-\\x{1ffd}\\x{2000}\\x{2001}\\x{2126}\\x{212a}" \
                    "\\x{212b}\\x{2329}\\x{232a}\\x{2adc}\\x{f900}-\\x{fad9}\\x{fb1d}-\\x{fb4e}\\x{1d15e}-\\x{1d1c0}" \
                    "\\x{2f800}-\\x{2fa1d}]"

// The tokens of a vocabulary, sorted by their bytes.
typedef struct {
    TokenText text;
    int token;
} TokenWord;
typedef struct {
    size_t count;
    TokenWord *words;  // [count] behind this struct, then their bytes
} TokenWords;

static inline int word_compare(const void *a, const void *b) {
    const TokenText *x = &((const TokenWord *)a)->text, *y = &((const TokenWord *)b)->text;
    int order = memcmp(x->bytes, y->bytes, x->count < y->count ? x->count : y->count);
    return order ? order : (x->count > y->count) - (x->count < y->count);
}

// Returns the token of a whole word, or -1.
static inline int word_find(const Tokenizer *tk, const char *word, size_t bytes) {
    const TokenWords *all = (const TokenWords *)tk->whole_words;
    TokenWord key = {{(char *)word, bytes}, 0};
    const TokenWord *found = (const TokenWord *)bsearch(&key, all->words, all->count, sizeof key, word_compare);
    return found ? found->token : -1;
}

// Lists the words. A name has as many bytes as its token, or more.
static inline TokenWords *words_list(const cJSON *vocab) {
    size_t count = 0, bytes = 0;
    for (const cJSON *item = vocab->child; item; item = item->next) count++, bytes += strlen(item->string);
    TokenWords *all = (TokenWords *)host_alloc(sizeof(TokenWords) + count * sizeof(TokenWord) + bytes, 1);
    all->words = (TokenWord *)(all + 1);
    char *at = (char *)(all->words + count);
    for (const cJSON *item = vocab->child; item; item = item->next) {
        TokenWord word = {{at, name_to_bytes(item->string, at)}, item->valueint};
        all->words[all->count++] = word;
        at += word.text.count;
    }
    qsort(all->words, count, sizeof(TokenWord), word_compare);
    return all;
}

// Copies a pattern of Hugging Face's. Its \s and \S are Unicode's White_Space, which PCRE2 has in other words. False if
// there is no room.
static inline bool pattern_translate(char out[WORD_PATTERN], const char *from) {
    size_t n = 0;
    bool set = false;  // within [...]
    for (; *from && n + 40 < WORD_PATTERN; from++) {
        if (*from == '\\' && (from[1] == 's' || (from[1] == 'S' && !set))) {
            const char *form = set ? "%s" : from[1] == 's' ? "[%s]" : "[^%s]";
            n += (size_t)snprintf(out + n, 40, form, BPE_SPACE);
            from++;
            continue;
        }
        if (*from == '[' || *from == ']') set = *from == '[';
        out[n++] = *from;
        if (*from == '\\' && from[1]) out[n++] = *++from;
    }
    out[n] = '\0';
    return !*from;
}

// Finds the pattern of words in "pre_tokenizer": a list of Split by a regular expression or Digits, then ByteLevel.
static inline bool kind_pattern(char pattern[WORD_PATTERN], const cJSON *splitter, const char *path, Error *err) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(splitter, "pretokenizers");
    const cJSON *first = splitter, *last = splitter;
    if (cJSON_IsArray(list) && cJSON_GetArraySize(list) == 2) first = list->child, last = first->next;
    const cJSON *regex = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(first, "pattern"), "Regex");
    const char *kind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(first, "type"));
    const char *behind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(last, "type"));
    const char *isolated = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(first, "behavior"));
    bool again = !cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(last, "use_regex"));  // GPT-2's pattern, on the pieces
    if (!kind || !behind || strcmp(behind, "ByteLevel") != 0 || !json_is_off(last, "add_prefix_space"))
        return error_set(err, "%s: \"pre_tokenizer\" does not end with a ByteLevel without add_prefix_space", path);
    if (first == last && again) return pattern_translate(pattern, BPE_WORD);
    if (strcmp(kind, "Digits") == 0 && again && !json_is_off(first, "individual_digits"))
        return pattern_translate(pattern, DIGIT_WORD);
    if (strcmp(kind, "Split") == 0 && !again && cJSON_IsString(regex) && json_is_off(first, "invert") && isolated &&
        strcmp(isolated, "Isolated") == 0 && pattern_translate(pattern, regex->valuestring)) return true;
    return error_set(err, "%s: \"pre_tokenizer\" %.40s is not supported: a Split by a regular expression into Isolated "
                     "words, or Digits one by one, then ByteLevel, are", path, kind);
}

static inline pcre2_code *kind_compile(const char *pattern, uint32_t flags, const char *path, Error *err) {
    int failure;
    size_t at;
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, strlen(pattern), PCRE2_UTF | flags, &failure, &at, NULL);
    if (!code) error_set(err, "%s: PCRE2 cannot split text by \"%.60s\" (its error %d)", path, pattern, failure);
    return code;
}

// Refuses a prompt that NFC may change: we would find other tokens.
static inline bool kind_check_prompt(const char *prompt, const char *path, Error *err) {
    pcre2_code *code = kind_compile(NFC_CHANGES, 0, path, err);
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    bool same = code && match && pcre2_match(code, (PCRE2_SPTR)prompt, strlen(prompt), 0, 0, match, NULL) ==
                                     PCRE2_ERROR_NOMATCH;
    pcre2_match_data_free(match);
    pcre2_code_free(code);
    return same || error_set(err, "NFC, the normalizer of %s, may change a character of --prompt: write another", path);
}

// Refuses tokenizers whose tokens we would get wrong, by the name of what is other.
static inline bool kind_check(const cJSON *root, const cJSON *model, const char *path, Error *err) {
    static const char *const OFF[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix"};
    const cJSON *splitter = cJSON_GetObjectItemCaseSensitive(root, "pre_tokenizer");
    const cJSON *normalizer = cJSON_GetObjectItemCaseSensitive(root, "normalizer");
    const char *type = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(model, "type"));
    const char *splits = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(splitter, "type"));
    const char *normal = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(normalizer, "type"));
    if ((type && strcmp(type, "Unigram") == 0) || !json_is_off(model, "byte_fallback") ||
        (splits && strcmp(splits, "Metaspace") == 0))
        return error_set(err, "%s is a tokenizer of sentencepiece, which is not supported: only byte-level BPE is",
                         path);
    if (!cJSON_IsObject(model) || (type ? strcmp(type, "BPE") != 0 : !json_is_off(model, "type")))
        return error_set(err, "%s is no byte-level BPE: its \"model\" is of type %.40s", path, type ? type : "?");
    for (int i = 0; i < 3; i++) {
        if (!json_is_off(model, OFF[i])) return error_set(err, "%s: \"%s\" is not supported", path, OFF[i]);
    }
    return json_is_off(root, "normalizer") || (normal && strcmp(normal, "NFC") == 0) ||
           error_set(err, "%s: \"normalizer\" %.40s is not supported: only NFC is", path, normal ? normal : "?");
}

// Reads a tokenizer.json of these kinds into *tk, which is cleared: as GPT-2's, but for the words.
static inline bool kind_read(Tokenizer *tk, cJSON *root, const Options *o, Error *err) {
    const char *path = o->tokenizer;
    cJSON *model = cJSON_GetObjectItemCaseSensitive(root, "model");
    char pattern[WORD_PATTERN];
    if (!kind_check(root, model, path, err) ||
        !kind_pattern(pattern, cJSON_GetObjectItemCaseSensitive(root, "pre_tokenizer"), path, err) ||
        (!json_is_off(root, "normalizer") && o->sample_every && o->prompt &&
         !kind_check_prompt(o->prompt, path, err))) return false;
    bool merges = json_is_off(model, "ignore_merges");
    cJSON_DeleteItemFromObjectCaseSensitive(root, "normalizer");
    cJSON_DeleteItemFromObjectCaseSensitive(root, "pre_tokenizer");
    cJSON_DeleteItemFromObjectCaseSensitive(model, "ignore_merges");
    cJSON_AddStringToObject(cJSON_AddObjectToObject(root, "pre_tokenizer"), "type", "ByteLevel");
    if (!tokenizer_read(tk, root, path, err)) return false;
    if (!merges) tk->whole = word_find, tk->whole_words = words_list(cJSON_GetObjectItemCaseSensitive(model, "vocab"));
    pcre2_code_free(tk->words);
    return (tk->words = kind_compile(pattern, PCRE2_ANCHORED, path, err)) != NULL;
}

// tokenizer_open for GPT-2's kind and these.
static inline bool tokenizer_open_kind(Tokenizer *tk, const Options *o, Error *err) {
    if (!o->tokenizer) return tokenizer_open(tk, NULL, err);
    memset(tk, 0, sizeof *tk);
    tk->text = (TokenText *)host_alloc(TOKENIZER_MAX_ID, sizeof(TokenText));
    cJSON *root = json_read(o->tokenizer, TOKENIZER_MAX_FILE, err);
    bool ok = root && kind_read(tk, root, o, err);
    cJSON_Delete(root);
    if (!ok) tokenizer_free(tk);
    return ok;
}

#endif
