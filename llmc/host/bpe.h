// bpe.h: byte-level byte-pair encoding as GPT-2 does it (Radford et al. 2019, section 2.2): text is split into words,
// and in each word the bytes' tokens are merged, pair by pair (Sennrich et al. 2016).
//
// defines: Tokenizer, tokenizer_encode, tokenizer_decode, tokenizer_free
#ifndef LLMC_BPE_H
#define LLMC_BPE_H

#include <stdint.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "llmc/host/memory.h"

// Two neighbouring tokens that become one; of all that are possible, the one of the lowest rank goes first.
typedef struct {
    int left, right, merged, rank;
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
    TokenMerge *merges;  // [merge_count] sorted by left and right
    size_t merge_count;
    int *added;          // [added_count] tokens that are found in the text before anything else
    size_t added_count;
    int end_of_text;     // -1: none
    pcre2_code *words;   // matches a word at the start of a text; NULL: the text is one word
} Tokenizer;

static inline void tokenizer_free(Tokenizer *tk) {
    free(tk->text);
    free(tk->pool);
    free(tk->merges);
    free(tk->added);
    pcre2_code_free(tk->words);
    memset(tk, 0, sizeof *tk);
}

// GPT-2's regular expression. \s is spelled out as Unicode's White_Space, because PCRE2's has U+180E as well. Which
// characters are letters and numbers depends on the version of Unicode that PCRE2 knows.
#define BPE_SPACE "\\t-\\r\\x{85}\\p{Z}"
#define BPE_WORD "'(?:[stmd]|re|ve|ll)| ?\\p{L}+| ?\\p{N}+| ?[^" BPE_SPACE "\\p{L}\\p{N}]+|" \
                 "[" BPE_SPACE "]+(?![^" BPE_SPACE "])|[" BPE_SPACE "]+"

// ---------------------------------------------------------------------------------------------------------------------
// Merging the tokens of a word, in n log n: a linked list of its tokens, and a heap of the merges that are possible

typedef struct {
    int token;              // -1: gone, merged into the one before
    size_t previous, next;  // positions in the list; next may be its length
} TokenLink;

// A merge that is possible: its rank above 38 bits for the place of its left token, so that the smallest number comes
// first: the lowest rank, and of equal ones the leftmost.
typedef uint64_t TokenPair;
enum { PAIR_PLACE_BITS = 38 };

typedef struct {
    TokenLink *links;  // [bytes]
    TokenPair *heap;   // [2 * bytes] no entry is smaller than entry (i - 1) / 2
    size_t pairs;      // in the heap
} WordMerger;

static inline void heap_push(WordMerger *m, TokenPair pair) {
    size_t i = m->pairs++;
    for (; i > 0 && pair < m->heap[(i - 1) / 2]; i = (i - 1) / 2) m->heap[i] = m->heap[(i - 1) / 2];
    m->heap[i] = pair;
}

static inline TokenPair heap_pop(WordMerger *m) {
    TokenPair first = m->heap[0], last = m->heap[--m->pairs];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < m->pairs; i = child) {
        if (child + 1 < m->pairs && m->heap[child + 1] < m->heap[child]) child++;
        if (last <= m->heap[child]) break;
        m->heap[i] = m->heap[child];
    }
    m->heap[i] = last;
    return first;
}

static inline int merge_compare(const void *a, const void *b) {
    const TokenMerge *x = (const TokenMerge *)a, *y = (const TokenMerge *)b;
    if (x->left != y->left) return x->left < y->left ? -1 : 1;
    return x->right < y->right ? -1 : x->right > y->right;
}

// The merge of the token at a place of n with the one behind it; NULL if there is none.
static inline const TokenMerge *merge_find(const Tokenizer *tk, const WordMerger *m, size_t place, size_t n) {
    if (!tk->merge_count || m->links[place].token < 0 || m->links[place].next >= n) return NULL;
    TokenMerge key = {m->links[place].token, m->links[m->links[place].next].token, 0, 0};
    return (const TokenMerge *)bsearch(&key, tk->merges, tk->merge_count, sizeof key, merge_compare);
}

static inline void merge_offer(const Tokenizer *tk, WordMerger *m, size_t place, size_t n) {
    const TokenMerge *merge = merge_find(tk, m, place, n);
    if (merge) heap_push(m, (TokenPair)merge->rank << PAIR_PLACE_BITS | place);
}

// Writes the tokens of one word and returns how many there are.
static inline size_t bpe_encode_word(const Tokenizer *tk, WordMerger *m, const char *word, size_t bytes, int *tokens) {
    size_t n = 0, count = 0;
    for (size_t i = 0; i < bytes; i++) {
        TokenLink link = {tk->of_byte[(unsigned char)word[i]], n - 1, n + 1};
        if (link.token >= 0) m->links[n++] = link;  // a vocabulary without this byte cannot say it
    }
    for (size_t i = 0; i < n; i++) merge_offer(tk, m, i, n);
    while (m->pairs > 0) {
        TokenPair best = heap_pop(m);
        size_t place = (size_t)(best & (((TokenPair)1 << PAIR_PLACE_BITS) - 1));
        const TokenMerge *merge = merge_find(tk, m, place, n);
        if (!merge || (TokenPair)merge->rank != best >> PAIR_PLACE_BITS) continue;  // one of the two has changed
        TokenLink *left = &m->links[place], *right = &m->links[left->next];
        left->token = merge->merged;
        left->next = right->next;
        right->token = -1;
        if (left->next < n) m->links[left->next].previous = place;
        if (place > 0) merge_offer(tk, m, left->previous, n);
        merge_offer(tk, m, place, n);
    }
    for (size_t i = 0; i < n; i = m->links[i].next) tokens[count++] = m->links[i].token;
    return count;
}

// ---------------------------------------------------------------------------------------------------------------------
// Text to tokens and back

// Replaces each byte of text[bytes] that is not part of valid UTF-8 by U+0001: a sign, neither letter nor number nor
// space, as U+FFFD is one.
static inline void bpe_make_valid(const pcre2_code *words, pcre2_match_data *match, char *text, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        int result = pcre2_match(words, (PCRE2_SPTR)text + at, bytes - at, 0, 0, match, NULL);
        if (result > PCRE2_ERROR_UTF8_ERR1 || result < PCRE2_ERROR_UTF8_ERR21) return;  // the rest is valid
        at += pcre2_get_startchar(match);
        text[at++] = '\1';
    }
}

// The length of the first word of text[bytes], which is valid UTF-8.
static inline size_t bpe_word(const pcre2_code *words, pcre2_match_data *match, const char *text, size_t bytes) {
    int result = pcre2_match(words, (PCRE2_SPTR)text, bytes, 0, PCRE2_NO_UTF_CHECK, match, NULL);
    if (result > 0) return pcre2_get_ovector_pointer(match)[1];
    fprintf(stderr, "error: PCRE2 cannot split the text into words (its error %d)\n", result);
    exit(1);
}

// The added token that text[bytes] starts with (the longest of them), or -1.
static inline int bpe_added_at(const Tokenizer *tk, const char *text, size_t bytes) {
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
    WordMerger merger = {(TokenLink *)host_alloc(bytes, sizeof(TokenLink)),
                         (TokenPair *)host_alloc(bytes, 2 * sizeof(TokenPair)), 0};
    char *valid = (char *)host_alloc(bytes, 1);
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    size_t n = 0;
    host_check(match, 1, 1);
    memcpy(valid, text, bytes);
    for (size_t i = 0; i < bytes;) {
        size_t end = i;
        int added = -1;
        while (end < bytes && (added = bpe_added_at(tk, text + end, bytes - end)) < 0) end++;
        if (tk->words) bpe_make_valid(tk->words, match, valid + i, end - i);
        while (i < end) {
            size_t length = tk->words ? bpe_word(tk->words, match, valid + i, end - i) : end - i;
            n += bpe_encode_word(tk, &merger, text + i, length, tokens + n);
            i += length;
        }
        if (added >= 0) {
            tokens[n++] = added;
            i += tk->text[added].count;
        }
    }
    pcre2_match_data_free(match);
    free(valid);
    free(merger.heap);
    free(merger.links);
    return n;
}

// The bytes that a token stands for, *bytes of them and no NUL; none for a number that is no token.
static inline const char *tokenizer_decode(const Tokenizer *tk, int token, size_t *bytes) {
    *bytes = 0;
    if (token < 0 || (size_t)token >= tk->V || !tk->text[token].count) return "";
    *bytes = tk->text[token].count;
    return tk->text[token].bytes;
}

#endif
