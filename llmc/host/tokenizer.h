// tokenizer.h: text to tokens and back, prompts and samples, with byte-level byte-pair
// encoding like GPT-2's (Radford et al. 2019, section 2.2). Text is split into words, and
// in each word the bytes' tokens are merged, pair by pair (Sennrich et al. 2016).
// tokenizer_file.h reads a tokenizer.
//
// defines: TOKENIZER_MAX_ID, END_OF_TEXT, Token, TokenMerge, Tokenizer, tokenizer_free,
//          utf8_read, token_find, tokenizer_added_at, TOKENIZER_FAILED, tokenizer_encode,
//          tokenizer_decode, tokenizer_print, tokenizer_prompt, SAMPLE_TEMPERATURE,
//          sample_token
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <math.h>

#include "llmc/host/error.h"
#include "llmc/host/memory.h"

enum { TOKENIZER_MAX_ID = 1 << 22 };
#define END_OF_TEXT "<|endoftext|>"

// Two neighbouring tokens that become one. Pairs of a lower rank are merged first.
typedef struct {
    int left, right, rank, merged;
} TokenMerge;

typedef struct {
    char *bytes;
    size_t count;
    int number;
    bool named;  // the vocabulary's name for it is no text in bytes: words do not have it
    bool late;   // an added token that is looked for behind the others, in what they leave
    // an added token that takes the white space before it, or behind it
    bool lstrip, rstrip;
} Token;

typedef struct {
    const char *path;  // of the file, for messages; NULL: a token is a byte
    Token *text;       // [numbers] by number; bytes NULL: no such token
    size_t numbers;    // above all tokens
    Token *tokens;     // [vocabulary] and behind them [added], each sorted; owns the bytes
    size_t vocabulary,
        added;     // added: looked for in the text before it is split into words
    size_t early;  // so many of the added are not late, and stand before those that are
    TokenMerge *merges;  // [merge_count] sorted by left and right
    size_t merge_count;
    pcre2_code *words;  // matches a word; NULL: the text is one word
    bool whole;         // a word of the vocabulary is its token, whatever merges make of it
    int unknown;        // the token of a byte that has none; -1: such a byte is left out
    bool fuse;          // such bytes in a row are one token
    int *first;         // [first_count] tokens that every prompt begins with
    size_t first_count;
} Tokenizer;

static inline void tokenizer_free(Tokenizer *tk) {
    for (size_t i = 0; i < tk->vocabulary + tk->added; i++) free(tk->tokens[i].bytes);
    free(tk->text);
    free(tk->tokens);
    free(tk->merges);
    free(tk->first);
    pcre2_code_free(tk->words);
    memset(tk, 0, sizeof *tk);
}

// Reads the UTF-8 character at the start of text[bytes] and returns its length. A byte that
// is none is U+0001.
static inline size_t utf8_read(const char *text, size_t bytes, unsigned *character) {
    // The least character of a length.
    static const unsigned least[] = {0, 0, 0x80, 0x800, 0x10000};
    unsigned c = (unsigned char)text[0];
    size_t length = c < 0x80   ? 1
                    : c < 0xc0 ? 0
                    : c < 0xe0 ? 2
                    : c < 0xf0 ? 3
                    : c < 0xf8 ? 4
                               : 0;
    bool valid = length > 0 && length <= bytes;
    if (length > 1) c &= 0x7fu >> length;
    for (size_t i = 1; i < length && valid; i++) {
        valid = ((unsigned char)text[i] & 0xc0) == 0x80;
        c = c << 6 | ((unsigned char)text[i] & 0x3f);
    }
    // Surrogates are no characters.
    valid = valid && c >= least[length] && c <= 0x10ffff && (c < 0xd800 || c >= 0xe000);
    *character = valid ? c : 1;
    return valid ? length : 1;
}

// ----------------------------------------------------------------------------------------
// Text to tokens and back

static inline int token_compare_bytes(const void *a, const void *b) {
    const Token *x = (const Token *)a, *y = (const Token *)b;
    int order = memcmp(x->bytes, y->bytes, x->count < y->count ? x->count : y->count);
    return order ? order : (x->count > y->count) - (x->count < y->count);
}

// Orders tokens. Tokens of text come before the ones that only have a name, and early added
// tokens before late ones. Tokens of one kind are ordered by their bytes.
static inline int token_compare(const void *a, const void *b) {
    const Token *x = (const Token *)a, *y = (const Token *)b;
    if (x->named != y->named) return x->named ? 1 : -1;
    if (x->late != y->late) return x->late ? 1 : -1;
    return token_compare_bytes(a, b);
}

// Returns the token of the vocabulary that has these bytes, or -1. named: the bytes are a
// name that is no text in bytes.
static inline int token_find(const Tokenizer *tk, const char *bytes, size_t count,
                             bool named) {
    Token key = {(char *)bytes, count, 0, named, false, false, false};
    const Token *found =
        (const Token *)bsearch(&key, tk->tokens, tk->vocabulary, sizeof key, token_compare);
    return found ? found->number : -1;
}

static inline int merge_compare(const void *a, const void *b) {
    const TokenMerge *x = (const TokenMerge *)a, *y = (const TokenMerge *)b;
    if (x->left != y->left) return x->left < y->left ? -1 : 1;
    return x->right < y->right ? -1 : x->right > y->right;
}

// Returns the merge of two neighbours, or NULL.
static inline const TokenMerge *merge_find(const Tokenizer *tk, int left, int right) {
    TokenMerge key = {left, right, 0, 0};
    if (tk->merge_count == 0) return NULL;
    return (const TokenMerge *)bsearch(&key, tk->merges, tk->merge_count, sizeof key,
                                       merge_compare);
}

// A merge of the token at a place of a word and the one behind it.
typedef struct {
    const TokenMerge *merge;
    size_t place;
} MergeHere;

// The memory beside the tokenizer that encoding a text of `bytes` bytes needs.
typedef struct {
    const Tokenizer *tk;
    char *valid;  // [bytes] valid UTF-8 for PCRE2
    pcre2_match_data *match;
    bool failed;            // PCRE2 gave up
    size_t *next, *before;  // [bytes] places of the neighbours of a word's token
    MergeHere *heap;        // [3 * bytes] merges of neighbours, the next one first
    size_t heap_count;
} Encoder;

// True if merge a comes first: by its rank, and of one rank the leftmost.
static inline bool merge_is_before(MergeHere a, MergeHere b) {
    return a.merge->rank != b.merge->rank ? a.merge->rank < b.merge->rank
                                          : a.place < b.place;
}

// Adds the merge of two tokens to the heap, if there is one.
static inline void encoder_push(Encoder *e, size_t place, int left, int right) {
    MergeHere x = {merge_find(e->tk, left, right), place};
    if (!x.merge) return;
    size_t i = e->heap_count++;
    for (; i > 0 && merge_is_before(x, e->heap[(i - 1) / 2]); i = (i - 1) / 2)
        e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = x;
}

// Takes the next merge from the heap, which has some.
static inline MergeHere encoder_pop(Encoder *e) {
    MergeHere first = e->heap[0], last = e->heap[--e->heap_count];
    size_t i = 0;
    for (size_t child = 1; child < e->heap_count; child = 2 * i + 1) {
        child += child + 1 < e->heap_count &&
                 merge_is_before(e->heap[child + 1], e->heap[child]);
        if (!merge_is_before(e->heap[child], last)) break;
        e->heap[i] = e->heap[child];
        i = child;
    }
    e->heap[i] = last;
    return first;
}

// Writes the tokens of the bytes of a word and returns their count.
static inline size_t encoder_bytes(const Tokenizer *tk, const char *word, size_t bytes,
                                   int *tokens) {
    size_t n = 0;
    bool unknown = false;
    for (size_t i = 0; i < bytes; i++) {
        int token = token_find(tk, word + i, 1, false);
        bool fused = unknown && tk->fuse;
        unknown = token < 0;
        if (unknown) token = fused ? -1 : tk->unknown;
        if (token >= 0) tokens[n++] = token;
    }
    return n;
}

// Writes the tokens of one word and returns their count. Merges one pair after another. The
// tokens are a linked list. A token that has become part of its left neighbour is -1. A
// merge in the heap may refer to tokens that no longer exist.
static inline size_t encoder_merge(Encoder *e, const char *word, size_t bytes,
                                   int *tokens) {
    size_t n = encoder_bytes(e->tk, word, bytes, tokens), kept = 0;
    e->heap_count = 0;
    for (size_t i = 0; i < n; i++) {
        e->next[i] = i + 1;
        e->before[i] = i - 1;  // of the first one it is not read
        if (i > 0) encoder_push(e, i - 1, tokens[i - 1], tokens[i]);
    }
    while (e->heap_count > 0) {
        MergeHere x = encoder_pop(e);
        size_t left = x.place, right = e->next[left];
        if (tokens[left] != x.merge->left || right == n || tokens[right] != x.merge->right)
            continue;
        tokens[left] = x.merge->merged;
        tokens[right] = -1;
        size_t behind = e->next[left] = e->next[right];
        if (left > 0)
            encoder_push(e, e->before[left], tokens[e->before[left]], tokens[left]);
        if (behind == n) continue;
        e->before[behind] = left;
        encoder_push(e, left, tokens[left], tokens[behind]);
    }
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] >= 0) tokens[kept++] = tokens[i];
    }
    return kept;
}

// Returns the number of tokens in list[count] that have a byte below `byte` at a place that
// all of them have.
static inline size_t tokens_below(const Token *list, size_t count, size_t place,
                                  unsigned byte) {
    size_t low = 0;
    while (low < count) {
        size_t middle = low + (count - low) / 2;
        if ((unsigned char)list[middle].bytes[place] < byte)
            low = middle + 1;
        else
            count = middle;
    }
    return low;
}

// Returns the longest token of list[count], which is sorted by bytes, at the start of
// text[bytes], or NULL. Each byte of the text narrows the list to the tokens that match so
// far.
static inline const Token *tokenizer_added_at(const Token *list, size_t count,
                                              const char *text, size_t bytes) {
    const Token *found = NULL;
    for (size_t place = 0; count > 0; place++) {
        if (list->count == place) {
            found = list++;
            count--;
        }
        if (place == bytes) break;
        size_t begin = tokens_below(list, count, place, (unsigned char)text[place]);
        count = tokens_below(list, count, place, (unsigned char)text[place] + 1u) - begin;
        list += begin;
    }
    return found;
}

// True for Unicode's White_Space.
static inline bool is_space(unsigned c) {
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
           c == 0x205f || c == 0x3000;
}

// Returns the beginning of the white space that ends at text[end], but not before `least`.
static inline size_t space_begin(const char *text, size_t least, size_t end) {
    while (end > least) {
        size_t at = end - 1;
        unsigned c;
        while (at > least && ((unsigned char)text[at] & 0xc0) == 0x80) at--;
        if (utf8_read(text + at, end - at, &c) != end - at || !is_space(c)) break;
        end = at;
    }
    return end;
}

// Returns the end of the white space that begins at text[at].
static inline size_t space_end(const char *text, size_t at, size_t bytes) {
    while (at < bytes) {
        unsigned c;
        size_t length = utf8_read(text + at, bytes - at, &c);
        if (!is_space(c)) break;
        at += length;
    }
    return at;
}

// Returns the end of the word that begins at valid[at]. Text that the pattern skips before
// the next word is a word, too.
static inline size_t encoder_word(Encoder *e, size_t at, size_t bytes) {
    if (!e->tk->words) return bytes;
    int result = pcre2_match(e->tk->words, (PCRE2_SPTR)e->valid, bytes, at,
                             PCRE2_NO_UTF_CHECK, e->match, NULL);
    e->failed = e->failed || (result < 0 && result != PCRE2_ERROR_NOMATCH);
    if (result < 0) return bytes;
    const size_t *found = pcre2_get_ovector_pointer(e->match);
    return found[0] > at ? found[0] : found[1];
}

// Writes the tokens of text[bytes], which has no added ones, and returns their count.
static inline size_t encoder_words(Encoder *e, const char *text, size_t bytes,
                                   int *tokens) {
    size_t n = 0, length;
    // For the search of words, a byte that is no UTF-8 counts as U+0001, and U+180E as
    // U+FFFD. Neither is a letter, number or space. PCRE2's \s includes U+180E, which
    // Unicode's White_Space does not.
    for (size_t i = 0; i < bytes; i += length) {
        unsigned character;
        length = utf8_read(text + i, bytes - i, &character);
        const char *seen = text + i;
        if (character == 1) seen = "\1";
        if (character == 0x180e) seen = "\xef\xbf\xbd";
        memcpy(e->valid + i, seen, length);
    }
    for (size_t i = 0; i < bytes; i += length) {
        length = encoder_word(e, i, bytes) - i;
        int whole = e->tk->whole ? token_find(e->tk, text + i, length, false) : -1;
        if (whole >= 0)
            tokens[n++] = whole;
        else
            n += encoder_merge(e, text + i, length, tokens + n);
    }
    return n;
}

// Writes the tokens of text[bytes] and returns their count. The first round looks for the
// early added tokens. The second looks for the late ones in the text between them. The
// third splits the rest into words.
static inline size_t encoder_round(Encoder *e, int round, const char *text, size_t bytes,
                                   int *tokens) {
    const Tokenizer *tk = e->tk;
    if (round == 2) return encoder_words(e, text, bytes, tokens);
    const Token *list = tk->tokens + tk->vocabulary + (round ? tk->early : 0);
    size_t count = round ? tk->added - tk->early : tk->early;
    size_t n = 0, done = 0;
    for (size_t at = 0; at < bytes && count > 0;) {
        const Token *added = tokenizer_added_at(list, count, text + at, bytes - at);
        if (!added) {
            at++;
            continue;
        }
        size_t begin = added->lstrip ? space_begin(text, done, at) : at;
        at += added->count;
        if (begin > done)
            n += encoder_round(e, round + 1, text + done, begin - done, tokens + n);
        tokens[n++] = added->number;
        done = added->rstrip ? space_end(text, at, bytes) : at;
    }
    return n + encoder_round(e, round + 1, text + done, bytes - done, tokens + n);
}

#define TOKENIZER_FAILED SIZE_MAX

// Writes the tokens of text[bytes] to tokens[bytes] (there are never more). Returns their
// count, or TOKENIZER_FAILED if the pattern of words takes PCRE2 too long.
static inline size_t tokenizer_encode(const Tokenizer *tk, const char *text, size_t bytes,
                                      int *tokens) {
    Encoder e;
    memset(&e, 0, sizeof e);
    e.tk = tk;
    e.valid = (char *)host_alloc(bytes, 1);
    e.next = (size_t *)host_alloc(bytes, sizeof(size_t));
    e.before = (size_t *)host_alloc(bytes, sizeof(size_t));
    e.heap = (MergeHere *)host_alloc(3 * bytes, sizeof(MergeHere));
    e.match = (pcre2_match_data *)host_check(pcre2_match_data_create(1, NULL), 1, 1);
    size_t n = encoder_round(&e, 0, text, bytes, tokens);
    pcre2_match_data_free(e.match);
    free(e.heap);
    free(e.before);
    free(e.next);
    free(e.valid);
    return e.failed ? TOKENIZER_FAILED : n;
}

// Returns the token's bytes, *bytes of them. There are none if the number is no token.
static inline const char *tokenizer_decode(const Tokenizer *tk, int token, size_t *bytes) {
    bool known = token >= 0 && (size_t)token < tk->numbers && tk->text[token].bytes;
    *bytes = known ? tk->text[token].count : 0;
    return known ? tk->text[token].bytes : "";
}

// ----------------------------------------------------------------------------------------
// Prompts and samples

// Prints the text of tokens[count]. An untrained model makes plenty of bytes that are no
// UTF-8, and of control characters, which a terminal might obey. Both become '?'.
static inline void tokenizer_print(const Tokenizer *tk, const int *tokens, size_t count) {
    size_t bytes, length;
    char *text;
    FILE *stream = open_memstream(&text, &bytes);
    host_check(stream, 1, sizeof *stream);
    for (size_t i = 0; i < count; i++) {
        const char *token = tokenizer_decode(tk, tokens[i], &length);
        fwrite(token, 1, length, stream);
    }
    fclose(stream);
    for (size_t i = 0; i < bytes; i += length) {
        unsigned c;
        length = utf8_read(text + i, bytes - i, &c);
        if ((c < 32 && c != '\n' && c != '\t') || (c >= 127 && c < 160))
            putchar('?');
        else
            fwrite(text + i, 1, length, stdout);
    }
    free(text);
}

// Makes the tokens of a prompt; the caller frees them, also after an error. If the prompt
// is NULL or empty, these are the tokens that begin every prompt, or else <|endoftext|>.
// Refuses tokens outside of the model's vocabulary V.
static inline bool tokenizer_prompt(const Tokenizer *tk, const char *prompt, size_t V,
                                    int **tokens, size_t *count, Error *err) {
    *tokens = NULL;
    if (!prompt) prompt = "";
    if (!prompt[0] && tk->first_count == 0) {
        const Token *added = tk->tokens + tk->vocabulary;
        prompt = END_OF_TEXT;
        size_t bytes = strlen(prompt);
        if (!tokenizer_added_at(added, tk->early, prompt, bytes) &&
            !tokenizer_added_at(added + tk->early, tk->added - tk->early, prompt, bytes))
            return error_set(err, "the tokenizer has no " END_OF_TEXT ": give a --prompt");
    }
    *tokens = (int *)host_alloc(tk->first_count + strlen(prompt), sizeof(int));
    if (tk->first_count) memcpy(*tokens, tk->first, tk->first_count * sizeof(int));
    *count = tokenizer_encode(tk, prompt, strlen(prompt), *tokens + tk->first_count);
    if (*count == TOKENIZER_FAILED)
        return error_set(err,
                         "%s: PCRE2 gives up splitting this --prompt into words by its "
                         "pattern",
                         tk->path);
    if (*count == 0 && prompt[0])
        return error_set(err, "the tokenizer has no token for this --prompt");
    *count += tk->first_count;
    for (size_t i = 0; i < *count; i++) {
        if ((size_t)(*tokens)[i] >= V)
            return error_set(
                err,
                "the prompt has token %d, but the model's vocabulary has %zu: give "
                "the --tokenizer that the data was made with, or set --sample-every 0",
                (*tokens)[i], V);
    }
    return true;
}

static const double SAMPLE_TEMPERATURE = 0.8;

// Draws the next token from softmax(logits [V] / SAMPLE_TEMPERATURE) with coin in [0, 1),
// but never a NaN.
static inline int sample_token(const float *logits, size_t V, double coin) {
    size_t best = 0;
    for (size_t i = 1; i < V; i++) {
        if (logits[i] > logits[best] || isnan(logits[best])) best = i;
    }
    if (!isfinite(logits[best])) return (int)best;
    // The first round sums up, the second looks for the share `coin` of the sum.
    double sum = 0.0, target = INFINITY;
    for (int round = 0; round < 2; round++, target = coin * sum, sum = 0.0) {
        for (size_t i = 0; i < V; i++) {
            if (!isnan(logits[i]))
                sum += exp(((double)logits[i] - (double)logits[best]) / SAMPLE_TEMPERATURE);
            if (sum > target) return (int)i;
        }
    }
    return (int)best;
}

#endif
