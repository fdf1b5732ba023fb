// tokenizer_kinds.h: the tokenizer.json of Llama 3, Qwen2 and SmolLM2.
// lesson: llama
//
// Their tokenizers are byte-level BPE. Unlike GPT-2's they split text into words by other
// patterns, take a word that is a token as it is (ignore_merges), or compose characters
// first (NFC).
//
// defines: tokenizer_open_kind
#ifndef LLMC_TOKENIZER_KINDS_H
#define LLMC_TOKENIZER_KINDS_H

#include "llmc/host/options_table.h"
#include "llmc/host/tokenizer_file.h"

// GPT-2's words in text that was cut before and behind every digit.
#define DIGIT_WORD                            \
    "\\p{N}|'(?:[stmd]|re|ve|ll)| ?\\p{L}+| " \
    "?[^\\s\\p{L}\\p{N}]+|\\s+(?![^\\s\\p{N}])|\\s+"

// The characters that NFC may change: marks, which it composes and reorders, and all
// characters with a canonical form, with some neighbours that it leaves alone.
#define NFC_CHANGES                                                                        \
    "[\\p{M}\\x{374}\\x{37e}\\x{387}\\x{958}-\\x{95f}\\x{9dc}-\\x{9df}\\x{a33}-\\x{a5e}"   \
    "\\x{b5c}\\x{b5d}"                                                                     \
    "\\x{f43}-\\x{f69}\\x{1161}-\\x{11c2}\\x{1f71}-\\x{1ffd}\\x{2000}\\x{2001}\\x{2126}"   \
    "\\x{212a}"                                                                            \
    "\\x{212b}\\x{2329}\\x{232a}\\x{2adc}\\x{f900}-\\x{fad9}\\x{fb1d}-\\x{fb4e}\\x{1d15e}" \
    "-\\x{1d1c0}"                                                                          \
    "\\x{2f800}-\\x{2fa1d}]"

// ----------------------------------------------------------------------------------------
// Patterns
//
// The package tokenizers uses Oniguruma, and we use PCRE2. Some syntax has the same form
// and another meaning:
//   \p{N}{1,3}+  It is possessive in PCRE2 and repeated in Oniguruma.
//   [a&&b]       It is an intersection in one of them.
//   $            It is the end of a line or of the text.
// Only syntax with the same meaning is let through: characters, \s \S \d \D \r \n \t,
// escaped signs, general categories like \p{Lu}, sets of these, groups, | and looks ahead.
// So are ? * + with a ? or a + behind them, {n,m} with neither, and the English endings of
// words in any case.

// Returns the length of an escape, or 0 for one that may differ. *single: it is one
// character.
static inline size_t pattern_escape(const char *p, bool *single) {
    char c = p[1];
    *single = c && strchr("rnt.[]{}()|*+?^$\\/-", c);
    if (*single || (c && strchr("sSdD", c))) return 2;
    if ((c != 'p' && c != 'P') || p[2] != '{' || p[3] < 'A' || p[3] > 'Z') return 0;
    size_t n = p[4] >= 'a' && p[4] <= 'z' ? 5 : 4;
    return p[n] == '}' ? n + 1 : 0;
}

// Returns the length of an item of a set, or 0. *single: it may be an end of a range.
static inline size_t pattern_item(const char *p, bool *single) {
    unsigned c;
    if (*p == '\\') return pattern_escape(p, single);
    *single = *p != '-';
    if (!*p || *p == '[' || *p == ']' || (*p == '&' && p[1] == '&') ||
        (*p == '-' && p[1] == '-'))
        return 0;
    return utf8_read(p, strlen(p), &c);
}

// Returns the length of a set, [...], or 0.
static inline size_t pattern_set(const char *p) {
    size_t at = p[1] == '^' ? 2 : 1, n;
    do {
        bool single, last;
        size_t first = at;
        n = pattern_item(p + at, &single);
        // A minus sign is itself at either end.
        if (n == 0 || (p[at] == '-' && p[first - 1] != '[' && p[first - 1] != '^' &&
                       p[at + 1] != ']'))
            return 0;
        at += n;
        if (p[at] != '-' || p[at + 1] == ']') continue;
        n = pattern_item(p + at + 1, &last);
        if (n == 0 || !single || !last) return 0;
        at += 1 + n;
    } while (p[at] != ']');
    return at + 1;
}

// Returns the length of {n}, {n,} or {n,m} without a sign behind it, or 0.
static inline size_t pattern_interval(const char *p) {
    size_t n = 1 + strspn(p + 1, "0123456789");
    if (n == 1) return 0;
    if (p[n] == ',') n += 1 + strspn(p + n + 1, "0123456789");
    return p[n] == '}' && p[n + 1] != '?' && p[n + 1] != '+' ? n + 1 : 0;
}

// Returns the length of a group's opening, or 0 if it may differ. If the group is the
// endings in any case, returns the length of the whole group. *opens: the group is still
// open. *look: it is a look ahead.
static inline size_t pattern_group(const char *p, bool *opens, bool *look) {
    static const char *const endings[] = {"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
                                          "(?i:[sdmt]|ll|ve|re)"};
    for (int i = 0; i < 2; i++) {
        size_t n = strlen(endings[i]);
        if (strncmp(p, endings[i], n) == 0) return n;
    }
    *opens = true;
    *look = strncmp(p, "(?!", 3) == 0 || strncmp(p, "(?=", 3) == 0;
    if (*look || strncmp(p, "(?:", 3) == 0) return 3;
    return p[1] != '?' && p[1] != '*';
}

// Returns the first place in the pattern that may differ, or NULL.
static inline const char *pattern_differs(const char *p) {
    bool repeatable = false;  // ? * + or {n,m} may follow
    uint64_t looks = 0;       // the open groups that are looks ahead, a bit each
    for (size_t n; *p; p += n) {
        unsigned c;
        bool single, opens = false, look = false, repeats = strchr("?*+{", *p) != NULL;
        if (repeats && !repeatable) return p;
        if (*p == '{')
            n = pattern_interval(p);
        else if (repeats)
            n = 1 + (p[1] == '?' || p[1] == '+');
        else if (*p == '(')
            n = pattern_group(p, &opens, &look);
        else if (*p == '[')
            n = pattern_set(p);
        else if (*p == '\\')
            n = pattern_escape(p, &single);
        else
            n = strchr("^$.]}", *p) ? 0 : utf8_read(p, strlen(p), &c);
        if (n == 0) return p;
        repeatable = !repeats && !opens && *p != '|' && !(*p == ')' && (looks & 1));
        if (opens) looks = looks << 1 | look;
        if (*p == ')') looks >>= 1;
    }
    return NULL;
}

// Checks the pattern of a Split. A pattern that matches nothing at all between two
// characters would cut there, which we do not.
static inline bool pattern_check(const char *pattern, const char *path, Error *err) {
    uint32_t empty = 0;
    const char *strange = pattern_differs(pattern);
    if (strange)
        return error_set(
            err,
            "%s: the \"pattern\" of \"pre_tokenizer\" may mean something else to "
            "PCRE2 than to the package tokenizers, from \"%.20s\" on",
            path, strange);
    pcre2_code *code = tokenizer_compile(pattern, path, err);
    if (code) pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &empty);
    pcre2_code_free(code);
    if (!empty) return code != NULL;
    return error_set(err, "%s: the \"pattern\" of \"pre_tokenizer\" matches an empty text",
                     path);
}

// ----------------------------------------------------------------------------------------
// Kinds

// Finds the pattern of words in "pre_tokenizer": a list of Split by a regular expression or
// Digits, then ByteLevel. NULL with an error message: another.
static inline const char *kind_pattern(const cJSON *splitter, const char *path,
                                       Error *err) {
    const cJSON *list = json_get(splitter, "pretokenizers"), *first = splitter;
    const cJSON *last = splitter;
    const char *type = json_text(splitter, "type");
    if (type && strcmp(type, "Sequence") == 0 && cJSON_IsArray(list) &&
        cJSON_GetArraySize(list) == 2) {
        first = list->child;
        last = first->next;
    }
    const cJSON *pattern = json_get(first, "pattern");
    const char *regex = json_text(pattern, "Regex");
    const char *kind = json_text(first, "type"), *behind = json_text(last, "type");
    const char *isolated = json_text(first, "behavior");
    // GPT-2's pattern, on the pieces.
    bool again = !cJSON_IsFalse(json_get(last, "use_regex"));
    if (!kind || !behind || strcmp(behind, "ByteLevel") != 0 ||
        !json_is_off(last, "add_prefix_space")) {
        error_set(err,
                  "%s: \"pre_tokenizer\" does not end with a ByteLevel without "
                  "add_prefix_space",
                  path);
        return NULL;
    }
    if (!keys_check(splitter, "pre_tokenizer", path, err) ||
        !keys_check(first, "pre_tokenizer", path, err) ||
        !keys_check(last, "pre_tokenizer", path, err))
        return NULL;
    if (first == last && again) return BPE_WORD;
    if (strcmp(kind, "Digits") == 0 && again &&
        cJSON_IsTrue(json_get(first, "individual_digits")))
        return DIGIT_WORD;
    if (strcmp(kind, "Split") == 0 && !again && isolated &&
        strcmp(isolated, "Isolated") == 0 && regex && cJSON_GetArraySize(pattern) == 1)
        return pattern_check(regex, path, err) ? regex : NULL;
    error_set(
        err,
        "%s: \"pre_tokenizer\" %.40s is not supported: a Split by a regular expression "
        "(\"Regex\" of its \"pattern\") with \"behavior\" Isolated, or Digits with "
        "\"individual_digits\", then ByteLevel, with \"use_regex\" only behind Digits",
        path, kind);
    return NULL;
}

// True if NFC may change the text. Then we would find other tokens.
static inline bool kind_changes(const char *text) {
    Error err;
    pcre2_code *code = tokenizer_compile(NFC_CHANGES, "NFC", &err);
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    int result = PCRE2_ERROR_NOMEMORY;
    if (code && match)
        result = pcre2_match(code, (PCRE2_SPTR)text, strlen(text), 0, 0, match, NULL);
    pcre2_match_data_free(match);
    pcre2_code_free(code);
    return result != PCRE2_ERROR_NOMATCH;
}

// Refuses a prompt, and added tokens that are looked for in normalized text, that NFC may
// change.
static inline bool kind_check_normal(const Tokenizer *tk, const Options *o, Error *err) {
    const char *path = o->tokenizer;
    if (o->sample_every && o->prompt && kind_changes(o->prompt))
        return error_set(
            err,
            "NFC, the normalizer of %s, may change a character of --prompt: write "
            "another",
            path);
    for (size_t i = tk->early; i < tk->added; i++) {
        const char *added = tk->tokens[tk->vocabulary + i].bytes;
        if (kind_changes(added))
            return error_set(err,
                             "%s: \"normalizer\" NFC may change the added token \"%.99s\"",
                             path, added);
    }
    return true;
}

// Reads a tokenizer.json of these kinds into *tk, which is cleared: as GPT-2's, but for the
// words.
static inline bool kind_read(Tokenizer *tk, const cJSON *root, const Options *o,
                             Error *err) {
    const char *path = o->tokenizer;
    const cJSON *normalizer = json_get(root, "normalizer");
    const char *normal = json_text(normalizer, "type");
    if (!json_is_off(root, "normalizer") && (!normal || strcmp(normal, "NFC") != 0))
        return error_set(err, "%s: \"normalizer\" %.40s is not supported: only NFC is",
                         path, normal ? normal : "?");
    if (!keys_check(normalizer, "normalizer", path, err)) return false;
    const char *pattern = kind_pattern(json_get(root, "pre_tokenizer"), path, err);
    return pattern && tokenizer_read(tk, root, pattern, path, err) &&
           (!normal || kind_check_normal(tk, o, err));
}

// Does tokenizer_open for GPT-2's kind and these.
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
