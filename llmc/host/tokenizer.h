// tokenizer.h: text to tokens and back: bytes (256 of them and <|endoftext|>), or the byte-level BPE of a
// Hugging Face tokenizer.json such as GPT-2's.
//
// defines: Tokenizer, tokenizer_open, tokenizer_encode, tokenizer_decode, tokenizer_prompt, tokenizer_print,
//          tokenizer_free
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "llmc/host/tokenizer_json.h"

// The length of the first word of text[bytes], bytes > 0, as GPT-2 splits: a contraction ('s, 't, 're, 've,
// 'm, 'll, 'd); else letters, digits or other signs, each with at most one space in front; else white space,
// of which the last character is left to the next word.
static inline size_t tokenizer_word(const char *text, size_t bytes) {
    static const char *const contractions[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    for (int i = 0; i < 7; i++) {
        size_t n = strlen(contractions[i]);
        if (n <= bytes && memcmp(text, contractions[i], n) == 0) return n;
    }
    size_t used, last = 0, at = text[0] == ' ' && bytes > 1 ? 1 : 0;
    UnicodeClass wanted = unicode_class(utf8_decode(text + at, bytes - at, &used));
    if (wanted == CLASS_SPACE) at = 0;
    while (at < bytes && unicode_class(utf8_decode(text + at, bytes - at, &used)) == wanted) {
        last = at;
        at += used;
    }
    return wanted == CLASS_SPACE && at < bytes && last > 0 ? last : at;
}

// Merges the bytes' tokens of one word. Quadratic in its length, which is a few bytes in ordinary text.
static inline size_t tokenizer_encode_word(const Tokenizer *tk, const char *word, size_t bytes, int *tokens) {
    size_t n = 0;
    for (size_t i = 0; i < bytes; i++) {
        int token = tk->of_byte[(unsigned char)word[i]];
        if (token >= 0) tokens[n++] = token;  // a vocabulary without this byte cannot say it
    }
    for (;;) {
        const TokenMerge *best = NULL;
        size_t place = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            const TokenMerge *merge = merge_slot(tk, tokens[i], tokens[i + 1]);
            if (merge->left != -1 && (!best || merge->rank < best->rank)) {
                best = merge;
                place = i;
            }
        }
        if (!best) return n;
        tokens[place] = best->merged;
        memmove(tokens + place + 1, tokens + place + 2, (--n - place - 1) * sizeof(int));
    }
}

// The added token that text[bytes] starts with (the longest of them), or -1.
static inline int tokenizer_added_at(const Tokenizer *tk, const char *text, size_t bytes) {
    int found = -1;
    for (size_t i = 0; i < tk->added_count; i++) {
        const TokenText *x = &tk->text[tk->added[i]];
        bool longer = found < 0 || x->count > tk->text[found].count;
        if (longer && x->count <= bytes && memcmp(x->bytes, text, x->count) == 0) found = tk->added[i];
    }
    return found;
}

// Writes the tokens of text[bytes] to tokens[bytes] (never more are needed) and returns how many there are.
static inline size_t tokenizer_encode(const Tokenizer *tk, const char *text, size_t bytes, int *tokens) {
    size_t n = 0;
    for (size_t i = 0; i < bytes;) {
        size_t end = i;
        int added = -1;
        while (end < bytes && (added = tokenizer_added_at(tk, text + end, bytes - end)) < 0) end++;
        while (i < end) {
            size_t length = tokenizer_word(text + i, end - i);
            n += tokenizer_encode_word(tk, text + i, length, tokens + n);
            i += length;
        }
        if (added >= 0) {
            tokens[n++] = added;
            i += tk->text[added].count;
        }
    }
    return n;
}

// The bytes that a token stands for, *bytes of them and no NUL; none for a number that is no token.
static inline const char *tokenizer_decode(const Tokenizer *tk, int token, size_t *bytes) {
    *bytes = 0;
    if (token < 0 || (size_t)token >= tk->V || !tk->text[token].count) return "";
    *bytes = tk->text[token].count;
    return tk->text[token].bytes;
}

// Prints a token. Control characters, of which an untrained model makes plenty, must not reach a terminal.
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
    if (!prompt || !prompt[0]) {
        if (tk->end_of_text < 0) {
            return error_set(err, "the tokenizer has no " END_OF_TEXT ": give a --prompt");
        }
        prompt = END_OF_TEXT;
    }
    size_t bytes = strlen(prompt);
    *tokens = (int *)malloc((bytes + extra + 1) * sizeof(int));
    if (!*tokens) return error_set(err, "out of host memory");
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

#endif
