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

// GPT-2's words in text that was cut before and behind every digit.
#define DIGIT_WORD "\\p{N}|'(?:[stmd]|re|ve|ll)| ?\\p{L}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?![^\\s\\p{N}])|\\s+"

// What NFC may change: marks, which it composes and reorders, and all characters of which it knows a better form, with
// some neighbours that it leaves alone.
#define NFC_CHANGES "[\\p{M}\\x{374}\\x{37e}\\x{387}\\x{958}-\\x{95f}\\x{9dc}-\\x{9df}\\x{a33}-\\x{a5e}" \
                    "\\x{b5c}\\x{b5d}" \
                    "\\x{f43}-\\x{f69}\\x{1161}-\\x{11c2}\\x{1f71}-\\x{1ffd}\\x{2000}\\x{2001}\\x{2126}\\x{212a}" \
                    "\\x{212b}\\x{2329}\\x{232a}\\x{2adc}\\x{f900}-\\x{fad9}\\x{fb1d}-\\x{fb4e}\\x{1d15e}-\\x{1d1c0}" \
                    "\\x{2f800}-\\x{2fa1d}]"

// Finds the pattern of words in "pre_tokenizer": a list of Split by a regular expression or Digits, then ByteLevel.
// NULL with a sentence: another.
static inline const char *kind_pattern(const cJSON *splitter, const char *path, Error *err) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(splitter, "pretokenizers");
    const cJSON *first = splitter, *last = splitter;
    if (cJSON_IsArray(list) && cJSON_GetArraySize(list) == 2) first = list->child, last = first->next;
    const cJSON *regex = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(first, "pattern"), "Regex");
    const char *kind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(first, "type"));
    const char *behind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(last, "type"));
    const char *isolated = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(first, "behavior"));
    bool again = !cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(last, "use_regex"));  // GPT-2's pattern, on the pieces
    if (!kind || !behind || strcmp(behind, "ByteLevel") != 0 || !json_is_off(last, "add_prefix_space")) {
        error_set(err, "%s: \"pre_tokenizer\" does not end with a ByteLevel without add_prefix_space", path);
        return NULL;
    }
    if (first == last && again) return BPE_WORD;
    if (strcmp(kind, "Digits") == 0 && again && !json_is_off(first, "individual_digits")) return DIGIT_WORD;
    if (strcmp(kind, "Split") == 0 && !again && json_is_off(first, "invert") && isolated &&
        strcmp(isolated, "Isolated") == 0 && cJSON_IsString(regex)) return regex->valuestring;
    error_set(err, "%s: \"pre_tokenizer\" %.40s is not supported: a Split by a regular expression into Isolated words, "
              "or Digits one by one, then ByteLevel, are", path, kind);
    return NULL;
}

// Refuses a prompt that NFC may change: we would find other tokens.
static inline bool kind_check_prompt(const char *prompt, const char *path, Error *err) {
    pcre2_code *code = tokenizer_compile(NFC_CHANGES, path, err);
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    bool same = code && match && pcre2_match(code, (PCRE2_SPTR)prompt, strlen(prompt), 0, 0, match, NULL) ==
                                     PCRE2_ERROR_NOMATCH;
    pcre2_match_data_free(match);
    pcre2_code_free(code);
    return same || error_set(err, "NFC, the normalizer of %s, may change a character of --prompt: write another", path);
}

// Reads a tokenizer.json of these kinds into *tk, which is cleared: as GPT-2's, but for the words.
static inline bool kind_read(Tokenizer *tk, const cJSON *root, const Options *o, Error *err) {
    const char *path = o->tokenizer;
    const cJSON *normalizer = cJSON_GetObjectItemCaseSensitive(root, "normalizer");
    const char *normal = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(normalizer, "type"));
    if (!json_is_off(root, "normalizer") && (!normal || strcmp(normal, "NFC") != 0))
        return error_set(err, "%s: \"normalizer\" %.40s is not supported: only NFC is", path, normal ? normal : "?");
    const char *pattern = kind_pattern(cJSON_GetObjectItemCaseSensitive(root, "pre_tokenizer"), path, err);
    return pattern && (!normal || !o->sample_every || !o->prompt || kind_check_prompt(o->prompt, path, err)) &&
           tokenizer_read(tk, root, pattern, path, err);
}

// tokenizer_open for GPT-2's kind and these.
static inline bool tokenizer_open_kind(Tokenizer *tk, const Options *o, Error *err) {
    if (!o->tokenizer) return tokenizer_open(tk, NULL, err);
    memset(tk, 0, sizeof *tk);
    cJSON *root = json_read(o->tokenizer, TOKENIZER_MAX_FILE, err);
    bool ok = root && kind_read(tk, root, o, err);
    cJSON_Delete(root);
    if (!ok) tokenizer_free(tk);
    return ok;
}

#endif
