// tokenizer_file.h: reads a tokenizer, as Hugging Face's package tokenizers would. Without
// a file a token is a byte. A tokenizer.json brings byte-level byte-pair encoding like
// GPT-2's. A key of it is honoured, or harmless, or refused by its name: TOKENIZER_KEYS has
// all that the format knows.
//
// defines: TOKENIZER_MAX_FILE, ADDED_MAX_BYTES, BYTE_VOCABULARY, BPE_WORD, TokenizerKey,
//          TOKENIZER_KEYS, json_get, json_text, keys_check, tokenizer_compile,
//          tokenizer_read, tokenizer_beside, tokenizer_open
#ifndef LLMC_TOKENIZER_FILE_H
#define LLMC_TOKENIZER_FILE_H

#include "llmc/host/json.h"
#include "llmc/host/tokenizer.h"

// The bound ADDED_MAX_BYTES limits how often a byte of a text is compared with added
// tokens.
enum { TOKENIZER_MAX_FILE = 128 << 20, ADDED_MAX_BYTES = 256 };

enum { BYTE_VOCABULARY = 257 };  // the bytes and <|endoftext|>

// GPT-2's regular expression. Which characters are letters and numbers depends on the
// version of Unicode that PCRE2 knows.
#define BPE_WORD \
    "'(?:[stmd]|re|ve|ll)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

//   KEY_READS     Its value is used, or refused.
//   KEY_SWITCH    The same, and the value is true or false.
//   KEY_HARMLESS  The tokens of a text do not depend on it.
//   KEY_OFF       It is refused unless it is off.
typedef enum { KEY_READS, KEY_SWITCH, KEY_HARMLESS, KEY_OFF } KeyUse;

// The keys of the file, of the objects in it by their names, and of each added token.
// Truncation and padding are of batches: the file has them if its tokenizer was used for
// one before it was saved.
typedef struct {
    const char *object, *key;
    KeyUse use;
} TokenizerKey;
static const TokenizerKey TOKENIZER_KEYS[] = {
    {"tokenizer", "version", KEY_READS},
    {"tokenizer", "truncation", KEY_HARMLESS},
    {"tokenizer", "padding", KEY_HARMLESS},
    {"tokenizer", "added_tokens", KEY_READS},
    {"tokenizer", "normalizer", KEY_READS},
    {"tokenizer", "pre_tokenizer", KEY_READS},
    {"tokenizer", "post_processor", KEY_READS},
    {"tokenizer", "decoder", KEY_READS},
    {"tokenizer", "model", KEY_READS},
    {"model", "type", KEY_READS},
    {"model", "dropout", KEY_OFF},
    {"model", "unk_token", KEY_READS},
    {"model", "continuing_subword_prefix", KEY_OFF},
    {"model", "end_of_word_suffix", KEY_OFF},
    {"model", "fuse_unk", KEY_SWITCH},
    {"model", "byte_fallback", KEY_OFF},
    {"model", "ignore_merges", KEY_SWITCH},
    {"model", "vocab", KEY_READS},
    {"model", "merges", KEY_READS},
    {"added_tokens", "id", KEY_READS},
    {"added_tokens", "content", KEY_READS},
    {"added_tokens", "single_word", KEY_OFF},
    {"added_tokens", "lstrip", KEY_SWITCH},
    {"added_tokens", "rstrip", KEY_SWITCH},
    {"added_tokens", "normalized", KEY_SWITCH},
    {"added_tokens", "special", KEY_HARMLESS},
    {"normalizer", "type", KEY_READS},
    {"pre_tokenizer", "type", KEY_READS},
    {"pre_tokenizer", "add_prefix_space", KEY_OFF},
    {"pre_tokenizer", "trim_offsets", KEY_HARMLESS},
    {"pre_tokenizer", "use_regex", KEY_SWITCH},
    {"pre_tokenizer", "pretokenizers", KEY_READS},
    {"pre_tokenizer", "pattern", KEY_READS},
    {"pre_tokenizer", "behavior", KEY_READS},
    {"pre_tokenizer", "invert", KEY_OFF},
    {"pre_tokenizer", "individual_digits", KEY_SWITCH},
    {"post_processor", "type", KEY_READS},
    {"post_processor", "add_prefix_space", KEY_HARMLESS},
    {"post_processor", "trim_offsets", KEY_HARMLESS},
    {"post_processor", "use_regex", KEY_HARMLESS},
    {"post_processor", "processors", KEY_READS},
    {"post_processor", "single", KEY_READS},
    {"post_processor", "pair", KEY_HARMLESS},
    {"post_processor", "special_tokens", KEY_READS},
    {"decoder", "type", KEY_READS},
    {"decoder", "add_prefix_space", KEY_HARMLESS},
    {"decoder", "trim_offsets", KEY_HARMLESS},
    {"decoder", "use_regex", KEY_HARMLESS},
};
enum { TOKENIZER_KEY_COUNT = sizeof TOKENIZER_KEYS / sizeof TOKENIZER_KEYS[0] };

// ----------------------------------------------------------------------------------------
// Keys

static inline const cJSON *json_get(const cJSON *object, const char *key) {
    return cJSON_GetObjectItemCaseSensitive(object, key);
}

// Returns the text of a member, or NULL.
static inline const char *json_text(const cJSON *object, const char *key) {
    return cJSON_GetStringValue(json_get(object, key));
}

// Returns the byte that a character of a vocabulary represents, or -1 if it represents
// none. 188 bytes are themselves in Latin-1, the other 68 are U+0100 onwards.
static inline int character_to_byte(unsigned c) {
    if ((c >= 33 && c <= 126) || (c >= 161 && c <= 255 && c != 173)) return (int)c;
    if (c < 256) return -1;
    if (c < 256 + 33) return (int)c - 256;
    if (c < 256 + 67) return (int)c - 289 + 127;
    return c == 256 + 67 ? 173 : -1;
}

// Turns a name of the vocabulary into bytes and returns their count. A name with other
// characters is taken as it is: *named.
static inline size_t name_to_bytes(const char *name, char *out, bool *named) {
    size_t n = 0, bytes = strlen(name);
    *named = false;
    for (size_t i = 0, length; i < bytes; i += length) {
        unsigned c;
        length = utf8_read(name + i, bytes - i, &c);
        int byte = character_to_byte(c);
        *named = byte < 0;
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
    return !x || cJSON_IsNull(x) || cJSON_IsFalse(x) ||
           (cJSON_IsString(x) && !x->valuestring[0]) ||
           (cJSON_IsNumber(x) && x->valuedouble == 0.0);
}

// Refuses an object of that name with an unknown key, a key that is on but must be off, or
// a switch without true or false.
static inline bool keys_check(const cJSON *object, const char *name, const char *path,
                              Error *err) {
    const cJSON *member;
    cJSON_ArrayForEach(member, object) {
        const char *key = member->string ? member->string : "";
        int i = 0;
        while (i < TOKENIZER_KEY_COUNT && (strcmp(TOKENIZER_KEYS[i].object, name) != 0 ||
                                           strcmp(TOKENIZER_KEYS[i].key, key) != 0))
            i++;
        if (i == TOKENIZER_KEY_COUNT)
            return error_set(err, "%s: \"%.60s\" is no key of \"%s\" that is known", path,
                             key, name);
        KeyUse use = TOKENIZER_KEYS[i].use;
        if (use == KEY_OFF && !json_is_off(object, key))
            return error_set(err, "%s: \"%s\" of \"%s\" is on, which is not supported",
                             path, key, name);
        if (use == KEY_SWITCH && !cJSON_IsBool(member) && !cJSON_IsNull(member))
            return error_set(err, "%s: \"%s\" of \"%s\" is neither true nor false", path,
                             key, name);
    }
    return true;
}

// ----------------------------------------------------------------------------------------
// Tokens

// Makes the token of that name in a vocabulary: its bytes. If the name has a character that
// represents no byte, it is the name itself. The caller frees its bytes.
static inline Token token_of_name(const char *name) {
    Token x = {host_string(name), 0, -1, false, false, false, false};
    x.count = name_to_bytes(name, x.bytes, &x.named);
    return x;
}

// Returns the number of the vocabulary's token with that name, or -1.
static inline int token_by_name(const Tokenizer *tk, const char *name) {
    Token x = token_of_name(name);
    int number = token_find(tk, x.bytes, x.count, x.named);
    free(x.bytes);
    return number;
}

// Makes room for the vocabulary and `added` added tokens. A number that is too large is
// refused later.
static inline void tokenizer_make_room(Tokenizer *tk, const cJSON *vocab, size_t added) {
    size_t count = 0;
    for (const cJSON *item = vocab->child; item; item = item->next) {
        uint64_t number;
        bool is = json_whole(item, &number) && number < TOKENIZER_MAX_ID;
        if (is && number >= tk->numbers) tk->numbers = (size_t)number + 1;
        count++;
    }
    tk->numbers += added;  // an added token that is new has the next number
    tk->text = (Token *)host_alloc(tk->numbers, sizeof(Token));
    tk->tokens = (Token *)host_alloc(count + added, sizeof(Token));
}

// Reads {"name": number, ...}; all numbers differ.
static inline bool tokenizer_read_vocab(Tokenizer *tk, const cJSON *vocab, const char *path,
                                        Error *err) {
    for (const cJSON *item = vocab->child; item; item = item->next) {
        uint64_t number;
        if (!json_whole(item, &number) || number >= TOKENIZER_MAX_ID ||
            tk->text[number].bytes)
            return error_set(err,
                             "%s: the token \"%.99s\" needs a number of its own below %d",
                             path, item->string, TOKENIZER_MAX_ID);
        Token x = token_of_name(item->string);
        x.number = (int)number;
        tk->tokens[tk->vocabulary++] = tk->text[number] = x;
    }
    qsort(tk->tokens, tk->vocabulary, sizeof(Token), token_compare);
    return true;
}

// Reads an added token. next: the first number behind all others. The package tokenizers
// ignores "id": the token gets the vocabulary's number of its text, or else the next one.
// Refuses another "id". An empty text is no token.
static inline bool tokenizer_read_added(Tokenizer *tk, const cJSON *item, size_t *next,
                                        const char *path, Error *err) {
    const char *content = json_text(item, "content");
    uint64_t id;
    if (!keys_check(item, "added_tokens", path, err)) return false;
    if (!content || !json_whole(json_get(item, "id"), &id) || id >= TOKENIZER_MAX_ID)
        return error_set(err, "%s: the token \"%.99s\" needs a number of its own below %d",
                         path, content ? content : "", TOKENIZER_MAX_ID);
    if (strlen(content) > ADDED_MAX_BYTES)
        return error_set(err, "%s: the added token \"%.40s...\" has more than %d bytes",
                         path, content, ADDED_MAX_BYTES);
    if (!content[0]) return true;
    int known = token_by_name(tk, content);
    uint64_t number = known >= 0 ? (uint64_t)known : *next;
    if (id != number)
        return error_set(err,
                         "%s: the added token \"%.99s\" has \"id\" %d, but the package "
                         "tokenizers numbers it %d",
                         path, content, (int)id, (int)number);
    if (*next <= number) *next = (size_t)number + 1;
    Token x = {
        host_string(content), strlen(content), (int)number, false, false, false, false};
    x.late = cJSON_IsTrue(json_get(item, "normalized"));
    x.lstrip = cJSON_IsTrue(json_get(item, "lstrip"));
    x.rstrip = cJSON_IsTrue(json_get(item, "rstrip"));
    tk->tokens[tk->vocabulary + tk->added++] = tk->text[number] = x;
    tk->early += !x.late;
    return true;
}

// Reads [{"id": number, "content": text, ...}, ...], which may be missing. The early come
// before the late, both sorted.
static inline bool tokenizer_read_all_added(Tokenizer *tk, const cJSON *added,
                                            const char *path, Error *err) {
    const cJSON *item;
    size_t next = tk->vocabulary;
    cJSON_ArrayForEach(item, added) {
        if (!tokenizer_read_added(tk, item, &next, path, err)) return false;
    }
    Token *list = tk->tokens + tk->vocabulary;
    qsort(list, tk->added, sizeof(Token), token_compare_bytes);
    for (size_t i = 1; i < tk->added; i++) {
        if (token_compare_bytes(&list[i - 1], &list[i]) == 0)
            return error_set(err, "%s: \"added_tokens\" has \"%.99s\" twice", path,
                             list[i].bytes);
    }
    qsort(list, tk->added, sizeof(Token), token_compare);
    return true;
}

// Reads ["a b", ...] or [["a", "b"], ...], lowest rank first.
static inline bool tokenizer_read_merges(Tokenizer *tk, const cJSON *merges,
                                         const char *path, Error *err) {
    tk->merges =
        (TokenMerge *)host_alloc((size_t)cJSON_GetArraySize(merges), sizeof(TokenMerge));
    for (const cJSON *item = merges->child; item; item = item->next) {
        char *right = cJSON_GetStringValue(item), *left = strsep(&right, " ");
        TokenMerge merge = {-1, -1, (int)tk->merge_count, -1};
        if (cJSON_IsArray(item) && cJSON_GetArraySize(item) == 2) {
            left = cJSON_GetStringValue(item->child);
            right = cJSON_GetStringValue(item->child->next);
        }
        if (left && right) {
            char *both = (char *)host_alloc(strlen(left) + strlen(right) + 1, 1);
            merge.left = token_by_name(tk, left);
            merge.right = token_by_name(tk, right);
            merge.merged = token_by_name(tk, strcat(strcpy(both, left), right));
            free(both);
        }
        if (merge.left < 0 || merge.right < 0 || merge.merged < 0) {
            return error_set(
                err, "%s: \"merges\": merge %d is no pair of tokens that make a token",
                path, merge.rank);
        }
        tk->merges[tk->merge_count++] = merge;
    }
    qsort(tk->merges, tk->merge_count, sizeof(TokenMerge), merge_compare);
    for (size_t i = 1; i < tk->merge_count; i++) {
        if (merge_compare(&tk->merges[i - 1], &tk->merges[i]) == 0)
            return error_set(err, "%s: \"merges\" has merge %d twice", path,
                             tk->merges[i].rank);
    }
    return true;
}

// Reads "unk_token", the name of the token that replaces a byte without one.
static inline bool tokenizer_read_unknown(Tokenizer *tk, const cJSON *model,
                                          const char *path, Error *err) {
    const char *name = json_text(model, "unk_token");
    tk->fuse = cJSON_IsTrue(json_get(model, "fuse_unk"));
    if (!name)
        return json_is_off(model, "unk_token") ||
               error_set(err, "%s: \"unk_token\" is no text", path);
    tk->unknown = token_by_name(tk, name);
    bool all = true;
    for (int byte = 0; byte < 256; byte++) {
        const char text[] = {(char)byte};
        all = all && token_find(tk, text, 1, false) >= 0;
    }
    return all || tk->unknown >= 0 ||
           error_set(
               err,
               "%s: \"unk_token\" \"%.60s\" is not in the vocabulary, nor are all bytes",
               path, name);
}

// ----------------------------------------------------------------------------------------
// Tokens before a text

// Reads a TemplateProcessing: "single" has special tokens, then the text. "special_tokens"
// has their numbers.
static inline bool tokenizer_read_template(Tokenizer *tk, const cJSON *post,
                                           const char *path, Error *err) {
    const cJSON *piece, *number;
    bool text = false;
    cJSON_ArrayForEach(piece, json_get(post, "single")) {
        const char *sequence = json_text(json_get(piece, "Sequence"), "id");
        const char *special = json_text(json_get(piece, "SpecialToken"), "id");
        const cJSON *ids =
            json_get(json_get(json_get(post, "special_tokens"), special), "ids");
        bool here = sequence && strcmp(sequence, "A") == 0;
        if (text || (!here && !cJSON_IsArray(ids)))
            return error_set(
                err,
                "%s: \"single\" of \"post_processor\" is not special tokens and "
                "then the text",
                path);
        text = here;
        for (number = here ? NULL : ids->child; number; number = number->next) {
            uint64_t id;
            if (!json_whole(number, &id) || id >= tk->numbers || !tk->text[id].bytes)
                return error_set(
                    err,
                    "%s: \"post_processor\" begins a text with \"%.60s\", which is "
                    "no token",
                    path, special);
            tk->first = (int *)host_resize(tk->first, tk->first_count + 1, sizeof(int));
            tk->first[tk->first_count++] = (int)id;
        }
    }
    return text || error_set(err, "%s: \"single\" of \"post_processor\" has no text", path);
}

// Reads "post_processor": ByteLevel, which changes no token, one TemplateProcessing, or a
// list of these.
static inline bool tokenizer_read_post(Tokenizer *tk, const cJSON *post, const char *path,
                                       Error *err) {
    const char *type = json_text(post, "type");
    const cJSON *list = json_get(post, "processors"), *item;
    if (!post || cJSON_IsNull(post)) return true;
    bool is_template = type && strcmp(type, "TemplateProcessing") == 0 &&
                       tk->first_count == 0;
    bool is_list = type && strcmp(type, "Sequence") == 0 && cJSON_IsArray(list);
    if (!is_template && !is_list && (!type || strcmp(type, "ByteLevel") != 0))
        return error_set(err,
                         "%s: \"post_processor\" %.40s is not supported: ByteLevel and one "
                         "TemplateProcessing are",
                         path, type ? type : "?");
    if (!keys_check(post, "post_processor", path, err)) return false;
    if (is_template) return tokenizer_read_template(tk, post, path, err);
    if (!is_list) return true;
    cJSON_ArrayForEach(item, list) {
        if (!tokenizer_read_post(tk, item, path, err)) return false;
    }
    return true;
}

// Checks the keys of the file and the values that leave us no choice.
static inline bool tokenizer_check(const cJSON *root, const char *path, Error *err) {
    const cJSON *model = json_get(root, "model"), *decoder = json_get(root, "decoder");
    const char *version = json_text(root, "version");
    const char *type = json_text(model, "type"), *decodes = json_text(decoder, "type");
    if (!keys_check(root, "tokenizer", path, err)) return false;
    if (!json_is_off(root, "version") && (!version || strcmp(version, "1.0") != 0))
        return error_set(err, "%s: \"version\" is not 1.0", path);
    // GPT-2's own file has no type.
    bool is_bpe = type ? strcmp(type, "BPE") == 0 : json_get(model, "merges") != NULL;
    if (!is_bpe)
        return error_set(err, "%s: \"model\" %.40s is not supported: only BPE is", path,
                         type ? type : "?");
    if (!json_is_off(root, "decoder") && (!decodes || strcmp(decodes, "ByteLevel") != 0))
        return error_set(err, "%s: \"decoder\" %.40s is not supported: only ByteLevel is",
                         path, decodes ? decodes : "?");
    return keys_check(model, "model", path, err) &&
           keys_check(decoder, "decoder", path, err);
}

// Compiles a regular expression. Returns NULL with an error message if PCRE2 cannot.
static inline pcre2_code *tokenizer_compile(const char *pattern, const char *path,
                                            Error *err) {
    int failure;
    size_t at;
    const uint32_t flags = PCRE2_UTF | PCRE2_UCP;
    pcre2_code *code =
        pcre2_compile((PCRE2_SPTR)pattern, strlen(pattern), flags, &failure, &at, NULL);
    if (!code)
        error_set(err, "%s: PCRE2 cannot split text by \"%.60s\" (its error %d)", path,
                  pattern, failure);
    return code;
}

// Reads a tokenizer.json whose text `pattern`, a regular expression, splits into words.
// Refuses one whose tokens we would get wrong. tokenizer_free in either case.
static inline bool tokenizer_read(Tokenizer *tk, const cJSON *root, const char *pattern,
                                  const char *path, Error *err) {
    const cJSON *model = json_get(root, "model"), *added = json_get(root, "added_tokens");
    const cJSON *vocab = json_get(model, "vocab"), *merges = json_get(model, "merges");
    if (!tokenizer_check(root, path, err)) return false;
    if (!cJSON_IsObject(vocab) || !vocab->child || !cJSON_IsArray(merges) ||
        (added && !cJSON_IsArray(added)))
        return error_set(
            err, "%s: vocab, merges or added_tokens is missing, empty or malformed", path);
    tk->path = path;
    tk->whole = cJSON_IsTrue(json_get(model, "ignore_merges"));
    tk->unknown = -1;
    tokenizer_make_room(tk, vocab, (size_t)cJSON_GetArraySize(added));
    tk->words = tokenizer_compile(pattern, path, err);
    return tk->words && tokenizer_read_vocab(tk, vocab, path, err) &&
           tokenizer_read_merges(tk, merges, path, err) &&
           tokenizer_read_unknown(tk, model, path, err) &&
           tokenizer_read_all_added(tk, added, path, err) &&
           tokenizer_read_post(tk, json_get(root, "post_processor"), path, err);
}

// Refuses a tokenizer.json that splits or normalizes text in another way than GPT-2's.
static inline bool tokenizer_check_words(const cJSON *root, const char *path, Error *err) {
    const cJSON *splitter = json_get(root, "pre_tokenizer");
    const char *type = json_text(splitter, "type");
    bool same = type && strcmp(type, "ByteLevel") == 0 &&
                json_is_off(splitter, "add_prefix_space") &&
                !cJSON_IsFalse(json_get(splitter, "use_regex")) &&
                json_is_off(root, "normalizer");
    if (same) return keys_check(splitter, "pre_tokenizer", path, err);
    return error_set(
        err,
        "%s is no byte-level BPE like GPT-2's: its \"pre_tokenizer\" or "
        "\"normalizer\" is another, such as with \"add_prefix_space\" or without "
        "\"use_regex\"",
        path);
}

// ----------------------------------------------------------------------------------------
// Files

// Finds the tokenizer.json of a model with vocabulary V: in the folder of its weights, or
// else in the folder that its training began with. path is "" if there is none and a token
// of the model is a byte. Takes any entry of that name; a link that leads nowhere is
// refused when it is opened.
static inline bool tokenizer_beside(char path[PATH_MAX], const char *weights,
                                    const char *began, size_t V, Error *err) {
    const char *const folders[] = {weights, began};
    struct stat info;
    for (int i = 0; i < 2; i++) {
        if (folders[i] && !path_print(path, err, "%s/tokenizer.json", folders[i]))
            return false;
        if (folders[i] && lstat(path, &info) == 0) return true;
    }
    bool slow = false;  // the files of a tokenizer in Python
    if (weights && !path_print(path, err, "%s/merges.txt", weights)) return false;
    if (weights) slow = access(path, F_OK) == 0;
    path[0] = '\0';
    if (V == BYTE_VOCABULARY) return true;
    return error_set(err,
                     "the model's vocabulary has %zu tokens, so that text needs a "
                     "tokenizer.json, and %s has %s: give one with --tokenizer, or set "
                     "--sample-every 0",
                     V, weights ? weights : "this run",
                     slow ? "only vocab.json and merges.txt, of which AutoTokenizer of "
                            "transformers saves one"
                          : "none");
}

// Opens a tokenizer.json. Without a path a token is a byte, and 256 is <|endoftext|>. On
// failure nothing is left to free. The path must outlive the tokenizer.
static inline bool tokenizer_open(Tokenizer *tk, const char *path, Error *err) {
    memset(tk, 0, sizeof *tk);
    if (path) {
        cJSON *root = json_read(path, TOKENIZER_MAX_FILE, err);
        bool ok = root && tokenizer_check_words(root, path, err) &&
                  tokenizer_read(tk, root, BPE_WORD, path, err);
        cJSON_Delete(root);
        if (!ok) tokenizer_free(tk);
        return ok;
    }
    tk->unknown = -1;
    tk->numbers = BYTE_VOCABULARY;
    tk->text = (Token *)host_alloc(BYTE_VOCABULARY, sizeof(Token));
    tk->tokens = (Token *)host_alloc(BYTE_VOCABULARY, sizeof(Token));
    for (int i = 0; i < BYTE_VOCABULARY; i++) {
        const char byte[] = {(char)i, '\0'};
        bool end = i == 256;
        size_t count = end ? strlen(END_OF_TEXT) : 1;
        Token x = {
            host_string(end ? END_OF_TEXT : byte), count, i, false, false, false, false};
        tk->tokens[i] = tk->text[i] = x;
    }
    tk->vocabulary = 256;
    tk->added = tk->early = 1;
    return true;
}

#endif
