// tokenizer.h: text to tokens and back, prompts and samples. Without a file a token is a byte. A Hugging Face
// tokenizer.json brings byte-level byte-pair encoding like GPT-2's (Radford et al. 2019, section 2.2). Text is split
// into words, and in each word the bytes' tokens are merged, pair by pair (Sennrich et al. 2016).
//
// defines: Token, Tokenizer, utf8_read, tokenizer_open, tokenizer_free, tokenizer_encode, tokenizer_decode,
//          tokenizer_prompt, tokenizer_print, SAMPLE_TEMPERATURE, sample_token
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "llmc/host/json.h"
#include "llmc/host/memory.h"

// Added tokens are compared with the text at each of its bytes, so their number and length are bounded.
enum { TOKENIZER_MAX_FILE = 128 << 20, TOKENIZER_MAX_ID = 1 << 22, ADDED_MAX = 4096, ADDED_MAX_BYTES = 256 };

#define END_OF_TEXT "<|endoftext|>"

// GPT-2's regular expression. Which characters are letters and numbers depends on the version of Unicode that PCRE2
// knows.
#define BPE_WORD "'(?:[stmd]|re|ve|ll)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

// Two neighbouring tokens that become one. Pairs of a lower rank are merged first.
typedef struct {
    int left, right, rank, merged;
} TokenMerge;

typedef struct {
    char *bytes;
    size_t count;
    int number;
} Token;

typedef struct {
    Token *text;               // [TOKENIZER_MAX_ID] by number; bytes NULL: no such token
    Token *tokens;             // [vocabulary] sorted by bytes, and behind them [added]; owns the bytes
    size_t vocabulary, added;  // added: looked for in the text before it is split into words
    TokenMerge *merges;        // [merge_count] sorted by left and right
    size_t merge_count;
    pcre2_code *words;         // matches a word at the start of a text; NULL: the text is one word
    bool whole;                // a word of the vocabulary is its token, whatever merges make of it
} Tokenizer;

static inline void tokenizer_free(Tokenizer *tk) {
    for (size_t i = 0; i < tk->vocabulary + tk->added; i++) free(tk->tokens[i].bytes);
    free(tk->text);
    free(tk->tokens);
    free(tk->merges);
    pcre2_code_free(tk->words);
    memset(tk, 0, sizeof *tk);
}

// Reads the UTF-8 character at the start of text[bytes] and returns its length. A byte that is none is U+0001.
static inline size_t utf8_read(const char *text, size_t bytes, unsigned *character) {
    static const unsigned least[] = {0, 0, 0x80, 0x800, 0x10000};  // a character of that length
    unsigned c = (unsigned char)text[0];
    size_t length = c < 0x80 ? 1 : c < 0xc0 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf8 ? 4 : 0;
    bool valid = length > 0 && length <= bytes;
    if (length > 1) c &= 0x7fu >> length;
    for (size_t i = 1; i < length && valid; i++) {
        valid = ((unsigned char)text[i] & 0xc0) == 0x80;
        c = c << 6 | ((unsigned char)text[i] & 0x3f);
    }
    valid = valid && c >= least[length] && c <= 0x10ffff && (c < 0xd800 || c >= 0xe000);  // surrogates are none
    *character = valid ? c : 1;
    return valid ? length : 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Text to tokens and back

static inline int token_compare(const void *a, const void *b) {
    const Token *x = (const Token *)a, *y = (const Token *)b;
    int order = memcmp(x->bytes, y->bytes, x->count < y->count ? x->count : y->count);
    return order ? order : (x->count > y->count) - (x->count < y->count);
}

// Returns the token of the vocabulary that has these bytes, or -1.
static inline int token_find(const Tokenizer *tk, const char *bytes, size_t count) {
    Token key = {(char *)bytes, count, 0};
    const Token *found = (const Token *)bsearch(&key, tk->tokens, tk->vocabulary, sizeof key, token_compare);
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
    return (const TokenMerge *)bsearch(&key, tk->merges, tk->merge_count, sizeof key, merge_compare);
}

// Writes the tokens of one word and returns their count. Each turn merges all pairs of the lowest rank, from the left,
// as GPT-2's own encoder does. pairs [bytes]: the merge of a token and its right neighbour; NULL: none.
static inline size_t tokenizer_merge(const Tokenizer *tk, const char *word, size_t bytes, int *tokens,
                                     const TokenMerge **pairs) {
    size_t n = 0;
    for (size_t i = 0; i < bytes; i++) {
        tokens[n] = token_find(tk, word + i, 1);
        n += tokens[n] >= 0;  // a byte without a token is left out
    }
    for (size_t i = 1; i < n; i++) pairs[i - 1] = merge_find(tk, tokens[i - 1], tokens[i]);
    for (;;) {
        const TokenMerge *lowest = NULL;
        for (size_t i = 1; i < n; i++) {
            if (pairs[i - 1] && (!lowest || pairs[i - 1]->rank < lowest->rank)) lowest = pairs[i - 1];
        }
        if (!lowest) return n;
        size_t kept = 0;
        for (size_t i = 0; i < n; i++, kept++) {
            bool merges = i + 1 < n && pairs[i] == lowest;
            i += merges;
            tokens[kept] = merges ? lowest->merged : tokens[i];
            pairs[kept] = pairs[i];
            bool changed = kept > 0 && (merges || tokens[kept - 1] == lowest->merged);
            if (changed) pairs[kept - 1] = merge_find(tk, tokens[kept - 1], tokens[kept]);
        }
        n = kept;
    }
}

// Returns the length of the first word of text[bytes], which is valid UTF-8.
static inline size_t tokenizer_word(const Tokenizer *tk, pcre2_match_data *match, const char *text, size_t bytes) {
    if (!tk->words) return bytes;
    const uint32_t flags = PCRE2_ANCHORED | PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
    int result = pcre2_match(tk->words, (PCRE2_SPTR)text, bytes, 0, flags, match, NULL);
    if (result > 0) return pcre2_get_ovector_pointer(match)[1];
    fprintf(stderr, "error: PCRE2 cannot split the text into words (its error %d)\n", result);
    exit(1);
}

// Returns the longest added token at the start of text[bytes], or NULL.
static inline const Token *tokenizer_added_at(const Tokenizer *tk, const char *text, size_t bytes) {
    const Token *found = NULL;
    for (const Token *x = tk->tokens + tk->vocabulary; x < tk->tokens + tk->vocabulary + tk->added; x++) {
        bool longer = x->count > (found ? found->count : 0) && x->count <= bytes;
        if (longer && memcmp(x->bytes, text, x->count) == 0) found = x;
    }
    return found;
}

// Writes the tokens of text[bytes] to tokens[bytes] (there are never more) and returns their count.
static inline size_t tokenizer_encode(const Tokenizer *tk, const char *text, size_t bytes, int *tokens) {
    const TokenMerge **pairs = (const TokenMerge **)host_alloc(bytes, sizeof *pairs);
    char *valid = (char *)host_alloc(bytes, 1);
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    host_check(match, 1, 1);
    size_t n = 0, length;
    for (size_t i = 0, end; i < bytes;) {
        unsigned character;
        const Token *added = NULL;
        for (end = i; end < bytes && !(added = tokenizer_added_at(tk, text + end, bytes - end));) end++;
        // To find words, a byte that is no UTF-8 counts as U+0001 and U+180E as U+FFFD: neither is a letter, number or
        // space. PCRE2's \s has U+180E, Unicode's White_Space has not.
        for (size_t k = i; k < end; k += length) {
            length = utf8_read(text + k, end - k, &character);
            memcpy(valid + k, character == 1 ? "\1" : character == 0x180e ? "\xef\xbf\xbd" : text + k, length);
        }
        for (; i < end; i += length) {
            length = tokenizer_word(tk, match, valid + i, end - i);
            int whole = tk->whole ? token_find(tk, text + i, length) : -1;
            if (whole >= 0) tokens[n++] = whole;
            else n += tokenizer_merge(tk, text + i, length, tokens + n, pairs);
        }
        if (!added) continue;
        tokens[n++] = added->number;
        i += added->count;
    }
    pcre2_match_data_free(match);
    free(valid);
    free(pairs);
    return n;
}

// Returns the token's bytes, *bytes of them. There are none if the number is no token.
static inline const char *tokenizer_decode(const Tokenizer *tk, int token, size_t *bytes) {
    bool known = token >= 0 && token < TOKENIZER_MAX_ID && tk->text[token].bytes;
    *bytes = known ? tk->text[token].count : 0;
    return known ? tk->text[token].bytes : "";
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading tokenizer.json

// A vocabulary writes bytes as printable characters: 188 as themselves in Latin-1, the other 68 as U+0100 onwards.
// Returns -1 for another character.
static inline int character_to_byte(unsigned c) {
    if ((c >= 33 && c <= 126) || (c >= 161 && c <= 255 && c != 173)) return (int)c;
    return c < 256 ? -1 : c < 256 + 33 ? (int)c - 256 : c < 256 + 67 ? (int)c - 289 + 127 : c == 256 + 67 ? 173 : -1;
}

// Turns a name of the vocabulary into bytes and returns their count. A name with other characters is taken as it is.
static inline size_t name_to_bytes(const char *name, char *out) {
    size_t n = 0, bytes = strlen(name);
    for (size_t i = 0, length; i < bytes; i += length) {
        unsigned c;
        length = utf8_read(name + i, bytes - i, &c);
        int byte = character_to_byte(c);
        if (byte < 0) {
            memcpy(out, name, bytes);
            return bytes;
        }
        out[n++] = (char)byte;
    }
    return n;
}

// True if a member of the object is missing, null, false, empty or 0.
static inline bool json_is_off(const cJSON *object, const char *key) {
    const cJSON *x = cJSON_GetObjectItemCaseSensitive(object, key);
    return !x || cJSON_IsNull(x) || cJSON_IsFalse(x) || (cJSON_IsString(x) && !x->valuestring[0]) ||
           (cJSON_IsNumber(x) && x->valuedouble == 0.0);
}

// Adds a token behind the others.
static inline void tokenizer_add(Tokenizer *tk, size_t *count, Token x) {
    tk->tokens[tk->vocabulary + tk->added] = x;
    tk->text[x.number] = x;
    ++*count;
}

// Adds a token of the file: of the vocabulary, whose numbers differ, or an added one.
static inline bool tokenizer_read_token(Tokenizer *tk, size_t *count, const char *text, const cJSON *id,
                                        const char *path, Error *err) {
    uint64_t number;
    bool named = count == &tk->vocabulary;
    if (!text || !json_whole(id, &number) || number >= TOKENIZER_MAX_ID || (named && tk->text[number].bytes))
        return error_set(err, "%s: the token \"%.99s\" needs a number of its own below %d", path, text ? text : "",
                         TOKENIZER_MAX_ID);
    Token x = {host_string(text), strlen(text), (int)number};
    if (named) x.count = name_to_bytes(text, x.bytes);
    tokenizer_add(tk, count, x);
    return true;
}

// Reads ["a b", ...] or [["a", "b"], ...], lowest rank first.
static inline bool tokenizer_read_merges(Tokenizer *tk, const cJSON *merges, const char *path, Error *err) {
    tk->merges = (TokenMerge *)host_alloc((size_t)cJSON_GetArraySize(merges), sizeof(TokenMerge));
    for (const cJSON *item = merges->child; item; item = item->next) {
        char *right = cJSON_GetStringValue(item), *left = strsep(&right, " ");
        TokenMerge merge = {-1, -1, (int)tk->merge_count, -1};
        if (cJSON_IsArray(item) && cJSON_GetArraySize(item) == 2) {
            left = cJSON_GetStringValue(item->child);
            right = cJSON_GetStringValue(item->child->next);
        }
        if (left && right) {
            char *both = (char *)host_alloc(strlen(left) + strlen(right), 1);
            size_t first = name_to_bytes(left, both), second = name_to_bytes(right, both + first);
            merge.left = token_find(tk, both, first);
            merge.right = token_find(tk, both + first, second);
            merge.merged = token_find(tk, both, first + second);
            free(both);
        }
        if (merge.left < 0 || merge.right < 0 || merge.merged < 0) {
            return error_set(err, "%s: merge %d is no pair of tokens that make a token", path, merge.rank);
        }
        tk->merges[tk->merge_count++] = merge;
    }
    qsort(tk->merges, tk->merge_count, sizeof(TokenMerge), merge_compare);
    return true;
}

// Compiles a regular expression. Returns NULL with a sentence if PCRE2 cannot.
static inline pcre2_code *tokenizer_compile(const char *pattern, const char *path, Error *err) {
    int failure;
    size_t at;
    const uint32_t flags = PCRE2_UTF | PCRE2_UCP;
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, strlen(pattern), flags, &failure, &at, NULL);
    if (!code) error_set(err, "%s: PCRE2 cannot split text by \"%.60s\" (its error %d)", path, pattern, failure);
    return code;
}

// Reads a tokenizer.json whose text `pattern`, a regular expression, splits into words: its vocabulary {"name": number,
// ...}, and the tokens that are looked for in the text, [{"id": number, "content": text}, ...]. An empty text is found
// nowhere. Refuses a model whose tokens we would get wrong. tokenizer_free in either case.
static inline bool tokenizer_read(Tokenizer *tk, const cJSON *root, const char *pattern, const char *path, Error *err) {
    static const char *const off[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"};
    const cJSON *model = cJSON_GetObjectItemCaseSensitive(root, "model");
    const cJSON *vocab = cJSON_GetObjectItemCaseSensitive(model, "vocab");
    const cJSON *merges = cJSON_GetObjectItemCaseSensitive(model, "merges");
    const cJSON *added = cJSON_GetObjectItemCaseSensitive(root, "added_tokens"), *item;
    for (int i = 0; i < 4; i++) {
        if (!json_is_off(model, off[i]))
            return error_set(err, "%s is no byte-level BPE like GPT-2's: its \"%s\" is another", path, off[i]);
    }
    if (!cJSON_IsObject(vocab) || !vocab->child || !cJSON_IsArray(merges) || (added && !cJSON_IsArray(added))) {
        return error_set(err, "%s: vocab, merges or added_tokens is missing, empty or malformed", path);
    }
    tk->whole = !json_is_off(model, "ignore_merges");
    tk->text = (Token *)host_alloc(TOKENIZER_MAX_ID, sizeof(Token));
    tk->tokens = (Token *)host_alloc((size_t)(cJSON_GetArraySize(vocab) + cJSON_GetArraySize(added)), sizeof(Token));
    for (item = vocab->child; item; item = item->next) {
        if (!tokenizer_read_token(tk, &tk->vocabulary, item->string, item, path, err)) return false;
    }
    qsort(tk->tokens, tk->vocabulary, sizeof(Token), token_compare);
    cJSON_ArrayForEach(item, added) {
        const char *content = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "content"));
        const cJSON *id = cJSON_GetObjectItemCaseSensitive(item, "id");
        if (tk->added == ADDED_MAX || (content && strlen(content) > ADDED_MAX_BYTES))
            return error_set(err, "%s: added token %zu is one of more than %d, or has more than %d bytes", path,
                             tk->added, ADDED_MAX, ADDED_MAX_BYTES);
        if (!tokenizer_read_token(tk, &tk->added, content, id, path, err)) return false;
    }
    tk->words = tokenizer_compile(pattern, path, err);
    return tk->words && tokenizer_read_merges(tk, merges, path, err);
}

// Refuses a tokenizer.json that splits or normalizes text in another way than GPT-2's.
static inline bool tokenizer_check_words(const cJSON *root, const char *path, Error *err) {
    const cJSON *splitter = cJSON_GetObjectItemCaseSensitive(root, "pre_tokenizer");
    const char *type = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(splitter, "type"));
    bool same = type && strcmp(type, "ByteLevel") == 0 && json_is_off(splitter, "add_prefix_space") &&
                !cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(splitter, "use_regex")) &&
                json_is_off(root, "normalizer");
    return same || error_set(err, "%s is no byte-level BPE like GPT-2's: its \"pre_tokenizer\" or \"normalizer\" is "
                             "another", path);
}

// Opens a tokenizer.json. Without a path a token is a byte, and 256 is <|endoftext|>. On failure nothing is left to
// free.
static inline bool tokenizer_open(Tokenizer *tk, const char *path, Error *err) {
    memset(tk, 0, sizeof *tk);
    if (path) {
        cJSON *root = json_read(path, TOKENIZER_MAX_FILE, err);
        bool ok = root && tokenizer_check_words(root, path, err) && tokenizer_read(tk, root, BPE_WORD, path, err);
        cJSON_Delete(root);
        if (!ok) tokenizer_free(tk);
        return ok;
    }
    tk->text = (Token *)host_alloc(TOKENIZER_MAX_ID, sizeof(Token));
    tk->tokens = (Token *)host_alloc(257, sizeof(Token));
    for (int i = 0; i < 256; i++) {
        const char text[] = {(char)i, '\0'};
        Token x = {host_string(text), 1, i};
        tokenizer_add(tk, &tk->vocabulary, x);
    }
    Token end = {host_string(END_OF_TEXT), strlen(END_OF_TEXT), 256};
    tokenizer_add(tk, &tk->added, end);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Prompts and samples

// Prints the text of tokens[count]. A byte that is no UTF-8 and a control character, which a terminal might obey,
// become '?': an untrained model makes plenty of both.
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
        if ((c < 32 && c != '\n' && c != '\t') || (c >= 127 && c < 160)) putchar('?');
        else fwrite(text + i, 1, length, stdout);
    }
    free(text);
}

// Makes the tokens of a prompt; the caller frees them, also after an error. No prompt, or an empty one, is
// <|endoftext|>. Refuses tokens outside of the model's vocabulary V.
static inline bool tokenizer_prompt(const Tokenizer *tk, const char *prompt, size_t V, int **tokens, size_t *count,
                                    Error *err) {
    *tokens = NULL;
    if (!prompt || !prompt[0]) {
        prompt = END_OF_TEXT;
        if (!tokenizer_added_at(tk, prompt, strlen(prompt)))
            return error_set(err, "the tokenizer has no " END_OF_TEXT ": give a --prompt");
    }
    *tokens = (int *)host_alloc(strlen(prompt), sizeof(int));
    *count = tokenizer_encode(tk, prompt, strlen(prompt), *tokens);
    if (*count == 0) return error_set(err, "the tokenizer has no token for this --prompt");
    for (size_t i = 0; i < *count; i++) {
        if ((size_t)(*tokens)[i] >= V)
            return error_set(err, "the prompt has token %d, but the model's vocabulary has %zu: give the --tokenizer "
                             "that the data was made with, or set --sample-every 0", (*tokens)[i], V);
    }
    return true;
}

static const double SAMPLE_TEMPERATURE = 0.8;

// Draws the next token from softmax(logits [V] / SAMPLE_TEMPERATURE) with coin in [0, 1), but never a NaN.
static inline int sample_token(const float *logits, size_t V, double coin) {
    size_t best = 0;
    for (size_t i = 1; i < V; i++) {
        if (logits[i] > logits[best] || isnan(logits[best])) best = i;
    }
    if (!isfinite(logits[best])) return (int)best;
    double sum = 0.0, target = INFINITY;  // the first round sums up, the second looks for the share `coin` of the sum
    for (int round = 0; round < 2; round++, target = coin * sum, sum = 0.0) {
        for (size_t i = 0; i < V; i++) {
            if (!isnan(logits[i])) sum += exp(((double)logits[i] - (double)logits[best]) / SAMPLE_TEMPERATURE);
            if (sum > target) return (int)i;
        }
    }
    return (int)best;
}

#endif
